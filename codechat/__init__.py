"""CodeChat: a laboratory for training a small code-and-tool-calling language model from scratch.

Everything lies in a room of its own (`codechat.models`, `codechat.rl`, ...). What notebooks use is also here by name, and imported on first use.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES = {
    "text": "chat token_view tokenizer",
    "reports": "articles plots run_frames style token_attribution",
    "core": "config errors",
    "core.errors": "CheckpointError ConfigError DataError MissingFile RunError UserError",
    "models": "generate gpt lora optim",
    "models.config": "GPTConfig PRESETS",
    "models.gpt": "GPT",
    "data": "conversations corpus sources synthetic",
    "distributed": "dist gpu_specs hardware",
    "evaluation": "behaviour_probes contamination diagnose evaluate intervals results",
    "rl": "advantages episodes losses preference_losses rollout",
    "labs": "chars chars_learning exact_gradients",
    "runs": "checkpoint metrics paths run",
    "runs.run": "Run",
    "launch": "launcher planner",
}  # {module: its names}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'codechat' has no attribute {name!r}")
    home = importlib.import_module(f"codechat.{_HOME[name]}")
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{home.__name__}.{name}")
