"""The peers: models of the same shape from transformers, and a plain GPT written here.

`plain` is the usual small GPT (learned positions, LayerNorm, GELU, full logits, AdamW); it needs
no package. The others need `pip install -e '.[bench]'`; the library itself never imports them.

All models but `exported` are randomly initialized.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codechat.core.errors import MissingFile, RunError
from codechat.data.conversations import Batch
from codechat.data.sources import IGNORE
from codechat.distributed import hardware, numerics
from codechat.formats import exchange
from codechat.models.config import LORA_ALPHA, GPTConfig

LENGTHS = 64  # padded rows are a multiple of it, so that a compiled peer meets few shapes


def require(package: str) -> ModuleType:
    """The imported package; MissingFile names the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingFile(
            f"{package} cannot be imported ({error}); install the peers "
            "with pip install -e '.[bench]', or pass --vs plain"
        ) from None


class PlainGPT(nn.Module):
    """GPT-2's architecture without biases and dropout, as in small training scripts."""

    def __init__(self, cfg: GPTConfig) -> None:
        super().__init__()
        D = cfg.n_embd
        self.n_head = cfg.n_head
        self.wte = nn.Embedding(cfg.padded_vocab, D)
        self.wpe = nn.Embedding(cfg.block_size, D)
        self.blocks = nn.ModuleList(self._block(D) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(D, bias=False)
        for name, p in self.named_parameters():
            residual = name.endswith(("out.weight", "down.weight"))
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / (2 * cfg.depth) ** 0.5 if residual else 0.02)

    @staticmethod
    def _block(D: int) -> nn.ModuleDict:
        sizes = dict(qkv=(D, 3 * D), out=(D, D), up=(D, 4 * D), down=(4 * D, D))
        linear = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
        return nn.ModuleDict({f"norm{i}": nn.LayerNorm(D, bias=False) for i in (1, 2)} | linear)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, V) logits."""
        (B, T), x = ids.shape, self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            q, k, v = (
                block["qkv"](block["norm1"](x))
                .view(B, T, 3, self.n_head, -1)
                .permute(2, 0, 3, 1, 4)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(B, T, -1))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return F.linear(self.norm(x), self.wte.weight)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(
            self(ids).flatten(0, 1).float(), targets.flatten(), reduction=reduction
        )


def exported(ckpt: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """transformers' (model, tokenizer) of a checkpoint, its weights in `dtype`."""
    with tempfile.TemporaryDirectory() as folder:
        return loaded(export(ckpt, Path(folder), dtype), dtype)


def export(ckpt: str, folder: Path, dtype: torch.dtype) -> Path:
    """The directory within `folder` that transformers and vLLM read; its weights are in `dtype`."""
    written: Any = str(dtype).removeprefix("torch.")
    exchange.export(exchange.ExportConfig(ckpt=ckpt, out=folder / "hf", dtype=written))
    return folder / "hf"


def loaded(hf: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """transformers' (model, tokenizer) of an export, its weights in `dtype`."""
    transformers = require("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=dtype)
    return model, transformers.AutoTokenizer.from_pretrained(hf)


@dataclass(frozen=True)
class Engine:
    """Another program in a process of its own: each line of input is a request, each line of
    output its answer."""

    name: str
    process: subprocess.Popen[str]
    errors: Path

    def ask(self, **request: Any) -> Any:
        """The answer; RunError with what the program said if it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            said = self.errors.read_text().strip().splitlines()
            told = [line for line in said if "Error:" in line] or said[-1:] or ["nothing"]
            raise RunError(f"{self.name} ended; it said {told[0]!r}") from None


@contextmanager
def _engine(
    name: str, words: list[str], made: Path, env: dict[str, str] | None = None
) -> Iterator[Engine]:
    """Until the block ends. made: a folder for what it says."""
    errors = made / "errors"
    with errors.open("w") as to:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=to, text=True, env=env
        )
    try:
        yield Engine(name, process, errors)
    finally:
        process.communicate(timeout=60)  # it ends where its input does


@contextmanager
def llama_cpp(folder: Path, ckpt: str, dtype: torch.dtype) -> Iterator[Engine]:
    """llama.cpp with a checkpoint's weights in `dtype`, on one thread (llama.mjs). folder: where
    npm installed node-llama-cpp."""
    if not (folder / "node_modules" / "node-llama-cpp").is_dir() or not shutil.which("node"):
        raise MissingFile(
            f"got {folder}; expected Node and node_modules/node-llama-cpp in this folder; run "
            "`npm install node-llama-cpp@3.21.1` there"
        )
    with tempfile.TemporaryDirectory() as made:
        written: Any = str(dtype).removeprefix("torch.")
        out = Path(made) / "gguf"
        exchange.export(exchange.ExportConfig(ckpt=ckpt, out=out, dtype=written, format="gguf"))
        script = Path(__file__).with_name("llama.mjs")
        words = ["node", str(script), str(folder), str(out / "model.gguf")]
        with _engine("node-llama-cpp", words, Path(made)) as engine:
            yield engine


@contextmanager
def vllm(python: Path, ckpt: str, dtype: torch.dtype, tokens: int, rows: int) -> Iterator[Engine]:
    """vLLM with a checkpoint's weights in `dtype` and as many threads as torch has here
    (vllm_engine.py). python: of its environment; tokens: of a row, prompt included."""
    if shutil.which(python) is None:
        raise MissingFile(f"got {python}; expected the python of an environment with vLLM")
    with tempfile.TemporaryDirectory() as made:
        script = str(Path(__file__).with_name("vllm_engine.py"))
        # -P: the names of files beside the script are not those of packages
        words = [str(python), "-P", script, str(export(ckpt, Path(made), dtype))]
        words += [str(dtype).removeprefix("torch."), str(tokens), str(rows)]
        with _engine("vLLM", words, Path(made), vllm_environment()) as engine:
            yield engine


def vllm_environment() -> dict[str, str]:
    """For vLLM's CPU build."""
    return os.environ | {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process that answers computes
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def lora(rank: int) -> Any:
    """peft's settings for adapters in the matrices that ours are in."""
    matrices = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    return require("peft").LoraConfig(
        r=rank,
        lora_alpha=LORA_ALPHA,
        target_modules=matrices,
        task_type="CAUSAL_LM",
    )


def huggingface(kind: str, cfg: GPTConfig) -> Any:
    """transformers' model of `kind` (arcee, gpt2) in the shape of cfg, randomly initialized."""
    transformers = require("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = transformers.GPT2Config(
            vocab_size=cfg.padded_vocab,
            n_positions=cfg.block_size,
            n_embd=cfg.n_embd,
            n_layer=cfg.depth,
            n_head=cfg.n_head,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        return transformers.GPT2LMHeadModel(shape)
    shape = transformers.ArceeConfig(
        vocab_size=cfg.padded_vocab,
        hidden_size=cfg.n_embd,
        intermediate_size=cfg.hidden_width,
        num_hidden_layers=cfg.depth,
        num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.kv_heads,
        max_position_embeddings=cfg.block_size,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=cfg.tied,
        rope_theta=cfg.rope_theta,
    )
    return transformers.ArceeForCausalLM(shape)


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, targets, attention mask), each (N, L): the conversations of packed rows, one in a
    row."""
    rows = zip(batch.ids, batch.targets, batch.docs, strict=True)
    talks = [
        (row[docs == n], into[docs == n])
        for row, into, docs in rows
        for n in range(int(docs.max()) + 1)
    ]
    longest = -(-max(len(ids) for ids, _ in talks) // LENGTHS) * LENGTHS
    ids, targets, mask = (torch.full((len(talks), longest), fill) for fill in (0, IGNORE, 0))
    for i, (row, into) in enumerate(talks):
        ids[i, : len(row)], targets[i, : len(row)], mask[i, : len(row)] = row, into, 1
    return ids, targets, mask


def word_per_id(n_ids: int) -> Any:
    """transformers' tokenizer whose word <i> is the id i. Its end of text is no row of the
    model, so a completion ends at its full length; masked places hold 0."""
    tokenizers, transformers = map(require, ("tokenizers", "transformers"))
    words = {f"<{i}>": i for i in range(n_ids)} | {"<none>": n_ids}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<0>",
        eos_token="<none>",
    )


def grpo_config(folder: Path, **settings: Any) -> Any:
    """trl's settings: no KL term, nothing saved or reported, on the CPU where there is no GPU,
    in the compute dtype."""
    quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
    here = dict(
        use_cpu=hardware.device().type == "cpu", bf16=numerics.compute_dtype() == torch.bfloat16
    )
    how = dict(beta=0.0, gradient_checkpointing=False, output_dir=str(folder))
    return require("trl").GRPOConfig(**how, **quiet, **here, **settings)
