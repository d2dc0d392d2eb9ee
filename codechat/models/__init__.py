"""The model and what acts on weights: layers, attention, KV cache, sampling, LoRA, optimizers, loading, Hugging Face in and out.

Knows no data and no reward.
"""

from codechat.core.lazy import attach

MODULES = """
    config decoding export fp8 generate gpt head hf_format hf_tokenizer import_weights kv_cache
    latent_attention layers live_weights loading lora optim
"""
__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=MODULES.split(),
    names={"config": ["GPTConfig", "PRESETS"], "gpt": ["GPT"], "loading": ["load_model"]},
)
