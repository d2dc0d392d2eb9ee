"""What all commands that prepare data share: one writer at a time, a directory that may be
written, and the printed table of what was kept and dropped."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codechat.core import config
from codechat.core.atomic_files import read_json
from codechat.core.errors import DataError, RunError
from codechat.core.processes import alone
from codechat.data.sources import MANIFEST, Ledger, Row
from codechat.runs import paths

# what a directory may hold, in words
HELD = {
    "conversations": "conversations",
    "corpus": "a corpus",
    "something else": f"a {MANIFEST} that codechat did not write",
}


@contextmanager
def written_by_one(out: Path, wait: bool) -> Iterator[None]:
    """Make the directory and keep other processes and threads from writing into it within the
    block. wait: until another one has finished; else RunError."""
    out.mkdir(parents=True, exist_ok=True)
    with alone(out / ".lock", wait=wait) as mine:
        if not mine:
            raise RunError(
                f"{out} is being written by another command; wait "
                "for its end, or choose another --out"
            )
        yield


def require_kind(out: Path, kind: str, cfg: Any = None) -> None:
    """DataError unless `out` can hold `kind` ("corpus" or "conversations"): it holds the other
    kind or a manifest that is not ours, it is the folder that `cfg` reads, or it or a folder
    above it is a file. ConfigError for a run's folder."""
    paths.check_outside(out)
    for flag, text in config.read_by(cfg, "path") if cfg else ():
        if os.path.isdir(text) and Path(text).resolve() == out.resolve():
            raise DataError(
                f"{flag} and --out are one folder, {text}: its rows "
                "would be replaced; choose another --out"
            )
    place = next((place for place in (out, *out.parents) if place.exists()), None)
    if place is not None and not place.is_dir():
        raise DataError(
            f"{place} is a file; --out {out} must be a "
            "directory, or not exist yet; choose another --out"
        )
    path = out / MANIFEST
    if path.exists():
        held = _kind_of(read_json(path))
        if held != kind:
            raise DataError(
                f"{out} holds {HELD[held]}; {kind} need a "
                "directory of their own; choose another --out"
            )
    elif kind == "corpus" and any(out.glob("*.bin")):
        raise DataError(
            f"{out} holds *.bin shards that codechat did not write; choose another --out"
        )


def _kind_of(manifest: Row) -> str:
    """A key of HELD."""
    if "domains" in manifest:
        return "conversations"
    return "corpus" if "train_tokens" in manifest else "something else"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def print_ledgers(ledgers: Iterable[Ledger]) -> None:
    """Print how many rows were kept, skipped by a rule, and lost, beside the largest share of
    each loss."""
    table = Table("source", "", "reason", "rows", "share", "limit", title="kept and dropped")
    counts = list(chain.from_iterable(ledger.rows() for ledger in ledgers))
    for count in counts:
        table.add_row(
            count.source,
            count.what,
            count.reason,
            f"{count.rows:,}",
            _percent(count.share),
            _percent(count.limit),
        )
    if any(count.rows for count in counts):
        Console().print(table)
