"""The files that start a run: launch.sh (torchrun), and around it a job for Slurm.

Only launch.sh holds a torchrun line. Without arguments it starts on this machine; a job script calls it on every node with the rendezvous options of
its cluster. Started again, it continues the run from its last checkpoint.

`lines` of a job take accounts, partitions and what else a cluster wants
(`--job-lines "--partition=gpu" --job-lines "--constraint=a100,h100"`).
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from codechat.core.errors import ConfigError

SAVE_S = 600  # that torchrun gives its ranks to write a checkpoint when it is told to stop; its own default is 30
PORT = 29517
DEVICE = re.compile(r"\d+|GPU-[0-9a-fA-F-]{4,}|MIG-[0-9a-zA-Z/-]{4,}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where and how a run starts. `module` is a loop, nproc the ranks on each of `nodes` machines."""

    name: str
    module: str
    nproc: int
    nodes: int = 1
    devices: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES: indices or UUIDs; empty = as the environment says
    max_restarts: int = 0
    again: str = "--resume"  # what a second start adds; --overwrite where a loop has nothing to resume
    hours: float = 24.0
    lines: tuple[str, ...] = ()  # options of the cluster, one a line

    def __post_init__(self) -> None:
        for field in ("nproc", "nodes"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.hours <= 0 or self.max_restarts < 0:
            limits = "hours must be above 0, max_restarts at least 0"
            raise ConfigError(f"hours {self.hours}, max_restarts {self.max_restarts}; {limits}")
        check_devices(self.devices, self.nproc)


def check_devices(devices: tuple[str, ...], nproc: int) -> None:
    """ConfigError for what CUDA would silently read as fewer GPUs: it stops at the first word it does not know, and UUIDs and indices
    do not mix."""
    listed = f"devices {','.join(devices)}"
    known = all(DEVICE.fullmatch(word) for word in devices) and len({word.isdecimal() for word in devices}) < 2
    if not known or len(set(devices)) < len(devices):
        raise ConfigError(
            f"{listed}; required are different GPUs, all indices (0) or all UUIDs of nvidia-smi -L (GPU-..., MIG-...)"
        )
    if devices and nproc > len(devices):
        raise ConfigError(f"{listed} for {nproc} ranks; each rank needs one: set --nproc {len(devices)}")


def launch_sh(job: Job) -> str:
    """launch.sh: torchrun on this machine, or on one of several with rendezvous options as arguments."""
    where, several = f"runs/{job.name}", job.nodes > 1
    ranks = f"{job.nproc} rank{'s' if job.nproc > 1 else ''}" + (f" on each of {job.nodes} nodes" if several else "")
    guard = (
        f'[ $# -gt 0 ] || {{ echo "{job.nodes} nodes: start this by its job script" >&2; exit 2; }}\n'
        if several
        else ""
    )
    visible = f"export CUDA_VISIBLE_DEVICES={','.join(job.devices)}\n" if job.devices else ""
    restarts = f" --max-restarts {job.max_restarts}" if job.max_restarts else ""
    return (
        "#!/bin/sh\n"
        f"# {job.name}: {job.module} on {ranks}. Run it again to continue from the last checkpoint.\n"
        f'cd "$(dirname "$0")/{"/".join([".."] * (2 + job.name.count("/")))}" || exit 1\n'
        f'again=; grep -q \'"status": "planned"\' {where}/status.json || again={job.again}\n'
        f"{visible}export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_S}  # seconds to save in when told to stop\n"
        f"{guard}[ $# -gt 0 ] || set -- --standalone\n"
        f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@" --nproc-per-node {job.nproc}{restarts} \\\n'
        f"    -m {job.module} -- --config {where}/config.json --run-name {job.name} $again\n"
    )


def slurm(job: Job, root: Path) -> str:
    """A Slurm job: one torchrun on each node, met at the first node's port. `sbatch FILE`; requeued, it continues."""
    path = (root / "runs" / job.name).as_posix()
    if broken := [word for word in (path, *job.lines) if "\n" in word]:
        raise ConfigError(f"{broken[0]!r} holds a line break; a job script takes one option a line")
    minutes = round(job.hours * 60)
    options = [
        f"--job-name={job.name.replace('/', '-')}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--gpus-per-node={job.nproc}",
        f"--time={minutes // 60:02d}:{minutes % 60:02d}:00", f"--output={path}/slurm-%j.log", "--open-mode=append", "--requeue", f"--signal=TERM@{SAVE_S}", *job.lines,
    ]  # fmt: skip
    return (
        "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in options) + "set -eu\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f'srun --kill-on-bad-exit=1 sh {shlex.quote(path + "/launch.sh")} --nnodes "$SLURM_NNODES" \\\n'
        f'    --rdzv-backend c10d --rdzv-endpoint "$head:{PORT}" --rdzv-id "$SLURM_JOB_ID"\n'
    )
