"""Settings and presets of every kind of `python -m benchmarks`, without torch: --help and bad flags
answer at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest
from codechat.models.config import MODELS, PRESETS, GPTConfig
from codechat_lab.tasks.toolbox.catalogue import TOOLS

OFFERED = ("square", "reverse_text", "days_between", "color_channel")  # functions of the toolbox


@dataclass(frozen=True, kw_only=True)
class Bench(config.Settings):
    """What every kind has."""

    rounds: int | None = opt(
        None, "turns or seeds of each contestant; none = 5, or those of four minutes", least=1
    )
    json: str | None = opt(None, "also write the figures to this file")

    def __post_init__(self) -> None:
        super().__post_init__()
        model = getattr(self, "model", None)
        lengths = ("seq_len", "prompt_tokens", "max_new_tokens")
        parts = {name: getattr(self, name) for name in lengths if hasattr(self, name)}
        if model and not getattr(self, "ckpt", "") and sum(parts.values()) > model.block_size:
            listed = " + ".join(f"{name} {n}" for name, n in parts.items())
            raise ConfigError(
                f"{listed} exceed the model's block_size {model.block_size}; "
                "lower them or set --model.block-size"
            )


def _wants_a_checkpoint(vllm: Path | None, ckpt: str) -> None:
    if vllm is not None and not ckpt:
        raise ConfigError("got --vllm without --ckpt; vLLM reads an export; name a checkpoint")


@dataclass(frozen=True, kw_only=True)
class TrainBench(Bench):
    """What `python -m benchmarks train` runs."""

    model: GPTConfig = opt(GPTConfig(depth=6, n_embd=384, n_head=6, block_size=256), "architecture")
    device_batch_size: int = opt(8, "sequences per step", least=1)
    seq_len: int = opt(256, "tokens per sequence", least=1)
    vs: tuple[Literal["arcee", "gpt2", "plain"], ...] = opt(("arcee", "gpt2", "plain"), "peers")
    modes: tuple[Literal["eager", "compiled"], ...] = opt(
        ("eager", "compiled"), "modes of the peers"
    )
    memory: bool = opt(True, "also measure peak memory, each contestant in its own process")


@dataclass(frozen=True, kw_only=True)
class SFTBench(Bench):
    """What `python -m benchmarks sft` runs."""

    model: GPTConfig = opt(
        GPTConfig(**PRESETS["nano"]), "architecture; its vocabulary is that of the tokenizer"
    )
    tokenizer: str = opt("gpt2:4096", "tokenizer, such as gpt2:4096, gpt2 or bytes")
    ckpt: str = opt(
        "", "checkpoint to start from instead of random weights; the peer is its export"
    )
    lora_rank: int = opt(
        0, "rank of adapters in all matrices, of the peer by peft; 0 = all weights learn", least=0
    )
    device_batch_size: int = opt(8, "packed rows per step", least=1)
    seq_len: int = opt(512, "tokens per row", least=1)
    steps: int = opt(4, "steps of a turn", least=1)
    vs: tuple[Literal["arcee", "torch"], ...] = opt(
        ("arcee",), "peers; torch = codechat without its C kernels"
    )
    modes: tuple[Literal["eager", "compiled"], ...] = opt(
        ("eager", "compiled"), "modes of the peers"
    )
    memory: bool = opt(False, "also measure peak memory, each contestant in its own process")
    apart: bool = opt(
        False,
        "each turn in its own process, timed by CPU time, with its peak memory and what it "
        "writes: for models of which two do not fit",
    )


@dataclass(frozen=True, kw_only=True)
class SampleBench(Bench):
    """What `python -m benchmarks sample` runs."""

    model: GPTConfig = opt(GPTConfig(depth=6, n_embd=384, n_head=6, block_size=256), "architecture")
    ckpt: str = opt(
        "", "checkpoint to sample from instead of random weights; the peer is its export"
    )
    prompts: int = opt(16, "prompts sampled together", least=1)
    prompt_tokens: int = opt(64, "tokens of each prompt", least=1)
    max_new_tokens: int = opt(128, "new tokens of each prompt", least=1)
    temperature: float = opt(1.0, "sampling temperature; 0 = the likeliest token", least=0)
    top_k: int | None = opt(50, "sample from the k likeliest tokens; none = all", least=1)
    timed: Literal["all", "prompts", "decoding"] = opt(
        "all", "what counts: all, the prompts with the first token of each, or the tokens behind it"
    )
    vs: tuple[Literal["arcee", "no-cache", "torch"], ...] = opt(
        ("arcee", "no-cache"), "peers; torch = codechat without its C kernels"
    )
    vllm: Path | None = opt(None, "python of an environment with vLLM; none = vLLM is left out")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timed == "decoding" and self.max_new_tokens < 2:
            raise ConfigError(
                f"got --timed decoding with max_new_tokens {self.max_new_tokens}; expected a token "
                "behind the first; raise --max-new-tokens"
            )
        _wants_a_checkpoint(self.vllm, self.ckpt)


@dataclass(frozen=True, kw_only=True)
class ChatBench(Bench):
    """What `python -m benchmarks chat` runs."""

    ckpt: str = opt("released/smollm2-tools", "checkpoint; the peers read its export")
    prompt_tokens: int = opt(64, "tokens of the prompt", least=1)
    max_new_tokens: int = opt(64, "tokens that are timed", least=1)
    temperature: float = opt(0.8, "sampling temperature", least=0.01)
    top_k: int = opt(50, "sample from the k likeliest tokens", least=1)
    vs: tuple[Literal["transformers", "llama.cpp"], ...] = opt(
        ("transformers", "llama.cpp"), "peers"
    )
    llama_cpp: Path | None = opt(
        None, "folder with node_modules/node-llama-cpp; none = llama.cpp is left out"
    )


@dataclass(frozen=True, kw_only=True)
class RLBench(Bench):
    """What `python -m benchmarks rl` runs."""

    model: GPTConfig = opt(GPTConfig(depth=4, n_embd=256, n_head=4, block_size=256), "architecture")
    ckpt: str = opt(
        "", "checkpoint to start from instead of random weights; the peer is its export"
    )
    lora_rank: int = opt(
        0, "rank of adapters in all matrices, of the peer by peft; 0 = all weights learn", least=0
    )
    problems: int = opt(8, "problems per step", least=1)
    group_size: int = opt(8, "completions per problem", least=1)
    max_new_tokens: int = opt(64, "tokens of each completion", least=1)
    peer_rows: int | None = opt(
        None, "completions that the peer learns from at once; none = all of a step", least=1
    )
    vs: tuple[Literal["trl"], ...] = opt(("trl",), "peers")
    vllm: Path | None = opt(
        None, "python of an environment with trl and vLLM; none = vLLM is left out"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _wants_a_checkpoint(self.vllm, self.ckpt)


@dataclass(frozen=True, kw_only=True)
class CurveBench(Bench):
    """What `python -m benchmarks curve` runs."""

    ckpt: str = opt("", "checkpoint to start from; none = a new model after start_steps")
    steps: int = opt(20, "steps of each training", least=1)
    start_steps: int = opt(10, "steps of the training that makes the common start", least=1)
    problems: int = opt(4, "problems per step; the task has four", least=1)
    group_size: int = opt(16, "completions per problem", least=2)
    lr: float = opt(4e-3, "AdamW learning rate, constant", least=0)
    vs: tuple[Literal["trl"], ...] = opt(("trl",), "peers")


@dataclass(frozen=True, kw_only=True)
class DataBench(Bench):
    """What `python -m benchmarks data` runs."""

    path: str | None = opt(
        None, "text: parquet, jsonl, .py, .txt, a directory of them; none = the embedded corpus"
    )
    megabytes: float = opt(24.0, "text to tokenize", least=0)
    tokenizer: str = opt("gpt2", "gpt2 or gpt2:N")


@dataclass(frozen=True, kw_only=True)
class ServeBench(Bench):
    """What `python -m benchmarks serve` runs."""

    model: GPTConfig = opt(GPTConfig(**PRESETS["nano"]), "architecture, with random weights")
    ckpt: str = opt("", "checkpoint to serve instead of random weights")
    clients: int = opt(16, "concurrent clients, and rows per batch", least=1)
    prompt_tokens: int = opt(64, "tokens of each prompt", least=1)
    max_new_tokens: int = opt(128, "new tokens of each completion", least=1)
    first_tokens: int = opt(15, "single requests for the time to the first token", least=1)


@dataclass(frozen=True, kw_only=True)
class ConstrainBench(Bench):
    """What `python -m benchmarks constrain` runs."""

    model: GPTConfig = opt(
        GPTConfig(depth=4, n_embd=192, n_head=3, block_size=512, qk_norm=True),
        "architecture; its vocabulary is that of the tokenizer",
    )
    tokenizer: str = opt("gpt2:4096", "tokenizer, such as gpt2:4096, gpt2 or bytes")
    tools: tuple[str, ...] = opt(OFFERED, "functions of the toolbox that are offered")
    prompts: int = opt(16, "prompts sampled together", least=1)
    prompt_tokens: int = opt(64, "tokens of each prompt", least=1)
    max_new_tokens: int = opt(48, "new tokens of each prompt", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.tools if name not in TOOLS]
        if unknown:
            raise ConfigError(
                f"--tools {unknown[0]!r}: the toolbox has no such "
                f"function{nearest(unknown[0], TOOLS)}"
            )


@dataclass(frozen=True, kw_only=True)
class JudgeBench(Bench):
    """What `python -m benchmarks judge` runs."""

    programs: int = opt(24, "programs judged together", least=1)
    tests: int = opt(764, "tests of each", least=1)
    kilobytes: float = opt(50.0, "size of the tests' script", least=0)


@dataclass(frozen=True, kw_only=True)
class QualityBench(config.Settings):
    """What `python -m benchmarks quality` runs."""

    path: str | None = opt(
        None, "text: parquet, jsonl, .py, .txt, a directory of them; none = the embedded corpus"
    )
    max_bytes: int = opt(30_000_000, "text to prepare", least=1)
    tokenizer: str = opt("python:4096", "tokenizer of codechat")
    peer_tokenizer: str = opt("gpt2:4096", "tokenizer of the peer")
    seconds: float = opt(100.0, "training time of each contestant", least=0.1)
    evaluations: int = opt(
        4, "evaluations of each contestant, evenly spaced, the last at the end", least=1
    )
    eval_tokens: int = opt(200_000, "held-out tokens per evaluation", least=1)
    vs: tuple[Literal["plain"], ...] = opt(("plain",), "peers")
    seed: int = opt(0, "seed of weights and windows")
    json: str | None = opt(None, "also write the figures to this file")


RUN_PRESETS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "train": {
        name: {"model": model, "seq_len": model["block_size"]} for name, model in PRESETS.items()
    },
    "sft": MODELS,
    "sample": MODELS,
    "serve": MODELS,
    "constrain": MODELS,
}
