"""A wheel, unpacked beside an empty folder: what commands read came with it, what they write
lies in that folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from codechat_lab.reports import build, notebooks

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
# Recipe nano with stages of seconds. A model that learned nothing is DEAD, which ends RL where
# that is asked.
SMALL = (ROOT / "tests" / "small_nano.txt").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(
            listed, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    place = tmp_path_factory.mktemp("wheel")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (place / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / "source" / name)
    words = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(place),
        ".",
    ]
    made = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=place / "source",
        capture_output=True,
        text=True,
    )
    if "No module named" in made.stderr and "setuptools" in made.stderr:
        pytest.skip("setuptools is not installed")
    assert made.returncode == 0, made.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    return place / "site"


def ran(site: Path, folder: Path, *words: str) -> str:
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_wheel_holds_what_the_commands_read(site: Path) -> None:
    shipped = site / "codechat" / "shipped"
    assert {path.stem for path in (shipped / "nbs_py").iterdir()} == set(notebooks.names())
    assert {path.name for path in (shipped / "reports").iterdir()} >= {
        *build.templates(),
        "frozen",
        "published",
    }
    for folder in ("frozen", "published", "nano/data"):
        names = {path.name for path in (ROOT / "reports" / folder).glob("*.csv")}
        assert names
        assert names == {path.name for path in (shipped / "reports" / folder).glob("*.csv")}
    released = list((ROOT / "codechat_lab" / "released").rglob("*"))
    assert any(path.suffix == ".safetensors" for path in released)
    for model in released:
        assert model.is_dir() or (site / model.relative_to(ROOT)).read_bytes() == model.read_bytes()
    assert (shipped / "docs" / "first-hour.md").is_file()
    assert (site / "codechat" / "py.typed").is_file()


def test_a_report_is_drawn_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    listed = ran(site, tmp_path, "-m", "codechat", "report")
    assert [line.split()[0] for line in listed.splitlines()] == list(build.templates())
    ran(site, tmp_path, "-m", "codechat", "report", "staircase", "--frozen")
    drawn = {path.name for path in (tmp_path / "runs" / "drawn" / "report").iterdir()}
    assert drawn >= {"staircase.html", "staircase.ipynb"}
    assert not (site / "reports").exists()
    assert not (site / "runs").exists()


def test_recipe_nano_runs_to_its_report_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    printed = ran(site, tmp_path, "small.py", "run", "nano")
    assert "claims held" in printed
    assert (tmp_path / "runs" / "nano" / "report" / "nano.html").is_file()
    notes = {path.stem for path in (tmp_path / "runs" / "nano" / "notebooks").glob("*.ipynb")}
    assert notes >= {"05_sft", "07_reinforce"}
    assert (tmp_path / "data" / "nano" / "corpus" / "manifest.json").is_file()
