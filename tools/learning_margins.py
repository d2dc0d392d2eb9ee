"""By how much the tests of learning pass: each lesson with other seeds, instruction sets and numbers
of threads, in processes of its own.

    python tools/learning_margins.py                                      all lessons, 20 seeds, 4 combinations:
        hours on one core
    python tools/learning_margins.py --only toy --seeds 5 --threads 1     lessons whose name contains `toy`
    python tools/learning_margins.py --list                               names only

It trains with the settings of the tests themselves (`learning.LEARNING`), which run seed 0.
`avx2` holds ATen, oneDNN and MKL to AVX2, which stands for a processor without AVX-512. A row is
one asserted number; `worst` is the seed nearest to the bound or furthest beyond it. Exit code 1
where a combination has fewer than 19 of 20 seeds on the right side. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "tests"
ISA = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
PASSING = 0.95
sys.path[:0] = [str(HERE), str(HERE.parent)]

from learning import LEARNING, Claim  # noqa: E402


def load_lessons() -> None:
    """Import every test module that registers lessons."""
    for path in sorted(HERE.glob("*/test_*.py")):
        if "@lesson(" in path.read_text(encoding="utf-8"):
            sys.path.insert(0, str(path.parent))
            importlib.import_module(path.stem)


def run_seeds(name: str, seeds: int) -> None:
    """Print the claims of each seed as a line of JSON."""
    from codechat.runs import paths

    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            paths.ROOT = Path(folder)
            print(json.dumps(LEARNING[name](Path(folder), seed)), flush=True)


def measure(name: str, isa: str, threads: int, seeds: int) -> list[list[Claim]]:
    """Claims per seed, from a process that is held to the instruction set and the number of
    threads."""
    env = os.environ | ISA[isa] | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--only", name, "--seeds", str(seeds), "--run"]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return [
        [Claim(*claim) for claim in json.loads(line)]
        for line in done.stdout.splitlines()
        if line.startswith("[[")
    ]


def rows_of(found: list[list[Claim]]) -> list[tuple[str, int, float, str]]:
    """(what, seeds passed, worst value, bound) of each claim; bounds that differ between seeds
    would be a mistake of the lesson."""
    rows = []
    for claims in zip(*found, strict=True):
        (bound,) = {(c.sign, c.bound) for c in claims}
        worst = (min if bound[0] == ">" else max)(c.value for c in claims)
        rows.append(
            (claims[0].what, sum(c.held() for c in claims), worst, f"{bound[0]} {bound[1]:g}")
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="lessons whose name contains this")
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0 to this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", nargs="+", choices=list(ISA), default=list(ISA))
    parser.add_argument("--list", action="store_true", help="print the names of the lessons")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    load_lessons()
    if given.run:
        run_seeds(given.only, given.seeds)
        return 0
    names = [name for name in LEARNING if given.only in name]
    if given.list or not names:
        print("\n".join(names or LEARNING))
        return 0 if names else 2
    failed, line = 0, "{:<44} {:<28} {:<7} {:>7} {:>9} {:>10} {:>9} {:>8}"
    print(line.format("lesson", "what", "isa", "threads", "seeds", "worst", "bound", "s/seed"))
    for name in names:
        for isa in given.isa:
            for threads in given.threads:
                began = time.perf_counter()
                found = measure(name, isa, threads, given.seeds)
                each = (time.perf_counter() - began) / given.seeds
                for what, passed, worst, bound in rows_of(found):
                    print(
                        line.format(
                            name,
                            what,
                            isa,
                            threads,
                            f"{passed}/{len(found)}",
                            f"{worst:.3f}",
                            bound,
                            f"{each:.1f}",
                        ),
                        flush=True,
                    )
                    failed += passed < PASSING * len(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
