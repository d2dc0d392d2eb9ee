"""Readers of rows by their columns: a row -> the same row with `messages` in OpenAI's form.
`chat_formats.FORMS` names the columns of each. All raise Unreadable, with the reason, for a row
that cannot be taught."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from codechat.data.chat_turns import Malformed, Message, Row, continued, from_json
from codechat.data.offered_tools import schemas
from codechat.text.tool_calls import Unreadable

REQUESTS = ("instruction", "prompt", "question", "query", "text")
ANSWERS = ("output", "completion", "code", "answer", "response")
INPUTS = ("input", "context")
INSTRUCTIONS = (*REQUESTS, *ANSWERS, *INPUTS, "history")  # all columns that an instruction may have
NO_INPUT = ("", "n/a", "none", "<noinput>", "no input", "not applicable")
SYSTEM_COLUMNS = ("system", "system_prompt")
NO_CALL = "I have no function for that."
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_GLAIVE = re.compile(r"(?:\A|\n[ \t]*\n)\s*(USER|ASSISTANT|A|FUNCTION RESPONSE):[ \t]?")
_GLAIVE_ROLES = {
    "USER": "user",
    "FUNCTION RESPONSE": "function",
    "ASSISTANT": "assistant",
    "A": "assistant",
}
# calls in the turns of tool sets
_FENCED = re.compile(r'\A\s*```(?:json)?\s*([\[{].*"name".*[\]}])\s*```\s*\Z', re.DOTALL)
# Seal-Tools: the result of an earlier call of the same answer, which nobody can run
_RESULT_OF_A_CALL = re.compile(r'"API_call_\d+"')
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def messages(row: Row, where: str) -> Row:
    """{messages}: in this form already."""
    return row


def conversations(row: Row, where: str) -> Row:
    """{conversations}."""
    return {**row, "messages": row["conversations"]}


def glaive(row: Row, where: str) -> Row:
    """{system, chat}: the system text holds the schemas, or else is one."""
    text = row["chat"]
    turns = glaive_turns(text) if isinstance(text, str) else []
    if not turns:
        raise Unreadable("no_turns")
    system = row.get("system")
    if not isinstance(system, str):
        raise Unreadable("unreadable_tools")
    # glaive's text around the schemas is always the same; a text without schemas is the row's own.
    tools = schemas(system)
    return {
        "messages": turns,
        "tools": tools,
        "system": "" if tools else system.removeprefix("SYSTEM:").strip(),
    }


def glaive_turns(text: str) -> list[Message]:
    """The turns of a `chat` cell, contents stripped, without empty ones."""
    marks: list[re.Match[str]] = []
    before = ""
    for mark in _GLAIVE.finditer(text):
        # a paragraph of an answer may happen to begin with "A:"
        if mark[1] != "A" or not before.startswith("A"):
            marks.append(mark)
        before = mark[1]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = []
    for mark, end in zip(marks, ends):
        content = text[mark.end() : end].replace("<|endoftext|>", "").strip()
        if content:
            turns.append({"role": _GLAIVE_ROLES[mark[1]], "content": content})
    return turns


def tool_set(row: Row, where: str) -> Row:
    """{question, functions, ground_truth}: messages, schemas and the calls that answer them."""
    turns = from_json(row["question"], "bad_row")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise Unreadable("bad_row")
    turns = [*map(_with_tags, turns), _answer_of(row["ground_truth"])]
    return _system_of(row) | {"messages": turns, "tools": row["functions"]}


def _with_tags(turn: Row) -> Row:
    """The turn, calls in a fence put behind a tag."""
    text = turn.get("content")
    if turn.get("role") != "assistant" or not isinstance(text, str):
        return turn
    return {**turn, "content": _FENCED.sub(r"<tool_call>\1", text)}


def xlam(row: Row, where: str) -> Row:
    """{query, answers, tools}: a request, the calls that answer it, and schemas."""
    if not _cell(row, "query").strip():
        raise Unreadable("no_instruction")
    # `answers` holds calls, other columns no request
    asked = {name: row.get(name) for name in ("query", *INPUTS)}
    request = {"role": "user", "content": request_text(asked)}
    answer = _answer_of(row["answers"])
    turns = [*turns_before(row, where), request, answer]
    return _system_of(row) | {"messages": turns, "tools": row.get("tools")}


def _system_of(row: Row) -> dict[str, Any]:
    """The system columns that the row has."""
    return {name: row[name] for name in SYSTEM_COLUMNS if row.get(name) is not None}


def _answer_of(cell: Any) -> Message:
    """The answer with the calls of a cell; without any no call is right, and the answer says so."""
    calls = from_json(cell, "bad_row")
    if not isinstance(calls, list):
        raise Unreadable("bad_row")
    if _RESULT_OF_A_CALL.search(json.dumps(calls)):
        raise Unreadable("result_as_argument")
    return (
        {"role": "assistant", "tool_calls": calls}
        if calls
        else {"role": "assistant", "content": NO_CALL}
    )


def chatml_or_instruction(row: Row, where: str) -> Row:
    """{text}: a conversation in ChatML, or the text of an instruction."""
    text = row["text"]
    if not isinstance(text, str) or "<|im_start|>" not in text:
        return instruction(row, where)
    turns = [
        {"role": role, "content": content.strip("\n")} for role, content in _CHATML.findall(text)
    ]
    if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
        turns.pop()  # the beginning of an answer that a prompt ends with
    return _without(row, INSTRUCTIONS) | {"messages": turns}


def instruction(row: Row, where: str) -> Row:
    """A request and its answer, or a prompt of messages and what follows it."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        given = row.get("completion")
        if given is None:
            given = row.get("response")
        return _without(row, (*REQUESTS, *ANSWERS, "history")) | {
            "messages": continued(prompt, given, where)
        }
    request = request_text(row)
    answer = answer_text(row)
    if not request or not answer:
        raise Unreadable("no_answer" if request else "no_instruction")
    turns = [
        *turns_before(row, where),
        {"role": "user", "content": request},
        {"role": "assistant", "content": answer},
    ]
    return _without(row, (*INSTRUCTIONS, *SYSTEM_COLUMNS)) | {"messages": turns}


def _without(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in columns}


def request_text(row: Row) -> str:
    """The request of an instruction row, with its inputs. Unreadable for two different
    requests, and for a column that holds a list or an object."""
    texts = _texts_in(row, REQUESTS)
    first = next(iter(texts.values()), "")
    for text in texts.values():  # a rendered prompt may repeat the request
        if first.strip() not in text and text.strip() not in first:
            raise Unreadable(f"two_requests ({', '.join(texts)})")
    request = cleaned(first)
    inputs = dict.fromkeys(cleaned(_cell(row, name)) for name in INPUTS)  # each once
    given = [text for text in inputs if text.strip().lower() not in NO_INPUT]
    return "\n\n".join([request, *given]) if request else ""


def answer_text(row: Row) -> str:
    """The answer of an instruction row. Unreadable for two different answers."""
    texts = _texts_in(row, ANSWERS)
    if len({text.strip() for text in texts.values()}) > 1:
        raise Unreadable(f"two_answers ({', '.join(texts)})")
    return cleaned(next(iter(texts.values()), ""))


def reject_inputs(row: Row, texts: Sequence[str]) -> None:
    """Unreadable for an input column that none of the texts contains."""
    # Messages usually contain the input of the row; otherwise training on them would lose it.
    for name in INPUTS:
        given = _cell(row, name).strip()
        if given.lower() not in NO_INPUT and not any(given in text for text in texts):
            raise Unreadable(f"{name}_beside_messages")


def _texts_in(row: Row, columns: Sequence[str]) -> dict[str, str]:
    """Column -> text of those columns that have any."""
    texts = {name: _cell(row, name) for name in columns}
    return {name: text for name, text in texts.items() if text.strip()}


def _cell(row: Row, name: str) -> str:
    """The text of a column: a number or a truth value as JSON writes it, nothing for null and
    NaN. Unreadable for a list or an object, which has no one wording."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise Unreadable(f"{name}_not_text")


def turns_before(row: Row, where: str) -> list[Message]:
    """The turns before an instruction: its system column, and `history`, a list of [request,
    answer] or of messages."""
    system = system_text(row, where)
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    history = row.get("history") or []
    for entry in history if isinstance(history, list) else [history]:
        if isinstance(entry, list) and [*map(type, entry)] == [str, str]:
            turns += [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), entry)
            ]
        elif isinstance(entry, dict):
            turns.append(entry)
        else:
            got = f"{where} has {str(entry)[:80]} in history"
            raise Malformed("history_form", f"{got}; expected [[request, answer], ...]")
    return turns


def system_text(row: Row, where: str) -> str:
    """The text of the system columns. Malformed for a value that is no text, and for two texts."""
    given = {}
    for name in SYSTEM_COLUMNS:
        if row.get(name):
            given[name] = _without_parts(row[name])
    texts = {value for value in given.values() if isinstance(value, str) and value.strip()}
    if len(texts) > 1 or not all(isinstance(value, str) for value in given.values()):
        shown = " and ".join(f"{name} {str(value)[:40]!r}" for name, value in given.items())
        reason = "two_systems" if len(texts) > 1 else "system_not_text"
        raise Malformed(
            reason, f"{where} has {shown}; expected one text; correct it, or leave a column out"
        )
    return next(iter(texts), "")


def _without_parts(value: Any) -> Any:
    """The text of a list of Anthropic's parts of text; any other value unchanged."""
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return value
    texts = [part.get("text") for part in parts]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else value


def cleaned(text: str) -> str:
    """The text without blank lines before it and space after it. The indentation of its first
    line stays."""
    return _BLANK_LINES.sub("", text.replace("\r\n", "\n")).rstrip()
