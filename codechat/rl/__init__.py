"""Reinforcement learning on a task's reward: rollouts, engines, advantages, losses. Modules are imported when they are first used."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from None
