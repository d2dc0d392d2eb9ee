"""Experiments that only reports and notebooks import: character models, exact gradients, losses by hand, rewards, scaling."""
