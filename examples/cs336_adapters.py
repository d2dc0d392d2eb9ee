"""The adapters that the tests of Stanford's CS336, assignment 5 (alignment), import. Copy this file over tests/adapters.py of the assignment.

    cp examples/cs336_adapters.py ~/assignment5-alignment/tests/adapters.py
    pip install -e .                     # this project, in the environment of the assignment
    cd ~/assignment5-alignment && pytest

Each function calls the one of the same name in `codechat.rl.functional`. The signatures are those of the spring 2025 edition. Later editions split
rewards from advantages and add GSPO: their `run_compute_rollout_rewards`, `run_aggregate_loss_across_microbatch` and `run_grpo_train_step` are not here.

Left out: the assignment's fixtures and snapshots. They are the course's; `codechat.labs.array_snapshots` keeps snapshots of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from codechat.rl import functional


def run_tokenize_prompt_and_output(prompt_strs: list[str], output_strs: list[str], tokenizer: Any) -> dict[str, Tensor]:
    return functional.tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer)


def run_compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    return functional.compute_group_normalized_rewards(
        reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std
    )


def run_compute_entropy(logits: Tensor) -> Tensor:
    return functional.compute_entropy(logits)


def run_get_response_log_probs(
    model: torch.nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    return functional.get_response_log_probs(model, input_ids, labels, return_token_entropy)


def run_compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    return functional.compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs)


def run_compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return functional.compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def run_compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    return functional.compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )


def run_masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return functional.masked_mean(tensor, mask, dim)


def run_sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: int | None = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    return functional.sft_microbatch_train_step(
        policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant or 1.0
    )


def run_grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"],
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    return functional.grpo_microbatch_train_step(
        policy_log_probs,
        response_mask,
        gradient_accumulation_steps,
        loss_type,
        raw_rewards,
        advantages,
        old_log_probs,
        cliprange,
    )


def run_masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> Tensor:
    return functional.masked_normalize(tensor, mask, dim, normalize_constant)


# ---- the optional part on safety and RLHF


def get_packed_sft_dataset(tokenizer: Any, dataset_path: str | PathLike, seq_length: int, shuffle: bool) -> Dataset:
    return functional.get_packed_sft_dataset(tokenizer, dataset_path, seq_length, shuffle)


def run_iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> Iterable[Any]:
    return functional.iterate_batches(dataset, batch_size, shuffle)


run_parse_mmlu_response = functional.parse_mmlu_response
run_parse_gsm8k_response = functional.parse_gsm8k_response
run_compute_per_instance_dpo_loss = functional.compute_per_instance_dpo_loss
