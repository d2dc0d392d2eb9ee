"""The recipe that was `nano` before version 0.2: a list has each tool under its one name, which the model remembers. Settings only; `runner` runs them.

The versions, the scaling runs, the museum and their reports stand on it. A small model copies arguments only after induction has formed;
pretraining on code and the copying drills of the SFT mix bring it about. RMSNorm on queries and keys helps copying most (LOG.md).
"""

from __future__ import annotations

from codechat.launch.recipes.nano import MODEL, RATES, TOKENIZER
from codechat.launch.recipes.stage import Stage

# the published staircase: every committed figure of this recipe was made with it
ANSWER = dict(task="funcall:staircase=published", data_dir="{calls}", max_new_tokens=64)

COMPACT = (
    Stage(
        name="corpus",
        about="real Python: the standard library and installed packages, as shards of tokens",
        kind="data.corpus",
        out="{data}/corpus",
        settings=dict(source="embedded", tokenizer=TOKENIZER, max_tokens=8_000_000),
    ),
    Stage(
        name="code",
        about="code questions from real functions, and plain chat",
        kind="data.sft",
        out="{data}/sft",
        settings=dict(source="embedded", tokenizer=TOKENIZER, max_examples=4000),
    ),
    Stage(
        name="calls",
        about="function calls, copying drills, problems and behaviour probes of the toolbox",
        kind="data.calls",
        needs=("code",),
        out="{data}/sft",
        settings=dict(source="embedded", tokenizer=TOKENIZER, levels=(1, 1, 1, 2, 3)),
    ),
    Stage(
        name="pretrain",
        about="next-token prediction on the corpus",
        needs=("corpus",),
        kind="pretrain",
        settings=dict(
            data_dir="{corpus}",
            model=MODEL,
            seq_len=256,
            device_batch_size=16,
            max_steps=320,
            eval_every=80,
            save_every=80,
            **RATES,
        ),
    ),
    Stage(
        name="sft",
        about="joint code, calls, chat and copying, mixed by supervised tokens",
        needs=("pretrain", "code", "calls"),
        seeded=True,
        kind="sft",
        settings=dict(
            init_from="{pretrain}",
            data_dir="{calls}",
            seq_len=512,
            device_batch_size=8,
            mix=("calls=0.6", "copy=0.25", "code=0.13", "chat=0.02"),
            max_steps=360,
            lr=3e-3,
            muon_lr=0.02,
            eval_every=60,
            save_every=60,
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
        about="REINFORCE on the staircase reward, group mean as baseline",
        needs=("sft", "diagnose"),
        seeded=True,
        kind="reinforce",
        settings=dict(
            init_from="{sft}",
            device_batch_size=16,
            group_size=16,
            max_steps=60,
            lr=3e-4,
            eval_every=20,
            save_every=20,
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
            ckpt=("{rl}",), all_checkpoints=True, split=("select",), limit=150, n=8, probe_examples=0, **ANSWER
        ),
    ),
    Stage(
        name="evaluate",
        about="SFT and RL on test: pass@1, pass@8, tiers, behaviour, with intervals",
        needs=("sft", "choose"),
        seeded=True,
        kind="evaluate",
        settings=dict(ckpt=("{sft}", "{rl}@best"), split=("test", "test_hard"), limit=400, n=8, **ANSWER),
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
)
