"""The trusted process that holds the tests and decides. It requests values from the program's process, never verdicts.

A test is an assert (or any source) whose entry points are handles for the program's objects. A process that ends or is out
of time is replaced for the next test. The pool ends a judge that hangs on an honest value (`sum(range(10**12))`).

Levels: landlock (Landlock, seccomp and limits: reads only of the interpreter's library, writes only in a private folder,
see scratch.py), and none (limits only, for trusted programs).
"""

import builtins
import contextlib
import dis
import functools
import gc
import importlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, TracebackType
from typing import Any

from codechat.sandbox import codec, defined_tests, kernel
from codechat.sandbox.scratch import ENTRIES, SIZE_MB, Scratch

ROOT = str(Path(__file__).resolve().parents[2])
FLAGS = ("-s", "-S", "-P", "-B", "-W", "ignore")  # no installed packages, nothing from the current folder
START_S = 60.0
MEMORY = 4 << 30  # bytes of address space: a program's answers must not exhaust the machine's memory
REASON = 300  # characters
OUT_OF_TIME = "out of time"
TEST = "<test>"  # file name of a test's code
UNUSED = "no test uses {names}, so any program would pass"
AGAIN_S = 0.1  # the interruption repeats, for a test that swallows it
Result = tuple[bool, str]  # (passed, reason)
REFERENCES = 100_000  # most objects of one program that a judge keeps


# ---- processes


class NotStarted(OSError):
    """A process of the sandbox did not start, or has gone."""


class Interpreter:
    """A fresh interpreter that runs `codechat.sandbox.MODULE`.main(socket, *words), with nothing of the trainer's
    environment except the path of the interpreter's libraries and the folder for temporary files. It ends with `close`."""

    def __init__(self, module: str, *words: str, keep: tuple[int, ...] = ()) -> None:
        """keep: further descriptors that it inherits."""
        self.told: dict[str, Any] = {}  # its first message
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_S)
        code = (
            f"import sys, socket; sys.path.insert(0, {ROOT!r}); from codechat.sandbox import {module}; sys.path.pop(0); "
            f"{module}.main(socket.socket(fileno={theirs.fileno()}), *{words!r})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *FLAGS, "-c", code],
                pass_fds=[theirs.fileno(), *keep],
                **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
                env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
                | {name: value for name, value in os.environ.items() if name in ("LD_LIBRARY_PATH", "TMPDIR")},
                cwd="/",
                start_new_session=True,
            )
        try:
            self.told = self.receive()
        except OSError as error:
            self.kill()
            raise NotStarted(f"{module}: {error}") from None

    def receive(self) -> dict[str, Any]:
        """Its next message. NotStarted for {"error": why}."""
        message = json.loads(codec.receive(self.control, codec.TRUSTED))
        if "error" in message:
            raise NotStarted(message["error"])
        return message

    def close(self) -> None:
        """It ends when its socket does, else by force."""
        with contextlib.suppress(OSError):  # it is shut already
            self.control.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.kill()

    def kill(self) -> None:
        """By force; the kernel tells the processes that it started."""
        self.process.kill()
        self.process.wait()
        self.control.close()


class Zygote(Interpreter):
    """Gives a process for each program; the next one starts while the current one is in use. They write in `scratch`."""

    def __init__(self, level: str, scratch: Scratch) -> None:
        super().__init__("zygote", level, scratch.path, keep=(scratch.lock,))
        self.scratch, self.ending = scratch, False

    def take(self) -> socket.socket:
        """The socket of a process that waits for a program. Nothing is left of the one before."""
        self.clean()
        self.control.sendall(codec.NEXT)
        fds = socket.recv_fds(self.control, 1, 1)[1]
        if not fds:
            raise NotStarted("the zygote has gone")
        return socket.socket(fileno=fds[0])

    def end(self) -> None:
        """Let the process end; `clean` waits for it."""
        self.control.sendall(codec.END)
        self.ending = True

    def clean(self) -> bool:
        """Remove what an ended process has written, once it has ended. Whether it ended for holding too much."""
        if not self.ending:
            return False
        answer = self.control.recv(1)
        if not answer:
            raise NotStarted("the zygote has gone")
        self.scratch.empty()
        self.ending = False
        return answer == codec.FULL


def main(control: socket.socket, level: str, parent: str) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    # The kernel reaps ended children, also while this process hangs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _ring)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    defined_tests.stop_unittest_main()
    say = lambda message: codec.send(control, json.dumps(message).encode())  # noqa: E731
    try:
        if not __debug__:
            raise NotStarted("python -O removes the asserts of every test")
        scratch = Scratch()  # which the trainer removes
        with contextlib.closing(Zygote(level, scratch)) as zygote:
            say({"folder": scratch.path})
            gc.collect()
            gc.freeze()
            while True:
                job = json.loads(codec.receive(control, codec.TRUSTED))
                with contextlib.closing(Trial(job, zygote)) as trial:
                    verdict = trial.verdict()
                say(verdict)
                zygote.clean()  # while the trainer has the verdict
    except OSError as error:  # no zygote, or the trainer has gone
        with contextlib.suppress(OSError):
            say({"error": str(error)})


# ---- what a test sees of a program: handles for objects that are not plain data. A handle forwards attributes, calls,
# iteration, length, indexing, `with`, `await` and text, but never `==`, arithmetic, ordering or `in`: the other operand may be the value
# that the test expects, and the program would only have to agree.


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
        if is_lent(value):
            place = self.places.setdefault(id(value), len(self.lent))
            if place == len(self.lent):
                self.lent.append(value)
            return {"j": [place, getattr(value, "__name__", "")]} if callable(value) else {"g": place}
        if path := importable(value):
            return {"p": path}
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


# A program gets no function of the test's process but those that the test defines, and the methods of its own lists,
# dicts and sets (a test notes calls in them). Functions of the library go by their name: the program's process has them.


def is_lent(value: Any) -> bool:
    if isinstance(value, MethodType):
        return is_lent(value.__func__)
    if isinstance(value, FunctionType):
        return value.__code__.co_filename == TEST
    if isinstance(value, functools.partial):
        return is_lent(value.func)
    if isinstance(value, BuiltinFunctionType):
        return type(value.__self__) in (list, dict, set, deque)
    return hasattr(type(value), "__next__")


def importable(value: Any) -> list[str] | None:
    """[module, name] of a function or class of the standard library, or None."""
    owner = getattr(value, "__objclass__", None)  # of a method such as str.upper
    module = getattr(owner, "__module__", None) or getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str or module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return [module, name] if found is value and module != "__main__" else None


def raised(name: str, text: str) -> Exception:
    """The exception to raise in the judge for an exception of a program."""
    if name in AS_ITSELF:
        error = getattr(builtins, name)(text[:1000])
    else:
        error = ProgramError(f"{name[:100]}: {text[:1000]}")
    return error


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
        """By the classes from which the program's object descends; what its metaclass says is not asked."""
        return isinstance(other, Handle) and self._ask("instance", other) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, Handle) and self._ask("subclass", other) is True

    @property
    def __doc__(self) -> Any:
        return self._ask("get", "__doc__")


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
    if item := self._ask("next", kind=list):
        return item[0]
    raise StopIteration


def _leave(self: Handle, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
    """Whether an exception in the body of a `with` is swallowed: only one that the test raises by `raise`, which is no
    assertion. Otherwise a program could swallow the assertion or the error that tells its fault."""
    return self._ask("exit", *_told(error)) is True and _is_raised_by_test(error, trace)


def _told(error: BaseException | None) -> tuple[str, ...]:
    """What a program may know of an exception: of an assertion not the text, which may hold the expected value."""
    if error is None:
        return ()
    return type(error).__name__, "" if isinstance(error, AssertionError) else text_of(error)


async def _enter_async(self: Handle) -> Any:
    return self._ask("async enter")


async def _leave_async(self: Handle, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
    return self._ask("async exit", *_told(error)) is True and _is_raised_by_test(error, trace)


def _is_raised_by_test(error: BaseException | None, trace: TracebackType | None) -> bool:
    if trace is None or not isinstance(error, Exception) or isinstance(error, AssertionError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return code.co_filename == TEST and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def generated(handle: Handle) -> Generator[Any, Any, None]:
    """A generator for one of the program's."""
    sent = None
    while item := handle._ask("send", sent, kind=list):
        sent = yield item[0]


async def awaited(handle: Handle) -> Any:
    """A coroutine for one of the program's, which runs to its end in the program's process."""
    return handle._ask("await")


async def generated_async(handle: Handle) -> AsyncGenerator[Any, None]:
    while item := handle._ask("async next", kind=list):
        yield item[0]


def _asks(op: str, kind: type = object) -> Callable[..., Any]:
    return lambda self, *args: self._ask(op, *args, kind=kind)


# Letter -> methods of a handle whose object can do that: a handle of another object lacks them, so `callable` and
# `isinstance(x, Iterator)` answer as they would for the object.
ABILITIES: dict[str, dict[str, Any]] = {
    "a": {"__await__": lambda self: awaited(self).__await__()},
    "c": {"__call__": _call},
    "e": {"__aenter__": _enter_async, "__aexit__": _leave_async},
    "g": {"__aiter__": lambda self: generated_async(self._ask("async iter"))},
    "i": {"__iter__": _iterate},
    "l": {"__len__": _asks("len", int)},
    "n": {"__next__": _next},
    "t": {"__getitem__": _asks("item")},
    "u": {"__setitem__": _asks("set item")},
    "d": {"__delitem__": _asks("delete item")},
    "w": {"__enter__": _asks("enter"), "__exit__": _leave},
}


@functools.lru_cache(maxsize=256)
def handle_class(abilities: str) -> type[Handle]:
    methods: dict[str, Any] = {"__slots__": (), "__doc__": vars(Handle)["__doc__"]}
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


# ---- one program


class OutOfTime(BaseException):
    """The time limit was reached. `except Exception` in a test does not catch it."""


def _ring(*signal_and_frame: Any) -> None:
    raise OutOfTime


@functools.lru_cache(maxsize=512)  # the completions of one problem share their tests
def compiled(source: str) -> CodeType:
    return compile(source, TEST, "exec", dont_inherit=True)


class Trial:
    """One program, its process and the namespace of its tests."""

    def __init__(self, job: dict[str, Any], zygote: Zygote) -> None:
        self.job, self.zygote, self.stage = job, zygote, "tests"
        self.deadline = time.monotonic() + job["total_s"]
        self.session: Session | None = None
        self.names: dict[str, Any] = {}  # the namespace of a test
        self.made: set[str] = set()  # names of data that the program gave, and of the set-up if it used the program
        self.used = False  # whether a test has used the program

    def verdict(self) -> dict[str, Any]:
        """One result per test, in order. reason: of the first failure. Where no test used the program, none has
        passed: any program would."""
        results = [self.prepare() or self.attempt(self.run_test, test) for test in self.job["tests"]]
        if not self.used and any(passed for passed, _ in results):
            results = [(False, UNUSED.format(names=", ".join(self.job["required"]) or "the program"))] * len(results)
        reason = next((why for passed, why in results if not passed), "")
        return {"results": results, "stage": self.stage, "reason": reason}

    def prepare(self) -> Result | None:
        """Where there is no process, load the program into one and run the set-up. The result of a failure."""
        if self.session:
            return None
        self.session = Session(self.zygote.take(), self.job["message_mb"] << 20)
        for stage, step in (("load", self.load), ("setup", self.set_up)):
            passed, reason = self.attempt(step)
            if not passed:
                self.close()
                self.stage = stage
                return passed, reason
        return None

    def attempt(self, step: Callable[..., None], *args: Any) -> Result:
        """Whether the step ends in time without an exception."""
        left = min(self.job["timeout_s"], self.deadline - time.monotonic())
        if left <= 0:
            return False, "not tried: the whole program is out of time"
        end = time.monotonic() + left
        try:
            signal.setitimer(signal.ITIMER_REAL, left, AGAIN_S)
            try:
                step(*args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            reason = OUT_OF_TIME if time.monotonic() >= end else ""  # the test may have swallowed the interruption
        # A test may raise anything, SystemExit too: it has failed, and the next test runs.
        except BaseException as error:
            reason = explain(error)
        lost = self.session.lost
        if reason == OUT_OF_TIME or lost:
            self.close()
            if self.zygote.clean():
                reason = (
                    f"it held more than {SIZE_MB} MiB or {ENTRIES} entries in its folder, or what cannot be counted"
                )
        reason = reason or lost
        return not reason, reason[:REASON]

    def load(self) -> None:
        job = self.job
        given = (job[key] for key in ("code", "names", "imports", "memory_mb", "total_s"))
        answer = self.session.request("load", *given)
        if type(answer) is not list or not all(type(p) is list and len(p) == 2 and type(p[0]) is str for p in answer):
            self.session.lose("an answer of the wrong shape")
        self.defined = {name: value for name, value in answer if name in job["names"]}
        if missing := [name for name in job["required"] if name not in self.defined]:
            raise ProgramError(f"it does not define {', '.join(missing)}")

    def set_up(self) -> None:
        modules = {name: importlib.import_module(name) for name in self.job["modules"]}
        # As a script, so that a body under `if __name__ == "__main__"` runs.
        self.names = {"__name__": "__main__", "__builtins__": __builtins__} | modules | self.defined
        given, before = set(self.names), self.session.number
        self.run(self.job["setup"])
        self.made = {name for name, value in self.defined.items() if not isinstance(value, Handle)}
        if self.session.number > before:
            self.made |= set(self.names) - given
        self.names |= self.defined  # the set-up may be a prompt that defines the entry point too

    def run_test(self, test: dict[str, Any]) -> None:
        """Execute the source of a test, then run the tests that it defines."""
        before = self.session.number
        try:
            self.run(test["source"])
            defined_tests.run_defined(self.names, test["defines"], test["used"])
            if test["candidate"]:
                defined_tests.run_check(self.names["check"], self.defined[test["candidate"]])
        finally:
            self.used |= self.session.number > before or not self.made.isdisjoint(test["used"])

    def run(self, source: str) -> None:
        try:
            exec(compiled(source), self.names)
        except SystemExit as leaving:  # of a script, never of the program, whose exceptions get other types
            if leaving.code:
                raise

    def close(self) -> None:
        if self.session:
            with self.session.channel:  # closed afterwards: the process would exit by itself once it is closed
                self.zygote.end()
            self.session = None


def explain(error: BaseException) -> str:
    """Why a step failed, in one line. Never empty. The exception's arguments may be handles, whose text would need another request."""
    if isinstance(error, OutOfTime):
        return OUT_OF_TIME
    if isinstance(error, Lost):
        return f"the program's process was lost: {error}"
    text = text_of(error)
    if isinstance(error, AssertionError):
        return f"assertion failed: {text}" if text else "assertion failed"
    return f"{type(error).__name__}: {text}"


def text_of(error: BaseException) -> str:
    return ", ".join(str(a) if type(a) in (str, int, float, bool) else type(a).__name__ for a in error.args)
