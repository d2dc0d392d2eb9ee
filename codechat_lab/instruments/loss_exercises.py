"""Exercises: write a loss yourself and compare it with the library's.

    check(dpo_loss)                    dpo_loss: correct (6 cases, values and gradients)
    check_cases(half, ((4,), 2))       half: correct (1 cases), for any function

A solution is a function with the name and the arguments of an exercise. It runs on random
cases; the first difference of a value or a gradient is reported. A function that raises
NotImplementedError or returns nothing is not filled in."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

from codechat.rl import advantages, losses, preference_losses

CASES = 6
CORRECT, EMPTY = "correct", "not filled in yet"
Draw = Callable[[torch.Generator], Tensor]


class Exercise(NamedTuple):
    solution: Callable[..., Tensor]
    arguments: Mapping[str, Any]  # name -> value, or how it is drawn in a case
    learns: tuple[str, ...] = ()  # arguments that carry a gradient


def check(function: Callable[..., Any]) -> str:
    """Print and return CORRECT or EMPTY. AssertionError names the case and the difference of a
    wrong solution."""
    name = function.__name__
    exercise = EXERCISES[name]
    rng = torch.Generator().manual_seed(0)
    for number in range(1, CASES + 1):
        case = {k: draw(rng) if callable(draw) else draw for k, draw in exercise.arguments.items()}
        ours = _value_and_gradients(function, case, exercise.learns)
        if not ours:
            print(f"{name}: {EMPTY}")
            return EMPTY
        expected = _value_and_gradients(exercise.solution, case, exercise.learns)
        for what, correct in expected.items():
            got = ours[what]
            if _close(got, correct):
                continue
            sign = "; its sign is reversed" if _close(got, -correct) else ""
            shown = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in case.items()}
            raise AssertionError(
                f"{name}, case {number} of {CASES}: {what} is {got.tolist()}; "
                f"correct: {correct.tolist()}{sign}; the case was {shown}"
            )
    compared = "values and gradients" if exercise.learns else "values"
    print(f"{name}: {CORRECT} ({CASES} cases, {compared})")
    return CORRECT


def check_cases(function: Callable[..., Any], *cases: tuple[tuple[Any, ...], Any]) -> None:
    """Print CORRECT or EMPTY for any function. A case is its arguments and the correct result,
    a number or a list or tensor of numbers. AssertionError names the first case that
    differs."""
    name = function.__name__
    for number, (arguments, expected) in enumerate(cases, 1):
        result = _value(function, *arguments)
        if result is None:
            print(f"{name}: {EMPTY}")
            return
        got, right = (torch.as_tensor(x, dtype=torch.float64) for x in (result, expected))
        same = got.shape == right.shape and torch.allclose(got, right, rtol=1e-4, atol=1e-7)
        assert same, (
            f"{name}, case {number} of {len(cases)} {arguments}: got {result}; correct: {expected}"
        )
    print(f"{name}: {CORRECT} ({len(cases)} cases)")


def _value(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The value of a function; None if it is not filled in."""
    value = None
    with suppress(NotImplementedError):
        value = function(*arguments, **named)
    return None if value is Ellipsis else value


def _value_and_gradients(
    function: Callable[..., Any], case: Mapping[str, Any], learns: tuple[str, ...]
) -> dict[str, Tensor]:
    """The value and the gradient of its sum with respect to each argument in `learns`; empty if
    there is no value."""
    arguments = {
        k: v.clone().requires_grad_(k in learns) if isinstance(v, Tensor) else v
        for k, v in case.items()
    }
    value = _value(function, **arguments)
    if value is None:
        return {}
    assert isinstance(value, Tensor), (
        f"{function.__name__} returned a {type(value).__name__}; required: a tensor"
    )
    found = {"the value": value.detach()}
    if learns:
        assert value.requires_grad, (
            f"{function.__name__}: no gradient reaches {', '.join(learns)}; remove .detach()"
        )
        inputs = [arguments[k] for k in learns]
        grads = torch.autograd.grad(value.sum(), inputs, materialize_grads=True, allow_unused=True)
        found |= {f"the gradient of {k}": gradient for k, gradient in zip(learns, grads)}
    return found


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


def _normal(*shape: int, scale: float = 1.0) -> Draw:
    return lambda rng: scale * torch.randn(*shape, generator=rng, dtype=torch.float64)


def _logprobs(*shape: int, scale: float = 1.0) -> Draw:
    return lambda rng: (
        -scale * (torch.randn(*shape, generator=rng, dtype=torch.float64).abs() + 0.1)
    )


def _mask(rng: torch.Generator) -> Tensor:
    """(3, 5) bool: the first tokens of each row, at least one."""
    return torch.arange(5)[None] < torch.randint(1, 6, (3, 1), generator=rng)


def _lengths(rng: torch.Generator) -> Tensor:
    return torch.randint(1, 9, (4,), generator=rng).double()


# log-probabilities of tokens, and of whole completions
TOKENS = _logprobs(3, 5)
SUMS = _logprobs(4, scale=5.0)
PAIR = {"chosen": SUMS, "rejected": SUMS}
REFERENCE = {"ref_chosen": SUMS, "ref_rejected": SUMS}
LENGTHS = {"chosen_lengths": _lengths, "rejected_lengths": _lengths}
LIKED = torch.arange(4) % 2 == 0


def _preference(loss: Callable[..., preference_losses.Losses], **arguments: Any) -> Exercise:
    def solution(**case: Any) -> Tensor:
        return loss(**case).losses

    return Exercise(solution, PAIR | arguments, ("chosen", "rejected"))


def _entropy(logits: Tensor) -> Tensor:
    return Categorical(logits=logits).entropy()


def _group_advantages(rewards: Tensor, eps: float) -> Tensor:
    return advantages.group_advantages(rewards, "zscore", eps)


def _clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_eps: float
) -> Tensor:
    return losses.clipped_policy_loss(
        (logprobs - old_logprobs).exp(), advantages, clip_eps, clip_eps
    )


def _kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return losses.kl_estimate(logprobs, ref_logprobs, "k3")


def _gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    return advantages.estimate_gae(rewards, values, torch.ones_like(rewards), gamma=gamma, lam=lam)[
        0
    ]


def _kto_loss(**case: Any) -> Tensor:
    return preference_losses.kto_loss(**case)[0]


EXERCISES: Mapping[str, Exercise] = {
    "masked_mean": Exercise(losses.masked_mean, {"x": _normal(3, 5), "mask": _mask}, learns=("x",)),
    "entropy": Exercise(_entropy, {"logits": _normal(2, 3, 5, scale=3.0)}, learns=("logits",)),
    "group_advantages": Exercise(_group_advantages, {"rewards": _normal(3, 4), "eps": 1e-6}),
    "policy_gradient_loss": Exercise(
        losses.policy_gradient_loss,
        {"logprobs": TOKENS, "advantages": _normal(3, 1), "mask": _mask},
        learns=("logprobs",),
    ),
    "clipped_policy_loss": Exercise(
        _clipped_policy_loss,
        {"logprobs": TOKENS, "old_logprobs": TOKENS, "advantages": _normal(3, 1), "clip_eps": 0.2},
        learns=("logprobs",),
    ),
    "kl_k3": Exercise(_kl_k3, {"logprobs": TOKENS, "ref_logprobs": TOKENS}, learns=("logprobs",)),
    "gae": Exercise(
        _gae, {"rewards": _normal(2, 5), "values": _normal(2, 5), "gamma": 0.9, "lam": 0.8}
    ),
    "dpo_loss": _preference(preference_losses.dpo_loss, **REFERENCE, beta=0.2),
    "ipo_loss": _preference(preference_losses.ipo_loss, **REFERENCE, beta=0.2),
    "simpo_loss": _preference(preference_losses.simpo_loss, **LENGTHS, beta=2.0, margin=1.0),
    "orpo_loss": _preference(preference_losses.orpo_loss, **LENGTHS, beta=0.1),
    "kto_loss": Exercise(
        _kto_loss,
        {"logprobs": SUMS, "ref_logprobs": SUMS, "liked": LIKED, "kl": 0.4, "beta": 0.3},
        learns=("logprobs",),
    ),
}
