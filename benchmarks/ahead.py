"""REINFORCE beside the server that samples for it: each batch when it is needed, and one batch ahead (`--sample-ahead`).

    python -m benchmarks ahead                        five seeds of each, the toy task
    python -m benchmarks ahead --rounds 8 --steps 120

Trainer and server are two processes of one thread each. Both ways have the same start, problems and settings; only the age of the weights that
sample differs. The time is the sum of the steps' times without the first WARM_UP. The curves are compared by seed: the mean reward over all
steps and over the last quarter, ahead less in turns, with 95 % intervals over seeds. An interval around 0 says that no difference was found; its
width says how large a one could hide. Five seeds give intervals that are too narrow (they cover 84 %).

Left out: several ranks, and a server on another machine.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.settings import AheadBench
from codechat.core.atomic_files import read_rows
from codechat.core.errors import MissingFile, RunError
from codechat.evaluation.intervals import bootstrap_interval
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.tasks.toy import TOY_MODEL
from codechat.text import tokenizer

WARM_UP = 5
MODES = {"in turns": "", "ahead": "--max-off-policy 1 --sample-ahead"}
Rows = list[dict[str, Any]]


@contextmanager
def server(folder: Path, rows: int, threads: int | None = None) -> Iterator[str]:
    """A toy model behind `codechat serve`; yields the options of a loop that samples there, with weights sent through memory where there is a
    file system for that. rows: completions that it samples together. threads: of the server; none = torch's choice. MissingFile without the packages of the extra `serve`."""
    if importlib.util.find_spec("uvicorn") is None:
        raise MissingFile("uvicorn is not installed; a server needs pip install -e '.[serve]'")
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder
    with tempfile.TemporaryDirectory(dir=memory) as shared:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shape, tok = GPTConfig(**TOY_MODEL, vocab_size=257), tokenizer.load("bytes")
        start = checkpoint.save(shared, 0, model=GPT(shape), meta={"tokenizer": tok.to_dict(), "tags": "reserved"})
        serve = f"serve --ckpt {start} --reload-from {shared} --port {port} --max-queue 1024 --max-batch {rows}"
        with open(folder / "serve.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "codechat.cli", *serve.split()], stdout=log, stderr=log, env=environment(threads)
            )
        try:
            yield f"--engine http --engine-url http://127.0.0.1:{port} --engine-dir {shared} --engine-weights memory"
        finally:
            process.terminate()
            process.wait(60)


def environment(threads: int | None) -> dict[str, str]:
    """Of a process of so many threads."""
    return dict(os.environ) | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def train(cfg: AheadBench, folder: Path, mode: str, seed: int) -> Rows:
    """The metrics of one training. RunError where it fails."""
    name = f"{mode.replace(' ', '-')}-{seed}"
    with server(folder, cfg.problems * cfg.group_size, threads=1) as there:
        words = f"--root {folder} reinforce --preset toy --run-name {name} --seed {seed} --max-steps {cfg.steps} --group-size {cfg.group_size} "
        words += f"--device-batch-size {cfg.problems} --max-new-tokens {cfg.max_new_tokens} --lr {cfg.lr} --importance-cap {cfg.importance_cap} "
        words += f"--diagnose-groups 0 --save-every 0 --log-rollouts-every 0 {there} {MODES[mode]}"
        command = [sys.executable, "-m", "codechat.cli", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(1), timeout=3600)
    if done.returncode:
        raise RunError(f"codechat {words} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return list(read_rows(folder / "runs" / name / "metrics.jsonl"))


def bench(cfg: AheadBench) -> dict[str, Any]:
    """Print the table; returns times and curves of every seed, and their differences."""
    found: dict[str, list[Rows]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in measure.turns(cfg.rounds, "seed"):
            for mode in sorted(MODES, reverse=bool(seed % 2)):  # who is first changes: the machine may slow down
                found[mode].append(train(cfg, Path(folder), mode, seed))
    figures = compared(found)
    _show(cfg, figures)
    return figures


def compared(found: dict[str, list[Rows]]) -> dict[str, Any]:
    """From the metrics of each mode's trainings, in the order of their seeds."""
    seconds = {mode: [sum(row["step_s"] for row in rows[WARM_UP:]) for rows in runs] for mode, runs in found.items()}
    curves = {mode: [[row["reward_mean"] for row in rows] for rows in runs] for mode, runs in found.items()}
    faster = [a / b for a, b in zip(seconds["in turns"], seconds["ahead"], strict=True)]

    def difference(last: float) -> dict[str, float]:
        """Of the mean reward over the last share of the steps."""
        means = {m: [statistics.mean(c[-max(1, round(last * len(c))) :]) for c in runs] for m, runs in curves.items()}
        gaps = [b - a for a, b in zip(means["in turns"], means["ahead"], strict=True)]
        interval = bootstrap_interval(gaps, bounds=(-1.0, 1.0))
        return {m: statistics.mean(x) for m, x in means.items()} | dict(
            value=interval.value, lo=interval.lo, hi=interval.hi
        )

    stale = [[int(row["off_policy_steps"]) for row in rows] for rows in found["ahead"]]
    return dict(
        faster=faster,
        faster_median=statistics.median(faster),
        seconds=seconds,
        curves=curves,
        all_steps=difference(1.0),
        last_quarter=difference(0.25),
        off_policy_steps=stale,
    )


def _show(cfg: AheadBench, figures: dict[str, Any]) -> None:
    seeds = len(figures["faster"])
    title = f"sampling one batch ahead, {seeds} seeds of {cfg.steps} steps, {cfg.problems} problems x {cfg.group_size} completions"
    table = Table("mean reward", *MODES, "ahead less in turns [95 %]", title=title)
    for name in ("all_steps", "last_quarter"):
        row = figures[name]
        interval = f"{row['value']:+.3f} [{row['lo']:+.3f}, {row['hi']:+.3f}]"
        table.add_row(name.replace("_", " "), *(f"{row[mode]:.3f}" for mode in MODES), interval)
    console = Console(width=120)
    console.print(table)
    ratios = ", ".join(f"{x:.2f}" for x in figures["faster"])
    console.print(f"steps/s: {figures['faster_median']:.2f} times as many ahead, median; by seed {ratios}")
