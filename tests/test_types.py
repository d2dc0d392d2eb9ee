"""Types: the rooms from core to training agree with their annotations. Settings and the modules with findings left are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def mypy(*words: str) -> subprocess.CompletedProcess[str]:
    # generous: a first run without a cache reads torch's annotations
    return subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )


@pytest.mark.slow
def test_the_rooms_agree_with_their_annotations() -> None:
    done = mypy()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
