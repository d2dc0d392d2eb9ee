"""`codechat launch`: write, start, follow and stop a run, or a whole recipe, detached: it
survives a closed terminal or a restarted kernel.

    codechat launch sft --nproc 8 -- --preset d20 --data-dir data/sft --run-name my-sft
    codechat launch my-sft start
    codechat launch my-sft status
    codechat launch my-sft tail                   follow the metrics; Ctrl-C stops following, not the run
    codechat launch my-sft stop                   saves a checkpoint, then ends
    codechat launch sft --nproc 8 --nodes 2 -- --preset 8b --data-dir data/sft --run-name big-sft

    codechat launch v6                            the unfinished stages of a recipe, with the options of `codechat run`
    codechat launch v6 --from v6-rl --scale 8b --yes
    codechat launch v6 status --scale 8b          its process, its stages, its log; also tail and stop, with the same
                                                  --scale and --seed

From a notebook: launcher.write(cfg, launcher.Machines(nproc=8)), then launcher.start("my-sft"),
attach, status and stop. When the run begins, it takes over its directory. Jobs are submitted
with sbatch; runs on other hosts are stopped there."""

import contextlib
import fcntl
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core import config, registry
from codechat.core.atomic_files import read_json, read_rows, write_json
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.core.processes import alive, alone, descendants, holder, process_start
from codechat.runs import paths
from codechat.runs.run import unit_of
from codechat_lab.instruments.plan_settings import PLANNED_LOOPS
from codechat_lab.launch.portable_scripts import SAVE_S, fill

LAUNCHABLE = {
    e.command: e
    for e in (*registry.LOOPS.values(), *map(registry.find, ("diagnose", "evaluate", "passk")))
}
# of a line
SHOWN = (
    "train_loss",
    "reward_mean",
    "exact_match",
    "val_bpb",
    "lr",
    "grad_norm",
    "tok_per_s",
    "mfu",
)
FAILED = ("failed", "killed", "start failed")  # states after which `status` and `tail` end with 1
PORT = 29517
ALIVE = ".alive"  # locked by a detached process while it lives
UNLOCK_S = 10  # in which a process that is gone gives its locks back: with its last thread

# kept, since Python warns of those that it forgets while they run
_children: list[subprocess.Popen[bytes]] = []


# ---- writing


@dataclass(frozen=True, kw_only=True)
class Machines(config.Settings):
    """Where and how a run starts."""

    nproc: int = opt(1, "ranks per node: one per GPU", least=1)
    nodes: int = opt(
        1, "machines; more than one are started by job.slurm, and shard within each (HSDP)", least=1
    )
    gpu: str | None = opt(None, "GPU to plan for, such as a800-80gb")
    max_restarts: int = opt(0, "how often torchrun restarts all ranks after one died", least=0)
    overwrite: bool = opt(False, "replace a run of this name that has begun")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Machines):
    """What to launch, or what to do with a launched run. Settings of the loop follow after a
    lone --."""

    what: str = opt(
        "", "a loop (pretrain, sft, ...) to write, or the name of a run", positional=True
    )
    action: Literal["write", "start", "status", "tail", "stop"] = opt(
        "write", "what to do", positional=True
    )
    start: bool = opt(False, "start it at once")
    now: bool = opt(False, "stop: kill instead of asking to save")


@dataclass(frozen=True)
class Written:
    """A run that is ready to start: its directory, what differs from the defaults, the plan in
    one line, the command that starts it."""

    path: Path
    changes: dict[str, tuple[Any, Any]]
    verdict: str
    submit: str

    def __str__(self) -> str:
        width = max(map(len, self.changes), default=0)
        rows = "\n".join(f"  {k:<{width}}  {a} -> {b}" for k, (a, b) in self.changes.items())
        return (
            f"{paths.name_of(self.path)}\n{rows or '  all defaults'}\nplan: "
            f"{self.verdict}\nstart: {self.submit}"
        )

    __repr__ = __str__


def write(cfg: Any, machines: Machines = Machines()) -> Written:
    """Write the run directory of `cfg`, ready to start: config.json, launch.sh, perhaps job.slurm.

    A planned run of the name is replaced, another one only with `machines.overwrite`.
    ConfigError or RunError before anything is written."""
    entry = registry.entry_of(cfg, LAUNCHABLE)
    name = cfg.run_name
    if getattr(cfg, "resume", False) or cfg.overwrite:
        raise ConfigError(
            "leave out resume and overwrite: launch.sh resumes by "
            "itself, and the launch has an overwrite of its own"
        )
    check_not_started(name, paths.runs_dir() / name)
    if not machines.gpu:
        verdict = "not requested; name a GPU (gpu='a800-80gb', --gpu a800-80gb)"
    elif entry.id not in PLANNED_LOOPS:
        verdict = f"none for {entry.id}"
    else:
        from codechat_lab.instruments import planner  # it imports torch

        gpus = machines.nproc * machines.nodes
        verdict = planner.make(planner.from_settings(cfg, gpus=gpus, gpu=machines.gpu)).verdict
    texts = {"launch.sh": launch_sh(cfg, entry.command, machines)}
    submit = f"codechat launch {name} start"
    if machines.nodes > 1:
        texts["job.slurm"] = job_slurm(name, machines)
        submit = f"sbatch runs/{name}/job.slurm"
    path = paths.prepare(name, cfg, entry.id, overwrite=machines.overwrite, plan=texts)
    changes = config.changed(cfg)
    changes.pop("run_name", None)
    return Written(path, changes, verdict, submit)


def launch_sh(cfg: Any, command: str, machines: Machines) -> str:
    """launch.sh: torchrun on this machine, or on one of several with rendezvous options as
    arguments."""
    name = cfg.run_name
    guard = ""
    if machines.nodes > 1:
        guard = (
            f'[ $# -gt 0 ] || {{ echo "{machines.nodes} nodes: '
            'start this by its job script" >&2; exit 2; }\n'
        )
    return fill(
        "launch.sh",
        name=name,
        command=command,
        ranks=f"{machines.nodes} x {machines.nproc} ranks",
        where=f"runs/{name}",
        save_s=SAVE_S,
        nproc=machines.nproc,
        up="/".join([".."] * (2 + name.count("/"))),
        python=shlex.quote(sys.executable),
        again="--resume"
        if hasattr(cfg, "resume")
        else "--overwrite",  # where a loop has nothing to resume
        guard=guard,
        restarts=f" --max-restarts {machines.max_restarts}" if machines.max_restarts else "",
    )


def job_slurm(name: str, machines: Machines) -> str:
    """A Slurm job: one torchrun on each node, met at the first node's port. A requeued job
    continues."""
    path = (paths.runs_dir() / name).as_posix()
    return fill(
        "job.slurm.sh",
        job=name.replace("/", "-"),
        path=path,
        launch=shlex.quote(f"{path}/launch.sh"),
        nodes=machines.nodes,
        nproc=machines.nproc,
        save_s=SAVE_S,
        port=PORT,
    )


# ---- a detached process


def start_detached(words: list[str], where: Path, log: str, what: str) -> None:
    """Start a process in a new session, so that it outlives the kernel or shell that started
    it. Its output goes to the file `log` in `where`, beside process.json. RunError if a process
    started there is alive, or just starting."""
    with alone(where / ".start", wait=False) as mine:
        if not mine:
            raise RunError(f"{what} is being started by another command")
        check_not_started(what, where)
        with open(where / log, "ab") as out, open(where / ALIVE, "ab") as kept:
            # The child holds this lock until it ends, whatever its host is called by then; its
            # children do not.
            fcntl.flock(kept, fcntl.LOCK_EX)
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=[kept.fileno()],
            )
        _children.append(child)
        process = {"host": platform.node(), "pid": child.pid, "pid_start": process_start(child.pid)}
        write_json(where / "process.json", process)


def _holds_lock(where: Path) -> bool:
    """Whether a process that was started there is alive, here or on another host that shares
    the folder."""
    with contextlib.suppress(FileNotFoundError), open(where / ALIVE, "rb") as kept:
        try:
            fcntl.flock(kept, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def process_of(where: Path) -> dict[str, Any] | None:
    """{host, pid, pid_start} of the process that was started last there; None where it is gone."""
    file = where / "process.json"
    if not file.is_file():
        return None
    process = read_json(file)
    return process if alive(process) or _holds_lock(where) else None


def check_not_started(what: str, where: Path) -> None:
    """RunError where a process that was started there is alive."""
    process = process_of(where)
    if process:
        raise RunError(
            f"{what} was started as process {process['pid']} on {process['host']}; "
            f"stop it first (codechat launch {what} stop)"
        )


def end(what: str, process: Mapping[str, Any], now: bool, where: Path) -> None:
    """SIGTERM to a process, or SIGKILL to it and its descendants, and wait. RunError on another
    host, or after SAVE_S."""
    if not alive(process):
        raise RunError(f"{what} runs on {process['host']}; stop it there (or with scancel)")
    pids = [process["pid"], *(descendants(process["pid"]) if now else ())]
    # the start tells a process from a later one of this number
    targets = {pid: process_start(pid) for pid in pids}
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(pid, signal.SIGKILL if now else signal.SIGTERM)
    ends = time.monotonic() + SAVE_S
    while any(begun and process_start(pid) == begun for pid, begun in targets.items()):
        if time.monotonic() > ends:
            raise RunError(
                f"{what} (process {process['pid']}) is still there; stop it with now=True (--now)"
            )
        time.sleep(0.1)
    ends = time.monotonic() + UNLOCK_S
    while (
        _holds_lock(where) or holder(paths.lock_of(where)) is not None
    ) and time.monotonic() < ends:
        time.sleep(0.02)


def error_line(log: Path) -> str | None:
    """The line of a log that says what went wrong: the last one with `error:`, else the last
    one."""
    if not log.is_file():
        return None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return next(reversed(errors or lines), None)


def follow(lines: Iterable[str], what: str) -> None:
    """Print lines as they come. An interrupt ends the following, not what is followed."""
    try:
        for line in lines:
            print(line, flush=True)
    except KeyboardInterrupt:
        print(f"stopped following {what}; it is still running")


def new_lines(file: Path, going: Callable[[], bool], every_s: float = 1.0) -> Iterator[str]:
    """Lines of a file as they are written, while `going` says so. A resumed run drops the lines
    behind its
    checkpoint: those that replace them are yielded too."""
    before: list[bytes] = []
    more = True
    while more:
        more = going()  # before reading, so that the last lines are read too
        lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
        kept = len(os.path.commonprefix([before, lines]))  # of any two lists
        yield from (line.decode(errors="replace") for line in lines[kept:])
        before = lines
        if more:
            time.sleep(every_s)


# ---- a run


def _folder(ref: str | Path) -> Path:
    path = paths.find_run(ref)
    if not (path / "launch.sh").is_file():
        raise MissingFile(
            f"run {paths.name_of(path)} has no launch.sh; "
            "write it: codechat launch LOOP -- SETTINGS"
        )
    return path


def start(ref: str | Path) -> Path:
    """Start launch.sh in a session of its own, with output in launch.log; returns the run's
    directory at once.

    A run that was stopped or killed continues. RunError if it is finished or running."""
    path = _folder(ref)
    state = paths.read_status(path)["status"]
    check_not_started(paths.name_of(path), path)
    if state in ("running", "finished"):
        raise RunError(f"run {paths.name_of(path)} is {state}; nothing to start")
    start_detached(["sh", str(path / "launch.sh")], path, "launch.log", paths.name_of(path))
    return path


def stop(ref: str | Path, *, now: bool = False) -> str:
    """Ask the run to save and end, and wait for it; its state afterwards. now=True kills it;
    the last checkpoint stays.

    RunError where nothing runs, where it runs on another host, or where it does not end."""
    path = _folder(ref)
    state = paths.read_status(path)
    owner = process_of(path) or (state if state["status"] == "running" else None)
    if owner is None:
        raise RunError(f"run {paths.name_of(path)} is not running ({state['status']})")
    end(f"run {paths.name_of(path)}", owner, now, path)
    return paths.read_status(path)["status"]


def status(ref: str | Path) -> dict[str, Any]:
    """{run, status, step, max_steps, reason, process, ...last metrics}. "starting" is a process
    that has not begun its run; "start failed" one that never did, with the last line of its log
    as reason."""
    path = _folder(ref)
    read = paths.read_status(path)
    process = process_of(path)
    state = read["status"]
    reason = read.get("reason")
    if process and state in (paths.PLANNED, "killed", "stopped"):
        state = "starting"
    elif state == paths.PLANNED and (path / "process.json").is_file():
        state = "start failed"
        reason = error_line(path / "launch.log")
    about = {
        "run": paths.name_of(path),
        "status": state,
        "reason": reason,
        "process": process["pid"] if process else None,
        "max_steps": read_json(path / "config.json").get("max_steps"),
        "step": 0,
    }
    for row in read_rows(path / "metrics.jsonl"):
        about |= {k: v for k, v in row.items() if k in ("step", *SHOWN)}
    return about


def lives(path: Path) -> bool:
    """Whether more metrics may come: a process is alive, or the run's status is running."""
    return process_of(path) is not None or paths.read_status(path)["status"] == "running"


def attach(ref: str | Path) -> dict[str, Any]:
    """Follow a run until it ends, a line for each logged step. An interrupt ends the following,
    not the run. Returns its `status`."""
    path = _folder(ref)
    lines = new_lines(path / "metrics.jsonl", lambda: lives(path))
    max_steps = status(path)["max_steps"]
    follow((line_of(json.loads(line), max_steps) for line in lines), paths.name_of(path))
    state = status(path)
    reason = f" ({state['reason']})" if state["reason"] else ""
    print(f"{state['run']}: {state['status']}{reason}")
    return state


def line_of(row: Mapping[str, Any], max_steps: int | None) -> str:
    """One logged step in words."""
    words = [f"step {row['step']}"]
    if max_steps:
        words[0] += f"/{max_steps}"
    for name in SHOWN:
        value = row.get(name)
        if isinstance(value, (int, float)):
            words.append(f"{name} {value:.4g} {unit_of(name)}".strip())
    return "  ".join(words)


# ---- the command


def print_rows(rows: Mapping[str, Any]) -> int:
    """Print a status; 1 where it is one of a failure."""
    for key, value in rows.items():
        print(f"  {key:<20}{'' if value is None else value}".rstrip())
    return int(rows["status"] in FAILED)


def check_order(words: list[str]) -> None:
    """ConfigError where a setting of the loop stands among those of the launch, before --."""
    entry = LAUNCHABLE.get(words[0]) if words else None
    for word in words:
        key = word.removeprefix("--").partition("=")[0]
        if not entry or key == word or config.find_field(LaunchConfig, key):
            continue
        if config.find_field(entry.config_class, key):
            raise ConfigError(
                f"{word} is a setting of {entry.command}; these come after --: "
                f"codechat launch {words[0]} --nproc 8 -- {word} ..."
            )


def main(argv: list[str]) -> int | None:
    """`codechat launch LOOP` or RUN; 1 where `status` or `tail` find a failure."""
    at = argv.index("--") if "--" in argv else len(argv)
    check_order(argv[:at])
    cfg = config.parse(LaunchConfig, argv[:at], prog="codechat launch", epilog=__doc__)
    if cfg.action != "write" and at < len(argv):
        raise ConfigError(f"settings after -- are for writing a launch; {cfg.action} takes none")
    if cfg.action == "status":
        return print_rows(status(cfg.what))
    if cfg.action == "tail":
        return int(attach(cfg.what)["status"] in FAILED)
    if cfg.action == "stop":
        print(f"{cfg.what}: {stop(cfg.what, now=cfg.now)}")
        return None
    name = cfg.what
    if cfg.action == "write":
        entry = registry.find(cfg.what, LAUNCHABLE)
        settings = entry.parse(
            argv[at + 1 :], prog=f"codechat launch {cfg.what} --", ranks=cfg.nproc * cfg.nodes
        )
        print(write(settings, cfg))
        name = settings.run_name
    if cfg.start or cfg.action == "start":
        start(name)
        print(f"started; codechat launch {name} tail")
    return None
