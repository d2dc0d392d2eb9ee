"""What `preference` trains on and how it is scored: pairs read or sampled, their losses with the reference model's
log-probabilities, and what is logged.

Rows of `preferences.SPLIT.jsonl` have the forms of `data.preference_rows`. Pairs are groups of a
`rollout.RolloutBatch`, so that rollouts and preferences share packing and scoring."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import preference_rows
from codechat.data.sources import hash_rows, read_jsonl
from codechat.distributed import dist, sharding
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import engines, preference_losses, rollout
from codechat.rl.rollout import RolloutBatch
from codechat.tasks.base import Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer
from codechat.training.evaluations import task_hash
from codechat.training.rl_session import Meter
from codechat.training.session import Session

SCORED_ROWS = 8  # of a pass without gradients, at most


class PreferenceLoss:
    """The loss on some of the preferences of a batch.

    The reference model is the policy before its first step. It is asked once about everything that it will ever be
    asked."""

    def __init__(self, cfg: Any, model: GPT, pairs: RolloutBatch, held_out: RolloutBatch | None) -> None:
        self.cfg, self.model = cfg, model
        known = [batch for batch in (pairs, held_out) if batch is not None]
        self.rows = max(map(self.rows_of, known))
        self.refs = {id(batch): self.totals(batch) for batch in known if cfg.loss in preference_losses.NEEDS_REFERENCE}
        self.others = {id(b): mismatched(b, cfg.model.block_size) for b in known if cfg.loss == "kto"}
        self.other_refs = {at: self.totals(batch) for at, batch in self.others.items()}

    def totals(self, batch: RolloutBatch) -> Tensor:
        """(P, G) summed log-probabilities, without gradient."""
        how = dict(temperature=1.0, row_tokens=self.cfg.row_tokens, rows=min(self.rows, SCORED_ROWS))
        with sharding.whole(self.model) as reader, dist.autocast():
            return rollout.score_logprobs(reader, batch, **how).sum(1).view_as(batch.rewards)

    def rows_of(self, batch: RolloutBatch) -> int:
        """Rows of a microbatch: on a GPU, whose rows have one shape, as many as the longest groups of the batch
        need; else as many as there are."""
        shapes = rollout.row_shapes(batch, self.cfg.row_tokens, 1 << 30, dist.device())
        if not shapes["fixed"]:
            return shapes["rows"]
        sizes = batch.lengths().view(batch.rewards.shape).sum(1) + torch.tensor([len(ids) for ids in batch.prompts])
        longest = batch.take(sizes.argsort(descending=True)[: self.cfg.device_batch_size].tolist())
        (packed,) = rollout.pack(longest, **shapes | dict(fixed=False))
        return len(packed.ids)

    def reference_point(self, batch: RolloutBatch, rows: list[int]) -> float:
        """KTO's z_0 for these rows of `batch` and those of the other ranks: the mean log-ratio of completions of
        other prompts, at least 0 (KTO, arXiv:2402.01306, section 4.1). One for a whole step, so that accumulation
        and ranks change nothing. 0 for other losses. A collective."""
        if self.cfg.loss != "kto":
            return 0.0
        drift = self.totals(self.others[id(batch)].take(rows)) - picked(self.other_refs[id(batch)], rows)
        total = dist.total(float(drift.double().sum()))
        count = dist.total(drift.numel())
        return max(0.0, total / max(1.0, count))

    def __call__(
        self,
        batch: RolloutBatch,
        rows: list[int],
        point: float,
        learns: bool = True,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Summed loss over these pairs of `batch`, and sums of what is logged: numbers, or tensors, which a `Meter`
        reads. point: of `reference_point`, for the rows of the whole step."""
        part = batch.take(rows)
        device = dist.device()
        with torch.set_grad_enabled(learns):
            shapes = rollout.row_shapes(part, self.cfg.row_tokens, self.rows, device)

            def logprobs(packed: rollout.Packed) -> Tensor:
                with dist.autocast():
                    return self.model.token_logprobs(packed.ids, packed.targets, **packed.where())[0]

            summed = rollout.table_of(part, logprobs, device, shapes).sum(1).view(part.rewards.shape)  # (B, G)
        refs = picked(self.refs[id(batch)], rows) if id(batch) in self.refs else None
        if self.cfg.loss == "kto":
            losses, sums = self.kto(part, summed, refs, point)
        else:
            lengths = dist.send(part.lengths(), device).view(part.rewards.shape)
            how = dict(zip(("chosen_lengths", "rejected_lengths"), lengths.T))
            how |= dict(zip(("ref_chosen", "ref_rejected"), refs.T if refs is not None else (None, None)))
            losses, chosen, rejected = preference_losses.pair_loss(self.cfg.loss, *summed.T, beta=self.cfg.beta, **how)
            sums = dict(chosen_rewards=chosen.sum(), rejected_rewards=rejected.sum(), liked=len(rows))
            sums |= dict(accuracy=(chosen > rejected).sum(), chosen_logprob=summed.detach()[:, 0].sum())
        total = losses.sum() / (part.group_size if self.cfg.loss == "kto" else 1)
        return total, sums | dict(loss=total.detach(), pairs=len(rows))

    def kto(
        self,
        part: RolloutBatch,
        summed: Tensor,
        refs: Tensor,
        point: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """KTO's losses of the completions, and sums of what is logged. `where`: a selection by a mask would have to
        be waited for."""
        liked = dist.send(part.rewards.bool().flatten(), summed.device)
        losses, reward = preference_losses.kto_loss(
            summed.flatten(),
            refs.flatten(),
            liked,
            kl=point,
            beta=self.cfg.beta,
        )
        return losses, dict(
            chosen_rewards=torch.where(liked, reward, 0.0).sum(),
            rejected_rewards=torch.where(liked, 0.0, reward).sum(),
            accuracy=((reward > 0) == liked).sum() / part.group_size,
            chosen_logprob=torch.where(liked, summed.detach().flatten(), 0.0).sum(),
            liked=liked.sum(),
        )


def picked(table: Tensor, rows: list[int]) -> Tensor:
    """These rows of a table that may lie on a GPU."""
    return table[dist.send(torch.tensor(rows), table.device)]


def held_out_means(cfg: Any, loss_of: PreferenceLoss, held_out: RolloutBatch) -> dict[str, float]:
    """Metrics of the held-out pairs, all of which every rank judges."""
    at = list(range(len(held_out.prompts)))
    meter = Meter()
    point = loss_of.reference_point(held_out, at)
    for i in range(0, len(at), cfg.device_batch_size):
        meter.add(**loss_of(held_out, at[i : i + cfg.device_batch_size], point, learns=False)[1])
    meter.read()
    return {f"heldout_{name}": value for name, value in pair_means(meter.sums, held_out.group_size).items()}


def log_step(session: Session, meter: Meter, group_size: int, epoch: float) -> None:
    """Write the step's metrics, over all ranks. A collective."""
    changed = meter.read_changed()
    row = pair_means(dist.mean(dict(meter.sums)), group_size) | changed
    row |= dict(
        epoch=epoch,
        lr=session.lr,
        grad_norm=session.grad_norm,
        step_s=time.perf_counter() - meter.began,
    )
    session.run.log(session.step + 1, row)
    session.bar.update(1)
    session.bar.set_postfix({name: f"{row[f'preference_{name}']:.3f}" for name in ("loss", "margin", "accuracy")})


class Preferences(NamedTuple):
    """Pairs to train on, held-out ones, and the hashes of what they come from."""

    pairs: RolloutBatch
    held_out: RolloutBatch | None
    hashes: dict[str, str]


def read_or_sample(cfg: Any, model: GPT, task: Task | None, tok: Tokenizer) -> Preferences:
    """Pairs to train on and, from files, held-out ones. Every rank samples the same pairs."""
    if cfg.data_dir is None:
        assert task is not None
        problems = task.problems("train", seed=cfg.seed)
        sample = engines.RolloutSampler(cfg, engines.Engine(), model, task, problems, tok)
        pairs = pairs_from_rollouts(sample(0, cfg.sample_groups, seed=cfg.seed + 1))
        # not of the pairs, since the same policy may sample others on a GPU
        return Preferences(pairs, None, task_hash(cfg.task, cfg.task_data, "train", problems))

    def read(split: str, limit: int | None = None) -> RolloutBatch:
        batch = read_preferences(cfg.data_dir, split, tok, cfg.tags, cfg.model.block_size, limit)
        if batch.group_size == 1 and cfg.loss != "kto":
            got = f"--loss {cfg.loss} needs pairs; preferences.{split}.jsonl in {cfg.data_dir} holds single completions"
            raise ConfigError(f"{got} with a label; set --loss kto, or write pairs")
        return batch

    pairs = read("train")
    hashes = {f"{cfg.data_dir}/preferences.train.jsonl": hash_pairs(pairs)}
    try:
        held_out = read("select", cfg.eval_examples)
    except MissingFile:
        return Preferences(pairs, None, hashes)
    return Preferences(pairs, held_out, hashes | {f"{cfg.data_dir}/preferences.select.jsonl": hash_pairs(held_out)})


def hash_pairs(batch: RolloutBatch) -> str:
    """What these preferences are as ids and labels."""
    answers = [(completion.ids, score.reward) for completion, score in zip(batch.completions, batch.scores)]
    return hash_rows([*batch.prompts, *answers])


def place(i: int, size: int, seed: int) -> int:
    """Which pair comes i-th: a fresh order for every epoch, a function of i alone."""
    rng = torch.Generator().manual_seed(seed * 1_000_003 + i // size)
    return int(torch.randperm(size, generator=rng)[i % size])


def pair_means(sums: Mapping[str, float], group_size: int) -> dict[str, float]:
    """Sums over pairs as the declared metrics; rows of a single completion are liked or not, so each side has its
    own count."""
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
    """The first `limit` rows of a split as groups of two with rewards 1 and 0, or of one with its label as reward.
    Rows that are too long or whose answers are equal are left out and counted on stderr. MissingFile without a
    file; DataError with file and line for a row that cannot be read."""
    path = Path(directory) / f"preferences.{split}.jsonl"
    if not path.is_file():
        needed = "rows of prompt, chosen and rejected, or of prompt, completion and label"
        raise MissingFile(f"{path} does not exist; required: {needed}; or set --task without --data-dir")
    groups = list[RolloutBatch]()
    left_out = Counter[str]()
    for number, row in islice(read_jsonl(path), limit):
        group = _encoded(row, tokenizer, tags, block_size, f"{path}:{number}")
        if isinstance(group, str):
            left_out[group] += 1
            continue
        groups.append(group)
        if group.group_size != groups[0].group_size:
            raise DataError(f"{path}:{number} is a pair and the first row is not, or the reverse; split the file")
    if left_out and dist.is_main():
        print(f"{path}: rows left out: {', '.join(f'{n} {why}' for why, n in left_out.items())}", file=sys.stderr)
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
    """The row as one group, or why it teaches nothing."""
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
    scores = [Score(r, "liked" if r else "disliked", {}, bool(r)) for r in rewards]
    made = [Completion(ids, [0.0] * len(ids), "stop") for ids in completions], [""] * len(completions), scores
    return RolloutBatch([Problem("preference", messages, None, "train")], [prompt], *made, len(rewards))


def with_longest_row(batch: RolloutBatch) -> RolloutBatch:
    tokens = (len(batch.prompts[i // batch.group_size]) - 1 + len(c.ids) for i, c in enumerate(batch.completions))
    return replace(batch, longest_row=max(tokens))


def pairs_from_rollouts(batch: RolloutBatch) -> RolloutBatch:
    """The best and the worst completion of every group with different rewards, as the ids that were sampled. DataError
    if no group has any, and for episodes, whose completions hold what an environment said."""
    if batch.turns:
        raise DataError("these completions are episodes; take a task without an environment, or reinforce or grpo")
    pairs = []
    for p, rewards in enumerate(batch.rewards):
        best = int(rewards.argmax())
        worst = int(rewards.argmin())
        ids = [batch.completions[p * batch.group_size + g].ids for g in (best, worst)]
        if rewards[best] > rewards[worst] and all(ids):
            pairs.append(_group(batch.problems[p].messages, batch.prompts[p], ids, [1.0, 0.0]))
    if not pairs:
        problem = f"none of {len(batch.problems)} groups holds two completions of different reward"
        raise DataError(f"{problem}; raise --group-size, or take easier problems")
    return with_longest_row(rollout.join(pairs))


def mismatched(batch: RolloutBatch, block_size: int) -> RolloutBatch:
    """Every prompt with the completions of another prompt, cut to fit the block: samples for KTO's reference point.
    DataError if all prompts are equal."""
    others = batch.numbers(groups_of_other_prompts(batch.prompts))
    cut = []
    for number, other in enumerate(others):
        room = block_size - len(batch.prompts[number // batch.group_size])
        completion = batch.completions[other]
        cut.append(Completion(completion.ids[:room], completion.logprobs[:room], completion.stop))
    return with_longest_row(replace(batch, completions=cut))


def groups_of_other_prompts(prompts: list[list[int]]) -> list[int]:
    """For each group the number of one with another prompt: the next one, or in a run of equal prompts as far on as the
    run is long, so that files whose rows stand together by prompt use all completions."""
    count = len(prompts)
    ends = [count] * count  # where the run of each group ends
    for i in reversed(range(count - 1)):
        ends[i] = ends[i + 1] if prompts[i] == prompts[i + 1] else i + 1
    if ends[0] == count:
        got = f"--loss kto: all {count} rows of a split have one prompt"
        raise DataError(
            f"{got}; its reference point needs answers to another prompt; add rows, or raise --eval-examples"
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
