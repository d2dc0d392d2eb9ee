"""Experiments: character models, exact gradients, loss exercises, rates of RL, reward ablation, rewards from several starts, reproducible
defects, a scaling law; the file of rows that a lab continues; snapshots of arrays for tests of your own.

Only recipes and reports import this room.
"""
