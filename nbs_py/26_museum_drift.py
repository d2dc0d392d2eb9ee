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
# # Museum: with no reward at all, a KL term in the loss moved the policy
#
# **Question.** The original's first RL run had reward 0 at every printed one of its 415 steps, and after 16.7 hours its
# policy was 1.5 nats per token away from its start. Its loss held two terms: the policy gradient, which is 0
# if all rewards are equal, and the penalty `logprob - ref_logprob`, known as k1, which is meant to *hold* the
# policy. What moved it?
#
# **Result.** At the reference the gradient of k1 is zero on average, but one group's gradient is noise, which
# Adam scales to full steps. Without any reward the policy drifts 0.08 nats per token in 40 steps; with the
# correct code no bit of any weight changes. `diagnose` says DEAD before the first step, and the sentinel ends
# such a run at step 20.
#
# | | |
# |---|---|
# | norm of k1's gradient at the reference: exact mean, one group of four | 0, 0.58 |
# | the sentinel would have ended the original's run after | 0.8 of 16.7 hours |
#
# **Runs/needs.** No runs and no data. Toy runs of a few seconds in a temporary folder.
#
# Previous: [25 museum trained on test](25_museum_trained_on_test.ipynb) · Next: [27 museum silent resume](27_museum_silent_resume.ipynb)

# %% tags=["parameters"]
seed = 0
steps = 40
kl_coef = 0.02
dead_patience = 20

# %%
import contextlib
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from codechat import grpo, tasks
from codechat.core import config, errors
from codechat.evaluation import diagnose
from codechat.models import generate, optim
from codechat.models.gpt import GPT
from codechat.rl import losses
from codechat.runs import paths, run
from codechat.tasks.toy import ToyTask
from codechat.text import chat, tokenizer
from codechat_lab.instruments import exact_gradients
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

# %%
run.ROOT = paths.ROOT = Path(tempfile.mkdtemp())  # these runs are temporary

# %% [markdown]
# ## The exact gradient of the penalty
#
# In a world of 31 texts all expectations are sums ([notebook 09](09_gradient_microscope.ipynb)). The mean of k1's
# gradient over the policy's own texts is zero: it does not pull towards the reference,
#
# $$\mathbb{E}_{y \sim \pi}\left[\nabla (\log \pi(y) - \log \pi_\text{ref}(y))\right] = \mathbb{E}_{y \sim \pi}\left[\nabla \log \pi(y)\right] = 0.$$
#
# But the gradient of a single group is not zero. Steps of mean zero add up to a random walk, and Adam scales each step
# to the learning rate.

# %%
world = exact_gradients.World()
theta = world.policy(seed)
reference = theta.clone()  # the first step: the policy is its own reference
at = world.sample(theta, 2000, 4, seed)
terms = {kind: exact_gradients.kl_in_loss(kind, reference) for kind in ("k1", "k2", "k3")}
sizes = pd.DataFrame({
    "exact mean": {kind: float(exact_gradients.expectation(world, theta, term, 2).norm()) for kind, term in terms.items()},
    "one group of four": {kind: float(exact_gradients.group_gradients(world, theta, term, at).norm(dim=1).mean()) for kind, term in terms.items()}})
print("length of the penalty's gradient at the reference itself, where the divergence is 0:")
sizes.map("{:.2e}".format)


# %% [markdown]
# ## See it happen
#
# GRPO on a task whose reward is always 0. The reference is the starting policy. The correct code skips
# updates without an advantage; the defect, written out here, makes them, with k1 in the loss. `kl_ref` measures the
# distance by k3, in nats per token.

# %%
class NothingPays(ToyTask):
    """The toy task with reward 0 for everything."""

    name = "nothing"

    def score(self, problem, completion):
        return tasks.Score(0.0, "none", {}, False)


tasks.TASKS["nothing"] = NothingPays
settings = dict(task="nothing", max_steps=steps, kl_coef=kl_coef, kl_kind="k1", lr=1e-3, group_size=4, diagnose_groups=0, save_every=0,
                log_rollouts_every=0, seed=seed, dead_patience=10_000)
cfg = config.resolve(grpo.GRPOConfig, "toy", presets=grpo.RUN_PRESETS, overrides=settings)


# %%
def answer_logprobs(model, prompt, answers):
    """(G, C) log-probabilities of answers to one prompt."""
    ids = torch.tensor([prompt + answer.ids for answer in answers])
    return model.token_logprobs(ids[:, :-1], ids[:, 1:])[0][:, len(prompt) - 1 :]


def penalty_step(policy, start, prompts, step):
    """Add the gradient of the penalty alone, on one group per prompt; returns the distance from the start, by k3."""
    answers, away = generate.sample(policy, prompts, max_new_tokens=8, samples_per_prompt=cfg.group_size, seed=step), 0.0
    for prompt in prompts:
        group, answers = answers[: cfg.group_size], answers[cfg.group_size :]
        now, then = answer_logprobs(policy, prompt, group), answer_logprobs(start, prompt, group).detach()
        (kl_coef * losses.kl_estimate(now, then, "k1").mean() / len(prompts)).backward()
        away += float(losses.kl_estimate(now.detach(), then, "k3").mean()) / len(prompts)
    return away


# %%
def drift(seed):
    """The defect: every update is made, although no advantage is left in it."""
    tok, rows = tokenizer.load("bytes"), []
    policy, start = (GPT(replace(cfg.model, vocab_size=tok.n_vocab), seed=seed) for _ in range(2))
    (adam,) = optim.build(policy, lr=cfg.lr, weight_decay=0.0)
    prompts = [chat.prompt(p.messages, tok) for p in NothingPays().problems("train")]
    for step in range(1, steps + 1):
        away = penalty_step(policy, start, prompts, step + 1000 * seed)
        rows.append({"step": step, "kl_ref": away, "grad_norm": float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0))})
        adam.step()
        adam.zero_grad()
    return pd.DataFrame(rows)


# %%
def train(name, **changes):
    """GRPO by the library; returns the run."""
    with contextlib.redirect_stderr(io.StringIO()):
        return grpo.train(replace(cfg, run_name=name, **changes))


runs = {"correct": train("correct"), "correct, with the sentinel": train("stopped", dead_patience=dead_patience)}
curves = {"defect: k1, no guard": drift(seed)} | {name: found.metrics().sort_values("step") for name, found in runs.items()}
last = {name: float(rows["kl_ref"].iloc[-1]) for name, rows in curves.items()}
pd.DataFrame({name: rows[["step", "grad_norm", "kl_ref"]].iloc[-1] for name, rows in curves.items()}).T

# %%
fig, axes = new_figure(f"Reward 0 in every step, and {last['defect: k1, no guard']:.2f} nats per token away after {steps} of them", size=(6.4, 2.9))
for name, colour in zip(curves, ("vermilion", "green", "blue")):
    axes[0, 0].plot(curves[name]["step"], curves[name]["kl_ref"], "--" if "sentinel" in name else "-", color=OKABE_ITO[colour], label=name)
axes[0, 0].axvline(dead_patience, color="#888888", linewidth=0.8)
finish(axes[0, 0], x="step", y="drift from the reference, k3 (nats per token)")
fig

# %% [markdown]
# ## See the instruments report it
#
# Four instruments report it: `diagnose` before the first step, the sentinel of DEAD steps during the run,
# and `kl_ref` rising while the reward does not.

# %%
verdict = diagnose.judge(torch.zeros(64, 4), torch.zeros(64, 4, dtype=torch.bool))
print(f"{verdict.verdict}: {verdict.effective_groups} of {verdict.n_groups} groups have variance; {verdict.remedy}")
status = runs["correct, with the sentinel"].status
print(status["status"], "-", status["reason"])
hours = 16.7 * dead_patience / 415
print(f"at the published 145 s a step: stopped after {hours:.1f} of 16.7 hours")

# %% [markdown]
# And the reference-solution check: if even the correct answer earns nothing, training does not start.

# %%
try:
    with contextlib.redirect_stderr(io.StringIO()):
        task = NothingPays()
        tasks.check_reference_solutions(task, task.problems("train")).require()
    message = ""
except errors.DataError as error:
    message = str(error)
print(message)

# %% [markdown]
# ## Flip the fix
#
# The guard is one line: an update without any advantage is skipped. As a penalty, k3 or k2 would at least
# pull back; at the reference their gradient is 0 (table above). As a *reward*, k1 is correct (notebook 9).

# %%
values = torch.tensor([[-1.0, -2.0]], requires_grad=True)
slopes = {}
for kind in ("k1", "k3"):
    (slopes[kind],) = torch.autograd.grad(losses.kl_estimate(values, values.detach(), kind).sum(), values)
print("slope of the penalty at the reference, per token:", {kind: slope[0].tolist() for kind, slope in slopes.items()})

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `kl_coef = 0.2` | ten times the penalty that should hold the policy: does it hold? | <details><summary>outcome</summary>no: Adam divides the gradient by its own size, so the drift hardly changes ([notebook 12](12_why_mbpp_died.ipynb) has both)</details> |
# | `dead_patience = 5` | when does the run end? | <details><summary>outcome</summary>after 5 steps, 0.2 of the original's 16.7 hours; the last cell's 0.8 hours are those of 20</details> |
#
# The last cell asserts the Result.

# %%
drifted, right, stopped = curves.values()
assert all((rows["reward_mean"] == 0).all() and (rows["adv_abs_mean"] == 0).all() for rows in (right, stopped))
assert sizes.loc["k1", "exact mean"] < 1e-12 and 0.5 < sizes.loc["k1", "one group of four"] < 0.65
assert (sizes.loc[["k2", "k3"]] < 1e-12).all().all() and slopes["k1"].tolist() == [[1.0, 1.0]] and not slopes["k3"].any()
assert 0.04 < last["defect: k1, no guard"] < 0.16 and (drifted["grad_norm"] > 0).all()
assert (right["weights_changed_bf16"] == 0).all() and right["kl_ref"].abs().max() == 0
assert len(stopped) == dead_patience and status["status"] == "stopped" and status["reason"].startswith("DEAD")
assert verdict.verdict == "DEAD" and message and round(hours, 1) == 0.8
