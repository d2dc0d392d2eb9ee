"""What the loops that learn from a task's reward share: rollouts in, updates out, and everything about a step that
has one right answer.

    with rl_session(cfg, "reinforce") as r:                 # policy, task, engine, run; checks; resume; the last save
        for step in r.steps():                              # saves and evaluates when due
            batch = r.sample()                              # P problems x G completions
            advantage = group_advantages(batch.rewards)     # (P, G)
            for update in r.updates(batch, advantage != 0): # none where all groups of all ranks agree
                for mb in update.microbatches():            # completions padded to (B, C)
                    logprobs, entropy = mb.logprobs()
                    mb.backward(...)
                update.apply()
            r.log(batch)

Shapes: P problems with G completions each, N = P x G, C tokens of the longest one; B completions of a microbatch; R
packed rows of T tokens.

Metrics of a batch, over all ranks:

reward_mean, reward_std    over all completions; the task's own reward, without penalties
exact_match, tier/*        shares of completions; reward/*: mean of each term of the reward
frac_zero_std_groups       share of groups whose rewards are all equal; effective_groups: how many differ
completion_tokens_mean     tokens that the policy wrote, per completion
truncated_frac             share of completions that were cut off within an answer
entropy                    nats per token: mean -log p of the sampled tokens under the sampler
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from codechat import tasks
from codechat.core.errors import RunError
from codechat.distributed import dist, hardware, sharding
from codechat.evaluation import diagnose
from codechat.models.gpt import GPT
from codechat.rl import engines, rollout
from codechat.rl.advantages import VALUE_LR, ValueHead, equal_groups, zero_variance
from codechat.rl.engines import RolloutSampler, step_seed
from codechat.rl.losses import importance_weights
from codechat.rl.rollout import Packed, RolloutBatch
from codechat.tasks.base import Problem, Task, warn_of_shortcuts
from codechat.training.evaluations import load_task
from codechat.training.session import (
    KEPT,
    Session,
    build_model,
    build_policy,
    load_parent,
    totals,
    weights_hash,
)

REFERENCE_SOLUTIONS = 512  # training problems whose own solution is scored before the first step
CUT_OFF = "what was cut off teaches nothing under --mask-truncated"
MAXIMA = ("logprob_mismatch", "ratio_max")
CLIPPING = ("clipped_low", "clipped_high", "kl_old", "ratio_max")  # measures of loops that clip ratios

Values = Mapping[str, float]
Pairs = Mapping[str, tuple[float, float]]
Rank = tuple[Tensor, Pairs, Values, Values]


@contextmanager
def rl_session(
    cfg: Any,
    kind: str,
    *,
    reference: bool = False,
    value_head: bool = False,
    measures: Sequence[str] = (),
    data: Mapping[str, str] = {},
) -> Iterator[RLSession]:
    """Opens a run of reinforcement learning, in its process group. UserError, before anything is written, for bad
    settings or a DEAD task.

    reference: keep the starting policy as `r.reference`. value_head: train `r.head`. measures: names that
    `Microbatch.backward` adds up.
    data: hashes of what the loop uses beside its task."""
    with dist.session(cfg) as world:
        r = RLSession(cfg, kind, world, reference, value_head, measures, data)
        with r.running():
            yield r


def check_signal(cfg: Any, task: Task, problems: list[Problem], sampler: RolloutSampler) -> None:
    """Before the first step: the task's reference solutions earn the full reward, an own task's reward keeps its
    contract, and the diagnosis is not DEAD, unless --allow-dead; else RunError. Nothing where --diagnose-groups is
    0 or the run is resumed. A collective."""
    if not cfg.diagnose_groups or cfg.resume:
        return
    tasks.check_reference_solutions(task, problems[:REFERENCE_SOLUTIONS]).require()
    warn_of_shortcuts(task, problems)
    sampler.engine.push(sampler.model, 0)
    batch = sampler(0, cfg.diagnose_groups, seed=cfg.seed + 1, group_size=max(8, cfg.group_size // 2))
    signal = diagnose.judge(batch.rewards, batch.correct, min_groups=min(cfg.diagnose_groups, diagnose.MIN_GROUPS))
    if signal.verdict == "DEAD" and not cfg.allow_dead:
        raise RunError(
            f"diagnose says DEAD on {cfg.task}: {signal.effective_groups} of {signal.n_groups} groups have any variance, mean reward "
            f"{signal.reward_mean:.3f}; {signal.remedy}; --allow-dead trains all the same"
        )
    if getattr(cfg, "mask_truncated", False) and not cfg.allow_dead:
        left = ~zero_variance(batch.rewards) & ~batch.cut_off().all(1)  # (P,)
        if left.float().mean() < diagnose.DEAD_BELOW:
            cut = f"{int(batch.cut_off().sum())} of {batch.cut_off().numel()} completions were cut off"
            raise RunError(
                f"diagnose says DEAD on {cfg.task}: {cut} at --max-new-tokens {cfg.max_new_tokens}; {CUT_OFF}; raise it, or leave "
                "--mask-truncated out; --allow-dead trains all the same"
            )


class RLSession(Session):
    """A run that learns from rollouts; see `rl_session`, which opens it."""

    def __init__(
        self,
        cfg: Any,
        kind: str,
        world: dist.World,
        reference: bool,
        value_head: bool,
        measures: Sequence[str],
        data: Mapping[str, str],
    ) -> None:
        cfg, parent, tok = load_parent(cfg)
        self.world, self.measures = world, measures
        self.task, problems, evaluate, hashes = load_task(cfg, tok)
        model = build_policy(cfg, parent)
        self.reference = build_model(cfg, parent) if reference else None
        if reference and parent:
            hashes |= weights_hash(cfg.init_from, parent.meta)
        self.head = ValueHead(cfg.model.n_embd).to(world.device) if value_head else None
        hardware.compile_blocks(model)
        self.engine = engines.open_engine(cfg, tok)
        self.sampler = RolloutSampler(cfg, self.engine, model, self.task, problems, tok)
        check_signal(cfg, self.task, problems, self.sampler)
        self.sentinel = diagnose.Sentinel(cfg.dead_patience)
        self.told = False  # whether a step that learned nothing was reported
        heads = {self.head: VALUE_LR} if self.head else {}
        kept = {"sentinel": self.sentinel} | ({"value_head": self.head} if self.head else {})
        how: dict[str, Any] = dict(parent=parent, evaluate=evaluate, heads=heads, kept=kept)
        how |= dict(trained_on=dict(task=cfg.task, data_dir=cfg.data_dir), data={**hashes, **data})
        super().__init__(kind, cfg, model, tok, **how)

    def sample(self, resample_rounds: int = 0) -> RolloutBatch:
        """G completions of this rank's next P problems, drawn by the policy as it is. Dynamic sampling (DAPO,
        arXiv:2503.14476, eq. 11): groups without variance are replaced by those of further problems, at most so
        many times. A collective: all ranks count together, since what one replaces decides what the next one draws,
        and each samples in every round."""
        self.meter = Meter(self.measures)
        self.engine.push(self.model, self.step)
        self.drawn = self.world.size * self.cfg.problems_per_rank  # of all ranks, in this step
        batch = self.draw(self.world.rank * self.cfg.problems_per_rank, self.cfg.problems_per_rank)
        for _ in range(resample_rounds):
            flat = zero_variance(batch.rewards).nonzero()[:, 0].tolist()
            (missing,) = totals([[len(flat) * (rank == self.world.rank) for rank in range(self.world.size)]])
            if not sum(missing):
                break
            batch = batch.replace(flat, self.draw(self.drawn + int(sum(missing[: self.world.rank])), len(flat)))
            self.drawn += int(sum(missing))
        return batch

    def draw(self, at: int, n: int) -> RolloutBatch:
        """Rollouts of n problems from the at-th of this step on. RunError, before anything is learned, where a
        reward or a log-probability is not finite. A collective."""
        try:
            batch = self.sampler(self.counts.get("problems", 0) + at, n, step_seed(self.cfg, self.step), key=at)
            for number, completion in enumerate(batch.completions):
                if not math.isfinite(total := sum(completion.logprobs)):
                    problem = f"a completion of problem {batch.problems[number // batch.group_size].id}"
                    remedy = f"the policy has diverged: lower --lr or --muon-lr; {KEPT}"
                    raise RunError(f"{problem} has the log-probability {total}; {remedy}")
        except RunError as error:
            raise type(error)(f"step {self.step + 1}: {error}") from error
        return batch

    @property
    def resampled(self) -> int:
        """Problems that were drawn in this step to replace others."""
        return self.drawn - self.world.size * self.cfg.problems_per_rank

    def score(self, model: GPT, batch: RolloutBatch) -> Tensor:
        """(N, C) log-probabilities of the completions under a model, without gradient. A collective where it is
        sharded.

        Under --top-k of the distribution over the tokens that the sampler kept, also for a reference model or a
        teacher: both sides of a difference are then distributions over one set, equal models differ by 0, and the
        expected difference is a KL divergence."""
        how = dict(temperature=self.cfg.temperature, row_tokens=self.cfg.row_tokens, rows=self.cfg.rows)
        with sharding.whole(model) as reader, dist.autocast():
            return rollout.score_logprobs(reader, batch, **how)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        return [dist.send(x, self.world.device) for x in tensors]

    def updates(
        self,
        batch: RolloutBatch,
        live: Tensor,
        epochs: int = 1,
        minibatches: int = 1,
    ) -> Iterator[Update]:
        """Optimizer updates: `epochs` passes over the batch in `minibatches`, to which groups are dealt in turn.
        live: (P, G) bool, completions that have an advantage. Where none of a minibatch of all ranks has, there is
        no update: neither momentum nor a KL term or an entropy bonus may move the policy then. A collective."""
        self.counts["problems"] = self.counts.get("problems", 0) + self.drawn
        self.meter.begin_learning(self.model)
        self.sampled_logprobs, mask = self.to_device(batch.logprobs(), batch.mask())
        dealt = [list(range(m, len(batch.problems), minibatches)) for m in range(minibatches)]
        written = batch.mask().sum(1).view_as(live)  # (P, G)
        live = live & (written > 0)
        here = [(live[g].numel(), written[g].sum(), live[g].sum(), written[g][live[g]].sum()) for g in dealt]
        counts = totals([[float(x) for x in row] for row in here])
        self.n_tokens = sum(count[1] for count in counts)
        for epoch in range(epochs):
            for number, (groups, (sequences, tokens, live_here, live_tokens)) in enumerate(zip(dealt, counts)):
                if live_here > 0:
                    yield Update(self, batch, groups, mask, epoch == number == 0, sequences, tokens, live_tokens)

    def log(self, batch: RolloutBatch, sums: Mapping[str, float | Tensor] = {}, **means: float | Tensor) -> None:
        """Write the step's metrics, over all ranks, and every --log-rollouts-every steps its best and worst
        rollouts. Ends the run after too many
        DEAD steps in a row. sums: over this rank's tokens. A collective."""
        meter = self.meter
        device = self.world.device
        row = meter.read_changed()
        flops = batch.flops(self.cfg.model, meter.trained)
        mfu = flops / ((time.perf_counter() - meter.began) * hardware.peak_flops(device, dist.compute_dtype())[0])
        loss = {"policy_loss": meter.sums.pop("policy_loss") / max(1, meter.updates)}
        tokens = meter.sums.pop("tokens")
        values = {name: (float(value), batch.n_tokens) for name, value in sums.items()}
        values |= {name: (float(value), 1) for name, value in (means | self.engine.metrics()).items()}
        values |= {"mfu": (mfu, 1)} | {name: (value, tokens) for name, value in meter.sums.items()}
        row |= rollout_metrics(batch, self.task.tiers, means=values, sums=loss, maxima=meter.maxima)
        if "kl_old" in row:
            row |= dict(approx_kl=row.pop("kl_old"), clip_frac=row["clipped_low"] + row["clipped_high"])
        step_s = time.perf_counter() - meter.began
        sample_s = meter.sampled - meter.began
        row |= dict(
            sample_s=sample_s,
            step_s=step_s,
            tok_per_s=self.n_tokens / step_s,
            train_s=step_s - sample_s,
        )
        row |= dict(lr=self.lr, grad_norm=self.grad_norm if meter.updates else 0.0)
        with_variance = 1.0 - row["frac_zero_std_groups"]
        idle = self._idle() if with_variance and not meter.updates else ""
        if idle and not self.told and dist.is_main():
            print(f"{self.run.name}: step {self.step + 1} learned nothing: {idle}", file=sys.stderr)
        self.told = self.told or bool(idle)
        if self.sentinel.update(with_variance if meter.updates else 0.0):
            what = f"nothing was learned: {idle}" if idle else "under 5 % of groups had variance"
            remedy = "" if idle else f"; {diagnose.REMEDIES['signal']['DEAD']}"
            self.why = f"DEAD: {self.sentinel.dead_steps} steps in a row in which {what}{remedy}"
        self.run.log(self.step + 1, {**row, "dead_steps": self.sentinel.dead_steps})
        every = self.cfg.log_rollouts_every
        if every and self.step % every == 0 and dist.is_main():
            self.run.log_samples(self.step + 1, batch.best_and_worst(groups=4))
        shown = dict(reward="reward_mean", exact="exact_match", groups="effective_groups")
        self.bar.update(1)
        self.bar.set_postfix({name: f"{row[key]:.4g}" for name, key in shown.items()})

    def _idle(self) -> str:
        """Why a step with different rewards in a group made no update, and what to do."""
        if getattr(self.cfg, "mask_truncated", False):
            return f"{CUT_OFF}; raise --max-new-tokens, or leave --mask-truncated out"
        if getattr(self.cfg, "keep", "") == "correct":
            return "no completion was exactly correct, and --keep correct trains on no other; set --keep best"
        return "no completion has a token that the policy wrote; raise the block size, or shorten the prompts"


@dataclass(frozen=True)
class Update:
    """One optimizer update on some groups of a batch. Counts are of all ranks: completions, their tokens, those of
    the live ones."""

    session: RLSession
    batch: RolloutBatch
    groups: list[int]
    mask: Tensor  # (N, C) on the device
    first: bool  # of its step
    n_sequences: float
    n_tokens: float
    n_live_tokens: float

    def microbatches(self, keep: Tensor | None = None) -> Iterator[Microbatch]:
        """Packed rows on this rank's device, equally many on every rank where the model is sharded. keep: (P, G)
        bool; what is left out must add exactly 0 to the gradient; default all."""
        cfg = self.session.cfg
        device = dist.device()
        part = self.batch.take(self.groups)
        shapes = rollout.row_shapes(part, cfg.row_tokens, cfg.rows, device)
        rows = list(rollout.pack(part, None if keep is None else keep[self.groups], **shapes))
        idle = rollout.idle(shapes["row_tokens"], shapes["rows"]) if shapes["fixed"] else rollout.idle()
        numbers = dist.send(torch.tensor(self.batch.numbers(self.groups)), device)
        for packed in sharding.in_step(self.session.model, rows, idle):
            packed = packed.to(device)
            yield Microbatch(self, packed, numbers[packed.numbers], packed.mask())

    def apply(self) -> None:
        """One optimizer step on the gradients of all ranks."""
        self.session.apply_gradients()
        self.session.meter.updates += 1


@dataclass(frozen=True)
class Microbatch:
    """B completions in packed rows. numbers (B,): which of the N of the batch. mask (B, C): tokens that the policy
    wrote."""

    update: Update
    packed: Packed
    numbers: Tensor
    mask: Tensor

    def of(self, table: Tensor) -> Tensor:
        """(B, C) these completions' values of a table (N, C), or (B, 1) of one value each, (P, G) or (N,)."""
        table = table if len(table) == len(self.update.mask) and table.ndim == 2 else table.view(-1, 1)
        return dist.send(table, self.numbers.device)[self.numbers, : self.packed.longest]

    def logprobs(self, states: bool = False, whole: bool = False) -> tuple[Tensor, ...]:
        """(B, C) log-probabilities and entropies of the distribution that was sampled: at its temperature, under
        --top-k over the tokens that the sampler kept. The entropy carries gradient where --entropy-coef asks for
        it.

        states=True: also what `ValueHead` reads, as `unpack` takes it. whole=True: over all tokens also under
        --top-k, for a loss that is a
        likelihood: it must take probability from the tokens that were cut."""
        session, cfg, packed = self.update.session, self.update.session.cfg, self.packed
        how = dict(temperature=cfg.temperature, entropy_grad=getattr(cfg, "entropy_coef", 0) != 0, **packed.where())
        how |= dict(states=True) if states else {}
        comparable = None
        if whole and cfg.top_k is not None:
            if self.update.first:
                with torch.no_grad(), dist.autocast():
                    comparable, *_ = session.model.token_logprobs(packed.ids, packed.targets, **how)
            how["kept"] = None
        with dist.autocast():
            logprobs, entropy, *hidden = session.model.token_logprobs(packed.ids, packed.targets, **how)
        comparable = packed.unpack(logprobs.detach() if comparable is None else comparable)
        logprobs = packed.unpack(logprobs)
        entropy = packed.unpack(entropy)
        if self.update.first:  # the largest difference between the trainer's and the sampler's log-probabilities
            gap = torch.where(self.mask, comparable - self.of(session.sampled_logprobs), 0.0)
            session.meter.add(logprob_mismatch=gap.abs().max())
        return logprobs, entropy, *hidden

    def importance(self, logprobs: Tensor) -> Tensor:
        """(B, C) weights of tokens whose sampler computes other probabilities than the policy, see
        `losses.importance_weights`; measured, and 1 where --importance-cap is 0."""
        session = self.update.session
        sampled = self.of(session.sampled_logprobs)
        weights, off_policy = importance_weights(logprobs, sampled, self.mask, session.cfg.importance_cap)
        session.meter.add(**off_policy)
        return weights

    def backward(self, loss: Tensor, **sums: Tensor) -> None:
        """The backward pass of a loss that is divided by counts of the whole update; sums: over tokens, to be
        logged."""
        loss.backward()
        meter = self.update.session.meter
        sums = {"policy_loss": loss, "tokens": self.mask.sum()} | sums
        meter.add(**{name: value.detach() for name, value in sums.items()})
        meter.trained += self.packed.n_tokens


# ---- metrics


class Meter:
    """Sums and maxima over the microbatches of one step, and where its time goes."""

    def __init__(self, measures: Sequence[str] = ()) -> None:
        """measures: what `add` will be given, so that every rank logs the same names, also where it had nothing to
        do."""
        self.sums = Counter({name: 0.0 for name in ("tokens", "policy_loss", *measures) if name not in MAXIMA})
        self.maxima = {name: 0.0 for name in ("logprob_mismatch", *measures) if name in MAXIMA}
        self.updates = 0
        self.unread: list[tuple[str, Tensor | float]] = []
        self.trained = 0  # tokens that went through a forward and a backward pass, prompts included
        self.began = self.sampled = time.perf_counter()

    def begin_learning(self, model: nn.Module) -> None:
        """Sampling ends here; the weights are as they are before learning."""
        self.sampled = time.perf_counter()
        self.model = model
        self.before = diagnose.bf16_snapshot(model)

    def add(self, **values: Tensor | float) -> None:
        """Values of a microbatch: sums, or maxima where `maxima` has the name."""
        self.unread += values.items()

    def read(self, *more: Tensor) -> list[float]:
        """Note what the microbatches left on the device, in one copy: the host waits for a GPU once a step. Returns
        the values of `more`, scalars that come with it."""
        unread, self.unread = self.unread, []
        tensors = [value for _, value in unread if isinstance(value, Tensor)] + [*more]
        values = iter(torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else [])
        for name, given in unread:
            value = next(values) if isinstance(given, Tensor) else float(given)
            if name in self.maxima:
                self.maxima[name] = float(np.maximum(self.maxima[name], value))  # NaN where either is
            else:
                self.sums.update({name: value})
        return [*values]

    def read_changed(self) -> dict[str, float]:
        """`read`, and the share of weights that learning changed in bfloat16. A collective."""
        differ, n_weights = diagnose.count_changed_bf16(self.before, self.model)
        (changed,) = self.read(differ)
        return dict(weights_changed_bf16=diagnose.share_of_all(changed, n_weights, self.model))


def rollout_metrics(
    batch: RolloutBatch,
    tiers: Sequence[str],
    *,
    means: Pairs = {},
    sums: Values = {},
    maxima: Values = {},
) -> dict[str, float]:
    """Metrics of the batch that all ranks train on, and the loop's own values. means: (sum, count) of items. sums:
    added. maxima: the largest, NaN if any is. A collective; every rank passes the same names and equally many
    groups."""
    nats = -math.fsum(x for c in batch.completions for x in c.logprobs)  # 0 where an environment spoke
    mine = dict(
        exact_match=float(batch.correct.double().mean()),
        completion_tokens_mean=batch.n_tokens / len(batch.completions),
        truncated_frac=float(batch.cut_off().double().mean()),
        **batch.tier_shares(tiers),
    )
    means = {name: (value, 1) for name, value in mine.items()} | {"entropy": (nats, batch.n_tokens)} | dict(means)
    return combine_ranks(dist.gather((batch.rewards.double(), means, sums, maxima)))


def combine_ranks(ranks: Sequence[Rank]) -> dict[str, float]:
    """One value of each name, from rewards (P, G), means, sums and maxima of every rank."""
    rewards, means, sums, maxima = zip(*ranks)
    every = torch.cat(rewards)
    equal = equal_groups(rewards)
    row = dict(reward_mean=float(every.mean()), reward_std=math.sqrt(every.var(correction=0)))
    row |= dict(frac_zero_std_groups=int(equal.sum()) / len(equal), effective_groups=float((~equal).sum()))
    row |= {name: sum(r[name] for r in sums) for name in sums[0]}
    row |= {name: float(torch.tensor([r[name] for r in maxima], dtype=torch.float64).max()) for name in maxima[0]}
    for name in means[0]:
        total, count = (sum(part) for part in zip(*(r[name] for r in means)))
        row[name] = total / max(1.0, count)
    return row
