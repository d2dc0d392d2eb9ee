"""Rows of public data sets -> documents and conversations, by their columns.

    documents       {code} (github-code-clean), {content} (the-stack), {text}
    conversations   {instruction, input, output} (Alpaca), {prompt, completion}, {text or prompt, code}
                    (MBPP), {question, answer}, {query, response}
    calls           {system, chat} (glaive), {question, functions, ground_truth} (BFCL-style)
    both            {messages}, {conversations} and ChatML in {text}, with tools: see chat_formats

`reject_benchmark_rows` checks every row first: rows of a benchmark never become training data, whatever file they come in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
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

DOCUMENT_COLUMNS = ("code", "content", "text")
INSTRUCTION_COLUMNS = (
    ("instruction", "output"),
    ("prompt", "completion"),
    ("text", "code", "test_list"),
    ("prompt", "code", "test_list"),
    ("question", "answer"),
    ("query", "response"),
    *(CONVERSATION_COLUMNS := (("messages",), ("conversations",), ("text",))),
)
CALL_COLUMNS = (glaive.COLUMNS, ("question", "functions", "ground_truth"), *CONVERSATION_COLUMNS)
CALL_REASONS = tuple(dict.fromkeys((*glaive.REASONS, *chat_formats.REASONS, "bad_row")))
NO_CALL = "I have no function for that."
DOCUMENT_REASONS = ("not_utf8", "unreadable", "no_text")
INSTRUCTION_REASONS = ("no_instruction", "no_answer", *chat_formats.REASONS)
# Tasks 601 to 974 of MBPP are its training split, 1 to 10 its few-shot prompts.
MBPP_HELD_OUT = range(11, 601)
BFCL_ID = re.compile(r"(live_|exec_)?(simple|multiple|parallel|irrelevance|relevance|multi_turn|java|rest|sql)")
GSM8K = "GSM8K, whose test split cannot be told from its training split by a row"
_GSM8K_ANSWER = re.compile(r"^#### -?[\d.,]+\s*\Z", re.MULTILINE)
_PYTHON = re.compile(r"^\s*(def |class |import |from |for |while |if |with |print\(|return |@\w+|\w+ = )", re.MULTILINE)
_OTHER_CODE = re.compile(
    r"[;{}]\s*$|^\s*(#!|#include|function |public |SELECT |<\w+|var |const |let |echo |\$ )|</\w+>",
    re.MULTILINE,
)
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")  # a domain names a file: no folder, and no dot, which ends the domain
_FENCE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


def evaluation_set(row: Row) -> str | None:
    """The benchmark that a row belongs to, or None."""
    keys, name = row.keys(), str(row.get("id", row.get("task_id", "")))
    if "question" in keys and keys & {"ground_truth", "function"} and "source" not in keys and BFCL_ID.match(name):
        return "the Berkeley Function Calling Leaderboard"
    if name.startswith("HumanEval/"):
        return "HumanEval"
    if {"task_id", "code", "test_list"} <= keys and whole_number(row["task_id"]) in MBPP_HELD_OUT:
        return "the test and validation splits of MBPP"
    if {"question", "choices", "answer"} <= keys:
        return "MMLU"
    if {"question", "answer"} <= keys and "####" in str(row["answer"]):
        return GSM8K
    if {"query", "response"} <= keys and _GSM8K_ANSWER.search(str(row["response"])):
        return GSM8K
    return None


def whole_number(value: Any) -> Any:
    """The number that a text of digits writes, as some files hold their numbers; any other value as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def reject_benchmark_rows(rows: Iterable[Row], origin: str) -> Iterator[Row]:
    """The rows. DataError at the first row of a benchmark."""
    for number, row in enumerate(rows, 1):
        benchmark = evaluation_set(row)
        if benchmark:
            found = f"{origin}, row {number}, is evaluation data ({benchmark})"
            raise DataError(f"{found}; training on it makes every score on it worthless; choose another --source")
        yield row


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
    found = (read_text_file(path, path.relative_to(root).as_posix(), "files", ledger) for path in paths)
    return (document for document in found if document is not None)


def row_documents(rows: Iterable[Row], origin: str, ledger: Ledger) -> Iterator[Document]:
    """Documents of rows with Python source under `code`, `content` or `text`; other languages are skipped by rule."""
    rows = require_columns(reject_benchmark_rows(rows, origin), [(c,) for c in DOCUMENT_COLUMNS], origin)
    for number, row in enumerate(rows):
        text = next((row[c] for c in DOCUMENT_COLUMNS if c in row), None)
        language = str(row.get("language", row.get("lang", "Python"))).lower()
        rule = "other_language" if language != "python" else None
        if not isinstance(text, str):
            ledger.lose("no_text")
        elif rule := rule or text_rule(text):
            ledger.skip(rule)
        else:
            yield Document(text.replace("\r\n", "\n"), str(row.get("path", number)), origin)


# ------------------------------------------------------------------ conversations


def instruction_rows(rows: Iterable[Row], origin: str, ledger: Ledger, tools_style: str = "compact") -> Iterator[Row]:
    """Conversations of rows with an instruction and an answer, or with messages: in domain "calls" where tools are offered or called, "code" where
    the answer is Python, "chat" where it is prose. Code in other languages and repeats are skipped by rule."""
    seen: set[str] = set()
    checked = require_columns(reject_benchmark_rows(rows, origin), INSTRUCTION_COLUMNS, origin)
    for number, row in enumerate(checked, 1):
        found = instruction_row(row, f"{origin}, row {number}", tools_style)
        if isinstance(found, str):
            ledger.lose(found, f"row {number}")
        elif found["domain"] == "other":
            ledger.skip("other_language")
        elif found["id"] in seen:
            ledger.skip("duplicate")
        else:
            seen.add(found["id"])
            ledger.keep()
            yield found


def instruction_row(row: Row, where: str = "row", tools_style: str = "compact") -> Row | str:
    """A conversation, with domain "other" for code that is not Python; or a reason of `INSTRUCTION_REASONS`."""
    if chat_formats.holds_conversation(row):
        messages = chat_formats.messages_of(row, where, tools_style)
        return messages if isinstance(messages, str) else _of_messages(row, messages)
    user = _text(row, "instruction", "prompt", "question", "query", "text")
    extra = _text(row, "input")
    answer = _text(row, "output", "completion", "code", "answer", "response")
    if not user or not answer:
        return "no_answer" if user else "no_instruction"
    if extra and extra.lower() not in ("n/a", "none", "<noinput>", "no input"):
        user += f"\n\n{extra}"
    return conversation(user, answer, domain_of(answer))


def _of_messages(row: Row, messages: list[dict[str, str]]) -> Row | str:
    turns = [m for m in messages if m["role"] != "system"]
    if not turns or turns[0]["role"] != "user":
        return "no_instruction"
    answers = [m["content"] for m in turns if m["role"] == "assistant"]
    if not any(answer.strip() for answer in answers):
        return "no_answer"
    tools = _offers_tools(messages)
    calls = tools or any(chat.CALL_TAG in answer for answer in answers)
    named = next((value for key in ("domain", "source") if isinstance(value := row.get(key), str) and value), "")
    domain = _NOT_IN_A_NAME.sub("_", DOMAINS.get(named, named)) or ("calls" if calls else domain_of(answers[0]))
    meta = {"tools_present": tools, "split": split_of(digest(split_key({"messages": messages})))}
    return conversation(turns[0]["content"], "\n".join(answers), domain, **meta) | {"messages": messages}


def _offers_tools(messages: list[dict[str, str]]) -> bool:
    return messages[0]["role"] == "system" and bool(chat.offered_names(messages[0]["content"]))


def _text(row: Row, *columns: str) -> str:
    value = next((row[c] for c in columns if isinstance(row.get(c), str)), "")
    return value.replace("\r\n", "\n").strip()


def domain_of(answer: str) -> str:
    """ "code" for Python, fenced or bare; "other" for what looks like another language; else "chat"."""
    fenced = _FENCE.findall(answer)
    code = "\n".join(fenced) or answer
    if fenced or _PYTHON.search(code):
        return "code" if parsed(code) else "other"
    return "other" if _OTHER_CODE.search(code) or "```" in answer else "chat"


# ------------------------------------------------------------------ function calls


def call_rows(rows: Iterable[Row], origin: str, ledger: Ledger, tools_style: str) -> Iterator[Row]:
    """Conversations in domain "calls" of glaive's rows, BFCL-style rows, or messages, with every call in canonical form. The hash of the request
    and the tools decides the split."""
    seen: set[str] = set()
    for number, row in enumerate(require_columns(reject_benchmark_rows(rows, origin), CALL_COLUMNS, origin), 1):
        messages = _call_messages(row, f"{origin}, row {number}", tools_style)
        if isinstance(messages, str):
            ledger.lose(messages, f"row {number}")
            continue
        name = digest(repr(messages))
        if name in seen:
            ledger.skip("duplicate")
            continue
        seen.add(name)
        ledger.keep()
        meta = {
            "tools_present": "functions" in row or "{" in str(row.get("system")) or _offers_tools(messages),
            "asked": "tool",
            "split": split_of(digest(request_of({"messages": messages}))),
        }
        yield {"id": f"calls-{name[:16]}", "messages": messages, "domain": "calls", "meta": meta}


def _call_messages(row: Row, where: str, tools_style: str) -> list[dict[str, str]] | str:
    if "chat" in row:
        return glaive.conversation(row, tools_style)
    if chat_formats.holds_conversation(row) or "question" not in row:
        found = chat_formats.messages_of(row, where, tools_style)
        answered = isinstance(found, str) or any(m["role"] == "assistant" for m in found)
        return found if answered else "no_assistant"
    try:
        question, functions, calls = (_loaded(row[k]) for k in CALL_COLUMNS[1])
        given = [f"\n\n{m['content']}" for m in question if m["role"] == "system"]
        system = chat.tools_prompt(functions, tools_style) + "".join(given)
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
    """What decides the split of a conversation: the request where tools are in play, since calls repeat, else its answers, so the same
    question with another answer may be in another split."""
    answers = "\n".join(m["content"] for m in row["messages"] if m["role"] == "assistant")
    return request_of(row) if chat.CALL_TAG in answers or _offers_tools(row["messages"]) else answers


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _answer_at(messages: list[dict[str, str]]) -> int:
    """Index of the assistant turn to predict: the first that calls a function, else the first."""
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    return next((i for i in answers if glaive.CALL in messages[i]["content"]), answers[0])


def call_problem(row: Row) -> Row | None:
    """The problem in a conversation of `call_rows`: everything before its first call as prompt, and that call as `gold` (None: no call is
    correct). None for several calls at once, which the task does not judge."""
    at = _answer_at(row["messages"])
    calls = chat.parse_calls(row["messages"][at]["content"])
    if len(calls) > 1:
        return None
    gold = {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None
    meta, split = {"tools_present": row["meta"]["tools_present"]}, row["meta"]["split"]
    return {"id": row["id"], "messages": row["messages"][:at], "gold": gold, "split": split, "meta": meta}
