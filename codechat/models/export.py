"""`codechat export`: a checkpoint as a directory that transformers and vLLM load with no code of ours, and mostly llama.cpp too.

    codechat export --ckpt nano/rl --out nano-rl-hf
    codechat export --ckpt nano/sft --out my-model --format run     a run of this one checkpoint, to give away (`release`)
    python -c "from transformers import pipeline; print(pipeline('text-generation', 'nano-rl-hf')('def add(a, b):'))"

Files: config.json, model.safetensors (one file, bfloat16 or float32), tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json. The checkpoint is memory-mapped; one tensor at a time is converted and written. The directory appears only when it is whole.

Squared ReLU with norms on queries and keys (preset nano) becomes Qwen3 with hidden_act relu, whose gate projection repeats the up projection: the
same function exactly, in an MLP half as large again. vLLM's own Qwen3 takes silu only; its transformers backend computes it:

    vllm serve nano-rl-hf --model-impl transformers

llama.cpp's converter makes GGUF of Arcee, Llama, Qwen2 and Qwen3 with silu. It ignores hidden_act: do not convert one with relu, its answers would be
wrong without an error. The converter recognises pre-tokenisers by their output: it accepts the whole GPT-2 vocabulary and those of imported models,
and rejects gpt2:N, chars and bytes:

    git clone https://github.com/ggml-org/llama.cpp && pip install -r llama.cpp/requirements.txt
    python llama.cpp/convert_hf_to_gguf.py my-model-hf --outfile my-model.gguf --outtype bf16
    llama-cli -m my-model.gguf --jinja

Left out: uploading (huggingface-cli upload does that), shards, quantisation.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codechat import models, runs  # hf_format, loading and checkpoint import torch: only when a checkpoint is written
from codechat.core import config
from codechat.core.atomic_files import write_json
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError, RunError, UserError
from codechat.text.imported_tokenizer import ImportedTokenizer


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Which checkpoint goes where."""

    ckpt: str = opt(REQUIRED, "checkpoint: a run, RUN@best, RUN@STEP or its directory")
    out: Path = opt(REQUIRED, "directory to make")
    dtype: Literal["bfloat16", "float32"] = opt("bfloat16", "what the weights are stored in; float32 is exact")
    format: Literal["huggingface", "run"] = opt(
        "huggingface", "run: a run directory for CodeChat itself, of the weights alone"
    )
    overwrite: bool = opt(False, "replace --out if it holds an earlier export")


def export(cfg: ExportConfig) -> Path:
    """Write the directory and say so; returns its path."""
    print(write(cfg))
    return cfg.out


def write(cfg: ExportConfig) -> str:
    """Write the directory; returns a line that says what it holds. ConfigError, before anything is written, where no Hugging Face class fits."""
    with fresh_directory(cfg.out, overwrite=cfg.overwrite) as folder:
        if cfg.format == "run":
            return f"{cfg.out}: {models.release.write(cfg.ckpt, folder, cfg.dtype)}"
        ckpt = runs.checkpoint.load(cfg.ckpt, optimizer=False, mmap=True)
        shape, tokenizer, tags = models.loading.describe(ckpt.path, ckpt.meta)
        eos = models.hf_tokenizer.end_ids(tokenizer, tags)
        imported = isinstance(tokenizer, ImportedTokenizer)
        family = models.hf_format.family_of(shape, imported=imported)
        about = models.hf_format.to_hf(shape, family, dtype=cfg.dtype, bos_id=tokenizer.eot_id, eos_ids=eos)
        texts = models.hf_tokenizer.files(tokenizer, tags, block_size=shape.block_size, rows=shape.padded_vocab)
        write_json(folder / "config.json", about)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        tensors = list(models.hf_format.entries(shape, ckpt.model_state, family))
        size = models.safetensors_files.write(folder / models.safetensors_files.ONE_FILE, tensors, cfg.dtype)
    made = f"{about['architectures'][0]} with {about['hidden_act']}, {sum(math.prod(t.shape) for t in tensors):,} parameters"
    if about["hidden_act"] == "relu":
        made += f" ({shape.n_params:,} here; the gate projection repeats the up projection; not for llama.cpp)"
    return f"{cfg.out}: {made}, {size / 2**20:.1f} MiB of {cfg.dtype}, from {ckpt.path}"


def _is_export(out: Path) -> bool:
    """Whether a directory with a config.json holds an export of either format: no metrics, and no checkpoint but released ones."""
    steps = runs.paths.checkpoint_paths(out).values()
    return not (out / "metrics.jsonl").exists() and all(
        (step / runs.checkpoint.RELEASED_WEIGHTS).is_file() for step in steps
    )


@contextmanager
def fresh_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A directory to fill, which becomes `out` when the context closes. On any error it is removed and an earlier `out` stays as it was."""
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; a free name is required; choose another")
    there = out.is_dir() and any(out.iterdir())
    if there and not (out / "config.json").is_file():
        raise ConfigError(f"--out {out} holds other files; a free name is required; choose another")
    if there and not _is_export(out):
        raise ConfigError(f"--out {out} holds a run, which an export would delete; choose another name")
    if there and not overwrite:
        raise ConfigError(f"--out {out} exists; set --overwrite to replace it, or choose another name")
    fresh, former = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        fresh.mkdir(parents=True)
        yield fresh
        if out.exists():
            os.rename(out, former)
        os.rename(fresh, out)
    except BaseException as error:  # an interrupt too must leave nothing half made; raised again
        shutil.rmtree(fresh, ignore_errors=True)
        if former.exists() and not out.exists():
            os.rename(former, out)
        if isinstance(error, OSError) and not isinstance(error, UserError):
            raise RunError(f"{out} cannot be written ({error}); free space or change permissions") from error
        raise
    shutil.rmtree(former, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """`codechat export`; 0 when the directory is there."""
    words = sys.argv[1:] if argv is None else argv
    export(config.parse(ExportConfig, words, prog="codechat export", epilog=__doc__))
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
