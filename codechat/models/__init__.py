"""The model and what acts on weights: layers, attention, KV cache, sampling, LoRA, optimizers, loading, Hugging Face in
and out.

Knows no data and no reward.
"""
