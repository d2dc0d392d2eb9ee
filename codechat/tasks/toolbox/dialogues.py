"""Conversations that call tools, and how their requests, lists and names are drawn.

A share of the conversations renames its tools and arguments, some tools are composed or invented (`generated`), every
request with an unfitting list has a twin whose list fits, and some requests need two calls, the second with the first
one's result. So the list has to be read; with the default `Mix` each tool has its one name. A conversation of a split
and seed is the same however many are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from codechat.core.config import opt
from codechat.data import synthetic
from codechat.data.prepared import check_shares
from codechat.tasks.base import Message, check_split
from codechat.tasks.toolbox import everyday, generated
from codechat.tasks.toolbox.catalogue import HELD_OUT, SEEN, draw_others, execute, family, response, tools_of
from codechat.tasks.toolbox.tool import Tool, ToolError, say
from codechat.tasks.toolbox.values import COMMON, allowed, draw_word, invent
from codechat.text import chat

LEVELS = (1, 1, 1, 2, 3)  # requests for easy tools are three times as frequent
MAX_OTHERS = 3  # tools on offer beside the requested one
NEUTRAL = (
    "You are a helpful assistant.",
    "You are CodeChat.",
    "Answer the user.",
    "Help the user.",
    "Be brief.",
    "You write Python.",
    "You are a coding assistant.",
    "Answer in a few words.",
)
NO_FUNCTION = ("I have no function for that.", "None of my functions can do that.")
NO_TOOLS = ("I have no functions here.", "There is no function that I could call.")
SMALL_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Hi there.", "Hi! How can I help?"),
    ("Thanks!", "You are welcome."),
    ("Thank you very much.", "You are welcome."),
    ("Good morning!", "Good morning! What can I do for you?"),
    ("Bye!", "Goodbye!"),
    ("Who are you?", "I am CodeChat, a small language model."),
    ("Are you there?", "Yes, I am here."),
    ("What is your name?", "I am CodeChat."),
    ("Nice work.", "Thank you!"),
)
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

    @property
    def declines(self) -> bool:
        """Whether some conversations need no call."""
        return self.unfitting + self.no_tools + self.small_talk > 0

    def __post_init__(self) -> None:
        check_shares(self, *KINDS, together=True)
        check_shares(self, "composed", "invented", "services", together=True)
        check_shares(self, "renamed", "renamed_tools", "renamed_arguments", "unserved", "informal")
        check_shares(self, "wordings", "rare_words", "varied_values", "plain_answers")


@dataclass(frozen=True)
class Request:
    """A tool, its arguments and the request in words. hard: the part that training never sees ("tool" or "phrasing"),
    or None."""

    tool: Tool
    arguments: dict[str, Any]
    text: str
    hard: str | None = None


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


@dataclass(frozen=True)
class Scene:
    """A request, the tools on offer (the fitting ones first), and their names. second: the request that takes the
    first one's result."""

    request: Request
    offered: list[Tool]
    names: Names = Names()
    second: Request | None = None

    def system(self, rng: random.Random) -> Message:
        order = rng.sample(self.offered, len(self.offered))
        return message("system", chat.tools_prompt([self.names.schema(t) for t in order], "compact"))

    def calls(self) -> list[dict[str, Any]]:
        requests = [self.request, *([self.second] if self.second else [])]
        return [self.names.call(r.tool, r.arguments) for r in requests]

    def meta(self, kind: str) -> dict[str, Any]:
        tool = self.request.tool
        return {
            "tools_present": bool(self.offered),
            "asked": "tool",
            "tools": [self.names.tools.get(t.name, t.name) for t in self.offered],
            "level": tool.level,
            "kind": kind,
            "hard": self.request.hard,
            "tool": tool.name,
            "renamed": bool(self.names.tools),
        }


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def call_message(call: Mapping[str, Any]) -> Message:
    return message("assistant", chat.format_call(call["name"], call["arguments"]))


def neutral_system(rng: random.Random) -> str:
    """A short system prompt without tools."""
    return rng.choice(NEUTRAL)


def tools_system(rng: random.Random, split: str = "train", style: str = "compact") -> str:
    """A system prompt that offers 1 to 4 tools of the split. style: of `chat.tools_prompt`."""
    tools = rng.sample(tools_of(split), rng.randint(1, 1 + MAX_OTHERS))
    return chat.tools_prompt([t.schema for t in tools], style)


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


# ---------------------------------------------------------------- one scene


@dataclass(frozen=True)
class Sampler:
    """Draws requests, lists of tools and their names, of one split and mix."""

    rng: random.Random
    split: str
    mix: Mix = Mix()

    def request(self, hard: str | None = None) -> Request:
        """For a tool of the catalogue. hard: "tool" needs a held-out one, "phrasing" asks for another in new words."""
        level = self.rng.choice(LEVELS)
        unseen = [t for t in HELD_OUT if t.level == level]
        tool = self.rng.choice(unseen if hard == "tool" else tools_of("train", level))
        arguments = tool.sample(self.rng, self.split, self.mix.varied_values)
        return Request(tool, arguments, tool.ask(self.rng, arguments, hard == "phrasing"), hard)

    def others(self, tools: Sequence[Tool], k: int) -> list[Tool]:
        return draw_others(self.rng, self.split, tools, k)

    def scene(self, *, fits: bool = True) -> Scene:
        """A request with 1 to 4 tools. fits: the requested tool is among them."""
        rng, mix, draw = self.rng, self.mix, self.rng.random()
        if draw < mix.invented:
            tool, *others = generated.invented_offer(
                rng, self.split, rng.randint(0 if fits else 1, MAX_OTHERS), mix.rare_words
            )
            if mix.plain_answers and rng.random() < mix.plain_answers:
                tool = everyday.with_drawn_results(rng, tool, rng.choice(PLAIN_ANSWERS))
        elif draw < mix.invented + mix.composed:
            tool, *others = rng.sample(generated.composed(), rng.randint(1 if fits else 2, 1 + MAX_OTHERS))
        elif draw < mix.invented + mix.composed + mix.services:
            tool, *others = everyday.draw_services(rng, self.split, rng.randint(1 if fits else 2, 1 + MAX_OTHERS))
            if rng.random() < 0.5:
                others = self.others([], len(others))
        else:
            request = self.request()
            if mix.wordings and rng.random() < mix.wordings:
                request = replace(request, text=everyday.ask(rng, request.tool, request.arguments))
            others = self.others([request.tool], rng.randint(0 if fits else 1, MAX_OTHERS))
            return self.named(request, [request.tool, *others] if fits else others)
        arguments = tool.sample(rng, self.split, mix.varied_values)
        return self.named(Request(tool, arguments, tool.ask(rng, arguments)), [tool, *others] if fits else others)

    def named(self, request: Request, offered: list[Tool], second: Request | None = None) -> Scene:
        """The scene, in a share of the draws under other names."""
        known = list({t.name: t for t in (*offered, request.tool)}.values())
        return Scene(request, offered, self.draw_names(known), second)

    def draw_names(self, tools: Sequence[Tool]) -> Names:
        return self.new_names(tools) if self.rng.random() < self.mix.renamed else Names()

    def new_names(self, tools: Sequence[Tool], every: bool = False) -> Names:
        """New names for some of the tools (all: `every`) and of their arguments: one to three words, or an invented one
        of this split."""
        rng, mix, names, arguments = self.rng, self.mix, {}, {}
        taken = {t.name for t in tools}
        for tool in tools:
            words = [w for w in tool.description.lower().split() if w.isalpha() and len(w) > 2] or list(COMMON)
            if every or rng.random() < mix.renamed_tools:
                names[tool.name] = self._new_name(words, taken)
                taken.add(names[tool.name])
            for key in tool.slots:
                if rng.random() < mix.renamed_arguments:
                    arguments[tool.name, key] = draw_word(rng, mix.rare_words)
            shown = [arguments.get((tool.name, key), key) for key in tool.slots]
            if len(set(shown)) < len(shown):  # two arguments of one name: keep the tool's own
                arguments = {at: new for at, new in arguments.items() if at[0] != tool.name}
        return Names(names, arguments)

    def _new_name(self, description: Sequence[str], taken: set[str]) -> str:
        rng, rare = self.rng, self.mix.rare_words
        while True:
            draw = rng.random()
            if draw < 0.3:
                name = "_".join(rng.sample(description, min(len(description), rng.choice((1, 2)))))
            elif draw < 0.7:
                count = rng.choice((1, 1, 2, 2, 3))
                name = "_".join([draw_word(rng, rare) for _ in range(count)] if rare else rng.choices(COMMON, k=count))
            else:
                name = invent(rng)
            if name not in taken and allowed(name, self.split):
                return name

    def chain(self) -> Scene:
        """A request that needs two calls: the second tool takes the result of the first."""
        second = None
        while second is None:
            first = self.request()
            second = self._following(first.tool, execute(first.tool.name, first.arguments)["result"])
        text = self.rng.choice(CHAIN).format(first=first.text, second=second.text)
        both = [first.tool, second.tool]
        others = self.others(both, self.rng.randint(0, MAX_OTHERS - 1))
        return self.named(replace(first, text=text), [*both, *others], second)

    def _following(self, first: Tool, result: Any) -> Request | None:
        """A request for a second tool one of whose arguments is `result`; None where the tool drawn takes no such
        value."""
        rng = self.rng
        tool = rng.choice(SEEN)
        kind = {int: ("integer", "number"), float: ("number",), str: ("string",)}.get(type(result), ())
        free = [k for k, slot in tool.slots.items() if slot.schema["type"] in kind and "enum" not in slot.schema]
        if not free or tool.name in family(first.name):
            return None
        key, arguments = rng.choice(free), tool.sample(rng, self.split, self.mix.varied_values)
        arguments[key] = result
        try:
            tool.call(arguments)
        except ToolError:
            return None
        spoken = {k: tool.slots[k].say(rng, v) for k, v in arguments.items()} | {key: rng.choice(RESULT)}
        return Request(tool, arguments, rng.choice(tool.asks).format(**spoken))

    def tools(self, k: int) -> list[Tool]:
        """k tools of one kind, none of which could serve another's request."""
        rng, mix, draw = self.rng, self.mix, self.rng.random()
        if draw < mix.invented:
            return generated.invented_offer(rng, self.split, k - 1, mix.rare_words)
        if draw < mix.invented + mix.composed:
            return rng.sample(generated.composed(), k)
        if draw < mix.invented + mix.composed + mix.services:
            return everyday.draw_services(rng, self.split, k)
        first = rng.choice(tools_of("train", rng.choice(LEVELS)))
        return [first, *self.others([first], k - 1)]

    def said(self, text: str) -> Message:
        """The user's message; informal in a share of the draws."""
        informal = self.mix.informal and self.rng.random() < self.mix.informal
        return message("user", informally(self.rng, text) if informal else text)

    def ask(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        if self.mix.wordings and self.rng.random() < self.mix.wordings:
            return everyday.ask(self.rng, tool, arguments)
        return tool.ask(self.rng, arguments)

    def answer(self, scene: Scene, request: Request, result: Any) -> str:
        """The tool's own sentence, or one that only states the result. After a name that says nothing the tool's own
        sentence would have to be guessed, so plain ones are twice as frequent there."""
        share = self.mix.plain_answers if request.tool.name in scene.names.tools else self.mix.plain_answers / 2
        if share and self.rng.random() < share:
            return self.rng.choice(PLAIN_ANSWERS).format(result=say(result))
        return request.tool.report(request.arguments, result)

    def served(self, scene: Scene, user: Message) -> list[Message]:
        """The request, its calls with the tools' responses, and the answer."""
        messages = [scene.system(self.rng), user]
        requests = [scene.request, *([scene.second] if scene.second else [])]
        for request, call in zip(requests, scene.calls(), strict=True):
            result = request.tool.call(request.arguments)
            messages += [call_message(call), message("function", response(result))]
        return [*messages, message("assistant", self.answer(scene, requests[-1], result))]


# ---------------------------------------------------------------- conversations

Drawn = tuple[list[Message], dict[str, Any]]  # messages and meta


def draw(split: str, n: int, seed: int = 0, mix: Mix = Mix()) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "calls", "meta"}. meta: tools_present, asked ("tool" or "chat"), tools (names
    on offer), level, hard, kind, tool, renamed. An unfitting conversation is followed by its twin: the same request with
    a list that fits."""
    check_split(split)
    sampler, twin = Sampler(random.Random(f"reading {split} {seed}"), split, mix), None
    for i in range(n):
        if twin:
            (messages, meta), twin = twin, None
        else:
            (messages, meta), twin = _conversation(sampler)
        yield {"id": f"reading-{split}-{seed}-{i}", "messages": messages, "domain": "calls", "meta": meta}


def _conversation(sampler: Sampler) -> tuple[Drawn, Drawn | None]:
    """A conversation of a kind drawn by the mix, and the twin of an unfitting one."""
    rng, mix = sampler.rng, sampler.mix
    kinds = {k: getattr(mix, k) for k in KINDS}
    kind = rng.choices([*kinds, "call"], [*kinds.values(), 1 - sum(kinds.values())])[0]
    if kind == "series":
        return _series(sampler), None
    if kind == "chained":
        scene = sampler.chain()
        return (sampler.served(scene, sampler.said(scene.request.text)), scene.meta(kind)), None
    scene = sampler.scene(fits=kind != "unfitting")
    user = sampler.said(scene.request.text)
    if kind == "call":
        return ([scene.system(rng), user, call_message(scene.calls()[0])], scene.meta(kind)), None
    if kind == "multi_turn":
        return (sampler.served(scene, user), scene.meta(kind)), None
    if kind == "small_talk":
        further = mix.wordings and rng.random() < mix.wordings
        said, reply = rng.choice(synthetic.small_talk() if further else SMALL_TALK)
        messages = [scene.system(rng), message("user", said), message("assistant", reply)]
        return (messages, scene.meta("chat") | {"asked": "chat"}), None
    if kind == "no_tools":
        system, reply = message("system", neutral_system(rng)), rng.choice(NO_TOOLS)
        meta = scene.meta("absent") | {"tools_present": False, "tools": []}
        return ([system, user, message("assistant", reply)], meta), None
    answer = message("assistant", rng.choice(NO_FUNCTION))
    fitting = replace(scene, offered=[scene.request.tool, *scene.offered[1:]])
    twin = [fitting.system(rng), user, call_message(fitting.calls()[0])], fitting.meta("call")
    return ([scene.system(rng), user, answer], scene.meta("unsuitable")), twin


def _series(sampler: Sampler) -> Drawn:
    """One list, and a request for each of its tools in turn, in any order; among them, requests for none of them. Only
    the list says which name goes with a request, and each answer is another name: the densest lesson in reading."""
    rng, mix = sampler.rng, sampler.mix
    tools = sampler.tools(rng.randint(3, 5))
    missing = tools.pop()
    names = sampler.draw_names([*tools, missing])
    order = rng.sample(tools, len(tools)) + ([missing] if rng.random() < mix.unserved else [])
    scene = Scene(Request(order[0], {}, ""), tools, names)
    messages = [scene.system(rng)]
    for tool in rng.sample(order, len(order)):
        arguments = tool.sample(rng, sampler.split, mix.varied_values)
        messages.append(sampler.said(sampler.ask(tool, arguments)))
        none = message("assistant", rng.choice(NO_FUNCTION))
        messages.append(none if tool is missing else call_message(names.call(tool, arguments)))
    return messages, scene.meta("series") | {"level": 0}
