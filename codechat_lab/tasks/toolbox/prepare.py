"""`codechat data calls`: function calls -> conversations, copying drills, problems and behaviour probes.

The embedded source is the toolbox. Files and the hub are read by their columns.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from codechat.core import processes
from codechat.core.config import SEEDS, opt
from codechat.core.errors import ConfigError
from codechat.data import public_rows, sources, splits
from codechat.data.sources import Ledger
from codechat.data.splits import SPLITS
from codechat.tasks.base import row_of
from codechat.text import chat, tool_lists
from codechat_lab.data import synthetic
from codechat_lab.tasks.preparation import ColumnsConfig, prepare
from codechat_lab.tasks.toolbox import dialogues, problems
from codechat_lab.tasks.toolbox.catalogue import PHRASES
from codechat_lab.tasks.toolbox.drills import STEPS, copy_dialogues, lookup_dialogues
from codechat_lab.tasks.toolbox.values import is_shared, parts

Row = dict[str, Any]
Called = tuple[str | None, Mapping[str, Any]]  # name and arguments of a call
CALLS_HUB = "glaiveai/glaive-function-calling-v2"
TOOLBOX_CALLS = 20_000


@dataclass(frozen=True, kw_only=True)
class CallsConfig(ColumnsConfig):
    """Function calls -> calls.SPLIT.jsonl, copying drills copy.SPLIT.jsonl, problems funcall.SPLIT.jsonl,
    behaviour probes probes.SPLIT.jsonl."""

    source: str = opt(
        "embedded",
        "embedded (the toolbox), hub, a path or a hub data set's name: OpenAI messages with tools, ShareGPT, Hermes, ToolACE, xLAM, glaive",
        reads="path",
    )
    domain: str = opt("calls", "domain of a source's conversations; only calls has problems and probes")
    max_examples: int | None = opt(None, "conversations to take; none = 20,000 of the toolbox, all of a file", least=0)
    twins: float = opt(
        0.0,
        "share of a file's calls repeated without their functions, to decline",
        least=0,
        most=1,
    )
    copies: int = opt(8000, "copying drills of the toolbox (domain copy); 0 = none", least=0)
    lookups: int = opt(0, "lookup drills of each kind (domains lookup_calls, lookup_phrases, lookup_loose)", least=0)
    lookups_missing: float = opt(0.0, "share of the lookup drills' requests that match no line", least=0, most=1)
    problems: int = opt(4000, "training problems of the toolbox", least=0)
    eval_examples: int = opt(500, "conversations and problems of each split but train", least=0)
    tools_style: Literal["compact", "described", "json"] = opt(
        "compact",
        "how a system prompt lists tools: compact, described (the name after its description, and an entry for nothing), or json (of a file)",
    )
    probes: int = opt(64, "behaviour probes of each cell", least=0)
    seed: int = opt(0, "seed of the toolbox", **SEEDS)
    mix: dialogues.Mix = opt(dialogues.Mix(), "shares of the toolbox's conversations")
    max_lost: float = opt(sources.LARGEST_LOSS, "largest share of a source lost for one reason", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tools_style == "json" and self.source == "embedded":
            raise ConfigError("tools_style json is for the rows of a --source; the embedded toolbox has the other two")
        if self.domain != "calls" and self.source == "embedded":
            raise ConfigError(f"domain {self.domain} is for the rows of a --source; the toolbox has its own domains")


def prepare_calls(cfg: CallsConfig) -> dict[str, Any]:
    """Write calls, problems and probes. Returns the manifest of the directory. Raises UserError."""
    return prepare(
        cfg, partial(_files, cfg), lambda files: {"values": values_seen(files)} if cfg.domain == "calls" else {}
    )


def _files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    files = (_toolbox_files if cfg.source == "embedded" else _read_files)(cfg, ledgers)
    if cfg.tools_style == "described":
        files = {name: list(map(_declining, rows)) for name, rows in files.items()}
    if cfg.probes and cfg.domain == "calls":  # of code, for functions that training never sees
        for split, requests in _code_requests({"select": cfg.probes, "test": cfg.probes}).items():
            files[f"probes.{split}"] = problems.probes(split, 5 * cfg.probes, cfg.seed, requests)
    return files


def _twin(row: Row, other: Row, tools_style: str) -> Row | None:
    """The request with another row's functions in place of those it calls, in a list as long, whose answer
    declines; None where it calls none."""
    before = row["messages"][: (at := public_rows.answer_at(row["messages"]))]
    called = {call.name for call in chat.parse_calls(row["messages"][at]["content"])}
    (system, schemas), (_, more) = (tool_lists.split_offer(r["messages"][0]["content"]) for r in (row, other))
    offered = {schema["name"]: schema for schema in [*schemas, *more]}
    left = [schema for name, schema in offered.items() if name not in called][: len(schemas)]
    if not called or not left or at != 2:
        return None
    listed = "\n".join(filter(None, (system.strip(), chat.tools_prompt(left, tools_style))))
    answer = dialogues.message("assistant", PHRASES["no_function"][0])
    return row | {"id": f"{row['id']}-twin", "messages": [dialogues.message("system", listed), *before[1:], answer]}


def _declining(row: Row) -> Row:
    """The row, in which an answer that has no function calls `chat.NOTHING`, as a described list offers it."""
    turns = [m | {"content": chat.DECLINE} if m["content"] in PHRASES["no_function"] else m for m in row["messages"]]
    return row | {"messages": turns}


def values_seen(files: Mapping[str, list[Row]]) -> dict[str, dict[str, int]]:
    """Split -> {"calls": problems with a call; "same": those whose call is one of training; "seen": those whose
    every argument value occurs in training; "values": different values but numbers of one or two digits; "known":
    those of them that occur in training}.

    Short numbers, letters and enumerations are shared by all splits, so a request may hold no new value. In
    training: an argument of a call in a conversation, a drill or a problem, or a word of a copying drill."""

    def asked(split: str) -> list[Called]:
        golds = (row["gold"] for row in files.get(f"funcall.{split}", ()))
        return [(gold["name"], gold["arguments"]) for gold in golds if gold]

    talks = (rows for name, rows in files.items() if name.endswith(".train") and "funcall." not in name)
    said = (m["content"] for rows in talks for row in rows for m in row["messages"] if m["role"] == "assistant")
    read = (call for text in said for call in chat.parse_calls(text))
    calls = asked("train") + [(call.name, call.arguments) for call in read if call.arguments is not None]
    trained = {text for call in calls for text in _texts(call)}
    trained.update(w.lower() for row in files.get("copy.train", ()) for w in row["messages"][-1]["content"].split())
    whole = set(map(_whole, calls))
    found = dict[str, dict[str, int]]()
    for split in ("select", "test", "test_hard"):
        golds = asked(split)
        long = {str(v).lower() for call in golds for v in _values(call) if not is_shared(v)}
        found[split] = {
            "calls": len(golds),
            "same": sum(_whole(call) in whole for call in golds),
            "seen": sum(trained.issuperset(_texts(call)) for call in golds),
            "values": len(long),
            "known": len(long & trained),
        }
        print(
            "{0}: of {calls} calls, {same} occur as they are in training, and {seen} have only values that also occur there; "
            "of {values} values but numbers of one or two digits, {known} do".format(split, **found[split])
        )
    return found


def _values(call: Called) -> list[Any]:
    return [part for value in call[1].values() for part in parts(value)]


def _texts(call: Called) -> list[str]:
    return [str(value).lower() for value in _values(call)]


def _whole(call: Called) -> str:
    return f"{call[0]} {sorted((key, list(map(str, parts(value)))) for key, value in call[1].items())}".lower()


def _toolbox_files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    """Conversations, drills, and problems of every split by strata. Only the training problems have renamed,
    composed and invented tools beside the trained ones."""
    ledgers.append(ledger := Ledger("toolbox"))
    mix = cfg.mix
    held_out = dict.fromkeys(SPLITS[1:], cfg.eval_examples)
    n_train = TOOLBOX_CALLS if cfg.max_examples is None else cfg.max_examples
    domains = {"calls": (n_train, partial(dialogues.draw, mix=mix))}
    if cfg.copies:
        domains["copy"] = (cfg.copies, partial(copy_dialogues, varied=mix.varied_values))
    for step in STEPS if cfg.lookups else ():
        drill = partial(lookup_dialogues, step=step, missing=cfg.lookups_missing, rare_words=mix.rare_words)
        domains[f"lookup_{step}"] = (cfg.lookups, drill)
    parts = [
        (f"{domain}.{split}", partial(draw, split, n, cfg.seed))
        for domain, (n_train, draw) in domains.items()
        for split, n in {"train": n_train, **held_out}.items()
    ]
    drawn = processes.on_all_cores(lambda part: list(part[1]()), parts)
    files = {name: list(ledger.counted(rows)) for (name, _), rows in zip(parts, drawn)}
    counts = {"train": cfg.problems, **held_out, "test_hard": cfg.eval_examples}
    shares = problems.SHARES | {"train": problems.training_shares(mix)}
    requests = _code_requests(
        {s: max(1, round(shares[s]["code"] * n)) for s, n in counts.items() if "code" in shares[s]}
    )
    for split, n in counts.items():
        how = dict(shares=shares[split], mix=mix if split == "train" else dialogues.Mix())
        drawn = problems.draw(split, n, cfg.seed, code_requests=requests.get(split, ()), **how)
        files[f"funcall.{split}"] = list(map(row_of, drawn))
    random.Random(f"training problems {cfg.seed}").shuffle(files["funcall.train"])
    return files


def _code_requests(counts: Mapping[str, int]) -> dict[str, list[str]]:
    """So many requests for code of each split, from functions of that split."""
    found: dict[str, list[str]] = {split: [] for split in counts}
    for row in synthetic.code_rows(sources.embedded_python(Ledger("python files")), Ledger("functions")):
        if len(some := found.get(row["meta"]["split"], [])) < counts.get(row["meta"]["split"], 0):
            some.append(row["messages"][0]["content"])
        if all(len(found[split]) >= n for split, n in counts.items()):
            break
    return found


def _read_files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    source, origin = (CALLS_HUB, CALLS_HUB) if cfg.source == "hub" else (cfg.source, Path(cfg.source).name)
    ledgers.append(ledger := Ledger(origin, cfg.max_lost))
    raw = sources.rows_of(source, cfg.columns)
    found = list(
        islice(public_rows.conversation_rows(raw, origin, ledger, cfg.tools_style, cfg.domain), cfg.max_examples)
    )
    rng = random.Random(f"twins {cfg.seed}")
    pairs = zip(list(found), rng.sample(found, len(found)))
    found += [twin for pair in pairs if rng.random() < cfg.twins and (twin := _twin(*pair, cfg.tools_style))]
    parts = splits.spread(found, public_rows.split_key)
    files = {f"{cfg.domain}.{split}": rows for split, rows in parts.items()}
    if cfg.domain != "calls":
        return files
    problems = [problem for rows in parts.values() for row in rows if (problem := public_rows.call_problem(row))]
    return files | {f"funcall.{split}": [p for p in problems if p["split"] == split] for split in SPLITS}
