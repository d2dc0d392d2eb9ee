"""Presets that the laboratory adds to loops of the library, by the entry points
`codechat.presets`."""

from typing import Any

from codechat.training.rl_settings import LORA_RUN

# A GRPO example on GSM8K that TRL users have copied since (W. Brown, 2025), with its own
# numbers, over those of `lora`: 1 problem x 4 accumulated x 16 completions a step, one epoch of
# the 7,473 problems, a tenth of it warm-up, TRL's KL
# weight of that time. Not taken over: dropout of the adapters (0.05), Adam's beta2 of 0.99
# (here 0.95), prompts cut to 256 tokens.
GSM8K_RUN: dict[str, Any] = {
    **LORA_RUN,
    "task": "gsm8k",
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

GRPO = {"gsm8k": GSM8K_RUN}
