"""`codechat runs`: list, show, compare, and export to a tracker with nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codechat import cli
from codechat.core.config import config_hash, opt
from codechat.runs.command import tracker_rows
from codechat.runs.run import Run
from codechat.training.settings import RunSettings

pytestmark = pytest.mark.usefixtures("runs_root")


@pytest.fixture
def run() -> Iterator[Run]:
    with Run.create("nano/rl", {"lr": 0.5, "model": {"depth": 2}}, kind="reinforce") as run:
        run.log(1, reward_mean=0.25, lr=0.5)
        run.log(2, reward_mean=float("nan"), verdict="LIVE")
        run.log_eval(2, {"pass@1": 0.5, "split": "test", "n": 8})
        run.log(3, {"reward_mean": 0.75, "tier/full_match": 0.5})
    with Run.create("nano/rl-b", {"lr": 0.25, "model": {"depth": 2}}, kind="reinforce"):
        pass
    yield run


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["runs", *argv])
    return code, *capsys.readouterr()


def test_list_show_and_compare(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "list")
    assert code == 0 and out == said(capsys)[1]
    listed = [line.split()[:3] for line in out.splitlines()[1:]]
    assert listed == [["nano/rl", "reinforce", "finished"], ["nano/rl-b", "reinforce", "finished"]]
    code, out, _ = said(capsys, "show", "nano/rl")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    values = ["lr 0.5", "model.depth 2", "reward_mean 0.75 reward at step 3", "verdict LIVE at step 2", "pass@1 0.5"]
    assert code == 0 and {"status finished", "evaluation at step 2 test", *values} <= set(lines)
    assert out == said(capsys, "show", str(run.path))[1]
    _, out, _ = said(capsys, "compare", "nano/rl", "nano/rl-b")
    assert "lr" in out and "0.25" in out and "depth" not in out
    assert "0.5" not in said(capsys, "compare", "nano/rl", "nano/rl")[1]
    for name in ("released/mini", "released/nano"):
        code, out, _ = said(capsys, "show", name)
        assert code == 0 and "finished" in out and "started" not in out


# ---- export


class Tracker:
    """What a test sees of the wandb package: every call, kept."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> SimpleNamespace:
        self.calls.append(("init", settings))
        keep = lambda name: lambda *a, **k: self.calls.append((name, a or k))  # noqa: E731
        return SimpleNamespace(log=keep("log"), define_metric=keep("define_metric"), finish=keep("finish"))


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    found = Tracker()
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_export_replays_every_row(run: Run, tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "export", "nano/rl", "--wandb", "--offline")
    settings = tracker.calls[0][1]
    assert code == 0 and "4 rows" in out and "wandb sync" in out
    assert settings["config"] == run.config and settings["mode"] == "offline" and settings["name"] == "nano/rl"
    assert [row for name, (row, *_) in tracker.calls[2:-1]] == [
        {"step": 1, "reward_mean": 0.25, "lr": 0.5},
        {"step": 2, "verdict": "LIVE"},
        {"step": 2, "eval/test/pass@1": 0.5},
        {"step": 3, "reward_mean": 0.75, "tier/full_match": 0.5},
    ]
    assert tracker.calls[-1][0] == "finish"


# ---- live


@dataclass(frozen=True, kw_only=True)
class Tracked(RunSettings):
    lr: float = opt(0.5, "learning rate")


def test_a_loop_with_wandb_sends_each_row_as_the_replay_does(runs_root: Path, tracker: Tracker) -> None:
    cfg = Tracked(run_name="live", wandb=True)
    with Run.create("live", cfg, kind="sft") as run:
        sent = lambda: [row for name, (row, *_) in tracker.calls[2:] if name == "log"]  # noqa: E731
        run.log(1, train_loss=2.0, lr=0.5)
        assert sent() == [{"step": 1, "train_loss": 2.0, "lr": 0.5}], "at once, not at the end"
        run.log_eval(1, {"split": "test", "val_loss": 3.0, "n": 4})
        run.log_samples(1, [{"text": "not sent"}])
    assert sent() == list(tracker_rows(run))
    settings = tracker.calls[0][1]
    assert settings["id"] == "live" and settings["config"] == run.config and settings["job_type"] == "sft"
    assert settings["resume"] is None and settings["mode"] is None
    assert tracker.calls[-1] == ("finish", {"exit_code": 0})
    with pytest.raises(ZeroDivisionError), Run.create("live", cfg, kind="sft", overwrite=True):
        1 / 0
    assert tracker.calls[-1] == ("finish", {"exit_code": 1})


def test_without_wandb_nothing_is_sent_and_the_setting_is_in_no_hash(runs_root: Path, tracker: Tracker) -> None:
    with Run.create("quiet", Tracked(run_name="quiet"), kind="sft") as run:
        run.log(1, train_loss=2.0)
    assert tracker.calls == [] and config_hash(Tracked(wandb=True)) == config_hash(Tracked())


@pytest.mark.slow
def test_wandb_itself_keeps_the_rows_offline(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Run.create("real", Tracked(wandb=True), kind="sft") as run:
        for step in (1, 2, 3):
            run.log(step, train_loss=1.0 / step)
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    written = file.read_bytes()
    assert all(value in written for value in (b"train_loss", b"0.5", b"0.3333333333333333"))
