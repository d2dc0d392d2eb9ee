"""Rows of preferences -> the messages before the answers, the answers, and which of them is liked.

    pairs     {prompt, chosen, rejected}; When2Call's {messages, chosen_response, rejected_response}
    labels    {prompt, completion, label} or {messages, label}

The prompt is text, messages, or the columns of an instruction. An answer is text, a message, or messages that end with
the assistant's and begin after the prompt, or with it. Tools and calls have any form of `chat_formats`.
"""

from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.data import call_forms, chat_formats
from codechat.data.chat_formats import Message, Row
from codechat.text.tool_calls import Unreadable

PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
PROMPTS = ("prompt", "conversations", "messages")
BESIDE = (*chat_formats.INPUTS, "history")  # columns that belong to a prompt of text
LABELLED = ("completion", "messages", "conversations")
EQUAL = "with equal answers"
# Calls that nobody can read are a reason to reject an answer, so a rejected one is kept as it was written.
MALFORMED = ("unreadable_call", "text_after_call", "unknown_call_form", "call_without_tools")


class Preference(NamedTuple):
    """messages: what comes before the answers; rewards: 1.0 for the liked answer, 0.0 for the other one."""

    messages: list[Message]
    answers: list[str]
    rewards: list[float]


def preference_of(row: Row, where: str) -> Preference | str:
    """The preference of a row, or why it teaches nothing. DataError, beginning with `where`, for a row that is none."""
    given, rewards = _answers(row, where)
    sides = [_conversation(row, answer, reward, where) for answer, reward in zip(given, rewards)]
    before = sides[0][:-1]
    if sides[-1][:-1] != before:
        raise DataError(f"{where}: what comes before the last answer differs in chosen and rejected; make it equal")
    if len(sides) == 2 and sides[0] == sides[1]:
        return EQUAL
    return Preference(before, [side[-1]["content"] for side in sides], rewards)


def _answers(row: Row, where: str) -> tuple[list[Any], list[float]]:
    """The answers as the row has them, and their rewards."""
    has = {name for name, value in row.items() if value is not None}
    for chosen, rejected in PAIRS:
        if {chosen, rejected} <= has:
            return [row[chosen], row[rejected]], [1.0, 0.0]
    labelled = next((name for name in LABELLED if name in has), None)
    if "label" in has and labelled:
        if type(row["label"]) not in (bool, int) or row["label"] not in (0, 1):
            raise DataError(f"{where} has the label {row['label']!r}; required is true, false, 0 or 1; correct it")
        return [row[labelled]], [float(row["label"])]
    required = "prompt, chosen and rejected, or prompt, completion and label (true or false)"
    raise DataError(f"{where} has the columns {sorted(has)}; required: {required}")


def _conversation(row: Row, answer: Any, reward: float, where: str) -> list[Message]:
    """The messages of the prompt and an answer; the last one is the assistant's, and another role's is before it."""
    given = (row[name] for name in PROMPTS if row.get(name) is not None and row[name] is not answer)
    prompt = chat_formats.turns_in(next(given, None))
    turns: list[Any] = []
    try:
        if prompt is None or (isinstance(prompt, str) and any(row.get(name) for name in BESIDE)):
            request = chat_formats.request_text(row)
            before = chat_formats.turns_before(row, where)
            prompt = [*before, {"role": "user", "content": request}] if request else prompt
        turns = chat_formats.continued(prompt, chat_formats.turns_in(answer), where)
        messages = chat_formats.messages_of({**row, "messages": turns}, where)
    except Unreadable as error:
        messages = error.reason
    if messages in MALFORMED and reward == 0:
        messages = _as_written(row, turns, where) or messages
    if isinstance(messages, str):
        raise DataError(f"{where} cannot be read ({messages}); correct or delete the row")
    if [m["role"] == "assistant" for m in messages[-2:]] != [False, True]:
        raise DataError(f"{where}: an answer must end in one message of the assistant, after another role's")
    return messages


def _as_written(row: Row, turns: list[Any], where: str) -> list[Message] | None:
    """The messages with the last answer as it was written; None where it has no text, or where others are at fault."""
    text = chat_formats.content_of(turns[-1])
    readable = [*turns[:-1], {"role": "assistant", "content": "-"}]
    messages = chat_formats.messages_of({**row, "messages": readable}, where)
    if isinstance(messages, str) or not isinstance(text, str):
        return None
    return [*messages[:-1], {"role": "assistant", "content": call_forms.as_written(text)}]
