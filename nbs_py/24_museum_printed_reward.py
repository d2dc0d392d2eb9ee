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
# # Museum: a program could print its own reward
#
# **Question.** The original ran a program and its tests in one script and read the reward from the last line
# `REWARD x` on its stdout. What earns that reward, what does it reject, and what would RL have learned?
#
# **Result.** Five programs that solve nothing each earn the full reward, and a correct program earns 0 as soon
# as a test has two lines. In a group of eight answers, 71 % of the positive advantage then goes to forging. The
# sandbox rewards only the correct ones and gives a reason for each of the others.
#
# **Runs/needs.** Linux on x86-64 with Landlock. Even with the defect on, programs run inside
# the sandbox's isolation: they forge the verdict and cannot harm the machine.
#
# Previous: [23 museum quote parser](23_museum_quote_parser.ipynb) · Next: [25 museum trained on test](25_museum_trained_on_test.ipynb)

# %% tags=["parameters"]
isolation = "auto"

# %%
import pandas as pd
import torch

from codechat.rl import advantages
from codechat.tasks import Problem
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.sandbox.pool import Pool, Program
from codechat_lab.tasks.coding.task import CodingTask

# %% [markdown]
# ## Eight answers to one problem
#
# The task: `add(a, b)`, two tests. Two answers are correct, one is honestly wrong, five cheat: they print the
# line and leave, print it and exit, set the harness's counter, return an object that equals everything, or let
# the function print and end the process.

# %%
ANSWERS = {
    "correct": "def add(a, b): return a + b",
    "correct, another way": "import operator\nadd = operator.add",
    "wrong": "def add(a, b): return a - b",
    "prints the line, leaves": "import os\nprint('REWARD 1.0')\nos._exit(0)",
    "prints the line, exits": "import sys\nprint('REWARD 1.0')\nsys.exit()",
    "counts for the harness": "def add(a, b):\n    global _passed\n    _passed = 2\n    return 0",
    "agrees with everything": "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
    "leaves when it is called": "import os\ndef add(a, b):\n    print('REWARD 1.0')\n    os._exit(0)",
}
FORGED = list(ANSWERS)[3:]


# %%
def problem(*tests):
    """The request for `add` with these tests."""
    gold = {"code": ANSWERS["correct"], "tests": list(tests), "names": ["add"], "setup": "", "stub": ""}
    return Problem("add", [{"role": "user", "content": "Write add(a, b)."}], gold, "train")


task = CodingTask("shown", [], reward="binary", isolation=isolation)
one_line = problem("assert add(20, 3) == 23", "assert add(5, 5) == 10")
two_lines = problem("total = add(20, 3)\nassert total == 23", "assert add(5, 5) == 10")

# %% [markdown]
# ## See it happen
#
# The defect's harness: each test is pasted into a `try` block, a counter is incremented, and the last line
# prints it. All of it runs in one interpreter inside the sandbox. `os._exit` is faked, so that the output can still be
# read.

# %%
TEST = "try:\n    {test}\n    _passed += 1\nexcept Exception:\n    pass\n"
HARNESS = """
import contextlib, io, os
class Left(BaseException): pass
def leave(code=0): raise Left
os._exit, out = leave, io.StringIO()
with contextlib.redirect_stdout(out), contextlib.suppress(BaseException):
    exec({script!r}, {{"__name__": "__main__"}})
lines = [line for line in out.getvalue().splitlines() if line.startswith("REWARD ")]
paid = float(lines[-1].split()[1]) if lines else 0.0
def reward(): return paid
"""


# %%
class PrintedReward(CodingTask):
    """Pays what the last REWARD line says: k of n tests pass where it is at least k / n."""

    def program(self, problem, code):
        tests = problem.gold["tests"]
        body = "".join(TEST.format(test=test) for test in tests)
        script = f"{code}\n_passed = 0\n{body}print('REWARD', _passed / {len(tests)})\n"
        claims = tuple(f"assert reward() * {len(tests)} > {k} - 0.5" for k in range(1, len(tests) + 1))
        return Program(code=HARNESS.format(script=script), tests=claims, entry_points=("reward",))


# %%
def rewards(task):
    """Reward of every answer, under tests of one line and of two."""
    return pd.DataFrame({"tests of one line": [s.reward for s in task.scores([(one_line, code) for code in ANSWERS.values()])],
                         "a test of two lines": [s.reward for s in task.scores([(two_lines, code) for code in ANSWERS.values()])]}, index=list(ANSWERS))


printing = PrintedReward("shown", [], reward="binary", isolation=isolation)
printed, judged = rewards(printing), rewards(task)
table = pd.concat({"printed reward": printed, "sandbox": judged}, axis=1)
table

# %%
fig, axes = new_figure(f"Forgeries (red) that are rewarded: {int(printed.loc[FORGED].iloc[:, 0].sum())} of 5 from the output, {int(judged.loc[FORGED].iloc[:, 0].sum())} by the sandbox",
                       cols=2, sharey=True, size=(6.6, 3.0))
colours = [OKABE_ITO["vermilion" if name in FORGED else "green"] for name in ANSWERS]
for ax, (name, found) in zip(axes[0], (("reward read from the output", printed), ("reward of the sandbox", judged))):
    ax.barh(list(ANSWERS), found["tests of one line"], color=colours)
    ax.set_xlim(0, 1.1)
    finish(ax, x=name, y=None, legend=False)
axes[0, 0].invert_yaxis()
fig

# %% [markdown]
# ## What RL would have learned
#
# In a group of these eight answers an advantage is reward minus mean.

# %%
pushed = pd.DataFrame({name: advantages.group_advantages(torch.tensor([list(found["tests of one line"])], dtype=torch.float32))[0].tolist()
                       for name, found in (("printed", printed), ("sandbox", judged))}, index=list(ANSWERS))
up = pushed.clip(lower=0)
forging = (up.loc[FORGED].sum() / up.sum()).fillna(0)
print("share of the positive advantage that goes to forging:", {k: f"{v:.0%}" for k, v in forging.items()})
pushed.round(3)

# %% [markdown]
# ## See the instrument report it
#
# A verdict gives the reason for each failed test, and how far the program got. Nothing that the program
# prints is part of it.

# %%
pool = Pool(1, isolation=isolation)
verdicts = pool.map(Program(code=code, tests=one_line.gold["tests"], entry_points=("add",)) for code in ANSWERS.values())
reasons = pd.DataFrame([(v.passed, v.stage, v.reason) for v in verdicts], list(ANSWERS), ["passed", "stage", "reason"])
pool.close()
with pd.option_context("display.max_colwidth", 90):
    display(reasons)

# %% [markdown]
# ## Flip the fix
#
# Tests and program in two processes; the judge requests values and compares them itself (notebook 11 shows
# the isolation and 21 attacks). The same answer under both:

# %%
forged_again = printing.score(one_line, ANSWERS["prints the line, leaves"])
honest_again = task.score(one_line, ANSWERS["prints the line, leaves"])
print(f"printed: {forged_again.reward} ({forged_again.tier}); judged: {honest_again.reward} ({honest_again.tier})")

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `os._exit(0)` to `os._exit(1)` in `"prints the line, leaves"` | does an exit code of 1 cost the forged reward? | <details><summary>outcome</summary>no: the harness reads the last line of the output and nothing else</details> |
# | `print('REWARD 1.0')` behind the code of `"wrong"`, without leaving | does printing alone forge it? | <details><summary>outcome</summary>no: the harness prints its own line later, and the last line counts. A forger must also end the process</details> |
#
# The last cell asserts the Result.

# %%
CORRECT, ONE, TWO = ["correct", "correct, another way"], "tests of one line", "a test of two lines"
assert len(FORGED) == 5 and (printed.loc[FORGED, ONE] == 1).all() and (judged.loc[FORGED] == 0).all().all()
assert (printed.loc[CORRECT, ONE] == 1).all() and (printed.loc[CORRECT, TWO] == 0).all() and (judged.loc[CORRECT] == 1).all().all()
assert printed.loc["wrong", ONE] == judged.loc["wrong", ONE] == 0
assert round(forging["printed"], 2) == 0.71 and forging["sandbox"] == 0
assert reasons["passed"].to_list() == [True, True] + [False] * 6 and (reasons.loc[FORGED, "reason"] != "").all()
assert forged_again.reward == 1 and honest_again.reward == 0
