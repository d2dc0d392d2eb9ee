"""From a policy and problems to a scored batch of rollouts, and from that batch to packed rows that a loss can train on.

A completion is trained on exactly the ids that were sampled; its text goes to the reward and to people only. The G completions of a
group share their prompt: a packed row holds the prompt once and each completion as a branch that sees the prompt and itself, nothing
else. That costs P + G x C tokens per group instead of G x (P + C).

Where a task makes environments a completion is a whole episode (`episodes`): what the environment said stands in it as input, but is no
target, has no advantage, and counts in no mean.

Left out: off-policy buffers.

Shapes: P problems, G completions each, N = P x G rollouts in problem-major order; R rows of T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.tasks.base import Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RolloutBatch:
    """N = P x G scored completions. prompts: P id lists. completions, texts, scores: N each. rewards: (P, G) float32.
    turns: N lists of an episode's turns; empty where completions are answers to one prompt."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[generate.Completion]
    texts: list[str]
    scores: list[Score]
    rewards: Tensor
    group_size: int
    turns: list[list[episodes.Turn]] = field(default_factory=list)

    @property
    def correct(self) -> Tensor:
        """(P, G) bool: exact matches, apart from the shaped reward."""
        return torch.tensor([s.correct for s in self.scores]).view_as(self.rewards)

    @property
    def n_tokens(self) -> int:
        """Tokens that the policy wrote in the whole batch."""
        return sum(sum(c.written) for c in self.completions)

    def lengths(self) -> Tensor:
        """(N,) tokens of each completion, what an environment said between its turns included."""
        return torch.tensor([len(c.ids) for c in self.completions])

    def mask(self) -> Tensor:
        """(N, C) bool: the tokens of each completion that the policy wrote, C the tokens of the longest."""
        return torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(c.written, dtype=torch.bool) for c in self.completions], batch_first=True
        )

    def logprobs(self) -> Tensor:
        """(N, C) float32: log-probabilities under the sampler, 0 where the policy wrote nothing."""
        return torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(c.logprobs, dtype=torch.float32) for c in self.completions], batch_first=True
        )

    def take(self, groups: Sequence[int]) -> RolloutBatch:
        """The batch of these groups, in this order."""
        rows = [p * self.group_size + g for p in groups for g in range(self.group_size)]
        completions, texts, scores = ([held[i] for i in rows] for held in (self.completions, self.texts, self.scores))
        return RolloutBatch(
            [self.problems[p] for p in groups],
            [self.prompts[p] for p in groups],
            completions,
            texts,
            scores,
            self.rewards[list(groups)],
            self.group_size,
            [self.turns[i] for i in rows] if self.turns else [],
        )

    def replace(self, groups: Sequence[int], other: RolloutBatch) -> RolloutBatch:
        """The batch with `groups` exchanged for the groups of `other`, one for one."""
        both = RolloutBatch(
            self.problems + other.problems,
            self.prompts + other.prompts,
            self.completions + other.completions,
            self.texts + other.texts,
            self.scores + other.scores,
            torch.cat((self.rewards, other.rewards)),
            self.group_size,
            self.turns + other.turns,
        )
        place = {p: len(self.problems) + i for i, p in enumerate(groups)}
        return both.take([place.get(p, p) for p in range(len(self.problems))])

    def flops(self, shape: GPTConfig, trained: int) -> float:
        """Model FLOPs of sampling this batch and training on `trained` tokens of it: a forward pass of each prompt and completion token,
        forward and backward of each trained one; attention at the mean length."""
        prompts, read = sum(map(len, self.prompts)), int(self.lengths().sum())
        per_token = shape.flops_per_token(prompts // len(self.prompts) + read // len(self.completions))
        return per_token * ((prompts + read) / 3 + trained)

    def cut_off(self) -> Tensor:
        """(P, G) bool: completions that ended without their stop sequence."""
        return torch.tensor([c.stop != "stop" for c in self.completions]).view_as(self.rewards)

    @property
    def truncated_frac(self) -> float:
        """Share of completions that ended without their stop sequence."""
        return sum(c.stop != "stop" for c in self.completions) / len(self.completions)

    def tier_shares(self, tiers: Sequence[str]) -> dict[str, float]:
        """Share of rollouts on each rung, every rung present, and the mean of each term of the reward."""
        counts, n = Counter(s.tier for s in self.scores), len(self.scores)
        terms = {f"reward/{name}": sum(s.terms[name] for s in self.scores) / n for name in self.scores[0].terms}
        return {f"tier/{t}": counts[t] / n for t in tiers} | terms

    def best_and_worst(self, groups: int) -> list[dict[str, object]]:
        """Rows for people: the best and the worst rollout of the first `groups` groups."""
        rows: list[dict[str, object]] = []
        for p, problem in enumerate(self.problems[:groups]):
            order = self.rewards[p].argsort()
            for label, g in (("best", int(order[-1])), ("worst", int(order[0]))):
                i = p * self.group_size + g
                rows.append(
                    dict(
                        problem=problem.id,
                        which=label,
                        reward=self.scores[i].reward,
                        tier=self.scores[i].tier,
                        request=problem.messages[-1]["content"],
                        completion=self.texts[i],
                        stop=self.completions[i].stop,
                    )
                    | (dict(turns=[t.row() for t in self.turns[i]]) if self.turns else {})
                )
        return rows


def collect(
    policy: GPT,
    task: Task,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    tags: str,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    keys: Sequence[int] | None = None,
    sampler: Callable[..., list[generate.Completion]] = generate.sample,
) -> RolloutBatch:
    """Sample `group_size` completions of every problem and score them; whole episodes of them where the task makes environments.

    max_new_tokens: of a completion; of one turn of an episode. keys: one per problem, on which its draws hang beside the seed (default: its
    index here). sampler: `generate.sample`, or that of `engines`."""
    if episodes.made_by(task):
        played = episodes.play(
            policy,
            task,
            problems,
            tokenizer,
            tags,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            keys=keys,
            sampler=sampler,
        )
        rewards = torch.tensor([e.score.reward for e in played], dtype=torch.float32).view(len(problems), group_size)
        return RolloutBatch(
            list(problems),
            [e.prompt for e in played[::group_size]],
            [e.completion for e in played],
            [e.text for e in played],
            [e.score for e in played],
            rewards,
            group_size,
            [e.turns for e in played],
        )
    prompts = [chat.prompt(task.prompt(p), tokenizer, tags) for p in problems]
    stops = () if getattr(task, "no_stop", False) else chat.stop_sequences(tokenizer, tags)
    completions = sampler(
        policy,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        stop=stops,
        seed=seed,
        samples_per_prompt=group_size,
        keys=keys,
        on_overflow="stop",
    )
    texts = [chat.completion_text(c.ids, tokenizer, tags) for c in completions]
    scores = [task.score(problems[i // group_size], text) for i, text in enumerate(texts)]
    rewards = torch.tensor([s.reward for s in scores], dtype=torch.float32).view(len(problems), group_size)
    return RolloutBatch(list(problems), prompts, completions, texts, scores, rewards, group_size)


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens. targets: -100 where nothing is learned. positions: each branch continues its prompt. docs: which group a token
    belongs to, -1 = padding. branches: 0 = prompt, k = k-th completion of the group. old_logprobs and weights (the advantages): 0
    outside completions. completion and offset: of which completion of the batch a target is which token, -1 and 0 outside. All (R, T)."""

    ids: Tensor
    targets: Tensor
    positions: Tensor
    docs: Tensor
    branches: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    completion: Tensor
    offset: Tensor

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding, prompts included."""
        return int((self.docs >= 0).sum())

    def rows(self) -> Tensor:
        """(B,) which completions of the batch are packed here, ascending."""
        return self.completion[self.completion >= 0].unique()

    def unpack(self, x: Tensor) -> Tensor:
        """Values (R, T) at the targets as (B, C), a row per completion in the order of `rows`, 0 behind its end; differentiable."""
        at = self.completion >= 0
        rows, row = self.completion[at].unique(return_inverse=True)
        longest = int(self.offset[at].max()) + 1 if len(rows) else 1
        return x.new_zeros(len(rows), longest).index_put((row, self.offset[at]), x[at])

    def mask(self) -> Tensor:
        """(R, 1, T, T) bool: earlier tokens of the same group that are its prompt or the same branch; padding sees itself."""
        T = self.ids.shape[1]
        q, k = self.branches[:, :, None], self.branches[:, None, :]
        same = (self.docs[:, :, None] == self.docs[:, None, :]) & ((k == 0) | (q == k)) & (self.docs[:, :, None] >= 0)
        causal = torch.ones(T, T, dtype=torch.bool, device=self.ids.device).tril()
        return (same & causal | torch.eye(T, dtype=torch.bool, device=self.ids.device))[:, None]

    def to(self, device: torch.device | str) -> Packed:
        return Packed(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


EMPTY = dict(
    ids=0, targets=-100, positions=0, docs=-1, branches=0, old_logprobs=0.0, advantages=0.0, completion=-1, offset=0
)
FIELDS = tuple(EMPTY)


def pack(
    batch: RolloutBatch, advantages: Tensor, *, row_tokens: int, rows: int, skip_zero: bool = True
) -> Iterator[Packed]:
    """Microbatches of at most `rows` rows of about `row_tokens` tokens; a group that does not fit is split, its prompt repeated.

    advantages: (P, G). With `skip_zero`, completions of advantage exactly 0 are left out: they add exactly 0 to a policy gradient.
    Counts that normalise the loss must come from the batch (`n_tokens`), not from what is packed."""
    chunks = [
        chunk
        for p in range(len(batch.problems))
        for chunk in _group_chunks(batch, advantages, p, row_tokens, skip_zero)
    ]
    chunks.sort(key=lambda c: -len(c["ids"]))
    bins: list[dict[str, list]] = []
    for chunk in chunks:  # first fit, longest first
        room = next((b for b in bins if len(b["ids"]) + len(chunk["ids"]) <= row_tokens), None)
        if room is None:
            bins.append(room := {name: [] for name in FIELDS})
        doc = room["docs"][-1] + 1 if room["docs"] else 0
        for name in FIELDS:
            room[name].extend([doc] * len(chunk["ids"]) if name == "docs" else chunk[name])
    bins.sort(key=lambda b: -len(b["ids"]))
    for at in range(0, len(bins), rows):
        yield _pad(bins[at : at + rows])


def idle() -> Packed:
    """One token of padding: a microbatch that adds exactly 0, for a rank that must keep step with the others."""
    return _pad([{name: [EMPTY[name]] for name in FIELDS}])


def _group_chunks(
    batch: RolloutBatch, advantages: Tensor, p: int, row_tokens: int, skip_zero: bool
) -> Iterator[dict[str, list]]:
    """One group as prompt[:-1] followed by branches; each branch repeats the prompt's last token, which predicts its first."""
    prompt, chunk, branch = batch.prompts[p], None, 0
    for g in range(batch.group_size):
        completion, advantage = batch.completions[p * batch.group_size + g], float(advantages[p, g])
        if skip_zero and advantage == 0.0 or not completion.ids:
            continue
        n, on, number = len(completion.ids), completion.written, p * batch.group_size + g
        if chunk is not None and len(chunk["ids"]) + n > row_tokens:
            yield chunk
            chunk = None
        if chunk is None:
            head = len(prompt) - 1
            chunk, branch = (
                dict(
                    ids=prompt[:-1],
                    targets=[-100] * head,
                    positions=list(range(head)),
                    docs=[],
                    branches=[0] * head,
                    old_logprobs=[0.0] * head,
                    advantages=[0.0] * head,
                    completion=[-1] * head,
                    offset=[0] * head,
                ),
                0,
            )
        branch += 1
        chunk["ids"] = chunk["ids"] + [prompt[-1]] + list(completion.ids[:-1])
        chunk["targets"] += [token if mine else -100 for token, mine in zip(completion.ids, on, strict=True)]
        chunk["positions"] += range(len(prompt) - 1, len(prompt) - 1 + n)
        chunk["branches"] += [branch] * n
        chunk["old_logprobs"] += list(completion.logprobs)
        chunk["advantages"] += [advantage * mine for mine in on]
        chunk["completion"] += [number if mine else -1 for mine in on]
        chunk["offset"] += [at if mine else 0 for at, mine in enumerate(on)]
    if chunk is not None:
        yield chunk


def _pad(bins: list[dict[str, list]]) -> Packed:
    T = max(len(b["ids"]) for b in bins)
    dtype = {name: torch.float32 if name in ("old_logprobs", "advantages") else torch.long for name in FIELDS}
    return Packed(
        **{
            name: torch.tensor([b[name] + [EMPTY[name]] * (T - len(b[name])) for b in bins], dtype=dtype[name])
            for name in FIELDS
        }
    )


@torch.no_grad()
def score_logprobs(model: GPT, batch: RolloutBatch, *, temperature: float, row_tokens: int, rows: int) -> Tensor:
    """(N, C) log-probabilities of the sampled ids under `model`, 0 behind a completion's end; in the caller's autocast, on the model's device."""
    device = model.wte.weight.device
    table = torch.zeros(batch.mask().shape, device=device)
    for packed in pack(batch, torch.ones_like(batch.rewards), row_tokens=row_tokens, rows=rows, skip_zero=False):
        packed = packed.to(device)
        found, _ = model.token_logprobs(
            packed.ids, packed.targets, temperature=temperature, positions=packed.positions, mask=packed.mask()
        )
        at = packed.completion >= 0
        table[packed.completion[at], packed.offset[at]] = found[at]
    return table
