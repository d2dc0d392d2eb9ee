"""What a test sees of a program: handles for objects that are not plain data, and the session that asks for them.

A handle forwards attributes, calls, iteration, length, indexing, `with`, `await` and text, but never `==`, arithmetic,
ordering or `in`: the other operand may be the value that the test expects, and the program would only have to agree.
"""

import asyncio
import builtins
import dis
import functools
import inspect
import itertools
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from types import TracebackType
from typing import Any

from codechat_lab.sandbox import codec

TEST = "<test>"  # file name of a test's code
REFERENCES = 100_000  # most objects of one program that are kept


class Lost(BaseException):
    """The program's process ended or broke the protocol. No test can catch it as an Exception."""


class ProgramError(Exception):
    """An exception of a program whose own type would mean something to the test's code."""


# A StopIteration would end the test's own loop, an AssertionError would look like the test's.
AS_ITSELF = frozenset(
    """ArithmeticError AttributeError BufferError EOFError Exception FileExistsError FileNotFoundError FloatingPointError
    ImportError IndexError IsADirectoryError KeyError LookupError MemoryError ModuleNotFoundError NameError
    NotADirectoryError NotImplementedError OSError OverflowError PermissionError RecursionError ReferenceError
    RuntimeError SyntaxError TimeoutError TypeError UnboundLocalError ValueError ZeroDivisionError""".split()
)
# A test that calls one of these expects a string, number or set; a program's object could answer as it likes.
PREDICATES = frozenset(
    name
    for kind in (str, float, set)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)


class Session:
    """One program's process. Any request raises Lost once it has ended or broken the protocol."""

    def __init__(self, channel: socket.socket, longest: int) -> None:
        self.channel, self.longest = channel, longest  # bytes of a message that are taken
        self.number, self.lost = 0, ""
        self.objects: dict[int, Any] = {}  # the program's, by its numbers
        self.numbers: dict[int, int] = {}  # id -> number, of these and of their handles
        self.handles: list[Handle] = []  # kept, so that no id is used again
        self.failed: AssertionError | None = None  # in a function of the test that the program called
        self.lent: list[Any] = []  # functions and iterators of the test that the program has got
        self.places: dict[int, int] = {}  # id -> place, of these
        self.entered: dict[int, int] = {}  # id of a handle in a `with` -> number of the request behind its entry

    def request(self, op: str, *args: Any) -> Any:
        """The program's answer. An exception of the program is raised here, as the type that `raised` gives.

        Before it answers, the program may call functions of the test that it has got."""
        self.number += 1
        number = self.number
        try:
            self._send([number, op, *args])
            while True:
                answer = codec.decode(codec.receive(self.channel, self.longest), self._from_ref)
                match answer:
                    case ["use", int(place), tuple(given), dict(named)] if 0 <= place < len(self.lent):
                        self._send(self._use(place, given, named))
                    case [int(other), "ok", value] if other == number:
                        return self._passed_on(value)
                    case [int(other), "raise", str(name), str(text)] if other == number:
                        break
                    case _:
                        self.lose("an answer of the wrong shape")
        except (OSError, codec.CodecError, RecursionError) as error:
            self.lose(str(error))
        self._passed_on(None)
        raise raised(name, text)

    def _passed_on(self, value: Any) -> Any:
        """The value, unless an assertion of the test has failed meanwhile: the program may have swallowed it."""
        if self.failed is not None:
            raise self.failed
        return value

    def _send(self, message: Any) -> None:
        codec.send(self.channel, codec.encode(message, self._to_ref))

    def _use(self, place: int, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The reply to a program that calls a function of the test, or takes the next item of its iterator."""
        function = self.lent[place]
        try:
            if inspect.iscoroutine(function):
                value = run_apart(function)
            else:
                value = function(*given, **named) if callable(function) else list(itertools.islice(function, 1))
            codec.encode(value, self._to_ref)
        except AssertionError as error:
            self.failed = error
            return ["use", "raise", "AssertionError", ""]
        except Exception as error:  # a test's function may raise anything; it goes through the program, as it would
            return ["use", "raise", type(error).__name__, text_of(error)]
        return ["use", "ok", value]

    def lose(self, why: str) -> Any:
        self.lost = self.lost or why
        raise Lost(self.lost)

    def _to_ref(self, value: Any) -> dict[str, Any]:
        if id(value) in self.numbers:
            return {"h": self.numbers[id(value)]}
        if isinstance(value, Handle):
            raise codec.CodecError("an object of a process that has ended")
        path = importable(value)
        if path:
            return {"p": path}
        if is_lent(value):
            place = self.places.setdefault(id(value), len(self.lent))
            if place == len(self.lent):
                self.lent.append(value)
            if callable(value):
                name = getattr(value, "__name__", "")
                return {"j": [place, name if type(name) is str else ""]}
            return {"w" if inspect.iscoroutine(value) else "g": place}
        raise codec.CodecError(f"a {type(value).__name__} of the test cannot be sent to a program")

    def _from_ref(self, tag: str, body: Any) -> Any:
        match tag, body:
            case "j", int(place) if 0 <= place < len(self.lent):
                return self.lent[place]
            case "h" | "g" | "w" | "G", [int(number), str(abilities)]:
                if number not in self.objects:
                    self._keep(tag, number, abilities)
                return self.objects[number]
        raise codec.CodecError("no such object")

    def _keep(self, tag: str, number: int, abilities: str) -> None:
        if len(self.objects) >= REFERENCES:
            raise codec.CodecError("too many objects")
        handle = handle_class("".join(sorted(set(abilities) & set(ABILITIES))))(self, number)
        # What Python itself makes of a generator function or an async one is that here too.
        made = {"h": lambda it: it, "g": generated, "w": awaited, "G": generated_async}[tag](handle)
        self.objects[number] = made
        self.numbers[id(made)] = self.numbers[id(handle)] = number
        self.handles.append(handle)


# Functions and classes of the library go by their name: the program's process has them. Of the test's process a
# program gets only what the test hands over, to call it or to take the next item: functions, methods, such as
# `seen.append`, and other objects that can be called, but no class, whose objects would be the test's.


def is_lent(value: Any) -> bool:
    return (
        (callable(value) and not isinstance(value, type))
        or hasattr(type(value), "__next__")
        or inspect.iscoroutine(value)
    )


def importable(value: Any) -> list[str] | None:
    """[module, name] of a function or class of the standard library, or None."""
    bound = getattr(value, "__self__", None)
    # The class of a method such as str.upper or date.fromisoformat.
    owner = bound if isinstance(bound, type) else getattr(value, "__objclass__", None)
    module = getattr(owner, "__module__", None) or getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    same = found is value or (isinstance(bound, type) and found == value)
    return [module, name] if same and module != "__main__" else None


def run_apart(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a test's coroutine that a program awaits, also while the test's own loop runs."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
        asyncio._set_running_loop(outer)


def raised(name: str, text: str) -> Exception:
    """The exception to raise in the judge for an exception of a program."""
    if name in AS_ITSELF:
        return getattr(builtins, name)(text[:1000])
    return ProgramError(f"{name[:100]}: {text[:1000]}")


class Handle:
    # Stands for an object of a program. Class, `==`, hashing and arithmetic are the handle's own. No docstring: that of
    # the program's object is asked for.

    __slots__ = ("__session", "__number")

    def __init__(self, session: Session, number: int) -> None:
        object.__setattr__(self, "_Handle__session", session)
        object.__setattr__(self, "_Handle__number", number)

    def _ask(self, op: str, *args: Any, kind: type = object) -> Any:
        """The answer about the object; Lost where it is of another kind than required."""
        session = self.__session
        answer = session.request(op, self, *args)
        return answer if kind in (object, type(answer)) else session.lose(f"no {kind.__name__} for {op}")

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name not in ABOUT) or name in PREDICATES:
            raise AttributeError(f"{name} of a program's object is not looked up")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            raise AttributeError(f"{name} of a program's object is not set")
        self._ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(f"{name} of a program's object is not deleted")
        self._ask("delete", name)

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __str__(self) -> str:
        return self._ask("str", kind=str)

    def __repr__(self) -> str:
        return self._ask("repr", kind=str)

    def __format__(self, spec: str) -> str:
        return self._ask("format", spec, kind=str)

    def __instancecheck__(self, other: Any) -> bool:
        """By the classes from which the program's object descends; what its metaclass says is not asked. A namedtuple
        is data here: by its name and its fields."""
        if isinstance(other, tuple) and hasattr(other, "_fields"):
            return (type(other).__name__, other._fields) == (self.__name__, getattr(self, "_fields", None))
        return isinstance(other, Handle) and self._ask("instance", other) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Handle) and self._ask("subclass", other) is True


ABOUT = frozenset({"__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__wrapped__"})


def _call(self: Handle, *args: Any, **kwargs: Any) -> Any:
    match self._ask("call", args, kwargs):
        case [result, after]:
            write_back([*args, *kwargs.values()], after)
            return result
    self._Handle__session.lose("an answer of the wrong shape")


def _iterate(self: Handle) -> Iterator[Any]:
    steps = self._ask("iter")
    return _each(steps) if isinstance(steps, Handle) else self._Handle__session.lose("no iterator for iter")


def _each(iterator: Handle) -> Iterator[Any]:
    while item := iterator._ask("next", kind=list):
        yield item[0]


def _next(self: Handle) -> Any:
    """StopIteration is ours: the program only says that there is no more."""
    item = self._ask("next", kind=list)
    if item:
        return item[0]
    raise StopIteration


def _enter(self: Handle) -> Any:
    value = self._ask("enter")
    self._Handle__session.entered[id(self)] = self._Handle__session.number
    return value


def _leave(self: Handle, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether an exception in the body of a `with` is swallowed: only one that the test raises by `raise`, or in a
    body that did not use the program, and which is no assertion. Otherwise a program could swallow the assertion or
    the error that tells its fault."""
    session = self._Handle__session
    alone = session.entered.pop(id(self), None) == session.number
    swallowed = self._ask("exit", *_told(error)) is True
    return swallowed and (_is_raised_by_test(error, trace) or (alone and _may_be_swallowed(error)))


def _may_be_swallowed(error: BaseException | None) -> bool:
    return isinstance(error, Exception) and not isinstance(error, AssertionError)


def _told(error: BaseException | None) -> tuple[str, ...]:
    """What a program may know of an exception: of an assertion not the text, which may hold the expected value."""
    if error is None:
        return ()
    return type(error).__name__, "" if isinstance(error, AssertionError) else text_of(error)


async def _enter_async(self: Handle) -> Any:
    return await _finished(self._ask("async enter"))


async def _leave_async(
    self: Handle,
    kind: Any,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool:
    return await _finished(self._ask("async exit", *_told(error))) is True and _is_raised_by_test(error, trace)


def _is_raised_by_test(error: BaseException | None, trace: TracebackType | None) -> bool:
    if trace is None or not _may_be_swallowed(error):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_filename == TEST and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def generated(handle: Handle) -> Generator[Any, Any, None]:
    """A generator for one of the program's."""
    step = handle._ask("send", None)
    while True:
        match step:
            case ["yield", value]:
                pass
            case ["return", value]:
                return value
            case _:
                handle._Handle__session.lose("no step of a generator")
        sent = None
        with _Thrown(handle) as thrown:
            sent = yield value
        step = thrown.step or handle._ask("send", sent)


class _Thrown:
    """Around a yield: an exception that is thrown into a generator goes to the program's.

    As in a `with`, which contextlib.contextmanager makes of a generator: a program may swallow what the test raises or
    throws here, no more."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.step: Any = None  # behind the exception

    def __enter__(self) -> "_Thrown":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            return False
        thrown_here = trace is not None and trace.tb_next is None and _may_be_swallowed(error)
        if thrown_here or _is_raised_by_test(error, trace):
            self.step = self.handle._ask("throw", *_told(error))
            return True
        self.handle._ask("close")
        return False


async def awaited(handle: Handle) -> Any:
    """A coroutine for one of the program's."""
    return await _finished(handle._ask("await"))


async def _finished(task: Handle) -> Any:
    """The result of a task of the program's loop. Meanwhile other coroutines of the test's loop run."""
    try:
        while not (result := task._ask("poll", kind=list)):
            await asyncio.sleep(0)
    except (GeneratorExit, asyncio.CancelledError):
        task._ask("cancel")
        raise
    return result[0]


async def generated_async(handle: Handle) -> AsyncGenerator[Any, Any]:
    sent = None
    while item := await _finished(handle._ask("async send", sent)):
        sent = yield item[0]


async def _each_async(handle: Handle) -> AsyncGenerator[Any, None]:
    while item := await _finished(handle._ask("async next")):
        yield item[0]


def _asks(op: str, kind: type = object) -> Callable[..., Any]:
    return lambda self, *args: self._ask(op, *args, kind=kind)


# Letter -> methods of a handle whose object can do that: a handle of another object lacks them, so `callable` and
# `isinstance(x, Iterator)` answer as they would for the object.
ABILITIES: dict[str, dict[str, Any]] = {
    "a": {"__await__": lambda self: awaited(self).__await__()},
    "c": {"__call__": _call},
    "e": {"__aenter__": _enter_async, "__aexit__": _leave_async},
    "g": {"__aiter__": lambda self: _each_async(self._ask("async iter"))},
    "i": {"__iter__": _iterate},
    "l": {"__len__": _asks("len", int)},
    "n": {"__next__": _next},
    "t": {"__getitem__": _asks("item")},
    "u": {"__setitem__": _asks("set item")},
    "d": {"__delitem__": _asks("delete item")},
    "w": {"__enter__": _enter, "__exit__": _leave},
}


@functools.lru_cache(maxsize=256)
def handle_class(abilities: str) -> type[Handle]:
    documentation = property(lambda self: self._ask("get", "__doc__"))
    methods: dict[str, Any] = {"__slots__": (), "__doc__": documentation}
    for letter in abilities:
        methods |= ABILITIES[letter]
    return type("Handle", (Handle,), methods)


def write_back(given: list[Any], after: Any) -> None:
    """Arguments pass by value: copy a program's changes of a list, dict or set back to the test's argument."""
    if type(after) is not list or len(after) != len(given):
        return
    for mine, new in zip(given, after):
        if type(new) is not list or [type(x) for x in new] != [type(mine)]:
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = new[0]
        elif isinstance(mine, (dict, set, deque)):
            mine.clear()
            (mine.extend if isinstance(mine, deque) else mine.update)(new[0])


def text_of(error: BaseException) -> str:
    return ", ".join(str(a) if type(a) in (str, int, float, bool) else type(a).__name__ for a in error.args)
