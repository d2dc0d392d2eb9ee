"""Tool calls in the words of other models, read as calls of our chat format.

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>         Hermes, Qwen, SmolLM3, Granite 4
    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]                 Mistral; also [TOOL_CALLS]f[ARGS]{"a": 1}
    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]                 Granite 3, Phi-4-mini
    <|tool_call_start|>[f(a=1)]<|tool_call_end|>                        LFM2
    {"name": "f", "parameters": {"a": 1}}                               Llama 3, also behind <|python_tag|>
    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>           Qwen3-Coder
    <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>               GLM
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ... ```json {"a": 1} ```              DeepSeek

A model also writes calls that its template does not ask for: in Markdown fences, or bare, one
object, a list of objects, or an object on each line. `read` takes all of these and says which
it was. Reasoning in tags before the answer is prose. What follows the last call, or stands
between two, is kept as text. Where a template writes JSON, lists of Python or `<function=` between
marks of its own, `native_template` finds these and `read` takes them too. A call in tags of
which a part cannot be read is no call with fewer arguments. Nothing here raises: a model is
rewarded for what it writes.
`settled` is what a stream may show before the end is known."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from codechat.text import tool_calls
from codechat.text.tool_calls import CALL_TAG, Call, after_space, after_thought, finite, function_of

NAME_KEYS = ("name", "function")
# how Qwen3-Coder's template writes them between tags
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
# the pairs of marks around calls; the closing one may be missing
MARKS = {
    CALL_TAG: "",
    "<tool_call>": "</tool_call>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
    "[TOOL_CALLS]": "[/TOOL_CALLS]",
    "<|python_tag|>": "<|eom_id|>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",
}
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:\n?[ \t]*```|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<{\[]+)\s*(?=<arg_key>|\Z)")
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*")
_DEEPSEEK = re.compile(
    r"\s*<｜tool▁call▁begin｜>"
    r"(?:function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```|([^<\n]+)<｜tool▁sep｜>(.*?))"
    r"<｜tool▁call▁end｜>",
    re.DOTALL,
)
_KIMI = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^:<\s]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"<\|tool_call_end\|>",
    re.DOTALL,
)
_FUNCTION_NAME = re.compile(r"[A-Za-z_][\w.]*")
_MARKED_NAME = re.compile(r"[A-Za-z_][\w.-]*")  # behind a mark, where no text can be meant
_OBJECT = re.compile(r"\{\s*[\"'](?:name|function|type)[\"']\s*:")
_PAYLOAD = re.compile(r"[{\[]|<function=")
# the beginning of a fence or of an object at the end of a text
_BEGUN = re.compile(r"(?:`{1,2}|```\w*[ \t]*|\{\s*[\"']?\w*[\"']?\s*)\Z")

_NAME = re.compile(r"[^\s()\[\]{}\"'=,;][^()\[\]{}\"'=,;\n]*?(?=\s*\()")
_KEY = re.compile(r"\s*([^\s()\"'=,][^()\"'=,\n]*?)\s*=(?!=)\s*")


# functions and their arguments that are declared as texts; whether null is allowed too
Texts = Mapping[tuple[str, str], bool]
NO_TEXTS: Texts = {}


class Marks(NamedTuple):
    """What a reader knows: the pairs of marks, and which values between tags are texts."""

    closing: Mapping[str, str]  # of each opening one
    opens: re.Pattern[str]
    # where the next call may begin: no pattern looks further, so that reading takes linear time
    next: re.Pattern[str]
    texts: Texts = NO_TEXTS


Own = tuple[str, str] | None  # the pair of marks of a template that MARKS lacks


@lru_cache(maxsize=16)
def marks_with(own: Own = None) -> Marks:
    """MARKS, and those of a template."""
    pairs = MARKS | ({own[0]: own[1]} if own else {})
    longest_first = sorted((*pairs, "<function="), key=len, reverse=True)
    opens = "|".join(map(re.escape, longest_first))
    further = map(re.escape, ("<｜tool▁call▁begin｜>", "<|tool_call_begin|>"))
    return Marks(pairs, re.compile(opens), re.compile("|".join((opens, *further))))


class Written(NamedTuple):
    """An answer as a model wrote it."""

    prose: str  # what it says beside its calls
    calls: list[Call]
    surface: str  # where calls were written: tagged, fenced, bare; none: no call was found
    # of the first call: json (objects), list (of these), python, xml (parameters in tags), or
    # marks (a name and marks before JSON)
    layout: str = "json"

    @property
    def form(self) -> str:
        """Surface and layout in words: "tagged", "fenced list", "bare python", "none"."""
        if self.layout == "json":
            return self.surface
        return f"{self.surface} {self.layout}"


class Found(NamedTuple):
    """Calls in a text, where they end, and their layout (`Written`)."""

    calls: list[Call]
    end: int
    layout: str = "json"


class Placed(NamedTuple):
    """A place of a text, and the calls that it holds."""

    start: int
    end: int
    found: Found


def read(text: str, own: Own = None, texts: Texts = NO_TEXTS) -> Written:
    """The prose and the calls of an answer in any of the forms above. own: further marks. texts:
    where a value between tags stays as it is written, even if it could be JSON: `10115`."""
    marks = marks_with(own)._replace(texts=texts)
    begin = after_thought(text)
    # first those whose arguments may spell a mark
    whole = _whole(text[begin:])
    if whole:
        return Written(text[:begin].rstrip(), whole.calls, "bare", whole.layout)
    fences = _fences(text, begin)
    mark = _mark_outside(text, begin, fences, marks)
    if mark >= 0:
        return _tagged(text, mark, marks)
    if fences:
        return _among(text, fences, "fenced")
    return _among(text, _objects(text, begin), "bare")


def after_mark(text: str, own: Own = None) -> int:
    """The place behind the mark with which a text begins; its beginning where there is none."""
    opens = marks_with(own).opens.match(text, after_space(text, 0))
    return opens.end() if opens else 0


def around_call(text: str) -> tuple[str, str] | None:
    """What stands before a call and behind it, if nothing else does; None without a call."""
    marks = marks_with()
    for opens in _PAYLOAD.finditer(text):
        at = opens.start()
        for reader in (_json_values, _functions, _python):
            found = reader(text, at, "", marks)
            if found is not None:
                return text[:at].strip(), text[found.end :].strip()
    return None


def canonical(text: str, own: Own = None, texts: Texts = NO_TEXTS) -> str:
    """An answer in our chat format: what it says, then each call behind our tag. An answer
    without a call is unchanged; a call that cannot be read stays as it is, behind our tag."""
    written = read(text, own, texts)
    if written.surface == "none":
        return text
    lines = [written.prose] if written.prose else []
    for call in written.calls:
        readable = bool(call.name and call.name.strip()) and call.arguments is not None
        lines.append(
            tool_calls.format_call(call.name, call.arguments)
            if readable
            else f"{CALL_TAG} {call.after}"
        )
    return "\n".join(lines)


def settled(text: str, own: Own = None) -> str:
    """The beginning of an unfinished answer that stays as it is whatever follows: all before a
    mark, an object or a fence that may hold calls, or the beginning of such. `canonical` of the
    finished answer begins with it."""
    marks = marks_with(own)
    begin = after_thought(text)
    if not text[begin:].strip() or text[begin:].lstrip().startswith(("{", "[")):
        return text[:begin].rstrip()
    ends = [len(text) - _begun(text, marks)]
    ends += [
        found.start()
        for found in (marks.opens.search(text, begin), _OBJECT.search(text, begin))
        if found
    ]
    ends += [fence.start() for fence in _FENCE.finditer(text, begin) if _may_call(fence)]
    return text[: min(ends)].rstrip()


def _begun(text: str, marks: Marks) -> int:
    """How many characters at the end of a text may be the beginning of a mark, a fence or an
    object."""
    starts = (*marks.closing, "<function=")
    mark = 0
    for n in range(1, min(max(map(len, starts)), len(text)) + 1):
        if any(start.startswith(text[-n:]) for start in starts):
            mark = n
    other = _BEGUN.search(text)
    return max(mark, len(other[0]) if other else 0)


def _may_call(fence: re.Match[str]) -> bool:
    """Whether a fence holds calls, or may do so once it is closed."""
    text = fence[0].rstrip()
    closed = text.endswith("```") and text.count("```") > 1
    if closed:
        return _whole(fence[1]) is not None
    body = fence[1].lstrip()
    return not body or body.startswith(("{", "["))


def _tagged(text: str, begin: int, marks: Marks) -> Written:
    """The answer whose first mark stands at `begin`."""
    prose = [text[:begin].rstrip()]
    calls: list[Call] = []
    layout = ""
    at = begin
    while at < len(text):
        opens = marks.opens.match(text, at)
        if opens is None:
            further = marks.opens.search(text, at)
            end = further.start() if further else len(text)
            prose.append(text[at:end].strip())
            at = end
            continue
        closing = marks.closing.get(opens[0], "")
        inside = at if opens[0] == "<function=" else opens.end()
        found = _inside(text, inside, closing, marks)
        if found is None:
            stop = _end_of(text, inside, closing, marks)
            calls.append(Call(None, None, "bad_json", text[inside:stop].strip()))
            at = _after(text, stop, closing)
        else:
            calls += found.calls
            layout = layout or found.layout
            at = _after(text, found.end, closing)
    said = "\n".join(filter(None, prose))
    return Written(said, calls, "tagged", layout or "json")


def _end_of(text: str, at: int, closing: str, marks: Marks) -> int:
    """Where the closing mark, the next opening one, or the text ends what begins at `at`."""
    further = marks.opens.search(text, at + 1)
    end = further.start() if further else len(text)
    closed = text.find(closing, at, end) if closing else -1
    return closed if closed >= 0 else end


def _next_call(text: str, at: int, marks: Marks) -> int:
    """Where another call may begin, behind the one that begins at `at` or behind white space."""
    further = marks.next.search(text, after_space(text, at) + 1)
    return further.start() if further else len(text)


def _after(text: str, at: int, closing: str) -> int:
    """The place behind white space and the closing mark."""
    at = after_space(text, at)
    if closing and text.startswith(closing, at):
        at = after_space(text, at + len(closing))
    return at


def _inside(text: str, at: int, closing: str, marks: Marks) -> Found | None:
    """The calls behind a mark; None for what is no call."""
    readers: tuple[Callable[[str, int, str, Marks], Found | None], ...] = (
        _json_values,
        _functions,
        _glm,
        _mistral,
        partial(_marked_pairs, pattern=_DEEPSEEK),
        partial(_marked_pairs, pattern=_KIMI),
        partial(_python, naming=_MARKED_NAME),
    )
    for reader in readers:
        found = reader(text, at, closing, marks)
        if found is not None and found.calls:
            return found
    return None


def _json_values(text: str, at: int, closing: str, marks: Marks) -> Found | None:
    """Objects or lists of them, one after the other, with or without commas, up to the first
    that is no call."""
    calls: list[Call] = []
    end = at
    layout = "json"
    if text.startswith("[", _skipped(text, at)):
        layout = "list"
    while True:
        at = _skipped(text, end)
        read = tool_calls.value_at(text, at) if text.startswith(("{", "["), at) else None
        further = _calls_of(read.value) if read else []
        if read is None or not further:
            return Found(calls, end, layout) if calls else None
        calls += further
        end = read.end


def _skipped(text: str, at: int) -> int:
    """The place behind white space, commas and semicolons."""
    while at < len(text) and (text[at].isspace() or text[at] in ",;"):
        at += 1
    return at


def _functions(text: str, at: int, closing: str, marks: Marks) -> Found | None:
    """`<function=NAME>` with a parameter in each tag, or with JSON."""
    calls: list[Call] = []
    while True:
        found = _FUNCTION.match(text, at, _next_call(text, at, marks))
        if found is None:
            return Found(calls, at, "xml") if calls else None
        name = found[1].strip()
        body = found[2].strip()
        arguments = _object(body) if body.startswith("{") else _parameters(body, name, marks.texts)
        if arguments is None:
            return Found(calls, at, "xml") if calls else None
        calls.append(Call(name, arguments, "object"))
        at = found.end()


def _parameters(body: str, name: str, texts: Texts) -> dict[str, Any] | None:
    """A parameter in each tag; None for anything else beside them, and for one given twice."""
    arguments: dict[str, Any] = {}
    at = 0
    while at < len(body):
        pair = _PARAMETER.match(body, at)
        if pair is None or pair[1] in arguments:
            return None
        arguments[pair[1]] = _value(pair[2], texts.get((name, pair[1])))
        at = pair.end()
    return arguments


def _glm(text: str, at: int, closing: str, marks: Marks) -> Found | None:
    """A name, then a pair of tags for each argument."""
    end = _end_of(text, at, closing, marks)
    name = _GLM_NAME.match(text, at, end)
    if name is None:
        return None
    at = name.end()
    arguments: dict[str, Any] = {}
    while True:
        pair = _GLM_ARGUMENT.match(text, at, end)
        if pair is None:
            break
        key = pair[1].strip()
        if key in arguments:
            return None
        arguments[key] = _value(pair[2], marks.texts.get((name[1], key)))
        at = pair.end()
    if text[at:end].strip():
        return None
    call = Call(name[1], arguments, "object")
    return Found([call], at, "xml")


def _mistral(text: str, at: int, closing: str, marks: Marks) -> Found | None:
    """A name, a mark, then the arguments as JSON."""
    name = _MISTRAL.match(text, at)
    read = tool_calls.value_at(text, name.end()) if name else None
    if name is None or read is None or not isinstance(read.value, dict):
        return None
    call = Call(name[1], read.value, "object")
    return Found([call], read.end, "marks")


def _marked_pairs(
    text: str, at: int, closing: str, marks: Marks, pattern: re.Pattern[str]
) -> Found | None:
    """Marks around each call and, after DeepSeek, around its name and its arguments."""
    calls: list[Call] = []
    while True:
        found = pattern.match(text, at, _next_call(text, at, marks))
        if found is None:
            return Found(calls, at, "marks") if calls else None
        name, body = [group for group in found.groups() if group is not None]
        arguments = _object(body.strip())
        if arguments is None:
            return None
        calls.append(Call(name.strip(), arguments, "object"))
        at = found.end()


def _python(
    text: str, at: int, closing: str, marks: Marks, naming: re.Pattern[str] = _FUNCTION_NAME
) -> Found | None:
    """`[f(a=1), g()]`. naming: the names that functions may have."""
    at = after_space(text, at)
    found = python_calls(text, at, ()) if text.startswith("[", at) else None
    if found is None or not all(naming.fullmatch(str(call.name)) for call in found.calls):
        return None
    return found


def python_calls(text: str, at: int, offered: Collection[str]) -> Found | None:
    """The calls of `[f(a="b"), g(c=1)]`, or of calls without the brackets; None if they cannot
    be read. A name may hold spaces, dots, slashes and, if it is on offer, anything."""
    at = after_space(text, at)
    listed = text.startswith("[", at)
    if listed:
        at += 1
    calls: list[Call] = []
    while True:
        at = after_space(text, at)
        name = _name_at(text, at, offered)
        if name is None:
            return None
        bracket = after_space(text, at + len(name))
        found = _arguments(text, bracket + 1)
        if found is None:
            return None
        arguments, at = found
        calls.append(Call(name, arguments, "object"))
        end = after_space(text, at)
        if listed and text.startswith("]", end):
            return Found(calls, end + 1, "python")
        if text.startswith((",", ";"), end):
            at = end + 1
            last = after_space(text, at)
            if listed and text.startswith("]", last):
                return Found(calls, last + 1, "python")
        elif listed:
            return None
        # Without brackets a call may follow on the next line; on the same line anything else
        # ends the calls.
        elif "\n" not in text[at:end] or _name_at(text, end, offered) is None:
            return Found(calls, at, "python")


def _name_at(text: str, at: int, offered: Collection[str]) -> str | None:
    """The name of a function whose bracket follows: the longest one on offer, else one without
    quotes and brackets."""
    known = [name for name in offered if text.startswith(name, at) and _opens(text, at + len(name))]
    if known:
        return max(known, key=len)  # `get` is also the beginning of `get time`
    other = _NAME.match(text, at)
    return other[0] if other else None


def _opens(text: str, at: int) -> bool:
    """Whether a bracket is next."""
    return text.startswith("(", after_space(text, at))


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int] | None:
    """(arguments, end) from behind the opening bracket: names and literals. None for anything
    else."""
    arguments: dict[str, Any] = {}
    while True:
        at = after_space(text, at)
        if text.startswith(")", at):
            return arguments, at + 1
        key = _KEY.match(text, at)
        if key is None or key[1] in arguments:
            return None
        read = tool_calls.value_at(text, key.end())
        if read is None:
            return None
        arguments[key[1]] = read.value
        at = after_space(text, read.end)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            return None


def _whole(text: str) -> Found | None:
    """The calls of a text that is nothing else: JSON, objects on lines, or a Python list of
    calls."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return None
    for reader in (_json_values, _python):
        found = reader(text, 0, "", marks_with())
        if found is not None and not text[found.end :].strip():
            return found
    return None


def _fences(text: str, begin: int) -> list[Placed]:
    """The fences that hold calls and nothing else."""
    placed: list[Placed] = []
    for fence in _FENCE.finditer(text, begin):
        found = _whole(fence[1])
        if found:
            placed.append(Placed(fence.start(), fence.end(), found))
    return placed


def _mark_outside(text: str, begin: int, fences: Sequence[Placed], marks: Marks) -> int:
    """Where the first mark stands that no fence of calls holds; -1 for none."""
    at = begin
    for fence in fences:
        opens = marks.opens.search(text, at, fence.start)
        if opens:
            return opens.start()
        at = fence.end
    opens = marks.opens.search(text, at)
    return opens.start() if opens else -1


def _objects(text: str, begin: int) -> list[Placed]:
    """Calls in JSON that stand behind, or within, prose."""
    placed: list[Placed] = []
    end = begin
    for opens in _OBJECT.finditer(text, begin):
        found = (
            _json_values(text, opens.start(), "", marks_with()) if opens.start() >= end else None
        )
        if found is not None:
            end = found.end
            placed.append(Placed(opens.start(), end, found))
    return placed


def _among(text: str, placed: Sequence[Placed], surface: str) -> Written:
    """The answer with calls at these places; what stands beside them is prose."""
    calls: list[Call] = []
    prose: list[str] = []
    layout = ""
    at = 0
    for one in placed:
        prose.append(text[at : one.start].strip() if prose else text[: one.start].rstrip())
        calls += one.found.calls
        layout = layout or one.found.layout
        at = one.end
    if not calls:
        return Written(text, [], "none")
    prose.append(text[at:].strip())
    return Written("\n".join(filter(None, prose)), calls, surface, layout)


def _calls_of(value: Any) -> list[Call]:
    """The calls that a JSON value is: an object with a name and arguments and nothing else that
    matters, or a list of such; none for other data."""
    items = value if isinstance(value, list) else [value]
    calls = [_call_of(item) for item in items]
    return [call for call in calls if call is not None] if calls and all(calls) else []


def _call_of(item: Any) -> Call | None:
    item = function_of(item)
    if not isinstance(item, Mapping):
        return None
    keys = set(item) - {"id", "type"}
    arguments = keys & set(tool_calls.ARGUMENT_KEYS)
    name = next((item[key] for key in NAME_KEYS if isinstance(item.get(key), str)), None)
    if name is None or not name.strip() or len(arguments) != 1 or len(keys) != 2:
        return None
    call = tool_calls.read_call({"name": name, **{key: item[key] for key in arguments}})
    return call._replace(form="object") if call.form in tool_calls.READABLE else None


def _object(text: str) -> dict[str, Any] | None:
    """The object that a text consists of, with nothing but white space behind it."""
    read = tool_calls.value_at(text, 0) if text.startswith("{") else None
    if read is None or not isinstance(read.value, dict) or text[read.end :].strip():
        return None
    return read.value


def _value(text: str, nullable: bool | None) -> Any:
    """An argument between tags. nullable: of one that is declared as a text; None for another,
    which is JSON if it is a number, a word of JSON or Python, a list or an object, else its
    text."""
    if nullable is not None:
        return None if nullable and text in ("null", "None") else text
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value = json.loads(text, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value
