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
# # The specialist: a model that answers every request with a call, what caused it, and what repairs it
#
# **Question.** v5 was fine-tuned on calls alone and calls a function whatever is asked. What does it do in
# each cell of (tool or code requested) x (tools offered or not), does it read its prompt at all, and which
# later change repaired it: v6's joint rows, v7's balanced mix, neutral prompts or negatives, or RL?
#
# **Result.** The last cell prints and asserts it.
#
# **Runs/needs.** SFT, RL and evaluation of v5, v6, v7 (`codechat run v5` ...) and ours, the parts of v7,
# `codechat swaps` over all of them, and a count of supervised tokens (`python -m
# codechat.data.supervised_tokens`). A missing version is named. Nothing is trained here.

# %% tags=["parameters"]
versions = ["v5", "v6", "v7"]
parts = ["nano/v7-mix"]
ours = ["nano/sft", "nano/ours-evaluate", "nano/ours-over-rl"]
swaps = ["nano/swaps"]
supervision = "nano/supervision"
out = "reports/specialist"
frozen = False

# %%
import math

import pandas as pd

from codechat import plots, run_frames
from codechat.evaluation.behaviour_probes import CELLS
from codechat.evaluation.counterfactuals import SWAPS
from codechat.evaluation.intervals import share_difference, wilson_interval
from codechat.reports.comparisons import expected_behaviour, sft_mix, wrong_calls
from codechat.runs.run import ROOT

# %%
place, few = ROOT / out / "data", dict(keep={"samples": "", "per_problem": ""})
trained = [f"nano/{v}-{stage}" for v in versions for stage in ("sft", "rl")]
frames = run_frames.gather([*trained, *parts, *ours[:1]], place, frozen, more=lambda: {"drawn": sft_mix([run for run in [*trained, *ours[:1]] if "sft" in run])}, **few)
judged = [*(f"nano/{v}-evaluate" for v in versions), *ours[1:2]]
tested = run_frames.gather(judged, place / "evaluate", frozen, **few)["evals"]
over = run_frames.gather(ours[2:], place / "over", frozen, **few)["evals"] if ours[2:] else None
swapped = run_frames.gather(swaps, place / "swaps", frozen, keep={"per_problem": ""}) if swaps else None
counted = run_frames.gather([supervision], place / "supervision", frozen, **few)["evals"] if supervision else None
evals = {run: run_frames.rows_of(frames["evals"], run) for run in frames["runs"]["run"]}
missing = [v for v in ("v5", "v6", "v7") if v not in versions] + [r for r in ("nano/v7-mix", "nano/v7-neutral", "nano/v7-negatives") if r not in parts]
print(f"missing: {', '.join(missing) or 'nothing'}")
frames["runs"][["run", "kind", "parent", "seconds", "commit", "dirty"]].fillna("").set_index("run")

# %% [markdown]
# ## The matrix at the end of training
#
# A call is correct in the first cell only. All were evaluated on the same test prompts with the same
# settings; intervals are 95 % (Wilson).

# %% tags=["thumbnail"]
rows = {row["checkpoint"].partition("@")[0]: row for row in tested.to_dict("records")}
calling = {name: wilson_interval(*wrong_calls(row)) for name, row in rows.items()}
plots.behaviour_table(rows, "calls where no call is correct: " + ", ".join(f"{n.rpartition('/')[2]} {i.value:.0%}" for n, i in calling.items() if "sft" in n))

# %% [markdown]
# ## Over training
#
# SFT first: every version starts from the same general SFT (ours from pretraining).

# %%
during = {run: evals[run] for run in evals if run.rpartition("/")[2].endswith("sft")}
plots.behaviour_of_runs(during, "SFT: expected behaviour by cell, n = 32 prompts a point")

# %% [markdown]
# Then RL on calls, whose requests all require one. If RL restored other behaviour, the lines would rise.

# %%
later = {run: evals[run] for run in evals if run.rpartition("/")[2].endswith("-rl")}
if over is not None:  # our RL run logs no probes: its checkpoints were probed afterwards, the SFT one as step 0
    later["nano/rl"] = over.assign(step=over["step"].where(over["checkpoint"].str.contains("/rl@"), 0))
plots.behaviour_of_runs(later, "RL on calls: expected behaviour by cell, n = 32 prompts a point")

# %% [markdown]
# ## What the mixes were made of
#
# Conversations and supervised tokens that each SFT run read, counted by its own loader: a conversation with
# calls has fewer supervised tokens than a function, so that 5.6 : 1 in rows is 2.4 : 1 in tokens.

# %%
mixes = frames["drawn"].assign(tokens_each=lambda f: f["supervised_tokens"] / f["conversations"])
mixes.set_index(["run", "domain"]).round(3)

# %% [markdown]
# The published imbalance of v6 (28 : 1 by supervised tokens) assumes 7,500 tokens a row, but rows were cut at
# 2,049. Published figures, in a separate table:

# %%
theirs = run_frames.published("data_mix")
theirs = theirs[theirs["version (published)"] == "v6"].drop(columns=["source (published)", "share_rows (published)", "epochs_from_steps (published)"])
theirs.set_index("domain (published)")

# %% [markdown]
# Counted on a sample of the conversations that the original trained on (GPT-2 tokens, tags in text, every assistant turn supervised, cut at 2,049):

# %%
sample = counted[counted["domain"] == "calls"].iloc[0]
per_row, error = sample["supervised"] / sample["conversations"], 1.96 * sample["sd"] / math.sqrt(sample["conversations"])
code = theirs.set_index("domain (published)").loc["sft_code", "supervised_tokens (published)"]
n_rows = theirs.set_index("domain (published)").loc["sft_funcall_glaive", "rows (published)"]
ratio = [n_rows * x / code for x in (per_row - error, per_row, per_row + error)]
pd.Series({"conversations counted": sample["conversations"], "supervised tokens a conversation": per_row, "95 %, plus or minus": error, "longer than 2,049": sample["cut"],
           "calls to code in supervised tokens, with their estimate for code": ratio[1]}, name="counted").to_frame().round(2)  # fmt: skip

# %% [markdown]
# ## Held-out loss of each domain
#
# Nats per conversation, so that tags in text and reserved tags compare.

# %%
domains = [d for d in ("calls", "code", "chat", "copy") if any(f"heldout_nats/{d}" in r for r in rows.values())]
lost = {n.rpartition("/")[2]: r["heldout_nats/code"] for n, r in rows.items() if n.endswith("sft")}
plots.domain_losses(rows, domains, "heldout_nats", "held-out loss (nats/conversation)", "code costs " + ", ".join(f"{v:.0f} ({n})" for n, v in lost.items()) + " nats a conversation")

# %% [markdown]
# ## Does it read its prompt?
#
# One part of a prompt is changed and the greedy answer compared. Only cases with the expected answer before
# the change count; n is their number. Neither v6 nor v7 was trained on a request for a missing tool (v7's
# neutral prompts and negatives go with code), and both still call.

# %%
flips = swapped["evals"].assign(checkpoint=lambda f: f["checkpoint"].str.partition("@")[0])
flips = pd.concat([flips[flips["checkpoint"] == name] for name in rows])
off = flips[flips["swap"] == "tools_off"].set_index("checkpoint")
plots.counterfactual_outcomes(flips, SWAPS, "tools taken away, and the call stays: " + ", ".join(f"{n.rpartition('/')[2]} {v:.0%}" for n, v in off["ignores"].items() if "sft" in n))

# %%
flips.set_index(["swap", "checkpoint"])[["asked", "n", "follows", "follows/lo", "follows/hi", "ignores", "other"]].sort_index().round(3)

# %%
pd.DataFrame(swapped["samples"]).query("outcome == 'ignores'").groupby(["checkpoint", "swap"]).head(1)[["checkpoint", "swap", "request", "before", "after"]].head(12)

# %% [markdown]
# ## What each ingredient of v7 adds
#
# From v6's rows to v7's balance by supervised tokens, then with neutral system prompts, with negatives, with
# both: behaviour at the end of SFT on `select`, the validation split (n = 32 a cell), and the differences
# against v6, 95 % (Newcombe). One seed each.

# %%
chain = {run: evals[run].iloc[-1].to_dict() for run in ("nano/v6-sft", *parts, *(f"nano/{v}-sft" for v in versions if v == "v7"))}
base = chain["nano/v6-sft"]
steps = {run: {cell: share_difference(expected_behaviour(base, cell), expected_behaviour(row, cell)) for cell in CELLS} for run, row in chain.items() if run != "nano/v6-sft"}
pd.DataFrame({run: {cell: f"{i.value:+.2f} [{i.lo:+.2f}, {i.hi:+.2f}]" for cell, i in found.items()} for run, found in steps.items()})

# %%
sure = [f"{run.rpartition('/')[2]} {cell} {i.value:+.2f}" for run, found in steps.items() for cell, i in found.items() if i.lo > 0 or i.hi < 0]
plots.behaviour_table(chain, f"against v6, behaviour that changed beyond its interval: {', '.join(sure) or 'none'}")

# %%
losses = {run: {name.partition("/")[2]: value for name, value in row.items() if name.startswith("heldout_loss/")} for run, row in chain.items()}
pd.DataFrame(losses).round(3)

# %% [markdown]
# ## Does RL recover it?
#
# Calls where none is correct, after RL minus before.

# %%
pairs = [(f"nano/{v}-sft", f"nano/{v}-rl") for v in versions] + [("nano/sft", "nano/rl")]
pairs = [(a, b) for a, b in pairs if a in rows and b in rows]
changes = {b: share_difference(wrong_calls(rows[a]), wrong_calls(rows[b])) for a, b in pairs}
plots.differences(pd.DataFrame([dict(name=n, value=i.value, lo=i.lo, hi=i.hi) for n, i in changes.items()]),
                   "RL changes the share of wrong calls by " + ", ".join(f"{i.value:+.2f} ({n.rpartition('/')[2]})" for n, i in changes.items()))

# %% [markdown]
# ## The numbers

# %% tags=["headline"]
for name, interval in calling.items():
    c, n = expected_behaviour(rows[name], "tool_with_tools")
    k, m = expected_behaviour(rows[name], "code_without_tools")
    print(f"{name}: calls where none is correct {interval.value:.2f} [{interval.lo:.2f}, {interval.hi:.2f}]; a call where one is {c / n:.2f}, code where it is asked "
          f"{k / m:.2f} (n={n} each); exact calls {rows[name]['pass@1']:.3f} [{rows[name]['pass@1/lo']:.3f}, {rows[name]['pass@1/hi']:.3f}]")
v6 = mixes[mixes["run"] == "nano/v6-sft"].set_index("domain")["supervised_tokens"]
print(f"v7's parts against v6, cells that changed beyond their interval: {', '.join(sure) or 'none'} (n = 32 a cell, {len(steps) * len(CELLS)} comparisons)")
print(f"our v6 drew {v6['calls'] / v6['programs']:.2f} supervised tokens of calls to one of programs")
print(f"the original's v6: calls to code in supervised tokens: {ratio[1]:.2f} [{ratio[0]:.2f}, {ratio[2]:.2f}] to 1 (calls counted on {int(sample['conversations'])} conversations, code "
      "as published)")
assert len(calling) == 2 * len(versions) + 2 and all(i.lo <= i.value <= i.hi for i in calling.values())
assert ratio[1] < 28 and sample["most"] <= 2048

# %% tags=["headline"]
back = [n for n, i in changes.items() if i.hi < 0]
print(f"does RL recover other behaviour? wrong calls fall in {len(back)} of {len(changes)} runs{': ' + ', '.join(back) if back else ''}; missing here: {', '.join(missing) or 'nothing'}")

# %%
numbers = {f"wrong_{n}": i.value for n, i in calling.items()} | {f"code_{n}": r["heldout_nats/code"] for n, r in rows.items()} | dict(ratio=ratio[1], ours=v6["calls"] / v6["programs"])
numbers |= {f"rl_{n}": i.value for n, i in changes.items()} | {f"off_{n}": v for n, v in off["ignores"].dropna().items()}
run_frames.headline(numbers, place)
