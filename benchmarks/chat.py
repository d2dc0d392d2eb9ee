"""A chat: one row on one thread of a CPU, tokens per second of CPU time; the prompt is not counted.

python -m benchmarks chat                                      beside transformers, on the same weights
python -m benchmarks chat --llama-cpp FOLDER                   and llama.cpp, in the dtype of products
python -m benchmarks chat --ckpt smollm2/sft --prompt-tokens 1000 --vs

FOLDER is where `npm install node-llama-cpp@3.21.1` ran (Node 20 or newer). codechat decodes as the
commands chat and tools do, and the server does for a single request: by row.c where `make cpp` has
built it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.settings import ChatBench
from codechat.core.errors import ConfigError
from codechat.distributed import hardware, numerics
from codechat.models import generate, loading
from codechat.models.fast.one_token import RowsInC
from codechat.models.loading import LoadedModel

CPU = torch.device("cpu")


def contestants(cfg: ChatBench, stack: ExitStack) -> list[measure.Contestant]:
    """codechat first, then the peers, which the stack ends."""
    hardware.keep_freed_memory(CPU)  # before weights are copied, as the command does
    loaded = loading.load_model(cfg.ckpt, CPU, decodes=True)
    shape = loaded.model.cfg
    if cfg.prompt_tokens + cfg.max_new_tokens >= shape.block_size:
        raise ConfigError(
            f"prompt_tokens {cfg.prompt_tokens} + max_new_tokens {cfg.max_new_tokens} exceed "
            f"what {cfg.ckpt} knows, {shape.block_size}; lower them"
        )
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(shape.n_ids, (cfg.prompt_tokens,), generator=rng).tolist()
    made = [_codechat(cfg, loaded, prompt)]
    if "transformers" in cfg.vs:
        made.append(_transformers(cfg, prompt))
    if "llama.cpp" in cfg.vs and cfg.llama_cpp is None:
        print(
            "llama.cpp is left out: run `npm install node-llama-cpp@3.21.1` in a folder and name "
            "it by --llama-cpp FOLDER",
            file=sys.stderr,
        )
    elif "llama.cpp" in cfg.vs:
        made.append(_llama_cpp(cfg, prompt, stack))
    return made


def _codechat(cfg: ChatBench, loaded: LoadedModel, prompt: list[int]) -> measure.Contestant:
    with numerics.autocast(CPU):
        conversation = generate.Conversation(loaded.reader())

    def turn() -> float:
        with numerics.autocast(CPU):
            tokens = generate.stream(
                loaded.model,
                prompt,
                max_new_tokens=cfg.max_new_tokens + 1,
                seed=0,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                kept=conversation,
            )
            return _behind_the_first(tokens)

    in_c = isinstance(conversation.reader.short, RowsInC)
    return _contestant("codechat, row.c" if in_c else "codechat", cfg, turn)


def _behind_the_first(tokens: Iterator[int]) -> float:
    """Seconds of CPU time that they took."""
    next(tokens)
    began = time.process_time()
    for _ in tokens:
        pass
    return time.process_time() - began


def _transformers(cfg: ChatBench, prompt: list[int]) -> measure.Contestant:
    """Its `generate`, with weights in the dtype of products."""
    model, _ = peers.exported(cfg.ckpt, numerics.compute_dtype(CPU))
    model.generation_config.eos_token_id = None
    n_new = cfg.max_new_tokens + 1
    ids = torch.tensor([prompt])
    times = list[float]()

    class Clock(peers.require("transformers").generation.BaseStreamer):  # type: ignore[misc]
        def put(self, value: Any) -> None:
            times.append(time.process_time())

        def end(self) -> None:
            """Every token has been put."""

    def turn() -> float:
        times.clear()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=cfg.temperature,
                top_k=cfg.top_k,
                max_new_tokens=n_new,
                min_new_tokens=n_new,
                pad_token_id=0,
                streamer=Clock(),
            )
        _, first, *_, last = times  # the prompt is put before
        return last - first

    return _contestant("transformers", cfg, turn)


def _llama_cpp(cfg: ChatBench, prompt: list[int], stack: ExitStack) -> measure.Contestant:
    assert cfg.llama_cpp is not None
    dtype = numerics.compute_dtype(CPU)
    peer = stack.enter_context(peers.llama_cpp(cfg.llama_cpp, cfg.ckpt, dtype))

    def turn() -> float:
        seconds = peer.ask(
            prompt=prompt,
            tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            topK=cfg.top_k,
            seed=0,
        )
        return float(seconds)

    return _contestant("llama.cpp", cfg, turn)


@dataclass
class Counted:
    """turn() returns the seconds that count."""

    turn: Callable[[], float]
    seconds: float = 0.0

    def run(self) -> None:
        self.seconds = self.turn()


def _contestant(name: str, cfg: ChatBench, turn: Callable[[], float]) -> measure.Contestant:
    counted = Counted(turn)
    return measure.Contestant(
        name, counted.run, cfg.max_new_tokens, seconds=lambda: counted.seconds
    )


def bench(cfg: ChatBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            timings = measure.race(contestants(cfg, stack), cfg.rounds)
    finally:
        torch.set_num_threads(threads)
    dtype = str(numerics.compute_dtype(CPU)).removeprefix("torch.")
    title = (
        f"chat: {cfg.ckpt}, {cfg.max_new_tokens} tokens behind {cfg.prompt_tokens}, "
        f"top-k {cfg.top_k}, CPU time of one thread, {dtype}"
    )
    measure.show(title, "tokens", timings)
    return {"title": title, "timings": measure.rows(timings)}
