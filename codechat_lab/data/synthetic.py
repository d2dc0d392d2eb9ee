"""The embedded conversations of SFT: code questions made from real functions, and plain chat turns.

The signature and the first sentence of the docstring of a short top-level function become the
request; its source, without decorators and docstring, is the answer."""

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from codechat.data.sources import Document, Ledger, Row, digest
from codechat.data.splits import split_of
from codechat_lab.data.python_source import parsed

MAX_CODE_CHARS = 450

_FUNCTION = re.compile(
    r"^def [A-Za-z]\w*\([^)]{0,160}\)[^\n]{0,60}:\n[ \t]+[rR]?(?:\"\"\"|''')", re.MULTILINE
)
_BLOCK_END = re.compile(r"^[^\s#)\]}]", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)|(.+)", re.DOTALL)
_MARKUP = re.compile(r":\w+:(?=`)|[{}|]|>>>")


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


# verbs that open docstrings, as "Return" or "Returns"; wordings of a request
_REQUESTS = _read("code_requests.json")
CHAT_TURNS = _read("chat_turns.json")
SMALL_TALK = tuple(  # (words of the user, answer): each wording with each answer
    (said, answer)
    for turn in _read("small_talk.json")
    for said in turn["says"]
    for answer in turn["answers"]
)


def row(user: str, assistant: str, domain: str, **meta: Any) -> Row:
    """A conversation of one turn; `meta` holds what kind of answer is expected and whether
    tools are present."""
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    meta = {"tools_present": False, "asked": domain, "split": split_of(digest(assistant)), **meta}
    name = digest(f"{user}\0{assistant}")[:16]
    return {"id": f"{domain}-{name}", "messages": messages, "domain": domain, "meta": meta}


def code_rows(
    documents: Iterable[Document], ledger: Ledger, max_chars: int = MAX_CODE_CHARS
) -> Iterator[Row]:
    """A row for each documented function of at most `max_chars`, each function once."""
    seen: set[str] = set()
    heads = (
        (document.text, match)
        for document in documents
        for match in _FUNCTION.finditer(document.text)
    )
    for text, head in heads:  # ten times faster than parsing the module
        end = _BLOCK_END.search(text, head.end())
        asked = question(text[head.start() : end.start() if end else len(text)].rstrip(), max_chars)
        if isinstance(asked, str):
            ledger.skip(asked)
            continue
        answer = asked["messages"][1]["content"]
        if answer in seen:
            ledger.skip("duplicate")
            continue
        seen.add(answer)
        ledger.kept += 1
        yield asked


def question(source: str, max_chars: int = MAX_CODE_CHARS) -> Row | str:
    """The row of one function, or the rule that skips it."""
    if len(source) > 4 * max_chars:
        return "too_long"
    tree = parsed(source)
    if tree is None:
        return "unparsed"
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    first = re.split(r"\n\s*\n", (ast.get_docstring(node) or "").strip(), maxsplit=1)[0]
    match = _SENTENCE.match(" ".join(first.split()))
    sentence = (match[1] or match[2]).replace("``", "`").strip() if match else ""
    if len(sentence) < 20 or _MARKUP.search(sentence) or not sentence.isascii():
        return "unclear_docstring"
    trivial = (ast.Pass, ast.Raise, ast.Import, ast.ImportFrom, ast.Constant)
    code = _without_docstring(source, node)
    body = [s.value if isinstance(s, ast.Expr) else s for s in node.body[1:]]
    if code is None or all(isinstance(statement, trivial) for statement in body):
        return "no_body"
    user = _request(f"{node.name}({ast.unparse(node.args)})", sentence)
    fits = len(code) <= max_chars and len(user) <= 220
    return row(user, code, "code") if fits else "too_long"


def _without_docstring(source: str, node: ast.FunctionDef) -> str | None:
    """The function's lines without the docstring; None where the docstring shares a line with
    code."""
    doc = node.body[0]
    doc_end = doc.end_lineno or doc.lineno
    lines = source.split("\n")
    if len(node.body) < 2 or doc.lineno == node.lineno or node.body[1].lineno <= doc_end:
        return None
    kept = lines[: doc.lineno - 1] + lines[doc_end : node.end_lineno]
    code = textwrap.dedent("\n".join(line.rstrip() for line in kept)).strip()
    return re.sub(r":\n\n+", ":\n", code, count=1)


def _request(signature: str, sentence: str) -> str:
    """A request in one of several wordings; the signature decides which."""
    head, _, rest = sentence.partition(" ")
    base = head.lower().rstrip(",.:")
    forms = (base, base.removesuffix("s"), base.removesuffix("es"), base.removesuffix("ies") + "y")
    verb = next((form for form in forms if form in _REQUESTS["verbs"]), None)
    wordings = _REQUESTS["requests" if verb and rest else "quoted"]
    words = {"signature": signature, "sentence": sentence}
    if verb and rest:
        third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")
        third = re.sub("([^aeiou])ys$", r"\1ies", third)
        rest = rest.rstrip(".!")
        words |= {"verb": f"{verb} {rest}", "thirds": f"{third} {rest}"}
    return wordings[int(digest(signature)[:4], 16) % len(wordings)].format(**words)


def chat_rows(talk: bool = False) -> Iterator[Row]:
    """Every plain chat turn of chat_turns.json, and with `talk` of small_talk.json. The split
    follows the request."""
    pairs = [
        (request, turn["answer"])
        for turn in CHAT_TURNS["courtesies"]
        for request in turn["requests"]
    ]
    for fact in CHAT_TURNS["facts"]:
        for key, value in fact["table"].items():
            pairs += [
                (request.format(key), fact["answer"].format(key, value))
                for request in fact["requests"]
            ]
    for request, answer in pairs + list(SMALL_TALK if talk else ()):
        yield row(request, answer, "chat", split=split_of(digest(request)))
