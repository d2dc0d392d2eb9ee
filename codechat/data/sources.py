"""Where text and conversations come from: the interpreter's own Python files, local files, the hub.

Every source yields plain values (`Document` or a dict row) and keeps a `Ledger`: rows that a selection rule
leaves out (tests, duplicates, generated tables) are `skipped`; rows that should have been usable and were not
are `lost`. A loss has a declared reason and a largest share, and `Ledger.check` stops the preparation above
it: a reader that silently throws away most of its input is how a data set becomes an easy residue of itself.

Left out: tokenising (corpus, dialogues) and the choice of columns for a task (questions, glaive).
The hub is read through `datasets`, imported only when asked for: everything embedded works without it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from codechat.core.errors import DataError, MissingFile, UserError

T = TypeVar("T")
LARGEST_LOSS = 0.05
PROBE_S = 3.0
OTHER_SOURCES = "use --source embedded, or --source PATH with a parquet or jsonl file in the same columns"


@dataclass(frozen=True)
class Document:
    """One text of a corpus. `name` is relative to its source, so that no machine path is ever recorded."""

    text: str
    name: str = ""
    source: str = "text"


@dataclass
class Ledger:
    """Counts of one source. `reasons`: loss reason -> largest share of (kept + lost) that it may take.
    `remedy`: what a user can do about a loss, the end of the error message."""

    source: str
    reasons: Mapping[str, float] = field(default_factory=dict)
    remedy: str = "repair the input, or raise --max-lost"
    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def keep(self) -> None:
        self.kept += 1

    def counted(self, rows: Iterable[T]) -> Iterator[T]:
        """The rows, each one counted as kept."""
        for row in rows:
            self.kept += 1
            yield row

    def skip(self, rule: str) -> None:
        """A selection rule left the row out: that is a choice, not a loss."""
        self.skipped[rule] += 1

    def lose(self, reason: str) -> None:
        """A row that should have been usable was not. Raises KeyError for a reason that was not declared."""
        if reason not in self.reasons:
            raise KeyError(f"source {self.source} does not declare the drop reason {reason!r}")
        self.lost[reason] += 1

    @property
    def total(self) -> int:
        return self.kept + sum(self.lost.values())

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the kept/dropped table; `share` and `limit` are None where a rule, not a loss, took the
        row."""
        base = {"source": self.source, "share": None, "limit": None}
        out = [{**base, "what": "kept", "reason": "", "rows": self.kept}]
        for reason, n in sorted(self.lost.items()):
            share = n / max(self.total, 1)
            limit = self.reasons[reason]
            out.append({**base, "what": "lost", "reason": reason, "rows": n, "share": share, "limit": limit})
        for rule, n in sorted(self.skipped.items()):
            out.append({**base, "what": "skipped", "reason": rule, "rows": n})
        return out

    def check(self) -> None:
        """Raises DataError when a reason took more than its share, or when nothing was kept."""
        total = self.total
        for reason, n in sorted(self.lost.items()):
            if n > self.reasons[reason] * total:
                raise DataError(
                    f"source {self.source} lost {n} of {total} rows ({n / total:.1%}) to {reason!r}; "
                    f"at most {self.reasons[reason]:.1%} is allowed; {self.remedy}"
                )
        if not self.kept:
            seen = ", ".join(f"{k} {n}" for k, n in (self.lost + self.skipped).items()) or "no rows at all"
            raise DataError(
                f"source {self.source} kept no row ({seen}); at least one is needed; choose another --source"
            )


def digest(text: str) -> str:
    """sha256 of the text in UTF-8, hex: names a document and decides its split."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def fraction(hex_digest: str) -> float:
    """The digest as a number in [0, 1): the same document falls on the same side of a split on every
    machine."""
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
    """Documents of the interpreter's Python files, tests and vendored copies left out, in an order that
    depends on relative paths only: shuffled by the hash of the path, so that any prefix is a fair sample of
    all packages."""
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
                rule = _path_rule(path)
                if rule is None:
                    yield path
                else:
                    ledger.skip(rule)


def _path_rule(relative: str) -> str | None:
    *folders, name = PurePosixPath(relative).parts
    if folders and folders[0] == PROJECT:
        return "this_project"
    tests = name.startswith("test_") or name.endswith(("_test.py", "conftest.py"))
    if tests or TEST_DIRS.intersection(folders):
        return "tests"
    return "vendored" if VENDOR_DIRS.intersection(folders) else None


def read_text_file(path: Path, name: str, source: str, ledger: Ledger) -> Document | None:
    """The document of one file; None, and a count in the ledger, where it cannot be used. A .py file must
    also pass `text_rule`."""
    try:
        raw = path.read_bytes()
    except OSError:
        ledger.lose("unreadable")
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        ledger.lose("not_utf8")
        return None
    rule = text_rule(text) if path.suffix == ".py" else None
    if rule is not None:
        ledger.skip(rule)
        return None
    return Document(text.replace("\r\n", "\n"), name, source)


def text_rule(text: str) -> str | None:
    """The rule that leaves a source text out, or None. The limits on lines are those of github-code-clean:
    tables of data and minified code teach digits, not programs."""
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
    """Lines of a text file, plain or .gz. Raises MissingFile, DataError (not UTF-8, truncated archive)."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist; a readable file is needed; check --source")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise DataError(f"{path} is not UTF-8 ({where}); text in UTF-8 is needed; convert it") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a truncated or foreign archive ({error}); fetch it again") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each non-blank line. Raises DataError that names the file and the line, also
    for a file without any row."""
    rows = 0
    for number, line in enumerate(open_text(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}:{number} is not JSON ({error}); one object per line is needed; "
                "a truncated last line usually means an interrupted download or write: make the file again"
            ) from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise DataError(f"{path}:{number} holds a {kind}; one JSON object per line is needed")
        rows += 1
        yield number, row
    if not rows:
        raise DataError(f"{path} is empty; at least one JSON object per line is needed; make the file again")


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file, a batch in memory at a time. Raises MissingFile, DataError for a foreign
    file."""
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        raise MissingFile(f"{path} does not exist; a readable file is needed; check --source")
    try:
        table = pyarrow.parquet.ParquetFile(path)
        for batch in table.iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); fetch it again") from None


ENDINGS = ".parquet, .jsonl or .jsonl.gz"


def local_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of one parquet, jsonl or jsonl.gz file, or of all such files of a directory in the order of their
    names."""
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if row_format(f))
        if not files:
            raise DataError(f"{path} holds no file ending in {ENDINGS}; one is needed; check --source")
        for file in files:
            yield from local_rows(file)
    elif row_format(path) == "parquet":
        yield from read_parquet(path)
    elif row_format(path) == "jsonl":
        yield from (row for _, row in read_jsonl(path))
    else:
        raise DataError(f"{path} has the ending {path.suffix!r}; {ENDINGS} is needed; convert or rename it")


def row_format(path: Path) -> str | None:
    """'parquet', 'jsonl' or None, by the ending of the name."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return "jsonl"
    return "parquet" if path.suffix == ".parquet" else None


def require_columns(
    rows: Iterable[dict[str, Any]], accepted: Iterable[tuple[str, ...]], origin: str
) -> Iterator[dict[str, Any]]:
    """The rows, once the first one is seen to hold one of the accepted sets of columns. Raises DataError
    naming both."""
    accepted = list(accepted)
    for number, row in enumerate(rows):
        if number == 0 and not any(set(columns) <= row.keys() for columns in accepted):
            wanted = " or ".join("{" + ", ".join(columns) + "}" for columns in accepted)
            raise DataError(
                f"{origin} has the columns {sorted(row)}; {wanted} is needed; rename them or change --source"
            )
        yield row


# ------------------------------------------------------------------ the hub


def hub_rows(name: str, *, files: str | None = None, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a hub data set, streamed. `files`: parquet or json files to read straight from the repository (for
    data sets that only ship a loading script, and for parts of one). Raises UserError within seconds when there
    is no network or no `datasets` package."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"the package `datasets` is not installed; --source hub needs it to read {name}; "
            f"install it, or {OTHER_SOURCES}"
        ) from None
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
    name: str, timeout_s: float = PROBE_S, *, remedy: str = f"--source hub needs a network; {OTHER_SOURCES}"
) -> None:
    """Raises UserError, with the remedy, unless the hub answers within `timeout_s`. Asked before `datasets` is, whose own retries
    take minutes; in a thread, since a name look-up obeys no socket timeout."""
    from huggingface_hub import constants

    answer: list[str | None] = []
    url = constants.ENDPOINT
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
        return None  # an answer of any status shows that the way there is open
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None
