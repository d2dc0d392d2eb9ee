"""Processes and devices: the process group, sharded weights (FSDP), detection of ranks that diverge, what the hardware can do.

Not for launching: that is `launch`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=["desync", "dist", "gpu_specs", "hardware", "sharding"],
)
