"""Recipes: pipelines of stages from data to report. `stage` binds a stage, `runner` runs them; the other modules hold settings only."""
