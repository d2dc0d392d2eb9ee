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
# # What it takes to teach a small model to read a list of tools
#
# **Question.** A prompt lists tools that training may never have shown. The model has to pick one by its description, or decline where none
# fits. Which ingredients of its training teach that, and what does each take away?
#
# **Result.** *More steps* help most: calls of known tools rise by 29 points and declining by 42. Only *rarer
# words* in names raise tools of domains never trained, by 14 points; half of the requests for these are
# declined under every training. *Seven times the compute* strengthens what the data show (known tools 0.86 to
# 0.99, declined 0.76 to 0.98), without a resolved gain on unseen tools (0.11, 0.18).
#
# **Also.** *Everyday wordings*, with the three data changes after them, bring new words for known tools from
# 0.45 to 0.68; declining falls from 0.98 to 0.87. *Spelling* lets words of one token be copied: 70 of 100 in
# place of 18. *A larger teacher* in place of labels (on-policy distillation from mini) changes nothing that
# three seeds resolve.
#
# **Runs/needs.** Committed rows of trainings of recipes `nano` and `mini` (`reports/frozen`: `reading_*.jsonl`, `sizes`, `everyday`), one seed each
# unless the text says otherwise, and the model that comes with the package. Nothing is trained. Half a minute on one core.
#
# Previous: [30 pocket apps](30_pocket_apps.ipynb) · Next: [32 your own tools and data](32_your_own_tools_and_data.ipynb)

# %% tags=["parameters"]
ckpt = "released/mini"
seed = 0
resamples = 4_000

# %%
import json
from functools import partial

import numpy as np
import pandas as pd

from codechat.core.atomic_files import read_rows
from codechat.evaluation import intervals
from codechat.models.config import GPTConfig
from codechat.models.generate import sample
from codechat.models.loading import load_model
from codechat.text import chat
from codechat_lab.reports import articles, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

kept = run_frames.frozen_dir()
problems, arms, costs = (pd.DataFrame(read_rows(kept / f"reading_{name}.jsonl")) for name in ("problems", "arms", "costs"))
costs, arms = costs.set_index("run"), arms.set_index("arm")

# %% [markdown]
# ## What is asked
#
# A prompt lists one to four tools, `Plant the room: room_plant(count: integer)`. The answer is one call, or `none()`, the last line of
# every list. A call is correct if the tool and all arguments are. A column of the tables is a kind of request:
#
# | column | what the model has to do |
# |---|---|
# | known tools | call one of 102 trained tools with new values |
# | renamed | call a trained tool whose name and arguments are new |
# | new words | call a trained tool, requested in words that training never uses |
# | unseen tools | call one of 49 tools of other domains, whose names share no word with training |
# | declined | decline: no line of the list serves the request |
# | chains | two calls, the second with the result of the first |
#
# Answers are greedy. An interval resamples tools, each with all its problems, and seeds; a change is paired by problem.

# %%
KINDS = {"call": "known tools", "renamed": "renamed", "phrasing": "new words", "tool": "unseen tools", "unfitting": "declined", "chains": "chains"}
tools = {row.stratum: row.tools for row in problems[problems["arm"] == "problems"].itertuples()}
interval = partial(intervals.hierarchical_interval, seed=seed, resamples=resamples)


# %%
def answers(arm, kind, what="correct"):
    """(seeds, problems) of 0 and 1, the problems in the same order for every training."""
    rows = problems[(problems["arm"] == arm) & (problems["stratum"] == kind)].sort_values("seed")
    return np.array(rows[what].to_list(), float)


def share(arm, kind, what="correct"):
    return interval(answers(arm, kind, what), clusters=tools[kind], bounds=(0.0, 1.0))


def change(before, after, kind):
    return interval(answers(after, kind) - answers(before, kind)[:1], clusters=tools[kind])


# %%
def points(found):
    text = f"{100 * found.value:+.0f} [{100 * found.lo:+.0f}, {100 * found.hi:+.0f}]"
    return f"**{text}**" if found.lo > 0 or found.hi < 0 else text


def plain(found, sign=""):
    return f"{found.value:{sign}.2f} [{found.lo:{sign}.2f}, {found.hi:{sign}.2f}]"


# %%
def show(rows):
    """A table of rows, with their names as column names."""
    frame = pd.DataFrame(rows)
    return articles.table(frame, {name: name for name in frame})


def million_tokens(arm):
    """Tokens of SFT since pretraining, drills included."""
    parent = costs.loc[arm, "parent"]
    return costs.loc[arm, "tokens"] / 1e6 + (million_tokens(parent) if isinstance(parent, str) else 0)


# %% [markdown]
# ## Seven trainings of nano, most with one more ingredient
#
# The model has 2.6 M parameters. Each row adds its ingredient to the row before it; the last is recipe `nano` (two of its seeds). A cell is the
# change in points, **bold** where the interval excludes 0; the first and last rows are shares.

# %%
STEPS = {  # training: what it adds to the one before it
    "reading": "the start: 400 steps of SFT after three drills",
    "longer": "1,000 steps",
    "longer-calls": "more of the tokens are calls: 0.72, before 0.55",
    "more-made-tools": "more made-up tools: 0.55 of the requests, before 0.40",
    "rare-words": "1,100 rarer words in the names of tools",
    "rare-words-series": "more lists with several requests: 0.48, before 0.35",
    "nano": "still more of them, also unserved (0.75); informal requests (0.4)",
}
order, (start, *_, end) = list(STEPS), STEPS
changes = {after: {kind: change(before, after, kind) for kind in KINDS} for before, after in zip(order, order[1:])}

# %%
rows = [{"ingredient": STEPS[start]} | {KINDS[k]: plain(share(start, k)) for k in KINDS} | {"M tokens": f"{million_tokens(start):.1f}"}]
rows += [{"ingredient": STEPS[arm]} | {KINDS[k]: points(found) for k, found in row.items()} | {"M tokens": f"{million_tokens(arm):.1f}"} for arm, row in changes.items()]
rows += [{"ingredient": "recipe nano, shares"} | {KINDS[k]: plain(share(end, k)) for k in KINDS}]
show(rows)

# %%
fig, axes = new_figure("Steps teach known tools and declining; only rarer words reach unseen tools", cols=3, size=(9.6, 3.0), sharey=True)
for ax, kind in zip(axes[0], ("call", "tool", "unfitting")):
    value, lo, hi = 100 * np.array([(row[kind].value, row[kind].lo, row[kind].hi) for row in changes.values()]).T
    ax.errorbar(value, np.arange(len(changes)), xerr=[value - lo, hi - value], fmt="o", color=OKABE_ITO["blue"], markersize=5, elinewidth=1.2)
    ax.axvline(0, color="#808080", linewidth=0.8)
    ax.set_title(KINDS[kind], fontsize=9, loc="left")
    ax.set_xlim(-45, 60)
    finish(ax, x="change in points", y=None)
axes[0, 0].set_yticks(range(len(changes)), ["1,000 steps", "more calls", "more made-up tools", "rarer words", "series", "unserved, informal"])
axes[0, 0].invert_yaxis()
fig

# %% [markdown]
# Two aims conflict: with made-up tools and rarer words, unseen tools gain 14 points and declining loses 28. Series restore declining. Perhaps the
# model declines what it does not know, not what no tool serves. Share declined, of requests that no tool serves, for unseen tools (one serves) and
# for known tools:

# %%
SERVED = {"unfitting": "declined: nothing serves", "tool": "declined: unseen tools", "call": "declined: known tools"}
declined = {arm: {name: share(arm, k, "declined") for k, name in SERVED.items()} for arm in order}
show({"training, with": STEPS[arm]} | {name: plain(found) for name, found in row.items()} for arm, row in declined.items())

# %% [markdown]
# ## Before that: how the choice by description formed
#
# The start above could already choose. The trainings that led there were judged on an older set of tools, in which unseen tools are siblings of
# trained ones (`celsius_to_kelvin` beside `celsius_to_fahrenheit`): not comparable with the columns above. Only shares were kept, so intervals are over
# problems. *Drills* (short exercises that look a word up in a list) and a *line for declining* mattered most. Lists that begin with the description
# lost accuracy until drills prepared for them. A refusal in words cost known tools more than the line did.

# %%
FIRST = {
    "renamed50": "half of the tools have other names",
    "series": "several requests of one list",
    "described-series": "the same, each line begins with the description",
    "described-curriculum": "the same after three drills",
    "name-before-call": "a refusal in words, or the name, before the call",
    "none-entry": "declining is the last line of the list",
    "none-entry-phrases": "the same, with one more drill",
}
OLD = {"call": "known tools", "renamed": "renamed", "tool": "unseen siblings", "unfitting": "declined"}


def old_share(arm, kind):
    row = (arms.loc[arm, "select"] | arms.loc[arm, "test_hard"])[kind]
    return row.get("none", 0) + row.get("no_call", 0) if kind == "unfitting" else row["correct"], row["n"]


# %%
before = {arm: {k: intervals.wilson_interval(round(p * n), n) for k in OLD for p, n in [old_share(arm, k)]} for arm in FIRST}
show({"training": FIRST[arm]} | {OLD[k]: plain(found) for k, found in row.items()} | {"M tokens": f"{million_tokens(arm):.1f}"} for arm, row in before.items())

# %% [markdown]
# ## Size and steps
#
# Recipe `mini`, as it first was, trained nano's stages on nano's data with 3.4 times the parameters and more steps. Compute is $C = 6 N D$
# for $N$ parameters and $D$ tokens ([Kaplan et al., 2020](https://arxiv.org/abs/2001.08361)). Three seeds of nano, one of mini.

# %%
sizes, stages = run_frames.load_frozen(kept / "sizes"), ("pretrain", "base", "words", "lookups", "phrases", "sft")
known = GPTConfig.__dataclass_fields__  # committed runs may have settings that are gone
compute = {}
for model in ("nano", "mini"):
    config = json.loads(run_frames.rows_of(sizes["runs"], f"{model}/pretrain")["config"].iloc[0])
    shape = GPTConfig(**{name: value for name, value in config["model"].items() if name in known})
    tokens = sum(run_frames.rows_of(sizes["metrics"], f"{model}/{stage}")["tokens"].iloc[-1] for stage in stages)
    compute[model] = 6e-12 * shape.n_params * tokens
    print(f"{model}: {shape.n_params / 1e6:.1f} M parameters, {tokens / 1e6:.1f} M tokens, {compute[model]:.0f} TFLOP")

# %%
names = {kind: words for kind, words in run_frames.STRATA.items() if f"{kind}/n" in sizes["evals"]}
runs = {"nano": [run for run in sizes["runs"]["run"] if run.startswith("nano/evaluate")], "mini": ["mini/evaluate"]}
tables = {model: run_frames.strata_over_seeds(sizes, own, list(names)).drop_duplicates("sampling").set_index("sampling") for model, own in runs.items()}
greedy, warm = ({m: {k: intervals.Interval(*table.loc[s, [f"{k}/pass@1{e}" for e in ("", "/lo", "/hi")]]) for k in names} for m, table in tables.items()}
                for s in ("greedy", "T=1"))
show({"": words} | {f"{m}, greedy": plain(greedy[m][kind]) for m in runs} | {f"{m}, T = 1": f"{warm[m][kind].value:.2f}" for m in runs} for kind, words in names.items())

# %% [markdown]
# One thing divides the kinds: does training show the skill on requests drawn like the test's? New values, declining, chains, other names: yes. New
# words and tools of other domains: no, and there compute buys no resolved gain. Size and steps are not separated.
#
# ## Words
#
# So the next ingredients are data, at the same size and the same number of steps. *Everyday words*: sixteen more requests for most tools, and 73 services of
# everyday life. *Varied values*: words and names to copy that are not from one grammar. *Spelling*: words that are one token, and drills
# that put such words in quotation marks. *Plain answers*: after a call, a sentence that only states the result. Each adds to the ones before.
# The tables were written without seeing any test; the later steps followed wrong arguments seen in natural requests.

# %%
everyday = run_frames.load_frozen(kept / "everyday")
DATA = {"before": "nano's data", "words": "everyday words", "values": "varied values", "spelling": "spelling", "plain": "plain answers"}


def solved(data, kind, sampling="greedy"):
    rows = everyday["per_problem"].query("data == @data and sampling == @sampling").set_index("id").sort_index()
    return rows[rows.index.str.rsplit("-", n=2).str[-2] == kind]


def compare(kind, data, sampling="greedy"):
    """The share correct, and its paired difference to the first training."""
    then, now = solved("before", kind, sampling), solved(data, kind, sampling)
    clusters, rate = list(now["cluster"].where(now["cluster"].notna(), now.index)), now["c"] / now["n"]
    return interval([rate], clusters=clusters, bounds=(0.0, 1.0)), interval([rate - then["c"] / then["n"]], clusters=clusters)


# %%
found = {(kind, data): compare(kind, data) for kind in names for data in DATA}
show({"": words} | {DATA[data]: plain(found[kind, data][0]) for data in DATA} | {"last minus first": plain(found[kind, "plain"][1], "+")} for kind, words in names.items())

# %%
fig, axes = new_figure("New words rise with the first step; declining falls", size=(6.8, 3.8))
at = np.arange(len(names))[::-1]
for place, (data, colour) in enumerate(dict(before="orange", words="sky", plain="blue").items()):
    value, lo, hi = np.array([(e.value, e.lo, e.hi) for e in (found[kind, data][0] for kind in names)]).T
    axes[0, 0].errorbar(value, at + 0.2 - 0.2 * place, xerr=[value - lo, hi - value], fmt="o", color=OKABE_ITO[colour], markersize=5, elinewidth=1, label=DATA[data])
axes[0, 0].set(yticks=at, yticklabels=list(names.values()), xlim=(-0.02, 1.02))
finish(axes[0, 0], x="correct, greedy, after SFT", y="", loc="lower left")
fig

# %% [markdown]
# Three more measures: requests as people type them (`codechat natural`); words that the model copies from "How many vowels are in WORD?"; and
# whether its sentence after a call of one of 50 unseen functions fits the function or states only the result.

# %%
asked, copies = everyday["natural"].query("kind == 'toolbox'"), everyday["copies"]
fits = everyday["answers"].groupby("data")[["stated", "fits"]].mean()
rows = [{"": "natural requests right, of 60"} | {DATA[d]: f"{(asked[asked['data'] == d]['verdict'] == 'right').sum()}" for d in DATA}]
for words, part in copies.groupby("words", sort=False):
    rows.append({"": f"copied: {words}, of {part['n'].iloc[0]}"} | {DATA[row.data]: f"{row.right}" for row in part.itertuples()})
rows += [{"": f"sentence after a call {what}"} | {DATA[d]: f"{fits.loc[d, column]:.2f}" for d in DATA} for column, what in (("stated", "has the result"), ("fits", "fits"))]
show(rows)

# %% [markdown]
# A token says nothing about its letters. In a request *everyone* follows a space and is one token; in the call it follows a quotation mark and is
# three. Only training can link the two. Words of several tokens share their pieces in both places.

# %%
loaded = load_model(ckpt)
for text in (' "everyone" is everyone', ' "nuckus" is nuckus'):
    print([loaded.tokenizer.decode([i]) for i in loaded.tokenizer.encode(text)])

# %% [markdown]
# ## A teacher in place of labels
#
# mini reads lists a little better than nano. Does nano learn that from mini sooner than from more labels? `codechat distill` takes mini's log-probabilities of what
# nano wrote (reverse KL), or trains on what mini wrote (forward KL; [Agarwal et al., 2023](https://arxiv.org/abs/2306.13649)): 36 steps of 64 answers, 150 to 166 s of one core. The controls are
# SFT on the same conversations for a shorter time (104 steps, 104 to 112 s) and a longer one (180 steps, about 190 s). Three seeds of the current nano;
# changes in points, paired by problem and seed.

# %%
taught, KIND = pd.DataFrame(read_rows(kept / "distillation.jsonl")), ["call", "renamed", "phrasing", "tool", "unfitting", "chain_2"]
asked_of = taught[taught["arm"] == "problems"].set_index("stratum")["tools"]
TAUGHT = {"distill/sft": "SFT, 104 steps", "nano/more-sft": "SFT, 180 steps", "distill/student": "mini judges nano's answers", "distill/teacher": "mini's own answers"}


def right_of(arm, kind):
    some = taught[(taught["arm"] == arm) & (taught["stratum"] == kind)].sort_values("seed")
    return np.array([[*map(int, text)] for text in some["correct"]], float)


gained = {(arm, kind): interval(right_of(arm, kind) - right_of("nano/sft", kind), clusters=asked_of[kind]) for arm in TAUGHT for kind in KIND}
start = {run_frames.STRATA[kind]: f"{right_of('nano/sft', kind).mean():.2f}" for kind in KIND}
show([{"then": "nano, shares"} | start] + [{"then": name} | {run_frames.STRATA[k]: points(gained[arm, k]) for k in KIND} for arm, name in TAUGHT.items()])

# %% [markdown]
# No interval excludes 0, for the teacher's arms or for more SFT. What mini knows better is little (unseen tools 0.19), and 2,304 answers are few. With a pretrained teacher the
# tokenizers differ, which `codechat distill` refuses.
#
# ## Ask it
#
# The model that comes with the package, a function that it has never seen, and what it makes of the function's answer:

# %%
stop = chat.stop_sequences(loaded.tokenizer, loaded.tags)


def answer(*messages):
    prompt = chat.prompt([dict(role=role, content=content) for role, content in messages], loaded.tokenizer, loaded.tags)
    return chat.completion_text(sample(loaded.model, [prompt], max_new_tokens=64, temperature=0.0, stop=stop)[0].ids, loaded.tokenizer, loaded.tags)


weather = dict(name="get_weather", description="Get the weather of a city.", parameters=dict(type="object", properties={"city": {"type": "string"}}, required=["city"]))
request = (("system", chat.tools_prompt([weather], loaded.tools_style)), ("user", "What is the weather in Beijing?"))
call = answer(*request)
print(call, answer(*request, ("assistant", call), ("function", json.dumps({"result": "light rain, 19 degrees"}))), sep="\n")

# %% [markdown]
# ## What was not measured
#
# - Other seeds of most trainings. Where an ingredient changes little, another seed may change as much: nano's two seeds differ by 2 to 6 points in a
#   column, and one more training between the last two of mini got 33 of 60 natural requests right and declined 10 of 20.
# - Most ingredients alone. The last row of nano changes three things; `unserved` and `informal` were never tried apart.
# - Mini with nano's steps, or nano with mini's. With 18 % more steps nano gained 2 points (`more-sft`, [experiments](../docs/experiments/rl-and-controls.md)).
# - What more domains would bring. Wordings work where they are given; nothing tried here brings the unseen tools above 0.3.
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `clusters=None` in `share` | how wide is the interval of unseen tools after rarer words if problems count as independent? | <details><summary>outcome</summary>0.13 to 0.24 in place of 0.09 to 0.28: four problems of a tool are not four tools</details> |
# | `ckpt = "released/nano"` | what does nano, which has none of the wordings, answer about the weather? | <details><summary>outcome</summary>it declines: none of these words is in its data (the last cell then fails)</details> |
#
# The last cell asserts the Result.

# %%
gains = {arm: {kind: round(100 * change.value) for kind, change in row.items()} for arm, row in changes.items()}
clear = {arm: {kind for kind, change in row.items() if change.lo > 0 or change.hi < 0} for arm, row in changes.items()}
assert (gains["longer"]["call"], gains["longer"]["unfitting"]) == (29, 42) and {"call", "unfitting"} < clear["longer"]
assert [arm for arm in clear if "tool" in clear[arm]] == ["rare-words"] and gains["rare-words"]["tool"] == 14
assert all(0.4 < row[SERVED["tool"]].value < 0.6 for row in declined.values()) and declined["nano"][SERVED["call"]].value < 0.03
pulled = change("longer-calls", "rare-words", "unfitting")
assert change("longer-calls", "rare-words", "tool").lo > 0 > pulled.hi and round(100 * pulled.value) == -28
assert before["none-entry"]["unfitting"].lo > before["name-before-call"]["unfitting"].value == 0.14 < before["none-entry-phrases"]["unfitting"].lo
assert before["series"]["tool"].lo > before["described-series"]["tool"].hi and before["described-curriculum"]["call"].lo > before["described-series"]["call"].hi

# %%
two = {model: {kind: round(found.value, 2) for kind, found in row.items()} for model, row in greedy.items()}
assert [two[m][k] for k in ("call", "unfitting", "tool") for m in ("nano", "mini")] == [0.86, 0.99, 0.76, 0.98, 0.11, 0.18] and 6.5 < compute["mini"] / compute["nano"] < 7.5
assert all((greedy["mini"][k].lo > greedy["nano"][k].hi) == (k in ("call", "unfitting", "renamed", "chain_1")) for k in names)
shares = {data: {kind: round(found[kind, data][0].value, 2) for kind in names} for data in DATA}
assert (shares["before"]["phrasing"], shares["plain"]["phrasing"], shares["before"]["unfitting"], shares["plain"]["unfitting"]) == (0.45, 0.68, 0.98, 0.87)
assert found["phrasing", "plain"][1].lo > 0.1 and found["unfitting", "plain"][1].hi < 0 and max(s["tool"] for s in shares.values()) < 0.3
spelled = copies[copies["words"].str.endswith("several after a quote")].set_index("data")["right"]
assert (spelled["before"], spelled["plain"]) == (18, 70) and fits.loc["plain", "fits"] > 0.8 > 0.25 > fits.loc["before", "fits"]
assert "get_weather" in call and "Beijing" in call
assert not any(found.lo > 0 or found.hi < 0 for found in gained.values())
