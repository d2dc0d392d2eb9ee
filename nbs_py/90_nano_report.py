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
# # From an empty folder to function calls: what the nano run learned, and what RL added
#
# **Question.** Does a small model, trained through every stage on this machine, answer unseen requests with exact
# function calls; and does REINFORCE on the staircase reward add to what SFT reached?
#
# **Result.** The last cell prints it, with n, N, temperature and 95 % intervals.
#
# **Runs/needs.** The finished runs `pretrain`, `sft`, `diagnose`, `rl` and `evaluate` of recipe nano
# (`codechat run nano`). Nothing is trained here.

# %% tags=["parameters"]
runs = "nano"
out = "runs/nano/report/nano"
frozen = False

# %%
from IPython.display import Markdown

from codechat import plots, results, run_frames
from codechat.runs.run import ROOT
from codechat.tasks.funcall.staircase import DEFAULT, TIERS

stages = ("pretrain", "sft", "diagnose", "rl")
names = [*(f"{runs}/{stage}" for stage in stages), *run_frames.seeds_of(f"{runs}/evaluate")]
frames = run_frames.gather(names, ROOT / out / "data", frozen, drop={"per_problem": ["tiers"]})  # no figure uses these, and they are the largest
name = {run.rpartition("/")[2]: run for run in frames["runs"]["run"]}
seeds = [run for stage, run in name.items() if stage.startswith("evaluate")]
name = {stage: name[stage] for stage in (*stages, "evaluate")}
metrics = {stage: run_frames.rows_of(frames["metrics"], name[stage]) for stage in ("pretrain", "sft", "rl")}
evals = {stage: run_frames.rows_of(frames["evals"], name[stage]) for stage in name}
figures = ROOT / out / "figures"

# %%
table = frames["runs"].assign(minutes=(frames["runs"]["seconds"] / 60).round(1))
table[["run", "kind", "parent", "minutes", "commit", "dirty"]].fillna("").set_index("run")

# %% [markdown]
# ## Pretraining
#
# Loss in nats per token depends on the tokenizer; bits per byte of validation files does not, and falls with it.

# %%
plots.save(plots.pretraining(name["pretrain"], metrics["pretrain"], evals["pretrain"]), "pretraining", figures)

# %%
plots.save(plots.lr_and_throughput({name[s]: metrics[s] for s in ("pretrain", "sft")}), "rates", figures)

# %% [markdown]
# ## SFT
#
# Code and calls are learned together. If one domain were overwritten by another, its held-out loss would rise.

# %%
plots.save(plots.heldout_losses(name["sft"], evals["sft"]), "held_out", figures)

# %% [markdown]
# A call is expected in one cell of the matrix only: a tool is requested, and it is offered.

# %%
plots.save(plots.behaviour_over_training(name["sft"], evals["sft"]), "behaviour", figures)

# %% [markdown]
# ## Is there a gradient for RL?
#
# The staircase rewards partly correct calls, so groups of completions can differ before any of them is
# correct.

# %%
fixed = {t: (getattr(DEFAULT, t),) * 2 for t in TIERS if t != "partial"}
plots.save(plots.staircase({t: fixed.get(t, (DEFAULT.name_only, DEFAULT.cap)) for t in TIERS}), "staircase", figures)

# %%
verdict = evals["diagnose"].iloc[-1]
print(f"{verdict['verdict']}: {verdict['remedy']}")
print(f"{verdict['effective_groups']:.0f} of {verdict['n_problems']:.0f} groups have variance")
plots.save(plots.tier_histogram(verdict, TIERS), "diagnosis", figures)

# %% [markdown]
# ## REINFORCE
#
# The reward is optimized; exact match is the goal. Points are held-out problems.

# %% tags=["thumbnail"]
plots.save(plots.rl_progress(name["rl"], metrics["rl"], evals["rl"]), "rl", figures)

# %%
plots.save(plots.tier_flow(name["rl"], metrics["rl"], TIERS), "tiers", figures)

# %% [markdown]
# A group with equal rewards has no gradient, and a step that changes no bf16 value would be lost at low
# precision.

# %%
plots.save(plots.group_signal(name["rl"], metrics["rl"]), "signal", figures)

# %% [markdown]
# ## Did it learn?
#
# `test` holds unseen argument values, `test_hard` also unseen tools and phrasings. The checkpoint was chosen
# on `select`, the validation split.

# %% tags=["thumbnail"]
ks = [k for k in (1, 8) if f"pass@{k}" in evals["evaluate"]]
plots.save(plots.pass_at_k(evals["evaluate"], ks), "pass_at_k", figures)

# %%
test = evals["evaluate"][evals["evaluate"]["split"] == "test"]
probed = {row["checkpoint"]: row for row in test.to_dict("records") if "probe/tool_with_tools/n" in row}
plots.save(plots.behaviour_heatmap(probed), "matrix", figures) if probed else print("no behaviour probes")

# %% [markdown]
# Sampled completions of the last checkpoint, evenly spread over the test problems:

# %%
samples = run_frames.rows_of(frames["samples"], name["evaluate"])
last = samples[samples["checkpoint"] == test["checkpoint"].iloc[-1]]
Markdown(run_frames.markdown_table(last, ["tier", "request", "completion"], rows=10))

# %% [markdown]
# ## The numbers
#
# RL minus SFT is paired by problem; every seed has its own SFT and RL run from one pretraining run.

# %% tags=["headline"]
gains = []
for seed in seeds:
    rows, counts = run_frames.rows_of(frames["evals"], seed), run_frames.rows_of(frames["per_problem"], seed)
    rows, counts = rows[rows["split"] == "test"], counts[counts["split"] == "test"]
    sft, rl = (counts[counts["checkpoint"] == c].to_dict("records") for c in rows["checkpoint"].iloc[[0, -1]])
    gain = results.paired_difference(sft, rl)
    gains.append(gain)
    before, after = rows["pass@1"].iloc[[0, -1]]
    print(f"{seed}: pass@1 on test {before:.3f} after SFT, {after:.3f} after RL; RL - SFT {gain.value:+.3f} "
          f"[{gain.lo:+.3f}, {gain.hi:+.3f}], n={rl[0]['n']}, N={len(rl)}, temperature {rows['temperature'].iloc[0]:g}")
held = sum(gain.lo > 0 for gain in gains)
print(f"the paired 95 % interval lies above 0 in {held} of {len(gains)} seed{'s' * (len(gains) > 1)}")
assert all(gain.lo <= gain.value <= gain.hi for gain in gains) and len(gains) == len(seeds)
