"""How a command ends: the one place that turns an exception into a line on stderr and an exit code.

Exit codes: 0 done; 2 bad input (one line says what was got and what to do); 130 interrupted. An unexpected exception is
a defect and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from codechat.core import config, registry
from codechat.core.errors import UserError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# A disk or a limit, and no defect: errno, of which the user gets the system's own words.
STORAGE_ERRORS = {getattr(errno, n) for n in "ENOSPC EDQUOT EROFS EACCES EPERM EIO EFBIG EMFILE".split()}


def run_main(command: Callable[[list[str] | None], Any]) -> None:
    """End the process with the exit code of a module's `main`: what `python -m codechat.X` calls."""
    sys.exit(guarded(command, sys.argv[1:]))


def train_main(id: str, argv: list[str] | None = None, *, doc: str | None) -> int:
    """The `main` of a loop (`codechat grpo`, torchrun): parse its settings, train; 0 when the run finished, 130 when it was stopped early."""
    entry = registry.find(id, registry.LOOPS)
    words = sys.argv[1:] if argv is None else argv
    cfg = config.parse(entry.config_class, words, presets=entry.presets, prog=f"codechat {entry.command}", epilog=doc)
    return 0 if entry.load(entry.function)(cfg).status["status"] == "finished" else INTERRUPTED


def parse_and_run(
    cls: type, function: Callable[[Any], Any], name: str, doc: str | None, argv: list[str] | None = None
) -> None:
    """The `main` of `codechat NAME`: call the function with its settings."""
    function(config.parse(cls, sys.argv[1:] if argv is None else argv, prog=f"codechat {name}", epilog=doc))


def guarded(command: Callable[[list[str]], Any], argv: list[str]) -> int:
    """Call `command(argv)`; turn a user error, an interrupt or a failing disk into one line on stderr and an exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # sampled text may not fit the terminal's encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    try:
        code = command(argv)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(f"error: {error}", 2)
    except KeyboardInterrupt as stop:
        below = "\n" if sys.stderr.isatty() else ""  # Ctrl-C leaves the cursor within a line
        return _fail(f"{below}interrupted{f': {stop}' if str(stop) else ''}", INTERRUPTED)
    except BrokenPipeError:  # without a stdout that can be flushed Python fails once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"error: {where}{error.strerror}; mend this, then run the command again", 2)


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    return code
