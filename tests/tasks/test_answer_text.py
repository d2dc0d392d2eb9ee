"""Extraction of the program from an answer in any wrapping; nothing where there is no program."""

import ast
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codechat.tasks.coding.answer_text import extract

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """Add two numbers."""\n'
PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())


def sum_of(code: str) -> object:
    scope: dict[str, object] = {}
    exec(code, scope)
    return scope["add"](2, 3)


def test_a_wrapped_function_or_a_bare_body_gives_the_same_program() -> None:
    for kind, stub in (("wrapped", ""), ("bodies", STUB)):
        for row in PROGRAMS[kind]:
            assert sum_of(extract(row["answer"], ["add"], stub)) == 5, row
    assert extract(ADD, ["add"], STUB) == ADD  # a whole function is preferred to the stub


def test_earlier_blocks_give_their_imports_helpers_and_constants_but_do_not_run() -> None:
    answer = "```python\nimport math\nK = 2\nprint(undefined)\n```\nthen\n```python\ndef add(a, b):\n    return K * a + math.floor(b) - 2\n```"
    code = extract(answer, ["add"])
    assert sum_of(code) == 5 and "undefined" not in code


def test_docstrings_with_sessions_and_fences_inside_code_stay() -> None:
    code = 'def add(a, b):\n    """Add.\n\n    >>> add(1, 2)\n    3\n    """\n    return a + b'
    assert extract(code, ["add"]) == extract(f"```python\n{code}\n```", ["add"]) == code


def test_answers_without_code_give_nothing_and_invalid_python_stays_as_it_is() -> None:
    for answer in ("", "   \n\n", "# only a comment", "I do not know.", "Sorry, I cannot help with that!", "Hello", "```python\n```",
                   "```python\n# to do\n```", '<functioncall> {"name": "add", "arguments": {}}'):  # fmt: skip
        assert extract(answer, ["add"]) == ""
    for answer in ("def add(a, b:\n    return a + b", "```python\ndef add(a, b)\n    return a + b\n```", "def add(a, b):\n    return (a +",
                   "Here:\ndef add(a, b):\nreturn a + b"):  # fmt: skip
        code = extract(answer, ["add"])
        assert "add" in code
        with pytest.raises(SyntaxError):
            ast.parse(code)


def test_hostile_texts_are_read_quickly(quick: Callable[..., Any]) -> None:
    for text in ("x = (\n" * 5000, "a = 1\nb = = 2\n" * 5000, "```" * 10000, "(" * 50000, "\0def f(): pass", "def f():\n" * 5000, ">>> " * 20000,
                 "`" * 50000, "```python\n" * 5000, "    " * 12000 + "x", "def f(a):\n    '''" + "x\n" * 20000):  # fmt: skip
        assert isinstance(quick(2, extract, text, ["f"], "def f(a):\n"), str)


def test_an_earlier_definition_is_kept_where_python_cannot_write_it() -> None:
    last = "def f(x):\n    return x"
    for value in ("1" + "+1" * 600, "-" * 600 + "1", "a" + ".b" * 600, "f" + "()" * 600, "0x" + "f" * 6000):
        assert (
            extract(f"```python\nK = {value}; print(K)\n```\n```python\n{last}\n```", ["f"]) == f"K = {value}\n{last}"
        )
        helper = f"def g():\n    return {value}"
        code = extract(f"```python\n@cache\n{helper}\n```\n```python\n{last}\n```", ["f"])
        assert code == f"@(cache)\n{helper}\n{last}" and ast.parse(code)
