"""`codechat runs`: list, show, compare; and a loop's rows in a tracker."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codechat import cli
from codechat.core.config import config_hash
from codechat.core.errors import RunError
from codechat.runs.run import Run
from codechat.training.settings import RunSettings

pytestmark = pytest.mark.usefixtures("runs_root")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["runs", *argv])
    return code, *capsys.readouterr()


def test_list_show_and_compare(capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create("nano/rl", {"lr": 0.5, "model": {"depth": 2}}, kind="reinforce") as run:
        run.log(1, reward_mean=0.25, lr=0.5)
        run.log(2, reward_mean=float("nan"), verdict="LIVE")
        run.log_eval(2, {"pass@1": 0.5, "split": "test", "n": 8})
        run.log(3, {"reward_mean": 0.75, "tier/full_match": 0.5})
    Run.create("nano/rl-b", {"lr": 0.25, "model": {"depth": 2}}, kind="reinforce").finish()
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


def test_a_loop_with_wandb_sends_each_row_at_once(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def init(**settings: Any) -> SimpleNamespace:
        keep = lambda name: lambda *a, **k: calls.append((name, *a, k))  # noqa: E731
        keep("init")(**settings)
        return SimpleNamespace(log=keep("log"), define_metric=keep("define_metric"), finish=keep("finish"))

    cfg = RunSettings(run_name="live", wandb=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="pip install wandb"):
        Run.create("live", cfg, kind="sft")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=OSError))
    with Run.create("live", cfg, kind="sft") as run:
        run.log(1, train_loss=2.0, lr=0.5, verdict="LIVE")
        assert calls[-1] == ("log", {"step": 1, "train_loss": 2.0, "lr": 0.5, "verdict": "LIVE"}, {})
        run.log_eval(1, {"split": "test", "val_loss": 3.0, "n": 4})
        assert calls[-1] == ("log", {"step": 1, "eval/test/val_loss": 3.0}, {})
        run.log_samples(1, [{"text": "not sent"}])
    assert calls[0][1] | {"id": "live", "config": run.config, "job_type": "sft", "resume": None} == calls[0][1]
    assert len(calls) == 5 and calls[-1] == ("finish", {"exit_code": 0})
    with pytest.raises(ZeroDivisionError), Run.create("live", cfg, kind="sft", overwrite=True):
        1 / 0
    assert calls[-1] == ("finish", {"exit_code": 1})
    calls.clear()
    Run.create("quiet", RunSettings(run_name="quiet"), kind="sft").finish()
    assert calls == [] and config_hash(RunSettings(wandb=True)) == config_hash(RunSettings())
