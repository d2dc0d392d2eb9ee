"""Checkpoints: everything a run needs to continue on the same curve, in a directory that is
complete or absent.

    checkpoints/step_000120/model.pt   weights, float32
                            optim.pt   optimizer states, which only --resume needs: not after a
                                       run's last step, nor in older steps that are kept
                            ranks.pt   random states, and the `extra` of each rank
                            meta.json  shapes, tokenizer, tags, lineage, sizes and hashes of the
                                       files
                            .hashes.json  hashes that were computed when large files were read
    checkpoints/step_001000/model.safetensors   all of a released one but meta.json
                                                (`formats.exchange`)
    checkpoints/step_000120/adapter.safetensors  in place of the weights: what is added to those
                                                of a base, another checkpoint or a pretrained
                                                model, which meta.json names
    checkpoints/latest, best           text: the name of a step

A sharded model has its weights and optimizer states in shards/ instead (`sharded_checkpoint`).
Either kind is read into a whole or a sharded model, by any number of ranks. Files are read
without executing what they hold (`weights_only`), after their hashes are verified.
`meta["lineage"]` lists the runs behind the weights, oldest first."""

import contextlib
import itertools
import os
import pickle
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import get_native_id
from typing import Any

import numpy as np
import torch
import torch.distributed as td
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from codechat.core import config
from codechat.core.atomic_files import (
    atomic_directory,
    file_record,
    read_json,
    write_atomic,
    write_json,
)
from codechat.core.errors import CheckpointError, MissingFile, UserError
from codechat.distributed import dist, sharding
from codechat.runs.paths import (
    Base,
    base_of,
    checkpoint_paths,
    exists,
    find_base,
    find_checkpoint,
    fingerprint,
    imported_sha256,
    name_of,
    needed_steps,
    pointed_step,
)

FORMAT = 1
RELEASED_WEIGHTS = "model.safetensors"
HASHES = ".hashes.json"  # of the large files, with their size and time: `_sha256`
SETTLED_NS = 2_000_000_000
NOTED_BYTES = 1 << 26  # smaller files are hashed in a tenth of a second
ADAPTER = "adapter.safetensors"
OPTIMIZERS = "optim.pt"
RESUMABLE = 2
resolve = find_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` has read. `optim_state` is None if it was not requested; `rng` is
    None if the number of ranks has changed."""

    path: Path
    step: int
    meta: dict[str, Any]
    model_state: Mapping[str, Tensor]
    optim_state: Mapping[str, Tensor] | None  # by NAME.KEY, as `optimizer_states` names them
    extra: dict[str, Any]
    rng: dict[str, Any] | None
    # A and B of a run with adapters, as `models.lora.adapters` names them
    adapters: Mapping[str, Tensor] = field(default_factory=dict)


# ---- what is saved


def rng_state() -> dict[str, Any]:
    """The global random states of this rank: python, numpy, torch, and its GPU."""
    numpy_state: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]  # the legacy form, a tuple
    kind, keys, *rest = numpy_state
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def on_host(value: Any) -> Any:
    """A copy in host memory, which later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {k: on_host(v) for k, v in value.items()}
    return type(value)(map(on_host, value)) if isinstance(value, (list, tuple)) else value


def _parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[torch.optim.Optimizer, Tensor]]:
    """{name: (its optimizer, parameter)}. Parameters outside the model, such as those of a value
    head, are numbered."""
    names = {p: name for name, p in model.named_parameters()}
    beside = itertools.count()
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names[p] if p in names else f"beside.{next(beside)}"
                found[name] = (optimizer, p)
    return found


def optimizer_states(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """The tensors of the optimizers as NAME.KEY: reading depends neither on the sharding nor on
    the order of parameters."""
    found = {}
    for name, (optimizer, p) in _parameters(model, optimizers).items():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}.{key}"] = value
    return found


def _describe(
    run_path: Path,
    step: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    meta: Mapping[str, Any],
) -> dict[str, Any]:
    shape = getattr(model, "cfg", None)
    about = {
        "format": FORMAT,
        "step": step,
        "run": name_of(run_path.resolve()),
        "saved": round(time.time(), 3),
        "torch": torch.__version__,
        "world_size": dist.world_size(),
        "sharded": sharding.is_sharded(model),
        "model": type(model).__name__,
        "optimizers": [type(o).__name__ for o in optimizers],
        "model_config": shape and config.plain(shape),
        **config.plain(meta),
    }
    # the last entry is this run's own: it says at which step the weights were saved
    if about.get("lineage"):
        about["lineage"] = [*about["lineage"][:-1], {**about["lineage"][-1], "step": step}]
    return about


# ---- files


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def write_step(
    final: Path,
    contents: Mapping[str, Any],
    meta: dict[str, Any],
    shards: Mapping[str, Any],
) -> None:
    """Create the directory `final` of a step, complete or not at all, and point `latest` at it.

    contents: {file: value}. shards: {file: record} of the files that are in its temporary
    directory already."""
    records = dict(shards)
    with atomic_directory(final, _temporary(final)) as fresh:
        for name, value in contents.items():
            with open(fresh / name, "wb") as out:
                if name == ADAPTER:
                    out.write(safetensors_bytes(value))
                else:
                    torch.save(value, out)
                out.flush()
                # on the disk before the directory gets its name
                os.fsync(out.fileno())
            records[name] = file_record(fresh / name)
        write_json(fresh / "meta.json", meta | {"files": records})
    # last: a kill before this line leaves the former step as the latest
    write_atomic(final.parent / "latest", final.name + "\n")


def prune(run_path: Path, step: int, keep_last: int) -> None:
    """Remove old steps except the newest `keep_last`, this step, latest and best, and those that
    adapters of other runs need, and what a killed run left. A step is renamed before it is
    removed: it is never there in part. Optimizer states stay in the newest `keep_last`, or where
    all are kept in the newest RESUMABLE: a damaged newest one can be continued from before it."""
    paths = checkpoint_paths(run_path)
    for left in {*(run_path / "checkpoints").glob(".step_*")} - {*paths.values()}:
        shutil.rmtree(left)
    kept = {
        *list(paths)[-keep_last:],
        step,
        pointed_step(run_path, "latest"),
        pointed_step(run_path, "best"),
    }
    dropped = paths.keys() - kept if keep_last > 0 else set()
    if dropped:
        dropped -= needed_steps(run_path).keys()
    for old in sorted(dropped):
        os.rename(paths[old], _temporary(paths[old]))
        shutil.rmtree(_temporary(paths[old]))
    resumable = {*list(paths)[-(keep_last or RESUMABLE) :], step}
    for old in paths.keys() - dropped - resumable:
        (paths[old] / OPTIMIZERS).unlink(missing_ok=True)


def _verify(folder: Path, files: Mapping[str, Any], names: Sequence[str]) -> None:
    """CheckpointError, on every rank, for a missing or damaged file. Each rank hashes every
    world-size-th file, unless its hash is known. A collective."""
    known = _known_hashes(folder)
    with dist.together():
        for i, name in enumerate(names):
            path = folder / name
            mine = i % dist.world_size() == dist.rank()
            # size first: a cut file is found without reading it
            whole = path.is_file() and path.stat().st_size == files[name]["bytes"]
            if not whole or (mine and _sha256(path, known) != files[name]["sha256"]):
                remedy = (
                    "use another step, RUN@STEP; to continue from "
                    f"there, delete {folder}, then set --resume"
                )
                raise CheckpointError(f"{path} is missing or damaged; {remedy}")
    # a directory that cannot be written is hashed every time
    with contextlib.suppress(OSError):
        if known != _known_hashes(folder):
            write_json(folder / HASHES, known)


def _known_hashes(folder: Path) -> dict[str, Any]:
    """{file: {bytes, modified, sha256}} that `_sha256` noted; empty where nothing is to be read."""
    with contextlib.suppress(UserError):
        return read_json(folder / HASHES)
    return {}


def _sha256(path: Path, known: dict[str, Any]) -> str:
    """The hash of a file: of 2 GB it takes two seconds, so it is noted in `known`, and taken from
    there while the file has the same size and time of its last change."""
    about = path.stat()
    now = {"bytes": about.st_size, "modified": about.st_mtime_ns}
    noted = known.get(path.name)
    if isinstance(noted, dict) and now.items() <= noted.items() and "sha256" in noted:
        return str(noted["sha256"])
    record = file_record(path)
    # a file that was just written may change again within the same tick of the clock
    if time.time_ns() - about.st_mtime_ns > SETTLED_NS and record["bytes"] >= NOTED_BYTES:
        known[path.name] = now | record
    return str(record["sha256"])


def _identity(path: Path) -> tuple[int, ...]:
    """Equal while it is the same file with the same content; empty without one."""
    with contextlib.suppress(FileNotFoundError):
        about = path.stat()
        return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    return ()


class MappedWeights(Mapping[str, Tensor]):
    """Float32 weights that stay in their file: a tensor takes memory while it is held, and what
    was read of it.

    The file is mapped anew after every SHARE-th part of it: what was read through a former map is
    given back with the last tensor of it. A tensor that is larger has a map of its own."""

    SHARE = 16
    LEAST = 1 << 24  # bytes of such a part

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _identity(path)
        self.most = max(self.LEAST, path.stat().st_size // self.SHARE)
        self.tensors: dict[str, Tensor] = _read_file(path, mmap=True)
        self.about = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        self.read = 0

    def __getitem__(self, name: str) -> Tensor:
        size = self.about[name].nbytes
        # where the file was replaced or removed meanwhile, the former map still has its content
        if self.read + size > self.most and _identity(self.path) == self.file:
            self.tensors = _read_file(self.path, mmap=True)
            self.read = 0
        self.read += size
        return self.tensors[name]

    def own(self, name: str) -> Tensor:
        """The tensor in a map of its own, which is private (torch.load's default): only what is
        changed in it takes memory, and the file stays as it is."""
        if _identity(self.path) != self.file:
            return self.tensors[name].clone()
        return _read_file(self.path, mmap=True)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.about)

    def __len__(self) -> int:
        return len(self.about)


def _read_file(path: Path, mmap: bool = False) -> Any:
    """The content, on the CPU, of a verified file; executes nothing in it. Released weights as
    float32."""
    try:
        if path.name in (RELEASED_WEIGHTS, ADAPTER):
            return {name: tensor.float() for name, tensor in load_file(path).items()}
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError, SafetensorError) as e:
        raise CheckpointError(f"{path} cannot be read by torch {torch.__version__} ({e})") from e


# ---- writing


def _low_priority() -> None:
    """Linux sets the priority of a thread: hashing must not take a core from the steps of a CPU
    run."""
    os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)


_writer = futures.ThreadPoolExecutor(1, "checkpoint", _low_priority)
_under_way: futures.Future[None] | None = None


def settle() -> None:
    """Wait for the checkpoint that is being written, if any. Raises its error on every rank. A
    collective."""
    global _under_way
    write = _under_way
    _under_way = None
    if write:
        with dist.together():
            write.result()


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """At the end of the block no checkpoint is being written."""
    try:
        yield
    except BaseException:  # the block's own error comes before one of the checkpoint
        futures.wait([_under_way] if _under_way else [])
        raise
    settle()


@lru_cache(maxsize=1)
def _group_for_writing(world: td.ProcessGroup) -> td.ProcessGroup:
    """A separate gloo group: the collectives of the writing thread must not mix with those of the
    steps."""
    dist.when_destroyed(_group_for_writing.cache_clear)
    return td.new_group(backend="gloo")


def save(
    run_path: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    extra: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    adapters: Mapping[str, Tensor] | None = None,
    keep_last: int = 2,
    wait: bool = True,
) -> Path:
    """Write checkpoints/step_<step> and point `latest` at it; returns its directory. A
    collective.

    extra: this rank's own state (data cursor, ...). meta: json about the model (tokenizer,
    tags, lineage). weights: in place of the model's. adapters: A and B of every adapter; where
    meta has a `base`, no other weights are saved. wait: False lets a thread write a copy in
    host memory; its errors are raised by the next `save` or by `settle`. Kept: the newest
    `keep_last` (0 = all), best and latest. CheckpointError where the disk fails; the former
    ones are untouched."""
    global _under_way
    settle()
    final = Path(run_path) / "checkpoints" / f"step_{step:06d}"
    ranks = dist.gather({"extra": dict(extra or {}), "rng": rng_state()})
    about = _describe(Path(run_path), step, model, optimizers, meta or {})
    states: dict[str, Any] = {}
    if not (adapters and "base" in about):
        about.pop("base", None)  # of a meta that was read from a checkpoint of adapters
        states["model.pt"] = model.state_dict() if weights is None else weights
    if adapters:
        states[ADAPTER] = adapters
    if optimizers:
        states[OPTIMIZERS] = optimizer_states(model, optimizers)
    sharded = sharding.is_sharded(model)
    if sharded:
        from codechat.runs import sharded_checkpoint

        group = _group_for_writing(td.group.WORLD)
    # the thread must write the weights of this step while later steps change them
    if not wait and (sharded or dist.is_main()):
        states = on_host(states)

    def job() -> None:
        try:
            if dist.is_main():
                shutil.rmtree(_temporary(final), ignore_errors=True)
            shards = {}
            if sharded:
                parts = {name.removesuffix(".pt"): value for name, value in states.items()}
                shards = sharded_checkpoint.write(_temporary(final), parts, group)
            if dist.is_main():
                whole = {} if sharded else states
                write_step(final, whole | {"ranks.pt": ranks}, about, shards)
                with contextlib.suppress(OSError):  # the next save tries again
                    prune(final.parent.parent, step, keep_last)
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk as a RuntimeError
            remedy = "free space, then continue with --resume; earlier checkpoints are intact"
            raise CheckpointError(f"checkpoint {final} cannot be written ({e}); {remedy}") from e

    if wait:
        with dist.together():
            job()
    else:
        _under_way = _writer.submit(job)
    return final


def set_best(run_path: str | Path, step: int) -> None:
    """Let NAME@best mean this step. `prune` keeps it."""
    write_atomic(Path(run_path) / "checkpoints" / "best", f"step_{step:06d}\n")


# ---- reading


def read_meta(ref: str | Path) -> dict[str, Any]:
    """meta.json of a checkpoint. CheckpointError for another format or missing entries."""
    path = find_checkpoint(ref) / "meta.json"
    meta = read_json(path)
    if meta.get("format") != FORMAT or not {"step", "run", "files"} <= meta.keys():
        raise CheckpointError(
            f"{path} has format {meta.get('format')!r}; this version reads format {FORMAT}"
        )
    return meta


def check(ref: str | Path) -> None:
    """CheckpointError for a missing or damaged file, optimizer states excepted. A collective."""
    path = find_checkpoint(ref)
    files = read_meta(path)["files"]
    _verify(path, files, [name for name in files if name != OPTIMIZERS])


def load(ref: str | Path, *, optimizer: bool = True, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint from its reference (`runs.paths`). A collective. mmap leaves the
    weights in their file; the tensors of a sharded checkpoint are read when they are
    accessed."""
    settle()
    path = find_checkpoint(ref)
    meta = read_meta(path)
    files = meta["files"]
    step = meta["step"]
    if optimizer and OPTIMIZERS in files and not (path / OPTIMIZERS).exists():
        raise CheckpointError(
            f"{path / OPTIMIZERS} is missing: older steps that are kept lose their optimizer "
            "states; give it to --init-from of another run"
        )
    _verify(path, files, [name for name in files if optimizer or name != OPTIMIZERS])
    state: Mapping[str, Tensor]
    if RELEASED_WEIGHTS in files:
        return Checkpoint(path, step, meta, _read_file(path / RELEASED_WEIGHTS), None, {}, None)
    adapters = _read_file(path / ADAPTER) if ADAPTER in files else {}
    base = base_of(meta)
    if base:
        state = Adapted(_base_weights(path, meta, base), adapters, base.scale)
        if "ranks.pt" not in files:
            return Checkpoint(path, step, meta, state, None, {}, None)
    optimizer = optimizer and bool(meta.get("optimizers"))
    optim: Mapping[str, Tensor] | None = None
    if meta.get("sharded"):
        from codechat.runs.sharded_checkpoint import Shards

        state = Shards(path, "model.")
        if optimizer:
            optim = Shards(path, "optim.")
    else:
        if not base:
            state = MappedWeights(path / "model.pt") if mmap else _read_file(path / "model.pt")
        if optimizer:
            optim = _read_file(path / OPTIMIZERS, mmap)
    ranks = _read_file(path / "ranks.pt")
    same = len(ranks) == dist.world_size()
    # random states belong to a rank; with other ranks each takes rank 0's `extra`
    mine = ranks[dist.rank() if same else 0]
    extra = mine["extra"]
    rng = mine["rng"] if same else None
    return Checkpoint(path, step, meta, state, optim, extra, rng, adapters)


def _base_weights(path: Path, meta: Mapping[str, Any], base: Base) -> Mapping[str, Tensor]:
    """Weights that the adapters in `path` belong to. MissingFile without them, CheckpointError
    where they have changed: reading a checkpoint never reaches a network."""
    folder = find_base(base)
    if folder:
        return load(folder, optimizer=False, mmap=True).model_state
    if not base.fingerprint:
        name = meta["base"]
        if exists(base.checkpoint):
            there = imported_sha256(read_meta(base.checkpoint))
            needs = f"{meta['run']} is an adapter of {name} with sha256 {base.sha256[:12]}"
            raise CheckpointError(
                f"{needs}, and run {base.checkpoint} was imported from a file with {there[:12]}; "
                "move that run away"
            )
        raise MissingFile(
            f"{meta['run']} is an adapter of {name}, and run base/{name} does not exist; "
            f"run `codechat download {name}`, then `codechat "
            f"import data/hub/{name} --run-name base/{name}`"
        )
    now = ""
    with contextlib.suppress(UserError):
        now = fingerprint(read_meta(base.checkpoint))
    needs = f"{path} holds adapters of {base.checkpoint}"
    remedy = f"put back the checkpoint {base.fingerprint}, or train the adapters again"
    if now:
        raise CheckpointError(f"{needs}, which has changed: it is {now} now; {remedy}")
    raise MissingFile(f"{needs}, which is missing; {remedy}")


class Adapted(Mapping[str, Tensor]):
    """The base's weights plus scale * NAME.b @ NAME.a, or plus NAME itself
    (`models.lora.low_rank`), each computed when it is read: memory holds one whole model."""

    def __init__(
        self, base: Mapping[str, Tensor], added: Mapping[str, Tensor], scale: float
    ) -> None:
        self.base = base
        self.added = added
        self.scale = scale
        self.about = getattr(base, "about", base)  # has the shapes

    def __getitem__(self, name: str) -> Tensor:
        if f"{name}.b" in self.added:
            a = self.added[f"{name}.a"]  # (rank, in)
            b = self.added[f"{name}.b"]  # (out, rank)
            rows = b.any(1).nonzero()[:, 0]
            if len(rows) < len(b) and isinstance(self.base, MappedWeights):
                # of an embedding few rows changed: the others stay in their file
                tensor = self.base.own(name)
                changed = self.scale * b[rows] @ a  # in bfloat16 under autocast
                return tensor.index_add_(0, rows, changed.to(tensor.dtype))
            return self.base[name] + self.scale * b @ a
        tensor = self.base[name]
        if name in self.added:
            return tensor + self.added[name]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def _fill(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into whole or sharded ones. No communication."""
    if hasattr(saved, "read_into"):  # Shards
        saved.read_into(targets)
        return
    for name, target in targets.items():
        sharding.fill(target, saved[name])


def restore_optimizers(
    ckpt: Checkpoint, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put the saved states into optimizers and the global random states. A parameter's state is
    found by its name and sharded as the parameter is; there is none before the first update.
    Without optimizers, only the random states."""
    if ckpt.rng is not None:
        set_rng_state(ckpt.rng)
    if not optimizers:
        return
    names = ckpt.meta["optimizers"]
    if not names:
        remedy = "begin another run from its weights with --init-from"
        raise CheckpointError(f"{ckpt.path} holds no optimizer states: its run is over; {remedy}")
    if len(names) != len(optimizers):
        held = f"{ckpt.path} holds {len(names)} optimizer states, {len(optimizers)} are required"
        raise CheckpointError(f"{held}; use the same --optimizer")
    params = _parameters(model, optimizers)
    saved = ckpt.optim_state
    assert saved is not None, "read with optimizer=True"
    targets = {}
    for key, tensor in getattr(saved, "about", saved).items():
        name, _, kind = key.rpartition(".")
        if name not in params:
            raise CheckpointError(
                f"{ckpt.path}: the state of {' and '.join(names)} does not fit: no parameter {name}"
            )
        optimizer, p = params[name]
        if tensor.shape == p.shape:
            targets[key] = torch.zeros_like(p, dtype=tensor.dtype, device=p.device)
        else:  # a number that the parameter's shape does not decide, such as the count of steps
            targets[key] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=p.device)
        optimizer.state[p][kind] = targets[key]
    _fill(targets, saved)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_fit(ckpt: Checkpoint, model: nn.Module) -> None:
    """CheckpointError, with both shapes, where the saved weights are not those of this model."""
    saved = ckpt.model_state
    there = _shapes(getattr(saved, "about", saved))
    here = _shapes(model.state_dict())
    differ = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if differ:
        listed = "; ".join(
            f"{name} is {there.get(name)} there and {here.get(name)} here" for name in differ[:3]
        )
        remedy = "use the settings of the run that saved it"
        raise CheckpointError(
            f"{ckpt.path} does not fit the model in {len(differ)} tensors: {listed}; {remedy}"
        )


def restore(ckpt: Checkpoint, model: nn.Module) -> None:
    """Put the saved weights into `model`. CheckpointError, with both shapes, where they do not
    fit."""
    check_fit(ckpt, model)
    _fill(model.state_dict(), ckpt.model_state)
