"""Rates of RL at equal compute: the plan, what a run records, resuming, and settings that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raising

from codechat.core.errors import ConfigError
from codechat.labs import rates
from codechat.labs.rates import RatesConfig

TINY: dict[str, Any] = dict(
    seeds=(0,), lrs=(1e-3,), group_sizes=(2, 4), temperatures=(1.0, 2.0), completions=16, per_update=8, held_out=4, samples=2, width=16,
)  # fmt: skip


def kept(row: dict[str, Any]) -> dict[str, Any]:
    """What another execution repeats: all but the time."""
    return {name: value for name, value in row.items() if name != "seconds"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "SFT_STEPS", (1, 2, 3, 4))
        path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        return path, rates.try_rates(RatesConfig(out=str(path), **TINY))


def test_temperature_varies_at_the_middle_and_every_run_has_the_same_completions() -> None:
    cfg = RatesConfig(seeds=(3, 4))
    plan = rates.planned(cfg)
    assert len(plan) == len(set(plan)) == 2 * 11 and [run[0] for run in plan] == [3] * 11 + [4] * 11
    assert {run[1:3] for run in plan if run[3] != 1.0} == {(1e-3, 8)} and {run[2] for run in plan} == {2, 8, 24}
    assert all(cfg.updates * (cfg.per_update // run[2]) * run[2] == cfg.completions for run in plan)


def test_a_run_records_every_held_out_request_and_its_curve(made: tuple[Path, list[dict[str, Any]]]) -> None:
    path, rows = made
    assert [rates.name_of(row) for row in rows] == [(0, 1e-3, 2, 1.0), (0, 1e-3, 4, 1.0), (0, 1e-3, 4, 2.0)]
    for row in rows:
        assert row["before"] == rows[0]["before"] and row["updates"] == 2
        assert len(row["after"]["greedy"]) == len(row["after"]["correct"]) == 4
        assert all(0 <= c <= 2 for c in row["after"]["correct"])
        assert {len(values) for values in row["curve"].values()} == {1} and all(
            0 <= v[0] <= 1 for v in row["curve"].values()
        )
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_finished_runs_are_skipped_and_a_cut_row_is_trained_again(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = made
    again, lines = tmp_path / "again.jsonl", path.read_text().splitlines(keepends=True)
    again.write_text("".join(lines[:2]) + lines[2][:50])
    monkeypatch.setattr(rates, "SFT_STEPS", (1, 2, 3, 4))
    found = rates.try_rates(RatesConfig(out=str(again), **TINY))
    assert list(map(kept, found)) == list(map(kept, rows)) and found[:2] == rows[:2]
    with raising(ConfigError, "settings", "--out"):
        rates.try_rates(RatesConfig(out=str(again), **TINY | dict(held_out=5)))


def test_the_loss_is_taken_at_the_temperature_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the loss are those of the sampler: the ratio of the update is 1."""
    cfg = RatesConfig(**TINY)
    setting = rates.setting_of(cfg)
    policy, seen = rates.GPT(setting.model, seed=0), []
    batch = setting.sampled(policy, setting.train[:2], group_size=4, temperature=2.0, seed=1)
    batch.scores[0] = type(batch.scores[0])(1.0, "full", {}, True)  # a group with variance
    real = rates.losses.policy_gradient_loss
    monkeypatch.setattr(rates.losses, "policy_gradient_loss", lambda *a, **k: seen.append(a) or real(*a, **k))
    rates.backward(policy, batch, 2.0)
    ((logprobs, advantages, _, _),) = seen
    n = len(batch.completions[0].ids)
    sampled = torch.tensor(batch.completions[0].logprobs)
    torch.testing.assert_close(logprobs[0, :n].detach(), sampled, rtol=1e-4, atol=1e-5)
    assert advantages[0].eq(0.75).all()


@pytest.mark.parametrize("wrong", [dict(group_sizes=(5,)), dict(group_sizes=(1,)), dict(completions=100)])
def test_settings_that_do_not_divide_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RatesConfig(**wrong)
