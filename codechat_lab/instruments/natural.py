"""Checkpoints answer the task `natural`: 120 fixed prompts as people type them.

    codechat natural --ckpt released/nano released/mini
    codechat natural --ckpt released/nano --temperature 0.5 --seed 1 --run-name natural-warm

This is `evaluate` on that task, greedy; the run directory also gets `natural.jsonl`, a row per
answer, and tables, `natural.md`. Requests that a checkpoint was trained on are also reported
separately."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.atomic_files import json_lines, write_atomic
from codechat.distributed import dist
from codechat.evaluation.evaluate import run_evaluation
from codechat.evaluation.intervals import Interval, wilson_interval
from codechat.evaluation.results import TaskResult
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat.text import tool_calls
from codechat_lab.instruments.markdown import table_lines
from codechat_lab.instruments.natural_settings import NaturalConfig
from codechat_lab.tasks.coding.rewards import PARSEABLE
from codechat_lab.tasks.natural import KINDS, SHORTCUT

Row = dict[str, Any]
NOT_OFFERED = "calls a name that was not offered"
# tier -> its words
VERDICTS = json.loads(Path(__file__).with_name("natural_verdicts.json").read_text("utf-8"))
SHARES = (  # kind, metric, its words, whether a row counts
    ("toolbox", "right", "tool and arguments right", lambda row: row["correct"]),
    (
        "toolbox",
        "right_tool",
        "right tool",
        lambda row: row["tier"] in ("name_only", "partial", "full"),
    ),
    ("toolbox", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("unfitting", "declined", "declined", lambda row: row["correct"]),
    ("unfitting", "not_offered", NOT_OFFERED, lambda row: row["verdict"] == NOT_OFFERED),
    ("code", "passed", "passes all hidden tests", lambda row: row["correct"]),
    ("code", "parses", "Python that parses", lambda row: row["tier"] in (*PARSEABLE, SHORTCUT)),
)


def verdict(problem: Problem, tier: str, answer: str) -> str:
    """The tier in words. A call to another tool says whether that tool was offered."""
    if tier == "full" and problem.meta["kind"] == "unfitting":
        return "declined"
    if tier != "wrong_name":
        return VERDICTS[tier]
    name = tool_calls.parse_calls(answer)[0].name
    if name is None:
        return "unreadable call"
    return "calls another offered tool" if name.strip() in problem.meta["tools"] else NOT_OFFERED


class Share(NamedTuple):
    """The share of n requests that a metric counts; words: the metric for people."""

    metric: str
    words: str
    n: int
    interval: Interval


def summarize(rows: Sequence[Row]) -> Iterator[Share]:
    """Each share; also of the rows that were trained on, and of the others, if a kind has both."""
    for kind, metric, words, counts in SHARES:
        of_kind = [row for row in rows if row["kind"] == kind]
        trained = [row for row in of_kind if row["trained"]]
        strata = [("", "", of_kind)]  # suffix of the metric, words, rows
        if trained:
            new = [row for row in of_kind if not row["trained"]]
            strata.append(("_new", ", not trained on", new))
            strata.append(("_trained", ", trained on", trained))
        for suffix, which, some in strata:
            if some:
                n = len(some)
                interval = wilson_interval(sum(map(counts, some)), n)
                name = f"natural/{kind}{suffix}/{metric}"
                yield Share(name, f"{kind}{which}: {words}", n, interval)


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Each share with its interval, natural/KIND[_STRATUM]/METRIC, and the n of each."""
    row: dict[str, float] = {}
    for share in summarize(rows):
        row |= share.interval.row(share.metric)
        row[f"{share.metric.rpartition('/')[0]}/n"] = share.n
    return row


def summary_lines(answers: Mapping[str, Sequence[Row]]) -> list[str]:
    """A Markdown table: a share a line, a checkpoint a column. answers: checkpoint -> rows."""
    cells: dict[str, dict[str, str]] = {}
    for checkpoint, rows in answers.items():
        for share in summarize(rows):
            count = round(share.interval.value * share.n)
            cell = f"{count} of {share.n}, {share.interval}"
            cells.setdefault(share.words, {})[checkpoint] = cell
    lines = []
    for title, by_checkpoint in cells.items():
        lines.append([title, *(by_checkpoint.get(checkpoint, "") for checkpoint in answers)])
    return table_lines(["requests", *answers], lines)


def markdown(answers: Mapping[str, Sequence[Row]], how: str) -> str:
    """Tables for people: the shares, then each request with the answers. how: the sampling
    settings in words."""
    parts = [f"# Natural requests\n\n{how}", "\n".join(summary_lines(answers))]
    for kind in KINDS:
        lines = []
        for same in zip(*answers.values(), strict=True):  # the rows of one request
            row = same[0]
            if row["kind"] == kind:
                about = [
                    row["id"],
                    _escape(row["request"]),
                    ", ".join(row["tools"]),
                    _as_code(row["expected"]),
                ]
                lines.append([*about, *map(_judged, same)])
        parts += [
            f"## {kind}",
            "\n".join(
                table_lines(["id", "request", "tools on offer", "expected", *answers], lines)
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _judged(row: Row) -> str:
    trained = ", trained on" if row["trained"] else ""
    return f"{_as_code(row['answer'])}<br>**{row['verdict']}{trained}**"


def _escape(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", "<br>")


def _as_code(text: str) -> str:
    """Blanks that begin a line stay, so that Python stays readable."""
    return f"<code>{_escape(text).replace('  ', '&nbsp; ')}</code>" if text else ""


def _answer_row(problem: Problem, example: Row, exposed: Mapping[str, Any]) -> Row:
    """A row of natural.jsonl. exposed: problem -> where the checkpoint was trained on it."""
    row = {
        "id": problem.id,
        "kind": problem.meta["kind"],
        "trained": problem.meta["trained"] or problem.id in exposed,
        "found": list(exposed.get(problem.id, ())),
        "tools": problem.meta["tools"],
        "expected": example["gold"],
        "answer": example["completion"],
        "verdict": verdict(problem, example["tier"], example["completion"]),
    }
    row |= {key: example[key] for key in ("request", "stop", "tier", "correct")}
    if problem.meta["kind"] == "code":
        row |= {key: example["parts"][key] for key in ("passed", "tests")}
    return row


def run_natural(cfg: NaturalConfig) -> Run:
    """The evaluation with natural.jsonl and natural.md."""
    answers: dict[str, list[Row]] = {}
    top = f", top_k {cfg.top_k}" if cfg.top_k else ""
    how = (
        f"Temperature {cfg.temperature:g}{top}, at most {cfg.max_new_tokens} "
        f"tokens, seed {cfg.seed}."
    )

    def judge(
        run: Run,
        result: TaskResult,
        which: Mapping[str, str],
        exposed: Mapping[str, Any],
    ) -> dict[str, float]:
        name = which["checkpoint"]
        answers[name] = []
        for problem, example in zip(result.problems, result.examples, strict=True):
            answers[name].append(_answer_row(problem, example, exposed))
        if dist.is_main():
            print(*summary_lines({name: answers[name]}), sep="\n")
            rows = [
                {"checkpoint": name, "temperature": cfg.temperature} | row
                for name in answers
                for row in answers[name]
            ]
            write_atomic(run.path / "natural.jsonl", json_lines(rows))
            write_atomic(
                run.path / "natural.md",
                markdown(answers, f"{how} Shares with 95 % Wilson intervals."),
            )
        return metrics(answers[name])

    return run_evaluation(cfg, "natural", judge)
