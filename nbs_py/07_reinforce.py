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
# # REINFORCE: which tokens its gradient reaches, and what shows it during a run
#
# **Question.** A reward is one number for a whole completion. Which tokens does its gradient reach, and which
# metrics show during a run that it does?
#
# **Result.** The prompt gets no gradient, and neither does a group whose rewards are all equal; in a correct
# call of a toy policy, the half of the tokens that it is sure of gets 2 % of the gradient. In the real run half
# of the groups have a gradient, yet answers to held-out problems do not improve: exact match 0.87, then 0.84,
# one seed. SFT had taught this already.
#
# **Also.** The learning rate matters more than group size and temperature, and the share of groups with
# variance is no guide to any of them. The loss by hand equals the library's.
#
# **Runs/needs.** Recipe nano's `diagnose` and `rl` (frozen rows; `source="nano"` reads the runs that `make lab` made on
# this machine); committed rows of 33 short runs at several rates. A model of toy size is trained here for some seconds on one core. The same loop in 40 lines, while
# you watch: [RL in two minutes](00_rl_in_two_minutes.ipynb).
#
# Previous: [06 reward staircase](06_reward_staircase.ipynb) · Next: [08 did it learn](08_did_it_learn.ipynb)

# %% tags=["parameters"]
source = "frozen"
seed = 0
toy_steps = 60

# %%
import inspect

import pandas as pd
import torch
from IPython.display import HTML

from codechat import reinforce
from codechat.core.atomic_files import read_rows
from codechat.data import conversations
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.generate import Completion
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses, rollout
from codechat.tasks import load
from codechat.text import chat, tokenizer
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.instruments.token_attribution import gradient_share, xray_values
from codechat_lab.reports import dense_rewards, plots, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, first_and_last, new_figure, outer_legend
from codechat_lab.tasks.toolbox import dialogues, problems

torch.set_num_threads(1)  # a second thread only slows a model this small

# %%
metrics, evals, samples = (run_frames.stage_rows(source, "rl", table) for table in ("metrics", "evals", "samples"))
run, settings, task = metrics["run"].iloc[0], run_frames.settings(source, "rl"), load("funcall")
tok = tokenizer.load(run_frames.manifest(source, "corpus")["tokenizer"])

# %% [markdown]
# ## The real run in numbers
#
# Before and after are evaluations of the same validation problems; the rest is over all steps.

# %%
start, end = evals.iloc[0], evals.iloc[-1]
broken = {"no call, or a broken one": lambda row: row["tier/no_tag"] + row["tier/bad_json"]}
asked_twice = {"mean reward": lambda row: row["reward_mean"], "exact match": lambda row: row["exact_match"], **broken}
display(pd.DataFrame({name: {"before": f"{of(start):.2f}", "after": f"{of(end):.2f}"} for name, of in asked_twice.items()}).T)
pd.Series({
    "validation problems": f"{end['n_problems']:.0f}",
    "groups with a gradient, mean": f"{1 - metrics['frac_zero_std_groups'].mean():.0%}",
    "weights that a step changes in bfloat16, median": f"{metrics['weights_changed_bf16'].median():.0%}",
    "largest difference between sampler and trainer, nats": f"{metrics['logprob_mismatch'].max():.1e}",
}, name=run).to_frame()

# %% [markdown]
# ## A group, by hand
#
# One request and five typical answers: a correct call, a wrong value, another function, truncated JSON, and
# prose. The task's staircase scores them, the same function that evaluation uses. The advantage is the reward
# minus the mean of the group: it tells which answers were better than average *for this request*.

# %%
found = (p for p in problems.draw("train", 100, seed, shares={"call": 1}) if len(p.gold["arguments"]) == 2)
problem = min(found, key=lambda p: len(p.messages[0]["content"]))
name, arguments = problem.gold["name"], problem.gold["arguments"]
key, gold = list(arguments)[-1], task.gold(problem)
answers = [gold, chat.format_call(name, {**arguments, key: "?"}), chat.format_call("greet", arguments),
           gold[:-3], "I have no function for that."]
scores = [task.score(problem, answer) for answer in answers]
rewards = torch.tensor([[score.reward for score in scores]])  # (1, G)
advantage = advantages.group_advantages(rewards, "mean")
table = {"reward": rewards[0], "advantage": advantage[0].round(decimals=3), "answer": answers}
print(problem.messages[-1]["content"])
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(table, index=[score.tier for score in scores]))

# %% [markdown]
# As tokens: every token of an answer has the answer's advantage, whether or not it contributed. The prompt
# has none. (Blue becomes more likely, orange less.)

# %%
prompt = chat.prompt(problem.messages, tok)
ids, values, roles = list(prompt), [0.0] * len(prompt), ["prompt"] * len(prompt)
completions = [chat.completion_ids(answer, tok) for answer in answers]
for score, completion, a in zip(scores, completions, advantage[0].tolist()):
    ids += completion
    values += [a] * len(completion)
    roles += [score.tier] * len(completion)
HTML(xray_values(ids, values, tok, "advantage", roles).html())

# %% [markdown]
# If all five were correct, or all five wrong, nothing would be coloured: a group with equal rewards has no
# advantage and no gradient, with any baseline.

# %%
three = torch.stack([rewards[0], torch.ones(5), torch.full((5,), 0.35)])
kinds = ("mean", "leave_one_out", "zscore")
baselines = {kind: advantages.group_advantages(three, kind) for kind in kinds}
print(inspect.getsource(advantages.group_advantages))
shown = {kind: [" ".join(f"{a:+.2f}" for a in row) for row in found] for kind, found in baselines.items()}
pd.DataFrame(shown, ["the group above", "all correct", "all wrong"])

# %% [markdown]
# ## A toy policy
#
# To show where the gradient goes, a policy must have learned something, but not everything. This one is
# trained for seconds on conversations of the toolbox: it knows the form of a call, and not yet its contents.

# %%
shape = GPTConfig(depth=2, n_embd=96, n_head=3, block_size=512, vocab_size=tok.n_vocab)
policy, calls = GPT(shape, seed=seed), dialogues.draw("train", 400, seed)
examples = {"calls": [conversations.encode(row, tok, "reserved", 512) for row in calls]}
loader = conversations.PackedLoader(examples, None, batch=4, T=512, seed=seed)
optimizers = optim.build(policy, lr=1e-2, optimizer="muon", weight_decay=0.0)
for step in range(toy_steps):
    batch = loader.next()
    where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs))
    loss = policy.loss(batch.ids, batch.targets, **where)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.2f} nats per supervised token after {toy_steps} steps")

# %% [markdown]
# ## The loss, from scratch
#
# The gradient of the expected reward is the mean of $A\,\nabla\log\pi$ over the samples. So: run every completion
# after its prompt, take the log-probability of each of its tokens, multiply by the advantage, add up, divide
# by the number $N$ of completion tokens of the *whole* step, and negate:
#
# $$L = -\frac{1}{N} \sum_i A_i \sum_t \log \pi(y_{i,t} \mid x, y_{i,<t}), \qquad A_i = r_i - \frac{1}{G} \sum_j r_j$$
# A group with equal rewards adds its tokens to the denominator only.

# %%
both = advantages.group_advantages(three[:2], "mean")  # (2, G): the group above, and one with equal rewards
total, count = torch.zeros(()), 2 * sum(map(len, completions))
for row in both:
    for completion, a in zip(completions, row):
        sequence = torch.tensor([prompt + completion])
        logprobs = policy(sequence[:, :-1])[..., : shape.n_ids].log_softmax(-1)  # (1, T - 1, V)
        taken = logprobs.gather(-1, sequence[:, 1:, None])[0, len(prompt) - 1 :, 0]  # (C,)
        total = total + a * taken.sum()
by_hand = -total / count
by_hand_grad = torch.autograd.grad(by_hand, policy.wte.weight)[0]

# %% [markdown]
# The library packs a group as one prompt with five branches, skips what has no advantage, and sums over
# rows. Loss and gradient must be the same.

# %%
made = [Completion(completion, [0.0] * len(completion), "stop") for completion in completions] * 2
step = rollout.RolloutBatch([problem] * 2, [prompt] * 2, made, answers * 2, scores * 2, 5)
library = torch.zeros(())
for packed in rollout.pack(step, both != 0, row_tokens=512, rows=8):
    logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, **packed.where())
    advantage_of, mask = both.view(-1, 1)[packed.numbers], packed.mask()
    library = library + losses.policy_gradient_loss(packed.unpack(logprobs), advantage_of, mask, count=step.n_tokens)
torch.testing.assert_close(by_hand, library, rtol=1e-4, atol=1e-7)
grad = torch.autograd.grad(library, policy.wte.weight)[0]
torch.testing.assert_close(by_hand_grad, grad, rtol=1e-3, atol=1e-6)
print(inspect.getsource(losses.policy_gradient_loss))
print(inspect.getsource(reinforce.train))
print(f"by hand {by_hand.item():.6f}, library {library.item():.6f}, from {int(mask.sum())} of {count} tokens")

# %% [markdown]
# ## Where the gradient goes
#
# The gradient at a token's logits $z$ is $\partial \log \pi(y) / \partial z = e_y - \pi$, times $A$: near zero where
# the policy is already sure, largest where it sampled an unlikely token. So in a correct call, the constant frame should get almost none of it,
# and the name and the values almost all. Each token's share, for the correct answer:

# %%
right = prompt + completions[0]
weights = [0.0] * len(prompt) + [float(advantage[0, 0])] * len(completions[0])
shares = gradient_share(policy, right, weights, policy=True)
where = ["prompt"] * len(prompt) + ["completion"] * len(completions[0])
HTML(xray_values(right, shares, tok, "gradient", where).html())

# %%
with torch.no_grad():
    sequence = torch.tensor([right])
    chance, _ = policy.token_logprobs(sequence[:, :-1], sequence[:, 1:])
tokens = pd.DataFrame({"token": [chat.decode([i], tok) for i in completions[0]],
                       "p": chance.exp()[0, len(prompt) - 1 :], "share": shares[len(prompt) :]})
sure = tokens["p"] > 0.9
sure_share = tokens["share"][sure].sum()
title = f"{sure.mean():.0%} of the tokens are sure (p > 0.9) and get {sure_share:.0%} of the gradient"
fig, axes = new_figure(title, size=(6.4, 2.8))
ax = axes[0, 0]
ax.bar(range(len(tokens)), tokens["share"], color=[OKABE_ITO["sky" if s else "vermilion"] for s in sure])
ax.set_xticks(range(len(tokens)), [repr(t)[1:-1] for t in tokens["token"]], rotation=70, fontsize=7)
finish(ax, x="tokens of the correct answer (blue: p > 0.9)", y="share of the gradient")
fig

# %% [markdown]
# The reward does not name the wrong token. The policy's own uncertainty does most of the credit assignment;
# the rest averages out over many groups.
#
# ## The real run: is there a gradient to begin with?
#
# Before RL starts, `diagnose` samples groups of training problems. With the verdict DEAD, training does not
# start.

# %%
row = run_frames.stage_rows(source, "diagnose", "evals").iloc[-1]
print(f"{row['verdict']}: {row['remedy']}")
n, N = int(row["n_samples"]), int(row["n_problems"])
print(f"{row['effective_groups']:.0f} of {N} groups have variance; mean reward {row['reward_mean']:.2f}")
print(f"pass@1 {row['pass@1']:.2f}, pass@{n} {row[f'pass@{n}']:.2f} (n={n}, N={N}, "
      f"temperature {row['temperature']:g}, training problems)")

# %% [markdown]
# ## Reward, exact match, tiers
#
# RL optimizes the shaped reward; exact match is the goal. A reward that rises alone would indicate a loophole.
# The curve shows rollouts: each step has other problems, some without a call, so noise exceeds the trend. The
# points are always the same held-out problems (`select`, the validation split): only these compare, as in the
# first table.

# %%
title = f"On the same problems, one seed: exact match {start['exact_match']:.2f}, then {end['exact_match']:.2f}"
fig = plots.rl_progress(run, metrics, evals, title)
fig.set_size_inches(6.4, 2.4)
fig

# %%
in_rollouts = broken["no call, or a broken one"](metrics)
title = f"No call, or a broken one: {in_rollouts[:6].mean():.0%} of training rollouts, then {in_rollouts[-6:].mean():.0%}"
tier_shares = pd.DataFrame({tier: metrics.get(f"tier/{tier}", 0.0) for tier in task.tiers}).fillna(0.0)
smooth = tier_shares.ewm(span=6).mean()
fig, axes = new_figure(title, size=(6.4, 2.4))
axes[0, 0].stackplot(metrics["step"], *smooth.to_numpy().T, labels=task.tiers, colors=plots.tier_colours(len(task.tiers)), linewidth=0)
axes[0, 0].set(ylim=(0, 1), xlim=(metrics["step"].min(), metrics["step"].max()))
finish(axes[0, 0], x="step", y="rollouts (share), smoothed", legend=False)
outer_legend(fig, axes[0, 0], "outside right center", reverse=True)
fig

# %% [markdown]
# ## Does it still learn?
#
# A group with equal rewards has no gradient, and the surer the policy, the more such groups there are. Here their share
# rises although the answers get no better. Above the dashed lines there is enough signal. The right panel shows how many weights a step
# changes after rounding to bfloat16, the precision in which large models are served; a learning rate that is
# too small would show as zero.

# %%
fig = plots.group_signal(run, metrics)
fig.set_size_inches(6.4, 2.7)
fig

# %% [markdown]
# In numbers. Sampler and trainer must agree on log-probabilities: `logprob_mismatch` is their largest difference over all
# tokens of a step. In float32 it is below 0.001. In bfloat16 rounding moves unlikely tokens by tenths of a nat, sometimes
# more, and likely ones hardly. A trainer with another context would differ by nats in every step, so the median separates
# the two. Entropy falls as rewarded answers become more likely; at zero all samples are equal. Here it rises, as does the
# share of answers cut at the limit.

# %%
names = ["reward_mean", "exact_match", "tier/no_tag", "tier/bad_json", "frac_zero_std_groups", "adv_abs_mean",
         "entropy", "completion_tokens_mean", "truncated_frac", "logprob_mismatch", "weights_changed_bf16"]
change = pd.DataFrame([first_and_last(metrics, y) for y in names], names, ["first tenth", "last tenth"])
per_step = f"{settings['device_batch_size']} groups x {settings['group_size']} completions"
print(f"{len(metrics)} steps of {per_step}, temperature {settings['temperature']:g}, lr {settings['lr']:g}")
change.rename({"tier/no_tag": "no call (share)", "tier/bad_json": "unreadable call (share)", "frac_zero_std_groups": "groups without variance (share)",
               "adv_abs_mean": "mean absolute advantage", "completion_tokens_mean": "tokens of a completion", "truncated_frac": "cut at the limit (share)",
               "reward_mean": "mean reward", "exact_match": "exact match", "weights_changed_bf16": "weights changed in bfloat16 (share)"}).map("{:.3g}".format)

# %% [markdown]
# The samples behind the numbers: the best and the worst completion of some groups, early and late. If both
# are in the same tier, the group carries no signal.

# %%
ends = samples[samples["step"].isin([samples["step"].min(), samples["step"].max()])].astype({"step": int})
with pd.option_context("display.max_colwidth", None):
    display(ends.set_index(["step", "which"])[["reward", "tier", "request", "completion"]])

# %% [markdown]
# ## Learning rate, group size, temperature
#
# Can the share of groups with variance choose them before training? A two-layer model is trained on calls of eight tools and stopped early. Then
# REINFORCE with a binary reward, always with 48 completions an update, so groups of $G$ use $48 / G$ requests; three seeds each
# (`python tools/reward_rows.py rates`). Exact match is measured at temperature 1, with 95 % intervals over seeds and problems;
# the difference is to learning rate 0.001, $G = 8$, $T = 1$, paired by seed and problem. Larger groups have variance more often:
# **do these policies end higher?**

# %%
choices, reference = {}, (1e-3, 8, 1.0)
for one in read_rows(run_frames.frozen_dir() / "rates.jsonl"):
    choices.setdefault((one["lr"], one["group_size"], one["temperature"]), []).append(one)
ends_at = {cell: dense_rewards.score(runs, "after", "pass@1") for cell, runs in choices.items()}
beyond = {cell: dense_rewards.gain(runs, choices[reference]) for cell, runs in choices.items()}
live_groups = {cell: dense_rewards.live_share(runs) for cell, runs in choices.items()}
begun = dense_rewards.score(choices[reference], "before", "pass@1")
rates = pd.DataFrame({cell: {"exact match": f"{ends_at[cell]}", "difference": "–" if cell == reference else f"{beyond[cell]}",
                             "groups with variance": f"{live_groups[cell]:.2f}"} for cell in sorted(choices, key=lambda cell: -ends_at[cell].value)}).T
print(f"start: {begun}")
rates.rename_axis(["learning rate", "G", "T"])

# %%
fig, axes = new_figure("Too high a rate loses everything; groups with variance decide nothing", cols=2, sharey=True)
lrs, sizes = (sorted({cell[i] for cell in choices}) for i in range(2))
for shift, size, colour in zip((-0.1, 0, 0.1), sizes, ("green", "purple", "sky")):
    column = [ends_at[lr, size, 1.0] for lr in lrs]
    error = [[e.value - e.lo for e in column], [e.hi - e.value for e in column]]
    axes[0, 0].errorbar([i + shift for i in range(3)], [e.value for e in column], error, fmt="o", color=OKABE_ITO[colour], label=f"G = {size}", capsize=2.5)
axes[0, 0].set_xticks(range(3), [f"{lr:g}" for lr in lrs])
for lr, colour in zip(lrs, ("blue", "orange", "vermilion")):
    drawn = [cell for cell in choices if cell[0] == lr]
    axes[0, 1].plot([live_groups[cell] for cell in drawn], [ends_at[cell].value for cell in drawn], "o", color=OKABE_ITO[colour], label=f"learning rate {lr:g}")
for ax, label in zip(axes[0], ("learning rate (T = 1)", "groups with variance, all updates")):
    ax.axhline(begun.value, color="black", linestyle="--", linewidth=0.9, label="start")
    finish(ax, x=label, y="exact match after RL" if ax is axes[0, 0] else None)
fig


# %% [markdown]
# The learning rate decides: at 0.005 exact match falls from 0.32 to below 0.01 with every group size. At 0.001 groups of 24 end 5 points lower than
# groups of 8 (the interval just excludes 0) although more of them carry a gradient: they come from fewer requests. Sampling at temperature 0.5 costs
# 10 points. So: raise the rate in short runs until exact match falls, then take a fifth of it. Keep temperature 1. Of two group sizes with enough
# groups, take the one with more requests an update. The same metrics in a run that failed: [notebook 28](28_read_a_failed_run.ipynb).

# %% [markdown]
# ## Three lines of your own
#
# The other baseline: each reward minus the mean of the *other* rewards of its group.

# %%
def leave_one_out(rewards):
    """rewards (G,) -> advantages (G,)."""
    raise NotImplementedError("yours to fill in")


# %%
check_cases(leave_one_out, *(((row,), advantages.group_advantages(row[None], "leave_one_out")[0]) for row in three))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `toy_steps = 1` | what share of the gradient do the tokens get that the policy is sure of? | <details><summary>outcome</summary>it is sure of none: after one step no token of the answer is likelier than 0.002, and the gradient is spread over all 31, at most 4 % each (the last cell fails there)</details> |
# | `"mean"` to `"none"` in `advantages.group_advantages(rewards, "mean")` | all rewards are positive or 0: which answers are still pushed down? | <details><summary>outcome</summary>none: the advantages are the rewards 1, 0.78, 0.20 and 0.15, and prose has 0; only the competition for probability pushes worse answers down</details> |
#
# The last cell asserts the Result, which is that of the frozen rows; runs of your own need not have it.

# %%
assert not any(values[: len(prompt)]) and all((found[1:] == 0).all() for found in baselines.values())
assert sum(shares[: len(prompt)]) == 0 and sure.mean() > 0.3 and sure_share < 0.1
gained = end["exact_match"] - start["exact_match"]
print(f"exact match on validation problems changed by {gained:+.3f}")
assert abs(gained) < 0.06 or source != "frozen"
assert row["verdict"] in ("LIVE", "WEAK") and metrics["dead_steps"].max() < 20
assert metrics["frac_zero_std_groups"].mean() < 0.75 or source != "frozen"
assert 0.01 < metrics["weights_changed_bf16"].median() < 0.9
assert metrics["logprob_mismatch"].median() < 0.5

# %%
assert len(choices) == 11 and round(begun.value, 2) == 0.32 and all(ends_at[5e-3, G, 1.0].value < 0.01 for G in sizes)
half, large = beyond[1e-3, 8, 0.5], beyond[1e-3, 24, 1.0]
assert round(half.value, 2) == -0.10 and half.hi < 0 and round(large.value, 2) == -0.05 and -0.01 < large.hi < 0
assert live_groups[1e-3, 24, 1.0] > live_groups[reference]
