"""What the data preparations of the tasks share: checks of settings, and ledgers that are checked and printed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from codechat.core.errors import ConfigError
from codechat.data.prepared import print_ledgers
from codechat.data.sources import Ledger
from codechat.tasks.base import check_levels


def check_generated(cfg: Any, levels: Collection[int]) -> None:
    """ConfigError for unknown levels of a generator, and for a count below 1."""
    check_levels(cfg.levels, levels)
    for name in ("max_examples", "problems", "eval_examples"):
        if getattr(cfg, name) < 1:
            raise ConfigError(f"{name} is {getattr(cfg, name)}; it must be at least 1")


@contextmanager
def checked_ledgers() -> Iterator[list[Ledger]]:
    """A list to fill with ledgers. Each is checked at the end of the block. They are printed in any case, also after an
    error."""
    ledgers: list[Ledger] = []
    try:
        yield ledgers
        for ledger in ledgers:
            ledger.check()
    finally:
        print_ledgers(ledgers)
