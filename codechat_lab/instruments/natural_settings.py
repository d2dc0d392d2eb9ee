"""Settings of `codechat natural`. Importing this loads no torch: `--help` reads the class."""

from dataclasses import dataclass

from codechat.evaluation.settings import EvaluateConfig


@dataclass(frozen=True, kw_only=True)
class NaturalConfig(EvaluateConfig):
    """Which checkpoints answer, and how they are sampled."""

    run_name: str = "natural"
    task: str = "natural"
    n: int = 1
    ks: tuple[int, ...] = (1,)
    temperature: float = 0.0
    max_new_tokens: int = 240
