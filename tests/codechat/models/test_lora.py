"""LoRA: only adapters learn, merging is exact, loops resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import resume_contract, weights
from random_models import IDS, made, moved, randomise

from codechat import grpo, preference, reinforce
from codechat.core import config
from codechat.core.errors import CheckpointError, ConfigError
from codechat.formats import peft_format
from codechat.models import loading, lora
from codechat.models.config import LORA_CHOSEN, LORA_TARGETS, GPTConfig
from codechat.models.fast import head
from codechat.models.fast.functions import adapted_linear
from codechat.models.gpt import GPT
from codechat.runs.run import Run


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> GPT:
    """Its head is frozen: the slope of that weight is not computed."""
    monkeypatch.setattr(head, "_add_product", None)
    return lora.attach(made(), 3, 6.0, LORA_TARGETS)


def trained(model: GPT) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def test_it_starts_from_the_model_as_it_is(adapted: GPT) -> None:
    torch.testing.assert_close(adapted(IDS), made()(IDS))


def test_each_adapted_matrix_has_two_narrow_ones_that_train(adapted: GPT) -> None:
    assert len(trained(adapted)) == 2 * 2 * 5
    assert all(3 in p.shape for p in trained(adapted))


def test_a_step_trains_the_adapters_only(adapted: GPT) -> None:
    before = adapted(IDS)
    frozen = {n: p.clone() for n, p in adapted.named_parameters() if not p.requires_grad}
    adapted.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    torch.optim.SGD(trained(adapted), lr=1.0).step()
    assert all(torch.equal(p, frozen[n]) for n, p in adapted.named_parameters() if n in frozen)
    assert (adapted(IDS) - before).abs().max() > 1e-3


def test_logprobs_have_gradients_too(adapted: GPT) -> None:
    adapted.token_logprobs(IDS[:, :-1], IDS[:, 1:])[0].sum().backward()
    assert all(p.grad is not None for p in trained(adapted))


def test_an_adapted_layer_is_the_formula() -> None:
    """W x + (alpha / r) B A x"""
    model = moved(lora.attach(made(), 2, 8.0, ("qkv", "down")))
    layer = model.blocks[0].attn.qkv
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    expected = x @ layer.base.weight.T + 4.0 * (x @ layer.a.T) @ layer.b.T
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("learns_x", [True, False])
def test_the_gradients_of_an_adapted_layer_are_those_of_finite_differences(learns_x: bool) -> None:
    rng = torch.Generator().manual_seed(5)
    x, weight, bias, a, b = (
        torch.randn(shape, generator=rng, dtype=torch.float64)
        for shape in ((2, 3, 4), (6, 4), (6,), (2, 4), (6, 2))
    )
    x.requires_grad_(learns_x)
    a.requires_grad_()
    b.requires_grad_()
    y = adapted_linear(x, weight, bias, a, b, 0.5)
    torch.testing.assert_close(y, x @ weight.T + bias + 0.5 * x @ a.T @ b.T)
    assert torch.autograd.gradcheck(adapted_linear, (x, weight, bias, a, b, 0.5))


def test_merging_leaves_a_plain_model_of_the_same_logits() -> None:
    """Its matrices are W + (alpha / r) B A."""
    model = moved(lora.attach(made(), 2, 8.0, ("qkv", "down")))
    plain = lora.merged(model)
    assert type(plain) is GPT
    assert plain.state_dict().keys() == made().state_dict().keys()
    torch.testing.assert_close(plain(IDS), model(IDS), atol=1e-5, rtol=1e-5)
    # only the adapted matrices are copies
    assert plain.wte.weight.data_ptr() == model.wte.weight.data_ptr()
    assert lora.merged(plain) is plain


def test_adapters_of_another_rank_raise() -> None:
    with pytest.raises(CheckpointError):
        lora.load(lora.attach(made(), 4), lora.adapters(lora.attach(made(), 2)))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"mlp": "swiglu", "n_kv_head": 1, "qkv_bias": True},
        {"tied": False},
        {"attention": "mla"},
    ],
)
def test_frozen_matrices_in_bfloat16_give_the_products_of_autocast(shape: dict[str, Any]) -> None:
    """Bit for bit: autocast rounds a float32 matrix to bfloat16 in every product."""
    cfg = GPTConfig(depth=2, n_embd=64, n_head=2, block_size=32, vocab_size=300, **shape)
    ids = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = lora.hold_matrices_in(randomise(GPT(cfg)), dtype)
        moved(lora.attach(model, 3, 6.0, LORA_CHOSEN)).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
            loss = model.loss(ids, ids)
        loss.backward()
        learned = [p.grad for p in model.parameters() if p.requires_grad]
        found.append([logits, loss, *learned])
    whole, half = found
    assert all(torch.equal(a, b) for a, b in zip(whole, half, strict=True))
    assert model.blocks[0].attn.out.base.weight.dtype == torch.bfloat16
    assert model.wte.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "rank, alpha, targets",
    [(-1, 16.0, ("qkv",)), (2, 0.0, ("qkv",)), (2, 16.0, ("q",)), (2, 16.0, ())],
)
def test_adapters_that_cannot_be_raise(rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        grpo.GRPOConfig(task="toy", lora_rank=rank, lora_alpha=alpha, lora_targets=targets)


@pytest.fixture
def started(home: Path) -> Run:
    """The run `start`, of one step on every weight."""
    first = dict(max_steps=1, diagnose_groups=0, run_name="start")
    toy = config.resolve(
        reinforce.ReinforceConfig, "toy", overrides=first, presets=reinforce.RUN_PRESETS
    )
    return reinforce.train(toy)


def moved_matrices(start: Run, end: Run) -> set[str]:
    """The kinds of matrices that differ."""
    before = weights(start)
    after = weights(end)
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    return {name.removesuffix(".weight").rpartition(".")[2] for name in moved}


@pytest.mark.parametrize(
    "loop, cls, more",
    [
        pytest.param(
            reinforce,
            reinforce.ReinforceConfig,
            dict(diagnose_groups=0),
            marks=pytest.mark.slow,
            id="reinforce",
        ),
        pytest.param(grpo, grpo.GRPOConfig, dict(diagnose_groups=0), id="grpo"),
        pytest.param(
            preference,
            preference.PreferenceConfig,
            dict(sample_groups=8),
            marks=pytest.mark.slow,
            id="preference",
        ),
    ],
)
def test_a_loop_with_adapters_resumes_bitwise_and_leaves_a_plain_model(
    loop: Any, cls: type[config.Settings], more: dict[str, int], started: Run, home: Path
) -> None:
    adapters = dict(
        max_steps=4, save_every=2, lora_rank=2, lora_targets=("qkv", "up"), init_from="start"
    )
    cfg = config.resolve(cls, "toy", overrides=adapters | more, presets=loop.RUN_PRESETS)
    resume_contract(cfg, 2)
    whole = Run.open("whole")
    assert moved_matrices(started, whole) == {"qkv", "up"}
    # the start and the adapter are the trained model
    peft_format.save(*peft_format.of_checkpoint("whole"), home / "adapter")
    again = peft_format.load(loading.load_model("start").model, home / "adapter").state_dict()
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(again[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_run_without_adapters_has_none_to_export(started: Run) -> None:
    with pytest.raises(CheckpointError):
        peft_format.of_checkpoint("start")
