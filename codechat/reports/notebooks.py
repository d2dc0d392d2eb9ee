"""Paired notebooks: build them from their sources, check them, execute copies on fresh runs.

    python -m codechat.reports.notebooks build [NAME ...]
    python -m codechat.reports.notebooks prose [NAME ...]
    python -m codechat.reports.notebooks check [NAME ...]

`nbs_py/NAME.py` (py:percent) is the source that is reviewed; `notebooks/NAME.ipynb` is what a reader opens. `build` executes the source in an empty
folder, removes what differs between machines, and stamps the sha256 of the code cells. `prose` writes changed Markdown only and keeps the outputs. Both
link the first cell to its neighbours. `check` finds pairs that differ and outputs older than their code. `execute_copies` injects parameters (papermill)
and prints which claims held: a walk-through claims what its last code cell asserts. Names that begin with 9 are report templates, committed without
outputs.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from codechat.core.config import opt
from codechat.core.errors import DataError, MissingFile, UserError, nearest
from codechat.reports import html
from codechat.runs import paths
from codechat.runs.paths import SHIPPED

MAX_BYTES = 300_000
AT_ROOT = "from codechat.runs import paths; paths.ROOT = type(paths.ROOT)({!r}); del paths"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
LINKS = re.compile(r"\n+(Previous|Next): \[[^\n]*\.ipynb\)$")


class NotebookError(UserError, RuntimeError):
    """A notebook that did not run to its end: the message names cell and reason on one line."""


# ---------------------------------------------------------------- sources and pairs


def names(chosen: Iterable[str] = (), *, root: Path = SHIPPED) -> list[str]:
    """Names with a source, in order; if any are chosen, only those. MissingFile for one without a source."""
    known, chosen = sorted(path.stem for path in (root / "nbs_py").glob("*.py")), list(chosen)
    for name in set(chosen) - set(known):
        raise MissingFile(f"no notebook {name}: nbs_py/{name}.py does not exist{nearest(name, known)}")
    return [name for name in known if not chosen or name in chosen]


def is_template(name: str) -> bool:
    """Report templates (90 and above) are committed without outputs."""
    return name.startswith("9")


def walks(root: Path = SHIPPED) -> list[str]:
    """The notebooks that are no templates, in order."""
    return [name for name in names(root=root) if not is_template(name)]


def source_of(name: str, root: Path = SHIPPED) -> NotebookNode:
    """The notebook of a source file, without outputs. Cell ids derive from the text, so that a rebuild keeps them."""
    config = load_jupytext_config(str(root))
    notebook = jupytext.read(root / "nbs_py" / f"{name}.py", config=config)
    # The filters are those that `jupytext --sync` would write: a later sync then finds nothing to change.
    filters = {key: getattr(config, key) for key in ("cell_metadata_filter", "notebook_metadata_filter")}
    notebook.metadata = nbformat.from_dict({"jupytext": filters, "kernelspec": KERNEL, "language_info": LANGUAGE})
    if links := navigation(name, root):
        first = notebook.cells[0]
        first.source = LINKS.sub("", first.source) + f"\n\n{links}"
    seen = Counter[str]()
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
        seen[digest] += 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    notebook.nbformat_minor = max(notebook.nbformat_minor, 5)
    return notebook


def navigation(name: str, root: Path = SHIPPED) -> str:
    """The line that links a walk-through to its neighbours; "" without neighbours and for a report template."""
    chain = walks(root)
    if name not in chain:
        return ""
    at = chain.index(name)
    sides = (("Previous", chain[max(0, at - 1) : at]), ("Next", chain[at + 1 : at + 2]))
    return " · ".join(f"{side}: [{other.replace('_', ' ')}]({other}.ipynb)" for side, near in sides for other in near)


def parameter_names(notebook: NotebookNode) -> set[str]:
    """Names assigned in the cell tagged `parameters`."""
    cells = [cell for cell in _code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _executed(name: str, root: Path) -> Path:
    return root / "notebooks" / f"{name}.ipynb"


def _code(notebook: Mapping) -> list[NotebookNode]:
    return [cell for cell in notebook["cells"] if cell.cell_type == "code"]


def code_sha256(notebook: NotebookNode) -> str:
    """Hash of the code cells' sources in order, without outputs, Markdown and metadata."""
    return hashlib.sha256("\0".join(cell.source.rstrip() for cell in _code(notebook)).encode()).hexdigest()


def _stamp(notebook: NotebookNode) -> str | None:
    return notebook.metadata.get("codechat", {}).get("code_sha256")


# ---------------------------------------------------------------- build and check


def build(name: str, *, root: Path = SHIPPED, timeout_s: float = 600) -> Path:
    """Write notebooks/NAME.ipynb from its source; nothing is written unless every cell ran.

    Raises NotebookError if a cell fails, DataError if the .ipynb holds code that its source lacks."""
    notebook, path = source_of(name, root), _executed(name, root)
    old = html.read(path) if path.exists() else notebook
    if _stamp(old) and code_sha256(old) not in (_stamp(old), code_sha256(notebook)):
        raise DataError(f"{path} holds code that nbs_py/{name}.py lacks; keep it with `jupytext --sync`, or delete it")
    if not is_template(name):
        with tempfile.TemporaryDirectory() as empty:
            _execute(notebook, cwd=Path(empty), timeout_s=timeout_s)
            _scrub(notebook, {empty: ".", sys.prefix: ".venv", str(root): ".", str(Path.home()): "~"})
    return _write_pair(name, notebook, root)


def rewrite_prose(name: str, *, root: Path = SHIPPED) -> Path:
    """Write the source's Markdown into notebooks/NAME.ipynb, outputs kept. DataError if the code needs a build."""
    notebook, done = source_of(name, root), html.read(_executed(name, root))
    if not _stamp(done) == code_sha256(notebook) == code_sha256(done):
        raise DataError(f"notebooks/{name}.ipynb was executed from other code; run `make notebooks ARGS={name}`")
    for cell, executed in zip(_code(notebook), _code(done), strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return _write_pair(name, notebook, root)


def _write_pair(name: str, notebook: NotebookNode, root: Path) -> Path:
    """Stamp a notebook and write both files where they changed; returns that of the notebook."""
    notebook.metadata["codechat"] = {"code_sha256": code_sha256(notebook)}
    source, path = root / "nbs_py" / f"{name}.py", _executed(name, root)
    path.parent.mkdir(exist_ok=True)
    text = jupytext.writes(notebook, fmt="py:percent", config=load_jupytext_config(str(root)))
    for file, new in ((source, text), (path, nbformat.writes(notebook) + "\n")):
        if not file.exists() or file.read_text(encoding="utf-8") != new:
            write_atomic(file, new)
    return path


def check(chosen: Iterable[str] = (), *, root: Path = SHIPPED) -> list[str]:
    """Problems of the pairs, a line each: incomplete, stale, not executed from top to bottom, too large."""
    here = names(chosen, root=root)
    problems = [
        f"notebooks/{name}.ipynb: {problem}; run `make notebooks ARGS={name}`"
        for name in here
        for problem in _problems(name, root)
    ]
    paired = sorted(path.stem for path in (root / "notebooks").glob("*.ipynb")) if not chosen else ()
    return problems + [f"notebooks/{name}.ipynb: has no source nbs_py/{name}.py" for name in paired if name not in here]


def _problems(name: str, root: Path) -> Iterator[str]:
    source, path, template = source_of(name, root), _executed(name, root), is_template(name)
    if navigation(name, root) not in (root / "nbs_py" / f"{name}.py").read_text(encoding="utf-8"):
        yield "the links to neighbours in its source are old"
    if not path.exists():
        yield "is missing"
        return
    notebook, once = html.read(path), [None if template else n + 1 for n in range(len(_code(source)))]
    if _cells(notebook) != _cells(source):
        yield "its cells differ from its source"
    if _stamp(notebook) != code_sha256(source) or [c.execution_count for c in _code(notebook)] != once:
        yield (
            "is not stripped"
            if template
            else "its outputs are not those of its source, executed once from top to bottom"
        )
    if (size := path.stat().st_size) > MAX_BYTES:
        yield f"{size} bytes; at most {MAX_BYTES} are allowed: fewer or smaller figures"


def _cells(notebook: NotebookNode) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(c.cell_type, c.source.rstrip(), tuple(c.metadata.get("tags", ()))) for c in notebook.cells]


# ---------------------------------------------------------------- copies


def execute_copies(
    chosen: Iterable[str], out_dir: Path, parameters: Mapping[str, object], *, root: Path = SHIPPED
) -> dict[str, str | None]:
    """Execute copies of walk-throughs into `out_dir` and print which claims held; returns the error of each, or None.

    Each receives those of `parameters` that it has. A copy that fails is saved with its outputs up to the error; the others run."""
    errors: dict[str, str | None] = {}
    for name in chosen:
        notebook, begin = source_of(name, root), time.perf_counter()
        known = {key: value for key, value in parameters.items() if key in parameter_names(notebook)}
        try:
            execute_copy(name, Path(out_dir) / f"{name}.ipynb", known, root=root)
            errors[name] = None
        except NotebookError as error:
            errors[name] = str(error)
        verdict = f"FAILED: {errors[name]}" if errors[name] else "held"
        print(f"{time.perf_counter() - begin:6.1f} s  {name}: {html.title(notebook)}: {verdict}")
    print(f"{[*errors.values()].count(None)} of {len(errors)} claims held; copies in {out_dir}")
    return errors


@dataclass(frozen=True, kw_only=True)
class CopiesConfig:
    """Copies of the walk-throughs, executed on a recipe's own runs."""

    out: str = opt("runs/nano/notebooks", "directory of the executed copies")
    source: str = opt("nano", "recipe whose runs the notebooks read")


def run_copies(cfg: CopiesConfig) -> None:
    """Execute the walk-throughs that read runs on those of cfg.source; a claim that does not hold there is printed, not raised."""
    reading = [name for name in walks() if "source" in parameter_names(source_of(name))]
    execute_copies(reading, paths.ROOT / cfg.out, {"source": cfg.source})


def execute_copy(name: str, path: Path, parameters: Mapping[str, object], *, root: Path = SHIPPED) -> None:
    """Execute one notebook or report template with `parameters` into `path`, in its folder. NotebookError if a cell fails; what was done is kept."""
    notebook = source_of(name, root)
    for cell in notebook.cells:
        tags = cell.metadata.setdefault("tags", [])  # papermill reads the tags of every cell
        if cell.cell_type == "code" and {html.HIDE_INPUT, html.HIDE_CELL} & set(tags):
            cell.metadata["jupyter"] = {"source_hidden": True}  # JupyterLab folds what a page folds
    if parameters:
        notebook.metadata["papermill"] = {}
        notebook = parameterize_notebook(
            notebook, {k: str(v) if isinstance(v, Path) else v for k, v in parameters.items()}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _execute(notebook, cwd=path.parent)
    finally:
        write_atomic(path, nbformat.writes(notebook) + "\n")


def _execute(notebook: NotebookNode, *, cwd: Path, timeout_s: float = 600) -> None:
    """Run every cell in place, in a fresh kernel whose `codechat` is this one. Raises NotebookError."""
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
        # the kernel works in the notebook's folder; runs/ and data/ are where they are for this process
        extra_arguments=["--log-level=ERROR", f"--IPKernelApp.exec_lines=[{AT_ROOT.format(str(paths.ROOT))!r}]"],
        resources={"metadata": {"path": str(cwd)}},
    )
    try:
        client.execute(env={**os.environ, "PYTHONPATH": path})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        cell, cells = len(_code({"cells": notebook.cells[: begun[-1] + 1]})), len(_code(notebook))
        raise NotebookError(f"code cell {cell} of {cells} {_reason(error, cell == cells)}") from error
    finally:
        notebook.metadata["language_info"] = nbformat.from_dict(LANGUAGE)


def _reason(error: Exception, last: bool) -> str:
    if not isinstance(error, CellExecutionError):
        return f"did not end: {str(error).splitlines()[0]}"
    reason = " ".join(f"{error.ename}: {error.evalue}".split())[:400].rstrip(": ")
    return f"failed: {'the claim did not hold: ' if last and error.ename == 'AssertionError' else ''}{reason}"


def _scrub(notebook: NotebookNode, places: Mapping[str, str]) -> None:
    """Replace what differs between machines in text outputs: folders, the kernel's own files, addresses."""

    def clean(text: str) -> str:
        text = re.sub(r"[^\s\"'(]*ipykernel_\d+[/\\]\d+\.py", "<cell>", text)
        for place, name in places.items():
            text = text.replace(place, name) if len(place) > 1 else text
        return re.sub(r"\bat 0x[0-9a-fA-F]{6,}", "at 0x...", text)

    for output in (output for cell in _code(notebook) for output in cell.outputs):
        if "text" in output:
            output["text"] = clean(output["text"])
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/") and isinstance(value, str):
                output["data"][kind] = clean(value)


def main(argv: Sequence[str] | None = None) -> int:
    """`build`, `prose` or `check` for the named notebooks, or all; returns 1 if any has a problem."""
    parser = argparse.ArgumentParser(prog="python -m codechat.reports.notebooks")
    parser.add_argument("action", choices=("build", "prose", "check"))
    parser.add_argument("names", nargs="*", help="names without folder and suffix (default: all)")
    args = parser.parse_args(argv)
    failed = False
    for name in names(args.names) if args.action != "check" else ():
        begin = time.perf_counter()
        try:
            path = (build if args.action == "build" else rewrite_prose)(name)
            print(f"written {time.perf_counter() - begin:6.1f} s  {path.relative_to(SHIPPED)}", flush=True)
        except (NotebookError, DataError) as error:  # the committed notebook stays; the others are still built
            failed = True
            print(f"FAILED {name}: {error}\n{error.__cause__ or ''}", file=sys.stderr, flush=True)
    problems = check(args.names)
    print("\n".join(problems) or "notebooks are paired, current and executed")
    return int(failed or bool(problems))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
