"""A learning curve of GRPO beside trl's: the same start, prompts, reward and settings; mean reward
of each step, over seeds.

    python -m benchmarks curve                        20 steps, five seeds, on the toy task
    python -m benchmarks curve --vs                   codechat alone
    python -m benchmarks curve --ckpt smollm2 --lr 2e-5 --group-size 8        from a checkpoint

A short GRPO run gives the start, or a checkpoint is, which is exported. trl reads the export,
without the unused padding rows of the vocabulary, which codechat never samples. Its prompts are
the same token ids, and completions have a fixed length. Both sample on their own, so curves can
agree as distributions only: intervals of each step over seeds, and a permutation test of the mean
over all steps. The gradient is compared by computation: codechat's loss on the first batch that
trl sampled must have the norm that trl reports. Bootstrap intervals of five values are too
narrow: they cover 84 %, and those of two equal learners have nothing in common in one step of
twenty. So the overlap stands beside the one that chance gives; use more seeds for a verdict.

Left out: the KL term and several updates of a batch; both are off in trl by default.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import measure, peers
from benchmarks.settings import CurveBench
from codechat import grpo
from codechat.core import config
from codechat.evaluation.intervals import bootstrap_interval
from codechat.formats import exchange
from codechat.models import loading
from codechat.rl import advantages, losses
from codechat.tasks.toy import ToyTask
from codechat.text import chat
from codechat.training.rl_settings import TOY_RUN

START = "bench/curve-start"
DIVISIONS = 252  # all of ten trainings into five and five
Curve = list[float]
NEVER = dict.fromkeys(
    ("diagnose_groups", "eval_every", "save_every", "log_rollouts_every", "warmup_steps"), 0
)


def train_codechat(
    cfg: CurveBench, name: str, steps: int, seed: int, init_from: str | None
) -> Curve:
    """Mean reward of each step."""
    settings = (
        TOY_RUN
        | NEVER
        | dict(lr=cfg.lr, max_steps=steps, seed=seed, init_from=init_from, eval_examples=1)
    )
    if cfg.ckpt:
        settings = {
            name: value
            for name, value in settings.items()
            if name not in ("model", "tokenizer", "tags")
        }
    settings |= dict(
        device_batch_size=cfg.problems,
        group_size=cfg.group_size,
        run_name=name,
        overwrite=True,
    )
    made = config.from_dict(grpo.GRPOConfig, settings)
    return grpo.train(made).metrics()["reward_mean"].tolist()


def train_trl(
    cfg: CurveBench,
    seed: int,
    folder: Path,
    start: loading.LoadedModel,
) -> tuple[Curve, dict[str, Any]]:
    """Mean reward of each step, and {grad_norm, prompts, completions, rewards} of the first."""
    trl, transformers, datasets = map(peers.require, ("trl", "transformers", "datasets"))
    task = ToyTask()
    tok = start.tokenizer
    drawn = [p for _ in range(-(-cfg.problems * cfg.steps // 4)) for p in task.problems("train")]
    ids = [chat.prompt(task.prompt(p), tok, start.tags) for p in drawn]
    rows = {
        "prompt": [" ".join(f"<{i}>" for i in prompt) for prompt in ids],
        "which": list(range(len(drawn))),
    }
    first: dict[str, Any] = {}

    def reward(completion_ids: list[list[int]], which: list[int], **_: Any) -> list[float]:
        texts = [chat.completion_text(completion, tok, start.tags) for completion in completion_ids]
        found = [task.score(drawn[at], text).reward for at, text in zip(which, texts, strict=True)]
        if not first:
            first.update(
                prompts=[ids[at] for at in which], completions=completion_ids, rewards=found
            )
        return found

    how = peers.grpo_config(
        folder / "out",
        seed=seed,
        max_steps=cfg.steps,
        num_generations=cfg.group_size,
        per_device_train_batch_size=cfg.problems * cfg.group_size,
        max_completion_length=TOY_RUN["max_new_tokens"],
        learning_rate=cfg.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="group",
        temperature=1.0,
        shuffle_dataset=False,
        logging_steps=1,
    )
    trainer = trl.GRPOTrainer(
        model=_read_export(folder, start.model.cfg.n_ids),
        reward_funcs=reward,
        args=how,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=peers.word_per_id(start.model.cfg.n_ids),
    )
    trainer.remove_callback(transformers.PrinterCallback)  # a line for each step
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return [row["reward"] for row in logged], first | {"grad_norm": logged[0]["grad_norm"]}


def _read_export(folder: Path, n_ids: int) -> Any:
    """The exported model without padding rows; its generation settings, which stop at ends of
    turns, do not apply here."""
    transformers = peers.require("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder / "hf"), dtype=torch.float32
    )
    model.resize_token_embeddings(n_ids)
    model.generation_config = transformers.GenerationConfig()
    return model


def gradient_norm(cfg: CurveBench, start: loading.LoadedModel, batch: dict[str, Any]) -> float:
    """Of codechat's GRPO loss at the start, on completions that trl sampled."""
    rows = [torch.tensor([p + c]) for p, c in zip(batch["prompts"], batch["completions"])]
    C = len(batch["completions"][0])
    model = start.model.train()
    model.zero_grad()
    logits = [model(ids[:, :-1])[:, -C:, : model.cfg.n_ids].float() for ids in rows]
    chosen = [
        x.log_softmax(-1).gather(-1, ids[:, -C:, None])[..., 0] for x, ids in zip(logits, rows)
    ]
    logprobs = torch.cat(chosen)  # (N, C)
    rewards = torch.tensor(batch["rewards"]).view(-1, cfg.group_size)
    advantage = advantages.group_advantages(rewards, "zscore").view(-1, 1)
    mask = torch.ones_like(logprobs)
    loss = losses.clipped_policy_loss(
        losses.policy_ratio(logprobs, logprobs.detach(), mask), advantage
    )
    weights = losses.token_weights(
        mask.sum(1),
        "sequence",
        n_sequences=len(rows),
        n_tokens=mask.numel(),
        max_tokens=C,
    )
    losses.masked_sum(loss * weights, mask).backward()
    return float(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )


def intervals(curves: Sequence[Curve]) -> list[dict[str, float]]:
    """{value, lo, hi} of each step over seeds."""
    return [bootstrap_interval(step)._asdict() for step in zip(*curves, strict=True)]


def bench(cfg: CurveBench) -> dict[str, Any]:
    """Print the table; returns curves of every seed, their intervals, their difference, and the
    first step's gradients."""
    if not cfg.ckpt:
        train_codechat(cfg, START, cfg.start_steps, 0, None)
    origin = cfg.ckpt or START
    start = loading.load_model(origin)
    curves: dict[str, list[Curve]] = {"codechat": [], **({"trl": []} if cfg.vs else {})}
    gradients = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if cfg.vs:
            exchange.export(exchange.ExportConfig(ckpt=origin, out=folder / "hf", dtype="float32"))
        for seed in measure.turns(cfg.rounds, "seed"):
            curves["codechat"].append(
                train_codechat(cfg, f"bench/curve-{seed}", cfg.steps, seed, origin)
            )
            if cfg.vs:
                curve, first = train_trl(cfg, seed, folder, start)
                curves["trl"].append(curve)
                gradients.append(
                    {"trl": first["grad_norm"], "codechat": gradient_norm(cfg, start, first)}
                )
    found: dict[str, Any] = {
        "curves": curves,
        "intervals": {name: intervals(rows) for name, rows in curves.items()},
    }
    if cfg.vs:
        found |= {
            "gradients": gradients,
            "overlap": _overlap(found["intervals"]),
            "chance": _chance(curves),
        }
        found |= {"difference": _difference(curves)}
    _show(cfg, found)
    return found


def _overlap(rows: dict[str, list[dict[str, float]]]) -> float:
    """Share of the steps in which the two intervals have a value in common."""
    pairs = list(zip(*rows.values(), strict=True))
    return sum(a["lo"] <= b["hi"] and b["lo"] <= a["hi"] for a, b in pairs) / len(pairs)


def _chance(curves: dict[str, list[Curve]]) -> dict[str, float]:
    """The overlap of two contestants that learn alike: its mean over DIVISIONS ways to divide
    the trainings into two groups of these sizes; p: the share of these ways that overlap as
    little as the contestants do. Steps of one training are not independent, and need not be
    here."""
    n = len(curves["codechat"])
    everything = [curve for some in curves.values() for curve in some]
    ways = list(itertools.combinations(range(len(everything)), n))
    # the first is the real one
    ways = [
        ways[0],
        *random.Random(0).sample(ways[1:], min(len(ways), DIVISIONS) - 1),
    ]

    @cache
    def of(chosen: tuple[int, ...]) -> list[dict[str, float]]:
        return intervals([everything[i] for i in chosen])

    rest = [tuple(i for i in range(len(everything)) if i not in chosen) for chosen in ways]
    overlaps = [_overlap({"chosen": of(a), "rest": of(b)}) for a, b in zip(ways, rest, strict=True)]
    return {
        "overlap": sum(overlaps) / len(ways),
        "p": sum(o <= overlaps[0] for o in overlaps) / len(ways),
    }


def _difference(curves: dict[str, list[Curve]]) -> dict[str, float]:
    """Of the mean reward over all steps, codechat less trl; p: the share of all divisions of
    the trainings into two groups of these sizes whose difference is as large (a permutation
    test). A seed means other draws in the other library, so nothing is paired."""
    own, theirs = (
        [sum(curve) / len(curve) for curve in curves[name]] for name in ("codechat", "trl")
    )
    everything = own + theirs

    def gap(chosen: Sequence[float]) -> float:
        return sum(chosen) / len(own) - (sum(everything) - sum(chosen)) / len(theirs)

    gaps = [abs(gap(chosen)) for chosen in itertools.combinations(everything, len(own))]
    return {"value": gap(own), "p": sum(g >= abs(gap(own)) - 1e-12 for g in gaps) / len(gaps)}


def _show(cfg: CurveBench, found: dict[str, Any]) -> None:
    names = list(found["curves"])
    seeds = len(found["curves"]["codechat"])
    title = (
        f"mean reward of each step, {seeds} seeds, {cfg.problems} problems x {cfg.group_size} "
        "completions, 95 % intervals over seeds"
    )
    table = Table("step", *names, title=title)
    for step in range(cfg.steps):
        rows = [found["intervals"][name][step] for name in names]
        table.add_row(
            str(step + 1), *(f"{r['value']:.3f} [{r['lo']:.3f}, {r['hi']:.3f}]" for r in rows)
        )
    console = Console(width=120)
    console.print(table)
    if cfg.vs:
        d = found["difference"]
        chance = found["chance"]
        console.print(
            f"intervals overlap in {found['overlap']:.0%} of the steps; those of "
            f"equal learners in {chance['overlap']:.0%}, p {chance['p']:.2f}"
        )
        console.print(f"mean over steps, codechat - trl: {d['value']:+.4f}, p {d['p']:.2f}")
        for seed, pair in enumerate(found["gradients"]):
            console.print(
                f"seed {seed}: gradient norm of trl's first batch: trl {pair['trl']:.6f}, "
                f"codechat {pair['codechat']:.6f}"
            )
