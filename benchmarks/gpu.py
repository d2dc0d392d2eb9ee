"""What has to be known of a GPU before it is used: ten steps with thresholds, in 25 minutes on one H100 or H200.

python -m benchmarks gpu                          steps 1 to 10, those that are finished skipped
python -m benchmarks gpu --steps 5 6              only these, again
python -m benchmarks gpu --steps 11               the nano recipe, and ten minutes of pretraining d12

Each step runs in a process of its own with a time limit, and its json is written when it ends: a step that fails, hangs or is killed costs no other.
Tokens are random and nothing is downloaded. On a machine without CUDA the same command runs what a CPU can prove, on small models, and says what it
could not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.settings import GPU_STEPS as STEPS
from benchmarks.settings import GpuBench
from codechat.core import provenance
from codechat.core.atomic_files import read_json, write_json
from codechat.runs import paths

LIMIT_S = 480  # of a step; the last one has its own
LONG_S = {11: 3600}


def device_name() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def folder(cfg: GpuBench) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")
    return Path(cfg.out) if cfg.out else paths.ROOT / "reports" / "bench" / slug


def run_alone(words: list[str], limit_s: float) -> tuple[str, int | None]:
    """(output, exit code) of a process; none = it was killed after limit_s. What it has started and left behind ends with it: a server or an engine
    would hold the GPU's memory. Output goes to a file, since a pipe is open until the last of them ends."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        how: dict[str, Any] = dict(stdout=file, stderr=subprocess.STDOUT, cwd=paths.ROOT, start_new_session=True)
        with subprocess.Popen(words, **how) as process:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also where a person interrupts it, whose signal another session does not get
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        file.seek(0)
        return file.read(), code


def run_step(number: int, path: Path) -> dict[str, Any]:
    """Run a step in its own process; its result, written to `path` in any case."""
    began, limit = time.perf_counter(), LONG_S.get(number, LIMIT_S)
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.gpu_steps", str(number), str(path)]
    text, code = run_alone(words, limit)
    said = text.strip().splitlines()[-15:]
    ended = f"the process ended with code {code}" if code else "it wrote no result"
    problem = f"it took over {limit} s" if code is None else ended
    found = read_json(path) if path.is_file() else {"checks": [], "not_run": [], "failed": problem, "output": said}
    result = {
        "step": number,
        "name": STEPS[number][0],
        "about": STEPS[number][1],
        "device": device_name(),
        "torch": torch.__version__,
        "commit": provenance.git_state(paths.ROOT).get("commit"),
        "time": provenance.now(),
        "seconds": round(time.perf_counter() - began, 1),
        **found,
    }
    write_json(path, result)
    return result


def verdict(result: dict[str, Any]) -> str:
    """pass, fail, or not run."""
    if "failed" in result or not all(check["ok"] for check in result["checks"]):
        return "fail"
    return "pass" if result["checks"] else "not run"


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(
        "step", "measured", "value", "threshold", "result", title=f"python -m benchmarks gpu: {device_name()}"
    )
    for result in results:
        name, first = f"{result['step']} {result['name']}, {result['seconds']:.0f} s", True
        for check in result["checks"]:
            mark = "pass" if check["ok"] else "[bold]FAIL[/bold]"
            mark = mark if check["threshold"] else ""
            shown.add_row(name if first else "", check["what"], check["value"], check["threshold"], mark)
            first = False
        for what in [*result["not_run"], *([f"failed: {result['failed']}"] if "failed" in result else [])]:
            mark = "[bold]FAIL[/bold]" if what.startswith("failed: ") else "not run"
            shown.add_row(name if first else "", what, "", "", mark)
            first = False
        shown.add_section()
    return shown


def bench(cfg: GpuBench) -> dict[str, Any]:
    """Run what is missing, print the table; returns all results."""
    out, console, results = folder(cfg), Console(width=150), []
    out.mkdir(parents=True, exist_ok=True)
    for number in cfg.steps or [n for n in STEPS if n not in LONG_S]:
        path = out / f"gpu-{number:02d}-{STEPS[number][0]}.json"
        known = read_json(path) if path.is_file() and not cfg.steps else None
        if known and known["device"] == device_name() and "failed" not in known:
            results.append(known)
            found = f"step {number}: {verdict(known)}, measured {known['time']} at {str(known['commit'])[:7]}; --steps {number} measures it again"
            console.print(found, highlight=False, soft_wrap=True)
            continue
        console.print(f"step {number}: {STEPS[number][1]} ...", highlight=False)
        results.append(run_step(number, path))
        console.print(f"step {number}: {verdict(results[-1])} in {results[-1]['seconds']:.0f} s", highlight=False)
    console.print(table(results))
    for result in results:
        if "failed" in result:
            console.print(f"step {result['step']}: {result['failed']}", *result.get("output", [])[-6:], sep="\n  ", markup=False)  # fmt: skip
    return {"device": device_name(), "results": results, "verdicts": {str(r["step"]): verdict(r) for r in results}}
