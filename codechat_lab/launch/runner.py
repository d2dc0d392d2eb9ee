"""Run a recipe: its stages in order; finished ones are skipped.

    codechat run nano                      every stage that is not finished
    codechat run my.toml                   your own recipe (docs/recipes.md)
    codechat run nano --from rl            rl and every stage after it, again; the old runs become rl.1 and so on
    codechat run nano --force evaluate     this stage again, then the stages that need it
    codechat run nano --seed 1             SFT, RL and evaluation of another seed, over the same data and pretraining
    codechat run nano --base my-base       from SFT on, from a checkpoint that exists
    codechat run nano --scale 8b           stages of recipe ours on eight GPUs: prints the plan and asks; --yes launches
    codechat run v6 --scale 8b --settings scripts/v6-8b.json    with the settings of a file of `codechat export-scripts`
    codechat recipes nano                  its stages, without running them

The ledger `runs/NAME/stages.json` holds a hash of each finished stage, over its settings and
the hashes of the stages that it needs. A killed stage resumes from its checkpoint, or
behind its answers, if its settings are the same. A stage without input files (such as GRPO after a filter that kept no
problem) is skipped with a message.

At a larger scale torchrun launches the GPU stages, detached, and the recipe follows them.
Stages without a GPU, such as data, run first, so a machine without GPUs can prepare them. An
interrupted recipe leaves GPU stages running and finds them again when you restart it. `codechat
launch v6` runs a recipe detached: its process id and recipe.log are in runs/nano/launch/v6/
(runs/nano-8b/launch/v6/ at --scale 8b)."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from codechat.core import config, processes
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import SEEDS, opt
from codechat.core.errors import ConfigError, MissingFile, RunError, check_choice
from codechat.evaluation.settings import EXAMPLES
from codechat.runs import paths
from codechat.runs.run import Run
from codechat_lab.instruments.plan_settings import PLANNED_LOOPS
from codechat_lab.launch import launcher
from codechat_lab.launch.recipes import (
    NANO,
    RECIPES,
    Bound,
    Scale,
    bound_stages,
    find_scale,
    prefix_of,
)
from codechat_lab.launch.sheets import SheetConfig, show_recipes

if TYPE_CHECKING:
    from rich.table import Table

AGAIN = "run the recipe again to go on"


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(config.Settings):
    """What to run of a recipe."""

    recipe: str = opt("", "recipe, or the path of its file (MY.toml)", positional=True)
    from_stage: str | None = opt(None, "run this stage and every stage after it again (--from)")
    force: tuple[str, ...] = opt((), "run these stages again, and the stages that need them")
    until: str | None = opt(None, "stop after this stage")
    only: tuple[str, ...] = opt((), "run these stages and those that they need, and no others")
    base: str | None = opt(
        None, "begin at SFT, from this run or checkpoint in place of its pretraining", reads="run"
    )
    seed: int = opt(0, "seed of the stages from SFT on; data and pretraining are shared", **SEEDS)
    scale: str = opt(
        NANO, "size of the models: 2b (one GPU) or 8b (eight GPUs); nano = the recipe as it is"
    )
    overwrite: bool = opt(False, "delete finished runs of stages that changed or run again")
    yes: bool = opt(False, "launch at a larger scale without asking")
    settings: Path | None = opt(
        None, "json file of {stage: settings} from `codechat export-scripts`, used instead"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.settings and self.seed:
            raise ConfigError("--settings names the runs of seed 0; leave out --seed")

    @cached_property
    def bound(self) -> list[Bound]:
        return bound_stages(self.recipe, self.scale, self.seed, self.settings, self.base)

    @property
    def folder(self) -> Path:
        """Where its runs lie."""
        return paths.runs_dir() / prefix_of(self.recipe, self.scale)

    @property
    def ledger(self) -> Path:
        return self.folder / "stages.json"


# ---- what is finished

Ledger = Mapping[str, Mapping[str, Any]]  # stage -> its row: hash, seconds, finished_at


def read_ledger(ledger: Path) -> Ledger:
    """The rows of the finished stages."""
    return read_json(ledger) if ledger.exists() else {}


def note(ledger: Path, name: str, row: Mapping[str, Any] | None) -> None:
    """Set the row of a stage; None removes it. Other seeds and recipes may write beside this
    one, so the file is read again, alone."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with processes.alone(ledger.with_name(f".{ledger.name}.lock")):
        rows = {k: v for k, v in read_ledger(ledger).items() if k != name}
        write_json(ledger, rows | ({name: row} if row else {}))


def is_finished(b: Bound, rows: Ledger) -> bool:
    """Whether the stage was finished with these settings and its result is there."""
    return rows.get(b.name, {}).get("hash") == b.hash and b.done


class Pending(NamedTuple):
    """Names of stages. todo: to run. again: run again by --from and --force, finished or not."""

    todo: set[str]
    again: set[str]


def pending(cfg: RecipeConfig) -> Pending:
    """The stages to run: unfinished ones, forced ones, and every stage that needs one of those."""
    rows = read_ledger(cfg.ledger)
    names = [b.stage.name for b in cfg.bound]
    flags = (cfg.from_stage, cfg.until, *cfg.force, *cfg.only)
    named_by_flags = {name for name in flags if name is not None}
    for name in named_by_flags:
        check_choice("stage", name, names)
    requested = with_needs(cfg.bound, named_by_flags)
    again = set(cfg.force)
    if cfg.from_stage:
        again |= set(names[names.index(cfg.from_stage) :])
    named = frozenset(again)  # `again` grows by the stages that need these
    todo: set[str] = set()
    for b in cfg.bound:
        name = b.stage.name
        needs = set(b.stage.needs)
        if again & needs:
            again.add(name)
        stale = name in named or not is_finished(b, rows) or todo & needs
        if stale and (name in requested or not b.stage.asked):
            todo.add(name)
    if cfg.until:
        todo &= set(names[: names.index(cfg.until) + 1])
    if cfg.only:
        todo &= with_needs(cfg.bound, cfg.only)
    return Pending(todo, again)


def with_needs(bound: Sequence[Bound], names: Iterable[str]) -> set[str]:
    """The stages of these names, and every stage that one of them needs."""
    found = set(names)
    for b in reversed(bound):
        if b.stage.name in found:
            found |= set(b.stage.needs)
    return found


def run_recipe(cfg: RecipeConfig) -> list[Bound]:
    """Run what is pending of a recipe. Raises what a stage raises; finished stages stay
    finished."""
    from rich.console import Console  # not above: --help needs none of it

    scale = find_scale(cfg.scale)
    console = Console(highlight=False)
    rows = read_ledger(cfg.ledger)
    todo, again = pending(cfg)
    ordered = data_first(cfg.bound, scale, todo)
    check_startable(cfg, scale, todo)
    expected = {
        b.name: 0.0 if scale.ranks else b.stage.seconds for b in cfg.bound if b.stage.name in todo
    }
    taken: dict[str, float] = {}
    for number, b in enumerate(ordered, 1):
        title = f"[{number}/{len(ordered)}] {b.name}"
        if b.stage.name not in todo:
            console.print(
                f"{title}: {'finished, skipped' if b.name in rows else 'not requested'}",
                style="dim",
            )
        elif b.waits:
            expected[b.name] = 0.0
            console.print(f"{title}: skipped: {b.stage.needs[0]} left no {b.when}")
        else:
            left = time_left(expected, taken)
            wait = f", about {left / 60:.0f} min to go" if left else ""
            console.rule(f"{title}{wait}: {b.stage.about}", align="left")
            lack = lack_of_gpus(b, scale)
            if lack:
                raise ConfigError(
                    f"{lack}; stages that need none are finished; run "
                    "the recipe again on a machine that has them"
                )
            seconds = run_stage(
                b, cfg.ledger, scale.ranks_of(b.stage), b.stage.name in again, cfg.overwrite
            )
            taken[b.name] = seconds
            console.print(f"{title}: {seconds:.0f} s")
    return cfg.bound


def check_startable(cfg: RecipeConfig, scale: Scale, todo: set[str]) -> None:
    """Before anything runs: ConfigError where a stage would replace what this recipe reads,
    where no stage can run on the GPUs here, or where the launch is not confirmed."""
    waiting = [b for b in cfg.bound if b.stage.name in todo]
    for b in waiting:
        if b.run_name and paths.exists(b.run_name):
            paths.check_not_read(b.run_name, cfg, what=f"stage {b.name} would replace")
    say_missing_gpus(data_first(waiting, scale, todo), scale)
    if scale.ranks and waiting:
        confirm(scale, waiting, cfg.yes)


def time_left(expected: Mapping[str, float], taken: Mapping[str, float]) -> float:
    """Remaining expected seconds, scaled by the slowdown so far. 0 = unknown."""
    known = [name for name in taken if expected[name]]
    remaining = sum(seconds for name, seconds in expected.items() if name not in taken)
    if not known:
        return remaining
    return sum(taken[name] for name in known) / sum(expected[name] for name in known) * remaining


# ---- one stage


def run_stage(b: Bound, ledger: Path, ranks: int, again: bool, overwrite: bool) -> float:
    """Run a stage and enter it in the ledger; returns its seconds. ranks: of torchrun; 0 = in
    this process. again: --from or --force names it or a stage before it."""
    processes.stop.clear()
    began = time.perf_counter()
    path = paths.runs_dir() / (b.run_name or "")
    if ranks and (path / "launch.sh").is_file() and launcher.lives(path):
        launcher.attach(path)  # an earlier `codechat run` launched it
    else:
        # killed between the end of the run and its entry in the ledger
        lost = b.name not in read_ledger(ledger)
        settings = _resume_or_replace(b, again or lost, overwrite)
        note(ledger, b.name, None)
        if ranks:
            launch_stage(settings, ranks)
        else:
            try:
                b.action(settings)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"in stage {b.name}; {AGAIN}") from None
    if not b.done:
        reason = Run.open(b.run_name).status.get("reason") if b.run_name else "no output"
        raise RunError(f"stage {b.name} did not finish: {reason}; {AGAIN}")
    seconds = time.perf_counter() - began
    row = {
        "hash": b.hash,
        "seconds": round(seconds, 1),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    note(ledger, b.name, row)
    if processes.stop.is_set():
        raise KeyboardInterrupt(f"stage {b.name} is finished; {AGAIN}")
    return seconds


def _resume_or_replace(b: Bound, again: bool, overwrite: bool) -> Any:
    """The configuration to run the stage with. An unfinished run resumes where it has a
    checkpoint or answers of the same settings, and is written again where it has none.

    A finished run is deleted with `overwrite`, and moved to NAME.1, NAME.2, ... with `again`;
    otherwise ConfigError."""
    if b.run_name is None or not paths.exists(b.run_name):
        return b.cfg
    old = Run.open(b.run_name)
    changes = _changes(old.config, config.identity(b.cfg))
    if old.status["status"] != "finished":
        kept = old.checkpoints() or (old.path / EXAMPLES).exists()
        if hasattr(b.cfg, "resume") and kept and not changes:
            return replace(b.cfg, resume=True)
        return replace(b.cfg, overwrite=True)
    if overwrite:
        return replace(b.cfg, overwrite=True)
    if not again:
        raise ConfigError(
            f"stage {b.name} is finished and has changed ({', '.join(changes) or 'what it starts from'}); "
            f"--from {b.stage.name} keeps its run under another name and runs it again, --overwrite deletes it"
        )
    paths.check_not_read(b.run_name, b.cfg, what="running the stage again would rename")
    paths.move_away(b.run_name)
    return b.cfg


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that differ, as "lr 0.1 -> 0.2". A run fills in its model and what is None:
    these do not count."""
    return [
        f"{name} {old[name]!r} -> {value!r}"
        for name, value in new.items()
        if name in old and name != "model" and value is not None and old[name] != value
    ]


# ---- larger scales


def confirm(scale: Scale, bound: list[Bound], yes: bool) -> None:
    """Print the plan of the stages to launch, and ask unless `yes`. ConfigError if the plan
    does not fit, without a terminal to ask, or if the answer is no."""
    from codechat_lab.instruments import planner  # it imports torch

    hours = 0.0
    for b in bound:
        if not scale.gpu or PLANNED_LOOPS.get(b.stage.kind, "rl") == "rl":
            print(f"{b.name}: not planned, {b.stage.about}")
            continue
        plan = planner.make(
            planner.from_settings(b.cfg, gpus=scale.ranks_of(b.stage), gpu=scale.gpu)
        )
        print(f"{b.name}: {plan.verdict}")
        if not plan.fits:
            raise ConfigError(
                f"stage {b.name}: {plan.verdict}; the settings are in codechat_lab/recipes/scales"
            )
        hours += plan.hours
    gpus = max(scale.ranks_of(b.stage) for b in bound)
    print(f"planned: {hours:,.1f} hours on {in_gpus(gpus)}; sampling and data come on top")
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "no terminal to ask for a confirmation; --yes launches what is planned above"
        )
    if input("launch? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("not launched; finished stages stay finished")


def data_first(bound: list[Bound], scale: Scale, todo: set[str]) -> list[Bound]:
    """The stages that need no GPU, nor a pending result of one that does, then the others; each
    in order."""
    late: set[str] = set()
    for b in bound:
        if b.stage.name in todo and (scale.ranks_of(b.stage) or late & set(b.stage.needs)):
            late.add(b.stage.name)
    return sorted(bound, key=lambda b: b.stage.name in late)


def say_missing_gpus(bound: list[Bound], scale: Scale) -> None:
    """If a stage needs more GPUs than there are, print which ones can run here. ConfigError if
    none can."""
    able: list[str] = []
    for b in bound:
        lack = lack_of_gpus(b, scale)
        if lack and not able:
            raise ConfigError(f"{lack}; run the recipe on a machine that has them")
        if lack:
            print(
                f"{lack}: only {', '.join(able)} will run here; then run "
                "the recipe again on a machine that has them"
            )
            return
        able.append(b.name)


def lack_of_gpus(b: Bound, scale: Scale) -> str:
    """What a stage lacks on this machine; "" if nothing."""
    ranks = scale.ranks_of(b.stage)
    here = gpus_here() if scale.gpu else ranks
    return f"stage {b.name} needs {in_gpus(ranks)} and there are {here}" if here < ranks else ""


def in_gpus(n: int) -> str:
    return f"{n} GPU" if n == 1 else f"{n} GPUs"


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def launch_stage(settings: Any, ranks: int) -> None:
    """Start a stage by torchrun, detached, and follow it to its end. RunError if it does not
    finish."""
    name = settings.run_name
    stopped = (
        getattr(settings, "resume", False) and (paths.runs_dir() / name / "launch.sh").is_file()
    )
    if not stopped:  # launch.sh resumes by itself
        machines = launcher.Machines(nproc=ranks, overwrite=settings.overwrite)
        launcher.write(replace(settings, overwrite=False), machines)
    launcher.start(name)
    state = launcher.attach(name)
    if state["status"] != "finished":
        raise RunError(
            f"stage {name} {state['status']}: {state['reason']}; see runs/{name}/launch.log, "
            "then run the recipe again to continue"
        )


# ---- detached


@dataclass(frozen=True, kw_only=True)
class RecipeLaunch(RecipeConfig):
    """A recipe and what to do with it; the options are those of `codechat run`."""

    action: Literal["start", "status", "tail", "stop"] = opt("start", "what to do", positional=True)
    now: bool = opt(False, "stop: kill instead of asking to save")

    @property
    def where(self) -> Path:
        """The folder of this launch's process and log."""
        return (
            self.folder
            / "launch"
            / (Path(self.recipe).stem + (f"-s{self.seed}" if self.seed else ""))
        )


def launch(argv: list[str]) -> int | None:
    """`codechat launch`, of a recipe or a run; 1 where `status` or `tail` find a failure. A run
    wins over a recipe of the same name."""
    what = argv[0] if argv else ""
    if not what.endswith(".toml") and (what not in RECIPES or paths.exists(what)):
        return launcher.main(argv)
    cfg = config.parse(RecipeLaunch, argv, prog="codechat launch RECIPE", epilog=launcher.__doc__)
    where = cfg.where
    if cfg.action == "start":
        start_recipe(cfg)
        return print(f"started; log: {where}/recipe.log; codechat launch {what} tail")
    if not (where / "process.json").is_file():
        raise MissingFile(
            f"no launch of recipe {what} in {where}; give the --scale and --seed that it had"
        )
    if cfg.action == "stop":
        return print(f"{what}: {stop_recipe(where, now=cfg.now)}")
    if cfg.action == "tail":
        launcher.follow(
            launcher.new_lines(where / "recipe.log", lambda: bool(launcher.process_of(where))), what
        )
    return launcher.print_rows(recipe_status(where))


def start_recipe(cfg: RecipeLaunch) -> None:
    """Start `codechat run` as a detached process. ConfigError for stages that do not exist,
    RunError if the recipe runs already."""
    pending(cfg)  # before anything is written
    launcher.check_not_started(cfg.recipe, cfg.where)
    cfg.where.mkdir(parents=True, exist_ok=True)
    settings = cfg.where / "settings.json"
    write_json(settings, {f.name: config.plain(getattr(cfg, f.name)) for f in fields(RecipeConfig)})
    launcher.start_detached(
        [sys.executable, "-m", "codechat", "run", "--config", str(settings)],
        cfg.where,
        "recipe.log",
        cfg.recipe,
    )


def launched(where: Path) -> RecipeConfig:
    """What was started there."""
    return config.from_dict(RecipeConfig, read_json(where / "settings.json"))


def recipe_status(where: Path) -> dict[str, Any]:
    """{recipe, status, reason, process, log, then the state of each stage}. A recipe that ended
    early has the status of the stage that ended it."""
    process = launcher.process_of(where)
    cfg = launched(where)
    rows = read_ledger(cfg.ledger)
    states = {b.name: _state(b, rows) for b in cfg.bound}
    todo, _ = pending(replace(cfg, from_stage=None, force=()))
    status = "running" if process else "finished"
    reason = None
    if not process and any(b.stage.name in todo and not b.waits for b in cfg.bound):
        reason = launcher.error_line(where / "recipe.log") or ""
        usual = "failed" if reason.startswith("error: ") else "stopped"
        status = next(
            (state for state in (*launcher.FAILED, "stopped") if state in states.values()), usual
        )
    return {
        "recipe": cfg.recipe,
        "status": status,
        "reason": reason,
        "process": process["pid"] if process else None,
        "log": where / "recipe.log",
    } | states


def _state(b: Bound, rows: Ledger) -> str:
    if is_finished(b, rows):
        return "finished"
    if not b.run_name or not paths.exists(b.run_name):
        return "waiting"
    status = paths.read_status(paths.runs_dir() / b.run_name)["status"]
    return "waiting" if status == "finished" else status  # finished with other settings


def stop_recipe(where: Path, *, now: bool = False) -> str:
    """End the recipe, then the stage that torchrun runs for it; a stage that trains saves a
    checkpoint first. RunError where nothing runs."""
    process = launcher.process_of(where)
    cfg = launched(where)
    if process:
        launcher.end(f"recipe {cfg.recipe}", process, now, where)
    stages = [
        b.run_name
        for b in cfg.bound
        if b.run_name and launcher.process_of(paths.runs_dir() / b.run_name)
    ]
    for name in stages:
        launcher.stop(name, now=now)
    if not (process or stages):
        raise RunError(f"recipe {cfg.recipe} is not running")
    return recipe_status(where)["status"]


# ---- what people see

SUMMARY = ("val_bpb", "exact_match", "pass@1", "pass@8", "reward_mean")


def results_table(cfg: RecipeConfig) -> "Table":
    """Stage, seconds, and the last evaluations of its run."""
    from rich.table import Table

    rows = read_ledger(cfg.ledger)
    table = Table("stage", "seconds", "result", title=f"recipe {cfg.recipe}")
    for b in cfg.bound:
        result = ""
        if b.name in rows and b.run_name and b.done:  # a finished run may be deleted since
            evals = Run.open(b.run_name).evals().to_dict("records")
            last = 4 if b.stage.name.endswith("evaluate") else 1
            result = "\n".join(map(_in_words, evals[-last:]))
        table.add_row(b.name, f"{rows[b.name]['seconds']:.0f}" if b.name in rows else "", result)
    return table


def _in_words(row: Mapping[str, Any]) -> str:
    """An evaluation on one line."""
    words = [
        str(row[name])
        for name in ("checkpoint", "split", "verdict")
        if isinstance(row.get(name), str)
    ]
    for name, value in row.items():
        if (name in SUMMARY or name.startswith("heldout_loss/")) and isinstance(value, float):
            words.append(f"{name} {value:.3f}")
    return " ".join(words)


def main(cfg: RecipeConfig) -> None:
    """`codechat run NAME [--from STAGE] [--force STAGE]`."""
    if not cfg.recipe:
        return show_recipes(SheetConfig())
    from rich.console import Console

    run_recipe(cfg)
    Console().print(results_table(cfg))
