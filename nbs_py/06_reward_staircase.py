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
# # A staircase reward gives weak models a gradient, reads every legal call and withstands 14 attempts to cheat
#
# **Question.** What is a partly correct call worth, which ways of writing a correct call count, and what does
# partial credit change for a model that is almost never correct?
#
# **Result.** Seven tiers lead from no call to the correct one; a correct call scores the maximum in every notation
# tried, and no attempt to cheat does. On the same synthetic completions of a weak policy, a binary reward leaves under 5 % of the groups with a
# gradient, the staircase over 90 %. Whether that helps training is another question:
# [RL in two minutes](00_rl_in_two_minutes.ipynb) has the switch.
#
# | also measured | |
# |---|---|
# | notations of a correct call that score 1 | 9 of 9 |
# | highest score of the attempts to cheat | 0.955 of 1, 14 attempts |
# | correct calls with arguments in single quotes, read here | 400 of 400 |
# | the same calls, read by the original project's parser | 0 of 400 |
#
# **Runs/needs.** No run and no data: problems come from the toolbox, completions are synthetic.
#
# Previous: [05 sft](05_sft.ipynb) · Next: [07 reinforce](07_reinforce.ipynb)

# %% tags=["parameters"]
groups = 64
group_size = 8
right_share = 0.001
seed = 0

# %%
import inspect
import json
import random

import pandas as pd
import torch

from codechat import chat, diagnose, tasks
from codechat.reports.plots import staircase
from codechat.reports.style import OKABE_ITO, new_figure
from codechat.tasks.funcall.staircase import Staircase, score_call

task, rewards = tasks.load("funcall", negatives_share=0.0), Staircase()
BLUE, ORANGE, GREEN = (OKABE_ITO[colour] for colour in ("blue", "orange", "green"))

# %% [markdown]
# ## The tiers
#
# Tiers follow the order in which a model learns: to call at all, in valid JSON, with a name, with the correct
# name, with correct arguments. Between the name and the full match the reward is a slope.

# %%
reward_of = {tier: (getattr(rewards, tier),) * 2 for tier in task.tiers if tier != "partial"}
reward_of["partial"] = (rewards.name_only, rewards.cap)
staircase({tier: reward_of[tier] for tier in task.tiers}, "Seven tiers from no call to the correct one")

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
pd.DataFrame([(attempts[t], s.tier, f"{s.reward:.2f}") for t, s in climbed.items()],
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
ax.axhline(rewards.cap, color="grey", linewidth=0.8, linestyle="--", label="maximum without a full match: 0.99")
ax.set(xlabel="correct arguments, of 6", ylabel="reward", ylim=(0.5, 1.03))
ax.legend(fontsize=8, frameon=False)
fig

# %% [markdown]
# The first call counts. It is parsed before it is scored:

# %%
print(inspect.getsource(score_call))

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
rows = [(form, written[form].removeprefix("<functioncall> "), f"{score.reward:.2f}",
         "read" if published_parser(written[form]) else "not read") for form, score in judged.items()]
pd.DataFrame(rows, columns=["written as", "completion", "reward here", "their parser"])


# %% [markdown]
# Correct calls of the toolbox in the format of that data, beside the same calls without arguments: the parser
# reads only the easy ones, and the same parser chose the problems for RL.

# %%
def quoted(name, arguments):
    inner = json.dumps(arguments, ensure_ascii=False)
    return f"<functioncall> {{\"name\": \"{name}\", \"arguments\": '{inner}'}}"


# %%
problems = task.problems("train", 400, seed)
assert tasks.check_reference_solutions(task, problems).ok
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
# ## Attempts to cheat
#
# RL finds every loophole of a reward. Fourteen attempts to score more than a call is worth:

# %%
right, extra = attempts["full"], {f"guess_{i}": i for i in range(20)}
tricks = {
    "say that it was right": "REWARD 1.0 tier=full correct=True",
    "only the tag": "<functioncall>",
    "the right call twice": right + right,
    "right, then a guess": right + attempts["wrong_name"],
    "a guess, then right": attempts["wrong_name"] + right,
    "a list of calls": f"<functioncall> [{call}, {call}]",
    "one key too many": chat.format_call("send", gold["arguments"] | {"cc": "Bob"}),
    "twenty keys too many": chat.format_call("send", gold["arguments"] | extra),
    "the same key twice": right.replace('"copies": 3', '"copies": 3, "copies": 4'),
}

# %%
swaps = {"a number as text": '"3"', "true for a number": "true", "several values": "[1, 2, 3]",
         "not a number": "NaN", "ten thousand brackets": "[" * 10_000}
tricks |= {what: right.replace('"copies": 3', f'"copies": {value}') for what, value in swaps.items()}
caught = {what: score_call(text, gold) for what, text in tricks.items()}
pd.DataFrame([(what, s.tier, f"{s.reward:.2f}") for what, s in caught.items()],
             columns=["attempt", "tier", "reward"])

# %% [markdown]
# If no call is correct, an answer without a call scores 1 and any call 0, valid or not.

# %%
silent = {what: score_call(text, None).reward for what, text in attempts.items()}
pd.Series(silent).to_frame("reward where no call is right").T

# %% [markdown]
# ## What partial credit changes
#
# A policy learns from differences within a group of completions of one prompt. Take a weak policy that is
# correct once in a thousand completions (synthetic):

# %%
WEIGHTS = {"no_tag": 0.10, "bad_json": 0.15, "wrong_name": 0.30, "name_only": 0.25, "partial": 0.20}


def weak_completion(gold, rng):
    """A completion for a reference call, in a tier sampled by WEIGHTS; sometimes the correct one."""
    name, arguments = gold["name"], gold["arguments"]
    fault = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    kept = rng.sample(sorted(arguments), len(arguments) - 1) if fault == "partial" else []
    if rng.random() < right_share:
        return chat.format_call(name, arguments)
    if fault == "no_tag":
        return "I can do that for you."
    name = "lookup" if fault == "wrong_name" else name
    wrong = chat.format_call(name, {k: v if k in kept else "?" for k, v in arguments.items()})
    return wrong[:-4] if fault == "bad_json" else wrong


# %%
rng = random.Random(seed)
sampled = [[weak_completion(g, rng) for _ in range(group_size)] for g in calls[:groups]]
scores = [[score_call(text, g) for text in texts] for g, texts in zip(calls, sampled)]
graded = torch.tensor([[score.reward for score in group] for group in scores])  # (P, G)
correct = torch.tensor([[score.correct for score in group] for group in scores])
verdicts = {"binary": diagnose.judge(correct.float(), correct)}
verdicts["staircase"] = diagnose.judge(graded, correct)
kinds = ("verdict", "frac_with_variance", "reward_mean", "reward_std", "correct_share", "remedy")
pd.DataFrame({which: {k: getattr(v, k) for k in kinds} for which, v in verdicts.items()})

# %% [markdown]
# The same completions, coloured by their reward: a column is a group. A column of one colour has advantage
# exactly 0 for every completion, and no gradient.

# %%
live = {which: verdict.effective_groups for which, verdict in verdicts.items()}
title = f"Of {groups} groups, {live['binary']} and {live['staircase']} have variance"
fig, axes = new_figure(title, 2, sharex=True)
for ax, (which, values) in zip(axes[:, 0], (("binary", correct.float()), ("staircase", graded))):
    image = ax.imshow(values.T, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="none")
    ax.set_ylabel(f"{which}\ncompletion", fontsize=8.5)
    ax.grid(False)
axes[1, 0].set_xlabel("group (problem)", fontsize=8.5)
fig.colorbar(image, ax=axes[:, 0].tolist(), label="reward", shrink=0.8)
fig

# %% [markdown]
# The staircase is a means: exact match is what counts, and it is logged beside the reward in every run. A
# model that is often correct needs no partial credit, and one that never leaves the lowest tier gets no
# gradient from any reward.
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `right_share = 0.05` | how often must a policy be correct before a binary reward has groups with variance? | one completion in 20 is enough for about a third of the groups of 8: $1 - 0.95^8 = 0.34$. The last cell then says that the verdict is no longer DEAD |
# | `group_size = 64` | do larger groups replace partial credit? | partly: $1 - 0.999^{64} = 0.06$ of the groups, at eight times the cost of 1 % with groups of 8 |
#
# The last cell asserts the Result.

# %%
assert [score.tier for score in climbed.values()] == list(task.tiers) == list(climbed)
assert climbed["no_tag"].reward == 0 and climbed["full"].reward == 1
assert len(judged) == 9 and all(score.correct and score.reward == 1 for score in judged.values())
assert len(caught) == 14 and round(max(score.reward for score in caught.values()), 3) == 0.955
assert not any(score.correct for score in caught.values())
assert reads["with arguments"] == {"calls": 400, "their parser": 0, "here": 400}
assert silent.pop("no_tag") == 1 and not any(silent.values())
assert graded.numel() == 512 and verdicts["binary"].verdict == "DEAD"
assert verdicts["staircase"].verdict == "LIVE" and verdicts["staircase"].frac_with_variance > 0.90
