"""Reinforcement learning as functions: rollouts, episodes, engines that sample them, advantages, losses, preferences.

The loops that use them are at the top: reinforce, grpo, ppo, expert_iteration, preference.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "advantages",
        "engines",
        "episodes",
        "functional",
        "losses",
        "per_token_rewards",
        "preference_data",
        "preference_losses",
        "rollout",
    ],
)
