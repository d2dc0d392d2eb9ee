"""Run directories: what is logged is what is read, names are protected, a kill loses no flushed
row."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from raising import raising
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from codechat import cli
from codechat.core import processes, provenance
from codechat.core.config import config_hash, opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.runs import paths
from codechat.runs.paths import exists, find_checkpoint, find_run, runs_dir
from codechat.runs.run import METRICS, Run, list_runs, unit_of
from codechat.training.settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    run_name: str = opt("r", "name", identity=False)
    resume: bool = opt(False, "continue", identity=False)
    lr: float = opt(0.1, "learning rate")
    ks: tuple[int, ...] = opt((1, 8), "ks")


def new(
    name: str = "r",
    parent: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    return Run.create(
        name,
        Settings(run_name=name),
        kind="test",
        parent=parent,
        resume=resume,
        overwrite=overwrite,
    )


def fake_checkpoint(run: Run, step: int) -> Path:
    folder = run.path / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text("{}")
    (folder.parent / "latest").write_text(folder.name + "\n")
    return folder


HEAD = """
import pathlib, platform, resource, sys, time
from codechat.core.errors import RunError
from codechat.core.processes import stop, stoppable
from codechat.runs import paths
from codechat.runs.run import Run
"""


def child(program: str, root: Path, **popen: object) -> subprocess.Popen[str]:
    """A process with the run root of this test."""
    command = [sys.executable, "-c", f"{HEAD}paths.ROOT = pathlib.Path({str(root)!r})\n{program}"]
    cwd = Path(__file__).resolve().parents[3]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, cwd=cwd, **popen)


def scalars(run: Run, name: str) -> list[tuple[int, float]]:
    """What TensorBoard holds."""
    return [
        (e.step, e.value) for e in EventAccumulator(str(run.path / "tb")).Reload().Scalars(name)
    ]


@pytest.fixture
def logged() -> Run:
    """A finished run with rows of every kind."""
    with new(parent=None) as run:
        run.log(1, train_loss=2.5, lr=0.1, verdict="LIVE")
        run.log(2, {"tier/full_match": 0.5, "train_loss": torch.tensor(1.5)}, tokens=10)
        run.log_eval(2, {"pass@1": 0.25, "n": 64, "split": "select", "interval": (0.1, 0.4)})
        run.log_samples(2, [{"text": "print('é')", "reward": 1.0}, {"text": "x", "reward": 0.0}])
    return run


def test_metrics_that_are_logged_are_read(logged: Run) -> None:
    frame = Run.open("r").metrics()
    assert frame["train_loss"].tolist() == [2.5, 1.5]
    assert frame["step"].tolist() == [1, 2]
    assert frame["verdict"][0] == "LIVE"
    assert frame["tier/full_match"][1] == 0.5
    assert frame["tokens"][1] == 10


def test_evaluations_and_samples_that_are_logged_are_read(logged: Run) -> None:
    again = Run.open("r")
    assert again.evals().loc[0, ["pass@1", "n", "split"]].tolist() == [0.25, 64, "select"]
    assert again.evals()["interval"][0] == [0.1, 0.4]
    assert [r["text"] for r in again.samples()] == ["print('é')", "x"]


def test_a_run_keeps_its_settings_and_its_environment(logged: Run) -> None:
    again = Run.open("r")
    assert again.status["status"] == "finished"
    assert again.config == dict(run_name="r", resume=False, lr=0.1, ks=[1, 8])
    assert again.env["kind"] == "test"
    assert again.env["argv"] == sys.argv
    assert "torch" in again.env["versions"]


def test_tensorboard_shows_what_is_logged(logged: Run) -> None:
    board = EventAccumulator(str(logged.path / "tb")).Reload()
    assert set(board.Tags()["scalars"]) == {
        "train_loss",
        "lr",
        "tier/full_match",
        "tokens",
        "eval/select/pass@1",
    }
    assert scalars(logged, "train_loss") == [(1, 2.5), (2, 1.5)]
    assert scalars(logged, "eval/select/pass@1") == [(2, 0.25)]


@pytest.mark.parametrize(
    "values, named", [({"trainloss": 1.0}, "'train_loss'"), ({"tier/": 1.0}, "'tier/'")], ids=str
)
def test_only_declared_scalars_are_taken(values: dict[str, float], named: str) -> None:
    run = new()
    with raising(ValueError, named):
        run.log(1, values)
    assert not (run.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name, unit", [("pass@64", METRICS["pass@*"]), ("val_bpb", "bits/byte")])
def test_scalars_have_units(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_the_block_ends_the_run() -> None:
    for error, status, reason in (
        (None, "finished", None),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (ValueError("bad"), "failed", "ValueError: bad"),
    ):
        try:
            with new(status) as run:
                if error:
                    raise error
        except (KeyboardInterrupt, ValueError) as e:
            assert e is error
        assert (run.status["status"], run.status["reason"]) == (status, reason)
        assert paths.lock_of(run.path) not in processes._held


def test_a_killed_run_says_killed(home: Path) -> None:
    program = (
        "run = Run.create('k', {}, kind='t'); run.log(1, "
        "lr=1.0); print('up', flush=True); time.sleep(60)"
    )
    process = child(program, home)
    assert process.stdout.readline() == "up\n"
    assert Run.open("k").status["status"] == "running"
    with pytest.raises(RunError, match=str(process.pid)):
        Run.create("k", {}, kind="t", overwrite=True)
    with pytest.raises(RunError, match=str(process.pid)):
        Run.create("k", {}, kind="t", resume=True)
    process.kill()
    deadline = time.monotonic() + 20
    while Run.open("k").status["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert Run.open("k").status["status"] == "killed", "dead, though nobody has waited for it yet"
    process.wait()
    assert Run.open("k").status["status"] == "killed"
    assert "is gone" in Run.open("k").status["reason"]
    assert Run.open("k").metrics()["lr"].tolist() == [1.0]
    assert Run.create("k", {}, kind="t", overwrite=True).status["status"] == "running"


@pytest.mark.parametrize("presses", [1, 2])
def test_one_ctrl_c_asks_two_interrupt(home: Path, presses: int) -> None:
    program = f"""
with stoppable():
    print('up', flush=True)
    while not stop.is_set() or {presses} == 2:  # the second never leaves by itself
        time.sleep(0.01)
print('left', flush=True)
"""
    process = child(program, home, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "up\n"
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, err = process.communicate(timeout=600)
    assert "stopping after this step" in err
    assert (out == "left\n") == (process.returncode == 0) == (presses == 1)
    assert ("KeyboardInterrupt" in err) == (presses == 2)


def test_a_name_in_use_is_rejected() -> None:
    with new() as run:
        run.log(1, lr=1.0)
    with pytest.raises(RunError, match="'r'.*finished.*--resume.*--overwrite"):
        new()
    # of a command that has no --resume
    with pytest.raises(RunError, match=r"finished\); set --run-name r-2, or --overwrite"):
        Run.create("r", {"seed": 0}, kind="evaluate")
    with pytest.raises(ConfigError, match="--resume.*--overwrite"):
        new(resume=True, overwrite=True)
    assert len(Run.open("r").metrics()) == 1


def test_the_refusal_of_a_name_names_one_that_is_free() -> None:
    for name in ("x", "x-2"):
        with Run.create(name, {}, kind="t"):
            pass
    with raising(RunError, "--run-name x-3"):
        Run.create("x", {}, kind="t")


def test_a_name_in_use_is_replaced_and_nothing_is_left_of_the_former_run() -> None:
    with new() as run:
        run.log(1, lr=1.0)
    with new(overwrite=True) as run:
        assert len(run.metrics()) == 0
        run.log(1, lr=1.0)
    assert sorted(p.name for p in runs_dir().iterdir()) == ["r"]


def test_a_name_that_is_not_in_use_cannot_be_resumed() -> None:
    new().finish()
    with pytest.raises(MissingFile, match="'q'.*r"):
        new("q", resume=True)


def test_runs_do_not_nest_and_foreign_folders_are_left_alone() -> None:
    new("nano/sft")
    new("a")
    with pytest.raises(ConfigError, match="'a'.*--run-name"):
        new("a/b")
    with pytest.raises(RunError, match="nano.*--run-name"):
        new("nano", overwrite=True)
    (runs_dir() / "notes").mkdir()
    (runs_dir() / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(RunError, match="notes.*--run-name"):
        new("notes", overwrite=True)
    assert exists("nano/sft")
    assert not exists("nano")
    assert (runs_dir() / "notes" / "mine.txt").exists()


def test_a_run_is_whole_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    new("old").finish()
    monkeypatch.setattr(os, "fsync", full)
    for name in ("r", "old"):
        with pytest.raises(RunError, match=os.strerror(errno.ENOSPC)):
            new(name, overwrite=True)
    assert not exists("r")
    assert exists("old")
    assert [p.name for p in runs_dir().iterdir()] == ["old"]


def test_resume_drops_rows_after_the_checkpoint_when_it_writes() -> None:
    run = new()
    for step in range(1, 6):
        run.log(step, train_loss=float(step))
        run.log_eval(step, {"val_loss": float(step)})
        run.log_samples(step, [{"text": str(step)}])
    fake_checkpoint(run, 3)
    before = Run.open("r").env
    again = new(resume=True)
    assert again.resumed and len(again.metrics()) == 5, (
        "nothing is dropped before there is something new"
    )
    again.log(4, train_loss=40.0)
    assert again.metrics()["train_loss"].tolist() == [1.0, 2.0, 3.0, 40.0]
    assert again.evals()["step"].tolist() == [1, 2, 3]
    assert [r["step"] for r in again.samples()] == [1, 2, 3]
    again.log_eval(4, {"n": 1})
    assert again.metrics()["step"].tolist() == [1, 2, 3, 4]
    assert again.evals()["step"].tolist() == [1, 2, 3, 4]
    again.log(5, train_loss=50.0)
    again.finish()
    assert again.metrics()["step"].tolist() == [1, 2, 3, 4, 5]
    assert len(again.env["resumed"]) == 1
    assert {k: again.env[k] for k in before} == before
    assert scalars(again, "train_loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]


def test_a_run_resumed_before_its_first_checkpoint_starts_again() -> None:
    new("early").log(1, train_loss=1.0)
    again = new("early", resume=True)
    again.log(1, train_loss=7.0)
    assert not again.resumed
    assert again.metrics()["train_loss"].tolist() == [7.0]


def test_resume_requires_the_same_settings() -> None:
    new("r")
    other = Settings(run_name="r", lr=0.2)
    with pytest.raises(RunError, match="lr 0.1 -> 0.2.*--run-name"):
        Run.create("r", other, kind="test", resume=True)


def test_resume_passes_over_settings_that_identify_nothing_and_settings_that_are_gone() -> None:
    new("r")
    Run.create("r", Settings(run_name="else", resume=True), kind="test", resume=True)
    stored = json.loads((runs_dir() / "r" / "config.json").read_text())
    (runs_dir() / "r" / "config.json").write_text(json.dumps(stored | {"gone": 1}))
    new("r", resume=True)  # a setting that is no more


@dataclass(frozen=True, kw_only=True)
class Batched(Settings):
    device_batch_size: int = opt(4, "rows per rank and microbatch")
    grad_accum: int = opt(1, "microbatches")


def test_a_resumed_run_may_share_a_batch_differently_but_not_change_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Run.create("b", Batched(), kind="test").finish()
    Run.create("b", Batched(device_batch_size=2, grad_accum=2), kind="test", resume=True).finish()
    with pytest.raises(RunError, match="device_batch_size x grad_accum x ranks 4 -> 2"):
        Run.create("b", Batched(device_batch_size=2), kind="test", resume=True)
    monkeypatch.setenv("WORLD_SIZE", "2")  # for the check alone: one process needs no group
    paths.check_same("b", Batched(device_batch_size=2))


def test_a_restart_resumes_only_what_its_own_launch_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    new("launched").fail("killed")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    # --overwrite must not delete the work of the launch
    new("launched", overwrite=True).fail("killed again")
    assert len(Run.open("launched").env["resumed"]) == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    with pytest.raises(RunError, match="launched"):
        new("launched")


@pytest.mark.parametrize(
    "tail", [b'{"step": 9, "tra', b'{"step": 9, "train_loss": 1.0', b"\0\0\0\0", b"{}\xff"]
)
def test_a_line_cut_by_a_kill_is_neither_read_nor_built_upon(tail: bytes) -> None:
    run = new()
    run.log(1, train_loss=1.0)
    with open(run.path / "metrics.jsonl", "ab") as f:
        f.write(tail)
    again = Run.open(run.name)
    assert again.metrics()["step"].tolist() == [1]
    again.log(2, train_loss=2.0)
    assert again.metrics()["train_loss"].tolist() == [1.0, 2.0]


def test_other_damage_than_a_cut_line_is_not_passed_over() -> None:
    run = new()
    run.log(1, train_loss=1.0)
    text = (run.path / "metrics.jsonl").read_text()
    (run.path / "metrics.jsonl").write_text("oops\n" + text)
    with raising(RunError, "metrics.jsonl line 1"):
        run.metrics()


def test_a_full_disk_while_logging_is_an_error_and_loses_no_whole_row(home: Path) -> None:
    program = f"""
run = Run.create('full', {{}}, kind='t')
run._show = lambda *row: None
run.log(1, lr=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, {resource.RLIM_INFINITY}))
try:
    for step in range(2, 9):
        run.log(step, lr=1.0)
except RunError as e:
    print(step, e, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY}, {resource.RLIM_INFINITY}))
run.log(step, lr=2.0)
"""
    out, _ = child(program, home).communicate(timeout=600)
    failed = int(out.split()[0])
    assert "metrics.jsonl" in out
    assert "--resume" in out
    assert Run.open("full").metrics()["step"].tolist() == list(range(1, failed + 1))


@pytest.fixture
def two_checkpoints() -> Run:
    """A run with checkpoints of steps 10 and 20."""
    run = new("nano/sft")
    fake_checkpoint(run, 10)
    fake_checkpoint(run, 20)
    return run


def step_of(run: Run, step: int) -> Path:
    return run.path / "checkpoints" / f"step_{step:06d}"


@pytest.mark.parametrize("ref", ["nano/sft", "nano/sft@latest", "nano/sft@20"])
def test_a_run_by_its_name_is_its_last_checkpoint(ref: str, two_checkpoints: Run) -> None:
    assert find_checkpoint(ref) == step_of(two_checkpoints, 20)


@pytest.mark.parametrize(
    "place", [".", "checkpoints", "checkpoints/step_000020", "checkpoints/step_000020/meta.json"]
)
def test_a_place_in_a_run_is_its_last_checkpoint(place: str, two_checkpoints: Run) -> None:
    assert find_checkpoint(two_checkpoints.path / place) == step_of(two_checkpoints, 20)


def test_a_checkpoint_is_found_by_its_step(two_checkpoints: Run) -> None:
    first = step_of(two_checkpoints, 10)
    assert find_checkpoint("nano/sft@10") == first
    assert find_checkpoint(f"{two_checkpoints.path}@10") == first
    assert two_checkpoints.checkpoints() == [10, 20]


def test_the_best_checkpoint_is_the_one_that_was_chosen(two_checkpoints: Run) -> None:
    (two_checkpoints.path / "checkpoints" / "best").write_text("step_000010\n")
    assert find_checkpoint("nano/sft@best") == step_of(two_checkpoints, 10)


def test_a_run_is_found_by_its_name_and_by_a_place_in_it(two_checkpoints: Run) -> None:
    last = step_of(two_checkpoints, 20)
    for ref in ("nano/sft", step_of(two_checkpoints, 10), last / "meta.json"):
        assert find_run(ref) == two_checkpoints.path


def test_a_checkpoint_whose_replacement_was_killed_is_found(two_checkpoints: Run) -> None:
    last = step_of(two_checkpoints, 20)
    last.rename(last.with_name(".step_000020.old"))
    assert two_checkpoints.checkpoints() == [10, 20]
    assert find_checkpoint("nano/sft").name == ".step_000020.old"


@pytest.mark.parametrize(
    "ref, remedy",
    [
        ("nano/sft", "; a recipe makes its runs: codechat run nano"),
        (
            "Qwen/Qwen3-0.6B",
            "; a model of the hub .* hf download Qwen/Qwen3-0.6B --local-dir .* codechat import",
        ),
        ("released/minii", "did you mean 'released/mini'\\?$"),
    ],
)
def test_the_error_for_an_unknown_run_names_the_command_that_makes_it(
    ref: str, remedy: str
) -> None:
    with pytest.raises(MissingFile, match=f"no run '{ref}'.*{remedy}"):
        find_run(ref)


def test_the_parent_is_recorded() -> None:
    with new("sft") as parent:
        fake_checkpoint(parent, 10)
    expected = {"ref": "sft@10", "run": "sft", "step": 10}
    assert new("rl", parent="sft@10").env["parent"] == expected


def test_a_run_does_not_replace_its_parent() -> None:
    with new("sft") as parent:
        fake_checkpoint(parent, 10)
    with pytest.raises(ConfigError, match="--overwrite.*sft"):
        new("sft", parent="sft", overwrite=True)


def git(root: Path, *args: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *args], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A project in a repository, with one commit."""
    root = tmp_path / "repository"
    (root / "vendored").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    git(root, "init", "-q")
    git(root, "add", "pyproject.toml")
    git(root, "commit", "-qm", "first")
    return root


def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    git(tmp_path, "init", "-q")
    assert provenance.git_state(tmp_path)["commit"] == "unknown"


def test_a_repository_without_changes_is_its_commit(repository: Path) -> None:
    clean = provenance.git_state(repository)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    assert clean["dirty_hash"] is None


def test_each_change_since_the_commit_has_a_hash_of_its_own(repository: Path) -> None:
    clean = provenance.git_state(repository)
    changed = []
    for text in ("[project]\n#", "[project]\n##"):
        (repository / "pyproject.toml").write_text(text)
        changed.append(provenance.git_state(repository))
    for state in changed:
        assert state["dirty"]
        assert state["commit"] == clean["commit"]
    assert changed[0]["dirty_hash"] != changed[1]["dirty_hash"]


@pytest.mark.parametrize("folder", ["vendored", "absent"])
def test_the_commit_of_a_foreign_repository_or_of_none_is_unknown(
    folder: str, repository: Path
) -> None:
    state = provenance.git_state(repository / folder)
    assert state["commit"] == "unknown"
    assert state["reason"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> Said:
    """What `codechat runs` says."""
    code = cli.main(["runs", *argv])
    return Said(code, *capsys.readouterr())


@pytest.fixture
def two_runs() -> Run:
    """nano/rl with rows and a checkpoint of step 10, and nano/rl-b of another learning rate."""
    with Run.create("nano/rl", {"lr": 0.5, "model": {"depth": 2}}, kind="reinforce") as run:
        run.log(1, reward_mean=0.25, lr=0.5)
        run.log(2, reward_mean=float("nan"), verdict="LIVE")
        run.log_eval(2, {"pass@1": 0.5, "split": "test", "n": 8})
        run.log(3, {"reward_mean": 0.75, "tier/full_match": 0.5})
    Run.create("nano/rl-b", {"lr": 0.25, "model": {"depth": 2}}, kind="reinforce").finish()
    fake_checkpoint(run, 10)
    return run


def test_a_run_is_listed_with_its_last_step(two_runs: Run) -> None:
    assert list_runs().set_index("run").loc["nano/rl", "step"] == 10


def test_runs_are_listed_with_their_kind_and_status(
    two_runs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = said(capsys, "list")
    assert listed.code == 0
    rows = [line.split()[:3] for line in listed.out.splitlines()[1:]]
    assert rows == [["nano/rl", "reinforce", "finished"], ["nano/rl-b", "reinforce", "finished"]]
    assert said(capsys).out == listed.out, "without a word too"


def test_a_run_is_shown_with_settings_and_last_values(
    two_runs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, "show", "nano/rl")
    assert shown.code == 0
    lines = {" ".join(line.split()) for line in shown.out.splitlines()}
    assert lines >= {
        "status finished",
        "lr 0.5",
        "model.depth 2",
        "reward_mean 0.75 reward at step 3",
        "verdict LIVE at step 2",
        "evaluation at step 2 test",
        "pass@1 0.5",
    }


def test_a_run_is_shown_by_its_folder_too(
    two_runs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    by_folder = said(capsys, "show", str(two_runs.path)).out
    assert by_folder == said(capsys, "show", "nano/rl").out


def test_two_runs_are_compared_by_what_differs(
    two_runs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = said(capsys, "compare", "nano/rl", "nano/rl-b").out
    assert "lr" in compared
    assert "0.25" in compared
    assert "depth" not in compared


def test_a_run_differs_from_itself_in_nothing(
    two_runs: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "0.5" not in said(capsys, "compare", "nano/rl", "nano/rl").out


def test_a_failed_run_is_listed_with_its_reason() -> None:
    new("b").fail("out of memory")
    assert list_runs().set_index("run").loc["b", "reason"] == "out of memory"


def test_a_damaged_run_is_listed_as_one() -> None:
    (runs_dir() / "broken").mkdir(parents=True)
    for name in ("config.json", "status.json"):
        (runs_dir() / "broken" / name).write_text("{")
    assert list_runs().set_index("run").loc["broken", "status"] == "damaged"


@pytest.mark.parametrize("name", ["released/mini", "released/nano"])
def test_a_released_run_is_shown_without_its_start(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, "show", name)
    assert shown.code == 0
    assert "finished" in shown.out
    assert "started" not in shown.out


def points(run: Run) -> dict[str, list[tuple[int, float]]]:
    """{name: (step, value) of each point} of what TensorBoard shows."""
    events = EventAccumulator(str(run.path / "tb"), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(e.step, round(e.value, 3)) for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_keeps_training_and_each_evaluation_in_curves_of_their_own(home: Path) -> None:
    with Run.create("shown", {}, kind="grpo") as run:
        for step in (1, 2):
            run.log(step, reward_mean=step / 10)
            run.log_eval(step, {"reward_mean": step / 2})
            for split in ("select", "test"):
                row = {
                    "split": split,
                    "val_loss": float(step),
                    "n": 4,
                    "note": "text",
                    "not_declared": 1.0,
                }
                run.log_eval(step, row)
    assert points(run) == {
        "reward_mean": [(1, 0.1), (2, 0.2)],
        "eval/reward_mean": [(1, 0.5), (2, 1.0)],
        "eval/select/val_loss": [(1, 1.0), (2, 2.0)],
        "eval/test/val_loss": [(1, 1.0), (2, 2.0)],
    }


def test_no_curve_has_two_evaluations_at_one_step(home: Path) -> None:
    """Checkpoints of two runs with the same steps, each sampled in two ways: the first of a
    split has the short name."""
    with Run.create("judged", {}, kind="evaluate") as run:
        for number, (checkpoint, sampling) in enumerate(
            product(("a@2", "a@4", "nano/b@2"), ("greedy", "T=1"))
        ):
            row = {
                "split": "test",
                "checkpoint": checkpoint,
                "sampling": sampling,
                "val_loss": float(number),
            }
            run.log_eval(int(checkpoint[-1]), row)
    assert points(run) == {
        "eval/test/val_loss": [(2, 0.0), (4, 2.0)],
        "eval/test/T=1/val_loss": [(2, 1.0), (4, 3.0)],
        "eval/test/nano/b/val_loss": [(2, 4.0)],
        "eval/test/nano/b/T=1/val_loss": [(2, 5.0)],
    }


class Service:
    """Stands for the package wandb or trackio; keeps what it is called with."""

    Error = OSError

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> "Service":
        self.calls.append(("init", settings))
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", (values, step)))

    def Table(self, dataframe: Any) -> list[dict[str, Any]]:
        return dataframe.to_dict("records")

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", exit_code))


Tracked = Literal["wandb", "trackio"]
TRACKED: tuple[Tracked, ...] = ("wandb", "trackio")


def service(name: str, monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service(name)
    monkeypatch.setitem(sys.modules, name, made)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("name", TRACKED)
def test_a_tracker_that_is_not_installed_is_told_before_the_run_exists(
    name: Tracked, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=f"pip install {name}"):
        Run.create("live", RunSettings(run_name="live", track=name), kind="sft")
    assert not paths.exists("live")


def test_wandb_is_told_who_the_run_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = service("wandb", monkeypatch)
    cfg = RunSettings(run_name="live/a", track="wandb")
    with Run.create("live/a", cfg, kind="sft") as run:
        called, settings = wandb.calls[0]
        assert called == "init"
        assert settings["id"] == "live--a"
        assert settings["job_type"] == "sft"
        assert settings["config"] == run.config
        assert settings["resume"] is None
    assert wandb.calls[-1] == ("finish", 0)


def test_trackio_is_told_who_the_run_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = service("trackio", monkeypatch)
    with Run.create("live", RunSettings(run_name="live", track="trackio"), kind="sft") as run:
        called, settings = trackio.calls[0]
        assert called == "init"
        assert settings["name"] == "live"
        assert settings["group"] == "sft"
        assert settings["config"] == run.config
        assert settings["resume"] == "never"


def row_sent(name: Tracked, step: int, values: dict[str, Any]) -> tuple[str, Any]:
    """How a service gets a row: wandb's steps are a metric like any other."""
    if name == "wandb":
        return "log", ({"step": step} | values, None)
    return "log", (values, step)


@pytest.mark.parametrize("name", TRACKED)
def test_a_tracker_gets_each_row_at_once(
    name: Tracked, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = service(name, monkeypatch)
    with Run.create("live", RunSettings(run_name="live", track=name), kind="sft") as run:
        run.log(1, train_loss=2.0, lr=0.5, verdict="LIVE")
        values = {"train_loss": 2.0, "lr": 0.5, "verdict": "LIVE"}
        assert tracker.calls[-1] == row_sent(name, 1, values)
        run.log_eval(1, {"split": "test", "val_loss": 3.0, "n": 4})
        assert tracker.calls[-1] == row_sent(name, 1, {"eval/test/val_loss": 3.0})


@pytest.mark.parametrize("name", TRACKED)
def test_a_tracker_gets_samples_as_a_table(
    name: Tracked, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = service(name, monkeypatch)
    with Run.create("live", RunSettings(run_name="live", track=name), kind="sft") as run:
        run.log_samples(1, [{"text": "a < b", "reward": 0.5, "score": {"tier": "exact"}}])
        _, (values, _) = tracker.calls[-1]
        (row,) = values["samples"]
        assert row["text"] == "a < b"
        assert row["reward"] == 0.5
        assert row["score"] == "{'tier': 'exact'}"


def test_wandb_is_told_that_a_run_failed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = service("wandb", monkeypatch)
    cfg = RunSettings(run_name="live", track="wandb")
    with pytest.raises(ZeroDivisionError), Run.create("live", cfg, kind="sft"):
        1 / 0
    assert wandb.calls[-1] == ("finish", 1)


def test_a_run_is_tracked_only_where_it_is_asked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = service("wandb", monkeypatch)
    Run.create("quiet", RunSettings(run_name="quiet"), kind="sft").finish()
    assert wandb.calls == []


def test_tracking_changes_no_hash_of_a_run() -> None:
    assert config_hash(RunSettings(track="wandb")) == config_hash(RunSettings())
