"""The Berkeley Function Calling Leaderboard's single-turn problems: embedded cases, the leaderboard's own files, the
hub.

    BFCL_v4_simple_python.json            {id, question: [[message]], function: [schema]}, one JSON object per line
    possible_answer/BFCL_v4_....json      {id, ground_truth: [{name: {argument: [acceptable values]}}]}
    any .parquet or .jsonl                {id, category, question, functions, ground_truth}, values as JSON or as JSON text

A path is such a file or a directory of them. Of a directory every file of a known category is read, whatever its
version. The hub holds version 3. Problems are for evaluation only: all are in split "test".

A row that no call can satisfy is lost with that reason. The leaderboard has four; every model fails them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError, MissingFile, UserError
from codechat.data.sources import LARGEST_LOSS, Ledger, local_rows, probe_hub, read_jsonl, require_columns
from codechat.tasks.base import Message, Problem
from codechat.tasks.bfcl import cases
from codechat.tasks.funcall.sources import conversation, decoded
from codechat.tasks.funcall.staircase import ABSENT
from codechat.text.chat import ROLES

Row = dict[str, Any]
NON_LIVE = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance")
CATEGORIES = (*NON_LIVE, *LIVE)
HUB = "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
HUB_FILE = "BFCL_v3_{}.json"
REMEDY = "give --data-dir with a directory of the leaderboard's files, or leave source=hub out for the embedded cases"
ANSWERS = "possible_answer"
UNSOLVABLE = "no call can satisfy it"
_FILE = re.compile(r"BFCL_v\d+_(\w+?)(?:_python)?\.jsonl?")
COLUMNS = (("id", "category", "question", "functions", "ground_truth"),)


def read(source: str, categories: Iterable[str], tools_style: str = "compact") -> tuple[list[Problem], Ledger]:
    """Problems of the categories, and the counts of the rows. MissingFile, DataError; UserError for an unreachable
    hub."""
    ledger = Ledger(f"bfcl {Path(source).name}", dict.fromkeys((UNSOLVABLE, "bad_row"), LARGEST_LOSS))
    categories = set(categories)
    if source == "embedded":
        rows: Iterable[Row] = cases.ROWS
    else:
        rows = _hub_rows(sorted(categories)) if source == "hub" else _rows_at(Path(source))
    problems = []
    for row in rows:
        category = _plain(row["category"])
        if category not in categories:
            ledger.skip("another category")
        elif isinstance(problem := _problem(row, category, tools_style), str):
            ledger.lose(problem)
        else:
            ledger.keep()
            problems.append(problem)
    ledger.check()
    return problems, ledger


def _plain(category: Any) -> str:
    """The category's plain name: later versions call simple "simple_python"."""
    return str(category).removesuffix("_python")


# ------------------------------------------------------------------ rows


def _rows_at(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise MissingFile(
            f"{path} does not exist; required: a file or directory of the leaderboard's problems, embedded, or hub; check --data-dir"
        )
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if (found := _FILE.fullmatch(file.name)) and found[1] in CATEGORIES
        )
        twice = [
            file.name
            for file in files
            if sum(_FILE.fullmatch(file.name)[1] == _FILE.fullmatch(f.name)[1] for f in files) > 1
        ]
        if twice:
            raise DataError(
                f"{path} holds {' and '.join(twice[:2])}; required: one file per category; keep one version of the data"
            )
    if files and all(_FILE.fullmatch(file.name) for file in files):
        for file in files:
            yield from _joined(file, file.parent / ANSWERS / file.name)
    else:
        yield from require_columns(local_rows(path), COLUMNS, path.name)


def _joined(questions: Path, answers: Path) -> Iterator[Row]:
    """Rows of a leaderboard file with their answers. A category where no call or any call is correct has no file of
    answers."""
    category = _FILE.fullmatch(questions.name)[1]
    if category not in CATEGORIES:
        raise DataError(
            f"{questions.name} holds category {category}; required: one of {', '.join(CATEGORIES)}; choose another file"
        )
    truths: dict[str, Any] = {}
    if "relevance" not in category:
        if not answers.exists():
            raise MissingFile(
                f"{answers} does not exist; {questions.name} needs its possible answers there; copy the folder {ANSWERS} too"
            )
        truths = {str(row.get("id")): row.get("ground_truth") for _, row in read_jsonl(answers)}
    for number, row in read_jsonl(questions):
        name = str(row.get("id"))
        if not truths.keys() >= {name} and "relevance" not in category:
            raise DataError(
                f"{questions}:{number} has the id {name!r}; {answers.name} has no answer for it; take both files from one version"
            )
        yield {
            "id": name,
            "category": category,
            "question": row.get("question"),
            "functions": row.get("function"),
            "ground_truth": truths.get(name, []),
        }


def _hub_rows(categories: Iterable[str]) -> Iterator[Row]:
    """Rows of the hub's files, downloaded as they are: `datasets` cannot read columns that differ from row to row."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"the package huggingface_hub is not installed; it reads {HUB}; install it, or {REMEDY}"
        ) from None
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    probe_hub(HUB, remedy=REMEDY)
    for category in categories:
        names = [HUB_FILE.format(category)]
        names += [f"{ANSWERS}/{names[0]}"] if "relevance" not in category else []
        try:
            found = [Path(huggingface_hub.hf_hub_download(HUB, name, repo_type="dataset")) for name in names]
        except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise UserError(f"{names[0]} of {HUB} cannot be fetched ({str(error)[:200]}); {REMEDY}") from error
        yield from _joined(found[0], found[-1])


# ------------------------------------------------------------------ problems


def _problem(row: Row, category: str, tools_style: str) -> Problem | str:
    """A problem, or the reason why the row is lost."""
    try:
        question, functions, truth = (decoded(row[key]) for key in ("question", "functions", "ground_truth"))
        messages: list[Message] = conversation(question, functions, tools_style)
        tools = {tool["name"]: _parameters(tool) for tool in functions}
        answers = [_answer(call) for call in truth]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, DataError):
        return "bad_row"
    expect = "any" if category.endswith("_relevance") else "none" if category.endswith("irrelevance") else "calls"
    if (expect == "calls") != bool(answers) or not all(
        m["role"] in ROLES and isinstance(m["content"], str) for m in messages
    ):
        return "bad_row"
    if any(_unsolvable(answer, tools.get(answer["name"])) for answer in answers):
        return UNSOLVABLE
    gold = {"expect": expect, "answers": answers, "tools": tools}
    return Problem(str(row["id"]), messages, gold, "test", {"category": category, "tools_present": True})


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = tool.get("parameters") or {}
    return {"properties": dict(parameters.get("properties") or {}), "required": list(parameters.get("required") or ())}


def _answer(call: Mapping[str, Any]) -> dict[str, Any]:
    """{"name", "arguments"} of {name: arguments}, or as it is. ValueError unless each argument lists its values."""
    if call.keys() != {"name", "arguments"}:
        ((name, arguments),) = call.items()
        call = {"name": name, "arguments": arguments}
    if not all(isinstance(ways, list) for ways in call["arguments"].values()):
        raise ValueError(f"acceptable values of {call['name']} are no lists")
    return dict(call)


def _unsolvable(answer: Mapping[str, Any], tool: Mapping[str, Any] | None) -> bool:
    """True where the function is not on offer, a required argument has no answer, or an answer's argument is unknown to
    the function or has no values."""
    if tool is None or not set(tool["required"]) <= answer["arguments"].keys():
        return True
    return any(
        not ways or (key not in tool["properties"] and ABSENT not in ways) for key, ways in answer["arguments"].items()
    )
