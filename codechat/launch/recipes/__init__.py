"""Recipes: pipelines of stages from data to report. `runner` runs them; the other modules hold settings only."""
