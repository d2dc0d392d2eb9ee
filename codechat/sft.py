"""Supervised fine-tuning on conversations: joint code, function calls and plain chat, mixed by supervised tokens.

    codechat sft --init-from my-pretrain --data-dir data/nano --run-name my-sft
    torchrun --standalone --nproc-per-node 8 -m codechat.sft --init-from d20 --data-dir data/sft --run-name d20-sft

Only assistant bodies and their closing tag carry loss. Several conversations share a row and cannot see each other. While it trains, the
loop watches each domain's held-out loss (three rises in a row are reported; --stop-on-regression ends the run) and the 2 x 2 behaviour
probes: code or a tool asked for, tools present or absent.

Same phases as pretrain: evaluate, save, learn, log. Left out: preference terms (`preference`).
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tqdm import tqdm

from codechat.core import config, errors
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import conversations
from codechat.distributed import dist, hardware, sharding
from codechat.evaluation import evaluate
from codechat.evaluation.domain_loss import held_out_losses
from codechat.models import lora, optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.text import chat, tokenizer


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Settings of one supervised fine-tuning run."""

    run_name: str = opt("sft", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    init_from: str | None = opt(None, "checkpoint to start from; none = new weights of --model")
    data_dir: str = opt(
        "data/sft", "directory with DOMAIN.SPLIT.jsonl made by `codechat data sft` and `codechat data calls`"
    )
    mix: tuple[str, ...] = opt((), "share of each domain, such as calls=0.7 code=0.2 chat=0.1; empty = as the data are")
    mix_by: Literal["tokens", "rows"] = opt(
        "tokens", "what the shares of --mix are of: supervised tokens, or conversations", late=True
    )
    tags: Literal["reserved", "text", "template"] = opt(
        "reserved", "turn tags as single reserved ids, as plain text, or by an imported model's template"
    )
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none")
    seq_len: int | None = opt(None, "tokens per packed row; none = the model's block size")
    device_batch_size: int = opt(8, "packed rows per microbatch and device")
    grad_accum: int = opt(1, "microbatches per step")
    max_steps: int = opt(500, "optimizer steps")
    lora_rank: int = opt(lora.RANK, "rank of low-rank updates of frozen weights; 0 = train all weights", late=True)
    lora_alpha: float = opt(lora.ALPHA, "their scale is alpha / rank", late=True)
    lora_targets: tuple[str, ...] = opt(lora.CHOSEN, "matrices that get one: qkv out gate up down", late=True)
    optimizer: Literal["adamw", "muon"] = opt("muon", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(1e-3, "AdamW learning rate")
    muon_lr: float = opt(0.01, "Muon learning rate")
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings")
    warmup_steps: int = opt(10, "steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = opt("wsd", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.05, "share of the learning rate left at the end")
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off")
    eval_every: int = opt(100, "steps between held-out losses and probes; 0 = only the last")
    eval_examples: int = opt(64, "held-out conversations per domain")
    probe_examples: int = opt(32, "behaviour probes per cell; 0 = none")
    stop_on_regression: bool = opt(False, "end the run when a domain's held-out loss rises three evaluations in a row")
    save_every: int = opt(200, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    keep_every: int = opt(0, "also keep every checkpoint whose step is a multiple of this; 0 = none")
    log_every: int = opt(10, "steps between logged metrics")
    compile: bool | None = opt(None, "torch.compile the step; none = where it pays", late=True)
    shard: bool | None = opt(
        None, "split weights and optimizer states over ranks; none = where a replica does not fit", identity=False
    )
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", identity=False)
    seed: int = opt(0, "seed of new weights and of the data order")

    def __post_init__(self) -> None:
        lora.check(self.lora_rank, self.lora_alpha, self.lora_targets)
        for name in ("device_batch_size", "grad_accum", "max_steps", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        self.weights  # noqa: B018  (validates)

    @property
    def weights(self) -> dict[str, float] | None:
        """Parsed --mix: domain -> share; None where the data's own shares stand."""
        shares = {}
        for item in self.mix:
            domain, _, share = item.partition("=")
            try:
                shares[domain] = float(share)
            except ValueError:
                raise ConfigError(f"--mix {item!r}; required DOMAIN=SHARE, such as calls=0.7") from None
        if any(not (0 <= s < math.inf) for s in shares.values()) or (shares and sum(shares.values()) == 0):
            raise ConfigError(f"--mix {' '.join(self.mix)}: shares must be finite, not negative, and not all 0")
        return shares or None


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()}
RUN_PRESETS["nano"] |= {"tokenizer": "gpt2:4096"}


def regressed(history: list[dict[str, float]], rises: int = 3) -> list[str]:
    """Names of held-out losses that rose in each of the last `rises` evaluations."""
    recent = history[-(rises + 1) :]
    if len(recent) <= rises:
        return []
    return [k for k in recent[-1] if all(a.get(k, math.inf) < b[k] for a, b in zip(recent, recent[1:]))]


def train(cfg: SFTConfig) -> Run:
    """Fine-tune on the conversations of cfg.data_dir; returns the finished run. Raises UserError for bad settings before writing."""
    parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
    tok = tokenizer.from_dict(parent.meta["tokenizer"]) if parent else tokenizer.load(cfg.tokenizer)
    shape = (
        config.from_dict(GPTConfig, parent.meta["model_config"])
        if parent
        else replace(cfg.model, vocab_size=tok.n_vocab)
    )
    cfg = replace(cfg, model=shape)
    if cfg.tags == "reserved" and shape.owned < tok.n_vocab + chat.N_TAGS:
        advice = (
            f"set --tags {parent.meta['tags']}, or import it with --tags reserved"
            if parent
            else "leave --model.n-tags at 6, or set --tags text"
        )
        raise ConfigError(f"the model of {cfg.init_from or 'these settings'} has no rows for reserved tags; {advice}")
    length = cfg.seq_len or shape.block_size
    data = conversations.load_domains(cfg.data_dir, "train", tok, cfg.tags, min(length, shape.block_size))
    held = conversations.load_domains(cfg.data_dir, "select", tok, cfg.tags, shape.block_size, limit=cfg.eval_examples)
    probes = evaluate.read_probes(cfg.data_dir, "select", cfg.probe_examples) if cfg.probe_examples else []
    with dist.session(cfg) as world, StopSignal() as stop:
        device, dtype = world.device, dist.compute_dtype(world.device)
        weights = (
            conversations.token_weights(data, cfg.weights) if cfg.mix_by == "rows" and cfg.weights else cfg.weights
        )
        loader = conversations.PackedLoader(
            data, weights, cfg.device_batch_size, length, cfg.seed, world.rank, world.size
        )
        held_out = {d: conversations.held_out(examples, cfg.device_batch_size, length) for d, examples in held.items()}
        model = sharding.build(lambda: GPT(shape), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        if parent:
            checkpoint.restore(parent, model)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        lineage = (parent.meta.get("lineage", []) if parent else []) + [
            {"run": cfg.run_name, "kind": "sft", "data_dir": cfg.data_dir}
        ]
        start, supervised, history = 0, 0, []
        run = Run.create(
            cfg.run_name, cfg, kind="sft", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, lora.merged(model), optimizers)
            lora.load(model, last.extra.get("lora", {}))
            loader.load_state(last.extra["loader"])
            start, supervised, history = last.step, last.extra["supervised"], last.extra["history"]
        tokens_per_step = cfg.device_batch_size * length * cfg.grad_accum * world.size
        loss_of = hardware.maybe_compile(
            model.loss,
            cfg.compile,
            device,
            dtype,
            cfg.max_steps * tokens_per_step / world.size * shape.flops_per_token(length),
        )
        peak, _ = hardware.peak_flops(device, dtype)
        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=cfg.max_steps, desc=run.name, unit="step", disable=not world.is_main)
            began, logged, regression = time.perf_counter(), start, []
            for step in range(start, cfg.max_steps + 1):
                done = step == cfg.max_steps
                stopping = dist.any(stop.requested)

                # once in a while: evaluate
                if (done or (cfg.eval_every and step % cfg.eval_every == 0)) and not (step == start and run.resumed):
                    with sharding.whole(model) as reader:
                        losses = held_out_losses(reader, held_out, device)
                        matrix = (
                            evaluate.behaviour_matrix(reader, tok, cfg.tags, probes, seed=cfg.seed).metrics()
                            if probes
                            else {}
                        )
                    run.log_eval(step, {**losses, **matrix})
                    history.append(losses)
                    regression = regressed(history)
                    for name in regression:
                        bar.write(
                            f"{run.name}: {name} rose three evaluations in a row, to {losses[name]:.3f} at step {step}; "
                            "this domain is being overwritten: raise its --mix share or lower --lr"
                        )
                    began, logged = time.perf_counter(), step
                stopping = stopping or bool(regression and cfg.stop_on_regression)

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    checkpoint.save(
                        run.path,
                        step,
                        model=lora.merged(model),
                        optimizers=optimizers,
                        extra={
                            "lora": lora.adapters(model),
                            "loader": loader.state(),
                            "supervised": supervised,
                            "history": history,
                        },
                        meta={"tokenizer": tok.to_dict(), "tags": cfg.tags, "lineage": lineage},
                        keep_last=cfg.keep_last,
                        keep_every=cfg.keep_every,
                        wait=done or stopping,
                    )
                if done or stopping:
                    break

                # learn: the loss of a step is the mean over its supervised tokens, over all microbatches and ranks
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                batches = [loader.next().to(device) for _ in range(cfg.grad_accum)]
                count = float(
                    dist.sum_(torch.tensor(float(sum(int((b.targets >= 0).sum()) for b in batches)), device=device))
                )
                nats = torch.zeros((), device=device)
                for batch in batches:
                    with dist.autocast(device):
                        loss = (
                            loss_of(
                                batch.ids,
                                batch.targets,
                                reduction="sum",
                                positions=batch.positions,
                                mask=conversations.block_mask(batch.docs),
                            )
                            / count
                        )
                    loss.backward()
                    nats += loss.detach()
                dist.sum_gradients(model)
                grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                supervised += int(count)
                bar.update(1)

                # log
                if (step + 1) % cfg.log_every == 0 or step + 1 == cfg.max_steps:
                    train_loss = float(dist.sum_(nats.clone()))
                    rate = tokens_per_step * (step + 1 - logged) / (time.perf_counter() - began)
                    row: dict[str, Any] = dict(
                        tokens=(step + 1) * tokens_per_step,
                        supervised_tokens=supervised,
                        train_loss=train_loss,
                        lr=cfg.lr * scale,
                        grad_norm=grad_norm,
                        tok_per_s=rate,
                        mfu=rate * shape.flops_per_token(length) / (peak * world.size),
                    )
                    run.log(step + 1, row)
                    bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{rate:,.0f}")
                    if not math.isfinite(train_loss):
                        raise errors.RunError(
                            f"loss is {train_loss} at step {step + 1}; lower --lr or --muon-lr; the last checkpoint is kept"
                        )
                    began, logged = time.perf_counter(), step + 1
            bar.close()
            if stopping:
                run.stop(
                    f"{regression[0]} rose three evaluations in a row"
                    if regression
                    else f"interrupted at step {step}; continue with --resume"
                )
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat sft`, `python -m codechat.sft` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        SFTConfig, sys.argv[1:] if argv is None else argv, presets=RUN_PRESETS, prog="codechat sft", epilog=__doc__
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
