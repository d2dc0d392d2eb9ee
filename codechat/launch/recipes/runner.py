"""Recipes: named pipelines of stages, run in order, each skipped when it is already finished.

    codechat run nano                      every stage that is not finished
    codechat run nano --from rl            rl and everything after it, again
    codechat run nano --force evaluate     this stage again, then what depends on it
    codechat run nano --seed 1             SFT, RL and evaluation of another seed, over the same data and pretraining
    codechat run nano --scale 8b           the same stages on eight GPUs: prints the plan and asks; --yes launches
    codechat run v6                        a version of the original project: v1 v2 v3 v5 v6 v7, and ours; what they share is made once
    codechat run v1 --defect k1-drift      with a defect of the original switched on: runs that it reaches get its name behind theirs
    codechat run --list

A stage is a configuration of a training function, nothing else; `{runs}` and `{data}` in a setting stand for the recipe's run prefix and
data directory, `{s}` for the seed's suffix. Finished means: the ledger `runs/NAME/stages.json` holds the stage's hash, which covers its
settings and the hashes of the stages it needs. A stage that was killed is resumed from its checkpoint when its settings are the same.

The versions keep their runs and data beside nano's, whose data and pretraining they share. A stage that waits for something that is not there
(GRPO for problems, where a filter left none) is left out, and said to be.

At a larger scale the stages that take GPUs are launched by torchrun, detached, and followed: a recipe that is interrupted leaves them
running, and finds them again when it is run again.

Left out: stages in parallel, and pipelines over several machines (`codechat launch` writes a job for one stage).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codechat.core import config, errors, registry
from codechat.core.config import opt
from codechat.core.errors import ConfigError, RunError
from codechat.labs import defects
from codechat.launch import launcher
from codechat.launch.recipes.nano import NANO, Stage
from codechat.launch.recipes.scale_8b import SCALES, Scale
from codechat.launch.recipes.scaling import SCALING
from codechat.launch.recipes.versions import VERSIONS
from codechat.runs.run import ROOT, Run, exists, runs_dir, write_atomic

RECIPES: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "nano": (
        "every stage on two CPU cores in minutes: data, pretraining, SFT, diagnosis, REINFORCE, evaluation, notebooks, report",
        NANO,
    ),
    "scaling": (
        "five model sizes at two equal budgets of compute, about 12 minutes of one core: the points of a scaling law",
        SCALING,
    ),
    **VERSIONS,
}
OWN = "nano"  # the scale of a recipe as it is
HOME = dict.fromkeys(VERSIONS, "nano")  # recipe -> the one beside whose runs and data its own lie; else itself


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What to run of a recipe."""

    list: bool = opt(False, "list the recipes and their stages")
    from_stage: str | None = opt(None, "run this stage and everything after it again (--from)")
    force: str | None = opt(None, "run this stage again, and what depends on it")
    until: str | None = opt(None, "stop after this stage")
    seed: int = opt(0, "seed of the stages from SFT on; data and pretraining are shared")
    scale: str | None = opt(None, "size of the models: nano or 8b; none = the recipe as it is, which is nano")
    defect: tuple[str, ...] = opt((), f"defects of the original to switch on: {', '.join(defects.DEFECTS)}")
    yes: bool = opt(False, "launch at a larger scale without asking")
    gpu: str | None = opt(None, "GPU to plan for; none = the scale's own (8b: a800-80gb)")
    price: float | None = opt(None, "price of a GPU-hour, for the plan")


@dataclass
class Ledger:
    """Which stages are finished, with hash and seconds: runs/NAME/stages.json, replaced atomically."""

    path: Path
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Ledger:
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    def put(self, name: str, row: dict[str, Any]) -> None:
        self.rows = self.read(self.path).rows | {name: row}  # another seed may run beside this one
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(self.rows, indent=1))

    def drop(self, name: str) -> None:
        self.rows = self.read(self.path).rows
        if self.rows.pop(name, None) is not None:
            write_atomic(self.path, json.dumps(self.rows, indent=1))


@dataclass(frozen=True)
class Bound:
    """A stage with its placeholders filled in, its config built, its identity hashed."""

    stage: Stage
    name: str
    cfg: Any
    action: Callable[[Any], Any]
    hash: str
    when: str = ""  # pattern of files under the root
    broken: tuple[str, ...] = ()  # defects that are on while it runs


def bind(recipe: str, stages: tuple[Stage, ...], seed: int, broken: tuple[str, ...] = ()) -> list[Bound]:
    """Fill in placeholders and compute hashes, in order. ConfigError names a stage whose settings do not fit its config.

    broken: defects. A stage of a kind that one reaches, and what needs such a stage, gets another name, other outputs and another hash."""
    if unknown := [name for name in broken if name not in defects.DEFECTS]:
        raise ConfigError(
            f"no defect {unknown[0]!r}{errors.nearest(unknown[0], defects.DEFECTS)}; defects: {', '.join(defects.DEFECTS)}"
        )
    suffix, tail = f"-s{seed}" if seed else "", f"-with-{'-'.join(broken)}" if broken else ""
    reached = {kind for name in broken for kind in defects.DEFECTS[name].reaches}
    bound: dict[str, Bound] = {}
    moved: dict[str, str] = {}  # runs and directories of stages that a defect reaches -> their names then
    for stage in stages:
        if (seed or broken) and stage.once:
            continue
        entry = registry.find(stage.kind)
        words = dict(runs=recipe, data=f"data/{recipe}", s=suffix)
        settings = _fill(stage.settings, words) | ({"seed": seed} if stage.seeded else {})
        hit = bool(broken) and (reached_as(stage) in reached or any(bound[n].broken for n in stage.needs))
        if hit:
            moved |= {settings[key]: settings[key] + tail for key in ("run_name", "out") if key in settings}
        settings = _moved(settings, moved)
        cfg = config.from_dict(entry.config_class, settings, where=f"recipe {recipe}, stage {stage.name}")
        text = json.dumps(
            [entry.ledger, config.config_hash(cfg), [bound[n].hash for n in stage.needs], *([broken] if hit else [])]
        )
        bound[stage.name] = Bound(
            stage,
            stage.name + (suffix if stage.seeded else "") + (tail if hit else ""),
            cfg,
            entry.load(entry.function),
            hashlib.sha256(text.encode()).hexdigest()[:12],
            _moved(_fill(stage.when, words), moved),
            broken if hit else (),
        )
    return list(bound.values())


def _fill(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, str):
        return value.format(**words)
    if isinstance(value, dict):
        return {k: _fill(v, words) for k, v in value.items()}
    return [_fill(v, words) for v in value] if isinstance(value, (list, tuple)) else value


def reached_as(stage: Stage) -> str:
    """What a defect says it reaches: the stage's kind; "data" for conversations and problems, which a corpus is not; pass rates are an evaluation."""
    room, _, _ = stage.kind.partition(".")
    return {"data.corpus": "corpus", "passk": "evaluate"}.get(stage.kind, room)


def _moved(value: Any, moved: dict[str, str]) -> Any:
    """The value with runs (also RUN@STEP), directories and files in them under their new names."""
    if isinstance(value, str):
        for old, new in moved.items():
            if value == old or value.startswith((f"{old}@", f"{old}/")):
                return new + value[len(old) :]
        return value
    if isinstance(value, dict):
        return {k: _moved(v, moved) for k, v in value.items()}
    return [_moved(v, moved) for v in value] if isinstance(value, list) else value


def pending(bound: list[Bound], ledger: Ledger, cfg: RecipeConfig) -> set[str]:
    """Names of the stages to run: unfinished ones, forced ones, and everything that needs one of those."""
    names = [b.stage.name for b in bound]
    for wish in (cfg.from_stage, cfg.force, cfg.until):
        if wish is not None and wish not in names:
            raise ConfigError(f"no stage {wish!r}{errors.nearest(wish, names)}; stages: {', '.join(names)}")
    todo: set[str] = set()
    for i, b in enumerate(bound):
        forced = b.stage.name == cfg.force or (cfg.from_stage is not None and i >= names.index(cfg.from_stage))
        finished = ledger.rows.get(b.name, {}).get("hash") == b.hash and b.stage.made(b.cfg)
        if forced or not finished or todo & set(b.stage.needs):
            todo.add(b.stage.name)
    return todo if cfg.until is None else todo & set(names[: names.index(cfg.until) + 1])


def prefix_of(name: str, cfg: RecipeConfig) -> str:
    """Where a recipe's runs and data lie: its name, or that of the recipe it shares its first stages with, with the scale."""
    home = HOME.get(name, name)
    return home if cfg.scale in (None, OWN) else f"{home}-{cfg.scale}"


def scale_of(cfg: RecipeConfig) -> Scale | None:
    """None for the recipe as it is. ConfigError for an unknown scale, or a defect at one that launches other processes."""
    if cfg.scale not in (None, OWN, *SCALES):
        raise ConfigError(
            f"no scale {cfg.scale!r}{errors.nearest(cfg.scale, (OWN, *SCALES))}; scales: {', '.join((OWN, *SCALES))}"
        )
    if cfg.defect and cfg.scale not in (None, OWN):
        raise ConfigError(
            f"--defect with --scale {cfg.scale}: a launched process knows nothing of it; leave --scale away"
        )
    return SCALES.get(cfg.scale) if cfg.scale else None


def run_recipe(name: str, cfg: RecipeConfig, console: Console | None = None) -> list[Bound]:
    """Run what is pending of a recipe. Raises what a stage raises; finished stages stay finished."""
    if name not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{errors.nearest(name, RECIPES)}; recipes: {', '.join(RECIPES)}")
    console, scale, prefix = console or Console(), scale_of(cfg), prefix_of(name, cfg)
    bound = bind(
        prefix,
        scale.stages(RECIPES[name][1]) if scale else RECIPES[name][1],
        cfg.seed,
        tuple(dict.fromkeys(cfg.defect)),
    )
    ledger = Ledger.read(runs_dir() / prefix / "stages.json")
    todo = pending(bound, ledger, cfg)
    if scale and todo:
        agree(scale, [b for b in bound if b.stage.name in todo], cfg, console)
    forced = {b.stage.name for b in bound if b.stage.name in todo and ledger.rows.get(b.name, {}).get("hash") == b.hash}
    for number, b in enumerate(bound, 1):
        title = f"[{number}/{len(bound)}] {b.name}"
        if b.stage.name not in todo:
            console.print(
                f"{title}: finished, skipped" if b.name in ledger.rows else f"{title}: not asked for",
                style="dim",
                highlight=False,
            )
            continue
        if b.when and not any(ROOT.glob(b.when)):
            console.print(f"{title}: nothing to do: {b.stage.needs[0]} left no {b.when}", highlight=False)
            continue
        console.rule(f"{title}: {b.stage.about}", align="left")
        ledger.drop(b.name)
        began = time.perf_counter()
        ranks = scale.ranks.get(b.stage.name, 0) if scale else 0
        if not (ranks and follow_living(b.cfg.run_name)):
            settings = _continue_or_replace(b, fresh=b.stage.name in forced)
            with defects.switched_on(*b.broken):
                launch_stage(settings, ranks) if ranks else b.action(settings)
        if not b.stage.made(b.cfg):
            reason = (
                Run.open(b.cfg.run_name).status.get("reason") if hasattr(b.cfg, "run_name") else "its output is missing"
            )
            raise RunError(f"stage {b.name} did not finish: {reason}; run the recipe again to continue")
        seconds = time.perf_counter() - began
        ledger.put(
            b.name, {"hash": b.hash, "seconds": round(seconds, 1), "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S")}
        )
        console.print(f"{title}: {seconds:.0f} s", highlight=False)
    return bound


def _continue_or_replace(b: Bound, fresh: bool) -> Any:
    """The stage's config, with resume where a killed run of the same settings left a checkpoint, else with overwrite."""
    run_name = getattr(b.cfg, "run_name", None)
    if run_name is None or not exists(run_name):
        return b.cfg
    old = Run.open(run_name)
    same = config.to_dict(b.cfg) | {"resume": False, "overwrite": False}
    kept = {k: v for k, v in old.config.items() if k in same and k != "model"} | {"resume": False, "overwrite": False}
    resumable = (
        hasattr(b.cfg, "resume") and not fresh and old.status.get("status") != "finished" and bool(old.checkpoints())
    )
    if resumable and all(same[k] == v for k, v in kept.items()):
        return replace(b.cfg, resume=True)
    return replace(b.cfg, overwrite=True)


# ---- larger scales


def agree(scale: Scale, bound: list[Bound], cfg: RecipeConfig, console: Console) -> None:
    """Print the plan of the stages to launch; go on with --yes, or with a yes of the user. ConfigError where nobody can be asked, where the
    plan does not fit, or where the GPUs are not here."""
    from codechat.launch import planner  # takes torch; a recipe at its own scale may begin without

    ranks, hours = max((scale.ranks.get(b.stage.name, 0) for b in bound), default=0), 0.0
    for b in bound:
        if scale.gpu and b.stage.kind in ("pretrain", "sft"):
            found = planner.make(
                planner.of(
                    b.cfg, gpus=scale.ranks[b.stage.name], gpu=cfg.gpu or scale.gpu, price=cfg.price, search=False
                )
            )
            console.print(f"{b.name}: {found.verdict}", highlight=False)
            if not found.fits:
                raise ConfigError(
                    f"stage {b.name}: {planner.with_knobs(found).verdict}; the settings are in codechat/launch/recipes/scale_8b.py"
                )
            hours += found.hours
        else:
            console.print(f"{b.name}: not planned, {b.stage.about}", highlight=False)
    console.print(f"planned: {hours:,.1f} hours on {ranks} GPUs; sampling and data come on top", highlight=False)
    if not cfg.yes:
        if not sys.stdin.isatty():
            raise ConfigError("nobody to ask; --yes launches what is planned above")
        if input("launch? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ConfigError("not launched; finished stages stay finished")
    if scale.gpu and (here := gpus_here()) < ranks:
        raise ConfigError(
            f"this needs {ranks} GPUs and there are {here}; run it on a machine that has them, or write a job for one stage: "
            "codechat launch pretrain --nproc 8 --slurm -- --preset 8b ..."
        )


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def follow_living(run_name: str) -> bool:
    """Follow a stage that a former `codechat run` launched and that is still running; False where there is none."""
    path = runs_dir() / run_name
    if not (path / "launch.sh").is_file() or not launcher.lives(path):
        return False
    launcher.attach(run_name)
    return True


def launch_stage(settings: Any, ranks: int) -> None:
    """Start a stage by torchrun, detached, and follow it to its end. What was stopped continues; anything else is written anew."""
    name = settings.run_name
    if not (getattr(settings, "resume", False) and (runs_dir() / name / "launch.sh").is_file()):
        launcher.write(replace(settings, overwrite=False), nproc=ranks, overwrite=settings.overwrite)
    launcher.start(name)
    found = launcher.attach(name)
    if found["status"] != "finished":
        raise RunError(
            f"stage {name} {found['status']}: {found['reason']}; see runs/{name}/launch.log, then run the recipe again to continue"
        )


def results_table(name: str, prefix: str, bound: list[Bound]) -> Table:
    """Stage, seconds, and the numbers that the evaluation runs hold. prefix: where the recipe's runs lie."""
    ledger = Ledger.read(runs_dir() / prefix / "stages.json")
    table = Table("stage", "seconds", "result", title=f"recipe {name}")
    for b in bound:
        row = ledger.rows.get(b.name, {})
        table.add_row(b.name, f"{row['seconds']:.0f}" if row else "", b.stage.result(b.cfg) if row else "")
    return table


def list_recipes(console: Console) -> None:
    """Every recipe, what it changed and why, and its stages; those that a recipe above has are only named."""
    seen: set[str] = set()
    for name, (about, stages) in RECIPES.items():
        console.print(f"{name}: {about}", highlight=False, soft_wrap=True)
        if shared := [stage.name for stage in stages if stage.name in seen]:
            console.print(f"  shared: {', '.join(shared)}", style="dim", highlight=False, soft_wrap=True)
        wide = max(len(stage.name) for stage in stages)
        for stage in stages:
            if stage.name not in seen:
                console.print(f"  {stage.name:<{wide}}  {stage.about}", highlight=False, soft_wrap=True)
        seen |= {stage.name for stage in stages}


def gathered(argv: list[str], flag: str) -> list[str]:
    """The words with a flag that may be given several times given once, with all of its values."""
    rest, values, taking = [], [], False
    for word in argv:
        if word.startswith("--"):
            taking = word.partition("=")[0] == flag
            (values if taking else rest).extend(
                [word.partition("=")[2]] if taking and "=" in word else [] if taking else [word]
            )
        else:
            (values if taking else rest).append(word)
    return [*rest, *([flag, *values] if values else [])]


def main(argv: list[str] | None = None) -> None:
    """`codechat run NAME [--from STAGE] [--force STAGE]`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    names = [argv.pop(0)] if argv and not argv[0].startswith("-") else []
    cfg = config.parse(RecipeConfig, gathered(argv, "--defect"), prog="codechat run NAME", epilog=__doc__)
    console = Console()
    if cfg.list or not names:
        return list_recipes(console)
    bound = run_recipe(names[0], cfg, console)
    console.print(results_table(names[0], prefix_of(names[0], cfg), bound))
    index = ROOT / "reports" / "index.html"
    if index.exists():
        console.print(f"report: {index}", highlight=False)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
