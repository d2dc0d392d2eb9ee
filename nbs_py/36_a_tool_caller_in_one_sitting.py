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
# # A tool-caller in one sitting: download, look, SFT, look again, RL, look again
#
# **Question.** SmolLM2-135M-Instruct never calls a tool. What do a few minutes of SFT and of RL on a laptop's CPU change, on the same 120 requests?
#
# RESULT
#
# **Runs/needs.** The rows of one sitting are committed (`reports/frozen/one_sitting.jsonl`): the notebook shows them in seconds and downloads nothing. `live = True` does it again
# with the commands below, in folder `runs/sitting`: 98 MB to download, about an hour of one core without bfloat16.
#
# Previous: [35 what a pretrained base buys](35_what_a_pretrained_base_buys.ipynb)

# %% tags=["parameters"]
live = False

# %%
import subprocess
import sys

import pandas as pd

from codechat import articles, run_frames
from codechat.core.atomic_files import read_rows
from codechat.runs.paths import find_run

# %% [markdown]
# ## The commands
#
# One core in float32, 4,096 tokens a step of SFT, 64 completions a step of RL. Adapters of rank 16 in all matrices.

# %%
LORA = "--lora-rank 16 --lora-alpha 32 --lora-targets qkv out gate up down"
LOOK = "natural --ckpt {} --run-name sitting/natural-{} --overwrite"
SITTING = {
    "as it comes": ["run smollm2 --until calls", LOOK.format("smollm2/pretrained", 0)],
    "24 steps of SFT": [
        "sft --init-from smollm2/pretrained --data-dir data/smollm2/sft --mix calls=0.9 code=0.06 chat=0.04 --run-name sitting/sft --overwrite "
        f"{LORA} --seq-len 512 --device-batch-size 4 --grad-accum 2 --optimizer adamw --lr 0.001 --schedule cosine --warmup-steps 2 --max-steps 24",
        LOOK.format("sitting/sft", 1),
    ],
    "and 6 steps of RL": [
        "reinforce --init-from sitting/sft --task funcall --data-dir data/smollm2/sft --run-name sitting/rl --overwrite "
        f"{LORA} --lr 0.0002 --device-batch-size 8 --group-size 8 --max-steps 6 --warmup-steps 1 --diagnose-groups 16",
        LOOK.format("sitting/rl", 2),
    ],
}
for command in sum(SITTING.values(), []):
    print("codechat", command)
    if live:
        subprocess.run([sys.executable, "-m", "codechat", *command.split()], check=True)

# %%
SHOWN = ["toolbox-04", "toolbox-11", "unfitting-13", "code-04"]
if live:
    runs = {stage: find_run(f"sitting/natural-{i}") for i, stage in enumerate(SITTING)}
    rows = pd.concat(pd.DataFrame(read_rows(run / "natural.jsonl")).assign(stage=stage) for stage, run in runs.items())
else:
    rows = pd.DataFrame(read_rows(run_frames.frozen_dir() / "one_sitting.jsonl"))

# %% [markdown]
# ## Three failures, and what becomes of them

# %%
said = rows[rows["id"].isin(SHOWN)].pivot(index=["id", "request"], columns="stage", values="answer")
articles.table(said.loc[SHOWN, list(SITTING)].reset_index(), {"request": "request"} | {stage: (stage, articles.VERBATIM) for stage in SITTING})

# %% [markdown]
# ## All requests
#
# 60 for a tool on offer, 20 that no offered tool serves, 20 for a program. The requests are not made by the toolbox's templates.

# %%
PARSES = set(rows["verdict"]) - {"not Python", "no code"}
QUESTIONS = {
    "tool and arguments right": ("toolbox", {"right"}),
    "declined where no tool serves": ("unfitting", {"declined"}),
    "programs that parse": ("code", PARSES),
    "programs that pass all hidden tests": ("code", {"passes all tests"}),
}


def counted(stage, kind, verdicts):
    some = rows[(rows["stage"] == stage) & (rows["kind"] == kind)]
    return int(some["verdict"].isin(verdicts).sum()), len(some)


counts = {what: {stage: counted(stage, *how) for stage in SITTING} for what, how in QUESTIONS.items()}
articles.table(
    pd.DataFrame([{"requests": what} | {stage: "{} of {}".format(*n) for stage, n in by.items()} for what, by in counts.items()]),
    {"requests": "requests"} | {stage: stage for stage in SITTING},
)
