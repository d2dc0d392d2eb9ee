"""What the tasks share in preparing and reading data: settings of a generator, writing a
directory, reading problems of a public set, or back from a directory."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from codechat.core.config import SEEDS, Settings, opt
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.prepared import print_ledgers, require_kind
from codechat.data.sources import (
    Ledger,
    hub_rows,
    name_unread,
    names_hub_set,
    read_jsonl,
    require_columns,
    row_format,
    rows_of,
    where_rows_are,
)
from codechat.tasks.base import (
    SPLITS,
    BaseTask,
    Problem,
    check_reference_solutions,
    check_split,
    problem_of,
    row_of,
)
from codechat_lab.data.prepared import write

Row = dict[str, Any]
HELD_OUT = ("select", "test")
DEFAULT_LIMIT = 500  # generated problems of a split where no limit is set


@dataclass(frozen=True, kw_only=True)
class PreparedConfig(Settings):
    """Settings of every prepared directory of conversations."""

    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    preview: int = opt(
        0,
        "conversations to show as training sees them, with their loss mask",
        identity=False,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig(PreparedConfig):
    """Settings of what reads rows of files in several layouts."""

    columns: tuple[str, ...] = opt(
        (), "OURS=THEIRS where a file names its columns otherwise, such as question=query"
    )


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(PreparedConfig):
    """Settings of a task that generates its worked examples and problems."""

    make: ClassVar[Callable[..., GeneratedTask]]
    max_examples: int = opt(2000, "worked examples for training", least=1)
    problems: int = opt(2000, "training problems", least=1)
    eval_examples: int = opt(200, "worked examples and problems of each split but train", least=1)
    levels: tuple[int, ...] = opt(
        (1,), "levels of the problems; repeat one to sample it more often"
    )
    seed: int = opt(0, "seed of everything that is drawn", **SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task()

    def task(self) -> GeneratedTask:
        """The task that generates. ConfigError for invalid settings."""
        return self.make(levels=self.levels)


def prepare(
    cfg: Any,
    collect: Callable[[list[Ledger]], dict[str, list[Row]]],
    measure: Callable[..., Row] = lambda files: {},
) -> Row:
    """Write the files DOMAIN.SPLIT -> rows of `collect`, which fills the list of ledgers.
    Returns the manifest of the directory, with the entries that `measure` makes of the
    files."""
    require_kind(Path(cfg.out), "conversations", cfg)
    ledgers: list[Ledger] = []
    try:
        files = collect(ledgers)
        for ledger in ledgers:
            ledger.check()
    finally:
        print_ledgers(ledgers)
    return write(Path(cfg.out), files, ledgers, cfg, **measure(files))


WRITTEN = ("id", "messages", "gold", "split")  # columns of NAME.SPLIT.jsonl
# of a public set, in the names of its files
PARTS = (
    "validation",
    "test",
    "train",
    "dev",
    "auxiliary",
)


class PublicTask(BaseTask, ABC):
    """A public set. source: hub, a path to its files, or a directory with problems in
    NAME.SPLIT.jsonl.

    hub: part -> (data set, its files); `other` is the part of a file whose name tells none.
    accepted: sets of columns.
    columns: OURS=THEIRS of other sets with such rows; None where there are none. gold_fields:
    of written problems."""

    source: str
    hub: Mapping[str, tuple[str, str]]
    other = "test"
    accepted: Collection[tuple[str, ...]]
    columns: Sequence[str] | None = None
    gold_fields: Collection[str]

    @abstractmethod
    def make(self, row: Row, number: int, part: str) -> Problem:
        """The problem of a row."""

    def embedded(self) -> Iterable[Row]:
        raise ConfigError(
            f"{self.name} is not embedded; set source=hub, or "
            "--data-dir with its parquet or jsonl files"
        )

    def _parts(self) -> Iterator[tuple[str, str, Iterable[Row]]]:
        """(part, where its rows are, rows)."""
        path = Path(self.source)
        columns = self.columns or ()
        if self.source == "hub":
            for part, (hub, files) in self.hub.items():
                yield part, hub, hub_rows(hub, files=files)
        elif self.source == "embedded":
            yield self.other, self.source, self.embedded()
        elif self.columns is not None and names_hub_set(self.source):
            yield self.other, self.source, rows_of(self.source, columns)
        elif not path.exists():
            raise MissingFile(
                f"{path} does not exist; {self.name} needs a "
                "parquet or jsonl file, a directory, or hub"
            )
        else:
            for file in self._files(path):
                stem = f"{file.stem.lower()}_".replace("_val_", "_validation_")
                part = next((part for part in PARTS if part in stem), self.other)
                # a set of one part may have files of any name
                if part in self.hub or len(self.hub) == 1:
                    yield part, file.name, rows_of(str(file), columns)

    def _files(self, path: Path) -> list[Path]:
        """The files of a path: written problems, else files with rows, else csv files in the
        folders below."""
        written = sorted(path.glob(f"{self.name}.*.jsonl"))
        if written or not path.is_dir():
            return written or [path]
        found = [file for file in path.iterdir() if row_format(file)]
        if found:
            name_unread(path, found)
        return sorted(found or path.rglob("*.csv"))

    @cached_property
    def rows(self) -> list[Problem]:
        """The problems of all splits. MissingFile and DataError for unreadable input, UserError
        for an unreachable hub."""
        problems = []
        for part, origin, rows in self._parts():
            where = f"{self.name}, {origin}"
            for number, row in enumerate(
                require_columns(rows, (*self.accepted, WRITTEN), where), 1
            ):
                problems.append(self._problem(row, number, part, f"{where}, row {number}"))
        if not problems:
            path = Path(self.source)
            remedy = (
                where_rows_are(path) if path.is_dir() else "give a file or a folder that has some"
            )
            raise DataError(f"no rows of {self.name} in {self.source}; {remedy}")
        return problems

    def _problem(self, row: Row, number: int, part: str, where: str) -> Problem:
        if "gold" in row:  # written by `write_task`
            return problem_of(row, where, self.gold_fields, splits=(*SPLITS, "prompt"))
        try:
            return self.make(row, number, part)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(f"{where}: {type(error).__name__}: {error}; correct the row") from None


class GeneratedTask(BaseTask, ABC):
    """Base of a task that generates its problems, or reads them from NAME.SPLIT.jsonl in the
    directory `source`.

    gold_fields, meta_fields: fields that the rows of the file must have. domain, asked: of the
    conversations with worked examples; worked_part: the part of the values that they have.
    written: the splits whose problems are written. checked:
    how many of their solutions are checked; None = all."""

    source: str | Path | None
    levels: tuple[int, ...]
    known_levels: Collection[int] = (1,)
    gold_fields: Collection[str] = ()
    meta_fields: Collection[str] = ()
    domain: str
    worked_part = "sft"
    asked = "code"
    written: Collection[str] = SPLITS
    checked: int | None = 64

    @abstractmethod
    def generate(self, split: str, n: int, seed: int, worked: bool = False) -> list[Problem]:
        """n different problems, the levels in turn; worked: none of those that `problems` gives
        for training."""

    def part(self, split: str, worked: bool) -> str:
        return self.worked_part if worked and split == "train" else split

    def set_levels(self, source: str | Path | None, levels: Iterable[int]) -> None:
        self.source = source
        self.levels = tuple(levels)
        if not self.levels or set(self.levels) - set(self.known_levels):
            known = ", ".join(map(str, self.known_levels))
            raise ConfigError(
                f"got levels {list(self.levels)}; expected some of {known}; set others"
            )

    def read(self, split: str) -> Iterable[Problem]:
        """The problems of the file that belong to the levels."""
        command = f"codechat data {self.name}"
        path = Path(self.source or "") / f"{self.name}.{split}.jsonl"
        if not path.is_file():
            elsewhere = where_rows_are(Path(self.source or ""), path.name)
            remedy = (
                elsewhere
                if "has some" in elsewhere
                else f"write it with `{command} --out {self.source}`"
            )
            raise MissingFile(f"{path} does not exist; {remedy}")
        for number, row in read_jsonl(path):
            problem = problem_of(
                row, f"{path}:{number} of {command}", self.gold_fields, self.meta_fields
            )
            if problem.meta.get("level", 1) in self.levels:
                yield problem

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems. Without a limit: DEFAULT_LIMIT generated ones, or all of
        the file."""
        check_split(split)
        if self.source is None:
            return self.generate(split, DEFAULT_LIMIT if limit is None else limit, seed)
        return super().problems(split, limit, seed)

    def conversation(self, problem: Problem) -> Row:
        """A worked example: the prompt and the reference solution."""
        return worked_example(self, problem, {"level": problem.meta["level"]})

    def dialogues(self, split: str, n: int, seed: int = 0) -> Iterator[Row]:
        """n conversations with worked examples. Those of "train" are of problems that
        `problems` does not give."""
        yield from map(self.conversation, self.generate(split, n, seed, worked=True))


class DrawnTask(GeneratedTask):
    """Base of a task whose problems are drawn one by one. stream: part of the random seed."""

    stream: str

    @abstractmethod
    def draw(self, level: int, part: str, split: str, rng: random.Random) -> Problem | None:
        """A problem of this part's values; None where the draw gives none."""

    def generate(self, split: str, n: int, seed: int, worked: bool = False) -> list[Problem]:
        """As `GeneratedTask.generate`; a problem that was drawn before is drawn again."""
        part = self.part(split, worked)
        rng = random.Random(f"{self.stream} {part} {seed}")
        drawn = dict[str, Problem]()
        while len(drawn) < n:  # ends: there are far more problems than any n in use
            problem = self.draw(self.levels[len(drawn) % len(self.levels)], part, split, rng)
            if problem:
                drawn.setdefault(problem.id, problem)
        return list(drawn.values())


def worked_example(task: Any, problem: Problem, meta: Mapping[str, Any]) -> Row:
    """A conversation of the prompt and the reference solution. meta: what is known beside the
    split."""
    messages = [*task.prompt(problem), {"role": "assistant", "content": task.gold(problem)}]
    return {
        "id": f"{task.domain}-{problem.id}",
        "messages": messages,
        "domain": task.domain,
        "meta": {"split": problem.split, "asked": task.asked} | dict(meta),
    }


def prepare_generated(cfg: GeneratedConfig) -> Row:
    """Write DOMAIN.SPLIT.jsonl (conversations) and NAME.SPLIT.jsonl (problems). Returns the
    manifest.

    DataError where one of the first reference solutions of a split does not score the maximum."""
    task = cfg.task()
    counts = {"train": cfg.max_examples} | dict.fromkeys(HELD_OUT, cfg.eval_examples)
    worked = {split: task.dialogues(split, n, cfg.seed) for split, n in counts.items()}
    sizes = {
        split: cfg.problems if split == "train" else cfg.eval_examples for split in task.written
    }
    problems = {split: task.generate(split, n, cfg.seed) for split, n in sizes.items()}
    return write_task(cfg, task, worked, problems)


def write_task(
    cfg: Any,
    task: Any,
    worked: Mapping[str, Iterable[Row]],
    problems: Mapping[str, list[Problem]],
) -> Row:
    """Write worked examples and problems of each split, after the check of reference solutions."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        ledger = Ledger(task.name)
        ledgers.append(ledger)
        files = {
            f"{task.domain}.{split}": list(ledger.counted(rows)) for split, rows in worked.items()
        }
        for split, part in problems.items():
            some = part[: task.checked]
            if some:
                check_reference_solutions(task, some).require()
            files[f"{task.name}.{split}"] = list(map(row_of, part))
        return files

    return prepare(cfg, collect)
