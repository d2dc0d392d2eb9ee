"""Conversations about code, from public sets of instructions and programs and from the installed Python.

`prepare_code` (`codechat data code`) makes conversations (domain "programs") from
    {instruction, output}               Alpaca's columns: python_code_instructions_18k_alpaca, CodeAlpaca-20k
    {problem-description, code}         Codeforces-Python-Submissions; only accepted ones where a verdict is given
    {content}                           the-stack-smol: files with a docstring, which becomes the request
    {task_id, text or prompt, code, test_list}    MBPP's prompt split; its other splits are for RL and evaluation
    functions of the installed Python (embedded)
An answer is kept if it is valid Python of at most --max-chars characters and at least --min-tokens supervised tokens. A
docstring that serves as a request has at least --min-doc characters.

`prepare_sft` (`codechat data sft`) makes code questions and plain chat.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import conversations, public_rows, sources, synthetic
from codechat.data.prepared import check_shares, reasons
from codechat.data.public_rows import reject_benchmark_rows
from codechat.data.sources import Ledger
from codechat.tasks import preparation, toolbox
from codechat.tasks.coding import short_requests
from codechat.tasks.coding.answer_text import extract
from codechat.tasks.coding.sources import mbpp_request, mbpp_split
from codechat.text import chat, tokenizer

Row = dict[str, Any]
DOMAIN = "programs"
HUB: dict[str, tuple[str, str | None]] = {
    "instructions": ("iamtarun/python_code_instructions_18k_alpaca", None),
    "codealpaca": ("sahil2801/CodeAlpaca-20k", None),
    "codeforces": ("MatrixStudio/Codeforces-Python-Submissions", None),
    "stack": ("bigcode/the-stack-smol", "data/python/data.json"),
    "mbpp": ("google-research-datasets/mbpp", "full/prompt-*.parquet"),
}
SFT_HUB = ("iamtarun/python_code_instructions_18k_alpaca", "sahil2801/CodeAlpaca-20k")
REASONS = ("no_request", "no_answer")


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Instructions and programs -> programs.SPLIT.jsonl."""

    source: tuple[str, ...] = opt(("embedded",), f"embedded, hub (all of the following), {', '.join(HUB)}, or paths")
    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts supervised tokens")
    max_examples: int | None = opt(20_000, "conversations to take from each source; none = all", least=0)
    max_chars: int = opt(4000, "longest program, characters", least=1)
    min_doc: int = opt(20, "shortest docstring that serves as a request, characters", least=0)
    min_tokens: int = opt(8, "fewest supervised tokens", least=0)
    neutral_share: float = opt(0.0, "share of the rows that get a neutral system prompt", late=True)
    negatives_share: float = opt(0.0, "share of the rows that offer tools, although the request is for code", late=True)
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source that may be lost for one reason")

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("no --source; give embedded, hub, or a path")
        check_shares(self, "max_lost")
        check_shares(self, "neutral_share", "negatives_share", together=True)


# ------------------------------------------------------------------ public sets of programs


def prepare_code(cfg: CodeConfig) -> Row:
    """Write conversations. Returns the manifest of the directory. Raises UserError, also for a benchmark's rows."""
    return _write(cfg, _program_rows)


def _write(cfg: CodeConfig | SftConfig, read: Callable[..., Iterable[Row]]) -> Row:
    """Write the rows of `read(cfg, ledgers)` with their system prompts, a file for each domain and split."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        style = getattr(cfg, "tools_style", "compact")
        domains: dict[str, list[Row]] = {}
        for row in read(cfg, ledgers):
            domains.setdefault(row["domain"], []).append(
                with_system(row, cfg.neutral_share, cfg.negatives_share, style)
            )
        return {
            f"{domain}.{split}": part
            for domain, rows in sorted(domains.items())
            for split, part in synthetic.spread(rows, public_rows.split_key).items()
        }

    return preparation.prepare(cfg, collect)


def _program_rows(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row]:
    tok, seen = tokenizer.load(cfg.tokenizer), set[str]()
    for name in [part for source in cfg.source for part in (HUB if source == "hub" else [source])]:
        ledger = Ledger(
            name if name in HUB or name == "embedded" else Path(name).name, dict.fromkeys(REASONS, cfg.max_lost)
        )
        ledgers.append(ledger)
        found = _embedded(cfg, ledgers) if name == "embedded" else (program_of(row, cfg) for row in _raw(name))
        yield from islice(_kept(found, ledger, cfg, tok, seen), cfg.max_examples)


def _raw(name: str) -> Iterator[Row]:
    hub, files = HUB.get(name, (name, None))
    rows = sources.hub_rows(hub, files=files) if name in HUB else sources.local_rows(Path(name))
    accepted = [
        ("instruction", "output"),
        ("problem-description", "code"),
        ("content",),
        ("task_id", "code", "test_list"),
    ]
    return reject_benchmark_rows(sources.require_columns(rows, accepted, name), name)


def _embedded(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row | str]:
    files = Ledger("python files", dict.fromkeys(sources.PYTHON_REASONS, cfg.max_lost))
    ledgers.append(files)
    functions = synthetic.code_rows(files.counted(sources.embedded_python(files)), Ledger("functions"), cfg.max_chars)
    yield from (row | {"domain": DOMAIN} for row in functions)


def _kept(
    found: Iterable[Row | str], ledger: Ledger, cfg: CodeConfig, tok: tokenizer.Tokenizer, seen: set[str]
) -> Iterator[Row]:
    """The rows that pass the filters. Others are counted by reason or rule."""
    for row in found:
        if isinstance(row, str):
            (ledger.lose if row in REASONS else ledger.skip)(row)
            continue
        rule = _rule(row, cfg, tok)
        if rule is None and row["id"] in seen:
            rule = "duplicate"
        if rule:
            ledger.skip(rule)
            continue
        seen.add(row["id"])
        ledger.keep()
        yield row


def _rule(row: Row, cfg: CodeConfig, tok: tokenizer.Tokenizer) -> str | None:
    """The rule that skips a conversation, or None."""
    code = row["messages"][-1]["content"]
    if len(code) > cfg.max_chars:
        return "too_long"
    if not code or synthetic.parsed(code) is None:
        return "no_python"
    example = conversations.encode(row, tok, "reserved", 1 << 30)
    return "few_tokens" if isinstance(example, str) or example.supervised < cfg.min_tokens else None


def program_of(row: Row, cfg: CodeConfig) -> Row | str:
    """A conversation of request and program, a rule that skips the row, or one of REASONS."""
    columns = {"test_list": _from_mbpp, "problem-description": _from_codeforces, "content": _from_stack}
    make = next((make for column, make in columns.items() if column in row), _from_alpaca)
    found = _no_text(row, *TEXT_COLUMNS[make]) or make(row, cfg)
    if isinstance(found, str):
        return found
    request, code = (part.replace("\r\n", "\n").strip() for part in found)
    if not request or not code:
        return "no_answer" if request else "no_request"
    return synthetic.row(request, code, DOMAIN, asked="code")


def _no_text(row: Row, asked: Iterable[str], answered: Iterable[str]) -> str | None:
    """The reason of REASONS where a column of the request or of the answer holds something that is no text; None where all do, or hold nothing."""
    for reason, columns in zip(REASONS, (asked, answered), strict=True):
        if any(not isinstance(row.get(column) or "", str) for column in columns):
            return reason
    return None


def _from_mbpp(row: Row, cfg: CodeConfig) -> tuple[str, str] | str:
    if mbpp_split(row["task_id"]) != "prompt":
        return "for_rl"  # evaluation rows were rejected before
    tests = row["test_list"]
    shown = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
    if not shown or not (row.get("text") or row.get("prompt")):
        return "no_request"
    return mbpp_request(row), row["code"] or ""


def _from_codeforces(row: Row, cfg: CodeConfig) -> tuple[str, str] | str:
    if row.get("verdict") not in (None, "OK"):
        return "not_accepted"
    parts = [row.get("problem-description") or ""]
    parts += [
        f"{title}:\n{text}" for title in ("Input", "Output") if (text := row.get(f"{title.lower()}-specification"))
    ]
    return "\n\n".join(parts) if parts[0] else "", row.get("code") or ""


def _from_stack(row: Row, cfg: CodeConfig) -> tuple[str, str] | str:
    text = row["content"] or ""
    tree = synthetic.parsed(text) if len(text) <= cfg.max_chars else None
    if tree is None:
        return "too_long" if len(text) > cfg.max_chars else "no_python"
    doc = (ast.get_docstring(tree) or "").strip()
    return (
        (f"Write a Python module for this description:\n\n{doc}", text)
        if len(doc) >= cfg.min_doc
        else "short_docstring"
    )


def _from_alpaca(row: Row, cfg: CodeConfig) -> tuple[str, str] | str:
    request, given = row.get("instruction") or "", row.get("input") or ""
    if given.strip().lower() not in ("", "n/a", "none", "<noinput>", "no input", "not applicable"):
        request = f"{request.strip()}\n\n{given}"
    answer = row.get("output") or ""
    code = extract(answer)
    if answer.strip() and (not code or synthetic.parsed(code) is None):
        return "no_python"
    return request, code


# for each layout the columns of the request and of the answer
TEXT_COLUMNS = {
    _from_mbpp: (("text", "prompt"), ("code",)),
    _from_codeforces: (("problem-description", "input-specification", "output-specification"), ("code",)),
    _from_stack: ((), ("content",)),
    _from_alpaca: (("instruction", "input"), ("output",)),
}


# ---- code questions and plain chat


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Code questions and plain chat -> code.SPLIT.jsonl, chat.SPLIT.jsonl, with `short` short.SPLIT.jsonl."""

    source: str = opt(
        "embedded", "embedded, hub, a path or a hub data set's name: instructions and answers, or conversations"
    )
    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int | None = opt(None, "rows to take from each source; none = all", least=0)
    max_code_chars: int = opt(synthetic.MAX_CODE_CHARS, "longest function of a code question, characters", least=1)
    neutral_share: float = opt(0.3, "share of the rows that get a neutral system prompt")
    negatives_share: float = opt(0.15, "share of the code rows that offer tools, although the request is for code")
    tools_style: str = opt(
        "compact",
        "how a system prompt lists tools: compact, described (the name after its description), or json",
        late=True,
    )
    talk: bool = opt(False, "also the small talk of small_talk.json (domain chat)", late=True)
    short: bool = opt(
        False, "also short requests for well-known programs, such as `write quicksort` (domain short)", late=True
    )
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source that may be lost for one reason")
    columns: tuple[str, ...] = opt(
        (), "OURS=THEIRS where a file names its columns otherwise, such as question=query", late=True
    )
    preview: int = opt(0, "conversations to show as training sees them, with their loss mask", identity=False, least=0)

    def __post_init__(self) -> None:
        sources.check_columns(self.columns)
        chat.check_style(self.tools_style)
        check_shares(self, "max_lost")
        check_shares(self, "neutral_share", "negatives_share", together=True)


def prepare_sft(cfg: SftConfig) -> dict[str, Any]:
    """Write code and chat conversations. Returns the manifest of the directory. Raises UserError."""
    return _write(cfg, _sft_rows)


def _sft_rows(cfg: SftConfig, ledgers: list[Ledger]) -> Iterator[Row]:
    if cfg.source == "embedded":
        files = Ledger("python files", reasons(sources.PYTHON_REASONS, cfg))
        functions, small_talk = Ledger("functions"), Ledger("small talk")
        ledgers += [files, functions, small_talk]
        documents = files.counted(sources.embedded_python(files))
        found = synthetic.code_rows(documents, functions, cfg.max_code_chars)
        yield from tqdm(islice(found, cfg.max_examples), "code questions", cfg.max_examples, unit="row")
        yield from small_talk.counted(synthetic.chat_rows(cfg.talk))
        if cfg.short:
            yield from short_requests.short_rows()
        return
    origins = SFT_HUB if cfg.source == "hub" else (cfg.source,)
    for origin in origins:
        raw = sources.rows_of(origin, cfg.columns)
        ledger = Ledger(Path(origin).name, reasons(public_rows.INSTRUCTION_REASONS, cfg))
        ledgers.append(ledger)
        yield from islice(public_rows.instruction_rows(raw, ledger.source, ledger, cfg.tools_style), cfg.max_examples)


def with_system(row: Row, neutral_share: float, negatives_share: float, style: str = "compact") -> Row:
    """A conversation with a neutral system prompt, with tools that its request for code does not need, or unchanged. A
    hash of its id decides."""
    if row["messages"][0]["role"] == "system":
        return row
    rng = random.Random(row["id"])
    draw, meta = rng.random(), row["meta"]
    if draw < neutral_share:
        system = toolbox.neutral_system(rng)
    elif meta["asked"] == "code" and draw < neutral_share + negatives_share:
        system, meta = toolbox.tools_system(rng, split=meta["split"], style=style), meta | {"tools_present": True}
    else:
        return row
    return row | {"messages": [{"role": "system", "content": system}, *row["messages"]], "meta": meta}
