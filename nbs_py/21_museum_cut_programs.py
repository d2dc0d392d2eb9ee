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
# # Museum: a sampler that stopped at pieces of its end tag cut the programs that it was to judge
#
# **Question.** After four tokens the original ended an answer at the first token that is a piece of `<|end|>`:
# a bare `<`, `|`, `end` or `>`. Its pass@k, and the diagnosis "1.75 % parseable", were measured on what was
# left. What is left of programs that are right?
#
# **Result.** Of 300 right programs in GPT-2's vocabulary, each in a fence, 3.7 % are cut inside the program and
# pass no more. Written without a fence nearly all are lost to a reader that takes an answer as it is: the stop
# leaves a bare `<` of the end tag behind the program, and 1 % still parses. Our sampler keeps all 300, and our
# reader forgives the `<`. So a share of parseable programs below 2 % says little about a model that was sampled
# so; how many of the original's answers had a fence is not published.
#
# **Runs/needs.** Nothing but the sandbox (Linux on x86-64). A model of toy size is trained here for seconds.

# %% tags=["parameters"]
seed = 0
n_programs = 300
memory_steps = 120

# %%
import ast
import contextlib

import pandas as pd
import torch

from codechat import ConfigError, GPT, GPTConfig, chat, defects, generate, optim, tokenizer
from codechat.reports.style import OKABE_ITO, finish, new_figure
from codechat.tasks import load, micro
from codechat.tasks.base import score_all

# %%
tok, task = tokenizer.load("gpt2"), load("micro")
pieces = frozenset(chat.stop_sequences(tok, "text")[0])
print(defects.DEFECTS["stop-set"].did)

# %% [markdown]
# ## See it happen, in the library's own sampler
#
# A tiny model that knows four answers by heart, so that what it would write is known. Sampled greedily, once
# with the sequence as the stop and once with the set.

# %%
ANSWERS = {
    "compare": "```python\ndef smaller(a, b):\n    return a if a<b else b\n```",
    "a name": "```python\ndef word_end(text, start):\n    return text.find(' ', start)\n```",
    "a pipe": "```python\ndef both(a, b):\n    return a|b\n```",
    "nothing special": "def double(x):\n    return 2 * x",
}

# %%
small = tokenizer.load("gpt2:1024")
prompts = {name: chat.prompt([{"role": "user", "content": name}], small, "text") for name in ANSWERS}
model, pad = GPT(GPTConfig(depth=1, n_embd=48, n_head=2, block_size=128, vocab_size=small.n_vocab), seed=seed), torch.nn.utils.rnn.pad_sequence
whole = [torch.tensor(prompts[n] + chat.completion_ids(text, small, "text")) for n, text in ANSWERS.items()]
targets = [torch.cat([torch.full((len(prompts[n]) - 1,), -100), ids[len(prompts[n]) :]]) for n, ids in zip(ANSWERS, whole)]
optimizers = optim.build(model, lr=1e-2, weight_decay=0.0)
for _ in range(memory_steps):
    model.loss(pad(whole, batch_first=True)[:, :-1], pad(targets, batch_first=True, padding_value=-100)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# %%
def sampled():
    """Each answer as text, and the token that ended it."""
    done = generate.sample(model, list(prompts.values()), max_new_tokens=60, temperature=0, stop=chat.stop_sequences(small, "text"))
    return pd.DataFrame({"text": [chat.completion_text(c.ids, small, "text") for c in done], "last token": [small.decode(c.ids[-1:]) for c in done],
                         "tokens": [len(c.ids) for c in done]}, index=list(ANSWERS))


by_sequence = sampled()
with defects.switched_on("stop-set"):
    by_set = sampled()
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame({"stop: sequence": by_sequence["text"], "stop: set": by_set["text"], "its last token": by_set["last token"]}))


# %% [markdown]
# Three are cut in the middle. The fourth is cut as well, at the first piece of the end tag itself: a bare `<`
# stays behind the program, and where no fence closes it off, no Python is left.
#
# ## On programs that are right
#
# The reference solutions of small problems, in GPT-2's vocabulary, as if a policy had written exactly these.
# Bare, and in a fence as the original's prompt asks for. An answer is what precedes the stop; the program is
# what is between fences, or all of it.

# %%
def until_stop(text, by):
    """An answer as it would be sampled: its ids up to the stop."""
    ids = chat.completion_ids(text, tok, "text")
    if by == "sequence":
        return chat.completion_text(ids, tok, "text")
    grace = len(tok.encode(chat.CALL_TAG))
    return tok.decode(ids[: next(i for i, token in enumerate(ids) if token in pieces and i >= grace) + 1])


def parses(text):
    """Whether what is between fences, or all of it, is Python."""
    program = text.split("```")[1].removeprefix("python") if "```" in text else text
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(program.strip()).body)
    return False


# %%
problems = micro.problems("test", n_programs, seed)
rows = []
for layout, form in (("bare", "{}"), ("in a fence", "```python\n{}\n```")):
    right = [form.format(task.gold(p)) for p in problems]
    for by in ("sequence", "set"):
        texts = [until_stop(text, by) for text in right]
        scores = list(score_all(task, problems, texts))
        early = [len(text) < len(full) for text, full in zip(texts, right)]
        rows.append(dict(layout=layout, stop=by, cut=sum(early), parses=sum(map(parses, texts)), passes=sum(s.correct for s in scores)))
found = pd.DataFrame(rows).set_index(["layout", "stop"]) / n_programs
found.map("{:.1%}".format)

# %%
fig, axes = new_figure("The same right programs, judged after two ways to stop", cols=2, sharey=True, size=(6.6, 2.8))
for ax, layout in zip(axes[0], ("bare", "in a fence")):
    for shift, (by, colour) in zip((-0.2, 0.2), (("sequence", "green"), ("set", "vermilion"))):
        bars = ax.bar([i + shift for i in range(2)], found.loc[(layout, by), ["parses", "passes"]], 0.4, color=OKABE_ITO[colour], label=f"stop: {by}")
        ax.bar_label(bars, fmt="{:.0%}", fontsize=8)
    ax.set_xticks(range(2), ["parses", "passes (our reader)"])
    ax.set_ylim(0, 1.35)
    finish(ax, x=layout, y="share of right programs", loc="upper center", ncols=2)
fig

# %% [markdown]
# Our reader of programs drops what follows a program, so it forgives the bare `<`; the original's did not.
# What is cut inside a fence is lost for both.
#
# Which pieces cut, and in what:

# %%
cuts = pd.Series([until_stop(f"```python\n{task.gold(p)}\n```", "set") for p in problems])
inside = cuts[[not parses(text) or "```" not in text[9:] for text in cuts]]
print(inside.str.strip().str[-1:].replace({"d": "end"}).value_counts().to_dict(), "in", len(inside), "programs, such as:\n")
print(*inside.head(3), sep="\n\n---\n")

# %% [markdown]
# ## See the instrument report it
#
# The gold gate asks what a right answer scores; with a sampler in between it is this table. And
# `truncated_frac` counts answers that ended without the whole stop sequence:

# %%
stop = list(chat.stop_sequences(small, "text")[0])


def without_stop(rows):
    """Share of sampled answers that do not end in the whole sequence."""
    return float((rows["last token"] != small.decode(stop[-1:])).mean())


ended = {"sequence": without_stop(by_sequence), "set": without_stop(by_set)}
print("answers that ended without the end tag:", ended)

# %% [markdown]
# ## Flip the fix
#
# The sampler matches sequences, and refuses bare ids, which would read as a set:

# %%
try:
    generate.sample(model, [prompts["a pipe"]], max_new_tokens=4, stop=sorted(pieces))
    refused = ""
except ConfigError as error:
    refused = f"{type(error).__name__}: {error}"
print(refused)

# %% [markdown]
# The last cell holds the notebook to its Result.

# %%
assert defects.on() == () and by_sequence["text"].to_list() == list(ANSWERS.values())
assert by_set["last token"].to_list() == ["<", "end", "|", "<"] and ended == {"sequence": 0.0, "set": 1.0}
assert (found.xs("sequence", level="stop")[["parses", "passes"]] == 1).all().all()
bare, fenced = found.loc[("bare", "set")].round(3), found.loc[("in a fence", "set")].round(3)
assert bare["parses"] == 0.01 and bare["passes"] == 0.967 and fenced["cut"] == 0.037 and fenced["passes"] == 0.963
assert len(inside) == 11 and "token sequences" in refused
