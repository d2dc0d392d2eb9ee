"""The shape of the library: imports go one way, no exception is swallowed whole, files stay small."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from codechat.core.registry import COMMANDS

PACKAGE = Path(__file__).resolve().parents[1] / "codechat"

# A handler may take anything only here.
ANYTHING = {
    "inference/tools_command.py": "what a user's function raises is its answer in the conversation",
    "sandbox/child.py": "what an untrusted program raises is its answer to the judge",
    "sandbox/judge.py": "whatever a test raises is the reason why it failed",
    "tasks/own.py": "what a user's reward function raises is a tier of the score",
    "tasks/redteam.py": "what a user's reward raises is the finding",
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_rooms_import_downwards() -> None:
    """The contract is in pyproject.toml."""
    assert lint_imports(no_cache=True) == 0


def test_the_contract_sees_what_it_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "house").mkdir()
    for name, text in {"__init__": "", "above": "", "below": "def f():\n    from house import above\n"}.items():
        (tmp_path / "house" / f"{name}.py").write_text(text)
    contract = '[tool.importlinter]\nroot_package = "house"\n[[tool.importlinter.contracts]]\nname = "n"\ntype = "layers"\nlayers = ["house.above", "house.below"]\n'
    (tmp_path / "pyproject.toml").write_text(contract)
    done = subprocess.run([sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 1


def swallowed(text: str) -> list[int]:
    """Lines of handlers that take any exception and do not raise it again."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kinds = (
                {"BaseException"}
                if node.type is None
                else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            )
            if kinds & {"Exception", "BaseException"} and not isinstance(node.body[-1], ast.Raise):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sources(), ids=label)
def test_no_exception_is_swallowed_whole(path: Path) -> None:
    assert len(swallowed(path.read_text())) <= (label(path) in ANYTHING)


def test_the_exception_test_sees_what_it_forbids() -> None:
    assert swallowed("try:\n    f()\nexcept Exception:\n    pass") == [3]
    assert swallowed("try:\n    f()\nexcept:\n    pass") == [3]
    assert swallowed("try:\n    f()\nexcept (OSError, Exception) as e:\n    print(e)") == [3]
    assert not swallowed("try:\n    f()\nexcept BaseException:\n    clean()\n    raise")
    assert not swallowed("try:\n    f()\nexcept ValueError:\n    pass")


@pytest.mark.parametrize("path", sources(), ids=label)
def test_files_are_named_for_what_they_hold(path: Path) -> None:
    assert path.stem not in {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_no_torch(command: str) -> None:
    program = (
        "import sys; from codechat import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    argv = [sys.executable, "-c", program, *command.split(), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=900)
    assert done.returncode == 0 and "usage: codechat" in done.stdout, done.stderr


def test_reading_configurations_and_runs_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys, codechat.core.config, codechat.runs.run; print({'torch', 'pandas', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "set()"
