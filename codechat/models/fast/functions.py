"""RMSNorm and squared ReLU. On a CPU with gradients both are one autograd node each, whose
slope is written out: autograd would keep more tensors and pass over memory once for each of
their operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models.fast.device import on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32; the weight
    broadcasts over x (..., D)."""
    wide = x.float()
    if _writes_gradient(x):
        return _RMSNorm.apply(wide, weight, eps).to(x.dtype)
    if weight.ndim == 1:
        return F.rms_norm(wide, wide.shape[-1:], weight.float(), eps).to(x.dtype)
    # torch's own takes no weights of several heads
    return (F.rms_norm(wide, wide.shape[-1:], None, eps) * weight).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668)."""
    if _writes_gradient(x):
        return _SquaredReLU.apply(x)
    kept = torch.relu(x)
    return kept * kept  # CUDA's autocast would take a square to float32


def _writes_gradient(x: Tensor) -> bool:
    return on_cpu(x.device) and x.requires_grad


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
        both = up * normed
        gain = weight.to(up.dtype)  # sharded weights come in bfloat16
        if weight.ndim > 1:
            shared = (both * gain).mean(-1, keepdim=True)
        else:
            shared = (both @ gain)[..., None] / up.shape[-1]
        dx = (up * gain).addcmul_(normed, shared, value=-1).mul_(scale)
        dw = both.sum_to_size(weight.shape).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _SquaredReLU(torch.autograd.Function):
    """Slope 2 relu(x): where x is below 0 the value itself is 0, so nothing has to be compared
    again."""

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
