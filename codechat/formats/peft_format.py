"""PEFT's files of LoRA adapters (`models.lora`): our fused query-key-value matrix becomes three
adapters that share A."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from codechat.core import config
from codechat.core.atomic_files import read_json, write_json
from codechat.core.errors import CheckpointError, ConfigError
from codechat.formats import hf_format
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint

ADVICE = "train with --lora-rank 8, or export the whole model with codechat export"
ADAPTER = "adapter_model.safetensors"
ABOUT = "adapter_config.json"
# Settings of adapter_config.json that a reader of the factors needs not know; any other one
# must be off, or PLAIN.
HARMLESS = (
    "r lora_alpha use_rslora lora_dropout target_modules exclude_modules task_type base_model_name_or_path revision"
    " inference_mode auto_mapping peft_version layers_to_transform layers_pattern megatron_core qalora_group_size"
).split()
PLAIN = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, "gaussian", "orthogonal"),
    "bias": ("none",),
}


def of_checkpoint(ref: str | Path) -> tuple[Mapping[str, Tensor], GPTConfig, float]:
    """`lora.adapters`, architecture and alpha of a run with adapters, for `save`;
    CheckpointError without."""
    ckpt = checkpoint.load(ref, optimizer=False, mmap=True)
    if not ckpt.adapters:
        raise CheckpointError(f"{ckpt.path} holds no adapters; {ADVICE}")
    alpha = read_json(ckpt.path.parent.parent / "config.json")["lora_alpha"]
    return ckpt.adapters, config.from_dict(GPTConfig, ckpt.meta["model_config"]), alpha


def _stem(weight: str) -> str:
    """PEFT's name of Hugging Face's matrix."""
    return "base_model.model." + weight.removesuffix(".weight")


def save(
    factors: Mapping[str, Tensor],
    cfg: GPTConfig,
    alpha: float,
    directory: str | Path,
    base: str | None = None,
) -> None:
    """Write `lora.adapters` for `PeftModel.from_pretrained(exported base, directory)`; base:
    the name of that model."""
    # else adapters of some matrices would have no name of theirs
    hf_format.family_of(cfg, imported=True)
    directory = Path(directory)
    tensors = dict[str, Tensor]()
    for theirs, ours, start, stop in hf_format.pieces(cfg):
        if f"{ours}.a" in factors:
            tensors[f"{_stem(theirs)}.lora_A.weight"] = factors[f"{ours}.a"]
            tensors[f"{_stem(theirs)}.lora_B.weight"] = factors[f"{ours}.b"][start:stop]
    if not tensors:
        raise ConfigError(f"the model has no adapters; {ADVICE}")
    about: dict[str, Any] = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        bias="none",
        base_model_name_or_path=base,
        inference_mode=True,
        r=len(next(iter(tensors.values()))),
        lora_alpha=alpha,
        lora_dropout=0.0,
        fan_in_fan_out=False,
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
    )
    directory.mkdir(parents=True, exist_ok=True)
    hf_format.save(directory / ADAPTER, tensors, "float32")
    write_json(directory / ABOUT, about)


@torch.no_grad()
def load(model: GPT, directory: str | Path) -> GPT:
    """Add the adapters of a directory in PEFT's format into the weights of a plain model, in
    place; returns it.

    CheckpointError for an adapter that is no plain LoRA or fits no matrix. Copies of one matrix
    (the gate projection that repeats the up projection) need equal adapters."""
    about = read_json(Path(directory) / ABOUT)
    factors = load_file(Path(directory) / ADAPTER)
    odd = {k: v for k, v in about.items() if v and k not in HARMLESS and v not in PLAIN.get(k, ())}
    # else some of our weights would have no name of theirs
    hf_format.family_of(model.cfg, imported=True)
    weights = hf_format.tensors(model.cfg, model.state_dict())
    try:
        rank = about["r"]
        # arXiv:2312.03732
        scale = about["lora_alpha"] / (rank**0.5 if about.get("use_rslora") else rank)
        for name, weight in weights.items():
            name_a = f"{_stem(name)}.lora_A.weight"
            name_b = f"{_stem(name)}.lora_B.weight"
            if name_a not in factors or name_b not in factors or len(factors[name_a]) != rank:
                continue
            a = factors.pop(name_a).float()
            b = factors.pop(name_b).float()
            weights[name] = weight + (scale * b @ a).to(weight.device)
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(f"{directory} holds no adapter of this model ({error!r})") from None
    if odd or factors:  # a factor that is left belongs to no matrix of ours
        got = f"{directory} has {odd or min(factors)}"
        raise CheckpointError(
            f"{got}; required is plain LoRA of this base "
            "model; merge it in peft and import the model"
        )
    model.load_state_dict(hf_format.read_model(model.cfg, weights.items()).state_dict())
    return model
