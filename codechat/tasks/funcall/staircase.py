"""The staircase: a graded reward for one function call, and its exact match.

    no_tag 0, bad_json 0.15, no_name 0.3, wrong_name 0.35, name_only 0.55, partial 0.55 + 0.45 f, full 1

f = matched / expected arguments, times max(0.5, 1 - 0.1 x extra keys). Without expected arguments f = 1 before that
penalty. A wrong name that the prompt does not offer earns 0.2. The first call counts. Whatever follows it, text or
another call, costs a rung: with a correct name f is halved, or without a matched argument the reward is that of
wrong_name; below that it is that of the next lower rung. Of a repeated key the last value counts, as in any JSON reader.
Where no call is correct, an answer without a call scores 1 and any call scores 0.

`STAIRCASES` names two sets of values. "ours" is the above. "published" is what the original system's staircase was taken
to be here, which its versions and its bugs are reproduced with: every wrong name earns 0.35, text after the call is free,
further calls cap the score at 0.99, and integers have the tolerance of floats.

Two values match if both are equal numbers, both are strings that are equal up to case and surrounding blanks, or both
are lists or objects whose items match. A number that is expected as an integer needs exactly that value, written as an
integer or as a float (3 or 3.0: JSON has one kind of number); one that is expected as a float has a tolerance. Types are
never mixed: true is not 1 and "5" is not 5, because the called function would not accept one for the other. NaN and
infinities match nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from codechat.tasks.base import Score
from codechat.text import chat

# What the first call names: no call at all, no readable name, a name that the prompt does not offer, another offered one, the right one.
NAMED = ("no_call", "unreadable", "not_offered", "other", "right")
TIERS = ("no_tag", "bad_json", "no_name", "wrong_name", "name_only", "partial", "full")
EXTRA_PENALTY, LEAST_CREDIT = 0.1, 0.5  # argument credit lost per unexpected argument, and what is left at least
TRAILING_CREDIT = 0.5  # argument credit left where something follows the call and that costs a rung
TOLERANCE = 1e-6  # floats match within this, relative above 1 and absolute below


class Staircase(NamedTuple):
    """Rewards of the rungs. cap: largest reward of anything less than a full match. trailing: what follows the call costs
    a "rung"; or, where that is a call, what is above the "cap". integer_tolerance: as TOLERANCE, for a float where an
    integer is expected."""

    no_tag: float = 0.0
    bad_json: float = 0.15
    no_name: float = 0.30
    not_offered: float = 0.20
    wrong_name: float = 0.35
    name_only: float = 0.55
    cap: float = 0.99
    full: float = 1.0
    trailing: str = "rung"
    integer_tolerance: float = 0.0


STAIRCASES = {
    "ours": Staircase(),
    "published": Staircase(not_offered=0.35, trailing="cap", integer_tolerance=TOLERANCE),
}
DEFAULT = STAIRCASES["ours"]


def score_call(
    text: str, gold: Mapping[str, Any] | None, staircase: Staircase = DEFAULT, offered: Collection[str] = ()
) -> Score:
    """Score the first call of a completion's text. Never raises.

    gold: {"name", "arguments"}. None: no call is correct, and any call, readable or not, is a wrong name of reward 0.
    offered: names of the functions in the prompt; empty = unknown, and then every name counts as offered. parts: calls,
    form, trailing (whether anything follows the first call), named (one of NAMED), with a correct name matched, expected,
    extra, f."""
    calls = chat.parse_calls(text)
    trailing = len(calls) > 1 or bool(calls and calls[0].after)
    parts: dict[str, Any] = {"calls": len(calls), "form": calls[0].form if calls else None, "trailing": trailing}
    tier = _unreadable(calls)
    parts["named"] = _named(tier, calls, gold, offered)
    if gold is None:
        return Score(0.0 if calls else staircase.full, "wrong_name" if calls else "full", parts, not calls)
    if parts["named"] == "right":
        return _score_arguments(calls[0].arguments, gold["arguments"], parts, staircase)
    rung = "not_offered" if parts["named"] == "not_offered" else tier or "wrong_name"
    return Score(_reward(rung, trailing, staircase), tier or "wrong_name", parts, False)


def _unreadable(calls: Sequence[chat.Call]) -> str:
    """The tier of a first call without a name; empty where it has one."""
    if not calls or calls[0].form == "bad_json":
        return "bad_json" if calls else "no_tag"
    return "" if isinstance(calls[0].name, str) and calls[0].name.strip() else "no_name"


def _named(
    unreadable: str, calls: Sequence[chat.Call], gold: Mapping[str, Any] | None, offered: Collection[str]
) -> str:
    """One of NAMED. Blanks around a name are ignored."""
    if unreadable:
        return "unreadable" if calls else "no_call"
    name = calls[0].name.strip()
    if gold is not None and name == gold["name"].strip():
        return "right"
    return "other" if not offered or name in offered else "not_offered"


def _reward(rung: str, trailing: bool, staircase: Staircase) -> float:
    """Reward of a call without argument credit, a rung lower where something follows it."""
    below = {"name_only": "wrong_name", "wrong_name": "no_name"}.get(rung, "bad_json")
    reward = getattr(staircase, rung)
    return min(reward, getattr(staircase, below)) if trailing and staircase.trailing == "rung" else reward


def _score_arguments(
    given: Mapping[str, Any] | None, expected: Mapping[str, Any], parts: dict[str, Any], staircase: Staircase
) -> Score:
    """The score of a call with the correct name; given: None for arguments that cannot be read."""
    readable, given = given is not None, given or {}
    matched = sum(key in given and values_match(v, given[key], staircase) for key, v in expected.items())
    extra = len(given.keys() - expected.keys())
    f = matched / len(expected) if expected else 1.0
    f = f * max(LEAST_CREDIT, 1 - EXTRA_PENALTY * extra) if readable else 0.0
    parts = {**parts, "matched": matched, "expected": len(expected), "extra": extra, "f": f}
    marked_down = staircase.trailing == "rung" and parts["trailing"]
    if readable and matched == len(expected) and not extra and not marked_down and parts["calls"] == 1:
        return Score(staircase.full, "full", parts, True)
    if f == 0:
        return Score(_reward("name_only", parts["trailing"], staircase), "name_only", parts, False)
    f = f * TRAILING_CREDIT if marked_down else f
    reward = min(staircase.cap, staircase.name_only + (staircase.full - staircase.name_only) * f)
    return Score(reward, "partial", parts, False)


def values_match(expected: Any, value: Any, staircase: Staircase = DEFAULT) -> bool:
    """Equality of JSON values by the rules of the module docstring. Recurses only as deep as `expected`."""
    if isinstance(expected, str):
        return isinstance(value, str) and expected.strip().casefold() == value.strip().casefold()
    if isinstance(expected, bool) or expected is None:
        return value is expected
    if isinstance(expected, (int, float)):
        return _numbers_match(expected, value, staircase)
    if isinstance(expected, Mapping):
        same = isinstance(value, Mapping) and expected.keys() == value.keys()
        return same and all(values_match(expected[k], value[k], staircase) for k in expected)
    same = isinstance(value, list) and len(value) == len(expected)
    return same and all(values_match(w, v, staircase) for w, v in zip(expected, value))


def _numbers_match(expected: int | float, value: Any, staircase: Staircase) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    tolerance = staircase.integer_tolerance if isinstance(expected, int) else TOLERANCE
    if isinstance(expected, int) and (isinstance(value, int) or not tolerance):
        return expected == value  # exact, also between an integer and a float
    try:  # NaN and infinities fail the comparison, whichever side they are on
        return abs(expected - value) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer with more digits than a float can hold
        return False
