"""Load other weights into a running server: a checkpoint below one directory, of the same model, whole or not at all.

Off unless the server was started with --reload-from. A request names a path below that directory and nothing else. The file is read without
executing it, and only after its hashes agree (`checkpoint`), into memory, before the running model changes. What a trainer on the same machine
published in memory (`live_weights`) has no hashes; it is complete or absent.

Left out: weights over the wire, other shapes or tokenizers than the server's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from codechat.core.errors import CheckpointError, MissingFile, RunError
from codechat.inference.api_errors import ApiError
from codechat.inference.api_requests import ServedModel
from codechat.inference.batching import Engine
from codechat.models import live_weights, loading
from codechat.runs.checkpoint import fingerprint


def update_weights(path: str, served: ServedModel, engine: Engine) -> str:
    """Let `engine` sample from the checkpoint at `path`, below `served.reload_from`; its version. ApiError where it cannot."""
    assert served.reload_from is not None
    folder = served.reload_from.resolve()
    place = (folder / path).resolve()
    if not place.is_relative_to(folder):
        raise ApiError(403, f"path {path[:200]!r} leads out of the directory of --reload-from", "path")
    if not (place / "meta.json").is_file():
        raise ApiError(404, f"path {path[:200]!r}: no checkpoint lies there", "path")
    try:
        state, meta = _read(place)
        shape, tok, tags = loading.describe(place, meta)
    except (CheckpointError, MissingFile) as error:
        raise ApiError(409, f"path: {error}", "path") from None
    own, same = served.loaded, "its shape, tokenizer and tags must be the same"
    if (shape, tok.to_dict(), tags) != (own.model.cfg, own.tokenizer.to_dict(), own.tags):
        raise ApiError(409, f"path {path[:200]!r} holds another model than the one that is served: {same}", "path")
    version = meta.get("version") or fingerprint(meta)
    try:
        engine.update_weights(state, version, served.timeout_s)
    except RunError as error:
        raise ApiError(503, str(error)) from None
    return version


def _read(place: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """(weights, meta) of a checkpoint, or of what a trainer on this machine published (`live_weights`)."""
    if live_weights.is_live(place):
        return live_weights.read(place)
    found = loading.load_model(place)
    return found.model.state_dict(), found.meta
