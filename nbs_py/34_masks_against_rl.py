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
# # Constrained decoding gains more than RL, and needs no training
#
# **Question.** RL on the reward staircase pays for readable calls of offered functions. A grammar enforces both during
# sampling, without training. How much does each gain, and does RL still gain under the grammar?
#
# **Result.** Masks that allow only valid calls raise greedy answers for unseen tools by 12 points and for
# renamed ones by 10, where RL has no resolved gain. At $T = 1$ they gain more than RL on every kind of request;
# with masks RL has one resolved gain, of 4 points. Masks cannot add knowledge: greedy answers for known tools
# and declining hardly move.
#
# **Runs/needs.** Committed rows of three seeds of recipe `nano` as it was with separate drills (`reports/frozen/constrained.jsonl`), made by `codechat evaluate --ckpt
# nano/sft nano/rl@best --split test test_hard --limit 250 --n 2 --ks 1 2 --temperatures 0 --constrain true --task funcall
# --data-dir data/nano/sft --max-new-tokens 64`, and the model that comes with the package. Half a minute on one core.
#
# Previous: [33 lora on an import](33_lora_on_an_import.ipynb) · Next: [35 what a pretrained base buys](35_what_a_pretrained_base_buys.ipynb)

# %% tags=["parameters"]
ckpt = "released/nano"
seed = 0
resamples = 4_000

# %%
from functools import partial

import numpy as np
import pandas as pd
import torch

from codechat.core.atomic_files import read_rows
from codechat.evaluation import intervals
from codechat.models.generate import sample
from codechat.models.loading import load_model
from codechat.text import chat
from codechat_lab.serve.call_grammar import prompt_grammar
from codechat_lab.reports import articles, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure


# %% [markdown]
# ## One answer, token by token
#
# A grammar of functions that nano has never seen. After each token it allows certain next ones: text or a call;
# inside a call only JSON, offered names, the arguments of that function, values of their types. All other tokens get
# probability 0, and the rest is renormalized:
#
# $$q(t) = \frac{p(t)\,[t \in A]}{\sum_{s \in A} p(s)}$$
#
# where $p$ is the model's distribution and $A$ the set of allowed tokens.

# %%
def function(name, description, **types):
    properties = {name: {"type": kind} for name, kind in types.items()}
    return dict(name=name, description=description, parameters=dict(type="object", properties=properties, required=list(types)))


ROOM = [function("room_book", "Book a room for some guests", room="string", guests="integer"),
        function("add", "Add two numbers", a="integer", b="integer")]
FERRY = [function("book_ferry", "Book a ferry to an island", island="string", seats="integer"),
         function("add", "Add two numbers", a="integer", b="integer")]
loaded = load_model(ckpt)


# %%
def asked(functions, request):
    """The prompt's ids and the grammar of its functions."""
    messages = [{"role": "system", "content": chat.tools_prompt(functions, loaded.tools_style)}, {"role": "user", "content": request}]
    return chat.prompt(messages, loaded.tokenizer, loaded.tags), prompt_grammar(messages, loaded.tokenizer, loaded.tags)


def said(ids):
    return chat.completion_text(ids, loaded.tokenizer, loaded.tags)


# %%
@torch.no_grad()
def by_hand(prompt, grammar, room=64):
    """Greedy decoding with masks; one row per token: the token, the model's own first choice, and the probability of all that is allowed."""
    state, ids, rows = grammar.begin(), [], []
    while len(ids) < room and not state.ended:
        p = loaded.model(torch.tensor([[*prompt, *ids]]))[0, -1].float().softmax(-1)
        mask = torch.from_numpy(state.mask(room - len(ids) - 1))
        allowed = torch.where(mask, p[: len(mask)], 0.0)
        ids.append(state.take(int(allowed.argmax()), room - len(ids) - 1))
        rows.append(dict(token=said(ids[-1:]), wanted=said([int(p.argmax())]), allowed=float(allowed.sum())))
    return ids, rows


# %%
prompt, grammar = asked(ROOM, "Book the room blue for 12 guests.")
stop = chat.stop_sequences(loaded.tokenizer, loaded.tags)
greedy = partial(sample, loaded.model, max_new_tokens=64, temperature=0.0, stop=stop)
free, held = greedy([prompt])[0].ids, greedy([prompt], grammars=[grammar])[0].ids
ids, steps = by_hand(prompt, grammar)
assert ids == held  # the library draws the same tokens
print("free: ", said(free))
print("masks:", said(held))
pd.DataFrame(steps)[lambda rows: rows["token"] != rows["wanted"]].round(4)

# %% [markdown]
# The mask changed only these tokens: the model preferred a number to a string, and misspelled the name of an argument. Elsewhere its first
# choice was allowed, even for the room's name.
#
# A call that fits the grammar can still be wrong. Here the model did not know the island, and any string is allowed:

# %%
prompt, grammar = asked(FERRY, "Book a ferry to the island Corfu for 3 seats.")
print("free: ", said(greedy([prompt])[0].ids))
print("masks:", said(greedy([prompt], grammars=[grammar])[0].ids))

# %% [markdown]
# ## 500 requests, three seeds, with and without masks
#
# SFT and RL of recipe `nano`, each at $T = 1$ (two answers a request) and greedy. All eight combinations answer the same requests.
# The share of correct answers:

# %%
KINDS = {"call": "known tools", "renamed": "renamed", "phrasing": "new phrasings", "tool": "unseen tools", "chain_1": "chains, first call",
         "chain_2": "chains, second call", "unfitting": "unfitting declined"}
rows = pd.DataFrame(read_rows(run_frames.frozen_dir() / "constrained.jsonl"))
tools = {row.stratum: row.tools for row in rows[rows["tools"].notna()].itertuples()}


def answers(model, temperature, constrained, kind):
    """(seeds, problems): share of correct answers."""
    found = rows.query("model == @model and temperature == @temperature and constrained == @constrained and stratum == @kind")
    found = found.sort_values("seed")  # a digit per problem: how many of its n answers are correct
    return np.array([list(map(int, digits)) for digits in found["correct"]]) / found["n"].iloc[0]


# %%
interval = partial(intervals.hierarchical_interval, seed=seed, resamples=resamples)
WAYS = {"SFT": ("sft", False), "RL": ("rl", False), "SFT, masks": ("sft", True), "RL, masks": ("rl", True)}


def share(way, temperature, kind):
    return interval(answers(WAYS[way][0], temperature, WAYS[way][1], kind), clusters=tools[kind], bounds=(0.0, 1.0))


def gain(before, after, temperature, kind):
    """Mean difference, paired by problem, tools drawn with all their problems."""
    a, b = (answers(WAYS[way][0], temperature, WAYS[way][1], kind) for way in (before, after))
    return interval(b - a, clusters=tools[kind])


# %%
shares = {(t, kind): {way: share(way, t, kind) for way in WAYS} for t in (1.0, 0.0) for kind in KINDS}
table = [{"": KINDS[kind], "T": "greedy" if t == 0 else "1", "N": len(tools[kind])} | {way: f"{s.value:.2f}" for way, s in row.items()}
         for (t, kind), row in shares.items()]
articles.table(pd.DataFrame(table), {name: name for name in table[0]})

# %% [markdown]
# ## What each gains
#
# In points, with 95 % intervals over seeds and tools; **bold** where the interval excludes 0. The third column is RL's control: its gain where
# calls are valid anyway.

# %%
PAIRS = {"RL": ("SFT", "RL"), "masks": ("SFT", "SFT, masks"), "RL beside masks": ("SFT, masks", "RL, masks"), "masks after RL": ("RL", "RL, masks")}
gains = {(t, kind): {name: gain(*pair, t, kind) for name, pair in PAIRS.items()} for t in (1.0, 0.0) for kind in KINDS}


def points(found):
    text = "{:+d} [{:+d}, {:+d}]".format(*(round(100 * x) for x in (found.value, found.lo, found.hi)))
    return f"**{text}**" if found.lo > 0 or found.hi < 0 else text


table = [{"": KINDS[kind], "T": "greedy" if t == 0 else "1"} | {name: points(found) for name, found in row.items()} for (t, kind), row in gains.items()]
articles.table(pd.DataFrame(table), {name: name for name in table[0]})

# %%
fig, axes = new_figure("Masks gain most where names are new; RL adds little with or without them", cols=2, size=(7.6, 3.7))
LOOKS = {"RL": ("orange", "o", 0.18), "masks": ("blue", "s", 0.0), "RL beside masks": ("vermilion", "^", -0.18)}
for ax, t in zip(axes[0], (1.0, 0.0)):
    for name, (colour, marker, shift) in LOOKS.items():
        found = [gains[t, kind][name] for kind in KINDS]
        at = np.arange(len(KINDS))[::-1] + shift
        error = np.array([[f.value - f.lo, f.hi - f.value] for f in found]).T * 100
        ax.errorbar([100 * f.value for f in found], at, xerr=error, fmt=marker, color=OKABE_ITO[colour], markersize=4.5, elinewidth=1, label=name)
    ax.axvline(0, color="#808080", linewidth=0.8)
    ax.set(yticks=np.arange(len(KINDS))[::-1], yticklabels=list(KINDS.values()) if t else [], title="T = 1" if t else "greedy", xlim=(-20, 29))
    finish(ax, x="gain in points", y="", legend=bool(t), loc="lower right")
fig

# %% [markdown]
# ## Where the gain comes from
#
# Masks replace unreadable calls and names that are not offered. What do these answers name instead?

# %%
NAMES = {"right": "right tool", "other": "another offered tool", "not_offered": "not offered", "unreadable": "unreadable", "no_call": "no call or none()"}


def named(way, t, kind):
    model, constrained = WAYS[way]
    found = rows.query("model == @model and temperature == @t and constrained == @constrained and stratum == @kind")["named"]
    counts = pd.DataFrame(found.to_list()).fillna(0).sum()
    return (counts / counts.sum()).reindex(list(NAMES), fill_value=0.0)


table = [{"": KINDS[kind], "T": "greedy" if t == 0 else "1", "answers": way} | {NAMES[n]: f"{v:.2f}" for n, v in named(way, t, kind).items()}
         for kind in ("tool", "renamed", "call", "unfitting") for t in (1.0, 0.0) for way in ("SFT", "SFT, masks")]
articles.table(pd.DataFrame(table), {name: name for name in table[0]})

# %% [markdown]
# Greedy answers for unseen tools: 0.15 of them name a tool that was not offered or cannot be read. With masks none does. About half of the lost
# ones name the correct tool now, the others another offered tool or `none()`. Correct answers rise by more than correct names do, because masks
# also enforce the names of arguments. At $T = 1$ more than a third is lost, so masks gain more there: much of what sampling costs a small model is
# a wrong token inside a name.
#
# Renamed tools behave alike. Known tools do not: the model writes their names without error anyway, so greedily nothing is left to
# gain. And a wrong call to an unfitting request stays a call with masks.
#
# ## What masks cost, and what RL costs
#
# A mask takes 167 microseconds a token with this vocabulary (`python -m benchmarks constrain`, [serving](../docs/serving.md)), and the grammar of a
# list of tools a few tens of milliseconds, once. RL of recipe `nano` takes 30 steps and about two minutes of two cores. So masks are the control
# that RL on valid calls has to beat. Evaluations report them in separate rows, never mixed with unconstrained answers.
#
# RL could still be worth it where validity is not the difficulty: which tool, which values, whether to call at all. The staircase pays for
# these as well, but 30 steps did not move them here (columns *RL* and *RL beside masks*).
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `FERRY[0]["parameters"]["properties"]["island"]["enum"] = ["Crete", "Corfu"]`, then ask for each | the mask now knows the islands; does the model choose the requested one? | <details><summary>outcome</summary>no: Crete to both, in either order; asked for Naxos as a third it declines. The mask makes a value valid, not right</details> |
# | `call_grammar(loaded.tokenizer, loaded.tags, ROOM, Rules(required=True))` for "Reverse the text abc." | what does the model call if it must? | <details><summary>outcome</summary>`room_book` with a room "polc" and 2 guests, where it declines without `required`; for "Hello!" `add` with 3 and 1</details> |
#
# The last cell asserts the Result.

# %%
greedy_points = {kind: round(100 * gains[0.0, kind]["masks"].value) for kind in KINDS}
assert greedy_points["tool"] == 12 and greedy_points["renamed"] == 10 and min(gains[0.0, kind]["masks"].lo for kind in ("tool", "renamed")) > 0
assert all(row["RL"].lo <= 0 <= row["RL"].hi for row in gains.values())
assert all(gains[1.0, kind]["masks"].value > gains[1.0, kind]["RL"].value for kind in KINDS)
resolved = [where for where, row in gains.items() if row["RL beside masks"].lo > 0 or row["RL beside masks"].hi < 0]
assert resolved == [(1.0, "tool")] and round(100 * gains[1.0, "tool"]["RL beside masks"].value) == 4
assert all(gains[0.0, kind]["masks"].lo <= 0 <= gains[0.0, kind]["masks"].hi and abs(greedy_points[kind]) <= 2 for kind in ("call", "unfitting"))

# %%
lost, then = named("SFT", 0.0, "tool"), named("SFT, masks", 0.0, "tool")
assert round(lost["not_offered"] + lost["unreadable"], 2) == 0.15 and then["not_offered"] == then["unreadable"] == 0
assert 0.4 < (then["right"] - lost["right"]) / (lost["not_offered"] + lost["unreadable"]) < 0.6
assert gains[0.0, "tool"]["masks"].value > then["right"] - lost["right"]
assert named("SFT", 1.0, "tool")[["not_offered", "unreadable"]].sum() > 1 / 3 and named("SFT", 0.0, "call")["not_offered"] < 0.01
assert [row["token"] for row in steps if row["token"] != row["wanted"]] == [' "', "ests"]
