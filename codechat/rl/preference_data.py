"""Preferences as token ids: pairs (prompt, chosen, rejected) and single completions with a label, read from files or made from rollouts.

Rows of `preferences.SPLIT.jsonl`, in either form:

    {"prompt": "..." or [messages], "chosen": "...", "rejected": "..."}
    {"prompt": "..." or [messages], "completion": "...", "label": true}

chosen, rejected and completion may also be lists of messages that end in the assistant's, as the hub's preference sets have them (their
messages before the last are then the prompt, unless there is a `prompt` of messages). A batch is a `rollout.RolloutBatch` with the pair as a
group of two whose rewards are 1 and 0 (or a group of one whose reward is the label), so that packing and scoring are those of rollouts.

Left out: multi-turn completions, ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from codechat.core.errors import DataError, MissingFile
from codechat.data.sources import read_jsonl
from codechat.models.generate import Completion
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


def read_preferences(
    directory: Path | str, split: str, tokenizer: Tokenizer, tags: str, block_size: int, limit: int | None = None
) -> RolloutBatch:
    """All rows of a split. MissingFile without one; DataError that names file and line for a row that is neither form, pairs mixed with single
    completions, a completion that equals its rival, or one that does not fit the block."""
    path = Path(directory) / f"preferences.{split}.jsonl"
    if not path.is_file():
        raise MissingFile(
            f"{path} does not exist; it holds rows of prompt, chosen and rejected, or of prompt, completion and label; "
            "or leave --data-dir of preferences out and set --task"
        )
    rows = []
    for number, row in read_jsonl(path):
        rows.append(_encoded(row, tokenizer, tags, block_size, f"{path}:{number}"))
        if len(rows[-1][1]) != len(rows[0][1]):
            raise DataError(
                f"{path}:{number} is a {'pair' if len(rows[-1][1]) == 2 else 'single completion'}, the first row is not; split the file"
            )
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise DataError(f"{path} is empty; at least one row is required")
    return _batch(rows, split)


def _encoded(
    row: dict[str, Any], tokenizer: Tokenizer, tags: str, block_size: int, where: str
) -> tuple[list[dict], list[list[int]], list[float], list[int]]:
    """(messages, completions as ids, rewards, prompt ids) of a row."""
    if {"chosen", "rejected"} <= row.keys():
        names, rewards = ("chosen", "rejected"), [1.0, 0.0]
    elif {"completion", "label"} <= row.keys() and isinstance(row["label"], (bool, int)):
        names, rewards = ("completion",), [float(bool(row["label"]))]
    else:
        raise DataError(
            f"{where} has the columns {sorted(row)}; required: prompt, chosen and rejected, or prompt, completion and label (true or false)"
        )
    parts = [_split(row[name], row.get("prompt"), where) for name in names]
    if any(messages != parts[0][0] for messages, _ in parts):
        raise DataError(f"{where}: chosen and rejected answer different prompts; one prompt is needed")
    messages = parts[0][0]
    if len(parts) == 2 and parts[0][1] == parts[1][1]:
        raise DataError(f"{where}: chosen and rejected are the same; leave the row out")
    prompt = chat.prompt(messages, tokenizer, tags)
    completions = [chat.completion_ids(text, tokenizer, tags) for _, text in parts]
    longest = len(prompt) + max(map(len, completions))
    if longest > block_size:
        raise DataError(
            f"{where} takes {longest} tokens; the model's block_size is {block_size}; shorten or leave out the row"
        )
    return messages, completions, rewards, prompt


def _split(value: Any, prompt: Any, where: str) -> tuple[list[dict[str, str]], str]:
    """The messages before the completion, and its text."""
    if isinstance(value, list):
        if not value or not isinstance(value[-1], dict) or value[-1].get("role") != "assistant":
            raise DataError(f"{where}: a list of messages must end in the assistant's")
        return (prompt if isinstance(prompt, list) else value[:-1]), value[-1]["content"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(value, str) or not isinstance(messages, list):
        raise DataError(
            f"{where}: prompt is a {type(prompt).__name__} and a completion a {type(value).__name__}; both must be text, or lists of messages"
        )
    return messages, value


def _batch(rows: Sequence[tuple[list[dict], list[list[int]], list[float], list[int]]], split: str) -> RolloutBatch:
    problems = [Problem(f"preference-{split}-{i}", messages, None, split) for i, (messages, *_) in enumerate(rows)]
    completions = [Completion(ids, [0.0] * len(ids), "stop") for _, found, *_ in rows for ids in found]
    rewards = torch.tensor([row[2] for row in rows])
    scores = [Score(float(r), "liked" if r else "disliked", {}, bool(r)) for r in rewards.flatten()]
    return RolloutBatch(
        problems, [row[3] for row in rows], completions, [""] * len(completions), scores, rewards, rewards.shape[1]
    )


def pairs_from_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """The best and the worst completion of every group that disagrees, on exactly the ids that were sampled; DataError where none does, and for
    episodes of several turns: what an environment said would be preferred too."""
    if batch.turns:
        raise DataError(
            "these completions are episodes of several turns; preferences take answers to one prompt; choose a task without an environment, "
            "or train on episodes with reinforce or grpo"
        )
    rows = []
    for p, rewards in enumerate(batch.rewards):
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        ids = [batch.completions[p * batch.group_size + g].ids for g in (best, worst)]
        if rewards[best] > rewards[worst] and all(ids):
            rows.append((batch.problems[p].messages, ids, [1.0, 0.0], batch.prompts[p]))
    if not rows:
        raise DataError(
            f"none of {len(batch.problems)} groups holds two completions of different reward; raise --group-size, or take easier problems"
        )
    return _batch(rows, "train")


def mismatched(batch: RolloutBatch, block_size: int) -> RolloutBatch:
    """Every prompt with the completions of the next one, cut where the block ends: samples for KTO's reference point."""
    N, G = len(batch.completions), batch.group_size
    moved = [batch.completions[(i + G) % N] for i in range(N)]
    room = [block_size - len(batch.prompts[i // G]) for i in range(N)]
    cut = [Completion(c.ids[:n], c.logprobs[:n], c.stop) for c, n in zip(moved, room)]
    return RolloutBatch(batch.problems, batch.prompts, cut, batch.texts, batch.scores, batch.rewards, G)
