"""Generated problems of five levels, each with its own world and an expert's solution, and the experts' trajectories.

    1  one call; the request holds all its arguments
    2  look up, then act or answer
    3  across apps: what one app shows is needed in another
    4  with distractors: twins, small talk, more tools
    5  impossible: must be declined

gold: "world", the rows at the start; "calls", the expert's; "changes", what they changed. An episode and its score need
nothing else, so a file of problems does not depend on this generator.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.sources import digest
from codechat.tasks.apps import requests, tools
from codechat.tasks.apps.environment import AppsEnvironment
from codechat.tasks.apps.store import Store
from codechat.tasks.apps.tools import CLOSING, TOOLS
from codechat.tasks.apps.world import World
from codechat.tasks.base import Message, Problem, check_levels, check_split
from codechat.text import chat

LEVELS = (1, 2, 3, 4, 5)
SIZES = {1: 3, 2: 3, 3: 4, 4: 6, 5: 4}  # rows of a table
OFFERED = {1: 2, 2: 2, 3: 3, 4: 8, 5: 2}  # tools beside those that are needed
EASY = ("mail", "calendar", "contacts", "notes", "shop")  # apps that levels 1 and 2 can be limited to
DONE = "Done."
DOMAIN = "episodes"


def problems(
    split: str,
    n: int,
    seed: int = 0,
    levels: Sequence[int] = LEVELS,
    only: Collection[str] = (),
    part: str = "",
) -> list[Problem]:
    """n different problems, the levels in turn; a repeated level is sampled more often. only: the apps that levels 1
    and 2 use. part: names another set of the same split.

    ConfigError for an unknown split, level or app."""
    check_split(split)
    check_levels(levels, LEVELS)
    if set(only) - set(EASY):
        raise ConfigError(f"apps {list(only)}; required: some of {', '.join(EASY)}")
    if only and max(levels) > 2:
        raise ConfigError(
            f"levels {list(levels)} in {', '.join(only)}; levels above 2 need all apps; set levels 1 and 2, or no apps"
        )
    rng, store = random.Random(f"apps {split} {part} {seed}"), Store()
    problems_by_id: dict[str, Problem] = {}
    while len(problems_by_id) < n:
        problem = make(levels[len(problems_by_id) % len(levels)], split, rng, store, only)
        problems_by_id.setdefault(problem.id, problem)
    store.close()
    return list(problems_by_id.values())


def make(level: int, split: str, rng: random.Random, store: Store, only: Collection[str] = ()) -> Problem:
    """One problem with its expert's calls and changes. store: where the expert works."""
    world = World(rng, split, SIZES[level])
    draft = requests.draft(level, world, only)
    store.reset(world.tables)
    calls: list[dict[str, Any]] = []

    def call(tool: str, arguments: dict[str, Any]) -> Any:
        calls.append({"name": tool, "arguments": arguments})
        return tools.call(store, tool, arguments)

    draft.expert(call)
    closed = {*draft.tools, *CLOSING}
    others = [name for name, tool in TOOLS.items() if name not in closed and (not only or tool.app in only)]
    offered = [*draft.tools, *rng.sample(others, OFFERED[level])]
    rng.shuffle(offered)
    offered += CLOSING
    system = chat.tools_prompt([TOOLS[name].schema for name in offered])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": draft.request}]
    gold = {"world": world.tables, "calls": calls, "changes": store.diff()}
    number = digest(f"{draft.request}{world.tables}")[:12]
    return Problem(f"apps-{level}-{number}", messages, gold, split, {"level": level, "tools": offered})


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


def dialogues(
    split: str, n: int, seed: int = 0, levels: Sequence[int] = LEVELS, only: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """n conversations {"id", "messages", "domain", "meta"} of experts. `problems` does not give their problems for
    training."""
    world = AppsEnvironment()
    for problem in problems(split, n, seed, levels, only, part="expert" if split == "train" else ""):
        meta = {"split": split, "asked": "tool", "tools_present": True, "level": problem.meta["level"]}
        yield {"id": f"{DOMAIN}-{problem.id}", "messages": trajectory(problem, world), "domain": DOMAIN, "meta": meta}
