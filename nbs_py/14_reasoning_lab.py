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
# # SFT teaches the layout at once and arithmetic slowly; twenty steps of RL teach no arithmetic
#
# **Question.** A small model has read Python and nothing else. Can it learn, on a CPU, to reason in a fixed
# layout and to answer correctly, and what do SFT, expert iteration and GRPO each add?
#
# **Result.** SFT learns the layout at once (87 % of completions after 75 steps) and arithmetic slowly: pass@1 on test
# ends at 0.193. Twenty steps of expert iteration or GRPO from there change nothing measurable. The model lacks facts: in
# 66 % of cases a solution's first error is an unknown sum.
#
# | n=4, temperature 1, 95 % intervals | |
# |---|---|
# | in the layout after 75 and 300 steps of SFT | 87 %, 99.8 % |
# | pass@1 on 100 validation problems after 75 and 300 steps | 0.07, 0.22 |
# | pass@1 on 200 test problems | 0.193 [0.159, 0.229] |
# | with wordings that it never saw | 0.065 |
# | expert iteration minus SFT, GRPO minus SFT (paired, one seed each) | -0.001 [-0.031, 0.028], -0.005 [-0.034, 0.025] |
# | first error: unknown sum, copied number, sign | 66 %, 17 %, 2 % |
# | solutions correct throughout, answers correct | 14 %, 19 %: answer rewards also pay lucky guesses |
#
# On GSM8K itself neither nano nor SmolLM2 gives one right answer of 300, before or after training (below). By GRPO with these five rewards SmolLM2 learns
# to write tags, and no answer ([notebook 35](35_what_a_pretrained_base_buys.ipynb)). Qwen2.5-Coder-0.5B solves a quarter, in its own form.
# (Eighty steps on one-step problems alone do help, 0.30 to 0.48 with GRPO: [experiments](../docs/experiments/programs-and-sums.md).)
#
# **Runs/needs.** Frozen rows of five runs (`reports/frozen/reasoning`), from a model of an older recipe (commit 19387a6). `fresh = True` makes the runs again, in about an hour of two cores. Seconds on one core.
#
# Previous: [13 where code rl lives](13_where_code_rl_lives.ipynb) · Next: [15 chars lab](15_chars_lab.ipynb)

# %% tags=["parameters"]
prefix = ""
fresh = False
parent = "nano/pretrain"

# %%
import inspect

import pandas as pd

from codechat import expert_iteration, tasks
from codechat.core import config, registry
from codechat.core.atomic_files import read_rows
from codechat.evaluation import intervals
from codechat.runs import paths
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.reports import run_frames
from codechat_lab.reports.style import OKABE_ITO, colour_of, finish, new_figure
from codechat_lab.tasks.reasoning import rewards
from codechat_lab.tasks.reasoning.answers import equivalent

kept, task = run_frames.frozen_dir() / "reasoning", tasks.load("reasoning")
TERMS = ("correctness", "integer", "strict_format", "soft_format", "tags")

# %% [markdown]
# ## Problems of graded difficulty
#
# Generated here, without a download: one step, then more; level 4 has an irrelevant number. A question's text
# decides its split: worked solutions, RL, validation (`select`) or test. `test_hard` has
# wordings that appear nowhere else.

# %%
shown = [next(p for p in task.generate("test", 8, seed=0) if p.meta["level"] == level) for level in (1, 2, 3, 4)]
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame([(p.meta["level"], p.messages[0]["content"], p.gold["steps"].replace("\n", ";  "), p.gold["answer"]) for p in shown], columns=["level", "question", "worked solution", "answer"])
            .set_index("level"))

# %% [markdown]
# ## A reward of five terms
#
# The system prompt asks for `<reasoning>` and `<answer>`. Correctness is worth 2, the layout and an integer
# as answer another 2. The terms are logged separately: a policy can earn 2 of 4 without a single correct
# answer, and the sum alone would not show it.

# %%
problem = next(p for p in task.problems("test", 50) if p.meta["level"] == 3)
gold, answer = task.gold(problem), problem.gold["answer"]
tries = {"reference": gold, "wrong answer": gold.replace(f"\n{answer}\n</a", "\n0\n</a"), "talks on": gold + " I hope this helps. " * 20,
         "one line": f"<reasoning>thinking</reasoning><answer>{answer}</answer>", "cut off": gold.partition("\n</answer>")[0], "bare": answer}
scores = {name: task.score(problem, text) for name, text in tries.items()}
print(gold)
pd.DataFrame({name: {**score.terms, "reward": score.reward, "outcome": score.tier} for name, score in scores.items()}).T

# %% [markdown]
# Published rewards of this kind have failed in four ways that are tests here: a reference answer that cannot
# be parsed rewards everything; the strict pattern does not match a line end; trailing text costs so much that
# a correct answer is worth less than none; an answer without its closing tag counts. Answers are compared by
# value, not by notation:

# %%
spellings = [("1,234", "1234"), ("$18.00", "18 dollars"), (r"\frac{1}{2}", "0.5"), (r"2\sqrt{3}", r"\sqrt{12}"), ("18 or 20", "18"), ("5 km", "5 m"), ("", "")]
pd.DataFrame([(a, b, equivalent(a, b)) for a, b in spellings], columns=["answer", "reference", "the same"]).set_index("answer")

# %% [markdown]
# ## Five runs, from Python
#
# Every stage is a function of the library that takes one configuration. The settings are checked here; `fresh = True`
# executes them in order, from a pretrained model of 2.6 M parameters (`parent`). The committed rows come from the
# recipe of commit 19387a6. With `prefix="reason"` this notebook reads the runs and freezes their rows again.

# %%
DATA, LENGTH, BATCH = "data/reasoning", dict(max_new_tokens=72), dict(device_batch_size=8, group_size=16)
RL = LENGTH | BATCH | dict(init_from="reason/sft", task="reasoning", data_dir=DATA, max_steps=20, lr=3e-4, warmup_steps=3)
SCORED = LENGTH | dict(task="reasoning", data_dir=DATA, n=4, ks=(1, 4))
STAGES = [
    ("data.reasoning", dict(out=DATA, tokenizer="python:4096", max_examples=12_000)),
    ("sft", dict(run_name="reason/sft", init_from=parent, data_dir=DATA, seq_len=512, device_batch_size=4, max_steps=300, lr=3e-3,
                 muon_lr=0.02, probe_examples=0)),
    ("grpo", RL | dict(run_name="reason/grpo")),
    ("expert_iteration", RL | dict(run_name="reason/expert", keep="correct")),
    ("evaluate", SCORED | dict(run_name="reason/steps", ckpt=("reason/sft@75", "reason/sft@150", "reason/sft"), split=("select",), limit=100)),
    ("evaluate", SCORED | dict(run_name="reason/evaluate", ckpt=("reason/sft", "reason/expert", "reason/grpo"), split=("test", "test_hard"), limit=200)),
]

# %%
entries = [(registry.ENTRIES[id], settings) for id, settings in STAGES]
configured = [(entry, config.resolve(entry.config_class, overrides=settings)) for entry, settings in entries]
for entry, cfg in configured if fresh else ():
    entry.load(entry.function)(cfg)
print("GRPO differs from the defaults in:")
pd.DataFrame(config.changed(configured[2][1]), index=["default", "here"]).T


# %%
def first_slip(row):
    """What goes wrong first in a worked solution: "copied" numbers, "sign", "sum", the "number of steps", the "answer" behind them; or "nothing"."""
    steps = [line.split() for line in row["completion"].partition("<reasoning>")[2].partition("</reasoning>")[0].strip().split("\n")]
    reference = [line.split() for line in row["gold"].partition("<reasoning>")[2].partition("</reasoning>")[0].strip().split("\n")]
    for ours, right in zip(steps, reference):
        if len(ours) != 5 or ours[3] != "=":
            return "layout"
        for slip, at in (("sign", (1,)), ("copied number", (0, 2)), ("sum", (4,))):
            if any(ours[i] != right[i] for i in at):
                return slip
    return "nothing" if row["correct"] else "number of steps" if len(steps) != len(reference) else "answer"


# %%
if prefix:  # freeze again
    frames = run_frames.collect([f"{prefix}/{name}" for name in ("sft", "grpo", "expert", "steps", "evaluate")])
    frames["runs"] = frames["runs"].drop(columns="config")  # it names folders of this machine
    frames["per_problem"] = frames["per_problem"][frames["per_problem"]["run"] == f"{prefix}/evaluate"]
    examples = pd.DataFrame(read_rows(paths.find_run(f"{prefix}/evaluate") / "examples.jsonl"))
    examples["slip"] = examples.apply(first_slip, axis=1)
    frames["slips"] = examples.groupby(["checkpoint", "split", "slip"]).size().rename("n").reset_index().assign(run=f"{prefix}/evaluate")
    on_test = examples[examples["split"] == "test"]
    some = on_test[on_test["problem"].isin(sorted(on_test["problem"].unique())[:6])].groupby(["problem", "checkpoint"]).head(1)
    frames["samples"] = some[["checkpoint", "problem", "request", "gold", "completion", "reward", "tier"]].assign(run=f"{prefix}/evaluate")
    run_frames.freeze(frames, kept)

# %%
frames = run_frames.load_frozen(kept)
metrics, evals = frames["metrics"], frames["evals"]
sft, expert, grpo = (next(c for c in evals["checkpoint"].dropna().unique() if f"/{name}@" in c and not c.endswith(("@75", "@150"))) for name in ("sft", "expert", "grpo"))

# %% [markdown]
# ## SFT: the layout first, arithmetic last
#
# Three checkpoints of the SFT run on problems of `select`.

# %%
steps = evals[evals["run"].str.endswith("/steps")].set_index("checkpoint")
steps[["format_rate", "pass@1", "pass@4", *(f"reward/{t}" for t in TERMS)]].round(3)

# %% [markdown]
# ## The two loops
#
# Expert iteration (RAFT, arXiv:2304.06767) raises the likelihood of the best completions of each group, and nothing pushes the others away:
# $L = -\frac{1}{N}\sum_{i \in best} \sum_t \log \pi(y_{i,t})$. GRPO (arXiv:2402.03300, eq. 3) weighs every completion by its advantage; notebook 13
# prints its loop.

# %%
print(inspect.getsource(expert_iteration.train))

# %% [markdown]
# ## Expert iteration and GRPO, term by term
#
# Both sample 16 solutions of 8 problems a step. Expert iteration trains on the correct ones as SFT would; GRPO weights
# each by its advantage within its group. The figure shows the same 100 validation problems before and after: a curve of
# training rollouts would depend on the 8 problems of each step as much as on the policy.

# %%
curve = evals[evals["run"].str.endswith(("/grpo", "/expert"))].sort_values("step")
full = {"correctness": 2.0, "integer": 0.5, "strict_format": 0.5, "soft_format": 0.5, "tags": 0.5}
on_same = {"SFT": curve[curve["step"] == 0].iloc[0]}
on_same |= {label: curve[curve["run"].str.endswith(f"/{run}")].iloc[-1] for label, run in (("expert iteration", "expert"), ("GRPO", "grpo"))}
fig, axes = new_figure("The layout is learned before RL starts; correctness does not move", size=(6.4, 3.0))
for shift, (label, row) in enumerate(on_same.items()):
    places, shares = [i + 0.27 * (shift - 1) for i in range(len(TERMS))], [row[f"reward/{term}"] / full[term] for term in TERMS]
    bars = axes[0, 0].bar(places, shares, 0.27, color=OKABE_ITO[("orange", "sky", "vermilion")[shift]], label=label)
    axes[0, 0].bar_label(bars, [f"{share:.2f}" for share in shares], fontsize=7)
axes[0, 0].set(ylim=(0, 1.3), xticks=range(len(TERMS)), xticklabels=[term.replace("_", " ") for term in TERMS])
finish(axes[0, 0], x=f"term of the reward (the same {curve['n_problems'].iloc[0]:.0f} validation problems)", y="share of the maximum", loc="upper center", ncols=3)
fig

# %%
table = curve.pivot_table(index="step", columns="run", values=["pass@1", "format_rate"]).round(3)
table

# %% [markdown]
# ## On unseen problems

# %%
final = evals[evals["run"].str.endswith("/evaluate")].set_index(["split", "checkpoint"])
final.assign(interval=[f"[{lo:.3f}, {hi:.3f}]" for lo, hi in zip(final["pass@1/lo"], final["pass@1/hi"])])[
    ["pass@1", "interval", "pass@4", "format_rate", "truncated_frac", "n_problems", "n_samples"]].round(3)

# %%
problems = frames["per_problem"]
gaps = {}
for split in ("test", "test_hard"):
    parts = {c: problems[(problems["checkpoint"] == c) & (problems["split"] == split)].sort_values("id") for c in (sft, expert, grpo)}
    for a, b in ((sft, expert), (sft, grpo), (expert, grpo)):
        gap = intervals.Interval(*intervals.paired_bootstrap(*((parts[c]["c"] / parts[c]["n"]).to_numpy() for c in (a, b))))
        gaps[split, f"{b} - {a}"] = gap
pd.Series({key: str(gap) for key, gap in gaps.items()}, name="difference in pass@1, paired").to_frame()

# %% [markdown]
# ## By level
#
# Levels 1 and 2 have one step, level 3 has two, level 4 three.

# %%
levels = {p.id: p.meta["level"] for p in task.problems("test", 500)}
on_test = problems[problems["split"] == "test"].assign(level=lambda d: d["id"].map(levels), share=lambda d: d["c"] / d["n"])
by_level = on_test.pivot_table(index="level", columns="checkpoint", values="share")[[sft, expert, grpo]]
fig, axes = new_figure("One step: a quarter is correct; three steps: a tenth", size=(6.4, 3.0))
for shift, (name, column) in zip((-0.25, 0, 0.25), by_level.items()):
    axes[0, 0].bar(by_level.index + shift, column, 0.25, color=OKABE_ITO[{sft: "orange", expert: "sky", grpo: "vermilion"}[name]], label=name)
axes[0, 0].set_xticks(by_level.index)
finish(axes[0, 0], x="level", y="share of correct answers on test")
fig

# %% [markdown]
# ## What goes wrong
#
# The first error of each solution: a number copied wrongly from the question, the wrong sign, or an unknown
# sum. Fewer solutions have no error ("nothing") than are correct.

# %%
slips = frames["slips"][frames["slips"]["split"] == "test"].pivot_table(index="slip", columns="checkpoint", values="n", fill_value=0)[[sft, expert, grpo]]
(slips / slips.sum()).sort_values(sft, ascending=False).round(3)

# %%
samples = frames["samples"].pivot_table(index="request", columns="checkpoint", values="completion", aggfunc="first")[[sft, grpo]]
with pd.option_context("display.max_colwidth", None):
    display(samples.map(lambda text: text.replace("<reasoning>", "").replace("</reasoning>", "").replace("\n", "  ")))

# %% [markdown]
# ## GSM8K itself: nano and a pretrained base
#
# The first 300 test problems, greedily, 256 tokens, in the form with five rewards and in r1_zero's prompt. SmolLM2-135M-Instruct in four-bit weights
# fails like nano. The model card of SmolLM2-135M-Instruct states 1.4 % with five worked examples in the prompt and full precision.

# %%
gsm8k = frames["gsm8k"]
gsm8k["right, 95 % interval"] = [str(intervals.wilson_interval(row.right, row.n)) for row in gsm8k.itertuples()]
gsm8k.set_index(["model", "form"])[["n", "right, 95 % interval", "in the form", "cut off"]]

# %% [markdown]
# Qwen2.5-Coder-0.5B-Instruct on all 1,319 problems with at most 320 tokens: untuned, after SFT on calls (`released/coder-tools` before its rounding to eight bits) and after ten steps
# of GRPO on MBPP (recipe `coder`). It reckons in the form that it was taught, an answer in a box. With five rewards it reasons and forgets most tags. Asked as in
# r1_zero it answers at once, and wrongly.

# %%
larger = pd.DataFrame(read_rows(run_frames.frozen_dir() / "pretrained_coder.jsonl"))
larger = larger[larger["benchmark"].str.startswith("GSM8K")].set_index("benchmark")
JUDGED = {"untuned": "0.5 B untuned", "sft": "after SFT", "rl": "after RL"}
for stage, name in JUDGED.items():
    larger[name] = [str(intervals.wilson_interval(right, n)) for right, n in zip(larger[stage], larger["n"])]
larger[["n", *JUDGED.values()]]


# %% [markdown]
# ## Three lines of your own
#
# The term for tags: 0.125 for each of the four that stands exactly once in the text, with its line ends. (The library also
# charges for text after the last one; leave that out.)

# %%
def tag_reward(text, tags):
    """tags: the four, with their line ends -> 0 to 0.5."""
    raise NotImplementedError("yours to fill in")


# %%
texts = [t for name, t in tries.items() if name != "talks on"]
check_cases(tag_reward, *(((t, rewards.TAGS), rewards.xml_terms(t, answer, "number")["tags"]) for t in [*texts, "", gold + gold]))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `tries["guess"] = f"<reasoning>\n1 + 1 = 2\n</reasoning>\n<answer>\n{answer}\n</answer>"` | what is a lucky guess with invented steps worth? | <details><summary>outcome</summary>the maximum, as much as the reference: the reward reads the answer, not the steps</details> |
# | `("1e3", "1000")` and `("50%", "0.5")` in `spellings` | are they the same answer? | <details><summary>outcome</summary>no to both: it reads fractions, roots, units and thousands, not notations that no worked solution uses</details> |
#
# The last cell asserts the Result.

# %%
rates = final.loc["test"]
assert steps["format_rate"].is_monotonic_increasing and steps["format_rate"].iloc[0] > 0.85 and steps["format_rate"].iloc[-1] > 0.99
assert 0.06 < steps["pass@1"].iloc[0] < 0.08 and 0.21 < steps["pass@1"].iloc[-1] < 0.24
assert round(rates.loc[sft, "pass@1"], 4) == 0.1925 and round(final.loc[("test_hard", sft), "pass@1"], 3) == 0.065
for name in (expert, grpo):
    assert gaps["test", f"{name} - {sft}"].lo < 0 < gaps["test", f"{name} - {sft}"].hi and abs(gaps["test", f"{name} - {sft}"].value) < 0.01
share = (slips / slips.sum())[sft]
assert [round(float(share[k]), 2) for k in ("sum", "copied number", "sign", "nothing")] == [0.66, 0.17, 0.02, 0.14]
assert share["nothing"] < rates.loc[sft, "pass@1"] - 0.04
assert by_level.loc[4].max() < 0.6 * by_level.loc[1].min()
assert gsm8k["right"].sum() == 0 and set(gsm8k["n"]) == {300}
assert larger.loc["GSM8K, the answer boxed", ["untuned", "sft", "rl"]].tolist() == [314, 326, 352]
assert larger.loc["GSM8K, five rewards", ["untuned", "sft", "rl"]].tolist() == [50, 59, 97]
