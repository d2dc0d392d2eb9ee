"""A prepared directory of conversations: its files, its manifest, and the printed tables of what was kept and dropped.

Several commands may write into one directory, one after the other: who comes second waits. Each replaces its own files and entries of the
manifest, and removes those that it does not write again. A file of another command is never replaced. The manifest is written last.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codechat.core import config
from codechat.core.atomic_files import json_lines, write_atomic
from codechat.core.errors import DataError, RunError
from codechat.core.processes import alone
from codechat.core.registry import PREPARATIONS
from codechat.data import conversations
from codechat.data.sources import Ledger, Row, digest
from codechat.data.splits import SPLITS as SPLITS
from codechat.text import chat, token_view, tokenizer

MANIFEST = "manifest.json"


@contextmanager
def written_by_one(out: Path, wait: bool) -> Iterator[None]:
    """Within the block no other process or thread writes into the directory, which is made. wait: for one that does; else RunError."""
    out.mkdir(parents=True, exist_ok=True)
    with alone(out / ".lock", wait=wait) as mine:
        if not mine:
            raise RunError(f"{out} is being written by another command; wait for its end, or choose another --out")
        yield


def require_kind(out: Path, kind: str, cfg: Any = None) -> None:
    """DataError where `out` holds a corpus and not conversations, or the reverse, or what neither wrote, or is the folder that `cfg` reads,
    or it or a folder above it is a file."""
    for flag, text in config.read_by(cfg, "path") if cfg else ():
        if os.path.isdir(text) and Path(text).resolve() == out.resolve():
            raise DataError(
                f"{flag} and --out are one folder, {text}: its rows would be replaced; choose another --out"
            )
    place = next((place for place in (out, *out.parents) if place.exists()), None)
    if place is not None and not place.is_dir():
        raise DataError(f"{place} is a file; --out {out} must be a directory, or not exist yet; choose another --out")
    path = out / MANIFEST
    if not path.exists():
        if kind == "corpus" and any(out.glob("*.bin")):
            raise DataError(f"{out} holds *.bin shards that codechat did not write; choose another --out")
        return
    manifest = config.read_json(path)
    held = "conversations" if "domains" in manifest else "corpus" if "train_tokens" in manifest else "something else"
    if held != kind:
        other = {"corpus": "a corpus", "something else": f"a {MANIFEST} that codechat did not write"}.get(held, held)
        raise DataError(f"{out} holds {other}; {kind} need a directory of their own; choose another --out")


def write(
    out: Path, files: Mapping[str, list[Row]], ledgers: list[Ledger], cfg: Any, **measured: Any
) -> dict[str, Any]:
    """Write `files` (name -> rows), and the manifest, which is returned. measured: more of its entries."""
    with written_by_one(out, wait=True):
        return _write(out, files, ledgers, cfg, measured)


def _write(
    out: Path, files: Mapping[str, list[Row]], ledgers: list[Ledger], cfg: Any, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """What `write` does while no other command writes into the directory."""
    require_kind(out, "conversations")
    path = out / MANIFEST
    manifest = config.read_json(path) if path.exists() else {"domains": {}, "files": {}, "sources": {}}
    style, kind = getattr(cfg, "tools_style", "compact"), type(cfg).__name__
    command = next((entry.command for entry in PREPARATIONS.values() if entry.config == kind), kind)
    command += f" --domain {cfg.domain}" if getattr(cfg, "domain", "calls") != "calls" else ""
    styled = described if style == "described" else dict
    files = {f"{name}.jsonl": list(map(styled, rows)) for name, rows in files.items() if rows}
    earlier = {name for name, entry in manifest["files"].items() if entry["command"] == command}
    if taken := sorted(files.keys() & manifest["files"].keys() - earlier):
        other = f"{out / taken[0]} was written by codechat {manifest['files'][taken[0]]['command']}"
        raise DataError(f"{other}, and codechat {command} has rows for a file of that name; choose another --out")
    for flag, text in config.read_by(cfg, "path"):
        if any(os.path.exists(text) and Path(text).resolve() == (out / name).resolve() for name in files):
            raise DataError(f"{flag} {text} is a file that this command writes; choose another --out")
    for name in earlier:
        del manifest["files"][name]
        manifest["domains"].pop(name.partition(".")[0], None)
    for name, rows in files.items():
        write_atomic(out / name, text := json_lines(rows))
        entry = {"rows": len(rows), "sha256": digest(text), "command": command}
        manifest["files"][name] = entry | ({} if style == "compact" else {"tools_style": style})
    for name in earlier - manifest["files"].keys():
        (out / name).unlink(missing_ok=True)
    tok = tokenizer.load(cfg.tokenizer)
    talks = (row for rows in files.values() for row in rows if "domain" in row)
    for row in islice(talks, getattr(cfg, "preview", 0)):  # as training sees them: the tokens with the loss mask
        view = token_view.xray_mask(row["messages"], tok)
        print(f"--- {row['id']}: {len(view.ids)} tokens\n{view.terminal(colour=sys.stdout.isatty())}\n")
    counted = _supervised(files, tok)
    manifest["domains"] |= counted
    manifest |= measured
    for ledger in ledgers:
        counts = {"kept": ledger.kept, "dropped": dict(ledger.lost), "skipped": dict(ledger.skipped)}
        manifest["sources"][ledger.source] = counts
    write_atomic(path, json.dumps(manifest, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    table = Table("file", "rows", f"tokens ({cfg.tokenizer})", "supervised tokens")
    for name, entry in sorted(manifest["files"].items()):
        tokens_of = counted.get(name.removesuffix(".train.jsonl"), {})
        tokens = [f"{tokens_of[k]:,}" if tokens_of else "" for k in ("tokens", "supervised_tokens")]
        table.add_row(name, f"{entry['rows']:,}", *tokens)
    Console().print(table)
    return manifest


def tools_style(directory: Path | str) -> str:
    """How the system prompts of a prepared directory list tools; compact where its manifest does not say."""
    path = Path(directory) / MANIFEST
    files = config.read_json(path).get("files", {}) if path.exists() else {}
    return max((file.get("tools_style", "") for file in files.values()), default="") or "compact"


def described(row: Row) -> Row:
    """The row with the compact list of its system message, if it has one, in the style `described`."""
    turns = [m | {"content": chat.described(m["content"])} if m["role"] == "system" else m for m in row["messages"]]
    return row | {"messages": turns}


def _supervised(files: Mapping[str, list[Row]], tok: tokenizer.Tokenizer) -> dict[str, dict[str, int]]:
    """Conversations, tokens and supervised tokens of each training domain, for mixing."""
    counted: dict[str, dict[str, int]] = {}
    for name, rows in files.items():
        domain = name.removesuffix(".train.jsonl")
        if any(row.get("domain") == domain for row in rows):
            kept = conversations.encode_all(rows, tok, "reserved", 1 << 30, Ledger(name))
            tokens, supervised = sum(map(len, kept)), sum(example.supervised for example in kept)
            counted[domain] = {"conversations": len(kept), "tokens": tokens, "supervised_tokens": supervised}
    return counted


def print_ledgers(ledgers: Iterable[Ledger]) -> None:
    """Print how many rows were kept, skipped by a rule, and lost, beside the largest share of each loss."""
    table = Table("source", "", "reason", "rows", "share", "limit", title="kept and dropped")
    rows = [row for ledger in ledgers for row in ledger.rows()]
    for row in rows:
        shares = [f"{row[key]:.2%}" if row[key] is not None else "" for key in ("share", "limit")]
        table.add_row(row["source"], row["what"], row["reason"], f"{row['rows']:,}", *shares)
    if any(row["rows"] for row in rows):
        Console().print(table)
