"""Muon among replicas: every matrix is orthogonalised by one rank, and all take the step that one process takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from codechat.models.optim import Muon

PROGRAM = """
import json, os, pathlib, sys, torch
from codechat.distributed import dist
from codechat.models import optim

done, own = [], optim.orthogonalise
def counted(g, steps=5):
    done.append(len(g))
    return own(g, steps)
optim.orthogonalise = counted
shapes = json.loads(sys.argv[2])
params = [torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(shapes)]
with dist.session():
    muon = optim.Muon(params, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        muon.step()
folder = pathlib.Path(sys.argv[1])
rank = os.environ["RANK"]
torch.save([p.detach() for p in params], folder / f"weights{rank}.pt")
(folder / f"done{rank}.json").write_text(json.dumps(done))
"""
SHAPES = [[6, 4]] * 5 + [[4, 8]] * 2 + [[3, 3]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_divide_the_matrices_and_take_the_same_step(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, PROGRAM, tmp_path, str(tmp_path), json.dumps(SHAPES))
    params = [
        torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(SHAPES)
    ]
    muon = Muon(params, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        muon.step()
    every = [torch.load(tmp_path / f"weights{r}.pt") for r in range(ranks)]
    for weights in every:
        assert all(torch.equal(a, b) for a, b in zip(weights, every[0])), "replicas stay bitwise equal"
        for a, b in zip(weights, params):
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-5)
    work = [sum(json.loads((tmp_path / f"done{r}.json").read_text())) for r in range(ranks)]
    assert sum(work) == 3 * len(SHAPES), "no matrix twice"
    assert max(work) == 3 * sum(-(-n // ranks) for n in (5, 2, 1))
