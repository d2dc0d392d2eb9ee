"""How public sets write calls into the text of an answer.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen; one or several values in each tag
    <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>     Nemotron, When2Call
    [get_weather(city="Oslo"), get_time(zone="UTC")]             ToolACE, the Berkeley leaderboard, Llama 3.2
    {"name": "get_weather", "parameters": {"city": "Oslo"}}      Llama 3.1, also a list, also in a fence
    {"tool_calls": [{"name": ..., "arguments": {...}}]}          xLAM's models

Reasoning in tags before an answer is prose, whatever it says. A closing tag inside a string belongs to the string. The last three forms count only where their functions are offered: a
list or an object may be what was asked for. An answer that carries the mark of another form is not taken for prose.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.text import tool_calls
from codechat.text.tool_calls import Call, Unreadable

_OPENS = re.compile(r"<(tool_call|TOOLCALL)>")
_FENCE = re.compile(r"\A```(?:json|python)?\s*\n?(.*?)\s*```\Z", re.DOTALL)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s()\[\]{}\"'=,;][^()\[\]{}\"'=,;\n]*?(?=\s*\()")
_KEY = re.compile(r"\s*([^\s()\"'=,][^()\"'=,\n]*?)\s*=(?!=)\s*")
_LIKE_PYTHON = re.compile(r"\A\[\s*[A-Za-z_][^\s()\[\]{}\"'=,;]*\(\s*(?:[A-Za-z_]\w*\s*=(?!=).*)?\)\s*\]\Z", re.DOTALL)
_THOUGHT = re.compile(r"\A\s*<(think|thinking|reasoning|scratch_pad)>.*?</\1>\s*", re.DOTALL)
# Marks of call forms that are not read. The first never stand in prose; the others only where tools are offered.
_FOREIGN = re.compile(
    r"<\|python_tag\|>|\[TOOL_CALLS\]|<\|[^|<>\s]*(?:tool|call|function)[^|<>\s]*\|>|<｜tool▁calls?▁begin｜>"
    r"|<start_function_call>|<\|action_start\|>|<\|channel\|>commentary|<｜DSML｜"
)
_FOREIGN_WITH_TOOLS = re.compile(
    r"<function=|<function_calls?>|<tool_calls>|<tool_use>|<invoke name=|```tool_(?:code|call)|\bfunctools\["
    r"|^Action:.*\n+Action Input:|^Action:\s*```json",
    re.MULTILINE,
)


class Answer(NamedTuple):
    """What an assistant says, and then its calls in canonical text."""

    prose: str
    calls: list[str]


def read_answer(text: str, offered: Collection[str], marked: bool = False) -> Answer:
    """The prose and the calls of an answer. offered: names of the functions on offer; marked: only tags mark calls.
    Unreadable for calls that cannot be read, for text after a call, and for a call form that is not known."""
    said = without_thought(text)
    answer = _read_behind_thought(said, offered, marked)
    thought = text[: len(text) - len(said)]
    return Answer((thought + answer.prose).strip(), answer.calls) if thought else answer


def _read_behind_thought(text: str, offered: Collection[str], marked: bool) -> Answer:
    """`read_answer` of a text without reasoning in tags."""
    if opens := _OPENS.search(text):
        return Answer(text[: opens.start()].strip(), written(_tagged(text, opens.start())))
    if marked:
        return Answer(text, [])
    if _FOREIGN.search(text) or (offered and _FOREIGN_WITH_TOOLS.search(text)):
        raise Unreadable("unknown_call_form")
    if not offered:
        body = text.strip()
        if _LIKE_PYTHON.match(body) and _python_calls(body, 0, ()) is not None:
            raise Unreadable("call_without_tools")
        if any(map(_calls_another, _whole_json(body))):
            raise Unreadable("call_without_tools")
        return Answer(text, [])
    answer = _python_answer(text, offered) or _json_answer(text, offered)
    if answer is None:
        _reject_hidden_calls(text, offered)
    return answer or Answer(text, [])


def calls_in(value: Any) -> list[str]:
    """Canonical calls of a field: an object, a list, or text that holds them in JSON or as Python literals, one after the
    other, with or without tags. Unreadable."""
    if isinstance(value, str):
        text = value.strip()
        calls = _tagged(text, 0) if _OPENS.match(text) else _values(text, 0)[0]
        return written(calls)
    return written(map(tool_calls.read_call, value if isinstance(value, (list, tuple)) else [value]))


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


def without_thought(text: str) -> str:
    """An answer without the reasoning in tags that it begins with."""
    thought = _THOUGHT.match(text)
    return text[thought.end() :] if thought else text


def as_written(text: str) -> str:
    """An answer whose calls nobody could read, with our tag in place of its tags: what a rejected answer may be."""
    text = _OPENS.sub(f"{tool_calls.CALL_TAG} ", text)
    return re.sub(r"[ \t]*</(?:tool_call|TOOLCALL)>", "", text).strip()


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
        more, at = _values(text, opens.end(), f"</{opens[1]}>")
        calls += more
        at = _after_space(text, at)
    return calls


def _values(text: str, at: int, closing: str = "") -> tuple[list[Call], int]:
    """(calls, end) of the values from `at` to the closing tag, the next opening one, or the end of the text."""
    calls: list[Call] = []
    while True:
        at = _after_space(text, at)
        if closing and text.startswith(closing, at):
            return calls, at + len(closing)
        if at == len(text) or (closing and _OPENS.match(text, at)):
            return calls, at
        python = _python_calls(text, at, ()) if text[at] == "[" else None
        if python is not None:
            more, at = python
            calls += more
            continue
        found = tool_calls.value_at(text, at) if text[at] in "[{" else None
        if found is None:
            raise Unreadable("text_after_call" if calls else "unreadable_call")
        value, at = found
        calls += [tool_calls.read_call(item) for item in (value if isinstance(value, list) else [value])]
        at = _after_space(text, at)
        if text.startswith((",", ";"), at):
            at += 1


def _python_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer where it ends in calls as Python writes them; None where no function on offer is called so."""
    text = text.rstrip()
    body = _FENCE.sub(r"\1", text.strip())
    whole = _python_calls(body, 0, offered)
    if whole is not None and whole[1] == len(body) and (body.startswith("[") or _all_offered(whole[0], offered)):
        return Answer("", written(whole[0]))
    names = "|".join(re.escape(name) for name in sorted(offered, key=len, reverse=True))
    for begins in re.finditer(rf"\[\s*(?:{names})\s*\(|\A\s*(?:{names})\s*\([^()]*=", text):
        found = _python_calls(text, begins.start(), offered)
        if found is None:
            raise Unreadable("unreadable_call")
        if text[found[1] :].strip():
            raise Unreadable("text_after_call")
        return Answer(text[: begins.start()].strip(), written(found[0]))
    if _LIKE_PYTHON.match(body):
        raise Unreadable("unreadable_call")
    return None


def _reject_hidden_calls(text: str, offered: Collection[str]) -> None:
    """Unreadable for a call as Python writes it, of a function on offer, in an answer that was read as prose: another
    form has marks around it, or arguments without names."""
    names = "|".join(re.escape(name) for name in sorted(offered, key=len, reverse=True))
    for begins in re.finditer(rf"(?<![\w.])(?:{names})\s*\([^()]*=", text):
        if _python_calls(text, begins.start(), offered) is not None:
            raise Unreadable("unknown_call_form")
    if re.fullmatch(rf"\s*(?:{names})\s*\(.*\)\s*", text, re.DOTALL):
        raise Unreadable("unknown_call_form")


def _all_offered(calls: Iterable[Call], offered: Collection[str]) -> bool:
    return all(call.name in offered for call in calls)


def _python_calls(text: str, at: int, offered: Collection[str]) -> tuple[list[Call], int] | None:
    """(calls, end) of `[f(a="b"), g(c=1)]`, or of calls without the brackets; None where they cannot be read. A name may
    hold spaces, dots, slashes and, if it is on offer, anything."""
    at = _after_space(text, at)
    listed = text.startswith("[", at)
    at += listed
    calls: list[Call] = []
    while True:
        at = _after_space(text, at)
        name = _name_at(text, at, offered)
        if name is None:
            return None
        found = _arguments(text, _after_space(text, at + len(name)) + 1)
        if found is None:
            return None
        arguments, at = found
        calls.append(Call(name, arguments, "object"))
        end = _after_space(text, at)
        if listed and text.startswith("]", end):
            return calls, end + 1
        if text.startswith((",", ";"), end):
            at = end + 1
            last = _after_space(text, at)
            if listed and text.startswith("]", last):
                return calls, last + 1
        elif listed:
            return None
        elif "\n" not in text[at:end] or _name_at(text, end, offered) is None:
            return calls, at


def _name_at(text: str, at: int, offered: Collection[str]) -> str | None:
    """The name of a function whose bracket follows: the longest one on offer, else one without quotes and brackets."""
    known = [name for name in offered if text.startswith(name, at)]
    known = [name for name in known if text.startswith("(", _after_space(text, at + len(name)))]
    if known:
        return max(known, key=len)
    other = _NAME.match(text, at)
    return other[0] if other else None


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    """(arguments, end) from behind the opening bracket: names and literals. None for anything else."""
    arguments: dict[str, Any] = {}
    while True:
        at = _after_space(text, at)
        if text.startswith(")", at):
            return arguments, at + 1
        key = _KEY.match(text, at)
        found = tool_calls.value_at(text, key.end()) if key else None
        if key is None or found is None or key[1] in arguments:
            return None
        arguments[key[1]], at = found
        at = _after_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            return None


def _json_answer(text: str, offered: Collection[str]) -> Answer | None:
    """The answer where it ends in calls of functions on offer in JSON; None where it has none. Unreadable for JSON that
    is a call in another form, or of a function that is not on offer."""
    items = _whole_json(text)
    if items:
        if any(_is_call(item, offered) for item in items):
            return Answer("", written(map(tool_calls.read_call, items)))
        return None
    names = "|".join(re.escape(json.dumps(name)) for name in offered)
    keys = "|".join(tool_calls.ARGUMENT_KEYS)
    begins = re.search(
        rf'(?:```(?:json)?\s*)?(?P<call>(?:\[\s*)?\{{\s*"name"\s*:\s*(?:{names})\s*,\s*"(?:{keys})"\s*:)', text
    )
    if begins is None:
        return None
    found = tool_calls.value_at(text, begins.start("call"))
    if found is None:
        raise Unreadable("unreadable_call")
    if text[found[1] :].strip().strip("`"):
        raise Unreadable("text_after_call")
    items = found[0] if isinstance(found[0], list) else [found[0]]
    return Answer(text[: begins.start()].strip(), written(map(tool_calls.read_call, items)))


def _whole_json(text: str) -> list[Any]:
    """The items of the JSON that a text consists of, in a fence or not; none where it is something else."""
    body = _FENCE.sub(r"\1", text.strip())
    found = tool_calls.value_at(body, 0) if body.startswith(("{", "[")) else None
    return _listed(found[0]) if found is not None and not body[found[1] :].strip() else []


def _listed(value: Any) -> list[Any]:
    """The items of a list, or of an object that has nothing but `tool_calls`, each without the object around it."""
    if isinstance(value, Mapping) and isinstance(value.get("tool_calls"), list):
        if any(other for key, other in value.items() if key != "tool_calls") or not value["tool_calls"]:
            raise Unreadable("unknown_call_form")
        value = value["tool_calls"]
    items = value if isinstance(value, list) else [value]
    return [_function_of(item) for item in items]


def _function_of(item: Any) -> Any:
    """What OpenAI's {"type": "function", "function": {...}} holds; anything else as it is."""
    inner = item.get("function") if isinstance(item, Mapping) else None
    return inner if isinstance(inner, Mapping) else item


def _is_call(item: Any, offered: Collection[str]) -> bool:
    """Whether JSON is a call of a function on offer. Unreadable where it is one under other keys or of another function."""
    if not isinstance(item, Mapping):
        return False
    has_arguments = bool(set(tool_calls.ARGUMENT_KEYS) & item.keys())
    if item.get("name") in offered and has_arguments:
        return True
    named = any(isinstance(value, str) and value in offered for value in item.values())
    holds = any(isinstance(value, Mapping) for value in item.values())
    name_is_key = len(item) == 1 and next(iter(item)) in offered
    if (named and holds) or (name_is_key and holds) or _calls_another(item):
        raise Unreadable("unknown_call_form")
    return False


def _calls_another(item: Any) -> bool:
    """Whether JSON is a name and an object of arguments, and nothing else."""
    if not isinstance(item, Mapping) or len(item) != 2 or not isinstance(item.get("name"), str):
        return False
    return any(isinstance(item.get(key), Mapping) for key in tool_calls.ARGUMENT_KEYS)
