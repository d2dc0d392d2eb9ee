"""What goes wrong among ranks: killed, stopped, hung, out of step, started differently, without
space. Each ends in an error with the rank named, and the run continues from its last good
checkpoint on the curve it was on."""

import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import finish, on_ranks, start, written
from test_ranks import configs, losses

from codechat import pretrain
from codechat.core.errors import RunError
from codechat.distributed import desync
from codechat.runs import checkpoint, paths
from codechat.runs.run import Run

TRAINS = """
import os, pathlib, signal, sys, time
from codechat import pretrain
from codechat.core import config
from codechat.runs import checkpoint, paths
from codechat.training.session import Session
paths.ROOT = pathlib.Path(sys.argv[1])
{}
print(pretrain.train(config.resolve(pretrain.PretrainConfig, file=sys.argv[2])).status["status"])
"""
KILLED = """
saved = checkpoint.save

def save_then_die(path, step, **what):
    saved(path, step, **what)
    if step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)  # step 4 is still on its way to the disk

checkpoint.save = save_then_die
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", [False, True], ids=["replicas", "shards"])
def test_a_killed_rank_is_restarted_and_the_curve_goes_on(home: Path, shard: bool) -> None:
    """kill -9 of rank 1 under --max-restarts 1, without --resume: the losses of a run that
    nobody killed, every step once."""
    cfg = replace(configs(home, 8)["pretrain"], max_steps=6, eval_every=0)
    pretrain.train(replace(cfg, run_name="whole"))
    again = written(home, replace(cfg, device_batch_size=4, shard=shard, run_name="killed"))
    out = on_ranks(2, TRAINS.format(KILLED), home, str(home), again, more=("--max-restarts", "1"))
    assert out.count("finished") == 2
    one, other = (losses(name, "step", "train_loss") for name in ("killed", "whole"))
    assert one == [pytest.approx(row, rel=1e-6) for row in other]
    env = Run.open("killed").env
    assert len(env["resumed"]) == 1
    assert env["resumed"][0]["launch"] == env["launch"]


STOPPED = """
apply = Session.apply_gradients
Session.apply_gradients = lambda self: time.sleep(0.3) or apply(self)  # steps long enough to be interrupted
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_saves_and_leaves_on_all_ranks(home: Path) -> None:
    cfg = replace(
        configs(home, 4)["pretrain"],
        max_steps=200,
        eval_every=0,
        save_every=0,
        run_name="stopped",
        shard=True,
    )
    ranks = start(2, TRAINS.format(STOPPED), home, str(home), written(home, cfg))
    metrics = paths.runs_dir() / "stopped" / "metrics.jsonl"
    deadline = time.time() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert ranks.poll() is None and time.time() < deadline, finish(ranks)[-3000:]
        time.sleep(0.1)
    ranks.send_signal(signal.SIGTERM)
    out = finish(ranks)
    found = Run.open("stopped")
    assert found.status["status"] == "stopped" and "--resume" in found.status["reason"], out[-3000:]
    last = found.checkpoints()[-1]
    assert last == len(found.metrics())
    assert checkpoint.load("stopped").step == last >= 2


SESSIONS = Path(__file__).with_name("sessions.txt").read_text(encoding="utf-8")  # a program


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[float, str]]:
    """What both ranks saw in each of a row of sessions: {(session, rank): (seconds, error)}."""
    folder = tmp_path_factory.mktemp("sessions")
    out = on_ranks(2, SESSIONS, folder, str(folder))
    found = {}
    for part in out.split("@end")[:-1]:
        name, rank, seconds, error = part[part.index("@") + 1 :].split("@")[:4]
        found[name, int(rank)] = (float(seconds), error)
    steps = [p.name for p in (folder / "runs" / "full" / "checkpoints").iterdir() if p.is_dir()]
    assert steps == ["step_000001"], "nothing half written stays"
    return found


EXPECTED = {  # error, and what its message names
    "settings": ("RunError", "rank 0", "rank 1", "settings", "model.depth 2 -> 3"),
    "code": ("RunError", "rank 0", "rank 1", "'code of 0' -> 'code of 1'"),
    "in step": ("no error",),
    "out of step": ("RunError", "at program0.py", "in out_of_step", "mismatch between collectives"),
    "no space": ("CheckpointError", "step_000002", "--resume"),
    "missing shard": ("CheckpointError", "__1_0.distcp"),
    "hang": (
        "RunError",
        "rank 0",
        "all_reduce at program0.py",
        "in hangs",
        "rank 1 (process",
        "in slow_reward",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_says_what_is_wrong(
    name: str, attempts: dict[tuple[str, int], tuple[float, str]]
) -> None:
    for rank in (0, 1) if name != "hang" else (0,):
        seconds, error = attempts[name, rank]
        assert error.startswith(EXPECTED[name][0]) and all(
            part in error for part in EXPECTED[name]
        ), error
        assert name != "hang" or seconds < 24, "before the other rank came back"


def test_only_a_failed_collective_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        desync, "_watch", SimpleNamespace(rank=0, others=lambda: "rank 1 is elsewhere")
    )
    for other in (
        ValueError("gloo"),
        RunError("Timed out"),
        RuntimeError("mat1 and mat2 cannot be multiplied"),
    ):
        assert desync.explained(other) is other
    with pytest.raises(RuntimeError) as failed:
        raise RuntimeError("[/build/gloo/pair.cc:534] Connection closed by peer")
    error = desync.explained(failed.value)
    assert isinstance(error, RunError)
    named = (
        "rank 0",
        "test_faults.py",
        "in test_only_a_failed",
        "(Connection closed by peer)",
        "rank 1 is elsewhere",
    )
    assert all(part in str(error) for part in named)
