"""What stands between the products of a training step in C: what it computes, and what it leaves
to torch."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from codechat.distributed import numerics
from codechat.models.attention import KVCache
from codechat.models.config import GPTConfig
from codechat.models.fast import functions, fused
from codechat.models.fast.attention import Pieces
from codechat.models.fast.fused import Shape, seen_tokens
from codechat.models.gpt import Attention, rope_table
from codechat.models.masks import Documents

# between two neighbours, relative
STEPS = {torch.bfloat16: 2**-8, torch.float32: 2**-23}
TOKENS = 150  # no multiple of a tile
LENGTHS = torch.tensor([40, 70, 31, 9])
DOCS = torch.stack(
    (
        torch.tensor([0, 1, 2, -1]).repeat_interleave(LENGTHS),
        torch.zeros(TOKENS, dtype=torch.long),
    )
)
IN_DOC = torch.stack(
    (
        torch.cat([torch.arange(n) for n in LENGTHS]),
        torch.arange(TOKENS),
    )
)
# in each document a prompt of 7 tokens, then completions of 11
COMPLETIONS = ((IN_DOC - 7) // 11 + 1).clamp(min=0)


@pytest.fixture(scope="module", params=STEPS, ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """That products are computed in."""
    return request.param


@pytest.fixture(scope="module")
def library(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(
        tmp_path_factory.mktemp("training"),
        "libtraining.so",
        "training_runs_here",
        "training.c",
        float32=dtype == torch.float32,
    )


@pytest.fixture
def built(
    dtype: torch.dtype, library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.dtype]:
    """The library for `dtype` alone, which this is."""
    monkeypatch.setattr(fused, "LIBRARIES", {dtype: library})
    fused.kernel.cache_clear()
    assert fused.kernel(dtype) is not None
    yield dtype
    fused.kernel.cache_clear()


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    missing = {dtype: tmp_path / "libtraining.so" for dtype in STEPS}
    monkeypatch.setattr(fused, "LIBRARIES", missing)
    fused.kernel.cache_clear()
    yield
    fused.kernel.cache_clear()


def computing(dtype: torch.dtype) -> torch.autocast:
    """Products in this dtype."""
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


def attention_of(width: int, heads: int, groups: int, normed: bool) -> Attention:
    cfg = GPTConfig(
        depth=1,
        n_embd=width * heads,
        n_head=heads,
        n_kv_head=groups,
        block_size=256,
        vocab_size=90,
        qk_norm=normed,
        qkv_bias=not normed,
    )
    layer = Attention(cfg)
    rng = torch.Generator().manual_seed(width + heads)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * (p.shape[-1] ** -0.5))
            if p.ndim == 1:
                p.mul_(3).add_(1)
    return layer


def values_of(layer: Attention, mask: Documents | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients of a weighted sum of it; float64: all is computed in it."""
    rng = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer.to(wide)
    x = torch.randn(2, TOKENS, layer.cfg.n_embd, generator=rng).to(wide).requires_grad_()
    above = torch.randn(x.shape, generator=rng)
    cos, sin = rope_table(layer.cfg, IN_DOC)
    layer.zero_grad()
    with computing(dtype):
        y = layer(x, (cos.to(wide), sin.to(wide)), mask, None)
    (y.to(wide) * above).sum().backward()
    assert x.grad is not None
    found = {"output": y.detach().to(wide), "input": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def kernel_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attention (B, T, H, E) of q over k and v (B, T, K, E), neither normed nor turned."""
    shape = Shape(q.shape[2], k.shape[2], q.shape[3], eps=1e-5)
    qkv = torch.cat((q, k, v), dim=2).flatten(2)
    y = fused.attend(qkv, shape, gains=None, rope=None, seen=seen)
    assert y is not None
    return y.unflatten(2, q.shape[2:])


MASKS = {
    "causal": None,
    "documents": Pieces(DOCS),
    "branches": Pieces(DOCS, COMPLETIONS),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("width", "heads", "groups", "normed"), [(64, 3, 3, True), (64, 4, 2, False), (128, 2, 1, True)]
)
def test_values_and_gradients_are_nearer_to_float64_than_those_of_torch_or_as_near(
    built: torch.dtype,
    width: int,
    heads: int,
    groups: int,
    normed: bool,
    mask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = attention_of(width, heads, groups, normed)
    exact = values_of(layer, MASKS[mask], torch.float64)
    calls = list[str]()
    run = fused._run_attention

    def noted(function: Any, shape: Shape, tensors: dict[str, Tensor | None]) -> None:
        calls.append(function.__name__)
        run(function, shape, tensors)

    monkeypatch.setattr(fused, "_run_attention", noted)
    ours = values_of(layer, MASKS[mask], built)
    assert calls == ["attention_forward", "attention_backward"]
    monkeypatch.setattr(fused, "attend", lambda *given, **named: None)
    plain = values_of(layer, MASKS[mask], built)
    for name, right in exact.items():
        size = right.norm()
        far = (ours[name] - right).norm() / size
        # torch's products of float32 sum in several places, these in one
        as_near = 1.15 if built == torch.bfloat16 else 1.6
        few = 4 if built == torch.bfloat16 else 16
        far_by_torch = (plain[name] - right).norm() / size
        bound = as_near * far_by_torch
        assert far < bound, name
        bound = few * STEPS[built]
        assert far < bound, name


def prompt_of(layer: Attention, new: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The outputs of so many tokens at a time, and what the cache keeps of all."""
    x = torch.randn(2, sum(new), layer.cfg.n_embd, generator=torch.Generator().manual_seed(2))
    kept = KVCache(layer.cfg, 2, sum(new))
    found = []
    for part in x.split(new, dim=1):
        T = part.shape[1]
        rope = rope_table(layer.cfg, kept.positions(T))
        with torch.inference_mode(), computing(dtype):
            found.append(layer(part, rope, kept.mask(T), partial(kept.attend, 0)))
        kept.advance(T)
    return torch.cat(found, dim=1).float(), kept.kv


@pytest.mark.parametrize(
    ("width", "heads", "groups", "normed"), [(64, 4, 2, False), (128, 2, 1, True)]
)
def test_the_first_tokens_of_a_cache_take_the_kernel_and_leave_the_same_keys(
    built: torch.dtype,
    width: int,
    heads: int,
    groups: int,
    normed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = attention_of(width, heads, groups, normed)
    calls = list[int]()
    run = fused._run_attention

    def noted(function: Any, shape: Shape, tensors: dict[str, Tensor | None]) -> None:
        qkv = tensors["qkv"]
        assert qkv is not None
        calls.append(qkv.shape[1])
        run(function, shape, tensors)

    monkeypatch.setattr(fused, "_run_attention", noted)
    ours, kept = prompt_of(layer, [40, 7, 1], built)
    assert calls == [40]
    monkeypatch.setattr(fused, "attend", lambda *given, **named: None)
    plain, kept_by_plain = prompt_of(layer, [40, 7, 1], built)
    assert torch.equal(kept, kept_by_plain)
    assert torch.equal(ours[:, 40:], plain[:, 40:])
    assert 0 < (ours - plain).norm() < 2 * STEPS[built] * plain.norm()


def gradients_of(of: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of a weighted sum of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = of(*leaves)
    above = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    y.backward(above)
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("width", [16, 192])
def test_a_norm_and_its_gradients_are_those_of_float64(built: torch.dtype, width: int) -> None:
    rng = torch.Generator().manual_seed(width)
    # no multiple of the vectors that are summed together
    x = 3 * torch.randn(2, 75, width, generator=rng)
    gain = torch.randn(width, generator=rng)

    def plain(x: Tensor, gain: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        y = fused.rms_norm(x, gain, 1e-5)
        assert y is not None
        return y

    with computing(built):
        found = gradients_of(ours, x, gain)
    for got, right in zip(found, gradients_of(plain, x.double(), gain.double()), strict=True):
        assert (got - right).abs().max() < 2e-6 * right.abs().max()


def test_a_vector_of_equal_numbers_has_no_gradient_along_itself(built: torch.dtype) -> None:
    """Its norm is 1 whatever its length."""
    x = torch.full((3, 32), 2.0, requires_grad=True)
    gain = torch.ones(32, requires_grad=True)
    with computing(built):
        y = fused.rms_norm(x, gain, 0.0)
    assert y is not None and torch.equal(y, torch.ones(3, 32))
    y.sum().backward()
    assert x.grad is not None and x.grad.abs().max() < 1e-6
    assert gain.grad is not None and torch.equal(gain.grad, torch.full((32,), 3.0))


def test_squared_relu_and_its_gradient_have_the_bits_of_torch(
    built: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(6)).to(built)
    assert fused.squared_relu(x) is not None
    ours = gradients_of(functions.squared_relu, x)
    monkeypatch.setattr(fused, "squared_relu", lambda x: None)
    for got, right in zip(ours, gradients_of(functions.squared_relu, x), strict=True):
        assert torch.equal(got, right)


def gate_up_and_gradient(dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(6)
    numbers = torch.randn(3, 37, 64, generator=rng)
    return list(numbers.to(dtype))


def test_swiglu_has_the_bits_of_torch_in_bfloat16(built: torch.dtype) -> None:
    gate, up, _ = gate_up_and_gradient(built)
    y = fused.swiglu(gate, up)
    assert y is not None
    right = F.silu(gate) * up
    if built == torch.bfloat16:
        assert torch.equal(y, right)
    else:
        torch.testing.assert_close(y, right, rtol=4 * STEPS[built], atol=0)


def test_the_gradients_of_swiglu_are_those_of_float64_but_for_two_roundings(
    built: torch.dtype,
) -> None:
    gate, up, above = gate_up_and_gradient(built)
    slopes = fused.swiglu_slopes(gate, up, above)
    assert slopes is not None
    wide_gate = gate.double().requires_grad_()
    wide_up = up.double().requires_grad_()
    exact = F.silu(wide_gate) * wide_up
    exact.backward(above.double())
    near = 2 * STEPS[built]
    for slope, right in zip(slopes, (wide_gate.grad, wide_up.grad), strict=True):
        torch.testing.assert_close(slope.double(), right, rtol=near, atol=1e-6)


@pytest.mark.parametrize(
    "gate",
    [
        -300.0,
        -90.0,
        -20.0,
        0.0,
        20.0,
        90.0,
        300.0,
        float("inf"),
        float("nan"),
    ],
)
def test_swiglu_is_torchs_at_its_ends(built: torch.dtype, gate: float) -> None:
    gates = torch.full((16,), gate).to(built)
    ones = torch.ones(16).to(built)
    y = fused.swiglu(gates, ones)
    slopes = fused.swiglu_slopes(gates, ones, ones)
    assert y is not None
    assert slopes is not None
    # torch has -0 where exp overflows
    torch.testing.assert_close(y, F.silu(gates), rtol=0, atol=1e-35, equal_nan=True)
    right = torch.ops.aten.silu_backward(ones, gates)
    torch.testing.assert_close(slopes[0], right, rtol=0, atol=1e-35, equal_nan=True)


def learned_through_swiglu(dtype: torch.dtype) -> list[Tensor]:
    """The gradients of gate, up and the weight behind them."""
    gate, up, _ = gate_up_and_gradient(dtype)
    down = torch.ones(64, 16).to(dtype)
    gate.requires_grad_()
    up.requires_grad_()
    down.requires_grad_()
    y = functions.through_swiglu(lambda x: x @ down, gate, up)
    y.float().square().sum().backward()
    assert gate.grad is not None
    assert up.grad is not None
    assert down.grad is not None
    return [
        gate.grad,
        up.grad,
        down.grad,
    ]


def test_swiglu_before_a_product_learns_as_torch_does(
    built: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the product would keep of its input is made in C."""
    ours = learned_through_swiglu(built)
    monkeypatch.setattr(fused, "_library", lambda x, dtype: None)
    torchs = learned_through_swiglu(built)
    assert len(ours) == len(torchs) == 3
    for got, right in zip(ours, torchs, strict=True):
        assert (got - right).norm() < 2 * STEPS[built] * right.norm()


def test_of_one_key_the_output_is_its_value_and_no_score_has_a_gradient(
    built: torch.dtype,
) -> None:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 5, 2, 64, generator=rng).to(built) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    alone = seen_tokens(torch.arange(5)[None], None)
    y = kernel_of(q, k, v, alone)
    assert torch.equal(y, v)
    above = torch.randn(y.shape, generator=rng).to(built)
    y.backward(above)
    assert v.grad is not None and torch.equal(v.grad, above)
    for x in (q, k):
        assert x.grad is not None
        # w (up v - up out) is 0 but for the order of two sums
        assert x.grad.abs().max() < 1e-5


def test_the_weight_of_two_keys_is_the_sigmoid_of_their_difference(built: torch.dtype) -> None:
    step = 4 * STEPS[built]
    q = torch.zeros(1, 2, 1, 64, dtype=built)
    k = torch.zeros_like(q)
    v = torch.zeros_like(q)
    q[0, 1, 0, 0] = 8.0  # scores are divided by 8
    k[0, :, 0, 0] = torch.tensor([0.5, -1.0])
    v[0, :, 0, 0] = torch.tensor([1.0, 0.0])
    for x in (q, k, v):
        x.requires_grad_()
    y = kernel_of(q, k, v)
    weight = torch.sigmoid(torch.tensor(1.5))
    assert float(y.detach()[0, 1, 0, 0]) == pytest.approx(float(weight), rel=step)
    y[0, 1, 0, 0].backward()
    gradient = float(weight * (1 - weight))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    # more of the first key raises the output, more of the second lowers it
    assert k.grad[0, :, 0, 0].tolist() == pytest.approx([gradient, -gradient], rel=2 * step)
    assert float(q.grad[0, 1, 0, 0]) == pytest.approx(gradient * 1.5 / 8, rel=2 * step)
    assert v.grad[0, :, 0, 0].tolist() == pytest.approx(
        [float(weight), 1 - float(weight)], rel=step
    )


def test_a_document_has_the_bits_that_it_has_beside_another_one(built: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, TOKENS, 2, 64, generator=rng).to(built) for _ in range(3))
    seen = seen_tokens(DOCS, COMPLETIONS)
    y = kernel_of(q, k, v, seen)
    for x in (q, k, v):
        x[0, :40] = 7.0
    again = kernel_of(q, k, v, seen)
    assert torch.equal(again[0, 40:], y[0, 40:])
    assert torch.equal(again[1], y[1])
    assert not torch.equal(again[0, :40], y[0, :40])


def test_two_threads_have_the_bits_of_one(built: torch.dtype) -> None:
    layer = attention_of(64, 4, 2, True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(values_of(layer, MASKS["branches"], built))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0]["output"], found[1]["output"])
    assert torch.equal(found[0]["q_norm.weight"], found[1]["q_norm.weight"])


@pytest.mark.parametrize("branches", [None, COMPLETIONS], ids=["documents", "branches"])
def test_ranges_of_tokens_are_those_of_the_mask(branches: Tensor | None) -> None:
    seen = seen_tokens(DOCS, branches)
    assert seen is not None
    first, second, third = seen[..., None].unbind(2)
    key = torch.arange(TOKENS)
    early = (key >= first) & (key < second)
    late = (key >= third) & (key <= torch.arange(TOKENS)[:, None])
    assert torch.equal(early | late, Documents(DOCS, branches).sees(0, TOKENS))


def test_what_is_in_two_pieces_has_no_ranges() -> None:
    torn = torch.tensor([[0, 0, 1, 1, 0]])
    assert seen_tokens(torn, None) is None
    torn_by_padding = torch.tensor([[0, -1, 0, 1, 1]])
    assert seen_tokens(torn_by_padding, None) is None
    one = torch.zeros(1, 5, dtype=torch.long)
    assert seen_tokens(one, torch.tensor([[0, 1, 2, 1, 2]])) is None
    assert seen_tokens(one, torch.tensor([[0, 1, 0, 2, 2]])) is None
    assert seen_tokens(one, torch.tensor([[0, 0, 1, 1, 2]])) is not None


@pytest.mark.parametrize("learning", ["gate", "up"])
def test_one_learning_input_of_swiglu_is_enough(built: torch.dtype, learning: str) -> None:
    """An adapter of one matrix: its gradient does not end where the other has none."""
    gate, up, _ = gate_up_and_gradient(built)
    leaf = gate if learning == "gate" else up
    leaf.requires_grad_()
    y = functions.through_swiglu(lambda x: x, gate, up)
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() > 0


def test_a_nan_stays_one_and_a_key_of_it_that_nobody_sees_harms_nobody(
    built: torch.dtype,
) -> None:
    rng = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, TOKENS, 2, 64, generator=rng).to(built) for _ in range(3))
    k[0, 60, :, 0] = torch.nan  # of the second document of the first row
    y = kernel_of(q, k, v, seen_tokens(DOCS[:1], None))
    nan = y[0].isnan().any(-1).any(-1)
    assert nan[60:110].all()
    assert not nan[:60].any()
    assert not nan[110:].any()


def test_a_count_of_operations_sees_those_of_torch(built: torch.dtype) -> None:
    """A kernel's would be missing among them."""
    qkv = torch.zeros(1, 4, 3 * 64, dtype=built)
    shape = Shape(1, 1, 64, 1e-5)
    with FlopCounterMode(display=False):
        assert fused.attend(qkv, shape, gains=None, rope=None, seen=None) is None
    assert fused.attend(qkv, shape, gains=None, rope=None, seen=None) is not None


def test_other_dtypes_other_widths_and_plans_stay_with_torch(built: torch.dtype) -> None:
    def taken(width: int, dtype: torch.dtype = built) -> bool:
        qkv = torch.zeros(1, 4, 3 * width, dtype=dtype)
        y = fused.attend(qkv, Shape(1, 1, width, 1e-5), gains=None, rope=None, seen=None)
        return y is not None

    other = torch.float32 if built == torch.bfloat16 else torch.bfloat16
    assert taken(64)
    assert not taken(64, other)
    assert not taken(64, torch.float64)
    assert not taken(32)
    with computing(other):
        assert fused.rms_norm(torch.ones(4, 64), torch.ones(64), 1e-5) is None
    x = torch.ones(4, 64, dtype=other)
    own = x.to(built)
    assert fused.squared_relu(x) is None
    assert fused.swiglu(x, x) is None
    assert fused.swiglu_slopes(own, own, x) is None
    with numerics.planning(numerics.Numerics(cpu=True, dtype=built, memory=0)):
        assert not taken(64)


@pytest.mark.parametrize("dtype", STEPS)
def test_without_the_library_a_layer_is_torchs(absent: None, dtype: torch.dtype) -> None:
    assert fused.kernel(dtype) is None
    layer = attention_of(64, 3, 3, True)
    assert values_of(layer, MASKS["documents"], dtype)["output"].isfinite().all()
