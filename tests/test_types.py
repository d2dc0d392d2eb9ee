"""Types: the rooms from core to training agree with their annotations. Settings and the modules with findings left are in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]


def mypy(*words: str) -> subprocess.CompletedProcess[str]:
    # generous: a first run without a cache reads torch's annotations
    return subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )


@pytest.mark.slow
def test_the_rooms_agree_with_their_annotations() -> None:
    done = mypy()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_modules_with_findings_left_exist_and_are_few() -> None:
    listed = [name for override in SETTINGS["overrides"] for name in override["module"]]
    paths = [ROOT / name.replace(".", "/") for name in listed]
    assert all(path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() for path in paths)
    checked = [p for room in SETTINGS["packages"] for p in (ROOT / room.replace(".", "/")).rglob("*.py")]
    assert len(set(listed)) < 0.4 * len(checked)
