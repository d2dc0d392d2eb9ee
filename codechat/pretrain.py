"""Pretraining: next-token prediction over a sharded corpus, validated in bits per byte.

    codechat pretrain --preset nano --data-dir data/nano/corpus --run-name my-pretrain
    torchrun --standalone --nproc-per-node 8 -m codechat.pretrain --preset d20 --data-dir data/corpus --run-name d20

The loop reads top to bottom: evaluate, save, learn, log. It runs max_steps + 1 times so that the last weights are evaluated and saved.
A run that was killed continues with --resume on the same curve, bitwise on a CPU.

Left out: document masking (windows are cut across documents, as in GPT-2), batch-size warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codechat import training
from codechat.core.command import train_main
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError
from codechat.data import corpus, prefetch
from codechat.distributed import dist as dist_module
from codechat.distributed import sharding
from codechat.models.config import PRESETS, GPTConfig
from codechat.runs import checkpoint
from codechat.runs import run as run_module
from codechat.text import tokenizer
from codechat.training.settings import SupervisedSettings

if TYPE_CHECKING:
    import torch

    from codechat.models.gpt import GPT
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(SupervisedSettings):
    """Settings of one pretraining run."""

    run_name: str = default("pretrain")
    data_dir: str = opt("data/corpus", "directory of shards and manifest made by `codechat data corpus`")
    init_from: str | None = opt(None, "checkpoint to start from: run name, run directory or checkpoint")
    model: GPTConfig = opt(GPTConfig(), "architecture")
    max_steps: int = default(1000)
    lr: float = default(3e-3)
    muon_lr: float = default(0.02)
    weight_decay: float = default(0.1)
    warmup_steps: int = default(20)
    eval_tokens: int = opt(65536, "validation tokens per evaluation", least=1)
    compile: bool | None = opt(None, "torch.compile the step; none = on GPUs, and in bfloat16")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.seq_len or 1) > self.model.block_size:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds block_size {self.model.block_size}; set --seq-len {self.model.block_size} or less"
            )


RUN_PRESETS = {name: {"model": model} for name, model in PRESETS.items()}
RUN_PRESETS["nano"] |= {"seq_len": 256, "device_batch_size": 16, "lr": 2.4e-2, "muon_lr": 0.012}


def bits_per_byte(
    model: GPT, data_dir: str, length: int, batch: int, limit: int, device: torch.device
) -> dict[str, float]:
    """Validation loss in nats per token, and in bits per byte of text: total nats / ln 2 / bytes, which different tokenizers share.

    Sums, token and byte counts are added over ranks, each of which reads its share."""
    import torch

    total = torch.zeros(3, dtype=torch.float64, device=device)
    dist = dist_module
    model.eval()
    windows = corpus.val_windows(
        data_dir, length, limit=-(-limit // length), batch=batch, rank=dist.rank(), world=dist.world_size()
    )
    for ids, targets, n_bytes in windows:
        with torch.no_grad(), dist.autocast(device):
            nats = model.loss(ids.to(device), targets.to(device), reduction="sum")
        total += torch.tensor([nats.item(), int((targets >= 0).sum()), n_bytes], dtype=torch.float64, device=device)
    model.train()
    nats, tokens, n_bytes = dist.sum_(total).tolist()
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / n_bytes}


def train(cfg: PretrainConfig) -> Run:
    """Train `cfg.model` on the corpus; returns the finished run. UserError, before anything is written, for bad settings."""
    manifest = corpus.read_manifest(cfg.data_dir)
    tok = tokenizer.load(manifest["tokenizer"])
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=tok.n_vocab))
    with dist_module.session(cfg) as world, run_module.StopSignal() as interrupt:
        parent = checkpoint.load(cfg.init_from, optimizer=False, mmap=True) if cfg.init_from else None
        windows = corpus.WindowLoader(
            cfg.data_dir, "train", cfg.device_batch_size, cfg.length, cfg.seed, world.rank, world.size
        )
        loader = prefetch.Prefetched(windows, world.device)
        model = training.build_policy(cfg, parent)
        optimizers = training.build_optimizers(cfg, model)
        lineage = training.lineage(cfg, "pretrain", parent, data=manifest.get("hash"), data_dir=cfg.data_dir)
        run, last = training.open_run("pretrain", cfg, model, optimizers)
        start = last.step if last else 0
        if last:
            loader.load_state(last.extra["loader"])
        tokens_per_step = cfg.device_batch_size * cfg.length * cfg.grad_accum * world.size
        loss_of = training.compiled(cfg, model)

        def validate() -> dict[str, float]:
            with sharding.whole(model) as reader:
                return bits_per_byte(
                    reader, cfg.data_dir, cfg.length, cfg.device_batch_size, cfg.eval_tokens, world.device
                )

        def save(step: int, wait: bool) -> None:
            training.check_before_save(step, nats)
            extra = dict(tags="reserved", loader=loader.state())
            training.save(run, step, cfg, model, optimizers, tok=tok, lineage=lineage, wait=wait, **extra)

        with training.running(run, start, cfg.max_steps) as bar:
            pace = training.Pace(start)
            for step in range(start, cfg.max_steps + 1):
                turn = training.turn(cfg, step, start, run, stopping=interrupt.requested)
                if turn.evaluate:
                    run.log_eval(step, validate())
                    pace.restart(step)
                if turn.save:
                    save(step, wait=turn.last)
                if turn.last:
                    break

                # learn: the mean over the tokens of all microbatches and ranks
                lr = training.set_rate(cfg, optimizers, step)
                nats = 0.0
                for micro in range(cfg.grad_accum):
                    ids, targets = (x.to(world.device, non_blocking=True) for x in loader.next())  # (B, T) each
                    with dist_module.autocast():
                        loss = loss_of(ids, targets, reduction="sum", every=True) / tokens_per_step
                    training.backward(loss, model, last=micro == cfg.grad_accum - 1)
                    nats += loss.detach()
                grad_norm = training.apply_gradients(cfg, optimizers, model)
                bar.update(1)

                # log
                row = dict(lr=lr, grad_norm=grad_norm)
                training.log_supervised(run, bar, cfg, step, nats, pace, tokens_per_step, **row)
            training.stop(run, step, interrupted=turn.stopping)
    return run


def main(argv: list[str] | None = None) -> int:
    """`codechat pretrain`, `python -m codechat.pretrain` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("pretrain", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
