"""Experiments for understanding: character models, exact gradients, loss exercises, reward ablation, reproducible defects, scaling law.

Nothing outside this room depends on it but recipes and reports.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "chars",
        "chars_learning",
        "defects",
        "denoise",
        "exact_gradients",
        "loss_exercises",
        "reward_ablation",
        "scaling_law",
    ],
)
