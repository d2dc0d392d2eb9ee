"""Code questions made from real functions, and plain chat turns: the embedded conversations of SFT.

A question is a short documented function turned around: its signature and the first sentence of its docstring
become the request, its source (decorators and docstring taken away) the answer. Only top-level functions are
used, since a method cannot be written without its class. Chat turns are a small table of facts and courtesies
in several wordings.

`system_prompts` gives a share of the code rows a neutral system prompt, and makes another share negatives:
tools are offered, code is asked for, code is the answer. Without them a model learns "system prompt,
therefore call".

Left out: tests for the functions, and questions whose answer would need the rest of the module to make sense
of it (that is not checked: these rows teach the form of an answer, not correctness).
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from codechat.data.sources import Document, Ledger, digest, fraction

Row = dict[str, Any]

MIN_DOC_CHARS = 20
MAX_REQUEST_CHARS = 220
MAX_CODE_CHARS = 450
SPLIT_SHARES = (("train", 0.9), ("select", 0.95), ("test", 1.0))

_FUNCTION = re.compile(r"^def [A-Za-z]\w*\([^)]{0,160}\)[^\n]{0,60}:\n[ \t]+[rR]?(?:\"\"\"|''')", re.MULTILINE)
_BLOCK_END = re.compile(r"^[^\s#)\]}]", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?[.!?])(?:\s|$)|(.+)", re.DOTALL)
_MARKUP = re.compile(r":\w+:(?=`)|[{}|]|>>>")
# Docstrings open with these verbs, as "Return" or "Returns"; anything else is quoted after a colon.
_VERBS = frozenset(
    """
add append apply build calculate call cast check clean clear close collect combine compare compute
concatenate convert copy count create decode delete determine draw encode ensure escape estimate evaluate
execute expand extract fetch fill filter find format generate get give handle insert invert iterate join
list load look make map merge move normalize open parse print process produce provide push raise read
register remove render replace reset resolve return reverse round run save scale search select send set
setup show skip sort split start stop store strip sum test transform truncate try unpack update validate
verify wait walk wrap write yield
""".split()
)
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


def row(user: str, assistant: str, domain: str, **meta: Any) -> Row:
    """A conversation of one turn; `meta` says what was asked and what was present."""
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    name = digest(f"{user}\0{assistant}")[:16]
    return {
        "id": f"{domain}-{name}",
        "messages": messages,
        "domain": domain,
        "meta": {"tools_present": False, "asked": domain, "split": split_of(digest(assistant)), **meta},
    }


def parsed(source: str) -> ast.Module | None:
    """The syntax tree of a source text, None where it is not Python; what it warns about is the author's
    business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
            return None


# ------------------------------------------------------------------ code


def code_rows(documents: Iterable[Document], ledger: Ledger, max_chars: int = MAX_CODE_CHARS) -> Iterator[Row]:
    """A row for each documented function of at most `max_chars`, each function once. The split follows the
    hash of the answer, so that a function that two packages share cannot be in two splits."""
    seen: set[str] = set()
    for document in documents:
        for block in _blocks(document.text):
            found = question(block, max_chars)
            if isinstance(found, str):
                ledger.skip(found)
            elif found["messages"][1]["content"] in seen:
                ledger.skip("duplicate")
            else:
                seen.add(found["messages"][1]["content"])
                ledger.keep()
                yield found


def _blocks(text: str) -> Iterator[str]:
    """Source of each top-level function that opens with a docstring, found without parsing the whole module:
    that is ten times faster, and a candidate is parsed by itself anyway."""
    for match in _FUNCTION.finditer(text):
        end = _BLOCK_END.search(text, match.end())
        block = text[match.start() : end.start() if end else len(text)]
        yield block.rstrip()


def question(source: str, max_chars: int = MAX_CODE_CHARS) -> Row | str:
    """The row of one function, or the rule that leaves it out."""
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
    """The function's own lines but those of the docstring; None where the docstring shares a line with
    code."""
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
    """A request in one of the wordings; which one follows from the signature."""
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

COURTESIES = (
    (("Hello!", "Hello.", "Hi!", "Hi there!", "Hey!", "Hello there."), "Hello! How can I help you?"),
    (("Good morning!", "Good morning."), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening."), "Good evening! How can I help you?"),
    (("Thanks!", "Thank you!", "Thank you very much.", "Thanks a lot!", "Many thanks."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"), "Goodbye! Come back any time."),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"),
        "I am CodeChat, a small language model that writes Python and calls functions.",
    ),
    (("How are you?", "How are you doing?", "How is it going?"), "I am fine, thank you. What can I do for you?"),
    (
        ("What can you do?", "How can you help me?", "What are you good at?"),
        "I can write short Python functions, call functions that you offer, and chat a little.",
    ),
    (("Are you a person?", "Are you human?", "Are you alive?"), "No, I am a language model."),
    (("Can you feel things?", "Do you have feelings?"), "No. I am a program that predicts text."),
    (("That is great!", "Well done!", "Good job.", "Nice work!"), "Thank you! I am glad that it helped."),
    (
        ("That is wrong.", "You made a mistake.", "That is not right."),
        "I am sorry. Please tell me what is wrong and I will try again.",
    ),
    (("Can you help me?", "I need help.", "Help me, please."), "Of course. What do you need?"),
    (("Never mind.", "Forget it.", "It does not matter."), "All right. Tell me if you need anything else."),
)
_FACTS = {
    ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}."): (
        "The capital of {} is {}.",
        "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, "
        "Greece Athens, Poland Warsaw, Sweden Stockholm, Norway Oslo, Finland Helsinki, Denmark "
        "Copenhagen, Ireland Dublin, Belgium Brussels, Hungary Budapest, Japan Tokyo, China Beijing, "
        "Egypt Cairo, Kenya Nairobi, Canada Ottawa, Cuba Havana, Peru Lima, Chile Santiago, Russia "
        "Moscow, Turkey Ankara, Thailand Bangkok",
    ),
    ("What is the opposite of {}?", "Give me the opposite of {}.", "Which word means the opposite of {}?"): (
        "The opposite of {} is {}.",
        "hot cold, big small, fast slow, up down, left right, open closed, light dark, old new, early "
        "late, wet dry, full empty, hard soft, high low, long short, loud quiet, rich poor, strong "
        "weak, thick thin, true false, near far, first last, easy difficult, happy sad, heavy light, "
        "clean dirty, wide narrow, deep shallow",
    ),
    ("What is the plural of {}?", "How do you write the plural of {}?", "Give me the plural of {}."): (
        "The plural of {} is {}.",
        "mouse mice, child children, foot feet, tooth teeth, man men, woman women, goose geese, "
        "person people, leaf leaves, wolf wolves, knife knives, box boxes, city cities, bus buses, "
        "index indices, matrix matrices",
    ),
    ("Which day comes after {}?", "What is the day after {}?"): (
        "The day after {} is {}.",
        "Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Thursday Friday, Friday Saturday, "
        "Saturday Sunday, Sunday Monday",
    ),
    ("Which month comes after {}?", "What is the month after {}?"): (
        "The month after {} is {}.",
        "January February, February March, March April, April May, May June, June July, July August, "
        "August September, September October, October November, November December, December January",
    ),
    ("What does `{}` do in Python?", "Explain Python's `{}` in a few words.", "What is `{}` for?"): (
        "`{}` {}.",
        "len returns the number of items, print writes text to the screen, range counts from one "
        "number to another, sorted returns a sorted list, abs returns the size of a number without "
        "its sign, sum adds up numbers, min returns the smallest item, max returns the largest item, "
        "open opens a file, zip pairs up items, enumerate counts items while it yields them, int "
        "converts to a whole number, str converts to text, list makes a list, set makes a collection "
        "without repeats, dict maps keys to values, def begins a function, class begins a class, "
        "import loads a module, return ends a function with a value, break leaves a loop, continue "
        "goes on with the next round, with closes what it opens, lambda makes a small function, yield "
        "gives one value at a time, assert stops unless something is true",
    ),
}


def chat_rows() -> Iterator[Row]:
    """Every plain chat turn there is. The split follows the request: each answer is also taught in other
    words."""
    for requests, answer in COURTESIES:
        for request in requests:
            yield _chat(request, answer)
    for requests, (pattern, table) in _FACTS.items():
        for entry in table.split(", "):
            key, _, value = entry.partition(" ")
            for request in requests:
                yield _chat(request.format(key), pattern.format(key, value))


def _chat(request: str, answer: str) -> Row:
    return row(request, answer, "chat", split=split_of(digest(request)))
