"""Values of an isolated program: texts in, texts out, nothing left behind."""

import pytest
from raising import raising

from codechat_lab.sandbox.values import ProgramFailed, value_of

PROGRAM = """
SEEN = []

def echo(text):
    SEEN.append(text)
    return f"{text} {len(SEEN)}"

def number(text):
    return 5

def fail(text):
    raise ValueError(text)

def wait(text):
    while True:
        pass

def read(text):
    return open(text).read()
"""


def test_each_call_has_a_process_of_its_own() -> None:
    assert value_of(PROGRAM, "echo", "a") == "a 1"
    assert value_of(PROGRAM, "echo", "b") == "b 1"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fail", "ValueError: x"),
        ("number", "expected a text"),
        ("absent", "KeyError"),
        ("read", "FileNotFoundError"),
    ],
)
def test_a_program_that_gives_no_text_is_one_line(function: str, said: str) -> None:
    with raising(ProgramFailed, said):
        value_of(PROGRAM, function, "x")


def test_files_of_the_host_are_out_of_reach() -> None:
    with raising(ProgramFailed, "PermissionError"):
        value_of(PROGRAM, "read", "/etc/passwd")


def test_a_program_that_hangs_is_ended_and_the_next_one_runs() -> None:
    with raising(ProgramFailed, "lost"):
        value_of(PROGRAM, "wait", "x", timeout_s=0.3)
    assert value_of(PROGRAM, "echo", "a") == "a 1"
