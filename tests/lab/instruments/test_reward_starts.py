"""Rewards from several starts: the requests, what a run records, resuming, and what a reward's
scale and baseline do."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import reward_rows
import torch
from reward_rows import RL

from codechat.models.gpt import GPT
from codechat_lab.instruments import reward_starts
from codechat_lab.instruments.reward_starts import SHAPES, Setting

TINY: dict[str, Any] = dict(held_out_requests=4, samples=2, sft_steps=(1, 2, 3, 12), width=16)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(**TINY)


def plan() -> Any:
    """Four runs of two updates: the binary and the staircase reward from two starts."""
    for name, start, rl in reward_rows.plan_starts([0]):
        if start in ("base", "strong") and rl.shape in ("binary", "staircase"):
            yield name, start, RL(rl.shape, rl.baseline, updates=2, problems=2, group_size=3)


def test_requests_have_two_numbers_below_100_and_no_split_shares_a_pair_of_a_tool(
    setting: Setting,
) -> None:
    train = reward_starts.requests("train", 1000)
    test = reward_starts.requests("test", 128)
    pairs = [
        {(p.gold["name"], *p.gold["arguments"].values()) for p in part} for part in (train, test)
    ]
    assert not pairs[0] & pairs[1]
    assert {name for name, *_ in pairs[0]} == set(reward_starts.CALLED)
    assert all(type(v) is int and 0 <= v < 100 for p in train for v in p.gold["arguments"].values())
    assert [p.messages for p in train[:9]] == [
        p.messages for p in reward_starts.requests("train", 9)
    ]
    # the vocabulary spells every request, and every correct answer is exact
    for problem in setting.train[:200]:
        text = problem.messages[0]["content"]
        assert setting.tokenizer.decode(setting.tokenizer.encode(text)) == text
        assert setting.task.score(problem, setting.task.gold(problem)).correct


def test_rows_have_every_request_and_a_second_start_trains_only_what_was_cut(
    setting: Setting, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = reward_rows.train(path, setting, plan(), 5, "reinforce")
    runs = list(itertools.product(("base", "strong"), ("binary", "staircase")))
    assert [(r["start"], r["reward"]) for r in rows] == runs
    for row in rows:
        assert len(row["after"]["greedy"]) == len(row["after"]["correct"]) == 4
        assert all(0 <= c <= 2 for c in row["after"]["correct"])
        assert sum(row["after"]["tiers"].values()) == 8
        assert {len(v) for v in row["curve"].values()} == {1}
        assert all(0 <= v[0] <= 1 for v in row["curve"].values())
    assert rows[0]["before"] == rows[1]["before"]  # one start, whatever the reward
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:50])
    again = reward_rows.train(path, setting, plan(), 5, "reinforce")
    assert again[:3] == rows[:3]
    assert again[3] | {"seconds": 0} == rows[3] | {"seconds": 0}
    assert [json.loads(line) for line in path.read_text().splitlines()] == again


def test_the_loss_is_taken_at_the_temperature_of_sampling(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probabilities of the loss are those of the sampler: the ratio of the update is 1."""
    policy = GPT(setting.model, seed=0)
    seen = []
    batch = setting.sampled(policy, setting.train[:2], group_size=4, temperature=2.0, seed=1)
    real = reward_starts.losses.policy_gradient_loss
    monkeypatch.setattr(
        reward_starts.losses,
        "policy_gradient_loss",
        lambda *a, **k: seen.append(a) or real(*a, **k),
    )
    reward_starts.backward(policy, batch, torch.ones(2, 4), 2.0)
    logprobs, sampled = seen[0][0], torch.tensor(batch.completions[0].logprobs)
    torch.testing.assert_close(logprobs[0, : len(sampled)].detach(), sampled, rtol=1e-4, atol=1e-5)


def test_only_rewards_that_differ_move_the_policy(setting: Setting) -> None:
    first = reward_starts.start_policies(setting, 0)[
        "base"
    ]  # after one step of SFT no answer is exact
    moved = {}
    for shape in SHAPES:
        policy = copy.deepcopy(first)
        (step,) = reward_rows.reinforce(
            setting, RL(shape, updates=1, problems=2, group_size=3), policy, 0
        )
        moved[shape] = any(
            not torch.equal(a, b) for a, b in zip(first.parameters(), policy.parameters())
        )
        assert moved[shape] == (step["live"] > 0)
    assert not moved["binary"]
