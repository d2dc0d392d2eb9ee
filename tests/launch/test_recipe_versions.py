"""The versions as recipes: every one fits its configs at both scales, what they share is made once."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from codechat import pretrain
from codechat.core import config, registry
from codechat.grpo import GRPOConfig
from codechat.launch import planner
from codechat.launch.recipes import runner, stage, versions
from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.scales import SCALES
from codechat.launch.recipes.stage import Stage
from codechat.launch.recipes.versions import VERSIONS
from codechat.runs import paths, run
from codechat.runs.run import Run

NAMES = ("v1", "v2", "v3", "v5", "v6", "v7", "v7-parts", "ours", "v6-claimed")
ABLATIONS = ("v7-parts", "v6-claimed")  # nano only: nobody planned them at 8b


def bound(name: str, scale: str | None = None, seed: int = 0) -> dict[str, runner.Bound]:
    stages = (
        SCALES[scale].stages(runner.LARGER.get(name, runner.RECIPES[name][1])) if scale else runner.RECIPES[name][1]
    )
    return {
        b.stage.name: b for b in runner.bind(runner.prefix_of(name, runner.RecipeConfig(scale=scale)), stages, seed)
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [None, "2b", "8b"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_version_fits_its_configs(name: str, scale: str | None, seed: int) -> None:
    found = bound(name, scale, seed)
    names = list(found)
    assert all(need in names[:i] for i, b in enumerate(found.values()) for need in b.stage.needs)
    if scale is None or name not in ABLATIONS:
        assert names[-1] == f"{name}-evaluate"
        assert {s.name for s in runner.RECIPES[name][1]} - set(found) == (
            {"ours-over-rl"} if name == "ours" and scale else set()
        )
    if scale:
        assert all(
            SCALES[scale].ranks[b.stage.name]
            for b in found.values()
            if b.stage.kind in ("pretrain", "sft", "reinforce", "grpo")
        )


def test_the_recipes_are_these_and_only_grow() -> None:
    assert tuple(VERSIONS) == NAMES and list(runner.RECIPES)[0] == "nano" and "v4" not in runner.RECIPES


@pytest.mark.parametrize("scale", [None, "2b", "8b"])
def test_a_name_means_one_stage_in_all_versions_and_shared_ones_are_made_once(scale: str | None) -> None:
    hashes: dict[str, set[str]] = {}
    users: Counter[str] = Counter()
    places: dict[str, set[str]] = {}
    for name in ("compact" if scale is None else "nano", *NAMES):
        for b in bound(name, scale).values():
            hashes.setdefault(b.stage.name, set()).add(b.hash)
            users[b.stage.name] += 1
            if run_name := getattr(b.cfg, "run_name", None):
                places.setdefault(run_name, set()).add(b.stage.name)
    assert {n for n, found in hashes.items() if len(found) > 1} == set()
    assert all(len(names) == 1 for names in places.values()), "no two stages write one run"
    assert (
        users["pretrain"] == users["corpus"] == users["calls"] == 1 + len(NAMES)
        and users["sft-general"] == len(NAMES) - 1
    )
    assert users["sft"] == users["rl"] == 2, "ours is compact's own"


def test_all_versions_are_evaluated_alike() -> None:
    cfgs = {name: bound(name)[f"{name}-evaluate"].cfg for name in NAMES}
    alike = {
        name: {k: v for k, v in config.to_dict(cfg).items() if k not in ("run_name", "ckpt")}
        for name, cfg in cfgs.items()
    }
    assert all(settings == alike["ours"] for settings in alike.values())
    assert (cfgs["v5"].n, cfgs["v5"].limit, cfgs["v5"].split, cfgs["v5"].data_dir) == (
        8,
        200,
        ("test",),
        "data/compact/sft",
    )
    assert not any("@best" in ref for name, cfg in cfgs.items() for ref in cfg.ckpt if name != "ours"), (
        "only ours is chosen, on select"
    )


def test_what_each_version_changed() -> None:
    v1, v2, v3, v5, v6, v7, parts, ours, claimed = map(bound, NAMES)
    assert (
        claimed["v6-claimed-sft"].cfg.weights == {"calls": 28.0, "programs": 1.0}
        and claimed["v6-claimed-sft"].cfg.mix_by == "tokens"
    )
    assert isinstance(v1["v1-grpo"].cfg, GRPOConfig)
    for name, reward in (("v1-grpo", "binary"), ("v1-grpo-fraction", "fractional")):
        cfg = v1[name].cfg
        assert (cfg.task, cfg.group_size, cfg.kl_coef, cfg.kl_kind, cfg.kl_in, cfg.allow_dead) == (
            f"micro:reward={reward}",
            4,
            0.02,
            "k1",
            "loss",
            True,
        )
    assert v2["v2-filter"].cfg.window == (0.05, 0.95) and (v2["v2-grpo"].cfg.group_size, v2["v2-grpo"].cfg.task) == (
        8,
        "micro:reward=tiered",
    )
    assert (v3["v3-gate"].cfg.gate_parseable, v3["v3-gate"].cfg.gate_pass_at_k, v3["v3-gate"].cfg.k) == (0.5, 0.1, 8)
    assert (
        v3["v3-sft-calls"].cfg.init_from == "compact/v3-sft-code"
        and v5["v5-sft"].cfg.init_from == "compact/sft-general"
    )
    assert v5["v5-sft"].cfg.weights == {"calls": 1.0} and (v5["v5-rl"].cfg.group_size, v5["v5-rl"].cfg.baseline) == (
        16,
        "mean",
    )
    assert v6["v6-sft"].cfg.mix_by == "rows" and v6["v6-sft"].cfg.weights == {"calls": 5.6, "programs": 1.0}
    assert v7["v7-sft"].cfg.mix_by == "tokens" and (
        v7["v7-programs"].cfg.neutral_share,
        v7["v7-programs"].cfg.negatives_share,
    ) == (0.2, 0.1)
    shares = {
        n: (parts[f"{n}-programs"].cfg.neutral_share, parts[f"{n}-programs"].cfg.negatives_share)
        for n in ("plain", "neutral", "negatives")
    }
    assert shares == {"plain": (0, 0), "neutral": (0.2, 0), "negatives": (0, 0.1)}
    assert {parts[n].cfg.mix for n in ("v7-mix", "v7-neutral", "v7-negatives", "v7-sft")} == {versions.SEVERAL}
    tags = {b.cfg.tags for found in (v1, v2, v3, v5, v6, v7, parts) for b in found.values() if b.stage.kind == "sft"}
    assert tags == {"text"} and ours["sft"].cfg.tags == "reserved"
    for found in (v5, v6, v7):
        assert found["plain-calls"].cfg.negatives_share == found["plain-calls"].cfg.no_call_share == 0, (
            "every request wants a call"
        )


PUBLISHED = [  # stage, recipe, steps, learning rate, warm-up: runs.csv of the published figures
    ("sft-general", "v1", 3000, 5e-5, 100),
    ("v1-grpo", "v1", 1000, 1e-5, 20),
    ("v2-sft-calls", "v2", 4000, 3e-5, 200),
    ("v2-grpo", "v2", 500, 5e-6, 20),
    ("v3-sft-code", "v3", 2000, 2e-5, 100),
    ("v3-sft-calls", "v3", 4000, 3e-5, 200),
    ("v5-sft", "v5", 6000, 3e-5, 200),
    ("v5-rl", "v5", 283, 5e-7, 0),
    ("v6-sft", "v6", 8000, 3e-5, 300),
    ("v6-rl", "v6", 283, 5e-7, 0),
    ("v7-sft", "v7", 6000, 3e-5, 300),
]


@pytest.mark.parametrize("stage, recipe, steps, lr, warmup", PUBLISHED)
def test_8b_has_the_published_settings(stage: str, recipe: str, steps: int, lr: float, warmup: int) -> None:
    cfg, ranks = bound(recipe, "8b")[stage].cfg, SCALES["8b"].ranks[stage]
    assert (cfg.max_steps, cfg.lr, cfg.warmup_steps) == (steps, lr, warmup)
    if hasattr(cfg, "seq_len"):
        assert ranks * cfg.device_batch_size * cfg.grad_accum * cfg.seq_len == 131_072
        assert planner.of(cfg, gpus=8, gpu="a800-80gb").model.n_params == pytest.approx(8.26e9, rel=0.01), (
            "what is planned is the model that is trained"
        )
    if stage.endswith("-rl"):
        assert ranks * cfg.device_batch_size * cfg.group_size == 128
    assert cfg.init_from.startswith("nano-8b/") and cfg.run_name == f"nano-8b/{stage}"


def test_2b_is_one_gpu_with_the_published_pretraining() -> None:
    """The learning rate, warm-up and batch of the original's scripts for one A800."""
    found, scale = bound("v6", "2b"), SCALES["2b"]
    cfg = found["pretrain"].cfg
    assert (cfg.max_steps, cfg.lr, cfg.warmup_steps, cfg.device_batch_size, cfg.grad_accum) == (
        30_000,
        2e-4,
        500,
        2,
        16,
    )
    assert (found["v6-sft"].cfg.device_batch_size, found["v6-sft"].cfg.grad_accum) == (1, 16)
    assert set(scale.ranks.values()) == {1} and found["corpus"].cfg.max_tokens >= 30_000 * 65_536
    for name in ("pretrain", "v6-sft"):
        assert planner.of(found[name].cfg, gpus=1, gpu="a800-80gb").model.n_params == pytest.approx(2.65e9, rel=0.01)
    eight = bound("v6", "8b")
    assert all(found[name].cfg.lr == eight[name].cfg.lr for name in ("sft-general", "v6-sft", "v6-rl"))
    assert found["v6-rl"].cfg.run_name == "nano-2b/v6-rl"


def test_recipe_and_preset_nano_pretrain_alike() -> None:
    settings, preset = next(s for s in COMPACT if s.name == "pretrain").settings, pretrain.RUN_PRESETS["nano"]
    for name in ("lr", "muon_lr", "seq_len", "device_batch_size"):
        assert settings[name] == preset[name]


def test_the_scale_of_nano_is_the_recipe_as_it_is() -> None:
    for name in ("v6", "nano"):
        assert (
            runner.prefix_of(name, runner.RecipeConfig(scale="nano"))
            == runner.prefix_of(name, runner.RecipeConfig())
            == ("nano" if name == "nano" else "compact")
        )
        assert runner.prefix_of(name, runner.RecipeConfig(scale="8b")) == "nano-8b"
    assert runner.scale_of(runner.RecipeConfig(scale="nano")) is None


def test_the_list_says_what_each_version_changed_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    runner.main(["--list"])
    text = " ".join(capsys.readouterr().out.split())
    for name in NAMES:
        assert f"{name}: {VERSIONS[name][0]}" in text
        assert all(f"{s.name} {s.about}" in text for s in VERSIONS[name][1])
    assert text.count(COMPACT[0].about) == 1 and "shared: corpus, code, calls, pretrain, plain-code" in text, (
        "what is shared is told once"
    )


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--force", "a", "--seed", "1", "--force", "b"], ["--seed", "1", "--force", "a", "b"]),
        (["--force", "a", "b"], ["--force", "a", "b"]),
        (["--force=a", "--yes", "--force=b"], ["--yes", "--force", "a", "b"]),
        (["--seed", "1"], ["--seed", "1"]),
    ],
)
def test_a_flag_may_be_repeated(words: list[str], expected: list[str]) -> None:
    assert runner.gathered(words, "--force") == expected


# ---- end to end


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (run, paths, stage, runner):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A stage that notes that it ran."""

    run_name: str = config.opt("x", "run")
    seed: int = config.opt(0, "seed")
    overwrite: bool = config.opt(False, "again")


RAN: list[str] = []


def note(cfg: Seen) -> None:
    RAN.append(cfg.run_name)
    with Run.create(cfg.run_name, cfg, kind="test", overwrite=cfg.overwrite):
        pass


def test_finished_stages_run_once_and_one_that_waits_for_data_runs_when_they_are_there(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = registry.Entry("seen", __name__, "Seen", "note", "seen", "a stage of this test")
    monkeypatch.setitem(registry.ENTRIES, "seen", seen)
    stages = (
        Stage(name="a", about="not reached", kind="seen", seeded=True),
        Stage(name="b", about="reached", kind="seen", needs=("a",)),
        Stage(name="c", about="needs what is reached", kind="seen", needs=("b",)),
        Stage(name="d", about="waits", kind="seen", needs=("a",), when="{data}/*.train.jsonl"),
    )
    monkeypatch.setitem(runner.RECIPES, "tiny", ("a test", stages))
    RAN.clear()
    runner.main(["tiny"])
    runner.main(["tiny"])
    assert RAN == ["tiny/a", "tiny/b", "tiny/c"]
    assert "skipped: a left no data/tiny/*.train.jsonl" in " ".join(capsys.readouterr().out.split())
    (home / "data/tiny").mkdir(parents=True)
    (home / "data/tiny/x.train.jsonl").write_text("")
    runner.main(["tiny"])
    assert RAN[-1] == "tiny/d"
    assert set(json.loads((home / "runs/tiny/stages.json").read_text())) == {"a", "b", "c", "d"}


def small(one: Stage) -> Stage:
    """The stage with a model and a budget that take a second."""
    kind = {"data.corpus": "corpus", "passk": "evaluate"}.get(one.kind, one.kind.partition(".")[0])
    changes: dict[str, Any] = dict(
        corpus=dict(max_tokens=20_000), data=dict(max_examples=40), data_code=dict(max_examples=40),
        pretrain=dict(model=dict(depth=1, n_embd=16, n_head=1, block_size=512), seq_len=64, device_batch_size=2, max_steps=2, eval_every=0, save_every=0, eval_tokens=256),
        sft=dict(max_steps=2, device_batch_size=1, eval_every=0, save_every=0, eval_examples=2, probe_examples=1),
        diagnose=dict(group_size=2, max_new_tokens=4, gold_examples=8), evaluate=dict(limit=4, n=2, ks=(1, 2), max_new_tokens=4, probe_examples=1, heldout_examples=2),
        reinforce=dict(max_steps=1, device_batch_size=2, group_size=2, max_new_tokens=4, eval_examples=2, probe_examples=1, eval_every=0, log_rollouts_every=0),
    ).get(kind, {})  # fmt: skip
    if one.kind == "data.calls":
        changes = (
            changes
            | dict(problems=80, eval_examples=8, probes=2)
            | ({"copies": 20} if one.settings.get("copies", 1) else {})
        )
    return dataclasses.replace(one, settings={**one.settings, **changes})


@pytest.mark.slow
def test_a_version_runs_whole_and_the_next_one_goes_on_from_what_they_share(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("v5", "v6"):
        monkeypatch.setitem(runner.RECIPES, name, (runner.RECIPES[name][0], tuple(map(small, runner.RECIPES[name][1]))))
    runner.main(["v5", "--scale", "nano"])
    ledger = json.loads((home / "runs/compact/stages.json").read_text())
    assert set(ledger) == {s.name for s in COMPACT[:4]} | {
        "plain-code",
        "plain-programs",
        "plain-calls",
        "sft-general",
        "v5-sft",
        "v5-diagnose",
        "v5-rl",
        "v5-evaluate",
    }
    assert "recipe v5" in capsys.readouterr().out
    rows = Run.open("compact/v5-evaluate").evals()
    assert list(rows["checkpoint"]) == ["compact/v5-sft@2", "compact/v5-rl@1"]
    assert {"pass@1", "pass@2", "heldout_loss/calls", "heldout_nats/code", "probe/code_with_tools/call"} <= set(rows)
    assert "probe/tool_with_tools/call" in Run.open("compact/v5-rl").evals()
    runner.main(["v6"])
    out = capsys.readouterr().out
    assert out.count("finished, skipped") == 8 and Run.open("compact/v6-rl").status["status"] == "finished"
