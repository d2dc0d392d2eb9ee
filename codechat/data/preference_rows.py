"""Rows of preferences -> the messages before the answers, the answers, and which of them is liked.

    pairs     {prompt, chosen, rejected}; When2Call's {messages, chosen_response, rejected_response};
              ms-swift's {messages, rejected_response}, whose messages end with the chosen answer;
              OpenAI's {input: {messages, tools}, preferred_output, non_preferred_output}
    labels    {prompt, completion, label} or {messages, label}

The prompt is text, messages, or the columns of an instruction. An answer is text, a message, or
messages that end with the assistant's and begin after the prompt, or with it. Tools and calls
may have any form of `chat_formats`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.data import call_forms, chat_formats, row_readers
from codechat.data.chat_turns import Message, Row, content_of, continued, turns_in
from codechat.text.tool_calls import Unreadable

PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
PROMPTS = ("prompt", "conversations", "messages")
BESIDE = (*row_readers.INPUTS, "history")  # columns that belong to a prompt of text
SWIFT = ("messages", "rejected_response")
OPENAI = ("input", "preferred_output", "non_preferred_output")
LABELLED = ("completion", "messages", "conversations")
EQUAL = "with equal answers"
# Unreadable calls are a reason to reject an answer, so a rejected answer with them is kept as text.
MALFORMED = ("unreadable_call", "text_after_call", "unknown_call_form", "call_without_tools")


class Preference(NamedTuple):
    """messages: what comes before the answers; rewards: 1.0 for the liked answer, 0.0 for the
    other one."""

    messages: list[Message]
    answers: list[str]
    rewards: list[float]


class Judged(NamedTuple):
    """An answer as the row has it, and its reward."""

    answer: Any
    reward: float


def preference_of(row: Row, where: str) -> Preference | str:
    """The preference of a row, or why it teaches nothing. DataError, beginning with `where`,
    for a row that is none."""
    row = _with_both_sides(_without_input(row))
    judged = _judged(row, where)
    sides = [_conversation(row, each, where) for each in judged]
    before = sides[0][:-1]
    if sides[-1][:-1] != before:
        raise DataError(
            f"{where}: what comes before the last answer "
            "differs in chosen and rejected; make it equal"
        )
    if len(sides) == 2 and sides[0] == sides[1]:
        return EQUAL
    return Preference(
        messages=before,
        answers=[side[-1]["content"] for side in sides],
        rewards=[each.reward for each in judged],
    )


def _without_input(row: Row) -> Row:
    """A row of OpenAI's fine-tuning with its messages, tools and answers in columns; any other
    row unchanged."""
    asked, liked, other = (row.get(name) for name in OPENAI)
    if not isinstance(asked, Mapping) or liked is None or other is None:
        return row
    kept = {name: value for name, value in row.items() if name not in OPENAI}
    given = {"prompt": asked.get("messages"), "tools": asked.get("tools")}
    return {**kept, **given, "chosen": liked, "rejected": other}


def _with_both_sides(row: Row) -> Row:
    """A row of ms-swift with the whole conversation of each answer; any other row unchanged."""
    given = {name for name, value in row.items() if value is not None}
    messages = turns_in(row.get("messages"))
    if (
        "rejected_response" not in given
        or "chosen_response" in given
        or not isinstance(messages, list)
    ):
        return row
    kept = {name: value for name, value in row.items() if name not in SWIFT}
    refused = {"role": "assistant", "content": row["rejected_response"]}
    return {**kept, "chosen": messages, "rejected": [*messages[:-1], refused]}


def _judged(row: Row, where: str) -> list[Judged]:
    """The answers of a row: the chosen and the rejected one, or one with a label."""
    has = {name for name, value in row.items() if value is not None}
    for chosen, rejected in PAIRS:
        if {chosen, rejected} <= has:
            return [Judged(row[chosen], 1.0), Judged(row[rejected], 0.0)]
    labelled = next((name for name in LABELLED if name in has), None)
    if "label" not in has or labelled is None:
        expected = "prompt, chosen and rejected, or prompt, completion and label (true or false)"
        raise DataError(f"{where} has the columns {sorted(has)}; expected {expected}")
    label = row["label"]
    if type(label) not in (bool, int) or label not in (0, 1):
        raise DataError(
            f"{where} has the label {label!r}; expected true, false, 0 or 1; correct it"
        )
    return [Judged(row[labelled], float(label))]


def _conversation(row: Row, judged: Judged, where: str) -> list[Message]:
    """The messages of the prompt and an answer; the last one is the assistant's, and another
    role's is before it."""
    messages: list[Message] | str
    turns: list[Any] = []
    try:
        turns = continued(_prompt(row, judged.answer, where), turns_in(judged.answer), where)
        messages = chat_formats.messages_of({**row, "messages": turns}, where)
    except Unreadable as error:
        messages = error.reason
    if messages in MALFORMED and judged.reward == 0:
        messages = _as_written(row, turns, where) or messages
    if isinstance(messages, str):
        raise DataError(f"{where} cannot be read ({messages}); correct or delete the row")
    if [m["role"] == "assistant" for m in messages[-2:]] != [False, True]:
        raise DataError(
            f"{where}: an answer must end in one message of the assistant, after another role's"
        )
    return messages


def _prompt(row: Row, answer: Any, where: str) -> Any:
    """The prompt of a row: text or messages; None if the row has none, or has it only inside
    the answer."""
    given = (row[name] for name in PROMPTS if row.get(name) is not None and row[name] is not answer)
    prompt = turns_in(next(given, None))
    beside = any(row.get(name) for name in BESIDE)
    if prompt is not None and not (isinstance(prompt, str) and beside):
        return prompt
    request = row_readers.request_text(row)
    before = row_readers.turns_before(row, where)
    return [*before, {"role": "user", "content": request}] if request else prompt


def _as_written(row: Row, turns: list[Any], where: str) -> list[Message] | None:
    """The messages with the last answer kept as text; None if it has no text, or if other
    messages are at fault."""
    text = content_of(turns[-1])
    readable = [*turns[:-1], {"role": "assistant", "content": "-"}]
    messages = chat_formats.messages_of({**row, "messages": readable}, where)
    if isinstance(messages, str) or not isinstance(text, str):
        return None
    return [*messages[:-1], {"role": "assistant", "content": call_forms.as_written(text)}]
