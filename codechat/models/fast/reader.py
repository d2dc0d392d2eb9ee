"""The model as decoding reads it: its weights are copied once for all batches and must not
change meanwhile.

A product of few rows waits for the weight from memory, and torch packs a weight (out, in) again
in every such product. So linear layers read a copy of their weight in the order in which
decoding wants it. Where the weights are in a file, that copy is all that memory holds of them."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codechat.distributed import hardware, sharding
from codechat.models import lora
from codechat.models.attention import KVCache
from codechat.models.config import GPTConfig
from codechat.models.fast import one_token
from codechat.models.fast.device import compute_dtype, on_cpu
from codechat.models.fast.memory import weight_bytes
from codechat.models.fast.one_token import RowsInC, ShortWay
from codechat.models.fast.product import Product, product_of
from codechat.models.gpt import GPT, MLP
from codechat.models.lora import LoRALinear

FEW_ROWS = 48  # inputs of this many rows or fewer are faster with a transposed copy of the weight
# float32 weights of this size or more, and all in bfloat16, are faster packed by oneDNN, for
# any number of rows
PACKED = 1 << 19
SHORT_PROMPT = 256  # tokens; attention of longer ones is faster in tiles (`fused`)
TOKENS_AT_ONCE = 512  # of prompts: weights are read once for all of them
ABSORBED = "kv_b"  # of latent attention, which with a cache reads its weight and does not call it


@dataclass(frozen=True)
class Reader:
    """What decodes. logits_of: last states (B, D) -> (B, V). graph: with static shapes
    (`decode_graph`). short: the shorter way of one new token of each row, where there is one."""

    model: GPT
    logits_of: Callable[[Tensor], Tensor]
    graph: bool = False
    short: ShortWay | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of keys and values of rows that share nothing."""
        weight = self.model.wte.weight
        return cache_dtype(self.model.cfg, weight.device, compute_dtype(weight))

    def takes_rests(self, longest: int) -> bool:
        """Whether so many tokens behind a prefix are run in C."""
        return isinstance(self.short, RowsInC) and longest <= SHORT_PROMPT

    def prompts(self, ids: Tensor, cache: KVCache, n_new: Tensor | None = None) -> Tensor:
        """(B, T) ids behind what the cache keeps, n_new (B,) of each row real, none = all -> their
        states (B, T, D). In C each token is a row of its own."""
        B, T = ids.shape
        short = self.short
        if not isinstance(short, RowsInC) or T > SHORT_PROMPT:
            return self.model.hidden(ids, cache=cache, n_new=n_new)
        lengths = torch.full((B,), T) if n_new is None else n_new
        real = torch.arange(T) < lengths[:, None]
        states = torch.zeros(B, T, self.model.cfg.n_embd)
        for some in real.nonzero().split(TOKENS_AT_ONCE):
            slots = some[:, 0].contiguous()
            ahead = some[:, 1].contiguous()
            place = cache.place_of(slots, ahead)
            states[slots, ahead] = short.step(ids[slots, ahead], place)
        cache.advance(T, n_new)
        return states

    def read(self, ids: Tensor, cache: KVCache) -> Tensor:
        """(B,) newest ids of the rows, which the cache keeps -> last states (B, D)."""
        if self.short is not None:
            place = cache.place()
            if self.short.takes(place):
                hidden = self.short.step(ids, place)
                cache.advance(1)
                return hidden
        return self.model.hidden(ids[:, None], cache=cache)[:, 0]


def cache_dtype(cfg: GPTConfig, device: torch.device, compute: torch.dtype) -> torch.dtype:
    """Of keys and values of rows that share nothing, with products in `compute`. On a CPU torch's
    attention of one new token takes 4 to 7 times as long in bfloat16, as matrix products up to
    twice as long; the one in C reads bfloat16, which keeps every bit of them."""
    if not on_cpu(device) or one_token.decodes_in_c(cfg, compute):
        return compute
    return torch.float32


def runs_rests_in_c(model: GPT) -> bool:
    """Whether a reader of this model runs tokens behind a prefix in C (`Reader.takes_rests`)."""
    weight = model.wte.weight
    in_c = one_token.decodes_in_c(model.cfg, compute_dtype(weight))
    return in_c and on_cpu(weight.device)


def reader_of(
    model: GPT,
    graph: bool | None = None,
    weights: Mapping[str, Tensor] | None = None,
    *,
    answers: bool = False,
) -> Reader:
    """The reader of a model, for use without gradients; the model itself stays as it is.
    graph: none = on a GPU. weights: of a model on the meta device, for a CPU
    (`loading.load_model`). answers: somebody waits for texts, and no training is beside them; the
    copies may then lie in large pages."""
    if weights is not None:
        return _reader_on_cpu(model, weights, answers)
    decodes_on_cpu = on_cpu(model.wte.weight.device)
    if decodes_on_cpu and not graph:
        return _reader_on_cpu(model, None, answers)
    dtype = compute_dtype(model.wte.weight)
    head = model.head_weight().detach().to(dtype)
    return Reader(
        sharding.plain_copy(lora.merged(model), dtype),
        lambda hidden: F.linear(hidden, head),
        graph=not decodes_on_cpu if graph is None else graph,
    )


def _reader_on_cpu(model: GPT, weights: Mapping[str, Tensor] | None, answers: bool) -> Reader:
    # before the blocks: what making its copy takes for a moment then serves their copies
    head = model.head_weight() if weights is None else weights[model.head_name]
    source = Source(weights, compute_dtype(head))
    if answers:
        hardware.prefer_large_pages(weight_bytes(model.cfg, source.dtype.itemsize))
    logits_of = _reading_head(head.detach(), source)
    twin = copy(model)
    twin._modules = dict(model._modules)
    for name in ("blocks", "norm"):
        twin._modules[name] = reading_copy(getattr(model, name), source, name)
    if model.wpe is not None:
        twin._modules["wpe"] = source.filled(model.wpe, "wpe")
    # a step reads few of its rows: it stays in its file
    twin._modules["wte"] = source.filled(model.wte, "wte", stays=True)
    return Reader(twin, logits_of, short=one_token.short_way(twin, source.dtype))


def _reading_head(head: Tensor, source: "Source") -> "ReadingLinear":
    return ReadingLinear(lambda hidden: F.linear(hidden, head), head, None, source)


@dataclass(frozen=True)
class Source:
    """Where copies get their weights from: by name, each read when its copy is made, or none =
    from the modules themselves. dtype: of products."""

    weights: Mapping[str, Tensor] | None
    dtype: torch.dtype

    def filled(self, module: nn.Module, name: str, *, stays: bool = False) -> Any:
        """The module with its weights; those of a file are copied, or stay there."""
        if self.weights is None:
            return module
        twin = copy(module)
        twin._parameters = dict(module._parameters)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                tensor = self.weights[f"{name}.{key}"]
                twin._parameters[key] = nn.Parameter(
                    tensor if stays else tensor.clone(), requires_grad=False
                )
        return twin

    def linear(self, layer: nn.Linear, name: str) -> nn.Linear:
        """The same of a linear layer. What is packed at once is not copied before."""
        if self.weights is None:
            return layer
        return self.filled(layer, name, stays=_packs(layer.weight.numel(), self.dtype))


class ReadingLinear(nn.Module):
    """`layer` (x -> x W' + b) with a copy of W (out, in) in the dtype of products. W must not
    change meanwhile."""

    layer: Callable[[Tensor], Tensor] | None  # for many rows; none = the copy serves any number
    in_c: Product | None = None  # the copy's product, where it is in C
    product: Callable[[Tensor], Tensor]  # by the copy

    def __init__(
        self,
        layer: Callable[[Tensor], Tensor],
        weight: Tensor,
        bias: Tensor | None,
        source: Source,
    ) -> None:
        super().__init__()
        dtype = source.dtype
        weight = weight.detach().to(dtype)
        added = None if bias is None else bias.detach().to(dtype)
        self.layer = None
        self.in_c = product_of(weight, added)
        if self.in_c is not None:
            self.product = self.in_c
        elif _packs(weight.numel(), dtype):
            # private operators, but torch's compiler calls them too
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
            self.product = lambda x: torch.ops.mkldnn._linear_pointwise(
                x.to(dtype), packed, added, "none", [], ""
            )
        else:
            self.layer = layer
            transposed = weight.t().contiguous()
            self.product = lambda x: x @ transposed if bias is None else x @ transposed + bias

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None or x.numel() <= FEW_ROWS * x.shape[-1]:
            return self.product(x)
        return self.layer(x)


class ReadingGatedMLP(nn.Module):
    """A gated MLP whose first two products are one."""

    def __init__(self, up: nn.Linear, gate: nn.Linear, down: nn.Module, source: Source) -> None:
        super().__init__()
        both = torch.cat([up.weight, gate.weight])
        self.up_and_gate = ReadingLinear(
            lambda x: torch.cat((up(x), gate(x)), -1), both, None, source
        )
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.up_and_gate(x).chunk(2, -1)
        return self.down(F.silu(gate) * h)


def reading_copy(module: nn.Module, source: Source, name: str) -> nn.Module:
    """The same function for reading without gradients: linear layers, adapters merged, have
    copies of their weights; every other tensor is shared."""
    if isinstance(module, LoRALinear):
        return ReadingLinear(module, module.weight, module.bias, source)
    if isinstance(module, nn.Linear):
        layer = source.linear(module, name)
        return ReadingLinear(layer, layer.weight, layer.bias, source)
    if isinstance(module, MLP) and module.gate is not None:
        return ReadingGatedMLP(
            source.linear(module.up, f"{name}.up"),
            source.linear(module.gate, f"{name}.gate"),
            reading_copy(module.down, source, f"{name}.down"),
            source,
        )
    twin = copy(source.filled(module, name))
    twin._modules = dict(module._modules)
    for part, inner in module.named_children():
        inside = f"{name}.{part}"
        if part == ABSORBED:
            twin._modules[part] = source.filled(inner, inside)
        else:
            twin._modules[part] = reading_copy(inner, source, inside)
    return twin


def _packs(size: int, dtype: torch.dtype) -> bool:
    """Whether a weight of so many numbers is packed."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return size >= PACKED
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
