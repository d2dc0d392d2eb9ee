"""Defaults and limits of LoRA's settings. No torch: the configuration classes of the loops read them (`lora` holds the layers)."""

from __future__ import annotations

from collections.abc import Sequence

from codechat.core.errors import ConfigError

TARGETS = ("qkv", "out", "gate", "up", "down")
RANK, ALPHA, CHOSEN = 0, 16.0, ("qkv", "out")  # rank 0 = train all weights


def check(rank: int, alpha: float, targets: Sequence[str]) -> None:
    """ConfigError for settings that no adapter can have; rank 0 is allowed and means no adapters."""
    if rank < 0 or (rank and alpha <= 0):
        raise ConfigError(f"lora_rank {rank}, lora_alpha {alpha}; required a rank of at least 0 and an alpha above 0")
    if unknown := [t for t in targets if t not in TARGETS]:
        raise ConfigError(f"lora_targets {' '.join(unknown)}; required some of {' '.join(TARGETS)}")
    if rank and not targets:
        raise ConfigError(f"lora_rank {rank} without targets; set --lora-targets to some of {' '.join(TARGETS)}")
