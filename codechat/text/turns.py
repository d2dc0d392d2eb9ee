"""Conversations with calls and results apart, as APIs and public rows have them, as messages of the chat format: training and serving render alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from codechat.core.errors import DataError
from codechat.text.tool_calls import CALL_TAG, tools_prompt


@dataclass
class Turn:
    """calls: canonical texts. ids: one per call, or none. result_of: the id of the call that a function's result answers."""

    role: str
    content: str
    calls: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    result_of: str | None = None

    def message(self) -> dict[str, str]:
        """Prose, then calls, one per line."""
        content = self.content.strip() if self.calls else self.content
        return {
            "role": self.role,
            "content": "\n".join([*([content] if content or not self.calls else []), *self.calls]),
        }


class Misplaced(DataError):
    """Calls and results that do not belong together. reason: for reports about data; turn: the one at fault."""

    def __init__(self, reason: str, turn: Turn) -> None:
        super().__init__(reason)
        self.reason, self.turn = reason, turn


def messages_of_turns(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], style: str) -> list[dict[str, str]]:
    """Messages, results in the order of their calls, tools listed after the system's own words. Misplaced; DataError for tools without a listing."""
    turns = in_call_order(turns)
    if tools:
        system, rest = (turns[0].content, turns[1:]) if turns[0].role == "system" else ("", turns)
        turns = [Turn("system", with_tools(system, tools, style)), *rest]
    return [turn.message() for turn in turns]


def with_tools(system: str, tools: Sequence[Mapping[str, Any]], style: str) -> str:
    """A system text with the list of the tools after it."""
    return "\n".join(filter(None, (system, tools_prompt(tools, style) if tools else "")))


def in_call_order(turns: Sequence[Turn]) -> list[Turn]:
    """Results in the order of their calls, found by id where results name one; Misplaced where ids do not match one to one."""
    ordered: list[Turn] = []
    while len(ordered) < len(turns):
        turn = turns[len(ordered)]
        results = list(takewhile(lambda other: other.role == "function", turns[len(ordered) + 1 :]))
        ordered += [turn, *_by_id(turn, results, goes_on=len(ordered) + 1 + len(results) < len(turns))]
    return ordered


def _by_id(turn: Turn, results: list[Turn], goes_on: bool) -> list[Turn]:
    if len(set(turn.ids)) < len(turn.ids):
        raise Misplaced("unreadable_call", turn)
    no_call = not turn.calls and CALL_TAG not in turn.content
    named = [r for r in ([turn, *results] if turn.role == "function" else results) if r.result_of is not None]
    left = list(turn.ids)
    for result in results if turn.ids and named else named if no_call else []:
        if result.result_of not in left:
            raise Misplaced("result_without_call", result)
        left.remove(result.result_of)
    if len(results) < len(turn.ids) and (results or goes_on):
        raise Misplaced("call_without_result", turn)
    return sorted(results, key=lambda result: turn.ids.index(str(result.result_of))) if turn.ids and named else results
