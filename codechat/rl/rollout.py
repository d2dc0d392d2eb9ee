"""From a policy and problems to a scored batch of rollouts, and from that batch to packed rows
for training.

A completion is trained on exactly the ids that were sampled; its text is for the reward and for
people. A packed row holds a group's prompt once, and each of its G completions as a branch that
sees only the prompt and itself: P + G x C tokens per group instead of G x (P + C). The
environment's part of an episode (`episodes`) is input, never a target.

Shapes: P problems, G completions each, N = P x G rollouts in problem-major order; C tokens of
the longest completion; R rows of T tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from codechat.core.errors import RunError
from codechat.data.sources import IGNORE
from codechat.distributed import hardware
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.fast import attention
from codechat.models.fast.device import on_cpu
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.tasks.base import Problem, Score, Task, score_all
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutBatch:
    """N = P x G completions. prompts: P id lists. completions, texts, scores: N each; no scores
    before `judged`. turns: N lists of an episode's turns, empty without environments.
    longest_row: tokens of the longest training row that this run can need; 0 = unknown."""

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
        return torch.tensor([s.reward for s in self.scores], dtype=torch.float32).view(
            -1, self.group_size
        )

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
        return pad_sequence(
            [torch.tensor(c.written, dtype=torch.bool) for c in self.completions], batch_first=True
        )

    def logprobs(self) -> Tensor:
        """(N, C) float32: log-probabilities under the sampler, in nats; 0 where the policy
        wrote nothing."""
        return pad_sequence(
            [torch.tensor(c.logprobs, dtype=torch.float32) for c in self.completions],
            batch_first=True,
        )

    @cached_property
    def kept(self) -> Tensor | None:
        """(tokens of all completions, K) int32: the ids that each token could have been,
        `Completion.kept`; none where the sampler drew from the whole distribution."""
        table = generate.joined_kept([(len(c.ids), c.kept) for c in self.completions])
        if table is None:
            return None
        ids: list[int] = []
        written: list[bool] = []
        for completion in self.completions:
            ids += completion.ids
            written += completion.written
        drawn = torch.tensor(ids, dtype=table.dtype)
        sampled = torch.tensor(written, dtype=torch.bool)
        among = (table == drawn[:, None]).any(1)
        assert bool((among | ~sampled).all()), (
            "a sampled token is not among the ids that its sampler kept"
        )
        return table

    def cut_off(self) -> Tensor:
        """(P, G) bool: completions that ended before their stop sequence."""
        return torch.tensor([c.cut_off for c in self.completions]).view(-1, self.group_size)

    def without_cut_off(self) -> Self:
        """The batch in which no token of a completion that was cut off is learned, or counted."""
        silent = [
            replace(c, mask=[False] * len(c.ids)) if c.cut_off else c for c in self.completions
        ]
        return replace(self, completions=silent)

    def numbers(self, groups: Sequence[int]) -> list[int]:
        """The completions of these groups, as indices into N."""
        return [p * self.group_size + g for p in groups for g in range(self.group_size)]

    def take(self, groups: Sequence[int]) -> Self:
        """The batch of these groups, in this order."""
        rows = self.numbers(groups)
        return replace(
            self,
            problems=[self.problems[p] for p in groups],
            prompts=[self.prompts[p] for p in groups],
            completions=[self.completions[i] for i in rows],
            texts=_those(self.texts, rows),
            scores=_those(self.scores, rows),
            turns=_those(self.turns, rows),
        )

    def replace(self, groups: Sequence[int], other: "RolloutBatch") -> "RolloutBatch":
        """The batch with `groups` replaced by the groups of `other`, in order."""
        place = {p: len(self.problems) + i for i, p in enumerate(groups)}
        return join([self, other]).take([place.get(p, p) for p in range(len(self.problems))])

    def flops(self, shape: GPTConfig, trained: int, adapters: int = 0) -> float:
        """Model FLOPs of a forward pass of each prompt and completion token, and forward and
        backward of `trained` tokens, at the mean length. adapters: as in `flops_per_token`."""
        n_prompt = sum(map(len, self.prompts))
        n_completion = int(self.lengths().sum())
        mean_length = n_prompt // len(self.prompts) + n_completion // len(self.completions)
        # without adapters, a third of forward and backward is the forward pass
        forward = shape.flops_per_token(mean_length) / 3
        learned = shape.flops_per_token(mean_length, adapters)
        return forward * (n_prompt + n_completion) + learned * trained

    def tier_shares(self, tiers: Sequence[str]) -> dict[str, float]:
        """tier/NAME: share of rollouts on each tier. reward/NAME: mean of each term of the
        reward."""
        n = len(self.scores)
        counts = Counter(score.tier for score in self.scores)
        row = {f"tier/{tier}": counts[tier] / n for tier in tiers}
        for name in self.scores[0].terms:
            row[f"reward/{name}"] = sum(score.terms[name] for score in self.scores) / n
        return row

    def best_and_worst(self, groups: int) -> list[dict[str, object]]:
        """Rows for people: the best and the worst rollout of the first `groups` groups."""
        rows = []
        for p in range(min(groups, len(self.problems))):
            order = self.rewards[p].argsort().tolist()
            rows.append(self._row("best", p * self.group_size + order[-1]))
            rows.append(self._row("worst", p * self.group_size + order[0]))
        return rows

    def _row(self, which: str, i: int) -> dict[str, object]:
        """Completion i as a row of samples.jsonl."""
        problem = self.problems[i // self.group_size]
        row = dict(
            problem=problem.id,
            which=which,
            reward=self.scores[i].reward,
            tier=self.scores[i].tier,
            request=problem.messages[-1]["content"],
            completion=self.texts[i],
            stop=self.completions[i].stop,
        )
        if self.turns:
            row["turns"] = [turn.row() for turn in self.turns[i]]
        return row


def _those(values: list[T], rows: Sequence[int]) -> list[T]:
    """The values of these rows; an empty list stays empty (a batch without scores or turns)."""
    return [values[i] for i in rows] if values else []


def join(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """The groups of several batches with one group size, in order."""
    if len(batches) == 1:
        return batches[0]
    return replace(
        batches[0],
        problems=[problem for batch in batches for problem in batch.problems],
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        completions=[completion for batch in batches for completion in batch.completions],
        texts=[text for batch in batches for text in batch.texts],
        scores=[score for batch in batches for score in batch.scores],
        turns=[turns for batch in batches for turns in batch.turns],
    )


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
    """`group_size` completions of every problem, not yet judged; whole episodes, with their
    scores, if the task has environments.

    sampling: max_new_tokens (of a completion, or of one turn), temperature, top_k, note_kept,
    seed and keys, one per problem (default: its index), on which the draws depend. sampler:
    `generate.sample`, or that of an engine."""
    if episodes.has_environment(task):
        played = episodes.play(
            policy,
            task,
            problems,
            tokenizer,
            tags,
            group_size=group_size,
            sampler=sampler,
            **sampling,
        )
        return RolloutBatch(
            problems=list(problems),
            prompts=[episode.prompt for episode in played[::group_size]],
            completions=[episode.completion for episode in played],
            texts=[episode.text for episode in played],
            scores=[episode.score for episode in played],
            group_size=group_size,
            turns=[episode.turns for episode in played],
        )
    asked = [task.prompt(problem) for problem in problems]
    prompts = [chat.prompt(messages, tokenizer, tags) for messages in asked]
    completions = sampler(
        policy,
        prompts,
        stop=episodes.stop_sequences(task, tokenizer, tags),
        samples_per_prompt=group_size,
        on_overflow="stop",
        **sampling,
    )
    stops = episodes.stop_texts(task, tags)
    batch = RolloutBatch(list(problems), prompts, [], [], [], group_size)
    for number, completion in enumerate(completions):
        # the sampler stops at the likeliest spellings of a stop text; other tokens may spell it too
        cut = chat.cut_after(completion.ids, stops, tokenizer) if stops else None
        if cut:
            length, text = cut
            completion = _beginning(completion, length)
        else:
            messages = asked[number // group_size]
            text = chat.completion_text(completion.ids, tokenizer, tags, messages)
        batch.completions.append(completion)
        batch.texts.append(text)
    return batch


def _beginning(c: Completion, n: int) -> Completion:
    """The first n tokens of a completion, which a stop text ended. Later tokens do not change the
    log-probabilities of earlier ones, so these are kept."""
    return Completion(
        c.ids[:n], c.logprobs[:n], "stop", kept=None if c.kept is None else c.kept[:n]
    )


def judged(task: Task, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the task's scores. RunError for a reward that is not finite: the weights
    would become so too."""
    if not batch.scores:
        problems = [problem for problem in batch.problems for _ in range(batch.group_size)]
        batch = replace(batch, scores=list(score_all(task, problems, batch.texts)))
    finite = batch.rewards.isfinite()
    if not finite.all():
        p, g = finite.logical_not().nonzero()[0].tolist()
        raise RunError(
            f"task {task.name} gave problem {batch.problems[p].id} the reward {batch.rewards[p, g]}; "
            "a finite number is required; correct its score"
        )
    return batch


def collect(
    policy: GPT,
    task: Task,
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    tags: str,
    **sampling: Any,
) -> RolloutBatch:
    """`draw`, then `judged`; sampling: as `draw` takes it."""
    return judged(task, draw(policy, task, problems, tokenizer, tags, **sampling))


# ---- packing

FEW_LENGTHS = 16  # of which the length of a row is a multiple on a CPU


@dataclass(frozen=True)
class Packed:
    """R rows of T tokens that hold B completions of a batch with K targets, computed on the
    host."""

    ids: Tensor  # (R, T)
    targets: Tensor  # (R, T), IGNORE where nothing is learned
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
        """Values (R, T) at the targets as (B, C), differentiable: one row per completion in the
        order of `numbers`, 0 behind its end."""
        return x.new_zeros(len(self.numbers), self.longest).index_put(
            (self.row, self.offset), x.flatten()[self.flat]
        )

    def mask(self) -> Tensor:
        """(B, C) bool: where `unpack` has values."""
        return self.unpack(torch.ones_like(self.targets, dtype=torch.bool))

    def where(self) -> dict[str, Any]:
        """Positions, attention mask, targets' places and the ids kept there, as
        `GPT.token_logprobs` takes them. A token sees earlier tokens of its group's prompt and
        of its branch."""
        # a group's branches must not see each other: they are samples of one prompt
        mask = attention.packed_mask(self.docs, self.branches)
        where = dict(positions=self.positions, mask=mask, places=self.flat)
        if self.kept is not None:
            where["kept"] = self.kept
        return where

    def to(self, device: torch.device) -> Self:
        sent: dict[str, Any] = {
            n: hardware.send(x, device) for n, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **sent)


@dataclass
class Row:
    """Tokens of a row, a value of each in every list."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    docs: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    completion: list[int] = field(default_factory=list)  # whose token is the target; -1 = none
    offset: list[int] = field(default_factory=list)  # which of its tokens

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, other: "Row") -> None:
        """Append a group, which becomes the row's next document."""
        document = self.docs[-1] + 1 if self.docs else 0
        self.ids += other.ids
        self.targets += other.targets
        self.positions += other.positions
        self.docs += [document] * len(other)
        self.branches += other.branches
        self.completion += other.completion
        self.offset += other.offset


def _opening(prompt: Sequence[int]) -> Row:
    """A group's prompt without its last token, which every branch repeats."""
    n = len(prompt) - 1
    return Row(
        ids=list(prompt[:-1]),
        targets=[IGNORE] * n,
        positions=list(range(n)),
        branches=[0] * n,
        completion=[-1] * n,
        offset=[-1] * n,
    )


class RowShapes(TypedDict):
    """Keyword arguments of `pack`."""

    row_tokens: int
    rows: int
    multiple: int
    fixed: bool


def pack(
    batch: RolloutBatch,
    keep: Tensor | None = None,
    *,
    row_tokens: int,
    rows: int,
    multiple: int = 1,
    fixed: bool = False,
) -> Iterator[Packed]:
    """Microbatches of at most `rows` rows of about `row_tokens` tokens; a group that does not
    fit is split, its prompt repeated. multiple: of which a row's length is one. fixed: of exactly
    `rows` rows, all as long as the longest, so that compiled code meets one shape.

    keep: (P, G) bool, completions to pack; default all. Completions of advantage 0 add exactly
    0 to a policy gradient and may be left out, so counts that normalise the loss must come from
    the batch, not from what is packed."""
    wanted = [True] * len(batch.completions) if keep is None else keep.flatten().tolist()
    chunks: list[Row] = []
    for p in range(len(batch.problems)):
        chunks += _group_chunks(batch, wanted, p, row_tokens)
    bins = _first_fit(chunks, row_tokens)
    # rows of similar length share a microbatch, which is padded to its longest row
    bins.sort(key=len, reverse=True)
    # (N,) row of `batch.kept` of each completion's first token
    first = batch.lengths().cumsum(0) - batch.lengths()
    for at in range(0, len(bins), rows):
        longest = len(bins[0 if fixed else at])
        length = -(-longest // multiple) * multiple
        packed = _pad(bins[at : at + rows], length, rows if fixed else 0)
        if batch.kept is not None:
            packed = replace(
                packed, kept=batch.kept[first[packed.numbers[packed.row]] + packed.offset]
            )
        yield packed


def _first_fit(chunks: Sequence[Row], row_tokens: int) -> list[Row]:
    """Rows of at most `row_tokens` tokens, longer only where one chunk is: each chunk, the longest
    first, joins the first row with room for it."""
    rows: list[Row] = []
    for chunk in sorted(chunks, key=len, reverse=True):
        row = next((row for row in rows if len(row) + len(chunk) <= row_tokens), None)
        if row is None:
            row = Row()
            rows.append(row)
        row.extend(chunk)
    return rows


def _group_chunks(
    batch: RolloutBatch, wanted: Sequence[bool], p: int, row_tokens: int
) -> Iterator[Row]:
    """One group as prompt[:-1] followed by branches; each branch repeats the prompt's last
    token, which predicts its first."""
    prompt = batch.prompts[p]
    chunk = _opening(prompt)
    branch = 0  # completions in the chunk
    for number in batch.numbers([p]):
        ids = batch.completions[number].ids
        written = batch.completions[number].written
        # of tokens that are no targets there is nothing to learn
        if not wanted[number] or not any(written):
            continue
        # a single branch stays whole, in a row that is longer
        if branch and len(chunk) + len(ids) > row_tokens:
            yield chunk
            chunk = _opening(prompt)
            branch = 0
        branch += 1
        chunk.ids += [prompt[-1], *ids[:-1]]
        chunk.targets += [
            token if mine else IGNORE for token, mine in zip(ids, written, strict=True)
        ]
        # as if each branch stood alone behind the prompt: the policy sampled it so
        chunk.positions += range(len(prompt) - 1, len(prompt) - 1 + len(ids))
        chunk.branches += [branch] * len(ids)
        chunk.completion += [number if mine else -1 for mine in written]
        chunk.offset += range(len(ids))
    if branch:
        yield chunk


def row_length(row_tokens: int, longest_row: int) -> int:
    """Tokens of a row where all rows of a run have one shape: as set, or what the longest
    prompt and completion take, in whole blocks of flex attention."""
    block = attention.BLOCK
    return max(row_tokens, -(-longest_row // block) * block)


def row_shapes(batch: RolloutBatch, row_tokens: int, rows: int, device: torch.device) -> RowShapes:
    """How `pack` packs for this device: on a GPU rows of one shape in the whole run, for
    compiled code; on a CPU of few lengths (`device.rows_to_add` says why)."""
    if on_cpu(device):
        return RowShapes(row_tokens=row_tokens, rows=rows, multiple=FEW_LENGTHS, fixed=False)
    # one long row raises the length of all: in multiples, so that few shapes are compiled
    length = row_length(row_tokens, batch.longest_row)
    return RowShapes(row_tokens=length, rows=rows, multiple=length, fixed=True)


def idle(row_tokens: int = 1, rows: int = 1) -> Packed:
    """A microbatch of padding alone, which adds exactly 0 to the gradient: for a rank with fewer
    microbatches than the others, whose collectives it must join."""
    return _pad([Row()], row_tokens, rows)


def _pad(bins: list[Row], length: int, rows: int) -> Packed:
    """The bins as rows of one length, at least `length`; padding up to so many rows."""
    T = max(length, *map(len, bins))
    bins = bins + [Row()] * (rows - len(bins))

    def table(name: str, fill: int) -> Tensor:
        """(R, T)"""
        padded = [getattr(row, name) + [fill] * (T - len(row)) for row in bins]
        return torch.tensor(padded)

    completion = table("completion", -1).flatten()
    flat = (completion >= 0).nonzero()[:, 0]
    # completions that have a target here; the others would be rows of zeros
    numbers, row = completion[flat].unique(return_inverse=True)
    offset = table("offset", -1).flatten()[flat]
    docs = table("docs", -1)
    return Packed(
        ids=table("ids", 0),
        targets=table("targets", IGNORE),
        positions=table("positions", 0),
        docs=docs,
        branches=table("branches", 0),
        flat=flat,
        row=row,
        offset=offset,
        numbers=numbers,
        longest=int(offset.max()) + 1 if len(numbers) else 1,
        n_tokens=int((docs >= 0).sum()),
    )


def table_of(
    batch: RolloutBatch,
    value: Callable[[Packed], Tensor],
    device: torch.device,
    shapes: RowShapes,
) -> Tensor:
    """(N, C) what `value`, which returns (R, T), gives at each token of the completions; 0
    behind a completion's end."""
    table = torch.zeros(len(batch.completions), int(batch.lengths().max()), device=device)
    for packed in pack(batch, **shapes):
        packed = packed.to(device)
        table[packed.numbers, : packed.longest] = packed.unpack(value(packed))
    return table


@torch.no_grad()
def score_logprobs(
    model: GPT,
    batch: RolloutBatch,
    *,
    temperature: float,
    row_tokens: int,
    rows: int,
) -> Tensor:
    """(N, C) log-probabilities in nats of the sampled ids under `model`, 0 behind a
    completion's end; in the caller's autocast, on the model's device."""
    device = model.wte.weight.device

    def logprobs(packed: Packed) -> Tensor:
        return model.token_logprobs(
            packed.ids, packed.targets, temperature=temperature, **packed.where()
        )[0]

    return table_of(batch, logprobs, device, row_shapes(batch, row_tokens, rows, device))
