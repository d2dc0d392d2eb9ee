"""Where a run came from: commit, versions, hardware, command. What cannot be determined is "unknown", with the reason.

The commit is recorded only where the package is in its own checkout: a package that is installed inside another
repository would otherwise get that repository's commit.
"""

from __future__ import annotations

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
    """Output of a git command; RuntimeError with git's first line where it fails."""
    env = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    try:
        command = ["git", "-C", str(root), *args]
        done = subprocess.run(command, capture_output=True, timeout=20, env=env, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RuntimeError("git is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise RuntimeError(f"git did not answer: {e}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[0] if lines else f"git exited {done.returncode}")
    return done.stdout.decode(errors="replace")


def git_state(root: Path) -> dict[str, Any]:
    """{commit, dirty, dirty_hash}, or {commit: "unknown", reason}. The hash covers tracked changes and the names of
    untracked files."""
    try:
        if not (root / "pyproject.toml").is_file():
            raise RuntimeError("not a source checkout")
        top = Path(_git(root, "rev-parse", "--show-toplevel").rstrip("\n"))
        if top.resolve() != root.resolve():
            raise RuntimeError(f"the enclosing repository {top} is not this project's")
        commit = _git(root, "rev-parse", "--verify", "HEAD").strip()
        changed = _git(root, "status", "--porcelain")
        dirty = changed + _git(root, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD") if changed else ""
    except RuntimeError as e:
        return {"commit": "unknown", "reason": str(e)}
    dirty_hash = hashlib.sha256(dirty.encode()).hexdigest()[:12] if dirty else None
    return {"commit": commit, "dirty": bool(dirty), "dirty_hash": dirty_hash}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (x.partition(":")[2].strip() for x in text.splitlines() if x.startswith("model name"))
    return next(names, platform.machine())


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory in GiB, and GPUs where torch is loaded and sees some."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        memory = None
    torch = sys.modules.get("torch")
    count = torch.cuda.device_count() if torch and torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {"cpu": _cpu_name(), "cores": cores, "memory_gib": memory, "gpus": gpus, "system": platform.platform()}


def snapshot(root: Path) -> dict[str, Any]:
    """All of the above, for env.json."""
    return {
        "time": now(),
        **git_state(root),
        "argv": list(sys.argv),
        "cwd": str(Path.cwd()),
        "host": platform.node(),
        "versions": versions(),
        "hardware": hardware(),
    }
