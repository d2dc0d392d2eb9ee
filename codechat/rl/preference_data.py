"""Preferences as token ids: pairs (prompt, chosen, rejected) and single completions with a label, from files or from rollouts.

Rows of `preferences.SPLIT.jsonl`, in either form:

    {"prompt": "..." or [messages], "chosen": "...", "rejected": "..."}
    {"prompt": "..." or [messages], "completion": "...", "label": true}

chosen, rejected and completion may also be lists of messages that end with the assistant's, as in the hub's preference sets; their earlier
messages are then the prompt, unless `prompt` is a list of messages. A batch is a `rollout.RolloutBatch` in which a pair is a group of two with
rewards 1 and 0 (a single completion: a group of one with its label as reward), so that rollouts and preferences share packing and scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
    """All rows of a split, at most `limit`. MissingFile without a file; DataError with file and line for a row of neither form, a mix of pairs and
    single completions, equal completions of a pair, or a row longer than the block."""
    path = Path(directory) / f"preferences.{split}.jsonl"
    if not path.is_file():
        raise MissingFile(
            f"{path} does not exist; it must hold rows of prompt, chosen and rejected, or of prompt, completion and label; "
            "or train on rollouts: set --task without --data-dir"
        )
    rows: list[Row] = []
    for number, row in read_jsonl(path):
        rows.append(_encoded(row, tokenizer, tags, block_size, f"{path}:{number}"))
        if len(rows[-1].rewards) != len(rows[0].rewards):
            kind = "pair" if len(rows[-1].rewards) == 2 else "single completion"
            raise DataError(f"{path}:{number} is a {kind}, the first row is not; split the file")
        if limit is not None and len(rows) == limit:
            break
    return _batch(rows, split)


class Row(NamedTuple):
    """A group: its messages, their ids, and the ids and rewards of its one or two completions."""

    messages: list[dict]
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


def _encoded(row: dict[str, Any], tokenizer: Tokenizer, tags: str, block_size: int, where: str) -> Row:
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
        raise DataError(f"{where}: chosen and rejected have different prompts; one prompt is required")
    messages = parts[0][0]
    if len(parts) == 2 and parts[0][1] == parts[1][1]:
        raise DataError(f"{where}: chosen and rejected are the same; delete the row")
    prompt = chat.prompt(messages, tokenizer, tags)
    completions = [chat.completion_ids(text, tokenizer, tags) for _, text in parts]
    longest = len(prompt) + max(map(len, completions))
    if longest > block_size:
        raise DataError(
            f"{where} takes {longest} tokens; the model's block_size is {block_size}; shorten or delete the row"
        )
    return Row(messages, prompt, completions, rewards)


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


def _batch(rows: Sequence[Row], split: str) -> RolloutBatch:
    problems = [Problem(f"preference-{split}-{i}", row.messages, None, split) for i, row in enumerate(rows)]
    completions = [Completion(ids, [0.0] * len(ids), "stop") for row in rows for ids in row.completions]
    scores = [Score(r, "liked" if r else "disliked", {}, bool(r)) for row in rows for r in row.rewards]
    prompts, texts = [row.prompt for row in rows], [""] * len(completions)
    longest = max(len(row.prompt) - 1 + max(map(len, row.completions)) for row in rows)
    return RolloutBatch(problems, prompts, completions, texts, scores, len(rows[0].rewards), longest_row=longest)


def pairs_from_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """The best and the worst completion of every group with different rewards, as the ids that were sampled. DataError if no group has any, and
    for episodes, whose completions hold what an environment said."""
    if batch.turns:
        raise DataError(
            "these completions are episodes of several turns; preferences need answers to one prompt; choose a task without an environment, "
            "or train on episodes with reinforce or grpo"
        )
    rows = []
    for p, rewards in enumerate(batch.rewards):
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        ids = [batch.completions[p * batch.group_size + g].ids for g in (best, worst)]
        if rewards[best] > rewards[worst] and all(ids):
            rows.append(Row(batch.problems[p].messages, batch.prompts[p], ids, [1.0, 0.0]))
    if not rows:
        raise DataError(
            f"none of {len(batch.problems)} groups holds two completions of different reward; raise --group-size, or take easier problems"
        )
    return _batch(rows, "train")


def mismatched(batch: RolloutBatch, block_size: int) -> RolloutBatch:
    """Every prompt with the completions of the next prompt, cut to fit the block: samples for KTO's reference point."""
    N, G = len(batch.completions), batch.group_size
    moved = [batch.completions[(i + G) % N] for i in range(N)]
    room = [block_size - len(batch.prompts[i // G]) for i in range(N)]
    cut = [Completion(c.ids[:n], c.logprobs[:n], c.stop) for c, n in zip(moved, room)]
    longest = max(len(batch.prompts[i // G]) - 1 + len(c.ids) for i, c in enumerate(cut))
    return replace(batch, completions=cut, longest_row=longest)
