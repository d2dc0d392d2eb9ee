"""Preferences: DPO, IPO, KTO, CPO, ORPO or SimPO from pairs (or labelled completions) that are there before training starts.

    codechat preference --init-from my-sft --data-dir data/preferences --loss dpo --run-name my-dpo
    codechat preference --init-from my-sft --task funcall --task-data data/nano --run-name my-dpo     pairs sampled from the policy itself
    torchrun --standalone --nproc-per-node 8 -m codechat.preference --init-from d20-sft --data-dir data/preferences --run-name d20-dpo

Pairs come from preferences.train.jsonl (and .select.jsonl for evaluation), or, without --data-dir, from the best and the worst completion of
groups that the starting policy samples on --task. The starting policy is the reference model; its log-probabilities are computed once, before
the first step, and it is then let go. Where --task is set, evaluations also ask the task what the policy now earns: a margin can rise while
answers get worse, since the loss sees only differences.

Same phases as sft: evaluate, save, learn, log. Left out: sampling new pairs while training, a length penalty.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tqdm import tqdm

from codechat import tasks
from codechat.core import config, errors
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist, sharding
from codechat.evaluation import diagnose, evaluate
from codechat.models import lora, optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import preference_data, rollout
from codechat.rl import preference_losses as pl
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.tasks.toy import TOY_RUN
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Settings of one run on preferences."""

    run_name: str = opt("preference", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    init_from: str | None = opt(
        None, "checkpoint to start from, and the reference model; none = new weights of --model"
    )
    loss: Literal["dpo", "ipo", "kto", "cpo", "orpo", "simpo"] = opt("dpo", "the paper")
    data_dir: str | None = opt(None, "directory with preferences.SPLIT.jsonl; none = pairs of rollouts on --task")
    task: str | None = opt(None, "task to sample pairs on, and to evaluate on: funcall, toy")
    task_data: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    sample_groups: int = opt(256, "groups to sample where pairs come from rollouts")
    group_size: int = opt(8, "completions per group")
    tags: Literal["reserved", "text", "template"] = opt("reserved", "turn tags, where --init-from is none")
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none")
    beta: float | None = opt(
        None, "strength of the pull towards the reference, or scale of the margin; none = the paper's"
    )
    margin: float = opt(1.0, "SimPO's target margin")
    sft_coef: float | None = opt(None, "weight of an SFT term on what is preferred; none = the paper's")
    liked_weight: float = opt(1.0, "KTO's weight of completions that are liked")
    disliked_weight: float = opt(1.0, "KTO's weight of completions that are not")
    device_batch_size: int = opt(8, "pairs (KTO: rows) per microbatch and device")
    grad_accum: int = opt(1, "microbatches per step")
    max_steps: int = opt(100, "optimizer steps")
    temperature: float = opt(1.0, "sampling temperature of rollouts and evaluations; the loss is at temperature 1")
    max_new_tokens: int = opt(64, "longest sampled completion, tokens")
    lora_rank: int = opt(lora.RANK, "rank of low-rank updates of frozen weights; 0 = train all weights", late=True)
    lora_alpha: float = opt(lora.ALPHA, "their scale is alpha / rank", late=True)
    lora_targets: tuple[str, ...] = opt(lora.CHOSEN, "matrices that get one: qkv out gate up down", late=True)
    optimizer: Literal["adamw", "muon"] = opt("adamw", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(5e-5, "AdamW learning rate")
    muon_lr: float = opt(0.001, "Muon learning rate")
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings")
    warmup_steps: int = opt(5, "steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = opt("cosine", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.1, "share of the learning rate left at the end")
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off")
    shard: bool | None = opt(
        None, "split weights and optimizer states over ranks; none = where a replica does not fit", identity=False
    )
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", identity=False)
    row_tokens: int = opt(512, "tokens of a packed training row")
    eval_every: int = opt(25, "steps between evaluations; 0 = only the last")
    eval_examples: int = opt(128, "select pairs, and select problems of the task, per evaluation")
    save_every: int = opt(50, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    keep_every: int = opt(0, "also keep every checkpoint whose step is a multiple of this; 0 = none")
    seed: int = opt(0, "seed of new weights, of sampled pairs and of their order")

    def __post_init__(self) -> None:
        lora.check(self.lora_rank, self.lora_alpha, self.lora_targets)
        for name in ("device_batch_size", "grad_accum", "max_steps", "max_new_tokens", "sample_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.data_dir is None and self.task is None:
            raise ConfigError(
                "neither --data-dir nor --task; set one: preferences are read from a directory or sampled on a task"
            )
        if self.data_dir is None and self.group_size < 2:
            raise ConfigError(f"group_size {self.group_size}: a pair needs two completions; set --group-size 2 or more")
        if self.beta is not None and self.beta <= 0:
            raise ConfigError(f"beta {self.beta}; it must be above 0")


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()} | {
    "toy": TOY_RUN | {"group_size": 16, "sample_groups": 64, "lr": 1e-3}
}
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}
STATS = ("loss", "chosen_rewards", "rejected_rewards", "accuracy", "chosen_logprob", "liked", "pairs")


def train(cfg: PreferenceConfig) -> Run:
    """Optimise the loss on the preferences; returns the finished run. Raises UserError for bad settings or data before anything is written."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    tok = tokenizer.from_dict(parent.meta["tokenizer"]) if parent else tokenizer.load(cfg.tokenizer)
    shape = (
        config.from_dict(GPTConfig, parent.meta["model_config"])
        if parent
        else replace(cfg.model, vocab_size=tok.n_vocab)
    )
    cfg = replace(
        cfg,
        model=shape,
        tags=parent.meta["tags"] if parent else cfg.tags,
        beta=pl.BETA[cfg.loss] if cfg.beta is None else cfg.beta,
        sft_coef=pl.SFT_COEF[cfg.loss] if cfg.sft_coef is None else cfg.sft_coef,
    )
    task = tasks.load(cfg.task, **({"source": cfg.task_data} if cfg.task_data else {})) if cfg.task else None
    select = task.problems("select", limit=cfg.eval_examples) if task else []
    kto = cfg.loss == "kto"
    with dist.session(cfg) as world, StopSignal() as stop:
        device = world.device
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        if parent:
            checkpoint.restore(parent, model)
        pairs, held_out = _preferences(cfg, model, task, tok)
        if pairs.group_size == 1 and not kto:
            raise ConfigError(
                f"--loss {cfg.loss} needs pairs; {cfg.data_dir} holds single completions with a label; set --loss kto"
            )

        def totals(batch: rollout.RolloutBatch, scorer: GPT = model) -> torch.Tensor:
            """(P, G) summed log-probabilities, without gradient."""
            with sharding.whole(scorer) as reader, dist.autocast(device):
                return (
                    rollout.score_logprobs(reader, batch, temperature=1.0, row_tokens=cfg.row_tokens, rows=8)
                    .sum(1)
                    .view_as(batch.rewards)
                )

        # the reference model: the policy before its first step, asked once about everything that it will ever be asked
        refs = {id(b): totals(b) for b in (pairs, held_out) if b is not None and cfg.loss in pl.NEEDS_REFERENCE}
        others = {
            id(b): preference_data.mismatched(b, shape.block_size) for b in (pairs, held_out) if b is not None and kto
        }
        other_refs = {at: totals(b) for at, b in others.items()}

        def judge(
            batch: rollout.RolloutBatch, rows: list[int], learns: bool = True
        ) -> tuple[torch.Tensor, dict[str, float]]:
            """Summed loss over these pairs of `batch`, and sums of what is logged."""
            part = batch.take(rows)
            (packed,) = rollout.pack(
                part, torch.ones_like(part.rewards), row_tokens=cfg.row_tokens, rows=1 << 30, skip_zero=False
            )
            packed = packed.to(device)
            with dist.autocast(device), torch.set_grad_enabled(learns):
                logprobs, _ = model.token_logprobs(
                    packed.ids, packed.targets, positions=packed.positions, mask=packed.mask()
                )
            summed = packed.unpack(logprobs).sum(1).view(part.rewards.shape)  # (B, G)
            lengths = part.lengths().view(part.rewards.shape).to(device)
            ref = refs[id(batch)][rows] if id(batch) in refs else None
            if kto:
                drift = totals(others[id(batch)].take(rows)) - other_refs[id(batch)][rows]
                kl = pl.kto_reference_point(
                    *dist.sum_(torch.stack((drift.sum(), torch.tensor(float(drift.numel()), device=device)))).tolist()
                )
                liked = part.rewards.bool().flatten().to(device)
                found, reward = pl.kto_loss(
                    summed.flatten(),
                    ref.flatten(),
                    liked,
                    kl,
                    cfg.beta,
                    liked_weight=cfg.liked_weight,
                    disliked_weight=cfg.disliked_weight,
                )
                n, good, bad = liked.sum(), reward[liked].sum(), reward[~liked].sum()
                total = (
                    found.sum() / part.group_size
                    + cfg.sft_coef * pl.sft_loss(summed.flatten(), lengths.flatten())[liked].sum()
                )
                right = ((reward > 0) == liked).sum() / part.group_size
                seen = dict(
                    loss=total,
                    chosen_rewards=good,
                    rejected_rewards=bad,
                    accuracy=right,
                    chosen_logprob=summed.flatten()[liked].sum(),
                    liked=n,
                )
            else:
                where = dict(ref_chosen=ref[:, 0], ref_rejected=ref[:, 1]) if ref is not None else {}
                found = pl.pair_loss(
                    cfg.loss,
                    summed[:, 0],
                    summed[:, 1],
                    chosen_lengths=lengths[:, 0],
                    rejected_lengths=lengths[:, 1],
                    beta=cfg.beta,
                    margin=cfg.margin,
                    sft_coef=cfg.sft_coef,
                    **where,
                )
                total = found.losses.sum()
                seen = dict(
                    loss=total,
                    chosen_rewards=found.chosen_rewards.sum(),
                    rejected_rewards=found.rejected_rewards.sum(),
                    accuracy=(found.chosen_rewards > found.rejected_rewards).sum(),
                    chosen_logprob=summed[:, 0].sum(),
                    liked=len(rows),
                )
            return total, {k: float(v.detach() if hasattr(v, "detach") else v) for k, v in seen.items()} | {
                "pairs": len(rows)
            }

        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "preference", "data_dir": cfg.data_dir, "task": cfg.task}
        ]
        start, size = 0, len(pairs.prompts)
        run = Run.create(
            cfg.run_name, cfg, kind="preference", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
            start = last.step
        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=cfg.max_steps, desc=run.name, unit="step", disable=not world.is_main)
            for step in range(start, cfg.max_steps + 1):
                done, began = step == cfg.max_steps, time.perf_counter()
                stopping = dist.any(stop.requested)

                # once in a while: evaluate
                if (done or (cfg.eval_every and step % cfg.eval_every == 0)) and not (step == start and run.resumed):
                    row: dict[str, Any] = {}
                    if held_out is not None:
                        n, size_of = len(held_out.prompts), cfg.device_batch_size
                        found = [
                            judge(held_out, list(range(i, min(i + size_of, n))), learns=False)[1]
                            for i in range(0, n, size_of)
                        ]  # every rank, all
                        row |= {
                            f"heldout_{k}": v
                            for k, v in _means({k: sum(f[k] for f in found) for k in STATS}, pairs.group_size).items()
                        }
                    if task:
                        with sharding.whole(model) as policy:
                            row |= evaluate.evaluate_task(
                                policy,
                                tok,
                                cfg.tags,
                                task,
                                select,
                                n=1,
                                temperature=cfg.temperature,
                                max_new_tokens=cfg.max_new_tokens,
                                seed=cfg.seed,
                            ).row()
                    run.log_eval(step, row)

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    checkpoint.save(
                        run.path,
                        step,
                        model=lora.merged(model),
                        optimizers=optimizers,
                        extra={"lora": lora.adapters(model)},
                        meta={"tokenizer": tok.to_dict(), "tags": cfg.tags, "lineage": lineage},
                        keep_last=cfg.keep_last,
                        keep_every=cfg.keep_every,
                        wait=done or stopping,
                    )
                if done or stopping:
                    break

                # learn: the mean over the pairs of all microbatches and ranks, in a fresh order each epoch
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                before, sums = diagnose.bf16_snapshot(model), dict.fromkeys(STATS, 0.0)
                count = cfg.device_batch_size * cfg.grad_accum * world.size
                for micro in range(cfg.grad_accum):
                    at = step * count + (micro * world.size + world.rank) * cfg.device_batch_size
                    total, seen = judge(
                        pairs, [_place(i, size, cfg.seed) for i in range(at, at + cfg.device_batch_size)]
                    )
                    (total / count).backward()
                    sums = {k: sums[k] + seen[k] for k in STATS}
                dist.sum_gradients(model)
                grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

                # log
                found = _means(dist.mean(sums), pairs.group_size)
                run.log(
                    step + 1,
                    dict(
                        found,
                        epoch=(step + 1) * count / size,
                        lr=cfg.lr * scale,
                        grad_norm=grad_norm,
                        weights_changed_bf16=diagnose.weights_changed_bf16(before, model),
                        step_s=time.perf_counter() - began,
                    ),
                )
                bar.update(1)
                bar.set_postfix(
                    loss=f"{found['preference_loss']:.3f}",
                    margin=f"{found['preference_margin']:.2f}",
                    right=f"{found['preference_accuracy']:.2f}",
                )
            bar.close()
            if stopping:
                run.stop(f"interrupted at step {step}; continue with --resume")
    return run


def _preferences(
    cfg: PreferenceConfig, model: GPT, task: tasks.Task | None, tok: tokenizer.Tokenizer
) -> tuple[rollout.RolloutBatch, rollout.RolloutBatch | None]:
    """Pairs to train on and, from files, held-out ones. Every rank samples the same pairs."""
    block = cfg.model.block_size
    if cfg.data_dir is None:
        assert task is not None
        problems = task.problems("train", seed=cfg.seed)
        with sharding.whole(model) as policy, torch.no_grad(), dist.autocast(dist.device()):
            batch = rollout.collect(
                policy,
                task,
                [problems[i % len(problems)] for i in range(cfg.sample_groups)],
                tok,
                cfg.tags,
                group_size=cfg.group_size,
                max_new_tokens=cfg.max_new_tokens,
                temperature=cfg.temperature,
                seed=cfg.seed + 1,
            )
        return preference_data.pairs_from_rollouts(batch), None
    pairs = preference_data.read_preferences(cfg.data_dir, "train", tok, cfg.tags, block)
    try:
        return pairs, preference_data.read_preferences(
            cfg.data_dir, "select", tok, cfg.tags, block, limit=cfg.eval_examples
        )
    except errors.MissingFile:
        return pairs, None


def _place(i: int, size: int, seed: int) -> int:
    """Which pair comes i-th: a fresh order for every epoch, a function of i alone."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + i // size)
    return int(torch.randperm(size, generator=rng)[i % size])


def _means(sums: dict[str, float], group_size: int) -> dict[str, float]:
    """Sums over pairs as the declared metrics; rows of a single completion are liked or not, so each side has its own count."""
    liked, n = sums["liked"], sums["pairs"]
    disliked = n * group_size - liked
    good, bad = sums["chosen_rewards"] / max(1e-9, liked), sums["rejected_rewards"] / max(1e-9, disliked)
    return dict(
        preference_loss=sums["loss"] / n,
        preference_margin=good - bad,
        preference_accuracy=sums["accuracy"] / n,
        chosen_reward=good,
        rejected_reward=bad,
        chosen_logprob=sums["chosen_logprob"] / max(1e-9, liked),
    )


def main(argv: list[str] | None = None) -> int:
    """`codechat preference`, `python -m codechat.preference` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        PreferenceConfig,
        sys.argv[1:] if argv is None else argv,
        presets=RUN_PRESETS,
        prog="codechat preference",
        epilog=__doc__,
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
