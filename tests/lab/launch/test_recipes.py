"""Recipes: their files, what is finished is skipped, what changed is done again, what was
killed goes on."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from contracts import killed_after
from raising import raising

import codechat
from codechat.cli import main
from codechat.core import config
from codechat.core.atomic_files import write_json
from codechat.core.errors import ConfigError, MissingFile, RunError, UserError
from codechat.core.registry import COMMANDS
from codechat.data import corpus
from codechat.evaluation import scoring
from codechat.rl import rollout
from codechat.runs import paths
from codechat.runs.run import Run
from codechat_lab.instruments import planner
from codechat_lab.launch import launcher, portable_scripts, recipes, runner
from codechat_lab.launch.recipes import RECIPES, SCALES, Bound, Recipe, bound_stages
from codechat_lab.launch.runner import RecipeConfig, RecipeLaunch

PROJECT = Path(codechat.__file__).parents[1]
VERSIONS = ("v1", "v2", "v3", "v5", "v6", "v7", "v7-parts", "ours", "v6-claimed")
TINY = Path(__file__).with_name("tiny.toml")


@pytest.fixture
def tiny(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, a pretraining run on it, and a second one from the first, in tiny.toml."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    (home / "text.txt").write_text("\n".join(f"x{i} = {i}" for i in range(400)))
    return shutil.copy(TINY, home / "tiny.toml")


def edit(file: Path, stage: str, **settings: Any) -> None:
    lines = "".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items())
    file.write_text(file.read_text().replace(f"[stage.{stage}]\n", f"[stage.{stage}]\n{lines}"))


def test_recipes_shows_the_stages_of_one_recipe(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "tiny.toml"]) == 0
    shown = capsys.readouterr().out.splitlines()
    stages = recipes.find_recipe("tiny.toml").stages
    assert [line.split()[0] for line in shown[1:]] == [stage.name for stage in stages]
    assert all(line.endswith(stage.about) for line, stage in zip(shown[1:], stages, strict=True))


def test_the_help_of_recipes_is_about_lists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["recipes", "--help"])
    usage, about = capsys.readouterr().out.split("\n\n")[:2]
    assert usage == "usage: codechat recipes [NAME] [--setting value ...]"
    assert about.startswith("List the recipes")


def test_a_recipe_without_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("")
    with raising(ConfigError, "my.toml has no stages"):
        recipes.find_recipe(str(tmp_path / "my.toml"))


def test_recipes_names_the_recipes_where_there_is_no_such_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes", "nanoo"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'nano'?" in error
    assert "gsm8k" in error


def ran(**options: Any) -> list[str]:
    """Names of the stages that a call runs."""
    cfg = RecipeConfig(recipe="tiny.toml", **options)
    todo, _ = runner.pending(cfg)
    return [b.stage.name for b in runner.run_recipe(cfg) if b.stage.name in todo]


def test_finished_stages_are_skipped_and_changed_ones_run_with_what_needs_them(tiny: Path) -> None:
    assert ran() == ["corpus", "first", "second"]
    assert ran() == []
    assert ran(force=("second",)) == ["second"]
    assert ran(from_stage="first") == ["first", "second"]
    # how often is not part of a stage
    edit(tiny, "first", save_every=1, eval_every=3, log_every=2, keep_last=1)
    assert ran() == []
    edit(tiny, "first", lr=1e-4)
    with pytest.raises(ConfigError, match="stage first .*lr .*1e-04|stage first .*lr .*0.0001"):
        ran()
    assert Run.open("tiny/first").status["status"] == "finished"
    assert not paths.exists("tiny/first.2")
    assert ran(from_stage="first") == ["first", "second"]
    assert Run.open("tiny/first").config["lr"] == 1e-4
    kept = [Run.open(f"tiny/first{n}").config["lr"] for n in (".1", ".2")]
    assert kept[0] == kept[1] != 1e-4
    assert ran(from_stage="second", overwrite=True) == ["second"]
    assert not paths.exists("tiny/second.4")


def test_lost_outputs_are_made_again_and_another_seed_shares_what_comes_before(tiny: Path) -> None:
    assert ran(from_stage="second") == ["corpus", "first", "second"], "its parents are missing"
    assert ran(seed=1) == ["second"]
    assert Run.open("tiny/second-s1").config["seed"] == 1
    assert ran() == []
    shutil.rmtree(Run.open("tiny/second").path)
    cfg = RecipeConfig(recipe="tiny.toml")
    results = list(runner.results_table(cfg).columns[2].cells)
    assert "val_bpb" in results[1] and not results[2], (
        "of a run that was deleted the table has no result"
    )
    assert ran() == ["second"]
    runner.note(cfg.ledger, "second", None)  # killed before it was noted
    assert ran() == ["second"]
    assert ran() == []
    assert paths.exists("tiny/second.1")


def test_a_stage_that_was_killed_goes_on_from_its_checkpoint(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after():
        ran()
    load = Mock(side_effect=corpus.WindowLoader.load_state, autospec=True)
    monkeypatch.setattr(corpus.WindowLoader, "load_state", lambda *a: load(*a))
    assert ran() == ["first", "second"]
    assert load.call_count == 1
    assert list(Run.open("tiny/first").metrics()["step"]) == [4]


def test_an_evaluation_that_was_interrupted_goes_on_behind_its_answers(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_text(
        """about = "a test"
        [stage.judged]
        about = "judge"
        kind = "evaluate"
        ckpt = ["released/nano"]
        task = "toy"
        n = 1
        ks = [1]
        max_new_tokens = 4
        limit = 6
        """
    )
    drawn: list[str] = []
    collect = rollout.collect

    def interrupted(model: Any, task: Any, problems: Any, *args: Any, **settings: Any) -> Any:
        drawn.extend(problem.id for problem in problems)
        if len(drawn) == 6:
            raise KeyboardInterrupt
        return collect(model, task, problems, *args, **settings)

    monkeypatch.setattr(scoring, "CHUNK_ROWS", 2)
    monkeypatch.setattr(rollout, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stage judged; run the recipe again"):
        ran()
    assert ran() == ["judged"]
    assert len(drawn) == 6 + 2
    assert drawn[6:] == drawn[4:6], "the other four were answered"
    assert Run.open("tiny/judged").evals()["n_problems"].tolist() == [6]


def test_an_interrupted_stage_stops_the_recipe(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its middle it is not finished; in its last step it is, and stays so."""

    def interrupt(patch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        usual = getattr(kind, name)
        patch.setattr(
            kind, name, lambda *a, **k: (os.kill(os.getpid(), signal.SIGTERM), usual(*a, **k))[1]
        )

    with monkeypatch.context() as patch:
        interrupt(patch, corpus.WindowLoader, "next")
        with pytest.raises(RunError, match="first .*interrupted"):
            ran()
    assert set(runner.read_ledger(paths.runs_dir() / "tiny" / "stages.json")) == {"corpus"}
    with monkeypatch.context() as patch:
        interrupt(patch, Run, "finish")
        with pytest.raises(KeyboardInterrupt, match="first is finished"):
            ran()
    assert ran() == ["second"]


def test_a_stage_without_its_files_waits_for_them(
    tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    edit(tiny, "second", when="{data}/*.train.jsonl")
    COMMANDS["run"].run(["tiny.toml"])
    assert "skipped: first left no data/tiny/*.train.jsonl" in " ".join(
        capsys.readouterr().out.split()
    )
    (tiny.parent / "data/tiny/x.train.jsonl").write_text("")
    COMMANDS["run"].run(["tiny.toml"])
    assert Run.open("tiny/second").status["status"] == "finished"


def test_the_time_left_follows_the_pace_of_this_machine() -> None:
    # this machine takes twice as long; c is not counted
    expected = {
        "a": 10.0,
        "b": 20.0,
        "c": 0.0,
        "d": 60.0,
    }
    taken = ({}, {"a": 20.0}, {"a": 20.0, "c": 99.0, "b": 40.0})
    assert [runner.time_left(expected, done) for done in taken] == [90, 160, 120]


@pytest.mark.parametrize(
    ("cfg", "near"),
    [
        (RecipeConfig(recipe="tiny.toml", from_stage="frist"), "'first'"),
        (RecipeConfig(recipe="nona"), "'nano'"),
        (RecipeConfig(recipe="none.toml"), "none.toml"),
        (RecipeConfig(recipe="nano", scale="9b"), "'9b'"),
    ],
    ids=["stage", "recipe", "file", "scale"],
)
def test_a_request_for_what_does_not_exist_names_the_nearest(
    tiny: Path, cfg: RecipeConfig, near: str
) -> None:
    with raising(UserError, near):
        runner.run_recipe(replace(cfg))  # without what another test has bound


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('use = ["quick"]', 'use = ["quik"]', "'quick'"),
        ('about = "text"', "", "about"),
        ('"{first}"', '"{third}"', "third"),
        ("max_steps", "max_stepz", "max_stepz"),
        ("[stage.corpus]", "[stage.corpus", "tiny.toml"),
        ('about = "a test"', 'from = "nona"', "nona"),
        ('"{first}"', '"{"', "'{'"),
    ],
)
def test_what_is_wrong_in_a_recipes_file_is_named(
    tiny: Path, old: str, new: str, named: str
) -> None:
    tiny.write_text(TINY.read_text().replace(old, new))
    with raising(ConfigError, named):
        bound_stages("tiny.toml")


def test_placing_fills_in_folders_runs_and_earlier_stages() -> None:
    corpus, first, second = recipes.place(recipes.read_recipe(TINY).stages, "mine")
    assert corpus.settings["out"] == first.settings["data_dir"] == "data/mine/corpus"
    assert first.settings["run_name"] == second.settings["init_from"] == "mine/first"


def test_placing_at_a_seed_renames_seeded_stages_alone() -> None:
    placed = recipes.place(recipes.read_recipe(TINY).stages, "mine", seed=2)
    assert [one.name for one in placed] == ["corpus", "first", "second-s2"]
    assert [one.settings.get("seed") for one in placed] == [None, None, 2]
    assert placed[2].settings["run_name"] == "mine/second-s2"


def test_placing_puts_a_base_where_a_replaced_run_is_named() -> None:
    stages = recipes.read_recipe(TINY).stages
    (second,) = recipes.place(stages, "mine", replaced={"corpus", "first"}, base="other@3")
    assert second.settings["init_from"] == "other@3"


def test_a_setting_that_does_not_fit_names_recipe_and_stage() -> None:
    first = recipes.place(recipes.read_recipe(TINY).stages, "mine")[1]
    with raising(ConfigError, "recipe mine, stage first"):
        recipes.configure(replace(first, settings={"max_stepz": 1}), "mine")


def test_a_digest_covers_settings_and_the_digests_of_needed_stages() -> None:
    placed = recipes.place(recipes.read_recipe(TINY).stages, "mine")
    cfgs = [recipes.configure(one, "mine") for one in placed]
    before = recipes.hash_stages(placed, cfgs, {})
    after = recipes.hash_stages(placed, [cfgs[0], replace(cfgs[1], max_steps=5), cfgs[2]], {})
    assert [name for name in before if before[name] != after[name]] == ["first", "second"]
    known = recipes.hash_stages(placed[1:], cfgs[1:], {"corpus": "another"})
    assert known["corpus"] == "another"
    assert known["first"] != before["first"]


def test_a_recipe_goes_on_from_another_one(tiny: Path) -> None:
    child = tiny.with_name("child.toml")
    child.write_text(
        'from = "tiny"\nwithout = '
        '["second"]\n[shared.quick]\nmax_steps = '
        "5\n[stage.first]\nseq_len = 8\n"
    )
    read = recipes.read_recipe(child)
    assert [s.name for s in read.stages] == ["corpus", "first"]
    above = recipes.read_recipe(tiny).stage("first").settings
    assert read.stage("first").settings == above | {"max_steps": 5, "seq_len": 8}


def test_my_recipe_of_the_name_of_the_projects_goes_on_from_that_one(tiny: Path) -> None:
    same = tiny.with_name("nano.toml")
    same.write_text('from = "nano"\n[stage.sft]\nmax_steps = 5\n')
    longer = recipes.read_recipe(same)
    nano = RECIPES["nano"]
    assert longer.stage("sft").settings == {**nano.stage("sft").settings, "max_steps": 5}
    assert [s for s in longer.stages if s.name != "sft"] == [
        s for s in nano.stages if s.name != "sft"
    ]


def test_a_stage_comes_behind_those_that_it_needs(tiny: Path) -> None:
    child = tiny.with_name("child.toml")
    child.write_text(
        'from = "nano"\n[stage.sft]\nneeds = '
        '["late"]\n[stage.late]\nkind = "sft"\nabout = "before '
        'it"\n'
    )
    names = [stage.name for stage in recipes.read_recipe(child).stages]
    assert names.index("late") == names.index("sft") - 1


def test_the_stages_of_the_page_on_recipes_are_one_recipe(tiny: Path) -> None:
    """Its two examples, one below the other."""
    text = (PROJECT / "docs/recipes.md").read_text(encoding="utf-8")
    child = tiny.with_name("my.toml")
    child.write_text("\n".join(re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)))
    stages = recipes.read_recipe(child)
    assert stages.stage("sft").settings["max_steps"] == 500
    assert stages.stage("chat").settings["init_from"] == "{pretrain}"


@pytest.mark.parametrize("needs", ["sft", "none"], ids=["a circle", "a stage that is not there"])
def test_needs_that_cannot_be_met_are_named(tiny: Path, needs: str) -> None:
    child = tiny.with_name("child.toml")
    child.write_text(f'from = "nano"\n[stage.base]\nneeds = ["{needs}"]\n')
    with pytest.raises(ConfigError, match=needs):
        recipes.read_recipe(child)


@pytest.fixture
def chat(tiny: Path) -> RecipeConfig:
    """A recipe with an SFT behind its pretraining; the base is the first run of tiny.toml."""
    shutil.copy(TINY.with_name("chat.toml"), tiny.parent)
    (tiny.parent / "talks").mkdir()
    for split in ("train", "select"):
        messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "x + 1"}]
        row = json.dumps({"id": "c", "domain": "code", "meta": {}, "messages": messages}) + "\n"
        (tiny.parent / "talks" / f"code.{split}.jsonl").write_text(row * 8)
    runner.run_recipe(RecipeConfig(recipe="tiny.toml", until="first"))
    return RecipeConfig(recipe="chat.toml", base="tiny/first")


def test_a_recipe_begins_at_its_sft_from_an_existing_checkpoint(
    chat: RecipeConfig, tmp_path: Path
) -> None:
    assert [(b.name, b.stage.needs) for b in chat.bound] == [("chat", ()), ("both", ("chat",))]
    assert chat.bound[1].cfg.ckpt == "tiny/first", "wherever the recipe names its pretraining"
    for recipe, base, named in (
        ("chat.toml", "tiny/frist", "'tiny/first'"),
        ("tiny.toml", "tiny/first", "tiny.toml"),
    ):
        with raising(UserError, named):
            runner.run_recipe(replace(chat, recipe=recipe, base=base))
    assert not paths.exists("chat/chat")
    runner.run_recipe(chat)
    assert Run.open("chat/chat").env["parent"]["run"] == "tiny/first"
    assert not paths.exists("chat/first")
    assert runner.pending(chat)[0] == set()
    settings = tmp_path / "settings.json"  # of an exported script: places are written out
    usual = {
        b.stage.name: portable_scripts.changed_settings(b.cfg)
        for b in replace(chat, base=None).bound
    }
    settings.write_text(json.dumps(usual))
    assert [b.hash for b in replace(chat, settings=settings).bound] == [b.hash for b in chat.bound]
    edit(tmp_path / "tiny.toml", "first", lr=1e-4)
    runner.run_recipe(RecipeConfig(recipe="tiny.toml", until="first", from_stage="first"))
    # other weights under the same name
    with pytest.raises(ConfigError, match="stage chat is finished"):
        runner.run_recipe(replace(chat))


@pytest.mark.parametrize("text", ["", "[]", '{"sft": '])
def test_a_ledger_that_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "stages.json"
    file.write_text(text)
    with pytest.raises(RunError, match="stages.json"):
        runner.read_ledger(file)


def test_a_ledger_keeps_the_rows_of_other_seeds(tmp_path: Path) -> None:
    file = tmp_path / "stages.json"
    for name, row in (("sft", {"hash": "a"}), ("sft-s1", {"hash": "b"}), ("sft", None)):
        runner.note(file, name, row)
    assert runner.read_ledger(file) == {"sft-s1": {"hash": "b"}}


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("v6", "nano/launch/v6"),
        ("v6 --seed 1", "nano/launch/v6-s1"),
        ("v6 --scale 8b", "nano-8b/launch/v6"),
    ],
)
def test_each_seed_and_scale_has_a_log(home: Path, words: str, where: str) -> None:
    assert config.parse(RecipeLaunch, words.split()).where == home / "runs" / where


def test_a_stage_may_run_alone_with_what_it_needs() -> None:
    everything = runner.pending(RecipeConfig(recipe="coder")).todo
    some = RecipeConfig(recipe="coder", only=("tried", "toolbox"))
    todo = runner.pending(some).todo
    assert todo == {"download", "pretrained", "mbpp", "tried", "code", "toolbox"}
    assert todo < everything
    asked = runner.pending(RecipeConfig(recipe="nano", only=("natural",))).todo
    assert "natural" in asked
    assert "full-evaluation" not in asked
    mistyped = RecipeConfig(recipe="nano", only=("natrual",))
    with raising(ConfigError, "stage 'natrual'", "'natural'"):
        runner.pending(mistyped)


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (RecipeConfig(recipe="nano"), set()),
        (RecipeConfig(recipe="nano", until="natural"), {"natural"}),
        (RecipeConfig(recipe="nano", force=("natural",)), {"natural"}),
        (RecipeConfig(recipe="nano", from_stage="natural"), {"natural"}),
        # with the stage that it needs
        (RecipeConfig(recipe="nano", until="more-sft-evaluate"), {"more-sft", "more-sft-evaluate"}),
    ],
    ids=["nothing", "until", "force", "from", "needs"],
)
def test_some_stages_run_only_if_a_flag_names_them(cfg: RecipeConfig, expected: set[str]) -> None:
    asked = {b.stage.name for b in bound_stages("nano") if b.stage.asked}
    assert asked == {"full-evaluation", "more-sft", "more-sft-evaluate", "natural"}
    assert asked & runner.pending(replace(cfg)).todo == expected


@cache
def stages_of(name: str, scale: str = "nano", seed: int = 0) -> dict[str, Bound]:
    return {b.stage.name: b for b in bound_stages(name, scale, seed)}


EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)


def recipes_at(scale: str) -> list[str]:
    """Names of the recipes that a scale has."""
    small = set() if scale == "nano" else {"mini", "scaling"}
    return sorted(RECIPES.keys() - small)


def bound_at(scale: str, seed: int = 0) -> list[tuple[str, Bound]]:
    """Every stage of every recipe of a scale, with the recipe's name."""
    found = []
    for name in recipes_at(scale):
        found += [(name, b) for b in stages_of(name, scale, seed).values()]
    return found


@EVERY_SCALE
@pytest.mark.parametrize("seed", [0, 1])
def test_the_stages_of_a_recipe_come_behind_those_that_they_need(scale: str, seed: int) -> None:
    for name in recipes_at(scale):
        before: set[str] = set()
        for stage, b in stages_of(name, scale, seed).items():
            assert set(b.stage.needs) <= before, (name, stage)
            before.add(stage)


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "nano"])
def test_every_stage_that_trains_at_a_larger_scale_has_its_ranks(scale: str) -> None:
    for _, b in bound_at(scale):
        if hasattr(b.cfg, "lr"):
            assert SCALES[scale].ranks_of(b.stage)


@EVERY_SCALE
def test_a_name_means_one_stage_in_all_recipes_of_a_home(scale: str) -> None:
    hashes: dict[str, set[str]] = {}
    for name, b in bound_at(scale):
        place = f"{recipes.prefix_of(name, scale)}/{b.stage.name}"
        hashes.setdefault(place, set()).add(b.hash)
    assert {place for place, various in hashes.items() if len(various) > 1} == set()


@EVERY_SCALE
def test_no_two_stages_write_one_run(scale: str) -> None:
    stages: dict[str, set[str]] = {}
    for _, b in bound_at(scale):
        run_name = getattr(b.cfg, "run_name", None)
        if run_name:
            stages.setdefault(run_name, set()).add(b.stage.name)
    assert all(len(names) == 1 for names in stages.values())


@EVERY_SCALE
def test_all_versions_begin_with_one_pretraining_and_all_but_one_with_one_sft(scale: str) -> None:
    users = Counter(b.stage.name for name, b in bound_at(scale) if name in VERSIONS)
    assert users["pretrain"] == len(VERSIONS) == users["sft-general"] + 1


def test_another_seed_has_no_report_of_its_own() -> None:
    assert "report" in stages_of("nano")
    assert "report" not in stages_of("nano", seed=1)


def test_all_versions_are_evaluated_alike() -> None:
    own = {"run_name": "", "ckpt": ""}
    cfgs = [config.plain(stages_of(name)[f"{name}-evaluate"].cfg) | own for name in VERSIONS]
    assert all(cfg == cfgs[0] for cfg in cfgs)


# a stage of a recipe -> version and stage in runs.csv of the published figures
PUBLISHED = {
    ("nano", "pretrain"): ("v1", "pretrain"),
    ("v1", "sft-general"): ("v1", "sft_general"),
    ("v2", "v2-sft-calls"): ("v2", "sft_funcall"),
    ("v3", "v3-sft-code"): ("v3", "sft_code"),
    ("v3", "v3-sft-calls"): ("v3", "sft_funcall"),
    ("v5", "v5-sft"): ("v5", "sft_funcall"),
    ("v6", "v6-sft"): ("v6", "sft_joint_code_funcall"),
    ("v7", "v7-sft"): ("v7", "sft_joint_code_funcall_negative"),
    ("v1", "v1-grpo"): ("v1", "rl_grpo_mbpp"),
    ("v2", "v2-grpo"): ("v2", "rl_grpo_mbpp"),
    ("v5", "v5-rl"): ("v5", "rl_reinforce_funcall"),
    ("v6", "v6-rl"): ("v6", "rl_reinforce_funcall"),
}


@pytest.fixture(scope="module")
def published_runs() -> pd.DataFrame:
    path = PROJECT / "reports/published/runs.csv"
    return pd.read_csv(path).set_index(["version", "stage"])


@pytest.mark.parametrize("recipe, stage", PUBLISHED)
def test_a_stage_at_8b_has_the_published_settings(
    recipe: str, stage: str, published_runs: pd.DataFrame
) -> None:
    cfg = stages_of(recipe, "8b")[stage].cfg
    row = published_runs.loc[PUBLISHED[recipe, stage]]
    assert cfg.run_name == f"nano-8b/{stage}"
    assert cfg.max_steps == row["steps_planned"]
    assert cfg.lr == row["lr"]
    assert cfg.warmup_steps == row["warmup"] or pd.isna(row["warmup"])


@pytest.mark.parametrize("recipe, stage", PUBLISHED)
def test_a_stage_at_8b_has_the_published_batch(recipe: str, stage: str) -> None:
    b = stages_of(recipe, "8b")[stage]
    rows = SCALES["8b"].ranks_of(b.stage) * b.cfg.device_batch_size
    if hasattr(b.cfg, "seq_len"):
        assert rows * b.cfg.grad_accum * b.cfg.seq_len == 131_072
    if stage.endswith("-rl"):
        assert rows * b.cfg.group_size == 128


@pytest.mark.parametrize("scale, n_params", [("2b", 2.65e9), ("8b", 8.26e9)])
def test_a_scale_has_the_published_number_of_weights(scale: str, n_params: float) -> None:
    model = stages_of("v6", scale)["pretrain"].cfg.model
    assert model.n_params == pytest.approx(n_params, rel=0.01)


def test_2b_runs_on_one_gpu_and_has_a_corpus_for_all_its_steps() -> None:
    assert set(SCALES["2b"].ranks.values()) == {1}
    assert stages_of("v6", "2b")["corpus"].cfg.max_tokens >= 30_000 * 65_536


@pytest.fixture
def planned_8b(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recipe `late` at 8b with a plan that costs nothing, on a machine of eight GPUs; the names
    of the stages that run."""
    started: list[str] = []
    peaks = planner.step_memory.Peaks({"weights": 20 * planner.GIB}, {})

    def run_stage(b: Bound, ledger: Path, ranks: int, again: bool, overwrite: bool) -> float:
        started.append(b.stage.name)
        runner.note(ledger, b.name, {"hash": b.hash, "seconds": 0.0})
        return 0.0

    monkeypatch.setattr(planner.step_memory, "measure", lambda cfg: peaks)
    monkeypatch.setattr(runner, "gpus_here", lambda: 8)
    monkeypatch.setattr(runner, "run_stage", run_stage)
    monkeypatch.setattr(Bound, "done", property(lambda b: True))
    ours = RECIPES["ours"]
    stages = [
        ours.stage(name) for name in ("corpus", "pretrain", "base-code", "base-calls", "base")
    ]
    late = replace(
        ours.stage("ours-choose"), needs=("base",), settings=dict(ckpt=("{base}",), task="funcall")
    )
    monkeypatch.setitem(RECIPES, "late", Recipe("a test", (*stages, late)))
    return started


LATE = RecipeConfig(recipe="late", scale="8b")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """terminal(answer): somebody is there who answers so."""

    def answering(answer: str) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", lambda question: answer)

    return answering


def test_a_larger_scale_prints_its_plan_and_wants_a_yes(
    planned_8b: list[str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="--yes"):
        runner.run_recipe(replace(LATE))
    text = " ".join(capsys.readouterr().out.split())
    assert "pretrain: fits: 22.5 of 79.2 GiB on 8 x a800-80gb" in text
    assert "hours on 8 GPUs" in text
    assert planned_8b == []


def test_a_larger_scale_that_does_not_fit_is_refused(
    planned_8b: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "8b", replace(SCALES["8b"], gpu="l4-24gb"))
    with pytest.raises(ConfigError, match="22.5 of 22.1 GiB"):
        runner.run_recipe(replace(LATE, yes=True))
    assert planned_8b == []


def test_a_larger_scale_asks_at_a_terminal_and_takes_no_for_an_answer(
    planned_8b: list[str], terminal: Callable[[str], None]
) -> None:
    terminal("n")
    with pytest.raises(ConfigError):
        runner.run_recipe(replace(LATE))
    assert planned_8b == []


WITHOUT_GPUS = ["corpus", "base-code", "base-calls"]


def test_stages_that_need_more_gpus_than_there_are_are_named_first(
    planned_8b: list[str],
    terminal: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Before the plan, the question and the first stage."""
    terminal("y")
    monkeypatch.setattr(runner, "gpus_here", lambda: 2)
    with pytest.raises(ConfigError, match="8 GPUs and there are 2"):
        runner.run_recipe(replace(LATE))
    first = (
        "stage pretrain needs 8 GPUs and there are 2: only "
        "corpus, base-code, base-calls will run here"
    )
    assert capsys.readouterr().out.startswith(first)


def test_what_needs_no_gpu_runs_before_gpus_are_required(
    planned_8b: list[str], terminal: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal("y")
    monkeypatch.setattr(runner, "gpus_here", lambda: 2)
    with pytest.raises(ConfigError):
        runner.run_recipe(replace(LATE))
    assert planned_8b == WITHOUT_GPUS


@pytest.mark.parametrize("n, said", [(1, "1 GPU"), (8, "8 GPUs")])
def test_gpus_are_counted_in_words(n: int, said: str) -> None:
    assert runner.in_gpus(n) == said


def test_nothing_is_asked_where_nothing_can_run(
    planned_8b: list[str], terminal: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal("y")
    monkeypatch.setattr(runner, "gpus_here", lambda: 2)
    with pytest.raises(ConfigError):
        runner.run_recipe(replace(LATE))
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="8 GPUs and there are 2"):
        runner.run_recipe(replace(LATE))
    assert planned_8b == WITHOUT_GPUS


def test_a_finished_recipe_of_a_larger_scale_is_neither_asked_about_nor_launched_again(
    planned_8b: list[str], terminal: Callable[[str], None]
) -> None:
    terminal("y")
    runner.run_recipe(replace(LATE))
    every = [*planned_8b]
    assert set(every) == {*WITHOUT_GPUS, "pretrain", "base", "ours-choose"}
    terminal("n")
    runner.run_recipe(replace(LATE))
    assert planned_8b == every


def launch(*words: str) -> RecipeLaunch:
    return config.parse(RecipeLaunch, ["tiny.toml", *words])


def state() -> dict[str, Any]:
    return runner.recipe_status(launch().where)


def stop(*words: str) -> str:
    cfg = launch("stop", *words)
    return runner.stop_recipe(cfg.where, now=cfg.now)


@pytest.mark.slow
def test_a_recipe_runs_detached(tiny: Path, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(MissingFile, match="tiny"):
        runner.launch(["tiny.toml", "status"])
    with pytest.raises(ConfigError, match="'first'"):
        runner.start_recipe(launch("--from", "frist"))
    assert not (tiny.parent / "runs").exists()
    runner.launch(["tiny.toml", "--until", "first"])
    where = tiny.parent / "runs/tiny/launch/tiny"
    with pytest.raises(RunError, match="started as process"):
        runner.start_recipe(launch())
    assert state()["status"] == "running"
    assert runner.launch(["tiny.toml", "tail"]) == 0  # until it ends
    printed = capfd.readouterr().out
    assert "[2/3] first" in printed
    assert "step" in printed
    assert (where / "recipe.log").is_file()
    shown = dict(
        status="finished", process=None, corpus="finished", first="finished", second="waiting"
    )
    assert state().items() >= shown.items()
    runner.launch(["tiny.toml", "--from", "first"])  # this stage and those behind it, again
    runner.launch(["tiny.toml", "tail"])
    assert state()["second"] == "finished"
    assert paths.exists("tiny/first.1")
    with pytest.raises(RunError, match="not running"):
        stop()


@pytest.mark.slow
def test_a_stopped_recipe_has_a_checkpoint_and_goes_on(tiny: Path) -> None:
    edit(tiny, "first", max_steps=100_000)
    ends = time.monotonic() + 120
    before = 0
    for options, after in (([], "stopped"), (["--now"], "killed")):
        runner.start_recipe(launch())
        while not (
            paths.exists("tiny/first")
            and max(Run.open("tiny/first").checkpoints(), default=0) > before
        ):
            assert time.monotonic() < ends and state()["process"], state()["log"].read_text()
            time.sleep(0.1)
        assert stop(*options) == after == state()["first"]
        before = Run.open("tiny/first").checkpoints()[-1]
    assert state()["process"] is None
    assert (state()["corpus"], state()["second"]) == ("finished", "waiting")


def test_stop_ends_a_stage_after_its_recipe_is_gone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = launch().where
    where.mkdir(parents=True)
    write_json(where / "settings.json", config.plain(RecipeConfig(recipe="tiny.toml")))
    write_json(
        where / "process.json",
        {"host": platform.node(), "pid": 1, "pid_start": "of another process"},
    )
    launcher.write(stages_of("tiny.toml")["first"].cfg)
    with pytest.raises(RunError, match="not running"):
        stop()
    stopped: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        launcher, "process_of", lambda path: {"pid": 1} if path.name == "first" else None
    )
    monkeypatch.setattr(launcher, "stop", lambda name, *, now: stopped.append((name, now)))
    assert stop("--now") == "stopped"
    assert stopped == [("tiny/first", True)]
    (where / "recipe.log").write_text("loading\nerror: no network\n")
    assert runner.launch(["tiny.toml", "status"]) == 1
    assert state()["status"] == "failed"


TWO = """
import sys
from codechat import cli
from codechat.core.registry import COMMANDS
from codechat_lab.launch import recipes, runner
recipes.SCALES["two"] = recipes.Scale({"corpus": {}, "first": dict(lr=1e-4), "second": {}}, dict(pretrain=2), None)
sys.exit(cli.guarded(COMMANDS['run'].run, sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_scaled_recipe_launches_its_stages_by_torchrun_once(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    env = os.environ | {"OMP_NUM_THREADS": "1", "CODECHAT_DTYPE": "float32"}
    words = [sys.executable, "two.py", "tiny.toml", "--scale", "two"]
    how: dict[str, Any] = dict(
        capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL
    )

    def go(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *more], cwd=tmp_path, env=env, **how)

    assert go().returncode == 2
    assert not (tmp_path / "runs").exists()
    done = go("--yes")
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    runs = tmp_path / "runs/tiny-two"
    for name in ("first", "second"):
        assert json.loads((runs / name / "status.json").read_text())["status"] == "finished"
        assert json.loads((runs / name / "env.json").read_text())["world_size"] == 2
    assert json.loads((runs / "first/config.json").read_text())["lr"] == 1e-4
    before = (runs / "second/env.json").read_text()
    again = go("--yes")
    assert again.returncode == 0
    assert again.stdout.count("finished, skipped") == 3
    assert (runs / "second/env.json").read_text() == before
