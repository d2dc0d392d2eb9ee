"""Interleaved timing: contestants take turns, so that noise of the machine affects all of them.

`race` runs every contestant once as a warm-up (shown separately, because it includes
compilation), then `rounds` times in turn; by default up to ROUNDS times, and no round that would
end after LIMIT_S. A rate is the median over rounds. A ratio to the first contestant is the median
of the rounds' ratios, so that a slow minute of the machine cancels out. The peak that an MFU is a
share of is the best of trials between the rounds, for the same reason; a share above 1 is shown
as "disturbed". `alone` runs one contestant in a new process: its peak memory, its CPU time, and
what it writes. `apart` does so in turns, for models of which two do not fit into memory.

Left out: statistics beyond median and range, which a handful of rounds does not support.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import settings
from codechat.core import config
from codechat.core.errors import RunError
from codechat.distributed import hardware, numerics
from codechat.models.fast import fused, product

MEMORY_STEPS = 2
BAR_AFTER_S = 3.0  # a race that takes longer shows a bar
ROUNDS, LIMIT_S = 5, 240.0  # so that a bench ends within five minutes


@dataclass(frozen=True)
class Contestant:
    """run() does `units` of work (tokens, rollouts, bytes); flops: model FLOPs per unit, 0 =
    not stated; a function is asked after the last run.

    seconds() returns the time counted for the last run(); None = all of its time. save(folder)
    writes what training keeps of a step, as its library does."""

    name: str
    run: Callable[[], Any]
    units: float
    flops: float | Callable[[], float] = 0.0
    seconds: Callable[[], float] | None = None
    save: Callable[[Path], Any] | None = None


@dataclass(frozen=True)
class Timing:
    """One contestant's figures. rate: units per second, median over rounds. ratio: the first
    contestant's rate over this one's. mfu: none = not stated, or disturbed: over the peak,
    which other work on the machine kept down."""

    name: str
    rate: float
    slowest: float
    fastest: float
    ratio: float
    warm_up_s: float
    mfu: float | None
    rounds: int
    disturbed: bool = False


@dataclass(frozen=True)
class Spent:
    """Seconds that a run took: by the clock, and of CPU time in all threads of its process."""

    wall_s: float
    cpu_s: float

    def without(self, part: Spent) -> Spent:
        """What is left when a part of the same work is taken away."""
        return Spent(self.wall_s - part.wall_s, self.cpu_s - part.cpu_s)


def spent(run: Callable[[], Any]) -> Spent:
    """Runs it."""
    _wait()
    began = time.perf_counter()
    began_cpu = time.process_time()
    run()
    _wait()
    return Spent(time.perf_counter() - began, time.process_time() - began_cpu)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Inside the block nothing takes the C kernels that `make lab` builds."""
    with (
        mock.patch.object(product, "library", lambda dtype: None),
        mock.patch.object(fused, "kernel", lambda dtype: None),
    ):
        yield


def race(
    contestants: Sequence[Contestant],
    rounds: int | None,
    peak_flops: float | Callable[[], float] | None = None,
    limit_s: float | None = None,
) -> list[Timing]:
    """Timings in the given order; the first contestant is the baseline of all ratios. RunError
    without contestants.

    rounds: none = up to ROUNDS, those that end within limit_s (default LIMIT_S). peak_flops: a
    function is asked before each round, and its best answer counts."""
    if not contestants:
        raise RunError(
            "no contestants to time; install the peers with pip "
            "install -e '.[bench]', or choose others with --vs"
        )
    hardware.keep_freed_memory(hardware.device())  # as our loops do; peers gain by it too
    most = rounds or ROUNDS
    peak = peak_flops if isinstance(peak_flops, float | int) else 0.0
    bar = tqdm(total=(1 + most) * len(contestants), unit="turn", leave=False, delay=BAR_AFTER_S)
    seconds: list[list[float]] = [[] for _ in contestants]
    for r in _until(1 + most, LIMIT_S if limit_s is None else limit_s, rounds is not None):
        if callable(peak_flops):
            peak = max(peak, peak_flops())
        for i, contestant in enumerate(contestants):
            bar.set_description(f"{contestant.name}, {f'round {r} of {most}' if r else 'warm-up'}")
            seconds[i].append(_seconds(contestant))
            bar.update()
        if r == 0:
            gc.collect()
    bar.close()
    warm_up = [s[0] for s in seconds]
    seconds = [s[1:] for s in seconds]
    own = [contestants[0].units / s for s in seconds[0]]
    found = []
    for contestant, times, first in zip(contestants, seconds, warm_up):
        rates = [contestant.units / s for s in times]
        rate = statistics.median(rates)
        flops = float(contestant.flops() if callable(contestant.flops) else contestant.flops)
        mfu = rate * flops / peak if flops and peak else None
        ratio = statistics.median(a / b for a, b in zip(own, rates))
        disturbed = mfu is not None and mfu > 1
        mfu = None if disturbed else mfu
        found.append(
            Timing(
                contestant.name,
                rate,
                min(rates),
                max(rates),
                ratio,
                first,
                mfu,
                len(rates),
                disturbed,
            )
        )
    return found


def _until(most: int, limit_s: float, all_of_them: bool) -> Iterator[int]:
    """0, 1, ... below `most`; the first two always, and no further one that would end after
    limit_s, unless all are asked for. It is taken to be as long as the one before."""
    began = turned = time.perf_counter()
    for turn in range(most):
        now = time.perf_counter()
        if turn > 1 and not all_of_them and 2 * now - turned - began > limit_s:
            return
        turned = now
        yield turn


def turns(rounds: int | None, unit: str) -> Iterator[int]:
    """Numbers of the rounds of a bench that is no `race`, behind a bar: `rounds` of them, or up
    to ROUNDS within LIMIT_S."""
    most = rounds or ROUNDS
    return iter(tqdm(_until(most, LIMIT_S, rounds is not None), total=most, unit=unit, leave=False))


class Peak:
    """The FLOP/s that shares are of, as `race` takes it: a data sheet's, or the best product
    measured so far."""

    def __init__(self) -> None:
        self.peak = hardware.Peak(hardware.device(), numerics.compute_dtype())
        self.trials = 1

    def __call__(self) -> float:
        if not self.peak.stated:
            self.peak.measure()
            self.trials += 1
        return self.peak.flops

    def __str__(self) -> str:
        between = "" if self.peak.stated else f", the best of {8 * self.trials} between the rounds"
        return f"MFU of {self.peak.flops / 1e9:,.0f} GFLOP/s ({self.peak.source}{between})"

    def row(self) -> dict[str, Any]:
        """What --json keeps of it."""
        return dict(peak_flops=self.peak.flops, peak_source=self.peak.source)


def dtype() -> str:
    """The name of the compute dtype."""
    return str(numerics.compute_dtype()).removeprefix("torch.")


def step(
    model: Any, optimizers: Iterable[torch.optim.Optimizer], loss: Callable[[], torch.Tensor]
) -> None:
    """A training step: the loss in the compute dtype, its gradient, clipping, the update."""
    with numerics.autocast():
        value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def entrants(
    modes: Sequence[str],
    codechat: Callable[..., Contestant],
    peer: Callable[..., Contestant],
    kinds: Iterable[str],
) -> dict[str, Callable[[], Contestant]]:
    """{name: builder}: codechat (name, compile) as it trains, on a GPU also eager, then each
    kind of peer (name, kind, compile) in each mode."""
    made = {"codechat": partial(codechat, "codechat", True)}
    if hardware.device().type == "cuda" and "eager" in modes:
        made["codechat, eager"] = partial(codechat, "codechat, eager", False)
    names = {f"{kind}, {mode}": (kind, mode == "compiled") for kind in kinds for mode in modes}
    return made | {name: partial(peer, name, *how) for name, how in names.items()}


def _seconds(contestant: Contestant) -> float:
    took = spent(contestant.run)
    return float(contestant.seconds()) if contestant.seconds else took.wall_s


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_alone(
    module: str, cfg: Any, names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """(`alone` of each contestant, the column that shows its memory)."""
    bar = tqdm(list(names), desc="peak memory, each alone", leave=False, delay=BAR_AFTER_S)
    memory = {name: alone(module, cfg, name) for name in bar}
    shown = {
        n: f"{m['peak'] / 2**30:.2f} GiB, {(m['peak'] - m['before']) / 2**30:.2f} of the step"
        for n, m in memory.items()
    }
    return memory, {"peak memory": shown}


def apart(module: str, cfg: Any, names: Sequence[str], title: str) -> dict[str, list[Any]]:
    """`alone` of each contestant in turns, in two rounds if cfg has none. Prints the table;
    returns {name: the figures of its rounds}."""
    rounds = cfg.rounds or 2
    found: dict[str, list[Any]] = {name: [] for name in names}
    for _ in tqdm(range(rounds), unit="round", leave=False):
        for name in names:
            found[name].append(alone(module, cfg, name))
    first = [one["units"] / one["cpu_s"] for one in found[names[0]]]
    headings = ["per CPU second", f"{names[0]} is faster by", "anonymous", "resident", "writes"]
    table = Table("", *headings, title=f"{title}, {rounds} rounds, each in its own process")
    for name, rows in found.items():
        rates = [one["units"] / one["cpu_s"] for one in rows]
        ratio = statistics.median(a / b for a, b in zip(first, rates))
        files = ", ".join(f"{file} {size / 1e6:.1f}" for file, size in rows[-1]["files"].items())
        table.add_row(
            name,
            f"{statistics.median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f})",
            f"{ratio:.2f} x",
            f"{max(one['anonymous'] for one in rows) / 1e9:.2f} GB",
            f"{max(one['peak'] for one in rows) / 1e9:.2f} GB",
            f"{sum(rows[-1]['files'].values()) / 1e6:.1f} MB: {files}",
        )
    Console(width=160).print(table)
    return found


def alone(module: str, cfg: Any, name: str) -> dict[str, Any]:
    """A process that builds the contestant, runs it MEMORY_STEPS times and saves it. "before",
    "peak": bytes resident until it was built, and until it ran; on a GPU, of CUDA's allocator.
    "anonymous": the most that was no part of a file. "units", "cpu_s": of the last run.
    "files": bytes of each that it saved."""
    plain = config.plain(replace(cfg, memory=False, json=None))
    words = [
        sys.executable,
        "-m",
        "benchmarks.measure",
        module,
        type(cfg).__name__,
        json.dumps(plain),
        name,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RunError(f"measuring {name} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _measure_here(module: str, kind: str, plain: str, name: str) -> None:
    hardware.keep_freed_memory(hardware.device())
    cfg = config.from_dict(getattr(settings, kind), json.loads(plain))
    contestant = importlib.import_module(module).builders(cfg)[name]()
    before = _peak_so_far()
    gc.collect()
    # what building left free would count as used by the steps
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    with Anonymous() as anonymous:
        for _ in range(MEMORY_STEPS):
            began = time.process_time()
            contestant.run()
            cpu_s = time.process_time() - began
    peak = _peak_so_far()
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        if contestant.save:
            contestant.save(Path(folder))
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                files[path.name] = path.stat().st_size
    figures = dict(before=before, peak=peak, anonymous=anonymous.most)
    print(json.dumps(figures | dict(units=contestant.units, cpu_s=cpu_s, files=files)))


class Anonymous:
    """The most anonymous memory of this process while the block ran, in bytes: what the system
    cannot drop, as it can pages of a file that is mapped. Looked at 20 times a second."""

    def __init__(self) -> None:
        self.most = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Anonymous:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, _status("RssAnon"))


def _peak_so_far() -> float:
    """Bytes. Not ru_maxrss, which a child inherits from its parent."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    return _status("VmHWM")


def _status(key: str) -> float:
    """Bytes of a line of /proc/self/status."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise RunError(
            "peak memory is read from /proc/self/status, which "
            "this system does not have; pass --no-memory"
        )
    lines = status.read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def show(
    title: str,
    unit: str,
    timings: Sequence[Timing],
    extra: dict[str, dict[str, str]] | None = None,
) -> None:
    """Print the table; extra: more columns {heading: {contestant: text}}."""
    extra = extra or {}
    first = timings[0]
    headings = [
        f"{unit}/s, median",
        "slowest to fastest",
        f"{first.name} is faster by",
        "MFU",
        "first run, s",
    ]
    rounds = f"{first.rounds} round{'s' * (first.rounds > 1)}"
    table = Table("", *headings, *extra, title=f"{title}, {rounds}")
    for t in timings:
        rate = f"{t.rate:,.4g}" if t.rate < 100 else f"{t.rate:,.0f}"
        ratio = "" if t is first else f"{t.ratio:.2f} x"
        share = "disturbed" if t.disturbed else "" if t.mfu is None else f"{t.mfu:.0%}"
        cells = [rate, f"{t.slowest:,.4g} to {t.fastest:,.4g}", ratio, share]
        table.add_row(
            t.name,
            *cells,
            f"{t.warm_up_s:.1f}",
            *(column.get(t.name, "") for column in extra.values()),
        )
    Console(width=140).print(table)


def rows(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """The timings as plain data for --json."""
    return [asdict(t) for t in timings]


if __name__ == "__main__":
    _measure_here(*sys.argv[1:])
