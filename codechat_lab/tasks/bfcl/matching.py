"""Whether calls match possible answers: the type and value rules of the Berkeley Function
Calling Leaderboard.

An answer is {"name", "arguments": {argument: [acceptable values]}}; "" among the values means
that the argument may be omitted. A call must have the answer's name, every required argument
and no unknown one, and each value must have the declared type and equal an acceptable one:

- an int is a float, a float never an int, a bool no number; inside a list only as the answer
itself has it; - a value of another type is accepted if the answer's first value has that type
(a variable's name, null), letter by
  letter;
- strings are compared without case, blanks and ,./-_*^ and with ' read as ", at any depth; - a
tuple is a list; lists match in order; in an object each key lists its own acceptable values; -
an omission may be written as "" for a string and [] for a list. Several calls match in any
order.

Arguments of Java and JavaScript are texts, which `literals` reads first.

As gorilla's ast_checker (BFCL v4), except: calls are matched exactly, not greedily; a bool is no
number inside objects and lists either; strings in nested lists are compared like others.
`tools/bfcl_agreement.py` counts the differences."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from codechat_lab.tasks.bfcl.literals import PYTHON, value_of

Row = dict[str, Any]
# name -> {"properties", "required", "language"} of the functions on offer
Tools = Mapping[str, Mapping[str, Any]]
# An acceptable value of an argument: it may be omitted.
ABSENT = ""
# From worst to best.
FAULTS = ("wrong_name", "missing_argument", "unexpected_argument", "wrong_type", "wrong_value")
# The leaderboard's names of types in its three languages, and JSON schema's.
KINDS: dict[str, type] = {
    "string": str,
    "any": str,
    "integer": int,
    "float": float,
    "number": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "object": dict,
    "String": str,
    "char": str,
    "byte": int,
    "short": int,
    "long": int,
    "Bigint": int,
    "double": float,
    "Boolean": bool,
    "Array": list,
    "ArrayList": list,
    "HashMap": dict,
}
_IGNORED = re.compile(r"[ ,./\-_*^]")


class Missed(NamedTuple):
    """An answer that no call gives: the places of the answer and of the nearest call, and that
    call's fault."""

    answer: int
    call: int
    fault: str


def fault_of_calls(
    calls: Sequence[tuple[str, Row]], answers: Sequence[Row], tools: Tools
) -> str | None:
    """None if calls and possible answers match one to one; else "wrong_count" or the one of
    FAULTS that prevents it."""
    if len(calls) != len(answers):
        return "wrong_count"
    missed = missed_answer(calls, answers, tools)
    return missed.fault if missed else None


def missed_answer(
    calls: Sequence[tuple[str, Row]], answers: Sequence[Row], tools: Tools
) -> Missed | None:
    """The first answer without a call, beside the best of the calls that are left, which tells
    what is wrong. None if calls and answers match one to one. As many calls as answers."""
    faults = [_faults_of(calls, answer, tools) for answer in answers]
    matched: dict[int, int] = {}  # call -> answer
    alone = [i for i in range(len(answers)) if not _match(i, faults, matched, set())]
    if not alone:
        return None
    left = [
        Missed(alone[0], call, fault)
        for call, fault in enumerate(faults[alone[0]])
        if fault and call not in matched
    ]
    return max(left, key=lambda missed: FAULTS.index(missed.fault))


def _faults_of(calls: Sequence[tuple[str, Row]], answer: Row, tools: Tools) -> list[str | None]:
    """The fault of each call, were it meant for this answer."""
    return [fault_of_call(name, arguments, answer, tools) for name, arguments in calls]


def _match(
    answer: int,
    faults: Sequence[Sequence[str | None]],
    matched: dict[int, int],
    tried: set[int],
) -> bool:
    """Assign a call to the answer, moving earlier answers to other calls if needed (augmenting
    paths)."""
    for k, fault in enumerate(faults[answer]):
        if fault is None and k not in tried:
            tried.add(k)
            if k not in matched or _match(matched[k], faults, matched, tried):
                matched[k] = answer
                return True
    return False


def fault_of_call(name: str, arguments: Row, answer: Mapping[str, Any], tools: Tools) -> str | None:
    """The first fault of a call, or None where it matches the answer."""
    if name != answer["name"]:
        return "wrong_name"
    tool = tools.get(name, {})
    ways_of = answer["arguments"]
    if any(key not in arguments for key in tool.get("required") or ()):
        return "missing_argument"
    for key, value in arguments.items():
        fault = fault_of_argument(key, value, ways_of, tool)
        if fault:
            return fault
    omitted = [ways for key, ways in ways_of.items() if key not in arguments]
    return "missing_argument" if any(ABSENT not in ways for ways in omitted) else None


def fault_of_argument(
    key: str, value: Any, ways_of: Mapping[str, Any], tool: Mapping[str, Any]
) -> str | None:
    """One of the last three of FAULTS, or None. ways_of: the acceptable values of each argument."""
    properties = tool.get("properties") or {}
    language = tool.get("language", PYTHON)
    if key not in properties or key not in ways_of:
        return "unexpected_argument"
    if language != PYTHON:
        if not isinstance(value, str):
            return "wrong_type"
        value = value_of(value, properties[key], language)
    return fault_of_value(value, ways_of[key], properties[key])


def fault_of_value(value: Any, ways: Sequence[Any], schema: Mapping[str, Any]) -> str | None:
    """ "wrong_type", "wrong_value" or None. ways: the acceptable values. schema: of the
    argument."""
    kind = kind_of(schema)
    of_items = kind_of(schema.get("items")) if kind is list else None
    first = _first_type(ways)
    if kind is None or type(value) is kind or (kind is float and type(value) is int):
        if of_items and not any(_items_fit(value, way, of_items) for way in ways):
            return "wrong_type"
    elif type(value) is not first:
        return "wrong_type"
    fits: Callable[[Any, Any], bool] = same
    if kind is not None and first not in (kind, None):  # a variable's name: letter by letter
        fits = partial(same, spelled=str)
    elif kind is dict:
        fits = _object_fits
    elif kind is list:
        ways = [[] if way == ABSENT else way for way in ways]
        fits = _objects_fit if of_items is dict else same
    return None if any(fits(value, way) for way in ways) else "wrong_value"


def kind_of(schema: Any) -> type | None:
    """The declared type, or None where the schema declares no known type."""
    named = schema.get("type") if isinstance(schema, Mapping) else None
    return KINDS.get(named) if isinstance(named, str) else None


def _first_type(ways: Sequence[Any]) -> type | None:
    return next((type(way) for way in ways if way != ABSENT), None)


def _items_fit(value: Sequence[Any], way: Any, kind: type) -> bool:
    """Each item has the declared type, or that of the first item of the acceptable list."""
    return not isinstance(way, list) or all(
        type(item) in (kind, _first_type(way)) for item in value
    )


def standardised(text: str) -> str:
    """The text for comparison: "April 1,2024" becomes "april 12024"."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


def same(value: Any, expected: Any, spelled: Callable[[str], str] = standardised) -> bool:
    """Equality of JSON values, strings after `spelled`. Recurses only as deep as `expected`."""
    if isinstance(expected, str):
        return isinstance(value, str) and spelled(value) == spelled(expected)
    if isinstance(expected, list):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(same(v, w, spelled) for v, w in zip(value, expected, strict=True))
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or value.keys() != expected.keys():
            return False
        return all(same(value[k], expected[k], spelled) for k in expected)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _object_fits(value: Mapping[str, Any], way: Any) -> bool:
    if (
        not isinstance(value, Mapping)
        or not isinstance(way, Mapping)
        or not value.keys() <= way.keys()
    ):
        return False
    return all(_entry_fits(value, key, ways) for key, ways in way.items())


def _entry_fits(value: Mapping[str, Any], key: str, ways: Any) -> bool:
    if not isinstance(ways, list):  # a damaged answer
        return False
    return _is_acceptable(value[key], ways) if key in value else ABSENT in ways


def _is_acceptable(value: Any, ways: Sequence[Any]) -> bool:
    return any(same(value, way) for way in ways)


def _objects_fit(value: Sequence[Any], way: Any) -> bool:
    """A list of objects, each with one of the acceptable list."""
    return isinstance(way, list) and len(value) == len(way) and all(map(_object_fits, value, way))
