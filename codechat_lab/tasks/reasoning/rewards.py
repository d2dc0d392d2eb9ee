"""Rewards of reasoning and answer, under the names that their authors gave them.

    xml            correctness 2.0, integer 0.5, strict_format 0.5, soft_format 0.5, tags 4 x 0.125     in all 4.0
    r1_zero        1.0 where the layout <think> ... </think> <answer> ... </answer> and the answer are correct
    question_only  1.0 where the stated answer (\\boxed{}, "####", "answer is") is correct
    plain          1.0 where the last number, or the letter after "answer is", is correct

"xml" is a GRPO example on GSM8K (W. Brown, 2025), with TRL's signatures; the `..._reward_fn`
are those of Dr. GRPO and CS336. docs/tasks.md lists where the rules differ. Text after the
closing tag costs 0.001 per character, at most the value of two tags."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codechat.tasks.base import Score
from codechat_lab.tasks.reasoning import answers

OUTCOMES = ("neither", "format_only", "answer_only", "format_and_answer")
FORMATTED = ("format_only", "format_and_answer")
TAG = 0.125
TAIL = 0.001
TAGS = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")
_INSIDE = r"(?:(?!</?(?:reasoning|answer)>).)*?"  # no tag inside a tag
# DOTALL: reasoning may have several lines. The line end after </answer> belongs to the turn,
# not to the content.
_STRICT = re.compile(
    rf"<reasoning>\n{_INSIDE}\n</reasoning>\n<answer>\n{_INSIDE}\n</answer>\n?", re.DOTALL
)
_SOFT = re.compile(rf"\s*<reasoning>{_INSIDE}</reasoning>\s*<answer>{_INSIDE}</answer>", re.DOTALL)
_THOUGHT = r"(?:(?!</?(?:think|answer)>).)*"
_R1 = re.compile(
    rf"\s*(?:<think>)?{_THOUGHT}</think>\s*<answer>({_THOUGHT})</answer>(?!.*</?answer>)", re.DOTALL
)
_OF_KIND = {"number": re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)"), "letter": re.compile("[A-E]")}


def extract_xml_answer(text: str) -> str | None:
    """The text between the last <answer> and the following </answer>, or None."""
    body, closed, _ = text.rpartition("<answer>")[2].partition("</answer>")
    return body.strip() if closed and "<answer>" in text else None


def xml_terms(text: str, gold: str | None, kind: str) -> dict[str, float]:
    """correctness: the answer equals the gold answer. integer: it is one, or for kind "letter"
    a letter A to E.
    strict_format: exactly the requested layout, each tag on its own line; soft_format: the text
    begins with both parts.
    tags: each of four tags occurs exactly once, in its place; text after the last one reduces
    the two of the answer."""
    answer = extract_xml_answer(text)
    return {
        "correctness": 2.0 if _same(answer, gold, kind) else 0.0,
        "integer": 0.5 if _OF_KIND[kind].fullmatch(answer or "") else 0.0,
        "strict_format": 0.5 if _STRICT.fullmatch(text) else 0.0,
        "soft_format": 0.5 if _SOFT.match(text) else 0.0,
        "tags": _tags_term(text),
    }


def _tags_term(text: str) -> float:
    tail = len(text.rpartition("\n</answer>")[2].strip()) if "\n</answer>" in text else 0
    shares = [TAG if text.count(tag) == 1 else 0.0 for tag in TAGS]
    return sum(shares[:2]) + sum(max(0.0, share - TAIL * tail) for share in shares[2:])


def _trl(term: str, name: str) -> Callable[..., list[float]]:
    """One term as a reward function of TRL, where a completion is a list of messages."""

    def reward(
        completions: Sequence[Sequence[Mapping[str, str]]],
        answer: Sequence[str | None] = (),
        kind: str = "number",
        **columns: Any,
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        golds = answer or [None] * len(completions)
        return [xml_terms(text, gold, kind)[term] for text, gold in zip(texts, golds, strict=True)]

    reward.__name__ = name
    return reward


correctness_reward_func = _trl("correctness", "correctness_reward_func")
int_reward_func = _trl("integer", "int_reward_func")
strict_format_reward_func = _trl("strict_format", "strict_format_reward_func")
soft_format_reward_func = _trl("soft_format", "soft_format_reward_func")
xmlcount_reward_func = _trl("tags", "xmlcount_reward_func")


def _r1_zero_answer(text: str) -> str | None:
    """The prompt may have opened <think> already. Text after </answer> is allowed. None where
    the layout is wrong."""
    match = _R1.match(text)
    if match is None:
        return None
    answer = match[1].strip()
    return answers.boxed(answer) or "" if "\\boxed" in answer else answer


MAXIMUM = {"xml": 4.0, "r1_zero": 1.0, "question_only": 1.0, "plain": 1.0}
_READERS = {"r1_zero": _r1_zero_answer, "question_only": answers.stated}


def grade(reward: str, text: str, gold: str | None, kind: str) -> Score:
    """The score of a completion by one of the rewards of MAXIMUM. kind: of the gold answer,
    "number" or "letter"."""
    if reward == "xml":
        answer = extract_xml_answer(text)
        terms = xml_terms(text, gold, kind)
        formatted = terms["soft_format"] > 0
        correct = terms["correctness"] > 0
    else:
        plain = answers.choice_letter if kind == "letter" else answers.last_number
        answer = _READERS.get(reward, plain)(text)
        formatted = answer is not None
        correct = _same(answer, gold, kind)
        terms = {"answer": float(correct)}
    if correct:
        tier = "format_and_answer" if formatted else "answer_only"
    else:
        tier = "format_only" if formatted else "neither"
    return Score(sum(terms.values()), tier, {"answer": answer}, correct, terms)


def _same(answer: str | None, gold: str | None, kind: str) -> bool:
    """Letters are compared as letters, numbers and expressions by value. An empty or missing
    gold answer matches nothing."""
    if answer is None or not gold or kind == "number":
        return answers.equivalent(answer, gold)
    return answers.choice_letter(f"answer is {answer}") == gold.upper()


def written(reward: str, steps: str, answer: str, ends: str) -> str:
    """A worked solution in the grader's layout: the target of SFT and the reference solution.
    ends: its last line where the grader has no layout."""
    if reward == "xml":
        return f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{answer}\n</answer>"
    if reward == "r1_zero":
        return f"{steps} </think> <answer> {answer} </answer>"
    return f"{steps}\n{ends}"


def r1_zero_reward_fn(response: str, ground_truth: Any, fast: bool = True) -> dict[str, float]:
    """format_reward, answer_reward and reward, each 0 or 1. ground_truth: an answer, or a list
    of accepted ones."""
    return _three_rewards("r1_zero", response, ground_truth)


def question_only_reward_fn(
    response: str, ground_truth: Any, fast: bool = True
) -> dict[str, float]:
    """The same three numbers; the layout counts where an answer is stated."""
    return _three_rewards("question_only", response, ground_truth)


def _three_rewards(reward: str, response: str, ground_truth: Any) -> dict[str, float]:
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    scores = [grade(reward, response, str(gold), "number") for gold in accepted]
    right = float(any(score.correct for score in scores))
    return {
        "format_reward": float(scores[0].tier in FORMATTED),
        "answer_reward": right,
        "reward": right,
    }
