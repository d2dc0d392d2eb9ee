"""LoRA: low-rank updates of frozen matrices, for any loop (arXiv:2106.09685).

    h = W x + (alpha / rank) B A x,   A (rank, in) random, B (out, rank) zero: training starts from the unchanged model

After `attach` only A and B are trained. A checkpoint holds the merged model, which loads like any other, and also A and
B. `save_peft` writes PEFT's files; our fused query-key-value matrix becomes three adapters that share A.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from codechat.core import config
from codechat.core.atomic_files import read_json, write_json
from codechat.core.errors import CheckpointError, ConfigError
from codechat.distributed import sharding
from codechat.models import hf_format
from codechat.models.config import LORA_ALPHA, LORA_CHOSEN, GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint

WITHOUT = "train with --lora-rank 8, or export the whole model with codechat export"
ADAPTER, ABOUT = "adapter_model.safetensors", "adapter_config.json"
# Settings of adapter_config.json that a reader of the factors needs not know; any other one must be off, or PLAIN.
HARMLESS = {
    "r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "task_type",
    "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size",
}  # fmt: skip
PLAIN = {"peft_type": ("LORA",), "init_lora_weights": (True, "gaussian", "orthogonal"), "bias": ("none",)}


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank update."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rng: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        device = base.weight.device
        bound = base.in_features**-0.5  # kaiming_uniform(a=sqrt 5), as peft initialises A
        self.a = nn.Parameter(((torch.rand(rank, base.in_features, generator=rng) * 2 - 1) * bound).to(device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * nn.functional.linear(nn.functional.linear(x, self.a), self.b)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """(out, in): what the layer multiplies by."""
        return self.base.weight + self.scale * self.b @ self.a


def attach(
    model: GPT, rank: int, alpha: float = LORA_ALPHA, targets: Sequence[str] = LORA_CHOSEN, seed: int = 0
) -> GPT:
    """Freeze `model` and give the target matrices of every block an adapter, in place; rank 0 changes nothing."""
    if not rank:
        return model
    if sharding.is_sharded(model):
        raise ConfigError(f"lora_rank {rank} with sharded weights; set --no-shard, or --lora-rank 0")
    model.requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        for parent in (block.attn, block.mlp):
            for name in targets:
                if isinstance(base := getattr(parent, name, None), nn.Linear):
                    setattr(parent, name, LoRALinear(base, rank, alpha, rng))
    if not any(adapted(model)):
        got = f"lora_targets {' '.join(targets)} with mlp {model.cfg.mlp}"
        raise ConfigError(f"{got}; required is a matrix of this model, such as out, up or down")
    return model


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Name and layer of every adapter."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoRALinear))


def merged(model: GPT) -> GPT:
    """The same function as a plain GPT, which shares every weight without an adapter; the model itself without any."""
    layers = {f"{name}.weight": layer.merged() for name, layer in adapted(model)}
    if not layers:
        return model
    base = {n.replace(".base.", "."): p for n, p in model.state_dict().items() if not n.endswith((".a", ".b"))}
    with torch.device("meta"):
        plain = GPT(model.cfg)
    plain.load_state_dict(base | layers, assign=True)
    return plain.requires_grad_(False)


def _factors(model: GPT) -> dict[str, Tensor]:
    return {f"{name}.{part}": getattr(layer, part).detach() for name, layer in adapted(model) for part in "ab"}


def adapters(model: GPT) -> dict[str, Tensor]:
    """Copies of A and B of every adapter, by name, for a checkpoint; empty without adapters."""
    return {name: tensor.clone() for name, tensor in _factors(model).items()}  # training may continue meanwhile


def load(model: GPT, saved: Mapping[str, Tensor]) -> None:
    """Restore `adapters`. CheckpointError where they are not those of this model."""
    live = _factors(model)
    if {n: p.shape for n, p in live.items()} != {n: p.shape for n, p in saved.items()}:
        raise CheckpointError("the checkpoint's adapters do not fit; set its --lora-rank and --lora-targets")
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def low_rank(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], float]:
    """What training changed, for `checkpoint.load`: NAME.b (out, rank) and NAME.a (rank, in) of each changed matrix, the
    nearest in squared error (Eckart and Young, 1936); other changes whole. And the share of the squared change that
    is lost: 0 where LoRA of this rank trained."""
    factors, lost, total = dict[str, Tensor](), 0.0, 0.0
    for name, weight in tuned.items():
        change = weight.float() - base[name].float()
        if change.any() and change.dim() == 2:
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            root = s[:rank].sqrt()
            factors[f"{name}.b"], factors[f"{name}.a"] = u[:, :rank] * root, root[:, None] * v[:rank]
            lost, total = lost + float(s[rank:].square().sum()), total + float(s.square().sum())
        elif change.any():
            factors[name] = change
    return factors, lost / (total or 1)


# ---- PEFT's files


def of_checkpoint(ref: str | Path) -> tuple[dict[str, Tensor], GPTConfig, float]:
    """`adapters`, architecture and alpha of a run with adapters, for `save_peft`; CheckpointError without."""
    ckpt = checkpoint.load(ref, optimizer=False, mmap=True)
    if not ckpt.extra.get("lora"):
        raise CheckpointError(f"{ckpt.path} holds no adapters; {WITHOUT}")
    alpha = read_json(ckpt.path.parent.parent / "config.json")["lora_alpha"]
    return ckpt.extra["lora"], config.from_dict(GPTConfig, ckpt.meta["model_config"]), alpha


def _stem(weight: str) -> str:
    """PEFT's name of Hugging Face's matrix."""
    return "base_model.model." + weight.removesuffix(".weight")


def save_peft(
    factors: Mapping[str, Tensor], cfg: GPTConfig, alpha: float, directory: str | Path, base: str | None = None
) -> None:
    """Write `adapters` for `PeftModel.from_pretrained(exported base, directory)`; base: the name of that model."""
    directory, tensors = Path(directory), dict[str, Tensor]()
    for theirs, ours, start, stop in hf_format.pieces(cfg):
        layer = ours.removesuffix(".weight")
        if f"{layer}.a" in factors:
            tensors[f"{_stem(theirs)}.lora_A.weight"] = factors[f"{layer}.a"]
            tensors[f"{_stem(theirs)}.lora_B.weight"] = factors[f"{layer}.b"][start:stop]
    if not tensors:
        raise ConfigError(f"the model has no adapters; {WITHOUT}")
    about: dict[str, Any] = dict(
        peft_type="LORA", task_type="CAUSAL_LM", bias="none", base_model_name_or_path=base, inference_mode=True,
        r=len(next(iter(tensors.values()))), lora_alpha=alpha, lora_dropout=0.0, fan_in_fan_out=False,
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    hf_format.save(directory / ADAPTER, tensors, "float32")
    write_json(directory / ABOUT, about)


@torch.no_grad()
def load_peft(model: GPT, directory: str | Path) -> GPT:
    """Add the adapters of a directory in PEFT's format into the weights of a plain model, in place; returns it.

    CheckpointError for an adapter that is no plain LoRA or fits no matrix. Copies of one matrix (the gate projection
    that repeats the up projection) need equal adapters."""
    about, factors = read_json(Path(directory) / ABOUT), load_file(Path(directory) / ADAPTER)
    odd = {k: v for k, v in about.items() if v and k not in HARMLESS and v not in PLAIN.get(k, ())}
    hf_format.family_of(model.cfg, imported=True)  # else some of our weights would have no name of theirs
    weights = hf_format.tensors(model.cfg, model.state_dict())
    try:
        rank = about["r"]
        scale = about["lora_alpha"] / (rank**0.5 if about.get("use_rslora") else rank)  # arXiv:2312.03732
        for name, weight in weights.items():
            a, b = (factors.get(f"{_stem(name)}.lora_{part}.weight") for part in "AB")
            if a is not None and b is not None and len(a) == rank:
                del factors[f"{_stem(name)}.lora_A.weight"], factors[f"{_stem(name)}.lora_B.weight"]
                weights[name] = weight + (scale * b.float() @ a.float()).to(weight.device)
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(f"{directory} holds no adapter of this model ({error!r})") from None
    if odd or factors:
        got = f"{directory} has {odd or min(factors)}"
        raise CheckpointError(
            f"{got}; required is plain LoRA of this base model; merge it in peft and import the model"
        )
    model.load_state_dict(hf_format.read_model(model.cfg, weights.items()).state_dict())
    return model
