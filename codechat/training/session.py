"""A run while it trains, and what a loop opens before its first step: checkpoint and policy. What every loop
shares; it knows no task.

s = Session("sft", cfg, model, tok, parent=parent, evaluate=evaluate, kept={"loader": loader})
with s.running():
    for step in s.steps():             # saves, evaluates and ends when due
        ...                            # forward and backward passes
        s.apply_gradients()
        s.log_supervised(nats, tokens_per_step)
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from codechat.core import config
from codechat.core.errors import ConfigError, DataError, EngineLost, RunError, UserError
from codechat.core.processes import stop, stoppable
from codechat.distributed import dist, hardware, sharding
from codechat.models import lora, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths
from codechat.runs.checkpoint import Checkpoint
from codechat.runs.run import Run
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import Tokenizer
from codechat.training import trends

C = TypeVar("C")
KEPT = "the last checkpoint is kept"


class Session:
    """Opens or resumes a run, then saves, evaluates and stops it. A lost engine and Ctrl-C lose nothing: what was
    trained is saved at the end.

    evaluate(model, step): a row of eval.jsonl. data: {what the run uses: hash}; --resume with other data is refused
    by name. heads: modules beside the model, such as a value head, and their learning rates.
    kept: objects with state() and load_state(), which a checkpoint holds beside model and optimizers. trained_on:
    what the contamination check searches."""

    def __init__(
        self,
        kind: str,
        cfg: Any,
        model: GPT,
        tok: Tokenizer,
        *,
        parent: Checkpoint | None,
        evaluate: Callable[[GPT, int], Mapping[str, Any]],
        heads: Mapping[nn.Module, float] = {},
        max_steps: int | None = None,
        tags: str | None = None,
        trained_on: Mapping[str, Any] = {},
        kept: Mapping[str, Any] = {},
        data: Mapping[str, str] = {},
    ) -> None:
        self.cfg, self.model, self.tok, self.evaluate = cfg, model, tok, evaluate
        self.heads, self.kept = heads, kept
        self.max_steps = cfg.max_steps if max_steps is None else max_steps
        rates = dict(lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay)
        self.optimizers = optim.build(model, **rates)
        for head, lr in heads.items():
            self.optimizers += optim.build(head, lr=lr, weight_decay=0.0)
        lineage = parent.meta.get("lineage", []) if parent else []
        lineage = [*lineage, {"run": cfg.run_name, "kind": kind, "seed": cfg.seed, **trained_on}]
        self.meta = dict(tokenizer=tok.to_dict(), tags=tags or cfg.tags, lineage=lineage, data=dict(data))
        if parent and getattr(
            cfg, "lora_rank", 0
        ):  # a checkpoint holds the merged weights, not those below the adapters
            self.meta["data"] |= weights_hash(cfg.init_from, parent.meta)
        if cfg.resume:
            self._check_data()
        self.counts: dict[str, int] = {}  # what the loop counts over the whole run; saved too
        self.stopping, self.why = False, ""  # why: the reason of an early end, if it is not an interruption
        self.lr = self.grad_norm = 0.0
        how = dict(kind=kind, parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite)
        self.run = Run.create(cfg.run_name, cfg, **how)
        try:
            self.start = self.step = self._restore() if self.run.resumed else 0
        except UserError as error:
            self.run.fail(str(error))
            raise

    def _check_data(self) -> None:
        """RunError where the settings are not those of the run, DataError where its data are not, before anything
        is written. A collective."""
        name = self.cfg.run_name
        path = paths.runs_dir() / self.cfg.run_name
        with dist.together():
            if not paths.exists(name) or paths.latest_step(path) is None:
                return
            before = checkpoint.read_meta(path).get("data", {})
            now = self.meta["data"]
            changed = [f"{what} has changed" for what in before if what in now and before[what] != now[what]]
            changed += [f"{what} is no longer there" for what in before if what not in now]
            changed += [f"{what} is new" for what in now if what not in before]
            try:
                paths.check_same(name, self.cfg)
            except RunError as error:  # a setting may follow from the data, and data from a setting: both are named
                raise RunError(f"{error}; of its data {', '.join(changed)}" if changed else str(error)) from None
            if changed:
                remedy = "restore the data, or begin another run with --run-name"
                raise DataError(f"run {name} began with other data: {', '.join(changed)}; {remedy}")

    def _restore(self) -> int:
        last = checkpoint.load(self.run.path)
        checkpoint.restore(last, lora.merged(self.model), self.optimizers)
        lora.load(self.model, last.extra.get("lora", {}))
        self.counts = dict(last.extra["counts"])
        for name, part in self.kept.items():
            part.load_state(last.extra[name])
        return last.step

    @contextmanager
    def running(self) -> Iterator[Self]:
        """The run while it trains. At the end no checkpoint is half written, and a run that ended early says why."""
        counts = dict(initial=self.start, total=self.max_steps, unit="step")
        bar = tqdm(desc=self.run.name, disable=not dist.is_main(), **counts)
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
                self.run.stop(f"{lost or 'interrupted'} at step {self.step}; continue with --resume")

    # ---- the steps

    def steps(self) -> Iterator[int]:
        """The steps to train. Before each what is due is saved and evaluated, once more after the last; ends early
        when interrupted, on all ranks together. A resumed run evaluates its first weights only if that was cut
        off."""
        self.pace = (self.start, time.perf_counter())
        evaluated = dist.gather(self.start in set(self.run.evals()["step"]))[0]
        for self.step in range(self.start, self.max_steps + 1):
            done = self.step == self.max_steps
            self.stopping = any(dist.gather(stop.is_set() or bool(self.why)))
            # saved first: an evaluation that fails or is killed costs no step, and --resume makes up for it
            if (done or self.stopping or self._due(self.cfg.save_every)) and self.step > self.start:
                self.save(wait=done or self.stopping)
            if (done or self._due(self.cfg.eval_every)) and not (self.step == self.start and evaluated):
                self._evaluate()
            if done or self.stopping:
                return
            schedule = dict(schedule=self.cfg.schedule, final=self.cfg.final_lr_share)
            scale = optim.lr_scale(
                self.step,
                max_steps=self.max_steps,
                warmup_steps=self.cfg.warmup_steps,
                **schedule,
            )
            optim.set_lr(self.optimizers, scale)
            self.lr = self.cfg.lr * scale
            yield self.step

    def _evaluate(self) -> None:
        """Append a row to eval.jsonl, and warn. Training continues from the random state that was saved, whatever
        an evaluation draws."""
        random_state = checkpoint.rng_state()
        row = self.evaluate(self.model, self.step)
        checkpoint.set_rng_state(random_state)
        self.run.log_eval(self.step, row)
        for warning in trends.warnings(self.run.evals()) if dist.is_main() else ():
            print(f"{self.cfg.run_name}: {warning}", file=sys.stderr)
        self.pace = (self.step, time.perf_counter())

    def _due(self, every: int) -> bool:
        return bool(every and self.step % every == 0)

    def apply_gradients(self) -> None:
        """Add the gradients of all ranks, clip their common norm, take a step. RunError, before it, where the norm
        is not finite: such weights are never saved, so the last checkpoint is good."""
        parts = (self.model, *self.heads)
        for part in parts:
            dist.sum_gradients(part)
        self.grad_norm = dist.clip_gradients([p for part in parts for p in part.parameters()], self.cfg.grad_clip)
        if not math.isfinite(self.grad_norm):
            at = f"the gradient's norm is {self.grad_norm} at step {self.step + 1}"
            raise RunError(f"{at}; lower --lr or --muon-lr; {KEPT}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def save(self, wait: bool) -> None:
        """Write a checkpoint beside training; wait: until it is on the disk. RunError for weights that are not
        finite."""
        weights = [p for part in (self.model, *self.heads) for p in part.parameters()]
        if any(dist.gather(not torch.stack([dist.local(p).isfinite().all() for p in weights]).all())):
            raise RunError(f"weights are not finite after step {self.step}; lower --lr or --muon-lr; {KEPT}")
        extra = {"lora": lora.adapters(self.model), "counts": dict(self.counts)}
        extra |= {name: part.state() for name, part in self.kept.items()}
        how = dict(
            optimizers=self.optimizers,
            extra=extra,
            meta=self.meta,
            keep_last=self.cfg.keep_last,
            wait=wait,
        )
        checkpoint.save(self.run.path, self.step, model=lora.merged(self.model), **how)

    def log_supervised(self, nats: Tensor, tokens_per_step: int, **row: float) -> None:
        """Every --log-every steps a row of metrics. nats: this rank's part of the step's mean loss; `train_loss` is
        that of all ranks. A collective in the steps that are logged."""
        self.bar.update(1)
        if (self.step + 1) % self.cfg.log_every and self.step + 1 != self.max_steps:
            return
        train_loss = dist.total(float(nats))
        row = dict(tokens=(self.step + 1) * tokens_per_step, train_loss=train_loss) | row | self.rates(tokens_per_step)
        peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())
        flops = row["tok_per_s"] * self.cfg.model.flops_per_token(self.cfg.length)
        row |= dict(lr=self.lr, grad_norm=self.grad_norm, mfu=flops / (peak * dist.world_size()))
        self.run.log(self.step + 1, row)
        self.bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{row['tok_per_s']:,.0f}")

    def rates(self, tokens_per_step: int) -> dict[str, float]:
        """tok_per_s of all ranks since the last call or evaluation."""
        (step, began), self.pace = self.pace, (self.step + 1, time.perf_counter())
        return dict(tok_per_s=tokens_per_step * (self.step + 1 - step) / (self.pace[1] - began))


def totals(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Numbers of this rank added up over all ranks, in their places. A collective."""
    return dist.sum_(torch.tensor(rows, dtype=torch.float64)).tolist()


# ---- what is opened before the first step


def load_parent(cfg: C, *, tok: Tokenizer | None = None) -> tuple[C, Checkpoint | None, Tokenizer]:
    """(settings, parent checkpoint or None, tokenizer). The settings take architecture and, unless they name
    others, tags from the parent, or the vocabulary from the tokenizer. ConfigError where the parent has another
    architecture. tok: the tokenizer of the data, where those decide it."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    if not getattr(cfg, "tags", chat.RAW):
        cfg = replace(cfg, tags=parent.meta["tags"] if parent else "reserved")
    if parent:
        shape = config.from_dict(GPTConfig, parent.meta["model_config"])
        theirs = tokenizer.from_dict(parent.meta["tokenizer"])
        taken = {f"model.{name}": value for name, value in config.plain(shape).items()} | {"tokenizer": theirs.spec}
        for name, (_, value) in config.changed(cfg).items():
            there = taken.get(name, value)
            if there != value:
                got = f"{config.flag_of(name)} {value}: with --init-from {cfg.init_from} it is {there}"
                raise ConfigError(f"{got}; leave the flag, or the --preset that sets it, out")
        if tok and tok.spec != theirs.spec:
            got = f"{cfg.data_dir} has the tokenizer {tok.spec}, {cfg.init_from} has {theirs.spec}"
            raise ConfigError(f"{got}; prepare the data with --tokenizer {theirs.spec}")
    else:
        theirs = tok or tokenizer.load(cfg.tokenizer)
        shape = replace(cfg.model, vocab_size=theirs.n_vocab)
    if getattr(cfg, "tags", "") == "reserved" and shape.n_ids < theirs.n_vocab + chat.N_TAGS:
        remedy = "leave --tags out, or import it with --tags reserved" if parent else "set --tags text"
        raise ConfigError(f"the model of {cfg.init_from or 'these settings'} has no rows for reserved tags; {remedy}")
    return replace(cfg, model=shape), parent, theirs


def build_model(cfg: Any, parent: Checkpoint | None) -> GPT:
    """The model of `cfg.model` on this rank's device, whole or sharded: the parent's weights, or new ones of the
    seed."""
    # random weights of 8b take over a minute per rank: none where others are read
    seed = None if parent else cfg.seed
    model = sharding.build(
        lambda: GPT(cfg.model),
        seed=seed,
        shard_it=cfg.shard,
        over=cfg.shard_over,
        adapters=cfg.model.lora_params(cfg.lora_rank, cfg.lora_targets),
    )
    if parent:
        checkpoint.restore(parent, model)
    return model


def build_policy(cfg: Any, parent: Checkpoint | None) -> GPT:
    """The model that is trained, with LoRA adapters where cfg.lora_rank is not 0."""
    model = build_model(cfg, parent)
    return lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)


def weights_hash(ref: str, meta: Mapping[str, Any]) -> dict[str, str]:
    """Weights that a run reads again when it is resumed: a reference model, a teacher, what lies below adapters."""
    return {f"checkpoint {ref}": checkpoint.fingerprint(meta)}
