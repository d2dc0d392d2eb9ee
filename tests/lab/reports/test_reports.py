"""Reports: their tables and sentences, how they are built, how their pages look in a browser,
and the committed ones."""

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from browser import Browser

from codechat.core.errors import ConfigError, RunError
from codechat.core.registry import COMMANDS
from codechat.runs import paths
from codechat_lab.reports import articles, build, html

COMMITTED = Path(__file__).resolve().parents[3] / "reports"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


def test_the_numbers_of_an_answer_come_from_the_asserted_ones() -> None:
    numbers = {"gain": 6.479, "n": 3.0}
    said = articles.answer(
        numbers,
        "RL adds {gain:+.1f} points.",
        "There are {n:.0f} seeds.",
        "No more is known.",
    ).data
    assert said.splitlines() == ["RL adds +6.5 points.", "There are 3 seeds.", "No more is known."]
    with pytest.raises(KeyError):
        articles.answer(numbers, "{loss}")


def test_a_table_cuts_nothing_and_lets_no_text_become_markup() -> None:
    text = "def f(x: int | None): `a` <b>" + "y" * 200
    frame = pd.DataFrame(
        [dict(lr=3e-4, text=text, note="a|b"), dict(lr=None, text=float("nan"), note="")]
    )
    columns = {"note": "note", "lr": ("learning rate", "g"), "text": ("answer", articles.VERBATIM)}
    shown = html.prose(articles.table(frame, columns).data)
    assert shown.count("<tr>") == 3
    assert "<b>" not in shown
    assert "y" * 200 in shown
    assert "int | None" in shown
    assert "<th>learning rate</th>" in shown
    assert "<td>0.0003</td>" in shown
    assert shown.count("<td>–</td>") == 3
    beside = html.prose(articles.beside([("pass@1", "0.86", "0.64", "another task")]).data)
    assert "<th>published</th>" in beside
    assert "<td>another task</td>" in beside


def article(path: Path) -> Path:
    """An executed article at `path`."""
    new = nbformat.v4
    image = new.new_output(
        "display_data", data={"image/png": PNG}, metadata={"image/png": {"alt": "two curves"}}
    )
    said = new.new_output(
        "display_data", data={"text/markdown": "RL adds 6.5 points.\nTwo.\nThree."}
    )
    wide = articles.table(
        pd.DataFrame([dict(a="x" * 300, b="word " * 90)]), {"a": ("a", articles.VERBATIM), "b": "b"}
    )
    cells = [
        ("secret = 1", ("parameters", "hide-cell"), ()),
        ("secret = 2", ("injected-parameters",), ()),
        (
            "load()",
            ("hide-cell",),
            (new.new_output("stream", name="stdout", text="drawn from rows\n"),),
        ),
        ("say()", ("answer", "hide-input"), (said,)),
        ("draw()", ("thumbnail", "hide-input"), (image,)),
        (
            "compare()",
            ("hide-input",),
            (new.new_output("display_data", data={"text/markdown": wide.data}),),
        ),
    ]
    code = [
        new.new_code_cell(s, outputs=list(outputs), metadata=dict(tags=list(tags)))
        for s, tags, outputs in cells
    ]
    nbformat.write(
        new.new_notebook(
            cells=[new.new_markdown_cell("# It holds\n\n**Question.** Does it?"), *code]
        ),
        path,
    )
    return path


def test_an_article_shows_answer_and_figure_and_folds_its_code_and_the_index_names_it(
    tmp_path: Path,
) -> None:
    text = html.write_page(article(tmp_path / "x.ipynb")).read_text()
    body, folded = text.split("<details>")
    order = [
        body.index(part)
        for part in ("It holds", "RL adds 6.5 points.", 'alt="two curves"', "<table>")
    ]
    assert order == sorted(order)
    assert body.count('class="answer"') == 1
    for code in (
        "secret = 1",
        "secret = 2",
        "load()",
        "drawn from rows",
        "say()",
        "draw()",
        "compare()",
    ):
        assert code not in body and code in folded, code
    text = html.write_index(tmp_path / "index.html", [tmp_path / "x.ipynb"]).read_text()
    assert "It holds" in text
    assert "RL adds 6.5 points." in text
    assert "Two." not in text
    assert text.count("<img") == 1


def test_a_page_escapes_outputs_and_needs_nothing_else(tmp_path: Path) -> None:
    new = nbformat.v4
    said = {"stdout": "<i>1</i>\n", "stderr": "50%|#"}
    outputs = [new.new_output("stream", name=name, text=text) for name, text in said.items()]
    prose = new.new_markdown_cell("# A `claim` holds\n\n<script>alert(1)</script>")
    cells = [prose, new.new_code_cell("print(1)", outputs=outputs)]
    path = tmp_path / "x.ipynb"
    nbformat.write(new.new_notebook(cells=cells), path)
    text = html.write_page(path).read_text()
    assert "<script" not in text
    assert "<i>" not in text
    assert "50%" not in text
    assert "&lt;i&gt;1" in text
    assert "<title>A claim holds</title>" in text
    assert "viewport" in text
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text
    index = html.write_index(tmp_path / "reports" / "index.html", [path]).read_text()
    assert 'href="../x.html"' in index


def test_an_unknown_report_and_one_that_fails(
    home: Path, monkeypatch: Any, capsys: pytest.CaptureFixture
) -> None:
    COMMANDS["report"].run([])
    assert re.findall(r"^\w+", capsys.readouterr().out, re.M) == list(build.templates())
    with pytest.raises(ConfigError, match="nothing.*nano"):
        COMMANDS["report"].run(["nano", "nothing"])
    assert not list((home / "reports").glob("*.ipynb"))
    (home / "nbs_py").mkdir()
    shutil.copy(COMMITTED.parent / "jupytext.toml", home)
    cut = '# %% tags=["parameters", "hide-cell"]\nout = ""\n\n# %%\nraise KeyError("no such run")\n'
    (home / "nbs_py" / "91_cut.py").write_text(cut)
    monkeypatch.setattr(paths, "SHIPPED", home)
    monkeypatch.setattr(build, "templates", lambda: {"cut": "91_cut"})
    with pytest.raises(RunError, match="cut.*3 of 3.*KeyError: 'no such run'"):
        build.build("cut", "cut")
    cells = html.read(home / "cut" / "cut.ipynb").cells
    assert [c.metadata.get("jupyter", {}).get("source_hidden") for c in cells] == [
        True,
        None,
        None,
    ], "folded there too"
    assert not (home / "cut" / "cut.html").exists()


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_a_page_fits_its_screen_and_opens_its_code(
    chromium: Browser,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    chromium.fresh(width, scheme=scheme)
    chromium.open(html.write_page(article(tmp_path / "x.ipynb")).as_uri())
    assert chromium.overflow() == 0, "wide tables scroll by themselves"
    assert chromium.ask("document.querySelector('td:has(code)').clientWidth") > 200, (
        "code is not a letter wide"
    )
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (chromium.ask(lightness) > 128) == (scheme == "light")
    chromium.ask("document.querySelector('summary').focus()")
    chromium.enter()
    assert chromium.ask("document.querySelector('details').open")
    assert chromium.problems == []


DRAWS = """# %% tags=["parameters", "hide-cell"]
out, frozen = "", False

# %%
from pathlib import Path
from codechat.runs import paths
folder = paths.ROOT / out
rows = (folder / "data" / "rows.csv").read_text()
(folder / "picture.txt").write_text(rows)
print(frozen, rows)
"""


@pytest.mark.slow
def test_a_report_from_committed_rows_leaves_what_is_committed_as_it_is(
    home: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Its notebook, page and pictures go to runs/drawn/report, which git ignores, and it reads
    the rows as they are committed, each time."""
    (home / "nbs_py").mkdir()
    shutil.copy(COMMITTED.parent / "jupytext.toml", home)
    (home / "nbs_py" / "91_draws.py").write_text(DRAWS)
    monkeypatch.setattr(paths, "SHIPPED", home)
    monkeypatch.setattr(build, "templates", lambda: {"draws": "91_draws"})
    (home / "reports" / "draws" / "data").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(), home / "reports" / "draws.ipynb")
    for rows in ("one", "two"):
        (home / "reports" / "draws" / "data" / "rows.csv").write_text(rows)
        before = {
            path: path.read_bytes()
            for path in (home / "reports").rglob("*")
            if path.is_file() and path.suffix != ".html"
        }
        COMMANDS["report"].run(["draws", "--frozen"])
        assert before == {path: path.read_bytes() for path in before}
        assert not {*(home / "reports").rglob("*.txt")}
        drawn = home / "runs" / "drawn" / "report"
        assert f"True {rows}" in (drawn / "draws.html").read_text()
        assert (drawn / "draws" / "picture.txt").read_text() == rows
        assert (
            'href="../runs/drawn/report/draws.html"'
            in (home / "reports" / "index.html").read_text()
        )
    COMMANDS["report"].run(["draws", "--frozen", "--out", "reports"])
    assert "True two" in (home / "reports" / "draws.html").read_text(), "to commit it: say so"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in COMMITTED.glob("*.ipynb")))
def test_a_committed_report_is_drawn_again_from_its_frozen_rows_alike(
    name: str, tmp_path: Path
) -> None:
    shutil.copytree(COMMITTED / name / "data", tmp_path / name / "data")
    before = sorted(
        (path, path.read_bytes()) for path in (tmp_path / name).rglob("*") if path.is_file()
    )
    page = build.build(name, str(tmp_path), frozen=True)  # its own last cells assert the headline
    old, new = (html.read(folder / f"{name}.ipynb") for folder in (COMMITTED, tmp_path))
    said = [html.answer(notebook) for notebook in (old, new)]
    assert said[0] == said[1]
    assert len(said[0]) > 100
    shown = [
        sum("image/png" in o.get("data", {}) for c in nb.cells for o in c.get("outputs", ()))
        for nb in (old, new)
    ]
    assert shown[0] == shown[1] > 3
    assert page.is_file()
    assert before == sorted((p, p.read_bytes()) for p, _ in before)


ARTICLES = ("pretrain_curves", "specialist", "staircase")


@pytest.mark.parametrize("name", ARTICLES)
def test_a_committed_article_has_its_answer_first_and_shows_no_code(name: str) -> None:
    notebook = html.read(COMMITTED / f"{name}.ipynb")
    shown = [
        (cell, output)
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert len(html.answer(notebook).splitlines()) == 3
    for cell, output in shown:
        assert output.get("name") != "stderr"
        assert {"hide-input", "hide-cell"} & set(cell.metadata.tags)
        if "image/png" in output.get("data", {}):
            assert len(output.metadata["image/png"]["alt"]) > 15
    seen = [output for cell, output in shown if "hide-cell" not in cell.metadata.tags]
    kinds = [
        next(k for k in ("image/png", "text/markdown") if k in output.data) for output in seen[:3]
    ]
    assert kinds == ["text/markdown", "image/png", "text/markdown"], (
        "the answer, the figure, the table"
    )
    assert seen[2].data["text/markdown"].startswith("|  | published | ours | what it means |")
    assert not [output for output in seen if "text/html" in output.data], (
        "tables have words for column names"
    )
