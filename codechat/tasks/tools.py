"""Rows and a file of Python functions as a task: requests that a model answers with calls.

    codechat grpo --init-from released/nano --tools examples/my_tools.py --data-dir examples/my_requests.jsonl
    codechat evaluate --ckpt released/nano --tools examples/my_tools.py --data-dir examples/my_requests.jsonl

A row has a "prompt" and what is right ("calls" may be JSON text, as in a csv file):

    {"prompt": "What is tea?", "calls": [{"name": "price", "arguments": {"item": "tea"}}]}
    {"prompt": "What are two cups?", "answer": 12.0}
    {"prompt": "Sing!", "calls": []}                  no call is right

or the file defines `reward(messages, row)`, which judges every row: a number from 0 to 1 for the
conversation in OpenAI's form. It sees the state that the calls have left, since it runs where
they do: so a function must not run code that the model writes.

An episode is a conversation: the model calls, results and errors come back, until it answers
without a call. It ends earlier at the limits of calls and answers, and where a row of calls
alone has as many as it expects. Each episode has a world of its own (`text.tool_functions`).

    calls    the share of expected calls that were made, among those made or expected, whichever
             are more; the right function with other arguments, or refused, counts a quarter
    answer   1 where the last message ends with the text, or its last number is equal
    both     the mean"""

import contextlib
import copy
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.base import Message, Problem, Score, play
from codechat.tasks.custom import OwnRows, Row
from codechat.text import tool_calls
from codechat.text.tool_functions import FORMATS, Schema, given, misfit, read_tools
from codechat.text.tool_lists import tools_prompt
from codechat.text.tool_worlds import whole

NAME_CREDIT = 0.25  # of a call with the right function and other arguments
TIMES: dict[Any, Any] = {format: kind for kind, format in FORMATS.items()}
TOLERANCE = 1e-6  # numbers match within this, relative above 1 and absolute below
# Behind a word or a number a minus is a dash, as in 10-30 and 2026-01-31, and a point is none of
# the number, as in no.5 and 31.12.2026.
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:\d[\d,]*\.?\d*|(?<![\w.])\.\d+)(?:[eE][+-]?\d+)?")


class Judged(NamedTuple):
    """A reward from 0 to 1; why there is none."""

    reward: float
    error: str = ""


class ToolsTask(OwnRows):
    """tools: words of --tools. source: the rows. trust: run the functions in this process.
    max_turns, max_calls: most answers and calls of an episode."""

    name: str = "tools"
    first_option: ClassVar[str] = "tools"
    tiers: tuple[str, ...] = ("none", "error", "some", "full")
    answer_fields = ("calls", "answer")

    def __init__(
        self,
        tools: str | Sequence[str] = (),
        source: str | None = None,
        trust: bool = False,
        max_turns: int = 4,
        max_calls: int = 8,
    ) -> None:
        if not tools:
            raise ConfigError("got no functions; set --tools FILE.py")
        if source is None:
            raise ConfigError("got no rows; set --data-dir FILE.jsonl")
        if min(max_turns, max_calls) < 1:
            raise ConfigError(
                f"got max_turns {max_turns}, max_calls {max_calls}; expected 1 or more of each"
            )
        self.kit = read_tools([tools] if isinstance(tools, str) else tools, trust=trust)
        if self.kit.missing:
            raise ConfigError(
                f"--tools has no implementation of {min(self.kit.missing)}; "
                "define it in the Python file"
            )
        for name, schema in self.kit.schemas.items():
            if _is_endless(schema["parameters"]):
                raise ConfigError(
                    f"the schema of {name} refers to itself, by a default or alone, without an end; "
                    "leave that default or reference out"
                )
        file = self.kit.file
        self.content = digest(repr((file and file.source, self.kit.schemas)))
        self.judged = bool(file and file.judged)  # by the file's reward
        self.max_turns = max_turns
        self.max_calls = max_calls
        self.told = False
        super().__init__(source)
        if self.judged and any(map(self._wrong_answer, self._rows.values())):
            self.no_references = "its reward is a function, and some rows have no calls or answer"

    # ---- rows

    def lacks(self, row: Row) -> str:
        return "" if self.judged else self._wrong_answer(row)

    def _wrong_answer(self, row: Row) -> str:
        """What is wrong with the calls and the answer of a row; empty for nothing."""
        if not has_answer(row):
            return "expected calls or answer; add one, or define reward(messages, row) in the file"
        answer = expected_answer(row)
        if answer is not None and not _is_answer(answer):
            return f"got the answer {str(answer)[:40]!r}; expected a text or a number"
        calls = expected_calls(row)
        if calls is None:
            return ""
        if not isinstance(calls, list):
            return f"got the calls {str(calls)[:40]!r}; expected a list"
        if len(calls) > self.max_calls:
            return f"expected at most {self.max_calls} calls; raise max_calls"
        return self._wrong_calls(calls)

    def _wrong_calls(self, calls: Sequence[Any]) -> str:
        """What is wrong with expected calls; empty for nothing."""
        for one in calls:
            call = tool_calls.read_call(one)
            if call.name is None or call.name not in self.kit.schemas:
                return f"expected calls of {', '.join(self.kit.names)}"
            if call.arguments is None:
                return f"expected an object of arguments for {call.name}"
            parameters = self.kit.schemas[call.name]["parameters"]
            # stricter than for a model: an argument that the function does not have is an error
            problem = misfit(call.arguments, {"unevaluatedProperties": False} | parameters)
            if problem:
                return f"expected arguments that fit {call.name}: {problem}"
        return ""

    def answer_of(self, row: Row) -> Any:
        return {
            "calls": expected_calls(row),
            "answer": expected_answer(row),
            "tools": self.content,
        }

    def prompt(self, problem: Problem) -> list[Message]:
        """The messages of the row behind a system message that lists the functions."""
        offer = tools_prompt(list(self.kit.schemas.values()), self.tools_style)
        messages = problem.messages
        if messages[0]["role"] == "system":
            offer = f"{messages[0]['content']}\n\n{offer}"
            messages = messages[1:]
        return [{"role": "system", "content": offer}, *messages]

    def gold(self, problem: Problem) -> str:
        """The expected calls and the expected answer in one message."""
        answer = problem.gold["answer"]
        parts = [self._call_text(call) for call in problem.gold["calls"] or ()]
        if answer is not None or not parts:
            parts.append(tool_calls.DECLINED if answer is None else str(answer))
        return "\n".join(parts)

    def _call_text(self, given: Any) -> str:
        call = tool_calls.read_call(given)
        return tool_calls.format_call(call.name, call.arguments)

    # ---- episodes

    def environment(self) -> "ToolsEnvironment":
        return ToolsEnvironment(self)

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def row_of(self, problem: Problem) -> Row:
        return self._rows[problem.id]

    def say(self, problem: Problem, error: str) -> None:
        """The first failure of the file's reward."""
        if not self.told:
            asked = str(problem.messages[-1]["content"])[:60]
            print(f"task {self.name}, row {asked!r}: reward: {error}", file=sys.stderr)
        self.told = True


def has_answer(row: Row) -> bool:
    return expected_calls(row) is not None or expected_answer(row) is not None


def _is_answer(answer: Any) -> bool:
    """A text with letters or digits, or a number that can be equal to one."""
    if isinstance(answer, str):
        return bool(_plain(answer))
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return False
    # also an integer for which there is no float
    return abs(answer) <= sys.float_info.max


def expected_answer(row: Row) -> Any:
    """The expected answer. None where none is given: an empty one beside calls is the empty cell
    of a csv file."""
    answer = row.get("answer")
    return None if answer == "" and "calls" in row else answer


def expected_calls(row: Row) -> Any:
    """The expected calls, a list; one may stand without it, and both may be JSON text, as in a
    csv file. None where none are given."""
    calls = row.get("calls")
    if isinstance(calls, str):
        if not calls.strip():
            return None
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError):
            return calls
    if isinstance(calls, Mapping):
        calls = [calls]
    return list(map(tool_calls.function_of, calls)) if isinstance(calls, list) else calls


class ToolsEnvironment:
    """One conversation with the functions of a task."""

    def __init__(self, task: ToolsTask) -> None:
        self.task = task

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode in a new world; the seed has no effect."""
        self.problem = problem
        self.bench = self.task.kit.open()
        self.messages = self.task.prompt(problem)
        self.calls: list[tool_calls.Call] = []
        self.closed = False
        self.verdict: Score | None = None
        self.before = 0.0
        return self.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the calls of an answer; without one the episode ends. After its end nothing
        happens."""
        if self.closed:
            return [], 0.0, True
        self.verdict = None
        calls = tool_calls.parse_calls(message["content"])
        told = [{"role": "function", "content": self._respond(call)} for call in calls]
        self.messages = [*self.messages, dict(message), *told]
        self.closed = not calls or self._is_decided()
        before = self.before
        self.before = self.score().reward
        return told, self.before - before, self.closed

    def _respond(self, call: tool_calls.Call) -> str:
        if len(self.calls) >= self.task.max_calls:
            most = f"the limit of {self.task.max_calls} calls is reached"
            return json.dumps({"error": most})
        self.calls.append(call)
        return self.bench.respond(call)

    def _is_decided(self) -> bool:
        """Whether nothing more can be earned."""
        gold = self.problem.gold
        calls = gold["calls"]
        if self.task.judged or calls is None or gold["answer"] is not None:
            return len(self.calls) >= self.task.max_calls
        return len(self.calls) >= max(1, len(calls))

    def state_diff(self) -> list[Any]:
        """The calls so far."""
        return [[call.name, call.arguments] for call in self.calls]

    def score(self) -> Score:
        if self.verdict is None:
            if self.task.judged:
                judged = self._by_function()
            else:
                judged = Judged(self._by_row())
            reward = judged.reward
            parts: dict[str, Any] = {"calls": len(self.calls)}
            tier = "some"
            if judged.error:
                self.task.say(self.problem, judged.error)
                parts["error"] = judged.error
                tier = "error"
            elif reward == 0:
                tier = "none"
            elif reward == 1:
                tier = "full"
            self.verdict = Score(reward, tier, parts, tier == "full")
        return self.verdict

    def _by_function(self) -> Judged:
        """What the file's reward says of the conversation. It counts once the episode ends, or
        was cut."""
        messages, _ = tool_calls.as_openai(self.messages)
        # a trusted reward may change its row, which later episodes have too
        row = copy.deepcopy(dict(self.task.row_of(self.problem)))
        said = json.loads(self.bench.world.judge(messages, row))
        if "error" in said:
            return Judged(0.0, said["error"])
        return Judged(said["result"])

    def _by_row(self) -> float:
        gold = self.problem.gold
        credits = []
        if gold["calls"] is not None:
            credits.append(self._call_credit(gold["calls"]))
        if gold["answer"] is not None:
            credits.append(float(answers(self._last_text(), gold["answer"])))
        return sum(credits) / len(credits)

    def _call_credit(self, expected: Sequence[Any]) -> float:
        """See the module docstring."""
        if not expected:
            return float(not self.calls)
        left = [(call.name, self._settled(call)) for call in self.calls]
        wanted = [tool_calls.read_call(one) for one in expected]
        missed = []
        for call in wanted:
            one = (call.name, self._settled(call))
            if one in left:
                left.remove(one)
            else:
                missed.append(call.name)
        credit = float(len(wanted) - len(missed))
        names = [name for name, _ in left]
        for name in missed:
            if name in names:
                names.remove(name)
                credit += NAME_CREDIT
        return credit / max(len(wanted), len(self.calls))

    def _settled(self, call: tool_calls.Call) -> str:
        """The arguments as text, the same for all that mean the same; empty for those that no
        function got."""
        schema = self.task.kit.schemas.get(call.name or "")
        if schema is None or call.arguments is None:
            return ""
        parameters = schema["parameters"]
        if misfit(call.arguments, parameters):
            return ""
        arguments = given(call.arguments, parameters)
        return _as_text(settled(arguments, parameters, parameters))

    def _last_text(self) -> str:
        """What the last answer says behind its calls."""
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        if not texts:
            return ""
        calls = tool_calls.parse_calls(texts[-1])
        return calls[-1].after if calls else texts[-1]


def settled(value: Any, schema: Any, root: Schema) -> Any:
    """A value that fits a schema, in one form of those that mean the same: with the default of
    what is left out, at any depth, sets in one order, and whole times. root: the schema that has
    the classes."""
    from codechat.text import json_schemas  # a tenth of a second, which no --help needs

    if not isinstance(schema, Mapping):
        return whole(value)
    if "$ref" in schema:
        return settled(value, _referred(schema["$ref"], root), root)
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if json_schemas.fits(value, one, root):
            return settled(value, one, root)
    if isinstance(value, dict):
        kinds = schema.get("properties") or {}
        rest = schema.get("additionalProperties")
        filled = dict(value)
        for name, kind in kinds.items():
            if isinstance(kind, Mapping) and "default" in kind:
                filled.setdefault(name, kind["default"])
        for name, item in filled.items():
            filled[name] = settled(item, kinds.get(name, rest), root)
        return filled
    if isinstance(value, list):
        kinds = itertools.chain(
            schema.get("prefixItems", ()), itertools.repeat(schema.get("items"))
        )
        items = [settled(item, kind, root) for item, kind in zip(value, kinds)]
        if schema.get("uniqueItems"):
            items.sort(key=_as_text)
        return items
    kind = TIMES.get(schema.get("format", ""))
    if kind and isinstance(value, str):
        with contextlib.suppress(ValueError):  # the function then gets an error, too
            return kind.fromisoformat(value).isoformat()
    return whole(value)


def _is_endless(parameters: Schema) -> bool:
    """Whether what is left out could be filled with defaults for ever."""
    from codechat.text import json_schemas  # a tenth of a second, which no --help needs

    try:
        for part in _parts(parameters):
            # a reference to nothing is no matter until a row gives such a value
            with contextlib.suppress(json_schemas.Unresolvable):
                settled({}, part, parameters)
    except RecursionError:
        return True
    return False


def _parts(schema: Any) -> Iterator[Schema]:
    """A schema and those in it at any depth: each may be what a row gives a value of."""
    if not isinstance(schema, Mapping):
        return
    yield dict(schema)
    inner = [
        schema.get("items"),
        schema.get("additionalProperties"),
    ]
    for named in ("properties", "$defs", "definitions"):
        inner += (schema.get(named) or {}).values()
    for listed in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner += schema.get(listed) or ()
    for part in inner:
        yield from _parts(part)


def _referred(reference: str, root: Schema) -> Any:
    """The part of a schema that `#/$defs/Item` names; None for a reference of another kind."""
    part: Any = root
    for name in reference.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def _as_text(value: Any) -> str:
    """JSON by which values are compared: for Python True equals 1."""
    return json.dumps(value, sort_keys=True)


def answers(text: str, expected: Any) -> bool:
    """Whether a text ends with an expected text, blanks, case and the last full stop aside, or
    has the expected number as its last number."""
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        found = _NUMBER.findall(text)
        if not found:
            return False
        number = float(found[-1].replace(",", "").replace("\u2212", "-"))
        return math.isclose(number, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    said = _plain(text)
    wanted = _plain(str(expected))
    return bool(wanted) and (said == wanted or said.endswith(f" {wanted}"))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!").rstrip()
