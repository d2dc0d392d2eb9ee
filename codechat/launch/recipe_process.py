"""A recipe in a process of its own: it outlives the shell that started it, and writes a log for each stage.

    codechat launch v6                            what is not finished, detached
    codechat launch v6 v6-rl --scale 8b --yes     this stage and every stage after it, again
    codechat launch v6 status                     its process, its stages, its logs
    codechat launch v6 tail                       follow the logs; Ctrl-C stops following, not the recipe
    codechat launch v6 stop                       a checkpoint of the running stage, then the end
    codechat launch v6 --force plain-calls --seed 1

The options are those of `codechat run`. Logs and process lie in runs/nano/launch/v6/ (runs/nano-8b/launch/v6/ at --scale 8b): recipe.log, STAGE.log.
Without --scale and --seed the other actions mean the launch that was begun last.

A Slurm job is one stage: `codechat launch LOOP --slurm`.
"""

from __future__ import annotations

import platform
import signal
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from codechat.core import config
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError, nearest
from codechat.core.processes import alive, descendants, process_start
from codechat.launch import job_scripts, launcher
from codechat.launch.recipes import runner
from codechat.launch.recipes.stage import Bound
from codechat.runs import paths
from codechat.runs.paths import exists, read_status, runs_dir

ACTIONS = ("start", "status", "tail", "stop")


@dataclass(frozen=True, kw_only=True)
class RecipeLaunch(runner.RecipeConfig):
    """A recipe and what to do with it; the options are those of `codechat run`."""

    recipe: str = opt("", "recipe", positional=True)
    action: str = opt("start", "start, status, tail, stop, or a stage to start from", positional=True)
    now: bool = opt(False, "stop: kill instead of asking to save")

    @property
    def wish(self) -> runner.RecipeConfig:
        """The part of it that `codechat run` takes; the logs go to `folder`."""
        values = {f.name: getattr(self, f.name) for f in fields(runner.RecipeConfig)}
        if self.action not in ACTIONS:
            if self.from_stage not in (None, self.action):
                raise ConfigError(f"start from {self.action} or from {self.from_stage}? leave out --from")
            values["from_stage"] = self.action
        if self.logs:
            raise ConfigError(f"--logs {self.logs}: a launched recipe logs to {folder(self)}; leave it out")
        return runner.RecipeConfig(**values | {"logs": folder(self)})


def folder(cfg: RecipeLaunch) -> Path:
    """Where process and logs of a launch lie."""
    name = cfg.recipe + (f"-s{cfg.seed}" if cfg.seed else "")
    return runs_dir() / runner.prefix_of(cfg.recipe, cfg) / "launch" / name


def begun(cfg: RecipeLaunch) -> Path:
    """The folder of a launch that was begun: the one that scale and seed name, else the newest. MissingFile where there is none."""
    if cfg.scale or cfg.seed:
        found = [folder(cfg) / "process.json"]
    else:
        both = (f"*/launch/{cfg.recipe}/process.json", f"*/launch/{cfg.recipe}-s*/process.json")
        found = sorted((p for pattern in both for p in runs_dir().glob(pattern)), key=lambda p: p.stat().st_mtime)
    if not found or not found[-1].is_file():
        raise MissingFile(f"recipe {cfg.recipe} was not launched; `codechat launch {cfg.recipe}` starts it")
    return found[-1].parent


def process_of(where: Path) -> dict[str, Any] | None:
    """{host, pid, pid_start, time} of the recipe's process; None where it is gone."""
    launcher.reap()
    file = where / "process.json"
    found = read_json(file) if file.is_file() else None
    return found if found and alive(found) else None


# ---- actions


def start(cfg: RecipeLaunch) -> Path:
    """Start `codechat run` in a session of its own; returns its folder at once. ConfigError for what `codechat run` would reject, RunError where the
    recipe runs already."""
    wish, where = cfg.wish, folder(cfg)
    bound = runner.bound_stages(cfg.recipe, wish)
    words = (*ACTIONS, *(b.stage.name for b in bound))
    if cfg.action not in words:
        raise ConfigError(
            f"{cfg.action!r} is neither an action nor a stage of {cfg.recipe}{nearest(cfg.action, words)}"
        )
    runner.pending(bound, runner.Ledger.read(_ledger(cfg)), wish)
    if runner.scale_of(wish) and not wish.yes:
        raise ConfigError(
            f"a detached recipe cannot ask; `codechat run {cfg.recipe} --scale {wish.scale}` prints the plan and asks, --yes starts it"
        )
    if found := process_of(where):
        raise RunError(
            f"recipe {cfg.recipe} runs as process {found['pid']} on {found['host']}; stop it first: codechat launch {cfg.recipe} stop"
        )
    where.mkdir(parents=True, exist_ok=True)
    write_json(where / "settings.json", config.plain(wish))
    words = [sys.executable, "-m", runner.__name__, cfg.recipe, "--config", str(where / "settings.json")]
    with open(where / "recipe.log", "ab") as log:
        child = launcher.detached(words, log)
    write_json(
        where / "process.json",
        {"host": platform.node(), "pid": child.pid, "pid_start": process_start(child.pid), "time": time.time()},
    )
    return where


def _ledger(cfg: runner.RecipeConfig) -> Path:
    return runs_dir() / runner.prefix_of(cfg.recipe, cfg) / "stages.json"


def _stages(where: Path, recipe: str) -> tuple[list[Bound], runner.Ledger]:
    """The stages of a launch as it was started, and what is finished of them."""
    cfg = config.from_dict(runner.RecipeConfig, read_json(where / "settings.json"))
    return runner.bound_stages(recipe, cfg), runner.Ledger.read(where.parent.parent / "stages.json")


def status(cfg: RecipeLaunch) -> dict[str, Any]:
    """{recipe, status, reason, process, logs, stages: {name: state}}."""
    where = begun(cfg)
    process = process_of(where)
    bound, ledger = _stages(where, cfg.recipe)
    states = {b.name: _state(b, ledger) for b in bound}
    wanted = _wanted(where, bound)
    done = all(state in ("finished", "skipped") for name, state in states.items() if name in wanted)
    found = "running" if process else "finished" if done else "stopped"
    reason = launcher.error_line(where / "recipe.log") if found == "stopped" else None
    return {
        "recipe": cfg.recipe,
        "status": found,
        "reason": reason,
        "process": process["pid"] if process else None,
        "logs": where,
        "stages": states,
    }


def _wanted(where: Path, bound: list[Bound]) -> list[str]:
    """Names of the stages up to --until."""
    until, names = read_json(where / "settings.json").get("until"), [b.stage.name for b in bound]
    last = names.index(until) + 1 if until in names else len(names)
    return [b.name for b in bound[:last]]


def _state(b: Bound, ledger: runner.Ledger) -> str:
    if ledger.holds(b) and b.stage.made(b.cfg):
        return "finished"
    if b.when and not any(paths.ROOT.glob(b.when)):
        return "skipped" if ledger.rows and all(need in ledger.rows for need in b.stage.needs) else "waiting"
    name = getattr(b.cfg, "run_name", None)
    found = read_status(runs_dir() / name)["status"] if name and exists(name) else "waiting"
    return "waiting" if found == "finished" else found  # finished with other settings


def stop(cfg: RecipeLaunch, timeout_s: float = job_scripts.SAVE_S) -> str:
    """End the recipe, then the stage that torchrun runs for it; a stage that trains saves a checkpoint first. RunError where nothing runs."""
    where = begun(cfg)
    process, bound = process_of(where), _stages(where, cfg.recipe)[0]
    if process:
        _end(process, cfg.now, timeout_s)
    stopped = [name for b in bound if (name := getattr(b.cfg, "run_name", None)) and _launched(name)]
    for name in stopped:
        launcher.stop(name, now=cfg.now, timeout_s=timeout_s)
    if not (process or stopped):
        raise RunError(f"recipe {cfg.recipe} is not running")
    return status(cfg)["status"]


def _launched(name: str) -> bool:
    """Whether torchrun runs this run, started by the recipe or an earlier one."""
    path = runs_dir() / name
    return (path / "launch.sh").is_file() and launcher.process_of(path) is not None


def _end(process: dict[str, Any], now: bool, timeout_s: float) -> None:
    if process["host"] != platform.node():
        raise RunError(f"the recipe runs on {process['host']}; stop it there")
    below = descendants(process["pid"]) if now else []
    for pid in (process["pid"], *below):
        launcher.send(pid, signal.SIGKILL if now else signal.SIGTERM)
    ends = time.monotonic() + timeout_s
    while process_start(process["pid"]) == process["pid_start"]:
        if time.monotonic() > ends:
            raise RunError(
                f"process {process['pid']} is still there after {timeout_s:.0f} s; wait longer, or add --now"
            )
        time.sleep(0.1)
        launcher.reap()


def tail(cfg: RecipeLaunch, every_s: float = 1.0) -> None:
    """Print what the logs hold and get, until the recipe ends. An interrupt ends the following, not the recipe."""
    where, seen, going = begun(cfg), {}, True
    try:
        while going:
            going = process_of(where) is not None  # before reading, so that the last lines are read too
            for file in sorted(where.glob("*.log"), key=lambda p: p.stat().st_mtime):
                with open(file, errors="replace") as log:
                    log.seek(seen.get(file, 0))
                    print(log.read(), end="", flush=True)
                    seen[file] = log.tell()
            if going:
                time.sleep(every_s)
    except KeyboardInterrupt:
        print(f"\nstopped following {cfg.recipe}; it is still running")


def has_failed(found: dict[str, Any]) -> bool:
    """Whether a status is that of a recipe that ended with an error, or in a stage that failed; not of one that was stopped."""
    error = (found["reason"] or "").startswith("error: ")
    return found["status"] == "stopped" and (error or any(s in launcher.FAILED for s in found["stages"].values()))


def main(argv: list[str]) -> int:
    """`codechat launch RECIPE`; 1 where `status` or `tail` find that it failed."""
    words = runner.gathered(argv, "--force")
    cfg = config.parse(RecipeLaunch, words, prog="codechat launch RECIPE", epilog=__doc__)
    if cfg.action == "tail":
        tail(cfg)
        return int(has_failed(status(cfg)))
    elif cfg.action == "stop":
        print(f"{cfg.recipe}: {stop(cfg)}")
    elif cfg.action == "status":
        found = status(cfg)
        for key, value in {**{k: v for k, v in found.items() if k != "stages"}, **found["stages"]}.items():
            print(f"  {key:<20}{value if value is not None else ''}".rstrip())
        return int(has_failed(found))
    else:
        where = start(cfg)
        print(f"started; logs: {where}; codechat launch {cfg.recipe} tail")
    return 0
