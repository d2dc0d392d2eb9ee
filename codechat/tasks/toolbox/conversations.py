"""Requests, dialogues, problems and behaviour probes generated from the tools.

Each (purpose, split, seed) has its own generator, so a shorter list is the start of a longer one. A prompt offers the
gold tool and up to three others that could not serve the request. Negatives teach when not to call: the fitting tool is
missing, there are no tools, or the user only chats.

Left out: code questions with tools present (they need real functions; `tools_system` and `neutral_system` give their
system prompts), and requests for two calls at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from codechat.core.errors import ConfigError
from codechat.tasks.base import Message, Problem, check_levels, check_split
from codechat.tasks.toolbox.catalogue import execute, family, respond, tools_of
from codechat.tasks.toolbox.tool import LEVELS, Tool
from codechat.text import chat

MAX_DISTRACTORS = 3
SECOND_REQUEST_SHARE = 0.3
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
# Kinds of negatives. Repetition sets the share of a kind.
NEGATIVES = ("unsuitable", "unsuitable", "absent", "absent", "chat")
# What a probe asks for, and the tools on offer: with the fitting one, only others, none.
CELLS = (("tool", "tools"), ("tool", "other"), ("tool", "none"), ("code", "tools"), ("code", "none"))


@dataclass(frozen=True)
class Request:
    """A tool, its arguments and the request in words. hard: the part that training never sees ("tool" or "phrasing"),
    or None."""

    tool: Tool
    arguments: dict[str, Any]
    text: str
    hard: str | None


def dialogues(
    split: str,
    n: int,
    seed: int = 0,
    *,
    multi_turn_share: float = 0.25,
    negatives_share: float = 0.15,
    levels: Sequence[int] = LEVELS,
    edition: int = 1,
) -> Iterator[dict[str, Any]]:
    """n rows {"id", "messages", "domain", "meta"}. A repeated level is sampled more often.

    meta: tools_present, asked ("tool" or "chat"), tools (names on offer), level (0 for negatives), hard, and kind
    ("call", "multi_turn" or one of NEGATIVES). ConfigError for an unknown split, level or edition."""
    rng = generator("dialogues", split, seed, levels)
    for i in range(n):
        draw = rng.random()
        if draw < negatives_share:
            messages, meta = _negative(rng, split, levels, edition)
        elif draw < negatives_share + multi_turn_share * (1 - negatives_share):
            messages, meta = _multi_turn(rng, split, levels, edition)
        else:
            request, offered, messages = _positive(rng, split, levels, edition)
            messages.append(_call(request))
            meta = _meta(offered, request, "call")
        yield {"id": f"toolbox-{split}-{seed}-{i}", "messages": messages, "domain": "calls", "meta": meta}


def problems(
    split: str,
    n: int,
    seed: int = 0,
    *,
    levels: Sequence[int] = LEVELS,
    negatives_share: float = 0.0,
    edition: int = 1,
) -> list[Problem]:
    """n single requests. gold: {"name", "arguments"}, or None where no call is correct."""
    rng = generator("problems", split, seed, levels)
    made = []
    for i in range(n):
        if rng.random() < negatives_share:
            messages, meta = _negative(rng, split, levels, edition)
            gold = None
            messages = messages[:-1]
        else:
            request, offered, messages = _positive(rng, split, levels, edition)
            gold = {"name": request.tool.name, "arguments": request.arguments}
            meta = _meta(offered, request, "call")
        made.append(Problem(f"toolbox-{split}-{seed}-p{i}", messages, gold, split, meta))
    return made


def probes(split: str, n: int, seed: int, code_requests: Sequence[str], edition: int = 1) -> list[dict[str, Any]]:
    """n prompts {"messages", "asked": "tool" | "code", "tools_present": bool, "suitable": bool}, the cells of CELLS in
    turn. A call is correct only where the fitting tool is on offer."""
    rng = generator("probes", split, seed, LEVELS)
    if n and not code_requests:
        raise ConfigError("probes got 0 code requests; at least one is required; pass some")
    rows = []
    for i in range(n):
        asked, tools = CELLS[i % len(CELLS)]
        request, offered, messages = _positive(rng, split, LEVELS, edition)
        if asked == "code":
            messages[1] = message("user", rng.choice(code_requests))
            offered = rng.sample(pool(split == "test_hard", edition=edition), rng.randint(1, 1 + MAX_DISTRACTORS))
        elif tools == "other":
            offered = others(rng, split, [request.tool], rng.randint(1, MAX_DISTRACTORS), edition)
        messages[0] = message("system", neutral_system(rng) if tools == "none" else _offer(offered))
        rows.append(
            {
                "messages": messages,
                "asked": asked,
                "tools_present": tools != "none",
                "suitable": (asked, tools) == ("tool", "tools"),
            }
        )
    return rows


def tools_system(
    rng: random.Random, k: int | None = None, split: str = "train", edition: int = 1, style: str = "compact"
) -> str:
    """A system prompt that offers k tools of the split. Default: 1 to 4 tools. style: of `chat.tools_prompt`."""
    known = pool(split == "test_hard", edition=edition)
    return _offer(rng.sample(known, k or rng.randint(1, 1 + MAX_DISTRACTORS)), style)


def neutral_system(rng: random.Random) -> str:
    """A short system prompt without tools."""
    return rng.choice(NEUTRAL)


def generator(purpose: str, split: str, seed: int, levels: Sequence[int]) -> random.Random:
    check_split(split)
    check_levels(levels, LEVELS)
    return random.Random(f"{purpose} {split} {seed}")


@lru_cache
def pool(hard: bool, level: int | None = None, held_out: bool = False, edition: int = 1) -> tuple[Tool, ...]:
    """Tools of a level. hard: held-out tools too. held_out: held-out tools alone."""
    tools = tools_of(edition, True if held_out else None if hard else False)
    return tuple(t for t in tools if level in (None, t.level))


def draw_request(
    rng: random.Random,
    split: str,
    levels: Sequence[int],
    edition: int,
    among: Sequence[Tool] | None = None,
    hard: str | None = None,
    varied: float = 0.0,
) -> Request:
    """A request for one of the tools `among` (default: of the split's).

    hard: "tool" needs a held-out tool, "phrasing" asks for a known one in new words; default in test_hard: either.
    varied: share of its words and names from further afield (`values.Slot`)."""
    level = rng.choice(levels)
    if split == "test_hard" and hard is None:
        hard = rng.choice(("tool", "phrasing"))
    tool = rng.choice(among or pool(False, level, hard == "tool", edition))
    arguments = tool.sample(rng, split, varied)
    return Request(tool, arguments, tool.ask(rng, arguments, hard == "phrasing"), hard)


def _positive(
    rng: random.Random, split: str, levels: Sequence[int], edition: int
) -> tuple[Request, list[Tool], list[Message]]:
    """A request, the tools on offer, and the prompt."""
    request = draw_request(rng, split, levels, edition)
    offered = [request.tool, *others(rng, split, [request.tool], rng.randint(0, MAX_DISTRACTORS), edition)]
    rng.shuffle(offered)
    return request, offered, [message("system", _offer(offered)), message("user", request.text)]


def others(rng: random.Random, split: str, tools: Sequence[Tool], k: int, edition: int) -> list[Tool]:
    """k tools that could not serve a request for any of `tools`, nor for one another."""
    taken, found = set().union(*(family(t.name) for t in tools)), []
    while len(found) < k:
        other = rng.choice(pool(split == "test_hard", edition=edition))
        if other.name not in taken:
            found.append(other)
            taken |= family(other.name)
    return found


def _multi_turn(
    rng: random.Random, split: str, levels: Sequence[int], edition: int
) -> tuple[list[Message], dict[str, Any]]:
    """Request, call, response, answer; sometimes a second request for a tool on offer."""
    request, offered, messages = _positive(rng, split, levels, edition)
    meta = _meta(offered, request, "multi_turn")
    messages += _served(request)
    if rng.random() < SECOND_REQUEST_SHARE:
        among = offered if split != "test_hard" else [request.tool]
        second = draw_request(rng, split, levels, edition, among)
        messages += [message("user", second.text), *_served(second)]
    return messages, meta


def _negative(
    rng: random.Random, split: str, levels: Sequence[int], edition: int
) -> tuple[list[Message], dict[str, Any]]:
    """A conversation in which no call is correct."""
    kind, offered = rng.choice(NEGATIVES), []
    request = draw_request(rng, split, levels, edition)
    text, answer = request.text, rng.choice(NO_FUNCTION)
    if kind == "absent":
        system, answer = neutral_system(rng), rng.choice(NO_TOOLS)
    else:
        offered = others(rng, split, [request.tool], rng.randint(1, MAX_DISTRACTORS), edition)
        system = _offer(offered)
    if kind == "chat":
        text, answer = rng.choice(SMALL_TALK)
    messages = [message("system", system), message("user", text), message("assistant", answer)]
    meta = {
        "tools_present": bool(offered),
        "asked": "chat" if kind == "chat" else "tool",
        "tools": [t.name for t in offered],
        "level": 0,
        "hard": request.hard,
        "kind": kind,
    }
    return messages, meta


def _served(request: Request) -> list[Message]:
    """The call, the tool's response, and the answer."""
    name, arguments = request.tool.name, request.arguments
    result = execute(name, arguments)["result"]
    return [
        _call(request),
        message("function", respond(name, arguments)),
        message("assistant", request.tool.report(arguments, result)),
    ]


def _call(request: Request) -> Message:
    return message("assistant", chat.format_call(request.tool.name, request.arguments))


def _offer(tools: Sequence[Tool], style: str = "compact") -> str:
    return chat.tools_prompt([t.schema for t in tools], style)


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _meta(offered: Sequence[Tool], request: Request, kind: str) -> dict[str, Any]:
    return {
        "tools_present": True,
        "asked": "tool",
        "tools": [t.name for t in offered],
        "level": request.tool.level,
        "hard": request.hard,
        "kind": kind,
        "tool": request.tool.name,
    }
