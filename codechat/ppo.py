"""PPO on a task's reward: a value head, generalised advantages, clipped ratios, several passes in minibatches.

    codechat ppo --init-from my-sft --task funcall --data-dir data/nano --run-name my-ppo
    torchrun --standalone --nproc-per-node 8 -m codechat.ppo --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-ppo

As GRPO (grpo.py), but a token's advantage comes from a learned value instead of from the group: a linear head on the policy's own last
states predicts the reward still to come, `advantages.estimate_gae` compares it with what came (arXiv:1506.02438), and both are trained on
each minibatch (arXiv:1707.06347, eq. 9). The reward arrives at the last token; with --kl-coef every token pays for its distance from the
starting policy (arXiv:2203.02155, eq. 2). With --lam 1 and a value of 0 the advantage is the reward itself. --non-stop-penalty takes something from
completions that never stopped, whatever their text earned; what is logged as the reward stays the task's.

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. The head is saved with the checkpoint and starts at 0.
20 steps in a row in which no group has variance end the run, and such a step makes no update: only the value's errors would move the policy.
Left out: sharded weights, a critic with a body of its own, adaptive KL coefficients.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tqdm import tqdm

from codechat import tasks
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, RunError
from codechat.distributed import dist, sharding
from codechat.evaluation import diagnose, evaluate
from codechat.models import lora, optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses, rollout
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.tasks.reasoning import LORA_RUN
from codechat.tasks.toy import TOY_RUN
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of one PPO run."""

    run_name: str = opt("ppo", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    init_from: str | None = opt(
        None, "checkpoint to start from, and the reference model; none = new weights of --model"
    )
    task: str = opt("funcall", "task whose reward is optimised: funcall, toy")
    data_dir: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    tags: Literal["reserved", "text", "template"] = opt("reserved", "turn tags, where --init-from is none")
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none")
    device_batch_size: int = opt(16, "problems per step and device")
    group_size: int = opt(16, "completions per problem")
    max_steps: int = opt(50, "batches of rollouts")
    inner_epochs: int = opt(2, "passes over each batch of rollouts")
    minibatches: int = opt(2, "optimizer updates per pass; divides device_batch_size")
    clip_eps_low: float = opt(0.2, "a ratio below 1 - this has no gradient where the advantage is negative")
    clip_eps_high: float = opt(0.2, "a ratio above 1 + this has no gradient where the advantage is positive")
    lam: float = opt(0.95, "decay of generalised advantages; 1 = the whole return, 0 = one step ahead")
    gamma: float = opt(1.0, "discount per token")
    whiten: bool = opt(
        False,
        "advantages of a batch to mean 0 and standard deviation 1, over all ranks; where few groups disagree this blows up the "
        "value's noise",
    )
    value_coef: float = opt(0.1, "weight of the value loss; its gradient reaches the policy's body too")
    value_clip_eps: float | None = opt(
        0.2, "a value may move this far from its value at sampling time; none = unclipped"
    )
    value_lr: float = opt(1e-2, "learning rate of the value head")
    kl_coef: float = opt(
        0.0, "weight of the KL divergence from the starting policy, in each token's reward; 0 = no reference model"
    )
    kl_kind: Literal["k1", "k2", "k3"] = opt(
        "k1", "estimator of that divergence; k1 is the one that is right in a reward"
    )
    temperature: float = opt(1.0, "sampling temperature; the trainer uses the same")
    max_new_tokens: int = opt(64, "longest completion, tokens")
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")
    non_stop_penalty: float = opt(
        0.0, "taken from the reward of a completion that was cut off before its stop sequence"
    )
    lora_rank: int = opt(lora.RANK, "rank of low-rank updates of frozen weights; 0 = train all weights", late=True)
    lora_alpha: float = opt(lora.ALPHA, "their scale is alpha / rank", late=True)
    lora_targets: tuple[str, ...] = opt(lora.CHOSEN, "matrices that get one: qkv out gate up down", late=True)
    optimizer: Literal["adamw", "muon"] = opt("adamw", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(1e-4, "AdamW learning rate")
    muon_lr: float = opt(0.002, "Muon learning rate")
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings")
    warmup_steps: int = opt(5, "steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = opt("constant", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.1, "share of the learning rate left at the end")
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off")
    row_tokens: int = opt(512, "tokens of a packed training row")
    rows: int = opt(8, "packed rows per forward pass")
    eval_every: int = opt(25, "steps between evaluations on select problems; 0 = only the last")
    eval_examples: int = opt(128, "select problems per evaluation")
    ks: tuple[int, ...] = opt((1,), "pass@k to report in evaluations; as many samples as the largest k are drawn")
    allow_dead: bool = opt(False, "train although diagnose says DEAD")
    diagnose_groups: int = opt(
        64, "groups judged before the first step; 0 = skip gate and diagnosis (a recipe's stage did it)"
    )
    dead_patience: int = opt(20, "DEAD steps in a row that end the run")
    log_rollouts_every: int = opt(10, "steps between rollouts written to samples.jsonl; 0 = never")
    save_every: int = opt(25, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    keep_every: int = opt(0, "also keep every checkpoint whose step is a multiple of this; 0 = none")
    seed: int = opt(0, "seed of new weights, problem order and sampling")

    def __post_init__(self) -> None:
        lora.check(self.lora_rank, self.lora_alpha, self.lora_targets)
        for name in ("device_batch_size", "max_steps", "max_new_tokens", "rows", "inner_epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.device_batch_size % self.minibatches:
            raise ConfigError(
                f"minibatches {self.minibatches} must divide device_batch_size {self.device_batch_size}; set --minibatches 1 or another divisor"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")
        for name in (
            "clip_eps_low",
            "clip_eps_high",
            "kl_coef",
            "value_coef",
            "value_clip_eps",
            "value_lr",
            "non_stop_penalty",
        ):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if not (self.clip_eps_low < 1 and 0 <= self.lam <= 1 and 0 < self.gamma <= 1):
            raise ConfigError(
                f"clip_eps_low {self.clip_eps_low}, lam {self.lam}, gamma {self.gamma}; required: below 1, in [0, 1], above 0 and at most 1"
            )


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()} | {
    "toy": TOY_RUN | {"lr": 2e-3},
    "lora": LORA_RUN,
}
# toy: four updates a step at the other loops' 4e-3 collapse to a deterministic policy before it is right, in 3 of 4 seeds
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}


def train(cfg: PPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. Raises UserError before anything is written for bad settings or a DEAD task."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    tok = tokenizer.from_dict(parent.meta["tokenizer"]) if parent else tokenizer.load(cfg.tokenizer)
    shape = (
        config.from_dict(GPTConfig, parent.meta["model_config"])
        if parent
        else replace(cfg.model, vocab_size=tok.n_vocab)
    )
    cfg = replace(cfg, model=shape, tags=parent.meta["tags"] if parent else cfg.tags)
    task = tasks.load(cfg.task, **({"source": cfg.data_dir} if cfg.data_dir else {}))
    problems, select = task.problems("train", seed=cfg.seed), task.problems("select", limit=cfg.eval_examples)
    with dist.session(cfg) as world, StopSignal() as stop:
        device = world.device
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=False)
        if parent:
            checkpoint.restore(parent, model)
        reference = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=False) if cfg.kl_coef else None
        if reference is not None and parent:
            checkpoint.restore(parent, reference)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        value_head = torch.nn.Linear(shape.n_embd, 1, device=device)
        torch.nn.init.zeros_(value_head.weight), torch.nn.init.zeros_(value_head.bias)
        optimizers += optim.build(value_head, lr=cfg.value_lr, weight_decay=0.0)
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "ppo", "task": cfg.task, "data_dir": cfg.data_dir}
        ]

        def sample(at: int, n: int, seed: int, key: int = 0, group_size: int = cfg.group_size) -> rollout.RolloutBatch:
            """Rollouts of the n problems from number `at` on, wrapping around; `key` numbers the first group within its step."""
            with sharding.whole(model) as policy, torch.no_grad(), dist.autocast(device):
                return rollout.collect(
                    policy,
                    task,
                    [problems[i % len(problems)] for i in range(at, at + n)],
                    tok,
                    cfg.tags,
                    group_size=group_size,
                    max_new_tokens=cfg.max_new_tokens,
                    temperature=cfg.temperature,
                    seed=seed,
                    keys=range(key, key + n),
                )

        def value(hidden: torch.Tensor) -> torch.Tensor:
            """(R, T) of states (R, T, D), in float32 also under autocast: a value rounded to bfloat16 would be an advantage."""
            return (hidden.float() * value_head.weight[0]).sum(-1) + value_head.bias

        def values_of(batch: rollout.RolloutBatch) -> torch.Tensor:
            """(N, C): the value before each sampled token, 0 behind a completion's end."""
            table = torch.zeros(batch.mask().shape, device=device)
            with torch.no_grad(), dist.autocast(device):
                for packed in rollout.pack(
                    batch, torch.ones_like(batch.rewards), row_tokens=cfg.row_tokens, rows=cfg.rows, skip_zero=False
                ):
                    packed = packed.to(device)
                    found = packed.unpack(
                        value(model.hidden(packed.ids, positions=packed.positions, mask=packed.mask()))
                    )
                    table[packed.rows(), : found.shape[1]] = found
            return table

        if cfg.diagnose_groups and not cfg.resume:
            tasks.gold_gate(task, problems[:512]).require()
            first = sample(0, cfg.diagnose_groups, seed=cfg.seed + 1, group_size=max(8, cfg.group_size // 2))
            found = diagnose.judge(
                first.rewards, first.correct, min_groups=min(cfg.diagnose_groups, diagnose.MIN_GROUPS)
            )
            if found.verdict == "DEAD" and not cfg.allow_dead:
                raise RunError(
                    f"diagnose says DEAD on {cfg.task}: {found.effective_groups} of {found.n_groups} groups have any variance, mean reward "
                    f"{found.reward_mean:.3f}; {found.remedy}; --allow-dead trains all the same"
                )

        start, cursor = 0, 0  # cursor: problems that all ranks have drawn
        run = Run.create(
            cfg.run_name, cfg, kind="ppo", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
            value_head.load_state_dict(last.extra["value_head"])
            sentinel.load_state(last.extra["sentinel"])
            start, cursor = last.step, last.extra["cursor"]
        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=cfg.max_steps, desc=run.name, unit="step", disable=not world.is_main)
            dead = False
            for step in range(start, cfg.max_steps + 1):
                done = step == cfg.max_steps
                stopping = dist.any(stop.requested or dead)

                # once in a while: evaluate
                if (done or (cfg.eval_every and step % cfg.eval_every == 0)) and not (step == start and run.resumed):
                    with sharding.whole(model) as policy:
                        result = evaluate.evaluate_task(
                            policy,
                            tok,
                            cfg.tags,
                            task,
                            select,
                            n=max(cfg.ks),
                            temperature=cfg.temperature,
                            max_new_tokens=cfg.max_new_tokens,
                            ks=cfg.ks,
                            seed=cfg.seed,
                        )
                    run.log_eval(step, result.row())

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    checkpoint.save(
                        run.path,
                        step,
                        model=lora.merged(model),
                        optimizers=optimizers,
                        extra={
                            "lora": lora.adapters(model),
                            "sentinel": sentinel.state(),
                            "cursor": cursor,
                            "value_head": {k: v.clone() for k, v in value_head.state_dict().items()},
                        },
                        meta={"tokenizer": tok.to_dict(), "tags": cfg.tags, "lineage": lineage},
                        keep_last=cfg.keep_last,
                        keep_every=cfg.keep_every,
                        wait=done or stopping,
                    )
                if done or stopping:
                    break

                # roll out: the next problems of this rank; draws hang on the step and on the group's number over all ranks
                began, seed, size = time.perf_counter(), cfg.seed * 1_000_003 + step + 2, cfg.device_batch_size
                batch = sample(cursor + world.rank * size, size, seed, key=world.rank * size)
                cursor += world.size * size
                cut = torch.tensor([c.stop != "stop" for c in batch.completions]).view_as(batch.rewards)
                paid = (
                    batch.rewards - cfg.non_stop_penalty * cut
                )  # (P, G); what is logged as the reward stays the task's
                judged = (
                    (paid, batch.correct) if cfg.group_size > 1 else (paid.T, batch.correct.T)
                )  # of one each: the batch is a group
                found, old, mask = (
                    diagnose.judge(*judged, min_groups=1),
                    batch.logprobs().to(device),
                    batch.mask().to(device),
                )  # (N, C)

                # credit: the reward at the last token, less the KL divergence of each; then advantages and returns of every token
                rewards, ends = torch.zeros_like(old), batch.lengths().to(device) - 1
                rewards[torch.arange(len(ends), device=device), ends] = paid.flatten().to(device)
                if reference is not None:
                    with dist.autocast(device):
                        ref = rollout.score_logprobs(
                            reference, batch, temperature=cfg.temperature, row_tokens=cfg.row_tokens, rows=cfg.rows
                        )
                    rewards = rewards - cfg.kl_coef * losses.kl_estimate(old, ref, cfg.kl_kind)
                old_values = values_of(batch)
                advantage, returns = advantages.estimate_gae(rewards, old_values, mask, gamma=cfg.gamma, lam=cfg.lam)
                squares = (advantage, advantage**2, returns, returns**2, (returns - old_values) ** 2)
                sums = torch.stack([mask.sum().double(), *(x[mask].double().sum() for x in squares)])
                total, s1, s2, r1, r2, unexplained = dist.sum_(sums).tolist()
                explained = 1 - unexplained / max(1e-12, r2 - r1**2 / total)
                adv_abs_mean = float(advantage[mask].abs().mean())
                if cfg.whiten:
                    advantage = (advantage - s1 / total) / (math.sqrt(max(0.0, s2 / total - (s1 / total) ** 2)) + 1e-8)
                sampled = time.perf_counter()

                # learn: each minibatch is one update, its loss divided by the tokens of all ranks
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                before, seen, policy_loss, grad_norm, mismatch, ratio_max = (
                    diagnose.bf16_snapshot(model),
                    Counter(),
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                )
                groups = [list(range(m, size, cfg.minibatches)) for m in range(cfg.minibatches)]
                parts = [batch.take(g) for g in groups]
                counts = dist.sum_(
                    torch.tensor([[p.n_tokens, found.effective_groups] for p in parts], dtype=torch.float64)
                ).tolist()
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    at = update % cfg.minibatches
                    part, (n_tokens, n_live) = parts[at], counts[at]
                    if not n_live:
                        continue
                    rows_of = (
                        torch.arange(len(batch.completions)).view(size, -1)[groups[at]].flatten()
                    )  # (n,) in the batch
                    for packed in rollout.pack(
                        part, torch.ones_like(part.rewards), row_tokens=cfg.row_tokens, rows=cfg.rows, skip_zero=False
                    ):
                        rows, packed = rows_of[packed.rows()].to(device), packed.to(device)
                        with dist.autocast(device):
                            hidden = model.hidden(packed.ids, positions=packed.positions, mask=packed.mask())
                            logprobs, entropy = model.token_logprobs(
                                packed.ids,
                                packed.targets,
                                temperature=cfg.temperature,
                                entropy_grad=cfg.entropy_coef != 0,
                                hidden=hidden,
                            )
                            values = value(hidden)
                        new, entropy, values = (
                            packed.unpack(logprobs),
                            packed.unpack(entropy),
                            packed.unpack(values),
                        )  # (B, C)
                        C, on = new.shape[1], mask[rows][:, : new.shape[1]]
                        token_loss, stats = losses.clipped_policy_loss(
                            new,
                            old[rows, :C],
                            advantage[rows, :C],
                            on,
                            clip_eps_low=cfg.clip_eps_low,
                            clip_eps_high=cfg.clip_eps_high,
                        )
                        value_loss = losses.value_loss(
                            values, old_values[rows, :C], returns[rows, :C], cfg.value_clip_eps
                        )
                        loss = losses.masked_mean(
                            token_loss + cfg.value_coef * value_loss - cfg.entropy_coef * entropy, on, n_tokens
                        )
                        loss.backward()
                        policy_loss += float(losses.masked_mean(token_loss.detach(), on, n_tokens))
                        ratio_max = max(ratio_max, float(stats.pop("ratio_max")))
                        kl_ref = (
                            losses.masked_sum(losses.kl_estimate(new.detach(), ref[rows, :C]), on)
                            if reference is not None
                            else 0.0
                        )
                        more = dict(
                            entropy=entropy.detach().sum(),
                            kl_ref=kl_ref,
                            value_loss=losses.masked_sum(value_loss.detach(), on),
                        )
                        seen.update({k: float(v) for k, v in (stats | more).items()})
                        if update == 0:
                            mismatch = max(
                                mismatch,
                                float((logprobs.detach() - packed.old_logprobs)[packed.completion >= 0].abs().max()),
                            )
                    for part_of in (model, value_head):
                        dist.sum_gradients(part_of)
                    grad_norm = float(
                        torch.nn.utils.clip_grad_norm_(
                            [*model.parameters(), *value_head.parameters()], cfg.grad_clip or math.inf
                        )
                    )
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

                # log
                row: dict[str, Any] = dist.mean(
                    dict(
                        reward_mean=float(batch.rewards.double().mean()),
                        reward_std=float(batch.rewards.double().std(correction=0)),
                        exact_match=found.correct_share,
                        frac_zero_std_groups=found.frac_zero_std,
                        effective_groups=world.size * float(found.effective_groups),
                        adv_abs_mean=adv_abs_mean,
                        completion_tokens_mean=batch.n_tokens / len(batch.completions),
                        truncated_frac=batch.truncated_frac,
                        policy_loss=world.size * policy_loss,
                        logprob_mismatch=mismatch,
                        ratio_max=ratio_max,
                        **{
                            f"sum/{k}": seen[k]
                            for k in (
                                "tokens",
                                "clipped_low",
                                "clipped_high",
                                "kl_old",
                                "kl_ref",
                                "entropy",
                                "value_loss",
                            )
                        },
                        **batch.tier_shares(task.tiers),
                    )
                )
                tokens = max(1.0, row.pop("sum/tokens"))
                row |= {k.replace("sum/", ""): row.pop(k) / tokens for k in [k for k in row if k.startswith("sum/")]}
                row["clip_frac"] = row["clipped_low"] + row["clipped_high"]
                row["approx_kl"] = row.pop("kl_old")
                if reference is None:
                    del row["kl_ref"]
                dead = sentinel.update(1.0 - row["frac_zero_std_groups"])
                run.log(
                    step + 1,
                    dict(
                        row,
                        lr=cfg.lr * scale,
                        grad_norm=grad_norm,
                        dead_steps=sentinel.dead_steps,
                        explained_variance=explained,
                        weights_changed_bf16=diagnose.weights_changed_bf16(before, model),
                        sample_s=sampled - began,
                        train_s=time.perf_counter() - sampled,
                        step_s=time.perf_counter() - began,
                    ),
                )
                if cfg.log_rollouts_every and step % cfg.log_rollouts_every == 0 and world.is_main:
                    run.log_samples(step + 1, batch.best_and_worst(groups=4))
                bar.update(1)
                bar.set_postfix(
                    reward=f"{row['reward_mean']:.3f}",
                    exact=f"{row['exact_match']:.2f}",
                    groups=f"{row['effective_groups']:.0f}",
                )
            bar.close()
            if dead:
                run.stop(
                    f"DEAD: {sentinel.dead_steps} steps in a row in which under 5 % of groups had variance; {diagnose.REMEDIES['DEAD']}"
                )
            elif stopping:
                run.stop(f"interrupted at step {step}; continue with --resume")
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat ppo`, `python -m codechat.ppo` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        PPOConfig, sys.argv[1:] if argv is None else argv, presets=RUN_PRESETS, prog="codechat ppo", epilog=__doc__
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
