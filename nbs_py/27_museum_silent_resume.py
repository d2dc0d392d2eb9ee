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
# # Museum: a resume that could not load its checkpoint started from scratch
#
# **Question.** In the original, `--resume` caught any error in loading, printed a warning, and began again
# with new weights. Checkpoints were written in place, so that a kill during a write left one that could not
# be loaded. What does this cost, and what happens here?
#
# **Result.** A run is killed at step 20 of 30 and its newest checkpoint damaged; with the defect, a resume
# computes all steps again, and the run directory does not show it. Without the defect, the resume raises an
# error that names the file. Continued from the previous checkpoint, the run equals an uninterrupted one bit by
# bit.
#
# | | defect | without |
# |---|---|---|
# | steps computed for 30 | 50 | 35 |
# | reward before the cut, after the resume | above 0.15, below 0.13 | the same curve |
# | an interrupted write | | leaves the previous checkpoint valid |
#
# **Runs/needs.** No runs and no data. Toy runs of a few seconds in a temporary folder.
#
# Previous: [26 museum drift](26_museum_drift.ipynb) · Next: [28 read a failed run](28_read_a_failed_run.ipynb)

# %% tags=["parameters"]
seed = 0
steps = 30
cut_at = 20

# %%
import contextlib
import io
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from codechat import reinforce
from codechat.core import config
from codechat.core.errors import CheckpointError
from codechat.runs import checkpoint, paths, run
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

run.ROOT = paths.ROOT = Path(tempfile.mkdtemp())  # these runs are temporary

# %% [markdown]
# ## A run, and the same run interrupted
#
# REINFORCE on the toy task, a checkpoint every five steps. The second run is killed at step 20, after its
# checkpoint.

# %%
cfg = config.resolve(reinforce.ReinforceConfig, "toy", presets=reinforce.RUN_PRESETS, overrides=dict(
    run_name="whole", max_steps=steps, save_every=5, keep_last=0, diagnose_groups=0, log_rollouts_every=0, seed=seed))
quiet = contextlib.redirect_stderr(io.StringIO())
saved = checkpoint.save


def die_after(path, step, **what):
    """Save, then end the run as a kill would."""
    done = saved(path, step, **what)
    if step == cut_at:
        checkpoint.settle()
        raise KeyboardInterrupt
    return done


# %%
def cut(name):
    """A run of this name that ends after the checkpoint of `cut_at`, whose newest weights are then damaged."""
    checkpoint.save = die_after
    try:
        with quiet:
            reinforce.train(replace(cfg, run_name=name))
    except KeyboardInterrupt:
        pass
    finally:
        checkpoint.save = saved
    weights = paths.find_checkpoint(name) / "model.pt"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return run.Run.open(name)



# %%
with quiet:
    whole = reinforce.train(cfg)
lost, kept = cut("lost"), cut("kept")
print(f"{whole.name}: {len(whole.metrics())} steps; {lost.name}: {lost.status['status']} after {len(lost.metrics())}, checkpoints {lost.checkpoints()}")


# %% [markdown]
# ## See it happen
#
# Resume the interrupted run with the defect on. The prediction: a warning in the log, and a curve that starts
# again.

# %%
def resume_silently(cfg):
    """The defect: whatever keeps the checkpoint from being loaded, the run begins again. Returns the run and the warning."""
    try:
        checkpoint.load(paths.find_run(cfg.run_name))
    except Exception as error:
        warning = f"warning: cannot load the checkpoint of {cfg.run_name} ({type(error).__name__}); starting from scratch"
        return reinforce.train(replace(cfg, overwrite=True)), warning
    return reinforce.train(replace(cfg, resume=True)), ""


# %%
before = lost.metrics()
with quiet:
    lost, warning = resume_silently(replace(cfg, run_name="lost"))
after = lost.metrics()
print(warning)
print(f"status: {lost.status['status']}; its env.json knows of a resume: {'resumed' in lost.env}")

# %% [markdown]
# ## See the error
#
# With the defect off the same resume raises before it writes anything, and names the damaged file and the
# remedy. The previous checkpoint is intact: pointing `latest` to it is enough.

# %%
rows_before = len(kept.metrics())
try:
    with quiet:
        reinforce.train(replace(cfg, run_name="kept", resume=True))
    message = ""
except CheckpointError as error:
    message = str(error).replace(str(paths.ROOT), ".")
print(message)
print(f"rows before {rows_before}, after {len(kept.metrics())}")

# %%
shutil.rmtree(paths.find_checkpoint("kept"))
(kept.path / "checkpoints" / "latest").write_text(f"step_{cut_at - 5:06d}\n")
with quiet:
    kept = reinforce.train(replace(cfg, run_name="kept", resume=True))
columns = ["step", "reward_mean", "policy_loss", "grad_norm"]
same_curve = kept.metrics().sort_values("step")[columns].equals(whole.metrics().sort_values("step")[columns])
states = [checkpoint.load(name).model_state for name in ("whole", "kept")]
same_weights = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
print(f"continued from step {cut_at - 5}: the same curve {same_curve}, the same weights {same_weights}")

# %% [markdown]
# The three curves over all computed steps, kept or not.

# %%
fig, axes = new_figure(f"The silent resume computes {cut_at + steps} steps for the {steps} of the others", size=(6.4, 3.0))
curves = {"whole": (whole.metrics(), 0, "blue", "-"), "error, then continued": (kept.metrics(), 0, "green", "--"),
          "silent: before": (before, 0, "vermilion", "-"), "silent: after": (after, cut_at, "vermilion", ":")}
for name, (rows, shift, colour, dash) in curves.items():
    rows = rows.sort_values("step")
    wide = dict(linewidth=5, alpha=0.4) if name == "whole" else {}
    axes[0, 0].plot(rows["step"] + shift, rows["reward_mean"], dash, color=OKABE_ITO[colour], label=name, **wide)
axes[0, 0].axvline(cut_at, color="#888888", linewidth=0.8)
finish(axes[0, 0], x="steps computed", y="mean reward")
fig

# %% [markdown]
# ## Why nothing is half written
#
# A checkpoint is written to a temporary folder, synced, and renamed; then `latest` is updated. So a kill
# during a write leaves a folder that is never read. Here the write is interrupted:

# %%
newest = checkpoint.resolve("whole").name
model = torch.nn.Linear(2, 2)


class Cut(Exception):
    """The process is killed."""


class DiesInTheMiddle:
    """What cannot be written."""

    def __reduce__(self):
        raise Cut


# %%
try:
    model.state_dict = lambda *a, **k: {"weight": model.weight, "rest": DiesInTheMiddle()}
    checkpoint.save(whole.path, steps + 5, model=model, keep_last=0)
except Cut:
    pass
in_force = checkpoint.resolve("whole").name
print(f"in force before {newest}, after the cut {in_force}; steps that can be loaded: {whole.checkpoints()}")

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `cut_at = 25` | how many steps does the silent resume compute for 30? | <details><summary>outcome</summary>55: everything before the cut is lost, whenever it comes</details> |
# | `seed = 1` | another start: is the continued run still bitwise the uninterrupted one? | <details><summary>outcome</summary>yes: random states, batch order and optimizer are part of a checkpoint, whatever the seed</details> |
#
# The last cell asserts the Result.

# %%
at_cut, at_next = before.sort_values("step")["reward_mean"].iloc[-3:].mean(), after.sort_values("step")["reward_mean"].iloc[:1].mean()
print(f"steps computed for {steps}: {cut_at + steps} with the defect, {steps + 5} without")
print(f"reward of the last three steps before the cut {at_cut:.2f}, of the next step after the silent resume {at_next:.2f}")
assert "starting from scratch" in warning and "resumed" not in lost.env
assert list(after.sort_values("step")["step"]) == list(range(1, steps + 1)) and after["time"].min() > before["time"].max()
assert "model.pt" in message and "step_000020" in message and rows_before == cut_at
assert same_curve and same_weights and len(kept.env["resumed"]) == 2
assert at_cut > 0.15 and at_next < 0.13
assert in_force == newest and steps + 5 not in whole.checkpoints()
