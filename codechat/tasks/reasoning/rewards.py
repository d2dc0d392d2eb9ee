"""Rewards of reasoning and answer: four graders and the terms that they add up.

    xml            correctness 2.0, integer 0.5, strict_format 0.5, soft_format 0.5, tags 4 x 0.125     in all 4.0
    r1_zero        1.0 where the layout <think> ... </think> <answer> ... </answer> and the answer are correct
    question_only  1.0 where the stated answer (\\boxed{}, "####", "answer is") is correct
    plain          1.0 where the last number, or the letter after "answer is", is correct

Terms are never negative, and their sum is the reward. Each is logged by itself, because a policy can raise the sum by
layout alone. Text after the closing tag costs 0.001 per character, at most the value of two tags: a correct answer with
a long tail still scores more than a wrong one without.

With every grader a completion has one of four outcomes: format and answer, answer only, format only, neither. A
completion truncated before its closing tag has no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from codechat.core.errors import ConfigError, nearest
from codechat.tasks.reasoning import answers

OUTCOMES = ("neither", "format_only", "answer_only", "format_and_answer")
FORMATTED = ("format_only", "format_and_answer")
CORRECTNESS, KIND, STRICT, SOFT, TAG, TAIL = 2.0, 0.5, 0.5, 0.5, 0.125, 0.001
_INSIDE = r"(?:(?!</?(?:reasoning|answer)>).)*?"  # no tag inside a tag
# DOTALL: reasoning may have several lines. The line end after </answer> belongs to the turn, not to the content.
_STRICT = re.compile(rf"<reasoning>\n{_INSIDE}\n</reasoning>\n<answer>\n{_INSIDE}\n</answer>\n?", re.DOTALL)
_SOFT = re.compile(rf"\s*<reasoning>{_INSIDE}</reasoning>\s*<answer>{_INSIDE}</answer>", re.DOTALL)
_R1 = re.compile(
    r"\s*(?:<think>)?(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>((?:(?!</?(?:think|answer)>).)*)</answer>",
    re.DOTALL,
)
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)")


class Graded(NamedTuple):
    """terms: addends of the reward, the same names for every completion. answer: the answer that was read, or None."""

    terms: dict[str, float]
    formatted: bool
    correct: bool
    answer: str | None

    @property
    def reward(self) -> float:
        return sum(self.terms.values())

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.formatted + 2 * self.correct]


def xml_answer(text: str) -> str | None:
    """The text between the last <answer> and the following </answer>, or None."""
    body, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    return body.strip() if closed and "<answer>" in text else None


def grade_xml(text: str, gold: str | None, kind: str) -> Graded:
    """kind "letter": a letter A to D earns the term `integer`."""
    answer = xml_answer(text)
    correct = _same(answer, gold, kind)
    of_kind = answer is not None and bool((_INTEGER if kind == "number" else re.compile("[A-D]")).fullmatch(answer))
    strict, soft = bool(_STRICT.fullmatch(text)), bool(_SOFT.match(text))
    terms = {
        "correctness": CORRECTNESS * correct,
        "integer": KIND * of_kind,
        "strict_format": STRICT * strict,
        "soft_format": SOFT * soft,
        "tags": _tags(text),
    }
    return Graded(terms, soft, correct, answer)


def _tags(text: str) -> float:
    """0.125 for each of four tags that occurs exactly once, in its place. Text after the last tag reduces the two tags
    of the answer."""
    tail = len(text.rpartition("\n</answer>")[2].strip()) if "\n</answer>" in text else 0
    lost = TAIL * tail
    found = [
        TAG * (text.count(tag) == 1) for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    ]
    return sum(found[:2]) + sum(max(0.0, share - lost) for share in found[2:])


def grade_r1_zero(text: str, gold: str | None, kind: str) -> Graded:
    """The prompt may have opened <think> already. Text after </answer> is allowed."""
    match = _R1.match(text)
    answer = match[1].strip() if match else None
    if answer is not None and "\\boxed" in answer:
        answer = answers.boxed(answer)
    correct = _same(answer, gold, kind)
    return Graded({"answer": float(correct)}, match is not None, correct, answer)


def grade_question_only(text: str, gold: str | None, kind: str) -> Graded:
    answer = answers.stated(text)
    correct = _same(answer, gold, kind)
    return Graded({"answer": float(correct)}, answer is not None, correct, answer)


def grade_plain(text: str, gold: str | None, kind: str) -> Graded:
    answer = answers.choice_letter(text) if kind == "letter" else answers.last_number(text)
    correct = _same(answer, gold, kind)
    return Graded({"answer": float(correct)}, answer is not None, correct, answer)


def _same(answer: str | None, gold: str | None, kind: str) -> bool:
    """Letters are compared as letters, numbers and expressions by value. An empty or missing gold answer matches
    nothing."""
    if answer is None or not gold or kind == "number":
        return answers.equivalent(answer, gold)
    return answer.strip("() .").upper() == gold.upper()


GRADERS: dict[str, Callable[[str, str | None, str], Graded]] = {
    "xml": grade_xml,
    "r1_zero": grade_r1_zero,
    "question_only": grade_question_only,
    "plain": grade_plain,
}
MAXIMUM = {"xml": CORRECTNESS + KIND + STRICT + SOFT + 4 * TAG, "r1_zero": 1.0, "question_only": 1.0, "plain": 1.0}


def check(grading: str) -> None:
    """ConfigError for an unknown grader."""
    if grading not in GRADERS:
        raise ConfigError(
            f"reward {grading!r} is unknown; required: one of {', '.join(GRADERS)}{nearest(grading, GRADERS)}"
        )


def written(grading: str, steps: str, answer: str) -> str:
    """A worked solution in the grader's layout: the target of SFT and the reference solution."""
    if grading == "xml":
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{answer}\n</answer>"
    if grading == "r1_zero":
        return f"{steps} </think> <answer> {answer} </answer>"
    return f"{steps}\nThe answer is {answer}."
