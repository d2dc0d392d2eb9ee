"""The pieces of alignment training as functions of plain tensors, for code that brings its own model, tokenizer and loop.

Names and shapes are those of the CS336 alignment exercises, so that they can be called from there: log-probabilities (B, T), advantages and
rewards (B, 1), masks (B, T); models return `.logits` (a Hugging Face model) or the logits themselves (`gpt.GPT`); tokenizers are callable or
have `encode`. Each is a few lines over `losses`, `advantages` and `preference_losses`, where the formulas and their sources are. The loops of
this project do not use them: they pack rows, and never hold logits of a whole batch.

Shapes: B sequences, T tokens, V vocabulary. Log-probabilities in nats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.rl import losses, preference_losses
from codechat.rl.advantages import group_advantages
from codechat.tasks.reasoning import answers
from codechat.tasks.reasoning.templates import ALPACA

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
INSTRUCTION = ALPACA.replace("{question}", "{instruction}") + "{response}"


# ---------------------------------------------------------------- tokens and their probabilities


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Ids of a text, with the tokenizer's own begin-of-text only if asked for."""
    if callable(tokenizer):
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    return list(tokenizer.encode(text))


def tokenize_prompt_and_output(prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Prompts and outputs tokenized apart and joined: input_ids and labels (B, T), labels shifted by one, T the longest length - 1; response_mask
    (B, T) bool, true where the label is a token of the output. Padded on the right with the tokenizer's pad (or end) id, else 0."""
    if len(prompts) != len(outputs) or not prompts:
        raise ConfigError(
            f"{len(prompts)} prompts and {len(outputs)} outputs; required as many of each, and at least one"
        )
    parts = [(_encode(tokenizer, p), _encode(tokenizer, o)) for p, o in zip(prompts, outputs)]
    longest = max(len(p) + len(o) for p, o in parts)
    pad = next(
        (i for i in (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")) if i is not None), 0
    )
    ids = torch.full((len(parts), longest), pad)
    mask = torch.zeros(len(parts), longest, dtype=torch.bool)
    for row, (prompt, output) in enumerate(parts):
        ids[row, : len(prompt) + len(output)] = torch.tensor(prompt + output)
        mask[row, len(prompt) : len(prompt) + len(output)] = True
    return dict(input_ids=ids[:, :-1], labels=ids[:, 1:], response_mask=mask[:, 1:])


def compute_entropy(logits: Tensor) -> Tensor:
    """(B, T, V) -> (B, T): entropy of each next-token distribution, -sum p log p, by log-softmax so that no logit overflows."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).nan_to_num(nan=0.0).sum(-1)  # 0 log 0 = 0 where a logit is -inf


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """log_probs (B, T): log p(label | ids before it); with return_token_entropy also token_entropy (B, T). Carries gradient where the caller allows it."""
    logits = _logits(model, input_ids)
    found = dict(log_probs=logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0])
    return found | (dict(token_entropy=compute_entropy(logits)) if return_token_entropy else {})


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)
    return getattr(out, "logits", out)


# ---------------------------------------------------------------- reductions


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over `dim` (none = all) of the elements where mask is 1; NaN where there are none, as a mean of nothing is."""
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim) / mask.sum(dim)


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Sum over `dim` (none = all) where mask is 1, divided by a constant: Dr. GRPO's reduction (arXiv:2503.20783)."""
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


# ---------------------------------------------------------------- rewards and losses


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Mapping[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float = 1e-6,
    normalize_by_std: bool = True,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages (N,), raw rewards (N,) and statistics of N responses in group-major order; reward_fn returns a mapping with "reward".

    Minus the group's mean, and with normalize_by_std over its standard deviation (with n - 1) + eps (GRPO, arXiv:2402.03300, section 4.1.2)."""
    if len(rollout_responses) % group_size or len(rollout_responses) != len(repeated_ground_truths):
        raise ConfigError(
            f"{len(rollout_responses)} responses, {len(repeated_ground_truths)} ground truths, group_size {group_size}; "
            "required as many of each, in whole groups"
        )
    raw = torch.tensor([float(reward_fn(r, t)["reward"]) for r, t in zip(rollout_responses, repeated_ground_truths)])
    groups = raw.view(-1, group_size)
    found = group_advantages(groups, "zscore" if normalize_by_std else "mean", eps=advantage_eps).flatten()
    stats = dict(
        reward_mean=raw.mean(),
        reward_std=raw.std(),
        reward_max=raw.max(),
        reward_min=raw.min(),
        frac_zero_std_groups=(groups == groups[:, :1]).all(1).float().mean(),
    )
    return found, raw, {k: float(v) for k, v in stats.items()}


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """(B, T): -A log pi per token, A (B, 1)."""
    return -raw_rewards_or_advantages.detach() * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, T): the clipped loss of `losses.clipped_policy_loss`, and per token whether it was clipped ("clipped", bool) and its "ratio"."""
    loss, _ = losses.clipped_policy_loss(
        policy_log_probs,
        old_log_probs,
        advantages,
        torch.ones_like(policy_log_probs),
        clip_eps_low=cliprange,
        clip_eps_high=cliprange,
    )
    ratio = (policy_log_probs - old_log_probs).exp().detach()
    clipped = ((ratio > 1 + cliprange) & (advantages > 0)) | ((ratio < 1 - cliprange) & (advantages < 0))
    return loss, dict(clipped=clipped, ratio=ratio, clip_fraction=clipped.float().mean())


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss (B, T) of the type, and its metadata. ConfigError for another type or a missing input."""
    needs = {
        "no_baseline": dict(raw_rewards=raw_rewards),
        "reinforce_with_baseline": dict(advantages=advantages),
        "grpo_clip": dict(advantages=advantages, old_log_probs=old_log_probs, cliprange=cliprange),
    }
    if loss_type not in needs:
        raise ConfigError(f"loss_type {loss_type!r}; required: {', '.join(needs)}")
    if missing := [name for name, value in needs[loss_type].items() if value is None]:
        raise ConfigError(f"loss_type {loss_type!r} without {', '.join(missing)}; pass it")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    return compute_naive_policy_gradient_loss(
        raw_rewards if loss_type == "no_baseline" else advantages, policy_log_probs
    ), {}


# ---------------------------------------------------------------- steps


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Backward of the negative log-likelihood: per sequence its sum over the mask / normalize_constant, the mean over sequences, divided by the
    accumulation count. Returns the divided loss, detached."""
    loss = (
        -masked_normalize(policy_log_probs, response_mask, -1, normalize_constant).mean() / gradient_accumulation_steps
    )
    loss.backward()
    return loss.detach(), dict(tokens=response_mask.sum())


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Backward of a policy-gradient loss: the mean over each sequence's tokens, then over sequences (GRPO's weighing), divided by the
    accumulation count. Returns the divided loss, detached."""
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = masked_mean(per_token, response_mask, -1).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metadata


# ---------------------------------------------------------------- data


class PackedSFTDataset(Dataset):
    """Instructions and responses (jsonl rows of prompt and response) in one stream of tokens, cut into pieces of seq_length.

    Each row is Alpaca's template between the tokenizer's begin and end ids. Items are input_ids and labels (seq_length,), labels one token on;
    what is left at the end and fills no piece is dropped. Pieces run across rows without a mask (`dialogues.PackedLoader` keeps them apart)."""

    def __init__(self, tokenizer: Any, dataset_path: str | Path, seq_length: int, shuffle: bool, seed: int = 0) -> None:
        rows = _rows(Path(dataset_path))
        if shuffle:
            rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()]
        ends = [i for i in (getattr(tokenizer, name, None) for name in ("eos_token_id", "eot")) if isinstance(i, int)][
            :1
        ]
        stream = [
            i
            for row in rows
            for i in _encode(
                tokenizer, INSTRUCTION.format(instruction=row["prompt"], response=row["response"]), special=True
            )
            + ends
        ]
        self.ids, self.seq_length = torch.tensor(stream), seq_length

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"piece {i} of {len(self)}")
        at = i * self.seq_length
        return dict(input_ids=self.ids[at : at + self.seq_length], labels=self.ids[at + 1 : at + 1 + self.seq_length])


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; it holds rows of prompt and response")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if bad := next((n for n, row in enumerate(rows, 1) if not {"prompt", "response"} <= row.keys()), 0):
        raise DataError(f"{path}: row {bad} has the columns {sorted(rows[bad - 1])}; required prompt and response")
    return rows


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """One epoch of batches, the last one possibly smaller."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


# ---------------------------------------------------------------- answers


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The letter A to D after "answer is" (or "answer:"), else a letter alone on the first or last line; None where there is none."""
    return answers.choice_letter(model_output)


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of the output, without thousands separators; None where there is none."""
    return answers.last_number(model_output)


# ---------------------------------------------------------------- preferences


def compute_per_instance_dpo_loss(
    lm: nn.Module,
    lm_ref: nn.Module,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """DPO's loss (scalar) of one pair in Alpaca's template, each response ended by the tokenizer's end token. `lm_ref` gets no gradient.

    Log-probabilities of the whole sequence are taken: those of the prompt are the same for both responses and cancel in the margin."""
    end = getattr(tokenizer, "eos_token_id", None)

    def total(model: nn.Module, response: str) -> Tensor:
        ids = _encode(tokenizer, INSTRUCTION.format(instruction=prompt, response=response)) + (
            [] if end is None else [end]
        )
        sequence = torch.tensor([ids], device=next(model.parameters()).device)
        return get_response_log_probs(model, sequence[:, :-1], sequence[:, 1:])["log_probs"].sum(1)

    with torch.no_grad():
        ref_chosen, ref_rejected = (total(lm_ref, response) for response in (response_chosen, response_rejected))
    chosen, rejected = (total(lm, response) for response in (response_chosen, response_rejected))
    return preference_losses.dpo_loss(
        chosen, rejected, ref_chosen.to(chosen.device), ref_rejected.to(chosen.device), beta
    ).losses[0]
