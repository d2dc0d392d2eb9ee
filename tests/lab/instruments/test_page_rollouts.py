"""Rows of the x-ray page: answers of a small policy, token by token."""

from typing import Any

import pytest

from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.tasks import load
from codechat.tasks.base import Problem, Score
from codechat.text import tokenizer
from codechat_lab.instruments.page_rollouts import page_rows

GROUP = 4


def rows_of(reward: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Two requests to an untrained policy; `reward` scores the text of an answer."""
    tok = tokenizer.load("python:1024")
    shape = GPTConfig(depth=1, n_embd=24, n_head=2, block_size=64, vocab_size=tok.n_vocab)
    task = load("funcall")

    def score(problem: Problem, completion: str) -> Score:
        return Score(reward=reward(completion), tier="exact", parts={}, correct=False)

    monkeypatch.setattr(task, "score", score)
    gold = {"name": "double", "arguments": {"n": 3}}
    asked = [
        Problem(f"test-{n}", [{"role": "user", "content": f"Double {n}."}], gold, "test")
        for n in (3, 4)
    ]
    return page_rows(
        GPT(shape, seed=0), task, asked, tok, step=5, max_new_tokens=6, group_size=GROUP
    )


def test_the_shares_of_a_group_whose_rewards_differ_sum_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for row in rows_of(lambda text: (len(text) % 3) / 2, monkeypatch):
        rewards = {answer["reward"] for answer in row["rollouts"]}
        assert len(rewards) > 1
        total = sum(sum(answer["share"]) for answer in row["rollouts"])
        assert total == pytest.approx(1, abs=0.01)


def test_a_group_of_equal_rewards_gives_no_token_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in rows_of(lambda text: 1.0, monkeypatch):
        assert not any(any(answer["share"]) for answer in row["rollouts"])


def test_every_token_of_an_answer_has_a_text_a_probability_and_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for row in rows_of(lambda text: 0.5, monkeypatch):
        assert len(row["rollouts"]) == GROUP
        for answer in row["rollouts"]:
            assert len(answer["tokens"]) == len(answer["p"]) == len(answer["share"])
            assert all(0 < p <= 1 for p in answer["p"])
