"""RMSNorm, squared ReLU, SwiGLU and adapted matrices. On a CPU with gradients each is one
autograd node, whose gradient is written out: autograd would keep more tensors and pass over
memory once for each of their operations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.models.fast import fused
from codechat.models.fast.device import compute_dtype, on_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32; the weight
    broadcasts over x (..., D)."""
    wide = x.float()
    if _writes_gradient(x):
        faster = fused.rms_norm(wide, weight, eps)
        return (_RMSNorm.apply(wide, weight, eps) if faster is None else faster).to(x.dtype)
    if weight.ndim == 1:
        return F.rms_norm(wide, wide.shape[-1:], weight.float(), eps).to(x.dtype)
    # torch's own takes no weights of several heads
    return (F.rms_norm(wide, wide.shape[-1:], None, eps) * weight).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668)."""
    if _writes_gradient(x):
        faster = fused.squared_relu(x)
        return _SquaredReLU.apply(x) if faster is None else faster
    kept = torch.relu(x)
    return kept * kept  # CUDA's autocast would take a square to float32


def through_swiglu(down: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """down(silu(gate) * up) (SwiGLU, arXiv:2002.05202). On a CPU with gradients only gate and up
    are kept: what `down` would keep of its input is computed again, the same bit for bit."""
    if not _writes_gradient(gate):
        return down(F.silu(gate) * up)
    product = _SwiGLU.apply(gate, up)
    kept_gate = gate.detach()
    kept_up = up.detach()
    place = product.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | torch.Size:
        again = saved.untyped_storage()._cdata == place and saved.is_contiguous()
        return saved.shape if again else saved

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return _swiglu(kept_gate, kept_up).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return down(product)


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
) -> Tensor:
    """W x + bias + scale B A x of x (..., in), a frozen W (out, in), A (rank, in) and B (out,
    rank) (LoRA, arXiv:2106.09685). It is scaled in between, where a token has `rank` numbers."""
    learns = torch.is_grad_enabled() and a.requires_grad
    if not (learns and on_cpu(x.device)):
        inner = scale * F.linear(x, a)
        return F.linear(x, weight, bias) + F.linear(inner, b)
    rows = x.to(compute_dtype(x)).flatten(0, -2)
    y = _AdaptedLinear.apply(rows, weight, bias, a, b, scale)
    return y.unflatten(0, x.shape[:-1])


def _writes_gradient(x: Tensor) -> bool:
    return on_cpu(x.device) and x.requires_grad


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    faster = fused.swiglu(gate, up)
    return F.silu(gate) * up if faster is None else faster


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


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. In torch its gradients are those that autograd takes, bit for bit."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        faster = fused.swiglu_slopes(gate, up, above)
        if faster is not None:
            return faster
        d_gate = torch.ops.aten.silu_backward(above * up, gate)
        return d_gate, above * F.silu(gate)


class _AdaptedLinear(torch.autograd.Function):
    """What an adapter adds, in the output and in the gradient of x, is added in place by its
    product; autograd would write it and then pass over both."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        inner = scale * F.linear(x, a)
        ctx.save_for_backward(x, inner, weight, a, b)
        ctx.scale = scale
        y = F.linear(x, weight, bias)
        return y.addmm_(inner, b.mT.to(inner.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, a, b = ctx.saved_tensors
        d_inner = ctx.scale * (above @ b.to(above.dtype))
        dx = above @ weight.to(above.dtype)  # of the first block too, where nothing reads it
        dx.addmm_(d_inner, a.to(above.dtype))
        d_a = d_inner.mT @ x
        d_b = above.mT @ inner
        return dx, None, None, d_a, d_b, None
