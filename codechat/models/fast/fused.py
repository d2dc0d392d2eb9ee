"""What stands between the products of a training step, by `cpp/training.c` where `make cpp` has
built it: a pass over memory forward, and one for the gradient. Prompts take its attention too.

It is built twice: for bfloat16, where the processor multiplies it, and for float32. RMSNorm;
squared ReLU and SwiGLU, in bfloat16 with the bits of torch but for some gradients of a gate;
attention with the norms and the rotation of its queries and keys, whose scores are not rounded, so
in bfloat16 it is nearer to float32 than the plain way.

Shapes: B rows, T tokens, H heads, K key-value heads, E head width."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.distributed import dist, numerics
from codechat.models.fast.device import BUILT, built_library, compute_dtype, on_cpu

LIBRARIES = {
    torch.bfloat16: BUILT / "libtraining.so",
    torch.float32: BUILT / "libtraining32.so",
}
WIDTHS = (64, 128)  # of a head
LINES = 64  # vectors of a norm whose gain's gradient is summed apart, as in training.c
INPUTS = ("qkv", "gains", "cos", "sin", "seen", "out", "kept", "up", "d_qkv", "d_gains")
Function = Callable[..., Any]  # of a library
SIZES = ("rows", "tokens", "heads", "groups", "width", "turns", "threads")


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in INPUTS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_float),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "gain", "y", "scale", "up", "dx", "d_gain")),
        *((name, ctypes.c_int64) for name in ("lines", "width", "threads")),
        ("eps", ctypes.c_float),
    ]


@cache
def kernel(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for numbers of this dtype; none where there is none, it was not built, or the
    processor lacks what it needs."""
    place = LIBRARIES.get(dtype)
    if place is None:
        return None
    library = built_library(place, "training_runs_here")
    if library is not None and dist.is_main():  # roundings differ from those of another machine
        print(f"training steps and prompts: {place.name} of build/cpp", file=sys.stderr)
    return library


def _library(x: Tensor, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for numbers of this dtype, where it may compute with x."""
    if numerics.planned or torch.compiler.is_compiling():
        return None
    # a count of operations or of memory sees those of torch alone
    if torch._C._len_torch_dispatch_stack():
        return None
    if not on_cpu(x.device) or not x.is_contiguous():
        return None
    return kernel(dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | None:
    """x / rms(x) * gain (D,) over the last dimension of float32 x (.., D); none where there is no
    kernel for it."""
    fits = x.dtype == torch.float32 and gain.ndim == 1 and not x.shape[-1] % 16
    if not fits:
        return None
    library = _library(x, compute_dtype(x))
    if library is None:
        return None
    return _RMSNorm.apply(x, gain, eps, library)


def squared_relu(x: Tensor) -> Tensor | None:
    """relu(x)^2; none where there is no kernel for it."""
    library = _activations(x)
    if library is None:
        return None
    return _SquaredReLU.apply(x, library)


def swiglu(gate: Tensor, up: Tensor) -> Tensor | None:
    """silu(gate) * up, without autograd; none where there is no kernel for it."""
    library = _activations(gate, up)
    if library is None:
        return None
    y = torch.empty_like(gate)
    _run_activation(library.swiglu_forward, gate, up, y)
    return y


def swiglu_slopes(gate: Tensor, up: Tensor, above: Tensor) -> tuple[Tensor, Tensor] | None:
    """(d gate, d up) of `swiglu` below the gradient `above`; none where there is no kernel."""
    library = _activations(gate, up, above)
    if library is None:
        return None
    d_gate = torch.empty_like(gate)
    d_up = torch.empty_like(up)
    _run_activation(library.swiglu_backward, gate, up, above, d_gate, d_up)
    return d_gate, d_up


def _activations(x: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The library for one pass over the numbers of these, which have one shape; none where there
    is none."""
    for y in others:
        if y.dtype != x.dtype or not y.is_contiguous():
            return None
    if x.numel() % 16:
        return None
    return _library(x, x.dtype)


class Shape(NamedTuple):
    heads: int
    groups: int  # key-value heads
    width: int
    eps: float  # of the norms


def attend(
    qkv: Tensor,
    shape: Shape,
    *,
    gains: tuple[Tensor, Tensor] | None,
    rope: tuple[Tensor, Tensor] | None,
    seen: Tensor | None,
) -> Tensor | None:
    """Attention (B, T, H E) of the queries, keys and values qkv (B, T, (H + 2 K) E); none where
    there is no kernel for it.

    gains: (E,) of the norms of queries and keys, none = not normed. rope: of `rope_table`, none =
    not turned. seen: of `seen_tokens`, none = all earlier tokens."""
    if shape.width not in WIDTHS:
        return None
    library = _library(qkv, qkv.dtype)
    if library is None:
        return None
    if seen is None:
        seen = torch.zeros(*qkv.shape[:2], 3, dtype=torch.int32)
    q_gain, k_gain = gains or (None, None)
    cos, sin = rope or (None, None)
    return _Attention.apply(qkv, q_gain, k_gain, cos, sin, seen, shape, library)


def seen_tokens(docs: Tensor, branches: Tensor | None) -> Tensor | None:
    """(B, T, 3) int32: a token i of `Documents` attends to tokens [first, second) and [third, i].
    None where a document or a branch is not in one piece."""
    branches = torch.zeros_like(docs) if branches is None else branches
    at = torch.arange(docs.shape[1]).expand_as(docs)
    real = docs >= 0
    begins = torch.ones_like(real)  # a document
    begins[:, 1:] = (docs[:, 1:] != docs[:, :-1]) | ~real[:, 1:]
    splits = begins.clone()  # a document or a branch
    splits[:, 1:] |= branches[:, 1:] != branches[:, :-1]
    first = torch.where(begins, at, 0).cummax(1).values
    third = torch.where(splits, at, 0).cummax(1).values
    # the document's trunk: its tokens of branch 0 so far
    trunk = (branches == 0) & real
    so_far = trunk.cumsum(1)  # of all documents of the row
    of_earlier = (so_far - trunk.long()).gather(1, first)
    second = first + so_far - of_earlier
    # in one piece: a trunk without gaps, then branches, then the next document; nothing again
    whole = (second == at + 1) | ~trunk
    new_document = docs[:, 1:] > docs.cummax(1).values[:, :-1]
    same_document = ~begins[:, 1:] & (branches[:, 1:] >= branches[:, :-1])
    whole[:, 1:] &= new_document | same_document | ~real[:, 1:]
    if not whole.all():
        return None
    return torch.stack((first, second, third), dim=-1).int()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, library: ctypes.CDLL) -> Tensor:
        y = torch.empty_like(x)
        scale = x.new_empty(x.shape[:-1])
        given = dict(x=x, gain=gain.float(), scale=scale)
        _run_norm(library.norm_forward, given | {"y": y}, eps)
        ctx.save_for_backward(*given.values())
        ctx.dtype = gain.dtype
        ctx.library = library
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gain, scale = ctx.saved_tensors
        dx = torch.empty_like(x)
        # sums do not depend on the number of threads
        d_gain = x.new_zeros(-(-scale.numel() // LINES), len(gain))
        given = dict(x=x, gain=gain, scale=scale, up=up.contiguous(), dx=dx, d_gain=d_gain)
        _run_norm(ctx.library.norm_backward, given)
        return dx, d_gain.sum(0).to(ctx.dtype), None, None


def _run_norm(run: Function, tensors: dict[str, Tensor], eps: float = 0.0) -> None:
    places = {key: x.data_ptr() for key, x in tensors.items()}
    width = len(tensors["gain"])
    lines = tensors["scale"].numel()
    call = _Norm(**places, lines=lines, width=width, threads=torch.get_num_threads(), eps=eps)
    run(ctypes.byref(call))


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, library: ctypes.CDLL) -> Tensor:
        y = torch.empty_like(x)
        _run_activation(library.squared_relu_forward, x, y)
        ctx.save_for_backward(x)
        ctx.library = library
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _run_activation(ctx.library.squared_relu_backward, x, up.contiguous(), dx)
        return dx, None


def _run_activation(run: Function, *tensors: Tensor) -> None:
    places = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
    size = ctypes.c_int64(tensors[0].numel())
    run(*places, size, ctypes.c_int64(torch.get_num_threads()))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        seen: Tensor,
        shape: Shape,
        library: ctypes.CDLL,
    ) -> Tensor:
        B, T, _ = qkv.shape
        gains = None
        if q_gain is not None and k_gain is not None:
            gains = torch.stack((q_gain.float(), k_gain.float()))
        if cos is not None and sin is not None:
            cos = cos.contiguous()
            sin = sin.contiguous()
        out = qkv.new_empty(B, T, shape.heads * shape.width)
        kept = torch.empty(B, shape.heads, T, 2)
        given = dict(qkv=qkv, gains=gains, cos=cos, sin=sin, seen=seen, out=out, kept=kept)
        _run_attention(library.attention_forward, shape, given)
        ctx.save_for_backward(*given.values())
        ctx.names = tuple(given)
        ctx.shape = shape
        ctx.library = library
        ctx.dtype = None if q_gain is None else q_gain.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        given = dict(zip(ctx.names, ctx.saved_tensors))
        shape = ctx.shape
        d_qkv = torch.empty_like(given["qkv"])
        d_gains = None
        if given["gains"] is not None:
            # of each row and key head: sums do not depend on the number of threads
            d_gains = torch.zeros(len(up) * shape.groups, 2, shape.width)
        gradients = dict(up=up.contiguous(), d_qkv=d_qkv, d_gains=d_gains)
        _run_attention(ctx.library.attention_backward, shape, given | gradients)
        d_q = d_k = None
        if d_gains is not None:
            d_q, d_k = d_gains.sum(0).to(ctx.dtype)
        return d_qkv, d_q, d_k, None, None, None, None, None


def _run_attention(run: Function, shape: Shape, tensors: dict[str, Tensor | None]) -> None:
    places = {key: x if x is None else x.data_ptr() for key, x in tensors.items()}
    qkv = tensors["qkv"]
    cos = tensors["cos"]
    assert qkv is not None
    call = _Call(
        **places,
        rows=qkv.shape[0],
        tokens=qkv.shape[1],
        heads=shape.heads,
        groups=shape.groups,
        width=shape.width,
        turns=1 if cos is None else len(cos),
        threads=torch.get_num_threads(),
        eps=shape.eps,
    )
    run(ctypes.byref(call))
