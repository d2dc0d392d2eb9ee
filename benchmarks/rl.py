"""One RL step: sample groups, score them, update. codechat's REINFORCE loop beside trl's GRPOTrainer
with beta 0.

    python -m benchmarks rl                           8 problems x 8 completions of 64 tokens
    python -m benchmarks rl --vs                      codechat alone
    python -m benchmarks rl --ckpt smollm2 --max-new-tokens 128 --lora-rank 16 --peer-rows 8       a
        checkpoint's weights, and peft
    python -m benchmarks rl --ckpt smollm2 --vllm PYTHON        and trl with vLLM as its engine,
        colocated, in a process of its own

PYTHON is that of an environment with vLLM's CPU build (see sample --help) and pip install -e '.[bench]'.

Every completion has all its tokens. Both are timed by the step times that they report; set-up,
evaluation and the last checkpoint are not counted. The first
steps warm up. MFU: sampling counts a forward pass of each token, learning three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.settings import RLBench
from codechat import reinforce
from codechat.core import config
from codechat.core.errors import RunError
from codechat.distributed import hardware, numerics
from codechat.models.config import LORA_TARGETS
from codechat.tasks.toy import ToyTask

RUN_NAME = "bench/rl"
STEPS = 3  # of each training; the last one is timed


def contestants(cfg: RLBench) -> list[measure.Contestant]:
    """codechat first, then trl. Each run trains STEPS steps from new weights; the last step is
    timed."""
    rollouts = cfg.problems * cfg.group_size
    made = [_codechat(cfg, rollouts)]
    if cfg.vs:
        made.append(_trl(cfg, rollouts))
    if cfg.vllm is not None:
        made.append(_trl_with_vllm(cfg, rollouts))
    return made


def _codechat(cfg: RLBench, rollouts: int) -> measure.Contestant:
    seconds = list[float]()
    flops = list[float]()

    def run() -> None:
        how: dict[str, Any] = dict(
            run_name=RUN_NAME, overwrite=True, max_steps=STEPS, eval_examples=1, task="toy"
        )
        how |= dict(
            device_batch_size=cfg.problems,
            group_size=cfg.group_size,
            max_new_tokens=cfg.max_new_tokens,
        )
        how |= dict.fromkeys(
            ("diagnose_groups", "eval_every", "save_every", "log_rollouts_every"), 0
        )
        how |= dict(init_from=cfg.ckpt) if cfg.ckpt else dict(model=cfg.model, tokenizer="gpt2")
        settings = reinforce.ReinforceConfig(
            **how, lora_rank=cfg.lora_rank, lora_targets=LORA_TARGETS
        )
        last = reinforce.train(settings).metrics().iloc[-1]
        seconds.append(last["step_s"])
        # what the loop's last share was of
        peak = hardware.peak(hardware.device(), numerics.compute_dtype())
        flops.append(last["mfu"] * peak.flops * last["step_s"] / rollouts)

    return measure.Contestant(
        "codechat reinforce", run, rollouts, lambda: flops[-1], lambda: seconds[-1]
    )


def _trl(cfg: RLBench, rollouts: int) -> measure.Contestant:
    seconds = list[float]()

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(train_trl(cfg, Path(folder)))

    return measure.Contestant("trl GRPOTrainer", run, rollouts, seconds=lambda: seconds[-1])


def _trl_with_vllm(cfg: RLBench, rollouts: int) -> measure.Contestant:
    seconds = list[float]()
    plain = json.dumps(config.plain(replace(cfg, json=None)))
    words = [str(cfg.vllm), "-m", "benchmarks.rl", plain]

    def run() -> None:
        env = peers.vllm_environment()
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=1800)
        if done.returncode:
            raise RunError(f"trl with vLLM failed: {done.stderr.strip().splitlines()[-1:]}")
        seconds.append(float(done.stdout.strip().splitlines()[-1]))

    return measure.Contestant("trl, vLLM", run, rollouts, seconds=lambda: seconds[-1])


def train_trl(cfg: RLBench, folder: Path, *, vllm: bool = False) -> float:
    """Seconds of the last of STEPS steps. folder: empty. vllm: it samples, in this process."""
    trl, transformers, datasets = map(peers.require, ("trl", "transformers", "datasets"))
    began = [0.0]
    seconds = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - began[0])

    task = ToyTask()
    asked = task.problems("train", limit=cfg.problems * STEPS)
    # a checkpoint has a chat template; a random model reads eight numbers, which are ids
    prompts = [
        task.prompt(problem) if cfg.ckpt else f"<{i}> " * 8 for i, problem in enumerate(asked)
    ]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        said = (x if isinstance(x, str) else x[-1]["content"] for x in completions)
        return [task.score(asked[0], text).reward for text in said]

    rollouts = cfg.problems * cfg.group_size
    at_once = cfg.peer_rows or rollouts
    rows = dict(
        per_device_train_batch_size=at_once, gradient_accumulation_steps=rollouts // at_once
    )
    least = "min_tokens" if vllm else "min_new_tokens"
    length = dict(
        max_completion_length=cfg.max_new_tokens,
        generation_kwargs={least: cfg.max_new_tokens},
    )
    steps = dict(
        max_steps=STEPS,
        num_generations=cfg.group_size,
        learning_rate=1e-4,
        logging_steps=1000,
        use_vllm=vllm,
    )
    if cfg.ckpt:
        # vLLM reads the files, in their dtype
        written = numerics.compute_dtype() if vllm else torch.float32
        model, tokenizer = peers.loaded(peers.export(cfg.ckpt, folder, written), torch.float32)
    else:
        model = peers.huggingface("arcee", cfg.model)
        tokenizer = peers.word_per_id(cfg.model.vocab_size)
    if vllm:
        _hand_over_by_vllm()
    how = dict(args=peers.grpo_config(folder / "run", **rows, **length, **steps))
    how |= dict(peft_config=peers.lora(cfg.lora_rank)) if cfg.lora_rank else {}
    data = datasets.Dataset.from_dict({"prompt": prompts})
    trainer = trl.GRPOTrainer(
        model, reward, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()], **how
    )
    trainer.train()
    return seconds[-1]


def _hand_over_by_vllm() -> None:
    """Before each sampling trl loads the weights into vLLM's model, whose CPU build has packed and
    dropped them. vLLM's own way packs them anew."""

    def sync_weights(self: Any) -> None:
        # merged weights are there only until the next one is asked for
        weights = ((name, weight.clone()) for name, weight in self._iter_named_params())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    peers.require("trl.generation.vllm_generation").VLLMGeneration.sync_weights = sync_weights


def bench(cfg: RLBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    peak = measure.Peak()
    timings = measure.race(contestants(cfg), cfg.rounds, peak)
    what = (
        cfg.ckpt
        or f"{cfg.model.depth} x {cfg.model.n_embd}, {cfg.model.n_params / 1e6:.1f} M parameters"
    )
    learned = f"adapters of rank {cfg.lora_rank}, " * (cfg.lora_rank > 0)
    rollouts = (
        f"{cfg.problems} problems x {cfg.group_size} completions of {cfg.max_new_tokens} tokens"
    )
    title = f"one RL step: {what}, {learned}{rollouts}, {measure.dtype()}"
    measure.show(title, "rollouts", timings)
    print(peak)
    return {"title": title, "timings": measure.rows(timings)} | peak.row()


def _train_here(plain: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cfg = config.from_dict(RLBench, json.loads(plain))
        print(train_trl(cfg, Path(folder), vllm=True))


if __name__ == "__main__":
    _train_here(*sys.argv[1:])
