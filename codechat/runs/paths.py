"""Paths, names and states of run directories, and their creation. `run.Run` writes what is in them.

A reference is a run name (nano/sft: its latest checkpoint), NAME@best, NAME@1200, a run
directory, a checkpoint, or a file inside. released/NAME is a run that came with the package.
All are below runs/ of the folder in which a command is called (`codechat --root DIR` for
another one), or of the checkout where it is called inside of that.

A run may be planned: `launch` writes its directory, torchrun starts the loop later and takes
the directory over.

Who writes a run holds the lock .NAME.lock beside it, from before the directory is there until
the run ends: one process at a time has a name, and a running run whose lock is free was killed,
whatever host name its status has (`core.processes` says on which file systems).

A run that --overwrite replaces lies in .NAME.old until the new one has begun: a row of metrics,
a checkpoint, its end. If the new one fails or is killed before that, the former run comes
back."""

import contextlib
import dataclasses
import hashlib
import itertools
import os
import platform
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import codechat
from codechat.core import config as configs
from codechat.core import provenance
from codechat.core.atomic_files import atomic_directory, read_json, write_atomic, write_json
from codechat.core.errors import (
    CheckpointError,
    ConfigError,
    MissingFile,
    RunError,
    UserError,
    nearest,
)
from codechat.core.processes import holder, lock, process_start, unlock

_PACKAGE = Path(codechat.__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "pyproject.toml").is_file() else None
# runs/, data/ and reports/ of this process are below it: its folder, or the checkout of this
# package where that lies inside
ROOT = _CHECKOUT if _CHECKOUT and Path.cwd().is_relative_to(_CHECKOUT) else Path.cwd()
RELEASED = "released"  # released/NAME: runs that come with an installed package
RELEASED_GROUP = "codechat.released"  # of the entry points: packages whose folders are such runs
SHIPPED = _CHECKOUT or _PACKAGE / "shipped"  # nbs_py/ and reports/ as they came with the package
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")
STEP = re.compile(r"\.?step_(\d+)(\.old)?")
PLANNED = "planned"  # status of a run that was written and has not begun


def runs_dir() -> Path:
    return ROOT / "runs"


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file() and (path / "status.json").is_file()


def run_paths() -> list[Path]:
    """The directories of all runs, sorted. A former run that a kill left aside is put back
    first."""
    root = runs_dir()
    for old in (*root.glob(".*.old"), *root.glob("*/.*.old")):
        recover(old.with_name(old.name[1:].removesuffix(".old")))
    paths = [
        status.parent for status in (*root.glob("*/status.json"), *root.glob("*/*/status.json"))
    ]
    return sorted(path for path in paths if is_run(path) and not _hidden(path.relative_to(root)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@cache
def released_folders() -> tuple[Path, ...]:
    """Folders of released runs that installed packages bring, through the entry points of
    RELEASED_GROUP."""
    specs = [find_spec(point.value) for point in entry_points(group=RELEASED_GROUP)]
    return tuple(
        Path(folder).resolve()
        for spec in specs
        if spec
        for folder in spec.submodule_search_locations or ()
    )


def name_of(path: Path) -> str:
    if path.parent in released_folders():
        return f"{RELEASED}/{path.name}"
    root = runs_dir().resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


def _place(ref: str | Path) -> Path | None:
    """The path of a run name, or of a path that exists."""
    places = [runs_dir() / ref, Path(ref)]
    if Path(ref).parts[:1] == (RELEASED,):
        places += [folder.joinpath(*Path(ref).parts[1:]) for folder in released_folders()]
    for place in places:
        recover(place)
    return next((p.resolve() for p in places if p.exists()), None)


def no_such_run(ref: str | Path) -> MissingFile:
    paths = run_paths()
    for folder in released_folders():
        paths += [status.parent for status in folder.glob("*/status.json")]
    names = [name_of(path.resolve()) for path in paths]
    among = nearest(str(ref), names) if names else f"; there are no runs in {runs_dir()}"
    return MissingFile(f"no run {str(ref)!r}{among}{_how_to_make(str(ref))}")


def _how_to_make(ref: str) -> str:
    """Which command makes a run OWNER/NAME: a name on the hub has a capital or a digit, a stage
    of a recipe has neither."""
    owner, slash, name = ref.partition("@")[0].partition("/")
    if not slash or "/" in name or owner in ("", ".", "..", RELEASED):
        return ""
    if (runs_dir() / owner).is_dir():  # it has other runs
        return ""
    if re.search("[A-Z0-9]", name):
        given = name.lower()
        return (
            f"; a model of the hub becomes a run with: hf download {ref} --local-dir {given}, "
            f"then codechat import {given} --run-name {given}"
        )
    return f"; a recipe makes its runs: codechat run {owner}"


def _run_around(path: Path) -> Path | None:
    """The run whose directory is `path` or holds it; None without one."""
    return next((folder for folder in (path, *path.parents) if is_run(folder)), None)


def find_run(ref: str | Path) -> Path:
    """The directory of a run from its name, itself, or anything inside; MissingFile names what
    exists."""
    place = _place(ref)
    if place is None:
        raise no_such_run(ref)
    run = _run_around(place)
    if run is None:
        raise MissingFile(f"{ref} is not a run: no config.json and status.json there")
    return run


def check_outside(out: str | Path) -> None:
    """ConfigError where a folder to write is a run's, or lies within one."""
    run = _run_around(Path(out).resolve())
    if run is not None:
        raise ConfigError(
            f"got --out {out}, within run {name_of(run)}; "
            "expected no folder of a run; choose another --out"
        )


def exists(name: str) -> bool:
    """Whether a run of this name exists, in any state."""
    recover(runs_dir() / name)
    return is_run(runs_dir() / name)


def free_name(name: str) -> str:
    """The name, or the first of NAME-2, NAME-3, ... that no run has."""
    free = name
    number = 1
    while exists(free):
        number += 1
        free = f"{name}-{number}"
    return free


def checkpoint_paths(run_path: Path) -> dict[int, Path]:
    """step -> directory, ascending. A step whose replacement was killed between two renames is
    read from .step_N.old."""
    folder = run_path / "checkpoints"
    steps: dict[int, Path] = {}
    for path in (*folder.glob("step_*"), *folder.glob(".step_*.old")):
        m = STEP.fullmatch(path.name)
        if m and (path / "meta.json").is_file():
            # the new directory is globbed first: the old one counts only where there is none
            steps.setdefault(int(m[1]), path)
    return dict(sorted(steps.items()))


def pointed_step(run_path: Path, which: str) -> int | None:
    """The step that checkpoints/latest or checkpoints/best names."""
    pointer = run_path / "checkpoints" / which
    m = STEP.fullmatch(pointer.read_text(errors="replace").strip()) if pointer.is_file() else None
    return int(m[1]) if m else None


def latest_step(run_path: Path) -> int | None:
    """The step that checkpoints/latest names or, where that was deleted, the last one that is
    there."""
    steps = checkpoint_paths(run_path)
    named = pointed_step(run_path, "latest")
    return named if named in steps else max(steps, default=None)


def _checkpoint_of(run_path: Path, which: str) -> Path:
    name = name_of(run_path)
    steps = checkpoint_paths(run_path)
    if not steps:
        state = read_status(run_path)["status"]
        raise MissingFile(
            f"run {name} ({state}) has no checkpoint yet; train "
            "it first, or continue it with --resume"
        )
    best = pointed_step(run_path, "best")
    step = (
        int(which)
        if which.isdecimal()
        else {"latest": latest_step(run_path), "best": best}.get(which)
    )
    if step not in steps:
        there = ", ".join(map(str, [*steps, "latest", *(["best"] if best is not None else [])]))
        remedy = f"`codechat evaluate --ckpt {name} --task TASK --all-checkpoints` chooses the best"
        raise MissingFile(f"run {name} has no checkpoint {which!r}; it has {there}; {remedy}")
    return steps[step]


def find_checkpoint(ref: str | Path) -> Path:
    """The directory of a checkpoint from its reference."""
    text = str(ref)
    which = "latest"
    if _place(text) is None and "@" in text:
        text, _, which = text.rpartition("@")
    place = _place(text)
    if place is None:
        raise no_such_run(text)
    folder = place.parent if place.is_file() else place
    if (folder / "meta.json").is_file():
        return folder
    run_path = folder.parent if folder.name == "checkpoints" else folder
    if place.is_dir() and is_run(run_path):
        return _checkpoint_of(run_path, which)
    foreign = place.is_file() or (place / "config.json").is_file()
    remedy = (
        f"`codechat import {ref} --run-name NAME` makes a run of weights from elsewhere"
        if foreign
        else "name a run"
    )
    raise CheckpointError(f"{ref} is not a CodeChat checkpoint: no meta.json in {folder}; {remedy}")


def chosen_checkpoint(ref: str | Path) -> tuple[Path, str]:
    """`find_checkpoint`, but a run without a step means the checkpoint that evaluation chose;
    and which of several it is."""
    path = find_checkpoint(ref)
    place = _place(ref)
    run_path = path.parent.parent
    steps = checkpoint_paths(run_path) if is_run(run_path) else {}
    if place not in (run_path, run_path / "checkpoints") or len(steps) < 2:
        return path, ""
    name = name_of(run_path)
    best = pointed_step(run_path, "best")
    latest = latest_step(run_path)
    if best not in steps:
        return path, f"{name} = step {latest} (the latest; no evaluation chose one)"
    return steps[
        best
    ], f"{name} = step {best} (@best, which evaluation chose; the latest is step {latest})"


# ---- adapters and their bases


class Base(NamedTuple):
    """The checkpoint whose weights adapters are added to."""

    checkpoint: str  # RUN@STEP, or the path of one that is not below runs/
    fingerprint: str = ""  # "" = any: a released adapter names a pretrained model
    scale: float = 1.0  # of B A
    sha256: str = ""  # of the one file that the pretrained model was imported from, if it was


def base_of(meta: Mapping[str, Any]) -> Base | None:
    """From a checkpoint's meta.json; None where it holds all weights."""
    base = meta.get("base")
    if isinstance(base, str):
        scale = float(meta.get("scale", 1.0))
        return Base(f"base/{base}", scale=scale, sha256=imported_sha256(meta))
    return Base(**base) if base else None


def imported_sha256(meta: Mapping[str, Any]) -> str:
    """sha256 of the file that the weights began as, from a checkpoint's meta.json; "" where
    they began as a folder of files, or here."""
    lineage = meta.get("lineage") or [{}]
    return str(lineage[0].get("sha256", ""))


def fingerprint(meta: Mapping[str, Any]) -> str:
    """Which weights these are, from a checkpoint's meta.json: RUN@STEP and a hash of the files'
    hashes, and of adapters' base; "" without files."""
    files = meta.get("files")
    if not files:
        return ""
    base = base_of(meta)
    parts = [f"{name}{files[name]['sha256']}" for name in sorted(files)]
    if base:
        parts.append(base.fingerprint)
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()
    return f"{meta['run']}@{meta['step']}-{digest[:12]}"


def reference_of(path: Path) -> str:
    """RUN@STEP of a checkpoint's directory, or its path where no run name means it."""
    run_path = path.parent.parent
    step = STEP.fullmatch(path.name)
    name = name_of(run_path.resolve())
    if step and is_run(run_path) and _place(name) == run_path.resolve():
        return f"{name}@{int(step[1])}"
    return str(path.resolve())


def find_base(base: Base) -> Path | None:
    """The directory of a base, also of a run that `move_away` has renamed; None where it is
    missing or has changed."""
    refs = [base.checkpoint]
    run, _, step = base.checkpoint.rpartition("@")
    if run:
        renamed = _numbered(runs_dir() / run)
        refs += [f"{run}.{path.suffix[1:]}@{step}" for path in renamed]
    for ref in refs:
        with contextlib.suppress(UserError):
            folder = find_checkpoint(ref)
            meta = read_json(folder / "meta.json")
            if _is_base(base, meta):
                return folder
    return None


def _is_base(base: Base, meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds the weights that adapters belong to."""
    sha256 = imported_sha256(meta)
    if base.sha256 and sha256 and base.sha256 != sha256:
        return False
    return base.fingerprint in ("", fingerprint(meta))


def _numbered(run_path: Path) -> list[Path]:
    """NAME.1, NAME.2, ... of a run NAME."""
    others = run_path.parent.glob(f"{run_path.name}.*")
    return sorted(path for path in others if path.suffix[1:].isdecimal())


def needed_steps(run_path: Path) -> dict[int, str]:
    """Steps that are the base of other runs' adapters, and one of these runs each."""
    real = run_path.resolve()
    began_as = re.sub(r"\.\d+$", "", name_of(real))  # before `move_away`
    needed: dict[int, str] = {}
    for env in (*runs_dir().glob("*/env.json"), *runs_dir().glob("*/*/env.json")):
        user = env.parent
        with contextlib.suppress(UserError, KeyError, AttributeError):  # of a damaged run
            parent = read_json(env).get("parent") or {}
            # meta.json holds a tokenizer: only those of runs that may need this one are read
            if parent.get("run") not in (name_of(real), began_as):
                continue
            steps = checkpoint_paths(user)
            for step in steps.values():
                base = base_of(read_json(step / "meta.json"))
                folder = find_base(base) if base else None
                number = folder and STEP.fullmatch(folder.name)
                if folder and number and folder.parent.parent.resolve() == real:
                    needed[int(number[1])] = name_of(user.resolve())
            if not steps and _will_save_adapters(user):
                needed[parent["step"]] = name_of(user.resolve())
    return needed


def _will_save_adapters(run_path: Path) -> bool:
    """Whether a run trains adapters right now."""
    trains_adapters = read_json(run_path / "config.json").get("lora_rank")
    return bool(trains_adapters) and read_status(run_path)["status"] == "running"


def check_not_needed(name: str) -> None:
    """ConfigError where adapters of another run need the run of this name."""
    for step, other in needed_steps(runs_dir() / name).items():
        raise ConfigError(
            f"--overwrite would delete run {name}, whose step {step} the adapters of run {other} "
            "are added to; choose another --run-name, or delete that run first"
        )


# ---- status


def read_status(run_path: Path) -> dict[str, Any]:
    """status.json; the status is "killed" where nobody holds the lock of a running run."""
    path = run_path / "status.json"
    status = read_json(path)
    if not isinstance(status.get("status"), str) or not isinstance(status.get("pid"), int | None):
        raise RunError(f"{path} has no readable status or pid; the run is damaged")
    if status["status"] == "running" and holder(lock_of(run_path)) is None:
        status |= {"status": "killed", "reason": f"process {status.get('pid')} is gone"}
    return status


# ---- names in use


def check_name(name: str) -> None:
    """ConfigError or RunError where no run can have this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"run name {name!r}; it takes letters, digits and . "
            "_ -, with at most one / (as in nano/sft)"
        )
    if name.partition("/")[0] == RELEASED:
        raise ConfigError(
            f"run name {name!r}; {RELEASED}/ is for the runs "
            "that come with the package; choose another"
        )
    path = runs_dir() / name
    if is_run(path.parent):
        raise ConfigError(
            f"run name {name!r} is inside run {path.parent.name!r}; choose another --run-name"
        )
    if path.exists() and not is_run(path) and any(path.iterdir()):
        raise RunError(
            f"{path} exists and is not a run; choose another --run-name, or move it away"
        )


def _beside(run_path: Path, kind: str) -> Path:
    """.NAME.KIND beside a run, which no run can be called; where the run is a link, beside what
    it links to."""
    real = run_path.resolve()
    return real.with_name(f".{real.name}.{kind}")


def lock_of(run_path: Path) -> Path:
    return _beside(run_path, "lock")


def hold(run_path: Path) -> None:
    """Claim the name of the run for this process; RunError where another one has it."""
    place = lock_of(run_path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if not lock(place):
        pid = holder(place)
        who = f"process {pid}" if pid else "another process"
        raise RunError(
            f"run {name_of(run_path.resolve())} is being written by {who}; "
            "stop it, or choose another --run-name"
        )


# ---- runs that --overwrite replaces


def has_begun(run_path: Path) -> bool:
    """Whether a run holds something that took time: a row of metrics, a checkpoint, or a
    finished result."""
    if (run_path / "metrics.jsonl").exists() or checkpoint_paths(run_path):
        return True
    return is_run(run_path) and read_json(run_path / "status.json").get("status") == "finished"


def recover(run_path: Path) -> None:
    """Where a kill left a former run in .NAME.old: put it back, unless the run in its place has
    begun or was launched and still may.

    Nothing where the name is being written, or no former run is there."""
    # only readable; a text that is no path; a damaged run
    with contextlib.suppress(OSError, ValueError, RunError):
        place = lock_of(run_path)
        if is_run(_beside(run_path, "old")) and holder(place) is None and lock(place):
            settle_former(run_path)
            unlock(place)


def settle_former(run_path: Path) -> bool:
    """For who holds the lock: delete the former run where the new one has begun, else put it
    back; whether it was put back.

    It stays aside while a launched run is in its place, which has its log there and may be
    started again."""
    real = run_path.resolve()
    old = _beside(run_path, "old")
    if not old.exists():
        return False
    if real.exists() and has_begun(real):
        shutil.rmtree(old, ignore_errors=True)
        return False
    if not is_run(old) or (real / "launch.sh").is_file():
        return False
    if real.exists():
        shutil.rmtree(real)
    os.rename(old, real)
    return True


def drop_former(run_path: Path) -> None:
    """Delete what the run has replaced."""
    shutil.rmtree(_beside(run_path, "old"), ignore_errors=True)


def _places_read(config: Any, parent: str | Path | None) -> Iterator[tuple[str, Path]]:
    """(flag, place) of all that a configuration reads: directories of runs and checkpoints,
    data, files."""
    if not dataclasses.is_dataclass(config):
        config = None
    refs = configs.read_by(config, "run") if config else []
    if parent is not None:
        refs = [*refs, ("--init-from", str(parent))]
    for flag, ref in refs:
        for place in _places_of_run(ref):
            yield flag, place
    for flag, text in configs.read_by(config, "path") if config else []:
        # a path, or one within hf:DIR, FILE.py:CLASS or DOMAIN=FILE
        parts = (text, *text.partition(":")[::2], text.partition("=")[2])
        for part in parts:
            if part and os.path.exists(part):  # False for a text that is no path
                yield flag, Path(part).resolve()


def _places_of_run(ref: str) -> Iterator[Path]:
    """A reference's run and checkpoint, and those that its adapters are added to."""
    for text in (ref, ref.rpartition("@")[0]):
        place = _place(text) if text else None
        if place:
            yield place
    with contextlib.suppress(UserError):  # who reads it says what is wrong with it
        folder = find_checkpoint(ref)
        yield from (folder.resolve(), folder.parent.parent.resolve())
        base = base_of(read_json(folder / "meta.json"))
        place = find_base(base) if base else None
        if place:
            yield from _places_of_run(str(place))


def check_not_read(
    name: str,
    config: Any,
    parent: str | Path | None = None,
    what: str = "--overwrite would delete",
) -> None:
    """ConfigError where a command reads the run of this name, or anything inside."""
    real = (runs_dir() / name).resolve()
    for flag, place in _places_read(config, parent):
        if place.is_relative_to(real):
            raise ConfigError(
                f"{what} run {name}, which holds what {flag} reads; choose another --run-name"
            )


# ---- resumed runs


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_same(name: str, config: Any) -> None:
    """RunError where a resumed run would compute something else than its config.json says;
    ranks may share a step anew."""
    path = runs_dir() / name
    stored = read_json(path / "config.json")
    now = configs.identity(config) if dataclasses.is_dataclass(config) else dict(config)
    stored = {setting: stored[setting] for setting in now if setting in stored}
    if "device_batch_size" in now:
        _join_batch(stored, read_json(path / "env.json")["world_size"])
        _join_batch(now, _ranks())
    changes = configs.differences(stored, now)
    if changes:
        listed = ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in changes.items())
        raise RunError(
            f"run {name} was begun with other settings: {listed}; "
            "use the same, or choose another --run-name"
        )


def _join_batch(settings: dict[str, Any], ranks: int) -> None:
    """Put the rows of a step in the place of the settings and ranks that share them."""
    rows = settings.pop("device_batch_size") * settings.pop("grad_accum", 1) * ranks
    settings["device_batch_size x grad_accum x ranks"] = rows


def same_launch(name: str) -> bool:
    """Whether the run of this name was begun, or last resumed, under the torchrun of this
    process."""
    if not exists(name):
        return False
    env = read_json(runs_dir() / name / "env.json")
    return [env, *env.get("resumed", [])][-1].get("launch") == os.environ.get("TORCHELASTIC_RUN_ID")


# ---- creation


def _parent_record(ref: str | Path | None) -> dict[str, Any] | None:
    if ref is None:
        return None
    path = find_checkpoint(ref)
    owner = path.parent.parent
    m = STEP.fullmatch(path.name)
    return {
        "ref": str(ref),
        "run": name_of(owner) if is_run(owner) else None,
        "step": int(m[1]) if m else None,
    }


_preparing = threading.RLock()  # the threads of a process share its locks


@contextlib.contextmanager
def _claimed(path: Path, for_good: bool) -> Iterator[bool]:
    """Hold the name of a run within the block, `for_good` also after it unless it fails;
    whether this process had it before."""
    with _preparing:
        before = holder(lock_of(path)) == os.getpid()
        hold(path)
        done = False
        try:
            yield before
            done = True
        finally:
            if not before and not (done and for_good):
                unlock(lock_of(path))


def prepare(
    name: str,
    config: Any,
    kind: str,
    parent: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    plan: Mapping[str, str] | None = None,
) -> Path:
    """Create the directory of a run, complete or not at all, or take over that of a resumed or
    planned one. plan: text files of a run that is only planned, whose ranks will lock it. The
    name is claimed before anything is written."""
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; keep one")
    check_name(name)
    path = runs_dir() / name
    if resume and not exists(name):
        raise no_such_run(name)
    with _claimed(path, for_good=plan is None) as mine:
        settle_former(path)
        there = is_run(path)
        state = read_status(path)["status"] if there else ""
        if state == "running" and not mine:
            state = "killed"  # its lock was free until now
        planned = state == PLANNED and not overwrite
        if there and not (resume or overwrite or planned):
            continued = "--resume to continue it, " if hasattr(config, "resume") else ""
            raise RunError(
                f"run name {name!r} is in use ({state}); "
                f"set --run-name {free_name(name)}, {continued}or --overwrite to replace it"
            )
        if there and overwrite:
            check_not_read(name, config, parent)
            check_not_needed(name)
        # before anything is written: a parent that is missing must leave nothing behind
        origin = _parent_record(parent)
        here = _env_here(kind, config)
        status = _first_status(kind, planned=plan is not None)
        if plan is None and resume and not planned:
            check_same(name, config)
            _continue(path, here, status)
            return path
        settings = configs.plain(config)
        # of this command alone: --config goes on with the run, and keeps it
        if settings.get("overwrite"):
            settings["overwrite"] = False
        files = {
            "config.json": settings,
            "env.json": here | {"parent": origin},
            "status.json": status,
        }
        if plan is None and planned:  # in place: launch.sh and its log stay where they are
            for file, value in files.items():
                write_json(path / file, value)
            return path
        _create(path, files, plan or {}, replaces_plan=state == PLANNED)
    return path


def _env_here(kind: str, config: Any) -> dict[str, Any]:
    """What env.json says of this process."""
    return {
        "kind": kind,
        "config_hash": configs.config_hash(config),
        **provenance.snapshot(SHIPPED),
        "world_size": _ranks(),
        "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
    }


def _continue(path: Path, here: dict[str, Any], status: dict[str, Any]) -> None:
    """Enter in the files of a run that this process resumes it; config.json stays."""
    # both are read first: a damaged one must leave the other as it is
    env = read_json(path / "env.json")
    started = read_json(path / "status.json")["started"]
    write_json(path / "env.json", env | {"resumed": [*env.get("resumed", []), here]})
    write_json(path / "status.json", status | {"started": started})


def _create(
    path: Path, files: Mapping[str, Any], plan: Mapping[str, str], replaces_plan: bool
) -> None:
    """Make the directory, complete or not at all. The former run stays aside; a plan that
    another one replaces need not, unless a run waits there already."""
    new = _beside(path, "new")
    shutil.rmtree(new, ignore_errors=True)  # a kill left it
    keep_old = not replaces_plan or _beside(path, "old").exists()
    with atomic_directory(path.resolve(), new, keep_old=keep_old) as fresh:
        (fresh / "checkpoints").mkdir()
        for file, value in files.items():
            write_json(fresh / file, value)
        for file, text in plan.items():
            write_atomic(fresh / file, text)


def _first_status(kind: str, planned: bool) -> dict[str, Any]:
    """status.json of a run that is planned, or that this process begins now."""
    status: dict[str, Any] = {
        "reason": None,
        "kind": kind,
        "started": None,
        "ended": None,
        "summary": {},
        "host": platform.node(),
        "status": PLANNED,
    }
    if not planned:
        status["status"] = "running"
        status["started"] = provenance.now()
        status["pid"] = os.getpid()
        status["pid_start"] = process_start(os.getpid())
    return status


def move_away(name: str) -> Path:
    """Rename a run that has ended to NAME.1, or the next number that is free; its new
    directory. RunError where it is being written."""
    path = runs_dir() / name
    with _claimed(path, for_good=False):
        numbered = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
        free = next(other for other in numbered if not other.exists())
        path.rename(free)
    return free
