"""One model, many requests: rows join and leave a running batch between two tokens.

    with Engine(loaded, max_rows=16) as engine:
        (job,) = engine.submit([Request(prompt=ids, max_new_tokens=64, draws=row_key(seed, 0, 0))])
        job.wait(); job.ids

The engine's own thread holds the model. In every round it removes cancelled and late rows, runs the prompts of requests that wait for a free slot
(a prompt that several requests share runs once), samples their first token, then one token for every row, on a GPU as one graph.

`update_weights` waits until the running rows have ended and admits no other, then changes all weights between two tokens. So no completion is
sampled from two versions, and each job names its version.

A row's sampling key is `row_key` and its position, as in `generate`. So a request's tokens are the same alone, in company, and from
`generate.sample` with the same seed: in float32 up to the rounding of matrix products of other shapes.

Left out: several GPUs, prefixes kept between requests, preemption, chunked prefill (a long prompt delays every row by its own time).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from codechat.core.errors import ConfigError, RunError
from codechat.distributed import dist
from codechat.inference.slot_cache import SlotCache
from codechat.inference.slot_graph import SlotGraph
from codechat.models import generate
from codechat.models.generate import Truncation, draw, last_real, pad_right, uniform
from codechat.models.grammar_masks import apply_grammars, take_allowed
from codechat.models.kv_cache import new_cache
from codechat.models.loading import LoadedModel
from codechat.runs.checkpoint import fingerprint
from codechat.text.call_grammar import CallGrammar, GrammarState

PREFILL_TOKENS = 4096  # of prompts that run together; more would make other rows wait longer
FLUSH_S = 0.05  # shortest time between two calls of on_progress: waking a reader costs as much as sampling some tokens
End = Literal["stop", "length", "context", "cancelled", "timeout", "closed"]


class Overloaded(RunError):
    """The queue is full."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion. prompt + max_new_tokens may exceed the block: it then ends with "context"."""

    prompt: Sequence[int]
    max_new_tokens: int
    draws: int  # `generate.row_key`
    how: Truncation = Truncation()
    stop: tuple[tuple[int, ...], ...] = ()  # id sequences, matched whole and kept
    should_stop: Callable[[int], bool] | None = None  # called with every token; true ends the completion as a stop
    banned: tuple[int, ...] = ()  # ids that are never sampled
    grammar: CallGrammar | None = None  # that the completion follows
    top: int | None = None  # likeliest tokens to note beside every draw, with the entropy; none = neither
    timeout_s: float = math.inf  # from submission to the last token


@dataclass(frozen=True)
class Detail:
    """The distribution that a token was sampled from. entropy: nats; top: (id, log-probability), likeliest first."""

    entropy: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Job:
    """A request on its way. The engine's thread appends to the lists and sets `end` last; any thread may read.

    on_progress: called by that thread at the first token, then at most every FLUSH_S while tokens come, and at the end. It must not block."""

    request: Request
    on_progress: Callable[[], None]
    streams: bool
    submitted: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # nats, of the sampling distribution; greedy: the model's own
    details: list[Detail] = field(default_factory=list)  # one per id where `request.top` asks for them
    end: End | None = None
    version: str = ""  # of the weights; set when it joins
    cancelled: bool = False
    first_token_s: float = math.nan  # from submission to the first token
    flushed: float = 0.0
    state: GrammarState | None = None  # in its grammar; the engine's thread only
    _ended: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Leave the batch or the queue before the next token."""
        self.cancelled = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the end; false where that took longer than the time given."""
        return self._ended.wait(timeout_s)

    def timed_out(self, now: float) -> bool:
        return now - self.submitted > self.request.timeout_s


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """Weights that wait for the running rows to end."""

    state: Mapping[str, Tensor]
    version: str
    done: Future[None] = field(default_factory=Future)


class Engine:
    """Samples tokens for up to `max_rows` requests at a time while up to `max_waiting` more wait.

    A context manager; leaving it ends running requests as "closed". observe: called with the number of rows after every token, by
    the engine's thread. graph: decode with static shapes (`slot_graph`); none = on a GPU."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_rows: int = 16,
        max_waiting: int = 64,
        observe: Callable[[int], None] = lambda rows: None,
        graph: bool | None = None,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_waiting", max_waiting)):
            if value < 1:
                raise ConfigError(f"{name} {value}; it must be at least 1")
        self.model, self.max_rows, self.max_waiting = loaded.model, max_rows, max_waiting
        self.observe, self.graph = observe, graph
        self.version = fingerprint(loaded.meta)  # of the weights
        self.rows: list[Job] = []  # as they lie in the cache
        self._joining: list[Job] = []  # out of the queue, their prompts not yet run
        self._waiting: deque[Job] = deque()
        self._update: WeightUpdate | None = None  # weights that wait for the rows to end
        self._turn = threading.Lock()  # one update at a time
        self._changed = threading.Condition()  # guards the queue, the pending update and the two flags
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def _check_alive(self) -> None:
        if not self.alive:
            raise RunError(f"the engine has ended ({self.failure or 'closed'}); start the server again")

    def submit(
        self, requests: Sequence[Request], *, on_progress: Callable[[], None] = lambda: None, streams: bool = False
    ) -> list[Job]:
        """All of the requests or none. streams: `on_progress` is also called between the first token and the end.

        Raises Overloaded where the queue has no room for all, ConfigError for a prompt that the model cannot read, RunError where the
        engine has ended."""
        for request in requests:
            self._check(request)
        now = time.monotonic()
        jobs = [Job(request, on_progress, streams, now) for request in requests]
        with self._changed:
            self._check_alive()
            waiting, free = len(self._waiting), max(0, self.max_rows - len(self.rows))
            if waiting + len(jobs) > self.max_waiting + free:
                raise Overloaded(
                    f"{waiting} completions wait, {len(jobs)} more are requested; at most {self.max_waiting} may wait; try again later"
                )
            self._waiting.extend(jobs)
            self._changed.notify()
        return jobs

    def update_weights(self, state: Mapping[str, Tensor], version: str, timeout_s: float | None = None) -> None:
        """Sample from these weights, of the model's own shapes, for all requests that join from now on; blocks until they are in.

        RunError, with nothing changed, where the running rows take longer than timeout_s or the engine has ended. ConfigError for weights of
        another shape."""
        own = self.model.state_dict()
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise ConfigError("the weights have other shapes than the model's; give those of the same model")
        incoming = WeightUpdate(state, version)
        with self._turn:
            with self._changed:
                self._check_alive()
                self._update = incoming
                self._changed.notify()
            try:
                incoming.done.result(timeout_s)
            except TimeoutError:
                with self._changed:
                    withdrawn = self._update is incoming
                    self._update = None
                if withdrawn:
                    why = f"completions still run after {timeout_s:g} s; their weights stay; try again later"
                    raise RunError(why) from None
                incoming.done.result()  # the update had begun, and ends soon

    def _check(self, request: Request) -> None:
        cfg, prompt = self.model.cfg, request.prompt
        if not 0 < len(prompt) < cfg.block_size:
            room = f"it must have at least 1 and leave room in the block of {cfg.block_size}"
            raise ConfigError(f"the prompt has {len(prompt)} tokens; {room}; shorten it")
        if not 0 <= min(prompt) <= max(prompt) < cfg.n_ids:
            raise ConfigError(f"the prompt holds ids {min(prompt)}..{max(prompt)}; the model knows 0..{cfg.n_ids - 1}")
        if request.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {request.max_new_tokens}; it must be at least 1")

    # ---- the engine's thread

    def _run(self) -> None:
        device = self.model.wte.weight.device
        on_gpu = device.type == "cuda"
        try:
            # streams and graphs are of the thread's own device
            with torch.no_grad(), torch.cuda.device(device) if on_gpu else nullcontext():
                static = generate.static(device, self.graph)
                self._cache = SlotCache(
                    self.model.cfg, self.max_rows, device, dist.compute_dtype(device), static=static
                )
                while not self._closing:
                    # both keep casts and copies of the weights: an update must leave them first
                    with dist.autocast(device), generate.reading(self.model, self.graph) as self._reader:
                        self._step = self._decoder()
                        while self._has_work():
                            self._round()
                    del self._step, self._reader  # a copy of the weights, before the next one is made
                    self._apply_update()
        except BaseException as error:  # a defect, or no memory left: every request ends, and stderr gets the traceback
            self.failure = error
            raise
        finally:
            with self._changed:
                self._closing = True
                incoming, self._update = self._update, None
                left = [*self.rows, *self._joining, *self._waiting]
                self._waiting.clear()
            if incoming:
                incoming.done.set_exception(RunError("the engine has ended; start the server again"))
            for job in left:
                if job.end is None:
                    self._finish(job, "closed")

    def _decoder(self) -> Callable[[Sequence[int]], Tensor]:
        """What makes a token with these weights."""
        if not self._reader.graph:
            return self._one_token
        made = SlotGraph(self._reader.model, self._cache, self._reader.compiled)
        made.warm_up()
        return made

    def _one_token(self, last: Sequence[int]) -> Tensor:
        """States (B, D) behind each row's last token, as `SlotGraph` returns them."""
        ids = torch.tensor(last, device=self.model.wte.weight.device)
        return self._reader.model.hidden(ids[:, None], cache=self._cache)[:, 0]

    def _has_work(self) -> bool:
        """Wait for a request; false where the engine is to end, or where no row delays a weight update any more."""
        with self._changed:
            while not (self.rows or self._waiting or self._closing or self._update):
                self._changed.wait()
            return not self._closing and bool(self.rows or not self._update)

    def _apply_update(self) -> None:
        with self._changed:
            incoming, self._update = self._update, None
        if incoming:
            self.model.load_state_dict(incoming.state)
            self.version = incoming.version
            incoming.done.set_result(None)

    def _round(self) -> None:
        now = time.monotonic()
        for slot in reversed(range(len(self.rows))):
            if end := _interruption(self.rows[slot], now):
                self._leave(slot, end)
        self._joining = self._admit(now)
        if self._joining:
            self._prefill(self._joining)
        if self.rows:
            self._draw(self.rows, self._step([job.ids[-1] for job in self.rows]))
        self.observe(len(self.rows))

    def _admit(self, now: float) -> list[Job]:
        """Jobs that may join now, taken from the queue."""
        joining: list[Job] = []
        tokens = 0
        with self._changed:
            while (
                self._waiting
                and not self._update
                and len(self.rows) + len(joining) < self.max_rows
                and tokens < PREFILL_TOKENS
            ):
                job = self._waiting.popleft()
                if end := _interruption(job, now):
                    self._finish(job, end)
                else:
                    joining.append(job)
                    tokens += len(job.request.prompt)
            for job in [job for job in self._waiting if _interruption(job, now)]:
                self._waiting.remove(job)
                self._finish(job, _interruption(job, now))
        return joining

    def _prefill(self, jobs: list[Job]) -> None:
        """Run each distinct prompt once, add its rows, and sample their first tokens."""
        device = self.model.wte.weight.device
        place: dict[tuple[int, ...], int] = {}
        owner = [place.setdefault(tuple(job.request.prompt), len(place)) for job in jobs]
        ids, lengths = pad_right(list(place), device)
        cache = new_cache(self.model.cfg, len(place), ids.shape[1], device, self._cache.kept[0].dtype)
        last = last_real(self._reader.model.hidden(ids, cache=cache, n_new=lengths), lengths)  # (prompts, D)
        for job, row in zip(jobs, owner):
            self._cache.join(cache, row, len(job.request.prompt))
            job.version = self.version
            job.state = job.request.grammar and job.request.grammar.begin()
            self.rows.append(job)
        self._draw(jobs, last[owner])

    def _draw(self, jobs: list[Job], hidden: Tensor) -> None:
        """One token for each job from its last state (B, D); finished rows leave."""
        logits = self._reader.logits_of(hidden).float()
        logits[:, self.model.cfg.n_ids :] = -math.inf
        for row, job in enumerate(jobs):
            if job.request.banned:
                logits[row, list(job.request.banned)] = -math.inf
        states = [job.state for job in jobs]
        room = [self._room(job) - 1 for job in jobs]
        if any(states):
            apply_grammars(logits, states, room)
        details = {
            job: detail_of(logits[row], job.request) for row, job in enumerate(jobs) if job.request.top is not None
        }
        keys, places = (
            torch.tensor(x, device=logits.device) for x in ([j.request.draws for j in jobs], [len(j.ids) for j in jobs])
        )
        ids, logprobs = draw_each(logits, [job.request.how for job in jobs], uniform(keys, places))
        if any(states):
            ids, logprobs = take_allowed(states, ids, logprobs, room)
        now = time.monotonic()
        for job, token, logprob in zip(jobs, ids.tolist(), logprobs.tolist()):
            if job in details:
                job.details.append(details[job])
            job.logprobs.append(logprob)
            job.ids.append(token)
        ends = {job: end for job in jobs if (end := self._ended(job))}
        for job in jobs:
            self._notify(job, now)
        for slot in reversed(range(len(self.rows))):
            if end := ends.get(self.rows[slot]):
                self._leave(slot, end)

    def _room(self, job: Job) -> int:
        """Tokens that the completion may still have."""
        block = self.model.cfg.block_size - len(job.request.prompt)
        return min(job.request.max_new_tokens, block) - len(job.ids)

    def _notify(self, job: Job, now: float) -> None:
        """Call on_progress, if it is time."""
        if len(job.ids) == 1:
            job.first_token_s = now - job.submitted
        if job.streams and now - job.flushed >= FLUSH_S:
            job.flushed = now
            job.on_progress()

    def _ended(self, job: Job) -> End | None:
        """Why the completion ends with its last token, if it does. Called once per token, since `should_stop` may count."""
        request, ids, state = job.request, job.ids, job.state
        halted = request.should_stop is not None and request.should_stop(ids[-1])
        inside, over = state is not None and state.inside, state is not None and state.ended
        if halted or over or not inside and any(tuple(ids[-len(s) :]) == tuple(s) for s in request.stop):
            return "stop"
        if len(ids) == request.max_new_tokens:
            return "length"
        return "context" if len(request.prompt) + len(ids) == self.model.cfg.block_size else None

    def _leave(self, slot: int, end: End) -> None:
        self._cache.leave(slot)
        job, last = self.rows[slot], self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last
        self._finish(job, end)

    def _finish(self, job: Job, end: End) -> None:
        job.end = end
        job._ended.set()
        job.on_progress()


def _interruption(job: Job, now: float) -> End | None:
    return "cancelled" if job.cancelled else "timeout" if job.timed_out(now) else None


def draw_each(logits: Tensor, hows: Sequence[Truncation], u: Tensor) -> tuple[Tensor, Tensor]:
    """`generate.draw` where each row of (B, V) logits has its own distribution: (ids, logprobs), both (B,)."""
    if len(set(hows)) == 1:
        return draw(logits, hows[0], u)
    ids, logprobs = torch.zeros(len(u), dtype=torch.long, device=u.device), torch.zeros(len(u), device=u.device)
    for how in set(hows):
        rows = torch.tensor([row for row, one in enumerate(hows) if one == how], device=u.device)
        ids[rows], logprobs[rows] = draw(logits[rows], how, u[rows])
    return ids, logprobs


def detail_of(logits: Tensor, request: Request) -> Detail:
    """Entropy and likeliest tokens of the sampling distribution of (V,) logits; greedy: the model's own."""
    how = request.how if request.how.temperature else Truncation()
    kept, ids = how.candidates(logits[None].clone())
    logprobs = kept.log_softmax(-1)[0]
    p = logprobs.exp()
    entropy = -(p * logprobs.masked_fill(p == 0, 0.0)).sum()
    best, places = logprobs.topk(min(request.top or 0, len(logprobs)))
    tokens = places if ids is None else ids[0, places]
    return Detail(float(entropy), [(t, lp) for t, lp in zip(tokens.tolist(), best.tolist()) if lp > -math.inf])
