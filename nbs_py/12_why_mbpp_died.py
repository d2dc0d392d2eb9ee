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
# # Why RL on MBPP failed: no reward, and a KL term that drifted
#
# **Question.** An 8B model was trained by GRPO on MBPP for 415 steps and 16.7 hours. Its reward was 0.000 at
# every printed step. Why, why did nothing report it, and what moved the policy?
#
# **Result.** A small SFT model also solves none of 64 MBPP problems in eight attempts each, so with a binary
# reward no group has a gradient; `diagnose` reports DEAD before the first step. The KL term moved the policy:
# without any reward, k1 in the loss drifts, while k2 and k3 in the loss and k1 in the reward change no weight.
# The 8B was not run again.
#
# **Also.** SmolLM2, a pretrained base, writes Python on the same problems in half of its answers, and after SFT
# on calls in most. Then 24 of 512 are correct, and `diagnose` reports LIVE with tiers, WEAK by pass@1 (RL on it
# is in [notebook 35](35_what_a_pretrained_base_buys.ipynb)). On Qwen2.5-Coder-0.5B, which programs, it reports LIVE by both.
#
# | | measured here |
# |---|---|
# | pass@1 on 64 problems (n=8, temperature 1, 95 % interval) | 0.000 [0.000, 0.057] |
# | completions that are Python | 6 of 512 |
# | groups with variance: binary, tiered reward | 0 and 6 of 64: DEAD and WEAK |
# | groups of four with a gradient, of all 4,480 that the completions form | 0, and 210 (5 %) |
# | MBPP's reference programs that pass after the original's stop rule | 349 of 374 |
# | drift of a toy policy in 60 steps of k1 in the loss, reward 0 | 0.12 nats per token, and with ten times the weight as well |
# | a sentinel ends such a run after | 20 steps, 48 minutes at the published pace |
#
# **Runs/needs.** Committed rows of one `codechat passk` run on 64 MBPP problems (`reports/frozen/mbpp`), by a model of an older recipe (commit 19387a6); six published rows (`reports/published`). A toy policy takes some seconds on one core.
#
# Previous: [11 code rewards](11_code_rewards.ipynb) · Next: [13 where code rl lives](13_where_code_rl_lives.ipynb)

# %% tags=["parameters"]
run = ""
mbpp = ""
kl_steps = 60
seed = 0

# %%
from itertools import combinations

import pandas as pd
import torch

from codechat import tasks
from codechat.core.atomic_files import read_rows
from codechat.evaluation import diagnose
from codechat.evaluation.intervals import bootstrap_interval, wilson_interval
from codechat.models import generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import losses
from codechat.rl.advantages import group_advantages, zero_variance
from codechat.runs.paths import ROOT, find_run
from codechat.text import tokenizer
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.reports import plots, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure, outer_legend
from codechat_lab.tasks.coding.rewards import TIERS, tiered

# %%
gpt2, kept = tokenizer.load("gpt2"), run_frames.frozen_dir() / "mbpp"
BLUE, ORANGE, GREEN, RED = (OKABE_ITO[c] for c in ("blue", "orange", "green", "vermilion"))

# %% [markdown]
# ## What was published
#
# All rows that the run printed (8B on eight A800; **published, not measured here**). The reward is 0
# and the loss is not. With equal rewards every advantage is 0, so only the KL term of the loss is left:
# coefficient 0.02 times nats per token.

# %%
published = pd.read_csv(ROOT / "reports" / "published" / "mbpp_rl.csv")
nats = published["loss"] / 0.02
fig, axes = new_figure(f"Published: reward 0.000, {nats.min():.1f} to {nats.max():.1f} nats per token", cols=2, size=(6.4, 2.5))
panels = ((published["reward_mean"], "mean reward", BLUE, 1), (nats, "loss / 0.02, nats per token", RED, 2))
for ax, (values, name, colour, top) in zip(axes[0], panels):
    ax.plot(published["step"], values, "o-", markersize=4, color=colour)
    ax.set_ylim(-0.03 * top, top)
    finish(ax, x="step", y=name)
fig

# %% [markdown]
# ## Cause one: nothing to reward
#
# The same test on a model that trains in minutes (2.6 M parameters, fine-tuned on calls and code): eight
# completions for each of 64 MBPP problems. The rows come from
#
#     codechat passk --run-name nano/mbpp --ckpt nano/sft --task mbpp --data-dir MBPP --split train \
#         --limit 64 --max-new-tokens 128
#
# with the recipe of commit 19387a6, and frozen by this notebook with
# `run="nano/mbpp"` and `mbpp="MBPP"` (a folder with MBPP's files in the hub's columns, or "hub"). The rows
# hold ids, tiers, rewards and three completions, and no problem texts.

# %%
STOP = set(gpt2.encode("<|end|>"))


def cut(code):
    """A completion as the original's sampler would have left it: ended at the first token, from the fifth on, that is in the set of pieces of <|end|>."""
    ids = gpt2.encode(code)
    return gpt2.decode(ids[: next((i for i, token in enumerate(ids) if i >= 4 and token in STOP), len(ids))])


# %%
if mbpp:  # freeze again: rates and samples of the run, and what becomes of the reference programs
    frames, task = run_frames.collect([run]), tasks.load("mbpp", source=mbpp)
    frames["runs"] = frames["runs"].drop(columns="config")  # it names a folder of this machine
    frames["samples"] = frames["samples"].groupby("tier").head(2).head(3)[["run", "problem", "reward", "tier", "completion"]]
    frames["per_problem"] = pd.DataFrame(read_rows(find_run(run) / "per_problem.jsonl")).assign(run=run)
    problems = task.problems("train")
    whole, left = ([s.tier for s in tasks.score_all(task, problems, [change(p.gold["code"]) for p in problems])] for change in (str, cut))
    frames["references"] = pd.DataFrame({"run": run, "id": [p.id for p in problems], "whole": whole, "cut": left})
    run_frames.freeze(frames, kept)
frames = run_frames.load_frozen(kept)
rates, row, references = frames["per_problem"], frames["evals"].iloc[-1], frames["references"]

# %%
tries = int(row["n_problems"] * row["n_samples"])
shares = [row[f"tier/{tier}"] for tier in TIERS]
fig, axes = new_figure(f"Of {tries} completions none is correct, {row['parseable_frac'] * tries:.0f} are Python")
bars = axes[0, 0].barh(TIERS, shares, color=plots.tier_colours(len(TIERS)))
axes[0, 0].bar_label(bars, fmt="{:.1%}", padding=3, fontsize=8)
axes[0, 0].set_xlim(0, 1)
finish(axes[0, 0], x=f"completions (share), temperature {row['temperature']:g}", y=None, legend=False)
fig

# %%
with pd.option_context("display.max_colwidth", 300):
    display(frames["samples"][["problem", "tier", "reward", "completion"]].set_index("problem"))


# %% [markdown]
# ## The same completions, two rewards
#
# The binary reward is 0 for all of them. The tiered reward pays for valid Python, more for programs that run. In
# the figure a column is a group of completions: rewards differ only where one of them is Python.

# %%
def rewards_of(problem):
    """Tiered rewards of a problem's completions, from its counts (none of these passed a test)."""
    return [tiered(t, 0, 1) for t in TIERS for _ in range(problem["tiers"].get(t, 0))]


staircase = torch.tensor([rewards_of(problem) for _, problem in rates.iterrows()])  # (P, G)
correct = torch.tensor([[i >= p["n"] - p["c"] for i in range(p["n"])] for _, p in rates.iterrows()])
both = {"binary": correct.float(), "tiered": staircase}
verdicts = {name: diagnose.judge(rewards, correct) for name, rewards in both.items()}
told = {name: {k: getattr(v, k) for k in ("verdict", "effective_groups", "n_groups", "reward_mean", "remedy")} for name, v in verdicts.items()}
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(told))

# %%
live = {name: v.effective_groups for name, v in verdicts.items()}
fig, axes = new_figure(f"Of {len(rates)} groups, {live['binary']} have variance under the binary reward, {live['tiered']} under tiers", size=(6.4, 3.0))
palette = {"empty": "#d9d9d9", "unparseable": OKABE_ITO["sky"], "raises": RED}
worth = {"empty": "0", "unparseable": "0", "raises": "0.05"}
ordered = sorted(rates["tiers"], key=lambda tiers: (tiers.get("raises", 0), tiers.get("unparseable", 0)))
below = torch.zeros(len(ordered))
for tier, colour in palette.items():
    heights = torch.tensor([tiers.get(tier, 0) for tiers in ordered])
    axes[0, 0].bar(range(len(ordered)), heights, 0.9, bottom=below, color=colour, label=f"{tier} (reward {worth[tier]})")
    below = below + heights
finish(axes[0, 0], x="group (problem)", y="completions", legend=False)
outer_legend(fig, axes[0, 0], "outside lower center", ncols=3)
fig

# %% [markdown]
# ## The same problems for a pretrained base
#
# SmolLM2-135M-Instruct, untuned and after SFT on calls (`released/smollm2-tools`), asked like nano above: the same 64 problems, eight completions of at most
# 128 tokens, temperature 1. Before SFT it explains at length, and four fifths of its answers are cut off (at 128 tokens): MBPP is nearly as dead as for nano, though not
# for tiers. After SFT on calls and code it answers with a function.
#
# Qwen2.5-Coder-0.5B-Instruct (0.5 B) solves a fifth of its tries untuned, and half of the problems in one of eight. Its SFT on calls (`released/coder-tools`) read its own right
# answers to MBPP's training problems, these 64 too. So on this base RL on MBPP has a gradient from the first step.

# %%
NAMES = {"smollm2": "SmolLM2 untuned", "released/smollm2-tools": "SmolLM2 after SFT", "qwen-coder": "0.5 B untuned", "released/coder-tools": "0.5 B after SFT"}
pretrained = frames["pretrained"].groupby("checkpoint")
asked = {"nano": rates} | {name: pretrained.get_group(checkpoint) for checkpoint, name in NAMES.items()}
beside = {}
for name, part in asked.items():
    python = 1 - sum(tiers.get("empty", 0) + tiers.get("unparseable", 0) for tiers in part["tiers"]) / part["n"].sum()
    beside[name] = {"pass@1": str(bootstrap_interval(part["c"] / part["n"], seed=seed)), "solved by one of eight": int((part["c"] > 0).sum()), "Python": f"{python:.1%}",
                    "groups with variance: binary": int(part["c"].between(1, 7).sum()), "tiered": sum(len({tiered(tier, 1, 2) for tier in tiers}) > 1 for tiers in part["tiers"])}
pd.DataFrame(beside).T

# %% [markdown]
# ## Every group that could have been drawn
#
# The published run sampled groups of four. Eight completions form 70 such groups. Over all of them, for all
# problems: how many have any advantage, and what gradient is left at the log-probabilities?

# %%
chosen = torch.tensor(list(combinations(range(row["n_samples"].astype(int)), 4)))
found = {}
for name, rewards in both.items():
    groups = rewards[:, chosen].flatten(0, 1)  # (P x 70, 4)
    advantage = group_advantages(groups, "zscore")
    logprobs = torch.zeros_like(advantage, requires_grad=True)
    losses.policy_gradient_loss(logprobs, advantage, torch.ones_like(advantage)).backward()
    found[name] = {"groups of four": len(groups), "with a gradient": int((~zero_variance(groups)).sum()), "largest gradient": float(logprobs.grad.abs().max())}
pd.DataFrame(found).T

# %% [markdown]
# More rollouts would not have helped soon. A group of $G$ with success rate $p$ has variance with probability
#
# $$1 - p^G - (1 - p)^G.$$
#
# Which $p$ is consistent with none correct of $n$? (Wilson's 95 % bound, as if completions were
# independent. The original later gave its 8B 50 problems 8 times: none of 400 was correct, 1.75 % were Python.)

# %%
later = pd.read_csv(ROOT / "reports" / "published" / "mbpp_diagnosis.csv").iloc[0]
attempts = {"here": tries, "8B, published": int(later["n_problems"] * later["k"])}
bounds = {name: wilson_interval(0, n).hi for name, n in attempts.items()}
p = torch.logspace(-4, 0, 200)
fig, axes = new_figure("At rates this low a group of 4 has no variance", size=(6.4, 3.0))
ax = axes[0, 0]
for G, colour in ((4, RED), (8, ORANGE), (64, BLUE)):
    ax.plot(p, 1 - p**G - (1 - p) ** G, color=colour, label=f"groups of {G}")
for (name, bound), style in zip(bounds.items(), ("--", ":")):
    ax.axvline(bound, color="grey", linestyle=style, label=f"{name}: 0 of {attempts[name]}, 95 % bound {bound:.2%}")
ax.axhline(diagnose.DEAD_BELOW, color="grey", linewidth=0.8)
ax.set(xscale="log", ylim=(0, 1))
finish(ax, x="share of completions that are correct (log scale)", y="groups with a gradient")
fig

# %% [markdown]
# ## Cause two: correct answers were cut
#
# Its sampler stopped at any token in the *set* of pieces of `<|end|>`: `<`, `|`, `end`, `>`. Suppose the
# policy had written exactly the reference programs of MBPP's 374 training problems. The reward would have
# seen this:

# %%
print("stops at:", [gpt2.decode([token]) for token in sorted(STOP)])
print(cut("def smaller(a, b):\n    if a<b:\n        return a\n    return b\n"), "<- cut here")
counts = references[["whole", "cut"]].apply(lambda column: column.value_counts()).reindex(TIERS).fillna(0).astype(int)
passing = counts.loc["all_passed", "cut"] / len(references)
fig, axes = new_figure(f"Cut by the stop rule, {passing:.0%} of MBPP's own references still pass", cols=2, sharey=True, size=(6.4, 2.6))
for ax, column, name in ((axes[0, 0], "whole", "stop at the sequence <|end|>"), (axes[0, 1], "cut", "stop at any of its pieces")):
    ax.barh(TIERS, counts[column], color=[GREEN if t == "all_passed" else RED for t in TIERS])
    for y, n in enumerate(counts[column]):
        ax.text(n + 4, y, n, va="center", fontsize=8)
    ax.set_xlim(0, 440)
    finish(ax, x=f"references ({name})", y=None)
fig

# %% [markdown]
# So the stop rule alone does not explain the run: most references survive it. It removed part of the little
# signal there was.
#
# ## Cause three: the KL term drifts
#
# Without a reward the policy should not move: it starts *at* the reference, where the KL divergence is 0 and
# can only grow. But the gradient of $k_1 = \log \pi - \log \pi_\text{ref}$ in a loss is $\nabla \log \pi$, whatever
# the reference is: its mean over the policy's own samples is 0,
#
# $$\mathbb{E}_{y \sim \pi}[\nabla \log \pi(y)] = \nabla \sum_y \pi(y) = 0,$$
#
# but a finite sample's mean is not. Adam divides a gradient by its size, so noise makes full steps.
# A toy policy with reward 0 everywhere, one term at a time:

# %%
shape, prompts = GPTConfig(depth=2, n_embd=64, n_head=2, block_size=32, vocab_size=50), [[i] for i in range(16)]
reference = GPT(shape, seed=seed)


def draw(policy, n, step):
    """n completions of each prompt: inputs, and targets (B, T) with log-probabilities that carry gradient."""
    sampled = generate.sample(policy, prompts, max_new_tokens=16, seed=step, samples_per_prompt=n)
    ids = torch.tensor([prompts[i // n] + list(c.ids) for i, c in enumerate(sampled)])
    return ids[:, :-1], ids[:, 1:], policy.token_logprobs(ids[:, :-1], ids[:, 1:])[0]


# %%
@torch.no_grad()
def exact_kl(policy, ids):
    """KL(policy || reference) of the next token, summed over the vocabulary, mean over the prefixes `ids`."""
    new, old = (m(ids)[..., : shape.n_ids].log_softmax(-1) for m in (policy, reference))
    return float((new.exp() * (new - old)).sum(-1).mean())


# %%
def train_on_kl(kind, kl_coef, where, steps):
    """Exact KL before each step, and the largest change of any weight at the end."""
    policy, path = GPT(shape, seed=seed), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        ids, targets, logprobs = draw(policy, 4, step)
        kl = losses.kl_estimate(logprobs, reference.token_logprobs(ids, targets)[0].detach(), kind)
        penalty = kl_coef * kl.detach().sum(1).view(-1, 4)  # (P, G)
        advantage = group_advantages(-penalty if where == "reward" else torch.zeros(len(prompts), 4)).view(-1, 1)
        loss = losses.policy_gradient_loss(logprobs, advantage, torch.ones_like(kl)) + (kl_coef * kl.mean() if where == "loss" else 0)
        path.append(exact_kl(policy, ids))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return path, max(float((a - b).detach().abs().max()) for a, b in zip(policy.parameters(), reference.parameters()))


# %%
terms = {"k1 in the loss, 0.02": ("k1", 0.02, "loss", kl_steps), "k1 in the loss, 0.2": ("k1", 0.2, "loss", kl_steps),
         "k2 in the loss, 0.02": ("k2", 0.02, "loss", 10), "k3 in the loss, 0.02": ("k3", 0.02, "loss", 10),
         "k1 in the reward, 0.02": ("k1", 0.02, "reward", 10)}
walked = {name: train_on_kl(*term) for name, term in terms.items()}
pd.DataFrame({name: {"last exact KL (nats per token)": path[-1], "largest change of a weight": change} for name, (path, change) in walked.items()}).T

# %% [markdown]
# Three of the four terms leave every weight unchanged: their gradient at the reference is exactly 0 (they were run
# for ten steps; every further one is the same). k1 in the loss drifts, about as far with a tenth of the coefficient: over eight seeds 0.75 to 1.24
# times as far, and not a tenth as far. The right panel averages the first step's gradient over more and more samples: it falls with the square
# root, as noise does.

# %%
sizes, norms = [4, 16, 64, 256], []
for n in sizes:
    loss = draw(reference, n, 99)[2].mean()  # k1 at the reference: log pi and a constant
    norms.append(float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(reference.parameters()))]).norm()))
fig, axes = new_figure("k1 in the loss: noise, and full steps along it", cols=2, size=(6.6, 2.9))
looks = ((RED, 5, "-", 0.4), (ORANGE, 1.6, "--", 1), (BLUE, 7, "-", 0.35), (GREEN, 3.5, "-", 0.6), (OKABE_ITO["black"], 1.2, "--", 1))
for (name, (path, _)), (colour, width, dash, alpha) in zip(walked.items(), looks):
    axes[0, 0].plot(path, dash, color=colour, label=name, linewidth=width, alpha=alpha)
finish(axes[0, 0], x="step", y="exact KL, nats per token")
axes[0, 1].loglog([16 * n for n in sizes], norms, "o-", color=RED, label="gradient's norm")
axes[0, 1].loglog([16 * n for n in sizes], [norms[0] * (sizes[0] / n) ** 0.5 for n in sizes], "--", color="grey", label="1 / square root")
finish(axes[0, 1], x="completions (log scale)", y="norm (log scale)")
fig

# %% [markdown]
# ## What would have reported it
#
# Before the first step, `diagnose` and `codechat passk` judge groups, and training on a DEAD task does not
# start. During a run, a sentinel counts steps in which under 5 % of the groups have variance:

# %%
sentinel = diagnose.Sentinel()
ended = next(step for step in range(1, 416) if sentinel.update(0.0))
pace = published["elapsed_s"].iloc[-1] / published["step"].iloc[-1]
print(f"passk: {row['verdict']}: {row['remedy']}")
print(f"a sentinel ends such a run after step {ended}: {ended * pace / 60:.0f} minutes at the published pace, not {415 * pace / 3600:.1f} hours")


# %% [markdown]
# Not shown: that a tiered reward would have *taught* this model MBPP. A gradient towards programs that parse
# and run does not solve a problem yet; the first remedy that `passk` names is a stronger base model. What tiers taught one is in
# [notebook 37](37_what_tiered_rewards_unlearn.ipynb): constants.
#
# ## Three lines of your own
#
# How often does a group of $G$ completions, each correct with probability $p$, have a gradient under a reward of right or
# wrong?

# %%
def live_share(p, G):
    """-> probability that the group's rewards differ."""
    raise NotImplementedError("yours to fill in")


# %%
check_cases(live_share, ((0.0, 4), 0), ((1.0, 4), 0), ((0.5, 2), 0.5), ((0.1, 4), 0.3438), ((0.01, 64), 0.4744))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `kl_steps = 10` | do the lines of k1 lie at 0 then? | <details><summary>outcome</summary>no: after 10 steps the exact KL is 0.067 nats per token, 0.064 of them after 5, and after all 60 it is 0.12: Adam's first steps are the largest (the last cell names the drift that changed)</details> |
# | `("k1", 0.02, ...)` to `("k1", 2e-4, ...)` in `terms` | does a hundredth of the coefficient stop the drift? | <details><summary>outcome</summary>no: 0.137 nats per token in place of 0.123, since Adam divides the gradient by its own size; only near Adam's epsilon of 1e-8 should the coefficient matter</details> |
#
# The last cell asserts the Result.

# %%
assert (row["verdict"], tries, len(rates)) == ("DEAD", 512, 64) and row["pass@1"] == 0 == row["runnable_frac"]
assert round(row["parseable_frac"] * tries) == 6 and round(row["pass@1/hi"], 3) == 0.057
assert {name: (v.verdict, v.effective_groups) for name, v in verdicts.items()} == {"binary": ("DEAD", 0), "tiered": ("WEAK", 6)}
assert found["binary"] == {"groups of four": 4480, "with a gradient": 0, "largest gradient": 0.0}
assert found["tiered"]["with a gradient"] == 210 and found["tiered"]["largest gradient"] > 0
assert (len(references), *counts.loc["all_passed"]) == (374, 374, 349)
assert (published["reward_mean"] == 0).all() and 1.3 < nats.min() < nats.max() < 1.7
moving, still = ([walked[name] for name in walked if name.startswith("k1 in the loss") == moves] for moves in (True, False))
assert all(0.08 < path[-1] < 0.2 and change > 0.01 for path, change in moving) and all(change == 0.0 for _, change in still)
assert 2 / 3 < moving[0][0][-1] / moving[1][0][-1] < 3 / 2  # in proportion to the coefficient it would be 0.1
assert norms[-1] < norms[0] / 4 and ended == 20
solved, binary = ([row[column] for row in beside.values()] for column in ("solved by one of eight", "groups with variance: binary"))
assert solved == [0, 2, 9, 30, 40] and beside["SmolLM2 after SFT"]["Python"] == "86.7%"
assert [int(part["c"].sum()) for part in asked.values()][:3] == [0, 3, 24] and binary[:3] == [0, 2, 9]
