"""Settings of the engine that samples rollouts, and the check that they fit together.

Imports no torch, so that configuration classes, presets and `--help` can use it. Left out: the engines themselves (`engines`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Protocol

from codechat.core.errors import ConfigError
from codechat.core.http_client import check_url
from codechat.models.config import GPTConfig

Kind = Literal["local", "http", "vllm"]
Carrier = Literal["checkpoint", "memory"]
HF = "hf"  # directory below --engine-dir with the export that vLLM serves


class EngineSettings(Protocol):
    """The fields of a loop's configuration that an engine reads."""

    run_name: str
    engine: Kind
    engine_url: str
    engine_dir: Path | None
    engine_key_file: Path | None
    engine_patience_s: float
    engine_weights: Carrier
    max_off_policy: int
    sample_ahead: bool
    importance_cap: float
    tags: str
    model: GPTConfig


def check(cfg: EngineSettings) -> None:
    """ConfigError for settings that are out of range or do not fit together."""
    if cfg.importance_cap and not 1 <= cfg.importance_cap < math.inf:
        raise ConfigError(
            f"importance_cap {cfg.importance_cap}; it must be 0 (no weights) or at least 1, the weight of equal probabilities"
        )
    if cfg.max_off_policy < 0 or not cfg.engine_patience_s > 0:
        raise ConfigError(
            f"max_off_policy {cfg.max_off_policy} must not be negative, engine_patience_s {cfg.engine_patience_s} must be above 0"
        )
    if cfg.sample_ahead and (cfg.engine == "local" or not cfg.max_off_policy):
        raise ConfigError(
            f"sample_ahead with --engine {cfg.engine} and max_off_policy {cfg.max_off_policy}; a server must sample while this process learns, "
            "from weights a step old: set --engine http or vllm, and --max-off-policy 1 or more"
        )
    if cfg.engine_weights == "memory" and cfg.engine == "vllm":
        raise ConfigError(
            "engine_weights memory: vLLM reads an export; set --engine-weights checkpoint, or --engine http"
        )
    if cfg.engine == "local":
        if cfg.max_off_policy:
            raise ConfigError(
                f"max_off_policy {cfg.max_off_policy}, but --engine local samples from the newest weights; set 0, or another --engine"
            )
        return
    check_url(cfg.engine_url, "--engine-url")
    if cfg.engine_dir is None:
        raise ConfigError(
            f"--engine {cfg.engine} needs --engine-dir, which the server sees too: its --reload-from, or the parent of vLLM's {HF}"
        )
