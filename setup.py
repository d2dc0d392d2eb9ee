"""What pyproject.toml cannot say: a wheel holds, in codechat/shipped, the files beside the package that commands read."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = {"nbs_py": {".py"}, "reports": {".csv", ".json", ".jsonl"}, "docs": {".md"}, "examples": {".py", ".json", ".jsonl"}}  # fmt: skip


def shipped() -> list[Path]:
    root = Path(__file__).parent
    return [Path("jupytext.toml")] + [
        path.relative_to(root)
        for folder, endings in FOLDERS.items()
        for path in sorted((root / folder).rglob("*"))
        if path.is_file() and path.suffix in endings
    ]


class BuildWithShipped(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # which reads the checkout itself
            for path in shipped():
                place = Path(self.build_lib, "codechat", "shipped", path)
                self.mkpath(str(place.parent))
                self.copy_file(str(Path(__file__).parent / path), str(place))


setup(cmdclass={"build_py": BuildWithShipped})
