"""Modules that had another name in version 0.1: importing the old one gives the new one, with a DeprecationWarning. Gone in the version after next.

Only what notebooks and scripts of users name is here; `from codechat import NAME` and the rooms have the new names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

MOVED = {
    "config": "core.config", "files": "core.atomic_files",
    "dist": "distributed.dist", "hardware": "distributed.hardware", "gpus": "distributed.gpu_specs", "sharding": "distributed.sharding",
    "run": "runs.run", "rundirs": "runs.paths", "metrics": "runs.metrics", "checkpoint": "runs.checkpoint",
    "tokenizer": "text.tokenizer", "chat": "text.chat", "calls": "text.tool_calls", "token_view": "text.token_view",
    "gpt": "models.gpt", "generate": "models.generate", "optim": "models.optim", "lora": "models.lora", "hub": "models.hf_format",
    "corpus": "data.corpus", "dialogues": "data.conversations", "sources": "data.sources", "conversions": "data.public_rows",
    "glaive": "data.glaive", "questions": "data.synthetic",
    "rollout": "rl.rollout", "episodes": "rl.episodes", "engines": "rl.engines", "advantages": "rl.advantages", "losses": "rl.losses",
    "preference_losses": "rl.preference_losses", "dense": "rl.per_token_rewards", "alignment": "rl.functional",
    "evaluate": "evaluation.evaluate", "diagnose": "evaluation.diagnose", "estimates": "evaluation.intervals", "results": "evaluation.results",
    "probes": "evaluation.behaviour_probes", "contamination": "evaluation.contamination", "swaps": "evaluation.counterfactuals",
    "passk": "evaluation.code_pass_rates",
    "plan": "launch.planner", "step_memory": "launch.step_memory", "recipes": "launch.recipes.runner",
    "report": "reports.run_frames", "plots": "reports.plots", "style": "reports.style", "frozen": "reports.frozen_rows", "xray": "reports.token_attribution",
    "chars": "labs.chars", "microscope": "labs.exact_gradients", "exercises": "labs.loss_exercises", "defects": "labs.defects",
    "scaling": "labs.scaling_law", "anatomy": "labs.reward_ablation",
}  # fmt: skip


class _Alias:
    """A loader that gives an old name its new module; also for `python -m codechat.OLD`."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {self.new} now", DeprecationWarning, stacklevel=2)
        self.module = importlib.import_module(self.new)
        self.spec = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just replaced it by that of the old name

    def get_code(self, name: str) -> CodeType | None:
        spec = importlib.util.find_spec(self.new)
        return spec.loader.get_code(self.new) if spec and spec.loader else None  # type: ignore[attr-defined]


class _Finder:
    """Finds old names of modules below `codechat`, after everything that is really there."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, old = name.partition(".")
        if package != "codechat" or old not in MOVED:
            return None
        return ModuleSpec(name, _Alias(f"codechat.{MOVED[old]}"))  # type: ignore[arg-type]


def install() -> None:
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)  # type: ignore[arg-type]
