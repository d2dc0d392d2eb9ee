"""Behaviour probes: does the model call a tool that is requested and present, and write code
when code is requested?

A 2 x 2 matrix: a tool or code is requested, tools are present or absent. A fifth cell has
tools, but not the requested one. The cells show within a few steps that one skill overwrites
another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.errors import DataError
from codechat.data.sources import hash_rows, read_jsonl
from codechat.distributed import dist, numerics
from codechat.evaluation.intervals import wilson_interval
from codechat.models import generate, gpt
from codechat.text import chat, tool_calls
from codechat.text.tokenizer import Tokenizer

BEHAVIOURS = ("call", "code", "neither")
EXPECTED = {
    "tool_with_tools": "call",
    "tool_with_other_tools": "neither",
    "tool_without_tools": "neither",
    "code_with_tools": "code",
    "code_without_tools": "code",
}
CELLS = tuple(EXPECTED)
CODE = re.compile(
    r"```|^\s*(?:(?:async\s+)?def\s+\w+\s*\(|class\s+\w+.*:|import\s+\w|from\s+\w[\w.]*\s+import\b)",
    re.MULTILINE,
)


def behaviour(text: str) -> Literal["call", "code", "neither"]:
    """What a completion does: makes a function call (well formed or not), writes Python, or
    neither."""
    if tool_calls.CALL_TAG in tool_calls.in_words(text):
        return "call"
    return "code" if CODE.search(text) else "neither"


@dataclass(frozen=True)
class BehaviourMatrix:
    """counts[cell][behaviour] of the probed cells; a cell is what was requested, and which
    tools were present."""

    counts: dict[str, Counter[str]]

    def metrics(self) -> dict[str, float]:
        """probe/CELL/BEHAVIOUR shares and probe/CELL/n."""
        row: dict[str, float] = {}
        for cell, counts in self.counts.items():
            row |= {f"probe/{cell}/{b}": counts[b] / counts.total() for b in BEHAVIOURS}
            row[f"probe/{cell}/n"] = counts.total()
        return row

    def __str__(self) -> str:
        """A line for each cell, with Wilson intervals."""
        lines = []
        for cell, counts in self.counts.items():
            shares = (f"{b} {wilson_interval(counts[b], counts.total())}" for b in BEHAVIOURS)
            lines.append(f"{cell:<22} {'  '.join(shares)}  n={counts.total()}")
        return "\n".join(lines)


def cell_of(probe: Mapping[str, Any]) -> str:
    """The cell of a probe. Without `suitable`, present tools include the requested one."""
    if probe["asked"] == "tool" and probe["tools_present"] and not probe.get("suitable", True):
        return "tool_with_other_tools"
    return f"{probe['asked']}_{'with' if probe['tools_present'] else 'without'}_tools"


@dataclass(frozen=True)
class Probes:
    """Rows {messages, asked: tool | code, tools_present}; the instrument `behaviour_probes`."""

    rows: list[dict[str, Any]]

    @property
    def hash(self) -> str:
        return hash_rows(self.rows)

    def measure(
        self, model: gpt.GPT, tokenizer: Tokenizer, tags: str, *, seed: int = 0
    ) -> BehaviourMatrix:
        """`behaviour_matrix` of these. A collective."""
        return behaviour_matrix(model, tokenizer, tags, self.rows, seed=seed)


def behaviour_matrix(
    model: gpt.GPT,
    tokenizer: Tokenizer,
    tags: str,
    probes: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
) -> BehaviourMatrix:
    """One completion of each probe {messages, asked: tool | code, tools_present}, counted by
    cell and behaviour. A collective."""
    numbers = range(dist.rank(), len(probes), dist.world_size())
    mine = [probes[i] for i in numbers]
    conversations = [probe["messages"] for probe in mine]
    texts = answers(
        model, tokenizer, tags, conversations, keys=numbers, max_new_tokens=48, seed=seed
    )
    found = list(zip(map(cell_of, mine), map(behaviour, texts), strict=True))
    counts = {cell: Counter[str]() for cell in CELLS}
    for part in dist.gather(found):
        for cell, did in part:
            counts[cell][did] += 1
    return BehaviourMatrix({cell: some for cell, some in counts.items() if some})


def answers(
    model: gpt.GPT,
    tokenizer: Tokenizer,
    tags: str,
    conversations: Sequence[Sequence[chat.Message]],
    **sampling: Any,
) -> list[str]:
    """One completion of each conversation as text. sampling: further settings of
    `generate.sample`."""
    prompts = [chat.prompt(messages, tokenizer, tags) for messages in conversations]
    stop = chat.stop_sequences(tokenizer, tags)
    with numerics.autocast(model.wte.weight.device):
        completions = generate.sample(model, prompts, stop=stop, on_overflow="stop", **sampling)
    return [
        chat.completion_text(completion.ids, tokenizer, tags, messages)
        for completion, messages in zip(completions, conversations, strict=True)
    ]


def read_probes(path: Path, per_cell: int) -> Probes:
    """The first `per_cell` probes of each cell of a file. DataError names a row that is none."""
    counts = Counter[str]()
    kept = []
    for number, probe in read_jsonl(path):
        cell = cell_of(probe) if {"asked", "tools_present", "messages"} <= probe.keys() else None
        if cell not in CELLS:
            raise DataError(
                f"{path} line {number} is no probe {{messages, asked: tool | code, tools_present}}"
            )
        counts[cell] += 1
        if counts[cell] <= per_cell:
            kept.append(probe)
    return Probes(kept)
