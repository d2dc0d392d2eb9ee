"""GRPO on a task's reward: clipped ratios to the policy that sampled, over groups, and its variants Dr. GRPO, DAPO and GSPO.

    codechat grpo --init-from my-sft --task funcall --data-dir data/nano --run-name my-grpo
    codechat grpo --init-from qwen --preset lora --task gsm8k --data-dir hub --run-name qwen-grpo      adapters on an imported checkpoint
    torchrun --standalone --nproc-per-node 8 -m codechat.grpo --init-from d20-sft --task funcall --data-dir data/sft --run-name d20-grpo

What REINFORCE (reinforce.py) does, and four things more: several updates on one batch of rollouts, with the ratio to the sampling policy
clipped; how tokens are weighed and rewards scaled; groups without variance replaced by fresh ones (--resample-rounds); a penalty on the KL
divergence from the starting policy (--kl-coef), in the loss or in the reward. --variant sets what the papers set; any flag overrides it.

    grpo     arXiv:2402.03300   reward / group's std; mean over each completion's tokens; clip 0.2
    dr_grpo  arXiv:2503.20783   no std, no division by length: sum over max_new_tokens
    dapo     arXiv:2503.14476   mean over all tokens; clip 0.2 below, 0.28 above; groups without variance replaced
    gspo     arXiv:2507.18071   one ratio for a completion; clip 0.0003 below, 0.0004 above

A step is one batch of rollouts: inner_epochs x minibatches optimizer updates. A KL penalty alone moves a policy that nothing rewards:
20 DEAD steps in a row end the run, and an update without any advantage is not made. Two ranks do what one does with the whole batch.
Left out: truncated sampling (sampler and trainer must agree), penalties on overlong completions.
"""

from __future__ import annotations

import math
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
from codechat.tasks.reasoning import LORA_RUN
from codechat.tasks.toy import TOY_RUN
from codechat.text import tokenizer

PAPER = "; none = as --variant has it"
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": dict(
        baseline="zscore", weighing="sequence", ratio="token", clip_eps_low=0.2, clip_eps_high=0.2, resample_rounds=0
    ),
    "dr_grpo": dict(
        baseline="mean", weighing="constant", ratio="token", clip_eps_low=0.2, clip_eps_high=0.2, resample_rounds=0
    ),
    "dapo": dict(
        baseline="zscore", weighing="token", ratio="token", clip_eps_low=0.2, clip_eps_high=0.28, resample_rounds=4
    ),
    "gspo": dict(
        baseline="zscore",
        weighing="sequence",
        ratio="sequence",
        clip_eps_low=3e-4,
        clip_eps_high=4e-4,
        resample_rounds=0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Settings of one GRPO run."""

    run_name: str = opt("grpo", "name of the run directory under runs/", identity=False)
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
    variant: Literal["grpo", "dr_grpo", "dapo", "gspo"] = opt(
        "grpo", "the paper whose settings fill what is none below"
    )
    device_batch_size: int = opt(16, "problems per step and device")
    group_size: int = opt(16, "completions per problem")
    max_steps: int = opt(50, "batches of rollouts")
    inner_epochs: int = opt(1, "passes over each batch of rollouts")
    minibatches: int = opt(
        1,
        "optimizer updates per pass; divides device_batch_size. With one update per batch the ratio is 1 and nothing is clipped",
    )
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] | None = opt(
        None, "what is subtracted from a reward" + PAPER
    )
    weighing: Literal["sequence", "token", "constant"] | None = opt(
        None, "what a token's loss is divided by: its completion's length, all tokens, max_new_tokens" + PAPER
    )
    ratio: Literal["token", "sequence"] | None = opt(None, "one ratio per token, or one per completion" + PAPER)
    clip_eps_low: float | None = opt(
        None, "a ratio below 1 - this has no gradient where the advantage is negative" + PAPER
    )
    clip_eps_high: float | None = opt(
        None, "a ratio above 1 + this has no gradient where the advantage is positive" + PAPER
    )
    resample_rounds: int | None = opt(
        None, "times that groups without variance are replaced by those of further problems; 0 = never" + PAPER
    )
    kl_coef: float = opt(0.0, "weight of the KL divergence from the starting policy; 0 = no reference model")
    kl_kind: Literal["k1", "k2", "k3"] = opt("k3", "estimator of that divergence")
    kl_in: Literal["loss", "reward"] = opt(
        "loss", "where it enters; k1 in the loss is noise of mean zero, k1 in the reward is right"
    )
    old_logprobs: Literal["sampler", "trainer"] = opt(
        "sampler",
        "whose log-probabilities the ratio starts from; trainer costs one more pass and "
        "keeps a mismatch between the two out of the ratio",
    )
    temperature: float = opt(1.0, "sampling temperature; the trainer uses the same")
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
        engines.check(self)
        for name in ("device_batch_size", "max_steps", "max_new_tokens", "rows", "inner_epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.device_batch_size % self.minibatches:
            raise ConfigError(
                f"minibatches {self.minibatches} must divide device_batch_size {self.device_batch_size}; set --minibatches 1 or another divisor"
            )
        if self.group_size < 2 and self.baseline != "none":
            raise ConfigError(
                f"group_size {self.group_size} with a group baseline: the advantage is always 0; set --group-size 2 or more"
            )
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")
        for name in ("clip_eps_low", "clip_eps_high", "kl_coef", "resample_rounds"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if (self.clip_eps_low or 0) >= 1:
            raise ConfigError(f"clip_eps_low {self.clip_eps_low}; a ratio is never below 0, so it must be below 1")
        if self.importance_cap and self.old_logprobs == "sampler":
            raise ConfigError(
                f"importance_cap {self.importance_cap} with --old-logprobs sampler, whose ratio starts from the sampler already; set "
                "--old-logprobs trainer, or --importance-cap 0"
            )

    def resolved(self) -> GRPOConfig:
        """With what is none filled in from the variant."""
        return replace(
            self, **{name: value for name, value in VARIANTS[self.variant].items() if getattr(self, name) is None}
        )


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()} | {"toy": TOY_RUN, "lora": LORA_RUN}
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}


def train(cfg: GRPOConfig) -> Run:
    """Optimise the task's reward; returns the finished run. Raises UserError before anything is written for bad settings or a DEAD task."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    tok = tokenizer.from_dict(parent.meta["tokenizer"]) if parent else tokenizer.load(cfg.tokenizer)
    shape = (
        config.from_dict(GPTConfig, parent.meta["model_config"])
        if parent
        else replace(cfg.model, vocab_size=tok.n_vocab)
    )
    cfg = replace(cfg.resolved(), model=shape, tags=parent.meta["tags"] if parent else cfg.tags)
    task = tasks.load(cfg.task, **({"source": cfg.data_dir} if cfg.data_dir else {}))
    problems, select = task.problems("train", seed=cfg.seed), task.problems("select", limit=cfg.eval_examples)
    kl_in_loss, kl_in_reward = (bool(cfg.kl_coef) and cfg.kl_in == where for where in ("loss", "reward"))
    skip_zero = not (kl_in_loss or cfg.entropy_coef)
    with dist.session(cfg) as world, StopSignal() as stop:
        device = world.device
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        if parent:
            checkpoint.restore(parent, model)
        reference = (
            sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
            if cfg.kl_coef
            else None
        )
        if reference is not None and parent:
            checkpoint.restore(parent, reference)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        peak, _ = hardware.peak_flops(device, dist.compute_dtype(device))
        sentinel = diagnose.Sentinel(cfg.dead_patience)
        engine = engines.open_engine(cfg, tok, give_up=lambda: stop.requested)
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "grpo", "task": cfg.task, "data_dir": cfg.data_dir}
        ]

        def sample(at: int, n: int, seed: int, key: int = 0, group_size: int = cfg.group_size) -> rollout.RolloutBatch:
            """Rollouts of the n problems from number `at` on, wrapping around; `key` numbers the first group within its step."""
            with engine.policy(model) as policy:
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
                    sampler=engine.sample,
                )

        def score(scorer: GPT, batch: rollout.RolloutBatch) -> torch.Tensor:
            with sharding.whole(scorer) as reader, dist.autocast(device):
                return rollout.score_logprobs(
                    reader, batch, temperature=cfg.temperature, row_tokens=cfg.row_tokens, rows=cfg.rows
                )

        if cfg.diagnose_groups and not cfg.resume:
            tasks.gold_gate(task, problems[:512]).require()
            engine.push(model, 0)
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
            cfg.run_name, cfg, kind="grpo", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
            sentinel.load_state(last.extra["sentinel"])
            start, cursor = last.step, last.extra["cursor"]

        def save(step: int, wait: bool) -> None:
            checkpoint.save(
                run.path,
                step,
                model=lora.merged(model),
                optimizers=optimizers,
                extra={"lora": lora.adapters(model), "sentinel": sentinel.state(), "cursor": cursor},
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
                            max_new_tokens=cfg.max_new_tokens,
                            ks=cfg.ks,
                            seed=cfg.seed,
                        )
                    run.log_eval(step, result.row())

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    save(step, wait=done or stopping)
                if done or stopping:
                    break

                # roll out: the next problems of this rank; draws hang on the step and on the group's number over all ranks
                began, seed, size = time.perf_counter(), cfg.seed * 1_000_003 + step + 2, cfg.device_batch_size
                try:
                    engine.push(model, step)
                    batch = sample(cursor + world.rank * size, size, seed, key=world.rank * size)
                    found, drawn = diagnose.judge(batch.rewards, batch.correct, min_groups=1), world.size * size
                    for _ in range(
                        cfg.resample_rounds
                    ):  # all ranks count together: what one asks for decides what the next one draws
                        flat = advantages.zero_variance(batch.rewards).nonzero()[:, 0].tolist()
                        asked = dist.sum_(
                            torch.tensor([len(flat) * (r == world.rank) for r in range(world.size)], device=device)
                        ).tolist()
                        if not sum(asked):
                            break
                        at = drawn + sum(asked[: world.rank])
                        batch = batch.replace(
                            flat, sample(cursor + at, len(flat), seed, key=at)
                        )  # also where it asks for none: ranks stay in step
                        drawn += sum(asked)
                except engines.EngineLost as error:
                    lost = error
                    if step > start:
                        save(step, wait=True)
                    break
                cursor += drawn
                sampler = batch.logprobs().to(device)  # (N, C)
                old = score(model, batch) if cfg.old_logprobs == "trainer" else sampler  # (N, C)
                importance, off = losses.importance_weights(
                    old, sampler, batch.mask().to(device), cfg.importance_cap
                )  # (N, C)
                ref = score(reference, batch) if reference is not None else old
                advantage = advantages.group_advantages(batch.rewards, cfg.baseline)  # (P, G)
                if (
                    kl_in_reward
                ):  # centred as the reward is, but never divided by its std, which would blow it up where rewards agree
                    penalty = (losses.kl_estimate(old, ref, cfg.kl_kind).cpu() * batch.mask()).sum(1).view_as(advantage)
                    advantage = advantage - cfg.kl_coef * advantages.group_advantages(
                        penalty, "mean" if cfg.baseline == "zscore" else cfg.baseline
                    )
                sampled = time.perf_counter()

                # learn: each minibatch is one update, its loss divided by the sequences or tokens of all ranks
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                before, seen, trained, policy_loss, grad_norm, mismatch, ratio_max = (
                    diagnose.bf16_snapshot(model),
                    Counter(),
                    0,
                    0.0,
                    0.0,
                    0.0,
                    0.0,
                )
                groups = [range(m, size, cfg.minibatches) for m in range(cfg.minibatches)]
                parts = [batch.take(g) for g in groups]
                counts = dist.sum_(
                    torch.tensor(
                        [
                            [len(p.completions), p.n_tokens, int((advantage[list(g)] != 0).sum())]
                            for p, g in zip(parts, groups)
                        ],
                        dtype=torch.float64,
                    )
                ).tolist()
                for update in range(cfg.inner_epochs * cfg.minibatches):
                    at = update % cfg.minibatches
                    part, chosen, (n_sequences, n_tokens, n_live) = parts[at], list(groups[at]), counts[at]
                    if not advantages.worth_an_update(n_live):
                        continue
                    rows_of = torch.arange(len(batch.completions)).view(size, -1)[chosen].flatten()  # (n,) in the batch
                    packs = list(
                        rollout.pack(
                            part, advantage[chosen], row_tokens=cfg.row_tokens, rows=cfg.rows, skip_zero=skip_zero
                        )
                    )
                    for packed in sharding.in_step(model, packs, rollout.idle()):
                        rows, packed = rows_of[packed.rows()], packed.to(device)
                        with dist.autocast(device):
                            logprobs, entropy = model.token_logprobs(
                                packed.ids,
                                packed.targets,
                                temperature=cfg.temperature,
                                entropy_grad=cfg.entropy_coef != 0,
                                positions=packed.positions,
                                mask=packed.mask(),
                            )
                        new, entropy = packed.unpack(logprobs), packed.unpack(entropy)  # (B, C)
                        mask, C = packed.unpack(packed.completion >= 0), new.shape[1]
                        token_loss, stats = losses.clipped_policy_loss(
                            new,
                            old[rows, :C],
                            advantage.view(-1, 1)[rows].to(device),
                            mask,
                            level=cfg.ratio,
                            clip_eps_low=cfg.clip_eps_low,
                            clip_eps_high=cfg.clip_eps_high,
                        )
                        token_loss = token_loss * importance[rows, :C]
                        if kl_in_loss:
                            token_loss = token_loss + cfg.kl_coef * losses.kl_estimate(new, ref[rows, :C], cfg.kl_kind)
                        if cfg.entropy_coef:
                            token_loss = token_loss - cfg.entropy_coef * entropy
                        weights = losses.token_weights(
                            mask.sum(1),
                            cfg.weighing,
                            n_sequences=n_sequences,
                            n_tokens=n_tokens,
                            max_tokens=cfg.max_new_tokens,
                        )
                        loss = losses.masked_sum(token_loss * weights, mask)
                        loss.backward()
                        policy_loss, trained = policy_loss + loss.item(), trained + packed.n_tokens
                        ratio_max = max(ratio_max, float(stats.pop("ratio_max")))
                        kl_ref = (
                            losses.masked_sum(losses.kl_estimate(new.detach(), ref[rows, :C]), mask)
                            if reference is not None
                            else 0.0
                        )
                        seen.update(
                            {
                                k: float(v)
                                for k, v in (stats | dict(entropy=entropy.detach().sum(), kl_ref=kl_ref)).items()
                            }
                        )
                        if update == 0:
                            gap = (logprobs.detach() - packed.old_logprobs)[packed.completion >= 0].abs()
                            mismatch = max(mismatch, float(gap.max()) if len(gap) else 0.0)
                    dist.sum_gradients(model)
                    grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)

                # log
                seconds = time.perf_counter() - began
                row: dict[str, Any] = dist.mean(
                    dict(
                        reward_mean=found.reward_mean,
                        reward_std=found.reward_std,
                        exact_match=found.correct_share,
                        frac_zero_std_groups=found.frac_zero_std,
                        effective_groups=world.size * float((~advantages.zero_variance(batch.rewards)).sum()),
                        adv_abs_mean=float(advantage.abs().mean()),
                        completion_tokens_mean=batch.n_tokens / len(batch.completions),
                        truncated_frac=batch.truncated_frac,
                        policy_loss=world.size * policy_loss,
                        logprob_mismatch=mismatch,
                        ratio_max=ratio_max,
                        mfu=batch.flops(shape, trained) / (seconds * peak),
                        **(
                            {k: float(v) / max(1, batch.n_tokens) for k, v in off.items()}
                            if cfg.old_logprobs == "trainer"
                            else {}
                        ),
                        **engine.metrics(step),
                        **{
                            f"sum/{k}": seen[k]
                            for k in ("tokens", "clipped_low", "clipped_high", "kl_old", "kl_ref", "entropy")
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
                        resampled_groups=drawn - world.size * size,
                        weights_changed_bf16=diagnose.weights_changed_bf16(before, model),
                        tok_per_s=sum(n for _, n, _ in counts) / seconds,
                        sample_s=sampled - began,
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
    """`codechat grpo`, `python -m codechat.grpo` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        GRPOConfig, sys.argv[1:] if argv is None else argv, presets=RUN_PRESETS, prog="codechat grpo", epilog=__doc__
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
