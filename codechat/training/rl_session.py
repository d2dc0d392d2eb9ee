"""What the loops that learn from a task's reward share: rollouts in, updates out, and
everything about a step that has one right answer.

    with rl_session(cfg, "reinforce") as session:                 # opens, checks, resumes, saves
        for step in session.steps():                              # saves and evaluates when due
            batch = session.sample()                              # P problems x G completions
            advantage = group_advantages(batch.rewards)           # (P, G)
            for update in session.updates(batch, advantage != 0): # none if all groups agree
                for micro in update.microbatches():               # completions padded to (B, C)
                    logprobs, entropy = micro.logprobs()
                    micro.backward(...)
                update.apply()
            session.log(batch)

Shapes: P problems with G completions each, N = P x G, C tokens of the longest one; B
completions of a microbatch; R packed rows of T tokens."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from codechat import tasks
from codechat.core.errors import RunError
from codechat.distributed import dist, hardware, numerics, sharding
from codechat.evaluation import diagnose
from codechat.models import loading
from codechat.models.gpt import GPT
from codechat.rl import engines, rollout
from codechat.rl.advantages import VALUE_LR, ValueHead, zero_variance
from codechat.rl.engines import RolloutSampler, step_seed
from codechat.rl.losses import importance_weights
from codechat.rl.rollout import Packed, RolloutBatch
from codechat.tasks.base import Problem, Task, warn_of_shortcuts
from codechat.training.evaluations import load_task
from codechat.training.rl_settings import CUT_OFF, EntropySettings, RLSettings
from codechat.training.session import (
    LAST_STAYS,
    Session,
    build_model,
    build_policy,
    load_parent,
    weights_hash,
)
from codechat.training.step_metrics import Mean, Meter, rollout_metrics

Values = Mapping[str, float | Tensor]
REFERENCE_SOLUTIONS = 512  # training problems whose own solution is scored before the first step


@contextmanager
def rl_session(
    cfg: RLSettings,
    kind: str,
    *,
    reference: bool = False,
    value_head: bool = False,
    measures: Sequence[str] = (),
    data: Mapping[str, str] = {},
) -> Iterator[RLSession]:
    """Opens a run of reinforcement learning, in its process group. UserError, before anything
    is written, for bad settings or a DEAD task.

    reference: keep the starting policy as `session.reference`. value_head: train `session.head`. measures:
    names that `Microbatch.backward` adds up. data: hashes of what the loop uses beside its
    task."""
    with dist.session(cfg) as world:
        session = RLSession(
            cfg,
            kind,
            world,
            reference=reference,
            value_head=value_head,
            measures=measures,
            data=data,
        )
        with session.running():
            yield session


def check_signal(
    cfg: RLSettings, task: Task, problems: list[Problem], sampler: RolloutSampler
) -> None:
    """Before the first step: the task's reference solutions earn the full reward, the reward of
    a user's task keeps its contract, and the diagnosis is not DEAD, unless --allow-dead; else
    RunError. Says so where hardly a sample is right. Skipped if --diagnose-groups is 0 or the run
    is resumed. A collective."""
    if not cfg.diagnose_groups or cfg.resume:
        return
    tasks.check_reference_solutions(task, problems[:REFERENCE_SOLUTIONS]).require()
    warn_of_shortcuts(task, problems)
    sampler.engine.push(sampler.model, 0)
    batch = sampler(
        0, cfg.diagnose_groups, seed=cfg.seed + 1, group_size=max(8, cfg.group_size // 2)
    )
    signal = diagnose.judge(
        batch.rewards, batch.correct, min_groups=min(cfg.diagnose_groups, diagnose.MIN_GROUPS)
    )
    if not cfg.allow_dead:
        dead = _why_dead(cfg, batch, signal)
        if dead:
            raise RunError(
                f"diagnose says DEAD on {cfg.task}: {dead}; --allow-dead trains all the same"
            )
    if signal.verdict == "PARTIAL" and dist.is_main():
        print(f"diagnose says PARTIAL on {cfg.task}: {signal.remedy}")


def _why_dead(cfg: RLSettings, batch: RolloutBatch, signal: diagnose.Diagnosis) -> str:
    """Why these rollouts teach nothing, and what to do; empty if they teach something."""
    if signal.verdict == "DEAD":
        groups = f"{signal.effective_groups} of {signal.n_groups} groups have any variance"
        return f"{groups}, mean reward {signal.reward_mean:.3f}; {signal.remedy}"
    if not cfg.learns_cut_off:
        cut_off = batch.cut_off()
        left = ~zero_variance(batch.rewards) & ~cut_off.all(1)  # (P,)
        if left.float().mean() < diagnose.DEAD_BELOW:
            cut = f"{int(cut_off.sum())} of {cut_off.numel()} completions were cut off"
            remedy = "raise it, or leave --mask-truncated out"
            return f"{cut} at --max-new-tokens {cfg.max_new_tokens}; {CUT_OFF}; {remedy}"
    return ""


class RLSession(Session):
    """A run that learns from rollouts; see `rl_session`, which opens it."""

    cfg: RLSettings

    def __init__(
        self,
        cfg: RLSettings,
        kind: str,
        world: dist.World,
        *,
        reference: bool,
        value_head: bool,
        measures: Sequence[str],
        data: Mapping[str, str],
    ) -> None:
        cfg, parent, tok = load_parent(cfg)
        self.world = world
        self.measures = measures
        style = loading.tools_style(parent.meta | {"tags": cfg.tags}) if parent else "compact"
        given = load_task(cfg, tok, style)
        self.task = given.task
        model = build_policy(cfg, parent)
        self.reference = build_model(cfg, parent) if reference else None
        self.head = ValueHead(cfg.model.n_embd).to(world.device) if value_head else None
        hardware.compile_blocks(model)
        self.engine = engines.open_engine(cfg, tok)
        self.sampler = RolloutSampler(cfg, self.engine, model, self.task, given.problems, tok)
        # before the run directory exists: a task that cannot be learned leaves nothing behind
        check_signal(cfg, self.task, given.problems, self.sampler)
        self.sentinel = diagnose.Sentinel(cfg.dead_patience)
        self.idle_reported = False  # that a step learned nothing
        hashes = {**given.hashes, **data}
        if reference and parent:
            hashes |= weights_hash(cfg.init_from, parent.meta)
        super().__init__(
            kind,
            cfg,
            model,
            tok,
            parent=parent,
            evaluate=given.evaluate,
            max_steps=cfg.max_steps,
            tags=cfg.chosen_tags,
            heads={self.head: VALUE_LR} if self.head else {},
            trained_on=dict(task=cfg.task, data_dir=cfg.data_dir),
            kept={"sentinel": self.sentinel} | ({"value_head": self.head} if self.head else {}),
            data=hashes,
        )

    def sample(self, resample_rounds: int = 0) -> RolloutBatch:
        """G completions of this rank's next P problems, drawn by the current policy.

        resample_rounds: dynamic sampling (DAPO, arXiv:2503.14476, eq. 11). In each round, groups
        whose rewards are all equal are replaced by groups of the next problems. A collective:
        every rank joins every round, since replacements shift the other ranks' problem indices."""
        self.meter = Meter(self.measures)
        self.engine.push(self.model, self.step)
        mine = self.cfg.batch_per_rank
        self.drawn = self.world.size * mine  # problems of all ranks, in this step
        batch = self.draw(self.world.rank * mine, mine)
        for _ in range(resample_rounds):
            flat = zero_variance(batch.rewards).nonzero()[:, 0].tolist()
            missing = dist.gather(len(flat))  # by rank
            if not sum(missing):
                break
            # each rank's replacements follow those of the ranks before it
            first = self.drawn + sum(missing[: self.world.rank])
            batch = batch.replace(flat, self.draw(first, len(flat)))
            self.drawn += sum(missing)
        return batch

    def draw(self, at: int, n: int) -> RolloutBatch:
        """Rollouts of n problems, from the at-th of this step on. RunError, before anything is
        learned, if a reward or a log-probability is not finite. A collective."""
        try:
            batch = self.sampler(
                self.counts.get("problems", 0) + at, n, step_seed(self.cfg.seed, self.step), key=at
            )
            check_logprobs(batch)
        except RunError as error:
            raise type(error)(f"step {self.step + 1}: {error}") from error
        return batch

    @property
    def resampled(self) -> int:
        """Problems that were drawn in this step to replace others."""
        return self.drawn - self.world.size * self.cfg.batch_per_rank

    def score(self, model: GPT, batch: RolloutBatch) -> Tensor:
        """(N, C) log-probabilities of the completions under a model, without gradient. A
        collective if the model is sharded.

        Under --top-k they are over the tokens that the sampler kept, for a reference model or a
        teacher too: both sides of a difference are then distributions over one set, equal
        models differ by 0, and the expected difference is a KL divergence."""
        with sharding.whole(model) as reader, numerics.autocast():
            return rollout.score_logprobs(
                reader,
                batch,
                temperature=self.cfg.temperature,
                row_tokens=self.cfg.row_tokens,
                rows=self.cfg.rows,
            )

    def score_reference(self, batch: RolloutBatch) -> Tensor | None:
        """`score` under the starting policy; None without a reference."""
        return None if self.reference is None else self.score(self.reference, batch)

    def to_device(self, *tensors: Tensor) -> list[Tensor]:
        return [hardware.send(x, self.world.device) for x in tensors]

    def updates(
        self,
        batch: RolloutBatch,
        live: Tensor,
        epochs: int = 1,
        minibatches: int = 1,
    ) -> Iterator[Update]:
        """Optimizer updates: `epochs` passes over the batch in `minibatches`, to which groups are
        dealt in turn.

        live: (P, G) bool, completions that have an advantage. A minibatch without one on any rank
        has no update: neither momentum nor a KL term nor an entropy bonus may move the policy
        then. A collective."""
        # counted here and saved: a resumed run goes on with the next problems
        self.counts["problems"] = self.counts.get("problems", 0) + self.drawn
        self.meter.begin_learning(self.model)
        self.sampled_logprobs, mask = self.to_device(batch.logprobs(), batch.mask())
        dealt = [list(range(m, len(batch.problems), minibatches)) for m in range(minibatches)]
        # counted before the first update, over all ranks, so that every rank makes the same
        # updates
        counts = count_minibatches(batch.mask().sum(1).view_as(live), live, dealt)
        self.n_tokens = sum(count.tokens for count in counts)
        first = True
        for _ in range(epochs):
            for groups, count in zip(dealt, counts, strict=True):
                if count.live:
                    yield Update(
                        session=self,
                        batch=batch,
                        groups=groups,
                        mask=mask,
                        first=first,
                        n_sequences=count.sequences,
                        n_tokens=count.tokens,
                        n_live_tokens=count.live_tokens,
                    )
                first = False

    def log(self, batch: RolloutBatch, means: Values = {}, sums: Values = {}) -> None:
        """Write the step's metrics, over all ranks, and every --log-rollouts-every steps its
        best and worst rollouts. Ends the run after too many DEAD steps in a row. means: the
        mean over ranks is logged. sums: over this rank's tokens. A collective."""
        row = {"weights_changed_bf16": self.meter.read_changed()}
        row |= self._measured(batch, means, sums)
        if "kl_old" in row:
            row["approx_kl"] = row.pop("kl_old")
            row["clip_frac"] = row["clipped_low"] + row["clipped_high"]
        step_s = time.perf_counter() - self.meter.began
        sample_s = self.meter.sampled - self.meter.began
        row |= dict(
            sample_s=sample_s,
            step_s=step_s,
            tok_per_s=self.n_tokens / step_s,
            train_s=step_s - sample_s,
            lr=self.lr,
            grad_norm=self.grad_norm if self.meter.updates else 0.0,
        )
        # after the metrics of all ranks are joined, so every rank comes to the same decision
        self._watch_signal(1.0 - row["frac_zero_std_groups"])
        row["dead_steps"] = self.sentinel.dead_steps
        self.run.log(self.step + 1, row)
        every = self.cfg.log_rollouts_every
        if every and self.step % every == 0 and dist.is_main():
            self.run.log_samples(self.step + 1, batch.best_and_worst(groups=4))
        self.bar.update(1)
        self.bar.set_postfix(
            reward=f"{row['reward_mean']:.4g}",
            exact=f"{row['exact_match']:.4g}",
            groups=f"{row['effective_groups']:.4g}",
        )

    def _measured(self, batch: RolloutBatch, means: Values, sums: Values) -> dict[str, float]:
        """Metrics of the batch, of the loop, of the engine and of the microbatches, over all
        ranks."""
        meter = self.meter
        every = {name: Mean(float(value), batch.n_tokens) for name, value in sums.items()}
        every |= {
            name: Mean(float(value), 1)
            for name, value in {**means, **self.engine.metrics()}.items()
        }
        # the whole step counts, sampling too: model FLOPs over its seconds
        flops = batch.flops(self.cfg.model, meter.trained, self.cfg.adapters)
        flops_per_s = flops / (time.perf_counter() - meter.began)
        peak = hardware.peak(self.world.device, numerics.compute_dtype())
        every["mfu"] = Mean(peak.share(flops_per_s), 1)
        tokens = meter.sums.pop("tokens")
        policy_loss = meter.sums.pop("policy_loss") / max(1, meter.updates)
        every |= {name: Mean(value, tokens) for name, value in meter.sums.items()}
        return rollout_metrics(
            batch,
            self.task.tiers,
            means=every,
            sums={"policy_loss": policy_loss},
            maxima=meter.maxima,
        )

    def _watch_signal(self, with_variance: float) -> None:
        """Report the first step that learned nothing although rewards differ. End the run after
        --dead-patience DEAD steps in a row. with_variance: share of groups whose rewards differ."""
        idle = ""
        if with_variance and not self.meter.updates:
            idle = self.cfg.idle_reason
            if not self.idle_reported and dist.is_main():
                print(
                    f"{self.run.name}: step {self.step + 1} learned nothing: {idle}",
                    file=sys.stderr,
                )
            self.idle_reported = True
        if self.sentinel.update(with_variance if self.meter.updates else 0.0):
            if idle:
                what = f"nothing was learned: {idle}"
            else:
                what = f"under 5 % of groups had variance; {diagnose.REMEDIES['signal']['DEAD']}"
            self.why = f"DEAD: {self.sentinel.dead_steps} steps in a row in which {what}"


def check_logprobs(batch: RolloutBatch) -> None:
    """RunError for a completion whose log-probability is not finite."""
    for number, completion in enumerate(batch.completions):
        logprob = sum(completion.logprobs)
        if not math.isfinite(logprob):
            problem = f"a completion of problem {batch.problems[number // batch.group_size].id}"
            remedy = f"the policy has diverged: lower --lr or --muon-lr; {LAST_STAYS}"
            raise RunError(f"{problem} has the log-probability {logprob}; {remedy}")


class Counts(NamedTuple):
    """Completions and tokens of a minibatch, and of the live completions among them, over all
    ranks."""

    sequences: float
    tokens: float
    live: float
    live_tokens: float


def count_minibatches(written: Tensor, live: Tensor, dealt: Sequence[list[int]]) -> list[Counts]:
    """Counts of each minibatch. written: (P, G) tokens that the policy wrote. live: (P, G) bool;
    a completion without tokens is never live. dealt: the groups of each minibatch. A collective."""
    live = live & (written > 0)
    mine = []
    for groups in dealt:
        tokens = written[groups]
        alive = live[groups]
        mine.append(
            [
                tokens.numel(),
                int(tokens.sum()),
                int(alive.sum()),
                int(tokens[alive].sum()),
            ]
        )
    everywhere = dist.sum_(torch.tensor(mine, dtype=torch.float64))
    return [Counts(*row) for row in everywhere.tolist()]


@dataclass(frozen=True)
class Update:
    """One optimizer update on some groups of a batch. Counts are of all ranks."""

    session: RLSession
    batch: RolloutBatch
    groups: list[int]
    mask: Tensor  # (N, C) on the device
    first: bool  # of its step: the weights are still those that sampled
    n_sequences: float  # completions
    n_tokens: float  # that the policy wrote
    n_live_tokens: float  # of completions that have an advantage

    def microbatches(self, keep: Tensor | None = None) -> Iterator[Microbatch]:
        """Packed rows on this rank's device, equally many on every rank if the model is
        sharded. keep: (P, G) bool, default all; the others must add exactly 0 to the
        gradient."""
        cfg = self.session.cfg
        device = hardware.device()
        part = self.batch.take(self.groups)
        shapes = rollout.row_shapes(part, cfg.row_tokens, cfg.rows, device)
        # all at once, since ranks compare how many they have before the first forward pass
        rows = list(rollout.pack(part, None if keep is None else keep[self.groups], **shapes))
        # a rank with fewer microbatches must still join the collectives of a sharded forward pass
        idle = (
            rollout.idle(shapes["row_tokens"], shapes["rows"])
            if shapes["fixed"]
            else rollout.idle()
        )
        numbers = hardware.send(torch.tensor(self.batch.numbers(self.groups)), device)
        for packed in sharding.in_step(self.session.model, rows, idle):
            packed = packed.to(device)
            yield Microbatch(self, packed, numbers[packed.numbers], packed.mask())

    def apply(self) -> None:
        """One optimizer step on the gradients of all ranks."""
        self.session.apply_gradients()
        self.session.meter.updates += 1


@dataclass(frozen=True)
class Microbatch:
    """B completions in packed rows. numbers (B,): their indices in the batch's N. mask (B, C):
    tokens that the policy wrote."""

    update: Update
    packed: Packed
    numbers: Tensor
    mask: Tensor

    def rows_of(self, table: Tensor) -> Tensor:
        """Rows of a batch's table for these completions: (B, C) of a table (N, C); (B, 1) of one
        value per completion, (P, G) or (N,)."""
        table = (
            table if len(table) == len(self.update.mask) and table.ndim == 2 else table.view(-1, 1)
        )
        return hardware.send(table, self.numbers.device)[self.numbers, : self.packed.longest]

    def logprobs(self, states: bool = False, whole: bool = False) -> tuple[Tensor, ...]:
        """(B, C) log-probabilities and entropies, in nats, of the distribution that was sampled
        from: at its temperature, and under --top-k over the tokens that the sampler kept. The
        entropy carries gradient if --entropy-coef is not 0.

        states: also return the last states, which `ValueHead` reads and `unpack` arranges.
        whole: over all tokens even under --top-k. A likelihood needs this: it must take
        probability from the tokens that were cut."""
        session = self.update.session
        first = self.update.first
        packed = self.packed
        comparable = None  # (R, T) log-probabilities of the distribution that was sampled
        if whole and session.cfg.top_k is not None:
            if first:
                with torch.no_grad():
                    comparable, *_ = self._forward(packed, states)
            # without the kept ids the softmax is over the whole vocabulary
            packed = replace(packed, kept=None)
        logprobs, entropy, *hidden = self._forward(packed, states)
        # the largest difference between the trainer's and the sampler's log-probabilities
        # only before the first update do trainer and sampler have the same weights
        if first:
            ours = packed.unpack(logprobs.detach() if comparable is None else comparable)
            # `where`, not a product: behind a completion's end either may be infinite
            gap = torch.where(self.mask, ours - self.rows_of(session.sampled_logprobs), 0.0)
            session.meter.add({"logprob_mismatch": gap.abs().max()})
        return packed.unpack(logprobs), packed.unpack(entropy), *hidden

    def _forward(self, packed: Packed, states: bool) -> tuple[Tensor, ...]:
        """(R, T) log-probabilities and entropies, and with `states` the last states."""
        session = self.update.session
        cfg = session.cfg
        with numerics.autocast():
            return session.model.token_logprobs(
                packed.ids,
                packed.targets,
                temperature=cfg.temperature,
                entropy_grad=isinstance(cfg, EntropySettings) and cfg.entropy_coef != 0,
                states=states,
                **packed.where(),
            )

    def importance(self, logprobs: Tensor, cap: float) -> Tensor:
        """(B, C) `losses.importance_weights`, the policy's over the sampler's probabilities; 1 if
        cap is 0. Logs their statistics."""
        session = self.update.session
        sampled = self.rows_of(session.sampled_logprobs)
        weights, off_policy = importance_weights(logprobs, sampled, self.mask, cap)
        session.meter.add(off_policy)
        return weights

    def backward(self, loss: Tensor, sums: Mapping[str, Tensor] = {}) -> None:
        """Backward pass of a loss that is already divided by the counts of the whole update.
        sums: sums over tokens, to be logged."""
        loss.backward()
        meter = self.update.session.meter
        every = {"policy_loss": loss, "tokens": self.mask.sum(), **sums}
        meter.add({name: value.detach() for name, value in every.items()})
        meter.trained += self.packed.n_tokens
