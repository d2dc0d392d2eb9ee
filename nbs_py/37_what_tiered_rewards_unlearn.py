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
# # SFT learned sums; tiered rewards made the model forget programs
#
# **Question.** SmolLM2-135M solves no problem of GSM8K and few of MBPP. What do SFT and then GRPO change in some minutes of one H100, compared with
# greedy decoding and with SFT that goes on?
#
# **Result.** SFT on GSM8K's worked solutions brings 117 of 1,319 test problems (none before), and 42 and 41
# steps of GRPO, two seeds, add nothing greedily: 116 and 121. On MBPP the tiered reward more than doubles in
# 148 steps, while greedily solved problems fall from 29 to 1 and 3 of 257: the policy returns what one of the
# shown tests expects. Paid for right or wrong only, 21 and 14 steps leave 28 and 29. Honest programs pay more
# from 33 % solved on. A model of 0.5 B, right in 50 % of its tries at its training problems, keeps to programs under
# the same reward: over the 20 steps of its run the share that passes some tests stays under 0.3.
#
# **Also.** On GSM8K at temperature 1 the first seed gains 0.031 [0.014, 0.048] and the second 0.013 [-0.003,
# 0.028]: greedy decoding had that already. SFT that goes on overfits: 92. RL on the tiered reward now warns of
# such a collapse, here at steps 120 and 100.
#
# **Runs/needs.** Committed rows (`reports/frozen/sums_and_programs`) of trainings that shared one H100, five at a time, in float32 weights and bfloat16 products. Nothing is
# trained here. A few seconds.
#
# Previous: [36 a tool caller in one sitting](36_a_tool_caller_in_one_sitting.ipynb) · Next: [38 rl over your own functions](38_rl_over_your_own_functions.ipynb)

# %% tags=["parameters"]
seed = 0
tests = 3  # that a request of MBPP shows

# %%
import pandas as pd

from codechat.core.atomic_files import read_rows
from codechat.evaluation.intervals import bootstrap_interval, paired_bootstrap
from codechat.training.trends import warnings
from codechat_lab.reports import articles, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks.coding.rewards import tiered

kept = run_frames.frozen_dir() / "sums_and_programs"
curves = pd.DataFrame(read_rows(kept / "curves.jsonl"))
answers = pd.DataFrame(read_rows(kept / "answers.jsonl"))
BLUE, ORANGE, GREEN = (OKABE_ITO[c] for c in ("blue", "orange", "green"))

# %% [markdown]
# ## The commands
#
# All weights are trained. GSM8K without turns, in DeepSeek-R1-Zero's layout; MBPP from `released/smollm2-tools`, which had SFT on calls and code.
#
#     codechat data reasoning --source hub --template r1_zero --max-examples 10000 --out r1
#     codechat import data/hub/smollm2 --tags raw --run-name raw
#     codechat sft --init-from raw --data-dir r1 --optimizer adamw --lr 2e-4 --seq-len 512 --device-batch-size 16 --grad-accum 2 --max-steps 360 --run-name gsft
#     codechat sft --init-from gsft --data-dir r1 --optimizer adamw --lr 1e-4 --schedule cosine --seq-len 512 --device-batch-size 16 --grad-accum 2 --max-steps 360 --run-name more
#     codechat grpo --init-from gsft --task gsm8k:template=r1_zero --data-dir r1 --device-batch-size 64 --group-size 8 --max-new-tokens 256 --lr 1e-5 --row-tokens 1024
#     codechat grpo --init-from released/smollm2-tools --task mbpp --data-dir hub --device-batch-size 32 --group-size 8 --max-new-tokens 160 --lr 1e-5 --row-tokens 1024
#
# GSM8K's reward is 1 for a right answer in the layout, else 0. MBPP's default is tiered: little for code that parses and runs, then a share for every test that passes, 1 for all.
# Before you look: which of the two curves of reward will rise more, and what will the other curve in its panel do?

# %%
fig, axes = new_figure("GSM8K: SFT's loss rises again, and GRPO's reward hardly does", cols=2, size=(7.2, 2.9))
for run, colour, before in (("gsm8k SFT", BLUE, 0), ("gsm8k SFT goes on", ORANGE, 360)):
    some = curves[(curves["run"] == run) & (curves["what"] == "held out")]
    axes[0, 0].plot(some["step"] + before, some["heldout_loss/worked"], "o-", color=colour, label=run.removeprefix("gsm8k "))
finish(axes[0, 0], x="step", y="held-out loss, nats per token")
for number, colour in ((0, BLUE), (1, ORANGE)):
    mine = curves[curves["run"] == f"gsm8k GRPO {number}"]
    trained, held = (mine[mine["what"] == what] for what in ("training", "held out"))
    axes[0, 1].plot(trained["step"], trained["reward_mean"].ewm(span=10).mean(), color=colour, label=f"training, seed {number}")
    axes[0, 1].plot(held["step"], held["pass@1"], "o", color=colour, label=f"256 held-out, seed {number}")
axes[0, 1].set_ylim(0, 0.2)
finish(axes[0, 1], x="step of GRPO", y="share right, temperature 1", loc="upper left")
fig

# %% [markdown]
# ## GSM8K: right of the test split
#
# Greedily on all 1,319 problems, and four answers at temperature 1 to each of 400. Differences are paired by problem.

# %%
judged = answers.dropna(subset="right").set_index(["run", "sampling"])


def shares(run, sampling):
    """Of each problem, the share of its answers that are right."""
    row = judged.loc[(run, sampling)]
    return [int(count) / row["n"] for count in row["right"]]


# %%
def compared(runs):
    """Share right of each run, with its difference to the first run, greedily and at temperature 1."""
    columns = {}
    for sampling in ("greedy", "T=1"):
        found = {run: shares(run, sampling) for run in runs}
        columns[sampling, "right"] = {run: str(bootstrap_interval(values, seed=seed)) for run, values in found.items()}
        columns[sampling, "minus the first"] = {run: str(paired_bootstrap(found[runs[0]], found[run], seed=seed)) for run in runs[1:]}
    return pd.DataFrame(columns).loc[runs].fillna("")


# %%
SUMS = ["gsm8k SFT", "gsm8k GRPO 0", "gsm8k GRPO 1", "gsm8k SFT goes on"]
compared(SUMS)

# %% [markdown]
# At temperature 1 GRPO comes near to what greedy decoding gave before it: the cheapest control explains the gain. Forty steps in six minutes are few; that longer training
# adds nothing is not shown.
#
# ## MBPP: two rewards

# %%
fig, axes = new_figure("Tiered: the reward rises, and after step 90 the solved problems are gone", cols=2, size=(7.2, 2.9), sharey=True)
LINES = (("reward_mean", BLUE, "reward"), ("tier/some_passed", ORANGE, "passes some tests"), ("exact_match", GREEN, "passes all"))
for ax, reward in zip(axes[0], ("tiered", "binary")):
    for number, dash in ((0, "-"), (1, "--")):
        mine = curves[curves["run"] == f"mbpp {reward} {number}"]
        trained, held = (mine[mine["what"] == what] for what in ("training", "held out"))
        for column, colour, name in LINES:
            ax.plot(trained["step"], trained[column].ewm(span=10).mean(), dash, color=colour, label=None if number else name)
        ax.plot(held["step"], held["pass@1"], "o", color=GREEN, markersize=3.5)
    ax.set(ylim=(0, 1), xlim=(-3, 152))
    finish(ax, x=f"step, {reward} reward", y="share of answers" if reward == "tiered" else None, loc="upper left")
fig

# %%
PROGRAMS = ["mbpp SFT on calls", "mbpp SFT on references"] + [f"mbpp {reward} {number}" for reward in ("tiered", "binary") for number in (0, 1)]
table = compared(PROGRAMS)
table["T=1", "one of eight"] = [f"{pd.Series(shares(run, 'T=1')).gt(0).mean():.3f}" for run in PROGRAMS]
table

# %% [markdown]
# All 257 problems of MBPP sanitized's test split: greedily, and eight answers at temperature 1. The points in the figure are 90 validation problems at temperature 1. `SFT on references`,
# three epochs over the solutions of 329 training problems, is the cheap control. Tiered ran 148 steps, binary 21 and 14: that is not long enough to compare what they gain. But
# a constant earns nothing by the binary rule.
#
# ## What the policy writes
#
# The best of eight answers to a training problem, seed 0 of the tiered reward.

# %%
articles.table(
    answers.dropna(subset="completion").astype({"step": int}),
    {name: name for name in ("step", "problem", "reward", "tier")} | {"completion": ("answer", articles.VERBATIM)},
)

# %% [markdown]
# The request shows three tests, and each that passes pays. How often must a policy solve a problem for honest programs to pay more than a constant that one test expects, if a wrong
# program earns what a running one does?

# %%
constant, wrong, solved = tiered("some_passed", 1, tests), tiered("none_passed", 0, tests), tiered("all_passed", tests, tests)
needed = (constant - wrong) / (solved - wrong)
print(f"constant {constant:.2f}, wrong program {wrong:.2f}: honest programs pay more from {needed:.0%} solved on; the policy began at {sum(shares(PROGRAMS[0], 'T=1')) / 257:.0%}")

# %% [markdown]
# ## The same reward on a base that programs
#
# Qwen2.5-Coder-0.5B-Instruct, after SFT on calls, trains on the problems of MBPP that it solves in one to three of four tries ([notebook 39](39_when_rl_pays.ipynb)).
# Before you look: on which side of that share does it begin, and which curve rises?

# %%
larger = pd.DataFrame(read_rows(run_frames.frozen_dir() / "rl_pays" / "rows.jsonl"))
tries = [int(count) for count in larger[larger["what"] == "rates"]["right"].iloc[0]]
begins = pd.Series([count / 4 for count in tries if 0 < count < 4]).mean()
steps = larger[(larger["what"] == "training") & (larger["arm"] == "tiered") & (larger["seed"] == 0)].set_index("step")
fig, axes = new_figure(f"A model that begins at {begins:.0%} goes on solving", size=(4.2, 2.9))
for column, colour, name in (("reward_mean", BLUE, "reward"), ("some_passed", ORANGE, "passes some tests"), ("all_passed", GREEN, "passes all")):
    axes[0, 0].plot(steps[column].ewm(span=10).mean(), color=colour, label=name)
axes[0, 0].set_ylim(0, 1)
finish(axes[0, 0], x="step, tiered reward, 0.5 B", y="share of answers")
print(f"{len(steps)} steps; at most {steps['some_passed'].max():.2f} pass some tests")
fig

# %% [markdown]
# It begins on the other side. Twenty steps are few beside the 148 above, so that it stays there is not shown, and by its own controls that run gained nothing that they do not give.
#
# ## What would have said so
#
# RL compares each evaluation with the earlier ones: a reward that is higher while pass@1 is lower, each beyond both intervals, is said at once. On the committed rows:

# %%
said = {}
for run in PROGRAMS[2:] + SUMS[1:]:
    evals = curves[(curves["run"] == run) & (curves["what"] == "held out")]
    spoken = [(int(evals["step"].iloc[n]), warnings(evals[: n + 1])) for n in range(len(evals))]
    said[run] = next(((step, words[0]) for step, words in spoken if words), None)
    print(f"{run}: {'step {}: {}'.format(*said[run]) if said[run] else 'nothing'}")

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `tests = 10` | from which share of solved problems on do honest programs pay more? | <details><summary>outcome</summary>10 %: more tests make a rung smaller; this policy began at 4 %</details> |
#
# The last cell asserts the Result.

# %%
hits = {run: round(sum(shares(run, "greedy"))) for run in SUMS + PROGRAMS}
means = {run: round(sum(shares(run, "T=1")) / len(shares(run, "T=1")), 3) for run in SUMS}
assert list(hits.values()) == [117, 116, 121, 92, 29, 25, 1, 3, 28, 29], hits
assert [means[run] for run in SUMS[:2]] == [0.06, 0.091], means
assert [said[run][0] for run in PROGRAMS[2:4]] == [120, 100] and not any(said[run] for run in PROGRAMS[4:] + SUMS[1:3])
print("steps:", curves[curves["what"] == "training"].groupby("run")["step"].max().to_dict())
for run in PROGRAMS[2:4]:
    rewards = curves[(curves["run"] == run) & (curves["what"] == "training")]["reward_mean"]
    assert rewards.tail(14).mean() > 2.5 * rewards.head(14).mean()
    print(f"{run}: mean reward of the first and last 14 steps {rewards.head(14).mean():.2f}, {rewards.tail(14).mean():.2f}")
print(f"greedily right: {hits}, of {len(shares(SUMS[0], 'greedy')):,} and {len(shares(PROGRAMS[0], 'greedy'))}")
assert round(needed, 2) == 0.33 and round(begins, 2) == 0.5 and needed < begins and steps["some_passed"].max() < 0.3
