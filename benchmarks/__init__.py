"""Time CodeChat beside its peers on this machine, in alternating turns.

    python -m benchmarks                              train, sample, rl and data
    python -m benchmarks train --vs plain             one kind of work; its --help lists its settings
    python -m benchmarks quality --path python.parquet
    python -m benchmarks train --preset 2b            on a GPU: tokens/s, MFU and memory of a step of 2b
    python -m benchmarks sample --json figures.json   also write the figures as json, with a description of the
        machine

Peers are timed in the same minutes: ratios carry over to other machines, rates do not.
transformers and trl are installed by pip install -e '.[bench]'; without them pass --vs plain, or
--vs without a value for none. llama.cpp is a package of npm: see chat --help. vLLM has an environment
of its own: see sample --help.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks import settings
from codechat.core import config, errors, provenance
from codechat.core.atomic_files import write_json
from codechat.core.errors import ConfigError

KINDS = {
    "train": ("TrainBench", "training steps: tokens/s, MFU, peak memory"),
    "sft": ("SFTBench", "SFT steps, packed beside padded rows: tokens/s, MFU"),
    "sample": ("SampleBench", "sampling: new tokens/s"),
    "chat": ("ChatBench", "one row on one thread, beside transformers and llama.cpp: tokens/s"),
    "rl": ("RLBench", "one RL step: rollouts/s"),
    "curve": (
        "CurveBench",
        (
            "a learning curve of GRPO: mean reward of each step "
            "over seeds, and the first step's gradient"
        ),
    ),
    "data": ("DataBench", "text to token shards: MB/s, and the loader's share of a training step"),
    "serve": (
        "ServeBench",
        "the HTTP server beside sampling in-process: new tokens/s, time to the first token",
    ),
    "constrain": (
        "ConstrainBench",
        "token masks of constrained calls: microseconds a token, beside free sampling",
    ),
    "judge": ("JudgeBench", "the sandbox: programs/s, beside exec without isolation"),
    "quality": ("QualityBench", "bits per byte after some seconds of training"),
}
DEFAULT = ("train", "sample", "rl", "data")


def main(argv: list[str] | None = None) -> int:
    """`python -m benchmarks [KIND] [OPTIONS]`; without a kind, all of DEFAULT with default
    settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        print("usage: python -m benchmarks [KIND] [OPTIONS]\n\nkinds (each with its own --help):")
        listed = "\n".join(f"  {name:<10}{about}" for name, (_, about) in KINDS.items())
        print(listed, (__doc__ or "").partition("\n\n")[2].rstrip(), sep="\n\n")
        return 0
    if words and not words[0].startswith("-") and words[0] not in KINDS:
        raise ConfigError(f"unknown kind of work {words[0]!r}{errors.nearest(words[0], KINDS)}")
    chosen, rest = ((words[0],), words[1:]) if words and words[0] in KINDS else (DEFAULT, words)
    if len(chosen) > 1 and rest:
        raise ConfigError(
            f"{rest[0]} without a kind of work; name the kind, such "
            f"as python -m benchmarks train {' '.join(rest)}"
        )
    for kind in chosen:
        run_kind(kind, rest)
    return 0


def run_kind(kind: str, argv: list[str]) -> dict[str, Any]:
    """Parse the settings, measure, print, write --json; returns the figures."""
    about = ast.get_docstring(
        ast.parse(Path(__file__).with_name(f"{kind}.py").read_text(encoding="utf-8"))
    )
    cfg = config.parse(
        getattr(settings, KINDS[kind][0]),
        argv,
        presets=settings.RUN_PRESETS.get(kind),
        prog=f"python -m benchmarks {kind}",
        epilog=about,  # read, not imported: help needs no torch
    )
    part = importlib.import_module(f"benchmarks.{kind}")
    figures = {
        "kind": kind,
        "config": {k: v for k, v in config.plain(cfg).items() if k != "json"},
        "machine": {**provenance.hardware(), **provenance.versions()},
        "time": provenance.now(),
        **part.bench(cfg),
    }
    if cfg.json:
        write_json(Path(cfg.json), figures)
    return figures
