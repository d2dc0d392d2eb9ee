"""Conversations about code, from public sets of instructions and programs and from the
installed Python.

`prepare_code` (`codechat data code`) makes conversations (domain "programs") from
    {instruction, output}               Alpaca's columns: python_code_instructions_18k_alpaca, CodeAlpaca-20k
    {problem-description, code}         Codeforces-Python-Submissions; only accepted ones where a verdict is given
    {content}                           the-stack-smol: files with a docstring, which becomes the request
    {task_id, text or prompt, code, test_list}    MBPP's prompt split; its other splits are for RL and evaluation
`prepare_sft` (`codechat data sft`) makes code questions and plain chat. Both know the functions
of the installed Python (embedded)."""

from __future__ import annotations

import ast
import random
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.data import conversations, row_readers, sources, splits
from codechat.data.sources import Ledger
from codechat.text import tokenizer
from codechat_lab.data import public_rows, python_source, synthetic
from codechat_lab.data.public_rows import reject_benchmark_rows
from codechat_lab.tasks import preparation
from codechat_lab.tasks.coding.answer_text import extract
from codechat_lab.tasks.coding.task import mbpp_request, mbpp_split
from codechat_lab.tasks.toolbox import sampler

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
COLUMNS = [
    ("instruction", "output"),
    ("problem-description", "code"),
    ("content",),
    ("task_id", "code", "test_list"),
]
REASONS = ("no_request", "no_answer")
MIN_DOC = 20  # characters of a docstring that serves as a request
MIN_TOKENS = 8  # supervised tokens of an answer


def _write(cfg: RowsConfig, read: Callable[..., Iterable[Row]]) -> Row:
    """Write the rows of `read(cfg, ledgers)` with their system prompts, a file for each domain
    and split. Returns the manifest of the directory. Raises UserError, also for a benchmark's
    rows."""

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        style = cfg.tools_style if isinstance(cfg, SftConfig) else "compact"
        domains = dict[str, list[Row]]()
        for row in read(cfg, ledgers):
            row = with_system(row, cfg.neutral_share, cfg.negatives_share, style)
            domains.setdefault(row["domain"], []).append(row)
        files = dict[str, list[Row]]()
        for domain, rows in sorted(domains.items()):
            for split, part in splits.spread(rows, public_rows.split_key).items():
                files[f"{domain}.{split}"] = part
        return files

    return preparation.prepare(cfg, collect)


def with_system(
    row: Row, neutral_share: float, negatives_share: float, style: str = "compact"
) -> Row:
    """A conversation with a neutral system prompt, with tools that its request for code does
    not need, or unchanged. A hash of its id decides."""
    if row["messages"][0]["role"] == "system":
        return row
    rng = random.Random(row["id"])
    draw = rng.random()
    meta = row["meta"]
    if draw < neutral_share:
        system = sampler.neutral_system(rng)
    elif meta["asked"] == "code" and draw < neutral_share + negatives_share:
        system = sampler.tools_system(rng, meta["split"], style)
        meta = meta | {"tools_present": True}
    else:
        return row
    return row | {
        "messages": [{"role": "system", "content": system}, *row["messages"]],
        "meta": meta,
    }


@dataclass(frozen=True, kw_only=True)
class RowsConfig(preparation.PreparedConfig):
    """What both preparations share."""

    source: Any  # each has its own
    neutral_share: float = opt(
        0.3, "share of the rows that get a neutral system prompt", least=0, most=1
    )
    negatives_share: float = opt(
        0.15, "share of the code rows that offer tools all the same", least=0, most=1
    )
    max_lost: float = opt(
        sources.LARGEST_LOSS, "largest share of a source lost for one reason", least=0, most=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neutral_share + self.negatives_share > 1:
            raise ConfigError(
                f"neutral_share {self.neutral_share} and "
                f"negatives_share {self.negatives_share} exceed 1"
            )


@dataclass(frozen=True, kw_only=True)
class CodeConfig(RowsConfig):
    """Instructions and programs -> programs.SPLIT.jsonl."""

    source: tuple[str, ...] = opt(
        ("embedded",),
        f"embedded, hub (all of the following), {', '.join(HUB)}, or paths",
        reads="path",
    )
    max_examples: int | None = opt(
        20_000, "conversations to take from each source; none = all", least=0
    )
    max_chars: int = opt(4000, "longest program, characters", least=1)
    neutral_share: float = 0.0
    negatives_share: float = 0.0


def _program_rows(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row]:
    tok = tokenizer.load(cfg.tokenizer)
    seen = set[str]()
    names = list[str]()
    for source in cfg.source:
        names += HUB if source == "hub" else [source]
    for name in names:
        known = name in HUB or name == "embedded"
        ledger = Ledger(name if known else Path(name).name, cfg.max_lost)
        ledgers.append(ledger)
        rows = _embedded(cfg, ledgers) if name == "embedded" else _public(name, cfg)
        yield from islice(_kept(rows, ledger, cfg, tok, seen), cfg.max_examples)


def _public(name: str, cfg: CodeConfig) -> Iterator[Row | str]:
    if name in HUB:
        data_set, files = HUB[name]
        rows = sources.hub_rows(data_set, files=files)
    else:
        rows = sources.local_rows(Path(name))
    rows = reject_benchmark_rows(sources.require_columns(rows, COLUMNS, name), name)
    for number, row in enumerate(rows, 1):
        yield program_of(row, cfg, f"{name}, row {number}")


def _embedded(cfg: CodeConfig, ledgers: list[Ledger]) -> Iterator[Row | str]:
    files = Ledger("python files", cfg.max_lost)
    ledgers.append(files)
    functions = synthetic.code_rows(
        files.counted(sources.embedded_python(files)), Ledger("functions"), cfg.max_chars
    )
    return (row | {"domain": DOMAIN} for row in functions)


def _kept(
    rows: Iterable[Row | str],
    ledger: Ledger,
    cfg: CodeConfig,
    tok: tokenizer.Tokenizer,
    seen: set[str],
) -> Iterator[Row]:
    """The rows that pass the filters. Others are counted by reason or rule."""
    for row in rows:
        if isinstance(row, str):
            if row in REASONS:
                ledger.lose(row)
            else:
                ledger.skip(row)
            continue
        code = row["messages"][-1]["content"]
        if len(code) > cfg.max_chars:
            ledger.skip("too_long")
        elif python_source.parsed(code) is None:
            ledger.skip("no_python")
        elif (
            getattr(conversations.encode(row, tok, "reserved", 1 << 30), "supervised", 0)
            < MIN_TOKENS
        ):
            ledger.skip("few_tokens")
        elif row["id"] in seen:
            ledger.skip("duplicate")
        else:
            seen.add(row["id"])
            ledger.kept += 1
            yield row


def program_of(row: Row, cfg: CodeConfig, where: str = "a row") -> Row | str:
    """A conversation of request and program, a rule that skips the row, or one of REASONS."""
    layout = LAYOUTS[next((column for column in LAYOUTS if column in row), "instruction")]
    if not _are_text(row, layout.request):
        return "no_request"
    if not _are_text(row, layout.answer):
        return "no_answer"
    pair = layout.read(row, cfg)
    if isinstance(pair, str):
        return pair
    request, code = map(row_readers.cleaned, pair)
    if not request or not code:
        return "no_answer" if request else "no_request"
    program = synthetic.row(request, code, DOMAIN, asked="code")
    return program | {"messages": [*row_readers.turns_before(row, where), *program["messages"]]}


def _are_text(row: Row, columns: Iterable[str]) -> bool:
    return all(row.get(column) is None or isinstance(row[column], str) for column in columns)


Pair = tuple[str, str] | str  # (request, code), or a rule or a reason


def _from_mbpp(row: Row, cfg: CodeConfig) -> Pair:
    if mbpp_split(row["task_id"]) != "prompt":
        return "for_rl"  # evaluation rows were rejected before
    tests = row["test_list"]
    shown = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
    if not shown or not (row.get("text") or row.get("prompt")):
        return "no_request"
    return mbpp_request(row), row["code"] or ""


def _from_codeforces(row: Row, cfg: CodeConfig) -> Pair:
    if row.get("verdict") not in (None, "OK"):
        return "not_accepted"
    request = row.get("problem-description") or ""
    if request:
        for title in ("Input", "Output"):
            text = row.get(f"{title.lower()}-specification")
            if text:
                request += f"\n\n{title}:\n{text}"
    return request, row.get("code") or ""


def _from_stack(row: Row, cfg: CodeConfig) -> Pair:
    text = row["content"] or ""
    if len(text) > cfg.max_chars:
        return "too_long"
    tree = python_source.parsed(text)
    if tree is None:
        return "no_python"
    doc = (ast.get_docstring(tree) or "").strip()
    if len(doc) < MIN_DOC:
        return "short_docstring"
    return f"Write a Python module for this description:\n\n{doc}", text


def _from_alpaca(row: Row, cfg: CodeConfig) -> Pair:
    request = row.get("instruction") or ""
    given = row.get("input") or ""
    answer = row.get("output") or ""
    if given.strip().lower() not in row_readers.NO_INPUT:
        request = f"{request.strip()}\n\n{given}"
    code = extract(answer)
    if answer.strip() and (not code or python_source.parsed(code) is None):
        return "no_python"
    return request, code


class Layout(NamedTuple):
    """request, answer: columns of either, which must be text or absent."""

    read: Callable[[Row, CodeConfig], Pair]
    request: tuple[str, ...]
    answer: tuple[str, ...]


# By the column that tells it.
LAYOUTS = {
    "test_list": Layout(_from_mbpp, ("text", "prompt"), ("code",)),
    "problem-description": Layout(
        _from_codeforces,
        ("problem-description", "input-specification", "output-specification"),
        ("code",),
    ),
    "content": Layout(_from_stack, (), ("content",)),
    "instruction": Layout(_from_alpaca, ("instruction", "input"), ("output",)),
}


@dataclass(frozen=True, kw_only=True)
class SftConfig(RowsConfig, preparation.ColumnsConfig):
    """Code questions and plain chat -> code.SPLIT.jsonl, chat.SPLIT.jsonl, with `short`
    short.SPLIT.jsonl."""

    source: str = opt(
        "embedded",
        "embedded, hub, a path or a hub data set's name: instructions and answers, or conversations",
        reads="path",
    )
    max_examples: int | None = opt(None, "rows to take from each source; none = all", least=0)
    tools_style: Literal["compact", "described", "arguments", "json"] = opt(
        "compact",
        "how a system prompt lists tools: compact, described "
        "(the name after its description), or json",
    )
    talk: bool = opt(False, "also the small talk of small_talk.json (domain chat)")
    short: bool = opt(
        False,
        "also short requests for well-known programs, such as `write quicksort` (domain short)",
    )


def _sft_rows(cfg: SftConfig, ledgers: list[Ledger]) -> Iterator[Row]:
    if cfg.source == "embedded":
        files = Ledger("python files", cfg.max_lost)
        functions = Ledger("functions")
        small_talk = Ledger("small talk")
        ledgers += [files, functions, small_talk]
        rows = synthetic.code_rows(files.counted(sources.embedded_python(files)), functions)
        yield from tqdm(
            islice(rows, cfg.max_examples), "code questions", cfg.max_examples, unit="row"
        )
        yield from small_talk.counted(synthetic.chat_rows(cfg.talk))
        yield from short_rows() if cfg.short else ()
        return
    for origin in SFT_HUB if cfg.source == "hub" else (cfg.source,):
        raw = sources.rows_of(origin, cfg.columns)
        ledger = Ledger(Path(origin).name, cfg.max_lost)
        ledgers.append(ledger)
        rows = public_rows.conversation_rows(raw, ledger.source, ledger, cfg.tools_style)
        found = list(islice(rows, cfg.max_examples))
        remedy = (
            "give these rows their tools, or prepare them with codechat data calls --tools FILE.py"
        )
        public_rows.warn_of_calls(found, ledger.source, remedy)
        yield from found


def short_rows() -> Iterator[Row]:
    """Short requests for well-known programs, as people type them: every name and form of
    short_programs.toml, in a fixed random order.

    The program is the same in every split; the hash of the request decides the split, so only
    the wording is new in validation and test."""
    data = tomllib.loads(
        Path(__file__).with_name("short_programs.toml").read_text(encoding="utf-8")
    )
    requests = list[tuple[str, str]]()
    for program in data["program"]:
        for name in program["names"]:
            requests += [(form.format(x=name), program["code"]) for form in data["forms"]]
    random.Random("short requests").shuffle(requests)
    for request, code in requests:
        split = splits.split_of(sources.digest(request))
        yield synthetic.row(request, code, "short", asked="code", split=split)


prepare_code = partial(_write, read=_program_rows)
prepare_sft = partial(_write, read=_sft_rows)
