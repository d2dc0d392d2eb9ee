"""Tables of the task `natural`: 120 fixed prompts as a person types them, answered by checkpoints.

    codechat natural --ckpt nano/sft nano/rl@best
    codechat natural --ckpt nano/rl --temperature 0.5 --seed 1 --run-name natural-warm --out reports/natural

The run directory gets `natural.jsonl`, a row for each answer, and `natural.md`, tables for people; --out writes copies. Requests that a checkpoint
was trained on are also reported apart.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import write_atomic
from codechat.core.command import parse_and_run
from codechat.core.config import opt
from codechat.core.errors import ConfigError
from codechat.distributed import dist
from codechat.evaluation import contamination
from codechat.evaluation.evaluate import Sampling, ScoringSettings, evaluate_split, label
from codechat.evaluation.intervals import wilson_interval
from codechat.models import loading
from codechat.runs.run import Run, find_checkpoint
from codechat.tasks.base import Problem
from codechat.tasks.coding.rewards import PARSEABLE
from codechat.tasks.natural import KINDS, SHORTCUT, SHOWN, NaturalTask, same_name
from codechat.text import chat

Row = dict[str, Any]
NOT_OFFERED = "calls a name that was not offered"
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
SHARES = (  # kind, metric, its words, whether a row counts
    ("toolbox", "right", "tool and arguments right", lambda row: row["correct"]),
    ("toolbox", "right_tool", "right tool", lambda row: row["tier"] in ("name_only", "partial", "full")),
    ("toolbox", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("unfitting", "declined", "declined", lambda row: row["correct"]),
    ("unfitting", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("code", "passed", "passes all hidden tests", lambda row: row["correct"]),
    ("code", "parses", "Python that parses", lambda row: row["tier"] in (*PARSEABLE, SHORTCUT)),
)
STRATA = {"": "", "new": ", not trained on", "trained": ", trained on"}


def find_trained(problems: Sequence[Problem], texts: Iterable[tuple[str, bool]]) -> dict[str, tuple[str, ...]]:
    """Request id -> how it was found in training texts, (text, whether it is a whole message) each: prompt as in `contamination`; function where a
    text defines a function of the expected name."""
    defined: set[str] = set()

    def watched() -> Iterator[tuple[str, bool]]:
        for text, whole in texts:
            defined.update(map(same_name, re.findall(r"\bdef\s+(\w+)\s*\(", text)))
            yield text, whole

    how = dict(contamination.search(problems, watched()))
    for problem in problems:
        if problem.meta["kind"] == "code" and same_name(problem.gold["function"]) in defined:
            how[problem.id] = (*how.get(problem.id, ()), "function")
    return how


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


def summarize(rows: Sequence[Row]) -> Iterator[tuple[str, str, int, int]]:
    """(metric, its words, count, n) of each share; where some rows of a kind were trained on, also of those and of the others."""
    for kind, metric, words, counts in SHARES:
        of_kind = [row for row in rows if row["kind"] == kind]
        trained = [row for row in of_kind if row["trained"]]
        strata = {"": of_kind, "new": [row for row in of_kind if not row["trained"]], "trained": trained}
        for stratum, some in strata.items():
            if some and (trained or not stratum):
                name = f"natural/{kind}{stratum and '_'}{stratum}/{metric}"
                yield name, f"{kind}{STRATA[stratum]}: {words}", sum(map(counts, some)), len(some)


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Each share with its interval, natural/KIND[_STRATUM]/METRIC, and the n of each."""
    row: dict[str, float] = {}
    for name, _, count, n in summarize(rows):
        row |= wilson_interval(count, n).row(name) | {f"{name.rpartition('/')[0]}/n": n}
    return row


def summary_lines(answers: Mapping[str, Sequence[Row]]) -> list[str]:
    """A Markdown table: a share a line, a checkpoint a column. answers: checkpoint -> rows."""
    cells: dict[str, dict[str, str]] = {}
    for checkpoint, rows in answers.items():
        for _, words, count, n in summarize(rows):
            cells.setdefault(words, {})[checkpoint] = f"{count} of {n}, {wilson_interval(count, n)}"
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


@dataclass(frozen=True, kw_only=True)
class NaturalConfig(ScoringSettings):
    """Which checkpoints answer, and how they are sampled."""

    run_name: str = "natural"
    out: Path | None = opt(
        None, "directory for copies of natural.jsonl and natural.md; none = only the run", identity=False
    )
    temperature: float = 0.0
    max_new_tokens: int = 240
    constrain: bool = opt(False, "hold calls to the schemas of the offered functions, as `codechat tools` does")


def run_natural(cfg: NaturalConfig) -> Run:
    """Answer every request with every checkpoint: a row of eval.jsonl each, natural.jsonl and natural.md."""
    paths = {label(path): path for path in map(find_checkpoint, cfg.ckpt)}
    if len(paths) < len(cfg.ckpt) or not paths:
        raise ConfigError(f"--ckpt {' '.join(cfg.ckpt)} names {', '.join(paths)}; give at least one, each once")
    run = Run.create(cfg.run_name, cfg, kind="natural", parent=cfg.ckpt[0], overwrite=cfg.overwrite)
    how = {"temperature": cfg.temperature, **({"constrained": True} if cfg.constrain else {})}
    with dist.session() as world, run:
        answers = {}
        for name, path in paths.items():
            step, answers[name] = _answer(cfg, path)
            run.log_eval(step, dict(metrics(answers[name]), checkpoint=name, split="natural", **how))
        if world.is_main:
            print(*summary_lines(answers), sep="\n")
            more = (f", top_k {cfg.top_k}" if cfg.top_k else "") + (", calls constrained" if cfg.constrain else "")
            words = f"Temperature {cfg.temperature:g}{more}, at most {cfg.max_new_tokens} tokens, seed {cfg.seed}."
            rows = [dict(checkpoint=name, **how) | row for name, some in answers.items() for row in some]
            for folder in filter(None, (run.path, cfg.out)):
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / "natural.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
                text = markdown(answers, f"{words} Shares with 95 % Wilson intervals.")
                write_atomic(folder / "natural.md", text)
        run.finish({name: metrics(rows) for name, rows in answers.items()})
    return run


def _answer(cfg: NaturalConfig, path: Path) -> tuple[int, list[Row]]:
    """(step, rows) of one checkpoint."""
    loaded = loading.load_model(path, device=dist.device())
    task = NaturalTask(tools_style=loaded.tools_style)
    problems, trained = task.problems(), {}
    if cfg.contamination:
        texts = contamination.Texts(loaded.meta.get("lineage", ()))
        trained = find_trained(problems, texts)
        if dist.is_main():
            print(contamination.Report(len(problems), trained, tuple(texts.read), tuple(texts.missing)))
    sampling = Sampling(cfg.temperature, 1, (1,), constrained=cfg.constrain)
    result = evaluate_split(cfg, loaded, task, problems, "natural requests", sampling)
    return int(loaded.meta["step"]), answer_rows(problems, result.examples, trained)


main = partial(parse_and_run, NaturalConfig, run_natural, "natural", __doc__)
