"""The errors that a user sees: one line that says what was got, what is required, and what to do.

The command line prints it and exits with 2. Anything else is a defect, and its traceback is shown.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A message for the user: what was got; what is required; what to do."""


class ConfigError(UserError, ValueError):
    """A setting that cannot be."""


class DataError(UserError, ValueError):
    """Data that cannot be used."""


class MissingFile(UserError, FileNotFoundError):
    """A file, run or checkpoint that is not there."""


class RunError(UserError, RuntimeError):
    """A run directory in a state that forbids what was asked."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, read or fitted."""


def nearest(key: str, valid: Iterable[str]) -> str:
    """The end of an error message: "; did you mean 'x'?", or the valid names where none is near."""
    names = list(valid)
    last = [n for n in names if n.rpartition(".")[2] == key.removeprefix("--")]
    close = last or difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names[:40])}" + (", ..." if len(names) > 40 else "")
