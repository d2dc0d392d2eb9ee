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

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.tasks.base import Score
from codechat.text import chat

# What the first call names: no call at all, no readable name, a name that the prompt does not offer, another offered one, the right one.
NAMED = ("no_call", "unreadable", "not_offered", "other", "right")
TIERS = ("no_tag", "bad_json", "no_name", "wrong_name", "name_only", "partial", "full")
# An acceptable value of a BFCL argument: the argument may be omitted.
ABSENT = ""


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """Rewards of the rungs, in [0, 1]. ConfigError unless they rise."""

    no_tag: float = opt(0.0, "reward without any call")
    bad_json: float = opt(0.15, "reward of an unreadable call")
    no_name: float = opt(0.30, "reward of a call without a function name")
    not_offered: float = opt(0.20, "reward of a call to a function that the prompt does not offer")
    wrong_name: float = opt(0.35, "reward of a call to another function that it offers")
    name_only: float = opt(0.55, "reward of the correct function without a correct argument")
    full: float = opt(1.0, "reward of an exact call, and of no call where none is correct")
    cap: float = opt(0.99, "largest reward of anything less than a full match")
    extra_penalty: float = opt(0.1, "share of the argument credit lost per unexpected argument")
    least_credit: float = opt(0.5, "share of the argument credit that unexpected arguments cannot take")
    trailing: Literal["rung", "cap"] = opt(
        "rung",
        "what follows the call costs: rung = text or a call, a rung; cap = a call, what is above the cap; text, 0",
    )
    trailing_credit: float = opt(0.5, "share of the argument credit left where trailing costs a rung")
    tolerance: float = opt(1e-6, "floats match within this, relative above 1 and absolute below")
    integer_tolerance: float = opt(0.0, "the same for a float where an integer is expected; 0 = equal values only")

    def __post_init__(self) -> None:
        rungs = [self.no_tag, self.bad_json, self.no_name, self.wrong_name]
        rungs += [self.name_only, self.cap, self.full]
        if sorted(set(rungs)) != rungs or rungs[0] < 0:
            raise ConfigError(f"staircase rewards {rungs}; they must rise strictly from 0 or more; reorder them")
        if not self.no_tag <= self.not_offered <= self.wrong_name:
            raise ConfigError(
                f"not_offered {self.not_offered}; it must be from no_tag {self.no_tag} to wrong_name {self.wrong_name}"
            )
        shares = {name: getattr(self, name) for name in ("extra_penalty", "least_credit", "trailing_credit")}
        if not all(0 <= share <= 1 for share in shares.values()):
            raise ConfigError(f"{shares}; each must be in [0, 1]")
        if min(self.tolerance, self.integer_tolerance) < 0:
            raise ConfigError(
                f"tolerance {self.tolerance}, integer_tolerance {self.integer_tolerance}; neither may be negative"
            )

    def arguments_reward(self, f: float) -> float:
        """Reward of the correct name with argument credit f in [0, 1), below the cap."""
        return min(self.cap, self.name_only + (self.full - self.name_only) * f)


STAIRCASES = {
    "ours": Staircase(),
    "published": Staircase(not_offered=0.35, trailing="cap", integer_tolerance=1e-6),
}
DEFAULT = STAIRCASES["ours"]


def score_call(
    text: str, gold: Mapping[str, Any] | None, staircase: Staircase = DEFAULT, offered: Collection[str] = ()
) -> Score:
    """Score the first call of a completion's text. Never raises.

    gold: {"name", "arguments"}, optionally with "acceptable": {argument: [values]} where "" means that the argument may
    be omitted (BFCL). None: no call is correct, and any call, readable or not, is a wrong name of reward 0. offered:
    names of the functions in the prompt; empty = unknown, and then every name counts as offered. parts: calls, form,
    trailing (whether anything follows the first call), named (one of NAMED), with a correct name matched, expected, extra,
    f."""
    calls = chat.parse_calls(text)
    trailing = len(calls) > 1 or bool(calls and calls[0].after)
    parts: dict[str, Any] = {"calls": len(calls), "form": calls[0].form if calls else None, "trailing": trailing}
    parts["named"] = _named(calls[0] if calls else None, gold, offered)
    if gold is None:
        silent = not calls
        return Score(staircase.full if silent else 0.0, "full" if silent else "wrong_name", parts, silent)
    if not calls:
        return Score(staircase.no_tag, "no_tag", parts, False)
    tier = _failed_before_arguments(calls[0], gold["name"])
    if not tier:
        return _score_arguments(calls[0].arguments, gold, parts, staircase)
    rung = "not_offered" if parts["named"] == "not_offered" else tier
    return Score(_reward(rung, trailing, staircase), tier, parts, False)


def _named(call: chat.Call | None, gold: Mapping[str, Any] | None, offered: Collection[str]) -> str:
    if call is None:
        return "no_call"
    if _failed_before_arguments(call, "") != "wrong_name":
        return "unreadable"
    name = call.name.strip()
    if gold is not None and name == gold["name"].strip():
        return "right"
    return "other" if not offered or name in offered else "not_offered"


def _reward(rung: str, trailing: bool, staircase: Staircase) -> float:
    """Reward of a call without argument credit, a rung lower where something follows it."""
    below = {"name_only": "wrong_name", "wrong_name": "no_name"}.get(rung, "bad_json")
    reward = getattr(staircase, rung)
    return min(reward, getattr(staircase, below)) if trailing and staircase.trailing == "rung" else reward


def _failed_before_arguments(call: chat.Call, name: str) -> str | None:
    """The tier of a call that fails before its arguments, or None. Blanks around a name are ignored."""
    if call.form == "bad_json":
        return "bad_json"
    if not isinstance(call.name, str) or not call.name.strip():
        return "no_name"
    return None if call.name.strip() == name.strip() else "wrong_name"


def _score_arguments(arguments: Any, gold: Mapping[str, Any], parts: dict[str, Any], staircase: Staircase) -> Score:
    matched, expected, extra = count_matches(arguments, gold, staircase)
    penalty = max(staircase.least_credit, 1 - staircase.extra_penalty * extra)
    f = (matched / expected if expected else 1.0) * penalty
    if not isinstance(arguments, Mapping):
        f = 0.0
    parts = {**parts, "matched": matched, "expected": expected, "extra": extra, "f": f}
    marked_down = staircase.trailing == "rung" and parts["trailing"]
    alone = not marked_down and parts["calls"] == 1
    if isinstance(arguments, Mapping) and matched == expected and not extra and alone:
        return Score(staircase.full, "full", parts, True)
    if f == 0:
        return Score(_reward("name_only", parts["trailing"], staircase), "name_only", parts, False)
    reward = staircase.arguments_reward(f * staircase.trailing_credit if marked_down else f)
    return Score(reward, "partial", parts, False)


def count_matches(arguments: Any, gold: Mapping[str, Any], staircase: Staircase = DEFAULT) -> tuple[int, int, int]:
    """(matched, expected, extra). An argument that may be omitted is expected only where it was given."""
    given = arguments if isinstance(arguments, Mapping) else {}
    if "acceptable" in gold:
        ways, fits = gold["acceptable"], accepts
        due = [k for k in ways if k in given or ABSENT not in ways[k]]
    else:
        ways, fits = {k: [v] for k, v in gold["arguments"].items()}, values_match
        due = list(ways)
    matched = sum(k in given and any(fits(way, given[k], staircase) for way in ways[k]) for k in due)
    return matched, len(due), sum(k not in ways for k in given)


def accepts(expected: Any, value: Any, staircase: Staircase = DEFAULT) -> bool:
    """`values_match`, but an object in `expected` lists the acceptable values of each of its keys (BFCL)."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(accepts(w, v, staircase) for w, v in zip(expected, value, strict=True))
        )
    if not isinstance(expected, Mapping):
        return values_match(expected, value, staircase)
    if not isinstance(value, Mapping) or not value.keys() <= expected.keys():
        return False
    options = {k: ways_of(v) for k, v in expected.items()}
    return all(
        any(accepts(way, value[k], staircase) for way in ways) if k in value else ABSENT in ways
        for k, ways in options.items()
    )


def ways_of(value: Any) -> list[Any]:
    """The values that BFCL accepts: its list, a bare value, or (for an empty list) omission."""
    return (value or [ABSENT]) if isinstance(value, list) else [value]


def values_match(expected: Any, value: Any, staircase: Staircase = DEFAULT) -> bool:
    """Equality of JSON values by the rules of the module docstring. Recurses only as deep as `expected`."""
    if isinstance(expected, str):
        return isinstance(value, str) and expected.strip().casefold() == value.strip().casefold()
    if isinstance(expected, bool) or expected is None:
        return value is expected
    if isinstance(expected, (int, float)):
        return _numbers_match(expected, value, staircase)
    if isinstance(expected, Mapping):
        return (
            isinstance(value, Mapping)
            and expected.keys() == value.keys()
            and all(values_match(expected[k], value[k], staircase) for k in expected)
        )
    return (
        isinstance(value, list)
        and len(value) == len(expected)
        and all(values_match(w, v, staircase) for w, v in zip(expected, value, strict=True))
    )


def _numbers_match(expected: int | float, value: Any, staircase: Staircase) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    tolerance = staircase.integer_tolerance if isinstance(expected, int) else staircase.tolerance
    if isinstance(expected, int) and (isinstance(value, int) or not tolerance):
        return expected == value  # exact, also between an integer and a float
    try:  # NaN and infinities fail the comparison, whichever side they are on
        return abs(expected - value) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # an integer with more digits than a float can hold
        return False
