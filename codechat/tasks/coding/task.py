"""Code problems: write a function that passes hidden tests.

    tasks.load("mbpp", source="hub")                 or a path; "mbpp:variant=sanitized,reward=binary" in one word
    tasks.load("humaneval")                          evaluation only

`Score.parts["tiered"]` keeps the tiered reward and `Score.tier` the rung in every reward mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from codechat.core.errors import check_choice
from codechat.sandbox.pool import MEMORY_MB, MESSAGE_MB, Program, Verdict, shared_pool
from codechat.tasks.base import BaseTask, Problem, Score
from codechat.tasks.coding import rewards, sources
from codechat.tasks.coding.answer_text import extract
from codechat.tasks.coding.rewards import TIERS


class JudgedTask(BaseTask):
    """A task whose answers become programs, which the sandbox judges in parallel. isolation: see `Pool`."""

    isolation = "auto"

    def answer(self, problem: Problem, text: str) -> tuple[Any, Program | None]:
        """(what `scored` needs of a completion, the program to judge)."""
        raise NotImplementedError

    def scored(self, problem: Problem, answer: Any, verdict: Verdict | None) -> Score:
        raise NotImplementedError

    def score(self, problem: Problem, completion: str) -> Score:
        """Never raises, whatever the text holds."""
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs. Equal programs run once."""
        answers = [self.answer(problem, text) for problem, text in pairs]
        programs = dict.fromkeys(program for _, program in answers if program)
        verdicts = dict(zip(programs, shared_pool(self.isolation).map(programs), strict=True)) if programs else {}
        for (problem, _), (answer, program) in zip(pairs, answers, strict=True):
            yield self.scored(problem, answer, verdicts[program] if program else None)


class CodingTask(JudgedTask):
    """Problems with gold {code, tests, setup, names, stub}. reward: binary, fractional or tiered. timeout_s: wall
    seconds of each test; memory_mb, message_mb: see `Program`; a problem's gold may set more of each."""

    tiers: tuple[str, ...] = TIERS

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        reward: str = "tiered",
        timeout_s: float = 3.0,
        isolation: str = "auto",
        memory_mb: int = MEMORY_MB,
        message_mb: int = MESSAGE_MB,
    ) -> None:
        check_choice("reward", reward, rewards.MODES)
        self.name, self.reward, self.isolation = name, reward, isolation
        self.limits = {"timeout_s": float(timeout_s), "memory_mb": int(memory_mb), "message_mb": int(message_mb)}
        self.rows = list(problems)
        self.worked = [p for p in self.rows if p.split == "prompt"]  # for SFT

    def read(self, split: str) -> Iterable[Problem]:
        return (p for p in self.rows if p.split == split)

    def gold(self, problem: Problem) -> str:
        return problem.gold["code"]

    def answer(self, problem: Problem, text: str) -> tuple[str, Program | None]:
        code = extract(text, problem.gold["names"], problem.gold.get("stub", ""))
        return code, None if rewards.tier_without_running(code) else self.program(problem, code)

    def program(self, problem: Problem, code: str) -> Program:
        """A completion's program with the problem's tests."""
        gold = problem.gold
        tests = gold["tests"] if isinstance(gold["tests"], str) else tuple(gold["tests"])
        limits = {name: max(most, gold.get(name, 0)) for name, most in self.limits.items()}
        return Program(code=code, tests=tests, setup=gold.get("setup", ""), entry_points=tuple(gold["names"]), **limits)

    def scored(self, problem: Problem, answer: str, verdict: Verdict | None) -> Score:
        if verdict is None:
            tests, passed = problem.gold["tests"], 0
            total = 1 if isinstance(tests, str) else len(tests)
            tier = reason = rewards.tier_without_running(answer) or "raises"
        else:
            passed, total = sum(r.passed for r in verdict.results), len(verdict.results)
            tier, reason = rewards.tier_of(verdict), verdict.reason
        tiered = rewards.tiered(tier, passed, total)
        parts = {"passed": passed, "tests": total, "reason": reason, "tiered": tiered}
        return Score(rewards.reward(self.reward, tier, passed, total), tier, parts, tier == "all_passed")


class Benchmark(CodingTask):
    """A public set. source: hub, a path, or "embedded" (HumanEval's package). variants: the first is the default."""

    name: str
    source: ClassVar[str] = "hub"
    variants: ClassVar[tuple[str, ...]]
    timeout_s: ClassVar[float] = 3.0

    def __init__(
        self,
        source: str | None = None,
        variant: str | None = None,
        reward: str = "tiered",
        timeout_s: float | None = None,
        isolation: str = "auto",
        memory_mb: int = MEMORY_MB,
        message_mb: int = MESSAGE_MB,
    ) -> None:
        plain, variant = self.variants[0], variant or self.variants[0]
        check_choice("variant", variant, self.variants)
        source = str(source or (self.source if variant == plain else "hub"))
        problems = sources.read(self.name if variant == plain else f"{self.name}-{variant}", source)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        super().__init__(self.name, problems, reward, limit_s, isolation, memory_mb, message_mb)


class MbppTask(Benchmark):
    """Mostly Basic Python Problems (Austin et al., 2021, arXiv:2108.07732)."""

    name = "mbpp"
    variants = ("full", "sanitized", "plus")
    splits = ("train", "select", "test")


class HumanEvalTask(Benchmark):
    """HumanEval (Chen et al., 2021, arXiv:2107.03374)."""

    name, source = "humaneval", "embedded"
    variants = ("base", "plus")
    splits = ("test",)
    timeout_s = 5.0
