"""One model, many requests: rows join and leave a running batch between two tokens.

    with Engine(loaded, max_rows=16) as engine:
        (job,) = engine.submit([Request(prompt=ids, max_new_tokens=64, draws=row_key(seed, 0, 0))])
        job.ended.wait(); job.ids

The engine's thread holds the model. A row is sampled by its key and position, as in
`generate.sample`, so its tokens do not depend on the rest of the batch. New weights come in
between two tokens, when no row runs."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from codechat.core.errors import ConfigError, RunError
from codechat.distributed import numerics
from codechat.models import attention, draws, generate, loading
from codechat.models.draws import Grammar, GrammarState, Truncation
from codechat.models.fast.reader import cache_dtype, reader_of
from codechat.runs.paths import fingerprint
from codechat_lab.serve.slots import Room, SlotCache

PREFILL_TOKENS = 4096  # of prompts that run together; more would delay the other rows
SCORED_TOKENS = 256  # of a prompt whose logits are in memory together
# between two calls of on_progress: waking a reader costs as much as sampling some tokens
FLUSH_S = 0.05
ENDED = "the engine has ended; start the server again"
End = Literal["stop", "length", "context", "cancelled", "timeout", "closed"]
# entropy in nats; (id, log-probability), likeliest first
Detail = tuple[float, list[tuple[int, float]]]


class Overloaded(RunError):
    """The queue is full."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion. prompt + max_new_tokens may exceed `Room.max_context`: it then ends with
    "context"."""

    prompt: Sequence[int]
    max_new_tokens: int
    draws: int = 0  # `row_key`
    how: Truncation = Truncation()
    stop: Sequence[Sequence[int]] = ()  # id sequences, matched whole and kept
    # asked with the completion's ids after every token
    should_stop: Callable[[Sequence[int]], bool] | None = None
    grammar: Grammar | None = None
    # likeliest tokens to note beside every draw, with the entropy; none = neither
    top: int | None = None
    # the same beside every token of the prompt, with its own log-probability
    prompt_top: int | None = None
    timeout_s: float = math.inf  # from submission to the last token


@dataclass(eq=False)
class Job:
    """A submitted request. The engine's thread appends to the lists and sets `end` last; any
    thread may read.

    on_progress: called by that thread at the end and, where it streams, at the first token and
    every FLUSH_S."""

    request: Request
    on_progress: Callable[[], object]
    streams: bool
    submitted: float
    ids: list[int] = field(default_factory=list)
    # nats, of the sampling distribution; greedy: the model's own
    logprobs: list[float] = field(default_factory=list)
    # of each id's distribution, where `request.top` is set
    details: list[Detail] = field(default_factory=list)
    # of each token of the prompt but the first, where `request.prompt_top` is set: nats of the
    # model's own distribution
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_likeliest: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest first
    end: End | None = None
    version: str = ""  # of the weights; set when it joins
    cancelled: bool = False  # set it to leave the batch or the queue before the next token
    flushed: float = 0.0
    state: GrammarState | None = None  # where the completion is in its grammar
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def interruption(self) -> End | None:
        late = time.monotonic() - self.submitted > self.request.timeout_s
        if self.cancelled:
            return "cancelled"
        return "timeout" if late else None

    def finish(self, end: End) -> None:
        self.end = end
        self.ended.set()
        self.on_progress()


@dataclass(frozen=True)
class Update:
    """Weights that are to replace those of the engine."""

    weights: Mapping[str, Tensor]
    version: str
    done: Future[None] = field(default_factory=Future)


class Engine:
    """Samples tokens for up to `max_rows` requests while up to `max_waiting` more wait. Leaving
    the context ends all as "closed"."""

    def __init__(
        self,
        loaded: loading.LoadedModel,
        *,
        max_rows: int = 16,
        max_waiting: int = 64,
        room: Room | None = None,
    ) -> None:
        """room: none = for `max_rows` requests, each as long as the model's block."""
        block = loaded.model.cfg.block_size
        self.model = loaded.model
        self._device = loaded.device
        # read before there are two threads: it is printed once
        self._compute = numerics.compute_dtype(loaded.device)
        # where the model has none of its own; empty once they are read
        self._weights = loaded.weights
        self.room = room or Room(block, max_rows, max_rows * block)
        self.max_rows = self.room.max_rows
        self.max_waiting = max_waiting
        self.version = fingerprint(loaded.meta)  # of the weights
        self.rows: list[Job] = []  # in the order of the cache
        self.waiting: deque[Job] = deque()
        self._updates: deque[Update] = deque()
        self._changed = threading.Condition()  # guards both queues and `_closing`
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def submit(
        self,
        requests: Sequence[Request],
        *,
        on_progress: Callable[[], object] = lambda: None,
        streams: bool = False,
    ) -> list[Job]:
        """All of the requests or none. Overloaded where the queue has no room, RunError after
        the end."""
        longest = max(len(request.prompt) for request in requests)
        if longest > self.room.max_context:
            raise ConfigError(
                f"got a prompt of {longest} tokens; expected at most {self.room.max_context}"
            )
        ids = [token for request in requests for token in request.prompt]
        if not 0 <= min(ids) <= max(ids) < self.model.cfg.n_ids:
            raise ConfigError(
                f"got ids from {min(ids)} to {max(ids)}; expected 0 to {self.model.cfg.n_ids - 1}"
            )
        jobs = [Job(request, on_progress, streams, time.monotonic()) for request in requests]
        with self._changed_alive():
            room = self.max_waiting + max(0, self.max_rows - len(self.rows)) - len(self.waiting)
            if len(jobs) > room:
                limit = f"at most {self.max_waiting} may wait; try again later"
                raise Overloaded(
                    f"{len(self.waiting)} completions wait, {len(jobs)} more are requested; {limit}"
                )
            self.waiting.extend(jobs)
        return jobs

    def update_weights(self, state: Mapping[str, Tensor], version: str) -> None:
        """Load weights of the same shapes when the running rows have ended; no request joins
        meanwhile. Blocks until they are in."""
        update = Update(state, version)
        with self._changed_alive():
            self._updates.append(update)
        update.done.result()

    @contextmanager
    def _changed_alive(self) -> Iterator[None]:
        """Change what the engine's thread reads, and wake it. RunError after its end."""
        with self._changed:
            if not self.alive:
                raise RunError(ENDED)
            yield
            self._changed.notify()

    # ---- the engine's thread

    def _run(self) -> None:
        device = self._device
        try:
            with (
                torch.inference_mode(),
                torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            ):
                dtype = cache_dtype(self.model.cfg, device, self._compute)
                self._cache = SlotCache(self.model.cfg, self.room, device, dtype)
                while not self._closing:
                    # both keep casts and copies of the weights, which an update must not find
                    with numerics.autocast(device):
                        self._reader = reader_of(
                            self.model, graph=False, weights=self._weights, answers=True
                        )
                        self._weights = None if self._weights is None else {}
                        while self._has_work():
                            self._round()
                    del self._reader  # before the next copy is made
                    while self._updates:
                        # it stays there until it is in: a defect must end it too
                        self._take(self._updates[0])
                        self._updates.popleft().done.set_result(None)
        finally:  # also after a defect, of which stderr gets the traceback
            with self._changed:
                self._closing = True
                for update in self._updates:
                    update.done.set_exception(RunError(ENDED))
                for job in (*self.rows, *self.waiting):
                    job.finish("closed")

    def _take(self, update: Update) -> None:
        self.version = update.version
        if self._weights is None:
            self.model.load_state_dict(update.weights)
        else:
            self._weights = update.weights

    def _has_work(self) -> bool:
        """Wait for a request; false at the end, and where no row delays a weight update any
        more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.rows or self.waiting or self._closing or self._updates
            )
            return not self._closing and bool(self.rows or not self._updates)

    def _round(self) -> None:
        """One token for every row, after rows left and joined."""
        self._leave()
        joining = self._admit()
        if joining:
            self._prefill(joining)
            self._leave()
        if self.rows:
            self._cache.make_room(len(self.rows), max(self._cache.tokens) + 1)
            ids = torch.tensor([job.ids[-1] for job in self.rows], device=self._cache.kv.device)
            self._draw(self.rows, self._reader.read(ids, self._cache))

    def _admit(self) -> list[Job]:
        """Jobs that join now: out of the queue, into the rows."""
        first = len(self.rows)
        tokens = 0
        with self._changed:
            for job in list(self.waiting):
                end = job.interruption
                if end:
                    self.waiting.remove(job)
                    job.finish(end)
            while (
                self.waiting
                and not self._updates
                and len(self.rows) < self.max_rows
                and tokens < PREFILL_TOKENS
                and self.room.takes([self._needs(job) for job in (*self.rows, self.waiting[0])])
            ):
                self.rows.append(self.waiting.popleft())
                tokens += len(self.rows[-1].request.prompt)
        return self.rows[first:]

    def _prefill(self, jobs: list[Job]) -> None:
        """Run each distinct prompt once, and sample the first token of every job that may have
        one."""
        device = self._device
        index: dict[tuple[int, ...], int] = {}
        prompt_of = [index.setdefault(tuple(job.request.prompt), len(index)) for job in jobs]
        ids, lengths = generate.pad_right(list(index), device)
        cache = attention.KVCache(
            self.model.cfg, len(index), ids.shape[1], device, self._cache.kv.dtype
        )
        hidden = self._reader.prompts(ids, cache, lengths)  # (prompts, T, D)
        last = generate.last_real(hidden, lengths)  # (prompts, D)
        for job, row in zip(jobs, prompt_of):
            self._cache.join(cache, row, len(job.request.prompt))
            job.version = self.version
            job.state = job.request.grammar.begin() if job.request.grammar else None
            if job.request.prompt_top is not None:
                self._score_prompt(job, hidden[row])
        drawing = [number for number, job in enumerate(jobs) if job.request.max_new_tokens]
        if drawing:
            self._draw(
                [jobs[number] for number in drawing],
                last[[prompt_of[number] for number in drawing]],
            )

    def _score_prompt(self, job: Job, hidden: Tensor) -> None:
        """Note the log-probability of each token of the prompt, from the states (T, D) of the
        ones before, and the likeliest tokens there."""
        prompt = torch.tensor(job.request.prompt, device=hidden.device)
        for start in range(0, len(prompt) - 1, SCORED_TOKENS):
            targets = prompt[start + 1 : start + 1 + SCORED_TOKENS]
            # (tokens, V)
            logprobs = self._logits(hidden[start : start + len(targets)]).log_softmax(-1)
            best, ids = logprobs.topk(min(job.request.prompt_top or 0, self.model.cfg.n_ids))
            job.prompt_logprobs += logprobs.gather(1, targets[:, None])[:, 0].tolist()
            for likeliest in zip(ids.tolist(), best.tolist()):
                job.prompt_likeliest.append(list(zip(*likeliest)))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Of states (N, D), without unused rows of the vocabulary: float32 (N, V)."""
        logits = self._reader.logits_of(hidden).float()
        logits[:, self.model.cfg.n_ids :] = -math.inf
        return logits

    def _draw(self, jobs: list[Job], hidden: Tensor) -> None:
        """One token for each job from its last state (B, D)."""
        logits = self._logits(hidden)  # (B, V)
        states = [job.state for job in jobs]
        room = [self._room(job) - 1 for job in jobs]
        if any(states):
            draws.apply_grammars(logits, states, room)
        for row, job in enumerate(jobs):
            if job.request.top is not None:
                job.details.append(detail_of(logits[row], job.request))
        keys = torch.tensor([job.request.draws for job in jobs], device=logits.device)
        positions = torch.tensor([len(job.ids) for job in jobs], device=logits.device)
        ids, logprobs = draw_each(
            logits, [job.request.how for job in jobs], draws.uniform(keys, positions)
        )
        if any(states):
            ids, logprobs = draws.take_allowed(states, ids, logprobs, room)
        now = time.monotonic()
        for job, token, logprob in zip(jobs, ids.tolist(), logprobs.tolist()):
            job.logprobs.append(logprob)
            job.ids.append(token)
            if job.streams and now - job.flushed >= FLUSH_S:
                job.flushed = now
                job.on_progress()

    def _needs(self, job: Job) -> int:
        """Tokens that the prompt and its completion may have."""
        request = job.request
        return min(len(request.prompt) + request.max_new_tokens, self.room.max_context)

    def _room(self, job: Job) -> int:
        """Tokens that the completion may still have."""
        return self._needs(job) - len(job.request.prompt) - len(job.ids)

    def _leave(self) -> None:
        """Rows that ended leave; the last row takes the place of each."""
        for slot in reversed(range(len(self.rows))):
            job = self.rows[slot]
            end = self._ended(job) or job.interruption
            if end:
                self._cache.leave(slot)
                self.rows[slot] = self.rows[-1]
                self.rows.pop()
                job.finish(end)

    def _ended(self, job: Job) -> End | None:
        """Why the completion ends with its last token, if it does."""
        request = job.request
        ids = job.ids
        state = job.state
        inside = state is not None and state.inside  # a stop sequence inside a call is part of it
        if not inside and any(tuple(ids[-len(stop) :]) == tuple(stop) for stop in request.stop):
            return "stop"
        if state is not None and state.ended:
            return "stop"
        if request.should_stop and request.should_stop(ids):
            return "stop"
        if len(ids) == request.max_new_tokens:
            return "length"
        return "context" if self._room(job) == 0 else None


def draw_each(logits: Tensor, hows: Sequence[Truncation], u: Tensor) -> tuple[Tensor, Tensor]:
    """`draws.draw` where each row of (B, V) logits has its own distribution: (ids, logprobs),
    both (B,)."""
    if len(set(hows)) == 1:
        return draws.draw(logits, hows[0], u)
    ids = torch.zeros(len(u), dtype=torch.long, device=u.device)
    logprobs = torch.zeros(len(u), device=u.device)
    for how in set(hows):
        rows = [row for row, other in enumerate(hows) if other == how]
        ids[rows], logprobs[rows] = draws.draw(logits[rows], how, u[rows])
    return ids, logprobs


def detail_of(logits: Tensor, request: Request) -> Detail:
    """Entropy and likeliest tokens of the sampling distribution of (V,) logits; greedy: the
    model's own."""
    how = request.how if request.how.temperature else Truncation()
    kept, ids = how.candidates(logits[None].clone())
    logprobs = kept.log_softmax(-1)[0]
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -math.inf, 0.0)).sum()
    best, columns = logprobs.topk(min(request.top or 0, len(logprobs)))
    tokens: Any = columns if ids is None else ids[0, columns]
    return float(entropy), [
        (t, lp) for t, lp in zip(tokens.tolist(), best.tolist()) if lp > -math.inf
    ]
