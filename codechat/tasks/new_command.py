"""`codechat new task NAME`: a custom task to start from: its reward functions, its test and its rows.

    codechat new task capitals                 capitals.py, test_capitals.py and capitals.jsonl in this folder
    codechat new task capitals --out my-tasks
    codechat grpo --task capitals.py:Capitals --init-from nano/sft --run-name capitals

They are copies of examples/my_task.py, its test and its rows. Nothing is overwritten.
"""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("new_task")
FILES = ("my_task.py", "test_my_task.py", "my_task.jsonl")


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """`codechat new`."""

    out: Path = opt(Path("."), "folder to write into")


def write_task(name: str, out: Path) -> list[Path]:
    """Write the three files. ConfigError for a name that Python cannot import, and for a file that exists."""
    cls = "".join(part.capitalize() for part in name.split("_"))
    known = keyword.iskeyword(name) or keyword.iskeyword(cls) or name in sys.stdlib_module_names
    if known or not re.fullmatch(r"[a-z][a-z0-9_]*", name) or util.find_spec(name) and not Path(f"{name}.py").exists():
        raise ConfigError(
            f"the name {name!r}; required: small letters, digits and _, and no module or keyword of Python"
        )
    paths = {out / file.replace("my_task", name): (TEMPLATE / file).read_text(encoding="utf-8") for file in FILES}
    if existing := [path for path in paths if path.exists()]:
        raise ConfigError(f"{existing[0]} exists; choose another name or --out")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        write_atomic(path, text.replace("my_task", name).replace("MyTask", cls))
    print(f"wrote {', '.join(path.name for path in paths)} in {out}; try: python -m pytest {out / f'test_{name}.py'}")
    print(f"then: codechat diagnose --ckpt RUN --task {out / name}.py:{cls}")
    return list(paths)


def main(argv: list[str] | None = None) -> None:
    """`codechat new task NAME [--out FOLDER]`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print("usage: codechat new task NAME [--out FOLDER]\n\n" + (__doc__ or "").rstrip())
    elif words[0] != "task" or len(words) < 2 or words[1].startswith("-"):
        raise ConfigError(f"codechat new {' '.join(words)}; required: codechat new task NAME")
    else:
        write_task(words[1], config.parse(NewConfig, words[2:], prog="codechat new task", epilog=__doc__).out)
