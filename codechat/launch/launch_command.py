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
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from codechat.core import config, registry
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError, nearest
from codechat.launch import job_scripts, launcher, runner
from codechat.launch.launcher import FAILED, LAUNCHABLE
from codechat.launch.recipes import RECIPES, Bound, bound_stages, find_scale, prefix_of
from codechat.runs import paths
from codechat.runs.paths import exists, name_of, read_status, runs_dir

# ---- a run


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to launch, or what to do with a launched run. Settings of the loop follow after a lone --."""

    what: str = opt("", "a loop (pretrain, sft, ...) to write, or the name of a run", positional=True)
    action: Literal["write", "start", "status", "tail", "stop"] = opt("write", "what to do", positional=True)
    nproc: int = opt(1, "ranks per node: one per GPU")
    nodes: int = opt(1, "machines; more than one needs --slurm, and shards within each (HSDP)")
    gpu: str | None = opt(None, "GPU to plan for, such as a800-80gb; `codechat plan --list` names them")
    devices: tuple[str, ...] = opt(
        (), "CUDA_VISIBLE_DEVICES: indices or UUIDs (GPU-...); empty = as the environment says"
    )
    max_restarts: int = opt(0, "times that torchrun starts all ranks again after one died")
    slurm: bool = opt(False, "also write job.slurm")
    scripts: Path | None = opt(None, "folder for a portable NAME.sh and NAME.json as well")
    hours: float = opt(24.0, "time limit of a job, hours")
    job_lines: tuple[str, ...] = opt(
        (), "one more option of a job script, such as --partition=gpu; may be repeated", verbatim=True
    )
    overwrite: bool = opt(False, "replace a run of this name that has begun")
    start: bool = opt(False, "start it at once")
    now: bool = opt(False, "stop: kill instead of asking to save")

    def __post_init__(self) -> None:
        if not self.what:
            raise ConfigError(f"launch what? name a loop ({', '.join(LAUNCHABLE)}), a recipe (v6) or a run")

    @property
    def kind(self) -> Literal["shell", "slurm"]:
        return "slurm" if self.slurm else "shell"


def _write(cfg: LaunchConfig, words: list[str]) -> None:
    if cfg.what not in LAUNCHABLE and (runs_dir() / cfg.what).is_dir():
        raise ConfigError(f"{cfg.what} is a run; add one of start, status, tail, stop")
    commands = {entry.command: id for id, entry in LAUNCHABLE.items()}
    entry = registry.find(commands.get(cfg.what, cfg.what), LAUNCHABLE)
    settings = config.parse(entry.config_class, words, presets=entry.presets, prog=f"codechat launch {cfg.what} --")
    same = ("nproc", "nodes", "devices", "max_restarts", "hours", "gpu", "kind", "overwrite", "scripts")
    written = launcher.write(settings, **{name: getattr(cfg, name) for name in same}, lines=cfg.job_lines)
    print(written)
    if cfg.start:
        launcher.start(written)
        print(f"started; codechat launch {written.name} tail")


def _is_recipe(argv: list[str]) -> bool:
    """Whether the first word names a recipe or its file, and neither a loop nor a run."""
    if not argv or argv[0].startswith("-") or argv[0] in LAUNCHABLE:
        return False
    return argv[0].endswith(".toml") or argv[0] in RECIPES and not paths.is_run(runs_dir() / argv[0])


# ---- a recipe


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
    name = Path(cfg.recipe).stem + (f"-s{cfg.seed}" if cfg.seed else "")
    return runs_dir() / prefix_of(cfg.recipe, cfg.scale) / "launch" / name


def begun(cfg: RecipeLaunch) -> Path:
    """The folder of a launch that was begun: the one that scale and seed name, else the newest. MissingFile where there is none."""
    if cfg.scale or cfg.seed:
        found = [folder(cfg) / "process.json"]
    else:
        name = Path(cfg.recipe).stem
        both = (f"*/launch/{name}/process.json", f"*/launch/{name}-s*/process.json")
        found = sorted((p for pattern in both for p in runs_dir().glob(pattern)), key=lambda p: p.stat().st_mtime)
    if not found or not found[-1].is_file():
        raise MissingFile(f"recipe {cfg.recipe} was not launched; `codechat launch {cfg.recipe}` starts it")
    return found[-1].parent


# ---- actions


def start(cfg: RecipeLaunch) -> Path:
    """Start `codechat run` in a session of its own; returns its folder at once. ConfigError for what `codechat run` would reject, RunError where the
    recipe runs already."""
    wish, where = cfg.wish, folder(cfg)
    bound = _bound(cfg.recipe, wish)
    words = (*ACTIONS, *(b.stage.name for b in bound))
    if cfg.action not in words:
        raise ConfigError(
            f"{cfg.action!r} is neither an action nor a stage of {cfg.recipe}{nearest(cfg.action, words)}"
        )
    runner.pending(bound, runner.Ledger.read(_ledger(cfg)), wish)
    if find_scale(wish.scale) and not wish.yes:
        raise ConfigError(
            f"a detached recipe cannot ask; `codechat run {cfg.recipe} --scale {wish.scale}` prints the plan and asks, --yes starts it"
        )
    if found := launcher.process_of(where):
        raise RunError(
            f"recipe {cfg.recipe} runs as process {found['pid']} on {found['host']}; stop it first: codechat launch {cfg.recipe} stop"
        )
    where.mkdir(parents=True, exist_ok=True)
    write_json(where / "settings.json", config.plain(wish))
    words = [sys.executable, "-m", runner.__name__, cfg.recipe, "--config", str(where / "settings.json")]
    launcher.start_detached(words, where, "recipe.log")
    return where


def _ledger(cfg: runner.RecipeConfig) -> Path:
    return runs_dir() / prefix_of(cfg.recipe, cfg.scale) / "stages.json"


def _bound(recipe: str, cfg: runner.RecipeConfig) -> list[Bound]:
    return bound_stages(recipe, cfg.scale, cfg.seed, cfg.settings)


def _stages(where: Path, recipe: str) -> tuple[list[Bound], runner.Ledger]:
    """The stages of a launch as it was started, and what is finished of them."""
    cfg = config.from_dict(runner.RecipeConfig, read_json(where / "settings.json"))
    return _bound(recipe, cfg), runner.Ledger.read(where.parent.parent / "stages.json")


def status(cfg: RecipeLaunch) -> dict[str, Any]:
    """{recipe, status, reason, process, logs, stages: {name: state}}."""
    where = begun(cfg)
    process = launcher.process_of(where)
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
    if ledger.holds(b) and b.done:
        return "finished"
    if b.when and not any(paths.ROOT.glob(b.when)):
        return "skipped" if ledger.rows and all(need in ledger.rows for need in b.stage.needs) else "waiting"
    name = getattr(b.cfg, "run_name", None)
    found = read_status(runs_dir() / name)["status"] if name and exists(name) else "waiting"
    return "waiting" if found == "finished" else found  # finished with other settings


def stop(cfg: RecipeLaunch, timeout_s: float = job_scripts.SAVE_S) -> str:
    """End the recipe, then the stage that torchrun runs for it; a stage that trains saves a checkpoint first. RunError where nothing runs."""
    where = begun(cfg)
    process, bound = launcher.process_of(where), _stages(where, cfg.recipe)[0]
    if process:
        launcher.end(f"recipe {cfg.recipe}", process, cfg.now, timeout_s)
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


def tail(cfg: RecipeLaunch, every_s: float = 1.0) -> None:
    """Print what the logs hold and get, until the recipe ends. An interrupt ends the following, not the recipe."""
    where, seen, going = begun(cfg), {}, True
    try:
        while going:
            going = launcher.process_of(where) is not None  # before reading, so that the last lines are read too
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
    return found["status"] == "stopped" and (error or any(s in FAILED for s in found["stages"].values()))


def recipe_main(argv: list[str]) -> int:
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


def main(argv: list[str] | None = None) -> int | None:
    """`codechat launch`; 1 where `status` or `tail` find that the run failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if _is_recipe(argv):
        return recipe_main(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    cfg = config.parse(LaunchConfig, argv[:at], prog="codechat launch", epilog=__doc__)
    if cfg.action == "write":
        return _write(cfg, argv[at + 1 :])
    if at < len(argv):
        raise ConfigError(f"settings after -- are for writing a launch; {cfg.action} takes none")
    if cfg.action == "start":
        path = launcher.start(cfg.what)
        print(f"started; codechat launch {name_of(path)} tail")
    elif cfg.action == "tail":
        return int(launcher.attach(cfg.what)["status"] in FAILED)
    elif cfg.action == "stop":
        print(f"{cfg.what}: {launcher.stop(cfg.what, now=cfg.now)}")
    else:
        found = launcher.status(cfg.what)
        for key, value in found.items():
            print(f"  {key:<20}{value}")
        return int(found["status"] in FAILED)
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
