"""The nano recipe: a small model that reads its list of tools, every stage on two CPU cores in minutes. Settings only; `runner` runs them.

LOG.md says where the numbers come from. A small model copies arguments only after induction has formed; pretraining on code and the copying
drills of the first SFT bring it about. RMSNorm on queries and keys helps copying most; the pretraining rates are the best ones with it.

Choosing a tool by its description is a lookup. It forms in drills that lead up to it one step at a time, from a policy that can copy, and stays in
SFT on real calls; each step is plain SFT with another mix. Lists are in the style `described`: a name stands behind its description, and declining
is an entry. The first SFT, `base`, has lists with the name first: from an SFT on described lists the drills did not take.

RL does not beat SFT that goes on for the same time (`more-sft`; LOG.md, 2026-11-23). The stage shows how RL is run and measured; the model to use is that of `sft`.
"""

from __future__ import annotations

from codechat.launch.recipes.stage import Stage
from codechat.models.config import PRESETS

# python:4096 packs twice the text into a token and pretrains better, but copied arguments worse before qk_norm: LOG.md
TOKENIZER = "gpt2:4096"
MODEL = {name: value for name, value in PRESETS["nano"].items() if name != "vocab_size"}  # the corpus sets it
PRODUCTS = dict(attention_products=True)  # the same attention, faster on cores with bfloat16
RATES = dict(lr=2.4e-2, muon_lr=0.012)  # of pretraining; preset nano has the same
SFT = dict(device_batch_size=8, lr=3e-3, muon_lr=0.02)
LEVELS = (1, 1, 1, 2, 3)  # of the tools; the first is drawn more often
PREPARED = dict(source="embedded", tokenizer=TOKENIZER)
DESCRIBED = PREPARED | dict(tools_style="described")
# shares of the conversations; what remains is single calls
READING = dict(
    renamed=0.5,
    renamed_arguments=0.45,
    rare_words=0.5,
    informal=0.4,
    composed=0.12,
    invented=0.26,
    series=0.58,  # the densest lesson: several requests of one list (LOG.md)
    unserved=0.75,
    chained=0.12,
    unfitting=0.12,
    multi_turn=0.04,
    no_tools=0.03,
    small_talk=0.03,
)
MIX = ("calls=0.72", "lookup_loose=0.05", "lookup_phrases=0.04", "copy=0.06", "code=0.06", "short=0.06", "chat=0.01")
ANSWER = dict(task="funcall", data_dir="{calls}", max_new_tokens=64)

EVALUATED = dict(split=("test", "test_hard"), limit=250, n=4, ks=(1, 4), temperatures=(0.0,), **ANSWER)


def drill(name: str, about: str, after: str, steps: int, *mix: str, seq_len: int = 320) -> Stage:
    """SFT that goes on from the stage `after`, at a constant rate, so that the next step can go on from it."""
    settings = dict(
        init_from=f"{{{after}}}",
        data_dir="{calls}",
        seq_len=seq_len,
        mix=mix,
        max_steps=steps,
        schedule="constant",
        eval_every=0,
        probe_examples=0,
        save_every=0,
    )
    needs = (after, "code", "calls")
    return Stage(name=name, about=about, needs=needs, seeded=True, kind="sft", settings=settings | SFT)


NANO = (
    Stage(
        name="corpus",
        about="real Python: the standard library and installed packages, as shards of tokens",
        kind="data.corpus",
        out="{data}/corpus",
        settings=dict(source="embedded", tokenizer=TOKENIZER, max_tokens=8_000_000),
    ),
    Stage(
        name="base-code",
        about="code questions from real functions, and plain chat",
        kind="data.sft",
        out="{data}/base",
        settings=PREPARED | dict(max_examples=4000),
    ),
    Stage(
        name="base-calls",
        about="function calls with the name first, and copying drills",
        kind="data.calls",
        needs=("base-code",),
        out="{data}/base",
        settings=PREPARED | dict(levels=LEVELS),
    ),
    Stage(
        name="code",
        about="code questions, short requests for well-known programs, plain chat",
        kind="data.sft",
        out="{data}/sft",
        settings=DESCRIBED | dict(max_examples=4000, short=True),
    ),
    Stage(
        name="calls",
        about="calls that only reading the list solves, copying and lookup drills, problems in strata, behaviour probes",
        kind="data.calls",
        needs=("code",),
        out="{data}/sft",
        settings=DESCRIBED | dict(levels=LEVELS, edition=2, lookups=8000, lookups_missing=0.2, reading=READING),
    ),
    Stage(
        name="pretrain",
        about="next-token prediction on the corpus",
        needs=("corpus",),
        kind="pretrain",
        settings=dict(
            data_dir="{corpus}",
            model=MODEL | PRODUCTS,
            seq_len=256,
            device_batch_size=16,
            max_steps=320,
            eval_every=160,
            save_every=160,
            **RATES,
        ),
    ),
    Stage(
        name="base",
        about="first SFT: code, calls, chat and copying, mixed by supervised tokens; it learns to copy",
        needs=("pretrain", "base-code", "base-calls"),
        seeded=True,
        kind="sft",
        settings=dict(
            init_from="{pretrain}",
            data_dir="{base-calls}",
            seq_len=512,
            mix=("calls=0.6", "copy=0.25", "code=0.13", "chat=0.02"),
            max_steps=360,
            eval_every=180,
            save_every=180,
            **SFT,
        ),
    ),
    drill("words", "lookup of single words, answered by the bare name", "base", 140, "lookup_words=0.95", "copy=0.05"),
    drill(
        "lookups",
        "the same inside a call",
        "words",
        100,
        "lookup_calls=0.8",
        "lookup_words=0.15",
        "copy=0.05",
    ),
    drill(
        "phrases",
        "more and rarer words, invented names, fillers",
        "lookups",
        160,
        "lookup_phrases=0.75",
        "lookup_calls=0.2",
        "copy=0.05",
        seq_len=384,
    ),
    Stage(
        name="sft",
        about="calls, lookups, code, chat and copying, mixed by supervised tokens",
        needs=("phrases", "code", "calls"),
        seeded=True,
        kind="sft",
        settings=dict(
            init_from="{phrases}",
            data_dir="{calls}",
            seq_len=384,
            mix=MIX,
            max_steps=1000,
            schedule="wsd",
            eval_every=500,
            save_every=500,
            **SFT,
        ),
    ),
    Stage(
        name="diagnose",
        about="is there a gradient? reference-solution check, tiers, zero-variance groups, verdict",
        needs=("sft",),
        seeded=True,
        kind="diagnose",
        settings=dict(ckpt="{sft}", groups=64, group_size=8, **ANSWER),
    ),
    Stage(
        name="rl",
        about="REINFORCE on the staircase reward, group mean as baseline, the rate falling to zero",
        needs=("sft", "diagnose"),
        seeded=True,
        kind="reinforce",
        settings=dict(
            init_from="{sft}",
            device_batch_size=16,
            group_size=16,
            max_steps=30,
            lr=3e-4,
            schedule="cosine",
            final_lr_share=0.0,
            eval_every=15,
            save_every=15,
            keep_last=4,
            diagnose_groups=0,
            **ANSWER,
        ),
    ),
    Stage(
        name="choose",
        about="every RL checkpoint on the validation split; the best one becomes RUN@best",
        needs=("rl",),
        seeded=True,
        kind="evaluate",
        settings=dict(
            ckpt=("{rl}",),
            all_checkpoints=True,
            split=("select",),
            limit=250,
            n=1,
            ks=(1,),
            temperature=0.0,
            probe_examples=0,
            **ANSWER,
        ),
    ),
    Stage(
        name="evaluate",
        about="SFT and RL by strata, at temperature 1 and greedy, with intervals",
        needs=("sft", "choose"),
        seeded=True,
        kind="evaluate",
        settings=dict(ckpt=("{sft}", "{rl}@best"), **EVALUATED),
    ),
    Stage(
        name="notebooks",
        about="the walk-throughs that read runs, executed on these; which claims hold",
        needs=("pretrain", "diagnose", "rl", "evaluate"),
        kind="notebooks",
        once=True,
        out="runs/{runs}/notebooks",
        settings=dict(source="{runs}"),
    ),
    Stage(
        name="report",
        about="the report on these runs",
        needs=("notebooks",),
        kind="report",
        once=True,
        out="runs/{runs}/report",
        settings=dict(names=("nano",)),
    ),
    Stage(
        name="full-evaluation",
        about="the problems of `evaluate`, at temperatures 1 and 0.5, greedy, and with the call forced",
        needs=("sft", "choose"),
        seeded=True,
        asked=True,
        kind="evaluate",
        settings=dict(
            ckpt=("{sft}", "{rl}@best"),
            **EVALUATED | dict(temperatures=(0.0, 0.5), forced_call=True),
        ),
    ),
    Stage(
        name="more-sft",
        about="what RL has to beat: SFT goes on for as long as RL takes, at half its rates, on the same conversations",
        needs=("sft", "code", "calls"),
        seeded=True,
        asked=True,
        kind="sft",
        settings=dict(
            init_from="{sft}",
            data_dir="{calls}",
            seq_len=384,
            mix=MIX,
            max_steps=180,
            schedule="wsd",
            eval_every=180,
            save_every=180,
            **SFT | dict(lr=SFT["lr"] / 2, muon_lr=SFT["muon_lr"] / 2),
        ),
    ),
    Stage(
        name="more-sft-evaluate",
        about="it by strata, as SFT and RL",
        needs=("more-sft",),
        seeded=True,
        asked=True,
        kind="evaluate",
        settings=dict(ckpt=("{more-sft}",), **EVALUATED),
    ),
    Stage(
        name="natural",
        about="120 requests in words that no template has, answered greedily",
        needs=("sft", "choose"),
        seeded=True,
        asked=True,
        kind="natural",
        settings=dict(ckpt=("{sft}", "{rl}@best")),
    ),
)
