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
# # Museum: a sampler that stopped at pieces of its end tag cut correct programs
#
# **Question.** After four tokens the original ended an answer at the first token that is a piece of
# `<|end|>`: a bare `<`, `|`, `end` or `>`. Its pass@k and its "1.75 % parseable" come from these cut answers. What is left of correct programs?
#
# **Result.** Of 300 correct programs in a code fence, 3.7 % are cut inside the program and no longer pass.
# Without a fence a literal reader parses only 1 %, because a bare `<` of the end tag stays behind the program.
# Our sampler keeps all of them, and our reader drops the `<`.
#
# **Also.** So a low share of parseable programs says little about a model sampled this way. How many of the
# original's answers had a fence is not published.
#
# **Runs/needs.** The sandbox (Linux on x86-64). A model of toy size is trained here for seconds.
#
# Previous: [20 museum stop mask](20_museum_stop_mask.ipynb) · Next: [22 museum bf16 weights](22_museum_bf16_weights.ipynb)

# %% tags=["parameters"]
seed = 0
n_programs = 300
memory_steps = 120

# %%
import ast
import contextlib

import pandas as pd
import torch

from codechat.models import generate, optim
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.tasks import load
from codechat.tasks.base import score_all
from codechat.text import chat, tokenizer
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure
from codechat_lab.tasks import micro

# %%
tok, task = tokenizer.load("gpt2"), load("micro")
pieces = frozenset(chat.stop_sequences(tok, "text")[0])


def stop_at_a_piece(ids, tokenizer):
    """The defect: after as many ids as <functioncall> takes, any piece of the end tag ended an answer."""
    pieces, grace = chat.stop_sequences(tokenizer, "text")[0], len(tokenizer.encode(chat.CALL_TAG))
    return ids[: next(i for i, token in enumerate(ids) if token in pieces and i >= grace) + 1]



# %% [markdown]
# ## See it happen on sampled answers
#
# A tiny model that memorized four answers, so that its output is known. Sampled greedily, once with the
# sequence as the stop and once with the set.

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
def sampled(stop_rule=lambda ids, tokenizer: ids):
    """Each answer as text, and the token that ended it."""
    done = generate.sample(model, list(prompts.values()), max_new_tokens=60, temperature=0, stop=chat.stop_sequences(small, "text"))
    kept = [stop_rule(c.ids, small) for c in done]  # greedy: a stop rule decides the length alone
    return pd.DataFrame({"text": [chat.completion_text(ids, small, "text") for ids in kept], "last token": [small.decode(ids[-1:]) for ids in kept],
                         "tokens": [len(ids) for ids in kept]}, index=list(ANSWERS))


by_sequence = sampled()
by_set = sampled(stop_at_a_piece)
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame({"stop: sequence": by_sequence["text"], "stop: set": by_set["text"], "its last token": by_set["last token"]}))


# %% [markdown]
# Three are cut in the middle. The fourth is cut at the first piece of the end tag itself: a bare `<` remains
# after the program, and without a closing fence the text is not Python.
#
# ## On correct programs
#
# The reference solutions of small problems, in GPT-2's vocabulary, as if a policy had written exactly these.
# Bare, and in a fence as the original's prompt requests. The answer is the text before the stop; the program
# is the text between fences, or all of it.

# %%
def until_stop(text, by):
    """An answer as it would be sampled: its ids up to the stop."""
    ids = chat.completion_ids(text, tok, "text")
    if by == "sequence":
        return chat.completion_text(ids, tok, "text")
    return tok.decode(stop_at_a_piece(ids, tok))


def parses(text):
    """Whether what is between fences, or all of it, is Python."""
    program = text.split("```")[1].removeprefix("python") if "```" in text else text
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse(program.strip()).body)
    return False


# %%
problems = micro.problems("test", n_programs, seed)
rows = []
for layout, form in (("without a fence", "{}"), ("in a fence", "```python\n{}\n```")):
    correct = [form.format(task.gold(p)) for p in problems]
    for by in ("sequence", "set"):
        texts = [until_stop(text, by) for text in correct]
        scores = list(score_all(task, problems, texts))
        early = [len(text) < len(full) for text, full in zip(texts, correct)]
        rows.append(dict(layout=layout, stop=by, cut=sum(early), parses=sum(map(parses, texts)), passes=sum(s.correct for s in scores)))
found = pd.DataFrame(rows).set_index(["layout", "stop"]) / n_programs
found.map("{:.1%}".format).rename(columns={"parses": "is Python, taken literally", "passes": "passes, read by our reader"})

# %%
RULES = {"sequence": "stop: whole tag", "set": "stop: any piece"}
fig, axes = new_figure("The same correct programs, evaluated after two stop rules", cols=2, sharey=True, size=(6.6, 2.8))
for ax, layout in zip(axes[0], ("without a fence", "in a fence")):
    for shift, (by, colour) in zip((-0.2, 0.2), (("sequence", "green"), ("set", "vermilion"))):
        bars = ax.bar([i + shift for i in range(2)], found.loc[(layout, by), ["parses", "passes"]], 0.4, color=OKABE_ITO[colour], label=RULES[by])
        ax.bar_label(bars, fmt="{:.0%}", fontsize=8)
    ax.set_xticks(range(2), ["is Python,\ntaken literally", "passes,\nread by our reader"])
    ax.set_ylim(0, 1.35)
    finish(ax, x=f"answer {layout}", y="share of correct programs", loc="upper center", ncols=2)
fig

# %% [markdown]
# Our reader drops text after a program, including the bare `<`; the original's did not. A program that is cut
# inside a fence is lost for both.
#
# Which pieces cut, and where:

# %%
cuts = pd.Series([until_stop(f"```python\n{task.gold(p)}\n```", "set") for p in problems])
inside = cuts[[not parses(text) or "```" not in text[9:] for text in cuts]]
print(inside.str.strip().str[-1:].replace({"d": "end"}).value_counts().to_dict(), "in", len(inside), "programs, such as:\n")
print(*inside.head(3), sep="\n\n---\n")

# %% [markdown]
# ## See the instrument report it
#
# The reference-solution check scores correct answers; with a sampler in between it gives this table. And
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
# The sampler matches sequences; bare ids, which would mean a set, are an error:

# %%
try:
    generate.sample(model, [prompts["a pipe"]], max_new_tokens=4, stop=sorted(pieces))
    message = ""
except TypeError as error:
    message = f"{type(error).__name__}: {error}"
print(message)

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | add `"spaces": "```python\ndef smaller(a, b):\n    return a if a < b else b\n```"` to `ANSWERS` | is it cut too? | <details><summary>outcome</summary>yes here: a vocabulary of 1,024 has no token ` <`, so the bare `<` stands alone. With all of GPT-2 the space belongs to the token, and the program survives. The last cell then counts an answer more</details> |
# | `form` `"{}\n"` for the layout `without a fence` | does a line end after the program save it from the literal reader? | <details><summary>outcome</summary>no: the bare `<` follows on its own line and is no Python either</details> |
#
# The last cell asserts the Result.

# %%
assert by_sequence["text"].to_list() == list(ANSWERS.values())
assert by_set["last token"].to_list() == ["<", "end", "|", "<"] and ended == {"sequence": 0.0, "set": 1.0}
assert (found.xs("sequence", level="stop")[["parses", "passes"]] == 1).all().all()
bare, fenced = found.loc[("without a fence", "set")].round(3), found.loc[("in a fence", "set")].round(3)
assert bare["parses"] == 0.01 and bare["passes"] == 0.967 and fenced["cut"] == 0.037 and fenced["passes"] == 0.963
assert len(inside) == 11 and message.startswith("TypeError")
