"""Completion of commands, settings and their values in a shell.

    codechat completion bash >> ~/.bashrc
    codechat completion zsh >> ~/.zshrc
    codechat completion fish > ~/.config/fish/completions/codechat.fish

The lines call `codechat completion candidates` at every tab, so they never grow stale.
"""

import os
import shlex
from collections.abc import Iterable, Sequence
from typing import Literal, get_args, get_origin

from codechat.core.config import Field, arms, find_field, flag_of, leaves_of
from codechat.core.entries import Entry
from codechat.core.errors import ConfigError
from codechat.core.registry import COMMANDS, PREPARATIONS
from codechat.runs import paths

BASH = 'complete -o default -C "codechat completion candidates" codechat'
SHELLS = {
    "bash": BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}",
    "fish": "complete -c codechat -a "
    "'(COMP_LINE=(commandline -cp) codechat completion candidates)'",
}


def main(words: Sequence[str]) -> int:
    """`codechat completion SHELL` prints the lines of a shell's startup file."""
    if words[:1] == ["candidates"]:
        line = os.environ.get("COMP_LINE", "")
        at = int(os.environ.get("COMP_POINT", len(line)))
        print("\n".join(candidates(line[:at])))
        return 0
    if {"-h", "--help"} & set(words):
        print(f"usage: codechat completion {'|'.join(SHELLS)}\n\n{str(__doc__).strip()}")
        return 0
    if len(words) != 1 or words[0] not in SHELLS:
        got = " ".join(words) or "nothing"
        raise ConfigError(f"completion got {got}; required: one of {', '.join(SHELLS)}")
    print(SHELLS[words[0]])
    return 0


def candidates(line: str) -> list[str]:
    """What the last word of a command line may become; empty where nothing is known, such as in a
    quotation that is open."""
    try:
        words = shlex.split(line)[1:]
    except ValueError:
        return []
    last = "" if line.endswith(" ") or not words else words.pop()
    return sorted(word for word in _possible(words) if word.startswith(last))


def _possible(words: Sequence[str]) -> Iterable[str]:
    """Words that may follow these."""
    if not words:
        return COMMANDS
    kinds = {
        entry.command.partition(" ")[2]: entry
        for entry in PREPARATIONS.values()
        if entry.command.startswith(f"{words[0]} ")
    }
    if kinds and len(words) == 1:
        return kinds
    entry = kinds.get(words[1]) if kinds else COMMANDS.get(words[0])
    if entry is None or not entry.config:
        return ()
    leaves = leaves_of(entry.config_class)
    flags = [flag_of(name) for name, field in leaves.items() if not field.nested]
    # a flag whose value is wanted; of several values only the first is completed
    if words[-1].startswith("--"):
        return _values(entry, words[-1])
    return [*flags, *(["--preset"] if entry.presets else []), "--config"]


def _values(entry: Entry, flag: str) -> Iterable[str]:
    if flag == "--preset":
        return entry.presets
    name = find_field(entry.config_class, flag.removeprefix("--"))
    if name is None:
        return ()
    field = leaves_of(entry.config_class)[name]
    if field.meta.get("reads") == "run":
        return [paths.name_of(run) for run in paths.run_paths()]
    return _choices(field)


def _choices(field: Field) -> list[str]:
    found = ["true", "false"] if field.takes(bool) else []
    for arm in arms(field.type):
        inner = get_args(arm)[0] if get_origin(arm) is tuple else arm
        if get_origin(inner) is Literal:
            found += map(str, get_args(inner))
    return found
