"""Measure CodeChat beside its peers, on this machine, in turns.

    codechat bench                              train, sample, rl and data
    codechat bench train --vs plain             one kind of work; --help of each kind lists its settings
    codechat bench quality --path python.parquet
    codechat bench sample --json figures.json   the figures as json, with the machine's description

A figure stands beside its peer's from the same minutes; ratios travel between machines, rates do not. transformers and trl
come with pip install -e '.[bench]'; without them pass --vs plain, or --vs alone for none.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from codechat.core import config, errors, provenance
from codechat.core.atomic_files import write_json
from codechat.core.errors import ConfigError

KINDS = {
    "train": ("TrainBench", "training steps: tokens/s, MFU, peak memory"),
    "sample": ("SampleBench", "sampling: new tokens/s, and whether late tokens cost more"),
    "rl": ("RLBench", "one RL step: rollouts/s"),
    "data": ("DataBench", "text to shards: MB/s, and the loader's share of a step"),
    "serve": ("ServeBench", "the HTTP server beside sampling without it: new tokens/s, time to the first token"),
    "quality": ("QualityBench", "bits per byte after some seconds of training"),
}
DEFAULT = ("train", "sample", "rl", "data")


def main(argv: list[str] | None = None) -> int:
    """`codechat bench [KIND] [OPTIONS]`; without a kind all of DEFAULT with their default settings."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        print("usage: codechat bench [KIND] [OPTIONS]\n\nkinds (each with its own --help):")
        print(
            "\n".join(f"  {name:<9}{about}" for name, (_, about) in KINDS.items())
            + "\n\n"
            + (__doc__ or "").partition("\n\n")[2].rstrip()
        )
        return 0
    if words and not words[0].startswith("-") and words[0] not in KINDS:
        raise ConfigError(f"unknown kind of work {words[0]!r}{errors.nearest(words[0], KINDS)}")
    chosen, rest = ((words[0],), words[1:]) if words and words[0] in KINDS else (DEFAULT, words)
    if len(chosen) > 1 and rest:
        raise ConfigError(
            f"{rest[0]} without a kind of work; say which one it is for: codechat bench train {' '.join(rest)}"
        )
    for kind in chosen:
        run_kind(kind, rest)
    return 0


def run_kind(kind: str, argv: list[str]) -> dict[str, Any]:
    """Parse, measure, print, and write --json; returns the figures."""
    part = importlib.import_module(f"codechat.bench.{kind}")
    cfg = config.parse(
        getattr(part, KINDS[kind][0]),
        argv,
        presets=part.RUN_PRESETS,
        prog=f"codechat bench {kind}",
        epilog=part.__doc__,
    )
    figures = {
        "kind": kind,
        "config": {k: v for k, v in config.to_dict(cfg).items() if k != "json"},
        "machine": {**provenance.hardware(), **provenance.versions()},
        "time": provenance.now(),
        **part.bench(cfg),
    }
    if cfg.json:
        write_json(Path(cfg.json), figures)
    return figures
