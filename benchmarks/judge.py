"""Judging: programs per second of HumanEval+'s form, a function and hundreds of tests whose values
stand in one script.

    python -m benchmarks judge                        24 programs with 764 tests each, in scripts of 50 kB
    python -m benchmarks judge --kilobytes 400        of larger values

A judge keeps a script that it has read, so the completions of one problem share that work:
scripts are timed when they are new and when they are known. `exec` runs new ones in this process,
without any isolation: what Python itself takes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from benchmarks import measure
from benchmarks.settings import JudgeBench
from codechat.core.errors import RunError
from codechat_lab.sandbox.pool import Pool, Program

DIGITS = 6  # characters of a value in a script, with what stands between two
CODE = "def ordered(values):\n    return sorted(values)\n"
CHECK = (
    "def check(candidate):\n    for given, wanted in zip(inputs, "
    "results):\n        assert candidate(given) == wanted\n"
)


def program(cfg: JudgeBench, seed: int) -> Program:
    """A right program; half of its script are inputs, half results."""
    rng = random.Random(seed)
    length = max(1, round(500 * cfg.kilobytes / cfg.tests / DIGITS))
    inputs = [[rng.randrange(1000, 10000) for _ in range(length)] for _ in range(cfg.tests)]
    tests = f"inputs = {inputs}\nresults = {[sorted(x) for x in inputs]}\n{CHECK}"
    return Program(code=CODE, tests=tests, entry_points=["ordered"])


def contestants(cfg: JudgeBench, pool: Pool) -> list[measure.Contestant]:
    """New scripts, known ones, and new ones without isolation."""
    spent = [0.0]
    seeds = count()
    known = [program(cfg, next(seeds)) for _ in range(cfg.programs)]

    def judged(programs: Sequence[Program]) -> None:
        if not all(verdict.passed for verdict in pool.map(programs)):
            raise RunError("a right program was judged wrong; see codechat sandbox")

    def executed(programs: Sequence[Program]) -> None:
        for some in programs:
            exec(f"{some.code}{some.tests}check(ordered)", {})

    def timed(work: Callable[[Sequence[Program]], None], new: bool) -> Callable[[], None]:
        def run() -> None:
            programs = [program(cfg, next(seeds)) for _ in known] if new else known
            began = time.perf_counter()
            work(programs)
            spent[0] = time.perf_counter() - began

        return run

    runs = {
        "new scripts": (judged, True),
        "known scripts": (judged, False),
        "new scripts, exec": (executed, True),
    }
    made = {name: timed(*how) for name, how in runs.items()}
    return [
        measure.Contestant(name, run, cfg.programs, seconds=lambda: spent[0])
        for name, run in made.items()
    ]


def bench(cfg: JudgeBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    with Pool() as pool:
        timings = measure.race(contestants(cfg, pool), cfg.rounds)
    title = f"judging: {cfg.programs} programs, {cfg.tests} tests each in {cfg.kilobytes:g} kB"
    measure.show(title, "programs", timings)
    return {"title": title, "timings": measure.rows(timings)}
