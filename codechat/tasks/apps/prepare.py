"""`codechat data apps`: expert episodes and problems of the pocket apps.

The experts' trajectories are conversations for SFT (domain "episodes"). They include the environment's messages, which
carry no loss. Training problems differ from the experts' problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import opt
from codechat.data.prepared import print_ledgers, require_kind, write
from codechat.data.sources import Ledger
from codechat.tasks import apps
from codechat.tasks.base import check_reference_solutions, row_of
from codechat.tasks.preparation import check_generated

Row = dict[str, Any]
HELD_OUT = ("select", "test")


@dataclass(frozen=True, kw_only=True)
class AppsConfig:
    """Pocket apps -> episodes.SPLIT.jsonl (expert trajectories), apps.SPLIT.jsonl (problems)."""

    out: str = opt("data/apps", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int = opt(500, "expert episodes for training")
    problems: int = opt(2000, "training problems")
    eval_examples: int = opt(200, "episodes and problems of each split but train")
    levels: tuple[int, ...] = opt(apps.LEVELS, "levels of the requests, 1 to 5; repeat one to sample it more often")
    apps: tuple[str, ...] = opt((), "apps that levels 1 and 2 use, such as notes contacts; empty = all")
    actions: Literal["call", "code"] = opt("call", "how tools are called: <functioncall>, or Python in the sandbox")
    seed: int = opt(0, "seed of worlds, requests and values")

    def __post_init__(self) -> None:
        check_generated(self, apps.LEVELS)


def prepare_apps(cfg: AppsConfig) -> Row:
    """Write episodes and problems. Returns the manifest of the directory. Raises UserError, also where an expert's
    solution does not score the maximum."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledger, held_out = Ledger("pocket apps"), dict.fromkeys(HELD_OUT, cfg.eval_examples)
    task, files = apps.AppsTask(levels=cfg.levels, actions=cfg.actions, apps=cfg.apps), {}
    for split, n in {"train": cfg.max_examples, **held_out}.items():
        files[f"{apps.DOMAIN}.{split}"] = list(
            ledger.counted(apps.dialogues(split, n, cfg.seed, cfg.levels, cfg.actions, cfg.apps))
        )
    for split, n in {"train": cfg.problems, **held_out}.items():
        problems = task.problems(split, n, cfg.seed)
        check_reference_solutions(task, problems[:64]).require()
        files[f"apps.{split}"] = list(map(row_of, problems))
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)
