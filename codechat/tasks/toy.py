"""A task that a tiny model learns from scratch in under a minute: write bytes of the class that
the prompt names.

The reward is the share of a completion's eight characters in the class. An untrained policy
over the `bytes` tokenizer scores about 0.1; a policy that ignores its prompt cannot pass 0.25.
Every split holds the same four prompts."""

import re
import string
from typing import Any

from codechat.tasks.base import BaseTask, Problem, Score, check_split
from codechat.text.tool_calls import TAGS

COMPLETION_LENGTH = 8
TOY_MODEL: dict[str, Any] = {"depth": 2, "n_embd": 64, "n_head": 2, "block_size": 64}
CLASSES = {
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "punct": string.punctuation,
    "digit": string.digits,
}
# A tag is one token and counts as one miss. Spelled out, its letters would be an easy reward
# for `lower`. The last is `tokenizer.END_OF_TEXT`, whose module loads numpy; --help imports this one.
_TAG = re.compile("|".join(map(re.escape, (*TAGS, "<|endoftext|>"))))


class ToyTask(BaseTask):
    """Tiers: none (no character fits), some, all."""

    name = "toy"
    tiers: tuple[str, ...] = ("none", "some", "all")
    no_stop = True

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """`limit` problems (4 by default), the classes in turn. seed: only decides which class
        comes first."""
        check_split(split)
        names = list(CLASSES)
        problems = []
        for i in range(len(names) if limit is None else limit):
            name = names[(i + seed) % len(names)]
            problems.append(
                Problem(f"toy-{split}-{i}", [{"role": "user", "content": name}], name, split)
            )
        return problems

    def score(self, problem: Problem, completion: str) -> Score:
        """The share of characters in the class. A text shorter than COMPLETION_LENGTH is filled
        up with misses."""
        characters = _TAG.sub("\0", completion)
        fitting = sum(c in CLASSES[problem.gold] for c in characters)
        share = fitting / max(COMPLETION_LENGTH, len(characters))
        tier = "some"
        if share == 1:
            tier = "all"
        elif not fitting:
            tier = "none"
        return Score(share, tier, {"fitting": fitting, "length": len(characters)}, share == 1)

    def gold(self, problem: Problem) -> str:
        return CLASSES[problem.gold][:COMPLETION_LENGTH]
