"""Packed rollouts: a group shares its prompt and nothing else; what is trained on is exactly
what was sampled. Metrics of a batch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_models import perturbed, randomise

from codechat.distributed import dist
from codechat.evaluation import diagnose
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.fast import attention, device
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.reinforce import ReinforceConfig
from codechat.rl import advantages, losses, rollout
from codechat.rl.advantages import live_completions
from codechat.rl.engines import Engine, RolloutSampler
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score
from codechat.tasks.toy import ToyTask
from codechat.text import tokenizer
from codechat.training.step_metrics import (
    CLIPPING,
    Mean,
    Meter,
    StepMetrics,
    combine_ranks,
    rollout_metrics,
)


@pytest.fixture(scope="module")
def policy() -> GPT:
    return perturbed(GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257)))


class Letters:
    """Reward: share of even bytes. Enough structure for advantages of every sign."""

    name = "letters"
    tiers = ("some",)
    max_reward = 1.0
    no_stop = True

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        share = sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))
        return Score(share, "some", {}, share == 1)


@pytest.fixture(scope="module")
def batch(policy: GPT) -> RolloutBatch:
    problems = [
        Problem(str(i), [{"role": "user", "content": "x" * (3 + 5 * i)}], None, "train")
        for i in range(3)
    ]
    how = dict(group_size=4, max_new_tokens=7, seed=3)
    with torch.no_grad():
        return rollout.collect(
            policy, Letters(), problems, tokenizer.load("bytes"), "reserved", **how
        )


def test_completions_that_were_cut_off_can_teach_nothing(policy: GPT, batch: RolloutBatch) -> None:
    ended = [
        replace(c, stop="stop" if i % 3 else "length") for i, c in enumerate(batch.completions)
    ]
    silent = replace(batch, completions=ended).without_cut_off()
    assert silent.n_tokens == sum(len(c.ids) for i, c in enumerate(ended) if i % 3)
    assert torch.equal(silent.mask().any(1), torch.tensor([i % 3 > 0 for i in range(len(ended))]))
    (packed,) = rollout.pack(silent, row_tokens=4096, rows=4)
    assert packed.numbers.tolist() == [i for i in range(len(ended)) if i % 3]
    assert torch.equal(silent.rewards, batch.rewards)  # they still count for the baseline
    none = replace(batch, completions=[replace(c, stop="length") for c in ended]).without_cut_off()
    assert not list(rollout.pack(none, row_tokens=4096, rows=4))


def plain_gradient(policy: GPT, batch: RolloutBatch, advantage: torch.Tensor) -> list[torch.Tensor]:
    """The loss and its gradients, one unpacked sequence at a time; what an environment said is
    context only."""
    policy.zero_grad()
    total = torch.zeros(())
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // batch.group_size]
        ids = torch.tensor([prompt + completion.ids])
        targets = torch.full_like(ids[:, 1:], -100)
        targets[:, len(prompt) - 1 :] = torch.where(
            torch.tensor([completion.written]), ids[:, len(prompt) :], -100
        )
        logprobs, _ = policy.token_logprobs(ids[:, :-1], targets)
        one = advantage.view(-1)[i].expand_as(logprobs)
        loss = losses.policy_gradient_loss(logprobs, one, targets >= 0, count=batch.n_tokens)
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in policy.parameters())]


def packed_gradient(
    policy: GPT, batch: RolloutBatch, advantage: torch.Tensor, **how: int
) -> list[torch.Tensor]:
    """The same, packed; completions without advantage are left out."""
    policy.zero_grad()
    total = torch.zeros(())
    for packed in rollout.pack(batch, advantage != 0, **how):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, **packed.where())
        advantages = advantage.view(-1, 1)[packed.numbers]
        loss = losses.policy_gradient_loss(
            packed.unpack(logprobs),
            advantages,
            packed.mask(),
            count=batch.n_tokens,
        )
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in policy.parameters())]


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)


def test_neither_packing_nor_the_order_of_groups_changes_loss_and_gradient(
    policy: GPT, batch: RolloutBatch
) -> None:
    advantage = advantages.group_advantages(batch.rewards)
    order = [2, 0, 1]
    assert advantage.abs().max() > 0.05
    plain = plain_gradient(policy, batch, advantage)
    moved = batch.take(order)
    assert moved.texts == [batch.texts[p * 4 + g] for p in order for g in range(4)]
    for row_tokens, rows in ((512, 8), (64, 1), (40, 2)):
        how = dict(row_tokens=row_tokens, rows=rows)
        assert_close(packed_gradient(policy, batch, advantage, **how), plain)
        assert_close(packed_gradient(policy, moved, advantage[order], **how), plain)


def test_unpacking_puts_every_target_back_in_its_place(policy: GPT, batch: RolloutBatch) -> None:
    """Values at the targets as a row per completion, whatever the packing; scores of a whole
    batch equal the sampled ones."""
    for how in (dict(row_tokens=512, rows=8), dict(row_tokens=40, rows=2)):
        for packed in rollout.pack(batch, **how):
            at = packed.numbers
            C = packed.longest
            assert torch.equal(packed.mask(), batch.mask()[at, :C])
            ids = packed.unpack(packed.targets)
            assert [row[on].tolist() for row, on in zip(ids, packed.mask())] == [
                batch.completions[i].ids for i in at
            ]
        scored = rollout.score_logprobs(policy, batch, temperature=1.0, **how)
        torch.testing.assert_close(scored, batch.logprobs(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "cut", [dict(top_k=20), dict(top_k=5), dict(top_p=0.5), dict(top_k=9, temperature=1.7)], ids=str
)
def test_equal_weights_have_importance_weights_of_one_under_truncation(cut: dict[str, Any]) -> None:
    """Of 64 ids; the mean was 0.83 at top-k 20 and 0.50 at 5. In any packing, of parts and of
    joined batches."""
    policy = randomise(
        GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=64, n_tags=0)), 0.25
    )
    prompts = [[1, 2, 3], [4, 5], [6]]
    problems = [Problem(str(i), [], None, "train") for i in range(3)]

    def drawn(seed: int) -> RolloutBatch:
        found = generate.sample(
            policy,
            prompts,
            max_new_tokens=20,
            samples_per_prompt=8,
            stop=[[7], [9]],
            seed=seed,
            note_kept=True,
            **cut,
        )
        return RolloutBatch(
            problems, prompts, found, [""] * 24, [Score(0.0, "x", {}, False)] * 24, 8
        )

    whole = rollout.join([drawn(0), drawn(1)]).take([5, 0, 3, 1])
    for row_tokens, rows in ((512, 8), (40, 2)):
        scored = rollout.score_logprobs(
            policy,
            whole,
            temperature=cut.get("temperature", 1.0),
            row_tokens=row_tokens,
            rows=rows,
        )
        torch.testing.assert_close(scored, whole.logprobs(), atol=1e-5, rtol=0)
        weights, stats = losses.importance_weights(scored, whole.logprobs(), whole.mask(), 2.0)
        assert weights[whole.mask()].mean() == pytest.approx(1, abs=1e-6)
        assert stats["mismatch_kl"] < 1e-6


def test_rows_have_one_shape_in_a_compiled_run(
    policy: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for the longest prompt of all problems, whichever a step draws; on a CPU rows
    are as long as they need to be."""
    task = ToyTask()
    tok = tokenizer.load("bytes")
    short = task.problems("train")
    long = replace(short[0], messages=[dict(short[0].messages[0], content="x" * 30)])
    cfg = ReinforceConfig(
        task="toy", group_size=3, max_new_tokens=4, row_tokens=16, rows=2, tags="text"
    )

    def shapes() -> list[set[tuple[int, ...]]]:
        sample = RolloutSampler(cfg, Engine(), policy, task, [*short, long], tok)
        found = []
        for at in (0, len(short)):
            batch = sample(at, 1, seed=at)
            how = rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, torch.device("cpu"))
            batches = (batch, rollout.join([batch, batch]))
            found.append({tuple(p.ids.shape) for b in batches for p in rollout.pack(b, **how)})
        return found

    first, second = shapes()
    assert first != second
    assert max(T for _, T in first) < max(T for _, T in second) < 64
    monkeypatch.setattr(device, "CPU_KINDS", ())
    assert shapes() == [{(2, attention.BLOCK)}] * 2


TIERS = ("none", "some", "all")


def batch_of(rewards: list[list[float]], seed: int = 0) -> RolloutBatch:
    """Completion i has 1 + i tokens, a mask with a gap from three tokens on, and stops unless i
    is divisible by 3."""
    rng = torch.Generator().manual_seed(seed)
    flat = [r for group in rewards for r in group]
    completions = [
        Completion(
            list(range(1 + i)),
            [
                0.0 if t == 1 and i >= 2 else -float(x)
                for t, x in enumerate(torch.rand(1 + i, generator=rng))
            ],
            "stop" if i % 3 else ("length", "context", "turns")[i // 3 % 3],
            [t != 1 for t in range(1 + i)] if i >= 2 else None,
        )
        for i in range(len(flat))
    ]
    scores = [Score(r, TIERS[(r > 0) + (r == 1)], {}, r == 1, terms={"close": r / 2}) for r in flat]
    problems = [Problem(str(p), [], None, "train") for p in range(len(rewards))]
    prompts = [[1]] * len(rewards)
    texts = [""] * len(flat)
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
    found = rollout_metrics(batch, TIERS)
    judged = diagnose.judge(batch.rewards, batch.correct, min_groups=1)
    names = ("reward_mean", "reward_std", "exact_match", "frac_zero_std_groups", "effective_groups")
    assert [found[name] for name in names] == [getattr(judged, name) for name in names]


def ranks_of(
    batch: RolloutBatch, parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> list[StepMetrics]:
    mine = []
    with monkeypatch.context() as m:
        m.setattr(dist, "gather", lambda rank: mine.append(rank) or [rank])
        for groups in parts:
            rollout_metrics(batch.take(groups), TIERS)
    return mine


def test_ranks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in ([[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        assert combine_ranks(ranks_of(BATCH, parts, monkeypatch)) == pytest.approx(
            rollout_metrics(BATCH, TIERS)
        )


@pytest.mark.parametrize("rewards, live", [([[1.0], [1.0], [0.0], [0.0]], 1.0), ([[1.0]] * 4, 0.0)])
def test_groups_of_one_are_judged_together(
    rewards: Any, live: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each rank's own rewards agree, or it has a single one."""
    for parts in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]):
        ranks = ranks_of(batch_of(rewards), parts, monkeypatch)
        found = combine_ranks(ranks)
        assert (found["effective_groups"], found["frac_zero_std_groups"]) == (live, 1 - live)
        with monkeypatch.context() as m:
            m.setattr(dist, "gather", lambda own, ranks=ranks: [rank.rewards for rank in ranks])
            assert live_completions(ranks[0].rewards).all() == bool(live)


def test_a_loops_own_values_are_combined_by_their_rule() -> None:
    one = StepMetrics(
        BATCH.rewards,
        means={"a": Mean(1.0, 1), "d": Mean(6.0, 4), "e": Mean(0.0, 0)},
        sums={"b": 2.0},
        maxima={"c": 3.0},
    )
    other = StepMetrics(
        BATCH.rewards,
        means={"a": Mean(2.0, 1), "d": Mean(3.0, 2), "e": Mean(0.0, 0)},
        sums={"b": 5.0},
        maxima={"c": -1.0},
    )
    found = combine_ranks([one, other])
    assert [found[name] for name in "abcde"] == [1.5, 7.0, 3.0, 1.5, 0.0]
    assert math.isnan(combine_ranks([one, replace(other, maxima={"c": math.nan})])["c"])


def test_a_nan_among_maxima_is_not_lost() -> None:
    for values in ((math.nan, 0.5), (0.5, math.nan), (math.nan, 0.5, math.nan, 0.25)):
        meter = Meter(CLIPPING)
        for value in values:
            meter.add({"ratio_max": value, "logprob_mismatch": torch.tensor(value)})
            meter.read()
        assert math.isnan(meter.maxima["ratio_max"])
        assert math.isnan(meter.maxima["logprob_mismatch"])
