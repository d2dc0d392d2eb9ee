"""GSM8K and MMLU as problems: hub, a local file or directory, or a directory written by `codechat data reasoning`.

    gsm8k    {question, answer}, the answer a worked solution that ends in "#### N"
    mmlu     {question, subject, choices, answer}, the answer the number of a choice
    own      {id, messages, gold, split}: files TASK.SPLIT.jsonl

A file's name gives its split: test is test; MMLU's validation is `select`. GSM8K has no validation set: one row in
sixteen of its training file, chosen by a hash of the question, is `select`. MMLU has no training split.

An unreadable gold answer is an error that names the row: a reward that skips it would pay for anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.errors import ConfigError, DataError, MissingFile
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
OWN = ("id", "messages", "gold", "split")
FILES = {
    "gsm8k": {"train": "train", "select": "train", "test": "test"},
    "mmlu": {"select": "validation", "test": "test"},
}  # split -> file
SELECT_SHARE = 1 / 16
_NOTE = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator notes


class Question(NamedTuple):
    """A question of a public set with its gold answer. steps: the worked solution, if the set has one."""

    id: str
    question: str
    gold: str
    steps: str
    split: str
    meta: Row


def read(name: str, source: str, split: str, columns: Sequence[str] = ()) -> list[Question | Problem]:
    """The questions of a split in `source` ("hub", a path, or for GSM8K a hub set with training rows by its name), in its order. columns:
    OURS=THEIRS where a set names them otherwise. Problems where the directory was written by
    `codechat data`.

    Only the file of that split is read. MissingFile and DataError for unreadable input, UserError for an unreachable
    hub."""
    if source == "embedded":
        raise ConfigError(
            f"{name} is not embedded; set source=hub or --data-dir with its parquet or jsonl files, or set --task reasoning"
        )
    file = FILES.get(name, {}).get(split)
    if source == "hub":
        hub, files = HUB[name]
        return _questions(name, hub_rows(hub, files=files[file]), file, split) if file else []
    path = Path(source)
    if name == "gsm8k" and names_hub_set(source):
        return _questions(name, rows_of(source, columns), file, split) if file == "train" else []
    if not path.exists():
        hub_too = ", or from the hub (source=hub)" if name in HUB else ""
        raise MissingFile(
            f"{source} does not exist; {name} is read from a parquet or jsonl file or a directory of them{hub_too}"
        )
    if path.is_dir() and (own := path / f"{name}.{split}.jsonl").is_file():
        return [_own(row) for row in require_columns(local_rows(own), [OWN], own.name)]
    if path.is_dir() and any(path.glob(f"{name}.*.jsonl")):
        return []
    if file is None:
        raise MissingFile(f"{path} holds no {name}.{split}.jsonl; write it with `codechat data reasoning`")
    found: list[Question | Problem] = []
    for one in sorted(f for f in path.iterdir() if row_format(f)) if path.is_dir() else [path]:
        if _file_of(name, one) == file:
            found += _questions(name, rows_of(str(one), columns), file, split)
    return found


def _file_of(name: str, path: Path) -> str | None:
    """Which file of the set this is, from its name. Any other name means GSM8K's train and MMLU's test file."""
    for known in ("validation", "test", "train", "dev", "auxiliary"):
        if known in path.stem.lower():
            return known
    return "train" if name == "gsm8k" else "test"


def _questions(name: str, rows: Iterable[Row], file: str, split: str) -> list[Question | Problem]:
    made: list[Question | Problem] = []
    for number, row in enumerate(require_columns(rows, [COLUMNS[name]], f"{name}, {file}")):
        try:
            question = _MAKE[name](row, f"{name}-{file}-{number}", split)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise DataError(
                f"{name}, {file}, row {number + 1}: {error}; correct the row, or fetch the file again"
            ) from None
        if (
            name != "gsm8k"
            or file == "test"
            or (fraction(digest(question.question)) < SELECT_SHARE) == (split == "select")
        ):
            made.append(question)
    return made


def _gsm8k(row: Row, name: str, split: str) -> Question:
    gold = gsm8k_gold(row["answer"])
    if gold is None:
        raise ValueError(f'its answer ends in {row["answer"][-40:]!r}; required "#### N"')
    steps = _NOTE.sub("", row["answer"].rpartition("####")[0]).strip()
    return Question(name, row["question"].strip(), gold, steps, split, {})


def _mmlu(row: Row, name: str, split: str) -> Question:
    choices = [str(c) for c in row["choices"]]
    if len(choices) != 4 or not 0 <= int(row["answer"]) < 4:
        raise ValueError(f"{len(choices)} choices and answer {row['answer']!r}; required four, and 0 to 3")
    question = "\n".join([row["question"].strip(), "", *(f"{letter}. {text}" for letter, text in zip("ABCD", choices))])
    return Question(name, question, "ABCD"[int(row["answer"])], "", split, {"subject": row.get("subject", "")})


_MAKE: dict[str, Callable[[Row, str, str], Question]] = {"gsm8k": _gsm8k, "mmlu": _mmlu}


def _own(row: Row) -> Problem:
    """A row written by `codechat data reasoning`. DataError where a field is missing or the answer is empty."""
    problem = problem_of(row, gold=("answer", "steps"))
    if not str(problem.gold["answer"]).strip():
        raise DataError(f"problem {problem.id!r} has an empty gold answer; make the file again")
    return problem
