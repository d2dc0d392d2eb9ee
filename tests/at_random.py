"""Random weights for tests: at initialisation the blocks add nothing, and gradients behind them are 0."""

from typing import Any

import torch


def randomise(model: Any, scale: float = 0.2, seed: int = 1) -> Any:
    """Every weight anew, gains and biases around 1."""
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
