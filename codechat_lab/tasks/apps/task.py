"""The task of the pocket apps, whose problems are episodes, and `codechat data apps`, which writes problems and
experts' episodes.

The reward compares the state changes with the expert's. A required change that was made is matched, another one is
missing; any other change is collateral. Answering and declining are changes too, so saying "done" earns nothing.

    done        every required change and no other: reward 1, the only success
    collateral  every required change, and others: 0.5 halved for each other change
    partial     some of the required changes: 0.5 x their share, halved for each other change
    idle        no change: 0
    harm        only changes that were not required: 0

Levels: 1 one call with all its arguments; 2 look up, then act or answer; 3 across apps; 4 with twins, small talk
and more tools; 5 impossible, must be declined. gold: "world", the rows at the start; "calls", the expert's;
"changes", their effect."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.sources import digest, read_jsonl
from codechat.tasks.base import Message, Problem, Score, play
from codechat.text import chat
from codechat_lab.tasks.apps import tools
from codechat_lab.tasks.apps.tools import CLOSING, DATA, TOOLS, Change, Store, compare
from codechat_lab.tasks.preparation import (
    HELD_OUT,
    GeneratedConfig,
    GeneratedTask,
    Row,
    prepare_generated,
    worked_example,
)
from codechat_lab.tasks.toolbox.values import allowed, invent, slot

TIERS = ("harm", "idle", "partial", "collateral", "done")
MAX_CALLS = 16  # of one message
LEVELS = (1, 2, 3, 4, 5)
SIZES = {1: 3, 2: 3, 3: 4, 4: 6, 5: 4}  # rows of a table
OFFERED = {1: 2, 2: 2, 3: 3, 4: 8, 5: 2}  # tools beside those that are needed
DONE = "Done."


def score_changes(required: list[Change], changes: list[Change]) -> Score:
    """The score of the changes; see the module docstring. parts: matched, required, missing and collateral, the
    latter two in words."""
    matched, missing, collateral = compare(required, changes)
    parts = {
        "matched": matched,
        "required": len(required),
        "missing": missing,
        "collateral": collateral,
    }
    if not missing and not collateral:
        return Score(1.0, "done", parts, True)
    if not matched:
        return Score(0.0, "harm" if collateral else "idle", parts, False)
    reward = 0.5 * matched / len(required) * 0.5 ** len(collateral)
    return Score(reward, "partial" if missing else "collateral", parts, False)


class AppsEnvironment:
    """One episode at a time. A message without a call ends it. So does a call of `task_answer` or `task_decline`."""

    def __init__(self) -> None:
        self.store = Store()
        self.closed = True

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode. The problem holds the whole world; the seed has no effect."""
        self.problem, self.closed = problem, False
        self.store.reset(problem.gold["world"])
        self._judge()
        return problem.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Run the calls of an answer. After the episode's end nothing happens."""
        if self.closed:
            return [], 0.0, True
        before = self.verdict.reward
        calls = chat.parse_calls(message["content"])[:MAX_CALLS]
        told = [{"role": "function", "content": self._respond(call)} for call in calls]
        self.closed |= not told
        self._judge()
        return told, self.verdict.reward - before, self.closed

    def state_diff(self) -> list[Change]:
        return self.changes

    def score(self) -> Score:
        return self.verdict

    def _respond(self, call: chat.Call) -> str:
        try:
            if call.form not in chat.READABLE or call.name is None or call.arguments is None:
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


#
# The worlds of episodes, requests of five levels (`requests.jsonl`), the tools that these need, and experts
# that solve them.
#
# A row has `says`, wordings; `draws`, name -> kind of a value, a table whose row is picked, "table.column" of
# it, or a `twin`;
# `sets`, columns of drawn rows that get another value; and `calls`, the expert's tools with the fields of their
# arguments:
# "phone" is a drawn value, "contacts_search[0][id]" part of a result. Tools behind `task_decline` are only offered.
# The hash of a drawn value decides its split, so training sees no value of a test. Ids are random: guessing
# replaces no look-up.

IDS = range(10, 100)
FORMS: dict[str, Callable[[str], str]] = {"word": str, "name": str.capitalize, "path": "{}.txt".format}  # of a new word
CHOICES, RANGES, TALK = (DATA[name] for name in ("choices", "ranges", "talk"))
DOMAINS = {kind: slot(values) for kind, values in DATA["domains"].items()}
# Table -> column -> kind of its values, or a value. The tables `orders` and `cart` also name products.
COLUMNS: dict[str, dict[str, Any]] = DATA["columns"]


class World:
    """The rows of a world by table, and values of its split. Words never repeat and never contain one another."""

    def __init__(self, rng: random.Random, split: str, size: int) -> None:
        self.rng = rng
        self.split = split
        self.words = list[str]()
        self.tables: dict[str, list[Row]] = {}
        for table, columns in COLUMNS.items():
            ids = rng.sample(IDS, size)[: 1 if table == "cart" else size]
            self.tables[table] = [
                {"id": id} | {column: self._value(column, kind, place) for column, kind in columns.items()}
                for place, id in enumerate(ids)
            ]

    def _value(self, column: str, kind: Any, place: int) -> Any:
        if column == "product":
            return self.tables["products"][place]["id"]
        return self.draw(kind) if isinstance(kind, str) else kind

    def draw(self, kind: str) -> Any:
        """A value of this kind."""
        if kind in FORMS:
            return FORMS[kind](self._word())
        if kind == "email":
            return f"{self._word()}@{self.rng.choice(('home', 'work', 'post'))}.org"
        if kind in DOMAINS:
            value = DOMAINS[kind].sample(self.rng, self.split)
            return str(value) if kind == "phone" else value
        return self.rng.choice(CHOICES[kind]) if kind in CHOICES else self.rng.randint(*RANGES[kind])

    def _word(self) -> str:
        while True:
            word = invent(self.rng)
            low = word.lower()
            if allowed(word, self.split) and not any(low in other or other in low for other in self.words):
                self.words.append(low)
                return word

    def twin(self, table: str, other: dict[str, str]) -> Row:
        """One of a row and a copy of it that differs in its id and in the columns `other`, of these kinds."""
        changes = {column: self.draw(kind) for column, kind in other.items()}
        row = self.rng.choice(self.tables[table])
        taken = {r["id"] for r in self.tables[table]}
        copy = row | {"id": self.rng.choice([i for i in IDS if i not in taken])} | changes
        self.tables[table].append(copy)
        return row if self.rng.random() < 0.5 else copy


REQUESTS: dict[int, list[dict[str, Any]]] = {}
for _, _row in read_jsonl(Path(__file__).with_name("requests.jsonl")):
    REQUESTS.setdefault(_row["level"], []).append(_row)


Call = Callable[[str, dict[str, Any]], Any]  # tool and arguments -> result


def draft(level: int, world: World) -> tuple[str, list[str], Callable[[Call], None]]:
    """A request of this level in the world, the tools that it needs besides the closing ones, and the expert, which
    solves it with the calls that it is given."""
    row = world.rng.choice(REQUESTS[level])
    how = row.get("look_up")
    if how == "in small talk":  # a request of level 2 among other sentences
        text, tools, expert = draft(2, world)
        before, after = world.rng.sample(TALK, 2)
        return f"{before} {text} {after}", tools, expert
    if how:  # a request of level 2 that names a row that is not there
        row = world.rng.choice(REQUESTS[2])
        kind = "name" if row["draws"]["key"] == "contacts.name" else "word"
        row = row | {"draws": row["draws"] | {"key": kind}}
    values: dict[str, Any] = {}
    for name, kind in row["draws"].items():
        values[name] = _drawn(kind, values, world)
    for name, columns in row.get("sets", {}).items():
        values[name] |= {column: text.format(**values) for column, text in columns.items()}  # of the world's row
    says = row["says"] if isinstance(row["says"], str) else world.rng.choice(row["says"])
    tools = [tool for tool in row["calls"] if tool not in CLOSING]
    return says.format(**values), tools, lambda call: _solve(row["calls"], values, call)


def _drawn(kind: str | dict[str, str], values: Mapping[str, Any], world: World) -> Any:
    if isinstance(kind, dict):
        return world.twin(kind["twin"], {column: other for column, other in kind.items() if column != "twin"})
    if kind == "more_than_stock":
        return values["product"]["stock"] + world.rng.randint(1, 40)
    table, _, column = kind.partition(".")
    if table not in COLUMNS:
        return world.draw(kind)
    row = world.rng.choice(world.tables[table])
    return row[column] if column else row


def _solve(calls: Mapping[str, dict[str, str]], values: dict[str, Any], call: Call) -> None:
    """Make the calls. `values` grows by their results. A search without a result is declined."""

    def value(field: str) -> Any:
        return Formatter().get_field(field, (), values)[0]

    for tool, fields in calls.items():
        if "each" in fields:  # look at the rows that were found until one is the row of the request
            right = value(fields["is"])
            shown = (row for row in value(fields["each"]) if call(tool, {"id": row["id"]})[fields["until"]] == right)
            values[tool] = next(shown)
            continue
        arguments = {name: value(field) for name, field in fields.items()}
        if tool == "task_answer":
            arguments["text"] = str(arguments["text"])
        values[tool] = call(tool, arguments)
        if values[tool] == []:
            call("task_decline", {})
        if tool in CLOSING or values[tool] == []:
            return


def gold_steps(problem: Problem) -> list[str]:
    """The expert's messages."""
    calls = problem.gold["calls"]
    steps = [chat.format_call(c["name"], c["arguments"]) for c in calls]
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


class AppsTask(GeneratedTask):
    """source: None generates problems; a directory has them in apps.SPLIT.jsonl. levels: of the problems; a
    repeated level
    is sampled more often. max_turns: most answers of an episode.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name, stream, domain, asked, tiers = "apps", "apps", "episodes", "tool", TIERS
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
            raise ConfigError(f"max_turns {max_turns}; required: 1 or more")
        self.max_turns = max_turns

    def part(self, split: str, worked: bool) -> str:
        return f"{split} {'expert' if worked and split == 'train' else ''}"

    def draw(self, level: int, part: str, split: str, rng: random.Random) -> Problem:
        """One problem with its expert's calls and changes."""
        world = World(rng, split, SIZES[level])
        store = Store()
        request, needed, expert = draft(level, world)
        store.reset(world.tables)
        calls: list[dict[str, Any]] = []

        def call(tool: str, arguments: dict[str, Any]) -> Any:
            calls.append({"name": tool, "arguments": arguments})
            return tools.call(store, tool, arguments)

        expert(call)
        offered = [*needed, *rng.sample([name for name in TOOLS if name not in (*needed, *CLOSING)], OFFERED[level])]
        rng.shuffle(offered)
        offered += CLOSING
        system = chat.tools_prompt([TOOLS[name].schema for name in offered])
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        gold = {"world": world.tables, "calls": calls, "changes": store.diff()}
        number = digest(f"{request}{world.tables}")[:12]
        return Problem(f"apps-{level}-{number}", messages, gold, split, {"level": level, "tools": offered})

    def environment(self) -> AppsEnvironment:
        return AppsEnvironment()

    def score(self, problem: Problem, completion: str) -> Score:
        return play(self.environment(), problem, completion)

    def gold(self, problem: Problem) -> str:
        """The expert's calls in one answer; they do not depend on the responses in between."""
        return "\n".join(gold_steps(problem))

    def conversation(self, problem: Problem) -> Row:
        row = worked_example(self, problem, tools_present=True, level=problem.meta["level"])
        return row | {"messages": trajectory(problem, self.environment())}


@dataclass(frozen=True, kw_only=True)
class AppsConfig(GeneratedConfig):
    """Pocket apps -> episodes.SPLIT.jsonl (experts' episodes), apps.SPLIT.jsonl (problems)."""

    make = AppsTask
    out: str = "data/apps"
    max_examples: int = 500
    levels: tuple[int, ...] = LEVELS


prepare_apps = prepare_generated
