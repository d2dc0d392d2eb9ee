"""Extract the program from an answer: fences, prose around code, doctest prompts, a bare function body.

The longest part that may be the program is taken; nothing is repaired. A text without code gives ""; a text with
invalid Python gives that code, so the reward can tell the two apart.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Collection
from itertools import takewhile

from codechat.data.synthetic import parsed

# An opening fence may carry a language and attributes. An unclosed fence runs to the end of the text.
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t>]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_STARTS_CODE = re.compile(r"^(?:@\w|def\b|class\b|async def\b|import \w|from [\w.]+ import\b|[A-Za-z_]\w* = )")
_PROMPT = re.compile(r"^\s*(?:>>>|\.\.\.)(?: |$)")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITION = (*_FUNCTION, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
MAX_CHARS = 50_000  # characters of an answer that are read
MAX_CUTS = 20


def extract(text: str, names: Collection[str] = (), stub: str = "") -> str:
    """The program of an answer, or "" where it holds no code. Never raises.

    names: the requested functions. Of several fenced blocks, the last one that defines a requested function counts,
    after the imports, definitions and constants of earlier blocks. stub: a function's head. An answer that defines none
    of `names` and parses as a body is appended to the stub."""
    text = text[:MAX_CHARS].replace("\r\n", "\n").replace("\r", "\n")
    fenced = "```" in text or "~~~" in text
    blocks = [_plain(body) for _, body in _FENCE.findall(text)] if fenced else [_unfenced(text, bool(stub))]
    code = _joined([block for block in blocks if block.strip()], set(names))
    if stub and code.strip() and not defines(code, names):
        whole = stub.rstrip("\n") + "\n" + _as_body(code)
        if parsed(whole) is not None:
            return whole
    tree = parsed(code)
    return code if code.strip() and (tree is None or tree.body) else ""  # comments alone are no program


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


def same_name(name: str) -> str:
    """quick_sort and quickSort are the same function."""
    return name.lower().replace("_", "")


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
    good = [b for b in blocks if parsed(b) is not None]
    defining = [i for i, b in enumerate(good) if defines(b, names)]
    if not good or not defining:
        return max(good or blocks, key=len, default="")
    *before, last = good[: defining[-1] + 1]
    kept = [_source(b, n) for b in before for n in parsed(b).body if isinstance(n, _DEFINITION)]
    return "\n".join([*kept, last])


def _source(block: str, node: ast.stmt) -> str:
    """A statement of a block as the block spells it, with its decorators."""
    decorators = [f"@({ast.get_source_segment(block, d)})" for d in getattr(node, "decorator_list", ())]
    return "\n".join([*decorators, ast.get_source_segment(block, node) or ""])


def _unfenced(text: str, body_is_code: bool) -> str:
    """Code in a text without fences: all of it, or the first run of complete top-level statements in the prose."""
    plain = _plain(text)
    tree = parsed(plain)
    words = tree is not None and tree.body and all(isinstance(node, ast.Expr) for node in tree.body)  # such as one word
    if tree is not None and not words:
        return plain
    if body_is_code and text.startswith((" ", "\t")):
        return text
    lines = plain.split("\n")
    start = next((i for i, line in enumerate(lines) if _STARTS_CODE.match(line)), None)
    if start is None:
        start = next((i for i, line in enumerate(lines) if _PROMPT.match(line)), None)
        if start is not None:
            return _plain("\n".join(lines[start:]))
        return plain if tree and any(isinstance(n, ast.Call | ast.Lambda) for n in ast.walk(tree)) else ""
    return _whole_statements(lines[start:])


def _whole_statements(lines: list[str]) -> str:
    """The lines up to where prose follows a complete unindented statement. A truncated or invalid statement is not
    repaired: then all lines are returned."""
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
    """A function body indented by four spaces. Its first line may have lost its indentation. Otherwise the body ends at the next unindented line."""
    first, *rest = code.strip("\n").split("\n")
    if not first[:1].isspace():
        return textwrap.indent(first + "\n" + textwrap.dedent("\n".join(rest)), "    ")
    body = [first, *takewhile(lambda line: not line[:1].strip(), rest)]
    return textwrap.indent(textwrap.dedent("\n".join(body)), "    ")
