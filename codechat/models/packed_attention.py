"""Attention over packed rows: under a dense mask on a CPU, under a block mask of flex attention on a GPU.

A dense mask keeps the flash kernels of `scaled_dot_product_attention` from being taken, and every block reads (B, T, T) of it. `dense` decides by the
device; what makes masks of packed rows (`conversations.packed_mask`, `rollout.Packed.mask`) asks it, and `attend` takes either.

Left out: rows of one document each, which need no mask.

Shapes: B rows, T tokens, H heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DENSE = ("cpu",)  # kinds of devices that take dense masks; elsewhere none reaches SDPA
BLOCK = 128  # tokens: flex attention skips blocks of this size whole
QUERIES = 128  # of `as_products`: fewer make narrow products, more compute scores that causal attention does not need


def dense(device: torch.device) -> bool:
    """Whether masks are tensors on such a device."""
    return device.type in DENSE


def flex_mask(docs: Tensor, branches: Tensor | None = None) -> Any:
    """What each token sees, as a `BlockMask`: earlier tokens of its document and, with branches, of these the ones of branch 0 and of its own;
    padding (document below 0) sees itself, since a softmax without keys is NaN. docs, branches: (B, T)."""
    from torch.nn.attention.flex_attention import create_block_mask

    branches = torch.zeros_like(docs) if branches is None else branches

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (docs[b, q] == docs[b, k]) & (docs[b, q] >= 0) & (k <= q)
        return (own & ((branches[b, k] == 0) | (branches[b, q] == branches[b, k]))) | (q == k)

    B, T = docs.shape
    return create_block_mask(sees, B, None, T, T, device=docs.device, BLOCK_SIZE=BLOCK)


@cache
def _flex() -> Callable[..., Tensor]:
    """Flex attention; compiled, without which it would hold all scores. Within a compiled block it becomes part of that."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, causal: bool, products: bool = False) -> Tensor:
    """Attention (B, H, T, E) of q over k and v (B, K, T, E): under a mask, bool (B, 1, T, T) or of `flex_mask`, else causal or of everything.

    products: on a CPU in bfloat16, by `as_products`."""
    grouped = k.shape[1] != q.shape[1]
    if products and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return as_products(q, k, v, mask, causal=causal)
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and causal, enable_gqa=grouped
        )
    flex = torch.nn.attention.flex_attention.flex_attention if torch.compiler.is_compiling() else _flex()
    return flex(q, k, v, block_mask=mask, enable_gqa=grouped)


def as_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """`attend` written out: scores, softmax in float32, weighted sum, for QUERIES queries at a time and only the keys that causal ones may see.

    The fused kernel of a CPU computes in tiles that its bfloat16 instructions are not fast on. The weights (H x T x T per row, half of that
    where causal) are kept for the backward pass."""
    T, group = q.shape[2], q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q = q * q.shape[-1] ** -0.5
    found = []
    for at in range(0, T, QUERIES):
        end = min(at + QUERIES, T)
        keys = end if causal else T
        scores = (q[:, :, at:end] @ k[:, :, :keys].mT).float()
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, at:end, :keys], -torch.inf)
        elif causal:
            later = torch.arange(keys, device=q.device) > torch.arange(at, end, device=q.device)[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        found.append(scores.softmax(-1).to(q.dtype) @ v[:, :, :keys])
    return torch.cat(found, dim=2)
