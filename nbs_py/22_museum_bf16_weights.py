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
# # Museum: in bfloat16 alone, a small learning rate changes almost no weight
#
# **Question.** The original kept its weights in bfloat16 only, and fine-tuned at learning rates down to 5e-7.
# A bfloat16 has 8 bits of mantissa: an update smaller than half of its last bit rounds to nothing. How much
# of an update is applied, and does it matter for learning?
#
# **Result.** A hundred steps of 5e-7 in one direction move a weight 1 % of the way, and never a norm gain. A
# toy model that is fine-tuned in bfloat16 alone keeps 23 % of the improvement that float32 masters bring. The
# metric `weights_changed_bf16` reports it during the run.
#
# | | bfloat16 only | float32 masters |
# |---|---|---|
# | weights (std 0.02) that one step changes at 5e-7, 1e-5, 3e-5 | 1.0 %, 16 %, 30 % | all |
# | weights of matrices that move at all in 150 steps at 3e-5 | 5 % | 99 % |
# | norm gains that move | none | all |
# | weights changed per step, as bfloat16 sees them | 2.7 % | 7.5 % |
#
# **Runs/needs.** No runs and no data: a model of toy size and the interpreter's help texts.
#
# Previous: [21 museum cut programs](21_museum_cut_programs.ipynb) · Next: [23 museum quote parser](23_museum_quote_parser.ipynb)

# %% tags=["parameters"]
seed = 0
warm_steps = 60
steps = 150
low_lr = 3e-5

# %%
import pydoc_data.topics

import pandas as pd
import torch

from codechat.evaluation import diagnose
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.text import tokenizer
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

tok = tokenizer.load("bytes")

# %% [markdown]
# ## One step on typical weights
#
# A million weights of standard deviation 0.02 and a thousand norm gains of 1. Adam's step is about the
# learning rate, whatever the gradient's size. How many of the stored values does one step change?

# %%
generator = torch.Generator().manual_seed(seed)
weights = (0.02 * torch.randn(1_000_000, generator=generator)).bfloat16()
gains = torch.ones(1_000, dtype=torch.bfloat16)
rates = [5e-7, 1e-6, 1e-5, 3e-5, 1e-4, 1e-3]


def changed(stored, lr):
    """Share of bfloat16 values that a step of size lr changes."""
    return float(((stored.float() - lr).bfloat16() != stored).float().mean())


one_step = pd.DataFrame({"weights": [changed(weights, lr) for lr in rates], "gains": [changed(gains, lr) for lr in rates]}, index=rates)
one_step.index.name = "learning rate"
one_step.map("{:.1%}".format)

# %%
fig, axes = new_figure(f"At 5e-7 one step changes {one_step['weights'].iloc[0]:.1%} of the weights, and never a gain", size=(6.4, 2.6))
axes[0, 0].plot(rates, one_step["weights"], "o-", color=OKABE_ITO["vermilion"], label="weights, std 0.02")
axes[0, 0].plot(rates, one_step["gains"], "s--", color=OKABE_ITO["blue"], label="gains at 1")
axes[0, 0].set_xscale("log")
finish(axes[0, 0], x="learning rate, about the size of an Adam step (log)", y="share changed by one step")
fig

# %% [markdown]
# ## See it happen: the same training, with and without masters
#
# A small model is trained on half of Python's own help texts at a high rate, then continues at a low rate on
# the other half, as fine-tuning does. The batches are the same; only the stored precision differs.

# %%
text = "\n".join(pydoc_data.topics.topics.values())
ids = torch.tensor(tok.encode(text[:400_000]))
first, second = ids[: len(ids) // 2], ids[len(ids) // 2 :]


def batches(ids, count, seed):
    """`count` batches (8, 65) of pieces drawn from ids."""
    generator = torch.Generator().manual_seed(seed)
    for starts in torch.randint(len(ids) - 65, (count, 8), generator=generator):
        yield torch.stack([ids[s : s + 65] for s in starts])


# %%
@torch.no_grad()
def round_weights(model):
    """The defect: after each step only the bfloat16 value of a weight is kept."""
    for p in model.parameters():
        p.copy_(p.bfloat16())


# %%
def train(model, ids, lr, count, seed, masters=True):
    """Train; returns the losses, and per step the share of weights whose bfloat16 value changed."""
    optimizers, rows = optim.build(model, lr=lr, weight_decay=0.0), []
    for batch in batches(ids, count, seed):
        before = diagnose.bf16_snapshot(model)
        (loss := model.loss(batch[:, :-1], batch[:, 1:])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if not masters:
            round_weights(model)
        rows.append((loss.item(), diagnose.weights_changed_bf16(before, model)))
    return pd.DataFrame(rows, columns=["loss", "changed"])


# %%
base = GPT(GPTConfig(depth=2, n_embd=64, n_head=2, block_size=64, vocab_size=tok.n_vocab), seed=seed)
warm = train(base, first, 3e-3, warm_steps, seed)
held = torch.cat(list(batches(second, 16, seed + 9)))


@torch.no_grad()
def held_out(model):
    """Loss in nats per byte on fixed pieces of the second half."""
    return model.loss(held[:, :-1], held[:, 1:]).item()


print(f"first half: loss {warm['loss'].iloc[0]:.2f} to {warm['loss'].iloc[-5:].mean():.2f}; second half before fine-tuning {held_out(base):.3f}")

# %% [markdown]
# Both start from the same bfloat16 weights. `moved`: the share of weights that differ from their start.

# %%
start = {name: p.detach().bfloat16().float() for name, p in base.named_parameters()}
base.load_state_dict(start)
results, finals, moved = {}, {"before": held_out(base)}, {}
for name in ("float32 masters", "bfloat16 only"):
    model = GPT(base.cfg, seed=seed)
    model.load_state_dict(start)
    results[name] = train(model, second, low_lr, steps, seed + 1, masters=name == "float32 masters")
    finals[name] = held_out(model)
    parts = {True: [], False: []}
    for n, p in model.named_parameters():
        parts[p.ndim < 2].append((p.detach() != start[n]).flatten())
    moved[name] = {"matrices": float(torch.cat(parts[False]).float().mean()), "gains": float(torch.cat(parts[True]).float().mean())}

# %%
gain = {name: finals["before"] - finals[name] for name in results}
kept = gain["bfloat16 only"] / gain["float32 masters"]
print({k: round(v, 4) for k, v in finals.items()}, f"the defect keeps {kept:.0%} of the improvement")
pd.DataFrame(moved).map("{:.1%}".format)

# %%
fig, axes = new_figure(f"At learning rate {low_lr:g} bfloat16 alone keeps {kept:.0%} of the improvement", cols=2, size=(6.8, 2.8))
for name, colour in (("float32 masters", "green"), ("bfloat16 only", "vermilion")):
    rows = results[name]
    axes[0, 0].plot(rows["loss"].ewm(span=30).mean(), color=OKABE_ITO[colour], label=name)
    axes[0, 1].plot(rows["changed"], color=OKABE_ITO[colour], label=name)
finish(axes[0, 0], x="step", y="train loss (EMA, span 30)")
finish(axes[0, 1], x="step", y="weights changed, in bfloat16 (share)", legend=False)
fig

# %% [markdown]
# ## See the instrument report it
#
# `weights_changed_bf16` is logged by every training loop: the share of weights whose *bfloat16* value a step
# changed. With masters a small value is harmless: the rest of the update stays in the master and takes effect
# later. Without them it is lost.

# %%
share = {name: rows["changed"].mean() for name, rows in results.items()}
print("changed per step:", {k: f"{v:.1%}" for k, v in share.items()})

# %% [markdown]
# ## Flip the fix
#
# Masters are always float32; no setting removes them. A hundred steps of 5e-7 in the same direction, as under
# a consistent gradient, should move a weight by 5e-5:

# %%
asked = {}
for name in ("float32 masters", "bfloat16 only"):
    layer = torch.nn.Linear(300, 300, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights[:90_000].float().view(300, 300))
    begin = layer.weight.detach().clone()
    (adam,) = optim.build(layer, lr=5e-7, weight_decay=0.0)
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        adam.step()
        if name == "bfloat16 only":
            round_weights(layer)
    asked[name] = float((begin - layer.weight.detach()).mean() / 5e-5)
print("share of the requested movement that was applied:", {k: f"{v:.0%}" for k, v in asked.items()})

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `rates = [5e-3, 2e-2]` in the first table | from which size on does a step move a norm gain of 1? | <details><summary>outcome</summary>bfloat16 has steps of 2^-8 = 0.0039 below 1: half of that, about 0.002, is the smallest step that moves a gain</details> |
# | replace `weights[:90_000]` by `weights[:90_000] / 100` in the last experiment | smaller weights have finer last bits: do they lose less? | <details><summary>outcome</summary>yes: the last bit shrinks with the weight, so the same step of 5e-7 is a larger part of it</details> |
#
# The last cell asserts the Result.

# %%
assert one_step["weights"].round(2).to_list()[:4] == [0.01, 0.02, 0.16, 0.30] and (one_step["gains"] == 0).all()
assert round(asked["bfloat16 only"], 2) == 0.01 and abs(asked["float32 masters"] - 1) < 0.01
assert 0.15 < kept < 0.32 and gain["float32 masters"] > 0.04
assert moved["bfloat16 only"]["gains"] == 0 and moved["float32 masters"]["gains"] == 1
assert moved["bfloat16 only"]["matrices"] < 0.08 and moved["float32 masters"]["matrices"] > 0.95
assert 0.02 < share["bfloat16 only"] < 0.035 and 0.06 < share["float32 masters"] < 0.09
