"""Messages between judge and program: exact data, and errors for any other bytes."""

import json
import random
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from codechat_lab.sandbox import codec, seccomp
from codechat_lab.sandbox.codec import CodecError, decode

EXACT = {
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
    type(None),
    Decimal,
    Fraction,
    deque,
    type,
    type(...),
    Counter,
    OrderedDict,
    defaultdict,
    slice,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    date,
    time,
    datetime,
    timedelta,
    timezone,
}
SAMPLE = [
    1,
    -(2**80),
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    float("nan"),
    "a\ud800",
    b"\xff",
    (1, [2]),
    {"k": {1, 2}},
    frozenset({3}),
    2j,
    range(3),
    Decimal("1.5"),
    Fraction(1, 3),
    deque([1], 2),
    None,
    True,
    ...,
    bytearray(b"x"),
    {(1,): {}},
    Counter("aab"),
    OrderedDict(b=1, a=2),
    defaultdict(int, a=1),
    slice(1, None, 2),
    {"k": 1}.items(),
    date(2024, 2, 29),
    time(1, 2, fold=1),
    datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=2))),
    timedelta(-1, 3),
]


class Mark:
    """The object of a reference."""


def refer(tag: str, number: Any) -> Any:
    if tag != "h" or type(number) is not int or not 0 <= number < 100:
        raise CodecError("no such object")
    return Mark()


def encode(value: Any, number: int | None = None) -> bytes:
    """number: of the reference to any object that is not data; none = an error."""

    def to_ref(other: Any) -> dict[str, int]:
        if number is None:
            raise CodecError("not data")
        return {"h": number}

    return codec.encode(value, to_ref)


def kinds(value: Any) -> set[type]:
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    inner = parts if isinstance(value, (list, tuple, set, frozenset, deque, dict)) else ()
    if hasattr(value, "_fields"):
        value = tuple(value)
    return {type(value)}.union(*map(kinds, inner))


def taken(data: bytes) -> bool:
    """Whether the decoder takes the bytes; anything but a value or CodecError fails the test."""
    try:
        value = decode(data, refer)
    except CodecError:
        return False
    assert kinds(value) <= EXACT | {Mark}
    return True


def damage(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        choice = rng.random()
        if choice < 0.3 and out:
            out[min(at, len(out) - 1)] = rng.choice(
                b'[]{}",:0123456789.eE-tdszbacriDQqyhkf\\ \xff\x00'
            )
        elif choice < 0.6:
            out[at:at] = rng.choice(
                [b'{"h": 1}', b'{"i": "0x1"}', b"1e999", b"NaN", b"[", b"}", b"9" * 30]
            )
        elif choice < 0.8:
            del out[at : at + rng.randint(1, 9)]
        else:
            other = rng.randrange(len(out) + 1)
            out[at:at] = out[other : other + rng.randint(1, 20)]
    return bytes(out)


def grown(rng: random.Random, depth: int = 0) -> Any:
    """JSON in the codec's shapes with wrong contents."""
    if depth > 3 or rng.random() < 0.3:
        odd = [None, True, 0, -1, 2**63, 0.5, 1e308, [], {}]
        return rng.choice(
            [*odd, "", "0x", "-0x1f", "nan", "int", "1E+99999", "sNaN", "\ud800", "\xff\u0100"]
        )
    if rng.random() < 0.3:
        return [grown(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    tags = [*codec.UNPACKERS, "h", "k", "x", "?", "__class__"]
    return {rng.choice(tags): grown(rng, depth + 1) for _ in range(1 if rng.random() < 0.9 else 2)}


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_are_values_or_errors(count: int) -> None:
    rng = random.Random(count)
    whole = encode(SAMPLE)
    good = 0
    for i in range(count):
        message = whole if i % 3 == 0 else json.dumps(grown(rng)).encode()
        good += taken(message if i % 3 == 1 else damage(message, rng))
    assert 0.05 < good / count < 0.8, "it must meet both"


def test_samples_round_trip() -> None:
    back = decode(encode(SAMPLE), refer)
    assert repr(back) == repr(SAMPLE)
    assert kinds(back) == kinds(SAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        '{"t": 1}',
        '{"t": []',
        "{}",
        '{"t": [], "d": []}',
        '{"d": [[1]]}',
        '{"d": [[[], 1]]}',
        '{"s": [[]]}',
        '{"r": [1, 2]}',
        '{"r": [1, 2, 0]}',
        '{"r": [1, true, 1]}',
        '{"f": "1.0"}',
        '{"Q": [1, 0]}',
        '{"i": "zz"}',
        '{"D": "x"}',
        '{"y": "eval"}',
        '{"b": "\\u0100"}',
        '{"n": ["P", ["class"], [1]]}',
        '{"n": ["P", ["x"], []]}',
        '{"n": ["P y", ["x"], [1]]}',
        '{"m": [1, []]}',
        '{"v": ["pop", []]}',
        '{"T": ["date", 0, 0, 0]}',
        '{"T": ["timedelta", 1e300]}',
        '{"T": ["eval", 1]}',
        '{"l": [1]}',
        '{"k": [[[], 1]]}',
        '{"p": ["os", "system"]}',
        '{"h": "1"}',
        '{"h": 100}',
        "NaN",
        "[Infinity]",
        "\xff",
        "",
        "9" * 5000,
        "[" * 102 + "]" * 102,
        "[" * 10**6,
    ],
)
def test_invalid_messages_are_errors(text: str) -> None:
    with pytest.raises(CodecError):
        decode(text.encode("latin-1"), refer)


def test_a_namedtuple_arrives_with_its_name_and_fields_and_nothing_else() -> None:
    class Lying(namedtuple("Point", "x y")):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("asked")

        __hash__ = None

    back = decode(encode(Lying(1, [2])), refer)
    assert back == (1, [2])
    assert back.x == 1
    assert back._fields == ("x", "y")
    assert type(back).__mro__[1:] == (tuple, object)
    assert repr(back) == "Lying(x=1, y=[2])"


def test_methods_of_lying_subclasses_are_not_called() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("asked")

        __hash__ = int.__hash__
        __index__ = __int__ = __repr__ = __eq__

    class Lists(list):
        def __iter__(self) -> Any:
            raise AssertionError("asked")

    value = decode(encode([Liar(3), Lists([Liar(4)])]), refer)
    assert value == [3, [4]]
    assert kinds(value) == {list, int}


def test_an_object_that_is_not_data_needs_a_reference() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (object(), cyclic, print):
        with pytest.raises(CodecError):
            encode(value)
    assert type(decode(encode([object()], 5), refer)[0]) is Mark


def test_long_messages_are_errors_before_they_are_read() -> None:
    a, b = socket.socketpair()
    with a, b:
        codec.send(a, b"x" * 100)
        assert codec.receive(b, 100) == b"x" * 100
        codec.send(a, b"x" * 101)
        with pytest.raises(codec.WireError, match="101 .*100"):
            codec.receive(b, 100)
        a.close()
        with pytest.raises(codec.WireError):
            b.recv(200) and codec.receive(b, 100)


def run_filter(
    steps: bytes,
    number: int,
    args: tuple[int, ...] = (),
    arch: int = seccomp.ARCH_X86_64,
) -> int:
    """The filter's result, by the rules of the kernel's interpreter."""
    data = struct.pack("iIQ6Q", number, arch, 0, *(args + (0,) * 6)[:6])
    program = [struct.unpack_from("HBBI", steps, at) for at in range(0, len(steps), 8)]
    at = value = 0
    while True:
        code, yes, no, k = program[at]
        if code == seccomp.LOAD:
            value = struct.unpack_from("I", data, k)[0]
        elif code == seccomp.RETURN:
            return k
        else:
            holds = value == k if code == seccomp.EQUAL else value >= k
            at += yes if holds else no
        at += 1


def both(number: int, *args: int) -> bool:
    """Whether the two filters of a program's process that sees itself as 7 let a call through."""
    programs = (seccomp.shared_program(), seccomp.own_program(7))
    return all(run_filter(p, number, args) == seccomp.ALLOW for p in programs)


def test_the_filter_allows_listed_calls_and_no_others() -> None:
    allowed = {n for n in range(1100) if both(n)}
    conditional = {seccomp.FCNTL_NR, seccomp.PRLIMIT}  # their first argument 0 is allowed
    assert allowed == {*seccomp.ALWAYS.values()} | conditional
    assert len({*seccomp.ALWAYS.values()}) == len(seccomp.ALWAYS), "a number is listed twice"


def test_the_filter_lets_clone_make_threads_only() -> None:
    assert both(seccomp.CLONE, 0x3D0F00)
    assert not both(seccomp.CLONE, 0x11)
    assert not both(seccomp.CLONE, 0x3D0F00 | 1 << 32)
    assert not both(seccomp.CLONE, 0x3D0F00 | 0x10000000), "a user namespace"


def test_the_filter_lets_signals_reach_the_process_itself_only() -> None:
    assert both(seccomp.KILL_NR, 7, 9)
    assert not both(seccomp.KILL_NR, 1, 9)
    assert not both(seccomp.TGKILL, 1, 1, 9)


def test_the_filter_lets_unconnected_pairs_of_sockets_through_only() -> None:
    assert both(seccomp.SOCKETPAIR, 1)
    assert not both(seccomp.SOCKETPAIR, 2)
    assert not both(41, 2), "socket"


def test_the_filter_lets_a_process_limit_itself_only() -> None:
    assert both(seccomp.PRLIMIT, 0)
    assert not both(seccomp.PRLIMIT, 5)


def test_the_filter_lets_harmless_requests_to_devices_and_files_through_only() -> None:
    assert both(seccomp.IOCTL_NR, 3, 0x5401)
    assert not both(seccomp.IOCTL_NR, 3, 0x5412), "TIOCSTI types into a terminal"
    assert both(seccomp.FCNTL_NR, 3, 1)
    assert not both(seccomp.FCNTL_NR, 3, 8), "F_SETOWN"


def test_the_filter_pretends_to_change_times_but_for_the_present() -> None:
    shared = seccomp.shared_program()
    assert run_filter(shared, seccomp.UTIMENSAT, (3, 1, 0)) == seccomp.ERRNO | 1, "the present time"
    for times in (1, 1 << 32):
        assert run_filter(shared, seccomp.UTIMENSAT, (3, 1, times)) == seccomp.ERRNO, (
            "nothing is done"
        )


def test_the_filter_says_that_the_kernel_has_no_clone3() -> None:
    assert run_filter(seccomp.shared_program(), seccomp.CLONE3) == seccomp.ERRNO | 38, (
        "the C library then asks clone"
    )


def test_the_filter_stops_calls_of_other_architectures() -> None:
    shared = seccomp.shared_program()
    assert run_filter(shared, 0, arch=0x40000003) == seccomp.KILL, "32-bit calls have other numbers"
    assert run_filter(shared, 0x40000000) == seccomp.ERRNO | 1, "x32 calls"
