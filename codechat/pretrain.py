"""Pretraining: next-token prediction over a sharded corpus, validated in bits per byte.

    codechat pretrain --preset nano --data-dir data/nano/corpus --run-name my-pretrain
    torchrun --standalone --nproc-per-node 8 -m codechat pretrain --preset d20 \\
        --data-dir data/corpus --run-name d20
    codechat pretrain --depth 6 --data-dir data/corpus --run-name d6

--depth follows nanochat's rule (models/config.py: by_depth): width 64 x depth, AdamW's rate
3e-3 (width / 768)^-0.5, 12 tokens per weight of a matrix product, 2^19 tokens per step at depth
12, more with more tokens. Presets d12 and d20 are its shapes.

With --resume a killed run continues on the same curve, bitwise on a CPU. Training windows cross
document boundaries, as in GPT-2."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.models import config
from codechat.models.config import MODELS
from codechat.runs.run import Run
from codechat.training.settings import SupervisedSettings

if TYPE_CHECKING:  # settings and --help need no torch
    from codechat.models.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(SupervisedSettings):
    """Settings of one pretraining run."""

    run_name: str = "pretrain"
    data_dir: str = "data/corpus"
    max_steps: int = 1000
    lr: float = 3e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.1
    warmup_steps: int = 20
    eval_tokens: int = opt(65536, "validation tokens per evaluation", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.seq_len or 1) > self.model.block_size:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds block_size {self.model.block_size}; "
                "lower --seq-len"
            )


NANO = {"seq_len": 256, "device_batch_size": 16, "lr": 2.4e-2, "muon_lr": 0.012}
RUN_PRESETS = MODELS | {"nano": MODELS["nano"] | NANO}


def by_depth(depth: int, build: Callable[..., PretrainConfig], ranks: int = 1) -> PretrainConfig:
    """blocks of a new model: width, heads, context, rates, batch and steps follow by one rule
    (below); what is set wins

    `models.config.by_depth` with the vocabulary of the corpus, where that is prepared. The
    choices are printed."""
    from codechat.data import corpus

    def fitted(chosen: Mapping[str, Any]) -> PretrainConfig:
        cfg = build(chosen)
        with suppress(MissingFile):
            n_vocab = corpus.read_manifest(cfg.data_dir).get("n_vocab", cfg.model.vocab_size)
            return replace(cfg, model=replace(cfg.model, vocab_size=n_vocab))
        return cfg

    cfg = config.by_depth(depth, fitted, ranks)
    model = cfg.model
    batch = ranks * cfg.grad_accum * cfg.device_batch_size * cfg.length
    tokens = cfg.max_steps * batch
    n_flops = tokens * model.flops_per_token(cfg.length)
    if os.environ.get("RANK", "0") == "0":
        shape = (
            f"width {model.n_embd}, {model.n_head} heads, context {model.block_size}, "
            f"{model.n_params:,} parameters"
        )
        steps = f"{cfg.max_steps:,} steps of {batch:,} tokens, grad_accum {cfg.grad_accum}"
        cost = f"{tokens:.2e} tokens, {n_flops:.1e} FLOPs"
        rates = f"lr {cfg.lr:.2g}, muon_lr {cfg.muon_lr:.2g}"
        print(f"depth {depth}: {shape}; {steps}; {cost}; {rates}", file=sys.stderr)
    return cfg


RUN_DIALS = {"depth": by_depth}


def bits_per_byte(model: "GPT", cfg: PretrainConfig) -> dict[str, float]:
    """Validation loss in nats per token, and in bits per byte of text, which models with
    different tokenizers can be compared by: total nats / ln 2 / bytes. Each rank reads its share of
    the windows. A collective."""
    import torch

    from codechat.data import corpus
    from codechat.distributed import dist, hardware, numerics, sharding

    device = hardware.device()
    # float64: a sum over many tokens, and runs are compared by small differences of it
    total = torch.zeros(3, dtype=torch.float64, device=device)
    windows = corpus.val_windows(
        cfg.data_dir,
        cfg.length,
        limit=math.ceil(cfg.eval_tokens / cfg.length),
        batch=cfg.device_batch_size,
        rank=dist.rank(),
        world=dist.world_size(),
    )
    with sharding.whole(model) as reader, torch.no_grad(), numerics.autocast():
        for ids, targets, n_bytes in windows:
            nats = reader.loss(ids.to(device), targets.to(device), reduction="sum")
            total += torch.tensor(
                [nats.item(), int((targets >= 0).sum()), n_bytes],
                dtype=torch.float64,
                device=device,
            )
    nats, tokens, n_bytes = dist.sum_(total).tolist()
    return {"val_loss": nats / tokens, "val_bpb": nats / math.log(2) / n_bytes}


def train(cfg: PretrainConfig) -> Run:
    """Train `cfg.model` on the corpus; returns the finished run. UserError, before anything is
    written, for bad settings."""
    import torch

    from codechat.data import corpus
    from codechat.distributed import dist, hardware, numerics
    from codechat.text import tokenizer
    from codechat.training.session import Prefetched, SupervisedSession, build_policy, load_parent

    manifest = corpus.read_manifest(cfg.data_dir)
    with dist.session(cfg) as world:
        # the corpus is ids already, so its tokenizer is the model's
        cfg, parent, tok = load_parent(cfg, tok=tokenizer.load(manifest["tokenizer"]))
        windows = corpus.WindowLoader(
            cfg.data_dir,
            batch=cfg.device_batch_size,
            T=cfg.length,
            seed=cfg.seed,
            rank=world.rank,
            world=world.size,
        )
        loader = Prefetched(windows, world.device)
        model = build_policy(cfg, parent)
        hardware.compile_blocks(model, cfg.compile)
        found = manifest.get("hash", "")
        # a copy may have mixed two corpora; bare shards have no hash
        if dist.is_main() and (cfg.resume or not found):
            found = corpus.hash_shards(cfg.data_dir, manifest)
        session = SupervisedSession(
            "pretrain",
            cfg,
            model,
            tok,
            parent=parent,
            evaluate=lambda model, step: bits_per_byte(model, cfg),
            max_steps=cfg.max_steps,
            # pretraining has no turns; a run that starts from it takes over these tags
            tags="reserved",
            trained_on=dict(data=manifest.get("hash"), data_dir=cfg.data_dir),
            kept={"loader": loader},
            data={f"corpus {cfg.data_dir}": dist.gather(found)[0]},
        )
        tokens_per_step = cfg.device_batch_size * cfg.length * cfg.grad_accum * world.size
        with session.running():
            for _ in session.steps():
                # a GPU is not waited for in each microbatch
                nats = torch.zeros((), device=world.device)
                for _ in range(cfg.grad_accum):
                    # (B, T) each
                    ids, targets = (x.to(world.device, non_blocking=True) for x in loader.next())
                    with numerics.autocast():
                        # the mean over the tokens of all microbatches and ranks
                        loss = (
                            model.loss(ids, targets, reduction="sum", every=True) / tokens_per_step
                        )
                    loss.backward()
                    nats += loss.detach()
                session.apply_gradients()
                session.log_supervised(nats, tokens_per_step)
    return session.run
