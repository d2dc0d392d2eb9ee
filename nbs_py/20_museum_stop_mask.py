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
# # Museum: a wrong loss mask trained three tokens of every call
#
# **Question.** In the original, RL on function calls stayed within a point of its start and was reported as
# saturated. Which tokens did its gradient reach?
#
# **Result.** Only `<`, `function` and `call` received a gradient, three of the 37 tokens of a call; where all
# answers of a group begin alike, as calls do, even that cancels. With the correct mask one step separates good
# from bad answers by about a nat per unit of advantage, almost all because bad answers become less likely.
# With the broken mask it separates them by nothing.
#
# | one step's rollouts: 48 answers to 6 requests | |
# |---|---|
# | gradient that the broken mask leaves in a group whose answers begin alike | 1e-8 of it: rounding |
# | a group with one answer that begins differently | the mask can teach only to begin with a call |
# | share of a correct answer's gradient after `<functioncall>` | over 90 %; broken mask 0 % |
# | the same rule with reserved tags | no error: all tokens are trained |
#
# **Runs/needs.** No runs and no data. A policy with GPT-2's whole vocabulary is trained here for seconds on
# one core. What a mask of three tokens does to a whole run: set `mask = "opening"` in
# [RL in two minutes](00_rl_in_two_minutes.ipynb).
#
# Previous: [19 sampling and cache](19_sampling_and_cache.ipynb) · Next: [21 museum cut programs](21_museum_cut_programs.ipynb)

# %% tags=["parameters"]
seed = 0
sft_steps = 120
groups = 6
group_size = 8

# %%
import pandas as pd
import torch
from IPython.display import HTML
from torch.nn.utils.rnn import pad_sequence

from codechat.data import conversations
from codechat.models import optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.rl import advantages, losses, rollout
from codechat.tasks import load
from codechat.text import chat, tokenizer
from codechat_lab.instruments.token_attribution import gradient_share, xray_values
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks.toolbox.problems import draw

tok, task = tokenizer.load("gpt2"), load("funcall")

# %% [markdown]
# ## The end tag in GPT-2's vocabulary
#
# `<|end|>` is not one token there but five, of four kinds. The *sequence* of these five ends an answer. The
# original tested membership in the *set*, which every `<`, `>`, `|` and `end` of an ordinary text also
# passes.

# %%
end = chat.stop_sequences(tok, "text")[0]
pieces = frozenset(end)
print([tok.decode([i]) for i in end], "->", {i: tok.decode([i]) for i in sorted(pieces)})


def trained_by_the_set(ids: list[int]) -> list[bool]:
    """Which tokens of a completion kept a gradient: those before the second one that is a piece of the end tag."""
    seen = pd.Series(ids).isin(pieces).cumsum()
    return (seen <= 1).to_list()



# %% [markdown]
# A call begins with `<functioncall>`, which contains a `<` and a `>`: the second piece is its fourth token.
# The tokens with loss under the correct mask (all of them) and under the broken one:

# %%
call = chat.format_call("get_weather", {"location": "Paris", "unit": "celsius"})
ids = chat.completion_ids(call, tok, "text")
kept = trained_by_the_set(ids)
display(HTML(xray_values(ids, [1.0] * len(ids), tok, "mask", ["answer"] * len(ids)).html()))
HTML(xray_values(ids, [float(k) for k in kept], tok, "mask", ["answer"] * len(ids)).html())

# %% [markdown]
# ## A policy that begins every answer with a call
#
# As in the original, RL starts from a model that was fine-tuned on calls. This one is tiny and trained for
# seconds, but on all 50,257 tokens: it has learned that an answer begins with `<functioncall>`, and not yet
# the contents.

# %%
problems = [p for p in draw("train", 200, seed, shares={"call": 1}) if len(p.gold["arguments"]) == 1][:groups]
policy = GPT(GPTConfig(depth=1, n_embd=48, n_head=2, block_size=512, vocab_size=tok.n_vocab), seed=seed)
taught = [p.messages + [{"role": "assistant", "content": task.gold(p)}] for p in problems]
examples = {"calls": [conversations.encode({"messages": m, "domain": "calls"}, tok, "text", 512) for m in taught]}
loader, optimizers = conversations.PackedLoader(examples, None, batch=1, T=512, seed=seed), optim.build(policy, lr=4e-3, weight_decay=0.0)
for step in range(sft_steps):
    batch = loader.next()
    loss = policy.loss(batch.ids, batch.targets, positions=batch.positions, mask=conversations.packed_mask(batch.docs))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"loss {loss.item():.2f} nats per supervised token after {sft_steps} steps")

# %% [markdown]
# One step's rollouts, sampled once and scored by the staircase reward. Everything below uses these.

# %%
rollouts = rollout.collect(policy, task, problems, tok, "text", group_size=group_size, max_new_tokens=48, seed=seed + 1)
advantage = advantages.group_advantages(rollouts.rewards, "mean")
opens = torch.tensor([text.startswith("<functioncall>") for text in rollouts.texts]).view(groups, group_size)
print(f"{opens.float().mean():.0%} of the answers begin with a call; rewards {rollouts.rewards.min():.2f} to {rollouts.rewards.max():.2f}")
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame({"reward": rollouts.rewards[0], "answer": rollouts.texts[:group_size]}))


# %% [markdown]
# ## See it happen: the gradient of v5's step
#
# REINFORCE with the group mean as baseline, once with each mask. If all answers of a group begin alike, the
# broken mask trains the same three tokens after the same prompt, with advantages that add up to 0. The
# prediction: no gradient is left there. If one answer begins differently, what is left can only teach the
# beginning.

# %%
def gradient(batch, advantage, broken):
    """(D,) the gradient of the step's loss, and how many tokens it trains."""
    kept = pad_sequence([torch.tensor(trained_by_the_set(c.ids)) for c in batch.completions], batch_first=True)
    trained = 0
    for packed in rollout.pack(batch, advantage != 0, row_tokens=1024, rows=8):
        logprobs, _ = policy.token_logprobs(packed.ids, packed.targets, **packed.where())
        mask = packed.mask() & (kept[packed.numbers, : packed.longest] if broken else True)
        loss = losses.policy_gradient_loss(packed.unpack(logprobs), advantage.view(-1, 1)[packed.numbers], mask, count=batch.n_tokens)
        loss.backward()
        trained += int(mask.sum())
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()])
    policy.zero_grad()
    return found, trained


# %%
whole, n_whole = gradient(rollouts, advantage, broken=False)
lost, n_lost = gradient(rollouts, advantage, broken=True)
per_group = pd.DataFrame([[float(gradient(rollouts.take([p]), advantage[[p]], broken)[0].norm()) for broken in (False, True)] for p in range(groups)],
                         columns=["correct mask", "broken mask"])
per_group["opens with a call"] = opens.sum(1)
print(f"trained tokens {n_whole} and {n_lost}; length of the step's gradient {whole.norm():.4f} and {lost.norm():.4f}")
per_group

# %%
alike = per_group["opens with a call"] == group_size
left = float((per_group["broken mask"] / per_group["correct mask"])[alike].max())
title = f"{alike.sum()} of {groups} groups begin alike: the broken mask leaves {left:.0e} of their gradient"
fig, axes = new_figure(title, size=(6.4, 2.7))
for shift, (name, colour) in zip((-0.2, 0.2), (("correct mask", "green"), ("broken mask", "vermilion"))):
    axes[0, 0].bar(per_group.index + shift, per_group[name].clip(lower=1e-10), 0.4, color=OKABE_ITO[colour], label=name)
axes[0, 0].set_yscale("log")
axes[0, 0].set_ylim(1e-10, 100)
finish(axes[0, 0], x="group (one request, eight answers)", y="gradient norm (log)", loc="upper center", ncols=2)
fig

# %% [markdown]
# ## See the instrument report it
#
# `codechat xray` shows each token's share of the gradient. In a correct answer, the name and the argument get
# most of it under the correct mask, and nothing under the broken one.

# %%
prompt, right = rollouts.prompts[0], chat.completion_ids(task.gold(problems[0]), tok, "text")
sequence = prompt + right
shares = {}
for name, mask in (("correct mask", [True] * len(right)), ("broken mask", trained_by_the_set(right))):
    found = gradient_share(policy, sequence, [False] * len(prompt) + mask, policy=True)[len(prompt) :]
    shares[name] = found
    display(HTML(xray_values(right, found, tok, "gradient", ["answer"] * len(right)).html()))
opening = len(tok.encode("<functioncall>"))
content = {name: sum(found[opening:]) for name, found in shares.items()}
print("share of the gradient behind <functioncall>:", {name: f"{value:.0%}" for name, value in content.items()})


# %% [markdown]
# ## Flip the fix
#
# One step along each gradient at the same learning rate: change in log-probability against advantage. Learning
# shows as a slope. Only answers that begin alike are plotted. **Which side makes the slope:
# good answers that become likelier, or bad ones that become less likely?**

# %%
def likelihood():
    """(P, G) log-probability of each answer under the policy as it is."""
    return rollout.score_logprobs(policy, rollouts, temperature=1.0, row_tokens=1024, rows=8).sum(1).view(groups, group_size)


before, moved, lr = likelihood(), {}, 0.5
for name, step in (("correct mask", whole), ("broken mask", lost)):
    parts = step.split([p.numel() for p in policy.parameters()])
    with torch.no_grad():
        for sign in (-1, 1):  # there, and back
            for p, part in zip(policy.parameters(), parts):
                p.add_(part.view_as(p), alpha=sign * lr)
            if sign == -1:
                moved[name] = (likelihood() - before).flatten()

# %%
drawn = opens.all(1)[:, None].expand_as(opens).flatten()
pushed = advantage.flatten()[drawn]
gain = {name: float((change[drawn] * pushed).sum() / pushed.square().sum()) for name, change in moved.items()}
sides = {"worse than the group's mean": pushed < 0, "better": pushed > 0}
by_side = pd.DataFrame({name: {side: float(change[drawn][at].mean()) for side, at in sides.items()} for name, change in moved.items()})
title = f"Bad answers become {-by_side.iloc[0, 0]:.1f} nats less likely, good ones {by_side.iloc[1, 0]:.2f} likelier; broken mask: neither"
fig, axes = new_figure(title, size=(6.4, 2.8))
for name, colour in (("correct mask", "green"), ("broken mask", "vermilion")):
    axes[0, 0].scatter(pushed, moved[name][drawn], s=18, color=OKABE_ITO[colour], label=name, alpha=0.8)
axes[0, 0].axhline(0, color="grey", linewidth=0.8)
finish(axes[0, 0], x="advantage of the answer", y="log-probability (change, nats)")
fig

# %%
print("nats per unit of advantage:", {name: round(value, 2) for name, value in gain.items()})
by_side.rename_axis("mean change in nats of answers").round(2)

# %% [markdown]
# The slope comes from the bad answers: after fine-tuning the good ones were likely already, and a probability cannot exceed 1. So the original
# never measured whether RL on this task saturates. The fix is structural: one module (`chat`) knows the layout, a stop is a sequence, and a
# reserved end tag is one id that no text contains:

# %%
reserved = chat.stop_sequences(tok)[0]
in_reserved = chat.completion_ids(call, tok)
pieces = frozenset(reserved)
n_reserved = sum(trained_by_the_set(in_reserved))
print(f"reserved: the end tag is {reserved}; the same rule keeps {n_reserved} of {len(in_reserved)} tokens")

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `"text"` to `"reserved"` wherever `chat` is called for the picture of the mask | does the same rule break the mask? | <details><summary>outcome</summary>no: the end is one id that no other text contains, so the set has one element (the last cell of the section shows it)</details> |
# | `call` with `"unit": "<b>"` as an argument | where does the broken mask end now? | <details><summary>outcome</summary>at the same place: the second piece is the `>` of `<functioncall>`, before any argument</details> |
#
# The last cell asserts the Result.

# %%
assert sorted(set(end)) == [27, 29, 91, 437]
assert [tok.decode([i]) for i, k in zip(ids, kept) if k] == ["<", "function", "call"]
assert (len(ids), sum(kept)) == (37, 3) and rollouts.rewards.numel() == 48
assert n_whole > 8 * n_lost and 4 <= alike.sum() and opens.sum() >= 44  # another machine's rounding draws other tokens
assert left < 1e-6 and (per_group["correct mask"] > 0.01).sum() >= 5
assert content["correct mask"] > 0.9 and content["broken mask"] == 0
assert gain["correct mask"] > 0.8 and abs(gain["broken mask"]) < 0.1
assert -by_side.loc["worse than the group's mean", "correct mask"] > 3 * abs(by_side.loc["better", "correct mask"])
assert n_reserved == len(in_reserved)
