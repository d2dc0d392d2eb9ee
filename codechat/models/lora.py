"""LoRA: low-rank updates of frozen matrices, for any loop (arXiv:2106.09685).

    h = W x + (alpha / rank) B A x,   A (rank, in) random, B (out, rank) zero: training starts from the unchanged model

After `attach` only A and B are trained; frozen matrices may have the dtype of products
(`hold_matrices_in`). A checkpoint holds A and B and names the one that training started from;
`runs.checkpoint.load` adds the two. `formats.peft_format` writes PEFT's files."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from codechat.core.errors import CheckpointError, ConfigError
from codechat.distributed import sharding
from codechat.models.config import LORA_ALPHA, LORA_CHOSEN, lora_matrices
from codechat.models.fast.functions import adapted_linear
from codechat.models.gpt import GPT


class LoRALinear(nn.Module):
    """A frozen linear layer and its low-rank update."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rng: torch.Generator) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        bound = base.in_features**-0.5  # kaiming_uniform(a=sqrt 5), as peft initialises A
        self.a = nn.Parameter(
            ((torch.rand(rank, base.in_features, generator=rng) * 2 - 1) * bound).to(device)
        )
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return adapted_linear(x, self.base.weight, self.base.bias, self.a, self.b, self.scale)

    @property
    @torch.no_grad()
    def weight(self) -> Tensor:
        """(out, in): the base weight plus the low-rank update. Without gradients."""
        return self.base.weight + self.scale * self.b @ self.a

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


def attach(
    model: GPT,
    rank: int,
    alpha: float = LORA_ALPHA,
    targets: Sequence[str] = LORA_CHOSEN,
    seed: int = 0,
) -> GPT:
    """Freeze `model` and give the target matrices of every block an adapter, in place; rank 0
    changes nothing."""
    if not rank:
        return model
    if sharding.is_sharded(model):
        raise ConfigError(
            f"lora_rank {rank} with sharded weights; set --no-shard, or --lora-rank 0"
        )
    model.requires_grad_(False)
    # on the CPU, so that every device and rank draws the same A
    rng = torch.Generator().manual_seed(seed)
    names = lora_matrices(targets)
    for block in model.blocks:
        for parent in (block.attn, block.mlp):
            for name in names:
                base = getattr(parent, name, None)
                if isinstance(base, nn.Linear):
                    setattr(parent, name, LoRALinear(base, rank, alpha, rng))
    if not any(adapted(model)):
        raise ConfigError(
            f"got lora_targets {' '.join(targets)} with mlp {model.cfg.mlp}; "
            "expected a matrix of this model; set --lora-targets out, up or down"
        )
    return model


def hold_matrices_in(model: GPT, dtype: torch.dtype) -> GPT:
    """Keep matrices that stay frozen in the dtype of products, in place; returns the model.
    Autocast rounds to it in every product, which makes a copy each time: the products are the
    same. Norms, biases and the embedding stay in float32; a head that is the embedding gets its
    rounded copy once the embedding has weights."""
    parts = [*model.blocks.modules()]
    if model.head is not None:
        parts.append(model.head)
    for part in parts:
        if isinstance(part, nn.Linear) and part.weight.dtype != dtype:
            part.weight.data = part.weight.data.to(dtype)
    rows = model.wte.weight
    if model.head is None and rows.dtype != dtype and not rows.is_meta:
        model.rounded_head = rows.detach().to(dtype)
    return model


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Name and layer of every adapter."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoRALinear))


def merged(model: GPT) -> GPT:
    """The same function as a plain GPT. It shares the weights of all layers without adapters. A
    model without adapters is returned itself."""
    layers = {f"{name}.weight": layer.weight for name, layer in adapted(model)}
    if not layers:
        return model
    base = {}
    for name, p in model.state_dict().items():
        if not name.endswith((".a", ".b")):
            base[name.replace(".base.", ".")] = p
    with torch.device("meta"):
        plain = GPT(model.cfg)
    plain.load_state_dict(base | layers, assign=True)
    return plain.requires_grad_(False)


def adapters(model: GPT) -> dict[str, Tensor]:
    """A and B of every adapter as NAME.a and NAME.b of the matrix NAME; empty without adapters."""
    found = {}
    for name, layer in adapted(model):
        found[f"{name}.weight.a"] = layer.a.detach()
        found[f"{name}.weight.b"] = layer.b.detach()
    return found


def load(model: GPT, saved: Mapping[str, Tensor]) -> None:
    """Restore what `adapters` returned. CheckpointError if the shapes are not those of this
    model."""
    live = adapters(model)
    fits = live.keys() == saved.keys() and all(
        live[name].shape == saved[name].shape for name in live
    )
    if not fits:
        raise CheckpointError(
            "the checkpoint's adapters do not fit; set its --lora-rank and --lora-targets"
        )
    for name, tensor in live.items():
        tensor.copy_(saved[name])


RANK_LIMIT = 1e-5  # singular values below this share of the largest are rounding


def low_rank(
    base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], rank: int
) -> tuple[dict[str, Tensor], float]:
    """What training changed, for `checkpoint.load`: NAME.b (out, rank) and NAME.a (rank, in) of
    each changed matrix, the nearest in squared error (Eckart and Young, 1936); other changes
    whole. And the share of the squared change that is lost: 0 where LoRA of this rank trained."""
    factors = dict[str, Tensor]()
    lost = 0.0
    total = 0.0
    for name, weight in tuned.items():
        change = weight.float() - base[name].float()
        if not change.any():
            continue
        if change.dim() == 2:
            # the root of each singular value to either side, so that both factors have one scale
            u, s, v = torch.linalg.svd(change, full_matrices=False)
            kept = min(rank, int((s > RANK_LIMIT * s[0]).sum()))
            root = s[:kept].sqrt()
            factors[f"{name}.b"] = u[:, :kept] * root
            factors[f"{name}.a"] = root[:, None] * v[:kept]
            lost += float(s[rank:].square().sum())
            total += float(s.square().sum())
        else:
            factors[name] = change
    return factors, lost / (total or 1)


def scale_to(factors: Mapping[str, Tensor], largest: float) -> float:
    """Multiply all A and B of `low_rank`, in place, by one power of 2, so that their largest
    number is at most `largest` and more than half of it. The scale of B A that undoes it."""
    products = [tensor for name, tensor in factors.items() if name.endswith((".a", ".b"))]
    sizes = [float(tensor.abs().max()) for tensor in products]
    most = max(sizes, default=0.0)
    if most == 0:
        return 1.0
    power = math.floor(math.log2(largest / most))
    for tensor in products:
        tensor *= 2.0**power
    return 4.0**-power
