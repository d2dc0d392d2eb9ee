"""The Berkeley Function Calling Leaderboard, single turn: which functions are called, with
which arguments, and when none is.

    codechat download bfcl                        version 4, once
    tasks.load("bfcl:categories=live")            its problems; or --data-dir with its files
    tasks.load("bfcl:source=embedded")            hard cases, written by hand (`cases.jsonl`)

    BFCL_v4_simple_python.json            {id, question: [[message]], function: [schema]}, one JSON object per line
    possible_answer/BFCL_v4_....json      {id, ground_truth: [{name: {argument: [acceptable values]}}]}
    any .parquet or .jsonl                {id, category, question, functions, ground_truth}, values as JSON or as JSON
                                          text

The reward is 1 or 0. The tier names the fault (`matching.py`) and parts["fault"] its kind
(`kinds.py`). Where no function fits, any
attempted call is wrong, even an unreadable one; in live_relevance any readable call of an
offered function is correct. A row that no call can satisfy is lost. Calls are `<functioncall>
{json}`, or Python's `[f(a=1), g.h(b="x")]` as the whole text: literals by name, a bare name is
a text. Nothing is run."""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.errors import DataError, MissingFile, check_choice
from codechat.data.offered_tools import schemas
from codechat.data.row_readers import NO_CALL
from codechat.data.sources import Ledger, local_rows, require_columns
from codechat.runs import paths
from codechat.tasks.base import BaseTask, Message, Problem, Score
from codechat.text import chat, tool_calls, tool_lists
from codechat_lab.data.python_source import parsed
from codechat_lab.tasks.bfcl import literals
from codechat_lab.tasks.bfcl.kinds import kind_of_fault
from codechat_lab.tasks.bfcl.matching import ABSENT, FAULTS, fault_of_call, fault_of_calls

Row = dict[str, Any]
NON_LIVE = (
    "simple",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
)
LIVE = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
CATEGORIES = (*NON_LIVE, *LIVE)
GROUPS = {"all": CATEGORIES, "live": LIVE, "non_live": NON_LIVE}
TIERS = ("no_call", "unreadable", "needless_call", "wrong_count", *FAULTS, "full")
DOWNLOADED = Path("data", "hub", "bfcl")  # by `codechat download bfcl`
ANSWERS = "possible_answer"
# What the system message says beside the list of functions; "leaderboard" has the sentences of
# the published prompt, but for those about another form of calls.
WORDINGS = {
    "plain": "",
    "short": "Call the functions that the request needs. If none fits, say so.",
    "leaderboard": (
        "You are an expert in composing functions. You are given a question and a set of possible "
        "functions. Based on the question, you will need to make one or more function/tool calls "
        "to achieve the purpose. If none of the functions can be used, point it out. If the given "
        "question lacks the parameters required by the function, also point it out."
    ),
}
COLUMNS = (("id", "category", "question", "functions", "ground_truth"),)
UNSOLVABLE = "no call can satisfy it"
LONGEST = 20_000  # characters; a limit against hostile input to Python's parser
FORMS_READ = (*tool_calls.READABLE, "python")
UNREADABLE = tool_calls.Call(None, None, "bad_python")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")  # math.gcd
_FILE = re.compile(r"BFCL_v\d+_(\w+?)(?:_python)?\.jsonl?")


class BfclTask(BaseTask):
    """source: "embedded" or a path; empty = what `codechat download bfcl` has fetched.
    categories: a name of GROUPS or CATEGORIES, or several joined by +. wording: of WORDINGS.
    ledger: counts of the rows. ConfigError for an unknown name."""

    name = "bfcl"
    tiers: tuple[str, ...] = TIERS
    splits = ("test",)
    grouped_by = "category"
    opposed_by = "right_is"

    def __init__(self, source: str = "", categories: str = "all", wording: str = "plain") -> None:
        check_choice("wording", wording, WORDINGS)
        self.wording = wording
        chosen: list[str] = []
        for name in categories.split("+"):
            check_choice("category", name, [*GROUPS, *CATEGORIES])
            chosen += GROUPS.get(name, [name])
        self.ledger = Ledger(f"bfcl {Path(source).name}".strip())
        self.rows = list(self.ledger.counted(self._read(str(source), chosen)))
        self.ledger.check()
        found = {problem.meta["category"] for problem in self.rows}
        for name in categories.split("+"):
            if name not in GROUPS and name not in found:
                raise DataError(
                    f"{self.ledger.source} has no problem of category {name}; leave it out"
                )

    def _read(self, source: str, categories: Collection[str]) -> Iterator[Problem | str]:
        for row in rows_of(source, categories):
            # version 4's name of the plain ones
            category = str(row["category"]).removesuffix("_python")
            if category in categories:
                yield problem_of(row | {"category": category})
            else:
                self.ledger.skip("another category")

    def prompt(self, problem: Problem) -> list[Message]:
        """The messages behind the list of tools, which precedes their own system text."""
        given = [m["content"] for m in problem.messages if m["role"] == "system"]
        listed = tool_lists.tools_prompt(problem.gold["listed"], self.tools_style)
        system = "\n\n".join(filter(None, [listed, WORDINGS[self.wording], *given]))
        return [
            {"role": "system", "content": system},
            *(m for m in problem.messages if m["role"] != "system"),
        ]

    def score(self, problem: Problem, completion: str) -> Score:
        calls = calls_of(completion)
        tier = tier_of(calls, problem.gold)
        parts = {"calls": len(calls), "form": calls[0].form if calls else None}
        if tier != "full":
            parts["fault"] = kind_of_fault(tier, calls, problem)
        return Score(float(tier == "full"), tier, parts, tier == "full")

    def gold(self, problem: Problem) -> str:
        """The first acceptable value of every required argument."""
        gold = problem.gold
        if gold["expect"] == "none":
            return NO_CALL
        if gold["expect"] == "any":
            return tool_calls.format_call(next(iter(gold["tools"])), {})
        return "\n".join(
            tool_calls.format_call(answer["name"], _due(answer, gold["tools"][answer["name"]]))
            for answer in gold["answers"]
        )


def tier_of(calls: Sequence[tool_calls.Call], gold: Mapping[str, Any]) -> str:
    """The rung of TIERS that a completion's calls reach."""
    if gold["expect"] == "none":
        return "needless_call" if calls else "full"
    if not calls:
        return "no_call"
    read: list[tuple[str, Row]] = []
    for call in calls:
        if call.form not in FORMS_READ or call.name is None or call.arguments is None:
            return "unreadable"
        read.append((call.name, call.arguments))
    if gold["expect"] == "any":
        return "full" if all(name in gold["tools"] for name, _ in read) else "wrong_name"
    return fault_of_calls(read, gold["answers"], gold["tools"]) or "full"


def _due(answer: Mapping[str, Any], tool: Mapping[str, Any]) -> Row:
    """The first acceptable value of every argument that is due."""
    due = {
        key: _first(ways)
        for key, ways in answer["arguments"].items()
        if ABSENT not in ways or key in tool["required"]
    }
    language = tool["language"]
    if language == literals.PYTHON:
        return due
    texts = {}
    for key, value in due.items():
        texts[key] = literals.written(value, tool["properties"][key], language)
    return texts


def _first(ways: Sequence[Any]) -> Any:
    return _resolved(next((way for way in ways if way != ABSENT), ABSENT))


def _resolved(value: Any) -> Any:
    """The value, with the first acceptable one of each key inside objects: there each key lists
    its own values."""
    if isinstance(value, list):
        return [_resolved(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    resolved = {}
    for key, listed in value.items():
        ways = listed if isinstance(listed, list) else [listed]
        if ways and ABSENT not in ways:
            resolved[key] = _first(ways)
    return resolved


def calls_of(text: str) -> list[tool_calls.Call]:
    """The calls of a completion, in our form or in Python's."""
    return tool_calls.parse_calls(text) if tool_calls.CALL_TAG in text else _python_calls(text)


def _python_calls(text: str) -> list[tool_calls.Call]:
    """Calls of a text that is a list of calls with named arguments. As in the leaderboard's
    reader, marks of a code block around it are no part of it, and either bracket may be missing.
    Empty for anything else, such as "Sorry (no tool)"."""
    text = text.strip("`\n ")
    listed = text.startswith("[")
    text = f"[{text.removeprefix('[').removesuffix(']')}]"
    tree = parsed(text) if len(text) <= LONGEST else None
    match tree.body if tree else []:
        case [ast.Expr(ast.List(nodes))]:
            calls = []
            for node in nodes:
                if not isinstance(node, ast.Call):
                    return []
                calls.append(_python_call(node))
            # a sentence may look like a call
            if listed or calls != [UNREADABLE]:
                return calls
    return []


def _python_call(node: ast.Call) -> tool_calls.Call:
    # None: **words
    words = {word.arg: word.value for word in node.keywords if word.arg is not None}
    if node.args or len(words) < len(node.keywords):
        return UNREADABLE
    try:
        name = ast.unparse(node.func)
        if not _DOTTED.fullmatch(name):
            return UNREADABLE
        arguments = {
            key: ast.literal_eval(_JsonNames().visit(value)) for key, value in words.items()
        }
        json.dumps(arguments)  # refuses sets, bytes and complex numbers
        return tool_calls.Call(name, arguments, "python")
    except (TypeError, ValueError, RecursionError):  # more than a literal
        return UNREADABLE


class _JsonNames(ast.NodeTransformer):
    """A name becomes a constant; a tuple becomes a list."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES.get(node.id, node.id))

    def visit_Tuple(self, node: ast.Tuple) -> ast.List:
        return ast.List([self.visit(item) for item in node.elts])


def rows_of(source: str, categories: Collection[str]) -> Iterator[Row]:
    """Rows of the embedded cases, of the downloaded wheel, or of a path. MissingFile."""
    for file in _files(directory_of(source), categories):
        if _FILE.fullmatch(file.name):
            yield from _joined(file, file.parent / ANSWERS / file.name)
        else:
            yield from require_columns(local_rows(file), COLUMNS, file.name)


def directory_of(source: str) -> Path:
    """Where the files of a source are; the root of an unpacked wheel stands for its data."""
    if source == "embedded":
        return Path(__file__).with_name("cases.jsonl")
    path = Path(source) if source else paths.ROOT / DOWNLOADED
    if not source and not path.exists():
        raise MissingFile(
            f"{path} does not exist; `codechat download bfcl` fetches it (1.9 MB); "
            "bfcl:source=embedded has 29 cases written by hand"
        )
    data = path / "bfcl_eval" / "data"
    return data if data.is_dir() else path


def _files(path: Path, categories: Collection[str]) -> list[Path]:
    """The leaderboard's files of these categories in a directory; the path itself where it has
    none of its files."""
    named = (
        [file for file in sorted(path.iterdir()) if _FILE.fullmatch(file.name)]
        if path.is_dir()
        else []
    )
    if not named:
        return [path]
    files: dict[str, Path] = {}
    for file in named:
        category = _FILE.sub(r"\1", file.name)
        if category not in categories:
            continue
        if category in files:
            raise DataError(
                f"{path} holds category {category} twice; expected files of one version of the data"
            )
        files[category] = file
    return list(files.values())


def _joined(questions: Path, answers: Path) -> Iterator[Row]:
    """Rows of a leaderboard file with their answers. A category where no call or any call is
    correct has no answers."""
    category = _FILE.sub(r"\1", questions.name)
    truths = (
        {}
        if "relevance" in category
        else {row.get("id"): row.get("ground_truth") for row in local_rows(answers)}
    )
    for row in local_rows(questions):
        yield {
            "id": row.get("id"),
            "category": category,
            "ground_truth": truths.get(row.get("id"), []),
            "question": row.get("question"),
            "functions": row.get("function"),
        }


class _Columns(NamedTuple):
    """What a row holds."""

    messages: list[Message]
    listed: list[Any]  # the schemas of the functions on offer
    tools: dict[str, Row]
    answers: list[Row]


def problem_of(row: Row) -> Problem | str:
    """A problem, or the reason why the row is lost."""
    category = row["category"]
    try:
        columns = _read(row)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, DataError):
        return "bad_row"
    if category.endswith("_relevance"):
        expect = "any"
    else:
        expect = "none" if category.endswith("irrelevance") else "calls"
    readable = all(
        m["role"] in chat.ROLES and isinstance(m["content"], str) for m in columns.messages
    )
    if not readable or (expect == "calls") != bool(columns.answers):
        return "bad_row"
    gold = {
        "expect": expect,
        "answers": columns.answers,
        "tools": columns.tools,
        "listed": columns.listed,
    }
    if any(_unsolvable(answer, columns.tools.get(answer["name"])) for answer in columns.answers):
        return UNSOLVABLE
    return Problem(
        str(row["id"]),
        columns.messages,
        gold,
        "test",
        {
            "category": category,
            "right_is": "no call" if expect == "none" else "call",
            "tools_present": True,
        },
    )


def _read(row: Row) -> _Columns:
    """Raises whatever a malformed row makes the steps raise."""
    question = _value(row["question"])
    functions = _value(row["functions"])
    truth = _value(row["ground_truth"])
    while question and isinstance(question[0], list):  # of several turns, the first
        question = question[0]
    messages = [{"role": m["role"], "content": m["content"]} for m in question]
    language = row["category"].removeprefix("simple_")
    if language not in literals.NAMES:
        language = literals.PYTHON
    tools = {tool["name"]: _parameters(tool, language) for tool in functions}
    if language != literals.PYTHON:
        functions = [literals.as_texts(tool, language) for tool in functions]
    listed = schemas(functions)
    tool_lists.tools_prompt(listed)  # raises where they cannot be listed
    return _Columns(messages, listed, tools, [_answer(call) for call in truth])


def _value(column: Any) -> Any:
    """Some layouts hold JSON as text."""
    return json.loads(column) if isinstance(column, str) else column


def _parameters(tool: Mapping[str, Any], language: str) -> dict[str, Any]:
    parameters = tool.get("parameters") or {}
    return {
        "language": language,
        "properties": dict(parameters.get("properties") or {}),
        "required": list(parameters.get("required") or ()),
    }


def _answer(call: Mapping[str, Any]) -> dict[str, Any]:
    """{"name", "arguments"} of {name: arguments}, or as it is. ValueError unless each argument
    lists its values."""
    if call.keys() != {"name", "arguments"}:
        ((name, arguments),) = call.items()
        call = {"name": name, "arguments": arguments}
    if not all(isinstance(ways, list) for ways in call["arguments"].values()):
        raise ValueError(f"acceptable values of {call['name']} are no lists")
    return dict(call)


def _unsolvable(answer: Mapping[str, Any], tool: Mapping[str, Any] | None) -> bool:
    """True where the function is not on offer, a required argument has no answer, an
    answer's argument is unknown to the function or has no values, or its own values do not
    match it."""
    if tool is None or not set(tool["required"]) <= answer["arguments"].keys():
        return True
    known = tool["properties"]
    if any(
        not ways or (key not in known and ABSENT not in ways)
        for key, ways in answer["arguments"].items()
    ):
        return True
    # the rules for texts of Java and JavaScript cannot read every value
    name = answer["name"]
    return fault_of_call(name, _due(answer, tool), answer, {name: tool}) is not None
