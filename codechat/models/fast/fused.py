"""Attention of a training step by `cpp/attention.c`, where `make cpp` has built it: norms of
queries and keys, rotation, scores, softmax and the weighted sum in one pass, and their slope in
another. In bfloat16; scores are not rounded, so it is nearer to float32 than the plain way.

Shapes: B rows, T tokens, H heads, K key-value heads, E head width."""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codechat.distributed import dist, numerics
from codechat.models.fast.device import on_cpu

LIBRARY = Path(__file__).parents[3] / "build" / "cpp" / "libattention.so"
WIDTHS = (64, 128)  # of a head
INPUTS = ("qkv", "gains", "cos", "sin", "seen", "out", "kept", "up", "d_qkv", "d_gains")
SIZES = ("rows", "tokens", "heads", "groups", "width", "turns", "threads")


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in INPUTS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_float),
    ]


@cache
def kernel() -> ctypes.CDLL | None:
    """The library; none where it was not built, or the processor lacks what it needs."""
    if not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:  # a torch without GNU's OpenMP, of which the library has its threads
        return None
    if not library.attention_runs_here():
        return None
    if dist.is_main():  # roundings differ from those of another machine
        print(f"attention of training steps: {LIBRARY.name} of `make cpp`", file=sys.stderr)
    return library


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
    if qkv.dtype != torch.bfloat16 or shape.width not in WIDTHS or not on_cpu(qkv.device):
        return None
    traced = numerics.planned is not None or torch.compiler.is_compiling()
    if traced or kernel() is None:
        return None
    if seen is None:
        seen = torch.zeros(*qkv.shape[:2], 3, dtype=torch.int32)
    q_gain, k_gain = gains or (None, None)
    cos, sin = rope or (None, None)
    return _Attention.apply(qkv.contiguous(), q_gain, k_gain, cos, sin, seen, shape)


def seen_tokens(docs: Tensor, branches: Tensor | None) -> Tensor | None:
    """(B, T, 3) int32: a token i of `Documents` attends to tokens [first, second) and [third, i].
    None where a document or a branch is not in one piece."""
    branches = torch.zeros_like(docs) if branches is None else branches
    at = torch.arange(docs.shape[1]).expand_as(docs)
    real = docs >= 0
    begins = torch.ones_like(real)
    begins[:, 1:] = (docs[:, 1:] != docs[:, :-1]) | ~real[:, 1:]
    splits = begins.clone()
    splits[:, 1:] |= branches[:, 1:] != branches[:, :-1]
    first = torch.where(begins, at, 0).cummax(1).values
    third = torch.where(splits, at, 0).cummax(1).values
    trunk = (branches == 0) & real
    so_far = trunk.cumsum(1)
    second = first + so_far - (so_far - trunk.long()).gather(1, first)
    # numbers that only grow: nothing comes a second time
    whole = (second == at + 1) | ~trunk
    grows = docs[:, 1:] > docs.cummax(1).values[:, :-1]
    goes_on = ~begins[:, 1:] & (branches[:, 1:] >= branches[:, :-1])
    whole[:, 1:] &= grows | goes_on | ~real[:, 1:]
    return torch.stack((first, second, third), dim=-1).int() if whole.all() else None


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
        _run("attention_forward", shape, given)
        ctx.save_for_backward(*given.values())
        ctx.names = tuple(given)
        ctx.shape = shape
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
        slopes = dict(up=up.contiguous(), d_qkv=d_qkv, d_gains=d_gains)
        _run("attention_backward", shape, given | slopes)
        if d_gains is None:
            return d_qkv, None, None, None, None, None, None
        d_q, d_k = d_gains.sum(0).to(ctx.dtype)
        return d_qkv, d_q, d_k, None, None, None, None


def _run(name: str, shape: Shape, tensors: dict[str, Tensor | None]) -> None:
    library = kernel()
    assert library is not None
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
    getattr(library, name)(ctypes.byref(call))
