"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads come from one
low-rank latent per token.

    c = norm(W_c x)                     the latent of a token: width kv_rank, for all heads                         eq. 9
    k_h = [W_kh c ; rotate(W_r x)]      a head's key: from the latent, and one rotated part that all heads share     eq. 10, 15, 17
    v_h = W_vh c                        a head's value                                                              eq. 11
    q_h = [W_qh x ; rotate(W_qrh x)]    a head's query, not compressed                                              eq. 14, 16

A rotation between W_kh and c would depend on the position, so rotated columns are separate. Sampling keeps only c and
the rotated part: since q . W_kh c = (W_kh^T q) . c, queries are mapped to the latent's columns and the mixture of
latents to values afterwards; no key or value of an earlier token is computed again (section 2.1.2). The first tokens of
an empty cache are computed as in training.

Shapes: B sequences, T tokens, H heads, E head width, R rotated width, C latent width, W = C + R.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from codechat.models import packed_attention
from codechat.models.config import GPTConfig
from codechat.models.kv_cache import KVCache, SharedCache
from codechat.models.layers import RMSNorm, rotate


class LatentAttention(nn.Module):
    """Causal self-attention through a latent; the interface of `gpt.Attention`."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        self.cfg, heads = cfg, cfg.n_head
        self.query = nn.Linear(cfg.n_embd, heads * (cfg.head_dim + cfg.rope_width), bias=False)
        self.compress = nn.Linear(cfg.n_embd, cfg.cache_width, bias=False)
        self.kv_norm = RMSNorm(cfg.latent_width, cfg.norm_eps)
        self.expand = nn.Linear(cfg.latent_width, heads * 2 * cfg.head_dim, bias=False)
        self.out = nn.Linear(heads * cfg.head_dim, cfg.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cached: tuple[KVCache | SharedCache, int] | None,
    ) -> Tensor:
        cfg, (B, T, _) = self.cfg, x.shape
        E, R, C, H = cfg.head_dim, cfg.rope_width, cfg.latent_width, cfg.n_head
        q, q_rotated = (
            self.query(x).view(B, T, H, E + R).transpose(1, 2).split((E, R), dim=-1)
        )  # (B, H, T, E), (B, H, T, R)
        latent, k_rotated = self.compress(x)[:, None].split((C, R), dim=-1)  # (B, 1, T, C), (B, 1, T, R)
        latent = self.kv_norm(latent)
        q_rotated, k_rotated = rotate(torch.cat((q_rotated, k_rotated), dim=1), *rope).split((H, 1), dim=1)
        if cached is not None and not cached[0].empty:
            y = self._decode(cached, q, q_rotated, latent, k_rotated, mask)
        else:
            if cached is not None:
                cached[0].store(cached[1], torch.cat((latent, k_rotated), dim=-1), latent)
            k, v = self.expand(latent[:, 0]).view(B, T, H, 2 * E).transpose(1, 2).split(E, dim=-1)
            q, k = torch.cat((q, q_rotated), dim=-1), torch.cat((k, k_rotated.expand(B, H, T, R)), dim=-1)
            y = packed_attention.attend(q, k, v, mask, causal=cfg.causal)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def _decode(
        self,
        cached: tuple[KVCache | SharedCache, int],
        q: Tensor,
        q_rotated: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """(B, H, T, E): attention of new tokens over all so far, in the latent's columns."""
        (cache, layer), E = cached, self.cfg.head_dim
        expand = self.expand.weight.to(q.dtype).view(self.cfg.n_head, 2 * E, -1)
        from_key, to_value = expand.split(E, dim=1)  # (H, E, C) each
        q = torch.cat((q @ from_key, q_rotated), dim=-1)  # (B, H, T, W)
        # a cache divides scores by the root of the width that it sees; they are those of a query of E + R columns
        q = q * (q.shape[-1] / (E + q_rotated.shape[-1])) ** 0.5
        return cache.attend(layer, q, torch.cat((latent, k_rotated), dim=-1), latent, mask) @ to_value.mT
