"""Schedules at their key steps, which parameter decays, and what Muon does to a matrix."""

import pytest
import torch

from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.optim import Muon, build, lr_scale, orthogonalise, set_lr


def tiny_model(seed: int = 0, **options: object) -> GPT:
    shape = dict(
        depth=2, n_embd=16, n_head=2, block_size=8, vocab_size=50, qkv_bias=True, qk_norm=True
    )
    return GPT(GPTConfig(**shape, **options), seed)


def test_schedules_at_key_steps() -> None:
    for schedule in ("constant", "cosine", "wsd"):  # the warm-up is linear and never zero
        scales = [lr_scale(s, max_steps=100, warmup_steps=4, schedule=schedule) for s in range(5)]
        assert scales == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    for schedule, final, expected in (
        ("constant", 0.1, {10: 1.0, 60: 1.0, 110: 1.0, 500: 1.0}),
        ("cosine", 0.0, {10: 1.0, 35: 0.853553, 60: 0.5, 85: 0.146447, 110: 0.0, 500: 0.0}),
        ("cosine", 0.1, {10: 1.0, 60: 0.55, 110: 0.1}),
        ("wsd", 0.0, {10: 1.0, 69: 1.0, 70: 1.0, 90: 0.5, 100: 0.25, 110: 0.0, 500: 0.0}),
        ("wsd", 0.2, {70: 1.0, 90: 0.6, 110: 0.2}),
    ):
        got = {
            s: lr_scale(s, max_steps=110, warmup_steps=10, schedule=schedule, final=final)
            for s in expected
        }
        assert got == pytest.approx(expected, abs=1e-6)


def test_set_lr_scales_each_groups_own_rate_and_does_not_pile_up() -> None:
    optimizers = build(tiny_model(), lr=0.01, muon_lr=0.5, optimizer="muon")
    for scale in (0.5, 0.1, 0.1):
        set_lr(optimizers, scale)
    assert [g["lr"] for o in optimizers for g in o.param_groups] == pytest.approx(
        [0.001, 0.001, 0.05]
    )


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    for tied, optimizer in ((True, "adamw"), (False, "muon")):
        model = tiny_model(tied=tied)
        model.blocks[0].attn_norm.weight.requires_grad_(False)
        names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
        optimizers = build(model, lr=0.01, optimizer=optimizer, weight_decay=0.3)
        groups = [g for o in optimizers for g in o.param_groups]
        assert sorted(names[id(p)] for g in groups for p in g["params"]) == sorted(names.values())
        for group in groups:
            assert all(
                group["weight_decay"] == (0.3 if p.ndim >= 2 else 0.0) for p in group["params"]
            )
    taken = {names[id(p)] for g in optimizers[1].param_groups for p in g["params"]}
    blocks = {n for n in names.values() if n.startswith("blocks.") and n.endswith("weight")}
    assert taken == {n for n in blocks if "norm" not in n}


def test_weight_decay_shrinks_by_rate_times_decay() -> None:
    """With a zero gradient both optimizers only decay, decoupled from the gradient."""
    for optimizer, rate in (("adamw", 0.01), ("muon", 0.02)):
        model = tiny_model()
        before = model.blocks[0].mlp.up.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for o in build(model, lr=0.01, muon_lr=0.02, optimizer=optimizer, weight_decay=0.5):
            o.step()
        torch.testing.assert_close(
            model.blocks[0].mlp.up.weight.detach(), before * (1 - rate * 0.5)
        )
        assert (model.norm.weight == 1).all()


def test_orthogonalise_takes_the_five_steps_of_newton_and_schulz() -> None:
    """In double precision on the matrix itself; its singular values span five powers of ten."""
    for shape in ((24, 24), (40, 24), (48, 192), (384, 96)):
        rng = torch.Generator().manual_seed(1)
        u, s, vh = torch.linalg.svd(torch.randn(2, *shape, generator=rng), full_matrices=False)
        g = u * torch.logspace(0, -5, s.shape[-1]) @ vh
        x = g.double() / g.double().norm(dim=(-2, -1), keepdim=True)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.mT @ x + 2.0315 * x @ x.mT @ x @ x.mT @ x
        assert (
            orthogonalise(g) - x
        ).norm() < 1.2e-5 * x.norm()  # all five steps on one Gram matrix: 1e-4


def test_a_muon_step_is_the_orthogonalised_momentum_at_the_rate_of_its_shape() -> None:
    rng = torch.Generator().manual_seed(0)
    tall, wide, still = (
        torch.nn.Parameter(torch.randn(s, generator=rng)) for s in ((32, 8), (8, 32), (4, 4))
    )
    before = [p.detach().clone() for p in (tall, wide, still)]
    for p in (tall, wide):
        p.grad = torch.randn(p.shape, generator=rng)
    muon = Muon([tall, wide, still], lr=0.1)
    muon.step()
    for p, old, scale in zip((tall, wide), before, (2.0, 1.0)):  # sqrt(max(1, 32 / 8)) and 1
        expected = (
            old - 0.1 * scale * orthogonalise(p.grad[None])[0]
        )  # Nesterov's first step points along the gradient
        torch.testing.assert_close(p.detach(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(still, before[2])
    assert list(muon.state) == [tall, wide]
    after = tall.detach().clone()
    tall.grad = torch.zeros_like(tall)
    muon.step()
    assert ((tall.detach() - after) * (after - before[0])).sum() > 0, (
        "momentum goes on without a gradient"
    )
