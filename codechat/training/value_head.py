"""A learned value: a linear head on the policy's own last states, for PPO."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from codechat.distributed import dist, sharding
from codechat.models import optim
from codechat.models.gpt import GPT
from codechat.rl import rollout
from codechat.rl.rollout import RolloutBatch


class ValueHead(nn.Linear):
    """(..., D) states -> (...) values. It starts at 0, and computes in float32 also under autocast: a value rounded to bfloat16 would be an advantage."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden.float() * self.weight[0]).sum(-1) + self.bias

    def optimizers(self, lr: float) -> list[torch.optim.Optimizer]:
        return optim.build(self, lr=lr, weight_decay=0.0)

    def state(self) -> dict[str, Tensor]:
        """A copy that later steps do not change: checkpoints are written beside training."""
        return {name: value.clone() for name, value in self.state_dict().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.load_state_dict(state)


@torch.no_grad()
def values_of(cfg: Any, model: GPT, head: ValueHead, batch: RolloutBatch) -> Tensor:
    """(N, C): the value before each sampled token, 0 behind a completion's end. A collective where the model is sharded."""
    device, table = dist.device(), torch.zeros(batch.mask().shape, device=dist.device())
    with sharding.whole(model) as reader:
        for packed in rollout.pack(batch, **rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, device)):
            packed = packed.to(device)
            at = packed.where()
            with dist.autocast():
                hidden = reader.hidden(packed.ids, positions=at["positions"], mask=at["mask"])
            table[packed.numbers, : packed.longest] = packed.unpack(head(hidden))
    return table


def _moments(*tensors: Tensor) -> list[float]:
    """Over all ranks: the number of elements of the first, at least 1, since all completions may be empty, then the sum of each."""
    sums = torch.stack([x.double().sum() for x in tensors]).cpu()
    n, *rest = dist.sum_(torch.cat((torch.tensor([tensors[0].numel()], dtype=torch.float64), sums))).tolist()
    return [max(1.0, n), *rest]


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the variance of the returns that the values predict, over all ranks; 0 where they do not vary. A collective."""
    n, r1, r2, unexplained = _moments(returns, returns**2, (returns - values) ** 2)
    variance = r2 - r1**2 / n
    return 1 - unexplained / variance if variance > 0 else 0.0


def whiten(advantage: Tensor, written: Tensor) -> Tensor:
    """Advantages (N, C) with mean 0 and standard deviation 1 over the tokens of all ranks that the policy wrote, here `written` of (N C). A collective."""
    mine = advantage.flatten()[written]
    n, s1, s2 = _moments(mine, mine**2)
    return (advantage - s1 / n) / (math.sqrt(max(0.0, s2 / n - (s1 / n) ** 2)) + 1e-8)
