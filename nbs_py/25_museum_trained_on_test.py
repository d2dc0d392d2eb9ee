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
# # Museum: a model that was shown the test looks better on the test, and only there
#
# **Question.** The original's last fine-tuning set held MBPP's test problems and all of HumanEval, and its
# checkpoints were ranked on MBPP test. What does such a score look like, and what tells it from a real one?
#
# **Result.** Like a skill. Of two models of the same size, data and training, the one whose rows hold the solutions
# of the 24 test problems solves 92 % of them; the other, none. On 24 fresh problems of the same kind both solve
# none. The contamination check finds 24 of 24 problems in the rows of the first, none in the other's, and none
# of the fresh ones. With the defect on, the split that chooses checkpoints is the test itself; off, the two
# share no problem, and rows of a benchmark are refused.
#
# **Runs/needs.** Nothing but the sandbox (Linux on x86-64). Two models of toy size are trained here on small
# problems of our own.

# %% tags=["parameters"]
seed = 0
n_test = 24
steps = 120
level = 1

# %%
import pandas as pd
import torch

from codechat import DataError, GPT, GPTConfig, contamination, conversations, defects, evaluate, optim, tokenizer
from codechat.data.public_rows import refuse_evaluation
from codechat.reports.style import OKABE_ITO, finish, new_figure
from codechat.tasks import load, micro

# %%
tok, task = tokenizer.load("gpt2:1024"), load("micro", levels=[level], reward="binary")
test = micro.problems("test", n_test, seed, [level])
known = {p.messages[0]["content"] for p in test}
fresh = [p for p in micro.problems("test", 3 * n_test, seed + 1, [level]) if p.messages[0]["content"] not in known][:n_test]
print(defects.DEFECTS["train-on-test"].did)
print(f"{len(test)} test problems, {len(fresh)} fresh ones of the same kind. The first:\n\n{test[0].messages[0]['content']}")

# %% [markdown]
# ## Two sets for fine-tuning
#
# Of equal size, made by the same call. With the defect on, half of the rows are the worked solutions of the
# test problems, called "train".

# %%
clean = list(micro.dialogues("train", 2 * n_test, seed, [level]))
with defects.switched_on("train-on-test"):
    seen = list(micro.dialogues("train", 2 * n_test, seed, [level]))
for name, rows in (("clean", clean), ("seen", seen)):
    of_test = sum(row["messages"][0]["content"] in known for row in rows)
    print(f"{name}: {len(rows)} rows, split {sorted({row['meta']['split'] for row in rows})}, {of_test} of them requests of test problems")


# %% [markdown]
# ## See it happen
#
# The same model, trained on either set; then asked, greedily, for the test problems and for the fresh ones,
# which neither has seen.

# %%
def train(rows):
    """A model after `steps` steps on these conversations."""
    model = GPT(GPTConfig(depth=2, n_embd=96, n_head=3, block_size=512, vocab_size=tok.n_vocab), seed=seed)
    examples = {"solutions": [conversations.encode(row, tok, "reserved", 512) for row in rows]}
    loader = conversations.PackedLoader(examples, None, batch=2, T=512, seed=seed)
    optimizers = optim.build(model, lr=3e-3, optimizer="muon", muon_lr=0.02, weight_decay=0.0)
    for _ in range(steps):
        batch = loader.next()
        model.loss(batch.ids, batch.targets, positions=batch.positions, mask=conversations.block_mask(batch.docs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


# %%
scores = {}
for name, rows in (("clean", clean), ("saw the test", seen)):
    model = train(rows)
    for split, problems in (("test", test), ("fresh", fresh)):
        scores[name, split] = evaluate.evaluate_task(model, tok, "reserved", task, problems, n=1, temperature=0, max_new_tokens=80, seed=seed)
table = pd.Series({key: found.pass_at[1].value for key, found in scores.items()}).unstack().loc[["clean", "saw the test"], ["test", "fresh"]]
table

# %%
title = f"pass@1 on test {table.loc['saw the test', 'test']:.0%}, on fresh problems of the same kind {table.loc['saw the test', 'fresh']:.0%}"
fig, axes = new_figure(title, size=(6.4, 2.8))
for shift, (split, colour) in zip((-0.2, 0.2), (("test", "vermilion"), ("fresh", "green"))):
    found = [scores[name, split].pass_at[1] for name in table.index]
    error = [[max(0, f.value - f.lo) for f in found], [max(0, f.hi - f.value) for f in found]]
    axes[0, 0].bar([i + shift for i in range(2)], table[split], 0.4, color=OKABE_ITO[colour], label=split, yerr=error, capsize=3)
axes[0, 0].set_xticks(range(2), table.index)
axes[0, 0].set_ylim(0, 1.05)
finish(axes[0, 0], x=f"model (bars: 95 %, N={n_test}, n=1, greedy)", y="pass@1")
fig

# %% [markdown]
# ## See the instrument report it
#
# `contamination` looks for the evaluated problems in what a lineage was trained on: by 13-grams of request and
# solution, and by the syntax tree of the program but for its names. `evaluate` runs it before it prints a
# score, and splits the score into clean and exposed problems.

# %%
reports = {}
for name, rows in (("clean", clean), ("saw the test", seen)):
    texts = [(m["content"], True) for row in rows for m in row["messages"]]
    reports[name] = {split: contamination.search(problems, texts) for split, problems in (("test", test), ("fresh", fresh))}
exposed = pd.DataFrame({name: {split: len(found) for split, found in by.items()} for name, by in reports.items()}).T
print(f"problems of {n_test} that were found in the training data:")
exposed

# %% [markdown]
# ## A checkpoint that is chosen on the test
#
# The other half of the defect: `select`, by which checkpoints are chosen, is the test. With it on, both names
# give the same problems.

# %%
overlap = {}
for name, names in (("defect off", ()), ("defect on", ("train-on-test",))):
    with defects.switched_on(*names):
        ids = [{p.id for p in task.problems(split, n_test, seed)} for split in ("select", "test")]
    overlap[name] = len(ids[0] & ids[1])
print("problems that select and test share:", overlap)

# %% [markdown]
# ## Flip the fix
#
# A split has a role: `train` for gradients, `select` for choices, `test` for the number that is quoted. The
# readers refuse rows that are a benchmark's own:

# %%
try:
    list(refuse_evaluation([{"task_id": 11, "text": "Remove the first and last occurrence.", "code": "pass", "test_list": []}], "mbpp.jsonl"))
    refused = ""
except DataError as error:
    refused = str(error)
print(refused)

# %% [markdown]
# The last cell holds the notebook to its Result.

# %%
assert defects.on() == () and "evaluation data" in refused and overlap == {"defect off": 0, "defect on": n_test}
assert table.loc["saw the test", "test"] > 0.8 and table.loc["clean", "test"] < 0.1 and (table["fresh"] < 0.1).all()
assert len(test) == len(fresh) == len(clean) // 2 == len(seen) // 2 == n_test
assert exposed.loc["saw the test"].to_dict() == {"test": n_test, "fresh": 0} and (exposed.loc["clean"] == 0).all()
