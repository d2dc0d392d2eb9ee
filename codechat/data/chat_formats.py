"""Rows of any public form -> messages of our protocol (`text.chat`). `FORMS` is the table of
what is read:

    OpenAI        {messages, tools}: content null or parts, tool_calls, role "tool" with tool_call_id; of 2023:
                  function_call and functions; tools may also stand at a message; messages may be JSON text (Toucan)
    ShareGPT      {conversations, system, tools}: human, gpt, function_call, observation; tools at the system turn
                  (minimind)
    Hermes, Qwen  <tool_call> in answers, <tool_response>, schemas between <tools> and </tools>; {text} in ChatML
    ToolACE       schemas in the system text, calls such as [f(a="b"), g(c=1)]; `call_forms` lists all forms of calls
    glaive        {system, chat}: schemas, then USER:, ASSISTANT: and FUNCTION RESPONSE: with <functioncall> {...}
    xLAM          {query, answers, tools}: a request, the calls that answer it and schemas, also as JSON text
    tool sets     {question, functions, ground_truth}: messages, schemas and the calls that answer them, also as JSON
    Anthropic     parts of the types tool_use, tool_result and thinking
    instructions  {instruction, input, output}, {prompt, completion}, {question, answer}, ..., with system and history

Tools are listed after the row's own system text, as the server lists them. Several calls at
once are one answer, and their results follow in the order of the calls: by ids, or else by the
names of the functions. An answer marked `weight: 0` or `train: false` gets "weight": 0 and
carries no loss. Reasoning beside an answer comes before it between <think> and </think>, as
Qwen's, DeepSeek's and minimind's templates write it. Where a set says that no call is right
(`answers: []`), the answer is `NO_CALL`.

A row or a message with anything in another form is lost, with a reason: no part of it is
guessed, and no turn is left empty."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from codechat.data import row_readers as read
from codechat.data.chat_turns import (
    AVAILABLE,
    OFFERED,
    TOOL_COLUMNS,
    Malformed,
    Message,
    Row,
    content_of,
    joined,
    read_turn,
    role_of,
    text_of,
    texts_in,
    turns_in,
)
from codechat.data.offered_tools import schemas, without_list
from codechat.data.row_readers import INPUTS, INSTRUCTIONS
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns

# Columns that the text of a row refers to and that cannot be read.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NO_TOOLS = ("", "[]", "{}", "null", "none")
# Labels that call an answer bad, as CSV writes them.
DISLIKED = ("false", "0", "0.0", "-1")
# Columns beside every form: where a row comes from, and its tests, which no conversation holds.
BESIDE = ("id", "domain", "source", "task_id", "test_list")


class Form(NamedTuple):
    """One form of rows.

    columns: a row of this form has all of them, not null; reader: the row -> the row with
    `messages`; reads: further columns that are read; calls: whether it can hold calls; marked:
    whether a call beside prose has a tag, so that prose without one is prose, whatever it holds."""

    columns: tuple[str, ...]
    reader: Callable[[Row, str], Row]
    reads: tuple[str, ...] = ()
    calls: bool = True
    marked: bool = False


REQUEST_AND_ANSWER = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "code"),
    ("question", "answer"),
    ("query", "response"),
    ("question", "response"),
)
# The first form whose columns a row has is read, so tool sets and xLAM come before forms with a
# part of their columns.
FORMS: tuple[Form, ...] = (
    Form(("chat",), read.glaive, marked=True),
    Form(("question", "functions", "ground_truth"), read.tool_set),
    Form(("messages",), read.messages, INPUTS),
    Form(("conversations",), read.conversations, INPUTS),
    Form(("query", "answers", "tools"), read.xlam, (*INPUTS, "history")),
    Form(("text",), read.chatml_or_instruction, INSTRUCTIONS),
    *(Form(columns, read.instruction, INSTRUCTIONS, calls=False) for columns in REQUEST_AND_ANSWER),
)


def form_of(row: Row) -> Form | None:
    """The first form of `FORMS` whose columns the row has."""
    for form in FORMS:
        if all(row.get(column) is not None for column in form.columns):
            return form
    return None


def is_disliked(row: Row) -> bool:
    """Whether the row is an answer that preferences call bad: its label is false or not above
    0, in CSV as text. SFT must not imitate it."""
    answer = any(row.get(name) is not None for name in ("messages", "conversations", "completion"))
    return answer and (_calls_bad(row.get("label")) or _calls_bad(row.get("kto_tag")))


def _calls_bad(label: Any) -> bool:
    if isinstance(label, str):
        return label.strip().lower() in DISLIKED
    return isinstance(label, (bool, int, float)) and label <= 0


def unread_columns(row: Row) -> list[str]:
    """Names of the columns that hold something and that the row's form does not read."""
    read_columns = {*read.SYSTEM_COLUMNS, *TOOL_COLUMNS, *BESIDE}
    form = form_of(row)
    if form:
        read_columns.update(form.columns, form.reads)
    full = [name for name, value in row.items() if value not in (None, "", [], {})]
    return sorted(str(name) for name in full if name not in read_columns)


def messages_of(row: Row, where: str, tools_style: str = "compact") -> list[Message] | str:
    """The row's messages, its tools listed in `tools_style`; or the reason why it cannot be
    taught. Malformed, whose text begins with `where`."""
    try:
        return _messages_of(row, where, tools_style)
    except Unreadable as error:
        return error.reason


def _messages_of(row: Row, where: str, tools_style: str) -> list[Message]:
    """The same, but Unreadable, with the reason, for a row that cannot be taught."""
    form = form_of(row)
    if form is None:
        raise Unreadable(f"unknown_form ({', '.join(sorted(map(str, row)))[:80]})")
    if any(row.get(name) for name in MEDIA):
        raise Unreadable("not_text")
    row = form.reader(row, where)
    raw = _raw_turns(row, where)
    # The tools come first: whether text is a call depends on what is offered.
    system = _system_text(row, raw[0], where)
    offer = _column_tools(row, raw)
    system, listed = without_list(system)
    tools = offer or schemas(listed)
    turns = [turn for each in raw for turn in read_turn(each, where, tools, form.marked)]
    if turns[0].role == "system":
        turns[0] = Turn("system", system)
    elif system:
        turns.insert(0, Turn("system", system))
    # an empty answer would teach to end at once
    _reject_holes(turns)
    return messages_of_turns(joined(turns), tools, tools_style)


def _raw_turns(row: Row, where: str) -> list[Any]:
    """The turns of a row in OpenAI's form, not yet read."""
    turns = turns_in(row["messages"])
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # JSON, but not of messages
        raise Unreadable("unreadable_messages")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        got = f"{where}: messages is a {type(turns).__name__}"
        raise Malformed("messages_no_list", f"{got}; expected a list of {{role, content}}")
    if not turns:
        raise Unreadable("no_turns")
    read.reject_inputs(row, list(texts_in(turns)))
    return list(turns)


def _system_text(row: Row, first: Any, where: str) -> str:
    """The system text, of the first turn or of a column. Malformed if the two differ."""
    said = ""
    if isinstance(first, Mapping) and role_of(first) == "system":
        said = text_of(content_of(first) or "", "system", first, where)
    system = read.system_text(row, where)
    if system and said.strip() and said.strip() != system.strip():
        both = f"{where} has a system column and another system message"
        raise Malformed("two_systems", f"{both}; leave one of them out")
    return said if said.strip() else system


def _column_tools(row: Row, raw: Sequence[Any]) -> list[dict[str, Any]]:
    """The schemas in columns or at messages. The column `available_tools` counts only if
    nothing else offers tools. Unreadable if two places differ."""
    holders = [row, *(turn for turn in raw if isinstance(turn, Mapping))]
    offers: list[list[dict[str, Any]]] = []
    for columns in (AVAILABLE, OFFERED):  # Toucan offers fewer than are available
        found = [_schemas_at(name, holder) for holder in holders for name in columns]
        offers = list(filter(None, found)) or offers
    if any(offer != offers[0] for offer in offers):
        raise Unreadable("tools_differ")
    return offers[0] if offers else []


def _schemas_at(name: str, holder: Row) -> list[dict[str, Any]]:
    """The schemas in a column or at a message. Unreadable for a text that holds none."""
    value = holder.get(name) or ""
    found = schemas(value)
    if not found and isinstance(value, str) and value.strip().lower() not in NO_TOOLS:
        raise Unreadable("unreadable_tools")
    return found


def _reject_holes(turns: Sequence[Turn]) -> None:
    """Unreadable for an answer or a request without a word."""
    for turn in turns:
        if turn.role in ("user", "assistant") and not turn.content.strip() and not turn.calls:
            raise Unreadable("empty_turn", turn)
