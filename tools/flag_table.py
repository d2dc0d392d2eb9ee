"""The table of other projects' flags in docs/coming-from.md, from codechat/core/aliases.json.

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
    """Markdown: our settings with the spellings that are accepted."""
    spellings: dict[str, list[str]] = {}
    for theirs, ours in config.ALIASES.items():
        if ours in config.fields_of(GPTConfig):  # settings of the model have its name before them
            theirs = f"model.{theirs}"
            ours = f"model.{ours}"
        spellings.setdefault(
            " or ".join(f"`{config.flag_of(name)}`" for name in ours.split()), []
        ).append(theirs)
    rows = ["| accepted | here |", "| --- | --- |"]
    for ours, names in sorted(spellings.items()):
        theirs = ", ".join(f"`--{name}`" for name in names)
        rows.append(f"| {theirs} | {ours} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["write"]:
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text()))
