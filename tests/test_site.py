"""The web site: gathered and built without a warning; each page is there, every link leads
somewhere, and nothing is loaded from elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("latex2mathml", reason="pip install -e '.[site]'")

import site_pages  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def test_links_and_scripts_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#top"></a><a href="#top"></a><a href="c.html"></a>'
        '<a href="#gone"></a><img src="https://elsewhere/x.png"><a href="https://elsewhere"></a>'
        '<script type="module">import("https://elsewhere/y.js")</script>'
    )
    (tmp_path / "b.html").write_text("<h1>B</h1>")
    assert site_pages.faults_of(tmp_path) == [
        'a.html loads import("https://',
        "a.html loads https://elsewhere/x.png",
        "a.html links to b.html#top, which has no such heading",
        "a.html links to c.html, which does not exist",
        "a.html links to #gone, which has no such heading",
    ]


def test_a_site_without_pages_is_a_fault(tmp_path: Path) -> None:
    assert site_pages.faults_of(tmp_path) == [f"{tmp_path} has no pages"]


def test_links_of_notebooks_lead_to_pages_and_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_pages, "BUILD", tmp_path)
    page = ROOT / "notebooks" / "07_reinforce.ipynb"
    text = "[a](08_did_it_learn.ipynb) [b](../docs/tasks.md#your-own-task) [c](../codechat/grpo.py)"
    assert site_pages.adapt(text, page) == (
        "[a](08_did_it_learn.html) [b](../docs/tasks.html#your-own-task) [c](../codechat/grpo.py.html)"
    )
    assert "GRPOConfig" in (tmp_path / "pages/codechat/grpo.py.html").read_text()
    assert site_pages.adapt("[r](../README.md)", ROOT / "docs" / "tasks.md") == "[r](../index.md)"


def test_the_readers_own_reports_are_no_pages_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    (tmp_path / "reports" / "pages").mkdir(parents=True)
    for name in ("nano.html", "nano.ipynb", "pages/tool.html"):
        (tmp_path / "reports" / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in site_pages.sources()]
    assert found == ["reports/nano.ipynb", "reports/pages/tool.html"]


def test_a_picture_within_a_page_is_no_file_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is longer than a path may be."""
    monkeypatch.setattr(site_pages, "ROOT", tmp_path)
    page = tmp_path / "nano.html"
    page.write_text(f'<img src="data:image/png;base64,{"A" * 5000}">')
    site_pages.follow_html(page)


def test_headings_of_notebooks_hold_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of contents would link to a heading that does not exist."""
    monkeypatch.setattr(site_pages, "BUILD", tmp_path)
    site_pages.copy(ROOT / "notebooks" / "38_rl_over_your_own_functions.ipynb")
    made = (tmp_path / "pages" / "notebooks" / "38_rl_over_your_own_functions.ipynb").read_text()
    assert "## Before, and diagnose first" in made


def test_formulas_are_mathml_outside_of_code() -> None:
    page = ROOT / "docs" / "tasks.md"
    change = lambda text: site_pages.adapt(text, page)  # noqa: E731
    made = site_pages.outside_code("`$x$` costs $5 or $\\log \\pi_*$", change)
    assert made.startswith("`$x$` costs $5 or <math ")
    assert "_" not in made
    assert "*" not in made


@pytest.mark.slow
def test_the_site_is_built_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs_jupyter", reason="pip install -e '.[site]'")
    monkeypatch.setattr(site_pages, "BUILD", tmp_path)
    site_pages.gather()
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(tmp_path / "mkdocs.yml"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    site = tmp_path / "site"
    notebooks = {p.stem for p in (ROOT / "notebooks").glob("[0-8]*.ipynb")}
    assert {p.stem for p in (site / "notebooks").glob("*.html")} == notebooks
    assert {p.stem for p in (site / "reports").glob("*.html")} >= {
        p.stem for p in (ROOT / "reports").glob("*.ipynb")
    }
    assert "masked_sum" in (site / "docs" / "api.html").read_text()
    assert len(json.loads((site / "search" / "search_index.json").read_text())["docs"]) > 300
    assert site_pages.faults_of(site) == []
