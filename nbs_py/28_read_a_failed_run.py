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
# # Four runs that failed, and the metric that shows each cause
#
# **Question.** Four RL runs end with a policy that cannot do its task. Which instrument names the cause of
# each?
#
# **Result.** The loss shows nothing: its size stays below 0.15 in all five runs. Four rules on other metrics
# name the four causes and pass the healthy run, for each of five seeds. Exact match ends above 0.5 in the
# healthy run, and below 0.3 in the others.
#
# **Runs/needs.** No runs and no data: five toy runs in a temporary folder, about 20 seconds of one core. Claims are
# bands over five seeds.
#
# Before: [the museum](20_museum_stop_mask.ipynb). The metrics of a
# larger run: [did it learn?](08_did_it_learn.ipynb).
#
# Previous: [27 museum silent resume](27_museum_silent_resume.ipynb) · Next: [29 a reward with a leak](29_a_reward_with_a_leak.ipynb)

# %% tags=["parameters"]
seed = 0
steps = 60  # of the healthy run; D takes two thirds of them, A, B and C a quarter
high_lr = 1.0
low_lr = 2e-7

# %%
import contextlib
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd

from codechat import reinforce, tasks
from codechat.core import config
from codechat.runs import paths, run
from codechat.tasks.toy import CLASSES, ToyTask
from codechat_lab.reports.style import OKABE_ITO, finish, label_of, new_figure

# %%
run.ROOT = paths.ROOT = Path(tempfile.mkdtemp())  # these runs are temporary
settings = dict(max_steps=steps, group_size=16, schedule="constant", diagnose_groups=0, eval_every=0, eval_examples=4, save_every=0,
                log_rollouts_every=20, seed=seed, dead_patience=10_000)
cfg = config.resolve(reinforce.ReinforceConfig, "toy", presets=reinforce.RUN_PRESETS, overrides=settings)


# %% [markdown]
# ## The task, and two broken rewards
#
# The toy task names a class of characters (`digit`, `upper`, `lower`, `punct`), and the policy must write eight of
# that class. Two of the four failed runs have a broken reward.

# %%
class OneValue(ToyTask):
    """Every answer scores the same."""

    name = "one_value"

    def score(self, problem, completion):
        return replace(super().score(problem, completion), reward=0.5)


# %%
class AlwaysDigits(ToyTask):
    """Pays for digits, whatever was requested."""

    name = "always_digits"

    def score(self, problem, completion):
        found = sum(c in CLASSES["digit"] for c in completion) / 8
        return replace(super().score(problem, completion), reward=min(1.0, found))


# %%
tasks.TASKS |= {"one_value": OneValue, "always_digits": AlwaysDigits}
for broken in (OneValue, AlwaysDigits):  # the check of reference solutions stops both before training; skip it here
    broken.no_references = "for this notebook"


def train(name: str, **changes: object) -> run.Run:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return reinforce.train(replace(cfg, run_name=name, **changes))


# %%
few = steps // 4  # what is wrong with A, B and C shows at once
runs = {
    "A": train("a", task="one_value", max_steps=few),
    "B": train("b", lr=high_lr, max_steps=few),
    "C": train("c", lr=low_lr, max_steps=few),
    "D": train("d", task="always_digits", max_steps=steps * 2 // 3),
    "healthy": train("healthy"),
}
curves = {name: found.metrics().sort_values("step") for name, found in runs.items()}

# %% [markdown]
# ## What the loss says
#
# Nothing. A policy-gradient loss does not measure progress: advantages of a group sum to 0, so its value is near 0
# whatever the policy does. Means of each run's last five steps:

# %%
SHOWN = ["policy_loss", "reward_mean", "exact_match", "entropy", "frac_zero_std_groups", "grad_norm"]
last = pd.DataFrame({name: rows[SHOWN][-5:].mean() for name, rows in curves.items()}).T
last.round(4)

# %% [markdown]
# ## Find the causes
#
# **Before you read on: name the cause of A, B, C and D from these curves.** Which number do you look at first?
# A, B and C were stopped early.

# %%
fig, axes = new_figure("Four runs fail and one learns; the loss is near 0 in all of them", rows=2, cols=3, size=(7.6, 4.6))
for ax, metric in zip(axes.flat, SHOWN):
    for (name, rows), colour in zip(curves.items(), ("vermilion", "orange", "purple", "sky", "green")):
        ax.plot(rows["step"], rows[metric], color=OKABE_ITO[colour], label=name, linewidth=2.4 if name == "healthy" else 1.2)
    ax.set_yscale("symlog", linthresh=1e-3) if metric == "grad_norm" else None
    finish(ax, x="step", y=label_of(metric), legend=metric == "exact_match", loc="upper left")
fig


# %% [markdown]
# ## The answers
#
# - **A: every answer scores the same.** `frac_zero_std_groups` is 1 from the first step: no group has variance,
#   so no advantage and no gradient. Look at the reward's parser first. `codechat diagnose` says DEAD before the
#   first step; it was switched off here.
# - **B: the learning rate is too high.** The entropy is gone within five steps: the policy writes one text for
#   every request. Its groups have no variance either, but only after the entropy fell. That order tells A from B.
# - **C: the learning rate is too low.** Groups have variance, the gradient is as large as the healthy run's at its
#   start, and the entropy does not move.
# - **D: the reward pays for something else.** The reward rises as in a healthy run. Exact match ends near 0.25: only
#   the requests for digits are right. Exact match is logged, never optimized, for this case.

# %%
def cause(rows: pd.DataFrame) -> str:
    """The cause, from the first step and the last five."""
    end, start, low = rows[-5:].mean(numeric_only=True), rows.iloc[0], rows["exact_match"].iloc[-1] < 0.3
    if rows["frac_zero_std_groups"].min() == 1:
        return "no group ever had variance: all answers get the same reward"
    if end["entropy"] < 0.1 * start["entropy"] and low:
        return "the entropy is gone: the learning rate is too high"
    if abs(end["entropy"] / start["entropy"] - 1) < 0.01 and end["grad_norm"] > 0:
        return "a gradient, and a policy that does not move: the learning rate is too low"
    if end["reward_mean"] > start["reward_mean"] + 0.3 and low:
        return "reward rises without exact match: the reward pays for something else"
    return "healthy"


# %%
named = {name: cause(rows) for name, rows in curves.items()}
with pd.option_context("display.max_colwidth", None):
    display(pd.Series(named, name="cause").to_frame())

# %% [markdown]
# ## Read samples
#
# The best answers of run D at its last logged step: digits, whatever was requested.

# %%
rows = pd.DataFrame(runs["D"].samples())
rows = rows[(rows["step"] == rows["step"].max()) & (rows["which"] == "best")]
rows[["request", "completion", "reward"]].drop_duplicates("request").set_index("request")

# %% [markdown]
# **Try this.** Answer the question first. Outcomes of seed 0.
#
# | change | question | outcome |
# |---|---|---|
# | `high_lr = 0.1` | does a tenth of B's rate save it? | <details><summary>outcome</summary>No: the entropy is gone after 15 steps; the same rule names it.</details> |
# | `low_lr = 2e-4` | does C learn at a thousand times its rate, a twentieth of the healthy one? | <details><summary>outcome</summary>Not in 15 steps: entropy 5.552, then 5.550; the same rule names it.</details> |
#
# The last cell asserts the Result: the bands hold for seeds 0 to 4.

# %%
words = {"A": "variance", "B": "entropy", "C": "does not move", "D": "exact match", "healthy": "healthy"}
assert all(word in named[name] for name, word in words.items()), named
assert max(rows["policy_loss"].abs().max() for rows in curves.values()) < 0.15
assert last.loc["healthy", "exact_match"] > 0.5 and (last.drop("healthy")["exact_match"] < 0.3).all()
