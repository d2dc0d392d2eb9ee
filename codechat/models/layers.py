"""RMSNorm, rotary positions, the dtype of the residual stream.

Left out: attention and blocks (`gpt`, `latent_attention`).

Shapes: B sequences, H heads, T tokens, E rotated width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from codechat.models.config import GPTConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32. torch's own takes 20 operators on a CPU, this five."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight).to(x.dtype)


def rope_table(
    cfg: GPTConfig, length: int, positions: Tensor | None, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1|B, 1, T, E) of rotary positions (RoFormer, arXiv:2104.09864, eq. 34) for `rotate`: both halves of E are equal except for
    the sine's sign."""
    frequency = rope_frequencies(cfg, device)
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    angle = positions[:, None, :, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_frequencies(cfg: GPTConfig, device: torch.device) -> Tensor:
    """(E/2,) angles per token. With rope_factor > 1 those of Llama 3.1 (`apply_scaling` in llama-models/models/llama3/model.py): a wave that turns
    n times within rope_block keeps its angle for n >= rope_high, is slowed by the factor for n <= rope_low, and is mixed linearly between."""
    half = torch.arange(0, cfg.rope_width, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / cfg.rope_theta ** (half / cfg.rope_width)
    if cfg.rope_factor == 1:
        return frequency
    turns = cfg.rope_block * frequency / (2 * math.pi)
    kept = ((turns - cfg.rope_low) / (cfg.rope_high - cfg.rope_low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / cfg.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, E), the halves (a, b) of E, by each position's angles: (a cos - b sin, b cos + a sin)."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(wide.shape[-1] // 2, -1), sin).to(x.dtype)


def residual(cfg: GPTConfig, x: Tensor) -> Tensor:
    """Embedded tokens in the dtype of the sum that blocks add to: float32, or with bf16_residual that of products under autocast."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if cfg.bf16_residual and torch.is_autocast_enabled(kind) else x
