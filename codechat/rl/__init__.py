"""Reinforcement learning on a task's reward: rollouts, engines, advantages, losses."""
