"""Tables of Markdown, and what their cells say."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table_lines(head: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table: its head, a rule, its rows."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def with_interval(row: Mapping[str, Any], name: str) -> str:
    """A metric of an evaluation with its 95 % interval, as `0.50 [0.40, 0.60]`."""
    return f"{row[name]:.2f} [{row[f'{name}/lo']:.2f}, {row[f'{name}/hi']:.2f}]"
