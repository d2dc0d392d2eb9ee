"""Expert iteration on a task's reward: sample, keep the best completions, fine-tune on them, repeat.

    codechat expert --init-from my-sft --task funcall --data-dir data/nano --run-name my-expert
    torchrun --standalone --nproc-per-node 8 -m codechat.expert_iteration --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-expert

Rejection sampling: what is not kept is never pushed away, so nothing is learned from failures, and there is no ratio, no baseline and no
clipping. --keep correct takes every exactly right completion (STaR, arXiv:2203.14465; needs some from the start), --keep best the best ones of
each group that disagrees (RAFT, arXiv:2304.06767; needs only that rewards differ). Each step samples with the newest policy, as REINFORCE
(reinforce.py) does, and makes inner_epochs x minibatches updates on what it kept.

20 steps in a row in which no group has variance end the run. Left out: a pool of kept completions over steps, restarting each round from the
first weights.
"""

from __future__ import annotations

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
from codechat.tasks.toy import TOY_RUN
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Settings of one run of expert iteration."""

    run_name: str = opt("expert", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    init_from: str | None = opt(None, "checkpoint to start from; none = new weights of --model")
    task: str = opt("funcall", "task whose reward is optimised: funcall, toy")
    data_dir: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    tags: Literal["reserved", "text", "template"] = opt("reserved", "turn tags, where --init-from is none")
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none")
    device_batch_size: int = opt(16, "problems per step and device")
    group_size: int = opt(16, "completions per problem")
    max_steps: int = opt(50, "batches of rollouts")
    keep: Literal["best", "correct"] = opt(
        "best", "what is trained on: the best of each group that disagrees, or all that are exactly right"
    )
    inner_epochs: int = opt(1, "passes over what was kept of each batch of rollouts")
    minibatches: int = opt(1, "optimizer updates per pass; divides device_batch_size")
    temperature: float = opt(1.0, "sampling temperature; the trainer uses the same")
    max_new_tokens: int = opt(64, "longest completion, tokens")
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
    shard: bool | None = opt(
        None, "split weights and optimizer states over ranks; none = where a replica does not fit", identity=False
    )
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", identity=False)
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
        if self.group_size < 2 and self.keep == "best":
            raise ConfigError(
                f"group_size {self.group_size} with --keep best: a group of one never disagrees; set --group-size 2 or more"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()} | {"toy": TOY_RUN}
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}


def kept_completions(batch: rollout.RolloutBatch, keep: str) -> torch.Tensor:
    """(P, G) bool. correct: what is exactly right. best: what has the largest reward of its group, in groups that disagree."""
    if keep == "correct":
        return batch.correct
    return (batch.rewards == batch.rewards.amax(1, keepdim=True)) & ~advantages.zero_variance(batch.rewards)[:, None]


def train(cfg: ExpertConfig) -> Run:
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
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        if parent:
            checkpoint.restore(parent, model)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "expert", "task": cfg.task, "data_dir": cfg.data_dir}
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
            cfg.run_name, cfg, kind="expert", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
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
                        extra={"lora": lora.adapters(model), "sentinel": sentinel.state(), "cursor": cursor},
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
                judged = (
                    (batch.rewards, batch.correct) if cfg.group_size > 1 else (batch.rewards.T, batch.correct.T)
                )  # of one each: the batch is a group
                found, kept = diagnose.judge(*judged, min_groups=1), kept_completions(batch, cfg.keep)  # (P, G)
                sampled = time.perf_counter()

                # learn: each minibatch is one update, its loss divided by the kept tokens of all ranks
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                before, seen, grad_norm = diagnose.bf16_snapshot(model), Counter(), 0.0
                groups = [list(range(m, size, cfg.minibatches)) for m in range(cfg.minibatches)]
                parts = [batch.take(g) for g in groups]
                counts = dist.sum_(
                    torch.tensor(
                        [float(p.mask()[kept[g].flatten()].sum()) for p, g in zip(parts, groups)], dtype=torch.float64
                    )
                ).tolist()
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    at = update % cfg.minibatches
                    if not counts[at]:
                        continue
                    packs = list(
                        rollout.pack(parts[at], kept[groups[at]].float(), row_tokens=cfg.row_tokens, rows=cfg.rows)
                    )
                    for packed in sharding.in_step(model, packs, rollout.idle()):
                        packed = packed.to(device)
                        with dist.autocast(device):
                            logprobs, entropy = model.token_logprobs(
                                packed.ids,
                                packed.targets,
                                temperature=cfg.temperature,
                                positions=packed.positions,
                                mask=packed.mask(),
                            )
                        loss = losses.policy_gradient_loss(
                            logprobs, packed.advantages, packed.targets >= 0, counts[at]
                        )  # advantages: 1 = kept
                        loss.backward()
                        on = packed.targets >= 0
                        seen.update(
                            dict(
                                tokens=float(on.sum()),
                                nats=-float(logprobs.detach()[on].sum()),
                                entropy=float(entropy.detach()[on].sum()),
                            )
                        )
                    dist.sum_gradients(model)
                    grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

                # log
                row: dict[str, Any] = dist.mean(
                    dict(
                        reward_mean=found.reward_mean,
                        reward_std=found.reward_std,
                        exact_match=found.correct_share,
                        frac_zero_std_groups=found.frac_zero_std,
                        effective_groups=world.size * float(found.effective_groups),
                        kept_frac=float(kept.float().mean()),
                        completion_tokens_mean=batch.n_tokens / len(batch.completions),
                        truncated_frac=batch.truncated_frac,
                        tokens=seen["tokens"],
                        nats=seen["nats"],
                        entropy=seen["entropy"],
                        **batch.tier_shares(task.tiers),
                    )
                )
                tokens = max(1.0, row.pop("tokens"))
                row |= dict(train_loss=row.pop("nats") / tokens, entropy=row["entropy"] / tokens)
                dead = sentinel.update(1.0 - row["frac_zero_std_groups"])
                run.log(
                    step + 1,
                    dict(
                        row,
                        lr=cfg.lr * scale,
                        grad_norm=grad_norm,
                        dead_steps=sentinel.dead_steps,
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
                    kept=f"{row['kept_frac']:.2f}",
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
    """`codechat expert`, `python -m codechat.expert_iteration` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        ExpertConfig,
        sys.argv[1:] if argv is None else argv,
        presets=RUN_PRESETS,
        prog="codechat expert",
        epilog=__doc__,
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
