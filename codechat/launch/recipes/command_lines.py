"""`codechat recipes`: what `codechat run` runs, and command lines to copy for public models and data.

    codechat recipes            recipes of `codechat run` with their stages, then the sheets of command lines
    codechat recipes gsm8k      GSM8K as public projects ran it: chat prompts with XML rewards, raw prompts of a base model

A sheet runs nothing: its models and data come from the hub, and its runs take a GPU. What a step holds is that of the
projects: problems x accumulated x completions.

Left out: recipes as command lines (`codechat export-scripts` writes them).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, nearest

CHAT, LLAMA, BASE = "Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-Math-1.5B"
# n_grpo_steps 200, 256 completions of 32 problems a step, 1e-5, clip 0.2, 1,024 tokens: CS336's alignment assignment.
STEP = "--device-batch-size 8 --grad-accum 4 --group-size 8 --max-steps 200 --warmup-steps 0 --lr 1e-5 --max-new-tokens 1024 --row-tokens 2048"
GREEDY = "--n 1 --ks 1 --temperature 0"
SHEETS: dict[str, tuple[str, str]] = {
    "gsm8k": (
        "GSM8K as public projects ran it: a chat model with XML rewards, a base model with raw prompts",
        f"""\
# A chat model through its own template, five XML rewards, adapters: 1 problem x 4 accumulated x 16 completions a step, saved every 100 steps.
codechat download {CHAT} --out qwen-chat
codechat import qwen-chat --run-name qwen-chat
codechat diagnose --ckpt qwen-chat --task gsm8k --data-dir hub --max-new-tokens 786 --run-name qwen-chat-signal
codechat grpo --init-from qwen-chat --preset gsm8k --data-dir hub --run-name qwen-chat-gsm8k
codechat evaluate --ckpt qwen-chat qwen-chat-gsm8k --task gsm8k --data-dir hub {GREEDY} --max-new-tokens 786

# The same with Llama.
codechat download {LLAMA} --out llama-chat
codechat import llama-chat --run-name llama-chat
codechat grpo --init-from llama-chat --preset gsm8k --data-dir hub --run-name llama-chat-gsm8k

# A base model without turns: the r1_zero prompt ends in <think>, a completion ends behind </answer>.
codechat download {BASE} --out qwen-base
codechat import qwen-base --tags raw --run-name qwen-base
codechat evaluate --ckpt qwen-base --task gsm8k:template=r1_zero --data-dir hub {GREEDY} --max-new-tokens 1024 --run-name base-r1
codechat evaluate --ckpt qwen-base --task gsm8k:template=question_only --data-dir hub {GREEDY} --max-new-tokens 1024 --run-name base-bare
codechat grpo --init-from qwen-base --variant grpo --task gsm8k:template=r1_zero --data-dir hub {STEP} --run-name base-grpo
codechat grpo --init-from qwen-base --variant dr_grpo --task gsm8k:template=question_only --data-dir hub {STEP} --run-name base-dr-grpo

# SFT on worked solutions in that layout, with GSM8K sampled at each evaluation; then expert iteration.
codechat data reasoning --source hub --template r1_zero --out data/gsm8k-r1
codechat sft --init-from qwen-base --tags raw --data-dir data/gsm8k-r1 --eval-task gsm8k:template=r1_zero --eval-task-data hub --eval-every 50 --eval-new-tokens 1024 --lr 2e-5 --optimizer adamw --run-name base-sft
codechat expert --init-from qwen-base --task gsm8k:template=r1_zero --data-dir hub {STEP} --run-name base-expert
""",
    ),
}


@dataclass(frozen=True, kw_only=True)
class RecipesConfig:
    """What to print."""

    name: str | None = opt(None, "a sheet of command lines; none = list recipes and sheets", positional=True)


def main(argv: list[str] | None = None) -> int:
    """`codechat recipes [NAME]`."""
    words = sys.argv[1:] if argv is None else argv
    cfg = config.parse(RecipesConfig, words, prog="codechat recipes", epilog=__doc__)
    from rich.console import Console

    from codechat.launch.recipes import runner

    if cfg.name is None:
        runner.list_recipes(Console())
        for name, (about, _) in SHEETS.items():
            print(f"{name}: {about}; codechat recipes {name} prints its command lines")
        return 0
    if cfg.name not in SHEETS:
        hint = f"; `codechat run {cfg.name}` runs this one" if cfg.name in runner.RECIPES else nearest(cfg.name, SHEETS)
        raise ConfigError(f"no sheet of command lines {cfg.name!r}; there are: {', '.join(SHEETS)}{hint}")
    print(SHEETS[cfg.name][1], end="")
    return 0


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
