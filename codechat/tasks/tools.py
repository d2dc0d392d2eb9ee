"""Rows and a file of Python functions as a task: requests that a model answers with calls.

    codechat grpo --init-from released/nano --tools examples/my_tools.py --data-dir examples/my_requests.jsonl
    codechat evaluate --ckpt released/nano --tools examples/my_tools.py --data-dir examples/my_requests.jsonl

A row has a "prompt" and what is right:

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
             are more; the right function with other arguments counts a quarter
    answer   1 where the last message ends with the text, or its last number is equal
    both     the mean"""

import copy
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.base import Message, Problem, Score, play
from codechat.tasks.custom import OwnRows, Row
from codechat.text import tool_calls
from codechat.text.tool_functions import misfit, read_tools
from codechat.text.tool_lists import tools_prompt
from codechat.text.tool_worlds import whole

NAME_CREDIT = 0.25  # of a call with the right function and other arguments
TOLERANCE = 1e-6  # numbers match within this, relative above 1 and absolute below
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?")


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
        answer = row.get("answer")
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
        for given in calls:
            call = tool_calls.read_call(given)
            if call.name is None or call.name not in self.kit.schemas:
                return f"expected calls of {', '.join(self.kit.names)}"
            if call.arguments is None:
                return f"expected an object of arguments for {call.name}"
            problem = misfit(call.arguments, self.kit.schemas[call.name]["parameters"])
            if problem:
                return f"expected arguments that fit {call.name}: {problem}"
        return ""

    def answer_of(self, row: Row) -> Any:
        return {"calls": expected_calls(row), "answer": row.get("answer"), "tools": self.content}

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
    return row.get("calls") is not None or row.get("answer") is not None


def _is_answer(answer: Any) -> bool:
    """A text with letters or digits, or a number that can be equal to one."""
    if isinstance(answer, str):
        return bool(_plain(answer))
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return False
    return math.isfinite(answer)


def expected_calls(row: Row) -> Any:
    """The expected calls, a list; one may stand without it. None where none are given."""
    calls = row.get("calls")
    if isinstance(calls, Mapping):
        calls = [calls]
    return list(map(_within_function, calls)) if isinstance(calls, list) else calls


def _within_function(call: Any) -> Any:
    """A call; in OpenAI's form, {"type", "function": {...}}, what stands under `function`."""
    inner = call.get("function") if isinstance(call, Mapping) else None
    return inner if isinstance(inner, Mapping) else call


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
        """See the module docstring. A call that leaves out an argument with a default equals one
        that gives it."""
        if not expected:
            return float(not self.calls)
        left = [(call.name, self._filled(call)) for call in self.calls]
        wanted = [tool_calls.read_call(one) for one in expected]
        missed = []
        for call in wanted:
            one = (call.name, self._filled(call))
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

    def _filled(self, call: tool_calls.Call) -> Any:
        """The arguments with the defaults of those that are left out."""
        schema = self.task.kit.schemas.get(call.name or "", {})
        defaults = {}
        for name, about in schema.get("parameters", {}).get("properties", {}).items():
            if "default" in about:
                defaults[name] = about["default"]
        return whole(defaults | (call.arguments or {}))

    def _last_text(self) -> str:
        """What the last answer says behind its calls."""
        texts = [m["content"] for m in self.messages if m["role"] == "assistant"]
        if not texts:
            return ""
        calls = tool_calls.parse_calls(texts[-1])
        return calls[-1].after if calls else texts[-1]


def answers(text: str, expected: Any) -> bool:
    """Whether a text ends with an expected text, blanks, case and the last full stop aside, or
    has the expected number as its last number."""
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        found = _NUMBER.findall(text)
        if not found:
            return False
        number = float(found[-1].replace(",", ""))
        return math.isclose(number, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    said = _plain(text)
    wanted = _plain(str(expected))
    return bool(wanted) and (said == wanted or said.endswith(f" {wanted}"))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!").rstrip()
