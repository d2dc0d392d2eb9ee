"""Programs and loops on several ranks, by torchrun, with their output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from codechat.core import config, registry

REPOSITORY = Path(__file__).resolve().parents[1]
# A thread of a process group that meets the end of the interpreter aborts the process.
# Registered first, this runs last.
GROUP_ENDS = """
import atexit, os, pathlib

@atexit.register
def no_thread_of_a_group_is_left():
    if left := [t for p in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in (t := p.read_text())]:
        print("threads of the process group are left:", left, flush=True)
        os._exit(1)
"""
LOOPS = f"""{GROUP_ENDS}
import pathlib, sys
from contextlib import nullcontext
from codechat.core import config, registry
from codechat.distributed import dist
from codechat.runs import paths

paths.ROOT = pathlib.Path(sys.argv[1])
loops = [registry.find(name) for name in sys.argv[2::2]]
# A loop alone opens its own process group. Several share one: the second would meet the keys of
# the first in torchrun's store.
with dist.session() if len(loops) > 1 else nullcontext():
    for loop, path in zip(loops, sys.argv[3::2]):
        loop.load(loop.function)(config.resolve(loop.config_class, file=path))
"""


def start(
    n: int, program: str, folder: Path, *args: str, more: tuple[str, ...] = (), **env: str
) -> Any:
    """The process of torchrun with n ranks of `program`, a file in `folder`; more: arguments of
    torchrun itself."""
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


def finish(ranks: subprocess.Popen[str], timeout: float = 1200) -> str:
    """What all ranks printed; none of them outlives this."""
    try:
        out, _ = ranks.communicate(timeout=timeout)
    finally:  # torchrun ends its ranks on SIGTERM; if it were killed, it could not
        ranks.terminate()
        ranks.wait(timeout=40)
    return out


def on_ranks(n: int, program: str, folder: Path, *args: str, **more: Any) -> str:
    ranks = start(n, program, folder, *args, **more)
    out = finish(ranks)
    assert ranks.returncode == 0, out[-4000:]
    return out


def written(home: Path, cfg: Any) -> str:
    """The path of a configuration's file in `home`, named as its run."""
    path = home / f"{cfg.run_name}.json"
    path.write_text(json.dumps(config.plain(cfg)))
    return str(path)


def train_on_ranks(n: int, home: Path, *cfgs: Any) -> None:
    """Train with each configuration in turn, on n ranks, with runs below `home`."""
    words = [word for cfg in cfgs for word in (registry.entry_of(cfg).id, written(home, cfg))]
    on_ranks(n, LOOPS, home, str(home), *words)
