"""Settings that several loops share, each declared once. A loop's config inherits the groups it has and adds its own.

No torch here: `--help`, presets, recipes and launch read these classes.
Dataclasses list the fields of the last base first, so a config names its groups from the last to the first that --help shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.atomic_files import read_json
from codechat.core.config import Settings, flag_of, opt
from codechat.core.errors import ConfigError, UserError
from codechat.models.config import LORA_ALPHA, LORA_CHOSEN, LORA_TARGETS, PRESETS, GPTConfig, Schedule, check_lora
from codechat.rl import engine_settings
from codechat.runs import paths
from codechat.tasks import NAMES, name_of

TASKS = f"task whose reward is optimised: {', '.join(NAMES)}, or your own as FILE.py:CLASS"
OFTEN = dict(least=0, identity=False)  # how often something is done decides no result


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every loop has: the run, its checkpoints, the optimizer."""

    run_name: str = opt("run", "name of the run directory under runs/", identity=False)
    resume: bool = opt(False, "continue the run of this name from its last checkpoint", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    seed: int = opt(0, "seed of new weights, data order and sampling")
    wandb: bool = opt(False, "also send the metrics to Weights & Biases (WANDB_MODE=offline: later)", identity=False)
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

    def check_given(self, given: Mapping[str, Any]) -> None:
        """ConfigError where flags or a preset set what the run takes from the checkpoint of --init-from, also to the default."""
        parent = getattr(self, "init_from", None)
        try:
            meta = read_json(paths.find_checkpoint(parent) / "meta.json") if parent else {}
        except UserError:  # it does not exist yet, or the loop says what is wrong with it
            meta = {}
        if shape := meta.get("model_config"):
            settings = {f"model.{name}": value for name, value in shape.items()}
            check_parent(parent, given, settings | {"tokenizer": meta.get("tokenizer", {}).get("spec")})


def check_parent(parent: str | None, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """ConfigError, with both values, where a setting that a run takes from its parent is set to something else."""
    for name, value in given.items():
        there = settings.get(name, value)
        if there != value and str(there).lower() != str(value).lower():
            raise ConfigError(
                f"{flag_of(name)} {value}: with --init-from {parent} it is {there}; leave the flag, or the --preset that sets it, out"
            )


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """The model that is trained, or where it comes from."""

    init_from: str | None = opt(None, "checkpoint to start from; none = new weights of --model")
    tags: Literal["reserved", "text", "template", "raw"] = opt(
        "reserved",
        "turn tags, where --init-from is none; raw = plain text without turns, also for a checkpoint that has tags",
    )
    model: GPTConfig = opt(GPTConfig(), "architecture, where --init-from is none")
    tokenizer: str = opt("gpt2", "tokenizer, where --init-from is none")


@dataclass(frozen=True, kw_only=True)
class WeightSettings(Settings):
    """Which weights are trained, and where they lie."""

    lora_rank: int = opt(0, "rank of low-rank updates of frozen weights; 0 = train all weights", least=0)
    lora_alpha: float = opt(LORA_ALPHA, "their scale is alpha / rank")
    lora_targets: tuple[str, ...] = opt(LORA_CHOSEN, f"matrices that get one: {' '.join(LORA_TARGETS)}")
    shard: bool | None = opt(None, "split weights over ranks; none = where a replica does not fit", identity=False)
    shard_over: int | None = opt(
        None, "ranks that hold one sharded copy; none = those of a node", identity=False, least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lora(self.lora_rank, self.lora_alpha, self.lora_targets)


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Settings):
    """Who samples."""

    max_off_policy, importance_cap, sample_ahead = 0, 0.0, False  # no settings here: the newest weights sample
    engine: engine_settings.Kind = opt(
        "local", "who samples: local = this process, http = `codechat serve`, vllm = vLLM's server"
    )
    engine_url: str = opt("http://127.0.0.1:8000", "server of --engine http and vllm", identity=False)
    engine_dir: Path | None = opt(
        None,
        "directory through which weights reach it: its --reload-from; of vLLM, the one that holds its model hf",
        identity=False,
    )
    engine_weights: engine_settings.Carrier = opt(
        "checkpoint",
        "how they travel: a verified checkpoint, or memory = plain tensors, with --engine-dir below /dev/shm of the server's machine",
        identity=False,
    )
    engine_key_file: Path | None = opt(None, "file whose first line is its API key", identity=False)
    engine_patience_s: float = opt(600.0, "time that it may be away before the run stops, seconds", **OFTEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        engine_settings.check(self)


@dataclass(frozen=True, kw_only=True)
class LearningSettings(WeightSettings, RunSettings):
    """What every loop that learns from given data has."""

    device_batch_size: int = opt(8, "sequences per microbatch and device", least=1)
    grad_accum: int = opt(1, "microbatches per step", least=1)
    max_steps: int = opt(500, "optimizer steps", least=1)


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings(LearningSettings):
    """What pretraining and SFT have."""

    seq_len: int | None = opt(None, "tokens per sequence; none = the model's block size", least=1)
    optimizer: Literal["adamw", "muon"] = "muon"
    schedule: Schedule = "wsd"
    final_lr_share: float = 0.05
    eval_every: int = opt(100, "steps between evaluations; 0 = only the last", **OFTEN)
    save_every: int = 200
    log_every: int = opt(10, "steps between logged metrics", least=1, identity=False)
    compile: bool | None = opt(None, "torch.compile the step; none = on GPUs, and in bfloat16")
    fp8: bool = opt(False, "multiply block matrices in float8, on a GPU that has it, by torchao")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8 and self.lora_rank:
            raise ConfigError(
                f"fp8 with lora_rank {self.lora_rank}, whose adapters wrap the layers that fp8 replaces; leave one out"
            )

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.seq_len or self.model.block_size  # type: ignore[attr-defined]


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
class RLSettings(EngineSettings, WeightSettings, PolicySettings, RunSettings):
    """What every loop that learns from a task's reward has."""

    task: str = opt("funcall", TASKS)
    data_dir: str | None = opt(None, "directory with TASK.SPLIT.jsonl problems; none = the task generates its own")
    device_batch_size: int = opt(16, "problems per step and device", least=1)
    group_size: int = opt(16, "completions per problem", least=1)
    max_steps: int = opt(50, "batches of rollouts", least=1)
    temperature: float = opt(1.0, "sampling temperature; the trainer uses the same")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all", least=1)
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    grad_accum: int = opt(
        1, "batches of device_batch_size problems per step, sampled one after another; their gradients add up", least=1
    )
    row_tokens: int = opt(512, "tokens of a packed training row", least=2)
    rows: int = opt(8, "packed rows per forward pass", least=1)
    max_off_policy: int = opt(
        0, "steps by which the engine's weights may be older than the policy; 0 = pushed before every step", least=0
    )
    sample_ahead: bool = opt(
        False, "the server samples the next batch while this process learns from the last; needs --max-off-policy 1"
    )
    importance_cap: float = opt(
        0.0, "largest importance weight of a token, trainer's over sampler's probability; 0 = no weights", least=0
    )
    eval_every: int = opt(25, "steps between evaluations on validation problems; 0 = only the last", **OFTEN)
    eval_examples: int = opt(128, "validation problems per evaluation", least=1)
    ks: tuple[int, ...] = opt((1,), "pass@k to report in evaluations; as many samples as the largest k are drawn")
    probe_examples: int = opt(0, "behaviour probes of data_dir per cell and evaluation; 0 = none", least=0)
    allow_dead: bool = opt(False, "train although diagnose says DEAD")
    diagnose_groups: int = opt(
        64, "groups judged before the first step; 0 = skip reference-solution check and diagnosis", least=0
    )
    dead_patience: int = opt(20, "DEAD steps in a row that end the run", least=1)
    log_rollouts_every: int = opt(10, "steps between rollouts written to samples.jsonl; 0 = never", **OFTEN)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", name_of(self.task))  # an object or a class of a notebook, by its name
        super().__post_init__()
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature}; it must be above 0: a greedy policy has no gradient")

    @property
    def problems_per_rank(self) -> int:
        """Problems of a step on one device."""
        return self.device_batch_size * self.grad_accum

    def needs_groups(self, why: str) -> None:
        """ConfigError for groups of one."""
        if self.group_size < 2:
            raise ConfigError(f"group_size {self.group_size} with {why}; set --group-size 2 or more")

    def no_importance_weights(self, why: str) -> None:
        if self.importance_cap:
            raise ConfigError(f"importance_cap {self.importance_cap}; {why}; set --importance-cap 0")


def run_presets(toy: Mapping[str, Any] | None = None, **more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """--preset of a loop: every named model size, `toy` where the loop has settings for it, and more."""
    sizes: dict[str, Mapping[str, Any]] = {name: {"model": model} for name, model in PRESETS.items()}
    sizes["nano"] = {**sizes["nano"], "tokenizer": "gpt2:4096"}
    return sizes | ({"toy": toy} if toy is not None else {}) | more
