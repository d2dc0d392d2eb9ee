"""Coloured tokens: which are supervised, the advantage of each, and its share of the gradient.

    codechat xray --ckpt nano/sft                                        the loss mask of a validation row of its data
    codechat xray --ckpt nano/sft --messages chat.json                   that of a conversation
    codechat xray --tokenizer gpt2 --data data/nano/calls.train.jsonl --row 3 --html row.html
    codechat xray --ckpt nano/sft --messages chat.json --gradient        each token's share of the gradient

An `XRay` displays as HTML in notebooks, as colours in a terminal, and otherwise as plain text. It shows what training uses: the mask is that of
`chat.render`, the gradient that of the loss.
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
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.conversations import domain_files
from codechat.models import loading
from codechat.rl import losses
from codechat.runs import checkpoint, paths
from codechat.text import chat
from codechat.text.token_view import Kind, XRay, picture, turn_roles, xray_mask
from codechat.text.tokenizer import Tokenizer, load

if TYPE_CHECKING:  # --help of the command loads no torch
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
    """One value per token, such as advantages or gradient shares."""
    if len(values) != len(ids):
        raise DataError(f"{len(values)} values for {len(ids)} tokens; give one value per token")
    return picture(kind, ids, [float(v) for v in values], tokenizer, roles or ["tokens"] * len(ids))


def gradient_share(
    model: GPT,
    ids: Sequence[int],
    loss_mask: Sequence[int | bool] | None = None,
    advantages: Sequence[float] | None = None,
    at: At = "hidden",
) -> list[float]:
    """(T,) each token's share of the gradient of the training loss on one sequence of T ids: gradient norms over their sum.

    loss_mask (T,): cross-entropy of the marked tokens. advantages (T,), 0 outside completions: the policy-gradient loss. With both, the mask decides
    which tokens count. at="hidden": the gradient at the last norm's output, credited to the token predicted there. at="embedding": the gradient at the
    input embedding; 0 from the last supervised token on, which no prediction reads. All zeros if nothing is supervised or every advantage is 0. The
    weights' own gradients are left unchanged. Raises ConfigError for a sequence longer than the block."""
    import torch

    if len(ids) > model.cfg.block_size + 1:
        raise ConfigError(f"{len(ids)} tokens; block_size is {model.cfg.block_size}; shorten the conversation")
    counts = [bool(c) for c in (advantages if loss_mask is None else loss_mask)]
    if not any(counts[1:]):
        return [0.0] * len(ids)
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
            if advantages is None:
                loss = model.loss(inputs, targets)
            else:
                logprobs, _ = model.token_logprobs(inputs, targets)
                weights = torch.tensor([list(advantages[1:])], device=device)
                loss = losses.policy_gradient_loss(logprobs, weights, targets >= 0)
            (gradient,) = torch.autograd.grad(loss, caught[:1])
    finally:
        hook.remove()
    norms = gradient[0].float().norm(dim=-1)  # (T - 1,)
    shares = (norms / norms.sum()).nan_to_num().tolist()
    return [0.0, *shares] if at == "hidden" else [*shares, 0.0]


# ---- codechat xray


@dataclass(frozen=True, kw_only=True)
class XRayConfig:
    """What to colour, and how to show it."""

    ckpt: str | None = opt(None, "run name, run directory or checkpoint; none = --tokenizer only, no gradient")
    tokenizer: str = opt("gpt2", "tokenizer without a checkpoint: gpt2, gpt2:N, python:N, chars:FILE or bytes")
    tags: Literal["reserved", "text"] = opt("reserved", "chat tags without a checkpoint: one id each, or plain text")
    messages: Path | None = opt(None, "json file: a list of {role, content}, or an object that holds it as messages")
    data: Path | None = opt(None, "jsonl file of conversations; none = with --ckpt alone, validation rows of its data")
    row: int = opt(0, "row of --data, from 0", least=0)
    gradient: bool = opt(False, "colour by share of the gradient; requires --ckpt")
    html: Path | None = opt(None, "write an HTML page to this file and print only the table")
    colour: Literal["auto", "always", "never"] = opt("auto", "terminal colours; auto = when the output is a terminal")

    def __post_init__(self) -> None:
        if self.messages and self.data:
            raise ConfigError("--messages and --data exclude each other; keep one")
        if not (self.messages or self.data or self.ckpt):
            raise ConfigError("nothing to colour; give --messages FILE.json, --data FILE.jsonl, or --ckpt RUN")
        if self.gradient and self.ckpt is None:
            raise ConfigError("--gradient requires a model; add --ckpt RUN")


def read_messages(cfg: XRayConfig) -> list[dict[str, str]]:
    """The conversation that the flags name. MissingFile or DataError names the file and its problem."""
    path = cfg.messages or cfg.data
    if not path.is_file():
        raise MissingFile(f"{path} is not a file; pass a json file to --messages or a jsonl file to --data")
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text if cfg.messages else text.split("\n")[cfg.row])
        turns = value["messages"] if isinstance(value, dict) else value
        if not turns or not all(isinstance(turn[key], str) for turn in turns for key in ("role", "content")):
            raise ValueError("a turn has a role and a content")
    except (ValueError, IndexError, KeyError, TypeError) as error:
        where = f"{path}{f' row {cfg.row}' if cfg.data else ''}"
        raise DataError(f'{where} holds no list of {{"role": ..., "content": ...}} ({error!r})') from None
    return turns


def validation_rows(ckpt: str) -> Path:
    """The file of validation conversations, calls where there are some, of the data that a checkpoint was last fine-tuned on."""
    folders = [entry["data_dir"] for entry in checkpoint.read_meta(ckpt).get("lineage", ()) if entry.get("data_dir")]
    for folder in reversed(folders):
        try:
            return min(domain_files(paths.ROOT / folder, "select"), key=lambda path: path.name != "calls.select.jsonl")
        except MissingFile:
            continue
    raise MissingFile(f"no validation conversations of {ckpt} in {folders}; give --data FILE.jsonl or --messages FILE")


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
    shares = gradient_share(loaded.model, rendered.ids, rendered.loss_mask)
    return xray_values(rendered.ids, shares, loaded.tokenizer, "gradient", turn_roles(rendered))


def main(argv: list[str] | None = None) -> None:
    """`codechat xray`."""
    cfg = config.parse(XRayConfig, sys.argv[1:] if argv is None else argv, prog="codechat xray", epilog=__doc__)
    image = attribute(cfg)
    if cfg.html:
        cfg.html.write_text(image.page(), encoding="utf-8")
        print(f"{image.table()}\n\npage: {cfg.html}")
    else:
        print(image.terminal(cfg.colour == "always" or cfg.colour == "auto" and sys.stdout.isatty()))
