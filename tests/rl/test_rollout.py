"""Packed rollouts: a group shares its prompt and nothing else; what is trained on is exactly what was sampled."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from raising import raising

from codechat.core.errors import ConfigError
from codechat.models import generate, packed_attention
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.reinforce import ReinforceConfig
from codechat.rl import advantages, losses, rollout
from codechat.rl.engines import Local
from codechat.tasks.base import Problem, Score
from codechat.tasks.funcall.task import FuncallTask
from codechat.tasks.toolbox import reading
from codechat.tasks.toy import ToyTask
from codechat.text import tokenizer
from codechat.training import RolloutSampler, updates
from codechat.training.sampling import spread_strata


@pytest.fixture(scope="module")
def policy() -> GPT:
    model = GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # a fresh model's output projections are zero and would hide attention
            p.add_(torch.randn(p.shape, generator=rng) * 0.3)
    return model.eval()


class Letters:
    """Reward: share of even bytes. Enough structure for advantages of every sign."""

    name, tiers, max_reward, no_stop = "letters", ("some",), 1.0, True

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        share = sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))
        return Score(share, "some", {}, share == 1)


@pytest.fixture(scope="module")
def batch(policy: GPT) -> rollout.RolloutBatch:
    problems = [Problem(str(i), [{"role": "user", "content": "x" * (3 + 5 * i)}], None, "train") for i in range(3)]
    with torch.no_grad():
        return rollout.collect(
            policy, Letters(), problems, tokenizer.load("bytes"), "reserved", group_size=4, max_new_tokens=7, seed=3
        )


def plain_gradient(
    policy: GPT, batch: rollout.RolloutBatch, advantage: torch.Tensor
) -> tuple[float, list[torch.Tensor]]:
    """The same loss, one unpacked sequence at a time."""
    policy.zero_grad()
    total = 0.0
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // batch.group_size]
        ids = torch.tensor([prompt + completion.ids])
        targets = torch.full_like(ids[:, 1:], -100)
        targets[:, len(prompt) - 1 :] = ids[:, len(prompt) :]
        logprobs, _ = policy.token_logprobs(ids[:, :-1], targets)
        loss = losses.policy_gradient_loss(
            logprobs, advantage.view(-1)[i].expand_as(logprobs), targets >= 0, count=batch.n_tokens
        )
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in policy.parameters()]


def packed_gradient(
    policy: GPT, batch: rollout.RolloutBatch, advantage: torch.Tensor, **how: int
) -> tuple[float, list[torch.Tensor]]:
    policy.zero_grad()
    total = 0.0
    for packed in rollout.pack(batch, advantage, **how):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, positions=packed.positions, mask=packed.mask())
        loss = losses.policy_gradient_loss(logprobs, packed.advantages, packed.targets >= 0, count=batch.n_tokens)
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in policy.parameters()]


@pytest.mark.parametrize(
    "how",
    [dict(row_tokens=512, rows=8), dict(row_tokens=64, rows=1), dict(row_tokens=40, rows=2)],
    ids=["one row", "a row per group", "groups split over rows"],
)
def test_packing_changes_neither_loss_nor_gradient(
    policy: GPT, batch: rollout.RolloutBatch, how: dict[str, int]
) -> None:
    advantage = advantages.group_advantages(batch.rewards)
    assert advantage.abs().max() > 0.05
    loss, gradient = plain_gradient(policy, batch, advantage)
    packed_loss, packed_grad = packed_gradient(policy, batch, advantage, **how)
    assert packed_loss == pytest.approx(loss, abs=1e-6)
    for a, b in zip(gradient, packed_grad):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_sampled_logprobs_equal_recomputed_ones_in_packed_rows(policy: GPT, batch: rollout.RolloutBatch) -> None:
    for packed in rollout.pack(batch, torch.ones_like(batch.rewards), row_tokens=256, rows=4):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, positions=packed.positions, mask=packed.mask())
        mask = packed.targets >= 0
        torch.testing.assert_close(logprobs[mask], packed.old_logprobs[mask], atol=1e-5, rtol=0)


def test_packed_targets_are_the_sampled_ids(batch: rollout.RolloutBatch) -> None:
    learned: list[tuple[int, ...]] = []
    for packed in rollout.pack(batch, torch.ones_like(batch.rewards), row_tokens=256, rows=4):
        for row in range(len(packed.ids)):
            for doc in range(int(packed.docs[row].max()) + 1):
                for branch in range(1, int(packed.branches[row].max()) + 1):
                    at = (packed.docs[row] == doc) & (packed.branches[row] == branch)
                    if at.any():
                        learned.append(tuple(packed.targets[row][at].tolist()))
    assert sorted(learned) == sorted(tuple(c.ids) for c in batch.completions)


def test_a_branch_sees_its_prompt_and_itself_only(batch: rollout.RolloutBatch) -> None:
    packed = next(rollout.pack(batch, torch.ones_like(batch.rewards), row_tokens=512, rows=8))
    mask, docs, branches = packed.mask().mask[0, 0], packed.docs[0], packed.branches[0]
    for q, k in ((q, k) for q in range(len(docs)) for k in range(len(docs)) if mask[q, k] and q != k):
        assert k < q and docs[k] == docs[q] and branches[k] in (0, branches[q])


def test_zero_advantage_completions_are_left_out_and_change_nothing(policy: GPT, batch: rollout.RolloutBatch) -> None:
    advantage = advantages.group_advantages(batch.rewards)
    advantage[1] = 0.0
    _, skipped = packed_gradient(policy, batch, advantage, row_tokens=256, rows=4)
    policy.zero_grad()
    everything = list(rollout.pack(batch, advantage, row_tokens=256, rows=4, skip_zero=False))
    for packed in everything:
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, positions=packed.positions, mask=packed.mask())
        losses.policy_gradient_loss(logprobs, packed.advantages, packed.targets >= 0, count=batch.n_tokens).backward()
    fewer = sum(int((p.targets >= 0).sum()) for p in rollout.pack(batch, advantage, row_tokens=256, rows=4))
    assert fewer < sum(int((p.targets >= 0).sum()) for p in everything)
    for a, p in zip(skipped, policy.parameters()):
        torch.testing.assert_close(a, p.grad, atol=1e-6, rtol=1e-5)


def test_group_order_changes_nothing(policy: GPT, batch: rollout.RolloutBatch) -> None:
    advantage = advantages.group_advantages(batch.rewards)
    order, G = [2, 0, 1], batch.group_size
    moved = rollout.RolloutBatch(
        [batch.problems[p] for p in order],
        [batch.prompts[p] for p in order],
        [batch.completions[p * G + g] for p in order for g in range(G)],
        [batch.texts[p * G + g] for p in order for g in range(G)],
        [batch.scores[p * G + g] for p in order for g in range(G)],
        batch.rewards[order],
        G,
    )
    _, a = packed_gradient(policy, batch, advantage, row_tokens=128, rows=4)
    _, b = packed_gradient(policy, moved, advantage[order], row_tokens=128, rows=4)
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)


def test_truncated_share_counts_completions_without_a_stop(batch: rollout.RolloutBatch) -> None:
    assert batch.truncated_frac == 1.0
    assert {c.stop for c in batch.completions} <= {"length", "context"}
    assert all(isinstance(c, generate.Completion) for c in batch.completions)


def test_unpacking_puts_every_target_back_in_its_place(policy: GPT, batch: rollout.RolloutBatch) -> None:
    """Values at the targets as a row per completion, whatever the packing; and the model's scores of a whole batch as one table."""
    sampled = batch.logprobs()
    for how in (dict(row_tokens=512, rows=8), dict(row_tokens=40, rows=2)):
        for packed in rollout.pack(batch, torch.ones_like(batch.rewards), **how):
            found = packed.unpack(packed.old_logprobs)
            assert torch.equal(found, sampled[packed.rows(), : found.shape[1]])
            assert torch.equal(packed.unpack(packed.completion >= 0), batch.mask()[packed.rows(), : found.shape[1]])
        torch.testing.assert_close(
            rollout.score_logprobs(policy, batch, temperature=1.0, **how), sampled, atol=1e-5, rtol=0
        )
    assert batch.take([2, 0]).texts == batch.texts[8:] + batch.texts[:4]


class Judged(ToyTask):
    """The toy task with judges of its own: the first part is judged only once the second one is being sampled."""

    def __init__(self) -> None:
        self.sampling, self.parts = threading.Semaphore(0), 0

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> list[Score]:
        self.parts += 1
        for _ in range(2 if self.parts == 1 else 0):
            assert self.sampling.acquire(timeout=20), "nothing is sampled while this part is judged"
        return [self.score(problem, text) for problem, text in pairs]


def test_a_part_is_judged_while_the_next_one_is_sampled(policy: GPT) -> None:
    task, engine = Judged(), Local()

    def sample(*args: object, **how: object) -> list[generate.Completion]:
        task.sampling.release()
        return generate.sample(*args, **how)

    engine.sample = sample
    cfg = ReinforceConfig(device_batch_size=2, grad_accum=3, group_size=3, max_new_tokens=4, tags="text")
    problems, tok = task.problems("train"), tokenizer.load("bytes")
    parts = RolloutSampler(cfg, engine, policy, task, problems, tok, at_once=2)(1, 6, seed=7, key=4)
    assert task.parts == 3
    whole = RolloutSampler(cfg, Local(), policy, ToyTask(), problems, tok)(1, 6, seed=7, key=4)
    assert [c.ids for c in parts.completions] == [c.ids for c in whole.completions]
    assert torch.equal(parts.rewards, whole.rewards) and parts.problems == whole.problems


def test_rows_have_one_shape_in_the_whole_run_where_code_is_compiled(
    policy: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long enough for the longest prompt of all problems, whichever a step draws; on a CPU rows are as long as they need to be."""
    task, tok = ToyTask(), tokenizer.load("bytes")
    short = task.problems("train")
    long = replace(short[0], messages=[dict(short[0].messages[0], content="x" * 30)])
    cfg = ReinforceConfig(group_size=3, max_new_tokens=4, row_tokens=16, rows=2, tags="text")

    def shapes() -> list[set[tuple[int, ...]]]:
        sample, found = RolloutSampler(cfg, Local(), policy, task, [*short, long], tok), []
        for at in (0, len(short)):
            batch = sample(at, 1, seed=at)
            minibatches = [batch, *(part for _, part in updates.minibatches(rollout.join([batch, batch]), 2))]
            every = [p for b in minibatches for p in updates.packs(cfg, policy, b, torch.ones(1, 3))]
            found.append({tuple(p.ids.shape) for p in every})
        return found

    first, second = shapes()
    assert first != second and max(T for _, T in first) < max(T for _, T in second) < 64
    monkeypatch.setattr(packed_attention, "DENSE", ())
    assert shapes() == [{(2, packed_attention.BLOCK)}] * 2


# ---------------------------------------------------------------- which problems a step has


class Kinds(ToyTask):
    """Every problem of a stratum; the class "lower" is always solved."""

    grouped_by, clustered_by = "stratum", "tool"

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        kinds = [("call", "lower")] * 5 + [("call", "digit")] * 3 + [("unfitting", "upper")] * 2
        return [
            Problem(f"p{i}", [{"role": "user", "content": c}], c, split, dict(stratum=s, tool=c))
            for i, (s, c) in enumerate(kinds * 10)
        ]

    def score(self, problem: Problem, completion: str) -> Score:
        return Score(float(problem.gold == "lower"), "some", {}, problem.gold == "lower")


def test_every_step_has_the_strata_in_their_shares() -> None:
    """Of recipe nano's training problems a fifth has no fitting tool: three or four of the sixteen of each step."""
    task = FuncallTask()
    task.grouped_by = "stratum"
    problems = reading.problems("train", 400, code_requests=["Write f."])
    spread = spread_strata(task, random.Random(0).sample(problems, 400))
    assert sorted(p.id for p in spread) == sorted(p.id for p in problems)
    unfitting = [p.meta["stratum"] == "unfitting" for p in spread]
    assert {sum(unfitting[at : at + 16]) for at in range(0, 400, 16)} <= {3, 4}
    with raising(ConfigError, "toy", "strata"):
        spread_strata(ToyTask(), ToyTask().problems("train"))


def test_kinds_that_are_solved_are_drawn_less_within_their_stratum(policy: GPT) -> None:
    task, tok = Kinds(), tokenizer.load("bytes")
    problems = task.problems("train")
    cfg = ReinforceConfig(group_size=2, max_new_tokens=2, tags="text", seed=3)

    def drawn(
        share: float, state: dict[str, object] | None = None
    ) -> tuple[RolloutSampler, Counter[str], Counter[str]]:
        sample = RolloutSampler(cfg, Local(), policy, task, problems, tok, solved_share=share)
        if state:
            sample.load_state(state)
        first, later = (sample(at, 100, seed=1).problems for at in (0, 100))
        return sample, Counter(p.gold for p in first), Counter(p.gold for p in later)

    plain, before, after = drawn(1.0)
    assert before == after == dict(lower=50, digit=30, upper=20) and plain.state() == {}
    some, before, after = drawn(0.3)
    assert before == dict(lower=50, digit=30, upper=20), "nothing is known before the first batch"
    assert some.state() == {"solved": ["call/lower"]} and after["upper"] == 20
    assert 8 <= after["lower"] <= 23 and after["digit"] == 80 - after["lower"]
    _, resumed, _ = drawn(0.3, some.state())
    assert resumed["lower"] < 25, "a resumed run knows it"
    one = RolloutSampler(cfg, Local(), policy, task, problems, tok, solved_share=0.0)
    one.load_state({"solved": ["call/lower", "call/digit"]})
    assert {p.gold for p in one(0, 100, seed=1).problems} == {"upper"}, (
        "a stratum that is solved leaves its places to others"
    )
    everything = RolloutSampler(cfg, Local(), policy, task, problems, tok, solved_share=0.0)
    everything.load_state({"solved": ["call/lower", "call/digit", "unfitting/upper"]})
    assert [p.id for p in everything(0, 100, seed=1).problems] == [p.id for p in problems], (
        "where all is solved, all are drawn"
    )
