"""Settings that the commands share which sample completions of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from codechat.core.config import REQUIRED, Settings, opt
from codechat.tasks import name_of


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """The run to write, and how completions are sampled."""

    run_name: str = opt("evaluate", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    temperature: float = opt(1.0, "sampling temperature; 0 = greedy, one completion", least=0)
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all", least=1)
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    seed: int = opt(0, "seed of problem order, sampling and bootstrap")


@dataclass(frozen=True, kw_only=True)
class TaskSettings(SamplingSettings):
    """The task."""

    task: str = opt("funcall", "task, such as funcall, micro, reasoning:levels=[1,2], or your own as FILE.py:CLASS")
    data_dir: str | None = opt(
        None, "directory with TASK.SPLIT.jsonl problems and probes, or the task's own files; none = what the task has"
    )
    tags: Literal["raw"] | None = opt(
        None, "raw = prompts as plain text without turns, for base models; none = as the checkpoint was trained"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", name_of(self.task))  # an object or a class of a notebook, by its name
        super().__post_init__()

    @property
    def source(self) -> dict[str, str]:
        """Where the task's problems are, as an option of `tasks.load`."""
        return {"source": self.data_dir} if self.data_dir else {}


@dataclass(frozen=True, kw_only=True)
class ScoringSettings(SamplingSettings):
    """Which checkpoints are scored."""

    ckpt: tuple[str, ...] = opt(REQUIRED, "checkpoints: run name, run@best, run@STEP, run directory or checkpoint")
    contamination: bool = opt(
        True, "search what the checkpoint was trained on for the problems before printing scores", identity=False
    )
