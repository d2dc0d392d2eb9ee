"""A prepared directory of conversations: its files and its manifest.

Several commands may write into one directory, one after the other: the second waits. Each
replaces its own files and entries of the manifest, and removes those that it does not write
again. It never replaces a file of another command. The manifest is written last; before, it
names the command under `unfinished`, so that nothing is trained on a folder whose files are
of two sources (`conversations.domain_files`)."""

import json
import os
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from codechat.core import config
from codechat.core.atomic_files import json_lines, read_json, write_atomic
from codechat.core.errors import DataError
from codechat.core.registry import PREPARATIONS, instrument
from codechat.data import conversations
from codechat.data.prepared import require_kind, written_by_one
from codechat.data.sources import MANIFEST, Ledger, Row, digest
from codechat.text import tokenizer, tool_lists


def write(
    out: Path,
    files: Mapping[str, list[Row]],
    ledgers: list[Ledger],
    cfg: Any,
    tools_style: str | None = None,
    **measured: Any,
) -> dict[str, Any]:
    """Write `files` (name -> rows), and the manifest, which is returned. tools_style: of rows
    that list tools, where `cfg` has no such setting. measured: more entries of the manifest.

    cfg: the settings of the command: `tokenizer`, and `tools_style`, `domain` and `preview` if
    it has them."""
    with written_by_one(out, wait=True):
        require_kind(out, "conversations")
        path = out / MANIFEST
        manifest = read_json(path) if path.exists() else dict(domains={}, files={}, sources={})
        # not every kind of data has tools
        style = str(tools_style or getattr(cfg, "tools_style", "compact"))
        named = {f"{name}.jsonl": rows for name, rows in files.items() if rows}
        if style in tool_lists.DECLINING:
            named = {name: list(map(described, rows)) for name, rows in named.items()}
        _replace_files(out, named, manifest, cfg, style)
        tok = tokenizer.load(cfg.tokenizer)
        _preview(named, tok, limit=getattr(cfg, "preview", 0))
        counted = _supervised(named, tok)
        manifest["domains"] |= counted
        manifest |= measured
        command = _command_of(cfg)
        others = [other for other in manifest.pop("unfinished", ()) if other != command]
        if others:
            manifest["unfinished"] = others
        for ledger in ledgers:
            counts = dict(kept=ledger.kept, dropped=dict(ledger.lost), skipped=dict(ledger.skipped))
            manifest["sources"][ledger.source] = counts
        _write_manifest(out, manifest)
        _print_files(manifest["files"], counted, cfg.tokenizer)
    return manifest


def _command_of(cfg: Any) -> str:
    """The command whose settings these are, with the domain that tells two runs of one command
    apart."""
    kind = type(cfg).__name__
    command = next((entry.command for entry in PREPARATIONS.values() if entry.config == kind), kind)
    domain = getattr(cfg, "domain", "calls")
    return command if domain == "calls" else f"{command} --domain {domain}"


def _replace_files(
    out: Path,
    files: Mapping[str, list[Row]],
    manifest: Row,
    cfg: Any,
    style: str,
) -> None:
    """Write the files and enter them in the manifest; remove those that this command wrote
    earlier and does not now. DataError, before anything is written, for a file of another
    command or one that this command reads."""
    command = _command_of(cfg)
    entries = manifest["files"]
    earlier = {name for name, entry in entries.items() if entry["command"] == command}
    taken = sorted(files.keys() & entries.keys() - earlier)
    if taken:
        other = f"{out / taken[0]} was written by codechat {entries[taken[0]]['command']}"
        raise DataError(
            f"{other}, and codechat {command} has rows for a "
            "file of that name; choose another --out"
        )
    written = {(out / name).resolve() for name in files}
    for flag, text in config.read_by(cfg, "path"):
        if os.path.exists(text) and Path(text).resolve() in written:
            raise DataError(
                f"{flag} {text} is a file that this command writes; choose another --out"
            )
    # From here on the directory changes.
    unfinished = {*manifest.get("unfinished", ()), command}
    _write_manifest(out, manifest | {"unfinished": sorted(unfinished)})
    for name in earlier:
        del entries[name]
        manifest["domains"].pop(name.partition(".")[0], None)
    for name, rows in files.items():
        text = json_lines(rows)
        write_atomic(out / name, text)
        entries[name] = dict(rows=len(rows), sha256=digest(text), command=command)
        if style != "compact":
            entries[name]["tools_style"] = style
    for name in earlier - entries.keys():
        (out / name).unlink(missing_ok=True)


def _write_manifest(out: Path, manifest: Row) -> None:
    text = json.dumps(manifest, indent=1, ensure_ascii=False, sort_keys=True)
    write_atomic(out / MANIFEST, text + "\n")


def _preview(files: Mapping[str, list[Row]], tok: tokenizer.Tokenizer, limit: int) -> None:
    """Print the first conversations as training sees them: the tokens with the loss mask."""
    if not limit:
        return
    xray_mask = instrument("mask_view", "set --preview 0")
    talks = (row for rows in files.values() for row in rows if "domain" in row)
    for row in islice(talks, limit):
        view = xray_mask(row["messages"], tok)
        print(
            f"--- {row['id']}: {len(view.ids)} tokens\n{view.terminal(colour=sys.stdout.isatty())}\n"
        )


def _print_files(
    entries: Mapping[str, Row], counted: Mapping[str, dict[str, int]], spec: str
) -> None:
    """Print the files of the directory, with the tokens of the domains that were `counted`."""
    table = Table("file", "rows", f"tokens ({spec})", "supervised tokens")
    for name, entry in sorted(entries.items()):
        counts = counted.get(name.removesuffix(".train.jsonl"))
        tokens = (
            [f"{counts[key]:,}" for key in ("tokens", "supervised_tokens")] if counts else ["", ""]
        )
        table.add_row(name, f"{entry['rows']:,}", *tokens)
    Console().print(table)


def described(row: Row) -> Row:
    """The row with the compact list of its system message, if it has one, in the style
    `described`."""
    turns = list(row["messages"])
    for at, turn in enumerate(turns):
        if turn["role"] == "system":
            turns[at] = turn | {"content": tool_lists.described(turn["content"])}
    return row | {"messages": turns}


def _supervised(
    files: Mapping[str, list[Row]], tok: tokenizer.Tokenizer
) -> dict[str, dict[str, int]]:
    """Conversations, tokens and supervised tokens of each training domain, for mixing."""
    counted: dict[str, dict[str, int]] = {}
    for name, rows in files.items():
        domain = name.removesuffix(".train.jsonl")
        if any(row.get("domain") == domain for row in rows):
            kept = conversations.encode_all(rows, tok, "reserved", 1 << 30, Ledger(name))
            counted[domain] = dict(
                conversations=len(kept),
                tokens=sum(map(len, kept)),
                supervised_tokens=sum(example.supervised for example in kept),
            )
    return counted
