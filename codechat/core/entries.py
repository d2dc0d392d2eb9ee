"""The form of what can be run: a loop, a preparation, a stage of a recipe, or another command (`core.registry`
lists them)."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Literal

from codechat.core import config

# of the entry points: functions of a configuration that installed packages want called before its command begins
BEFORE = "codechat.before"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A loop, preparation, stage or other command: `function` of `module` takes a `config` (a class of the same
    module). Or an instrument, whose `function` takes what its user says."""

    id: str
    # command: no stage of a recipe; instrument: a function that another entry calls
    kind: Literal["loop", "preparation", "stage", "command", "instrument"]
    module: str
    about: str
    config: str = ""
    function: str = ""
    command: str = ""  # what the command line calls it; empty where only recipes do
    main: str = ""  # the function that reads the words of a command without `config`

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
        """The settings of a command line for so many processes, with the presets and dials of the module
        (`config.parse`)."""
        dials = getattr(importlib.import_module(self.module), "RUN_DIALS", {})
        dials = {name: partial(dial, ranks=ranks) for name, dial in dials.items()}
        return config.parse(self.config_class, words, presets=self.presets, dials=dials, **how)

    def run(self, words: Sequence[str]) -> Any:
        """The command with these words: the value of the function for the settings that they give."""
        if self.main:
            return self.load(self.main)(words)
        ranks = int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
        cfg = self.parse(words, ranks, prog=f"codechat {self.command}", epilog=self.load("__doc__"))
        for point in entry_points(group=BEFORE):
            point.load()(cfg)
        return self.load(self.function)(cfg)


def loop(id: str, config: str, about: str, *, command: str = "", module: str = "") -> Entry:
    """The entry of a training loop: `train` of its module, by default codechat.ID."""
    module = module or f"codechat.{id}"
    return Entry(
        id=id,
        kind="loop",
        module=module,
        config=config,
        function="train",
        command=command or id,
        about=about,
    )
