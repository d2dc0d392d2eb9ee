"""The worlds of episodes, requests of five levels (`requests.jsonl`), the tools that these need, and experts that solve them.

A row has `says`, wordings; `draws`, name -> kind of a value, a table whose row is picked, "table.column" of it, or a `twin`;
`sets`, columns of drawn rows that get another value; and `calls`, the expert's tools with the fields of their arguments:
"phone" is a drawn value, "contacts_search[0][id]" part of a result. Tools behind `task_decline` are only offered. The hash
of a drawn value decides its split, so training sees no value of a test. Ids are random: guessing replaces no look-up.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from codechat.data.sources import read_jsonl
from codechat.tasks.apps.tools import CLOSING, DATA, Row
from codechat.tasks.toolbox.values import allowed, invent, slot

IDS = range(10, 100)
FORMS: dict[str, Callable[[str], str]] = {"word": str, "name": str.capitalize, "path": "{}.txt".format}  # of a new word
CHOICES, RANGES, TALK = (DATA[name] for name in ("choices", "ranges", "talk"))
DOMAINS = {kind: slot(values) for kind, values in DATA["domains"].items()}
# Table -> column -> kind of its values, or a value. The tables `orders` and `cart` also name products.
COLUMNS: dict[str, dict[str, Any]] = DATA["columns"]


class World:
    """The rows of a world by table, and values of its split. Words never repeat and never contain one another."""

    def __init__(self, rng: random.Random, split: str, size: int) -> None:
        self.rng, self.split, self.words = rng, split, list[str]()
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


# ---------------------------------------------------------------- requests

REQUESTS: dict[int, list[dict[str, Any]]] = {}
for _, _row in read_jsonl(Path(__file__).with_name("requests.jsonl")):
    REQUESTS.setdefault(_row["level"], []).append(_row)


Call = Callable[[str, dict[str, Any]], Any]  # tool and arguments -> result


def draft(level: int, world: World) -> tuple[str, list[str], Callable[[Call], None]]:
    """A request of this level in the world, the tools that it needs besides the closing ones, and the expert, which solves
    it with the calls that it is given."""
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
