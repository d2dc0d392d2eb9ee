"""Metrics of a batch of rollouts: closed forms, and the same values however the batch is dealt to ranks."""

import math
from typing import Any

import pytest
import torch

from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.models.generate import Completion
from codechat.rl.advantages import live_completions
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score
from codechat.training.rl_session import CLIPPING, Meter, Rank, combine_ranks, rollout_metrics

TIERS = ("none", "some", "all")


def batch_of(rewards: list[list[float]], seed: int = 0) -> RolloutBatch:
    """Completion i has 1 + i tokens, a mask with a gap from three tokens on, and stops unless i is divisible by 3."""
    rng, flat = torch.Generator().manual_seed(seed), [r for group in rewards for r in group]
    completions = [
        Completion(
            list(range(1 + i)),
            [0.0 if t == 1 and i >= 2 else -float(x) for t, x in enumerate(torch.rand(1 + i, generator=rng))],
            "stop" if i % 3 else ("length", "context", "turns")[i // 3 % 3],
            [t != 1 for t in range(1 + i)] if i >= 2 else None,
        )
        for i in range(len(flat))
    ]
    scores = [Score(r, TIERS[(r > 0) + (r == 1)], {}, r == 1, terms={"close": r / 2}) for r in flat]
    problems = [Problem(str(p), [], None, "train") for p in range(len(rewards))]
    prompts, texts = [[1]] * len(rewards), [""] * len(flat)
    return RolloutBatch(problems, prompts, completions, texts, scores, len(rewards[0]))


BATCH = batch_of([[0.0, 1.0, 0.5], [0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])


def test_metrics_by_hand() -> None:
    found = rollout_metrics(BATCH, TIERS)
    written = 1 + 2 + sum(range(2, 12))  # a gap of one token from the third completion on
    nats = -sum(x for c in BATCH.completions for x in c.logprobs)
    assert found == pytest.approx(
        {
            "reward_mean": 7 / 12,
            "reward_std": math.sqrt(6 / 12 - (7 / 12) ** 2),
            "exact_match": 5 / 12,
            "frac_zero_std_groups": 1 / 2,
            "effective_groups": 2.0,
            "completion_tokens_mean": written / 12,
            "truncated_frac": 3 / 12,  # not the one whose last turn was used
            "entropy": nats / written,
            "tier/none": 3 / 12,
            "tier/some": 4 / 12,
            "tier/all": 5 / 12,
            "reward/close": 7 / 24,
        }
    )


def test_one_rank_has_the_numbers_of_diagnose() -> None:
    batch = batch_of(torch.rand(5, 7, generator=torch.Generator().manual_seed(0)).tolist())
    found, judged = rollout_metrics(batch, TIERS), diagnose.judge(batch.rewards, batch.correct, min_groups=1)
    names = ("reward_mean", "reward_std", "exact_match", "frac_zero_std_groups", "effective_groups")
    assert [found[name] for name in names] == [getattr(judged, name) for name in names]


def ranks_of(batch: RolloutBatch, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """What each rank gives of its groups."""
    mine = []
    with monkeypatch.context() as m:
        m.setattr(dist, "gather", lambda rank: mine.append(rank) or [rank])
        for groups in parts:
            rollout_metrics(batch.take(groups), TIERS)
    return mine


def test_ranks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in ([[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        assert combine_ranks(ranks_of(BATCH, parts, monkeypatch)) == pytest.approx(rollout_metrics(BATCH, TIERS))


@pytest.mark.parametrize("rewards, live", [([[1.0], [1.0], [0.0], [0.0]], 1.0), ([[1.0]] * 4, 0.0)])
def test_groups_of_one_are_judged_together(rewards: Any, live: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each rank's own rewards agree, or it has a single one."""
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        ranks = ranks_of(batch_of(rewards), parts, monkeypatch)
        found = combine_ranks(ranks)
        assert (found["effective_groups"], found["frac_zero_std_groups"]) == (live, 1 - live)
        with monkeypatch.context() as m:
            m.setattr(dist, "gather", lambda own, ranks=ranks: [r[0] for r in ranks])
            assert live_completions(ranks[0][0]).all() == bool(live)


def test_a_loops_own_values_are_combined_by_their_rule() -> None:
    ranks = [
        (BATCH.rewards, dict(a=(1.0, 1), d=(6.0, 4.0), e=(0.0, 0.0)), dict(b=2.0), dict(c=3.0)),
        (BATCH.rewards, dict(a=(2.0, 1), d=(3.0, 2.0), e=(0.0, 0.0)), dict(b=5.0), dict(c=-1.0)),
    ]
    found = combine_ranks(ranks)
    assert [found[name] for name in "abcde"] == [1.5, 7.0, 3.0, 1.5, 0.0]
    assert math.isnan(combine_ranks([ranks[0], (*ranks[1][:3], dict(c=math.nan))])["c"])


def test_a_nan_among_maxima_is_not_lost() -> None:
    for values in ((math.nan, 0.5), (0.5, math.nan), (math.nan, 0.5, math.nan, 0.25)):
        meter = Meter(CLIPPING)
        for value in values:
            meter.add(ratio_max=value, logprob_mismatch=torch.tensor(value))
            meter.read()
        assert math.isnan(meter.maxima["ratio_max"]) and math.isnan(meter.maxima["logprob_mismatch"])
