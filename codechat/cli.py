"""`codechat COMMAND`: runs a command of `core.registry.COMMANDS`, and turns errors into one
line on stderr and an exit code.

A command's settings are imported when it is called, and its code after they are read, so no
--help loads torch.

Exit codes: 0 done; 2 bad input (one line says what was got and what to do); 130 interrupted. An
unexpected exception is a defect and keeps its traceback."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from errno import EACCES, EDQUOT, EFBIG, EIO, EMFILE, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any

from codechat import __version__
from codechat.core.errors import ConfigError, UserError, nearest
from codechat.core.registry import COMMANDS
from codechat.runs.closing import closing_lines, stopped_lines

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Errors of a disk or a limit, which are no defects: the user gets the system's own words.
STORAGE_ERRORS = {
    ENOSPC,
    EDQUOT,
    EROFS,
    EACCES,
    EPERM,
    EIO,
    EFBIG,
    EMFILE,
}

USAGE = """\
usage: codechat [--root DIR] COMMAND [OPTIONS]

A laboratory for training small code-and-tool-calling language models."""

EXAMPLES = """\
examples:
  codechat run nano                                   every stage on two CPU cores
  codechat chat --ckpt released/mini --user "write quicksort"
  codechat tools --ckpt released/mini --user "What is 12 squared?"
  codechat runs compare nano/sft nano/rl
  codechat --root ~/mine run nano                     runs/, data/ and reports/ below another folder, as after cd
  codechat sft --help                                 every setting of a command"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. SystemExit passes through where a command raises it
    (--help)."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


def guarded(command: Callable[[list[str]], Any], argv: list[str]) -> int:
    """Call `command(argv)`; turn a user error, an interrupt or a failing disk into one line on
    stderr and an exit code."""
    # sampled text may not fit the terminal's encoding
    for stream in (
        sys.stdin,
        sys.stdout,
        sys.stderr,
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    try:
        code = command(argv)
        sys.stdout.flush()
        return code if type(code) is int else 0
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


def _dispatch(words: list[str]) -> Any:
    if words[:1] == ["--root"]:
        _change_root(words[1:2])
        words = words[2:]
    if not words or words[0] in ("-h", "--help", "help"):
        _print_help()
        return 0 if words else 2
    if words[0] == "--version":
        print(f"codechat {__version__}")
        return 0
    if sys.platform != "linux":
        raise ConfigError(
            f"codechat runs on Linux, this is {sys.platform}; on Windows use WSL2, on a Mac a Linux "
            "virtual machine"
        )
    name = words[0]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
    command = COMMANDS[name]
    done = command.run(words[1:])
    if command.kind == "loop":
        speaks = int(os.environ.get("RANK", 0)) == 0
        if done.status["status"] != "finished":
            if speaks:
                print(stopped_lines(done, name), file=sys.stderr)
            return INTERRUPTED
        if speaks:
            print(closing_lines(done, COMMANDS))
    return done


def _change_root(given: list[str]) -> None:
    """Change to the folder of --root; everything else, and every process started later, has it
    as its own folder."""
    folder = Path(given[0]).expanduser() if given else None
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"{' '.join(['--root', *given])}: required is a folder "
            "that exists, such as --root . for this one"
        )
    os.chdir(folder)


def _print_help() -> None:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items()]
    rows = "\n".join(lines)
    print(f"{USAGE}\n\ncommands:\n{rows}\n\n{EXAMPLES}")
