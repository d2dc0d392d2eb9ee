"""The worlds of episodes, requests of five levels (`requests.jsonl`), and experts that solve them.

A row of the requests has `says`, wordings; `draws`, name -> kind of a value, a table whose row
is picked, "table.column" of it, or a `twin`; `sets`, columns of drawn rows that get another
value; and `calls`, the expert's
tools with the fields of their arguments: "phone" is a drawn value, "contacts_search[0][id]"
part of a result. Tools behind `task_decline` are only offered. The hash of a drawn value
decides its split, so training sees no value of a
test. Ids are random: guessing replaces no look-up."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from codechat.data.sources import read_jsonl
from codechat_lab.tasks.apps.tools import CLOSING, DATA
from codechat_lab.tasks.preparation import Row
from codechat_lab.tasks.toolbox.values import allowed, invent, slot

IDS = range(10, 100)
# of a new word
FORMS: dict[str, Callable[[str], str]] = {
    "word": str,
    "name": str.capitalize,
    "path": "{}.txt".format,
}
CHOICES: dict[str, list[Any]] = DATA["choices"]
RANGES: dict[str, list[int]] = DATA["ranges"]  # lowest and highest number
TALK: list[str] = DATA["talk"]
DOMAINS = {kind: slot(values) for kind, values in DATA["domains"].items()}
# Table -> column -> kind of its values, or a value. The tables `orders` and `cart` also name
# products.
COLUMNS: dict[str, dict[str, Any]] = DATA["columns"]


class World:
    """The rows of a world by table, and values of its split. Words never repeat and never
    contain one another."""

    def __init__(self, rng: random.Random, split: str, size: int) -> None:
        self.rng = rng
        self.split = split
        self.words = list[str]()
        self.tables: dict[str, list[Row]] = {}
        for table in COLUMNS:
            ids = rng.sample(IDS, size)
            self.tables[table] = [
                self._row(table, id, place)
                for place, id in enumerate(ids[: 1 if table == "cart" else size])
            ]

    def _row(self, table: str, id: int, place: int) -> Row:
        row: Row = {"id": id}
        for column, kind in COLUMNS[table].items():
            if column == "product":
                row[column] = self.tables["products"][place]["id"]
            else:
                row[column] = self.draw(kind) if isinstance(kind, str) else kind
        return row

    def draw(self, kind: str) -> Any:
        """A value of this kind."""
        if kind in FORMS:
            return FORMS[kind](self._word())
        if kind == "email":
            return f"{self._word()}@{self.rng.choice(('home', 'work', 'post'))}.org"
        if kind in DOMAINS:
            value = DOMAINS[kind].sample(self.rng, self.split)
            return str(value) if kind == "phone" else value
        if kind in CHOICES:
            return self.rng.choice(CHOICES[kind])
        low, high = RANGES[kind]
        return self.rng.randint(low, high)

    def _word(self) -> str:
        while True:
            word = invent(self.rng)
            low = word.lower()
            # A word inside another would match a search for it.
            if allowed(word, self.split) and not any(
                low in other or other in low for other in self.words
            ):
                self.words.append(low)
                return word

    def twin(self, table: str, other: Mapping[str, str]) -> Row:
        """One of a row and a copy of it that differs in its id and in the columns `other`, of
        these kinds."""
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


class Request(NamedTuple):
    """A request of a world and its expert. calls: tool -> fields of its arguments. values: what
    was drawn."""

    text: str
    calls: Mapping[str, Mapping[str, str]]
    values: dict[str, Any]

    @property
    def tools(self) -> list[str]:
        """The tools that it needs, besides the closing ones."""
        return [tool for tool in self.calls if tool not in CLOSING]

    def solve(self, call: Call) -> None:
        """Make the expert's calls. `values` grows by their results. A search without a result
        is declined."""
        for tool, fields in self.calls.items():
            if "each" in fields:
                self.values[tool] = self._seek(tool, fields, call)
                continue
            arguments = {name: self._value(field) for name, field in fields.items()}
            if tool == "task_answer":
                arguments["text"] = str(arguments["text"])
            self.values[tool] = call(tool, arguments)
            nothing = self.values[tool] == []
            if nothing:
                call("task_decline", {})
            if nothing or tool in CLOSING:
                return

    def _seek(self, tool: str, fields: Mapping[str, str], call: Call) -> Row:
        """Look at the rows that were found until one is the row of the request."""
        right = self._value(fields["is"])
        for row in self._value(fields["each"]):
            if call(tool, {"id": row["id"]})[fields["until"]] == right:
                return row
        raise LookupError(f"{tool}: no row has {fields['until']} {right!r}")

    def _value(self, field: str) -> Any:
        return Formatter().get_field(field, (), self.values)[0]


def draft(level: int, world: World) -> Request:
    """A request of this level in the world."""
    row = world.rng.choice(REQUESTS[level])
    look_up = row.get("look_up")
    if look_up == "in small talk":  # a request of level 2 among other sentences
        request = draft(2, world)
        before, after = world.rng.sample(TALK, 2)
        return request._replace(text=f"{before} {request.text} {after}")
    if look_up:  # a request of level 2 that names a row that is not there
        row = world.rng.choice(REQUESTS[2])
        kind = "name" if row["draws"]["key"] == "contacts.name" else "word"
        row = row | {"draws": row["draws"] | {"key": kind}}
    values: dict[str, Any] = {}
    for name, kind in row["draws"].items():
        values[name] = _drawn(kind, values, world)
    for name, columns in row.get("sets", {}).items():
        for column, text in columns.items():  # of the world's row
            values[name][column] = text.format_map(values)
    says = row["says"] if isinstance(row["says"], str) else world.rng.choice(row["says"])
    return Request(says.format_map(values), row["calls"], values)


def _drawn(kind: str | Mapping[str, str], values: Mapping[str, Any], world: World) -> Any:
    if not isinstance(kind, str):
        return world.twin(
            kind["twin"], {column: other for column, other in kind.items() if column != "twin"}
        )
    if kind == "more_than_stock":
        return values["product"]["stock"] + world.rng.randint(1, 40)
    table, _, column = kind.partition(".")
    if table not in COLUMNS:
        return world.draw(kind)
    row = world.rng.choice(world.tables[table])
    return row[column] if column else row
