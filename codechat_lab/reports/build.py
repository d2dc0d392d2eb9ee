"""Build reports: finished runs -> figures -> one executed notebook and its web page.

    codechat report                            list the reports
    codechat report nano staircase             write reports/NAME.{ipynb,html} and reports/NAME/data of each
    codechat report staircase --frozen         from the committed rows, without any run, in runs/drawn/report: what is
                                               committed stays as it is
    codechat report nano --out runs/nano/report    write elsewhere; the recipe does this, so the repository stays
                                                   unchanged

A report is a template, `notebooks/9x_NAME.ipynb`, whose source is `nbs_py/9x_NAME.py`; papermill
can run the notebook, by default on the committed rows. It reads only run directories, freezes
their rows and draws from these; if none of its runs is on this machine, it uses the committed
rows. `reports/index.html` (not committed) shows every report on this machine: title, first
sentence and picture; those of your own runs come first.

A report reads like an article: a cell tagged `answer` with three sentences, one tagged
`thumbnail` with the main figure, a table "published | ours | what it means", the argument, an
appendix. Its cells are tagged `hide-input` (shown without code) or `hide-cell` (shown at the
end of the page)."""

import shutil
from pathlib import Path

from codechat.core.errors import RunError, check_choice
from codechat.runs import paths
from codechat_lab.reports import html, notebooks
from codechat_lab.reports.settings import ReportConfig

DRAWN = "runs/drawn/report"  # what is drawn from committed rows; git ignores runs/
FAILED = "runs/drawn/failed"


def templates() -> dict[str, str]:
    """{report: template} of the sources nbs_py/9x_NAME.py and 9x_NAME_report.py."""
    return {
        name[3:].removesuffix("_report"): name
        for name in notebooks.names()
        if notebooks.is_template(name)
    }


def build(name: str, out: str, frozen: bool = False) -> Path:
    """Execute the template of report `name` into OUT/NAME.ipynb, OUT from the project's root,
    and render its page; returns the page's path.

    RunError names the cell that failed and the reason. The notebook up to there is kept in
    FAILED, and an earlier OUT/NAME.ipynb stays as it is."""
    here = paths.ROOT / out / name / "data"
    if out == DRAWN or (out == "reports" and not here.exists()):
        for root in (paths.ROOT, paths.SHIPPED):
            committed = root / "reports" / name / "data"
            if committed.is_dir():
                shutil.rmtree(here, ignore_errors=True)  # of an earlier call
                shutil.copytree(committed, here)
                break
    path = paths.ROOT / out / f"{name}.ipynb"
    failed = paths.ROOT / FAILED / f"{name}.ipynb"
    given = {"out": f"{out}/{name}", "frozen": frozen}
    try:
        notebooks.execute_copy(templates()[name], path, given, failed=failed)
    except notebooks.NotebookError as error:
        raise RunError(f"report {name}: {error}; the notebook up to there is {failed}") from error
    return html.write_page(path)


def write(cfg: ReportConfig) -> None:
    """Build the reports, and an index over all executed reports and notebooks of runs, and
    print their paths; without a name, print the list."""
    known = templates()
    folder = paths.ROOT / "reports"
    if not cfg.names:
        for name in known:
            path = folder / f"{name}.ipynb"
            print(
                f"{name:<16} {html.title(html.read(path)) if path.is_file() else 'not executed yet'}"
            )
        return
    for name in cfg.names:
        check_choice("report", name, known)
    out = cfg.out or (DRAWN if cfg.frozen else "reports")
    for name in cfg.names:
        print(f"report: {build(name, out, frozen=cfg.frozen)}")
    runs = paths.ROOT / "runs"
    drawn = paths.ROOT / DRAWN
    executed = sorted(runs.glob("*/report/*.ipynb"))
    own = {path: path.parents[1].name for path in executed if path.parent != drawn}
    reports = [*sorted(folder.glob("*.ipynb")), *sorted(drawn.glob("*.ipynb"))]
    copies = sorted(runs.glob("*/notebooks/*.ipynb"))
    print(f"index: {html.write_index(folder / 'index.html', reports, copies, own)}")
