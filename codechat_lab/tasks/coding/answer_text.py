"""Extract the program from an answer: fences, prose around code, doctest prompts, a bare
function body.

What stands before the end of a reasoning part (`</think>`) is no answer. The longest part that
may be the program is taken; nothing is repaired. A fence line ends a block only where the code
before it is complete, so that fences in docstrings stay. A text without code gives ""; a text
with invalid Python gives that code, so the reward can tell the two apart."""

import ast
import bisect
import re
import textwrap
import warnings
from collections.abc import Callable, Collection
from itertools import takewhile
from typing import NamedTuple

from codechat_lab.data.python_source import parsed

_THOUGHT = r"(?:think|thinking|thought|reasoning|scratchpad|seed:think)"
_THOUGHT_OPENS = re.compile(
    rf"\s*(?:<{_THOUGHT}>|\[think\]|◁think▷|<\|channel\|>analysis<\|message\|>|<\|begin_of_thought\|>)",
    re.IGNORECASE,
)
# Not in quotes: a program may hold the tags in strings. Two and more backticks are a fence.
_BEFORE = r"(?<![\"'])(?<!(?<!`)`)"
_BEHIND = r"(?![\"'])(?!`(?!`))"
_THOUGHT_ENDS = re.compile(
    rf"{_BEFORE}(?:</{_THOUGHT}>|\[/think\]|◁/think▷|<\|channel\|>final<\|message\|>"
    rf"|<\|end_of_thought\|>){_BEHIND}",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    rf"{_BEFORE}<answer>{_BEHIND}(.*?)(?:{_BEFORE}</answer>{_BEHIND}|\Z)", re.DOTALL | re.IGNORECASE
)
_SPECIAL = re.compile(r"(?:<\|[^|>\n]{1,40}\|>|</s>)$")  # a token that ends a turn, as text
# A fence line may stand in a list or a quotation. One or two backticks count with a language or
# nothing beside them.
_FENCE = re.compile(
    r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ "
    r"\t]+)?(`{3,}|~{3,}|`{1,2}(?=(?:python3?|py)?[ "
    r"\t]*$))([^`]*)[`~]*[ \t]*$"
)
# behind text on its line
_FENCE_BEHIND = re.compile(r"(.*[^`~\s])[ \t]*(`{3,}|~{3,})[ \t]*([\w+#]*)[ \t]*$")
_INFO = re.compile(
    r"[ \t]*(?:\{[^}]*\}|[\w+#.-]*(?::[\w./\\-]+)?)(?:[ "
    r"\t,]+[\w.-]+(?:[=:]\S*)?|[ \t]+\{[^}]*\})*[ \t]*$"
)
_LANGUAGE = re.compile(r"[ \t]*(?:python3?|py)\b[ \t]*", re.IGNORECASE)
# Lines with which sets of prompts mark code, MBPP's own among them.
_MARKS = frozenset(
    "[BEGIN] [PYTHON] <code> <pre><code> [DONE] [/PYTHON] </code> </code></pre>".split()
)
_STARTS_CODE = re.compile(
    r"(?:@\w|def\b|class\b|async def\b|import \w|from [\w.]+ import\b|[A-Za-z_]\w* = )"
)
_PROMPT = re.compile(r"^\s*(?:>>>|\.\.\.)(?: |$)")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITION = (*_FUNCTION, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
MAX_CHARS = 50_000  # characters of an answer that are read
MAX_CUTS = 20
MAX_ENDS = 20  # fence lines that are tried as the end of one block
MAX_PARSED = 6 * MAX_CHARS  # characters of an answer that are parsed to find the ends of its blocks


def extract(text: str, names: Collection[str] = (), stub: str = "") -> str:
    """The program of an answer, or "" where it holds no code. Never raises.

    names: the requested functions. Of several blocks, the last one that defines a requested
    function counts, after the imports, definitions and constants of earlier blocks. stub: a
    function's head. An answer that defines none of `names` and parses as a body is appended to
    the stub."""
    text = re.sub("^[\ufeff\u200b]+", "", text[:MAX_CHARS], flags=re.MULTILINE)
    text = answer_of(text.replace("\r\n", "\n").replace("\r", "\n"))
    lines = ["```" if line.strip() in _MARKS else line for line in text.split("\n")]
    text = "\n".join(lines)
    if _is_program(text) or not any(_fence(line) or _FENCE_BEHIND.match(line) for line in lines):
        blocks = [_unfenced(text, bool(stub))]
    else:
        blocks = [_plain(block) for block in _Blocks(_split(lines), names, stub).all()]
    code = _joined([block for block in blocks if block.strip()], set(names))
    if stub and code.strip() and not defines(code, names):
        whole = stub.rstrip("\n") + "\n" + _as_body(code)
        if parsed(whole) is not None:
            return whole
    tree = parsed(code)
    # comments alone are no program
    return code if code.strip() and (tree is None or tree.body) else ""


def answer_of(text: str) -> str:
    """The part of a text that answers: behind its reasoning, in the last `<answer>` if there is
    one. "" where the reasoning does not end."""
    ends = list(_THOUGHT_ENDS.finditer(text))
    if ends:
        text = text[ends[-1].end() :]
    if _THOUGHT_OPENS.match(text):
        return ""
    answers = _ANSWER.findall(text)
    answer = answers[-1] if answers else text
    while found := _SPECIAL.search(answer, max(0, len(answer) - 50)):
        answer = answer[: found.start()].rstrip()
    return answer


class Fence(NamedTuple):
    mark: str  # such as ```
    info: str  # what stands behind it

    def ends(self, opening: "Fence") -> bool:
        return (
            not self.info.strip()
            and self.mark[0] == opening.mark[0]
            and len(self.mark) >= len(opening.mark)
        )


def _fence(line: str) -> Fence | None:
    found = _FENCE.match(line)
    return Fence(found[1], found[2]) if found else None


def _is_program(text: str) -> bool:
    """Whether all of the text is Python that defines something: fences can only stand in its
    strings."""
    tree = parsed(text)
    return tree is not None and any(isinstance(node, _DEFINITION) for node in tree.body)


def _split(lines: list[str]) -> list[str]:
    """Lines with an opening fence behind other text in two: "Here: ```python"."""
    out: list[str] = []
    inside = False
    for line in lines:
        behind = None if _fence(line) else _FENCE_BEHIND.match(line)
        if behind and not inside:
            out += [behind[1], behind[2] + behind[3]]
        else:
            out.append(line)
        inside ^= bool(_fence(line) or behind)
    return out


class _Blocks:
    """The code in fences, and code that only a closing fence ends or that stands without fences."""

    def __init__(self, lines: list[str], names: Collection[str], stub: str) -> None:
        self.lines = lines
        self.names = names
        self.stub = stub
        self.fences = {i: fence for i, fence in enumerate(map(_fence, lines)) if fence}
        self.places = list(self.fences)
        # characters that may still be parsed: an answer may hold thousands of fences
        self.left = MAX_PARSED

    def parses(self, code: str) -> bool:
        """Whether it is Python. False once too much was tried."""
        self.left -= len(code) + 1
        return self.left > 0 and parsed(code) is not None

    def all(self) -> list[str]:
        blocks: list[str] = []
        at = 0
        while at < len(self.lines):
            fence = self.next_fence(at)
            bare = self.bare_code(at, fence)
            if bare:
                blocks.append(bare.code)
                fence = bare.end
                if fence < len(self.lines) and not self.opens(fence):
                    at = fence + 1
                    continue
            if fence == len(self.lines):
                break
            block = self.fenced(fence)
            blocks.append(block.code)
            at = block.end
        return blocks

    def next_fence(self, at: int) -> int:
        """The first fence line from this one on, or the end of the text."""
        place = bisect.bisect_left(self.places, at)
        return self.places[place] if place < len(self.places) else len(self.lines)

    def bare_code(self, at: int, fence: int) -> "_Block | None":
        """Code outside of fences that begins between two lines, and the fence line that ends
        it; or None."""
        segment = _plain("\n".join(_without_language(self.lines[at:fence])))
        if self.stub and not defines(segment, self.names) and _is_body(segment):
            return _Block("\n".join(self.lines[at:fence]), fence)
        offset = _first(self.lines[at:fence], lambda line: _STARTS_CODE.match(line.lstrip()))
        if offset is None:
            return None
        start = at + offset
        place = bisect.bisect_left(self.places, fence)
        for end in [*self.places[place : place + MAX_ENDS], len(self.lines)]:
            code = textwrap.dedent("\n".join(self.lines[start:end])).rstrip()
            if self.parses(code):
                wanted = defines(code, self.names) if self.names else _is_program(code)
                return _Block(code, end) if wanted else None
            self.left -= MAX_CUTS * len(code)
            if self.left <= 0:
                return None
            code = _whole_statements(code.split("\n"))
            if defines(code, self.names):  # prose between the code and the fence
                return _Block(code, end)
        return None

    def opens(self, fence: int) -> bool:
        """Whether a fence line behind code opens another block: with a language, or with code
        up to the next fence."""
        if self.fences[fence].info.strip():
            return True
        after = self.next_fence(fence + 1)
        if after == len(self.lines) or self.fences[after].info.strip():
            return False
        return _is_program("\n".join(self.lines[fence + 1 : after]))

    def fenced(self, start: int) -> "_Block":
        """The code of the block that a fence line opens, and the line behind the block.

        It ends at the first fence line before which the code is complete. Without one: at its
        end where all the rest is Python, else at the first closing fence."""
        opening = self.fences[start]
        head = [] if _INFO.match(opening.info) else [_LANGUAGE.sub("", opening.info, count=1)]
        body = self.lines[start + 1 :]
        if self.lines[start].lstrip().startswith(">"):  # in a quotation
            body = [re.sub(r"^[ \t]*>[ \t]?", "", line) for line in body]
        first: _Block | None = None  # up to the first closing fence
        tried = 0
        for i, line in enumerate(body):
            at = start + 1 + i
            other = self.fences.get(at)
            behind = None if other else _FENCE_BEHIND.match(line)
            if not other and not behind:
                continue
            tried += 1
            last = [behind[1]] if behind else []
            code = "\n".join([*head, *body[:i], *last])
            complete = tried <= MAX_ENDS and self.left > 0 and self.parses(_plain(code))
            if other and other.ends(opening):
                first = first or _Block(code, at + 1)
                if complete:
                    return _Block(code, at + 1)
            elif behind and not behind[3] and complete:
                return _Block(code, at + 1)
            elif other and other.info.strip() and complete and code.strip():
                return _Block(code, at)  # it was not closed, and another block begins
            if tried > MAX_ENDS and first:
                break
        if first and self.left <= 0:
            return first
        whole = _plain("\n".join([*head, *body]))
        if first and not self.parses(whole):
            return first
        return _Block(_whole_statements(whole.split("\n")), len(self.lines))


class _Block(NamedTuple):
    code: str
    end: int  # the line that ends it, or the line behind that


def _is_body(code: str) -> bool:
    """Whether it may be the body of a function: statements, and not words that happen to be
    Python."""
    tree = parsed("def body():\n" + _as_body(code)) if code.strip() else None
    match tree.body if tree else []:
        case [ast.FunctionDef(body=statements)]:
            return any(not isinstance(node, ast.Expr | ast.AnnAssign) for node in statements)
    return False


def _without_language(lines: list[str]) -> list[str]:
    """Without a first line that only names the language: the prompt may end in an opening fence."""
    return lines[1:] if lines and _LANGUAGE.fullmatch(lines[0]) else lines


def defines(code: str, names: Collection[str]) -> bool:
    """Whether top-level statements of `code` bind any of the names. False for invalid Python."""
    tree = parsed(code)
    bound: set[str] = set()
    for node in tree.body if tree else ():
        if isinstance(node, _FUNCTION):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return not bound.isdisjoint(names)


def _plain(body: str) -> str:
    """A block without common indentation, and without doctest prompts if it is a session."""
    code = textwrap.dedent(body).strip("\n")
    first = next((line for line in code.split("\n") if line.strip()), "")
    if not _PROMPT.match(first):
        return code
    session = [line for line in code.split("\n") if _PROMPT.match(line)]
    return "\n".join(re.sub(r"^\s*(?:>>>|\.\.\.) ?", "", line) for line in session)


def _joined(blocks: list[str], names: set[str]) -> str:
    """One program of several blocks."""
    good = [block for block in blocks if parsed(block) is not None]
    defining = [i for i, block in enumerate(good) if defines(block, names)]
    if not good or not defining:
        return max(good or blocks, key=len, default="")
    *before, last = good[: defining[-1] + 1]
    kept: list[str] = []
    for block in before:
        kept += _definitions(block)
    return "\n".join([*kept, last])


def _definitions(block: str) -> list[str]:
    """The sources of a block's imports, definitions and constants. Its calls would run a second
    time."""
    tree = parsed(block)
    return [
        _source(block, node)
        for node in (tree.body if tree else ())
        if isinstance(node, _DEFINITION)
    ]


def _source(block: str, node: ast.stmt) -> str:
    """A statement of a block as the block spells it, with its decorators."""
    decorators = [
        f"@({ast.get_source_segment(block, d)})" for d in getattr(node, "decorator_list", ())
    ]
    return "\n".join([*decorators, ast.get_source_segment(block, node) or ""])


def _unfenced(text: str, body_is_code: bool) -> str:
    """Code in a text without fences: all of it, or the first run of complete top-level
    statements in the prose."""
    plain = _plain("\n".join(_without_language(text.lstrip("\n").split("\n"))))
    tree = parsed(plain)
    # One word is Python too.
    words = tree is not None and tree.body and all(isinstance(node, ast.Expr) for node in tree.body)
    if tree is not None and not words:
        return plain
    if body_is_code and text.startswith((" ", "\t")):
        return text
    lines = plain.split("\n")
    start = _first(lines, lambda line: _STARTS_CODE.match(line))
    if start is not None:
        return _whole_statements(lines[start:])
    start = _first(lines, lambda line: _STARTS_CODE.match(line.lstrip()))
    if start is not None:  # Markdown also indents code
        indented = takewhile(lambda line: line[:1].isspace() or not line, lines[start:])
        return _whole_statements(textwrap.dedent("\n".join(indented)).split("\n"))
    start = _first(lines, lambda line: _PROMPT.match(line))
    if start is not None:
        return _plain("\n".join(lines[start:]))
    return (
        plain
        if tree and any(isinstance(node, ast.Call | ast.Lambda) for node in ast.walk(tree))
        else ""
    )


def _first(lines: list[str], fits: Callable[[str], object]) -> int | None:
    return next((i for i, line in enumerate(lines) if fits(line)), None)


def _whole_statements(lines: list[str]) -> str:
    """The lines up to where prose follows a complete unindented statement. A truncated or
    invalid statement is not
    repaired: then all lines are returned, so that the reward can tell them from no code."""
    end = len(lines)
    for _ in range(MAX_CUTS):
        at = _error_line("\n".join(lines[:end]))
        if at is None:
            return "\n".join(lines[:end]).rstrip()
        end = next((i for i in range(min(at, end) - 1, 0, -1) if lines[i][:1].strip()), 0)
        if not end:
            break
    return "\n".join(lines)


def _error_line(code: str) -> int | None:
    """Number of the first line of invalid Python, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except SyntaxError as error:
            return error.lineno or 1
        except (ValueError, RecursionError, MemoryError):
            return 1
    return None


def _as_body(code: str) -> str:
    """A function body indented by four spaces. Its first line may have lost its indentation.
    Otherwise the body ends at the next unindented line."""
    first, *rest = code.strip("\n").split("\n")
    if not first[:1].isspace():
        return textwrap.indent(first + "\n" + textwrap.dedent("\n".join(rest)), "    ")
    body = [first, *takewhile(lambda line: not line[:1].strip(), rest)]
    return textwrap.indent(textwrap.dedent("\n".join(body)), "    ")
