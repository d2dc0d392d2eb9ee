"""Text to token ids and back: tokenizers, the chat format and its loss mask, the grammar of tool calls, tokens as
pictures. Knows no model."""
