"""Executed notebooks as plain HTML pages, and an index page over reports.

Jinja2 fills templates and escapes every value, markdown-it turns Markdown into HTML. A page
loads nothing from the network. nbconvert would load scripts from there, and pass on HTML within
Markdown, which a completion of a model may hold."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from nbformat import NotebookNode

from codechat.core.atomic_files import write_atomic

TEMPLATES = Path(__file__).parent / "templates"
# tags of Jupyter Book
HIDE_INPUT = "hide-input"  # shown without code
HIDE_CELL = "hide-cell"  # shown at the end of the page


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def write_page(notebook_path: Path) -> Path:
    """Render an executed notebook to NAME.html beside it; returns the page's path.

    Prose, outputs, and each cell's code behind a fold. One fold at the end holds cells tagged
    `hide-cell` and the code of cells tagged `hide-input`; an article has all its code there."""
    notebook = read(notebook_path)
    path = notebook_path.with_suffix(".html")
    article = bool(answer(notebook))
    cells = [
        dict(cell, place=_place(cell, article)) for cell in notebook.cells if cell.source.strip()
    ]
    write_atomic(path, fill("notebook.html", title=title(notebook), cells=cells))
    return path


def _place(cell: NotebookNode, article: bool) -> str:
    """Where a page shows a cell: "here" (with its code), "output" (its code at the end) or
    "end"."""
    tags = set(cell.metadata.get("tags", ()))
    if HIDE_CELL in tags or (article and tags & {"parameters", "injected-parameters"}):
        return "end"  # an article lists its parameters in its appendix
    return "output" if cell.cell_type == "code" and (article or HIDE_INPUT in tags) else "here"


def write_index(
    out: Path,
    reports: Iterable[Path],
    notebooks: Sequence[Path] = (),
    own: Mapping[Path, str] | None = None,
) -> Path:
    """Write the page `out` over executed reports, each with its title, the first sentence of
    its answer and thumbnails, and a list of other executed notebooks. Every notebook is
    rendered beside its file and linked. own: {report: run} of the reader's own runs, which
    come first."""
    cards = [_card(path, out.parent) | {"run": run} for path, run in (own or {}).items()]
    cards += [_card(path, out.parent) for path in reports]
    links = [_card(path, out.parent) for path in notebooks]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, fill("index.html", title="CodeChat reports", reports=cards, notebooks=links))
    return out


def _card(path: Path, folder: Path) -> dict[str, Any]:
    notebook = read(path)
    page = write_page(path)
    return {
        "href": Path(os.path.relpath(page, folder)).as_posix(),
        "title": title(notebook),
        "sentence": answer(notebook).partition("\n")[0],
        "thumbnails": [
            output
            for output in _tagged(notebook, "thumbnail")
            if "image/png" in output.get("data", {})
        ],
    }


def answer(notebook: NotebookNode) -> str:
    """The Markdown that cells tagged `answer` show, a sentence a line; "" if the notebook is no
    article."""
    return "\n".join(
        output.get("data", {}).get("text/markdown", "") for output in _tagged(notebook, "answer")
    )


def title(notebook: NotebookNode) -> str:
    """The first heading, without markup."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    heading = re.search(r"^#\s+(.+)$", text, re.MULTILINE)
    return re.sub(r"[*_`]", "", heading[1]) if heading else "untitled"


def _tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """Outputs of the code cells with a tag."""
    cells = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and tag in cell.metadata.get("tags", ())
    ]
    return [output for cell in cells for output in cell.outputs]


def prose(markdown: str) -> str:
    """Markdown as HTML; HTML within it stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)


def fill(template: str, more_css: str = "", **values: Any) -> str:
    """A whole HTML file; the templates escape every value that they do not mark as safe."""
    loader = FileSystemLoader(TEMPLATES)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters["markdown"] = prose
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return pages.get_template(template).render(css=css + more_css, **values)
