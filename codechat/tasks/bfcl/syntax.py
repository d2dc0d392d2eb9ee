"""Read the calls of a completion: `<functioncall> {json}`, or Python's `[f(a=1), g.h(b="x")]` as the whole text.

Arguments are literals given by name. A bare name is a variable's text; true, false and null are JSON's. Nothing is run.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from codechat.text import chat

LONGEST = 20_000  # characters; a limit against hostile input to Python's parser
FORMS_READ = (*chat.READABLE, "python")
UNREADABLE = chat.Call(None, None, "bad_python")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def calls_of(text: str) -> list[chat.Call]:
    """Every call of a completion, in order. The form of an unreadable call is not in FORMS_READ."""
    return chat.parse_calls(text) if chat.CALL_TAG in text else _python_calls(text.strip())


def _python_calls(text: str) -> list[chat.Call]:
    """Calls of a text that is a list of calls or one call with named arguments. Empty for anything else, such as "Sorry
    (no tool)"."""
    if not text.endswith((")", ")]")) or len(text) > LONGEST:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # an unknown escape in a string
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
        return []
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if not all(isinstance(node, ast.Call) for node in nodes):
        return []
    calls = [_call(node) for node in nodes]
    return [] if calls == [UNREADABLE] and not isinstance(tree, ast.List) else calls


def _call(node: ast.Call) -> chat.Call:
    name = _dotted(node.func)
    words = [word.arg for word in node.keywords]
    if name is None or node.args or None in words or len(set(words)) < len(words):
        return UNREADABLE
    try:
        return chat.Call(name, {word.arg: _value(word.value) for word in node.keywords}, "python")
    except (_NoLiteral, RecursionError):
        return UNREADABLE


def _dotted(node: ast.expr) -> str | None:
    """The name of a function such as math.gcd, or None for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


class _NoLiteral(Exception):
    """An argument that is more than a literal."""


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name):
        return _JSON_NAMES.get(node.id, node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        number, sign = node.operand.value, {ast.USub: -1, ast.UAdd: 1}.get(type(node.op))
        if type(number) in (int, float) and sign:
            return sign * number
    raise _NoLiteral
