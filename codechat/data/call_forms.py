"""How public sets write calls into the text of an answer.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen; one or several values in each tag
    <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>     Nemotron, When2Call
    [get_weather(city="Oslo"), get_time(zone="UTC")]             ToolACE, the Berkeley leaderboard, Llama 3.2
    {"name": "get_weather", "parameters": {"city": "Oslo"}}      Llama 3.1, also a list, also in a fence

A closing tag inside a string belongs to the string. The last two forms count only if their functions are offered: a
list or an object may be the requested answer. An answer with the mark of another form is unreadable, never prose.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text import tool_calls
from codechat.text.tool_calls import Call, Unreadable

_OPENS = re.compile(r"<(tool_call|TOOLCALL)>")
# A result may quote the closing tag, so only one that ends the text or precedes another result counts.
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>(?=\s*(?:<tool_response>|\Z))", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json|python)?\s*\n?(.*?)\s*```\Z", re.DOTALL)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s()\[\]{}\"'=,;][^()\[\]{}\"'=,;\n]*?(?=\s*\()")
_KEY = re.compile(r"\s*([^\s()\"'=,][^()\"'=,\n]*?)\s*=(?!=)\s*")
# `[f(x)]` may be an ordinary answer in Python, so only keyword arguments, or none, look like calls.
_LIKE_PYTHON = re.compile(r"\A\[\s*[A-Za-z_][^\s()\[\]{}\"'=,;]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=).*)?\)\s*\]\Z", re.DOTALL)
# Marks of call forms that are not read. The first never occur in prose; the others may, in answers without tools.
_FOREIGN = re.compile(
    r"<\|python_tag\|>|\[TOOL_CALLS\]|<\|tool_calls?(?:_section)?_?(?:begin)?\|>|<｜tool▁calls?▁begin｜>"
    r"|<start_function_call>|<\|action_start\|>|<\|channel\|>commentary|<｜DSML｜"
)
_FOREIGN_WITH_TOOLS = re.compile(
    r"<function=|<function_calls?>|<tool_calls>|<tool_use>|<invoke name="
    r"|```tool_(?:code|call)|^Action:.*\n+Action Input:",
    re.MULTILINE,
)


class Answer(NamedTuple):
    """What an assistant says, and then its calls in canonical text."""

    prose: str
    calls: list[str]


class Found(NamedTuple):
    """Calls in a text, and where they end."""

    calls: list[Call]
    end: int


def read_answer(text: str, offered: Collection[str], marked: bool = False) -> Answer:
    """The prose and the calls of an answer. offered: names of the functions on offer; marked: only tags mark calls.
    Unreadable for calls that cannot be read, for text after a call, and for an unknown form of calls."""
    opens = _OPENS.search(text)
    if opens:
        begin = opens.start()
        return Answer(text[:begin].strip(), written(_tagged(text, begin)))
    if marked:
        return Answer(text, [])
    if _FOREIGN.search(text) or (offered and _FOREIGN_WITH_TOOLS.search(text)):
        raise Unreadable("unknown_call_form")
    if offered:
        return _python_answer(text, offered) or _json_answer(text, offered) or Answer(text, [])
    bare = text.strip()
    if _LIKE_PYTHON.match(bare) and _python_calls(bare, 0, ()) is not None:
        raise Unreadable("call_without_tools")
    return Answer(text, [])


def calls_in(value: Any) -> list[str]:
    """Canonical calls of a field: an object, a list, or text that holds them in JSON or as Python literals, one after
    the other, with or without tags. Unreadable."""
    if not isinstance(value, str):
        return written(map(tool_calls.read_call, _listed(value)))
    text = value.strip()
    return written(_tagged(text, 0) if _OPENS.match(text) else _values(text, 0).calls)


def results_in(text: str) -> list[str]:
    """The results in <tool_response> tags; none if there is other text around them."""
    return [] if _RESULT.sub("", text).strip() else _RESULT.findall(text)


def written(calls: Iterable[Call]) -> list[str]:
    """The canonical texts of calls that were read. Unreadable for none, or one without a name or arguments."""
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
    """An answer with unreadable calls, its tags replaced by ours: a rejected answer may look like this."""
    text = _OPENS.sub(f"{tool_calls.CALL_TAG} ", text)
    return re.sub(r"[ \t]*</(?:tool_call|TOOLCALL)>", "", text).strip()


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _tagged(text: str, at: int) -> list[Call]:
    """The calls in tags from `at` to the end of the text. A closing tag may be missing."""
    calls: list[Call] = []
    while at < len(text):
        opens = _OPENS.match(text, at)
        if not opens:
            raise Unreadable("text_after_call")
        found = _values(text, opens.end(), f"</{opens[1]}>")
        calls += found.calls
        at = _after_space(text, found.end)
    return calls


def _values(text: str, at: int, closing: str = "") -> Found:
    """The calls of the values from `at` to the closing tag, the next opening one, or the end of the text."""
    calls: list[Call] = []
    while True:
        at = _after_space(text, at)
        if closing and text.startswith(closing, at):
            return Found(calls, at + len(closing))
        if at == len(text) or (closing and _OPENS.match(text, at)):
            return Found(calls, at)
        # `[f(a=1)]` first: as a literal it would be unreadable.
        python = _python_calls(text, at, ()) if text[at] == "[" else None
        if python is not None:
            calls += python.calls
            at = python.end
            continue
        found = tool_calls.value_at(text, at) if text[at] in "[{" else None
        if found is None:
            raise Unreadable("text_after_call" if calls else "unreadable_call")
        value, at = found
        calls += map(tool_calls.read_call, _listed(value))
        at = _after_space(text, at)
        if text.startswith((",", ";"), at):
            at += 1


def _python_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer, if it ends in calls as Python writes them; None if it calls no function on offer."""
    text = text.rstrip()
    body = _FENCE.sub(r"\1", text.strip())
    whole = _python_calls(body, 0, offered)
    if whole is not None and whole.end == len(body):
        # A list of calls is meant as calls; without its brackets, only what names functions on offer.
        if body.startswith("[") or all(call.name in offered for call in whole.calls):
            return Answer("", written(whole.calls))
    names = "|".join(re.escape(name) for name in sorted(offered, key=len, reverse=True))
    begins = re.search(rf"\[\s*(?:{names})\s*\(|\A\s*(?:{names})\s*\([^()]*=", text)
    if begins:
        found = _python_calls(text, begins.start(), offered)
        if found is None:
            raise Unreadable("unreadable_call")
        if text[found.end :].strip():
            raise Unreadable("text_after_call")
        return Answer(text[: begins.start()].strip(), written(found.calls))
    if _LIKE_PYTHON.match(body):
        raise Unreadable("unreadable_call")
    return None


def _python_calls(text: str, at: int, offered: Collection[str]) -> Found | None:
    """The calls of `[f(a="b"), g(c=1)]`, or of calls without the brackets; None if they cannot be read. A name may
    hold spaces, dots, slashes and, if it is on offer, anything."""
    at = _after_space(text, at)
    listed = text.startswith("[", at)
    if listed:
        at += 1
    calls: list[Call] = []
    while True:
        at = _after_space(text, at)
        name = _name_at(text, at, offered)
        if name is None:
            return None
        bracket = _after_space(text, at + len(name))
        found = _arguments(text, bracket + 1)
        if found is None:
            return None
        arguments, at = found
        calls.append(Call(name, arguments, "object"))
        end = _after_space(text, at)
        if listed and text.startswith("]", end):
            return Found(calls, end + 1)
        if text.startswith((",", ";"), end):
            at = end + 1
        elif listed:
            return None
        # Without brackets a call may follow on the next line; on the same line anything else ends the calls.
        elif "\n" not in text[at:end] or _name_at(text, end, offered) is None:
            return Found(calls, at)


def _name_at(text: str, at: int, offered: Collection[str]) -> str | None:
    """The name of a function whose bracket follows: the longest one on offer, else one without quotes and brackets."""
    known = [name for name in offered if text.startswith(name, at) and _opens(text, at + len(name))]
    if known:
        return max(known, key=len)  # `get` is also the beginning of `get time`
    other = _NAME.match(text, at)
    return other[0] if other else None


def _opens(text: str, at: int) -> bool:
    """Whether a bracket is next."""
    return text.startswith("(", _after_space(text, at))


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    """(arguments, end) from behind the opening bracket: names and literals. None for anything else."""
    arguments: dict[str, Any] = {}
    while True:
        at = _after_space(text, at)
        if text.startswith(")", at):
            return arguments, at + 1
        key = _KEY.match(text, at)
        if key is None or key[1] in arguments:
            return None
        found = tool_calls.value_at(text, key.end())
        if found is None:
            return None
        arguments[key[1]], at = found
        at = _after_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            return None


def _json_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer, if it holds nothing but calls of functions on offer in JSON."""
    body = _FENCE.sub(r"\1", text.strip())
    found = tool_calls.value_at(body, 0) if body.startswith(("{", "[")) else None
    if found is None:
        return None
    value, end = found
    items = _listed(value)
    if body[end:].strip() or not items or not all(_calls_offered(item, offered) for item in items):
        return None
    return Answer("", written(map(tool_calls.read_call, items)))


def _calls_offered(item: Any, offered: Collection[str]) -> bool:
    """Whether an object is a call of a function on offer, and not data with a name."""
    if not isinstance(item, Mapping) or item.get("name") not in offered:
        return False
    return not item.keys().isdisjoint(tool_calls.ARGUMENT_KEYS)
