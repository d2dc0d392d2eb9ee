"""Settings that `--preset toy` and `--preset lora` of several RL loops apply."""

from __future__ import annotations

from typing import Any

from codechat.tasks.toy import COMPLETION_LENGTH, TOY_MODEL

# The toy task and a model of its size. The algorithm keeps its defaults.
TOY_RUN: dict[str, Any] = {
    "task": "toy",
    "tokenizer": "bytes",
    "model": TOY_MODEL,
    "max_new_tokens": COMPLETION_LENGTH,
    "lr": 4e-3,
    "device_batch_size": 4,
    "max_steps": 120,
    "warmup_steps": 1,
    "eval_every": 0,
    "eval_examples": 4,
}
# For loops that make one update of a batch. With groups of 16 and a constant rate, or four problems a step, a policy in five to eight ends with
# one of the four classes unlearned.
TOY_ONE_UPDATE: dict[str, Any] = TOY_RUN | {"device_batch_size": 8, "group_size": 32, "schedule": "cosine"}
# LoRA on an imported checkpoint. The prompt goes through the checkpoint's own chat template.
LORA_RUN: dict[str, Any] = {
    "task": "gsm8k",
    "lora_rank": 16,
    "lora_alpha": 64.0,
    "lora_targets": ("qkv", "out", "gate", "up", "down"),
    "group_size": 16,
    "device_batch_size": 4,
    "lr": 5e-6,
    "schedule": "cosine",
    "max_steps": 500,
    "warmup_steps": 50,
    "max_new_tokens": 256,
    "row_tokens": 1024,
    "eval_every": 50,
    "save_every": 50,
}
