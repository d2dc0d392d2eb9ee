"""Settings that several loops share, each declared once, and the presets of RL loops. A loop's config inherits the groups it has and adds its own.

No torch here: `--help`, presets, recipes and launch read these classes.
Dataclasses list the fields of the last base first, so a config names its groups from the last to the first that --help shows.
"""

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import SEEDS, Settings, fields_of, opt
from codechat.core.errors import ConfigError
from codechat.models.config import LORA_ALPHA, LORA_CHOSEN, LORA_TARGETS, PRESETS, GPTConfig, Schedule
from codechat.tasks import NAMES, name_of
from codechat.tasks.toy import COMPLETION_LENGTH, TOY_MODEL

OFTEN = dict(least=0, identity=False)  # how often something is done decides no result
HERE = dict(identity=False)  # where and how a run is trained decides no result either


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every loop has: the run, its model, its checkpoints, the optimizer."""

    run_name: str = opt("run", "name of the run directory under runs/", **HERE)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", **HERE)
    overwrite: bool = opt(False, "replace the run of this name: it is deleted once this one has begun", **HERE)
    wandb: bool = opt(False, "also send metrics and samples to Weights & Biases (WANDB_MODE=offline: later)", **HERE)
    seed: int = opt(0, "seed of new weights, data order and sampling", **SEEDS)
    init_from: str | None = opt(
        None, "checkpoint to start from: run or directory; none = new weights of --model", reads="run"
    )
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    device_batch_size: int = opt(8, "sequences, RL: problems, per microbatch and device", least=1)
    eval_every: int = opt(100, "steps between evaluations; 0 = only the last", **OFTEN)
    save_every: int = opt(25, "steps between checkpoints; 0 = only the last", **OFTEN)
    keep_last: int = opt(2, "checkpoints to keep; 0 = all", **OFTEN)
    optimizer: Literal["adamw", "muon"] = opt("adamw", "optimizer of the block matrices; everything else takes AdamW")
    lr: float = opt(1e-4, "AdamW learning rate", least=0)
    muon_lr: float = opt(0.002, "Muon learning rate", least=0)
    weight_decay: float = opt(0.0, "weight decay of matrices and embeddings", least=0)
    warmup_steps: int = opt(5, "steps of linear warm-up", least=0)
    schedule: Schedule = opt("constant", "learning-rate schedule after the warm-up")
    final_lr_share: float = opt(0.1, "share of the learning rate left at the end", least=0, most=1)
    grad_clip: float = opt(1.0, "largest gradient norm; 0 = off", least=0)

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """Words of transformers: its rate is that of all weights, its cosine ends at 0, its constant has no warm-up. ConfigError where ours differs."""
        given = dict(super().as_spelled(given, spelled))
        optimizer = given.get("optimizer", fields_of(cls)["optimizer"].default)
        if "learning_rate" in spelled and optimizer == "muon" and "muon_lr" not in spelled:
            got = f"--learning_rate {given['lr']} is AdamW's alone here, and matrices train with Muon at --muon-lr"
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
    """What every loop has but the character laboratory: data, steps, and which weights are trained and where they lie."""

    data_dir: str | None = opt(
        None,
        "directory of prepared data: a corpus, DOMAIN.SPLIT.jsonl, preferences.SPLIT.jsonl or TASK.SPLIT.jsonl; "
        "none = the task generates its problems, or preferences are sampled on --task",
        reads="path",
    )
    max_steps: int = opt(500, "steps: optimizer updates, RL: batches of rollouts", least=1)
    grad_accum: int = opt(1, "microbatches (RL: batches of problems) per step, whose gradients are summed", least=1)
    lora_rank: int = opt(0, "rank of low-rank updates of frozen weights; 0 = train all weights", least=0)
    lora_alpha: float = opt(LORA_ALPHA, "low-rank updates are scaled by alpha / rank")
    lora_targets: tuple[str, ...] = opt(LORA_CHOSEN, f"matrices with low-rank updates: {' '.join(LORA_TARGETS)}")
    shard: bool | None = opt(None, "split weights over ranks; none = where a replica does not fit", **HERE)
    shard_over: int | None = opt(None, "ranks that hold one sharded copy; none = those of a node", least=1, **HERE)

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, alpha, targets = self.lora_rank, self.lora_alpha, self.lora_targets
        if set(targets) - set(LORA_TARGETS) or (rank and (alpha <= 0 or not targets)):
            got = f"lora_rank {rank}, lora_alpha {alpha}, lora_targets {' '.join(targets) or 'none'}"
            raise ConfigError(f"{got}; required an alpha above 0, targets among {' '.join(LORA_TARGETS)}")


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings(LearningSettings):
    """What pretraining and SFT have."""

    seq_len: int | None = opt(
        None, "tokens per row; none = the block size, in SFT what the longest conversation needs", least=1
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

    tags: Literal["reserved", "text", "template", "raw"] | None = opt(
        None, "turns: tags of one id each, text, a template; raw = no turns; none = as in the checkpoint, else reserved"
    )
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none", reads="path")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(ChatSettings):
    """Completions that a loop samples and trains on."""

    group_size: int = opt(16, "completions per problem", least=1)
    temperature: float = opt(1.0, "sampling temperature; RL trains at the same, preference at 1", least=0)
    top_k: int | None = opt(None, "sample among the k likeliest tokens, RL also trains among them; none = all", least=1)
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    row_tokens: int = opt(512, "tokens of a packed training row", least=2)
    eval_examples: int = opt(128, "validation problems (and pairs) per evaluation", least=1)


@dataclass(frozen=True, kw_only=True)
class RLSettings(SamplingSettings, LearningSettings):
    """What every loop that learns from a task's reward has."""

    task: str = opt(
        "funcall",
        f"task whose reward is optimised: {', '.join(NAMES)}, FILE.py:CLASS, or of a package",
        reads="path",
    )
    device_batch_size: int = 16
    max_steps: int = 50
    rows: int = opt(8, "packed rows per forward pass", least=1)
    engine: Literal["local", "http", "vllm"] = opt("local", "what samples: this process, `codechat serve`, or vLLM")
    engine_url: str = opt("http://127.0.0.1:8000", "server of --engine http and vllm", **HERE)
    engine_dir: Path | None = opt(None, "weights for the server: its --reload-from; vLLM: the parent of hf", **HERE)
    engine_patience_s: float = opt(600.0, "seconds a server may be away before the run stops", least=0.01, **HERE)
    eval_every: int = 25
    ks: tuple[int, ...] = opt((1,), "pass@k to report in evaluations; as many samples as the largest k are drawn")
    probe_examples: int = opt(0, "behaviour probes of data_dir per cell and evaluation; 0 = none", least=0)
    allow_dead: bool = opt(False, "train even if diagnose says DEAD")
    diagnose_groups: int = opt(64, "groups judged before the first step; 0 = no reference check, no diagnosis", least=0)
    dead_patience: int = opt(20, "DEAD steps in a row that end the run", least=1)
    log_rollouts_every: int = opt(10, "steps between rollouts written to samples.jsonl; 0 = never", **OFTEN)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", name_of(self.task))  # an object or a class of a notebook, by its name
        super().__post_init__()
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")
        if self.engine != "local" and self.engine_dir is None:
            raise ConfigError(
                f"--engine {self.engine} needs --engine-dir: its --reload-from, or the parent of vLLM's hf"
            )
        if self.engine != "local" and self.top_k is not None:
            why = "the server does not say which tokens it kept, and training needs their probabilities"
            raise ConfigError(
                f"--top-k {self.top_k} with --engine {self.engine}: {why}; leave out --top-k, or set --engine local"
            )

    @property
    def problems_per_rank(self) -> int:
        """Problems of a step on one device."""
        return self.device_batch_size * self.grad_accum

    def needs_groups(self, why: str) -> None:
        """ConfigError for groups of one."""
        if self.group_size < 2:
            raise ConfigError(f"group_size {self.group_size} with {why}; set --group-size 2 or more")


@dataclass(frozen=True, kw_only=True)
class GroupSettings(RLSettings):
    """What REINFORCE and GRPO have: advantages within a group of completions."""

    baseline: Literal["none", "mean", "leave_one_out", "zscore"] = opt("mean", "what is subtracted from a reward")
    importance_cap: float = opt(
        0.0, "cap on importance weights (trainer's over sampler's probability of a token); 0 = no weights", least=0
    )

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """TRL counts the completions of a batch, --device-batch-size its problems. ConfigError where they are no whole groups."""
        given = dict(super().as_spelled(given, spelled))
        if "per_device_train_batch_size" not in spelled:
            return given
        batch = given["device_batch_size"]
        group = given.get("group_size", fields_of(cls)["group_size"].default)
        try:
            problems = int(batch) / int(group)
        except (TypeError, ValueError, ZeroDivisionError):
            return given  # no number, which is refused where it is read
        if problems < 1 or problems % 1:
            got = f"--per_device_train_batch_size {batch} with {group} completions per problem: TRL counts completions"
            raise ConfigError(f"{got}; required is a multiple of {group}, or --device-batch-size, a number of problems")
        return given | {"device_batch_size": int(problems)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline != "none":
            self.needs_groups(f"baseline {self.baseline}: the advantage is always 0")
        if 0 < self.importance_cap < 1:
            raise ConfigError(f"importance_cap {self.importance_cap}; it must be 0 (no weights) or at least 1")


@dataclass(frozen=True, kw_only=True)
class MinibatchSettings(Settings):
    """Several updates on one batch of rollouts."""

    inner_epochs: int = opt(1, "passes over each batch of rollouts", least=1)
    minibatches: int = opt(1, "optimizer updates per pass; divides device_batch_size x grad_accum", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = getattr(self, "problems_per_rank", self.device_batch_size)  # type: ignore[attr-defined]
        if size % self.minibatches:
            raise ConfigError(f"minibatches {self.minibatches} must divide device_batch_size x grad_accum = {size}")


@dataclass(frozen=True, kw_only=True)
class RatioSettings(MinibatchSettings):
    """What GRPO and PPO have: clipped ratios to the policy that sampled, and a pull towards the one that began."""

    clip_eps_low: float | None = opt(
        0.2, "a ratio below 1 - this has no gradient where the advantage is negative; 1 = no bound", least=0
    )
    clip_eps_high: float | None = opt(
        0.2, "a ratio above 1 + this has no gradient where the advantage is positive", least=0
    )
    kl_coef: float = opt(0.0, "weight of the KL divergence from the starting policy; 0 = no reference model", least=0)
    kl_kind: Literal["k1", "k2", "k3"] = opt("k3", "estimator of the KL divergence; in a reward use k1")
    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.clip_eps_low or 0) > 1:
            raise ConfigError(f"clip_eps_low {self.clip_eps_low}; a ratio is never below 0, so it must be at most 1")
        cap = getattr(self, "importance_cap", 0.0)
        if cap and getattr(self, "old_logprobs", "sampler") == "sampler":
            why = "the ratio starts from the sampler's log-probabilities, so that nothing is left to weigh"
            raise ConfigError(f"importance_cap {cap}: {why}; set --importance-cap 0 or --old-logprobs trainer")


def run_presets(toy: Mapping[str, Any] | None = None, **more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """--preset of a loop: every named model size, `toy` where the loop has settings for it, and more."""
    sizes: dict[str, Mapping[str, Any]] = {name: {"model": model} for name, model in PRESETS.items()}
    sizes["nano"] = {**sizes["nano"], "tokenizer": "gpt2:4096"}
    return sizes | ({"toy": toy} if toy is not None else {}) | more


_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
TOY_RUN: dict[str, Any] = _TABLES["toy"] | {"model": TOY_MODEL, "max_new_tokens": COMPLETION_LENGTH}
TOY_ONE_UPDATE: dict[str, Any] = TOY_RUN | _TABLES["one_update"]
LORA_RUN: dict[str, Any] = _TABLES["lora"]
GSM8K_RUN: dict[str, Any] = LORA_RUN | _TABLES["gsm8k"]
