"""Rows of public data sets -> documents and conversations, by their columns.

    documents       {code} (github-code-clean), {content} (the-stack), {text}
    conversations   {instruction, input, output} (Alpaca), {prompt, completion}, {text or prompt, code} (MBPP),
                    {question, answer}, {query, response}; with system, history and tools
    calls           {system, chat} (glaive), {question, functions, ground_truth} (BFCL-style)
    both            {messages}, {conversations} and ChatML in {text}, with tools: see chat_formats

`reject_benchmark_rows` checks every row first: rows of a benchmark never become training data, whatever file they
come in.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError, MissingFile
from codechat.data import chat_formats, glaive
from codechat.data.conversations import DOMAINS
from codechat.data.sources import (
    ENDINGS,
    Document,
    Ledger,
    digest,
    embedded_python,
    local_rows,
    read_text_file,
    require_columns,
    row_format,
    text_rule,
)
from codechat.data.synthetic import parsed, split_of
from codechat.data.synthetic import row as conversation
from codechat.text import chat

Row = dict[str, Any]
Messages = list[dict[str, Any]]

DOCUMENT_COLUMNS = ("code", "content", "text")
REQUESTS = ("instruction", "prompt", "question", "query", "text")
ANSWERS = ("output", "completion", "code", "answer", "response")
INPUTS = ("input", "context")
INSTRUCTION_COLUMNS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("text", "code", "test_list"),
    ("prompt", "code", "test_list"),
    ("question", "answer"),
    ("query", "response"),
    *(CONVERSATION_COLUMNS := (("messages",), ("conversations",), ("text",))),
)
CALL_COLUMNS = (glaive.COLUMNS, ("question", "functions", "ground_truth"), *CONVERSATION_COLUMNS)
CALL_REASONS = tuple(dict.fromkeys((*glaive.REASONS, *chat_formats.REASONS, "bad_row")))
READ = {*REQUESTS, *ANSWERS, *INPUTS, *chat_formats.SYSTEM_COLUMNS, *(c for columns in CALL_COLUMNS for c in columns)}
READ |= {"history", "tools", "functions", "id", "domain", "source", "task_id", "test_list"}
NO_CALL = "I have no function for that."
DOCUMENT_REASONS = ("not_utf8", "unreadable", "no_text")
INSTRUCTION_REASONS = ("no_instruction", "no_answer", *chat_formats.REASONS)
# Tasks 601 to 974 of MBPP are its training split, 1 to 10 its few-shot prompts.
MBPP_HELD_OUT = range(11, 601)
BFCL_ID = re.compile(r"(live_|exec_)?(simple|multiple|parallel|irrelevance|relevance|multi_turn|java|rest|sql)")
# Of each question of GSM8K's test split the first twelve words, as ten hex digits of their sha256.
GSM8K_TEST = Path(__file__).with_name("gsm8k_test.txt")
_GSM8K_ANSWER = re.compile(r"####\s*[-+$]*\d[\d.,]*%?\s*(?:\Z|<\||</)")
_SENTENCE = re.compile(r"""(?:\A|[\n.!?:;>)\]"'*])\s*(?=[A-Z0-9$])""")
_WORD = re.compile(r"[a-z0-9]+")
_PYTHON = re.compile(r"^\s*(def |class |import |from |for |while |if |with |print\(|return |@\w+|\w+ = )", re.MULTILINE)
_OTHER_CODE = re.compile(
    r"[;{}]\s*$|^\s*(#!|#include|function |public |SELECT |<\w+|var |const |let |echo |\$ )|</\w+>",
    re.MULTILINE,
)
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")  # a domain names a file: no folder, and no dot, which ends the domain
_FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


def evaluation_set(row: Row) -> str | None:
    """The benchmark that a row belongs to, or None."""
    keys, name = row.keys(), str(row.get("id", row.get("task_id", "")))
    if "question" in keys and keys & {"ground_truth", "function"} and "source" not in keys and BFCL_ID.match(name):
        return "the Berkeley Function Calling Leaderboard"
    if name.startswith("HumanEval/"):
        return "HumanEval"
    if {"task_id", "test_list"} <= keys and whole_number(row["task_id"]) in MBPP_HELD_OUT:
        return "the test and validation splits of MBPP"
    if {"question", "choices", "answer"} <= keys:
        return "MMLU"
    for text in _texts(row):
        if benchmark := asked_in_test(text):
            return benchmark
        if _GSM8K_ANSWER.search(text):
            return "GSM8K, whose test split cannot be told from its training split by an answer"
    return None


def _texts(value: Any) -> Iterator[str]:
    """All texts of a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def asked_in_test(text: str) -> str | None:
    """The benchmark, where a sentence of the text begins a question of GSM8K's test split."""
    lower = text.lower()
    for mark in _SENTENCE.finditer(text):
        words = _WORD.findall(lower, mark.end(), mark.end() + 200)[:12]
        if len(words) == 12 and digest(" ".join(words))[:10] in _gsm8k_test():
            return "the test split of GSM8K"
    return None


@cache
def _gsm8k_test() -> frozenset[str]:
    return frozenset(GSM8K_TEST.read_text(encoding="ascii").split())


def whole_number(value: Any) -> Any:
    """The number that a text of digits writes, as some files hold their numbers; any other value as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def reject_benchmark_rows(rows: Iterable[Row], origin: str) -> Iterator[Row]:
    """The rows. DataError at the first row of a benchmark."""
    for number, row in enumerate(rows, 1):
        reject_benchmark(evaluation_set(row), f"{origin}, row {number},")
        yield row


def reject_benchmark(benchmark: str | None, where: str) -> None:
    """DataError for the name of a benchmark, which must not be training data."""
    if benchmark:
        worthless = "training on it makes every score on it worthless"
        raise DataError(f"{where} is evaluation data ({benchmark}); {worthless}; choose another --source")


# ------------------------------------------------------------------ documents


def path_documents(path: Path, ledger: Ledger) -> Iterator[Document]:
    """Documents of a parquet or jsonl file, a .py or .txt file, or a directory of either kind."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist; --source takes embedded, hub, or a file or directory")
    if row_format(path) or (path.is_dir() and any(map(row_format, path.iterdir()))):
        yield from row_documents(local_rows(path), path.name, ledger)
    elif path.is_dir():
        yield from embedded_python(ledger, [(path.name, path)])
        yield from text_files(sorted(path.rglob("*.txt")), path, ledger)
    elif path.suffix in (".py", ".txt"):
        yield from text_files([path], path.parent, ledger)
    else:
        needed = f"{ENDINGS}, .py, .txt or a directory of such files"
        raise DataError(f"{path} has the ending {path.suffix!r}; required is {needed}; convert or rename it")


def text_files(paths: Iterable[Path], root: Path, ledger: Ledger) -> Iterator[Document]:
    for path in paths:
        if document := read_text_file(path, path.relative_to(root).as_posix(), "files", ledger):
            reject_benchmark(evaluation_set({"text": document.text}), str(path))
            yield document


def row_documents(rows: Iterable[Row], origin: str, ledger: Ledger) -> Iterator[Document]:
    """Documents of rows with Python source under `code`, `content` or `text`; other languages are skipped by rule."""
    rows = require_columns(reject_benchmark_rows(rows, origin), [(c,) for c in DOCUMENT_COLUMNS], origin)
    for number, row in enumerate(rows):
        text = next((row[c] for c in DOCUMENT_COLUMNS if row.get(c) is not None), None)
        language = str(row.get("language", row.get("lang", "Python"))).lower()
        rule = "other_language" if language != "python" else None
        if not isinstance(text, str):
            ledger.lose("no_text")
        elif rule := rule or text_rule(text):
            ledger.skip(rule)
        else:
            yield Document(text.replace("\r\n", "\n"), str(row.get("path", number)), origin)


# ------------------------------------------------------------------ conversations


def _unique(
    rows: Iterable[Row],
    origin: str,
    ledger: Ledger,
    columns: Iterable[tuple[str, ...]],
    convert: Callable[[Row, str], Row | str],
) -> Iterator[Row]:
    """The conversations of rows, each once. convert: a row and its place -> a conversation, or the reason of a loss."""
    seen: set[str] = set()
    for number, row in enumerate(require_columns(reject_benchmark_rows(rows, origin), columns, origin), 1):
        if number == 1 and (unread := sorted(map(str, row.keys() - READ))):
            print(f"{origin}: columns that are not read: {', '.join(unread)}", file=sys.stderr)
        converted = convert(row, f"{origin}, row {number}")
        if isinstance(converted, str):
            ledger.lose(converted, f"row {number}")
        elif converted["domain"] == "other":
            ledger.skip("other_language")
        elif (name := digest(repr(converted["messages"]))) in seen:
            ledger.skip("duplicate")
        else:
            seen.add(name)
            ledger.keep()
            yield converted


def instruction_rows(rows: Iterable[Row], origin: str, ledger: Ledger, tools_style: str = "compact") -> Iterator[Row]:
    """Conversations of rows with an instruction and an answer, or with messages: in domain "calls" where tools are
    offered or called, "code" where the answer is Python, "chat" where it is prose. Code in other languages and repeats
    are skipped by rule."""
    convert = lambda row, where: instruction_row(row, where, tools_style)  # noqa: E731
    return _unique(rows, origin, ledger, INSTRUCTION_COLUMNS, convert)


def instruction_row(row: Row, where: str = "row", tools_style: str = "compact") -> Row | str:
    """A conversation, with domain "other" for code that is not Python; or a reason of `INSTRUCTION_REASONS`."""
    if isinstance(row.get("prompt"), list):
        row = row | {"messages": chat_formats.continued(row["prompt"], row.get("completion"), where)}
    if not chat_formats.holds_conversation(row):
        user, answer = request_text(row), cleaned(_column(row, *ANSWERS))
        if not user or not answer:
            return "no_answer" if user else "no_instruction"
        turns = [*turns_before(row, where), *conversation(user, answer, "")["messages"]]
        tools = row.get("tools") or row.get("functions")
        row = {"tools": tools, "domain": "" if tools else domain_of(answer), "messages": turns}
    messages = chat_formats.messages_of(row, where, tools_style)
    return messages if isinstance(messages, str) else _of_messages(row, messages)


def request_text(row: Row) -> str:
    """The request of an instruction row, with its input."""
    user, extra = cleaned(_column(row, *REQUESTS)), cleaned(_column(row, *INPUTS))
    unused = not extra or extra.lower() in ("n/a", "none", "<noinput>", "no input", "not applicable")
    return user if unused or not user else f"{user}\n\n{extra}"


def turns_before(row: Row, where: str) -> Messages:
    """The turns before an instruction: its system column, and `history`, a list of [request, answer] or of messages."""
    system = chat_formats.column_text(row, chat_formats.SYSTEM_COLUMNS, where)
    turns: Messages = [{"role": "system", "content": system}] if system else []
    for entry in history if isinstance(history := row.get("history") or [], list) else [history]:
        if isinstance(entry, list) and [*map(type, entry)] == [str, str]:
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), entry)]
        elif isinstance(entry, dict):
            turns.append(entry)
        else:
            raise DataError(f"{where} has {str(entry)[:80]} in history; required is [[request, answer], ...]")
    return turns


def _of_messages(row: Row, messages: Messages) -> Row | str:
    turns = [m for m in messages if m["role"] != "system"]
    if not turns or turns[0]["role"] != "user":
        return "no_instruction"
    answers = [m["content"] for m in turns if m["role"] == "assistant"]
    if not any(m["role"] == "assistant" and m["content"].strip() and m.get("weight") != 0 for m in turns):
        return "no_answer"
    tools = _offers_tools(messages)
    calls = tools or any(chat.CALL_TAG in answer for answer in answers)
    named = next((value for key in ("domain", "source") if isinstance(value := row.get(key), str) and value), "")
    domain = _NOT_IN_A_NAME.sub("_", DOMAINS.get(named, named)) or ("calls" if calls else domain_of(answers[0]))
    meta = {"tools_present": tools, "split": split_of(digest(split_key({"messages": messages})))}
    return conversation(turns[0]["content"], "\n".join(answers), domain, **meta) | {"messages": messages}


def _offers_tools(messages: Messages) -> bool:
    return messages[0]["role"] == "system" and bool(chat.offered_names(messages[0]["content"]))


def _column(row: Row, *columns: str) -> str:
    """The first of these columns that holds text."""
    return next((text for c in columns if isinstance(text := row.get(c), str) and text.strip()), "")


def cleaned(text: str) -> str:
    """The text without blank lines before it and space after it. The indentation of its first line stays."""
    return _BLANK_LINES.sub("", text.replace("\r\n", "\n")).rstrip()


def domain_of(answer: str) -> str:
    """ "code" for Python, fenced or bare; "other" for what looks like another language; else "chat"."""
    fenced = _FENCE.findall(answer)
    code = "\n".join(fenced) or answer
    if fenced or _PYTHON.search(code):
        return "code" if parsed(code) else "other"
    return "other" if _OTHER_CODE.search(code) or "```" in answer else "chat"


# ------------------------------------------------------------------ function calls


def call_rows(rows: Iterable[Row], origin: str, ledger: Ledger, tools_style: str) -> Iterator[Row]:
    """Conversations in domain "calls" of glaive's rows, BFCL-style rows, or messages. The hash of the request and the
    tools decides the split."""

    def convert(row: Row, where: str) -> Row | str:
        messages = _call_messages(row, where, tools_style)
        if isinstance(messages, str):
            return messages
        if not any(m["role"] == "assistant" and m.get("weight") != 0 for m in messages):
            return "no_assistant"
        split = split_of(digest(request_of({"messages": messages})))
        meta = {"tools_present": _offers_tools(messages), "asked": "tool", "split": split}
        return {"id": f"calls-{digest(repr(messages))[:16]}", "messages": messages, "domain": "calls", "meta": meta}

    return _unique(rows, origin, ledger, CALL_COLUMNS, convert)


def _call_messages(row: Row, where: str, tools_style: str) -> Messages | str:
    if row.get("chat") is not None:
        return glaive.conversation(row, tools_style)
    if chat_formats.holds_conversation(row) or row.get("question") is None:
        return chat_formats.messages_of(row, where, tools_style)
    try:
        question, functions, calls = (_loaded(row[k]) for k in CALL_COLUMNS[1])
        given = [f"\n\n{m['content']}" for m in question if m["role"] == "system"]
        system = chat.tools_prompt(chat_formats.schemas(functions), tools_style) + "".join(given)
        read = [chat.read_call(call) for call in calls]
        answer = "\n".join(chat.format_call(call.name, call.arguments) for call in read) or NO_CALL
        turns = [{"role": m["role"], "content": m["content"]} for m in question if m["role"] != "system"]
    except (ValueError, KeyError, TypeError):
        return "bad_row"
    return [{"role": "system", "content": system}, *turns, {"role": "assistant", "content": answer}]


def request_of(row: Row) -> str:
    """What comes before the answer to predict, with the tools on offer: rows that share it are in the same split."""
    return repr(row["messages"][: _answer_at(row["messages"])])


def split_key(row: Row) -> str:
    """What decides the split of a conversation: the request where tools are in play, since calls repeat, else its
    answers, so the same question with another answer may be in another split."""
    answers = "\n".join(m["content"] for m in row["messages"] if m["role"] == "assistant")
    return request_of(row) if chat.CALL_TAG in answers or _offers_tools(row["messages"]) else answers


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _answer_at(messages: Messages) -> int:
    """Index of the assistant turn to predict: the first that calls a function, else the first; one that is taught."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
    return next((i for i in answers if glaive.CALL in messages[i]["content"]), answers[0])


def call_problem(row: Row) -> Row | None:
    """The problem in a conversation of `call_rows`: everything before its first call as prompt, and that call as `gold`
    (None: no call is correct). None for several calls at once, which the task does not judge."""
    at = _answer_at(row["messages"])
    calls = chat.parse_calls(row["messages"][at]["content"])
    if len(calls) > 1:
        return None
    gold = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
    meta, split = {"tools_present": row["meta"]["tools_present"]}, row["meta"]["split"]
    return {"id": row["id"], "messages": row["messages"][:at], "gold": gold, "split": split, "meta": meta}
