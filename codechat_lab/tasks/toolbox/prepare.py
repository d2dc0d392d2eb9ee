"""`codechat data calls`: function calls -> conversations, copying drills, problems and
behaviour probes.

The embedded source is the toolbox; `--mix NAME` takes the shares of a named mix of mixes.toml.
Files and the hub are read by their columns."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from codechat.core import processes
from codechat.core.config import SEEDS, opt
from codechat.core.errors import ConfigError
from codechat.data import sources, splits
from codechat.data.sources import Ledger
from codechat.data.splits import SPLITS
from codechat.tasks.base import row_of
from codechat.text import tool_calls, tool_functions, tool_lists
from codechat_lab.data import public_rows, synthetic
from codechat_lab.tasks.preparation import ColumnsConfig, prepare
from codechat_lab.tasks.toolbox import dialogues, forms, mixes, problems, sampler, turns
from codechat_lab.tasks.toolbox.catalogue import PHRASES
from codechat_lab.tasks.toolbox.drills import STEPS, copy_dialogues, lookup_dialogues
from codechat_lab.tasks.toolbox.mixes import Mix
from codechat_lab.tasks.toolbox.values import is_shared, parts

Row = dict[str, Any]
Files = Mapping[str, list[Row]]  # DOMAIN.SPLIT -> rows
CALLS_HUB = "glaiveai/glaive-function-calling-v2"
TOOLBOX_CALLS = 20_000


@dataclass(frozen=True, kw_only=True)
class CallsConfig(ColumnsConfig):
    """Function calls -> calls.SPLIT.jsonl, copying drills copy.SPLIT.jsonl, problems
    funcall.SPLIT.jsonl, behaviour probes probes.SPLIT.jsonl."""

    source: str = opt(
        "embedded",
        "embedded (the toolbox), hub, a path or a hub data set's name: OpenAI messages with tools, ShareGPT, Hermes, "
        "ToolACE, xLAM, glaive",
        reads="path",
    )
    domain: str = opt(
        "calls", "domain of a source's conversations; only calls has problems and probes"
    )
    tools: tuple[str, ...] = opt(
        (),
        "Python file whose functions a source's rows offer if they offer none (see examples/my_tools.py)",
    )
    max_examples: int | None = opt(
        None, "conversations to take; none = 20,000 of the toolbox, all of a file", least=0
    )
    twins: float = opt(
        0.0, "share of a file's calls repeated without their functions, to decline", least=0, most=1
    )
    max_chars: int | None = opt(
        None, "longest conversation of a file, characters; none = any", least=1
    )
    copies: int = opt(8000, "copying drills of the toolbox (domain copy); 0 = none", least=0)
    lookups: int = opt(
        0,
        "lookup drills of each kind (domains lookup_calls, lookup_phrases, lookup_loose)",
        least=0,
    )
    lookups_missing: float = opt(
        0.0, "share of the lookup drills' requests that match no line", least=0, most=1
    )
    problems: int = opt(4000, "training problems of the toolbox", least=0)
    eval_examples: int = opt(500, "conversations and problems of each split but train", least=0)
    tools_style: Literal["compact", "described", "arguments", "json"] = opt(
        "compact",
        "how a system prompt lists tools: compact, described (the name after its description, and an entry for "
        "nothing), arguments (the same, and a line for each argument with a description), or json (whole schemas)",
    )
    probes: int = opt(64, "behaviour probes of each cell", least=0)
    seed: int = opt(0, "seed of the toolbox", **SEEDS)
    mix: Mix = opt(
        Mix(), f"shares of the toolbox's conversations, or a named mix: {', '.join(mixes.MIXES)}"
    )
    max_lost: float = opt(
        sources.LARGEST_LOSS, "largest share of a source lost for one reason", least=0, most=1
    )

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """A named mix means its shares."""
        return mixes.named_mix(super().as_spelled(given, spelled))

    def __post_init__(self) -> None:
        super().__post_init__()
        shows = self.tools_style in ("arguments", "json")
        if self.mix.forms and self.source == "embedded" and not shows:
            raise ConfigError(
                f"mix.forms {self.mix.forms} with tools_style {self.tools_style}, which shows no "
                "descriptions of arguments; give --tools-style arguments or json"
            )
        if self.tools and self.source == "embedded":
            raise ConfigError(
                "tools is for the rows of a --source; the embedded toolbox has its own functions"
            )
        if self.domain != "calls" and self.source == "embedded":
            raise ConfigError(
                f"domain {self.domain} is for the rows of a "
                "--source; the toolbox has its own domains"
            )


def prepare_calls(cfg: CallsConfig) -> dict[str, Any]:
    """Write calls, problems and probes. Returns the manifest of the directory. Raises UserError."""
    return prepare(cfg, partial(_files, cfg), partial(_measured, cfg))


def _measured(cfg: CallsConfig, files: Files) -> dict[str, Any]:
    """The manifest's entry about values; other domains have no problems to count them in."""
    return {"values": values_seen(files)} if cfg.domain == "calls" else {}


def _files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    embedded = cfg.source == "embedded"
    files = _toolbox_files(cfg, ledgers) if embedded else _source_files(cfg, ledgers)
    style = cfg.tools_style
    if style in tool_lists.DECLINING:
        files = {name: list(map(_declining, rows)) for name, rows in files.items()}
    if embedded and style in ("arguments", "json"):
        files = {name: [_listed(row, style) for row in rows] for name, rows in files.items()}
    n = cfg.probes
    if n and cfg.domain == "calls":
        # functions that training never sees
        for split, requests in _code_requests({"select": n, "test": n}).items():
            files[f"probes.{split}"] = problems.probes(split, 5 * n, cfg.seed, requests)
    return files


def _declining(row: Row) -> Row:
    """The row as a described list needs it: an answer that has no function calls
    `tool_lists.NOTHING`, an entry there."""
    turns = [
        m | {"content": tool_calls.DECLINE} if m["content"] in PHRASES["no_function"] else m
        for m in row["messages"]
    ]
    return row | {"messages": turns}


def _listed(row: Row, style: str) -> Row:
    """The row with its list of tools in another style."""
    turns = []
    for m in row["messages"]:
        rest, schemas = tool_lists.split_offer(m["content"]) if m["role"] == "system" else ("", [])
        if schemas:
            own = rest.strip()
            parts = [own, tool_lists.tools_prompt(schemas, style)]
            if not m["content"].startswith(own):  # instructions behind the list stay there
                parts.reverse()
            m = m | {"content": "\n\n".join(filter(None, parts))}
        turns.append(m)
    return row | {"messages": turns}


# --- values that training has seen


@dataclass(frozen=True)
class _Call:
    """A call as the count of values compares it: without case, numbers as text."""

    name: str | None
    arguments: Mapping[str, Any]

    @property
    def values(self) -> list[Any]:
        return [part for value in self.arguments.values() for part in parts(value)]

    @property
    def texts(self) -> list[str]:
        return [str(value).lower() for value in self.values]

    @property
    def whole(self) -> str:
        arguments = sorted(
            (key, list(map(str, parts(value)))) for key, value in self.arguments.items()
        )
        return f"{self.name} {arguments}".lower()


def values_seen(files: Files) -> dict[str, dict[str, int]]:
    """Split -> {"calls": problems with a call; "same": those whose call is one of training;
    "seen": those whose every argument value occurs in training; "values": different values but
    numbers of one or two digits; "known": those of them that occur in training}.

    Short numbers, letters and enumerations are shared by all splits, so a request may hold no
    new value. In training: an argument of a call in a conversation, a drill or a problem, or a
    word of a copying drill."""
    calls = [*_problem_calls(files, "train"), *_training_calls(files)]
    whole = {call.whole for call in calls}
    trained: set[str] = set()
    for call in calls:
        trained.update(call.texts)
    for row in files.get("copy.train", ()):
        trained.update(row["messages"][-1]["content"].lower().split())
    found = {}
    for split in ("select", "test", "test_hard"):
        asked = _problem_calls(files, split)
        values: set[str] = set()
        for call in asked:
            values.update(str(value).lower() for value in call.values if not is_shared(value))
        counts = {
            "calls": len(asked),
            "same": sum(call.whole in whole for call in asked),
            "seen": sum(trained.issuperset(call.texts) for call in asked),
            "values": len(values),
            "known": len(values & trained),
        }
        found[split] = counts
        if asked:
            print(
                f"{split}: {counts['calls']} calls, {counts['same']} identical to training calls, "
                f"{counts['seen']} with training values only; {counts['known']} of "
                f"{counts['values']} values (without numbers below 100) occur in training"
            )
    return found


def _problem_calls(files: Files, split: str) -> list[_Call]:
    calls = []
    for row in files.get(f"funcall.{split}", ()):
        golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
        calls += [_Call(gold["name"], gold["arguments"]) for gold in golds if gold]
    return calls


def _training_calls(files: Files) -> Iterator[_Call]:
    """The calls of conversations and drills."""
    for name, rows in files.items():
        if not name.endswith(".train") or "funcall." in name:
            continue
        for message in (
            message for row in rows for message in row["messages"] if message["role"] == "assistant"
        ):
            for call in tool_calls.parse_calls(message["content"]):
                if call.arguments is not None:
                    yield _Call(call.name, call.arguments)


# --- of the toolbox


def _toolbox_files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    """Conversations, drills, and problems of every split by strata."""
    ledger = Ledger("toolbox")
    ledgers.append(ledger)
    draws = _conversation_draws(cfg)
    drawn = processes.on_all_cores(lambda name: list(draws[name]()), list(draws))
    files = {name: list(ledger.counted(rows)) for name, rows in zip(draws, drawn)}
    return files | _toolbox_problems(cfg)


def _conversation_draws(cfg: CallsConfig) -> dict[str, Callable[[], Iterable[Row]]]:
    """DOMAIN.SPLIT -> what draws its rows."""
    mix = cfg.mix
    # training rows, draw(split, n, seed)
    domains: dict[str, tuple[int, Callable[..., Iterable[Row]]]] = {}
    n_train = TOOLBOX_CALLS if cfg.max_examples is None else cfg.max_examples
    domains["calls"] = n_train, partial(dialogues.draw, mix=mix)
    if cfg.copies:
        domains["copy"] = cfg.copies, partial(copy_dialogues, varied=mix.varied_values)
    if cfg.lookups:
        for step in STEPS:
            drill = partial(
                lookup_dialogues, step=step, missing=cfg.lookups_missing, rare_words=mix.rare_words
            )
            domains[f"lookup_{step}"] = cfg.lookups, drill
    return {
        f"{domain}.{split}": partial(
            draw, split, n if split == "train" else cfg.eval_examples, cfg.seed
        )
        for domain, (n, draw) in domains.items()
        for split in SPLITS
    }


def _toolbox_problems(cfg: CallsConfig) -> dict[str, list[Row]]:
    """Only the training problems have the renamed, composed and invented tools of the mix
    beside the trained ones. A mix with described forms adds as many problems of theirs, one with
    turns after several calls as many of those."""
    counts = dict.fromkeys((*SPLITS, "test_hard"), cfg.eval_examples) | {"train": cfg.problems}
    shares = problems.SHARES | {"train": problems.training_shares(cfg.mix)}
    coded = {
        split: round(shares[split]["code"] * n)
        for split, n in counts.items()
        if "code" in shares[split]
    }
    requests = _code_requests({split: max(1, n) for split, n in coded.items()})
    files = {}
    for split, n in counts.items():
        drawn = problems.draw(
            split,
            n,
            cfg.seed,
            shares=shares[split],
            mix=cfg.mix if split == "train" else Mix(),
            code_requests=requests.get(split, ()),
        )
        if cfg.mix.forms:
            added = problems.counts_of(forms.SHARES, n)
            drawn += forms.draw_problems(split, cfg.seed, added)
        if cfg.mix.turns:
            added = problems.counts_of(turns.SHARES, n)
            names = cfg.mix if split == "train" else Mix(forms=cfg.mix.forms)
            drawn += turns.draw_problems(split, cfg.seed, added, names)
        files[f"funcall.{split}"] = [row_of(problem) for problem in drawn]
    random.Random(f"training problems {cfg.seed}").shuffle(files["funcall.train"])
    return files


def _code_requests(counts: Mapping[str, int]) -> dict[str, list[str]]:
    """So many requests for code of each split, from functions of that split."""
    found: dict[str, list[str]] = {split: [] for split in counts}
    for row in synthetic.code_rows(
        sources.embedded_python(Ledger("python files")), Ledger("functions")
    ):
        split = row["meta"]["split"]
        if split in found and len(found[split]) < counts[split]:
            found[split].append(row["messages"][0]["content"])
        if all(len(found[split]) >= n for split, n in counts.items()):
            break
    return found


# --- of files and the hub


def _source_files(cfg: CallsConfig, ledgers: list[Ledger]) -> dict[str, list[Row]]:
    source = CALLS_HUB if cfg.source == "hub" else cfg.source
    origin = CALLS_HUB if cfg.source == "hub" else Path(cfg.source).name
    ledger = Ledger(origin, cfg.max_lost)
    ledgers.append(ledger)
    raw = sources.rows_of(source, cfg.columns)
    tools: list[tool_functions.Schema] = []
    if cfg.tools:
        tools = list(tool_functions.read_tools(cfg.tools, trust=True).schemas.values())  # not run
    rows = public_rows.conversation_rows(raw, origin, ledger, cfg.tools_style, cfg.domain, tools)
    found = list(islice(_short(rows, cfg.max_chars, ledger), cfg.max_examples))
    remedy = "give these rows their tools, or those of a file: --tools FILE.py"
    public_rows.warn_of_calls(found, origin, remedy)
    found += _twins(found, cfg)
    by_split = splits.spread(found, public_rows.split_key)
    files = {f"{cfg.domain}.{split}": rows for split, rows in by_split.items()}
    if cfg.domain != "calls":
        return files
    problem_rows = [public_rows.call_problem(row) for rows in by_split.values() for row in rows]
    for split in SPLITS:
        files[f"funcall.{split}"] = [row for row in problem_rows if row and row["split"] == split]
    return files


def _short(rows: Iterable[Row], most: int | None, ledger: Ledger) -> Iterator[Row]:
    """The rows of at most so many characters: long lists of tools fill a row of training."""
    for row in rows:
        size = sum(len(message["content"]) for message in row["messages"])
        if most is not None and size > most:
            ledger.kept -= 1  # the reader has counted it
            ledger.skip("too_long")
        else:
            yield row


def _twins(rows: list[Row], cfg: CallsConfig) -> list[Row]:
    """Twins of a share of the rows, each with the functions of another row drawn at random."""
    rng = random.Random(f"twins {cfg.seed}")
    twins = []
    for row, other in zip(rows, rng.sample(rows, len(rows))):
        twin = _twin(row, other, cfg.tools_style) if rng.random() < cfg.twins else None
        if twin:
            twins.append(twin)
    return twins


def _twin(row: Row, other: Row, tools_style: str) -> Row | None:
    """The request with functions of another row in place of its own, in a list as long, and an
    answer that declines. None if the row calls nothing, has more than one request, or the other
    row offers only what it calls."""
    if public_rows.answer_at(row["messages"]) != 2:
        return None
    offer, request, answer, *_ = row["messages"]
    called = {call.name for call in tool_calls.parse_calls(answer["content"])}
    system, schemas = tool_lists.split_offer(offer["content"])
    _, others = tool_lists.split_offer(other["messages"][0]["content"])
    offered = {schema["name"]: schema for schema in [*schemas, *others]}
    left = [schema for name, schema in offered.items() if name not in called][: len(schemas)]
    if not called or not left:
        return None
    listed = "\n".join(filter(None, (system.strip(), tool_lists.tools_prompt(left, tools_style))))
    messages = [
        sampler.message("system", listed),
        request,
        sampler.message("assistant", PHRASES["no_function"][0]),
    ]
    return row | {"id": f"{row['id']}-twin", "messages": messages}
