"""Extraction of the program from an answer in any wrapping; nothing where there is no program."""

import ast
from collections.abc import Callable
from typing import Any

import pytest

from codechat.tasks.coding.answer_text import extract

ADD = "def add(a, b):\n    return a + b"
STUB = 'def add(a, b):\n    """Add two numbers."""\n'
WRAPPED = [
    ADD,
    ADD + "\n",
    f"```python\n{ADD}\n```",
    f"```\n{ADD}\n```",
    f'```Python title="add.py"\n{ADD}\n```',
    f"~~~python3\n{ADD}\n~~~",
    f"````markdown\n{ADD}\n````",
    f"Sure! Here it is:\n\n```python\n{ADD}\n```\n\nIt adds `a` and `b`.",
    f"```python\n{ADD}",  # cut off before the fence was closed
    f"Here is the function:\n\n{ADD}\n\nIt adds both numbers.",
    f"{ADD}\n\nThis function's result is the sum.",
    f"Explanation (short).\n{ADD}",
    "  " + ADD.replace("\n", "\n  "),
    "1. Write it:\n   ```python\n   " + ADD.replace("\n", "\n   ") + "\n   ```\n2. Done",
    "> ```python\n" + ADD + "\n> ```",
    ADD.replace("\n", "\r\n"),
    ">>> def add(a, b):\n...     return a + b\n...\n>>> add(1, 2)\n3",
    "```pycon\n>>> def add(a, b):\n...     return a + b\n>>> add(1, 2)\n3\n```",
    "Try this:\n>>> def add(a, b):\n...     return a + b\n>>> add(1, 2)\n3",
    f"Use it like this:\n```python\nprint(add(1, 2))\n```\nwith\n```python\n{ADD}\n```",
    f"```python\n{ADD}\n```\nExample:\n```python\nprint(add(1, 2))\n```",
    f"```bash\npip install add\n```\n```python\n{ADD}\n```",
    f"```python\ndef add(a, b):\n    return a - b\n```\nNo, that is wrong:\n```python\n{ADD}\n```",
]
BODIES = [
    "    return a + b\n",
    "return a + b",
    "```python\n    return a + b\n```",
    "    total = a\n    total += b\n    return total\n\n\ndef other():\n    return 1 +",
    "total = a\n    total += b\n    return total",
    ADD,
]


def sum_of(code: str) -> object:
    scope: dict[str, object] = {}
    exec(code, scope)
    return scope["add"](2, 3)


def test_a_wrapped_function_or_a_bare_body_gives_the_same_program() -> None:
    for answer in WRAPPED:
        assert sum_of(extract(answer, ["add"])) == 5, answer
    for answer in BODIES:
        assert sum_of(extract(answer, ["add"], STUB)) == 5, answer
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
