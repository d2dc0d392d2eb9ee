"""The process that forks the processes of untrusted programs. It never sees a program or a
test.

It imports the standard library once, isolates itself and serves its judge over one socket: NEXT
-> the socket of the next process, which was forked ahead; END -> that process ends, then END,
or FULL where the watch had ended it. NEXT ends the process before it too. The first message is
JSON: {"error": text} where the isolation cannot be built, else empty. Parent and child share
memory until one writes to a page (3 us), so what both do after a fork is prepared before it,
and they use sockets without Python's wrapper classes.

A program's process holds one untrusted program (`Program`) and answers the judge's requests
about it. It can only change what is sent, and the judge accepts only plain data. Requests and
replies are lists, encoded by codec.py:
    [number, "load", code, names, imports, memory_mb, cpu_s]    -> [[name, value], ...] of the names that it defines
    [number, "call", object, args, kwargs]                      -> [result, changed arguments or None]
    [number, a key of `Program.ops`, object, ...]
A reply is [number, "ok", value] or [number, "raise", type, message]. Before it replies, a
program may call a
function that the test gave it: ["use", place, args, kwargs] -> ["use", "ok", value] or ["use",
"raise", type, message]."""

import _socket
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import operator
import os
import random
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from codechat_lab.sandbox import codec, kernel, landlock, scratch, seccomp
from codechat_lab.sandbox.codec import Ability, Reference

# The most common imports of programs: loaded before the fork, they cost nothing.
# Not more: each loaded shared library makes every fork slower.
PRELOADED = """abc array bisect cmath collections collections.abc copy dataclasses datetime decimal enum fractions
    functools heapq io itertools json math numbers operator random re statistics string struct textwrap threading time
    traceback types typing unicodedata warnings""".split()


WATCH_MS = 10  # between two looks at what a program has written
POLL_S = 0.002  # that a task may run before the judge's loop has its turn
MESSAGE = 300  # characters of an exception's text that are sent
MUTABLE = (
    list,
    dict,
    set,
    bytearray,
    codec.deque,
    codec.Counter,
    codec.OrderedDict,
    codec.defaultdict,
)


class Walls(NamedTuple):
    """The isolation steps that each program's process runs."""

    isolated: bool
    own_bytes: int
    steps: list[kernel.Step]
    folder: str  # where it may write


def main(control: socket.socket, level: str, folder: str, lock: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the judge ignores it, and children inherit that
    preload()
    try:
        walls = build(level, folder, int(lock))
    except OSError as error:
        answer = {"error": f"{error.filename or 'a wall'}: {error.strerror or error}"}
        codec.send(control, json.dumps(answer).encode())
        return
    codec.send(control, b"{}")
    # From here on nothing of a program's process touches an object that the zygote made:
    # `freeze` keeps the garbage collector from writing to them, and with that from copying
    # their pages in each process.
    bare = _socket.socket(fileno=control.detach())
    gc.collect()
    gc.freeze()
    kernel.tidy_memory()
    with contextlib.suppress(ConnectionError):
        serve(bare, walls)


def preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    random.seed(0)  # every program starts from this state, so verdicts are reproducible


def build(level: str, folder: str, lock: int) -> Walls:
    """Build the isolation that all programs share. OSError where it cannot be built."""
    os.chdir(folder)
    os.environ["TMPDIR"] = os.environ["HOME"] = folder
    isolated = level != "none"
    parent = os.getppid()
    own_bytes = kernel.own_addresses()
    threads = kernel.limit_threads()
    ruleset = -1
    if isolated:
        ruleset = landlock.ruleset(folder)
        landlock.step_down(folder)
    # it ends its programs' processes too, and leaves no orphans
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked to tell
        sys.exit("the judge has gone")
    if isolated:
        kernel.empty_bounding_set()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.limit_for_good()
    if isolated:
        seccomp.install(seccomp.shared_program())()
    return Walls(isolated, own_bytes, own_walls(threads, ruleset, lock), folder)


def own_walls(threads: kernel.Step, ruleset: int, lock: int) -> list[kernel.Step]:
    """The steps of a program's process before it reads its program. ruleset: -1 for trusted
    programs."""
    steps = [kernel.prepared("prctl", kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), threads]
    # With the descriptor a program could give up the lock, and move the position from which the
    # folder is listed.
    steps.append(kernel.prepared("close", lock))
    # no capability is left: effective, permitted or inheritable; then the rules hold, for good
    if ruleset >= 0:
        steps.append(
            kernel.prepared(
                "capset", kernel.CapHeader(version=0x20080522, pid=0), (ctypes.c_uint32 * 6)()
            )
        )
        steps += [
            kernel.prepared("landlock_restrict_self", ruleset, 0),
            kernel.prepared("close", ruleset),
        ]
    return steps


def serve(control: socket.SocketType, walls: Walls) -> None:
    """Answer the judge until it is gone, and watch the program that it has."""
    waiting = select.poll()
    waiting.register(control.fileno(), select.POLLIN)
    given = 0  # pid of the process that the judge has, or 0
    answer = codec.END  # to the judge's next END
    ahead, channel = fork_child(control, walls)
    try:
        while True:
            told = waiting.poll(WATCH_MS if given else None)
            if not told:
                if scratch.holds_too_much(walls.folder, given):
                    end(given)
                    given = 0
                    answer = codec.FULL
                continue
            command = control.recv(1)
            if not command:
                return
            if given:
                end(given)
                given = 0
            if command == codec.END:
                control.send(answer)  # nothing of the program runs any more
            if command == codec.NEXT:
                answer = codec.END
                beside = channel.fileno().to_bytes(4, sys.byteorder)
                control.sendmsg([command], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, beside)])
                channel.close()
                given = ahead
                # known to be given away even if the fork fails: the end below must not wait
                # for it twice
                ahead = 0
                ahead, channel = fork_child(control, walls)
    finally:
        for pid in (given, ahead):
            if pid:
                end(pid)


def end(pid: int) -> None:
    """By a signal that no program can block, and wait: its pid must not name another process
    while we hold it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def fork_child(control: socket.SocketType, walls: Walls) -> tuple[int, socket.SocketType]:
    ours, theirs = _socket.socketpair()
    pid = kernel.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    control.close()
    try:
        run(theirs, walls)
    finally:
        os._exit(0)  # never run the rest of the zygote's code in this process


def run(channel: socket.SocketType, walls: Walls) -> None:
    """In the program's process: isolate it, then wait for the program. If a step fails, no
    program is read."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the zygote's handler is not for the program
    for step in walls.steps:
        step()
    if walls.isolated:  # the filter names the process's own pid
        seccomp.install(seccomp.own_program(os.getpid()))()
    Program(channel, walls.own_bytes).serve()


# ---- one program


class Program:
    """A program and those of its objects that the judge knows by number. Nothing here guards
    anything: the program can change all of it, and the judge takes every reply for forged."""

    def __init__(self, channel: socket.SocketType, own_bytes: int) -> None:
        self.channel = channel
        self.own_bytes = (
            own_bytes  # address space of the interpreter itself, which no program is charged for
        )
        self.objects = codec.Register()
        self.lent: dict[int, Any] = {}  # functions and iterators of the test, by their places
        self.places: dict[int, int] = {}  # id -> place, of these
        self.loop: Any = None  # of asyncio, from the first use on
        self.keeping = threading.Lock()  # of objects: several threads may hand over
        self.turn = threading.Lock()  # whoever has it sends to the judge and reads its answer
        self.ops: dict[str, Callable[..., Any]] = {
            "load": self.load,
            "call": self.call,
            "data": lambda target: target,  # which is sent with the data that it holds now
            "get": getattr,
            "set": setattr,
            "delete": delattr,
            "len": len,
            "item": operator.getitem,
            "set item": operator.setitem,
            "delete item": operator.delitem,
            "bool": bool,
            "str": str,
            "repr": repr,
            "format": format,
            # in an iterator of our own, so that it crosses as a reference, also one that
            # iterates over itself
            "iter": lambda target: Steps(iter(target)),
            "next": next_of,
            "send": lambda generator, value: step_of(lambda: generator.send(value)),
            "throw": lambda generator, *told: step_of(
                lambda: generator.throw(exception_of(*told).error)
            ),
            "close": lambda generator: generator.close(),
            "instance": lambda kind, one: kind in type(one).__mro__,
            "subclass": lambda kind, one: (
                isinstance(one, type) and kind in type.__dict__["__mro__"].__get__(one)
            ),
            "enter": lambda target: type(target).__enter__(target),
            "exit": leave,
            "await": self.task,
            "poll": poll,
            "cancel": lambda task: task.cancel() and None,
            "async iter": lambda target: type(target).__aiter__(target),
            "async next": lambda target: self.task(item_of(type(target).__anext__(target))),
            "async send": lambda target, value: self.task(item_of(target.asend(value))),
            "async enter": lambda target: self.task(type(target).__aenter__(target)),
            "async exit": lambda target, *told: self.task(
                type(target).__aexit__(target, *exception_of(*told))
            ),
        }

    def encoded(self, value: Any) -> bytes:
        return codec.encode(value, self.to_ref, self.kept)

    def kept(self, value: Any, data: Callable[[], Any]) -> dict[str, Any] | None:
        """A reference with the data, for an object of a class such as `class Stack(list)` that
        adds methods."""
        kind: type = type(value)
        if not adds_names(kind):
            return None
        with self.keeping:
            number = self.objects.number(value)
        return {Reference.DATA: [number, abilities_of(value), data()]}

    def to_ref(self, value: Any) -> dict[str, Any]:
        if id(value) in self.places:
            return {Reference.FUNCTION: self.places[id(value)]}
        with self.keeping:
            number = self.objects.number(value)
        return {NATIVE.get(type(value), Reference.OBJECT): [number, abilities_of(value)]}

    def from_ref(self, tag: str, body: Any) -> Any:
        """What the judge has sent: an object of this program, a function or an iterator of the
        test, or a name."""
        if tag == Reference.OBJECT:
            return self.objects.objects[body]
        if tag == Reference.LIBRARY:
            module, name = body
            return operator.attrgetter(name)(importlib.import_module(module))
        place, name = body if tag == Reference.FUNCTION else (body, "")
        if place not in self.lent:
            made: Any
            if tag == Reference.FUNCTION:
                made = self.function(place, name)
            elif tag == Reference.COROUTINE:
                made = self.coroutine(place)
            else:
                made = self.iterator(place)
            self.lent[place] = made
            self.places[id(made)] = place
        return self.lent[place]

    def function(self, place: int, name: str) -> Callable[..., Any]:
        """A function that calls the one of the test."""

        def lent(*args: Any, **kwargs: Any) -> Any:
            return self.use(place, args, kwargs)

        lent.__name__ = lent.__qualname__ = name
        return lent

    def iterator(self, place: int) -> Any:
        item = self.use(place, (), {})
        while item:
            yield item[0]
            item = self.use(place, (), {})

    async def coroutine(self, place: int) -> Any:
        return self.use(place, (), {})

    def use(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the test. It may ask this program again before it returns."""
        with self.turn:
            codec.send(self.channel, self.encoded(["use", place, args, kwargs]))
            while True:
                match self.received():
                    case ["use", "ok", value]:
                        return value
                    case ["use", "raise", name, text]:
                        raise exception_of(name, text).error or Exception(text)
                    case [number, op, *rest]:
                        self.answer(number, op, rest)

    def received(self) -> Any:
        return codec.decode(codec.receive(self.channel, codec.TRUSTED), self.from_ref)

    def serve(self) -> None:
        """Answer requests until the judge is gone."""
        with self.turn:
            while True:
                number, op, *rest = self.received()
                self.answer(number, op, rest)

    def answer(self, number: int, op: str, rest: list[Any]) -> None:
        """Reply to a request. Meanwhile any thread of the program may have its turn."""
        self.turn.release()
        try:
            reply = self.attempt(number, op, rest)
        finally:
            self.turn.acquire()
        codec.send(self.channel, reply)

    def attempt(self, number: int, op: str, rest: list[Any]) -> bytes:
        """The reply to a request, whatever the program raises. A result that cannot be encoded
        is an error too."""
        try:
            return self.encoded([number, "ok", self.ops[op](*rest)])
        # Also SystemExit and KeyboardInterrupt: they are the program's answer and must not end
        # its process.
        except BaseException as error:
            nearest = next(
                t for t in type(error).__mro__ if getattr(builtins, t.__name__, None) is t
            )
            return self.encoded([number, "raise", nearest.__name__, describe(error)])

    def task(self, awaitable: Any) -> Any:
        """A task in a loop that lasts as long as the program, and runs while the judge polls."""
        asyncio = importlib.import_module("asyncio")  # few programs need it
        if self.loop is None or self.loop.is_running():
            self.loop = asyncio.new_event_loop()

        async def whole() -> Any:
            return await awaitable

        return self.loop.create_task(whole())

    def load(
        self, code: str, names: list[str], imports: str, memory_mb: int, cpu_s: float
    ) -> list[Any]:
        # where pickle finds its classes by name
        module = sys.modules["candidate"] = types.ModuleType("candidate")
        kernel.limit_program(self.own_bytes, memory_mb, cpu_s)
        space = module.__dict__
        exec(compile(code, "<program>", "exec", dont_inherit=True), space)
        for line in imports.splitlines():
            with contextlib.suppress(ImportError):
                exec(line, space)
        return [[name, space[name]] for name in names if name in space]

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        given = [*args, *kwargs.values()]
        before = [self.encoded(a) if type(a) in MUTABLE else None for a in given]
        result = function(*args, **kwargs)
        changed = [
            None if was is None or self.encoded(argument) == was else [argument]
            for argument, was in zip(given, before)
        ]
        return [result, changed if any(changed) else None]


class Steps:
    """An iterator that the judge iterates over."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.of)


NATIVE = {
    types.GeneratorType: Reference.GENERATOR,
    types.CoroutineType: Reference.COROUTINE,
    types.AsyncGeneratorType: Reference.ASYNC_GENERATOR,
}
# The method that an object must have; see the judge's METHODS.
MARKS = {
    Ability.AWAIT: "__await__",
    Ability.CALL: "__call__",
    Ability.ASYNC_WITH: "__aenter__",
    Ability.ASYNC_ITERATE: "__aiter__",
    Ability.ITERATE: "__iter__",
    Ability.LENGTH: "__len__",
    Ability.NEXT: "__next__",
    Ability.GET_ITEM: "__getitem__",
    Ability.SET_ITEM: "__setitem__",
    Ability.DELETE_ITEM: "__delitem__",
    Ability.WITH: "__enter__",
}


@functools.lru_cache(maxsize=1024)
def abilities_of_class(kind: type) -> str:
    """By what the class and its bases define; `getattr` would also find what its metaclass does."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found |= vars(base)
    return "".join(ability for ability, method in MARKS.items() if found.get(method) is not None)


@functools.lru_cache(maxsize=1024)
def adds_names(kind: type) -> bool:
    """Whether the program's own classes add public names, or `__getattr__`, to those of a list,
    dict, set or tuple."""
    base = next((b for b in kind.__mro__ if b in codec.HOLDERS), None)
    if base is None or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    known = {*dir(base), *getattr(kind, "_fields", ())}
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        if any(
            name not in known and (not name.startswith("_") or name == "__getattr__")
            for name in vars(owner)
        ):
            return True
    return False


def abilities_of(value: Any) -> str:
    kind: type = type(value)
    abilities = abilities_of_class(kind)
    if (
        isinstance(value, type)
        and hasattr(value, "__class_getitem__")
        and Ability.GET_ITEM not in abilities
    ):
        abilities += Ability.GET_ITEM  # a generic class: Box[int]
    return abilities


def next_of(iterator: Any) -> list[Any]:
    """[the next item], or [] at the end."""
    try:
        return [next(iterator)]
    except StopIteration:
        return []


def step_of(step: Callable[[], Any]) -> list[Any]:
    """["yield", the next item of a generator], or ["return", what it returns]."""
    try:
        return ["yield", step()]
    except StopIteration as end:
        return ["return", end.value]


async def item_of(awaitable: Any) -> list[Any]:
    """[the next item], or [] at the end."""
    try:
        return [await awaitable]
    except StopAsyncIteration:
        return []


def poll(task: Any) -> list[Any]:
    """[the result of a task], or [] where it needs more time than POLL_S."""
    asyncio = importlib.import_module("asyncio")
    task.get_loop().run_until_complete(asyncio.wait({task}, timeout=POLL_S))
    return [task.result()] if task.done() else []


class Raised(NamedTuple):
    """What `__exit__` takes."""

    kind: type[BaseException] | None
    error: BaseException | None
    trace: None


def exception_of(name: str = "", text: str = "") -> Raised:
    """An exception in the test, of which the name and the text are known; of no name: none."""
    if not name:
        return Raised(None, None, None)
    kind = getattr(builtins, name, Exception)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = Exception
    try:
        return Raised(kind, kind(text), None)
    except TypeError:  # UnicodeDecodeError takes five arguments
        return Raised(Exception, Exception(text), None)


def leave(target: Any, *told: str) -> bool:
    return bool(type(target).__exit__(target, *exception_of(*told)))


def describe(error: BaseException) -> str:
    name = type(error).__name__
    text = str(error)[:MESSAGE] if isinstance(error, Exception) else ""
    return text if getattr(builtins, name, None) is type(error) else f"{name}: {text}"
