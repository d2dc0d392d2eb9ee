"""REINFORCE on a task's reward, with the group's mean reward as baseline.

    codechat reinforce --init-from my-sft --task funcall --data-dir data/nano --run-name my-rl
    torchrun --standalone --nproc-per-node 8 -m codechat.reinforce --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-rl

For each step: sample G completions of each problem from the policy, score them with the task (the same score that evaluation uses),
subtract each group's mean reward, and take one policy-gradient step on the sampled ids. No reference model, no ratio, no clipping: the
data are exactly on-policy. Before the first step the gold gate runs and `diagnose` judges 64 groups; DEAD is refused without
--allow-dead. While it runs, 20 DEAD steps in a row end it. --engine http or vllm samples on a server (engines.py); evaluations stay here.

Same phases as pretrain and sft: evaluate, save, (roll out,) learn, log. Left out: KL to a reference, several epochs per batch.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from codechat import tasks
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, RunError
from codechat.distributed import dist, hardware, sharding
from codechat.evaluation import diagnose, evaluate
from codechat.models import lora, optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, engines, losses, rollout
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.tasks.toy import TOY_RUN
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Settings of one REINFORCE run."""

    run_name: str = opt("reinforce", "name of the run directory under runs/", identity=False)
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
    max_steps: int = opt(50, "optimizer steps")
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] = opt("mean", "what is subtracted from a reward")
    temperature: float = opt(1.0, "sampling temperature; the trainer uses the same")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all, and sampler and trainer agree")
    max_new_tokens: int = opt(64, "longest completion, tokens")
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")
    engine: engines.Kind = opt(
        "local", "who samples rollouts: local = this process, http = `codechat serve`, vllm = vLLM's server", late=True
    )
    engine_url: str = opt("http://127.0.0.1:8000", "server of --engine http and vllm", identity=False)
    engine_dir: Path | None = opt(
        None,
        "directory through which weights reach it: its --reload-from; of vLLM, the one that holds its model hf",
        identity=False,
    )
    engine_key_file: Path | None = opt(None, "file whose first line is its API key", identity=False)
    engine_patience_s: float = opt(600.0, "time that it may be away before the run stops, seconds", identity=False)
    max_off_policy: int = opt(
        0, "steps by which its weights may be older than the policy; 0 = they are pushed before every step", late=True
    )
    importance_cap: float = opt(
        0.0, "largest importance weight of a token, trainer's over sampler's probability; 0 = no weights", late=True
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
    probe_examples: int = opt(0, "behaviour probes of data_dir per cell and evaluation; 0 = none", late=True)
    allow_dead: bool = opt(False, "train although diagnose says DEAD")
    diagnose_groups: int = opt(
        64, "groups judged before the first step; 0 = skip gate and diagnosis (a recipe's stage did it)"
    )
    dead_patience: int = opt(20, "DEAD steps in a row that end the run")
    log_rollouts_every: int = opt(10, "steps between rollouts written to samples.jsonl; 0 = never")
    save_every: int = opt(25, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    keep_every: int = opt(0, "also keep every checkpoint whose step is a multiple of this; 0 = none")
    shard: bool | None = opt(
        None, "split weights and optimizer states over ranks; none = where a replica does not fit", identity=False
    )
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", identity=False)
    seed: int = opt(0, "seed of new weights, problem order and sampling")

    def __post_init__(self) -> None:
        lora.check(self.lora_rank, self.lora_alpha, self.lora_targets)
        engines.check(self)
        for name in ("device_batch_size", "max_steps", "max_new_tokens", "rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.group_size < 2 and self.baseline != "none":
            raise ConfigError(
                f"group_size {self.group_size} with baseline {self.baseline!r}: the advantage is always 0; set --group-size 2 or more"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()} | {"toy": TOY_RUN}
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}


def train(cfg: ReinforceConfig) -> Run:
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
    probes = evaluate.read_probes(cfg.data_dir or "", "select", cfg.probe_examples) if cfg.probe_examples else []
    with dist.session(cfg) as world, StopSignal() as stop:
        device = world.device
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        if parent:
            checkpoint.restore(parent, model)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        peak, _ = hardware.peak_flops(device, dist.compute_dtype(device))
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        engine = engines.open_engine(cfg, tok, give_up=lambda: stop.requested)
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "reinforce", "task": cfg.task, "data_dir": cfg.data_dir}
        ]

        def sample(
            chosen: list[tasks.Problem], seed: int, group_size: int = cfg.group_size, first: int = 0
        ) -> rollout.RolloutBatch:
            with engine.policy(model) as policy:
                return rollout.collect(
                    policy,
                    task,
                    chosen,
                    tok,
                    cfg.tags,
                    group_size=group_size,
                    max_new_tokens=cfg.max_new_tokens,
                    temperature=cfg.temperature,
                    top_k=cfg.top_k,
                    seed=seed,
                    keys=range(first, first + len(chosen)),
                    sampler=engine.sample,
                )

        if cfg.diagnose_groups and not cfg.resume:
            tasks.gold_gate(task, problems[:512]).require()
            engine.push(model, 0)
            first = sample(
                [problems[i % len(problems)] for i in range(cfg.diagnose_groups)],
                seed=cfg.seed + 1,
                group_size=max(8, cfg.group_size // 2),
            )
            found = diagnose.judge(
                first.rewards, first.correct, min_groups=min(cfg.diagnose_groups, diagnose.MIN_GROUPS)
            )
            if found.verdict == "DEAD" and not cfg.allow_dead:
                raise RunError(
                    f"diagnose says DEAD on {cfg.task}: {found.effective_groups} of {found.n_groups} groups have any variance, mean reward "
                    f"{found.reward_mean:.3f}; {found.remedy}; --allow-dead trains all the same"
                )

        start = 0
        run = Run.create(
            cfg.run_name, cfg, kind="reinforce", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
            sentinel.load_state(last.extra["sentinel"])
            start = last.step

        def save(step: int, wait: bool) -> None:
            checkpoint.save(
                run.path,
                step,
                model=lora.merged(model),
                optimizers=optimizers,
                extra={"lora": lora.adapters(model), "sentinel": sentinel.state()},
                meta={"tokenizer": tok.to_dict(), "tags": cfg.tags, "lineage": lineage},
                keep_last=cfg.keep_last,
                keep_every=cfg.keep_every,
                wait=wait,
            )

        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=cfg.max_steps, desc=run.name, unit="step", disable=not world.is_main)
            dead, lost = False, None
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
                            top_k=cfg.top_k,
                            max_new_tokens=cfg.max_new_tokens,
                            ks=cfg.ks,
                            seed=cfg.seed,
                        )
                        matrix = (
                            evaluate.behaviour_matrix(policy, tok, cfg.tags, probes, seed=cfg.seed).metrics()
                            if probes
                            else {}
                        )
                    run.log_eval(step, {**result.row(), **matrix})

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    save(step, wait=done or stopping)
                if done or stopping:
                    break

                # roll out: the next problems of this rank, wrapping around; draws depend on the step and on a problem's place in the global
                # batch, so a resume and another number of ranks draw the same
                began = time.perf_counter()
                at = (step * world.size + world.rank) * cfg.device_batch_size
                chosen = [problems[i % len(problems)] for i in range(at, at + cfg.device_batch_size)]
                try:
                    engine.push(model, step)
                    batch = sample(
                        chosen, seed=cfg.seed * 1_000_003 + step + 2, first=world.rank * cfg.device_batch_size
                    )
                except engines.EngineLost as error:
                    lost = error
                    if step > start:
                        save(step, wait=True)
                    break
                advantage = advantages.group_advantages(batch.rewards, cfg.baseline)  # (P, G)
                n_tokens = float(dist.sum_(torch.tensor(float(batch.n_tokens), device=device)))
                sampled = time.perf_counter()

                # learn: one step on the ids that were sampled, divided by the completion tokens of the whole step
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                before = diagnose.bf16_snapshot(model)
                policy_loss, entropy_sum, packed_tokens, trained, mismatch, off = 0.0, 0.0, 0, 0, 0.0, Counter()
                packs = list(
                    rollout.pack(
                        batch, advantage, row_tokens=cfg.row_tokens, rows=cfg.rows, skip_zero=cfg.entropy_coef == 0
                    )
                )
                for packed in sharding.in_step(model, packs, rollout.idle()):
                    packed = packed.to(device)
                    mask = packed.targets >= 0
                    with dist.autocast(device):
                        logprobs, entropy = model.token_logprobs(
                            packed.ids,
                            packed.targets,
                            temperature=cfg.temperature,
                            entropy_grad=cfg.entropy_coef != 0,
                            positions=packed.positions,
                            mask=packed.mask(),
                        )
                    weight, stats = losses.importance_weights(logprobs, packed.old_logprobs, mask, cfg.importance_cap)
                    loss = losses.policy_gradient_loss(logprobs, packed.advantages * weight, mask, count=n_tokens)
                    if cfg.entropy_coef:
                        loss = loss - cfg.entropy_coef * losses.masked_mean(entropy, mask, n_tokens)
                    loss.backward()
                    policy_loss, trained = policy_loss + loss.item(), trained + packed.n_tokens
                    entropy_sum, packed_tokens = (
                        entropy_sum + float(entropy.detach()[mask].sum()),
                        packed_tokens + int(mask.sum()),
                    )
                    off.update({k: float(v) for k, v in stats.items()})
                    gap = (logprobs.detach() - packed.old_logprobs)[mask].abs()
                    mismatch = max(mismatch, float(gap.max()) if len(gap) else 0.0)
                dist.sum_gradients(model)
                grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

                # log
                seconds = time.perf_counter() - began
                found = diagnose.judge(batch.rewards, batch.correct, min_groups=1)
                row: dict[str, Any] = dist.mean(
                    dict(
                        reward_mean=found.reward_mean,
                        reward_std=found.reward_std,
                        exact_match=found.correct_share,
                        frac_zero_std_groups=found.frac_zero_std,
                        effective_groups=float(found.effective_groups),
                        adv_abs_mean=float(advantage.abs().mean()),
                        completion_tokens_mean=batch.n_tokens / len(batch.completions),
                        truncated_frac=batch.truncated_frac,
                        policy_loss=policy_loss,
                        entropy=entropy_sum / max(1, packed_tokens),
                        logprob_mismatch=mismatch,
                        mismatch_kl=off["mismatch_kl"] / max(1, packed_tokens),
                        importance_capped=off["importance_capped"] / max(1, packed_tokens),
                        **engine.metrics(step),
                        mfu=batch.flops(shape, trained) / (seconds * peak),
                        **batch.tier_shares(task.tiers),
                    )
                )
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
                        tok_per_s=n_tokens / seconds,
                        train_s=seconds - (sampled - began),
                        step_s=seconds,
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
            elif stopping or lost:
                run.stop(f"{lost or 'interrupted'} at step {step}; continue with --resume")
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat reinforce`, `python -m codechat.reinforce` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        ReinforceConfig,
        sys.argv[1:] if argv is None else argv,
        presets=RUN_PRESETS,
        prog="codechat reinforce",
        epilog=__doc__,
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
