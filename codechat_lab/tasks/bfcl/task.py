"""The Berkeley Function Calling Leaderboard, single turn: which functions are called, with which arguments, and
when none is.

    tasks.load("bfcl")                                    embedded hard cases, written by hand (`cases.jsonl`)
    tasks.load("bfcl:source=hub,categories=live")         the real problems, version 3; or --data-dir with the files

    BFCL_v4_simple_python.json            {id, question: [[message]], function: [schema]}, one JSON object per line
    possible_answer/BFCL_v4_....json      {id, ground_truth: [{name: {argument: [acceptable values]}}]}
    any .parquet or .jsonl                {id, category, question, functions, ground_truth}, values as JSON or as JSON
                                          text

The reward is 1 or 0, and the tier names the fault. Where no function fits, any attempted call is wrong, even an
unreadable one; in live_relevance any readable call of an offered function is correct. A row that no call can
satisfy is lost. Calls are
`<functioncall> {json}`, or Python's `[f(a=1), g.h(b="x")]` as the whole text: literals by name, a bare name is a
text. Nothing is run."""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError, UserError, check_choice
from codechat.data.offered_tools import schemas
from codechat.data.row_readers import NO_CALL
from codechat.data.sources import Ledger, local_rows, probe_hub, require_columns
from codechat.tasks.base import BaseTask, Message, Problem, Score
from codechat.text import chat
from codechat.text.python_source import parsed

Row = dict[str, Any]
# An acceptable value of an argument: it may be omitted.
ABSENT = ""
# From worst to best.
FAULTS = ("wrong_name", "missing_argument", "unexpected_argument", "wrong_type", "wrong_value")
# The leaderboard's names of types, and JSON schema's.
KINDS: dict[str, type] = {
    "string": str,
    "any": str,
    "integer": int,
    "float": float,
    "number": float,
    "boolean": bool,
}
KINDS |= {"array": list, "tuple": list, "dict": dict, "object": dict}
_IGNORED = re.compile(r"[ ,./\-_*^]")
NON_LIVE = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance")
CATEGORIES = (*NON_LIVE, *LIVE)
GROUPS = {"all": CATEGORIES, "live": LIVE, "non_live": NON_LIVE}
TIERS = ("no_call", "unreadable", "needless_call", "wrong_count", *FAULTS, "full")
HUB = "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
REMEDY = "give --data-dir with a directory of the leaderboard's files, or leave source=hub out for the embedded cases"
ANSWERS = "possible_answer"
COLUMNS = (("id", "category", "question", "functions", "ground_truth"),)
UNSOLVABLE = "no call can satisfy it"
LONGEST = 20_000  # characters; a limit against hostile input to Python's parser
FORMS_READ = (*chat.READABLE, "python")
UNREADABLE = chat.Call(None, None, "bad_python")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")  # math.gcd
_FILE = re.compile(r"BFCL_v\d+_(\w+?)(?:_python)?\.jsonl?")


class BfclTask(BaseTask):
    """source: "embedded", "hub" or a path. categories: a name of GROUPS or CATEGORIES, or several joined by +
    (ConfigError).
    ledger: counts of the rows."""

    name = "bfcl"
    tiers = TIERS
    splits = ("test",)
    grouped_by = "category"

    def __init__(self, source: str = "embedded", categories: str = "all") -> None:
        chosen: list[str] = []
        for name in categories.split("+"):
            check_choice("category", name, [*GROUPS, *CATEGORIES])
            chosen += GROUPS.get(name, [name])
        self.ledger = Ledger(f"bfcl {Path(source).name}")
        self.rows = list(self.ledger.counted(self._read(str(source), chosen)))
        self.ledger.check()

    def _read(self, source: str, categories: Collection[str]) -> Iterator[Problem | str]:
        for row in rows_of(source, categories):
            category = str(row["category"]).removesuffix("_python")  # version 4's name of the plain ones
            if category in categories:
                yield problem_of(row | {"category": category})
            else:
                self.ledger.skip("another category")

    def prompt(self, problem: Problem) -> list[Message]:
        """The messages behind the list of tools, which precedes their own system text."""
        given = [m["content"] for m in problem.messages if m["role"] == "system"]
        system = "\n\n".join([chat.tools_prompt(problem.gold["listed"], self.tools_style), *given])
        return [{"role": "system", "content": system}, *(m for m in problem.messages if m["role"] != "system")]

    def score(self, problem: Problem, completion: str) -> Score:
        calls = chat.parse_calls(completion) if chat.CALL_TAG in completion else _python_calls(completion.strip())
        tier = tier_of(calls, problem.gold)
        parts = {"calls": len(calls), "form": calls[0].form if calls else None}
        return Score(float(tier == "full"), tier, parts, tier == "full")

    def gold(self, problem: Problem) -> str:
        """The first acceptable value of every required argument."""
        gold = problem.gold
        if gold["expect"] == "none":
            return NO_CALL
        if gold["expect"] == "any":
            return chat.format_call(next(iter(gold["tools"])), {})
        return "\n".join(_call(answer, gold["tools"][answer["name"]]) for answer in gold["answers"])


def tier_of(calls: Sequence[chat.Call], gold: Mapping[str, Any]) -> str:
    """The rung of TIERS that a completion's calls reach."""
    if gold["expect"] == "none":
        return "needless_call" if calls else "full"
    if not calls:
        return "no_call"
    if any(call.form not in FORMS_READ for call in calls):
        return "unreadable"
    if gold["expect"] == "any":
        return "full" if all(call.name in gold["tools"] for call in calls) else "wrong_name"
    return fault_of_calls([(c.name, c.arguments) for c in calls], gold["answers"], gold["tools"]) or "full"


def _call(answer: Mapping[str, Any], tool: Mapping[str, Any]) -> str:
    """The call with the first acceptable value of every argument that is due."""
    ways = {k: ways for k, ways in answer["arguments"].items() if ABSENT not in ways or k in tool["required"]}
    return chat.format_call(answer["name"], {k: _first(values) for k, values in ways.items()})


def _first(ways: Sequence[Any]) -> Any:
    return _resolved(next(way for way in ways if way != ABSENT or ways == [ABSENT]))


def _resolved(value: Any) -> Any:
    """The value, with the first acceptable one of each key inside objects: there each key lists its own values."""
    if isinstance(value, list):
        return [_resolved(v) for v in value]
    if not isinstance(value, Mapping):
        return value
    listed = {k: (v or [ABSENT]) if isinstance(v, list) else [v] for k, v in value.items()}
    return {k: _first(ways) for k, ways in listed.items() if ABSENT not in ways}


#
# Whether a call matches a possible answer: the type and value rules of the Berkeley Function Calling Leaderboard.
#
# An answer is {"name", "arguments": {argument: [acceptable values]}}; "" among the values means that the
# argument may be
# omitted. A call must have the answer's name, every required argument and no unknown one, and each value must have the
# declared type and equal an acceptable one:
#
# - an int is a float, a float never an int, a bool no number; inside a list only as the answer itself has it;
# - a value of another type is accepted if the answer's first value has that type (a variable's name, null), letter
# by letter;
# - strings are compared without case, blanks and ,./-_*^ and with ' read as ", at any depth;
# - a tuple is a list; lists match in order; in an object each key lists its own acceptable values;
# - an omission may be written as "" for a string and [] for a list. Several calls match in any order.
#
# As gorilla's ast_checker (BFCL v4, Python), except: calls are matched exactly, not greedily; a bool is no
# number inside
# objects either; strings in nested lists are compared like others. Java and JavaScript are left out.


def fault_of_calls(
    calls: Sequence[tuple[str, Row]], answers: Sequence[Row], tools: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """None if calls and possible answers match one to one; else "wrong_count" or the one of FAULTS that prevents it.

    tools: name -> {"properties", "required"} of the functions on offer."""
    if len(calls) != len(answers):
        return "wrong_count"
    faults = [[fault_of_call(name, arguments, answer, tools) for name, arguments in calls] for answer in answers]
    matched: dict[int, int] = {}  # call -> answer
    alone = [i for i in range(len(answers)) if not _match(i, faults, matched, set())]
    if not alone:
        return None
    rest = [faults[alone[0]][k] for k in range(len(calls)) if k not in matched]
    return max((fault for fault in rest if fault), key=FAULTS.index)


def _match(
    answer: int,
    faults: Sequence[Sequence[str | None]],
    matched: dict[int, int],
    tried: set[int],
) -> bool:
    """Assign a call to the answer, moving earlier answers to other calls if needed (augmenting paths)."""
    for k, fault in enumerate(faults[answer]):
        if fault is None and k not in tried:
            tried.add(k)
            if k not in matched or _match(matched[k], faults, matched, tried):
                matched[k] = answer
                return True
    return False


def fault_of_call(
    name: str,
    arguments: Row,
    answer: Row,
    tools: Mapping[str, Mapping[str, Any]],
) -> str | None:
    """The first fault of a call, or None where it matches the answer."""
    if name != answer["name"]:
        return "wrong_name"
    tool = tools.get(name, {})
    ways_of = answer["arguments"]
    properties = tool.get("properties") or {}
    if any(key not in arguments for key in tool.get("required") or ()):
        return "missing_argument"
    for key, value in arguments.items():
        if key not in properties or key not in ways_of:
            return "unexpected_argument"
        fault = fault_of_value(value, ways_of[key], properties[key])
        if fault:
            return fault
    omitted = [ways for key, ways in ways_of.items() if key not in arguments]
    return "missing_argument" if any(ABSENT not in ways for ways in omitted) else None


def fault_of_value(value: Any, ways: Sequence[Any], schema: Mapping[str, Any]) -> str | None:
    """ "wrong_type", "wrong_value" or None. ways: the acceptable values. schema: of the argument."""
    kind = kind_of(schema)
    of_items = kind_of(schema.get("items")) if kind is list else None
    first = _first_type(ways)
    if kind is None or type(value) is kind or (kind is float and type(value) is int):
        if of_items and not any(_items_fit(value, way, of_items) for way in ways):
            return "wrong_type"
    elif type(value) is not first:
        return "wrong_type"
    if kind is None or first not in (kind, None):
        fits = any(same(value, way, str if kind else standardised) for way in ways)
    elif kind is dict:
        fits = any(_object_fits(value, way) for way in ways)
    else:
        spelled = [[] if kind is list and way == ABSENT else way for way in ways]
        fits = any(_objects_fit(value, way) if of_items is dict else same(value, way) for way in spelled)
    return None if fits else "wrong_value"


def kind_of(schema: Any) -> type | None:
    """The declared type, or None where the schema declares no known type."""
    named = schema.get("type") if isinstance(schema, Mapping) else None
    return KINDS.get(named) if isinstance(named, str) else None


def _first_type(ways: Sequence[Any]) -> type | None:
    return next((type(way) for way in ways if way != ABSENT), None)


def _items_fit(value: Sequence[Any], way: Any, kind: type) -> bool:
    """Each item has the declared type, or that of the first item of the acceptable list."""
    return not isinstance(way, list) or all(type(item) in (kind, _first_type(way)) for item in value)


def standardised(text: str) -> str:
    """The text for comparison: "April 1,2024" becomes "april 12024"."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


def same(value: Any, expected: Any, spelled: Callable[[str], str] = standardised) -> bool:
    """Equality of JSON values, strings after `spelled`. Recurses only as deep as `expected`."""
    if isinstance(expected, str):
        return isinstance(value, str) and spelled(value) == spelled(expected)
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(same(v, w, spelled) for v, w in zip(value, expected, strict=True))
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or value.keys() != expected.keys():
            return False
        return all(same(value[k], expected[k], spelled) for k in expected)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _object_fits(value: Mapping[str, Any], way: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(way, Mapping) or not value.keys() <= way.keys():
        return False
    return all(any(same(value[k], w) for w in ways) if k in value else ABSENT in ways for k, ways in way.items())


def _objects_fit(value: Sequence[Any], way: Any) -> bool:
    return isinstance(way, list) and len(value) == len(way) and all(map(_object_fits, value, way))


def _python_calls(text: str) -> list[chat.Call]:
    """Calls of a text that is a list of calls or one call with named arguments. Empty for anything else, such as
    "Sorry (no tool)"."""
    tree = parsed(text) if text.endswith((")", ")]")) and len(text) <= LONGEST else None
    match tree and tree.body:
        case [ast.Expr(ast.List(nodes))] if all(isinstance(node, ast.Call) for node in nodes):
            return list(map(_python_call, nodes))
        case [ast.Expr(ast.Call() as node)] if (call := _python_call(node)) != UNREADABLE:
            return [call]
    return []


def _python_call(node: ast.Call) -> chat.Call:
    words = {word.arg: word.value for word in node.keywords}
    if node.args or None in words or len(words) < len(node.keywords):
        return UNREADABLE
    try:
        if not _DOTTED.fullmatch(name := ast.unparse(node.func)):
            return UNREADABLE
        arguments = {key: ast.literal_eval(_JsonNames().visit(value)) for key, value in words.items()}
        json.dumps(arguments)  # refuses sets, bytes and complex numbers
        return chat.Call(name, arguments, "python")
    except (TypeError, ValueError, RecursionError):  # more than a literal
        return UNREADABLE


class _JsonNames(ast.NodeTransformer):
    """A name becomes a constant; a tuple becomes a list."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES.get(node.id, node.id))

    def visit_Tuple(self, node: ast.Tuple) -> ast.List:
        return ast.List([self.visit(item) for item in node.elts])


def rows_of(source: str, categories: Collection[str]) -> Iterator[Row]:
    """Rows of the embedded cases, of the hub, or of a path."""
    embedded = Path(__file__).with_name("cases.jsonl")
    path = embedded if source == "embedded" else _download(categories) if source == "hub" else Path(source)
    files = {path.name: path}
    if path.is_dir():
        named = [(name[1], file) for file in sorted(path.iterdir()) if (name := _FILE.fullmatch(file.name))]
        files = {category: file for category, file in named if category in categories} if named else files
        if len(files) < sum(category in categories for category, _ in named):
            raise DataError(f"{path} holds a category of {[*files]} twice; required: files of one version of the data")
    for file in files.values():
        if _FILE.fullmatch(file.name):
            yield from _joined(file, file.parent / ANSWERS / file.name)
        else:
            yield from require_columns(local_rows(file), COLUMNS, file.name)


def _download(categories: Collection[str]) -> Path:
    """The folder of the hub's files, as they are: `datasets` cannot read columns that differ from row to row."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    probe_hub(HUB, remedy=REMEDY)
    names = [f"{folder}BFCL_v3_{category}.json" for category in categories for folder in ("", f"{ANSWERS}/")]
    try:
        return Path(huggingface_hub.snapshot_download(HUB, repo_type="dataset", allow_patterns=names))
    except (OSError, HfHubHTTPError) as error:
        raise UserError(f"{HUB} cannot be fetched ({str(error)[:200]}); {REMEDY}") from error


def _joined(questions: Path, answers: Path) -> Iterator[Row]:
    """Rows of a leaderboard file with their answers. A category where no call or any call is correct has no answers."""
    category = _FILE.sub(r"\1", questions.name)
    truths = {} if "relevance" in category else {row.get("id"): row.get("ground_truth") for row in local_rows(answers)}
    for row in local_rows(questions):
        asked = {"question": row.get("question"), "functions": row.get("function")}
        yield {
            "id": row.get("id"),
            "category": category,
            "ground_truth": truths.get(row.get("id"), []),
            **asked,
        }


def problem_of(row: Row) -> Problem | str:
    """A problem, or the reason why the row is lost."""
    category = row["category"]
    try:
        columns = (row[key] for key in ("question", "functions", "ground_truth"))
        question, functions, truth = (json.loads(c) if isinstance(c, str) else c for c in columns)
        while question and isinstance(question[0], list):  # of several turns, the first
            question = question[0]
        messages = [{"role": m["role"], "content": m["content"]} for m in question]
        chat.tools_prompt(listed := schemas(functions))  # raises where they cannot be listed
        tools = {tool["name"]: _parameters(tool) for tool in functions}
        answers = [_answer(call) for call in truth]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, DataError):
        return "bad_row"
    expect = "any" if category.endswith("_relevance") else "none" if category.endswith("irrelevance") else "calls"
    readable = all(m["role"] in chat.ROLES and isinstance(m["content"], str) for m in messages)
    if not readable or (expect == "calls") != bool(answers):
        return "bad_row"
    if any(_unsolvable(answer, tools.get(answer["name"])) for answer in answers):
        return UNSOLVABLE
    gold = {"expect": expect, "answers": answers, "tools": tools, "listed": listed}
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
    known = tool["properties"]
    return any(not ways or (key not in known and ABSENT not in ways) for key, ways in answer["arguments"].items())
