"""Settings of `codechat passk` and `codechat filter`. No torch here: `--help`, recipes and launch
read these classes."""

from dataclasses import dataclass
from typing import Literal

from codechat.core.config import REQUIRED, Settings, opt
from codechat.core.errors import ConfigError
from codechat.evaluation.settings import EvaluateConfig


@dataclass(frozen=True, kw_only=True)
class PasskConfig(EvaluateConfig):
    """Which problems to try, and how often."""

    run_name: str = "passk"
    split: tuple[Literal["train", "select", "test", "test_hard"], ...] = ("train",)
    max_new_tokens: int = 128
    n: int = opt(8, "completions per problem", least=2)
    gate_parseable: float = opt(
        0.0, "share of completions that must be Python before RL; 0 = no gate", least=0, most=1
    )
    gate_pass_at_k: float = opt(
        0.0, "pass@k that must be reached before RL; 0 = no gate", least=0, most=1
    )


@dataclass(frozen=True, kw_only=True)
class FilterConfig(Settings):
    """Which problems to keep."""

    rates: str = opt(REQUIRED, "run of codechat passk, on split train", reads="run")
    window: tuple[float, ...] = opt((0.05, 0.95), "smallest and largest pass rate to keep")
    out: str = opt(
        REQUIRED,
        "directory to write TASK.SPLIT.jsonl to; without training problems if none is kept",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window) != 2 or not 0 <= self.window[0] <= self.window[1] <= 1:
            raise ConfigError(
                f"window {list(self.window)}; required two shares, "
                "the smaller first: --window 0.05 0.95"
            )
