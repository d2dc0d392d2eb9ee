"""Reports that read as articles: their tables and sentences, and how their pages look in a browser."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pandas as pd
import pytest
from browser import CHROMIUM, Browser

from codechat.reports import articles, html, notebooks
from codechat.runs import paths

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


def test_the_numbers_of_an_answer_come_from_the_asserted_ones() -> None:
    numbers = {"gain": 6.479, "n": 3.0}
    said = articles.answer(numbers, "RL adds {gain:+.1f} points.", "There are {n:.0f} seeds.", "No more is known.").data
    assert said.splitlines() == ["RL adds +6.5 points.", "There are 3 seeds.", "No more is known."]
    with pytest.raises(KeyError):
        articles.answer(numbers, "{loss}")


def test_a_table_cuts_nothing_and_lets_no_text_become_markup() -> None:
    text = "def f(x: int | None): `a` <b>" + "y" * 200
    frame = pd.DataFrame([dict(lr=3e-4, text=text, note="a|b"), dict(lr=None, text=float("nan"), note="")])
    columns = {"note": "note", "lr": ("learning rate", "g"), "text": ("answer", articles.VERBATIM)}
    shown = html.prose(articles.table(frame, columns).data)
    assert shown.count("<tr>") == 3 and "<b>" not in shown and "y" * 200 in shown and "int | None" in shown
    assert "<th>learning rate</th>" in shown and "<td>0.0003</td>" in shown and shown.count("<td>–</td>") == 3
    beside = html.prose(articles.beside([("pass@1", "0.86", "0.64", "another task")]).data)
    assert "<th>published</th>" in beside and "<td>another task</td>" in beside


def article(path: Path) -> Path:
    """An executed article at `path`."""
    new = nbformat.v4
    image = new.new_output("display_data", data={"image/png": PNG}, metadata={"image/png": {"alt": "two curves"}})
    said = new.new_output("display_data", data={"text/markdown": "RL adds 6.5 points.\nTwo.\nThree."})
    wide = articles.table(pd.DataFrame([dict(a="x" * 300, b="word " * 90)]), {"a": ("a", articles.VERBATIM), "b": "b"})
    cells = [
        ("# It holds\n\n**Question.** Does it?", (), ()),
        ("secret = 1", ("parameters", "hide-cell"), ()),
        ("secret = 2", ("injected-parameters",), ()),
        ("load()", ("hide-cell",), (new.new_output("stream", name="stdout", text="drawn from rows\n"),)),
        ("say()", ("answer", "hide-input"), (said,)),
        ("draw()", ("thumbnail", "hide-input"), (image,)),
        ("compare()", ("hide-input",), (new.new_output("display_data", data={"text/markdown": wide.data}),)),
    ]
    made = []
    for source, tags, outputs in cells:
        made.append(new.new_code_cell(source, outputs=list(outputs)) if tags else new.new_markdown_cell(source))
        made[-1].metadata["tags"] = list(tags)
    nbformat.write(new.new_notebook(cells=made), path)
    return path


def test_an_article_shows_answer_and_figure_and_folds_all_code_at_its_end(tmp_path: Path) -> None:
    text = html.write_page(article(tmp_path / "x.ipynb")).read_text()
    body, folded = text.split("<details>")
    order = [body.index(part) for part in ("It holds", "RL adds 6.5 points.", 'alt="two curves"', "<table>")]
    assert order == sorted(order) and body.count('class="answer"') == 1
    for code in ("secret = 1", "secret = 2", "load()", "drawn from rows", "say()", "draw()", "compare()"):
        assert code not in body and code in folded, code


def test_a_page_escapes_outputs_and_needs_nothing_else(tmp_path: Path) -> None:
    cells = [
        nbformat.v4.new_markdown_cell("# A `claim` holds\n\n<script>alert(1)</script>"),
        nbformat.v4.new_code_cell("print(1)"),
    ]
    cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="<i>1</i>\n"),
                        nbformat.v4.new_output("stream", name="stderr", text="50%|#####")]  # fmt: skip
    path = tmp_path / "x.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    text = html.write_page(path).read_text()
    assert "<script" not in text and "<i>" not in text and "50%" not in text and "&lt;i&gt;1" in text
    assert "<title>A claim holds</title>" in text and "viewport" in text and "prefers-color-scheme: dark" in text
    assert "http" not in text
    index = html.write_index(tmp_path / "reports" / "index.html", [path]).read_text()
    assert 'href="../x.html"' in index


def test_the_index_shows_title_first_sentence_and_picture(tmp_path: Path) -> None:
    text = html.write_index(tmp_path / "index.html", [article(tmp_path / "x.ipynb")]).read_text()
    assert "It holds" in text and "RL adds 6.5 points." in text and "Two." not in text and text.count("<img") == 1


def test_an_executed_copy_folds_its_code_in_jupyter_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("nbs_py", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jupytext.toml").write_text((Path(__file__).parents[2] / "jupytext.toml").read_text())
    source = '# %% tags=["hide-input"]\nprint(1)\n\n# %%\nprint(2)\n'
    (tmp_path / "nbs_py" / "91_x.py").write_text(source)
    monkeypatch.setattr(paths, "SHIPPED", tmp_path)
    notebooks.execute_copy("91_x", tmp_path / "out" / "x.ipynb", {})
    hidden = [c.metadata.get("jupyter", {}).get("source_hidden") for c in html.read(tmp_path / "out" / "x.ipynb").cells]
    assert hidden == [True, None]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_a_page_fits_its_screen_and_opens_its_code_by_keyboard(tmp_path: Path, width: int, scheme: str) -> None:
    page = html.write_page(article(tmp_path / "x.ipynb"))
    with Browser(tmp_path / "profile", width) as browser:
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(page.as_uri())
        assert browser.ask("document.documentElement.scrollWidth") == width, "wide tables scroll by themselves"
        assert browser.ask("document.querySelector('td:has(code)').clientWidth") > 200, "code is not a letter wide"
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        assert (browser.ask(lightness) > 128) == (scheme == "light")
        browser.ask("document.querySelector('summary').focus()")
        browser.enter()
        assert browser.ask("document.querySelector('details').open") and browser.problems == []
