"""The embedded conversations of SFT: code questions made from real functions, and plain chat turns.

A code question is a short documented function turned around: its signature and the first sentence of its docstring
become the request; its source, without decorators and docstring, is the answer. Only top-level functions are used,
since a method needs its class.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from codechat.data.sources import Document, Ledger, digest, fraction

Row = dict[str, Any]
CHAT_TURNS = Path(__file__).with_name("chat_turns.json")
SMALL_TALK = Path(__file__).with_name("small_talk.json")

MIN_DOC_CHARS = 20
MAX_REQUEST_CHARS = 220
MAX_CODE_CHARS = 450
SPLITS = ("train", "select", "test")
SMALLEST_SPREAD = 10  # requests below which no row leaves training
SPLIT_SHARES = (("train", 0.9), ("select", 0.95), ("test", 1.0))

_FUNCTION = re.compile(r"^def [A-Za-z]\w*\([^)]{0,160}\)[^\n]{0,60}:\n[ \t]+[rR]?(?:\"\"\"|''')", re.MULTILINE)
_BLOCK_END = re.compile(r"^[^\s#)\]}]", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)|(.+)", re.DOTALL)
_MARKUP = re.compile(r":\w+:(?=`)|[{}|]|>>>")
# Verbs that open docstrings, as "Return" or "Returns"; a sentence with another opening is quoted after a colon.
_VERBS = frozenset("""
add append apply build calculate call cast check clean clear close collect combine compare compute
concatenate convert copy count create decode delete determine draw encode ensure escape estimate evaluate
execute expand extract fetch fill filter find format generate get give handle insert invert iterate join
list load look make map merge move normalize open parse print process produce provide push raise read
register remove render replace reset resolve return reverse round run save scale search select send set
setup show skip sort split start stop store strip sum test transform truncate try unpack update validate
verify wait walk wrap write yield
""".split())  # fmt: skip
_REQUESTS = (
    "Write a Python function `{signature}` that {thirds}.",
    "Write `{signature}` in Python. It should {verb}.",
    "Implement `{signature}`: it {thirds}.",
    "I need a Python function `{signature}` to {verb}.",
)
_QUOTED_REQUESTS = (
    "Write a Python function `{signature}`: {sentence}",
    "Implement `{signature}` in Python. {sentence}",
    "Write `{signature}`. Description: {sentence}",
)


def split_of(name: str) -> str:
    """train, select or test, 90 : 5 : 5, by a hash in hex."""
    return next(split for split, below in SPLIT_SHARES if fraction(name) < below)


def spread(rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Split -> rows, by their `meta`; a split that a small file leaves empty takes a tenth of the training rows.

    key: what rows of one split may share and rows of two may not. The rows with the largest hashes of it move."""
    parts = {split: [row for row in rows if row["meta"]["split"] == split] for split in SPLITS}
    for split in SPLITS[1:]:
        names = sorted({key(row) for row in parts["train"]}, key=digest)
        if parts[split] or len(names) < SMALLEST_SPREAD:
            continue
        moved = set(names[-max(1, len(names) // 10) :])
        parts[split] = [row | {"meta": row["meta"] | {"split": split}} for row in parts["train"] if key(row) in moved]
        parts["train"] = [row for row in parts["train"] if key(row) not in moved]
    return parts


def row(user: str, assistant: str, domain: str, **meta: Any) -> Row:
    """A conversation of one turn; `meta` holds what kind of answer is expected and whether tools are present."""
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    name = digest(f"{user}\0{assistant}")[:16]
    return {
        "id": f"{domain}-{name}",
        "messages": messages,
        "domain": domain,
        "meta": {"tools_present": False, "asked": domain, "split": split_of(digest(assistant)), **meta},
    }


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source text without its warnings; None where it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
            return None


# ------------------------------------------------------------------ code


def code_rows(documents: Iterable[Document], ledger: Ledger, max_chars: int = MAX_CODE_CHARS) -> Iterator[Row]:
    """A row for each documented function of at most `max_chars`, each function once. The split follows the hash of the
    answer, so that a function that two packages share cannot be in two splits."""
    seen: set[str] = set()
    for block in (block for document in documents for block in _blocks(document.text)):
        asked = question(block, max_chars)
        if isinstance(asked, str):
            ledger.skip(asked)
        elif (answer := asked["messages"][1]["content"]) in seen:
            ledger.skip("duplicate")
        else:
            seen.add(answer)
            ledger.keep()
            yield asked


def _blocks(text: str) -> Iterator[str]:
    """Source of each top-level function that opens with a docstring; ten times faster than parsing the module."""
    for match in _FUNCTION.finditer(text):
        end = _BLOCK_END.search(text, match.end())
        yield text[match.start() : end.start() if end else len(text)].rstrip()


def question(source: str, max_chars: int = MAX_CODE_CHARS) -> Row | str:
    """The row of one function, or the rule that skips it."""
    if len(source) > 4 * max_chars:
        return "too_long"
    tree = parsed(source)
    if tree is None:
        return "unparsed"
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    sentence = _sentence(ast.get_docstring(node) or "")
    if len(sentence) < MIN_DOC_CHARS or _MARKUP.search(sentence) or not sentence.isascii():
        return "unclear_docstring"
    code = _without_docstring(source, node)
    if code is None or _trivial(node.body[1:]):
        return "no_body"
    if len(code) > max_chars:
        return "too_long"
    user = _request(f"{node.name}({ast.unparse(node.args)})", sentence)
    return row(user, code, "code") if len(user) <= MAX_REQUEST_CHARS else "too_long"


def _sentence(doc: str) -> str:
    first = re.split(r"\n\s*\n", doc.strip(), maxsplit=1)[0]
    match = _SENTENCE.match(" ".join(first.split()))
    return (match.group(1) or match.group(2)).replace("``", "`").strip() if match else ""


def _without_docstring(source: str, node: ast.FunctionDef) -> str | None:
    """The function's lines without the docstring; None where the docstring shares a line with code."""
    doc, lines = node.body[0], source.split("\n")
    if len(node.body) < 2 or doc.lineno == node.lineno or node.body[1].lineno <= doc.end_lineno:
        return None
    kept = lines[: doc.lineno - 1] + lines[doc.end_lineno : node.end_lineno]
    code = textwrap.dedent("\n".join(line.rstrip() for line in kept)).strip()
    return re.sub(r":\n\n+", ":\n", code, count=1)


def _trivial(body: list[ast.stmt]) -> bool:
    statements = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(isinstance(s, (ast.Pass, ast.Raise, ast.Import, ast.ImportFrom)) for s in statements)


def _request(signature: str, sentence: str) -> str:
    """A request in one of several wordings; the signature decides which."""
    pick = int(digest(signature)[:4], 16)
    head, _, rest = sentence.partition(" ")
    base = _base_form(head.lower().rstrip(",.:"))
    if base is None or not rest:
        return _QUOTED_REQUESTS[pick % len(_QUOTED_REQUESTS)].format(signature=signature, sentence=sentence)
    rest = rest.rstrip(".!")
    words = {"verb": f"{base} {rest}", "thirds": f"{_third_person(base)} {rest}", "signature": signature}
    return _REQUESTS[pick % len(_REQUESTS)].format(**words)


def _base_form(word: str) -> str | None:
    candidates = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return next((w for w in candidates if w in _VERBS), None)


def _third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z")):
        return verb + "es"
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else verb + "s"


# ------------------------------------------------------------------ plain chat


@cache
def small_talk() -> tuple[tuple[str, str], ...]:
    """(what a person says, answer) of small_talk.json: each wording with each answer."""
    turns = json.loads(SMALL_TALK.read_text(encoding="utf-8"))
    return tuple((said, answer) for turn in turns for said in turn["says"] for answer in turn["answers"])


def chat_rows(talk: bool = False) -> Iterator[Row]:
    """Every plain chat turn of chat_turns.json. The split follows the request: each answer is also taught for other
    wordings. talk: those of small_talk.json too."""
    turns = json.loads(CHAT_TURNS.read_text(encoding="utf-8"))
    pairs = [(request, turn["answer"]) for turn in turns["courtesies"] for request in turn["requests"]]
    for fact in turns["facts"]:
        for key, value in fact["table"].items():
            pairs += [(request.format(key), fact["answer"].format(key, value)) for request in fact["requests"]]
    for request, answer in pairs + list(small_talk() if talk else ()):
        yield row(request, answer, "chat", split=split_of(digest(request)))
