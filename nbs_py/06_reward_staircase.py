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
# # Partial credit gives more groups a gradient, but no more exact calls
#
# **Question.** A reward can pay for exact calls alone, or for every step towards one. When does partial credit
# make the policy better at exact calls, which are all that counts?
#
# **Result.** Over five seeds partial credit has no resolved gain over the binary reward from any of four
# starts. From starts that are hardly ever correct it gives three quarters of the groups a gradient instead of
# an eighth; from a start with a third correct, the staircase ends 4.4 points below binary [1.9, 7.0] and the
# tiers 2.0. Paying the share of correct arguments loses all exact calls in one seed of five, because it also
# pays for a call that goes on.
#
# | also measured | |
# |---|---|
# | random edits of a correct call that earn 1 and are wrong | 0 of 2,467 |
# | notations of a correct call that score 1 | 9 of 9 |
# | correct calls with arguments in single quotes, read here | 400 of 400 |
# | the same calls, read by the original project's parser | 0 of 400 |
#
# **Runs/needs.** Frozen rows of trained runs (`python tools/reward_rows.py starts` trains them again, about 20
# seconds of one core each). A model of 135,488 weights is trained here for some seconds.
#
# Previous: [05 sft](05_sft.ipynb) · Next: [07 reinforce](07_reinforce.ipynb)

# %% tags=["parameters"]
groups = 64
edits = 3000
seed = 0

# %%
import ast
import json
import random
import re
from functools import partial

import numpy as np
import pandas as pd

from codechat import tasks
from codechat.evaluation import diagnose
from codechat.text import chat
from codechat_lab.instruments import reward_starts
from codechat_lab.instruments.reward_starts import SHAPES, reshaped
from codechat_lab.reports import dense_rewards, plots
from codechat_lab.reports.style import OKABE_ITO, SHAPE_COLOURS, finish, label_of_tier, new_figure
from codechat_lab.tasks.funcall import STAIRCASES, score_call

# %% [markdown]
# ## Does it help, and when?
#
# The experiment: four rewards, four starts, the same requests, the same 200 updates of REINFORCE. The starts are four
# checkpoints of one SFT run: *base* is never correct, *poor* hardly ever, *weak* sometimes, *strong* mostly. The
# model has two layers and knows eight tools by heart; held-out requests use pairs of numbers that it never saw.
# Only the reward differs between two runs of a start and seed.
#
# | reward | not a call | unreadable | wrong name | correct name, share $f$ of the arguments | exact |
# |---|---|---|---|---|---|
# | binary | 0 | 0 | 0 | 0 | 1 |
# | fractional | 0 | 0 | 0 | $f$ | 1 |
# | tiered | 0 | 0.05 | 0.15 | $0.15 + 0.85 f$ | 1 |
# | staircase | 0 | 0.15 | 0.35 | $0.55 + 0.45 f$ | 1 |

# %%
rows = dense_rewards.frozen()
dense_rewards.figure(rows)

# %%
found = dense_rewards.table(rows).set_index(["start", "reward"])
names = {"pass@1 before": "T = 1, start", "pass@1": "T = 1, end", "greedy before": "greedy, start", "greedy": "greedy, end",
         "pass@8 before": "pass@8, start", "pass@8": "pass@8, end", "live": "groups with variance"}
found.rename(columns=names)[list(names.values())].round(3)

# %% [markdown]
# In the third panel the dense rewards win: where exact calls are rare, more groups have variance. But this gradient
# points to *partly* correct calls. The first two panels show the result: from *base* and *poor* the policy improves at
# names and single arguments, and exact match hardly moves. From *weak* every reward has a gradient, and part of the
# dense one points elsewhere: the staircase ends lower in all five seeds. From *strong* no difference is resolved. The published
# 8B runs began at both extremes: with programs that were never correct, and with calls that mostly were.
#
# The learning rate is the same for all. A reward that is five times as large changes nothing, since AdamW divides a
# constant factor out; the tests of `reward_starts` check it.
#
# These runs subtract the group's mean from each reward. Divided by the standard deviation as well (z-scores), no
# difference is resolved, from *poor* or from *weak*:

# %%
spread = dense_rewards.table(dense_rewards.frozen(baseline="zscore")).set_index(["start", "reward"])
gains = {name: 100 * part.loc[["poor", "weak"], ["gain", "gain/lo", "gain/hi"]].dropna().astype(float)
         for name, part in (("minus the group's mean", found), ("divided by the group's spread too", spread))}

# %%
above = sum(int((part["gain/lo"] > 0).sum()) for part in gains.values())
fig, axes = new_figure(f"{above} of {sum(map(len, gains.values()))} gains over the binary reward lie above 0", cols=2, sharey=True, size=(6.8, 2.8))
for ax, (name, part) in zip(axes[0], gains.items()):
    at, colours = [f"{start}, {reward}" for start, reward in part.index], [SHAPE_COLOURS[reward] for _, reward in part.index]
    ax.hlines(at, part["gain/lo"], part["gain/hi"], color=colours, linewidth=2)
    ax.scatter(part["gain"], at, color=colours, s=22, zorder=3)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_title(name, fontsize=8.5, loc="left")
    finish(ax, x="exact match at T = 1, points, 95 %", y=None, legend=False)
axes[0, 0].invert_yaxis()
fig

# %% [markdown]
# The weak start, update by update: exact match of the training rollouts, and groups with variance.

# %%
fig, axes = new_figure("From the weak start, mean of five seeds: partial credit ends no higher", cols=2, size=(6.4, 3.0), sharey=True)
for reward, colour in SHAPE_COLOURS.items():
    for ax, name in zip(axes[0], ("exact", "live")):
        curve = np.mean([row["curve"][name] for row in dense_rewards.cells(rows)["weak", reward]], axis=0)
        ax.plot(np.linspace(0, rows[0]["steps"], len(curve) + 1)[1:], curve, color=colour, linewidth=1.4, label=reward)
for ax, y in zip(axes[0], ("exact match of rollouts", "groups with variance")):
    finish(ax, x="update", y=y, legend=ax is axes[0, 0])
fig

# %% [markdown]
# ## What the fractional reward does not see
#
# Fractional and tiered rewards pay for the arguments of the call and nothing for ending it. The same texts under
# each reward:

# %%
request = {"name": "add", "arguments": {"a": 3, "b": 13}}
call = chat.format_call("add", request["arguments"])
said = {"the call": call, "the call, then text": call + '": {"price": "b', "the call twice": call * 2, "one number wrong": call.replace("13", "12")}
pd.DataFrame({what: {shape: reshaped(score_call(text, request), shape) for shape in SHAPES} for what, text in said.items()}).T.round(3)

# %% [markdown]
# Two of the four pay 0.99 for a call with text after it, which is wrong: stopping earns only 0.01 more. In the first seed
# the fractional run from *weak* stopped ending its calls near update 105. Its answers go on until they are cut off, as
# `{"name": "add", "arguments": {"a": 3, "b": 13}}": {"price": "b`, no answer is exact, and the reward
# stays the same. The staircase drops a rung for anything after the call.
#
# ## Why: groups of a poor policy
#
# A policy learns from differences within a group of completions of one prompt. Here is a real poor policy: the
# *poor* start of seed 0, trained now. The same completions under each reward:

# %%
poor = reward_starts.Setting().sft_steps[1]
setting = reward_starts.Setting(sft_steps=tuple(poor + i for i in range(-1, 3)))
policy = reward_starts.start_policies(setting, seed)["poor"]
batch = setting.sampled(policy, setting.held_out[:groups], group_size=8, seed=seed)
rewards_of = {shape: batch.rewards.new_tensor([reshaped(s, shape) for s in batch.scores]).view_as(batch.rewards) for shape in SHAPES}
verdicts = {shape: diagnose.judge(reward, batch.correct) for shape, reward in rewards_of.items()}
kinds = {"verdict": "verdict", "frac_with_variance": "groups with variance", "reward_mean": "mean reward", "exact_match": "exact"}
pd.DataFrame({shape: {text: getattr(v, k) for k, text in kinds.items()} for shape, v in verdicts.items()})

# %% [markdown]
# A column is a group, coloured by reward. A column of one colour has advantage exactly 0 for every completion,
# and no gradient.

# %%
live = {shape: verdict.effective_groups for shape, verdict in verdicts.items()}
fig, axes = new_figure(f"Groups with variance, of {groups}: binary {live['binary']}, staircase {live['staircase']}", 2, sharex=True)
for ax, shape in zip(axes[:, 0], ("binary", "staircase")):
    image = ax.imshow(rewards_of[shape].T, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="none")
    ax.set_ylabel(f"{shape}\ncompletion", fontsize=8.5)
    ax.grid(False)
axes[1, 0].set_xlabel("group (request)", fontsize=8.5)
fig.colorbar(image, ax=axes[:, 0].tolist(), label="reward", shrink=0.8)
fig

# %%
task, rewards = tasks.load("funcall"), STAIRCASES["ours"]
BLUE, ORANGE, GREEN = (OKABE_ITO[colour] for colour in ("blue", "orange", "green"))

# %% [markdown]
# ## The tiers
#
# Tiers follow the order of learning: a call at all, valid JSON, a name, the correct name, correct arguments.
# Between the correct name and the full match the reward is linear.

# %%
reward_of = {tier: (rewards[tier],) * 2 for tier in task.tiers if tier != "partial"}
reward_of["partial"] = (rewards["name_only"], rewards["cap"])
fig, axes = new_figure("Seven tiers from no call to the correct one")
for i, (tier, colour) in enumerate(zip(task.tiers, plots.tier_colours(len(task.tiers)))):
    lowest, highest = reward_of[tier]
    axes[0, 0].bar(i, highest, 0.9, color=colour, alpha=0.35 if highest > lowest else 1)
    axes[0, 0].bar(i, lowest, 0.9, color=colour)
    axes[0, 0].text(i, highest + 0.02, f"{lowest:.2f}" if lowest == highest else f"{lowest:.2f} to {highest:.2f}", ha="center", fontsize=8)
axes[0, 0].set_xticks(range(len(task.tiers)), [label_of_tier(tier).replace(" ", "\n") for tier in task.tiers])
axes[0, 0].set(ylim=(0, 1.1), ylabel="reward")
fig

# %% [markdown]
# One problem, and a completion of each tier:

# %%
gold = {"name": "send", "arguments": {"to": "Zoë", "copies": 3, "text": "You've won"}}
attempts = {
    "no_tag": "I will send it.",
    "bad_json": '<functioncall> {"name": "send", "arguments": {"to": ',
    "no_name": '<functioncall> {"arguments": {"to": "Zoë"}}',
    "wrong_name": chat.format_call("post", gold["arguments"]),
    "name_only": chat.format_call("send", {"to": "Bob"}),
    "partial": chat.format_call("send", gold["arguments"] | {"copies": 4}),
    "full": chat.format_call("send", gold["arguments"]),
}
climbed = {tier: score_call(text, gold) for tier, text in attempts.items()}
pd.set_option("display.max_colwidth", None)
pd.DataFrame([(attempts[t], label_of_tier(s.tier), f"{s.reward:.2f}") for t, s in climbed.items()],
             columns=["completion", "tier", "reward"])

# %% [markdown]
# The slope: with $m$ of $n$ arguments correct and $e$ extra keys the reward is
#
# $$r = \min\left(0.99,\; 0.55 + 0.45\,\frac{m}{n}\,\max(0.5,\; 1 - 0.1\,e)\right),$$
#
# so guesses never pay.

# %%
fig, axes = new_figure("More correct arguments pay, extra keys do not")
ax, expected = axes[0, 0], {f"a{i}": i + 100 for i in range(6)}
for extra, colour in zip((0, 1, 3), (BLUE, ORANGE, GREEN)):
    guesses = {f"x{i}": 0 for i in range(extra)}
    tries = [dict(list(expected.items())[:m]) | guesses for m in range(7)]
    curve = [score_call(chat.format_call("f", t), {"name": "f", "arguments": expected}).reward for t in tries]
    ax.plot(range(7), curve, "o-", markersize=4, color=colour, label=f"{extra} extra keys")
ax.axhline(rewards["cap"], color="grey", linewidth=0.8, linestyle="--", label="maximum without a full match: 0.99")
ax.set(xlabel="correct arguments, of 6", ylabel="reward", ylim=(0.5, 1.03))
ax.legend(fontsize=8, frameon=False)
fig

# %% [markdown]
# ## A correct call is correct in every notation
#
# Real data and half-trained models write arguments as an object, as JSON in a string, in single quotes with
# raw apostrophes inside, as Python, with a trailing comma. A reward that accepts only one of them scores
# correct answers as wrong.

# %%
text, call = (json.dumps(value, ensure_ascii=False) for value in (gold["arguments"], gold))
forms = {
    "canonical": call,
    "JSON in a string": json.dumps(gold | {"arguments": text}, ensure_ascii=False),
    "JSON in single quotes": call.replace(text, f"'{text}'"),
    "Python literal": str(gold),
    "trailing commas": call.replace("}}", ",},}"),
    "parameters": call.replace("arguments", "parameters"),
    "a list of one call": f"[{call}]",
    "another case, 3.0": call.replace("Zoë", "zoë ").replace("3", "3.0"),
}
written = {form: f"<functioncall> {body}" for form, body in forms.items()}
written["after prose"] = f"Sure, at once! <functioncall> {call}"
judged = {form: score_call(completion, gold) for form, completion in written.items()}


# %% [markdown]
# The original project's reward tried JSON, then replaced every `'` by `"` and tried again. Its training data
# has arguments in single quotes; the replacement puts bare quotes into a string, and the call counts as bad
# JSON: 0.15. Reimplemented from that description:

# %%
def published_parser(text):
    """(name, arguments) of the call after the tag, None for bad JSON."""
    body = text.partition("<functioncall>")[2].strip()
    for attempt in (body, body.replace("'", '"')):
        try:
            call = json.loads(attempt)
            arguments = call["arguments"]
            return call["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return None


# %%
table = [(form, written[form].removeprefix("<functioncall> "), f"{score.reward:.2f}",
         "read" if published_parser(written[form]) else "not read") for form, score in judged.items()]
pd.DataFrame(table, columns=["written as", "completion", "reward here", "their parser"])


# %% [markdown]
# Correct calls of the toolbox in that format, with and without arguments. The parser reads only those without,
# and the same parser chose the problems for RL.

# %%
def quoted(name, arguments):
    inner = json.dumps(arguments, ensure_ascii=False)
    return f"<functioncall> {{\"name\": \"{name}\", \"arguments\": '{inner}'}}"


# %%
from codechat.tasks.base import shuffled
from codechat_lab.tasks.toolbox.problems import draw

problems = shuffled(draw("train", 400, seed, shares={"call": 1}), 400, seed)  # one call each
tasks.check_reference_solutions(task, problems).require()
calls = [p.gold for p in problems if p.gold]
tried = {"with arguments": calls, "without arguments": [call | {"arguments": {}} for call in calls]}
reads = {}
for what, golds in tried.items():
    texts = [quoted(**call) for call in golds]
    theirs = sum(published_parser(text) is not None for text in texts)
    here = sum(score_call(text, call).correct for text, call in zip(texts, golds))
    reads[what] = {"calls": len(golds), "their parser": theirs, "here": here}
pd.DataFrame(reads).T

# %% [markdown]
# ## Can another text earn the full reward?
#
# No finite list of tricks proves that a reward cannot be cheated. So we search: thousands of random edits of the correct
# call, one to three pieces each, deleted, inserted, replaced or swapped. Pieces come from a correct and a wrong call,
# both calls as a whole, and claims such as `REWARD 1.0`. A judge that shares no code with the reward reads what follows
# the tag.

# %%
correct, wrong = attempts["full"], attempts["wrong_name"]
PIECE = re.compile(r"\w+|\s+|[^\w\s]")
pool = PIECE.findall(correct + wrong) + [chat.CALL_TAG, "REWARD 1.0", "null", "NaN", "[", "]", "true", "cc", "\n", correct, wrong]


def edited(rng):
    pieces = PIECE.findall(correct)
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        kind = rng.choice(("delete", "insert", "replace", "swap"))
        if kind == "swap":
            pieces[at], pieces[other] = pieces[other], pieces[at]
        else:
            pieces[at : at + (kind != "insert")] = [] if kind == "delete" else [rng.choice(pool)]
    return "".join(pieces)


# %%
def fold(value):
    """Strings without case and surrounding blanks, as the rules of the staircase compare them."""
    return value.strip().casefold() if isinstance(value, str) else value


# %%
def says_the_call(text):
    """Whether what follows the tag is the correct call, read by Python's own parsers."""
    for read in (partial(json.loads, strict=False), ast.literal_eval):  # a line end within a text is a blank
        try:
            call = read(text.partition(chat.CALL_TAG)[2].strip())
            call = call[0] if isinstance(call, list) else call
            same = {k: fold(v) for k, v in call["arguments"].items()} == {k: fold(v) for k, v in gold["arguments"].items()}
            return same and fold(call["name"]) == gold["name"]
        except (ValueError, SyntaxError, LookupError, TypeError, AttributeError):
            continue
    return False


# %%
rng = random.Random(seed)
tried = {text: score_call(text, gold) for text in {edited(rng) for _ in range(edits)}}
full = [text for text, score in tried.items() if score.reward == 1]
others = [score.reward for score in tried.values() if score.reward < 1]
cheats = [text for text in full if not says_the_call(text)]
print(f"{len(tried)} texts: {len(full)} earn 1, {len(cheats)} of them without the call; all others at most {max(others):.2f}")
pd.DataFrame([(label_of_tier(score.tier), score.reward) for score in tried.values()], columns=["tier", "reward"]).groupby("tier")["reward"].agg(["count", "max"])

# %% [markdown]
# Tricks that random edits would hardly find:

# %%
extra = {f"guess_{i}": i for i in range(20)}
tricks = {
    "say that it was correct": "REWARD 1.0 tier=full correct=True",
    "only the tag": "<functioncall>",
    "the correct call twice": correct + correct,
    "correct, then a guess": correct + attempts["wrong_name"],
    "a guess, then correct": attempts["wrong_name"] + correct,
    "a list of calls": f"<functioncall> [{call}, {call}]",
    "one key too many": chat.format_call("send", gold["arguments"] | {"cc": "Bob"}),
    "twenty keys too many": chat.format_call("send", gold["arguments"] | extra),
    "the same key twice": correct.replace('"copies": 3', '"copies": 3, "copies": 4'),
}

# %%
swaps = {"a number as text": '"3"', "true for a number": "true", "several values": "[1, 2, 3]",
         "not a number": "NaN", "ten thousand brackets": "[" * 10_000}
tricks |= {what: correct.replace('"copies": 3', f'"copies": {value}') for what, value in swaps.items()}
caught = {what: score_call(text, gold) for what, text in tricks.items()}
pd.DataFrame([(what, label_of_tier(s.tier), f"{s.reward:.2f}") for what, s in caught.items()],
             columns=["attempt", "tier", "reward"])

# %% [markdown]
# If no call is correct, an answer without a call scores 1 and any call 0, valid or not.

# %%
silent = {what: score_call(text, None).reward for what, text in attempts.items()}
pd.Series(silent).rename(label_of_tier).to_frame("reward where no call is correct").T


# %% [markdown]
# ## Three lines of your own
#
# The slope, as a function: the reward of a call with the right name of which $m$ of $n$ arguments are correct, with $e$
# keys too many.

# %%
def partial_reward(m, n, e):
    """-> the reward, below 1."""
    raise NotImplementedError("yours to fill in")


# %%
from codechat_lab.instruments.loss_exercises import check_cases

tries = {(m, 6, e): {**{f"a{i}": i + 100 for i in range(m)}, **{f"x{i}": 0 for i in range(e)}} for m in range(6) for e in (0, 1, 3, 9)}
check_cases(partial_reward, *((case, score_call(chat.format_call("f", t), {"name": "f", "arguments": expected}).reward) for case, t in tries.items()))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `group_size=64` where `batch` is sampled | do larger groups replace partial credit? | <details><summary>outcome</summary>partly: 16 of 64 groups have variance under the binary reward instead of 7, at eight times the cost</details> |
# | `score_call(text, gold, STAIRCASES["published"])` in the search | does the original's staircase pass? | <details><summary>outcome</summary>no: text after the call is free there, so 6 of the 47 texts that earn 1 are in `cheats`</details> |
#
# The last two cells assert the Result.

# %%
poor, weak = found.loc["poor"], found.loc["weak"]
assert poor.loc["staircase", "live"] > 0.7 and poor.loc["binary", "live"] < 0.25
assert (found.loc["base", "pass@1"] < 0.05).all() and abs(poor.loc["staircase", "gain"]) < 0.1
fair = weak.loc[["binary", "tiered", "staircase"], "pass@1"]
assert fair.min() > weak.loc["binary", "pass@1 before"] + 0.05
assert (found["seeds"] == 5).all() and (found["gain/lo"].dropna() <= 0).all()
stairs = 100 * weak.loc["staircase", ["gain", "gain/lo", "gain/hi"]].astype(float)
assert list(stairs.round(1)) == [-4.4, -7.0, -1.9] and round(100 * weak.loc["tiered", "gain"], 1) == -2.0
assert weak.loc["fractional", "worst seed"] < 0.05
assert (spread["gain/lo"].dropna() <= 0).all() and (spread["gain/hi"].dropna() >= 0).all()

# %%
assert live["binary"] < groups / 4 and live["staircase"] > 0.85 * groups
assert not cheats and len(full) > 20 and max(others) < 1
assert [score.tier for score in climbed.values()] == list(task.tiers) == list(climbed)
assert climbed["no_tag"].reward == 0 and climbed["full"].reward == 1
assert len(judged) == 9 and all(score.correct and score.reward == 1 for score in judged.values())
assert not any(score.correct for score in caught.values()) and max(score.reward for score in caught.values()) < 1
assert reads["with arguments"] == {"calls": 400, "their parser": 0, "here": 400}
assert silent.pop("no_tag") == 1 and not any(silent.values())
