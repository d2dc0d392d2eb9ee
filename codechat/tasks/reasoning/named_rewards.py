"""Reward functions of other projects under their own names, with their signatures and their rules.

    r1_zero_reward_fn(response, ground_truth, fast=True)            Dr. GRPO's grader (sail-sg/understand-r1-zero), which
    question_only_reward_fn(response, ground_truth, fast=True)      CS336's alignment assignment uses too
    xmlcount_reward_func(completions, **kwargs) and four more       a GRPO example on GSM8K (W. Brown, 2025) that TRL
                                                                    users have copied since

They are for comparisons and for scripts that expect these names. `rewards` has the graders that this project trains on;
docs/tasks.md has the differences. The five of the example keep its oddities. A dot matches no line end there, so reasoning
of two lines earns neither layout reward, and no text earns both: the requested layout is "strict", one on a single line is
"soft". Without a line end behind </answer>, the whole text counts as what follows it.

One difference is ours: whether two answers are equal is decided by `answers.equivalent` instead of sympy, which
evaluates text with Python. `fast` is accepted and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from codechat.tasks.reasoning import answers

Completions = Sequence[Sequence[Mapping[str, str]]]  # per completion its messages, as TRL passes them
_STRICT = re.compile(r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
Truth = str | float | list[str]


def r1_zero_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    """format_reward, answer_reward and reward, each 0 or 1. The layout counts where "</think> <answer>" (one space) and "</answer>" occur."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return _rewards(False, False)
    answer: str | None = response.split("<answer>")[-1].replace("</answer>", "")
    if "\\boxed" in response.split("<answer>")[-1]:
        answer = answers.boxed(answer or "")
    return _rewards(True, _is_any_of(answer, ground_truth))


def question_only_reward_fn(response: str, ground_truth: Truth, fast: bool = True) -> dict[str, float]:
    r"""The same three numbers; the layout counts where an answer is in \boxed{...}."""
    answer = answers.boxed(response)
    return _rewards(answer is not None, _is_any_of(answer, ground_truth))


def _is_any_of(answer: str | None, ground_truth: Truth) -> bool:
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return any(answers.equivalent(answer, str(truth)) for truth in truths)


def _rewards(formatted: bool, correct: bool) -> dict[str, float]:
    return {"format_reward": float(formatted), "answer_reward": float(correct), "reward": float(correct)}


def extract_xml_answer(text: str) -> str:
    """What stands behind the last <answer>, up to the next </answer>; the whole text where there is none."""
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def extract_hash_answer(text: str) -> str | None:
    """What stands behind the first "####" of a GSM8K solution."""
    return text.split("####")[1].strip() if "####" in text else None


def correctness_reward_func(
    prompts: Sequence[Any], completions: Completions, answer: Sequence[str], **kwargs: Any
) -> list[float]:
    """2.0 where the answer is the gold answer, as text."""
    found = [extract_xml_answer(text) for text in _texts(completions)]
    return [2.0 if mine == gold else 0.0 for mine, gold in zip(found, answer)]


def int_reward_func(completions: Completions, **kwargs: Any) -> list[float]:
    """0.5 where the answer consists of digits."""
    return [0.5 if extract_xml_answer(text).isdigit() else 0.0 for text in _texts(completions)]


def strict_format_reward_func(completions: Completions, **kwargs: Any) -> list[float]:
    """0.5 for exactly the requested layout, each tag on a line, with a line end behind the last."""
    return [0.5 if _STRICT.match(text) else 0.0 for text in _texts(completions)]


def soft_format_reward_func(completions: Completions, **kwargs: Any) -> list[float]:
    """0.5 where the text begins with both parts, each on one line."""
    return [0.5 if _SOFT.match(text) else 0.0 for text in _texts(completions)]


def xmlcount_reward_func(completions: Completions, **kwargs: Any) -> list[float]:
    """0.125 for each of four tags that occurs once in its place, less 0.001 per character behind the last one."""
    return [count_xml(text) for text in _texts(completions)]


def count_xml(text: str) -> float:
    count = 0.125 * (text.count("<reasoning>\n") == 1) + 0.125 * (text.count("\n</reasoning>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        count += 0.125 - 0.001 * len(text.split("\n</answer>\n")[-1])
    if text.count("\n</answer>") == 1:
        count += 0.125 - 0.001 * (len(text.split("\n</answer>")[-1]) - 1)
    return count


def _texts(completions: Completions) -> list[str]:
    return [completion[0]["content"] for completion in completions]
