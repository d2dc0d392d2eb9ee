"""Shapes of models by name."""

from codechat.models.config import PRESETS, GPTConfig
from codechat.tasks.toy import TOY_MODEL


def preset(name: str) -> GPTConfig:
    return GPTConfig(**PRESETS[name])


def toy(n_vocab: int = 257) -> GPTConfig:
    """The toy task's."""
    return GPTConfig(**TOY_MODEL, vocab_size=n_vocab)
