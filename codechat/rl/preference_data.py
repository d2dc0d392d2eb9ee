"""Preferences as token ids: pairs (prompt, chosen, rejected) and single completions with a label, from files or from
rollouts.

Rows of `preferences.SPLIT.jsonl`, in either form:

    {"prompt": "..." or [messages], "chosen": "...", "rejected": "..."}
    {"prompt": "..." or [messages], "completion": "...", "label": true}

chosen, rejected and completion may also be messages that end with the assistant's and begin after the prompt, or with
it. A pair is a group of two of a `rollout.RolloutBatch` with rewards 1 and 0 (a single completion: a group of one with
its label as reward), so that rollouts and preferences share packing and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats
from codechat.data.sources import read_jsonl
from codechat.models.generate import Completion
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


class Row(NamedTuple):
    """A group: its messages, their ids, and the ids and rewards of its one or two completions."""

    messages: list[dict]
    prompt: list[int]
    completions: list[list[int]]
    rewards: list[float]


def read_preferences(
    directory: Path | str, split: str, tokenizer: Tokenizer, tags: str, block_size: int, limit: int | None = None
) -> RolloutBatch:
    """All rows of a split, at most `limit`. MissingFile without a file; DataError with file and line for a row that
    cannot be learned from."""
    path = Path(directory) / f"preferences.{split}.jsonl"
    if not path.is_file():
        needed = "rows of prompt, chosen and rejected, or of prompt, completion and label"
        raise MissingFile(f"{path} does not exist; required: {needed}; or set --task without --data-dir")
    rows: list[Row] = []
    for number, row in read_jsonl(path):
        rows.append(_encoded(row, tokenizer, tags, block_size, f"{path}:{number}"))
        if len(rows[-1].rewards) != len(rows[0].rewards):
            raise DataError(f"{path}:{number} is a pair and the first row is not, or the reverse; split the file")
        if len(rows) == limit:
            break
    return _batch(rows, split)


def _encoded(row: dict[str, Any], tokenizer: Tokenizer, tags: str, block_size: int, where: str) -> Row:
    has = {name for name, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        answers, rewards = [row["chosen"], row["rejected"]], [1.0, 0.0]
    elif "label" in has and has & {"completion", "messages"}:
        if type(row["label"]) not in (bool, int) or row["label"] not in (0, 1):
            raise DataError(f"{where} has the label {row['label']!r}; required is true, false, 0 or 1; correct it")
        answers, rewards = [row["completion" if "completion" in has else "messages"]], [float(row["label"])]
    else:
        required = "prompt, chosen and rejected, or prompt, completion and label (true or false)"
        raise DataError(f"{where} has the columns {sorted(has)}; required: {required}")
    sides = [_conversation(row, answer, where) for answer in answers]
    messages = sides[0][:-1]
    if sides[-1][:-1] != messages:
        raise DataError(f"{where}: what comes before the last answer differs in chosen and rejected; make it equal")
    if len(sides) == 2 and sides[0] == sides[1]:
        raise DataError(f"{where}: chosen and rejected are the same; delete the row")
    prompt = chat.prompt(messages, tokenizer, tags)
    completions = [chat.completion_ids(side[-1]["content"], tokenizer, tags) for side in sides]
    if (longest := len(prompt) + max(map(len, completions))) > block_size:
        raise DataError(f"{where} takes {longest} tokens; block_size is {block_size}; shorten or delete the row")
    return Row(messages, prompt, completions, rewards)


def _conversation(row: dict[str, Any], answer: Any, where: str) -> list[dict[str, str]]:
    """The messages of the prompt and an answer; the last one is the assistant's, and another role's is before it."""
    columns = ("prompt", "conversations", "messages")
    prompt = next((row[c] for c in columns if row.get(c) is not None and row[c] is not answer), None)
    if prompt is None and (request := chat_formats.request_text(row)):
        prompt = [*chat_formats.turns_before(row, where), {"role": "user", "content": request}]
    turns = chat_formats.continued(prompt, answer, where)
    messages = chat_formats.messages_of(row | {"messages": turns}, where)
    if isinstance(messages, str):
        raise DataError(f"{where} cannot be read ({messages}); correct or delete the row")
    if [m["role"] == "assistant" for m in messages[-2:]] != [False, True]:
        raise DataError(f"{where}: an answer must end in one message of the assistant, after another role's")
    return messages


def _batch(rows: Sequence[Row], split: str) -> RolloutBatch:
    problems = [Problem(f"preference-{split}-{i}", row.messages, None, split) for i, row in enumerate(rows)]
    completions = [Completion(ids, [0.0] * len(ids), "stop") for row in rows for ids in row.completions]
    scores = [Score(r, "liked" if r else "disliked", {}, bool(r)) for row in rows for r in row.rewards]
    texts, size = [""] * len(completions), len(rows[0].rewards)
    return with_longest_row(RolloutBatch(problems, [row.prompt for row in rows], completions, texts, scores, size))


def with_longest_row(batch: RolloutBatch) -> RolloutBatch:
    tokens = (len(batch.prompts[i // batch.group_size]) - 1 + len(c.ids) for i, c in enumerate(batch.completions))
    return replace(batch, longest_row=max(tokens))


def pairs_from_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """The best and the worst completion of every group with different rewards, as the ids that were sampled. DataError
    if no group has any, and for episodes, whose completions hold what an environment said."""
    if batch.turns:
        raise DataError("these completions are episodes; take a task without an environment, or reinforce or grpo")
    rows = []
    for p, rewards in enumerate(batch.rewards):
        best, worst = int(rewards.argmax()), int(rewards.argmin())
        ids = [batch.completions[p * batch.group_size + g].ids for g in (best, worst)]
        if rewards[best] > rewards[worst] and all(ids):
            rows.append(Row(batch.problems[p].messages, batch.prompts[p], ids, [1.0, 0.0]))
    if not rows:
        problem = f"none of {len(batch.problems)} groups holds two completions of different reward"
        raise DataError(f"{problem}; raise --group-size, or take easier problems")
    return _batch(rows, "train")


def mismatched(batch: RolloutBatch, block_size: int) -> RolloutBatch:
    """Every prompt with the completions of the next prompt, cut to fit the block: samples for KTO's reference point."""
    N, G = len(batch.completions), batch.group_size
    moved = [batch.completions[(i + G) % N] for i in range(N)]
    room = [block_size - len(batch.prompts[i // G]) for i in range(N)]
    cut = [Completion(c.ids[:n], c.logprobs[:n], c.stop) for c, n in zip(moved, room)]
    return with_longest_row(replace(batch, completions=cut))
