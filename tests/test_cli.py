"""The command line: every command is there, help is quick, what goes wrong is one line and an
exit code."""

import errno
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codechat import __version__
from codechat.cli import INTERRUPTED, guarded, main
from codechat.core import processes
from codechat.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingFile,
    RunError,
    UserError,
)
from codechat.core.registry import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = (
    "pretrain sft reinforce grpo ppo expert distill preference diagnose evaluate runs export import data completion "
    "new run recipes chars passk filter natural plan launch export-scripts xray chat tools serve sandbox report "
    "board pages scores download"
).split()


def fails(error: BaseException):
    def command(argv: list[str]) -> None:
        raise error

    return command


def test_the_commands_are_these_in_this_order() -> None:
    assert list(COMMANDS) == EXPECTED


def test_help_names_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"\n  {name} " in text
        assert entry.about in text


@pytest.mark.parametrize("name", EXPECTED)
def test_the_module_of_a_command_has_its_function_and_an_example(name: str) -> None:
    entry = COMMANDS[name]
    source = Path(importlib.util.find_spec(entry.module).origin).read_text(encoding="utf-8")
    assert f"def {entry.main or entry.function}(" in source
    assert f"codechat {name}" in source, f"the help of {name} shows no example"


def test_without_a_command_it_ends_with_2() -> None:
    assert main([]) == 2


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"codechat {__version__}\n")


ROOT_OF = """
import sys
from codechat import cli
cli.main(sys.argv[1:])
from codechat.runs import paths
print(paths.ROOT)
"""


def root_of(where: Path, *words: str) -> Path:
    """The root of `codechat runs` in a folder."""
    argv = [sys.executable, "-c", ROOT_OF, *words, "runs"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=where, env=env, capture_output=True, text=True, check=True)
    return Path(done.stdout.split()[-1])


def test_runs_lie_below_the_folder_of_the_command(tmp_path: Path) -> None:
    assert root_of(ROOT).samefile(ROOT)
    assert root_of(tmp_path).samefile(tmp_path)


def test_runs_lie_below_the_folder_of_root(tmp_path: Path) -> None:
    assert root_of(ROOT, "--root", str(tmp_path)).samefile(tmp_path)


@pytest.mark.parametrize("folder", [["absent"], []], ids=["absent", "none"])
def test_a_root_that_is_no_folder_is_refused_and_nothing_moves(
    folder: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path.cwd()
    words = [*(str(tmp_path / name) for name in folder), "runs"] if folder else []
    assert main(["--root", *words]) == 2
    assert "--root" in capsys.readouterr().err
    assert Path.cwd() == before


HELP_OF_ALL = """
import sys
from codechat.cli import main
from codechat.core.registry import COMMANDS
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert end.code == 0, name
    loaded = {"torch", "pandas", "nbformat", "rich", "numpy", "tiktoken"} & set(sys.modules)
    assert not loaded, f"{name} --help loads {loaded}"
"""


def test_no_help_loads_what_is_slow_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("cores", "polls"), [(os.cpu_count(), "100"), (100_000, "10000")])
def test_openmp_polls_seldom_where_other_processes_compute(
    cores: int, polls: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = "import time\nwhile time.process_time() < 9: pass"
    busy = [subprocess.Popen([sys.executable, "-c", wait]) for _ in range(os.cpu_count() or 1)]
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    # after the processes, of which there would be 100,000
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    try:
        main(["runs"])
    finally:
        for process in busy:
            process.kill()
    assert os.environ["GOMP_SPINCOUNT"] == polls


def test_polls_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    processes.set_polls(shared=True)
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_another_system_than_linux_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["runs"]) == 2
    assert capsys.readouterr().err == (
        "error: codechat runs on Linux, this is darwin; on Windows use WSL2, on a Mac a Linux "
        "virtual machine\n"
    )


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for word, near in (("cht", "chat"), ("eval", "evaluate"), ("renforce", "reinforce")):
        assert main([word]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert repr(word) in err
        assert repr(near) in err
        assert err.count("\n") == 1


def test_what_goes_wrong_is_one_line_and_a_code_a_defect_keeps_its_traceback(capsys: Any) -> None:
    for kind in (UserError, ConfigError, DataError, MissingFile, RunError, CheckpointError):
        assert guarded(fails(kind("got 1; 2 is required; set --x 2")), []) == 2
        assert capsys.readouterr() == ("", "error: got 1; 2 is required; set --x 2\n")
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
        assert guarded(fails(OSError(number, os.strerror(number), "runs/x")), []) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: runs/x: ")
        assert err.count("\n") == 1
    for reason, line in (
        ((), "interrupted\n"),
        (("step 12 is saved",), "interrupted: step 12 is saved\n"),
    ):
        assert guarded(fails(KeyboardInterrupt(*reason)), []) == INTERRUPTED == 130
        assert capsys.readouterr().err == line
    for error in (ZeroDivisionError("x"), FileNotFoundError(errno.ENOENT, "x"), AssertionError()):
        with pytest.raises(type(error)):
            guarded(fails(error), [])
    assert [guarded(lambda argv, code=code: code, []) for code in (3, None, object())] == [3, 0, 0]


def test_ctrl_c_ends_a_process_cleanly() -> None:
    code = (
        "import sys, time; from codechat.cli import guarded\n"
        "sys.exit(guarded(lambda argv: (print('half a li', end='', flush=True), time.sleep(300)), []))"
    )
    # a job that a shell started in the background ignores Ctrl-C, and so would its children
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(9) == "half a li"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "codechat", "--help"]
    done = subprocess.run(words, cwd=ROOT, text=True, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_text_that_the_terminal_cannot_spell_is_no_crash() -> None:
    code = (
        "from codechat.cli import guarded; guarded(lambda a: print('caf\\xe9 \\u65e5 \\ud800'), [])"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=env)
    assert done.returncode == 0
    assert done.stdout.strip() == rb"caf\xe9 \u65e5 \ud800"
