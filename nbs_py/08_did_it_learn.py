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
# # Did RL help? Paired problem by problem, the interval says no
#
# **Question.** Is the model after RL better than the one after SFT on requests that neither has seen, by
# how much, and at what price?
#
# **Result.** No gain is resolved: on test, pass@1 at temperature 1 changes by -0.003 [-0.023, 0.017] and pass@4
# by -0.020 [-0.044, 0.000], and greedy answers over all seeds gain nothing either (last figure). Pairing by
# problem narrows the interval to a third. Treating completions as independent gives an interval of 0.048; the
# right width is 0.082.
#
# **Runs/needs.** Recipe nano's `choose` and `evaluate` (frozen rows; `source="nano"` reads the runs that `make lab`
# made on this machine), and the committed rows of recipe nano's report. Seconds on one core.
#
# Previous: [07 reinforce](07_reinforce.ipynb) · Next: [09 gradient microscope](09_gradient_microscope.ipynb)

# %% tags=["parameters"]
source = "frozen"
seed = 0

# %%
import inspect
from itertools import combinations

import numpy as np
import pandas as pd

from codechat.evaluation import intervals
from codechat.evaluation.intervals import Interval, estimate_pass_at_k
from codechat.tasks import load
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.reports import plots, run_frames
from codechat_lab.reports.style import OKABE_ITO, colour_of, finish, new_figure, outer_legend

# %%
evals, problems, samples = (run_frames.stage_rows(source, "evaluate", t) for t in ("evals", "per_problem", "samples"))
settings, tiers = run_frames.settings(source, "evaluate"), load("funcall").tiers
sft, rl = evals["checkpoint"].unique()
n, ks, splits = settings["n"], settings["ks"], settings["split"]
counts = f"n={n}, temperature {settings['temperature']:g}"

# %% [markdown]
# ## The result in numbers
#
# Every seed's paired difference in pass@1 (RL minus SFT, 95 % interval). The scores themselves are in the next table.

# %%
seeds = run_frames.seeds(source)
seeds["pass@1, RL - SFT"] = [str(Interval(row.value, row.lo, row.hi)) for row in seeds.itertuples()]
seeds.set_index(["run", "comparison"])[["pass@1, RL - SFT", "N"]]

# %% [markdown]
# ## The score
#
# pass@$k$ is the probability that at least one of $k$ sampled completions is an exact match: the correct
# function, every argument correct, nothing more. `test` holds argument values that no training problem has (notebook 03),
# `test_hard` also new tools or phrasings; further splits are named for what is new in them. The checkpoint was chosen on a third split, `select` (validation).
# Each number is printed with k, n (completions per problem), N (problems), temperature and its 95 % interval.

# %%
table = evals.set_index(["split", "checkpoint"]).copy()  # one block of columns
for k in ks:
    columns = table[[f"pass@{k}", f"pass@{k}/lo", f"pass@{k}/hi"]].to_numpy()
    table[f"pass@{k} ({counts})"] = [str(Interval(*row)) for row in columns]
table.assign(N=table["n_problems"].astype(int))[[*(f"pass@{k} ({counts})" for k in ks), "N"]]

# %%
scored = {name: table.xs(name, level="checkpoint").loc[splits] for name in (sft, rl)}
first = splits[0]
fig, axes = new_figure(f"pass@1 on {first}: " + ", ".join(f"{name} {part.loc[first, 'pass@1']:.2f}" for name, part in scored.items()), cols=len(ks), sharey=True)
for ax, k in zip(axes[0], ks):
    for shift, (name, part) in zip((-0.2, 0.2), scored.items()):
        value, lo, hi = part[[f"pass@{k}", f"pass@{k}/lo", f"pass@{k}/hi"]].to_numpy().T
        at = np.arange(len(splits)) + shift
        ax.bar(at, value, 0.4, yerr=[value - lo, hi - value], color=colour_of(name), capsize=3, error_kw=dict(linewidth=1), label=name)
        for x, y, top in zip(at, value, hi):
            ax.text(x, top + 0.015, f"{y:.2f}", ha="center", fontsize=7.5)
    ax.set_xticks(range(len(splits)), [f"{split}\nN={count}" for split, count in zip(splits, scored[rl]["n_problems"].astype(int))])
    ax.set_title(f"pass@{k}", fontsize=9, loc="left")
axes[0, 0].set(ylim=(0, 1.08), ylabel="share of problems")
outer_legend(fig, axes[0, -1], "outside lower center", ncols=2, title=f"{counts}, 95 % intervals", title_fontsize=7.5)
fig

# %% [markdown]
# ## pass@k, from scratch
#
# Given $n$ completions of which $c$ are correct, draw $k$ of them without replacement: pass@$k$ is the share of all
# such draws with at least one correct. Counting them all is the definition;
#
# $$\text{pass@}k = 1 - \binom{n - c}{k} \Big/ \binom{n}{k}$$
#
# is the same number. The naive $1 - (1 - c/n)^k$ is too low.

# %%
k, rows = n // 2, {}
for c in range(n + 1):
    right = [i < c for i in range(n)]
    draws = [any(right[i] for i in chosen) for chosen in combinations(range(n), k)]
    rows[c] = np.mean(draws), estimate_pass_at_k(n, c, k), 1 - (1 - c / n) ** k
by_hand = pd.DataFrame(rows, index=["counted", "library", "1 - (1 - c/n)^k"]).T.rename_axis("correct of n")
np.testing.assert_allclose(by_hand["counted"], by_hand["library"], atol=1e-12)
print(f"pass@{k} of one problem, n={n}")
by_hand.round(3).T


# %% [markdown]
# The evaluation stored how many of the n completions of each problem were correct. Its scores follow from
# these counts.

# %%
def passes(checkpoint, split, k):
    """pass@k of each problem, in the order of the problems."""
    rows = problems[(problems["checkpoint"] == checkpoint) & (problems["split"] == split)].sort_values("id")
    return np.array([estimate_pass_at_k(n, c, k) for n, c in zip(rows["n"], rows["c"])])


for _, row in evals.iterrows():
    for k in ks:
        score = passes(row["checkpoint"], row["split"], k).mean()
        np.testing.assert_allclose(score, row[f"pass@{k}"], atol=1e-6)
print(f"{len(problems):,} rows of problems give the {len(evals) * len(ks)} scores above")

# %% [markdown]
# ## An honest interval
#
# The problems are a sample. So problems are resampled with replacement many times, and the middle 95 % of the
# resulting scores is the interval (bootstrap). Treating all $N n$ completions as independent would be too
# certain: completions of one problem share its difficulty.

# %%
rng, values = np.random.default_rng(seed), passes(rl, "test", 1)
resampled = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(5000)]
lo, hi = np.percentile(resampled, (2.5, 97.5))
library = intervals.bootstrap_interval(values, seed=seed)
np.testing.assert_allclose((lo, hi), (library.lo, library.hi), atol=0.004)  # other resamples, same distribution
naive = intervals.wilson_interval(round(values.sum() * n), len(values) * n)
widths = {"bootstrap over problems, by hand": (lo, hi), "the same, library": (library.lo, library.hi),
          "completions as if independent": (naive.lo, naive.hi)}
widths = pd.DataFrame(widths, index=["from", "to"]).T.assign(width=lambda t: t["to"] - t["from"])
print(f"pass@1 of {rl} on test, N={len(values)}, {counts}")
widths.round(3)

# %% [markdown]
# ## RL minus SFT, problem by problem
#
# Both checkpoints answered the same problems. Hard problems are hard for both, so the difference is taken
# within each problem first: the paired interval excludes the shared difficulty. An interval without 0 means
# that RL changed the score on problems like these; it does not cover another training run with another seed.

# %%
print(inspect.getsource(intervals.paired_bootstrap))
gaps = {}
for split in splits:
    for k in ks:
        a, b = passes(sft, split, k), passes(rl, split, k)
        apart = 1.96 * np.hypot(*(x.std(ddof=1) / len(x) ** 0.5 for x in (a, b)))
        gaps[f"pass@{k}, {split}"] = *intervals.paired_bootstrap(a, b, seed), apart, len(a)
gaps = pd.DataFrame(gaps, index=["RL - SFT", "from", "to", "unpaired half width", "N"]).T
gaps.round(3).astype({"N": int})

# %%
fig, axes = new_figure(f"RL minus SFT: {100 * gaps.loc['pass@1, test', 'RL - SFT']:+.1f} points of pass@1 on test, paired")
ax, places, middle, apart = axes[0, 0], range(len(gaps)), 100 * gaps["RL - SFT"], 100 * gaps["unpaired half width"]
ax.hlines(places, middle - apart, middle + apart, color="#d0d0d0", linewidth=7, label="unpaired")
ax.hlines(places, 100 * gaps["from"], 100 * gaps["to"], color=OKABE_ITO["green"], linewidth=2.5, label="paired")
ax.plot(middle, places, "o", color=OKABE_ITO["green"])
ax.axvline(0, color="black", linewidth=0.8)
ax.set_yticks(places, [f"{name}\nN={int(N)}" for name, N in gaps["N"].items()])
ax.invert_yaxis()
finish(ax, x=f"difference in points, 95 % intervals ({counts})", y=None, loc="lower right")
fig

# %% [markdown]
# ## More of the same, or something new?
#
# If RL taught the model calls that it could not make before, fewer problems would have 0 correct completions
# of n, and pass@n would rise. If RL only repeats more often what SFT did sometimes, the middle moves to n.

# %%
test_rows = problems[problems["split"] == "test"]
histogram = test_rows.groupby("checkpoint")["c"].value_counts().unstack("checkpoint").reindex(range(n + 1))
before, after = (histogram[name].fillna(0).astype(int) for name in (sft, rl))
fig, axes = new_figure(f"Never correct: {before[0]} problems, then {after[0]}; "
                       f"always correct: {before[n]}, then {after[n]}")
ax = axes[0, 0]
for shift, name, bars in ((-0.2, sft, before), (0.2, rl, after)):
    ax.bar(bars.index + shift, bars, 0.4, color=colour_of(name), label=name)
ax.set_xticks(range(n + 1))
finish(ax, x=f"correct completions of n={n}", y=f"problems of test, N={before.sum()}")
fig

# %% [markdown]
# ## Which tier
#
# The shaped reward counts all tiers; the reported score counts only the last.

# %%
tier_shares = evals[evals["split"] == "test"].set_index("checkpoint")[[f"tier/{t}" for t in tiers]].T
tier_shares = tier_shares.rename(index=lambda name: name.removeprefix("tier/"))
tier_shares["change, points"] = 100 * (tier_shares[rl] - tier_shares[sft])
print(f"share of completions on test, N={before.sum()}, {counts}")
tier_shares.round(3)

# %% [markdown]
# ## The price
#
# The reward is for calls. Did it also teach the model to call where no function fits, or to forget code? Only
# behaviours that were not rewarded can tell: a tool requested without tools or with other tools, code requested
# with tools. RL cannot unlearn a behaviour of SFT while all answers of a group show it.

# %%
test = evals[evals["split"] == "test"].set_index("checkpoint")
fig, axes = new_figure("share of completions with the expected behaviour", rows=2, size=(6.4, 4.1))
for ax, name in zip(axes[:, 0], (sft, rl)):
    cells = {at: (test.loc[name], cell) for cell, at in plots.GRID.items()}
    plots.draw_behaviour(ax, cells, "{expected} {p:.0%}\n[{lo:.0%}, {hi:.0%}] n={n}", 8)
    ax.set_xticks((0, 1, 2), ("with tools", "with other tools", "without tools"))
    ax.set_yticks((0, 1), ("tool\nrequested", "code\nrequested"))
    ax.set_title(name, fontsize=9, loc="left")
fig

# %% [markdown]
# ## The choice of the checkpoint
#
# Scores on the split that chose the checkpoint are slightly optimistic: the best of several noisy numbers is
# partly luck. That is why `select` (validation) chooses and `test` is reported.

# %%
choice = run_frames.stage_rows(source, "choose", "evals")
shown = ["checkpoint", "split", "pass@1", f"pass@{max(ks)}", "n_problems", "n_samples", "temperature"]
quoted = evals[(evals["checkpoint"] == rl) & (evals["split"] == "test")]
whole = {"n_problems": int, "n_samples": int}
pd.concat([choice.reindex(columns=shown), quoted[shown]]).astype(whole).set_index(["split", "checkpoint"]).round(3)

# %% [markdown]
# ## Read some
#
# The same problems and sampling seeds, before and after: some that RL gained, some that it lost, some that
# stay wrong. Only reading shows a score that rises for the wrong reason.

# %%
on_test = samples[samples["split"] == "test"].set_index("problem")
old, new = (on_test[on_test["checkpoint"] == name] for name in (sft, rl))
pairs = old[["request", "gold"]].assign(before=old["completion"], tier_before=old["tier"],
                                        after=new["completion"], tier_after=new["tier"])
won, kept = new["correct"] & ~old["correct"], old["correct"] & new["correct"]
lost, never = old["correct"] & ~new["correct"], ~(old["correct"] | new["correct"])
fates = {"gained": won, "lost": lost, "wrong both times": never, "correct both times": kept}
print(f"of {len(pairs)} samples", {fate: int(chosen.sum()) for fate, chosen in fates.items()})

# %%
parts = {fate: pairs[fates[fate]].head(5) for fate in ("gained", "lost", "wrong both times")}
with pd.option_context("display.max_colwidth", None):
    display(pd.concat(parts).droplevel(1).replace("<functioncall> ", "", regex=True))

# %% [markdown]
# ## Other seeds
#
# One training run is one sample. Here are all seeds, each with its own SFT, RL and evaluation. A point is a seed;
# its interval covers the problems, not the training run:

# %%
compared = list(dict.fromkeys(seeds["comparison"].str.partition(":")[0]))
fig, axes = new_figure(f"{(seeds['lo'] > 0).sum()} of {len(seeds)} intervals lie above 0", size=(6.4, 2.6))
for y, split in enumerate(compared):
    for shift, row in enumerate(seeds[seeds["comparison"].str.startswith(f"{split}:")].itertuples()):
        axes[0, 0].hlines(y + 0.18 * shift, 100 * row.lo, 100 * row.hi, color=OKABE_ITO["green"], linewidth=2)
        axes[0, 0].plot(100 * row.value, y + 0.18 * shift, "o", color=OKABE_ITO["green"], markersize=4)
axes[0, 0].axvline(0, color="black", linewidth=0.8)
axes[0, 0].set_yticks([y + 0.18 for y in range(len(compared))], compared)
axes[0, 0].invert_yaxis()
finish(axes[0, 0], x="RL minus SFT, pass@1, points (paired, 95 % intervals)", y=None, legend=False)
fig

# %% [markdown]
# ## Greedy beside temperatures 0.5 and 1, and calls apart from declining
#
# All of the above samples at temperature 1 and pools all kinds of request. Is there a gain in greedy answers, and is it in
# calls or in declining? Recipe `nano`'s rows answer both, over all its seeds (95 % intervals over seeds and tools). Its whole report is
# [reports/nano.ipynb](../reports/nano.ipynb). With the call tag given (`--forced-call true`) no completion can decline. This separates better calls from more calls.

# %%
reading = run_frames.load_frozen(run_frames.frozen_dir().parent / "nano" / "data")
evaluations = [run for run in reading["runs"]["run"] if run.startswith("nano/full-evaluation")]
asked = {kind: words for kind, words in run_frames.STRATA.items() if f"{kind}/n" in reading["evals"]}
strata = run_frames.strata_over_seeds(reading, evaluations, list(asked))

# %%
CALLS = {"named_not_offered": "a name not offered", "named_unreadable": "unreadable", "named_no_call": "no call"}
rows = []
for kind, words in asked.items():
    for after, (_, part) in zip(("SFT", "RL"), strata.dropna(subset=f"{kind}/n").groupby("checkpoint", sort=False)):
        row = {"requests": words, "after": after}
        for found in part.to_dict("records"):
            row[found["sampling"]] = str(Interval(*(found[f"{kind}/pass@1{end}"] for end in ("", "/lo", "/hi"))))
            if found["sampling"] == "greedy":
                row |= {f"greedy: {said}": f"{found[f'{kind}/{key}']:.2f}" for key, said in CALLS.items()}
        rows.append(row)
print(f"pass@1 over {len(evaluations)} seeds")
pd.DataFrame(rows).set_index(["requests", "after"])

# %%
greedily = {}
for split in ("test", "test_hard"):
    for sampling in ("greedy", "T=0.5", "T=1"):
        only = reading["per_problem"][reading["per_problem"]["sampling"] == sampling]
        greedily[f"{split}, {sampling}"] = run_frames.paired_gains(reading | {"per_problem": only}, evaluations, split)
print("RL minus SFT, recipe nano, paired by problem, all seeds: " + "; ".join(f"{at} {run_frames.in_points(g.all)}" for at, g in greedily.items()))

# %%
fig, axes = new_figure(f"Greedy answers on test: {run_frames.in_points(greedily['test, greedy'].all)} points for RL", size=(6.4, 3.4))
for y, gain in enumerate(greedily.values()):
    for shift, one in enumerate((gain.all, *gain.seeds)):
        look = dict(color=OKABE_ITO["green"] if shift else "black")
        axes[0, 0].hlines(y + 0.16 * shift, 100 * one.lo, 100 * one.hi, linewidth=1.2 if shift else 3, **look)
        axes[0, 0].plot(100 * one.value, y + 0.16 * shift, "o", markersize=3.5, **look)
axes[0, 0].axvline(0, color="grey", linewidth=0.8)
axes[0, 0].set_yticks([y + 0.16 for y in range(len(greedily))], list(greedily))
axes[0, 0].invert_yaxis()
finish(axes[0, 0], x="RL minus SFT, points, 95 % (black: all seeds; green: each)", y=None, legend=False)
fig


# %% [markdown]
# A gain at temperature 1 alone is sharpening: RL repeats the greedy answer more often. Sampling cooler gives the same gain, without RL.

# %% [markdown]
# ## Three lines of your own
#
# The formula, as a function. What must it give where fewer than $k$ completions are wrong?

# %%
def pass_at_k(n, c, k):
    """n completions, c of them correct -> the share of draws of k with a correct one."""
    raise NotImplementedError("yours to fill in")


# %%
check_cases(pass_at_k, *(((n, c, k), estimate_pass_at_k(n, c, k)) for c in range(n + 1) for k in (1, n // 2, n)))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `values[:50]` for `passes(rl, "test", 1)` in the cell of the interval | a fifth of the problems: how much wider is it? | <details><summary>outcome</summary>twice, 0.17 in place of 0.08, where $\sqrt{5} = 2.2$: over 50 problems a gain of a few points cannot be seen</details> |
# | resample `n` completions per problem too, at random with replacement | is the interval wider? | <details><summary>outcome</summary>hardly, 0.087 in place of 0.082: problems differ far more than the completions of one problem do</details> |
#
# The last cell asserts the Result, which is that of the frozen rows; runs of your own need not have it.

# %%
scores = evals.set_index(["checkpoint", "split"])
assert 0.2 <= scores.loc[(sft, "test"), "pass@1"] < 1 and gaps["N"].min() >= 100
paired = gaps.loc["pass@1, test"]
assert paired["to"] - paired["from"] < 2 * paired["unpaired half width"]
own = seeds[seeds["run"] == evals["run"].iloc[0]].set_index("comparison").loc[f"test: {rl} - {sft}"]
mine = gaps.loc["pass@1, test", ["RL - SFT", "from", "to"]].astype(float)
np.testing.assert_allclose(float(own["value"]), mine.iloc[0], atol=5e-4)  # evaluation draws tools, this notebook problems
assert own["lo"] <= own["value"] <= own["hi"] and (source != "frozen" or np.allclose(own[["lo", "hi"]].astype(float), mine[1:], atol=0.004))
assert source != "frozen" or all(gaps.loc[f"pass@{k}, test", "from"] < 0.001 for k in ks)
assert source != "frozen" or greedily["test, greedy"].all.lo < 0
assert widths["width"].iloc[2] < widths["width"].iloc[1]
assert test.loc[rl, "probe/tool_with_tools/call"] > (0.8 if source == "frozen" else 0.5)
