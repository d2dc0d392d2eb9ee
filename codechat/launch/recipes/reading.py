"""A model that reads its list of tools, from nano's SFT on: settings only; `runner` runs them.

Choosing a tool by its description is a lookup. A small model learns it from drills that lead up to it one step at a time, once it can copy, and
keeps it in SFT on real calls (LOG.md). The steps are stages: each is plain SFT with another mix. Lists are in the style `described`: a name stands
behind its description, and declining is an entry. The drills begin from nano's own SFT, whose lists have the name first: from an SFT on described
lists they did not take (LOG.md).
"""

from __future__ import annotations

from codechat.launch.recipes.nano import NANO, TOKENIZER
from codechat.launch.recipes.stage import Stage

DATA = dict(source="embedded", tokenizer=TOKENIZER, tools_style="described")
# shares of the conversations; what remains is single calls
MIX = dict(renamed=0.5, composed=0.15, invented=0.25, series=0.35, chained=0.12, unfitting=0.15, multi_turn=0.1)
RATES = dict(lr=3e-3, muon_lr=0.02)
ANSWER = dict(task="funcall", data_dir="{reading-calls}", max_new_tokens=64)
CALLS = ("calls=0.55", "lookup_loose=0.1", "lookup_phrases=0.08", "copy=0.1", "code=0.1", "short=0.05", "chat=0.02")


def step(name: str, about: str, after: str, steps: int, *mix: str, **more: object) -> Stage:
    """SFT that goes on from the stage `after`, at a constant rate, so that the next step can go on from it."""
    settings = dict(
        init_from=f"{{{after}}}",
        data_dir="{reading-calls}",
        seq_len=320,
        device_batch_size=8,
        mix=mix,
        max_steps=steps,
        schedule="constant",
        eval_every=0,
        probe_examples=0,
        save_every=0,
        **RATES,
    )
    return Stage(name=name, about=about, needs=(after, "reading-code", "reading-calls"), seeded=True, kind="sft", settings=settings | more)  # fmt: skip


READING = (
    *(stage for stage in NANO if stage.name in ("corpus", "code", "calls", "pretrain", "sft")),
    Stage(
        name="reading-code",
        about="code questions from real functions, short requests for well-known programs, plain chat",
        kind="data.sft",
        out="{data}/reading",
        settings=DATA | dict(max_examples=4000, short=True),
    ),
    Stage(
        name="reading-calls",
        about="calls that only reading the list solves, copying and lookup drills, problems in strata, behaviour probes",
        kind="data.calls",
        needs=("reading-code",),
        out="{data}/reading",
        settings=DATA | dict(levels=(1, 1, 1, 2, 3), edition=2, lookups=8000, lookups_missing=0.2, reading=MIX),
    ),
    step("words", "lookup of single words, answered by the bare name", "sft", 140, "lookup_words=0.95", "copy=0.05"),
    step("lookups", "the same inside a call", "words", 100, "lookup_calls=0.8", "lookup_words=0.15", "copy=0.05"),
    step(
        "phrases",
        "more words, invented names, fillers",
        "lookups",
        160,
        "lookup_phrases=0.75",
        "lookup_calls=0.2",
        "copy=0.05",
    ),
    step(
        "reading-sft",
        "joint calls, lookups, code, chat and copying, mixed by supervised tokens",
        "phrases",
        400,
        *CALLS,
        seq_len=384,
        schedule="wsd",
        eval_every=100,
        save_every=100,
    ),
    Stage(
        name="reading-diagnose",
        about="is there a gradient? reference-solution check, tiers, zero-variance groups, verdict",
        needs=("reading-sft",),
        seeded=True,
        kind="diagnose",
        settings=dict(ckpt="{reading-sft}", groups=64, group_size=8, **ANSWER),
    ),
    Stage(
        name="reading-rl",
        about="REINFORCE on the staircase reward, group mean as baseline, the rate falling to zero",
        needs=("reading-sft", "reading-diagnose"),
        seeded=True,
        kind="reinforce",
        settings=dict(
            init_from="{reading-sft}",
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
        name="reading-evaluate",
        about="SFT and RL, greedy and at temperature 1, by strata, with intervals",
        needs=("reading-sft", "reading-rl"),
        seeded=True,
        kind="evaluate",
        settings=dict(
            ckpt=("{reading-sft}", "{reading-rl}"),
            split=("test", "test_hard"),
            limit=250,
            n=1,
            ks=(1,),
            temperature=0.0,
            temperatures=(1.0,),
            **ANSWER,
        ),
    ),
    Stage(
        name="reading-full",
        about="the same on every problem, 8 completions each at temperatures 1 and 0.5, greedy, and with the call forced",
        needs=("reading-sft", "reading-rl"),
        seeded=True,
        kind="evaluate",
        settings=dict(
            ckpt=("{reading-sft}", "{reading-rl}"),
            split=("test", "test_hard"),
            limit=500,
            n=8,
            temperatures=(0.0, 0.5),
            forced_call=True,
            **ANSWER,
        ),
    ),
    Stage(
        name="reading-natural",
        about="120 requests in words that no template has, answered greedily",
        needs=("reading-sft", "reading-rl"),
        seeded=True,
        kind="natural",
        settings=dict(ckpt=("{reading-sft}", "{reading-rl}")),
    ),
)
