"""The tools by name: schema, implementation, sampler of arguments, request templates, and which
tools could serve the same request.

The json files hold descriptions, arguments by the kinds of `values.slot`, limits, requests
(asks, and hard for test_hard) and answers; `seen_functions` and `held_out_functions` compute
the results. Every parameter is required: with optional ones a request would have several
correct calls. Services of everyday life occur in conversations only and do nothing; their
result is drawn, the same for the same arguments.

Held-out tools share no domain with the others, and no word of a name but those of three
services about the weather and six common words of renamed and invented tools. The hand-written
tools are too few to teach reading. Hence composed tools (unit pairs, fixed factors, letters of
a word), several hundred, and invented ones: a verb and a thing, drawn for one conversation."""

import itertools
import json
import operator
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from codechat_lab.tasks.toolbox import held_out_functions, seen_functions
from codechat_lab.tasks.toolbox.functions import ToolError, neat
from codechat_lab.tasks.toolbox.values import (
    COMMON,
    VERBS,
    Slot,
    allowed,
    draw_word,
    invent,
    parts,
    slot,
    whole,
)

_HERE = Path(__file__).parent
MAX_TEXT = 1000  # characters of an argument
MAX_ITEMS = 1000  # of a list
MAX_NUMBER = 1e15
VARIED = 0.5  # share of the words and names in results that are not invented
RESULTS = (
    "word",
    "word",
    "phrase",
    "name",
    "date:2020:2040",
    "time",
    "integer:0:9999",
    "number:2:900",
)


@dataclass(frozen=True)
class Tool:
    """asks, hard_asks: request templates over the slots (hard_asks only in test_hard). answers:
    templates over the slots and {result}; the first is used. limits: argument -> a pattern, or
    [least, most], where a bound may be another argument's name. adjust: (rng, arguments) ->
    arguments that depend on one another. alias, keys: other names of the tool and of some of
    its arguments in one conversation."""

    name: str
    description: str
    slots: Mapping[str, Slot]
    run: Callable[..., Any]
    asks: Sequence[str]
    answers: Sequence[str]
    hard_asks: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    adjust: Callable[[random.Random, dict[str, Any]], dict[str, Any]] | None = None
    alias: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """{"name", "description", "parameters": JSON schema}, as the conversation offers it."""
        properties = {
            self.keys.get(key, key): dict(slot.schema) for key, slot in self.slots.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "name": self.alias or self.name,
            "description": self.description,
            "parameters": parameters,
        }

    def written(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """{"name", "arguments"} of a call, as the conversation names them."""
        named = {self.keys.get(key, key): value for key, value in arguments.items()}
        return {"name": self.alias or self.name, "arguments": named}

    @cached_property
    def level(self) -> int:
        """1: one copied word or number. 2: two, or one and a translated choice. 3: more, lists,
        phrases."""
        return min(3, sum(slot.cost for slot in self.slots.values()))

    def sample(self, rng: random.Random, split: str, varied: float = 0.0) -> dict[str, Any]:
        """Arguments that only `split` uses, in schema order. Two enumerations never take the
        same value.

        varied: share of the words and names drawn by `Slot.varied`."""
        while True:
            arguments = {name: slot.sample(rng, split, varied) for name, slot in self.slots.items()}
            if self.adjust:
                arguments = self.adjust(rng, arguments)
            chosen = [v for k, v in arguments.items() if "enum" in self.slots[k].schema]
            of_split = any(self.slots[k].decides(v) for k, v in arguments.items()) or whole(
                arguments, split
            )
            if of_split and len(set(chosen)) == len(chosen):
                return arguments

    def ask(
        self, rng: random.Random, arguments: Mapping[str, Any], asks: Sequence[str] = ()
    ) -> str:
        """A request in words, by a template of `asks`, else of the tool."""
        template = rng.choice(asks or self.asks)
        return template.format(**{k: self.slots[k].say(rng, v) for k, v in arguments.items()})

    def report(self, arguments: Mapping[str, Any], result: Any) -> str:
        """A short answer in words with the result."""
        return self.answers[0].format(
            result=say(result), **{k: say(v) for k, v in arguments.items()}
        )

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Check the arguments against the schema and the limits, and run. Raises ToolError,
        which names the fault."""
        if arguments.keys() != self.slots.keys():
            given = ", ".join(map(str, arguments))[:100]
            raise ToolError(f"{self.name} takes ({', '.join(self.slots)}), not ({given})")
        checked = {k: check(k, arguments[k], slot.schema) for k, slot in self.slots.items()}
        for key, limit in self.limits.items():
            if isinstance(limit, str):
                if not re.fullmatch(limit, checked[key]):
                    raise ToolError(f"{key} must match {limit}")
            else:
                least, most = (checked.get(bound, bound) for bound in limit)
                if not all(least <= value <= most for value in parts(checked[key])):
                    raise ToolError(f"{key} must be between {least} and {most}")
        try:
            return self.run(**checked)
        except (ArithmeticError, LookupError, ValueError) as error:
            raise ToolError(f"{self.name}: {str(error)[:200]}") from error


def check(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    """The value in the type of its schema (2.0 becomes 2 for an integer). ToolError if it does
    not match."""
    kind = schema["type"]
    if kind == "array":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
            raise ToolError(f"{name} must be a list of 1 to {MAX_ITEMS} items")
        return [check(f"{name}[{i}]", item, schema["items"]) for i, item in enumerate(value)]
    if not _fits(value, kind):
        raise ToolError(
            f"{name} must be {'an' if kind == 'integer' else 'a'} {kind} of sensible size"
        )
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} must be one of {', '.join(map(str, schema['enum']))}")
    return int(value) if kind == "integer" else value


def _fits(value: Any, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str) and len(value) <= MAX_TEXT
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not abs(value) <= MAX_NUMBER
    ):
        return False  # NaN fails the comparison
    return kind == "number" or value == int(value)


def say(value: Any) -> str:
    """A result in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(say, value)) if isinstance(value, list) else str(value)


def drawn_result(results: str | Sequence[str], /, **arguments: Any) -> Any:
    """One of the results, or a value of a kind: the same for the same arguments."""
    rng = random.Random(json.dumps(arguments, sort_keys=True))
    return (
        slot(results).sample(rng, "train", VARIED)
        if isinstance(results, str)
        else rng.choice(results)
    )


def read(name: str) -> Any:
    """The content of a json file of the toolbox."""
    return json.loads((_HERE / name).read_text(encoding="utf-8"))


def _read_tools(file: str, functions: ModuleType) -> tuple[Tool, ...]:
    """The tools of a json file; each runs the function of its name."""
    return tuple(
        Tool(
            name,
            row["description"],
            slots=_slots(row),
            run=getattr(functions, name),
            asks=row["asks"],
            answers=[row["answer"]],
            hard_asks=row["hard"],
            limits=row.get("limits", {}),
            adjust=getattr(functions, row["adjust"]) if "adjust" in row else None,
        )
        for name, row in read(file).items()
    )


def _slots(row: Mapping[str, Any]) -> dict[str, Slot]:
    return {key: slot(kind) for key, kind in row["arguments"].items()}


def _service(name: str, row: Mapping[str, Any]) -> Tool:
    run = partial(drawn_result, row["results"])
    return Tool(name, row["description"], _slots(row), run, row["asks"], row["answers"])


SEEN = _read_tools("tools.json", seen_functions)
HELD_OUT = _read_tools("held_out_tools.json", held_out_functions)  # in test_hard only
TOOLS: dict[str, Tool] = {t.name: t for t in (*SEEN, *HELD_OUT)}
SERVICES = tuple(_service(name, row) for name, row in read("everyday_services.json").items())
WORDINGS: dict[str, list[str]] = read("everyday_wordings.json")  # tool -> further request templates
PHRASES: dict[str, list[Any]] = read("phrases.json")
# Tools that could serve the same request are never offered together: it would have several
# correct calls.
FAMILIES = tuple(
    frozenset(line.split())
    for line in (_HERE / "families.txt").read_text(encoding="utf-8").splitlines()
)


@cache
def tools_of(split: str, level: int | None = None) -> tuple[Tool, ...]:
    """The tools that a split may offer, or those of a level."""
    tools = (*SEEN, *HELD_OUT) if split == "test_hard" else SEEN
    return tuple(t for t in tools if level in (None, t.level))


@cache
def services_of(split: str) -> tuple[Tool, ...]:
    """The services that a split may offer: all calls of one with enumerations alone may belong
    to training."""
    return tuple(tool for tool in SERVICES if split == "train" or _has_unseen_values(tool))


def _has_unseen_values(tool: Tool) -> bool:
    return any(slot.unseen for slot in tool.slots.values())


def draw_others(rng: random.Random, split: str, tools: Iterable[Tool], k: int) -> list[Tool]:
    """k tools that could not serve a request for any of `tools`, nor for one another."""
    taken = set().union(*(family(t.name) for t in tools))
    others = list[Tool]()
    while len(others) < k:
        other = rng.choice(tools_of(split))
        if other.name not in taken:
            others.append(other)
            taken |= family(other.name)
    return others


def family(name: str) -> frozenset[str]:
    """The tool and all tools that could serve its requests."""
    return frozenset({name}).union(*(f for f in FAMILIES if name in f))


def respond(name: str, arguments: Mapping[str, Any]) -> str:
    """The content of a tool's response: {"result": ...} or {"error": message} as JSON text."""
    try:
        return response(TOOLS[name].call(arguments))
    except KeyError:
        error = f"there is no function {name[:60]!r}"
    except ToolError as fault:
        error = str(fault)
    return json.dumps({"error": error}, ensure_ascii=False)


def response(result: Any) -> str:
    """The content of a function response that holds a result."""
    return json.dumps({"result": result}, ensure_ascii=False)


OPERATORS: dict[str, Callable[[float, float], float]] = {
    "times": operator.mul,
    "plus": operator.add,
    "minus": operator.sub,
    "over": operator.truediv,
}
THINGS = [w for w in COMMON if w not in VERBS]
ARGUMENTS = (  # of invented tools: name, kind
    ("n", "integer:2:9999"),
    ("count", "integer:2:90"),
    ("size", "number:2:900"),
    ("word", "word"),
    ("name", "name"),
    ("owner", "name"),
    ("code", "word"),
    ("text", "phrase:2:3"),
    ("day", "date"),
    ("time", "time"),
)


@cache
def composed() -> tuple[Tool, ...]:
    """All composed tools, in a fixed order."""
    table = read("composed_tools.json")
    rows = table["tools"]
    tools = []
    for units in table["units"]:  # unit -> how many of the row's first unit it is
        for a, b in itertools.permutations(units, 2):
            tools.append(
                _composed(rows["convert"], partial(_convert, units[a] / units[b]), a=a, b=b)
            )
    for number, count in enumerate(table["counts"], start=2):
        for name, operate in OPERATORS.items():
            tools.append(_composed(rows[name], partial(_apply, operate, number), count=count))
    for place, ordinal in enumerate(table["ordinals"]):
        tools.append(_composed(rows["letter"], partial(_letter, place), ordinal=ordinal))
    for letter in table["letters"]:
        tools.append(_composed(rows["without"], partial(_without, letter), letter=letter))
        tools.append(_composed(rows["starts"], partial(_starts, letter), letter=letter))
    return tuple(tools)


def _composed(row: Mapping[str, Any], run: Callable[..., Any], **words: str) -> Tool:
    """The tool of a row whose texts have $words."""

    def filled(text: str) -> str:
        return Template(text).substitute(words)

    return Tool(
        filled(row["name"]),
        filled(row["description"]),
        slots=_slots(row),
        run=run,
        asks=[filled(ask) for ask in row["asks"]],
        answers=[filled(row["answer"])],
    )


def _convert(factor: float, x: float) -> float:
    return neat(x * factor, 6)


def _apply(operate: Callable[[float, float], float], number: int, x: float) -> float:
    return neat(operate(x, number))


def _letter(place: int, word: str) -> str:
    return word[place]


def _without(letter: str, word: str) -> str:
    return word.replace(letter, "")


def _starts(letter: str, word: str) -> bool:
    return word.lower().startswith(letter)


def _done(**arguments: Any) -> str:
    return "done"


def _invented(rng: random.Random, split: str, verb: str, thing: str) -> Tool:
    """A tool for one conversation. Its description has the verb and the thing, and half of the
    names do. Names belong to splits, as values do."""
    slots = {key: slot(kind) for key, kind in rng.sample(ARGUMENTS, rng.choice((1, 1, 1, 2, 2, 3)))}
    name = ""
    while not name or not allowed(name, split):
        name = (
            rng.choice((f"{verb}_{thing}", f"{thing}_{verb}"))
            if rng.random() < 0.5
            else invent(rng)
        )
    words = {
        "verb": verb,
        "thing": thing,
        "Verb": verb.capitalize(),
        "Thing": thing.capitalize(),
        "values": ", ".join(
            f"{{{key}}}" for key in slots
        ),  # in schema order: argument names may be replaced
    }
    asks = [ask.format(**words) for ask in PHRASES["invented_asks"]]
    description = rng.choice(PHRASES["invented_descriptions"]).format(**words)
    return Tool(name, description, slots, _done, asks, ["It is done."])


def invented_offer(
    rng: random.Random, split: str, k: int, rare: float = 0.0
) -> dict[tuple[str, str], Tool]:
    """k invented tools by verb and thing. Half of the others share the first one's verb or its
    thing, so both words must be read."""
    offered: dict[tuple[str, str], Tool] = {}
    while len(offered) < k:
        verb, thing = _verb_and_thing(rng, rare, next(iter(offered), None))
        tool = _invented(rng, split, verb, thing)
        if tool.name not in {other.name for other in offered.values()}:
            offered.setdefault((verb, thing), tool)
    return offered


def _verb_and_thing(
    rng: random.Random, rare: float, first: tuple[str, str] | None
) -> tuple[str, str]:
    draw = rng.random() if first else 1.0
    verb = first[0] if first and draw < 0.25 else rng.choice(VERBS)
    thing = first[1] if first and 0.25 <= draw < 0.5 else draw_word(rng, rare, THINGS)
    return verb, thing
