"""`codechat <command>`: a table of commands, and the one place where an exception becomes a message and an
exit code.

Each command is the `main(argv)` of a module that is named here as a string and imported when it is asked for,
so that `codechat --help` needs neither torch nor a data library. `python -m codechat.sft` passes through
`run_main` and ends the same way.

Exit codes: 0 done; 2 refused (one line on stderr says what was got and what to do); 130 interrupted.

Left out: catching what nobody expected. A traceback of a defect is worth more than a friendly line about it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from codechat import __version__
from codechat.core.command import guarded
from codechat.core.errors import ConfigError, nearest
from codechat.core.registry import ENTRIES


class Command(NamedTuple):
    module: str  # whose main(argv) runs it
    help: str


def _registered(id: str) -> dict[str, Command]:
    entry = ENTRIES[id]
    return {entry.command: Command(entry.module, entry.about)}


COMMANDS = {
    "run": Command("codechat.launch.recipes.runner", "run a recipe: every stage from data to report"),
    "data": Command("codechat.data.command", "prepare a corpus, conversations or function-calling problems"),
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
    "swaps": Command("codechat.evaluation.counterfactuals", "change one thing of a prompt: does the answer follow?"),
    "appworld": Command(
        "codechat.inference.play_appworld", "play AppWorld's tasks and score them by its own evaluation"
    ),
    "plan": Command(
        "codechat.launch.planner", "memory, hours and cost of a configuration on GPUs, before it is launched"
    ),
    "launch": Command("codechat.launch.launcher", "start a run on one or many GPUs, detached; follow and stop it"),
    "xray": Command(
        "codechat.reports.token_attribution", "colour tokens by loss mask, values or share of the gradient"
    ),
    "talk": Command("codechat.inference.chat_command", "chat with a checkpoint"),
    "tools": Command("codechat.inference.tools_command", "chat with a checkpoint that calls real functions"),
    "serve": Command("codechat.inference.serve", "answer over HTTP: OpenAI's API and a chat page"),
    "sandbox": Command("codechat.sandbox.check", "which walls untrusted programs run behind here"),
    "runs": Command("codechat.runs.command", "list, show, compare and export runs"),
    "report": Command("codechat.reports.build", "execute a report over finished runs"),
    "export": Command("codechat.models.export", "write a checkpoint as a Hugging Face directory"),
    "import": Command(
        "codechat.models.import_weights", "make a run of a Hugging Face directory or an original .pt file"
    ),
    "download": Command("codechat.data.download", "fetch a model or data set from the Hugging Face hub"),
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


def format_help() -> str:
    """The text of `codechat --help`."""
    rows = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
    return f"{USAGE}\n\ncommands:\n{rows}\n\n{EXAMPLES}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. SystemExit passes through where a command raises it (--help)."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


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


if __name__ == "__main__":
    sys.exit(main())
