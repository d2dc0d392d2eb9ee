"""A checkpoint as a model that can be used, with its tokenizer and its kind of tags."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codechat.core import config
from codechat.core.errors import CheckpointError
from codechat.models.config import GPTConfig
from codechat.models.fast.device import decodes_from_file
from codechat.models.fast.reader import Reader, reader_of
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.text import chat, tokenizer, tool_lists
from codechat.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with the tokenizer and the kind of tags it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    tags: str
    meta: dict[str, Any]
    path: Path
    # where the model has none of its own and is on the meta device: those in its file
    weights: Mapping[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where it decodes."""
        return self.model.wte.weight.device if self.weights is None else torch.device("cpu")

    def reader(self) -> Reader:
        """What decodes, token by token, for somebody who waits."""
        return reader_of(self.model, graph=False, weights=self.weights, answers=True)

    @property
    def tools_style(self) -> str:
        """How system prompts list tools for it (`tool_lists.tools_prompt`)."""
        return tools_style(self.meta | {"tags": self.tags})

    @property
    def declines(self) -> bool:
        """Whether it declines by calling `tool_lists.NOTHING`."""
        return self.tools_style in tool_lists.DECLINING


def tools_style(meta: dict[str, Any]) -> str:
    """How system prompts list tools for a checkpoint (`tool_lists.tools_prompt`): as when it was last
    fine-tuned, else as `import` was told. A native template gets whole schemas."""
    if meta.get("tags") == chat.NATIVE:
        return "json"
    tuned = [entry for entry in meta.get("lineage", ()) if entry.get("kind") in ("sft", "import")]
    return str(tuned[-1].get("tools_style", "compact")) if tuned else "compact"


def describe(path: Path, meta: dict[str, Any]) -> tuple[GPTConfig, Tokenizer, str]:
    """Architecture, tokenizer and kind of tags of a checkpoint. CheckpointError where it holds
    no language model."""
    if not meta.get("model_config") or not meta.get("tokenizer"):
        raise CheckpointError(
            f"{path} holds a {meta.get('model')} without tokenizer; give a language model"
        )
    shape = config.from_dict(GPTConfig, meta["model_config"], where=str(path / "meta.json"))
    return shape, tokenizer.from_dict(meta["tokenizer"]), meta.get("tags", "reserved")


def load_model(
    ref: str | Path,
    device: str | torch.device = "cpu",
    tags: str | None = None,
    *,
    decodes: bool = False,
) -> LoadedModel:
    """The model of a checkpoint: a run, RUN@best, RUN@STEP or a directory. tags: none = those
    it was trained with. decodes: for `LoadedModel.reader` alone; on a CPU the model then has no
    weights, which would be a second copy."""
    # no second copy in host memory, whatever the device
    ckpt = checkpoint.load(ref, optimizer=False, mmap=True)
    shape, tok, trained_with = describe(ckpt.path, ckpt.meta)
    with torch.device("meta"):  # random weights would be overwritten
        model = GPT(shape)
    stay = decodes and decodes_from_file(torch.device(device))
    if stay:
        checkpoint.check_fit(ckpt, model)
    else:
        # not `to_empty`, which imports sympy: half a second
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
        checkpoint.restore(ckpt, model)
    return LoadedModel(
        model.eval(),
        tok,
        tags or trained_with,
        ckpt.meta,
        ckpt.path,
        ckpt.model_state if stay else None,
    )
