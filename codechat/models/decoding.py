"""Copies of the weights for decoding: what makes one new token per sequence fast.

A product of few rows waits for the weight to arrive from memory. torch's CPU library packs a weight (out, in) again in
every such product; a copy as (in, out) in the compute dtype needs no packing. A float32 output head is packed once by
oneDNN, up to a third faster than that. (A GPU reads weights as they are stored: `generate.reading`.)

Shapes: B sequences, D width, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codechat.models.gpt import GPT
from codechat.models.layers import compute_dtype

FEW_ROWS = 48  # only inputs of this many rows or fewer are faster with a copy
PACKED_HEAD = 1 << 19  # heads of this many weights or more are packed by oneDNN; smaller ones gain nothing


@contextmanager
def prepared(model: GPT) -> Iterator[Callable[[Tensor], Tensor]]:
    """Copy the weights of the blocks and of the output head on a CPU; yields hidden (B, D) -> logits (B, V).

    The copies live until the context closes; the weights must not change meanwhile. With gradients enabled, and for
    inputs of more than FEW_ROWS rows, the weights themselves are read."""
    head = model.head_weight()
    layers, dtype = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)], compute_dtype(head)
    with torch.no_grad():
        logits_of = _head(head, dtype)
        for layer in layers:
            layer.forward = _forward(layer, dtype)  # hides the method of the class
    try:
        yield logits_of
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """`layer.forward` that reads a transposed copy of the weight where it may."""
    bias, transposed = layer.bias, layer.weight.to(dtype).t().contiguous()

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() > FEW_ROWS * x.shape[-1]:
            return nn.Linear.forward(layer, x)
        return x @ transposed if bias is None else x @ transposed + bias

    return forward


def _head(weight: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """x (B, D) -> x @ weight.T (B, V)."""
    if weight.numel() >= PACKED_HEAD and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)  # private, but torch's compiler calls these two
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    transposed = weight.to(dtype).t().contiguous()
    return lambda x: x @ transposed if len(x) <= FEW_ROWS else F.linear(x, weight)
