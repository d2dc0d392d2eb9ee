"""The original project's versions v1 to v7 and ours as recipes, over nano's corpus, pretraining and test problems. Settings only.

Each version answers the failure of the one before; there was no v4. Runs and data lie beside nano's (runs/nano, data/nano) under the version's
name, so that shared stages run once: nano's corpus, pretraining and test data, the general SFT, the plain data.

Steps are the published ones divided by 25 (3,000 of general SFT are 120). Learning rates are nano's own in the published ratio: a second SFT
takes 0.6 of the first one's. Turn tags are plain text, as in the original; ours are reserved ids. Where nano differs:

- the general SFT has copying drills: without them a model of 2.6 million parameters copies no argument, and every later skill needs that;
- code problems are `micro`, calls are the toolbox's; at 8b they are MBPP and glaive's (scales);
- v7's negatives are a tenth of the code rows with tools in front, not further rows; its functions are those of v6, not five times as many.

Calls are paid and judged by the published staircase, those of `ours` too.

Every version ends in VERSION-evaluate, with the same settings, on nano's test data: calls, behaviour in all cells, held-out loss per domain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codechat.launch.recipes.compact import COMPACT
from codechat.launch.recipes.nano import TOKENIZER
from codechat.launch.recipes.stage import Stage

SEVERAL = ("calls=1.2", "programs=1")  # v7's mix: code with negatives to calls as 1 to 1.2, in supervised tokens
SECOND = dict(lr=1.8e-3, muon_lr=0.012)  # a second SFT: 3e-5 where the first had 5e-5
TOKENS = 80  # longest completion: tags in plain text take some more
CALLS = "funcall:staircase=published"  # the original's reward
EVALUATION = dict(
    task=CALLS,
    data_dir="{calls}",
    split=("test",),
    limit=200,
    n=8,
    probe_examples=64,
    heldout_examples=150,
    max_new_tokens=TOKENS,
)
PREPARED = dict(source="embedded", tokenizer=TOKENIZER)
ANCESTORS = tuple(stage for stage in COMPACT if stage.name in ("corpus", "code", "calls", "pretrain"))


def data(name: str, neutral: float = 0.0, negatives: float = 0.0, general: bool = False) -> tuple[Stage, ...]:
    """Programs and calls in {data}/NAME; `general` adds code questions, chat and copying drills."""
    out = "{data}/" + name
    shares = {"neutral system prompts": neutral, "negatives": negatives}
    listed = ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share)
    code = Stage(
        name=f"{name}-code",
        about="code questions and chat, without system prompts",
        kind="data.sft",
        out=out,
        settings=PREPARED | dict(max_examples=4000, neutral_share=0.0, negatives_share=0.0),
    )
    programs = Stage(
        name=f"{name}-programs",
        about=f"functions to write{': ' + listed if listed else ', without system prompts'}",
        kind="data.code",
        out=out,
        needs=(code.name,) if general else (),
        settings=PREPARED
        | dict(
            source=("embedded",), max_examples=4000, max_chars=450, neutral_share=neutral, negatives_share=negatives
        ),
    )
    calls = Stage(
        name=f"{name}-calls",
        about="calls: one answers every request",
        kind="data.calls",
        out=out,
        needs=(programs.name,),
        settings=PREPARED
        | dict(levels=(1, 1, 1, 2, 3), copies=8000 if general else 0, negatives_share=0.0, no_call_share=0.0),
    )
    return (code, programs, calls) if general else (programs, calls)


def sft(
    name: str,
    about: str,
    base: str,
    where: str,
    mix: tuple[str, ...],
    steps: int,
    *,
    warmup: int,
    seeded: bool = True,
    **more: Any,
) -> Stage:
    """SFT of the stage `base` on the data in {data}/WHERE."""
    settings = dict(
        init_from=f"{{{base}}}",
        data_dir=f"{{{where}-calls}}",
        tags="text",
        mix=mix,
        seq_len=512,
        device_batch_size=8,
        max_steps=steps,
        warmup_steps=warmup,
        eval_every=40,
        save_every=80,
    )
    needs = (base, f"{where}-calls")
    return Stage(name=name, about=about, kind="sft", needs=needs, seeded=seeded, settings=settings | SECOND | more)


def evaluation(version: str, *ckpt: str, needs: tuple[str, ...] = ()) -> Stage:
    """ckpt: runs by the names of their stages, such as "{rl}" or "{rl}@best"."""
    return Stage(
        name=f"{version}-evaluate",
        about="calls, behaviour and held-out loss on test, with the same settings for all versions",
        needs=(*needs, *(ref[1 : ref.index("}")] for ref in ckpt), "code", "calls"),
        seeded=True,
        kind="evaluate",
        settings=dict(ckpt=ckpt, **EVALUATION),
    )


GENERAL = sft(
    "sft-general",
    "general SFT: code questions and chat, and the copying drills that nano needs",
    "pretrain",
    "plain",
    ("code=0.5", "copy=0.45", "chat=0.05"),
    120,
    warmup=4,
    seeded=False,
    lr=3e-3,
    muon_lr=0.02,
)
COMMON = (*ANCESTORS, *data("plain", general=True), GENERAL)


# ---- code problems: v1 to v3


def grpo(
    name: str, about: str, *, reward: str, steps: int, group_size: int, needs: tuple[str, ...], **more: Any
) -> Stage:
    """GRPO on code problems from the general SFT, as in the original: KL in the loss by the k1 estimator, whatever diagnose says."""
    settings = dict(
        init_from="{sft-general}",
        task=f"micro:reward={reward}",
        device_batch_size=8,
        group_size=group_size,
        max_steps=steps,
        kl_coef=0.02,
        kl_kind="k1",
        kl_in="loss",
        temperature=0.9,
        max_new_tokens=96,
        warmup_steps=2,
        eval_every=20,
        eval_examples=32,
        save_every=20,
        allow_dead=True,
        dead_patience=1000,
    )
    return Stage(name=name, about=about, kind="grpo", seeded=True, needs=needs, settings=settings | more)


def code_rl(version: str, base: str, **gate: float) -> tuple[Stage, ...]:
    """Diagnosis of a base on code problems, the filter by pass rate, and GRPO on what is left, if anything is."""
    judged, kept = f"{version}-{'gate' if gate else 'diagnose'}", f"{version}-filter"
    diagnosis = Stage(
        name=judged,
        about="gate: parseable >= 50 %, pass@8 >= 10 %" if gate else "pass@8 of the general SFT on code problems",
        kind="passk",
        needs=(base,),
        settings=dict(ckpt=f"{{{base}}}", task="micro", limit=100, k=8, max_new_tokens=96, **gate),
    )
    filtered = Stage(
        name=kept,
        about="keep problems with a pass rate from 0.05 to 0.95, else with a tiered mean from 0.1",
        kind="filter",
        needs=(judged,),
        out="{data}/" + version + "-kept",
        settings=dict(rates=f"{{{judged}}}", window=(0.05, 0.95), min_tiered=0.1, allow_empty=True),
    )
    trained = grpo(
        f"{version}-grpo",
        "GRPO on what the filter left: tiered reward, group 8",
        reward="tiered",
        steps=20,
        group_size=8,
        lr=1.5e-4,
        needs=(kept, base),
        init_from=f"{{{base}}}",
        data_dir=f"{{{kept}}}",
    )
    return diagnosis, filtered, replace(trained, when=f"{{{kept}}}/*.train.jsonl")


def v1_grpo(name: str, about: str, reward: str) -> Stage:
    return grpo(name, about, reward=reward, steps=20, group_size=4, lr=3e-4, needs=("sft-general",))


V1 = (
    *COMMON,
    v1_grpo("v1-grpo", "GRPO on code problems, all asserts or nothing: reward 0", "binary"),
    v1_grpo("v1-grpo-fraction", "the same with the share of asserts, as the code of that date scored", "fractional"),
    evaluation("v1", "{sft-general}", "{v1-grpo}", "{v1-grpo-fraction}"),
)

V2 = (
    *COMMON,
    sft("v2-sft-calls", "SFT on calls alone", "sft-general", "plain", ("calls=1",), 160, warmup=8),
    *code_rl("v2", "sft-general"),
    evaluation("v2", "{v2-sft-calls}"),
)

V3 = (
    *COMMON,
    sft(
        "v3-sft-code",
        "more SFT on programs first",
        "sft-general",
        "plain",
        ("programs=1",),
        80,
        warmup=4,
        seeded=False,
        lr=1.2e-3,
        muon_lr=0.008,
    ),
    *code_rl("v3", "v3-sft-code", gate_parseable=0.5, gate_pass_at_k=0.1),
    sft("v3-sft-calls", "then SFT on calls alone, as in v2", "v3-sft-code", "plain", ("calls=1",), 160, warmup=8),
    evaluation("v3", "{v3-sft-code}", "{v3-sft-calls}"),
)


# ---- calls: v5 to v7


def call_rl(version: str, base: str) -> tuple[Stage, ...]:
    """v5's second half, unchanged since: diagnosis, REINFORCE on the staircase reward with 16 samples and no KL on requests that all need a
    call, evaluation."""
    where = dict(task=CALLS, data_dir="{plain-calls}", max_new_tokens=TOKENS)
    diagnosis = Stage(
        name=f"{version}-diagnose",
        about="is there a gradient?",
        kind="diagnose",
        needs=(base, "plain-calls"),
        seeded=True,
        settings=dict(ckpt=f"{{{base}}}", groups=64, group_size=8, **where),
    )
    trained = Stage(
        name=f"{version}-rl",
        about="REINFORCE on the staircase reward, 16 samples, no KL, every request needs a call",
        kind="reinforce",
        needs=(base, diagnosis.name),
        seeded=True,
        settings=dict(
            init_from=f"{{{base}}}",
            device_batch_size=16,
            group_size=16,
            max_steps=60,
            lr=3e-4,
            eval_every=10,
            save_every=20,
            keep_last=4,
            diagnose_groups=0,
            probe_examples=32,
            **where,
        ),
    )
    return diagnosis, trained, evaluation(version, f"{{{base}}}", f"{{{version}-rl}}")


V5 = (
    *COMMON,
    sft("v5-sft", "SFT on calls alone, longer than v2's", "sft-general", "plain", ("calls=1",), 240, warmup=8),
    *call_rl("v5", "v5-sft"),
)

V6 = (
    *COMMON,
    sft(
        "v6-sft",
        "joint SFT, rows of calls and programs as 5.6 to 1",
        "sft-general",
        "plain",
        ("calls=5.6", "programs=1"),
        320,
        warmup=12,
        mix_by="rows",
    ),
    *call_rl("v6", "v6-sft"),
)


def v7_sft(name: str, about: str, where: str) -> Stage:
    return sft(name, about, "sft-general", where, SEVERAL, 240, warmup=12)


V7_SFT = (
    *data("v7", neutral=0.2, negatives=0.1),
    v7_sft("v7-sft", "joint SFT, balanced by supervised tokens, with neutral prompts and negatives", "v7"),
)
V7 = (*COMMON, *V7_SFT, *call_rl("v7", "v7-sft"))

V7_PARTS = (
    *COMMON,
    *V7_SFT,
    v7_sft("v7-mix", "v7's mix alone", "plain"),
    *data("neutral", neutral=0.2),
    v7_sft("v7-neutral", "v7's mix and neutral prompts", "neutral"),
    *data("negatives", negatives=0.1),
    v7_sft("v7-negatives", "v7's mix and negatives", "negatives"),
    evaluation("v7-parts", "{v7-mix}", "{v7-neutral}", "{v7-negatives}", "{v7-sft}"),
)

OURS = (
    *(stage for stage in COMPACT if stage.name not in ("notebooks", "report")),
    Stage(
        name="ours-over-rl",
        about="behaviour at RL's checkpoints, on validation problems: nano's RL logs none",
        kind="evaluate",
        needs=("sft", "rl", "calls"),
        seeded=True,
        settings=dict(
            ckpt=("{sft}", "{rl}@20", "{rl}@40", "{rl}@60"),
            task=CALLS,
            data_dir="{calls}",
            split=("select",),
            limit=128,
            n=1,
            ks=(1,),
            max_new_tokens=TOKENS,
        ),
    ),
    evaluation("ours", "{sft}", "{rl}@best", needs=("choose",)),
)

# Half of v6's steps at its first half's constant rate, so that its log compares step by step.
V6_CLAIMED = (
    *COMMON,
    sft(
        "v6-claimed-sft",
        "v6 with 28 supervised tokens of calls to one of programs, the imbalance that its authors assumed",
        "sft-general",
        "plain",
        ("calls=28", "programs=1"),
        160,
        warmup=12,
        schedule="constant",
    ),
    evaluation("v6-claimed", "{v6-claimed-sft}"),
)

VERSIONS: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "v1": (
        "general SFT, then GRPO on code problems, group 4, KL 0.02 in the loss; it tried RL as published for larger models",
        V1,
    ),
    "v2": (
        "v1's reward was 0: SFT on calls, then a diagnosis by pass@8, a filter by pass rate, a tiered reward, groups of 8",
        V2,
    ),
    "v3": ("v2's filter left nothing: more SFT on code first, and a gate that decides whether RL can begin", V3),
    "v5": ("code RL given up: SFT on calls, then REINFORCE on a staircase reward over the same requests", V5),
    "v6": ("v5 answers every request with a call: code and calls in one SFT, rows concatenated", V6),
    "v7": (
        "v6 lost its code: a mix balanced by supervised tokens, neutral system prompts, negatives, losses and probes by domain; "
        "never run by its authors",
        V7,
    ),
    "v7-parts": ("which of v7's ingredients matters: the mix alone, with neutral prompts, with negatives", V7_PARTS),
    "ours": (
        "the best by our measurements: reserved tags, one joint SFT with copying, requests that need no call, "
        "a checkpoint chosen on validation problems",
        OURS,
    ),
    "v6-claimed": (
        "v6's rows hold twice as many tokens of calls as of code, not 28 times: the effect of 28 times",
        V6_CLAIMED,
    ),
}
