"""Problems and behaviour probes of the toolbox, each drawn by its number.

Problems have a stratum in `meta["stratum"]`, by which evaluations group scores:

    call       a trained tool; its values of open domains are of this split (`values`)
    unfitting  the request of a call problem (its twin), whose tool is replaced by others: no call is correct
    no_tools   a request without any list: no call is correct
    code       a request for Python code, with or without tools: no call is correct
    chain_1    the first call of a request that needs two
    chain_2    the second, after the first and its response
    tool       test_hard: a tool that training never has
    phrasing   test_hard: a trained tool, in words that training never has
    renamed    test_hard: the request of a call problem of `test`, whose tools have other names"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

from codechat.core.errors import check_choice
from codechat.tasks.base import Message, Problem
from codechat_lab.tasks.toolbox.catalogue import draw_others
from codechat_lab.tasks.toolbox.mixes import Mix
from codechat_lab.tasks.toolbox.sampler import (
    MAX_TOOLS,
    Sampler,
    Scene,
    message,
    neutral_system,
    tools_system,
)

SHARES = {  # of the problems of a split
    "train": {"call": 0.55, "unfitting": 0.2, "no_tools": 0.05, "code": 0.1, "chain": 0.1},
    "select": {"call": 0.4, "unfitting": 0.2, "no_tools": 0.1, "code": 0.1, "chain": 0.2},
    "test": {"call": 0.4, "unfitting": 0.2, "no_tools": 0.1, "code": 0.1, "chain": 0.2},
    "test_hard": {"tool": 0.4, "phrasing": 0.3, "renamed": 0.3},
}
STRATA = ("call", "unfitting", "no_tools", "code", "chain", "tool", "phrasing", "renamed")
MIXED = ("call", "unfitting", "chain")  # strata that have the new tools and names of a mix
# Cells of the probes: what is asked for, and the tools on offer: with the fitting one, only
# others, none.
CELLS = (
    ("tool", "tools"),
    ("tool", "other"),
    ("tool", "none"),
    ("code", "tools"),
    ("code", "none"),
)


class Drawn(NamedTuple):
    stratum: str
    messages: list[Message]
    gold: dict[str, Any] | None  # the correct call; None where no call is correct
    meta: dict[str, Any]


@dataclass(frozen=True)
class _Draws:
    """Draws the problems of a split, a stratum and a seed by their numbers."""

    split: str
    seed: int
    mix: Mix
    code_requests: Sequence[str]

    def numbered(self, stratum: str, number: int) -> list[Drawn]:
        """The problems of a number: two of a chain, else one. "unfitting" and "renamed" draw
        the request of "call"."""
        purpose = "call" if stratum in ("unfitting", "renamed") else stratum
        origin = "test" if stratum == "renamed" else self.split
        rng = random.Random(f"{purpose} {number} {origin} {self.seed}")
        sampler = Sampler(rng, origin, self.mix if stratum in MIXED else Mix())
        if stratum == "no_tools":
            return [_without_tools(sampler)]
        if stratum == "code":
            return [self._code(rng, number)]
        if stratum == "chain":
            return _chain(sampler, number)
        return [self._one_request(stratum, sampler)]

    def _code(self, rng: random.Random, number: int) -> Drawn:
        """Half of the requests for code come with tools."""
        present = number % 2 == 0
        system = message(
            "system", tools_system(rng, self.split) if present else neutral_system(rng)
        )
        messages = [system, message("user", self.code_requests[number % len(self.code_requests)])]
        return Drawn(
            "code", messages, None, {"tools_present": present, "asked": "code", "kind": "code"}
        )

    def _one_request(self, stratum: str, sampler: Sampler) -> Drawn:
        scene = (
            _hard_scene(sampler, stratum) if stratum in ("tool", "phrasing") else sampler.scene()
        )
        if stratum == "unfitting":
            scene = _without_its_tool(sampler, scene)
        if stratum == "renamed":
            scene = replace(sampler, split=self.split).renamed(scene, every=True)
        messages = [scene.system(sampler.rng), message("user", scene.requests[0].text)]
        if stratum == "unfitting":
            return Drawn(stratum, messages, None, scene.meta("unsuitable"))
        return Drawn(stratum, messages, scene.calls()[0], scene.meta("call"))


def _without_tools(sampler: Sampler) -> Drawn:
    request = sampler.request()
    messages = [message("system", neutral_system(sampler.rng)), message("user", request.text)]
    meta = {"tools_present": False, "asked": "tool", "tools": [], "kind": "absent"}
    return Drawn("no_tools", messages, None, meta)


def _chain(sampler: Sampler, number: int) -> list[Drawn]:
    """A problem for each call of one request; the second has the first call and its response in
    the prompt."""
    scene = sampler.chain()
    messages = sampler.served(scene, sampler.said(scene.requests[0].text))
    meta = scene.meta("chained") | {"chain": number}
    golds = scene.calls()
    return [
        Drawn(f"chain_{at + 1}", messages[: 2 + 2 * at], gold, dict(meta))
        for at, gold in enumerate(golds)
    ]


def _hard_scene(sampler: Sampler, stratum: str) -> Scene:
    request = sampler.request(stratum)
    others = draw_others(
        sampler.rng, sampler.split, [request.tool], sampler.rng.randint(0, MAX_TOOLS - 1)
    )
    return Scene([request], [request.tool, *others])


def _without_its_tool(sampler: Sampler, scene: Scene) -> Scene:
    """The scene with another tool in place of the requested one."""
    tool, *rest = scene.offered
    known = {t.description for t in rest}  # under any name
    others = draw_others(sampler.rng, sampler.split, [tool], MAX_TOOLS)
    other = next(t for t in others if t.description not in known)
    return replace(scene, offered=[other, *rest])


def draw(
    split: str,
    n: int,
    seed: int = 0,
    *,
    shares: Mapping[str, float] | None = None,
    mix: Mix = Mix(),
    code_requests: Sequence[str] = (),
) -> list[Problem]:
    """Exactly n problems, those of a stratum together; the problems of a smaller n are among
    them. gold: {"name", "arguments"}, or None if no call is correct.

    shares: stratum -> share, by default `SHARES` of the split, without "code" where there are
    no `code_requests`; "chain" gives chain_1 and chain_2 in turn. mix: renamed, composed and
    invented tools of the strata call, unfitting and chain. ConfigError for an unknown
    stratum."""
    shares = shares or {
        k: share for k, share in SHARES[split].items() if k != "code" or code_requests
    }
    for stratum in shares:
        check_choice("stratum", stratum, STRATA)
    draws = _Draws(split, seed, mix, code_requests)
    problems = []
    for stratum, rows in counts_of(shares, n).items():
        numbered = ((number, one) for number in count() for one in draws.numbered(stratum, number))
        for number, one in islice(numbered, rows):
            id = f"reading-{split}-{seed}-{one.stratum}-{number}"
            problems.append(
                Problem(id, one.messages, one.gold, split, one.meta | {"stratum": one.stratum})
            )
    return problems


def counts_of(shares: Mapping[str, float], n: int) -> dict[str, int]:
    """Problems of each stratum, n together. Each problem in turn goes where most are missing,
    so no count falls as n grows."""
    counts = dict.fromkeys(shares, 0)
    total = sum(shares.values())
    for drawn in range(1, n + 1):
        missing = {
            stratum: share / total * drawn - counts[stratum] for stratum, share in shares.items()
        }
        counts[max(missing, key=missing.__getitem__)] += 1
    return counts


def training_shares(mix: Mix) -> dict[str, float]:
    """Shares of the training problems, of the strata that conversations of the mix have: only
    calls if the mix never declines, chains if it has some."""
    declines = mix.unfitting + mix.no_tools + mix.small_talk > 0
    kept = dict.fromkeys(SHARES["train"], declines) | {"call": True, "chain": mix.chained > 0}
    return {stratum: share for stratum, share in SHARES["train"].items() if kept[stratum]}


def probes(split: str, n: int, seed: int, code_requests: Sequence[str]) -> list[dict[str, Any]]:
    """n prompts {"messages", "asked": "tool" | "code", "tools_present": bool, "suitable":
    bool}, the cells of CELLS in turn. A call is correct only if the fitting tool is on offer.
    code_requests: at least one."""
    sampler = Sampler(random.Random(f"probes {split} {seed}"), split)
    rows = []
    for i in range(n):
        asked, tools = CELLS[i % len(CELLS)]
        scene = sampler.scene(fits=tools == "tools" and asked == "tool")
        text = scene.requests[0].text if asked == "tool" else sampler.rng.choice(code_requests)
        system = (
            message("system", neutral_system(sampler.rng))
            if tools == "none"
            else scene.system(sampler.rng)
        )
        rows.append(
            {
                "messages": [system, message("user", text)],
                "asked": asked,
                "tools_present": tools != "none",
                "suitable": (asked, tools) == ("tool", "tools"),
            }
        )
    return rows
