"""Rows of MBPP, HumanEval and their extended test suites as problems.

    mbpp            {task_id, text or prompt, code, test_list, ...}, full or sanitized; with {test} it is MBPP+
    humaneval       {task_id, prompt, entry_point, canonical_solution, test}; the same columns for HumanEval+
    problems        {id, messages, gold, split}: files TASK.SPLIT.jsonl of `codechat filter` and `codechat data`

A row of MBPP gets its split from its task_id, whatever file it is in. HumanEval is all test. The extended suites compare
floats with numpy; a judge has the standard library only, so `NUMPY` replaces the few names that their scripts use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import DataError
from codechat.data.public_rows import whole_number
from codechat.sandbox.pool import entry_points_of
from codechat.tasks.base import Problem

Row = dict[str, Any]
HUB = {
    "mbpp": ("google-research-datasets/mbpp", "full/*.parquet"),
    "mbpp-sanitized": ("google-research-datasets/mbpp", "sanitized/*.parquet"),
    "mbpp-plus": ("evalplus/mbppplus", "data/*.parquet"),
    "humaneval": ("openai/openai_humaneval", "openai_humaneval/*.parquet"),
    "humaneval-plus": ("evalplus/humanevalplus", "data/*.parquet"),
}
MBPP_COLUMNS = (("task_id", "code", "test_list", "text"), ("task_id", "code", "test_list", "prompt"))
HUMANEVAL_COLUMNS = (("task_id", "prompt", "entry_point", "canonical_solution", "test"),)
GOLD = ("code", "tests", "names")
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "select": range(511, 601), "train": range(601, 975)}
# What a problem's own reference solution needs beyond the task's limits: seconds, MiB of memory, MiB of its largest value. mbpp-123 sums the divisors
# of every number below 10,000: 5 s on an idle core. The extended suites hand over values of 9 MB and more.
LIMITS = {"mbpp-123": {"timeout_s": 60.0}}
PLUS_LIMITS = {
    "HumanEval/100": {"message_mb": 64},
    "HumanEval/130": {"message_mb": 64},
    "mbpp-255": {"memory_mb": 2048, "message_mb": 64},
    "mbpp-599": {"timeout_s": 240.0},
}
# What the scripts of the extended suites use of numpy.
NUMPY = Path(__file__).with_name("numpy_names.txt").read_text(encoding="utf-8")


def mbpp_split(task_id: Any) -> str:
    """The split of a task_id. DataError for a number that MBPP does not have."""
    number = whole_number(task_id)
    for split, numbers in MBPP_SPLITS.items():
        if number in numbers:
            return split
    raise DataError(f"task_id {task_id!r} is not one of MBPP's; required: a number from 1 to 974; correct the row")


def mbpp_problem(row: Row, plus: bool) -> Problem:
    number, code = int(row["task_id"]), _text(row["code"])
    imports = row.get("test_imports")  # an array in parquet, so it has no truth value
    setup = [row.get("test_setup_code") or "", *(imports if imports is not None else ())]
    setup_text = "\n".join(map(_text, setup)).strip()
    tests = [_text(test) for test in (*row["test_list"], *(row.get("challenge_test_list") or ()))]
    names = entry_points_of(code, tests, setup_text)
    if row.get("test"):
        tests = [_text(row["test"]).replace("import numpy as np", NUMPY)]
    name = f"mbpp-{number}"
    gold = {"code": code, "tests": tests, "setup": setup_text, "names": list(names), "stub": ""} | LIMITS.get(name, {})
    gold |= PLUS_LIMITS.get(name, {}) if plus else {}
    messages = [{"role": "user", "content": mbpp_request(row)}]
    return Problem(name, messages, gold, mbpp_split(number), {"benchmark": "MBPP"})


def mbpp_request(row: Mapping[str, Any]) -> str:
    """MBPP's request with the tests that it shows."""
    shown = "\n".join(_text(t) for t in row["test_list"])
    return f"{_text(row.get('text') or row['prompt']).strip()}\n\nYour code should pass these tests:\n\n{shown}"


def humaneval_problem(row: Row, plus: bool) -> Problem:
    prompt, name = _text(row["prompt"]), row["entry_point"]
    user = f"Complete this Python function. Answer with the whole function.\n\n```python\n{prompt.strip()}\n```"
    gold = {
        "code": prompt + _text(row["canonical_solution"]),
        "tests": _text(row["test"]).replace("import numpy as np", NUMPY),
        "setup": prompt,
        "names": [name],
        "stub": prompt,
    }
    gold |= PLUS_LIMITS.get(row["task_id"], {}) if plus else {}
    return Problem(str(row["task_id"]), [{"role": "user", "content": user}], gold, "test", {"benchmark": "HumanEval"})


def _text(value: str) -> str:
    """MBPP's files end lines with CR LF."""
    return value.replace("\r\n", "\n")
