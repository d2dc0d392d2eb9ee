"""Loss on held-out conversations by domain: a mean over all domains hides that one skill overwrites another.

Two units: nats per supervised token, and nats per conversation, which compares models whose tags have other lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from codechat.data import conversations
from codechat.distributed import dist
from codechat.models import loading
from codechat.models.gpt import GPT

Batches = Mapping[str, Sequence[conversations.Batch]]
ROWS = 8  # packed rows of a batch
BAR_AFTER_S = 3.0  # an evaluation that takes longer shows a bar


@torch.no_grad()
def sums(model: GPT, held_out: Batches, device: torch.device) -> dict[str, tuple[float, int]]:
    """(nats, supervised tokens) of each domain's conversations. A collective: the ranks share the batches."""
    by_domain = {}
    mine = {domain: batches[dist.rank() :: dist.world_size()] for domain, batches in held_out.items()}
    how = dict(desc="held-out loss", unit="batch", leave=False, delay=BAR_AFTER_S, disable=not dist.is_main())
    with tqdm(total=sum(map(len, mine.values())), **how) as bar:
        for domain, batches in mine.items():
            total = torch.zeros(2, dtype=torch.float64, device=device)
            for batch in batches:
                batch = batch.to(device)
                with dist.autocast(device):
                    mask = conversations.packed_mask(batch.docs)
                    nats = model.loss(batch.ids, batch.targets, reduction="sum", positions=batch.positions, mask=mask)
                total += torch.tensor([nats.item(), batch.supervised], dtype=torch.float64, device=device)
                bar.update()
            nats_sum, tokens = dist.sum_(total).tolist()
            by_domain[domain] = (nats_sum, int(tokens))
    return by_domain


def held_out_losses(model: GPT, held_out: Batches, device: torch.device) -> dict[str, float]:
    """heldout_loss/DOMAIN: nats per supervised token. A collective."""
    return _per_token(sums(model, held_out, device))


def _per_token(totals: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {f"heldout_loss/{domain}": nats / max(1, tokens) for domain, (nats, tokens) in totals.items()}


def of_checkpoint(
    loaded: loading.LoadedModel, data_dir: str | Path, split: str, limit: int, device: torch.device
) -> dict[str, float]:
    """heldout_loss/DOMAIN and heldout_nats/DOMAIN (per conversation) over the first `limit` conversations of each."""
    block = loaded.model.cfg.block_size
    domains = conversations.load_domains(data_dir, split, loaded.tokenizer, loaded.tags, block, limit=limit)
    batches = {domain: conversations.held_out(examples, ROWS, block) for domain, examples in domains.items()}
    totals = sums(loaded.model, batches, device)
    return _per_token(totals) | {f"heldout_nats/{d}": nats / len(domains[d]) for d, (nats, _) in totals.items()}
