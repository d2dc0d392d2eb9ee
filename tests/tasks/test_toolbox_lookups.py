"""Lookup drills: the words of a request lead to one line, and the answer is that line's name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from codechat.core.config import parse
from codechat.core.errors import ConfigError
from codechat.tasks.toolbox import dialogues, lookups, prepare
from codechat.tasks.toolbox.values import allowed
from codechat.text import chat


def turns(row: dict) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """{name: its words} of the list, and the (request, answer) pairs."""
    system, *rest = [m["content"] for m in row["messages"]]
    *lines, last = system.splitlines()[1:]
    assert last == "Nothing fits: none()"
    entries = [line.partition(": ") for line in lines]
    said = {m["content"]: m["role"] for m in row["messages"]}
    asked = [(a, b) for a, b in zip(rest, rest[1:]) if said[a] == "user" and not chained(a)]
    return {name.partition("(")[0]: text.lower() for text, _, name in entries}, asked


def chained(request: str) -> bool:
    return " Then" in request or " After" in request


def name_of(answer: str) -> str:
    return chat.parse_calls(answer)[0].name


@pytest.mark.parametrize("step", lookups.STEPS)
def test_the_answer_is_the_name_of_the_line_that_holds_the_words(step: str) -> None:
    loose = 0
    for row in lookups.lookup_dialogues("train", 300, step=step):
        entries, asked = turns(row)
        assert 2 <= len(entries) <= lookups.STEPS[step].entries
        assert {name_of(answer) for _, answer in asked} <= entries.keys()
        assert lookups.STEPS[step].chained or len(asked) == len(entries)
        for request, answer in asked:
            words, own = request.lower().split(), entries[name_of(answer)].split()
            shared = {name: len(set(words) & set(text.split())) for name, text in entries.items()}
            assert shared[name_of(answer)] == max(shared.values()) > sorted(shared.values())[-2]
            loose += words[: len(own)] != own
            assert str(chat.parse_calls(answer)[0].arguments.popitem()[1]) == words[-1]
    assert (loose > 100) == (step in ("phrases", "loose"))


def test_requests_that_no_line_serves_are_declined() -> None:
    for step in lookups.STEPS:
        for row in lookups.lookup_dialogues("train", 100, step=step, missing=1.0):
            entries, asked = turns(row)
            listed = {word for text in entries.values() for word in text.split()}
            for request, answer in asked:
                assert answer == chat.DECLINE
                assert not listed & (set(request.lower().split()) - set(lookups.FILLERS))


def test_a_chained_request_calls_the_first_line_and_then_the_second_with_its_result() -> None:
    seen = 0
    for row in lookups.lookup_dialogues("train", 300, step="loose"):
        entries, _ = turns(row)
        contents = [m["content"] for m in row["messages"]]
        for at, (turn, text) in enumerate(zip(row["messages"], contents)):
            if turn["role"] != "user" or not chained(text):
                continue
            seen += 1
            cut = min(i for word in (". Then", ". After") if (i := text.find(word)) >= 0)
            (first,), (second,) = chat.parse_calls(contents[at + 1]), chat.parse_calls(contents[at + 3])
            for call, part in ((first, text[:cut]), (second, text[cut:])):
                words = set(part.lower().replace(".", " ").split())
                assert words & set(entries[call.name].split())
            assert first.name != second.name and text[:cut].split()[-1] == str(*first.arguments.values())
            assert json.loads(contents[at + 2]) == {"result": second.arguments.popitem()[1]}
    assert seen > 100


@pytest.mark.parametrize("split", ["train", "test"])
def test_numbers_of_a_drill_belong_to_its_split(split: str) -> None:
    rows = list(lookups.lookup_dialogues(split, 300, step="loose"))
    numbers = {int(n) for row in rows for m in row["messages"] for n in re.findall(r"\d+", m["content"])}
    assert sum(n > 99 for n in numbers) > 20 and all(allowed(n, split) for n in numbers)


def test_names_and_rows_belong_to_splits_and_seeds() -> None:
    rows = list(lookups.lookup_dialogues("select", 200, step="loose"))
    names = {name for row in rows for name in turns(row)[0]}
    known = {*lookups.COMMON, *(f"{a}_{b}" for a in lookups.COMMON for b in lookups.COMMON)}
    assert names - known and all(allowed(name, "select") for name in names - known)
    assert rows[:50] == list(lookups.lookup_dialogues("select", 50, step="loose"))
    assert rows != list(lookups.lookup_dialogues("select", 200, 1, step="loose"))
    with pytest.raises(ConfigError, match="loose"):
        next(lookups.lookup_dialogues("train", 1, step="hard"))


def test_data_calls_writes_them_and_lists_tools_after_their_descriptions(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--tokenizer", "bytes", "--max-examples", "40", "--copies", "0", "--problems", "8"]
    words += ["--eval-examples", "10", "--probes", "5", "--lookups", "20", "--lookups-missing", "0.2"]
    manifest = prepare.prepare_calls(parse(prepare.CallsConfig, [*words, "--tools-style", "described"]))
    assert {f"lookup_{step}" for step in lookups.STEPS} < manifest["domains"].keys()
    assert manifest["files"]["lookup_loose.train.jsonl"]["rows"] == 20
    declined = 0
    for name in ("calls.train", "funcall.test", "probes.select"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        offers = [r["messages"][0]["content"] for r in rows if "Functions:" in r["messages"][0]["content"]]
        assert offers and all(
            ": " in line and line.endswith(")") for offer in offers for line in offer.splitlines()[1:]
        )
        for row in rows:
            said = [m["content"] for m in row["messages"]]
            assert not set(said) & set(dialogues.NO_FUNCTION)
            declined += said.count(chat.DECLINE)
            if row.get("gold"):
                assert row["gold"]["name"] in chat.offered_names(row["messages"][0]["content"])
    assert declined > 0
