"""Data for pretraining and SFT: the corpus, conversations packed into rows, sources, rows of public data sets, synthetic conversations.

Problems with a reward, and their data, are in `tasks`.
"""
