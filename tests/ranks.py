"""Programs on several ranks: torchrun of a text, with its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def start(
    n: int, program: str, folder: Path, *args: str, more: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    """torchrun with n ranks of `program`, a file in `folder`; more: arguments of torchrun itself."""
    path = folder / f"program{len(list(folder.glob('program*.py')))}.py"
    path.write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **env}
    return subprocess.Popen(
        [sys.executable, *torchrun, str(path), *args],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def finish(ranks: subprocess.Popen[str], timeout: float = 400) -> str:
    """What all ranks printed; none of them outlives this."""
    try:
        out, _ = ranks.communicate(timeout=timeout)
    finally:  # torchrun ends its ranks on SIGTERM; if it were killed, it could not
        ranks.terminate()
        ranks.wait(timeout=40)
    return out


def on_ranks(n: int, program: str, folder: Path, *args: str, **more: object) -> str:
    """The output of a program that must end with 0 on every rank."""
    ranks = start(n, program, folder, *args, **more)
    out = finish(ranks)
    assert ranks.returncode == 0, out[-4000:]
    return out
