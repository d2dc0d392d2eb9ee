"""Natural requests: 120 fixed prompts as a person types them, answered by checkpoints, scored where a score is possible.

    codechat natural --ckpt nano/sft nano/rl@best
    codechat natural --ckpt nano/rl --temperature 0.5 --seed 1 --run-name natural-warm --out reports/natural

    toolbox     60 requests for trained tools in words that no template has: is the call to the right tool, with the right arguments?
    unfitting   20 requests that none of the offered tools serves: does the answer call nothing?
    code        20 requests for functions: is the answer Python, does it pass hidden tests in the sandbox?
    chat        20 greetings and simple questions: shown, not scored

Calls are compared as in the task `funcall`, programs are judged as in `coding`; a request for code that names no function may be answered under
any name. The run directory gets `natural.jsonl`, a row for each answer, and `natural.md`, tables for people; --out writes copies. Requests that
a checkpoint was trained on are also reported apart.
"""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codechat.core import config
from codechat.core.atomic_files import write_atomic
from codechat.core.config import default, opt
from codechat.core.errors import ConfigError
from codechat.data.synthetic import parsed
from codechat.distributed import dist
from codechat.evaluation import contamination
from codechat.evaluation.evaluate import Sampling, evaluate_split, label
from codechat.evaluation.intervals import wilson_interval
from codechat.evaluation.settings import ScoringSettings
from codechat.models import loading
from codechat.runs.run import Run, find_checkpoint
from codechat.tasks import toolbox
from codechat.tasks.base import Message, Problem, Score
from codechat.tasks.coding import rewards
from codechat.tasks.coding.answer_text import extract
from codechat.tasks.coding.task import CodingTask
from codechat.tasks.funcall import staircase
from codechat.tasks.funcall.task import NO_CALL
from codechat.text import chat

Row = dict[str, Any]
REQUESTS = Path(__file__).with_name("natural_requests.jsonl")
KINDS = ("toolbox", "unfitting", "code", "chat")
SHOWN, SHORTCUT = "shown", "shortcut"
NOT_OFFERED = "calls a name that was not offered"
_DEFINITION = re.compile(r"\bdef\s+(\w+)\s*\(")

VERDICTS = {
    "no_tag": "no call",
    "bad_json": "unreadable call",
    "no_name": "call without a name",
    "name_only": "right tool, wrong arguments",
    "partial": "right tool, some arguments right",
    "full": "right",
    "empty": "no code",
    "unparseable": "not Python",
    "raises": "raises",
    "none_passed": "runs, passes no test",
    "some_passed": "passes some tests",
    "all_passed": "passes all tests",
    SHORTCUT: "passes by what the request excludes",
    SHOWN: "shown",
}
RIGHT_TOOL = ("name_only", "partial", "full")
PARSES = (*rewards.PARSEABLE, SHORTCUT)
SHARES = (  # kind, metric, its words, whether a row counts
    ("toolbox", "right", "tool and arguments right", lambda row: row["correct"]),
    ("toolbox", "right_tool", "right tool", lambda row: row["tier"] in RIGHT_TOOL),
    ("toolbox", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("unfitting", "declined", "declined", lambda row: row["correct"]),
    ("unfitting", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("code", "passed", "passes all hidden tests", lambda row: row["correct"]),
    ("code", "parses", "Python that parses", lambda row: row["tier"] in PARSES),
)
STRATA = {"": "", "new": ", not trained on", "trained": ", trained on"}


# ---- the task


def read_requests(path: Path = REQUESTS, tools_style: str = "compact") -> list[Problem]:
    """The requests in the order of the file. meta: kind, tools (names on offer), trained (marked as trained on)."""
    return [_problem(json.loads(line), tools_style) for line in path.read_text(encoding="utf-8").splitlines()]


def _problem(row: Row, tools_style: str) -> Problem:
    gold, messages = row["expected"], row["messages"]
    if row["tools"]:
        offer = chat.tools_prompt([toolbox.TOOLS[name].schema for name in row["tools"]], tools_style)
        messages = [{"role": "system", "content": offer}, *messages]
    if row["kind"] == "code":
        gold = gold | {"names": [gold["function"]]}
    meta = {"kind": row["kind"], "tools": row["tools"], "trained": row.get("trained", False)}
    return Problem(row["id"], messages, gold, "test", meta)


class NaturalTask:
    """The requests as a task. tiers: those of `funcall`, those of `coding`, shortcut (tests pass by a name that the request excludes), shown."""

    name = "natural"
    tiers = (*staircase.TIERS, *rewards.TIERS, SHORTCUT, SHOWN)
    max_reward = 1.0

    def __init__(self, isolation: str = "auto", tools_style: str = "compact") -> None:
        self.tools_style = tools_style
        self.coding = CodingTask(self.name, [], isolation=isolation)

    def problems(self, split: str = "test", limit: int | None = None, seed: int = 0) -> list[Problem]:
        return read_requests(tools_style=self.tools_style)[:limit]

    def prompt(self, problem: Problem) -> list[Message]:
        return problem.messages

    def gold(self, problem: Problem) -> str:
        """The expected call, or the function that the hidden tests call."""
        if problem.meta["kind"] == "toolbox":
            return chat.format_call(problem.gold["name"], problem.gold["arguments"])
        return {"unfitting": NO_CALL, "code": (problem.gold or {}).get("function", "")}.get(problem.meta["kind"], "")

    def score(self, problem: Problem, completion: str) -> Score:
        return next(self.scores([(problem, completion)]))

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs; programs are judged in parallel."""
        programs = [(p, as_requested(text, p.gold)) for p, text in pairs if p.meta["kind"] == "code"]
        judged = iter([_without_shortcut(s, *pair) for s, pair in zip(self.coding.scores(programs), programs)])
        for problem, text in pairs:
            kind = problem.meta["kind"]
            if kind == "chat":
                yield Score(0.0, SHOWN, {}, False)
            else:
                yield next(judged) if kind == "code" else staircase.score_call(text, problem.gold)


def as_requested(answer: str, gold: Mapping[str, Any]) -> str:
    """The answer; where the request names no function, its program with the expected name for the function that it defines."""
    if gold["named"]:
        return answer
    code, function = extract(answer), gold["function"]
    tree = parsed(code)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    alike = [name for name in names if _plain(function) in _plain(name)]
    name = (alike or names or [function])[-1]
    return code if name == function else f"{code}\n\n{function} = {name}"


def _plain(name: str) -> str:
    """quick_sort and quickSort are the same function."""
    return name.lower().replace("_", "")


def _without_shortcut(score: Score, problem: Problem, code: str) -> Score:
    if score.correct and _used(extract(code, problem.gold["names"])) & set(problem.gold.get("without", ())):
        return replace(score, reward=0.0, tier=SHORTCUT, correct=False)
    return score


def _used(code: str) -> set[str]:
    """Names, attributes and modules that a program uses and does not define itself."""
    used, defined = set(), set()
    for node in ast.walk(parsed(code) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used |= {alias.name for alias in node.names} | {getattr(node, "module", None)}
        elif isinstance(node, ast.Name | ast.Attribute):
            used.add(node.id if isinstance(node, ast.Name) else node.attr)
    return used - defined


def find_trained(problems: Sequence[Problem], texts: Iterable[tuple[str, bool]]) -> dict[str, tuple[str, ...]]:
    """Request id -> how it was found in training texts, (text, whether it is a whole message) each: prompt as in `contamination`; function where a
    text defines a function of the expected name."""
    defined: set[str] = set()

    def watched() -> Iterator[tuple[str, bool]]:
        for text, whole in texts:
            defined.update(map(_plain, _DEFINITION.findall(text)))
            yield text, whole

    how = dict(contamination.search(problems, watched()))
    for problem in problems:
        if problem.meta["kind"] == "code" and _plain(problem.gold["function"]) in defined:
            how[problem.id] = (*how.get(problem.id, ()), "function")
    return how


# ---- rows and tables


def verdict(problem: Problem, tier: str, answer: str) -> str:
    """The tier in words. A call to another tool says whether that tool was offered."""
    if tier == "full" and problem.meta["kind"] == "unfitting":
        return "declined"
    if tier != "wrong_name":
        return VERDICTS[tier]
    name = chat.parse_calls(answer)[0].name
    if name is None:
        return "unreadable call"
    return "calls another offered tool" if name.strip() in problem.meta["tools"] else NOT_OFFERED


def answer_rows(
    problems: Sequence[Problem], examples: Sequence[Row], trained: Mapping[str, Sequence[str]]
) -> list[Row]:
    """A row for each answer of an evaluation. trained: the result of `find_trained`."""
    rows = []
    for problem, example in zip(problems, examples, strict=True):
        answer, tier, kind = example["completion"], example["tier"], problem.meta["kind"]
        row = dict(id=problem.id, kind=kind, trained=problem.meta["trained"] or problem.id in trained)
        row |= dict(found=list(trained.get(problem.id, ())), request=example["request"], tools=problem.meta["tools"])
        row |= dict(expected=example["gold"], answer=answer, stop=example["stop"])
        row |= dict(tier=tier, verdict=verdict(problem, tier, answer), correct=example["correct"])
        rows.append(row | ({k: example["parts"][k] for k in ("passed", "tests")} if kind == "code" else {}))
    return rows


def summarize(rows: Sequence[Row]) -> list[Row]:
    """(kind, stratum, words, metric, n, count) of each share. stratum: "" = all rows of the kind; where some were trained on, also new and trained."""
    shares = []
    for kind, metric, words, counts in SHARES:
        all_rows = [row for row in rows if row["kind"] == kind]
        trained = [row for row in all_rows if row["trained"]]
        strata = {"": all_rows, "new": [row for row in all_rows if not row["trained"]], "trained": trained}
        for stratum, some in strata.items():
            if some and (trained or not stratum):
                share = dict(kind=kind, stratum=stratum, words=words, metric=metric)
                shares.append(share | dict(n=len(some), count=sum(map(counts, some))))
    return shares


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Each share with its interval, natural/KIND[_STRATUM]/METRIC, and the n of each."""
    row: dict[str, float] = {}
    for share in summarize(rows):
        name = f"natural/{'_'.join(filter(None, (share['kind'], share['stratum'])))}"
        interval = wilson_interval(share["count"], share["n"])
        row |= interval.row(f"{name}/{share['metric']}") | {f"{name}/n": share["n"]}
    return row


def summary_lines(answers: Mapping[str, Sequence[Row]]) -> list[str]:
    """A Markdown table: a share a line, a checkpoint a column. answers: checkpoint -> rows."""
    cells: dict[str, dict[str, str]] = {}
    for checkpoint, rows in answers.items():
        for share in summarize(rows):
            title = f"{share['kind']}{STRATA[share['stratum']]}: {share['words']}"
            shown = f"{share['count']} of {share['n']}, {wilson_interval(share['count'], share['n'])}"
            cells.setdefault(title, {})[checkpoint] = shown
    lines = [[title, *(by.get(checkpoint, "") for checkpoint in answers)] for title, by in cells.items()]
    return _table(["requests", *answers], lines)


def markdown(answers: Mapping[str, Sequence[Row]], how: str) -> str:
    """Tables for people: the shares, then each request with the answers. how: the sampling settings in words."""
    parts = [f"# Natural requests\n\n{how}", "\n".join(summary_lines(answers))]
    for kind in KINDS:
        lines = []
        for same in zip(*answers.values(), strict=True):  # the rows of one request
            if (row := same[0])["kind"] == kind:
                shown = [f"{_as_code(r['answer'])}<br>**{r['verdict']}{', trained on' * r['trained']}**" for r in same]
                about = [row["id"], _escape(row["request"]), ", ".join(row["tools"]), _as_code(row["expected"])]
                lines.append([*about, *shown])
        parts += [f"## {kind}", "\n".join(_table(["id", "request", "tools on offer", "expected", *answers], lines))]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def _escape(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")


def _as_code(text: str) -> str:
    """Blanks that begin a line stay, so that Python stays readable."""
    return f"<code>{_escape(text).replace('  ', '&nbsp; ')}</code>" if text else ""


# ---- the command


@dataclass(frozen=True, kw_only=True)
class NaturalConfig(ScoringSettings):
    """Which checkpoints answer, and how they are sampled."""

    run_name: str = default("natural")
    ckpt: tuple[str, ...] = opt(
        config.REQUIRED, "checkpoints: run name, run@best, run@STEP, run directory or checkpoint"
    )
    out: Path | None = opt(
        None, "directory for copies of natural.jsonl and natural.md; none = only the run", identity=False
    )
    temperature: float = default(0.0)
    max_new_tokens: int = default(240)
    constrain: bool = opt(False, "hold calls to the schemas of the offered functions, as `codechat tools` does")

    @property
    def sampling(self) -> dict[str, Any]:
        """For rows."""
        return {"temperature": self.temperature, **({"constrained": True} if self.constrain else {})}


def run_natural(cfg: NaturalConfig) -> Run:
    """Answer every request with every checkpoint: a row of eval.jsonl each, natural.jsonl and natural.md."""
    paths = {label(path): path for path in map(find_checkpoint, cfg.ckpt)}
    if len(paths) < len(cfg.ckpt) or not paths:
        raise ConfigError(f"--ckpt {' '.join(cfg.ckpt)} names {', '.join(paths)}; give at least one, each once")
    run = Run.create(cfg.run_name, cfg, kind="natural", parent=cfg.ckpt[0], overwrite=cfg.overwrite)
    with dist.session() as world, run:
        answers = {name: _answer(cfg, run, name, path, world) for name, path in paths.items()}
        if world.is_main:
            print(*summary_lines(answers), sep="\n")
            _write(answers, cfg, run.path)
        run.finish({name: metrics(rows) for name, rows in answers.items()})
    return run


def _answer(cfg: NaturalConfig, run: Run, name: str, path: Path, world: dist.World) -> list[Row]:
    """The rows of one checkpoint, logged."""
    loaded = loading.load_model(path, device=world.device)
    task = NaturalTask(tools_style=loaded.tools_style)
    problems, trained = task.problems(), {}
    if cfg.contamination:
        texts = contamination.Texts(loaded.meta.get("lineage", ()))
        trained = find_trained(problems, texts)
        if world.is_main:
            print(contamination.Report(len(problems), trained, tuple(texts.read), tuple(texts.missing)))
    sampling = Sampling(cfg.temperature, 1, (1,), constrained=cfg.constrain)
    result = evaluate_split(cfg, loaded, task, problems, "natural requests", sampling)
    rows = answer_rows(problems, result.examples, trained)
    run.log_eval(int(loaded.meta["step"]), dict(metrics(rows), checkpoint=name, split="natural", **cfg.sampling))
    return rows


def _write(answers: Mapping[str, Sequence[Row]], cfg: NaturalConfig, run_path: Path) -> None:
    rows = [dict(checkpoint=name, **cfg.sampling) | row for name, some in answers.items() for row in some]
    more = (f", top_k {cfg.top_k}" if cfg.top_k else "") + (", calls constrained" if cfg.constrain else "")
    how = f"Temperature {cfg.temperature:g}{more}, at most {cfg.max_new_tokens} tokens, seed {cfg.seed}. Shares with 95 % Wilson intervals."
    for folder in filter(None, (run_path, cfg.out)):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "natural.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        write_atomic(folder / "natural.md", markdown(answers, how))


def main(argv: list[str] | None = None) -> None:
    """`codechat natural`."""
    words = sys.argv[1:] if argv is None else argv
    run_natural(config.parse(NaturalConfig, words, prog="codechat natural", epilog=__doc__))
