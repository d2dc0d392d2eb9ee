"""Settings of `codechat plan`, and what follows from them by arithmetic.

Importing this loads no torch: `--help` reads the class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.distributed import gpu_specs
from codechat.models import config as models
from codechat.models.config import LORA_CHOSEN, LORA_TARGETS, MODELS, GPTConfig

GIB = 2**30
# Published throughput of the system whose sizes the presets keep, both with recomputed blocks,
# over 312 TFLOP/s per
# A800 and our own FLOPs per token: 8b on 8 GPUs 22.3 ktok/s = 0.48, 2b on one 7.9 ktok/s = 0.45
# (its TRAINING_REPORT_8b_a88_x8, sections 2 and 7).
MFU = 0.45
MFU_SOURCE = "the lower of two published runs on A800: 0.48 (8b, 8 GPUs), 0.45 (2b, 1 GPU)"
# From Hopper on, matrix products are faster in relation to memory: torchtitan publishes 0.33 to
# 0.39 for 8B on H100, compiled, in bf16.
HOPPER_MFU = 0.36
HOPPER_SOURCE = "torchtitan's published 8B on H100, 0.33 to 0.39; not measured here"
HOPPER = ("h100", "h800", "h200", "b200")
# of the usable memory: predictions may be that far below what the allocator reserves
HEADROOM = 0.08
# loop -> its plan
PLANNED_LOOPS = {
    "pretrain": "pretrain",
    "sft": "sft",
    "reinforce": "rl",
    "grpo": "rl",
    "ppo": "rl",
}
PROMPT_TOKENS = 256  # of the longest prompt of RL, assumed
BF16 = 2  # bytes


@dataclass(frozen=True, kw_only=True)
class PlanConfig(config.Settings):
    """What to plan: the settings of a loop that cost memory or time, and the machines."""

    loop: Literal["pretrain", "sft", "rl"] = opt(
        "pretrain", "loop; sft and rl pack rows; rl samples", positional=True
    )
    gpus: int = opt(8, "GPUs in all", least=1)
    gpu: str = opt("a800-80gb", f"the GPU: {', '.join(gpu_specs.GPUS)}")
    model: GPTConfig = opt(GPTConfig(), "architecture")
    seq_len: int | None = opt(None, "tokens per row; none = the model's block size", least=1)
    device_batch_size: int = opt(8, "rows per microbatch and GPU; rl: problems", least=1)
    grad_accum: int = opt(1, "microbatches per step", least=1)
    max_steps: int = opt(1000, "optimizer steps", least=1)
    optimizer: Literal["adamw", "muon"] = opt("muon", "optimizer of the block matrices")
    lora_rank: int = opt(
        0, "rank of LoRA adapters of frozen weights; 0 = train all weights", least=0
    )
    lora_targets: tuple[str, ...] = opt(
        LORA_CHOSEN, f"matrices with LoRA adapters: {' '.join(LORA_TARGETS)}"
    )
    shard: bool | None = opt(
        None, "split weights and optimizer states over GPUs; none = where a replica does not fit"
    )
    shard_over: int | None = opt(
        None, "GPUs that hold one sharded copy; none = all up to 8, those of a node", least=1
    )
    mfu: float | None = opt(
        None, f"share of the peak; none: {HOPPER_MFU} from H100, else {MFU}", least=0.01, most=1
    )
    group_size: int = opt(16, "rl: completions per problem", least=1)
    max_new_tokens: int = opt(64, "rl: longest completion, tokens", least=1)
    row_tokens: int = opt(
        512, "rl: tokens of a packed row; more if prompt and completion need it", least=1
    )
    rows: int = opt(8, "rl: packed rows per forward pass", least=1)
    reference: bool = opt(
        False, "rl: a reference model stays beside the policy (GRPO with kl_coef above 0)"
    )
    price: float | None = opt(None, "price of a GPU-hour, in any currency")

    def __post_init__(self) -> None:
        super().__post_init__()
        gpu_specs.find(self.gpu)
        block = self.model.block_size
        if self.loop == "pretrain" and self.seq_len is not None and self.seq_len > block:
            raise ConfigError(
                f"seq_len {self.seq_len} exceeds block_size {block}; set --seq-len {block} or less"
            )
        if self.lora_rank and not self.adapters:
            got = f"lora_rank {self.lora_rank} with lora_targets {' '.join(self.lora_targets) or 'none'}"
            raise ConfigError(
                f"{got}; required are matrices of this model: {' '.join(LORA_TARGETS)}"
            )
        if self.lora_rank and self.shard and self.gpus > 1:
            raise ConfigError(
                f"lora_rank {self.lora_rank} with sharded weights; set --no-shard, or --lora-rank 0"
            )
        if self.gpus % self.over:
            raise ConfigError(
                f"shard_over {self.over} does not divide {self.gpus} "
                "GPUs; set --shard-over to a divisor"
            )

    @property
    def share(self) -> float:
        """MFU: as set, or published for this kind of GPU."""
        if self.mfu:
            return self.mfu
        return HOPPER_MFU if self.gpu.startswith(HOPPER) else MFU

    @property
    def batch(self) -> int:
        """Rows of a microbatch and rank."""
        return self.rows if self.loop == "rl" else self.device_batch_size

    @property
    def length(self) -> int:
        """Tokens of a training row."""
        if self.loop == "rl":
            from codechat.rl import rollout

            return rollout.row_length(self.row_tokens, PROMPT_TOKENS - 1 + self.max_new_tokens)
        return self.seq_len or self.model.block_size

    @property
    def usable_gib(self) -> float:
        return gpu_specs.find(self.gpu).usable_gib

    @property
    def adapters(self) -> int:
        """Parameters of the low-rank updates, trained in place of the weights; 0 = the weights
        are trained."""
        return self.model.lora_params(self.lora_rank, self.lora_targets)

    @property
    def over(self) -> int:
        """GPUs that share one copy of the weights; 1 = each holds a copy. Unless `shard` is
        set, they share if a copy does not fit the GPU, as `sharding.build` decides. Frozen
        weights under low-rank updates are never shared."""
        from codechat.distributed import sharding

        shard = self.shard
        if shard is None:
            shard = not sharding.fits(self.model.n_params, self.usable_gib * GIB, self.adapters)
        if not shard or self.gpus == 1 or self.lora_rank:
            return 1
        return self.shard_over or min(self.gpus, 8)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward."""
        return self.model.flops_per_token(self.length, self.adapters)

    @property
    def buffers_gib(self) -> float:
        """What FSDP overlaps with the computation: the next block, gathered twice (the flat
        buffer and the weights copied from it), and the float32 gradients of the block before,
        while they are reduced."""
        return (2 * BF16 + 4) * self.model.block_matmul_params / GIB if self.over > 1 else 0.0

    @property
    def room_gib(self) -> float:
        """GiB per GPU that a plan may use."""
        return self.usable_gib * (1 - HEADROOM) - self.buffers_gib

    @property
    def tokens_per_step(self) -> int:
        return self.gpus * self.device_batch_size * self.grad_accum * self.length


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a loop's settings that a plan has too."""
    return {
        name: value for name, value in settings.items() if name in PlanConfig.__dataclass_fields__
    }


RUN_PRESETS = MODELS


def by_depth(depth: int, build: Callable[..., PlanConfig], ranks: int = 1) -> PlanConfig:
    """the run of `codechat pretrain --depth N` on these GPUs, with the GPT-2 vocabulary"""

    def build_plan(chosen: Mapping[str, Any]) -> PlanConfig:
        return build(shared_settings(chosen))

    return models.by_depth(depth, build_plan, ranks=build({}).gpus)


RUN_DIALS = {"depth": by_depth}
