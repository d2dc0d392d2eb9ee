"""Where text and conversations come from: the interpreter's own Python files, local files, the hub.

Every source yields plain values (`Document` or a dict row) and counts them in a `Ledger`. Rows that a selection rule removes (tests, duplicates,
generated tables) are `skipped`; rows that should have been usable and were not are `lost`. Each reason for a loss has a largest share, above
which `Ledger.check` stops the preparation: a reader that silently drops most of its input leaves only its easy part.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from codechat.core.errors import ConfigError, DataError, MissingFile, UserError

T = TypeVar("T")
LARGEST_LOSS = 0.05
PROBE_S = 3.0
OTHER_SOURCES = "use --source embedded, or --source PATH with a parquet or jsonl file in the same columns"


@dataclass(frozen=True)
class Document:
    """One text of a corpus. `name` is relative to its source, so no machine path is recorded."""

    text: str
    name: str = ""
    source: str = "text"


@dataclass
class Ledger:
    """Counts of one source. reasons: reason of a loss -> its largest share of (kept + lost). remedy: the end of the error message."""

    source: str
    reasons: Mapping[str, float] = field(default_factory=dict)
    remedy: str = "repair the input, or raise --max-lost"
    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> where it was met first

    def keep(self) -> None:
        self.kept += 1

    def counted(self, rows: Iterable[T]) -> Iterator[T]:
        """The rows, each one counted as kept."""
        for row in rows:
            self.kept += 1
            yield row

    def usable(self, found: Iterable[T | str]) -> Iterator[T]:
        """What is no string, counted as kept; a string is the reason of a loss."""
        for item in found:
            if isinstance(item, str):
                self.lose(item)
            else:
                self.keep()
                yield item

    def skip(self, rule: str) -> None:
        """A selection rule removed a row: a choice, not a loss."""
        self.skipped[rule] += 1

    def lose(self, reason: str, where: str = "") -> None:
        """A row that should have been usable was not. where: which one. KeyError for a reason that `reasons` does not have."""
        if reason not in self.reasons:
            raise KeyError(f"source {self.source} has no reason {reason!r}")
        self.lost[reason] += 1
        self.first.setdefault(reason, where)

    @property
    def total(self) -> int:
        return self.kept + sum(self.lost.values())

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the kept/dropped table; `share` and `limit` are None except for losses."""
        names = ("what", "reason", "rows", "share", "limit")
        lost = [("lost", r, n, n / max(self.total, 1), self.reasons[r]) for r, n in sorted(self.lost.items())]
        skipped = [("skipped", rule, n, None, None) for rule, n in sorted(self.skipped.items())]
        rows = [("kept", "", self.kept, None, None), *lost, *skipped]
        return [{"source": self.source} | dict(zip(names, row)) for row in rows]

    def check(self) -> None:
        """Raises DataError when a reason took more than its share, or when nothing was kept."""
        total = self.total
        for reason, n in sorted(self.lost.items()):
            if n > self.reasons[reason] * total:
                at = f" (the first: {self.first[reason]})" if self.first.get(reason) else ""
                lost = f"source {self.source} lost {n} of {total} rows ({n / total:.1%}) to {reason!r}{at}"
                raise DataError(f"{lost}; at most {self.reasons[reason]:.1%} is allowed; {self.remedy}")
        if not self.kept:
            seen = ", ".join(f"{k} {n}" for k, n in (self.lost + self.skipped).items()) or "no rows at all"
            raise DataError(
                f"source {self.source} kept no row ({seen}); required is at least one; choose another --source"
            )


def digest(text: str) -> str:
    """sha256 of the text in UTF-8, hex: names a document and decides its split."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def fraction(hex_digest: str) -> float:
    """The digest as a number in [0, 1): a document is in the same split on every machine."""
    return int(hex_digest[:8], 16) / 2**32


# ------------------------------------------------------------------ the interpreter's own Python

PACKAGE_DIRS = ("site-packages", "dist-packages")
TEST_DIRS = frozenset({"test", "tests", "testing", "idle_test", "_tests"})
VENDOR_DIRS = frozenset(
    {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party", "_distutils"}
)
PROJECT = __name__.partition(".")[0]
LARGEST_FILE = 1_000_000
PYTHON_REASONS = {"not_utf8": LARGEST_LOSS, "unreadable": LARGEST_LOSS}


def python_roots() -> list[tuple[str, Path]]:
    """(source name, directory) of the standard library and of every directory of installed packages."""
    paths = sysconfig.get_paths()
    roots = [("stdlib", Path(paths["stdlib"]))]
    installed = [paths["purelib"], paths["platlib"], *(p for p in sys.path if Path(p).name in PACKAGE_DIRS)]
    for directory in dict.fromkeys(os.path.realpath(p) for p in installed):
        if os.path.isdir(directory):
            roots.append(("packages", Path(directory)))
    return roots


def embedded_python(ledger: Ledger, roots: Iterable[tuple[str, Path]] | None = None) -> Iterator[Document]:
    """Documents of the interpreter's Python files, without tests and vendored copies. The order is that of the hashes of their relative paths, so
    any prefix is a fair sample of all packages."""
    found: dict[str, tuple[str, Path]] = {}
    for source, root in python_roots() if roots is None else roots:
        for relative in _python_files(root, ledger):
            found.setdefault(relative, (source, root / relative))
    for relative in sorted(found, key=lambda name: (digest(name), name)):
        source, path = found[relative]
        document = read_text_file(path, relative, source, ledger)
        if document is not None:
            yield document


def _python_files(root: Path, ledger: Ledger) -> Iterator[str]:
    for directory, folders, names in os.walk(root):
        relative = Path(directory).relative_to(root)
        folders[:] = sorted(f for f in folders if f not in PACKAGE_DIRS and f != "__pycache__")
        for name in names:
            if name.endswith(".py"):
                path = (relative / name).as_posix()
                if rule := _path_rule(path):
                    ledger.skip(rule)
                else:
                    yield path


def _path_rule(relative: str) -> str | None:
    *folders, name = PurePosixPath(relative).parts
    if folders and folders[0] == PROJECT:
        return "this_project"
    tests = name.startswith("test_") or name.endswith(("_test.py", "conftest.py"))
    if tests or TEST_DIRS.intersection(folders):
        return "tests"
    return "vendored" if VENDOR_DIRS.intersection(folders) else None


def read_text_file(path: Path, name: str, source: str, ledger: Ledger) -> Document | None:
    """The document of one file; None, and a count in the ledger, where it cannot be used. `text_rule` applies to .py files."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError:
        return ledger.lose("unreadable")
    except UnicodeDecodeError:
        return ledger.lose("not_utf8")
    if path.suffix == ".py" and (rule := text_rule(text)):
        return ledger.skip(rule)
    return Document(text.replace("\r\n", "\n"), name, source)


def text_rule(text: str) -> str | None:
    """The rule that removes a source text, or None. The limits on lines are those of github-code-clean: tables of data and minified code
    teach digits, not programs."""
    if not text.strip():
        return "empty"
    if len(text) > LARGEST_FILE:
        return "too_large"
    lines = text.splitlines()
    if max(map(len, lines)) > 1000 or len(text) / len(lines) > 100:
        return "long_lines"
    marks = "".join(text[:20_000].split())
    return "mostly_data" if sum(map(str.isalpha, marks)) < 0.4 * len(marks) else None


# ------------------------------------------------------------------ local files


def open_text(path: Path) -> Iterator[str]:
    """Lines of a text file, plain or .gz. Raises MissingFile, DataError (not UTF-8, truncated or damaged archive)."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist; check --source")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is a truncated, damaged or foreign archive ({error}); fetch it again") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each non-blank line. DataError, with file and line, for another line or a file without rows."""
    rows = 0
    for number, line in enumerate(open_text(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            bad = f"{path}:{number} is not JSON ({error}); required is one object per line"
            raise DataError(f"{bad}; a cut last line means an interrupted download: make the file again") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} holds a {type(row).__name__}; required is one JSON object per line")
        rows += 1
        yield number, row
    if not rows:
        raise DataError(f"{path} is empty; required is one JSON object per line; make the file again")


ENDINGS = ".parquet, .csv, .json, .jsonl or .jsonl.gz"


def local_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of one file with one of `ENDINGS`, or of all such files of a directory by name. Raises MissingFile, DataError."""
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if row_format(f))
        if not files:
            raise DataError(f"{path} holds no file ending in {ENDINGS}; check --source")
        for file in files:
            yield from local_rows(file)
    elif row_format(path) == "jsonl":
        yield from (row for _, row in read_jsonl(path))
    elif path.suffix == ".csv":
        yield from csv.DictReader(open_text(path))
    elif path.suffix == ".json":
        yield from _json_list(path)
    elif row_format(path) == "parquet":
        yield from _parquet_rows(path)
    else:
        raise DataError(f"{path} has the ending {path.suffix!r}; required is {ENDINGS}; convert or rename it")


def _json_list(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads("".join(open_text(path)))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); required is a list of objects, or name it .jsonl") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise DataError(f"{path} holds no list of JSON objects; required is [{{...}}, ...]")
    return rows


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """A batch in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        raise MissingFile(f"{path} does not exist; check --source")
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); fetch it again") from None


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def rows_of(source: str, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of a path, or of the hub's data set of that name where no such path exists. columns: words OURS=THEIRS, see `renamed`."""
    return renamed(hub_rows(source) if names_hub_set(source) else local_rows(Path(source)), columns, source)


def names_hub_set(source: str) -> bool:
    """True for OWNER/NAME where no such path exists."""
    path = Path(source)
    return not path.exists() and not path.suffix and HUB_NAME.fullmatch(source) is not None


def check_columns(columns: Sequence[str]) -> dict[str, str]:
    """{ours: theirs} of words such as "question=query". ConfigError for another form."""
    pairs = [word.partition("=") for word in columns]
    if wrong := next((word for word, pair in zip(columns, pairs) if not (pair[0] and pair[2])), None):
        raise ConfigError(f"--columns {wrong!r}; required OURS=THEIRS, such as question=query,answer=response")
    return {ours: theirs for ours, _, theirs in pairs}


def renamed(rows: Iterable[dict[str, Any]], columns: Sequence[str], origin: str) -> Iterator[dict[str, Any]]:
    """The rows with their columns under our names. DataError for a row without one of them."""
    names = check_columns(columns)
    for number, row in enumerate(rows, 1):
        if missing := [theirs for theirs in names.values() if theirs not in row]:
            has = f"it has {', '.join(map(str, row))}"
            raise DataError(f"{origin}, row {number} has no column {missing[0]!r}; {has}; correct --columns")
        kept = {key: value for key, value in row.items() if key not in names.values()}
        yield kept | {ours: row[theirs] for ours, theirs in names.items()}


def row_format(path: Path) -> str | None:
    """'parquet', 'csv', 'jsonl' or None, by the ending of the name."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    return path.suffix[1:] if path.suffix in (".parquet", ".csv") else None


def require_columns(
    rows: Iterable[dict[str, Any]], accepted: Iterable[tuple[str, ...]], origin: str
) -> Iterator[dict[str, Any]]:
    """The rows. DataError where the first one holds none of the accepted sets of columns."""
    accepted = list(accepted)
    for number, row in enumerate(rows):
        if number == 0 and not any(set(columns) <= row.keys() for columns in accepted):
            sets = " or ".join("{" + ", ".join(columns) + "}" for columns in accepted)
            raise DataError(
                f"{origin} has the columns {sorted(row)}; required is {sets}; rename them or change --source"
            )
        yield row


# ------------------------------------------------------------------ the hub


def hub_rows(name: str, *, files: str | None = None, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a hub data set, streamed. files: parquet or json files to read from the repository (for data sets that only ship a loading script,
    and for parts of one). Raises UserError within seconds without a network or the package `datasets`."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{name} needs the package `datasets`; pip install datasets, or {OTHER_SOURCES}") from None
    probe_hub(name)
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if files is None:
            yield from datasets.load_dataset(name, split="train", streaming=True)
        else:
            data_files = f"hf://datasets/{name}/{files}"
            kind = "json" if files.endswith((".json", ".jsonl")) else "parquet"
            chosen = {"columns": columns} if columns else {}
            yield from datasets.load_dataset(kind, data_files=data_files, split="train", streaming=True, **chosen)
    except (OSError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name} cannot be read from the hub ({str(error)[:300]}); {OTHER_SOURCES}") from error


def probe_hub(
    name: str,
    timeout_s: float = PROBE_S,
    *,
    remedy: str = f"--source hub needs a network; {OTHER_SOURCES}",
    endpoint: str | None = None,
) -> None:
    """UserError, with the remedy, unless the hub answers within `timeout_s`. The retries of `datasets` itself take minutes. The thread is there
    because a name look-up obeys no socket timeout."""
    from huggingface_hub import constants

    answer: list[str | None] = []
    url = endpoint or constants.ENDPOINT
    thread = threading.Thread(target=lambda: answer.append(_reach(url, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s + 1)
    problem = answer[0] if answer else f"no answer within {timeout_s:.0f} s"
    if problem is not None:
        raise UserError(f"the hub at {url} cannot be reached for {name} ({problem}); {remedy}")


def _reach(url: str, timeout_s: float) -> str | None:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return None  # an answer of any status shows that the hub can be reached
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None
