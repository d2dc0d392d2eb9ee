"""Rows of any public form -> messages of our protocol (`text.chat`). `FORMS` is the table of what is read:

    OpenAI        {messages, tools}: content null or parts, tool_calls, role "tool" with tool_call_id; of 2023:
                  function_call and functions; tools may also stand at a message; messages may be JSON text (Toucan)
    ShareGPT      {conversations, system, tools}: human, gpt, function_call, observation; minimind: tools at the system turn
    Hermes, Qwen  <tool_call> in answers, <tool_response>, schemas between <tools> and </tools>; {text} in ChatML
    ToolACE       schemas in the system text, calls such as [f(a="b"), g(c=1)]; `call_forms` has all forms of calls in text
    glaive        {system, chat}: schemas, then USER:, ASSISTANT: and FUNCTION RESPONSE: with <functioncall> {...}
    xLAM          {query, answers, tools}: a request, the calls that answer it and schemas, also as JSON text
    tool sets     {question, functions, ground_truth}: messages, schemas and the calls that answer them, also as JSON text
    Anthropic     parts of the types tool_use, tool_result and thinking
    instructions  {instruction, input, output}, {prompt, completion}, {question, answer}, ..., with system and history

Tools are listed after the row's own system text, as the server lists them. Several calls at once are one answer, and
their results follow in the order of the calls. An answer marked `weight: 0` or `train: false` gets "weight": 0
and carries no loss. Reasoning beside an answer stands before it between <think> and </think>, as Qwen's, DeepSeek's and
minimind's templates write it. Where a set says that no call is right (`answers: []`), the answer is `NO_CALL`.

What a row or a message has in another form is a reason to lose the row: nothing of it is guessed, and no turn is left
empty."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.data import call_forms
from codechat.data.sources import Padded, without_nulls
from codechat.text import chat, tool_calls, tool_lists
from codechat.text.tool_calls import Turn, Unreadable, messages_of_turns
from codechat.text.tool_schemas import listed_tools, say_unknown, tool_schema, whole_object

Row = Mapping[str, Any]
Message = dict[str, Any]

REQUESTS = ("instruction", "prompt", "question", "query", "text")
ANSWERS = ("output", "completion", "code", "answer", "response")
INPUTS = ("input", "context")
# Columns that the text of a row refers to, of which nothing can be read.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NO_INPUT = ("", "n/a", "none", "<noinput>", "no input", "not applicable")
SYSTEM_COLUMNS = ("system", "system_prompt")
CALL_ROLES = ("function_call", "function-call", "tool_call")  # turns that hold nothing but calls
# Where a message has what its author thought: DeepSeek, Qwen, minimind; OpenRouter, vLLM; gpt-oss, Ollama.
REASONING = ("reasoning_content", "reasoning", "thinking")
TOOL_COLUMNS = ("tools", "functions", "available_tools")
NO_CALL = "I have no function for that."
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_GLAIVE = re.compile(r"(?:\A|\n[ \t]*\n)\s*(USER|ASSISTANT|A|FUNCTION RESPONSE):[ \t]?")
_GLAIVE_CALL = re.compile(r"<functioncall>(?=\s*[\[{])")
# a result may quote the closing tag
_RESULT = re.compile(r"<(tool_response|TOOL_RESPONSE)>\s*(?P<result>.*?)\s*</\1>(?=\s*(?:<\1>|\Z))", re.DOTALL)
_TOOLS = re.compile(r"<tools>(?=\s*[\[{])")  # the wording before it may name the tags too
_DECLARED = re.compile(r"<\|im_system\|>tool_declare<\|im_middle\|>")  # Kimi's template, in Toucan's system turns
_FENCED = re.compile(
    r'\A\s*```(?:json)?\s*([\[{].*"name".*[\]}])\s*```\s*\Z', re.DOTALL
)  # calls in the turns of tool sets
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")
# What ToolACE's and the Berkeley leaderboard's system texts say about their own form of calls, which is not ours.
_WORDING = re.compile(
    r"You are an expert in composing functions\."
    r"|You are given a question and a set of possible functions\."
    r"|Based on the question, you will need to make one or more function/tool calls to achieve the purpose\."
    r"|If none of the functions? can be used, (?:please )?point it out(?: and do not make any function calls?)?\."
    r"|If the given question lacks the parameters required by the function,? (?:please )?also point it out\."
    r"|You should only return the function calls? in (?:your response|tools? calls? sections?)\."
    r"|If you decide to invoke any of the function\(s\),? you MUST put it in the format of \[.*?\)\]\.?"
    r"|You SHOULD NOT include any other text in the response\."
    r"|Here is a list of functions in JSON format that you can invoke[:.]"
    r"|Should you decide to return the function call\(s\)[.,]?"
    r"|Put it in the format of \[.*?\)\]\.?"
    r"|NO other text MUST be included\.",
    re.IGNORECASE,
)
# Keys of a message under which other projects have calls, results, parts or what else an answer is without.
_HOLDS = re.compile(
    r"call|function|tool|refusal|image|video|audio|attachment|document|part|block|content|train_detail", re.IGNORECASE
)
_SAYS_ABOUT = re.compile(r"(?:id|name|type|choice)s?\Z", re.IGNORECASE)
MESSAGE_KEYS = (
    *("role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "weight", "train", "loss"),
    *(*REASONING, *TOOL_COLUMNS),
)
_WRAPS = re.compile(r"(?:<(\w+)>|```(?:json)?)\s*\Z")  # what stands around a list of schemas
_OFFERS = re.compile("list of functions in JSON format", re.IGNORECASE)


class Malformed(DataError):
    """A row whose values are not of the kind that its form has. reason: for counts of rows; the text begins with the
    row's place."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Form(NamedTuple):
    """One form of rows. columns: those that a row of it has, none of them null; calls: whether it can hold calls; turns:
    the row in OpenAI's form; reads: further columns that are read; marked: whether every call has a tag, so that other
    text is prose, whatever it looks like."""

    name: str
    columns: tuple[str, ...]
    calls: bool
    turns: Callable[[Row, str], Row]
    reads: tuple[str, ...] = ()
    marked: bool = False


def form_of(row: Row) -> Form | None:
    """The first form of `FORMS` whose columns the row has."""
    for form in FORMS:
        if all(row.get(column) is not None for column in form.columns):
            return form
    return None


def is_disliked(row: Row) -> bool:
    """Whether the row is an answer that preferences call bad: its label is false or not above 0, in CSV as text. SFT must not imitate it."""
    if all(row.get(name) is None for name in ("messages", "conversations", "completion")):
        return False
    for label in (row.get("label"), row.get("kto_tag")):
        if isinstance(label, str) and label.strip().lower() in ("false", "0", "0.0", "-1"):
            return True
        if isinstance(label, (bool, int, float)) and label <= 0:
            return True
    return False


def unread_columns(row: Row) -> list[str]:
    """Names of the columns that hold something and that the row's form does not read."""
    form = form_of(row)
    read = {*SYSTEM_COLUMNS, *TOOL_COLUMNS, *BESIDE}
    if form:
        read.update(form.columns, form.reads)
    return sorted(str(name) for name, value in row.items() if name not in read and value not in (None, "", [], {}))


def messages_of(row: Row, where: str, tools_style: str = "compact") -> list[Message] | str:
    """The row's messages, its tools listed in `tools_style`; or the reason why it cannot be taught. Malformed, whose
    text begins with `where`."""
    try:
        form = form_of(row)
        if form is None:
            raise Unreadable(f"unknown_form ({', '.join(sorted(map(str, row)))[:80]})")
        if any(row.get(name) for name in MEDIA):
            raise Unreadable("not_text")
        row = form.turns(row, where)
        raw = _raw_turns(row, where)
        system, tools = _system_and_tools(row, raw, where)
        turns = [turn for each in raw for turn in _turns_of(each, where, tools, form.marked)]
        if turns[0].role == "system":
            turns[0] = Turn("system", system)
        elif system:
            turns.insert(0, Turn("system", system))
        _reject_holes(turns)
        return messages_of_turns(_joined(turns), tools, tools_style)
    except Unreadable as error:
        return error.reason


def _raw_turns(row: Row, where: str) -> list[Any]:
    """The turns of a row in OpenAI's form, as it has them."""
    turns = turns_in(row["messages"])
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        raise Unreadable("unreadable_messages")
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise Malformed(
            "messages_no_list",
            f"{where}: messages is a {type(turns).__name__}; required is a list of {{role, content}}",
        )
    if not turns:
        raise Unreadable("no_turns")
    said = [text for turn in turns for text in _strings(turn)]
    for name in INPUTS:
        extra = _cell(row, name).strip()
        if extra.lower() not in NO_INPUT and not any(extra in text for text in said):
            raise Unreadable(f"{name}_beside_messages")
    return list(turns)


def turns_in(value: Any) -> Any:
    """The messages that a JSON text holds; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = tool_calls.value_at(value, 0)
    if found is None or value[found[1] :].strip():
        return value
    turns = found[0]
    if not all(isinstance(turn, Mapping) and {"role", "from"} & turn.keys() for turn in turns):
        return value
    return turns


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)


def _system_and_tools(row: Row, raw: Sequence[Any], where: str) -> tuple[str, list[dict[str, Any]]]:
    """The system text without a list of tools, and the schemas of the tools that columns, messages or this text offer."""
    first = raw[0] if isinstance(raw[0], Mapping) else {}
    said = ""
    if _role(first) == "system":
        said = _text(content_of(first) or "", "system", first, where)
    system = system_text(row, where)
    if system and said.strip() and said.strip() != system.strip():
        told = "has a system column and another system message; leave one of them out"
        raise Malformed("two_systems", f"{where} {told}")
    text = said if said.strip() else system
    holders = [row, *(each for each in raw if isinstance(each, Mapping))]
    offers: list[Any] = []
    for columns in (TOOL_COLUMNS[:2], TOOL_COLUMNS[2:]):  # Toucan offers fewer tools than are available
        given = [_offered_under(name, holder) for holder in holders for name in columns]
        offers = offers or [offer for offer in given if offer]
    if any(offer != offers[0] for offer in offers):
        raise Unreadable("tools_differ")
    text, listed = _without_list(text)
    if offers:
        return text, offers[0]
    return text, schemas(listed)


def _offered_under(name: str, holder: Row) -> list[dict[str, Any]]:
    """The schemas in a column or under a key of a message. Unreadable for a text that holds none."""
    value = holder.get(name) or ""
    found = schemas(value)
    if not found and isinstance(value, str) and value.strip().lower() not in ("", "[]", "{}", "null", "none"):
        raise Unreadable("unreadable_tools")
    return found


def _without_list(text: str) -> tuple[str, Any]:
    """(a system text without its list of tools and the words that explain another form of calls, the list). A list in our
    own style stays in the text."""
    if declared := _DECLARED.search(text):
        return text[: declared.start()].strip(), text[declared.end() :]
    if tags := _TOOLS.search(text):
        # the rest of Hermes' text only explains its tags; that of Qwen's template begins with a heading
        before, heading, _ = text[: tags.start()].partition("# Tools")
        return before.strip() if heading else "", _json_part(text, tags.end())
    if tool_lists.WITH_TOOLS in text:
        return text, ""
    begin, end, items = _schema_list(text)
    if not items:
        if not _OFFERS.search(text):
            return text, ""
        if "{" in text:
            raise Unreadable("unreadable_tools")
    before, after = text[:begin].rstrip(), text[end:].lstrip()
    around = _WRAPS.search(before)
    if around and after.startswith(closing := f"</{around[1]}>" if around[1] else "```"):
        before, after = before[: around.start()].rstrip(), after.removeprefix(closing)
    rest = f"{before}\n{after.lstrip(' .')}"
    kept = [" ".join(line.split()) for line in _WORDING.sub("", rest).splitlines()]
    return "\n".join(kept).strip(), items


def _json_part(text: str, at: int) -> str:
    """The JSON values from `at` on, as far as there are any: a tag in one of their strings does not end them."""
    begin = at
    while found := tool_calls.value_at(text, at):
        at = found[1]
        while text[at : at + 1] in (",", " ", "\n", "\t", "\r") and at < len(text):
            at += 1
    return text[begin:at] if at > begin else text[begin:]


def _schema_list(text: str) -> tuple[int, int, list[Any]]:
    """(begin, end, schemas) of the first list of schemas in a text, or of schemas one after the other."""
    begin, end, items = 0, 0, list[Any]()
    for mark in re.finditer(r"\[\s*\{|\{", text):
        if mark.start() < end:
            continue
        found = tool_calls.value_at(text, mark.start())
        if found is None:
            continue
        value = found[0] if isinstance(found[0], list) else [found[0]]
        if not all(_is_schema(item) for item in value):
            continue
        if items and text[end : mark.start()].strip(" \t\r\n,"):
            break
        begin = begin if items else mark.start()
        items += value
        end = found[1]
    return begin, end, items


def _is_schema(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return False
    return inner is not value or bool({"parameters", "inputSchema", "input_schema"} & inner.keys())


def _reject_holes(turns: Sequence[Turn]) -> None:
    """Unreadable for an answer or a request without a word."""
    for turn in turns:
        if turn.role in ("user", "assistant") and not turn.content.strip() and not turn.calls:
            raise Unreadable("empty_turn", turn)


def glaive_turns(text: str) -> list[Message]:
    """The turns of a `chat` cell, contents stripped, without empty ones."""
    marks = [*_GLAIVE.finditer(text)]
    # a paragraph of an answer may happen to begin with "A:"
    marks = [m for before, m in zip([None, *marks], marks) if not (m[1] == "A" and before and before[1][0] == "A")]
    ends = [m.start() for m in marks[1:]] + [len(text)]
    contents = [(m[1], text[m.end() : end].replace("<|endoftext|>", "").strip()) for m, end in zip(marks, ends)]
    roles = {"USER": "user", "FUNCTION RESPONSE": "function"}
    return [{"role": roles.get(name, "assistant"), "content": content} for name, content in contents if content]


def _glaive(row: Row, where: str) -> Row:
    text, system = row["chat"], row.get("system")
    turns = glaive_turns(text) if isinstance(text, str) else []
    for turn in turns:
        if turn["role"] == "assistant":
            turn["content"] = _GLAIVE_CALL.sub("<tool_call>", turn["content"])
    if not turns or not isinstance(system, str):
        raise Unreadable("unreadable_tools" if turns else "no_turns")
    tools = schemas(system)
    return {"messages": turns, "tools": tools, "system": "" if tools else system.removeprefix("SYSTEM:").strip()}


def _tool_set(row: Row, where: str) -> Row:
    turns = _from_json(row["question"])
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise Unreadable("bad_row")
    turns = list(turns)
    for at, turn in enumerate(turns):
        text = turn.get("content")
        if turn.get("role") == "assistant" and isinstance(text, str):
            turns[at] = {**turn, "content": _FENCED.sub(r"<tool_call>\1", text)}
    answer = _answer_of(_from_json(row["ground_truth"]))
    return _beside(row) | {"messages": [*turns, answer], "tools": row["functions"]}


def _xlam(row: Row, where: str) -> Row:
    if not _cell(row, "query").strip():
        raise Unreadable("no_instruction")
    request = {"role": "user", "content": request_text({name: row.get(name) for name in ("query", *INPUTS)})}
    answer = _answer_of(_from_json(row["answers"]))
    return _beside(row) | {"messages": [*turns_before(row, where), request, answer], "tools": row.get("tools")}


def _beside(row: Row) -> dict[str, Any]:
    """The columns of the system text."""
    return {name: row[name] for name in SYSTEM_COLUMNS if row.get(name) is not None}


def _from_json(value: Any, reason: str = "bad_row") -> Any:
    """The value, or what a JSON text says. Unreadable, with this reason, for another text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Unreadable(reason) from None


def _answer_of(calls: Any) -> Message:
    """The answer that makes these calls; where the set lists none, no call is right and the answer says so."""
    if not isinstance(calls, list):
        raise Unreadable("bad_row")
    return {"role": "assistant", "tool_calls": calls} if calls else {"role": "assistant", "content": NO_CALL}


def _messages(row: Row, where: str) -> Row:
    return row


def _conversations(row: Row, where: str) -> Row:
    return {**row, "messages": row["conversations"]}


def _text_or_columns(row: Row, where: str) -> Row:
    """ChatML text, a prompt of messages with what follows it, or a request and its answer."""
    text, prompt = row.get("text"), row.get("prompt")
    rest = {name: value for name, value in row.items() if name not in (*REQUESTS, *ANSWERS, *INPUTS, "history")}
    if isinstance(text, str) and "<|im_start|>" in text:
        turns = [{"role": role, "content": content.strip("\n")} for role, content in _CHATML.findall(text)]
        if turns and turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
            turns.pop()  # the beginning of an answer that a prompt ends with
        return {**rest, "messages": turns}
    if isinstance(prompt, list):
        inputs = {name: row[name] for name in INPUTS if name in row}
        answer = next((row[name] for name in ("completion", "response") if row.get(name) is not None), None)
        return {**rest, **inputs, "messages": continued(prompt, answer, where)}
    user, answer = request_text(row), answer_text(row)
    if not user or not answer:
        raise Unreadable("no_answer" if user else "no_instruction")
    said = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    rest = {name: value for name, value in rest.items() if name not in SYSTEM_COLUMNS}
    return {**rest, "messages": [*turns_before(row, where), *said]}


_PLAIN = (*REQUESTS, *ANSWERS, *INPUTS, "history")
FORMS: tuple[Form, ...] = (
    Form("glaive", ("chat",), True, _glaive, marked=True),
    Form("tool set", ("question", "functions", "ground_truth"), True, _tool_set),
    Form("messages", ("messages",), True, _messages, INPUTS),
    Form("conversations", ("conversations",), True, _conversations, INPUTS),
    Form("xLAM", ("query", "answers", "tools"), True, _xlam, (*INPUTS, "history")),
    Form("text", ("text",), True, _text_or_columns, _PLAIN),
    *(
        Form("instruction", columns, False, _text_or_columns, _PLAIN)
        for columns in (
            ("instruction", "output"),
            ("instruction", "response"),
            ("prompt", "completion"),
            ("prompt", "response"),
            ("prompt", "code"),
            ("question", "answer"),
            ("query", "response"),
            ("question", "response"),
        )
    ),
)
# Columns beside every form: where a row comes from, and its tests, which no conversation holds.
BESIDE = ("id", "domain", "source", "task_id", "test_list")


def request_text(row: Row) -> str:
    """The request of an instruction row, with its inputs. Unreadable for two different requests, and for a column that
    holds a list or an object."""
    texts = _texts_in(row, REQUESTS)
    first = next(iter(texts.values()), "")
    for text in texts.values():  # a rendered prompt may repeat the request
        if first.strip() not in text and text.strip() not in first:
            raise Unreadable(f"two_requests ({', '.join(texts)})")
    user = cleaned(first)
    extra = [cleaned(_cell(row, name)) for name in INPUTS]
    given = [text for text in dict.fromkeys(extra) if text.strip().lower() not in NO_INPUT]
    return "\n\n".join([user, *given]) if user else ""


def answer_text(row: Row) -> str:
    """The answer of an instruction row. Unreadable for two different answers."""
    texts = _texts_in(row, ANSWERS)
    if len({text.strip() for text in texts.values()}) > 1:
        raise Unreadable(f"two_answers ({', '.join(texts)})")
    return cleaned(next(iter(texts.values()), ""))


def _texts_in(row: Row, columns: Sequence[str]) -> dict[str, str]:
    """Column -> text of those columns that have any."""
    texts = {name: _cell(row, name) for name in columns}
    return {name: text for name, text in texts.items() if text.strip()}


def _cell(row: Row, name: str) -> str:
    """The text of a column: a number or a truth value as JSON writes it, nothing for null and NaN. Unreadable for a list
    or an object, whose wording is not known."""
    value = row.get(name)
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise Unreadable(f"{name}_not_text")


def turns_before(row: Row, where: str) -> list[Message]:
    """The turns before an instruction: its system column, and `history`, a list of [request, answer] or of messages."""
    system = system_text(row, where)
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    for entry in history if isinstance(history := row.get("history") or [], list) else [history]:
        if isinstance(entry, list) and [*map(type, entry)] == [str, str]:
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), entry)]
        elif isinstance(entry, dict):
            turns.append(entry)
        else:
            got = f"{where} has {str(entry)[:80]} in history"
            raise Malformed("history_form", f"{got}; required is [[request, answer], ...]")
    return turns


def system_text(row: Row, where: str) -> str:
    """The text of the system columns. Malformed for a value that is no text, and for two texts."""
    given = {row[name] for name in SYSTEM_COLUMNS if isinstance(row.get(name), str) and row[name].strip()}
    if len(given) > 1 or any(row.get(name) and not isinstance(row[name], str) for name in SYSTEM_COLUMNS):
        shown = " and ".join(f"{name} {str(row[name])[:40]!r}" for name in SYSTEM_COLUMNS if row.get(name))
        reason = "two_systems" if len(given) > 1 else "system_not_text"
        raise Malformed(reason, f"{where} has {shown}; required is one text; correct it, or leave a column out")
    return next(iter(given), "")


def cleaned(text: str) -> str:
    """The text without blank lines before it and space after it. The indentation of its first line stays."""
    return _BLANK_LINES.sub("", text.replace("\r\n", "\n")).rstrip()


def continued(prompt: Any, value: Any, where: str) -> list[Any]:
    """The turns of a prompt (text, messages or None) and of what follows it: text, a message, or messages, which may
    begin with the prompt. Malformed where they do not fit together."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [] if prompt is None else prompt
    after = value
    if isinstance(value, str):
        after = [{"role": "assistant", "content": value}]
    elif isinstance(value, Mapping):
        after = [value]
    listed = isinstance(before, list) and isinstance(after, list) and len(after) > 0
    if not listed or not all(isinstance(m, Mapping) and {"role", "from"} & m.keys() for m in (*before, *after)):
        got = f"a prompt of {type(prompt).__name__} and an answer of {type(value).__name__}"
        raise Malformed("prompt_form", f"{where}: {got}; both must be texts, or messages with role and content")
    (system, asked), (other_system, told) = (
        (turns[:n], turns[n:]) for turns in (before, after) for n in [sum(_role(m) == "system" for m in turns[:1])]
    )
    first, again = ([(_role(m), content_of(m)) for m in turns] for turns in (asked, told))
    if asked and again[: len(asked)] == first:
        if system and other_system and system != other_system:
            raise Malformed("two_systems", f"{where} has two system messages; leave one of them out")
        return [*(other_system or system), *told]
    if before and (other_system or (told and _role(told[0])) == _role(before[-1])):
        told = "the answer's messages do not continue the prompt; begin them after it, or with it"
        raise Malformed("prompt_not_continued", f"{where}: {told}")
    return [*before, *after]


def _role(message: Row) -> Any:
    role = message.get("role") or message.get("from")
    return chat.ROLE_OF.get(role, role) if isinstance(role, str) else role


def content_of(message: Row) -> Any:
    """What a message says, under either of its names; a table may have both and fill one."""
    value = message.get("content")
    return message.get("value") if value is None else value


def _turns_of(raw: Any, where: str, tools: Sequence[Row], marked: bool) -> Iterator[Turn]:
    """One turn, or one for each of several results."""
    if not isinstance(raw, Mapping) or not ({"role", "from"} & raw.keys()):
        got = f"{where}: a message is {str(raw)[:80]!r}"
        raise Malformed("message_form", f"{got}; required is an object with role and content")
    role = _role(raw)
    _reject_unread_keys(raw)
    raw, results = _without_blocks(raw, role)
    for result in results:
        yield Turn(
            "function", _text(result.get("content") or "", "function", raw, where), result_of=result["tool_use_id"]
        )
    value = content_of(raw)
    if results and not value:
        return
    weight = 1
    if role in ("assistant", *CALL_ROLES):
        marks = {name: raw[name] for name in ("weight", "train", "loss") if raw.get(name) is not None}
        if any(isinstance(mark, str) or mark not in (0, 1) for mark in marks.values()):
            raise Malformed("weight_form", f"{where}: a message has {marks}; required are 0, 1, true or false")
        weight = int(all(marks.values()))
    if role in CALL_ROLES:
        yield Turn("assistant", _with_reasoning("", raw), call_forms.calls_in(value), weight=weight)
        return
    if role not in chat.ROLES:
        known = ", ".join(chat.ROLE_OF)
        raise Malformed("unknown_role", f"{where}: role {role!r} is unknown; required is one of {known}")
    if role != "assistant" and any(raw.get(name) for name in REASONING):
        raise Unreadable("reasoning_of_another")
    text = _text(value, role, raw, where)
    tagged = [result["result"] for result in _RESULT.finditer(text)]
    if role == "assistant":
        yield _answer(text, raw, tools, weight, marked)
    elif tagged and role in ("function", "user") and not _RESULT.sub("", text).strip():
        yield from (Turn("function", result) for result in tagged)
    else:
        yield Turn(role, text, result_of=raw.get("tool_call_id") if role == "function" else None)


def _reject_unread_keys(raw: Row) -> None:
    """Unreadable for a message with something under a key that may hold a part of what it says."""
    for key, value in raw.items():
        if key in MESSAGE_KEYS or not isinstance(value, (str, Mapping, list, tuple)) or not value:
            continue
        if _HOLDS.search(key) and not _SAYS_ABOUT.search(key):
            raise Unreadable(f"message_has ({key})")


def _without_blocks(raw: Row, role: Any) -> tuple[Row, list[Row]]:
    """A message whose content is Anthropic's parts with its calls and its reasoning as OpenAI has them, and the results
    that it holds. Unreadable for text after a call."""
    parts = raw.get("content")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return raw, []
    kinds = [part.get("type") for part in parts]
    own = {"assistant": ("thinking", "tool_use"), "user": ("tool_result",)}.get(role, ())
    if not any(kind in own for kind in kinds):
        return raw, []
    plain = {**raw, "content": [part for part, kind in zip(parts, kinds) if kind not in own]}
    results = [part for part, kind in zip(parts, kinds) if kind == "tool_result" and role == "user"]
    if any("tool_use_id" not in result for result in results):
        raise Unreadable("result_without_call")
    if role == "assistant":
        calls = [(at, part) for at, part in enumerate(parts) if kinds[at] == "tool_use"]
        if calls and "text" in kinds[calls[0][0] :]:
            raise Unreadable("text_after_call")
        if calls:
            plain["tool_calls"] = [
                {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")} for _, part in calls
            ]
        thoughts = [part.get("thinking") for part, kind in zip(parts, kinds) if kind == "thinking"]
        if not all(isinstance(thought, str) for thought in thoughts):
            raise Unreadable("reasoning_not_text")
        plain["thinking"] = "\n".join(thoughts)
    return plain, results


def _with_reasoning(text: str, raw: Row) -> str:
    """An answer with its reasoning before it in tags. Unreadable for reasoning that is no text, and for two of them."""
    given = {name: raw[name] for name in REASONING if raw.get(name)}
    if not all(isinstance(thought, str) for thought in given.values()):
        raise Unreadable("reasoning_not_text")
    thoughts = {thought.strip() for thought in given.values()} - {""}
    if len(thoughts) > 1:
        raise Unreadable(f"two_reasonings ({', '.join(given)})")
    thought = next(iter(thoughts), "")
    if not thought or thought in text:
        return text
    return f"<think>\n{thought}\n</think>\n\n{text}".rstrip()


def _text(value: Any, role: str, raw: Row, where: str) -> str:
    """The text of a message. Unreadable for a part that is no text or has none."""
    calls = role == "assistant" and (raw.get("tool_calls") or raw.get("function_call"))
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in value):
        if any(part["type"] not in ("text", "input_text", "output_text") for part in value):
            raise Unreadable("not_text")  # an image or sound
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str) for text in texts) and not (calls and not any(texts)):
            raise Unreadable("part_without_text")
        return "\n".join(text for text in texts if text)  # as the server joins them
    if role == "function" and isinstance(value, (Mapping, Sequence)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if role == "assistant" and value is None and calls:
        return ""
    if role == "assistant" and value is None:
        raise Unreadable("empty_turn")
    if role == "function" and isinstance(value, (bool, int, float)):
        return json.dumps(value)
    got = f"{where}: a message is {str(dict(raw))[:80]!r}"
    raise Malformed("content_not_text", f"{got}; required is an object with role and content")


def _answer(text: str, raw: Row, tools: Sequence[Row], weight: int, marked: bool) -> Turn:
    """An assistant's turn: text, then calls, from the fields or from the text."""
    given = raw.get("tool_calls") or []
    given = _from_json(given, "unreadable_call") if isinstance(given, str) else given
    if not isinstance(given, Sequence):
        raise Unreadable("unreadable_call")
    calls = [_call(call.get("function", call) if isinstance(call, Mapping) else call, tools) for call in given]
    ids = [str(call["id"]) for call in given if isinstance(call, Mapping) and call.get("id")]
    if legacy := raw.get("function_call"):
        legacy = _from_json(legacy, "unreadable_call") if isinstance(legacy, str) else legacy
        calls = _the_same(calls, [_call(legacy, tools)])
    said = call_forms.read_answer(text, [tool["name"] for tool in tools], marked)
    calls = _the_same(calls, said.calls)
    ids = ids if len(ids) == len(calls) else []
    return Turn("assistant", _with_reasoning(said.prose if calls else text, raw), calls, ids, None, weight)


def _the_same(calls: list[str], again: list[str]) -> list[str]:
    """The calls of an answer that two places may repeat. Unreadable where they differ."""
    if calls and again and calls != again:
        raise Unreadable("calls_differ")
    return calls or again


def _call(function: Any, tools: Sequence[Row]) -> str:
    """The canonical call of a field. A null argument that the tool does not have comes from an Arrow table, whose objects
    are padded to one set of keys (`sources.arrow_row`); then the other nulls of the call do, too."""
    name = function.get("name") if isinstance(function, Mapping) else None
    parameters = next((tool["parameters"] for tool in tools if tool["name"] == name), {})
    if isinstance(function, Mapping):
        function = {key: _with_meant_nulls(value, parameters) for key, value in function.items()}
    call = tool_calls.read_call(function)
    known = parameters.get("properties")
    if known is not None and call.form in ("object", "parameters"):
        if any(value is None and name not in known for name, value in call.arguments.items()):
            call = call._replace(arguments=without_nulls(call.arguments))
    return call_forms.written([call])[0]


def _with_meant_nulls(value: Any, schema: Any) -> Any:
    """A value of an Arrow table with those of its null fields that its schema requires: no other object has put them
    there, or the call would lack an argument."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, Mapping) else None
        return [_with_meant_nulls(each, items) for each in value]
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, Padded) or not isinstance(properties, Mapping):
        return value
    required = schema.get("required", ())
    meant = {name for name in value.fields if name in required and _allows_null(properties.get(name))}
    names = [name for name in value.fields if name in value or name in meant]
    return {name: _with_meant_nulls(value.get(name), properties.get(name)) for name in names}


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key) or ()]
    return "null" in (kinds if isinstance(kinds, list) else [kinds]) or any(map(_allows_null, parts))


def _joined(turns: list[Turn]) -> list[Turn]:
    """Answer and calls that a format keeps in turns of their own as one turn."""
    joined: list[Turn] = []
    for turn in turns:
        before = joined[-1] if joined else turn
        both = joined and before.role == turn.role == "assistant" and before.weight == turn.weight
        if both and turn.calls and not turn.content and not before.ids:
            before.calls += turn.calls
        else:
            joined.append(turn)
    return joined


def schemas(value: Any) -> list[dict[str, Any]]:
    """Tool schemas of a column or of a text that holds them, without the object around a function."""
    if isinstance(value, str):
        items = listed_tools(_objects(value))
    elif isinstance(value, Sequence):
        items = listed_tools([item for each in value for item in _items(each)])
    else:
        items = listed_tools(value)
    return [_schema(item) for item in items if item is not None]


def _items(value: Any) -> list[Any]:
    """The schemas of an item of a list, which may be JSON text (When2Call). Unreadable for a text without one."""
    if not isinstance(value, str):
        return [value]
    items = _objects(value)
    if not items:
        raise Unreadable("unreadable_tools")
    return items


def _objects(text: str) -> list[Any]:
    """The JSON objects of a text: a list of them, one a line, or one after the other."""
    items, decoder, at = [], json.JSONDecoder(strict=False), text.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise Unreadable("unreadable_tools") from None
        items.append(item)
        at = text.find("{", end)
    return items


def _schema(item: Any) -> dict[str, Any]:
    """A schema with name, description and an object of parameters, without null fields. A type that is not known is
    offered as any, and named on stderr."""
    unknown: list[str] = []
    try:
        schema = tool_schema(without_nulls(item), unknown)
    except DataError as error:
        raise Unreadable("unreadable_tools", None, str(error)) from None
    say_unknown(unknown)
    return schema | {"parameters": whole_object(schema["parameters"])}
