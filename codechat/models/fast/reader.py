"""The model as decoding reads it: its weights are copied once for all batches and must not
change meanwhile.

A product of few rows waits for the weight from memory, and torch packs a weight (out, in) again
in every such product. So linear layers read a copy of their weight in the order in which
decoding wants it."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codechat.distributed import sharding
from codechat.models import lora
from codechat.models.fast.device import compute_dtype, on_cpu
from codechat.models.gpt import GPT, MLP
from codechat.models.lora import LoRALinear

FEW_ROWS = 48  # inputs of this many rows or fewer are faster with a transposed copy of the weight
# float32 weights of this size or more, and all in bfloat16, are faster packed by oneDNN, for
# any number of rows
PACKED = 1 << 19
ABSORBED = "kv_b"  # of latent attention, which with a cache reads its weight and does not call it


@dataclass(frozen=True)
class Reader:
    """What decodes. logits_of: last states (B, D) -> (B, V). graph: with static shapes
    (`decode_graph`)."""

    model: GPT
    logits_of: Callable[[Tensor], Tensor]
    graph: bool = False


def reader_of(model: GPT, graph: bool | None = None) -> Reader:
    """The reader of these weights, for use without gradients; the model itself stays as it is.
    graph: none = on a GPU."""
    decodes_on_cpu = on_cpu(model.wte.weight.device)
    head = model.head_weight().detach()
    dtype = compute_dtype(model.wte.weight)
    if decodes_on_cpu and not graph:
        twin = copy(model)
        twin._modules = {**model._modules, "blocks": reading_copy(model.blocks, dtype)}
        return Reader(twin, ReadingLinear(lambda hidden: F.linear(hidden, head), head, None, dtype))
    head = head.to(dtype)
    return Reader(
        sharding.plain_copy(lora.merged(model), dtype),
        lambda hidden: F.linear(hidden, head),
        graph=not decodes_on_cpu if graph is None else graph,
    )


class ReadingLinear(nn.Module):
    """`layer` (x -> x W' + b) with a copy of W (out, in) in the dtype of products. W must not
    change meanwhile."""

    def __init__(
        self,
        layer: Callable[[Tensor], Tensor],
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        weight = weight.detach().to(dtype)
        if _packs(weight):
            # private operators, but torch's compiler calls them too
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            added = None if bias is None else bias.detach().to(dtype)
            self.most_rows = math.inf
            self.product = lambda x: torch.ops.mkldnn._linear_pointwise(
                x.to(dtype), packed, added, "none", [], ""
            )
        else:
            transposed = weight.t().contiguous()
            self.most_rows = FEW_ROWS
            self.product = lambda x: x @ transposed if bias is None else x @ transposed + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if x.numel() <= self.most_rows * x.shape[-1] else self.layer(x)


class ReadingGatedMLP(nn.Module):
    """A gated MLP whose first two products are one."""

    def __init__(self, up: nn.Linear, gate: nn.Linear, down: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        both = torch.cat([up.weight, gate.weight])
        self.up_and_gate = ReadingLinear(
            lambda x: torch.cat((up(x), gate(x)), -1), both, None, dtype
        )
        self.down = reading_copy(down, dtype)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.up_and_gate(x).chunk(2, -1)
        return self.down(F.silu(gate) * h)


def reading_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same function for reading without gradients: linear layers, adapters merged, have
    copies of their weights; every other tensor is shared."""
    if isinstance(module, nn.Linear | LoRALinear):
        return ReadingLinear(module, module.weight, module.bias, dtype)
    if isinstance(module, MLP) and module.gate is not None:
        return ReadingGatedMLP(module.up, module.gate, module.down, dtype)
    twin = copy(module)
    twin._modules = dict(module._modules)
    for name, part in module.named_children():
        if name != ABSORBED:
            twin._modules[name] = reading_copy(part, dtype)
    return twin


def _packs(weight: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= PACKED
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
