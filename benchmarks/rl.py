"""One RL step: sample groups, score them, update. codechat's REINFORCE loop beside trl's GRPOTrainer
with beta 0.

    python -m benchmarks rl                           8 problems x 8 completions of 64 tokens
    python -m benchmarks rl --vs                      codechat alone
    python -m benchmarks rl --ckpt smollm2 --max-new-tokens 128 --lora-rank 16 --peer-rows 8       a
        checkpoint's weights, and peft

Every completion has all its tokens. Both are timed by the step times that they report; set-up,
evaluation and the last checkpoint are not counted. The first
steps warm up. MFU: sampling counts a forward pass of each token, learning three.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure, peers
from benchmarks.settings import RLBench
from codechat import reinforce
from codechat.distributed import hardware, numerics
from codechat.models.config import LORA_TARGETS
from codechat.tasks.toy import ToyTask

RUN_NAME = "bench/rl"
STEPS = 3  # of each training; the last one is timed


def contestants(cfg: RLBench) -> list[measure.Contestant]:
    """codechat first, then trl. Each run trains STEPS steps from new weights; the last step is
    timed."""
    rollouts = cfg.problems * cfg.group_size
    return [_codechat(cfg, rollouts), *([_trl(cfg, rollouts)] if cfg.vs else [])]


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

    def run() -> None:
        at_once = cfg.peer_rows or rollouts
        rows = dict(
            per_device_train_batch_size=at_once, gradient_accumulation_steps=rollouts // at_once
        )
        length = dict(
            max_completion_length=cfg.max_new_tokens,
            generation_kwargs={"min_new_tokens": cfg.max_new_tokens},
        )
        steps = dict(
            max_steps=STEPS,
            num_generations=cfg.group_size,
            learning_rate=1e-4,
            logging_steps=1000,
        )
        if cfg.ckpt:
            model, tokenizer = peers.exported(cfg.ckpt)
        else:
            model = peers.huggingface("arcee", cfg.model)
            tokenizer = peers.word_per_id(cfg.model.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            how = dict(
                args=peers.grpo_config(Path(folder), **rows, **length, **steps), callbacks=[Clock()]
            )
            how |= dict(peft_config=peers.lora(cfg.lora_rank)) if cfg.lora_rank else {}
            data = datasets.Dataset.from_dict({"prompt": prompts})
            trl.GRPOTrainer(
                model, reward, train_dataset=data, processing_class=tokenizer, **how
            ).train()

    return measure.Contestant("trl GRPOTrainer", run, rollouts, seconds=lambda: seconds[-1])


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
