"""The scaling recipe: five model sizes at two equal budgets of compute, for a law of loss over size and tokens.

Every run spends BUDGETS FLOPs (`GPTConfig.flops_per_token`, with the head and attention), so a larger model sees fewer tokens. Corpus, tokenizer,
sequence length, learning rates and validation are nano's; nano's own pretraining, at twelve times the larger budget, is a held-out point of the law.
The batch is a quarter of nano's: the smaller budget would end after ten of its steps.

Left out: learning rates tuned per size, and repeated seeds; the scatter of the points is part of the law's residuals.
"""

from __future__ import annotations

from typing import Any

from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.nano import MODEL, RATES, TOKENIZER
from codechat.launch.recipes.stage import Stage
from codechat.models.config import GPTConfig

BUDGETS = {"low": 1e12, "high": 2e12}  # FLOPs
# depth, width, heads; in the order in which they are run
SHAPES = {"nano": (4, 192, 3), "d2x64": (2, 64, 1), "d2x128": (2, 128, 2), "d4x256": (4, 256, 4), "d2x32": (2, 32, 1)}
LENGTH, BATCH = 256, 4


def steps_of(model: dict[str, int], budget: float) -> int:
    """Optimizer steps that spend the budget."""
    return round(
        budget
        / (GPTConfig(**model, vocab_size=int(TOKENIZER.partition(":")[2])).flops_per_token(LENGTH) * LENGTH * BATCH)
    )


def _stage(size: str, budget: str) -> Stage:
    depth, width, heads = SHAPES[size]
    model = MODEL | dict(depth=depth, n_embd=width, n_head=heads)
    steps = steps_of(model, BUDGETS[budget])
    settings: dict[str, Any] = dict(
        data_dir="{corpus}",
        model=model,
        seq_len=LENGTH,
        device_batch_size=BATCH,
        max_steps=steps,
        warmup_steps=max(5, steps // 20),
        **RATES,
        eval_every=0,
        save_every=0,
        log_every=max(1, steps // 60),
    )
    return Stage(
        name=f"{size}-{budget}",
        about=f"{size}, {steps} steps: {BUDGETS[budget]:.0e} FLOPs",
        needs=("corpus",),
        kind="pretrain",
        settings=settings,
    )


SCALING = (COMPACT[0], *(_stage(size, budget) for budget in BUDGETS for size in SHAPES))
