"""How long the threads of OpenMP poll for work before they sleep: GOMP_SPINCOUNT, which libgomp reads once, when
torch is imported."""

import os
import sys
from pathlib import Path

ALONE = "10000"  # libgomp's own 300,000 costs a third of a step beside other work, and gains nothing alone
SHARED = "100"  # beside other work a step takes twice as long with 10,000 (docs/experiments/speed-on-a-cpu.md)


def others_compute() -> bool:
    """Whether other processes now keep cores busy that this process's threads want."""
    if sys.platform != "linux":
        return False
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]  # of "0.52 0.58 0.59 3/612 4242"
    others = int(running) - 1
    return others + len(os.sched_getaffinity(0)) > (os.cpu_count() or 1)


def set_polls(*, shared: bool) -> None:
    """Set the variable for this process and its children, unless the user did. Without effect once torch is loaded."""
    if sys.platform == "linux":
        os.environ.setdefault("GOMP_SPINCOUNT", SHARED if shared else ALONE)
