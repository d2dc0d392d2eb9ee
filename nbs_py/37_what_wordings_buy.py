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
# # Further wordings make known tools known in other words, and cost some sureness
#
# **Question.** Recipe `mini` knew every tool of its training and got 16 of 60 requests right that were put as people type them. Had it met too few
# wordings, and too narrow a kind of word to copy? The same model, the same number of steps, other conversations: what changes, and where?
#
# **Result.** Known tools asked for in new words rise from 0.45 to 0.68, requests of people from 16 to 29 of 60, and after a call 0.87 of the sentences
# fit, in place of 0.17. Of words that are one token, 70 of 100 are copied into a call in place of 18, once training spells such words. It costs: declining
# falls from 0.98 to 0.87, and at $T = 1$ known tools from 0.97 to 0.91. Unseen tools do not move (0.18, 0.19).
#
# **Runs/needs.** Committed rows of trainings of recipe `mini` (`reports/frozen/everyday`), one seed each, and the model that comes with the package. Nothing is
# trained. Half a minute on one core.
#
# Previous: [36 what size buys](36_what_size_buys.ipynb)

# %% tags=["parameters"]
ckpt = "released/mini"
seed = 0

# %%
import json
import random

import numpy as np
import pandas as pd

from codechat import chat, intervals
from codechat.models.generate import sample
from codechat.models.loading import load_model
from codechat.reports import articles, frozen_rows, run_frames
from codechat.reports.style import OKABE_ITO, finish, new_figure
from codechat.tasks.toolbox import TOOLS, everyday, tools_of

# %%
frames = run_frames.load_frozen(frozen_rows.frozen_dir() / "everyday")
DATA = {"before": "nano's data", "words": "everyday words", "values": "varied values", "spelling": "spelling", "plain": "plain answers"}
COLOURS = dict(zip(DATA, (OKABE_ITO[c] for c in ("orange", "sky", "green", "blue", "purple")), strict=True))
LAST = list(DATA)[-1]

# %% [markdown]
# ## What was added
#
# *Everyday words*:
#
# - Sixteen more requests for most tools of the catalogue, which had five to eight. Half of the requests for them are drawn from these.
# - *Services*: functions of everyday life, each asked for in twelve ways. 15 % of the requests are for them. Their results are drawn, so
#   that the answer after a call is about something that the model could not have computed.
# - Small talk in several spellings.
#
# *Varied values*: the words and names in requests were invented by one grammar (*reamo*, *Weanar*). 40 % of them are dictionary words, two of
# these in one, names of people and places, or letters in any order. (And 12 % of the conversations go on after the call, in place of 8.)
#
# *Spelling*: 60 % of them, with the words that are one token in the vocabulary, and drills that put such words in quotation marks. The reason
# is in "What can be copied" below.
#
# *Plain answers*: after 80 % of the calls of functions with drawn names, a sentence that only states the result ("The answer is 465."), and
# for invented functions a drawn result. Before, such a call was followed by the sentence of the function that had been renamed, so that the
# name led to any of a hundred sentences. After 40 % of the other calls too; and one more service, for the weather of now. The reason is in "After the call" below.
#
# Each step has the ones before it. The tables were written without sight of any test: no request of `codechat natural` is one of them with its slots filled
# (`tests/evaluation/test_natural.py`). The steps after the first were taken *after* seeing wrong arguments among the natural answers ("Priya" became
# "Crix"), so for them those requests are no longer quite fresh. None of their names is in the lists.

# %%
rng = random.Random(seed)
more = everyday.wordings()
print(f"{len(more)} of {len(tools_of(2, held_out=False))} tools have further wordings; {len(everyday.services())} services")
print("square, before:", *TOOLS["square"].asks[:3], sep="\n    ")
print("square, further:", *rng.sample(more["square"], 4), sep="\n    ")
rows = [dict(name=t.name, description=t.description, request=rng.choice(t.asks), answer=t.answer) for t in rng.sample(everyday.services(), 5)]
print("words to copy:", *[TOOLS["reverse_text"].sample(rng, "train", varied=0.6)["text"] for _ in range(12)])
articles.table(pd.DataFrame(rows), {"name": "service"} | {k: (k, articles.VERBATIM) for k in ("description", "request", "answer")})


# %% [markdown]
# ## The same test problems
#
# Greedy answers after SFT to the same 500 problems. The share of correct answers, and the difference to the first training paired by problem, with
# 95 % intervals over tools. The values in these problems are invented, as before.

# %%
def solved(data, sampling="greedy"):
    """Problem -> (stratum, cluster, correct, samples) of one training's answers."""
    found = frames["per_problem"].query("data == @data and sampling == @sampling").set_index("id")
    return found.assign(kind=found.index.str.rsplit("-", n=2).str[-2])


greedy = {data: solved(data) for data in DATA}
assert all(set(own.index) == set(greedy["before"].index) for own in greedy.values())
KINDS = {kind: words for kind, words in run_frames.STRATA.items() if kind in set(greedy["before"]["kind"])}


# %%
def estimate(own, values, bounds):
    named = own["cluster"].where(own["cluster"].notna(), own.index.to_series())
    return intervals.hierarchical_interval(np.array([values], dtype=float), clusters=list(named), bounds=bounds, seed=seed)


def compare(kind, data, sampling="greedy"):
    """The share correct, and its paired difference to the first training."""
    first, own = (one[one["kind"] == kind] for one in (solved("before", sampling), solved(data, sampling)))
    then, now = first["c"] / first["n"], (own["c"] / own["n"]).loc[first.index]
    return estimate(first, now, (0, 1)), estimate(first, now - then, (-1, 1))


def words(e, sign=""):
    return f"{e.value:{sign}.2f} [{e.lo:{sign}.2f}, {e.hi:{sign}.2f}]"


# %%
found = {(kind, data): compare(kind, data) for kind in KINDS for data in DATA}
rows = [
    {"": KINDS[kind], "N": int((greedy["before"]["kind"] == kind).sum())}
    | {DATA[data]: words(found[kind, data][0]) for data in DATA}
    | {"last minus first": words(found[kind, LAST][1], "+")}
    for kind in KINDS
]
articles.table(pd.DataFrame(rows), {name: name for name in rows[0]})

# %%
fig, axes = new_figure("New words rise with the first step; declining pays", size=(6.8, 5.0))
ax, at = axes[0, 0], np.arange(len(KINDS))[::-1]
for place, (data, colour) in enumerate(COLOURS.items()):
    value, lo, hi = np.array([(e.value, e.lo, e.hi) for e in (found[kind, data][0] for kind in KINDS)]).T
    ax.errorbar(value, at + 0.3 - 0.15 * place, xerr=[value - lo, hi - value], fmt="o", color=colour, markersize=5, elinewidth=1, label=DATA[data])
ax.set(yticks=at, yticklabels=list(KINDS.values()), xlim=(-0.02, 1.02))
finish(ax, x="correct, greedy, after SFT", y="", loc="lower left")
fig

# %% [markdown]
# At T = 1, four samples of each problem:

# %%
rows = [{"": KINDS[kind]} | {DATA[data]: words(compare(kind, data, "T=1")[0]) for data in DATA} for kind in KINDS]
articles.table(pd.DataFrame(rows), {name: name for name in rows[0]})

# %% [markdown]
# ## Requests as people type them
#
# The 60 requests for tools of `codechat natural`. Ten of them ask for tools that have no further wordings: what else the new data changes shows there.

# %%
natural = frames["natural"]
asked = natural[natural["kind"] == "toolbox"]
covered = asked["tool"].isin(list(more))
n = {has: int(asked[covered == has]["id"].nunique()) for has in (True, False)}
right = {(data, has): int((asked["verdict"] == "right")[(asked["data"] == data) & (covered == has)].sum()) for data in DATA for has in n}
rows = [
    {"right, greedy": "tools with further wordings" if has else "tools without", "N": n[has]} | {DATA[data]: right[data, has] for data in DATA}
    for has in n
]
articles.table(pd.DataFrame(rows), {name: name for name in rows[0]})

# %% [markdown]
# What became of each request:

# %%
counts = asked.groupby(["verdict", "data"]).size().unstack(fill_value=0)[list(DATA)]
unfitting = natural[natural["kind"] == "unfitting"]
declined = unfitting.groupby("data")["correct"].sum()
print("unfitting requests declined, of 20:", *(f"{DATA[data]} {int(declined[data])}" for data in DATA), sep="  ")
counts.rename(columns=DATA).sort_values(DATA[LAST], ascending=False)

# %% [markdown]
# Some of the requests that changed:

# %%
pairs = asked.pivot(index="id", columns="data", values=["answer", "verdict"])
changed = pairs[(pairs["verdict"]["before"] == "right") != (pairs["verdict"][LAST] == "right")]
text = asked.drop_duplicates("id").set_index("id")["request"]
some = list(changed.index[:: max(1, len(changed) // 8)][:8])
rows = [dict(request=text[i]) | {DATA[data]: pairs["answer"][data][i] for data in ("before", LAST)} for i in some]
articles.table(pd.DataFrame(rows), {name: (name, articles.VERBATIM) for name in rows[0]})

# %% [markdown]
# ## What can be copied
#
# "How many vowels are in WORD?", with the tool for it and another one on offer: how many words arrive in the call as they were written. Invented
# words are not of training. Of the words that are one token, hardly any was copied before they were spelled in training, and no number of
# other words helped.

# %%
copies = frames["copies"]
shown = copies.assign(right=copies["right"].astype(str) + " of " + copies["n"].astype(str)).pivot(index="words", columns="data", values="right")
shown = shown.loc[list(dict.fromkeys(copies["words"])), list(DATA)].rename(columns=DATA).reset_index()
articles.table(shown, {name: name for name in shown})

# %% [markdown]
# A token says nothing about its letters. In a request *everyone* follows a space and is one token; in the call it follows a quotation mark and is
# three, as this vocabulary has no such word without its space. Between the two there is only what training showed. Words of several tokens share
# their pieces in both places, so most can be copied unseen.

# %%
tokenizer = load_model(ckpt).tokenizer
for text in (' "everyone" is everyone', ' "nuckus" is nuckus'):
    print([tokenizer.decode([i]) for i in tokenizer.encode(text)])

# %% [markdown]
# ## After the call
#
# Two requests for each of the 50 functions that training never had, the correct call and its result given: is the result in the sentence that
# follows, and is that sentence one that fits: the function's own, or one that says no more than the result?

# %%
answers = frames["answers"]
shares = answers.groupby("data")[["stated", "fits"]].mean().loc[list(DATA)].rename(index=DATA)
shares.rename(columns={"stated": "has the result", "fits": "fits"}).round(2)

# %%
rows = answers.pivot(index=["request", "result"], columns="data", values="answer")[["before", LAST]].reset_index().iloc[::12]
articles.table(rows, {name: (name, articles.VERBATIM) for name in rows})

# %% [markdown]
# ## Ask it
#
# The model that comes with the package. First a chat, then a function that it has never seen, and what it makes of the function's answer.

# %%
loaded = load_model(ckpt)
stop = chat.stop_sequences(loaded.tokenizer, loaded.tags)


def answer(*messages):
    prompt = chat.prompt(list(messages), loaded.tokenizer, loaded.tags)
    return chat.completion_text(sample(loaded.model, [prompt], max_new_tokens=64, temperature=0.0, stop=stop)[0].ids, loaded.tokenizer, loaded.tags)


def said(role, content):
    return {"role": role, "content": content}


for text in ("hello", "Hello!", "thx", "who are you"):
    print(f"{text:12} {answer(said('user', text))}")

# %%
weather = dict(name="get_weather", description="Get the weather of a city.", parameters=dict(type="object", properties={"city": {"type": "string"}}, required=["city"]))
asked_for = [said("system", chat.tools_prompt([weather], loaded.tools_style)), said("user", "What is the weather in Beijing?")]
call = answer(*asked_for)
result = said("function", json.dumps({"result": "light rain, 19 degrees"}))
print(call, answer(*asked_for, said("assistant", call), result), sep="\n")

# %% [markdown]
# ## What this shows, and what it does not
#
# - Wordings work where they are given: the first step alone brings new words for known tools from 0.45 to 0.67, and nothing after it adds what the
#   intervals resolve. Tools of other domains gain nothing: 73 services are not a domain that the 50 unseen tools come from.
# - Varied words did not help words of one token (17 of 100), spelling did (72). What a token is made of has to be shown.
# - A name that says nothing was followed by a sentence of any function. A sentence that states the result is one that a model of this size can
#   always say. "Fits" counts the forms that training has, so it measures that other functions' sentences are gone, not eloquence.
# - **One seed of each step, and trainings differ by more than steps.** A training between the last two (f269089: plain answers after calls of renamed
#   and invented functions only, no service for the weather of now) got 33 of 60 natural requests right, 0.28 of unseen tools, declined 10 of 20, and called
#   no function for any of 112 requests about the weather. The intervals hold tools, not trainings; single columns are not a ranking.
# - On validation the four are right in 0.910, 0.934, 0.934 and 0.904 of 500 problems. The last is in the package for what these problems do not
#   hold: its sentences, and requests such as the weather. It pays with the second call of a chain (0.60 in place of 0.80 there).
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `ckpt = "released/nano"` | what does nano, which has none of this, answer in "Ask it"? | nothing to "hello", a program to "thx", and it declines the weather: none of these words is in its data |
# | `LAST = "words"` | what did the first step alone change? | new words +0.22 [+0.11, +0.33], declining -0.06 [-0.14, +0.02], known tools -0.07 [-0.13, -0.03]: the gain in words is all there, and a price too |
#
# The last cell asserts the Result.

# %%
two = {data: {kind: round(found[kind, data][0].value, 2) for kind in KINDS} for data in DATA}
first, last = two["before"], two["plain"]
assert (first["phrasing"], last["phrasing"], two["words"]["phrasing"]) == (0.45, 0.68, 0.67) and found["phrasing", "plain"][1].lo > 0.1
assert (first["tool"], last["tool"]) == (0.18, 0.19) and (first["unfitting"], last["unfitting"]) == (0.98, 0.87)
assert found["unfitting", "plain"][1].hi < 0  # the price is resolved
assert [round(compare("call", data, "T=1")[0].value, 2) for data in ("before", "plain")] == [0.97, 0.91]
assert [sum(right[data, has] for has in n) for data in DATA] == [16, 32, 28, 27, 29]
spelled = copies[copies["words"].str.endswith("several after a quote")].set_index("data")["right"]
assert dict(spelled) == dict(before=18, words=16, values=17, spelling=72, plain=70)
assert round(shares.loc[DATA["before"], "fits"], 2) == 0.17 and round(shares.loc[DATA["plain"], "fits"], 2) == 0.87
assert "get_weather" in call and "Beijing" in call
