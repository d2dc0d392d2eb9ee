"""What is measured on held-out data: the loss on conversations, and behaviour probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from codechat.core import registry
from codechat.data import conversations
from codechat.distributed import dist, hardware, numerics
from codechat.models import gpt
from codechat.text.tokenizer import Tokenizer


class Matrix(Protocol):
    """Probes counted by what was requested and what the model did; `str` is a table."""

    def metrics(self) -> dict[str, float]: ...


class Probes(Protocol):
    """Requests that are answered once each. The laboratory's instrument has them: which tags
    and words count as a call, and as code, is no affair of a loop."""

    @property
    def hash(self) -> str: ...

    def measure(
        self, model: gpt.GPT, tokenizer: Tokenizer, tags: str, *, seed: int = 0
    ) -> Matrix: ...


def probes_file(directory: str | Path, split: str) -> Path:
    return Path(directory) / f"probes.{split}.jsonl"


def read_probes(directory: str | Path, split: str, per_cell: int) -> Probes | None:
    """The first `per_cell` probes of each kind; None where the directory has none, or 0 are
    wanted."""
    path = probes_file(directory, split)
    if not per_cell or not path.exists():
        return None
    read: Probes = registry.instrument("behaviour_probes", "set --probe-examples 0")(path, per_cell)
    return read


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
