"""Checkpoints: all that a run needs to continue on the same curve, in a directory that is whole or not there.

    checkpoints/step_000120/model.pt   weights, float32
                            optim.pt   optimizer states
                            ranks.pt   random states, and the `extra` of each rank
                            meta.json  shapes, tokenizer, tags, lineage, sizes and hashes
    checkpoints/latest, best           text: the name of a step

A step is written beside its place, synced, hashed as it is written, and renamed; `latest` follows, then old
steps go. Files are read without executing what they hold (`weights_only`), and only after their hash agreed.

`meta["lineage"]` lists the runs behind the weights, oldest first, this run last with its step, so that an
evaluation can ask what a model was trained on.

Left out: sharded and asynchronous writing (one rank holds a whole replica).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from codechat import config, dist
from codechat.config import CheckpointError
from codechat.files import write_atomic
from codechat.rundirs import checkpoint_paths, find_checkpoint, name_of, pointed_step

if TYPE_CHECKING:
    from codechat.gpt import GPT
    from codechat.tokenizer import Tokenizer

FORMAT = 1
resolve = find_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What `load` read. `optim_state` is None where it was not asked for; `rng` is None where the number of
    ranks changed."""

    path: Path
    step: int
    meta: dict[str, Any]
    model_state: dict[str, Tensor]
    optim_state: list[dict[str, Any]] | None
    extra: dict[str, Any]
    rng: dict[str, Any] | None


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with the tokenizer and the kind of tags it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    tags: str
    meta: dict[str, Any]
    path: Path


# ---- state


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
        raise TypeError(
            f"{name} is a {type(value).__name__}; checkpoints hold tensors and plain values; use .tolist()"
        )


# ---- writing


class _HashingFile:
    """Hashes what torch.save writes, and keeps the OSError that torch turns into "unexpected pos"."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")
        self.hash = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as e:
            self.error = self.error or e
            raise
        self.hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _write_file(path: Path, value: Any) -> dict[str, Any]:
    """torch.save, synced; returns {bytes, sha256}. OSError where the disk refuses."""
    out = _HashingFile(path)
    try:
        with out.file:
            torch.save(value, out)
            out.flush()
            os.fsync(out.file.fileno())
    except RuntimeError:
        if out.error:
            raise out.error from None
        raise
    return {"bytes": out.bytes, "sha256": out.hash.hexdigest()}


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_step(final: Path, contents: Mapping[str, Any], meta: dict[str, Any]) -> None:
    temp, old = final.with_name(final.name + ".tmp"), final.with_name(final.name + ".old")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        meta["files"] = {name: _write_file(temp / name, value) for name, value in contents.items()}
        write_atomic(temp / "meta.json", json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        _sync_directory(temp)
        if final.exists():  # the step was reached again: readable as .old until the new one is in place
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(temp, final)
        _sync_directory(final.parent)
        write_atomic(final.parent / "latest", final.name + "\n")
    except BaseException:  # an interrupt too must leave nothing half made; raised again
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _prune(run_path: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Remove what no rule keeps, and what a kill left; renamed first, so that no checkpoint is half there."""
    paths = checkpoint_paths(run_path)
    for left in (run_path / "checkpoints").glob("step_*.*"):
        if left not in paths.values():
            shutil.rmtree(left)
    kept = {*list(paths)[-keep_last:], step, pointed_step(run_path, "latest"), pointed_step(run_path, "best")}
    for old, path in paths.items():
        if keep_last > 0 and old not in kept and not (keep_every and old % keep_every == 0):
            doomed = path.with_name(path.name + ".tmp")
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _describe(run_path: Path, step: int, model: nn.Module, meta: Mapping[str, Any] | None) -> dict[str, Any]:
    shape = getattr(model, "cfg", None)
    about = {
        "format": FORMAT,
        "step": step,
        "run": name_of(run_path.resolve()),
        "saved": round(time.time(), 3),
        "torch": torch.__version__,
        "world_size": dist.world_size(),
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
) -> Path:
    """Write checkpoints/step_<step> and point `latest` at it; returns its directory. A collective over ranks.

    extra: this rank's own state (data cursor, ...), plain values and tensors. meta: json about the model
    (tokenizer, tags, lineage).
    Kept: the newest `keep_last` (0 = all), every multiple of `keep_every`, best and latest. CheckpointError
    where the disk refuses: nothing half written stays, and the former checkpoint is untouched.
    """
    run_path, model = Path(run_path), unwrap(model)
    _check_plain(dict(extra or {}), "extra")
    final = run_path / "checkpoints" / f"step_{step:06d}"
    ranks = dist.gather_objects({"extra": dict(extra or {}), "rng": rng_state()})
    problem = None
    if dist.is_main():
        contents = {"model.pt": model.state_dict(), "ranks.pt": ranks}
        if optimizers:
            contents["optim.pt"] = [o.state_dict() for o in optimizers]
        try:
            _write_step(final, contents, _describe(run_path, step, model, meta))
        except OSError as e:
            problem = CheckpointError(
                f"checkpoint {final} cannot be written ({e}); free space, then continue with --resume; "
                "earlier checkpoints are intact"
            )
    if problem := dist.broadcast_object(problem):
        raise problem
    if dist.is_main():
        try:
            _prune(run_path, step, keep_last, keep_every)
        except OSError as e:
            print(f"old checkpoints in {final.parent} cannot be removed ({e})", file=sys.stderr)
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


def _read_file(
    path: Path, listed: Mapping[str, Any] | None, map_location: Any, mmap: bool = False
) -> Any:
    advice = "use another step of the run (NAME@STEP)"
    if listed is None or not path.is_file():
        raise CheckpointError(f"{path} is missing from the checkpoint; {advice}")
    if (size := path.stat().st_size) != listed["bytes"]:
        raise CheckpointError(f"{path} is damaged: {size} bytes, written with {listed['bytes']}; {advice}")
    with open(path, "rb") as f:
        if hashlib.file_digest(f, "sha256").hexdigest() != listed["sha256"]:
            raise CheckpointError(f"{path} is damaged: its bytes are not those that were written; {advice}")
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (RuntimeError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{path} cannot be read by torch {torch.__version__} ({e})") from e


def load(
    ref: str | Path, *, map_location: Any = "cpu", optimizer: bool = True, mmap: bool = False
) -> Checkpoint:
    """Read a checkpoint (see `resolve` for what a reference may be); mmap leaves the weights in their file.
    MissingFile names what exists; CheckpointError says what is wrong."""
    path = resolve(ref)
    meta = read_meta(path)
    files = meta["files"]
    state = _read_file(path / "model.pt", files.get("model.pt"), map_location, mmap)
    optim = (
        _read_file(path / "optim.pt", files["optim.pt"], map_location)
        if optimizer and "optim.pt" in files
        else None
    )
    ranks = _read_file(path / "ranks.pt", files.get("ranks.pt"), "cpu")
    same = len(ranks) == dist.world_size()
    mine = ranks[dist.rank() if same else 0]
    return Checkpoint(path, meta["step"], meta, state, optim, mine["extra"], mine["rng"] if same else None)


def _check_fit(path: Path, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    problems = [
        f"{k} is {tuple(saved[k].shape)} there and {tuple(wanted[k].shape)} here"
        for k in wanted
        if k in saved and saved[k].shape != wanted[k].shape
    ]
    problems += [f"{k} is only there" for k in saved.keys() - wanted.keys()] + [
        f"{k} is only here" for k in wanted.keys() - saved.keys()
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{path} is of another shape than the model: {'; '.join(problems[:3])}{more}; "
            "use the settings it was made with"
        )


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
    _check_fit(ckpt.path, ckpt.model_state, model.state_dict())
    model.load_state_dict(ckpt.model_state)
    if optimizers:
        saved = ckpt.optim_state or []
        if len(saved) != len(optimizers):
            raise CheckpointError(
                f"{ckpt.path} holds {len(saved)} optimizer states, {len(optimizers)} are wanted; "
                "use the same --optimizer"
            )
        for optimizer, state in zip(optimizers, saved):
            try:
                optimizer.load_state_dict(state)
            except ValueError as e:
                raise CheckpointError(
                    f"{ckpt.path}: the state of {type(optimizer).__name__} does not fit ({e})"
                ) from e
    if (bool(optimizers) if rng is None else rng) and ckpt.rng is not None:
        set_rng_state(ckpt.rng)


def load_model(ref: str | Path, device: str | torch.device = "cpu") -> LoadedModel:
    """The model of a checkpoint in evaluation mode, its tokenizer and its kind of tags."""
    # here, not above: both lie later in the import order, and a loop that saves needs neither
    from codechat.gpt import GPT, GPTConfig
    from codechat.tokenizer import from_dict

    ckpt = load(ref, map_location=device, optimizer=False)
    if not ckpt.meta.get("model_config") or not ckpt.meta.get("tokenizer"):
        raise CheckpointError(
            f"{ckpt.path} holds a {ckpt.meta.get('model')} without model_config or tokenizer; "
            "it can be resumed, not used"
        )
    model = GPT(
        config.from_dict(GPTConfig, ckpt.meta["model_config"], where=str(ckpt.path / "meta.json"))
    ).to(device)
    restore(ckpt, model)
    return LoadedModel(
        model.eval(),
        from_dict(ckpt.meta["tokenizer"]),
        ckpt.meta.get("tags", "reserved"),
        ckpt.meta,
        ckpt.path,
    )
