"""Function-calling problems from files: `codechat data`'s, glaive's, BFCL's and the original project's.

    glaive    {system, chat}: the first assistant call is gold; without one, no call is correct
    problems  {id, messages, gold: {name, arguments} | null, split}
    bfcl      {question, functions, ground_truth}: evaluation only, every row is in split "test"
    original  {prompt, gt_name, gt_args}: prompt is rendered text with tags

The columns of the first row give a file's format. Of a directory, the files funcall.*.jsonl are read. In BFCL an
argument's ground truth is the list of acceptable values, with "" if it may be omitted; rows with a `source` hold plain
values instead. A row without a split gets one from the hash of its prompt, as in `codechat data`.

Every row is kept, skipped by a rule, or lost for a declared reason. Too many losses are an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError
from codechat.data.chat_formats import glaive_turns, messages_of, schemas
from codechat.data.sources import Ledger, digest, local_rows
from codechat.data.synthetic import split_of
from codechat.tasks.base import SPLITS, Message, Problem
from codechat.tasks.funcall.staircase import ABSENT, ways_of
from codechat.text import chat

Row = dict[str, Any]
_TURN = re.compile(r"<\|(system|user|assistant|function_response)\|>\n(.*?)\n<\|end\|>\n", re.DOTALL)


def read(path: Path, tools_style: str = "compact") -> tuple[list[Problem], Ledger]:
    """Problems of a jsonl or parquet file or of a directory, and the counts of its rows.

    tools_style: how prompts list the tools of glaive and BFCL rows, "compact" or "json" (chat.tools_prompt).
    MissingFile; DataError for an unknown format, a damaged file, or too many losses."""
    ledger, problems = Ledger(path.name), []
    for file in sorted(path.glob("funcall.*.jsonl")) or [path]:
        convert = None
        for number, row in enumerate(local_rows(file)):
            convert = convert or _converter(row, file, tools_style)
            problem = convert(row, f"{file.stem}-{number}", ledger)
            if problem is not None:
                ledger.keep()
                problems.append(problem)
    ledger.check()
    return problems, ledger


def _converter(row: Row, path: Path, tools_style: str) -> Callable[[Row, str, Ledger], Problem | None]:
    formats = (
        ({"system", "chat"}, partial(_from_glaive, tools_style)),
        ({"messages", "gold"}, _from_problem),
        ({"prompt", "gt_name", "gt_args"}, _from_original),
        ({"question", "functions", "ground_truth"}, partial(_from_bfcl, tools_style)),
    )
    for columns, convert in formats:
        if columns <= row.keys():
            return convert
    known = " or ".join("{" + ", ".join(sorted(columns)) + "}" for columns, _ in formats)
    raise DataError(f"{path} has the columns {sorted(row)}; required: {known}; rename them")


def prompt_split(messages: list[Message]) -> str:
    """train, select or test by the hash of the prompt: equal prompts are in the same split."""
    return split_of(digest(repr(messages)))


def _from_glaive(tools_style: str, row: Row, name: str, ledger: Ledger) -> Problem | None:
    messages = messages_of(row, name, tools_style)
    if isinstance(messages, str):
        return ledger.lose(messages)
    raw = glaive_turns(row["chat"])
    answers = [i for i, m in enumerate(raw) if m["role"] == "assistant"]
    if not answers:
        return ledger.lose("no_assistant")
    at = next((i for i in answers if chat.CALL_TAG in raw[i]["content"]), answers[0])
    calls, prompt = chat.parse_calls(raw[at]["content"]), messages[: at + len(messages) - len(raw)]
    gold = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
    own = {"gold_text": raw[at]["content"]} if len(calls) == 1 else {}
    meta = {"tools_present": "{" in row["system"], **own}
    return Problem(str(row.get("id", name)), prompt, gold, prompt_split(prompt), meta)


def _from_problem(row: Row, name: str, ledger: Ledger) -> Problem | None:
    gold, split, messages = row["gold"], row.get("split"), row["messages"]
    fits = isinstance(messages, list) and messages and all(map(_is_message, messages))
    call = _gold(gold)
    if not fits or split not in (None, *SPLITS) or not (gold is None or call):
        return ledger.lose("bad_row")
    meta = row.get("meta") if isinstance(row.get("meta"), Mapping) else {}
    return Problem(str(row.get("id", name)), messages, call, split or prompt_split(messages), meta)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping) and message.get("role") in chat.ROLES and isinstance(message.get("content"), str)
    )


def _gold(gold: Any) -> dict[str, Any] | None:
    """The call of a row's gold, with "acceptable" as it is; None where it cannot be read."""
    if not isinstance(gold, Mapping):
        return None
    kept = {"acceptable": gold["acceptable"]} if gold.get("acceptable") is not None else {}
    call = chat.read_call({key: value for key, value in gold.items() if key != "acceptable"})
    return {"name": call.name, "arguments": call.arguments, **kept} if call.form in chat.READABLE else None


def _from_original(row: Row, name: str, ledger: Ledger) -> Problem | None:
    gold = _gold({"name": row["gt_name"], "arguments": row["gt_args"]})
    turns = _TURN.findall(row["prompt"]) if isinstance(row["prompt"], str) else []
    if not turns or gold is None:
        return ledger.lose("bad_row" if turns else "unreadable_prompt")
    messages = [{"role": role.removesuffix("_response"), "content": content} for role, content in turns]
    return Problem(name, messages, gold, prompt_split(messages), {"tools_present": True})


def _from_bfcl(tools_style: str, row: Row, name: str, ledger: Ledger) -> Problem | None:
    question, functions, truth = (decoded(row[k]) for k in ("question", "functions", "ground_truth"))
    category = str(row.get("category", ""))
    if len(truth) > 1:
        return ledger.skip("several gold calls")
    if not truth and category.endswith("_relevance"):
        return ledger.skip("a call is due but not stated")
    messages = conversation(question, functions, tools_style)
    gold = None if not truth else _gold(truth[0]) if "source" in row else bfcl_gold(truth[0])
    if truth and gold is None:
        return ledger.lose("bad_row")
    meta = {"category": category, "tools_present": True}
    return Problem(str(row.get("id", name)), messages, gold, "test", meta)


def conversation(question: list[Any], functions: list[Row], tools_style: str) -> list[Message]:
    """The messages of BFCL's question. The tools precede its own system text. Of several turns, the first."""
    while question and isinstance(question[0], list):
        question = question[0]
    given = "".join(f"\n\n{m['content']}" for m in question if m["role"] == "system")
    messages = [{"role": "system", "content": chat.tools_prompt(schemas(functions), tools_style) + given}]
    return messages + [{"role": m["role"], "content": m["content"]} for m in question if m["role"] != "system"]


def decoded(value: Any) -> Any:
    """The value of a column that holds JSON text or the value itself."""
    return json.loads(value) if isinstance(value, str) else value


def bfcl_gold(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with lists of acceptable values -> {"name", "arguments", "acceptable"}, with the first value of each list.

    An argument without an acceptable value must be omitted."""
    acceptable = {k: ways_of(ways) for k, ways in call["arguments"].items()}
    arguments = {k: first_acceptable(ways) for k, ways in acceptable.items() if ABSENT not in ways}
    return {"name": call["name"], "arguments": arguments, "acceptable": acceptable}


def first_acceptable(ways: list[Any]) -> Any:
    """The first acceptable value. Inside objects each key lists its own values."""
    return _resolved(next(way for way in ways if way != ABSENT or ways == [ABSENT]))


def _resolved(value: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    options = {k: ways_of(v) for k, v in value.items()}
    return {k: first_acceptable(ways) for k, ways in options.items() if ABSENT not in ways}
