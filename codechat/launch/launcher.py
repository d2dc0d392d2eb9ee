"""Start a run from a notebook cell or a shell, detached, and find it again.

    written = launch.write(cfg, nproc=8)      # runs/NAME/config.json and launch.sh, what differs from the defaults, the plan
    launch.start(written)                     # its own session: it survives a restarted kernel or a closed terminal
    launch.attach("my-sft")                   # follow the metrics; Ctrl-C (interrupt) stops following, not the run
    launch.stop("my-sft")                     # a checkpoint, then the end

    codechat launch sft --nproc 8 -- --preset d20 --data-dir data/sft --run-name my-sft
    codechat launch my-sft start
    codechat launch my-sft status
    codechat launch my-sft tail
    codechat launch my-sft stop
    codechat launch v6                                        # a whole recipe, with a log for each stage
    codechat launch sft --nproc 8 --nodes 2 --slurm -- --preset 8b --data-dir data/sft --run-name big-sft

The configuration object of a cell, the file that torchrun reads and the json in the run directory are one. When the run begins, it takes over its
directory; it rejects a config.json that was edited in between.

Jobs are submitted with sbatch; runs on other hosts are stopped there.
"""

from __future__ import annotations

import html
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from codechat.core import config, provenance, registry
from codechat.core.atomic_files import read_json, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.processes import alive, descendants, process_start, unlock
from codechat.distributed import gpu_specs
from codechat.launch import job_scripts, planner, portable_scripts
from codechat.launch.job_scripts import Job
from codechat.launch.live_metrics import Follower, last_row, show
from codechat.runs import paths
from codechat.runs.paths import find_run, name_of, read_status, runs_dir

LAUNCHABLE = {**registry.LOOPS, **{id: registry.STAGES[id] for id in ("diagnose", "evaluate", "passk")}}
START_FLAGS = ("resume", "overwrite")  # of one start, not of a run
SOURCES = ("hub", "embedded")  # a task's data that are no directory
FAILED = ("failed", "killed", "start failed")  # states after which `status` and `tail` end with 1

_children: dict[int, subprocess.Popen[bytes]] = {}  # started here; polled, so that none stays a zombie


# ---- writing


@dataclass(frozen=True)
class Written:
    """A run that is ready to start: its directory, what differs from the defaults, the plan in one line."""

    name: str
    path: Path
    changes: dict[str, tuple[Any, Any]]
    verdict: str
    submit: str  # the command that starts it

    def __str__(self) -> str:
        width = max(map(len, self.changes), default=0)
        rows = "\n".join(f"  {k:<{width}}  {a} -> {b}" for k, (a, b) in self.changes.items())
        return f"{self.name}\n{rows or '  all defaults'}\nplan: {self.verdict}\nstart: {self.submit}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in (k, a, b)) + "</tr>"
            for k, (a, b) in self.changes.items()
        )
        return (
            f"<b>{html.escape(self.name)}</b><table><tr><th>setting</th><th>default</th><th>here</th></tr>{rows}</table>"
            f"<p>plan: {html.escape(self.verdict)}<br>start: <code>{html.escape(self.submit)}</code></p>"
        )


def write(
    cfg: Any, *, nproc: int = 1, nodes: int = 1, devices: tuple[str, ...] = (), max_restarts: int = 0, hours: float = 24.0,
    gpu: str | None = None, kind: Literal["shell", "slurm"] = "shell", lines: tuple[str, ...] = (), overwrite: bool = False,
    scripts: str | Path | None = None,
) -> Written:  # fmt: skip
    """Write the run directory of `cfg`, ready to start: config.json, launch.sh, and job.slurm where `kind` is slurm.

    nproc ranks on each of `nodes`; devices as in CUDA_VISIBLE_DEVICES; hours for job scripts; gpu (a name of the GPU table) for the
    plan; scripts: a folder for the same as NAME.sh and NAME.json, which run on other machines. A planned run of the name is replaced,
    another one only with `overwrite`. ConfigError or RunError before anything is written."""
    entry = registry.entry_of(cfg, LAUNCHABLE)
    _check_flags(cfg)
    if hasattr(cfg, "resolved"):  # the loop compares its resolved settings with those that are written here
        cfg = cfg.resolved()
    job = Job(name=cfg.run_name, module=entry.module, nproc=nproc, nodes=nodes, devices=tuple(devices), max_restarts=max_restarts,
              again="--resume" if hasattr(cfg, "resume") else "--overwrite", hours=hours, lines=tuple(lines))  # fmt: skip
    if nodes > 1 and kind == "shell":
        raise ConfigError(f"{nodes} nodes: a shell starts ranks on one machine; add --slurm")
    _check_not_starting(cfg.run_name)
    verdict = plan_verdict(cfg, gpu, nproc * nodes)
    texts, submit = {"launch.sh": job_scripts.launch_sh(job)}, f"codechat launch {cfg.run_name} start"
    if kind == "slurm":
        texts["job.slurm"] = job_scripts.slurm(job, runs_dir().parent)
        submit = f"sbatch runs/{cfg.run_name}/job.slurm"
    path = plan_run(cfg.run_name, cfg, entry.id, texts, overwrite=overwrite)
    if scripts:
        portable_scripts.write_loop(cfg, scripts, nproc=nproc)
    changes = {k: pair for k, pair in config.changed(cfg).items() if k not in ("run_name", *START_FLAGS)}
    return Written(cfg.run_name, path, changes, verdict, submit)


def plan_run(name: str, cfg: Any, kind: str, texts: Mapping[str, str], overwrite: bool = False) -> Path:
    """Write the directory of a run that has not begun, whole or not at all: its settings, status "planned", and text files (launch.sh, ...).

    Replaces a planned run; any other one only with `overwrite`. RunError for a run that is alive."""
    paths.check_name(name)
    path, there = runs_dir() / name, paths.exists(name)
    if there and not (overwrite or paths.is_planned(path)):
        raise RunError(f"run name {name!r} is in use ({read_status(path)['status']}); "
                       "write the launch with overwrite=True (--overwrite) to replace it, or choose another --run-name")  # fmt: skip
    if there:
        paths.check_idle(name)
        paths.hold(path)
    status = dict(
        status=paths.PLANNED, reason=None, kind=kind, started=None, ended=None, summary={}, host=platform.node()
    )
    env = {
        "kind": kind,
        **paths.settings_hashes(cfg),
        "parent": None,
        **provenance.snapshot(paths.SHIPPED),
    }
    try:
        paths.make_directory(
            path,
            {"config.json": config.plain(cfg), "env.json": env, "status.json": status},
            texts=texts,
        )
    finally:
        unlock(paths.lock_of(path))  # the ranks of the run will hold it
    return path


def _check_flags(cfg: Any) -> None:
    """launch.sh adds --resume itself when there is something to resume."""
    for flag in START_FLAGS:
        if getattr(cfg, flag, False):
            raise ConfigError(f"{flag}=True in the configuration would apply to every start; leave it out: launch.sh resumes by itself, "
                              "and overwrite is an option of the launch")  # fmt: skip


def plan_verdict(cfg: Any, gpu: str | None, gpus: int) -> str:
    """One line of the plan for these settings on so many of this GPU."""
    if gpu is None:
        return "not requested; name a GPU (gpu='a800-80gb', --gpu a800-80gb)"
    kind = registry.entry_of(cfg, LAUNCHABLE).id
    if kind not in (*planner.PLANNED_LOOPS, *planner.RL_LOOPS):
        gpu_specs.find(gpu)
        return f"none for {kind}"
    found = planner.make(planner.of(cfg, gpus=gpus, gpu=gpu, search=False))
    return found.verdict if found.fits else planner.with_knobs(found).verdict


# ---- starting and stopping


def _folder(ref: str | Path | Written) -> Path:
    path = find_run(ref.path if isinstance(ref, Written) else ref)
    if not (path / "launch.sh").is_file():
        raise MissingFile(f"run {name_of(path)} has no launch.sh; write it with `codechat launch LOOP -- SETTINGS`")
    return path


def reap() -> None:
    """Forget the processes started here that have ended."""
    for child in list(_children.values()):
        if child.poll() is not None:
            _children.pop(child.pid, None)


def detached(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output in the log: it outlives the kernel or shell that started it."""
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    return _children.setdefault(child.pid, child)


def process_of(path: Path) -> dict[str, Any] | None:
    """{host, pid, pid_start, time} of the torchrun that was started last; None where it is gone."""
    reap()
    file = path / "process.json"
    found = read_json(file) if file.is_file() else None
    return found if found and alive(found) else None


def _check_not_starting(name: str) -> None:
    path = runs_dir() / name
    if path.is_dir() and (found := process_of(path)):
        where = f"process {found['pid']} on {found['host']}"
        raise RunError(
            f"run {name} was started as {where}; stop it (codechat launch {name} stop), or choose another --run-name"
        )


def start(ref: str | Path | Written) -> Path:
    """Start launch.sh in a session of its own, with output in launch.log; returns the run's directory at once.

    It outlives the kernel or shell that started it. A run that was stopped or killed continues. RunError if it is finished, is
    or is running; MissingFile where its data or the checkpoints that it reads do not exist."""
    path = _folder(ref)
    name = name_of(path)
    paths.check_unedited(path, name)
    _check_not_starting(name)
    status = read_status(path)
    if status["status"] in ("running", "finished"):
        raise RunError(f"run {name} is {status['status']}; nothing to start")
    check_inputs(read_json(path / "config.json"))
    with open(path / "launch.log", "ab") as log:
        child = detached(["sh", str(path / "launch.sh")], log)
    started = {"host": platform.node(), "pid": child.pid, "pid_start": process_start(child.pid), "time": time.time()}
    write_json(path / "process.json", started)
    return path


def check_inputs(settings: Mapping[str, Any]) -> None:
    """MissingFile where the data or the checkpoints that these settings name do not exist: the ranks would load for a minute first."""
    for name in ("data_dir", "task_data"):
        where = settings.get(name)
        if where and where not in SOURCES and not (runs_dir().parent / where).exists():
            raise MissingFile(
                f"{config.flag_of(name)} {where} does not exist in {runs_dir().parent}; prepare it with `codechat data`, "
                "or write the launch with another one"
            )
    refs = (settings.get(name) for name in ("init_from", "ckpt"))
    for ref in (one for some in refs for one in ([some] if isinstance(some, str) else some or ())):
        paths.find_checkpoint(ref)


def stop(ref: str | Path | Written, *, now: bool = False, timeout_s: float = job_scripts.SAVE_S) -> str:
    """Ask the run to save and end, and wait for it; its state afterwards. now=True kills it; the last checkpoint stays.

    RunError where nothing runs, where it runs on another host, or where it has not ended after timeout_s."""
    path = _folder(ref)
    name, status, process = name_of(path), read_status(path), process_of(path)
    owner = process or (status if status["status"] == "running" else None)
    if owner is None:
        raise RunError(f"run {name} is not running ({status['status']})")
    if owner["host"] != platform.node():
        raise RunError(f"run {name} runs on {owner['host']}; stop it there (or with scancel)")
    targets = {pid: process_start(pid) for pid in [owner["pid"], *(descendants(owner["pid"]) if now else ())]}
    for pid in targets:
        send(pid, signal.SIGKILL if now else signal.SIGTERM)
    ends = time.monotonic() + timeout_s
    while any(begun and process_start(pid) == begun for pid, begun in targets.items()):
        if time.monotonic() > ends:
            late = f"run {name} (process {owner['pid']}) is still there after {timeout_s:.0f} s"
            raise RunError(f"{late}; wait longer, or stop it with now=True (--now)")
        time.sleep(0.1)
        reap()
    return read_status(path)["status"]


def send(pid: int, number: int) -> None:
    """A signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself


# ---- looking


def status(ref: str | Path | Written) -> dict[str, Any]:
    """{run, status, step, max_steps, reason, process, ...last metrics}. "starting" is a process that has not begun its run;
    "start failed" one that never did, with the last line of its log as reason."""
    path = _folder(ref)
    found, process = read_status(path), process_of(path)
    state, reason = found["status"], found.get("reason")
    if state == paths.PLANNED and process:
        state = "starting"
    elif state == paths.PLANNED and (path / "process.json").is_file():
        state, reason = "start failed", error_line(path / "launch.log")
    elif state in ("killed", "stopped") and process:
        state = "starting again"
    row, max_steps = last_row(path), read_json(path / "config.json").get("max_steps")
    found = {
        "run": name_of(path),
        "status": state,
        "reason": reason,
        "step": row.pop("step", 0),
        "max_steps": max_steps,
    }
    return found | {"process": process["pid"] if process else None} | row


def error_line(log: Path) -> str | None:
    """The line of a log that says what went wrong: the last one with `error:`, else the last one."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("error: ")] or lines or [None])[-1]


def lives(path: Path) -> bool:
    """Whether more metrics may come: a process is alive, or the run's status is running."""
    return process_of(path) is not None or read_status(path)["status"] == "running"


def attach(ref: str | Path | Written, *, every_s: float = 2.0) -> dict[str, Any]:
    """Follow a run until it ends: in a notebook a curve that is redrawn, elsewhere a line for each logged step.

    An interrupt ends the following, not the run. Returns its `status`."""
    path = _folder(ref)
    follower = Follower(path, read_json(path / "config.json").get("max_steps"))
    try:
        for rows in _batches(path, follower, every_s):
            show(follower, rows)
    except KeyboardInterrupt:
        print(f"stopped following {name_of(path)}; it is still running")
    found = status(path)
    print(f"{found['run']}: {found['status']}" + (f" ({found['reason']})" if found["reason"] else ""))
    return found


def _batches(path: Path, follower: Follower, every_s: float) -> Iterator[list[dict[str, Any]]]:
    going = True
    while going:
        going = lives(path)  # before reading, so that the last rows are read too
        yield follower.new_rows()
        if going:
            time.sleep(every_s)


# ---- the command


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
    written = write(settings, **{name: getattr(cfg, name) for name in same}, lines=cfg.job_lines)
    print(written)
    if cfg.start:
        start(written)
        print(f"started; codechat launch {written.name} tail")


def _is_recipe(argv: list[str]) -> bool:
    """Whether the first word names a recipe, and neither a loop nor a run."""
    if not argv or argv[0].startswith("-") or argv[0] in LAUNCHABLE:
        return False
    from codechat.launch.recipes.runner import RECIPES  # which starts stages with this module

    return argv[0] in RECIPES and not paths.is_run(runs_dir() / argv[0])


def main(argv: list[str] | None = None) -> int | None:
    """`codechat launch`; 1 where `status` or `tail` find that the run failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if _is_recipe(argv):
        from codechat.launch import recipe_process

        return recipe_process.main(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    cfg = config.parse(LaunchConfig, argv[:at], prog="codechat launch", epilog=__doc__)
    if cfg.action == "write":
        return _write(cfg, argv[at + 1 :])
    if at < len(argv):
        raise ConfigError(f"settings after -- are for writing a launch; {cfg.action} takes none")
    if cfg.action == "start":
        path = start(cfg.what)
        print(f"started; codechat launch {name_of(path)} tail")
    elif cfg.action == "tail":
        return int(attach(cfg.what)["status"] in FAILED)
    elif cfg.action == "stop":
        print(f"{cfg.what}: {stop(cfg.what, now=cfg.now)}")
    else:
        found = status(cfg.what)
        for key, value in found.items():
            print(f"  {key:<20}{value}")
        return int(found["status"] in FAILED)
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
