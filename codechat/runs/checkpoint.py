"""Checkpoints: all that a run needs to continue on the same curve, in a directory that is whole or not there.

    checkpoints/step_000120/model.pt   weights, float32
                            optim.pt   optimizer states
                            ranks.pt   random states, and the `extra` of each rank
                            meta.json  shapes, tokenizer, tags, lineage, sizes and hashes
    checkpoints/latest, best           text: the name of a step

A sharded model has its weights and optimizer states in shards/ instead (see checkpoint_shards); either kind
is read into a model that is whole or sharded, by any number of ranks.

A step is written beside its place, synced, hashed as it is written, and renamed; `latest` follows, then old
steps go. With wait=False a thread does that while training goes on, from a copy in host memory. Files are read without executing what they hold (`weights_only`), and only after their hash agreed.

`meta["lineage"]` lists the runs behind the weights, oldest first, this run last with its step, so that an
evaluation can ask what a model was trained on.

Left out: object stores; hosts without a shared file system.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.errors import CheckpointError
from codechat.distributed import dist, sharding
from codechat.runs import sharded_checkpoint
from codechat.runs.background import begin, on_host, settle, settled, side_group
from codechat.runs.checkpoint_files import prune, read_file, verify, write_step
from codechat.runs.paths import checkpoint_paths, find_checkpoint, name_of

FORMAT = 1
__all__ = ["Checkpoint", "load", "read_meta", "resolve", "restore", "save", "set_best", "settle", "settled"]
resolve = find_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What `load` read. `optim_state` is None where it was not asked for; `rng` is None where the number of
    ranks changed."""

    path: Path
    step: int
    meta: dict[str, Any]
    model_state: Mapping[str, Tensor]
    optim_state: list[dict[str, Any]] | sharded_checkpoint.Shards | None
    extra: dict[str, Any]
    rng: dict[str, Any] | None


def rng_state() -> dict[str, Any]:
    """The global random states of this rank: python, numpy, torch, and its GPU."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_rng_state(state: Mapping[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def unwrap(model: nn.Module) -> nn.Module:
    """The module below torch.compile and data-parallel wrappers, whose weights have their own names."""
    for inner in ("_orig_mod", "module"):
        if isinstance(found := getattr(model, inner, None), nn.Module):
            return unwrap(found)
    return model


def _check_plain(value: Any, name: str) -> None:
    """Reading does not execute code, so nothing may be written that needs some: TypeError now rather than a
    lost run later."""
    if isinstance(value, Mapping):
        for k, v in value.items():
            _check_plain(v, f"{name}[{k!r}]")
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            _check_plain(v, f"{name}[{i}]")
    elif type(value) not in (int, float, bool, str, bytes, Tensor, type(None)):
        raise TypeError(f"{name} is a {type(value).__name__}; checkpoints hold tensors and plain values; use .tolist()")


# ---- writing


def _describe(
    run_path: Path,
    step: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    meta: Mapping[str, Any] | None,
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
        "optimizers": [type(o).__name__ for o in optimizers],
        "model": type(model).__name__,
        "model_config": None if shape is None else config.to_dict(shape),
        **config.plain(meta or {}),
    }
    if about.get("lineage"):
        about["lineage"] = [*about["lineage"][:-1], {**about["lineage"][-1], "step": step}]
    return about


def save(
    run_path: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    extra: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
    keep_last: int = 2,
    keep_every: int = 0,
    wait: bool = True,
) -> Path:
    """Write checkpoints/step_<step> and point `latest` at it; returns its directory. A collective over ranks.

    extra: this rank's own state (data cursor, ...), plain values and tensors. meta: json about the model
    (tokenizer, tags, lineage). wait: false returns as soon as the state is copied to host memory and lets a
    thread write it; what goes wrong there is raised by the next `save` or by `settle`.
    Kept: the newest `keep_last` (0 = all), every multiple of `keep_every`, best and latest. CheckpointError
    where the disk refuses: nothing half written stays, and the former checkpoint is untouched.
    """
    settle()
    run_path, model = Path(run_path), unwrap(model)
    _check_plain(dict(extra or {}), "extra")
    final = run_path / "checkpoints" / f"step_{step:06d}"
    ranks = dist.gather_objects({"extra": dict(extra or {}), "rng": rng_state()})
    about = _describe(run_path, step, model, optimizers, meta)
    keep = on_host if not wait else lambda value: value
    if sharding.is_sharded(model):
        tensors, group = keep(sharded_checkpoint.named_states(model, optimizers)), side_group()

        def job() -> None:
            files = sharded_checkpoint.write(final, tensors, group)
            if dist.is_main():
                write_step(final, {"ranks.pt": ranks}, about, files)
    else:
        contents = {}
        if dist.is_main():
            contents = keep(
                {"model.pt": model.state_dict()}
                | ({"optim.pt": [o.state_dict() for o in optimizers]} if optimizers else {})
            )

        def job() -> None:
            if dist.is_main():
                write_step(final, contents | {"ranks.pt": ranks}, about)

    def job_and_prune() -> None:
        job()
        if dist.is_main():
            try:
                prune(run_path, step, keep_last, keep_every)
            except OSError as e:
                print(f"old checkpoints in {final.parent} cannot be removed ({e})", file=sys.stderr)

    begin(final, job_and_prune, wait)
    return final


def set_best(run_path: str | Path, step: int) -> None:
    """Let NAME@best mean this step, which is then kept."""
    if step not in (steps := checkpoint_paths(Path(run_path))):
        raise CheckpointError(f"{run_path} has no checkpoint {step}; it has {', '.join(map(str, steps))}")
    write_atomic(Path(run_path) / "checkpoints" / "best", f"step_{step:06d}\n")


# ---- reading


def read_meta(ref: str | Path) -> dict[str, Any]:
    """meta.json of a checkpoint; CheckpointError where it is foreign or damaged."""
    path = resolve(ref) / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is damaged ({e}); use another step of the run (NAME@STEP)") from e
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        got = meta.get("format") if isinstance(meta, dict) else type(meta).__name__
        raise CheckpointError(f"{path} has format {got!r}; this version reads format {FORMAT}")
    return meta


def load(ref: str | Path, *, map_location: Any = "cpu", optimizer: bool = True, mmap: bool = False) -> Checkpoint:
    """Read a checkpoint (see `resolve` for what a reference may be); mmap leaves the weights in their file. Of a
    sharded one tensors are read when they are asked for. Within a session a collective.
    MissingFile names what exists; CheckpointError says what is wrong."""
    settle()
    path = resolve(ref)
    meta = read_meta(path)
    files = meta["files"]
    optimizer = optimizer and bool(meta.get("optimizers", "optim.pt" in files))
    if meta.get("sharded"):
        verify(path, files, [*files])
        state = sharded_checkpoint.Shards(path, "model.")
        optim = sharded_checkpoint.Shards(path, "optim.") if optimizer else None
    else:
        verify(path, files, ["model.pt", "ranks.pt", *(["optim.pt"] if optimizer else [])])
        state = read_file(path / "model.pt", map_location, mmap)
        optim = read_file(path / "optim.pt", map_location, mmap) if optimizer else None
    ranks = read_file(path / "ranks.pt", "cpu")
    same = len(ranks) == dist.world_size()
    mine = ranks[dist.rank() if same else 0]
    return Checkpoint(path, meta["step"], meta, state, optim, mine["extra"], mine["rng"] if same else None)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return (
        state.shapes()
        if isinstance(state, sharded_checkpoint.Shards)
        else {k: tuple(v.shape) for k, v in state.items()}
    )


def _check_fit(path: Path, state: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    saved, wanted = _shapes(state), _shapes(target)
    problems = [f"{k} is {saved[k]} there and {wanted[k]} here" for k in wanted if k in saved and saved[k] != wanted[k]]
    problems += [f"{k} is only there" for k in saved if k not in wanted] + [
        f"{k} is only here" for k in wanted if k not in saved
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{path} is of another shape than the model: {'; '.join(problems[:3])}{more}; "
            "use the settings it was made with"
        )


def _restore_optimizers(ckpt: Checkpoint, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    names = [type(o).__name__ for o in optimizers]
    saved = ckpt.meta.get("optimizers", names[: len(ckpt.optim_state or [])]) if ckpt.optim_state is not None else []
    if len(saved) != len(names):
        raise CheckpointError(
            f"{ckpt.path} holds {len(saved)} optimizer states, {len(names)} are wanted; use the same --optimizer"
        )
    try:
        if isinstance(ckpt.optim_state, sharded_checkpoint.Shards):
            sharded_checkpoint.restore_optimizers(ckpt.optim_state, model, optimizers)
        else:
            for optimizer, state in zip(optimizers, ckpt.optim_state):
                if sharding.is_sharded(model):
                    sharded_checkpoint.restore_whole(optimizer, state)
                else:
                    optimizer.load_state_dict(state)
    except ValueError as e:
        raise CheckpointError(f"{ckpt.path}: the state of {' and '.join(names)} does not fit ({e})") from e


def restore(
    ckpt: Checkpoint,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    rng: bool | None = None,
) -> None:
    """Put the saved state into `model` and `optimizers`; CheckpointError, with both shapes, where they do not
    fit.

    rng: also the global random states; None = when optimizers are given, that is, when a run continues rather
    than starts from it.
    """
    model = unwrap(model)
    targets = model.state_dict()
    _check_fit(ckpt.path, ckpt.model_state, targets)
    if isinstance(ckpt.model_state, sharded_checkpoint.Shards):
        ckpt.model_state.read_into(targets)
    else:
        for name, target in targets.items():
            sharding.fill(target, ckpt.model_state[name])
    if optimizers:
        _restore_optimizers(ckpt, model, optimizers)
    if (bool(optimizers) if rng is None else rng) and ckpt.rng is not None:
        set_rng_state(ckpt.rng)
