"""From a policy and problems to a scored batch of rollouts, and from that batch to packed rows for training.

A completion is trained on exactly the ids that were sampled. Its text is for the reward and for people. The G completions of a group share
their prompt: a packed row holds the prompt once, and each completion as a branch that sees only the prompt and itself. That costs
P + G x C tokens per group instead of G x (P + C).

If the task has environments, a completion is a whole episode (`episodes`). What the environment said is input: it is no target, has no
advantage and counts in no mean.

Left out: off-policy buffers; metrics (`rollout_metrics`).

Shapes: P problems, G completions each, N = P x G rollouts in problem-major order; R rows of T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from codechat.distributed import dist
from codechat.models import generate, packed_attention
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.tasks.base import Problem, Score, Task, score_all
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RolloutBatch:
    """N = P x G scored completions. prompts: P id lists. completions, texts, scores: N each. rewards: (P, G) float32.
    turns: N lists of an episode's turns; empty where completions are answers to one prompt. longest_row: tokens of the longest row that the
    problems of this run can need, where rows have one shape; 0 = not known."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[generate.Completion]
    texts: list[str]
    scores: list[Score]
    rewards: Tensor
    group_size: int
    turns: list[list[episodes.Turn]] = field(default_factory=list)
    longest_row: int = 0

    @property
    def correct(self) -> Tensor:
        """(P, G) bool: exact matches, whatever the shaped reward is."""
        return torch.tensor([s.correct for s in self.scores]).view_as(self.rewards)

    @property
    def n_tokens(self) -> int:
        """Tokens that the policy wrote in the whole batch."""
        return sum(sum(c.written) for c in self.completions)

    def lengths(self) -> Tensor:
        """(N,) tokens of each completion, including what an environment said between its turns."""
        return torch.tensor([len(c.ids) for c in self.completions])

    def mask(self) -> Tensor:
        """(N, C) bool: the tokens of each completion that the policy wrote; C is the length of the longest completion."""
        return pad_sequence([torch.tensor(c.written, dtype=torch.bool) for c in self.completions], batch_first=True)

    def logprobs(self) -> Tensor:
        """(N, C) float32: log-probabilities under the sampler, in nats; 0 where the policy wrote nothing."""
        return pad_sequence([torch.tensor(c.logprobs, dtype=torch.float32) for c in self.completions], batch_first=True)

    def take(self, groups: Sequence[int]) -> RolloutBatch:
        """The batch of these groups, in this order."""
        rows = [p * self.group_size + g for p in groups for g in range(self.group_size)]
        completions, texts, scores, turns = (
            [values[i] for i in rows] if values else []
            for values in (self.completions, self.texts, self.scores, self.turns)
        )
        problems, prompts = ([values[p] for p in groups] for values in (self.problems, self.prompts))
        rewards = self.rewards[list(groups)]
        return RolloutBatch(
            problems, prompts, completions, texts, scores, rewards, self.group_size, turns, self.longest_row
        )

    def replace(self, groups: Sequence[int], other: RolloutBatch) -> RolloutBatch:
        """The batch with `groups` replaced by the groups of `other`, in order."""
        both = join([self, other])
        place = {p: len(self.problems) + i for i, p in enumerate(groups)}
        return both.take([place.get(p, p) for p in range(len(self.problems))])

    def flops(self, shape: GPTConfig, trained: int) -> float:
        """Model FLOPs of sampling this batch and training on `trained` tokens of it: a forward pass of each prompt and completion token,
        forward and backward of each trained token, attention at the mean length."""
        prompts, completions = sum(map(len, self.prompts)), int(self.lengths().sum())
        per_token = shape.flops_per_token(prompts // len(self.prompts) + completions // len(self.completions))
        return per_token * ((prompts + completions) / 3 + trained)

    def cut_off(self) -> Tensor:
        """(P, G) bool: completions that ended in the middle of an answer, without its stop sequence."""
        return torch.tensor([c.cut_off for c in self.completions]).view_as(self.rewards)

    @property
    def truncated_frac(self) -> float:
        """Share of completions that were cut off."""
        return int(self.cut_off().sum()) / len(self.completions)

    def tier_shares(self, tiers: Sequence[str]) -> dict[str, float]:
        """tier/NAME: share of rollouts on each tier. reward/NAME: mean of each term of the reward."""
        counts, n = Counter(s.tier for s in self.scores), len(self.scores)
        terms = {f"reward/{name}": sum(s.terms[name] for s in self.scores) / n for name in self.scores[0].terms}
        return {f"tier/{t}": counts[t] / n for t in tiers} | terms

    def best_and_worst(self, groups: int) -> list[dict[str, object]]:
        """Rows for people: the best and the worst rollout of the first `groups` groups."""
        rows: list[dict[str, object]] = []
        for p, problem in enumerate(self.problems[:groups]):
            order = self.rewards[p].argsort().tolist()
            for which, g in (("best", order[-1]), ("worst", order[0])):
                i = p * self.group_size + g
                row = dict(problem=problem.id, which=which, reward=self.scores[i].reward, tier=self.scores[i].tier)
                row |= dict(request=problem.messages[-1]["content"], completion=self.texts[i])
                row |= dict(stop=self.completions[i].stop)
                rows.append(row | (dict(turns=[t.row() for t in self.turns[i]]) if self.turns else {}))
        return rows


def join(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """The groups of several batches with one group size, in order."""
    first, *others = batches
    if not others:
        return first
    problems, prompts, completions, texts, scores, turns = (
        [value for batch in batches for value in getattr(batch, name)]
        for name in ("problems", "prompts", "completions", "texts", "scores", "turns")
    )
    rewards = torch.cat([batch.rewards for batch in batches])
    return RolloutBatch(
        problems, prompts, completions, texts, scores, rewards, first.group_size, turns, first.longest_row
    )


@dataclass(frozen=True)
class Drawn:
    """N = P x G completions that are not judged yet. scores: of episodes, whose environments have given them; else None."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[generate.Completion]
    texts: list[str]
    group_size: int
    turns: list[list[episodes.Turn]] = field(default_factory=list)
    scores: list[Score] | None = None


def draw(
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
    keys: Sequence[int | str] | None = None,
    sampler: episodes.Sampler = generate.sample,
) -> Drawn:
    """Sample `group_size` completions of every problem; whole episodes if the task has environments.

    max_new_tokens: of a completion, or of one turn of an episode. keys: one per problem; sampling depends on the seed and the key (default:
    the problem's index). sampler: `generate.sample`, or that of an engine."""
    sampling: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, keys=keys
    )
    if episodes.made_by(task):
        played = episodes.play(
            policy, task, problems, tokenizer, tags, group_size=group_size, sampler=sampler, **sampling
        )
        prompts, completions = [e.prompt for e in played[::group_size]], [e.completion for e in played]
        turns, scores = [e.turns for e in played], [e.score for e in played]
        return Drawn(list(problems), prompts, completions, [e.text for e in played], group_size, turns, scores)
    prompts = [chat.prompt(task.prompt(p), tokenizer, tags) for p in problems]
    stop = episodes.stop_sequences(task, tokenizer, tags)
    completions = sampler(policy, prompts, stop=stop, samples_per_prompt=group_size, on_overflow="stop", **sampling)
    completions, texts = _read(completions, episodes.stop_texts(task, tags), tokenizer, tags)
    return Drawn(list(problems), prompts, completions, texts, group_size)


def judged(task: Task, drawn: Drawn) -> RolloutBatch:
    """The batch with the task's scores."""
    G, scores = drawn.group_size, drawn.scores
    if scores is None:
        scores = list(score_all(task, [p for p in drawn.problems for _ in range(G)], drawn.texts))
    rewards = torch.tensor([s.reward for s in scores], dtype=torch.float32).view(len(drawn.problems), G)
    return RolloutBatch(drawn.problems, drawn.prompts, drawn.completions, drawn.texts, scores, rewards, G, drawn.turns)


def collect(
    policy: GPT, task: Task, problems: Sequence[Problem], tokenizer: Tokenizer, tags: str, **how: Any
) -> RolloutBatch:
    """`draw`, then `judged`; how: as draw takes it."""
    return judged(task, draw(policy, task, problems, tokenizer, tags, **how))


def _read(
    completions: Sequence[generate.Completion], stops: Sequence[str], tokenizer: Tokenizer, tags: str
) -> tuple[list[generate.Completion], list[str]]:
    """Completions, cut behind the first stop text, and their texts. What is cut off was sampled last, so the rest keeps its probability."""
    cuts = [chat.cut_after(c.ids, stops, tokenizer) if stops else None for c in completions]
    kept = [
        generate.Completion(c.ids[: cut[0]], c.logprobs[: cut[0]], "stop") if cut else c
        for c, cut in zip(completions, cuts)
    ]
    texts = [cut[1] if cut else chat.completion_text(c.ids, tokenizer, tags) for c, cut in zip(completions, cuts)]
    return kept, texts


@dataclass(frozen=True)
class Places:
    """Where the K targets of packed rows lie, of B completions. Found on the host, before the rows are sent: a GPU would have to be waited for.

    n_tokens: that are not padding. flat (K,): indices into the (R T) tokens, ascending. numbers (B,): the completions, ascending. row, offset (K,):
    which of these B a target belongs to, and which of its tokens it is. longest: of these completions, at least 1."""

    n_tokens: int
    longest: int
    flat: Tensor
    numbers: Tensor
    row: Tensor
    offset: Tensor

    @classmethod
    def of(cls, docs: Tensor, completion: Tensor, offset: Tensor) -> Places:
        flat = (completion.flatten() >= 0).nonzero()[:, 0]
        numbers, row = completion.flatten()[flat].unique(return_inverse=True)
        offset = offset.flatten()[flat]
        longest = int(offset.max()) + 1 if len(numbers) else 1
        return cls(int((docs >= 0).sum()), longest, flat, numbers, row, offset)

    def to(self, device: torch.device) -> Places:
        sent = {name: dist.send(getattr(self, name), device) for name in ("flat", "numbers", "row", "offset")}
        return replace(self, **sent)


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens, all fields but `places` (R, T). targets: -100 where nothing is learned. positions: each branch continues its prompt. docs:
    the group that a token belongs to, -1 = padding. branches: 0 = prompt, k = k-th completion of the group. old_logprobs, advantages: 0 outside
    completions. completion, offset: which token of which completion of the batch is the target; -1 and 0 outside."""

    ids: Tensor
    targets: Tensor
    positions: Tensor
    docs: Tensor
    branches: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    completion: Tensor
    offset: Tensor
    places: Places

    @property
    def n_tokens(self) -> int:
        """Tokens that are not padding, prompts included."""
        return self.places.n_tokens

    def rows(self) -> Tensor:
        """(B,) the completions of the batch that are packed here, ascending."""
        return self.places.numbers

    def at_targets(self, x: Tensor) -> Tensor:
        """Values (R, T) at the targets, (K,)."""
        return x.flatten()[self.places.flat]

    def unpack(self, x: Tensor) -> Tensor:
        """Values (R, T) at the targets as (B, C): one row per completion in the order of `rows`, 0 behind its end; differentiable."""
        at = self.places
        return x.new_zeros(len(at.numbers), at.longest).index_put((at.row, at.offset), self.at_targets(x))

    def mask(self) -> Any:
        """A token sees earlier tokens of its group's prompt and of its own branch; for `packed_attention.attend`."""
        kind = packed_attention.Documents if packed_attention.dense(self.ids.device) else packed_attention.flex_mask
        return kind(self.docs, self.branches)

    def to(self, device: torch.device | str) -> Packed:
        device = torch.device(device)
        return Packed(
            **{name: dist.send(getattr(self, name), device) for name in FIELDS}, places=self.places.to(device)
        )


EMPTY = dict(
    ids=0, targets=-100, positions=0, docs=-1, branches=0, old_logprobs=0.0, advantages=0.0, completion=-1, offset=0
)
FIELDS = tuple(EMPTY)


def pack(
    batch: RolloutBatch,
    advantages: Tensor,
    *,
    row_tokens: int,
    rows: int,
    skip_zero: bool = True,
    fixed: bool = False,
) -> Iterator[Packed]:
    """Microbatches of at most `rows` rows of about `row_tokens` tokens; a group that does not fit is split, its prompt repeated. fixed: of exactly
    `rows` rows of row_tokens, or of a multiple of it where a row is longer, so that compiled code meets one shape.

    advantages: (P, G). skip_zero skips completions of advantage exactly 0, which add exactly 0 to a policy gradient. So counts that
    normalise the loss must come from the batch (`n_tokens`), not from what is packed."""
    chunks = [
        chunk
        for p in range(len(batch.problems))
        for chunk in _group_chunks(batch, advantages, p, row_tokens, skip_zero)
    ]
    chunks.sort(key=lambda c: -len(c["ids"]))
    bins: list[dict[str, list]] = []
    for chunk in chunks:  # first fit, longest first
        row = next((b for b in bins if len(b["ids"]) + len(chunk["ids"]) <= row_tokens), None)
        if row is None:
            bins.append(row := {name: [] for name in FIELDS})
        doc = row["docs"][-1] + 1 if row["docs"] else 0
        for name in FIELDS:
            row[name].extend([doc] * len(chunk["ids"]) if name == "docs" else chunk[name])
    bins.sort(key=lambda b: -len(b["ids"]))
    whole = -(-len(bins[0]["ids"]) // row_tokens) * row_tokens if bins and fixed else 0
    for at in range(0, len(bins), rows):
        yield _pad(bins[at : at + rows], whole, rows if fixed else 0)


def row_shapes(batch: RolloutBatch, row_tokens: int, rows: int, device: torch.device) -> dict[str, Any]:
    """How `pack` packs for this device: on a GPU rows of one shape in the whole run, for compiled code."""
    if packed_attention.dense(device):
        return dict(row_tokens=row_tokens, rows=rows, fixed=False)
    return dict(row_tokens=row_length(row_tokens, batch.longest_row), rows=rows, fixed=True)


def row_length(row_tokens: int, longest_row: int) -> int:
    """Tokens of a row where all rows of a run have one shape: as set, or what the longest prompt and completion take, in whole blocks of flex attention."""
    block = packed_attention.BLOCK
    return max(row_tokens, -(-longest_row // block) * block)


def idle(row_tokens: int = 1, rows: int = 1) -> Packed:
    """Padding only: a microbatch that adds exactly 0, for a rank with fewer microbatches than the others."""
    return _pad([{name: [EMPTY[name]] for name in FIELDS}], row_tokens, rows)


def _group_chunks(
    batch: RolloutBatch, advantages: Tensor, p: int, row_tokens: int, skip_zero: bool
) -> Iterator[dict[str, list]]:
    """One group as prompt[:-1] followed by branches; each branch repeats the prompt's last token, which predicts its first."""
    prompt, chunk, branch = batch.prompts[p], None, 0
    head = len(prompt) - 1
    for g in range(batch.group_size):
        number = p * batch.group_size + g
        completion, advantage = batch.completions[number], float(advantages[p, g])
        if skip_zero and advantage == 0.0 or not completion.ids:
            continue
        n, written = len(completion.ids), completion.written
        if chunk is not None and len(chunk["ids"]) + n > row_tokens:
            yield chunk
            chunk = None
        if chunk is None:
            chunk, branch = {name: [EMPTY[name]] * head for name in FIELDS}, 0
            chunk |= dict(ids=prompt[:-1], positions=list(range(head)))
        branch += 1
        added = dict(
            ids=[prompt[-1], *completion.ids[:-1]],
            targets=[token if mine else -100 for token, mine in zip(completion.ids, written, strict=True)],
            positions=range(head, head + n),
            branches=[branch] * n,
            old_logprobs=completion.logprobs,
            advantages=[advantage * mine for mine in written],
            completion=[number if mine else -1 for mine in written],
            offset=[at if mine else 0 for at, mine in enumerate(written)],
        )
        for name, values in added.items():
            chunk[name].extend(values)
    if chunk is not None:
        yield chunk


def _pad(bins: list[dict[str, list]], length: int = 0, rows: int = 0) -> Packed:
    """The bins as rows of one length, at least `length`; padding up to so many rows."""
    T = max(length, *(len(b["ids"]) for b in bins))
    bins = bins + [{name: [] for name in FIELDS}] * (rows - len(bins))
    dtype = {name: torch.float32 if isinstance(EMPTY[name], float) else torch.long for name in FIELDS}
    padded = {name: [b[name] + [EMPTY[name]] * (T - len(b[name])) for b in bins] for name in FIELDS}
    fields = {name: torch.tensor(padded[name], dtype=dtype[name]) for name in FIELDS}
    return Packed(**fields, places=Places.of(fields["docs"], fields["completion"], fields["offset"]))


@torch.no_grad()
def score_logprobs(model: GPT, batch: RolloutBatch, *, temperature: float, row_tokens: int, rows: int) -> Tensor:
    """(N, C) log-probabilities in nats of the sampled ids under `model`, 0 behind a completion's end; in the caller's autocast, on the
    model's device."""
    device = model.wte.weight.device
    table = torch.zeros(batch.mask().shape, device=device)
    for packed in pack(
        batch, torch.ones_like(batch.rewards), skip_zero=False, **row_shapes(batch, row_tokens, rows, device)
    ):
        packed = packed.to(device)
        where = dict(positions=packed.positions, mask=packed.mask(), places=packed.places.flat)
        found = packed.unpack(model.token_logprobs(packed.ids, packed.targets, temperature=temperature, **where)[0])
        table[packed.rows(), : found.shape[1]] = found
    return table
