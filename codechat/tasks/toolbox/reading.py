"""Conversations and problems that can only be solved by reading the list of tools.

`conversations` offers each tool under its one name, so a model may remember names. Here a share of the conversations renames its tools and
arguments, some tools are composed or invented (`generated`), every request with an unfitting list has a twin whose list fits, and some
requests need two calls, the second with the first one's result.

Problems have a stratum in `meta["stratum"]`, by which evaluations group scores:

    call       a trained tool; its values of open domains are of this split (`values`)
    unfitting  the request of a call problem (its twin), whose tool is replaced by others: no call is correct
    no_tools   a request without any list: no call is correct
    code       a request for Python code, with or without tools: no call is correct
    chain_1    the first call of a request that needs two
    chain_2    the second, after the first and its response
    tool       test_hard: a tool that training never has
    phrasing   test_hard: a trained tool, in words that training never has
    renamed    test_hard: the request of a call problem of `test`, whose tools have other names

Left out: chains of three calls; calls in parallel.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import synthetic
from codechat.data.prepared import check_shares
from codechat.tasks.base import Message, Problem
from codechat.tasks.toolbox import conversations as plain
from codechat.tasks.toolbox import everyday, generated
from codechat.tasks.toolbox.catalogue import execute, family, response
from codechat.tasks.toolbox.tool import LEVELS, Tool, ToolError, say
from codechat.tasks.toolbox.values import COMMON, allowed, draw_word, invent
from codechat.text import chat

CHAIN = ("{first} Then: {second}", "{first} Then take the result. {second}", "{first} After that: {second}")
RESULT = ("the result", "that", "the answer")
# what can be said after any call: true of a function that nobody knows, too
PLAIN_ANSWERS = (
    "The result is {result}.",
    "The answer is {result}.",
    "The function says {result}.",
    "Here is the result: {result}.",
)


KINDS = ("multi_turn", "series", "chained", "unfitting", "no_tools", "small_talk")  # beside single calls


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of the conversations. What remains is single calls."""

    multi_turn: float = opt(0.2, "share of conversations that continue after the call")
    series: float = opt(
        0.0, "share of conversations with several requests, each for another tool of one list or for none"
    )
    chained: float = opt(
        0.0, "share of conversations whose request needs two calls, the second with the first's result"
    )
    unfitting: float = opt(0.1, "share of conversations whose tools do not fit the request")
    no_tools: float = opt(0.05, "share of conversations that ask for a tool where none is offered")
    small_talk: float = opt(0.05, "share of conversations that only chat while tools are offered")
    renamed: float = opt(0.0, "share of conversations whose tools and arguments have other names")
    composed: float = opt(0.0, "share of requests for composed tools")
    invented: float = opt(0.0, "share of requests for invented tools")
    renamed_tools: float = opt(0.7, "share of the tools of a renamed conversation that have another name")
    renamed_arguments: float = opt(0.35, "share of its arguments that have another name")
    unserved: float = opt(0.5, "share of the series with a request that none of its tools serves")
    informal: float = opt(0.0, "share of the requests that are put as people chat")
    services: float = opt(0.0, "share of requests for services of everyday life")
    wordings: float = opt(
        0.0,
        "share of requests for the catalogue's tools in further wordings, and of small talk in that of small_talk.json",
    )
    rare_words: float = opt(
        0.0, "share of the words in names, invented tools and drills that are one of a thousand, not of 200"
    )
    varied_values: float = opt(
        0.0,
        "share of the words and names in requests and copying drills that are real, compounds or letters in any order, not invented by a grammar",
    )
    plain_answers: float = opt(
        0.0,
        "share of the answers after calls of renamed or invented tools that only state the result; half of it after other calls",
    )

    def __post_init__(self) -> None:
        check_shares(self, *KINDS, together=True)
        check_shares(self, "composed", "invented", "services", together=True)
        check_shares(self, "renamed", "renamed_tools", "renamed_arguments", "unserved", "informal")
        check_shares(self, "wordings", "rare_words", "varied_values", "plain_answers")


# ---------------------------------------------------------------- names


@dataclass(frozen=True)
class Names:
    """The names under which one conversation offers its tools; a tool that is not in it keeps its own.

    tools: own name -> name on offer. arguments: (tool's own name, argument) -> name on offer."""

    tools: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def schema(self, tool: Tool) -> dict[str, Any]:
        """The tool's schema under its names on offer."""
        shown = {key: self.arguments.get((tool.name, key), key) for key in tool.slots}
        parameters = tool.schema["parameters"]
        properties = {shown[key]: schema for key, schema in parameters["properties"].items()}
        return tool.schema | {
            "name": self.tools.get(tool.name, tool.name),
            "parameters": parameters | {"properties": properties, "required": list(properties)},
        }

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """{"name", "arguments"} of a call, under the names on offer."""
        given = {self.arguments.get((tool.name, key), key): value for key, value in arguments.items()}
        return {"name": self.tools.get(tool.name, tool.name), "arguments": given}


def drawn_names(
    rng: random.Random,
    split: str,
    tools: Sequence[Tool],
    every: bool = False,
    description_share: float = 0.3,
    mix: Mix = Mix(),
) -> Names:
    """New names for some of the tools (all: `every`) and of their arguments: one to three words, or an invented one of this split."""
    taken = {t.name for t in tools}

    def fresh(words: Sequence[str]) -> str:
        while True:
            draw = rng.random()
            if draw < description_share:
                found = "_".join(rng.sample(words, min(len(words), rng.choice((1, 2)))))
            elif draw < 0.7:
                count = rng.choice((1, 1, 2, 2, 3))
                rare = mix.rare_words
                found = "_".join([draw_word(rng, rare) for _ in range(count)] if rare else rng.choices(COMMON, k=count))
            else:
                found = invent(rng)
            if found not in taken and allowed(found, split):
                taken.add(found)
                return found

    names, arguments = {}, {}
    for tool in tools:
        words = [w for w in tool.description.lower().split() if w.isalpha() and len(w) > 2] or list(COMMON)
        if every or rng.random() < mix.renamed_tools:
            names[tool.name] = fresh(words)
        for key in tool.slots:
            if rng.random() < mix.renamed_arguments:
                arguments[tool.name, key] = draw_word(rng, mix.rare_words)
        shown = [arguments.get((tool.name, key), key) for key in tool.slots]
        if len(set(shown)) < len(shown):  # two arguments of one name: keep the tool's own
            arguments = {at: new for at, new in arguments.items() if at[0] != tool.name}
    return Names(names, arguments)


# ---------------------------------------------------------------- how people write

OPENINGS = (
    "hey",
    "hi",
    "ok so",
    "pls",
    "please",
    "quick one",
    "quick question",
    "so",
    "hello there",
    "one more thing",
    "just wondering",
    "for a friend",
    "my teacher asks",
    "we were arguing about this",
    "need this for work",
    "sorry to bother you",
    "next one",
    "can you help me here",
)
ENDINGS = (
    "pls",
    "please",
    "thanks",
    "thx",
    "quickly",
    "if you can",
    "for me",
    "would be great",
    "no idea myself",
)


def informally(rng: random.Random, text: str) -> str:
    """The request without its capital or its full stop, with words before or after it. What it asks for stays as it is."""
    if text[:2].istitle():
        text = text[0].lower() + text[1:]
    if rng.random() < 0.7:
        text = text.rstrip(".?! ")
    if rng.random() < 0.6:
        text = rng.choice(OPENINGS) + rng.choice((", ", ": ", " ", " - ")) + text
    if rng.random() < 0.4:
        text += rng.choice((" ", ", ")) + rng.choice(ENDINGS)
    elif rng.random() < 0.1:
        text += "!!"
    return text


def _asked(rng: random.Random, mix: Mix, tool: Tool, arguments: Mapping[str, Any]) -> str:
    if mix.wordings and rng.random() < mix.wordings:
        return everyday.ask(rng, tool, arguments)
    return tool.ask(rng, arguments)


def _said(rng: random.Random, mix: Mix, text: str) -> Message:
    return plain.message("user", informally(rng, text) if mix.informal and rng.random() < mix.informal else text)


# ---------------------------------------------------------------- one conversation


@dataclass(frozen=True)
class Scene:
    """A request, the tools on offer (the fitting ones first), and their names."""

    request: plain.Request
    offered: list[Tool]
    names: Names
    second: plain.Request | None = None

    def system(self, rng: random.Random) -> Message:
        order = rng.sample(self.offered, len(self.offered))
        return plain.message("system", chat.tools_prompt([self.names.schema(t) for t in order], "compact"))

    def calls(self) -> list[dict[str, Any]]:
        requests = [self.request, *([self.second] if self.second else [])]
        return [self.names.call(r.tool, r.arguments) for r in requests]

    def meta(self, kind: str) -> dict[str, Any]:
        tools = [self.names.tools.get(t.name, t.name) for t in self.offered]
        tool = self.request.tool
        return {"tools_present": bool(tools), "asked": "tool", "tools": tools, "level": tool.level, "kind": kind} | {
            "hard": self.request.hard,
            "tool": tool.name,
            "renamed": bool(self.names.tools),
        }


def scene(rng: random.Random, split: str, mix: Mix, levels: Sequence[int], edition: int, *, fits: bool = True) -> Scene:
    """A request with 1 to 4 tools. fits: the requested tool is among them."""
    draw = rng.random()
    if draw < mix.invented:
        tool, *others = generated.invented_offer(
            rng, split, rng.randint(0 if fits else 1, plain.MAX_DISTRACTORS), mix.rare_words
        )
        if mix.plain_answers and rng.random() < mix.plain_answers:
            tool = everyday.with_drawn_results(rng, tool, rng.choice(PLAIN_ANSWERS))
    elif draw < mix.invented + mix.composed:
        tool, *others = rng.sample(generated.composed(), rng.randint(1 if fits else 2, 1 + plain.MAX_DISTRACTORS))
    elif draw < mix.invented + mix.composed + mix.services:
        tool, *others = everyday.draw_services(rng, split, rng.randint(1 if fits else 2, 1 + plain.MAX_DISTRACTORS))
        if rng.random() < 0.5:
            others = plain.others(rng, split, [], len(others), edition)
    else:
        request = plain.draw_request(rng, split, levels, edition, varied=mix.varied_values)
        if mix.wordings and rng.random() < mix.wordings:
            request = replace(request, text=everyday.ask(rng, request.tool, request.arguments))
        others = plain.others(rng, split, [request.tool], rng.randint(0 if fits else 1, plain.MAX_DISTRACTORS), edition)
        return _named(rng, split, mix, request, [request.tool, *others] if fits else others)
    arguments = tool.sample(rng, split, mix.varied_values)
    request = plain.Request(tool, arguments, tool.ask(rng, arguments), None)
    return _named(rng, split, mix, request, [tool, *others] if fits else others)


def _named(
    rng: random.Random, split: str, mix: Mix, request: plain.Request, offered: list[Tool], second: Any = None
) -> Scene:
    known = list({t.name: t for t in (*offered, request.tool)}.values())
    names = drawn_names(rng, split, known, mix=mix) if rng.random() < mix.renamed else Names()
    return Scene(request, offered, names, second)


def chain(rng: random.Random, split: str, mix: Mix, levels: Sequence[int], edition: int) -> Scene:
    """A request that needs two calls: the second tool takes the result of the first."""
    while True:
        first = plain.draw_request(rng, split, levels, edition, varied=mix.varied_values)
        result = execute(first.tool.name, first.arguments)["result"]
        second = _following(rng, split, mix, edition, first.tool, result)
        if second is not None:
            break
    text = rng.choice(CHAIN).format(first=first.text, second=second.text)
    both = [first.tool, second.tool]
    others = plain.others(rng, split, both, rng.randint(0, plain.MAX_DISTRACTORS - 1), edition)
    request = plain.Request(first.tool, first.arguments, text, first.hard)
    return _named(rng, split, mix, request, [*both, *others], second)


def series(
    rng: random.Random, split: str, mix: Mix, levels: Sequence[int], edition: int
) -> tuple[list[Message], dict[str, Any]]:
    """One list, and a request for each of its tools in turn, in any order; among them, requests for none of them.

    Only the list says which name goes with a request, and each answer is another name: the densest lesson in reading."""
    tools = _tools(rng, split, mix, levels, edition, rng.randint(3, 5))
    missing = tools.pop()
    names = drawn_names(rng, split, [*tools, missing], mix=mix) if rng.random() < mix.renamed else Names()
    order = rng.sample(tools, len(tools)) + ([missing] if rng.random() < mix.unserved else [])
    made = Scene(plain.Request(order[0], {}, "", None), tools, names)
    messages = [made.system(rng)]
    for tool in rng.sample(order, len(order)):
        arguments = tool.sample(rng, split, mix.varied_values)
        messages.append(_said(rng, mix, _asked(rng, mix, tool, arguments)))
        none = plain.message("assistant", rng.choice(plain.NO_FUNCTION))
        messages.append(none if tool is missing else _call(names.call(tool, arguments)))
    return messages, made.meta("series") | {"level": 0}


def _tools(rng: random.Random, split: str, mix: Mix, levels: Sequence[int], edition: int, k: int) -> list[Tool]:
    """k tools of one kind, none of which could serve another's request."""
    draw = rng.random()
    if draw < mix.invented:
        return generated.invented_offer(rng, split, k - 1, mix.rare_words)
    if draw < mix.invented + mix.composed:
        return rng.sample(generated.composed(), k)
    if draw < mix.invented + mix.composed + mix.services:
        return everyday.draw_services(rng, split, k)
    first = rng.choice(plain.pool(False, rng.choice(levels), edition=edition))
    return [first, *plain.others(rng, split, [first], k - 1, edition)]


def _following(
    rng: random.Random, split: str, mix: Mix, edition: int, first: Tool, result: Any
) -> plain.Request | None:
    """A request for a second tool one of whose arguments is `result`; None where the tool drawn takes no such value."""
    tool = rng.choice(plain.pool(False, edition=edition))
    kind = {int: ("integer", "number"), float: ("number",), str: ("string",)}.get(type(result), ())
    free = [k for k, slot in tool.slots.items() if slot.schema["type"] in kind and "enum" not in slot.schema]
    if not free or tool.name in family(first.name):
        return None
    key, arguments = rng.choice(free), tool.sample(rng, split, mix.varied_values)
    arguments[key] = result
    try:
        tool.call(arguments)
    except ToolError:
        return None
    spoken = {k: tool.slots[k].say(rng, v) for k, v in arguments.items()} | {key: rng.choice(RESULT)}
    return plain.Request(tool, arguments, rng.choice(tool.asks).format(**spoken), None)


# ---------------------------------------------------------------- many


def dialogues(
    split: str, n: int, seed: int = 0, *, mix: Mix | None = None, levels: Sequence[int] = LEVELS, edition: int = 1
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "calls", "meta"}; meta: as of `conversations.dialogues`, and renamed.

    An unfitting conversation is followed by its twin: the same request with a list that fits."""
    mix, rng, twin = mix or Mix(), plain.generator("reading", split, seed, levels), None
    for i in range(n):
        if twin:
            messages, meta, twin = *twin, None
        else:
            messages, meta, twin = _conversation(rng, split, mix, levels, edition)
        yield {"id": f"reading-{split}-{seed}-{i}", "messages": messages, "domain": "calls", "meta": meta}


Row = tuple[list[Message], dict[str, Any]]


def _conversation(
    rng: random.Random, split: str, mix: Mix, levels: Sequence[int], edition: int
) -> tuple[*Row, Row | None]:
    kinds = {k: getattr(mix, k) for k in KINDS}
    kind = rng.choices([*kinds, "call"], [*kinds.values(), 1 - sum(kinds.values())])[0]
    if kind == "series":
        return *series(rng, split, mix, levels, edition), None
    if kind == "chained":
        made = chain(rng, split, mix, levels, edition)
        return _served(rng, made, _said(rng, mix, made.request.text), mix), made.meta(kind), None
    made = scene(rng, split, mix, levels, edition, fits=kind != "unfitting")
    user = _said(rng, mix, made.request.text)
    if kind in ("call", "multi_turn"):
        messages = (
            _served(rng, made, user, mix) if kind == "multi_turn" else [made.system(rng), user, _call(made.calls()[0])]
        )
        return messages, made.meta(kind), None
    if kind == "small_talk":
        if mix.wordings and rng.random() < mix.wordings:
            asked, answer = rng.choice(synthetic.small_talk())
        else:
            asked, answer = rng.choice(plain.SMALL_TALK)
        messages = [made.system(rng), plain.message("user", asked), plain.message("assistant", answer)]
        return messages, made.meta("chat") | {"asked": "chat"}, None
    if kind == "no_tools":
        system, answer = plain.message("system", plain.neutral_system(rng)), rng.choice(plain.NO_TOOLS)
        meta = made.meta("absent") | {"tools_present": False, "tools": []}
        return [system, user, plain.message("assistant", answer)], meta, None
    answer = plain.message("assistant", rng.choice(plain.NO_FUNCTION))
    fitting = _with_the_fitting_tool(rng, made)
    twin = [fitting.system(rng), user, _call(fitting.calls()[0])], fitting.meta("call")
    return [made.system(rng), user, answer], made.meta("unsuitable"), twin


def _with_the_fitting_tool(rng: random.Random, made: Scene) -> Scene:
    """The same scene, with one of its tools replaced by the requested one."""
    offered = [made.request.tool, *made.offered[1:]]
    return Scene(made.request, offered, made.names)


def _served(rng: random.Random, made: Scene, user: Message, mix: Mix = Mix()) -> list[Message]:
    """The request, its calls with the tools' responses, and the answer."""
    messages = [made.system(rng), user]
    requests = [made.request, *([made.second] if made.second else [])]
    for request, call in zip(requests, made.calls(), strict=True):
        result = request.tool.call(request.arguments)
        messages += [_call(call), plain.message("function", response(result))]
    return [*messages, plain.message("assistant", _answer(rng, made, requests[-1], result, mix))]


def _answer(rng: random.Random, made: Scene, request: plain.Request, result: Any, mix: Mix) -> str:
    """The tool's own sentence, or one that only states the result. A name that says nothing leads to no sentence of its own: the model would
    learn to draw one at random, and would do so after calls of functions that it does not know. A name in use does; half as often there."""
    share = mix.plain_answers if request.tool.name in made.names.tools else mix.plain_answers / 2
    if share and rng.random() < share:
        return rng.choice(PLAIN_ANSWERS).format(result=say(result))
    return request.tool.report(request.arguments, result)


def _call(call: Mapping[str, Any]) -> Message:
    return plain.message("assistant", chat.format_call(call["name"], call["arguments"]))


@dataclass(frozen=True)
class Draw:
    """What decides a problem: its number in the split and seed, and what training problems may have."""

    split: str
    seed: int
    number: int
    levels: Sequence[int] = LEVELS
    edition: int = 1
    mix: Mix = Mix()
    code_requests: Sequence[str] = ()

    def rng(self, what: str, split: str | None = None) -> random.Random:
        return plain.generator(f"{what} {self.number}", split or self.split, self.seed, self.levels)


Made = Iterator[tuple[str, list[Message], dict[str, Any] | None, dict[str, Any]]]


def _single(kind: str, rng: random.Random, made: Scene, gold: bool = True) -> Made:
    messages = [made.system(rng), plain.message("user", made.request.text)]
    yield kind, messages, made.calls()[0] if gold else None, made.meta("call" if gold else "unsuitable")


def _call_problem(draw: Draw) -> Made:
    rng = draw.rng("call")
    return _single("call", rng, scene(rng, draw.split, draw.mix, draw.levels, draw.edition))


def _unfitting(draw: Draw) -> Made:
    rng = draw.rng("call")
    made = scene(rng, draw.split, draw.mix, draw.levels, draw.edition)
    tool, *rest = made.offered
    other = next(t for t in plain.others(rng, draw.split, [tool], 4, draw.edition) if t not in rest)
    return _single("unfitting", rng, Scene(made.request, [other, *rest], made.names), gold=False)


def _renamed(draw: Draw) -> Made:
    rng = draw.rng("call", "test")
    made = scene(rng, "test", Mix(), draw.levels, draw.edition)
    names = drawn_names(rng, draw.split, made.offered, every=True)
    return _single("renamed", rng, Scene(made.request, made.offered, names))


def _hard(kind: str) -> Callable[[Draw], Made]:
    def make(draw: Draw) -> Made:
        rng = draw.rng(kind)
        request = plain.draw_request(rng, draw.split, draw.levels, draw.edition, hard=kind)
        others = plain.others(rng, draw.split, [request.tool], rng.randint(0, plain.MAX_DISTRACTORS), draw.edition)
        return _single(kind, rng, Scene(request, [request.tool, *others], Names()))

    return make


def _no_tools(draw: Draw) -> Made:
    rng = draw.rng("no_tools")
    request = plain.draw_request(rng, draw.split, draw.levels, draw.edition)
    messages = [plain.message("system", plain.neutral_system(rng)), plain.message("user", request.text)]
    yield "no_tools", messages, None, {"tools_present": False, "asked": "tool", "tools": [], "kind": "absent"}


def _code(draw: Draw) -> Made:
    rng, present = draw.rng("code"), draw.number % 2 == 0
    system = plain.tools_system(rng, split=draw.split, edition=draw.edition) if present else plain.neutral_system(rng)
    asked = draw.code_requests[draw.number % len(draw.code_requests)]
    messages = [plain.message("system", system), plain.message("user", asked)]
    yield "code", messages, None, {"tools_present": present, "asked": "code", "kind": "code"}


def _chain(draw: Draw) -> Made:
    rng = draw.rng("chain")
    made = chain(rng, draw.split, draw.mix, draw.levels, draw.edition)
    messages = _served(rng, made, _said(rng, draw.mix, made.request.text))
    for at, gold in enumerate(made.calls()):
        yield f"chain_{at + 1}", messages[: 2 + 2 * at], gold, made.meta("chained") | {"chain": draw.number}


STRATA: dict[str, Callable[[Draw], Made]] = {
    "call": _call_problem,
    "unfitting": _unfitting,
    "no_tools": _no_tools,
    "code": _code,
    "chain": _chain,
    "tool": _hard("tool"),
    "phrasing": _hard("phrasing"),
    "renamed": _renamed,
}
SHARES = {  # of the problems of a split
    "train": dict(call=0.55, unfitting=0.2, no_tools=0.05, code=0.1, chain=0.1),
    "select": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test_hard": dict(tool=0.4, phrasing=0.3, renamed=0.3),
}


def problems(
    split: str,
    n: int,
    seed: int = 0,
    *,
    shares: Mapping[str, float] | None = None,
    mix: Mix | None = None,
    levels: Sequence[int] = LEVELS,
    edition: int = 1,
    code_requests: Sequence[str] = (),
) -> list[Problem]:
    """n problems, those of a stratum together. gold: {"name", "arguments"}, or None where no call is correct.

    shares: stratum -> share, by default `SHARES` of the split; "chain" gives chain_1 and chain_2. mix: renamed, composed and invented tools of
    the strata call, unfitting and chain. ConfigError for an unknown stratum, and for code without `code_requests`."""
    shares = shares or SHARES[split]
    if unknown := sorted(shares.keys() - STRATA.keys()):
        raise ConfigError(f"strata {', '.join(unknown)}; required: some of {', '.join(STRATA)}")
    if "code" in shares and not code_requests:
        raise ConfigError("stratum code got 0 requests for code; at least one is required; pass some")
    made = []
    for stratum, share in shares.items():
        rows = round(share / sum(shares.values()) * n)
        for number in range(rows // 2 if stratum == "chain" else rows):
            draw = Draw(split, seed, number, levels, edition, mix or Mix(), code_requests)
            for kind, messages, gold, meta in STRATA[stratum](draw):
                id = f"reading-{split}-{seed}-{kind}-{number}"
                made.append(Problem(id, messages, gold, split, meta | {"stratum": kind}))
    return made
