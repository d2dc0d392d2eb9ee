"""Finished runs as DataFrames (`run_frames`), figures (`plots`), reports (`build`, `articles`),
notebooks, and web
pages: of notebooks (`html`), and interactive ones (`pages`).

Trains nothing. Loops write runs; this room reads them.
"""
