"""The model: a decoder-only transformer with pre-norm RMSNorm, rotary positions, SDPA attention, a non-gated 4x MLP
with squared ReLU, no biases and a tied head; or one of its options.

The embedding holds `vocab_size` tokens, then `n_tags` chat tags, then unused padding rows up to a multiple of 64, which
`token_logprobs` and sampling exclude. Weights are float32; `dist.autocast` decides the dtype of matrix products.

Shapes: B sequences, T tokens, S cached tokens, D width, H heads, K key-value heads, E head width, V padded vocabulary.
"""

import math
from typing import Any, Literal
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from codechat.core.errors import ConfigError
from codechat.distributed import sharding
from codechat.models import attention, head
from codechat.models.config import LORA_PARTS, GPTConfig

Rope = tuple[Tensor, Tensor] | None  # of `rope_table`
Cached = tuple[attention.KVCache, int] | None  # a cache and the number of the block


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467), in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm` with a weight that broadcasts over x (..., D)."""
    wide = x.float()
    if written_out(x):
        return _RMSNorm.apply(wide, weight, eps).to(x.dtype)
    gain = weight.float() if weight.ndim == 1 else None  # torch's own takes none of several heads
    normed = F.rms_norm(wide, wide.shape[-1:], gain, eps)
    return (normed * weight if gain is None else normed).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv:2109.08668), as a product: CUDA's autocast would take a square to float32."""
    return _SquaredReLU.apply(x) if written_out(x) else (kept := torch.relu(x)) * kept


def written_out(x: Tensor) -> bool:
    """Whether to take the hand-written gradients: on a CPU, where autograd would keep and pass over more."""
    return attention.dense(x.device) and x.requires_grad


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
        # sharded weights come in bfloat16
        both = up * normed
        gain = weight.to(up.dtype)
        shared = (both * gain).mean(-1, keepdim=True) if weight.ndim > 1 else (both @ gain)[..., None] / up.shape[-1]
        dx = (up * gain).addcmul_(normed, shared, value=-1).mul_(scale)
        return dx, both.sum_to_size(weight.shape).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


class _SquaredReLU(torch.autograd.Function):
    """Slope 2 relu(x): where x is below 0 the value itself is 0, so nothing has to be compared again."""

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


def rope_table(
    cfg: GPTConfig,
    length: int,
    positions: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1|B, 1, T, E) of rotary positions (RoFormer, arXiv:2104.09864, eq. 34) for `rotate`: both
    halves of E are equal except for the sine's sign.

    With rope_scaling as `apply_scaling` of Llama 3.1: a wave that turns n times within the original context keeps its
    angle for n >= high, is slowed by the factor for n <= low, and mixed between."""
    half = torch.arange(0, cfg.rotary_width, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / cfg.rope_theta ** (half / cfg.rotary_width)  # (E/2,) angles per token
    if cfg.rope_scaling is not None:
        factor, low, high, context = cfg.rope_scaling
        kept = ((context * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = kept * frequency + (1 - kept) * frequency / factor
    if positions is None:
        positions = torch.arange(length, device=device)[None]
    angle = positions[:, None, :, None].float() * frequency
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, E), the halves (a, b) of E, by each position's angles: (a cos - b sin, b cos + a sin)."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(wide.shape[-1] // 2, -1), sin).to(x.dtype)


def residual(cfg: GPTConfig, x: Tensor) -> Tensor:
    """Embedded tokens in the dtype of the sum that blocks add to: float32, or with bf16_residual that of products."""
    return x.to(head.compute_dtype(x)) if cfg.bf16_residual else x


# ---- the model


class Attention(nn.Module):
    """Causal self-attention with rotary positions; rotation in halves, as in Hugging Face's Llama family."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.n_embd, (cfg.n_head + 2 * cfg.kv_heads) * cfg.head_dim, bias=cfg.qkv_bias)
        self.out = nn.Linear(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, cached: Cached) -> Tensor:
        cfg, (B, T, _) = self.cfg, x.shape
        heads = self.qkv(x).view(B, T, cfg.n_head + 2 * cfg.kv_heads, cfg.head_dim).transpose(1, 2)
        qk, v = heads.split((cfg.n_head + cfg.kv_heads, cfg.kv_heads), dim=1)  # (B, H + K, T, E), (B, K, T, E)
        if cfg.qk_norm:
            gains = self.q_norm.weight.expand(cfg.n_head, 1, -1), self.k_norm.weight.expand(cfg.kv_heads, 1, -1)
            qk = rms_norm(qk.float(), torch.cat(gains), cfg.norm_eps)  # one pass over both, rounded once rotated
        q, k = (qk if rope is None else rotate(qk, *rope)).to(v.dtype).split((cfg.n_head, cfg.kv_heads), dim=1)
        if cached is not None:
            cache, layer = cached
            with torch.autocast(x.device.type, enabled=False):  # the cache's dtype counts
                y = cache.attend(layer, q, k, v, mask)
        else:
            y = attention.attend(q, k, v, mask, causal=cfg.causal, products=cfg.attention_products)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are
    made of one latent vector per token (L), and all heads share one rotated key (R). These two are what sampling
    keeps.

    With a cache the matrices that make keys and values are absorbed: q (W c) = (W' q) c, and the weighted sum of
    latents is multiplied by the values' matrix once. So the latents are attended to as the keys and values of a
    single key head."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg = cfg
        for name, (n_in, n_out) in cfg.matrices.items():
            if name in LORA_PARTS["qkv"] or name == "out":
                setattr(self, name, nn.Linear(n_in, n_out, bias=False))
        self.q_norm = RMSNorm(cfg.q_rank, cfg.norm_eps) if cfg.q_rank else None
        self.kv_norm = RMSNorm(cfg.latent_width, cfg.norm_eps)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, cached: Cached) -> Tensor:
        cfg, (B, T, _) = self.cfg, x.shape
        queries = self.q(x) if self.q_norm is None else self.q_b(self.q_norm(self.q_a(x)))
        q = queries.view(B, T, cfg.n_head, cfg.query_width).transpose(1, 2)  # (B, H, T, E + R)
        q, q_turned = q.split((cfg.head_dim, cfg.rotary_width), dim=-1)
        latent, k_turned = self.kv_a(x).split((cfg.latent_width, cfg.rotary_width), dim=-1)
        latent = self.kv_norm(latent)  # (B, T, L)
        # (B, 1, T, R)
        q_turned = rotate(q_turned, *rope)
        k_turned = rotate(k_turned[:, None], *rope)
        if cached is None:
            kv = self.kv_b(latent).view(B, T, cfg.n_head, 2 * cfg.head_dim).transpose(1, 2)
            k, v = kv.split(cfg.head_dim, dim=-1)  # (B, H, T, E) each
            k = torch.cat((k, k_turned.expand(-1, cfg.n_head, -1, -1)), dim=-1)
            q = torch.cat((q, q_turned), dim=-1)
            y = attention.attend(q, k, v, mask, causal=cfg.causal, products=cfg.attention_products)
        else:
            y = self._attend_to_latents(q, q_turned, latent[:, None], k_turned, mask, *cached)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def _attend_to_latents(
        self,
        q: Tensor,
        q_turned: Tensor,
        latent: Tensor,
        k_turned: Tensor,
        mask: Tensor | None,
        cache: attention.KVCache,
        layer: int,
    ) -> Tensor:
        """(B, H, T, E) of new queries over the latents of all tokens so far."""
        cfg = self.cfg
        adapted = hasattr(self.kv_b, "merged")
        weight = (self.kv_b.merged() if adapted else self.kv_b.weight).to(q.dtype)
        up_k, up_v = weight.view(cfg.n_head, 2 * cfg.head_dim, -1).split(cfg.head_dim, dim=1)  # (H, E, L) each
        k = torch.cat((latent, k_turned), dim=-1)  # (B, 1, T, L + R)
        # a cache divides scores by the root of this width; they are those of E + R
        q = torch.cat((q @ up_k, q_turned), dim=-1) * (k.shape[-1] / cfg.query_width) ** 0.5
        with torch.autocast(q.device.type, enabled=False):  # the cache's dtype counts
            y = cache.attend(layer, q, k, k[..., : cfg.latent_width], mask)
        return y @ up_v.mT


class MLP(nn.Module):
    """Feed-forward: squared ReLU (Primer, arXiv:2109.08668), GELU, or SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.kind = cfg.mlp
        self.up = nn.Linear(cfg.n_embd, cfg.hidden_width, bias=False)
        self.gate = nn.Linear(cfg.n_embd, cfg.hidden_width, bias=False) if cfg.mlp == "swiglu" else None
        self.down = nn.Linear(cfg.hidden_width, cfg.n_embd, bias=False)

    def up_and_gate(self, x: Tensor) -> tuple[Tensor, ...]:
        """Both first products, which sampling takes as one."""
        return self.up(x), self.gate(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            h, gate = self.up_and_gate(x)
            return self.down(F.silu(gate) * h)
        h = self.up(x)
        return self.down(squared_relu(h) if self.kind == "relu2" else F.gelu(h))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), this of `places` alone where they are given: (N, D)."""

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
        mask: Tensor | None,
        cached: Cached,
        places: Tensor | None,
    ) -> Tensor:
        y = self.attn(self.attn_norm(x), rope, mask, cached)
        x = x + y if places is None else x.flatten(0, 1)[places] + y.flatten(0, 1)[places]
        return x + self.mlp(self.mlp_norm(x))


def _table(rows: int, width: int) -> nn.Embedding:
    """Without weights: to draw some on the meta device, `nn.Embedding` imports torch's compiler, a second or two."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class GPT(nn.Module):
    """The language model, initialised from `seed`; on the meta device call `to_empty` and `init_weights`."""

    def __init__(self, cfg: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.wte = _table(cfg.padded_vocab, cfg.n_embd)
        self.wpe = _table(cfg.block_size, cfg.n_embd) if cfg.pos == "learned" else None
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        # no head module when tied: to_empty() would silently untie it and FSDP groups could not share it
        self.head = None if cfg.tied else nn.Linear(cfg.n_embd, cfg.padded_vocab, bias=False)
        if self.wte.weight.device.type != "meta":
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter from a generator seeded by (seed, its name): sharding does not change the weights.

        Projections that write into the residual stream are zero: the model starts as a bigram of its embedding."""
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(seed * 1_000_003 + crc32(name.encode()))
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith(("out.weight", "down.weight", "bias")):
                p.zero_()
            else:
                std = 0.02 if name.startswith(("wte", "wpe", "head")) else p.shape[1] ** -0.5
                sharding.fill(p, torch.randn(p.shape, generator=rng) * std)

    def head_weight(self) -> Tensor:
        """(V, D): the tied embedding, or the head's own."""
        return self.wte.weight if self.head is None else self.head.weight

    def hidden(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: attention.KVCache | None = None,
        n_new: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """(B, T) ids -> (B, T, D) after the last norm; with places (N,), indices into the B T tokens, of these (N, D).

        positions: (B, T), default 0..T-1 or continuing the cache. mask: of `attention.attend`, default causal.
        cache: tokens are appended to it; n_new (B,): how many of each right-padded row are real (default all)."""
        B, T = ids.shape
        if cache is None and positions is None and T > self.cfg.block_size:
            raise ConfigError(f"sequence of {T} tokens; block_size is {self.cfg.block_size}; shorten the input")
        if cache is not None:
            if not self.cfg.causal:
                raise ConfigError(
                    "a cache with causal False; required is True, or an objective that learns without a cache"
                )
            positions = cache.positions(T)
            mask = cache.mask(T)
        x = self.wte(ids)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(T, device=ids.device) if positions is None else positions)
        x = residual(self.cfg, x)
        rope = rope_table(self.cfg, T, positions, x.device) if self.cfg.pos == "rope" else None
        whole_blocks = self.cfg.recompute == "blocks" and self.training and torch.is_grad_enabled()
        early = places is not None and attention.dense(x.device)  # elsewhere a compiled block wants one shape
        for layer, block in enumerate(self.blocks):
            where = rope, mask, cache and (cache, layer), places if early and block is self.blocks[-1] else None
            x = checkpoint(block, x, *where, use_reentrant=False) if whole_blocks else block(x, *where)
        if cache is not None:
            cache.advance(T, n_new)
        return self.norm(x if early or places is None else x.flatten(0, 1)[places])

    def forward(self, ids: Tensor, **where: Any) -> Tensor:
        """(B, T) ids -> (B, T, V) logits; `where` as in `hidden`. Never sample padding rows, from cfg.n_ids on."""
        return F.linear(self.hidden(ids, **where), self.head_weight())

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        every: bool = False,
        places: Tensor | None = None,
        **where: Any,
    ) -> Tensor:
        """Cross-entropy in nats of targets (B, T) given ids; -100 carries no loss (all -100: 0). "none" gives (B, T).

        every: no target is -100; places: indices of those that are not, into (B T): a GPU waits to look them up."""
        flat = targets.flatten()
        if not every or reduction == "none":  # the last block and the head skip tokens without a target
            places = (flat >= 0).nonzero()[:, 0] if places is None else places
            flat = flat[places]
        hidden = self.hidden(ids, places=places, **where).flatten(0, -2)
        if reduction == "none":
            nats = -head.logprobs(hidden, self.head_weight(), flat, n_ids=self.cfg.padded_vocab)[0]
            return nats.new_zeros(targets.numel()).index_put((places,), nats).view_as(targets)
        total = head.cross_entropy(hidden, self.head_weight(), flat)
        return total if reduction == "sum" else total / max(1, len(flat))

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
        **where: Any,
    ) -> tuple[Tensor, ...]:
        """Log-probability of `targets` (B, T) given ids, and entropy of each distribution (B, T), in nats, of what
        `generate.sample` draws from without truncation; 0 where the target is -100. places: as of `loss`. kept
        (targets, K): the ids among which each target was drawn, -1 = none; then both are of the distribution over them.

        The entropy carries gradient only with entropy_grad. hidden: `self.hidden(ids)`, if already computed. states:
        return it too, (B, T, D): where the model is sharded, one method must compute both."""
        flat = targets.flatten()
        places = (flat >= 0).nonzero()[:, 0] if places is None else places
        hidden = self.hidden(ids, places=None if states else places, **where) if hidden is None else hidden
        some = hidden if hidden.ndim == 2 else hidden.flatten(0, 1)[places]
        values = head.logprobs(
            some,
            self.head_weight(),
            flat[places],
            n_ids=self.cfg.n_ids,
            temperature=temperature,
            entropy_grad=entropy_grad,
            kept=kept,
        )
        logprobs, entropy = (x.new_zeros(len(flat)).index_put((places,), x).view_as(targets) for x in values)
        return (logprobs, entropy, hidden) if states else (logprobs, entropy)
