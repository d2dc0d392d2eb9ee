"""The web site: gathered and built without a warning; each page is there, and loads nothing
from elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs_jupyter", reason="pip install -e '.[site]'")
ROOT = Path(__file__).resolve().parents[1]
LOADED = re.compile(
    r"""<(?:script|img|link rel="(?:stylesheet|icon)")[^>]*? (?:src|href)="?(https?:)?//"""
)


@pytest.mark.slow
def test_the_site_is_built_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import site_pages

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
    for page in ("index.html", "docs/first-hour.html", "notebooks/00_rl_in_two_minutes.html"):
        assert not LOADED.findall((site / page).read_text()), page
