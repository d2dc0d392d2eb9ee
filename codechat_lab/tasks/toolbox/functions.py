"""What the functions of the tools share: the error that a caller reads, rounding, tables.

A function of `seen_functions` or `held_out_functions` has its tool's name and takes its
arguments by name. An ArithmeticError, LookupError or ValueError means that the arguments are
impossible (`catalogue.Tool.call`)."""

import json
import math
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = json.loads(
    Path(__file__).with_name("tables.json").read_text(encoding="utf-8")
)


class ToolError(ValueError):
    """Invalid arguments of a tool. The caller reads the message."""


def neat(value: float, digits: int = 4) -> int | float:
    """The number rounded, as an int if it is whole. ToolError where it is not finite."""
    if isinstance(value, complex) or not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded
