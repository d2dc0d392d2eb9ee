"""Build reports: finished runs -> figures -> one executed notebook and its web page.

    codechat report                            list the reports
    codechat report nano staircase             write reports/NAME.{ipynb,html} and reports/NAME/data of each
    codechat report staircase --frozen         the same from the committed rows, without any run
    codechat report nano --out runs/nano/report    write elsewhere; the recipe does so and leaves the repository unchanged

A report is a template `nbs_py/9x_NAME.py` executed with the parameters of `reports/NAME.yaml`. It reads run directories and nothing else, and draws
from the rows that it froze; where none of its runs is on this machine, from the committed rows. `reports/index.html` (not committed) shows every report
on this machine: title, first sentence and picture.

A report reads as an article: a cell tagged `answer` with three sentences, one tagged `thumbnail` with the figure that carries them, a table "published |
ours | what it means", the argument, an appendix. Its cells are tagged `hide-input` (shown without code) or `hide-cell` (shown at the end of the page).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codechat.core import config, errors
from codechat.core.atomic_files import atomic_directory
from codechat.core.config import opt
from codechat.core.errors import MissingFile, RunError
from codechat.reports import html, notebooks
from codechat.runs import paths


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Which reports to build, and where to write them."""

    names: tuple[str, ...] = opt((), "reports: names of files reports/NAME.yaml; none = list them", positional=True)
    out: str = opt("reports", "folder for NAME.ipynb, NAME.html and NAME/data, from the project's root")
    frozen: bool = opt(False, "draw from the rows in OUT/NAME/data, without the runs")


def names() -> list[str]:
    """The reports: names with a parameter file."""
    return sorted(path.stem for path in (paths.SHIPPED / "reports").glob("*.yaml"))


def template_of(name: str) -> str:
    """The name of the template nbs_py/9x_NAME.py or 9x_NAME_report.py. MissingFile names the reports there are."""
    folder = paths.SHIPPED / "nbs_py"
    found = sorted([*folder.glob(f"9?_{name}.py"), *folder.glob(f"9?_{name}_report.py")])
    if not found:
        near = errors.nearest(name, names()) if names() else ""
        raise MissingFile(f"no template nbs_py/9x_{name}.py{near}; reports: {', '.join(names())}")
    return found[0].stem


def build(name: str, out: Path, parameters: Mapping[str, Any] | None = None, frozen: bool = False) -> Path:
    """Execute the template of report `name` into OUT/NAME.ipynb and render its page; returns the page's path.

    parameters override those of reports/NAME.yaml. RunError names the cell that failed and the reason; the notebook up to there is kept."""
    import papermill.iorw

    template, source = template_of(name), paths.SHIPPED / "reports" / f"{name}.yaml"
    if not source.is_file():
        raise MissingFile(f"{source} does not exist; it holds the parameters of report {name}")
    place = out / name  # relative to the project's root where possible: an executed report must not name a machine
    place = place.relative_to(paths.ROOT) if place.is_relative_to(paths.ROOT) else place
    values = (papermill.iorw.read_yaml_file(str(source)) or {}) | {"out": place.as_posix()}
    values |= ({"frozen": True} if frozen else {}) | dict(parameters or {})
    kept, here = paths.SHIPPED / "reports" / name / "data", out / name / "data"
    if kept.is_dir() and not here.exists() and out == paths.ROOT / "reports":  # the rows that came with the package
        with atomic_directory(here) as fresh:
            shutil.copytree(kept, fresh, dirs_exist_ok=True)
    path = out / f"{name}.ipynb"
    result = notebooks.execute_copy(template, path, values, root=paths.SHIPPED)
    if not result.ok:
        raise RunError(f"report {name}: {result.error}; the notebook up to there is {path}")
    return html.write_page(path)


def index() -> Path:
    """Write reports/index.html over the executed reports below reports/ and runs/, and the notebooks executed on runs."""
    reports = [*(paths.ROOT / "reports").glob("*.ipynb"), *(paths.ROOT / "runs").glob("*/report/*.ipynb")]
    copies = sorted((paths.ROOT / "runs").glob("*/notebooks/*.ipynb"))
    return html.write_index(paths.ROOT / "reports" / "index.html", sorted(reports), copies)


def show_list() -> None:
    """Print each report with its title, and whether it was executed and has frozen rows."""
    for name in names():
        place = paths.ROOT / "reports" / f"{name}.ipynb"
        rows = "frozen rows" if (place.with_suffix("") / "data" / "runs.csv").is_file() else "no frozen rows"
        print(f"{name:<16} {html.title(html.read(place)) if place.is_file() else 'not executed yet'} ({rows})")


def write(cfg: ReportConfig) -> None:
    """Build the reports and the index and print their paths; without a name, print the list. An unknown name raises before any is built."""
    if not cfg.names:
        return show_list()
    for name in cfg.names:
        template_of(name)
    for name in cfg.names:
        print(f"report: {build(name, paths.ROOT / cfg.out, frozen=cfg.frozen)}")
    print(f"index: {index()}")


def main(argv: list[str] | None = None) -> None:
    """`codechat report [NAME ...]`."""
    write(config.parse(ReportConfig, sys.argv[1:] if argv is None else argv, prog="codechat report", epilog=__doc__))
