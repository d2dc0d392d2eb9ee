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
# # A board of small models that call functions
#
# **Question.** Which of these models calls the right function with the right arguments on the Berkeley Function Calling Leaderboard (version 4, single turn), which stays silent where none
# fits, and how far does the wording of the system message move these shares?

# %% tags=["parameters", "hide-cell"]
out = "reports/board"
frozen = True  # the rows are those of `codechat board`, never those of runs

# %% tags=["hide-cell"]
from codechat.runs.paths import ROOT
from codechat_lab.reports import articles, board

data = ROOT / out / "data"
rows = board.read(data)
table = board.table_of(rows)
counts = board.counts_of(rows)
best = next(iter(table))
wordings = list(rows["wording"].unique())
seeds = list(rows["seed"].unique())
numbers = dict(models=len(table), problems=rows["id"].nunique())
for name in (board.CALLS, board.SILENCE, board.BOTH):
    interval = table[best].get(name)
    if interval is not None:
        key = name.replace(" ", "_")
        numbers |= {key: interval.value, f"{key}_lo": interval.lo, f"{key}_hi": interval.hi}
moved, gap = max(board.spread(rows, "wording").items(), key=lambda item: item[1].value)
numbers |= {"gap": 100 * gap.value, "gap_lo": 100 * gap.lo, "gap_hi": 100 * gap.hi}

# %% tags=["answer", "hide-input"]
balanced = "both" in numbers
articles.answer(
    numbers,
    f"Of {{models:.0f}} models on {{problems:.0f}} problems, `{best}` has the largest harmonic mean of calls and silence: {{both:.0%}}." if balanced else f"Of {{models:.0f}} models on {{problems:.0f}} problems, `{best}` comes first.",
    "Where a call is right, it makes the right one in {call:.0%} [{call_lo:.0%}, {call_hi:.0%}]; where none is right, it makes none in {no_call:.0%} [{no_call_lo:.0%}, {no_call_hi:.0%}]." if balanced else "",
    f"Between the best and the worst wording of the system message lie at most {{gap:.1f}} points of right calls [{{gap_lo:.1f}}, {{gap_hi:.1f}}], of `{moved}`." if len(wordings) > 1 else "One wording of the system message was tried.",
)

# %% tags=["thumbnail", "hide-input"]
shown = board.figure(table, counts)
shown.savefig(data.parent / "board.png", dpi=150, metadata={"Software": None})
shown

# %% [markdown]
# ## Calls and silence
#
# A model that never calls is right wherever no call is right. So no row shows that share alone: beside it stands the share of right calls where a call is right, and the one number is the
# harmonic mean of both. Shares are in percent, means over the wordings that all models have and over seeds, with 95 % intervals over problems.

# %% tags=["hide-input"]
both = board.frame_of(table, [board.CALLS, board.SILENCE, board.BOTH])
articles.table(both, {"model": "model", board.CALLS: f"a call is right, N={counts[board.CALLS]}", board.SILENCE: f"no call is right, N={counts[board.SILENCE]}", board.BOTH: "harmonic mean"})

# %% tags=["hide-input"]
board.silence_figure(table)

# %% [markdown]
# Differences to the first model, paired by problem, in points:

# %% tags=["hide-input"]
articles.table(board.differences(rows), {"difference": "", board.CALLS: "a call is right", board.SILENCE: "no call is right"})

# %% [markdown]
# ## By category
#
# `simple` is the mean of Python, Java and JavaScript, `irrelevance` that of both categories where no call is right, each with the same weight, as on the published board.

# %% tags=["hide-input"]
columns = [name for name in board.COLUMNS if counts[name]]
shares = board.turned(board.frame_of(table, columns), "category")
shares.insert(1, "N", shares["category"].map(counts))
articles.table(shares.replace("_", " ", regex=True), {name: name for name in shares})

# %% [markdown]
# **Published, not measured here**, in percent. Published scores come without intervals, from other prompts and templates; how far both move them: arXiv:2606.00135.

# %% tags=["hide-input"]
others = board.turned(board.published().astype(str), "category")
articles.table(others.replace("_", " ", regex=True), {name: name if name == "category" else f"{name} (published)" for name in others})

# %% [markdown]
# ## By wording and seed

# %% tags=["hide-input"]
articles.table(board.by_cell(rows), {"model": "model", "wording": "wording", "seed": "seed", board.CALLS: "a call is right", board.SILENCE: "no call is right", board.BOTH: "harmonic mean"})

# %% [markdown]
# ## What the answers were
#
# Shares of all answers, in percent, by the rung of the task's score: `full` is right, the others name the fault.

# %% tags=["hide-input"]
errors = board.turned(board.errors_of(rows), "rung").replace("_", " ", regex=True)
articles.table(errors, {"rung": "rung"} | {name: (name, ".1f") for name in errors.columns[1:]})
