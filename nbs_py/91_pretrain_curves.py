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
# # A small pretraining run falls like the published ones; ten runs do not show the best size
#
# **Question.** How does a small pretraining run look beside the published 2B and 8B runs, and what do ten runs of equal compute say about loss, size and tokens?

# %% tags=["parameters", "hide-cell"]
recipe = "nano"
series = ["scaling/d2x32-low", "scaling/d2x64-low", "scaling/d2x128-low", "scaling/nano-low", "scaling/d4x256-low",
          "scaling/d2x32-high", "scaling/d2x64-high", "scaling/d2x128-high", "scaling/nano-high", "scaling/d4x256-high"]
out = "reports/pretrain_curves"
frozen = True  # False: from the runs on this machine, whose rows then replace those of `out`

# %% tags=["hide-cell"]
import json
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from codechat.models.config import PRESETS, GPTConfig
from codechat.runs.paths import ROOT
from codechat_lab.reports import articles, plots, run_frames
from codechat_lab.reports.style import (
    GREY,
    OKABE_ITO,
    colour_of,
    draw_published,
    draw_smoothed,
    finish,
    label_of,
    new_figure,
)


def shape_of(config):  # committed runs may have settings that are gone
    return GPTConfig(**{name: value for name, value in config["model"].items() if name in GPTConfig.__dataclass_fields__})


run, data = f"{recipe}/pretrain", ROOT / out / "data"
frames = run_frames.gather([run], data, frozen)
points_of = run_frames.gather(series, data / "series", frozen)
metrics, evals = (run_frames.rows_of(frames[table], run) for table in ("metrics", "evals"))
config = json.loads(frames["runs"]["config"].iloc[0])
model = shape_of(config)
validated = evals[evals["val_bpb"].notna()]


# %% tags=["hide-cell"]
def short_number(value):
    """A count with two significant digits: 365120 is "370k"."""
    value = float(f"{value:.2g}")
    size, suffix = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:g}{suffix}"


def short_power(value):
    """A budget with one digit: 1e12."""
    return f"{value:.0e}".replace("e+", "e")


# %% tags=["hide-cell"]
# What was published, over tokens instead of steps. Windows that lie within a phase are left out.
words = {"codechat_2b": "2B", "codechat_8b": "8B"}
runs, single, means = (run_frames.published(name).rename(columns=lambda c: c.removesuffix(" (published)")) for name in ("runs", "pretrain_loss", "pretrain_phases"))
pretrained = runs[runs["stage"] == "pretrain"].set_index("run_name").loc[list(words)]
means = means[~means["phase"].str.startswith(("trend_window", "last_500"))]
batch = pretrained["global_batch_tokens"]
single = single.assign(tokens=single["step"] * single["run_name"].map(batch))
means = means.assign(first=means["step_from"] * means["run_name"].map(batch), last=means["step_to"] * means["run_name"].map(batch))
means = means.rename(columns=dict(mean_loss="mean", min_loss="lo", max_loss="hi"))
drawn_points, drawn_phases = ({label: table[table["run_name"] == name] for name, label in words.items()} for table in (single, means))
flops = {"codechat_2b": ("2b", 1), "codechat_8b": ("8b", 8)}
utilization = [GPTConfig(**PRESETS[size]).flops_per_token(2048) * pretrained.loc[name, "throughput_ktok_s"] * 1e3 / (gpus * 312e12)
               for name, (size, gpus) in flops.items()]  # fmt: skip


# %% tags=["hide-cell"]
def scaling_points(frames, runs):
    """run, n (parameters), d (tokens), flops, budget (flops to one digit), loss and bpb of pretraining runs at their
    last validation."""
    points, configs = [], frames["runs"].set_index("run")["config"]
    for run in runs:
        config = json.loads(configs[run])
        shape, last = shape_of(config), run_frames.rows_of(frames["evals"], run).iloc[-1]
        tokens = config["max_steps"] * config["device_batch_size"] * config["grad_accum"] * config["seq_len"]
        flops = tokens * shape.flops_per_token(config["seq_len"])
        size = dict(run=run, n=shape.n_params, d=tokens, flops=flops, budget=float(f"{flops:.0e}"))
        points.append(size | dict(loss=last["val_loss"], bpb=last["val_bpb"]))
    return pd.DataFrame(points)


def lowest_of_budgets(points):
    """The point of lowest loss of each budget; `border` = it is the smallest or the largest size of its budget, so that
    the optimum may lie outside the grid."""
    groups = points.groupby("budget")["n"]
    rows = points.assign(border=(points["n"] == groups.transform("min")) | (points["n"] == groups.transform("max")))
    return rows.loc[points.groupby("budget")["loss"].idxmin()]


# %% tags=["hide-cell"]
# A law of loss over size and tokens, L = E + A / N^a + B / D^b (arXiv:2203.15556, eq. 2), and which parameters the points identify. Given a, b and E it
# is linear in A and B, so the fit searches a grid of the three: no start values, no local minima. `region` holds the range of each parameter among the
# fits that are not significantly worse than the best (F test of one parameter, 95 %); one whose range touches the end of its grid is not identified.
# Deviation from the source: squared error of the loss instead of the Huber loss of its logarithm.
EXPONENTS = np.round(np.arange(0.05, 1.501, 0.05), 2)
FLOORS = 41  # values of E from 0 to the smallest loss
# Square of Student's t at 95 %, by degrees of freedom.
T_SQUARED = (161.4, 18.51, 10.13, 7.709, 6.608, 5.987, 5.591, 5.318, 5.117, 4.965)


@dataclass(frozen=True)
class Law:
    """E, A, B in nats per token, A and B at n0, d0 (geometric means). residuals: (P,) measured minus fitted."""

    E: float
    A: float
    B: float
    a: float
    b: float
    n0: float
    d0: float
    residuals: np.ndarray
    region: dict
    identified: tuple

    def predict(self, n, d):
        """Loss of models of n parameters after d tokens."""
        return self.E + self.A * (np.asarray(n) / self.n0) ** -self.a + self.B * (np.asarray(d) / self.d0) ** -self.b

    @property
    def rmse(self):
        return float(np.sqrt(np.mean(self.residuals**2)))


def fit(n, d, loss, *, floor=True, size=True):
    """The law through points (P,), more than it has parameters. floor=False: E = 0; size=False: A = 0."""
    n, d, loss = (np.asarray(x, dtype=float) for x in (n, d, loss))
    free = 2 + floor + 2 * size  # B and b; E; A and a
    n0, d0 = float(np.exp(np.log(n).mean())), float(np.exp(np.log(d).mean()))
    E = np.linspace(0, loss.min(), FLOORS, endpoint=False) if floor else np.zeros(1)
    a, b = (EXPONENTS if size else EXPONENTS[:1]), EXPONENTS
    x, y = (n / n0) ** -a[:, None], (d / d0) ** -b[:, None]  # (len(a), P), (len(b), P)
    x = x if size else np.zeros_like(x)
    rest = loss - E[:, None]  # (len(E), P)
    A, B = two_columns(x[:, None, None], y[None, :, None], rest[None, None])  # (len(a), len(b), len(E))
    errors = ((rest[None, None] - A[..., None] * x[:, None, None] - B[..., None] * y[None, :, None]) ** 2).sum(-1)
    i, j, k = np.unravel_index(errors.argmin(), errors.shape)
    best = dict(E=E[k], A=A[i, j, k], B=B[i, j, k], a=a[i], b=b[j])
    left = len(n) - free
    inside = errors <= errors.min() * (1 + T_SQUARED[min(left, len(T_SQUARED)) - 1] / left) + 1e-12
    grids = dict(E=E, A=A, B=B, a=a[:, None, None], b=b[:, None])
    near = {name: np.broadcast_to(grid, errors.shape)[inside] for name, grid in grids.items()}
    region = {name: (float(values.min()), float(values.max())) for name, values in near.items()}
    exponents, terms = (EXPONENTS[0], EXPONENTS[-1]), (0.0, np.inf)
    ends = dict(a=exponents, b=exponents, E=(E[0], E[-1]), A=terms, B=terms)
    fixed = ([] if floor else ["E"]) + ([] if size else ["A", "a"])
    free_of_ends = (p for p, (lo, hi) in region.items() if p not in fixed and lo > ends[p][0] and hi < ends[p][1])
    residuals = loss - best["E"] - best["A"] * x[i] - best["B"] * y[j]
    values = {k: float(v) for k, v in best.items()}
    return Law(**values, n0=n0, d0=d0, residuals=residuals, region=region, identified=tuple(free_of_ends))


def two_columns(x, y, r):
    """Least squares of r by A x + B y over the last axis, A and B at least 0."""
    xx, yy, xy, xr, yr = ((u * v).sum(-1) for u, v in ((x, x), (y, y), (x, y), (x, r), (y, r)))
    det = xx * yy - xy**2
    with np.errstate(divide="ignore", invalid="ignore"):
        A, B = (np.where(det > 1e-12, top / det, -1.0) for top in (yy * xr - xy * yr, xx * yr - xy * xr))
        alone_x, alone_y = (np.where(uu > 0, np.maximum(ur / uu, 0), 0.0) for uu, ur in ((xx, xr), (yy, yr)))
    gain_x, gain_y = alone_x * xr, alone_y * yr  # squared error that each column removes alone
    inner, only_x = (A >= 0) & (B >= 0), gain_x > gain_y
    return np.where(inner, A, np.where(only_x, alone_x, 0.0)), np.where(inner, B, np.where(only_x, 0.0, alone_y))


def leave_one_out_errors(n, d, loss, **kind):
    """(P,) each point's loss minus the prediction of the law through the other points."""
    n, d, loss = (np.asarray(x, dtype=float) for x in (n, d, loss))
    at = np.arange(len(n))
    return np.array([loss[i] - fit(n[at != i], d[at != i], loss[at != i], **kind).predict(n[i], d[i]) for i in at])


# %% tags=["hide-cell"]
# A known law is recovered, and points at one size identify no exponent of size.
sizes = np.array([1e5, 3e5, 1e6, 3e6, 1e7] * 2)
seen = np.concatenate([1e11 / sizes[:5], 1e13 / sizes[5:]])
truth = fit(sizes, seen, 1.6 + 0.5 * (sizes / 1e6) ** -0.4 + 0.9 * (seen / 1e6) ** -0.3)
assert truth.rmse < 0.01 and abs(truth.a - 0.4) <= 0.1 and abs(truth.b - 0.3) <= 0.1 and abs(truth.E - 1.6) < 0.2
assert "a" not in fit(np.full(10, 1e6), seen, 1.6 + 0.9 * (seen / 1e6) ** -0.3).identified

# %% tags=["hide-cell"]
points = scaling_points(points_of, series)
lowest = lowest_of_budgets(points)
law = fit(points["n"], points["d"], points["loss"])
full, without, no_size = kinds = {"E + A/N^a + B/D^b": {}, "A/N^a + B/D^b (E = 0)": dict(floor=False), "E + B/D^b (no size)": dict(size=False)}
missed = {name: leave_one_out_errors(points["n"], points["d"], points["loss"], **kind) for name, kind in kinds.items()}
errors = {name: float(np.sqrt(np.mean(values**2))) for name, values in missed.items()}
far = dict(n=model.n_params, d=int(metrics["tokens"].max()), loss=float(validated["val_loss"].iloc[-1]))
predicted = {name: float(fit(points["n"], points["d"], points["loss"], **kind).predict(far["n"], far["d"])) for name, kind in kinds.items()}
beyond = far["d"] * model.flops_per_token(config["seq_len"]) / points["flops"].max()

# %% tags=["hide-cell"]
first, last = validated["val_bpb"].iloc[[0, -1]]
tokens = metrics["tokens"].max()
numbers = dict(bpb_first=first, bpb_last=last, tokens=tokens, E=law.E, A=law.A, a=law.a, B=law.B, b=law.b, rmse=law.rmse,
               left_out=errors[full], left_out_without_floor=errors[without], far_measured=far["loss"], far_predicted=predicted[full],
               far_without_floor=predicted[without], params=model.n_params / 1e6, more=pretrained["tokens"].min() / tokens, runs=len(points),
               mfu_2b=utilization[0], mfu_8b=utilization[1], mfu=metrics["mfu"].median(), tok_per_s=metrics["tok_per_s"].median())  # fmt: skip
at_border = lowest[lowest["border"]]
which = "the smallest" if len(at_border) and (at_border["n"] == points["n"].min()).all() else "the smallest or the largest"
open_size = f"at {' and '.join(map(short_power, at_border['budget']))} FLOPs {which} model has the lowest loss, so the optimum may lie outside the grid"
closed_size = "the lowest loss lies inside the grid at every budget, but each point is one seed"

# %% tags=["answer", "hide-input"]
articles.answer(
    numbers,
    "Our {params:.1f}M-parameter model falls from {bpb_first:.2f} to {bpb_last:.2f} bits per byte of unseen code, by less in each quarter of the run; the published 2B run "
    "also falls by less in each phase.",
    "The levels cannot be compared: the published runs have another corpus, another tokenizer and at least {more:,.0f} times as many tokens.",
    f"The {{runs:.0f}} runs at two budgets of compute do not show the best size: {open_size if len(at_border) else closed_size}.",
)

# %% tags=["hide-cell"]
PUBLISHED_COLOURS = ("#000000", "#8c510a")


def beside_published(label, metrics, points, phases, title):
    """Training loss of a run over tokens beside published single steps and published means over ranges of steps.

    points: tokens, loss. phases: first, last (tokens), mean, lo, hi. A mean is a bar as long as its range, its extremes
    are shaded, and nothing is drawn where nothing was published. Shapes compare, levels do not."""
    fig, axes = new_figure(title, size=(7.2, 4.0))
    ax = axes[0, 0]
    draw_smoothed(ax, metrics["tokens"], metrics["train_loss"], colour=OKABE_ITO["blue"], label=label)
    for (name, rows), colour in zip(phases.items(), PUBLISHED_COLOURS):
        ax.hlines(
            rows["mean"], rows["first"], rows["last"], color=colour, linewidth=2.2, label=f"{name}, means (published)"
        )
        middle = (
            rows["first"] * rows["last"]
        ) ** 0.5  # a short range at the right end of a log axis is seen by its mark
        ax.plot(middle, rows["mean"], "_", color=colour, markersize=9, markeredgewidth=2.2)
        for row in rows[rows["lo"].notna() & rows["hi"].notna()].itertuples():
            ax.fill_between((row.first, row.last), row.lo, row.hi, color=colour, alpha=0.13, linewidth=0)
    for (name, rows), marker in zip(points.items(), ("x", "o")):
        draw_published(ax, rows["tokens"], rows["loss"], f"{name}, single steps", marker=marker)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(FixedLocator((0.5, 1, 2, 4, 8)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    finish(ax, x="tokens", y=label_of("train_loss") + ", log scale")
    ax.set_xlabel("tokens, log scale", fontsize=8.5)
    ax.xaxis.set_major_formatter(lambda tokens, _: short_number(tokens))
    return fig


# %% tags=["thumbnail", "hide-input"]
beside_published(f"ours, {numbers['params']:.1f}M parameters", metrics, drawn_points, drawn_phases,
                       f"fast, then slowly: {tokens / 1e6:.1f}M tokens measured, {pretrained['tokens'].min() / 1e9:.1f}B and more published")  # fmt: skip

# %% tags=["hide-input"]
loss = {name: rows[["loss"]].iloc[[0, -1]]["loss"].tolist() for name, rows in drawn_points.items()}
norms = run_frames.published("grad_norm").rename(columns=lambda c: c.removesuffix(" (published)"))
spike = norms[(norms["run_name"] == "codechat_2b") & (norms["kind"] == "value")].nlargest(1, "grad_norm").iloc[0]
steady = metrics[metrics["step"] > config["warmup_steps"]] if "warmup_steps" in config else metrics[metrics["lr"] < metrics["lr"].max()]
articles.beside([
    ("parameters", ", ".join(f"{p / 1e9:.2g}B" for p in pretrained["params"]), f"{numbers['params']:.1f}M", "theirs are " + " and ".join(f"{p / model.n_params:,.0f}" for p in pretrained["params"]) + " times as large"),
    ("tokens", ", ".join(f"{t / 1e9:.2f}B" for t in pretrained["tokens"]), f"{tokens / 1e6:.2f}M", "theirs saw " + " and ".join(f"{t / tokens:,.0f}" for t in pretrained["tokens"]) + " times as many"),
    ("loss, first and last (nats/token)", "; ".join(f"{a:.2f} to {b:.2f} ({name})" for name, (a, b) in loss.items()),
     f"{validated['val_loss'].iloc[0]:.2f} to {validated['val_loss'].iloc[-1]:.2f}", "theirs are single training steps of one rank, ours validation; other tokenizers"),
    ("bits per byte of unseen code", "not published", f"{first:.2f} to {last:.2f}", "independent of the tokenizer; compares our runs with each other"),
    ("throughput (tokens/s)", "; ".join(f"{t:g}k on {g} A800" for t, g in zip(pretrained["throughput_ktok_s"], (1, 8))), f"{numbers['tok_per_s'] / 1e3:.1f}k on two cores", "machines, not methods"),
    ("MFU", f"{utilization[0]:.0%} (2B), {utilization[1]:.0%} (8B)", f"{numbers['mfu']:.0%}", "theirs from published throughput and the stated 312 TFLOP/s, ours against the measured peak"),
    ("largest gradient norm after warm-up", f"{spike['grad_norm']:g} at step {spike['step_from']:,} (2B)", f"{steady['grad_norm'].max():.2f}", "the 2B run had spikes; ours is too short to tell"),
    ("best size for a budget", "not studied", "not shown" if len(at_border) else "inside the grid, one seed", "needs a grid around the optimum and more seeds"),
])  # fmt: skip

# %% [markdown]
# ## The same shape, no common level
#
# Both axes of the figure are logarithmic. A published mark is one step of one rank, so its noise is a tenth of a nat. A published
# mean is a bar as long as the steps that it averages; its extremes are shaded. Nothing was published between them, so nothing is
# drawn there. Where the token counts overlap, the published runs are still warming up: their batches are 16 and 32 times as large as
# ours, so they have made few steps.
#
# The published means of the 2B run and one window of the 8B run, in nats per token:

# %% tags=["hide-input"]
shown = means.assign(phase=means["phase"].str.replace("_", " "), run=means["run_name"].map(words))
articles.table(shown, {"run": "run (published)", "phase": "phase", "step_from": ("from step", ",.0f"), "step_to": ("to step", ",.0f"),
                       "mean": ("mean", ".2f"), "lo": ("lowest", ".2f"), "hi": ("highest", ".2f")})  # fmt: skip

# %% [markdown]
# ## Bits per byte of unseen files
#
# Loss in nats per token depends on the tokenizer. Bits per byte of validation files does not: any two of our runs can be compared
# by it. The published runs did not report it.

# %% tags=["hide-input"]
plots.pretraining(run, metrics, evals)


# %% [markdown]
# ## Equal compute: where is the optimum?
#
# Five sizes spend the same FLOPs, so a larger model sees fewer tokens. An optimum is shown only if larger and smaller models both
# do worse. Learning rates are those of recipe nano for all sizes, and each point is one seed: small differences are not
# resolved.

# %% tags=["hide-cell"]
def iso_flops(points, law, title):
    """Loss over parameters, a line per budget through the law's values. points: run, budget, n, d, loss.

    Beside each point are its tokens: above the highest line, below the others, where no line passes."""
    fig, axes = new_figure(title, size=(7.2, 4.0))
    ax, budgets = axes[0, 0], points.groupby("budget")
    order = budgets["loss"].max().sort_values(ascending=False).index
    for place, (budget, marker, dash) in enumerate(zip(order, "os^", ("--", ":", "-."))):
        rows = budgets.get_group(budget).sort_values("n")
        fitted = law.predict(rows["n"].to_numpy(), rows["d"].to_numpy())
        ax.plot(rows["n"], fitted, dash, color=GREY, linewidth=1.2, label=f"law at {short_power(budget)} FLOPs")
        ax.plot(
            rows["n"], rows["loss"], marker, color=OKABE_ITO["blue"], label=f"measured at {short_power(budget)} FLOPs"
        )
        box = dict(boxstyle="square,pad=0.1", facecolor="white", edgecolor="none")
        how = dict(textcoords="offset points", ha="center", fontsize=7, color=GREY, bbox=box, zorder=6)
        for row, line in zip(rows.itertuples(), fitted):
            offset = (0, 9) if place == 0 else (0, -15)
            outer = max(row.loss, line) if place == 0 else min(row.loss, line)  # beyond the line, not on it
            ax.annotate(f"{short_number(row.d)} tokens", (row.n, outer), xytext=offset, **how)
    ax.set_xscale("log")
    ax.margins(x=0.1, y=0.12)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(points["n"]))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda n, _: short_number(n))
    finish(ax, x="parameters, log scale", y=label_of("val_loss"), loc="upper left")
    return fig


# %% tags=["hide-input"]
told = [f"at {short_power(r.budget)} FLOPs lowest at {short_number(r.n)} parameters" + (" (border of the grid)" if r.border else "") for r in lowest.itertuples()]
iso_flops(points, law, "; ".join(told))


# %% [markdown]
# A law of size and tokens is fitted through the ten points, `E + A/N^a + B/D^b`. Predicting each point by a law through the
# others shows whether five parameters are too many for ten points.

# %% tags=["hide-cell"]
def law_residuals(points, residuals, title):
    """Measured minus predicted loss of each point, a bar per way of predicting it."""
    fig, axes = new_figure(title)
    ax, at = axes[0, 0], np.arange(len(points))
    for i, ((name, values), alpha) in enumerate(zip(residuals.items(), (1.0, 0.45))):
        ax.bar(at + (i - 0.5) * 0.38, values, 0.38, color=[colour_of(r) for r in points["run"]], alpha=alpha)
        ax.plot([], [], "s", color=GREY, alpha=alpha, label=name)
    ax.axhline(0, color=GREY, linewidth=0.9)
    ax.set_xticks(at, [r.rpartition("/")[2].replace("-", "\n") for r in points["run"]])
    finish(ax, x="size and budget", y="measured minus law (nats/token)")
    return fig


# %% tags=["hide-input"]
law_residuals(points, {"fitted": law.residuals, "left out": missed[full]},
                    f"the law misses its own points by {law.rmse:.3f}, points it has not seen by {errors[full]:.3f}")  # fmt: skip

# %% [markdown]
# The run above spent many times the larger budget, with a batch four times as large. It was measured on the validation text of the
# series and is not part of the fit.

# %% tags=["hide-input"]
laws = pd.DataFrame([dict(law=name, left_out=errors[name], predicted=predicted[name], gap=far["loss"] - predicted[name]) for name in kinds])
articles.table(laws, {"law": "law", "left_out": ("error of left-out points (nats/token)", ".3f"), "predicted": (f"predicted at {beyond:.0f} times the compute", ".2f"),
                      "gap": ("measured minus predicted", "+.3f")})  # fmt: skip

# %% [markdown]
# ## Appendix
#
# **Parameters and runs.** "Ours" is recipe nano. Nothing was trained for this report; it reads finished runs. Published figures are transcribed from the
# original project's own reports (`reports/published`), never measured here.

# %% tags=["hide-input"]
read = run_frames.with_settings(pd.concat([frames["runs"], points_of["runs"]]), ["max_steps", "device_batch_size", "seq_len", "lr", "muon_lr", "seed"])
articles.table(read, {"run": "run", "kind": "kind", "max_steps": ("steps", ".0f"), "device_batch_size": ("sequences", ".0f"), "seq_len": ("tokens each", ".0f"), "lr": ("AdamW learning rate", "g"),
                      "muon_lr": ("Muon learning rate", "g"), "seed": ("seed", ".0f"), "minutes": ("minutes", ".1f"), "commit": "commit", "state": "state of the code"})  # fmt: skip


# %% [markdown]
# **Rates of the run.** The learning rate warms up, stays constant, and decays over the last two fifths. MFU is relative to the
# peak that the machine reached in a matrix product when the run started.

# %% tags=["hide-cell"]
def training_panels(run, metrics, title=None):
    """Learning rate, gradient norm, throughput and MFU over tokens."""
    default = f"{run}: median {metrics['tok_per_s'].median():,.0f} tokens/s, {metrics['mfu'].median():.0%} of the measured peak"
    fig, axes = new_figure(title or default, 2, 2, size=(7.2, 4.6))
    for ax, y in zip(axes.flat, ("lr", "grad_norm", "tok_per_s", "mfu")):
        ax.plot(metrics["tokens"], metrics[y], color=colour_of(run), linewidth=1.5)
        if y == "grad_norm":
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1 if y == "mfu" else None)
        finish(ax, x="tokens", y=label_of(y) + (", log scale" if y == "grad_norm" else ""))
    axes[1, 0].yaxis.set_major_formatter(EngFormatter(sep=""))
    return fig


# %% tags=["hide-input"]
training_panels(run, metrics, f"median {numbers['tok_per_s']:,.0f} tokens/s, {numbers['mfu']:.0%} of the measured peak")

# %% [markdown]
# **Gradient norms as published:** single values, and the largest of a range of steps.

# %% tags=["hide-input"]
articles.table(norms.assign(kind=norms["kind"].str.replace("_", " ")), {"run_name": "run (published)", "step_from": ("from step", ",.0f"), "step_to": ("to step", ",.0f"),
                       "grad_norm": ("gradient norm", "g"), "kind": "kind", "spikes_over_3": ("spikes above 3", "g")})  # fmt: skip

# %% [markdown]
# **The ten points**, one seed each:

# %% tags=["hide-input"]
articles.table(points, {"run": "run", "n": ("parameters", ",.0f"), "d": ("tokens", ",.0f"), "flops": ("FLOPs", ".2e"), "loss": ("loss (nats/token)", ".3f"), "bpb": ("bits per byte", ".3f")})

# %% [markdown]
# **The law's parameters.** The fit searches over exponents and floor. The range holds the fits that are not significantly worse than
# the best (95 %). A parameter whose range reaches the end of the search is not identified, and its value should not be quoted.

# %% tags=["hide-input"]
fitted = pd.DataFrame([dict(name=p, fitted=getattr(law, p), lo=law.region[p][0], hi=law.region[p][1], known="yes" if p in law.identified else "no") for p in "EAaBb"])
articles.table(fitted, {"name": "parameter", "fitted": ("fitted", ".3f"), "lo": ("from", ".3f"), "hi": ("to", ".3f"), "known": "identified"})

# %% tags=["hide-cell"]
# What the answer says, and that its numbers follow from the rows.
quarters = np.diff(validated["val_bpb"])
published_falls = np.diff(drawn_phases["2B"].sort_values("step_from")["mean"])
assert (quarters < 0).all() and (np.diff(quarters) > 0).all() and (published_falls < 0).all() and (np.diff(published_falls) > 0).all()
ours = config["device_batch_size"] * config["grad_accum"] * config["seq_len"]
assert (batch / ours).tolist() == [16, 32] and (tokens / batch < pretrained["warmup"]).all()
assert len(points) == len(series) and np.allclose(law.residuals, points["loss"] - law.predict(points["n"], points["d"]))
assert (points.groupby("budget")["flops"].agg(lambda f: f.max() / f.min()) < 1.05).all()
run_frames.headline(numbers, data)
