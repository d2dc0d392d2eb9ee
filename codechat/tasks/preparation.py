"""What the tasks share in preparing data: settings of a generator, writing a directory, and reading problems back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.config import opt
from codechat.core.errors import DataError, MissingFile
from codechat.data.prepared import print_ledgers, require_kind, write
from codechat.data.sources import Ledger, read_jsonl
from codechat.tasks.base import (
    SPLITS,
    Problem,
    check_reference_solutions,
    check_split,
    problem_of,
    row_of,
    shuffled,
)

Row = dict[str, Any]
HELD_OUT = ("select", "test")
DEFAULT_LIMIT = 500  # generated problems of a split where no limit is set
CHECKED = 64  # generated problems whose reference solutions are checked, per split


@dataclass(frozen=True, kw_only=True)
class PreparedConfig:
    """Settings of every prepared directory of conversations."""

    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    preview: int = opt(0, "conversations to show as training sees them, with their loss mask", identity=False, least=0)


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(PreparedConfig):
    """Settings of a task that generates its worked examples and problems."""

    max_examples: int = opt(2000, "worked examples for training", least=1)
    problems: int = opt(2000, "training problems", least=1)
    eval_examples: int = opt(200, "worked examples and problems of each split but train", least=1)
    levels: tuple[int, ...] = opt((1,), "levels of the problems; repeat one to sample it more often")
    seed: int = opt(0, "seed of everything that is drawn")


@contextmanager
def checked_ledgers() -> Iterator[list[Ledger]]:
    """A list to fill with ledgers, checked at the end of the block and printed in any case."""
    ledgers: list[Ledger] = []
    try:
        yield ledgers
        for ledger in ledgers:
            ledger.check()
    finally:
        print_ledgers(ledgers)


def prepare(cfg: Any, collect: Callable[[list[Ledger]], dict[str, list[Row]]]) -> Row:
    """Write the files DOMAIN.SPLIT -> rows of `collect`, which fills the list of ledgers. Returns the manifest of the directory."""
    require_kind(Path(cfg.out), "conversations")
    with checked_ledgers() as ledgers:
        files = collect(ledgers)
    return write(Path(cfg.out), files, ledgers, cfg)


class GeneratedTask:
    """Base of a task that generates its problems, or reads them from NAME.SPLIT.jsonl in the directory `source`. Its __init__ sets source and levels.

    gold_fields, meta_fields: fields that the rows of the file must have."""

    name: str
    source: str | Path | None
    levels: tuple[int, ...]
    gold_fields: Collection[str] = ()
    meta_fields: Collection[str] = ()

    def generate(self, split: str, n: int, seed: int) -> list[Problem]:
        raise NotImplementedError

    def keeps(self, problem: Problem) -> bool:
        """Whether a problem of the file belongs to the task's settings."""
        return problem.meta.get("level", 1) in self.levels

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems. Without a limit: DEFAULT_LIMIT generated ones, or all of the file."""
        check_split(split)
        if self.source is None:
            return self.generate(split, DEFAULT_LIMIT if limit is None else limit, seed)
        command = f"codechat data {self.name}"
        path, problems = Path(self.source) / f"{self.name}.{split}.jsonl", []
        if not path.is_file():
            raise MissingFile(f"{path} does not exist; write it with `{command} --out {self.source}`")
        for number, row in read_jsonl(path):
            try:
                problems.append(problem_of(row, self.gold_fields, self.meta_fields))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error} with `{command}`") from None
        return shuffled(filter(self.keeps, problems), limit, seed)


def prepare_generated(
    cfg: GeneratedConfig,
    task: Any,  # a GeneratedTask
    domain: str,
    dialogues: Callable[[str, int], Iterable[Row]],
    splits: Collection[str] = SPLITS,
    check: bool = True,
) -> Row:
    """Write DOMAIN.SPLIT.jsonl from dialogues(split, n) and NAME.SPLIT.jsonl from the task. Returns the manifest.

    check: DataError where one of the first reference solutions of a split does not score the maximum."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        ledgers.append(ledger := Ledger(task.name))
        counts = {"train": cfg.max_examples} | dict.fromkeys(HELD_OUT, cfg.eval_examples)
        files = {f"{domain}.{split}": list(ledger.counted(dialogues(split, n))) for split, n in counts.items()}
        for split in splits:
            problems = task.generate(split, cfg.problems if split == "train" else cfg.eval_examples, cfg.seed)
            if check:
                check_reference_solutions(task, problems[:CHECKED]).require()
            files[f"{task.name}.{split}"] = [row_of(problem) for problem in problems]
        return files

    return prepare(cfg, collect)
