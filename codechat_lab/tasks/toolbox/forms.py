"""Requests for services whose arguments have a form that only their description prescribes.

    form            one call: codes, units, dates, fractions, enumerations by what they mean, objects
    at_once         two to five calls of one service
    at_once_mixed   two to five calls of several services
    lacking         a required value is missing: the answer asks for it
    near_miss       only services of the same group are on offer, none of which serves the request

The values of forms.toml are drawn, said in one way and written in another; which way is drawn
for each conversation, so a service has no fixed form. form_services.toml has the services,
form_phrases.toml what surrounds the requests. Groups of services and forms that are `hard`
occur in test_hard only; values of open domains, and each call as a whole, belong to one split
(`values`). Nothing is run: a call is right where it says what the request says. Lists of
services are whole schemas; `--tools-style arguments` keeps their descriptions too."""

import datetime
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from codechat.tasks.base import Message, Problem
from codechat.text import tool_calls, tool_lists
from codechat_lab.tasks.toolbox import surroundings
from codechat_lab.tasks.toolbox.catalogue import PHRASES
from codechat_lab.tasks.toolbox.values import allowed, invent, slot, whole

SHARES = {"form": 0.45, "at_once": 0.17, "at_once_mixed": 0.15, "lacking": 0.11, "near_miss": 0.12}
MOST_CALLS = 5
MOST_OFFERED = 4
CROWDED = 7  # most on a long list
# shares of the requests or conversations
DETAIL = 0.3  # requests with sentences that nothing needs
LONG_LISTS = 0.1  # lists of more than MOST_OFFERED
LARGE_SCHEMAS = 0.25  # lists some of whose services have further optional arguments
ENLARGED = 0.4  # of the services of such a list
NAMED = 0.3  # of the optional arguments, in a request
ANSWERED = 0.5  # of the lacking values, which the user then gives
HELD_OUT_FORMS = 0.5  # of the arguments of test_hard that have a held-out form
FIRST_DAY = datetime.datetime(2021, 1, 1)
DAYS = 5000
CLAUSES = ("how", "what", "when", "where", "who", "why")  # how a description that is one begins
OPTIONAL = "optional"  # key of a right call: arguments that may be there, with their value


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


FORMS = _read("forms.toml")
SERVICES = _read("form_services.toml")
PHRASED = _read("form_phrases.toml")


@dataclass(frozen=True)
class Spoken:
    """A value as the request says it and as the call writes it."""

    said: str
    written: Any


@dataclass(frozen=True)
class Form:
    """How a value is written. schema: of JSON. about: what a description prescribes; empty where
    the value is copied. draw: (rng, split) -> a value of the split."""

    schema: dict[str, Any]
    about: str
    draw: Callable[[random.Random, str], Spoken]


@dataclass(frozen=True)
class Argument:
    """words: of a request, "{}" for the value; empty = no request names it."""

    name: str
    about: str
    words: Sequence[str]
    form: Form
    required: bool
    default: Any = None

    @property
    def schema(self) -> dict[str, Any]:
        description = self.about[0].upper() + self.about[1:]
        if self.form.about:
            description += f", {self.form.about}"
        if self.default is None:
            return self.form.schema | {"description": description}
        return self.form.schema | {"description": description, "default": self.default}


@dataclass(frozen=True)
class Service:
    """A service in the names and forms of one conversation. key: its name in form_services.toml."""

    key: str
    name: str
    group: str
    about: str
    asks: Sequence[str]
    arguments: Sequence[Argument]

    @property
    def schema(self) -> dict[str, Any]:
        """{"name", "description", "parameters": JSON schema}."""
        parameters = {
            "type": "object",
            "properties": {one.name: one.schema for one in self.arguments},
            "required": [one.name for one in self.required],
        }
        return {"name": self.name, "description": self.about, "parameters": parameters}

    @property
    def required(self) -> list[Argument]:
        return [one for one in self.arguments if one.required]

    def call(self, spoken: Mapping[str, Spoken]) -> dict[str, Any]:
        """The right call: {"name", "arguments", "optional"}."""
        arguments = {
            one.name: spoken[one.name].written for one in self.arguments if one.name in spoken
        }
        defaults = {
            one.name: one.default
            for one in self.arguments
            if one.name not in spoken and one.default is not None
        }
        return {"name": self.name, "arguments": arguments, OPTIONAL: defaults}


@dataclass(frozen=True)
class Asked:
    """A service with the values that a request says."""

    service: Service
    spoken: Mapping[str, Spoken]

    @property
    def call(self) -> dict[str, Any]:
        return self.service.call(self.spoken)


@dataclass(frozen=True)
class Scene:
    """A request for services, what it asks of each, and the services on offer."""

    stratum: str
    text: str
    parts: Sequence[Asked]
    offered: Sequence[Service]
    asked: Service
    lacks: Argument | None = None
    lacking: str = ""  # the words that give what is lacking
    complete: dict[str, Any] | None = None  # the call once they are said

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [part.call for part in self.parts]

    def messages(self, rng: random.Random) -> list[Message]:
        """The list of services and the request."""
        order = rng.sample(self.offered, len(self.offered))
        system = tool_lists.tools_prompt([service.schema for service in order], "json")
        return [_message("system", system), _message("user", self.text)]

    def meta(self, split: str) -> dict[str, Any]:
        about = {
            "tools_present": True,
            "asked": "tool",
            "tools": [service.name for service in self.offered],
            "level": 3,
            "kind": self.stratum,
            "hard": "form" if split == "test_hard" else None,
            "tool": self.asked.key,
            "renamed": False,
        }
        if self.lacks is None:
            return about
        return about | {"lacks": self.lacks.name, "asks_for": self.lacks.about}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# ---- forms


def form_of(kind: Any, rng: random.Random, hard: bool) -> Form:
    """The form of a kind of form_services.toml, one of several where it has them. hard: held-out
    ones too."""
    if isinstance(kind, str):
        return _named_form(kind, rng, hard)
    if "list" in kind:
        return _listed(form_of(kind["list"], rng, hard))
    if "object" in kind:
        return _object(kind["object"], kind["says"], rng, hard)
    if "objects" in kind:
        return _listed(_object(kind["objects"], kind["says"], rng, hard))
    return _choice(kind)


def _named_form(kind: str, rng: random.Random, hard: bool) -> Form:
    if kind == "flag":
        return Form({"type": "boolean"}, "", lambda rng, split: Spoken("", True))
    if kind == "email":
        return Form({"type": "string"}, "", _email)
    if kind not in FORMS:
        return _copied(kind)
    domain = FORMS[kind]
    form = _one_form(domain["forms"], rng, hard)
    usual = "string"
    if "rows" in domain:
        draws = _of_table
    elif "key" in domain:
        draws = _moment
    else:
        draws = _amount
        usual = "number"
    kind_of_value = form.get("type", usual)

    def draw(rng: random.Random, split: str) -> Spoken:
        return draws(domain, form, rng, split)

    return Form({"type": kind_of_value}, rng.choice(form["about"]), draw)


def _one_form(
    forms: Sequence[Mapping[str, Any]], rng: random.Random, hard: bool
) -> Mapping[str, Any]:
    held_out = [form for form in forms if "hard" in form]
    if hard and held_out and rng.random() < HELD_OUT_FORMS:
        return rng.choice(held_out)
    return rng.choice([form for form in forms if "hard" not in form])


def _of_table(
    domain: Mapping[str, Any], form: Mapping[str, Any], rng: random.Random, split: str
) -> Spoken:
    """A row of a table. The words of a row belong to one split, unless there are too few rows."""
    rows = [row.split("|") for row in domain["rows"]]
    row = rng.choice([row for row in rows if "shared" in domain or allowed(row[0], split)])
    cell = row[form["column"]]
    return Spoken(row[0], int(cell) if form.get("type") == "integer" else cell.removeprefix("the "))


def _moment(
    domain: Mapping[str, Any], form: Mapping[str, Any], rng: random.Random, split: str
) -> Spoken:
    """A day, a time, or both."""
    while True:
        minutes = rng.randrange(DAYS * 24 * 12) * 5
        moment = FIRST_DAY + datetime.timedelta(minutes=minutes)
        if allowed(moment.strftime(domain["key"]), split):
            return Spoken(
                moment.strftime(rng.choice(domain["says"])), moment.strftime(form["writes"])
            )


def _amount(
    domain: Mapping[str, Any], form: Mapping[str, Any], rng: random.Random, split: str
) -> Spoken:
    """A number of units in the form's unit, with at most four decimals, whole where the form says
    integer."""
    digits = 0 if form.get("type") == "integer" else 4
    while True:
        words, (unit, least, most, *rest) = rng.choice(list(domain["says"].items()))
        number = rng.randint(least, most)
        exact = (Fraction(number * unit) + sum(rest)) / Fraction(form["unit"])
        if exact == round(exact, digits) and allowed(
            f"{words.count('{n}')} {number}" if number > 99 else 0, split
        ):
            written = int(exact) if exact.denominator == 1 else float(exact)
            return Spoken(words.format(n=number), written)


def _email(rng: random.Random, split: str) -> Spoken:
    while True:
        name = invent(rng)
        if allowed(name, split):
            return Spoken(f"{name}@example.org", f"{name}@example.org")


def _copied(kind: str) -> Form:
    """A value that the call repeats."""
    copied = slot(kind)

    def draw(rng: random.Random, split: str) -> Spoken:
        value = copied.sample(rng, split)
        return Spoken(copied.say(rng, value), value)

    return Form(dict(copied.schema), "", draw)


def _choice(options: Mapping[str, str]) -> Form:
    """An enumeration by what requests say."""

    def draw(rng: random.Random, split: str) -> Spoken:
        value = rng.choice(list(options))
        return Spoken(rng.choice(options[value].split("|")), value)

    return Form({"type": "string", "enum": list(options)}, "", draw)


def _listed(item: Form) -> Form:
    """Two or three different values."""

    def draw(rng: random.Random, split: str) -> Spoken:
        values = _different(item, rng, split, rng.randint(2, 3))
        return Spoken(_joined([one.said for one in values]), [one.written for one in values])

    return Form(
        {"type": "array", "items": item.schema}, f"each {item.about}" if item.about else "", draw
    )


def _different(form: Form, rng: random.Random, split: str, count: int) -> list[Spoken]:
    """So many values, no two alike. May be fewer where a domain has too few."""
    found: list[Spoken] = []
    for _ in range(20 * count):
        one = form.draw(rng, split)
        if all(one.written != other.written for other in found):
            found.append(one)
        if len(found) == count:
            break
    return found


def _joined(said: Sequence[str]) -> str:
    """A, B and C; values that hold commas are told apart by `and` alone."""
    if any("," in one for one in said):
        return " and ".join(said)
    return " and ".join(filter(None, [", ".join(said[:-1]), said[-1]]))


def _object(keys: Mapping[str, Sequence[Any]], says: str, rng: random.Random, hard: bool) -> Form:
    forms = {key: form_of(kind, rng, hard) for key, (kind, _) in keys.items()}
    properties = {}
    for key, (_, about) in keys.items():
        properties[key] = Argument(key, about, (), forms[key], True).schema

    def draw(rng: random.Random, split: str) -> Spoken:
        drawn = {key: form.draw(rng, split) for key, form in forms.items()}
        said = says.format(**{key: one.said for key, one in drawn.items()})
        return Spoken(said, {key: one.written for key, one in drawn.items()})

    return Form({"type": "object", "properties": properties, "required": list(keys)}, "", draw)


# ---- services


@cache
def keys_of(split: str) -> tuple[str, ...]:
    """The services that a split asks for."""
    return tuple(
        key for key, row in SERVICES.items() if row.get("hard", False) == (split == "test_hard")
    )


def _dressed(keys: Sequence[str], rng: random.Random, split: str) -> list[Service]:
    """The services in the names and forms of one conversation."""
    name = rng.choice((_as_it_is, _as_it_is, _camel, _dotted))
    large = rng.random() < LARGE_SCHEMAS
    services = []
    for key in keys:
        enlarged = large and rng.random() < ENLARGED
        services.append(_service(key, name, enlarged, rng, split == "test_hard"))
    return services


def _service(
    key: str, name: Callable[[str], str], large: bool, rng: random.Random, hard: bool
) -> Service:
    row = SERVICES[key]
    rows = [(one, about, True) for one, about in row["needs"].items()]
    rows += [(one, about, False) for one, about in row.get("may", {}).items()]
    if large:
        further = rng.sample(list(PHRASED["extra"].items()), rng.randint(3, 8))
        rows += [(one, about, False) for one, about in further if one not in row.get("may", {})]
    arguments = []
    for given, (kind, about, words, *default), required in rows:
        form = form_of(kind, rng, hard)
        ways = words.split("|") if words else ()
        known = _camel(given) if name is _camel else given
        arguments.append(Argument(known, about, ways, form, required, *default))
    return Service(key, name(key), row["group"], row["about"], row["asks"], arguments)


def _as_it_is(name: str) -> str:
    return name


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _dotted(name: str) -> str:
    return name.replace("_", ".", 1)


# ---- requests


@dataclass(frozen=True)
class Draws:
    """Draws the requests of one split. in_steps: share of the requests for several services that
    are written as steps."""

    rng: random.Random
    split: str
    in_steps: float = 0.0

    def scene(self, stratum: str) -> Scene:
        keys = self._keys(stratum)
        services = _dressed(keys, self.rng, self.split)
        first = services[0]
        if stratum == "lacking":
            return self._lacking(first, services)
        if stratum == "near_miss":
            text, parts = self._single(first)
            return Scene(stratum, self._detailed(text), parts, services[1:], first)
        if stratum == "at_once":
            text, parts = self._again(first)
        elif stratum == "at_once_mixed":
            text, parts = self._several(services)
        else:
            text, parts = self._single(first)
        return Scene(stratum, self._detailed(text), parts, services, first)

    def _keys(self, stratum: str) -> list[str]:
        """The services of a conversation; those of the first one's group are often among them."""
        rng = self.rng
        keys = keys_of(self.split)
        asked = rng.choice(keys)
        group = []
        others = []
        for key in keys:
            if key == asked:
                continue
            if SERVICES[key]["group"] == SERVICES[asked]["group"]:
                group.append(key)
            else:
                others.append(key)
        long = rng.random() < LONG_LISTS
        least = 2 if stratum in ("at_once_mixed", "near_miss") else 1
        size = rng.randint(MOST_OFFERED + 1, CROWDED) if long else rng.randint(least, MOST_OFFERED)
        near = group if stratum == "near_miss" or rng.random() < 0.6 else []
        further = [*rng.sample(near, len(near)), *rng.sample(others, min(len(others), size))]
        return [asked, *further[: size - 1]]

    def _spoken(self, service: Service) -> dict[str, Spoken]:
        """Values of a call that only this split makes: of the required arguments and of some
        others. No two are said alike."""
        while True:
            spoken = {}
            for one in self._named(service):
                spoken[one.name] = one.form.draw(self.rng, self.split)
            said = [one.said for one in spoken.values() if one.said]
            alike = len(set(said)) < len(said)
            if not alike and self._is_of_split(service, spoken):
                return spoken

    def _is_of_split(self, service: Service, spoken: Mapping[str, Spoken]) -> bool:
        written = {name: one.written for name, one in spoken.items()}
        return whole({service.key: written}, self.split)

    def _named(self, service: Service) -> list[Argument]:
        """The required arguments and some of the others."""
        return [
            one
            for one in service.arguments
            if one.required or (one.words and self.rng.random() < NAMED)
        ]

    def _said(self, service: Service, spoken: Mapping[str, str]) -> str:
        """What a request says of its arguments, mostly in their order."""
        named = [one for one in service.arguments if one.name in spoken]
        if self.rng.random() < 0.2:
            named = self.rng.sample(named, len(named))
        text = ""
        for one in named:
            mark = ", " if text and not one.required and self.rng.random() < 0.5 else " "
            text += mark + self.rng.choice(one.words).replace("{}", spoken[one.name])
        return text.strip()

    def _asked(self, service: Service, clauses: str) -> str:
        ask = self.rng.choice(service.asks)
        return f"{ask[:-1]} {clauses}{ask[-1]}"

    def _single(self, service: Service) -> tuple[str, list[Asked]]:
        spoken = self._spoken(service)
        text = self._asked(service, self._said(service, _texts(spoken)))
        return text, [Asked(service, spoken)]

    def _again(self, service: Service) -> tuple[str, list[Asked]]:
        """Calls of one service: one argument has several values, or all are said again."""
        single = [one for one in service.required if _may_have_several_values(one)]
        count = self.rng.choice((2, 2, 2, 3, 3, 4, MOST_CALLS))
        if single and self.rng.random() < 0.6:
            text, parts = self._varied(service, self.rng.choice(single), count)
            if len(parts) > 1:
                return text, parts
        texts: list[str] = []
        parts = []
        while len(parts) < min(count, 3):
            part = Asked(service, self._spoken(service))
            if part.call not in [other.call for other in parts]:
                parts.append(part)
                texts.append(self._said(service, _texts(part.spoken)))
        again = "".join(self.rng.choice(PHRASED["more"]).format(text) for text in texts[1:])
        return self._asked(service, texts[0] + again), parts

    def _varied(self, service: Service, argument: Argument, count: int) -> tuple[str, list[Asked]]:
        """Calls that differ in one argument; one alone where the split has too few values for it."""
        spoken = self._spoken(service)
        values: list[Spoken] = []
        parts: list[Asked] = []
        for value in _different(argument.form, self.rng, self.split, 4 * count):
            varied = spoken | {argument.name: value}
            if len(values) < count and self._is_of_split(service, varied):
                values.append(value)
                parts.append(Asked(service, varied))
        if not values:
            return "", []
        said = _texts(spoken) | {argument.name: _joined([one.said for one in values])}
        return self._asked(service, self._said(service, said)), parts

    def _several(self, services: Sequence[Service]) -> tuple[str, list[Asked]]:
        """Calls of two or more services, one of which may be called more than once."""
        count = self.rng.randint(2, min(MOST_OFFERED, len(services)))
        texts: list[str] = []
        parts: list[Asked] = []
        for service in services[:count]:
            left = MOST_CALLS - len(parts) - (count - len(texts) - 1)
            text, made = self._again(service) if self.rng.random() < 0.15 else self._single(service)
            if len(made) > left:
                text, made = self._single(service)
            texts.append(text)
            parts += made
        if self.in_steps > 0 and self.rng.random() < self.in_steps:
            return surroundings.in_steps(self.rng, texts), parts
        whole_text = texts[0]
        for text in texts[1:]:
            join = self.rng.choice(PHRASED["joins"])
            whole_text += join + (text if join.isspace() else surroundings.lowered(text))
        return whole_text, parts

    def _lacking(self, service: Service, offered: Sequence[Service]) -> Scene:
        """A request without one of the required values."""
        lacks = self.rng.choice(service.required)
        spoken = self._spoken(service)
        given = {name: said for name, said in _texts(spoken).items() if name != lacks.name}
        text = self._asked(service, self._said(service, given))
        return Scene(
            "lacking",
            text,
            [],
            offered,
            service,
            lacks=lacks,
            lacking=spoken[lacks.name].said,
            complete=service.call(spoken),
        )

    def _detailed(self, text: str) -> str:
        """The request, in a share of the draws among sentences that nothing needs."""
        rng = self.rng
        if rng.random() >= DETAIL:
            return text
        before = rng.choice(PHRASED["before"]) if rng.random() < 0.6 else ""
        after = rng.choice(PHRASED["after"]) if not before or rng.random() < 0.5 else ""
        words = {"name": invent(rng).capitalize(), "n": rng.randint(2, 9)}
        return " ".join(filter(None, [before.format(**words), text, after.format(**words)]))


def _may_have_several_values(argument: Argument) -> bool:
    """Whether "A, B and C" can only mean several calls: amounts could be added up, quoted texts
    be one text, and choices hold together."""
    schema = argument.form.schema
    return schema["type"] == "string" and "enum" not in schema and "'" not in str(argument.words[0])


def _texts(spoken: Mapping[str, Spoken]) -> dict[str, str]:
    return {name: one.said for name, one in spoken.items()}


# ---- conversations and problems


def conversations(
    rng: random.Random, split: str, in_steps: float = 0.0
) -> list[tuple[list[Message], dict[str, Any]]]:
    """A conversation of a stratum drawn by SHARES: its messages and meta. A near miss is followed
    by its twin, the same request with its service on offer too. in_steps: as in `Draws`."""
    scene = Draws(rng, split, in_steps).scene(rng.choices(list(SHARES), list(SHARES.values()))[0])
    if scene.stratum == "near_miss":
        fitting = replace(scene, stratum="form", offered=[scene.asked, *scene.offered])
        declined = [*scene.messages(rng), _message("assistant", rng.choice(PHRASES["no_function"]))]
        return [(declined, scene.meta(split)), _served(fitting, rng, split)]
    return [_asking(scene, rng, split) if scene.lacks else _served(scene, rng, split)]


def _served(scene: Scene, rng: random.Random, split: str) -> tuple[list[Message], dict[str, Any]]:
    answer = "\n".join(
        tool_calls.format_call(call["name"], call["arguments"]) for call in scene.calls
    )
    return [*scene.messages(rng), _message("assistant", answer)], scene.meta(split)


def _asking(scene: Scene, rng: random.Random, split: str) -> tuple[list[Message], dict[str, Any]]:
    """The answer asks for what is lacking; in a share of the draws the user says it, and is
    served."""
    assert scene.lacks
    question = _question(scene.lacks.about, rng)
    messages = [*scene.messages(rng), _message("assistant", question)]
    if scene.complete and rng.random() < ANSWERED:
        call = tool_calls.format_call(scene.complete["name"], scene.complete["arguments"])
        messages += [_message("user", scene.lacking), _message("assistant", call)]
    return messages, scene.meta(split)


def _question(about: str, rng: random.Random) -> str:
    """Asks for what a description says: "the street", "how long it takes"."""
    if about.split()[0] in CLAUSES:
        return rng.choice(PHRASED["asked_clause"]).format(about=about)
    return rng.choice(PHRASED["asked"]).format(about=about.removeprefix("the "))


def draw_problems(split: str, seed: int, counts: Mapping[str, int]) -> Iterator[Problem]:
    """Problems of each stratum, each drawn by its number. gold: the right call, several of them in
    any order, or None where none is right (meta["lacks"]: the answer has to ask for it)."""
    for stratum, rows in counts.items():
        for number in range(rows):
            rng = random.Random(f"forms {stratum} {number} {split} {seed}")
            scene = Draws(rng, split).scene(stratum)
            gold: Any = None
            if stratum not in ("lacking", "near_miss"):
                gold = list(scene.calls) if len(scene.calls) > 1 else scene.calls[0]
            name = f"forms-{split}-{seed}-{stratum}-{number}"
            meta = scene.meta(split) | {"stratum": stratum}
            yield Problem(name, scene.messages(rng), gold, split, meta)
