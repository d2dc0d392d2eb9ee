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
# # A model of 2.6 million parameters that reads its list of tools, and what RL adds to it
#
# **Question.** Trained through every stage on two CPU cores, does a small model choose among the tools that a prompt lists, decline where none fits, and call tools that it has never
# seen? Does REINFORCE on the staircase reward add to what SFT reached, greedily and not only when it samples?

# %% tags=["parameters", "hide-cell"]
runs = "nano"
out = "reports/nano"
frozen = True  # False: from the runs on this machine, whose rows then replace those of `out`

# %% tags=["hide-cell"]
import numpy as np
import pandas as pd

from codechat.runs import paths
from codechat.runs.paths import ROOT
from codechat_lab.reports import articles, plots, run_frames
from codechat_lab.reports.style import colour_of, first_and_last, label_of_run, new_figure, outer_legend
from codechat_lab.tasks.funcall import TIERS

stages = ("pretrain", "sft", "diagnose", "rl")
# the stages full-evaluation and more-sft-evaluate run only where they are asked for
present = [stage for stage in ("full-evaluation", "more-sft-evaluate") if paths.exists(f"{runs}/{stage}")]
judged = ["evaluate", *present] if "full-evaluation" not in present else present
names = [*(f"{runs}/{stage}" for stage in stages), *(run for stage in judged for run in run_frames.seeds_of(f"{runs}/{stage}"))]
data = ROOT / out / "data"
without_tiers = lambda frames: frames | {"per_problem": frames["per_problem"].drop(columns=["tiers", "reward_mean"], errors="ignore")}
frames = run_frames.gather(names, data, frozen, without_tiers)
name = {run.rpartition("/")[2]: run for run in frames["runs"]["run"]}
seeds = [run for stage, run in name.items() if stage.startswith(("evaluate", "full-evaluation"))]
longer = [run for stage, run in name.items() if stage.startswith("more-sft-evaluate")]
name = {stage: name[stage] for stage in stages} | {"evaluate": seeds[0]}
metrics = {stage: run_frames.rows_of(frames["metrics"], name[stage]) for stage in ("pretrain", "sft", "rl")}
evals = {stage: run_frames.rows_of(frames["evals"], name[stage]) for stage in name}

# %% tags=["hide-cell"]
one = evals["evaluate"]
final = run_frames.strata_over_seeds(frames, seeds, [k for k in run_frames.STRATA if f"{k}/n" in one])
sft, rl = (final[final["checkpoint"] == c] for c in final["checkpoint"].unique()[[0, -1]])


def share(part, stratum, measure="pass@1", sampling="greedy"):
    """A share of one stratum under one sampling; its split is the one that has the stratum."""
    found = part[part["sampling"] == sampling].dropna(subset=f"{stratum}/n")
    return float(found[f"{stratum}/{measure}"].iloc[0])


def gains(split, sampling, against=None):
    """RL minus SFT by seed and over seeds, paired by problem. against: runs that evaluated what RL is compared with instead."""
    only = frames["per_problem"][frames["per_problem"]["sampling"] == sampling]
    return run_frames.paired_gains(frames | {"per_problem": only}, seeds, split, against=against)


forced = "T=1, call given"
samplings = ["greedy", *(s for s in final["sampling"].unique() if s not in ("greedy", forced))]
kinds = {stratum: words for stratum, words in run_frames.STRATA.items() if f"{stratum}/n" in final}
gained = {f"{split}, {sampling}": gains(split, sampling) for split in ("test", "test_hard") for sampling in samplings}
numbers = {f"{when}_{k}": share(part, k) for when, part in (("sft", sft), ("rl", rl)) for k in kinds}
numbers |= {f"sft_{k}_{end}": share(sft, k, f"pass@1/{end}") for k in kinds for end in ("lo", "hi")}
numbers |= {f"{when}_absent": share(part, "call", "named_not_offered") for when, part in (("sft", sft), ("rl", rl))}
for at, gain in gained.items():
    split, sampling = at.split(", ")
    key = f"{split}_{ {'greedy': 'greedy', 'T=1': 'warm'}.get(sampling, 'between')}"
    numbers |= {f"{key}{end}": 100 * value for end, value in (("", gain.all.value), ("_lo", gain.all.lo), ("_hi", gain.all.hi))}
bits = evals["pretrain"]["val_bpb"].iloc[-1]
numbers |= dict(bits=bits, seeds=len(seeds))
beside = {f"{split}, {sampling}": gains(split, sampling, longer) for split in ("test", "test_hard") for sampling in ("greedy", "T=1") if longer}
numbers |= {f"longer_{at.replace(', ', '_').replace('=', '')}": 100 * gain.all.value for at, gain in beside.items()}
run_frames.headline(numbers, data)
greedy, warm = gained["test, greedy"].all, gained.get("test, T=1", gained["test, greedy"]).all
added = "RL adds {test_greedy:+.1f} points greedily" if greedy.lo > 0 else "Greedily RL adds nothing that the interval resolves, {test_greedy:+.1f} points" if greedy.hi > 0 else "Greedily RL costs {test_greedy:+.1f} points"

# %% tags=["answer", "hide-input"]
articles.answer(
    numbers,
    "After SFT the model calls {sft_call:.0%} of the requests for known tools exactly right, {sft_renamed:.0%} when every tool has another name and {sft_tool:.0%} for tools of domains "
    "that training never had; " + ("{sft_absent:.1%} of its calls for known tools name" if numbers["sft_absent"] else "no call for a known tool names") + " a tool that was not offered.",
    "Where no tool fits it declines {sft_unfitting:.0%} of the requests; of two calls in a chain it gets the first right in {sft_chain_1:.0%} and the second in {sft_chain_2:.0%}.",
    added + " [{test_greedy_lo:+.1f}, {test_greedy_hi:+.1f}] on test" + (", and at temperature 1 {test_warm:+.1f} [{test_warm_lo:+.1f}, {test_warm_hi:+.1f}]" if "test_warm" in numbers else "")
    + ": {seeds:.0f} seed" + "s" * (len(seeds) > 1) + ", paired by problem.",
)


# %% tags=["hide-cell"]
def strata(title):
    """pass@1 of each stratum with 95 % intervals: a panel per checkpoint, a line per stratum, filled greedy, hollow at temperature 1."""
    fig, axes = new_figure(title, cols=2, size=(8.6, 1.4 + 0.32 * len(kinds)), sharey=True)
    for ax, part in zip(axes[0], (sft, rl)):
        checkpoint = part["checkpoint"].iloc[0]
        for shift, sampling in zip((-0.12, 0.12), [s for s in ("greedy", "T=1") if s in set(part["sampling"])]):
            value, lo, hi = 100 * np.array([[share(part, k, f"pass@1{end}", sampling) for k in kinds] for end in ("", "/lo", "/hi")])
            look = dict(fmt="o", color=colour_of(checkpoint), capsize=2, markersize=4.5, linewidth=1, label=sampling)
            fill = colour_of(checkpoint) if sampling == "greedy" else "none"
            ax.errorbar(value, np.arange(len(kinds)) + shift, xerr=[(value - lo).clip(0), (hi - value).clip(0)], markerfacecolor=fill, **look)
        ax.set_title(label_of_run(checkpoint), fontsize=9, loc="left")
        ax.set(xlim=(-2, 102), xlabel="correct (%)")
    axes[0, 0].set_yticks(range(len(kinds)), [f"{words}, N={final[f'{k}/n'].dropna().iloc[0]:.0f}" for k, words in kinds.items()])
    axes[0, 0].invert_yaxis()
    outer_legend(fig, axes[0, -1], "outside lower center", ncols=2, title="95 % intervals over tools and seeds", title_fontsize=7.5)
    return fig


# %% tags=["thumbnail", "hide-input"]
shown = strata(f"known tools {100 * share(sft, 'call'):.0f} %, unseen {100 * share(sft, 'tool'):.0f} %, declined {100 * share(sft, 'unfitting'):.0f} % after SFT")
shown.savefig(data.parent / "strata.png", dpi=150, metadata={"Software": None})
shown


# %% tags=["hide-input"]
def cell(part, stratum, sampling):
    return f"{share(part, stratum, 'pass@1', sampling):.2f} [{share(part, stratum, 'pass@1/lo', sampling):.2f}, {share(part, stratum, 'pass@1/hi', sampling):.2f}]"


pairs = [(label, part, sampling) for sampling in samplings for label, part in (("SFT", sft), ("RL", rl))]
table = pd.DataFrame([dict(stratum=words, n=int(final[f"{k}/n"].dropna().iloc[0])) | {f"{label} {sampling}": cell(part, k, sampling) for label, part, sampling in pairs} for k, words in kinds.items()])
articles.table(table, {"stratum": "requests", "n": "N"} | {f"{label} {sampling}": f"{label}, {sampling}" for label, _, sampling in pairs})

# %% [markdown]
# At temperature 1 an answer is also lost if its first token does not begin a call. With the call tag given, only the rest is
# sampled, and no answer can decline. A gain at temperature 1 that is absent here came from declining less.

# %% tags=["hide-input"]
calls = [k for k in kinds if k not in ("unfitting", "code", "no_tools")]
given = [(label, part, sampling) for sampling in ("T=1", forced) if sampling in set(final["sampling"]) for label, part in (("SFT", sft), ("RL", rl))]
table = pd.DataFrame([dict(stratum=kinds[k]) | {f"{label} {sampling}": cell(part, k, sampling) for label, part, sampling in given} for k in calls])
articles.table(table, {"stratum": "requests for a call"} | {f"{label} {sampling}": f"{label}, {sampling}" for label, _, sampling in given})

# %% [markdown]
# Strata are never pooled: we chose their shares in a split.
# `test` has known tools with new values, unfitting lists, chains, code and chat; `test_hard` has unseen tools,
# new phrasings and renamed tools. The checkpoint of RL was chosen on validation problems.
#
# ## What went wrong where a call was wrong
#
# A call can name no tool of the list, another tool of the list, or the right one with wrong arguments; or there is no call.

# %% tags=["hide-input"]
outcomes = {"named_right": "right tool", "named_other": "another tool", "named_not_offered": "a name not offered", "named_unreadable": "unreadable", "named_no_call": "no call"}
rows = [dict(stratum=run_frames.STRATA[k], who=label) | {o: share(part, k, o) for o in outcomes} for k in kinds if k not in ("code", "no_tools") for label, part in (("SFT", sft), ("RL", rl))]
articles.table(pd.DataFrame(rows), {"stratum": "requests", "who": "greedy"} | {o: (words, ".0%") for o, words in outcomes.items()})

# %% [markdown]
# Completions of the last checkpoint, evenly spread over the test problems:

# %% tags=["hide-input"]
samples = run_frames.rows_of(frames["samples"], name["evaluate"])
last = samples[(samples["checkpoint"] == rl["checkpoint"].iloc[0]) & (samples["sampling"] == "greedy")]
spread = last.iloc[sorted({i * len(last) // 10 for i in range(10)})]
articles.table(spread, {column: (column, articles.VERBATIM) for column in ("tier", "request", "completion")})

# %% [markdown]
# ## What RL changed
#
# Paired by problem. A gain at temperature 1 that greedy answers do not have is sharpening: the policy gives its greedy answer more often.

# %% tags=["hide-input"]
table = run_frames.gain_table({at: gain for at, gain in gained.items() if at.endswith(("greedy", "T=1"))})
table = table if len(seeds) > 1 else table[~table["name"].str.endswith("seeds")]
plots.differences(table, "RL minus SFT: " + "; ".join(f"{at} {run_frames.in_points(g.all)}" for at, g in list(gained.items())[:2]))

# %% [markdown]
# RL has to beat more SFT: for as long as RL takes, at half SFT's rates, on the same conversations. RL minus more SFT:

# %% tags=["hide-input"]
for at, gain in beside.items():
    print(f"RL - more SFT, {at}: {run_frames.in_points(gain.all)}; seeds: " + ", ".join(run_frames.in_points(one) for one in gain.seeds))
print("" if beside else "not among these runs: `codechat run nano --until more-sft-evaluate` makes it")

# %% tags=["hide-input"]
rollouts, held_out = first_and_last(metrics["rl"], "exact_match"), evals["rl"]["pass@1"].dropna()
title = "{0}: exact_match {1:.2f} to {2:.2f} on rollouts, {3:.2f} to {4:.2f} on held-out problems"
plots.rl_progress(name["rl"], metrics["rl"], evals["rl"], title.format(name["rl"], *rollouts, held_out.iloc[0], held_out.iloc[-1]))

# %% tags=["hide-input"]
plots.tiers_on_validation({name["rl"]: evals["rl"]}, TIERS, f"exact answers on the same validation problems: {evals['rl']['tier/full'].iloc[0]:.0%} to {evals['rl']['tier/full'].iloc[-1]:.0%}")

# %% [markdown]
# A group with equal rewards has no gradient. After an SFT that is right most of the time, many groups are equal.

# %% tags=["hide-input"]
verdict = evals["diagnose"].iloc[-1]
print(f"before RL: {verdict['verdict']}, {verdict['effective_groups']:.0f} of {verdict['n_problems']:.0f} groups have variance")
plots.group_signal(name["rl"], metrics["rl"])

# %% [markdown]
# ## How it came to read
#
# Pretraining on code, a first SFT that learns to copy, and a second on conversations where only the list gives a tool's name, with lookup drills among them. docs/experiments/reading-tools.md has the variants.

# %% tags=["hide-input"]
plots.pretraining(name["pretrain"], metrics["pretrain"], evals["pretrain"])

# %% tags=["hide-input"]
plots.heldout_losses(name["sft"], evals["sft"])

# %% [markdown]
# ## Appendix: runs and statistics

# %% tags=["hide-input"]
table = frames["runs"].assign(minutes=(frames["runs"]["seconds"] / 60).round(1))
table[["run", "kind", "parent", "minutes", "commit", "dirty"]].fillna("").set_index("run")

# %% tags=["hide-input"]
for at, gain in gained.items():
    print(f"RL - SFT, {at}: {run_frames.in_points(gain.all)}; seeds alone: " + ", ".join(run_frames.in_points(one) for one in gain.seeds))
n, last = int(one["n_samples"].max()), one["n_problems"].max()
print(f"n={n} completion{'s' * (n > 1)} a problem, N={last:.0f} problems a split, 95 % intervals over tools{' and seeds' * (len(seeds) > 1)}; pretraining ends at {bits:.3f} bits per byte of validation files")
assert all(g.all.lo <= g.all.value <= g.all.hi for g in gained.values()) and len(gained["test, greedy"].seeds) == len(seeds)
