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
# # Sampling: a key-value cache, written by hand, makes it affordable
#
# **Question.** What does it take to sample an answer token by token, what does a key-value cache save and
# cost, and how do temperature, top-k and top-p change what is sampled?
#
# **Result.** A cache of twelve lines gives the same outputs as running the whole text again. For 64 new tokens
# after a prompt of 192, the model runs 255 tokens instead of 14,304, or 1 in 56. At 8B the cache costs 640 KiB
# of memory per token.
#
# **Also.** A group of eight answers runs its prompt once instead of eight times.
#
# **Runs/needs.** No runs and no data; seconds on one core.
#
# In use: [REINFORCE](07_reinforce.ipynb).
#
# Previous: [18 losses solved](18_losses_solved.ipynb) · Next: [20 museum stop mask](20_museum_stop_mask.ipynb)

# %% tags=["parameters"]
seed = 0
prompt_tokens = 192
new_tokens = 64
group_size = 8

# %%
import inspect
import math

import pandas as pd
import torch
import torch.nn.functional as F

from codechat.models import attention, generate
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

torch.manual_seed(seed)
shape = GPTConfig(depth=2, n_embd=64, n_head=4, block_size=prompt_tokens + new_tokens, vocab_size=512)
model = GPT(shape, seed=seed).eval()
prompt = torch.randint(0, shape.n_ids, (1, prompt_tokens))


# %% [markdown]
# ## Without a cache
#
# The model predicts the next token from all tokens before it. Without a cache every new token runs the whole
# text again. For a prompt of $P$ tokens and $N$ new ones that is $\sum_{i=0}^{N-1} (P + i)$ tokens.

# %%
@torch.no_grad()
def greedy_without_cache(ids: torch.Tensor, new: int) -> tuple[torch.Tensor, int]:
    """(1, T + new) and how many tokens ran through the model."""
    ran = 0
    for _ in range(new):
        ran += ids.shape[1]
        best = model(ids)[:, -1, : shape.n_ids].argmax(-1, keepdim=True)  # (1, 1)
        ids = torch.cat([ids, best], 1)
    return ids, ran


slow, ran_slow = greedy_without_cache(prompt, new_tokens)
assert ran_slow == sum(prompt_tokens + i for i in range(new_tokens))
print(f"{new_tokens} new tokens: {ran_slow:,} tokens ran through the model")


# %% [markdown]
# ## The cache, by hand
#
# A new token reads only the keys and values of earlier ones, and these never change: a token attends only to
# what precedes it. So each layer keeps them. A step then runs one token, appends its key
# and value, and attends to everything kept:
#
# $$\mathrm{attention}(q_t) = \sum_{s \le t} \mathrm{softmax}_s\!\left(\frac{q_t \cdot k_s}{\sqrt{E}}\right) v_s$$

# %%
def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: dict) -> torch.Tensor:
    """q, k, v (1, H, T, E) of T new tokens -> (1, H, T, E); kept: {layer: (keys, values)}, grows."""
    if layer in kept:
        k, v = torch.cat([kept[layer][0], k], 2), torch.cat([kept[layer][1], v], 2)
    kept[layer] = k, v
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (1, H, T, S)
    old = k.shape[2] - q.shape[2]
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(old + 1)  # a token sees none behind it
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


# %% [markdown]
# The library gives its layers an object with a method `attend`. Ours counts positions too; everything else is
# the model's own code.

# %%
class CacheByHand:
    def __init__(self) -> None:
        self.kept, self.length = {}, 0

    def positions(self, new: int) -> torch.Tensor:
        return torch.arange(self.length, self.length + new)[None]

    def mask(self, new: int) -> None:
        return None  # `attend` hides what comes later

    def attend(self, layer, q, k, v, mask):
        return attend(layer, q, k, v, self.kept)

    def advance(self, new: int, n_new=None) -> None:
        self.length += new


# %%
def logits_of(ids: torch.Tensor, cache: object) -> torch.Tensor:
    """(1, T, V) of T new tokens behind what the cache holds."""
    return F.linear(model.hidden(ids, cache=cache), model.head_weight())[..., : shape.n_ids]


ours, theirs = CacheByHand(), attention.KVCache(shape, 1, shape.block_size)
with torch.no_grad():
    whole = model(slow)[..., : shape.n_ids]
    parts = {name: [logits_of(slow[:, :prompt_tokens], cache)] for name, cache in (("ours", ours), ("library", theirs))}
    for t in range(prompt_tokens, slow.shape[1]):
        parts["ours"].append(logits_of(slow[:, t : t + 1], ours))
        parts["library"].append(logits_of(slow[:, t : t + 1], theirs))
for name, found in parts.items():
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-5)
print("one token at a time gives the logits of the whole text: by hand and by the library")

# %%
print(inspect.getsource(attention.KVCache.attend))


# %% [markdown]
# ## What it saves
#
# The prompt once, then one token per step: $P + N - 1$ tokens instead of $\sum_i (P + i)$. **Before you read
# on: does the saving grow with the prompt or with the answer?**

# %%
@torch.no_grad()
def greedy_with_cache(ids: torch.Tensor, new: int) -> tuple[torch.Tensor, int]:
    cache, fresh, ran = CacheByHand(), ids, 0
    for _ in range(new):
        ran += fresh.shape[1]
        fresh = logits_of(fresh, cache)[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, fresh], 1)
    return ids, ran


fast, ran_fast = greedy_with_cache(prompt, new_tokens)
library = generate.sample(model, prompt.tolist(), max_new_tokens=new_tokens, temperature=0.0)[0].ids
assert slow.tolist() == fast.tolist() and fast[0, prompt_tokens:].tolist() == library
saving = ran_slow / ran_fast
print(f"{ran_fast:,} tokens instead of {ran_slow:,}: 1 in {saving:.0f}")

# %% [markdown]
# The saving is about $N (P + N/2) / (P + N)$: it grows with the answer. A long prompt before one token saves
# nothing.

# %%
lengths = [1, 4, 16, 64, 256, 1024, 4096]
fig, axes = new_figure("The cache's saving is the length of the answer, once the prompt is as long", size=(6.4, 3.0))
for long, colour in ((16, "sky"), (256, "blue"), (4096, "black")):
    without = [n * long + n * (n - 1) / 2 for n in lengths]
    axes[0, 0].plot(lengths, [w / (long + n - 1) for w, n in zip(without, lengths)], "o-", color=OKABE_ITO[colour], label=f"prompt of {long:,}")
axes[0, 0].set(xscale="log", yscale="log")
finish(axes[0, 0], x="new tokens (log)", y="tokens run, without / with (log)")
fig


# %% [markdown]
# ## What it costs
#
# Memory: for every token, layer and key-value head one key and one value. In bfloat16 that is
# $2 \cdot 2 \cdot \text{depth} \cdot K \cdot E$ bytes. Every step reads all of it, so memory limits sampling,
# not arithmetic. Grouped queries ($K < H$) make it smaller.

# %%
def bytes_per_token(cfg: GPTConfig) -> int:
    return 2 * 2 * cfg.depth * cfg.kv_heads * cfg.head_dim


whole_8b = GPTConfig(depth=40, n_embd=4096, n_head=32, block_size=2048)
grouped_8b = GPTConfig(depth=40, n_embd=4096, n_head=32, n_kv_head=8, block_size=2048)
small = attention.KVCache(shape, 3, 10, dtype=torch.bfloat16)
held = small.kv.numel() * small.kv.element_size()
assert held == 3 * 10 * bytes_per_token(shape)  # what the library allocates
table = pd.DataFrame({"KiB per token": [bytes_per_token(c) / 1024 for c in (whole_8b, grouped_8b)]}, ["8B, 32 key-value heads", "8B, 8 key-value heads"])
table["GiB for 64 answers of 2,048 tokens"] = table["KiB per token"] * 64 * 2048 / 2**20
table.round(2)

# %% [markdown]
# ## A group shares its prompt
#
# RL samples $G$ answers to each prompt. The library runs the prompt once and lets all answers read that cache.

# %%
counted = {"tokens": 0}
hook = model.blocks[0].register_forward_pre_hook(lambda block, args: counted.update(tokens=counted["tokens"] + args[0].shape[0] * args[0].shape[1]))
generate.sample(model, prompt.tolist(), max_new_tokens=2, samples_per_prompt=group_size, seed=seed)
hook.remove()
print(f"{counted['tokens']} tokens in whole passes for {group_size} answers; without sharing it would be {group_size * prompt_tokens:,}")


# %% [markdown]
# ## Which token? Temperature, top-k, top-p
#
# $p_i \propto e^{z_i / T}$. Temperature 0 takes the likeliest token. top-k keeps the $k$ likeliest; top-p the
# smallest set of likeliest ones that together have probability $p$. RL here samples at $T = 1$ without
# truncation: then the log-probabilities of the sampler are those that the trainer computes.

# %%
def truncated(logits: torch.Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> torch.Tensor:
    """(V,) logits -> (V,) probabilities."""
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        keep[order[top_k:]] = False
    if top_p is not None:
        before = p[order].cumsum(0) - p[order]  # probability of the likelier ones
        keep[order[before >= top_p]] = False
    return torch.where(keep, p, 0.0) / p[keep].sum()


# %%
logits = torch.tensor([3.0, 2.5, 1.5, 1.0, 0.0, -0.5, -1.0, -2.0])
choices = {"T = 1": dict(temperature=1.0), "T = 0.5": dict(temperature=0.5), "T = 2": dict(temperature=2.0),
           "T = 1, top-k 2": dict(temperature=1.0, top_k=2), "T = 1, top-p 0.8": dict(temperature=1.0, top_p=0.8)}
shown = {}
for name, how in choices.items():
    shown[name] = truncated(logits, **how)
    best, ids = generate.Truncation(**how).candidates(logits[None].clone())
    library = torch.zeros(8).scatter(0, torch.arange(8) if ids is None else ids[0], best[0].softmax(-1))
    torch.testing.assert_close(shown[name], library)
entropy = {name: float(-(p * p.clamp(min=1e-30).log()).sum()) for name, p in shown.items()}
pd.DataFrame(shown, [f"token {i}" for i in range(8)]).T.assign(entropy=entropy).round(3)

# %%
fig, axes = new_figure("Low temperature sharpens; top-k and top-p cut the tail", size=(6.4, 2.8))
for i, (name, p) in enumerate(shown.items()):
    axes[0, 0].bar([x + (i - 2) * 0.16 for x in range(8)], p, 0.16, label=name, color=list(OKABE_ITO.values())[i])
finish(axes[0, 0], x="token, by logit", y="probability")
fig


# %% [markdown]
# ## Three lines of your own
#
# How many tokens does top-p keep? The likeliest ones, until they have probability $p$ together; always at least one.

# %%
def nucleus(probabilities, top_p):
    """probabilities (V,) in any order -> number of tokens that are kept."""
    raise NotImplementedError("yours to fill in")


# %%
from codechat_lab.instruments.loss_exercises import check_cases

p = logits.softmax(-1)
check_cases(nucleus, *(((p.flip(0), top), int((truncated(logits, 1.0, top_p=top) > 0).sum())) for top in (0.1, 0.5, 0.8, 0.95)))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `new_tokens = 8` | does the cache save as much? | <details><summary>outcome</summary>the saving falls from 56 to 8; the cache pays per new token</details> |
# | `group_size = 64` | is the prompt read 64 times? | <details><summary>outcome</summary>no: the count above stays at one prompt</details> |
#
# *Question first: with top-p 0.8, what is the
# log-probability of a token that was cut, and what would a trainer at $T = 1$ without truncation say?* It is
# minus infinity for the sampler and finite for the trainer: that gap is `logprob_mismatch`.
#
# The last cell asserts the Result.

# %%
assert (ran_fast, ran_slow) == (prompt_tokens + new_tokens - 1, sum(prompt_tokens + i for i in range(new_tokens)))
if (prompt_tokens, new_tokens) == (192, 64):
    assert (ran_fast, ran_slow) == (255, 14_304) and round(saving) == 56
assert bytes_per_token(whole_8b) == 640 * 1024 and bytes_per_token(grouped_8b) == 160 * 1024
assert prompt_tokens <= counted["tokens"] < 2 * prompt_tokens
assert entropy["T = 0.5"] < entropy["T = 1"] < entropy["T = 2"]
