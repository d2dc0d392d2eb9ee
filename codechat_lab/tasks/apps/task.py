"""The task of the pocket apps, whose problems are episodes, and `codechat data apps`, which
writes problems and experts' episodes.

The reward compares the state changes with the expert's. A required change that was made is
matched, another one is missing; any other change is collateral. Answering and declining are
changes too, so saying "done" earns nothing.

    done        every required change and no other: reward 1, the only success
    collateral  every required change, and others: 0.5 halved for each other change
    partial     some of the required changes: 0.5 x their share, halved for each other change
    idle        no change: 0
    harm        only changes that were not required: 0

Levels: 1 one call with all its arguments; 2 look up, then act or answer; 3 across apps; 4 with
twins, small talk and more tools; 5 impossible, must be declined. gold: "world", the rows at the
start; "calls", the expert's; "changes", their effect."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.base import Message, Problem, Score, play
from codechat.text import tool_calls, tool_lists
from codechat_lab.tasks.apps import tools
from codechat_lab.tasks.apps.requests import World, draft
from codechat_lab.tasks.apps.tools import CLOSING, TOOLS, Change, Store, compare
from codechat_lab.tasks.preparation import (
    HELD_OUT,
    DrawnTask,
    GeneratedConfig,
    Row,
    prepare_generated,
    worked_example,
)

TIERS = ("harm", "idle", "partial", "collateral", "done")
MAX_CALLS = 16  # of one message
LEVELS = (1, 2, 3, 4, 5)
SIZES = {1: 3, 2: 3, 3: 4, 4: 6, 5: 4}  # rows of a table
OFFERED = {1: 2, 2: 2, 3: 3, 4: 8, 5: 2}  # tools beside those that are needed
DONE = "Done."


def score_changes(required: list[Change], changes: list[Change]) -> Score:
    """The score of the changes; see the module docstring. parts: matched, required, missing and
    collateral, the latter two in words."""
    found = compare(required, changes)
    parts = {
        "matched": found.matched,
        "required": len(required),
        "missing": found.missing,
        "collateral": found.collateral,
    }
    if not found.missing and not found.collateral:
        return Score(1.0, "done", parts, True)
    if not found.matched:
        return Score(0.0, "harm" if found.collateral else "idle", parts, False)
    reward = 0.5 * found.matched / len(required) * 0.5 ** len(found.collateral)
    return Score(reward, "partial" if found.missing else "collateral", parts, False)


class AppsEnvironment:
    """One episode at a time. A message without a call ends it. So does a call of `task_answer`
    or `task_decline`."""

    def __init__(self) -> None:
        self.store = Store()
        self.closed = True

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode. The problem holds the whole world; the seed has no effect."""
        self.problem = problem
        self.closed = False
        self.store.reset(problem.gold["world"])
        self._judge()
        return problem.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the calls of an answer. After the episode's end nothing happens."""
        if self.closed:
            return [], 0.0, True
        before = self.verdict.reward
        calls = tool_calls.parse_calls(message["content"])[:MAX_CALLS]
        told = [{"role": "function", "content": self._respond(call)} for call in calls]
        if not calls:
            self.closed = True
        self._judge()
        return told, self.verdict.reward - before, self.closed

    def state_diff(self) -> list[Change]:
        return self.changes

    def score(self) -> Score:
        return self.verdict

    def _respond(self, call: tool_calls.Call) -> str:
        try:
            if call.form not in tool_calls.READABLE or call.name is None or call.arguments is None:
                raise tools.AppError(f"this call cannot be read ({call.form})")
            if self.closed:
                raise tools.AppError("the episode has ended")
            name = call.name.strip()
            if name not in self.problem.meta["tools"]:
                raise tools.AppError(f"there is no function {name[:60]!r}")
            result = tools.call(self.store, name, call.arguments)
            self.closed = name in tools.CLOSING
            return tools.as_text("result", result)
        except tools.AppError as error:
            return tools.as_text("error", str(error))

    def _judge(self) -> None:
        self.changes = self.store.diff()
        self.verdict = score_changes(self.problem.gold["changes"], self.changes)


def gold_steps(problem: Problem) -> list[str]:
    """The expert's messages."""
    calls = problem.gold["calls"]
    steps = [tool_calls.format_call(c["name"], c["arguments"]) for c in calls]
    return steps if calls[-1]["name"] in CLOSING else [*steps, DONE]


def trajectory(problem: Problem, world: AppsEnvironment) -> list[Message]:
    """The expert's episode as a conversation, played in the environment."""
    messages = list(world.reset(problem, 0))
    for text in gold_steps(problem):
        message = {"role": "assistant", "content": text}
        messages += [message, *world.step(message)[0]]
    while messages[-1]["role"] != "assistant":  # responses after the episode's end prompt nothing
        messages.pop()
    return messages


class AppsTask(DrawnTask):
    """source: None generates problems; a directory has them in apps.SPLIT.jsonl. levels: of the
    problems; a repeated level is sampled more often. max_turns: most answers of an episode.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name = "apps"
    stream = "apps"
    domain = "episodes"
    asked = "tool"
    tiers = TIERS
    known_levels = LEVELS
    written = ("train", *HELD_OUT)
    gold_fields = ("world", "calls", "changes")
    meta_fields = ("level", "tools")

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = LEVELS,
        max_turns: int = 8,
    ) -> None:
        self.set_levels(source, levels)
        if max_turns < 1:
            raise ConfigError(f"got max_turns {max_turns}; expected 1 or more; set another")
        self.max_turns = max_turns

    def part(self, split: str, worked: bool) -> str:
        return f"{split} {'expert' if worked and split == 'train' else ''}"

    def draw(self, level: int, part: str, split: str, rng: random.Random) -> Problem:
        """One problem with its expert's calls and changes."""
        world = World(rng, split, SIZES[level])
        store = Store()
        request = draft(level, world)
        store.reset(world.tables)
        calls: list[dict[str, Any]] = []

        def call(tool: str, arguments: dict[str, Any]) -> Any:
            calls.append({"name": tool, "arguments": arguments})
            return tools.call(store, tool, arguments)

        request.solve(call)
        needed = request.tools
        offered = [
            *needed,
            *rng.sample(
                [name for name in TOOLS if name not in (*needed, *CLOSING)], OFFERED[level]
            ),
        ]
        rng.shuffle(offered)
        offered += CLOSING
        system = tool_lists.tools_prompt([TOOLS[name].schema for name in offered])
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": request.text},
        ]
        gold = {"world": world.tables, "calls": calls, "changes": store.diff()}
        number = digest(f"{request.text}{world.tables}")[:12]
        return Problem(
            f"apps-{level}-{number}", messages, gold, split, {"level": level, "tools": offered}
        )

    def environment(self) -> AppsEnvironment:
        return AppsEnvironment()

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def gold(self, problem: Problem) -> str:
        """The expert's calls in one answer; they do not depend on the responses in between."""
        return "\n".join(gold_steps(problem))

    def conversation(self, problem: Problem) -> Row:
        row = worked_example(self, problem, {"tools_present": True, "level": problem.meta["level"]})
        return row | {"messages": trajectory(problem, self.environment())}


@dataclass(frozen=True, kw_only=True)
class AppsConfig(GeneratedConfig):
    """Pocket apps -> episodes.SPLIT.jsonl (experts' episodes), apps.SPLIT.jsonl (problems)."""

    make = AppsTask
    out: str = "data/apps"
    max_examples: int = 500
    levels: tuple[int, ...] = LEVELS


prepare_apps = prepare_generated
