"""Sampling: neither cache nor neighbours change anything, log-probabilities are the draw's,
stops match; with static shapes the same tokens, few questions to the device, one compilation,
predicted memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_models import randomise
from shapes import preset
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.core.errors import ConfigError
from codechat.distributed import sharding
from codechat.models import attention, draws, generate, lora
from codechat.models.attention import KVCache
from codechat.models.config import GPTConfig
from codechat.models.draws import Batch, Truncation
from codechat.models.fast import decode_graph, device, memory, product, reader
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.fast.shared_prefix import SharedCache
from codechat.models.generate import Completion, sample, stream
from codechat.models.gpt import GPT
from codechat.text import chat, tokenizer, tool_calls
from codechat_lab.instruments.step_memory import Tape
from codechat_lab.serve.call_grammar import Rules, call_grammar

PROMPTS = [
    [1, 2, 3],
    [4, 5, 6, 7, 8, 9, 10, 11, 12],
    [40],
    [13, 14, 15, 16, 17],
]
STOPS = ((5,), (7, 8), (30,), (60,))
SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=90)
LATENT = replace(SHAPE, attention="mla")
ARCHITECTURES = {
    "heads": SHAPE,
    "learned positions": replace(SHAPE, pos="learned", mlp="gelu"),
    "grouped queries": replace(SHAPE, n_kv_head=2),
    "one key head": replace(
        SHAPE, n_kv_head=1, mlp="swiglu", qk_norm=True, qkv_bias=True, tied=False
    ),
    "latent": LATENT,
    "latent of every rank": replace(LATENT, kv_rank=12, q_rank=10, rope_width=6, head_width=10),
}
every_architecture = pytest.mark.parametrize("shape", ARCHITECTURES.values(), ids=ARCHITECTURES)


def random_model(shape: GPTConfig = SHAPE, scale: float = 0.2) -> GPT:
    return randomise(GPT(shape), scale).train()


def random_ids(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randint(90, shape, generator=torch.Generator().manual_seed(seed))


def logits_behind(model: GPT, ids: Tensor, cache: KVCache, n_new: Tensor | None = None) -> Tensor:
    """(B, T, V) of new tokens behind those that the cache keeps."""
    return F.linear(model.hidden(ids, cache=cache, n_new=n_new), model.head_weight())


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    assert [(c.ids, c.stop) for c in got] == [(c.ids, c.stop) for c in want]
    for mine, theirs in zip(got, want, strict=True):
        assert_logprobs(mine, torch.tensor(theirs.logprobs))


def assert_logprobs(
    completion: Completion, expected: Tensor, atol: float = 1e-5, rtol: float = 0.0
) -> None:
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=rtol)


def recomputed(
    model: GPT, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> Tensor:
    """The log-probability of each token of a completion, by one full pass."""
    ids = torch.tensor([prompt + completion.ids])
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(ids[:, :-1], ids[:, 1:], temperature=temperature)
    return logprobs[0, len(prompt) - 1 :]


def scripted_model(script: Sequence[int], vocab_size: int, block_size: int = 64) -> GPT:
    """A model whose most likely token after position i is script[i], whatever the text says."""
    width = -(-vocab_size // 64) * 64
    shape = GPTConfig(
        depth=1,
        n_embd=width,
        n_head=1,
        block_size=block_size,
        vocab_size=vocab_size,
        n_tags=0,
        pos="learned",
    )
    model = GPT(shape)
    model.wte.weight.data = torch.eye(width)
    model.wpe.weight.data = torch.zeros(block_size, width)
    model.wpe.weight.data[range(len(script)), list(script)] = 100.0
    return model


def one_tool_grammar(tok: tokenizer.Tokenizer) -> Any:
    """Only calls of f with one integer x."""
    tool = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
    return call_grammar(tok, "reserved", [tool], Rules(required=True))


# ---- caches
@every_architecture
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(shape: GPTConfig) -> None:
    model = random_model(shape)
    lengths = torch.tensor([5, 9, 2])
    T = 20
    ids = random_ids((3, T), seed=2)
    full = model(ids)
    cache = KVCache(model.cfg, 3, T + 9)
    # right-padded with tokens that must not be seen
    first = logits_behind(model, ids[:, :9], cache, lengths)
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(first[row, :n], full[row, :n], atol=1e-5, rtol=1e-5)
    for new in (1, 1, 3, 1, 4):
        at = cache.lengths[:, None] + torch.arange(new)
        got = logits_behind(model, ids.gather(1, at), cache)
        torch.testing.assert_close(got, full[torch.arange(3)[:, None], at], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [4, 16])
def test_a_cache_of_heads_grows_with_their_number(heads: int) -> None:
    per_head = replace(SHAPE, n_head=heads, head_width=16)
    assert KVCache(per_head, 3, 10).kv.numel() == 3 * 10 * 2 * 2 * heads * 16


@pytest.mark.parametrize("heads", [4, 16])
@torch.no_grad()
def test_of_latent_attention_the_latent_and_one_rotated_key_are_all_that_is_kept(
    heads: int,
) -> None:
    """arXiv:2405.04434, table 1: (kv_rank + rope_width) numbers per token and block, whatever
    the number of heads."""
    shape = replace(LATENT, n_head=heads, head_width=16, kv_rank=24, rope_width=8)
    model = random_model(shape)
    cache = KVCache(shape, 3, 10)
    logits_behind(model, torch.zeros(3, 10, dtype=torch.long), cache)
    assert cache.kv.numel() == 3 * 10 * shape.depth * (24 + 8)
    assert shape.cache_width == 24 + 8
    (block,) = cache.kv[0]  # no values beside the keys
    attn = model.blocks[0].attn
    normed = model.blocks[0].attn_norm(model.wte.weight[:1])
    latent = attn.kv_norm(attn.kv_a(normed)[:, :24])
    torch.testing.assert_close(block[0, 0, 0, :24], latent[0], atol=1e-6, rtol=1e-5)


def latent_with_adapters(targets: tuple[str, ...]) -> GPT:
    model = random_model(replace(LATENT, q_rank=10))
    lora.attach(model, 3, 6.0, targets)
    for name, p in model.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(p, std=0.1)
    return model


adapted_matrices = pytest.mark.parametrize("targets", [("qkv",), ("qkv", "out", "up", "down")])


@adapted_matrices
def test_latent_attention_has_adapters_where_other_attention_has_qkv(
    targets: tuple[str, ...],
) -> None:
    model = latent_with_adapters(targets)
    adapted = {name.split(".")[-1] for name, _ in lora.adapted(model)}
    assert adapted == {"q_a", "q_b", "kv_a", "kv_b", *targets} - {"qkv"}


@adapted_matrices
@pytest.mark.parametrize("graph", [False, True])
def test_latent_attention_with_adapters_samples_what_it_scores(
    targets: tuple[str, ...], graph: bool
) -> None:
    model = latent_with_adapters(targets)
    found = sample(model, PROMPTS, max_new_tokens=8, seed=0, graph=graph)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert_logprobs(completion, recomputed(model, prompt, completion))


@every_architecture
@torch.no_grad()
def test_ragged_tokens_behind_a_shared_prefix_equal_the_full_forward(shape: GPTConfig) -> None:
    """Right-padded with tokens that must not be seen, then single tokens, then rows leave."""
    model = random_model(shape)
    rng = torch.Generator().manual_seed(3)
    prefix = torch.randint(90, (2, 7), generator=rng)
    heads = torch.tensor([7, 3])
    owner = torch.tensor([1, 0, 1, 1])
    own = torch.randint(90, (4, 10), generator=rng)
    tails = torch.tensor([5, 1, 3, 5])
    prefilled = KVCache(model.cfg, 2, 7)
    logits_behind(model, prefix, prefilled, heads)
    shared = SharedCache(prefilled, owner, 10)
    full = []
    for row, p in enumerate(owner.tolist()):
        whole = torch.cat((prefix[p, : heads[p]], own[row]))
        full.append(model(whole[None])[0, heads[p] :])

    got = logits_behind(model, own[:, :5], shared, tails)
    for row, n in enumerate(tails.tolist()):
        torch.testing.assert_close(got[row, :n], full[row][:n], atol=1e-5, rtol=1e-5)

    rows = torch.arange(4)
    begin = heads[owner]
    for keep, new in (([0, 1, 2, 3], 1), ([3, 1, 2], 3), ([0, 1], 1)):
        shared = shared.select(torch.tensor(keep))
        rows = rows[keep]
        at = (shared.lengths - begin[rows])[:, None] + torch.arange(new)
        got = logits_behind(model, own[rows[:, None], at], shared)
        for i, row in enumerate(rows.tolist()):
            torch.testing.assert_close(got[i], full[row][at[i]], atol=1e-5, rtol=1e-5)


# ---- log-probabilities
@pytest.mark.parametrize(
    "temperature, samples, packed",
    [(1.0, 3, 1 << 30), (0.6, 1 + reader.FEW_ROWS // 4, 1 << 30), (1.7, 3, 1)],
    ids=["few rows, which read transposed copies", "more rows", "oneDNN packs all weights"],
)
@every_architecture
def test_sampled_logprobs_equal_recomputed_ones(
    shape: GPTConfig,
    temperature: float,
    samples: int,
    packed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "PACKED", packed)
    model = random_model(shape)
    found = sample(
        model,
        PROMPTS,
        max_new_tokens=12,
        seed=0,
        stop=STOPS,
        temperature=temperature,
        samples_per_prompt=samples,
    )
    for i, completion in enumerate(found):
        expected = recomputed(model, PROMPTS[i // samples], completion, temperature)
        assert_logprobs(completion, expected)


@dataclass(frozen=True)
class Turn:
    """What a conversation is continued with, once the last `back` tokens are taken back."""

    more: list[int]
    back: int
    runs: int  # tokens that are new to the model; the last sampled id was not run before


TURNS = [
    Turn([], back=0, runs=8),
    Turn([21, 22], back=0, runs=2 + 1),
    Turn([9, 8], back=3, runs=2),
]


@every_architecture
def test_a_conversation_draws_the_same_and_runs_only_what_its_prompts_have_new(
    shape: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(shape)
    runs = list[int]()
    advance = KVCache.advance

    def noted(cache: KVCache, new: int, n_new: Tensor | None = None) -> None:
        runs.append(new)
        advance(cache, new, n_new)

    monkeypatch.setattr(KVCache, "advance", noted)
    kept = generate.Conversation(reader_of(model, graph=False))
    prompt = list(range(1, 9))
    for key, turn in enumerate(TURNS):
        prompt = prompt[: len(prompt) - turn.back] + turn.more
        want = list(stream(model, prompt, max_new_tokens=5, seed=3, key=key))
        runs.clear()
        got = list(stream(model, prompt, max_new_tokens=5, seed=3, key=key, kept=kept))
        assert got == want
        assert runs == [turn.runs, 1, 1, 1, 1]
        prompt += got


SHORT = {
    **{name: ARCHITECTURES[name] for name in ("heads", "grouped queries", "one key head")},
    "gelu": replace(SHAPE, mlp="gelu", n_kv_head=4),
}


@pytest.mark.parametrize("lengths", [(3,), (3, 3), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHORT.values(), ids=SHORT)
@torch.inference_mode()
def test_the_short_way_has_the_bits_of_the_model(
    shape: GPTConfig, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    rows = len(lengths)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        short = reader_of(random_model(shape), graph=False)
        assert short.short is not None
        plain = replace(short, short=None)
        caches = [KVCache(shape, rows, 40) for _ in range(2)]
        for cache in caches:
            short.model.hidden(
                torch.tensor([[1, 2, 3]] * rows), cache=cache, n_new=torch.tensor(lengths)
            )
        for token in range(4, 30):
            newest = token + torch.arange(rows)
            assert torch.equal(short.read(newest, caches[0]), plain.read(newest, caches[1]))
        assert torch.equal(caches[0].kv, caches[1].kv)


@pytest.mark.parametrize("name", ["learned positions", "latent"])
def test_shapes_without_a_short_way_read_all_tokens_alike(name: str) -> None:
    assert reader_of(random_model(ARCHITECTURES[name]), graph=False).short is None


def most_likely(model: GPT, prompt: list[int], n_tokens: int) -> list[int]:
    """A greedy completion, a full pass for each token."""
    ids = list(prompt)
    for _ in range(n_tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1, : model.cfg.n_ids].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS, ids="{0[0]}...".format)
def test_greedy_takes_the_most_likely_token_and_reports_its_own_logprob(prompt: list[int]) -> None:
    model = random_model()
    (completion,) = sample(model, [prompt], max_new_tokens=10, temperature=0)
    assert completion.ids == most_likely(model, prompt, 10)
    assert_logprobs(completion, recomputed(model, prompt, completion))


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])  # the second is 0 in float32
@pytest.mark.parametrize("prompt", PROMPTS, ids="{0[0]}...".format)
def test_a_vanishing_temperature_is_greedy_and_certain(
    prompt: list[int], temperature: float
) -> None:
    model = random_model()
    (cold,) = sample(model, [prompt], max_new_tokens=10, temperature=temperature, seed=0)
    assert cold.ids == most_likely(model, prompt, 10)
    assert not any(cold.logprobs)


# ---- truncation
def kept_tokens(logits: Tensor, top_k: int | None, top_p: float | None) -> list[int]:
    """The support by the definition: the most likely, until k of them or until what came before
    holds p."""
    order = logits.argsort(descending=True).tolist()[: top_k or len(logits)]
    p = torch.zeros_like(logits).index_copy_(0, torch.tensor(order), logits[order].softmax(0))
    kept: list[int] = []
    for token in order:
        if top_p is not None and p[kept].sum() >= top_p:
            break
        kept.append(token)
    return kept


@pytest.mark.parametrize(
    "top_k, top_p", [(3, None), (None, 0.5), (10, 0.6), (1, None), (None, 1e-9), (500, 1.0)]
)
def test_truncation_restricts_the_support_and_renormalises(
    top_k: int | None, top_p: float | None
) -> None:
    model = random_model()
    with torch.no_grad():
        logits = model(torch.tensor([[3]]))[0, 0, : model.cfg.n_ids] / 0.8
    out = sample(
        model,
        [[3]],
        max_new_tokens=1,
        top_k=top_k,
        top_p=top_p,
        temperature=0.8,
        seed=0,
        samples_per_prompt=400,
    )
    kept = kept_tokens(logits, top_k, top_p)
    expected = dict(zip(kept, logits[kept].log_softmax(0).tolist(), strict=True))
    for completion in out:
        assert completion.logprobs[0] == pytest.approx(expected[completion.ids[0]], abs=1e-5)
    met = {c.ids[0] for c in out}
    assert len(met) == len(kept) or len(kept) > 20, (
        "every kept token of a small support is met in 400 draws"
    )


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, 5, None), (0.6, 20, None), (1.0, 20, 0.7), (1.0, None, 0.5)]
)
def test_a_completion_names_the_tokens_that_were_kept(
    temperature: float, top_k: int | None, top_p: float | None, graph: bool
) -> None:
    """Also of rows that end early, in small batches, and with static shapes; noting them
    changes no draw."""
    model = random_model()
    draw = partial(
        sample,
        model,
        PROMPTS,
        max_new_tokens=12,
        seed=0,
        samples_per_prompt=3,
        stop=STOPS,
        graph=graph,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    plain = draw()
    noted = draw(note_kept=True)
    assert plain == noted
    assert all(c.kept is None for c in plain)
    assert len({len(c.ids) for c in noted}) > 1
    for i, c in enumerate(noted):
        prompt = PROMPTS[i // 3]
        ids = torch.tensor([prompt + c.ids])
        with torch.no_grad():
            rows = model(ids)[0, len(prompt) - 1 : -1, : model.cfg.n_ids] / temperature
        assert c.kept is not None
        assert c.kept.dtype == torch.int32
        assert len(c.kept) == len(c.ids)
        for logits, kept in zip(rows, c.kept.tolist(), strict=True):
            assert {x for x in kept if x >= 0} == {*kept_tokens(logits, top_k, top_p)}


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, None, None), (1.0, 500, None), (1.0, None, 1.0), (0.0, 5, None)],
)
def test_nothing_is_noted_where_nothing_was_cut(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    (c,) = sample(
        random_model(),
        [[1]],
        max_new_tokens=3,
        seed=0,
        note_kept=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    assert c.kept is None


@pytest.mark.parametrize("top_k, top_p, width", [(69, None, 69), (None, 0.999999, 70)])
def test_ids_behind_the_vocabulary_are_never_kept(
    top_k: int | None, top_p: float | None, width: int
) -> None:
    """The rows that pad the vocabulary to a multiple of 64."""
    model = random_model(replace(SHAPE, vocab_size=70, n_tags=0))
    (c,) = sample(model, [[1]], max_new_tokens=3, seed=0, note_kept=True, top_k=top_k, top_p=top_p)
    assert c.kept.shape == (3, width)
    assert c.kept.max() < 70


# ---- draws
def test_draws_follow_the_distribution() -> None:
    model = random_model(replace(SHAPE, vocab_size=8, n_tags=0), scale=0.1)
    n = 4000
    out = sample(model, [[2, 5, 1]], max_new_tokens=1, seed=7, samples_per_prompt=n)
    with torch.no_grad():
        expected = n * model(torch.tensor([[2, 5, 1]]))[0, -1, :8].softmax(0)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in out]), minlength=8)
    assert expected.min() > 5, "the chi-square test wants a few expected counts everywhere"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # 99.9 % quantile at 7 degrees of freedom


@pytest.mark.parametrize("vocab", [64, 411, 4096, 50304])
def test_a_token_that_cannot_be_drawn_is_not(vocab: int) -> None:
    """Every uniform, the ends of the interval included, lands on the token that the plain sum
    gives."""
    rng = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(16, vocab, generator=rng)
    logits[:, ::2] = -math.inf
    u = torch.rand(16, generator=rng, dtype=torch.float64)
    u[:2] = 0.0
    u[2:4] = 1 - 2.0**-53
    ids, logprobs = draws.draw(logits.clone(), Truncation(), u)
    p = logits.double().softmax(-1)
    mass = p.gather(1, ids[:, None])[:, 0]
    above = p.cumsum(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs, mass.log().float(), atol=1e-5, rtol=0)
    assert (mass > 0).all()
    assert (above >= u - 1e-6).all()
    assert (above - mass <= u + 1e-6).all()


def rows_of_a_constant_distribution(
    seed: int | None = None, samples: int = 2, keys: list[str] | None = None
) -> list[tuple[int, ...]]:
    """The ids of two equal prompts: their tokens differ through the draws alone."""
    found = sample(
        random_model(scale=0.0),
        [[1], [1]],
        max_new_tokens=10,
        samples_per_prompt=samples,
        seed=seed,
        keys=keys,
    )
    return [tuple(c.ids) for c in found]


def test_seed_prompt_sample_and_position_all_move_the_draw() -> None:
    both = rows_of_a_constant_distribution(seed=0) + rows_of_a_constant_distribution(seed=1)
    assert len(set(both)) == 8
    assert all(len(set(row)) > 4 for row in both)


def test_a_seed_draws_the_same_again_also_beside_more_samples() -> None:
    first = rows_of_a_constant_distribution(seed=0)
    assert rows_of_a_constant_distribution(seed=0) == first
    assert rows_of_a_constant_distribution(seed=0, samples=5)[5:7] == first[2:4]


def test_prompts_of_one_key_draw_the_same() -> None:
    rows = rows_of_a_constant_distribution(seed=0, keys=["x", "x"])
    assert rows[:2] == rows[2:]


def test_without_a_seed_torch_decides() -> None:
    torch.manual_seed(5)
    first = rows_of_a_constant_distribution()
    second = rows_of_a_constant_distribution()
    torch.manual_seed(5)
    assert rows_of_a_constant_distribution() == first
    assert first != second


NAMES = ["a", "b", "c", "d"]


def four_each(prompts: list[list[int]], keys: list[str]) -> list[Completion]:
    return sample(
        random_model(),
        prompts,
        keys=keys,
        max_new_tokens=20,
        stop=STOPS,
        seed=3,
        samples_per_prompt=4,
    )


@pytest.fixture
def whole() -> list[Completion]:
    completions = four_each(PROMPTS, NAMES)
    assert len({c.stop for c in completions}) == 2, (
        "rows must end at different times for this to mean something"
    )
    return completions


@pytest.mark.parametrize("batch_size", [1, 7])
def test_tokens_do_not_depend_on_the_batch_size(
    batch_size: int, whole: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "rows_at_once", lambda *_: batch_size)
    assert [c.ids for c in four_each(PROMPTS, NAMES)] == [c.ids for c in whole]


def test_a_cache_of_half_the_bytes_lets_up_to_twice_as_many_rows_decode() -> None:
    model = randomise(GPT(preset("nano")))
    whole, half = (memory.rows_at_once(model, 200, 300, 1, 0, size) for size in (4, 2))
    assert whole < half <= 2 * whole + 1


def test_a_long_prompt_does_not_make_the_batches_of_short_ones_small(
    whole: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 60 tokens of prompts: with the longest of all, each row would be alone."""
    sizes = list[int]()
    decode = generate._decode

    def noted(reader: Reader, batch: Batch) -> Any:
        rows = len(batch.prompts)
        sizes.append(rows)
        return decode(reader, batch)

    def fitting(model: GPT, longest: int, *_: Any) -> int:
        fits = 60 // longest
        return max(1, fits)

    monkeypatch.setattr(generate, "_decode", noted)
    monkeypatch.setattr(memory, "rows_at_once", fitting)
    long = [5] * 40
    prompts = [long, *PROMPTS]
    names = ["long", *NAMES]
    found = four_each(prompts, names)
    ids = [c.ids for c in found]
    assert ids[4:] == [c.ids for c in whole]
    assert max(sizes) > 4
    assert sizes[-4:] == [1, 1, 1, 1]


def test_tokens_do_not_depend_on_the_order_of_prompts(whole: list[Completion]) -> None:
    mixed = four_each(PROMPTS[::-1], NAMES[::-1])
    back = mixed[12:] + mixed[8:12] + mixed[4:8] + mixed[:4]
    assert [c.ids for c in back] == [c.ids for c in whole]


@pytest.mark.parametrize("i", range(4))
def test_tokens_do_not_depend_on_neighbours(i: int, whole: list[Completion]) -> None:
    alone = four_each([PROMPTS[i]], [NAMES[i]])
    assert_same(alone, whole[4 * i : 4 * i + 4])


# ---- what is run
@pytest.fixture
def ran() -> list[tuple[int, int]]:
    """(rows, tokens) of every pass of `model`."""
    return []


@pytest.fixture
def model(ran: list[tuple[int, int]]) -> GPT:
    watched = random_model()

    def note(block: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        ran.append((given[0].shape[0], given[0].shape[1]))

    watched.blocks[0].register_forward_pre_hook(note)
    return watched


def test_distinct_prompts_run_once_and_finished_rows_leave(
    model: GPT, ran: list[tuple[int, int]]
) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    out = sample(model, prompts, max_new_tokens=30, seed=0, samples_per_prompt=4, stop=STOPS)
    assert ran[:2] == [(4, 9), (20, 1)]  # four distinct prompts, padded to the longest
    carried = sum(rows for rows, _ in ran[1:])
    needed = sum(len(c.ids) - 1 for c in out)
    assert needed <= carried <= needed / generate.COMPACT_BELOW + 20
    assert len(ran) == max(len(c.ids) for c in out)


def test_short_and_long_prompts_never_share_a_pass() -> None:
    """Each is computed in its own way, and would be in the other's beside it."""
    lengths = [10, 255, 256, 257, 300, 20]
    passes = [lengths[some] for some in generate._few_tokens(lengths, 10_000)]
    assert passes == [[10, 255, 256], [257, 300], [20]]


@pytest.mark.parametrize(
    "samples", [1, 3], ids=["whose cache decoding goes on with", "that share their prompt's"]
)
def test_prompts_run_a_few_at_a_time_in_the_order_of_their_lengths(
    samples: int, model: GPT, ran: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1 + i % 7] * n for i, n in enumerate((3, 20, 4, 5, 19, 2))]
    draw = partial(sample, model, prompts, max_new_tokens=12, seed=0, samples_per_prompt=samples)
    monkeypatch.setattr(memory, "CPU_PREFILL", 1024)
    whole = draw()
    monkeypatch.setattr(memory, "CPU_PREFILL", 21)
    ran.clear()
    parts = draw()
    assert [part for part in ran if part[1] > 1] == [(4, 5), (1, 19), (1, 20)]
    assert [c.ids for c in parts] == [c.ids for c in whole]


@pytest.mark.parametrize("prompt", PROMPTS, ids="{0[0]}...".format)
def test_stream_yields_what_sample_returns(prompt: list[int]) -> None:
    model = random_model(replace(SHAPE, recompute="blocks"))
    (whole,) = sample(model, [prompt], keys=["k"], max_new_tokens=20, seed=4, stop=STOPS, top_k=20)
    streamed = stream(model, prompt, key="k", max_new_tokens=20, seed=4, stop=STOPS, top_k=20)
    assert list(streamed) == whole.ids


def test_sampling_and_streaming_leave_a_model_in_training() -> None:
    model = random_model(replace(SHAPE, recompute="blocks"))
    sample(model, PROMPTS, max_new_tokens=3)
    next(iter(stream(model, [1], max_new_tokens=3)))
    assert torch.is_grad_enabled()
    assert model.training
    ones = torch.ones(1, 4, dtype=torch.long)
    model.loss(ones, ones).backward()


# ---- ends
@pytest.mark.parametrize(
    "script, stop, prompt, ids, reason",
    [
        # a matcher that starts over at a mismatch misses it
        ([1, 1, 1, 2, 5], [(1, 1, 2)], [0], [1, 1, 1, 2], "stop"),
        ([1, 2, 1, 2, 1, 3], [(1, 2, 1, 3)], [0], [1, 2, 1, 2, 1, 3], "stop"),
        ([1, 2, 3, 4], [(3, 4), (2, 3)], [0], [1, 2, 3], "stop"),
        # all of their tokens, never in a row
        ([1, 2, 3, 4], [(1, 3), (2, 4), (4, 3)], [0], [1, 2, 3, 4], "length"),
        # complete exactly at the last token
        ([1, 2, 3], [(2, 3)], [0], [1, 2, 3], "stop"),
        ([1, 2], [(1, 2, 3)], [0], [1, 2], "length"),
        # the prompt is no part
        ([0, 0, 3, 4], [(1, 2, 3), (2, 3), (1, 2)], [9, 1, 2], [3, 4], "length"),
    ],
)
def test_stop_sequences(
    script: list[int],
    stop: list[tuple[int, ...]],
    prompt: list[int],
    ids: list[int],
    reason: str,
) -> None:
    budget = len(script) - len(prompt) + 1
    model = scripted_model(script, 64)
    (found,) = sample(model, [prompt], max_new_tokens=budget, temperature=0, stop=stop)
    assert (found.ids, found.stop, len(found.logprobs)) == (ids, reason, len(ids))


def test_a_row_that_stopped_stays_stopped_while_others_go_on() -> None:
    """Rows at different places of one script; the first to stop meets the stop sequence again
    meanwhile."""
    model = scripted_model([1, 2, 3, 4, 2, 3, 5, 6, 7, 8, 2, 3, 9, 9], 64)
    prompts = [[0], *([0] * n for n in (7, 7, 7, 8, 8, 8, 8))]
    out = sample(model, prompts, max_new_tokens=7, temperature=0, stop=[(2, 3)])
    assert [c.ids for c in out] == [[1, 2, 3]] + [[5, 6, 7, 8, 2, 3]] * 3 + [[6, 7, 8, 2, 3]] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_owner_are_never_sampled(temperature: float) -> None:
    model = random_model(replace(SHAPE, vocab_size=60, n_tags=2, tied=False))
    rng = torch.Generator().manual_seed(0)
    model.head.weight.data[62:] = 100 * torch.randn(2, 32, generator=rng)
    prompt = PROMPTS[0]
    out = sample(model, [prompt] * 8, max_new_tokens=20, temperature=temperature, seed=0)
    for found in out:
        assert max(found.ids) < 62
        assert_logprobs(found, recomputed(model, prompt, found), atol=1e-4, rtol=1e-5)


@pytest.fixture
def short_model() -> GPT:
    """Its learned table has no place for a token after the last, even of a row that nobody
    reads any more."""
    return random_model(replace(SHAPE, block_size=12, pos="learned"))


ONES = [[i] for i in range(3, 13)]


def test_a_full_context_ends_a_completion_where_asked(short_model: GPT) -> None:
    prompts = [[1] * 12, [2] * 10, *ONES]
    out = sample(short_model, prompts, max_new_tokens=8, seed=0, on_overflow="stop")
    ends = [(0, "context"), (2, "context"), *[(8, "length")] * 10]
    assert [(len(c.ids), c.stop) for c in out] == ends


def test_a_prompt_that_fills_the_context_has_an_empty_completion(short_model: GPT) -> None:
    out = sample(short_model, [[1] * 12], max_new_tokens=8, on_overflow="stop")
    assert out == [Completion([], [], "context")]


def test_prompts_that_leave_room_end_by_themselves(short_model: GPT) -> None:
    out = sample(short_model, [[2] * 4, *ONES], max_new_tokens=8, seed=0, stop=[(1,)])
    assert len(out) == 11


def test_no_prompts_have_no_completions() -> None:
    assert sample(random_model(), [], max_new_tokens=5) == []


@pytest.mark.parametrize("prompts", [[[1], []], [[1], [2, 96]], [[-1]], [[1] * 60]])
def test_a_prompt_that_is_empty_foreign_or_too_long_raises(prompts: list[list[int]]) -> None:
    with pytest.raises(ConfigError):
        sample(random_model(), prompts, max_new_tokens=5)


@pytest.mark.parametrize(
    "change",
    [
        dict(max_new_tokens=0),
        dict(max_new_tokens=64),
        dict(prompts=[[1] * 65], on_overflow="stop"),
        dict(temperature=-1.0),
        dict(temperature=math.nan),
        dict(top_k=0),
        dict(top_p=0.0),
        dict(top_p=1.5),
    ],
    ids=str,
)
def test_settings_out_of_their_range_raise(change: dict[str, Any]) -> None:
    draw = partial(sample, random_model(), prompts=[[1]], max_new_tokens=5)
    with pytest.raises(ConfigError):
        draw(**change)


def test_constrained_rows_sample_beside_free_ones_and_stream_agrees() -> None:
    """A row with a grammar writes a readable call from a random model; its neighbours sample as
    without it."""
    tok = tokenizer.load("gpt2:512")
    model = random_model(replace(SHAPE, vocab_size=tok.n_vocab, block_size=160))
    grammar = one_tool_grammar(tok)
    stop = chat.stop_sequences(tok)
    draw = partial(sample, model, PROMPTS, stop=stop, max_new_tokens=48, seed=3)
    free = draw()
    mixed = draw(grammars=[None, grammar, grammar, None])
    assert [mixed[0].ids, mixed[3].ids] == [free[0].ids, free[3].ids]
    for done in mixed[1:3]:
        call, *_ = tool_calls.parse_calls(chat.completion_text(done.ids, tok))
        assert (call.name, list(call.arguments), type(call.arguments["x"])) == ("f", ["x"], int)
        assert all(math.isfinite(lp) and lp <= 0 for lp in done.logprobs)
    streamed = stream(
        model, PROMPTS[1], key=1, grammar=grammar, stop=stop, max_new_tokens=48, seed=3
    )
    assert list(streamed) == mixed[1].ids


# ---- copies of weights
@torch.no_grad()
def test_a_reader_reads_copies_of_weights_for_few_rows_and_the_weights_themselves_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing is in C, whose copies serve any number of rows."""
    monkeypatch.setattr(product, "library", lambda dtype: None)
    model = random_model()
    layer = model.blocks[0].mlp.up
    reading = reader_of(model).model.blocks[0].mlp.up
    old = layer.weight.clone()
    layer.weight.mul_(2)  # shows which of the two is read
    few = torch.randn(1, 32)
    many = torch.randn(reader.FEW_ROWS + 1, 32)
    torch.testing.assert_close(reading(few), few @ old.T)
    torch.testing.assert_close(reading(many), 2 * many @ old.T)


def test_weights_that_stay_are_copied_once_and_sampled_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model()
    how: dict[str, Any] = {"max_new_tokens": 5, "seed": 3, "samples_per_prompt": 2}
    prompts = [[1, 2, 3], [4, 5]]
    right = [generate.sample(model, [prompt], **how) for prompt in prompts]
    made = []

    def noted(*args: Any) -> Reader:
        made.append(args)
        return reader_of(*args)

    monkeypatch.setattr(generate, "reader_of", noted)
    with generate.weights_stay(model), generate.weights_stay(model):
        assert [generate.sample(model, [prompt], **how) for prompt in prompts] == right
    assert len(made) == 1


def test_weights_that_changed_after_the_block_are_read_anew() -> None:
    model = random_model()
    with generate.weights_stay(model):
        before = generate.sample(model, [[1, 2, 3]], max_new_tokens=5, seed=3)
    with torch.no_grad():
        model.wte.weight.mul_(-2)
    after = generate.sample(model, [[1, 2, 3]], max_new_tokens=5, seed=3)
    assert after[0].logprobs != before[0].logprobs
    assert not generate._readers


def test_a_model_learns_as_ever_beside_its_reader() -> None:
    model = random_model()
    layer = model.blocks[0].mlp.up
    reader_of(model)
    few = torch.randn(1, 32)
    layer(few).sum().backward()
    torch.testing.assert_close(layer.weight.grad, few.expand_as(layer.weight))


def test_a_plain_copy_shares_what_it_can() -> None:
    model = random_model()
    same = sharding.plain_copy(model, torch.float32)
    narrow = sharding.plain_copy(model, torch.bfloat16)
    assert same.blocks[1].mlp.up.weight.data_ptr() == model.blocks[1].mlp.up.weight.data_ptr()
    assert narrow.blocks[1].mlp.up.weight.dtype == torch.bfloat16
    assert narrow.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    assert all(p.requires_grad for p in model.parameters()), (
        "sampling must not freeze a model in training"
    )


def test_in_bfloat16_a_cpu_attends_to_kept_tokens_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdpa = attention._sdpa
    seen = list[Tensor]()

    def noted(*qkv: Any) -> Tensor:
        seen.append(sdpa(*qkv))
        return seen[-1]

    monkeypatch.setattr(attention, "_sdpa", noted)
    with torch.autocast("cpu", torch.bfloat16):
        sample(random_model(), PROMPTS, max_new_tokens=3, seed=0)
    assert {y.dtype for y in seen} == {torch.float32}


# ---- static shapes (`decode_graph`)
@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(top_k=7, top_p=0.9, temperature=0.7),
        dict(temperature=0.0),
        dict(stop=(), samples_per_prompt=1),
    ],
    ids=str,
)
@every_architecture
def test_static_shapes_draw_what_rows_draw_one_at_a_time(
    shape: GPTConfig, settings: dict[str, Any]
) -> None:
    draw = partial(
        sample,
        random_model(shape),
        PROMPTS,
        max_new_tokens=40,
        seed=3,
        samples_per_prompt=5,
        stop=STOPS,
    )
    draw = partial(draw, **settings)
    assert_same(draw(graph=True), draw())


A = [3, 1, 4, 1, 5, 9, 2, 6]
B = [2, 7, 1]
BEGINNINGS = [
    [*A, 5],
    [*A, 5, 3, 5],
    [*B, 8],
    [*A, 8, 9],
    [1] * 64,
    [1] * 63,
    [9, *range(40)],
]
PREFIXES = [8, 8, 3, 8, 63, 62, 1]  # tokens of each that others may share
WHOLE_AND_PARTS = [9, 8, 4, 8, 64, 62, 41]  # nothing stands behind some of them
complete = partial(sample, max_new_tokens=50, seed=1, stop=STOPS, on_overflow="stop")


@pytest.mark.parametrize(
    "graph, prefixes",
    [
        # of static shapes
        (True, None),
        (True, PREFIXES),
        (None, PREFIXES),
        (True, WHOLE_AND_PARTS),
        (None, WHOLE_AND_PARTS),
    ],
    ids=str,
)
def test_shared_beginnings_and_full_blocks_draw_the_same(
    graph: bool | None, prefixes: list[int] | None
) -> None:
    model = random_model()
    found = complete(model, BEGINNINGS, graph=graph, prefix_tokens=prefixes)
    assert_same(found, complete(model, BEGINNINGS))


def test_shared_beginnings_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    hidden = GPT.hidden

    def noted(self: GPT, ids: Tensor, **others: Any) -> Tensor:
        ran.append(ids.numel())
        return hidden(self, ids, **others)

    monkeypatch.setattr(GPT, "hidden", noted)
    complete(random_model(), BEGINNINGS[:4], prefix_tokens=PREFIXES[:4])
    assert ran[:2] == [2 * 8, 4 * 3], "two beginnings, then what stands behind them"


def test_small_batches_of_static_shapes_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    want = complete(model, BEGINNINGS)
    monkeypatch.setattr(memory, "rows_at_once", lambda *_: 2)
    assert_same(complete(model, BEGINNINGS, graph=True), want)


def test_adapters_draw_the_same_in_small_batches_of_static_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model()
    monkeypatch.setattr(memory, "rows_at_once", lambda *_: 2)
    lora.attach(model, 2)
    for _, layer in lora.adapted(model):
        torch.nn.init.normal_(layer.b, std=0.1)
    assert_same(complete(model, BEGINNINGS, graph=True), complete(model, BEGINNINGS))


def test_one_question_in_sixteen_tokens_and_finished_rows_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = []
    chunks = []
    step = decode_graph.Decoder.step
    narrow = decode_graph.Decoder._narrow

    def noted_step(self: decode_graph.Decoder) -> Any:
        slots.append(len(self.row))
        return step(self)

    def noted_narrow(self: decode_graph.Decoder, n: int) -> Any:
        chunks.append(n)
        return narrow(self, n)

    monkeypatch.setattr(decode_graph.Decoder, "step", noted_step)
    monkeypatch.setattr(decode_graph.Decoder, "_narrow", noted_narrow)
    out = sample(
        random_model(),
        PROMPTS,
        max_new_tokens=50,
        seed=0,
        samples_per_prompt=8,
        stop=STOPS,
        graph=True,
    )
    longest = max(len(c.ids) for c in out)
    assert len(chunks) == -(-longest // decode_graph.CHUNK)
    assert longest > 2 * decode_graph.CHUNK
    assert slots[0] == 32
    assert slots[-1] < 32
    assert slots == sorted(slots, reverse=True)


def test_batches_have_few_sizes_none_much_larger_than_its_rows() -> None:
    sizes = {4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}
    assert {memory.bucket(n) for n in range(1, 513)} == sizes
    assert all(n <= memory.bucket(n) <= max(4, 1.5 * n) for n in range(1, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("name, samples", [("2b", 8), ("8b", 1)])
def test_predicted_rows_fit_and_use_the_memory(
    name: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of the default size on 79 GiB, on fake tensors: prompts of 256 tokens, 256 new.
    Its peak is under what was free, and near it."""
    monkeypatch.setattr(device, "CPU_KINDS", ())
    cfg = preset(name)
    free = 79 * 2**30 - 4 * cfg.n_params
    row = memory.row_bytes(cfg, 2, prompt_tokens=256, new_tokens=256, samples=samples)
    rows = memory.rows_in_memory(cfg, free, 2, row)
    batch = Batch(
        prompts=[[i // samples] * 256 for i in range(rows)],
        prefix_lengths=[256] * rows,
        budgets=[256] * rows,
        keys=list(range(rows)),
        truncation=Truncation(),
        stops=[[1]],
    )
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = GPT(cfg)
        with Tape() as tape:
            reader = reader_of(model, graph=True)
            made = decode_graph.Decoder(reader, *generate.prefill(reader, batch, 0), batch)
            made._narrow(256)
            made.step()
            peak = tape.peak
    assert 0.6 * free < peak <= free * (1 - memory.SPARE), (rows, peak / 2**30, free / 2**30)
