"""RMSNorm, squared ReLU, rotary positions, the dtype of the residual stream.

On a CPU RMSNorm and squared ReLU have hand-written gradients, in half the passes over memory of autograd's; a GPU
compiles its blocks. Shapes: B sequences, H heads, T tokens, E head width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codechat.models import packed_attention
from codechat.models.config import GPTConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm` with a weight that broadcasts over x (..., D)."""
    wide = x.float()
    if written_out(x):
        return _RMSNorm.apply(wide, weight, eps).to(x.dtype)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668)."""
    return _SquaredReLU.apply(x) if written_out(x) else torch.relu(x).square()


def written_out(x: Tensor) -> bool:
    """Whether to take the hand-written gradients: on a CPU, where autograd would keep and pass over more."""
    return packed_attention.dense(x.device) and x.requires_grad and not torch.compiler.is_compiling()


class _RMSNorm(torch.autograd.Function):
    """With n = x s, s = 1 / rms(x): dx = s (w g - n mean(w g n)), dw = sum(g n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor | None, None]:
        normed, scale, weight = ctx.saved_tensors
        both, gain = up * normed, weight.to(up.dtype)  # sharded weights come in bfloat16
        shared = (both * gain).mean(-1, keepdim=True) if weight.ndim > 1 else (both @ gain)[..., None] / up.shape[-1]
        dx = (up * gain).addcmul_(normed, shared, value=-1).mul_(scale)
        return dx, both.sum_to_size(weight.shape).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


class _SquaredReLU(torch.autograd.Function):
    """Slope 2 relu(x): where x is below 0 the value itself is 0, so nothing has to be compared again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.relu(x)
        ctx.save_for_backward(kept)
        return kept.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return torch.addcmul(up.new_zeros(()), up, kept, value=2).to(kept.dtype)  # one pass


def rope_table(cfg: GPTConfig, length: int, positions: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1|B, 1, T, E) of rotary positions (RoFormer, arXiv:2104.09864, eq. 34) for `rotate`: both
    halves of E are equal except for the sine's sign."""
    frequency = rope_frequencies(cfg, device)
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    angle = positions[:, None, :, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope_frequencies(cfg: GPTConfig, device: torch.device) -> Tensor:
    """(E/2,) angles per token. With rope_scaling as `apply_scaling` of Llama 3.1: a wave that turns n times within the
    original context keeps its angle for n >= high, is slowed by the factor for n <= low, and mixed between."""
    half = torch.arange(0, cfg.head_dim, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / cfg.rope_theta ** (half / cfg.head_dim)
    if cfg.rope_scaling is None:
        return frequency
    factor, low, high, context = cfg.rope_scaling
    turns = context * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequency + (1 - kept) * frequency / factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, E), the halves (a, b) of E, by each position's angles: (a cos - b sin, b cos + a sin)."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(wide.shape[-1] // 2, -1), sin).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x, under this autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def residual(cfg: GPTConfig, x: Tensor) -> Tensor:
    """Embedded tokens in the dtype of the sum that blocks add to: float32, or with bf16_residual that of products."""
    return x.to(compute_dtype(x)) if cfg.bf16_residual else x
