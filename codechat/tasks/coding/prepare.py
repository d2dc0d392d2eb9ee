"""Conversations and problems about code: small problems of our own, and public sets of instructions and programs.

`prepare_micro` deals out the families of `tasks.micro`: worked solutions for SFT (domain "solutions") and problems
for RL, selection and test, whose parameters SFT never sees.

`prepare_code` makes conversations (domain "programs") of
    {instruction, output}               Alpaca's columns: python_code_instructions_18k_alpaca, CodeAlpaca-20k
    {problem-description, code}         Codeforces-Python-Submissions, accepted ones where a verdict is given
    {content}                           the-stack-smol: files with a docstring, which is the request
    {task_id, text or prompt, code, test_list}    MBPP's prompt split; its other splits are for RL and evaluation
    functions of the installed Python (embedded)
An answer is kept where it is Python of at most --max-chars characters and at least --min-tokens supervised
tokens; a docstring that serves as a request has at least --min-doc characters.
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
from codechat.data.prepared import SPLITS, check_shares, print_ledgers, reasons, require_kind, write
from codechat.data.public_rows import refuse_evaluation
from codechat.data.sources import Ledger
from codechat.tasks import micro, toolbox
from codechat.tasks.coding.answer_text import extract
from codechat.tasks.coding.sources import mbpp_request, mbpp_split, row_of
from codechat.text import tokenizer

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
class MicroConfig:
    """Small code problems -> solutions.SPLIT.jsonl (conversations), micro.SPLIT.jsonl (problems)."""

    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int = opt(8000, "worked solutions for training")
    problems: int = opt(2000, "training problems")
    eval_examples: int = opt(500, "conversations and problems of each split but train")
    levels: tuple[int, ...] = opt(micro.LEVELS, "levels of the families; repeat one to draw it more often")
    seed: int = opt(0, "seed of names, wordings, examples and tests")

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.levels) - set(micro.LEVELS)):
            raise ConfigError(f"levels {unknown} are unknown; give some of {', '.join(map(str, micro.LEVELS))}")
        for name in ("max_examples", "problems", "eval_examples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """Instructions and programs -> programs.SPLIT.jsonl."""

    source: tuple[str, ...] = opt(("embedded",), f"embedded, hub (all of the following), {', '.join(HUB)}, or paths")
    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts supervised tokens")
    max_examples: int | None = opt(20_000, "conversations to take from each source; none = all")
    max_chars: int = opt(4000, "longest program, characters")
    min_doc: int = opt(20, "shortest docstring that serves as a request, characters")
    min_tokens: int = opt(8, "fewest supervised tokens")
    neutral_share: float = opt(0.0, "share of the rows that get a neutral system prompt", late=True)
    negatives_share: float = opt(0.0, "share of the rows that offer tools, although code is asked for", late=True)
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source that may be lost for one reason")

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("no --source; give embedded, hub, or a path")
        check_shares(self, "max_lost")
        check_shares(self, "neutral_share", "negatives_share", together=True)


def prepare_micro(cfg: MicroConfig) -> Row:
    """Write conversations and problems; returns the manifest of the directory. Raises UserError."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledger, held_out = Ledger("micro"), dict.fromkeys(SPLITS[1:], cfg.eval_examples)
    files = {
        f"{micro.DOMAIN}.{split}": list(ledger.counted(micro.dialogues(split, n, cfg.seed, cfg.levels)))
        for split, n in {"train": cfg.max_examples, **held_out}.items()
    }
    for split, n in {"train": cfg.problems, **held_out, "test_hard": cfg.eval_examples}.items():
        files[f"micro.{split}"] = [row_of(p) for p in micro.problems(split, n, cfg.seed, cfg.levels)]
    print_ledgers([ledger])
    return write(out, files, [ledger], cfg)


# ------------------------------------------------------------------ public sets of programs


def prepare_code(cfg: CodeConfig) -> Row:
    """Write conversations; returns the manifest of the directory. Raises UserError, also for a benchmark's rows."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledgers: list[Ledger] = []
    try:
        rows = [with_system(row, cfg.neutral_share, cfg.negatives_share) for row in _rows(cfg, ledgers)]
        for ledger in ledgers:
            ledger.check()
    finally:
        print_ledgers(ledgers)
    files = {f"{DOMAIN}.{split}": [r for r in rows if r["meta"]["split"] == split] for split in SPLITS}
    return write(out, files, ledgers, cfg)


def _rows(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row]:
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
    return refuse_evaluation(sources.require_columns(rows, accepted, name), name)


def _embedded(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row | str]:
    files = Ledger("python files", dict.fromkeys(sources.PYTHON_REASONS, cfg.max_lost))
    ledgers.append(files)
    functions = synthetic.code_rows(files.counted(sources.embedded_python(files)), Ledger("functions"), cfg.max_chars)
    yield from (row | {"domain": DOMAIN} for row in functions)


def _kept(
    found: Iterable[Row | str], ledger: Ledger, cfg: CodeConfig, tok: tokenizer.Tokenizer, seen: set[str]
) -> Iterator[Row]:
    """The rows that pass the filters; others are counted by reason or rule."""
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
    """The filter that leaves a conversation out, or None."""
    code = row["messages"][-1]["content"]
    if len(code) > cfg.max_chars:
        return "too_long"
    if not code or synthetic.parsed(code) is None:
        return "no_python"
    example = conversations.encode(row, tok, "reserved", 1 << 30)
    return "few_tokens" if isinstance(example, str) or example.supervised < cfg.min_tokens else None


def program_of(row: Row, cfg: CodeConfig) -> Row | str:
    """A conversation of request and program, a rule that leaves the row out, or a key of REASONS."""
    make: Callable[[Row, CodeConfig], tuple[str, str] | str] = (
        _from_mbpp
        if "test_list" in row
        else _from_codeforces
        if "problem-description" in row
        else _from_stack
        if "content" in row
        else _from_alpaca
    )
    found = make(row, cfg)
    if isinstance(found, str):
        return found
    request, code = (part.replace("\r\n", "\n").strip() for part in found)
    if not request or not code:
        return "no_answer" if request else "no_request"
    return synthetic.row(request, code, DOMAIN, asked="code")


def _from_mbpp(row: Row, cfg: CodeConfig) -> tuple[str, str] | str:
    if mbpp_split(row["task_id"]) != "prompt":
        return "for_rl"  # those for evaluation have been refused
    return mbpp_request(row), row["code"]


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


# ---- code questions and plain chat


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Code questions and plain chat -> code.SPLIT.jsonl, chat.SPLIT.jsonl."""

    source: str = opt("embedded", "embedded, hub, or a path (parquet or jsonl with instructions and answers)")
    out: str = opt("data/sft", "directory to write")
    tokenizer: str = opt("gpt2", "tokenizer that counts the supervised tokens of the table")
    max_examples: int | None = opt(None, "rows to take from each source; none = all")
    max_code_chars: int = opt(synthetic.MAX_CODE_CHARS, "longest function of a code question, characters")
    neutral_share: float = opt(0.3, "share of the rows that get a neutral system prompt")
    negatives_share: float = opt(0.15, "share of the code rows that offer tools, although code is asked for")
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source that may be lost for one reason")

    def __post_init__(self) -> None:
        check_shares(self, "max_lost")
        check_shares(self, "neutral_share", "negatives_share", together=True)


def prepare_sft(cfg: SftConfig) -> dict[str, Any]:
    """Write code and chat conversations; returns the manifest of the directory. Raises UserError."""
    out = Path(cfg.out)
    require_kind(out, "conversations")
    ledgers: list[Ledger] = []
    try:
        rows = [with_system(row, cfg.neutral_share, cfg.negatives_share) for row in _sft_rows(cfg, ledgers)]
        for ledger in ledgers:
            ledger.check()
    finally:
        print_ledgers(ledgers)
    files = {
        f"{domain}.{split}": [r for r in rows if r["domain"] == domain and r["meta"]["split"] == split]
        for domain in sorted({r["domain"] for r in rows})
        for split in SPLITS
    }
    return write(out, files, ledgers, cfg)


def _sft_rows(cfg: SftConfig, ledgers: list[Ledger]) -> Iterator[Row]:
    if cfg.source == "embedded":
        files = Ledger("python files", reasons(sources.PYTHON_REASONS, cfg))
        functions, small_talk = Ledger("functions"), Ledger("small talk")
        ledgers += [files, functions, small_talk]
        documents = files.counted(sources.embedded_python(files))
        found = synthetic.code_rows(documents, functions, cfg.max_code_chars)
        yield from tqdm(islice(found, cfg.max_examples), "code questions", cfg.max_examples, unit="row")
        yield from small_talk.counted(synthetic.chat_rows())
        return
    origins = SFT_HUB if cfg.source == "hub" else (cfg.source,)
    for origin in origins:
        raw = sources.hub_rows(origin) if cfg.source == "hub" else sources.local_rows(Path(origin))
        ledger = Ledger(Path(origin).name, reasons(public_rows.INSTRUCTION_REASONS, cfg))
        ledgers.append(ledger)
        yield from islice(public_rows.instruction_rows(raw, ledger.source, ledger), cfg.max_examples)


def with_system(row: Row, neutral_share: float, negatives_share: float) -> Row:
    """A conversation with a neutral system prompt, with tools that its request for code does not need, or as it is; which one follows from its id."""
    if row["messages"][0]["role"] == "system":
        return row
    rng = random.Random(row["id"])
    draw, meta = rng.random(), row["meta"]
    if draw < neutral_share:
        system = toolbox.neutral_system(rng)
    elif meta["asked"] == "code" and draw < neutral_share + negatives_share:
        system, meta = toolbox.tools_system(rng, split=meta["split"]), meta | {"tools_present": True}
    else:
        return row
    return row | {"messages": [{"role": "system", "content": system}, *row["messages"]], "meta": meta}
