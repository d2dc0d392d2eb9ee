"""Settings that several loops share, each declared once. A loop's config inherits the groups it
has and adds its own; `rl_settings` has those of RL.

No torch here: `--help`, presets, recipes and launch read these classes. Dataclasses list the
fields of the last base first, so a config names its groups from the last to the first that
--help shows."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import SEEDS, Settings, opt
from codechat.core.errors import ConfigError
from codechat.models.config import (
    LORA_ALPHA,
    LORA_CHOSEN,
    LORA_TARGETS,
    MODELS,
    GPTConfig,
    Schedule,
)

# Kept out of the run's `config_hash`: how often something is done, and where a run is trained,
# decide no result.
UNHASHED = dict(identity=False)
UNHASHED_COUNT = dict(least=0, identity=False)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every loop has: the run, its model, its checkpoints, the optimizer."""

    run_name: str = opt("run", "name of the run directory under runs/", **UNHASHED)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", **UNHASHED)
    overwrite: bool = opt(
        False, "replace the run of this name: it is deleted once this one has begun", **UNHASHED
    )
    track: Literal["none", "wandb", "trackio"] = opt(
        "none",
        "also send metrics and samples to Weights & Biases or trackio (docs/commands.md)",
        **UNHASHED,
    )
    seed: int = opt(0, "seed of new weights, data order and sampling", **SEEDS)
    init_from: str | None = opt(
        None,
        "checkpoint to start from: run or directory; none = new weights of --model",
        reads="run",
    )
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    device_batch_size: int = opt(8, "sequences (RL: problems) per microbatch and device", least=1)
    eval_every: int = opt(100, "steps between evaluations; 0 = only the last", **UNHASHED_COUNT)
    save_every: int = opt(25, "steps between checkpoints; 0 = only the last", **UNHASHED_COUNT)
    keep_last: int = opt(
        2, "checkpoints to keep; 0 = all, of which the newest two can be resumed", **UNHASHED_COUNT
    )
    optimizer: Literal["adamw", "muon"] = opt(
        "adamw", "optimizer of the block matrices; everything else takes AdamW"
    )
    lr: float = opt(1e-4, "AdamW learning rate", least=0)
    muon_lr: float = opt(0.002, "Muon learning rate", least=0)
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings", least=0)
    warmup_steps: int = opt(5, "steps of linear warm-up", least=0)
    schedule: Schedule = opt("constant", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.1, "share of the learning rate left at the end", least=0, most=1)
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off", least=0)

    @property
    def batch_per_rank(self) -> int:
        """Sequences, or problems in RL, of a step on one device."""
        return self.device_batch_size

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """Words of transformers: its rate is that of all weights, its cosine ends at 0, its
        constant has no warm-up. ConfigError where ours differs."""
        given = dict(super().as_spelled(given, spelled))
        optimizer = given.get("optimizer", cls.optimizer)
        if "learning_rate" in spelled and optimizer == "muon" and "muon_lr" not in spelled:
            got = (
                f"--learning_rate {given['lr']} is AdamW's alone here, "
                "and matrices train with Muon at --muon-lr"
            )
            raise ConfigError(f"{got}; add --optimizer adamw, or set --muon-lr too")
        if "lr_scheduler_type" not in spelled:
            return given
        if given["schedule"] == "constant" and "warmup_steps" in given:
            got = "--lr_scheduler_type constant: transformers has no warm-up there"
            raise ConfigError(f"{got}; write constant_with_warmup, or leave --warmup-steps out")
        if given["schedule"] == "constant":
            given["warmup_steps"] = 0
        elif given["schedule"] == "constant_with_warmup":
            given["schedule"] = "constant"
        elif given["schedule"] == "cosine":
            given.setdefault("final_lr_share", 0.0)
        return given


@dataclass(frozen=True, kw_only=True)
class LearningSettings(RunSettings):
    """What every loop of the library has: data, steps, and which weights are trained and where
    they lie. The character laboratory has `RunSettings` without these."""

    data_dir: str | None = opt(
        None,
        "directory of prepared data: a corpus, DOMAIN.SPLIT.jsonl, preferences.SPLIT.jsonl or TASK.SPLIT.jsonl; "
        "none = the task generates its problems, or preferences are sampled on --task",
        reads="path",
    )
    max_steps: int = opt(500, "steps: optimizer updates, RL: batches of rollouts", least=1)
    grad_accum: int = opt(
        1, "microbatches (RL: batches of problems) per step, whose gradients are summed", least=1
    )
    lora_rank: int = opt(
        0, "rank of LoRA adapters of frozen weights; 0 = train all weights", least=0
    )
    lora_alpha: float = opt(LORA_ALPHA, "LoRA adapters are scaled by alpha / rank")
    lora_targets: tuple[str, ...] = opt(
        LORA_CHOSEN, f"matrices with LoRA adapters: {' '.join(LORA_TARGETS)}"
    )
    shard: bool | None = opt(
        None, "split weights over ranks; none = where a replica does not fit", **UNHASHED
    )
    shard_over: int | None = opt(
        None, "ranks that hold one sharded copy; none = those of a node", least=1, **UNHASHED
    )

    @property
    def batch_per_rank(self) -> int:
        return self.device_batch_size * self.grad_accum

    @property
    def adapters(self) -> int:
        """Weights of the low-rank updates; 0 = all weights are trained."""
        return self.model.lora_params(self.lora_rank, self.lora_targets)

    def __post_init__(self) -> None:
        super().__post_init__()
        rank = self.lora_rank
        alpha = self.lora_alpha
        targets = self.lora_targets
        if set(targets) - set(LORA_TARGETS) or (rank and (alpha <= 0 or not targets)):
            got = (
                f"lora_rank {rank}, lora_alpha {alpha}, lora_targets {' '.join(targets) or 'none'}"
            )
            raise ConfigError(
                f"{got}; required an alpha above 0, targets among {' '.join(LORA_TARGETS)}"
            )


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings(LearningSettings):
    """What pretraining and SFT have."""

    seq_len: int | None = opt(
        None,
        "tokens per row; none = the block size, in SFT what the longest conversation needs",
        least=1,
    )
    optimizer: Literal["adamw", "muon"] = "muon"
    schedule: Schedule = "wsd"
    final_lr_share: float = 0.05
    save_every: int = 200
    log_every: int = opt(10, "steps between logged metrics", least=1, identity=False)
    compile: bool = opt(True, "on a GPU, torch.compile the blocks")

    @property
    def length(self) -> int:
        return self.seq_len or self.model.block_size


@dataclass(frozen=True, kw_only=True)
class ChatSettings(Settings):
    """How text becomes tokens."""

    tags: Literal["reserved", "text", "template", "native", "raw"] | None = opt(
        None,
        "turns: tags of one id each, text, a template, a template that lists tools too; raw = no turns; none = as in "
        "the checkpoint, else reserved",
    )
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none", reads="path")

    @property
    def chosen_tags(self) -> str:
        """The tags of a run. `load_parent` fills them in if --tags is none."""
        assert self.tags is not None, "`load_parent` chooses the tags"
        return self.tags


@dataclass(frozen=True, kw_only=True)
class MinibatchSettings(RunSettings):
    """Several updates on one batch of rollouts."""

    inner_epochs: int = opt(1, "passes over each batch of rollouts", least=1)
    minibatches: int = opt(
        1, "optimizer updates per pass; divides device_batch_size x grad_accum", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.batch_per_rank
        if size % self.minibatches:
            raise ConfigError(
                f"minibatches {self.minibatches} must divide "
                f"device_batch_size x grad_accum = {size}"
            )


def run_presets(**more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """--preset of a loop: every named model size, and more."""
    nano = MODELS["nano"] | {"tokenizer": "gpt2:4096"}
    return MODELS | {"nano": nano} | more
