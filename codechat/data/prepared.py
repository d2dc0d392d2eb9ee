"""A prepared directory of conversations: its files, its manifest, and the printed tables of what was kept and dropped.

Several commands may write into one directory; each replaces its own files and its own entries of the manifest, which notes the command of every
file. A file of another command is never replaced. A file that a command wrote before and does not write again is removed, since training reads
all files. The manifest is written last, so it names only files that are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.errors import ConfigError, DataError
from codechat.core.registry import PREPARATIONS
from codechat.data import conversations, corpus, sources
from codechat.data.sources import Ledger
from codechat.data.synthetic import SPLITS as SPLITS
from codechat.text import chat, token_view, tokenizer

Row = dict[str, Any]


def check_shares(cfg: Any, *names: str, together: bool = False) -> None:
    """ConfigError unless each of these settings, and with `together` their sum, is in [0, 1]."""
    for name in names:
        if not 0 <= getattr(cfg, name) <= 1:
            raise ConfigError(
                f"{name} is {getattr(cfg, name)}; it must be a share from 0 to 1; correct {config.flag_of(name)}"
            )
    if together and sum(getattr(cfg, name) for name in names) > 1:
        shown = " and ".join(f"{name} {getattr(cfg, name)}" for name in names)
        raise ConfigError(f"{shown} add up to more than 1; lower one")


def reasons(names: Iterable[str], cfg: Any) -> dict[str, float]:
    """Reason of a loss -> its largest share, `cfg.max_lost`."""
    return dict.fromkeys(names, cfg.max_lost)


def require_kind(out: Path, kind: str) -> None:
    """DataError where a directory holds a corpus and should hold conversations, or the other way round: each has its own manifest. Also
    where `out` or a folder above it is a file."""
    found = next((place for place in (out, *out.parents) if place.exists()), None)
    if found is not None and not found.is_dir():
        raise DataError(f"{found} is a file; --out {out} must be a directory, or not exist yet; choose another --out")
    path = out / corpus.MANIFEST
    if path.exists() and ("domains" in config.read_json(path)) != (kind == "conversations"):
        other = "a corpus" if kind == "conversations" else "conversations"
        raise DataError(f"{out} holds {other}; {kind} need a directory of their own; choose another --out")


def write(
    out: Path, files: Mapping[str, list[Row]], ledgers: list[Ledger], cfg: Any, **measured: Any
) -> dict[str, Any]:
    """Write `files` (name -> rows) and add them to the manifest, which is returned; ledgers are counts of the sources, measured: further
    entries of the manifest."""
    path = out / corpus.MANIFEST
    manifest = config.read_json(path) if path.exists() else {"domains": {}, "files": {}, "sources": {}}
    style, command = getattr(cfg, "tools_style", "compact"), _command(cfg)
    styled = described if style == "described" else dict
    files = {name: list(map(styled, rows)) for name, rows in files.items() if rows}
    _require_own(out, files, manifest, command)
    out.mkdir(parents=True, exist_ok=True)
    earlier = _forget(manifest, command)
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(out / f"{name}.jsonl", text.encode("utf-8", "replace").decode())  # no lone surrogates
        fact = {"rows": len(rows), "sha256": sources.digest(text), "command": command}
        manifest["files"][f"{name}.jsonl"] = fact | ({} if style == "compact" else {"tools_style": style})
    for name in earlier - manifest["files"].keys():
        (out / name).unlink(missing_ok=True)
    tok = tokenizer.load(cfg.tokenizer)
    preview((row for rows in files.values() for row in rows), getattr(cfg, "preview", 0), tok)
    counted = _supervised(files, tok)
    manifest["domains"] |= counted
    manifest |= measured
    _note_style(manifest, style)
    for ledger in ledgers:
        counts = {"kept": ledger.kept, "dropped": dict(ledger.lost), "skipped": dict(ledger.skipped)}
        manifest["sources"][ledger.source] = counts
    write_atomic(path, json.dumps(manifest, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    print_files(manifest["files"], counted, cfg.tokenizer)
    return manifest


def _command(cfg: Any) -> str:
    """The command that settings belong to, such as "data calls"."""
    kind = type(cfg).__name__
    return next((entry.command for entry in PREPARATIONS.values() if entry.config == kind), kind)


def _require_own(out: Path, names: Iterable[str], manifest: dict[str, Any], command: str) -> None:
    """DataError where another command wrote a file of one of these names: it would lose its rows and keep the rest of its files."""
    for name in (f"{name}.jsonl" for name in names):
        owner = manifest["files"].get(name, {}).get("command", command)
        if owner != command:
            found = (
                f"{out / name} was written by codechat {owner}, and codechat {command} has rows for a file of that name"
            )
            raise DataError(f"{found}; each needs files of its own; choose another --out")


def _forget(manifest: dict[str, Any], command: str) -> set[str]:
    """Take the files of a command, with their domains, out of the manifest; their names."""
    names = {name for name, entry in manifest["files"].items() if entry["command"] == command}
    for name in names:
        del manifest["files"][name]
        manifest["domains"].pop(name.partition(".")[0], None)
    return names


def _note_style(manifest: dict[str, Any], style: str) -> None:
    """Set the manifest's `tools_style` to that of the rows just written, else of any other file; none where all are compact."""
    known = {entry["tools_style"] for entry in manifest["files"].values() if "tools_style" in entry}
    before = manifest.pop("tools_style", "compact")
    if known:
        manifest["tools_style"] = next(name for name in (style, before, min(known)) if name in known)


def tools_style(directory: Path | str) -> str:
    """How the system prompts of a prepared directory list tools; compact where its manifest does not say, or is absent."""
    path = Path(directory) / corpus.MANIFEST
    return config.read_json(path).get("tools_style", "compact") if path.exists() else "compact"


def described(row: Row) -> Row:
    """The row with the compact list of its system message, if it has one, in the style `described` of `chat.tools_prompt`."""
    turns = row.get("messages", ())
    turns = [m | {"content": chat.described(m["content"])} if m["role"] == "system" else m for m in turns]
    return dict(row) | ({"messages": turns} if turns else {})


def preview(rows: Iterable[Row], n: int, tok: tokenizer.Tokenizer) -> None:
    """Print the first n conversations as training sees them: their tokens with the loss mask."""
    for row in islice((row for row in rows if "domain" in row), n):
        seen = token_view.xray_mask(row["messages"], tok)
        print(f"--- {row['id']}: {len(seen.ids)} tokens\n{seen.terminal(colour=sys.stdout.isatty())}\n")


def _supervised(files: Mapping[str, list[Row]], tok: tokenizer.Tokenizer) -> dict[str, dict[str, int]]:
    """Conversations, tokens and supervised tokens of each training domain, for mixing."""
    counted: dict[str, dict[str, int]] = {}
    for name, rows in files.items():
        domain, _, split = name.partition(".")
        if split == "train" and domain in {row.get("domain") for row in rows}:
            found = [conversations.encode(row, tok, "reserved", 1 << 30) for row in rows]
            kept = [example for example in found if not isinstance(example, str)]
            counted[domain] = {
                "conversations": len(kept),
                "tokens": sum(map(len, kept)),
                "supervised_tokens": sum(example.supervised for example in kept),
            }
    return counted


def print_ledgers(ledgers: Iterable[Ledger]) -> None:
    """Print how many rows were kept, skipped by a rule, and lost, beside the largest share of each loss."""
    table = Table("source", "", "reason", "rows", "share", "limit", title="kept and dropped")
    for row in (row for ledger in ledgers if ledger.total or ledger.skipped for row in ledger.rows()):
        shares = [f"{row[key]:.2%}" if row[key] is not None else "" for key in ("share", "limit")]
        table.add_row(row["source"], row["what"], row["reason"], f"{row['rows']:,}", *shares)
    if table.row_count:
        Console().print(table)


def print_files(files: Mapping[str, Row], domains: Mapping[str, Row], spec: str) -> None:
    """Print the files of a directory, and the tokens of each training domain."""
    table = Table("file", "rows", f"tokens ({spec})", "supervised tokens")
    for name, entry in sorted(files.items()):
        domain, _, split = name.removesuffix(".jsonl").partition(".")
        counts = domains.get(domain, {}) if split == "train" else {}
        tokens = [f"{counts[k]:,}" if counts else "" for k in ("tokens", "supervised_tokens")]
        table.add_row(name, f"{entry['rows']:,}", *tokens)
    Console().print(table)
