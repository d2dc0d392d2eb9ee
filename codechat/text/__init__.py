"""Text to token ids and back: tokenizers, the chat format and its loss mask, tool calls and
their schemas. Knows no model."""
