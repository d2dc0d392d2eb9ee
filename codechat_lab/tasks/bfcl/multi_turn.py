"""The Berkeley Function Calling Leaderboard over several turns: requests to simulated systems
with state. An evaluation, and an environment for RL.

    codechat download bfcl
    codechat evaluate --ckpt RUN --task bfcl_multi_turn --n 1 --ks 1 --temperature 0
    codechat grpo --init-from RUN --task bfcl_multi_turn:categories=base,train_share=0.6

A turn begins with a request and ends with an answer without a call; its calls get the systems'
results, at most STEPS times. Categories: base; miss_func, where a function arrives a turn late;
miss_param, where the user forgets a value; long_context. Web search and memory are left out.

Correct as in the leaderboard's checker: after each turn, the systems' public state is that of
the reference calls, and all results of these have been seen. The reward is 1 for a correct
episode, else half the share of turns before the first fault. The systems are code of the
downloaded wheel, and run in the sandbox only, from the start at every step: episodes share no
state."""

import ast
import base64
import functools
import importlib.util
import itertools
import json
import marshal
from collections.abc import Collection, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from codechat.core.errors import (
    ConfigError,
    DataError,
    MissingFile,
    RunError,
    UserError,
    check_choice,
)
from codechat.data.offered_tools import schemas
from codechat.data.sources import Ledger, local_rows
from codechat.tasks.base import BaseTask, Message, Problem, Score, play
from codechat.text import chat, tool_calls, tool_lists
from codechat_lab.data.python_source import parsed
from codechat_lab.sandbox.values import ProgramFailed, value_of
from codechat_lab.tasks.bfcl import systems
from codechat_lab.tasks.bfcl.task import ANSWERS, calls_of, directory_of

Row = dict[str, Any]
Call = list[Any]  # name, positional, named
LONG = "long_context"  # the category, and the module of its texts
CATEGORIES = ("base", "miss_func", "miss_param", LONG)
LEFT_OUT = ("web_search", "memory")
TIERS = (
    "unfinished",
    "broken",
    "too_many_steps",
    "no_call",
    "wrong_state",
    "missing_result",
    "full",
)
STEPS = 20  # of a turn
ANSWER_S = 30.0  # most seconds of the systems for the calls of an episode
MORE = "I have updated some more functions you can choose from. What about now?"
DONE = "Done."
MODULES = "eval_checker/multi_turn_eval/func_source_code"
PACKAGE = "bfcl_eval." + MODULES.replace("/", ".")
# class -> the name of its module, and of the file that describes its functions
FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


class MultiTurnTask(BaseTask):
    """source: the unpacked wheel, or its data; empty = what `codechat download bfcl` has
    fetched. categories: of CATEGORIES, joined by +, or all. train_share: share of the 200
    scenarios in split train, and a fifth of it in select; the rest is the test. The categories
    share the scenarios. max_turns: most answers of an episode.

    ConfigError, MissingFile, DataError."""

    name = "bfcl_multi_turn"
    tiers = TIERS
    grouped_by = "category"
    clustered_by = "scenario"

    def __init__(
        self,
        source: str = "",
        categories: str = "all",
        train_share: float = 0.0,
        max_turns: int = 8 * STEPS,
    ) -> None:
        if not 0 <= train_share <= 0.8 or max_turns < 1:
            raise ConfigError(
                f"got train_share {train_share}, max_turns {max_turns}; expected a share from 0 "
                "to 0.8, 1 or more answers; set others"
            )
        self.max_turns = max_turns
        self.data = directory_of(source)
        chosen = CATEGORIES if categories == "all" else tuple(categories.split("+"))
        for name in chosen:
            if name in LEFT_OUT:
                raise ConfigError(
                    f"category {name} needs a network or stores beside the systems; "
                    f"it is left out; choose of {', '.join(CATEGORIES)}"
                )
            check_choice("category", name, CATEGORIES)
        self.ledger = Ledger("bfcl_multi_turn")
        problems = (problem for name in chosen for problem in self._read(name, train_share))
        self.rows = list(self.ledger.counted(problems))
        self.ledger.check()
        check_systems({name for one in self.rows for name in one.gold["classes"]}, self.data)

    def _read(self, category: str, train_share: float) -> list[Problem | str]:
        name = f"BFCL_v4_multi_turn_{category}.json"
        path = self.data / name
        if not path.exists():
            raise MissingFile(f"{path} does not exist; fetch it with `codechat download bfcl`")
        answers = local_rows(self.data / ANSWERS / name)
        truths = {row.get("id"): row.get("ground_truth") for row in answers}
        return [
            problem_of(row, truths.get(row.get("id")), category, self.data, train_share)
            for row in local_rows(path)
        ]

    def environment(self) -> "MultiTurnEnvironment":
        return MultiTurnEnvironment(self.data, self.tools_style)

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def prompt(self, problem: Problem) -> list[Message]:
        return opening(problem, self.tools_style)

    # one text plays no episode; `gold_steps` has the answers of one
    no_references = "a reference solution is an episode of several answers"

    def gold(self, problem: Problem) -> str:
        return "\n".join(gold_steps(problem))


def problem_of(
    row: Row, truth: Any, category: str, data: Path, train_share: float
) -> Problem | str:
    """A problem, or the reason why the row is lost. MissingFile, DataError for a system that is
    not there."""
    try:
        number = int(row["id"].rpartition("_")[2])
        classes = {name: module_of(name, data) for name in row["involved_classes"]}
        functions = [tool for name in classes for tool in documents(name, data)]
        late = row.get("missed_function") or {}
        names_late = set(itertools.chain(*late.values()))
        turns: list[Row] = []
        for place, messages in enumerate(row["question"]):
            new = late.get(str(place), ())
            turn = {
                "messages": [_message(m) for m in messages],
                "functions": [f for f in functions if f["name"] in new],
                "expected": [call_of(text) for text in truth[place]],
            }
            turns.append(turn)
        config = {name: dict(state) for name, state in row["initial_config"].items()}
        first = turns[0]["messages"]
    except UserError:  # also a ValueError, but no fault of the row
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, SyntaxError):
        return "bad_row"
    gold = {
        "classes": classes,
        "config": config,
        "long_context": category == LONG,
        "functions": [f for f in functions if f["name"] not in names_late],
        "turns": turns,
    }
    meta = {"category": category, "scenario": str(number), "tools_present": True}
    split = split_of(number, train_share)
    return Problem(row["id"], first, gold, split, meta)


def _message(given: Row) -> Message:
    """The message of a row. ValueError unless it is a text of a known role."""
    if given["role"] not in chat.ROLES or not isinstance(given["content"], str):
        raise ValueError("no message")
    return {"role": given["role"], "content": given["content"]}


def split_of(number: int, train_share: float) -> str:
    """The split of a scenario: 37 has no common factor with 100, so any hundred are spread."""
    place = number * 37 % 100
    if place < 100 * train_share:
        return "train"
    return "select" if place < 120 * train_share else "test"


def module_of(name: str, data: Path) -> str:
    """The module of a class. MissingFile where the wheel lacks it."""
    if name not in FILES:
        raise DataError(
            f"system {name} is unknown; expected one of {', '.join(FILES)}; "
            "fetch the data again with `codechat download bfcl`"
        )
    path = _file(FILES[name], data)
    if not path.is_file():
        raise MissingFile(f"system {name} is missing: {path} does not exist; {_again(data)}")
    return f"{PACKAGE}.{FILES[name]}"


def check_systems(names: Collection[str], data: Path) -> None:
    """MissingFile or DataError where a module of these classes, or what they import, is missing
    or damaged: an episode would count that as a fault of the model. Nothing of them is run."""
    needed = {FILES[name]: f"class {name}" for name in sorted(names)}
    needed[LONG] = ""
    for module, words in needed.items():
        path = _file(module, data)
        if not path.is_file():
            raise MissingFile(f"{path} does not exist; systems import it; {_again(data)}")
        text = path.read_text(encoding="utf-8", errors="replace")
        if words not in text or parsed(text) is None:
            raise DataError(f"{path} is damaged; expected Python with {words!r}; {_again(data)}")


def _file(module: str, data: Path) -> Path:
    return data.parent / MODULES / f"{module}.py"


def _again(data: Path) -> str:
    if data.parent.name != "bfcl_eval":
        return "give the folder that `codechat download bfcl` makes"
    return f"remove {data.parent.parent} and fetch it again with `codechat download bfcl`"


@functools.lru_cache(maxsize=64)
def documents(name: str, data: Path) -> list[Row]:
    """The schemas of a system's functions, without what they return."""
    rows = local_rows(data / "multi_turn_func_doc" / f"{FILES[name]}.json")
    return schemas([{key: row[key] for key in row if key != "response"} for row in rows])


def call_of(text: str) -> Call:
    """A reference call: Python with literals."""
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"{text} is no call")
    named = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return [node.func.id, [ast.literal_eval(value) for value in node.args], named]


def opening(problem: Problem, style: str) -> list[Message]:
    """The messages before the first answer."""
    listed = tool_lists.tools_prompt(problem.gold["functions"], style)
    return [{"role": "system", "content": listed}, *problem.messages]


def gold_steps(problem: Problem) -> list[str]:
    """Answers that make the reference calls, one turn after the other."""
    steps = []
    for turn in problem.gold["turns"]:
        calls = [named_call(call, problem) for call in turn["expected"]]
        steps += ["\n".join(calls), DONE] if calls else [DONE]
    return steps


def named_call(call: Call, problem: Problem) -> str:
    """A reference call in our form: its positional arguments get the names of the schema."""
    name, positional, named = call
    turns = problem.gold["turns"]
    functions = problem.gold["functions"] + [f for turn in turns for f in turn["functions"]]
    properties = next(f["parameters"]["properties"] for f in functions if f["name"] == name)
    return tool_calls.format_call(name, dict(zip(properties, positional)) | named)


class MultiTurnEnvironment:
    """One episode at a time. data: of the unpacked wheel. tools_style: how the system message
    lists functions."""

    def __init__(self, data: Path, tools_style: str = "compact") -> None:
        self.data = data
        self.tools_style = tools_style
        self.closed = True

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode. The seed has no effect: the scenarios are fixed."""
        self.problem = problem
        self.closed = False
        self.turns: list[list[Call]] = [[]]  # calls so far
        self.steps = 0  # of this turn
        self.finished = 0  # turns
        self.needless = 0  # calls in turns where none is right
        self.right = 0  # turns before the first fault
        self.tier = "unfinished"
        self.why = ""
        return opening(problem, self.tools_style)

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the calls of an answer; an answer without a readable call ends the turn."""
        if self.closed:
            return [], 0.0, True
        before = self.score().reward
        calls = calls_of(message["content"])
        readable: list[Call] = [
            [call.name, [], call.arguments]
            for call in calls
            if call.form in (*tool_calls.READABLE, "python")
        ]
        told = self._run(readable) if readable and len(readable) == len(calls) else self._next()
        return told, self.score().reward - before, self.closed

    def _run(self, calls: list[Call]) -> list[Message]:
        turn = self.problem.gold["turns"][self.finished]
        self.turns[-1] += calls
        self.steps += 1
        if not turn["expected"]:
            self.needless += len(calls)
        answer = self._systems([])
        if self.steps > STEPS:
            self.tier = "too_many_steps"
            self.closed = True
        if answer is None:
            return []
        results = answer["results"][-1][-len(calls) :]
        return [{"role": "function", "content": tool_calls.without_tags(text)} for text in results]

    def _next(self) -> list[Message]:
        """Judge the turn, and begin the next one."""
        turns = self.problem.gold["turns"]
        self.finished += 1
        answer = self._systems([turn["expected"] for turn in turns[: self.finished]])
        if answer is not None:
            self.right = sum(answer["right"])
        if answer is not None and (answer["fault"] or self.finished == len(turns)):
            self.tier = answer["fault"] or "full"
            self.closed = True  # the published check ends at the first fault
        if self.closed:
            return []
        self.turns.append([])
        self.steps = 0
        turn = turns[self.finished]
        if turn["functions"]:
            listed = tool_lists.tools_prompt(turn["functions"], self.tools_style)
            return [{"role": "user", "content": f"{listed}\n{MORE}"}]
        return list(turn["messages"])

    def _systems(self, expected: Sequence[Sequence[Call]]) -> Row | None:
        """The systems' answer to all calls so far; None where they could not be run with them,
        which ends the episode."""
        gold = self.problem.gold
        job = {
            "classes": gold["classes"],
            "config": gold["config"],
            "long_context": gold["long_context"],
            "turns": self.turns,
            "expected": expected,
        }
        called = {call[0] for turn in self.turns for call in turn}
        called |= {call[0] for turn in expected for call in turn}
        code = program(self.data, tuple(gold["classes"].values()), "logarithm" in called)
        try:
            return json.loads(value_of(code, "play", json.dumps(job), timeout_s=ANSWER_S))
        except ProgramFailed as error:
            self.tier = "broken"
            self.why = str(error)
            self.closed = True
            return None

    def state_diff(self) -> list[Any]:
        """The calls of this turn."""
        return list(self.turns[-1])

    def score(self) -> Score:
        turns = len(self.problem.gold["turns"])
        correct = self.tier == "full"
        parts = {
            "turns": turns,
            "right": self.right,
            "needless": self.needless,
            "calls": sum(map(len, self.turns)),
            "reason": self.why,
        }
        return Score(1.0 if correct else 0.5 * self.right / turns, self.tier, parts, correct)


@functools.lru_cache(maxsize=64)
def program(data: Path, modules: tuple[str, ...], with_mpmath: bool) -> str:
    """The sandbox's program: `systems` and the modules, compiled, since a process reads them anew
    at every step. Compiling runs nothing of them."""
    sources = {"mpmath": ""}
    for name in (*modules, f"{PACKAGE}.{LONG}"):
        sources[name] = _file(name.rpartition(".")[2], data).read_text(encoding="utf-8")
    if not any("long_context import" in sources[name] for name in modules):
        sources.pop(f"{PACKAGE}.{LONG}")
    if with_mpmath:
        sources |= mpmath_sources()
    own = Path(systems.__file__).read_text(encoding="utf-8")
    packed = marshal.dumps({name: _compiled(text, name) for name, text in sources.items()})
    lines = [
        "import base64, marshal",
        f"exec(marshal.loads(base64.b64decode({_text(marshal.dumps(_compiled(own, 'systems')))!r})))",
        f"install(marshal.loads(base64.b64decode({_text(packed)!r})))",
    ]
    return "\n".join(lines)


def _compiled(source: str, name: str) -> CodeType:
    return compile(source, f"<{name}>", "exec", dont_inherit=True)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def mpmath_sources() -> dict[str, str]:
    """The modules of mpmath, which one function of MathAPI calls. RunError where it is missing."""
    spec = importlib.util.find_spec("mpmath")
    if spec is None or spec.origin is None:
        raise RunError("MathAPI.logarithm needs mpmath, which is not installed; pip install mpmath")
    root = Path(spec.origin).parent
    sources = {}
    for path in root.rglob("*.py"):
        names = path.relative_to(root.parent).with_suffix("").parts
        if "tests" not in names:
            name = ".".join(names).removesuffix(".__init__")
            sources[name] = path.read_text(encoding="utf-8")
    return sources
