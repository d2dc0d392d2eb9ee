"""`codechat launch`: write, start, follow and stop a run; or a whole recipe in a process of its own, with a log for each stage.

    codechat launch sft --nproc 8 -- --preset d20 --data-dir data/sft --run-name my-sft
    codechat launch my-sft start
    codechat launch my-sft status
    codechat launch my-sft tail                   follow the metrics; Ctrl-C stops following, not the run
    codechat launch my-sft stop                   a checkpoint, then the end
    codechat launch sft --nproc 8 --nodes 2 --slurm -- --preset 8b --data-dir data/sft --run-name big-sft

    codechat launch v6                            what is not finished of a recipe, detached
    codechat launch v6 v6-rl --scale 8b --yes     this stage and every stage after it, again
    codechat launch v6 status                     its process, its stages, its logs; also tail and stop
    codechat launch v6 --force plain-calls --seed 1

The options of a recipe are those of `codechat run`. Its logs and process lie in runs/nano/launch/v6/ (runs/nano-8b/launch/v6/ at
--scale 8b): recipe.log, STAGE.log. Without --scale and --seed the other actions mean the launch that was begun last.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from codechat.core import config, registry
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError, nearest
from codechat.launch import launcher, runner
from codechat.launch.launcher import FAILED, LAUNCHABLE, SAVE_S
from codechat.launch.recipes import RECIPES, Bound, find_scale
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

    action: str = opt("start", "start, status, tail, stop, or a stage to start from", positional=True)
    now: bool = opt(False, "stop: kill instead of asking to save")

    @property
    def logs_at(self) -> Path:
        """Where process and logs of this launch lie."""
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
    commands = {entry.command: id for id, entry in LAUNCHABLE.items()}
    if cfg.what and paths.exists(cfg.what) and cfg.what not in commands:
        raise ConfigError(f"{cfg.what} is a run; add one of start, status, tail, stop")
    entry = registry.find(commands.get(cfg.what, cfg.what), LAUNCHABLE)
    settings = config.parse(entry.config_class, words, presets=entry.presets, prog=f"codechat launch {cfg.what} --")
    return launcher.write(settings, **{f.name: getattr(cfg, f.name) for f in fields(launcher.Machines)})


# ---- a recipe


def recipe_main(argv: list[str]) -> int:
    """`codechat launch RECIPE`."""
    cfg = config.parse(RecipeLaunch, argv, prog="codechat launch RECIPE", epilog=__doc__)
    if cfg.action not in ("status", "tail", "stop"):
        print(f"started; logs: {start(cfg)}; codechat launch {cfg.recipe} tail")
        return 0
    where = begun(cfg)
    if cfg.action == "stop":
        print(f"{cfg.recipe}: {stop(where, now=cfg.now)}")
        return 0
    if cfg.action == "tail":
        logs = lambda: sorted(where.glob("*.log"), key=lambda p: p.stat().st_mtime)  # noqa: E731
        launcher.follow(launcher.new_lines(logs, lambda: bool(launcher.process_of(where)), 1.0), cfg.recipe)
    return print_rows(status(where))


def start(cfg: RecipeLaunch) -> Path:
    """Start `codechat run` in a session of its own; returns the folder of its logs at once. ConfigError for what `codechat run` would
    reject, RunError where the recipe runs already."""
    where, values = cfg.logs_at, {f.name: getattr(cfg, f.name) for f in fields(runner.RecipeConfig)}
    bound = cfg.bound
    if cfg.action != "start":
        stages = [b.stage.name for b in bound]
        if cfg.action not in stages or cfg.from_stage not in (None, cfg.action):
            raise ConfigError(f"{cfg.action!r} with --from {cfg.from_stage}: neither an action nor the stage to start from"
                              f"{nearest(cfg.action, stages)}")  # fmt: skip
        values["from_stage"] = cfg.action
    if cfg.logs:
        raise ConfigError(f"--logs {cfg.logs}: a launched recipe logs to {where}; leave it out")
    command = runner.RecipeConfig(**values | {"logs": where})
    runner.pending(bound, runner.Ledger.read(cfg.folder / "stages.json"), command)
    runner.check_parents(bound, command)
    if find_scale(cfg.scale) and not cfg.yes:
        raise ConfigError(f"a detached recipe cannot ask; `codechat run {cfg.recipe} --scale {cfg.scale}` prints the plan, --yes starts it")  # fmt: skip
    if process := launcher.process_of(where):
        raise RunError(f"recipe {cfg.recipe} runs as process {process['pid']} on {process['host']}; "
                       f"stop it first: codechat launch {cfg.recipe} stop")  # fmt: skip
    where.mkdir(parents=True, exist_ok=True)
    write_json(where / "settings.json", config.plain(command))
    words = [sys.executable, "-m", "codechat", "run", "--config", str(where / "settings.json")]
    launcher.start_detached(words, where, "recipe.log")
    return where


def begun(cfg: RecipeLaunch) -> Path:
    """The folder of a launch that was begun: the one that scale and seed name, else the newest."""
    name, files = Path(cfg.recipe).stem, [cfg.logs_at / "process.json"]
    if not (cfg.scale or cfg.seed):
        patterns = (f"*/launch/{name}/process.json", f"*/launch/{name}-s*/process.json")
        files = sorted((p for some in patterns for p in runs_dir().glob(some)), key=lambda p: p.stat().st_mtime)
    if not files or not files[-1].is_file():
        raise MissingFile(f"recipe {cfg.recipe} was not launched; `codechat launch {cfg.recipe}` starts it")
    return files[-1].parent


def stages_of(where: Path) -> tuple[list[Bound], runner.Ledger, runner.RecipeConfig]:
    """The stages of a launch as it was started, and what is finished of them."""
    cfg = config.from_dict(runner.RecipeConfig, read_json(where / "settings.json"))
    return cfg.bound, runner.Ledger.read(where.parent.parent / "stages.json"), cfg


def status(where: Path) -> dict[str, Any]:
    """{recipe, status, reason, process, logs, then the state of each stage}; what did not finish has the state of the stage where it ended."""
    process, (bound, ledger, cfg) = launcher.process_of(where), stages_of(where)
    states = {b.name: _state(b, ledger) for b in bound}
    left, _ = runner.pending(bound, ledger, replace(cfg, from_stage=None, force=()))
    state, reason = "running" if process else "finished", None
    if not process and any(states[b.name] != "skipped" for b in bound if b.stage.name in left):
        reason = launcher.error_line(where / "recipe.log") or ""
        ended = [state for state in (*FAILED, "stopped") if state in states.values()]
        state = ended[0] if ended else "failed" if reason.startswith("error: ") else "stopped"
    about = {"recipe": cfg.recipe, "status": state, "reason": reason, "process": process["pid"] if process else None}
    return about | {"logs": where} | states


def _state(b: Bound, ledger: runner.Ledger) -> str:
    if ledger.holds(b) and b.done:
        return "finished"
    if b.when and not any(paths.ROOT.glob(b.when)):
        return "skipped" if ledger.rows and all(need in ledger.rows for need in b.stage.needs) else "waiting"
    state = read_status(runs_dir() / b.run_name)["status"] if b.run_name and paths.exists(b.run_name) else "waiting"
    return "waiting" if state == "finished" else state  # finished with other settings


def stop(where: Path, *, now: bool = False, timeout_s: float = SAVE_S) -> str:
    """End the recipe, then the stage that torchrun runs for it; a stage that trains saves a checkpoint first. RunError where nothing runs."""
    process, (bound, _, cfg) = launcher.process_of(where), stages_of(where)
    if process:
        launcher.end(f"recipe {cfg.recipe}", process, now, timeout_s)
    launched = [b.run_name for b in bound if b.run_name and launcher.process_of(runs_dir() / b.run_name)]
    for name in launched:
        launcher.stop(name, now=now, timeout_s=timeout_s)
    if not (process or launched):
        raise RunError(f"recipe {cfg.recipe} is not running")
    return status(where)["status"]
