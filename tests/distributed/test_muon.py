"""Muon among replicas: every matrix is orthogonalised by one rank, and all take the step that one process takes."""

from pathlib import Path

import pytest
from ranks import on_ranks

PROGRAM = """
import torch
from codechat.distributed import dist
from codechat.models import optim

SHAPES = [[6, 4]] * 5 + [[4, 8]] * 2 + [[3, 3]]
done, own = 0, optim.orthogonalise
def counted(g, steps=5):
    global done
    done += len(g)
    return own(g, steps)

def trained():
    params = [torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(SHAPES)]
    muon = optim.Muon(params, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        muon.step()
    return [p.detach() for p in params]

alone = trained()
optim.orthogonalise = counted
with dist.session() as world:
    together = trained()
    every = dist.gather((together, done))
for weights, _ in every:
    assert all(map(torch.equal, weights, every[0][0])), "replicas stay bitwise equal"
for a, b in zip(together, alone):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
assert sum(n for _, n in every) == 3 * len(SHAPES), "no matrix twice"
assert max(n for _, n in every) == 3 * sum(-(-n // world.size) for n in (5, 2, 1))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_divide_the_matrices_and_take_the_same_step(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, PROGRAM, tmp_path)
