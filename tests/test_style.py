"""The code is as `ruff` formats it, and free of what it finds; the settings are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", ["check", "format --check"])
def test_ruff_finds_nothing(words: str) -> None:
    command = [sys.executable, "-m", "ruff", *words.split(), "--no-cache", "codechat", "tests", "examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
