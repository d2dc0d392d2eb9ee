"""Models whose every weight is random, also those of adapters."""

from typing import Any

import torch

from codechat.models import lora
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT

SHAPE = GPTConfig(
    depth=2,
    n_embd=32,
    n_head=4,
    n_kv_head=2,
    block_size=32,
    vocab_size=58,
    mlp="swiglu",
)
IDS = torch.randint(58, (2, 9), generator=torch.Generator().manual_seed(0))


def randomise(model: Any, scale: float = 0.2, seed: int = 1) -> Any:
    """Every weight random, gains and biases included: at initialisation the blocks add nothing."""
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = scale * torch.randn(p.shape, generator=rng) + (p.ndim == 1)
    return model.eval()


def perturbed(model: Any, scale: float = 0.3, seed: int = 0) -> Any:
    """Noise on every weight."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=rng))
    return model.eval()


def made(shape: GPTConfig = SHAPE) -> GPT:
    return randomise(GPT(shape), 0.1).train()


def moved(model: GPT) -> GPT:
    """As after some training of adapters: B is no longer zero."""
    with torch.no_grad():
        for i, (_, layer) in enumerate(lora.adapted(model)):
            layer.b.add_(
                torch.randn(layer.b.shape, generator=torch.Generator().manual_seed(i)) * 0.3
            )
    return model
