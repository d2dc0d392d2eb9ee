"""Runs in the sandbox: the leaderboard's simulated systems, with the calls of an episode and
those of the reference solution. This file is sent compiled, so it imports the standard library
only, beside the systems' own modules, which come with it.

A job holds the classes, their initial configuration, turns of calls [name, positional, named],
and the reference calls of each turn. Everything runs from the start each time, so an episode
leaves nothing behind for another one."""

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

STATELESS = ("MathAPI",)
REFUSED = ("kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run")
Call = Sequence[Any]  # name, positional, named


class Loader:
    """Modules from their code, by name; packages above them are empty."""

    def __init__(self, modules: dict[str, CodeType]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package = any(module.startswith(name + ".") for module in self.modules)
        if not package and name not in self.modules:
            return None
        return ModuleSpec(name, self, is_package=package)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own way."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self.modules:
            exec(self.modules[module.__name__], module.__dict__)


def install(modules: dict[str, CodeType]) -> None:
    sys.meta_path.insert(0, Loader(modules))


class Systems:
    """Instances of the classes, and their public methods by name."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.instances: dict[str, Any] = {}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name, module in job["classes"].items():
            system = getattr(importlib.import_module(module), name)()
            if name not in STATELESS:
                config = copy.deepcopy(job["config"].get(name, {}))
                system._load_scenario(config, long_context=job["long_context"])
            self.instances[name] = system
            for method_name, method in inspect.getmembers(system, inspect.ismethod):
                if not method_name.startswith("_"):
                    self.methods[method_name] = method

    def result(self, call: Call) -> str:
        """The text of a call's result, as the leaderboard's runner writes it."""
        name, positional, named = call
        try:
            if name in REFUSED:
                raise PermissionError(f"Function call {name} is not allowed.")
            if name not in self.methods:
                raise NameError(f"name '{name.partition('.')[0]}' is not defined")
            value = self.methods[name](*positional, **named)
        except Exception as error:  # a fault of a call is its result, whatever a system raises
            return f"Error during execution: {error}"
        if type(value) is dict:
            try:
                return json.dumps(value)
            except (TypeError, ValueError):  # a number of another library
                return str(value)
        return value if type(value) is str else str(value)


def play(text: str) -> str:
    """JSON: the results of each turn's calls; for each turn of `expected` whether it is right;
    the first fault."""
    job = json.loads(text)
    systems = Systems(job)
    reference = Systems(job)
    results: list[list[str]] = []
    right: list[bool] = []
    fault = ""
    seen: list[str] = []  # results so far
    for number, calls in enumerate(job["turns"]):
        turn = [systems.result(call) for call in calls]
        results.append(turn)
        seen += turn
        if number >= len(job["expected"]):
            continue
        expected = job["expected"][number]
        needed = [reference.result(call) for call in expected]
        # where no call is right, the next turn's state tells whether one did harm
        if expected and not fault:
            fault = _fault(systems, reference, calls, seen, needed)
        right.append(not fault)
    return json.dumps({"results": results, "right": right, "fault": fault})


def _fault(
    systems: Systems,
    reference: Systems,
    calls: Sequence[Call],
    seen: Sequence[str],
    needed: Sequence[str],
) -> str:
    """Why the state or the results after a turn are not those of the reference."""
    if not calls:
        return "no_call"
    for name, system in reference.instances.items():
        for key, value in vars(system).items():
            if key[:1] != "_" and getattr(systems.instances[name], key) != value:
                return "wrong_state"
    left = list(seen)
    for result in needed:
        if result not in left:
            return "missing_result"
        left.remove(result)
    return ""
