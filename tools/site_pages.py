"""Gather the pages of the web site in build/pages: documents, executed notebooks and reports,
interactive pages, the API; and check the links of the built site.

    python tools/site_pages.py && mkdocs build --strict --config-file build/mkdocs.yml
    python tools/site_pages.py check                                      all three: make site

Folders keep their places beside each other, so links between documents are the same as in the
repository. A source file that a page links to comes along as a page of its own. Formulas become
MathML, which browsers draw without a script.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from latex2mathml.converter import convert
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PAGES = (
    "docs",
    "notebooks",
    "reports",
    "README.md",
    "README.zh.md",
    "data/README.md",
    "GLOSSARY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
)
KINDS = {".md", ".ipynb", ".html", ".png", ".css", ".js"}
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\s#\"]+)(#[^)\s\"]*)?(?=[)\"])")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.M | re.S)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?! )([^$\n]+?)(?<! )\$", re.S)
SCRIPT = re.compile(r"<script\b.*?</script>", re.S)
FOREIGN_SCRIPT = re.compile(r"""src=""|x-mathjax|(?:from|import\(|src=)\s*["']https?://""")
LARGEST_SOURCE = 200_000  # bytes that are shown as a page; a larger file is offered as it is
GUIDES = (
    "first-hour",
    "commands",
    "tasks",
    "recipes",
    "extending",
    "serving",
    "engines",
    "distributed",
    "faults",
    "cpp",
)
OTHERS = sorted(path.stem for path in (ROOT / "docs").glob("coming-from*.md"))
ABOUT = ("rooms", "a-step-and-a-request", "api", *OTHERS, "versions", "reports")
API = {
    "The loops": [
        f"codechat.{loop}"
        for loop in (
            "pretrain",
            "sft",
            "reinforce",
            "grpo",
            "ppo",
            "expert_iteration",
            "distill",
            "preference",
        )
    ],
    "Model": [
        "codechat.models.gpt.GPT",
        "codechat.models.config.GPTConfig",
        "codechat.models.generate",
        "codechat.models.lora",
    ],
    "Rewards and losses": [
        "codechat.tasks.base",
        "codechat.rl.losses",
        "codechat.rl.advantages",
        "codechat.rl.preference_losses",
    ],
    "Evaluation": [
        "codechat.evaluation.evaluate",
        "codechat.evaluation.diagnose",
        "codechat.evaluation.intervals",
    ],
    "Runs": ["codechat.runs.run.Run", "codechat.runs.checkpoint"],
}


def gather() -> None:
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    for path in sources():
        copy(path)
    (BUILD / "pages" / "docs" / "api.md").write_text(api_page())
    nav = [
        "index.md",
        {"Guides": [f"docs/{name}.md" for name in GUIDES]},
        {"Notebooks": ["docs/notebooks.md", *pages("notebooks/*.ipynb")]},
        {"Reports": pages("reports/*.ipynb")},
        {"Experiments": ["docs/experiments/index.md", *pages("docs/experiments/[!i]*.md")]},
        {
            "Reference": [
                *(f"docs/{name}.md" for name in ABOUT),
                "GLOSSARY.md",
                "CHANGELOG.md",
                "CONTRIBUTING.md",
                "AGENTS.md",
            ]
        },
    ]
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "nav": nav, "hooks": [__file__]}
    (BUILD / "mkdocs.yml").write_text(json.dumps(settings))


def sources() -> list[Path]:
    """The files of the repository that are pages or their pictures."""
    found = []
    for name in PAGES:
        root = ROOT / name
        found += [root] if root.is_file() else sorted(root.rglob("*"))
    return [path for path in found if is_page(path)]


def is_page(path: Path) -> bool:
    """Whether a file is a page of the site, or a picture. A template is shown as its report, and
    the reader's own reports, which link to his runs, are none."""
    name = path.relative_to(ROOT).as_posix()
    listed = any(name == page or name.startswith(f"{page}/") for page in PAGES)
    template = path.parent.name == "notebooks" and path.name.startswith("9")
    own = path.parent.name == "reports" and path.suffix == ".html"
    return listed and path.is_file() and path.suffix in KINDS and not template and not own


def api_page() -> str:
    parts = ["---\ntitle: API\n---\n\n"]
    for title, names in API.items():
        parts.append(f"# {title}\n\n" + "".join(f"::: {name}\n\n" for name in names))
    return "".join(parts)


def pages(pattern: str) -> list[str]:
    return sorted(
        path.relative_to(BUILD / "pages").as_posix() for path in (BUILD / "pages").glob(pattern)
    )


def on_page_content(text: str, **page: object) -> str:
    """A hook of mkdocs: without what the notebooks' template loads from elsewhere, as a library
    for diagrams that no page has."""
    return SCRIPT.sub(lambda found: "" if FOREIGN_SCRIPT.search(found[0]) else found[0], text)


# ---- one page


def copy(path: Path) -> None:
    """Copy a file to its place, with links and formulas as the site needs them, and what it
    links to."""
    target = place(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".ipynb":
        notebook = nbformat.read(path, 4)
        if path.name[:2].isdigit():  # texts call it by its number
            first = notebook.cells[0]
            first.source = re.sub("^# ", f"# {path.name[:2]} ", first.source, count=1, flags=re.M)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                # the table of contents leaves code out of a heading's anchor
                cell.source = re.sub(
                    r"^#+ .*`.*$", lambda found: found[0].replace("`", ""), cell.source, flags=re.M
                )
                cell.source = outside_code(cell.source, lambda text: adapt(text, path))
        # a heading, code and output alone: tools for editing stay in the repository
        notebook.cells = [cell for cell in notebook.cells if cell.source or cell.get("outputs")]
        nbformat.write(notebook, target)
    elif path.suffix == ".md":
        target.write_text(outside_code(path.read_text(), lambda text: adapt(text, path)))
    elif path.suffix == ".html":
        follow_html(path)
        shutil.copy(path, target)
    else:
        shutil.copy(path, target)


def place(path: Path) -> Path:
    """Where a file of the repository is in build/pages."""
    if path == ROOT / "README.md":
        return BUILD / "pages" / "index.md"
    return BUILD / "pages" / path.relative_to(ROOT)


def outside_code(text: str, change) -> str:
    """The text with `change` made outside of its code."""
    parts = CODE.split(text)
    return "".join(part if CODE.fullmatch(part) else change(part) for part in parts)


def adapt(text: str, page: Path) -> str:
    text = FORMULA.sub(formula, text)
    return LINK.sub(lambda found: f"{found[1]}{linked(found[2], page)}{found[3] or ''}", text)


def formula(found: re.Match[str]) -> str:
    """A formula of TeX as MathML, in which Markdown finds nothing to change."""
    tex, display = (found[1], "block") if found[1] else (found[2], "inline")
    made = convert(tex.strip(), display=display)
    return made.replace("*", "&#42;").replace("_", "&#95;").replace("\n", "")


def linked(link: str, page: Path) -> str:
    """The link as it is on the site; what is no page yet is added."""
    if "://" in link or link.startswith(("mailto:", "data:")):
        return link
    path = (page.parent / unquote(link)).resolve()
    if not path.is_relative_to(ROOT) or not path.exists():
        return link  # the check names it
    if is_page(path):
        # mkdocs reads the links of documents, not those of notebooks
        if path == ROOT / "README.md":
            link = link.replace("README", "index")
        notebook = page.suffix == ".ipynb" and path.suffix in (".md", ".ipynb")
        return re.sub(r"\.(md|ipynb)$", ".html", link) if notebook else link
    if path.is_dir():
        return f"{link.rstrip('/')}/{show_folder(path)}"
    return show_source(path, link)


def show_source(path: Path, link: str) -> str:
    """The link to a page with a source file, which browsers would save instead of showing."""
    target = place(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.stat().st_size > LARGEST_SOURCE or path.suffix in (".js", ".png", ".npz"):
        shutil.copy(path, target)
        return link
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    name = path.relative_to(ROOT).as_posix()
    form = HtmlFormatter(full=True, title=name, linenos="inline", lineanchors="L")
    target.with_name(f"{path.name}.html").write_text(
        highlight(path.read_text(encoding="utf-8"), lexer, form)
    )
    return f"{link}.html"


def show_folder(path: Path) -> str:
    """A page that lists a folder's files; its name."""
    rows = []
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            link = file.name if is_page(file) else show_source(file, file.name)
            rows.append(f'<li><a href="{html.escape(link)}">{html.escape(file.name)}</a></li>')
    title = path.relative_to(ROOT).as_posix()
    target = place(path) / "files.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        f"<!doctype html><title>{title}</title><h1>{title}</h1><ul>{''.join(rows)}</ul>"
    )
    return target.name


def follow_html(path: Path) -> None:
    """Copy the scripts and files that an interactive page loads from the repository."""
    for found in LINK.finditer(path.read_text(encoding="utf-8")):
        if urlsplit(found[2]).scheme:  # a picture within the page, or another site
            continue
        file = (path.parent / found[2]).resolve()
        if file.is_relative_to(ROOT) and file.is_file() and not is_page(file):
            target = place(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


# ---- the built site


class Page(HTMLParser):
    """Links and anchors of a page; what it loads from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.foreign: list[str] = []
        for script in SCRIPT.findall(text):
            self.foreign += FOREIGN_SCRIPT.findall(script)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or given.get("name") or "")
        for name in ("href", "src"):
            link = given.get(name)
            if link is None:
                continue
            parts = urlsplit(link)
            if not (parts.scheme or parts.netloc):
                self.links.append(link)
            elif tag != "a" and parts.scheme != "data" and given.get("rel") != "canonical":
                self.foreign.append(link)


def faults_of(site: Path) -> list[str]:
    """A line for each link that leads nowhere, and for each file that is loaded from elsewhere."""
    read = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = [] if read else [f"{site} has no pages"]
    for path, page in read.items():
        name = path.relative_to(site).as_posix()
        faults += [f"{name} loads {link[:100]}" for link in page.foreign]
        for link in page.links:
            parts = urlsplit(link)
            target = path
            if parts.path:
                base = site if parts.path.startswith("/") else path.parent
                target = (base / unquote(parts.path).lstrip("/")).resolve()
            if target.is_dir():
                target = target / "index.html"
            anchor = unquote(parts.fragment)
            if not target.exists():
                faults.append(f"{name} links to {link}, which does not exist")
            elif anchor and target in read and anchor not in read[target].anchors:
                faults.append(f"{name} links to {link}, which has no such heading")
    return faults


def main(words: list[str]) -> int:
    if words == ["check"]:
        faults = faults_of(BUILD / "site")
        print(*faults, f"{len(faults)} faults in the links of {BUILD / 'site'}", sep="\n")
        return 1 if faults else 0
    gather()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
