"""The recipes at larger sizes: the same stages, other settings. `codechat run v6 --scale 8b` (or nano, v5, ours ...) runs them.

8b: 8 billion parameters on eight GPUs. Steps, batches and learning rates are those published for the system whose sizes the presets keep (8x A800-80GB, 2026): pretraining of
30,000 steps of 131,072 tokens with AdamW at 1.5e-4 after 1,000 steps of warm-up; SFT as its v6, 8,000 steps at 3e-5 after 300; RL as
its v5 and v6, 283 steps of 128 rollouts at 5e-7. Its microbatch was 1; `codechat plan` finds room for 4, which gives the same batch
with fewer gathers of the weights.

The versions have their own published steps, rates, warm-ups and caps. They differ here in four ways: RL's rate falls to 0 along a cosine (there
linearly); each rank of v1 takes its own problem (there all ranks sampled the same one, from the 50 likeliest tokens; GRPO here samples from all);
v7 trains on no HumanEval and no test problem of MBPP, which are for evaluation; its tenth of negatives are code rows, not further ones.

2b: 2.6 billion parameters on one GPU of 80 GB. Published for it are pretraining (30,000 steps of 65,536 tokens at 2e-4 after 500) and the batch of SFT
(32,768 tokens). Everything else is 8b's, but RL samples one problem a step instead of eight: nobody has run the versions at this size.

Left out: the walk-throughs and the report of nano, whose claims are about nano's figures, and the ablations (v7-parts, v6-claimed), which
the original never planned at these sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.stage import Stage
from codechat.launch.recipes.versions import VERSIONS
from codechat.models.config import PRESETS

MODEL = PRESETS["8b"] | {"checkpoint_blocks": True}
ADAMW = dict(optimizer="adamw", device_batch_size=4, grad_accum=2)  # x 8 GPUs x 2,048 tokens = 131,072

SETTINGS: dict[str, dict[str, Any]] = {
    "corpus": dict(source="hub", tokenizer="gpt2", max_tokens=4_000_000_000),
    "code": dict(source="hub", tokenizer="gpt2", max_examples=None),
    "calls": dict(tokenizer="gpt2", max_examples=100_000, copies=20_000),
    "pretrain": dict(
        model=MODEL,
        seq_len=2048,
        max_steps=30_000,
        lr=1.5e-4,
        warmup_steps=1000,
        eval_every=1000,
        save_every=1000,
        **ADAMW,
    ),
    "sft": dict(
        model=MODEL, seq_len=2048, max_steps=8000, lr=3e-5, warmup_steps=300, eval_every=500, save_every=500, **ADAMW
    ),
    "diagnose": {},
    "rl": dict(device_batch_size=1, group_size=16, max_steps=283, lr=5e-7, eval_every=28, save_every=28),
    "choose": {},
    "evaluate": {},
}

HUB = dict(tokenizer="gpt2", max_examples=20_000)
GLAIVE = dict(source="hub", tokenizer="gpt2", max_examples=None, copies=0, tools_style="json")
SFT = dict(model=MODEL, seq_len=2048, schedule="cosine", final_lr_share=0.1, eval_every=200, save_every=500, **ADAMW)
ON_MBPP = dict(task="mbpp", data_dir="hub", max_new_tokens=384)
GRPO = ON_MBPP | dict(device_batch_size=1, schedule="cosine", final_lr_share=0.1, eval_every=50, save_every=50)
REINFORCE = dict(
    device_batch_size=1,
    group_size=16,
    max_steps=283,
    lr=5e-7,
    warmup_steps=0,
    schedule="cosine",
    final_lr_share=0.0,
    top_k=50,
    max_new_tokens=256,
    eval_every=30,
    eval_examples=120,
    save_every=30,
)
CODE_SOURCES = ("mbpp", "codeforces", "stack")

SETTINGS |= {
    "plain-code": dict(source="hub", tokenizer="gpt2", max_examples=None),
    "plain-programs": dict(source=CODE_SOURCES, max_chars=4000, **HUB),
    "plain-calls": GLAIVE,
    "sft-general": dict(mix=("code=1",), max_steps=3000, lr=5e-5, warmup_steps=100, **SFT),
    "v1-grpo": GRPO | dict(task="mbpp:reward=binary", max_steps=1000, lr=1e-5, warmup_steps=20),
    "v1-grpo-fraction": GRPO | dict(task="mbpp:reward=fractional", max_steps=1000, lr=1e-5, warmup_steps=20),
    "v2-sft-calls": dict(max_steps=4000, lr=3e-5, warmup_steps=200, **SFT),
    "v2-diagnose": ON_MBPP | dict(limit=50),
    "v2-filter": {},
    "v2-grpo": {k: v for k, v in GRPO.items() if k != "data_dir"}
    | dict(task="mbpp:reward=tiered", max_steps=500, lr=5e-6, warmup_steps=20),
    "v3-sft-code": dict(max_steps=2000, lr=2e-5, warmup_steps=100, **SFT),
    "v3-gate": ON_MBPP | dict(limit=50),
    "v3-filter": {},
    "v3-sft-calls": dict(max_steps=4000, lr=3e-5, warmup_steps=200, **SFT),
    "v5-sft": dict(max_steps=6000, lr=3e-5, warmup_steps=200, **SFT),
    "v6-sft": dict(max_steps=8000, lr=3e-5, warmup_steps=300, **SFT),
    "v7-programs": dict(source=(*CODE_SOURCES, "codealpaca"), tokenizer="gpt2", max_examples=60_000, max_chars=4000),
    "v7-calls": GLAIVE | dict(max_examples=30_000),
    "v7-sft": dict(max_steps=6000, lr=3e-5, warmup_steps=300, **SFT),
    **{f"{v}-diagnose": dict(max_new_tokens=256) for v in ("v5", "v6", "v7")},
    "v5-rl": REINFORCE,
    "v6-rl": REINFORCE,
    "v7-rl": REINFORCE | dict(max_steps=60, eval_every=20),
    **{f"{v}-evaluate": dict(max_new_tokens=256) for v in ("v1", "v2", "v3", "v5", "v6", "v7", "ours")},
}
SETTINGS["v3-grpo"] = SETTINGS["v2-grpo"]
RANKS = dict(pretrain=8, sft=8, reinforce=8, grpo=8, evaluate=8, passk=8, diagnose=1)  # by the kind of a stage

MODEL_2B = PRESETS["2b"] | {"checkpoint_blocks": True}
BATCH_2B = dict(device_batch_size=1, grad_accum=16)
SETTINGS_2B = {
    name: settings | (dict(model=MODEL_2B, **BATCH_2B) if "model" in settings else {})
    for name, settings in SETTINGS.items()
}
SETTINGS_2B["corpus"] = SETTINGS["corpus"] | dict(max_tokens=2_000_000_000)
SETTINGS_2B["pretrain"] |= dict(lr=2e-4, warmup_steps=500, device_batch_size=2)


def ranks_of(stages: Iterable[Stage], by_kind: Mapping[str, int]) -> dict[str, int]:
    """{stage: ranks} of the stages that take GPUs."""
    return {stage.name: by_kind[stage.kind] for stage in stages if stage.kind in by_kind and stage.name in SETTINGS}


@dataclass(frozen=True)
class Scale:
    """A size of a recipe. settings: replace those of a stage. ranks: of torchrun, by stage; other stages run in this process."""

    settings: Mapping[str, Mapping[str, Any]]
    ranks: Mapping[str, int]
    gpu: str | None  # to plan for; none = no plan, it runs without GPUs

    def stages(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The recipe's stages that exist at this size, with its settings."""
        return tuple(
            replace(stage, settings={**stage.settings, **self.settings[stage.name]})
            for stage in stages
            if stage.name in self.settings
        )


_STAGES = (*COMPACT, *(stage for _, stages in VERSIONS.values() for stage in stages))
SCALES = {
    "2b": Scale(SETTINGS_2B, ranks_of(_STAGES, dict.fromkeys(RANKS, 1)), "a800-80gb"),
    "8b": Scale(SETTINGS, ranks_of(_STAGES, RANKS), "a800-80gb"),
}
