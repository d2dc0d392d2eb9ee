"""Constrained calls: what token masks cost per token, beside the same sampling without them.

python -m benchmarks constrain                            16 rows, four functions of the toolbox
python -m benchmarks constrain --prompts 1 --tokenizer gpt2

Two figures: the masks of correct calls, and sampling whole with and without a grammar. The model
is random and writes text, since what a row costs does not depend on what it says.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import measure
from benchmarks.settings import ConstrainBench
from codechat.core.errors import RunError
from codechat.distributed import hardware, numerics
from codechat.models import generate
from codechat.models.gpt import GPT
from codechat.text import chat, tokenizer, tool_calls
from codechat.text.tokenizer import Tokenizer
from codechat_lab.serve.call_grammar import CallGrammar
from codechat_lab.tasks.toolbox.catalogue import TOOLS


def mask_seconds(grammar: CallGrammar, tok: Tokenizer, tools: tuple[str, ...], room: int) -> float:
    """Seconds per token of the masks of correct calls, a line of text before each. room: tokens
    that the answers may have."""
    rng = random.Random(0)
    seconds = 0.0
    tokens = 0
    for name in tools:
        call = tool_calls.format_call(name, TOOLS[name].sample(rng, "train"))
        state = grammar.begin()
        ids = chat.completion_ids(f"Let me see.\n{call}", tok)
        start = time.perf_counter()
        for place, token in enumerate(ids):
            state.mask(room - place - 1)
            if state.take(token, room - place - 1) != token:
                raise RunError(f"the grammar does not allow the call {call}")
        seconds = seconds + time.perf_counter() - start
        tokens = tokens + len(ids)
    return seconds / tokens


def bench(cfg: ConstrainBench) -> dict[str, Any]:
    """Print the table; returns the figures."""
    tok = tokenizer.load(cfg.tokenizer)
    device = hardware.device()
    shape = replace(cfg.model, vocab_size=tok.n_vocab)
    model = GPT(shape).to(device).eval()
    tools = [TOOLS[name].schema for name in cfg.tools]
    start = time.perf_counter()
    CallGrammar(tok, "reserved", tools)
    first = time.perf_counter() - start
    builds = []
    trials = cfg.rounds or measure.ROUNDS
    for _ in range(trials):
        start = time.perf_counter()
        grammar = CallGrammar(tok, "reserved", tools)
        builds.append(time.perf_counter() - start)
    masks = [mask_seconds(grammar, tok, cfg.tools, 1 << 20) for _ in range(trials)]
    late = [mask_seconds(grammar, tok, cfg.tools, grammar.near_end) for _ in range(trials)]
    prompts = [[i % tok.n_vocab] * cfg.prompt_tokens for i in range(cfg.prompts)]

    def sampling(grammars: list[Any] | None) -> Callable[[], Any]:
        def run() -> None:
            with numerics.autocast(device):
                generate.sample(
                    model,
                    prompts,
                    max_new_tokens=cfg.max_new_tokens,
                    seed=0,
                    grammars=grammars,
                )

        return run

    units = cfg.prompts * cfg.max_new_tokens
    made = [
        measure.Contestant("free", sampling(None), units),
        measure.Contestant("constrained", sampling([grammar] * cfg.prompts), units),
    ]
    timings = measure.race(made, cfg.rounds)
    title = (
        f"constrained calls: {shape.depth} x {shape.n_embd}, {cfg.tokenizer}, "
        f"{cfg.prompts} prompts, {len(tools)} functions"
    )
    measure.show(title, "tokens", timings)
    figures = {
        "mask_us_per_token": 1e6 * median(masks),
        "mask_us_per_token_near_the_end": 1e6 * median(late),
        "grammar_ms": 1e3 * median(builds),
        "first_grammar_ms": 1e3 * first,
    }
    print(
        f"masks: {figures['mask_us_per_token']:.0f} microseconds a token, {figures['mask_us_per_token_near_the_end']:.0f} where the answer must "
        f"end soon; a grammar: {figures['grammar_ms']:.0f} ms, the first {figures['first_grammar_ms']:.0f} ms"
    )
    return {"title": title, "timings": measure.rows(timings)} | figures
