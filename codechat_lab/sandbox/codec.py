"""Plain data <-> bytes, for values that cross between a judge and an untrusted program.

Tagged JSON. Decoding builds exact types of the standard library only (builtin ones, those of
collections and datetime, Decimal, Fraction), so no method of the sender runs in the receiver:
an int subclass with a lying `__eq__` arrives as the int it holds. A namedtuple arrives as a new
one with the same fields. `to_ref` may turn an object that is not data into {tag: JSON}, a tag
of REFERENCES, and `from_ref(tag, JSON)` turns that into the receiver's object.

null, booleans, strings, small ints, finite floats and lists stand for themselves; all else is
{"tag": payload}. Cycles and nesting beyond MAX_DEPTH raise CodecError."""

import functools
import importlib
import json
import keyword
import math
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from time import struct_time
from typing import Any, NamedTuple

MAX_DEPTH = 100
SMALL = (
    1 << 63
    # larger ints are sent in hexadecimal: Python limits decimal text, which json uses, to 4300 digits
)
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
# Classes of the library whose values are what `str` writes of them. They are imported where a
# value arrives.
SPELLED = frozenset(
    """zoneinfo.ZoneInfo pathlib.PosixPath pathlib.PurePosixPath pathlib.PureWindowsPath uuid.UUID ipaddress.IPv4Address
    ipaddress.IPv6Address ipaddress.IPv4Network ipaddress.IPv6Network""".split()
)

# Objects of classes derived from these may be more than the data that they hold.
HOLDERS = (list, dict, set, frozenset, tuple, deque, Counter, OrderedDict, defaultdict)
PLAIN = frozenset({type(None), bool, str})


class Reference(StrEnum):
    """Tags of what stays where it is. Only `to_ref` and `from_ref` know them."""

    OBJECT = "h"  # an object of the program
    DATA = "x"  # one that descends from a list, dict, set or tuple: with the data that it holds
    GENERATOR = "g"  # the program's; of the test any iterator
    COROUTINE = "w"
    ASYNC_GENERATOR = "G"
    FUNCTION = "j"  # a function of the test
    LIBRARY = "p"  # a function or class of the standard library, by its name


REFERENCES = frozenset(Reference)


class Ability(StrEnum):
    """What an object of a program can do, as far as a handle forwards it."""

    AWAIT = "a"
    CALL = "c"
    ASYNC_WITH = "e"
    ASYNC_ITERATE = "g"
    ITERATE = "i"
    LENGTH = "l"
    NEXT = "n"
    GET_ITEM = "t"
    SET_ITEM = "u"
    DELETE_ITEM = "d"
    WITH = "w"


ToRef = Callable[[Any], dict[str, Any]]
FromRef = Callable[[str, Any], Any]
Kept = Callable[[Any, Callable[[], Any]], Any]
Inner = Callable[[Any], Any]  # packs or unpacks the parts of a value


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


class Form(NamedTuple):
    """How the values of a type cross, as {tag: JSON}. Tags are single letters, since a message
    has a longest size."""

    tag: str
    pack: Callable[[Any, Inner], Any]  # value -> JSON
    unpack: Callable[[Any, Inner], Any]  # JSON, which may be forged -> value


# Built once: json.dumps and json.loads with options build theirs in every call. NaN and
# Infinity are looked up in a table that is empty.
ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False).encode
DECODER = json.JSONDecoder(parse_constant=dict[str, Any]().__getitem__).decode

# ---- encode


def encode(value: Any, to_ref: ToRef, kept: Kept = lambda value, data: None) -> bytes:
    """Bytes of a value. `to_ref(object)` gives {tag: JSON} for an object that is not data, or
    raises CodecError.

    kept(object, data) gives {tag: JSON} for an object of a derived class that is more than its
    data, whose JSON `data()` gives; None where it is no more."""
    return ENCODER(_pack(value, to_ref, kept, 0)).encode()


def _pack(v: Any, to_ref: ToRef, kept: Kept, depth: int) -> Any:
    # By exact type throughout: `isinstance` would believe what an object says of its class.
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
        return [_pack(x, to_ref, kept, depth + 1) for x in v]
    if issubclass(kind, datetime | time) and not _is_zone(type(v.tzinfo)):
        return to_ref(v)
    form = FORMS.get(kind)
    if form is not None:
        return {form.tag: form.pack(v, lambda part: _pack(part, to_ref, kept, depth + 1))}
    return kept(v, lambda: _pack_derived(v, to_ref, kept, depth)) or _pack_derived(
        v, to_ref, kept, depth
    )


def _pack_derived(v: Any, to_ref: ToRef, kept: Kept, depth: int) -> Any:
    """An object of another class: the data that it holds, if it descends from a class whose
    values are data."""
    kind = type(v)
    if issubclass(kind, tuple):
        fields = _fields(kind)
        if fields:
            return {
                "n": [
                    kind.__name__,
                    fields,
                    [_pack(x, to_ref, kept, depth + 1) for x in tuple.__iter__(v)],
                ]
            }
    name = _spelled(kind)
    if name:
        return {"V": [name, str(v)]}
    base = next((b for b in kind.__mro__ if b in BASES), None)
    if base is None:
        return pack_name(v) or to_ref(v)
    # An IntEnum, a numpy float or a class derived from dict is sent as the data it holds.
    return _pack(BASES[base](v), to_ref, kept, depth)


def _is_zone(kind: type) -> bool:
    """Whether a time zone of this class is data: none, a fixed offset, or one of the library's
    by its name. The rules of another are code."""
    return kind in (type(None), timezone) or bool(_spelled(kind))


def _spelled(kind: type) -> str:
    """Its name if it is one of SPELLED, else ""."""
    name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    return name if name in SPELLED else ""


def _fields(kind: type) -> list[str]:
    """Names of a namedtuple's fields; none for another tuple, and none where `namedtuple` would
    refuse the names."""
    fields = getattr(kind, "_fields", None)
    if type(fields) is not tuple or not kind.__name__.isidentifier():
        return []
    return list(fields) if all(map(_is_field, fields)) else []


def _is_field(name: Any) -> bool:
    return (
        type(name) is str
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and not name.startswith("_")
    )


# An unbound method of the base class reads what the object holds: the class may define another
# that lies.
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
    datetime: lambda v: datetime(
        v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo
    ),
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


def _pack_items(v: Iterable[Any], inner: Inner) -> list[Any]:
    return [inner(x) for x in v]


def _pack_pairs(v: dict[Any, Any], inner: Inner) -> list[Any]:
    return [[inner(k), inner(x)] for k, x in v.items()]


def _pack_clock(v: time | datetime, inner: Inner) -> list[Any]:
    return [v.hour, v.minute, v.second, v.microsecond, inner(v.tzinfo), v.fold]


def _pack_bounds(v: range | slice, inner: Inner) -> list[Any]:
    return [inner(v.start), inner(v.stop), inner(v.step)]


# ---- decode


def decode(data: bytes | bytearray, from_ref: FromRef) -> Any:
    """The value of bytes. References become `from_ref(tag, JSON)`. CodecError for anything that
    `encode` does not write."""
    try:
        return _unpack(DECODER(data.decode("ascii")), from_ref, 0)
    # Bad UTF-8 or JSON, a list as a key, an unknown name, a zero denominator, an int with too
    # many digits, deep nesting.
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        MemoryError,
        RecursionError,
    ) as error:
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
    if tag == Reference.DATA:
        *known, data = _list(body)
        return from_ref(tag, [*known, _unpack(data, from_ref, depth + 1)])
    if tag in REFERENCES:
        return from_ref(tag, body)
    return UNPACKERS[tag](body, lambda part: _unpack(part, from_ref, depth + 1))


# The checks below matter: a constructor that takes a forged part, such as a bool as an int,
# would make a value that no honest sender writes.


def _typed(kind: type, x: Any) -> Any:
    if type(x) is not kind:
        raise CodecError(f"got a {type(x).__name__}; expected a {kind.__name__}")
    return x


def _list(x: Any, length: int | None = None) -> list[Any]:
    if type(x) is not list or (length is not None and len(x) != length):
        raise CodecError(f"expected a list of length {length or 'any'}")
    return x


def _items(body: Any, inner: Inner) -> list[Any]:
    return [inner(x) for x in _list(body)]


def _parts(kind: type, body: Any, count: int, inner: Inner) -> list[Any]:
    """`count` parts, all exactly of one type."""
    return [_typed(kind, inner(x)) for x in _list(body, count)]


def _dict(body: Any, inner: Inner) -> dict[Any, Any]:
    pairs = [_list(pair, 2) for pair in _list(body)]
    return {inner(k): inner(x) for k, x in pairs}


@functools.lru_cache(maxsize=64)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    return namedtuple(name, fields)  # which checks the names


def _named(body: Any, inner: Inner) -> tuple[Any, ...]:
    name, fields, values = _list(body, 3)
    names = tuple(_typed(str, field) for field in _list(fields))
    return _namedtuple(_typed(str, name), names)(*_items(values, inner))


def _default(body: Any, inner: Inner) -> defaultdict[Any, Any]:
    factory, pairs = _list(body, 2)
    return defaultdict(inner(factory), _dict(pairs, inner))


def _view(body: Any, inner: Inner) -> Any:
    kind, pairs = _list(body, 2)
    whole = _dict(pairs, inner)
    return {"keys": whole.keys, "values": whole.values, "items": whole.items}[_typed(str, kind)]()


def _deque(body: Any, inner: Inner) -> deque[Any]:
    items, longest = _list(body, 2)
    return deque(_items(items, inner), longest if longest is None else _typed(int, longest))


MOMENTS: dict[str, Callable[..., Any]] = {
    "date": date,
    "timedelta": timedelta,
    "time": lambda *clock: time(*clock[:5], fold=clock[5]),
    "datetime": lambda *clock: datetime(*clock[:8], fold=clock[8]),
    "timezone": timezone,
    "struct_time": lambda parts, offset, zone: struct_time(
        parts, {"tm_gmtoff": offset, "tm_zone": zone}
    ),
}


def _moment(body: Any, inner: Inner) -> Any:
    kind, *numbers = _list(body)
    return MOMENTS[_typed(str, kind)](*[inner(number) for number in numbers])


def _from_spelling(body: Any, inner: Inner) -> Any:
    name, text = _list(body, 2)
    if name not in SPELLED:  # before anything is imported
        raise CodecError("an unknown class")
    module, _, kind = name.partition(".")
    return getattr(importlib.import_module(module), kind)(_typed(str, text))


def _latin(body: Any, inner: Inner) -> bytes:
    return _typed(str, body).encode("latin-1")


# ---- the table of types

FORMS: dict[type, Form] = {
    tuple: Form("t", _pack_items, lambda body, inner: tuple(_items(body, inner))),
    set: Form("s", _pack_items, lambda body, inner: set(_items(body, inner))),
    frozenset: Form("z", _pack_items, lambda body, inner: frozenset(_items(body, inner))),
    deque: Form("q", lambda v, inner: [_pack_items(v, inner), v.maxlen], _deque),
    dict: Form("d", _pack_pairs, _dict),
    Counter: Form("k", _pack_pairs, lambda body, inner: Counter(_dict(body, inner))),
    OrderedDict: Form("o", _pack_pairs, lambda body, inner: OrderedDict(_dict(body, inner))),
    defaultdict: Form(
        "m", lambda v, inner: [inner(v.default_factory), _pack_pairs(v, inner)], _default
    ),
    type({}.keys()): Form("v", lambda v, inner: ["keys", [[inner(k), None] for k in v]], _view),
    type({}.values()): Form(
        "v", lambda v, inner: ["values", [[i, inner(x)] for i, x in enumerate(v)]], _view
    ),
    type({}.items()): Form(
        "v", lambda v, inner: ["items", [[inner(k), inner(x)] for k, x in v]], _view
    ),
    bytes: Form("b", lambda v, inner: v.decode("latin-1"), _latin),
    bytearray: Form(
        "a",
        lambda v, inner: v.decode("latin-1"),
        lambda body, inner: bytearray(_latin(body, inner)),
    ),
    complex: Form(
        "c",
        lambda v, inner: [inner(v.real), inner(v.imag)],
        lambda b, u: complex(*_parts(float, b, 2, u)),
    ),
    range: Form("r", _pack_bounds, lambda body, inner: range(*_parts(int, body, 3, inner))),
    slice: Form("l", _pack_bounds, lambda body, inner: slice(*_items(_list(body, 3), inner))),
    Decimal: Form("D", lambda v, inner: str(v), lambda body, inner: Decimal(_typed(str, body))),
    Fraction: Form(
        "Q",
        lambda v, inner: [inner(v.numerator), inner(v.denominator)],
        lambda body, inner: Fraction(*_parts(int, body, 2, inner)),
    ),
    type(...): Form("e", lambda v, inner: 0, lambda body, inner: ...),
    date: Form("T", lambda v, inner: ["date", v.year, v.month, v.day], _moment),
    time: Form("T", lambda v, inner: ["time", *_pack_clock(v, inner)], _moment),
    datetime: Form(
        "T", lambda v, inner: ["datetime", v.year, v.month, v.day, *_pack_clock(v, inner)], _moment
    ),
    timedelta: Form(
        "T", lambda v, inner: ["timedelta", v.days, v.seconds, v.microseconds], _moment
    ),
    timezone: Form(
        "T", lambda v, inner: ["timezone", *_pack_items(v.__getinitargs__(), inner)], _moment
    ),
    struct_time: Form(
        "T",
        lambda v, inner: [
            "struct_time",
            _pack_items(v, inner),
            inner(v.tm_gmtoff),
            inner(v.tm_zone),
        ],
        _moment,
    ),
}
UNPACKERS: dict[str, Callable[[Any, Inner], Any]] = {
    form.tag: form.unpack for form in FORMS.values()
}
UNPACKERS |= {
    "i": lambda body, inner: int(_typed(str, body), 16),
    "f": lambda body, inner: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[body],
    "n": _named,
    "V": _from_spelling,
    "y": lambda body, inner: NAMED[body],
}


class Register:
    """Objects by number, in the order in which they came. It keeps them: the id of an object
    that is gone is used again, and a stranger would get its number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> number

    def number(self, value: Any) -> int:
        """The number of an object, which is added if it is new."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number


# ---- messages over a socket: four bytes of length, then the bytes

HEADER = struct.Struct("!I")
TRUSTED = 256 << 20  # most bytes of one message between trusted processes

# a judge's requests to its zygote: the next process; end the one that was given
NEXT, END = (
    b"+",
    b"-",
)
# the zygote's answer to END where it has ended the process itself, which had written too much
FULL = b"!"


class WireError(ConnectionError):
    """The other side has closed, or broke the protocol."""


def send(sock: socket.SocketType, data: bytes) -> None:
    sock.sendall(HEADER.pack(len(data)) + data)


def receive(sock: socket.SocketType, limit: int) -> bytearray:
    """The next message. WireError at the end of the stream, and for more than `limit` bytes,
    before they are read."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    if length > limit:  # a program may announce four gigabytes
        raise WireError(f"a message of {length} bytes; at most {limit} are taken")
    return _exactly(sock, length)


def _exactly(sock: socket.SocketType, count: int) -> bytearray:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise WireError("the other side has gone")
        data += part
    return data
