"""Continuous batching: a request's tokens do not depend on its company, limits hold, nobody is
forgotten."""

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from codechat.core.errors import RunError
from codechat.distributed import sharding
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.fast import device
from codechat.models.generate import Truncation, row_key
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import tokenizer
from codechat_lab.serve.engine import Engine, Job, Overloaded, Request

ARCHITECTURES = [
    dict(),
    dict(pos="learned", mlp="gelu"),
    dict(n_kv_head=1, mlp="swiglu", qk_norm=True, tied=False),
]
ARCHITECTURES += [dict(attention="mla")]
HOWS = [
    dict(),
    dict(temperature=0),
    dict(temperature=0.7, top_k=5),
    dict(top_p=0.6),
    dict(temperature=1.5),
]


def loaded(**options: Any) -> LoadedModel:
    model = GPT(
        GPTConfig(**dict(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=90) | options)
    )
    rng = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim == 2 or p.abs().sum() == 0:
            torch.nn.init.normal_(p, std=0.2, generator=rng)
    return LoadedModel(model.eval(), tokenizer.load("bytes"), "reserved", {}, Path())


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "engine"], (
        "an engine outlives its block"
    )


def request(prompt: list[int], n: int = 20, seed: int = 0, **more: Any) -> Request:
    return Request(prompt=prompt, max_new_tokens=n, draws=row_key(seed, 0, 0), **more)


def finished(jobs: list[Job]) -> list[Job]:
    assert all(job.ended.wait(60) for job in jobs)
    return jobs


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.001)


def assert_as_sampled(model: GPT, job: Job, seed: int) -> None:
    """The job's tokens, probabilities and end are those of `generate.sample` for the request
    alone."""
    r = job.request
    (right,) = generate.sample(
        model,
        [r.prompt],
        max_new_tokens=r.max_new_tokens,
        seed=seed,
        temperature=r.how.temperature,
        top_k=r.how.top_k,
        top_p=r.how.top_p,
        stop=r.stop,
        on_overflow="stop",
    )
    assert (job.ids, job.end) == (right.ids, right.stop)
    torch.testing.assert_close(
        torch.tensor(job.logprobs),
        torch.tensor(right.logprobs),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "options, on_cpu", [(o, True) for o in ARCHITECTURES] + [({}, False)], ids=str
)
def test_tokens_are_those_of_sample_in_any_company(
    options: dict, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(**options)
    rng = torch.Generator().manual_seed(5)
    requests = []
    for seed in range(12):
        prompt = torch.randint(
            90, (int(torch.randint(1, 40, (), generator=rng)),), generator=rng
        ).tolist()
        stop = tuple((s,) for s in range(0, 90, 9)) if seed % 2 else ()
        requests.append(
            request(prompt, 1 + 4 * seed, seed, how=Truncation(**HOWS[seed % len(HOWS)]), stop=stop)
        )
    with monkeypatch.context() as patch:
        # as on a CPU, or as on a GPU
        patch.setattr(device, "CPU_KINDS", device.CPU_KINDS if on_cpu else ())
        with Engine(model, max_rows=5) as engine:
            jobs = []
            for one in requests:  # one by one, so that they join a batch on its way
                jobs += engine.submit([one])
                time.sleep(0.002)
            finished(jobs)
    for seed, job in enumerate(jobs):
        assert_as_sampled(model.model, job, seed)
    assert {job.end for job in jobs} == {"stop", "length", "context"}, (
        "the example must hold every way to end"
    )


def test_a_prompt_of_many_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    shapes = []
    hidden = model.model.hidden
    monkeypatch.setattr(
        model.model,
        "hidden",
        lambda ids, **how: shapes.append(tuple(ids.shape)) or hidden(ids, **how),
    )
    with Engine(model, max_rows=8) as engine:
        requests = [
            Request(prompt=[3, 4, 5], max_new_tokens=4, draws=row_key(9, 0, s)) for s in range(6)
        ]
        jobs = finished(engine.submit(requests))
    assert shapes[0] == (1, 3)
    right = generate.sample(
        model.model, [[3, 4, 5]], max_new_tokens=4, seed=9, samples_per_prompt=6
    )
    assert [job.ids for job in jobs] == [c.ids for c in right]


def test_details_are_of_the_distribution_drawn_from() -> None:
    model = loaded()
    for options in HOWS:
        how = Truncation(**options)
        with Engine(model) as engine:
            (job,) = finished(engine.submit([request([1, 2], n=6, how=how, top=90)]))
        logits = model.model(torch.tensor([[1, 2, *job.ids]]))[
            0, 1:-1, : model.model.cfg.n_ids
        ].detach()
        assert len(job.details) == 6
        for t, (entropy, top) in enumerate(job.details):
            p = (logits[t] / (how.temperature or 1.0)).softmax(-1)
            if how.top_k or how.top_p:
                order = p.argsort(descending=True)
                kept = (
                    order[: how.top_k]
                    if how.top_k
                    else order[: int((p[order].cumsum(0) < how.top_p).sum()) + 1]
                )
                p = torch.zeros_like(p).scatter(0, kept, p[kept] / p[kept].sum())
            assert entropy == pytest.approx(float(-(p[p > 0] * p[p > 0].log()).sum()), abs=1e-3)
            assert dict(top)[job.ids[t]] == pytest.approx(job.logprobs[t], abs=1e-4)
            assert sum(math.exp(lp) for _, lp in top) == pytest.approx(
                1, abs=0.1 if how.temperature else 0.3
            )


def test_rows_join_a_running_batch_and_the_queue_takes_all_or_none() -> None:
    with Engine(loaded(block_size=4000), max_rows=2, max_waiting=3) as engine:
        (long,) = engine.submit([request([1, 2, 3], n=3500)])
        until(lambda: len(long.ids) >= 5)
        short = finished(engine.submit([request([4], n=3, seed=s) for s in range(3)]))
        assert long.end is None, "three short answers came while the long one was being written"
        jobs = [long, *engine.submit([request([1], n=3500)])]
        until(lambda: len(engine.rows) == 2)
        jobs += engine.submit([request([2], n=2) for _ in range(2)])
        with pytest.raises(Overloaded, match="2 .*2 .*3"):
            engine.submit([request([3], n=2) for _ in range(2)])
        jobs += engine.submit([request([3], n=2)])
        for job in jobs[:2]:
            job.cancelled = True
        assert [len(job.ids) for job in short + finished(jobs)[2:]] == [3, 3, 3, 2, 2, 2]
        assert long.end == "cancelled"


def other_weights(model: GPT) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {
        name: p + 0.3 * torch.randn(p.shape, generator=rng)
        for name, p in model.state_dict().items()
    }


def test_other_weights_come_in_between_requests_and_all_at_once() -> None:
    """While a row is being written: it ends as it began; who came after it waits and draws from
    the new ones alone."""
    model = loaded(block_size=600, tied=False)
    new = loaded(block_size=600, tied=False)
    before = {name: p.clone() for name, p in model.model.state_dict().items()}
    new.model.load_state_dict(other_weights(model.model))
    with Engine(model, max_rows=4) as engine:
        (running,) = engine.submit([request([1, 2, 3], n=200, seed=1)])
        until(lambda: len(running.ids) >= 5)
        change = threading.Thread(
            target=engine.update_weights, args=(new.model.state_dict(), "new")
        )
        change.start()
        until(lambda: engine._updates or running.end)
        assert running.end is None, "the exchange was asked for while the row ran"
        (waiting,) = engine.submit([request([1, 2, 3], n=20, seed=2)])
        finished([running, waiting])
        change.join(30)
        assert engine.version == "new"
        assert not change.is_alive()
    assert (running.version, waiting.version) == ("", "new")
    assert_as_sampled(new.model, waiting, 2)
    new.model.load_state_dict(before)
    assert_as_sampled(new.model, running, 1)


def test_the_copy_of_the_old_weights_is_gone_before_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the collector's help: on a GPU two copies may not fit."""
    copies: list[weakref.ref[GPT]] = []
    plain_copy = sharding.plain_copy

    def noted(model: GPT, dtype: torch.dtype) -> GPT:
        assert not any(copy() for copy in copies)
        made = plain_copy(model, dtype)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(sharding, "plain_copy", noted)
    monkeypatch.setattr(device, "CPU_KINDS", ())
    model = loaded()
    gc.disable()
    try:
        with Engine(model) as engine:
            for version in ("1", "2", "3"):
                assert finished(engine.submit([request([1, 2, 3], n=4)]))[0].end == "length"
                engine.update_weights(other_weights(model.model), version)
    finally:
        gc.enable()
    assert len(copies) >= 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lateness_closing_and_a_defect_end_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(block_size=5000)
    with Engine(model, max_rows=1) as engine:
        running, queued = engine.submit(
            [request([1], n=4900, timeout_s=0.3), request([1], n=5, timeout_s=0.1)]
        )
        assert queued.ended.wait(30)
        assert (queued.end, queued.ids) == ("timeout", [])
        assert running.ended.wait(30)
        assert running.end == "timeout"
        assert running.ids
        assert finished(engine.submit([request([1], n=2)]))[0].end == "length", "the engine goes on"
        jobs = engine.submit([request([1], n=4900), request([1], n=5)])
    assert [job.end for job in jobs] == ["closed", "closed"]
    for late in (lambda: engine.submit([request([1])]), lambda: engine.update_weights({}, "new")):
        with pytest.raises(RunError):
            late()
    monkeypatch.setattr(model.model, "hidden", lambda *a, **k: 1 / 0)
    with Engine(model) as engine:
        jobs = finished(engine.submit([request([1]), request([2])]))
        assert [job.end for job in jobs] == ["closed", "closed"]
        with pytest.raises(RunError):
            engine.submit([request([1])])


def test_on_progress_is_called_at_the_first_token_and_at_the_end() -> None:
    with Engine(loaded(block_size=500)) as engine:
        for streams in (False, True):
            box = []
            calls = []
            noted = lambda box=box, calls=calls: calls.append(len(box[0].ids) if box else 0)  # noqa: E731
            box += engine.submit([request([1], n=150)], on_progress=noted, streams=streams)
            finished(box)
            assert calls[-1] == 150
            assert len(calls) == 1 if not streams else calls[0] <= 1 and 2 < len(calls) < 150
