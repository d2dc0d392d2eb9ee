"""Packed rollouts: a group shares its prompt and nothing else; what is trained on is exactly what was sampled."""

from dataclasses import replace

import pytest
import torch

from codechat.models import attention
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.reinforce import ReinforceConfig
from codechat.rl import advantages, losses, rollout
from codechat.rl.engines import Engine, RolloutSampler
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score
from codechat.tasks.toy import ToyTask
from codechat.text import tokenizer


def perturbed(model: GPT) -> GPT:
    """Noise on all weights: a fresh model's output projections are zero and would hide attention."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=rng) * 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def policy() -> GPT:
    return perturbed(GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=64, vocab_size=257)))


class Letters:
    """Reward: share of even bytes. Enough structure for advantages of every sign."""

    name, tiers, max_reward, no_stop = "letters", ("some",), 1.0, True

    def prompt(self, problem: Problem) -> list[dict[str, str]]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        share = sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))
        return Score(share, "some", {}, share == 1)


@pytest.fixture(scope="module")
def batch(policy: GPT) -> RolloutBatch:
    problems = [Problem(str(i), [{"role": "user", "content": "x" * (3 + 5 * i)}], None, "train") for i in range(3)]
    how = dict(group_size=4, max_new_tokens=7, seed=3)
    with torch.no_grad():
        return rollout.collect(policy, Letters(), problems, tokenizer.load("bytes"), "reserved", **how)


def plain_gradient(policy: GPT, batch: RolloutBatch, advantage: torch.Tensor) -> list[torch.Tensor]:
    """The loss and its gradients, one unpacked sequence at a time; what an environment said is context only."""
    policy.zero_grad()
    total = torch.zeros(())
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // batch.group_size]
        ids = torch.tensor([prompt + completion.ids])
        targets = torch.full_like(ids[:, 1:], -100)
        targets[:, len(prompt) - 1 :] = torch.where(torch.tensor([completion.written]), ids[:, len(prompt) :], -100)
        logprobs, _ = policy.token_logprobs(ids[:, :-1], targets)
        one = advantage.view(-1)[i].expand_as(logprobs)
        loss = losses.policy_gradient_loss(logprobs, one, targets >= 0, count=batch.n_tokens)
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in policy.parameters())]


def packed_gradient(policy: GPT, batch: RolloutBatch, advantage: torch.Tensor, **how: int) -> list[torch.Tensor]:
    """The same, packed; completions without advantage are left out."""
    policy.zero_grad()
    total = torch.zeros(())
    for packed in rollout.pack(batch, advantage != 0, **how):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, **packed.where())
        advantages = advantage.view(-1, 1)[packed.numbers]
        loss = losses.policy_gradient_loss(packed.unpack(logprobs), advantages, packed.mask(), count=batch.n_tokens)
        loss.backward()
        total += loss.detach()
    return [total, *(p.grad.clone() for p in policy.parameters())]


def assert_close(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-4)


def test_neither_packing_nor_the_order_of_groups_changes_loss_and_gradient(policy: GPT, batch: RolloutBatch) -> None:
    """In one row, a row per group, groups split over rows."""
    advantage, order = advantages.group_advantages(batch.rewards), [2, 0, 1]
    assert advantage.abs().max() > 0.05
    plain, moved = plain_gradient(policy, batch, advantage), batch.take(order)
    assert moved.texts == [batch.texts[p * 4 + g] for p in order for g in range(4)]
    for row_tokens, rows in ((512, 8), (64, 1), (40, 2)):
        how = dict(row_tokens=row_tokens, rows=rows)
        assert_close(packed_gradient(policy, batch, advantage, **how), plain)
        assert_close(packed_gradient(policy, moved, advantage[order], **how), plain)


def test_unpacking_puts_every_target_back_in_its_place(policy: GPT, batch: RolloutBatch) -> None:
    """Values at the targets as a row per completion, whatever the packing; scores of a whole batch equal the sampled ones."""
    for how in (dict(row_tokens=512, rows=8), dict(row_tokens=40, rows=2)):
        for packed in rollout.pack(batch, **how):
            at, C = packed.numbers, packed.longest
            assert torch.equal(packed.mask(), batch.mask()[at, :C])
            ids = packed.unpack(packed.targets)
            assert [row[on].tolist() for row, on in zip(ids, packed.mask())] == [batch.completions[i].ids for i in at]
        scored = rollout.score_logprobs(policy, batch, temperature=1.0, **how)
        torch.testing.assert_close(scored, batch.logprobs(), atol=1e-5, rtol=0)


def test_rows_have_one_shape_in_a_compiled_run(policy: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for the longest prompt of all problems, whichever a step draws; on a CPU rows are as long as they need to be."""
    task, tok = ToyTask(), tokenizer.load("bytes")
    short = task.problems("train")
    long = replace(short[0], messages=[dict(short[0].messages[0], content="x" * 30)])
    cfg = ReinforceConfig(group_size=3, max_new_tokens=4, row_tokens=16, rows=2, tags="text")

    def shapes() -> list[set[tuple[int, ...]]]:
        sample, found = RolloutSampler(cfg, Engine(), policy, task, [*short, long], tok), []
        for at in (0, len(short)):
            batch = sample(at, 1, seed=at)
            how = rollout.row_shapes(batch, cfg.row_tokens, cfg.rows, torch.device("cpu"))
            batches = (batch, rollout.join([batch, batch]))
            found.append({tuple(p.ids.shape) for b in batches for p in rollout.pack(b, **how)})
        return found

    first, second = shapes()
    assert first != second and max(T for _, T in first) < max(T for _, T in second) < 64
    monkeypatch.setattr(attention, "DENSE", ())
    assert shapes() == [{(2, attention.BLOCK)}] * 2
