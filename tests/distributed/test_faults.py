"""What goes wrong among ranks: killed, stopped, hung, out of step, started differently, without space. Each ends in an error with the
rank named, and the run continues from its last good checkpoint on the curve it was on."""

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
from codechat.distributed import dist
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
    """kill -9 of rank 1 under --max-restarts 1, without --resume: the losses of a run that nobody killed, every step once."""
    cfg = replace(configs(home, 8)["pretrain"], max_steps=6, eval_every=0)
    pretrain.train(replace(cfg, run_name="whole"))
    again = written(home, replace(cfg, device_batch_size=4, shard=shard, run_name="killed"))
    out = on_ranks(2, TRAINS.format(KILLED), home, str(home), again, more=("--max-restarts", "1"))
    assert out.count("finished") == 2
    one, other = (losses(name, "step", "train_loss") for name in ("killed", "whole"))
    assert one == [pytest.approx(row, rel=1e-6) for row in other]
    env = Run.open("killed").env
    assert len(env["resumed"]) == 1 and env["resumed"][0]["launch"] == env["launch"]


STOPPED = """
apply = Session.apply_gradients
Session.apply_gradients = lambda self: time.sleep(0.3) or apply(self)  # steps long enough to be interrupted
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_saves_and_leaves_on_all_ranks(home: Path) -> None:
    how = dict(max_steps=200, eval_every=0, save_every=0, run_name="stopped", shard=True)
    cfg = replace(configs(home, 4)["pretrain"], **how)
    ranks = start(2, TRAINS.format(STOPPED), home, str(home), written(home, cfg))
    metrics, deadline = paths.runs_dir() / "stopped" / "metrics.jsonl", time.time() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert ranks.poll() is None and time.time() < deadline, finish(ranks)[-3000:]
        time.sleep(0.1)
    ranks.send_signal(signal.SIGTERM)
    out = finish(ranks)
    found = Run.open("stopped")
    assert found.status["status"] == "stopped" and "--resume" in found.status["reason"], out[-3000:]
    last = found.checkpoints()[-1]
    assert last == len(found.metrics()) and checkpoint.load("stopped").step == last >= 2


SESSIONS = """
import os, pathlib, resource, signal, sys, time
import torch
from codechat.runs import checkpoint, paths
from codechat.distributed import dist, sharding
from codechat.core.errors import CheckpointError, RunError
from codechat.models.gpt import GPT
from codechat.models.config import GPTConfig
from codechat.runs.run import Run

paths.ROOT, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.TIMEOUT_S = 300

def tiny(**shape):
    return sharding.build(lambda: GPT(GPTConfig(depth=1, n_head=2, block_size=16, **shape)), shard_it=True)

def attempt(name, act, **session):
    began = time.perf_counter()
    try:
        with dist.session(**session) as world:
            act(world)
        found = "no error"
    except (RunError, CheckpointError) as e:
        found = f"{type(e).__name__}: {e}"
    print(f"@{name}@{rank}@{time.perf_counter() - began:.1f}@{found}@end", flush=True)

def nothing(world):
    raise AssertionError("the block must not be reached")

attempt("settings", nothing, settings={"model": {"depth": 2 + rank}, "lr": 1.0})
digest, dist.code_digest = dist.code_digest, lambda: f"code of {rank}"
attempt("code", nothing)
dist.code_digest = digest

debug = torch.distributed.DebugLevel  # as TORCH_DISTRIBUTED_DEBUG sets it
torch.distributed.set_debug_level(debug.DETAIL)
def in_step(world):
    model = tiny(n_embd=16, vocab_size=60)
    model.loss(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    dist.clip_gradients(model.parameters(), 1.0)
    dist.gather({"a": "x" * rank})
    with sharding.whole(model):
        dist.mean({"a": 1.0})
attempt("in step", in_step)

def out_of_step(world):
    torch.distributed.barrier()
    if rank == 1:
        dist.mean({"a": 1.0})  # one collective more than rank 0
    dist.sum_(torch.ones(1, dtype=torch.long))
attempt("out of step", out_of_step)
torch.distributed.set_debug_level(debug.OFF)

def no_space(world):
    model = tiny(n_embd=64, vocab_size=600)
    with Run.create("full", {}, kind="test") as run:
        checkpoint.save(run.path, 1, model=model)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        checkpoint.save(run.path, 2, model=model, wait=False)
        torch.ones(1000).sum()
        try:
            checkpoint.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
attempt("no space", no_space)

def missing(world):
    torch.distributed.barrier()
    if rank == 0:
        (paths.runs_dir() / "full/checkpoints/step_000001/shards/__1_0.distcp").unlink()
    torch.distributed.barrier()
    checkpoint.load("full")
attempt("missing shard", missing)

def slow_reward():
    time.sleep(25)
dist.SIGN_OF_LIFE_S = 1.0
def hangs(world):
    torch.distributed.barrier()
    if rank == 1:
        slow_reward()
    dist.sum_(torch.ones(1, dtype=torch.long))
dist.TIMEOUT_S = 12
attempt("hang", hangs)
"""


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
    "hang": ("RunError", "rank 0", "all_reduce at program0.py", "in hangs", "rank 1 (process", "in slow_reward"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_says_what_is_wrong(name: str, attempts: dict[tuple[str, int], tuple[float, str]]) -> None:
    for rank in (0, 1) if name != "hang" else (0,):
        seconds, error = attempts[name, rank]
        assert error.startswith(EXPECTED[name][0]) and all(part in error for part in EXPECTED[name]), error
        assert name != "hang" or seconds < 24, "before the other rank came back"


def test_only_a_failed_collective_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "_watch", SimpleNamespace(rank=0, others=lambda: "rank 1 is elsewhere"))
    for other in (ValueError("gloo"), RunError("Timed out"), RuntimeError("mat1 and mat2 cannot be multiplied")):
        assert dist.explained(other) is other
    with pytest.raises(RuntimeError) as failed:
        raise RuntimeError("[/build/gloo/pair.cc:534] Connection closed by peer")
    error = dist.explained(failed.value)
    assert isinstance(error, RunError)
    named = ("rank 0", "test_faults.py", "in test_only_a_failed", "(Connection closed by peer)", "rank 1 is elsewhere")
    assert all(part in str(error) for part in named)
