"""The Berkeley Function Calling Leaderboard, single turn: which functions are called, with which arguments, and when
none is.

    tasks.load("bfcl")                                    embedded hard cases, written by hand
    tasks.load("bfcl:source=hub")                         the real problems; or --data-dir with the leaderboard's files
    tasks.load("bfcl:source=hub,categories=live")         all, live, non_live, or names such as simple+parallel

A completion's calls are compared with the possible answers (`rules`); nothing is executed. The reward is 1 or 0, and
the tier names the fault. Where no function fits, any attempted call is wrong, even an unreadable one, which the
leaderboard would let pass. In live_relevance any readable call of an offered function is correct.

Evaluation only: every problem is in split "test". Left out: Java and JavaScript, multi-turn and agentic categories, and
executing calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codechat.core.errors import ConfigError, nearest
from codechat.tasks.base import Message, Problem, Score, check_split, shuffled
from codechat.tasks.bfcl import rules, sources, syntax
from codechat.tasks.bfcl.sources import CATEGORIES, LIVE, NON_LIVE
from codechat.tasks.funcall.staircase import ABSENT
from codechat.text import chat

TIERS = ("no_call", "unreadable", "needless_call", "wrong_count", *rules.FAULTS, "full")
GROUPS = {"all": CATEGORIES, "live": LIVE, "non_live": NON_LIVE}
NO_CALL = "I have no function for that."


class BfclTask:
    """source: "embedded", "hub" or a path. categories: a name of GROUPS or CATEGORIES, or several joined by +.
    tools_style: how prompts list the tools (`chat.tools_prompt`). ledger: counts of the rows."""

    name = "bfcl"
    tiers = TIERS
    max_reward = 1.0
    grouped_by = "category"

    def __init__(
        self, source: str = "embedded", categories: str | Sequence[str] = "all", tools_style: str = "compact"
    ) -> None:
        self._rows, self.ledger = sources.read(str(source), categories_of(categories), tools_style)

    def problems(self, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
        """At most `limit` problems in the seed's order. ConfigError for any split but test."""
        check_split(split, ("test",), "task bfcl, which is for evaluation only")
        return shuffled(self._rows, limit, seed)

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def score(self, problem: Problem, completion: str) -> Score:
        calls = syntax.calls_of(completion)
        tier = tier_of(calls, problem.gold)
        forms = [call.form for call in calls]
        return Score(
            float(tier == "full"), tier, {"calls": len(calls), "form": forms[0] if forms else None}, tier == "full"
        )

    def gold(self, problem: Problem) -> str:
        """The first acceptable value of every required argument."""
        gold = problem.gold
        if gold["expect"] == "none":
            return NO_CALL
        if gold["expect"] == "any":
            return chat.format_call(next(iter(gold["tools"])), {})
        return "\n".join(
            chat.format_call(answer["name"], _arguments(answer, gold["tools"][answer["name"]]))
            for answer in gold["answers"]
        )


def categories_of(words: str | Sequence[str]) -> tuple[str, ...]:
    """The categories that `words` name. ConfigError for an unknown one."""
    names = words.strip("[]").replace("+", ",").split(",") if isinstance(words, str) else list(words)
    for name in names:
        if name not in GROUPS and name not in CATEGORIES:
            raise ConfigError(f"category {name!r} of bfcl is unknown{nearest(str(name), [*GROUPS, *CATEGORIES])}")
    return tuple(dict.fromkeys(category for name in names for category in GROUPS.get(name, (name,))))


def tier_of(calls: Sequence[chat.Call], gold: Mapping[str, Any]) -> str:
    """The rung of TIERS that a completion's calls reach."""
    if gold["expect"] == "none":
        return "needless_call" if calls else "full"
    if not calls:
        return "no_call"
    if any(call.form not in syntax.FORMS_READ for call in calls):
        return "unreadable"
    if gold["expect"] == "any":
        return "full" if all(call.name in gold["tools"] for call in calls) else "wrong_name"
    made = [(call.name, call.arguments) for call in calls]
    return rules.fault_of_calls(made, gold["answers"], gold["tools"]) or "full"


def _arguments(answer: Mapping[str, Any], tool: Mapping[str, Any]) -> dict[str, Any]:
    due = {key: ways for key, ways in answer["arguments"].items() if ABSENT not in ways or key in tool["required"]}
    return {key: _written(_first(ways), tool["properties"][key]) for key, ways in due.items()}


def _first(ways: Sequence[Any]) -> Any:
    return next((way for way in ways if way != ABSENT), ABSENT)


def _written(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value as a call has it: in objects each key lists its own acceptable values."""
    kind = rules.kind_of(schema)
    if kind is dict and isinstance(value, Mapping):
        return {key: _first(ways) for key, ways in value.items() if ABSENT not in ways}
    if kind is list and rules.kind_of(schema.get("items")) is dict and isinstance(value, list):
        return [_written(item, schema["items"]) for item in value]
    return value
