"""Packed rollouts: a group shares its prompt and nothing else; what is trained on is exactly
what was sampled. Metrics of a batch."""

import math
from collections.abc import Callable
from dataclasses import replace

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
from codechat.rl.rollout import RolloutBatch, RowShapes
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
    with torch.no_grad():
        return rollout.collect(
            policy,
            Letters(),
            problems,
            tokenizer.load("bytes"),
            "reserved",
            group_size=4,
            max_new_tokens=7,
            seed=3,
        )


def ended(batch: RolloutBatch, stops: list[str]) -> RolloutBatch:
    """The batch as if its completions had ended so, without what was cut off."""
    completions = [replace(c, stop=stop) for c, stop in zip(batch.completions, stops, strict=True)]
    return replace(batch, completions=completions).without_cut_off()


def test_completions_that_were_cut_off_can_teach_nothing(batch: RolloutBatch) -> None:
    stops: list[str] = ["length", "stop", "stop"] * 4
    whole = [i for i, stop in enumerate(stops) if stop == "stop"]
    silent = ended(batch, stops)
    assert silent.n_tokens == sum(len(batch.completions[i].ids) for i in whole)
    assert silent.mask().any(1).nonzero()[:, 0].tolist() == whole
    (packed,) = rollout.pack(silent, row_tokens=4096, rows=4)
    assert packed.numbers.tolist() == whole


def test_completions_that_were_cut_off_still_count_for_the_baseline(batch: RolloutBatch) -> None:
    silent = ended(batch, ["length", "stop", "stop"] * 4)
    assert torch.equal(silent.rewards, batch.rewards)


def test_a_batch_of_which_everything_was_cut_off_has_no_microbatches(batch: RolloutBatch) -> None:
    none = ended(batch, ["length"] * 12)
    assert not list(rollout.pack(none, row_tokens=4096, rows=4))


def plain_gradient(policy: GPT, batch: RolloutBatch, advantage: torch.Tensor) -> list[torch.Tensor]:
    """The loss and its gradients, one unpacked sequence at a time; what an environment said is
    context only."""
    policy.zero_grad()
    total = torch.zeros(())
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // batch.group_size]
        ids = torch.tensor([prompt + completion.ids])
        written = torch.tensor([completion.written])
        targets = torch.full_like(ids[:, 1:], -100)
        targets[:, len(prompt) - 1 :] = torch.where(written, ids[:, len(prompt) :], -100)
        logprobs, _ = policy.token_logprobs(ids[:, :-1], targets)
        one = advantage.view(-1)[i].expand_as(logprobs)
        loss = losses.policy_gradient_loss(logprobs, one, targets >= 0, count=batch.n_tokens)
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in policy.parameters())]


def packed_gradient(
    policy: GPT, batch: RolloutBatch, advantage: torch.Tensor, row_tokens: int, rows: int
) -> list[torch.Tensor]:
    """The same, packed; completions without advantage are left out."""
    policy.zero_grad()
    total = torch.zeros(())
    for packed in rollout.pack(batch, advantage != 0, row_tokens=row_tokens, rows=rows):
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


ORDER = [2, 0, 1]  # of three groups of four


def test_groups_in_another_order_keep_their_completions(batch: RolloutBatch) -> None:
    texts = batch.texts
    assert batch.take(ORDER).texts == texts[8:] + texts[:4] + texts[4:8]


@pytest.mark.parametrize("row_tokens, rows", [(512, 8), (64, 1), (40, 2)])
def test_neither_packing_nor_the_order_of_groups_changes_loss_and_gradient(
    row_tokens: int, rows: int, policy: GPT, batch: RolloutBatch
) -> None:
    advantage = advantages.group_advantages(batch.rewards)
    assert advantage.abs().max() > 0.05
    plain = plain_gradient(policy, batch, advantage)
    assert_close(packed_gradient(policy, batch, advantage, row_tokens, rows), plain)
    moved = batch.take(ORDER)
    assert_close(packed_gradient(policy, moved, advantage[ORDER], row_tokens, rows), plain)


packings = pytest.mark.parametrize("row_tokens, rows", [(512, 8), (40, 2)])


@packings
def test_unpacking_puts_every_target_back_in_its_place(
    row_tokens: int, rows: int, batch: RolloutBatch
) -> None:
    """Values at the targets as a row per completion, whatever the packing."""
    for packed in rollout.pack(batch, row_tokens=row_tokens, rows=rows):
        mask = packed.mask()
        assert torch.equal(mask, batch.mask()[packed.numbers, : packed.longest])
        ids = packed.unpack(packed.targets)
        for number, row, on in zip(packed.numbers, ids, mask, strict=True):
            assert row[on].tolist() == batch.completions[number].ids


@packings
def test_scores_of_a_whole_batch_equal_the_sampled_ones(
    row_tokens: int, rows: int, policy: GPT, batch: RolloutBatch
) -> None:
    scored = rollout.score_logprobs(
        policy, batch, temperature=1.0, row_tokens=row_tokens, rows=rows
    )
    torch.testing.assert_close(scored, batch.logprobs(), atol=1e-5, rtol=0)


NARROW = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=64, n_tags=0)


@packings
@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, 20, None), (1.0, 5, None), (1.0, None, 0.5), (1.7, 9, None)]
)
def test_equal_weights_have_importance_weights_of_one_under_truncation(
    temperature: float, top_k: int | None, top_p: float | None, row_tokens: int, rows: int
) -> None:
    """Of 64 ids; the mean was 0.83 at top-k 20 and 0.50 at 5. In any packing, of parts and of
    joined batches."""
    policy = randomise(GPT(NARROW), 0.25)
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
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        scores = [Score(0.0, "x", {}, False)] * 24
        return RolloutBatch(problems, prompts, found, [""] * 24, scores, 8)

    whole = rollout.join([drawn(0), drawn(1)]).take([5, 0, 3, 1])
    scored = rollout.score_logprobs(
        policy, whole, temperature=temperature, row_tokens=row_tokens, rows=rows
    )
    torch.testing.assert_close(scored, whole.logprobs(), atol=1e-5, rtol=0)
    weights, stats = losses.importance_weights(scored, whole.logprobs(), whole.mask(), 2.0)
    assert weights[whole.mask()].mean() == pytest.approx(1, abs=1e-6)
    assert stats["mismatch_kl"] < 1e-6


Shape = tuple[int, int]  # rows, tokens


@pytest.fixture
def shapes_of_steps(policy: GPT) -> Callable[[], list[set[Shape]]]:
    """For a step that draws a short prompt and one that draws the longest of all problems: the
    shapes of their batches, alone and joined with themselves."""
    task = ToyTask()
    short = task.problems("train")
    long = replace(short[0], messages=[dict(short[0].messages[0], content="x" * 30)])
    problems = [*short, long]
    cfg = ReinforceConfig(
        task="toy", group_size=3, max_new_tokens=4, row_tokens=16, rows=2, tags="text"
    )

    def shapes(batch: RolloutBatch, packing: RowShapes) -> set[Shape]:
        return {tuple(packed.ids.shape) for packed in rollout.pack(batch, **packing)}

    def of_steps() -> list[set[Shape]]:
        sample = RolloutSampler(cfg, Engine(), policy, task, problems, tokenizer.load("bytes"))
        found = []
        for at in (0, len(short)):
            batch = sample(at, 1, seed=at)
            packing = rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, torch.device("cpu"))
            found.append(shapes(batch, packing) | shapes(rollout.join([batch, batch]), packing))
        return found

    return of_steps


def test_on_a_cpu_rows_are_as_long_as_they_need_to_be_in_steps_of_sixteen(
    shapes_of_steps: Callable[[], list[set[Shape]]],
) -> None:
    first, second = shapes_of_steps()
    assert first != second
    assert max(T for _, T in first) < max(T for _, T in second) <= 64
    assert {T % 16 for _, T in first | second} == {0}


def test_in_a_compiled_run_rows_have_the_shape_of_the_longest_prompt(
    shapes_of_steps: Callable[[], list[set[Shape]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all problems, whichever a step draws."""
    monkeypatch.setattr(device, "CPU_KINDS", ())
    assert shapes_of_steps() == [{(2, attention.BLOCK)}] * 2


TIERS = ("none", "some", "all")


def completion_of(i: int, draws: list[float]) -> Completion:
    """Of 1 + i tokens, the second one an environment's from three tokens on; it stops unless i
    is divisible by 3."""
    logprobs = [-x for x in draws]
    written = None
    if i >= 2:
        logprobs[1] = 0.0
        written = [t != 1 for t in range(1 + i)]
    stop = "stop" if i % 3 else ("length", "context", "turns")[i // 3 % 3]
    return Completion(list(range(1 + i)), logprobs, stop, written)


def score_of(reward: float) -> Score:
    tier = "none" if reward == 0 else "all" if reward == 1 else "some"
    return Score(reward, tier, {}, reward == 1, terms={"close": reward / 2})


def batch_of(rewards: list[list[float]], seed: int = 0) -> RolloutBatch:
    """One group per row."""
    rng = torch.Generator().manual_seed(seed)
    flat = [r for group in rewards for r in group]
    return RolloutBatch(
        problems=[Problem(str(p), [], None, "train") for p in range(len(rewards))],
        prompts=[[1]] * len(rewards),
        completions=[
            completion_of(i, torch.rand(1 + i, generator=rng).tolist()) for i in range(len(flat))
        ],
        texts=[""] * len(flat),
        scores=[score_of(r) for r in flat],
        group_size=len(rewards[0]),
    )


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
    """What each rank tells the others of its groups."""
    ranks = []

    def alone(rank: StepMetrics) -> list[StepMetrics]:
        ranks.append(rank)
        return [rank]

    with monkeypatch.context() as patch:
        patch.setattr(dist, "gather", alone)
        for groups in parts:
            rollout_metrics(batch.take(groups), TIERS)
    return ranks


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[0], [1], [2], [3]]], ids=str)
def test_ranks_change_nothing(parts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    combined = combine_ranks(ranks_of(BATCH, parts, monkeypatch))
    assert combined == pytest.approx(rollout_metrics(BATCH, TIERS))


# also where each rank's own rewards agree, or it has a single one
@pytest.mark.parametrize(
    "parts",
    [
        [[0, 1, 2, 3]],
        [[0, 1], [2, 3]],
        [[0], [1], [2], [3]],
    ],
    ids=str,
)
@pytest.mark.parametrize("rewards, live", [([[1.0], [1.0], [0.0], [0.0]], 1.0), ([[1.0]] * 4, 0.0)])
def test_groups_of_one_are_judged_together(
    rewards: list[list[float]],
    live: float,
    parts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = ranks_of(batch_of(rewards), parts, monkeypatch)
    found = combine_ranks(ranks)
    assert (found["effective_groups"], found["frac_zero_std_groups"]) == (live, 1 - live)
    monkeypatch.setattr(dist, "gather", lambda own: [rank.rewards for rank in ranks])
    assert live_completions(ranks[0].rewards).all() == bool(live)


def metrics_of_a_rank(a: float, d: Mean, b: float, c: float) -> StepMetrics:
    return StepMetrics(
        BATCH.rewards,
        means={"a": Mean(a, 1), "d": d, "e": Mean(0.0, 0)},
        sums={"b": b},
        maxima={"c": c},
    )


ONE_RANK = metrics_of_a_rank(a=1.0, d=Mean(6.0, 4), b=2.0, c=3.0)


def test_a_loops_own_values_are_combined_by_their_rule() -> None:
    other = metrics_of_a_rank(a=2.0, d=Mean(3.0, 2), b=5.0, c=-1.0)
    found = combine_ranks([ONE_RANK, other])
    assert [found[name] for name in "abcde"] == [1.5, 7.0, 3.0, 1.5, 0.0]


def test_a_nan_of_one_rank_is_not_lost() -> None:
    other = metrics_of_a_rank(a=2.0, d=Mean(3.0, 2), b=5.0, c=math.nan)
    assert math.isnan(combine_ranks([ONE_RANK, other])["c"])


@pytest.mark.parametrize(
    "values", [(math.nan, 0.5), (0.5, math.nan), (math.nan, 0.5, math.nan, 0.25)], ids=str
)
def test_a_nan_among_maxima_is_not_lost(values: tuple[float, ...]) -> None:
    meter = Meter(CLIPPING)
    for value in values:
        meter.add({"ratio_max": value, "logprob_mismatch": torch.tensor(value)})
        meter.read()
    assert math.isnan(meter.maxima["ratio_max"])
    assert math.isnan(meter.maxima["logprob_mismatch"])
