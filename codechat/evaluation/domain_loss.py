"""Loss on held-out conversations by domain: a mean over all domains hides that one skill overwrites another.

Two units: nats per supervised token, and nats per conversation, which compares models whose tags have other lengths.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from codechat.data import conversations
from codechat.distributed import dist
from codechat.models import loading
from codechat.models.gpt import GPT

Batches = Mapping[str, Sequence[conversations.Batch]]
ROWS = 8  # packed rows of a batch


@torch.no_grad()
def held_out_losses(
    model: GPT, held_out: Batches, device: torch.device, sizes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """heldout_loss/DOMAIN: nats per supervised token; with `sizes`, the conversations of each domain, also
    heldout_nats/DOMAIN: nats per conversation. A collective: the ranks share the batches."""
    losses = {}
    for domain, batches in held_out.items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches[dist.rank() :: dist.world_size()]:
            batch = batch.to(device)
            with dist.autocast(device):
                mask = conversations.packed_mask(batch.docs)
                nats = model.loss(batch.ids, batch.targets, reduction="sum", positions=batch.positions, mask=mask)
            total += torch.tensor([nats.item(), batch.supervised], dtype=torch.float64, device=device)
        nats_sum, tokens = dist.sum_(total).tolist()
        losses[f"heldout_loss/{domain}"] = nats_sum / max(1, int(tokens))
        losses |= {f"heldout_nats/{domain}": nats_sum / sizes[domain]} if sizes else {}
    return losses


def of_checkpoint(
    loaded: loading.LoadedModel, data_dir: str | Path, split: str, limit: int, device: torch.device
) -> dict[str, float]:
    """Both losses over the first `limit` conversations of each domain."""
    block = loaded.model.cfg.block_size
    domains = conversations.load_domains(data_dir, split, loaded.tokenizer, loaded.tags, block, limit=limit)
    batches = {domain: conversations.held_out(examples, ROWS, block) for domain, examples in domains.items()}
    sizes = {domain: len(examples) for domain, examples in domains.items()}
    return held_out_losses(loaded.model, batches, device, sizes)
