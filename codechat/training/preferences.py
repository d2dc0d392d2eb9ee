"""What `preference` trains on and how it is scored: pairs read or sampled, their losses with
the reference model's log-probabilities, and what is logged.

Rows of `preferences.SPLIT.jsonl` have the forms of `data.preference_rows`. Pairs are groups of
a `rollout.RolloutBatch`, so that rollouts and preferences share packing and scoring."""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import preference_rows
from codechat.data.sources import hash_rows, read_jsonl
from codechat.distributed import dist, hardware, numerics, sharding
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import engines, preference_losses, rollout
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer
from codechat.training.evaluations import task_hash
from codechat.training.session import Session
from codechat.training.step_metrics import Meter

if TYPE_CHECKING:
    from codechat.preference import PreferenceConfig

LossAndSums = tuple[Tensor, dict[str, Any]]  # summed loss, and sums of what is logged
SCORED_ROWS = 8  # of a pass without gradients, at most


@dataclass(frozen=True)
class ScoredPairs:
    """Preferences with the log-probabilities that the reference model gave them before training:
    sums (P, G) over the tokens of each completion."""

    batch: RolloutBatch
    ref_logprobs: Tensor | None = None  # none for losses without a reference model
    # for KTO: every prompt with the completions of another one
    mismatched: RolloutBatch | None = None
    mismatched_refs: Tensor | None = None


class PreferenceLoss:
    """The loss on some rows of a batch of preferences. The reference model is the policy before
    its first step: `scored` computes its log-probabilities once, before training."""

    def __init__(
        self,
        cfg: "PreferenceConfig",
        model: GPT,
        beta: float,
        batches: Sequence[RolloutBatch],
    ) -> None:
        """batches: all preferences that the loss will get. On a GPU their longest groups decide
        the one shape of rows."""
        self.cfg = cfg
        self.model = model
        self.beta = beta
        self.rows = max(map(self._rows_of, batches))

    def _rows_of(self, batch: RolloutBatch) -> int:
        """Rows of a microbatch. On a GPU, where all rows of a run have one shape: as many as the
        longest groups of the batch need. On a CPU: no limit."""
        shapes = rollout.row_shapes(batch, self.cfg.row_tokens, 1 << 30, hardware.device())
        if not shapes["fixed"]:
            return shapes["rows"]
        sizes = batch.lengths().view(batch.rewards.shape).sum(1) + torch.tensor(
            [len(ids) for ids in batch.prompts]
        )
        longest = batch.take(sizes.argsort(descending=True)[: self.cfg.device_batch_size].tolist())
        (packed,) = rollout.pack(longest, row_tokens=shapes["row_tokens"], rows=shapes["rows"])
        return len(packed.ids)

    def scored(self, batch: RolloutBatch) -> ScoredPairs:
        """Preferences with the reference's log-probabilities. Call it before the first step,
        while the model still is the reference."""
        if self.cfg.loss not in preference_losses.NEEDS_REFERENCE:
            return ScoredPairs(batch)
        refs = self._summed(batch)
        if self.cfg.loss != "kto":
            return ScoredPairs(batch, refs)
        # KTO compares with answers that the prompt did not ask for
        others = mismatched(batch, self.cfg.model.block_size)
        return ScoredPairs(batch, refs, others, self._summed(others))

    def _summed(self, batch: RolloutBatch) -> Tensor:
        """(P, G) summed log-probabilities, without gradient."""
        with sharding.whole(self.model) as reader, numerics.autocast():
            logprobs = rollout.score_logprobs(
                reader,
                batch,
                temperature=1.0,
                row_tokens=self.cfg.row_tokens,
                rows=min(self.rows, SCORED_ROWS),
            )
            return logprobs.sum(1).view_as(batch.rewards)

    def reference_point(self, pairs: ScoredPairs, rows: list[int]) -> float:
        """KTO's z_0 for these rows and those of the other ranks: the mean log-ratio of
        completions of other prompts, at least 0 (KTO, arXiv:2402.01306, section 4.1). One for a
        whole step, so that accumulation and ranks change nothing. 0 for other losses. A
        collective."""
        if pairs.mismatched is None or pairs.mismatched_refs is None:
            return 0.0
        drift = self._summed(pairs.mismatched.take(rows)) - picked(pairs.mismatched_refs, rows)
        # float64: log-ratios of whole answers are large, and their mean may be near 0
        total = dist.total(float(drift.double().sum()))
        count = dist.total(drift.numel())
        return max(0.0, total / max(1.0, count))

    def __call__(
        self,
        pairs: ScoredPairs,
        rows: list[int],
        point: float,
        learns: bool = True,
    ) -> LossAndSums:
        """Loss summed over these rows, and the sums to log: numbers, or tensors that `Meter.read`
        copies from the GPU. point: the `reference_point` of the whole step."""
        part = pairs.batch.take(rows)
        refs = None if pairs.ref_logprobs is None else picked(pairs.ref_logprobs, rows)
        with torch.set_grad_enabled(learns):
            summed = self._learned(part)
        if self.cfg.loss == "kto":
            assert refs is not None
            loss, sums = self._kto_loss(part, summed, refs, point)
        else:
            loss, sums = self._pair_loss(part, summed, refs)
        return loss, {**sums, "loss": loss.detach(), "pairs": len(rows)}

    def _learned(self, part: RolloutBatch) -> Tensor:
        """(B, G) summed log-probabilities under the policy, with gradient."""
        device = hardware.device()

        def logprobs(packed: rollout.Packed) -> Tensor:
            with numerics.autocast():
                return self.model.token_logprobs(packed.ids, packed.targets, **packed.where())[0]

        shapes = rollout.row_shapes(part, self.cfg.row_tokens, self.rows, device)
        return rollout.table_of(part, logprobs, device, shapes).sum(1).view(part.rewards.shape)

    def _pair_loss(
        self,
        part: RolloutBatch,
        summed: Tensor,
        refs: Tensor | None,
    ) -> LossAndSums:
        """summed, refs (B, 2): summed log-probabilities of the chosen and of the rejected
        completion."""
        assert self.cfg.loss != "kto"
        chosen, rejected = summed.T
        chosen_lengths, rejected_lengths = (
            hardware.send(part.lengths(), summed.device).view(summed.shape).T
        )
        ref_chosen, ref_rejected = (None, None) if refs is None else refs.T
        result = preference_losses.pair_loss(
            self.cfg.loss,
            chosen,
            rejected,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            beta=self.beta,
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
        )
        return result.losses.sum(), dict(
            chosen_rewards=result.chosen_rewards.sum(),
            rejected_rewards=result.rejected_rewards.sum(),
            liked=len(summed),
            accuracy=(result.chosen_rewards > result.rejected_rewards).sum(),
            chosen_logprob=chosen.detach().sum(),
        )

    def _kto_loss(
        self,
        part: RolloutBatch,
        summed: Tensor,
        refs: Tensor,
        point: float,
    ) -> LossAndSums:
        """summed, refs (B, G): summed log-probabilities under policy and reference. point: z_0."""
        liked = hardware.send(part.rewards.bool().flatten(), summed.device)
        losses, reward = preference_losses.kto_loss(
            summed.flatten(),
            refs.flatten(),
            liked,
            kl=point,
            beta=self.beta,
        )
        return losses.sum() / part.group_size, dict(
            # `where`, not a mask: a mask makes the host wait for the GPU to count what it selects
            chosen_rewards=torch.where(liked, reward, 0.0).sum(),
            rejected_rewards=torch.where(liked, 0.0, reward).sum(),
            liked=liked.sum(),
            accuracy=((reward > 0) == liked).sum() / part.group_size,
            chosen_logprob=torch.where(liked, summed.detach().flatten(), 0.0).sum(),
        )


def picked(table: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a table that may lie on a GPU."""
    return table[hardware.send(torch.tensor(rows), table.device)]


def held_out_means(loss_of: PreferenceLoss, held_out: ScoredPairs) -> dict[str, float]:
    """Metrics of the held-out pairs. Every rank computes all of them."""
    rows = list(range(len(held_out.batch.prompts)))
    meter = Meter()
    point = loss_of.reference_point(held_out, rows)
    size = loss_of.cfg.device_batch_size
    for i in range(0, len(rows), size):
        _, sums = loss_of(held_out, rows[i : i + size], point, learns=False)
        meter.add(sums)
    meter.read()
    return {
        f"heldout_{name}": value
        for name, value in pair_means(meter.sums, held_out.batch.group_size).items()
    }


def log_step(session: Session, meter: Meter, group_size: int, epoch: float) -> None:
    """Write the step's metrics, over all ranks. A collective."""
    changed = meter.read_changed()
    row = pair_means(dist.mean(dict(meter.sums)), group_size)
    session.run.log(
        session.step + 1,
        row,
        weights_changed_bf16=changed,
        epoch=epoch,
        lr=session.lr,
        grad_norm=session.grad_norm,
        step_s=time.perf_counter() - meter.began,
    )
    session.bar.update(1)
    session.bar.set_postfix(
        {name: f"{row[f'preference_{name}']:.3f}" for name in ("loss", "margin", "accuracy")}
    )


class Preferences(NamedTuple):
    """Pairs to train on, held-out pairs, and the hashes of the data they come from."""

    pairs: RolloutBatch
    held_out: RolloutBatch | None
    hashes: dict[str, str]


def read_or_sample(
    cfg: "PreferenceConfig", model: GPT, task: Task | None, tok: Tokenizer
) -> Preferences:
    """The pairs of --data-dir with held-out ones; or pairs sampled on the task, without."""
    if cfg.data_dir is not None:
        return _read_all(cfg, cfg.data_dir, tok)
    assert task is not None
    return _sample_pairs(cfg, model, task, tok)


def _sample_pairs(cfg: "PreferenceConfig", model: GPT, task: Task, tok: Tokenizer) -> Preferences:
    """Pairs of rollouts of the starting policy. Every rank samples the same ones."""
    problems = task.problems("train", seed=cfg.seed)
    sample = engines.RolloutSampler(cfg, engines.Engine(), model, task, problems, tok)
    pairs = pairs_from_rollouts(sample(0, cfg.sample_groups, seed=cfg.seed + 1))
    # the hash is not of the pairs: the same policy may sample others on a GPU
    return Preferences(pairs, None, task_hash(cfg.task, cfg.task_data, "train", problems))


def _read_all(cfg: "PreferenceConfig", directory: str, tok: Tokenizer) -> Preferences:
    """Pairs to train on, and held-out ones if there is such a file."""

    def read(split: str, limit: int | None = None) -> RolloutBatch:
        batch = read_preferences(
            directory, split, tok, cfg.chosen_tags, cfg.model.block_size, limit
        )
        if batch.group_size == 1 and cfg.loss != "kto":
            got = (
                f"--loss {cfg.loss} needs pairs; preferences.{split}.jsonl "
                f"in {directory} holds single completions"
            )
            raise ConfigError(f"{got} with a label; set --loss kto, or write pairs")
        return batch

    pairs = read("train")
    hashes = {f"{directory}/preferences.train.jsonl": hash_pairs(pairs)}
    try:
        held_out = read("select", cfg.eval_examples)
    except MissingFile:
        return Preferences(pairs, None, hashes)
    return Preferences(
        pairs, held_out, hashes | {f"{directory}/preferences.select.jsonl": hash_pairs(held_out)}
    )


def hash_pairs(batch: RolloutBatch) -> str:
    """The content of these preferences: prompts, answers as ids, rewards."""
    answers = [
        (completion.ids, score.reward) for completion, score in zip(batch.completions, batch.scores)
    ]
    return hash_rows([*batch.prompts, *answers])


def shuffled_index(i: int, size: int, seed: int) -> int:
    """Index of the i-th pair of the run: each epoch has a fresh order, and resuming needs nothing
    but i."""
    # far apart: no epoch of one seed has the order of another seed's
    rng = torch.Generator().manual_seed(seed * 1_000_003 + i // size)
    return int(torch.randperm(size, generator=rng)[i % size])


def pair_means(sums: Mapping[str, float], group_size: int) -> dict[str, float]:
    """The logged metrics from sums over rows. A row is a pair, or one completion that is liked or
    not, so liked and disliked completions are counted apart."""
    # a step of KTO may hold liked completions only, or none
    liked = max(1e-9, sums["liked"])
    n = sums["pairs"]
    disliked = max(1e-9, n * group_size - sums["liked"])
    good = sums["chosen_rewards"] / liked
    bad = sums["rejected_rewards"] / disliked
    return dict(
        preference_loss=sums["loss"] / n,
        preference_margin=good - bad,
        preference_accuracy=sums["accuracy"] / n,
        chosen_reward=good,
        rejected_reward=bad,
        chosen_logprob=sums["chosen_logprob"] / liked,
    )


# ---- rows


def read_preferences(
    directory: Path | str,
    split: str,
    tokenizer: Tokenizer,
    tags: str,
    block_size: int,
    limit: int | None = None,
) -> RolloutBatch:
    """The first `limit` rows of a split as groups of two with rewards 1 and 0, or of one with
    its label as reward. Rows that are too long or whose answers are equal are left out and
    counted on stderr. MissingFile without a file; DataError with file and line for a row that
    cannot be read."""
    path = Path(directory) / f"preferences.{split}.jsonl"
    if not path.is_file():
        needed = "rows of prompt, chosen and rejected, or of prompt, completion and label"
        raise MissingFile(
            f"{path} does not exist; required: {needed}; or set --task without --data-dir"
        )
    groups = list[RolloutBatch]()
    left_out = Counter[str]()
    for number, row in islice(read_jsonl(path), limit):
        group = _encoded(row, tokenizer, tags, block_size, f"{path}:{number}")
        if isinstance(group, str):
            left_out[group] += 1
            continue
        groups.append(group)
        if group.group_size != groups[0].group_size:
            raise DataError(
                f"{path}:{number} is a pair and the first row is "
                "not, or the reverse; split the file"
            )
    if left_out and dist.is_main():
        reasons = ", ".join(f"{n} {why}" for why, n in left_out.items())
        print(f"{path}: rows left out: {reasons}", file=sys.stderr)
    if not groups:
        raise DataError(f"{path} has no row that can be learned from; add rows")
    return with_longest_row(rollout.join(groups))


def _encoded(
    row: dict[str, Any],
    tokenizer: Tokenizer,
    tags: str,
    block_size: int,
    where: str,
) -> RolloutBatch | str:
    """The row as a batch of one group, or the reason why it cannot be learned from."""
    preference = preference_rows.preference_of(row, where)
    if isinstance(preference, str):
        return preference
    prompt = chat.prompt(preference.messages, tokenizer, tags)
    completions = [chat.completion_ids(answer, tokenizer, tags) for answer in preference.answers]
    if len(prompt) + max(map(len, completions)) > block_size:
        return f"longer than {block_size} tokens"
    return _group(preference.messages, prompt, completions, preference.rewards)


def _group(
    messages: list[dict],
    prompt: list[int],
    completions: list[list[int]],
    rewards: list[float],
) -> RolloutBatch:
    return RolloutBatch(
        problems=[Problem("preference", messages, None, "train")],
        prompts=[prompt],
        completions=[Completion(ids, [0.0] * len(ids), "stop") for ids in completions],
        texts=[""] * len(completions),
        scores=[
            Score(reward, "liked" if reward else "disliked", {}, bool(reward)) for reward in rewards
        ],
        group_size=len(rewards),
    )


def with_longest_row(batch: RolloutBatch) -> RolloutBatch:
    """The batch with the tokens of its longest training row, as `rollout.pack` lays it out."""
    tokens = (
        len(batch.prompts[i // batch.group_size]) - 1 + len(c.ids)
        for i, c in enumerate(batch.completions)
    )
    return replace(batch, longest_row=max(tokens))


def pairs_from_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """The best and the worst completion of every group with different rewards, as the ids that
    were sampled. DataError if no group has any, and for episodes, whose completions hold what
    an environment said."""
    if batch.turns:
        raise DataError(
            "these completions are episodes; take a task without "
            "an environment, or reinforce or grpo"
        )
    pairs = []
    for p, rewards in enumerate(batch.rewards):
        best = int(rewards.argmax())
        worst = int(rewards.argmin())
        ids = [batch.completions[p * batch.group_size + g].ids for g in (best, worst)]
        # an answer of no tokens has no log-probability that could rise or fall
        if rewards[best] > rewards[worst] and all(ids):
            pairs.append(_group(batch.problems[p].messages, batch.prompts[p], ids, [1.0, 0.0]))
    if not pairs:
        problem = f"none of {len(batch.problems)} groups holds two completions of different reward"
        raise DataError(f"{problem}; raise --group-size, or take easier problems")
    return with_longest_row(rollout.join(pairs))


def mismatched(batch: RolloutBatch, block_size: int) -> RolloutBatch:
    """Every prompt with the completions of another prompt, cut to fit the block: samples for
    KTO's reference point. DataError if all prompts are equal."""
    others = batch.numbers(groups_of_other_prompts(batch.prompts))
    cut = []
    for number, other in enumerate(others):
        room = block_size - len(batch.prompts[number // batch.group_size])
        completion = batch.completions[other]
        cut.append(Completion(completion.ids[:room], completion.logprobs[:room], completion.stop))
    return with_longest_row(replace(batch, completions=cut))


def groups_of_other_prompts(prompts: list[list[int]]) -> list[int]:
    """For each group the number of one with another prompt: the next one, or in a run of equal
    prompts as far on as the run is long, so that files whose rows stand together by prompt use
    all completions."""
    count = len(prompts)
    ends = [count] * count  # where the run of each group ends
    for i in reversed(range(count - 1)):
        ends[i] = ends[i + 1] if prompts[i] == prompts[i + 1] else i + 1
    if ends[0] == count:
        got = f"--loss kto: all {count} rows of a split have one prompt"
        raise DataError(
            f"{got}; its reference point needs answers to another "
            "prompt; add rows, or raise --eval-examples"
        )
    others = list[int]()
    start = 0
    for i in range(count):
        if i == ends[start]:
            start = i
        other = (i + ends[start] - start) % count
        while prompts[other] == prompts[i]:
            other = ends[other] % count
        others.append(other)
    return others
