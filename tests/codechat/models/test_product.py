"""The product of one row in C: what it computes, and who takes it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_models import randomise

from codechat.distributed import numerics
from codechat.models.attention import KVCache
from codechat.models.config import GPTConfig
from codechat.models.fast import product
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.gpt import GPT

SOURCE = Path(__file__).parents[3] / "cpp" / "product.c"
SHAPE = GPTConfig(
    depth=2, n_embd=64, n_head=4, block_size=64, vocab_size=90, mlp="swiglu", qkv_bias=True
)
COMPILER = shutil.which("cc")
ULP = 2**-7  # of bfloat16, relative


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not numerics._cpu_has_bf16() or not SOURCE.exists():
        pytest.skip("no C compiler, or no avx512_bf16")
    made = tmp_path_factory.mktemp("product")
    # as cpp/CMakeLists.txt does: OpenMP is torch's
    compiled = [COMPILER, "-O3", "-fopenmp", "-fPIC", "-Wall", "-Werror", "-c", str(SOURCE)]
    subprocess.run([*compiled, "-o", str(made / "product.o")], check=True, timeout=120)
    linked = [COMPILER, "-shared", str(made / "product.o"), "-o", str(made / "libproduct.so")]
    subprocess.run(linked, check=True, timeout=120)
    return made / "libproduct.so"


@pytest.fixture
def built(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(product, "LIBRARY", library)
    product.kernel.cache_clear()
    if product.kernel() is None:
        pytest.skip("this processor has no avx512_bf16")
    yield
    product.kernel.cache_clear()


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
    product.kernel.cache_clear()
    assert product.kernel() is None
    product.kernel.cache_clear()


def states(reader: Reader) -> torch.Tensor:
    """Logits of ten tokens, one after another."""
    cache = KVCache(SHAPE, 1, 10)
    return torch.cat(
        [reader.logits_of(reader.read(torch.tensor([token]), cache)) for token in range(10)]
    )


@torch.inference_mode()
def test_answers_take_it_and_rollouts_have_the_bits_of_torch(
    built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomise(GPT(SHAPE), 0.2).eval()
    calls = list[int]()
    call = product.Product.__call__

    def noted(self: product.Product, x: torch.Tensor) -> torch.Tensor:
        calls.append(self.n_out)
        return call(self, x)

    monkeypatch.setattr(product.Product, "__call__", noted)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = states(reader_of(model, graph=False))
        assert not calls
        answers = states(reader_of(model, graph=False, answers=True))
        # of each token four products a block and the head
        assert len(calls) == 10 * (2 * 4 + 1)
        monkeypatch.setattr(product, "LIBRARY", tmp_path / "none.so")
        product.kernel.cache_clear()
        assert torch.equal(rollouts, states(reader_of(model, graph=False, answers=True)))
    torch.testing.assert_close(answers, rollouts, rtol=0.05, atol=0.05 * rollouts.abs().max())
