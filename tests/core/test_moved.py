"""Old names of modules still import, say so, and are the new modules themselves."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from codechat.core.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_new_module(old: str) -> None:
    new = importlib.import_module(f"codechat.{MOVED[old]}")
    spec = new.__spec__
    sys.modules.pop(f"codechat.{old}", None)
    with pytest.warns(DeprecationWarning):
        assert importlib.import_module(f"codechat.{old}") is new
    assert new.__spec__ is spec and new.__name__ == f"codechat.{MOVED[old]}"


def test_a_name_that_never_was_is_still_an_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("codechat.never")


def test_an_old_module_still_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "codechat.chars", "--help"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and "--objective" in done.stdout
