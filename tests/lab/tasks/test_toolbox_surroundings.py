"""Instructions beside a list of tools and sentences around a request change neither the list nor
what is right."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from codechat.text import tool_calls, tool_lists
from codechat_lab.tasks.toolbox import forms, prepare, surroundings
from codechat_lab.tasks.toolbox.catalogue import PHRASES
from codechat_lab.tasks.toolbox.dialogues import draw
from codechat_lab.tasks.toolbox.mixes import Mix

TEXTS = surroundings.TEXTS
SHARES: dict[str, float] = {
    "multi_turn": 0.0,
    "renamed": 0.5,
    "series": 0.2,
    "chained": 0.1,
    "parallel": 0.2,
    "unfitting": 0.2,
}
DECLINING = [text for text in TEXTS["declining"] if "function" in text]


def rows_of(n: int, **shares: float) -> list[dict[str, Any]]:
    mix = Mix(**(SHARES | shares))
    return list(draw("train", n, mix=mix))


def with_tools(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["meta"]["tools_present"]]


def system_of(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


@pytest.mark.parametrize("style", tool_lists.STYLES)
def test_instructions_stand_before_or_behind_a_list_that_reads_back_whole(style: str) -> None:
    known = [text for kind in surroundings.INSTRUCTIONS for text in TEXTS[kind]]
    places = Counter[bool]()
    for row in with_tools(rows_of(400, instructed=1.0)):
        text = system_of(prepare._listed(row, style))
        rest, schemas = tool_lists.split_offer(text)
        names = [tool["name"] for tool in schemas]
        assert sorted(names) == sorted(row["meta"]["tools"])
        assert any(sentence in rest for sentence in known)
        places[text.startswith(rest.strip())] += 1
    assert min(places[True], places[False]) > 100


def test_a_text_that_speaks_of_declining_says_nothing_about_the_answer() -> None:
    declined = Counter[bool]()
    answered = Counter[bool]()
    for row in rows_of(3000, instructed=1.0, series=0.0):
        kind = row["meta"]["kind"]
        if kind not in ("call", "unsuitable"):
            continue
        system = system_of(row)
        speaks = any(text in system for text in DECLINING)
        answered[speaks] += 1
        declined[speaks] += kind == "unsuitable"
    with_it = declined[True] / answered[True]
    without = declined[False] / answered[False]
    assert abs(with_it - without) < 0.08


def test_instructions_come_in_their_share_and_only_beside_tools() -> None:
    rows = rows_of(1500, instructed=0.4, no_tools=0.2)
    offered = with_tools(rows)
    instructed = 0
    for row in offered:
        rest, _ = tool_lists.split_offer(system_of(row))
        instructed += rest.strip() != ""
    assert 0.35 < instructed / len(offered) < 0.45
    without = {system_of(row) for row in rows if row not in offered}
    assert without and without <= set(PHRASES["neutral_system"])


def test_a_wordy_request_holds_the_request_and_no_sentence_of_a_held_out_split() -> None:
    rng = random.Random(0)
    request = "Order 3 pencils."
    held_out = TEXTS["before"][-1]
    for _ in range(300):
        text = surroundings.wordy(rng, "train", request)
        assert request in text
        assert len(text) > len(request) + 10
        assert held_out not in text
    others = [surroundings.wordy(rng, "test", request) for _ in range(50)]
    assert any(text.startswith(held_out) for text in others)


def test_length_tells_nothing_of_what_is_declined() -> None:
    lengths: dict[str, list[int]] = {"call": [], "unsuitable": []}
    for row in rows_of(3000, wordy=0.5):
        kind = row["meta"]["kind"]
        if kind in lengths:
            request = row["messages"][1]["content"]
            lengths[kind].append(len(request))
    long = {}
    for kind, some in lengths.items():
        long[kind] = sum(n > 120 for n in some) / len(some)
    assert long["call"] > 0.2
    assert abs(long["call"] - long["unsuitable"]) < 0.08


def test_twins_have_the_same_wordy_request() -> None:
    rows = rows_of(600, wordy=0.5, forms=0.2, unfitting=0.3, series=0.0)
    pairs = 0
    for row, twin in zip(rows, rows[1:]):
        if row["meta"]["kind"] in ("unsuitable", "near_miss"):
            pairs += 1
            assert row["messages"][1] == twin["messages"][1]
    assert pairs > 50


def test_steps_hold_each_request_in_order() -> None:
    rng = random.Random(0)
    texts = ["Order tea.", "I need a cab.", "What is 3 times 4?"]
    for _ in range(100):
        text = surroundings.in_steps(rng, texts)
        places = [text.lower().find(one.lower()) for one in texts]
        assert -1 not in places
        assert places == sorted(places)
        assert "i need a cab" not in text


def test_marks_of_steps_join_no_number_of_a_request() -> None:
    rng = random.Random(0)
    texts = ["Compute the sum: 3 and 4", "6 kelvin to Celsius?"]
    for _ in range(200):
        text = surroundings.in_steps(rng, texts)
        assert "- 6" not in text
        assert text.splitlines()[0].endswith("3 and 4")


def test_a_step_begins_small_but_for_names_in_capitals() -> None:
    assert surroundings.lowered("Order tea.") == "order tea."
    assert surroundings.lowered("A circle has radius 8.") == "a circle has radius 8."
    for text in ("URL encode this.", "I need a cab.", "RGB of #879?"):
        assert surroundings.lowered(text) == text


def test_no_request_is_lost_where_there_are_more_than_steps() -> None:
    texts = ["Order tea."] * (surroundings.MOST_STEPS + 1)
    with pytest.raises(ValueError):
        surroundings.in_steps(random.Random(0), texts)


def test_steps_tell_nothing_of_what_is_declined() -> None:
    answers = Counter[bool]()
    for row in rows_of(3000, in_steps=0.5, series=0.0):
        *_, request, answer = row["messages"]
        if is_in_steps(request["content"]):
            calls = tool_calls.parse_calls(answer["content"])
            answers[bool(calls)] += 1
    assert answers[True] > 50
    assert answers[False] > 50


def test_what_is_declined_in_steps_is_served_where_its_tools_are_on_the_list() -> None:
    rows = rows_of(600, in_steps=1.0, unfitting=0.5, parallel=0.0, series=0.0)
    pairs = 0
    for row, twin in pairwise(rows):
        request = row["messages"][1]
        if row["meta"]["kind"] != "unsuitable" or not is_in_steps(request["content"]):
            continue
        pairs += 1
        assert twin["messages"][1] == request
        calls = tool_calls.parse_calls(twin["messages"][2]["content"])
        assert len(calls) > 1
        called = {call.name for call in calls}
        assert not called & set(row["meta"]["tools"])
    assert pairs > 50


def is_in_steps(text: str) -> bool:
    # a dash may stand in any text
    pairs = [marks[:2] for marks in TEXTS["steps"] if marks[0] != "- "]
    return any(all(mark in text for mark in pair) for pair in pairs)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_requests_for_several_services_are_steps_in_their_share(share: float) -> None:
    stepped = 0
    for number in range(80):
        draws = forms.Draws(random.Random(number), "train", share)
        scene = draws.scene("at_once_mixed")
        assert len(scene.calls) > 1
        stepped += is_in_steps(scene.text)
    assert stepped > 50 if share else stepped == 0


def test_calls_below_instructions_and_in_wordy_requests_name_tools_on_offer() -> None:
    for row in rows_of(600, wordy=1.0, in_steps=1.0, instructed=1.0):
        names = set(row["meta"]["tools"])
        for message in row["messages"]:
            if message["role"] == "assistant":
                called = {call.name for call in tool_calls.parse_calls(message["content"])}
                assert called <= names
