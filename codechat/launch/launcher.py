"""Start a run from a notebook cell or a shell, detached, and find it again.

    written = launcher.write(cfg, nproc=8)    # runs/NAME/config.json and launch.sh, what differs from the defaults, the plan
    launcher.start(written)                   # its own session: it survives a restarted kernel or a closed terminal
    launcher.attach("my-sft")                 # follow the metrics; Ctrl-C (interrupt) stops following, not the run
    launcher.stop("my-sft")                   # a checkpoint, then the end

The configuration object of a cell, the file that torchrun reads and the json in the run directory are one. When the run begins,
it takes over its directory; it rejects a config.json that was edited in between. Jobs are submitted with sbatch; runs on other
hosts are stopped there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core import config, provenance, registry
from codechat.core.atomic_files import read_json, read_rows, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.processes import alive, descendants, process_start, unlock
from codechat.distributed import gpu_specs
from codechat.launch import planner, portable_scripts
from codechat.launch.portable_scripts import SAVE_S
from codechat.runs import paths
from codechat.runs.metrics import is_declared, metric
from codechat.runs.paths import find_run, name_of, read_status, runs_dir

LAUNCHABLE = {**registry.LOOPS, **{id: registry.STAGES[id] for id in ("diagnose", "evaluate", "passk")}}
START_FLAGS = ("resume", "overwrite")  # of one start, not of a run
SOURCES = ("hub", "embedded")  # a task's data that are no directory
SHOWN = ("train_loss", "reward_mean", "exact_match", "val_bpb", "lr", "grad_norm", "tok_per_s", "mfu")  # of a line
FAILED = ("failed", "killed", "start failed")  # states after which `status` and `tail` end with 1
PORT = 29517
DEVICE = re.compile(r"\d+|GPU-[0-9a-fA-F-]{4,}|MIG-[0-9a-zA-Z/-]{4,}")

_children: dict[int, subprocess.Popen[bytes]] = {}  # started here; polled, so that none stays a zombie


# ---- writing


@dataclass(frozen=True, kw_only=True)
class Machines(config.Settings):
    """Where and how a run starts."""

    nproc: int = opt(1, "ranks per node: one per GPU", least=1)
    nodes: int = opt(1, "machines; more than one needs --slurm, and shards within each (HSDP)", least=1)
    gpu: str | None = opt(None, "GPU to plan for, such as a800-80gb; `codechat plan --list` names them")
    devices: tuple[str, ...] = opt(
        (), "CUDA_VISIBLE_DEVICES: indices or UUIDs (GPU-...); empty = as the environment says"
    )
    max_restarts: int = opt(0, "times that torchrun starts all ranks again after one died", least=0)
    slurm: bool = opt(False, "also write job.slurm")
    scripts: Path | None = opt(None, "folder for a portable NAME.sh and NAME.json as well")
    hours: float = opt(24.0, "time limit of a job, hours", least=0.1)
    job_lines: str = opt("", "more options of a job script, separated by ; (--job-lines='--partition=gpu; -p x')")
    overwrite: bool = opt(False, "replace a run of this name that has begun")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes > 1 and not self.slurm:
            raise ConfigError(f"{self.nodes} nodes: a shell starts ranks on one machine; add --slurm")
        # CUDA would silently read fewer GPUs: it stops at the first word it does not know; UUIDs and indices do not mix
        listed, words = f"devices {','.join(self.devices)}", self.devices
        mixed = len({word.isdecimal() for word in words}) > 1 or len(set(words)) < len(words)
        if mixed or not all(map(DEVICE.fullmatch, words)):
            raise ConfigError(f"{listed}; required are different GPUs, all indices (0) or all UUIDs of nvidia-smi -L (GPU-..., MIG-...)")  # fmt: skip
        if words and self.nproc > len(words):
            raise ConfigError(f"{listed} for {self.nproc} ranks; each rank needs one: set --nproc {len(words)}")


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


def write(cfg: Any, **machines: Any) -> Written:
    """Write the run directory of `cfg`, ready to start: config.json, launch.sh, and job.slurm with slurm=True; `machines` as in Machines.

    A planned run of the name is replaced, another one only with `overwrite`. ConfigError or RunError before anything is written."""
    entry, where = registry.entry_of(cfg, LAUNCHABLE), Machines(**machines)
    for flag in START_FLAGS:
        if getattr(cfg, flag, False):
            raise ConfigError(f"{flag}=True in the configuration would apply to every start; leave it out: launch.sh resumes by itself, "
                              "and overwrite is an option of the launch")  # fmt: skip
    _check_not_starting(cfg.run_name)
    verdict = plan_verdict(cfg, where.gpu, where.nproc * where.nodes)
    texts, submit = {"launch.sh": launch_sh(cfg, entry.module, where)}, f"codechat launch {cfg.run_name} start"
    if where.slurm:
        texts["job.slurm"], submit = slurm(cfg.run_name, where), f"sbatch runs/{cfg.run_name}/job.slurm"
    path = write_planned(cfg, entry.id, texts, where.overwrite)
    if where.scripts:
        portable_scripts.write_loop(cfg, where.scripts, nproc=where.nproc)
    changes = {k: pair for k, pair in config.changed(cfg).items() if k not in ("run_name", *START_FLAGS)}
    return Written(cfg.run_name, path, changes, verdict, submit)


def write_planned(cfg: Any, kind: str, texts: Mapping[str, str], overwrite: bool) -> Path:
    """The directory of a run that has not begun, whole or not at all: its settings, status "planned", and text files."""
    name = cfg.run_name
    paths.check_name(name)
    path, there = runs_dir() / name, paths.exists(name)
    if there and not (overwrite or paths.is_planned(path)):
        raise RunError(f"run name {name!r} is in use ({read_status(path)['status']}); "
                       "write the launch with overwrite=True (--overwrite) to replace it, or choose another --run-name")  # fmt: skip
    if there:
        paths.check_idle(name)
        paths.hold(path)
    status = dict(status=paths.PLANNED, reason=None, kind=kind, started=None, ended=None, summary={})
    env = {"kind": kind, "config_hash": config.config_hash(cfg), "parent": None, **provenance.snapshot(paths.SHIPPED)}
    files = {"config.json": config.plain(cfg), "env.json": env, "status.json": status | {"host": platform.node()}}
    try:
        paths.make_directory(path, files, texts=texts)
    finally:
        unlock(paths.lock_of(path))  # the ranks of the run will hold it
    return path


def launch_sh(cfg: Any, module: str, where: Machines) -> str:
    """launch.sh: torchrun on this machine, or on one of several with rendezvous options as arguments."""
    name, several = cfg.run_name, where.nodes > 1
    ranks = f"{where.nproc} rank{'s' if where.nproc > 1 else ''}" + (
        f" on each of {where.nodes} nodes" if several else ""
    )
    message = f"{where.nodes} nodes: start this by its job script"
    return portable_scripts.fill(
        "launch.sh", name=name, module=module, ranks=ranks, where=f"runs/{name}", save_s=SAVE_S, nproc=where.nproc,
        up="/".join([".."] * (2 + name.count("/"))), python=shlex.quote(sys.executable),
        again="--resume" if hasattr(cfg, "resume") else "--overwrite",  # where a loop has nothing to resume
        visible=f"export CUDA_VISIBLE_DEVICES={','.join(where.devices)}\n" if where.devices else "",
        guard=f'[ $# -gt 0 ] || {{ echo "{message}" >&2; exit 2; }}\n' if several else "",
        restarts=f" --max-restarts {where.max_restarts}" if where.max_restarts else "",
    )  # fmt: skip


def slurm(name: str, where: Machines) -> str:
    """A Slurm job: one torchrun on each node, met at the first node's port. `sbatch FILE`; requeued, it continues."""
    path, minutes = (runs_dir() / name).as_posix(), round(where.hours * 60)
    if "\n" in path:
        raise ConfigError(f"{path!r} holds a line break; a job script takes one option a line")
    return portable_scripts.fill(
        "job.slurm.sh", job=name.replace("/", "-"), nodes=where.nodes, nproc=where.nproc, path=path, save_s=SAVE_S, port=PORT,
        time=f"{minutes // 60:02d}:{minutes % 60:02d}", lines="".join(f"#SBATCH {line.strip()}\n" for line in re.split("[;\n]", where.job_lines) if line.strip()),
        launch=shlex.quote(path + "/launch.sh"),
    )  # fmt: skip


def plan_verdict(cfg: Any, gpu: str | None, gpus: int) -> str:
    """One line of the plan for these settings on so many of this GPU."""
    if gpu is None:
        return "not requested; name a GPU (gpu='a800-80gb', --gpu a800-80gb)"
    kind = registry.entry_of(cfg, LAUNCHABLE).id
    if kind not in (*planner.PLANNED_LOOPS, *planner.RL_LOOPS):
        gpu_specs.find(gpu)
        return f"none for {kind}"
    plan = planner.make(planner.of(cfg, gpus=gpus, gpu=gpu, search=False))
    return plan.verdict if plan.fits else planner.with_knobs(plan).verdict


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


def start_detached(words: list[str], where: Path, log: str) -> None:
    """Start a process in a session of its own, output to the file `log` in `where`, beside process.json: it outlives the kernel or
    shell that started it."""
    with open(where / log, "ab") as out:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    _children[child.pid] = child
    started = {"host": platform.node(), "pid": child.pid, "pid_start": process_start(child.pid), "time": time.time()}
    write_json(where / "process.json", started)


def process_of(where: Path) -> dict[str, Any] | None:
    """{host, pid, pid_start, time} of the process that was started last there; None where it is gone."""
    reap()
    file = where / "process.json"
    process = read_json(file) if file.is_file() else None
    return process if process and alive(process) else None


def end(what: str, process: Mapping[str, Any], now: bool, timeout_s: float) -> None:
    """SIGTERM to a process, or SIGKILL to it and its descendants, and wait. RunError on another host, or after timeout_s."""
    if process["host"] != platform.node():
        raise RunError(f"{what} runs on {process['host']}; stop it there (or with scancel)")
    targets = {pid: process_start(pid) for pid in [process["pid"], *(descendants(process["pid"]) if now else ())]}
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL if now else signal.SIGTERM)
        except ProcessLookupError:
            pass  # it ended by itself
    ends = time.monotonic() + timeout_s
    while any(begun and process_start(pid) == begun for pid, begun in targets.items()):
        if time.monotonic() > ends:
            raise RunError(f"{what} (process {process['pid']}) is still there after {timeout_s:.0f} s; wait longer, "
                           "or stop it with now=True (--now)")  # fmt: skip
        time.sleep(0.1)
        reap()


def _check_not_starting(name: str) -> None:
    path = runs_dir() / name
    if path.is_dir() and (process := process_of(path)):
        raise RunError(f"run {name} was started as process {process['pid']} on {process['host']}; "
                       f"stop it (codechat launch {name} stop), or choose another --run-name")  # fmt: skip


def start(ref: str | Path | Written) -> Path:
    """Start launch.sh in a session of its own, with output in launch.log; returns the run's directory at once.

    It outlives the kernel or shell that started it. A run that was stopped or killed continues. RunError if it is finished, is
    or is running; MissingFile where its data or the checkpoints that it reads do not exist."""
    path = _folder(ref)
    name, state = name_of(path), read_status(path)["status"]
    _check_not_starting(name)
    if state in ("running", "finished"):
        raise RunError(f"run {name} is {state}; nothing to start")
    check_inputs(read_json(path / "config.json"))
    start_detached(["sh", str(path / "launch.sh")], path, "launch.log")
    return path


def check_inputs(settings: Mapping[str, Any]) -> None:
    """MissingFile where the data or the checkpoints that these settings name do not exist: the ranks would load for a minute first."""
    for name in ("data_dir", "task_data"):
        data = settings.get(name)
        if data and data not in SOURCES and not (paths.ROOT / data).exists():
            raise MissingFile(f"{config.flag_of(name)} {data} does not exist in {paths.ROOT}; prepare it with `codechat data`, "
                              "or write the launch with another one")  # fmt: skip
    for name in ("init_from", "ckpt"):
        refs = settings.get(name) or ()
        for ref in [refs] if isinstance(refs, str) else refs:
            paths.find_checkpoint(ref)


def stop(ref: str | Path | Written, *, now: bool = False, timeout_s: float = SAVE_S) -> str:
    """Ask the run to save and end, and wait for it; its state afterwards. now=True kills it; the last checkpoint stays.

    RunError where nothing runs, where it runs on another host, or where it has not ended after timeout_s."""
    path = _folder(ref)
    state = read_status(path)
    owner = process_of(path) or (state if state["status"] == "running" else None)
    if owner is None:
        raise RunError(f"run {name_of(path)} is not running ({state['status']})")
    end(f"run {name_of(path)}", owner, now, timeout_s)
    return read_status(path)["status"]


# ---- looking


def status(ref: str | Path | Written) -> dict[str, Any]:
    """{run, status, step, max_steps, reason, process, ...last metrics}. "starting" is a process that has not begun its run;
    "start failed" one that never did, with the last line of its log as reason."""
    path = _folder(ref)
    read, process = read_status(path), process_of(path)
    state, reason = read["status"], read.get("reason")
    if process and state in (paths.PLANNED, "killed", "stopped"):
        state = "starting" if state == paths.PLANNED else "starting again"
    elif state == paths.PLANNED and (path / "process.json").is_file():
        state, reason = "start failed", error_line(path / "launch.log")
    last = {"step": 0}
    for row in read_rows(path / "metrics.jsonl"):
        last |= {k: v for k, v in row.items() if k in ("step", *SHOWN)}
    about = {"run": name_of(path), "status": state, "reason": reason, "process": process["pid"] if process else None}
    return about | {"max_steps": read_json(path / "config.json").get("max_steps")} | last


def error_line(log: Path) -> str | None:
    """The line of a log that says what went wrong: the last one with `error:`, else the last one."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("error: ")] or lines or [None])[-1]


def lives(path: Path) -> bool:
    """Whether more metrics may come: a process is alive, or the run's status is running."""
    return process_of(path) is not None or read_status(path)["status"] == "running"


def attach(ref: str | Path | Written, *, every_s: float = 2.0) -> dict[str, Any]:
    """Follow a run until it ends, a line for each logged step. An interrupt ends the following, not the run. Returns its `status`."""
    path = _folder(ref)
    max_steps = read_json(path / "config.json").get("max_steps")
    lines = new_lines(lambda: [path / "metrics.jsonl"], lambda: lives(path), every_s)
    follow((line_of(json.loads(line), max_steps) for line in lines), name_of(path))
    state = status(path)
    print(f"{state['run']}: {state['status']}" + (f" ({state['reason']})" if state["reason"] else ""))
    return state


def follow(lines: Iterable[str], what: str) -> None:
    """Print lines as they come. An interrupt ends the following, not what is followed."""
    try:
        for line in lines:
            print(line, flush=True)
    except KeyboardInterrupt:
        print(f"stopped following {what}; it is still running")


def new_lines(files: Callable[[], list[Path]], going: Callable[[], bool], every_s: float) -> Iterator[str]:
    """Lines of files as they are written, until nothing is going on; where a resumed run has dropped lines, those behind them."""
    seen: dict[Path, list[bytes]] = {}
    more = True
    while more:
        more = going()  # before reading, so that the last lines are read too
        for file in files():
            before, lines = seen.get(file, []), file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
            differs = (i for i, (a, b) in enumerate(zip(before, lines)) if a != b)
            seen[file] = lines
            for line in lines[next(differs, len(before)) :]:
                yield line.decode(errors="replace")
        if more:
            time.sleep(every_s)


def line_of(row: Mapping[str, Any], max_steps: int | None) -> str:
    """One logged step in words."""
    words = [f"step {row['step']}" + (f"/{max_steps}" if max_steps else "")]
    shown = (k for k in SHOWN if isinstance(row.get(k), (int, float)) and is_declared(k))
    return "  ".join([*words, *(f"{k} {row[k]:.4g} {metric(k).unit}".strip() for k in shown)])
