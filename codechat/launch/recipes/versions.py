"""The original project's versions v1 to v7 and ours as recipes, over nano's corpus, pretraining and test problems. Settings only.

Each version is the answer to the failure before it; there was no v4. Runs and data lie beside nano's (runs/nano, data/nano) and carry the
version in their names, so that what they share is made once: nano's corpus, pretraining and test data, the general SFT, the plain data.

Steps are the published ones by 25 (3,000 of general SFT are 120), learning rates nano's own in the published ratio: a second SFT takes 0.6 of the
first one's. Turn tags are plain text, as in the original; ours are reserved ids. Where nano must differ:

- the general SFT has copying drills in it: a model of 2.6 million parameters copies no argument without them, and every later skill needs that;
- code problems are `micro`, calls are the toolbox's; at 8b they are MBPP and glaive's (recipe_8b);
- v7's negatives are a tenth of the code rows with tools in front, not further rows; its functions are those of v6, not five times as many.

Every version ends in VERSION-evaluate, with the same settings, on nano's test data: calls, behaviour in all cells, held-out loss of each domain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codechat.launch.recipes.nano import NANO, TOKENIZER, Stage

SEVERAL = ("calls=1.2", "programs=1")  # v7's design: code and negatives to calls as 1 to 1.2, in supervised tokens
SECOND = dict(lr=1.8e-3, muon_lr=0.012)  # a second SFT: 3e-5 where the first had 5e-5
TOKENS = 80  # longest completion: tags in plain text take some more
EVALUATION = dict(
    task="funcall",
    data_dir="{data}/sft",
    split=("test",),
    limit=200,
    n=8,
    probe_examples=64,
    heldout_examples=150,
    max_new_tokens=TOKENS,
)
ANCESTORS = tuple(stage for stage in NANO if stage.name in ("corpus", "code", "calls", "pretrain"))


def data(name: str, neutral: float = 0.0, negatives: float = 0.0, general: bool = False) -> tuple[Stage, ...]:
    """Programs and calls in {data}/NAME; `general` adds code questions, chat and copying drills."""
    out, found = "{data}/" + name, []
    if general:
        found.append(
            Stage(
                name=f"{name}-code",
                about="code questions and chat, without system prompts",
                kind="data.sft",
                settings=dict(
                    source="embedded",
                    out=out,
                    tokenizer=TOKENIZER,
                    max_examples=4000,
                    neutral_share=0.0,
                    negatives_share=0.0,
                ),
            )
        )
    shares = ", ".join(
        f"{share:.0%} {what}"
        for share, what in ((neutral, "neutral system prompts"), (negatives, "negatives"))
        if share
    )
    found.append(
        Stage(
            name=f"{name}-programs",
            about=f"functions to write{': ' + shares if shares else ', without system prompts'}",
            kind="data.code",
            needs=(f"{name}-code",) if general else (),
            settings=dict(
                source=("embedded",),
                out=out,
                tokenizer=TOKENIZER,
                max_examples=4000,
                max_chars=450,
                neutral_share=neutral,
                negatives_share=negatives,
            ),
        )
    )
    found.append(
        Stage(
            name=f"{name}-calls",
            about="calls: every request is answered by one",
            needs=(f"{name}-programs",),
            kind="data.calls",
            settings=dict(
                source="embedded",
                out=out,
                tokenizer=TOKENIZER,
                levels=(1, 1, 1, 2, 3),
                copies=8000 if general else 0,
                negatives_share=0.0,
                no_call_share=0.0,
            ),
        )
    )
    return tuple(found)


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
    settings = dict(
        run_name="{runs}/" + name + "{s}" * seeded,
        init_from="{runs}/" + base,
        data_dir="{data}/" + where,
        tags="text",
        mix=mix,
        seq_len=512,
        device_batch_size=8,
        max_steps=steps,
        warmup_steps=warmup,
        eval_every=40,
        save_every=80,
    )
    return Stage(
        name=name,
        about=about,
        kind="sft",
        needs=(base.removesuffix("{s}"), f"{where}-calls"),
        seeded=seeded,
        settings=settings | SECOND | more,
    )


def evaluation(version: str, *runs: str, needs: tuple[str, ...] = ()) -> Stage:
    return Stage(
        name=f"{version}-evaluate",
        about="calls, behaviour and held-out loss on test, with the settings that all versions get",
        needs=(*needs, *(run.partition("{")[0] for run in runs), "code", "calls"),
        seeded=True,
        kind="evaluate",
        settings=dict(
            run_name="{runs}/" + version + "-evaluate{s}", ckpt=tuple("{runs}/" + run for run in runs), **EVALUATION
        ),
    )


GENERAL = sft(
    "sft-general",
    "general SFT: code questions and chat, and the copying drills that nano cannot do without",
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
    name: str, about: str, *, task: str, steps: int, group_size: int, needs: tuple[str, ...], lr: float, **more: Any
) -> Stage:
    """GRPO on code problems from the general SFT, as it was: KL in the loss by the k1 estimator, whatever diagnose says."""
    settings = dict(
        run_name="{runs}/" + name + "{s}",
        init_from="{runs}/sft-general",
        task=task,
        device_batch_size=8,
        group_size=group_size,
        max_steps=steps,
        kl_coef=0.02,
        kl_kind="k1",
        kl_in="loss",
        temperature=0.9,
        max_new_tokens=96,
        lr=lr,
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
    kept, judged = "{data}/" + version + "-kept", f"{version}-{'gate' if gate else 'diagnose'}"
    wanted = "gate: parseable >= 50 %, pass@8 >= 10 %" if gate else "pass@8 of the general SFT on code problems"
    return (
        Stage(
            name=judged,
            about=wanted,
            kind="passk",
            needs=(base,),
            settings=dict(
                run_name="{runs}/" + judged,
                ckpt="{runs}/" + base,
                task="micro",
                limit=100,
                k=8,
                max_new_tokens=96,
                **gate,
            ),
        ),
        Stage(
            name=f"{version}-filter",
            about="keep problems with a pass rate from 0.05 to 0.95, else with a tiered mean from 0.1",
            needs=(judged,),
            kind="filter",
            settings=dict(rates="{runs}/" + judged, window=(0.05, 0.95), min_tiered=0.1, out=kept, allow_empty=True),
        ),
        replace(
            grpo(
                f"{version}-grpo",
                "GRPO on what the filter left: tiered reward, group 8",
                task="micro:reward=tiered",
                steps=20,
                group_size=8,
                lr=1.5e-4,
                needs=(f"{version}-filter", base),
                init_from="{runs}/" + base,
                data_dir=kept,
            ),
            when=kept + "/*.train.jsonl",
        ),
    )


V1 = (
    *COMMON,
    grpo(
        "v1-grpo",
        "GRPO on code problems, all asserts or nothing: reward 0",
        task="micro:reward=binary",
        steps=20,
        group_size=4,
        lr=3e-4,
        needs=("sft-general",),
    ),
    grpo(
        "v1-grpo-fraction",
        "the same with the share of asserts, as the code of that date scored",
        task="micro:reward=fractional",
        steps=20,
        group_size=4,
        lr=3e-4,
        needs=("sft-general",),
    ),
    evaluation("v1", "sft-general", "v1-grpo{s}", "v1-grpo-fraction{s}"),
)

V2 = (
    *COMMON,
    sft("v2-sft-calls", "SFT on calls alone", "sft-general", "plain", ("calls=1",), 160, warmup=8),
    *code_rl("v2", "sft-general"),
    evaluation("v2", "v2-sft-calls{s}"),
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
    evaluation("v3", "v3-sft-code", "v3-sft-calls{s}"),
)


# ---- calls: v5 to v7


def call_rl(version: str, base: str) -> tuple[Stage, ...]:
    """Diagnosis, REINFORCE on the staircase with 16 samples, no KL and no request that wants no call, and evaluation: v5's second half, unchanged since."""
    where = dict(task="funcall", data_dir="{data}/plain", max_new_tokens=TOKENS)
    return (
        Stage(
            name=f"{version}-diagnose",
            about="is there a gradient?",
            kind="diagnose",
            needs=(base, "plain-calls"),
            seeded=True,
            settings=dict(
                run_name="{runs}/" + version + "-diagnose{s}",
                ckpt="{runs}/" + base + "{s}",
                groups=64,
                group_size=8,
                **where,
            ),
        ),
        Stage(
            name=f"{version}-rl",
            about="REINFORCE on the staircase, 16 samples, no KL, every request wants a call",
            kind="reinforce",
            needs=(base, f"{version}-diagnose"),
            seeded=True,
            settings=dict(
                run_name="{runs}/" + version + "-rl{s}",
                init_from="{runs}/" + base + "{s}",
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
        ),
        evaluation(version, base + "{s}", f"{version}-rl{{s}}"),
    )


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

V7_SFT = (
    *data("v7", neutral=0.2, negatives=0.1),
    sft(
        "v7-sft",
        "joint SFT, balanced by supervised tokens, with neutral prompts and negatives",
        "sft-general",
        "v7",
        SEVERAL,
        240,
        warmup=12,
    ),
)
V7 = (*COMMON, *V7_SFT, *call_rl("v7", "v7-sft"))

V7_PARTS = (
    *COMMON,
    *V7_SFT,
    sft("v7-mix", "v7's mix alone", "sft-general", "plain", SEVERAL, 240, warmup=12),
    *data("neutral", neutral=0.2),
    sft("v7-neutral", "v7's mix and neutral prompts", "sft-general", "neutral", SEVERAL, 240, warmup=12),
    *data("negatives", negatives=0.1),
    sft("v7-negatives", "v7's mix and negatives", "sft-general", "negatives", SEVERAL, 240, warmup=12),
    evaluation("v7-parts", "v7-mix{s}", "v7-neutral{s}", "v7-negatives{s}", "v7-sft{s}"),
)

OURS = (
    *(stage for stage in NANO if stage.name not in ("notebooks", "report")),
    Stage(
        name="ours-over-rl",
        about="behaviour at RL's checkpoints, on select: nano's RL logs none",
        kind="evaluate",
        needs=("sft", "rl", "calls"),
        seeded=True,
        settings=dict(
            run_name="{runs}/ours-over-rl{s}",
            ckpt=("{runs}/sft{s}", "{runs}/rl{s}@20", "{runs}/rl{s}@40", "{runs}/rl{s}@60"),
            task="funcall",
            data_dir="{data}/sft",
            split=("select",),
            limit=128,
            n=1,
            ks=(1,),
            max_new_tokens=TOKENS,
        ),
    ),
    evaluation("ours", "sft{s}", "rl{s}@best", needs=("choose",)),
)

# Half of v6's steps at its first half's constant rate, so that its log compares step by step.
V6_CLAIMED = (
    *COMMON,
    sft(
        "v6-claimed-sft",
        "v6 with 28 supervised tokens of calls to one of programs, the imbalance that its authors took it to have",
        "sft-general",
        "plain",
        ("calls=28", "programs=1"),
        160,
        warmup=12,
        schedule="constant",
    ),
    evaluation("v6-claimed", "v6-claimed-sft{s}"),
)

VERSIONS: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "v1": (
        "general SFT, then GRPO on code problems, group 4, KL 0.02 in the loss; what it tried: RL as published for larger models",
        V1,
    ),
    "v2": (
        "v1's reward was 0: SFT on calls, then a diagnosis by pass@8, a filter by pass rate, a tiered reward, groups of 8",
        V2,
    ),
    "v3": ("v2's filter left nothing: more SFT on code first, with a gate that says whether RL can begin", V3),
    "v5": ("code RL given up: SFT on calls, then REINFORCE on a staircase reward over the same requests", V5),
    "v6": ("v5 answers every request with a call: code and calls in one SFT, rows concatenated", V6),
    "v7": (
        "v6 was seen to lose its code: a mix balanced by supervised tokens, neutral system prompts, negatives, losses and probes by domain; "
        "never run by its authors",
        V7,
    ),
    "v7-parts": ("which of v7's ingredients does it: the mix alone, with neutral prompts, with negatives", V7_PARTS),
    "ours": (
        "what the measurements say is best: reserved tags, one joint SFT with copying, requests that want no call, "
        "a checkpoint chosen on select",
        OURS,
    ),
    "v6-claimed": (
        "v6's rows hold twice as many tokens of calls as of code, not 28 times: what 28 times would have done",
        V6_CLAIMED,
    ),
}
