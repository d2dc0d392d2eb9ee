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
# # Fine-tuning: the mask hides tokens from the loss, not from the model
#
# **Question.** Which tokens does fine-tuning learn from, how do they set the mix of domains, and what does the
# model do during training when code or a tool is requested?
#
# **Result.** Only the assistant's tokens carry loss, a minority; summed by hand over them, the loss equals the
# library's over packed rows. The model still reads the other tokens: a large part of the gradient at the inputs
# flows through them. After this run it calls a requested tool that is offered (32 of 32), makes no call without
# tools (0 of 32), and declines in 25 of 32 answers where the requested tool is not in the list.
#
# **Runs/needs.** Recipe nano's `sft` (frozen rows; `source="nano"` reads the run that `make lab` made on this
# machine). A model of toy size is trained here for seconds on one core.
#
# Previous: [04 pretraining](04_pretraining.ipynb) · Next: [06 reward staircase](06_reward_staircase.ipynb)

# %% tags=["parameters"]
source = "frozen"
seed = 0
toy_steps = 40

# %%
import inspect

import pandas as pd
import torch
from IPython.display import HTML

from codechat.data import conversations
from codechat.evaluation.intervals import Interval, wilson_interval
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.text import chat, tokenizer
from codechat_lab.instruments import behaviour_probes
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.instruments.token_attribution import gradient_share, xray_mask, xray_values
from codechat_lab.reports import plots, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks.toolbox import dialogues, drills

# %%
metrics, evals = (run_frames.stage_rows(source, "sft", table) for table in ("metrics", "evals"))
run, settings = metrics["run"].iloc[0], run_frames.settings(source, "sft")
domains = pd.DataFrame(run_frames.manifest(source, "sft")["domains"]).T
tok, tags = tokenizer.load(run_frames.manifest(source, "corpus")["tokenizer"]), settings["tags"]

# %% [markdown]
# ## The result in numbers
#
# The held-out loss of each domain at the start and at the end, its extremes, and the model's behaviour in the
# probes at the end.

# %%
held = evals.filter(like="heldout_loss/").rename(columns=lambda name: name.removeprefix("heldout_loss/"))
supervised = domains["supervised_tokens"].sum() / domains["tokens"].sum()
print(f"{supervised:.0%} of the tokens carry loss: " + ", ".join(f"{d} {row.supervised_tokens / row.tokens:.0%}" for d, row in domains.iterrows()))
pd.DataFrame({"at the start": held.iloc[0], "highest": held.max(), "lowest": held.min(), "at the end": held.iloc[-1]}).round(2)

# %%
probed = {cell: (int(evals[f"probe/{cell}/n"].iloc[-1]), expected) for cell, expected in behaviour_probes.EXPECTED.items()}
pd.Series({f"{cell.replace('_', ' ')}: {expected} expected": f"{round(n * evals[f'probe/{cell}/{expected}'].iloc[-1])} of {n}"
           for cell, (n, expected) in probed.items()}, name="as expected at the end").to_frame()

# %% [markdown]
# ## The mask, as colours
#
# A conversation in which a tool is called: the system prompt lists functions, the user asks, the assistant
# calls, the function answers, the assistant reports. Only what the assistant writes may carry loss: its words
# and the tag that ends its turn. It must not learn to write the user's lines or the function's.

# %%
found = [row for row in dialogues.draw("train", 200, seed) if row["meta"]["kind"] == "multi_turn"]
messages = min(found, key=lambda row: sum(len(m["content"]) for m in row["messages"]))["messages"]
masked = xray_mask(messages, tok, tags)
HTML(masked.html())

# %% [markdown]
# The coloured text is exactly what the loss counts.

# %%
print(masked.coloured())

# %% [markdown]
# Ids, roles and mask come from one list of turns, so that they cannot disagree:

# %%
print(inspect.getsource(chat.render))

# %% [markdown]
# ## Hidden from the loss, not from the model
#
# The mask hides a token as a *target*. As an *input* it stays: the answer depends on it. The gradient shows
# both. At the predictions (`hidden`) only supervised tokens have a share; at the inputs (`embedding`) a large part
# of it flows through text that others wrote. This small model is first trained for seconds on other conversations
# of the toolbox, since a new model's blocks start at zero and pass no gradient.

# %%
small = GPT(GPTConfig(depth=2, n_embd=64, n_head=2, block_size=512, vocab_size=tok.n_vocab), seed=seed)
taught = {"calls": [conversations.encode(row, tok, tags, 512) for row in dialogues.draw("train", 200, seed + 1)]}
loader, optimizers = conversations.PackedLoader(taught, None, batch=4, T=512, seed=seed), optim.build(small, lr=1e-2, optimizer="muon", weight_decay=0.0)
for step in range(toy_steps):
    batch = loader.next()
    where = dict(positions=batch.positions, mask=conversations.packed_mask(batch.docs))
    loss = small.loss(batch.ids, batch.targets, **where)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"{loss.item():.2f} nats per supervised token after {toy_steps} steps")

# %%
rendered, shares = chat.render(messages, tok, tags), {}
for place in ("hidden", "embedding"):
    shares[place] = gradient_share(small, rendered.ids, rendered.loss_mask, at=place)
by_role = pd.DataFrame({"tokens": masked.roles}).groupby("tokens", sort=False).size().to_frame("tokens")
for place, share in shares.items():
    by_role[f"gradient at {place}"] = pd.Series(share).groupby(masked.roles).sum()
by_role.round(3)

# %%
HTML(xray_values(rendered.ids, shares["embedding"], tok, "gradient", masked.roles).html())

# %% [markdown]
# ## The masked loss, from scratch
#
# Training packs several conversations into a row, and they must not see each other. By hand, each conversation
# runs alone: we add up the negative log-likelihoods of supervised tokens and divide by their number in the
# batch. The library's loss over packed rows must be the same:
#
# $$L = -\frac{1}{\sum_{i,t} m_{i,t}} \sum_{i,t} m_{i,t} \ln p(x_{i,t} \mid x_{i,<t}), \qquad m_{i,t} = 1 \text{ on supervised tokens}$$

# %%
rows = [*dialogues.draw("train", 40, seed), *drills.copy_dialogues("train", 40, seed)]
encoded = {"calls": [], "copy": []}
for row in rows:
    encoded[row["domain"]].append(conversations.encode(row, tok, tags, 512))
packed = conversations.held_out(encoded["calls"] + encoded["copy"], 64, 512)[0]
where = dict(positions=packed.positions, mask=conversations.packed_mask(packed.docs))
with torch.no_grad():
    nats, count = 0.0, 0
    for example in encoded["calls"] + encoded["copy"]:
        ids, counts = torch.from_numpy(example.ids).long(), torch.from_numpy(example.loss_mask[1:])
        logprobs = small(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        nats, count = nats - float(logprobs[counts].double().sum()), count + int(counts.sum())
    library = float(small.loss(packed.ids, packed.targets, **where))
torch.testing.assert_close(nats / count, library, rtol=1e-5, atol=0)
print(f"by hand {nats / count:.6f}, library {library:.6f} nats per token over {count:,} tokens")

# %% [markdown]
# With causal attention alone a conversation reads its neighbours in the row. Without the loss mask most of the
# loss comes from text that the model never has to write.

# %%
with torch.no_grad():
    everything = torch.where(packed.docs >= 0, packed.ids.roll(-1, 1), -100)
    losses = {
        "packed, as trained": (library, count),
        "neighbours visible": (float(small.loss(packed.ids, packed.targets)), count),
        "no loss mask": (float(small.loss(packed.ids, everything, **where)), int((everything >= 0).sum())),
    }
losses = pd.DataFrame(losses, index=["loss, nats per token", "tokens that carry loss"]).T
losses.round(4)

# %% [markdown]
# ## The mix
#
# A call is short and its prompt long; an answer in code is the reverse. So shares by conversations, by tokens
# and by supervised tokens differ. The gradient counts supervised tokens, and the bottom bar is the run's
# setting.

# %%
requested = pd.Series({d: float(s) for d, s in (item.split("=") for item in settings["mix"])})
order = ["conversations", "tokens", "supervised_tokens"]
mix = (domains[order] / domains[order].sum()).add_prefix("data, by ").assign(run=requested / requested.sum())
mix = mix.fillna(0).rename(columns={"data, by supervised_tokens": "data, by supervised tokens",
                          "run": "run, by supervised tokens"}).sort_index()

# %%
fig, axes = new_figure(f"{supervised:.0%} of the tokens carry loss, and which ones depends on the domain")
ax, left = axes[0, 0], 0
for domain, colour in zip(mix.index, 2 * list(OKABE_ITO)):
    ax.barh(list(mix), mix.loc[domain], left=left, color=OKABE_ITO[colour], label=domain)
    left = left + mix.loc[domain]
ax.set_xlim(0, 1)
ax.invert_yaxis()
finish(ax, x="share", y=None, legend=False)
fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
fig

# %% [markdown]
# The next conversation comes from the domain that is furthest below its share of supervised tokens. Two example
# domains, requested at seven to three, get these shares (but for conversations that wait for a row), although a
# copying drill is a fifth as long as a call.

# %%
loader = conversations.PackedLoader(encoded, {"calls": 0.7, "copy": 0.3}, batch=8, T=512, seed=seed)
drawn = pd.Series(0, index=loader.domains)
for _ in range(60):
    batch = loader.next()
    drawn += batch.domains[batch.targets >= 0].bincount(minlength=2).numpy()
print(inspect.getsource(conversations.PackedLoader._row))
realised = drawn / drawn.sum()
realised.round(3).to_frame("share of supervised tokens")

# %% [markdown]
# Epochs of each domain in the run: a domain with a large share of the loss and little data is memorized.

# %%
last = metrics.iloc[-1]
passes = domains.assign(**{
    "supervised share": domains["supervised_tokens"] / domains["tokens"],
    "share of the loss": requested / requested.sum(),
    "passes in the run": last["supervised_tokens"] * requested / requested.sum() / domains["supervised_tokens"]})
print(f"{last['step']:.0f} steps, {last['tokens']:,.0f} positions, {last['supervised_tokens']:,.0f} with loss")
passes.fillna(0).round(2).astype({name: int for name in order})

# %% [markdown]
# ## Held-out loss, domain by domain
#
# A total loss would hide a domain that is being forgotten. So each domain has its own held-out curve; three rises
# in a row are reported. Watch code, which the model knows from pretraining: it can be forgotten at first and
# regained later, or lost.

# %%
plots.heldout_losses(run, evals)

# %% [markdown]
# ## What it does, cell by cell
#
# Code or a tool is requested; tools are offered or not. Only a tool that is requested *and* offered should be
# called, and the loss cannot tell whether it is. Probes can: one
# completion each, counted as a call, as Python, or as neither. (Code that is wrong counts as code.)

# %%
EXPECTED, BEHAVIOURS = behaviour_probes.EXPECTED, {"call": "blue", "code": "vermilion", "neither": "black"}


def draw_cell(ax, cell: str) -> None:
    ax.set_title(f"{plots.cell_in_words(cell)}:\n{EXPECTED[cell]} expected", fontsize=7.5, loc="left")
    n = evals[f"probe/{cell}/n"].astype(int)
    for which, colour in BEHAVIOURS.items():
        p, look = evals[f"probe/{cell}/{which}"], dict(color=OKABE_ITO[colour], linewidth=2 if which == EXPECTED[cell] else 1)
        bands = [wilson_interval(round(x * k), k) for x, k in zip(p, n)]
        ax.fill_between(evals["step"], [b.lo for b in bands], [b.hi for b in bands], color=OKABE_ITO[colour], alpha=0.15, linewidth=0)
        ax.plot(evals["step"], p, "o-", markersize=3, label=which, **look)


# %%
rarest = min(EXPECTED, key=lambda cell: evals[f"probe/{cell}/{EXPECTED[cell]}"].iloc[-1])
share = evals[f"probe/{rarest}/{EXPECTED[rarest]}"].iloc[-1]
title = f"At the end the expected behaviour is rarest ({share:.0%}): {plots.cell_in_words(rarest)}"
fig, axes = new_figure(title, 2, 3, size=(7.6, 4.6), sharex=True, sharey=True)
for cell, at in plots.GRID.items():
    draw_cell(axes[at], cell)
axes[0, 0].set_ylim(-0.03, 1.03)
axes[1, 1].set_axis_off()  # no such cell: the place holds the legend
axes[1, 1].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", fontsize=8, frameon=False, title="95 % bands", title_fontsize=7.5)
for ax in axes[1]:
    finish(ax, x="step", y="completions (share)" if ax is axes[1, 0] else None, legend=False)
fig


# %%
def behaviour(row):
    """Share of expected behaviour in each cell, with its 95 % interval."""
    found = {}
    for cell, expected in behaviour_probes.EXPECTED.items():
        n = int(row[f"probe/{cell}/n"])
        hits = round(row[f"probe/{cell}/{expected}"] * n)
        found[f"{cell.replace('_', ' ')}: {expected}"] = wilson_interval(hits, n)
    return pd.Series(found)


first, final = behaviour(evals.iloc[0]), behaviour(evals.iloc[-1])
n_probes = int(evals["probe/tool_with_tools/n"].iloc[-1])
names = [f"step {step}, n={n_probes} each" for step in evals["step"].iloc[[0, -1]]]
pd.DataFrame({name: column.map(str) for name, column in zip(names, (first, final))})

# %% [markdown]
# ## What it answers
#
# A held-out loss does not say whether an answer is right. The table has exact answers of recipe nano after SFT, over its seeds, by kind of request,
# greedy and at two temperatures (95 % intervals over seeds and tools). Greedy is best nearly everywhere: a small model's second choice of a token
# is seldom right.

# %%
reading = run_frames.load_frozen(run_frames.frozen_dir().parent / "nano" / "data")
evaluated = [name for name in reading["runs"]["run"] if name.startswith("nano/full-evaluation")]
asked = {kind: words for kind, words in run_frames.STRATA.items() if f"{kind}/n" in reading["evals"]}
strata = run_frames.strata_over_seeds(reading, evaluated, list(asked))
strata = strata[strata["checkpoint"] == strata["checkpoint"].iloc[0]].set_index("sampling")
shown = {}
for sampling in ("greedy", "T=0.5", "T=1"):
    rows = strata.loc[[sampling]]
    shown[sampling] = {words: str(Interval(*(rows[f"{kind}/pass@1{end}"].dropna().iloc[0] for end in ("", "/lo", "/hi"))))
                       for kind, words in asked.items()}
print(f"{strata['checkpoint'].iloc[0]}, {len(evaluated)} seeds")
pd.DataFrame(shown)


# %% [markdown]
# ## Three lines of your own
#
# The loss of a batch: the mean over all supervised tokens, whichever row they stand in.

# %%
def masked_loss(nats, mask):
    """nats (B, T): -log p of each token; mask (B, T) of 0 and 1 -> scalar."""
    raise NotImplementedError("yours to fill in")


# %%
draws = torch.Generator().manual_seed(seed)
ragged, nats = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]), torch.rand(2, 4, generator=draws)
check_cases(masked_loss, ((nats, torch.ones(2, 4)), nats.mean()), ((nats, ragged), nats[ragged == 1].mean()))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `[1] * len(rendered.ids)` for `rendered.loss_mask` in `gradient_share` | without the mask, who gets the gradient at the predictions? | <details><summary>outcome</summary>text that others wrote gets 72 % of it: the model would learn to write requests and results. The last cell fails there</details> |
# | `{"calls": 0.5, "copy": 0.5}` as shares of the two example domains | a copying drill is a fifth as long as a call: does the loader need five times as many? | <details><summary>outcome</summary>yes: shares are in supervised tokens, and the printed shares are 0.51 and 0.49, after 117 epochs of the drills and 28 of the calls</details> |
#
# The last cell asserts the Result.

# %%
assert 0 < supervised < 0.5
assert losses["tokens that carry loss"].iloc[-1] > 2 * count and losses.iloc[1, 0] != losses.iloc[0, 0]
assert by_role.drop("assistant")["gradient at hidden"].sum() == 0
assert by_role.drop("assistant")["gradient at embedding"].sum() > 0.3
assert (realised - pd.Series({"calls": 0.7, "copy": 0.3})).abs().max() < 0.02
left = held.iloc[-1] / held.iloc[0]
assert left["calls"] < 1
call, restraint = "tool with tools: call", "tool without tools: neither"
assert final[call].value > 0.8 and final[restraint].value > 0.8
worst = final.index[final.map(lambda one: one.value).argmin()]
assert source != "frozen" or (worst == "tool with other tools: neither" and round(32 * final[worst].value) == 25)
