"""What a completion earns: four gradings of a reasoning and an answer, with the terms that they add up.

    xml            correctness 2.0, integer 0.5, strict_format 0.5, soft_format 0.5, tags 4 x 0.125     in all 4.0
    r1_zero        1.0 where the layout <think> ... </think> <answer> ... </answer> and the answer are right
    question_only  1.0 where the stated answer (\\boxed{}, "####", "answer is") is right
    plain          1.0 where the last number, or the letter after "answer is", is right

Terms are never negative, and their sum is the reward. Each is logged by itself, since a policy can raise the sum by the layout alone.
Text behind the closing tag costs the tags' term 0.001 a character and no more than two tags are worth: a right answer with a long tail still
earns more than a wrong one without.

Whatever the grading, a completion has one of four outcomes: format and answer, answer only, format only, neither. One that was cut off before
its closing tag has no answer, and counts as such.
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
_INSIDE = r"(?:(?!</?(?:reasoning|answer)>).)*?"  # no tag within a tag
# DOTALL: reasoning of more than one line is the point. The line end behind </answer> belongs to the turn, not to the content.
_STRICT = re.compile(rf"<reasoning>\n{_INSIDE}\n</reasoning>\n<answer>\n{_INSIDE}\n</answer>\n?", re.DOTALL)
_SOFT = re.compile(rf"\s*<reasoning>{_INSIDE}</reasoning>\s*<answer>{_INSIDE}</answer>", re.DOTALL)
_R1 = re.compile(
    r"\s*(?:<think>)?(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>((?:(?!</?(?:think|answer)>).)*)</answer>",
    re.DOTALL,
)
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)")


class Graded(NamedTuple):
    """terms: addends of the reward, all there in every completion. answer: what was read as the answer, or None."""

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
    """What stands between the last <answer> and the </answer> behind it; None where one of them is missing."""
    body, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    return body.strip() if closed and "<answer>" in text else None


def grade_xml(text: str, gold: str | None, kind: str) -> Graded:
    """kind "letter": the term `integer` is earned by a letter A to D instead."""
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
    """0.125 for each of four tags that is there exactly once, in its place; what follows the last takes from the two of the answer."""
    tail = len(text.rpartition("\n</answer>")[2].strip()) if "\n</answer>" in text else 0
    lost = TAIL * tail
    found = [
        TAG * (text.count(tag) == 1) for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
    ]
    return sum(found[:2]) + sum(max(0.0, share - lost) for share in found[2:])


def grade_r1_zero(text: str, gold: str | None, kind: str) -> Graded:
    """The prompt may have opened <think> already. Text behind </answer> is allowed."""
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
    """Letters by their letter; numbers and expressions by what they are worth. A gold answer that is empty or missing is never met."""
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
    """ConfigError for a grading that is unknown."""
    if grading not in GRADERS:
        raise ConfigError(f"reward {grading!r} is unknown; give one of {', '.join(GRADERS)}{nearest(grading, GRADERS)}")


def written(grading: str, steps: str, answer: str) -> str:
    """A worked solution in the layout that the grading asks for: what SFT teaches, and the gold answer of the gate."""
    if grading == "xml":
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{answer}\n</answer>"
    if grading == "r1_zero":
        return f"{steps} </think> <answer> {answer} </answer>"
    return f"{steps}\nThe answer is {answer}."
