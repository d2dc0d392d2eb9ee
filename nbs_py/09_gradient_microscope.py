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
# # GRPO's gradient is biased, and of six KL terms only k1 in the reward has the right gradient
#
# **Question.** REINFORCE, GRPO, Dr. GRPO, DAPO, GSPO, PPO, expert iteration: which of them follow the
# gradient of the expected reward, how noisy are they, and what does a KL term do in the loss or in the
# reward? Usually the true gradient is unknown. Here it is known.
#
# **Result.** No baseline, leave-one-out, and PPO with exact values are unbiased. GRPO divides by length and by
# the group's standard deviation, which turns the mean gradient (cosine 0.91), and more rollouts do not remove
# this bias. In a single group of eight, noise costs more than bias: cosine 0.79 without bias, 0.77 with it.
#
# | cosine to the true gradient | exact mean | one group |
# |---|---|---|
# | leave-one-out | 1 | 0.79 |
# | a group's mean as baseline (Dr. GRPO) | 1, shorter by $(G - 1) / G$ | |
# | divided by length | 0.94 | |
# | divided by the group's standard deviation | 0.98 | |
# | GRPO: both | 0.91 | 0.77 |
# | PPO with an exact critic | 1 | 0.93 |
# | **KL:** k1 in the loss | no direction: the mean is 0 | |
# | k2, k3 in the loss | 0.94, 0.90 | |
# | k1 in the reward | 1 | |
# | k2, k3 in the reward | 0.36, 0.30 | |
#
# **Runs/needs.** No runs and no data: a world of 31 texts; all groups of three are enumerated. A minute on
# one core.
#
# Previous: [08 did it learn](08_did_it_learn.ipynb) · Next: [10 plan](10_plan.ipynb)

# %% tags=["parameters"]
seed = 0
reference_seed = 3
groups = 4000
group_size = 8

# %%
import inspect

import pandas as pd
import torch

from codechat.rl import advantages, losses
from codechat_lab.instruments import exact_gradients
from codechat_lab.instruments.exact_gradients import ESTIMATORS, World, cosine, expectation, group_gradients
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

# %% [markdown]
# ## A world that can be enumerated
#
# Texts of up to four letters, `a` or `b`; the policy may stop after any of them. The reward is a staircase
# towards `abba`: 0.2 for each correct letter, 1 for the whole word. The policy is a table of logits, one row
# per prefix, so nothing is approximated.

# %%
world = World()
theta, reference = world.policy(seed), world.policy(reference_seed)
truth, p = world.gradient(theta), world.probabilities(theta)
table = pd.DataFrame({"text": world.texts, "p": p, "reward": world.rewards}).set_index("text")
print(inspect.getsource(exact_gradients.staircase))
print(f"{len(world.texts)} texts, {theta.numel()} parameters, expected reward {world.expected_reward(theta):.3f}")
table.sort_values("p", ascending=False).head(6).round(3)

# %% [markdown]
# The gradient is a sum over all texts,
#
# $$\nabla_\theta\, \mathbb{E}[r] = \sum_y p_\theta(y)\, r(y)\, \nabla_\theta \log p_\theta(y).$$
#
# From scratch, and from the library, which differentiates the expected reward itself:

# %%
by_hand = sum(p[s] * world.rewards[s] * world.scores(theta)[s].sum(0) for s in range(len(world.texts)))
torch.testing.assert_close(by_hand, truth)
print(f"length of the true gradient {truth.norm():.4f}")

# %% [markdown]
# ## The estimators
#
# Each turns a group of $G$ texts $y_i$ with rewards $r_i$ and lengths $T_i$ into a direction. At the first update
# after sampling the ratio of new to old policy is 1, so nothing is clipped, and they differ in two choices: the
# advantage $A_i$ and the weight of a token.
#
# | | advantage $A_i$ | weight of a token of text $i$ |
# |---|---|---|
# | no baseline | $r_i$ | $1/G$ |
# | group mean, Dr. GRPO | $r_i - \bar r$ | $1/G$ |
# | leave one out | $r_i - \frac{1}{G-1}\sum_{j \ne i} r_j$ | $1/G$ |
# | GRPO, GSPO | $(r_i - \bar r) / \mathrm{std}(r)$ | $1/(G\,T_i)$ |
# | DAPO | $(r_i - \bar r) / \mathrm{std}(r)$ | $1/\sum_j T_j$ |
# | PPO | $\sum_k (\gamma\lambda)^k \delta_{t+k}$ with a critic, per token | $1/G$ |
# | expert iteration | 1 for the best texts of a group that differs, else 0 | $1/\text{their tokens}$ |
#
# The code that is compared, and the ten settings of it:

# %%
for part in (exact_gradients.group_loss, exact_gradients.gae_loss, exact_gradients.expert_loss):
    print(inspect.getsource(part))
whole = inspect.getsource(exact_gradients)
print(whole[whole.index("ESTIMATORS:") :].partition("\n}\n")[0] + "\n}")

# %% [markdown]
# ## The mean of every estimator
#
# Each estimator is the library's own loss. Its gradient is computed for *every* group of three texts and
# averaged with each group's probability. Nothing is sampled, so any difference from the true gradient is
# bias.

# %%
print(inspect.getsource(exact_gradients.expectation))
means = {name: expectation(world, theta, loss, 3) for name, loss in ESTIMATORS.items()}
exact = pd.DataFrame({name: {"cosine to the truth": cosine(mean, truth), "scale": float(mean @ truth / (truth @ truth))}
                      for name, mean in means.items()}).T
exact.round(3)

# %% [markdown]
# A learning rate absorbs the scale, not the direction. Which of GRPO's two divisions changes it?

# %%
causes = {"neither": ("leave_one_out", "constant"), "std": ("zscore", "constant"), "length": ("leave_one_out", "sequence"), "both": ("zscore", "sequence")}
biased = {name: cosine(expectation(world, theta, exact_gradients.group_loss(baseline=b, aggregation=w), 3), truth)  # type: ignore[arg-type]
        for name, (b, w) in causes.items()}
pd.Series(biased, name="cosine").round(4)


# %% [markdown]
# ## The same rollouts for all estimators
#
# Now as in training: groups are sampled once, and every estimator sees the same ones. `noise` is the distance
# of a single group's gradient from the mean, in units of the mean; `cosine_one` is the cosine of one group's
# gradient with the true one.

# %%
def compare(at, estimators, truth):
    """Each estimator on the same groups `at`: its mean along the truth (1 = the correct size), the rest of the mean, the spread of groups."""
    rows = {}
    for name, loss in estimators.items():
        gradients = group_gradients(world, theta, loss, at)
        mean = gradients.mean(0)
        along, size = float(mean @ truth / (truth @ truth)), max(float(mean.norm()), 1e-30)
        noise = float((gradients - mean).square().sum(1).mean().sqrt()) / size
        one = torch.stack([g @ truth / (g.norm() * truth.norm()).clamp(min=1e-30) for g in gradients]).mean()
        bias = float((mean - along * truth).norm()) / size
        rows[name] = dict(scale=along, bias=bias, noise=noise, cosine=cosine(mean, truth), cosine_one=float(one))
    return pd.DataFrame(rows).T


# %%
at = world.sample(theta, groups, group_size, seed)
rows = compare(at, ESTIMATORS, truth)
rows.round(3)

# %%
title = f"One group of {group_size}: noise dominates, and an exact critic removes 40 % of it"
fig, axes = new_figure(title, cols=2, sharey=True, size=(6.4, 3.2))
order = rows.sort_values("cosine_one").index
for ax, column, name in zip(axes[0], ("cosine_one", "noise"), ("cosine of one group to the truth", "noise / size of the mean")):
    ax.barh(order, rows.loc[order, column], color=OKABE_ITO["blue"])
    finish(ax, x=name, y=None, legend=False)
fig

# %% [markdown]
# More groups in a step average out the noise, and only the noise: an unbiased estimator converges to 1, a
# biased one to its own angle.

# %%
shown = {"leave one out": "green", "grpo": "vermilion", "dapo": "orange", "ppo, exact value": "blue", "expert iteration": "purple"}
sizes = [1, 2, 5, 10, 20, 50, 100, 200, 400]
fig, axes = new_figure("With more groups each estimator converges to its own angle", size=(6.4, 3.2))
for name, colour in shown.items():
    found = group_gradients(world, theta, ESTIMATORS[name], at)
    curve = [sum(cosine(part.mean(0), truth) for part in found[: groups // n * n].view(-1, n, len(truth))) / (groups // n) for n in sizes]
    axes[0, 0].plot(sizes, curve, color=OKABE_ITO[colour], label=name)
    axes[0, 0].axhline(cosine(found.mean(0), truth), color=OKABE_ITO[colour], linestyle=":", linewidth=0.8)
axes[0, 0].set_xscale("log")
finish(axes[0, 0], x="groups in a step (log)", y="cosine to the true gradient")
fig

# %% [markdown]
# ## The KL divergence
#
# With $\Delta = \log \pi - \log \pi_\text{ref}$ of a sampled token, $k_1 = \Delta$, $k_2 = \Delta^2 / 2$ and
# $k_3 = e^{-\Delta} - 1 + \Delta$. As *values*, k1 and k3 are unbiased, and k2 approximately.
# But a loss is differentiated, and a reward is not.

# %%
print(inspect.getsource(losses.kl_estimate))
log_p, log_ref = world.logprobs(theta), world.logprobs(reference)
values = {k: (losses.kl_estimate(log_p, log_ref, k) * world.mask).sum(1) for k in ("k1", "k2", "k3")}
kl_table = pd.DataFrame({k: {"mean": float(p @ v), "spread": float((p @ v.square() - (p @ v) ** 2).sqrt())} for k, v in values.items()}).T
print(f"exact KL divergence {world.kl(theta, reference):.4f} nats")
kl_table.round(4)


# %% [markdown]
# In the reward, the estimate of a whole text is compared with those of the other texts of its group:

# %%
def kl_in_reward(kind):
    def loss(groups, logprobs):
        advantage = advantages.group_advantages(values[kind][groups.at], "leave_one_out").view(-1, 1)
        return -advantage * logprobs / groups.at.shape[1]

    return loss


# %%
kl_truth = world.kl_gradient(theta, reference)
terms = {f"{k} in the loss": exact_gradients.kl_in_loss(k, reference) for k in ("k1", "k2", "k3")}
terms |= {f"{k} in the reward": kl_in_reward(k) for k in ("k1", "k2", "k3")}
kl_means = {name: expectation(world, theta, loss, 2) for name, loss in terms.items()}
kl_exact = pd.DataFrame({name: {"cosine": cosine(mean, kl_truth) * bool(mean.norm() > 1e-9), "size": float(mean.norm() / kl_truth.norm())}
                         for name, mean in kl_means.items()}).T
kl_exact.round(3)

# %%
fig, axes = new_figure("Only k1 in the reward points along the KL divergence", cols=2, sharey=True, size=(6.4, 2.8))
one = compare(at, terms, kl_truth)
for ax, series, name in ((axes[0, 0], kl_exact["cosine"], "cosine of the exact mean"), (axes[0, 1], one["cosine_one"], f"cosine of one group of {group_size}")):
    ax.barh(series.index, series, color=[OKABE_ITO["green" if "reward" in n else "orange"] for n in series.index])
    finish(ax, x=name, y=None, legend=False)
axes[0, 0].invert_yaxis()
fig

# %% [markdown]
# A published run had k1 in its loss for 16.7 hours with a reward of 0 everywhere: the policy moved by about
# 1.5 nats per token. The gradient's mean is zero, its size is not, so the policy does a random walk. The next
# cell checks what k2 and k3 in the loss do follow: the divergence of the *next token* (for k3 reversed), at the
# prefixes that the policy visits.

# %%
visits = torch.bincount(world.states[world.mask], p[:, None].expand_as(world.mask)[world.mask])  # (K,) how often the policy sees each prefix
x = theta.clone().requires_grad_()
policy, other = (torch.distributions.Categorical(logits=logits) for logits in (x, reference))
for name, a, b in (("k2 in the loss", policy, other), ("k3 in the loss", other, policy)):
    (gradient,) = torch.autograd.grad(visits @ torch.distributions.kl_divergence(a, b), x, retain_graph=True)
    torch.testing.assert_close(kl_means[name], gradient.flatten())
walk = group_gradients(world, theta, terms["k1 in the loss"], at).norm(dim=1).mean()
print(f"k1 in the loss: mean {kl_means['k1 in the loss'].norm():.1e}, size of one group's gradient {walk:.2f}, "
      f"of the true one {kl_truth.norm():.2f}")


# %% [markdown]
# ## Three lines of your own
#
# The exact gradient where an answer is a single choice: $p = \mathrm{softmax}(z)$, and $\mathbb{E}[r] = \sum_i p_i r_i$. What is
# $\partial\, \mathbb{E}[r] / \partial z_i$?

# %%
def exact_gradient(p, rewards):
    """p (n,), rewards (n,) -> the gradient at the logits (n,)."""
    raise NotImplementedError("yours to fill in")


# %%
cases = []
for logits, paid in (([0.0, 0.0], [1.0, 0.0]), ([2.0, -1.0, 0.5], [0.2, 1.0, 0.0]), ([1.0, 1.0], [1.0, 1.0])):
    z, r = torch.tensor(logits, requires_grad=True), torch.tensor(paid)
    (right,) = torch.autograd.grad((z.softmax(-1) * r).sum(), z)
    cases.append(((z.softmax(-1).detach(), r), right))
check_cases(exact_gradient, *cases)

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `"leave_one_out"` to `"mean"` in `causes["neither"]` | is a group's mean as baseline biased? | <details><summary>outcome</summary>not in direction: the cosine stays 1, to all digits shown, because the mean only shortens the gradient, to 2/3 in groups of three</details> |
# | `sizes = [1, 1000]` in the figure of many groups | which of leave-one-out and GRPO wins with 1,000 groups in a step? | <details><summary>outcome</summary>leave-one-out, with a cosine of 0.9997: it has averaged its noise away. GRPO has 0.916 and stays at its dotted line, the angle of its bias</details> |
#
# The last cell asserts the Result.

# %%
cosines, scales = exact["cosine to the truth"], exact["scale"]
assert all(cosines[n] > 1 - 1e-9 for n in ("no baseline", "leave one out", "group mean", "dr_grpo", "ppo, exact value"))
assert abs(scales["dr_grpo"] - 2 / 3) < 1e-9 and abs(scales["leave one out"] - 1) < 1e-9
assert 0.90 < cosines["grpo"] < 0.91 and 0.93 < biased["length"] < 0.94 and 0.97 < biased["std"] < 0.985
assert [round(rows.loc[n, "cosine_one"], 2) for n in ("leave one out", "grpo", "ppo, exact value")] == [0.79, 0.77, 0.93]
assert rows.loc["ppo, exact value", "noise"] < 0.6 * rows.loc["leave one out", "noise"]
kl_cosine = kl_exact["cosine"]
assert kl_cosine["k1 in the reward"] > 1 - 1e-9 and kl_exact["size"]["k1 in the loss"] < 1e-9 < walk
assert 0.93 < kl_cosine["k2 in the loss"] < 0.94 and 0.90 < kl_cosine["k3 in the loss"] < 0.91
assert one.loc["k1 in the reward", "cosine_one"] < one.loc["k2 in the loss", "cosine_one"]
assert 0.29 < kl_cosine["k3 in the reward"] < kl_cosine["k2 in the reward"] < 0.36
