"""Questions with one answer: GSM8K, MMLU and generated word problems, with prompt templates, graders and SFT data
(`prepare`)."""

from codechat.core.lazy import attach
from codechat.tasks.presets import LORA_RUN as LORA_RUN

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["answers", "named_rewards", "prepare", "rewards", "sources", "stories", "task", "templates"],
    {"task": ["AnswerTask", "Gsm8kTask", "MmluTask", "ReasoningTask"]},
)
