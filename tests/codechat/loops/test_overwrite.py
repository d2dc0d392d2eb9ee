"""--overwrite: no command deletes or renames a run that it reads, and what fails before the
first step costs nothing old."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from contracts import (
    PAIRS,
    all_or_nothing,
    small,
    train,
    write_conversations,
    write_corpus,
    write_rows,
)

from codechat import cli
from codechat.core import config, registry
from codechat.core.errors import ConfigError, UserError
from codechat.evaluation import held_out, scoring
from codechat.evaluation.evaluate import EvaluateConfig
from codechat.formats.exchange import ExportConfig, export
from codechat.models import loading
from codechat.reinforce import ReinforceConfig
from codechat.rl.engines import RolloutSampler
from codechat.runs import paths
from codechat.runs.run import Run
from codechat.sft import SFTConfig
from codechat.tasks import toy
from codechat.training.session import Session
from codechat_lab.instruments.pass_rates import FilterConfig, filter_problems
from codechat_lab.launch import launcher, runner
from codechat_lab.launch.runner import RecipeConfig

TOY = "--task toy --limit 4 --n 1 --ks 1 --no-contamination"

# command line, of which t is the run that it would replace
READS = {
    "evaluate, the second checkpoint": f"evaluate --ckpt a t {TOY}",
    "evaluate, RUN@STEP": f"evaluate --ckpt a t@1 {TOY}",
    "evaluate, every checkpoint": f"evaluate --ckpt t --split select --all-checkpoints {TOY}",
    "evaluate, directory of the run": f"evaluate --ckpt a runs/t {TOY}",
    "evaluate, directory of the checkpoint": (
        f"evaluate --ckpt a runs/t/checkpoints/step_000001 {TOY}"
    ),
    "evaluate, file of the checkpoint": (
        f"evaluate --ckpt a runs/t/checkpoints/step_000001/meta.json {TOY}"
    ),
    "evaluate, link to the run": f"evaluate --ckpt a runs/link {TOY}",
    "evaluate, name that is a link": f"evaluate --ckpt a link {TOY}",
    "evaluate, link from elsewhere": f"evaluate --ckpt a far {TOY}",
    "evaluate, link within another run": f"evaluate --ckpt borrowed {TOY}",
    "passk": "passk --ckpt a t --task micro --limit 2 --n 2 --ks 1 --no-contamination",
    "natural": "natural --ckpt a t --limit 1 --no-contamination",
    "diagnose": "diagnose --ckpt t --task toy",
    "sft, parent": "sft --init-from t --data-dir talks --probe-examples 0 --max-steps 1",
    "sft, parent RUN@STEP": "sft --init-from t@1 --data-dir talks --probe-examples 0 --max-steps 1",
    "sft, data within the run": (
        "sft --data-dir runs/t/talks --tokenizer bytes --probe-examples 0 --max-steps 1"
    ),
    "distill, teacher": "distill --preset toy --teacher t --init-from a --max-steps 1 --task toy",
    "preference, parent": "preference --preset toy --init-from t --task toy --max-steps 1",
    "preference, pairs within the run": (
        "preference --preset toy --data-dir runs/t/pairs --max-steps 1"
    ),
    "reinforce, parent": "reinforce --preset toy --init-from t --max-steps 1 --diagnose-groups 0",
    "reinforce, a task's file within the run": (
        "reinforce --preset toy --task runs/t/mine.py:Mine --max-steps 1 --diagnose-groups 0"
    ),
    "chars, text within the run": "chars --source runs/t/verse.txt --max-tokens 99999",
    "import, weights within the run": "import runs/t/weights",
    "launch": "launch sft --overwrite -- --init-from t --data-dir talks",
    "launch of an evaluation": f"launch evaluate --overwrite -- --ckpt a t {TOY}",
}


@pytest.fixture
def runs(
    make_run: Callable[..., Run], home: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, bytes]:
    """The files of run `t`, beside a run `a` and links."""
    monkeypatch.chdir(home)
    made = make_run("t")
    make_run("a")
    write_conversations(home)
    (home / "dialogues").rename(home / "talks")
    shutil.copytree(home / "talks", made.path / "talks")
    write_rows(made.path / "pairs" / "preferences.train.jsonl", PAIRS)
    export(ExportConfig(ckpt="released/nano", out=made.path / "weights", dtype="float32"))
    (made.path / "verse.txt").write_text("the cat sat on the mat\n" * 100)
    (made.path / "mine.py").write_text(
        "from codechat.tasks.toy import ToyTask\nclass Mine(ToyTask):\n    pass\n"
    )
    (home / "runs" / "link").symlink_to(made.path)
    (home / "far").symlink_to(made.path / "checkpoints" / "step_000001")
    borrowed = shutil.copytree(home / "runs" / "a", home / "runs" / "borrowed")
    shutil.rmtree(borrowed / "checkpoints" / "step_000001")
    (borrowed / "checkpoints" / "step_000001").symlink_to(made.path / "checkpoints" / "step_000001")
    return contents(made.path)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("case", READS)
def test_a_command_does_not_replace_a_run_that_it_reads(
    case: str,
    runs: dict[str, bytes],
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = READS[case].split()
    words += ["--run-name", "t"] if words[0] == "launch" else ["--run-name", "t", "--overwrite"]
    assert cli.main(words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "would delete run t" in errors[0], errors
    assert contents(home / "runs" / "t") == runs
    assert not [path.name for path in (home / "runs").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["link", "t"])
def test_a_run_is_not_replaced_through_a_link_either(
    name: str,
    runs: dict[str, bytes],
    home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = {"link": "t", "t": "link"}[name]
    assert (
        cli.main(["evaluate", "--ckpt", other, *TOY.split(), "--run-name", name, "--overwrite"])
        == 2
    )
    assert contents(home / "runs" / "t") == runs


def test_a_run_that_another_command_reads_may_be_replaced(
    runs: dict[str, bytes], home: Path
) -> None:
    assert (
        cli.main(["evaluate", "--ckpt", "a", *TOY.split(), "--run-name", "t", "--overwrite"]) == 0
    )
    assert Run.open("t").status["kind"] == "evaluate"
    assert not paths.exists(".t.old")


def test_a_name_that_is_also_a_word_of_another_setting_is_no_reading(home: Path) -> None:
    """A run that is called as its task or as its data."""
    for _ in range(2):
        train(small("reinforce", home, run_name="toy", max_steps=1, overwrite=True))
    assert Run.open("toy").status["status"] == "finished"


def test_settings_that_are_no_paths_are_no_reading(home: Path) -> None:
    train(small("reinforce", home, run_name="r", max_steps=1))
    for task in ("toy" + "x" * 5000, "reasoning:levels=[" + ",".join(["1"] * 400) + "]"):
        cfg = config.resolve(
            ReinforceConfig, overrides={"run_name": "r", "task": task, "data_dir": "a\0b"}
        )
        paths.check_not_read("r", cfg)


def test_every_setting_that_names_runs_or_files_says_so() -> None:
    """A setting of a new command is forgotten otherwise: its name or its help tells what it is."""
    run_names = {"ckpt", "init_from", "teacher", "rates", "base"}
    path_names = {"data_dir", "task", "task_data", "eval_task", "eval_task_data", "source"}
    seen = set()
    for entry in [*registry.COMMANDS.values(), *registry.PREPARATIONS.values()]:
        if not entry.config or not hasattr(entry.config_class, "__dataclass_fields__"):
            continue
        names = {field.name for field in fields(entry.config_class)}
        if not names & {"run_name", "out", "recipe"}:
            continue  # it writes nothing that could be in the way
        if entry.id in ("notebooks", "pages"):
            names -= {"source"}
        for name in names & (run_names | path_names):
            reads = config.fields_of(entry.config_class)[name].meta.get("reads")
            assert reads == ("run" if name in run_names else "path"), f"{entry.id}: {name}"
            seen.add(name)
    assert seen == run_names | path_names


# ---- recipes, exports, filters


@pytest.fixture
def recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretraining and an SFT from it, run once."""
    monkeypatch.chdir(home)
    write_corpus(home)
    write_conversations(home)
    steps = "max_steps = 2\nsave_every = 1\ndevice_batch_size = 2\nlog_every = 1\ncompile = false\n"
    shape = "model = {depth = 1, n_embd = 32, n_head = 2, block_size = 64}"
    file = home / "mine.toml"
    file.write_text(
        f'about = "a test"\n[stage.base]\nabout = "text"\nkind = "pretrain"\ndata_dir = "corpus"\n'
        f'seq_len = 32\n{shape}\n{steps}[stage.chat]\nabout = "talks"\nkind = "sft"\nneeds = ["base"]\n'
        f'init_from = "{{base}}"\ndata_dir = "dialogues"\nprobe_examples = 0\n{steps}'
    )
    runner.run_recipe(RecipeConfig(recipe="mine.toml"))
    return file


@pytest.mark.parametrize(
    "again",
    [
        RecipeConfig(recipe="mine.toml", from_stage="chat"),
        RecipeConfig(recipe="mine.toml", force=("chat",)),
        RecipeConfig(recipe="mine.toml", overwrite=True),
    ],
    ids=["from_stage", "force", "overwrite"],
)
@pytest.mark.parametrize(
    "base", ["mine/chat", "mine/chat@1", "runs/mine/chat/checkpoints/step_000002"]
)
def test_a_recipe_does_not_rename_or_replace_the_base_that_it_begins_from(
    again: RecipeConfig,
    base: str,
    recipe: Path,
    home: Path,
) -> None:
    before = contents(home / "runs" / "mine" / "chat")
    with pytest.raises(
        ConfigError, match="would replace run mine/chat, which holds what --base reads"
    ):
        runner.run_recipe(replace(again, base=base))
    assert contents(home / "runs" / "mine" / "chat") == before
    assert not paths.exists("mine/chat.1")


def test_a_stage_that_reads_its_own_run_is_not_renamed(recipe: Path, home: Path) -> None:
    recipe.write_text(recipe.read_text().replace('"{base}"', '"mine/chat"'))
    with pytest.raises(ConfigError, match="rename run mine/chat"):
        runner.run_recipe(RecipeConfig(recipe="mine.toml", from_stage="chat"))
    assert Run.open("mine/chat").status["status"] == "finished"
    assert not paths.exists("mine/chat.1")


@pytest.mark.parametrize("out", ["exported", "copies/exported", "../{name}/exported"])
def test_an_export_does_not_replace_what_it_reads(
    out: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "copies").symlink_to(home)
    export(ExportConfig(ckpt="released/nano", out=home / "exported", format="run"))
    before = contents(home / "exported")
    with pytest.raises(ConfigError, match="--out .* holds the checkpoint"):
        export(
            ExportConfig(
                ckpt="exported",
                out=Path(out.format(name=home.name)),
                format="run",
                overwrite=True,
            )
        )
    assert contents(home / "exported") == before


def test_a_filter_does_not_replace_the_problems_that_it_reads(
    make_run: Callable[..., Run], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    words = (
        "data micro --out problems --max-examples 5 "
        "--problems 6 --eval-examples 2 --tokenizer bytes"
    )
    assert cli.main(words.split()) == 0
    make_run("a", kind="sft")
    rates = (
        "passk --ckpt a --task micro --data-dir problems --n 2 --ks 1 "
        "--max-new-tokens 4 --no-contamination --run-name rates"
    )
    assert cli.main(rates.split()) == 0
    before = contents(home / "problems")
    with pytest.raises(ConfigError, match="--out problems"):
        filter_problems(FilterConfig(rates="rates", out="problems"))
    assert contents(home / "problems") == before


# ---- what fails before the first step


# (settings, patch) -> settings with which nothing can be trained
Broken = Callable[[Any, pytest.MonkeyPatch], Any]


def with_setting(**changes: Any) -> Broken:
    return lambda cfg, patch: replace(cfg, **changes)


def failing(what: Any, name: str, **changes: Any) -> Broken:
    """A function of the library raises as a GPU without memory does."""

    def broken(cfg: Any, patch: pytest.MonkeyPatch) -> Any:
        def fail(*args: Any, **how: Any) -> Any:
            raise RuntimeError("out of memory")

        patch.setattr(what, name, fail)
        return replace(cfg, **changes)

    return broken


def dead(cfg: Any, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(toy.ToyTask, "score", all_or_nothing)
    return replace(cfg, diagnose_groups=8)


def no_wandb(cfg: Any, patch: pytest.MonkeyPatch) -> Any:
    patch.setitem(sys.modules, "wandb", None)
    return replace(cfg, track="wandb")


FAILURES = {
    "the data are missing": ("sft", with_setting(data_dir="no-such-folder")),
    "the corpus is missing": ("pretrain", with_setting(data_dir="no-such-folder")),
    "the pairs are missing": ("preference", with_setting(data_dir="no-such-folder")),
    "the text is missing": ("chars", with_setting(source="no-such-file")),
    "the teacher is missing": ("distill", with_setting(teacher="nothing")),
    "the parent is missing": ("sft", with_setting(init_from="nothing")),
    "the tokenizer is missing": ("sft", with_setting(tokenizer="hf:nowhere")),
    "no conversation fits": ("sft", with_setting(seq_len=4)),
    "the task is dead": ("reinforce", dead),
    "wandb is not installed": ("sft", no_wandb),
    "the first evaluation fails": ("sft", failing(held_out, "held_out_losses")),
    "the first evaluation of a task fails": (
        "reinforce",
        failing(scoring, "evaluate_task", eval_every=2),
    ),
    "the first rollouts fail": ("grpo", failing(RolloutSampler, "__call__")),
    "the teacher cannot be loaded": ("distill", failing(loading, "load_model")),
    "the first step fails": ("sft", failing(Session, "apply_gradients")),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_before_the_first_step_keeps_the_former_run(
    case: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, broken = FAILURES[case]
    train(small(loop, home, run_name="r"))
    before = contents(home / "runs" / "r")
    with monkeypatch.context() as patch, pytest.raises((UserError, RuntimeError)):
        train(broken(small(loop, home, run_name="r", overwrite=True), patch))
    assert contents(home / "runs" / "r") == before
    assert {path.name for path in (home / "runs").iterdir()} <= {"r", "teacher"}


@pytest.mark.parametrize(
    "loop, seed",
    [("sft", -5), ("pretrain", -1), ("grpo", 2**64), ("chars", -5), ("preference", -5)],
)
def test_a_seed_that_no_generator_takes_is_a_setting_that_is_refused(
    loop: str, seed: int, home: Path
) -> None:
    with pytest.raises(ConfigError, match="--seed is .*; it must be at least 0 and at most"):
        small(loop, home, seed=seed)


@pytest.mark.parametrize(
    "command",
    [
        "evaluate --ckpt a --task toy",
        "diagnose --ckpt a --task toy",
        "run nano",
        "data micro",
        "data calls",
        "chat --ckpt a",
    ],
)
def test_the_seed_of_every_command_is_checked(
    command: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command.split(), "--seed", "-5"]) == 2
    assert "--seed" in capsys.readouterr().err
    assert not (home / "runs").exists()


@pytest.mark.parametrize("loop", ["sft", "reinforce", "preference", "chars", "pretrain"])
def test_the_largest_seed_trains(loop: str, home: Path) -> None:
    found = train(small(loop, home, seed=2**32 - 1))
    assert found.status["status"] == "finished"


def test_an_interrupt_before_the_first_step_keeps_the_former_run_and_is_reported(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small("sft", home, run_name="r"))
    before = contents(home / "runs" / "r")
    usual = Session.steps

    def interrupted(self: Session) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return usual(self)

    monkeypatch.setattr(Session, "steps", interrupted)
    found = train(small("sft", home, run_name="r", overwrite=True))
    assert found.status["status"] == "stopped", "the command line ends with 130"
    assert contents(home / "runs" / "r") == before


def test_an_evaluation_that_fails_before_its_first_row_keeps_the_former_one(
    make_run: Callable[..., Run], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("a")
    words = ["evaluate", "--ckpt", "a", *TOY.split(), "--run-name", "e", "--overwrite"]
    assert cli.main(words) == 0
    before = contents(home / "runs" / "e")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        failing(scoring, "evaluate_task")(
            config.from_dict(EvaluateConfig, {"task": "toy", "ckpt": ["a"]}), patch
        )
        cli.main(words)
    assert contents(home / "runs" / "e") == before


def test_an_evaluation_of_which_a_later_checkpoint_is_damaged_keeps_the_former_one(
    make_run: Callable[..., Run], home: Path
) -> None:
    make_run("a")
    (make_run("b").path / "checkpoints" / "step_000001" / "model.pt").write_bytes(b"half")
    assert cli.main(["evaluate", "--ckpt", "a", *TOY.split(), "--run-name", "e"]) == 0
    before = contents(home / "runs" / "e")
    assert (
        cli.main(["evaluate", "--ckpt", "a", "b", *TOY.split(), "--run-name", "e", "--overwrite"])
        == 2
    )
    assert contents(home / "runs" / "e") == before


def test_a_launch_that_cannot_start_keeps_the_former_run(home: Path) -> None:
    train(small("reinforce", home, run_name="r"))
    before = contents(home / "runs" / "r")
    launcher.write(
        ReinforceConfig(run_name="r", task="toy", init_from="nothing"),
        launcher.Machines(overwrite=True),
    )
    assert contents(home / "runs" / ".r.old") == before
    with pytest.raises(UserError):
        train(SFTConfig(run_name="r", data_dir="nothing"))
    assert contents(home / "runs" / ".r.old") == before
