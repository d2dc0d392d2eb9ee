"""Weights and adapters in the formats of other systems: Hugging Face, GGUF, PEFT and the
original's .pt files; the commands
`codechat export` and `codechat import`.

Not for our own checkpoints: that is `runs`.
"""
