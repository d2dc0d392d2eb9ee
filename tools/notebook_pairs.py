"""Pairs of notebooks: build them from their sources, and find those that are stale.

    python tools/notebook_pairs.py build [NAME ...]     execute the source in an empty folder; write and stamp
        notebooks/NAME.ipynb
    python tools/notebook_pairs.py prose [NAME ...]     write changed Markdown only and keep the outputs
    python tools/notebook_pairs.py check [NAME ...]     pairs that differ, and outputs older than their code

`build` removes what differs between machines from the outputs, and stamps the sha256 of the code
cells. Both writers link the first cell to its neighbours. Report templates are committed without
outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jupytext
import nbformat
from jupytext.config import load_jupytext_config
from nbformat import NotebookNode

from codechat.core.atomic_files import write_atomic
from codechat.core.errors import DataError, MissingFile, nearest
from codechat.runs import paths
from codechat_lab.reports import html, notebooks
from codechat_lab.reports.notebooks import NotebookError, code_cells, is_template

MAX_BYTES = 300_000
# of the first cell, its table included
RESULT = re.compile(r"\*\*Result\.\*\*(.*?)(?=\n\n\*\*(?!Also\.)|\Z)", re.S)
NUMBER = re.compile(r"(?<![\w.])([-+\u2212]?)(\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?) ?(%?)")
LINKS = re.compile(r"\n+(Previous|Next): \[[^\n]*\.ipynb\)$")


def source_of(name: str) -> NotebookNode:
    """The notebook of a source, linked to its neighbours."""
    notebook = notebooks.source_of(name)
    links = navigation(name)
    if links:
        first = notebook.cells[0]
        first.source = LINKS.sub("", first.source) + f"\n\n{links}"
    return notebook


def navigation(name: str) -> str:
    """The line that links a walk-through to its neighbours; "" without neighbours and for a
    report template."""
    chain = [other for other in notebooks.names() if not is_template(other)]
    if name not in chain:
        return ""
    at = chain.index(name)
    sides = (("Previous", chain[max(0, at - 1) : at]), ("Next", chain[at + 1 : at + 2]))
    return " · ".join(
        f"{side}: [{other.replace('_', ' ')}]({other}.ipynb)"
        for side, near in sides
        for other in near
    )


def executed(name: str) -> Path:
    return paths.SHIPPED / "notebooks" / f"{name}.ipynb"


def code_sha256(notebook: NotebookNode) -> str:
    """Hash of the code cells' sources in order, without outputs, Markdown and metadata."""
    return hashlib.sha256(
        "\0".join(cell.source.rstrip() for cell in code_cells(notebook)).encode()
    ).hexdigest()


def stamp_of(notebook: NotebookNode) -> str | None:
    return notebook.metadata.get("codechat", {}).get("code_sha256")


# ---------------------------------------------------------------- build


def build(name: str, timeout_s: float = 600) -> Path:
    """Write notebooks/NAME.ipynb from its source; nothing is written unless every cell ran.

    Raises NotebookError if a cell fails, DataError if the .ipynb holds code that its source
    lacks."""
    notebook = source_of(name)
    path = executed(name)
    old = html.read(path) if path.exists() else notebook
    if stamp_of(old) and code_sha256(old) not in (stamp_of(old), code_sha256(notebook)):
        raise DataError(
            f"{path} holds code that nbs_py/{name}.py lacks; "
            "keep it with `jupytext --sync`, or delete it"
        )
    if not is_template(name):
        # the same numbers on a machine with bfloat16
        os.environ.setdefault("CODECHAT_DTYPE", "float32")
        with tempfile.TemporaryDirectory() as empty:
            notebooks.execute(notebook, cwd=Path(empty), timeout_s=timeout_s)
            scrub(
                notebook,
                {empty: ".", sys.prefix: ".venv", str(paths.SHIPPED): ".", str(Path.home()): "~"},
            )
    return write_pair(name, notebook)


def rewrite_prose(name: str) -> Path:
    """Write the source's Markdown into notebooks/NAME.ipynb, outputs kept. DataError if the
    code needs a build."""
    notebook = source_of(name)
    done = html.read(executed(name))
    if not stamp_of(done) == code_sha256(notebook) == code_sha256(done):
        raise DataError(
            f"notebooks/{name}.ipynb was executed from other code; run `make notebooks ARGS={name}`"
        )
    for cell, before in zip(code_cells(notebook), code_cells(done), strict=True):
        cell.outputs = before.outputs
        cell.execution_count = before.execution_count
    return write_pair(name, notebook)


def write_pair(name: str, notebook: NotebookNode) -> Path:
    """Stamp a notebook and write both files where they changed; returns that of the notebook."""
    notebook.metadata["codechat"] = {"code_sha256": code_sha256(notebook)}
    source = paths.SHIPPED / "nbs_py" / f"{name}.py"
    path = executed(name)
    path.parent.mkdir(exist_ok=True)
    text = jupytext.writes(
        notebook, fmt="py:percent", config=load_jupytext_config(str(paths.SHIPPED))
    )
    for file, new in ((source, text), (path, nbformat.writes(notebook) + "\n")):
        if not file.exists() or file.read_text(encoding="utf-8") != new:
            write_atomic(file, new)
    return path


def scrub(notebook: NotebookNode, places: Mapping[str, str]) -> None:
    """Replace what differs between machines in text outputs: folders, the kernel's own files,
    addresses."""

    def clean(text: str) -> str:
        text = re.sub(r"[^\s\"'(]*ipykernel_\d+[/\\]\d+\.py", "<cell>", text)
        for place, name in places.items():
            text = text.replace(place, name) if len(place) > 1 else text
        return re.sub(r"\bat 0x[0-9a-fA-F]{6,}", "at 0x...", text)

    for cell in code_cells(notebook):  # which type this machine computes in is no result
        cell.outputs = [
            output for output in cell.outputs if not output.get("text", "").startswith("compute: ")
        ]
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        if "text" in output:
            output["text"] = clean(output["text"])
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/") and isinstance(value, str):
                output["data"][kind] = clean(value)


# ---------------------------------------------------------------- check


def check(chosen: Sequence[str] = ()) -> list[str]:
    """Problems of the pairs, a line each: incomplete, stale, not executed from top to bottom,
    with numbers of its own, too large."""
    known = notebooks.names()
    problems = [
        f"notebooks/{name}.ipynb: {problem}; run `make notebooks ARGS={name}`"
        for name in chosen or known
        for problem in problems_of(name)
    ]
    lonely = sorted({path.stem for path in executed("").parent.glob("*.ipynb")} - set(known))
    return problems + [f"notebooks/{name}.ipynb: has no source nbs_py/{name}.py" for name in lonely]


def problems_of(name: str) -> Iterator[str]:
    source = source_of(name)
    path = executed(name)
    template = is_template(name)
    if navigation(name) not in (paths.SHIPPED / "nbs_py" / f"{name}.py").read_text(
        encoding="utf-8"
    ):
        yield "the links to neighbours in its source are old"
    if not path.exists():
        yield "is missing"
        return
    notebook = html.read(path)
    once = [None if template else n + 1 for n in range(len(code_cells(source)))]
    if cells_of(notebook) != cells_of(source):
        yield "its cells differ from its source"
    if (
        stamp_of(notebook) != code_sha256(source)
        or [c.execution_count for c in code_cells(notebook)] != once
    ):
        not_executed = "its outputs are not those of its source, executed once from top to bottom"
        yield "is not stripped" if template else not_executed
    stale = numbers_shown_nowhere(notebook)
    if stale:
        yield f"no output shows what its Result claims: {', '.join(stale)}"
    size = path.stat().st_size
    if size > MAX_BYTES:
        yield f"{size} bytes; at most {MAX_BYTES} are allowed: fewer or smaller figures"


def numbers(text: str) -> list[tuple[str, float, bool]]:
    """(as written without commas, its size, whether a percentage) of each number."""
    found = (
        (sign, re.sub("[,_]", "", digits), share) for sign, digits, share in NUMBER.findall(text)
    )
    return [(sign + digits, float(digits), bool(share)) for sign, digits, share in found]


def numbers_shown_nowhere(notebook: NotebookNode) -> list[str]:
    """Numbers of the Result that no output shows and no cell asserts, rounded as the Result
    rounds them; a percentage may be a share.

    Whole numbers up to 12 without a sign are taken to count things."""
    result = RESULT.search(notebook.cells[0].source)
    claimed = numbers(
        re.sub(r"\]\([^)]*\)|[Nn]otebook \d+|95 % interval", "", result[1] if result else "")
    )
    texts = [cell.source for cell in code_cells(notebook)]
    for output in (output for cell in code_cells(notebook) for output in cell.outputs):
        texts += [
            output.get("text", ""),
            *(v for k, v in output.get("data", {}).items() if k.startswith("text/")),
        ]
    shown = numbers("\n".join(texts))

    def stands(written: str, size: float, percent: bool) -> bool:
        exact = written.isdigit() and not percent
        half = 0.500001 * 10.0 ** -len(written.partition(".")[2])
        return (exact and size <= 12) or any(
            value == size
            if exact
            else min(abs(value * scale - size) for scale in (1, 100, 0.01)) <= half
            for _, value, _ in shown
        )

    return sorted(
        {written for written, size, percent in claimed if not stands(written, size, percent)}
    )


def cells_of(notebook: NotebookNode) -> list[tuple[str, str, tuple[str, ...]]]:
    return [
        (c.cell_type, c.source.rstrip(), tuple(c.metadata.get("tags", ()))) for c in notebook.cells
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """`build`, `prose` or `check` for the named notebooks, or all; returns 1 if any has a
    problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("build", "prose", "check"))
    parser.add_argument("names", nargs="*", help="names without folder and suffix (default: all)")
    args = parser.parse_args(argv)
    known = notebooks.names()
    failed = False
    for name in set(args.names) - set(known):
        raise MissingFile(
            f"no notebook {name}: nbs_py/{name}.py does not exist{nearest(name, known)}"
        )
    for name in args.names or known if args.action != "check" else ():
        begin = time.perf_counter()
        try:
            path = (build if args.action == "build" else rewrite_prose)(name)
            print(
                f"written {time.perf_counter() - begin:6.1f} s  {path.relative_to(paths.SHIPPED)}",
                flush=True,
            )
        # the committed notebook stays; the others are still built
        except (
            NotebookError,
            DataError,
        ) as error:
            failed = True
            print(f"FAILED {name}: {error}\n{error.__cause__ or ''}", file=sys.stderr, flush=True)
    problems = check(args.names)
    print("\n".join(problems) or "notebooks are paired, current and executed")
    return int(failed or bool(problems))


if __name__ == "__main__":
    from codechat.cli import guarded

    sys.exit(guarded(main, sys.argv[1:]))
