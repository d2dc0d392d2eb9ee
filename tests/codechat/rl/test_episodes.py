"""Episodes: token in, token out over several turns; what the environment said is read, never
learned."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from random_models import perturbed
from test_rollout import assert_close, packed_gradient, plain_gradient

from codechat.models import draws, generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, rollout
from codechat.rl.episodes import Turn
from codechat.tasks.base import Environment, Message, Problem, Score
from codechat.text import chat, tokenizer, tool_calls

BYTES = tokenizer.load("bytes")
TAG = BYTES.n_vocab
END = TAG + tool_calls.TAGS.index("<|end|>")


@pytest.fixture(scope="module")
def policy() -> GPT:
    return perturbed(
        GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=160, vocab_size=BYTES.n_vocab))
    )


class Counting:
    """Says how many even bytes an answer had; ends after so many answers. Reward: share of even
    bytes, summed."""

    def __init__(self, ends_after: int) -> None:
        self.ends_after = ends_after

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        self.said: list[str] = []
        return problem.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        before = self.score().reward
        self.said.append(message["content"])
        even = sum(ord(c) % 2 == 0 for c in message["content"])
        told = [{"role": "function", "content": f"{even} even"}]
        done = len(self.said) == self.ends_after
        return ([] if done else told), self.score().reward - before, done

    def state_diff(self) -> list[Any]:
        return list(self.said)

    def score(self) -> Score:
        text = "".join(self.said)
        share = sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))
        return Score(share, "some", {}, share == 1)


class Talk:
    name = "talk"
    tiers = ("some",)
    max_reward = 1.0

    def __init__(self, ends_after: int = 3, max_turns: int = 5) -> None:
        self.ends_after = ends_after
        self.max_turns = max_turns

    def environment(self) -> Counting:
        return Counting(self.ends_after)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        world = Counting(1)
        world.reset(problem, 0)
        world.step({"role": "assistant", "content": completion})
        return world.score()


class OneTurn(Talk):
    environment = property()  # hasattr says no


PROBLEMS = [
    Problem(str(i), [{"role": "user", "content": "x" * (3 + 2 * i)}], None, "train")
    for i in range(3)
]


def collect(
    policy: GPT,
    task: Any,
    problems: list[Problem] = PROBLEMS,
    *,
    max_new_tokens: int = 9,
    keys: list[int] | None = None,
    top_k: int | None = None,
    note_kept: bool = False,
) -> rollout.RolloutBatch:
    with torch.no_grad():
        return rollout.collect(
            policy,
            task,
            problems,
            BYTES,
            "reserved",
            group_size=4,
            seed=3,
            max_new_tokens=max_new_tokens,
            keys=keys,
            top_k=top_k,
            note_kept=note_kept,
        )


@contextmanager
def closing_answers() -> Iterator[None]:
    """Random weights hardly ever close an answer: a quarter of the draws becomes <|end|>, with
    its own log-probability."""

    def draw(
        logits: torch.Tensor,
        how: draws.Truncation,
        u: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        table = logits.log_softmax(-1)
        ids, logprobs, kept = plain(logits, how, u, width)
        ends = u < 0.25
        return torch.where(ends, END, ids), torch.where(ends, table[:, END], logprobs), kept

    plain = generate.draw_and_note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "draw_and_note", draw)
        yield


@pytest.fixture
def closing() -> Iterator[None]:
    with closing_answers():
        yield


@pytest.fixture(scope="module")
def batch(policy: GPT) -> rollout.RolloutBatch:
    with closing_answers():
        played = collect(policy, Talk())
    assert any(len(turns) == 3 for turns in played.turns)
    return played


@pytest.fixture
def one(policy: GPT, closing: None) -> rollout.RolloutBatch:
    """Completions of a task without environments."""
    return collect(policy, OneTurn())


@pytest.fixture
def many(policy: GPT, closing: None) -> rollout.RolloutBatch:
    """Episodes that end after one turn."""
    return collect(policy, Talk(ends_after=1))


def test_an_environment_has_the_protocol() -> None:
    assert isinstance(Counting(1), Environment)


def test_an_environment_that_ends_after_one_turn_is_the_single_turn_path(
    one: rollout.RolloutBatch, many: rollout.RolloutBatch
) -> None:
    assert one.turns == []
    assert [len(t) for t in many.turns] == [1] * 12
    for a, b in zip(one.completions, many.completions, strict=True):
        assert (a.ids, a.logprobs, a.stop, a.written) == (b.ids, b.logprobs, b.stop, b.written)
    assert one.prompts == many.prompts
    assert one.texts == many.texts
    assert torch.equal(one.rewards, many.rewards)
    assert one.scores == many.scores
    assert one.n_tokens == many.n_tokens
    assert torch.equal(one.cut_off(), many.cut_off())


def test_episodes_of_one_turn_are_packed_as_completions_are(
    one: rollout.RolloutBatch, many: rollout.RolloutBatch
) -> None:
    packed = rollout.pack(one, row_tokens=128, rows=4)
    expected = rollout.pack(many, row_tokens=128, rows=4)
    for a, b in zip(packed, expected, strict=True):
        for name in ("ids", "targets", "positions", "docs", "branches", "flat", "row"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_the_mask_covers_exactly_what_the_policy_wrote(batch: rollout.RolloutBatch) -> None:
    for completion, turns in zip(batch.completions, batch.turns, strict=True):
        on = [False] * len(completion.ids)
        for turn in turns:
            on[turn.start : turn.end] = [True] * (turn.end - turn.start)
            assert chat.completion_text(completion.ids[turn.start : turn.end], BYTES) == turn.text
        assert completion.mask == on
        assert completion.written[-1]


def test_between_two_turns_stands_what_the_environment_said(batch: rollout.RolloutBatch) -> None:
    for completion, turns in zip(batch.completions, batch.turns, strict=True):
        for turn, following in itertools.pairwise(turns):
            said = chat.decode(completion.ids[turn.end : following.start], BYTES)
            told = turn.replies[0]["content"]
            assert said == f"\n<|function_response|>\n{told}\n<|end|>\n<|assistant|>\n"
            assert not any(completion.logprobs[turn.end : following.start])


def test_targets_are_what_the_policy_wrote(batch: rollout.RolloutBatch) -> None:
    packs = list(rollout.pack(batch, row_tokens=256, rows=2))
    assert all(torch.equal((p.targets >= 0).flatten().nonzero()[:, 0], p.flat) for p in packs)
    assert sum(len(p.flat) for p in packs) == batch.n_tokens
    assert int(batch.mask().sum()) == batch.n_tokens
    assert batch.n_tokens < int(batch.lengths().sum())


def test_sampled_logprobs_equal_recomputed_ones_over_all_turns(
    policy: GPT, batch: rollout.RolloutBatch
) -> None:
    scored = rollout.score_logprobs(policy, batch, temperature=1.0, row_tokens=256, rows=2)
    torch.testing.assert_close(scored, batch.logprobs(), atol=2e-5, rtol=0)


def test_truncated_turns_are_scored_among_the_tokens_that_were_kept(
    policy: GPT, monkeypatch: Any
) -> None:
    """A fifth of the draws becomes <|end|> where it was kept; no reply of an environment has
    kept tokens."""

    def draw(logits: Any, how: Any, u: Any, width: int) -> Any:
        given = logits.clone()  # which drawing changes
        ids, logprobs, kept = plain(logits, how, u, width)
        table = given.gather(1, kept.long()).log_softmax(-1)
        place = (kept == END).float().argmax(1)
        of_end = table[range(len(u)), place]
        ends = (kept == END).any(1) & (u < 0.2)
        return torch.where(ends, END, ids), torch.where(ends, of_end, logprobs), kept

    plain = generate.draw_and_note
    monkeypatch.setattr(generate, "draw_and_note", draw)
    batch = collect(policy, Talk(), top_k=120, note_kept=True)
    assert any(len(turns) == 3 for turns in batch.turns)
    for c in batch.completions:
        on = torch.tensor(c.written)
        assert c.kept is not None
        assert (c.kept[on] >= 0).all()
        assert (c.kept[~on] == -1).all()
    scored = rollout.score_logprobs(policy, batch, temperature=1.0, row_tokens=256, rows=2)
    torch.testing.assert_close(scored, batch.logprobs(), atol=2e-5, rtol=0)


def test_the_gradient_is_that_of_the_plain_sequences(
    policy: GPT, batch: rollout.RolloutBatch
) -> None:
    """-sum over written tokens of advantage x log pi / written tokens; what was said is context
    only."""
    advantage = advantages.group_advantages(batch.rewards)
    assert advantage.abs().max() > 0.01
    packed = packed_gradient(policy, batch, advantage, row_tokens=200, rows=2)
    assert_close(packed, plain_gradient(policy, batch, advantage))


KEYS = [5, 6, 7]


@pytest.fixture
def together(policy: GPT, closing: None) -> rollout.RolloutBatch:
    batch = collect(policy, Talk(), keys=KEYS)
    assert max(len(turns) for turns in batch.turns) == 3
    return batch


def texts_of(episodes: list[list[Turn]]) -> list[list[str]]:
    return [[turn.text for turn in turns] for turns in episodes]


@pytest.mark.parametrize("p", range(3))
def test_an_episode_does_not_depend_on_who_shares_its_batch(
    p: int, policy: GPT, together: rollout.RolloutBatch
) -> None:
    alone = collect(policy, Talk(), [PROBLEMS[p]], keys=[KEYS[p]])
    group = slice(4 * p, 4 * p + 4)
    assert [c.ids for c in alone.completions] == [c.ids for c in together.completions[group]]
    assert texts_of(alone.turns) == texts_of(together.turns[group])


def test_samples_of_one_problem_differ(together: rollout.RolloutBatch) -> None:
    assert len({tuple(c.ids) for c in together.completions}) > 6


def test_episodes_end_in_order_at_the_limit_of_turns(policy: GPT, closing: None) -> None:
    limit = collect(policy, Talk(ends_after=99, max_turns=2), max_new_tokens=60)
    n_turns = {len(t) for t, c in zip(limit.turns, limit.completions) if c.stop == "turns"}
    assert n_turns == {2}
    in_order = torch.tensor([c.stop in ("stop", "turns") for c in limit.completions])
    # what PPO's --non-stop-penalty is taken from
    assert in_order.any()
    assert torch.equal(limit.cut_off(), ~in_order.view_as(limit.rewards))


def test_an_episode_ends_where_a_turn_is_too_long(policy: GPT, closing: None) -> None:
    cut = collect(policy, Talk(ends_after=99), max_new_tokens=2)
    assert any(c.stop == "length" and len(t) < 5 for t, c in zip(cut.turns, cut.completions))


def test_an_episode_ends_where_the_context_is_full(policy: GPT, closing: None) -> None:
    full = collect(policy, Talk(ends_after=99, max_turns=50), max_new_tokens=60)
    assert {c.stop for c in full.completions} == {"context"}
    assert full.cut_off().all()
    for i, c in enumerate(full.completions):
        assert len(full.prompts[i // 4]) + len(c.ids) <= policy.cfg.block_size
        assert c.written[-1]


def test_values_pass_over_what_the_environment_said() -> None:
    """GAE over a sequence with a gap is GAE over the written tokens alone."""
    rewards = torch.tensor([[0.0, 9.0, 9.0, 0.5, 1.0]])
    values = torch.tensor([[0.3, 8.0, 8.0, 0.2, 0.6]])
    on = torch.tensor([[1, 0, 0, 1, 1]]).bool()
    found, returns = advantages.estimate_gae(rewards, values, on, gamma=0.9, lam=0.7)
    short, short_returns = advantages.estimate_gae(
        rewards[on][None], values[on][None], torch.ones(1, 3), gamma=0.9, lam=0.7
    )
    assert torch.equal(found[on], short[0])
    assert torch.equal(returns[on], short_returns[0])
    assert not found[~on].any()
