"""Rewards from several starts: the requests, what a run records, resuming, and what a reward's scale and baseline do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raising

from codechat.core.errors import ConfigError
from codechat.labs import reward_starts
from codechat.labs.reward_starts import SHAPES, Setting, StartsConfig
from codechat.models import optim
from codechat.rl.advantages import group_advantages

TINY: dict[str, Any] = dict(
    seeds=(0,), starts=("base", "strong"), rewards=("binary", "staircase"), steps=2, sft_steps=(1, 2, 3, 12), problems=2, group_size=3, held_out=4, samples=2, width=16,
)  # fmt: skip
KEPT = ("seed", "start", "reward", "baseline", "before", "after", "curve")


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What another execution repeats: all but the time."""
    return {name: row[name] for name in KEPT}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return path, reward_starts.compare_rewards(StartsConfig(out=str(path), **TINY))


def test_requests_have_two_numbers_below_100_and_no_split_shares_a_pair_of_a_tool() -> None:
    train, test = reward_starts.requests("train", 1000), reward_starts.requests("test", 128)
    pairs = [{(p.gold["name"], *p.gold["arguments"].values()) for p in part} for part in (train, test)]
    assert not pairs[0] & pairs[1] and {name for name, *_ in pairs[0]} == set(reward_starts.CALLED)
    assert all(type(v) is int and 0 <= v < 100 for p in train for v in p.gold["arguments"].values())
    assert [p.messages for p in train[:9]] == [p.messages for p in reward_starts.requests("train", 9)]


def test_the_vocabulary_spells_every_request_and_every_correct_answer_is_exact() -> None:
    setting = Setting(StartsConfig(**TINY))
    for problem in setting.train[:200]:
        text = problem.messages[0]["content"]
        assert setting.tokenizer.decode(setting.tokenizer.encode(text)) == text
        assert setting.task.score(problem, setting.task.gold(problem)).correct


def test_a_run_records_every_held_out_request_and_every_step(rows: tuple[Path, list[dict[str, Any]]]) -> None:
    path, made = rows
    assert [(r["start"], r["reward"]) for r in made] == [
        (s, r) for s in ("base", "strong") for r in ("binary", "staircase")
    ]
    for row in made:
        assert len(row["after"]["greedy"]) == len(row["after"]["correct"]) == 4
        assert all(0 <= c <= 2 for c in row["after"]["correct"]) and sum(row["after"]["tiers"].values()) == 8
        assert {len(v) for v in row["curve"].values()} == {1} and all(0 <= v[0] <= 1 for v in row["curve"].values())
    assert made[0]["before"] == made[1]["before"]  # one start, whatever the reward
    assert [json.loads(line) for line in path.read_text().splitlines()] == made


def test_finished_runs_are_skipped_and_a_cut_row_is_trained_again(
    rows: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = rows
    again, lines = tmp_path / "again.jsonl", path.read_text().splitlines(keepends=True)
    again.write_text("".join(lines[:2]) + lines[2][:50])
    trained, real = [], reward_starts.train_one
    monkeypatch.setattr(reward_starts, "train_one", lambda s, *run: trained.append(run) or real(s, *run))
    found = reward_starts.compare_rewards(StartsConfig(out=str(again), **TINY))
    assert trained == [(0, "strong", "binary", "mean"), (0, "strong", "staircase", "mean")]
    assert list(map(kept, found)) == list(map(kept, made))
    assert reward_starts.compare_rewards(StartsConfig(out=str(again), **TINY)) == found and len(trained) == 2


def test_other_settings_do_not_enter_the_same_file(rows: tuple[Path, list[dict[str, Any]]]) -> None:
    before = rows[0].read_bytes()
    with raising(ConfigError, "settings", "--out"):
        reward_starts.compare_rewards(StartsConfig(out=str(rows[0]), **TINY | dict(lr=0.5)))
    assert rows[0].read_bytes() == before


def test_seeds_are_outermost() -> None:
    plan = reward_starts.planned(StartsConfig(seeds=(3, 4)))
    assert [run[0] for run in plan] == [3] * 16 + [4] * 16 and len(set(plan)) == 32


@pytest.mark.parametrize(
    "wrong", [dict(starts=("bad",)), dict(rewards=("binry",)), dict(baselines=("none",)), dict(sft_steps=(3, 2, 9, 10))]
)
def test_what_does_not_exist_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StartsConfig(**wrong)


def test_only_rewards_that_differ_move_the_policy() -> None:
    setting = Setting(StartsConfig(**TINY | dict(steps=1)))
    first = reward_starts.start_policies(setting, 0)["base"]  # after one step of SFT no answer is exact
    moved = {}
    for shape in SHAPES:
        policy = reward_starts.copy.deepcopy(first)
        (step,) = reward_starts.reinforce(setting, policy, shape, "mean", 0)
        moved[shape] = any(not torch.equal(a, b) for a, b in zip(first.parameters(), policy.parameters()))
        assert moved[shape] == (step["live"] > 0)
    assert not moved["binary"]


def test_adamw_divides_a_constant_factor_of_the_reward_out() -> None:
    """Two steps with gradients g and 5 g end at the same weights: the reason why no learning rate per reward is needed."""
    torch.manual_seed(0)
    gradients, ends = torch.randn(2, 4, 4), []
    for factor in (1.0, 5.0):
        layer = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(layer.weight)
        (optimizer,) = optim.build(layer, lr=0.1, weight_decay=0.0)
        for g in gradients:
            layer.weight.grad = factor * g
            optimizer.step()
        ends.append(layer.weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


def test_zscore_gives_every_group_with_variance_the_same_weight() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 0], [0.35, 0.55, 0.35, 0.55], [1.0, 1, 1, 1]])
    norms = group_advantages(rewards, "zscore").norm(dim=1)
    torch.testing.assert_close(norms, torch.tensor([3.0, 3.0, 0.0]).sqrt(), rtol=1e-4, atol=0)


def test_the_command_reads_its_flags_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, flags = tmp_path / "new" / "rows.jsonl", []
    for name, value in (TINY | dict(starts=("base",), rewards=("tiered",))).items():
        flags += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    reward_starts.main(["--out", str(out), *flags])
    (row,) = map(json.loads, out.read_text().splitlines())
    assert reward_starts.name_of(row) == (0, "base", "tiered", "mean")
    assert "0 base tiered mean" in capsys.readouterr().out
