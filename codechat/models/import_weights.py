"""`codechat import`: turn weights trained elsewhere into a run for --ckpt and --init-from.

    codechat download Qwen/Qwen2.5-0.5B-Instruct --out qwen
    codechat import qwen --run-name qwen
    codechat chat --ckpt qwen --user "write quicksort"
    codechat sft --init-from qwen --tags template --data-dir data/sft --run-name qwen-sft
    codechat import data/hub/smollm2 --run-name smollm2     after `codechat download smollm2`
    codechat import old/latest.pt --run-name old

Llama, Qwen2, Qwen3 and Arcee directories (config.json, safetensors in one file or shards, tokenizer.json), GGUF files of
the first three, alone or in a directory (pip install "codechat[gguf]"), and the original system's .pt files. Weights
become float32. Qwen3 with hidden_act relu and equal gate and up projections, as `codechat export` writes it, becomes our
squared ReLU. An imported model keeps its own tokenizer and chat template ("template"). Without a template, or with --tags
text, our tags are plain text. --tags reserved puts them in six unused padding rows of the embedding, which SFT must then
train. --tags raw is for base models: prompts are plain text without turns, and an answer ends at the end of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from codechat.core.atomic_files import read_json
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.text import chat, tokenizer

if TYPE_CHECKING:
    from codechat.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Which weights become which run."""

    source: Path = opt(
        REQUIRED,
        "directory of a Hugging Face model, a GGUF file, or a .pt file of the original system",
        positional=True,
    )
    run_name: str = opt(REQUIRED, "name of the run to make", identity=False)
    tokenizer: str | None = opt(None, "tokenizer; none = the model's own, gpt2 for a .pt file")
    tags: Literal["template", "reserved", "text", "raw"] | None = opt(
        None,
        "turns: the model's chat template, our tags in unused padding rows, or as text; raw = no turns; none = the "
        "template if there is one, else text",
    )
    overwrite: bool = opt(False, "replace a run of this name", identity=False)


def import_model(cfg: ImportConfig) -> Run:
    """The finished run, whose one checkpoint holds the weights. Everything is read before the run is made."""
    from codechat.models import gguf_format, hf_format  # these import torch, which --help does not need
    from codechat.runs import checkpoint, run

    if not cfg.source.exists():
        raise MissingFile(f"no {cfg.source}; give a directory or a .pt file; `codechat download MODEL` fetches one")
    step, directory, weights = 0, cfg.source.is_dir(), None
    if gguf := gguf_format.file_in(cfg.source):
        about, weights, saved = gguf_format.read(gguf)
        tok = tokenizer.load(cfg.tokenizer) if cfg.tokenizer else tokenizer.from_dict(saved)
    else:
        about = read_json(cfg.source / "config.json") if directory else {}
        tok = tokenizer.load(cfg.tokenizer or (f"hf:{cfg.source}" if directory else "gpt2"))
    tags = cfg.tags or ("template" if getattr(tok, "template", None) else "text")
    chat.stop_sequences(tok, tags)  # a template that cannot be masked fails here rather than in training
    if directory or weights is not None:
        shape = hf_format.from_hf(about, vocab_size=tok.n_vocab, n_tags=chat.N_TAGS if tags == "reserved" else 0)
        model = hf_format.read_model(shape, weights or hf_format.read_weights(cfg.source).items())
    elif tags in ("text", chat.RAW):
        model, step = hf_format.read_original(cfg.source, tok.n_vocab)
    else:
        raise ConfigError(f"--tags {tags} with a .pt file; required is text or raw; leave --tags out")
    origin = {"run": cfg.run_name, "kind": "import", "source": cfg.source.resolve().name}
    meta = {"tokenizer": tok.to_dict(), "tags": tags, "lineage": [origin]}
    with run.Run.create(cfg.run_name, cfg, kind="import", overwrite=cfg.overwrite) as created:
        path = checkpoint.save(created.path, step, model=model, meta=meta)
    size = f"{model.cfg.n_params:,} parameters, block {model.cfg.block_size}"
    print(f"run {created.name}: {size}, tokenizer {tok.spec}, tags {tags}; {path}")
    return created
