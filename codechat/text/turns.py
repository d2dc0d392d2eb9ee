"""Conversations with calls and results apart, as APIs and public rows have them, as messages of the chat format:
training and serving render alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from codechat.core.errors import DataError
from codechat.text.tool_calls import CALL_TAG, tools_prompt


@dataclass
class Turn:
    """calls: canonical texts. ids: one per call, or none. result_of: id of the call that a function's result answers.
    weight: 0 = an answer that carries no loss."""

    role: str
    content: str
    calls: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    result_of: str | None = None
    weight: int = 1

    def message(self) -> dict[str, Any]:
        """Prose, then calls, one per line."""
        prose = self.content.strip() if self.calls else self.content
        lines = [*([prose] if prose or not self.calls else []), *self.calls]
        weight = {} if self.weight or self.role != "assistant" else {"weight": 0}
        return {"role": self.role, "content": "\n".join(lines), **weight}


class Unreadable(DataError):
    """A conversation without messages. reason: for counts of rows; turn: the one at fault; none = the tools are."""

    def __init__(self, reason: str, turn: Turn | None = None, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason, self.turn = reason, turn


def messages_of_turns(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], style: str) -> list[dict[str, Any]]:
    """Messages, results in the order of their calls, tools listed after the system's own words. Unreadable."""
    turns, at = list(turns), 0
    while at < len(turns):
        results = list(takewhile(lambda turn: turn.role == "function", turns[at + 1 :]))
        end = at + 1 + len(results)
        turns[at + 1 : end] = _in_call_order(turns[at], results, goes_on=end < len(turns))
        at = end
    if tools:
        system, rest = (turns[0].content, turns[1:]) if turns[0].role == "system" else ("", turns)
        try:
            offer = tools_prompt(tools, style)
        except DataError as error:
            raise Unreadable("unreadable_tools", None, str(error)) from None
        turns = [Turn("system", f"{system}\n{offer}" if system else offer), *rest]
    return [turn.message() for turn in turns]


def _in_call_order(turn: Turn, results: list[Turn], goes_on: bool) -> list[Turn]:
    """The results of a turn in the order of its calls where they name one. Unreadable where ids do not match one to
    one."""
    if len(set(turn.ids)) < len(turn.ids):
        raise Unreadable("unreadable_call", turn)
    named, left = [one for one in (turn, *results) if one.result_of is not None], list(turn.ids)
    if named and not turn.ids and not turn.calls and CALL_TAG not in turn.content:
        raise Unreadable("result_without_call", named[0])
    if turn.ids and named:
        for result in results:
            if result.result_of not in left:
                raise Unreadable("result_without_call", result)
            left.remove(result.result_of)
        results.sort(key=lambda result: turn.ids.index(str(result.result_of)))
    if len(results) < len(turn.ids) and (results or goes_on):
        raise Unreadable("call_without_result", turn)
    return results
