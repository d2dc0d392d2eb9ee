"""Rows of public data sets -> conversations, by their columns. Rows of a benchmark are refused
first."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError
from codechat.data import chat_formats, chat_turns, preference_rows, sources
from codechat.data.chat_turns import Malformed
from codechat.data.conversations import DOMAINS
from codechat.data.sources import Ledger, Row, digest
from codechat.data.splits import split_of
from codechat.text import tool_calls, tool_lists
from codechat.text.tool_functions import misfit
from codechat_lab.data.python_source import parsed

INSTRUCTION_COLUMNS = tuple(form.columns for form in chat_formats.FORMS)
CALL_COLUMNS = tuple(form.columns for form in chat_formats.FORMS if form.calls)
# Tasks 601 to 974 of MBPP are its training split, 1 to 10 its few-shot prompts.
MBPP_HELD_OUT = range(11, 601)
BFCL_ID = re.compile(
    r"(live_|exec_)?(simple|multiple|parallel|irrelevance|relevance|multi_turn|java|rest|sql)"
)
# Of each question of GSM8K's test split the first twelve words, as ten hex digits of their sha256.
GSM8K_TEST = frozenset(Path(__file__).with_name("gsm8k_test.txt").read_text("ascii").split())
_GSM8K_ANSWER = re.compile(r"####\s*[-+$]*\d[\d.,]*%?\s*(?:\Z|<\||</)")
_SENTENCE = re.compile(r"""(?:\A|[\n.!?:;>)\]"'*])\s*(?=[A-Z0-9$])""")
_WORD = re.compile(r"[a-z0-9]+")
_PYTHON = re.compile(
    r"^\s*(def |class |import |from |for |while |if |with |print\(|return |@\w+|\w+ = )",
    re.MULTILINE,
)
_OTHER_CODE = re.compile(
    r"[;{}]\s*$|^\s*(#!|#include|function |public |SELECT |<\w+|var |const |let |echo |\$ )|</\w+>",
    re.MULTILINE,
)
# a domain names a file: no folder, and no dot, which ends the domain
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def evaluation_set(row: Row) -> str | None:
    """The benchmark that a row belongs to, or None."""
    name = str(row.get("id", row.get("task_id", "")))
    if _is_bfcl(row, name):
        return "the Berkeley Function Calling Leaderboard"
    if name.startswith("HumanEval/"):
        return "HumanEval"
    if {"task_id", "test_list"} <= row.keys() and whole_number(row["task_id"]) in MBPP_HELD_OUT:
        return "the test and validation splits of MBPP"
    if {"question", "choices", "answer"} <= row.keys() or {*sources.MMLU_COLUMNS} <= row.keys():
        return "MMLU"
    for text in texts_in(row):
        asked = asked_in_test(text)
        if asked:
            return asked
        if _GSM8K_ANSWER.search(text):
            return "GSM8K, whose test split cannot be told from its training split by an answer"
    return None


def _is_bfcl(row: Row, name: str) -> bool:
    calls = "question" in row and not row.keys().isdisjoint({"ground_truth", "function"})
    return calls and "source" not in row and BFCL_ID.match(name) is not None


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a row, at any depth, also those in JSON text."""
    for text in chat_turns.texts_in(value):
        yield text
        if text.lstrip().startswith(("[{", "{")):
            try:
                yield from texts_in(json.loads(text))
            except (ValueError, RecursionError):
                continue


def asked_in_test(text: str) -> str | None:
    """The benchmark's name if a sentence of the text begins a question of GSM8K's test split,
    else None."""
    lower = text.lower()
    for mark in _SENTENCE.finditer(text):
        words = _WORD.findall(lower, mark.end(), mark.end() + 200)[:12]
        if len(words) == 12 and digest(" ".join(words))[:10] in GSM8K_TEST:
            return "the test split of GSM8K"
    return None


def whole_number(value: Any) -> Any:
    """The value; a text of digits as a number, since some files quote their numbers."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def reject_benchmark_row(row: Row, where: str) -> None:
    """DataError for a row of a benchmark: the instrument `benchmark_rows`."""
    reject_benchmark(evaluation_set(row), where)


def reject_benchmark_rows(rows: Iterable[Row], origin: str) -> Iterator[Row]:
    """The rows. DataError at the first row of a benchmark."""
    for number, row in enumerate(rows, 1):
        reject_benchmark_row(row, f"{origin}, row {number},")
        yield row


def reject_benchmark(benchmark: str | None, where: str) -> None:
    """DataError for the name of a benchmark, which must not be training data."""
    if benchmark:
        worthless = "training on it makes every score on it worthless"
        raise DataError(
            f"{where} is evaluation data ({benchmark}); {worthless}; choose another --source"
        )


def conversation_rows(
    rows: Iterable[Row],
    origin: str,
    ledger: Ledger,
    tools_style: str = "compact",
    domain: str = "",
    tools: Sequence[Row] = (),
) -> Iterator[Row]:
    """Conversations of rows in any form of `chat_formats`, each once. tools: schemas for rows
    that offer none.

    Their domain is `domain`, or what the row names, or else "calls" if tools are offered or
    called, "code" if the answer is Python, "chat" if it is prose."""
    seen: set[str] = set()
    named: set[str] = set()
    rows = reject_benchmark_rows(rows, origin)
    columns = CALL_COLUMNS if domain else INSTRUCTION_COLUMNS
    for number, row in enumerate(sources.require_columns(rows, columns, origin), 1):
        unread = [name for name in chat_formats.unread_columns(row) if name not in named]
        if unread:  # once per column
            named.update(unread)
            print(f"{origin}: columns that are not read: {', '.join(unread)}", file=sys.stderr)
        if chat_formats.is_disliked(row):
            ledger.skip("label_false")
            continue
        try:
            where = f"{origin}, row {number}"
            converted = conversation_row(row, where, tools_style, domain, tools)
        except Malformed as error:  # one such row must not end the reading of a set
            ledger.lose(error.reason, str(error))
            continue
        if isinstance(converted, str):
            remedy = "; `codechat preference` reads pairs from preferences.SPLIT.jsonl"
            ledger.lose(
                converted, f"row {number}{remedy if converted == 'preference_pair' else ''}"
            )
        elif converted["domain"] == "other" != domain:
            ledger.skip("other_language")
        elif converted["id"] in seen:
            ledger.skip("duplicate")
        else:
            seen.add(converted["id"])
            ledger.kept += 1
            yield converted


def conversation_row(
    row: Row,
    where: str = "row",
    tools_style: str = "compact",
    domain: str = "",
    tools: Sequence[Row] = (),
) -> Row | str:
    """A conversation, with domain "other" for code that is not Python; or the reason why it
    cannot be taught. tools: schemas to offer if the row offers none."""
    messages = chat_formats.messages_of(row, where, tools_style)
    if tools and not isinstance(messages, str) and not _offers_tools(messages):
        given = [tool["name"] for tool in tools]
        for name in called_names(messages):
            if name not in given:
                return f"function_not_offered ({name})"
        messages = chat_formats.messages_of(row | {"tools": list(tools)}, where, tools_style)
    if isinstance(messages, str):
        return messages
    answers = [m for m in messages if m["role"] == "assistant"]
    if not any(m["content"].strip() and m.get("weight") != 0 for m in answers):
        pair = any(row.get(name) is not None for names in preference_rows.PAIRS for name in names)
        return "preference_pair" if pair else "no_answer"
    domain = domain or _named_domain(row)
    if not domain:
        domain = "calls" if _has_tools(messages) else domain_of(answers[0]["content"])
    converted: Row = dict(
        id=f"{domain}-{digest(repr(messages))[:16]}",
        messages=messages,
        domain=domain,
        meta=dict(tools_present=_offers_tools(messages), asked=domain),
    )
    # Conversations with the same `split_key` are in one split, or training would see the test.
    converted["meta"]["split"] = split_of(digest(split_key(converted)))
    return converted


def _named_domain(row: Row) -> str:
    """The domain that the row names, in characters of a file's name; "" if it names none."""
    given = (row.get("domain"), row.get("source"))
    named = next((name for name in given if isinstance(name, str) and name), "")
    return _NOT_IN_A_NAME.sub("_", DOMAINS.get(named, named))


def domain_of(answer: str) -> str:
    """ "code" for Python, fenced or bare; "other" for what looks like another language; else
    "chat". Reasoning in tags before the answer does not count."""
    answer = answer[tool_calls.after_thought(answer) :]
    fenced = _FENCE.findall(answer)
    code = "\n".join(fenced) or answer
    if fenced or _PYTHON.search(code):
        return "code" if parsed(code) else "other"
    if _OTHER_CODE.search(code) or "```" in answer:
        return "other"
    return "chat"


def called_names(messages: list[Row]) -> list[str]:
    """Names of the functions that the assistant calls."""
    names = []
    for message in messages:
        if message["role"] == "assistant":
            names += [str(call.name) for call in tool_calls.parse_calls(message["content"])]
    return names


def warn_of_calls(rows: Sequence[Row], origin: str, remedy: str) -> None:
    """A line on stderr if converted rows call functions and offer none, and one if they call
    what their tools do not allow."""
    bare = 0
    for row in rows:
        if not row["meta"]["tools_present"]:
            bare += _has_tools(row["messages"])
    if bare:
        count = f"{origin}: {bare} of {len(rows)} rows call functions and offer none"
        why = "a model trained on calls without a list of tools calls whatever it is asked"
        print(f"{count}; {why}; {remedy}", file=sys.stderr)
    faults = [fault for fault in map(call_fault, rows) if fault]
    if faults:
        count = f"{origin}: {len(faults)} of {len(rows)} rows call what their tools do not allow"
        why = "a model learns such calls too; correct these rows, or leave them out"
        print(f"{count} (the first: {faults[0]}); {why}", file=sys.stderr)


def call_fault(row: Row) -> str:
    """What is wrong with the first call that the row's tools do not allow; "" for none, and for
    a row that offers no tools."""
    first = row["messages"][0]
    if not _offers_tools(row["messages"]):
        return ""
    _, tools = tool_lists.split_offer(first["content"])
    parameters = {tool["name"]: tool["parameters"] for tool in tools}
    for message in row["messages"]:
        if message["role"] != "assistant":
            continue
        for call in tool_calls.parse_calls(message["content"]):
            if call.name not in parameters:
                return f"there is no function {call.name!r}"
            problem = misfit(call.arguments or {}, parameters[call.name])
            if problem:
                return f"{call.name}: {problem}"
    return ""


def _offers_tools(messages: list[Row]) -> bool:
    return messages[0]["role"] == "system" and bool(
        tool_lists.offered_names(messages[0]["content"])
    )


def _has_tools(messages: list[Row]) -> bool:
    called = any(tool_calls.CALL_TAG in m["content"] for m in messages if m["role"] == "assistant")
    return called or _offers_tools(messages)


def split_key(row: Row) -> str:
    """What decides the split of a conversation: with tools all before the answer to predict,
    else the answers."""
    messages = row["messages"]
    if row["domain"] == "calls" or _has_tools(messages):
        return repr(messages[: answer_at(messages)])
    return "\n".join(m["content"] for m in messages if m["role"] == "assistant")


def answer_at(messages: list[Row]) -> int:
    """Index of the assistant turn to predict: the first that calls a function, else the first;
    only turns with loss."""
    answers = [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0
    ]
    calls = [i for i in answers if tool_calls.CALL_TAG in messages[i]["content"]]
    return (calls or answers)[0]


def call_problem(row: Row) -> Row | None:
    """The problem in a conversation: everything before its first call, and that call as `gold`
    (None: no call is right). None for several calls at once, which the task does not judge."""
    at = answer_at(row["messages"])
    calls = tool_calls.parse_calls(row["messages"][at]["content"])
    if len(calls) > 1:
        return None
    return dict(
        id=row["id"],
        messages=row["messages"][:at],
        gold=dict(name=calls[0].name, arguments=calls[0].arguments) if calls else None,
        split=row["meta"]["split"],
        meta=dict(tools_present=row["meta"]["tools_present"]),
    )
