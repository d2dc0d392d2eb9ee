"""Processes: the same calls with one rank and with two, and the numeric type of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn

from codechat.core.errors import ConfigError
from codechat.distributed import hardware, numerics
from codechat.runs import checkpoint

TWO = """
import pathlib, sys
import pytest
import torch
from codechat.runs import checkpoint, paths
from codechat.distributed import dist, numerics, sharding
from codechat.core.errors import RunError
from codechat.runs.run import Run
paths.ROOT = pathlib.Path(sys.argv[1])
with dist.session() as world:
    rank = world.rank
    assert world.size == 2 and dist.is_main() == (rank == 0)
    assert dist.sum_(torch.tensor(rank + 1.0)).item() == 3
    assert dist.mean({"b": rank, "a": 4.0 * rank}) == {"a": 2.0, "b": 0.5}
    assert dist.gather(rank) == [0, 1]

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0](torch.full((1, 2), rank + 1.0)).sum().backward()  # the second layer has no gradient
    sharding.sum_gradients(model)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 3.0))
    assert model[1].weight.grad.count_nonzero() == 0

    with Run.create("two", {"a": 1}, kind="t") as run:
        run.log(1, lr=1.0)
        torch.manual_seed(rank)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpoint.save(run.path, 1, model=model, optimizers=[sgd], extra={"rank": rank})
        drawn = torch.rand(1).item()
        again = checkpoint.load("two")
        checkpoint.restore(again, model)
        checkpoint.restore_optimizers(again, model, [sgd])
        assert again.extra == {"rank": rank} and torch.rand(1).item() == drawn
    with pytest.raises(RunError, match="is in use"):  # on both ranks
        Run.create("two", {"a": 1}, kind="t")
    with dist.session() as inner:
        assert inner == world
print("rank done")
"""


@pytest.mark.slow
def test_two_ranks_agree(tmp_path: Path) -> None:
    assert on_ranks(2, TWO, tmp_path, str(tmp_path)).count("rank done") == 2
    rows = (tmp_path / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 1, "one rank writes"
    alone = checkpoint.load(tmp_path / "runs" / "two")
    assert alone.extra == {"rank": 0} and alone.rng is None, (
        "another number of ranks: no random state to continue"
    )
    checkpoint.restore(alone, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_the_compute_dtype_and_who_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    wide = torch.float32
    narrow = torch.bfloat16
    told = ("bfloat16", False, narrow), ("float32", True, wide)
    for requested, native, expected in ((None, True, narrow), (None, False, wide), *told):
        numerics._dtype.cache_clear()
        monkeypatch.setattr(numerics, "_cpu_has_bf16", lambda native=native: native)
        monkeypatch.delenv("CODECHAT_DTYPE", raising=False)
        if requested:
            monkeypatch.setenv("CODECHAT_DTYPE", requested)
        assert numerics.compute_dtype(cpu) == numerics.compute_dtype(cpu) == expected
        with numerics.autocast(cpu):
            assert (nn.Linear(2, 2)(torch.ones(1, 2)).dtype) == expected
    assert capsys.readouterr().err.count("compute:") == 4, "said once for each"
    monkeypatch.setenv("CODECHAT_DTYPE", "half")
    with pytest.raises(ConfigError, match="CODECHAT_DTYPE='half'.*float32.*bfloat16"):
        numerics.compute_dtype(cpu)
    numerics._dtype.cache_clear()


MUON = """
import torch
from codechat.distributed import dist
from codechat.models import optim

SHAPES = [[6, 4]] * 5 + [[4, 8]] * 2 + [[3, 3]]
done, own = 0, optim.orthogonalise
def counted(g):
    global done
    done += len(g)
    return own(g)

def trained():
    seeds = [torch.Generator().manual_seed(i) for i in range(len(SHAPES))]
    params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s, g in zip(SHAPES, seeds)]
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
def test_replicas_divide_the_matrices_of_muon_and_take_the_step_of_one_process(
    ranks: int, tmp_path: Path
) -> None:
    on_ranks(ranks, MUON, tmp_path)


@pytest.fixture(scope="module")
def peak() -> hardware.Peak:
    return hardware.Peak(torch.device("cpu"), torch.float32)


LARGE_PAGES = """
import ctypes, pathlib, torch
from codechat.distributed import hardware
hardware.keep_freed_memory(torch.device("cpu"))
hardware.prefer_large_pages(64 << 20)
x = torch.ones(12 << 20)
lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("AnonHugePages")))
"""
OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not OFFERED.exists() or "[never]" in OFFERED.read_text(), reason="no pages of 2 MB"
)
def test_memory_that_is_allocated_next_lies_in_large_pages() -> None:
    words = [sys.executable, "-c", LARGE_PAGES]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) >= 32 << 10  # of 48 MB, in kB


def test_mfu_is_the_share_of_the_best_peak_seen(peak: hardware.Peak) -> None:
    assert peak.share(peak.flops / 4) == pytest.approx(0.25)


def test_a_rate_above_the_measured_peak_is_the_peak_from_then_on(peak: hardware.Peak) -> None:
    reached = 1000 * peak.flops  # as if the machine was busy while the peak was measured
    assert peak.share(reached) == 1
    assert peak.share(reached / 2) == 0.5


def test_a_measurement_draws_nothing_from_the_runs_random_numbers() -> None:
    before = torch.get_rng_state()
    hardware.measured_peak(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
