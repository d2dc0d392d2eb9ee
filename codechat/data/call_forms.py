"""How public sets write calls into the text of an answer.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen; one or several values in each tag
    <functioncall> {"name": ..., "arguments": {...}}             glaive, and our own
    <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>     Nemotron, When2Call
    [get_weather(city="Oslo"), get_time(zone="UTC")]             ToolACE, the Berkeley leaderboard, Llama 3.2
    {"name": "get_weather", "parameters": {"city": "Oslo"}}      Llama 3.1, also a list, also in a fence
    {"tool_calls": [{"name": ..., "arguments": {...}}]}          xLAM's models

Reasoning in tags before an answer is prose, whatever it says. A closing tag inside a string
belongs to the string. The last three forms count only if their functions are offered: a list or
an object may be the requested answer. An answer with the mark of another form is unreadable,
never prose."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text import tool_calls
from codechat.text.native_calls import Found, python_calls
from codechat.text.tool_calls import Call, Unreadable, after_space, after_thought, function_of

_OPENS = re.compile(r"<(tool_call|TOOLCALL)>")
_OUR_TAG = re.compile(rf"{tool_calls.CALL_TAG}(?=\s*[\[{{])")
# A result may quote the closing tag, so only one that ends the text or precedes another result
# counts.
_RESULT = re.compile(
    r"<(tool_response|TOOL_RESPONSE)>\s*(?P<result>.*?)\s*</\1>(?=\s*(?:<\1>|\Z))", re.DOTALL
)
_FENCE = re.compile(r"\A```(?:json|python)?\s*\n?(.*?)\s*```\Z", re.DOTALL)
# `[f(x)]` may be an ordinary answer in Python, so only keyword arguments, or none, look like calls.
_LIKE_PYTHON = re.compile(
    r"\A\[\s*[A-Za-z_][^\s()\[\]{}\"'=,;]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=).*)?\)\s*\]\Z", re.DOTALL
)
# Marks of call forms that are not read. The first never occur in prose; the others may, in
# answers without tools.
_FOREIGN = re.compile(
    r"<\|python_tag\|>|\[TOOL_CALLS\]|<\|[^|<>\s]*(?:tool|call|function)[^|<>\s]*\|>|<｜tool▁calls?▁begin｜>"
    r"|<start_function_call>|<\|action_start\|>|<\|channel\|>commentary|<｜DSML｜"
)
_FOREIGN_WITH_TOOLS = re.compile(
    r"<function=|<function_calls?>|<tool_calls>|<tool_use>|<invoke name="
    r"|```tool_(?:code|call)|\bfunctools\[|^Action:.*\n+Action Input:|^Action:\s*```json",
    re.MULTILINE,
)


class Answer(NamedTuple):
    """What an assistant says, and then its calls in canonical text."""

    prose: str
    calls: list[str]


def read_answer(text: str, offered: Collection[str], marked: bool = False) -> Answer:
    """The prose and the calls of an answer. offered: names of the functions on offer; marked:
    tags mark calls, and what is nothing but calls needs none. Unreadable for calls that cannot
    be read, for text after a call, and for an unknown form of calls."""
    begin = after_thought(text)
    said = text[begin:]
    # without tools on offer, messages in our own form stay as they are
    known = _OUR_TAG.sub("<tool_call>", said) if offered or marked else said
    answer = _read_said(known, offered, marked)
    return Answer((text[:begin] + answer.prose).strip(), answer.calls) if begin else answer


def _read_said(text: str, offered: Collection[str], marked: bool) -> Answer:
    """`read_answer` of a text without reasoning in tags."""
    opens = _OPENS.search(text)
    if opens:
        begin = opens.start()
        return Answer(text[:begin].strip(), written(_tagged(text, begin)))
    foreign = _FOREIGN.search(text) or (offered and _FOREIGN_WITH_TOOLS.search(text))
    if foreign and not marked:
        raise Unreadable("unknown_call_form")
    if not offered:
        _reject_calls_without_tools(text)
        return Answer(text, [])
    if marked:
        calls = _whole_calls(text, offered)
        return Answer("", calls) if calls else Answer(text, [])
    answer = _python_answer(text, offered) or _json_answer(text, offered)
    if answer:
        return answer
    _reject_hidden_calls(text, offered)
    return Answer(text, [])


def _whole_calls(text: str, offered: Collection[str]) -> list[str]:
    """The calls of an answer that is nothing else, in JSON or as Python writes them, in a fence
    or not: some sets in glaive's form mark the last answer alone."""
    body = _FENCE.sub(r"\1", text.strip())
    python = python_calls(body, 0, offered) if body.startswith("[") else None
    if python is not None and python.end == len(body):
        return written(python.calls)
    read = tool_calls.value_at(body, 0) if body.startswith(("[", "{")) else None
    if read is None or body[read.end :].strip():
        return []
    items = _listed(read.value)
    if not items or not all(map(_is_name_and_arguments, items)):
        return []
    return written(map(tool_calls.read_call, items))


def _reject_calls_without_tools(text: str) -> None:
    """Unreadable for an answer that is nothing but calls, which would teach a model to call
    what nobody offers."""
    bare = text.strip()
    in_python = _LIKE_PYTHON.match(bare) and python_calls(bare, 0, ())
    if in_python or any(map(_is_name_and_arguments, _whole_json(bare))):
        raise Unreadable("call_without_tools")


def _reject_hidden_calls(text: str, offered: Collection[str]) -> None:
    """Unreadable for prose with a call of a function on offer as Python writes it: a form with
    other marks around it, or arguments without names."""
    names = _alternatives(offered)
    for begins in re.finditer(rf"(?<![\w.])(?:{names})\s*\([^()]*=", text):
        if python_calls(text, begins.start(), offered) is not None:
            raise Unreadable("unknown_call_form")
    if re.fullmatch(rf"\s*(?:{names})\s*\(.*\)\s*", text, re.DOTALL):
        raise Unreadable("unknown_call_form")


def calls_in(value: Any) -> list[str]:
    """Canonical calls of a field: an object, a list, or text that holds them in JSON or as
    Python literals, one after the other, with or without tags. Unreadable."""
    if not isinstance(value, str):
        return written(map(tool_calls.read_call, _listed(value)))
    text = value.strip()
    return written(_tagged(text, 0) if _OPENS.match(text) else _values(text, 0).calls)


def results_in(text: str) -> list[str]:
    """The results in <tool_response> tags; none if there is other text around them."""
    return (
        []
        if _RESULT.sub("", text).strip()
        else [found["result"] for found in _RESULT.finditer(text)]
    )


def written(calls: Iterable[Call]) -> list[str]:
    """The canonical texts of calls that were read. Unreadable for none, or one without a name
    or arguments."""
    calls = list(calls)
    if not calls:
        raise Unreadable("unreadable_call")
    if any(call.after for call in calls):
        raise Unreadable("text_after_call")
    try:
        return [tool_calls.format_call(call.name, call.arguments) for call in calls]
    except DataError:
        raise Unreadable("unreadable_call") from None


def as_written(text: str) -> str:
    """An answer with unreadable calls, its tags replaced by ours: a rejected answer may look
    like this."""
    text = _OPENS.sub(f"{tool_calls.CALL_TAG} ", text)
    return re.sub(r"[ \t]*</(?:tool_call|TOOLCALL)>", "", text).strip()


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _tagged(text: str, at: int) -> list[Call]:
    """The calls in tags from `at` to the end of the text. A closing tag may be missing."""
    calls: list[Call] = []
    while at < len(text):
        opens = _OPENS.match(text, at)
        if not opens:
            raise Unreadable("text_after_call")
        found = _values(text, opens.end(), f"</{opens[1]}>")
        calls += found.calls
        at = after_space(text, found.end)
    return calls


def _values(text: str, at: int, closing: str = "") -> Found:
    """The calls of the values from `at` to the closing tag, the next opening one, or the end of
    the text."""
    calls: list[Call] = []
    while True:
        at = after_space(text, at)
        if closing and text.startswith(closing, at):
            return Found(calls, at + len(closing))
        if at == len(text) or (closing and _OPENS.match(text, at)):
            return Found(calls, at)
        # `[f(a=1)]` first: as a literal it would be unreadable.
        python = python_calls(text, at, ()) if text[at] == "[" else None
        if python is not None:
            calls += python.calls
            at = python.end
            continue
        read = tool_calls.value_at(text, at) if text[at] in "[{" else None
        if read is None:
            raise Unreadable("text_after_call" if calls else "unreadable_call")
        calls += map(tool_calls.read_call, _listed(read.value))
        at = after_space(text, read.end)
        if text.startswith((",", ";"), at):
            at += 1


def _python_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer, if it ends in calls as Python writes them; None if it calls no function on
    offer."""
    text = text.rstrip()
    body = _FENCE.sub(r"\1", text.strip())
    whole = python_calls(body, 0, offered)
    if whole is not None and whole.end == len(body):
        # A list of calls is meant as calls; without its brackets, only what names functions on
        # offer.
        if body.startswith("[") or all(call.name in offered for call in whole.calls):
            return Answer("", written(whole.calls))
    names = _alternatives(offered)
    begins = re.search(rf"\[\s*(?:{names})\s*\(|\A\s*(?:{names})\s*\([^()]*=", text)
    if begins:
        found = python_calls(text, begins.start(), offered)
        if found is None:
            raise Unreadable("unreadable_call")
        if text[found.end :].strip():
            raise Unreadable("text_after_call")
        return Answer(text[: begins.start()].strip(), written(found.calls))
    if _LIKE_PYTHON.match(body):
        raise Unreadable("unreadable_call")
    return None


def _alternatives(names: Collection[str]) -> str:
    """A pattern of any of the names, the longest first: `get` is also the beginning of `get
    time`."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def _json_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer, if it ends in calls of functions on offer in JSON; None if it has none.
    Unreadable for JSON that is a call in another form, or of a function that is not on
    offer."""
    items = _whole_json(text)
    if items:
        if not any(_is_call(item, offered) for item in items):
            return None
        return Answer("", written(map(tool_calls.read_call, items)))
    names = "|".join(re.escape(json.dumps(name)) for name in offered)
    keys = "|".join(tool_calls.ARGUMENT_KEYS)
    fence = r"(?:```(?:json)?\s*)?"
    begins = re.search(
        rf'{fence}(?P<call>(?:\[\s*)?\{{\s*"name"\s*:\s*(?:{names})\s*,\s*"(?:{keys})"\s*:)', text
    )
    if begins is None:
        return None
    read = tool_calls.value_at(text, begins.start("call"))
    if read is None:
        raise Unreadable("unreadable_call")
    if text[read.end :].strip().strip("`"):
        raise Unreadable("text_after_call")
    calls = map(tool_calls.read_call, _listed(read.value))
    return Answer(text[: begins.start()].strip(), written(calls))


def _whole_json(text: str) -> list[Any]:
    """The items of the JSON that a text consists of, in a fence or not; none if it is something
    else."""
    body = _FENCE.sub(r"\1", text.strip())
    read = tool_calls.value_at(body, 0) if body.startswith(("{", "[")) else None
    if read is None or body[read.end :].strip():
        return []
    return [function_of(item) for item in _listed(_calls_within(read.value))]


def _calls_within(value: Any) -> Any:
    """What an object holds under `tool_calls`; any other value unchanged. Unreadable for an
    object with more."""
    if not isinstance(value, Mapping) or not isinstance(value.get("tool_calls"), list):
        return value
    if not value["tool_calls"] or any(other for key, other in value.items() if key != "tool_calls"):
        raise Unreadable("unknown_call_form")
    return value["tool_calls"]


def _is_call(item: Any, offered: Collection[str]) -> bool:
    """Whether JSON is a call of a function on offer, and not data with a name. Unreadable for a
    call under other keys, or of another function."""
    if not isinstance(item, Mapping):
        return False
    if item.get("name") in offered and not item.keys().isdisjoint(tool_calls.ARGUMENT_KEYS):
        return True
    named = any(isinstance(value, str) and value in offered for value in item.values())
    name_is_key = len(item) == 1 and next(iter(item)) in offered
    holds = any(isinstance(value, Mapping) for value in item.values())
    if (holds and (named or name_is_key)) or _is_name_and_arguments(item):
        raise Unreadable("unknown_call_form")
    return False


def _is_name_and_arguments(item: Any) -> bool:
    """Whether JSON is a name and an object of arguments, and nothing else."""
    if not isinstance(item, Mapping) or len(item) != 2 or not isinstance(item.get("name"), str):
        return False
    return any(isinstance(item.get(key), Mapping) for key in tool_calls.ARGUMENT_KEYS)
