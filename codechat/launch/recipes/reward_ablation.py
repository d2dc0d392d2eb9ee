"""Reward ablation against the original system's loss mask, parser and precision. `labs.reward_ablation` does the work.

python -m codechat.launch.recipes.reward_ablation --ckpt nano/sft nano/rl@20 nano/rl@40 nano/rl@60 --data-dir data/nano/sft --run-name nano/anatomy
"""

from __future__ import annotations

import sys
from functools import partial

from codechat.core import config
from codechat.labs import defects, reward_ablation
from codechat.labs.reward_ablation import AblationConfig
from codechat.runs.run import Run

BROKEN = {
    part: partial(defects.switched_on, name)
    for part, name in (("mask", "stop-set"), ("parser", "quote-parser"), ("weights", "bf16-weights"))
}


def ablate_rewards(cfg: AblationConfig) -> Run:
    """The run of `labs.reward_ablation.ablate_rewards` with the original's mask, parser and precision as the other side."""
    return reward_ablation.ablate_rewards(cfg, BROKEN)


def main(argv: list[str] | None = None) -> None:
    """`python -m codechat.launch.recipes.reward_ablation`."""
    argv = sys.argv[1:] if argv is None else argv
    ablate_rewards(
        config.parse(AblationConfig, argv, prog="python -m codechat.launch.recipes.reward_ablation", epilog=__doc__)
    )


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
