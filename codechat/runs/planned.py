"""Run directories written before their run begins: status "planned", and settings sealed against edits.

`launch` writes config.json, the loop that torchrun starts reads it, and `rundirs.prepare` lets that loop take the
directory over. Between the two somebody may edit config.json: what was planned, priced and logged would then not
be what runs. So env.json holds the hash of config.json as it was written, and a mismatch is refused.

Left out: which fields may be edited. Writing the launch again is as short as an edit, and checks the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core import config as configs
from codechat.core.atomic_files import read_json, write_json
from codechat.core.errors import RunError

PLANNED = "planned"
COMPLETED = ("model", "tags")  # settings that a loop completes from its data and its parent before it begins
SEAL = "settings_hash"


def seal(settings: Any) -> dict[str, str]:
    """What env.json holds against edits: the hash of config.json as it is written."""
    return {SEAL: configs.config_hash(configs.plain(settings))}


def is_planned(path: Path) -> bool:
    """Whether the run was written by `launch` and has not begun."""
    return (path / "status.json").is_file() and read_json(path / "status.json").get("status") == PLANNED


def check_unedited(path: Path, name: str) -> None:
    """RunError where config.json is not what was written. Runs older than the seal pass."""
    sealed = read_json(path / "env.json").get(SEAL)
    if sealed and sealed != configs.config_hash(read_json(path / "config.json")):
        raise RunError(
            f"{path / 'config.json'} was edited after it was written, and run {name} would no longer be what was launched; "
            "undo the edit, or write the launch again with the settings you want (or under another --run-name)"
        )


def check_same(path: Path, name: str, config: Any) -> None:
    """RunError where a loop that takes the directory over has other settings than planned."""
    stored, own = (
        {k: v for k, v in configs.plain(x).items() if k not in (*COMPLETED, "resume", "overwrite")}
        for x in (read_json(path / "config.json"), config)
    )
    differing = [f"{k} {a!r} -> {b!r}" for k, (a, b) in configs.differences(stored, own).items()]
    if differing:
        raise RunError(
            f"run {name} was launched with other settings: {', '.join(differing)}; start it by its launch.sh, "
            "set --overwrite to replace it, or choose another --run-name"
        )


def begin(path: Path, files: Mapping[str, Any]) -> None:
    """Turn a planned directory into a running one, in place: launch.sh and its log stay where they are.

    status.json goes first: a kill in between leaves a killed run, never a planned one with settings that look edited."""
    (path / "checkpoints").mkdir(exist_ok=True)
    write_json(path / "status.json", files["status.json"])
    write_json(path / "env.json", files["env.json"] | seal(files["config.json"]))
    write_json(path / "config.json", files["config.json"])
