"""`codechat data appworld`: successful episodes of AppWorld as conversations for SFT.

They come from files of recorded episodes. The assistant's answers carry loss, the world's messages do not. Only
episodes of AppWorld's training split are used: the other splits are evaluation data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core.config import default, opt
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data.sources import LARGEST_LOSS, Ledger, digest, read_jsonl
from codechat.data.synthetic import SPLITS, split_of
from codechat.runs.paths import find_run
from codechat.tasks.preparation import PreparedConfig, prepare

Row = dict[str, Any]
DOMAIN = "appworld"
KEYS = {"id", "split", "messages", "reward", "correct", "stop"}


@dataclass(frozen=True, kw_only=True)
class AppWorldDataConfig(PreparedConfig):
    """Recorded episodes -> appworld.SPLIT.jsonl (conversations)."""

    run_name: tuple[str, ...] = opt(("appworld",), "files of episodes, or runs with trajectories.jsonl")
    out: str = default("data/appworld")
    min_reward: float = opt(
        1.0, "least share of passed checks of a kept episode; 1 = only episodes in which every check passed"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.min_reward <= 1:
            raise ConfigError(f"min_reward is {self.min_reward}; it must be a share from 0 to 1")


def prepare_appworld(cfg: AppWorldDataConfig) -> Row:
    """Write the conversations. Returns the manifest of the directory. Raises UserError where no episode is kept."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        ledgers.append(ledger := Ledger("appworld", {"no trajectory": LARGEST_LOSS}))
        files: dict[str, list[Row]] = {f"{DOMAIN}.{split}": [] for split in SPLITS}
        for row in _conversations(cfg, ledger):
            files[f"{DOMAIN}.{row['meta']['split']}"].append(row)
        return files

    return prepare(cfg, collect)


def _conversations(cfg: AppWorldDataConfig, ledger: Ledger) -> Iterator[Row]:
    seen: set[str] = set()
    for where in cfg.run_name:
        for row in _trajectories(where):
            rule = _rule(row, cfg.min_reward)
            if not row.keys() >= KEYS:
                ledger.lose("no trajectory")
            elif rule or (name := digest(repr(row["messages"]))[:16]) in seen:
                ledger.skip(rule or "the same again")
            else:
                seen.add(name)
                ledger.keep()
                yield _conversation(row, name)


def _trajectories(where: str) -> Iterator[Row]:
    path = Path(where)
    if not path.is_file():
        path = find_run(where) / "trajectories.jsonl"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; set --run-name to a file of recorded episodes")
    yield from (row for _, row in read_jsonl(path))


def _rule(row: Row, min_reward: float) -> str | None:
    """The rule that skips an episode, or None."""
    if row.get("split") != "train":
        return "not of AppWorld's training split"
    if min_reward == 1 and not row.get("correct"):
        return "not everything passed"
    return "too few checks passed" if row.get("reward", 0.0) < min_reward else None


def _conversation(row: Row, name: str) -> Row:
    """The episode up to its last answer. Tasks of one scenario are similar, so a scenario is in one split."""
    messages = list(row["messages"])
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"trajectory {row['id']} holds no answer; repeat the run")
    split = split_of(digest(row["id"].partition("_")[0]))
    return {
        "id": f"{DOMAIN}-{name}",
        "messages": messages,
        "domain": DOMAIN,
        "meta": {"split": split, "asked": "code", "tools_present": True, "task": row["id"], "reward": row["reward"]},
    }
