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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

from codechat.core.errors import check_choice
from codechat.tasks.base import Message, Problem
from codechat_lab.tasks.toolbox.catalogue import draw_others
from codechat_lab.tasks.toolbox.dialogues import MAX_TOOLS, Mix, Sampler, Scene, message, neutral_system, tools_system

SHARES = {  # of the problems of a split
    "train": dict(call=0.55, unfitting=0.2, no_tools=0.05, code=0.1, chain=0.1),
    "select": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test": dict(call=0.4, unfitting=0.2, no_tools=0.1, code=0.1, chain=0.2),
    "test_hard": dict(tool=0.4, phrasing=0.3, renamed=0.3),
}
STRATA = ("call", "unfitting", "no_tools", "code", "chain", "tool", "phrasing", "renamed")
# What a probe asks for, and the tools on offer: with the fitting one, only others, none.
CELLS = (("tool", "tools"), ("tool", "other"), ("tool", "none"), ("code", "tools"), ("code", "none"))

# stratum, messages, gold call or None, meta
Drawn = tuple[str, list[Message], dict[str, Any] | None, dict[str, Any]]


def _draw(
    stratum: str,
    split: str,
    seed: int,
    number: int,
    mix: Mix,
    code_requests: Sequence[str],
) -> Iterator[Drawn]:
    """The problems of a number: two of a chain, else one. The request of "unfitting" and "renamed" is that of
    "call"."""
    purpose = "call" if stratum in ("unfitting", "renamed") else stratum
    origin = "test" if stratum == "renamed" else split
    rng = random.Random(f"{purpose} {number} {origin} {seed}")
    sampler = Sampler(rng, origin, mix if stratum in ("call", "unfitting", "chain") else Mix())
    if stratum == "no_tools":
        request = sampler.request()
        messages = [message("system", neutral_system(rng)), message("user", request.text)]
        yield stratum, messages, None, {"tools_present": False, "asked": "tool", "tools": [], "kind": "absent"}
    elif stratum == "code":
        present = number % 2 == 0
        system = message("system", tools_system(rng, split) if present else neutral_system(rng))
        messages = [system, message("user", code_requests[number % len(code_requests)])]
        yield stratum, messages, None, {"tools_present": present, "asked": "code", "kind": "code"}
    elif stratum == "chain":
        scene = sampler.chain()
        messages = sampler.served(scene, sampler.said(scene.requests[0].text))
        for at, gold in enumerate(scene.calls()):
            meta = scene.meta("chained") | {"chain": number}
            yield f"chain_{at + 1}", messages[: 2 + 2 * at], gold, meta
    else:
        if stratum in ("tool", "phrasing"):
            request = sampler.request(stratum)
            others = draw_others(rng, origin, [request.tool], rng.randint(0, MAX_TOOLS - 1))
            scene = Scene([request], [request.tool, *others])
        else:
            scene = sampler.scene()
        if stratum == "unfitting":
            tool, *rest = scene.offered
            known = {t.description for t in rest}  # under any name
            other = next(t for t in draw_others(rng, origin, [tool], MAX_TOOLS) if t.description not in known)
            scene = replace(scene, offered=[other, *rest])
        if stratum == "renamed":
            scene = replace(sampler, split=split).renamed(scene, every=True)
        messages = [scene.system(rng), message("user", scene.requests[0].text)]
        fits = stratum != "unfitting"
        yield stratum, messages, scene.calls()[0] if fits else None, scene.meta("call" if fits else "unsuitable")


def draw(
    split: str,
    n: int,
    seed: int = 0,
    *,
    shares: Mapping[str, float] | None = None,
    mix: Mix = Mix(),
    code_requests: Sequence[str] = (),
) -> list[Problem]:
    """Exactly n problems, those of a stratum together; the problems of a smaller n are among them. gold: {"name",
    "arguments"}, or None where no call is correct.

    shares: stratum -> share, by default `SHARES` of the split, without "code" where there are no `code_requests`;
    "chain" gives chain_1 and chain_2 in turn. mix: renamed, composed and invented tools of the strata call,
    unfitting and chain. ConfigError for an unknown stratum."""
    shares = shares or {k: share for k, share in SHARES[split].items() if k != "code" or code_requests}
    drawn = []
    for stratum in shares:
        check_choice("stratum", stratum, STRATA)
    for stratum, rows in counts_of(shares, n).items():
        numbered = (
            (number, one) for number in count() for one in _draw(stratum, split, seed, number, mix, code_requests)
        )
        for number, (kind, messages, gold, meta) in islice(numbered, rows):
            id = f"reading-{split}-{seed}-{kind}-{number}"
            drawn.append(Problem(id, messages, gold, split, meta | {"stratum": kind}))
    return drawn


def counts_of(shares: Mapping[str, float], n: int) -> dict[str, int]:
    """Problems of each stratum, which add up to n. Each problem in turn goes where most are missing, so that no
    count of a smaller n is larger."""
    counts = dict.fromkeys(shares, 0)
    total = sum(shares.values())
    for drawn in range(1, n + 1):
        missing = {stratum: share / total * drawn - counts[stratum] for stratum, share in shares.items()}
        counts[max(missing, key=missing.__getitem__)] += 1
    return counts


def training_shares(mix: Mix) -> dict[str, float]:
    """Strata of the training problems that go with conversations of a mix: on calls alone where it never declines."""
    declines = mix.unfitting + mix.no_tools + mix.small_talk > 0
    kept = {"call": True, "chain": mix.chained > 0}
    return {k: share for k, share in SHARES["train"].items() if kept.get(k, declines)}


def probes(split: str, n: int, seed: int, code_requests: Sequence[str]) -> list[dict[str, Any]]:
    """n prompts {"messages", "asked": "tool" | "code", "tools_present": bool, "suitable": bool}, the cells of CELLS in
    turn. A call is correct only where the fitting tool is on offer. code_requests: at least one."""
    sampler = Sampler(random.Random(f"probes {split} {seed}"), split)
    rows = []
    for i in range(n):
        asked, tools = CELLS[i % len(CELLS)]
        scene = sampler.scene(fits=tools == "tools" and asked == "tool")
        text = scene.requests[0].text if asked == "tool" else sampler.rng.choice(code_requests)
        system = message("system", neutral_system(sampler.rng)) if tools == "none" else scene.system(sampler.rng)
        row = dict(messages=[system, message("user", text)], asked=asked, tools_present=tools != "none")
        rows.append(row | dict(suitable=(asked, tools) == ("tool", "tools")))
    return rows
