"""Settings of report, pages, scores and the stage that executes notebooks. No torch, Jupyter or pandas
here: `--help` reads these classes."""

from dataclasses import dataclass

from codechat.core.config import REQUIRED, Settings, opt


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Settings):
    """Which reports to build, and where to write them."""

    names: tuple[str, ...] = opt(
        (), "reports: NAME of templates nbs_py/9x_NAME.py; none = list them", positional=True
    )
    out: str | None = opt(
        None,
        "folder for NAME.ipynb, NAME.html and NAME/data, from the project's root; "
        "none = reports, or runs/drawn/report with --frozen",
    )
    frozen: bool = opt(
        False, "draw from the rows in OUT/NAME/data, or the committed ones, without the runs"
    )


@dataclass(frozen=True, kw_only=True)
class PagesConfig:
    """From which rows to write the pages, and where to."""

    source: str = opt(
        "frozen",
        "rows of completions: frozen = the committed ones, or a recipe whose runs are read",
    )
    out: str = opt("reports/pages", "folder of the pages, from the project's root")


@dataclass(frozen=True, kw_only=True)
class CopiesConfig:
    """Copies of the walk-throughs, executed on a recipe's own runs."""

    out: str = opt("runs/nano/notebooks", "directory of the executed copies")
    source: str = opt("nano", "recipe whose runs the notebooks read")


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(Settings):
    """Which evaluations stand side by side."""

    runs: tuple[str, ...] = opt(
        REQUIRED, "runs of evaluate, passk or natural", positional=True, reads="run"
    )
    out: str | None = opt(None, "folder for scores.md; none = only print the tables")
    title: str = opt("Scores", "heading of the page")
    notes: tuple[str, ...] = opt((), "paragraphs below the tables")
