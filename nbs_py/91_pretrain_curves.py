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
# # Pretraining: our curves beside the published ones, and what a scaling law of size and tokens can predict
#
# **Question.** How does a nano pretraining run look next to the published 2B and 8B runs, and what do ten small runs at two equal budgets
# of compute say about loss, size and tokens?
#
# **Result.** The last cell prints and asserts it.
#
# **Runs/needs.** `nano/pretrain` (recipe nano), the ten runs of recipe `scaling`, and `scaling/nano-long`: nano's checkpoint measured on the validation
# text of the series. Nothing is trained here. Published figures are transcribed from the original project's own reports, never measured here.

# %% tags=["parameters"]
run = "nano/pretrain"
series = ["scaling/nano-low"]
longer = "scaling/nano-long"
out = "reports/pretrain_curves"
frozen = False

# %%
import json

import numpy as np
import pandas as pd

from codechat import PRESETS, GPTConfig, comparisons, plots, run_frames, scaling_law
from codechat.runs.run import ROOT

frames = run_frames.gather([run], ROOT / out / "data", frozen)
points_of = run_frames.gather([*series, longer], ROOT / out / "data" / "series", frozen)
metrics, evals = (run_frames.rows_of(frames[table], run) for table in ("metrics", "evals"))
frames["runs"][["run", "kind", "seconds", "commit", "dirty"]].set_index("run")

# %% [markdown]
# ## Loss and bits per byte
#
# Loss in nats per token depends on the tokenizer. Bits per byte of unseen files does not, and can be compared between any two of our runs.

# %% tags=["thumbnail"]
plots.pretraining(run, metrics, evals)

# %% [markdown]
# ## Rates
#
# The learning rate warms up, stays constant, and decays over the last two fifths. MFU is relative to the peak
# that this machine reached in a matrix product when the run started, under the load of that moment.

# %%
plots.training_panels(run, metrics)

# %% [markdown]
# ## Beside the published runs
#
# Another corpus and another tokenizer: the shapes can be compared (fast, then slow, no plateau), the levels
# cannot. A published point is one step of one rank, so its noise is a tenth of a nat. Bits per byte, and
# throughput over time, were not published.

# %%
runs, losses = run_frames.published("runs"), run_frames.published("pretrain_loss")
pretrained = runs[runs["stage (published)"] == "pretrain"].set_index("run_name (published)")
batch = pretrained["global_batch_tokens (published)"]
theirs = {label: rows for label, rows in losses.groupby("run_name (published)")}
drawn = {label: (rows["step (published)"] * batch[label], rows["loss (published)"]) for label, rows in theirs.items()}
plots.beside_published(run, metrics, drawn, f"{metrics['tokens'].max() / 1e6:.1f}M tokens measured; published runs saw over 1,000 times as many")

# %% [markdown]
# The published figures, in a separate table. The last column is computed from it: FLOPs of the preset of that
# size at 2,048 tokens, times the published throughput, over the 312 TFLOP/s of each A800.

# %%
flops = {"codechat_2b": ("2b", 1), "codechat_8b": ("8b", 8)}
shown = pretrained[[f"{c} (published)" for c in ("params", "steps", "tokens", "hours", "final_loss", "throughput_ktok_s")]].copy()
shown["MFU (from published figures)"] = [
    GPTConfig(**PRESETS[size]).flops_per_token(2048) * shown.loc[name, "throughput_ktok_s (published)"] * 1e3 / (gpus * 312e12)
    for name, (size, gpus) in flops.items()]  # fmt: skip
shown

# %% [markdown]
# Gradient norms were published as single values and as the largest of a range:

# %%
run_frames.published("grad_norm").drop(columns="source (published)")

# %% [markdown]
# ## Equal compute
#
# Five sizes spend the same FLOPs, so a larger model sees fewer tokens. Learning rates are nano's for all sizes.

# %%
points = comparisons.scaling_points(points_of, series)
points.set_index("run")

# %%
law = scaling_law.fit(points["n"], points["d"], points["loss"])
kinds = {"E + A/N^a + B/D^b": {}, "A/N^a + B/D^b (E = 0)": dict(floor=False), "E + B/D^b (no size)": dict(size=False)}
missed = {name: scaling_law.leave_one_out_errors(points["n"], points["d"], points["loss"], **kind) for name, kind in kinds.items()}
errors = {name: float(np.sqrt(np.mean(values**2))) for name, values in missed.items()}
best = points.loc[points.groupby("budget")["loss"].idxmin()]
size = best["run"].str.rpartition("/")[2].str.rpartition("-")[0]
where = ", ".join(f"at {budget:.0e} FLOPs {name} is best" for budget, name in zip(best["budget"], size))
plots.iso_flops(points, law, where)

# %% [markdown]
# The law is fitted by a search over its exponents and its floor; `region` holds the fits that are not
# significantly worse than the best (95 %). A parameter whose range reaches the end of the search is not
# identified, and its value should not be quoted.

# %%
table = pd.DataFrame({p: {"fitted": getattr(law, p), "from": law.region[p][0], "to": law.region[p][1], "identified": p in law.identified} for p in "EAaBb"}).T
table

# %% [markdown]
# Predicting each point by a law through the others shows whether five parameters are too many for these
# points:

# %%
pd.Series(errors, name="root mean squared error of left-out points (nats/token)").to_frame()

# %%
plots.law_residuals(points, {"fitted": law.residuals, "left out": missed["E + A/N^a + B/D^b"]},
                           f"the law misses its own points by {law.rmse:.3f}, points it has not seen by {errors['E + A/N^a + B/D^b']:.3f}")

# %% [markdown]
# ## A point far outside
#
# nano's own pretraining spent many times the larger budget, with a batch four times as large. It was measured
# on the validation text of the series and is not part of the fit.

# %%
config = json.loads(frames["runs"]["config"].iloc[0])
far = dict(n=GPTConfig(**config["model"]).n_params, d=int(metrics["tokens"].max()), loss=float(run_frames.rows_of(points_of["evals"], longer)["val_loss"].iloc[0]))
predicted = {name: float(scaling_law.fit(points["n"], points["d"], points["loss"], **kind).predict(far["n"], far["d"])) for name, kind in kinds.items()}
beyond = far["d"] * GPTConfig(**config["model"]).flops_per_token(config["seq_len"]) / points["flops"].max()
pd.DataFrame({"predicted": predicted, "measured minus predicted": {name: far["loss"] - value for name, value in predicted.items()}})

# %% [markdown]
# ## The numbers

# %% tags=["headline"]
first, last = evals[evals["val_bpb"].notna()]["val_bpb"].iloc[[0, -1]]
full = "E + A/N^a + B/D^b"
print(f"{run}: {first:.2f} to {last:.2f} bits per byte of unseen code in {metrics['tokens'].max() / 1e6:.2f}M tokens; "
      f"median {metrics['tok_per_s'].median():,.0f} tokens/s, MFU {metrics['mfu'].median():.0%} (n = 1 seed)")
print(f"scaling: {len(points)} runs of equal compute; {where}")
print(f"law: E {law.E:.2f}, A {law.A:.2f} / (N / {law.n0:.2g})^{law.a:.2f}, B {law.B:.2f} / (D / {law.d0:.2g})^{law.b:.2f}; "
      f"identified: {', '.join(law.identified) or 'none'}; not: {', '.join(p for p in 'EAaBb' if p not in law.identified) or 'none'}")
without = "A/N^a + B/D^b (E = 0)"
print(f"left-out points are missed by {errors[full]:.3f} nats/token ({errors[without]:.3f} without E); a run with {beyond:.0f} times the compute ends "
      f"{far['loss'] - predicted[full]:+.3f} from the law ({far['loss'] - predicted[without]:+.3f} without E)")
assert last < first and len(points) == len(series) and np.allclose(law.residuals, points["loss"] - law.predict(points["n"], points["d"]))
assert (points.groupby("budget")["flops"].agg(lambda f: f.max() / f.min()) < 1.05).all()

# %%
numbers = dict(bpb_first=first, bpb_last=last, tokens=metrics["tokens"].max(), E=law.E, A=law.A, a=law.a, B=law.B, b=law.b, rmse=law.rmse,
               left_out=errors[full], far_measured=far["loss"], far_predicted=predicted[full], far_without_floor=predicted[without])
run_frames.headline(numbers, ROOT / out / "data")
