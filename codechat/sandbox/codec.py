"""Plain data <-> bytes, for values that cross between a judge and an untrusted program.

Tagged JSON. Decoding builds exact builtin types only (and Decimal, Fraction, deque), so no method of the sender runs in
the receiver: an int subclass with a lying `__eq__` arrives as the int it holds. `to_ref` may turn an object that is not
data into a number, and `from_ref` turns the number into the receiver's object.

null, booleans, strings, small ints, finite floats and lists stand for themselves; all else is {"tag": payload}. Cycles
and nesting beyond MAX_DEPTH raise CodecError.
"""

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 100
SMALL = 1 << 63  # larger ints are sent in hexadecimal: Python limits decimal text, which json uses, to 4300 digits
NAMED = {
    t.__name__: t
    for t in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None))
}

PLAIN = frozenset({type(None), bool, str})

ToRef = Callable[[Any], dict[str, int]]
FromRef = Callable[[int], Any]


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


# Built once: json.dumps and json.loads with options build theirs in every call. NaN and Infinity are looked up in a table that is empty.
ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False).encode
DECODER = json.JSONDecoder(parse_constant=dict[str, Any]().__getitem__).decode

# ---- encode


def encode(value: Any, to_ref: ToRef) -> bytes:
    """Bytes of a value. `to_ref(object)` gives {"h": number} for an object that is not data, or raises CodecError."""
    return ENCODER(_pack(value, to_ref, 0)).encode()


def _pack(v: Any, to_ref: ToRef, depth: int) -> Any:
    kind = type(v)
    if kind in PLAIN:
        return v
    if kind is int:
        return v if -SMALL <= v < SMALL else {"i": hex(v)}
    if kind is float:
        return v if math.isfinite(v) else {"f": repr(v)}
    if depth >= MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    if kind is list:
        return [_pack(x, to_ref, depth + 1) for x in v]
    if (packer := PACKERS.get(kind)) is None:
        base = next((b for b in kind.__mro__ if b in BASES), None)
        if base is None:
            return to_ref(v)
        # A namedtuple, Counter, IntEnum or numpy float is sent as the data it holds.
        return _pack(BASES[base](v), to_ref, depth)
    return packer(v, lambda x: _pack(x, to_ref, depth + 1))


Pack = Callable[[Any], Any]
PACKERS: dict[type, Callable[[Any, Pack], Any]] = {
    tuple: lambda v, p: {"t": [p(x) for x in v]},
    dict: lambda v, p: {"d": [[p(k), p(x)] for k, x in v.items()]},
    set: lambda v, p: {"s": [p(x) for x in v]},
    frozenset: lambda v, p: {"z": [p(x) for x in v]},
    bytes: lambda v, p: {"b": v.decode("latin-1")},
    bytearray: lambda v, p: {"a": v.decode("latin-1")},
    complex: lambda v, p: {"c": [p(v.real), p(v.imag)]},
    range: lambda v, p: {"r": [p(v.start), p(v.stop), p(v.step)]},
    Decimal: lambda v, p: {"D": str(v)},
    Fraction: lambda v, p: {"Q": [p(v.numerator), p(v.denominator)]},
    deque: lambda v, p: {"q": [[p(x) for x in v], v.maxlen]},
    type(...): lambda v, p: {"e": 0},
}
BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, str: str.__str__, bytes: lambda v: bytes(bytearray(v)),
    list: lambda v: list(list.__iter__(v)), tuple: lambda v: tuple(tuple.__iter__(v)),
    dict: lambda v: dict(dict.items(v)), set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)), complex: lambda v: complex(v.real, v.imag),
    deque: lambda v: deque(deque.__iter__(v), v.maxlen), Decimal: Decimal, Fraction: Fraction,
}  # fmt: skip


def pack_name(value: Any) -> dict[str, str] | None:
    """{"y": name} of a builtin type that may be sent as itself, or None."""
    name = getattr(value, "__name__", None) if isinstance(value, type) else None
    return {"y": name} if name in NAMED and NAMED[name] is value else None


# ---- decode


def decode(data: bytes | bytearray, from_ref: FromRef) -> Any:
    """The value of bytes. References become `from_ref(number)`. CodecError for anything that `encode` does not write."""
    try:
        return _unpack(DECODER(data.decode("ascii")), from_ref, 0)
    # Bad UTF-8 or JSON, a list as a key, an unknown name, a zero denominator, an int with too many digits, deep nesting.
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
        raise CodecError(f"not a value: {type(error).__name__}") from None


def _unpack(j: Any, from_ref: FromRef, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    if type(j) is list:
        return [_unpack(x, from_ref, depth + 1) for x in j]
    if type(j) is not dict:
        return j
    if len(j) != 1:
        raise CodecError("an object must have one tag")
    ((tag, body),) = j.items()
    if tag == "h":
        return from_ref(_typed(int, body))
    return UNPACKERS[tag](body, lambda x: _unpack(x, from_ref, depth + 1))


def _typed(kind: type, x: Any) -> Any:
    if type(x) is not kind:
        raise CodecError(f"a {kind.__name__} is required")
    return x


def _list(x: Any, length: int | None = None) -> list[Any]:
    if type(x) is not list or (length is not None and len(x) != length):
        raise CodecError(f"a list is required, of length {length or 'any'}")
    return x


UNPACKERS: dict[str, Callable[[Any, Pack], Any]] = {
    "t": lambda b, u: tuple([u(x) for x in _list(b)]),
    "d": lambda b, u: {u(k): u(x) for k, x in (_list(pair, 2) for pair in _list(b))},
    "s": lambda b, u: {u(x) for x in _list(b)},
    "z": lambda b, u: frozenset([u(x) for x in _list(b)]),
    "b": lambda b, u: _typed(str, b).encode("latin-1"),
    "a": lambda b, u: bytearray(_typed(str, b).encode("latin-1")),
    "c": lambda b, u: complex(*(_typed(float, u(x)) for x in _list(b, 2))),
    "r": lambda b, u: range(*(_typed(int, u(x)) for x in _list(b, 3))),
    "i": lambda b, u: int(_typed(str, b), 16),
    "f": lambda b, u: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[b],
    "D": lambda b, u: Decimal(_typed(str, b)),
    "Q": lambda b, u: Fraction(*(_typed(int, u(x)) for x in _list(b, 2))),
    "q": lambda b, u: deque([u(x) for x in _list(_list(b, 2)[0])], b[1] if b[1] is None else _typed(int, b[1])),
    "y": lambda b, u: NAMED[b],
    "e": lambda b, u: ...,
}


# ---- messages over a socket: four bytes of length, then the bytes

HEADER = struct.Struct("!I")
TRUSTED = 256 << 20  # most bytes of one message between trusted processes

NEXT, END = b"+", b"-"  # a judge's requests to its zygote: the next process; end the one that was given
FULL = b"!"  # the zygote's answer to END where it has ended the process itself, which had written too much


class WireError(ConnectionError):
    """The other side has closed, or broke the protocol."""


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(HEADER.pack(len(data)) + data)


def receive(sock: socket.socket, limit: int) -> bytearray:
    """The next message. WireError at the end of the stream, and for more than `limit` bytes, before they are read."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    if length > limit:
        raise WireError(f"a message of {length} bytes; at most {limit} are taken")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise WireError("the other side has gone")
        data += part
    return data
