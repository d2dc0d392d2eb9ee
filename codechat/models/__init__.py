"""The model and what acts on weights: layers, attention, KV cache, sampling, LoRA, optimizers,
loading.

Knows no data and no reward.
"""
