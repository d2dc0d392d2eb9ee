"""The judge's view of a program: requests over its socket, and handles for objects that are not plain data.

A handle forwards attributes, calls, iteration, length, indexing and text. It never forwards `==`, arithmetic, ordering or
`in`: the other operand may be the value that the test expects, and the program would only have to agree.
"""

import builtins
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

from codechat.sandbox import codec

REFERENCES = 100_000  # most objects of one program that a judge keeps


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
        self.handles: dict[int, Handle] = {}

    def request(self, op: str, *args: Any) -> Any:
        """The program's answer. An exception of the program is raised here, as the type that `raised` gives."""
        self.number += 1
        message = codec.encode([self.number, op, *args], self._to_ref)
        try:
            codec.send(self.channel, message)
            answer = codec.decode(codec.receive(self.channel, self.longest), self._from_ref)
        except (OSError, codec.CodecError) as error:
            self.lose(str(error))
        match answer:
            case [number, "ok", value] if number == self.number:
                return value
            case [number, "raise", str(name), str(text)] if number == self.number:
                raise raised(name, text)
        self.lose("an answer of the wrong shape")

    def lose(self, why: str) -> Any:
        self.lost = self.lost or why
        raise Lost(self.lost)

    def _to_ref(self, value: Any) -> dict[str, Any]:
        if type(value) is Handle:
            if value._Handle__session is not self:
                raise codec.CodecError("an object of a process that has ended")
            return {"h": value._Handle__number}
        if name := codec.pack_name(value):
            return name
        raise codec.CodecError(f"a {type(value).__name__} of the test cannot be sent to a program")

    def _from_ref(self, number: int) -> Any:
        if number not in self.handles:
            if len(self.handles) >= REFERENCES:
                raise codec.CodecError("too many objects")
            self.handles[number] = Handle(self, number)
        return self.handles[number]


def raised(name: str, text: str) -> Exception:
    """The exception to raise in the judge for an exception of a program."""
    if name in AS_ITSELF:
        return getattr(builtins, name)(text[:1000])
    return ProgramError(f"{name[:100]}: {text[:1000]}")


class Handle:
    """Stands for an object of a program. Class, `==`, hashing and arithmetic are the handle's own."""

    __slots__ = ("__session", "__number")

    def __init__(self, session: Session, number: int) -> None:
        object.__setattr__(self, "_Handle__session", session)
        object.__setattr__(self, "_Handle__number", number)

    def __ask(self, op: str, *args: Any, kind: type = object) -> Any:
        """The answer about the object; Lost where it is of another kind than required."""
        answer = self.__session.request(op, self, *args)
        return answer if kind in (object, type(answer)) else self.__session.lose(f"no {kind.__name__} for {op}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in PREDICATES:
            raise AttributeError(f"{name} of a program's object is not looked up")
        return self.__ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            raise AttributeError(f"{name} of a program's object is not set")
        self.__ask("set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        match self.__ask("call", args, kwargs):
            case [result, after]:
                write_back([*args, *kwargs.values()], after)
                return result
        self.__session.lose("an answer of the wrong shape")

    def __iter__(self) -> Iterator[Any]:
        return self.__ask("iter", kind=Handle).__each()

    def __each(self) -> Iterator[Any]:
        while item := self.__ask("next", kind=list):
            yield item[0]

    def __len__(self) -> int:
        return self.__ask("len", kind=int)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask("item", key)

    def __bool__(self) -> bool:
        return self.__ask("bool") is True

    def __str__(self) -> str:
        return self.__ask("str", kind=str)

    def __repr__(self) -> str:
        return self.__ask("repr", kind=str)


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
