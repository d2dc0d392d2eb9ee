"""`codechat launch`: write, start, follow and stop a run, or a whole detached recipe.

    codechat launch sft --nproc 8 -- --preset d20 --data-dir data/sft --run-name my-sft
    codechat launch my-sft start
    codechat launch my-sft status
    codechat launch my-sft tail                   follow the metrics; Ctrl-C stops following, not the run
    codechat launch my-sft stop                   saves a checkpoint, then ends
    codechat launch sft --nproc 8 --nodes 2 -- --preset 8b --data-dir data/sft --run-name big-sft

    codechat launch v6                            the unfinished stages of a recipe, detached
    codechat launch v6 --from v6-rl --scale 8b --yes
    codechat launch v6 status --scale 8b          its process, its stages, its log; also tail and stop
    codechat launch v6 --force plain-calls --seed 1

A recipe takes the options of `codechat run`; its process id and recipe.log are in runs/nano/launch/v6/ (runs/nano-8b/launch/v6/ at
--scale 8b). status, tail and stop need the same --scale and --seed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from codechat.core import config, registry
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.launch import launcher, runner
from codechat.launch.launcher import FAILED, LAUNCHABLE
from codechat.launch.recipes import RECIPES, Bound
from codechat.runs import paths
from codechat.runs.paths import name_of, read_status, runs_dir


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(launcher.Machines):
    """What to launch, or what to do with a launched run. Settings of the loop follow after a lone --."""

    what: str = opt("", "a loop (pretrain, sft, ...) to write, or the name of a run", positional=True)
    action: Literal["write", "start", "status", "tail", "stop"] = opt("write", "what to do", positional=True)
    start: bool = opt(False, "start it at once")
    now: bool = opt(False, "stop: kill instead of asking to save")


@dataclass(frozen=True, kw_only=True)
class RecipeLaunch(runner.RecipeConfig):
    """A recipe and what to do with it; the options are those of `codechat run`."""

    action: Literal["start", "status", "tail", "stop"] = opt("start", "what to do", positional=True)
    now: bool = opt(False, "stop: kill instead of asking to save")

    @property
    def where(self) -> Path:
        """Where process and log of this launch lie."""
        return self.folder / "launch" / (Path(self.recipe).stem + (f"-s{self.seed}" if self.seed else ""))


def main(argv: list[str]) -> int:
    """`codechat launch`; 1 where `status` or `tail` find a failure. A loop or a run of the name of a recipe comes first."""
    what = argv[0] if argv and argv[0] not in LAUNCHABLE else ""
    is_recipe = what.endswith(".toml") or what in RECIPES and not paths.exists(what)
    return recipe_main(argv) if is_recipe else run_main(argv)


def print_rows(rows: Mapping[str, Any]) -> int:
    """Print a status; 1 where it is one of a failure."""
    for key, value in rows.items():
        print(f"  {key:<20}{'' if value is None else value}".rstrip())
    return int(rows["status"] in FAILED)


# ---- a run


def run_main(argv: list[str]) -> int:
    """`codechat launch LOOP` or RUN."""
    at = argv.index("--") if "--" in argv else len(argv)
    cfg = config.parse(LaunchConfig, argv[:at], prog="codechat launch", epilog=__doc__)
    if cfg.action == "write":
        written = write(cfg, argv[at + 1 :])
        print(written)
        if not cfg.start:
            return 0
    elif at < len(argv):
        raise ConfigError(f"settings after -- are for writing a launch; {cfg.action} takes none")
    if cfg.action == "tail":
        return int(launcher.attach(cfg.what)["status"] in FAILED)
    if cfg.action == "status":
        return print_rows(launcher.status(cfg.what))
    if cfg.action == "stop":
        print(f"{cfg.what}: {launcher.stop(cfg.what, now=cfg.now)}")
    else:
        path = launcher.start(written.path if cfg.start else cfg.what)
        print(f"started; codechat launch {name_of(path)} tail")
    return 0


def write(cfg: LaunchConfig, words: list[str]) -> launcher.Written:
    entry = registry.find(cfg.what, LAUNCHABLE)
    settings = config.parse(entry.config_class, words, presets=entry.presets, prog=f"codechat launch {cfg.what} --")
    return launcher.write(settings, **{f.name: getattr(cfg, f.name) for f in fields(launcher.Machines)})


# ---- a recipe


def recipe_main(argv: list[str]) -> int:
    """`codechat launch RECIPE`."""
    cfg = config.parse(RecipeLaunch, argv, prog="codechat launch RECIPE", epilog=__doc__)
    if cfg.action == "start":
        print(f"started; log: {start(cfg)}/recipe.log; codechat launch {cfg.recipe} tail")
        return 0
    if not (cfg.where / "process.json").is_file():
        raise MissingFile(f"no launch of recipe {cfg.recipe} in {cfg.where}; give the --scale and --seed that it had")
    if cfg.action == "stop":
        print(f"{cfg.recipe}: {stop(cfg.where, now=cfg.now)}")
        return 0
    if cfg.action == "tail":
        lines = launcher.new_lines(cfg.where / "recipe.log", lambda: bool(launcher.process_of(cfg.where)))
        launcher.follow(lines, cfg.recipe)
    return print_rows(status(cfg.where))


def start(cfg: RecipeLaunch) -> Path:
    """Start `codechat run` in a session of its own; returns the folder of its log at once. ConfigError for stages that do not exist,
    RunError where the recipe runs already."""
    command = runner.RecipeConfig(**{f.name: getattr(cfg, f.name) for f in fields(runner.RecipeConfig)})
    runner.pending(command)
    launcher.check_not_started(cfg.recipe, cfg.where)
    cfg.where.mkdir(parents=True, exist_ok=True)
    write_json(cfg.where / "settings.json", config.plain(command))
    words = [sys.executable, "-m", "codechat", "run", "--config", str(cfg.where / "settings.json")]
    launcher.start_detached(words, cfg.where, "recipe.log")
    return cfg.where


def launched(where: Path) -> runner.RecipeConfig:
    """What was started there."""
    return config.from_dict(runner.RecipeConfig, read_json(where / "settings.json"))


def status(where: Path) -> dict[str, Any]:
    """{recipe, status, reason, process, log, then the state of each stage}; what did not finish has the state of the stage where it ended."""
    process, cfg = launcher.process_of(where), launched(where)
    states = {b.name: _state(b, cfg.ledger) for b in cfg.bound}
    left, _ = runner.pending(replace(cfg, from_stage=None, force=()))
    state, reason = "running" if process else "finished", None
    if not process and any(b.stage.name in left and not b.waits for b in cfg.bound):
        reason = launcher.error_line(where / "recipe.log") or ""
        ended = [state for state in (*FAILED, "stopped") if state in states.values()]
        state = ended[0] if ended else "failed" if reason.startswith("error: ") else "stopped"
    about = {"recipe": cfg.recipe, "status": state, "reason": reason, "process": process["pid"] if process else None}
    return about | {"log": where / "recipe.log"} | states


def _state(b: Bound, ledger: runner.Ledger) -> str:
    if ledger.holds(b) and b.done:
        return "finished"
    state = read_status(runs_dir() / b.run_name)["status"] if b.run_name and paths.exists(b.run_name) else "waiting"
    return "waiting" if state == "finished" else state  # finished with other settings


def stop(where: Path, *, now: bool = False) -> str:
    """End the recipe, then the stage that torchrun runs for it; a stage that trains saves a checkpoint first. RunError where nothing runs."""
    process, cfg = launcher.process_of(where), launched(where)
    if process:
        launcher.end(f"recipe {cfg.recipe}", process, now)
    stages = [b.run_name for b in cfg.bound if b.run_name and launcher.process_of(runs_dir() / b.run_name)]
    for name in stages:
        launcher.stop(name, now=now)
    if not (process or stages):
        raise RunError(f"recipe {cfg.recipe} is not running")
    return status(where)["status"]
