"""A task that is learned from nothing in under a minute: write bytes of the class that the prompt names.

The reward is the share of a completion's eight characters that belong to the class, so an untrained policy
over the `bytes` tokenizer gets about 0.1 and there is a gradient from the first step. Four prompts make it
conditional: a policy that ignores its prompt cannot pass 0.25. Use TOY_MODEL, the `bytes` tokenizer,
COMPLETION_LENGTH new tokens and no stop sequence (`ToyTask.no_stop`); at a learning rate of 3e-3, 80 steps of
4 x 16 rollouts reach 0.95.

Every split holds the same four prompts: there is nothing to generalise to.
"""

from __future__ import annotations

import re
import string
from typing import Any

from codechat.core.errors import ConfigError
from codechat.tasks.base import SPLITS, Message, Problem, Score
from codechat.text import chat
from codechat.text.tokenizer import END_OF_TEXT

COMPLETION_LENGTH = 8
CLASSES = {
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "punct": string.punctuation,
    "digit": string.digits,
}
# One token that is no byte is one miss; spelled out, its letters would be an easy reward for `lower`.
_MARK = re.compile("|".join(map(re.escape, (*chat.TAGS, END_OF_TEXT))))
TOY_MODEL: dict[str, Any] = {"depth": 2, "n_embd": 64, "n_head": 2, "block_size": 64}
# What every RL loop's `--preset toy` sets: the task and a model of its size; the algorithm keeps its defaults.
TOY_RUN: dict[str, Any] = {
    "task": "toy",
    "tokenizer": "bytes",
    "model": TOY_MODEL,
    "max_new_tokens": COMPLETION_LENGTH,
    "lr": 4e-3,
    "device_batch_size": 4,
    "max_steps": 120,
    "warmup_steps": 1,
    "eval_every": 0,
    "eval_examples": 4,
}


class ToyTask:
    """Tiers: none (no character fits), some, all."""

    name = "toy"
    tiers = ("none", "some", "all")
    max_reward = 1.0
    no_stop = True

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """`limit` problems (4 by default), the classes in turn; seed only shifts which comes first."""
        if split not in SPLITS:
            raise ConfigError(f"split {split!r} is unknown; splits are {', '.join(SPLITS)}")
        names = list(CLASSES)
        picked = [names[(i + seed) % len(names)] for i in range(len(names) if limit is None else limit)]
        return [
            Problem(f"toy-{split}-{i}", [{"role": "user", "content": name}], name, split)
            for i, name in enumerate(picked)
        ]

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        """Share of characters in the class; a text shorter than COMPLETION_LENGTH counts as if filled up with
        misses."""
        characters = _MARK.sub("\0", completion)
        fitting = sum(c in CLASSES[problem.gold] for c in characters)
        share = fitting / max(COMPLETION_LENGTH, len(characters))
        tier = "none" if not fitting else "all" if share == 1 else "some"
        return Score(share, tier, {"fitting": fitting, "length": len(characters)}, share == 1)

    def gold(self, problem: Problem) -> str:
        return CLASSES[problem.gold][:COMPLETION_LENGTH]
