"""The loops run with the library alone: the laboratory and what only it needs cannot be
imported, and no entry point of it is declared. A task comes from a package of one's own, the
third change of docs/extending.md, word by word."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from contracts import write_conversations

ROOT = Path(__file__).resolve().parents[3]
ABSENT = (
    "codechat_lab",
    "fastapi",
    "IPython",
    "ipykernel",
    "jupyterlab",
    "jupytext",
    "llguidance",
    "matplotlib",
    "nbclient",
    "nbformat",
    "papermill",
    "starlette",
    "uvicorn",
)
# Python imports it before anything else
SITECUSTOMIZE = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
SMALL = "--max-steps 2 --warmup-steps 1 --eval-every 0 --save-every 0 --device-batch-size 2".split()


def declare(site: Path, name: str, entry_points: str = "") -> None:
    """What pip would write about an installed distribution."""
    folder = site / f"{name}-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(home: Path) -> Path:
    """A folder of packages with the library, which hides the installed distribution of both
    packages."""
    site = home / "site"
    site.mkdir()
    (site / "codechat").symlink_to(ROOT / "codechat")
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    declare(site, "codechat")
    return site


def added_files() -> dict[str, str]:
    """The new files of the diffs in docs/extending.md: {path: text}."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    files = {}
    for diff in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^--- ", diff, flags=re.MULTILINE):
            if part.startswith("/dev/null\n+++ b/"):
                head, _, *lines = part.splitlines()[1:]
                files[head.removeprefix("+++ b/")] = "".join(
                    f"{line.removeprefix('+')}\n" for line in lines
                )
    return files


@pytest.fixture
def package(site: Path) -> Path:
    for path, text in added_files().items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
    return site


def install(site: Path) -> None:
    """The package as `pip install` leaves it, by its pyproject.toml."""
    project = tomllib.loads((site / "my_package/pyproject.toml").read_text())["project"]
    lines = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items())
        for group, points in project["entry-points"].items()
    ]
    declare(site, project["name"], "\n".join(lines))


def ran(site: Path, *words: str) -> dict[str, object]:
    """`python -m codechat WORDS` in the folder above the site; what the run says of its end."""
    done = subprocess.run(
        [sys.executable, "-m", "codechat", *words, *SMALL, "--run-name", "alone"],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((site.parent / "runs/alone/status.json").read_text())


def test_sft_runs_with_the_library_alone(site: Path) -> None:
    data = write_conversations(site.parent)
    shape = (
        "--model.depth 1 --model.n-embd 32 --model.n-head 2 --model.block-size 64 --tokenizer bytes"
    )
    assert ran(site, "sft", "--data-dir", data, *shape.split())["status"] == "finished"


def test_grpo_learns_a_task_of_a_module_with_the_library_alone(package: Path) -> None:
    task = "my_package.count:CountTask"
    assert (
        ran(package, "grpo", "--preset", "toy", "--task", task, "--allow-dead")["status"]
        == "finished"
    )


def test_grpo_finds_a_task_of_an_installed_package_by_its_name(package: Path) -> None:
    install(package)
    assert (
        ran(package, "grpo", "--preset", "toy", "--task", "count", "--allow-dead")["status"]
        == "finished"
    )


def test_a_module_that_is_not_there_is_named(home: Path) -> None:
    from codechat import tasks
    from codechat.core.errors import DataError

    with pytest.raises(
        DataError, match="no_package.no_task.*ModuleNotFoundError.*install its package"
    ):
        tasks.load("no_package.no_task:Task")
