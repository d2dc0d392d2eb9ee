"""GSM8K and MMLU as problems: hub, a local file or directory, or a directory written by `codechat data reasoning`.

    gsm8k    {question, answer}, the answer a worked solution that ends in "#### N"
    mmlu     {question, subject, choices, answer}, the answer the number of a choice
    own      {id, messages, gold, split}: files TASK.SPLIT.jsonl

A file's name gives its split: test is test; MMLU's validation is `select`. GSM8K has no validation set: one row in
sixteen of its training file, chosen by a hash of the question, is `select`. MMLU has no training split.
An unreadable gold answer is an error that names the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.public_rows import asked_in_test, reject_benchmark
from codechat.data.sources import (
    digest,
    fraction,
    hub_rows,
    local_rows,
    names_hub_set,
    require_columns,
    row_format,
    rows_of,
)
from codechat.tasks.base import Problem, problem_of
from codechat.tasks.reasoning.answers import gsm8k_gold

Row = dict[str, Any]
HUB = {
    "gsm8k": ("openai/gsm8k", {"train": "main/train-*.parquet", "test": "main/test-*.parquet"}),
    "mmlu": ("cais/mmlu", {"validation": "all/validation-*.parquet", "test": "all/test-*.parquet"}),
}
COLUMNS = {"gsm8k": ("question", "answer"), "mmlu": ("question", "choices", "answer")}
GOLD = ("answer", "steps")
FILES = {
    "gsm8k": {"train": "train", "select": "train", "test": "test"},
    "mmlu": {"select": "validation", "test": "test"},
}  # split -> file
FILE_NAMES = ("validation", "test", "train", "dev", "auxiliary")
SELECT_SHARE = 1 / 16
_NOTE = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator notes


def read(name: str, source: str, split: str, columns: Sequence[str] = ()) -> list[Problem]:
    """The problems of a split in `source` ("hub", a path, or for GSM8K a hub set with training rows by its name), in its order. columns:
    OURS=THEIRS where a set names them otherwise.

    Only the file of that split is read. MissingFile and DataError for unreadable input, UserError for an unreachable hub."""
    if source == "embedded":
        raise ConfigError(f"{name} is not embedded; set source=hub, or --data-dir with its parquet or jsonl files")
    file, path = FILES[name][split], Path(source)
    if source == "hub":
        hub, files = HUB[name]
        return list(_problems(name, hub_rows(hub, files=files[file]), file, split))
    if name == "gsm8k" and names_hub_set(source):
        return list(_problems(name, rows_of(source, columns), file, split)) if file == "train" else []
    if not path.exists():
        raise MissingFile(f"{source} does not exist; {name} needs a parquet or jsonl file, a directory of them, or hub")
    if path.is_dir() and any(path.glob(f"{name}.*.jsonl")):
        written = path / f"{name}.{split}.jsonl"
        return [problem_of(row, GOLD) for row in local_rows(written)] if written.exists() else []
    paths = sorted(f for f in path.iterdir() if row_format(f)) if path.is_dir() else [path]
    chosen = [str(path) for path in paths if _file_of(name, path) == file]
    return [problem for path in chosen for problem in _problems(name, rows_of(path, columns), file, split)]


def _file_of(name: str, path: Path) -> str:
    """Which file of the set this is, from its name. Any other name means GSM8K's train and MMLU's test file."""
    other = "train" if name == "gsm8k" else "test"
    return next((known for known in FILE_NAMES if known in path.stem.lower()), other)


def _problems(name: str, rows: Iterable[Row], file: str, split: str) -> Iterator[Problem]:
    for number, row in enumerate(require_columns(rows, [COLUMNS[name]], f"{name}, {file}")):
        try:
            problem = _MAKE[name](row, f"{name}-{file}-{number}", split)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            where = f"{name}, {file}, row {number + 1}"
            raise DataError(f"{where}: {error}; correct the row, or fetch the file again") from None
        if name == "gsm8k" and file == "train":
            reject_benchmark(asked_in_test(row["question"]), f"{name}, {file}, row {number + 1},")
        selected = fraction(digest(problem.messages[0]["content"])) < SELECT_SHARE
        if name != "gsm8k" or file == "test" or selected == (split == "select"):
            yield problem


def make_problem(id: str, question: str, answer: str, steps: str, split: str, **meta: Any) -> Problem:
    return Problem(id, [{"role": "user", "content": question}], {"answer": answer, "steps": steps}, split, meta)


def _gsm8k(row: Row, id: str, split: str) -> Problem:
    gold = gsm8k_gold(row["answer"])
    if gold is None:
        raise ValueError(f'its answer ends in {row["answer"][-40:]!r}; required "#### N"')
    steps = _NOTE.sub("", row["answer"].rpartition("####")[0]).strip()
    return make_problem(id, row["question"].strip(), gold, steps, split)


def _mmlu(row: Row, id: str, split: str) -> Problem:
    choices = [str(c) for c in row["choices"]]
    if len(choices) != 4 or not 0 <= int(row["answer"]) < 4:
        raise ValueError(f"{len(choices)} choices and answer {row['answer']!r}; required four, and 0 to 3")
    question = "\n".join([row["question"].strip(), "", *(f"{letter}. {text}" for letter, text in zip("ABCD", choices))])
    return make_problem(id, question, "ABCD"[int(row["answer"])], "", split, subject=row.get("subject", ""))


_MAKE: dict[str, Callable[[Row, str, str], Problem]] = {"gsm8k": _gsm8k, "mmlu": _mmlu}
