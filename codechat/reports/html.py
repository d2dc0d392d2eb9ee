"""Executed notebooks as web pages: one self-contained file each, and an index that shows them.

A page reads on a phone, follows the reader's dark or light setting, asks nothing of the network, and keeps
the code folded away.

Left out: everything interactive; nbconvert's templates (ten times the size, and no index).
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat
from markdown_it import MarkdownIt
from nbformat import NotebookNode

from codechat.core.atomic_files import write_atomic
from codechat.core.errors import DataError

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
THUMBNAIL = "thumbnail"  # tag of a cell whose figure the index shows
HEADLINE = "headline"  # tag of a cell whose text the index shows


class Figure(NamedTuple):
    png: str  # base64
    alt: str


def read(path: Path) -> NotebookNode:
    """A notebook; DataError where the file is not one."""
    try:
        return nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a notebook ({error}); write it again with `codechat report`") from error


def write_page(notebook_path: Path) -> Path:
    """Render an executed notebook to NAME.html beside it; returns the page's path."""
    path = notebook_path.with_suffix(".html")
    write_atomic(path, render(read(notebook_path)))
    return path


def render(notebook: NotebookNode) -> str:
    """The page of an executed notebook: prose, outputs, and each cell's code behind a fold."""
    cells = [_cell(cell) for cell in notebook.cells if cell.source.strip()]
    if found := headline(notebook):
        cells.insert(1, f"<pre>{html.escape(found)}</pre>")  # what came out, before how
    return page(title(notebook), "\n".join(cells))


def headline(notebook: NotebookNode) -> str:
    """What the cells tagged `headline` print."""
    outputs = _tagged(notebook, HEADLINE)
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout").strip()


def title(notebook: NotebookNode) -> str:
    """The first heading, without markup."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#\s+(.+)$", cell.source, re.MULTILINE)):
            return re.sub(r"[*_`]", "", found[1])
    return "untitled"


def page(heading: str, body: str) -> str:
    """A whole HTML file."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(heading)}</title>\n<style>\n{STYLE}</style>\n<main>\n{body}\n</main>\n</html>\n"
    )


def _cell(cell: NotebookNode) -> str:
    if cell.cell_type == "markdown":
        return prose(cell.source)
    outputs = "\n".join(filter(None, map(_output, cell.get("outputs", ()))))
    return f"<details><summary>code</summary><pre>{html.escape(cell.source)}</pre></details>\n{outputs}"


def prose(markdown: str) -> str:
    """Markdown as HTML; HTML within it stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)


def _output(output: NotebookNode) -> str:
    """One output as HTML; what was written to stderr (progress bars) is left out."""
    if output.output_type == "stream":
        return f"<pre>{html.escape(output.text)}</pre>" if output.name == "stdout" else ""
    if output.output_type == "error":
        return f"<pre>{html.escape(f'{output.ename}: {output.evalue}')}</pre>"
    data = output.get("data", {})
    if "image/png" in data:
        return image(_figure(output))
    if "text/markdown" in data:
        return f'<div class="wide">{prose(data["text/markdown"])}</div>'
    if "text/html" in data:
        return f'<div class="wide">{data["text/html"]}</div>'
    return f"<pre>{html.escape(data.get('text/plain', ''))}</pre>"


def _figure(output: NotebookNode) -> Figure:
    alt = output.get("metadata", {}).get("image/png", {}).get("alt", "figure")
    return Figure(output.data["image/png"].replace("\n", ""), alt)


def image(figure: Figure) -> str:
    return f'<img src="data:image/png;base64,{figure.png}" alt="{html.escape(figure.alt)}">'


def _tagged(notebook: NotebookNode, tag: str) -> list[NotebookNode]:
    """Outputs of the code cells with a tag."""
    cells = [c for c in notebook.cells if c.cell_type == "code" and tag in c.metadata.get("tags", ())]
    return [output for cell in cells for output in cell.outputs]


def write_index(out: Path, reports: Iterable[Path], notebooks: Sequence[Path] = ()) -> Path:
    """Write the page `out` over executed reports, each with its headline and thumbnails, and a list of other
    executed notebooks; every one is rendered beside its file and linked."""
    cards = [_card(path, write_page(path), out.parent) for path in reports]
    links = [_link(path, write_page(path), out.parent) for path in notebooks]
    listed = f"<h2>Notebooks executed on these runs</h2>\n<ul>{''.join(links)}</ul>" if links else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    nothing = "<p>No report has been executed yet: <code>codechat report nano</code></p>"
    write_atomic(out, page("CodeChat reports", "\n".join(["<h1>Reports</h1>", *(cards or [nothing]), listed])))
    return out


def _href(target: Path, folder: Path) -> str:
    return html.escape(Path(os.path.relpath(target, folder)).as_posix())


def _link(path: Path, target: Path, folder: Path) -> str:
    return f'<li><a href="{_href(target, folder)}">{html.escape(title(read(path)))}</a></li>'


def _card(path: Path, target: Path, folder: Path) -> str:
    notebook = read(path)
    figures = [_figure(o) for o in _tagged(notebook, THUMBNAIL) if "image/png" in o.get("data", {})]
    link = _href(target, folder)
    thumbnails = "".join(f'<a href="{link}">{image(figure)}</a>' for figure in figures)
    return (
        f'<section class="card"><h2><a href="{link}">{html.escape(title(notebook))}</a></h2>\n'
        f'<pre>{html.escape(headline(notebook))}</pre>\n<div class="thumbnails">{thumbnails}</div></section>'
    )
