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
# # Pocket apps: the reward depends on what changed, not on what the model said
#
# **Question.** A model that calls tools works in a world that keeps state, over several turns. What does one
# episode look like, turn by turn and token by token, what is rewarded, and can the reward be earned without
# doing the task?
#
# **Result.** Scripted experts solve all problems of five levels, and none of six ways to score without doing
# the task ever succeeds. The mask covers exactly the policy's tokens; an unrequested change is named and more
# than halves the reward. REINFORCE raises a small model's success on unseen requests in each of three seeds,
# from 0.357 by 0.090 [0.058, 0.123], paired, over seeds and problems.
#
# | | |
# |---|---|
# | apps, tools | 6 apps, 76 tools, and two that close an episode |
# | problems that the experts solve | 60 of 60 |
# | successes of the six ways, on 48 feasible problems each | 0 |
# | success before RL (N=200, n=8, temperature 1, 95 % interval) | 0.357 [0.306, 0.409] |
# | success after RL, three seeds | 0.436, 0.445, 0.460 |
#
# **Runs/needs.** Committed rows of four runs (`reports/frozen/apps`), from a model of an older recipe (commit 19387a6). `fresh = True` makes the runs again, in some hours of two cores. Seconds on one core.
#
# Previous: [29 a reward with a leak](29_a_reward_with_a_leak.ipynb) · Next: [31 what reading tools costs](31_what_reading_tools_costs.ipynb)

# %% tags=["parameters"]
fresh = False  # make the runs
freeze = False  # read the runs and freeze their rows
parent = "nano/sft"
seed = 0
per_level = 12

# %%
from collections import Counter
from dataclasses import replace

import pandas as pd

from codechat.core import config, registry
from codechat.core.atomic_files import read_rows

# %%
from codechat.evaluation.intervals import bootstrap_interval, hierarchical_interval, paired_bootstrap
from codechat.rl import episodes
from codechat.runs.paths import find_run
from codechat.text import chat, tokenizer
from codechat.text.tool_calls import format_call
from codechat_lab.instruments import token_view
from codechat_lab.reports import run_frames
from codechat_lab.reports.style import OKABE_ITO, colour_of, dash_of, draw_smoothed, finish, new_figure
from codechat_lab.tasks import apps

tok = tokenizer.load("gpt2:4096")
task = apps.AppsTask()

# %% [markdown]
# ## Apps, tools, requests
#
# Mail, calendar, contacts, notes, shop and files share one in-memory database per episode. A tool is an SQL
# statement with a JSON schema, a line of `tools.jsonl`. `task_answer` and `task_decline` belong to no app;
# they end an episode.

# %%
print(dict(Counter(tool.app for tool in apps.TOOLS.values())))
print(chat.tools_prompt([apps.TOOLS[name].schema for name in ("mail_move", "calendar_add", "shop_add_to_cart", "task_answer", "task_decline")]))

# %% [markdown]
# Requests come in five levels: one call; look up, then act; across apps; with distractors; impossible, to be
# declined. Each problem has its own world. A scripted expert has solved it once, and its changes are required.

# %%
problems = {level: apps.AppsTask(levels=[level]).generate("test", per_level, seed) for level in apps.LEVELS}
for level, (problem, *_) in problems.items():
    print(f"level {level}: {problem.messages[-1]['content']}")
    for call in problem.gold["calls"]:
        print("    ", format_call(call["name"], call["arguments"]).removeprefix("<functioncall> "))
    print("     changes:", *problem.gold["changes"], sep="\n         ")


# %% [markdown]
# ## Turn by turn
#
# The expert's episode of a problem across apps, replayed. Nothing is rewarded until the state changes; the
# final message earns nothing.

# %%
def turns_of(episode):
    """One row per turn."""
    return pd.DataFrame([{"the policy": t.text.removeprefix("<functioncall> "), "the environment": " ".join(m["content"] for m in t.replies),
                          "changed so far": "; ".join(map(str, t.diff)) or "nothing", "reward": t.reward} for t in episode.turns])


across = next(p for p in problems[3] if len(p.gold["calls"]) >= 3)
expert = episodes.replay(task, across, apps.gold_steps(across), tok)
print(across.messages[-1]["content"])
with pd.option_context("display.max_colwidth", None):
    display(turns_of(expert).style.set_properties(**{"text-align": "left", "white-space": "pre-wrap"}).format({"reward": "{:.2f}"}))

# %% [markdown]
# ## Collateral damage has a name
#
# The same episode by a policy that also deletes something. Every required change was made, and yet it is not
# a success. (The tool for the damage is offered here in addition.)

# %%
offered = across.meta["tools"] + ["contacts_delete", "notes_add"]
careless_problem = replace(across, meta={**across.meta, "tools": offered})
victim = across.gold["world"]["contacts"][0]["id"]
steps = [s for s in apps.gold_steps(across) if s.startswith("<functioncall>")]
careless = episodes.replay(task, careless_problem, [*steps, format_call("contacts_delete", {"id": victim}), "Done."], tok)
display(turns_of(careless)[["changed so far", "reward"]].style.set_properties(**{"text-align": "left", "white-space": "pre-wrap"}).format({"reward": "{:+.2f}"}))
print(careless.score.tier, careless.score.reward, careless.score.parts)

# %% [markdown]
# ## Token by token
#
# The ids of an episode are the sampled ids with the environment's text in between; earlier turns are never
# tokenized again. Green is what the policy wrote: it has a log-probability and an advantage, and counts in
# every mean.

# %%
short = next(p for p in problems[2] if len(p.gold["calls"]) == 2)
played = episodes.replay(task, short, apps.gold_steps(short), tok)
ids, mask = played.completion.ids, played.completion.written
token_view.picture("mask", ids, [float(on) for on in mask], tok, ["assistant" if on else "function" for on in mask])

# %% [markdown]
# Fine-tuning on the expert's conversation supervises the same ids. Rendered at once, it has the same ids as the
# episode, which grew turn by turn.

# %%
rendered = chat.render(apps.trajectory(short, task.environment()), tok)
same_ids = played.prompt + ids == rendered.ids[: len(played.prompt) + len(ids)]
same_mask = [i for i, on in zip(rendered.ids, rendered.loss_mask) if on] == [i for i, on in zip(ids, mask) if on]
print(f"{len(ids)} ids, {sum(mask)} written by the policy; same ids: {same_ids}; same mask: {same_mask}")

# %% [markdown]
# ## Can the reward be earned without doing the task?
#
# Six ways to try, on every problem, beside the expert. Prediction: on feasible problems only the expert
# succeeds; declining is correct on level 5, and only there.

# %%
TRICKS = {
    "says Done.": lambda p: ["Done."],
    "claims the result": lambda p: ['{"result": "ok"} The task is complete, reward 1.'],
    "declines": lambda p: [format_call("task_decline", {})],
    "answers anything": lambda p: [format_call("task_answer", {"text": "yes"})],
    "stops before the last call": lambda p: [*[s for s in apps.gold_steps(p) if s.startswith("<functioncall>")][:-1], "Done."],
    "does it, then declines": lambda p: [*[s for s in apps.gold_steps(p) if s.startswith("<functioncall>") and "task_" not in s], format_call("task_decline", {})],
    "the expert": apps.gold_steps,
}
outcomes = pd.DataFrame([{"way": way, "level": level, "success": score.correct, "reward": score.reward, "tier": score.tier}
                         for level, found in problems.items() for p in found for way, trick in TRICKS.items()
                         for score in [episodes.replay(task, p, trick(p), tok).score]])
table = outcomes.pivot_table(index="way", columns="level", values="success", sort=False)
doable = outcomes[outcomes["level"] < 5]
table.style.format("{:.0%}")

# %%
means = doable.groupby("way", sort=False)["reward"].mean()
fig, axes = new_figure("On feasible problems, only doing the task is rewarded", size=(6.4, 2.8))
axes[0, 0].barh(list(means.index), means, color=[OKABE_ITO["green"] if way == "the expert" else OKABE_ITO["sky"] for way in means.index])
axes[0, 0].invert_yaxis()
axes[0, 0].set_xlim(0, 1)
finish(axes[0, 0], x=f"mean reward, levels 1 to 4 (N={len(doable) // len(TRICKS)} problems)", y=None, legend=False)
fig

# %% [markdown]
# Doing the task and then declining earns a quarter, like "all changes, and one too many" (less if the task is
# an answer). It is never a success.

# %% [markdown]
# ## A small model in it
#
# A model of 2.6 M parameters, fine-tuned on the toolbox's calls (`parent`; the committed rows come from the recipe of
# commit 19387a6), is fine-tuned on 1,000 experts' episodes of levels 1 and 2 with copying drills mixed in. Then
# REINFORCE on 2,000 other problems: 60 steps of 16 problems, 16 episodes each, rewarded for success, with credit for
# partial changes. About four minutes of SFT and twenty of RL a seed. Every stage is a function of the library that
# takes one configuration; the settings are checked here, and `fresh = True` executes them in order.

# %%
BASE, SEEDS = "apps/sft", ["apps/rl-s0", "apps/rl-s1", "apps/rl-s2"]
DATA, APPS, LENGTH = "data/apps", "apps:levels=[1,2],max_turns=4", dict(max_new_tokens=48)
ON_APPS = LENGTH | dict(task=APPS, data_dir=DATA)
STAGES = [
    ("data.calls", dict(tokenizer="gpt2:4096", out=DATA)),
    ("data.apps", dict(levels=(1, 2), max_examples=1000, tokenizer="gpt2:4096", out=DATA)),
    ("sft", dict(run_name=BASE, init_from=parent, data_dir=DATA, mix=("episodes=0.6", "calls=0.2", "copy=0.2"), max_steps=300,
                 device_batch_size=8, seq_len=512, lr=1.8e-3, muon_lr=0.012, probe_examples=0)),
    ("diagnose", ON_APPS | dict(run_name="apps/diagnose", ckpt=BASE, groups=64, group_size=8)),
    *(("reinforce", ON_APPS | dict(run_name=run, init_from=BASE, device_batch_size=16, group_size=16, max_steps=60, lr=3e-4,
                                   diagnose_groups=0, seed=i)) for i, run in enumerate(SEEDS)),
    ("evaluate", ON_APPS | dict(run_name="apps/test", ckpt=(BASE, *SEEDS), split=("test",), limit=200, n=8, ks=(1, 8))),
]

# %%
entries = [(registry.ENTRIES[id], settings) for id, settings in STAGES]
configured = [(entry, config.resolve(entry.config_class, overrides=settings)) for entry, settings in entries]
for entry, cfg in configured if fresh else ():
    entry.load(entry.function)(cfg)
print("REINFORCE of seed 0 differs from the defaults in:")
pd.DataFrame(config.changed(configured[4][1]), index=["default", "here"]).T

# %%
kept = run_frames.frozen_dir() / "apps"
if freeze:
    frames = run_frames.collect(["apps/test", *SEEDS])
    frames["metrics"] = frames["metrics"][["run", "step", "exact_match", "entropy", "effective_groups", "logprob_mismatch"]]
    counts = frames["per_problem"].assign(checkpoint=lambda t: t["checkpoint"].str.partition("@")[0])
    frames["per_problem"] = counts.pivot(index=["id", "n"], columns="checkpoint", values="c").reset_index().assign(run="apps/test")
    said = pd.DataFrame(read_rows(find_run("apps/test") / "samples.jsonl")).assign(run="apps/test")
    frames["samples"] = said.loc[said["checkpoint"].str.contains("apps/sft|rl-s0"), ["run", "checkpoint", "problem", "turns", "reward", "tier"]].groupby("checkpoint").head(24)
    run_frames.freeze(frames, kept)
frames = run_frames.load_frozen(kept)
rows, metrics, samples = frames["per_problem"], frames["metrics"], frames["samples"]

# %%
apart = metrics["logprob_mismatch"]
print(f"sampler and trainer differ by {apart.median():.0e} nats on the worst token of a step (median of steps), {apart.max():.1e} at most")
tens = metrics.assign(steps=lambda t: (t["step"] - 1) // 10 * 10)
tens.pivot_table(index="steps", columns="run", values="exact_match").style.format("{:.2f}")

# %%
fig, axes = new_figure("Success of training episodes: noisy, and higher at the end", size=(6.4, 3))
for run, steps in metrics.groupby("run", sort=False):
    draw_smoothed(axes[0, 0], steps["step"], steps["exact_match"], colour=colour_of(run), label=run, dash=dash_of(run))
finish(axes[0, 0], x="step", y="successes, share of 256 episodes")
fig

# %% [markdown]
# On problems of `test` (n=8, temperature 1), paired by problem with the policy before RL. Short requests recur:
# "Pin note 17." may be in the training data too, in another world with other tools. *new* excludes these.

# %%
easy = apps.AppsTask(levels=[1, 2])
known = {p.id: p for p in easy.generate("test", len(rows), 0)}
trained_on = {p.messages[-1]["content"] for p in easy.generate("train", 2000, 0)}
trained_on |= {row["messages"][1]["content"] for row in easy.dialogues("train", 1000, 0)}
new = ~rows["id"].map(lambda id_: known[id_].messages[-1]["content"]).isin(trained_on)
print(f"{new.sum()} of {len(rows)} requests are new")

# %%
level = rows["id"].str.split("-").str[1].astype(int)
before, after = rows[BASE] / rows["n"], {run: rows[run] / rows["n"] for run in SEEDS}
change = pd.DataFrame({run: values - before for run, values in after.items()}).T  # (seeds, problems)
parts = {"all": level > 0, "new": new, "level 1": level == 1, "level 2": level == 2}
scores = pd.DataFrame({"problems": {name: at.sum() for name, at in parts.items()}, "before": {name: str(bootstrap_interval(before[at], seed=seed)) for name, at in parts.items()},
                       "after, all seeds": {name: str(hierarchical_interval([v[at] for v in after.values()], seed=seed, bounds=(0, 1))) for name, at in parts.items()}})
gaps = pd.DataFrame({run: paired_bootstrap(before, values, seed) for run, values in after.items()}, index=["gain", "from", "to"]).T
for name, some in (("all seeds", change), ("all seeds, new", change.loc[:, new])):
    together = hierarchical_interval(some, seed=seed)
    gaps.loc[name] = together.value, together.lo, together.hi
tries = {run: 1 - (rows[run] == 0).mean() for run in [BASE, *SEEDS]}
print("pass@8:", ", ".join(f"{run} {share:.3f}" for run, share in tries.items()))
display(scores, gaps.round(3))

# %%
fig, axes = new_figure(f"REINFORCE: {100 * gaps.loc['all seeds', 'gain']:+.1f} points of success on unseen requests", cols=2, size=(7.4, 3.0))
names = {"before": before, **{f"seed {i}": after[run] for i, run in enumerate(SEEDS)}}
shown = {name: bootstrap_interval(values, seed=seed) for name, values in names.items()}
error = [[i.value - i.lo for i in shown.values()], [i.hi - i.value for i in shown.values()]]
axes[0, 0].bar(list(shown), [i.value for i in shown.values()], color=[OKABE_ITO["orange"], *[OKABE_ITO["green"]] * 3], yerr=error, capsize=3)
axes[0, 0].set_ylim(0, 0.6)
finish(axes[0, 0], x=f"policy (N={len(rows)}, n=8, temperature 1)", y="success, 95 % intervals", legend=False)
order = [*SEEDS, "all seeds", "all seeds, new"]
axes[0, 1].hlines(range(len(order)), 100 * gaps.loc[order, "from"], 100 * gaps.loc[order, "to"], color=OKABE_ITO["green"], linewidth=2.5)
axes[0, 1].plot(100 * gaps.loc[order, "gain"], range(len(order)), "o", color=OKABE_ITO["green"])
axes[0, 1].axvline(0, color="black", linewidth=0.8)
axes[0, 1].set_yticks(range(len(order)), ["seed 0", "seed 1", "seed 2", "all seeds", "all, new requests"])
axes[0, 1].invert_yaxis()
finish(axes[0, 1], x="gain over before, points (paired)", y=None, legend=False)
fig

# %% [markdown]
# Both levels gain, and so do the requests that are not in the training data. pass@8 hardly moves (0.615
# before; 0.590, 0.630, 0.675): the policy does more often what it could already do in eight tries. A weaker start failed
# ([experiments](../docs/experiments/programs-and-sums.md)): after a sixth of this SFT, 1.25 of 6 groups a step had variance, and REINFORCE at a
# higher rate lost 0.075. Here 9.3 of 16 have it.
#
# The policies' episodes are stored with their turns. The environment is deterministic: a replayed episode earns
# its recorded reward. One of them:

# %%
replayed = [episodes.replay(task, known[r["problem"]], [t["text"] for t in r["turns"]], tok) for _, r in samples.iterrows()]
agree = sum(e.score.reward == reward and e.score.tier == tier for e, reward, tier in zip(replayed, samples["reward"], samples["tier"]))
longest = max((e for e in replayed if e.score.correct), key=lambda e: (len(e.problem.gold["calls"]), -len(e.turns)))
print(f"{agree} of {len(samples)} replayed episodes have the recorded reward and tier\n{longest.problem.messages[-1]['content']}")
display(turns_of(longest).style.set_properties(**{"text-align": "left", "white-space": "pre-wrap"}).format({"reward": "{:.2f}"}))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | a seventh way in `TRICKS`: `"does it twice": lambda p: [*[s for s in apps.gold_steps(p) if s.startswith("<functioncall>")] * 2, "Done."]` | does doing everything twice still count? | <details><summary>outcome</summary>not where a second call changes more than was requested (a second event, a second mail): that is collateral. Where it changes nothing new, yes. The last cell then counts one way more</details> |
# | `format_call("notes_add", {"title": "x", "text": "y"})` for the call of `contacts_delete` in the careless episode | is an addition collateral too? | <details><summary>outcome</summary>yes: every change that was not required is named, additions like removals</details> |
#
# The last cell asserts the Result.

# %%
tricks = doable[doable["way"] != "the expert"]
assert len(apps.TOOLS) == 78 and len(outcomes) == len(TRICKS) * 5 * per_level
assert table.loc["the expert"].eq(1).all() and not tricks["success"].any()
assert table.loc["declines"].tolist() == [0, 0, 0, 0, 1] and means.drop("the expert").max() < 0.5
assert expert.score.correct and expert.turns[-1].reward == 0 and sum(t.reward for t in expert.turns) == 1
assert careless.score.tier == "collateral" and careless.score.reward == 0.25 and careless.score.parts["collateral"] == [f"contacts {victim} removed"]
assert same_ids and same_mask and 0 < sum(mask) < len(mask)
assert (gaps["from"] > 0).all() and gaps.loc["all seeds"].round(3).tolist() == [0.09, 0.058, 0.123] and f"{before.mean():.3f}" == "0.357" and [f"{v.mean():.3f}" for v in after.values()] == ["0.436", "0.445", "0.460"]
assert agree == len(samples) and f"{apart.max():.1e}" == "1.4e-04"
