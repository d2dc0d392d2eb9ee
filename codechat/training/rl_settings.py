"""Settings of the loops that sample completions of a task, and their presets. No torch here, as
in `settings`."""

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError
from codechat.rl.kinds import Baseline, KLKind
from codechat.tasks.settings import TaskChoice
from codechat.tasks.toy import COMPLETION_LENGTH, TOY_MODEL
from codechat.training.settings import (
    UNHASHED,
    UNHASHED_COUNT,
    ChatSettings,
    LearningSettings,
    MinibatchSettings,
)

CUT_OFF = "what was cut off teaches nothing under --mask-truncated"


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(ChatSettings):
    """Completions that a loop samples and trains on."""

    group_size: int = opt(16, "completions per problem", least=1)
    temperature: float = opt(
        1.0, "sampling temperature; RL trains at the same, preference at 1", least=0
    )
    top_k: int | None = opt(
        None, "sample among the k likeliest tokens, RL also trains among them; none = all", least=1
    )
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    row_tokens: int = opt(512, "tokens of a packed training row", least=2)
    eval_examples: int = opt(128, "validation problems (and pairs) per evaluation", least=1)


@dataclass(frozen=True, kw_only=True)
class RLSettings(SamplingSettings, LearningSettings, TaskChoice):
    """What every loop that learns from a task's reward has."""

    device_batch_size: int = 16
    max_steps: int = 50
    rows: int = opt(8, "packed rows per forward pass", least=1)
    engine: Literal["local", "http", "vllm"] = opt(
        "local", "what samples: this process, `codechat serve`, or vLLM"
    )
    engine_url: str = opt("http://127.0.0.1:8000", "server of --engine http and vllm", **UNHASHED)
    engine_dir: Path | None = opt(
        None, "weights for the server: its --reload-from; vLLM: the parent of hf", **UNHASHED
    )
    engine_patience_s: float = opt(
        600.0, "seconds a server may be away before the run stops", least=0.01, **UNHASHED
    )
    eval_every: int = 25
    ks: tuple[int, ...] = opt(
        (1,), "pass@k to report in evaluations; as many samples as the largest k are drawn"
    )
    probe_examples: int = opt(
        0, "behaviour probes of data_dir per cell and evaluation; 0 = none", least=0
    )
    allow_dead: bool = opt(False, "train even if diagnose says DEAD")
    diagnose_groups: int = opt(
        64, "groups judged before the first step; 0 = no reference check, no diagnosis", least=0
    )
    dead_patience: int = opt(20, "DEAD steps in a row that end the run", least=1)
    log_rollouts_every: int = opt(
        10, "steps between rollouts written to samples.jsonl; 0 = never", **UNHASHED_COUNT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"temperature {self.temperature}; it must be "
                "above 0: a greedy policy has no gradient"
            )
        if self.engine != "local" and self.engine_dir is None:
            raise ConfigError(
                f"--engine {self.engine} needs --engine-dir: its "
                "--reload-from, or the parent of vLLM's hf"
            )
        if self.engine != "local" and self.top_k is not None:
            why = (
                "the server does not say which tokens it kept, and "
                "training needs their probabilities"
            )
            raise ConfigError(
                f"--top-k {self.top_k} with --engine {self.engine}: {why}; "
                "leave out --top-k, or set --engine local"
            )

    @property
    def learns_cut_off(self) -> bool:
        """Whether completions that were cut off are trained on."""
        return True

    @property
    def idle_reason(self) -> str:
        """Why a step whose rewards differ made no update, and what to do."""
        return (
            "no completion has a token that the policy wrote; "
            "raise the block size, or shorten the prompts"
        )

    def needs_groups(self, why: str) -> None:
        """ConfigError for groups of one."""
        if self.group_size < 2:
            raise ConfigError(
                f"group_size {self.group_size} with {why}; set --group-size 2 or more"
            )


@dataclass(frozen=True, kw_only=True)
class GroupSettings(RLSettings):
    """What REINFORCE and GRPO have: advantages within a group of completions."""

    baseline: Baseline = opt("mean", "what is subtracted from a reward")
    importance_cap: float = opt(
        0.0,
        "cap on importance weights (trainer's over sampler's "
        "probability of a token); 0 = no weights",
        least=0,
    )

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """TRL counts the completions of a batch, --device-batch-size its problems. ConfigError
        where they are no whole groups."""
        given = dict(super().as_spelled(given, spelled))
        if "per_device_train_batch_size" not in spelled:
            return given
        batch: Any = given["device_batch_size"]
        group: Any = given.get("group_size", cls.group_size)
        try:
            problems = int(batch) / int(group)
        except (TypeError, ValueError, ZeroDivisionError):
            return given  # no number, which is refused where it is read
        if problems < 1 or problems % 1:
            got = (
                f"--per_device_train_batch_size {batch} with {group} "
                "completions per problem: TRL counts completions"
            )
            raise ConfigError(
                f"{got}; required is a multiple of {group}, or "
                "--device-batch-size, a number of problems"
            )
        return given | {"device_batch_size": int(problems)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline != "none":
            self.needs_groups(f"baseline {self.baseline}: the advantage is always 0")
        if 0 < self.importance_cap < 1:
            raise ConfigError(
                f"importance_cap {self.importance_cap}; it must be 0 (no weights) or at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class EntropySettings(Settings):
    """What loops with an entropy bonus have."""

    entropy_coef: float = opt(0.0, "weight of an entropy bonus; positive raises entropy")


@dataclass(frozen=True, kw_only=True)
class RatioSettings(EntropySettings, MinibatchSettings):
    """What GRPO and PPO have: clipped ratios to the policy that sampled, and a pull towards the
    one that began."""

    clip_eps_low: float = opt(
        0.2,
        "a ratio below 1 - this has no gradient where the advantage is negative; 1 = no bound",
        least=0,
    )
    clip_eps_high: float = opt(
        0.2, "a ratio above 1 + this has no gradient where the advantage is positive", least=0
    )
    kl_coef: float = opt(
        0.0, "weight of the KL divergence from the starting policy; 0 = no reference model", least=0
    )
    kl_kind: KLKind = opt("k3", "estimator of the KL divergence; in a reward use k1")

    def __post_init__(self) -> None:
        super().__post_init__()
        # None in GRPO: the paper's value is filled in later
        if (self.clip_eps_low or 0) > 1:
            raise ConfigError(
                f"clip_eps_low {self.clip_eps_low}; a ratio is "
                "never below 0, so it must be at most 1"
            )


_TABLES = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
TOY_RUN: dict[str, Any] = _TABLES["toy"] | {"model": TOY_MODEL, "max_new_tokens": COMPLETION_LENGTH}
TOY_ONE_UPDATE: dict[str, Any] = TOY_RUN | _TABLES["one_update"]
LORA_RUN: dict[str, Any] = _TABLES["lora"]
