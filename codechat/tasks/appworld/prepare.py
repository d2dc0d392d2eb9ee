"""`codechat data appworld`: successful episodes of AppWorld as conversations for SFT.

They come from runs of `codechat evaluate --task appworld --split train`. The assistant's answers carry loss, the world's messages do not. Only
episodes of AppWorld's training split are used: the other splits are evaluation data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from codechat.core.config import default, opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.data.sources import LARGEST_LOSS, Ledger, digest, read_jsonl
from codechat.data.synthetic import SPLITS, split_of
from codechat.runs.paths import find_run
from codechat.tasks.preparation import PreparedConfig, prepare

Row = dict[str, Any]
DOMAIN = "appworld"
KEYS = {"problem", "split", "turns", "reward", "correct"}


@dataclass(frozen=True, kw_only=True)
class AppWorldDataConfig(PreparedConfig):
    """Episodes of evaluations -> appworld.SPLIT.jsonl (conversations)."""

    run_name: tuple[str, ...] = opt(("appworld",), "runs of codechat evaluate --task appworld --split train")
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
        for row in _episodes(where):
            rule = _rule(row, cfg.min_reward)
            if not row.keys() >= KEYS:
                ledger.lose("no trajectory")
            elif rule or (name := digest(repr(messages := _messages(row)))[:16]) in seen:
                ledger.skip(rule or "the same again")
            else:
                seen.add(name)
                ledger.keep()
                yield _conversation(row, messages, name)


def _episodes(run_name: str) -> Iterator[Row]:
    path = find_run(run_name) / "examples.jsonl"
    if not path.is_file():
        raise MissingFile(f"{path} does not exist; `codechat evaluate --task appworld --split train` writes it")
    yield from (row for _, row in read_jsonl(path))


def _messages(row: Row) -> list[Row]:
    """The episode as a conversation, up to its last answer."""
    messages = list(row["parts"]["opening"])
    for turn in row["turns"]:
        told = [{"role": "user", "content": text} for text in turn["told"]]
        messages += [{"role": "assistant", "content": turn["text"]}, *told]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


def _rule(row: Row, min_reward: float) -> str | None:
    """The rule that skips an episode, or None."""
    if row.get("split") != "train":
        return "not of AppWorld's training split"
    if min_reward == 1 and not row.get("correct"):
        return "not everything passed"
    return "too few checks passed" if row.get("reward", 0.0) < min_reward else None


def _conversation(row: Row, messages: list[Row], name: str) -> Row:
    """Tasks of one scenario are similar, so a scenario is in one split."""
    task = row["problem"]
    meta = {"split": split_of(digest(task.partition("_")[0])), "asked": "code", "tools_present": True}
    meta |= {"task": task, "reward": row["reward"]}
    return {"id": f"{DOMAIN}-{name}", "messages": messages, "domain": DOMAIN, "meta": meta}
