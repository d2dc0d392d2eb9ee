"""The form of what can be run: a loop, a preparation, a stage of a recipe, or another command
(`core.registry` lists them)."""

import ast
import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from codechat.core import config, processes

# of the entry points: functions of a configuration that installed packages want called before
# its command begins
BEFORE = "codechat.before"
# of the entry points: by the id of a loop or command, {preset: settings}
PRESETS = "codechat.presets"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A loop, preparation, stage or other command: `function` of `module` takes a `config`. Or
    an instrument, whose `function` takes what its user says."""

    id: str
    # command: no stage of a recipe; instrument: a function that another entry calls
    kind: Literal["loop", "preparation", "stage", "command", "instrument"] = "command"
    module: str
    about: str
    config: str = ""  # the class of its settings
    # the module of this class, where it is not `module`; --help imports it, so it loads no torch
    settings: str = ""
    function: str = "main"
    command: str = ""  # what the command line calls it; empty where only recipes do
    main: str = ""  # the function that reads the words of a command without `config`

    def load(self, name: str) -> Any:
        """An attribute of the module, such as the function."""
        return getattr(importlib.import_module(self.module), name)

    @property
    def settings_module(self) -> str:
        """The name of the module of `config`, its RUN_PRESETS and RUN_DIALS."""
        return self.settings or self.module

    def _settings(self) -> ModuleType:
        return importlib.import_module(self.settings_module)

    @property
    def config_class(self) -> type:
        return getattr(self._settings(), self.config)

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """The presets of --preset: those of the module and of installed packages."""
        presets = dict(getattr(self._settings(), "RUN_PRESETS", {}))
        for point in entry_points(group=PRESETS, name=self.id):
            presets |= point.load()
        return presets

    def parse(self, words: Sequence[str], ranks: int = 1, prog: str = "", epilog: str = "") -> Any:
        """The settings of a command line for so many processes, with the presets and dials of
        their module (`config.parse`)."""
        dials = getattr(self._settings(), "RUN_DIALS", {})
        dials = {name: partial(dial, ranks=ranks) for name, dial in dials.items()}
        return config.parse(
            self.config_class, words, presets=self.presets, dials=dials, prog=prog, epilog=epilog
        )

    def about_in_full(self) -> str:
        """The docstring of the module, which is not imported for it: most modules import torch."""
        spec = importlib.util.find_spec(self.module)
        assert spec and spec.origin, self.module
        return (
            ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8")), clean=False)
            or ""
        )

    def run(self, words: Sequence[str]) -> Any:
        """The command with these words: the value of the function for the settings that they
        give."""
        if self.main:
            return self.load(self.main)(words)
        shared = processes.others_compute()
        ranks = int(os.environ.get("WORLD_SIZE", 1))  # under torchrun
        cfg = self.parse(words, ranks, prog=f"codechat {self.command}", epilog=self.about_in_full())
        # a second look: one alone may meet a process that lives for milliseconds
        processes.set_polls(shared=shared and processes.others_compute())
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
