"""Settings of `codechat export` and `codechat import`. No torch and no tokenizer here: --help and
recipes read these classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codechat.core.config import REQUIRED, Settings, opt


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """Which checkpoint goes where."""

    ckpt: str = opt(REQUIRED, "checkpoint: a run, RUN@best, RUN@STEP or its directory", reads="run")
    out: Path = opt(REQUIRED, "directory to make")
    dtype: Literal["bfloat16", "float32", "float16", "q8_0", "float8_e4m3fn"] = opt(
        "bfloat16",
        "type of the weights; float32 is exact; float16 and "
        "q8_0 for gguf, float8_e4m3fn for adapters",
    )
    format: Literal["huggingface", "run", "adapter", "gguf"] = opt(
        "huggingface",
        "run: a run directory for CodeChat, weights only; adapter: the same, as what was added to a pretrained model; "
        "gguf: OUT/model.gguf, for llama.cpp",
    )
    rank: int = opt(16, "rank of the adapter's matrices", least=1)
    base: str | None = opt(
        None,
        "import of the pretrained model that the adapter is added to; none = what training began as",
        reads="run",
    )
    overwrite: bool = opt(False, "replace --out if it holds an earlier export")


@dataclass(frozen=True, kw_only=True)
class ImportConfig(Settings):
    """Which weights become which run."""

    source: Path = opt(
        REQUIRED,
        "directory of a Hugging Face model, a GGUF file, or an original .pt file",
        positional=True,
        reads="path",
    )
    run_name: str = opt(REQUIRED, "name of the run to make", identity=False)
    tokenizer: str | None = opt(
        None, "tokenizer; none = the model's own, gpt2 for a .pt file", reads="path"
    )
    tags: Literal["native", "template", "reserved", "text", "raw"] | None = opt(
        None,
        "turns: the model's chat template, with tools in its own words (native) or in the system message (template), "
        "our tags in unused padding rows, or as text; raw = no turns; none = the template if there is one, else text",
    )
    tools_form: Literal["native", "described", "arguments", "compact", "json"] | None = opt(
        None,
        "how tools are offered: by the chat template, or in the system message in one of four styles; none = native "
        "if the template is proven to give calls back, else compact",
    )
    own_rows: bool = opt(
        False,
        "give tokens around calls that were never trained rows of their own, which adapters can "
        "learn to write",
    )
    overwrite: bool = opt(False, "replace a run of this name", identity=False)
