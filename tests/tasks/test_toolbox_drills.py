"""Drills: copying repeats values; in lookups the words of a request lead to one line, and the answer is that line's name."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from codechat.core.config import parse
from codechat.tasks.funcall import FuncallTask
from codechat.tasks.toolbox import drills, prepare, values
from codechat.tasks.toolbox.catalogue import HELD_OUT, PHRASES
from codechat.tasks.toolbox.values import NAMES, WORDS, allowed
from codechat.text import chat
from codechat.text.tokenizer import load


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


@pytest.mark.parametrize("step", drills.STEPS)
def test_the_answer_is_the_name_of_the_line_that_holds_the_words(step: str) -> None:
    loose = 0
    for row in drills.lookup_dialogues("train", 300, step=step):
        entries, asked = turns(row)
        assert 2 <= len(entries) <= drills.STEPS[step]["entries"]
        assert {name_of(answer) for _, answer in asked} <= entries.keys()
        assert drills.STEPS[step]["chained"] or len(asked) == len(entries)
        for request, answer in asked:
            words, own = request.lower().split(), entries[name_of(answer)].split()
            shared = {name: len(set(words) & set(text.split())) for name, text in entries.items()}
            assert shared[name_of(answer)] == max(shared.values()) > sorted(shared.values())[-2]
            loose += words[: len(own)] != own
            assert str(chat.parse_calls(answer)[0].arguments.popitem()[1]) == words[-1]
    assert (loose > 100) == (step in ("phrases", "loose"))


@pytest.mark.parametrize("step", drills.STEPS)
def test_requests_that_no_line_serves_are_declined(step: str) -> None:
    for row in drills.lookup_dialogues("train", 100, step=step, missing=1.0):
        entries, asked = turns(row)
        listed = {word for text in entries.values() for word in text.split()}
        for request, answer in asked:
            assert answer == chat.DECLINE
            assert not listed & (set(request.lower().split()) - set(PHRASES["fillers"]))


def test_a_chained_request_calls_the_first_line_and_then_the_second_with_its_result() -> None:
    seen = 0
    for row in drills.lookup_dialogues("train", 300, step="loose"):
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


def test_numbers_names_and_rows_belong_to_splits_and_seeds() -> None:
    for split in ("train", "test"):
        rows = list(drills.lookup_dialogues(split, 300, step="loose"))
        numbers = {int(n) for row in rows for m in row["messages"] for n in re.findall(r"\d+", m["content"])}
        assert sum(n > 99 for n in numbers) > 20 and all(allowed(n, split) for n in numbers)
    rows = list(drills.lookup_dialogues("select", 200, step="loose"))
    names = {name for row in rows for name in turns(row)[0]}
    known = {*values.COMMON, *(f"{a}_{b}" for a in values.COMMON for b in values.COMMON)}
    assert names - known and all(allowed(name, "select") for name in names - known)
    assert rows[:50] == list(drills.lookup_dialogues("select", 50, step="loose"))
    assert rows != list(drills.lookup_dialogues("select", 200, 1, step="loose"))


def test_rare_words_come_in_the_later_steps_only() -> None:
    rows = [drills.lookup_dialogues("train", 40, 0, step=step, rare_words=0.5) for step in ("calls", "phrases")]
    found = [{w for text in map(str, some) for w in WORDS if f" {w}" in text} for some in rows]
    assert not found[0] and len(found[1]) > 100


def test_spelling_drills_put_words_of_one_token_in_quotation_marks() -> None:
    vocabulary = load("gpt2:4096")
    words = values.whole_words()
    assert len(words) > 1500 and all(len(vocabulary.encode(f" {word}")) == 1 for word in words)
    texts = {share: [r["messages"] for r in drills.copy_dialogues("train", 600, varied=share)] for share in (0.0, 0.6)}
    spelled = {s: [r for r in rows if re.fullmatch(r'("\w+"(, )?){3,6}', r[1]["content"])] for s, rows in texts.items()}
    assert not spelled[0.0] and 0.2 < len(spelled[0.6]) / 600 < 0.4
    for asked, answer in spelled[0.6]:
        quoted = re.findall(r'"(\w+)"', answer["content"])
        assert " ".join(quoted) in asked["content"] and set(quoted) <= set(words)
    for share, rows in texts.items():
        assert all(answer["content"] in asked["content"] for asked, answer in rows if '", "' not in answer["content"])
        assert any(set(NAMES) & set(answer["content"].split()) for _, answer in rows) == bool(share)


def test_data_calls_writes_them_with_all_strata_and_lists_tools_after_their_descriptions(tmp_path: Path) -> None:
    words = (
        "--tokenizer bytes --max-examples 200 --copies 0 --problems 100 --eval-examples 50 --probes 5 --mix.renamed 0.5"
    )
    words += " --lookups 20 --lookups-missing 0.2 --tools-style described --out"
    manifest = prepare.prepare_calls(parse(prepare.CallsConfig, [*words.split(), str(tmp_path)]))
    assert {f"lookup_{step}" for step in drills.STEPS} < manifest["domains"].keys()
    assert manifest["files"]["lookup_loose.train.jsonl"]["rows"] == 20 and manifest["values"]["test"]["calls"] == 30
    declined = 0
    for name in ("calls.train", "funcall.test", "probes.select"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        offers = [r["messages"][0]["content"] for r in rows if "Functions:" in r["messages"][0]["content"]]
        lines = [line for offer in offers for line in offer.splitlines()[1:]]
        assert lines and all(": " in line and line.endswith(")") for line in lines)
        for row in rows:
            said = [m["content"] for m in row["messages"]]
            assert not set(said) & set(PHRASES["no_function"])
            declined += said.count(chat.DECLINE)
            if row.get("gold"):
                assert row["gold"]["name"] in chat.offered_names(row["messages"][0]["content"])
    assert declined > 0
    task, unseen = FuncallTask(source=tmp_path), {t.name for t in HELD_OUT}
    problems = {split: task.problems(split) for split in ("train", "test", "test_hard")}
    kinds = {split: Counter(p.meta["stratum"] for p in some) for split, some in problems.items()}
    assert kinds["test"] == dict(call=20, unfitting=10, no_tools=5, code=5, chain_1=5, chain_2=5)
    assert kinds["test_hard"] == dict(tool=20, phrasing=15, renamed=15) and kinds["train"].total() == 100
    assert {p.meta["tool"] for p in problems["test_hard"] if p.meta["stratum"] == "tool"} <= unseen
    assert not unseen & {p.meta.get("tool") for p in problems["train"]} and task.grouped_by == "stratum"
