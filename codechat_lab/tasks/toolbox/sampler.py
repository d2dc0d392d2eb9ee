"""Draws requests, the lists on offer and the names in them.

With the default `Mix` each tool has its one name. The other shares make reading the list
necessary: tools and arguments with other names, composed and invented tools, requests for two
calls, the second with the first one's result, or for several at once."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from codechat.tasks.base import Message
from codechat.text import tool_calls, tool_lists
from codechat_lab.data import synthetic
from codechat_lab.tasks.toolbox import catalogue, surroundings
from codechat_lab.tasks.toolbox.catalogue import (
    HELD_OUT,
    PHRASES,
    SEEN,
    WORDINGS,
    Tool,
    ToolError,
    draw_others,
    family,
    response,
    say,
    tools_of,
)
from codechat_lab.tasks.toolbox.mixes import Mix
from codechat_lab.tasks.toolbox.values import COMMON, allowed, draw_word, invent

LEVELS = (1, 1, 1, 2, 3)  # requests for easy tools are three times as frequent
MAX_TOOLS = 4  # on offer
RENAMED_TOOLS = 0.7  # share of the tools of a renamed conversation that have another name


@dataclass(frozen=True)
class Request:
    """A tool, its arguments and the request in words. hard: the part that training never sees
    ("tool" or "phrasing"), or None."""

    tool: Tool
    arguments: dict[str, Any]
    text: str
    hard: str | None = None


@dataclass(frozen=True)
class Scene:
    """requests: the second takes the first one's result. offered: the fitting tools first.
    renamed: some tool has another name."""

    requests: Sequence[Request]
    offered: list[Tool]
    renamed: bool = False

    def system(self, rng: random.Random) -> Message:
        order = rng.sample(self.offered, len(self.offered))
        return message("system", tool_lists.tools_prompt([tool.schema for tool in order]))

    def calls(self) -> list[dict[str, Any]]:
        return [r.tool.written(r.arguments) for r in self.requests]

    def meta(self, kind: str) -> dict[str, Any]:
        first = self.requests[0]
        return {
            "tools_present": bool(self.offered),
            "asked": "tool",
            "tools": [tool.schema["name"] for tool in self.offered],
            "level": first.tool.level,
            "kind": kind,
            "hard": first.hard,
            "tool": first.tool.name,
            "renamed": self.renamed,
        }


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def call_message(call: Mapping[str, Any]) -> Message:
    return message("assistant", tool_calls.format_call(**call))


def neutral_system(rng: random.Random) -> str:
    """A short system prompt without tools."""
    return rng.choice(PHRASES["neutral_system"])


def tools_system(rng: random.Random, split: str = "train", style: str = "compact") -> str:
    """A system prompt that offers 1 to 4 tools of the split. style: of `tool_lists.tools_prompt`."""
    tools = rng.sample(tools_of(split), rng.randint(1, MAX_TOOLS))
    return tool_lists.tools_prompt([t.schema for t in tools], style)


def informally(rng: random.Random, text: str) -> str:
    """The request without its capital or its full stop, with words before or after it. The rest
    stays as it is."""
    if text[:2].istitle():
        text = text[0].lower() + text[1:]
    if rng.random() < 0.7:
        text = text.rstrip(".?! ")
    if rng.random() < 0.6:
        text = rng.choice(PHRASES["openings"]) + rng.choice((", ", ": ", " ", " - ")) + text
    if rng.random() < 0.4:
        return text + rng.choice((" ", ", ")) + rng.choice(PHRASES["endings"])
    return f"{text}!!" if rng.random() < 0.1 else text


@dataclass(frozen=True)
class Sampler:
    """Draws requests, lists of tools and their names, of one split and mix."""

    rng: random.Random
    split: str
    mix: Mix = Mix()

    def happens(self, share: float) -> bool:
        """True in a share of the cases; a share of 0 draws nothing."""
        return share > 0 and self.rng.random() < share

    def asked(self, tool: Tool, asks: Sequence[str] = (), hard: str | None = None) -> Request:
        """A request for a tool, by a template of `asks`, else of the tool."""
        arguments = tool.sample(self.rng, self.split, self.mix.varied_values)
        return Request(tool, arguments, tool.ask(self.rng, arguments, asks), hard)

    def request(self, hard: str | None = None) -> Request:
        """A request for a tool of the catalogue. hard: "tool" for a held-out one, "phrasing"
        for a trained one in words of test_hard."""
        level = self.rng.choice(LEVELS)
        tools = (
            [t for t in HELD_OUT if t.level == level]
            if hard == "tool"
            else tools_of("train", level)
        )
        tool = self.rng.choice(tools)
        return self.asked(tool, tool.hard_asks if hard == "phrasing" else (), hard)

    def new_tools(self, draw: float, k: int) -> list[Tool]:
        """k invented tools, composed ones or services, as a draw of 0 to 1 falls among their
        shares; else none."""
        kind = self.mix.kind_of_tools(draw)
        if kind == "invented":
            return list(
                catalogue.invented_offer(self.rng, self.split, k, self.mix.rare_words).values()
            )
        if kind == "composed":
            return self.rng.sample(catalogue.composed(), k)
        if kind == "services":
            services = self.rng.sample(catalogue.services_of(self.split), k)
            return [replace(tool, answers=[self.rng.choice(tool.answers)]) for tool in services]
        return []

    def scene(self, *, fits: bool = True) -> Scene:
        """A request with 1 to 4 tools. fits: the requested tool is among them."""
        draw = self.rng.random()
        fewest = 1 if fits else 2  # with the requested one
        if self.mix.kind_of_tools(draw):
            request, others = self._for_new_tool(draw, fewest)
        else:
            request, others = self._for_known_tool(fewest)
        return self.named([request], [request.tool, *others] if fits else others)

    def _for_new_tool(self, draw: float, fewest: int) -> tuple[Request, list[Tool]]:
        """A request, and the other tools on offer: of the same kind, but for half of the
        services."""
        rng = self.rng
        kind = self.mix.kind_of_tools(draw)
        tool, *others = self.new_tools(draw, rng.randint(fewest, MAX_TOOLS))
        if kind == "invented" and self.happens(self.mix.plain_answers):
            answers = [rng.choice(PHRASES["plain_answers"])]
            results = rng.choice(catalogue.RESULTS)  # drawn as a service's are
            tool = replace(tool, answers=answers, run=partial(catalogue.drawn_result, results))
        if kind == "services" and rng.random() < 0.5:
            others = draw_others(rng, self.split, [], len(others))
        return self.asked(tool), others

    def _for_known_tool(self, fewest: int) -> tuple[Request, list[Tool]]:
        request = self.request()
        if self.happens(self.mix.wordings):
            further = WORDINGS.get(request.tool.name, ())
            request = replace(request, text=request.tool.ask(self.rng, request.arguments, further))
        count = self.rng.randint(fewest, MAX_TOOLS) - 1
        return request, draw_others(self.rng, self.split, [request.tool], count)

    def named(self, requests: Sequence[Request], offered: list[Tool]) -> Scene:
        """The scene, in a share of the draws under other names."""
        scene = Scene(requests, offered)
        return self.renamed(scene) if self.rng.random() < self.mix.renamed else scene

    def renamed(self, scene: Scene, every: bool = False) -> Scene:
        """The scene under other names, of all its tools (`every`) or of some."""
        known = {t.name: t for t in (*scene.offered, scene.requests[0].tool)}
        new = dict(zip(known, self.new_names(list(known.values()), every)))
        requests = [replace(r, tool=new[r.tool.name]) for r in scene.requests]
        return Scene(
            requests, [new[t.name] for t in scene.offered], any(t.alias for t in new.values())
        )

    def new_names(self, tools: Sequence[Tool], every: bool = False) -> list[Tool]:
        """The tools, with other names of some of them (all: `every`) and of some of their
        arguments."""
        rng = self.rng
        new = list[Tool]()
        taken = {t.name for t in tools}
        for tool in tools:
            words = [
                w for w in tool.description.lower().split() if w.isalpha() and len(w) > 2
            ] or COMMON
            alias = self._new_name(words, taken) if every or rng.random() < RENAMED_TOOLS else ""
            taken.add(alias)
            new.append(replace(tool, alias=alias, keys=self._new_keys(tool)))
        return new

    def _new_keys(self, tool: Tool) -> dict[str, str]:
        """Other names of some arguments; none if two arguments would have one name."""
        renamed = (key for key in tool.slots if self.rng.random() < self.mix.renamed_arguments)
        keys = {key: draw_word(self.rng, self.mix.rare_words) for key in renamed}
        names = {keys.get(key, key) for key in tool.slots}
        return keys if len(names) == len(tool.slots) else {}

    def _new_name(self, description: Sequence[str], taken: set[str]) -> str:
        """Words of the description, one to three common words, or an invented word of this
        split."""
        rng = self.rng
        rare = self.mix.rare_words
        while True:
            draw = rng.random()
            if draw < 0.3:
                name = "_".join(rng.sample(description, min(len(description), rng.choice((1, 2)))))
            elif draw < 0.7:
                size = rng.choice((1, 1, 2, 2, 3))
                words = (
                    [draw_word(rng, rare) for _ in range(size)]
                    if rare
                    else rng.choices(COMMON, k=size)
                )
                name = "_".join(words)
            else:
                name = invent(rng)
            if name not in taken and allowed(name, self.split):
                return name

    def chain(self) -> Scene:
        """A request that needs two calls: the second tool takes the result of the first."""
        second = None
        while second is None:
            first = self.request()
            second = self.following(first.tool, first.tool.call(first.arguments))
        text = self.rng.choice(PHRASES["chain"]).format(first=first.text, second=second.text)
        both = [first.tool, second.tool]
        others = draw_others(self.rng, self.split, both, self.rng.randint(0, MAX_TOOLS - 2))
        return self.named([replace(first, text=text), second], [*both, *others])

    def together(self) -> Scene:
        """Two or three requests in one message: for one tool with other values, or for several
        tools."""
        requests: list[Request] = []
        while len(requests) < 2:
            first = self.request()
            more = self.rng.choice((1, 1, 2))
            if self.rng.random() < 0.5:
                tools = [first.tool] * more
            else:
                tools = draw_others(self.rng, self.split, [first.tool], more)
            requests = _unlike([first, *(self.asked(tool) for tool in tools)])
        text = self.joined([request.text for request in requests])
        asked = list({request.tool.name: request.tool for request in requests}.values())
        count = self.rng.randint(0, MAX_TOOLS - len(asked))
        others = draw_others(self.rng, self.split, asked, count)
        return self.named([replace(requests[0], text=text), *requests[1:]], [*asked, *others])

    def joined(self, texts: Sequence[str]) -> str:
        """Several requests as one message."""
        if len(texts) <= surroundings.MOST_STEPS and self.happens(self.mix.in_steps):
            return surroundings.in_steps(self.rng, texts)
        text = texts[0]
        for further in texts[1:]:
            text += self.rng.choice(PHRASES["together"]) + further
        return text

    def several(self, count: int, hard: str | None = None) -> list[Request]:
        """So many different requests, for one tool or each for another one. hard: of the first,
        as in `request`."""
        while True:
            first = self.request(hard)
            if self.rng.random() < 0.5:
                tools = [first.tool] * (count - 1)
            else:
                tools = draw_others(self.rng, self.split, [first.tool], count - 1)
            requests = _unlike([first, *(self.asked(tool) for tool in tools)])
            if len(requests) == count:
                return requests

    def following(
        self, first: Tool, result: Any, words: Sequence[str] = PHRASES["the_result"]
    ) -> Request | None:
        """A request for a tool that takes `result`, said in `words`, as an argument; None if the
        tool drawn does not."""
        rng = self.rng
        tool = rng.choice(SEEN)
        kind = {int: ("integer", "number"), float: ("number",), str: ("string",)}.get(
            type(result), ()
        )
        free = [
            k
            for k, slot in tool.slots.items()
            if slot.schema["type"] in kind and "enum" not in slot.schema
        ]
        if not free or tool.name in family(first.name):
            return None
        key = rng.choice(free)
        arguments = tool.sample(rng, self.split, self.mix.varied_values)
        arguments[key] = result
        try:
            tool.call(arguments)
        except ToolError:
            return None
        spoken = {k: tool.slots[k].say(rng, v) for k, v in arguments.items()}
        spoken[key] = rng.choice(words)
        return Request(tool, arguments, rng.choice(tool.asks).format(**spoken))

    def said(self, text: str) -> Message:
        """The user's message; informal in a share of the draws."""
        return message(
            "user", informally(self.rng, text) if self.happens(self.mix.informal) else text
        )

    def small_talk(self) -> list[Message]:
        """Words of the user that need no tool, and the reply."""
        talk = synthetic.SMALL_TALK if self.happens(self.mix.wordings) else PHRASES["small_talk"]
        said, reply = self.rng.choice(talk)
        return [message("user", said), message("assistant", reply)]

    def served(self, scene: Scene, user: Message) -> list[Message]:
        """The request, its calls with the tools' responses, and the answer: the tool's
        sentence, or one that only states the result. The latter is twice as frequent for a
        renamed tool, whose sentence a model could only guess."""
        messages = [scene.system(self.rng), user]
        for request, call in zip(scene.requests, scene.calls(), strict=True):
            result = request.tool.call(request.arguments)
            messages += [call_message(call), message("function", response(result))]
        answer = request.tool.report(request.arguments, result)
        if self.happens(
            self.mix.plain_answers if request.tool.alias else self.mix.plain_answers / 2
        ):
            answer = self.rng.choice(PHRASES["plain_answers"]).format(result=say(result))
        return [*messages, message("assistant", answer)]


def _unlike(requests: Sequence[Request]) -> list[Request]:
    """The requests without those that another one repeats."""
    unlike: list[Request] = []
    for request in requests:
        asked = [(other.tool.name, other.arguments) for other in unlike]
        if (request.tool.name, request.arguments) not in asked:
            unlike.append(request)
    return unlike
