"""Code conversations: filters of public sets, rejection of benchmark rows, and the small problems on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raising import raising

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, UserError
from codechat.data import command, conversations
from codechat.tasks.coding.prepare import HUB, SftConfig, prepare_sft
from codechat.tasks.toolbox.prepare import CallsConfig
from codechat.text import chat, tokenizer

BYTES = tokenizer.load("bytes")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepare(
    tmp_path: Path, *rows: dict[str, Any], words: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(conversations of every split, manifest) of a file with these rows."""
    tmp_path.mkdir(exist_ok=True)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = tmp_path / "out"
    command.main(["code", "--source", str(source), "--out", str(out), "--tokenizer", "bytes", *words])
    made = [r for path in sorted(out.glob("programs.*.jsonl")) for r in rows_of(path)]
    return made, json.loads((out / "manifest.json").read_text())["sources"]["rows.jsonl"]


ADD = "def add(a, b):\n    return a + b"


def test_alpaca_rows_are_filtered_by_what_their_answer_is(tmp_path: Path) -> None:
    made, counts = prepare(
        tmp_path,
        {"instruction": "Add two numbers.", "input": "", "output": f"```python\n{ADD}\n```"},
        {"instruction": "Add two numbers.", "input": "", "output": ADD},
        {"instruction": "Use the input.", "input": "1, 2", "output": ADD + "\nprint(add(1, 2))"},
        {"instruction": "Say it in C.", "input": "n/a", "output": "int main() { return 0; }"},
        {"instruction": "Name a fruit.", "input": "", "output": "An apple is a fruit."},
        {"instruction": "Too short.", "input": "", "output": "x = 1"},
        {"instruction": "Too long.", "input": "", "output": "x = [" + "1, " * 2000 + "]"},
    )
    assert [[m["content"] for m in r["messages"]] for r in sorted(made, key=lambda r: len(str(r)))] == [
        ["Add two numbers.", ADD], ["Use the input.\n\n1, 2", ADD + "\nprint(add(1, 2))"]]  # fmt: skip
    assert counts == {
        "kept": 2,
        "dropped": {},
        "skipped": {"duplicate": 1, "no_python": 2, "few_tokens": 1, "too_long": 1},
    }


def test_only_accepted_submissions_are_kept(tmp_path: Path) -> None:
    task = {
        "problem-description": "Add.",
        "input-specification": "Two numbers.",
        "output-specification": "Their sum.",
        "code": "print(sum(map(int, input().split())))",
    }
    made, counts = prepare(
        tmp_path,
        task | {"verdict": "OK"},
        task | {"verdict": "WRONG_ANSWER", "code": "print(0, 'it is')"},
        task | {"code": "print 'old'\n"},
    )
    assert [r["messages"][0]["content"] for r in made] == ["Add.\n\nInput:\nTwo numbers.\n\nOutput:\nTheir sum."]
    assert counts["skipped"] == {"not_accepted": 1, "no_python": 1}


def test_the_docstring_of_a_file_is_its_request(tmp_path: Path) -> None:
    made, counts = prepare(
        tmp_path,
        {"content": f'"""Adds numbers, two at a time."""\n{ADD}\n'},
        {"content": f'"""Adds numbers."""\n{ADD}\n'},
        {"content": ADD},
        {"content": '"""Adds numbers, two at a time.'},
        {"content": f'"""Adds numbers, two at a time."""\n{ADD}\n' + "x = 1\n" * 1000},
    )
    assert [r["messages"][0]["content"] for r in made] == [
        "Write a Python module for this description:\n\nAdds numbers, two at a time."
    ]
    assert made[0]["messages"][1]["content"].endswith(ADD) and made[0]["domain"] == "programs"
    assert counts["skipped"] == {"short_docstring": 2, "no_python": 1, "too_long": 1}


def mbpp(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": "Write a function to add.",
        "code": ADD.replace("\n", "\r\n"),
        "test_list": ["assert add(1, 2) == 3"],
    }


def test_only_mbpps_prompt_split_is_for_sft(tmp_path: Path) -> None:
    made, counts = prepare(tmp_path, mbpp(2), mbpp(700))
    assert len(made) == 1 and counts["skipped"] == {"for_rl": 1}
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(mbpp(2)) + "\n")
    task = tasks.load("mbpp", source=str(path))
    assert made[0]["messages"][0] == task.worked[0].messages[0], "SFT and the task ask in the same words"
    for number in (11, 510, 511, 600):
        with pytest.raises(DataError, match="row 1.*MBPP"):
            prepare(tmp_path, mbpp(number))


def test_the_number_of_an_mbpp_row_may_be_text(tmp_path: Path) -> None:
    made, counts = prepare(tmp_path, mbpp(2) | {"task_id": "2"}, mbpp(700) | {"task_id": "700"})
    assert len(made) == 1 and counts["skipped"] == {"for_rl": 1}
    for name in ("975", "two"):
        with raising(DataError, repr(name), "1 to 974"):
            prepare(tmp_path, mbpp(2) | {"task_id": name})


def test_humaneval_never_becomes_training_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="HumanEval"):
        prepare(tmp_path, {"task_id": "HumanEval/0", "content": ADD})


def test_cells_that_hold_no_text_are_counted_by_reason(tmp_path: Path) -> None:
    good = {"instruction": "Add two numbers.", "input": None, "output": ADD}
    rows = [
        good | {"instruction": 5},
        good | {"input": ["x"]},
        good | {"output": ["x"]},
        {"content": 5},
        {"problem-description": "Add.", "input-specification": 5, "code": ADD},
        {"problem-description": "Add.", "code": 5},
        mbpp(2) | {"text": 5},
        mbpp(2) | {"test_list": None},
        mbpp(2) | {"test_list": [5]},
        mbpp(2) | {"code": None},
    ]
    made, counts = prepare(tmp_path, good, *rows, words=("--max-lost", "1"))
    assert len(made) == 1 and counts["dropped"] == {"no_request": 6, "no_answer": 4} and not counts["skipped"]


def test_many_lost_rows_and_unknown_columns_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no_answer"):
        prepare(tmp_path, {"instruction": "a", "output": ADD}, {"instruction": "a", "output": ""})
    with pytest.raises(DataError, match="question"):
        prepare(tmp_path, {"question": "a", "answer": "b"})
    with pytest.raises(ConfigError, match="--max-lost"):
        command.main(["code", "--max-lost", "2"])


def test_system_prompts_of_code_rows_list_tools_in_the_style_of_the_settings(tmp_path: Path) -> None:
    for style in chat.STYLES:
        cfg = SftConfig(
            out=str(tmp_path / style), max_examples=30, neutral_share=0, negatives_share=1, tools_style=style
        )
        prepare_sft(cfg)
        offered = [row["messages"][0]["content"] for row in rows_of(tmp_path / style / "code.train.jsonl")]
        assert offered and all(map(chat.offered_names, offered))
        assert {'"parameters"' in text for text in offered} == {style == "json"}


@pytest.mark.parametrize("make", [SftConfig, CallsConfig])
def test_an_unknown_tools_style_is_rejected(make: type) -> None:
    with raising(ConfigError, "tools_style", "jsom", *chat.STYLES):
        make(tools_style="jsom")


def test_the_embedded_toolbox_is_not_listed_as_json_schemas() -> None:
    with raising(ConfigError, "json", "embedded", "--source"):
        CallsConfig(tools_style="json")
    assert CallsConfig(tools_style="json", source="hub").tools_style == "json"


@pytest.mark.slow
def test_embedded_programs_need_no_network(tmp_path: Path) -> None:
    command.main(["code", "--out", str(tmp_path), "--tokenizer", "bytes", "--max-examples", "30"])
    rows = rows_of(tmp_path / "programs.train.jsonl")
    assert rows and all(r["messages"][1]["content"].startswith("def ") for r in rows)


def test_the_hubs_data_sets_are_requested_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def rows(name: str, *, files: str | None = None, columns: Any = None) -> Any:
        asked.append((name, files))
        return iter([{"instruction": f"Add for {name}.", "output": f"{ADD}  # {name}"}])

    monkeypatch.setattr("codechat.data.sources.hub_rows", rows)
    command.main(["code", "--source", "hub", "--out", str(tmp_path), "--tokenizer", "bytes"])
    assert asked == list(HUB.values())


@pytest.mark.slow
def test_an_unreachable_hub_is_a_user_error_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="Codeforces"):
        command.main(["code", "--source", "codeforces", "--out", str(tmp_path)])
    assert not (tmp_path / "manifest.json").exists()


def test_small_problems_on_disk(tmp_path: Path) -> None:
    words = [
        "micro",
        "--out",
        str(tmp_path),
        "--tokenizer",
        "bytes",
        "--max-examples",
        "40",
        "--problems",
        "30",
        "--eval-examples",
        "12",
        "--levels",
        "1",
        "2",
    ]
    command.main(words)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    loaded = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)
    assert list(loaded) == ["solutions"] and len(loaded["solutions"]) == 40, "problems are not read as conversations"
    task = tasks.load("micro", source=str(tmp_path))
    assert {s: len(task.problems(s)) for s in task.splits} == {"train": 30, "select": 12, "test": 12, "test_hard": 12}
    assert {p.meta["level"] for p in task.problems("train")} == {1, 2}
    taught = {r["messages"][0]["content"] for r in rows_of(tmp_path / "solutions.train.jsonl")}
    assert not taught & {p.messages[0]["content"] for s in task.splits for p in task.problems(s)}
    command.main(words)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    with pytest.raises(ConfigError, match="levels .9"):
        command.main([*words[:-2], "9"])


def test_shares_of_neutral_prompts_and_negatives_are_off_by_default(tmp_path: Path) -> None:
    rows = [
        {"instruction": f"Add {i} to a number.", "input": "", "output": f"def add(a):\n    return a + {i}"}
        for i in range(400)
    ]
    made, _ = prepare(tmp_path / "plain", *rows)
    assert all(r["messages"][0]["role"] == "user" and not r["meta"]["tools_present"] for r in made)
    made, _ = prepare(tmp_path / "v7", *rows, words=("--neutral-share", "0.2", "--negatives-share", "0.1"))
    assert {r["messages"][-1]["content"] for r in made} == {r["output"] for r in rows}, (
        "no row is lost, and every answer stays a program"
    )
    with_tools = [r for r in made if r["meta"]["tools_present"]]
    neutral = [r for r in made if r["messages"][0]["role"] == "system" and not r["meta"]["tools_present"]]
    assert 20 <= len(with_tools) <= 60 and 55 <= len(neutral) <= 105
    assert all("Functions:" in r["messages"][0]["content"] for r in with_tools) and not any(
        "Functions:" in r["messages"][0]["content"] for r in neutral
    )
    with raising(ConfigError, "--neutral-share", 0.7, "--negatives-share", 0.6):
        prepare(tmp_path / "bad", words=("--neutral-share", "0.7", "--negatives-share", "0.6"))
