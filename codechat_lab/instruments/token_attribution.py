"""Coloured tokens: which are supervised, each token's advantage, and its share of the gradient.

    codechat xray --ckpt nano/sft                 the loss mask of a validation row of its data
    codechat xray --ckpt released/nano --data examples/my_rows.jsonl --row 3    of this conversation
    codechat xray --ckpt nano/sft --gradient      each token's share of the gradient

An `XRay` shows as HTML in notebooks, as colours in a terminal, and otherwise as plain text. It
uses the training
code: the mask comes from `chat.render`, the gradient from the loss."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from codechat.core.errors import DataError, MissingFile
from codechat.data import conversations
from codechat.data.sources import IGNORE
from codechat.models import loading
from codechat.runs import checkpoint, paths
from codechat.text.tokenizer import Tokenizer
from codechat_lab.instruments.token_view import Kind, XRay, picture, xray_mask
from codechat_lab.instruments.xray_settings import XRayConfig

if TYPE_CHECKING:  # --help of the command loads no torch
    from torch import Tensor, nn

    from codechat.models.gpt import GPT


def xray_values(
    ids: Sequence[int],
    values: Sequence[float],
    tokenizer: Tokenizer,
    kind: Kind = "value",
    roles: Sequence[str] | None = None,
) -> XRay:
    """One value per token, such as advantages or gradient shares."""
    return picture(kind, ids, [float(v) for v in values], tokenizer, roles or ["tokens"] * len(ids))


def gradient_share(
    model: GPT,
    ids: Sequence[int],
    weights: Sequence[float],
    at: Literal["hidden", "embedding"] = "hidden",
    policy: bool = False,
) -> list[float]:
    """(T,) each token's share of the gradient of the training loss on one sequence: its
    `gradient_norms` over their sum; all zeros if every weight is 0."""
    norms = gradient_norms(model, ids, weights, at, policy)
    return (norms / norms.sum()).nan_to_num().tolist()


def gradient_norms(
    model: GPT,
    ids: Sequence[int],
    weights: Sequence[float],
    at: Literal["hidden", "embedding"] = "hidden",
    policy: bool = False,
) -> Tensor:
    """(T,) norm of the gradient of the training loss that each token of one sequence of T ids
    causes.

    weights (T,): of each token in the loss, the cross-entropy (a loss mask) or with `policy`
    the policy-gradient loss (advantages, 0 outside completions). at="hidden": the gradient at
    the last norm's output, credited to the token predicted there. at="embedding": the gradient
    at the input embedding; 0 from the last weighted token on, which no prediction reads. The
    gradients of the model's weights are left unchanged. ConfigError for a sequence longer than
    the block."""
    import torch

    device = model.wte.weight.device
    # (1, T - 1)
    inputs, targets = (torch.tensor([part], device=device) for part in (ids[:-1], ids[1:]))
    caught: list[Tensor] = []

    def catch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        caught.append(output if output.requires_grad else output.detach().requires_grad_())
        return caught[-1]

    hook = (model.norm if at == "hidden" else model.wte).register_forward_hook(catch)
    try:
        with torch.enable_grad():
            if policy:
                nats, _ = model.token_logprobs(inputs, targets)
            else:
                nats = model.loss(inputs, targets, reduction="none")
            loss = (nats * torch.tensor([list(weights[1:])], device=device)).sum()
            (gradient,) = torch.autograd.grad(loss, caught[:1])
    finally:
        hook.remove()
    norms = gradient.float().flatten(0, -2).norm(dim=-1)  # (T - 1,)
    return torch.nn.functional.pad(norms, (1, 0) if at == "hidden" else (0, 1))


# ---- codechat xray


def validation_rows(ckpt: str) -> Path:
    """The file of validation conversations, calls if there are some, of a checkpoint's last
    fine-tuning."""
    folders = [
        entry["data_dir"]
        for entry in checkpoint.read_meta(ckpt).get("lineage", ())
        if entry.get("data_dir")
    ]
    for folder in reversed(folders):
        try:
            files = conversations.domain_files(paths.ROOT / folder, "select")
            return min(files, key=lambda path: path.name != "calls.select.jsonl")
        except MissingFile:
            continue
    raise MissingFile(f"no validation conversations of {ckpt} in {folders}; give --data FILE.jsonl")


def main(cfg: XRayConfig) -> None:
    """`codechat xray`."""
    path = cfg.data or validation_rows(cfg.ckpt)
    print(f"row {cfg.row} of {path}", file=sys.stderr)
    row = next(islice(conversations.read(path), cfg.row, None), {})
    if not row:
        raise DataError(f"{path} has no row {cfg.row}")
    loaded = loading.load_model(cfg.ckpt)
    if "input_ids" in row:
        made = conversations.encode(row, loaded.tokenizer, loaded.tags, len(row["input_ids"]))
        if isinstance(made, str):
            raise DataError(f"row {cfg.row} of {path} has no label but {IGNORE}; take another row")
        image = xray_values(made.ids.tolist(), made.loss_mask.tolist(), loaded.tokenizer, "mask")
    else:
        image = xray_mask(row["messages"], loaded.tokenizer, loaded.tags)
    if cfg.gradient:
        shares = gradient_share(loaded.model, image.ids, image.values)
        image = xray_values(image.ids, shares, loaded.tokenizer, "gradient", image.roles)
    print(image.terminal(sys.stdout.isatty()))
