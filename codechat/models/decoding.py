"""Copies of the weights for decoding: what makes one new token per sequence fast.

A product of few rows waits for the weight to arrive from memory. torch's CPU library packs a weight (out, in) again in
every such product; a copy as (in, out) in the compute dtype needs no packing. A float32 output head on a CPU is packed
once by oneDNN, up to a third faster than that. A GPU reads
weights as they are stored: there a copy is made only where the dtype differs.

Shapes: B sequences, D width, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

FEW_ROWS = 48  # on a CPU only inputs of this many rows or fewer are faster with a copy
PACKED_HEAD = 1 << 19  # heads of this many weights or more are packed by oneDNN; smaller ones gain nothing


@contextmanager
def prepared(blocks: nn.Module, head: Callable[[], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Copy the weights of `blocks` and of the output head (V, D), which `head` returns; yields hidden (B, D) -> logits
    (B, V).

    The copies live until the context closes; the weights must not change meanwhile. With gradients enabled, and on a
    CPU for inputs of more than FEW_ROWS rows, the weights themselves are read."""
    weight = head()
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    most_rows = FEW_ROWS if kind == "cpu" else 1 << 30
    layers = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        logits_of = _head(weight, dtype, most_rows)
        for layer in layers:
            layer.forward = _forward(layer, dtype, most_rows)  # hides the method of the class
    try:
        yield logits_of
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, dtype: torch.dtype, most_rows: int) -> Callable[[Tensor], Tensor]:
    """`layer.forward` that reads a copy of the weight where it may, on a CPU transposed."""
    bias, on_cpu = layer.bias, layer.weight.device.type == "cpu"
    transposed = (_transposed if on_cpu else Tensor.to)(layer.weight, dtype)

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > most_rows * x.shape[-1]:
            return nn.Linear.forward(layer, x)
        if not on_cpu:
            return F.linear(x, transposed, bias)
        return x @ transposed if bias is None else x @ transposed + bias

    return forward


def _head(weight: Tensor, dtype: torch.dtype, most_rows: int) -> Callable[[Tensor], Tensor]:
    """x (B, D) -> x @ weight.T (B, V)."""
    if weight.device.type != "cpu":
        copy = weight.to(dtype)
        return lambda x: F.linear(x, copy)
    large = weight.numel() >= PACKED_HEAD and dtype == torch.float32
    if large and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(
            weight, 16
        )  # private, but torch's own compiler calls these two
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    transposed = _transposed(weight, dtype)
    return lambda x: x @ transposed if len(x) <= most_rows else F.linear(x, weight)


@torch.no_grad()
def reader(model: M) -> tuple[M, Tensor]:
    """A copy of a plain model in evaluation mode that computes the same in this autocast, and its head (V, D): block
    matrices and head in the dtype of compute, the rest shared. A weight that has this dtype is not copied."""
    kind = model.wte.weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.wte.weight.dtype
    with torch.device("meta"):
        copy = type(model)(model.cfg)
    state = {n: p.to(dtype) if p.ndim == 2 and n.startswith("blocks.") else p for n, p in model.named_parameters()}
    copy.load_state_dict(state, assign=True)
    return copy.requires_grad_(False).eval(), model.head_weight().detach().to(dtype)


def _transposed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).t().contiguous()
