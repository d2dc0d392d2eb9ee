"""Recipes: `codechat/recipes/*.toml` or any file like them, read into stages; `bind` fills in their placeholders and hashes them.

    about = "one line"                # top of the file; also from, without, home, larger
    from = "nano"                     # begin with the stages of another recipe, but those in `without`
    [shared.sft]                      # settings with a name
    lr = 0.003
    [stage.chat]                      # about, kind, needs, out, when, seeded, once, asked; everything else is a setting
    kind = "sft"                      # id of a function in core.registry
    needs = ["pretrain"]
    use = ["sft"]                     # the shared settings of that name; those of the stage replace them
    init_from = "{pretrain}"

In settings, `out` and `when`, {runs} and {data} stand for the recipe's prefix of run names and its data directory, {NAME} for
the place where the stage of that name leaves its result. `home` is the recipe beside whose runs and data its own lie, `larger`
the one whose stages run at a larger scale. A scale, `scales/*.toml`, replaces settings; "default" takes one away.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.errors import ConfigError, nearest
from codechat.runs.paths import ROOT, exists
from codechat.runs.run import Run

FOLDER = Path(__file__).parents[1] / "recipes"
NANO = "nano"  # the scale of a recipe as it is


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A configuration of the function `kind`. out: the directory that it writes; empty = the run {runs}/NAME.

    seeded: repeated per seed, in a run of its own; once: for seed 0 only; otherwise all seeds share it. when: a pattern of files,
    without which the stage is skipped. asked: it runs only where --until, --from or --force names it, or a stage that needs it."""

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

    def is_done(self, cfg: Any) -> bool:
        """Whether its result is there: a finished run, or its output directory."""
        if hasattr(cfg, "run_name"):
            return exists(cfg.run_name) and Run.open(cfg.run_name).status["status"] == "finished"
        out = getattr(cfg, "out", None)
        return out is None or (ROOT / Path(out)).exists()


@dataclass(frozen=True)
class Recipe:
    """Stages in order. own: names of those that its file writes, the others are those of `parent`."""

    about: str
    stages: tuple[Stage, ...]
    parent: str = ""
    own: tuple[str, ...] = ()
    home: str = ""
    larger: str = ""

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True)
class Scale:
    """A size of the recipes. settings: replace those of a stage; ranks: of torchrun by the kind of a stage, other stages run in
    this process; gpu: to plan for."""

    settings: Mapping[str, Mapping[str, Any]]
    ranks: Mapping[str, int]
    gpu: str | None

    def ranks_of(self, stage: Stage) -> int:
        return self.ranks.get(stage.kind, 0)

    def stages(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The stages that exist at this size, with its settings."""
        return tuple(
            replace(stage, settings=_without_defaults({**stage.settings, **self.settings[stage.name]}))
            for stage in stages
            if stage.name in self.settings
        )


def _without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if v != "default"}


# ---- files


def _tables(path: Path) -> dict[str, Any]:
    """A toml file over the one it is `from`: stage tables and shared settings are merged by name, a key here replaces."""
    try:
        own = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; required is a recipe as docs/recipes.md shows it") from None
    own = {"shared": {}, "stage": {}} | own
    if "from" not in own:
        return own
    places = [folder / f"{own['from']}.toml" for folder in (path.parent, FOLDER)]
    parent = next((place for place in places if place.exists() and not place.samefile(path)), None)
    if parent is None:
        raise ConfigError(f"{path}: from {own['from']!r}: no such recipe")
    above = _tables(parent)
    above["stage"] = {name: table for name, table in above["stage"].items() if name not in own.get("without", ())}
    merged = {what: _merged(above[what], own[what]) for what in ("shared", "stage")}
    return own | merged | {"own": tuple(own["stage"])}


def _merged(above: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**above, **{name: above.get(name, {}) | table for name, table in own.items()}}


def _settings(tables: Mapping[str, Any], name: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a stage: the shared ones that it uses, then its own."""
    table, settings = tables["stage"][name], {}
    for group in table.get("use", ()):
        if group not in tables["shared"]:
            raise ConfigError(f"stage {name}: use {group!r}{nearest(group, tables['shared'])}: no such shared settings")
        settings |= tables["shared"][group]
    return settings | {k: v for k, v in table.items() if k not in ("use", *skip)}


ATTRIBUTES = tuple(name for name in Stage.__dataclass_fields__ if name not in ("name", "settings"))


def read_recipe(path: Path) -> Recipe:
    """A recipe from its file. ConfigError names what is wrong."""
    tables = _tables(path)
    stages = []
    for name, table in tables["stage"].items():
        if missing := {"about", "kind"} - set(table):
            raise ConfigError(f"{path}: stage {name} has no {min(missing)}; required are about and kind")
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items() if k in ATTRIBUTES}
        stages.append(Stage(name=name, settings=_settings(tables, name, ATTRIBUTES), **known))
    own = tables.get("own", tuple(tables["stage"]))
    words = {key: tables.get(key, "") for key in ("home", "larger")}
    return Recipe(tables.get("about", path.stem), tuple(stages), tables.get("from", ""), own, **words)


def read_scale(path: Path) -> Scale:
    tables = _tables(path)
    return Scale({name: _settings(tables, name) for name in tables["stage"]}, tables["ranks"], tables.get("gpu"))


RECIPES = {
    path.stem: read_recipe(path) for path in sorted(FOLDER.glob("*.toml"), key=lambda p: (p.stem != NANO, p.stem))
}
SCALES = {path.stem: read_scale(path) for path in sorted(FOLDER.glob("scales/*.toml"))}


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or by the path of its file (MY.toml)."""
    if name.endswith(".toml"):
        return read_recipe(Path(name))
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{nearest(name, RECIPES)}")
    return RECIPES[name]


def find_scale(scale: str | None) -> Scale | None:
    """None for the recipe as it is. ConfigError for an unknown scale."""
    if scale in (None, NANO):
        return None
    if scale not in SCALES:
        raise ConfigError(f"no scale {scale!r}{nearest(scale, (NANO, *SCALES))}")
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
    def done(self) -> bool:
        return self.stage.is_done(self.cfg)


def bound_stages(name: str, scale: str | None = None, seed: int = 0, settings: Path | None = None) -> list[Bound]:
    """The stages of a recipe in order, ready to run. ConfigError for what does not exist or does not fit."""
    recipe, size = find_recipe(name), find_scale(scale)
    stages = recipe.stages
    if size:
        stages = size.stages(find_recipe(recipe.larger).stages if recipe.larger else stages)
        there = {stage.name for stage in stages}
        if lost := [need for stage in stages for need in stage.needs if need not in there]:
            raise ConfigError(f"recipe {name} has no scale {scale}: stage {lost[0]} has no settings there")
    return bind(prefix_of(name, scale), stages, seed, config.read_json(settings) if settings else {})


def bind(
    recipe: str, stages: tuple[Stage, ...], seed: int = 0, own: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Bound]:
    """The stages, ready to run. own: {stage: settings without placeholders} that replace those of the recipe."""
    own, names = own or {}, [s.name for s in stages]
    for name, settings in own.items():
        if name not in names or not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings of {name!r}{nearest(name, names)}; required is {{stage: {{setting: value}}}}, "
                f"stages of {recipe}: {', '.join(names)}"
            )
    bound: dict[str, Bound] = {}
    places = {"runs": recipe, "data": f"data/{recipe}"}
    for stage in stages:
        if seed and stage.once:
            continue
        suffix = f"-s{seed}" if seed and stage.seeded else ""
        place = "out" if stage.out else "run_name"
        places[stage.name] = _fill(stage.out or f"{{runs}}/{stage.name}", places) + suffix
        settings = {place: places[stage.name]} | dict(
            own[stage.name] if stage.name in own else _fill(stage.settings, places)
        )
        places[stage.name] = settings[place]
        entry, seeds = registry.find(stage.kind), {"seed": seed} if stage.seeded else {}
        cfg = config.from_dict(entry.config_class, settings | seeds, where=f"recipe {recipe}, stage {stage.name}")
        what = [entry.id, config.config_hash(cfg), [bound[need].hash for need in stage.needs]]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
        action = entry.load(entry.function)
        bound[stage.name] = Bound(stage, stage.name + suffix, cfg, action, digest, _fill(stage.when, places))
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
