"""Notebooks by name: their sources, and executed copies with other parameters.

`nbs_py/NAME.py` (py:percent) is the source; `tools/notebook_pairs.py` builds the committed
`notebooks/NAME.ipynb`. A walk-through claims what its last code cell asserts. Names that begin
with 9 are report templates."""

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from jupytext.config import load_jupytext_config
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.parameterize import parameterize_notebook

import codechat
from codechat.core.atomic_files import write_atomic
from codechat.core.errors import UserError
from codechat.runs import paths
from codechat_lab.reports import html
from codechat_lab.reports.settings import CopiesConfig

AT_ROOT = "from codechat.runs import paths; paths.ROOT = type(paths.ROOT)({!r}); del paths"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "name": "python",
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "pygments_lexer": "ipython3",
}


class NotebookError(UserError, RuntimeError):
    """A notebook that did not run to its end: the message names cell and reason on one line."""


def names() -> list[str]:
    """Names of the notebooks with a source, sorted."""
    return sorted(path.stem for path in (paths.SHIPPED / "nbs_py").glob("*.py"))


def is_template(name: str) -> bool:
    """Report templates (90 and above) are committed without outputs."""
    return name.startswith("9")


def source_of(name: str) -> NotebookNode:
    """The notebook of a source file, without outputs. Cell ids derive from the text, so that a
    rebuild keeps them."""
    config = load_jupytext_config(str(paths.SHIPPED))
    notebook = jupytext.read(paths.SHIPPED / "nbs_py" / f"{name}.py", config=config)
    # The filters are those that `jupytext --sync` would write: a later sync then finds nothing
    # to change.
    filters = {
        key: getattr(config, key) for key in ("cell_metadata_filter", "notebook_metadata_filter")
    }
    notebook.metadata = nbformat.from_dict(
        {"jupytext": filters, "kernelspec": KERNEL, "language_info": LANGUAGE}
    )
    seen = Counter[str]()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def reads_runs(name: str) -> bool:
    """Whether it is a walk-through with a parameter `source`, the recipe whose runs it reads."""
    if is_template(name):
        return False
    cells = [
        cell
        for cell in code_cells(source_of(name))
        if "parameters" in cell.metadata.get("tags", [])
    ]
    return any(re.search("^source = ", cell.source, re.MULTILINE) for cell in cells)


def run_copies(cfg: CopiesConfig) -> None:
    """Execute copies of the walk-throughs that read runs on those of cfg.source. A claim that
    does not hold there is printed, not raised."""
    out = paths.ROOT / cfg.out
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))

    def run(name: str) -> tuple[float, str]:
        """Seconds, and what failed ("" if the claim held)."""
        begin = time.perf_counter()
        failure = ""
        try:
            execute_copy(
                name, out / f"{name}.ipynb", {"source": cfg.source}, {"OMP_NUM_THREADS": threads}
            )
        except NotebookError as error:
            failure = f"FAILED: {error}"
        return time.perf_counter() - begin, failure

    copied = list(filter(reads_runs, names()))
    held = 0
    with ThreadPoolExecutor(2) as pool:
        for name, (seconds, failure) in zip(copied, pool.map(run, copied)):
            print(f"{seconds:6.1f} s  {name}: {html.title(source_of(name))}: {failure or 'held'}")
            held += not failure
    print(f"{held} of {len(copied)} claims held; copies in {out}")


def execute_copy(
    name: str,
    path: Path,
    parameters: Mapping[str, object],
    environment: Mapping[str, str] = {},
    failed: Path | None = None,
) -> None:
    """Execute a notebook or report template with `parameters` into `path`, in its folder, with
    these environment variables. NotebookError if a cell fails; the outputs up to there are kept
    in `failed`, by default in `path`."""
    notebook = source_of(name)
    for cell in notebook.cells:
        tags = cell.metadata.setdefault("tags", [])  # papermill reads the tags of every cell
        if cell.cell_type == "code" and {html.HIDE_INPUT, html.HIDE_CELL} & set(tags):
            cell.metadata["jupyter"] = {"source_hidden": True}  # JupyterLab folds what a page folds
    if parameters:
        notebook.metadata["papermill"] = {}
        notebook = parameterize_notebook(notebook, dict(parameters))
        for cell in notebook.cells:  # papermill gives its cell a random id
            cell["id"] = "given" if "injected-parameters" in cell.metadata["tags"] else cell["id"]
    path.parent.mkdir(parents=True, exist_ok=True)
    end = failed or path
    try:
        execute(notebook, cwd=path.parent, environment=environment)
        end = path
    finally:
        end.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(end, nbformat.writes(notebook) + "\n")


def execute(
    notebook: NotebookNode,
    *,
    cwd: Path,
    timeout_s: float = 600,
    environment: Mapping[str, str] = {},
) -> None:
    """Run every cell in place, in a fresh kernel whose `codechat` is this one. Raises
    NotebookError."""
    package = str(Path(codechat.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    begun: list[int] = []
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name=KERNEL["name"],
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=lambda cell, cell_index: begun.append(cell_index),
        # the kernel works in the notebook's folder; runs/ and data/ are where they are for this
        # process
        extra_arguments=[
            "--log-level=ERROR",
            f"--IPKernelApp.exec_lines=[{AT_ROOT.format(str(paths.ROOT))!r}]",
        ],
        resources={"metadata": {"path": str(cwd)}},
    )
    try:
        client.execute(env=os.environ | {"PYTHONPATH": path} | dict(environment))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        cells = code_cells(notebook)
        number = 1 + cells.index(notebook.cells[begun[-1]])
        reason = _reason(error, last=number == len(cells))
        raise NotebookError(f"code cell {number} of {len(cells)} {reason}") from error
    finally:
        notebook.metadata["language_info"] = nbformat.from_dict(LANGUAGE)


def _reason(error: Exception, last: bool) -> str:
    """Why a cell failed, on one line. An assertion in the last cell is the claim."""
    if not isinstance(error, CellExecutionError):
        return f"did not end: {str(error).splitlines()[0]}"
    text = " ".join(f"{error.ename}: {error.evalue}".split())[:400].rstrip(": ")
    claim = "the claim did not hold: " if last and error.ename == "AssertionError" else ""
    return f"failed: {claim}{text}"
