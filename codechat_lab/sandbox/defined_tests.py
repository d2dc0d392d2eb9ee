"""Run the tests that a source defines, as pytest and unittest do: functions `test*`, classes
`Test*`, TestCases.

Only the standard library is at hand: a test that needs a fixture of pytest fails with its name.
Async tests run in a loop of their own. Skipped tests do not count."""

import asyncio
import inspect
import unittest
from collections.abc import Callable, Collection, Mapping
from typing import Any

from codechat_lab.sandbox.handles import Handle

BEFORE_ALL = ("setUpModule", "setup_module")
AFTER_ALL = ("tearDownModule", "teardown_module")


class NeedsArguments(Exception):
    """A test function has parameters that nothing here gives."""


def stop_unittest_main() -> None:
    """A script that ends in `unittest.main()` would look for its tests in this process's own
    main module, and exit."""
    setattr(unittest, "main", lambda *args, **kwargs: None)  # noqa: B010 (a class for the type checker)


def run_defined(space: Mapping[str, Any], defined: Collection[str], used: Collection[str]) -> None:
    """Run the tests among the names `defined` of a namespace, in its order. Raises the first
    failure.

    used: names that the sources use. A function with required parameters that is one of them is
    a helper, no test."""
    mine = {name: value for name, value in space.items() if name in defined}
    _call_hook(mine, BEFORE_ALL)
    try:
        for name, value in mine.items():
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                _run_test_case(value)
            elif isinstance(value, type) and name.startswith("Test"):
                _run_class(value)
            elif (
                callable(value) and name.startswith("test") and not isinstance(value, type | Handle)
            ):
                if name in used and _required(value):
                    continue
                _run_function(name, value, mine)
    finally:
        _call_hook(mine, AFTER_ALL)


def run_check(check: Callable[..., Any], candidate: Any) -> None:
    """HumanEval's `check(candidate)`; also without a parameter."""
    given = [candidate] if inspect.signature(check).parameters else []
    run(check, *given)


def run(function: Callable[..., Any], *args: Any) -> None:
    """Call a test, and await it where it is async. A skipped test has no effect. TypeError for
    one that yields, of which nothing runs."""
    try:
        result = function(*args)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(f"{function.__name__} yields; a test must return")
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except unittest.SkipTest:
        return


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that a caller must give; none where they cannot be known."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def _call_hook(space: Mapping[str, Any], names: Collection[str], subject: Any = None) -> None:
    """Call the first of the hooks that is there. Those of pytest may take what they are called
    for, or nothing."""
    hook = next((space[name] for name in names if name in space), None)
    if callable(hook):
        run(hook, *[subject] * len(_required(hook)))


def _run_function(name: str, function: Callable[..., Any], space: Mapping[str, Any]) -> None:
    missing = _required(function)
    if missing:
        raise NeedsArguments(f"{name} needs {', '.join(missing)}; fixtures of pytest are not there")
    _call_hook(space, ("setup_function",), function)
    try:
        run(function)
    finally:
        _call_hook(space, ("teardown_function",), function)


def _run_class(cls: type) -> None:
    """Each method in a new object, and the classes within, as pytest does. A class with a
    constructor is none of pytest's."""
    for name in dir(cls):
        inner = getattr(cls, name) if name.startswith("Test") else None
        if isinstance(inner, type):
            _run_class(inner)
    tests = [name for name in dir(cls) if name.startswith("test") and callable(getattr(cls, name))]
    if not tests or any(
        "__init__" in vars(base) or "__new__" in vars(base) for base in cls.__mro__[:-1]
    ):
        return
    _call_hook(_hooks_of(cls), ("setup_class",), cls)
    try:
        for name in tests:
            _run_method(cls(), name)
    finally:
        _call_hook(_hooks_of(cls), ("teardown_class",), cls)


def _run_method(one: Any, name: str) -> None:
    method = getattr(one, name)
    missing = _required(method)
    if missing:
        raise NeedsArguments(
            f"{type(one).__name__}.{name} needs {', '.join(missing)}; fixtures are not there"
        )
    _call_hook(_hooks_of(one), ("setup_method", "setup", "setUp"), method)
    try:
        run(method)
    finally:
        _call_hook(_hooks_of(one), ("teardown_method", "teardown", "tearDown"), method)


def _hooks_of(owner: Any) -> dict[str, Any]:
    return {
        name: getattr(owner, name)
        for name in dir(owner)
        if name.startswith(("setup", "setUp", "tear"))
    }


class _FirstFailure(unittest.TestResult):
    """Keeps the first exception itself, and no text of it: its arguments may be objects of the
    program."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def _keep(self, error: BaseException | None) -> None:
        if self.error is None:
            self.error = error
        self.stop()

    def addError(self, test: Any, err: Any) -> None:
        self._keep(err[1])

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._keep(err[1])

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._keep(AssertionError("unexpected success"))


def _run_test_case(cls: type[unittest.TestCase]) -> None:
    result = _FirstFailure()
    unittest.defaultTestLoader.loadTestsFromTestCase(cls).run(result)
    if result.error is not None:
        raise result.error
