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
# # A model fine-tuned on calls alone calls whatever is asked, and RL on calls does not repair it
#
# **Question.** v5 calls a function whatever is asked. What does it do in each cell of (tool or code requested) x (tools offered or not), does it read its prompt at all, and which
# later change repaired it: v6's joint rows, v7's balanced mix, neutral prompts or negatives, or RL?

# %% tags=["parameters", "hide-cell"]
recipe = "nano"
versions = ["v5", "v6", "v7"]
parts = ["v7-mix", "v7-neutral", "v7-negatives"]
ours = ["base", "ours-evaluate", "ours-over-rl"]
swaps = ["swaps", "swaps-v7"]
supervision = "supervision"
out = "reports/specialist"
frozen = True  # False: from the runs on this machine, whose rows then replace those of `out`

# %% tags=["hide-cell"]
import math
from collections import Counter

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from codechat.evaluation.intervals import share_difference, wilson_interval
from codechat.runs import checkpoint
from codechat.runs.paths import ROOT
from codechat_lab.instruments.behaviour_probes import CELLS, EXPECTED
from codechat_lab.reports import articles, plots, run_frames
from codechat_lab.reports.run_frames import in_points, with_settings
from codechat_lab.reports.style import (
    GREY,
    OKABE_ITO,
    colour_of,
    finish,
    label_of_run,
    new_figure,
    outer_legend,
    stack_bars,
)

SWAPS = ("tools_off", "tools_on", "tool_swapped", "tool_renamed", "value_swapped")  # of tools/counterfactuals.py


# %% tags=["hide-cell"]
def expected_behaviour(row, cell):
    """(completions with the expected behaviour, all completions) of a cell of the behaviour matrix; (0, 0) if it was
    not probed."""
    n = row.get(f"probe/{cell}/n", 0)
    return (round(row[f"probe/{cell}/{EXPECTED[cell]}"] * n), int(n)) if n > 0 else (0, 0)


def wrong_calls(row):
    """(calls, completions) over the cells in which no call is correct."""
    cells = [c for c in CELLS if EXPECTED[c] != "call" and row.get(f"probe/{c}/n", 0) > 0]
    calls = sum(round(row[f"probe/{c}/call"] * row[f"probe/{c}/n"]) for c in cells)
    return calls, int(sum(row[f"probe/{c}/n"] for c in cells))


def varied_examples(samples, by):
    """One sample of each group of the columns `by`, in order, with the request that was shown least often so far."""
    shown = Counter()
    chosen = []
    for _, group in samples.groupby(list(by), sort=False):
        index = min(group.index, key=lambda i: shown[group.loc[i, "request"]])
        shown[group.loc[index, "request"]] += 1
        chosen.append(index)
    return samples.loc[chosen]


def sft_mix(runs):
    """run, domain, conversations, supervised_tokens and share of what each SFT run drew from its data, from the loader
    state of its last checkpoint; the few conversations that still waited for a row are counted."""
    rows = []
    for run in runs:
        loader = checkpoint.load(run, optimizer=False, mmap=True).extra["loader"]
        total = sum(loader["supervised"])
        rows += [
            dict(run=run, domain=domain, conversations=n, supervised_tokens=tokens, share=tokens / total)
            for domain, n, tokens in zip(loader["sizes"], loader["drawn"], loader["supervised"], strict=True)
        ]
    return pd.DataFrame(rows)


# %% tags=["hide-cell"]
place = ROOT / out / "data"
without_answers = lambda frames: frames | {table: frames[table][:0] for table in ("samples", "per_problem")}
trained = [f"{recipe}/{v}-{stage}" for v in versions for stage in ("sft", "rl")]
parts, ours, swaps = ([f"{recipe}/{name}" for name in group] for group in (parts, ours, swaps))
frames = run_frames.gather([*trained, *parts, *ours[:1]], place, frozen, lambda frames: without_answers(frames) | {"drawn": sft_mix([run for run in [*trained, *ours[:1]] if not run.endswith("rl")])})
judged = [*(f"{recipe}/{v}-evaluate" for v in versions), *ours[1:2]]
tested = run_frames.gather(judged, place / "evaluate", frozen, without_answers)
over = run_frames.gather(ours[2:], place / "over", frozen, without_answers)["evals"]
swapped = run_frames.gather(swaps, place / "swaps", frozen, lambda frames: frames | {"per_problem": frames["per_problem"][:0]})
counted = run_frames.gather([f"{recipe}/{supervision}"], place / "supervision", frozen, without_answers)["evals"]
evals = {run: run_frames.rows_of(frames["evals"], run) for run in frames["runs"]["run"]}


def name_of(run):
    """v5 SFT, v6 RL, ours SFT: without recipe and step."""
    words = label_of_run(run.partition("@")[0])
    return "ours SFT" if words == "base" else words  # nano's first SFT


rows = {name_of(row["checkpoint"]): row for row in tested["evals"].to_dict("records")}
calling = {name: wilson_interval(*wrong_calls(row)) for name, row in rows.items()}
sft = [name for name in rows if name.endswith("SFT")]

# %% tags=["hide-cell"]
# Swaps of one part of a prompt, the mixes that SFT read, and the supervised tokens of the original's data.
flips = swapped["evals"].assign(name=lambda f: f["checkpoint"].map(name_of))
flips = pd.concat([flips[flips["name"] == name] for name in rows])
off = flips[flips["swap"] == "tools_off"].set_index("name")
texts = pd.DataFrame(swapped["samples"]).assign(name=lambda f: f["checkpoint"].map(name_of))
mixes = frames["drawn"].assign(tokens_each=lambda f: f["supervised_tokens"] / f["conversations"], name=lambda f: f["run"].map(name_of))
plain = {table: run_frames.published(table).rename(columns=lambda c: c.removesuffix(" (published)")) for table in ("data_mix", "smoke_tests", "pass_at_k")}
theirs = plain["data_mix"][plain["data_mix"]["version"] == "v6"].set_index("domain")
sample = counted[counted["domain"] == "calls"].iloc[0]
per_row, error = sample["supervised"] / sample["conversations"], 1.96 * sample["sd"] / math.sqrt(sample["conversations"])
code, n_rows = theirs.loc["sft_code", "supervised_tokens"], theirs.loc["sft_funcall_glaive", "rows"]
ratio = [n_rows * x / code for x in (per_row - error, per_row, per_row + error)]
v6 = mixes[mixes["name"] == "v6 SFT"].set_index("domain")

# %% tags=["hide-cell"]
# RL minus SFT, and the parts of v7 against v6.
changes = {f"{v} RL": share_difference(wrong_calls(rows[f"{v} SFT"]), wrong_calls(rows[f"{v} RL"])) for v in [*versions, "ours"]}
chain = {name_of(run): evals[run].iloc[-1].to_dict() for run in (f"{recipe}/v6-sft", *parts, *(f"{recipe}/{v}-sft" for v in versions if v == "v7"))}
base, *others = chain
steps = {name: {cell: share_difference(expected_behaviour(chain[base], cell), expected_behaviour(chain[name], cell)) for cell in CELLS} for name in others}
cell_words = {cell: plots.cell_in_words(cell) for cell in CELLS}
sure = [f"{name}, {cell_words[cell]}: {in_points(i)}" for name, found in steps.items() for cell, i in found.items() if i.lo > 0 or i.hi < 0]

# %% tags=["hide-cell"]
key = {name: name.replace(" ", "_") for name in rows}
numbers = {f"wrong_{key[n]}": i.value for n, i in calling.items()} | {f"code_{key[n]}": r["heldout_nats/code"] for n, r in rows.items()}
numbers |= {f"rl_{key[n]}": i.value for n, i in changes.items()} | {f"off_{key[n]}": v for n, v in off["ignores"].dropna().items()}
numbers |= dict(ratio=ratio[1], ratio_lo=ratio[0], ratio_hi=ratio[2], most=n_rows * 2048 / code, claimed=theirs.loc["sft_funcall_glaive", "supervised_tokens"] / code)
numbers |= dict(row_ratio=n_rows / theirs.loc["sft_code", "rows"], per_row=per_row, error=error, counted=sample["conversations"], claimed_per_row=theirs.loc["sft_funcall_glaive", "supervised_tokens"] / n_rows)
numbers |= dict(ours=v6.loc["calls", "supervised_tokens"] / v6.loc["programs", "supervised_tokens"], ours_rows=v6.loc["calls", "conversations"] / v6.loc["programs", "conversations"])
for name, short in (("v5 SFT", "v5"), ("ours SFT", "ours")):
    numbers[f"calls_{short}"], numbers[f"asked_{short}"] = wrong_calls(rows[name])
for name in rows:
    numbers[f"writes_{key[name]}"], numbers[f"declines_{key[name]}"] = (rows[name][f"probe/{c}"] for c in ("code_without_tools/code", "tool_without_tools/neither"))
    numbers[f"others_{key[name]}"] = rows[name]["probe/tool_with_other_tools/neither"]
fallen = [name for name, i in changes.items() if i.hi < 0]
after_rl = f"RL on calls lowers the wrong calls of {', '.join(fallen)}" if fallen else "RL on calls lowers the wrong calls of no version"

# %% tags=["answer", "hide-input"]
articles.answer(
    numbers,
    "v5, fine-tuned on calls alone, answers {calls_v5:.0f} of {asked_v5:.0f} requests that need no call with a call; ours does so for {calls_ours:.0f} of {asked_ours:.0f}.",
    "Code in the mix brings code back ({writes_v6_SFT:.0%} of the code requests in v6, none in v5), but v5, v6 and v7 still call when no tool is offered; ours, whose SFT "
    "holds such requests, declines {declines_ours_SFT:.0%} of them, and {others_ours_SFT:.0%} where only other tools are offered.",
    f"{after_rl}, and the published cause, 28 supervised tokens of calls to one of code, does not fit the original's own rows: they allow "
    "{most:.1f} at most.",
)

# %% tags=["hide-cell"]
OUTCOME_COLOURS = {"follows": OKABE_ITO["blue"], "other": "#cccccc", "ignores": OKABE_ITO["vermilion"]}
CHANGES = {
    "tools_off": "tools taken away",
    "tools_on": "tools offered",
    "tool_swapped": "another tool",
    "tool_renamed": "tool renamed",
    "value_swapped": "another value",
}
SHORT = {
    "tool_with_tools": "tool requested,\ntool offered",
    "tool_with_other_tools": "tool requested,\nothers offered",
    "tool_without_tools": "tool requested,\nnone offered",
    "code_with_tools": "code requested,\ntools offered",
    "code_without_tools": "code requested,\nno tools offered",
}


def behaviour_table(rows, title):
    """Share of expected behaviour with its interval: a line per checkpoint, a column per cell; a cell that was not
    probed stays empty."""
    fig, axes = new_figure(title, size=(7.2, 1.3 + 0.42 * len(rows)))
    ax, cells = axes[0, 0], {(i, j): (row, cell) for i, row in enumerate(rows.values()) for j, cell in enumerate(CELLS)}
    plots.draw_behaviour(ax, cells, "{p:.0%} [{lo:.0%}, {hi:.0%}]", 7.5)
    ax.set_xticks(range(len(CELLS)), [f"{SHORT[c]}:\n{EXPECTED[c]} expected" for c in CELLS], fontsize=7)
    ax.set_yticks(range(len(rows)), list(rows))
    return fig


# %% tags=["thumbnail", "hide-input"]
behaviour_table(rows, "calls where no call is correct: " + ", ".join(f"{n} {calling[n].value:.0%}" for n in sft))


# %% tags=["hide-input"]
def said(version, kind):
    return plain["smoke_tests"].set_index(["version", "prompt_kind"]).loc[(version, kind), "description"]


def shares(name, cell):
    return ", ".join(f"{what} {rows[name][f'probe/{cell}/{what}']:.0%}" for what in ("call", "code", "neither"))


v5k = plain["pass_at_k"][plain["pass_at_k"]["run_name"] == "codechat_8b_rl_funcall_v5"].set_index("k")["pass_at_k"]
carried = flips[flips["swap"] == "value_swapped"].set_index("name")
articles.beside([
    ("v5, asked for code without tools", said("v5", "code_quicksort_no_tools"), shares("v5 RL", "code_without_tools"), "the same failure"),
    ("v6, asked for code without tools", said("v6", "code_quicksort_no_tools"), shares("v6 RL", "code_without_tools"), "most requests get code here; one prompt was published"),
    ("v6, asked for the weather with tools", said("v6", "funcall_weather_with_tools"), f"exact calls {rows['v6 RL']['pass@1']:.2f}; a swapped value is carried over in {carried.loc['v6 RL', 'follows']:.0%}", "ours mostly carries the value over; one prompt was published"),
    ("pass@k of v5 after RL", ", ".join(f"{k}: {v:.3f}" for k, v in v5k.items()), f"1: {rows['v5 RL']['pass@1']:.3f}, 8: {rows['v5 RL']['pass@8']:.3f}", "other requests; theirs are 122 that their parser kept"),
    ("rows of calls to one of code, v6", f"{numbers['row_ratio']:.1f}", f"{numbers['ours_rows']:.1f}", "the same mix by rows"),
    ("supervised tokens of calls to one of code, v6", f"{numbers['claimed']:.0f} (claimed)", f"{numbers['ours']:.2f} in our mix; {ratio[1]:.2f} counted on their data", "the claim does not fit its own rows"),
    ("tool requested, none offered", "not published", "call: " + ", ".join(f"{n} {rows[n]['probe/tool_without_tools/call']:.0%}" for n in sft), "ours alone was trained on such requests"),
    ("v7", "designed, not run", f"wrong calls {calling['v7 SFT'].value:.0%} after SFT, {calling['v7 RL'].value:.0%} after RL", "not the repair"),
])  # fmt: skip


# %% [markdown]
# A call is correct in the first column only. All were evaluated on the same test prompts with the same settings; intervals are 95 %
# (Wilson), 64 prompts a cell.
#
# ## What each version writes
#
# The published smoke tests are single prompts, which we paraphrase. Beside them: how often our run of that version does the same,
# and one full answer. Our v3 is in `docs/versions.md`; answers after a tool's response were not kept. v5's answers to requests for
# code were not kept either: the table shows what it writes when its tools are taken away.

# %% tags=["hide-input"]
def wrote(name, swap, column):
    found = texts[(texts["name"] == name) & (texts["swap"] == swap)]
    return f"{found['request'].iloc[0]} → {found[column].iloc[0]}" if len(found) else None


kept = {("v5", "code_quicksort_no_tools"): ("tools_off", "after"), ("v6", "code_quicksort_no_tools"): ("tools_on", "before"),
        ("v5", "funcall_weather_with_tools"): ("tool_renamed", "before"), ("v6", "funcall_weather_with_tools"): ("value_swapped", "after")}  # fmt: skip
cell_of = {"code_quicksort_no_tools": "code_without_tools", "code_loop_no_tools": "code_without_tools", "funcall_weather_with_tools": "tool_with_tools"}
smoke = plain["smoke_tests"].assign(
    test=lambda f: f["prompt_kind"].str.replace("_", " ").str.replace("funcall ", ""),
    ours=[shares(f"{v} RL", cell_of[k]) if v in versions and k in cell_of else None for v, k in zip(plain["smoke_tests"]["version"], plain["smoke_tests"]["prompt_kind"])],
    text=[wrote(f"{v} RL", *kept[v, k]) if (v, k) in kept else None for v, k in zip(plain["smoke_tests"]["version"], plain["smoke_tests"]["prompt_kind"])],
)
more = [dict(version=n.split()[0], test="code without tools", description="", ours=shares(n, "code_without_tools"), text=wrote(n, "tools_on", "before")) for n in ("v7 RL", "ours RL")]
articles.table(pd.concat([smoke, pd.DataFrame(more)]), {"version": "version", "test": "request", "verdict": "published", "description": "published, in our words", "ours": "ours, after RL",
                                                       "text": ("request → what ours writes", articles.VERBATIM)})  # fmt: skip


# %% [markdown]
# ## When it happens: SFT, not RL
#
# Every version starts from the same general SFT (ours from pretraining). Within 40 steps of SFT on calls alone, v5 has lost code.

# %% tags=["hide-cell"]
def behaviour_of_runs(evals, title, label=label_of_run):
    """Share of expected behaviour over the steps: a panel per cell, a line per run."""
    fig, axes = new_figure(title, 2, 3, size=(7.6, 4.6), sharey=True)
    for ax, cell in zip(axes.flat, CELLS):
        for (run, frame), marker in zip(evals.items(), "osD^v<>"):
            name = f"probe/{cell}/{EXPECTED[cell]}"
            rows = frame[frame[name].notna()] if name in frame else pd.DataFrame({"step": [], name: []})
            look = dict(marker=marker, markersize=4.5, markeredgecolor="white", markeredgewidth=0.5, linewidth=1.3)
            ax.plot(rows["step"], rows[name], color=colour_of(run), label=label(run), **look)
        asked = SHORT[cell].replace("\n", " ")
        ax.set_title(f"{asked}:\n{EXPECTED[cell]} expected", fontsize=7, loc="left")
        finish(ax, x="step", y="share" if ax in axes[:, 0] else None, legend=False)
    axes[0, 0].set_ylim(-0.03, 1.03)
    axes[1, 2].set_axis_off()  # five cells, six places: the last one holds the legend
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", fontsize=8, frameon=False)
    return fig


# %% tags=["hide-input"]
during = {run: evals[run] for run in evals if run.endswith(("sft", "base"))}
behaviour_of_runs(during, "SFT: expected behaviour by cell, 32 prompts a point", name_of)

# %% [markdown]
# Then RL, on requests that all require a call. If RL restored other behaviour, the lines would rise.

# %% tags=["hide-input"]
later = {run: evals[run] for run in evals if run.rpartition("/")[2].endswith("-rl")}
# our RL run logs no probes: its checkpoints were probed afterwards, the SFT one as step 0
later[f"{recipe}/ours-rl"] = over.assign(step=over["step"].where(over["checkpoint"].str.contains("ours-rl@"), 0))
behaviour_of_runs(later, "RL on calls: expected behaviour by cell, 32 prompts a point", name_of)

# %% tags=["hide-input"]
differences = pd.DataFrame([dict(name=n, value=i.value, lo=i.lo, hi=i.hi) for n, i in changes.items()])
plots.differences(differences, "RL minus SFT, wrong calls in points: " + ", ".join(f"{n} {100 * i.value:+.1f}" for n, i in changes.items()))

# %% [markdown]
# ## Was it 28 to 1?

# %% tags=["hide-input"]
articles.answer(numbers,
    "The original's report explains v6 by an imbalance of {claimed:.0f} supervised tokens of calls to one of code: 847 million against 30 million, estimated at "
    "{claimed_per_row:,.0f} tokens a conversation. Its data do not allow that: rows were clipped to 2,049 tokens, so its 112,934 conversations hold at most {most:.1f} to 1 with its "
    "own estimate for code. We counted {counted:.0f} of these conversations: {per_row:.0f} ± {error:.0f} supervised tokens each, which makes {ratio:.2f} to 1 "
    "[{ratio_lo:.2f}, {ratio_hi:.2f}]. Our v6 has the same ratio of rows ({ours_rows:.1f} to 1; theirs {row_ratio:.1f}), draws {ours:.2f} to 1 in tokens, and keeps its code. "
    "A run that was trained at 28 to 1 does lose code (`docs/versions.md`), so the mechanism is possible; the number is not theirs.")  # fmt: skip

# %% [markdown]
# Conversations and supervised tokens that each SFT run read, counted by its own loader. A conversation with calls has fewer
# supervised tokens than a function:

# %% tags=["hide-input"]
articles.table(mixes, {"name": "run", "domain": "domain", "conversations": ("conversations", ",.0f"), "supervised_tokens": ("supervised tokens", ",.0f"), "share": ("share of tokens", ".0%"),
                       "tokens_each": ("tokens a conversation", ".0f")})  # fmt: skip


# %% [markdown]
# ## What is lost is code
#
# Held-out loss of each domain in nats a conversation, so that tags in text and reserved tags compare. Each panel has its own scale:
# code costs at least nine times as much as calls in every version.

# %% tags=["hide-cell"]
def domain_losses(rows, domains, metric, label, title):
    """Held-out loss of each domain: a panel with its own scale per domain, a bar per checkpoint; a name that ends in RL
    has the colour of RL."""
    names = list(rows)
    fig, axes = new_figure(title, cols=len(domains), size=(7.6, 1.3 + 0.27 * len(rows)), sharey=True)
    for ax, domain in zip(axes[0], domains):
        losses = np.array([row.get(f"{metric}/{domain}", np.nan) for row in rows.values()], dtype=float)
        ax.barh(range(len(names)), losses, 0.7, color=[colour_of("rl" if n.endswith("RL") else "sft") for n in names])
        for at, loss in enumerate(losses):
            ax.text(loss, at, f" {loss:.3g}" if np.isfinite(loss) else "", va="center", fontsize=7, color=GREY)
        ax.set_xlim(0, 1.3 * np.nanmax(losses))
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.set_title(domain, fontsize=8.5, loc="left")
        ax.grid(False)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    fig.supxlabel(f"{label}; each panel has its own scale", fontsize=8.5)
    return fig


# %% tags=["hide-input"]
domains = [d for d in ("calls", "code", "chat", "copy") if any(f"heldout_nats/{d}" in r for r in rows.values())]
domain_losses(rows, domains, "heldout_nats", "held-out loss (nats a conversation)", "code costs " + ", ".join(f"{rows[n]['heldout_nats/code']:.0f} ({n})" for n in sft) + " nats a conversation")


# %% [markdown]
# ## Does it read its prompt?
#
# We change one part of a prompt and compare the greedy answers. Only cases with the expected answer before the change count (n of them).
# Blue answers follow the change, red ones ignore it. Neither v6 nor v7 was trained on a request for a missing tool (v7's neutral
# prompts and negatives go with code), and both still call.

# %% tags=["hide-cell"]
def counterfactual_outcomes(rows, changes, title):
    """What answers did after each change of the prompt, stacked: a panel per change, a bar per checkpoint, beside it
    the number n of cases."""
    names = list(dict.fromkeys(rows["checkpoint"]))
    fig, axes = new_figure(title, cols=len(changes), size=(8.6, 1.6 + 0.3 * len(names)), sharey=True)
    for ax, name in zip(axes[0], changes):
        mine = rows[rows["swap"] == name].set_index("checkpoint").reindex(names)
        unknown = pd.Series(0.0, index=names)
        stack_bars(ax, {o: mine[o] if o in mine else unknown for o in OUTCOME_COLOURS}, OUTCOME_COLOURS)
        for i, n in enumerate(mine["n"]):
            ax.text(1.03, i, "" if np.isnan(n) else f"n={int(n)}", va="center", fontsize=6.5, color=GREY)
        ax.set_title(CHANGES.get(name, name), fontsize=8, loc="left")
        ax.set_xlim(0, 1)
        ax.set_xticks((0, 0.5, 1), ("0", "½", "1"))
        ax.grid(False)
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    outer_legend(fig, axes[0, 0], "outside lower center", ncols=3)
    return fig


# %% tags=["hide-input"]
shown = flips.assign(checkpoint=flips["name"])
counterfactual_outcomes(shown, SWAPS, "tools taken away, and the call stays: " + ", ".join(f"{n} {off.loc[n, 'ignores']:.0%}" for n in sft))

# %% [markdown]
# Full answers before and after the change (after SFT; other changes are in the appendix):

# %% tags=["hide-input"]
swap_words = {"tools_off": "tools taken away", "tools_on": "tools offered", "tool_swapped": "another tool offered", "tool_renamed": "tool renamed", "value_swapped": "another value"}
evidence = {"name": "version", "change": "change", "request": ("request after the change", articles.VERBATIM), "before": ("answer before", articles.VERBATIM), "after": ("answer after", articles.VERBATIM),
            "outcome": "the answer"}  # fmt: skip
texts = texts.assign(change=texts["swap"].map(swap_words)).sort_values(["swap", "name"], key=lambda c: c.map({v: i for i, v in enumerate([*SWAPS, *rows])}), kind="stable")
main = texts[texts["name"].isin(sft) & texts["swap"].isin(("tools_off", "tools_on"))]
articles.table(varied_examples(main, ["swap", "name"]), evidence)

# %% [markdown]
# ## What each ingredient of v7 adds
#
# v6's rows, v7's balance by supervised tokens, then neutral system prompts, negatives, and both: behaviour at the end of SFT
# on validation prompts (32 a cell, one seed each).

# %% tags=["hide-input"]
behaviour_table(chain, f"against v6 SFT, {len(sure)} of {len(steps) * len(CELLS)} differences lie beyond their interval")

# %% tags=["hide-input"]
articles.table(pd.DataFrame([dict(name=name, **{cell: in_points(i) for cell, i in found.items()}) for name, found in steps.items()]), {"name": "against v6 SFT"} | cell_words)

# %% [markdown]
# Of so many comparisons, chance puts about one beyond its interval. The parts do not restore declining: only ours, with
# such requests in its SFT, declines, and only where no tool is offered.
#
# ## Appendix
#
# **Parameters and runs.** SFT, RL and evaluation of v5, v6, v7 (`codechat run v5` and so on) and ours (recipe `ours`), the parts of v7,
# `python tools/counterfactuals.py` over all of them, and a count of supervised tokens (`python tools/supervised_tokens.py`). Nothing was
# trained for this report. Published figures are transcribed from the original project's own reports (`reports/published`).

# %% tags=["hide-input"]
missing = [v for v in ("v5", "v6", "v7") if v not in versions] + [r for r in ("v7-mix", "v7-neutral", "v7-negatives") if f"{recipe}/{r}" not in parts]
read = with_settings(pd.concat([frames["runs"], tested["runs"]]), ["max_steps", "device_batch_size", "group_size", "lr", "seed"])
articles.table(read, {"run": f"run (missing: {', '.join(missing) or 'none'})", "kind": "kind", "parent": "parent", "max_steps": ("steps", ".0f"), "device_batch_size": ("batch", ".0f"),
                      "group_size": ("group size", ".0f"), "lr": ("learning rate", "g"), "seed": ("seed", ".0f"), "minutes": ("minutes", ".1f"), "commit": "commit", "state": "state of the code"})  # fmt: skip

# %% [markdown]
# **The numbers** on test: wrong calls (256 prompts), a call where one is correct, code where it is requested without tools (64 prompts
# each), exact calls at T = 1 (200 problems, 8 answers each).

# %% tags=["hide-input"]
summary = [dict(name=n, wrong=f"{i.value:.2f} [{i.lo:.2f}, {i.hi:.2f}]", call=rows[n]["probe/tool_with_tools/call"], code=rows[n]["probe/code_without_tools/code"],
                exact=f"{rows[n]['pass@1']:.3f} [{rows[n]['pass@1/lo']:.3f}, {rows[n]['pass@1/hi']:.3f}]", eight=rows[n]["pass@8"]) for n, i in calling.items()]  # fmt: skip
articles.table(pd.DataFrame(summary), {"name": "checkpoint", "wrong": "wrong calls", "call": ("a correct call", ".2f"), "code": ("code", ".2f"), "exact": "pass@1", "eight": ("pass@8", ".3f")})

# %% [markdown]
# **Published pass@k of v5** after RL, with its source:

# %% tags=["hide-input"]
articles.table(plain["pass_at_k"], {"run_name": "run (published)", "task": "task", "k": "k", "pass_at_k": ("pass@k", ".4f"), "n_problems": "problems", "n_samples": "answers each", "temperature": "temperature",
               "source": "source"})  # fmt: skip

# %% [markdown]
# **Published mix of v6:**

# %% tags=["hide-input"]
articles.table(theirs.reset_index().assign(domain=lambda f: f["domain"].str.removeprefix("sft_").str.replace("_", " ")), {"domain": "domain (published)", "rows": ("rows", ",.0f"), "supervised_tokens": ("supervised tokens", ",.0f"), "epochs": ("epochs", ".0f"), "note": "note", "source": "source"})

# %% [markdown]
# **Swaps:** outcomes with 95 % intervals (Wilson).

# %% tags=["hide-input"]
articles.table(flips.assign(change=flips["swap"].map(swap_words)).sort_values("swap", kind="stable"),
               {"change": "change", "name": "checkpoint", "asked": ("cases", ".0f"), "n": ("counted", ".0f"), "follows": ("follows", ".2f"), "follows/lo": ("from", ".2f"),
                "follows/hi": ("to", ".2f"), "ignores": ("ignores", ".2f"), "other": ("other", ".2f")})  # fmt: skip

# %% [markdown]
# **More of what they wrote**, one answer for each change and checkpoint:

# %% tags=["hide-input"]
articles.table(varied_examples(texts.drop(main.index), ["swap", "name"]), evidence)

# %% [markdown]
# **Held-out loss of v7's parts** (nats a token):

# %% tags=["hide-input"]
losses = pd.DataFrame([dict(name=name) | {k.partition("/")[2]: v for k, v in row.items() if k.startswith("heldout_loss/")} for name, row in chain.items()])
articles.table(losses, {"name": "run"} | {c: (c, ".3f") for c in losses if c != "name"})

# %% tags=["hide-cell"]
# What the answer says, and that its numbers follow from the rows.
assert len(calling) == 2 * len(versions) + 2 and all(i.lo <= i.value <= i.hi for i in calling.values())
assert numbers["writes_v5_SFT"] == 0 < numbers["writes_v6_SFT"] and all(rows[f"{v} SFT"]["probe/tool_without_tools/call"] > 0.9 for v in versions)
assert numbers["declines_ours_SFT"] > 0.9 and ratio[1] < numbers["most"] < numbers["claimed"] and sample["most"] <= 2048 and round(numbers["claimed"]) == 28
assert expected_behaviour(evals[f"{recipe}/v5-sft"].iloc[1], "code_without_tools")[0] == 0 and evals[f"{recipe}/v5-sft"]["step"].iloc[1] <= 40
assert all(row["heldout_nats/code"] > 9 * row["heldout_nats/calls"] for row in rows.values())
run_frames.headline(numbers, place)
