"""Experiments: character models, exact gradients, loss exercises, rates of RL, rewards from several starts, a scaling law.

Only reports and notebooks import this room.
"""
