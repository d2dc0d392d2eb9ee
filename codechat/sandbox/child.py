"""The process that holds one untrusted program and answers a judge's requests about it. Nothing here is trusted once the
program has run, but it can only change what is sent, and the judge accepts only plain data.

Requests and replies are lists, encoded by codec.py:
    [number, "load", code, names, imports, limits]      -> [[name, value], ...] of the names that it defines
    [number, "script", code, limits] + two descriptors  -> None once the program has run to its end
    [number, "call", object, args, kwargs]              -> [result, changed arguments or None]
    [number, "get" | "set" | "iter" | "next" | "len" | "item" | "bool" | "str" | "repr", object, ...]
A reply is [number, "ok", value] or [number, "raise", type, message], after any [number, "callback", function, args, kwargs].
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import operator
import os
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from codechat.sandbox import codec, kernel

MESSAGE = 300  # characters of an exception's text that are sent
MUTABLE = (list, dict, set, bytearray, codec.deque)


class Opaque:
    """Makes an iterator cross as a reference, also one that iterates over itself."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _next(iterator: Opaque) -> list[Any]:
    try:
        return [next(iterator.value)]
    except StopIteration:
        return []


class Program:
    """A program and those of its objects that the judge knows by number."""

    def __init__(self, channel: socket.SocketType, own_bytes: int) -> None:
        self.channel, self.own_bytes = channel, own_bytes
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> number; `objects` prevents reuse of the ids
        self.ops: dict[str, Callable[..., Any]] = {
            "load": self.load, "script": self.script, "call": self.call, "get": getattr, "set": setattr, "len": len,
            "item": operator.getitem, "bool": bool, "str": str, "repr": repr, "next": _next,
            "iter": lambda target: Opaque(iter(target)),
        }  # fmt: skip

    # ---- messages

    def to_ref(self, value: Any) -> dict[str, Any]:
        if name := codec.pack_name(value):
            return name
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return {"h": self.numbers[id(value)]}

    def from_ref(self, tag: str, number: int) -> Any:
        if tag == "h":
            return self.objects[number]

        def callback(*args: Any, **kwargs: Any) -> Any:
            codec.send(self.channel, codec.encode([0, "callback", number, args, kwargs], self.to_ref))
            return self.serve(until_answer=True)

        return callback

    def serve(self, until_answer: bool = False) -> Any:
        """Answer requests until the judge is gone, or until it answers a callback."""
        while True:
            number, op, *rest = codec.decode(codec.receive(self.channel, codec.TRUSTED), self.from_ref)
            if until_answer and op == "answer":
                return rest[0]
            if until_answer and op == "refuse":
                raise RuntimeError(rest[0])
            codec.send(self.channel, self.attempt(number, op, rest))

    def attempt(self, number: int, op: str, rest: list[Any]) -> bytes:
        """The reply to a request, whatever the program raises. A result that cannot be encoded is an error too."""
        try:
            return codec.encode([number, "ok", self.ops[op](*rest)], self.to_ref)
        # Also SystemExit and KeyboardInterrupt: they are the program's answer and must not end its process.
        except BaseException as error:
            known = (
                t for t in type(error).__mro__ if getattr(builtins, t.__name__, None) is t
            )  # the nearest builtin exception
            return codec.encode([number, "raise", next(known).__name__, describe(error)], self.to_ref)

    # ---- requests

    def load(self, code: str, names: list[str], imports: str, most: list[float]) -> list[Any]:
        space = self._run("candidate", code, most)  # dataclasses and pickle find a class's module by name
        for line in imports.splitlines():
            with contextlib.suppress(ImportError):
                exec(line, space)
        return [[name, space[name]] for name in names if name in space]

    def script(self, code: str, most: list[float]) -> None:
        _, (stdin, stdout), _, _ = socket.recv_fds(self.channel, 1, 2)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(min(stdin, stdout), max(stdin, stdout) + 1)
        sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8")
        try:
            self._run("__main__", code, most)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()

    def _run(self, name: str, code: str, most: list[float]) -> dict[str, Any]:
        module = sys.modules[name] = types.ModuleType(name)
        memory_mb, cpu_s = most
        kernel.limit_program(self.own_bytes, int(memory_mb), cpu_s)
        exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        given = [*args, *kwargs.values()]
        before = [codec.encode(a, self.to_ref) if type(a) in MUTABLE else None for a in given]
        result = function(*args, **kwargs)
        after = [None if b is None or codec.encode(a, self.to_ref) == b else [a] for a, b in zip(given, before)]
        return [result, after if any(after) else None]


def describe(error: BaseException) -> str:
    name = type(error).__name__
    text = str(error)[:MESSAGE] if isinstance(error, Exception) else ""
    return text if getattr(builtins, name, None) is type(error) else f"{name}: {text}"
