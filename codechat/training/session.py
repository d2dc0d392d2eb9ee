"""A run while it trains, and what a loop opens before its first step: checkpoint, policy, task. What every loop shares; `rl_session` adds rollouts.

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
from typing import Any, NamedTuple, Self, TypeVar

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from codechat import tasks
from codechat.core import config
from codechat.core.errors import ConfigError, DataError, MissingFile, RunError, UserError
from codechat.core.processes import stop, stoppable
from codechat.data import conversations
from codechat.data.sources import hash_rows
from codechat.distributed import dist, hardware, sharding
from codechat.evaluation import evaluate
from codechat.models import lora, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl.engines import EngineLost
from codechat.runs import checkpoint, paths
from codechat.runs.checkpoint import Checkpoint
from codechat.runs.run import Run
from codechat.tasks.base import Problem, Task, hash_problems
from codechat.text import chat, tokenizer
from codechat.text.tokenizer import Tokenizer

C = TypeVar("C")
KEPT = "the last checkpoint is kept"


class Session:
    """Opens or resumes a run, then saves, evaluates and stops it. A lost engine and Ctrl-C lose nothing: what was trained is saved at the end.

    evaluate(model, step): a row of eval.jsonl. data: {what the run uses: hash}; --resume with other data is refused by name. heads: modules beside the model, such as a value head, and their learning rates.
    kept: objects with state() and load_state(), which a checkpoint holds beside model and optimizers. trained_on: what the contamination check searches."""

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
        """RunError where the settings are not those of the run, DataError where its data are not, before anything is written. A collective."""
        name, path = self.cfg.run_name, paths.runs_dir() / self.cfg.run_name
        with dist.together():
            if not paths.exists(name) or paths.latest_step(path) is None:
                return
            before, now = checkpoint.read_meta(path).get("data", {}), self.meta["data"]
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
        """The steps to train. Before each what is due is saved and evaluated, once more after the last; ends early when interrupted, on all
        ranks together. A resumed run evaluates its first weights only if that was cut off."""
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
            scale = optim.lr_scale(self.step, max_steps=self.max_steps, warmup_steps=self.cfg.warmup_steps, **schedule)
            optim.set_lr(self.optimizers, scale)
            self.lr = self.cfg.lr * scale
            yield self.step

    def _evaluate(self) -> None:
        """Append a row to eval.jsonl, and warn. Training continues from the random state that was saved, whatever an evaluation draws."""
        random_state = checkpoint.rng_state()
        row = self.evaluate(self.model, self.step)
        checkpoint.set_rng_state(random_state)
        self.run.log_eval(self.step, row)
        for warning in warnings(self.run.evals()) if dist.is_main() else ():
            print(f"{self.cfg.run_name}: {warning}", file=sys.stderr)
        self.pace = (self.step, time.perf_counter())

    def _due(self, every: int) -> bool:
        return bool(every and self.step % every == 0)

    def apply_gradients(self) -> None:
        """Add the gradients of all ranks, clip their common norm, take a step. RunError, before it, where the norm is not finite: such weights
        are never saved, so the last checkpoint is good."""
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
        """Write a checkpoint beside training; wait: until it is on the disk. RunError for weights that are not finite."""
        weights = [p for part in (self.model, *self.heads) for p in part.parameters()]
        if any(dist.gather(not torch.stack([dist.local(p).isfinite().all() for p in weights]).all())):
            raise RunError(f"weights are not finite after step {self.step}; lower --lr or --muon-lr; {KEPT}")
        extra = {"lora": lora.adapters(self.model), "counts": dict(self.counts)}
        extra |= {name: part.state() for name, part in self.kept.items()}
        how = dict(optimizers=self.optimizers, extra=extra, meta=self.meta, keep_last=self.cfg.keep_last, wait=wait)
        checkpoint.save(self.run.path, self.step, model=lora.merged(self.model), **how)

    def log_supervised(self, nats: Tensor, tokens_per_step: int, **row: float) -> None:
        """Every --log-every steps a row of metrics. nats: this rank's part of the step's mean loss; `train_loss` is that of all ranks.
        A collective in the steps that are logged."""
        self.bar.update(1)
        if (self.step + 1) % self.cfg.log_every and self.step + 1 != self.max_steps:
            return
        ((train_loss,),) = totals([[float(nats)]])
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
    """(settings, parent checkpoint or None, tokenizer). The settings take architecture and, unless they name others, tags from the parent, or the vocabulary
    from the tokenizer. ConfigError where the parent has another architecture. tok: the tokenizer of the data, where those decide it."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    if not getattr(cfg, "tags", chat.RAW):
        cfg = replace(cfg, tags=parent.meta["tags"] if parent else "reserved")
    if parent:
        shape = config.from_dict(GPTConfig, parent.meta["model_config"])
        theirs = tokenizer.from_dict(parent.meta["tokenizer"])
        taken = {f"model.{name}": value for name, value in config.plain(shape).items()} | {"tokenizer": theirs.spec}
        for name, (_, value) in config.changed(cfg).items():
            if (there := taken.get(name, value)) != value:
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
    """The model of `cfg.model` on this rank's device, whole or sharded: the parent's weights, or new ones of the seed."""
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


class TaskData(NamedTuple):
    """A task, its training problems, evaluate(model, step), which gives a row of eval.jsonl, and the hashes of what both use."""

    task: Task
    problems: list[Problem]
    evaluate: Callable[[GPT, int], dict[str, Any]]
    hashes: dict[str, str]


def load_task(cfg: Any, tok: Tokenizer) -> TaskData:
    """The task of cfg, with `evaluate_policy` on its validation problems."""
    task = tasks.load(cfg.task, source=cfg.data_dir)
    held_out = evaluate.problems_once(task, "select", cfg.eval_examples)
    problems = task.problems("train", seed=cfg.seed)
    probes = read_probes(cfg)
    hashes = task_hash(cfg.task, cfg.data_dir, "train", problems) | probes_hash(cfg.data_dir, probes)
    hashes |= task_hash(cfg.task, cfg.data_dir, "select", held_out)
    return TaskData(
        task, problems, lambda model, step: evaluate_policy(cfg, model, tok, task, held_out, probes), hashes
    )


# ---- names and hashes of what a run uses


def task_hash(name: str | None, source: str | None, split: str, problems: Sequence[Problem]) -> dict[str, str]:
    origin = f" of {source}" if source else ""
    return {f"task {name}{origin} ({split})": hash_problems(problems)} if problems else {}


def probes_hash(source: str | None, probes: Sequence[Any]) -> dict[str, str]:
    return {f"{source}/probes.select.jsonl": hash_rows(probes)} if probes else {}


def domains_hash(source: str, split: str, hashes: Mapping[str, str]) -> dict[str, str]:
    return {f"domain {domain} of {source} ({split})": found for domain, found in hashes.items()}


def weights_hash(ref: str, meta: Mapping[str, Any]) -> dict[str, str]:
    """Weights that a run reads again when it is resumed: a reference model, a teacher, what lies below adapters."""
    return {f"checkpoint {ref}": checkpoint.fingerprint(meta)}


def evaluate_policy(
    cfg: Any, model: GPT, tok: Tokenizer, task: Task, problems: Sequence[Problem], probes: Sequence[Any] = ()
) -> dict[str, Any]:
    """A row of eval.jsonl: pass@k and tiers on validation problems, and the behaviour matrix where there are probes."""
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    with sharding.whole(model) as policy:
        scores = evaluate.evaluate_task(policy, tok, cfg.tags, task, problems, n=max(cfg.ks), ks=cfg.ks, **how)
        matrix = evaluate.behaviour_matrix(policy, tok, cfg.tags, probes, seed=cfg.seed).metrics() if probes else {}
    return scores.row() | matrix


def read_probes(cfg: Any) -> list[Any]:
    """Behaviour probes of cfg.data_dir, cfg.probe_examples a cell; none, and a note, where the directory has no probes."""
    if not cfg.probe_examples:
        return []
    try:
        return evaluate.read_probes(cfg.data_dir or "", "select", cfg.probe_examples)
    except MissingFile as absent:
        print(f"no behaviour probes: {absent}", file=sys.stderr)
        return []


class HeldOut:
    """What SFT is evaluated on: held-out loss of each domain, behaviour probes, and problems of --eval-task."""

    def __init__(self, cfg: Any, tok: Tokenizer) -> None:
        self.cfg, self.tok = cfg, tok
        where = (cfg.data_dir, "select", tok, cfg.tags, cfg.model.block_size)
        try:
            read = conversations.load_domains(*where, limit=cfg.eval_examples)
        except MissingFile as absent:
            print(f"no held-out loss: {absent}", file=sys.stderr)
            read = {}
        rows = (cfg.device_batch_size, cfg.length)
        self.domains = {domain: conversations.held_out(examples, *rows) for domain, examples in read.items()}
        self.probes = read_probes(cfg)
        self.task = tasks.load(cfg.eval_task, source=cfg.eval_task_data) if cfg.eval_task else None
        self.problems = evaluate.problems_once(self.task, "select", cfg.eval_examples) if self.task else []
        hashes = {name: conversations.hash_examples(examples) for name, examples in read.items()}
        self.hashes = domains_hash(cfg.data_dir, "select", hashes) | probes_hash(cfg.data_dir, self.probes)
        self.hashes |= task_hash(cfg.eval_task, cfg.eval_task_data, "select", self.problems)

    def evaluate(self, model: GPT, step: int) -> dict[str, Any]:
        """A row of eval.jsonl."""
        cfg = self.cfg
        with sharding.whole(model) as reader:
            policy = (reader, self.tok, cfg.tags)
            row: dict[str, Any] = dict(evaluate.held_out_losses(reader, self.domains))
            if self.probes:
                row |= evaluate.behaviour_matrix(*policy, self.probes, seed=cfg.seed).metrics()
            if self.task:
                how = dict(n=1, temperature=0.0, max_new_tokens=cfg.eval_new_tokens, seed=cfg.seed)
                row |= evaluate.evaluate_task(*policy, self.task, self.problems, **how).row()
                row |= dict(task=cfg.eval_task, split="select")
        return row


def warnings(evals: pd.DataFrame) -> list[str]:
    """What the rows of eval.jsonl warn of: held-out losses that rose in each of the last three; a reward that rose since an earlier row while
    pass@1 fell, each beyond both intervals."""
    found, now = [], evals.iloc[-1]
    for name, changes in evals.filter(like="heldout_loss/").diff()[1:][-3:].items():
        if len(changes) == 3 and (changes > 0).all():
            remedy = "this domain is being overwritten: raise its --mix share or lower --lr"
            found.append(
                f"{name} rose three evaluations in a row, to {now[name]:.3f} at step {now['step']:.0f}; {remedy}"
            )
    if {"reward_mean/lo", "pass@1/lo"} <= {*evals}:
        parted = evals[(evals["reward_mean/hi"] < now["reward_mean/lo"]) & (evals["pass@1/lo"] > now["pass@1/hi"])]
        for _, was in parted[-1:].iterrows():
            moved = "; ".join(f"{name} {was[name]:.3f} -> {now[name]:.3f}" for name in ("reward_mean", "pass@1"))
            remedy = "the reward is met without the task: read samples.jsonl, and pay for right or wrong only"
            found.append(f"since step {was['step']:.0f} {moved}; {remedy}")
    return found
