"""What a test sees of a program: handles for objects that are not plain data, and the session
that asks for them.

A handle forwards attributes, calls, iteration, length, indexing, `with`, `await` and text, but
never `==`, arithmetic, ordering or `in`: the other operand may be the value that the test
expects, and the program would only have to agree. Where the object descends from a list, dict,
set or tuple, the data that it holds decide these, in the judge."""

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
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

from codechat_lab.sandbox import codec
from codechat_lab.sandbox.codec import Ability, Reference

TEST = "<test>"  # file name of a test's code
REFERENCES = 100_000  # most objects of one program that are kept


class Lost(BaseException):
    """The program's process ended or broke the protocol. No test can catch it as an Exception."""


class ProgramError(Exception):
    """An exception of a program whose own type would mean something to the test's code."""


# A StopIteration would end the test's own loop, an AssertionError would look like the test's.
AS_ITSELF = frozenset(
    """ArithmeticError AttributeError BufferError EOFError Exception FileExistsError FileNotFoundError
    FloatingPointError ImportError IndexError IsADirectoryError KeyError LookupError MemoryError
    ModuleNotFoundError NameError NotADirectoryError NotImplementedError OSError OverflowError
    PermissionError RecursionError ReferenceError RuntimeError SyntaxError TimeoutError TypeError
    UnboundLocalError ValueError ZeroDivisionError""".split()
)
# A test that calls one of these expects a string, number or set; a program's object could
# answer as it likes.
PREDICATES = frozenset(
    name
    for kind in (str, float, set)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)


class Session:
    """One program's process. Any request raises Lost once it has ended or broken the protocol."""

    def __init__(self, channel: socket.socket, longest: int) -> None:
        self.channel = channel
        self.longest = longest  # bytes of a message; a longer one is not read
        self.number = 0  # of the last request
        self.changes = 0  # how often the program had a chance to change its objects
        self.lost = ""  # why no request is possible any more
        self.objects: dict[int, Any] = {}  # the program's, by its numbers
        self.numbers: dict[int, int] = {}  # id -> number, of these and of their handles
        self.handles: list[Handle] = []  # kept, so that no id is used again
        self.failed: AssertionError | None = (
            None  # in a function of the test that the program called
        )
        # functions and iterators of the test that the program has got, and no others
        self.lent = codec.Register()
        # id of a handle in a `with` -> number of the request behind its entry
        self.entered: dict[int, int] = {}

    def request(self, op: str, *args: Any) -> Any:
        """The program's answer. An exception of the program is raised here, as the type that
        `raised` gives.

        Before it answers, the program may call functions of the test that it has got."""
        self.number += 1
        number = self.number
        if (
            op != "data"
            # which only reads: else two objects that are compared would each make the other's data old
        ):
            self.changes += 1
        try:
            self._send([number, op, *args])
            while True:
                answer = codec.decode(codec.receive(self.channel, self.longest), self._from_ref)
                match answer:
                    case ["use", int(place), tuple(given), dict(named)] if (
                        0 <= place < len(self.lent.objects)
                    ):
                        self.changes += 1
                        self._send(self._use(place, given, named))
                    # The number: a reply that a thread of the program sent ahead answers no
                    # later request.
                    case [int(other), "ok", value] if other == number:
                        self._raise_failed()
                        return value
                    case [int(other), "raise", str(name), str(text)] if other == number:
                        break
                    case _:
                        self.lose("an answer of the wrong shape")
        except (OSError, codec.CodecError, RecursionError) as error:
            self.lose(str(error))
        self._raise_failed()
        raise raised(name, text)

    def _raise_failed(self) -> None:
        """An assertion of the test that failed in a function which the program called: it may
        have swallowed it."""
        if self.failed is not None:
            raise self.failed

    def _send(self, message: Any) -> None:
        codec.send(self.channel, codec.encode(message, self._to_ref, self._kept))

    def _use(self, place: int, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """The reply to a program that calls a function of the test, or takes the next item of
        its iterator."""
        lent = self.lent.objects[place]
        try:
            if inspect.iscoroutine(lent):
                value = run_apart(lent)
            elif callable(lent):
                value = lent(*given, **named)
            else:
                value = list(itertools.islice(lent, 1))
            codec.encode(value, self._to_ref, self._kept)
        except AssertionError as error:
            self.failed = error
            return ["use", "raise", "AssertionError", ""]
        # a test's function may raise anything; it goes through the program, as it would
        except Exception as error:
            return ["use", "raise", type(error).__name__, text_of(error)]
        return ["use", "ok", value]

    def lose(self, why: str) -> NoReturn:
        """Give the program up: its process may send anything from here on."""
        self.lost = self.lost or why
        raise Lost(self.lost)

    def _kept(self, value: Any, data: Callable[[], Any]) -> dict[str, Any] | None:
        return self._to_ref(value) if isinstance(value, Handle) else None

    def _to_ref(self, value: Any) -> dict[str, Any]:
        if id(value) in self.numbers:
            return {Reference.OBJECT: self.numbers[id(value)]}
        if isinstance(value, Handle):
            raise codec.CodecError("an object of a process that has ended")
        path = importable(value)
        if path:
            return {Reference.LIBRARY: path}
        if not is_lent(value):
            raise codec.CodecError(
                f"a {type(value).__name__} of the test cannot be sent to a program"
            )
        place = self.lent.number(value)
        if callable(value):
            name = getattr(value, "__name__", "")
            return {Reference.FUNCTION: [place, name if type(name) is str else ""]}
        return {Reference.COROUTINE if inspect.iscoroutine(value) else Reference.GENERATOR: place}

    def _from_ref(self, tag: str, body: Any) -> Any:
        match tag, body:
            case Reference.FUNCTION, int(place) if 0 <= place < len(self.lent.objects):
                return self.lent.objects[place]
            case _, [int(number), str(abilities)] if tag in NATIVE:
                if number not in self.objects:
                    handle = handle_class("".join(sorted(set(abilities) & set(METHODS))))(
                        self, number
                    )
                    self._keep(number, handle, NATIVE[tag](handle))
                return self.objects[number]
            case Reference.DATA, [int(number), str(abilities), data]:
                if number not in self.objects:
                    handle = made_of_data(self, number, abilities, data)
                    self._keep(number, handle, handle)
                elif not holds_data(self.objects[number]):
                    raise codec.CodecError("an object without data")
                fill(self.objects[number], data)
                return self.objects[number]
        raise codec.CodecError("no such object")

    def _keep(self, number: int, handle: "Handle", made: Any) -> None:
        if len(self.objects) >= REFERENCES:
            raise codec.CodecError("too many objects")
        self.objects[number] = made
        self.numbers[id(made)] = self.numbers[id(handle)] = number
        self.handles.append(handle)


# Functions and classes of the library go by their name: the program's process has them. Of the
# test's process a program gets only what the test hands over, to call it or to take the next
# item: functions, methods, such as
# `seen.append`, and other objects that can be called, but no class, whose objects would be the
# test's.


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
    if (
        type(module) is not str
        or type(name) is not str
        or module.partition(".")[0] not in sys.stdlib_module_names
    ):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    same = found is value or (isinstance(bound, type) and found == value)
    return [module, name] if same and module != "__main__" else None


def run_apart(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a test's coroutine that a program awaits, also while the test's own loop
    runs."""
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
    # Stands for an object of a program. Class, `==`, hashing and arithmetic are the handle's
    # own. No docstring: that of the program's object is asked for.

    __slots__ = ()  # those of its classes have them: a class that is a list too cannot

    def __init__(self, session: Session, number: int) -> None:
        object.__setattr__(self, "_Handle__session", session)
        object.__setattr__(self, "_Handle__number", number)

    def _ask(self, op: str, *args: Any, kind: type = object) -> Any:
        """The answer about the object; Lost where it is of another kind than required."""
        session = self.__session
        answer = session.request(op, self, *args)
        if kind not in (object, type(answer)):
            session.lose(f"no {kind.__name__} for {op}")
        return answer

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
        """By the classes from which the program's object descends; what its metaclass says is
        not asked. A namedtuple is data here: by its name and its fields."""
        if not isinstance(other, Handle) and isinstance(other, tuple) and hasattr(other, "_fields"):
            return (type(other).__name__, other._fields) == (
                self.__name__,
                getattr(self, "_fields", None),
            )
        return isinstance(other, Handle) and self._ask("instance", other) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Handle) and self._ask("subclass", other) is True


def _session(handle: Handle) -> Session:
    return object.__getattribute__(handle, "_Handle__session")


# Dunder names that are looked up. Others are Python's own protocols, such as __eq__ and
# __class__: a program would decide with them.
ABOUT = frozenset(
    {"__name__", "__qualname__", "__doc__", "__dict__", "__annotations__", "__wrapped__"}
)


def _call(self: Handle, *args: Any, **kwargs: Any) -> Any:
    match self._ask("call", args, kwargs):
        case [result, after]:
            write_back([*args, *kwargs.values()], after)
            return result
    _session(self).lose("an answer of the wrong shape")


def _iterate(self: Handle) -> Iterator[Any]:
    steps = self._ask("iter")
    if not isinstance(steps, Handle):
        _session(self).lose("no iterator for iter")
    return _each(steps)


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
    session = _session(self)
    session.entered[id(self)] = session.number
    return value


def _leave(
    self: Handle, kind: Any, error: BaseException | None, trace: TracebackType | None
) -> bool:
    """Whether an exception in the body of a `with` is swallowed: only one that the test raises
    by `raise`, or in a body that did not use the program, and which is no assertion. Otherwise
    a program could swallow the assertion or the error that tells its fault."""
    session = _session(self)
    alone = session.entered.pop(id(self), None) == session.number
    swallowed = self._ask("exit", *_told(error)) is True
    return swallowed and (_is_raised_by_test(error, trace) or (alone and _may_be_swallowed(error)))


def _may_be_swallowed(error: BaseException | None) -> bool:
    return isinstance(error, Exception) and not isinstance(error, AssertionError)


def _told(error: BaseException | None) -> tuple[str, ...]:
    """What a program may know of an exception: of an assertion not the text, which may hold the
    expected value."""
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
    return await _finished(self._ask("async exit", *_told(error))) is True and _is_raised_by_test(
        error, trace
    )


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
                _session(handle).lose("no step of a generator")
        sent = None
        with _Thrown(handle) as thrown:
            sent = yield value
        step = thrown.step or handle._ask("send", sent)


class _Thrown:
    """Around a yield: an exception that is thrown into a generator goes to the program's.

    As in a `with`, which contextlib.contextmanager makes of a generator: a program may swallow
    what the test raises or throws here, no more."""

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
    """The result of a task of the program's loop. Meanwhile other coroutines of the test's loop
    run."""
    try:
        result = task._ask("poll", kind=list)
        while not result:
            await asyncio.sleep(0)
            result = task._ask("poll", kind=list)
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


# Methods of a handle whose object can do that. A handle of another object lacks them, so
# `callable` and
# `isinstance(x, Iterator)` answer as they would for the object.
METHODS: dict[str, dict[str, Any]] = {
    Ability.AWAIT: {"__await__": lambda self: awaited(self).__await__()},
    Ability.CALL: {"__call__": _call},
    Ability.ASYNC_WITH: {"__aenter__": _enter_async, "__aexit__": _leave_async},
    Ability.ASYNC_ITERATE: {"__aiter__": lambda self: _each_async(self._ask("async iter"))},
    Ability.ITERATE: {"__iter__": _iterate},
    Ability.LENGTH: {"__len__": _asks("len", int)},
    Ability.NEXT: {"__next__": _next},
    Ability.GET_ITEM: {"__getitem__": _asks("item")},
    Ability.SET_ITEM: {"__setitem__": _asks("set item")},
    Ability.DELETE_ITEM: {"__delitem__": _asks("delete item")},
    Ability.WITH: {"__enter__": _enter, "__exit__": _leave},
}
# What stands for an object that a reference names. What Python itself makes of a generator
# function or an async one
# is that here too: `inspect` and `await` look at the type.
NATIVE: dict[str, Callable[[Handle], Any]] = {
    Reference.OBJECT: lambda handle: handle,
    Reference.GENERATOR: generated,
    Reference.COROUTINE: awaited,
    Reference.ASYNC_GENERATOR: generated_async,
}


@functools.lru_cache(maxsize=256)
def handle_class(abilities: str) -> type[Handle]:
    documentation = property(lambda self: self._ask("get", "__doc__"))
    methods: dict[str, Any] = {
        "__slots__": ("_Handle__session", "_Handle__number"),
        "__doc__": documentation,
    }
    for letter in abilities:
        methods |= METHODS[letter]
    return type("Handle", (Handle,), methods)


# ---- objects that descend from a list, dict, set or tuple and have methods of their own
#
# Operators and whatever a list has too are decided by the data, which arrive with the object
# and are plain, as if it
# were nothing but a list: the program is not asked, and learns nothing, even where its class
# defines them anew. Only other methods and attributes are the object's.

MORE = {Ability.CALL, Ability.ASYNC_WITH, Ability.NEXT, Ability.WITH}
# Methods that only read; the others of a list, dict or set change it, so the program's object
# must know.
READS = {*dir(tuple), *dir(frozenset), *dir(MappingProxyType), "elements", "most_common", "total"}
BINARY = "add mul and or sub xor".split()
IN_PLACE = {f"__i{name}__" for name in BINARY}
OPERATORS = {
    f"__{name}__" for name in "len iter getitem contains reversed eq ne lt le gt ge".split()
}
OPERATORS |= {f"__{name}__" for name in BINARY} | {f"__r{name}__" for name in BINARY}


def holds_data(value: Any) -> bool:
    return isinstance(value, Handle) and _base(value) is not object


def _base(handle: Handle) -> type:
    """The class beside `Handle` from which the handle's class descends."""
    return type(handle).__mro__[2]


def made_of_data(session: Session, number: int, abilities: str, data: Any) -> Handle:
    """A handle with data. CodecError for data of another class than those from which a
    program's may descend."""
    base: Any = type(data)
    if base not in codec.HOLDERS and not (issubclass(base, tuple) and hasattr(base, "_fields")):
        raise codec.CodecError("no data of an object")
    kind: Any = data_class(base, "".join(sorted(set(abilities) & MORE)))
    if issubclass(base, tuple):
        handle = tuple.__new__(kind, data)
    else:
        handle = frozenset.__new__(kind, data) if base is frozenset else base.__new__(kind)
    Handle.__init__(handle, session, number)
    object.__setattr__(handle, "_Handle__data", data)
    return handle


def fill(handle: Any, data: Any) -> None:
    """Let a handle hold the data that its object holds now. A tuple or frozenset keeps what
    arrived first."""
    base: Any = _base(handle)
    if issubclass(base, tuple | frozenset):
        return
    if type(data) is not base:
        raise codec.CodecError("data of another kind")
    # In the handle itself too: json and heapq read a list as it lies in memory.
    if issubclass(base, dict):
        base.clear(handle)
        for key, value in data.items():
            base.__setitem__(handle, key, value)
    elif base is deque:
        deque.__init__(handle, data, data.maxlen)
    else:
        base.__init__(handle, data)
    object.__setattr__(handle, "_Handle__data", data)
    object.__setattr__(handle, "_Handle__seen", _session(handle).changes)


def _fresh(value: Any) -> Any:
    """The plain data of a handle that holds some, as they are now. Other values as they are."""
    if not holds_data(value) or isinstance(value, tuple):
        return value
    session = _session(value)
    if (
        not isinstance(value, frozenset)
        and object.__getattribute__(value, "_Handle__seen") != session.changes
    ):
        session.request("data", value)
    return object.__getattribute__(value, "_Handle__data")


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: method(*map(_fresh, args))


def _changing(method: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """A method that changes the data here, and with `change` the object of the program, which
    must then hold the same: else its own `remove` could take whatever the test expects away and
    leave an equal list."""

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = _fresh(self).copy()
        result = method(data, *args, **kwargs)
        change(self, *args, **kwargs)
        if _fresh(self) != data:
            _session(self).lose(
                f"its {method.__name__} does not do what that of {type(data).__name__} does"
            )
        return result

    return changed


def _calling(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._ask("get", name)(*args, **kwargs)


@functools.lru_cache(maxsize=256)
def data_class(base: type, abilities: str) -> type[Handle]:
    """A class of handles that are also of the class `base`."""
    documentation = property(lambda self: self._ask("get", "__doc__"))
    attributes = property(lambda self: self._ask("get", "__dict__"))
    members: dict[str, Any] = {
        "__doc__": documentation,
        "__dict__": attributes,
        "__bool__": lambda self: len(self) > 0,
    }
    for ability in abilities:
        members |= METHODS[ability]
    if issubclass(base, tuple):  # its own methods do: nothing of it changes
        return type(
            "Handle",
            (Handle, base),
            members | {name: _calling(name) for name in ("_make", "_replace")},
        )
    for name in dir(base):
        method = getattr(base, name)
        if name == "fromkeys":  # of the class
            members[name] = method
        elif not callable(method):  # the handle is a deque itself, and has its maxlen
            continue
        elif name in OPERATORS or (name in READS and not name.startswith("_")):
            members[name] = _reading(method)
        elif not name.startswith("_"):
            members[name] = _changing(method, _calling(name))
        elif name in IN_PLACE:
            # a += b is a = a + b, and gives a plain list
            members[name] = lambda self, other: NotImplemented
    if hasattr(base, "__setitem__"):
        members["__setitem__"] = _changing(getattr(base, "__setitem__"), _asks("set item"))
        members["__delitem__"] = _changing(getattr(base, "__delitem__"), _asks("delete item"))
    if base is frozenset:
        members["__hash__"] = _reading(frozenset.__hash__)
    return type("Handle", (Handle, base), members)


def write_back(given: list[Any], after: Any) -> None:
    """Arguments pass by value: copy a program's changes of a list, dict or set back to the
    test's argument."""
    if type(after) is not list or len(after) != len(given):
        return
    for mine, new in zip(given, after):
        # The program may send anything here: only another value of the argument's own type is
        # copied.
        if type(new) is not list or [type(x) for x in new] != [type(mine)]:
            continue
        if isinstance(mine, (list, bytearray)):
            mine[:] = new[0]
        elif isinstance(mine, deque):
            mine.clear()
            mine.extend(new[0])
        elif isinstance(mine, (dict, set)):
            mine.clear()
            mine.update(new[0])


def text_of(error: BaseException) -> str:
    return ", ".join(
        str(a) if type(a) in (str, int, float, bool) else type(a).__name__ for a in error.args
    )
