"""Exercises: solutions pass, empty ones are reported, wrong ones fail; both notebooks hold the same exercises."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from raising import raising

from codechat.core.errors import ConfigError
from codechat.labs.loss_exercises import CORRECT, EMPTY, EXERCISES, check

NOTEBOOKS = Path(__file__).resolve().parents[2] / "nbs_py"


def functions(name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def solved() -> dict[str, Callable[..., Any]]:
    """The functions of the notebook with the solutions."""
    scope: dict[str, Any] = {"torch": torch, "F": F}
    for node in functions("18_losses_solved.py").values():
        exec(ast.unparse(node), scope)
    return {name: scope[name] for name in EXERCISES}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


@pytest.mark.parametrize("name", EXERCISES)
def test_every_solution_is_correct_and_its_negative_is_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    solution = solved()[name]
    assert check(solution) == CORRECT and capsys.readouterr().out.startswith(f"{name}: correct (6 cases")
    with raising(AssertionError, name, 1, 6, "sign"):
        check(named(name, lambda **case: -solution(**case)))


@pytest.mark.parametrize("name", [name for name, exercise in EXERCISES.items() if exercise.learns])
def test_correct_values_with_wrong_gradients_fail(name: str) -> None:
    solution, first = solved()[name], EXERCISES[name].learns[0]
    with raising(AssertionError, name, first):
        check(named(name, lambda **case: solution(**case).detach()))
    with raising(AssertionError, name, "gradient", first):
        check(named(name, lambda **case: solution(**case) + 0.1 * (case[first] - case[first].detach()).sum()))


def test_empty_and_foreign_functions(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(**case: Any) -> None:
        raise NotImplementedError

    for name, empty in (("dpo_loss", raises), ("gae", lambda **case: None), ("kl_k3", lambda **case: ...)):
        assert check(named(name, empty)) == EMPTY
        assert capsys.readouterr().out == f"{name}: not filled in yet\n"
    with pytest.raises(ConfigError, match="'dpo_loss'"):
        check(named("dpo_los", raises))
    with pytest.raises(AssertionError, match="float.*tensor"):
        check(named("entropy", lambda **case: 1.0))
    with pytest.raises(AssertionError, match="shape"):
        check(named("dpo_loss", lambda **case: case["chosen"].sum()))


def test_both_notebooks_hold_the_same_exercises_and_the_first_no_solution() -> None:
    asked, answered = functions("17_losses_by_hand.py"), functions("18_losses_solved.py")
    assert list(asked) == list(answered) == list(EXERCISES)
    for name, node in asked.items():
        assert ast.dump(node.args) == ast.dump(answered[name].args)
        assert ast.get_docstring(node) == ast.get_docstring(answered[name])
        assert len(node.body) == 2 and isinstance(node.body[1], ast.Raise)
