"""Decoding with static shapes: the same tokens, few questions to the device, one compilation, prompts run once, and the memory that is predicted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_generate import ARCHITECTURES, PROMPTS, STOPS, random_model
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from codechat.launch.memory_tape import Tape
from codechat.models import decode_graph, decoding, generate, lora, packed_attention, sampling_memory
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.generate import sample
from codechat.models.gpt import GPT

GIB = 2**30
EVERY = [*ARCHITECTURES, dict(attention="mla", kv_rank=16, rope_head_width=4)]


def assert_same(got: list[generate.Completion], want: list[generate.Completion]) -> None:
    assert [c.ids for c in got] == [c.ids for c in want] and [c.stop for c in got] == [c.stop for c in want]
    for a, b in zip(got, want):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", EVERY, ids=str)
@pytest.mark.parametrize(
    "how",
    [dict(), dict(top_k=7, top_p=0.9, temperature=0.7), dict(temperature=0.0), dict(stop=(), samples_per_prompt=1)],
    ids=str,
)
def test_static_shapes_draw_what_rows_draw_one_at_a_time(options: dict[str, Any], how: dict[str, Any]) -> None:
    model, how = random_model(**options), dict(max_new_tokens=40, seed=3, samples_per_prompt=5, stop=STOPS) | how
    assert_same(sample(model, PROMPTS, graph=True, **how), sample(model, PROMPTS, **how))


def test_shared_beginnings_full_blocks_and_small_batches_draw_the_same() -> None:
    model, how = random_model(), dict(max_new_tokens=50, seed=1, stop=STOPS, on_overflow="stop", graph=True)
    a, b = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]
    prompts = [[*a, 5], [*a, 5, 3, 5], [*b, 8], [*a, 8, 9], [1] * 64, [1] * 63, [9, *range(40)]]
    want = sample(model, prompts, **(how | dict(graph=False)))
    for more in (dict(), dict(prefix_tokens=[8, 8, 3, 8, 63, 62, 1]), dict(batch_size=2)):
        assert_same(sample(model, prompts, **how, **more), want)
    lora.attach(model, 2)
    for _, layer in lora.adapted(model):
        torch.nn.init.normal_(layer.b, std=0.1)
    assert_same(sample(model, prompts, **how), sample(model, prompts, **(how | dict(graph=False))))


def test_low_precision_draws_from_the_same_distribution() -> None:
    model, how = random_model(0.1), dict(max_new_tokens=8, seed=0, samples_per_prompt=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = sample(model, PROMPTS, graph=True, **how)
        for i, completion in enumerate(out):
            prompt = PROMPTS[i // 2]
            ids = torch.tensor([prompt + completion.ids])
            with torch.no_grad():
                found = model.token_logprobs(ids[:, :-1], ids[:, 1:])[0][0, len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.logprobs), found, atol=0.1, rtol=0)


def test_one_question_in_sixteen_tokens_and_finished_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    made, slots = [], []
    opened, step = decode_graph.Decoder._open, decode_graph.Decoder.step
    monkeypatch.setattr(decode_graph.Decoder, "_open", lambda self, *a: (made.append(self), opened(self, *a))[1])
    monkeypatch.setattr(decode_graph.Decoder, "step", lambda self: (slots.append(len(self.owner)), step(self))[1])
    out = sample(random_model(), PROMPTS, max_new_tokens=50, seed=0, samples_per_prompt=8, stop=STOPS, graph=True)
    longest = max(len(c.ids) for c in out)
    assert [d.waits for d in made] == [-(-longest // decode_graph.CHUNK)] and longest > 2 * decode_graph.CHUNK
    assert slots[0] == 32 and slots[-1] < 32 and slots == sorted(slots, reverse=True)
    assert {sampling_memory.bucket(n) for n in range(1, 513)} == {
        4,
        6,
        8,
        12,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
    }
    assert all(n <= sampling_memory.bucket(n) <= max(4, 1.5 * n) for n in range(1, 1000))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_each_prompt_runs_once_however_many_batches(
    graph: bool, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = random_model(), []
    hidden = GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda self, ids, **more: (ran.append(tuple(ids.shape)), hidden(self, ids, **more))[1]
    )
    how = dict(max_new_tokens=12, seed=0, samples_per_prompt=5, stop=STOPS)
    got = sample(model, PROMPTS, batch_size=batch_size, graph=graph, **how)
    assert sum(rows for rows, tokens in ran if tokens > 1) + ([1] in map(len, PROMPTS)) * (batch_size < 5) <= len(
        PROMPTS
    )
    assert_same(got, sample(model, PROMPTS, batch_size=20, **how))


# ---- compiled


@contextmanager
def compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def reading(model: GPT, graph: bool | None, _: int) -> Iterator[generate.Reader]:
        copy, head = decoding.reader(model)
        yield generate.Reader(copy, lambda h: torch.nn.functional.linear(h, head), head, True, backend)

    decode_graph.compiled_region.cache_clear()
    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        patched.setattr(generate, "reading", reading)
        yield


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def dispatched(model: GPT, tokens: int) -> int:
    with Count() as count:
        sample(model, [[1, 2, 3]], max_new_tokens=tokens, seed=1, samples_per_prompt=6)
    return count.calls


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_three_graphs_serve_all_batches_and_a_token_is_few_calls(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of three sizes, 64 tokens each, rows leaving; every region is one full graph; draws as today's in float32."""
    model = random_model(depth=12, block_size=160)

    def run(i: int) -> list[generate.Completion]:
        n, samples = [(3, 5), (2, 6), (4, 4)][i]
        prompts = [[*p, i] for p in PROMPTS[:n]]
        return sample(model, prompts, max_new_tokens=64, seed=i, samples_per_prompt=samples, stop=((5, 6),))

    want = [run(i) for i in range(3)]
    with compiled(backend, monkeypatch):
        counters.clear()
        for i in range(3):
            if i == 0 and backend == "inductor":
                from torch._inductor.utils import run_and_get_code

                got, codes = run_and_get_code(run, i)
            else:
                got = run(i)
            assert_same(got, want[i])
            assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    if backend == "inductor":
        calls = [len(re.findall(r"^\s+(?:cpp_fused\w*|extern_kernels\.\w+|\w+ = torch\.ops\.aten\.[\w.]+)\(", c, re.M)) for c in codes]  # fmt: skip
        per_token = calls[0] + 12 * calls[1] + calls[2]
        today = (dispatched(model, 33) - dispatched(model, 1)) / 32
        assert today >= 5 * per_token, (today, calls)


# ---- memory


@pytest.mark.parametrize("name, samples", [("d12", 8), ("2b", 8), ("8b", 1)])
def test_predicted_rows_fit_and_use_the_memory(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the default size on 79 GiB, on fake tensors: prompts of 256 tokens, 256 new. Its peak is under what was free, and near it."""
    monkeypatch.setattr(packed_attention, "DENSE", ())
    cfg = GPTConfig(**PRESETS[name])
    free = 79 * GIB - 4 * cfg.n_params
    rows = sampling_memory.rows(cfg, free, 2, prompt_tokens=256, new_tokens=256, samples=samples)
    prompts = [[i] * 256 for i in range(-(-rows // samples)) for _ in range(samples)][:rows]
    batch = generate._Batch(prompts, [256] * rows, [256] * rows, list(range(rows)))
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = GPT(cfg)
        with Tape() as tape:
            with generate.reading(model, True, 0) as reader:
                made, _ = generate._decoder(reader, batch, generate.Truncation(), [[1]])
                made._narrow(256)
                made.step()
            peak = sum(tape.peak().values())
    assert 0.6 * free < peak <= free * (1 - sampling_memory.SPARE), (rows, peak / GIB, free / GIB)


def test_the_table_of_rows() -> None:
    """Rows of 512 prompt and 512 new tokens, groups of eight, in bf16 beside float32 weights on one H100 and H200 (79 and 140 GiB)."""
    found = {}
    for name in ("d12", "d20", "d24", "2b", "3b", "8b"):
        cfg = GPTConfig(**PRESETS[name])
        how = dict(prompt_tokens=512, new_tokens=512, samples=8)
        found[name] = [sampling_memory.rows(cfg, g * GIB - 4 * cfg.n_params, 2, **how) for g in (79, 140)]
    assert found == TABLE
    tiny = GPTConfig(**PRESETS["8b"])
    assert sampling_memory.rows(tiny, 1e9, 2, prompt_tokens=512, new_tokens=512) == 1


TABLE = {
    "d12": [3072, 4096],
    "d20": [1024, 2048],
    "d24": [512, 1024],
    "2b": [256, 512],
    "3b": [192, 384],
    "8b": [64, 192],
}
