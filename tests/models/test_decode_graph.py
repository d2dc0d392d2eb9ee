"""Decoding with static shapes: the same tokens, few questions to the device, one compilation, predicted memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_generate import ARCHITECTURES, PROMPTS, STOPS, assert_same, random_model
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from codechat.distributed import sharding
from codechat.launch.step_memory import Tape
from codechat.models import attention, decode_graph, generate, lora
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.draws import Batch, Truncation
from codechat.models.generate import sample
from codechat.models.gpt import GPT

GIB = 2**30


@pytest.mark.parametrize("options", ARCHITECTURES, ids=str)
def test_static_shapes_draw_what_rows_draw_one_at_a_time(options: dict[str, Any]) -> None:
    model, base = random_model(**options), dict(max_new_tokens=40, seed=3, samples_per_prompt=5, stop=STOPS)
    warm = dict(top_k=7, top_p=0.9, temperature=0.7)
    for how in (dict(), warm, dict(temperature=0.0), dict(stop=(), samples_per_prompt=1)):
        assert_same(sample(model, PROMPTS, graph=True, **base | how), sample(model, PROMPTS, **base | how))


def test_shared_beginnings_full_blocks_and_small_batches_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, how = random_model(), dict(max_new_tokens=50, seed=1, stop=STOPS, on_overflow="stop", graph=True)
    a, b = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]
    prompts = [[*a, 5], [*a, 5, 3, 5], [*b, 8], [*a, 8, 9], [1] * 64, [1] * 63, [9, *range(40)]]
    want = sample(model, prompts, **(how | dict(graph=False)))
    for more in (dict(), dict(prefix_tokens=[8, 8, 3, 8, 63, 62, 1])):
        assert_same(sample(model, prompts, **how, **more), want)
    monkeypatch.setattr(generate, "_rows_in_memory", lambda *_: 2)
    assert_same(sample(model, prompts, **how), want)
    lora.attach(model, 2)
    for _, layer in lora.adapted(model):
        torch.nn.init.normal_(layer.b, std=0.1)
    assert_same(sample(model, prompts, **how), sample(model, prompts, **(how | dict(graph=False))))


def test_one_question_in_sixteen_tokens_and_finished_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, chunks = [], []
    step, narrow = decode_graph.Decoder.step, decode_graph.Decoder._narrow
    monkeypatch.setattr(decode_graph.Decoder, "step", lambda self: (slots.append(len(self.row)), step(self))[1])
    monkeypatch.setattr(decode_graph.Decoder, "_narrow", lambda self, n: (chunks.append(n), narrow(self, n))[1])
    out = sample(random_model(), PROMPTS, max_new_tokens=50, seed=0, samples_per_prompt=8, stop=STOPS, graph=True)
    longest = max(len(c.ids) for c in out)
    assert len(chunks) == -(-longest // decode_graph.CHUNK) and longest > 2 * decode_graph.CHUNK
    assert slots[0] == 32 and slots[-1] < 32 and slots == sorted(slots, reverse=True)
    sizes = {4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}
    assert {decode_graph.bucket(n) for n in range(1, 513)} == sizes
    assert all(n <= decode_graph.bucket(n) <= max(4, 1.5 * n) for n in range(1, 1000))


@contextmanager
def compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def reading(model: GPT, graph: bool | None, _: int) -> Iterator[generate.Reader]:
        copy, head = sharding.plain_copy(model, torch.float32), model.head_weight().detach()
        yield generate.Reader(copy, lambda h: torch.nn.functional.linear(h, head), head, True, backend)

    decode_graph.compiled_region.cache_clear()
    torch._dynamo.reset()
    with monkeypatch.context() as patched:
        patched.setattr(generate, "reading", reading)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_three_graphs_serve_all_batches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of three sizes, 64 tokens each, rows leaving; every region is one full graph; the same draws."""
    model, shapes = random_model(block_size=160), [(3, 5), (2, 6), (4, 4)]

    def run(i: int, prompts: int, samples: int) -> list[generate.Completion]:
        how = dict(max_new_tokens=64, seed=i, samples_per_prompt=samples, stop=((5, 6),))
        return sample(model, [[*p, i] for p in PROMPTS[:prompts]], **how)

    want = [run(i, *shape) for i, shape in enumerate(shapes)]
    with compiled(backend, monkeypatch):
        counters.clear()
        for i, shape in enumerate(shapes):
            assert_same(run(i, *shape), want[i])
            assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name, samples", [("2b", 8), ("8b", 1)])
def test_predicted_rows_fit_and_use_the_memory(name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of the default size on 79 GiB, on fake tensors: prompts of 256 tokens, 256 new. Its peak is under what
    was free, and near it."""
    monkeypatch.setattr(attention, "DENSE", ())
    cfg = GPTConfig(**PRESETS[name])
    free = 79 * GIB - 4 * cfg.n_params
    rows = decode_graph.rows_in_memory(cfg, free, 2, prompt_tokens=256, new_tokens=256, samples=samples)
    prompts = [[i] * 256 for i in range(-(-rows // samples)) for _ in range(samples)][:rows]
    batch = Batch(prompts, [256] * rows, [256] * rows, list(range(rows)), Truncation(), [[1]])
    with FakeTensorMode(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = GPT(cfg)
        with Tape() as tape:
            with generate.reading(model, True, 0) as reader:
                made = decode_graph.Decoder(reader, *generate._prefill(reader.model, batch, 0), batch)
                made._narrow(256)
                made.step()
            peak = tape.peak
    assert 0.6 * free < peak <= free * (1 - decode_graph.SPARE), (rows, peak / GIB, free / GIB)
