"""Schedules at their key steps, which parameter decays, and what Muon does to a matrix."""

from dataclasses import replace

import pytest
import torch

from codechat.models.config import GPTConfig, Schedule
from codechat.models.gpt import GPT
from codechat.models.optim import Muon, build, lr_scale, orthogonalise, set_lr

SHAPE = GPTConfig(
    depth=2, n_embd=16, n_head=2, block_size=8, vocab_size=50, qkv_bias=True, qk_norm=True
)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_the_warm_up_is_linear_and_never_zero(schedule: Schedule) -> None:
    scales = [lr_scale(s, max_steps=100, warmup_steps=4, schedule=schedule) for s in range(5)]
    assert scales == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    "schedule, final, expected",
    [
        ("constant", 0.1, {10: 1.0, 60: 1.0, 110: 1.0, 500: 1.0}),
        ("cosine", 0.0, {10: 1.0, 35: 0.853553, 60: 0.5, 85: 0.146447, 110: 0.0, 500: 0.0}),
        ("cosine", 0.1, {10: 1.0, 60: 0.55, 110: 0.1}),
        ("wsd", 0.0, {10: 1.0, 69: 1.0, 70: 1.0, 90: 0.5, 100: 0.25, 110: 0.0, 500: 0.0}),
        ("wsd", 0.2, {70: 1.0, 90: 0.6, 110: 0.2}),
    ],
)
def test_schedules_at_key_steps(
    schedule: Schedule, final: float, expected: dict[int, float]
) -> None:
    got = {
        step: lr_scale(step, max_steps=110, warmup_steps=10, schedule=schedule, final=final)
        for step in expected
    }
    assert got == pytest.approx(expected, abs=1e-6)


def test_set_lr_scales_each_groups_own_rate_and_does_not_pile_up() -> None:
    optimizers = build(GPT(SHAPE), lr=0.01, muon_lr=0.5, optimizer="muon")
    for scale in (0.5, 0.1, 0.1):
        set_lr(optimizers, scale)
    assert [g["lr"] for o in optimizers for g in o.param_groups] == pytest.approx(
        [0.001, 0.001, 0.05]
    )


@pytest.mark.parametrize("tied, optimizer", [(True, "adamw"), (False, "muon")])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(
    tied: bool, optimizer: str
) -> None:
    model = GPT(replace(SHAPE, tied=tied))
    model.blocks[0].attn_norm.weight.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    optimizers = build(model, lr=0.01, optimizer=optimizer, weight_decay=0.3)
    groups = [g for o in optimizers for g in o.param_groups]
    assert sorted(names[id(p)] for g in groups for p in g["params"]) == sorted(names.values())
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.3 if p.ndim >= 2 else 0.0)


def test_muon_has_the_matrices_of_blocks() -> None:
    model = GPT(replace(SHAPE, tied=False))
    names = {id(p): name for name, p in model.named_parameters()}
    _, muon = build(model, lr=0.01, optimizer="muon", weight_decay=0.3)
    taken = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    weights = {n for n in names.values() if n.startswith("blocks.") and n.endswith("weight")}
    assert taken == {n for n in weights if "norm" not in n}


@pytest.mark.parametrize("optimizer, rate", [("adamw", 0.01), ("muon", 0.02)])
def test_weight_decay_shrinks_by_rate_times_decay(optimizer: str, rate: float) -> None:
    """With a zero gradient both optimizers only decay, decoupled from the gradient."""
    model = GPT(SHAPE)
    weight = model.blocks[0].mlp.up.weight.detach()
    before = weight.clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for o in build(model, lr=0.01, muon_lr=0.02, optimizer=optimizer, weight_decay=0.5):
        o.step()
    torch.testing.assert_close(weight, before * (1 - rate * 0.5))
    assert (model.norm.weight == 1).all()


@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (48, 192), (384, 96)], ids=str)
def test_orthogonalise_takes_the_five_steps_of_newton_and_schulz(shape: tuple[int, int]) -> None:
    """In double precision on the matrix itself; its singular values span five powers of ten."""
    rng = torch.Generator().manual_seed(1)
    u, s, vh = torch.linalg.svd(torch.randn(2, *shape, generator=rng), full_matrices=False)
    g = u * torch.logspace(0, -5, s.shape[-1]) @ vh
    x = g.double() / g.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    # all five steps on one Gram matrix: 1e-4
    assert (orthogonalise(g) - x).norm() < 1.2e-5 * x.norm()


def random_parameter(*shape: int) -> torch.nn.Parameter:
    """With a gradient."""
    rng = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape, generator=rng))
    p.grad = torch.randn(shape, generator=rng)
    return p


def test_a_muon_step_is_the_orthogonalised_momentum_at_the_rate_of_its_shape() -> None:
    """A matrix without a gradient stays as it is."""
    tall = random_parameter(32, 8)
    wide = random_parameter(8, 32)
    still = random_parameter(4, 4)
    still.grad = None
    before = [p.detach().clone() for p in (tall, wide, still)]
    muon = Muon([tall, wide, still], lr=0.1)
    muon.step()
    for p, old, scale in zip((tall, wide), before, (2.0, 1.0)):  # sqrt(max(1, 32 / 8)) and 1
        # Nesterov's first step points along the gradient
        expected = old - 0.1 * scale * orthogonalise(p.grad[None])[0]
        torch.testing.assert_close(p.detach(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(still, before[2])
    assert list(muon.state) == [tall, wide]


def test_momentum_goes_on_where_the_gradient_is_zero() -> None:
    p = random_parameter(32, 8)
    muon = Muon([p], lr=0.1)
    before = p.detach().clone()
    muon.step()
    after = p.detach().clone()
    p.grad = torch.zeros_like(p)
    muon.step()
    assert ((p.detach() - after) * (after - before)).sum() > 0
