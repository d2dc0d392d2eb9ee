"""The tools that a row offers: schemas of a column, and schemas inside a system text.

<tools>{...}</tools>                    Hermes, Qwen
<|im_system|>tool_declare<|im_middle|>  Kimi's template, in Toucan's system turns
[{"name": ..., "parameters": {...}}]    ToolACE, the Berkeley leaderboard, among sentences about
                                        their form of calls
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from codechat.core.errors import DataError
from codechat.data.sources import without_nulls
from codechat.text import tool_calls, tool_lists
from codechat.text.tool_calls import Unreadable
from codechat.text.tool_schemas import listed_tools, say_unknown, tool_schema, whole_object

_TOOLS = re.compile(r"<tools>(?=\s*[\[{])")  # the sentences before the list may name the tags too
_DECLARED = re.compile(r"<\|im_system\|>tool_declare<\|im_middle\|>")
# What ToolACE's and the Berkeley leaderboard's system texts say about their form of calls,
# which is not ours.
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
_OPENING = re.compile(r"(?:<(\w+)>|```(?:json)?)\s*\Z")  # a tag or a fence before a list of schemas
_OFFERS = re.compile("list of functions in JSON format", re.IGNORECASE)


class SchemaList(NamedTuple):
    """The first list of schemas in a text: text[begin:end]."""

    begin: int
    end: int
    items: list[Any]


def without_list(text: str) -> tuple[str, Any]:
    """A system text without its list of tools and the sentences about another form of calls;
    and the list, as text or as objects. A list in our style stays in the text. Unreadable for a
    list that cannot be read."""
    declared = _DECLARED.search(text)
    if declared:
        return text[: declared.start()].strip(), text[declared.end() :]
    tags = _TOOLS.search(text)
    if tags:
        # The rest of Hermes' text only explains its tags; in Qwen's template the row's own text
        # ends at a heading.
        before, heading, _ = text[: tags.start()].partition("# Tools")
        own = before.strip() if heading else ""
        return own, _json_part(text, tags.end())
    if tool_lists.WITH_TOOLS in text:
        return text, ""
    listed = _schema_list(text)
    if not listed.items and not _OFFERS.search(text):
        return text, ""
    if not listed.items and "{" in text:
        raise Unreadable("unreadable_tools")
    return _without_wording(text, listed), listed.items


def _without_wording(text: str, listed: SchemaList) -> str:
    """The text around a list, without the tags of the list and the sentences of `_WORDING`."""
    before = text[: listed.begin].rstrip()
    after = text[listed.end :].lstrip()
    opening = _OPENING.search(before)
    if opening:
        closing = f"</{opening[1]}>" if opening[1] else "```"
        if after.startswith(closing):
            before = before[: opening.start()].rstrip()
            after = after.removeprefix(closing)
    rest = f"{before}\n{after.lstrip(' .')}"
    lines = _WORDING.sub("", rest).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines).strip()


def _json_part(text: str, begin: int) -> str:
    """The JSON values from `begin` on; all of the rest if there are none. A tag inside a string
    ends no value."""
    end = begin
    while read := tool_calls.value_at(text, end):
        end = read.end
        while end < len(text) and text[end] in ", \n\t\r":
            end += 1
    return text[begin:end] if end > begin else text[begin:]


def _schema_list(text: str) -> SchemaList:
    """The first list of schemas in a text, or the first schemas one after the other; no items
    if there are none."""
    begin = 0
    end = 0
    items: list[Any] = []
    for mark in re.finditer(r"\[\s*\{|\{", text):
        at = mark.start()
        read = tool_calls.value_at(text, at) if at >= end else None
        if read is None:
            continue
        more = read.value if isinstance(read.value, list) else [read.value]
        if not all(_is_schema(item) for item in more):
            continue
        if items and text[end:at].strip(" \t\r\n,"):
            break
        if not items:
            begin = at
        items += more
        end = read.end
    return SchemaList(begin, end, items)


def _is_schema(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return False
    # Without the object around it, a name alone may be any data.
    return inner is not value or bool({"parameters", "inputSchema", "input_schema"} & inner.keys())


def schemas(value: Any) -> list[dict[str, Any]]:
    """Tool schemas of a column, or of a text that holds them, without the object around a
    function. Unreadable."""
    if isinstance(value, str):
        items = listed_tools(_objects(value))
    elif isinstance(value, Sequence):
        items = listed_tools([item for each in value for item in _items(each)])
    else:
        items = listed_tools(value)
    return [_schema(item) for item in items if item is not None]


def _items(value: Any) -> list[Any]:
    """The schemas of an item of a list, which may be JSON text (When2Call). Unreadable for a
    text without one."""
    if not isinstance(value, str):
        return [value]
    items = _objects(value)
    if not items:
        raise Unreadable("unreadable_tools")
    return items


def _objects(text: str) -> list[Any]:
    """The JSON objects of a text: a list of them, one a line, or one after the other."""
    decoder = json.JSONDecoder(strict=False)
    items = []
    at = text.find("{")
    while at >= 0:
        try:
            item, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise Unreadable("unreadable_tools") from None
        items.append(item)
        at = text.find("{", end)
    return items


def _schema(item: Any) -> dict[str, Any]:
    """A schema with name, description and an object of parameters, without null fields. An
    unknown type becomes any type and is named on stderr."""
    unknown: list[str] = []
    try:
        schema = tool_schema(without_nulls(item), unknown)
    except DataError as error:
        raise Unreadable("unreadable_tools", None, str(error)) from None
    say_unknown(unknown)
    return schema | {"parameters": whole_object(schema["parameters"])}
