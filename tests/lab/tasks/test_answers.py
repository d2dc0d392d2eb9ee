"""Two spellings of one answer are equal, two answers are not, and no text takes long to compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codechat_lab.tasks.reasoning.answers import (
    boxed,
    choice_letter,
    equivalent,
    gsm8k_gold,
    last_number,
    stated,
)
from codechat_lab.tasks.reasoning.rewards import grade

ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
HUGE = [
    "9**9**9**9",
    "((9^64)^64)^64",
    "(" * 100 + "1" + ")" * 100,
    "\\frac" * 300,
    "{" * 1900,
    "-" * 199 + "5",
    "9" * 200,
    "sqrt(" * 39 + "2" + ")" * 39,
    "1+" * 99 + "1",
    "\\boxed{" * 280,
    "2^(0.5^(0.5^99))",
    "exp(exp(exp(exp(9))))",
    "1 1/2 " * 330,
    "5 a" + " a" * 900,
    "(" + "1," * 900 + "1)",
    "x" * 199,
    "5" * 10**6,
    "((1,2)," * 60 + "1" + ")" * 60,
    "__import__('os').abort()",
]


def same(pair: list[str]) -> bool:
    """In both orders."""
    first, second = pair
    return equivalent(first, second) and equivalent(second, first)


def different(pair: list[str]) -> bool:
    """In both orders."""
    first, second = pair
    return not equivalent(first, second) and not equivalent(second, first)


def test_white_space_that_separates_nothing_makes_no_difference() -> None:
    assert [pair for pair in ANSWERS["same_but_for_white_space"] if not same(pair)] == []


def test_white_space_between_words_and_digits_counts() -> None:
    assert [pair for pair in ANSWERS["different_by_white_space"] if not different(pair)] == []


def test_two_spellings_of_one_answer_are_equal_in_both_orders() -> None:
    assert [pair for pair in ANSWERS["same"] if not same(pair)] == []


def test_two_answers_differ_in_both_orders() -> None:
    assert [pair for pair in ANSWERS["different"] if not different(pair)] == []


@pytest.mark.parametrize("gold", [None, "", " ", "$", "\\boxed{}", "\\text{}"])
def test_an_empty_answer_equals_nothing(gold: str | None) -> None:
    for answer in (None, "", " ", "5", "0", "\\boxed{}", "anything"):
        assert not equivalent(answer, gold)
        assert not equivalent(gold, answer)


def compare_and_read(text: str) -> None:
    assert not equivalent(text, "7")
    assert not equivalent("7", text)
    equivalent(text, text + " ")
    boxed(text)
    stated(text)
    last_number(text)
    choice_letter(text)


@pytest.mark.parametrize("text", HUGE, ids=lambda text: f"{text[:12]} {len(text)}")
def test_no_text_takes_long_or_raises(text: str, quick: Callable[..., Any]) -> None:
    quick(1, compare_and_read, text)


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("1}", None),
    ],
)
def test_the_last_closed_box_is_read(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so #### 18", "18"),
        (r"The answer is 1, no: \boxed{2}", "2"),
        ("18", None),
    ],
)
def test_an_answer_is_read_where_a_text_states_it(text: str, answer: str | None) -> None:
    assert stated(text) == answer


@pytest.mark.parametrize("text", ANSWERS["states_18"])
def test_a_stated_answer_ends_with_its_sentence_and_has_no_markdown(text: str) -> None:
    assert equivalent(stated(text), "18"), stated(text)


def test_the_last_number_of_a_text_is_read_without_its_separators() -> None:
    assert last_number("48-24 = 24, and -3 more make 1,021.") == "1021"


def test_a_text_without_a_digit_has_no_number() -> None:
    assert last_number("none") is None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("#### $5", "5"),
        ("#### -3.5", "-3.5"),
        ("72", None),
        ("####", None),
        ("#### many", None),
        ("#### 5 apples", None),
    ],
)
def test_the_answer_of_a_gsm8k_row_is_the_number_after_its_mark(
    text: str, answer: str | None
) -> None:
    assert gsm8k_gold(text) == answer


def test_a_number_has_sign_point_exponent_separators_and_units() -> None:
    # its last number, equal to the second and to none of the others
    for text, value, *others in ANSWERS["numbers"]:
        found = last_number(text)
        assert equivalent(found, value), (text, found)
        assert not any(equivalent(found, other) for other in others), (text, found)


def test_what_is_no_number_equals_none_of_its_digits() -> None:
    for text in ANSWERS["no_numbers"]:
        assert not any(equivalent(last_number(text), digit) for digit in "12345"), text


def test_a_choice_is_read_in_any_layout_and_an_article_or_an_ambiguous_one_is_none() -> None:
    for text, letter in ANSWERS["letters"]:
        assert choice_letter(text) == letter, text


# A grader, and an answer in the words that it reads.
WORDINGS = [
    ("xml", "<reasoning>\nx\n</reasoning>\n<answer>\n{}\n</answer>"),
    ("r1_zero", "x </think> <answer> {} </answer>"),
    ("plain", "The answer is {}."),
    ("question_only", "The answer is {}."),
]


@pytest.mark.parametrize("grader, wording", WORDINGS, ids=[name for name, _ in WORDINGS])
@pytest.mark.parametrize(
    "letter", ["B", "b", "**B**", "(B)", "B. Paris", r"\boxed{B}", "option B", '"B"']
)
def test_every_grader_reads_a_letter_in_any_layout(letter: str, grader: str, wording: str) -> None:
    assert grade(grader, wording.format(letter), "B", "letter").correct


@pytest.mark.parametrize("grader, wording", WORDINGS, ids=[name for name, _ in WORDINGS])
def test_no_grader_takes_one_of_two_letters(grader: str, wording: str) -> None:
    assert not grade(grader, wording.format("A or B"), "B", "letter").correct


@pytest.mark.parametrize("grader, wording", WORDINGS, ids=[name for name, _ in WORDINGS])
@pytest.mark.parametrize(
    "number, digits",
    [(".5", "5"), ("-$5", "5"), ("5 million", "5"), ("1e3", "3"), ("100 000", "0")],
)
def test_no_grader_takes_a_number_for_its_last_digits(
    number: str, digits: str, grader: str, wording: str
) -> None:
    assert not grade(grader, wording.format(number), digits, "number").correct
