"""Preferences: DPO, IPO, KTO, CPO, ORPO or SimPO from pairs (or labelled completions) that are there before training starts.

    codechat preference --init-from my-sft --data-dir data/preferences --loss dpo --run-name my-dpo
    codechat preference --init-from my-sft --task funcall --task-data data/nano --run-name my-dpo     pairs sampled from the policy itself
    torchrun --standalone --nproc-per-node 8 -m codechat.preference --init-from d20-sft --data-dir data/preferences --run-name d20-dpo

Pairs come from preferences.train.jsonl (and .select.jsonl for evaluation), or, without --data-dir, from the best and the worst completion of
groups that the starting policy samples on --task. The starting policy is the reference model; its log-probabilities are computed once, before
the first step, and it is then let go. Where --task is set, evaluations also ask the task what the policy now earns: a margin can rise while
answers get worse, since the loss sees only differences.

"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from codechat.core.command import train_main
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.tasks import NAMES
from codechat.training.presets import TOY_RUN
from codechat.training.settings import LearningSettings, PolicySettings, run_presets

if TYPE_CHECKING:
    from torch import Tensor

    from codechat.models.gpt import GPT
    from codechat.rl.rollout import RolloutBatch
    from codechat.runs.run import Run
    from codechat.tasks.base import Task
    from codechat.text.tokenizer import Tokenizer
    from codechat.training.meters import Meter
    from codechat.training.session import Session


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(LearningSettings, PolicySettings):
    """Settings of one run on preferences."""

    run_name: str = "preference"
    loss: Literal["dpo", "ipo", "kto", "cpo", "orpo", "simpo"] = opt("dpo", "the paper")
    data_dir: str | None = opt(None, "directory with preferences.SPLIT.jsonl; none = pairs of rollouts on --task")
    task: str | None = opt(None, f"task to sample pairs on, and to evaluate on: {', '.join(NAMES)}")
    task_data: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    sample_groups: int = opt(256, "groups to sample where pairs come from rollouts", least=1)
    group_size: int = opt(8, "completions per group", least=1)
    beta: float | None = opt(
        None, "strength of the pull towards the reference, or scale of the margin; none = the paper's", least=0
    )
    margin: float = opt(1.0, "SimPO's target margin", least=0)
    sft_coef: float | None = opt(None, "weight of an SFT term on what is preferred; none = the paper's", least=0)
    device_batch_size: int = opt(8, "pairs (KTO: rows) per microbatch and device", least=1)
    max_steps: int = 100
    temperature: float = opt(
        1.0, "sampling temperature of rollouts and evaluations; the loss is at temperature 1", least=0
    )
    top_k: int | None = opt(None, "sample rollouts and evaluations among the k likeliest tokens; none = all", least=1)
    max_new_tokens: int = opt(64, "longest sampled completion, tokens", least=1)
    row_tokens: int = opt(512, "tokens of a packed training row", least=2)
    lr: float = 5e-5
    muon_lr: float = 0.001
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    eval_every: int = opt(25, "steps between evaluations; 0 = only the last", least=0, identity=False)
    eval_examples: int = opt(128, "validation pairs, and validation problems of the task, per evaluation", least=1)
    save_every: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None and self.task is None:
            raise ConfigError(
                "neither --data-dir nor --task; set one: preferences are read from a directory or sampled on a task"
            )
        if self.data_dir is None and self.group_size < 2:
            raise ConfigError(f"group_size {self.group_size}: a pair needs two completions; set --group-size 2 or more")
        if self.beta is not None and self.beta <= 0:
            raise ConfigError(f"beta {self.beta}; it must be above 0")

    @property
    def ks(self) -> tuple[int, ...]:
        """Of evaluations on the task: one completion of each problem."""
        return (1,)

    def resolved(self) -> PreferenceConfig:
        """With what is none filled in from the paper."""
        from codechat.rl.preference_losses import BETA, SFT_COEF

        beta = BETA[self.loss] if self.beta is None else self.beta
        return replace(self, beta=beta, sft_coef=SFT_COEF[self.loss] if self.sft_coef is None else self.sft_coef)


RUN_PRESETS = run_presets(toy=TOY_RUN | {"group_size": 16, "sample_groups": 64, "lr": 1e-3})
SCORED_ROWS = 8  # of a pass without gradients, at most


class PreferenceLoss:
    """The loss on some of the preferences of a batch.

    The reference model is the policy before its first step. It is asked once about everything that it will ever be asked."""

    def __init__(self, cfg: PreferenceConfig, model: GPT, *batches: RolloutBatch | None) -> None:
        from codechat.rl import preference_data
        from codechat.rl.preference_losses import NEEDS_REFERENCE

        self.cfg, self.model = cfg, model
        known = [batch for batch in batches if batch is not None]
        self.rows = max(map(self.rows_of, known))
        self.refs = {id(batch): self.totals(batch) for batch in known if cfg.loss in NEEDS_REFERENCE}
        mismatched = preference_data.mismatched
        self.others = {id(b): mismatched(b, cfg.model.block_size) for b in known if cfg.loss == "kto"}
        self.other_refs = {at: self.totals(batch) for at, batch in self.others.items()}

    def totals(self, batch: RolloutBatch) -> Tensor:
        """(P, G) summed log-probabilities, without gradient."""
        from codechat.distributed import dist, sharding
        from codechat.rl.rollout import score_logprobs

        how = dict(temperature=1.0, row_tokens=self.cfg.row_tokens, rows=min(self.rows, SCORED_ROWS))
        with sharding.whole(self.model) as reader, dist.autocast():
            return score_logprobs(reader, batch, **how).sum(1).view_as(batch.rewards)

    def rows_of(self, batch: RolloutBatch) -> int:
        """Rows of a microbatch: on a GPU, whose rows have one shape, as many as the longest groups of the batch need; else as many as there are."""
        import torch

        from codechat.distributed import dist
        from codechat.rl import rollout

        shapes = rollout.row_shapes(batch, self.cfg.row_tokens, 1 << 30, dist.device())
        if not shapes["fixed"]:
            return shapes["rows"]
        sizes = batch.lengths().view(batch.rewards.shape).sum(1) + torch.tensor([len(ids) for ids in batch.prompts])
        longest = batch.take(sizes.argsort(descending=True)[: self.cfg.device_batch_size].tolist())
        (packed,) = rollout.pack(longest, **shapes | dict(fixed=False))
        return len(packed.ids)

    def summed(self, part: RolloutBatch) -> Tensor:
        """(B, G) summed log-probabilities of the completions under the policy."""
        import torch

        from codechat.distributed import dist
        from codechat.rl import rollout

        device, sums, numbers = dist.device(), [], []
        for packed in rollout.pack(part, **rollout.row_shapes(part, self.cfg.row_tokens, self.rows, device)):
            packed = packed.to(device)
            with dist.autocast():
                logprobs, _ = self.model.token_logprobs(packed.ids, packed.targets, **packed.where())
            sums.append(packed.unpack(logprobs).sum(1))
            numbers.append(packed.numbers)
        in_order = sums[0] if len(sums) == 1 else torch.cat(sums)[torch.cat(numbers).argsort()]
        return in_order.view(part.rewards.shape)

    def __call__(self, batch: RolloutBatch, rows: list[int], learns: bool = True) -> tuple[Tensor, dict[str, Any]]:
        """Summed loss over these pairs of `batch`, and sums of what is logged: numbers, or tensors, which a `Meter` reads."""
        import torch

        from codechat.distributed import dist

        part = batch.take(rows)
        with torch.set_grad_enabled(learns):
            summed = self.summed(part)  # (B, G)
        lengths = dist.send(part.lengths(), summed.device).view(part.rewards.shape)
        total, sums = (self.kto if self.cfg.loss == "kto" else self.pairs)(batch, rows, part, summed, lengths)
        return total, sums | dict(loss=total.detach(), pairs=len(rows))

    def kto(
        self, batch: RolloutBatch, rows: list[int], part: RolloutBatch, summed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        import torch

        from codechat.distributed import dist
        from codechat.rl import preference_losses
        from codechat.training.session import totals

        cfg, other = self.cfg, self.others[id(batch)].take(rows)
        drift = self.totals(other) - picked(self.other_refs[id(batch)], rows)
        ((total, count),) = totals([[float(drift.double().sum()), drift.numel()]])
        kl = preference_losses.kto_reference_point(total, count)
        liked = dist.send(part.rewards.bool().flatten(), summed.device)

        def over(chosen: Tensor, x: Tensor) -> Tensor:
            """Sum over these completions; a selection by a mask would have to be waited for."""
            return torch.where(chosen, x, 0.0).sum()

        refs = picked(self.refs[id(batch)], rows).flatten()
        losses, reward = preference_losses.kto_loss(summed.flatten(), refs, liked, kl, cfg.beta)
        sft = preference_losses.sft_loss(summed.flatten(), lengths.flatten())
        reward = reward.detach()
        return losses.sum() / part.group_size + cfg.sft_coef * over(liked, sft), dict(
            chosen_rewards=over(liked, reward),
            rejected_rewards=over(~liked, reward),
            accuracy=((reward > 0) == liked).sum() / part.group_size,
            chosen_logprob=over(liked, summed.detach().flatten()),
            liked=liked.sum(),
        )

    def pairs(
        self, batch: RolloutBatch, rows: list[int], part: RolloutBatch, summed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        from codechat.rl.preference_losses import pair_loss

        cfg, ref = self.cfg, picked(self.refs[id(batch)], rows) if id(batch) in self.refs else None
        result = pair_loss(
            cfg.loss,
            summed[:, 0],
            summed[:, 1],
            chosen_lengths=lengths[:, 0],
            rejected_lengths=lengths[:, 1],
            beta=cfg.beta,
            margin=cfg.margin,
            sft_coef=cfg.sft_coef,
            **(dict(ref_chosen=ref[:, 0], ref_rejected=ref[:, 1]) if ref is not None else {}),
        )
        return result.losses.sum(), dict(
            chosen_rewards=result.chosen_rewards.detach().sum(),
            rejected_rewards=result.rejected_rewards.detach().sum(),
            accuracy=(result.chosen_rewards > result.rejected_rewards).sum(),
            chosen_logprob=summed.detach()[:, 0].sum(),
            liked=len(rows),
        )


def picked(table: Tensor, rows: list[int]) -> Tensor:
    """These rows of a table that may lie on a GPU."""
    import torch

    from codechat.distributed import dist

    return table[dist.send(torch.tensor(rows), table.device)]


def train(cfg: PreferenceConfig) -> Run:
    """Optimise the loss on the preferences; returns the finished run. UserError, before anything is written, for bad settings or data."""
    from codechat import tasks
    from codechat.distributed import dist, hardware
    from codechat.evaluation import diagnose
    from codechat.models import lora
    from codechat.runs.run import StopSignal
    from codechat.training import opening
    from codechat.training.meters import Meter
    from codechat.training.session import Session

    with dist.session(cfg) as world, StopSignal() as interrupt:
        cfg, parent, tok = opening.load_parent(cfg.resolved())
        task = tasks.load(cfg.task, **({"source": cfg.task_data} if cfg.task_data else {})) if cfg.task else None
        problems = task.problems("select", limit=cfg.eval_examples) if task else []
        model = opening.build_model(cfg, parent)
        pairs, held_out = read_or_sample(cfg, model, task, tok)
        check_pairs(cfg, train=pairs, select=held_out)
        loss_of = PreferenceLoss(cfg, model, pairs, held_out)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        if world.device.type == "cuda":  # packed rows have one shape there
            hardware.compile_blocks(model)

        def evaluate(model: GPT, step: int) -> dict[str, Any]:
            row = held_out_means(cfg, loss_of, held_out) if held_out is not None else {}
            return row | (opening.evaluate_policy(cfg, model, tok, task, problems) if task else {})

        trained_on = dict(data_dir=cfg.data_dir, task=cfg.task, task_data=cfg.task_data)
        session = Session(
            "preference", cfg, model, tok, interrupt, parent=parent, evaluate=evaluate, trained_on=trained_on
        )
        size, count = len(pairs.prompts), cfg.device_batch_size * cfg.grad_accum * world.size
        with session.running():
            for step in session.steps():
                # the mean over the pairs of all microbatches and ranks, in a fresh order each epoch
                meter, before = Meter(), diagnose.bf16_snapshot(model)
                for micro in range(cfg.grad_accum):
                    at = step * count + (micro * world.size + world.rank) * cfg.device_batch_size
                    rows = [place(i, size, cfg.seed) for i in range(at, at + cfg.device_batch_size)]
                    total, sums = loss_of(pairs, rows)
                    (total / count).backward()
                    meter.add(**sums)
                session.apply_gradients()
                log_step(session, meter, before, pairs.group_size, epoch=(step + 1) * count / size)
    return session.run


def held_out_means(cfg: PreferenceConfig, loss_of: PreferenceLoss, held_out: RolloutBatch) -> dict[str, float]:
    """Metrics of the held-out pairs, all of which every rank judges."""
    from codechat.training.meters import Meter

    at, meter = list(range(len(held_out.prompts))), Meter()
    for i in range(0, len(at), cfg.device_batch_size):
        meter.add(**loss_of(held_out, at[i : i + cfg.device_batch_size], learns=False)[1])
    meter.read()
    return {f"heldout_{name}": value for name, value in pair_means(meter.sums, held_out.group_size).items()}


def log_step(session: Session, meter: Meter, before: list[Tensor], group_size: int, epoch: float) -> None:
    """Write the step's metrics, over all ranks. A collective."""
    import time

    from codechat.distributed import dist
    from codechat.evaluation import diagnose

    differ, n_weights = diagnose.count_changed_bf16(before, session.model)
    (changed,) = meter.read(differ)
    row = pair_means(dist.mean(dict(meter.sums)), group_size)
    row |= dict(epoch=epoch, lr=session.lr, grad_norm=session.grad_norm, step_s=time.perf_counter() - meter.began)
    row |= dict(weights_changed_bf16=diagnose.share_of_all(changed, n_weights, session.model))
    session.run.log(session.step + 1, row)
    session.bar.update(1)
    loss, margin, accuracy = (row[f"preference_{name}"] for name in ("loss", "margin", "accuracy"))
    session.bar.set_postfix(loss=f"{loss:.3f}", margin=f"{margin:.2f}", accuracy=f"{accuracy:.2f}")


def read_or_sample(
    cfg: PreferenceConfig, model: GPT, task: Task | None, tok: Tokenizer
) -> tuple[RolloutBatch, RolloutBatch | None]:
    """Pairs to train on and, from files, held-out ones. Every rank samples the same pairs."""
    from codechat.rl import engines, preference_data
    from codechat.training.sampling import RolloutSampler

    block = cfg.model.block_size
    if cfg.data_dir is None:
        assert task is not None
        problems, local = task.problems("train", seed=cfg.seed), engines.Engine()
        sample = RolloutSampler(cfg, local, model, task, problems, tok)
        return preference_data.pairs_from_rollouts(sample(0, cfg.sample_groups, seed=cfg.seed + 1)), None
    read = preference_data.read_preferences
    pairs = read(cfg.data_dir, "train", tok, cfg.tags, block)
    try:
        return pairs, read(cfg.data_dir, "select", tok, cfg.tags, block, limit=cfg.eval_examples)
    except MissingFile:
        return pairs, None


def check_pairs(cfg: PreferenceConfig, **splits: RolloutBatch | None) -> None:
    """ConfigError where a split holds single completions and the loss is one of pairs."""
    for split, batch in splits.items():
        if batch is not None and batch.group_size == 1 and cfg.loss != "kto":
            raise ConfigError(
                f"--loss {cfg.loss} needs pairs; preferences.{split}.jsonl in {cfg.data_dir} holds single completions "
                "with a label; set --loss kto, or write pairs"
            )


def place(i: int, size: int, seed: int) -> int:
    """Which pair comes i-th: a fresh order for every epoch, a function of i alone."""
    import torch

    rng = torch.Generator().manual_seed(seed * 1_000_003 + i // size)
    return int(torch.randperm(size, generator=rng)[i % size])


def pair_means(sums: dict[str, float], group_size: int) -> dict[str, float]:
    """Sums over pairs as the declared metrics; rows of a single completion are liked or not, so each side has its own count."""
    liked, n = sums["liked"], sums["pairs"]
    disliked = n * group_size - liked
    good, bad = sums["chosen_rewards"] / max(1e-9, liked), sums["rejected_rewards"] / max(1e-9, disliked)
    return dict(
        preference_loss=sums["loss"] / n,
        preference_margin=good - bad,
        preference_accuracy=sums["accuracy"] / n,
        chosen_reward=good,
        rejected_reward=bad,
        chosen_logprob=sums["chosen_logprob"] / max(1e-9, liked),
    )


def main(argv: list[str] | None = None) -> int:
    """`codechat preference`, `python -m codechat.preference` and torchrun; 0 when finished, 130 when stopped early."""
    return train_main("preference", argv, __doc__)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
