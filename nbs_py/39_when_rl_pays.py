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
# # The verdict says where RL can learn; what it gained, the cheapest control gained too
#
# **Question.** Three models meet the same reward, filter and loop on MBPP: nano, SmolLM2-135M and Qwen2.5-Coder-0.5B. `passk` gives its verdict before any training. Does it say
# what RL will gain over the cheapest control?
#
# **Result.** DEAD, WEAK and LIVE by pass@1 before training. On nano RL cannot start. SmolLM2 gains nothing by it. On the 0.5 B twenty steps of GRPO
# raise MBPP's test problems, greedily, by 0.046 [0.014, 0.078] and 0.072 [0.038, 0.106] over the start in two seeds. SFT on the reference solutions, the cheapest control, gains
# 0.064 [0.026, 0.102] and 0.050 [0.012, 0.088]: over both seeds GRPO minus that is +0.002 [-0.044, +0.046], no gain by the rule set before the run. Rejection sampling gains
# 0.030 in both; GRPO on the binary reward, one seed, 0.052 [0.018, 0.086]. On HumanEval, one seed, the reference solutions cost 0.104: GRPO minus SFT on them is
# +0.159 [+0.079, +0.238], minus rejection sampling +0.024 [-0.037, +0.085].
#
# **Also.** On GSM8K five rewards for a form teach the form and cost the answers: after twenty steps of GRPO 248 of 256 answers
# have it and 16 are right. SFT on worked solutions has 52 right: GRPO minus that is -0.141 [-0.191, -0.090]. Rejection sampling writes the answer
# before the reasoning, 9 right. The start has 2, because it hardly ever writes the form. From the checkpoint of such an SFT, which writes it, sixteen steps of
# GRPO take right answers from 107 to 108 and from 118 to 110 of 512 in two seeds, rejection sampling on as many draws to 139 and 118, more SFT for half as long to
# 128 and 126: over both seeds GRPO minus rejection sampling is -0.038 [-0.086, +0.010], minus more SFT -0.035 [-0.070, +0.000]. In the model's own form, a boxed answer, thirty-two steps of GRPO raise
# right answers from 330 to 362 of 1,319, rejection sampling on as many draws to 357: the difference is +0.004 [-0.020, +0.029]. SFT on worked solutions
# lowers them to 286. All of the gain is in the 349 problems whose first answer was cut off: 4 right, then 49 and 39.
#
# **Runs/needs.** Committed rows: those of notebooks 12 and 37, and of recipes `coder-rl`, `coder-rl-gsm8k` and `coder-rl-boxed` (`reports/frozen/rl_pays`), some two hours of two cores each. Nothing is
# trained here. A few seconds.
#
# Previous: [38 rl over your own functions](38_rl_over_your_own_functions.ipynb)

# %% tags=["parameters"]
seed = 0

# %%
import numpy as np
import pandas as pd
import torch

from codechat.core.atomic_files import read_rows
from codechat.evaluation import diagnose
from codechat.evaluation.intervals import hierarchical_interval, paired_bootstrap, wilson_interval
from codechat_lab.reports import articles, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks.coding.rewards import tiered

frozen = run_frames.frozen_dir()
rows = pd.DataFrame(read_rows(frozen / "rl_pays" / "rows.jsonl"))
sums = pd.DataFrame(read_rows(frozen / "rl_pays" / "gsm8k.jsonl"))
BLUE, ORANGE, GREEN = (OKABE_ITO[c] for c in ("blue", "orange", "green"))

# %% [markdown]
# ## The verdict, before any training
#
# 64 training problems of MBPP, eight completions each at temperature 1, at most 128 tokens ([notebook 12](12_why_mbpp_died.ipynb)). The 0.5 B is the fifth SFT here, and the sixth there. By pass@1 a problem set is DEAD below 0.01, WEAK
# below 0.05, else LIVE. The tiered reward pays something for a program that runs; groups with variance are those whose eight rewards differ.

# %%
MODELS = {"nano": "nano", "released/smollm2-tools": "SmolLM2 after SFT", "coder/sft": "0.5 B after SFT"}
tried = pd.DataFrame(read_rows(frozen / "mbpp" / "pretrained.jsonl"))
nano = pd.DataFrame(read_rows(frozen / "mbpp" / "per_problem.jsonl")).assign(checkpoint="nano")
tried = pd.concat([nano, tried]).groupby("checkpoint")
verdicts = {}
for checkpoint, name in MODELS.items():
    some = tried.get_group(checkpoint)
    right = torch.tensor([[i < c for i in range(8)] for c in some["c"]])
    paid = torch.tensor([[tiered(tier, 1, 2) for tier, n in tiers.items() for _ in range(n)] for tiers in some["tiers"]])
    by_tiers, solved = diagnose.judge(paid, right), float(right.double().mean())
    verdict = diagnose.verdict_of(solved, solved, 0.01, 0.05)
    verdicts[name] = {"pass@1": round(solved, 3), "verdict by pass@1": verdict, "groups with variance": by_tiers.effective_groups, "by the tiered reward": by_tiers.verdict}
pd.DataFrame(verdicts).T

# %% [markdown]
# ## What RL gained
#
# SmolLM2's rows are those of [notebook 37](37_what_tiered_rewards_unlearn.ipynb): all weights on a GPU, 257 test problems of MBPP sanitized, controls SFT on the reference solutions. nano has
# no row: its groups have no gradient, and a loop on a DEAD task does not start.
#
# The 0.5 B by recipe `coder-rl`, in new adapters: here and below it begins from the fifth SFT on calls, which was `released/coder-tools` then. 136 of 374 training problems are
# solved in one to three of four tries. From these GRPO draws 20 steps of 8 problems x 8 completions; rejection sampling draws as many and learns the right ones; SFT on the reference solutions is the cheapest. Judged greedily on the 500 test problems
# of MBPP. The comparison was written down before the run ([the setting](../docs/experiments/pretrained.md)).

# %%
older = pd.DataFrame(read_rows(frozen / "sums_and_programs" / "answers.jsonl")).dropna(subset="right")
older = older[older["sampling"] == "greedy"].set_index("run")["right"]
SMOLLM2 = {"start": "mbpp SFT on calls", "SFT on reference solutions": "mbpp SFT on references", "GRPO, tiered": "mbpp tiered 0", "GRPO, binary": "mbpp binary 0"}
judged = rows[rows["what"] == "judged"].set_index(["seed", "task", "arm"])
ARMS = {"start": "start", "solutions": "SFT on reference solutions", "rejection": "rejection sampling", "tiered": "GRPO, tiered", "binary": "GRPO, binary"}


def answered(right):
    return [int(digit) for digit in right]


found = {("SmolLM2, MBPP sanitized", arm): answered(older[run]) for arm, run in SMOLLM2.items()}
for (draw, task, arm), row in judged.iterrows():
    found[f"0.5 B, {task}, seed {draw}", ARMS[arm]] = answered(row["right"])

# %%
table = []
for (what, arm), right in found.items():
    first = found[what, "start"]
    share = wilson_interval(sum(right), len(right))
    gain = "" if arm == "start" else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired_bootstrap(first, right, seed=seed))
    table.append({"model and problems": what, "training": arm, "problems": len(right), "right, greedily": str(share), "minus the start": gain})
pd.DataFrame(table).set_index(["model and problems", "training"])

# %% [markdown]
# ## What the loops saw
#
# Shares of a step's 64 completions, smoothed over five steps, seed 1. Before you look: the tiered reward pays for running programs and for each test that passes. Which share grows, that of right
# programs or of nearly right ones?

# %%
SHARES = (("all_passed", GREEN, "passes all tests"), ("some_passed", ORANGE, "passes some"), ("none_passed", BLUE, "runs, passes none"))
arms = ("tiered", "binary", "rejection")
fig, axes = new_figure("What the loops saw", cols=len(arms), size=(2.9 * len(arms), 2.9), sharey=True)
for ax, arm in zip(axes[0], arms):
    mine = rows[(rows["what"] == "training") & (rows["arm"] == arm) & (rows["seed"] == 1)]
    for tier, colour, name in SHARES:
        ax.plot(mine["step"], mine[tier].ewm(span=5).mean(), color=colour, label=name)
    ax.set(ylim=(0, 1))
    finish(ax, x=f"step, {ARMS[arm]}", y="share of completions" if ax is axes[0, 0] else None, loc="upper left")
fig

# %%
lengths = rows[rows["what"] == "judged"].assign(arm=lambda part: part["arm"].map(ARMS))
lengths = lengths.set_index(["task", "seed", "arm"])[["n", "tokens", "cut_off"]].sort_index().astype({"n": int, "cut_off": int})
lengths.rename(columns={"tokens": "tokens of an answer", "cut_off": "answers cut off"})

# %% [markdown]
# ## A form that the model does not know: GSM8K
#
# After SFT on calls the 0.5 B reckons in its own form and fails in the form of the five rewards: reasoning and answer in tags. Recipe `coder-rl-gsm8k` gives GRPO these
# rewards (2 for the right number, 2 more for its form), 20 steps of 8 training problems x 8 completions. Rejection sampling draws as many and learns the right ones. SFT on
# 60 batches of worked solutions in that form is the cheapest. Judged greedily on 256 of the 1,319 test problems; the [setting](../docs/experiments/pretrained.md) was written before. In
# the form r1_zero the model is DEAD, so no loop was started on it. Before you look: what does GRPO learn first, and what does it cost?

# %%
print(sums[sums["what"] == "verdict"][["form", "pass@1", "effective_groups", "n_groups"]].to_string(index=False))
FORMS = ARMS | {"rewards": "GRPO, five rewards"}
judged_sums = sums[sums["what"] == "judged"].set_index(["task", "arm"])
reckoned = {arm: answered(row["right"]) for arm, row in judged_sums.loc["GSM8K test, five rewards"].iterrows()}
table = judged_sums.loc["GSM8K test, five rewards"][["n", "tokens", "cut_off", "in_form"]].rename(index=FORMS).astype({"n": int, "cut_off": int, "in_form": int})
table["right, greedily"] = [str(wilson_interval(sum(right), len(right))) for right in reckoned.values()]
table.rename(columns={"tokens": "tokens of an answer", "cut_off": "cut off", "in_form": "in the form"})

# %%
fig, axes = new_figure("The form comes first", cols=2, size=(7.2, 2.9), sharey=True)
for ax, arm in zip(axes[0], ("rewards", "rejection")):
    mine = sums[(sums["what"] == "training") & (sums["arm"] == arm)]
    in_form = mine["format_only"] + mine["format_and_answer"]
    for shares, colour, name in ((in_form, BLUE, "in the form"), (mine["exact_match"], GREEN, "right")):
        ax.plot(mine["step"], shares.ewm(span=5).mean(), color=colour, label=name)
    ax.set_ylim(0, 1)
    finish(ax, x=f"step, {FORMS[arm]}", y="share of completions" if ax is axes[0, 0] else None, loc="upper left")
fig

# %% [markdown]
# ## The same rewards where the form is known
#
# After that SFT nine of ten answers have the form, so most of what is left to earn is the number. GRPO on the same rewards, 16 steps; the controls are rejection sampling on as many draws, and SFT that
# goes on for half as long, on the worked solutions in another order. Two seeds, each from an SFT of its own. Judged greedily on the first 512 test problems, and written down before. Before you look: does GRPO reckon better now?

# %%
after = pd.DataFrame(read_rows(frozen / "rl_pays" / "gsm8k_after.jsonl"))
AFTER = {"start": "SFT, 60 steps", "rewards": "then GRPO, 16 steps", "solutions": "then SFT, 66 steps", "rejection": "then rejection sampling, 16 steps"}
ended = after[after["what"] == "judged"].set_index(["seed", "arm"])
went_on, gains = {0: {}, 1: {}}, {}
for (draw, arm), row in ended.iterrows():
    went_on[draw][arm] = answered(row["right"])
table = ended[["n", "tokens", "cut_off", "in_form"]].rename(index=AFTER, level="arm").astype({"n": int, "cut_off": int, "in_form": int})
table["right, greedily"] = [str(wilson_interval(sum(right), len(right))) for arms_of in went_on.values() for right in arms_of.values()]
for draw, arms_of in went_on.items():
    gains |= {(draw, arm): paired_bootstrap(arms_of["start"], right, seed=seed) for arm, right in arms_of.items() if arm != "start"}
table["minus the first"] = ["{:+.3f} [{:+.3f}, {:+.3f}]".format(*gains[key]) if key in gains else "" for key in ended.index]
table.rename(columns={"tokens": "tokens of an answer", "cut_off": "cut off", "in_form": "in the form"})

# %% [markdown]
# ## The model's own form
#
# With a boxed answer a quarter is right from the start, and nothing of the reward is for a form. GRPO, 32 steps at temperature 0.7, and rejection sampling on as many draws, both from that SFT on calls;
# SFT on the worked solutions with their answer boxed. Judged greedily on all 1,319 test problems, and written down before (48 steps then; stopped at 32). Before you look: which
# of the three makes answers shorter, and which makes them right?

# %%
boxed = pd.DataFrame(read_rows(frozen / "rl_pays" / "gsm8k_boxed.jsonl"))
OWN = {"start": "start", "boxed": "GRPO, 32 steps", "rejection": "rejection sampling, 32 steps", "solutions": "SFT on worked solutions, 80 steps"}
in_own = boxed[boxed["what"] == "judged"].set_index("arm")
own = {arm: answered(row["right"]) for arm, row in in_own.iterrows()}
table = in_own[["n", "tokens", "cut_off"]].rename(index=OWN).astype({"n": int, "cut_off": int})
table["right, greedily"] = [str(wilson_interval(sum(right), len(right))) for right in own.values()]
own_gains = {arm: paired_bootstrap(own["start"], right, seed=seed) for arm, right in own.items() if arm != "start"}
table["minus the start"] = ["", *("{:+.3f} [{:+.3f}, {:+.3f}]".format(*gain) for gain in own_gains.values())]
table.rename(columns={"tokens": "tokens of an answer", "cut_off": "cut off"})

# %%
fig, axes = new_figure("Right answers stay where they were", size=(5.4, 2.9))
ax = axes[0, 0]
for arm, colour in (("boxed", GREEN), ("rejection", ORANGE)):
    mine = boxed[(boxed["what"] == "training") & (boxed["arm"] == arm)]
    ax.plot(mine["step"], mine["exact_match"].ewm(span=5).mean(), color=colour, label=OWN[arm])
ax.set_ylim(0, 0.6)
finish(ax, x="step", y="right, share of completions", loc="upper left")
fig

# %% [markdown]
# ## What was tried, by the comparisons that were written down
#
# Right answers to the test problems: GRPO minus the better of the two controls, paired by problem. It pays from 0.05 on, with an interval above 0. Beside these, the form r1_zero of GSM8K, and MBPP on nano, were DEAD before any
# training.

# %%
by_test = {}
for (draw, task, arm), row in judged.iterrows():
    by_test.setdefault((task, draw), {})[arm] = answered(row["right"])
programs = {draw: by_test["MBPP test", draw] for draw in (0, 1)}
mbpp = programs[0]
TRIALS = [(f"MBPP, {arm} reward", draw, programs[draw], arm) for arm, draw in (("tiered", 0), ("tiered", 1), ("binary", 1))]
TRIALS += [("GSM8K, five rewards", 0, reckoned, "rewards")]
TRIALS += [("GSM8K, five rewards after SFT on their form", draw, went_on[draw], "rewards") for draw in (0, 1)]
TRIALS += [("GSM8K, its own form", 0, own, "boxed")]

# %%
minus, tried_rl = {}, []
for trial, draw, arms_of, arm in TRIALS:
    better = max(("solutions", "rejection"), key=lambda control: sum(arms_of[control]))
    found_gain = minus[trial, draw] = paired_bootstrap(arms_of[better], arms_of[arm], seed=seed)
    line = {"trial": trial, "seed": draw, "problems": len(arms_of[arm]), "start": sum(arms_of["start"]), "GRPO": sum(arms_of[arm])}
    line |= {control: sum(arms_of[control]) for control in ("solutions", "rejection")}
    pays = "yes" if found_gain.value >= 0.05 and found_gain.lo > 0 else "no"
    tried_rl.append(line | {"GRPO minus the better control": "{:+.3f} [{:+.3f}, {:+.3f}]".format(*found_gain), "pays": pays})
tried_rl = pd.DataFrame(tried_rl).rename(columns=ARMS)
tried_rl.set_index(["trial", "seed"])

# %% [markdown]
# Over seeds and problems, where two seeds were trained:

# %%
both = {}
for trial, arm, of_seeds in (("MBPP", "tiered", programs), ("GSM8K after SFT", "rewards", went_on)):
    for control in ("start", "solutions", "rejection"):
        apart = [np.subtract(arms_of[arm], arms_of[control]) for arms_of in of_seeds.values()]
        both[trial, control] = hierarchical_interval(apart, clusters=range(len(apart[0])), seed=seed)
        print("both seeds, {}: GRPO minus {}: {:+.3f} [{:+.3f}, {:+.3f}]".format(trial, ARMS[control], *both[trial, control]))

# %%
elsewhere = by_test["HumanEval", 1]
kept = {control: paired_bootstrap(elsewhere[control], elsewhere["tiered"], seed=seed) for control in ("solutions", "rejection", "start")}
for control, found_gain in kept.items():
    print("HumanEval, seed 1: GRPO, tiered, minus {}: {:+.3f} [{:+.3f}, {:+.3f}]".format(ARMS[control], *found_gain))

# %% [markdown]
# So the verdict tells whether there is a gradient, and not what of the reward is nearest. On MBPP it leads to right programs, in twenty steps as many as the reference solutions give in a third of its time; on
# HumanEval, one seed, they cost programs, and it shows no loss. On
# GSM8K one of 512 tries was right, and what paid was the form: answers of one line. `diagnose` had called that LIVE because of the one; it says PARTIAL below 1 % now. Where the form is known, GRPO cuts fewer answers off and reckons as before; learning from the right ones of as
# many draws makes it reckon better in one of two seeds. Not done: a second seed from the start itself, more steps.
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `codechat run coder-rl-boxed --seed 1` | is +0.024 over the start more than the problems' chance? It begins from the sixth SFT now: judge that start too | not tried |
# | `max_steps = 50` in a copy of the recipe | do more steps part GRPO from rejection sampling? | not tried |
#
# The last cell asserts the Result.

# %%
assert [row["verdict by pass@1"] for row in verdicts.values()] == ["DEAD", "WEAK", "LIVE"]
right = {arm: sum(answers) for arm, answers in mbpp.items()}
assert right == {"start": 166, "tiered": 189, "rejection": 181, "solutions": 198}
assert set(tried_rl["pays"]) == {"no"} and paired_bootstrap(mbpp["start"], mbpp["tiered"], seed=seed).lo > 0
assert {arm: sum(answers) for arm, answers in programs[1].items()} == {"start": 167, "tiered": 203, "binary": 193, "rejection": 182, "solutions": 192}
assert both["MBPP", "solutions"].lo < 0 < both["MBPP", "solutions"].hi and kept["solutions"].lo > 0 > kept["rejection"].lo
whole = answered(judged.sort_index().loc[(0, "MBPP test", "start"), "ended"])
print("of problems whose first answer ended:", sum(whole), {arm: sum(r for r, ended in zip(mbpp[arm], whole) if ended) for arm in mbpp})
assert (rows[rows["what"] == "rates"]["right"].iloc[0].count("0"), sum(whole)) == (176, 287)

# %%
sums_right = {arm: sum(right) for arm, right in reckoned.items()}
assert sums_right == {"rewards": 16, "solutions": 52, "rejection": 9, "start": 2} and minus["GSM8K, five rewards", 0].hi < 0
assert {arm: sum(right) for arm, right in went_on[0].items()} == {"start": 107, "rewards": 108, "solutions": 128, "rejection": 139}
assert {arm: sum(right) for arm, right in went_on[1].items()} == {"start": 118, "rewards": 110, "solutions": 126, "rejection": 118}
assert {arm: sum(right) for arm, right in own.items()} == {"start": 330, "boxed": 362, "rejection": 357, "solutions": 286}
assert minus["GSM8K, its own form", 0].lo < 0 < minus["GSM8K, its own form", 0].hi and own_gains["solutions"].hi < 0
ended_first = answered(in_own.loc["start", "ended"])
print("of those cut off at first:", ended_first.count(0), {arm: sum(r for r, end in zip(right, ended_first) if not end) for arm, right in own.items()})
