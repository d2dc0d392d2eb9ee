"""Rewards under the names of other projects: their rules by hand, oddities included."""

from __future__ import annotations

import inspect

import pytest

from codechat.tasks.reasoning import named_rewards as named
from codechat.tasks.reasoning import rewards

GOOD = "<reasoning>\n3 + 4 = 7\n</reasoning>\n<answer>\n7\n</answer>\n"
FIVE = ("xmlcount", "soft_format", "strict_format", "int", "correctness")


def paid(text: str, gold: str = "7") -> list[float]:
    """The five rewards of one completion, in the order of FIVE."""
    completions, prompts = [[{"role": "assistant", "content": text}]], [[{"role": "user", "content": "?"}]]
    functions = [getattr(named, f"{name}_reward_func") for name in FIVE]
    return [
        f(prompts=prompts, completions=completions, answer=[gold])[0]
        if f is named.correctness_reward_func
        else f(completions, prompts=prompts, answer=[gold])[0]
        for f in functions
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        # a dot matches no line end, so a text of the requested layout never earns the soft reward
        (GOOD, [0.5, 0.0, 0.5, 0.5, 2.0]),
        (GOOD.replace("\n7\n", "\n8\n"), [0.5, 0.0, 0.5, 0.5, 0.0]),
        # without the last line end: no strict reward, and the whole text counts as a tail
        (GOOD[:-1], [0.5 - 0.001 * len(GOOD[:-1]) + 0.001, 0.0, 0.0, 0.5, 2.0]),
        (GOOD + "tail", [0.5 - 2 * 0.004, 0.0, 0.0, 0.5, 2.0]),
        # two lines of reasoning
        (GOOD.replace("= 7", "\n= 7"), [0.5, 0.0, 0.0, 0.5, 2.0]),
        ("<reasoning>a</reasoning><answer>7.0</answer>", [0.0, 0.5, 0.0, 0.0, 0.0]),
        ("7", [0.0, 0.0, 0.0, 0.5, 2.0]),  # no tag at all: the text is the answer
        ("", [0.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_the_five_rewards_of_the_example_by_hand(text: str, expected: list[float]) -> None:
    assert paid(text) == pytest.approx(expected)


def test_a_layout_on_one_line_is_soft_only() -> None:
    one_line = GOOD.replace("\n", "")
    assert paid(one_line)[1:3] == [0.5, 0.0] and rewards.grade_xml(GOOD, "7", "number").reward == 4.0


@pytest.mark.parametrize(
    "text, gold, expected",
    [
        ("3 + 4 </think> <answer> 7 </answer>", "7", (1, 1, 1)),
        ("3 + 4 </think> <answer> 8 </answer>", "7", (1, 0, 0)),
        ("3 + 4 </think>\n<answer> 7 </answer>", "7", (0, 0, 0)),  # one space, no line end
        ("</think> <answer> 7", "7", (0, 0, 0)),
        ("</think> <answer> \\boxed{7} </answer>", 7, (1, 1, 1)),
        ("</think> <answer> \\boxed{ </answer>", "7", (1, 0, 0)),
        ("</think> <answer> 0.5 </answer>", ["3", "\\frac{1}{2}"], (1, 1, 1)),
        ("</think> <answer> 7 </answer> and so on", "7", (1, 0, 0)),  # what follows belongs to the answer there
        ("</think> <answer> 8 </answer> </think> <answer> 7 </answer>", "7", (1, 1, 1)),
    ],
)
def test_r1_zero_reward_by_hand(text: str, gold: object, expected: tuple[int, int, int]) -> None:
    found = named.r1_zero_reward_fn(text, gold)  # type: ignore[arg-type]
    assert (found["format_reward"], found["answer_reward"], found["reward"]) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("so \\boxed{7}", (1, 1, 1)),
        ("so \\boxed{8}", (1, 0, 0)),
        ("The answer is 7.", (0, 0, 0)),
        ("#### 7", (0, 0, 0)),
        ("\\boxed{7", (0, 0, 0)),
    ],
)
def test_question_only_reward_by_hand(text: str, expected: tuple[int, int, int]) -> None:
    assert tuple(named.question_only_reward_fn(text, "7").values()) == expected


def test_signatures_are_those_of_the_projects() -> None:
    for name in ("r1_zero_reward_fn", "question_only_reward_fn"):
        assert list(inspect.signature(getattr(named, name)).parameters) == ["response", "ground_truth", "fast"]
    for name in FIVE:
        first = list(inspect.signature(getattr(named, f"{name}_reward_func")).parameters)
        assert first == (
            ["prompts", "completions", "answer", "kwargs"] if name == "correctness" else ["completions", "kwargs"]
        )
    assert named.extract_hash_answer("so\n#### 1,200 ") == "1,200" and named.extract_hash_answer("7") is None
