"""A wrong answer to the leaderboard names the kind of its fault; no kind is without a case."""

import json
from typing import Any

import pytest

from codechat_lab.tasks.bfcl import task as bfcl
from codechat_lab.tasks.bfcl.kinds import KINDS

PROPERTIES = {
    "director": {"type": "string"},
    "genre": {"type": "string", "enum": ["Comedy", "Drama", "dontcare"]},
    "city": {"type": "string", "description": "City, state"},
    "seats": {"type": "integer"},
    "years": {"type": "array", "items": {"type": "integer"}},
    "language": {"type": "string"},
}
SEARCH = {
    "name": "films.find",
    "description": "Films on show",
    "parameters": {"type": "dict", "properties": PROPERTIES, "required": ["director"]},
}
RIGHT = {"director": "Ana Lund", "city": "Austin, TX", "seats": 3, "genre": "Comedy"}
ACCEPTED = {
    "director": ["Ana Lund"],
    "city": ["Austin, TX"],
    "seats": [3],
    "genre": ["Comedy"],
    "years": [[2019, 2020], ""],
    "language": ["", "English"],
}
REQUEST = "Three seats for a comedy by Ana Lund of 2019 or 2020 in Austin, Texas"


def problem_of(category: str) -> Any:
    silent = category == "irrelevance"
    return bfcl.problem_of(
        {
            "id": category,
            "category": category,
            "question": [[{"role": "user", "content": REQUEST}]],
            "functions": [SEARCH],
            "ground_truth": [] if silent else [{"films.find": ACCEPTED}],
        }
    )


def called(name: str = "films.find", **changed: Any) -> str:
    """The right call, with other arguments; None leaves one out."""
    arguments = RIGHT | changed
    arguments = {key: value for key, value in arguments.items() if value is not None}
    call = {"name": name, "arguments": arguments}
    return "<functioncall> " + json.dumps(call)


CASES = [
    ("no call where one is right", "Three seats are yours."),
    ("not readable as calls", called()[:-2]),
    ("more calls than asked for", called() + "\n" + called()),
    ("another function", called(name="films.book")),
    ("an argument left out", called(seats=None)),
    ("an argument that the function does not have", called(day="Friday")),
    ("a value of another type", called(seats="3")),
    ("another argument's value", called(director="Austin TX")),
    ("an optional argument filled with a guess", called(language="French")),
    ("another number", called(seats=2)),
    ("another list or object", called(years=[2019])),
    ("part of a text, or more than it", called(city="Austin")),
    ("part of a text, or more than it", called(director="the director Ana Lund")),
    ("another choice of a list", called(genre="Drama")),
    ("another text", called(director="Bo Lund")),
]


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_the_kind_of_a_wrong_answer(kind: str, text: str) -> None:
    score = bfcl.BfclTask("embedded").score(problem_of("simple"), text)
    assert score.parts["fault"] == kind
    assert not score.correct


def test_a_needless_call_and_too_few_calls() -> None:
    task = bfcl.BfclTask("embedded")
    needless = task.score(problem_of("irrelevance"), called())
    assert needless.parts["fault"] == "a call where none is right"
    two = problem_of("parallel")
    two.gold["answers"] *= 2
    assert task.score(two, called()).parts["fault"] == "fewer calls than asked for"


def test_every_kind_has_a_case() -> None:
    shown = {kind for kind, _ in CASES}
    shown |= {"a call where none is right", "fewer calls than asked for"}
    assert shown == set(KINDS)


def test_a_right_answer_has_no_fault() -> None:
    score = bfcl.BfclTask("embedded").score(problem_of("simple"), called())
    assert score.correct
    assert "fault" not in score.parts


def test_a_value_that_the_request_states_is_no_guess() -> None:
    """Though its argument may be left out: it says 2019 or 2020."""
    text = called(years=[2020, 2019])
    score = bfcl.BfclTask("embedded").score(problem_of("simple"), text)
    assert score.parts["fault"] == "another list or object"


def test_of_two_answers_the_fault_is_of_the_one_without_a_call() -> None:
    two = problem_of("parallel")
    other = {"name": "films.find", "arguments": ACCEPTED | {"seats": [5]}}
    two.gold["answers"].append(other)
    score = bfcl.BfclTask("embedded").score(two, called() + "\n" + called(seats=4))
    assert score.tier == "wrong_value"
    assert score.parts["fault"] == "another number"
