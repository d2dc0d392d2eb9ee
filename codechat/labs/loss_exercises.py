"""Exercises: write a loss yourself and compare it with the library's.

    check(dpo_loss)                    dpo_loss: correct (6 cases, values and gradients)
    check_cases(half, ((4,), 2))       half: correct (1 cases), for any function

A solution is a function with the name and the arguments of an exercise. It runs on random cases; the first difference of
a value or a gradient is reported. A function that raises NotImplementedError or returns nothing is not filled in.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codechat.core.errors import ConfigError, nearest
from codechat.rl import advantages, losses, preference_losses

CASES = 6
CORRECT, EMPTY = "correct", "not filled in yet"
Case = dict[str, Any]


@dataclass(frozen=True)
class Exercise:
    """solution: the library's function. case: arguments from a generator. learns: names of the arguments that carry a gradient."""

    solution: Callable[..., Tensor]
    case: Callable[[torch.Generator], Case]
    learns: tuple[str, ...] = ()


def check(function: Callable[..., Any]) -> str:
    """Print and return CORRECT or EMPTY. AssertionError names the case and the difference of a wrong solution."""
    name = function.__name__
    if name not in EXERCISES:
        raise ConfigError(f"no exercise is called {name!r}{nearest(name, EXERCISES)}")
    exercise, rng = EXERCISES[name], torch.Generator().manual_seed(0)
    for number in range(1, CASES + 1):
        case = exercise.case(rng)
        result = None
        with suppress(NotImplementedError):
            result = _run(function, case, exercise.learns)
        if result is None:
            print(f"{name}: {EMPTY}")
            return EMPTY
        _compare(name, number, case, result, _run(exercise.solution, case, exercise.learns))
    print(f"{name}: {CORRECT} ({CASES} cases, values{' and gradients' if exercise.learns else ''})")
    return CORRECT


def check_cases(function: Callable[..., Any], *cases: tuple[tuple[Any, ...], Any]) -> None:
    """Print CORRECT or EMPTY for any function. A case is its arguments and the correct result, a number or a list or tensor of
    numbers. AssertionError names the first case that differs."""
    name = function.__name__
    for number, (arguments, expected) in enumerate(cases, 1):
        result = None
        with suppress(NotImplementedError):
            result = function(*arguments)
        if result is None:
            return print(f"{name}: {EMPTY}")
        got, right = (torch.as_tensor(x, dtype=torch.float64) for x in (result, expected))
        same = got.shape == right.shape and torch.allclose(got, right, rtol=1e-4, atol=1e-7)
        assert same, f"{name}, case {number} of {len(cases)} {arguments}: got {result}; correct: {expected}"
    print(f"{name}: {CORRECT} ({len(cases)} cases)")


Result = tuple[Tensor, dict[str, Tensor]]


def _run(function: Callable[..., Any], case: Case, learns: tuple[str, ...]) -> Result | None:
    """The value and the gradient of its sum with respect to each argument in `learns`; None if there is no value."""
    arguments = {k: v.clone().requires_grad_(k in learns) if isinstance(v, Tensor) else v for k, v in case.items()}
    value = function(**arguments)
    if value is None or value is Ellipsis:
        return None
    assert isinstance(value, Tensor), f"{function.__name__} returned a {type(value).__name__}; required: a tensor"
    if not learns:
        return value.detach(), {}
    assert value.requires_grad, f"{function.__name__}: no gradient reaches {', '.join(learns)}; remove .detach()"
    grads = torch.autograd.grad(value.sum(), [arguments[k] for k in learns], materialize_grads=True, allow_unused=True)
    return value.detach(), dict(zip(learns, grads))


def _compare(name: str, number: int, case: Case, ours: Result, correct: Result) -> None:
    pairs = {"the value": (ours[0], correct[0])}
    pairs |= {f"the gradient of {k}": (ours[1][k], gradient) for k, gradient in correct[1].items()}
    for what, (a, b) in pairs.items():
        sign = "; its sign is reversed" if _close(a, -b) else ""
        got = f"{what} is {a.tolist()}; correct: {b.tolist()}{sign}"
        shown = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in case.items()}
        assert _close(a, b), f"{name}, case {number} of {CASES}: {got}; the case was {shown}"


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


def _normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=rng, dtype=torch.float64)


def _logprobs(rng: torch.Generator, *shape: int) -> Tensor:
    return -_normal(rng, *shape).abs() - 0.1


def _mask(rng: torch.Generator, B: int, T: int) -> Tensor:
    """(B, T) bool: the first tokens of each row, at least one."""
    return torch.arange(T)[None] < torch.randint(1, T + 1, (B, 1), generator=rng)


def _ratios(rng: torch.Generator) -> Case:
    new = _logprobs(rng, 3, 4)
    old = new + _normal(rng, 3, 4, scale=0.4)
    return dict(logprobs=new, old_logprobs=old, advantages=_normal(rng, 3, 1), clip_eps=0.2)


def _pair(rng: torch.Generator, **more: Any) -> Case:
    return dict(chosen=5 * _logprobs(rng, 4), rejected=5 * _logprobs(rng, 4)) | more


def _reference(rng: torch.Generator) -> Case:
    return dict(ref_chosen=5 * _logprobs(rng, 4), ref_rejected=5 * _logprobs(rng, 4))


def _lengths(rng: torch.Generator) -> Case:
    return {name: torch.randint(1, 9, (4,), generator=rng).double() for name in ("chosen_lengths", "rejected_lengths")}


def _labelled(rng: torch.Generator) -> Case:
    arguments = dict(logprobs=5 * _logprobs(rng, 4), ref_logprobs=5 * _logprobs(rng, 4))
    return arguments | dict(liked=torch.arange(4) % 2 == 0, kl=float(torch.rand((), generator=rng)), beta=0.3)


def _preference(name: str, case: Callable[[torch.Generator], Case]) -> Exercise:
    return Exercise(
        lambda **arguments: getattr(preference_losses, name)(**arguments).losses, case, ("chosen", "rejected")
    )


def _entropy(logits: Tensor) -> Tensor:
    """(..., V) logits -> (...) entropy in nats."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


EXERCISES: Mapping[str, Exercise] = {
    "masked_mean": Exercise(
        losses.masked_mean,
        lambda rng: dict(x=_normal(rng, 3, 5), mask=_mask(rng, 3, 5)),
        ("x",),
    ),
    "entropy": Exercise(_entropy, lambda rng: dict(logits=3 * _normal(rng, 2, 3, 5)), ("logits",)),
    "group_advantages": Exercise(
        lambda rewards, eps: advantages.group_advantages(rewards, "zscore", eps),
        lambda rng: dict(rewards=_normal(rng, 3, 4), eps=1e-6),
    ),
    "policy_gradient_loss": Exercise(
        losses.policy_gradient_loss,
        lambda rng: dict(logprobs=_logprobs(rng, 3, 5), advantages=_normal(rng, 3, 1), mask=_mask(rng, 3, 5)),
        ("logprobs",),
    ),
    "clipped_policy_loss": Exercise(
        lambda logprobs, old_logprobs, advantages, clip_eps: losses.clipped_policy_loss(
            (logprobs - old_logprobs).exp(), advantages, clip_eps, clip_eps
        ),
        _ratios,
        ("logprobs",),
    ),
    "kl_k3": Exercise(
        lambda logprobs, ref_logprobs: losses.kl_estimate(logprobs, ref_logprobs, "k3"),
        lambda rng: dict(logprobs=_logprobs(rng, 3, 5), ref_logprobs=_logprobs(rng, 3, 5)),
        ("logprobs",),
    ),
    "gae": Exercise(
        lambda rewards, values, **how: advantages.estimate_gae(rewards, values, torch.ones_like(rewards), **how)[0],
        lambda rng: dict(rewards=_normal(rng, 2, 5), values=_normal(rng, 2, 5), gamma=0.9, lam=0.8),
    ),
    "dpo_loss": _preference("dpo_loss", lambda rng: _pair(rng, **_reference(rng), beta=0.2)),
    "ipo_loss": _preference("ipo_loss", lambda rng: _pair(rng, **_reference(rng), beta=0.2)),
    "simpo_loss": _preference("simpo_loss", lambda rng: _pair(rng, **_lengths(rng), beta=2.0, margin=1.0)),
    "orpo_loss": _preference("orpo_loss", lambda rng: _pair(rng, **_lengths(rng), beta=0.1)),
    "kto_loss": Exercise(lambda **case: preference_losses.kto_loss(**case)[0], _labelled, ("logprobs",)),
}
