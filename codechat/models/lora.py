"""LoRA: low-rank updates of frozen matrices, for any loop (arXiv:2106.09685).

    h = W x + (alpha / rank) B A x,   A (rank, in) random, B (out, rank) zero: training starts from the unchanged model

After `attach` only A and B are trained. A checkpoint holds the merged model, which loads like any other, and also A and
B. `formats.peft_format` writes PEFT's files.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from codechat.core.errors import CheckpointError, ConfigError
from codechat.distributed import sharding
from codechat.models.config import LORA_ALPHA, LORA_CHOSEN, LORA_PARTS
from codechat.models.gpt import GPT


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank update."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rng: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        bound = base.in_features**-0.5  # kaiming_uniform(a=sqrt 5), as peft initialises A
        self.a = nn.Parameter(((torch.rand(rank, base.in_features, generator=rng) * 2 - 1) * bound).to(device))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(self.scale * nn.functional.linear(x, self.a), self.b)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """(out, in): what the layer multiplies by."""
        return self.base.weight + self.scale * self.b @ self.a


def attach(
    model: GPT,
    rank: int,
    alpha: float = LORA_ALPHA,
    targets: Sequence[str] = LORA_CHOSEN,
    seed: int = 0,
) -> GPT:
    """Freeze `model` and give the target matrices of every block an adapter, in place; rank 0 changes nothing."""
    if not rank:
        return model
    if sharding.is_sharded(model):
        raise ConfigError(f"lora_rank {rank} with sharded weights; set --no-shard, or --lora-rank 0")
    model.requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    names = [part for name in targets for part in LORA_PARTS.get(name, (name,))]
    for block in model.blocks:
        for parent in (block.attn, block.mlp):
            for name in names:
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


def weight_and_bias(layer: nn.Linear | LoRALinear) -> tuple[Tensor, Tensor | None]:
    """What a layer multiplies by and adds, its adapter merged."""
    return (layer.merged(), layer.base.bias) if isinstance(layer, LoRALinear) else (layer.weight, layer.bias)


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
    """What training changed, for `checkpoint.load`: NAME.b (out, rank) and NAME.a (rank, in) of each changed
    matrix, the nearest in squared error (Eckart and Young, 1936); other changes whole. And the share of the squared
    change that
    is lost: 0 where LoRA of this rank trained."""
    factors = dict[str, Tensor]()
    lost = 0.0
    total = 0.0
    for name, weight in tuned.items():
        change = weight.float() - base[name].float()
        if change.any() and change.dim() == 2:
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            root = s[:rank].sqrt()
            factors[f"{name}.b"] = u[:, :rank] * root
            factors[f"{name}.a"] = root[:, None] * v[:rank]
            lost = lost + float(s[rank:].square().sum())
            total = total + float(s.square().sum())
        elif change.any():
            factors[name] = change
    return factors, lost / (total or 1)
