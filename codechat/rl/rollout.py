"""From a policy and problems to a scored batch of rollouts, and from that batch to packed rows for training.

A completion is trained on exactly the ids that were sampled; its text is for the reward and for people. A packed row holds
a group's prompt once, and each of its G completions as a branch that sees only the prompt and itself: P + G x C tokens per
group instead of G x (P + C). Of an episode (`episodes`), what the environment said is input, never a target.

Shapes: P problems, G completions each, N = P x G rollouts in problem-major order; C tokens of the longest completion; R
rows of T tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from codechat.core.errors import RunError
from codechat.distributed import dist
from codechat.models import attention, generate
from codechat.models.config import GPTConfig
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.tasks.base import Problem, Score, Task, score_all
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RolloutBatch:
    """N = P x G completions. prompts: P id lists. completions, texts, scores: N each; no scores before `judged`. turns:
    N lists of an episode's turns, empty without environments. longest_row: tokens of the longest training row that this
    run can need; 0 = unknown."""

    problems: list[Problem]
    prompts: list[list[int]]
    completions: list[Completion]
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

    @cached_property
    def kept(self) -> Tensor | None:
        """(tokens of all completions, K) int32: the ids that each token could have been, `Completion.kept`; none where
        the sampler drew from the whole distribution."""
        table = generate.joined_kept([(len(c.ids), c.kept) for c in self.completions])
        if table is not None:
            drawn = torch.tensor([token for c in self.completions for token in c.ids], dtype=table.dtype)
            written = torch.tensor([mine for c in self.completions for mine in c.written], dtype=torch.bool)
            among = (table == drawn[:, None]).any(1)
            assert bool((among | ~written).all()), "a sampled token is not among the ids that its sampler kept"
        return table

    def cut_off(self) -> Tensor:
        """(P, G) bool: completions that ended before their stop sequence."""
        return torch.tensor([c.cut_off for c in self.completions]).view(-1, self.group_size)

    def without_cut_off(self) -> Self:
        """The batch in which no token of a completion that was cut off is learned, or counted."""
        silent = [replace(c, mask=[False] * len(c.ids)) if c.cut_off else c for c in self.completions]
        return replace(self, completions=silent)

    def numbers(self, groups: Sequence[int]) -> list[int]:
        """The completions of these groups, as indices into N."""
        return [p * self.group_size + g for p in groups for g in range(self.group_size)]

    def take(self, groups: Sequence[int]) -> Self:
        """The batch of these groups, in this order."""
        rows = self.numbers(groups)
        taken: dict[str, Any] = {name: [getattr(self, name)[p] for p in groups] for name in ("problems", "prompts")}
        for name in ("completions", "texts", "scores", "turns"):
            values = getattr(self, name)
            taken[name] = [values[i] for i in rows] if values else []
        return replace(self, **taken)

    def replace(self, groups: Sequence[int], other: Self) -> Self:
        """The batch with `groups` replaced by the groups of `other`, in order."""
        place = {p: len(self.problems) + i for i, p in enumerate(groups)}
        return join([self, other]).take([place.get(p, p) for p in range(len(self.problems))])

    def flops(self, shape: GPTConfig, trained: int) -> float:
        """Model FLOPs of a forward pass of each prompt and completion token, and forward and backward of `trained` tokens, at the mean length."""
        prompts, completions = sum(map(len, self.prompts)), int(self.lengths().sum())
        per_token = shape.flops_per_token(prompts // len(self.prompts) + completions // len(self.completions))
        return per_token * ((prompts + completions) / 3 + trained)

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
    sampler: episodes.Sampler = generate.sample,
    **sampling: Any,
) -> RolloutBatch:
    """`group_size` completions of every problem, not yet judged; whole episodes, with their scores, if the task has
    environments.

    sampling: max_new_tokens (of a completion, or of one turn), temperature, top_k, note_kept, seed and keys, one per
    problem (default: its index), on which the draws depend. sampler: `generate.sample`, or that of an engine."""
    if episodes.has_environment(task):
        how = sampling | dict(group_size=group_size, sampler=sampler)
        played = episodes.play(policy, task, problems, tokenizer, tags, **how)
        prompts, completions = [e.prompt for e in played[::group_size]], [e.completion for e in played]
        texts, scores, turns = ([getattr(e, name) for e in played] for name in ("text", "score", "turns"))
        return RolloutBatch(list(problems), prompts, completions, texts, scores, group_size, turns)
    prompts = [chat.prompt(task.prompt(p), tokenizer, tags) for p in problems]
    how = dict(stop=episodes.stop_sequences(task, tokenizer, tags), samples_per_prompt=group_size, on_overflow="stop")
    completions = sampler(policy, prompts, **how, **sampling)
    stops, texts = episodes.stop_texts(task, tags), []
    for i, c in enumerate(completions):
        if stops and (
            cut := chat.cut_after(c.ids, stops, tokenizer)
        ):  # the end was sampled last: the rest keeps its probability
            n = cut[0]
            completions[i] = Completion(c.ids[:n], c.logprobs[:n], "stop", kept=None if c.kept is None else c.kept[:n])
        texts.append(cut[1] if stops and cut else chat.completion_text(c.ids, tokenizer, tags))
    return RolloutBatch(list(problems), prompts, completions, texts, [], group_size)


def judged(task: Task, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the task's scores. RunError for a reward that is not finite: it would end in weights that are not."""
    if not batch.scores:
        problems = [problem for problem in batch.problems for _ in range(batch.group_size)]
        batch = replace(batch, scores=list(score_all(task, problems, batch.texts)))
    finite = batch.rewards.isfinite()
    if not finite.all():
        p, g = finite.logical_not().nonzero()[0].tolist()
        reward = f"the reward {batch.rewards[p, g]}; a finite number is required; correct its score"
        raise RunError(f"task {task.name} gave problem {batch.problems[p].id} {reward}")
    return batch


def collect(
    policy: GPT, task: Task, problems: Sequence[Problem], tokenizer: Tokenizer, tags: str, **how: Any
) -> RolloutBatch:
    """`draw`, then `judged`; how: as draw takes it."""
    return judged(task, draw(policy, task, problems, tokenizer, tags, **how))


EMPTY = dict(ids=0, targets=-100, positions=0, docs=-1, branches=0)  # padding of an (R, T) field
FIELDS = EMPTY | dict(completion=-1, offset=-1)  # and which token of which completion is the target here


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens that hold B completions of a batch with K targets, computed on the host."""

    ids: Tensor  # (R, T)
    targets: Tensor  # (R, T), -100 where nothing is learned
    positions: Tensor  # (R, T), each branch continues its prompt
    docs: Tensor  # (R, T), the group; -1 = padding
    branches: Tensor  # (R, T), 0 = prompt, k = k-th completion of the group
    flat: Tensor  # (K,) where the targets lie in the (R T) tokens, ascending
    row: Tensor  # (K,) which of the B completions
    offset: Tensor  # (K,) which of its tokens
    numbers: Tensor  # (B,) the completions' indices in the batch, ascending
    longest: int  # C of these completions, at least 1
    n_tokens: int  # without padding
    kept: Tensor | None = None  # (K, k) int32: the ids that each target could have been; none = any

    def unpack(self, x: Tensor) -> Tensor:
        """Values (R, T) at the targets as (B, C): one row per completion in the order of `numbers`, 0 behind its end; differentiable."""
        return x.new_zeros(len(self.numbers), self.longest).index_put((self.row, self.offset), x.flatten()[self.flat])

    def mask(self) -> Tensor:
        """(B, C) bool: where `unpack` has values."""
        return self.unpack(torch.ones_like(self.targets, dtype=torch.bool))

    def where(self) -> dict[str, Any]:
        """Positions, attention mask, targets' places and the ids kept there, as `GPT.token_logprobs` takes them: a token
        sees earlier tokens of its group's prompt and of its branch."""
        kind = attention.Documents if attention.dense(self.ids.device) else attention.flex_mask
        at = dict(positions=self.positions, mask=kind(self.docs, self.branches), places=self.flat)
        return at if self.kept is None else at | dict(kept=self.kept)

    def to(self, device: torch.device) -> Self:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: dist.send(value, device) for name, value in tensors.items()})


def pack(
    batch: RolloutBatch, keep: Tensor | None = None, *, row_tokens: int, rows: int, fixed: bool = False
) -> Iterator[Packed]:
    """Microbatches of at most `rows` rows of about `row_tokens` tokens; a group that does not fit is split, its prompt
    repeated. fixed: of exactly `rows` rows of row_tokens, or of a multiple of it where a row is longer, so that
    compiled code meets one shape.

    keep: (P, G) bool, completions to pack; default all. Completions of advantage 0 add exactly 0 to a policy gradient
    and may be left out, so counts that normalise the loss must come from the batch, not from what is packed."""
    kept = [True] * len(batch.completions) if keep is None else keep.flatten().tolist()
    chunks = [chunk for p in range(len(batch.problems)) for chunk in _group_chunks(batch, kept, p, row_tokens)]
    bins: list[dict[str, list]] = []
    for chunk in sorted(chunks, key=_tokens, reverse=True):  # first fit, longest first
        row = next((b for b in bins if _tokens(b) + _tokens(chunk) <= row_tokens), None)
        if row is None:
            bins.append(row := {name: [] for name in FIELDS})
        chunk["docs"] = [row["docs"][-1] + 1 if row["docs"] else 0] * _tokens(chunk)
        for name in row:
            row[name] += chunk[name]
    bins.sort(key=_tokens, reverse=True)
    length = -(-_tokens(bins[0]) // row_tokens) * row_tokens if bins and fixed else 0
    first = batch.lengths().cumsum(0) - batch.lengths()  # (N,) token of each completion in `batch.kept`
    for at in range(0, len(bins), rows):
        packed = _pad(bins[at : at + rows], length, rows if fixed else 0)
        if batch.kept is not None:
            packed = replace(packed, kept=batch.kept[first[packed.numbers[packed.row]] + packed.offset])
        yield packed


def _tokens(row: dict[str, list]) -> int:
    return len(row["ids"])


def _group_chunks(batch: RolloutBatch, keep: Sequence[bool], p: int, row_tokens: int) -> Iterator[dict[str, list]]:
    """One group as prompt[:-1] followed by branches; each branch repeats the prompt's last token, which predicts its first."""
    prompt, head = batch.prompts[p], len(batch.prompts[p]) - 1
    opening = {name: [empty] * head for name, empty in FIELDS.items()}
    opening |= dict(ids=prompt[:-1], positions=list(range(head)))
    chunk: dict[str, list] = {}
    for number in batch.numbers([p]):
        ids, written = batch.completions[number].ids, batch.completions[number].written
        n = len(ids)
        if not keep[number] or not any(written):
            continue
        if chunk and _tokens(chunk) + n > row_tokens:
            yield chunk
            chunk = {}
        branch = (chunk["branches"][-1] if chunk and chunk["branches"] else 0) + 1
        chunk = chunk or {name: list(values) for name, values in opening.items()}
        chunk["ids"] += [prompt[-1], *ids[:-1]]
        chunk["targets"] += [token if mine else -100 for token, mine in zip(ids, written, strict=True)]
        chunk["positions"] += range(head, head + n)
        chunk["branches"] += [branch] * n
        chunk["completion"] += [number if mine else -1 for mine in written]
        chunk["offset"] += range(n)
    if chunk:
        yield chunk


def row_length(row_tokens: int, longest_row: int) -> int:
    """Tokens of a row where all rows of a run have one shape: as set, or what the longest prompt and completion take,
    in whole blocks of flex attention."""
    block = attention.BLOCK
    return max(row_tokens, -(-longest_row // block) * block)


def row_shapes(batch: RolloutBatch, row_tokens: int, rows: int, device: torch.device) -> dict[str, Any]:
    """How `pack` packs for this device: on a GPU rows of one shape in the whole run, for compiled code."""
    if attention.dense(device):
        return dict(row_tokens=row_tokens, rows=rows, fixed=False)
    return dict(row_tokens=row_length(row_tokens, batch.longest_row), rows=rows, fixed=True)


def idle(row_tokens: int = 1, rows: int = 1) -> Packed:
    """Padding only: a microbatch that adds exactly 0, for a rank with fewer microbatches than the others."""
    return _pad([{name: [] for name in FIELDS}], row_tokens, rows)


def _pad(bins: list[dict[str, list]], length: int, rows: int) -> Packed:
    """The bins as rows of one length, at least `length`; padding up to so many rows."""
    T = max(length, *map(_tokens, bins))
    bins = bins + [{name: [] for name in FIELDS}] * (rows - len(bins))
    table = {name: torch.tensor([b[name] + [fill] * (T - _tokens(b)) for b in bins]) for name, fill in FIELDS.items()}
    completion, offset = table.pop("completion").flatten(), table.pop("offset").flatten()
    flat = (completion >= 0).nonzero()[:, 0]
    numbers, row = completion[flat].unique(return_inverse=True)
    offset = offset[flat]
    longest, n_tokens = int(offset.max()) + 1 if len(numbers) else 1, int((table["docs"] >= 0).sum())
    return Packed(**table, flat=flat, row=row, offset=offset, numbers=numbers, longest=longest, n_tokens=n_tokens)


def table_of(
    batch: RolloutBatch, value: Callable[[Packed], Tensor], device: torch.device, shapes: Mapping[str, Any]
) -> Tensor:
    """(N, C) what `value` gives at each token of the completions, from (R, T); 0 behind a completion's end. shapes: of `row_shapes`."""
    table = torch.zeros(len(batch.completions), int(batch.lengths().max()), device=device)
    for packed in pack(batch, **shapes):
        packed = packed.to(device)
        table[packed.numbers, : packed.longest] = packed.unpack(value(packed))
    return table


@torch.no_grad()
def score_logprobs(model: GPT, batch: RolloutBatch, *, temperature: float, row_tokens: int, rows: int) -> Tensor:
    """(N, C) log-probabilities in nats of the sampled ids under `model`, 0 behind a completion's end; in the caller's
    autocast, on the model's device."""
    device = model.wte.weight.device

    def logprobs(packed: Packed) -> Tensor:
        return model.token_logprobs(packed.ids, packed.targets, temperature=temperature, **packed.where())[0]

    return table_of(batch, logprobs, device, row_shapes(batch, row_tokens, rows, device))
