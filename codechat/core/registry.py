"""What can be run: every training loop and every other stage of a recipe, by id, and the commands of `codechat`; the table is registry.csv.

The id is the `kind` in `runs/NAME/status.json`. Modules are imported when they are needed.
"""

import csv
import importlib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core import config
from codechat.core.errors import ConfigError, check_choice


class Entry(NamedTuple):
    """A loop, preparation, stage or other command: `function` of `module` takes a `config` (a class of the same module)."""

    id: str
    kind: str  # loop, preparation, stage, or command: what is only that
    module: str
    config: str
    function: str
    command: str  # what the command line calls it; empty where only recipes do
    main: str  # the function that reads the words of a command without `config`
    about: str

    def load(self, name: str) -> Any:
        """An attribute of the module, such as the config class or the function."""
        return getattr(importlib.import_module(self.module), name)

    @property
    def config_class(self) -> type:
        return self.load(self.config)

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """The presets of --preset; empty where there are none."""
        return getattr(importlib.import_module(self.module), "RUN_PRESETS", {})

    def parse(self, words: Sequence[str], ranks: int = 1, **how: Any) -> Any:
        """The settings of a command line for so many processes, with the presets and dials of the module (`config.parse`)."""
        dials = getattr(importlib.import_module(self.module), "RUN_DIALS", {})
        dials = {name: partial(dial, ranks=ranks) for name, dial in dials.items()}
        return config.parse(self.config_class, words, presets=self.presets, dials=dials, **how)

    def run(self, words: Sequence[str]) -> Any:
        """The command with these words: the value of the function for the settings that they give."""
        if self.main:
            return self.load(self.main)(words)
        ranks = int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
        cfg = self.parse(words, ranks, prog=f"codechat {self.command}", epilog=self.load("__doc__"))
        return self.load(self.function)(cfg)


with Path(__file__).with_name("registry.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = [Entry(**row | {"module": f"codechat.{row['module']}"}) for row in csv.DictReader(_file)]
LOOPS, PREPARATIONS, STAGES = (
    {entry.id: entry for entry in _ROWS if entry.kind == kind} for kind in ("loop", "preparation", "stage")
)
ENTRIES = LOOPS | PREPARATIONS | STAGES
COMMANDS = {e.command: e for e in _ROWS if e.command and e.kind != "preparation"}  # in the order of --help


def find(id: str, among: Mapping[str, Entry] = ENTRIES) -> Entry:
    """The entry of an id; ConfigError names the nearest."""
    return among[check_choice("loop or stage", id, among)]


def entry_of(cfg: Any, among: Mapping[str, Entry] = LOOPS) -> Entry:
    """The loop (or other entry) of a configuration; ConfigError where there is none."""
    for entry in among.values():
        if (type(cfg).__module__, type(cfg).__name__) == (entry.module, entry.config):
            return entry
    raise ConfigError(f"{type(cfg).__name__} is the configuration of no loop; required: that of {', '.join(among)}")
