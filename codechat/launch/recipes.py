"""Recipes: `codechat/recipes/*.toml` or any file like them (docs/recipes.md), read into stages; `bind` fills in their placeholders and
hashes them. Scales, `scales/*.toml`, replace settings of stages."""

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.errors import ConfigError, check_choice
from codechat.runs import checkpoint, paths  # modules, not names: --help then runs no torch
from codechat.text import chat, tokenizer

FOLDER = Path(__file__).parents[1] / "recipes"
NANO = "nano"  # the scale of a recipe as it is


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A configuration of the function `kind`; the other fields are the keys of docs/recipes.md."""

    name: str
    about: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seeded: bool = False
    once: bool = False
    asked: bool = False
    out: str = ""
    when: str = ""


@dataclass(frozen=True)
class Recipe:
    """Stages in order. home: the recipe beside whose runs and data its own lie; larger: the one whose stages run at a larger scale."""

    about: str
    stages: tuple[Stage, ...]
    home: str = ""
    larger: str = ""

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True)
class Scale:
    """A size of the recipes. settings: replace those of a stage, "default" takes one away; ranks: of torchrun by the kind of a stage, other
    stages run in this process; gpu: to plan for."""

    settings: Mapping[str, Mapping[str, Any]]
    ranks: Mapping[str, int]
    gpu: str | None

    def ranks_of(self, stage: Stage) -> int:
        return self.ranks.get(stage.kind, 0)

    def stages(self, stages: tuple[Stage, ...]) -> list[Stage]:
        """The stages that exist at this size, with its settings."""
        there = [
            (stage, {**stage.settings, **self.settings[stage.name]}) for stage in stages if stage.name in self.settings
        ]
        return [replace(stage, settings={k: v for k, v in new.items() if v != "default"}) for stage, new in there]


# ---- files


def _tables(path: Path) -> dict[str, Any]:
    """A toml file over the one it is `from`: stage tables and shared settings are merged by name, a key here replaces."""
    try:
        here = {"shared": {}, "stage": {}} | tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; required is a recipe as docs/recipes.md shows it") from None
    if "from" in here:
        places = [folder / f"{here['from']}.toml" for folder in (path.parent, FOLDER)]
        parent = next((place for place in places if place.exists() and not place.samefile(path)), None)
        if parent is None:
            raise ConfigError(f"{path}: from {here['from']!r}: no such recipe")
        above = _tables(parent)
        for name in here.get("without", ()):
            above["stage"].pop(name, None)
        for part in ("shared", "stage"):
            changed = {name: above[part].get(name, {}) | table for name, table in here[part].items()}
            here[part] = above[part] | changed
    return here


def _settings(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of a stage over the shared settings that it uses."""
    settings: dict[str, Any] = {}
    for group in tables["stage"][name].get("use", ()):
        check_choice(f"stage {name}: use", group, tables["shared"])
        settings |= tables["shared"][group]
    return settings | {k: v for k, v in tables["stage"][name].items() if k != "use"}


ATTRIBUTES = {name for name in Stage.__dataclass_fields__ if name not in ("name", "settings")}


def read_recipe(path: Path) -> Recipe:
    """A recipe from its file. ConfigError names what is wrong."""
    tables, stages = _tables(path), []
    for name in tables["stage"]:
        settings = _settings(tables, name)
        if missing := {"about", "kind"} - settings.keys():
            raise ConfigError(f"{path}: stage {name} has no {min(missing)}; required are about and kind")
        about = {k: settings.pop(k) for k in ATTRIBUTES & settings.keys()}
        stages.append(Stage(name=name, settings=settings, **about | {"needs": tuple(about.get("needs", ()))}))
    words = {key: tables.get(key, "") for key in ("home", "larger")}
    return Recipe(tables.get("about", path.stem), tuple(stages), **words)


def read_scale(path: Path) -> Scale:
    tables = _tables(path)
    return Scale({name: _settings(tables, name) for name in tables["stage"]}, tables["ranks"], tables.get("gpu"))


FILES = sorted(FOLDER.glob("*.toml"), key=lambda path: (path.stem != NANO, path.stem))
RECIPES = {path.stem: read_recipe(path) for path in FILES}
SCALES = {path.stem: read_scale(path) for path in sorted(FOLDER.glob("scales/*.toml"))}


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or by the path of its file (MY.toml)."""
    if name.endswith(".toml"):
        return read_recipe(Path(name))
    check_choice("recipe", name, RECIPES)
    return RECIPES[name]


def find_scale(scale: str | None) -> Scale | None:
    """None for the recipe as it is. ConfigError for an unknown scale."""
    if scale in (None, NANO):
        return None
    check_choice("scale", scale, (NANO, *SCALES))
    return SCALES[scale]


def prefix_of(name: str, scale: str | None = None) -> str:
    """Where a recipe's runs and data lie: its name, or that of its home, with the scale."""
    home = find_recipe(name).home
    if scale in (None, NANO):
        return home or Path(name).stem
    return f"{NANO if home else Path(name).stem}-{scale}"


# ---- stages with their settings


@dataclass(frozen=True)
class Bound:
    """A stage with its placeholders filled in, its configuration built, its identity hashed."""

    stage: Stage
    name: str  # in the ledger
    cfg: Any
    action: Callable[[Any], Any]
    hash: str
    when: str = ""  # pattern of files under the root

    @property
    def run_name(self) -> str | None:
        """The run that it writes; None where it writes a folder, or nothing."""
        return getattr(self.cfg, "run_name", None)

    @property
    def waits(self) -> bool:
        """Whether it is skipped, since the files that it needs are not there."""
        return bool(self.when) and not any(paths.ROOT.glob(self.when))

    @property
    def done(self) -> bool:
        """Whether its result is there: a finished run, or its output directory."""
        if self.run_name:
            run = paths.runs_dir() / self.run_name
            return paths.is_run(run) and paths.read_status(run)["status"] == "finished"
        out = getattr(self.cfg, "out", None)
        return out is None or (paths.ROOT / out).exists()


def bound_stages(
    name: str, scale: str | None = None, seed: int = 0, settings: Path | None = None, base: str | None = None
) -> list[Bound]:
    """The stages of a recipe in order, ready to run. settings: a file of {stage: settings without placeholders} that replace those of the
    recipe; base: a checkpoint in place of its pretraining. ConfigError for what does not exist or does not fit."""
    recipe, size = find_recipe(name), find_scale(scale)
    stages = list(recipe.stages)
    if size:
        stages = size.stages(find_recipe(recipe.larger).stages if recipe.larger else recipe.stages)
        if lost := {need for stage in stages for need in stage.needs} - {stage.name for stage in stages}:
            raise ConfigError(f"recipe {name} has no scale {scale}: stage {min(lost)} has no settings there")
    bound = _bind(prefix_of(name, scale), stages, seed, config.read_json(settings) if settings else {}, base)
    return bound if base is None else behind_pretraining(bound, base)


def _bind(prefix: str, stages: list[Stage], seed: int, edited: Mapping[str, Any], base: str | None) -> list[Bound]:
    names = [stage.name for stage in stages]
    for name, settings in edited.items():
        check_choice("settings of stage", name, names)
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings of {name} are {settings!r}; required: {{setting: value}}")
    bound: dict[str, Bound] = {}
    places, parents = {"runs": prefix, "data": f"data/{prefix}"}, {}
    for stage in stages:
        if seed and stage.once:
            continue
        suffix, seeds = (f"-s{seed}" if seed else "", {"seed": seed}) if stage.seeded else ("", {})
        place = "out" if stage.out else "run_name"
        usual = {place: _fill(stage.out or f"{{runs}}/{stage.name}", places) + suffix}
        settings = usual | (edited[stage.name] if stage.name in edited else _fill(stage.settings, places))
        places[stage.name] = settings[place]
        replaced = base and stage.kind == "pretrain"
        if replaced:
            parents[settings[place]] = base
        settings = {k: v if k == place else _replaced(v, parents) for k, v in settings.items()}
        entry = registry.find(stage.kind)
        cfg = config.from_dict(entry.config_class, settings | seeds, where=f"recipe {prefix}, stage {stage.name}")
        identity = [entry.id, config.config_hash(cfg), [bound[need].hash for need in stage.needs]]
        if replaced:
            identity = [checkpoint.fingerprint(checkpoint.read_meta(base))]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
        action, when = entry.load(entry.function), _fill(stage.when, places)
        bound[stage.name] = Bound(stage, stage.name + suffix, cfg, action, digest, when)
    return list(bound.values())


def _fill(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        try:
            return value.format_map(places)
        except KeyError as missing:
            raise ConfigError(f"{value!r} names no stage before it: {missing}") from None
    if isinstance(value, Mapping):
        return {k: _fill(v, places) for k, v in value.items()}
    return [_fill(v, places) for v in value] if isinstance(value, (list, tuple)) else value


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    """A setting, or its items, with checkpoints of other runs in place of those that names has."""
    if isinstance(value, str):
        return names.get(value.partition("@")[0], value)
    return [_replaced(v, names) for v in value] if isinstance(value, (list, tuple)) else value


def behind_pretraining(bound: list[Bound], base: str) -> list[Bound]:
    """The stages from SFT on: without pretraining, and without what only that needs. ConfigError where the checkpoint cannot take its place."""
    trained = {b.stage.name: b.cfg for b in bound if b.stage.kind == "pretrain"}
    if not any(b.stage.kind == "sft" and b.cfg.init_from == base for b in bound):
        raise ConfigError(f"--base {base}: this recipe has no SFT that starts from its pretraining; leave out --base")
    gone = set(trained)
    for b in reversed(bound):
        users = {user.stage.name for user in bound if b.stage.name in user.stage.needs}
        gone |= {b.stage.name} if users and users <= gone else set()
    if problem := _misfit(checkpoint.read_meta(base), max(cfg.model.block_size for cfg in trained.values()), bound):
        raise ConfigError(f"--base {base}: {problem}; name another run, or leave out --base to pretrain one")
    kept = [b for b in bound if b.stage.name not in gone]
    needs = [tuple(need for need in b.stage.needs if need not in gone) for b in kept]
    return [replace(b, stage=replace(b.stage, needs=names)) for b, names in zip(kept, needs)]


def _misfit(meta: Mapping[str, Any], length: int, bound: list[Bound]) -> str:
    """Why a checkpoint cannot stand in for the pretraining of these stages, whose rows have up to `length` tokens."""
    shape, held = meta.get("model_config") or {}, meta.get("tokenizer") or {}
    if shape.get("block_size", 0) < length:
        return f"its rows end at {shape.get('block_size', 0)} tokens, this recipe has rows of {length}"
    for spec in {b.cfg.tokenizer for b in bound if b.stage.kind.startswith("data.") and hasattr(b.cfg, "tokenizer")}:
        if held.get("spec") != spec and held != tokenizer.load(spec).to_dict():
            return f"its tokenizer is {held.get('spec', 'an imported one')}, the data of this recipe have {spec}"
    if any(getattr(b.cfg, "tags", "") == "reserved" for b in bound if b.stage.kind == "sft"):
        if shape["vocab_size"] + shape["n_tags"] < tokenizer.from_dict(held).n_vocab + chat.N_TAGS:
            return "it has no rows for the reserved tags of this recipe"
    return ""
