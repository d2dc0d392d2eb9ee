"""The nano recipe: every stage on two CPU cores in minutes. Settings only; `recipes` runs them.

Where the numbers come from is in LOG.md: a small model copies arguments only after induction has formed, which pretraining on code and
the copying drills of the SFT mix bring about. RMSNorm on queries and keys helps copying most; pretraining takes the rates that did best with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codechat.models.config import PRESETS
from codechat.runs.run import ROOT, Run, exists


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One configuration of one training function. kind: its id in `registry`. seeded: repeated per seed; once: for seed 0 only;
    otherwise shared by all seeds. when: files, as a pattern, without which the stage is left out and said to be."""

    name: str
    about: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    seeded: bool = False
    once: bool = False
    when: str = ""

    def made(self, cfg: Any) -> bool:
        """Whether what the stage leaves behind is still there: a finished run, or its output directory."""
        if hasattr(cfg, "run_name"):
            return exists(cfg.run_name) and Run.open(cfg.run_name).status["status"] == "finished"
        out = getattr(cfg, "out", None)
        return out is None or (ROOT / Path(out)).exists()

    def result(self, cfg: Any) -> str:
        """The last evaluation of the stage's run in a few words, and how fast it trained."""
        if not hasattr(cfg, "run_name"):
            return ""
        run = Run.open(cfg.run_name)
        rows = run.evals().to_dict("records")
        picked = rows[-4:] if self.name.endswith("evaluate") else rows[-1:]
        return "\n".join([*(_words(row) for row in picked), *_speed(run)])


def _speed(run: Run) -> list[str]:
    """Median over the logged steps of tokens per second and model FLOPs over the peak, where the run logs them."""
    metrics = run.metrics()
    if not {"tok_per_s", "mfu"} <= set(metrics):
        return []
    return [f"{metrics['tok_per_s'].median():,.0f} tok/s, MFU {metrics['mfu'].median():.0%}"]


def _words(row: dict[str, Any]) -> str:
    where = " on ".join(str(row[k]) for k in ("checkpoint", "split") if isinstance(row.get(k), str))
    shown = [
        f"{k} {row[k]:.3f}"
        for k in ("val_bpb", "exact_match", "pass@1", "pass@8", "reward_mean")
        if isinstance(row.get(k), float)
    ]
    losses = [f"{k.removeprefix('heldout_loss/')} {v:.2f}" for k, v in row.items() if k.startswith("heldout_loss/")]
    verdict = [str(row["verdict"])] if isinstance(row.get("verdict"), str) else []
    return " ".join([where + ":"] * bool(where) + verdict + shown + (["held-out loss", *losses] if losses else []))


TOKENIZER = "gpt2:4096"  # python:4096 packs twice the text into a token and pretrains better, but copied arguments worse before qk_norm: LOG.md
MODEL = {
    name: value for name, value in PRESETS["nano"].items() if name != "vocab_size"
}  # the corpus says which vocabulary
RATES = dict(lr=2.4e-2, muon_lr=0.012)  # of pretraining; preset nano has the same
ANSWER = dict(task="funcall", data_dir="{data}/sft", max_new_tokens=64)

NANO = (
    Stage(
        name="corpus",
        about="real Python: the standard library and installed packages, as shards of tokens",
        kind="data.corpus",
        settings=dict(source="embedded", out="{data}/corpus", tokenizer=TOKENIZER, max_tokens=8_000_000),
    ),
    Stage(
        name="code",
        about="code questions from real functions, and plain chat",
        kind="data.sft",
        settings=dict(source="embedded", out="{data}/sft", tokenizer=TOKENIZER, max_examples=4000),
    ),
    Stage(
        name="calls",
        about="function calls, copying drills, problems and behaviour probes of the toolbox",
        kind="data.calls",
        needs=("code",),
        settings=dict(source="embedded", out="{data}/sft", tokenizer=TOKENIZER, levels=(1, 1, 1, 2, 3)),
    ),
    Stage(
        name="pretrain",
        about="next-token prediction on the corpus",
        needs=("corpus",),
        kind="pretrain",
        settings=dict(
            run_name="{runs}/pretrain",
            data_dir="{data}/corpus",
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
            run_name="{runs}/sft{s}",
            init_from="{runs}/pretrain",
            data_dir="{data}/sft",
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
        about="is there a gradient? gold gate, tiers, zero-variance groups, verdict",
        needs=("sft",),
        seeded=True,
        kind="diagnose",
        settings=dict(run_name="{runs}/diagnose{s}", ckpt="{runs}/sft{s}", groups=64, group_size=8, **ANSWER),
    ),
    Stage(
        name="rl",
        about="REINFORCE on the staircase reward, group mean as baseline",
        needs=("sft", "diagnose"),
        seeded=True,
        kind="reinforce",
        settings=dict(
            run_name="{runs}/rl{s}",
            init_from="{runs}/sft{s}",
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
        about="every RL checkpoint on the select split; the best one is kept in mind",
        needs=("rl",),
        seeded=True,
        kind="evaluate",
        settings=dict(
            run_name="{runs}/choose{s}",
            ckpt=("{runs}/rl{s}",),
            all_checkpoints=True,
            split=("select",),
            limit=150,
            n=8,
            probe_examples=0,
            **ANSWER,
        ),
    ),
    Stage(
        name="evaluate",
        about="SFT and RL on test: pass@1, pass@8, tiers, behaviour, with intervals",
        needs=("sft", "choose"),
        seeded=True,
        kind="evaluate",
        settings=dict(
            run_name="{runs}/evaluate{s}",
            ckpt=("{runs}/sft{s}", "{runs}/rl{s}@best"),
            split=("test", "test_hard"),
            limit=400,
            n=8,
            **ANSWER,
        ),
    ),
    Stage(
        name="notebooks",
        about="the walk-throughs that read runs, executed on these; which claims hold",
        needs=("pretrain", "diagnose", "rl", "evaluate"),
        kind="notebooks",
        once=True,
        settings=dict(out="runs/{runs}/notebooks", source="{runs}"),
    ),
    Stage(
        name="report",
        about="the report on these runs",
        needs=("notebooks",),
        kind="report",
        once=True,
        settings=dict(names=("nano",), out="runs/{runs}/report"),
    ),
)
