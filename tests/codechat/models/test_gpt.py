"""The model: counts, causality, padding, packing, initialisation, its options against their
definitions; and what of a training step is compiled (`tests/codechat/gpu` counts graphs and
waits)."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_gpu import as_on_a_gpu
from random_models import randomise

from codechat.core.errors import ConfigError
from codechat.data.conversations import packed_mask
from codechat.distributed import hardware
from codechat.models import gpt
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.fast import device
from codechat.models.gpt import GPT
from codechat_lab.instruments.step_memory import Tape

OPTIONS = [
    dict(),
    dict(pos="learned", mlp="gelu"),
    dict(n_kv_head=2, qkv_bias=True),
    dict(n_kv_head=1, qk_norm=True, mlp="swiglu", mlp_width=40, tied=False),
    dict(vocab_size=128, n_tags=0, qk_norm=True, qkv_bias=True, pos="learned"),
    dict(
        n_embd=30,
        head_width=20,
        n_kv_head=2,
        qkv_bias=True,
        rows=101,
        rope_scaling=(4.0, 1.0, 4.0, 16),
    ),
    dict(attention="mla"),
    dict(
        attention="mla",
        kv_rank=12,
        q_rank=10,
        rope_width=6,
        head_width=10,
        mlp="swiglu",
        rope_scaling=(4.0, 1.0, 4.0, 16),
    ),
]


def config(**options: Any) -> GPTConfig:
    return GPTConfig(**(dict(depth=2, n_embd=32, n_head=4, block_size=24, vocab_size=90) | options))


def random_model(**options: Any) -> GPT:
    return randomise(GPT(config(**options))).train()


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(90, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: GPT, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_parameter_count_equals_the_real_one() -> None:
    for cfg in (
        *(config(**options) for options in OPTIONS),
        *(GPTConfig(**shape) for shape in PRESETS.values()),
    ):
        with torch.device("meta"):
            model = GPT(cfg)
        assert model.cfg.n_params == sum(p.numel() for p in model.parameters())


def test_flops_against_a_count_by_hand() -> None:
    """Every matrix product of depth 2, width 8, two heads on one key head, 64 ids, 10 tokens."""
    cfg = config(n_embd=8, n_head=2, n_kv_head=1, vocab_size=50)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 8 * 32 + 32 * 8  # query, key and value, out, up, down
    scores_and_sums = 10 * 8 + 10 * 8  # each token against 10 keys, then 10 values, over all heads
    forward = 2 * (2 * (block + scores_and_sums) + 64 * 8)
    assert cfg.flops_per_token(10) == 3 * forward


def test_flops_of_latent_attention_against_a_count_by_hand() -> None:
    """Depth 2, width 8, two heads of 4 and 2 rotated numbers, latents of 6, 64 ids, 10 tokens."""
    cfg = config(n_embd=8, n_head=2, vocab_size=50, attention="mla", kv_rank=6, rope_width=2)
    block = (
        8 * 2 * 6 + 8 * (6 + 2) + 6 * 2 * 2 * 4 + 8 * 8 + 8 * 32 + 32 * 8
    )  # q, kv_a, kv_b, out, up, down
    scores_and_sums = 10 * 2 * (4 + 2) + 10 * 2 * 4
    assert cfg.flops_per_token(10) == 3 * 2 * (2 * (block + scores_and_sums) + 64 * 8)


@pytest.mark.parametrize(
    "settings, named",
    [
        (dict(n_kv_head=2), "n_kv_head 2"),
        (dict(qk_norm=True), "qk_norm True"),
        (dict(qkv_bias=True), "qkv_bias True"),
        (dict(pos="learned"), "pos learned"),
        (dict(rope_width=3), "rope_width 3"),
        (dict(n_embd=24, n_head=4), "rope_width 3"),
        (dict(kv_rank=0), "kv_rank"),
        (dict(attention="mha", kv_rank=8), "attention mha with kv_rank 8"),
        (dict(attention="mha", q_rank=8), "attention mha with q_rank 8"),
        (dict(attention="mha", rope_width=8), "attention mha with rope_width 8"),
    ],
    ids=str,
)
def test_what_latent_attention_does_not_have_is_refused_by_name(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        config(**{"attention": "mla"} | settings)


def test_impossible_shapes_raise() -> None:
    for change in (
        *(
            dict(depth=0),
            dict(n_embd=30),
            dict(n_kv_head=3),
            dict(n_embd=12),
            dict(rows=95),
            dict(head_width=7),
        ),
        *(dict(rope_scaling=(0.5, 1.0, 4.0, 8192)), dict(rope_scaling=(2.0, 4.0, 4.0, 8192))),
    ):
        with pytest.raises(ConfigError):
            config(**change)
    with pytest.raises(ConfigError):
        GPT(config())(random_ids(1, 25))  # beyond the block


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_a_token_sees_the_past_of_its_document(options: dict[str, Any]) -> None:
    model = random_model(**options)
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 90
    before = model(ids)
    after = model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-5, rtol=1e-5)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3, (
        "every later token sees the change"
    )
    ids = random_ids(1, 15)
    docs = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3 + [-1] * 2])
    positions = torch.cat([torch.arange(n) for n in (4, 6, 3, 2)])[None]
    packed = model(ids, positions=positions, mask=packed_mask(docs))
    for start, end in ((0, 4), (4, 10), (10, 13)):
        torch.testing.assert_close(
            packed[:, start:end], model(ids[:, start:end]), atol=1e-5, rtol=1e-5
        )
    assert packed.isfinite().all()


def test_right_padding_changes_neither_loss_nor_gradient() -> None:
    model = random_model()
    ids = random_ids(3, 9)
    targets = random_ids(3, 9, seed=1)
    targets[0, :4] = -100
    padded, padded_targets = (F.pad(x, (0, 6), value=v) for x, v in ((ids, 17), (targets, -100)))
    short = model.loss(ids, targets)
    long = model.loss(padded, padded_targets)
    plain = F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten()
    )  # which computes every state
    found = [(loss, gradients(model, loss)) for loss in (short, long, plain)]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)
    whole = [
        model.loss(ids, ids, reduction="sum", every=every) for every in (False, True)
    ]  # none is looked up
    assert torch.equal(*whole)
    assert all(map(torch.equal, *(gradients(model, loss) for loss in whole)))


def rotated(y: torch.Tensor) -> torch.Tensor:
    """The rotation of complex numbers, whose parts are the halves of y (T, E)."""
    half = y.shape[1] // 2
    angle = torch.arange(len(y))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(y[:, :half], y[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).mT.flatten(1)


@torch.no_grad()
def test_attention_by_hand() -> None:
    """One head of a block: softmax(q k / sqrt(E)) v over the past, as its output projection
    reads it."""
    model = random_model(depth=1, n_head=1, n_embd=8)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    model.blocks[0].attn.out.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    model.blocks[0].attn_norm = torch.nn.Identity()
    model.wte.weight.data[:5] = x
    model(torch.arange(5)[None])
    q, k, v = (x @ model.blocks[0].attn.qkv.weight.T).split(8, dim=-1)
    scores = (rotated(q) @ rotated(k).T / math.sqrt(8)).masked_fill(
        torch.ones(5, 5).triu(1).bool(), -math.inf
    )
    torch.testing.assert_close(seen[0], scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_rank", [None, 5])
@torch.no_grad()
def test_latent_attention_by_hand(q_rank: int | None) -> None:
    """arXiv:2405.04434, eq. 9 to 19, head by head: keys and values of one normalised latent,
    one rotated key for both."""
    shape = dict(
        depth=1, n_head=2, n_embd=8, attention="mla", kv_rank=6, rope_width=2, q_rank=q_rank
    )
    model = random_model(**shape)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    attn = model.blocks[0].attn
    attn.out.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    model.blocks[0].attn_norm = torch.nn.Identity()
    model.wte.weight.data[:5] = x
    model(torch.arange(5)[None])
    weights = {name: p for name, p in attn.named_parameters()}
    if q_rank:
        low = F.rms_norm(x @ weights["q_a.weight"].T, (q_rank,), weights["q_norm.weight"], 1e-5)
        queries = low @ weights["q_b.weight"].T
    else:
        queries = x @ weights["q.weight"].T
    down = x @ weights["kv_a.weight"].T
    latent = F.rms_norm(down[:, :6], (6,), weights["kv_norm.weight"], 1e-5)
    k_turned = rotated(down[:, 6:])
    later = torch.ones(5, 5).triu(1).bool()
    heads = []
    for q, up in zip(queries.split(4 + 2, dim=1), weights["kv_b.weight"].split(2 * 4), strict=True):
        k, v = (latent @ up.T).split(4, dim=1)
        scores = q[:, :4] @ k.T + rotated(q[:, 4:]) @ k_turned.T
        heads.append((scores / math.sqrt(4 + 2)).masked_fill(later, -math.inf).softmax(-1) @ v)
    torch.testing.assert_close(seen[0], torch.cat(heads, dim=1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_feed_forward_by_hand() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("relu2", "gelu", "swiglu"):
        mlp = random_model(mlp=kind).blocks[0].mlp
        up = x @ mlp.up.weight.T
        gate = x @ mlp.gate.weight.T if kind == "swiglu" else up
        hidden = dict(
            relu2=torch.where(up > 0, up * up, 0.0),
            gelu=up * 0.5 * (1 + torch.erf(up / math.sqrt(2))),
        )
        hidden["swiglu"] = up * gate / (1 + torch.exp(-gate))
        torch.testing.assert_close(mlp(x), hidden[kind] @ mlp.down.weight.T, atol=1e-5, rtol=1e-5)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    model = GPT(config(), seed=3)
    torch.randn(10)
    deep = dict(GPT(config(depth=5), seed=3).named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, deep[name], atol=0, rtol=0)
    assert not torch.equal(GPT(config(), seed=4).wte.weight, model.wte.weight)
    assert not torch.equal(deep["blocks.0.mlp.up.weight"], deep["blocks.1.mlp.up.weight"])


@torch.no_grad()
def test_a_new_model_is_a_bigram_of_its_embedding_and_nearly_uniform() -> None:
    model = GPT(config())
    ids = random_ids(2, 10)
    x = model.wte(ids)
    torch.testing.assert_close(
        model(ids),
        F.rms_norm(x, (32,), eps=1e-5) @ model.wte.weight.T,
        atol=1e-5,
        rtol=1e-5,
    )
    assert float(model.loss(ids, random_ids(2, 10, seed=1))) == pytest.approx(
        math.log(128), abs=0.2
    )


def test_recomputing_gives_the_same_gradients_for_less_memory() -> None:
    more = dict(depth=4, block_size=128)
    plain = random_model(**more)
    ids = random_ids(2, 100)
    blocks = GPT(config(recompute="blocks", **more))
    blocks.load_state_dict(plain.state_dict())
    theirs, ours = (gradients(model, model.loss(ids, ids)) for model in (plain, blocks))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    held = []  # bytes that wait for the backward pass, the weights not counted
    for model in (blocks, plain):
        with Tape() as tape:
            loss = model.loss(ids, ids)
            held.append(tape.now if loss.requires_grad else 0)
    assert held[0] < 0.7 * held[1]


@pytest.mark.parametrize("cpu_kinds", [("cpu",), ()])
@torch.no_grad()
def test_losses_and_logprobs_are_those_of_the_logits(
    cpu_kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device, "CPU_KINDS", cpu_kinds
    )  # elsewhere the last block computes every token
    model = random_model()
    ids = random_ids(2, 6)
    targets = random_ids(2, 6, seed=1)
    targets[0, :3] = -100
    each = model.loss(ids, targets, reduction="none")
    assert each.shape == (2, 6)
    assert (each[0, :3] == 0).all()
    torch.testing.assert_close(each.sum(), model.loss(ids, targets, reduction="sum"))
    torch.testing.assert_close(each.sum() / 9, model.loss(ids, targets))
    model.wte.weight.data[model.cfg.n_ids :] *= (
        50  # padding rows with huge logits must not take any mass
    )
    for temperature in (1.0, 0.7):
        logprobs, entropy = model.token_logprobs(ids, targets, temperature=temperature)
        p = (model(ids)[..., : model.cfg.n_ids].double() / temperature).softmax(-1)
        expected = p.log().gather(-1, targets.clamp(min=0)[..., None])[..., 0].float()
        counts = targets >= 0
        torch.testing.assert_close(logprobs, expected * counts, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            entropy,
            -(p * p.log()).sum(-1).float() * counts,
            atol=1e-5,
            rtol=1e-5,
        )


# ---- gradients that are written out for a CPU
@pytest.mark.parametrize("weight", [(24,), (3, 1, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_slopes_of_its_formula(
    weight: tuple[int, ...], dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(0)
    x = (
        (torch.randn(2, 3, 7, 24, generator=rng) * torch.logspace(-3, 3, 7)[:, None])
        .to(dtype)
        .requires_grad_()
    )
    w = torch.randn(weight, generator=rng).requires_grad_()
    up = torch.randn(x.shape, generator=rng).to(dtype)
    found = gpt.rms_norm(x, w, 1e-5)
    with as_on_a_gpu():
        want = gpt.rms_norm(x, w, 1e-5)
    assert found.grad_fn is not None
    assert found.dtype == dtype
    assert torch.equal(found, want)
    (dx, dw), (dx_, dw_) = (torch.autograd.grad(y, (x, w), up) for y in (found, want))
    near = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-3)
    scale = dx_.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(dx / scale, dx_ / scale, **near)
    torch.testing.assert_close(dw, dw_, **near)


def test_rms_norm_of_frozen_weights_and_of_weights_in_bfloat16_as_shards_are_gathered() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    frozen = torch.ones(8)
    w = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    gpt.rms_norm(x, frozen, 1e-5).sum().backward()
    assert frozen.grad is None and (x.grad * x).sum(-1).abs().max() < 1e-4, (
        "a norm does not see how long x is"
    )
    gpt.rms_norm(x, w, 1e-5).square().sum().backward()
    assert w.grad.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert w.grad.abs().min() > 0


def test_squared_relu_is_bit_for_bit_its_formula() -> None:
    x = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).requires_grad_()
    up = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = gpt.squared_relu(x)
    with as_on_a_gpu():
        want = gpt.squared_relu(x)
    assert torch.equal(found, want)
    assert torch.equal(found, x.clamp(min=0) ** 2)
    assert torch.equal(*(torch.autograd.grad(y, x, up)[0] for y in (found, want)))


# ---- compiled


SHAPE = GPTConfig(depth=12, n_embd=32, n_head=2, block_size=256, vocab_size=300)


def test_blocks_are_compiled_on_a_gpu_where_that_is_wanted_and_nothing_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: seen.append(self))
    cpu = GPT(SHAPE)
    gpu = GPT(SHAPE)
    monkeypatch.setattr(gpu, "head_weight", lambda: SimpleNamespace(device=torch.device("cuda")))
    for model, wanted, expected in (
        (gpu, True, list(gpu.blocks)),
        (gpu, False, []),
        (cpu, True, []),
    ):
        seen.clear()
        hardware.compile_blocks(model, wanted)
        assert seen == expected
