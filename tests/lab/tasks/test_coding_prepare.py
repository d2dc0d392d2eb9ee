"""Code conversations: filters of public sets, rejection of benchmark rows."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonl
import pytest
from jsonl import rows_of, write

from codechat import tasks
from codechat.core.config import parse
from codechat.core.errors import ConfigError, DataError
from codechat.data import command, conversations
from codechat.tasks.base import SPLITS
from codechat_lab.instruments import contamination
from codechat_lab.tasks.coding import prepare as coding
from codechat_lab.tasks.natural import read_requests

ADD = "def add(a, b):\n    return a + b"


def prepare(tmp_path: Path, *rows: dict[str, Any], words: tuple[str, ...] = ()) -> Any:
    """(conversations of every split, counts of the source) of a file with these rows."""
    tmp_path.mkdir(exist_ok=True)
    source = write(tmp_path / "rows.jsonl", list(rows))
    out = tmp_path / "out"
    jsonl.prepare("code", out, "--source", source, *words)
    written = [r for path in sorted(out.glob("programs.*.jsonl")) for r in rows_of(path)]
    return written, json.loads((out / "manifest.json").read_text())["sources"]["rows.jsonl"]


def alpaca(request: Any, answer: Any, given: Any = "") -> dict[str, Any]:
    return {"instruction": request, "input": given, "output": answer}


def mbpp(number: Any, **more: Any) -> dict[str, Any]:
    row = {"task_id": number, "text": "Write a function to add.", "code": ADD.replace("\n", "\r\n")}
    return row | {"test_list": ["assert add(1, 2) == 3"]} | more


def texts_of(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_alpaca_rows_are_filtered_by_what_their_answer_is(tmp_path: Path) -> None:
    written, counts = prepare(
        tmp_path,
        alpaca("Add two numbers.", f"```python\n{ADD}\n```"),
        alpaca("Add two numbers.", ADD),
        alpaca("Use the input.", ADD + "\nprint(add(1, 2))", "1, 2"),
        alpaca("Say it in C.", "int main() { return 0; }", "n/a"),
        alpaca("Name a fruit.", "An apple is a fruit."),
        alpaca("Too short.", "x = 1"),
        alpaca("Too long.", "x = [" + "1, " * 2000 + "]"),
    )
    assert sorted(map(texts_of, written)) == [
        ["Add two numbers.", ADD],
        ["Use the input.\n\n1, 2", ADD + "\nprint(add(1, 2))"],
    ]
    skipped = {"duplicate": 1, "no_python": 2, "few_tokens": 1, "too_long": 1}
    assert counts == {"kept": 2, "dropped": {}, "skipped": skipped}


def test_only_accepted_submissions_are_kept(tmp_path: Path) -> None:
    row = {
        "problem-description": "Add.",
        "input-specification": "Two numbers.",
        "output-specification": "Their sum.",
    }
    row["code"] = "print(sum(map(int, input().split())))"
    wrong = row | {"verdict": "WRONG_ANSWER", "code": "print(0, 'it is')"}
    written, counts = prepare(
        tmp_path, row | {"verdict": "OK"}, wrong, row | {"code": "print 'old'\n"}
    )
    assert [r["messages"][0]["content"] for r in written] == [
        "Add.\n\nInput:\nTwo numbers.\n\nOutput:\nTheir sum."
    ]
    assert counts["skipped"] == {"not_accepted": 1, "no_python": 1}


def test_the_docstring_of_a_file_is_its_request(tmp_path: Path) -> None:
    doc = '"""Adds numbers, two at a time."""\n'
    texts = (
        f"{doc}{ADD}\n",
        f'"""Adds numbers."""\n{ADD}\n',
        ADD,
        doc[:-4],
        f"{doc}{ADD}\n" + "x = 1\n" * 1000,
    )
    written, counts = prepare(tmp_path, *({"content": text} for text in texts))
    (row,) = written
    request = "Write a Python module for this description:\n\nAdds numbers, two at a time."
    assert row["messages"][0]["content"] == request
    assert row["domain"] == "programs"
    assert row["messages"][1]["content"].endswith(ADD)
    assert counts["skipped"] == {"short_docstring": 2, "no_python": 1, "too_long": 1}


@pytest.mark.parametrize(("prompt", "rl"), [(2, 700), ("2", "700")])
def test_only_mbpps_prompt_split_is_for_sft(
    prompt: int | str, rl: int | str, tmp_path: Path
) -> None:
    """The number of a row may be text."""
    written, counts = prepare(tmp_path, mbpp(prompt), mbpp(rl))
    assert len(written) == 1
    assert counts["skipped"] == {"for_rl": 1}


def test_sft_and_the_task_ask_in_the_same_words(tmp_path: Path) -> None:
    written, _ = prepare(tmp_path, mbpp(2), mbpp(700))
    task = tasks.load("mbpp", source=str(write(tmp_path / "mbpp.jsonl", [mbpp(2)])))
    assert written[0]["messages"][0] == task.worked[0].messages[0]


@pytest.mark.parametrize("number", [11, 510, 511, 600])
def test_rows_of_mbpps_other_splits_are_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1.*MBPP"):
        prepare(tmp_path, mbpp(number))


def test_rows_of_humaneval_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="HumanEval"):
        prepare(tmp_path, {"task_id": "HumanEval/0", "content": ADD})


@pytest.mark.parametrize("number", ["975", "two"])
def test_a_number_that_mbpp_has_not_is_named(number: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=number):
        prepare(tmp_path, mbpp(number))


def test_cells_that_hold_no_text_are_counted_by_reason(tmp_path: Path) -> None:
    codeforces = {"problem-description": "Add.", "input-specification": 5, "code": ADD}
    no_request = [
        alpaca(5, ADD),
        alpaca("Add.", ADD, ["x"]),
        codeforces,
        mbpp(2, text=5),
        mbpp(2, test_list=None),
        mbpp(2, test_list=[5]),
    ]
    no_answer = [
        alpaca("Add.", ["x"]),
        {"content": 5},
        {"problem-description": "Add.", "code": 5},
        mbpp(2, code=None),
    ]
    rows = [alpaca("Add two numbers.", ADD, None), *no_request, *no_answer]
    written, counts = prepare(tmp_path, *rows, words=("--max-lost", "1"))
    assert len(written) == 1
    assert counts["dropped"] == {"no_request": 6, "no_answer": 4}
    assert not counts["skipped"]
    for refused in ([alpaca("a", ADD), alpaca("a", "")], [{"question": "a", "answer": "b"}]):
        with pytest.raises(DataError):
            prepare(tmp_path, *refused)


def test_neutral_prompts_and_tools_take_their_shares_and_lose_no_row(tmp_path: Path) -> None:
    rows = [alpaca(f"Add {i} to a number.", f"def add(a):\n    return a + {i}") for i in range(400)]
    written, _ = prepare(tmp_path / "plain", *rows)
    assert all(
        r["messages"][0]["role"] == "user" and not r["meta"]["tools_present"] for r in written
    )
    written, _ = prepare(
        tmp_path / "shares", *rows, words=("--neutral-share", "0.2", "--negatives-share", "0.1")
    )
    assert {r["messages"][-1]["content"] for r in written} == {r["output"] for r in rows}
    system = [
        (r["messages"][0]["content"], r["meta"]["tools_present"])
        for r in written
        if len(r["messages"]) == 3
    ]
    assert all(("Functions:" in text) == tools for text, tools in system)
    with_tools = sum(tools for _, tools in system)
    assert 20 <= with_tools <= 60
    assert 55 <= len(system) - with_tools <= 105
    for words in (["--neutral-share", "0.7", "--negatives-share", "0.6"], ["--max-lost", "2"]):
        with pytest.raises(ConfigError, match=words[0][2:].replace("-", ".")):
            command.main(["code", *words])


def test_every_program_does_what_it_should(tmp_path: Path) -> None:
    programs = tomllib.loads(Path(coding.__file__).with_name("short_programs.toml").read_text())[
        "program"
    ]
    scope = {"path": str(tmp_path / "file.txt")}
    for program in programs:
        exec(program["code"], scope)
    assert len(programs) >= 70
    assert [p["holds"] for p in programs if not eval(p["holds"], scope)] == []


def test_requests_are_new_to_the_natural_ones() -> None:
    texts = [(text, True) for row in coding.short_rows() for text in texts_of(row)]
    known = contamination.search(read_requests(), texts)
    assert set(known) == {"code-01"}  # "write quicksort" itself


def test_requests_are_new_to_other_splits() -> None:
    rows = list(coding.short_rows())
    by_split: dict[str, set[str]] = {split: set() for split in SPLITS[:3]}
    for row in rows:
        by_split[row["meta"]["split"]].add(texts_of(row)[0])
    sizes = list(map(len, by_split.values()))
    assert sum(sizes) == len(rows)
    assert min(sizes) > 50
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_data_stage_writes_them_where_requested(tmp_path: Path) -> None:
    words = ["--tokenizer", "bytes", "--max-examples", "20"]
    plain = coding.prepare_sft(parse(coding.SftConfig, [*words, "--out", str(tmp_path / "plain")]))
    manifest = coding.prepare_sft(
        parse(coding.SftConfig, [*words, "--short", "--out", str(tmp_path / "short")])
    )
    assert "short" in manifest["domains"]
    assert "short" not in plain["domains"]
    rows = list(conversations.read(tmp_path / "short" / "short.train.jsonl"))
    assert all(row["messages"][-1]["content"].startswith(("def ", "class ")) for row in rows)
    # code is code, whatever is on offer
    assert {row["meta"]["tools_present"] for row in rows} == {
        True,
        False,
    }
