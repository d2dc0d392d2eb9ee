"""`codechat launch RECIPE`: recipes in a process of their own, started, followed, stopped, continued; a log for each stage."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from codechat.core import config
from codechat.core.atomic_files import read_json, write_json
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.launch import launch_command, launcher, recipes, runner
from codechat.launch.recipes import bound_stages
from codechat.runs import paths, run

PROJECT = Path(__file__).resolve().parents[2]
CHILD = """
import sys
from pathlib import Path
from codechat.core import command
from codechat.launch import recipes, runner
from codechat.runs import paths, run
for module in (run, paths, recipes, runner):
    module.ROOT = Path({root!r})
sys.exit(command.guarded(runner.main, sys.argv[1:]))
"""
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
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[list[str]]:
    """tiny.toml, a corpus and a pretraining run, below tmp_path here and in the processes that are started; the words of those."""
    for module in (run, paths, recipes, runner):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY.format(steps=getattr(request, "param", 4)))
    (tmp_path / "text.txt").write_text("\n".join(f"x{i} = {i}" for i in range(400)))
    (tmp_path / "child.py").write_text(CHILD.format(root=str(tmp_path)))
    started, begin = [], launcher.start_detached
    child = [sys.executable, str(tmp_path / "child.py")]

    def start(words: list[str], where: Path, log: str) -> None:
        started.append(words)
        begin([*child, *words[3:]], where, log)

    monkeypatch.setattr(launcher, "start_detached", start)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    return started


def wish(*words: str) -> launch_command.RecipeLaunch:
    return config.parse(launch_command.RecipeLaunch, words)


def ended(where: Path) -> None:
    ends = time.monotonic() + 120
    while launcher.process_of(where):
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.slow
def test_a_recipe_runs_detached_with_a_log_for_each_stage(
    tiny: list[list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingFile, match="tiny"):
        launch_command.status(wish("tiny.toml", "status"))
    launch_command.main(["tiny.toml"])
    assert tiny[0][:4] == [sys.executable, "-m", "codechat.launch.runner", "tiny.toml"]
    where = tmp_path / "runs/tiny/launch/tiny"
    with pytest.raises(RunError, match="runs as process"):
        launch_command.start(wish("tiny.toml"))
    assert launch_command.status(wish("tiny.toml", "status"))["status"] == "running"
    launch_command.main(["tiny.toml", "tail"])  # until it ends
    printed = capfd.readouterr().out
    found = launch_command.status(wish("tiny.toml", "status"))
    assert found["status"] == "finished" and found["stages"] == {"corpus": "finished", "first": "finished"}
    assert {path.name for path in where.glob("*.log")} == {"recipe.log", "corpus.log", "first.log"}
    assert "[2/2] first" in (where / "recipe.log").read_text() and "[2/2] first" in printed
    assert (where / "first.log").stat().st_size and "step" in (where / "first.log").read_text()
    launch_command.main(["tiny.toml", "status"])
    rows = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["recipe", "status", "reason", "process", "logs", "corpus", "first"]
    launch_command.start(wish("tiny.toml", "first"))  # this stage again
    ended(where)
    assert read_json(where / "settings.json")["from_stage"] == "first"
    assert "[1/2] corpus: finished, skipped" in (where / "recipe.log").read_text()
    with pytest.raises(RunError, match="not running"):
        launch_command.stop(wish("tiny.toml", "stop"))


def test_a_recipe_has_failed_with_an_error_or_a_failed_stage() -> None:
    for status, reason, state, failed in [
        ("stopped", "error: no network", "waiting", True),
        ("stopped", "ValueError: x", "failed", True),
        ("stopped", "interrupted", "stopped", False),
        ("running", None, "running", False),
        ("finished", None, "finished", False),
    ]:
        row = {"status": status, "reason": reason, "stages": {"a": state}}
        assert launch_command.has_failed(row) is failed


@pytest.mark.slow
@pytest.mark.parametrize("tiny", [100_000], indirect=True)
def test_a_stopped_recipe_has_a_checkpoint_and_goes_on(tiny: list[list[str]], tmp_path: Path) -> None:
    where = launch_command.start(wish("tiny.toml"))
    ends = time.monotonic() + 120
    while not (paths.exists("tiny/first") and run.Run.open("tiny/first").checkpoints()):
        assert time.monotonic() < ends and launcher.process_of(where), (where / "recipe.log").read_text()
        time.sleep(0.1)
    assert launch_command.stop(wish("tiny.toml", "stop")) == "stopped"
    found = launch_command.status(wish("tiny.toml", "status"))
    assert found["process"] is None and found["stages"] == {"corpus": "finished", "first": "stopped"}
    assert "first" in found["reason"]
    before = run.Run.open("tiny/first").checkpoints()[-1]
    launch_command.start(wish("tiny.toml"))
    while (
        run.Run.open("tiny/first").status["status"] != "running"
        or run.Run.open("tiny/first").checkpoints()[-1] <= before
    ):
        assert time.monotonic() < ends and launcher.process_of(where), (where / "recipe.log").read_text()
        time.sleep(0.1)
    assert launch_command.stop(wish("tiny.toml", "stop", "--now")) == "stopped"


def test_what_codechat_run_rejects_is_rejected_before_a_process_is_started(tiny: list[list[str]]) -> None:
    for words, named in (
        (("tiny.toml", "frist"), "'first'"),
        (("tiny.toml", "stat"), "'start'|'status'"),
        (("tiny.toml", "--scale", "8b"), "--yes"),
        (("tiny.toml", "first", "--from", "corpus"), "--from"),
        (("tiny.toml", "--force", "frist"), "'first'"),
        (("tiny.toml", "--logs", "elsewhere"), "--logs"),
    ):
        with pytest.raises(ConfigError, match=named):
            launch_command.start(wish(*words))
    assert tiny == [] and not (paths.runs_dir() / "tiny").exists()


def test_seeds_and_scales_have_logs_of_their_own_and_the_last_one_is_meant(runs_root: Path) -> None:
    folders = [launch_command.folder(wish("v6", *words)) for words in ((), ("--seed", "1"), ("--scale", "8b"))]
    assert [f.relative_to(paths.runs_dir()).as_posix() for f in folders] == [
        "compact/launch/v6", "compact/launch/v6-s1", "nano-8b/launch/v6",
    ]  # fmt: skip
    for age, where in zip((3, 1, 2), folders):
        where.mkdir(parents=True)
        (where / "process.json").write_text("{}")
        then = time.time() - age
        os.utime(where / "process.json", (then, then))
    assert launch_command.begun(wish("v6", "status")) == folders[1]
    assert launch_command.begun(wish("v6", "status", "--scale", "8b")) == folders[2]
    with pytest.raises(MissingFile):
        launch_command.begun(wish("v5", "status"))


OUTPUT = """
import subprocess, sys
from pathlib import Path
from codechat.launch import runner
print("before")
try:
    with runner.output_to(Path(sys.argv[1])):
        print("inside")
        print("problem", file=sys.stderr, flush=True)
        subprocess.run(["echo", "from a process"], check=True)
        raise ValueError
except ValueError:
    print("after")
with runner.output_to(None):
    print("terminal")
"""


def test_output_of_a_stage_and_of_its_processes_goes_to_its_file(tmp_path: Path) -> None:
    words = [sys.executable, "-c", OUTPUT, str(tmp_path / "logs/a.log")]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "after", "terminal"] and not done.stderr
    assert set((tmp_path / "logs/a.log").read_text().splitlines()) == {"inside", "problem", "from a process"}


def test_a_loop_or_a_run_of_the_name_comes_first(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        launch_command._is_recipe(["v6", "status"])
        and not launch_command._is_recipe(["chars"])
        and not launch_command._is_recipe([])
    )
    monkeypatch.setattr(paths, "is_run", lambda path: path.name == "v6")
    assert not launch_command._is_recipe(["v6", "status"]) and launch_command._is_recipe(["v5"])


def test_stop_ends_a_stage_that_torchrun_runs_after_its_recipe_is_gone(
    tiny: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = launch_command.folder(wish("tiny.toml"))
    where.mkdir(parents=True)
    write_json(where / "settings.json", config.plain(runner.RecipeConfig()))
    write_json(where / "process.json", {"host": platform.node(), "pid": 1, "pid_start": "of another process"})
    (bound,) = (b for b in bound_stages("tiny.toml") if b.name == "first")
    launcher.write(bound.cfg)
    with pytest.raises(RunError, match="not running"):
        launch_command.stop(wish("tiny.toml", "stop"))
    stopped: list[tuple[str, bool]] = []
    monkeypatch.setattr(launcher, "process_of", lambda path: {"pid": 1} if path.name == "first" else None)
    monkeypatch.setattr(launcher, "stop", lambda name, *, now, timeout_s: stopped.append((name, now)))
    assert launch_command.stop(wish("tiny.toml", "stop", "--now")) == "stopped"
    assert stopped == [("tiny/first", True)]
