"""Two spellings of one answer are equal, two answers are not, and no text takes long to compare."""

from collections.abc import Callable
from typing import Any

from codechat.tasks.reasoning.answers import boxed, choice_letter, equivalent, gsm8k_gold, last_number, stated
from codechat.tasks.reasoning.rewards import grade

SAME = [
    ("$1,234.50", "1234.5"), ("1,000,000", "1000000"), (r"1{,}234", "1234"), ("1\\,234", "1,234"), ("42.", "42"), ("42.00", "42"), ("007", "7"), (".5", "1/2"),
    (r"\frac{1}{2}", "0.5"), (r"\dfrac12", "1/2"), ("3 1/2", "7/2"), (r"3\frac{1}{2}", "3.5"), (r"\frac{3}{4}\text{ miles}", "3/4"), (r"$\frac{1}{2}$", "0.5"),
    ("18 apples", "18"), ("18 dollars", "$18"), ("5 m", "5"), ("12 cm^2", "12"), ("5 miles per hour", "5"), ("3 apples", "3 apple"), ("50%", "50"), (r"50\%", "50"),
    (r"90^\circ", "90"), ("−7", "-7"), ("x = 5", "5"), (r"2\sqrt{3}", r"\sqrt{12}"), ("2 sqrt(2)", "sqrt(8)"),
    (r"\frac{\pi}{2}", "pi/2"), (r"\boxed{42}", "42"), (r"\{1,2\}", r"\{1,2\}"),
    ("east", r"\text{east}"), ("@@ ??", "@@  ??."), ("2 sin", " 2 sin "),
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


def test_no_text_takes_long_or_raises(quick: Callable[..., Any]) -> None:
    def read(text: str) -> None:
        assert not equivalent(text, "7") and not equivalent("7", text)
        equivalent(text, text + " "), boxed(text), stated(text), last_number(text), choice_letter(text)

    for text in HUGE:
        quick(1, read, text)


def test_answers_are_read_where_a_text_states_them() -> None:
    for text, answer in ((r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1", None), ("1}", None)):
        assert boxed(text) == answer
    for text, answer in (("so #### 18", "18"), (r"The answer is 1, no: \boxed{2}", "2"), ("18", None)):
        assert stated(text) == answer
    assert last_number("48-24 = 24, and -3 more make 1,021.") == "1021" and last_number("none") is None
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


NUMBERS = {  # a text: its last number, equal to the second and to none of the others
    "It costs $.5": ("0.5", "5"), "a loss of -$5": ("-5", "5"), "it is $-5": ("-5", "5"), "so \u22125.": ("-5", "5"), "about -5": ("-5", "5"),
    "It is \u22125 (below zero)": ("-5", "5"), "minus 5 degrees": ("-5", "5"), "negative $7.": ("-7", "7"), "10 minus 5 is 5": ("5", "-5"), "the rest minus 12": ("12", "-12"), "it is minus 12": ("-12", "12"),
    "48\u201324 gives 24": ("24", "-24"), "10 - 7": ("7", "-7"), "- 7": ("7", "-7"), r"\(-\$3\)": ("-3", "3"), "**-5**": ("-5", "5"),
    "5 million people": ("5000000", "5"), "2.5 Billion": ("2500000000", "2.5"), "3 hundred thousand": ("300000", "3"), "$5k": ("5000", "5"), "$2M": ("2000000", "2"),
    "1e3": ("1000", "3", "1"), "1.5E-2 m": ("0.015", "2", "1.5"), r"2 \times 10^3": ("2000", "3", "10", "2"), "3 x 10^{-2}": ("0.03", "2", "3"), "2**3": ("8", "3"), "10\u00b3": ("1000", "10"),
    "100 000": ("100000", "0", "100"), "1\u202f234\u202f567": ("1234567", "567"), "1'000": ("1000", "0"), "1_000": ("1000", "0"), "$1,234,567.": ("1234567", "567"),
    "**18**.": ("18",), "`18`": ("18",), "__18__ apples": ("18",), "*18*": ("18",), "The answer is 18. That is all.": ("18",), "18 cm^2": ("18", "2"), "18 m2": ("18", "2"), "18 cm\u00b2": ("18", "2"),
    "1/2": ("0.5", "2"), r"\frac{1}{2}": ("0.5", "2", "1"), "3 1/2 cups": ("3.5", "2"), "2\u00bd": ("2.5", "2"), "18...": ("18",), "(18)": ("18",), "18%": ("18",), "it ends at 5:00 pm": ("5", "0"), "room B12, 18": ("18",), "$5 bn": ("5000000000", "5"), "5 lakh": ("500000", "5"),
}  # fmt: skip


def test_numbers_have_one_reader_with_sign_point_exponent_separators_and_units() -> None:
    for text, (value, *others) in NUMBERS.items():
        found = last_number(text)
        assert equivalent(found, value), (text, found)
        assert not any(equivalent(found, other) for other in others), (text, found)
    for text in ("1,5", "1,2,3", "at 3:30", "2.3.4", "CO2", "x^2", "1e999", "one", "0x10", "1_0"):  # part of another
        assert not any(equivalent(last_number(text), digit) for digit in "12345"), text
    for answer, gold in (("1e3", "1000"), ("100 000", "100000"), ("5 million", "5,000,000"), ("-$5", "-5"), ("**18**", "18"),
                         (r"\boxed{18}", "18"), ("2 x 10^3", "2000"), ("half", "half"), ("minus 5", "-5"), ("18 apples.", "18")):  # fmt: skip
        assert equivalent(answer, gold), answer
    for answer, gold in (("5 million", "5"), ("1e3", "3"), ("100 000", "0"), (".5", "5"), ("-$5", "5"), ("\u22125", "5"), ("1,5", "15"), ("5 million", "5 thousand"),
                         ("18. Or is it 20?", "20"), ("48\u201324", "24"), ("x18", "18")):  # fmt: skip
        assert not equivalent(answer, gold), answer


def test_the_stated_answer_ends_with_its_sentence_and_has_no_markdown() -> None:
    for text in ("The answer is **18**.", "The answer is 18. That is all.", "**The answer is 18.**", "So the answer is: 18, since 9 * 2 = 18.", "The answer is $18$!", "Answer: 18",
                 "The answer is\n18", "the answer is 18 because it is", "**Answer:** 18\n\nBye 3.", "The answer is 18.0. 19 is wrong."):  # fmt: skip
        assert equivalent(stated(text), "18"), (text, stated(text))


def test_a_choice_is_read_in_any_layout_and_an_ambiguous_one_is_none() -> None:
    for text in ("**B**", r"\boxed{B}", r"$\boxed{\text{B}}$", "option B", "Option (B) is correct.", '"B"', "\u201cB\u201d", "B. Paris", "B) Paris", "(B) Paris", "B: Paris", "B \u2014 Paris", "`B`",
                 "The answer is **B**.", "The answer is **(B)** Paris.", 'The answer is "B".', "The answer is option B", "The correct answer is: B. Paris", "Answer: **B. Paris**", "**Answer:** B",
                 "The answer is B, not A.", "Option A is wrong. The answer is B.", "The best choice is B", r"The answer is $\boxed{B}$.", "I think so.\n\n**B) Paris**", "The answer is B - Paris",
                 "The answer is B.\nA is wrong.", "The answer: B\nC++ is a language", "**B.** Paris", "**B**: Paris", "Answer - B", "Choice B", "[B]", r"\textbf{B}",
                 "The correct letter is B"):  # fmt: skip
        assert choice_letter(text) == "B", text
    for text in ("A or B", "The answer is A or B.", "The answer is A-flat.", "The answer is C++.", "C++", "A-flat", "C#", "The answer is A and B", "The answer is B/C", "Answer: A, B", "A, B", "A & D",
                 "Option A or option B", "The answer is (A) or (B)", "A. Paris\nB. Rome\nC. Oslo\nD. Bonn", "A\nno\nB", "The answer is D'Artagnan", "The answer is either A or C",
                 "Option A is wrong, option B is right", "The answer is both A and B", "B-", "Apple. Ball.", "Answer: A (or B)", "The answer is A or maybe B", "The answer is A and possibly C", "The answer is A\u266d"):  # fmt: skip
        assert choice_letter(text) is None, text


def test_graders_read_letters_and_numbers_with_the_same_reader() -> None:
    for inner in ("B", "b", "**B**", "(B)", "B. Paris", r"\boxed{B}", "option B", '"B"'):
        for text, name in ((f"<reasoning>\nx\n</reasoning>\n<answer>\n{inner}\n</answer>", "xml"), (f"x </think> <answer> {inner} </answer>", "r1_zero"),
                           (f"The answer is {inner}.", "plain"), (f"The answer is {inner}.", "question_only")):  # fmt: skip
            assert grade(name, text, "B", "letter").correct, (name, text)
            assert not grade(name, text.replace(inner, "A or B"), "B", "letter").correct
    for inner, gold in ((".5", "5"), ("-$5", "5"), ("5 million", "5"), ("1e3", "3"), ("100 000", "0")):
        for text, name in ((f"<answer>{inner}</answer>", "xml"), (f"x </think> <answer>{inner}</answer>", "r1_zero"), (f"The answer is {inner}.", "plain"),
                           (f"The answer is {inner}.", "question_only")):  # fmt: skip
            assert not grade(name, text, gold, "number").correct, (name, text)
