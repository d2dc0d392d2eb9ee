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
# # Write twelve loss functions yourself
#
# **Question.** Policy gradients, GRPO, PPO, DPO and its relatives fill papers. How much of each is formula?
#
# **Result.** The algorithms differ in twelve functions of one to seven lines. Each cell below has a function
# without a body; the cell after it compares your function with the library, values and gradients on six random
# cases, and reports the first difference. As committed all twelve are empty; the solutions are in notebook 18.
#
# **Runs/needs.** No runs and no data. Seconds on one core.
#
# Previous: [16 preference losses](16_preference_losses.ipynb) · Next: [18 losses solved](18_losses_solved.ipynb)

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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


# %%
found["clipped_policy_loss"] = check(clipped_policy_loss)


# %% [markdown]
# ## 6. An estimate of the KL divergence
#
# k3 (Schulman): with $r = \pi_\text{ref} / \pi$, $r - 1 - \log r$: never negative, and unbiased.

# %%
def kl_k3(logprobs, ref_logprobs):
    """(B, T) per token that the policy sampled."""
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


# %%
found["dpo_loss"] = check(dpo_loss)


# %% [markdown]
# ## 9. IPO
#
# arXiv:2310.12036, eq. 17: the squared distance of the same margin to a target, $1 / (2\beta)$.

# %%
def ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """(B,)"""
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


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
    raise NotImplementedError("yours to fill in")


# %%
found["kto_loss"] = check(kto_loss)

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | fill `masked_mean` with the mean of the rows' means | is it the mean over all tokens? | <details><summary>outcome</summary>no: rows of different length get equal weights, and the check prints the first case that differs</details> |
# | fill `entropy` with `-(p * p.log()).sum(-1)` of a softmax `p` | where does it go wrong? | <details><summary>outcome</summary>where a logit is so large that a probability rounds to 0: 0 times minus infinity is no number</details> |
#
# ## How far are you?

# %%
done = [name for name, said in found.items() if said == CORRECT]
print(f"{len(done)} of {len(EXERCISES)} correct: {', '.join(done) or 'none yet'}")
assert found.keys() == EXERCISES.keys() and set(found.values()) <= {CORRECT, EMPTY}
