"""Preferences: DPO, IPO, KTO, CPO, ORPO or SimPO on fixed pairs (or labelled completions).

    codechat preference --init-from released/nano --data-dir data/preferences --loss dpo --run-name my-dpo
    codechat preference --init-from released/nano --task examples/my_task.py:MyTask --run-name dpo    its own pairs
    torchrun --standalone --nproc-per-node 8 -m codechat preference --init-from d20-sft \\
        --data-dir data/preferences

Pairs come from preferences.train.jsonl (and .select.jsonl for evaluation), or, without
--data-dir, from the best and the worst completion of groups that the starting policy samples on
--task. The starting policy is the reference model; its log-probabilities are computed once,
before the first step, and then it is freed. With --task, evaluations also measure the policy's
reward: the margin can rise while answers get worse, because the loss sees only differences."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.runs.run import Run
from codechat.tasks import NAMES
from codechat.training.rl_settings import TOY_RUN, SamplingSettings
from codechat.training.settings import LearningSettings, run_presets

if TYPE_CHECKING:  # settings and --help need no torch
    from codechat.models.gpt import GPT

# what TRL's --loss_type of this name, or its script, does otherwise
TRL_DIFFERS = {
    "ipo": "TRL divides each log ratio by its answer's tokens; --loss ipo takes the paper's sums",
    "orpo": (
        "TRL's likelihood term covers the prompt too; --loss orpo has the answer's, as the paper"
    ),
    "simpo": "TRL adds the chosen answer's likelihood (cpo_alpha 1) and takes the margin 0.5; "
    "--loss simpo has none and 1, as the paper",
}


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(SamplingSettings, LearningSettings):
    """Settings of one run on preferences."""

    run_name: str = "preference"
    loss: Literal["dpo", "ipo", "kto", "cpo", "orpo", "simpo"] = opt("dpo", "the paper")
    task: str | None = opt(
        None, f"task to sample pairs on, and to evaluate on: {', '.join(NAMES)}", reads="path"
    )
    task_data: str | None = opt(
        None,
        "directory with TASK.SPLIT.jsonl problems; none = the task generates its own",
        reads="path",
    )
    sample_groups: int = opt(256, "groups to sample if pairs come from rollouts", least=1)
    group_size: int = 8
    beta: float | None = opt(
        None,
        "pull towards the reference, or scale of the margin, above 0; none = the paper's",
        least=1e-9,
    )
    max_steps: int = 100
    lr: float = 5e-5
    muon_lr: float = 0.001
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    eval_every: int = 25
    save_every: int = 50

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """ConfigError for a word of TRL that means another loss there."""
        if "loss_type" in spelled and given.get("loss") in TRL_DIFFERS:
            raise ConfigError(
                f"--loss_type {given['loss']}: {TRL_DIFFERS[given['loss']]}; write --loss for that"
            )
        return super().as_spelled(given, spelled)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None and self.task is None:
            raise ConfigError(
                "neither --data-dir nor --task; set one: preferences are read or sampled on a task"
            )
        if self.data_dir is None and self.group_size < 2:
            raise ConfigError(
                f"group_size {self.group_size}: a pair needs two "
                "completions; set --group-size 2 or more"
            )

    ks = (1,)  # of evaluations on the task: one completion of each problem


RUN_PRESETS = run_presets(toy=TOY_RUN | {"group_size": 16, "sample_groups": 64, "lr": 1e-3})


def train(cfg: PreferenceConfig) -> Run:
    """Optimise the loss on the preferences; returns the finished run. UserError, before
    anything is written, for bad settings or data."""
    from codechat import tasks
    from codechat.distributed import dist, hardware
    from codechat.evaluation.scoring import problems_once
    from codechat.models import lora
    from codechat.rl.preference_losses import BETA, NEEDS_REFERENCE
    from codechat.training.evaluations import evaluate_policy, task_hash
    from codechat.training.preferences import (
        PreferenceLoss,
        held_out_means,
        log_step,
        read_or_sample,
        shuffled_index,
    )
    from codechat.training.session import Session, build_model, load_parent, weights_hash
    from codechat.training.step_metrics import Meter

    with dist.session(cfg) as world:
        beta = BETA[cfg.loss] if cfg.beta is None else cfg.beta
        cfg, parent, tok = load_parent(replace(cfg, beta=beta))
        task = tasks.load(cfg.task, source=cfg.task_data) if cfg.task else None
        problems = problems_once(task, "select", cfg.eval_examples) if task else []
        model = build_model(cfg, parent)
        given = read_or_sample(cfg, model, task, tok)
        batches = [batch for batch in (given.pairs, given.held_out) if batch is not None]
        loss_of = PreferenceLoss(cfg, model, beta, batches)
        # before the first step: until then the policy is the reference model
        pairs, *held_out = map(loss_of.scored, batches)
        lora.attach(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_targets, cfg.seed)
        hardware.compile_blocks(model)

        def evaluate(model: "GPT", step: int) -> dict[str, Any]:
            row: dict[str, Any] = {}
            for some in held_out:
                row |= held_out_means(loss_of, some)
            if task:
                row |= evaluate_policy(cfg, model, tok, task, problems)
            return row

        data = given.hashes | task_hash(cfg.task, cfg.task_data, "select", problems)
        # a resumed run reads the parent again, for the reference's log-probabilities or to sample
        # the pairs, so other weights must be refused
        if parent and (cfg.loss in NEEDS_REFERENCE or cfg.data_dir is None):
            data |= weights_hash(cfg.init_from, parent.meta)
        session = Session(
            "preference",
            cfg,
            model,
            tok,
            parent=parent,
            evaluate=evaluate,
            max_steps=cfg.max_steps,
            tags=cfg.chosen_tags,
            trained_on=dict(data_dir=cfg.data_dir, task=cfg.task, task_data=cfg.task_data),
            data=data,
        )
        n_pairs = len(pairs.batch.prompts)
        pairs_per_step = cfg.batch_per_rank * world.size
        with session.running():
            for step in session.steps():
                # the mean over the pairs of all microbatches and ranks, in a fresh order each epoch
                meter = Meter()
                meter.begin_learning(model)
                microbatches = []  # the pairs of each
                for number in range(cfg.grad_accum):
                    before = (number * world.size + world.rank) * cfg.device_batch_size
                    first = step * pairs_per_step + before
                    order = range(first, first + cfg.device_batch_size)
                    microbatches.append([shuffled_index(i, n_pairs, cfg.seed) for i in order])
                # one for the whole step, so that accumulation and ranks change nothing
                point = loss_of.reference_point(pairs, sum(microbatches, []))
                for rows in microbatches:
                    total, sums = loss_of(pairs, rows, point)
                    (total / pairs_per_step).backward()
                    meter.add(sums)
                session.apply_gradients()
                epoch = (step + 1) * pairs_per_step / n_pairs
                log_step(session, meter, pairs.batch.group_size, epoch=epoch)
    return session.run
