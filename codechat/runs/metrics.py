"""The names under which a run may log, with their units; and values as plain json.

A name with a `*` declares a family: `tier/*` allows `tier/full_match`. A number that is not finite is written
as null, since json has no word for it, and listed in the row's `nonfinite` ("train_loss=nan"), so that it is not
taken for a value that was never logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from codechat.core.errors import nearest


class Metric(NamedTuple):
    unit: str
    help: str


METRICS: dict[str, Metric] = {
    "tokens": Metric("tokens", "training tokens seen so far, all ranks"),
    "supervised_tokens": Metric("tokens", "tokens that carried loss so far, all ranks"),
    "epoch": Metric("epochs", "passes over the data so far"),
    "train_loss": Metric("nats/token", "loss per supervised token of the step"),
    "loss_domain/*": Metric("nats/token", "training loss of one domain"),
    "val_loss": Metric("nats/token", "validation loss"),
    "val_bpb": Metric("bits/byte", "validation loss in bits per byte of text"),
    "heldout_loss/*": Metric("nats/token", "held-out loss of one domain"),
    "heldout_nats/*": Metric(
        "nats", "held-out loss of one domain per conversation; comparable between ways to write tags"
    ),
    "lr": Metric("", "learning rate of the step"),
    "grad_norm": Metric("", "gradient norm before clipping"),
    "weights_changed_bf16": Metric("share", "weights whose bf16 value changed in the step"),
    "tok_per_s": Metric("tokens/s", "throughput, all ranks"),
    "mfu": Metric("share", "model FLOPs over the stated peak"),
    "step_s": Metric("s", "wall time of a step"),
    "sample_s": Metric("s", "wall time of sampling within a step"),
    "train_s": Metric("s", "wall time of the updates within a step"),
    "peak_memory_mb": Metric("MB", "peak memory of this process"),
    "reward_mean": Metric("reward", "mean reward of the step's completions"),
    "reward_std": Metric("reward", "standard deviation of the rewards"),
    "reward_max": Metric("reward", "largest reward"),
    "exact_match": Metric("share", "completions that are fully correct"),
    "tier/*": Metric("share", "completions on one rung of the reward"),
    "reward/*": Metric("reward", "mean of one term of the reward"),
    "format_rate": Metric("share", "completions in the requested layout, correct or not"),
    "kept/*": Metric("share", "rows of one source that were kept"),
    "probe/*": Metric("share", "behaviour probes with the expected behaviour"),
    "frac_zero_std_groups": Metric("share", "groups whose rewards are all equal: no gradient"),
    "effective_groups": Metric("groups", "groups with a gradient"),
    "adv_abs_mean": Metric("reward", "mean absolute advantage"),
    "completion_tokens_mean": Metric("tokens", "mean completion length"),
    "truncated_frac": Metric("share", "completions cut at the token limit"),
    "entropy": Metric("nats", "mean entropy of the policy over completion tokens"),
    "symbol_accuracy": Metric("share", "sampled symbols that equal the text's"),
    "val_accuracy": Metric("share", "probability of sampling the next symbol of held-out text"),
    "kl_weight": Metric("", "weight of the KL term at this step"),
    "kl_ref": Metric("nats/token", "drift from the reference model"),
    "logprob_mismatch": Metric("nats", "largest difference between sampled and recomputed logprobs"),
    "mismatch_kl": Metric("nats/token", "KL(sampler || trainer) over the sampled tokens before the update, k3"),
    "importance_capped": Metric("share", "tokens whose importance weight was cut to --importance-cap"),
    "off_policy_steps": Metric(
        "steps", "policy staleness: updates between the weights that sampled and those that are trained"
    ),
    "push_s": Metric("s", "wall time of sending weights to the engine"),
    "engine_retries": Metric(
        "requests", "requests repeated because the engine was unreachable, busy or had other weights"
    ),
    "clip_frac": Metric("share", "completion tokens whose ratio was clipped, over all updates of the step"),
    "clipped_low": Metric("share", "tokens clipped below: advantage negative, ratio small"),
    "clipped_high": Metric("share", "tokens clipped above: advantage positive, ratio large"),
    "approx_kl": Metric("nats/token", "drift from the old policy, k3"),
    "ratio_max": Metric("", "largest ratio of new to old policy"),
    "resampled_groups": Metric("groups", "groups sampled to replace those without variance, all ranks"),
    "value_loss": Metric("", "half the squared error of the value, per completion token"),
    "explained_variance": Metric(
        "share",
        "variance of the returns that the value predicts at sampling time; 1 = all, below 0 = worse than a constant",
    ),
    "kept_frac": Metric("share", "completions used for training"),
    "preference_loss": Metric("nats/pair", "preference loss, its SFT term included"),
    "preference_margin": Metric("nats", "implicit reward of the chosen minus that of the rejected answer"),
    "preference_accuracy": Metric("share", "pairs whose margin is positive"),
    "chosen_reward": Metric("nats", "implicit reward of the chosen answer"),
    "rejected_reward": Metric("nats", "implicit reward of the rejected answer"),
    "chosen_logprob": Metric("nats", "summed log-probability of the chosen answer"),
    "heldout_preference_*": Metric("", "the same on held-out preferences"),
    "heldout_chosen_*": Metric("nats", "the same on held-out preferences"),
    "heldout_rejected_*": Metric("nats", "the same on held-out preferences"),
    "policy_loss": Metric("", "policy-gradient loss"),
    "dead_steps": Metric("steps", "steps in a row without a usable gradient"),
    "verdict": Metric("", "DEAD, WEAK, LIVE or SATURATED"),
    "pass@1": Metric("share", "unbiased estimate that one sample is correct"),
    "pass@8": Metric("share", "unbiased estimate that one of 8 samples is correct"),
    "pass@*": Metric("share", "unbiased estimate that one of k samples is correct"),
}
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("*"))
_known: set[str] = set(METRICS) - {f + "*" for f in _FAMILIES}


def _declaration(name: str) -> Metric | None:
    family = next((f for f in _FAMILIES if name.startswith(f) and len(name) > len(f)), None)
    return METRICS.get(name) or METRICS.get(f"{family}*")


def metric(name: str) -> Metric:
    """The declaration of `name`; ValueError with the nearest name where there is none."""
    if found := _declaration(name):
        return found
    raise ValueError(f"metric {name!r} is not declared in metrics.METRICS{nearest(name, METRICS)}")


def is_declared(name: str) -> bool:
    return _declaration(name) is not None


def plain(value: Any, name: str, bad: list[str]) -> Any:
    """`value` as json: numpy and torch scalars as numbers, tuples as lists; a number that is not finite as None, noted in `bad`."""
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        bad.append(f"{name}={value}")
        return None
    if type(value) in (int, str, bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{name}.{k}", bad) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{name}.{i}", bad) for i, v in enumerate(value)]
    if hasattr(value, "tolist"):  # of a scalar, a number
        return plain(value.tolist(), name, bad)
    return int(value) if isinstance(value, int) else str(value)


def plain_row(step: int, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """{step, time, ...values}, and `nonfinite` where a value is not finite."""
    bad: list[str] = []
    row = {"step": int(step), "time": round(time, 3), **{k: plain(v, k, bad) for k, v in values.items()}}
    if bad:
        row["nonfinite"] = " ".join(bad)
    return row


def metric_row(step: int, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, flat and with declared names only."""
    for name in values.keys() - _known:
        metric(name)
        _known.add(name)
    row = plain_row(step, time, values)
    for name, value in row.items():
        if isinstance(value, (list, dict)):
            raise ValueError(f"metric {name!r} is a {type(value).__name__}; log scalars (log_eval takes more)")
    return row
