"""Settings of `codechat board`, and the rows of its folder. Importing this loads no torch:
`--help` reads the class."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from codechat.core.atomic_files import read_rows
from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError, DataError

# what every row has beside its completion
FIELDS = {
    "model": str,
    "wording": str,
    "seed": int,
    "id": str,
    "category": str,
    "right_is": str,
    "correct": bool,
    "tier": str,
}


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a board. DataError for one that lacks a field, as those of other code may."""
    for number, row in enumerate(read_rows(path), 1):
        for name, kind in FIELDS.items():
            if type(row.get(name)) is not kind:
                raise DataError(
                    f"{path} row {number} has {name} {row.get(name)!r}; expected rows of this "
                    "`codechat board`; delete that line, or set another --out"
                )
        yield row


@dataclass(frozen=True, kw_only=True)
class BoardConfig(Settings):
    """Which models answer, which problems, and how often."""

    ckpt: tuple[str, ...] = opt(
        (), "checkpoints: run name, run@best, run@STEP, run directory or checkpoint", reads="run"
    )
    endpoint: str = opt(
        "", "URL of an OpenAI-compatible server, asked after the checkpoints, if any"
    )
    model: str = opt("", "the endpoint's name of the model; empty = the first that it lists")
    api_key_file: Path | None = opt(
        None, "file with the key that the endpoint expects; none = no key", reads="path"
    )
    tags: Literal["raw", "template", "native"] | None = opt(
        None, "of the checkpoints, as in `evaluate`; the rows bear it beside the name"
    )
    source: str = opt(
        "", "the leaderboard's files; empty = those of `codechat download bfcl`", reads="path"
    )
    problems: int | None = opt(100, "problems of each category at most; none = all", least=1)
    categories: str = opt("all", "all, live, non_live, or categories joined by +")
    wordings: tuple[Literal["plain", "short", "leaderboard"], ...] = opt(
        ("plain", "short", "leaderboard"), "wordings of the system message"
    )
    seeds: tuple[int, ...] = opt((0,), "seeds of sampling, each 0 or more")
    temperature: float = opt(0.0, "sampling temperature; 0 = greedy", least=0)
    max_new_tokens: int = opt(128, "longest completion, tokens", least=1)
    out: str = opt("runs/drawn/board", "folder of the rows, the notebook and the page")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.wordings or not self.seeds:
            raise ConfigError("no --wordings or no --seeds; at least one of each is required")
        if min(self.seeds) < 0:
            raise ConfigError(f"got --seeds {list(self.seeds)}; expected each 0 or more")
        if self.temperature == 0 and len(self.seeds) > 1:
            raise ConfigError(
                f"temperature 0 with seeds {list(self.seeds)}: all draw the same; set --seeds 0, "
                "or a temperature"
            )
