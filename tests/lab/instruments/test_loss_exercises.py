"""Exercises: solutions pass, empty ones are reported, wrong ones fail; both notebooks hold the
same exercises."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from raising import raising

from codechat_lab.instruments.loss_exercises import CORRECT, EMPTY, EXERCISES, check, check_cases

NOTEBOOKS = Path(__file__).resolve().parents[3] / "nbs_py"


def functions(name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def test_solutions_are_correct_and_wrong_values_signs_and_gradients_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scope: dict[str, Any] = {"torch": torch, "F": F}
    for node in functions("18_losses_solved.py").values():
        exec(ast.unparse(node), scope)
    for name, solution in ((name, scope[name]) for name in EXERCISES):
        assert check(solution) == CORRECT
        assert capsys.readouterr().out.startswith(f"{name}: correct (6 cases")
        with raising(AssertionError, name, 1, 6, "sign"):
            check(named(name, lambda **case: -solution(**case)))
        learns = EXERCISES[name].learns
        if learns:
            with raising(AssertionError, name, learns[0]):
                check(named(name, lambda **case: solution(**case).detach()))
            with raising(AssertionError, name, "gradient", learns[0]):
                extra = lambda case: 0.1 * (case[learns[0]] - case[learns[0]].detach()).sum()  # noqa: E731
                check(named(name, lambda **case: solution(**case) + extra(case)))


def raises(*case: Any, **named: Any) -> None:
    raise NotImplementedError


def test_empty_and_foreign_functions(capsys: pytest.CaptureFixture[str]) -> None:
    for name, empty in (
        ("dpo_loss", raises),
        ("gae", lambda **case: None),
        ("kl_k3", lambda **case: ...),
    ):
        assert check(named(name, empty)) == EMPTY
        assert capsys.readouterr().out == f"{name}: not filled in yet\n"
    for wrong in (lambda **case: 1.0, lambda **case: case["chosen"].sum()):
        with pytest.raises(AssertionError):
            check(named("dpo_loss", wrong))


def test_cases_of_any_function(capsys: pytest.CaptureFixture[str]) -> None:
    for function, printed in ((raises, EMPTY), (lambda x: None, EMPTY), (abs, "correct (2 cases)")):
        check_cases(function, ((-2.0,), 2.0), ((0,), 0))
        assert printed in capsys.readouterr().out
    check_cases(torch.cumsum, ((torch.ones(3), 0), [1, 2, 3]))
    for wrong in (lambda x: x, lambda x: [2.0]):
        with raising(AssertionError, 1, 2):
            check_cases(wrong, ((-2.0,), 2.0), ((0,), 0))


def test_both_notebooks_hold_the_same_exercises_and_the_first_no_solution() -> None:
    asked = functions("17_losses_by_hand.py")
    answered = functions("18_losses_solved.py")
    assert list(asked) == list(answered) == list(EXERCISES)
    for name, node in asked.items():
        assert ast.dump(node.args) == ast.dump(answered[name].args)
        assert ast.get_docstring(node) == ast.get_docstring(answered[name])
        assert len(node.body) == 2
        assert isinstance(node.body[1], ast.Raise)
