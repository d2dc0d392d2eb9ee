"""Where text and rows come from: the interpreter's own Python files, local files, the hub.

A `Ledger` counts the rows of a source: `skipped` by a rule (tests, duplicates, generated
tables), or `lost` if a row should have been usable. Too many losses are an error: a reader that
drops most of its input keeps the easy part."""

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
from typing import Any, Literal, NamedTuple, TypeVar

from codechat.core.errors import ConfigError, DataError, MissingFile, UserError

T = TypeVar("T")
Row = dict[str, Any]
IGNORE = -100  # the label of a token without loss, as in torch's cross_entropy
MANIFEST = "manifest.json"  # of what codechat has prepared
LARGEST_LOSS = 0.05
# seconds, after which a network counts as absent
PROBE_S = 3.0
OTHER_SOURCES = (
    "use a parquet or jsonl file in the same columns, or embedded where there is such a default"
)


@dataclass(frozen=True)
class Document:
    """One text of a corpus. `name` is relative to its source, so no machine path is recorded."""

    text: str
    name: str = ""
    source: str = "text"


class Count(NamedTuple):
    """How many rows of a source were kept, or skipped or lost for a reason; of losses also the
    share and its limit."""

    source: str
    what: Literal["kept", "lost", "skipped"]
    reason: str
    rows: int
    share: float | None = None
    limit: float | None = None


@dataclass
class Ledger:
    """Counts of one source. largest: the share of (kept + lost) that one reason may take;
    limits: other ones."""

    source: str
    largest: float = LARGEST_LOSS
    limits: Mapping[str, float] = field(default_factory=dict)
    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> place of its first row

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

    def rows(self) -> list[Count]:
        """Rows of the kept/dropped table."""
        rows = [Count(self.source, "kept", "", self.kept)]
        for reason, n in sorted(self.lost.items()):
            rows.append(Count(self.source, "lost", reason, n, n / self._total, self._limit(reason)))
        return rows + [
            Count(self.source, "skipped", rule, n) for rule, n in sorted(self.skipped.items())
        ]

    @property
    def _total(self) -> int:
        return self.kept + self.lost.total()

    def _limit(self, reason: str) -> float:
        return self.limits.get(reason, self.largest)

    def check(self, remedy: str = "repair the input, or raise --max-lost") -> None:
        """DataError when a reason took more than its share, or when nothing was kept."""
        for reason, n in sorted(self.lost.items()):
            share = n / self._total
            if share > self._limit(reason):
                at = f" (the first: {self.first[reason]})" if self.first[reason] else ""
                raise DataError(
                    f"source {self.source} lost {n} of {self._total} rows ({share:.1%}) to {reason!r}{at}; "
                    f"at most {self._limit(reason):.1%} is allowed; {remedy}"
                )
        if not self.kept:
            counts = [f"{reason} {n}" for reason, n in (self.lost + self.skipped).items()]
            seen = ", ".join(counts) or "no rows at all"
            raise DataError(f"source {self.source} kept no row ({seen}); choose another --source")


def digest(text: str) -> str:
    """sha256 of the text in UTF-8, hex: names a document and decides its split."""
    # JSON may hold halves of characters, which plain UTF-8 refuses.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object, another one in each process


def hash_rows(rows: Iterable[Any]) -> str:
    """16 hex digits of the content of rows, in their order: bytes, or what json can hold. Other
    values, which a user's rows may hold, count by their repr without addresses, so another
    process gets the same hash."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(
            row if isinstance(row, bytes) else _as_json(row).encode("utf-8", "surrogatepass")
        )
        sha.update(b"\0")  # or ["ab"] and ["a", "b"] would be one
    return sha.hexdigest()[:16]


def _as_json(row: Any) -> str:
    try:
        return json.dumps(row, default=_stable)
    except (TypeError, ValueError):  # keys that are no text, or a circle
        return ADDRESS.sub("", repr(row))


def _stable(value: Any) -> Any:
    """A value that json can hold in place of one that it cannot."""
    if isinstance(value, set | frozenset):
        return sorted(map(_as_json, value))  # the order of a set differs between processes
    if isinstance(value, Mapping):
        return dict(value)
    return ADDRESS.sub("", repr(value))


def fraction(hex_digest: str) -> float:
    """The digest as a number in [0, 1): a document is in the same split on every machine."""
    return int(hex_digest[:8], 16) / 2**32


PACKAGE_DIRS = ("site-packages", "dist-packages")
OWN_PACKAGES = ("codechat", "codechat_lab")
TEST_DIRS = frozenset({"test", "tests", "testing", "idle_test", "_tests"})
# copies of packages that are installed themselves: their text would count twice
VENDOR_DIRS = frozenset(
    {
        "_vendor",
        "_vendored",
        "vendor",
        "vendored",
        "extern",
        "externals",
        "third_party",
        "_distutils",
    }
)


def embedded_python(
    ledger: Ledger, roots: Iterable[tuple[str, Path]] | None = None
) -> Iterator[Document]:
    """Documents of Python files without tests and vendored copies, in the order of the hashes
    of their relative paths, so any prefix is a fair sample. roots: (source name, directory);
    None = the standard library and what is installed."""
    files: dict[str, tuple[str, Path]] = {}
    for source, root in _installed_python() if roots is None else roots:
        for path in _python_files(root):
            relative = path.relative_to(root).as_posix()
            rule = _path_rule(relative)
            if rule:
                ledger.skip(rule)
            else:
                # the first directory wins, as in an import
                files.setdefault(relative, (source, path))
    for relative in sorted(files, key=lambda name: (digest(name), name)):
        source, path = files[relative]
        document = read_text_file(path, relative, source, ledger)
        if document:
            yield document


def _installed_python() -> list[tuple[str, Path]]:
    """(source name, directory) of the standard library and of each directory of installed
    packages."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places += [place for place in sys.path if Path(place).name in PACKAGE_DIRS]
    unique = dict.fromkeys(map(os.path.realpath, places))
    packages = [("packages", Path(place)) for place in unique if os.path.isdir(place)]
    return [("stdlib", Path(sysconfig.get_path("stdlib"))), *packages]


def _python_files(root: Path) -> Iterator[Path]:
    """The .py files below a directory, but those of packages installed in it."""
    for directory, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in (*PACKAGE_DIRS, "__pycache__")]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def _path_rule(relative: str) -> str | None:
    """The rule that leaves a path out, or None."""
    *folders, name = PurePosixPath(relative).parts
    if folders and folders[0] in OWN_PACKAGES:
        return "this_project"
    tests = name.startswith("test_") or name.endswith(("_test.py", "conftest.py"))
    if tests or TEST_DIRS.intersection(folders):
        return "tests"
    return "vendored" if VENDOR_DIRS.intersection(folders) else None


def read_text_file(path: Path, name: str, source: str, ledger: Ledger) -> Document | None:
    """The document of one file; None, and a count in the ledger, if it cannot be used."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        ledger.lose("unreadable" if isinstance(error, OSError) else "not_utf8")
        return None
    rule = text_rule(text) if path.suffix == ".py" else None
    if rule:
        ledger.skip(rule)
        return None
    return Document(text.replace("\r\n", "\n"), name, source)


def text_rule(text: str) -> str | None:
    """The rule that removes a source text, or None. The limits on lines are those of
    github-code-clean."""
    if not text.strip():
        return "empty"
    if len(text) > 1_000_000:
        return "too_large"
    lines = text.splitlines()
    if max(map(len, lines)) > 1000 or len(text) / len(lines) > 100:
        return "long_lines"
    marks = "".join(text[:20_000].split())
    # tables of numbers are valid Python and teach none
    letters = sum(map(str.isalpha, marks))
    return "mostly_data" if letters < 0.4 * len(marks) else None


ENDINGS = ".parquet, .json or .jsonl"
ROW_ENDINGS = (".parquet", ".jsonl", ".json", ".csv")
PACKED_ENDINGS = (".gz", ".zst", ".bz2", ".xz", ".zip")
# Files beside rows that describe them: those of `datasets`, and our own.
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", MANIFEST)
MMLU_COLUMNS = ["question", *"ABCD", "answer"]


def open_text(path: Path) -> Iterator[str]:
    """Lines of a text file without a byte order mark. MissingFile, DataError."""
    if not path.exists():
        raise MissingFile(f"{path} does not exist; check the path")
    try:
        with open(path, encoding="utf-8-sig") as lines:
            yield from lines
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it"
        ) from None


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, object) of each non-blank line. DataError for another line or a file
    without rows."""
    empty = True
    for number, line in enumerate(open_text(path), 1):
        if line.strip():
            empty = False
            where = f"{path}:{number}"
            value = _decoded(line, where)
            if isinstance(value, list):
                raise DataError(
                    f"{where} is a list; expected one object a line; a file that is "
                    "one list has the ending .json, which `codechat data` reads"
                )
            (row,) = _objects([value], where)
            yield number, row
    if empty:
        raise DataError(f"{path} is empty; expected one JSON object per line; make the file again")


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}); was the download interrupted? make the file again"
        ) from None


def _objects(rows: list[Any], where: str) -> list[Row]:
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{where} holds {str(rows)[:60]}; expected JSON objects")
    return rows


def row_format(path: Path) -> str | None:
    """'parquet', 'jsonl' or None, by the ending of the name."""
    return path.suffix[1:] if path.suffix in (".parquet", ".jsonl") else None


def row_files(directory: Path) -> list[Path]:
    """The files of rows in a directory, sorted. DataError if there are none, or if one is
    compressed."""
    present = sorted(directory.iterdir())
    packed = next((path for path in present if path.suffix in PACKED_ENDINGS), None)
    if packed:
        raise DataError(
            f"{directory} holds {packed.name}, which is compressed; unpack it, or move it elsewhere"
        )
    files = [path for path in present if path.suffix in ROW_ENDINGS and path.name not in ABOUT]
    if not files:
        where = where_rows_are(directory)
        raise DataError(
            f"no rows in {directory}: it holds no file ending in .csv, {ENDINGS}; {where}"
        )
    name_unread(directory, files)
    return files


def name_unread(directory: Path, read: Collection[Path]) -> None:
    """Print to stderr the other files of a directory, but not those that only describe a data
    set."""
    names = sorted(
        path.name for path in directory.iterdir() if path not in read and path.name not in ABOUT
    )
    others = [name for name in names if not name.startswith((".", "README", "LICENSE"))]
    if others:
        print(f"{directory}: not read: {', '.join(others)}", file=sys.stderr)


def where_rows_are(path: Path, pattern: str = "*") -> str:
    """For an error about a folder without rows: which of its folders have files of this pattern."""
    found = [
        file
        for file in path.rglob(pattern)
        if file.suffix in ROW_ENDINGS and file.name not in ABOUT
    ]
    below = sorted({file.parent for file in found} - {path})
    if below:
        return f"{', '.join(map(str, below[:3]))} has some"
    if next(path.rglob("*.arrow"), None):
        return (
            "its .arrow files are those of `datasets`: load them, and write parquet with to_parquet"
        )
    return "check the path"


def local_rows(path: Path) -> Iterator[Row]:
    """Rows of a csv file or one with one of `ENDINGS`, or of all such files of a directory.
    MissingFile, DataError."""
    if path.is_dir():
        yield from chain.from_iterable(map(local_rows, row_files(path)))
    elif path.suffix == ".csv":
        yield from _csv_rows(path)
    elif path.suffix == ".jsonl" or not path.exists():
        yield from _jsonl_rows(path)
    elif path.suffix == ".json":
        yield from _json_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise DataError(
            f"{path} has the ending {path.suffix!r}; expected .csv, {ENDINGS}; convert or rename it"
        )


def _jsonl_rows(path: Path) -> Iterator[Row]:
    return (row for _, row in read_jsonl(path))


def _json_rows(path: Path) -> Iterator[Row]:
    """Rows of one list, one object over several lines, or one object a line."""
    text = "".join(open_text(path))
    if text.lstrip().startswith("["):
        return iter(_objects(_decoded(text, str(path)), str(path)))
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _jsonl_rows(path)
    return iter(_objects([whole], str(path)))


def _parquet_rows(path: Path) -> Iterator[Row]:
    """A batch in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            rows = batch.to_pylist(maps_as_pydicts="lossy")
            yield from (arrow_row(row, batch.schema, json_text=True, padded=True) for row in rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"{path} is not a readable parquet file ({error}); fetch it again"
        ) from None


class Padded(dict[str, Any]):
    """An object of an Arrow table without its null fields. fields: the names of all fields,
    since a schema may say which nulls were meant."""

    fields: tuple[str, ...] = ()


def arrow_row(row: Row, schema: Any, *, json_text: bool, padded: bool) -> Row:
    """A row of a table with this pyarrow schema, as JSON would have it.

    json_text: cells of the type arrow.json, in which `datasets` 5 writes objects whose keys
    differ, are still text.
    padded: structs have null fields that only others of their column have, and lose them here.
    The nulls of a JSON cell or of a map were meant."""

    def plain(value: Any, kind: Any) -> Any:
        if getattr(kind, "extension_name", "") == "arrow.json":
            return (
                _decoded(value, "a cell of JSON") if json_text and isinstance(value, str) else value
            )
        kind = getattr(kind, "storage_type", kind)
        if isinstance(value, list):
            inner = getattr(kind, "value_type", None)
            return [plain(each, inner) for each in value]
        if not isinstance(value, Mapping):
            return as_text(value)
        if hasattr(kind, "item_type"):  # a map
            return {name: plain(each, kind.item_type) for name, each in value.items()}
        fields = (
            {field.name: field.type for field in kind} if getattr(kind, "num_fields", 0) else {}
        )
        kept = {name: each for name, each in value.items() if each is not None or not padded}
        fewer = Padded((name, plain(each, fields.get(name))) for name, each in kept.items())
        fewer.fields = tuple(value)
        return fewer

    types = {field.name: field.type for field in schema}
    return {name: plain(value, types.get(name)) for name, value in row.items()}


def as_text(value: Any) -> Any:
    """A date or a time as ISO text; any other value unchanged."""
    if isinstance(value, datetime.datetime):
        # `datasets` turns texts that look like dates into timestamps: midnight was most
        # probably no time at all.
        midnight = value.time() == datetime.time() and value.tzinfo is None
        return value.date().isoformat() if midnight else value.isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return value


def _csv_rows(path: Path) -> Iterator[Row]:
    """Rows by the names in the first line, which MMLU's own files lack. DataError for a line
    with more or fewer fields, the effect of an unquoted comma, and for a quotation mark that is
    not closed."""
    # the module's own limit is 131,072 characters
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(open_text(path), strict=True)
    rows: list[Row] = []  # all of them before the first is used: a fault may be in the last line
    names: list[str] = []
    try:
        for line in filter(None, reader):
            if not names:
                without_names = len(line) == len(MMLU_COLUMNS) and line[-1] in ("A", "B", "C", "D")
                names = MMLU_COLUMNS if without_names else line
                if not without_names:
                    continue
            if len(line) != len(names):
                fault = (
                    f"has {len(line)} fields and the first line {len(names)} "
                    f"({', '.join(names)[:80]})"
                )
                raise DataError(
                    f"{path}:{reader.line_num} {fault}; put a text with a comma in quotation marks"
                )
            rows.append(dict(zip(names, line)))
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num} is not csv ({error}); put each text in quotation marks"
        ) from None
    if len(set(names)) < len(names):
        raise DataError(f"{path} has two columns of one name ({', '.join(names)[:80]}); rename one")
    yield from _objects(rows, str(path))


def without_nulls(value: Any) -> Any:
    """The value without the null fields of its objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def rows_of(source: str, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a path, or of the hub's data set OWNER/NAME if no such path exists. columns:
    words OURS=THEIRS."""
    names = dict(word.split("=", 1) for word in columns if "=" in word.strip("="))
    if len(names) < len(columns):
        raise ConfigError(
            f"got --columns {','.join(columns)}; expected OURS=THEIRS, such as question=query"
        )
    rows = hub_rows(source) if names_hub_set(source) else local_rows(Path(source))
    for number, row in enumerate(rows, 1):
        for theirs in names.values():
            if theirs not in row:
                has = f"it has {', '.join(map(str, row))}"
                raise DataError(
                    f"{source}, row {number} has no column {theirs!r}; {has}; correct --columns"
                )
        rest = {key: value for key, value in row.items() if key not in names.values()}
        yield rest | {ours: row[theirs] for ours, theirs in names.items()}


def names_hub_set(source: str) -> bool:
    """True for OWNER/NAME if no such path exists."""
    path = Path(source)
    return (
        not path.exists()
        and not path.suffix
        and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source) is not None
    )


def require_columns(
    rows: Iterable[Row], accepted: Collection[tuple[str, ...]], origin: str
) -> Iterator[Row]:
    """The rows. DataError if the first one has none of the accepted sets of columns."""
    for number, row in enumerate(rows):
        if number == 0 and not any(set(columns) <= row.keys() for columns in accepted):
            sets = " or ".join("{" + ", ".join(columns) + "}" for columns in accepted)
            raise DataError(
                f"{origin} has the columns {sorted(row)}; expected {sets}; rename them "
                "(codechat data sft and calls: --columns OURS=THEIRS)"
            )
        yield row


def hub_rows(
    name: str, *, files: str | None = None, columns: list[str] | None = None
) -> Iterator[Row]:
    """Rows of a hub data set, streamed. files: its parquet or json files, for a part of it or
    if it has a loading script. UserError within seconds without a network."""
    import datasets

    probe_hub(name)
    from huggingface_hub.errors import HfHubHTTPError

    if files:
        kind = "json" if files.endswith((".json", ".jsonl")) else "parquet"
        what: Row = {"path": kind, "data_files": f"hf://datasets/{name}/{files}"}
        if columns:
            what["columns"] = columns
    else:
        what = {"path": name}
    try:
        # Streaming: no set is downloaded whole.
        stream = datasets.load_dataset(**what, split="train", streaming=True)
        yield from _stream_rows(stream)
    except (OSError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{name} cannot be read from the hub ({str(error)[:300]}); {OTHER_SOURCES}"
        ) from error


def _stream_rows(stream: Any) -> Iterator[Row]:
    """Rows of a stream of `datasets`, which has decoded cells of the type Json."""
    import datasets

    schema = stream.features.arrow_schema if stream.features else ()
    # From JSON files, a `datasets` that knows the type gives it to objects whose keys differ,
    # and pads none.
    padded = getattr(stream.info, "builder_name", None) != "json" or not hasattr(datasets, "Json")
    for row in stream:
        yield arrow_row(row, schema, json_text=False, padded=padded)


class NoHub(UserError):
    """No hub answers."""


def probe_hub(name: str, remedy: str = OTHER_SOURCES) -> None:
    """NoHub, with the remedy, unless the hub answers within PROBE_S seconds."""
    from huggingface_hub import constants

    url = constants.ENDPOINT
    problems: list[str] = []  # one text, empty if the hub has answered

    def reach() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=PROBE_S
            ).close()
            problems.append("")
        except urllib.error.HTTPError:  # an answer with any status is one
            problems.append("")
        except (OSError, ValueError) as error:
            problems.append(str(getattr(error, "reason", error)))

    # a look-up of a name obeys no timeout but a thread's
    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(PROBE_S + 1)
    problem = problems[0] if problems else f"no answer within {PROBE_S:.0f} s"
    if problem:
        raise NoHub(f"the hub at {url} cannot be reached for {name} ({problem}); {remedy}")
