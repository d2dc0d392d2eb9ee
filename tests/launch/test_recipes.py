"""Recipes: what is finished is skipped, what changed is done again, what was killed goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts import killed_after

import codechat
from codechat import pretrain
from codechat.core.errors import ConfigError, RunError, UserError
from codechat.data import corpus
from codechat.distributed import dist
from codechat.launch import launcher, planner
from codechat.launch.recipes import runner, stage
from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.scales import SCALES
from codechat.launch.recipes.stage import Stage
from codechat.runs import paths, run

MODEL = dict(depth=1, n_embd=16, n_head=1, block_size=32)
QUICK = dict(model=MODEL, seq_len=16, device_batch_size=2, max_steps=4, save_every=2, eval_tokens=64, compile=False)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, ...]:
    """A corpus, a pretraining run on it, and a second one from the first; everything below tmp_path."""
    for module in (run, paths, stage, runner):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(f"x{i} = {i}" for i in range(400)))
    made = (
        Stage(
            name="corpus",
            about="text",
            kind="data.corpus",
            out=str(tmp_path / "corpus"),
            settings=dict(source=str(tmp_path / "text.txt"), tokenizer="bytes", val_share=0.2),
        ),
        Stage(
            name="first",
            about="train",
            needs=("corpus",),
            kind="pretrain",
            settings=dict(data_dir="{corpus}", **QUICK),
        ),
        Stage(
            name="second",
            about="train on",
            needs=("first",),
            seeded=True,
            kind="pretrain",
            settings=dict(init_from="{first}", data_dir="{corpus}", **QUICK),
        ),
    )
    monkeypatch.setitem(runner.RECIPES, "tiny", ("a test", made))
    return made


def ran(**wish: Any) -> list[str]:
    """Names of the stages that a call runs."""
    cfg = runner.RecipeConfig(**wish)
    bound = runner.bind("tiny", runner.RECIPES["tiny"][1], cfg.seed)
    todo = runner.pending(bound, runner.Ledger.read(paths.runs_dir() / "tiny" / "stages.json"), cfg)
    runner.run_recipe("tiny", cfg)
    return [b.stage.name for b in bound if b.stage.name in todo]


def test_finished_stages_are_skipped_and_changed_ones_run_with_what_needs_them(
    stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran() == ["corpus", "first", "second"]
    assert ran() == []
    assert ran(force="second") == ["second"]
    assert ran(from_stage="first") == ["first", "second"]
    changed = replace(stages[1], settings={**stages[1].settings, "lr": 1e-4})
    monkeypatch.setitem(runner.RECIPES, "tiny", ("a test", (stages[0], changed, stages[2])))
    with pytest.raises(ConfigError, match="stage first .*lr .*1e-04|stage first .*lr .*0.0001"):
        ran()
    assert run.Run.open("tiny/first").status["status"] == "finished" and not paths.exists("tiny/first.2")
    assert ran(from_stage="first") == ["first", "second"]
    assert run.Run.open("tiny/first").config["lr"] == 1e-4
    kept = [run.Run.open(f"tiny/first{n}").config["lr"] for n in (".1", ".2")]
    assert kept[0] == kept[1] != 1e-4
    assert ran(from_stage="second", overwrite=True) == ["second"] and not paths.exists("tiny/second.4")


def test_a_recipe_killed_before_a_finished_run_was_noted_goes_on(stages: tuple[Stage, ...]) -> None:
    ran()
    runner.Ledger.read(paths.runs_dir() / "tiny" / "stages.json").drop("second")
    assert ran() == ["second"] and ran() == [] and paths.exists("tiny/second.1")


def test_from_a_stage_whose_parent_is_missing_names_the_parent(stages: tuple[Stage, ...]) -> None:
    with pytest.raises(ConfigError, match="first"):
        ran(from_stage="second")
    assert not paths.exists("tiny/second")


def test_how_often_a_stage_saves_evaluates_and_logs_is_not_part_of_it(
    stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran()
    often = dict(save_every=1, eval_every=3, log_every=2, keep_last=1)
    changed = replace(stages[1], settings={**stages[1].settings, **often})
    monkeypatch.setitem(runner.RECIPES, "tiny", ("a test", (stages[0], changed, stages[2])))
    assert ran() == []


def test_a_lost_output_is_made_again(stages: tuple[Stage, ...]) -> None:
    ran()
    shutil.rmtree(run.Run.open("tiny/second").path)
    assert ran() == ["second"]


def test_another_seed_shares_what_comes_before(stages: tuple[Stage, ...]) -> None:
    ran()
    assert ran(seed=1) == ["second"]
    assert run.Run.open("tiny/second-s1").config["seed"] == 1
    assert ran() == []


def test_a_stage_that_was_killed_goes_on_from_its_checkpoint(
    stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after():
        ran()
    started: list[int] = []
    learn = corpus.WindowLoader.load_state
    monkeypatch.setattr(
        corpus.WindowLoader, "load_state", lambda self, state: (started.append(1), learn(self, state))[1]
    )
    assert ran() == ["first", "second"]
    assert started == [1]
    assert list(run.Run.open("tiny/first").metrics()["step"]) == [4]
    assert run.Run.open("tiny/first").status["status"] == "finished"


def test_an_interrupted_stage_stops_the_recipe(stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "any", lambda flag: True)
    with pytest.raises(RunError) as error:
        ran()
    assert "first" in str(error.value) and "interrupted" in str(error.value)
    ledger = json.loads((paths.runs_dir() / "tiny" / "stages.json").read_text())
    assert set(ledger) == {"corpus"}


def test_a_stop_in_the_last_step_of_a_stage_stops_the_recipe(
    stages: tuple[Stage, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage is finished then and stays so."""
    finish = run.Run.finish

    def late(self: run.Run, *a: Any, **k: Any) -> Any:
        if self.path.name == "first":
            os.kill(os.getpid(), signal.SIGTERM)
        return finish(self, *a, **k)

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "finish", late)
        with pytest.raises(KeyboardInterrupt, match="first is finished"):
            ran()
    assert ran() == ["second"]


def test_unknown_names_are_refused_with_the_nearest(stages: tuple[Stage, ...]) -> None:
    for name, wish, near in (("tiny", dict(from_stage="frist"), "'first'"), ("nona", {}, "'nano'")):
        with pytest.raises(UserError) as error:
            runner.run_recipe(name, runner.RecipeConfig(**wish))
        assert near in str(error.value)


@pytest.mark.parametrize("name", ["nano", "compact", "mini"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_nano_recipe_fits_the_configs_it_names(name: str, seed: int) -> None:
    bound = runner.bind(name, runner.RECIPES[name][1], seed)
    names = [b.stage.name for b in bound]
    assert all(need in names[:i] for i, b in enumerate(bound) for need in b.stage.needs)
    assert {"pretrain", "sft", "diagnose", "rl", "evaluate"} <= set(names)
    assert ("report" in names) == (seed == 0 and name != "mini")


def test_a_stage_that_must_be_asked_for_runs_only_where_it_is_named() -> None:
    bound = runner.bind("nano", runner.RECIPES["nano"][1], 0)
    asked = {b.stage.name for b in bound if b.stage.asked}
    ledger = runner.Ledger(Path("none"), {})
    asks = {"full-evaluation", "more-sft", "more-sft-evaluate", "natural"}
    assert asked == asks and not asked & runner.pending(bound, ledger, runner.RecipeConfig())
    for how in (dict(until="natural"), dict(force=("natural",)), dict(from_stage="natural")):
        assert asked & runner.pending(bound, ledger, runner.RecipeConfig(**how)) == {"natural"}
    control = runner.RecipeConfig(until="more-sft-evaluate")  # with the stage that it needs
    assert asked & runner.pending(bound, ledger, control) == {"more-sft", "more-sft-evaluate"}


def test_mini_is_nano_with_a_larger_model_and_more_steps() -> None:
    small, large = (
        {b.stage.name: b.cfg for b in runner.bind("same", runner.RECIPES[name][1], 0)} for name in ("nano", "mini")
    )
    assert set(small) - set(large) == {"notebooks", "report"}
    for same in ("corpus", "base-code", "base-calls", "diagnose", "choose", "evaluate"):
        assert large[same] == small[same]
    assert small["code"] == replace(large["code"], talk=False)
    assert (small["calls"].reading.wordings, large["calls"].reading.wordings) == (0, 0.5)
    tokens = {name: sum(s.max_steps * s.device_batch_size * s.seq_len for s in steps)
              for name, steps in (("small", _trained(small)), ("large", _trained(large)))}  # fmt: skip
    sizes = [replace(of["pretrain"].model, vocab_size=4096).n_params for of in (small, large)]
    assert 8e6 < sizes[1] < 15e6 and 7 < tokens["large"] * sizes[1] / (tokens["small"] * sizes[0]) < 13


def _trained(stages: dict[str, Any]) -> list[Any]:
    return [stages[name] for name in ("pretrain", "base", "words", "lookups", "phrases", "sft")]


@pytest.mark.parametrize("text", ["", "[]", '{"sft": '])
def test_a_ledger_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(RunError, match="stages.json"):
        runner.Ledger.read(tmp_path / "stages.json")


def test_the_table_goes_without_the_result_of_a_run_that_was_deleted() -> None:
    bound = runner.bound_stages("nano", runner.RecipeConfig())
    for b in bound:
        runner.Ledger.read(paths.runs_dir() / "nano" / "stages.json").put(b.name, {"hash": "", "seconds": 1.0})
    table = runner.results_table("nano", "nano", bound)
    assert list(table.columns[1].cells) == ["1"] * len(bound) and not any(table.columns[2].cells)


def test_two_seeds_side_by_side_lose_no_entry(tmp_path: Path) -> None:
    one, other = (runner.Ledger.read(tmp_path / "stages.json") for _ in range(2))
    one.put("sft", {"hash": "a"})
    other.put("sft-s1", {"hash": "b"})
    one.drop("sft")
    assert runner.Ledger.read(tmp_path / "stages.json").rows == {"sft-s1": {"hash": "b"}}


# ---- larger scales


def test_the_8b_stages_are_nanos_with_the_published_steps_and_batches() -> None:
    scale = SCALES["8b"]
    stages = scale.stages(runner.LARGER["nano"])
    assert [s.name for s in stages] == [s.name for s in COMPACT if s.name not in ("notebooks", "report")]
    bound = {b.stage.name: b.cfg for b in runner.bind("nano-8b", stages, 0)}
    assert (
        bound["sft"].init_from == "nano-8b/pretrain"
        and bound["pretrain"].data_dir == bound["corpus"].out == "data/nano-8b/corpus"
    )
    for name, steps, lr in (("pretrain", 30_000, 1.5e-4), ("sft", 8000, 3e-5)):
        cfg = bound[name]
        assert (cfg.max_steps, cfg.lr, cfg.optimizer) == (steps, lr, "adamw")
        assert scale.ranks[name] * cfg.device_batch_size * cfg.grad_accum * cfg.seq_len == 131_072
        assert planner.of(cfg, gpus=8, gpu="a800-80gb").model.n_params == pytest.approx(8.26e9, rel=0.01)
    assert scale.ranks["rl"] * bound["rl"].device_batch_size * bound["rl"].group_size == 128
    assert set(scale.ranks) <= set(scale.settings) and bound["rl"].max_steps == 283


@pytest.fixture
def planned_8b(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The 8b scale of nano with a plan that costs nothing, on a machine of eight GPUs; the names of the stages that are launched."""
    started: list[str] = []
    peaks = planner.Peaks({"weights": 20 * planner.GIB}, {})
    monkeypatch.setattr(planner, "measure", lambda step: peaks)
    monkeypatch.setattr(runner, "gpus_here", lambda: 8)
    monkeypatch.setattr(runner, "launch_stage", lambda settings, ranks: started.append(settings.run_name))
    monkeypatch.setattr(Stage, "made", lambda self, cfg: True)
    alone = [
        replace(s, needs=(), settings={**s.settings, "data_dir": "x"}) for s in COMPACT if s.name in ("pretrain", "sft")
    ]
    monkeypatch.setitem(runner.LARGER, "nano", tuple(alone))
    return started


def test_a_larger_scale_prints_its_plan_and_asks(
    planned_8b: list[str], runs_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = runner.RecipeConfig(scale="8b", price=2.0)
    with pytest.raises(ConfigError) as error:
        runner.run_recipe("nano", cfg)
    assert "--yes" in str(error.value)
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain: fits: 22.5 of 79.2 GiB on 8 x a800-80gb" in text and "cost" in text and "hours on 8 GPUs" in text
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(ConfigError):
        runner.run_recipe("nano", cfg)
    assert planned_8b == []
    monkeypatch.setattr("builtins.input", lambda question: "y")
    runner.run_recipe("nano", cfg)
    assert planned_8b == ["nano-8b/pretrain", "nano-8b/sft"]
    runner.run_recipe("nano", cfg)  # finished: neither asked nor launched again
    assert len(planned_8b) == 2


def test_a_larger_scale_is_rejected_where_it_cannot_run(
    planned_8b: list[str], runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(**settings: Any) -> str:
        with pytest.raises(ConfigError) as error:
            runner.run_recipe("nano", runner.RecipeConfig(**settings))
        return str(error.value)

    assert "'9b'" in rejected(scale="9b")
    assert "22.5 of 22.1 GiB" in rejected(scale="8b", yes=True, gpu="l4-24gb")
    monkeypatch.setattr(runner, "gpus_here", lambda: 2)
    assert "8 GPUs" in (why := rejected(scale="8b", yes=True)) and "are 2" in why
    assert planned_8b == []


def test_what_needs_no_gpu_runs_before_gpus_are_required(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without GPUs the data are prepared, also those that the recipe lists behind its first training."""
    started: list[str] = []

    def run_stage(b: Any, ledger: runner.Ledger, ranks: int, again: bool, overwrite: bool) -> float:
        started.append(b.stage.name)
        ledger.put(b.name, {"hash": b.hash, "seconds": 0.0})
        return 0.0

    monkeypatch.setattr(planner, "measure", lambda step: planner.Peaks({"weights": 20 * planner.GIB}, {}))
    monkeypatch.setattr(runner, "run_stage", run_stage)
    monkeypatch.setattr(Stage, "made", lambda self, cfg: True)
    by_name = {s.name: s for s in COMPACT}
    order = ("corpus", "pretrain", "code", "calls", "sft", "choose")
    late = replace(by_name["choose"], needs=("sft",), settings=dict(ckpt=("{sft}",)))
    stages = tuple(late if name == "choose" else by_name[name] for name in order)
    monkeypatch.setitem(runner.LARGER, "nano", stages)
    monkeypatch.setattr(runner, "gpus_here", lambda: 0)
    cfg = runner.RecipeConfig(scale="8b", yes=True)
    with pytest.raises(ConfigError) as error:
        runner.run_recipe("nano", cfg)
    assert "8 GPUs" in str(error.value) and started == ["corpus", "code", "calls"]
    monkeypatch.setattr(runner, "gpus_here", lambda: 8)
    runner.run_recipe("nano", cfg)
    assert started == ["corpus", "code", "calls", "pretrain", "sft", "choose"]


TWO = """
import sys
from pathlib import Path
from codechat.core import command
from codechat.launch.recipes import runner
from codechat.launch.recipes.scales import Scale
from codechat.launch.recipes.stage import Stage
model = dict(depth=1, n_embd=16, n_head=1, block_size=32)
quick = dict(model=model, seq_len=16, device_batch_size=2, max_steps=4, save_every=2, eval_tokens=64, compile=False)
stages = (
    Stage(name="corpus", about="text", kind="data.corpus", out="{data}",
          settings=dict(source="text.txt", tokenizer="bytes", val_share=0.2)),
    Stage(name="first", about="train", needs=("corpus",), kind="pretrain",
          settings=dict(data_dir="{corpus}", **quick)),
    Stage(name="second", about="train on", needs=("first",), seeded=True, kind="pretrain",
          settings=dict(init_from="{first}", data_dir="{corpus}", **quick)),
)
runner.RECIPES["tiny"] = ("a test", stages)
runner.SCALES["two"] = Scale({"corpus": {}, "first": dict(lr=1e-4), "second": {}}, dict(first=2, second=2), None)
sys.exit(command.guarded(runner.main, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_scaled_recipe_launches_its_stages_by_torchrun_once(tmp_path: Path) -> None:
    shutil.copytree(Path(codechat.__file__).parent, tmp_path / "codechat", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.txt").write_text("\n".join(f"x{i} = {i}" for i in range(400)))
    (tmp_path / "two.py").write_text(TWO)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "CODECHAT_DTYPE": "float32"}
    words = [sys.executable, "two.py", "tiny", "--scale", "two"]

    def go(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*words, *more],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
            stdin=subprocess.DEVNULL,
        )

    assert go().returncode == 2 and not (tmp_path / "runs").exists()
    done = go("--yes")
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    runs = tmp_path / "runs/tiny-two"
    for name in ("first", "second"):
        assert json.loads((runs / name / "status.json").read_text())["status"] == "finished"
        assert json.loads((runs / name / "env.json").read_text())["world_size"] == 2
    assert json.loads((runs / "first/config.json").read_text())["lr"] == 1e-4
    before = (runs / "second/env.json").read_text()
    again = go("--yes")
    assert (
        again.returncode == 0
        and again.stdout.count("finished, skipped") == 3
        and (runs / "second/env.json").read_text() == before
    )


def test_an_interrupted_recipe_finds_its_stage_again(runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = pretrain.PretrainConfig(run_name="x")
    assert not runner.follow_living("x")
    launcher.write(cfg, nproc=2)
    assert not runner.follow_living("x")
    followed: list[str] = []
    monkeypatch.setattr(launcher, "lives", lambda path: True)
    monkeypatch.setattr(
        launcher, "attach", lambda name: followed.append(name) or {"status": "finished", "reason": None}
    )
    assert runner.follow_living("x") and followed == ["x"]
