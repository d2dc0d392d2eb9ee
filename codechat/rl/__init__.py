"""Reinforcement learning as functions: rollouts, episodes, the engines that sample them, advantages, losses, preferences, metrics of rollouts.

The loops that use them are at the top: reinforce, grpo, ppo, expert_iteration, preference. Shared settings and steps of loops are in `training`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "advantages",
        "engine_settings",
        "engines",
        "episodes",
        "functional",
        "losses",
        "per_token_rewards",
        "preference_data",
        "preference_losses",
        "rollout",
        "rollout_metrics",
    ],
)
