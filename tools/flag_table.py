"""The table of other projects' flags in docs/coming-from.md, from codechat/core/aliases.json and
elsewhere.json.

python tools/flag_table.py write
"""

import re
import sys
from pathlib import Path

from codechat.core import config
from codechat.models.config import GPTConfig

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
BLOCK = re.compile(r"(?<=<!-- flags -->\n).*?(?=<!-- /flags -->)", re.S)


def table() -> str:
    """Markdown: our settings with the spellings that are accepted, and the flags that are
    something else here."""
    spellings: dict[str, list[str]] = {}
    for theirs, ours in config.ALIASES.items():
        if ours in config.fields_of(GPTConfig):  # settings of the model have its name before them
            theirs = f"model.{theirs}"
            ours = f"model.{ours}"
        spellings.setdefault(
            " or ".join(f"`{config.flag_of(name)}`" for name in ours.split()), []
        ).append(theirs)
    accepted = [
        (", ".join(f"`--{name}`" for name in names), ours)
        for ours, names in sorted(spellings.items())
    ]
    named = [
        (f"`--{theirs}`", meant.removeprefix("here it is "))
        for theirs, meant in sorted(config.ELSEWHERE.items())
    ]
    return f"{_rows('accepted', accepted)}\n{_rows('an error says', named)}"


def _rows(head: str, rows: list[tuple[str, str]]) -> str:
    return "".join(
        f"| {left} | {right} |\n" for left, right in [(head, "here"), ("---", "---"), *rows]
    )


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text()))
