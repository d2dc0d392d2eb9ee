"""Loss on held-out conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codechat.data import conversations
from codechat.distributed import dist, hardware, numerics
from codechat.models import gpt


def held_out_losses(
    model: gpt.GPT,
    held_out: Mapping[str, Sequence[conversations.Batch]],
    sizes: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Loss on held-out conversations by domain: heldout_loss/DOMAIN, nats per supervised token;
    with `sizes`, the conversations of each domain, also heldout_nats/DOMAIN, nats per
    conversation, which compares models whose tags have other lengths. A collective."""
    import torch

    losses = {}
    device = hardware.device()
    for domain, batches in held_out.items():
        nats_here = 0.0
        tokens_here = 0
        for batch in batches[dist.rank() :: dist.world_size()]:
            batch = batch.to(device)
            mask = conversations.packed_mask(batch.docs)
            with torch.no_grad(), numerics.autocast(device):
                nats = model.loss(
                    batch.ids, batch.targets, reduction="sum", positions=batch.positions, mask=mask
                )
            nats_here += nats.item()
            tokens_here += batch.supervised
        here = torch.tensor([nats_here, tokens_here], dtype=torch.float64, device=device)
        nats_sum, tokens = dist.sum_(here).tolist()
        losses[f"heldout_loss/{domain}"] = nats_sum / max(1, int(tokens))
        if sizes:
            losses[f"heldout_nats/{domain}"] = nats_sum / sizes[domain]
    return losses
