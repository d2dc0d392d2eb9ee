"""Which walls this machine allows, tried rather than guessed."""

from __future__ import annotations

import functools
from codechat.config import ConfigError, RunError

LEVELS = ("full", "landlock", "none")


class SandboxUnavailable(RunError):
    """The machine does not allow the isolation that was asked for. Nothing untrusted has run."""


@functools.cache
def choose(isolation: str) -> str:
    return "full" if isolation == "auto" else isolation
