"""Recipes: `codechat_lab/recipes/*.toml` or any file like them (docs/recipes.md), read into
stages; `bind` fills in their placeholders and hashes them. Scales, `scales/*.toml`, replace
settings of stages."""

import hashlib
import json
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from codechat.core import config, registry
from codechat.core.atomic_files import read_json
from codechat.core.entries import Entry
from codechat.core.errors import ConfigError, check_choice
from codechat.runs import paths

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
    seconds: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """Stages in order. home: the recipe beside whose runs and data its own lie; larger: the one
    whose stages run at a larger scale."""

    about: str
    stages: tuple[Stage, ...]
    home: str = ""
    larger: str = ""

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


@dataclass(frozen=True)
class Scale:
    """A size of the recipes. settings: replace those of a stage, "default" takes one away,
    stages without any are left out; ranks: of torchrun by the kind of a stage, other stages run
    in this process; gpu: to plan for."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    gpu: str | None = None

    def ranks_of(self, stage: Stage) -> int:
        return self.ranks.get(stage.kind, 0)


# ---- files


def _tables(path: Path) -> dict[str, Any]:
    """A toml file over the one it is `from`: stage tables and shared settings are merged by
    name, a key here replaces."""
    try:
        here = {"shared": {}, "stage": {}} | tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or error}; "
            "required is a recipe as docs/recipes.md shows it"
        ) from None
    if "from" not in here:
        return here
    files = [folder / f"{here['from']}.toml" for folder in (path.parent, FOLDER)]
    # my own nano.toml may go on from the project's
    parents = [file for file in files if file.exists() and not file.samefile(path)]
    if not parents:
        raise ConfigError(f"{path}: from {here['from']!r}: no such recipe")
    above = _tables(parents[0])
    for name in here.get("without", ()):
        above["stage"].pop(name, None)
    for part in ("shared", "stage"):
        merged = {name: above[part].get(name, {}) | table for name, table in here[part].items()}
        here[part] = above[part] | merged
    return here


def _settings(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The table of a stage over the shared settings that it uses."""
    own = dict(tables["stage"][name])
    settings: dict[str, Any] = {}
    for group in own.pop("use", ()):
        settings |= tables["shared"][check_choice(f"stage {name}: use", group, tables["shared"])]
    return settings | own


KEYS = Stage.__dataclass_fields__.keys() - {"name", "settings"}


def read_recipe(path: Path) -> Recipe:
    """A recipe from its file, its stages in the file's order but behind those that they need.
    ConfigError names what is wrong."""
    tables = _tables(path)
    order: dict[str, None] = {}

    def visit(name: str, users: tuple[str, ...] = ()) -> None:
        # a stage that needs itself, directly or not, is no choice either
        check_choice(f"{path}: a stage needs", name, tables["stage"].keys() - users)
        for need in tables["stage"][name].get("needs", ()):
            visit(need, (*users, name))
        order.setdefault(name)

    for name in tables["stage"]:
        visit(name)
    stages = []
    for name in order:
        settings = _settings(tables, name)
        missing = {"about", "kind"} - settings.keys()
        if missing:
            raise ConfigError(
                f"{path}: stage {name} has no {min(missing)}; required are about and kind"
            )
        known = {key: settings.pop(key) for key in KEYS & settings.keys()}
        known["needs"] = tuple(known.get("needs", ()))
        stages.append(Stage(name=name, settings=settings, **known))
    if not stages:
        raise ConfigError(f"{path} has no stages; required is a recipe as docs/recipes.md shows it")
    return Recipe(
        about=tables.get("about", path.stem),
        stages=tuple(stages),
        home=tables.get("home", ""),
        larger=tables.get("larger", ""),
    )


def read_scale(path: Path) -> Scale:
    tables = _tables(path)
    return Scale(
        {name: _settings(tables, name) for name in tables["stage"]},
        tables["ranks"],
        tables.get("gpu"),
    )


FILES = sorted(FOLDER.glob("*.toml"), key=lambda path: (path.stem != NANO, path.stem))
RECIPES = {path.stem: read_recipe(path) for path in FILES}
SCALES = {NANO: Scale()} | {
    path.stem: read_scale(path) for path in sorted(FOLDER.glob("scales/*.toml"))
}


def find_recipe(name: str) -> Recipe:
    """A recipe by its name, or by the path of its file (MY.toml)."""
    if name.endswith(".toml"):
        return read_recipe(Path(name))
    return RECIPES[check_choice("recipe", name, RECIPES)]


def find_scale(scale: str) -> Scale:
    return SCALES[check_choice("scale", scale, SCALES)]


def prefix_of(name: str, scale: str = NANO) -> str:
    """Where a recipe's runs and data lie: its name, or that of its home, with the scale."""
    return (find_recipe(name).home or Path(name).stem) + (f"-{scale}" if scale != NANO else "")


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
    name: str,
    scale: str = NANO,
    seed: int = 0,
    settings: Path | None = None,
    base: str | None = None,
) -> list[Bound]:
    """The stages of a recipe in order, ready to run. settings: a file of {stage: settings} that
    replace those of the recipe; base: a checkpoint in place of its pretraining. ConfigError for
    what does not exist or does not fit."""
    stages = _stages_at(name, scale)
    prefix = prefix_of(name, scale)
    edited = read_json(settings) if settings else {}
    for stage_name, its in edited.items():
        check_choice("settings of stage", stage_name, [stage.name for stage in stages])
        if not isinstance(its, Mapping):
            raise ConfigError(f"settings of {stage_name} are {its!r}; required: {{setting: value}}")
    stages = [replace(stage, settings=edited.get(stage.name, stage.settings)) for stage in stages]
    replaced: dict[str, str] = {}  # stage -> digest
    if base:
        from codechat.runs import checkpoint  # it imports torch

        digest = _digest([paths.fingerprint(checkpoint.read_meta(base))])
        replaced = dict.fromkeys(_pretraining(stages), digest)
    placed = place(stages, prefix, seed, replaced, base)
    if base and not (replaced and placed):
        raise ConfigError(
            f"--base {base}: recipe {name} has no stage behind a pretraining; leave out --base"
        )
    cfgs = [configure(one, prefix) for one in placed]
    hashes = hash_stages(placed, cfgs, replaced)
    bound = []
    for one, cfg in zip(placed, cfgs):
        stage = replace(
            one.stage, needs=tuple(need for need in one.stage.needs if need not in replaced)
        )
        bound.append(
            Bound(
                stage,
                one.name,
                cfg,
                one.entry.load(one.entry.function),
                hashes[stage.name],
                one.when,
            )
        )
    return bound


@dataclass(frozen=True)
class Placed:
    """A stage whose run or folder is known, and those of the stages before it: its placeholders
    are filled in."""

    stage: Stage
    entry: Entry
    name: str  # in the ledger
    settings: Mapping[str, Any]
    when: str


def place(
    stages: Iterable[Stage],
    prefix: str,
    seed: int = 0,
    replaced: Container[str] = (),
    base: str | None = None,
) -> list[Placed]:
    """Fill in the placeholders of settings and file patterns: {runs}, {data}, and the names of
    stages before. Stages in `replaced` are left out, and `base` stands for their runs.
    ConfigError for an unknown placeholder."""
    places = {"runs": prefix, "data": f"data/{prefix}"}
    parents: dict[str, str] = {}  # run of a replaced stage -> base
    placed = []
    for stage in stages:
        if seed and stage.once:
            continue
        entry = registry.find(stage.kind)
        suffix = f"-s{seed}" if seed and stage.seeded else ""
        key = "out" if stage.out else "run_name"
        usual = _fill(stage.out or f"{{runs}}/{stage.name}", places, {}) + suffix
        settings = {key: usual} | _fill(stage.settings, places, parents)
        if suffix and hasattr(entry.config_class, "seed"):  # a filter draws nothing
            settings["seed"] = seed
        places[stage.name] = settings[key]
        if base and stage.name in replaced:
            parents[settings[key]] = base
        else:
            placed.append(
                Placed(stage, entry, stage.name + suffix, settings, _fill(stage.when, places, {}))
            )
    return placed


def configure(placed: Placed, prefix: str) -> Any:
    """The configuration of a stage. ConfigError for a setting that does not fit."""
    where = f"recipe {prefix}, stage {placed.stage.name}"
    return config.from_dict(placed.entry.config_class, placed.settings, where=where)


def hash_stages(
    placed: Iterable[Placed], cfgs: Iterable[Any], replaced: Mapping[str, str]
) -> dict[str, str]:
    """A digest of each stage, over its kind, its settings and the digests of the stages that it
    needs: a change reaches all later stages. replaced: digests that are known."""
    hashes = dict(replaced)
    for one, cfg in zip(placed, cfgs):
        needed = [hashes[need] for need in one.stage.needs]
        hashes[one.stage.name] = _digest([one.entry.id, config.config_hash(cfg), needed])
    return hashes


def _stages_at(name: str, scale: str) -> Sequence[Stage]:
    """The stages of a recipe that exist at this scale, with its settings."""
    recipe = find_recipe(name)
    size = find_scale(scale)
    if scale == NANO:
        return recipe.stages
    there = [
        stage for stage in find_recipe(recipe.larger or name).stages if stage.name in size.settings
    ]
    lost = {need for stage in there for need in stage.needs} - {stage.name for stage in there}
    if lost:
        raise ConfigError(
            f"recipe {name} has no scale {scale}: stage {min(lost)} has no settings there"
        )
    scaled = []
    for stage in there:
        settings = {**stage.settings, **size.settings[stage.name]}
        kept = {key: value for key, value in settings.items() if value != "default"}
        scaled.append(replace(stage, settings=kept))
    return scaled


def _pretraining(stages: Sequence[Stage]) -> set[str]:
    """Names of the stages that pretrain, and of those that only these need."""
    names = {stage.name for stage in stages if stage.kind == "pretrain"}
    for stage in reversed(stages):
        users = {user.name for user in stages if stage.name in user.needs}
        if users and users <= names:
            names.add(stage.name)
    return names


def _digest(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]


def _fill(value: Any, places: Mapping[str, str], parents: Mapping[str, str]) -> Any:
    """A setting with the places of other stages; what names a checkpoint of a run in `parents`
    gets the one given there."""
    if isinstance(value, str):
        try:
            filled = value.format_map(places)
        except (KeyError, ValueError) as missing:
            raise ConfigError(f"{value!r} names no stage before it: {missing}") from None
        return parents.get(filled.partition("@")[0], filled)
    if isinstance(value, Mapping):
        return {k: _fill(v, places, parents) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(v, places, parents) for v in value]
    return value
