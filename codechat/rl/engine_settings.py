"""Settings of the engine that samples rollouts, checked together. Imports no torch, as configuration classes need."""

from __future__ import annotations

import math
from typing import Any, Literal

from codechat.core.errors import ConfigError
from codechat.core.http_client import check_url

Kind = Literal["local", "http", "vllm"]
Carrier = Literal["checkpoint", "memory"]
HF = "hf"  # directory below --engine-dir with the export that vLLM serves


def check(cfg: Any) -> None:
    """ConfigError for settings of a loop that are out of range or do not fit together."""
    local, lag = cfg.engine == "local", cfg.max_off_policy
    if cfg.importance_cap and not 1 <= cfg.importance_cap < math.inf:
        raise ConfigError(f"importance_cap {cfg.importance_cap}; it must be 0 (no weights) or at least 1")
    if lag < 0 or not cfg.engine_patience_s > 0:
        given = f"max_off_policy {lag} and engine_patience_s {cfg.engine_patience_s}"
        raise ConfigError(f"{given}; required are at least 0, and above 0")
    if cfg.sample_ahead and (local or not lag):
        needed = "a server that samples from weights a step old: --engine http or vllm, --max-off-policy 1 or more"
        raise ConfigError(f"sample_ahead with --engine {cfg.engine} and max_off_policy {lag}; it needs {needed}")
    if cfg.engine_weights == "memory" and cfg.engine == "vllm":
        remedy = "set --engine-weights checkpoint, or --engine http"
        raise ConfigError(f"engine_weights memory: vLLM reads an export; {remedy}")
    if local and lag:
        raise ConfigError(f"max_off_policy {lag}, but --engine local samples from the newest weights; set 0")
    if not local:
        check_url(cfg.engine_url, "--engine-url")
    if not local and cfg.engine_dir is None:
        needed = f"a directory that the server sees too: its --reload-from, or the parent of vLLM's {HF}"
        raise ConfigError(f"--engine {cfg.engine} needs --engine-dir, {needed}")
