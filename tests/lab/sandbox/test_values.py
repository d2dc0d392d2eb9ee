"""What honest programs return and take works as in one plain process, but for what would let a
program decide."""

import tomllib
from pathlib import Path

import pytest

from codechat_lab.sandbox.defined_tests import run_defined
from codechat_lab.sandbox.pool import Pool, Program

CASES = tomllib.loads(Path(__file__).with_name("values.toml").read_text())


def passes_plainly(row: dict[str, str]) -> bool:
    """In one interpreter, as a reader would try it."""
    space: dict[str, object] = {"__name__": "plain"}
    exec(row["code"], space)
    exec(row["test"], space)
    run_defined(space, space.keys(), ())
    return True


def verdict(row: dict[str, str], pool: Pool) -> tuple[bool, str]:
    result = pool.run(Program(code=row["code"], tests=[row["test"]], timeout_s=5.0))
    return result.passed, result.reason


@pytest.mark.parametrize("row", CASES["same"], ids=lambda row: row["name"])
def test_a_value_is_used_as_in_plain_execution(row: dict[str, str], pool: Pool) -> None:
    assert passes_plainly(row)
    passed, reason = verdict(row, pool)
    assert passed, reason


@pytest.mark.parametrize("row", CASES["other"], ids=lambda row: row["name"])
def test_what_would_let_a_program_agree_is_not_forwarded(row: dict[str, str], pool: Pool) -> None:
    assert passes_plainly(row)
    assert not verdict(row, pool)[0]


@pytest.mark.parametrize("row", CASES["forged"], ids=lambda row: row["name"])
def test_nothing_that_is_forwarded_forges_a_pass(row: dict[str, str], pool: Pool) -> None:
    assert not verdict(row, pool)[0]
    assert pool.run(Program(code="def f(): return 1", tests=["assert f() == 1"])).passed
