"""A run while it trains, and what a loop opens before its first step: parent checkpoint and
policy. Every loop has a session; a session knows no task.

    s = SupervisedSession("sft", cfg, model, tok, parent=parent, evaluate=evaluate, ...)
    with s.running():
        for step in s.steps():         # saves, evaluates and ends when due
            ...                        # forward and backward passes
            s.apply_gradients()
            s.log_supervised(nats, tokens_per_step)
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from codechat.core import config
from codechat.core.errors import ConfigError, DataError, EngineLost, RunError, UserError
from codechat.core.processes import stop, stoppable
from codechat.distributed import dist, hardware, numerics, sharding
from codechat.models import lora, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.checkpoint import Checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer
from codechat.text.tokenizer import Tokenizer
from codechat.training import trends
from codechat.training.settings import (
    ChatSettings,
    LearningSettings,
    RunSettings,
    SupervisedSettings,
)

C = TypeVar("C", bound=LearningSettings)
# how errors about diverged weights end
LAST_STAYS = "the last checkpoint is kept"


class Session:
    """Opens or resumes a run, then saves, evaluates and stops it. A lost engine or Ctrl-C loses
    no step: the trained weights are saved at the end."""

    cfg: RunSettings

    def __init__(
        self,
        kind: str,
        cfg: RunSettings,
        model: GPT,
        tok: Tokenizer,
        *,
        parent: Checkpoint | None,
        evaluate: Callable[[GPT, int], Mapping[str, Any]],
        max_steps: int,
        tags: str,
        heads: Mapping[nn.Module, float] = {},
        trained_on: Mapping[str, Any] = {},
        kept: Mapping[str, Any] = {},
        data: Mapping[str, str] = {},
    ) -> None:
        """evaluate(model, step): returns a row of eval.jsonl.
        heads: modules trained beside the model, such as a value head, and their learning rates.
        kept: objects with state() and load_state(); a checkpoint holds their state too.
        trained_on: data that the contamination check searches.
        data: {name of the data: hash}. --resume raises DataError for other data, with their
        names."""
        self.cfg = cfg
        self.model = model
        self.tok = tok
        self.evaluate = evaluate
        self.max_steps = max_steps
        self.heads = heads
        self.kept = kept
        self.optimizers = optim.build(
            model,
            lr=cfg.lr,
            optimizer=cfg.optimizer,
            muon_lr=cfg.muon_lr,
            weight_decay=cfg.weight_decay,
        )
        for head, lr in heads.items():
            # AdamW without decay, whatever --optimizer says: a head of one output is no matrix
            # for Muon
            self.optimizers += optim.build(head, lr=lr, weight_decay=0.0)
        self.data = dict(data)
        base = self._base_of_adapters(parent)
        if parent and base:
            self.data |= weights_hash(cfg.init_from, parent.meta)
        ancestors: list[dict[str, Any]] = parent.meta.get("lineage", []) if parent else []
        this = dict(run=cfg.run_name, kind=kind, seed=cfg.seed, **trained_on)
        self.meta: dict[str, Any] = {
            "tokenizer": tok.to_dict(),
            "tags": tags,
            "lineage": [*ancestors, this],
            "data": self.data,
        }
        if base:
            self.meta["base"] = base._asdict()  # checkpoints hold no weights of it
        if cfg.resume:
            self._check_data()
        self.counts: dict[str, int] = {}  # what the loop counts over the whole run; saved too
        self.stopping = False
        self.why = ""  # the reason of an early end, if it is not an interruption
        self.lr = 0.0
        self.grad_norm = 0.0
        self.run = Run.create(
            cfg.run_name,
            cfg,
            kind=kind,
            parent=cfg.init_from,
            resume=cfg.resume,
            overwrite=cfg.overwrite,
        )
        try:
            self.start = self._restore() if self.run.resumed else 0
        except UserError as error:
            self.run.fail(str(error))
            raise
        self.step = self.start

    def _base_of_adapters(self, parent: Checkpoint | None) -> paths.Base | None:
        """The frozen weights that this run adds adapters to; None where it trains all weights."""
        cfg = self.cfg
        if parent is None or not isinstance(cfg, LearningSettings) or not cfg.lora_rank:
            return None
        # reference and fingerprint: the run of this name may hold other weights by the time it is
        # read
        return paths.Base(
            checkpoint=paths.reference_of(parent.path),
            fingerprint=paths.fingerprint(parent.meta),
            scale=cfg.lora_alpha / cfg.lora_rank,
        )

    def _check_data(self) -> None:
        """Before anything is written: RunError if the settings are not those of the run,
        DataError if its data are not. A collective."""
        name = self.cfg.run_name
        path = paths.runs_dir() / name
        with dist.together():
            if not paths.exists(name) or paths.latest_step(path) is None:
                return
            # a resumed run that goes on with other data would be neither the one run nor the
            # other
            changed = changes(checkpoint.read_meta(path).get("data", {}), self.data)
            try:
                paths.check_same(name, self.cfg)
            # a setting may follow from the data, and data from a setting: both are named
            except RunError as error:
                raise RunError(
                    f"{error}; of its data {', '.join(changed)}" if changed else str(error)
                ) from None
            if changed:
                remedy = "restore the data, or begin another run with --run-name"
                raise DataError(f"run {name} began with other data: {', '.join(changed)}; {remedy}")

    def _restore(self) -> int:
        last = checkpoint.load(self.run.path)
        optimizers = self.optimizers if last.step < self.max_steps else []
        if last.adapters:  # the weights below them have not changed
            lora.load(self.model, last.adapters)
        else:
            checkpoint.restore(last, self.model)
        checkpoint.restore_optimizers(last, self.model, optimizers)
        self.counts = dict(last.extra["counts"])
        for name, part in self.kept.items():
            part.load_state(last.extra[name])
        return last.step

    @contextmanager
    def running(self) -> Iterator[Self]:
        """The run while it trains. At the end no checkpoint is half written, and a run that
        ended early says why."""
        bar = tqdm(
            desc=self.run.name,
            disable=not dist.is_main(),
            initial=self.start,
            total=self.max_steps,
            unit="step",
        )
        with stoppable(), self.run, checkpoint.settled(), bar as self.bar:
            lost = None
            try:
                yield self
            except EngineLost as error:  # on all ranks, before anything of this step was learned
                lost = error
                if self.step > self.start:
                    self.save(wait=True)
            if self.why:
                self.run.stop(self.why)
            elif lost or self.stopping:
                self.run.stop(
                    f"{lost or 'interrupted'} at step {self.step}; continue with --resume"
                )

    # ---- the steps

    def steps(self) -> Iterator[int]:
        """The steps to train. Saves and evaluates what is due before each step and after the
        last one. Ends early when interrupted, on all ranks together. On resume, the first
        evaluation is skipped if eval.jsonl already has it."""
        self._pace_from(self.start)
        # rank 0 decides for all: an evaluation is a collective
        evaluated = dist.gather(self.start in set(self.run.evals()["step"]))[0]
        for self.step in range(self.start, self.max_steps + 1):
            done = self.step == self.max_steps
            first = self.step == self.start
            # one signal stops all ranks: a rank that left alone would leave the others waiting
            self.stopping = any(dist.gather(stop.is_set() or bool(self.why)))
            last = done or self.stopping
            # saved first: an evaluation that fails or is killed costs no step, and --resume
            # makes up for it
            if not first and (last or self._due(self.cfg.save_every)):
                self.save(wait=last)
            if not (first and evaluated) and (done or self._due(self.cfg.eval_every)):
                self._evaluate()
            if last:
                return
            scale = optim.lr_scale(
                self.step,
                max_steps=self.max_steps,
                warmup_steps=self.cfg.warmup_steps,
                schedule=self.cfg.schedule,
                final=self.cfg.final_lr_share,
            )
            optim.set_lr(self.optimizers, scale)
            self.lr = self.cfg.lr * scale
            yield self.step

    def _evaluate(self) -> None:
        """Append a row to eval.jsonl, and print its warnings. The random state of training is
        restored afterwards."""
        # how often a run evaluates must not change what it samples and learns
        random_state = checkpoint.rng_state()
        row = self.evaluate(self.model, self.step)
        checkpoint.set_rng_state(random_state)
        self.run.log_eval(self.step, row)
        if dist.is_main():
            for warning in trends.warnings(self.run.evals()):
                print(f"{self.cfg.run_name}: {warning}", file=sys.stderr)
        self._pace_from(self.step)

    def _due(self, every: int) -> bool:
        return bool(every and self.step % every == 0)

    def apply_gradients(self) -> None:
        """Add the gradients of all ranks, clip their common norm, take a step. RunError, before
        the step, if the norm is not finite: such weights are never saved, so the last checkpoint is
        good."""
        # summed, not averaged: losses are divided by counts over all ranks
        for part in (self.model, *self.heads):
            sharding.sum_gradients(part)
        self.grad_norm = sharding.clip_gradients(self._weights(), self.cfg.grad_clip)
        if not math.isfinite(self.grad_norm):
            at = f"the gradient's norm is {self.grad_norm} at step {self.step + 1}"
            raise RunError(f"{at}; lower --lr or --muon-lr; {LAST_STAYS}")
        for optimizer in self.optimizers:
            optimizer.step()
            # none, not 0: optimizers skip what has no gradient, and its memory is free while
            # sampling
            optimizer.zero_grad(set_to_none=True)

    def _weights(self) -> list[nn.Parameter]:
        """Those that learn."""
        parts = (self.model, *self.heads)
        return [p for part in parts for p in part.parameters() if p.requires_grad]

    def save(self, wait: bool) -> None:
        """Write a checkpoint beside training. wait: until it is on the disk. RunError for
        weights that are not finite."""
        finite = torch.stack([sharding.local(p).isfinite().all() for p in self._weights()]).all()
        if any(dist.gather(not finite)):
            raise RunError(
                f"weights are not finite after step {self.step}; lower --lr or --muon-lr; {LAST_STAYS}"
            )
        extra = {"counts": dict(self.counts)}
        extra |= {name: part.state() for name, part in self.kept.items()}
        adapters = lora.adapters(self.model)
        # adapters of random weights have no base that could be read again
        merged = adapters and "base" not in self.meta
        checkpoint.save(
            self.run.path,
            self.step,
            model=self.model,
            # after the last step no further one needs their states
            optimizers=self.optimizers if self.step < self.max_steps else [],
            extra=extra,
            meta=self.meta,
            weights=lora.merged(self.model).state_dict() if merged else None,
            adapters=adapters,
            keep_last=self.cfg.keep_last,
            wait=wait,
        )

    def tokens_per_second(self, tokens_per_step: int) -> float:
        """Of all ranks, since the last call or evaluation."""
        step = self.paced_step
        began = self.paced_at
        self._pace_from(self.step + 1)
        return tokens_per_step * (self.paced_step - step) / (self.paced_at - began)

    def _pace_from(self, step: int) -> None:
        self.paced_step = step
        self.paced_at = time.perf_counter()


class SupervisedSession(Session):
    """A run that learns from given tokens: pretraining and SFT."""

    cfg: SupervisedSettings

    def log_supervised(self, nats: Tensor, tokens_per_step: int, **row: float) -> None:
        """Log a row of metrics every --log-every steps. nats: this rank's part of the step's mean
        loss; `train_loss` is the sum over ranks. A collective in the steps that are logged."""
        self.bar.update(1)
        if (self.step + 1) % self.cfg.log_every and self.step + 1 != self.max_steps:
            return
        train_loss = dist.total(float(nats))
        tok_per_s = self.tokens_per_second(tokens_per_step)
        peak = hardware.peak(hardware.device(), numerics.compute_dtype())
        flops = tok_per_s * self.cfg.model.flops_per_token(self.cfg.length, self.cfg.adapters)
        self.run.log(
            self.step + 1,
            tokens=(self.step + 1) * tokens_per_step,
            train_loss=train_loss,
            **row,
            tok_per_s=tok_per_s,
            lr=self.lr,
            grad_norm=self.grad_norm,
            mfu=peak.share(flops / dist.world_size()),
        )
        self.bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{tok_per_s:,.0f}")


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """How two tables {data: hash} differ, in words."""
    changed = [
        f"{what} has changed" for what in before if what in now and before[what] != now[what]
    ]
    changed += [f"{what} is no longer there" for what in before if what not in now]
    return changed + [f"{what} is new" for what in now if what not in before]


# ---- what is opened before the first step


class Prefetched:
    """A loader (next, state, load_state) whose next batches a thread prepares, in pinned memory,
    while a step runs on the GPU.

    ahead: batches that are ready at a time. beside: whether to use the thread; None = on a GPU.
    `state()` is the state after the batches that were handed out."""

    def __init__(
        self, loader: Any, device: torch.device, ahead: int = 1, beside: bool | None = None
    ) -> None:
        self.loader = loader
        self.pins = device.type == "cuda"
        self.ahead = ahead
        self.load_state = loader.load_state  # only before the first batch
        self.state = loader.state
        self._waiting: deque[Future[tuple[Any, Any]]] = deque()
        threaded = self.pins if beside is None else beside
        self._thread = ThreadPoolExecutor(1, "batches") if threaded else None

    def next(self) -> Any:
        if self._thread is None:
            return self.loader.next()
        while len(self._waiting) <= self.ahead:
            self._waiting.append(self._thread.submit(self._prepare))
        batch, state = self._waiting.popleft().result()
        self.state = lambda: state  # a checkpoint must not count the batches that still wait
        return batch

    def _prepare(self) -> tuple[Any, Any]:
        batch = self.loader.next()
        if self.pins:
            made = getattr(batch, "_make", tuple)  # a Batch, or a plain tuple of WindowLoader
            batch = made(part.pin_memory() for part in batch)
        return batch, self.loader.state()


class Start(NamedTuple, Generic[C]):
    """What a run starts from. cfg: its settings, with the parent's architecture and tags filled
    in."""

    cfg: C
    parent: Checkpoint | None
    tok: Tokenizer


def load_parent(cfg: C, *, tok: Tokenizer | None = None) -> Start[C]:
    """The parent checkpoint and the tokenizer of a run.

    With a parent, the settings take over its architecture, and its tags unless they name others.
    Without one, the tokenizer decides the size of the vocabulary. tok: the tokenizer with which
    the data were prepared, if it is fixed. ConfigError for settings that contradict the parent or
    the data's tokenizer."""
    # mapped, not read: the model copies each tensor once, and optimizer states are of another run
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    if isinstance(cfg, ChatSettings) and not cfg.tags:
        cfg = replace(cfg, tags=parent.meta["tags"] if parent else "reserved")
    if parent:
        shape, theirs = _parents_shape(cfg, parent, tok)
    else:
        if tok is None:
            assert isinstance(cfg, ChatSettings), (
                "a loop without --tokenizer gives the tokenizer of its data"
            )
            tok = tokenizer.load(cfg.tokenizer)
        theirs = tok
        shape = replace(cfg.model, vocab_size=theirs.n_vocab)
    reserved = isinstance(cfg, ChatSettings) and cfg.tags == "reserved"
    # by default a model has rows for all tags of `text.chat`; an imported one may have none
    if reserved and shape.n_ids < theirs.n_vocab + GPTConfig.n_tags:
        remedy = (
            "leave --tags out, or import it with --tags reserved" if parent else "set --tags text"
        )
        raise ConfigError(
            f"the model of {cfg.init_from or 'these settings'} "
            f"has no rows for reserved tags; {remedy}"
        )
    return Start(replace(cfg, model=shape), parent, theirs)


def _parents_shape(
    cfg: LearningSettings, parent: Checkpoint, tok: Tokenizer | None
) -> tuple[GPTConfig, Tokenizer]:
    """Architecture and tokenizer of the parent. ConfigError if a flag names another
    architecture, or the data were prepared with another tokenizer."""
    shape = config.from_dict(GPTConfig, parent.meta["model_config"])
    theirs = tokenizer.from_dict(parent.meta["tokenizer"])
    taken = {f"model.{name}": value for name, value in config.plain(shape).items()} | {
        "tokenizer": theirs.spec
    }
    for name, (_, value) in config.changed(cfg).items():
        there = taken.get(name, value)
        if there != value:
            got = f"{config.flag_of(name)} {value}: with --init-from {cfg.init_from} it is {there}"
            raise ConfigError(f"{got}; leave the flag, or the --preset that sets it, out")
    if tok and tok.spec != theirs.spec:
        got = f"{cfg.data_dir} has the tokenizer {tok.spec}, {cfg.init_from} has {theirs.spec}"
        raise ConfigError(f"{got}; prepare the data with --tokenizer {theirs.spec}")
    return shape, theirs


def build_model(cfg: LearningSettings, parent: Checkpoint | None) -> GPT:
    """The model of `cfg.model` on this rank's device, whole or sharded: the parent's weights,
    or new ones of the seed. Matrices that stay frozen below adapters have the dtype of
    products."""
    frozen = numerics.compute_dtype() if cfg.lora_rank else torch.float32

    def empty() -> GPT:
        model = GPT(cfg.model)
        # weights that are read are never whole in float32; new ones are drawn in it
        return lora.hold_matrices_in(model, frozen) if parent else model

    # random weights of 8b take over a minute per rank: none where others are read
    seed = None if parent else cfg.seed
    model = sharding.build(
        empty,
        seed=seed,
        shard_it=cfg.shard,
        over=cfg.shard_over,
        adapters=cfg.adapters,
    )
    if parent:
        checkpoint.restore(parent, model)
    lora.hold_matrices_in(model, frozen)
    if (
        parent
        and cfg.lora_rank
        and hardware.device().type == "cpu"
        and not sharding.is_sharded(model)
    ):
        # a frozen embedding is read where it is, in the parent's file: a step needs few rows
        model.wte.weight.data = parent.model_state["wte.weight"]
    return model


def build_policy(cfg: LearningSettings, parent: Checkpoint | None) -> GPT:
    """The model to train; with frozen weights and LoRA adapters unless cfg.lora_rank is 0."""
    model = build_model(cfg, parent)
    return lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)


def weights_hash(ref: str | None, meta: Mapping[str, Any]) -> dict[str, str]:
    """Hash of a checkpoint that a resumed run reads again: a reference model, a teacher, or the
    frozen weights below adapters."""
    return {f"checkpoint {ref}": paths.fingerprint(meta)}
