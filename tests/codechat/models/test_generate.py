"""Sampling: neither cache nor neighbours change anything, log-probabilities are the draw's,
stops match; with static shapes the same tokens, few questions to the device, one compilation,
predicted memory."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_models import randomise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.core.errors import ConfigError
from codechat.distributed import sharding
from codechat.models import attention, draws, generate, lora
from codechat.models.attention import KVCache
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.draws import Batch
from codechat.models.fast import decode_graph, device, memory, reader
from codechat.models.fast.reader import reader_of
from codechat.models.fast.shared_prefix import SharedCache
from codechat.models.generate import Completion, Truncation, sample, stream
from codechat.models.gpt import GPT
from codechat.text import chat, tokenizer
from codechat_lab.instruments.step_memory import Tape
from codechat_lab.serve.call_grammar import Rules, call_grammar

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [40], [13, 14, 15, 16, 17]]
STOPS = ((5,), (7, 8), (30,), (60,))
ARCHITECTURES = [dict(), dict(pos="learned", mlp="gelu"), dict(n_kv_head=2)]
ARCHITECTURES += [dict(n_kv_head=1, mlp="swiglu", qk_norm=True, qkv_bias=True, tied=False)]
ARCHITECTURES += [
    dict(attention="mla"),
    dict(attention="mla", kv_rank=12, q_rank=10, rope_width=6, head_width=10),
]


def random_model(scale: float = 0.2, **options: Any) -> GPT:
    shape = dict(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=90) | options
    return randomise(GPT(GPTConfig(**shape)), scale).train()


def logits_behind(model: GPT, ids: Tensor, cache: KVCache, n_new: Tensor | None = None) -> Tensor:
    """(B, T, V) of new tokens behind those that the cache keeps."""
    return F.linear(model.hidden(ids, cache=cache, n_new=n_new), model.head_weight())


def assert_same(got: list[Completion], want: list[Completion]) -> None:
    assert [(c.ids, c.stop) for c in got] == [(c.ids, c.stop) for c in want]
    for a, b in zip(got, want):
        torch.testing.assert_close(
            torch.tensor(a.logprobs),
            torch.tensor(b.logprobs),
            atol=1e-5,
            rtol=0,
        )


def scripted_model(script: Sequence[int], vocab_size: int, block_size: int = 64) -> GPT:
    """A model whose most likely token after position i is script[i], whatever the text says."""
    width = -(-vocab_size // 64) * 64
    shape = dict(
        depth=1,
        n_embd=width,
        n_head=1,
        block_size=block_size,
        vocab_size=vocab_size,
        n_tags=0,
    )
    model = GPT(GPTConfig(**shape, pos="learned"))
    model.wte.weight.data = torch.eye(width)
    model.wpe.weight.data = torch.zeros(block_size, width)
    model.wpe.weight.data[range(len(script)), list(script)] = 100.0
    return model


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(options: dict[str, Any]) -> None:
    model = random_model(**options)
    lengths = torch.tensor([5, 9, 2])
    T = 20
    ids = torch.randint(90, (3, T), generator=torch.Generator().manual_seed(2))
    full = model(ids)
    cache = KVCache(model.cfg, 3, T + 9)
    first = logits_behind(
        model, ids[:, :9], cache, lengths
    )  # right-padded with tokens that must not be seen
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(first[row, :n], full[row, :n], atol=1e-5, rtol=1e-5)
    for new in (1, 1, 3, 1, 4):
        at = cache.lengths[:, None] + torch.arange(new)
        got = logits_behind(model, ids.gather(1, at), cache)
        torch.testing.assert_close(got, full[torch.arange(3)[:, None], at], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_of_latent_attention_the_latent_and_one_rotated_key_are_all_that_is_kept() -> None:
    """arXiv:2405.04434, table 1: (kv_rank + rope_width) numbers per token and block, whatever
    the number of heads."""
    shape = dict(head_width=16, kv_rank=24, rope_width=8)
    for heads in (4, 16):
        model = random_model(attention="mla", n_head=heads, **shape)
        cache = KVCache(model.cfg, 3, 10)
        logits_behind(model, torch.zeros(3, 10, dtype=torch.long), cache)
        assert (
            cache.kv.numel()
            == 3 * 10 * model.cfg.depth * (24 + 8)
            == 3 * 10 * model.cfg.depth * model.cfg.cache_width
        )
        per_head = random_model(n_head=heads, head_width=16)
        assert KVCache(per_head.cfg, 3, 10).kv.numel() == 3 * 10 * 2 * 2 * heads * 16
    (block,) = cache.kv[0]  # no values beside the keys
    latent = model.blocks[0].attn.kv_norm(
        model.blocks[0].attn.kv_a(model.blocks[0].attn_norm(model.wte.weight[:1]))[:, :24]
    )
    torch.testing.assert_close(block[0, 0, 0, :24], latent[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("targets", [("qkv",), ("qkv", "out", "up", "down")])
def test_latent_attention_with_adapters_samples_what_it_scores(targets: tuple[str, ...]) -> None:
    model = random_model(attention="mla", q_rank=10)
    lora.attach(model, 3, 6.0, targets)
    for name, p in model.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(p, std=0.1)
    adapted = {name.split(".")[-1] for name, _ in lora.adapted(model)}
    assert adapted == {"q_a", "q_b", "kv_a", "kv_b", *targets} - {"qkv"}
    for graph in (False, True):
        for i, completion in enumerate(
            sample(model, PROMPTS, max_new_tokens=8, seed=0, graph=graph)
        ):
            expected = recomputed(model, PROMPTS[i], completion, 1.0)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
@torch.no_grad()
def test_ragged_tokens_behind_a_shared_prefix_equal_the_full_forward(
    options: dict[str, Any],
) -> None:
    """Right-padded with tokens that must not be seen, then single tokens, then rows leave."""
    model = random_model(**options)
    rng = torch.Generator().manual_seed(3)
    prefix = torch.randint(90, (2, 7), generator=rng)
    heads = torch.tensor([7, 3])
    owner = torch.tensor([1, 0, 1, 1])
    own = torch.randint(90, (4, 10), generator=rng)
    tails = torch.tensor([5, 1, 3, 5])
    prefilled = KVCache(model.cfg, 2, 7)
    logits_behind(model, prefix, prefilled, heads)
    shared = SharedCache(prefilled, owner, 10)
    rows = torch.arange(4)
    begin = heads[owner]
    whole = (torch.cat((prefix[p, : heads[p]], own[row])) for row, p in enumerate(owner.tolist()))
    full = [model(ids[None])[0, heads[p] :] for ids, p in zip(whole, owner.tolist())]
    got = logits_behind(model, own[:, :5], shared, tails)
    for row, n in enumerate(tails.tolist()):
        torch.testing.assert_close(got[row, :n], full[row][:n], atol=1e-5, rtol=1e-5)
    for keep, new in (([0, 1, 2, 3], 1), ([3, 1, 2], 3), ([0, 1], 1)):
        shared = shared.select(torch.tensor(keep))
        rows = rows[keep]
        at = (shared.lengths - begin[rows])[:, None] + torch.arange(new)
        got = logits_behind(model, own[rows[:, None], at], shared)
        for i, row in enumerate(rows.tolist()):
            torch.testing.assert_close(got[i], full[row][at[i]], atol=1e-5, rtol=1e-5)


def recomputed(
    model: GPT, prompt: list[int], completion: Completion, temperature: float
) -> torch.Tensor:
    ids = torch.tensor([prompt + completion.ids])
    with torch.no_grad():
        return model.token_logprobs(ids[:, :-1], ids[:, 1:], temperature=temperature)[0][
            0, len(prompt) - 1 :
        ]


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_sampled_logprobs_equal_recomputed_ones(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows, which read transposed copies, and of more; also where oneDNN packs all
    weights."""
    model = random_model(**options)
    how = dict(max_new_tokens=12, seed=0, stop=STOPS)
    for temperature, samples, packed in (
        (1.0, 3, 1 << 30),
        (0.6, 1 + reader.FEW_ROWS // 4, 1 << 30),
        (1.7, 3, 1),
    ):
        monkeypatch.setattr(reader, "PACKED", packed)
        found = sample(model, PROMPTS, temperature=temperature, samples_per_prompt=samples, **how)
        for i, completion in enumerate(found):
            expected = recomputed(model, PROMPTS[i // samples], completion, temperature)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_a_conversation_draws_the_same_and_runs_only_what_its_prompts_have_new(
    options: dict[str, Any],
) -> None:
    model = random_model(**options)
    prompt = list(range(1, 9))
    runs = list[int]()
    model.blocks[0].register_forward_pre_hook(lambda block, given: runs.append(given[0].shape[1]))
    # the last sampled id was not run
    kept = generate.Conversation(model)
    expected = [8, 2 + 1, 2]
    for turn, (more, back) in enumerate((([], 0), ([21, 22], 0), ([9, 8], 3))):
        prompt = [*prompt[: len(prompt) - back], *more]
        how = dict(max_new_tokens=5, seed=3, key=turn)
        want = list(stream(model, prompt, **how))
        runs.clear()
        got = list(stream(model, prompt, kept=kept, **how))
        assert got == want
        assert runs == [expected[turn], 1, 1, 1, 1]
        prompt += got


def test_greedy_takes_the_most_likely_token_and_reports_its_own_logprob() -> None:
    model = random_model()
    for prompt, completion in zip(
        PROMPTS, sample(model, PROMPTS, max_new_tokens=10, temperature=0)
    ):
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1, : model.cfg.n_ids].argmax()))
        assert completion.ids == ids[len(prompt) :]
        expected = recomputed(model, prompt, completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        for temperature in (1e-40, 1e-300):  # the second is 0 in float32
            (cold,) = sample(model, [prompt], max_new_tokens=10, temperature=temperature, seed=0)
            assert cold.ids == completion.ids
            assert not any(cold.logprobs)


def kept_tokens(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> list[int]:
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


def test_truncation_restricts_the_support_and_renormalises() -> None:
    model = random_model(0.2)
    with torch.no_grad():
        logits = model(torch.tensor([[3]]))[0, 0, : model.cfg.n_ids] / 0.8
    for top_k, top_p in [(3, None), (None, 0.5), (10, 0.6), (1, None), (None, 1e-9), (500, 1.0)]:
        how = dict(
            max_new_tokens=1,
            top_k=top_k,
            top_p=top_p,
            temperature=0.8,
            seed=0,
            samples_per_prompt=400,
        )
        out = sample(model, [[3]], **how)
        kept = kept_tokens(logits, top_k, top_p)
        expected = dict(zip(kept, logits[kept].log_softmax(0).tolist()))
        for completion in out:
            assert completion.logprobs[0] == pytest.approx(expected[completion.ids[0]], abs=1e-5)
        met = {c.ids[0] for c in out}
        assert len(met) == len(kept) or len(kept) > 20, (
            "every kept token of a small support is met in 400 draws"
        )


CUTS = [dict(top_k=5), dict(top_k=20, temperature=0.6), dict(top_k=20, top_p=0.7), dict(top_p=0.5)]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_completion_names_the_tokens_that_were_kept(cut: dict[str, Any], graph: bool) -> None:
    """Also of rows that end early, in small batches, and with static shapes; noting them
    changes no draw."""
    model = random_model()
    how = dict(max_new_tokens=12, seed=0, samples_per_prompt=3, stop=STOPS, graph=graph, **cut)
    plain = sample(model, PROMPTS, **how)
    noted = sample(model, PROMPTS, note_kept=True, **how)
    assert plain == noted
    assert all(c.kept is None for c in plain)
    assert len({len(c.ids) for c in noted}) > 1
    for i, c in enumerate(noted):
        ids = torch.tensor([PROMPTS[i // 3] + c.ids])
        with torch.no_grad():
            rows = model(ids)[0, len(PROMPTS[i // 3]) - 1 : -1, : model.cfg.n_ids] / cut.get(
                "temperature", 1.0
            )
        assert c.kept is not None
        assert c.kept.dtype == torch.int32
        assert len(c.kept) == len(c.ids)
        for logits, kept in zip(rows, c.kept.tolist(), strict=True):
            assert {x for x in kept if x >= 0} == {
                *kept_tokens(logits, cut.get("top_k"), cut.get("top_p"))
            }


@pytest.mark.parametrize(
    "how", [dict(), dict(top_k=500), dict(top_p=1.0), dict(top_k=5, temperature=0.0)], ids=str
)
def test_nothing_is_noted_where_nothing_was_cut(how: dict[str, Any]) -> None:
    (c,) = sample(random_model(), [[1]], max_new_tokens=3, seed=0, note_kept=True, **how)
    assert c.kept is None


def test_ids_behind_the_vocabulary_are_never_kept() -> None:
    """The rows that pad the vocabulary to a multiple of 64."""
    model = random_model(vocab_size=70, n_tags=0)
    (c,) = sample(model, [[1]], max_new_tokens=3, seed=0, note_kept=True, top_k=69)
    assert c.kept.shape == (3, 69)
    assert c.kept.max() < 70
    (c,) = sample(model, [[1]], max_new_tokens=3, seed=0, note_kept=True, top_p=0.999999)
    assert c.kept.shape[1] == 70
    assert c.kept.max() < 70


def test_draws_follow_the_distribution() -> None:
    model = random_model(0.1, vocab_size=8, n_tags=0)
    n = 4000
    out = sample(model, [[2, 5, 1]], max_new_tokens=1, seed=7, samples_per_prompt=n)
    with torch.no_grad():
        expected = n * model(torch.tensor([[2, 5, 1]]))[0, -1, :8].softmax(0)
    counts = torch.bincount(torch.tensor([c.ids[0] for c in out]), minlength=8)
    assert expected.min() > 5, "the chi-square test wants a few expected counts everywhere"
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 24.3  # 99.9 % quantile at 7 degrees of freedom


def test_a_token_that_cannot_be_drawn_is_not() -> None:
    """Every uniform, the ends of the interval included, lands on the token that the plain sum
    gives."""
    for vocab in (64, 411, 4096, 50304):
        rng = torch.Generator().manual_seed(0)
        logits = 4 * torch.randn(16, vocab, generator=rng)
        logits[:, ::2] = -math.inf
        u = torch.rand(16, generator=rng, dtype=torch.float64)
        u[:2] = 0.0
        u[2:4] = 1 - 2.0**-53
        ids, logprobs = draws.draw(logits.clone(), Truncation(), u)
        p = logits.double().softmax(-1)
        mass, above = (x.gather(1, ids[:, None])[:, 0] for x in (p, p.cumsum(-1)))
        torch.testing.assert_close(logprobs, mass.log().float(), atol=1e-5, rtol=0)
        assert (mass > 0).all()
        assert (above >= u - 1e-6).all()
        assert (above - mass <= u + 1e-6).all()


def test_seed_prompt_sample_and_position_all_move_the_draw() -> None:
    """A constant distribution, where tokens differ only through the draws."""
    model = random_model(0.0)
    how = dict(max_new_tokens=10)

    def rows(samples: int = 2, **more: Any) -> list[tuple[int, ...]]:
        return [
            tuple(c.ids)
            for c in sample(model, [[1], [1]], samples_per_prompt=samples, **how, **more)
        ]

    both = rows(seed=0) + rows(seed=1)
    assert len(set(both)) == 8
    assert all(len(set(row)) > 4 for row in both)
    assert rows(seed=0) == both[:4]
    assert rows(samples=5, seed=0)[5:7] == both[2:4]
    same = rows(seed=0, keys=["x", "x"])
    assert same[:2] == same[2:]
    torch.manual_seed(5)
    first = rows()
    second = rows()
    torch.manual_seed(5)
    assert rows() == first != second, "without a seed torch decides"


def test_tokens_do_not_depend_on_batch_size_order_or_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model()
    how = dict(max_new_tokens=20, stop=STOPS, seed=3, samples_per_prompt=4)
    names = ["a", "b", "c", "d"]
    whole = sample(model, PROMPTS, keys=names, **how)
    assert len({c.stop for c in whole}) == 2, (
        "rows must end at different times for this to mean something"
    )
    tokens = [c.ids for c in whole]
    for batch_size in (1, 7):
        with monkeypatch.context() as patch:
            patch.setattr(memory, "rows_at_once", lambda *_, n=batch_size: n)
            assert [c.ids for c in sample(model, PROMPTS, keys=names, **how)] == tokens
    mixed = sample(model, PROMPTS[::-1], keys=names[::-1], **how)
    assert [c.ids for i in (3, 2, 1, 0) for c in mixed[4 * i : 4 * i + 4]] == tokens
    for i, prompt in enumerate(PROMPTS):
        assert_same(sample(model, [prompt], keys=[names[i]], **how), whole[4 * i : 4 * i + 4])


def test_prompts_run_once_a_few_at_a_time_and_finished_rows_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One completion each, whose cache decoding goes on with, or several, which share their
    prompt's."""
    model = random_model()
    shapes = []
    model.blocks[0].register_forward_pre_hook(
        lambda _, args: shapes.append(tuple(args[0].shape[:2]))
    )
    out = sample(
        model,
        [*PROMPTS, PROMPTS[0]],
        max_new_tokens=30,
        seed=0,
        samples_per_prompt=4,
        stop=STOPS,
    )
    assert shapes[:2] == [(4, 9), (20, 1)]  # four distinct prompts, padded to the longest
    carried = sum(rows for rows, _ in shapes[1:])
    needed = sum(len(c.ids) - 1 for c in out)
    assert needed <= carried <= needed / generate.COMPACT_BELOW + 20
    assert len(shapes) == max(len(c.ids) for c in out)
    prompts = [[1 + i % 7] * n for i, n in enumerate((3, 20, 4, 5, 19, 2))]
    for samples in (1, 3):
        how = dict(max_new_tokens=12, seed=0, samples_per_prompt=samples)
        monkeypatch.setattr(memory, "CPU_PREFILL", 1024)
        whole = sample(model, prompts, **how)
        monkeypatch.setattr(memory, "CPU_PREFILL", 21)
        shapes.clear()
        parts = sample(model, prompts, **how)
        assert shapes[:4] == [
            (4, 5),
            (1, 19),
            (1, 20),
            (6 * samples, 1),
        ]  # in the order of their lengths
        assert [c.ids for c in parts] == [c.ids for c in whole]


def test_stream_yields_what_sample_returns_and_both_leave_the_mode() -> None:
    model = random_model(recompute="blocks").train()
    how = dict(max_new_tokens=20, seed=4, stop=STOPS, top_k=20)
    for prompt in PROMPTS:
        (whole,) = sample(model, [prompt], keys=["k"], **how)
        assert list(stream(model, prompt, key="k", **how)) == whole.ids
    next(iter(stream(model, [1], max_new_tokens=3)))
    assert torch.is_grad_enabled()
    assert model.training
    model.loss(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()


def test_stop_sequences() -> None:
    for script, stop, prompt, ids, reason in (
        (
            [1, 1, 1, 2, 5],
            [(1, 1, 2)],
            [0],
            [1, 1, 1, 2],
            "stop",
        ),  # a matcher that starts over at a mismatch misses it
        ([1, 2, 1, 2, 1, 3], [(1, 2, 1, 3)], [0], [1, 2, 1, 2, 1, 3], "stop"),
        ([1, 2, 3, 4], [(3, 4), (2, 3)], [0], [1, 2, 3], "stop"),
        (
            [1, 2, 3, 4],
            [(1, 3), (2, 4), (4, 3)],
            [0],
            [1, 2, 3, 4],
            "length",
        ),  # all of their tokens, never in a row
        ([1, 2, 3], [(2, 3)], [0], [1, 2, 3], "stop"),  # complete exactly at the last token
        ([1, 2], [(1, 2, 3)], [0], [1, 2], "length"),
        (
            [0, 0, 3, 4],
            [(1, 2, 3), (2, 3), (1, 2)],
            [9, 1, 2],
            [3, 4],
            "length",
        ),  # the prompt is no part
    ):
        how = dict(max_new_tokens=len(script) - len(prompt) + 1, temperature=0, stop=stop)
        (found,) = sample(scripted_model(script, 64), [prompt], **how)
        assert (found.ids, found.stop, len(found.logprobs)) == (ids, reason, len(ids))


def test_a_row_that_stopped_stays_stopped_while_others_go_on() -> None:
    """Rows at different places of one script; the first to stop meets the stop sequence again
    meanwhile."""
    model = scripted_model([1, 2, 3, 4, 2, 3, 5, 6, 7, 8, 2, 3, 9, 9], 64)
    prompts = [[0], *([0] * n for n in (7, 7, 7, 8, 8, 8, 8))]
    out = sample(model, prompts, max_new_tokens=7, temperature=0, stop=[(2, 3)])
    assert [c.ids for c in out] == [[1, 2, 3]] + [[5, 6, 7, 8, 2, 3]] * 3 + [[6, 7, 8, 2, 3]] * 4


def test_rows_without_an_owner_are_never_sampled() -> None:
    model = random_model(vocab_size=60, n_tags=2, tied=False)
    model.head.weight.data[62:] = 100 * torch.randn(
        2, 32, generator=torch.Generator().manual_seed(0)
    )
    for temperature in (0.0, 1.0):
        for found in sample(
            model, PROMPTS[:1] * 8, max_new_tokens=20, temperature=temperature, seed=0
        ):
            assert max(found.ids) < 62
            expected = recomputed(model, PROMPTS[0], found, 1.0)
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=1e-5)


def test_a_full_context_ends_a_completion_where_asked() -> None:
    """The learned table has no place for a token after the last, even of a row that nobody
    reads any more."""
    model = random_model(block_size=12, pos="learned")
    prompts = [[1] * 12, [2] * 10, *([i] for i in range(3, 13))]
    out = sample(model, prompts, max_new_tokens=8, seed=0, on_overflow="stop")
    ends = [(0, "context"), (2, "context"), *[(8, "length")] * 10]
    assert [(len(c.ids), c.stop) for c in out] == ends
    assert sample(model, [[1] * 12], max_new_tokens=8, on_overflow="stop") == [
        Completion([], [], "context")
    ]
    assert len(sample(model, [[2] * 4, *prompts[2:]], max_new_tokens=8, seed=0, stop=[(1,)])) == 11


def test_bad_input_raises() -> None:
    model = random_model()
    assert sample(model, [], max_new_tokens=5) == []
    for change in (
        *(dict(prompts=p) for p in ([[1], []], [[1], [2, 96]], [[-1]], [[1] * 60])),
        *(
            dict(max_new_tokens=0),
            dict(max_new_tokens=64),
            dict(prompts=[[1] * 65], on_overflow="stop"),
        ),
        *(
            dict(temperature=-1.0),
            dict(temperature=math.nan),
            dict(top_k=0),
            dict(top_p=0.0),
            dict(top_p=1.5),
        ),
    ):
        with pytest.raises(ConfigError):
            sample(model, **(dict(prompts=[[1]], max_new_tokens=5) | change))


def test_constrained_rows_sample_beside_free_ones_and_stream_agrees() -> None:
    """A row with a grammar writes a readable call from a random model; its neighbours sample as
    without it."""
    tok = tokenizer.load("gpt2:512")
    model = random_model(vocab_size=tok.n_vocab, block_size=160)
    tool = {
        "name": "f",
        "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
    }
    grammar = call_grammar(tok, "reserved", [tool], Rules(required=True))
    stop = chat.stop_sequences(tok)
    how = dict(max_new_tokens=48, seed=3)
    free = sample(model, PROMPTS, stop=stop, **how)
    mixed = sample(model, PROMPTS, stop=stop, grammars=[None, grammar, grammar, None], **how)
    assert [mixed[0].ids, mixed[3].ids] == [free[0].ids, free[3].ids]
    for done in mixed[1:3]:
        call, *_ = chat.parse_calls(chat.completion_text(done.ids, tok))
        assert (call.name, list(call.arguments), type(call.arguments["x"])) == ("f", ["x"], int)
        assert all(math.isfinite(lp) and lp <= 0 for lp in done.logprobs)
    assert list(stream(model, PROMPTS[1], key=1, grammar=grammar, stop=stop, **how)) == mixed[1].ids


@torch.no_grad()
def test_a_reader_reads_copies_of_weights_for_few_rows_and_the_weights_themselves_for_many() -> (
    None
):
    model = random_model()
    layer = model.blocks[0].mlp.up
    reading = reader_of(model).model.blocks[0].mlp.up
    old = layer.weight.clone()
    layer.weight.mul_(2)  # shows which of the two is read
    few = torch.randn(1, 32)
    many = torch.randn(reader.FEW_ROWS + 1, 32)
    torch.testing.assert_close(reading(few), few @ old.T)
    torch.testing.assert_close(reading(many), 2 * many @ old.T)


def test_a_model_learns_as_ever_beside_its_reader() -> None:
    model = random_model()
    layer = model.blocks[0].mlp.up
    reader_of(model)
    few = torch.randn(1, 32)
    layer(few).sum().backward()
    torch.testing.assert_close(layer.weight.grad, few.expand_as(layer.weight))


def test_a_plain_copy_shares_what_it_can() -> None:
    model = random_model()
    same, narrow = (sharding.plain_copy(model, dtype) for dtype in (torch.float32, torch.bfloat16))
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
    seen = list[torch.Tensor]()
    monkeypatch.setattr(attention, "_sdpa", lambda *qkv: seen.append(sdpa(*qkv)) or seen[-1])
    with torch.autocast("cpu", torch.bfloat16):
        sample(random_model(), PROMPTS, max_new_tokens=3, seed=0)
    assert {y.dtype for y in seen} == {torch.float32}


# ---- static shapes (`decode_graph`)
@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_static_shapes_draw_what_rows_draw_one_at_a_time(options: dict[str, Any]) -> None:
    model = random_model(**options)
    base = dict(max_new_tokens=40, seed=3, samples_per_prompt=5, stop=STOPS)
    warm = dict(top_k=7, top_p=0.9, temperature=0.7)
    for how in (dict(), warm, dict(temperature=0.0), dict(stop=(), samples_per_prompt=1)):
        assert_same(
            sample(model, PROMPTS, graph=True, **base | how), sample(model, PROMPTS, **base | how)
        )


def test_shared_beginnings_run_once_and_full_blocks_small_batches_and_adapters_draw_the_same(
    monkeypatch: Any,
) -> None:
    how = dict(max_new_tokens=50, seed=1, stop=STOPS, on_overflow="stop")
    model = random_model()
    ran = []
    hidden = GPT.hidden
    a = [3, 1, 4, 1, 5, 9, 2, 6]
    b = [2, 7, 1]
    prompts = [[*a, 5], [*a, 5, 3, 5], [*b, 8], [*a, 8, 9], [1] * 64, [1] * 63, [9, *range(40)]]
    prefixes = [8, 8, 3, 8, 63, 62, 1]
    want = sample(model, prompts, **how)
    for more in (
        dict(graph=True),
        dict(graph=True, prefix_tokens=prefixes),
        dict(prefix_tokens=prefixes),
    ):
        assert_same(sample(model, prompts, **how, **more), want)
    monkeypatch.setattr(
        GPT, "hidden", lambda self, ids, **kw: (ran.append(ids.numel()), hidden(self, ids, **kw))[1]
    )
    sample(model, prompts[:4], prefix_tokens=prefixes[:4], **how)
    assert ran[:2] == [2 * 8, 4 * 3], "two beginnings, then what stands behind them"
    monkeypatch.setattr(memory, "rows_at_once", lambda *_: 2)
    assert_same(sample(model, prompts, graph=True, **how), want)
    lora.attach(model, 2)
    for _, layer in lora.adapted(model):
        torch.nn.init.normal_(layer.b, std=0.1)
    assert_same(sample(model, prompts, graph=True, **how), sample(model, prompts, **how))


def test_one_question_in_sixteen_tokens_and_finished_rows_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = []
    chunks = []
    step = decode_graph.Decoder.step
    narrow = decode_graph.Decoder._narrow
    monkeypatch.setattr(
        decode_graph.Decoder, "step", lambda self: (slots.append(len(self.row)), step(self))[1]
    )
    monkeypatch.setattr(
        decode_graph.Decoder, "_narrow", lambda self, n: (chunks.append(n), narrow(self, n))[1]
    )
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
    cfg = GPTConfig(**PRESETS[name])
    free = 79 * 2**30 - 4 * cfg.n_params
    row = memory.row_bytes(cfg, 2, prompt_tokens=256, new_tokens=256, samples=samples)
    rows = memory.rows_in_memory(cfg, free, 2, row)
    prompts = [[i] * 256 for i in range(-(-rows // samples)) for _ in range(samples)][:rows]
    batch = Batch(prompts, [256] * rows, [256] * rows, list(range(rows)), Truncation(), [[1]])
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = GPT(cfg)
        with Tape() as tape:
            reader = reader_of(model, graph=True)
            made = decode_graph.Decoder(reader, *generate.prefill(reader.model, batch, 0), batch)
            made._narrow(256)
            made.step()
            peak = tape.peak
    assert 0.6 * free < peak <= free * (1 - memory.SPARE), (rows, peak / 2**30, free / 2**30)
