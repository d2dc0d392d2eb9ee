"""The errors that a user sees: one line that says what was got, what is required, and what to do.

The command line prints it and exits with 2. Anything else is a defect, and its traceback is shown.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A message for the user: what was got; what is required; what to do."""


class ConfigError(UserError, ValueError):
    """An invalid setting."""


class DataError(UserError, ValueError):
    """Data that cannot be used."""


class MissingFile(UserError, FileNotFoundError):
    """A file, run or checkpoint that does not exist."""


class RunError(UserError, RuntimeError):
    """A run directory whose state forbids the request."""


class EngineLost(RunError):
    """The server did not come back in time. The run can be resumed at this step."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or read, or does not fit the model."""


def nearest(key: str, valid: Iterable[str], listed: bool = False) -> str:
    """The end of an error message: "; did you mean 'x'?", or the valid names where none is near.
    listed: the message has named them already."""
    names = list(valid)
    given = key.removeprefix("--")
    last = [n for n in names if n.rpartition(".")[2] == given]
    # the dashes of flags are no likeness
    bare = {name.removeprefix("--"): name for name in names}
    close = difflib.get_close_matches(given, bare, n=1, cutoff=0.6)
    begun = []
    for name in bare:
        longer = len(name) > 3 and given.startswith(name)
        shorter = len(given) > 1 and name.startswith(given)  # --temp
        if longer or shorter:
            begun.append(name)
    begun.sort(key=lambda name: abs(len(name) - len(given)))
    # two letters of four in another order are half a likeness
    same_size = [name for name in bare if len(name) == len(given)]
    turned = difflib.get_close_matches(given, same_size, n=1, cutoff=0.5)
    likely = close or begun or turned
    if last:
        return f"; did you mean {last[0]!r}?"
    if likely:
        return f"; did you mean {bare[likely[0]]!r}?"
    if listed:
        return ""
    more = ", ..." if len(names) > 40 else ""
    return f"; valid: {', '.join(names[:40])}{more}"


def check_choice(what: str, value: str, choices: Iterable[str]) -> str:
    """The value, if it is one of the choices, else ConfigError. what: the name of the setting."""
    names = list(choices)
    if not names:
        raise ConfigError(f"{what} {value!r}; there is none to choose from")
    if value not in names:
        meant = nearest(str(value), names, listed=True)
        raise ConfigError(f"{what} {value!r}; required: one of {', '.join(names)}{meant}")
    return value
