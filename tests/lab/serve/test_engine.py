"""Continuous batching: a request's tokens do not depend on its company, limits hold, nobody is
forgotten."""

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from codechat.core.errors import RunError
from codechat.distributed import sharding
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.draws import Truncation, row_key
from codechat.models.fast import device
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import tokenizer
from codechat_lab.serve.engine import Engine, Job, Overloaded, Request

SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, block_size=64, vocab_size=90)
ARCHITECTURES = {
    "usual": SHAPE,
    "learned positions": replace(SHAPE, pos="learned", mlp="gelu"),
    "shared keys": replace(SHAPE, n_kv_head=1, mlp="swiglu", qk_norm=True, tied=False),
    "latent": replace(SHAPE, attention="mla"),
}

HOWS = [
    Truncation(),
    Truncation(temperature=0),
    Truncation(temperature=0.7, top_k=5),
    Truncation(top_p=0.6),
    Truncation(temperature=1.5),
]


def loaded(shape: GPTConfig = SHAPE) -> LoadedModel:
    model = GPT(shape)
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


def request(
    prompt: list[int],
    n: int = 20,
    seed: int = 0,
    how: Truncation = HOWS[0],
    stop: Sequence[Sequence[int]] = (),
    top: int | None = None,
    timeout_s: float = math.inf,
) -> Request:
    return Request(
        prompt=prompt,
        max_new_tokens=n,
        draws=row_key(seed, 0, 0),
        how=how,
        stop=stop,
        top=top,
        timeout_s=timeout_s,
    )


def finished(jobs: list[Job]) -> list[Job]:
    assert all(job.ended.wait(60) for job in jobs)
    return jobs


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.001)


def assert_as_sampled(model: GPT, job: Job, seed: int) -> None:
    """The job's tokens, probabilities and end are those of `generate.sample` for the request
    alone."""
    request = job.request
    (right,) = generate.sample(
        model,
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        seed=seed,
        temperature=request.how.temperature,
        top_k=request.how.top_k,
        top_p=request.how.top_p,
        stop=request.stop,
        on_overflow="stop",
    )
    assert job.ids == right.ids
    assert job.end == right.stop
    expected = torch.tensor(right.logprobs)
    torch.testing.assert_close(torch.tensor(job.logprobs), expected, atol=1e-4, rtol=1e-4)


def twelve_requests() -> list[Request]:
    """Of all lengths and ways to draw; every other one may stop at a tenth of the tokens."""
    rng = torch.Generator().manual_seed(5)
    tenths = tuple((token,) for token in range(0, 90, 9))
    requests = []
    for seed in range(12):
        n_prompt = int(torch.randint(1, 40, (), generator=rng))
        prompt = torch.randint(90, (n_prompt,), generator=rng).tolist()
        how = HOWS[seed % len(HOWS)]
        stop = tenths if seed % 2 else ()
        requests.append(request(prompt, 1 + 4 * seed, seed, how=how, stop=stop))
    return requests


def served_one_by_one(model: LoadedModel, requests: list[Request]) -> list[Job]:
    """Each joins a batch on its way."""
    jobs: list[Job] = []
    with Engine(model, max_rows=5) as engine:
        for one in requests:
            jobs += engine.submit([one])
            time.sleep(0.002)
        return finished(jobs)


class Company(NamedTuple):
    """A model, and its answers to twelve requests."""

    model: GPT
    jobs: list[Job]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def company(request: pytest.FixtureRequest) -> Company:
    model = loaded(ARCHITECTURES[request.param])
    return Company(model.model, served_one_by_one(model, twelve_requests()))


def test_tokens_are_those_of_sample_in_any_company(company: Company) -> None:
    for seed, job in enumerate(company.jobs):
        assert_as_sampled(company.model, job, seed)


def test_tokens_are_those_of_sample_in_any_company_as_a_gpu_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded()
    with monkeypatch.context() as patch:
        patch.setattr(device, "CPU_KINDS", ())
        jobs = served_one_by_one(model, twelve_requests())
    for seed, job in enumerate(jobs):
        assert_as_sampled(model.model, job, seed)


def test_the_company_has_requests_of_every_way_to_end(company: Company) -> None:
    assert {job.end for job in company.jobs} == {"stop", "length", "context"}


def test_a_prompt_of_many_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    shapes = []
    hidden = model.model.hidden

    def noted(ids: torch.Tensor, **given: Any) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        return hidden(ids, **given)

    monkeypatch.setattr(model.model, "hidden", noted)
    requests = [
        Request(prompt=[3, 4, 5], max_new_tokens=4, draws=row_key(9, 0, sample))
        for sample in range(6)
    ]
    with Engine(model, max_rows=8) as engine:
        finished(engine.submit(requests))
    assert shapes[0] == (1, 3)


def test_samples_of_one_prompt_are_those_of_sample() -> None:
    model = loaded()
    requests = [
        Request(prompt=[3, 4, 5], max_new_tokens=4, draws=row_key(9, 0, sample))
        for sample in range(6)
    ]
    with Engine(model, max_rows=8) as engine:
        jobs = finished(engine.submit(requests))
    right = generate.sample(
        model.model, [[3, 4, 5]], max_new_tokens=4, seed=9, samples_per_prompt=6
    )
    assert [job.ids for job in jobs] == [completion.ids for completion in right]


def drawn_from(logits: torch.Tensor, how: Truncation) -> torch.Tensor:
    """The distribution of a token, by its definition."""
    p = (logits / (how.temperature or 1.0)).softmax(-1)
    order = p.argsort(descending=True)
    if how.top_k:
        kept = order[: how.top_k]
    elif how.top_p:
        n_before = int((p[order].cumsum(0) < how.top_p).sum())
        kept = order[: n_before + 1]
    else:
        return p
    return torch.zeros_like(p).scatter(0, kept, p[kept] / p[kept].sum())


class Detailed(NamedTuple):
    """A job with its details, and the logits of its tokens."""

    how: Truncation
    job: Job
    logits: torch.Tensor


@pytest.fixture(scope="module", params=HOWS, ids=str)
def detailed(request: pytest.FixtureRequest) -> Detailed:
    model = loaded()
    wanted = Request(prompt=[1, 2], max_new_tokens=6, draws=row_key(0, 0, 0), how=request.param)
    with Engine(model) as engine:
        (job,) = finished(engine.submit([replace(wanted, top=90)]))
    with torch.no_grad():
        logits = model.model(torch.tensor([[1, 2, *job.ids]]))[0, 1:-1, : model.model.cfg.n_ids]
    return Detailed(request.param, job, logits)


def test_every_token_has_the_entropy_of_the_distribution_drawn_from(detailed: Detailed) -> None:
    assert len(detailed.job.details) == 6
    for logits, (entropy, _) in zip(detailed.logits, detailed.job.details, strict=True):
        p = drawn_from(logits, detailed.how)
        p = p[p > 0]
        assert entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-3)


def test_the_likeliest_tokens_have_the_log_probability_of_the_one_drawn(
    detailed: Detailed,
) -> None:
    job = detailed.job
    for token, logprob, (_, top) in zip(job.ids, job.logprobs, job.details, strict=True):
        assert dict(top)[token] == pytest.approx(logprob, abs=1e-4)


def test_the_likeliest_tokens_have_all_the_probability(detailed: Detailed) -> None:
    near = 0.1 if detailed.how.temperature else 0.3
    for _, top in detailed.job.details:
        assert sum(math.exp(logprob) for _, logprob in top) == pytest.approx(1, abs=near)


LONG = replace(SHAPE, block_size=5000)


def test_rows_join_a_running_batch() -> None:
    with Engine(loaded(LONG), max_rows=2, max_waiting=3) as engine:
        (long,) = engine.submit([request([1, 2, 3], n=3500)])
        until(lambda: len(long.ids) >= 5)
        short = finished(engine.submit([request([4], n=3, seed=seed) for seed in range(3)]))
        assert long.end is None, "three short answers came while the long one was being written"
        long.cancelled = True
        finished([long])
    assert [len(job.ids) for job in short] == [3, 3, 3]


def test_a_request_that_is_cancelled_ends() -> None:
    with Engine(loaded(LONG)) as engine:
        (job,) = engine.submit([request([1, 2, 3], n=3500)])
        until(lambda: len(job.ids) >= 5)
        job.cancelled = True
        finished([job])
    assert job.end == "cancelled"
    assert len(job.ids) < 3500


def test_the_queue_takes_all_of_a_submission_or_none() -> None:
    with Engine(loaded(LONG), max_rows=2, max_waiting=3) as engine:
        running = engine.submit([request([1], n=3500), request([1], n=3500)])
        until(lambda: len(engine.rows) == 2)
        waiting = engine.submit([request([2], n=2) for _ in range(2)])
        with pytest.raises(Overloaded, match="2 .*2 .*3"):
            engine.submit([request([3], n=2) for _ in range(2)])
        waiting += engine.submit([request([3], n=2)])
        for job in running:
            job.cancelled = True
        assert [len(job.ids) for job in finished(waiting)] == [2, 2, 2]


def other_weights(model: GPT) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return {
        name: p + 0.3 * torch.randn(p.shape, generator=rng)
        for name, p in model.state_dict().items()
    }


class Exchanged(NamedTuple):
    """Weights before and after an exchange while a row was written, and what came of it."""

    before: GPT
    after: GPT
    running: Job
    waiting: Job
    version: str


@pytest.fixture(scope="module")
def exchanged() -> Exchanged:
    shape = replace(SHAPE, block_size=600, tied=False)
    model = loaded(shape)
    before = loaded(shape).model
    after = loaded(shape).model
    after.load_state_dict(other_weights(model.model))
    with Engine(model, max_rows=4) as engine:
        (running,) = engine.submit([request([1, 2, 3], n=200, seed=1)])
        until(lambda: len(running.ids) >= 5)
        given = (after.state_dict(), "new")
        change = threading.Thread(target=engine.update_weights, args=given)
        change.start()
        until(lambda: engine._updates or running.end)
        assert running.end is None, "the exchange was asked for while the row ran"
        (waiting,) = engine.submit([request([1, 2, 3], n=20, seed=2)])
        finished([running, waiting])
        change.join(30)
        assert not change.is_alive()
        return Exchanged(before, after, running, waiting, engine.version)


def test_a_row_ends_with_the_weights_that_it_began_with(exchanged: Exchanged) -> None:
    assert exchanged.running.version == ""
    assert_as_sampled(exchanged.before, exchanged.running, 1)


def test_who_comes_after_an_exchange_waits_and_draws_from_the_new_weights_alone(
    exchanged: Exchanged,
) -> None:
    assert exchanged.version == "new"
    assert exchanged.waiting.version == "new"
    assert_as_sampled(exchanged.after, exchanged.waiting, 2)


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


def test_a_late_request_ends_with_what_it_has_and_the_engine_goes_on() -> None:
    with Engine(loaded(LONG), max_rows=1) as engine:
        finished(engine.submit([request([1], n=2)]))  # the first request takes longest
        (running,) = engine.submit([request([1], n=4900, timeout_s=0.3)])
        assert running.ended.wait(30)
        assert running.end == "timeout"
        assert running.ids
        assert finished(engine.submit([request([1], n=2)]))[0].end == "length"


def test_a_late_request_ends_in_the_queue() -> None:
    with Engine(loaded(LONG), max_rows=1) as engine:
        running, queued = engine.submit([request([1], n=4900), request([1], n=5, timeout_s=0.1)])
        assert queued.ended.wait(30)
        assert queued.end == "timeout"
        assert queued.ids == []
        assert running.end is None


def test_closing_ends_every_request() -> None:
    with Engine(loaded(LONG), max_rows=1) as engine:
        jobs = engine.submit([request([1], n=4900), request([1], n=5)])
    assert [job.end for job in jobs] == ["closed", "closed"]


def test_a_closed_engine_takes_neither_requests_nor_weights() -> None:
    with Engine(loaded()) as engine:
        pass
    with pytest.raises(RunError):
        engine.submit([request([1])])
    with pytest.raises(RunError):
        engine.update_weights({}, "new")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    monkeypatch.setattr(model.model, "hidden", lambda *a, **k: 1 / 0)
    with Engine(model) as engine:
        jobs = finished(engine.submit([request([1]), request([2])]))
        assert [job.end for job in jobs] == ["closed", "closed"]
        with pytest.raises(RunError):
            engine.submit([request([1])])


def progress_of(streams: bool) -> list[int]:
    """How many tokens there were at each call, of 150."""
    jobs: list[Job] = []
    calls: list[int] = []

    def noted() -> None:
        calls.append(len(jobs[0].ids) if jobs else 0)

    with Engine(loaded(replace(SHAPE, block_size=500))) as engine:
        jobs += engine.submit([request([1], n=150)], on_progress=noted, streams=streams)
        finished(jobs)
    return calls


def test_on_progress_is_called_at_the_end() -> None:
    assert progress_of(streams=False) == [150]


def test_on_progress_of_a_stream_is_called_at_the_first_token_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("codechat_lab.serve.engine.FLUSH_S", 0.002)  # less than all tokens take
    calls = progress_of(streams=True)
    assert calls[0] <= 1
    assert calls[-1] == 150
    assert 2 < len(calls) < 150
