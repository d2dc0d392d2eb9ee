"""The process group, sharded weights (FSDP), collective desync detection, hardware and GPU specifications.

Not for launching: that is `launch`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, modules=["desync", "dist", "gpu_specs", "hardware", "sharding"])
