"""Files that are replaced as a whole, and row files (jsonl) that survive a kill."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import RunError


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text`: readers see either the old or the new text, also after a crash."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temp, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line of JSON per row, what JSON does not know as text. A lone surrogate is written as
    its escape: the text is UTF-8 and reads as the same row."""
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def atomic_directory(
    path: Path, fresh: Path | None = None, keep_old: bool = False
) -> Iterator[Path]:
    """A new directory that becomes `path`, in the place of an older one, at the end of the
    block; after an exception nothing has changed.

    fresh: where it is until then, which may hold files already. keep_old: the older one stays
    as .NAME.old, as it does after a kill between the two renames; where a .NAME.old is there
    already, that one stays. RunError where another process made `path` during the block."""
    fresh = fresh or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.old")
    there = path.exists()
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        yield fresh
        sync_directory(fresh)
        if there and keep_old and old.exists():
            shutil.rmtree(path)
        elif there:
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        try:
            os.rename(fresh, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise RunError(
                f"{path} was written by another process meanwhile, and is kept; choose another name"
            ) from error
        sync_directory(path.parent)
    except BaseException:  # an interrupt too must leave nothing partial
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not path.exists():
            os.rename(old, path)
        raise
    if not keep_old:
        shutil.rmtree(old, ignore_errors=True)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """A json object from a file; RunError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise RunError(
            f"{path} cannot be read ({e}); required: a json object; the run may be damaged"
        ) from e
    if not isinstance(value, dict):
        raise RunError(f"{path} holds a json {type(value).__name__}; required: an object {{...}}")
    return value


def file_record(path: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file."""
    with open(path, "rb") as f:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
        }


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file. A last line that was cut is skipped; damage elsewhere raises
    RunError with the line."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield row
        elif number < len(lines):
            raise RunError(
                f"{path} line {number} is not a json object; delete that line to read the rest"
            )


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a jsonl file, in the place of a last line that was cut. OSError where they
    do not fit on the disk."""
    with open(path, "ab+") as f:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                f.seek(0)
                f.truncate(sum(len(line) for line in f if line.endswith(b"\n")))
        f.write(json_lines(rows).encode())


def drop_rows_after(path: Path, step: int) -> None:
    if path.is_file():
        kept = [row for row in read_rows(path) if row.get("step", 0) <= step]
        write_atomic(path, json_lines(kept))
