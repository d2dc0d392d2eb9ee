"""`codechat <command>`: a table of commands, and the one place where an exception becomes a message and an
exit code.

Each command is the `main(argv)` of a module that is named here as a string and imported when it is asked for,
so that `codechat --help` needs neither torch nor a data library. `python -m codechat.sft` passes through
`run_main` and ends the same way.

Exit codes: 0 done; 2 refused (one line on stderr says what was got and what to do); 130 interrupted.

Left out: catching what nobody expected. A traceback of a defect is worth more than a friendly line about it.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from codechat import __version__
from codechat.config import ConfigError, Refusal, nearest
from codechat.registry import ENTRIES

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Command(NamedTuple):
    module: str  # whose main(argv) runs it
    help: str


def _registered(id: str) -> dict[str, Command]:
    entry = ENTRIES[id]
    return {entry.command: Command(entry.module, entry.about)}


COMMANDS = {
    "run": Command("codechat.recipes", "run a recipe: every stage from data to report"),
    "data": Command("codechat.data", "prepare a corpus, conversations or function-calling problems"),
    **_registered("pretrain"),
    **_registered("sft"),
    **_registered("reinforce"),
    **_registered("grpo"),
    **_registered("ppo"),
    **_registered("expert_iteration"),
    **_registered("preference"),
    **_registered("chars"),
    **_registered("diagnose"),
    **_registered("passk"),
    **_registered("filter"),
    **_registered("evaluate"),
    "swaps": Command("codechat.swaps", "change one thing of a prompt: does the answer follow?"),
    "appworld": Command("codechat.appworld", "play AppWorld's tasks and score them by its own evaluation"),
    "plan": Command("codechat.plan", "memory, hours and cost of a configuration on GPUs, before it is launched"),
    "launch": Command("codechat.launch", "start a run on one or many GPUs, detached; follow and stop it"),
    "xray": Command("codechat.xray", "colour tokens by loss mask, values or share of the gradient"),
    "talk": Command("codechat.talk", "chat with a checkpoint"),
    "tools": Command("codechat.tool_talk", "chat with a checkpoint that calls real functions"),
    "serve": Command("codechat.serve", "answer over HTTP: OpenAI's API and a chat page"),
    "sandbox": Command("codechat.sandbox.check", "which walls untrusted programs run behind here"),
    "runs": Command("codechat.runs", "list, show, compare and export runs"),
    "report": Command("codechat.report", "execute a report over finished runs"),
    "export": Command("codechat.export", "write a checkpoint as a Hugging Face directory"),
    "import": Command("codechat.import_weights", "make a run of a Hugging Face directory or an original .pt file"),
    "download": Command("codechat.download", "fetch a model or data set from the Hugging Face hub"),
    "bench": Command("codechat.bench", "time training, sampling, RL and data beside their peers"),
}

USAGE = """\
usage: codechat COMMAND [OPTIONS]

A laboratory for training small code-and-tool-calling language models."""

EXAMPLES = """\
examples:
  codechat run nano                                   the whole story on two CPU cores
  codechat talk --ckpt nano/sft --user "write quicksort"
  codechat tools --ckpt nano/rl --user "What is 12 squared?"
  codechat runs compare nano/sft nano/rl
  codechat sft --help                                 every setting of a command"""

STORAGE_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and run it again; what was saved is intact",
    errno.EDQUOT: "the disk quota is used up; free some space and run it again; what was saved is intact",
    errno.EROFS: "the file system is read-only; run in a folder that can be written",
    errno.EACCES: "permission denied; change the owner or the mode, or run in another folder",
    errno.EPERM: "the operation is not permitted; change the owner or the mode, or run in another folder",
    errno.EIO: "the disk reports an input/output error; check the device before trusting what it holds",
    errno.EFBIG: "the file is larger than a limit allows; raise it (ulimit -f) or write elsewhere",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n 4096)",
}


def format_help() -> str:
    """The text of `codechat --help`."""
    rows = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
    return f"{USAGE}\n\ncommands:\n{rows}\n\n{EXAMPLES}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. SystemExit passes through where a command raises it (--help)."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


def run_main(command: Callable[[list[str] | None], Any]) -> None:
    """End the process with the exit code of a module's `main`: what `python -m codechat.X` calls."""
    sys.exit(guarded(command, sys.argv[1:]))


def guarded(command: Callable[[list[str]], Any], argv: list[str]) -> int:
    """Call `command(argv)`; turn a refusal, an interrupt or a failing disk into one line on stderr and an
    exit code."""
    _spell_anything()
    try:
        code = command(argv)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Refusal as refusal:
        return _fail(str(refusal), 2)
    except KeyboardInterrupt as stop:
        return _fail(f"interrupted: {stop}" if str(stop) else "interrupted", INTERRUPTED, "")
    except BrokenPipeError:
        # the reader (head, less) has what it wanted; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _fail(where + STORAGE_ERRORS[error.errno], 2)


def _spell_anything() -> None:
    """What a model samples may not fit the terminal's encoding: escaped is better than a crash in the middle
    of an answer."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")


def _dispatch(words: list[str]) -> Any:
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_help())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"codechat {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
    return importlib.import_module(COMMANDS[name].module).main(rest)


def _fail(message: str, code: int, prefix: str = "error: ") -> int:
    sys.stdout.flush()
    # Ctrl-C leaves the cursor in the middle of a line
    start = "\n" if code == INTERRUPTED and sys.stderr.isatty() else ""
    print(f"{start}{prefix}{message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
