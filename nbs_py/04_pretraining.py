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
# # Pretraining: unseen Python in less than two bits a byte
#
# **Question.** What does a small model learn from a million tokens of Python, in a unit that models
# with other tokenizers share, and what did it cost?
#
# **Result.** After a fraction of one pass over the corpus, the model needs less than 2 bits for a byte of
# Python files that it never saw. zlib needs more for the same bytes, although it reads whole files and the
# model a window of a few hundred bytes. The figures of the run are in the first table.
#
# **Also.** The loss per token of an equally good model depends on its tokenizer; bits per byte do not.
#
# **Runs/needs.** Recipe nano's `pretrain` (frozen rows; `source="nano"` reads the run that `make lab` made on this
# machine). Seconds on one core.
#
# Previous: [03 data](03_data.ipynb) · Next: [05 sft](05_sft.ipynb)

# %% tags=["parameters"]
source = "frozen"
seed = 0
freeze = False  # True: keep what the checkpoints write and the compressors' sizes in the frozen rows

# %%
import argparse
import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import lzma
import math
import os
import statistics
import tarfile
import tempfile
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from codechat import pretrain
from codechat.data import corpus_writer
from codechat.distributed import gpu_specs, hardware
from codechat.models import optim
from codechat.models.config import PRESETS, GPTConfig
from codechat.models.generate import sample
from codechat.models.gpt import GPT
from codechat.models.loading import load_model
from codechat.runs import paths
from codechat.text import tokenizer
from codechat_lab.instruments.loss_exercises import check_cases
from codechat_lab.reports import plots, run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure


# %%
def known(kind: type, settings: dict) -> dict:
    """The settings that a class still has: a committed run may have others."""
    return {name: value for name, value in settings.items() if name in kind.__dataclass_fields__}


asked = known(pretrain.PretrainConfig, run_frames.settings(source, "pretrain"))
cfg = pretrain.PretrainConfig(**asked | {"model": GPTConfig(**known(GPTConfig, asked["model"]))})

# %%
os.environ["CODECHAT_DTYPE"] = "float32"  # in bfloat16 the sums below would agree to three digits only
metrics, evals = (run_frames.stage_rows(source, "pretrain", table) for table in ("metrics", "evals"))
run, manifest = metrics["run"].iloc[0], run_frames.manifest(source, "corpus")
tok = tokenizer.load(manifest["tokenizer"])
uniform = math.log(cfg.model.padded_vocab)
first, last, seen = evals.iloc[0], evals.iloc[-1], int(metrics["tokens"].max())
pd.Series({
    "bits per byte of unseen files, untrained": f"{first.val_bpb:.2f}",
    "bits per byte of unseen files, trained": f"{last.val_bpb:.2f} ({last.val_bpb / 8:.0%} of their size)",
    "tokens seen": f"{seen:,}, {seen / manifest['train_tokens']:.2f} passes over the corpus",
    "model FLOPs over the measured peak (MFU), median": f"{metrics['mfu'].median():.0%}",
}, name=run).to_frame()

# %% [markdown]
# ## What was trained, and on what
#
# Each window is sampled from files of the standard library and installed packages. The run sees a fraction of
# them once, so its training loss is also a loss on unseen text. Whole files are held out for validation.

# %%
facts = {
    "parameters": f"{cfg.model.n_params:,}",
    "layers x width x heads": f"{cfg.model.depth} x {cfg.model.n_embd} x {cfg.model.n_head}",
    "training text": f"{manifest['train_documents']:,} files, {manifest['train_tokens']:,} tokens",
    "validation text": f"{manifest['val_documents']:,} files, {manifest['val_tokens']:,} tokens",
    "bytes per token": f"{manifest['val_bytes'] / manifest['val_tokens']:.2f}",
    "a step": f"{cfg.device_batch_size} windows x {cfg.length} tokens",
    "steps": f"{cfg.max_steps}",
}
pd.Series(facts, name=run).to_frame()

# %% [markdown]
# ## The curve
#
# The loss is the mean of $-\ln p(x_t \mid x_{<t})$. An uninformed model should start at $\ln V$, the log of its
# vocabulary. The loss falls steeply while it learns token frequencies, then slowly.

# %%
plots.pretraining(run, metrics, evals)

# %%
print(f"a uniform guess costs {uniform:.2f} nats per token")
evals[["step", "val_loss", "val_bpb"]].set_index("step").round(3)

# %% [markdown]
# ## What it writes
#
# Each saved checkpoint continues three beginnings at temperature 0.8. **Predict before you read on:
# what comes first, names that make sense or the form of Python?**

# %%
BEGINNINGS = ("def is_even(n):\n", "class Stack:\n    def __init__(self", "for name in sorted(")


def continuations(ref):
    """What a checkpoint writes after each beginning."""
    drawn = sample(load_model(ref).model, [tok.encode(text) for text in BEGINNINGS], max_new_tokens=40, temperature=0.8, seed=seed)
    return [tok.decode(list(one.ids)) for one in drawn]


# %%
texts_file, sizes_file = (run_frames.frozen_dir() / f"{name}.json" for name in ("texts", "compressors"))
kept = source == run_frames.FROZEN
texts = json.loads(texts_file.read_text()) if kept else {str(step): continuations(f"{run}@{step}") for step in evals["step"][1:].astype(int)}
for step, found in texts.items():
    print(f"---------------- after {step} steps")
    print("\n\n".join(beginning + text.rstrip() for beginning, text in zip(BEGINNINGS, found)))

# %% [markdown]
# ### Why it starts below a uniform guess
#
# An untrained model prefers to repeat. Its blocks add nothing yet and the head is the embedding, so the
# likeliest next token is the current one. Python does repeat tokens, such as runs of spaces. Its loss on tokens
# that repeat, and on others:

# %%
modules = (argparse, difflib, statistics, tarfile, textwrap)
files = [Path(module.__file__).read_text(encoding="utf-8") for module in modules]
ids = torch.tensor(tok.encode("".join(files)))[: 16 * cfg.length + 1]
untrained = GPT(cfg.model, seed=seed)
with torch.no_grad():
    inputs, targets = (part.view(16, cfg.length) for part in (ids[:-1], ids[1:]))
    nats = untrained.loss(inputs, targets, reduction="none")  # (16, T)
again = targets == inputs
start = pd.DataFrame({"tokens": [int(again.sum()), int((~again).sum())],
                      "loss": [float(nats[again].mean()), float(nats[~again].mean())]},
                     index=["the same token again", "another token"])
start.loc["all"] = [again.numel(), float(nats.mean())]
start.astype({"tokens": int}).round(2)

# %% [markdown]
# ## Why bits per byte
#
# Losses per token do not compare across tokenizers: larger pieces are fewer, and each is harder to guess. The
# total negative log-likelihood of a text does not depend on the cut:
#
# $$\text{bits per byte} = \frac{-\sum_t \ln p(x_t \mid x_{<t})}{\ln 2 \cdot \text{bytes}}$$
#
# Under three tokenizers an equally good model would have these losses per token:

# %%
text, rows = "".join(files), {}
for spec in ("bytes", "gpt2:4096", "gpt2"):
    other = tokenizer.load(spec)
    per_token = len(text.encode()) / len(other.encode(text))  # bytes
    nats_per_token = last.val_bpb * math.log(2) * per_token
    rows[spec] = other.n_vocab, per_token, last.val_bpb, nats_per_token, math.exp(nats_per_token)
columns = ["ids", "bytes per token", "bits per byte", "loss, nats per token", "perplexity"]
tokenizers = pd.DataFrame(rows, index=columns).T.round(2).astype({"ids": int})
tokenizers

# %% [markdown]
# From scratch: cut validation text into windows, add up $-\log_2 p$ of every token, divide by the bytes that
# those tokens spell. The library's own function must agree, here on the untrained model and a corpus of
# five files.

# %%
with tempfile.TemporaryDirectory() as folder:
    corpus_writer.write_corpus(files, folder, tok)
    with contextlib.redirect_stderr(io.StringIO()):  # the library says its precision on stderr
        library = pretrain.bits_per_byte(untrained, dataclasses.replace(cfg, data_dir=folder, device_batch_size=8, eval_tokens=4096))
    tokens = np.fromfile(Path(folder) / "val_000000.bin", dtype="<u2").astype(np.int64)[: 4096 + 1]
    bits, n_bytes = 0.0, 0
    for start_at in range(0, len(tokens) - 1, cfg.length):
        window = torch.from_numpy(tokens[start_at : start_at + cfg.length + 1])
        with torch.no_grad():
            logprobs = untrained(window[None, :-1])[0].log_softmax(-1)
        bits -= float(logprobs.gather(1, window[1:, None]).double().sum()) / math.log(2)
        n_bytes += sum(len(tok.token_bytes(i)) for i in window[1:].tolist() if i != tok.eot_id)
torch.testing.assert_close(bits / n_bytes, library["val_bpb"], rtol=1e-5, atol=0)
print(f"by hand {bits / n_bytes:.5f}, library {library['val_bpb']:.5f} bits per byte of {n_bytes:,} bytes")

# %%
print(inspect.getsource(pretrain.bits_per_byte))

# %% [markdown]
# ## What bits per byte mean
#
# An arithmetic coder that uses the model's probabilities stores a text in as many bits as its total negative
# log2-likelihood: the loss *is* a file size. So we compare the model with compressors on the same bytes, the run's
# validation text. They read it once as whole files, once in pieces as long as the model's context. (The frozen rows
# hold no text. `compressors.json` keeps this cell's result on the corpus with the same checksum.)

# %%
context = round(cfg.length * manifest["val_bytes"] / manifest["val_tokens"])  # bytes


def compress_validation(folder):
    """Bits per byte of the tokens that an evaluation reads, by two compressors."""
    ids = np.fromfile(Path(folder) / "val_000000.bin", dtype="<u2").astype(int)[1 : cfg.eval_tokens + 1]
    parts = np.split(ids, np.flatnonzero(ids == tok.eot_id))
    texts = [b"".join(tok.token_bytes(i) for i in part.tolist() if i != tok.eot_id) for part in parts]
    sizes = {"zlib, pieces": (zlib.compress, context), "zlib, whole files": (zlib.compress, 10**9), "lzma, whole files": (lzma.compress, 10**9)}
    total = sum(map(len, texts))
    return {name: 8 * sum(len(compress(t[i : i + size])) for t in texts for i in range(0, len(t), size)) / total for name, (compress, size) in sizes.items()}


# %%
(checksum,) = (file["sha256"] for file in manifest["files"] if file["split"] == "val")
by_others = json.loads(sizes_file.read_text())[checksum] if kept else compress_validation(paths.ROOT / cfg.data_dir)
if freeze:
    texts_file.write_text(json.dumps(texts, indent=1) + "\n")
    sizes_file.write_text(json.dumps({checksum: by_others}, indent=1) + "\n")
sizes = {"no compression": 8.0, "untrained model": first.val_bpb, **by_others, "trained model": last.val_bpb}
print(f"pieces and the model's windows: {context} bytes on average")

# %%
fig, axes = new_figure(f"The trained model stores unseen code in {last.val_bpb / 8:.0%} of its bytes")
ax = axes[0, 0]
colours = [OKABE_ITO["blue"] if "model" in name else "#9a9a9a" for name in sizes]
ax.bar_label(ax.barh(list(sizes), list(sizes.values()), color=colours), fmt=" %.2f", fontsize=8)
ax.set_xlim(0, 8.8)
ax.invert_yaxis()
ax.grid(False)
finish(ax, x="bits per byte", y=None)
fig


# %% [markdown]
# ## The learning rate
#
# Warm-up, a long constant part, then a linear decay ("warmup-stable-decay"). The schedule is a pure
# function of the step, so the logged rates must lie on it. A cosine of the same length is drawn beside it.

# %%
def schedule(name, steps):
    options = dict(max_steps=cfg.max_steps, warmup_steps=cfg.warmup_steps, final=cfg.final_lr_share)
    return cfg.lr * np.array([optim.lr_scale(int(step), schedule=name, **options) for step in steps])


# %%
steps, logged = np.arange(cfg.max_steps), metrics["step"].to_numpy() - 1
np.testing.assert_allclose(metrics["lr"], schedule(cfg.schedule, logged), rtol=1e-6)
decay_from = int(steps[schedule(cfg.schedule, steps) == cfg.lr].max())
fig, axes = new_figure(f"After step {decay_from} the learning rate falls")
ax = axes[0, 0]
ax.plot(steps, schedule(cfg.schedule, steps), color=OKABE_ITO["blue"], label=f"{cfg.schedule}, formula")
ax.plot(steps, schedule("cosine", steps), "--", color="#9a9a9a", label="cosine of the same length")
ax.plot(logged, metrics["lr"], "o", markersize=4, color=OKABE_ITO["vermilion"], label="logged")
finish(ax, x="step", y="learning rate")
fig

# %%
print(inspect.getsource(optim.lr_scale))

# %% [markdown]
# The effect of the decay: the fall in bits per byte from one validation to the next, in percent.

# %%
fall = pd.DataFrame({
    "until step": evals["step"][1:].astype(int),
    "lr at the end": [schedule(cfg.schedule, [step - 1])[0] for step in evals["step"][1:]],
    "val_bpb": evals["val_bpb"][1:],
    "fall, %": 100 * (1 - evals["val_bpb"][1:].to_numpy() / evals["val_bpb"][:-1].to_numpy()),
})
fall.set_index("until step").round(4)

# %% [markdown]
# ## What it cost
#
# A token costs 6 FLOPs per weight of a matrix and $12\,L\,D\,T$ for attention ([notebook 02](02_model.ipynb)).
# MFU (model FLOPs utilization) is this cost times tokens per second, over the machine's peak. Without a data
# sheet the peak is measured: the best speed of a large matrix product so far, repeated once a minute.

# %%
flops = cfg.model.flops_per_token(cfg.length)
peak = metrics["tok_per_s"] * flops / metrics["mfu"]
seconds = (metrics["tokens"].diff().fillna(metrics["tokens"].iloc[0]) / metrics["tok_per_s"]).sum()
print(inspect.getsource(hardware.Peak))
pd.Series({
    "FLOPs per token": f"{flops / 1e6:.1f} million",
    "FLOPs of the run": f"{flops * seen / 1e12:.1f} trillion",
    "tokens per second, median": f"{metrics['tok_per_s'].median():,.0f}",
    "peak, best measured": f"{peak.max() / 1e9:.0f} GFLOP/s",
    "MFU, median": f"{metrics['mfu'].median():.0%}",
    "time in training steps": f"{seconds / 60:.1f} minutes",
}, name=run).to_frame()

# %% [markdown]
# What could this machine train? With twenty tokens per parameter, a common budget (Chinchilla), and this run's
# FLOP/s, a preset takes:

# %%
speed, gpus = metrics["tok_per_s"].median() * flops, 8 * 0.4 * gpu_specs.find("h200-141gb").bf16_flops  # FLOP/s
budget = {}
for name in ("nano", "d12", "d20", "8b"):
    shape = GPTConfig(**PRESETS[name])
    total = 20 * shape.n_params * shape.flops_per_token(shape.block_size)
    budget[name] = f"{shape.n_params / 1e6:,.0f}", total, total / speed / 86400, total / gpus / 86400
names = ["M parameters", "FLOPs", "days, this machine", "days, 8 H200 at 40 % MFU"]
budget = pd.DataFrame(budget, index=names).T
budget.map(lambda value: value if isinstance(value, str) else f"{value:.3g}")


# %% [markdown]
# ## Three lines of your own
#
# Convert a loss per token to bits per byte. The three tokenizers above must give the same value.

# %%
def bits_per_byte(nats_per_token, bytes_per_token):
    """-> bits that a byte costs."""
    raise NotImplementedError("yours to fill in")


# %%
cases = [((nats, size), bpb) for size, bpb, nats in (row[1:4] for row in rows.values())]
check_cases(bits_per_byte, *cases, ((math.log(2), 1), 1), ((2 * math.log(2), 4), 0.5))

# %% [markdown]
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | add `"python:4096"` to the three tokenizers | more bytes per token: a higher or a lower loss per token at the same bits per byte? | <details><summary>outcome</summary>higher, in proportion to the bytes per token: 3.58 bytes a token, where `gpt2:4096` has 1.88, so 1.9 times as many nats. The column of bits per byte stays as it is</details> |
# | `seed = 1` | does the untrained model still start below a uniform guess? | <details><summary>outcome</summary>yes: 7.35 nats on these files, a uniform guess 8.33; 4.22 on a token that repeats and 8.39 on others. The cause is its shape (the head is the embedding), not its weights</details> |
#
# The last cell asserts the Result.

# %%
assert 1.2 < last.val_bpb and last.val_bpb < 0.45 * first.val_bpb
assert last.val_bpb < 2
assert not by_others or last.val_bpb < by_others["zlib, whole files"] < by_others["zlib, pieces"] / 1.5
assert first.val_loss < uniform - 0.5
assert start["loss"].iloc[0] < uniform - 2 and abs(start["loss"].iloc[1] - uniform) < 0.2
assert (evals["val_bpb"].diff()[1:] < 0).all(), "a validation was worse than the one before"
assert tokenizers["loss, nats per token"].is_monotonic_increasing
assert 0 < metrics["mfu"].median() and seen < manifest["train_tokens"]
