"""Data for pretraining and SFT: the corpus, conversations packed into rows, sources, rows of public data sets, synthetic conversations.

Problems with a reward, and their data, are in `tasks`.
"""

from codechat.core.lazy import attach

MODULES = """
    chat_formats command conversations corpus download glaive prefetch prepare_corpus prepared public_rows sources
    supervised_tokens synthetic
"""
__getattr__, __dir__, __all__ = attach(__name__, modules=MODULES.split())
