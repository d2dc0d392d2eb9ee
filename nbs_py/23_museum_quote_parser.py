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
# # Museum: a parser that swapped quotes lost every call with arguments
#
# **Question.** glaive's rows write a call's arguments as JSON in single quotes: `"arguments": '{"location":
# "Paris"}'`. When that was not JSON, the original's reward replaced every `'` by `"` and tried again. What
# does this do to the reward, and to the set of problems built with the same parser?
#
# **Result.** Of 600 correct calls in the format of the data, the swapping parser reads only the 60 without
# arguments; the RL set built with it holds nothing else. A policy that never writes an argument scores 1.00 on
# that set and 0.10 on all rows. Here both the check of reference solutions and the ledger of the data reader
# raise, with the reason.
#
# | | |
# |---|---|
# | reward of a correct call with arguments, swapped quotes | 0.15 (bad JSON) instead of 1 |
# | calls that our parser reads | 600 of 600 |
# | dialogues that the published set kept | 2,389 of 112,960 |
# | the published 86.4 % on 122 of them, 95 % interval | 79 % to 91 % |
#
# **Runs/needs.** No runs and no data: the rows are generated from our own tools, in glaive's layout.
#
# Previous: [22 museum bf16 weights](22_museum_bf16_weights.ipynb) · Next: [24 museum printed reward](24_museum_printed_reward.ipynb)

# %% tags=["parameters"]
seed = 0
n_rows = 600
without_arguments = 60

# %%
import contextlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from codechat.core.errors import DataError
from codechat.data.row_readers import glaive_turns
from codechat.tasks import check_reference_solutions, load
from codechat.text import chat
from codechat_lab.reports.style import OKABE_ITO, finish, label_of_tier, new_figure
from codechat_lab.tasks import funcall
from codechat_lab.tasks.toolbox.problems import draw


# %% [markdown]
# ## Rows in glaive's format
#
# Requests and calls of our tools in the format of that data set. A tenth of the calls have no arguments, as
# in real catalogues (`get_random_quote()`).

# %%
def glaive_row(request, name, arguments):
    """One row in glaive's columns and wording, the arguments as JSON in single quotes."""
    schema = {"name": name, "description": "", "parameters": {"type": "object", "properties": {k: {"type": "string"} for k in arguments}}}
    call = f"""<functioncall> {{"name": "{name}", "arguments": '{json.dumps(arguments)}'}}"""
    return {"system": f"SYSTEM: You have these functions - {json.dumps(schema)}", "chat": f"USER: {request}\n\n\nASSISTANT: {call} <|endoftext|>"}


asked = draw("train", n_rows - without_arguments, seed, shares={"call": 1})
rows = [glaive_row(p.messages[-1]["content"], p.gold["name"], p.gold["arguments"]) for p in asked]
rows += [glaive_row(f"Give me quote number {i}.", "get_random_quote", {}) for i in range(without_arguments)]
print(rows[0]["chat"])


# %% [markdown]
# ## See it happen
#
# One correct call, two readers. Prediction: it scores 1 with our reader and is bad JSON for the other.

# %%
def score_swapping(text, gold):
    """The defect: a call that is JSON neither as it is nor with every ' as " counts as bad JSON."""
    call = text.partition(chat.CALL_TAG)[2]
    for attempt in (call, call.replace("'", '"')):
        with contextlib.suppress(ValueError):
            json.loads(attempt)
            return funcall.score_call(chat.CALL_TAG + attempt, gold)
    return funcall.score_call(chat.CALL_TAG + " {", gold)


# %%
text, gold = glaive_turns(rows[0]["chat"])[-1]["content"], asked[0].gold
honest, broken = funcall.score_call(text, gold), score_swapping(text, gold)
swapped = text.replace("'", '"')
print(f"{text}\nafter the swap: {swapped}")
pd.DataFrame([honest, broken], ["our reader", "swapped quotes"])[["reward", "tier", "correct"]].assign(tier=[label_of_tier(s.tier) for s in (honest, broken)])


# %% [markdown]
# Over all rows: how each parser scores the reference calls.

# %%
def read(rows, score):
    """Reward of each row's own call against what it says, and how many arguments it has."""
    calls = [glaive_turns(row["chat"])[-1]["content"] for row in rows]
    golds = [p.gold for p in asked] + [{"name": "get_random_quote", "arguments": {}}] * without_arguments
    scores = [score(text, gold) for text, gold in zip(calls, golds)]
    return pd.DataFrame({"reward": [s.reward for s in scores], "tier": [s.tier for s in scores], "arguments": [len(g["arguments"]) for g in golds]})


ours, theirs = read(rows, funcall.score_call), read(rows, score_swapping)
pd.DataFrame({"our reader": ours["tier"].value_counts(), "swapped quotes": theirs["tier"].value_counts()}).fillna(0).astype(int).rename(label_of_tier)

# %%
counts = pd.DataFrame({"in the data": ours.groupby("arguments").size(), "kept by the swapping parser": theirs[theirs["tier"] == "full"].groupby("arguments").size()})
counts = counts.fillna(0).astype(int)
title = f"Only calls without arguments survive: {counts.iloc[:, 1].sum()} of {len(rows)} rows"
fig, axes = new_figure(title, size=(6.4, 2.6))
for shift, (column, colour) in zip((-0.2, 0.2), (("in the data", "sky"), ("kept by the swapping parser", "vermilion"))):
    bars = axes[0, 0].bar(counts.index + shift, counts[column], 0.4, color=OKABE_ITO[colour], label=column)
    axes[0, 0].bar_label(bars, fontsize=8)
axes[0, 0].set_xticks(counts.index)
finish(axes[0, 0], x="arguments of the correct call", y="rows")
fig

# %% [markdown]
# ## The easy rest
#
# An RL set built with that parser holds only what the parser reads. A policy that writes the correct name and
# never an argument scores perfectly on it.

# %%
golds = [p.gold for p in asked] + [{"name": "get_random_quote", "arguments": {}}] * without_arguments
lazy = np.array([funcall.score_call(chat.format_call(g["name"], {}), g).correct for g in golds])
kept = (theirs["tier"] == "full").to_numpy()
lazy_score = {"rows that the parser kept": lazy[kept].mean(), "all rows": lazy.mean()}
print("exact match of a policy that never writes an argument:", {k: round(float(v), 2) for k, v in lazy_score.items()})

# %% [markdown]
# The published figure: 86.4 % on the 122 problems that were kept for evaluation. 122 samples do not justify a
# decimal. Wilson's 95 % interval, with $z = 1.96$:
#
# $$\frac{\hat p + \frac{z^2}{2n} \pm z \sqrt{\frac{\hat p (1 - \hat p)}{n} + \frac{z^2}{4n^2}}}{1 + \frac{z^2}{n}}$$

# %%
p, n, z = 0.864, 122, 1.96
middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
interval = middle - half, middle + half
print(f"published: {p:.1%} of {n}; 95 % interval {interval[0]:.0%} to {interval[1]:.0%}; kept {2389 / 112960:.1%} of the dialogues")

# %% [markdown]
# ## What reports it
#
# Two checks, before any training. The data reader's ledger counts lost rows by reason and raises above 5 %
# (here on swapped rows). The reference-solution check requires that every reference answer, in the source's
# format, scores the maximum.

# %%
path = Path(tempfile.mkdtemp()) / "glaive.jsonl"
path.write_text("\n".join(map(json.dumps, rows)))
task = load("funcall", source=str(path))
problems = [q for split in ("train", "select", "test") for q in task.problems(split)]
as_swapped = path.with_name("swapped.jsonl")
as_swapped.write_text("\n".join(json.dumps(row | {"chat": row["chat"].replace("'", '"')}) for row in rows))


class Swapping(type(task)):
    def score(self, problem, completion):
        return score_swapping(completion, problem.gold)


# %%
refusals = []
for check in (lambda: load("funcall", source=str(as_swapped)),
              lambda: check_reference_solutions(Swapping(source=str(path)), problems).require()):
    try:
        check()
    except DataError as error:
        refusals.append(str(error))
print(*[r.replace(str(path.parent), ".") for r in refusals], sep="\n\n")

# %% [markdown]
# ## Flip the fix
#
# The parser (`text.tool_calls`) accepts the formats of real data and reports which one it found; calls are
# always written in one format.

# %%
forms = pd.Series([chat.parse_calls(glaive_turns(row["chat"])[-1]["content"])[0].form for row in rows]).value_counts()
gate = check_reference_solutions(task, problems)
print(f"reference solutions: {gate.passed} of {gate.n}; formats found: {forms.to_dict()}")
print("written as:", chat.format_call(gold["name"], gold["arguments"]))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `without_arguments = 300` | half of the calls have no arguments: does the score of the policy that never writes one reveal the defect? | <details><summary>outcome</summary>no: it is 1.00 on what the parser kept, whatever the share; only the score on all rows rises, to 0.50 (the last cell's counts are those of 60)</details> |
# | `n = 12_200` in Wilson's interval | how many problems justify the decimal of 86.4 %? | <details><summary>outcome</summary>a hundred times as many give an interval of about ±0.6 points: not even these</details> |
#
# The last cell asserts the Result.

# %%
assert (honest.reward, broken.reward, broken.tier) == (1.0, 0.15, "bad_json")
assert (ours["reward"] == 1).all() and len(ours) == 600
assert (theirs["tier"] == "full").sum() == 60 and (theirs.loc[theirs["arguments"] > 0, "reward"] == 0.15).all()
assert lazy_score["rows that the parser kept"] == 1 and abs(lazy_score["all rows"] - 0.10) < 0.005
assert len(refusals) == 2 and "unreadable_call" in refusals[0] and "bad_json" in refusals[1]
assert not gate.failed and gate.n == len(problems) == 600
assert [round(x, 2) for x in interval] == [0.79, 0.91]
