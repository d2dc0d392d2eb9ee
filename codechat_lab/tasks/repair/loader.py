"""Runs at the head of each program, in the sandbox: the modules of a repository come from
memory, and a name that cannot be imported is absent. This file is sent as text, so it imports
the standard library only."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType


class Loader:
    """files: path -> text."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        place = name.replace(".", "/")
        package = any(file.startswith(place + "/") for file in self.files)
        if not package and place + ".py" not in self.files:
            return None
        # Its two methods make it a loader; the base class in importlib.abc would be another
        # import in each program.
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own way."""

    def exec_module(self, module: ModuleType) -> None:
        place = module.__name__.replace(".", "/")
        path = next((p for p in (place + "/__init__.py", place + ".py") if p in self.files), "")
        exec(
            compile(self.files.get(path, ""), path or "<package>", "exec", dont_inherit=True),
            module.__dict__,
        )


def load(files: dict[str, str], imports: dict[str, str]) -> None:
    """Define each name of `imports` (name -> module) here."""
    sys.meta_path.insert(0, Loader(files))
    for name, module in imports.items():
        try:
            globals()[name] = getattr(import_module(module), name)
        # A broken module may raise anything, SystemExit too: only the tests that use its names
        # fail.
        except BaseException:
            pass
