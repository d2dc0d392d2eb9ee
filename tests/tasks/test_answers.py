"""Two spellings of one answer are equal, two answers are not, and no text takes long to compare."""

from __future__ import annotations

import time

from codechat.tasks.reasoning.answers import boxed, choice_letter, equivalent, gsm8k_gold, last_number, stated

SAME = [
    ("$1,234.50", "1234.5"), ("1,000,000", "1000000"), (r"1{,}234", "1234"), ("1\\,234", "1,234"), ("42.", "42"), ("42.00", "42"), ("007", "7"), (".5", "1/2"),
    (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"), ("3 1/2", "7/2"), (r"3\frac{1}{2}", "3.5"), (r"\frac{3}{4}\text{ miles}", "3/4"), (r"$\frac{1}{2}$", "0.5"),
    ("18 apples", "18"), ("18 dollars", "$18"), ("5 m", "5"), ("12 cm^2", "12"), ("5 miles per hour", "5"), ("3 apples", "3 apple"), ("50%", "50"), (r"50\%", "50"),
    (r"90^\circ", "90"), ("−7", "-7"), ("x = 5", "5"), ("2x", "x*2"), ("(x+1)^2", "x^2+2x+1"), (r"2\sqrt{3}", r"\sqrt{12}"), ("2 sqrt(2)", "sqrt(8)"),
    (r"\frac{\pi}{2}", "pi/2"), (r"\boxed{42}", "42"), ("(1,2)", "(1, 2)"), (r"\left(1,\frac12\right)", "(1,0.5)"), ("[0,1)", "[0, 1)"), (r"\{1,2\}", r"\{1,2\}"),
    ("east", r"\text{east}"), ("sin(x)^2+cos(x)^2", "1"), ("@@ ??", "@@  ??."), ("2 sin", " 2 sin "),
]  # fmt: skip
OTHER = [
    ("5 km", "5 m"), ("5x", "5"), ("5", "5x"), ("x", "y"), ("1000000.0001", "1000000"), ("0.33", "1/3"), ("-5", "5"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"),
    ("(1,2,3)", "(1,2)"), ("12", "1,2"), ("1,23", "123"), ("1 2", "12"), ("5 6", "30"), ("5 or 6", "5"), ("18 apples or 19", "18"), ("18 or more", "18"), ("5 and 6", "5"), ("5; 6", "5"),
    ("north", "east"), ("5 = 5", "5"), ("lambda: 5", "5"), ("1/0", "5"), ("x/0", "x/0+1"), ("sqrt(2)", "1.41"), ("None", "0"), ("True", "1"), ("five", "5"),
    ("5", "@@ ??"), ("@@", "@@ ??"), ("x", "??"), ("sqrt", "5"), ("2 sin", "cos x"), ("log + 1", "5"), ("(sqrt, 1)", "(5, 1)"), ("tan.", "5"),
]  # fmt: skip
HUGE = ["9**9**9**9", "((9^64)^64)^64", "(" * 100 + "1" + ")" * 100, "\\frac" * 300, "{" * 1900, "-" * 199 + "5", "9" * 200, "sqrt(" * 39 + "2" + ")" * 39,
        "1+" * 99 + "1", "\\boxed{" * 280, "2^(0.5^(0.5^99))", "exp(exp(exp(exp(9))))", "1 1/2 " * 330, "5 a" + " a" * 900, "(" + "1," * 900 + "1)", "x" * 199, "5" * 10**6,
        "((1,2)," * 60 + "1" + ")" * 60, "__import__('os').abort()"]  # fmt: skip


def test_equality_holds_in_both_orders() -> None:
    assert [pair for pair in SAME if not (equivalent(*pair) and equivalent(*pair[::-1]))] == []
    assert [pair for pair in OTHER if equivalent(*pair) or equivalent(*pair[::-1])] == []


def test_an_empty_answer_equals_nothing() -> None:
    for gold in (None, "", " ", "$", "\\boxed{}", "\\text{}"):
        for answer in (None, "", " ", "5", "0", "\\boxed{}", "anything"):
            assert not equivalent(answer, gold) and not equivalent(gold, answer)


def test_no_text_takes_long_or_raises() -> None:
    for text in HUGE:
        begun = time.process_time()
        assert not equivalent(text, "7") and not equivalent("7", text)
        equivalent(text, text + " "), boxed(text), stated(text), last_number(text), choice_letter(text)
        assert time.process_time() - begun < 1, text[:40]


def test_answers_are_read_where_a_text_states_them() -> None:
    for text, answer in ((r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1", None), ("1}", None)):
        assert boxed(text) == answer
    for text, answer in (
        ("so #### 18", "18"),
        ("The answer is 18.", "18"),
        (r"The answer is 1, no: \boxed{2}", "2"),
        ("18", None),
    ):
        assert stated(text) == answer
    for text, answer in (("48-24 = 24, and -3 more make 1,021.", "1021"), ("it is -3", "-3"), ("none", None)):
        assert last_number(text) == answer
    for text, answer in (("a\n#### 72", "72"), ("#### 1,200", "1200"), ("#### $5", "5"), ("#### -3.5", "-3.5"), ("72", None),
                         ("####", None), ("#### many", None), ("#### 5 apples", None)):  # fmt: skip
        assert gsm8k_gold(text) == answer


def test_a_letter_is_a_choice_and_an_article_is_not() -> None:
    choices = {
        "The answer is (b).": "B", "C": "C", "A dog. A cat.": None, "The answer is a mammal, so (B).": None, "The answer is (a mammal).": None,
        "The answer: a 3-legged stool": None, "The answer is B. This answer is a surprise.": "B", "The answer is a mammal.\nC": "C", "The answer is a.": "A",
        "the answer is a": "A", "answer: a, a mammal": "A", "The answer is (a) a mammal.": "A", "The answer is a because it is a mammal.": "A",
        "Answer a is right.": "A", "I answer a question.": None, "The answer is a\nIt is a mammal.": "A", "The answer is A mammal.": "A",
        "THE ANSWER IS A MAMMAL": "A", "The answer is b mammal.": "B",
    }  # fmt: skip
    assert {text: choice_letter(text) for text in choices} == choices
