"""Data for pretraining and SFT. Problems with a reward, and their data, are in `tasks`."""
