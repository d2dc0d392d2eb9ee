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
    renamed    test_hard: the request of a call problem of `test`, whose tools have other names
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from codechat.core.errors import ConfigError
from codechat.tasks.base import Message, Problem, check_split
from codechat.tasks.toolbox.dialogues import (
    MAX_OTHERS,
    Mix,
    Sampler,
    Scene,
    message,
    neutral_system,
    tools_system,
)

SHARES = {  # of the problems of a split
    "train": dict(call=0.55, unfitting=0.2, no_tools=0.05, code=0.1, chain=0.1),
    "select": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test_hard": dict(tool=0.4, phrasing=0.3, renamed=0.3),
}
# What a probe asks for, and the tools on offer: with the fitting one, only others, none.
CELLS = (("tool", "tools"), ("tool", "other"), ("tool", "none"), ("code", "tools"), ("code", "none"))


@dataclass(frozen=True)
class Draw:
    """What decides a problem: its number in the split and seed, and what training problems may have."""

    split: str
    seed: int
    number: int
    mix: Mix = Mix()
    code_requests: Sequence[str] = ()

    def sampler(self, purpose: str) -> Sampler:
        return Sampler(random.Random(f"{purpose} {self.number} {self.split} {self.seed}"), self.split, self.mix)


# stratum, messages, gold call or None, meta
Drawn = Iterator[tuple[str, list[Message], dict[str, Any] | None, dict[str, Any]]]


def _single(stratum: str, rng: random.Random, scene: Scene, fits: bool = True) -> Drawn:
    messages = [scene.system(rng), message("user", scene.request.text)]
    yield stratum, messages, scene.calls()[0] if fits else None, scene.meta("call" if fits else "unsuitable")


def _call(draw: Draw) -> Drawn:
    sampler = draw.sampler("call")
    return _single("call", sampler.rng, sampler.scene())


def _unfitting(draw: Draw) -> Drawn:
    sampler = draw.sampler("call")
    scene = sampler.scene()
    tool, *rest = scene.offered
    other = next(t for t in sampler.others([tool], 4) if t not in rest)
    return _single("unfitting", sampler.rng, replace(scene, offered=[other, *rest]), fits=False)


def _renamed(draw: Draw) -> Drawn:
    sampler = replace(draw, split="test", mix=Mix()).sampler("call")
    scene = sampler.scene()
    names = replace(sampler, split=draw.split).new_names(scene.offered, every=True)
    return _single("renamed", sampler.rng, replace(scene, names=names))


def _hard(kind: str, draw: Draw) -> Drawn:
    sampler = replace(draw, mix=Mix()).sampler(kind)
    request = sampler.request(kind)
    others = sampler.others([request.tool], sampler.rng.randint(0, MAX_OTHERS))
    return _single(kind, sampler.rng, Scene(request, [request.tool, *others]))


def _no_tools(draw: Draw) -> Drawn:
    sampler = replace(draw, mix=Mix()).sampler("no_tools")
    request = sampler.request()
    messages = [message("system", neutral_system(sampler.rng)), message("user", request.text)]
    yield "no_tools", messages, None, {"tools_present": False, "asked": "tool", "tools": [], "kind": "absent"}


def _code(draw: Draw) -> Drawn:
    rng, present = draw.sampler("code").rng, draw.number % 2 == 0
    system = tools_system(rng, draw.split) if present else neutral_system(rng)
    request = draw.code_requests[draw.number % len(draw.code_requests)]
    messages = [message("system", system), message("user", request)]
    yield "code", messages, None, {"tools_present": present, "asked": "code", "kind": "code"}


def _chain(draw: Draw) -> Drawn:
    sampler = draw.sampler("chain")
    scene = sampler.chain()
    messages = sampler.served(scene, sampler.said(scene.request.text))
    for at, gold in enumerate(scene.calls()):
        yield f"chain_{at + 1}", messages[: 2 + 2 * at], gold, scene.meta("chained") | {"chain": draw.number}


STRATA: dict[str, Callable[[Draw], Drawn]] = {
    "call": _call,
    "unfitting": _unfitting,
    "no_tools": _no_tools,
    "code": _code,
    "chain": _chain,
    "tool": partial(_hard, "tool"),
    "phrasing": partial(_hard, "phrasing"),
    "renamed": _renamed,
}


def draw(
    split: str,
    n: int,
    seed: int = 0,
    *,
    shares: Mapping[str, float] | None = None,
    mix: Mix = Mix(),
    code_requests: Sequence[str] = (),
) -> list[Problem]:
    """n problems, those of a stratum together. gold: {"name", "arguments"}, or None where no call is correct.

    shares: stratum -> share, by default `SHARES` of the split, without "code" where there are no `code_requests`;
    "chain" gives chain_1 and chain_2. mix: renamed, composed and invented tools of the strata call, unfitting and chain.
    ConfigError for an unknown stratum."""
    check_split(split)
    shares = shares or {k: share for k, share in SHARES[split].items() if k != "code" or code_requests}
    if unknown := sorted(shares.keys() - STRATA.keys()):
        raise ConfigError(f"strata {', '.join(unknown)}; required: some of {', '.join(STRATA)}")
    drawn = []
    for stratum, share in shares.items():
        rows = round(share / sum(shares.values()) * n)
        for number in range(rows // 2 if stratum == "chain" else rows):
            draw = Draw(split, seed, number, mix, code_requests)
            for kind, messages, gold, meta in STRATA[stratum](draw):
                id = f"reading-{split}-{seed}-{kind}-{number}"
                drawn.append(Problem(id, messages, gold, split, meta | {"stratum": kind}))
    return drawn


def training_shares(mix: Mix) -> dict[str, float]:
    """Strata of the training problems that go with conversations of a mix: on calls alone where it never declines."""
    kept = {"call": True, "chain": mix.chained > 0}
    return {k: share for k, share in SHARES["train"].items() if kept.get(k, mix.declines)}


def probes(split: str, n: int, seed: int, code_requests: Sequence[str]) -> list[dict[str, Any]]:
    """n prompts {"messages", "asked": "tool" | "code", "tools_present": bool, "suitable": bool}, the cells of CELLS in
    turn. A call is correct only where the fitting tool is on offer. code_requests: at least one."""
    check_split(split)
    sampler, rows = Sampler(random.Random(f"probes {split} {seed}"), split), []
    for i in range(n):
        asked, tools = CELLS[i % len(CELLS)]
        scene = sampler.scene(fits=tools == "tools" and asked == "tool")
        text = scene.request.text if asked == "tool" else sampler.rng.choice(code_requests)
        system = message("system", neutral_system(sampler.rng)) if tools == "none" else scene.system(sampler.rng)
        rows.append(
            {
                "messages": [system, message("user", text)],
                "asked": asked,
                "tools_present": tools != "none",
                "suitable": (asked, tools) == ("tool", "tools"),
            }
        )
    return rows
