"""Experiments for understanding: character models, exact gradients, loss exercises, reward ablation, reproducible defects, scaling law.

Nothing outside this room depends on it but recipes and reports.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=["chars", "defects", "denoise", "exact_gradients", "loss_exercises", "reward_ablation", "scaling_law"],
)
