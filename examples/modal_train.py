"""Train at modal.com: one loop under torchrun on one machine there; runs are kept on the volume `codechat-runs`.

modal run --detach examples/modal_train.py --words "pretrain --preset d20 --run-name mine"
GPU=H100:2 modal run --detach examples/modal_train.py --words "grpo --init-from base --task funcall --run-name mine --track wandb"

The image holds the checkout around this file with its prepared data/, whichever folder `modal` is called from. Started again with --resume in its
words, a run continues. `--track wandb` takes its key from a secret of that name, with WANDB=1 before `modal run`.
"""

import os
import shlex
import subprocess
from pathlib import Path

import modal

GPU = os.environ.get("GPU", "H100:8")
HERE = Path(__file__).resolve().parents[1]
app = modal.App("codechat")
image = (
    modal.Image.debian_slim(python_version="3.11")
    .add_local_dir(
        HERE, "/codechat", copy=True, ignore=[".git", ".venv", ".*_cache", "runs", "**/__pycache__"]
    )
    .run_commands("pip install /codechat wandb")
    .workdir("/codechat")
    .env({"GPU": GPU})
)
runs = modal.Volume.from_name("codechat-runs", create_if_missing=True)
secrets = [modal.Secret.from_name("wandb")] if os.environ.get("WANDB") else []


@app.function(
    image=image, gpu=GPU, volumes={"/codechat/runs": runs}, secrets=secrets, timeout=24 * 3600
)
def train(words: list[str]) -> None:
    """The words of `codechat LOOP`, on every GPU of this machine."""
    ranks = GPU.partition(":")[2] or "1"
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", ranks, "-m", "codechat", *words]
    try:
        subprocess.run(torchrun, check=True)
    finally:
        runs.commit()


@app.local_entrypoint()
def main(words: str) -> None:
    train.remote(shlex.split(words))
