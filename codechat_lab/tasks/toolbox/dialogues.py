"""Conversations that call tools, of every kind of a mix: unfitting lists (each with a twin that
fits), series, calls with their results. A conversation of a split and seed is the same however
many are drawn."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from codechat.tasks.base import Message
from codechat.text import tool_calls
from codechat_lab.tasks.toolbox import forms, surroundings, turns
from codechat_lab.tasks.toolbox.catalogue import PHRASES, WORDINGS, Tool, draw_others, tools_of
from codechat_lab.tasks.toolbox.mixes import KINDS, Mix
from codechat_lab.tasks.toolbox.sampler import (
    LEVELS,
    MAX_TOOLS,
    Request,
    Sampler,
    Scene,
    call_message,
    message,
    neutral_system,
)

STEPS_UNSERVED = 0.75  # of the share of steps: so many unfitting requests are for several things
Drawn = tuple[list[Message], dict[str, Any]]  # messages and meta


def draw(split: str, n: int, seed: int = 0, mix: Mix = Mix()) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain": "calls", "meta"}. meta: tools_present, asked ("tool"
    or "chat"), tools (names on offer), level, hard, kind, tool, renamed. An unfitting
    conversation is followed by its twin: the same request with a list that fits."""
    sampler = Sampler(random.Random(f"reading {split} {seed}"), split, mix)
    for i, (messages, meta) in enumerate(islice(_drawn(sampler), n)):
        talk = not _for_tools(meta)
        if not talk and sampler.happens(mix.talk_first):
            messages[1:1] = sampler.small_talk()
            talk = True
        if meta["tools_present"] and sampler.happens(mix.instructed):
            listed = messages[0]["content"]
            text = surroundings.instructed(sampler.rng, split, listed, talk)
            messages[0] = message("system", text)
        yield {
            "id": f"reading-{split}-{seed}-{i}",
            "messages": messages,
            "domain": "calls",
            "meta": meta,
        }


def _drawn(sampler: Sampler) -> Iterator[Drawn]:
    while True:
        some = _conversations(sampler)
        yield from _surrounded(sampler, some)


def _for_tools(meta: dict[str, Any]) -> bool:
    return bool(meta["asked"] == "tool" and meta["tools_present"])


def _surrounded(sampler: Sampler, drawn: list[Drawn]) -> list[Drawn]:
    """A conversation, and its twin if any, in a share of the draws with a wordy request, which is
    the same in both: only the list of tools tells them apart."""
    messages, meta = drawn[0]
    if _for_tools(meta) and sampler.happens(sampler.mix.wordy):
        text = surroundings.wordy(sampler.rng, sampler.split, messages[1]["content"])
        for messages, _ in drawn:
            messages[1] = message("user", text)
    return drawn


def _conversations(sampler: Sampler) -> list[Drawn]:
    """A conversation of a kind drawn by the mix, and the twin of an unfitting one."""
    rng = sampler.rng
    shares = [getattr(sampler.mix, kind) for kind in KINDS]
    kind = rng.choices([*KINDS, "call"], [*shares, 1 - sum(shares)])[0]
    if kind == "series":
        return [_series(sampler)]
    if kind == "forms":
        return forms.conversations(rng, sampler.split, sampler.mix.in_steps)
    if kind == "turns":
        return [turns.conversation(sampler)]
    if kind == "unfitting" and sampler.happens(sampler.mix.in_steps * STEPS_UNSERVED):
        return _steps_declined_and_twin(sampler)
    if kind == "chained":
        scene = sampler.chain()
    elif kind == "parallel":
        scene = sampler.together()
    else:
        scene = sampler.scene(fits=kind != "unfitting")
    user = sampler.said(scene.requests[0].text)
    if kind in ("chained", "multi_turn"):
        return [(sampler.served(scene, user), scene.meta(kind))]
    if kind == "parallel":
        return [_at_once(rng, scene, user)]
    if kind == "call":
        return [_single(rng, scene, user)]
    if kind == "small_talk":
        return [
            ([scene.system(rng), *sampler.small_talk()], scene.meta("chat") | {"asked": "chat"})
        ]
    if kind == "no_tools":
        messages = [
            message("system", neutral_system(rng)),
            user,
            message("assistant", rng.choice(PHRASES["no_tools"])),
        ]
        return [(messages, scene.meta("absent") | {"tools_present": False, "tools": []})]
    return _declined_and_twin(rng, scene, user)


def _steps_declined_and_twin(sampler: Sampler) -> list[Drawn]:
    """Requests in steps, for tools that are not on the list; then the same with a list that has
    them."""
    rng = sampler.rng
    requests = sampler.several(rng.randint(2, 3))
    named = {}
    texts = []
    for request in requests:
        named[request.tool.name] = request.tool
        texts.append(request.text)
    tools = list(named.values())
    others = draw_others(rng, sampler.split, tools, rng.randint(1, MAX_TOOLS - 1))
    scene = sampler.named(requests, [*tools, *others])
    user = message("user", surroundings.in_steps(rng, texts))
    unserved = replace(scene, offered=scene.offered[len(tools) :])
    declined = [
        unserved.system(rng),
        user,
        message("assistant", rng.choice(PHRASES["no_function"])),
    ]
    return [
        (declined, unserved.meta("unsuitable")),
        _at_once(rng, scene, user),
    ]


def _at_once(rng: random.Random, scene: Scene, user: Message) -> Drawn:
    """A request for several things, and its calls."""
    calls = []
    for call in scene.calls():
        calls.append(tool_calls.format_call(**call))
    messages = [
        scene.system(rng),
        user,
        message("assistant", "\n".join(calls)),
    ]
    return messages, scene.meta("parallel")


def _single(rng: random.Random, scene: Scene, user: Message) -> Drawn:
    return [scene.system(rng), user, call_message(scene.calls()[0])], scene.meta("call")


def _declined_and_twin(rng: random.Random, scene: Scene, user: Message) -> list[Drawn]:
    answer = message("assistant", rng.choice(PHRASES["no_function"]))
    fitting = replace(scene, offered=[scene.requests[0].tool, *scene.offered[1:]])
    twin = _single(rng, fitting, user)
    return [([scene.system(rng), user, answer], scene.meta("unsuitable")), twin]


def _series(sampler: Sampler) -> Drawn:
    """One list, and a request for each of its tools in any order, in a share of the series also
    one that no tool serves. The right tool can only be found by reading the list, once for each
    answer."""
    rng = sampler.rng
    mix = sampler.mix
    count = rng.randint(3, 5)
    new = sampler.new_tools(rng.random(), count)
    found = new or _unlike_tools(sampler, count)
    *tools, missing = sampler.new_names(found) if rng.random() < mix.renamed else found
    asked = rng.sample(tools, len(tools))
    if rng.random() < mix.unserved:
        asked.append(missing)
    scene = Scene([Request(asked[0], {}, "")], tools, any(t.alias for t in (*tools, missing)))
    messages = [scene.system(rng)]
    for tool in rng.sample(asked, len(asked)):
        arguments = tool.sample(rng, sampler.split, mix.varied_values)
        further = WORDINGS.get(tool.name, ()) if sampler.happens(mix.wordings) and not new else ()
        messages.append(sampler.said(tool.ask(rng, arguments, further)))
        declined = message("assistant", rng.choice(PHRASES["no_function"]))
        messages.append(declined if tool is missing else call_message(tool.written(arguments)))
    return messages, scene.meta("series") | {"level": 0}


def _unlike_tools(sampler: Sampler, count: int) -> list[Tool]:
    """Tools of the catalogue, none of which could serve a request for another."""
    first = sampler.rng.choice(tools_of("train", sampler.rng.choice(LEVELS)))
    return [first, *draw_others(sampler.rng, sampler.split, [first], count - 1)]
