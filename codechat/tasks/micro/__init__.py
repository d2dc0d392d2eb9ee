"""Generated small Python problems: families with parameters, five levels, a held-out set of families.

    problems("train", 500, seed=0)     Problem: signature, one-line docstring with an example, hidden tests
    dialogues("train", 8000, seed=0)   worked solutions for SFT: the same families with other parameters

A family's parameters are split once: SFT, RL training, `select` and `test` use different ones. Held-out families appear
in `test_hard` only.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["family", "lists", "numbers", "prepare", "task", "texts"],
    {"task": ["DOMAIN", "FAMILIES", "MicroTask", "dialogues", "problems"], "family": ["LEVELS", "Family"]},
)
