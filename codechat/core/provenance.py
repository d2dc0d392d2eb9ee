"""Where a run came from: commit, versions, hardware, command. What cannot be determined is
"unknown", with the reason."""

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "tiktoken", "datasets", "pandas")


def now() -> str:
    """UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _git(root: Path, *args: str) -> str:
    """What git prints in `root`; a repository around it does not count, as it may be that of
    another project."""
    env = {
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_CEILING_DIRECTORIES": str(root.resolve().parent),
    }
    done = subprocess.run(
        ["git", "-C", str(root), *args],
        capture_output=True,
        timeout=20,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        check=True,
        encoding="utf-8",
        errors="replace",
    )
    return done.stdout


def git_state(root: Path) -> dict[str, Any]:
    """{commit, dirty, dirty_hash}, or {commit: "unknown", reason}. The hash covers tracked
    changes and the names of untracked files."""
    try:
        commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
        changed = _git(root, "status", "--porcelain")
        dirty = (
            changed + _git(root, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
            if changed
            else ""
        )
    # no git, no answer, no repository, no commit
    except (
        OSError,
        subprocess.SubprocessError,
    ) as e:
        return {
            "commit": "unknown",
            "reason": str(getattr(e, "stderr", None) or e).strip().partition("\n")[0],
        }
    dirty_hash = hashlib.sha256(dirty.encode()).hexdigest()[:12] if dirty else None
    return {"commit": commit, "dirty": bool(dirty), "dirty_hash": dirty_hash}


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide results."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, and GPUs where torch is loaded and sees some."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    torch: Any = sys.modules.get("torch")
    count = torch.cuda.device_count() if torch and torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": memory,
        "gpus": gpus,
        "system": platform.platform(),
    }


def compiled(root: Path) -> list[str]:
    """What `make lab` or `make cpp` has built: its sums are rounded in another order than torch's."""
    return sorted(path.name for path in (root / "build" / "cpp").glob("lib*.so"))


def snapshot(root: Path) -> dict[str, Any]:
    """All of the above, for env.json."""
    here = {"argv": list(sys.argv), "cwd": str(Path.cwd()), "host": platform.node()}
    return {
        "time": now(),
        **git_state(root),
        **here,
        "versions": versions(),
        "hardware": hardware(),
        "compiled": compiled(root),
    }
