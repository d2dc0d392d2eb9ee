"""Two spellings of one answer are equal, two answers are not, and no text takes long to compare."""

from __future__ import annotations

import time

import pytest

from codechat.tasks.reasoning.answers import boxed, choice_letter, equivalent, gsm8k_gold, last_number, stated

SAME = [
    ("$1,234.50", "1234.5"), ("1,000,000", "1000000"), (r"1{,}234", "1234"), ("1\\,234", "1,234"), ("42.", "42"), ("42.00", "42"), ("007", "7"), (".5", "1/2"),
    (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"), ("3 1/2", "7/2"), (r"3\frac{1}{2}", "3.5"), (r"\frac{3}{4}\text{ miles}", "3/4"), (r"$\frac{1}{2}$", "0.5"),
    ("18 apples", "18"), ("18 dollars", "$18"), ("5 m", "5"), ("12 cm^2", "12"), ("5 miles per hour", "5"), ("3 apples", "3 apple"), ("50%", "50"), (r"50\%", "50"),
    (r"90^\circ", "90"), ("−7", "-7"), ("x = 5", "5"), ("2x", "x*2"), ("(x+1)^2", "x^2+2x+1"), (r"2\sqrt{3}", r"\sqrt{12}"), ("2 sqrt(2)", "sqrt(8)"),
    (r"\frac{\pi}{2}", "pi/2"), (r"\boxed{42}", "42"), ("(1,2)", "(1, 2)"), (r"\left(1,\frac12\right)", "(1,0.5)"), ("[0,1)", "[0, 1)"), (r"\{1,2\}", r"\{1,2\}"),
    ("east", r"\text{east}"), ("sin(x)^2+cos(x)^2", "1"),
]  # fmt: skip
OTHER = [
    ("5 km", "5 m"), ("5x", "5"), ("5", "5x"), ("x", "y"), ("1000000.0001", "1000000"), ("0.33", "1/3"), ("-5", "5"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"),
    ("(1,2,3)", "(1,2)"), ("12", "1,2"), ("1,23", "123"), ("1 2", "12"), ("5 6", "30"), ("5 or 6", "5"), ("18 apples or 19", "18"), ("18 or more", "18"), ("5 and 6", "5"), ("5; 6", "5"),
    ("north", "east"), ("5 = 5", "5"), ("lambda: 5", "5"), ("1/0", "5"), ("x/0", "x/0+1"), ("sqrt(2)", "1.41"), ("None", "0"), ("True", "1"), ("five", "5"),
]  # fmt: skip


@pytest.mark.parametrize("a, b", SAME)
def test_spellings_of_one_answer_are_equal_in_both_orders(a: str, b: str) -> None:
    assert equivalent(a, b) and equivalent(b, a)


@pytest.mark.parametrize("a, b", OTHER)
def test_different_answers_differ_in_both_orders(a: str, b: str) -> None:
    assert not equivalent(a, b) and not equivalent(b, a)


@pytest.mark.parametrize("gold", [None, "", " ", "$", "\\boxed{}", "\\text{}"])
@pytest.mark.parametrize("answer", [None, "", " ", "5", "0", "\\boxed{}", "anything"])
def test_an_empty_gold_answer_matches_nothing(gold: str | None, answer: str | None) -> None:
    assert not equivalent(answer, gold) and not equivalent(gold, answer)


def test_an_unreadable_gold_answer_matches_only_its_own_spelling() -> None:
    assert equivalent("@@ ??", "@@  ??.")
    assert not any(equivalent(answer, "@@ ??") for answer in ("5", "", "@@", "x", "??"))


HUGE = ["9**9**9**9", "((9^64)^64)^64", "(" * 100 + "1" + ")" * 100, "\\frac" * 300, "{" * 1900, "-" * 199 + "5", "9" * 200, "sqrt(" * 39 + "2" + ")" * 39,
        "1+" * 99 + "1", "\\boxed{" * 280, "2^(0.5^(0.5^99))", "exp(exp(exp(exp(9))))", "1 1/2 " * 330, "5 a" + " a" * 900, "(" + "1," * 900 + "1)", "x" * 199, "5" * 10**6,
        "((1,2)," * 60 + "1" + ")" * 60, "__import__('os').abort()"]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["sqrt", "sin", "cos", "tan", "ln", "log", "exp", "tan.", "2 sin", "log + 1", "(sqrt, 1)"]
)
def test_a_function_without_an_argument_equals_only_its_own_spelling(text: str) -> None:
    for other in ("5", "cos x", "(5, 1)"):
        assert not equivalent(text, other) and not equivalent(other, text)
    assert equivalent(text, f" {text} ")


@pytest.mark.parametrize("text", HUGE, ids=range(len(HUGE)))
def test_no_text_takes_long_or_raises(text: str) -> None:
    begun = time.process_time()
    assert not equivalent(text, "7") and not equivalent("7", text)
    equivalent(text, text + " "), boxed(text), stated(text), last_number(text), choice_letter(text)
    assert time.process_time() - begun < 1


def test_answers_are_found_where_a_text_states_them() -> None:
    assert (
        boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
        and boxed(r"\boxed{1") is None
        and boxed("1}") is None
    )
    assert (
        stated("so #### 18") == "18"
        and stated("The answer is 18.") == "18"
        and stated(r"The answer is 1, no: \boxed{2}") == "2"
        and stated("18") is None
    )
    assert (
        last_number("48-24 = 24, and -3 more make 1,021.") == "1021"
        and last_number("it is -3") == "-3"
        and last_number("none") is None
    )
    assert (
        choice_letter("The answer is (b).") == "B"
        and choice_letter("C") == "C"
        and choice_letter("A dog. A cat.") is None
    )


@pytest.mark.parametrize(
    "text, letter",
    [
        ("The answer is a mammal, so (B).", None),
        ("The answer is (a mammal).", None),
        ("The answer: a 3-legged stool", None),
        ("The answer is B. This answer is a surprise.", "B"),
        ("The answer is a mammal.\nC", "C"),
        ("The answer is a.", "A"),
        ("the answer is a", "A"),
        ("answer: a, a mammal", "A"),
        ("The answer is (a) a mammal.", "A"),
        ("The answer is a because it is a mammal.", "A"),
        ("Answer a is right.", "A"),
        ("I answer a question.", None),
        ("The answer is a\nIt is a mammal.", "A"),
        ("The answer is A mammal.", "A"),
        ("THE ANSWER IS A MAMMAL", "A"),
        ("The answer is b mammal.", "B"),
    ],
)
def test_an_article_is_no_choice(text: str, letter: str | None) -> None:
    assert choice_letter(text) == letter


@pytest.mark.parametrize(
    "text, gold",
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
def test_gold_of_a_gsm8k_solution(text: str, gold: str | None) -> None:
    assert gsm8k_gold(text) == gold
