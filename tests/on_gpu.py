"""The device of the tests of `tests/codechat/gpu`, models for it, and the path of a GPU on a
CPU."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from codechat.data import conversations
from codechat.distributed import numerics, sharding
from codechat.models import optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.fast import attention, device
from codechat.models.gpt import GPT

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TINY = GPTConfig(depth=2, n_embd=64, n_head=2, block_size=256, vocab_size=500)
CFG = GPTConfig(**PRESETS["d12"]) if CUDA else TINY


def random_ids(cfg: GPTConfig, rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(
        cfg.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed)
    ).to(DEVICE)


def made(cfg: GPTConfig) -> GPT:
    """A model on DEVICE. On a GPU without its own weights, which a CPU draws and 2b waits a
    minute for."""
    if not CUDA:
        return GPT(cfg)
    with torch.device("meta"):
        model = GPT(cfg)
    for p in model.to_empty(device=DEVICE).parameters():
        torch.nn.init.constant_(p, float(p.ndim == 1))
    return model


def randomized(model: GPT) -> GPT:
    """Every matrix random: at initialisation the blocks add nothing, and gradients behind them
    are 0."""
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(
                p,
                std=p.shape[1] ** -0.5,
                generator=torch.Generator(p.device).manual_seed(p.numel()),
            )
    return model


def packed_docs(rows: int, length: int) -> Tensor:
    ends = torch.tensor([length // 4, length // 2, length - length // 16])
    docs = torch.bucketize(torch.arange(length), ends, right=True)
    return docs.where(docs < 3, -1).expand(rows, length).contiguous()


class Trainer:
    """A model, its optimizers, and steps of pretraining, SFT and RL on random tokens that are
    on the device before a step."""

    def __init__(self, cfg: GPTConfig, rows: int, length: int, **how: Any) -> None:
        self.rows = rows
        self.length = length
        self.model = randomized(made(cfg))
        self.optimizers = optim.build(self.model, lr=1e-4, **how)
        self.ids = random_ids(cfg, rows, length)
        docs = packed_docs(rows, length)
        at = torch.arange(length).expand(rows, length).contiguous()
        self.docs = docs.to(DEVICE)
        self.branches = (at % 97 > 30).long().to(DEVICE)
        self.targets = self.ids.masked_fill(self.docs != 1, -100)
        self.where = dict(
            positions=at.to(DEVICE), places=(self.targets >= 0).flatten().nonzero()[:, 0]
        )

    def loss(self, kind: str) -> Tensor:
        if kind == "pretrain":
            return self.model.loss(self.ids, self.ids, reduction="sum", every=True)
        if kind == "sft":
            how = dict(mask=conversations.packed_mask(self.docs), **self.where)
            return self.model.loss(self.ids, self.targets, reduction="sum", **how)
        how = dict(mask=attention.packed_mask(self.docs, self.branches), **self.where)
        return -self.model.token_logprobs(self.ids, self.targets, **how)[0].sum()

    def step(self, kind: str = "pretrain") -> None:
        with numerics.autocast(DEVICE):
            loss = self.loss(kind)
        (loss / (self.rows * self.length)).backward()
        sharding.clip_gradients(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The path of a GPU also on a CPU. Flex attention has a backward pass there too, written
    out, but refuses it."""
    if CUDA:
        yield
        return
    with (
        mock.patch.object(device, "CPU_KINDS", ()),
        mock.patch.object(attention, "_flex", lambda: flex_attention.flex_attention),
        mock.patch.object(flex_attention, "_validate_device", lambda *_: None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def deep(depth: int) -> GPTConfig:
    return CFG if CUDA else replace(TINY, depth=depth)
