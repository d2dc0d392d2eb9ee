"""Starter files for a task of your own: `codechat new task NAME`, or `codechat new package NAME`.

codechat new task capitals                 capitals.py, test_capitals.py and capitals.jsonl in this
                                           folder
codechat new package capitals              the same in capitals/, with a pyproject.toml
"""

import keyword
import re
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError

# links to examples/my_task.py, its test and its rows
TEMPLATE = Path(__file__).with_name("new_task")


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """What to write, and where."""

    what: Literal["task", "package"] = opt(
        config.REQUIRED, "a task, or a folder that pip installs", positional=True
    )
    name: str = opt(config.REQUIRED, "name of the files and the class", positional=True)
    out: Path = opt(Path("."), "folder to write into")


def write_new(cfg: NewConfig) -> None:
    """Write the three files, and pyproject.toml for a package. ConfigError for a file that
    exists, and for a name that Python cannot import or that a module has."""
    packed = cfg.what == "package"
    name = cfg.name
    cls = "".join(part.capitalize() for part in name.split("_"))
    out = cfg.out / name if packed else cfg.out
    texts = {}
    for file in TEMPLATE.iterdir():
        if packed or file.stem != "pyproject.toml":
            texts[out / file.stem.replace("my_task", name)] = file.read_text(encoding="utf-8")
    for path in texts:
        if path.exists():
            raise ConfigError(
                f"got {path}, which exists; expected a new file; choose another name or --out"
            )
    keywords = {name, cls} & {*keyword.kwlist}
    if keywords or not re.fullmatch("[a-z][a-z0-9_]*", name) or util.find_spec(name):
        raise ConfigError(
            f"got the name {name!r}; expected small letters, "
            "digits, _, and no module or keyword of Python"
        )
    out.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_atomic(path, text.replace("my_task", name).replace("MyTask", cls))
    written = ", ".join(path.name for path in texts)
    print(f"wrote {written} in {out}; try: python -m pytest {out / f'test_{name}.py'}")
    # with a slash, or pip takes it for a name in its index
    install = f"pip install {cfg.out}/{name}; " if packed else ""
    task = name if packed else f"{out / name}.py:{cls}"
    print(f"then: {install}codechat diagnose --ckpt RUN --task {task}")
