"""Settings that `--preset toy`, `--preset lora` and `--preset gsm8k` of the RL loops apply. Importing them needs neither
torch nor a task."""

from __future__ import annotations

from typing import Any

TOY_COMPLETION_LENGTH = 8
TOY_MODEL: dict[str, Any] = {"depth": 2, "n_embd": 64, "n_head": 2, "block_size": 64}
# The toy task and a model of its size. The algorithm keeps its defaults.
TOY_RUN: dict[str, Any] = {
    "task": "toy",
    "tokenizer": "bytes",
    "model": TOY_MODEL,
    "max_new_tokens": TOY_COMPLETION_LENGTH,
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
# A GRPO example on GSM8K that TRL users have copied since (W. Brown, 2025), with its own numbers: 1 problem x 4 accumulated x 16 completions
# a step, one epoch of the 7,473 problems, a tenth of it warm-up, TRL's KL weight of that time. Left out: dropout of the adapters (0.05), Adam's
# beta2 of 0.99 (here 0.95), prompts cut to 256 tokens.
GSM8K_RUN: dict[str, Any] = LORA_RUN | {
    "device_batch_size": 1,
    "grad_accum": 4,
    "max_steps": 1868,
    "warmup_steps": 187,
    "final_lr_share": 0.0,
    "weight_decay": 0.1,
    "grad_clip": 0.1,
    "kl_coef": 0.04,
    "max_new_tokens": 786,
    "row_tokens": 2048,
    "eval_every": 100,
    "save_every": 100,
}
