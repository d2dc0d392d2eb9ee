"""Text to token ids and back: tokenizers, the chat format and its loss mask, the grammar of tool calls, tokens as pictures.

Knows no model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "chat",
        "hf_chat_template",
        "imported_tokenizer",
        "python_vocabulary",
        "token_view",
        "tokenizer",
        "tool_calls",
    ],
)
