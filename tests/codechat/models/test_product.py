"""Rows in C: what a product and a whole step compute, and who takes them."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled
from random_models import randomise

from codechat.models import generate
from codechat.models.attention import KVCache, Place
from codechat.models.config import GPTConfig
from codechat.models.fast import one_token, product
from codechat.models.fast import reader as reading
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.fast.shared_prefix import SharedCache
from codechat.models.generate import pad_right
from codechat.models.gpt import GPT

SHAPE = GPTConfig(
    depth=2, n_embd=64, n_head=4, block_size=64, vocab_size=90, mlp="swiglu", qkv_bias=True
)
GROUPS = GPTConfig(
    depth=3, n_embd=192, n_head=4, n_kv_head=2, block_size=64, vocab_size=90, qk_norm=True
)
SHAPES = {
    "gated, biases": SHAPE,
    "normed queries and keys in groups": GROUPS,  # and a head of 48, which is no multiple of 32
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
# the largest rounding of a number, relative
HALF_ULP = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
NEAR = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of a state
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(scope="module")
def library(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(
        tmp_path_factory.mktemp("row"),
        "librow.so",
        "product_runs_here",
        "product.c",
        "row.c",
        float32=dtype == torch.float32,
    )


@pytest.fixture
def built(
    library: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.dtype]:
    """The library alone for its dtype."""
    use(monkeypatch, {dtype: library})
    assert product.library(dtype) is not None
    yield dtype
    product.library.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, libraries: dict[torch.dtype, Path]) -> None:
    monkeypatch.setattr(product, "LIBRARIES", libraries)
    product.library.cache_clear()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def decoding(dtype: torch.dtype) -> Iterator[None]:
    with torch.inference_mode(), products_in(dtype):
        yield


def products_in(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


def weight_of(n_out: int, n_in: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(n_out)
    return (torch.randn(n_out, n_in, generator=rng) * n_in**-0.5).to(dtype)


@pytest.fixture(params=["in tiles", "in vectors"])
def either_way(built: torch.dtype, request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Of a processor with tiles; one without computes in vectors both times."""
    library = product.library(built)
    assert library is not None
    in_tiles = ctypes.c_int.in_dll(library, "in_tiles")
    before = in_tiles.value
    in_tiles.value = before and request.param == "in tiles"
    yield built
    in_tiles.value = before


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_in", [64, 96, 576])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 16, 17, 32, 33, 70])
def test_a_product_is_that_of_float64_rounded_once(
    either_way: torch.dtype, rows: int, n_in: int, biased: bool, threads: int
) -> None:
    weight = weight_of(192, n_in, either_way)
    bias = torch.linspace(-2, 2, 192).to(either_way) if biased else None
    found = product.product_of(weight, bias)
    assert found is not None
    x = torch.randn(rows, n_in, generator=torch.Generator().manual_seed(7)).to(either_way)
    y = found(x)
    alone = torch.cat([found(row) for row in x.split(1)])
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(y.double(), right, rtol=HALF_ULP[either_way] * 1.01, atol=1e-5)
    assert torch.equal(y, alone)


def test_the_weight_may_lie_in_any_order(built: torch.dtype) -> None:
    weight = weight_of(192, 64, built)
    x = torch.ones(64).to(built)
    found = product.product_of(weight.T.contiguous().T, None)
    usual = product.product_of(weight, None)
    assert found is not None and usual is not None
    assert torch.equal(found(x), usual(x))


@pytest.mark.parametrize("size", [(100, 64), (64, 80)], ids=["outputs", "inputs"])
def test_other_weights_have_no_such_product(built: torch.dtype, size: tuple[int, int]) -> None:
    assert product.product_of(weight_of(*size, built), None) is None
    assert product.product_of(weight_of(64, 64, torch.float16), None) is None


def test_without_the_library_there_is_no_such_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, {torch.bfloat16: tmp_path / "libproduct.so"})
    assert product.library(torch.bfloat16) is None
    assert product.library(torch.float32) is None
    product.library.cache_clear()


def states(reader: Reader, cache: KVCache, n_tokens: int = 20, first_row: int = 0) -> torch.Tensor:
    """(tokens, B, V) logits of tokens, one after another; rows have different ones."""
    rows = first_row + torch.arange(len(cache.lengths))
    found = []
    for token in range(n_tokens):
        ids = (3 * token + 7 * rows) % 90
        last = reader.read(ids, cache)
        found.append(reader.logits_of(last))
    return torch.stack(found)


def by_torch(reader: Reader) -> Reader:
    """The same with torch's operations between the products in C."""
    assert reader.short is not None
    return replace(reader, short=one_token.ShortWay(reader.model, reader.short.dtype))


def assert_as_near(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    error = (got - exact).norm() / exact.norm()
    usual = (plain - exact).norm() / exact.norm()
    assert error < 1.2 * usual < 0.05


PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24, 25]]
ROWS = {"one": [[4]], "of one length": [[1, 2, 3], [4, 5, 6]], "padded": PROMPTS}
each_prompt = pytest.mark.parametrize("prompts", ROWS.values(), ids=ROWS)


def filled(reader: Reader, prompts: list[list[int]], dtype: torch.dtype | None = None) -> KVCache:
    """The prompts, padded on the right, with room for more. dtype: none = the reader's."""
    ids, lengths = pad_right(prompts, torch.device("cpu"))
    rows, longest = ids.shape
    cache = KVCache(reader.model.cfg, rows, longest + 25, dtype=dtype or reader.cache_dtype)
    reader.model.hidden(ids, cache=cache, n_new=lengths)
    return cache


def shared(reader: Reader, prompts: list[list[int]]) -> SharedCache:
    """Two rows for each prompt, and one more of the first."""
    twice = torch.arange(len(prompts)).repeat_interleave(2)
    owner = F.pad(twice, (0, 1))
    return SharedCache(filled(reader, prompts), owner, 25)


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
@each_prompt
@each_shape
@torch.inference_mode()
def test_a_step_in_c_is_that_of_torch_in_float32(
    built: torch.dtype, shape: GPTConfig, prompts: list[list[int]]
) -> None:
    reader = decoder(shape)
    assert isinstance(reader.short, one_token.RowsInC)
    kept = filled(reader, prompts)
    torchs = filled(reader, prompts)
    found = states(reader, kept)
    right = states(by_torch(reader), torchs)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept.kv, torchs.kv, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
@each_prompt
@each_shape
@torch.inference_mode()
def test_a_step_in_c_is_as_near_to_float32_as_torchs_in_bfloat16(
    built: torch.dtype, shape: GPTConfig, prompts: list[list[int]]
) -> None:
    model = randomise(GPT(shape), 0.2).eval()
    plain = reader_of(model, graph=False)
    exact = filled(plain, prompts, torch.float32)
    right = states(plain, exact)
    with torch.autocast("cpu", torch.bfloat16):
        reader = reader_of(model, graph=False)
        assert isinstance(reader.short, one_token.RowsInC)
        kept = filled(reader, prompts)
        torchs = filled(reader, prompts, torch.float32)
        assert_as_near(states(reader, kept), states(by_torch(reader), torchs), right)
    assert_as_near(kept.kv.float(), torchs.kv, exact.kv)


def decoder(shape: GPTConfig) -> Reader:
    model = randomise(GPT(shape), 0.2)
    return reader_of(model.eval(), graph=False)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["padded", "one"])
@each_shape
def test_a_row_behind_a_shared_prefix_has_the_bits_of_that_row_alone(
    built: torch.dtype, decoding: None, shape: GPTConfig, prompts: list[list[int]]
) -> None:
    reader = decoder(shape)
    together = shared(reader, prompts)
    found = states(reader, together)
    for number, owner in enumerate(together.owner.tolist()):
        alone = shared(reader, prompts).select(slice(number, number + 1))
        bits = states(reader, alone, first_row=number)
        assert torch.equal(bits[:, 0], found[:, number])
        whole = filled(reader, prompts[owner : owner + 1])
        near = states(reader, whole, first_row=number)
        error = NEAR[built]
        torch.testing.assert_close(near[:, 0], found[:, number], rtol=error, atol=error)


def test_what_a_row_becomes_does_not_depend_on_the_rows_beside_it(
    built: torch.dtype, decoding: None
) -> None:
    reader = decoder(GROUPS)
    found = states(reader, filled(reader, PROMPTS))
    first = filled(reader, PROMPTS).select(slice(1))
    alone = states(reader, first)
    assert torch.equal(alone[:, 0], found[:, 0])


def test_a_key_that_is_nan_does_not_pass_unseen(built: torch.dtype, decoding: None) -> None:
    reader = decoder(GROUPS)
    cache = filled(reader, PROMPTS)
    cache.kv[0, 0, 1, :, 0] = float("nan")  # the first key of the second row
    found = states(reader, cache, n_tokens=1)[0]
    assert found.isnan().all(1).tolist() == [False, True, False]


def test_rows_may_keep_their_new_token_each_in_a_column_of_its_own(
    built: torch.dtype, decoding: None
) -> None:
    reader = decoder(GROUPS)
    assert isinstance(reader.short, one_token.RowsInC)
    alone = [filled(reader, [prompt]) for prompt in PROMPTS]
    kept = torch.cat([cache.kv[..., :10, :] for cache in alone], 2)
    columns = torch.tensor([9, 2, 5])
    place = Place(columns, kept.unbind(), columns, mask=None)
    found = reader.short.step(torch.tensor([5, 6, 7]), place)
    for number, cache in enumerate(alone):
        ids = torch.tensor([5 + number])
        right = reader.read(ids, cache)
        assert torch.equal(found[number], right[0])
        column = columns[number]
        assert torch.equal(kept[:, :, number, :, column], cache.kv[:, :, 0, :, column])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_step_in_c_has_the_same_bits_on_two_threads(
    built: torch.dtype, decoding: None, rows: int
) -> None:
    reader = decoder(GROUPS)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cache = KVCache(GROUPS, rows, 40, dtype=built)
        found.append(states(reader, cache))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "other",
    [{"mlp": "gelu"}, {"n_head": 8}, {"n_embd": 80, "n_head": 5}],
    ids=["kind of MLP", "heads of 8", "80 numbers"],
)
def test_shapes_that_row_c_does_not_know_take_torchs_operations(
    built: torch.dtype, decoding: None, other: dict[str, Any]
) -> None:
    reader = decoder(replace(SHAPE, **other))
    assert type(reader.short) is one_token.ShortWay
    assert reader.cache_dtype == torch.float32


def test_without_the_library_keys_and_values_are_float32_and_torch_computes(
    built: torch.dtype, decoding: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decoder(SHAPE).cache_dtype == built
    use(monkeypatch, {built: tmp_path / "none.so"})
    reader = decoder(SHAPE)
    assert reader.cache_dtype == torch.float32
    assert type(reader.short) is one_token.ShortWay


def one_by_one(reader: Reader, cache: KVCache, prompt: list[int]) -> torch.Tensor:
    """(T, D) states of a prompt that is read as if it were decoded."""
    ids = torch.tensor(prompt)
    return torch.cat([reader.read(token, cache) for token in ids.split(1)])


@pytest.mark.parametrize("at_once", [3, 128])
@each_shape
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    built: torch.dtype,
    decoding: None,
    shape: GPTConfig,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "TOKENS_AT_ONCE", at_once)
    reader = decoder(shape)
    ids, lengths = pad_right(PROMPTS, torch.device("cpu"))
    together = KVCache(shape, 3, 12, dtype=built)
    found = reader.prompts(ids, together, lengths)
    assert together.lengths.tolist() == [9, 2, 5]
    for number, prompt in enumerate(PROMPTS):
        alone = KVCache(shape, 1, 12, dtype=built)
        n = len(prompt)
        assert torch.equal(found[number, :n], one_by_one(reader, alone, prompt))
        assert torch.equal(together.kv[:, :, number, :, :n], alone.kv[:, :, 0, :, :n])


def test_a_prompt_behind_kept_tokens_has_the_bits_of_its_tokens_one_by_one(
    built: torch.dtype, decoding: None
) -> None:
    reader = decoder(GROUPS)
    caches = [shared(reader, PROMPTS).select(slice(2, 3)) for _ in range(2)]
    for prompt in ([31, 32, 33], [41, 42]):
        found = reader.prompts(torch.tensor([prompt]), caches[0])
        assert torch.equal(found[0], one_by_one(reader, caches[1], prompt))


def test_a_row_has_the_same_bits_behind_shorter_and_longer_ones(
    built: torch.dtype, decoding: None
) -> None:
    """A longer row moves the columns of a shorter one's new tokens."""
    shape = replace(GROUPS, depth=6, block_size=256)
    reader = decoder(shape)
    squares = [i * i % 90 for i in range(130)]
    ends = [
        3,
        20,
        37,
        54,
        71,
        88,
        105,
        122,
    ]
    prompts = [squares[:n] for n in ends]

    def decoded(some: list[list[int]]) -> torch.Tensor:
        rows = len(some)
        cpu = torch.device("cpu")
        ids, lengths = pad_right(some, cpu)
        cache = KVCache(shape, rows, 256, dtype=built)
        reader.prompts(ids, cache, lengths)
        states = []
        for token in squares[:100]:
            tokens = torch.full((rows,), token)
            state = reader.read(tokens, cache)
            states.append(state)
        return torch.stack(states)

    together = decoded(prompts)
    for number, prompt in enumerate(prompts):
        alone = decoded([prompt])
        beside = together[:, number]
        assert torch.equal(beside, alone[:, 0]), ends[number]


def test_long_prompts_take_the_model(
    built: torch.dtype, decoding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = decoder(SHAPE)
    calls = list[int]()
    hidden = GPT.hidden

    def noted(model: GPT, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(ids.shape[1])
        return hidden(model, ids, **more)

    monkeypatch.setattr(GPT, "hidden", noted)
    monkeypatch.setattr(reading, "SHORT_PROMPT", 5)
    for length in (5, 6):
        cache = KVCache(SHAPE, 1, 10, dtype=built)
        reader.prompts(torch.arange(length)[None], cache)
        assert cache.extent == length
    assert calls == [6]


# a turn, which END ends; whole prompts of this length are run in tiles
TOOLS = [i % 80 for i in range(270)]
END = [88, 89]
REQUESTS = [
    [*TOOLS, *END, 1, 2],
    [5, 6, 7],
    [*TOOLS, *END, 3],
    [*TOOLS, *END],
    [*TOOLS, *END, 4, *END, 4],
    [*TOOLS, 9, *END, 4],
]


@pytest.fixture
def in_c(built: torch.dtype, decoding: None) -> GPT:
    shape = replace(GROUPS, block_size=640)
    return randomise(GPT(shape), 0.2).eval()


def test_the_first_turn_of_a_prompt_is_run_apart_where_it_is_long(in_c: GPT) -> None:
    few = [1, *END, 2]
    lengths = generate.first_turns(in_c, [*REQUESTS, few], END)
    assert lengths == [272, 3, 272, 272, 272, 273, 4]
    long_rest = [
        *TOOLS,
        *END,
        *[3] * 300,
    ]
    assert generate.first_turns(in_c, [long_rest], END) == [len(long_rest)]
    assert generate.first_turns(in_c, [TOOLS], [99]) == [270]


def test_behind_the_same_tools_a_request_has_the_bits_of_that_request_alone(in_c: GPT) -> None:
    lengths = generate.first_turns(in_c, REQUESTS, END)
    assert lengths
    draw = partial(
        generate.sample,
        in_c,
        max_new_tokens=3,
        temperature=0,
    )
    together = draw(REQUESTS, prefix_tokens=lengths)
    every = zip(
        REQUESTS,
        lengths,
        together,
        strict=True,
    )
    for prompt, length, found in every:
        (alone,) = draw([prompt], prefix_tokens=[length])
        assert alone == found
        (whole,) = draw([prompt])
        difference = whole.logprobs[0] - found.logprobs[0]
        assert abs(difference) < 0.05


@torch.inference_mode()
def test_whole_prompts_are_run_where_nothing_is_in_c() -> None:
    shape = replace(SHAPE, mlp="gelu", block_size=640)
    model = randomise(GPT(shape), 0.2).eval()
    assert generate.first_turns(model, REQUESTS, END) is None
