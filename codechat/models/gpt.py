"""The model: a decoder-only transformer with pre-norm RMSNorm, rotary positions, causal
attention, a non-gated 4x MLP with squared ReLU, no biases and a tied head; or one of its
options.

The embedding holds `vocab_size` tokens, then `n_tags` chat tags, then unused padding rows up to
a multiple of 64, which `token_logprobs` and sampling exclude. Weights are float32;
`numerics.autocast` decides the dtype of matrix products.

Shapes: B sequences, T tokens, S cached tokens, D width, H heads, K key-value heads, E head
width, V padded vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from codechat.core.errors import ConfigError
from codechat.distributed import sharding
from codechat.models import attention
from codechat.models.config import LORA_QKV, GPTConfig
from codechat.models.fast import attention as fast_attention
from codechat.models.fast import head
from codechat.models.fast.device import early_places, rows_to_add
from codechat.models.fast.functions import rms_norm, squared_relu, through_swiglu

if TYPE_CHECKING:
    from codechat.models.masks import Mask

Rope = tuple[Tensor, Tensor] | None  # of `rope_table`
# Attention of new tokens to those that a cache keeps, `KVCache.attend` of one block: (q, k, v,
# mask) -> (B, H, T, E).
CachedAttention = Callable[..., Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_table(cfg: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1|B, 1, T, E) of rotary positions (1|B, T) (RoFormer,
    arXiv:2104.09864, eq. 34) for `rotate`: both halves of E are equal except for the sine's
    sign.

    With rope_scaling as `apply_scaling` of Llama 3.1: a wave that turns n times within the
    original context keeps its angle for n >= high, is slowed by the factor for n <= low, and
    mixed between."""
    # float32 also under autocast: bfloat16 has 8 bits, and would round positions above 256
    half = torch.arange(0, cfg.rotary_width, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / cfg.rope_theta ** (half / cfg.rotary_width)  # (E/2,) angles per token
    if cfg.rope_scaling is not None:
        factor, low, high, context = cfg.rope_scaling
        kept = ((context * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = kept * frequency + (1 - kept) * frequency / factor
    angle = positions[:, None, :, None].float() * frequency
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, E), the halves (a, b) of E, by each position's angles: (a cos - b sin, b
    cos + a sin)."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(wide.shape[-1] // 2, -1), sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; rotation in halves, as in Hugging Face's
    Llama family."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        # one matrix for queries, keys and values: one larger product instead of three
        self.qkv = nn.Linear(
            cfg.n_embd, (cfg.n_head + 2 * cfg.kv_heads) * cfg.head_dim, bias=cfg.qkv_bias
        )
        self.out = nn.Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    def forward(
        self, x: Tensor, rope: Rope, mask: Mask | None, cached: CachedAttention | None
    ) -> Tensor:
        cfg = self.cfg
        B, T, _ = x.shape
        qkv = self.qkv(x)
        # of a cache only the first tokens: later ones attend to what it keeps, under a mask
        whole = cached is None or (mask is None and T > 1)
        faster = self._faster(qkv, rope, mask) if whole else None
        if faster is not None and cached is None:
            return self.out(faster)
        heads = qkv.view(B, T, cfg.n_head + 2 * cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        # (B, H + K, T, E), (B, K, T, E)
        qk, v = heads.split((cfg.n_head + cfg.kv_heads, cfg.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_gain = self.q_norm.weight.expand(cfg.n_head, 1, -1)
            k_gain = self.k_norm.weight.expand(cfg.kv_heads, 1, -1)
            # one pass over both, rounded once they are rotated
            qk = rms_norm(qk.float(), torch.cat((q_gain, k_gain)), cfg.norm_eps)
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk.to(v.dtype).split((cfg.n_head, cfg.kv_heads), dim=1)
        if cached is None:
            y = attention.attend(q, k, v, mask, causal=cfg.causal, products=cfg.attention_products)
        else:
            queries = q if faster is None else q[:, :0]  # without any, keys and values are kept
            with torch.autocast(x.device.type, enabled=False):  # the cache's dtype counts
                y = cached(queries, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(B, T, -1) if faster is None else faster)

    def _faster(self, qkv: Tensor, rope: Rope, mask: Mask | None) -> Tensor | None:
        """(B, T, H E), what comes between the two products, where one kernel does it all."""
        gains = None
        if self.q_norm is not None and self.k_norm is not None:
            gains = (self.q_norm.weight, self.k_norm.weight)
        return fast_attention.attend_fused(qkv, self.cfg, gains=gains, rope=rope, mask=mask)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values
    of all heads are made of one latent vector per token (L), and all heads share one rotated
    key (R). Sampling keeps these two.

    With a cache the matrices that make keys and values are absorbed: q (W c) = (W' q) c, and
    the weighted sum of latents is multiplied by the values' matrix once. So the latents are
    attended to as the keys and values of a single key head."""

    q: nn.Linear  # or, with compressed queries, the next two
    q_a: nn.Linear
    q_b: nn.Linear
    kv_a: nn.Linear
    kv_b: nn.Linear
    out: nn.Linear

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        for name, (n_in, n_out) in cfg.matrices.items():
            if name in LORA_QKV or name == "out":
                setattr(self, name, nn.Linear(n_in, n_out, bias=False))
        self.q_norm = RMSNorm(cfg.q_rank, cfg.norm_eps) if cfg.q_rank else None
        self.kv_norm = RMSNorm(cfg.latent_width, cfg.norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, mask: Mask | None, cached: CachedAttention | None
    ) -> Tensor:
        cfg = self.cfg
        B, T, _ = x.shape
        assert rope is not None, "GPTConfig refuses learned positions"
        queries = self.q(x) if self.q_norm is None else self.q_b(self.q_norm(self.q_a(x)))
        q = queries.view(B, T, cfg.n_head, cfg.query_width).transpose(1, 2)  # (B, H, T, E + R)
        q, q_turned = q.split((cfg.head_dim, cfg.rotary_width), dim=-1)
        # the rotated part stands apart: a rotation between W and c could not be absorbed into q
        latent, k_turned = self.kv_a(x).split((cfg.latent_width, cfg.rotary_width), dim=-1)
        latent = self.kv_norm(latent)  # (B, T, L)
        q_turned = rotate(q_turned, *rope)
        k_turned = rotate(k_turned[:, None], *rope)  # (B, 1, T, R)
        if cached is None:
            kv = self.kv_b(latent).view(B, T, cfg.n_head, 2 * cfg.head_dim).transpose(1, 2)
            k, v = kv.split(cfg.head_dim, dim=-1)  # (B, H, T, E) each
            k = torch.cat((k, k_turned.expand(-1, cfg.n_head, -1, -1)), dim=-1)
            q = torch.cat((q, q_turned), dim=-1)
            y = attention.attend(q, k, v, mask, causal=cfg.causal, products=cfg.attention_products)
        else:
            up_k, up_v = self._absorbed(q.dtype)
            k = torch.cat((latent[:, None], k_turned), dim=-1)  # (B, 1, T, L + R)
            # a cache divides scores by the root of this width; they are those of E + R
            q = torch.cat((q @ up_k, q_turned), dim=-1) * (k.shape[-1] / cfg.query_width) ** 0.5
            with torch.autocast(x.device.type, enabled=False):
                y = cached(q, k, k[..., : cfg.latent_width], mask)
            y = y @ up_v.mT
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def _absorbed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The matrices (H, E, L) that make keys and values of a latent vector."""
        weight = self.kv_b.weight.to(dtype).view(self.cfg.n_head, 2 * self.cfg.head_dim, -1)
        keys, values = weight.split(self.cfg.head_dim, dim=1)
        return keys, values


class MLP(nn.Module):
    """Feed-forward: squared ReLU (Primer, arXiv:2109.08668), GELU, or SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.kind = cfg.mlp
        self.recomputed = cfg.recompute == "blocks"
        self.up = nn.Linear(cfg.n_embd, cfg.hidden_width, bias=False)
        self.gate = (
            nn.Linear(cfg.n_embd, cfg.hidden_width, bias=False) if cfg.mlp == "swiglu" else None
        )
        self.down = nn.Linear(cfg.hidden_width, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.gate is not None:
            gate = self.gate(x)
            # hooks within those that recompute a whole block would keep what it drops
            return (
                self.down(F.silu(gate) * h)
                if self.recomputed
                else through_swiglu(self.down, gate, h)
            )
        return self.down(squared_relu(h) if self.kind == "relu2" else F.gelu(h))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    With places (N,), indices into the B T tokens, the MLP runs on those tokens only: (N, D)."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.attn = LatentAttention(cfg) if cfg.attention == "mla" else Attention(cfg)
        self.mlp_norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        mask: Mask | None,
        cached: CachedAttention | None,
        places: Tensor | None,
    ) -> Tensor:
        y = self.attn(self.attn_norm(x), rope, mask, cached)
        # chosen before the MLP, which has most of a block's products
        if places is not None:
            x = x.flatten(0, 1)[places]
            y = y.flatten(0, 1)[places]
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


def _table(rows: int, width: int) -> nn.Embedding:
    """Without weights: to draw some on the meta device, `nn.Embedding` imports torch's
    compiler, a second or two."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class GPT(nn.Module):
    """The language model, initialised from `seed`; on the meta device call `to_empty` and
    `init_weights`."""

    rounded_head: Tensor | None

    def __init__(self, cfg: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.wte = _table(cfg.padded_vocab, cfg.n_embd)
        self.wpe = _table(cfg.block_size, cfg.n_embd) if cfg.pos == "learned" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        # no head module when tied: to_empty() would silently untie it and FSDP groups could not
        # share it
        self.head = None if cfg.tied else nn.Linear(cfg.n_embd, cfg.padded_vocab, bias=False)
        # of a frozen tied head, in the dtype of products (`lora.hold_matrices_in`)
        self.register_buffer("rounded_head", None, persistent=False)
        if not self.wte.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter from a generator seeded by (seed, its name): sharding does not
        change the weights.

        Projections that write into the residual stream are zero: the model starts as a bigram
        of its embedding."""
        for name, p in self.named_parameters():
            # crc32, since hash() of a string differs between processes; on the CPU, so that every
            # device draws the same
            rng = torch.Generator().manual_seed(seed * 1_000_003 + crc32(name.encode()))
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith(("out.weight", "down.weight", "bias")):
                p.zero_()
            else:
                # a matrix keeps the variance of its input; the embedding has GPT-2's 0.02, since
                # it is the head too, and a new model's logits should be near 0
                std = 0.02 if name.startswith(("wte", "wpe", "head")) else p.shape[1] ** -0.5
                sharding.fill(p, torch.randn(p.shape, generator=rng) * std)

    @property
    def head_name(self) -> str:
        """Of `head_weight` among the parameters."""
        return "wte.weight" if self.head is None else "head.weight"

    def head_weight(self) -> Tensor:
        """(V, D): the tied embedding, or the head's own."""
        if self.rounded_head is not None:
            return self.rounded_head
        return self.wte.weight if self.head is None else self.head.weight

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(B, T) ids at positions (1|B, T) -> (B, T, D), in the dtype of the embedding:
        the sum that blocks add to."""
        x = self.wte(ids)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        return x

    def hidden(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        cache: attention.KVCache | None = None,
        n_new: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, D) after the last norm; with places (N,), indices into the B T
        tokens, of these (N, D).

        positions: (B, T), default 0..T-1 or continuing the cache. mask: of `attention.attend`,
        default causal.
        cache: tokens are appended to it; n_new (B,): how many of each right-padded row are real
        (default all)."""
        cfg = self.cfg
        T = ids.shape[1]
        if cache is not None:
            if not cfg.causal:
                raise ConfigError(
                    "got a cache with causal False; expected True; "
                    "take an objective without a cache"
                )
            positions = cache.positions(T)
            mask = cache.mask(T)
        elif positions is None:
            if T > cfg.block_size:
                raise ConfigError(
                    f"got a sequence of {T} tokens; expected at most "
                    f"block_size {cfg.block_size}; shorten it"
                )
            positions = torch.arange(T, device=ids.device)[None]
        x = self.embedded(ids, positions)
        rope = rope_table(cfg, positions) if cfg.pos == "rope" else None
        recomputes = cfg.recompute == "blocks" and self.training and torch.is_grad_enabled()
        for layer, block in enumerate(self.blocks):
            # after the last attention no token reads another, so its MLP and the norm can run
            # on `places` only
            last = layer == len(self.blocks) - 1
            context = (
                rope,
                mask,
                None if cache is None else partial(cache.attend, layer),
                early_places(places, x.device) if last else None,
            )
            x = (
                checkpoint(block, x, *context, use_reentrant=False)
                if recomputes
                else block(x, *context)
            )
        if cache is not None:
            cache.advance(T, n_new)
        if places is not None and x.ndim == 3:  # the last block has not chosen them yet
            x = x.flatten(0, 1)[places]
        return self.norm(x)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, V) logits; arguments of `hidden`. Never sample padding rows,
        from cfg.n_ids on."""
        return F.linear(self.hidden(ids, positions=positions, mask=mask), self.head_weight())

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        every: bool = False,
        places: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Cross-entropy in nats of targets (B, T) given ids. A target of -100 carries no loss; if
        all are -100, the loss is 0. reduction "none" gives (B, T).

        every: promises that no target is -100. places: indices of the other targets into (B T);
        found on the host, they spare a GPU the wait for their number. positions, mask: of
        `hidden`."""
        flat = targets.flatten()
        n = len(flat)
        # the last block and the head skip tokens without a target
        if not every or reduction == "none":
            places = (flat >= 0).nonzero()[:, 0] if places is None else places
            more = rows_to_add(len(places), n, ids.device)
            n = len(places)
            flat = _with_rows(flat[places], more, -100)
            places = _with_rows(places, more)
        hidden = self.hidden(ids, positions=positions, mask=mask, places=places).flatten(0, -2)
        if places is not None and reduction == "none":
            logprobs, _ = head.logprobs(
                hidden[:n], self.head_weight(), flat[:n], n_ids=self.cfg.padded_vocab
            )
            return _spread(-logprobs, places[:n], targets)
        total = head.cross_entropy(hidden, self.head_weight(), flat)
        return total if reduction == "sum" else total / max(1, n)

    def token_logprobs(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        hidden: Tensor | None = None,
        states: bool = False,
        places: Tensor | None = None,
        kept: Tensor | None = None,
        positions: Tensor | None = None,
        mask: Mask | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probability of `targets` (B, T) given ids, and entropy of each distribution (B, T),
        in nats, of the distribution that `generate.sample` draws from without truncation; 0 where
        the target is -100.

        places, positions, mask: as of `loss`. kept (N, K): for each of the N targets the ids
        among which it was drawn, -1 = none; log-probability and entropy are then of the
        distribution over these ids.
        The entropy carries gradient only with entropy_grad. hidden: `self.hidden(ids)`, if
        already computed. states: also return it, (B, T, D). Where the model is sharded, one
        method must compute both."""
        flat = targets.flatten()
        places = (flat >= 0).nonzero()[:, 0] if places is None else places
        n = len(places)
        more = rows_to_add(n, len(flat), ids.device)
        chosen = _with_rows(places, more)
        if hidden is None:
            hidden = self.hidden(
                ids, positions=positions, mask=mask, places=None if states else chosen
            )
        logprobs, entropy = head.logprobs(
            hidden if hidden.ndim == 2 else hidden.flatten(0, 1)[chosen],
            self.head_weight(),
            _with_rows(flat[places], more),
            n_ids=self.cfg.n_ids,
            temperature=temperature,
            entropy_grad=entropy_grad,
            kept=None if kept is None else _with_rows(kept, more),
        )
        logprobs = _spread(logprobs[:n], places, targets)
        entropy = _spread(entropy[:n], places, targets)
        return (logprobs, entropy, hidden) if states else (logprobs, entropy)


def _with_rows(values: Tensor, more: int, added: int = 0) -> Tensor:
    """Values (N, ..), and so many rows of this one."""
    if not more:
        return values
    rows = values.new_full((more, *values.shape[1:]), added)
    return torch.cat((values, rows))


def _spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Values (N,) at their places in (B, T), 0 elsewhere."""
    return values.new_zeros(like.numel()).index_put((places,), values).view_as(like)
