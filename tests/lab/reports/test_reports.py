"""Reports: their tables and sentences, how they are built, how their pages look in a browser,
and the committed ones."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pandas as pd
import pytest
from browser import Browser

from codechat.core.errors import ConfigError, RunError
from codechat.core.registry import COMMANDS
from codechat.runs import paths
from codechat_lab.reports import articles, build, html

COMMITTED = Path(__file__).resolve().parents[3] / "reports"
NEW = nbformat.v4
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


NUMBERS = {"gain": 6.479, "n": 3.0}


def test_the_numbers_of_an_answer_come_from_the_asserted_ones() -> None:
    said = articles.answer(
        NUMBERS,
        "RL adds {gain:+.1f} points.",
        "There are {n:.0f} seeds.",
        "No more is known.",
    ).data
    assert said.splitlines() == ["RL adds +6.5 points.", "There are 3 seeds.", "No more is known."]


def test_an_answer_has_no_number_that_was_not_asserted() -> None:
    with pytest.raises(KeyError):
        articles.answer(NUMBERS, "{loss}")


@pytest.fixture(scope="module")
def table() -> str:
    """A table as a page shows it: two rows, of which the second has no value at all."""
    text = "def f(x: int | None): `a` <b>" + "y" * 200
    filled = {"lr": 3e-4, "text": text, "note": "a|b"}
    empty = {"lr": None, "text": float("nan"), "note": ""}
    columns = {"note": "note", "lr": ("learning rate", "g"), "text": ("answer", articles.VERBATIM)}
    return html.prose(articles.table(pd.DataFrame([filled, empty]), columns).data)


def test_a_table_has_a_row_for_each_of_the_frame_below_its_heads(table: str) -> None:
    assert table.count("<tr>") == 3
    assert "<th>learning rate</th>" in table


def test_a_table_lets_no_text_become_markup(table: str) -> None:
    assert "<b>" not in table
    assert "int | None" in table


def test_a_table_cuts_no_text(table: str) -> None:
    assert "y" * 200 in table


def test_a_table_shows_numbers_in_their_format_and_a_dash_for_none(table: str) -> None:
    assert "<td>0.0003</td>" in table
    assert table.count("<td>–</td>") == 3


def test_published_figures_stand_beside_ours_with_what_they_mean() -> None:
    beside = html.prose(articles.beside([("pass@1", "0.86", "0.64", "another task")]).data)
    assert "<th>published</th>" in beside
    assert "<td>another task</td>" in beside


def code_cell(source: str, *tags: str, shows: Any = None) -> Any:
    """An executed cell, with one output or none."""
    outputs = [] if shows is None else [shows]
    return NEW.new_code_cell(source, outputs=outputs, metadata={"tags": list(tags)})


def display(kind: str, data: str, about: dict[str, Any] | None = None) -> Any:
    return NEW.new_output("display_data", data={kind: data}, metadata=about or {})


def article(path: Path) -> Path:
    """An executed article at `path`."""
    frame = pd.DataFrame([{"a": "x" * 300, "b": "word " * 90}])
    wide = articles.table(frame, {"a": ("a", articles.VERBATIM), "b": "b"})
    said = display("text/markdown", "RL adds 6.5 points.\nTwo.\nThree.")
    image = display("image/png", PNG, {"image/png": {"alt": "two curves"}})
    printed = NEW.new_output("stream", name="stdout", text="drawn from rows\n")
    cells = [
        NEW.new_markdown_cell("# It holds\n\n**Question.** Does it?"),
        code_cell("secret = 1", "parameters", "hide-cell"),
        code_cell("secret = 2", "injected-parameters"),
        code_cell("load()", "hide-cell", shows=printed),
        code_cell("say()", "answer", "hide-input", shows=said),
        code_cell("draw()", "thumbnail", "hide-input", shows=image),
        code_cell("compare()", "hide-input", shows=display("text/markdown", wide.data)),
    ]
    nbformat.write(NEW.new_notebook(cells=cells), path)
    return path


def test_an_article_shows_its_answer_then_its_figure_then_its_table(tmp_path: Path) -> None:
    body, _ = html.write_page(article(tmp_path / "x.ipynb")).read_text().split("<details>")
    parts = ("It holds", "RL adds 6.5 points.", 'alt="two curves"', "<table>")
    order = [body.index(part) for part in parts]
    assert order == sorted(order)
    assert body.count('class="answer"') == 1


def test_an_article_folds_its_code_and_what_it_printed(tmp_path: Path) -> None:
    body, folded = html.write_page(article(tmp_path / "x.ipynb")).read_text().split("<details>")
    for code in (
        "secret = 1",
        "secret = 2",
        "load()",
        "drawn from rows",
        "say()",
        "draw()",
        "compare()",
    ):
        assert code not in body
        assert code in folded


def test_the_index_has_an_articles_title_first_sentence_and_picture(tmp_path: Path) -> None:
    path = article(tmp_path / "x.ipynb")
    text = html.write_index(tmp_path / "index.html", [path]).read_text()
    assert "It holds" in text
    assert "RL adds 6.5 points." in text
    assert "Two." not in text
    assert text.count("<img") == 1


def test_the_index_begins_with_the_readers_own_runs_and_names_them(tmp_path: Path) -> None:
    published, mine = article(tmp_path / "a.ipynb"), article(tmp_path / "z.ipynb")
    page = html.write_index(tmp_path / "index.html", [published], own={mine: "nano-2"})
    heads = re.findall(r'href="(\w+)\.html">([^<]*)</a>', page.read_text())
    assert heads == [("z", "Your run nano-2: It holds"), ("a", "It holds")]


@pytest.fixture
def printing(tmp_path: Path) -> Path:
    """An executed notebook with markup in its prose and its outputs, and a progress bar."""
    outputs = [
        NEW.new_output("stream", name="stdout", text="<i>1</i>\n"),
        NEW.new_output("stream", name="stderr", text="50%|#"),
    ]
    prose = NEW.new_markdown_cell("# A `claim` holds\n\n<script>alert(1)</script>")
    cells = [prose, NEW.new_code_cell("print(1)", outputs=outputs)]
    nbformat.write(NEW.new_notebook(cells=cells), tmp_path / "x.ipynb")
    return tmp_path / "x.ipynb"


def test_a_page_escapes_prose_and_outputs(printing: Path) -> None:
    text = html.write_page(printing).read_text()
    assert "<script" not in text
    assert "<i>" not in text
    assert "&lt;i&gt;1" in text


def test_a_page_shows_no_progress_bar(printing: Path) -> None:
    assert "50%" not in html.write_page(printing).read_text()


def test_a_page_has_a_title_and_fits_phones_and_the_dark(printing: Path) -> None:
    text = html.write_page(printing).read_text()
    assert "<title>A claim holds</title>" in text
    assert "viewport" in text
    assert "prefers-color-scheme: dark" in text


def test_a_page_needs_no_network(printing: Path) -> None:
    assert "http" not in html.write_page(printing).read_text()


def test_an_index_elsewhere_links_to_the_page_by_its_relative_place(printing: Path) -> None:
    index = html.write_index(printing.parent / "reports" / "index.html", [printing]).read_text()
    assert 'href="../x.html"' in index


def test_without_a_name_the_command_lists_the_reports(capsys: pytest.CaptureFixture) -> None:
    COMMANDS["report"].run([])
    assert re.findall(r"^\w+", capsys.readouterr().out, re.M) == list(build.templates())


def test_an_unknown_report_is_refused_before_any_is_built(home: Path) -> None:
    with pytest.raises(ConfigError, match="nothing.*nano"):
        COMMANDS["report"].run(["nano", "nothing"])
    assert not list((home / "reports").glob("*.ipynb"))


CUT = '# %% tags=["parameters", "hide-cell"]\nout = ""\n\n# %%\nraise KeyError("no such run")\n'


@pytest.fixture
def made_by(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """made_by(name, source): the project has one report, of this source."""

    def make(name: str, source: str) -> None:
        (home / "nbs_py").mkdir()
        shutil.copy(COMMITTED.parent / "jupytext.toml", home)
        (home / "nbs_py" / f"91_{name}.py").write_text(source)
        monkeypatch.setattr(paths, "SHIPPED", home)
        monkeypatch.setattr(build, "templates", lambda: {name: f"91_{name}"})

    return make


def test_a_report_that_fails_names_its_cell_and_leaves_its_notebook_without_a_page(
    home: Path, made_by: Callable[[str, str], None]
) -> None:
    made_by("cut", CUT)
    (home / "cut").mkdir()
    (home / "cut" / "cut.ipynb").write_text("an earlier report")
    with pytest.raises(RunError, match="cut.*3 of 3.*KeyError: 'no such run'"):
        build.build("cut", "cut")
    assert (home / "cut" / "cut.ipynb").read_text() == "an earlier report"
    cells = html.read(home / build.FAILED / "cut.ipynb").cells
    hidden = [cell.metadata.get("jupyter", {}).get("source_hidden") for cell in cells]
    assert hidden == [True, None, None], "folded there too"
    assert not (home / "cut" / "cut.html").exists()


@pytest.fixture
def opened(chromium: Browser, tmp_path: Path) -> Callable[[int, str], Browser]:
    """opened(width, scheme): the browser with an article's page."""

    def show(width: int, scheme: str) -> Browser:
        chromium.fresh(width, scheme=scheme)
        chromium.open(html.write_page(article(tmp_path / "x.ipynb")).as_uri())
        return chromium

    return show


SCREENS = pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])


@SCREENS
def test_a_page_fits_its_screen(
    opened: Callable[[int, str], Browser], width: int, scheme: str
) -> None:
    page = opened(width, scheme)
    assert page.overflow() == 0, "wide tables scroll by themselves"
    code_width = page.ask("document.querySelector('td:has(code)').clientWidth")
    assert code_width > 200, "code is not a letter wide"
    assert page.problems == []


@SCREENS
def test_a_page_is_dark_where_its_reader_wants_it(
    opened: Callable[[int, str], Browser], width: int, scheme: str
) -> None:
    page = opened(width, scheme)
    colour = "getComputedStyle(document.body).backgroundColor"
    lightness = page.ask(f"{colour}.match(/\\d+/g).map(Number)[0]")
    assert (lightness > 128) == (scheme == "light")


@SCREENS
def test_the_code_of_a_page_is_opened_with_the_keyboard(
    opened: Callable[[int, str], Browser], width: int, scheme: str
) -> None:
    page = opened(width, scheme)
    page.ask("document.querySelector('summary').focus()")
    page.enter()
    assert page.ask("document.querySelector('details').open")
    assert page.problems == []


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


@pytest.fixture
def drawing(home: Path, made_by: Callable[[str, str], None]) -> Path:
    """A project whose report "draws" is committed with its rows; returns these."""
    made_by("draws", DRAWS)
    (home / "reports" / "draws" / "data").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(), home / "reports" / "draws.ipynb")
    rows = home / "reports" / "draws" / "data" / "rows.csv"
    rows.write_text("one")
    return rows


@pytest.mark.slow
def test_a_report_from_committed_rows_goes_to_a_folder_that_git_ignores(
    home: Path, drawing: Path
) -> None:
    """Its notebook, page and pictures; what is committed stays as it is."""
    notebook = home / "reports" / "draws.ipynb"
    before = notebook.read_bytes()
    COMMANDS["report"].run(["draws", "--frozen"])
    assert notebook.read_bytes() == before
    assert drawing.read_text() == "one"
    assert not {*(home / "reports").rglob("*.txt")}
    drawn = home / "runs" / "drawn" / "report"
    assert "True one" in (drawn / "draws.html").read_text()
    assert (drawn / "draws" / "picture.txt").read_text() == "one"
    index = (home / "reports" / "index.html").read_text()
    assert 'href="../runs/drawn/report/draws.html"' in index


@pytest.mark.slow
def test_a_report_reads_the_committed_rows_each_time(home: Path, drawing: Path) -> None:
    COMMANDS["report"].run(["draws", "--frozen"])
    drawing.write_text("two")
    COMMANDS["report"].run(["draws", "--frozen"])
    drawn = home / "runs" / "drawn" / "report"
    assert "True two" in (drawn / "draws.html").read_text()
    assert (drawn / "draws" / "picture.txt").read_text() == "two"
    assert drawing.read_text() == "two"


@pytest.mark.slow
def test_a_report_is_written_where_it_is_committed_only_when_told_so(
    home: Path, drawing: Path
) -> None:
    COMMANDS["report"].run(["draws", "--frozen", "--out", "reports"])
    assert "True one" in (home / "reports" / "draws.html").read_text()


def pictures(notebook: Any) -> int:
    """How many pictures an executed notebook shows."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in shown)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in COMMITTED.glob("*.ipynb")))
def test_a_committed_report_is_drawn_again_from_its_frozen_rows_alike(
    name: str, tmp_path: Path
) -> None:
    shutil.copytree(COMMITTED / name / "data", tmp_path / name / "data")
    rows = contents(tmp_path / name)
    page = build.build(name, str(tmp_path), frozen=True)  # its own last cells assert the headline
    old = html.read(COMMITTED / f"{name}.ipynb")
    new = html.read(tmp_path / f"{name}.ipynb")
    assert html.answer(new) == html.answer(old)
    assert len(html.answer(new)) > 100
    assert pictures(new) == pictures(old) > 1
    assert page.is_file()
    assert {path: path.read_bytes() for path in rows} == rows


ARTICLES = ("pretrain_curves", "specialist", "staircase")


class Output(NamedTuple):
    """What a cell of a notebook shows, and the cell's tags."""

    tags: set[str]
    shown: Any

    def has(self, kind: str) -> bool:
        return kind in self.shown.get("data", {})

    @property
    def kind(self) -> str:
        return "image/png" if self.has("image/png") else "text/markdown"


def outputs_of(name: str) -> list[Output]:
    """The outputs of a committed article, in order."""
    found = []
    for cell in html.read(COMMITTED / f"{name}.ipynb").cells:
        for output in cell.get("outputs", ()):
            found.append(Output(set(cell.metadata.tags), output))
    return found


def seen_in(name: str) -> list[Output]:
    """Those that its page does not fold."""
    return [output for output in outputs_of(name) if "hide-cell" not in output.tags]


@pytest.mark.parametrize("name", ARTICLES)
def test_a_committed_article_answers_in_three_lines(name: str) -> None:
    assert len(html.answer(html.read(COMMITTED / f"{name}.ipynb")).splitlines()) == 3


@pytest.mark.parametrize("name", ARTICLES)
def test_a_committed_article_shows_no_code_and_no_warnings(name: str) -> None:
    for output in outputs_of(name):
        assert {"hide-input", "hide-cell"} & output.tags
        assert output.shown.get("name") != "stderr"


@pytest.mark.parametrize("name", ARTICLES)
def test_a_picture_of_a_committed_article_is_described(name: str) -> None:
    for output in outputs_of(name):
        if output.has("image/png"):
            assert len(output.shown.metadata["image/png"]["alt"]) > 15


@pytest.mark.parametrize("name", ARTICLES)
def test_a_committed_article_begins_with_the_answer_the_figure_and_what_was_published(
    name: str,
) -> None:
    answer, figure, table = seen_in(name)[:3]
    kinds = [output.kind for output in (answer, figure, table)]
    assert kinds == ["text/markdown", "image/png", "text/markdown"]
    head = "|  | published | ours | what it means |"
    assert table.shown.data["text/markdown"].startswith(head)


@pytest.mark.parametrize("name", ARTICLES)
def test_tables_of_a_committed_article_have_words_for_column_names(name: str) -> None:
    """They are written by `articles.table`, not by pandas."""
    assert not [output for output in seen_in(name) if output.has("text/html")]
