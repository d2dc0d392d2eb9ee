# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags
#     notebook_metadata_filter: kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Twelve loss functions: the solutions
#
# **Question.** Policy gradients, GRPO, PPO, DPO and its relatives fill papers. How much of each is formula?
#
# **Result.** Twelve functions of one to seven lines. Each is compared with the library, values and gradients on
# six random cases, and all twelve agree. Notebook 17 has the same cells without the bodies: try there first.
#
# **Runs/needs.** No runs and no data. Seconds on one core.
#
# Previous: [17 losses by hand](17_losses_by_hand.ipynb) · Next: [19 sampling and cache](19_sampling_and_cache.ipynb)

# %% tags=["parameters"]
seed = 0

# %%
import torch
import torch.nn.functional as F

from codechat_lab.instruments.loss_exercises import CORRECT, EMPTY, EXERCISES, check

torch.manual_seed(seed)
found = {}
print(f"{len(EXERCISES)} exercises; torch {torch.__version__.split('+')[0]}, log-sigmoid is {F.logsigmoid.__name__}")


# %% [markdown]
# ## 1. The masked mean
#
# A batch of completions has rows of different length; `mask` (B, T) is 1 on their tokens. The mean is over
# all tokens of the batch, with equal weights.

# %%
def masked_mean(x, mask):
    """Scalar: the mean of x (B, T) where mask (B, T) is set."""
    return x[mask].mean()


# %%
found["masked_mean"] = check(masked_mean)


# %% [markdown]
# ## 2. Entropy
#
# $-\sum_i p_i \log p_i$ of every next-token distribution. The logits may be large: take the logarithm before the
# exponential, not after.

# %%
def entropy(logits):
    """(B, T, V) -> (B, T), nats."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


# %%
found["entropy"] = check(entropy)


# %% [markdown]
# ## 3. Advantages within a group
#
# GRPO (arXiv:2402.03300, section 4.1.2), with the standard deviation over $G - 1$:
#
# $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}$$

# %%
def group_advantages(rewards, eps):
    """(P, G) -> (P, G): P problems, G completions each."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + eps)


# %%
found["group_advantages"] = check(group_advantages)


# %% [markdown]
# ## 4. The policy gradient
#
# REINFORCE: the gradient of the expected reward is the mean of $A\,\nabla \log \pi$. An optimizer *minimizes*: mind
# the sign.

# %%
def policy_gradient_loss(logprobs, advantages, mask):
    """Scalar; logprobs and mask (B, T), advantages (B, 1). The mean is over all tokens of the batch."""
    return -(logprobs * advantages)[mask].mean()


# %%
found["policy_gradient_loss"] = check(policy_gradient_loss)


# %% [markdown]
# ## 5. The clipped ratio
#
# PPO (arXiv:1707.06347, eq. 7), per token with $r = \pi / \pi_\text{old}$:
#
# $$-\min\left(r A,\; \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon)\, A\right)$$
#
# Where is the gradient zero: where $r$ is large, or where $r$ is large and $A$ positive?

# %%
def clipped_policy_loss(logprobs, old_logprobs, advantages, clip_eps):
    """(B, T) per token; advantages (B, 1)."""
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    return -torch.minimum(ratio * advantages, clipped * advantages)


# %%
found["clipped_policy_loss"] = check(clipped_policy_loss)


# %% [markdown]
# ## 6. An estimate of the KL divergence
#
# k3 (Schulman): with $r = \pi_\text{ref} / \pi$, $r - 1 - \log r$: never negative, and unbiased.

# %%
def kl_k3(logprobs, ref_logprobs):
    """(B, T) per token that the policy sampled."""
    log_r = ref_logprobs - logprobs
    return log_r.exp() - 1 - log_r


# %%
found["kl_k3"] = check(kl_k3)


# %% [markdown]
# ## 7. Generalised advantages
#
# PPO's credit (arXiv:1506.02438, eq. 16), from the last token backwards:
#
# $$\delta_t = \text{reward}_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma \lambda A_{t+1}$$
#
# After the end $V$ and $A$ are 0.

# %%
def gae(rewards, values, gamma, lam):
    """(B, T) advantages from rewards and values (B, T)."""
    found, after, value_after = [], 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        after = delta + gamma * lam * after
        value_after = values[:, t]
        found.append(after)
    return torch.stack(found[::-1], dim=1)


# %%
found["gae"] = check(gae)


# %% [markdown]
# ## 8. DPO
#
# arXiv:2305.18290, eq. 7, of a chosen text $w$ and a rejected text $l$:
#
# $$-\log \sigma\left(\beta \left[\log \frac{\pi(w)}{\pi_\text{ref}(w)} - \log \frac{\pi(l)}{\pi_\text{ref}(l)}\right]\right)$$
#
# At the reference it is $\log 2$.

# %%
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """(B,): summed log-probabilities in, one loss per pair out."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(beta * margin)


# %%
found["dpo_loss"] = check(dpo_loss)


# %% [markdown]
# ## 9. IPO
#
# arXiv:2310.12036, eq. 17: the squared distance of the same margin to a target, $1 / (2\beta)$.

# %%
def ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """(B,)"""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return (margin - 1 / (2 * beta)) ** 2


# %%
found["ipo_loss"] = check(ipo_loss)


# %% [markdown]
# ## 10. SimPO
#
# arXiv:2405.14734, eq. 6: no reference; log-probabilities per token, times $\beta$, and a margin $\gamma$ that must be
# exceeded:
#
# $$-\log \sigma\left(\frac{\beta}{\lvert w \rvert} \log \pi(w) - \frac{\beta}{\lvert l \rvert} \log \pi(l) - \gamma\right)$$

# %%
def simpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, beta, margin):
    """(B,)"""
    return -F.logsigmoid(beta * (chosen / chosen_lengths - rejected / rejected_lengths) - margin)


# %%
found["simpo_loss"] = check(simpo_loss)


# %% [markdown]
# ## 11. ORPO's odds ratio
#
# arXiv:2403.07691, eq. 4 and 7: with $p$ the geometric mean of a completion's token probabilities and
# $\mathrm{odds} = p / (1 - p)$:
#
# $$-\beta \log \sigma\left(\log \mathrm{odds}(w) - \log \mathrm{odds}(l)\right)$$
#
# (Its SFT term is added elsewhere.)

# %%
def orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, beta):
    """(B,)"""
    logp = chosen / chosen_lengths, rejected / rejected_lengths
    good, bad = (x - torch.log1p(-x.exp()) for x in logp)
    return -beta * F.logsigmoid(good - bad)


# %%
found["orpo_loss"] = check(orpo_loss)


# %% [markdown]
# ## 12. KTO
#
# arXiv:2402.01306, eq. 8: each completion by itself. With $r = \log \pi - \log \pi_\text{ref}$ and a reference point
# $\mathrm{kl}$: $1 - \sigma(\beta (r - \mathrm{kl}))$ where it is liked, $1 - \sigma(\beta (\mathrm{kl} - r))$ where it
# is not.

# %%
def kto_loss(logprobs, ref_logprobs, liked, kl, beta):
    """(B,); liked (B,) bool, kl a number."""
    r = logprobs - ref_logprobs
    return 1 - torch.sigmoid(beta * torch.where(liked, r - kl, kl - r))


# %%
found["kto_loss"] = check(kto_loss)

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | the sign of `policy_gradient_loss` reversed | what does the check say? | <details><summary>outcome</summary>it fails on the first case and says that the sign is reversed</details> |
# | `.detach()` behind the result of `dpo_loss` | the values are correct; does the check pass? | <details><summary>outcome</summary>no: it compares gradients too, and names the input without one</details> |
#
# The last cell asserts the Result.

# %%
assert found == dict.fromkeys(EXERCISES, CORRECT) and EMPTY not in found.values()
