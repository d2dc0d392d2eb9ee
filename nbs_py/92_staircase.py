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
# # The staircase: what a graded reward teaches, what the original's mask, parser and precision cost, and whether RL saturates
#
# **Question.** On the same rollouts, how much signal do a binary, a fractional, a tiered and the staircase
# reward give? What did the original's loss mask, parser and bfloat16 weights cost? And with all three
# correct, does function-calling RL saturate?
#
# **Result.** The last cell prints and asserts it.
#
# **Runs/needs.** RL, choice and evaluation of three seeds of recipe nano; `nano/anatomy` and `nano/anatomy-text` (`python -m codechat.launch.recipes.reward_ablation`), which
# sampled the rollouts and measured them. Nothing is sampled or trained here.

# %% tags=["parameters"]
recipe = "nano"
anatomy = "nano/anatomy"
text = "nano/anatomy-text"
out = "reports/staircase"
frozen = False

# %%
import numpy as np
import pandas as pd

from codechat import comparisons, plots, run_frames
from codechat.runs.run import ROOT
from codechat.tasks.funcall.staircase import TIERS

# %%
data, few = ROOT / out / "data", dict(drop={"per_problem": ["tiers", "reward_mean"]}, keep={"samples": ""})
seeds = run_frames.seeds_of(f"{recipe}/rl")
names = [run.replace("/rl", f"/{stage}") for stage in ("rl", "choose", "evaluate") for run in seeds]
frames = run_frames.gather(names, data, frozen, drop=few["drop"], keep={"samples": "", "per_problem": "split in ('select', 'test')"})
rows = run_frames.gather([anatomy], data / "anatomy", frozen, **few)["evals"]
spelled = run_frames.gather([text], data / "text", frozen, **few)["evals"]
stages = {stage: [r for r in frames["runs"]["run"] if r.rpartition("/")[2].startswith(stage)] for stage in ("rl", "choose", "evaluate")}
metrics, evals = ({run: run_frames.rows_of(frames[t], run) for run in stages["rl"]} for t in ("metrics", "evals"))
frames["runs"][["run", "kind", "seconds", "commit", "dirty"]].set_index("run")

# %% [markdown]
# ## Tiers of the rollouts, step by step
#
# A tier that shrinks has been improved on. If RL worked on exact calls alone, the tiers in between would not
# change.

# %%
ends = {run: frame[[f"tier/{t}" for t in TIERS]].fillna(0).rolling(10).mean().iloc[[9, -1]] for run, frame in metrics.items()}
full = ", ".join(f"{e['tier/full'].iloc[0]:.0%} to {e['tier/full'].iloc[1]:.0%}" for e in ends.values())
plots.tier_flow_panels(metrics, TIERS, f"exact calls among rollouts, first and last ten steps: {full}")

# %% [markdown]
# ## Four shapes of the reward, the same rollouts
#
# A group with equal rewards has no gradient. The shapes score the same completions; only the rewards differ.

# %% tags=["thumbnail"]
shaped = rows[rows["what"] == "shape"].dropna(axis="columns", how="all")
start = shaped[shaped["checkpoint"] == shaped["checkpoint"].iloc[0]].set_index("shape")
live = (start["effective_groups"] / start["n_problems"]).to_dict()
plots.reward_shapes(shaped, "groups with variance, after SFT: " + ", ".join(f"{name} {share:.0%}" for name, share in live.items()))

# %%
shaped.set_index(["checkpoint", "shape"])[["reward_mean", "effective_groups", "n_problems", "group_variance", "adv_abs_mean"]]

# %% [markdown]
# Which tiers are pushed up and which down: only the staircase rewards a correct name without arguments over a
# wrong name.

# %%
plots.tier_advantages(start.reset_index(), TIERS, f"after SFT, binary pays {start.loc['binary', 'pull/full']:.0%} of its advantage to exact calls, "
                                               f"the staircase {start.loc['staircase', 'pull/full']:.0%}")

# %% [markdown]
# ## The gradient of each tier
#
# The gradient of each tier by the part of the call on which it falls (norm at the last layer, credited to the
# token predicted there). For a wrong name it should fall on the name, for a partly correct call on the
# arguments.

# %%
tiers = rows[(rows["what"] == "tier") & (rows["checkpoint"] == start["checkpoint"].iloc[0])]
by_tier = {f"{r['tier']} ({r['share']:.0%} of the gradient, {int(r['completions'])} rollouts)": r for r in tiers.to_dict("records")}
found = {r["tier"]: r for r in tiers.to_dict("records")}
named, argued = found["wrong_name"].get("part/name", 0), found["partial"].get("part/arguments", 0)
plots.call_parts(by_tier, f"wrong names put {named:.0%} of their gradient on the name, partial calls {argued:.0%} on arguments", "share of the tier's gradient")

# %% [markdown]
# ## The mask that closed at the second piece of the end tag
#
# The original's tags are plain text, and its mask treated any piece of `<|end|>` as the end. On the same
# rollouts of a checkpoint with text tags, this is where the gradient falls under the correct mask and under
# that one. The broken mask leaves mostly the beginning of the tag, which the checkpoint already predicts with
# certainty, so that hardly any update is left. Tags with reserved ids have no pieces: there the two masks are
# equal.

# %%
masks = spelled[spelled["what"] == "mask"].set_index("mask")
plots.call_parts(masks.to_dict("index"), f"the broken mask trains {masks.loc['broken', 'trained_share']:.0%} of the tokens; its update has cosine "
                                           f"{masks.loc['broken', 'cosine']:.2f} with the right one", f"share of the gradient ({spelled['checkpoint'].iloc[0]})")

# %%
reserved = rows[(rows["what"] == "mask") & (rows["mask"] == "broken")]
both = pd.concat([spelled[spelled["what"] == "mask"], reserved]).dropna(axis="columns", how="all")
both.set_index(["checkpoint", "tags", "mask"])[["trained_share", "cosine", "size", "n_groups"]]

# %% [markdown]
# ## The parser that swapped quotes
#
# The data has arguments as JSON in single quotes. Our parser reads them; the original's replaced every quote
# and then could not.

# %%
parsers = rows[rows["what"] == "parser"].set_index("parser").dropna(axis="columns", how="all")
parsers[["gold_reward", "gold_bad_json", "n_gold", "rows_with_calls", "rows_kept", "reward_mean", "lost"]]

# %% [markdown]
# ## Weights in bfloat16
#
# The same updates from the same weights and rollouts, once with float32 masters and once with weights that are rounded after every step. The smaller learning rate
# is the published one.

# %%
precise = rows[rows["what"] == "weights"].dropna(axis="columns", how="all")
low = precise[precise["lr"] == precise["lr"].min()].set_index("weights")
plots.weight_precision(precise, f"at {precise['lr'].min():g}, bfloat16 weights change {low.loc['bfloat16 only', 'changed']:.2%}, masters {low.loc['float32 masters', 'changed']:.2%}")

# %%
precise.set_index(["lr", "weights"])[["changed", "way", "updates"]]

# %% [markdown]
# ## What was published about saturation
#
# v5 and v6 stood still for 100 and 283 steps. With 120 requests a 95 % interval is about 6 points wide on each side, their mask trained three tokens of a call,
# and most of their updates rounded to nothing: these curves do not show whether RL saturates.

# %%
theirs = run_frames.published("rl_eval")
theirs = theirs[theirs["n (published)"] == 120]
drawn = {name: (g["step (published)"], g["pass_at_1 (published)"]) for name, g in theirs.groupby("run_name (published)")}
plots.published_points(drawn, "RL step", "pass@1 (share)", "published: v5 and v6 stand still from the first evaluation on")

# %%
tiers_published = run_frames.published("funcall_tiers")
tiers_published[["run_name (published)", "checkpoint (published)", "tier (published)", "share (published)", "unit (published)"]]

# %% [markdown]
# ## With mask, parser and precision right: does it saturate?
#
# Three seeds, each with its own SFT. If RL ran out of signal, groups would lose their variance; if it only reached what SFT could already do in eight tries,
# pass@1 would rise towards pass@8 and pass@8 would stay.

# %% tags=["thumbnail"]
variance = {run: [1 - frame["frac_zero_std_groups"].iloc[part].mean() for part in (slice(10), slice(-10, None))] for run, frame in metrics.items()}
told = ", ".join(f"{a:.0%} to {b:.0%}" for a, b in variance.values())
plots.rl_saturation(metrics, evals, f"groups with variance, first and last ten steps: {told}")

# %%
found = {f"pass@{k}, test": comparisons.paired_gains(frames, stages["evaluate"], "test", k) for k in (1, 8)}
found["pass@1, select, last 40 steps"] = comparisons.paired_gains(frames, stages["choose"], "select")
table = comparisons.gain_table(found)
one, eight, late = (gains.all for gains in found.values())
plots.differences(table, f"RL adds {one.value:+.3f} to pass@1, {eight.value:+.3f} to pass@8, and {late.value:+.3f} after step 20")

# %%
table.set_index("name").round(4)

# %% [markdown]
# ## The numbers

# %% tags=["headline"]
shares = ", ".join(f"{s} {v:.0%}" for s, v in live.items())
print(f"groups with variance after SFT: {shares} of {int(start['n_problems'].iloc[0])} (n = {int(start['n_samples'].iloc[0])})")
print(f"broken mask: {masks.loc['broken', 'trained_share']:.1%} of tokens trained; its update has {masks.loc['broken', 'size']:.0e} of the right one's size and a "
      f"cosine of {masks.loc['broken', 'cosine']:.2f} with it ({int(masks['n_groups'].iloc[0])} groups)")
gold, kept = parsers["gold_reward"], parsers["rows_kept"].astype(int)
print(f"gold answers in single quotes score {gold['ours']:.2f} with our parser and {gold['broken']:.2f} with the original's, which can use {kept['broken']} of "
      f"{int(parsers.loc['ours', 'rows_with_calls'])} conversations with calls where ours uses {kept['ours']}")
changed = low["changed"]
print(f"bfloat16 values changed at {precise['lr'].min():g}: {changed['float32 masters']:.2%} with float32 masters, {changed['bfloat16 only']:.2%} without")
assert live["binary"] <= live["staircase"] and masks.loc["right", "trained_share"] == 1 > masks.loc["broken", "trained_share"]
assert (reserved["cosine"] > 0.999).all() and gold["ours"] == 1 > gold["broken"] and changed["bfloat16 only"] <= changed["float32 masters"]

# %% tags=["headline"]
tests = [run_frames.rows_of(frames["evals"], run).query("split == 'test'") for run in stages["evaluate"]]
score = {k: np.mean([rows[f"pass@{k}"].iloc[0] for rows in tests]) for k in (1, 8)}
above, end = sum(g.lo > 0 for g in found["pass@1, test"].seeds), np.mean([b for _, b in variance.values()])
flat, sharpened = late.lo <= 0 <= late.hi, eight.lo <= 0 <= eight.hi
print(f"RL minus SFT on test, mean of {len(tests)} seeds: pass@1 {one.value:+.3f} [{one.lo:+.3f}, {one.hi:+.3f}] (above 0 by problems in {above} of {len(tests)}), "
      f"pass@8 {eight.value:+.3f} [{eight.lo:+.3f}, {eight.hi:+.3f}]; SFT has {score[1]:.2f} and {score[8]:.2f}")
print(f"does it saturate? from step 20 to 60 pass@1 on select gains {late.value:+.3f} [{late.lo:+.3f}, {late.hi:+.3f}]: "
      f"{'no gain that these seeds can show' if flat else 'still moving'}; {end:.0%} of groups have variance in the last ten steps: "
      f"{'not for want of a gradient' if end > 0.25 else 'the gradient has run out'}; {'pass@8 stays: what SFT could do is sharpened' if sharpened else 'pass@8 moves'}")
assert len(found["pass@1, test"].seeds) == len(stages["rl"]) and all(g.lo <= g.value <= g.hi for gains in found.values() for g in (*gains.seeds, gains.all))

# %%
numbers = {f"live_{name}": share for name, share in live.items()} | dict(pass1=one.value, pass8=eight.value, late=late.value, variance_end=end)
numbers |= dict(mask_trained=masks.loc["broken", "trained_share"], mask_cosine=masks.loc["broken", "cosine"], mask_size=masks.loc["broken", "size"], gold_ours=gold["ours"], gold_broken=gold["broken"])
numbers |= dict(rows_ours=kept["ours"], rows_broken=kept["broken"], changed_masters=changed["float32 masters"], changed_bf16=changed["bfloat16 only"])
run_frames.headline(numbers, data)
