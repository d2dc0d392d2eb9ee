"""Processes: the same calls with one rank and with two, and the numeric type of this machine."""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch import nn

from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.runs import checkpoint


def test_one_process_needs_no_group() -> None:
    with dist.session() as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        value = torch.ones(2)
        assert dist.sum_(value) is value and dist.mean({"a": 2.0}) == {"a": 2.0}
        assert dist.gather("x") == ["x"]


TWO = """
import pathlib, sys
import pytest
import torch
from codechat.runs import checkpoint, paths
from codechat.distributed import dist
from codechat.core.errors import RunError
from codechat.runs.run import Run
paths.ROOT = pathlib.Path(sys.argv[1])
with dist.session() as world:
    rank = world.rank
    assert world.size == 2 and world.is_main == (rank == 0)
    assert dist.sum_(torch.tensor(rank + 1.0)).item() == 3
    assert dist.mean({"b": rank, "a": 4.0 * rank}) == {"a": 2.0, "b": 0.5}
    assert dist.gather(rank) == [0, 1]

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0](torch.full((1, 2), rank + 1.0)).sum().backward()  # the second layer has no gradient
    dist.sum_gradients(model)
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), 3.0))
    assert model[1].weight.grad.count_nonzero() == 0

    with Run.create("two", {"a": 1}, kind="t") as run:
        run.log(1, lr=1.0)
        torch.manual_seed(rank)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        checkpoint.save(run.path, 1, model=model, optimizers=[sgd], extra={"rank": rank})
        drawn = torch.rand(1).item()
        again = checkpoint.load("two")
        checkpoint.restore(again, model, [sgd])
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
    assert alone.extra == {"rank": 0} and alone.rng is None, "another number of ranks: no random state to continue"
    checkpoint.restore(alone, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_the_compute_dtype_and_who_decides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = torch.device("cpu")
    for requested, native, expected in (
        (None, True, torch.bfloat16),
        (None, False, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("float32", True, torch.float32),
    ):
        dist._dtype.cache_clear()
        monkeypatch.setattr(dist, "_cpu_has_bf16", lambda native=native: native)
        monkeypatch.delenv("CODECHAT_DTYPE", raising=False)
        if requested:
            monkeypatch.setenv("CODECHAT_DTYPE", requested)
        assert dist.compute_dtype(cpu) == dist.compute_dtype(cpu) == expected
        with dist.autocast(cpu):
            assert (nn.Linear(2, 2)(torch.ones(1, 2)).dtype) == expected
    assert capsys.readouterr().err.count("compute:") == 4, "said once for each"
    monkeypatch.setenv("CODECHAT_DTYPE", "half")
    with pytest.raises(ConfigError, match="CODECHAT_DTYPE='half'.*float32.*bfloat16"):
        dist.compute_dtype(cpu)
    dist._dtype.cache_clear()
