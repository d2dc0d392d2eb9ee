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

import html
import json
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core import config, provenance, registry
from codechat.core.atomic_files import read_json, read_rows, write_json
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.processes import alive, descendants, process_start, unlock
from codechat.distributed import gpu_specs
from codechat.launch import job_scripts, planner, portable_scripts
from codechat.launch.job_scripts import Job
from codechat.runs import paths
from codechat.runs.metrics import is_declared, metric
from codechat.runs.paths import find_run, name_of, read_status, runs_dir

LAUNCHABLE = {**registry.LOOPS, **{id: registry.STAGES[id] for id in ("diagnose", "evaluate", "passk")}}
START_FLAGS = ("resume", "overwrite")  # of one start, not of a run
SOURCES = ("hub", "embedded")  # a task's data that are no directory
SHOWN = (
    "train_loss",
    "reward_mean",
    "exact_match",
    "val_bpb",
    "lr",
    "grad_norm",
    "tok_per_s",
    "mfu",
)  # metrics of a line
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
            raise RunError(
                f"{what} (process {process['pid']}) is still there after {timeout_s:.0f} s; wait longer, or stop it with now=True (--now)"
            )
        time.sleep(0.1)
        reap()


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
    start_detached(["sh", str(path / "launch.sh")], path, "launch.log")
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
    end(f"run {name}", owner, now, timeout_s)
    return read_status(path)["status"]


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
    """Follow a run until it ends, a line for each logged step. An interrupt ends the following, not the run. Returns its `status`."""
    path = _folder(ref)
    max_steps = read_json(path / "config.json").get("max_steps")
    try:
        for row in _new_rows(path, every_s):
            print(line_of(row, max_steps), flush=True)
    except KeyboardInterrupt:
        print(f"stopped following {name_of(path)}; it is still running")
    state = status(path)
    print(f"{state['run']}: {state['status']}" + (f" ({state['reason']})" if state["reason"] else ""))
    return state


def _new_rows(path: Path, every_s: float) -> Iterator[dict[str, Any]]:
    """Rows of metrics.jsonl as they are written, until the run ends; a file that became shorter (a resumed run drops later rows) is
    read again."""
    file, position, going = path / "metrics.jsonl", 0, True
    while going:
        going = lives(path)  # before reading, so that the last rows are read too
        data = file.read_bytes() if file.is_file() else b""
        position = position if position <= len(data) else 0
        whole = data[position : data.rfind(b"\n") + 1]  # without a line that is still being written
        position += len(whole)
        yield from map(json.loads, whole.splitlines())
        if going:
            time.sleep(every_s)


def last_row(path: Path) -> dict[str, Any]:
    """The last value of each metric in SHOWN, and the last step."""
    last: dict[str, Any] = {}
    for row in read_rows(path / "metrics.jsonl"):
        last |= {k: v for k, v in row.items() if k in ("step", *SHOWN)}
    return last


def line_of(row: Mapping[str, Any], max_steps: int | None) -> str:
    """One logged step in words."""
    words = [f"step {row['step']}" + (f"/{max_steps}" if max_steps else "")]
    shown = (k for k in SHOWN if isinstance(row.get(k), (int, float)) and is_declared(k))
    return "  ".join([*words, *(f"{k} {row[k]:.4g} {metric(k).unit}".strip() for k in shown)])
