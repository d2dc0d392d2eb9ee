"""Two spellings of one answer are equal, two answers are not, and no text takes long to compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_white_space_that_separates_nothing_makes_no_difference() -> None:
    pairs = ANSWERS["same_but_for_white_space"]
    assert [pair for pair in pairs if not (equivalent(*pair) and equivalent(*pair[::-1]))] == []


def test_white_space_between_words_and_digits_counts() -> None:
    pairs = ANSWERS["different_by_white_space"]
    assert [pair for pair in pairs if equivalent(*pair) or equivalent(*pair[::-1])] == []


def test_equality_holds_in_both_orders_and_an_empty_answer_equals_nothing() -> None:
    assert [
        pair for pair in ANSWERS["same"] if not (equivalent(*pair) and equivalent(*pair[::-1]))
    ] == []
    assert [
        pair for pair in ANSWERS["different"] if equivalent(*pair) or equivalent(*pair[::-1])
    ] == []
    for gold in (None, "", " ", "$", "\\boxed{}", "\\text{}"):
        for answer in (None, "", " ", "5", "0", "\\boxed{}", "anything"):
            assert not equivalent(answer, gold)
            assert not equivalent(gold, answer)


def test_no_text_takes_long_or_raises(quick: Callable[..., Any]) -> None:
    def read(text: str) -> None:
        assert not equivalent(text, "7")
        assert not equivalent("7", text)
        (
            equivalent(text, text + " "),
            boxed(text),
            stated(text),
            last_number(text),
            choice_letter(text),
        )

    for text in HUGE:
        quick(1, read, text)


def test_answers_are_read_where_a_text_states_them() -> None:
    for text, answer in (
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("1}", None),
    ):
        assert boxed(text) == answer
    for text, answer in (
        ("so #### 18", "18"),
        (r"The answer is 1, no: \boxed{2}", "2"),
        ("18", None),
    ):
        assert stated(text) == answer
    for text in ANSWERS["states_18"]:  # it ends with its sentence and has no markdown
        assert equivalent(stated(text), "18"), (text, stated(text))
    assert last_number("48-24 = 24, and -3 more make 1,021.") == "1021"
    assert last_number("none") is None
    for text, answer in (
        ("a\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("#### $5", "5"),
        ("#### -3.5", "-3.5"),
        ("72", None),
        ("####", None),
        ("#### many", None),
        ("#### 5 apples", None),
    ):
        assert gsm8k_gold(text) == answer


def test_numbers_have_one_reader_with_sign_point_exponent_separators_and_units() -> None:
    # its last number, equal to the second and to none of the others
    for text, value, *others in ANSWERS["numbers"]:
        found = last_number(text)
        assert equivalent(found, value), (text, found)
        assert not any(equivalent(found, other) for other in others), (text, found)
    for text in ANSWERS["no_numbers"]:
        assert not any(equivalent(last_number(text), digit) for digit in "12345"), text


def test_a_choice_is_read_in_any_layout_and_an_article_or_an_ambiguous_one_is_none() -> None:
    for text, letter in ANSWERS["letters"]:
        assert choice_letter(text) == letter, text


def test_graders_read_letters_and_numbers_with_the_same_reader() -> None:
    for inner in ("B", "b", "**B**", "(B)", "B. Paris", r"\boxed{B}", "option B", '"B"'):
        for text, name in (
            (f"<reasoning>\nx\n</reasoning>\n<answer>\n{inner}\n</answer>", "xml"),
            (f"x </think> <answer> {inner} </answer>", "r1_zero"),
            (f"The answer is {inner}.", "plain"),
            (f"The answer is {inner}.", "question_only"),
        ):
            assert grade(name, text, "B", "letter").correct, (name, text)
            assert not grade(name, text.replace(inner, "A or B"), "B", "letter").correct
    for inner, gold in (
        (".5", "5"),
        ("-$5", "5"),
        ("5 million", "5"),
        ("1e3", "3"),
        ("100 000", "0"),
    ):
        for text, name in (
            (f"<answer>{inner}</answer>", "xml"),
            (f"x </think> <answer>{inner}</answer>", "r1_zero"),
            (f"The answer is {inner}.", "plain"),
            (f"The answer is {inner}.", "question_only"),
        ):
            assert not grade(name, text, gold, "number").correct, (name, text)
