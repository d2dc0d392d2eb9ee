"""One row in C: what a product and a whole step compute, and who takes them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import compiled
from random_models import randomise

from codechat.models.attention import KVCache
from codechat.models.config import GPTConfig
from codechat.models.fast import one_token, product
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.gpt import GPT

SHAPE = GPTConfig(
    depth=2, n_embd=64, n_head=4, block_size=64, vocab_size=90, mlp="swiglu", qkv_bias=True
)
SHAPES = {
    "gated, biases": SHAPE,
    "normed queries and keys in groups": GPTConfig(
        depth=3, n_embd=128, n_head=4, n_kv_head=2, block_size=64, vocab_size=90, qk_norm=True
    ),
}
ULP = 2**-7  # of bfloat16, relative


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(
        tmp_path_factory.mktemp("row"), "librow.so", "product_runs_here", "product.c", "row.c"
    )


@pytest.fixture
def built(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(product, "LIBRARY", library)
    product.library.cache_clear()
    assert product.library() is not None
    yield
    product.library.cache_clear()


def weight_of(n_out: int, n_in: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(n_out)
    return (torch.randn(n_out, n_in, generator=rng) * n_in**-0.5).bfloat16()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_in", [64, 576])
def test_a_product_is_that_of_float64_rounded_once(
    built: None, n_in: int, biased: bool, threads: int
) -> None:
    weight = weight_of(192, n_in)
    bias = torch.linspace(-2, 2, 192).bfloat16() if biased else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    found = product.product_of(packed, weight, bias)
    assert found is not None, "oneDNN packs in another way than product.c reads"
    x = torch.randn(1, n_in, generator=torch.Generator().manual_seed(7)).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = found(x)
    finally:
        torch.set_num_threads(before)
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(y.double(), right, rtol=ULP / 2 * 1.01, atol=1e-5)


def test_a_weight_that_lies_in_another_way_is_not_read(built: None) -> None:
    weight = weight_of(192, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    assert product.product_of(packed, weight, None) is not None
    assert product.product_of(packed, weight.flip(0), None) is None
    odd = weight_of(100, 64)
    assert product.product_of(packed, odd, None) is None


def test_without_the_library_there_is_no_such_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "LIBRARY", tmp_path / "libproduct.so")
    product.library.cache_clear()
    assert product.library() is None
    product.library.cache_clear()


def cache_of(shape: GPTConfig) -> KVCache:
    """Of the second of three rows, as the server's lie."""
    return KVCache(shape, 3, 40).select(slice(1, 2))


def states(reader: Reader, cache: KVCache) -> torch.Tensor:
    """(30, V) logits of thirty tokens, one after another."""
    return torch.cat(
        [reader.logits_of(reader.read(torch.tensor([3 * token]), cache)) for token in range(30)]
    )


def by_torch(reader: Reader) -> Reader:
    """The same with torch's operations between the products in C."""
    return replace(reader, short=one_token.ShortWay(reader.model, torch.bfloat16))


def assert_as_near(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    error = (got - exact).norm() / exact.norm()
    usual = (plain - exact).norm() / exact.norm()
    assert error < 1.2 * usual < 0.05


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_a_step_in_c_is_as_near_to_float32_as_torchs_in_bfloat16(
    built: None, shape: GPTConfig
) -> None:
    model = randomise(GPT(shape), 0.2).eval()
    caches = [cache_of(shape) for _ in range(3)]
    exact = states(reader_of(model, graph=False), caches[0])
    with torch.autocast("cpu", torch.bfloat16):
        reader = reader_of(model, graph=False, answers=True)
        assert isinstance(reader.short, one_token.OneRowInC)
        in_c = states(reader, caches[1])
        torchs = states(by_torch(reader), caches[2])
    assert_as_near(in_c, torchs, exact)
    assert_as_near(caches[1].kv, caches[2].kv, caches[0].kv)


@torch.inference_mode()
def test_a_step_in_c_has_the_same_bits_on_two_threads(built: None) -> None:
    shape = SHAPES["normed queries and keys in groups"]
    model = randomise(GPT(shape), 0.2).eval()
    found = []
    before = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16):
        reader = reader_of(model, graph=False, answers=True)
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(states(reader, cache_of(shape)))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "other", [{"mlp": "gelu"}, {"n_head": 8}], ids=["kind of MLP", "heads of 8"]
)
def test_shapes_that_row_c_does_not_know_take_torchs_operations(
    built: None, other: dict[str, Any]
) -> None:
    model = GPT(replace(SHAPE, **other)).eval()
    with torch.autocast("cpu", torch.bfloat16):
        short = reader_of(model, graph=False, answers=True).short
    assert type(short) is one_token.ShortWay


@torch.inference_mode()
def test_a_cache_in_bfloat16_takes_torchs_operations(built: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        reader = reader_of(randomise(GPT(SHAPE), 0.2).eval(), graph=False, answers=True)
        found = [
            states(each, KVCache(SHAPE, 1, 30, dtype=torch.bfloat16))
            for each in (reader, by_torch(reader))
        ]
    assert torch.equal(*found)


@torch.inference_mode()
def test_answers_take_it_and_rollouts_have_the_bits_of_torch(
    built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomise(GPT(SHAPE), 0.2).eval()
    heads = list[int]()
    call = product.Product.__call__

    def noted(self: product.Product, x: torch.Tensor) -> torch.Tensor:
        heads.append(self.n_out)
        return call(self, x)

    monkeypatch.setattr(product.Product, "__call__", noted)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = states(reader_of(model, graph=False), cache_of(SHAPE))
        assert not heads
        states(reader_of(model, graph=False, answers=True), cache_of(SHAPE))
        # the products of the blocks are in the step
        assert heads == [SHAPE.padded_vocab] * 30
        monkeypatch.setattr(product, "LIBRARY", tmp_path / "none.so")
        product.library.cache_clear()
        without = states(reader_of(model, graph=False, answers=True), cache_of(SHAPE))
    assert torch.equal(rollouts, without)
