"""Coloured tokens: which are supervised, the advantage of each, and its share of the gradient.

    codechat xray --ckpt nano/sft                                        the loss mask of a validation row of its data
    codechat xray --ckpt nano/sft --messages chat.json                   that of a conversation
    codechat xray --tokenizer gpt2 --data data/nano/calls.train.jsonl --row 3 --html row.html
    codechat xray --ckpt nano/sft --messages chat.json --gradient        each token's share of the gradient

An `XRay` displays as HTML in notebooks, as colours in a terminal, and otherwise as plain text. It shows what training
uses: the mask is that of `chat.render`, the gradient that of the loss.

Left out: attention maps, and gradients of single weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, MissingFile, UserError
from codechat.data.conversations import domain_files
from codechat.models import loading
from codechat.rl import losses
from codechat.runs import checkpoint, paths
from codechat.text import chat
from codechat.text.token_view import Kind, XRay, picture, turn_roles, xray_mask
from codechat.text.tokenizer import Tokenizer, load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from codechat.models.gpt import GPT

At = Literal["hidden", "embedding"]


def xray_values(
    ids: Sequence[int],
    values: Sequence[float] | Tensor,
    tokenizer: Tokenizer,
    kind: Kind = "value",
    roles: Sequence[str] | None = None,
) -> XRay:
    """One value per token, such as advantages or gradient shares. DataError if their numbers differ."""
    if len(values) != len(ids):
        raise DataError(f"{len(values)} values for {len(ids)} tokens; give one value per token")
    roles = ["tokens"] * len(ids) if roles is None else roles
    return picture(kind, ids, [float(v) for v in values], tokenizer, roles)


def gradient_share(
    model: GPT,
    ids: Sequence[int],
    loss_mask: Sequence[int | bool] | None = None,
    advantages: Sequence[float] | None = None,
    at: At = "hidden",
) -> list[float]:
    """(T,) each token's share of the gradient of the training loss on one sequence of T ids: gradient norms over their
    sum.

    loss_mask (T,): cross-entropy of the marked tokens. advantages (T,), 0 outside completions: the policy-gradient
    loss. With both, the mask decides which tokens count. at="hidden": the gradient at the last norm's output, credited
    to the token predicted there. at="embedding": the gradient at the input embedding; 0 from the last supervised token
    on, which no prediction reads. All zeros if nothing is supervised or every advantage is 0. The weights' own
    gradients are left unchanged. Raises ConfigError for a sequence longer than the block, or without mask and
    advantages."""
    if loss_mask is None and advantages is None:
        raise ConfigError("gradient_share got neither loss_mask nor advantages; give one of them")
    if len(ids) > model.cfg.block_size + 1:
        raise ConfigError(
            f"{len(ids)} tokens; the model's block_size is {model.cfg.block_size}; shorten the conversation"
        )
    counts = [bool(m) for m in loss_mask] if loss_mask is not None else [a != 0 for a in advantages]
    weights = None if advantages is None else [float(a) for a in advantages]
    if len(counts) != len(ids) or (weights is not None and len(weights) != len(ids)):
        raise DataError(f"mask or advantages do not match the {len(ids)} tokens; give one entry per token")
    if not any(counts[1:]):
        return [0.0] * len(ids)
    norms = _gradient_norms(model, list(ids), counts, weights, at)  # (T - 1,)
    total = norms.sum()
    shares = (norms / total).tolist() if total > 0 else [0.0] * (len(ids) - 1)
    return [0.0, *shares] if at == "hidden" else [*shares, 0.0]


def _gradient_norms(model: GPT, ids: list[int], counts: list[bool], weights: list[float] | None, at: At) -> Tensor:
    """(T - 1,) norm of d loss / d output of the module that `at` names, at each input position."""
    import torch

    device = model.wte.weight.device
    inputs = torch.tensor([ids[:-1]], device=device)  # (1, T - 1)
    targets = torch.tensor([[i if c else -100 for i, c in zip(ids[1:], counts[1:])]], device=device)
    caught: list[Tensor] = []

    def catch(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        caught.append(output if output.requires_grad else output.detach().requires_grad_())
        return caught[-1]

    hook = (model.norm if at == "hidden" else model.wte).register_forward_hook(catch)
    try:
        with torch.enable_grad():
            if weights is None:
                loss = model.loss(inputs, targets)
            else:
                logprobs, _ = model.token_logprobs(inputs, targets)
                loss = losses.policy_gradient_loss(logprobs, torch.tensor([weights[1:]], device=device), targets >= 0)
            (gradient,) = torch.autograd.grad(loss, caught[:1])
    finally:
        hook.remove()
    return gradient[0].float().norm(dim=-1)


# ---- codechat xray


@dataclass(frozen=True, kw_only=True)
class XRayConfig:
    """What to colour, and how to show it."""

    ckpt: str | None = opt(None, "run name, run directory or checkpoint; none = --tokenizer only, no gradient")
    tokenizer: str = opt("gpt2", "tokenizer without a checkpoint: gpt2, gpt2:N, python:N, chars:FILE or bytes")
    tags: Literal["reserved", "text"] = opt("reserved", "chat tags without a checkpoint: one id each, or plain text")
    messages: Path | None = opt(
        None, "json file: a list of {role, content}, or an object with that list under messages"
    )
    data: Path | None = opt(
        None,
        "jsonl file of conversations, such as `codechat data` writes; with --ckpt alone: validation rows of its data",
    )
    row: int = opt(0, "row of --data, from 0", least=0)
    gradient: bool = opt(False, "colour by share of the gradient; requires --ckpt")
    at: At = opt("hidden", "where the gradient is taken: at the predictions (hidden) or at the inputs (embedding)")
    html: Path | None = opt(None, "write an HTML page to this file and print only the table")
    colour: Literal["auto", "always", "never"] = opt("auto", "terminal colours; auto = when the output is a terminal")

    def __post_init__(self) -> None:
        if self.messages and self.data:
            raise ConfigError("--messages and --data exclude each other; keep one")
        if not (self.messages or self.data or self.ckpt):
            raise ConfigError(
                "what is coloured? give --messages FILE.json, --data FILE.jsonl, or a model with --ckpt RUN"
            )
        if self.gradient and self.ckpt is None:
            raise ConfigError("--gradient requires a model; add --ckpt RUN")


EPILOG = """examples:
  codechat xray --tokenizer gpt2 --messages chat.json
  codechat xray --ckpt nano/sft --data data/nano/calls/calls.train.jsonl --row 3
  codechat xray --ckpt nano/sft --messages chat.json --gradient --html gradient.html
  codechat xray --ckpt nano/sft --messages chat.json --gradient --at embedding"""


def read_messages(cfg: XRayConfig) -> list[dict[str, str]]:
    """The conversation that the flags name. MissingFile or DataError names the file and its problem."""
    path = cfg.messages or cfg.data
    try:
        text = path.read_text(encoding="utf-8") if cfg.messages else _line(path, cfg.row)
        found = json.loads(text)
    except (FileNotFoundError, IsADirectoryError):
        raise MissingFile(f"{path} is not a file; pass a json file to --messages or a jsonl file to --data") from None
    except UserError:
        raise
    except ValueError as error:  # bad json and bad utf-8
        where = f"{path} row {cfg.row}" if cfg.data else str(path)
        raise DataError(f"{where} is not json in UTF-8 ({error})") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    turns = messages if isinstance(messages, list) else []
    if not turns or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in turns
    ):
        raise DataError(
            f'{path} holds no messages; required: a list of {{"role": ..., "content": ...}}, or an object '
            'with it under "messages"'
        )
    return turns


def validation_rows(ckpt: str) -> Path:
    """The file of validation conversations, calls where there are some, of the data that a checkpoint was last fine-tuned on."""
    known = [entry["data_dir"] for entry in checkpoint.read_meta(ckpt).get("lineage", ()) if entry.get("data_dir")]
    for folder in (paths.ROOT / name for name in reversed(known)):
        try:
            return min(domain_files(folder, "select"), key=lambda path: path.name != "calls.select.jsonl")
        except MissingFile:
            continue
    listed = f" ({', '.join(dict.fromkeys(known))})" if known else ""  # several stages may share a folder
    raise MissingFile(
        f"the data of {ckpt}{listed} have no validation conversations here; give --data FILE.jsonl or --messages FILE.json"
    )


def _line(path: Path, row: int) -> str:
    count = 0
    with open(path, encoding="utf-8") as file:
        for count, line in enumerate(file, 1):
            if count == row + 1:
                return line
    raise DataError(f"{path} has {count} rows, counted from 0; there is no row {row}")


def attribute(cfg: XRayConfig) -> XRay:
    """The picture that the flags describe."""
    if not (cfg.messages or cfg.data):
        cfg = replace(cfg, data=validation_rows(cfg.ckpt))
        print(f"row {cfg.row} of {cfg.data} (--row, or --data FILE)", file=sys.stderr)
    messages = read_messages(cfg)
    if cfg.ckpt is None:
        return xray_mask(messages, load(cfg.tokenizer), cfg.tags)
    loaded = loading.load_model(cfg.ckpt)
    if not cfg.gradient:
        return xray_mask(messages, loaded.tokenizer, loaded.tags)
    rendered = chat.render(messages, loaded.tokenizer, loaded.tags)
    shares = gradient_share(loaded.model, rendered.ids, rendered.loss_mask, at=cfg.at)
    return xray_values(rendered.ids, shares, loaded.tokenizer, "gradient", turn_roles(rendered))


def main(argv: list[str] | None = None) -> None:
    """`codechat xray`."""
    cfg = config.parse(XRayConfig, sys.argv[1:] if argv is None else argv, prog="codechat xray", epilog=EPILOG)
    image = attribute(cfg)
    if cfg.html:
        cfg.html.write_text(image.page(), encoding="utf-8")
        print(f"{image.table()}\n\npage: {cfg.html}")
    else:
        print(image.terminal(cfg.colour == "always" or cfg.colour == "auto" and sys.stdout.isatty()))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
