"""Plain data <-> bytes, for values that cross between a judge and an untrusted program.

Tagged JSON. Decoding builds exact types of the standard library only (builtin ones, those of collections and
datetime, Decimal, Fraction), so no method of the sender runs in the receiver: an int subclass with a lying `__eq__`
arrives as the int it holds. A namedtuple arrives as a new one with the same fields. `to_ref` may turn an object
that is not data into {tag: JSON}, a tag of REFERENCES, and `from_ref(tag, JSON)` turns that into the receiver's
object.

null, booleans, strings, small ints, finite floats and lists stand for themselves; all else is {"tag": payload}. Cycles
and nesting beyond MAX_DEPTH raise CodecError.
"""

import functools
import importlib
import json
import keyword
import math
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from time import struct_time
from typing import Any

MAX_DEPTH = 100
SMALL = 1 << 63  # larger ints are sent in hexadecimal: Python limits decimal text, which json uses, to 4300 digits
NAMED = {
    t.__name__: t
    for t in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        dict,
        set,
        frozenset,
        range,
        slice,
        type(None),
        object,
        Counter,
        OrderedDict,
        defaultdict,
        deque,
        date,
        time,
        datetime,
        timedelta,
        timezone,
        Decimal,
        Fraction,
    )
}
# Classes of the library whose values are what `str` writes of them. They are imported where a value arrives.
SPELLED = frozenset(
    """zoneinfo.ZoneInfo pathlib.PosixPath pathlib.PurePosixPath pathlib.PureWindowsPath uuid.UUID ipaddress.IPv4Address
    ipaddress.IPv6Address ipaddress.IPv4Network ipaddress.IPv6Network""".split()
)

PLAIN = frozenset({type(None), bool, str})

REFERENCES = frozenset("hjgwGp")  # tags that only `from_ref` knows
ToRef = Callable[[Any], dict[str, Any]]
FromRef = Callable[[str, Any], Any]


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


# Built once: json.dumps and json.loads with options build theirs in every call. NaN and Infinity are looked up in a
# table that is empty.
ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False).encode
DECODER = json.JSONDecoder(parse_constant=dict[str, Any]().__getitem__).decode

# ---- encode


def encode(value: Any, to_ref: ToRef) -> bytes:
    """Bytes of a value. `to_ref(object)` gives {tag: JSON} for an object that is not data, or raises CodecError."""
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
    inner: Pack = lambda x: _pack(x, to_ref, depth + 1)  # noqa: E731
    if isinstance(v, datetime | time) and type(v.tzinfo) not in (type(None), timezone) and not _spelled(type(v.tzinfo)):
        return to_ref(v)  # the rules of its time zone are not data
    packer = PACKERS.get(kind)
    if packer is not None:
        return packer(v, inner)
    if issubclass(kind, tuple) and (fields := _fields(kind)):
        return {"n": [kind.__name__, fields, [inner(x) for x in tuple.__iter__(v)]]}
    name = _spelled(kind)
    if name:
        return {"V": [name, str(v)]}
    base = next((b for b in kind.__mro__ if b in BASES), None)
    if base is None:
        return pack_name(v) or to_ref(v)
    # An IntEnum, a numpy float or a class derived from dict is sent as the data it holds.
    return _pack(BASES[base](v), to_ref, depth)


def _spelled(kind: type) -> str:
    """Its name if it is one of SPELLED, else ""."""
    name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    return name if name in SPELLED else ""


def _fields(kind: type) -> list[str]:
    """Names of a namedtuple's fields; none for another tuple."""
    fields = getattr(kind, "_fields", None)
    names = [kind.__name__, *fields] if type(fields) is tuple and all(type(f) is str for f in fields) else []
    usable = all(name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_") for name in names[1:])
    return names[1:] if names and usable and names[0].isidentifier() else []


def _pairs(v: dict[Any, Any], p: "Pack") -> list[Any]:
    return [[p(k), p(x)] for k, x in dict.items(v)]


Pack = Callable[[Any], Any]


def _clock(v: time | datetime, p: Pack) -> list[Any]:
    return [v.hour, v.minute, v.second, v.microsecond, p(v.tzinfo), v.fold]


PACKERS: dict[type, Callable[[Any, Pack], Any]] = {
    tuple: lambda v, p: {"t": [p(x) for x in v]},
    dict: lambda v, p: {"d": _pairs(v, p)},
    Counter: lambda v, p: {"k": _pairs(v, p)},
    OrderedDict: lambda v, p: {"o": [[p(k), p(x)] for k, x in v.items()]},
    defaultdict: lambda v, p: {"m": [p(v.default_factory), _pairs(v, p)]},
    slice: lambda v, p: {"l": [p(v.start), p(v.stop), p(v.step)]},
    type({}.keys()): lambda v, p: {"v": ["keys", [[p(k), None] for k in v]]},
    type({}.values()): lambda v, p: {"v": ["values", [[i, p(x)] for i, x in enumerate(v)]]},
    type({}.items()): lambda v, p: {"v": ["items", [[p(k), p(x)] for k, x in v]]},
    struct_time: lambda v, p: {"T": ["struct_time", [p(x) for x in v], p(v.tm_gmtoff), p(v.tm_zone)]},
    date: lambda v, p: {"T": ["date", v.year, v.month, v.day]},
    time: lambda v, p: {"T": ["time", *_clock(v, p)]},
    datetime: lambda v, p: {"T": ["datetime", v.year, v.month, v.day, *_clock(v, p)]},
    timedelta: lambda v, p: {"T": ["timedelta", v.days, v.seconds, v.microseconds]},
    timezone: lambda v, p: {"T": ["timezone", *map(p, v.__getinitargs__())]},
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
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda v: bytes(bytearray(v)),
    list: lambda v: list(list.__iter__(v)),
    tuple: lambda v: tuple(tuple.__iter__(v)),
    Counter: lambda v: Counter(dict(dict.items(v))),
    OrderedDict: lambda v: OrderedDict(OrderedDict.items(v)),
    defaultdict: lambda v: defaultdict(None, dict(dict.items(v))),
    datetime: lambda v: datetime(v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    date: lambda v: date(v.year, v.month, v.day),
    timedelta: lambda v: timedelta(v.days, v.seconds, v.microseconds),
    dict: lambda v: dict(dict.items(v)),
    set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    complex: lambda v: complex(v.real, v.imag),
    deque: lambda v: deque(deque.__iter__(v), v.maxlen),
    Decimal: Decimal,
    Fraction: Fraction,
}


def pack_name(value: Any) -> dict[str, str] | None:
    """{"y": name} of a builtin type that may be sent as itself, or None."""
    name = getattr(value, "__name__", None) if isinstance(value, type) else None
    return {"y": name} if name in NAMED and NAMED[name] is value else None


# ---- decode


def decode(data: bytes | bytearray, from_ref: FromRef) -> Any:
    """The value of bytes. References become `from_ref(tag, JSON)`. CodecError for anything that `encode` does not
    write."""
    try:
        return _unpack(DECODER(data.decode("ascii")), from_ref, 0)
    # Bad UTF-8 or JSON, a list as a key, an unknown name, a zero denominator, an int with too many digits, deep
    # nesting.
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
    if tag in REFERENCES:
        return from_ref(tag, body)
    return UNPACKERS[tag](body, lambda x: _unpack(x, from_ref, depth + 1))


def _typed(kind: type, x: Any) -> Any:
    if type(x) is not kind:
        raise CodecError(f"a {kind.__name__} is required")
    return x


def _list(x: Any, length: int | None = None) -> list[Any]:
    if type(x) is not list or (length is not None and len(x) != length):
        raise CodecError(f"a list is required, of length {length or 'any'}")
    return x


def _dict(body: Any, u: Pack) -> dict[Any, Any]:
    pairs = [_list(pair, 2) for pair in _list(body)]
    return {u(k): u(x) for k, x in pairs}


@functools.lru_cache(maxsize=64)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    return namedtuple(name, fields)  # which checks the names


def _named(body: Any, u: Pack) -> tuple[Any, ...]:
    name, fields, values = _list(body, 3)
    names = tuple(_typed(str, field) for field in _list(fields))
    return _namedtuple(_typed(str, name), names)(*[u(x) for x in _list(values)])


def _default(body: Any, u: Pack) -> defaultdict[Any, Any]:
    factory, pairs = _list(body, 2)
    return defaultdict(u(factory), _dict(pairs, u))


def _view(body: Any, u: Pack) -> Any:
    kind, pairs = _list(body, 2)
    whole = _dict(pairs, u)
    return {"keys": whole.keys, "values": whole.values, "items": whole.items}[_typed(str, kind)]()


MOMENTS: dict[str, Callable[..., Any]] = {
    "date": date,
    "timedelta": timedelta,
    "time": lambda *clock: time(*clock[:5], fold=clock[5]),
    "datetime": lambda *clock: datetime(*clock[:8], fold=clock[8]),
    "timezone": timezone,
    "struct_time": lambda parts, offset, zone: struct_time(parts, {"tm_gmtoff": offset, "tm_zone": zone}),
}


def _moment(body: Any, u: Pack) -> Any:
    kind, *numbers = _list(body)
    return MOMENTS[_typed(str, kind)](*[u(number) for number in numbers])


def _from_spelling(body: Any, u: Pack) -> Any:
    name, text = _list(body, 2)
    if name not in SPELLED:
        raise CodecError("an unknown class")
    module, _, kind = name.partition(".")
    return getattr(importlib.import_module(module), kind)(_typed(str, text))


UNPACKERS: dict[str, Callable[[Any, Pack], Any]] = {
    "t": lambda b, u: tuple([u(x) for x in _list(b)]),
    "d": _dict,
    "k": lambda b, u: Counter(_dict(b, u)),
    "o": lambda b, u: OrderedDict(_dict(b, u)),
    "m": _default,
    "n": _named,
    "v": _view,
    "T": _moment,
    "V": _from_spelling,
    "l": lambda b, u: slice(*(u(x) for x in _list(b, 3))),
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
