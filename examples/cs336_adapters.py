"""The adapters that the tests of Stanford's CS336, assignment 5 (alignment), import. Copy this file over tests/adapters.py of the assignment.

    cp examples/cs336_adapters.py ~/assignment5-alignment/tests/adapters.py
    pip install -e .                     # this project, in the environment of the assignment
    cd ~/assignment5-alignment && pytest

Each function is a few lines over `codechat.rl` (losses, advantages, preference_losses), which state formulas and sources. Models return `.logits`
(Hugging Face) or the logits themselves; tokenizers are callable (Hugging Face) or have `encode`. The signatures are those of the spring 2025 edition.

Shapes: B sequences, T tokens, V vocabulary, N responses. Log-probabilities and entropies in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import read_jsonl
from codechat.rl import losses, preference_losses
from codechat.rl.advantages import group_advantages, zero_variance
from codechat_lab.tasks.reasoning import answers
from codechat_lab.tasks.reasoning.task import ALPACA

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip"]
INSTRUCTION = ALPACA.replace("{question}", "{instruction}") + "{response}"


# ---------------------------------------------------------------- tokens and their probabilities


def _encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Ids of a text; `special` adds the tokenizer's own begin-of-text."""
    if callable(tokenizer):
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    return list(tokenizer.encode(text))


def _first_id(tokenizer: Any, *names: str) -> list[int]:
    """The first of these ids that the tokenizer has, as a list of one id or none."""
    return [i for name in names if isinstance(i := getattr(tokenizer, name, None), int)][:1]


def tokenize_prompt_and_output(
    prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any
) -> dict[str, Tensor]:
    """Prompts and outputs, tokenized apart and joined. input_ids, labels: (B, T) int64, labels shifted by one, T the longest length - 1.
    response_mask: (B, T) bool, true where the label is a token of the output. Right-padded with the tokenizer's pad (or end) id, else 0."""
    if len(prompts) != len(outputs) or not prompts:
        raise ConfigError(
            f"{len(prompts)} prompts and {len(outputs)} outputs; required equally many, and at least one"
        )
    parts = [(_encode(tokenizer, p), _encode(tokenizer, o)) for p, o in zip(prompts, outputs)]
    (pad,) = _first_id(tokenizer, "pad_token_id", "eos_token_id") or [0]
    ids = pad_sequence(
        [torch.tensor(p + o, dtype=torch.long) for p, o in parts],
        batch_first=True,
        padding_value=pad,
    )
    on = [torch.tensor([False] * len(p) + [True] * len(o), dtype=torch.bool) for p, o in parts]
    mask = pad_sequence(on, batch_first=True)
    return dict(input_ids=ids[:, :-1], labels=ids[:, 1:], response_mask=mask[:, 1:])


def compute_entropy(logits: Tensor) -> Tensor:
    """(B, T, V) -> (B, T): entropy -sum p log p of each next-token distribution, in nats; by log-softmax, so no logit overflows."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).nan_to_num(nan=0.0).sum(-1)  # 0 log 0 = 0 where a logit is -inf


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """log_probs (B, T): log p(label | ids before it); with return_token_entropy also token_entropy (B, T). Gradients as the caller allows."""
    out = model(input_ids)
    logits = getattr(out, "logits", out)  # (B, T, V)
    values = dict(log_probs=logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0])
    return values | (dict(token_entropy=compute_entropy(logits)) if return_token_entropy else {})


# ---------------------------------------------------------------- reductions


def _kept_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    kept = torch.where(mask.bool(), tensor, torch.zeros_like(tensor))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over `dim` (none = all) of the elements where mask is 1; NaN where the mask is empty."""
    return _kept_sum(tensor, mask, dim) / (mask.sum() if dim is None else mask.sum(dim))


def masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> Tensor:
    """Sum over `dim` (none = all) where mask is 1, divided by a constant: the loss aggregation of Dr. GRPO (arXiv:2503.20783, section 3.2)."""
    return _kept_sum(tensor, mask, dim) / normalize_constant


# ---------------------------------------------------------------- rewards and losses


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Mapping[str, float]],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float = 1e-6,
    normalize_by_std: bool = True,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages (N,), raw rewards (N,) and their statistics, of N responses in group-major order; reward_fn returns a mapping with "reward".

    Reward minus the group's mean; with normalize_by_std over the group's standard deviation (n - 1) + eps (GRPO, arXiv:2402.03300, section 4.1.2);
    without, as in Dr. GRPO (arXiv:2503.20783)."""
    if len(rollout_responses) % group_size or len(rollout_responses) != len(repeated_ground_truths):
        raise ConfigError(
            f"{len(rollout_responses)} responses, {len(repeated_ground_truths)} ground truths, group_size {group_size}; "
            "required equally many, in whole groups"
        )
    raw = torch.tensor(
        [
            float(reward_fn(r, t)["reward"])
            for r, t in zip(rollout_responses, repeated_ground_truths)
        ]
    )
    groups = raw.view(-1, group_size)
    advantages = group_advantages(
        groups, "zscore" if normalize_by_std else "mean", eps=advantage_eps
    ).flatten()
    stats = dict(
        reward_mean=raw.mean(), reward_std=raw.std(), reward_max=raw.max(), reward_min=raw.min()
    )
    stats |= dict(frac_zero_std_groups=zero_variance(groups).float().mean())
    return advantages, raw, {name: float(value) for name, value in stats.items()}


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    """(B, T): -A log pi per token, A (B, 1) without gradient (REINFORCE, Williams 1992)."""
    return -raw_rewards_or_advantages.detach() * policy_log_probs


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, T): the clipped loss of PPO and GRPO (`losses.clipped_policy_loss`); per token "clipped" (bool) and "ratio", and "clip_fraction"."""
    ratio = losses.policy_ratio(policy_log_probs, old_log_probs, torch.ones_like(policy_log_probs))
    loss, ratio = (
        losses.clipped_policy_loss(ratio, advantages, cliprange, cliprange),
        ratio.detach(),
    )
    clipped = ((ratio > 1 + cliprange) & (advantages > 0)) | (
        (ratio < 1 - cliprange) & (advantages < 0)
    )
    return loss, dict(clipped=clipped, ratio=ratio, clip_fraction=clipped.float().mean())


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss (B, T) called `loss_type`, and its metadata. ConfigError for another name or a missing input."""
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
    signal = raw_rewards if loss_type == "no_baseline" else advantages
    return compute_naive_policy_gradient_loss(signal, policy_log_probs), {}


# ---------------------------------------------------------------- steps


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Backward of the negative log-likelihood: per sequence the sum over the mask / normalize_constant, the mean over sequences, divided by the
    number of accumulated microbatches. Returns the divided loss (scalar), detached."""
    per_sequence = masked_normalize(policy_log_probs, response_mask, -1, normalize_constant)  # (B,)
    loss = -per_sequence.mean() / gradient_accumulation_steps
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
    """Backward of a policy-gradient loss: the mean over each sequence's tokens, then over sequences (sequence-mean aggregation, GRPO,
    arXiv:2402.03300, eq. 3), divided by the number of accumulated microbatches. Returns the divided loss (scalar), detached."""
    per_token, metadata = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = masked_mean(per_token, response_mask, -1).mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), metadata


# ---------------------------------------------------------------- data


class PackedSFTDataset(Dataset):
    """Instructions and responses (jsonl rows of prompt and response) as one stream of tokens, cut into pieces of seq_length.

    Each row is Alpaca's template between the tokenizer's begin and end ids. Items are input_ids and labels (seq_length,) int64, labels shifted by
    one; an incomplete last piece is dropped. Pieces cross rows without a mask (`conversations.PackedLoader` keeps rows apart)."""

    def __init__(
        self,
        tokenizer: Any,
        dataset_path: str | Path,
        seq_length: int,
        shuffle: bool,
        seed: int = 0,
    ) -> None:
        texts = _instructions(Path(dataset_path))
        if shuffle:
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
            texts = [texts[i] for i in order.tolist()]
        end = _first_id(tokenizer, "eos_token_id", "eot")
        stream = [i for text in texts for i in _encode(tokenizer, text, special=True) + end]
        self.ids, self.seq_length = torch.tensor(stream), seq_length

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"piece {i} of {len(self)}")
        at = i * self.seq_length
        return dict(
            input_ids=self.ids[at : at + self.seq_length],
            labels=self.ids[at + 1 : at + 1 + self.seq_length],
        )


def get_packed_sft_dataset(
    tokenizer: Any, dataset_path: str | Path, seq_length: int, shuffle: bool
) -> Dataset:
    """`PackedSFTDataset` under the assignment's name."""
    return PackedSFTDataset(tokenizer, dataset_path, seq_length, shuffle)


def _instructions(path: Path) -> list[str]:
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; it must hold rows of prompt and response")
    texts = []
    for number, row in read_jsonl(path):
        if not {"prompt", "response"} <= row.keys():
            raise DataError(
                f"{path}:{number} has the columns {sorted(row)}; required prompt and response"
            )
        texts.append(INSTRUCTION.format(instruction=row["prompt"], response=row["response"]))
    return texts


def iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> DataLoader:
    """One epoch of batches; the last one may be smaller."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


# ---------------------------------------------------------------- answers


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The letter A to D after "answer is" (or "answer:"), no article, else a letter alone on the first or last line; None where there is none."""
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
    """DPO's loss (scalar; arXiv:2305.18290, eq. 7) of one pair in Alpaca's template, each response followed by the tokenizer's end token. `lm_ref`
    gets no gradient. Log-probabilities are of the whole sequence: those of the prompt are equal for both responses and cancel in the margin."""
    end = _first_id(tokenizer, "eos_token_id")

    def total(model: nn.Module, response: str) -> Tensor:
        """(1,) log-probability of the pair's prompt and this response."""
        ids = _encode(tokenizer, INSTRUCTION.format(instruction=prompt, response=response)) + end
        sequence = torch.tensor([ids], device=next(model.parameters()).device)
        return get_response_log_probs(model, sequence[:, :-1], sequence[:, 1:])["log_probs"].sum(1)

    responses = (response_chosen, response_rejected)
    with torch.no_grad():
        refs = [total(lm_ref, response) for response in responses]
    chosen, rejected = (total(lm, response) for response in responses)
    return preference_losses.dpo_loss(
        chosen, rejected, *(ref.to(chosen.device) for ref in refs), beta
    ).losses[0]


# ---------------------------------------------------------------- the assignment's names


def run_tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: Any
) -> dict[str, Tensor]:
    return tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer)


def run_compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    return compute_group_normalized_rewards(
        reward_fn,
        rollout_responses,
        repeated_ground_truths,
        group_size,
        advantage_eps,
        normalize_by_std,
    )


def run_compute_entropy(logits: Tensor) -> Tensor:
    return compute_entropy(logits)


def run_get_response_log_probs(
    model: torch.nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    return get_response_log_probs(model, input_ids, labels, return_token_entropy)


def run_compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> Tensor:
    return compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs)


def run_compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)


def run_compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )


def run_masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return masked_mean(tensor, mask, dim)


def run_sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: int | None = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    return sft_microbatch_train_step(
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
    return grpo_microbatch_train_step(
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
    return masked_normalize(tensor, mask, dim, normalize_constant)


# ---- the optional part on safety and RLHF


def run_iterate_batches(dataset: Dataset, batch_size: int, shuffle: bool) -> Iterable[Any]:
    return iterate_batches(dataset, batch_size, shuffle)


run_parse_mmlu_response = parse_mmlu_response
run_parse_gsm8k_response = parse_gsm8k_response
run_compute_per_instance_dpo_loss = compute_per_instance_dpo_loss
