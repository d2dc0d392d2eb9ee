"""Expert episodes and problems of the pocket apps.

The experts' trajectories are conversations for SFT (domain "episodes"); what the environment said is in them and carries no loss, since it is not the
assistant's. Training problems are other ones than those that experts show.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data.prepared import print_ledgers, require_kind, write
from codechat.data.sources import Ledger
from codechat.tasks import apps, gold_gate
from codechat.tasks.apps.task import row_of

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
    levels: tuple[int, ...] = opt(apps.LEVELS, "levels of the requests, 1 to 5; repeat one to draw it more often")
    apps: tuple[str, ...] = opt((), "apps that levels 1 and 2 keep to, such as notes contacts; empty = all")
    actions: Literal["call", "code"] = opt(
        "call", "how tools are called: <functioncall>, or Python that is run in the sandbox"
    )
    seed: int = opt(0, "seed of worlds, requests and values")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.levels) - set(apps.LEVELS)):
            raise ConfigError(f"levels {unknown} are unknown; give some of {', '.join(map(str, apps.LEVELS))}")
        for name in ("max_examples", "problems", "eval_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


def prepare_apps(cfg: AppsConfig) -> Row:
    """Write episodes and problems; returns the manifest of the directory. Raises UserError, also where an expert does not pass its own reward."""
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
        gold_gate(task, problems[:64]).require()
        files[f"apps.{split}"] = list(map(row_of, problems))
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)
