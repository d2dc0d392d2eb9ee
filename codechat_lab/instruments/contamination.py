"""Was an evaluated problem in the training data? n-grams and syntax trees against what a
lineage was trained on.

A problem counts as exposed where
    prompt    at least half of the 13-grams of its request are in the training text, or a shorter request is a whole
              message of it
    solution  the same for the 13-grams of the reference solution
    program   a function of the training text equals the reference solution except for names, comments and layout
    function  a text defines a function of the requested name, for problems without a reference solution

13-grams of lower-case words are those of GPT-3 (Brown et al., 2020, arXiv:2005.14165, appendix
C); half are required, so that a template that all problems share does not count. Programs of
fewer than NODES syntax nodes are not compared by
tree: too many short functions are equal."""

import ast
import itertools
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from codechat import tasks
from codechat.core.errors import UserError
from codechat.data import conversations, corpus, preference_rows
from codechat.data.sources import read_jsonl
from codechat.runs.paths import ROOT
from codechat.tasks.base import Problem
from codechat.text import tokenizer, tool_calls
from codechat_lab.data import public_rows
from codechat_lab.data.python_source import parsed, same_name

PIECE = 1 << 18  # tokens decoded at a time
OVERLAP = 256  # tokens that two pieces share, so that no match is cut in two
MOST_BYTES = 1 << 29  # of text read from one source
N = 13  # words
SHARE = 0.5
NODES = 28
_STRIPPED = re.compile(r'"""(?:.*?)"""|\'\'\'(?:.*?)\'\'\'|#[^\n]*', re.DOTALL)
_DEF = re.compile(r"^([ \t]*)def \w", re.MULTILINE)
_NAME = re.compile(r"\bdef\s+(\w+)\s*\(")
_KEYWORDS = frozenset(keyword.kwlist) - {"None", "True", "False"}  # annotations hold these

Gram = tuple[str, ...]  # N words that follow each other
Profile = frozenset[tuple[str, int]]  # how often a program has each keyword


class _Elsewhere(UserError):
    """A directory of training data that is not on this machine."""


@dataclass
class Report:
    """how: problem id -> the ways in which it was found. read: sources searched; missing: those
    that could not be; elsewhere: directories that are not on this machine."""

    n: int
    how: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        exposed = f"{len(self.how)} of {self.n} problems exposed"
        counts = Counter(itertools.chain(*self.how.values()))
        if counts:
            by_way = ", ".join(f"{way} {n}" for way, n in sorted(counts.items()))
            exposed += f" ({by_way})"
        searched = f"{exposed}; searched {'; '.join(self.read)}" if self.read else "unknown"
        missing = list(self.missing)
        if self.elsewhere:
            missing.append(f"{', '.join(self.elsewhere)} (not on this machine)")
        rest = f"; not searched: {'; '.join(missing)}" if missing else ""
        return f"contamination: {searched}{rest}"

    def texts(self, lineage: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
        """(text, whether it is a whole message) of what a lineage was trained on. Fills `read`,
        `missing` and `elsewhere`."""
        for entry in lineage:
            name = f"{entry.get('run')} ({entry.get('kind')})"
            done = 0
            try:
                for text, whole in _texts_of(entry):
                    yield text, whole
                    done += len(text)
                    if done > MOST_BYTES:
                        break
                if not done:
                    raise UserError("no text was found")
                part = (
                    f"the first {done / 1e6:.0f} MB only"
                    if done > MOST_BYTES
                    else f"{done / 1e6:.1f} MB"
                )
                self.read.append(f"{name}: {part}")
            except _Elsewhere as error:
                self.elsewhere.append(str(error))
            except (UserError, OSError) as error:
                self.missing.append(f"{name}: {str(error)[:160]}")


def check(problems: Sequence[Problem], lineage: Sequence[Mapping[str, Any]]) -> Report:
    """Search what the lineage was trained on for the problems: the instrument that `codechat
    evaluate` uses."""
    report = Report(len(problems))
    report.how = search(problems, report.texts(lineage))
    return report


def search(
    problems: Sequence[Problem], texts: Iterable[tuple[str, bool]]
) -> dict[str, tuple[str, ...]]:
    """Problem id -> ways in which it was found, from (text, whether it is a whole message)."""
    index = Index()
    for problem in problems:
        index.add(problem)
    ways: dict[str, tuple[str, ...]] = {}
    for found, way in sorted(scan(texts, index)):
        ways[found] = ways.get(found, ()) + (way,)
    return ways


class Finding(NamedTuple):
    """A problem, and a way in which it is or could be found."""

    problem: str
    way: str


class Index:
    """What is searched for.

    exact: a whole short request, `def NAME`, or the normal form of a program -> what it would
    prove. grams: what is proven by enough of these N-grams. profiles: of the programs; a
    function of another profile equals none of them."""

    def __init__(self) -> None:
        self.exact = defaultdict[Hashable, set[Finding]](set)
        self.grams: dict[Finding, set[Gram]] = {}
        self.profiles = set[Profile]()

    def add(self, problem: Problem) -> None:
        gold = problem.gold if isinstance(problem.gold, Mapping) else {}
        code = str(gold.get("code") or "")
        words = _words(request(problem))
        prompt = Finding(problem.id, "prompt")
        if len(words) < N:
            self.exact[tuple(words)].add(prompt)
        if "function" in gold:
            self.exact[_defines(gold["function"])].add(Finding(problem.id, "function"))
        self.grams[prompt] = _grams(words)
        self.grams[Finding(problem.id, "solution")] = _grams(_words(_without_comments(code)))
        for form, block in _normal_forms(code):
            self.exact[form].add(Finding(problem.id, "program"))
            self.profiles.add(_profile(block))


def scan(texts: Iterable[tuple[str, bool]], index: Index) -> set[Finding]:
    """What the texts prove. Only a whole message can equal a short request."""
    # three words of a gram tell nearly all apart, and cost less than a tuple of all N at every word
    probes = {gram[:: N // 2] for grams in index.grams.values() for gram in grams}
    seen = set[Gram]()
    keys = set[Hashable]()  # of index.exact
    for text, whole in texts:
        programs = "def " in text
        here = set[Hashable]()
        # solutions have no comments
        for version in {text, _without_comments(text)} if programs else (text,):
            words = _words(version)
            if whole and len(words) < N:
                here.add(tuple(words))
            spread = zip(words, words[N // 2 :], words[N - 1 :])
            seen.update(
                tuple(words[at : at + N]) for at, probe in enumerate(spread) if probe in probes
            )
        if programs:
            here |= _program_keys(text, index.profiles)
        # only what is searched for: a corpus has too much of the rest to keep. Of this text alone:
        # to intersect all that was found, at each text, would be quadratic
        keys |= here & index.exact.keys()
    proven = {
        finding
        for finding, grams in index.grams.items()
        if grams and len(grams & seen) >= SHARE * len(grams)
    }
    return proven.union(*(index.exact[key] for key in keys))


def _program_keys(text: str, profiles: set[Profile]) -> set[Hashable]:
    """The functions of a text: `def NAME` of each, and the normal form of those with one of
    these profiles."""
    keys: set[Hashable] = {_defines(name) for name in _NAME.findall(text)}
    for block in _blocks(text) if profiles else ():
        if _profile(block) in profiles:
            keys.update(form for form, _ in _normal_forms(block))
    return keys


def _grams(words: Sequence[str]) -> set[Gram]:
    return set(zip(*(words[i:] for i in range(N))))


def _defines(name: str) -> str:
    """A function of this name, in any spelling of it."""
    return f"def {same_name(name)}"


def _without_comments(source: str) -> str:
    return _STRIPPED.sub(" ", source)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


# ---- programs


def _blocks(text: str) -> Iterator[str]:
    """Source of each function in a text, at any depth: from its `def` to the next line that is
    not deeper."""
    for match in _DEF.finditer(text):
        deeper = re.compile(
            rf"^(?!{match[1]}[ \t]|[ \t]*(?:#|\n|$)|{match[1]}[)\]}}])", re.MULTILINE
        )
        end = deeper.search(text, match.end())
        yield text[match.start() : end.start() if end else len(text)]


def _profile(block: str) -> Profile:
    """How often each keyword occurs: renaming does not change it, and it is far cheaper than a
    syntax tree."""
    words = re.findall(r"\w+", _without_comments(block))
    return frozenset(Counter(word for word in words if word in _KEYWORDS).items())


def _normal_forms(source: str) -> Iterator[tuple[str, str]]:
    """(syntax tree in which bound names are numbered, source) of each function in a source that
    is large enough."""
    for block in _blocks(source):
        indent = len(block) - len(block.lstrip())
        tree = parsed("\n".join(line[indent:] for line in block.split("\n")))
        if tree is not None and len(list(ast.walk(tree))) >= NODES:
            yield _normal(tree.body[0]), block


def _normal(node: ast.stmt) -> str:
    """A dump in which names that the function binds are numbered, without docstrings and
    annotations."""
    bound: dict[str, str] = {}
    for n in ast.walk(node):
        match n:
            case (
                ast.FunctionDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store())
            ):
                bound.setdefault(name, f"_{len(bound)}")
    for n in ast.walk(node):
        match n:
            case ast.FunctionDef():
                n.name = bound[n.name]
                n.returns = None
                n.decorator_list = []
                if ast.get_docstring(n) and len(n.body) > 1:
                    del n.body[0]
            case ast.arg():
                n.arg = bound[n.arg]
                n.annotation = None
            case ast.Name():
                n.id = bound.get(n.id, n.id)
    return ast.dump(node)


# ---- what a checkpoint was trained on


def _texts_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    preferences = entry.get("kind") == "preference"
    data_dir = entry.get("data_dir")
    task = entry.get("task")
    # with preferences from files the task only evaluates
    if task and not (preferences and data_dir):
        source = entry.get("task_data") if preferences else data_dir
        if source and _directory(source).exists():  # it may also be a word such as hub
            source = str(_directory(source))
        problems = tasks.load(task, source=source).problems("train", seed=entry.get("seed") or 0)
        # RL never shows a reference solution
        yield from ((request(problem), True) for problem in problems)
    elif not data_dir:
        raise UserError("its lineage names no data")
    elif not _directory(data_dir).exists():  # of an included model, or trained elsewhere
        raise _Elsewhere(data_dir)
    elif entry.get("kind") == "pretrain":
        yield from _corpus_texts(_directory(data_dir), entry.get("data"))
    elif preferences:
        yield from _preference_texts(_directory(data_dir))
    else:
        yield from _conversation_texts(_directory(data_dir))


def _directory(name: str) -> Path:
    return Path(name) if Path(name).exists() else ROOT / name


def _corpus_texts(directory: Path, recorded: str | None) -> Iterator[tuple[str, bool]]:
    manifest, shards = corpus.open_corpus(directory, "train")
    if recorded not in (None, manifest.get("hash")):
        raise UserError(f"{directory} holds another corpus than the one that was trained on")
    state = manifest.get("tokenizer_state")
    known = tokenizer.from_dict(state) if state else tokenizer.load(manifest["tokenizer"])
    for shard in shards:
        for at in range(0, len(shard), PIECE):
            yield known.decode(shard[at : at + PIECE + OVERLAP].tolist()), False


def _conversation_texts(directory: Path) -> Iterator[tuple[str, bool]]:
    """Messages of the rows that SFT trains on, without system prompts, and the texts in the
    JSON of calls and results."""
    tokenized = set[str]()
    for file in conversations.domain_files(directory, "train"):
        for row in conversations.read(file):
            if "input_ids" in row:
                tokenized.add(file.name)
            else:
                yield from _said(row["messages"])
    if tokenized:  # the rows do not name their tokenizer
        raise UserError(
            f"{', '.join(sorted(tokenized))}: rows are token "
            "ids; search their texts (other rows were)"
        )


def _preference_texts(directory: Path) -> Iterator[tuple[str, bool]]:
    """The same of preferences, with both answers of a pair."""
    file = directory / "preferences.train.jsonl"
    for number, row in read_jsonl(file):
        preference = preference_rows.preference_of(row, f"{file}:{number}")
        if isinstance(preference, str):  # it teaches nothing
            continue
        answers = [{"role": "assistant", "content": answer} for answer in preference.answers]
        yield from _said([*preference.messages, *answers])


def _said(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    for message in messages:
        role = message["role"]
        content = message["content"]
        if role != "system":
            yield content, True
        # a program in JSON has no line ends, so no solution is found in it
        if role == "assistant":
            called = [call.arguments for call in tool_calls.parse_calls(content)]
            yield from ((text, False) for text in public_rows.texts_in(called))
        elif role == "function":
            yield from ((text, False) for text in public_rows.texts_in(content) if text != content)


def request(problem: Problem) -> str:
    """The user messages of a problem, without the system prompt, which many problems share."""
    return "\n".join(m["content"] for m in problem.messages if m["role"] == "user")
