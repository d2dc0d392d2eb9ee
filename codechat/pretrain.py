"""Pretraining: next-token prediction over a sharded corpus, validated in bits per byte.

    codechat pretrain --preset nano --data-dir data/nano/corpus --run-name my-pretrain
    torchrun --standalone --nproc-per-node 8 -m codechat.pretrain --preset d20 --data-dir data/corpus --run-name d20

The loop reads top to bottom: evaluate, save, learn, log. It runs max_steps + 1 times so that the last weights are evaluated and saved.
A run that was killed continues with --resume on the same curve, bitwise on a CPU.

Left out: document masking (windows are cut across documents, as in GPT-2), batch-size warm-up.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from tqdm import tqdm

from codechat.core import config, errors
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import corpus
from codechat.distributed import dist, hardware, sharding
from codechat.models import optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run, StopSignal
from codechat.text import tokenizer


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of one pretraining run."""

    run_name: str = opt("pretrain", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    data_dir: str = opt("data/corpus", "directory of shards and manifest made by `codechat data corpus`")
    init_from: str | None = opt(None, "checkpoint to start from: run name, run directory or checkpoint")
    model: GPTConfig = opt(GPTConfig(), "architecture")
    seq_len: int | None = opt(None, "tokens per sequence; none = the model's block size")
    device_batch_size: int = opt(8, "sequences per microbatch and device")
    grad_accum: int = opt(1, "microbatches per step")
    max_steps: int = opt(1000, "optimizer steps")
    optimizer: Literal["adamw", "muon"] = opt("muon", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(3e-3, "AdamW learning rate")
    muon_lr: float = opt(0.02, "Muon learning rate")
    weight_decay: float = opt(0.1, "weight decay of matrices and embeddings")
    warmup_steps: int = opt(20, "steps of linear warm-up")
    schedule: Literal["constant", "cosine", "wsd"] = opt("wsd", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.05, "share of the learning rate left at the end")
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off")
    eval_every: int = opt(100, "steps between validations; 0 = only the last")
    eval_tokens: int = opt(65536, "validation tokens per evaluation")
    save_every: int = opt(200, "steps between checkpoints; 0 = only the last")
    keep_last: int = opt(2, "checkpoints to keep")
    keep_every: int = opt(0, "also keep every checkpoint whose step is a multiple of this; 0 = none")
    log_every: int = opt(10, "steps between logged metrics")
    compile: bool | None = opt(None, "torch.compile the step; none = where it pays")
    shard: bool | None = opt(
        None, "split weights and optimizer states over ranks; none = where a replica does not fit", identity=False
    )
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", identity=False)
    seed: int = opt(0, "seed of the weights and of the data order")

    def __post_init__(self) -> None:
        if (self.seq_len or 1) > self.model.block_size:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds block_size {self.model.block_size}; set --seq-len {self.model.block_size} or less"
            )
        for name in ("device_batch_size", "grad_accum", "max_steps", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.seq_len or self.model.block_size


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()}
RUN_PRESETS["nano"] |= {"seq_len": 256, "device_batch_size": 16, "lr": 2.4e-2, "muon_lr": 0.012}


@torch.no_grad()
def bits_per_byte(
    model: GPT, data_dir: str, length: int, batch: int, limit: int, device: torch.device
) -> dict[str, float]:
    """Validation loss in nats per token, and in bits per byte of text: total nats / ln 2 / bytes, which different tokenizers share.

    Sums, token and byte counts are added over ranks, each of which reads its share."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    for ids, targets, n_bytes in corpus.val_windows(
        data_dir, length, limit=-(-limit // length), batch=batch, rank=dist.rank(), world=dist.world_size()
    ):
        with dist.autocast(device):
            nats = model.loss(ids.to(device), targets.to(device), reduction="sum")
        total += torch.tensor([nats.item(), int((targets >= 0).sum()), n_bytes], dtype=torch.float64, device=device)
    model.train()
    nats, tokens, n_bytes = dist.sum_(total).tolist()
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / n_bytes}


def train(cfg: PretrainConfig) -> Run:
    """Train `cfg.model` on the corpus; returns the finished run. Raises UserError for bad settings before anything is written."""
    manifest = corpus.read_manifest(cfg.data_dir)
    tok = tokenizer.load(manifest["tokenizer"])
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=tok.n_vocab))
    with dist.session(cfg) as world, StopSignal() as stop:
        device, dtype = world.device, dist.compute_dtype(world.device)
        loader = corpus.WindowLoader(
            cfg.data_dir, "train", cfg.device_batch_size, cfg.length, cfg.seed, world.rank, world.size
        )
        model = sharding.build(lambda: GPT(cfg.model), seed=cfg.seed, shard_it=cfg.shard, over=cfg.shard_over)
        optimizers = optim.build(
            model, lr=cfg.lr, optimizer=cfg.optimizer, muon_lr=cfg.muon_lr, weight_decay=cfg.weight_decay
        )
        start, lineage = (
            0,
            [{"run": cfg.run_name, "kind": "pretrain", "data": manifest.get("hash"), "data_dir": cfg.data_dir}],
        )
        if cfg.init_from:
            parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True)
            checkpoint.restore(parent, model)
            lineage = parent.meta.get("lineage", []) + lineage
        run = Run.create(
            cfg.run_name, cfg, kind="pretrain", parent=cfg.init_from, resume=cfg.resume, overwrite=cfg.overwrite
        )
        if run.resumed:
            last = checkpoint.load(run.path)
            checkpoint.restore(last, model, optimizers)
            loader.load_state(last.extra["loader"])
            start = last.step
        tokens_per_step = cfg.device_batch_size * cfg.length * cfg.grad_accum * world.size
        flops = cfg.max_steps * tokens_per_step / world.size * cfg.model.flops_per_token(cfg.length)
        loss_of = hardware.maybe_compile(model.loss, cfg.compile, device, dtype, flops)
        peak, _ = hardware.peak_flops(device, dtype)
        with run, checkpoint.settled():
            bar = tqdm(initial=start, total=cfg.max_steps, desc=run.name, unit="step", disable=not world.is_main)
            began, logged = time.perf_counter(), start
            for step in range(start, cfg.max_steps + 1):
                done = step == cfg.max_steps
                stopping = dist.any(stop.requested)

                # once in a while: evaluate
                if done or (cfg.eval_every and step % cfg.eval_every == 0):
                    with sharding.whole(model) as reader:
                        run.log_eval(
                            step,
                            bits_per_byte(
                                reader, cfg.data_dir, cfg.length, cfg.device_batch_size, cfg.eval_tokens, device
                            ),
                        )
                    began, logged = time.perf_counter(), step

                # once in a while: save
                if step > start and (done or stopping or (cfg.save_every and step % cfg.save_every == 0)):
                    checkpoint.save(
                        run.path,
                        step,
                        model=model,
                        optimizers=optimizers,
                        extra={"loader": loader.state()},
                        meta={"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": lineage},
                        keep_last=cfg.keep_last,
                        keep_every=cfg.keep_every,
                        wait=done or stopping,
                    )
                if done or stopping:
                    break

                # learn
                scale = optim.lr_scale(
                    step,
                    max_steps=cfg.max_steps,
                    warmup_steps=cfg.warmup_steps,
                    schedule=cfg.schedule,
                    final=cfg.final_lr_share,
                )
                optim.set_lr(optimizers, scale)
                nats = 0.0
                for _ in range(cfg.grad_accum):
                    ids, targets = loader.next()
                    with dist.autocast(device):
                        loss = loss_of(ids.to(device), targets.to(device), reduction="sum") / tokens_per_step
                    loss.backward()
                    nats += loss.detach()
                dist.sum_gradients(model)
                grad_norm = dist.clip_gradients(model, cfg.grad_clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                bar.update(1)

                # log
                if (step + 1) % cfg.log_every == 0 or step + 1 == cfg.max_steps:
                    train_loss = float(dist.sum_(torch.as_tensor(nats).detach().clone()))
                    rate = tokens_per_step * (step + 1 - logged) / (time.perf_counter() - began)
                    run.log(
                        step + 1,
                        tokens=(step + 1) * tokens_per_step,
                        train_loss=train_loss,
                        lr=cfg.lr * scale,
                        grad_norm=grad_norm,
                        tok_per_s=rate,
                        mfu=rate * cfg.model.flops_per_token(cfg.length) / (peak * world.size),
                    )
                    bar.set_postfix(loss=f"{train_loss:.3f}", tok_s=f"{rate:,.0f}")
                    if not math.isfinite(train_loss):
                        raise errors.RunError(
                            f"loss is {train_loss} at step {step + 1}; lower --lr or --muon-lr; the last checkpoint is kept"
                        )
                    began, logged = time.perf_counter(), step + 1
            bar.close()
            if stopping:
                run.stop(f"interrupted at step {step}; continue with --resume")
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat pretrain`, `python -m codechat.pretrain` and torchrun; 0 when finished, 130 when stopped early."""
    cfg = config.parse(
        PretrainConfig,
        sys.argv[1:] if argv is None else argv,
        presets=RUN_PRESETS,
        prog="codechat pretrain",
        epilog=__doc__,
    )
    return 0 if train(cfg).status["status"] == "finished" else 130


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
