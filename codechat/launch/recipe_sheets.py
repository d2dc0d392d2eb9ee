"""`codechat recipes`: what `codechat run` runs, and command lines to copy for public models and data.

    codechat recipes            recipes of `codechat run` with their stages, then the sheets of command lines
    codechat recipes gsm8k      GSM8K as public projects ran it: chat prompts with XML rewards, raw prompts of a base model

A sheet, `codechat/recipes/NAME.txt`, runs nothing: its models and data come from the hub, and its runs take a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest
from codechat.launch import runner
from codechat.launch.recipes import FOLDER, RECIPES

SHEETS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.txt"))}


@dataclass(frozen=True, kw_only=True)
class RecipesConfig:
    """What to print."""

    name: str | None = opt(None, "a sheet of command lines; none = list recipes and sheets", positional=True)


def main(argv: list[str] | None = None) -> int:
    """`codechat recipes [NAME]`."""
    words = sys.argv[1:] if argv is None else argv
    cfg = config.parse(RecipesConfig, words, prog="codechat recipes", epilog=__doc__)
    if cfg.name is None:
        runner.list_recipes(Console())
        for name, text in SHEETS.items():
            print(f"{name}: {text.splitlines()[0].lstrip('# ')}; codechat recipes {name} prints its command lines")
        return 0
    if cfg.name not in SHEETS:
        hint = f"; `codechat run {cfg.name}` runs this one" if cfg.name in RECIPES else nearest(cfg.name, SHEETS)
        raise ConfigError(f"no sheet of command lines {cfg.name!r}; there are: {', '.join(SHEETS)}{hint}")
    print(SHEETS[cfg.name], end="")
    return 0
