"""Reports: finished runs -> DataFrames -> figures -> one executed notebook and its web page.

    codechat report                            the reports there are
    codechat report nano staircase             reports/NAME.{ipynb,html} and reports/NAME/data of each
    codechat report staircase --frozen         the same from the committed rows, without any run
    codechat report nano --out runs/nano/report    somewhere else (the recipe does so, to leave the repository as it was)

A report is a template `nbs_py/9x_NAME.py` executed with the parameters of `reports/NAME.yaml`. It reads run directories and nothing else,
refuses those that `admission` names, and draws from the rows that it froze, so that anyone can draw the same from committed bytes: where
none of its runs is on this machine it does so by itself. `reports/index.html` (not committed) shows every report on this machine.

What others published stands in reports/published, is drawn in a style of its own, and never enters a column of measured figures.

Left out: training. A report that lacks a run says so.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from papermill.iorw import read_yaml_file

from codechat.core import config, errors
from codechat.core.atomic_files import read_rows, write_atomic
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile, RunError
from codechat.reports import html, notebooks, run_checks
from codechat.runs import paths
from codechat.runs.run import Run

Frames = dict[str, pd.DataFrame]

MAX_BYTES = 1_000_000
NUMBERS = "headline.json"  # beside the frozen rows
SAMPLES_PER_RUN = 40
TABLES = ("runs", "metrics", "evals")  # frozen as csv; the others hold text and counts, frozen as jsonl


# ---------------------------------------------------------------- runs -> frames


def collect(runs: Sequence[str | Path]) -> Frames:
    """Frames of runs, each with a column `run`: runs, metrics, evals, per_problem, samples.

    Raises MissingFile for a run that is not there and RunError for what `admission` refuses."""
    opened = [Run.open(ref) for ref in runs]
    run_checks.admit(opened)
    return {
        "runs": pd.DataFrame([_describe(run) for run in opened]),
        "metrics": _stack((run, run.metrics()) for run in opened),
        "evals": _stack((run, run.evals()) for run in opened),
        "per_problem": _stack((run, pd.DataFrame(read_rows(run.path / "per_problem.jsonl"))) for run in opened),
        "samples": _stack((run, pd.DataFrame(_spread(run.samples(), SAMPLES_PER_RUN))) for run in opened),
    }


def _describe(run: Run) -> dict[str, Any]:
    status, env = run.status, run.env
    seconds = (pd.Timestamp(status["ended"]) - pd.Timestamp(status["started"])).total_seconds()
    origin = env.get("parent") or {}
    return {
        "run": run.name,
        "kind": status["kind"],
        "parent": origin.get("run"),
        "seconds": seconds,
        "started": status["started"],
        "commit": str(env.get("commit", "unknown"))[:9],
        "dirty": bool(env.get("dirty")),
        "config_hash": env.get("config_hash"),
        "config": json.dumps(run.config),
        "summary": json.dumps(status.get("summary") or {}),
    }


def _stack(parts: Iterable[tuple[Run, pd.DataFrame]]) -> pd.DataFrame:
    """One frame under the other with the run's name in front; the clock is left out: it says nothing and
    would differ in every copy."""
    frames = [f.drop(columns="time", errors="ignore").assign(run=run.name) for run, f in parts if len(f)]
    if not frames:
        return pd.DataFrame({"run": pd.Series(dtype=str)})
    whole = pd.concat(frames, ignore_index=True)
    return whole[["run", *(c for c in whole if c != "run")]]


def gather(
    runs: Sequence[str],
    data: Path | str,
    frozen: bool = False,
    drop: Mapping[str, Sequence[str]] | None = None,
    keep: Mapping[str, str] | None = None,
    more: Callable[[], Frames] | None = None,
) -> Frames:
    """The frames that a report draws from: of its runs, frozen into `data`; or, with `frozen` or where this machine has none of the runs, those
    that lie there already. drop: columns of tables that no figure asks for; keep: a pandas query on a table's rows, "" = none of them; more:
    makes frames that no run holds, frozen with the rest. Raises what `collect` and `freeze` raise, and MissingFile where there is neither."""
    here = [run for run in runs if paths.exists(run)]
    if frozen or (not here and (Path(data) / "runs.csv").is_file()):
        frames = load_frozen(data)
        print(f"drawn from the frozen rows{'' if frozen else ': none of the runs is on this machine'}")
        return frames
    frames = collect(runs) | (more() if more else {})
    for table, query in (keep or {}).items():
        frames[table] = frames[table].query(query) if query and len(frames[table]) else frames[table][:0]
    for table, columns in (drop or {}).items():
        frames[table] = frames[table].drop(columns=list(columns), errors="ignore")
    (Path(data) / NUMBERS).unlink(missing_ok=True)
    return freeze(frames, data)


def headline(numbers: Mapping[str, float], data: Path | str) -> None:
    """Keep the numbers that a report prints beside the rows they come from; where they were kept before, RunError unless each is the same to four
    digits. A report that is drawn from frozen rows so asserts its headline; one drawn from runs keeps a new one."""
    path, found = Path(data) / NUMBERS, {name: float(f"{value:.4g}") for name, value in numbers.items()}
    if not path.is_file():
        return write_atomic(path, json.dumps(found, indent=1) + "\n")
    kept = json.loads(path.read_text())
    if lost := [
        f"{name} is {found.get(name)} and was {kept.get(name)}"
        for name in kept | found
        if kept.get(name) != found.get(name)
    ]:
        raise RunError(
            f"the headline does not follow from the rows in {data}: {'; '.join(lost)}; build the report from its runs again"
        )


def rows_of(frame: pd.DataFrame, run: str) -> pd.DataFrame:
    """The rows of one run, without columns that it does not have; MissingFile where there are none."""
    rows = frame[frame["run"] == run]
    if rows.empty:
        raise MissingFile(f"no rows of run {run}; there are rows of {', '.join(frame['run'].unique()) or 'no run'}")
    return rows.dropna(axis="columns", how="all").reset_index(drop=True)


def _spread(rows: Sequence[Any], count: int) -> list[Any]:
    """At most `count` rows at equal distances: the first ones would be of one checkpoint only."""
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else list(rows)


def name_of(ref: str | Path) -> str:
    """The name under which a run stands in the frames."""
    return Run.open(ref).name


def seeds_of(run: str) -> list[str]:
    """The run and its finished siblings RUN-s1, RUN-s2, ..., in the order of the seeds; the run alone where it is not on this machine."""
    if not paths.exists(run):
        return [run]
    path = paths.find_run(run)
    found = {
        int(p.name.rpartition("-s")[2]): p
        for p in path.parent.glob(f"{path.name}-s*")
        if p.name.rpartition("-s")[2].isdecimal()
    }
    finished = [
        found[n] for n in sorted(found) if paths.is_run(found[n]) and Run.open(found[n]).status["status"] == "finished"
    ]
    return [run, *map(str, finished)]


def listing(frame: pd.DataFrame, columns: Sequence[str], rows: int) -> str:
    """Rows at equal distances as a Markdown table whose cells show text as it is."""
    chosen = frame.iloc[_spread(range(len(frame)), rows)]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for _, row in chosen.iterrows()]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Text of any kind as code in one table cell: no markup of a completion may be taken for ours."""
    text = re.sub(r"\s+", " ", str(value)).strip()
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}".replace("|", "\\|")


# ---------------------------------------------------------------- freezing


def freeze(frames: Frames, directory: Path | str) -> Frames:
    """Write the frames below `directory` as csv and jsonl, 8 significant digits; returns them as
    `load_frozen` reads them, so that what is drawn is what was kept. Raises ConfigError above 1 MB in all,
    and writes nothing then."""
    directory = Path(directory)
    files = {f"{n}.csv" if n in TABLES else f"{n}.jsonl": _frozen_text(n, frame) for n, frame in frames.items()}
    sizes = {name: len(text.encode()) for name, text in files.items()}
    if sum(sizes.values()) > MAX_BYTES:
        listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise ConfigError(
            f"{sum(sizes.values()):,} bytes to freeze ({listed}); at most {MAX_BYTES:,}; take fewer runs or rows"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(directory / name, text)
    return load_frozen(directory)


def _frozen_text(name: str, frame: pd.DataFrame) -> str:
    if name in TABLES:
        return frame.to_csv(index=False, float_format="%.8g", lineterminator="\n")
    rows = (row.dropna().to_dict() for _, row in frame.iterrows())
    return "".join(json.dumps(_rounded(row), ensure_ascii=False) + "\n" for row in rows)


def _rounded(value: Any) -> Any:
    """Plain json with floats of 8 significant digits."""
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.8g}") if isinstance(value, float) else value


def load_frozen(directory: Path | str) -> Frames:
    """The frames that `freeze` wrote. MissingFile where there are none."""
    directory = Path(directory)
    if not (directory / "runs.csv").is_file():
        raise MissingFile(f"{directory} holds no frozen rows (runs.csv); `codechat report` writes them")
    tables = {name: pd.read_csv(directory / f"{name}.csv") for name in TABLES}
    rows = {p.stem: pd.DataFrame(read_rows(p), columns=None) for p in sorted(directory.glob("*.jsonl"))}
    return tables | {
        name: frame if len(frame) else pd.DataFrame({"run": pd.Series(dtype=str)}) for name, frame in rows.items()
    }


# ---------------------------------------------------------------- what others published


def published(table: str) -> pd.DataFrame:
    """A table of reports/published, every column named "... (published)": it cannot be stacked under measured figures. MissingFile names those
    there are."""
    folder = paths.ROOT / "reports" / "published"
    if not (folder / f"{table}.csv").is_file():
        known = sorted(path.stem for path in folder.glob("*.csv"))
        raise MissingFile(f"no published table {table!r}{errors.nearest(table, known)}; there are {', '.join(known)}")
    return pd.read_csv(folder / f"{table}.csv").add_suffix(" (published)")


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Which reports, and where they go."""

    names: tuple[str, ...] = opt(
        (), "reports: names of parameter files reports/NAME.yaml; none = list them", positional=True
    )
    out: str = opt("reports", "folder for NAME.ipynb, NAME.html and NAME/data, from the project's root")
    frozen: bool = opt(False, "draw from the rows that lie in OUT/NAME/data, without the runs")


def names() -> list[str]:
    """The reports there are: those with a parameter file."""
    return sorted(path.stem for path in (paths.ROOT / "reports").glob("*.yaml"))


def template_of(name: str) -> str:
    """The name of the template nbs_py/9x_NAME.py or 9x_NAME_report.py. MissingFile names the reports there are."""
    folder = paths.ROOT / "nbs_py"
    found = sorted([*folder.glob(f"9?_{name}.py"), *folder.glob(f"9?_{name}_report.py")])
    if not found:
        known = names()
        raise MissingFile(
            f"no template nbs_py/9x_{name}.py{errors.nearest(name, known) if known else ''}; reports: {', '.join(known)}"
        )
    return found[0].stem


def build(name: str, out: Path, parameters: Mapping[str, Any] | None = None, frozen: bool = False) -> Path:
    """Execute the template of report `name` into OUT/NAME.ipynb and render its page; returns the page's path.

    parameters: over those of reports/NAME.yaml. RunError, with the cell and the reason, where a cell fails;
    the notebook up to there stays."""
    template, source = template_of(name), paths.ROOT / "reports" / f"{name}.yaml"
    if not source.is_file():
        raise MissingFile(f"{source} does not exist; it holds the parameters of report {name}")
    place = out / name  # from the project's root where it lies below: an executed report names no machine
    place = place.relative_to(notebooks.ROOT) if place.is_relative_to(notebooks.ROOT) else place
    values = {
        **(read_yaml_file(str(source)) or {}),
        "out": place.as_posix(),
        **({"frozen": True} if frozen else {}),
        **(parameters or {}),
    }
    done = notebooks.execute_copy(template, out / f"{name}.ipynb", values, root=paths.ROOT)
    if not done.ok:
        raise RunError(f"report {name}: {done.error}; the notebook up to there is {out / f'{name}.ipynb'}")
    return html.write_page(out / f"{name}.ipynb")


def index(out: Path | None = None) -> Path:
    """Write reports/index.html over the executed reports below reports/ and runs/, and over notebooks
    executed on runs."""
    root = paths.ROOT
    reports = [*(root / "reports").glob("*.ipynb"), *(root / "runs").glob("*/report/*.ipynb")]
    copies = sorted((root / "runs").glob("*/notebooks/*.ipynb"))
    return html.write_index(out or root / "reports" / "index.html", sorted(reports), copies)


def show_list() -> None:
    """Each report with its title and what of it is here."""
    for name in names():
        place = paths.ROOT / "reports" / f"{name}.ipynb"
        rows = "frozen rows" if (place.with_suffix("") / "data" / "runs.csv").is_file() else "no frozen rows"
        print(f"{name:<16} {html.title(html.read(place)) if place.is_file() else 'not executed yet'} ({rows})")


def write(cfg: ReportConfig) -> Path | None:
    """Build the reports and the index; prints where they are. Without a name, the list. An unknown name is refused before any is built."""
    if not cfg.names:
        return show_list()
    for name in cfg.names:
        template_of(name)
    for name in cfg.names:
        print(f"report: {build(name, paths.ROOT / cfg.out, frozen=cfg.frozen)}")
    found = index()
    print(f"index: {found}")
    return found


def main(argv: list[str] | None = None) -> None:
    """`codechat report [NAME ...]`, `python -m codechat.reports.build`."""
    write(config.parse(ReportConfig, sys.argv[1:] if argv is None else argv, prog="codechat report", epilog=__doc__))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
