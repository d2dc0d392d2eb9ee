"""Lazy imports: a package imports its modules when they are first used (PEP 562), so that `--help` loads no torch.

The package `lazy_loader` does the same, but the processes of the sandbox import `codechat` without any installed package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, modules: Iterable[str], names: Mapping[str, Iterable[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """(__getattr__, __dir__, __all__) of `package`: its modules, and names defined in them, {module: names}."""
    home = {name: module for module, some in (names or {}).items() for name in some}
    known = sorted({*modules, *home})

    def get(name: str) -> Any:
        if name in home:
            found = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        elif name in known:
            found = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    return get, lambda: known, known
