"""Text to token ids and back: tokenizers, the chat format and its loss mask, the grammar of tool calls, tokens as pictures.

Knows no model.
"""

from codechat.core.lazy import attach

MODULES = """
    chat hf_chat_template imported_tokenizer token_view tokenizer tool_calls tool_functions
"""
__getattr__, __dir__, __all__ = attach(__name__, modules=MODULES.split())
