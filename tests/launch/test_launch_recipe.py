"""`codechat launch RECIPE`: recipes in a process of their own, started, followed, stopped, continued; a log for each stage."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest

from codechat.core import config
from codechat.core.atomic_files import read_json, write_json
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.launch import launch_command, launcher, runner
from codechat.launch.launch_command import RecipeLaunch
from codechat.launch.recipes import bound_stages
from codechat.runs import paths
from codechat.runs.run import Run

PROJECT = Path(__file__).resolve().parents[2]
TINY = """
[stage.corpus]
about = "text"
kind = "data.corpus"
out = "{{data}}/corpus"
source = "text.txt"
tokenizer = "bytes"
val_share = 0.2
[stage.first]
about = "train"
kind = "pretrain"
needs = ["corpus"]
data_dir = "{{corpus}}"
model = {{ depth = 1, n_embd = 16, n_head = 1, block_size = 32 }}
seq_len = 16
device_batch_size = 2
max_steps = {steps}
save_every = 2
eval_tokens = 64
compile = false
[stage.more]
about = "only where it is named"
kind = "diagnose"
needs = ["first"]
ckpt = "{{first}}"
asked = true
"""


@pytest.fixture
def tiny(runs_root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """tiny.toml, a corpus and a pretraining run, in a folder that is also the root of the processes that are started."""
    monkeypatch.chdir(runs_root)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    (runs_root / "tiny.toml").write_text(TINY.format(steps=getattr(request, "param", 4)))
    (runs_root / "text.txt").write_text("\n".join(f"x{i} = {i}" for i in range(400)))
    return runs_root


def launch(*words: str) -> RecipeLaunch:
    return config.parse(RecipeLaunch, words)


def state() -> dict:
    return launch_command.status(launch("tiny.toml").where)


def stop(*words: str) -> str:
    cfg = launch("tiny.toml", "stop", *words)
    return launch_command.stop(cfg.where, now=cfg.now)


@pytest.mark.slow
def test_a_recipe_runs_detached_with_a_log_for_each_stage(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingFile, match="tiny"):
        launch_command.main(["tiny.toml", "status"])
    launch_command.main(["tiny.toml"])
    where = tiny / "runs/tiny/launch/tiny"
    with pytest.raises(RunError, match="started as process"):
        launch_command.start(launch("tiny.toml"))
    assert state()["status"] == "running"
    assert launch_command.main(["tiny.toml", "tail"]) == 0  # until it ends
    printed = capfd.readouterr().out
    assert state()["status"] == "finished"
    assert [state()[stage] for stage in ("corpus", "first", "more")] == ["finished", "finished", "waiting"]
    assert "[2/3] first" in printed and "step" in printed and (where / "recipe.log").is_file()
    launch_command.main(["tiny.toml", "status"])
    rows = [line.split(maxsplit=1)[0] for line in capfd.readouterr().out.splitlines()]
    assert rows == ["recipe", "status", "reason", "process", "log", "corpus", "first", "more"]
    launch_command.main(["tiny.toml", "--from", "first"])  # this stage again
    launch_command.main(["tiny.toml", "tail"])
    assert read_json(where / "settings.json")["from_stage"] == "first" and paths.exists("tiny/first.1")
    with pytest.raises(RunError, match="not running"):
        stop()


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [100_000], indirect=True)
def test_a_stopped_recipe_has_a_checkpoint_and_goes_on(tiny: Path) -> None:
    ends, before = time.monotonic() + 120, 0
    for options, after in (([], "stopped"), (["--now"], "killed")):
        where = launch_command.start(launch("tiny.toml"))
        while not (paths.exists("tiny/first") and max(Run.open("tiny/first").checkpoints(), default=0) > before):
            assert time.monotonic() < ends and launcher.process_of(where), (where / "recipe.log").read_text()
            time.sleep(0.1)
        assert stop(*options) == after == state()["first"]
        before = Run.open("tiny/first").checkpoints()[-1]
    assert state()["process"] is None and (state()["corpus"], state()["more"]) == ("finished", "waiting")


def test_what_codechat_run_rejects_is_rejected_before_a_process_is_started(tiny: Path) -> None:
    for words, named in (
        (("tiny.toml", "--from", "frist"), "'first'"),
        (("tiny.toml", "--force", "frist"), "'first'"),
    ):
        with pytest.raises(ConfigError, match=named):
            launch_command.start(launch(*words))
    assert not (tiny / "runs").exists()


def test_seeds_and_scales_have_logs_of_their_own(runs_root: Path) -> None:
    folders = [launch("v6", *words).where for words in ((), ("--seed", "1"), ("--scale", "8b"))]
    assert [f.relative_to(paths.runs_dir()).as_posix() for f in folders] == [
        "nano/launch/v6", "nano/launch/v6-s1", "nano-8b/launch/v6",
    ]  # fmt: skip


def test_stop_ends_a_stage_that_torchrun_runs_after_its_recipe_is_gone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = launch("tiny.toml").where
    where.mkdir(parents=True)
    write_json(where / "settings.json", config.plain(runner.RecipeConfig(recipe="tiny.toml")))
    write_json(where / "process.json", {"host": platform.node(), "pid": 1, "pid_start": "of another process"})
    (bound,) = (b for b in bound_stages("tiny.toml") if b.name == "first")
    launcher.write(bound.cfg)
    with pytest.raises(RunError, match="not running"):
        stop()
    stopped: list[tuple[str, bool]] = []
    monkeypatch.setattr(launcher, "process_of", lambda path: {"pid": 1} if path.name == "first" else None)
    monkeypatch.setattr(launcher, "stop", lambda name, *, now: stopped.append((name, now)))
    assert stop("--now") == "stopped" and stopped == [("tiny/first", True)]
    (where / "recipe.log").write_text("loading\nerror: no network\n")
    assert launch_command.main(["tiny.toml", "status"]) == 1 and state()["status"] == "failed"
