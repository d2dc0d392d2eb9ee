"""LoRA: low-rank updates of frozen matrices, for any loop (arXiv:2106.09685).

    h = W x + (alpha / rank) B A x,   A (rank, in) random, B (out, rank) zero: training starts from the unchanged model

`attach` adds the adapters, after which only A and B are trained. A checkpoint holds the merged model, W + (alpha / rank) B A, which loads like any
other, and also A and B, so a run resumes bitwise. `save_peft` writes adapter_config.json and adapter_model.safetensors for the `peft` package: our
fused query-key-value matrix becomes three adapters that share A.

Left out: sharded weights, dropout on the adapters, adapters of embeddings and head, quantised base weights. Frozen weights stay float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from codechat.core import config
from codechat.core.atomic_files import read_json, write_atomic
from codechat.core.errors import CheckpointError, ConfigError, MissingFile
from codechat.distributed import sharding
from codechat.models import hf_format, safetensors_files
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.models.lora_settings import ALPHA, CHOSEN, RANK, TARGETS, check
from codechat.runs import checkpoint

__all__ = [
    "ALPHA",
    "CHOSEN",
    "RANK",
    "TARGETS",
    "LoRALinear",
    "adapted",
    "adapters",
    "attach",
    "check",
    "load",
    "load_peft",
    "merged",
    "of_checkpoint",
    "save_peft",
]


WITHOUT = "train with --lora-rank 8, or export the whole model with codechat export"


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


def attach(model: GPT, rank: int, alpha: float = ALPHA, targets: Sequence[str] = CHOSEN, seed: int = 0) -> GPT:
    """Freeze `model` and give the target matrices of every block an adapter, in place; returns it. Rank 0 changes nothing."""
    check(rank, alpha, targets)
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
        kind = f"a model with attention {model.cfg.attention} and mlp {model.cfg.mlp}"
        raise ConfigError(
            f"lora_targets {' '.join(targets)} fit no matrix of {kind}; choose others, such as out up down"
        )
    return model


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Name and layer of every adapter."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoRALinear))


def merged(model: GPT) -> GPT:
    """The same function as a plain GPT, which shares every weight without an adapter; the model itself where it has no adapters."""
    layers = dict(adapted(model))
    if not layers:
        return model
    state = {
        name.replace(".base.", "."): p for name, p in model.state_dict().items() if not name.endswith((".a", ".b"))
    }
    state |= {f"{name}.weight": layer.merged() for name, layer in layers.items()}
    with torch.device("meta"):
        plain = GPT(model.cfg)
    plain.load_state_dict(state, assign=True)
    return plain.requires_grad_(False)


def adapters(model: GPT) -> dict[str, Tensor]:
    """A and B of every adapter, by name, for a checkpoint. Empty without adapters."""
    return {name: tensor.clone() for name, tensor in _live(model).items()}  # training may continue while it is written


def _live(model: GPT) -> dict[str, Tensor]:
    return {f"{name}.{part}": getattr(layer, part).detach() for name, layer in adapted(model) for part in "ab"}


@torch.no_grad()
def load(model: GPT, saved: Mapping[str, Tensor]) -> None:
    """Restore `adapters`. CheckpointError where they are not those of this model."""
    own = _live(model)
    wrong = own.keys() ^ saved.keys() or {n for n in own if own[n].shape != saved[n].shape}
    if wrong:
        raise CheckpointError(
            f"the checkpoint's adapter {min(wrong)} does not fit; set its --lora-rank and --lora-targets"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])


# ---------------------------------------------------------------- PEFT's files


def _pieces(model: GPT) -> Iterator[tuple[str, LoRALinear, int, int | None]]:
    """PEFT's name of each adapter, the layer, and the rows of B that are its own."""
    layers = dict(adapted(model))
    for theirs, ours, start, stop in hf_format.pieces(model.cfg):
        if (layer := layers.get(ours.removesuffix(".weight"))) is not None and ours.endswith(".weight"):
            yield "base_model.model." + theirs.removesuffix(".weight"), layer, start, stop


def of_checkpoint(ref: str | Path) -> GPT:
    """The adapters that a run trained, on a model without other weights, for `save_peft`. CheckpointError where it trained none."""
    found = checkpoint.load(ref, optimizer=False, mmap=True)
    saved = found.extra.get("lora", {})
    if not saved:
        raise CheckpointError(f"{found.path} holds no adapters; {WITHOUT}")
    rank = next(t.shape[0] for n, t in saved.items() if n.endswith(".a"))
    alpha = read_json(found.path.parent.parent / "config.json")["lora_alpha"]
    with torch.device("meta"):
        model = GPT(config.from_dict(GPTConfig, found.meta["model_config"]))
    attach(model, rank, alpha, sorted({n.split(".")[-2] for n in saved}))
    for name, layer in adapted(model):
        layer.a, layer.b = (nn.Parameter(saved[f"{name}.{part}"]) for part in "ab")
    return model


def save_peft(model: GPT, directory: str | Path, base: str | None = None) -> Path:
    """Write the adapters as PEFT reads them (`PeftModel.from_pretrained(exported base, directory)`). `base`: the exported base model's name.

    ConfigError for a model without adapters."""
    directory, pieces = Path(directory), list(_pieces(model))
    if not pieces:
        raise ConfigError(f"the model has no adapters; {WITHOUT}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, layer, start, stop in pieces:
        tensors |= {f"{name}.lora_A.weight": layer.a, f"{name}.lora_B.weight": layer.b[start:stop]}
    entries = [safetensors_files.Entry(name, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    part = directory / "adapter_model.safetensors.tmp"
    safetensors_files.write(part, entries, "float32")
    part.replace(directory / "adapter_model.safetensors")
    rank = pieces[0][1].a.shape[0]
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": pieces[0][1].scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, *_ in pieces}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    write_atomic(directory / "adapter_config.json", json.dumps(about, indent=2) + "\n")
    return directory


def _peft_scale(directory: Path) -> float:
    """What the product of an adapter's factors is multiplied by. CheckpointError for what would need another computation than that."""
    path = directory / "adapter_config.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(about["r"]), float(about["lora_alpha"])
        unknown = {key: about[key] for key in ("use_dora", "alpha_pattern", "rank_pattern") if about.get(key)}
        scale = alpha / (rank**0.5 if about.get("use_rslora") else rank)  # arXiv:2312.03732
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} is no description of an adapter with r and lora_alpha ({error!r})") from None
    if unknown:
        raise CheckpointError(f"{path} sets {unknown}; required is one rank and one alpha, without DoRA")
    return scale


def load_peft(model: GPT, directory: str | Path) -> GPT:
    """Add the adapters of a directory in PEFT's format into the weights of a plain model, in place; returns it.

    Raises MissingFile, and CheckpointError for an adapter that fits no matrix of the model. Copies of one matrix (the gate projection that
    repeats the up projection) need the same adapter."""
    from safetensors import safe_open

    directory = Path(directory)
    if not (directory / "adapter_config.json").is_file():
        raise MissingFile(f"{directory} holds no adapter_config.json; give a directory that peft or save_peft wrote")
    scale = _peft_scale(directory)
    places = {
        "base_model.model." + theirs.removesuffix(".weight"): (ours, start, stop)
        for theirs, ours, start, stop in hf_format.pieces(model.cfg)
    }
    state = model.state_dict()
    if not (directory / "adapter_model.safetensors").is_file():
        raise MissingFile(f"{directory} holds no adapter_model.safetensors; save the adapter in that format")
    with safe_open(directory / "adapter_model.safetensors", "pt") as file, torch.no_grad():
        if foreign := [n for n in file.keys() if not n.endswith((".lora_A.weight", ".lora_B.weight"))]:
            raise CheckpointError(
                f"{directory} holds {foreign[0]}; required are factors of matrices alone, lora_A and lora_B"
            )
        names = [n.removesuffix(".lora_A.weight") for n in file.keys() if n.endswith(".lora_A.weight")]

        def factors(name: str) -> tuple[Tensor, Tensor]:
            return tuple(file.get_tensor(f"{name}.lora_{part}.weight").float() for part in "AB")

        for name in names:
            (a, b), (ours, start, stop) = factors(name), places.get(name, ("", 0, None))
            if not ours or (rows := state[ours][start:stop]).shape != (len(b), a.shape[1]):
                size = f"of shape {len(b)} x {a.shape[1]}"
                raise CheckpointError(f"{directory}: adapter {name} {size} fits no matrix; use its own base model")
            first, *others = (n for n, place in places.items() if place == (ours, start, stop))
            if name != first and first in names:
                continue
            for other in others:
                if not {first, other} <= {*names} or not all(map(torch.equal, factors(first), factors(other))):
                    raise CheckpointError(
                        f"{directory}: adapters of {first} and {other} are not equal; required is the same adapter for both, which hold "
                        "one matrix of ours; train it here with --lora-rank"
                    )
            rows += (scale * b @ a).to(rows.device)
    return model
