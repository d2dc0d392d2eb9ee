"""Experiments: character models, exact gradients, loss exercises, rates of RL, reward ablation, rewards from several starts, reproducible
defects, a scaling law; the file of rows that a lab continues; snapshots of arrays for tests of your own.

Only recipes and reports import this room.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "array_snapshots",
        "chars",
        "chars_learning",
        "defects",
        "denoise",
        "exact_gradients",
        "loss_exercises",
        "rates",
        "resumed_rows",
        "reward_ablation",
        "reward_starts",
        "scaling_law",
    ],
)
