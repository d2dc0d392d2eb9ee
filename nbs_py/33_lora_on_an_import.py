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
# # LoRA on an imported model: what is trained and what stays, checked by five identities
#
# **Question.** A model comes from Hugging Face. Which of its weights does LoRA train, does the merged model compute
# the same function, and does it go back out unchanged?
#
# **Result.** Adapters of rank 8 beside queries, keys, values and outputs are 2.6 % of the weights; all others
# are frozen, and 16 of 20 tensors of the merged model are bit for bit those of the import. Import, merging,
# PEFT's files and the export change no logit by more than $10^{-4}$.
#
# On real weights, SmolLM2's, adapters are as good as all weights for the same minutes: 0.70 and 0.74 of the requests for unseen tools are right, where
# nano has 0.09 ([notebook 35](35_what_a_pretrained_base_buys.ipynb) has the whole comparison).
#
# **Runs/needs.** No runs and no download: a small Qwen3 directory with random weights is made here, to show the mechanics; committed rows of two
# trainings show the quality. Under half a minute on one core.
#
# Previous: [32 your own tools and data](32_your_own_tools_and_data.ipynb) · Next: [34 masks against rl](34_masks_against_rl.ipynb)

# %% tags=["parameters"]
rank = 8
alpha = 16.0
targets = ["qkv", "out"]
steps = 60
seed = 0

# %%
import contextlib
import io
import json
import tempfile
from pathlib import Path

import pandas as pd
import torch

from codechat import sft
from codechat.core.atomic_files import read_rows
from codechat.formats import exchange, hf_format, peft_format
from codechat.models import lora
from codechat.models.config import GPTConfig

# %%
from codechat.models.gpt import GPT
from codechat.models.loading import load_model
from codechat.runs import checkpoint, paths, run
from codechat.text import tokenizer
from codechat_lab.reports import run_frames
from codechat_lab.reports.style import OKABE_ITO, finish, new_figure

run.ROOT = paths.ROOT = folder = Path(tempfile.mkdtemp())  # these runs are temporary
torch.manual_seed(seed)


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


# %% [markdown]
# ## A directory as Hugging Face has it
#
# A gated MLP (SwiGLU) and norms on queries and keys: that is Qwen3. `export` writes what transformers reads. In
# place of this directory you would have one from `codechat download`.

# %%
tok = tokenizer.load("gpt2:1024")
shape = GPTConfig(depth=2, n_embd=64, n_head=4, n_kv_head=2, block_size=128, vocab_size=tok.n_vocab, mlp="swiglu", qk_norm=True)
origin = GPT(shape, seed=seed).eval()
with torch.no_grad():  # new models begin with output projections of zero, which would hide half of the weights
    for weight in origin.parameters():
        weight.add_(0.05 * torch.randn_like(weight))
with run.Run.create("origin", shape, kind="pretrain") as made:
    checkpoint.save(made.path, 0, model=origin, meta={"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": []})

# %%
with quiet():
    exchange.export(exchange.ExportConfig(ckpt="origin", out=folder / "hf", dtype="float32"))
print(*sorted(path.name for path in (folder / "hf").iterdir()))
about = json.loads((folder / "hf" / "config.json").read_text())
print({key: about[key] for key in ("architectures", "hidden_act", "hidden_size", "num_key_value_heads", "tie_word_embeddings")})

# %%
weights = hf_format.read_weights(folder / "hf")
print(*[name for name in weights if "layers.0" in name or "layers" not in name], sep="\n")

# %% [markdown]
# ## Import it
#
# Queries, keys and values are three matrices there and one here. The embedding is shared with the head. Identity 1:
# the imported model has the logits of the one that was exported.

# %%
with quiet():
    exchange.import_model(exchange.ImportConfig(source=folder / "hf", run_name="imported"))
base = load_model("imported")
ids = torch.randint(0, tok.n_vocab, (4, 64))


@torch.no_grad()
def logits(model: GPT) -> torch.Tensor:
    """(B, T, V) of the ids above."""
    return model.eval()(ids)[..., : tok.n_vocab]


apart = {"1. imported, and exported": (logits(base.model) - logits(origin)).abs().max().item()}
print(f"{base.model.cfg.n_params:,} parameters; tags {base.tags!r}; largest difference of logits {apart['1. imported, and exported']:.1e}")

# %% [markdown]
# ## What LoRA trains
#
# A frozen matrix $W \in \mathbb{R}^{m \times n}$ gets two thin ones; only these are trained:
#
# $$h = W x + \frac{\alpha}{r} B A x, \qquad A \in \mathbb{R}^{r \times n},\; B \in \mathbb{R}^{m \times r},\; B = 0 \text{ at the start}$$
#
# That is $r (m + n)$ trained weights instead of $m n$. **Before you read on: with $B = 0$, does $A$ get a
# gradient at the first step?**

# %%
adapted = lora.attach(load_model("imported").model, rank, alpha, targets, seed)
trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
frozen = {name: p for name, p in adapted.named_parameters() if not p.requires_grad}
count = {"trained": sum(p.numel() for p in trained.values()), "frozen": sum(p.numel() for p in frozen.values())}
by_hand = sum(rank * (layer.base.in_features + layer.base.out_features) for _, layer in lora.adapted(adapted))
assert count["trained"] == by_hand
print({**count, "share trained": f"{count['trained'] / sum(count.values()):.1%}"})

# %%
pd.DataFrame([(name, tuple(layer.base.weight.shape), tuple(layer.a.shape), tuple(layer.b.shape)) for name, layer in lora.adapted(adapted)],
             columns=["adapter of", "W", "A", "B"]).set_index("adapter of")

# %% [markdown]
# Identity 2: before the first step the adapted model is the imported one. And the answer to the question above:

# %%
apart["2. with new adapters, and without"] = (logits(adapted) - logits(base.model)).abs().max().item()
adapted.train().loss(ids[:, :-1], ids[:, 1:]).backward()
at_start = {part: max(p.grad.abs().max().item() for name, p in trained.items() if name.endswith(part)) for part in (".a", ".b")}
print("largest gradient at the start: of A {:.1e}, of B {:.1e}".format(at_start[".a"], at_start[".b"]))
assert all(p.grad is None for p in frozen.values())

# %% [markdown]
# $\partial L / \partial A = \frac{\alpha}{r} B^\top (\ldots) = 0$: the first step moves $B$ only.
#
# ## A short fine-tune
#
# A dozen conversations, once with adapters and once with all weights. The loop is `sft.train` in both; `lora_rank`
# is the only difference: steps, data and learning rate are the same.

# %%
data = folder / "data"
data.mkdir()
facts = dict(zip("red green blue black white pink".split(), "apple leaf sea coal snow rose".split()))
rows = [{"messages": [{"role": "user", "content": ask.format(colour)}, {"role": "assistant", "content": f"{thing} is {colour}"}]}
        for colour, thing in facts.items() for ask in ("What is {}?", "Name a thing that is {}.")]
for split, kept in (("train", rows), ("select", rows[:4])):
    (data / f"facts.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))

# %%
common = dict(init_from="imported", tags=base.tags, data_dir=str(data), max_steps=steps, device_batch_size=4, seq_len=128, optimizer="adamw", lr=5e-3,
              eval_every=steps, log_every=5, probe_examples=0, compile=False, seed=seed)
arms = {f"LoRA, rank {rank}": dict(lora_rank=rank, lora_alpha=alpha, lora_targets=tuple(targets)), "all weights": {}}
with quiet():
    runs = {name: sft.train(sft.SFTConfig(run_name=f"arm{i}", **common, **extra)) for i, (name, extra) in enumerate(arms.items())}

# %%
losses = {name: one.metrics().set_index("step")["train_loss"].dropna() for name, one in runs.items()}
fig, axes = new_figure("Beside random weights, adapters learn slowly and all weights fast", size=(6.4, 3.0))
for (name, curve), colour in zip(losses.items(), ("green", "blue")):
    axes[0, 0].plot(curve.index, curve, "o-", color=OKABE_ITO[colour], label=name)
finish(axes[0, 0], x="step", y="training loss, nats per token (n=1)")
fig

# %% [markdown]
# ## What stayed, and what the checkpoint holds
#
# A checkpoint of a LoRA run holds $A$ and $B$ and names the import; reading it gives the merged model,
# $W + \frac{\alpha}{r} B A$. Identity 3: model with adapters and merged model give the same logits. Every matrix without an
# adapter is bitwise what was imported, and every change has at most rank $r$.

# %%
saved = checkpoint.load("arm0", optimizer=False)
lora.load(adapted, saved.adapters)
merged = load_model("arm0").model
apart["3. merged, and with adapters"] = (logits(merged) - logits(adapted)).abs().max().item()
old, new = base.model.state_dict(), merged.state_dict()
changed = {name: new[name] - old[name] for name in old if not torch.equal(old[name], new[name])}
ranks = {name: int(torch.linalg.matrix_rank(delta.double(), rtol=1e-4)) for name, delta in changed.items()}
print(f"{len(old) - len(changed)} of {len(old)} tensors are bitwise those of the import; ranks of the changes:")
pd.Series(ranks, name="rank of the change").to_frame()

# %% [markdown]
# ## Out again: PEFT's files, and a merged directory
#
# Identity 4: the adapters as PEFT stores them (query, key and value have one each, which share $A$), added to a
# fresh import. Identity 5: the merged model, exported and imported once more.

# %%
peft_format.save(*peft_format.of_checkpoint("arm0"), folder / "adapter", base="hf")
peft = peft_format.load(load_model("imported").model, folder / "adapter")
apart["4. PEFT's files on the import, and merged"] = (logits(peft) - logits(merged)).abs().max().item()
with quiet():
    exchange.export(exchange.ExportConfig(ckpt="arm0", out=folder / "merged", dtype="float32"))
    exchange.import_model(exchange.ImportConfig(source=folder / "merged", run_name="back"))
apart["5. merged, exported and imported"] = (logits(load_model("back").model) - logits(merged)).abs().max().item()
size = {name: sum(f.stat().st_size for f in (folder / name).glob("*.safetensors")) for name in ("adapter", "merged")}
print(size, "bytes")
pd.Series(apart, name="largest difference of logits").map("{:.1e}".format).to_frame()

# %% [markdown]
# ## With a real model
#
# SmolLM2-135M-Instruct, recipe `smollm2`'s SFT on two cores for about the same time: all weights (100 steps, 18 minutes), and adapters of
# rank 36 beside every matrix (110 steps, 20 minutes). Right greedily, of the same 500 requests that nano (2.6 M parameters, from scratch) was asked; 95 % intervals over tools, one seed each.

# %%
kept, RUNS = run_frames.frozen_dir(), {"released/nano": "nano, from scratch", "smollm2/sft@100": "SmolLM2, all weights", "smollm2/adapters@110": "SmolLM2, adapters"}
rows = pd.DataFrame([row for name in ("pretrained", "pretrained_lora") for row in read_rows(kept / f"{name}.jsonl") if row["checkpoint"] in RUNS])
rows["cell"] = [f"{row.right:.2f} [{row.lo:.2f}, {row.hi:.2f}]" for row in rows.itertuples()]
real = rows.assign(model=rows["checkpoint"].map(RUNS), requests=rows["stratum"].map(run_frames.STRATA))
real.pivot(index="requests", columns="model", values="cell")[list(RUNS.values())]

# %% [markdown]
# No row separates adapters from all weights. A step takes as long either way on a CPU: what adapters save of the backward pass they spend on small products.
# Both call tools that they never saw, which nano does not. The commands, on 48 rows of your own: two minutes of two
# cores, and the last but one calls `get_weather` for Beijing and says the result.
#
# ```bash
# codechat download smollm2
# codechat import data/hub/smollm2 --run-name smollm2
# codechat data calls --source examples/my_rows.jsonl --out data/mine --tools-style described --probes 0 --preview 3
# codechat sft --init-from smollm2 --data-dir data/mine --seq-len 512 --device-batch-size 4 --probe-examples 0 --lora-rank 8 \
#     --lora-targets qkv out gate up down --optimizer adamw --lr 1e-3 --max-steps 20 --run-name mine
# codechat tools --ckpt mine --tools examples/my_tools.py --user "What is the weather in Beijing?"
# codechat export --ckpt mine --out mine-hf
# ```
#
# ## Try this
#
# | change | question | outcome |
# |---|---|---|
# | `rank = 1` | how many numbers are trained, and what rank have the changes? | <details><summary>outcome</summary>640, and 1; merging moves the logits by 2e-5 instead of 3e-6</details> |
# | `targets = ["qkv", "out", "gate", "up", "down"]` | how many more, and which tensors stay? | <details><summary>outcome</summary>20,480 instead of 5,120; 10 of 20 stay: the embedding and the nine gains of norms</details> |
#
# The last cell asserts the Result.

# %%
exact = [name for name in apart if not name.startswith(("3", "4"))]
assert max(apart.values()) < 1e-4 and all(apart[name] == 0 for name in exact), apart
assert at_start[".a"] == 0 < at_start[".b"]
adapted_names = {f"{name}.weight" for name, _ in lora.adapted(adapted)}
assert changed.keys() == adapted_names and set(ranks.values()) == {rank}
if (rank, targets) == (8, ["qkv", "out"]):
    assert count == {"trained": 5120, "frozen": 192_896} and len(old) - len(changed) == 16
first, last = ({name: curve.iloc[i] for name, curve in losses.items()} for i in (0, -1))
assert all(last[name] < first[name] for name in losses) and last["all weights"] < last[f"LoRA, rank {rank}"]
unseen = rows[rows["stratum"] == "tool"].set_index("checkpoint")
assert unseen["right"].round(2).to_dict() == {"released/nano": 0.09, "smollm2/sft@100": 0.74, "smollm2/adapters@110": 0.70}
both = [rows[rows["checkpoint"] == name].set_index("stratum") for name in ("smollm2/sft@100", "smollm2/adapters@110")]
assert ((both[0]["lo"] <= both[1]["hi"]) & (both[1]["lo"] <= both[0]["hi"])).all() and unseen["lo"].iloc[1:].min() > unseen["hi"].iloc[0]
