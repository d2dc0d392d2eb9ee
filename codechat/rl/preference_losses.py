"""Losses over preferences: DPO, IPO, CPO, SimPO and ORPO over pairs, KTO over single
completions with a label.

Each pair loss is a function of a margin between the chosen and the rejected completion. They
differ in the reference of the margin (a model, or none), in dividing by length, and in an SFT
term for the chosen completion.

Shapes: B pairs. chosen, rejected (B,): summed log-probabilities of a completion in nats; ref_*:
under the reference model; *_lengths (B,): tokens."""

from typing import Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

# A further pair loss: its function, its name here, in BETA and in `pair_loss`, and a choice of
# `preference.PreferenceConfig.loss`.
PairLoss = Literal["dpo", "ipo", "cpo", "simpo", "orpo"]
NEEDS_REFERENCE = ("dpo", "ipo", "kto")
BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "cpo": 0.1, "simpo": 2.0, "orpo": 0.1}


class Losses(NamedTuple):
    """losses (B,) with gradient; the implicit rewards (B,), whose difference is the margin,
    without."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
) -> Losses:
    """-log sigmoid(beta [(log pi - log ref)(chosen) - (log pi - log ref)(rejected)]) (DPO,
    arXiv:2305.18290, eq. 7)."""
    good = beta * (chosen - ref_chosen)
    bad = beta * (rejected - ref_rejected)
    return Losses(-F.logsigmoid(good - bad), good.detach(), bad.detach())


def ipo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
) -> Losses:
    """(h - 1 / (2 beta))^2 with h DPO's difference of log-ratios (IPO, arXiv:2310.12036, eq.
    17; its tau is our beta).

    The margin has a target: pairs beyond it are pulled back. h is over sums, as in the paper."""
    good = chosen - ref_chosen
    bad = rejected - ref_rejected
    return Losses((good - bad - 1 / (2 * beta)).square(), beta * good.detach(), beta * bad.detach())


def cpo_loss(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Losses:
    """-log sigmoid(beta [log pi(chosen) - log pi(rejected)]) (CPO, arXiv:2401.08417, eq. 3):
    DPO, uniform reference.

    `pair_loss` adds its behaviour-cloning term, per token where the paper sums over the
    sequence."""
    return Losses(
        -F.logsigmoid(beta * (chosen - rejected)), beta * chosen.detach(), beta * rejected.detach()
    )


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 2.0,
    margin: float = 1.0,
) -> Losses:
    """-log sigmoid(beta / |chosen| log pi(chosen) - beta / |rejected| log pi(rejected) -
    margin) (SimPO, arXiv:2405.14734, eq. 6; its gamma is our margin)."""
    good = beta * chosen / chosen_lengths
    bad = beta * rejected / rejected_lengths
    return Losses(-F.logsigmoid(good - bad - margin), good.detach(), bad.detach())


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> Losses:
    """-beta log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p), p the
    geometric mean of token probabilities (ORPO, arXiv:2403.07691, eq. 4 and 7; its lambda is
    our beta). `pair_loss` adds its SFT term."""
    good = _log_odds(chosen / chosen_lengths)
    bad = _log_odds(rejected / rejected_lengths)
    return Losses(-beta * F.logsigmoid(good - bad), beta * good.detach(), beta * bad.detach())


def _log_odds(mean_logprob: Tensor) -> Tensor:
    """log p - log(1 - p); p is clamped just below 1, where the odds diverge."""
    logp = mean_logprob.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    liked: Tensor,
    kl: Tensor | float,
    beta: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Losses and implicit rewards of completions, both (B,): 1 - sigmoid(beta (r - kl)) if
    liked (B,) bool, else 1 - sigmoid(beta (kl - r)), r = log pi - log ref (KTO,
    arXiv:2402.01306, eq. 8, without lambda_y).

    kl: KTO's z_0, an estimate of KL(policy || reference) from completions of *other* prompts,
    no gradient."""
    reward = logprobs - ref_logprobs
    kl = torch.as_tensor(kl, device=reward.device).detach()
    signed = torch.where(liked, reward - kl, kl - reward)
    return 1 - torch.sigmoid(beta * signed), beta * reward.detach()


def pair_loss(
    kind: PairLoss,
    chosen: Tensor,
    rejected: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
) -> Losses:
    """The loss called `kind`; CPO's and ORPO's with their SFT term, the mean negative
    log-probability per token of the chosen completion."""
    if kind == "dpo" or kind == "ipo":
        assert ref_chosen is not None and ref_rejected is not None, (
            f"{kind} compares with a reference model"
        )
        with_reference = dpo_loss if kind == "dpo" else ipo_loss
        return with_reference(chosen, rejected, ref_chosen, ref_rejected, beta)
    if kind == "simpo":
        return simpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, beta)
    if kind == "cpo":
        result = cpo_loss(chosen, rejected, beta)
    elif kind == "orpo":
        result = orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, beta)
    else:
        assert_never(kind)  # a new name without a loss must not train with another one
    return result._replace(losses=result.losses - chosen / chosen_lengths)
