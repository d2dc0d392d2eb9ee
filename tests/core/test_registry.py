"""Stable names: finished work is recognised however modules, classes and functions are moved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from codechat.core import config, registry
from codechat.core.errors import ConfigError
from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.runner import RECIPES, Ledger, RecipeConfig, bind, pending, prefix_of, scale_of

HASHES = json.loads(
    Path(__file__).with_name("stage_hashes.json").read_text()
)  # as ledgers held them before modules moved into rooms


@pytest.mark.parametrize("which", HASHES)
def test_stages_finished_before_a_move_are_still_finished(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scale, seed, *broken = which.split(" ")
    cfg = RecipeConfig(scale=None if scale == "nano" else scale, seed=int(seed))
    size = scale_of(cfg)
    stages = COMPACT if name == "nano" else RECIPES[name][1]  # compact was nano then, and the versions lay beside it
    prefix = prefix_of("scaling" if name == "scaling" else "nano", cfg)
    bound = bind(
        prefix, size.stages(stages) if size else stages, cfg.seed, tuple(broken[0].split("+")) if broken else ()
    )
    assert {b.name: b.hash for b in bound} == HASHES[which]
    for b in bound:
        monkeypatch.setattr(type(b.stage), "made", lambda self, cfg: True)
    ledger = Ledger(
        tmp_path / "stages.json", {name: {"hash": found, "seconds": 1.0} for name, found in HASHES[which].items()}
    )
    assert pending(bound, ledger, RecipeConfig()) == set()


def test_an_rl_run_of_another_reward_is_not_taken_for_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple(
        replace(s, settings=s.settings | {"task": "funcall"}) if "task" in s.settings else s for s in COMPACT
    )
    bound = bind("nano", stages, 0)
    for b in bound:
        monkeypatch.setattr(type(b.stage), "made", lambda self, cfg: True)
    before = {name: {"hash": h, "seconds": 1.0} for name, h in HASHES["nano nano 0"].items()}
    paid_otherwise = {"diagnose", "rl", "choose", "evaluate", "notebooks", "report"}
    assert pending(bound, Ledger(tmp_path / "stages.json", before), RecipeConfig()) == paid_otherwise


@pytest.mark.parametrize("id", ["reinforce", "grpo", "ppo", "expert_iteration", "preference", "evaluate", "diagnose"])
def test_a_task_is_hashed_by_what_it_means(id: str) -> None:
    cls = registry.find(id).config_class
    more = {"ckpt": ("a",)} if id == "evaluate" else {"ckpt": "a"} if id == "diagnose" else {}

    def hashed(task: str) -> str:
        cfg = config.from_dict(cls, {"task": task, **more})
        return config.config_hash({"class": cls.__name__, **config.identity(cfg)})

    def as_it_was(task: str) -> str:
        cfg = config.from_dict(cls, {"task": task, **more})
        return config.config_hash({"class": cls.__name__, **config.identity(cfg), "task": task})

    assert hashed("funcall") == hashed("funcall:staircase=ours") != as_it_was("funcall")
    assert hashed("funcall:staircase=published") == as_it_was("funcall")
    assert hashed("funcall:levels=[1,2],staircase=published") == as_it_was("funcall:levels=[1,2]")
    assert hashed("funcall:levels=[1,2]") == as_it_was("funcall:levels=[1,2],staircase=ours")
    for task in ("micro", "micro:reward=binary", "toy", "mbpp:variant=sanitized,shots=3"):
        assert hashed(task) == as_it_was(task)


@pytest.mark.parametrize("id", registry.ENTRIES)
def test_every_entry_can_be_loaded(id: str) -> None:
    entry = registry.find(id)
    assert (
        entry.config_class.__name__ == entry.config
        and callable(entry.load(entry.function))
        and config.describe(entry.config_class)
    )
    assert (id in registry.LOOPS) == (
        "run_name" in config.fields_of(entry.config_class) and "lr" in config.fields_of(entry.config_class)
    )


@pytest.mark.parametrize("id", registry.LOOPS)
def test_a_loop_is_found_from_its_configuration(id: str) -> None:
    cls = registry.LOOPS[id].config_class
    needed = {"task": "toy"} if id == "preference" else {}
    assert registry.entry_of(cls(**needed)).id == id


def test_a_configuration_of_no_loop_is_an_error() -> None:
    with pytest.raises(ConfigError):
        registry.entry_of(RecipeConfig())
