"""From a policy and problems to a scored batch of rollouts, and from that batch to packed rows for training.

A completion is trained on exactly the ids that were sampled; its text is for the reward and for people. The G completions of a group share their
prompt: a packed row holds the prompt once, and each completion as a branch that sees only the prompt and itself. That costs P + G x C tokens
per group instead of G x (P + C).

Where the task has environments, a completion is a whole episode (`episodes`): what the environment said is input, never a target.

Shapes: P problems, G completions each, N = P x G rollouts in problem-major order; C tokens of the longest completion; R rows of T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from codechat.core.errors import RunError
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
    """N = P x G completions. prompts: P id lists. completions, texts, scores: N each; no scores before `judge`. turns: N lists of an episode's
    turns, empty without environments. longest_row: tokens of the longest training row that this run can need; 0 = unknown."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[generate.Completion]
    texts: list[str]
    scores: list[Score]
    group_size: int
    turns: list[list[episodes.Turn]] = field(default_factory=list)
    longest_row: int = 0

    @cached_property
    def rewards(self) -> Tensor:
        """(P, G) float32."""
        return torch.tensor([s.reward for s in self.scores], dtype=torch.float32).view(-1, self.group_size)

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
        """(N, C) bool: the tokens of each completion that the policy wrote."""
        return pad_sequence([torch.tensor(c.written, dtype=torch.bool) for c in self.completions], batch_first=True)

    def logprobs(self) -> Tensor:
        """(N, C) float32: log-probabilities under the sampler, in nats; 0 where the policy wrote nothing."""
        return pad_sequence([torch.tensor(c.logprobs, dtype=torch.float32) for c in self.completions], batch_first=True)

    def numbers(self, groups: Sequence[int]) -> list[int]:
        """The completions of these groups, as indices into N."""
        return [p * self.group_size + g for p in groups for g in range(self.group_size)]

    def take(self, groups: Sequence[int]) -> RolloutBatch:
        """The batch of these groups, in this order."""
        rows = self.numbers(groups)
        problems, prompts = ([values[p] for p in groups] for values in (self.problems, self.prompts))
        per_completion = (self.completions, self.texts, self.scores, self.turns)
        completions, texts, scores, turns = ([values[i] for i in rows] if values else [] for values in per_completion)
        return RolloutBatch(problems, prompts, completions, texts, scores, self.group_size, turns, self.longest_row)

    def replace(self, groups: Sequence[int], other: RolloutBatch) -> RolloutBatch:
        """The batch with `groups` replaced by the groups of `other`, in order."""
        place = {p: len(self.problems) + i for i, p in enumerate(groups)}
        return join([self, other]).take([place.get(p, p) for p in range(len(self.problems))])

    def flops(self, shape: GPTConfig, trained: int) -> float:
        """Model FLOPs of sampling this batch and training on `trained` tokens of it: a forward pass of each prompt and completion token,
        forward and backward of each trained token, attention at the mean length."""
        prompts, completions = sum(map(len, self.prompts)), int(self.lengths().sum())
        per_token = shape.flops_per_token(prompts // len(self.prompts) + completions // len(self.completions))
        return per_token * ((prompts + completions) / 3 + trained)

    def cut_off(self) -> Tensor:
        """(P, G) bool: completions that ended before their stop sequence."""
        return torch.tensor([c.cut_off for c in self.completions]).view(-1, self.group_size)

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
    names = ("problems", "prompts", "completions", "texts", "scores", "turns")
    joined = {name: [value for batch in batches for value in getattr(batch, name)] for name in names}
    return replace(first, **joined) if others else first


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
) -> RolloutBatch:
    """Sample `group_size` completions of every problem, not yet judged; whole episodes, with their scores, if the task has environments.

    max_new_tokens: of a completion, or of one turn of an episode. keys: one per problem; sampling depends on the seed and the key (default:
    the problem's index). sampler: `generate.sample`, or that of an engine."""
    sampling: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, keys=keys
    )
    if episodes.made_by(task):
        sampling |= dict(group_size=group_size, sampler=sampler)
        played = episodes.play(policy, task, problems, tokenizer, tags, **sampling)
        prompts, completions = [e.prompt for e in played[::group_size]], [e.completion for e in played]
        texts, scores, turns = ([getattr(e, name) for e in played] for name in ("text", "score", "turns"))
        return RolloutBatch(list(problems), prompts, completions, texts, scores, group_size, turns)
    prompts = [chat.prompt(task.prompt(p), tokenizer, tags) for p in problems]
    stop = episodes.stop_sequences(task, tokenizer, tags)
    completions = sampler(policy, prompts, stop=stop, samples_per_prompt=group_size, on_overflow="stop", **sampling)
    completions, texts = _cut_at_stop_texts(completions, episodes.stop_texts(task, tags), tokenizer, tags)
    return RolloutBatch(list(problems), prompts, completions, texts, [], group_size)


def judged(task: Task, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the task's scores. RunError for a reward that is not finite: it would end in weights that are not."""
    if not batch.scores:
        problems = [problem for problem in batch.problems for _ in range(batch.group_size)]
        batch = replace(batch, scores=list(score_all(task, problems, batch.texts)))
    finite = batch.rewards.isfinite()
    if not finite.all():
        p, g = finite.logical_not().nonzero()[0].tolist()
        raise RunError(f"task {task.name} gave problem {batch.problems[p].id} the reward {batch.rewards[p, g]}; "
                       "a finite number is required; correct its score")  # fmt: skip
    return batch


def collect(
    policy: GPT, task: Task, problems: Sequence[Problem], tokenizer: Tokenizer, tags: str, **how: Any
) -> RolloutBatch:
    """`draw`, then `judged`; how: as draw takes it."""
    return judged(task, draw(policy, task, problems, tokenizer, tags, **how))


def _cut_at_stop_texts(
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


# ---------------------------------------------------------------- packed rows

EMPTY = dict(ids=0, targets=-100, positions=0, docs=-1, branches=0)  # padding of an (R, T) field
OUTSIDE = dict(completion=-1, offset=-1)  # which token of which completion is the target here: none


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens that hold B completions of a batch with K targets.

    (R, T): ids; targets, -100 where nothing is learned; positions, each branch continues its prompt; docs, the group, -1 = padding; branches,
    0 = prompt, k = k-th completion of the group. Where the targets lie: flat (K,), ascending indices into the (R T) tokens; row, offset (K,), which
    of the B completions and which of its tokens; numbers (B,), the completions' indices in the batch, ascending. longest: C of these completions,
    at least 1. n_tokens: without padding. All of it is computed on the host: a GPU would have to be waited for."""

    ids: Tensor
    targets: Tensor
    positions: Tensor
    docs: Tensor
    branches: Tensor
    flat: Tensor
    row: Tensor
    offset: Tensor
    numbers: Tensor
    longest: int
    n_tokens: int

    def unpack(self, x: Tensor) -> Tensor:
        """Values (R, T) at the targets as (B, C): one row per completion in the order of `numbers`, 0 behind its end; differentiable."""
        return x.new_zeros(len(self.numbers), self.longest).index_put((self.row, self.offset), x.flatten()[self.flat])

    def mask(self) -> Tensor:
        """(B, C) bool: where `unpack` has values."""
        on = torch.ones(len(self.flat), dtype=torch.bool, device=self.ids.device)
        return on.new_zeros(len(self.numbers), self.longest).index_put((self.row, self.offset), on)

    def where(self) -> dict[str, Any]:
        """Positions, attention mask and targets' places, as `GPT.token_logprobs` takes them: a token sees earlier tokens of its group's prompt
        and of its branch."""
        kind = packed_attention.Documents if packed_attention.dense(self.ids.device) else packed_attention.flex_mask
        return dict(positions=self.positions, mask=kind(self.docs, self.branches), places=self.flat)

    def to(self, device: torch.device) -> Packed:
        tensors = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        return replace(self, **{name: dist.send(getattr(self, name), device) for name in tensors})


def pack(
    batch: RolloutBatch, keep: Tensor | None = None, *, row_tokens: int, rows: int, fixed: bool = False
) -> Iterator[Packed]:
    """Microbatches of at most `rows` rows of about `row_tokens` tokens; a group that does not fit is split, its prompt repeated. fixed: of exactly
    `rows` rows of row_tokens, or of a multiple of it where a row is longer, so that compiled code meets one shape.

    keep: (P, G) bool, completions to pack; default all. Completions of advantage 0 add exactly 0 to a policy gradient and may be left out, so
    counts that normalise the loss must come from the batch, not from what is packed."""
    kept = torch.ones(len(batch.problems), batch.group_size, dtype=torch.bool) if keep is None else keep
    chunks = [c for p in range(len(batch.problems)) for c in _group_chunks(batch, kept[p].tolist(), p, row_tokens)]
    chunks.sort(key=lambda c: -len(c["ids"]))
    bins: list[dict[str, list]] = []
    for chunk in chunks:  # first fit, longest first
        row = next((b for b in bins if len(b["ids"]) + len(chunk["ids"]) <= row_tokens), None)
        if row is None:
            bins.append(row := {name: [] for name in EMPTY | OUTSIDE})
        chunk["docs"] = [row["docs"][-1] + 1 if row["docs"] else 0] * len(chunk["ids"])
        for name in row:
            row[name].extend(chunk[name])
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
    return _pad([{name: [] for name in EMPTY | OUTSIDE}], row_tokens, rows)


def _group_chunks(batch: RolloutBatch, keep: Sequence[bool], p: int, row_tokens: int) -> Iterator[dict[str, list]]:
    """One group as prompt[:-1] followed by branches; each branch repeats the prompt's last token, which predicts its first."""
    prompt, chunk, branch = batch.prompts[p], None, 0
    head = len(prompt) - 1
    for g in range(batch.group_size):
        number = p * batch.group_size + g
        completion = batch.completions[number]
        n, written = len(completion.ids), completion.written
        if not keep[g] or not n:
            continue
        if chunk is not None and len(chunk["ids"]) + n > row_tokens:
            yield chunk
            chunk = None
        if chunk is None:
            branch = 0
            chunk = {name: [empty] * head for name, empty in (EMPTY | OUTSIDE).items()}
            chunk |= dict(ids=prompt[:-1], positions=list(range(head)))
        branch += 1
        added = dict(
            ids=[prompt[-1], *completion.ids[:-1]],
            targets=[token if mine else -100 for token, mine in zip(completion.ids, written, strict=True)],
            positions=range(head, head + n),
            branches=[branch] * n,
            completion=[number if mine else -1 for mine in written],
            offset=range(n),
        )
        for name, values in added.items():
            chunk[name].extend(values)
    if chunk is not None:
        yield chunk


def _pad(bins: list[dict[str, list]], length: int = 0, rows: int = 0) -> Packed:
    """The bins as rows of one length, at least `length`; padding up to so many rows."""
    T = max(length, *(len(b["ids"]) for b in bins))
    bins = bins + [{name: [] for name in bins[0]}] * (rows - len(bins))

    def table(name: str, empty: int) -> Tensor:
        return torch.tensor([b[name] + [empty] * (T - len(b[name])) for b in bins])

    tokens = {name: table(name, empty) for name, empty in EMPTY.items()}
    completion, offset = (table(name, -1).flatten() for name in OUTSIDE)
    flat = (completion >= 0).nonzero()[:, 0]
    numbers, row = completion[flat].unique(return_inverse=True)
    offset = offset[flat]
    longest = int(offset.max()) + 1 if len(numbers) else 1
    n_tokens = int((tokens["docs"] >= 0).sum())
    return Packed(**tokens, flat=flat, row=row, offset=offset, numbers=numbers, longest=longest, n_tokens=n_tokens)


@torch.no_grad()
def score_logprobs(model: GPT, batch: RolloutBatch, *, temperature: float, row_tokens: int, rows: int) -> Tensor:
    """(N, C) log-probabilities in nats of the sampled ids under `model`, 0 behind a completion's end; in the caller's autocast, on the
    model's device."""
    device = model.wte.weight.device
    table = torch.zeros(batch.mask().shape, device=device)
    for packed in pack(batch, **row_shapes(batch, row_tokens, rows, device)):
        packed = packed.to(device)
        logprobs, _ = model.token_logprobs(packed.ids, packed.targets, temperature=temperature, **packed.where())
        table[packed.numbers, : packed.longest] = packed.unpack(logprobs)
    return table
