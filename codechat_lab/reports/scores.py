"""`codechat scores`: evaluations side by side, a checkpoint a column.

    codechat scores coder/before-humaneval coder/after-humaneval --out runs/coder/report

Tables of Markdown: pass@1 by stratum with 95 % intervals, what later checkpoints gain over the
first one on the same problems (paired), how calls are written, how long completions are. The
runs are those of `evaluate`, `passk` and `natural`, whose rows it reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.errors import ConfigError, DataError
from codechat.evaluation.results import paired_difference
from codechat.runs.run import Run
from codechat_lab.instruments.markdown import table_lines, with_interval
from codechat_lab.reports.settings import ScoresConfig

Row = dict[str, Any]
FILE = "scores.md"
SCORE = "pass@1"
SURFACE = "surface/"
NATURAL = "natural/"


@dataclass
class Table:
    """A cell for each line and checkpoint. lines: name -> checkpoint -> text."""

    title: str
    lines: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, line: str, checkpoint: str, text: str) -> None:
        self.lines.setdefault(line, {})[checkpoint] = text

    def markdown(self, checkpoints: Sequence[str]) -> list[str]:
        """The lines of the table; none where it is empty."""
        if not self.lines:
            return []
        rows = []
        for name, cells in self.lines.items():
            rows.append([name, *(cells.get(checkpoint, "") for checkpoint in checkpoints)])
        return [f"## {self.title}", "", *table_lines(["", *checkpoints], rows), ""]


def write_scores(cfg: ScoresConfig) -> None:
    """Print the tables; with `out` also write OUT/scores.md."""
    runs = [Run.open(ref) for ref in cfg.runs]
    text = "\n".join([*tables(runs), *(f"{note}\n" for note in cfg.notes)])
    print(text)
    if cfg.out:
        out = Path(cfg.out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / FILE, f"# {cfg.title}\n\n{text}\n")
        print(out / FILE)


def tables(runs: Sequence[Run]) -> list[str]:
    """The lines of all tables. ConfigError for a run that evaluated nothing."""
    scores = Table("Right, with 95 % intervals")
    surfaces = Table("How calls are written: share of completions")
    lengths = Table("Tokens of a completion, and the share that was cut off")
    checkpoints: dict[str, None] = {}
    for run in runs:
        rows = list(read_rows(run.path / "eval.jsonl"))
        if not rows or "checkpoint" not in rows[0]:
            raise ConfigError(
                f"run {run.name} is of kind {run.status.get('kind')}; expected one of evaluate, "
                "passk or natural"
            )
        for row in rows:
            checkpoint = row["checkpoint"]
            checkpoints.setdefault(checkpoint)
            for line, cell in _scores(row):
                scores.put(line, checkpoint, cell)
            forms = [
                f"{name.removeprefix(SURFACE).replace('_', ' ')} {share:.2f}"
                for name, share in row.items()
                if name.startswith(SURFACE)
            ]
            if forms:
                surfaces.put(_benchmark(row), checkpoint, ", ".join(forms))
            mean = row["completion_tokens_mean"]
            lengths.put(_benchmark(row), checkpoint, f"{mean:.0f}, {row['truncated_frac']:.2f}")
    gains = _gains(runs)
    shown = (scores, gains, surfaces, lengths)
    return [line for table in shown for line in table.markdown(list(checkpoints))]


def _benchmark(row: Row) -> str:
    """Task, split and sampling in words; test and greedy go without saying."""
    said = [row["task"], row["split"], row["sampling"]]
    return ", ".join(word for word in said if word not in ("test", "greedy"))


def _scores(row: Row) -> Iterator[tuple[str, str]]:
    """(line, cell) of each score of an evaluation: of its strata where it has some, which are
    not added up."""
    benchmark = _benchmark(row)
    in_strata = "mean_of_groups" in row or any(name.startswith(NATURAL) for name in row)
    for name in row:
        line = ""
        if name.startswith(NATURAL) and f"{name}/lo" in row:
            _, kind, what = name.split("/")
            n = row[f"{NATURAL}{kind}/n"]
            line = f"{benchmark}: {kind}, {what.replace('_', ' ')} (N={n})"
        elif name == SCORE and not in_strata:
            line = f"{benchmark} (N={row['n_problems']})"
        elif name.endswith(f"/{SCORE}"):
            stratum = name.removesuffix(f"/{SCORE}")
            n = row.get(f"{stratum}/n")
            line = f"{benchmark}: {stratum}" + ("" if n is None else f" (N={n})")
        if line:
            yield line, with_interval(row, name)


def _gains(runs: Sequence[Run]) -> Table:
    """Later checkpoints minus the first one of each benchmark, paired by problem."""
    solved: dict[str, dict[str, list[Row]]] = {}  # benchmark -> checkpoint -> rows
    for run in runs:
        for row in read_rows(run.path / "per_problem.jsonl"):
            of_benchmark = solved.setdefault(_benchmark({"task": run.config["task"], **row}), {})
            of_benchmark.setdefault(row["checkpoint"], []).append(row)
    table = Table("Gained over the first checkpoint, paired by problem, in points")
    for benchmark, by_checkpoint in solved.items():
        first, *others = by_checkpoint
        for checkpoint in others:
            try:
                gain = paired_difference(by_checkpoint[first], by_checkpoint[checkpoint])
            except DataError:
                table.put(benchmark, checkpoint, "other problems")
                continue
            points = [f"{100 * value:+.1f}" for value in gain]
            table.put(benchmark, checkpoint, f"{points[0]} [{points[1]}, {points[2]}]")
    return table
