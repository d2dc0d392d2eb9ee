"""Block matrices multiplied in float8 by torchao, where it is installed: float32 weights, a scale per tensor.

Weights keep their names and dtype, so checkpoints are the same. Embedding and head stay: their logits need the range.
"""

from __future__ import annotations

import torch
from torch import nn

from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.models.gpt import GPT

MULTIPLE = 16  # of both sides of a matrix, for float8 kernels


def convert(model: GPT, emulate: bool = False) -> GPT:
    """Replace the linear layers of the blocks, in place and before sharding; returns the model. emulate: without float8
    kernels, for tests. ConfigError without torchao, and without a GPU that has float8 products."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError("fp8 needs torchao; pip install 'codechat[fp8]', or leave out --fp8") from None
    device = dist.device()
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise ConfigError(f"fp8 on {device.type}; required is a GPU of compute capability 8.9; leave out --fp8")

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not any(side % MULTIPLE for side in module.weight.shape)

    convert_to_float8_training(model.blocks, module_filter_fn=fits, config=Float8LinearConfig(emulate=emulate))
    return model
