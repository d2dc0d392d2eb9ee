"""Python source text read as a syntax tree."""

import ast
import warnings


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source text without its warnings; None where it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        # the last two: nested too deep
        except (
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ):
            return None


def same_name(name: str) -> str:
    """quick_sort and quickSort are the same function."""
    return name.lower().replace("_", "")
