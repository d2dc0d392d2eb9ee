"""Processes and devices: the process group, sharded weights (FSDP), detection of ranks that diverge, what the hardware can do.

Not for launching: that is `launch`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=["desync", "dist", "gpu_specs", "hardware", "sharding"],
)
