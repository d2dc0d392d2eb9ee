"""Where text and rows come from: the interpreter's own Python files, local files, the hub.

A `Ledger` counts the rows of a source: `skipped` by a rule (tests, duplicates, generated tables), or `lost` where a row
should have been usable. Too many losses are an error: a reader that drops most of its input leaves only the easy part."""

import csv
import datetime
import hashlib
import json
import os
import re
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from codechat.core.errors import ConfigError, DataError, MissingFile, UserError

T = TypeVar("T")
Row = dict[str, Any]
LARGEST_LOSS = 0.05
PROBE_S = 3.0  # seconds
OTHER_SOURCES = "use a parquet or jsonl file in the same columns, or embedded where there is such a default"


@dataclass(frozen=True)
class Document:
    """One text of a corpus. `name` is relative to its source, so no machine path is recorded."""

    text: str
    name: str = ""
    source: str = "text"


@dataclass
class Ledger:
    """Counts of one source. largest: the share of (kept + lost) that one reason may take; limits: other ones."""

    source: str
    largest: float = LARGEST_LOSS
    limits: Mapping[str, float] = field(default_factory=dict)
    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> where it was met first

    def skip(self, rule: str) -> None:
        """A rule left a row out."""
        self.skipped[rule] += 1

    def lose(self, reason: str, where: str = "") -> None:
        """A row that should have been usable was not."""
        self.lost[reason] += 1
        self.first.setdefault(reason, where)

    def counted(self, items: Iterable[T | str]) -> Iterator[T]:
        """The items, each one counted as kept; a string is the reason of a loss."""
        for item in items:
            if isinstance(item, str):
                self.lose(item)
            else:
                self.kept += 1
                yield item

    def rows(self) -> list[Row]:
        """Rows of the kept/dropped table; `share` and `limit` are None except for losses."""
        total = self.kept + self.lost.total()
        lost = [("lost", r, n, n / total, self.limits.get(r, self.largest)) for r, n in sorted(self.lost.items())]
        skipped = [("skipped", rule, n, None, None) for rule, n in sorted(self.skipped.items())]
        names = ("source", "what", "reason", "rows", "share", "limit")
        rows = [("kept", "", self.kept, None, None), *lost, *skipped]
        return [dict(zip(names, (self.source, *row))) for row in rows]

    def check(self, remedy: str = "repair the input, or raise --max-lost") -> None:
        """DataError when a reason took more than its share, or when nothing was kept."""
        for _, what, reason, n, share, limit in (row.values() for row in self.rows()):
            if what == "lost" and share > limit:
                at = f" (the first: {self.first[reason]})" if self.first[reason] else ""
                lost = f"source {self.source} lost {n} of {self.kept + self.lost.total()} rows ({share:.1%}) to {reason!r}{at}"
                raise DataError(f"{lost}; at most {limit:.1%} is allowed; {remedy}")
        if not self.kept:
            seen = ", ".join(f"{k} {n}" for k, n in (self.lost + self.skipped).items()) or "no rows at all"
            raise DataError(f"source {self.source} kept no row ({seen}); choose another --source")


def digest(text: str) -> str:
    """sha256 of the text in UTF-8, hex: names a document and decides its split."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object, another one in each process


def hash_rows(rows: Iterable[Any]) -> str:
    """16 hex digits of the content of rows, in their order: bytes, or what json can hold. What it cannot hold, as a user's rows may, counts by its
    repr without addresses, so another process finds the same."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(row if isinstance(row, bytes) else _as_text(row).encode("utf-8", "surrogatepass"))
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def _as_text(row: Any) -> str:
    def stable(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(_as_text, value))
        if isinstance(value, Mapping):
            return dict(value)
        return ADDRESS.sub("", repr(value))

    try:
        return json.dumps(row, default=stable)
    except (TypeError, ValueError):  # keys that are no text, or a circle
        return ADDRESS.sub("", repr(row))


def fraction(hex_digest: str) -> float:
    """The digest as a number in [0, 1): a document is in the same split on every machine."""
    return int(hex_digest[:8], 16) / 2**32


PACKAGE_DIRS = ("site-packages", "dist-packages")
TEST_DIRS = frozenset({"test", "tests", "testing", "idle_test", "_tests"})
VENDOR_DIRS = frozenset(
    {"_vendor", "_vendored", "vendor", "vendored", "extern", "externals", "third_party", "_distutils"}
)


def embedded_python(ledger: Ledger, roots: Iterable[tuple[str, Path]] | None = None) -> Iterator[Document]:
    """Documents of Python files without tests and vendored copies, in the order of the hashes of their relative paths, so
    any prefix is a fair sample. roots: (source name, directory); None = the standard library and installed packages."""
    files: dict[str, tuple[str, Path]] = {}
    standard, *installed = map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    unique = dict.fromkeys(map(os.path.realpath, [*installed, *(p for p in sys.path if Path(p).name in PACKAGE_DIRS)]))
    own = [("stdlib", Path(standard)), *(("packages", Path(p)) for p in unique if os.path.isdir(p))]
    for source, root in own if roots is None else roots:
        for directory, folders, names in os.walk(root):
            folders[:] = [f for f in folders if f not in (*PACKAGE_DIRS, "__pycache__")]
            for path in (Path(directory, name) for name in names if name.endswith(".py")):
                relative = path.relative_to(root).as_posix()
                if rule := _path_rule(relative):
                    ledger.skip(rule)
                else:
                    files.setdefault(relative, (source, path))
    for relative in sorted(files, key=lambda name: (digest(name), name)):
        source, path = files[relative]
        if document := read_text_file(path, relative, source, ledger):
            yield document


def _path_rule(relative: str) -> str | None:
    *folders, name = PurePosixPath(relative).parts
    if folders[:1] == ["codechat"]:
        return "this_project"
    tests = name.startswith("test_") or name.endswith(("_test.py", "conftest.py"))
    if tests or TEST_DIRS.intersection(folders):
        return "tests"
    return "vendored" if VENDOR_DIRS.intersection(folders) else None


def read_text_file(path: Path, name: str, source: str, ledger: Ledger) -> Document | None:
    """The document of one file; None, and a count in the ledger, where it cannot be used."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        return ledger.lose("unreadable" if isinstance(error, OSError) else "not_utf8")
    if path.suffix == ".py" and (rule := text_rule(text)):
        return ledger.skip(rule)
    return Document(text.replace("\r\n", "\n"), name, source)


def text_rule(text: str) -> str | None:
    """The rule that removes a source text, or None. The limits on lines are those of github-code-clean."""
    if not text.strip():
        return "empty"
    if len(text) > 1_000_000:
        return "too_large"
    lines = text.splitlines()
    if max(map(len, lines)) > 1000 or len(text) / len(lines) > 100:
        return "long_lines"
    marks = "".join(text[:20_000].split())
    return "mostly_data" if sum(map(str.isalpha, marks)) < 0.4 * len(marks) else None


ENDINGS = ".parquet, .json or .jsonl"
ROW_ENDINGS = (".parquet", ".jsonl", ".json", ".csv")
# Files beside rows that describe them: those of `datasets`, and our own.
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "manifest.json")
MMLU_COLUMNS = ["question", *"ABCD", "answer"]


def open_text(path: Path) -> Iterator[str]:
    """Lines of a text file without a byte order mark. MissingFile, DataError."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist; check the path")
    try:
        with open(path, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, object) of each non-blank line. DataError for another line or a file without rows."""
    empty = True
    for number, line in enumerate(open_text(path), 1):
        if line.strip():
            empty, where = False, f"{path}:{number}"
            yield number, _objects([_decoded(line, where)], where)[0]
    if empty:
        raise DataError(f"{path} is empty; required is one JSON object per line; make the file again")


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}); was the download interrupted? make the file again") from None


def _objects(rows: list[Any], where: str) -> list[Row]:
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{where} holds {str(rows)[:60]}; required are JSON objects")
    return rows


def row_format(path: Path) -> str | None:
    """'parquet', 'jsonl' or None, by the ending of the name."""
    return path.suffix[1:] if path.suffix in (".parquet", ".jsonl") else None


def row_files(directory: Path) -> list[Path]:
    """The files of rows in a directory, sorted. DataError where there is none, or one that is compressed."""
    files = sorted(path for path in directory.iterdir() if path.suffix in ROW_ENDINGS and path.name not in ABOUT)
    if packed := [path.name for path in directory.iterdir() if path.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip")]:
        raise DataError(f"{directory} holds {packed[0]}, which is compressed; unpack it, or move it elsewhere")
    if not files:
        raise DataError(
            f"no rows in {directory}: it holds no file ending in .csv, {ENDINGS}; {where_rows_are(directory)}"
        )
    name_unread(directory, files)
    return files


def name_unread(directory: Path, read: Collection[Path]) -> None:
    """Name on stderr what else a directory holds, but files that only describe a data set."""
    others = [path.name for path in directory.iterdir() if path not in read and path.name not in ABOUT]
    if others := sorted(name for name in others if not name.startswith((".", "README", "LICENSE"))):
        print(f"{directory}: not read: {', '.join(others)}", file=sys.stderr)


def where_rows_are(path: Path, pattern: str = "*") -> str:
    """For an error about a folder without rows: which of its folders have files of this pattern."""
    found = [file for file in path.rglob(pattern) if file.suffix in ROW_ENDINGS and file.name not in ABOUT]
    below = sorted({file.parent for file in found})
    if below:
        return f"{', '.join(map(str, below[:3]))} has some"
    if next(path.rglob("*.arrow"), None):
        return "its .arrow files are those of `datasets`: load them, and write parquet with to_parquet"
    return "check the path"


def local_rows(path: Path) -> Iterator[Row]:
    """Rows of a csv file or one with one of `ENDINGS`, or of all such files of a directory. MissingFile, DataError."""
    if path.is_dir():
        yield from chain.from_iterable(map(local_rows, row_files(path)))
    elif path.suffix == ".parquet" and path.exists():
        yield from _parquet_rows(path)
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix == ".json" and path.exists():
        yield from _json_rows(path)
    elif path.suffix in (".jsonl", ".json") or not path.exists():
        yield from (row for _, row in read_jsonl(path))
    else:
        raise DataError(f"{path} has the ending {path.suffix!r}; required is .csv, {ENDINGS}; convert or rename it")


def _json_rows(path: Path) -> Iterator[Row]:
    """The objects of a list, one object over several lines, or one object a line."""
    text = "".join(open_text(path))
    if text.lstrip().startswith("["):
        yield from _objects(_decoded(text, str(path)), str(path))
        return
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from (row for _, row in read_jsonl(path))
        return
    yield from _objects([whole], str(path))


def _parquet_rows(path: Path) -> Iterator[Row]:
    """A batch in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            rows = batch.to_pylist(maps_as_pydicts="lossy")
            yield from (arrow_row(row, batch.schema, json_text=True, padded=True) for row in rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); fetch it again") from None


class Padded(dict[str, Any]):
    """An object of an Arrow table without its null fields. fields: the names of all, for who knows which nulls were
    meant."""

    fields: tuple[str, ...] = ()


def arrow_row(row: Row, schema: Any, *, json_text: bool, padded: bool) -> Row:
    """A row of a table with this pyarrow schema, as JSON would have it. json_text: whether cells of the type arrow.json,
    in which `datasets` 5 writes objects whose keys differ, are still text. padded: whether structs have null fields that
    only others of their column have; these are left out. The nulls of a JSON cell or of a map were meant."""
    types = {field.name: field.type for field in schema}

    def plain(value: Any, kind: Any) -> Any:
        if getattr(kind, "extension_name", "") == "arrow.json":
            return _decoded(value, "a cell of JSON") if json_text and isinstance(value, str) else value
        kind = getattr(kind, "storage_type", kind)
        if isinstance(value, list):
            return [plain(each, getattr(kind, "value_type", None)) for each in value]
        if not isinstance(value, Mapping):
            return as_text(value)
        if hasattr(kind, "item_type"):  # a map
            return {name: plain(each, kind.item_type) for name, each in value.items()}
        fields = {field.name: field.type for field in kind} if getattr(kind, "num_fields", 0) else {}
        kept = {name: each for name, each in value.items() if each is not None or not padded}
        fewer = Padded((name, plain(each, fields.get(name))) for name, each in kept.items())
        fewer.fields = tuple(value)
        return fewer

    return {name: plain(value, types.get(name)) for name, value in row.items()}


def as_text(value: Any) -> Any:
    """A date or a time as ISO text; any other value as it is. `datasets` turns texts that look like dates into timestamps:
    "2024-05-01" comes back as midnight, and therefore without a time."""
    if isinstance(value, datetime.datetime):
        midnight = value.time() == datetime.time() and value.tzinfo is None
        return value.date().isoformat() if midnight else value.isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return value


def _csv_rows(path: Path) -> Iterator[Row]:
    """By the names in the first line; MMLU's own files have no such line. DataError for a line with more or fewer fields,
    which an unquoted comma makes, and for a quotation mark that is not closed."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the module's own limit is 131,072 characters
    reader, rows, names = csv.reader(open_text(path), strict=True), list[Row](), list[str]()
    try:
        for line in reader:
            if not line:
                continue
            if not names:
                names = line
                if len(line) != len(MMLU_COLUMNS) or line[-1] not in ("A", "B", "C", "D"):
                    continue
                names = MMLU_COLUMNS
            if len(line) != len(names):
                fault = f"has {len(line)} fields and the first line {len(names)} ({', '.join(names)[:80]})"
                raise DataError(f"{path}:{reader.line_num} {fault}; put a text with a comma in quotation marks")
            rows.append(dict(zip(names, line)))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} is not csv ({error}); put each text in quotation marks") from None
    if len(set(names)) < len(names):
        raise DataError(f"{path} has two columns of one name ({', '.join(names)[:80]}); rename one")
    yield from _objects(rows, str(path))


def without_nulls(value: Any) -> Any:
    """The value, where its objects at any depth have no null fields."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def rows_of(source: str, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a path, or of the hub's data set OWNER/NAME where no such path exists. columns: words OURS=THEIRS."""
    names = dict(word.split("=", 1) for word in columns if "=" in word.strip("="))
    if len(names) < len(columns):
        raise ConfigError(f"--columns {','.join(columns)}; required OURS=THEIRS, such as question=query")
    rows = hub_rows(source) if names_hub_set(source) else local_rows(Path(source))
    for number, row in enumerate(rows, 1):
        if missing := [theirs for theirs in names.values() if theirs not in row]:
            has = f"it has {', '.join(map(str, row))}"
            raise DataError(f"{source}, row {number} has no column {missing[0]!r}; {has}; correct --columns")
        rest = {key: value for key, value in row.items() if key not in names.values()}
        yield rest | {ours: row[theirs] for ours, theirs in names.items()}


def names_hub_set(source: str) -> bool:
    """True for OWNER/NAME where no such path exists."""
    path = Path(source)
    return not path.exists() and not path.suffix and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source) is not None


def require_columns(rows: Iterable[Row], accepted: Collection[tuple[str, ...]], origin: str) -> Iterator[Row]:
    """The rows. DataError where the first one has none of the accepted sets of columns."""
    for number, row in enumerate(rows):
        if number == 0 and not any(set(columns) <= row.keys() for columns in accepted):
            sets = " or ".join("{" + ", ".join(columns) + "}" for columns in accepted)
            raise DataError(f"{origin} has the columns {sorted(row)}; required is {sets}; rename them")
        yield row


def hub_rows(name: str, *, files: str | None = None, columns: list[str] | None = None) -> Iterator[Row]:
    """Rows of a hub data set, streamed. files: its parquet or json files, for a part of it or where it has a loading
    script. UserError within seconds without a network."""
    import datasets

    probe_hub(name)
    from huggingface_hub.errors import HfHubHTTPError

    what: Row = {"path": name}
    if files:
        kind = "json" if files.endswith((".json", ".jsonl")) else "parquet"
        what = {"path": kind, "data_files": f"hf://datasets/{name}/{files}"} | ({"columns": columns} if columns else {})
    try:
        stream = datasets.load_dataset(**what, split="train", streaming=True)
        yield from _stream_rows(stream)
    except (OSError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name} cannot be read from the hub ({str(error)[:300]}); {OTHER_SOURCES}") from error


def _stream_rows(stream: Any) -> Iterator[Row]:
    """Rows of a stream of `datasets`, which has decoded cells of the type Json. Where it reads JSON files and knows this
    type, objects whose keys differ have it, so that no object is padded."""
    import datasets

    schema = stream.features.arrow_schema if stream.features else ()
    padded = getattr(stream.info, "builder_name", None) != "json" or not hasattr(datasets, "Json")
    for row in stream:
        yield arrow_row(row, schema, json_text=False, padded=padded)


class NoHub(UserError):
    """No hub answers."""


def probe_hub(name: str, remedy: str = OTHER_SOURCES) -> None:
    """NoHub, with the remedy, unless the hub answers within PROBE_S; a name look-up obeys no timeout but a thread's."""
    from huggingface_hub import constants

    url, problems = constants.ENDPOINT, []

    def reach() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_S).close()
            problems.append("")
        except (OSError, ValueError) as error:  # an answer with any status is one
            answered = isinstance(error, urllib.error.HTTPError)
            problems.append("" if answered else str(getattr(error, "reason", error)))

    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(PROBE_S + 1)
    if problem := problems[0] if problems else f"no answer within {PROBE_S:.0f} s":
        raise NoHub(f"the hub at {url} cannot be reached for {name} ({problem}); {remedy}")
