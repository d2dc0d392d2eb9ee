"""One RL step: sample groups, score them, update. codechat's REINFORCE loop beside trl's GRPOTrainer with beta 0.

    python -m benchmarks rl                           8 problems x 8 completions of 64 tokens
    python -m benchmarks rl --vs                      codechat alone
    python -m benchmarks rl --ckpt smollm2 --max-new-tokens 128 --lora-rank 16 --peer-rows 8       a checkpoint's weights, and peft

Every completion has all its tokens. Both are timed by the step times that they report; set-up, evaluation and the last checkpoint are not counted. The first
steps warm up. MFU: sampling counts a forward pass of each token, learning three.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from benchmarks import measure, peers
from benchmarks.settings import RLBench
from codechat import reinforce
from codechat.distributed import dist, hardware
from codechat.models.config import LORA_TARGETS
from codechat.tasks.toy import CLASSES, ToyTask
from codechat.text.tokenizer import load

RUN_NAME = "bench/rl"
STEPS = 3  # of each training; the last one is timed


def contestants(cfg: RLBench) -> list[measure.Contestant]:
    """codechat first, then trl. Each run trains STEPS steps from new weights; the last step is timed."""
    rollouts = cfg.problems * cfg.group_size
    return [_codechat(cfg, rollouts), *([_trl(cfg, rollouts)] if cfg.vs else [])]


def _codechat(cfg: RLBench, rollouts: int) -> measure.Contestant:
    seconds: list[float] = []
    flops: list[float] = []
    peak, _ = hardware.peak_flops(dist.device(), dist.compute_dtype())  # what the loop's own share is of

    def run() -> None:
        rollout = dict(device_batch_size=cfg.problems, group_size=cfg.group_size, max_new_tokens=cfg.max_new_tokens)
        never = dict.fromkeys(("diagnose_groups", "eval_every", "save_every", "log_rollouts_every"), 0)
        model: dict[str, Any] = dict(task="toy", lora_rank=cfg.lora_rank, lora_targets=LORA_TARGETS)
        model |= dict(init_from=cfg.ckpt) if cfg.ckpt else dict(model=cfg.model, tokenizer="gpt2")
        settings = reinforce.ReinforceConfig(
            run_name=RUN_NAME, overwrite=True, max_steps=STEPS, eval_examples=1, **model, **rollout, **never
        )
        last = reinforce.train(settings).metrics().iloc[-1]
        seconds.append(last["step_s"])
        flops.append(last["mfu"] * peak * last["step_s"] / rollouts)

    return measure.Contestant("codechat reinforce", run, rollouts, lambda: flops[-1], lambda: seconds[-1])


def _trl(cfg: RLBench, rollouts: int) -> measure.Contestant:
    trl, transformers, datasets = map(peers.require, ("trl", "transformers", "datasets"))
    began, seconds = [0.0], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - began[0])

    task, words = ToyTask(), list(CLASSES)
    asked = task.problems("train", limit=cfg.problems * STEPS)
    talks = [task.prompt(problem) for problem in asked]  # a checkpoint has a chat template
    texts = [" ".join([words[i % len(words)]] * 8) for i in range(len(asked))]
    prompts = datasets.Dataset.from_dict({"prompt": talks if cfg.ckpt else texts})
    adapters = peers.lora(cfg.lora_rank) if cfg.lora_rank else None

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [
            task.score(asked[0], said if isinstance(said, str) else said[-1]["content"]).reward for said in completions
        ]

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            how = trl.GRPOConfig(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=cfg.peer_rows or rollouts,
                gradient_accumulation_steps=rollouts // (cfg.peer_rows or rollouts),
                num_generations=cfg.group_size,
                max_completion_length=cfg.max_new_tokens,
                generation_kwargs={"min_new_tokens": cfg.max_new_tokens},
                beta=0.0,
                learning_rate=1e-4,
                report_to=[],
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
                gradient_checkpointing=False,
                use_cpu=dist.device().type == "cpu",
                bf16=str(dist.compute_dtype()) == "torch.bfloat16",
                dataloader_pin_memory=False,
            )
            random = lambda: (peers.huggingface("arcee", cfg.model), _tokenizer(transformers))  # noqa: E731
            model, tokenizer = peers.exported(cfg.ckpt) if cfg.ckpt else random()
            trl.GRPOTrainer(
                model=model,
                peft_config=adapters,
                reward_funcs=reward,
                args=how,
                train_dataset=prompts,
                processing_class=tokenizer,
                callbacks=[Clock()],
            ).train()

    return measure.Contestant("trl GRPOTrainer", run, rollouts, seconds=lambda: seconds[-1])


def _tokenizer(transformers: Any) -> Any:
    """GPT-2's token ids for transformers, whole words only: enough for the prompts, without a download."""
    tokenizers, known = peers.require("tokenizers"), load("gpt2")
    words = {f"<{i}>": i for i in range(known.n_vocab)}
    for word in CLASSES:
        at = known.encode(word)[0]
        words = {word if i == at else text: i for text, i in words.items()}
    words = {("<pad>" if i == known.eot_id else text): i for text, i in words.items()}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<pad>", unk_token="<0>"
    )


def bench(cfg: RLBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    peak = measure.Peak()
    timings = measure.race(contestants(cfg), cfg.rounds, peak)
    what = cfg.ckpt or f"{cfg.model.depth} x {cfg.model.n_embd}, {cfg.model.n_params / 1e6:.1f} M parameters"
    learned = f"adapters of rank {cfg.lora_rank}, " * (cfg.lora_rank > 0)
    title = (
        f"one RL step: {what}, {learned}{cfg.problems} problems x {cfg.group_size} "
        f"completions of {cfg.max_new_tokens} tokens, {str(dist.compute_dtype()).removeprefix('torch.')}"
    )
    measure.show(title, "rollouts", timings)
    print(peak)
    return {"title": title, "timings": measure.rows(timings)} | peak.row()
