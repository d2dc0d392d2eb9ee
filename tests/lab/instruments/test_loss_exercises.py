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
Solutions = dict[str, Callable[..., Any]]


def functions(name: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


@pytest.fixture(scope="module")
def solutions() -> Solutions:
    """The functions of the solved notebook."""
    scope: dict[str, Any] = {"torch": torch, "F": F}
    for node in functions("18_losses_solved.py").values():
        exec(ast.unparse(node), scope)
    return {name: scope[name] for name in EXERCISES}


EACH = pytest.mark.parametrize("name", EXERCISES)
DIFFERENTIABLE = pytest.mark.parametrize(
    "name", [name for name, exercise in EXERCISES.items() if exercise.learns]
)


@EACH
def test_solutions_are_correct(
    name: str, solutions: Solutions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(solutions[name]) == CORRECT
    assert capsys.readouterr().out.startswith(f"{name}: correct (6 cases")


@EACH
def test_a_wrong_sign_fails(name: str, solutions: Solutions) -> None:
    def negated(**case: Any) -> Any:
        return -solutions[name](**case)

    with raising(AssertionError, name, 1, 6, "sign"):
        check(named(name, negated))


@DIFFERENTIABLE
def test_a_solution_without_a_gradient_fails(name: str, solutions: Solutions) -> None:
    def detached(**case: Any) -> Any:
        return solutions[name](**case).detach()

    with raising(AssertionError, name, EXERCISES[name].learns[0]):
        check(named(name, detached))


@DIFFERENTIABLE
def test_a_wrong_gradient_fails(name: str, solutions: Solutions) -> None:
    learned = EXERCISES[name].learns[0]

    def with_more_gradient(**case: Any) -> Any:
        zero = (case[learned] - case[learned].detach()).sum()
        return solutions[name](**case) + 0.1 * zero

    with raising(AssertionError, name, "gradient", learned):
        check(named(name, with_more_gradient))


def raises(*case: Any, **named: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "empty"),
    [("dpo_loss", raises), ("gae", lambda **case: None), ("kl_k3", lambda **case: ...)],
)
def test_an_empty_function_is_not_filled_in_yet(
    name: str, empty: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(named(name, empty)) == EMPTY
    assert capsys.readouterr().out == f"{name}: not filled in yet\n"


@pytest.mark.parametrize("wrong", [lambda **case: 1.0, lambda **case: case["chosen"].sum()])
def test_a_value_of_another_kind_or_shape_fails(wrong: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        check(named("dpo_loss", wrong))


@pytest.mark.parametrize(
    ("function", "printed"),
    [(raises, EMPTY), (lambda x: None, EMPTY), (abs, "correct (2 cases)")],
)
def test_cases_of_any_function(
    function: Callable[..., Any], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_cases(function, ((-2.0,), 2.0), ((0,), 0))
    assert printed in capsys.readouterr().out


def test_a_tensor_is_compared_with_a_list() -> None:
    check_cases(torch.cumsum, ((torch.ones(3), 0), [1, 2, 3]))


@pytest.mark.parametrize("wrong", [lambda x: x, lambda x: [2.0]])
def test_the_case_that_fails_is_named(wrong: Callable[..., Any]) -> None:
    with raising(AssertionError, 1, 2):
        check_cases(wrong, ((-2.0,), 2.0), ((0,), 0))


def test_both_notebooks_hold_the_same_exercises() -> None:
    asked = functions("17_losses_by_hand.py")
    answered = functions("18_losses_solved.py")
    assert list(asked) == list(answered) == list(EXERCISES)
    for name, node in asked.items():
        assert ast.dump(node.args) == ast.dump(answered[name].args)
        assert ast.get_docstring(node) == ast.get_docstring(answered[name])


def test_the_notebook_of_exercises_holds_no_solution() -> None:
    for node in functions("17_losses_by_hand.py").values():
        assert len(node.body) == 2
        assert isinstance(node.body[1], ast.Raise)
