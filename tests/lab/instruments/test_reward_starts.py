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

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(held_out_requests=4, samples=2, sft_steps=(1, 2, 3, 12), width=16)


def plan() -> Any:
    """Four runs of two updates: the binary and the staircase reward from two starts."""
    for name, start, rl in reward_rows.plan_starts([0]):
        if start in ("base", "strong") and rl.shape in ("binary", "staircase"):
            yield name, start, RL(rl.shape, rl.baseline, updates=2, problems=2, group_size=3)


def test_requests_have_two_numbers_below_100() -> None:
    numbers = [
        number
        for problem in reward_starts.requests("train", 1000)
        for number in problem.gold["arguments"].values()
    ]
    assert {type(number) for number in numbers} == {int}
    assert all(0 <= number < 100 for number in numbers)


def calls_of(split: str, n: int) -> set[tuple[Any, ...]]:
    """(tool, number, number) of a split's requests."""
    golds = [problem.gold for problem in reward_starts.requests(split, n)]
    return {(gold["name"], *gold["arguments"].values()) for gold in golds}


def test_no_split_shares_a_pair_of_numbers_of_a_tool() -> None:
    assert not calls_of("train", 1000) & calls_of("test", 128)


def test_requests_call_every_tool() -> None:
    assert {name for name, *_ in calls_of("train", 1000)} == set(reward_starts.CALLED)


def test_fewer_requests_are_the_first_ones() -> None:
    few = reward_starts.requests("train", 9)
    many = reward_starts.requests("train", 1000)
    assert [p.messages for p in many[:9]] == [p.messages for p in few]


def test_the_vocabulary_spells_every_request(setting: Setting) -> None:
    for problem in setting.train[:200]:
        text = problem.messages[0]["content"]
        assert setting.tokenizer.decode(setting.tokenizer.encode(text)) == text


def test_every_correct_answer_is_exact(setting: Setting) -> None:
    for problem in setting.train[:200]:
        assert setting.task.score(problem, setting.task.gold(problem)).correct


@pytest.fixture(scope="module")
def trained(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    path = tmp_path_factory.mktemp("new") / "rows" / "rows.jsonl"
    return path, reward_rows.train(path, setting, plan(), 5, "reinforce")


def test_rows_have_every_request(trained: tuple[Path, Rows]) -> None:
    _, rows = trained
    runs = list(itertools.product(("base", "strong"), ("binary", "staircase")))
    assert [(row["start"], row["reward"]) for row in rows] == runs
    for row in rows:
        after = row["after"]
        assert len(after["greedy"]) == len(after["correct"]) == 4
        assert all(0 <= correct <= 2 for correct in after["correct"])
        assert sum(after["tiers"].values()) == 8


def test_rows_have_the_curves_of_their_updates(trained: tuple[Path, Rows]) -> None:
    _, rows = trained
    for row in rows:
        for values in row["curve"].values():
            assert len(values) == 1
            assert 0 <= values[0] <= 1


def test_the_rewards_of_a_start_begin_with_the_same_policy(trained: tuple[Path, Rows]) -> None:
    _, rows = trained
    assert rows[0]["before"] == rows[1]["before"]


def test_a_second_start_trains_only_what_was_cut(
    trained: tuple[Path, Rows], setting: Setting
) -> None:
    path, rows = trained
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
    batch = setting.sampled(policy, setting.train[:2], group_size=4, temperature=2.0, seed=1)
    seen = []
    real = reward_starts.losses.policy_gradient_loss

    def recorded(logprobs: torch.Tensor, *args: Any, **named: Any) -> Any:
        seen.append(logprobs)
        return real(logprobs, *args, **named)

    monkeypatch.setattr(reward_starts.losses, "policy_gradient_loss", recorded)
    reward_starts.backward(policy, batch, torch.ones(2, 4), 2.0)
    sampled = torch.tensor(batch.completions[0].logprobs)
    learned = seen[0][0, : len(sampled)].detach()
    torch.testing.assert_close(learned, sampled, rtol=1e-4, atol=1e-5)


def same_weights(a: GPT, b: GPT) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def test_only_rewards_that_differ_move_the_policy(setting: Setting) -> None:
    # after one step of SFT no answer is exact
    first = reward_starts.start_policies(setting, 0)["base"]
    moved = {}
    for shape in SHAPES:
        policy = copy.deepcopy(first)
        plan = RL(shape, updates=1, problems=2, group_size=3)
        (step,) = reward_rows.reinforce(setting, plan, policy, 0)
        moved[shape] = not same_weights(first, policy)
        assert moved[shape] == (step["live"] > 0)
    assert not moved["binary"]
