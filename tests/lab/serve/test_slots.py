"""Keys and values come and go with the requests: what grew equals what was large, nothing is
held where nobody asks, and limits are said and kept."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

from server import Running, Serving
from taught import TOK

from codechat.core.errors import ConfigError
from codechat.models import attention
from codechat.models.config import GPTConfig
from codechat.models.fast.reader import reader_of
from codechat.models.gpt import GPT
from codechat.models.loading import LoadedModel
from codechat.text import tokenizer
from codechat_lab.serve import slots
from codechat_lab.serve.engine import Engine, Request
from codechat_lab.serve.slots import Room, SlotCache, room_in

SHAPE = GPTConfig(depth=2, n_embd=32, n_head=4, n_kv_head=2, block_size=600, vocab_size=90)
TOKEN = 2 * 2 * 16 * 4  # bytes of a token's keys and values: depth, tensors, K E, float32


def model() -> GPT:
    made = GPT(SHAPE)
    rng = torch.Generator().manual_seed(1)
    for p in made.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.2, generator=rng)
    return made.eval()


def cache_of(rows: int) -> SlotCache:
    room = Room(SHAPE.block_size, rows, rows * SHAPE.block_size)
    return SlotCache(SHAPE, room, torch.device("cpu"), torch.float32)


@torch.inference_mode()
def states(cache: SlotCache, steps: int) -> list[torch.Tensor]:
    """Last states while rows of different lengths join, one leaves, and another joins."""
    net = model()
    found = []

    def join(length: int) -> None:
        ids = torch.arange(length)[None] % 90
        filled = attention.KVCache(SHAPE, 1, length)
        net.hidden(ids, cache=filled)
        cache.join(filled, 0, length)

    def run() -> None:
        for step in range(steps):
            rows = len(cache.tokens)
            cache.make_room(rows, max(cache.tokens) + 1)
            ids = (torch.arange(rows)[:, None] + step) % 90
            found.append(net.hidden(ids, cache=cache))

    for length in (3, 150, 40):
        join(length)
    run()
    cache.leave(1)
    join(7)
    run()
    return found


def test_a_cache_that_grew_equals_one_that_was_large(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = cache_of(8)
    right = cache_of(8)
    found = states(grown, 100)
    monkeypatch.setattr(slots, "SPARE_COLUMNS", SHAPE.block_size)
    monkeypatch.setattr(slots, "slots_for", lambda rows, most: most)
    for mine, other in zip(found, states(right, 100), strict=True):
        assert torch.equal(mine, other)
    assert right.nbytes == 8 * 600 * TOKEN
    assert grown.nbytes < right.nbytes / 3


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (5, 2, 4)], ids=str)
@torch.inference_mode()
def test_rows_in_slots_take_the_short_way_with_the_bits_of_the_model(
    lengths: tuple[int, ...],
) -> None:
    made = reader_of(model(), graph=False)
    assert made.short is not None
    plain = replace(made, short=None)
    caches = [cache_of(4) for _ in range(2)]
    for row, length in enumerate(lengths):
        filled = attention.KVCache(SHAPE, 1, 20)
        made.model.hidden(torch.arange(length)[None] + row, cache=filled)
        for cache in caches:
            cache.join(filled, 0, length)
    for token in range(6):
        newest = token + torch.arange(len(lengths))
        for cache in caches:
            cache.make_room(len(lengths), max(cache.tokens) + 1)
        assert torch.equal(made.read(newest, caches[0]), plain.read(newest, caches[1]))
    for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine, other)


def loaded() -> LoadedModel:
    return LoadedModel(model(), tokenizer.load("bytes"), "reserved", {}, Path())


def test_an_engine_holds_no_keys_and_values_where_nobody_asks() -> None:
    with Engine(loaded(), max_rows=16) as engine:
        held = []
        (job,) = engine.submit(
            [Request(prompt=[1, 2, 3], max_new_tokens=30)],
            on_progress=lambda: held.append(engine._cache.nbytes),
            streams=True,
        )
        assert job.ended.wait(60)
    assert held[0] <= 144 * TOKEN, "a row of 3 tokens and 128 spare ones, not 16 of 600"
    assert engine._cache.nbytes == 0


@pytest.fixture
def most_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows ran in each step."""
    seen: list[int] = []
    advance = SlotCache.advance

    def noted(cache: SlotCache, new: int, n_new: torch.Tensor | None = None) -> None:
        seen.append(len(cache.tokens))
        advance(cache, new, n_new)

    monkeypatch.setattr(SlotCache, "advance", noted)
    return seen


def test_requests_wait_where_memory_holds_fewer_than_the_batch(most_rows: list[int]) -> None:
    requests = [Request(prompt=[1 + n], max_new_tokens=40, draws=n) for n in range(6)]
    with Engine(loaded(), room=Room(600, 4, 360)) as engine:
        jobs = engine.submit(requests)
        assert all(job.ended.wait(60) for job in jobs)
    assert max(most_rows) == 2, "two rows of 41 tokens are made 176 wide"
    assert [len(job.ids) for job in jobs] == [40] * 6


def test_one_request_runs_whatever_the_others_take(most_rows: list[int]) -> None:
    with Engine(loaded(), room=Room(600, 4, 600)) as engine:
        jobs = engine.submit(
            [Request(prompt=[1], max_new_tokens=n) for n in (5, 599, 5)],
        )
        assert all(job.ended.wait(60) for job in jobs)
    assert [len(job.ids) for job in jobs] == [5, 599, 5]
    assert set(most_rows) == {1}


def test_what_fits_is_computed_and_said() -> None:
    room, about = room_in(2**30, SHAPE, torch.float32, max_context=None, max_rows=16)
    assert room == Room(600, 16, 16 * 600)
    assert about == (
        "longest prompt with its answer: 600 tokens; keys and values: 0 KiB a token, 2 MiB for 16 "
        "such requests, of 1.0 GiB free"
    )


@pytest.mark.parametrize(
    "tokens, room, waits",
    [
        (1000, Room(600, 4, 900), "1 of that length run together"),
        (2000, Room(600, 4, 1800), "3 of that length run together"),
        (100, Room(90, 4, 90), "1 of that length run together"),
    ],
)
def test_less_memory_means_fewer_together_or_shorter(tokens: int, room: Room, waits: str) -> None:
    free = tokens * TOKEN + TOKEN // 2
    got, about = room_in(free, SHAPE, torch.float32, max_context=None, max_rows=4)
    assert got == room
    assert waits in about


@pytest.mark.parametrize(
    "tokens, max_context, message",
    [
        (9000, 601, "the model knows 600 positions; set --max-context 600 or less"),
        (500, 600, "set --max-context 450 or less, or free memory"),
        (0, None, "free memory"),
    ],
)
def test_a_context_that_cannot_be_held_is_refused_at_the_start(
    tokens: int, max_context: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        room_in(tokens * TOKEN, SHAPE, torch.float32, max_context=max_context, max_rows=4)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def short(root: Path) -> Iterator[Running]:
    with Serving(max_context=100) as running:
        yield running


def completed(up: Running, prompt: list[int], max_tokens: int | None) -> tuple[int, dict]:
    body = {"model": "tiny/sft", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return up.send("POST", "/v1/completions", body | {"return_token_ids": True})


def test_a_request_longer_than_max_context_is_refused_in_one_line(short: Running) -> None:
    status, got = completed(short, [65] * 60, 41)
    assert (status, got["error"]["code"]) == (400, "context_length_exceeded")
    assert got["error"]["message"] == (
        "max_tokens: the prompt has 60 tokens and the answer may have 41; both must fit into 100"
    )
    assert short.send("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 100
    assert completed(short, [65] * 60, 40)[0] == 200


def test_eight_clients_at_once_get_what_they_get_one_by_one(up: Running) -> None:
    prompts = [TOK.encode("def f(x): return x < 1"[: 3 + 2 * n]) for n in range(8)]
    barrier = threading.Barrier(8)

    def together(prompt: list[int]) -> list[int]:
        barrier.wait(30)
        return completed(up, prompt, 60)[1]["choices"][0]["token_ids"]

    alone = [completed(up, prompt, 60)[1]["choices"][0]["token_ids"] for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(together, prompts)) == alone
