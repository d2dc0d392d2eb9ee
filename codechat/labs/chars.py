"""The character laboratory: one text, one model, four ways to learn it: supervised, GRPO, PPO, masked denoising.

    codechat chars --objective supervised --run-name letters
    codechat chars --objective grpo --horizon 70 --partial-logprob 0.05 --beta-kl 0.001 --kl-warmup-tokens 200000
    codechat chars --objective ppo --feed text --source my_text.txt --tokenizer gpt2:1024
    torchrun --standalone --nproc-per-node 2 -m codechat.labs.chars --objective denoise

GRPO and PPO are used as a pretraining objective: the policy draws symbols and each earns a reward where it is the text's own (tasks/chars.py,
dense.py). GRPO compares the draws of one place with each other, PPO with a learned value. The weight of a KL term rises from 0 to --kl-coef over
--kl-warmup-tokens; its reference is the text's bigram, or the starting weights. Supervised learning and denoising (denoise.py) read the same windows.

`tokens` counts places that went through a backward pass, all ranks and epochs; --max-tokens ends every objective at the same count. `epoch` counts
the text: a policy that feeds itself spends --group-size places on one symbol of text. Validation is the cross-entropy of held-out text; for
denoising an upper bound of it. `frac_zero_std_groups` counts places whose draws are all right or all wrong: partial credit makes every place differ,
but does not tell a right draw from a wrong one. A step in which no advantage differs from 0 moves nothing.

Left out: sharded weights, sampling temperatures, a stop symbol.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, RunError
from codechat.distributed import dist, sharding
from codechat.labs import denoise
from codechat.models import generate, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses, per_token_rewards
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.tasks import chars
from codechat.text import tokenizer

VAL_DRAWS = 4  # masks of each held-out window in the bound of a denoising model


@dataclass(frozen=True, kw_only=True)
class CharsConfig:
    """Settings of one run of the character laboratory."""

    run_name: str = opt("chars", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    init_from: str | None = opt(
        None, "checkpoint to start from, such as a supervised run's; none = new weights of --model"
    )
    objective: Literal["supervised", "grpo", "ppo", "denoise"] = opt("grpo", "how the text is learned")
    source: str = opt("embedded", "the text: embedded (the interpreter's help), hub (tiny-Shakespeare), or a text file")
    tokenizer: str = opt("chars", "what a symbol is: chars (the text's own), bytes, gpt2, gpt2:N, python:N")
    model: GPTConfig = opt(
        GPTConfig(depth=4, n_embd=128, n_head=4, block_size=128),
        "architecture; objective denoise makes it see both sides",
    )
    prompt_len: int = opt(1, "symbols of a window that are given")
    horizon: int = opt(70, "symbols of a window that are learned, drawn and rewarded")
    device_batch_size: int = opt(32, "windows per step and device")
    max_tokens: int = opt(1_000_000, "places that go through a backward pass in the whole run, all ranks and epochs")
    feed: Literal["own", "text"] = opt("own", "what the policy reads while it draws: its own symbols, or the text's")
    group_size: int = opt(8, "draws of each place")
    reward_mode: Literal["plus1", "plusminus1"] = opt("plus1", "a right symbol earns 1, a wrong one 0 or -1")
    partial_logprob: float = opt(
        0.0, "weight of partial credit: a log-probability under the policy, added to the reward"
    )
    partial_of: Literal["true", "drawn"] = opt(
        "true",
        "of which symbol: the text's, which cancels within a group that shares its context; or "
        "the drawn one, as the original has it, which rewards being sure",
    )
    baseline: Literal["none", "mean", "leave_one_out", "zscore"] = opt(
        "mean",
        "grpo: what is subtracted from a reward; zscore also divides by the place's "
        "standard deviation, which blows up partial credit where no draw is right",
    )
    gamma: float = opt(
        0.0, "discount of the rewards of later places, with --feed own; 0 = each symbol answers for itself"
    )
    lam: float = opt(0.95, "ppo: decay of generalised advantages")
    reference: Literal["bigram", "random"] = opt(
        "bigram", "frozen policy of the KL term: the text's pairs, or the starting weights"
    )
    kl_coef: float = opt(0.0, "final weight of the KL divergence from the reference; 0 = no reference")
    kl_warmup_tokens: int = opt(200_000, "tokens over which that weight rises from 0")
    kl_kind: Literal["k1", "k2", "k3"] = opt("k3", "estimator of that divergence")
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")
    inner_epochs: int = opt(1, "passes over each batch of draws")
    minibatches: int = opt(1, "optimizer updates per pass; divides device_batch_size")
    clip_eps_low: float = opt(0.2, "a ratio below 1 - this has no gradient where the advantage is negative")
    clip_eps_high: float = opt(0.2, "a ratio above 1 + this has no gradient where the advantage is positive")
    value_coef: float = opt(0.1, "ppo: weight of the value loss; its gradient reaches the policy's body too")
    value_clip_eps: float | None = opt(
        0.2, "ppo: a value may move this far from its value at sampling time; none = unclipped"
    )
    value_lr: float = opt(1e-2, "ppo: learning rate of the value head")
    fill_passes: int = opt(32, "denoise: passes in which a sample is filled in, at most one per symbol")
    optimizer: Literal["adamw", "muon"] = opt("adamw", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(3e-3, "AdamW learning rate")
    muon_lr: float = opt(0.02, "Muon learning rate")
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings")
    warmup_steps: int = opt(20, "steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = opt("cosine", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.1, "share of the learning rate left at the end")
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off")
    eval_every: int = opt(100, "steps between validations and samples; 0 = only the last")
    eval_tokens: int = opt(16_384, "held-out symbols per validation")
    samples: int = opt(4, "texts of one horizon written at each validation, from held-out prompts")
    save_every: int = opt(200, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    log_every: int = opt(10, "steps between logged metrics")
    seed: int = opt(0, "seed of new weights, windows and draws")

    def __post_init__(self) -> None:
        for name in (
            "prompt_len",
            "horizon",
            "device_batch_size",
            "max_tokens",
            "group_size",
            "inner_epochs",
            "minibatches",
            "fill_passes",
            "log_every",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "kl_coef",
            "kl_warmup_tokens",
            "value_coef",
            "value_clip_eps",
            "value_lr",
            "clip_eps_low",
            "clip_eps_high",
        ):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite and not negative")
        if not (self.clip_eps_low < 1 and 0 <= self.lam <= 1 and 0 <= self.gamma <= 1):
            raise ConfigError(
                f"clip_eps_low {self.clip_eps_low}, lam {self.lam}, gamma {self.gamma}; required: below 1, in [0, 1], in [0, 1]"
            )
        if self.prompt_len + self.horizon > self.model.block_size:
            raise ConfigError(
                f"prompt_len {self.prompt_len} + horizon {self.horizon} exceed block_size {self.model.block_size}; lower --horizon, or raise "
                f"--model.block-size to {self.prompt_len + self.horizon}"
            )
        if self.device_batch_size % self.minibatches:
            raise ConfigError(f"minibatches {self.minibatches} must divide device_batch_size {self.device_batch_size}")
        if self.objective == "grpo" and self.group_size < 2 and self.baseline != "none":
            raise ConfigError(
                f"group_size {self.group_size} with baseline {self.baseline!r}: the advantage is always 0; set --group-size 2 or more"
            )
        if self.gamma and self.feed == "text":
            raise ConfigError(
                f"gamma {self.gamma} with feed text: what is drawn changes nothing that comes later; set --gamma 0, or --feed own"
            )
        if not self.model.causal:
            raise ConfigError(
                "model.causal is false; set --objective denoise, which makes it so: any other would see the symbol that it predicts"
            )

    @property
    def learns_from_rewards(self) -> bool:
        return self.objective in ("grpo", "ppo")

    @property
    def shape(self) -> GPTConfig:
        """The model's configuration but for its vocabulary: the tag of a denoising model is its mask, the others have none."""
        masked = self.objective == "denoise"
        return replace(self.model, causal=not masked, n_tags=int(masked))

    def tokens_per_step(self, ranks: int = 1) -> int:
        """Places that go through a backward pass in one step."""
        places = self.device_batch_size * self.horizon * ranks
        if not self.learns_from_rewards:
            return places
        return places * self.inner_epochs * (self.group_size if self.feed == "own" else 1)


@torch.no_grad()
def validate(model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device) -> dict[str, Any]:
    """Cross-entropy of held-out windows, each place after the text's own symbols (for a denoising model the bound of it), in nats per symbol and bits
    per byte of text; and the chance that a draw is right, which is the reward that a policy fed by the text can expect. Sums over ranks."""
    P, T = cfg.prompt_len, cfg.horizon
    windows = text.val_windows(P + T, T, -(-cfg.eval_tokens // T))
    mine = torch.arange(dist.rank(), len(windows), dist.world_size())
    rng, sums = torch.Generator().manual_seed(cfg.seed), torch.zeros(4, dtype=torch.float64)
    ranks = [denoise.random_ranks(len(windows), T, rng) for _ in range(VAL_DRAWS)] if not model.cfg.causal else []
    size = text.symbol_bytes()
    for rows in mine.split(cfg.device_batch_size):
        ids = windows[rows].to(device)
        with dist.autocast(device):
            if model.cfg.causal:
                found = per_token_rewards.symbol_logprobs(
                    model, ids[:, :-1], per_token_rewards.states(model, ids[:, :-1], T), ids[:, None, -T:]
                )[0].double()
                nats, right = -found.sum(), found.exp().sum()
            else:
                counts = [
                    denoise.mask_counts(rows, len(windows), T, (i + 0.5) / VAL_DRAWS).to(device)
                    for i in range(VAL_DRAWS)
                ]
                nats = (
                    sum(denoise.bound(model, ids, c, r[rows].to(device)).double().sum() for c, r in zip(counts, ranks))
                    / VAL_DRAWS
                )
                right = torch.zeros(())
        sums += torch.tensor(
            [float(nats), float(right), len(rows) * T, int(size[windows[rows, -T:]].sum())], dtype=torch.float64
        )
    nats, right, symbols, n_bytes = dist.sum_(sums.to(device)).tolist()
    found = {
        "val_loss": nats / symbols,
        "val_bpb": nats / math.log(2) / n_bytes,
        "val_symbols": int(symbols),
        "val_bound": not model.cfg.causal,
    }
    return found | ({"val_accuracy": right / symbols} if model.cfg.causal else {})


@torch.no_grad()
def write_samples(
    model: GPT, text: chars.Text, cfg: CharsConfig, device: torch.device, length: int | None = None
) -> list[dict[str, str]]:
    """Texts of `length` symbols (default: the horizon) after held-out prompts."""
    T = length or cfg.horizon
    prompts = text.val_windows(cfg.prompt_len, cfg.prompt_len + cfg.horizon, cfg.samples).to(device)
    with dist.autocast(device):
        if model.cfg.causal:
            done = generate.sample(model, prompts.tolist(), max_new_tokens=T, seed=cfg.seed)
            drawn = [c.ids for c in done]
        else:
            rng = torch.Generator().manual_seed(cfg.seed)
            drawn = denoise.fill_in(model, prompts, T, passes=min(T, cfg.fill_passes), rng=rng)[
                :, cfg.prompt_len :
            ].tolist()
    return [
        dict(prompt=text.tokenizer.decode(p), completion=text.tokenizer.decode(d))
        for p, d in zip(prompts.tolist(), drawn)
    ]


def train(cfg: CharsConfig) -> Run:
    """Learn the text; returns the finished run. Raises UserError before anything is written for bad settings."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    text = chars.load(cfg.source, tokenizer.from_dict(parent.meta["tokenizer"]) if parent else cfg.tokenizer)
    shape = (
        config.from_dict(GPTConfig, parent.meta["model_config"])
        if parent
        else replace(cfg.shape, vocab_size=text.tokenizer.n_vocab)
    )
    if shape.causal == (cfg.objective == "denoise"):
        raise ConfigError(
            f"{cfg.init_from} has causal={shape.causal}; objective {cfg.objective} takes the other kind; start from another checkpoint"
        )
    if cfg.prompt_len + cfg.horizon > shape.block_size:
        raise ConfigError(
            f"prompt_len {cfg.prompt_len} + horizon {cfg.horizon} exceed block_size {shape.block_size} of {cfg.init_from}; lower --horizon"
        )
    cfg = replace(cfg, model=replace(shape, causal=True))
    P, T, W, G = cfg.prompt_len, cfg.horizon, cfg.device_batch_size, cfg.group_size
    with dist.session(cfg) as world, StopSignal() as stop:
        device, per_step = world.device, cfg.tokens_per_step(world.size)
        steps = cfg.max_tokens // per_step
        if not steps:
            raise ConfigError(
                f"max_tokens {cfg.max_tokens} is less than the {per_step} of one step; raise it, or lower --device-batch-size"
            )
        mine = torch.arange(world.rank * W, (world.rank + 1) * W)  # the windows of this rank among those of all
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=False)
        if parent:
            checkpoint.restore(parent, model)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        value_head = torch.nn.Linear(shape.n_embd, 1, device=device)
        torch.nn.init.zeros_(value_head.weight), torch.nn.init.zeros_(value_head.bias)
        if cfg.objective == "ppo":
            optimizers += optim.build(value_head, lr=cfg.value_lr, weight_decay=0.0)
        bigram, frozen = chars.Bigram(text.train, shape.owned).to(device), None
        if cfg.kl_coef and cfg.reference == "random":
            frozen = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=False).requires_grad_(False)
            if parent:
                checkpoint.restore(parent, frozen)

        def reference_logprobs(part: per_token_rewards.DenseBatch) -> Tensor:
            """(R, S, T) of the drawn symbols."""
            if frozen is None:
                return bigram.logprobs(part.before.expand_as(part.drawn), part.drawn)
            with torch.no_grad(), dist.autocast(device):
                return per_token_rewards.symbol_logprobs(
                    frozen, part.inputs, per_token_rewards.states(frozen, part.inputs, T), part.drawn
                )[0]

        def values_of(hidden: Tensor) -> Tensor:
            """(R, T) of states (R, T, D), in float32 also under autocast."""
            return (hidden.float() * value_head.weight[0]).sum(-1) + value_head.bias

        start = 0
        run = Run.create(
            cfg.run_name, cfg, kind="chars", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, model, optimizers)
            value_head.load_state_dict(last.extra["value_head"])
            start = last.step
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "chars", "objective": cfg.objective}
        ]
        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=steps, desc=run.name, unit="step", disable=not world.is_main)
            began, logged = time.perf_counter(), start
            for step in range(start, steps + 1):
                done = step == steps
                stopping = dist.any(stop.requested)

                # once in a while: evaluate
                if (done or (cfg.eval_every and step % cfg.eval_every == 0)) and not (step == start and run.resumed):
                    with sharding.whole(model) as reader:
                        run.log_eval(step, {**validate(reader, text, cfg, device), "tokens": step * per_step})
                        if cfg.samples:
                            run.log_samples(step, write_samples(reader, text, cfg, device))
                    began, logged = time.perf_counter(), step

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    checkpoint.save(
                        run.path,
                        step,
                        model=model,
                        optimizers=optimizers,
                        extra={"value_head": {k: v.clone() for k, v in value_head.state_dict().items()}},
                        meta={"tokenizer": text.tokenizer.to_dict(), "tags": "text", "lineage": lineage},
                        keep_last=cfg.keep_last,
                        wait=done or stopping,
                    )
                if done or stopping:
                    break

                # read: windows and all randomness of the step hang on the seed and the step; every rank takes its part of the same draws
                rng = torch.Generator().manual_seed(cfg.seed * 1_000_003 + step + 2)
                windows = text.draw_windows(W * world.size, P + T, rng)[mine].to(device)
                seen: Counter[str] = Counter()
                row: dict[str, float] = {}
                if cfg.learns_from_rewards:  # draw symbols, reward them, credit each draw
                    with torch.no_grad(), dist.autocast(device):
                        model.eval()
                        if cfg.feed == "own":
                            batch = per_token_rewards.draw_fed_by_itself(
                                model,
                                windows,
                                T,
                                G,
                                seed=cfg.seed * 1_000_003 + step + 2,
                                first=int(mine[0]),
                                credit=bool(cfg.partial_logprob),
                            )
                        else:
                            uniforms = torch.rand(W * world.size, G, T, generator=rng, dtype=torch.float64)[mine].to(
                                device
                            )
                            batch = per_token_rewards.draw_fed_by_text(model, windows, T, G, uniforms)
                        if cfg.objective == "ppo":
                            old_values = values_of(per_token_rewards.states(model, batch.inputs, T))[:, None].expand_as(
                                batch.drawn
                            )
                        model.train()
                    credit = batch.truth_logprobs if cfg.partial_of == "true" else batch.logprobs
                    rewards = chars.dense_rewards(
                        batch.drawn, batch.truth, cfg.reward_mode, partial=cfg.partial_logprob, credit=credit
                    )  # (R, S, T)
                    if cfg.objective == "grpo":
                        advantage = per_token_rewards.place_advantages(rewards, G, cfg.baseline, cfg.gamma)
                    else:
                        flat = rewards.flatten(0, 1)
                        advantage, returns = (
                            x.view_as(rewards)
                            for x in advantages.estimate_gae(
                                flat, old_values.flatten(0, 1), torch.ones_like(flat), gamma=cfg.gamma, lam=cfg.lam
                            )
                        )
                        row["explained_variance"] = explained_variance(returns, old_values)
                    kl_coef = chars.annealed(cfg.kl_coef, step * per_step, cfg.kl_warmup_tokens)
                    flat_places = (
                        advantages.zero_variance(
                            per_token_rewards.group_by_place((batch.drawn == batch.truth).float(), G)
                        )
                        .float()
                        .mean()
                    )
                    row |= dict(
                        reward_mean=float(rewards.mean()),
                        symbol_accuracy=float((batch.drawn == batch.truth).float().mean()),
                        adv_abs_mean=float(advantage.abs().mean()),
                        frac_zero_std_groups=float(flat_places),
                        kl_weight=kl_coef,
                    )
                    moves = (advantage != 0) if cfg.objective == "grpo" else (rewards != rewards[0, 0, 0])
                    live = dist.any(
                        bool(moves.any())
                    )  # else neither a KL term nor the value's errors nor momentum may move the policy

                # learn: each minibatch is one update, its loss divided by the places of all ranks
                scale = optim.lr_scale(
                    step,
                    max_steps=steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                grad_norm, updates = 0.0, cfg.inner_epochs * cfg.minibatches if cfg.learns_from_rewards else 1
                for update in range(updates if not cfg.learns_from_rewards or live else 0):
                    if cfg.objective == "supervised":
                        targets = windows[:, 1:].clone()
                        targets[:, : P - 1] = -100
                        with dist.autocast(device):
                            loss = model.loss(windows[:, :-1], targets, reduction="sum") / (W * T * world.size)
                        seen["train_loss"] += float(loss.detach()) * world.size
                    elif cfg.objective == "denoise":
                        offset = float(torch.rand((), generator=rng, dtype=torch.float64))
                        counts = denoise.mask_counts(mine, W * world.size, T, offset).to(device)
                        ranks = denoise.random_ranks(W * world.size, T, rng)[mine].to(device)
                        with dist.autocast(device):
                            loss = denoise.bound(model, windows, counts, ranks).sum() / (W * T * world.size)
                        seen["train_loss"] += float(loss.detach()) * world.size
                    else:
                        chosen = list(range(update % cfg.minibatches, W, cfg.minibatches))
                        part, at = batch.take(chosen), batch.rows(chosen)
                        with dist.autocast(device):
                            hidden = per_token_rewards.states(model, part.inputs, T)
                            logprobs, entropy = per_token_rewards.symbol_logprobs(
                                model, part.inputs, hidden, part.drawn, entropy_grad=cfg.entropy_coef != 0
                            )
                        on = torch.ones_like(logprobs)
                        draw_loss, stats = losses.clipped_policy_loss(
                            logprobs,
                            part.logprobs,
                            advantage[at],
                            on,
                            clip_eps_low=cfg.clip_eps_low,
                            clip_eps_high=cfg.clip_eps_high,
                        )
                        loss = draw_loss.mean() - cfg.entropy_coef * entropy.mean()
                        seen["policy_loss"] += float(loss.detach()) / updates
                        if cfg.kl_coef:
                            kl = losses.kl_estimate(logprobs, reference_logprobs(part), cfg.kl_kind).mean()
                            loss = loss + kl_coef * kl
                            seen["kl_ref"] += float(kl.detach()) / updates
                        if cfg.objective == "ppo":
                            values = values_of(hidden)[:, None].expand_as(part.drawn)
                            value_loss = losses.value_loss(
                                values, old_values[at], returns[at], cfg.value_clip_eps
                            ).mean()
                            loss = loss + cfg.value_coef * value_loss
                            seen["value_loss"] += float(value_loss.detach()) / updates
                        loss = loss / world.size  # gradients of ranks are summed
                        clipped = (stats["clipped_low"] + stats["clipped_high"]) / on.numel()
                        seen.update(
                            {"entropy": float(entropy.detach().mean()) / updates, "clip_frac": float(clipped) / updates}
                        )
                        if update == 0:
                            row["logprob_mismatch"] = float((logprobs.detach() - part.logprobs).abs().max())
                    loss.backward()
                    for trained in (model, value_head) if cfg.objective == "ppo" else (model,):
                        dist.sum_gradients(trained)
                    weights = [
                        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
                    ]
                    grad_norm = float(torch.nn.utils.clip_grad_norm_(weights, cfg.grad_clip or math.inf))
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)
                bar.update(1)

                # log
                if (step + 1) % cfg.log_every == 0 or step + 1 == steps:
                    rate = per_step * (step + 1 - logged) / (time.perf_counter() - began)
                    values = dist.mean(row | dict(seen))
                    run.log(
                        step + 1,
                        dict(
                            values,
                            tokens=(step + 1) * per_step,
                            epoch=(step + 1) * W * T * world.size / len(text.train),
                            lr=cfg.lr * scale,
                            grad_norm=grad_norm,
                            tok_per_s=rate,
                        ),
                    )
                    if not math.isfinite(sum(values.values())):
                        raise RunError(
                            f"a metric of step {step + 1} is not finite; lower --lr; the last checkpoint is kept"
                        )
                    bar.set_postfix(
                        {
                            k: f"{values[k]:.3f}"
                            for k in ("train_loss", "reward_mean", "frac_zero_std_groups")
                            if k in values
                        }
                    )
                    began, logged = time.perf_counter(), step + 1
            bar.close()
            if stopping:
                run.stop(f"interrupted at step {step}; continue with --resume")
    return run


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the returns' variance, over all ranks, that the values predict; 0 where there is none to predict."""
    error = returns - values
    sums = torch.stack([x.double().sum() for x in (torch.ones_like(returns), returns, returns**2, error**2)])
    n, r1, r2, unexplained = dist.sum_(sums).tolist()
    variance = r2 - r1**2 / n
    return 1 - unexplained / variance if variance > 0 else 0.0


def main(argv: list[str] | None = None) -> int:
    """`codechat chars`, `python -m codechat.labs.chars` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(CharsConfig, sys.argv[1:] if argv is None else argv, prog="codechat chars", epilog=__doc__)
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
