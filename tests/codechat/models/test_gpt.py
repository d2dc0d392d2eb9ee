"""The model: counts, causality, padding, packing, initialisation, its options against their
definitions; and what of a training step is compiled (`tests/codechat/gpu` counts graphs and
waits)."""

import math
from dataclasses import replace
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
from codechat.models.fast import device, fused
from codechat.models.gpt import GPT
from codechat.text import chat
from codechat_lab.instruments.step_memory import Tape

SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, block_size=24, vocab_size=90)
LATENT = replace(SHAPE, attention="mla")
SCALED = (4.0, 1.0, 4.0, 16)
SHAPES = {
    "heads": SHAPE,
    "learned positions": replace(SHAPE, pos="learned", mlp="gelu"),
    "grouped queries": replace(SHAPE, n_kv_head=2, qkv_bias=True),
    "one key head": replace(
        SHAPE, n_kv_head=1, qk_norm=True, mlp="swiglu", mlp_width=40, tied=False
    ),
    "no tags": replace(SHAPE, vocab_size=128, n_tags=0, qk_norm=True, qkv_bias=True, pos="learned"),
    "odd widths": replace(
        SHAPE,
        n_embd=30,
        head_width=20,
        n_kv_head=2,
        qkv_bias=True,
        rows=101,
        rope_scaling=SCALED,
    ),
    "latent": LATENT,
    "latent of every rank": replace(
        LATENT,
        kv_rank=12,
        q_rank=10,
        rope_width=6,
        head_width=10,
        mlp="swiglu",
        rope_scaling=SCALED,
    ),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def random_model(shape: GPTConfig = SHAPE) -> GPT:
    return randomise(GPT(shape)).train()


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(90, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: GPT, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


PRESET_SHAPES = {name: GPTConfig(**settings) for name, settings in PRESETS.items()}


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), *PRESET_SHAPES.values()], ids=[*SHAPES, *PRESET_SHAPES]
)
def test_parameter_count_equals_the_real_one(shape: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(shape)
    assert model.cfg.n_params == sum(p.numel() for p in model.parameters())


def test_a_model_has_rows_for_all_chat_tags_unless_it_says_otherwise() -> None:
    assert GPTConfig.n_tags == chat.N_TAGS


def test_flops_against_a_count_by_hand() -> None:
    """Every matrix product of depth 2, width 8, two heads on one key head, 64 ids, 10 tokens."""
    cfg = replace(SHAPE, n_embd=8, n_head=2, n_kv_head=1, vocab_size=50)
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 8 * 32 + 32 * 8  # query, key and value, out, up, down
    scores_and_sums = 10 * 8 + 10 * 8  # each token against 10 keys, then 10 values, over all heads
    forward = 2 * (2 * (block + scores_and_sums) + 64 * 8)
    assert cfg.flops_per_token(10) == 3 * forward


def test_a_frozen_matrix_has_no_gradient_to_count() -> None:
    cfg = replace(SHAPE, n_embd=8, n_head=2, n_kv_head=1, vocab_size=50)
    of_weight_gradients = 2 * cfg.matmul_params
    assert cfg.flops_per_token(10, adapters=7) == cfg.flops_per_token(10) - of_weight_gradients + 42


def test_flops_of_latent_attention_against_a_count_by_hand() -> None:
    """Depth 2, width 8, two heads of 4 and 2 rotated numbers, latents of 6, 64 ids, 10 tokens."""
    cfg = replace(LATENT, n_embd=8, n_head=2, vocab_size=50, kv_rank=6, rope_width=2)
    queries = 8 * 2 * 6
    keys_and_values = 8 * (6 + 2) + 6 * 2 * 2 * 4  # kv_a, kv_b
    block = queries + keys_and_values + 8 * 8 + 8 * 32 + 32 * 8  # ..., out, up, down
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
        replace(SHAPE, **{"attention": "mla"} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        dict(depth=0),
        dict(n_embd=30),
        dict(n_kv_head=3),
        dict(n_embd=12),
        dict(rows=95),
        dict(head_width=7),
        dict(rope_scaling=(0.5, 1.0, 4.0, 8192)),
        dict(rope_scaling=(2.0, 4.0, 4.0, 8192)),
    ],
    ids=str,
)
def test_impossible_shapes_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(SHAPE, **settings)


def test_a_text_longer_than_the_block_raises() -> None:
    with pytest.raises(ConfigError):
        GPT(SHAPE)(random_ids(1, 25))


@every_shape
@torch.no_grad()
def test_a_token_sees_every_earlier_one_and_no_later(shape: GPTConfig) -> None:
    model = random_model(shape)
    ids = random_ids(2, 12)
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 90
    before = model(ids)
    after = model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-5, rtol=1e-5)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3, (
        "every later token sees the change"
    )


@every_shape
@torch.no_grad()
def test_a_token_sees_its_own_document_alone(shape: GPTConfig) -> None:
    model = random_model(shape)
    ids = random_ids(1, 15)
    docs = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3 + [-1] * 2])
    positions = torch.cat([torch.arange(n) for n in (4, 6, 3, 2)])[None]
    packed = model(ids, positions=positions, mask=packed_mask(docs))
    for start, end in ((0, 4), (4, 10), (10, 13)):
        alone = model(ids[:, start:end])
        torch.testing.assert_close(packed[:, start:end], alone, atol=1e-5, rtol=1e-5)
    assert packed.isfinite().all()


def test_right_padding_changes_neither_loss_nor_gradient() -> None:
    model = random_model()
    ids = random_ids(3, 9)
    targets = random_ids(3, 9, seed=1)
    targets[0, :4] = -100
    short = model.loss(ids, targets)
    long = model.loss(F.pad(ids, (0, 6), value=17), F.pad(targets, (0, 6), value=-100))
    # of the logits of every place
    plain = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    expected = gradients(model, short)
    for other in (long, plain):
        torch.testing.assert_close(other, short)
        torch.testing.assert_close(gradients(model, other), expected)


@pytest.mark.parametrize(
    ("n", "rows"),
    [
        (1, 64),
        (63, 64),
        (64, 64),
        (65, 128),
        (199, 200),
    ],
)
def test_few_sizes_of_products_change_neither_losses_nor_gradients(n: int, rows: int) -> None:
    """The last MLP takes a multiple of 64 of the 200 tokens, or all, whatever has a target."""
    model = random_model()
    ids = random_ids(10, 20)
    drawn = torch.Generator().manual_seed(n)
    chosen = torch.randperm(200, generator=drawn)[:n]
    targets = torch.full((200,), -100)
    targets[chosen] = 7
    sizes = list[int]()
    model.blocks[-1].mlp.register_forward_hook(lambda mlp, args, out: sizes.append(len(out)))
    found = model.loss(ids, targets.view(10, 20))
    logprobs, _ = model.token_logprobs(ids, targets.view(10, 20))
    assert sizes == [rows, rows]
    logits = model(ids).flatten(0, 1)
    plain = F.cross_entropy(logits, targets)
    torch.testing.assert_close(found, plain)
    expected = gradients(model, plain)
    gained = gradients(model, found)
    torch.testing.assert_close(gained, expected)
    whole = logits[:, : model.cfg.n_ids].log_softmax(-1)
    right = targets == 7
    alone = whole[:, 7] * right
    torch.testing.assert_close(logprobs.flatten(), alone)


def test_a_loss_of_every_token_is_the_same_without_looking_targets_up() -> None:
    model = random_model()
    ids = random_ids(3, 9)
    looked_up = model.loss(ids, ids, reduction="sum", every=False)
    whole = model.loss(ids, ids, reduction="sum", every=True)
    assert torch.equal(looked_up, whole)
    assert all(map(torch.equal, gradients(model, looked_up), gradients(model, whole)))


def rotated(y: torch.Tensor) -> torch.Tensor:
    """The rotation of complex numbers, whose parts are the halves of y (T, E)."""
    half = y.shape[1] // 2
    angle = torch.arange(len(y))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(y[:, :half], y[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).mT.flatten(1)


def attended(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """What the output projection of the first block reads, where x (T, D) are the block's
    normalised inputs."""
    seen: list[torch.Tensor] = []
    block = model.blocks[0]
    block.attn.out.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    block.attn_norm = torch.nn.Identity()
    model.wte.weight.data[: len(x)] = x
    model(torch.arange(len(x))[None])
    return seen[0]


LATER = torch.ones(5, 5).triu(1).bool()  # what none of five tokens sees


@torch.no_grad()
def test_attention_by_hand() -> None:
    """One head of a block: softmax(q k / sqrt(E)) v over the past, as its output projection
    reads it."""
    model = random_model(replace(SHAPE, depth=1, n_head=1, n_embd=8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    found = attended(model, x)
    q, k, v = (x @ model.blocks[0].attn.qkv.weight.T).split(8, dim=-1)
    scores = rotated(q) @ rotated(k).T / math.sqrt(8)
    expected = scores.masked_fill(LATER, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("q_rank", [None, 5])
@torch.no_grad()
def test_latent_attention_by_hand(q_rank: int | None) -> None:
    """arXiv:2405.04434, eq. 9 to 19, head by head: keys and values of one normalised latent,
    one rotated key for both."""
    shape = replace(LATENT, depth=1, n_head=2, n_embd=8, kv_rank=6, rope_width=2, q_rank=q_rank)
    model = random_model(shape)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    found = attended(model, x)
    weights = dict(model.blocks[0].attn.named_parameters())
    if q_rank:
        low = F.rms_norm(x @ weights["q_a.weight"].T, (q_rank,), weights["q_norm.weight"], 1e-5)
        queries = low @ weights["q_b.weight"].T
    else:
        queries = x @ weights["q.weight"].T
    down = x @ weights["kv_a.weight"].T
    latent = F.rms_norm(down[:, :6], (6,), weights["kv_norm.weight"], 1e-5)
    k_turned = rotated(down[:, 6:])
    heads = []
    for q, up in zip(queries.split(4 + 2, dim=1), weights["kv_b.weight"].split(2 * 4), strict=True):
        k, v = (latent @ up.T).split(4, dim=1)
        scores = q[:, :4] @ k.T + rotated(q[:, 4:]) @ k_turned.T
        heads.append((scores / math.sqrt(4 + 2)).masked_fill(LATER, -math.inf).softmax(-1) @ v)
    torch.testing.assert_close(found, torch.cat(heads, dim=1), atol=1e-5, rtol=1e-5)


def swiglu(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return up * gate / (1 + torch.exp(-gate))


def gelu(up: torch.Tensor) -> torch.Tensor:
    return up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))


def squared_relu(up: torch.Tensor) -> torch.Tensor:
    return torch.where(up > 0, up * up, 0.0)


@pytest.mark.parametrize("kind", ["relu2", "gelu", "swiglu"])
@torch.no_grad()
def test_feed_forward_by_hand(kind: str) -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    mlp = random_model(replace(SHAPE, mlp=kind)).blocks[0].mlp
    up = x @ mlp.up.weight.T
    if kind == "swiglu":
        hidden = swiglu(up, x @ mlp.gate.weight.T)
    else:
        hidden = {"relu2": squared_relu, "gelu": gelu}[kind](up)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down.weight.T, atol=1e-5, rtol=1e-5)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    model = GPT(SHAPE, seed=3)
    torch.randn(10)
    deep = dict(GPT(replace(SHAPE, depth=5), seed=3).named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, deep[name], atol=0, rtol=0)


def test_other_seeds_and_other_names_have_other_weights() -> None:
    model = GPT(SHAPE, seed=3)
    assert not torch.equal(GPT(SHAPE, seed=4).wte.weight, model.wte.weight)
    assert not torch.equal(model.blocks[0].mlp.up.weight, model.blocks[1].mlp.up.weight)


@torch.no_grad()
def test_a_new_model_is_a_bigram_of_its_embedding() -> None:
    model = GPT(SHAPE)
    ids = random_ids(2, 10)
    bigram = F.rms_norm(model.wte(ids), (32,), eps=1e-5) @ model.wte.weight.T
    torch.testing.assert_close(model(ids), bigram, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_new_model_is_nearly_uniform() -> None:
    loss = GPT(SHAPE).loss(random_ids(2, 10), random_ids(2, 10, seed=1))
    assert float(loss) == pytest.approx(math.log(128), abs=0.2)


DEEP = replace(SHAPE, depth=4, block_size=128)


def recomputing(model: GPT) -> GPT:
    """The same weights."""
    other = GPT(replace(model.cfg, recompute="blocks"))
    other.load_state_dict(model.state_dict())
    return other


def test_recomputing_gives_the_same_gradients() -> None:
    plain = random_model(DEEP)
    blocks = recomputing(plain)
    ids = random_ids(2, 100)
    theirs = gradients(plain, plain.loss(ids, ids))
    ours = gradients(blocks, blocks.loss(ids, ids))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def bytes_held(model: GPT) -> int:
    """Those that wait for the backward pass, the weights not counted."""
    ids = random_ids(2, 100)
    with Tape() as tape:
        loss = model.loss(ids, ids)
        held = tape.now
    assert loss.requires_grad  # and so keeps its graph until here
    return held


def test_recomputing_takes_less_memory() -> None:
    plain = random_model(DEEP)
    assert bytes_held(recomputing(plain)) < 0.7 * bytes_held(plain)


# where no tensor counts as one on a CPU, the last block computes every token
on_each_device = pytest.mark.parametrize("cpu_kinds", [("cpu",), ()])


@pytest.fixture
def targets() -> torch.Tensor:
    """(2, 6), three of them holes."""
    some = random_ids(2, 6, seed=1)
    some[0, :3] = -100
    return some


@on_each_device
@torch.no_grad()
def test_reduced_losses_are_the_sum_and_the_mean_of_each(
    cpu_kinds: tuple[str, ...], targets: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CPU_KINDS", cpu_kinds)
    model = random_model()
    ids = random_ids(2, 6)
    each = model.loss(ids, targets, reduction="none")
    assert each.shape == (2, 6)
    assert (each[0, :3] == 0).all()
    torch.testing.assert_close(each.sum(), model.loss(ids, targets, reduction="sum"))
    torch.testing.assert_close(each.sum() / 9, model.loss(ids, targets))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@on_each_device
@torch.no_grad()
def test_logprobs_and_entropies_are_those_of_the_logits(
    cpu_kinds: tuple[str, ...],
    temperature: float,
    targets: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "CPU_KINDS", cpu_kinds)
    model = random_model()
    ids = random_ids(2, 6)
    # padding rows with huge logits must not take any mass
    model.wte.weight.data[model.cfg.n_ids :] *= 50
    logprobs, entropy = model.token_logprobs(ids, targets, temperature=temperature)
    p = (model(ids)[..., : model.cfg.n_ids].double() / temperature).softmax(-1)
    expected = p.log().gather(-1, targets.clamp(min=0)[..., None])[..., 0].float()
    expected_entropy = -(p * p.log()).sum(-1).float()
    counts = targets >= 0
    torch.testing.assert_close(logprobs, expected * counts, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy * counts, atol=1e-5, rtol=1e-5)


# ---- gradients that are written out for a CPU
@pytest.mark.parametrize("weight", [(24,), (3, 1, 24)])
@pytest.mark.parametrize(
    "dtype, rtol, atol", [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 2e-2, 1e-3)]
)
def test_rms_norm_has_the_slopes_of_its_formula(
    weight: tuple[int, ...], dtype: torch.dtype, rtol: float, atol: float
) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.logspace(-3, 3, 7)[:, None]
    x = (torch.randn(2, 3, 7, 24, generator=rng) * lengths).to(dtype).requires_grad_()
    w = torch.randn(weight, generator=rng).requires_grad_()
    up = torch.randn(x.shape, generator=rng).to(dtype)
    found = gpt.rms_norm(x, w, 1e-5)
    with as_on_a_gpu():
        want = gpt.rms_norm(x, w, 1e-5)
    assert found.grad_fn is not None
    assert found.dtype == dtype
    assert torch.equal(found, want)
    found_dx, found_dw = torch.autograd.grad(found, (x, w), up)
    want_dx, want_dw = torch.autograd.grad(want, (x, w), up)
    scale = want_dx.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(found_dx / scale, want_dx / scale, rtol=rtol, atol=atol)
    torch.testing.assert_close(found_dw, want_dw, rtol=rtol, atol=atol)


def test_rms_norm_of_frozen_weights() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    frozen = torch.ones(8)
    gpt.rms_norm(x, frozen, 1e-5).sum().backward()
    assert frozen.grad is None
    assert (x.grad * x).sum(-1).abs().max() < 1e-4, "a norm does not see how long x is"


def test_rms_norm_of_weights_in_bfloat16_as_shards_are_gathered() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    w = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
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
    (found_slope,) = torch.autograd.grad(found, x, up)
    (want_slope,) = torch.autograd.grad(want, x, up)
    assert torch.equal(found_slope, want_slope)


# ---- compiled
@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: seen.append(self))
    return seen


@pytest.mark.parametrize("wanted", [True, False])
def test_blocks_are_compiled_on_a_gpu_where_that_is_wanted(
    wanted: bool, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = GPT(SHAPE)
    monkeypatch.setattr(model, "head_weight", lambda: SimpleNamespace(device=torch.device("cuda")))
    hardware.compile_blocks(model, wanted)
    assert compiled == (list(model.blocks) if wanted else [])


def test_nothing_is_compiled_on_a_cpu(compiled: list[Any]) -> None:
    hardware.compile_blocks(GPT(SHAPE), True)
    assert compiled == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 24), (10, 24)])
def test_swiglu_has_the_values_and_slopes_of_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, those of the matrix that follows too, whose input is computed again."""
    monkeypatch.setattr(fused, "_library", lambda x, dtype: None)
    rng = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(shape, generator=rng).to(dtype).requires_grad_() for _ in range(2))
    down = torch.nn.Linear(24, 8, bias=False, dtype=dtype)
    above = torch.randn(*shape[:-1], 8, generator=rng).to(dtype)
    found = gpt.through_swiglu(down, gate, up)
    with as_on_a_gpu():
        want = gpt.through_swiglu(down, gate, up)
    assert torch.equal(found, want)
    learned = (gate, up, down.weight)
    slopes = torch.autograd.grad(found, learned, above)
    expected = torch.autograd.grad(want, learned, above)
    assert all(torch.equal(a, b) for a, b in zip(slopes, expected, strict=True))


def test_swiglu_keeps_only_its_two_inputs_for_the_backward_pass() -> None:
    gate, up = (torch.ones(64, 96, requires_grad=True) for _ in range(2))
    down = torch.nn.Linear(96, 8, bias=False)
    with Tape() as tape:
        out = gpt.through_swiglu(down, gate, up)
        assert tape.now == sum(x.untyped_storage().nbytes() for x in (gate, up, down.weight, out))
