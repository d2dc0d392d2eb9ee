"""The written documentation: links lead to files, named functions exist, commands are valid."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from codechat import cli
from codechat.core import config

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [path for name in ("README.md", "CONTRIBUTING.md", "GLOSSARY.md") if (path := ROOT / name).is_file()] + PAGES
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
MENTION = re.compile(r"`?([\w/]+\.py): ([\w., ]+)`?")  # the label of a link: "file: name, name"
CODE = re.compile(r"^```.*?^```", re.M | re.S)


def links(path: Path) -> list[tuple[str, str]]:
    """(label, target without its anchor) of the relative links outside code blocks."""
    found = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    return [(label, target.split("#")[0]) for label, target in found if "://" not in target and target[0] != "#"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(path: Path) -> None:
    assert not [target for _, target in links(path) if not (path.parent / target).exists()]


def test_the_index_lists_every_page() -> None:
    assert {target for _, target in links(DOCS / "index.md")} >= {page.name for page in PAGES} - {"index.md"}


def defined(path: Path) -> set[str]:
    """Functions and classes of a module, and Class.method."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return found


def test_the_walk_names_functions_that_exist() -> None:
    page = DOCS / "a-step-and-a-request.md"
    mentions = [(found, target) for label, target in links(page) if (found := MENTION.fullmatch(label))]
    assert len(mentions) > 90, "the labels have another form than `file: function`"
    for found, target in mentions:
        file, names = found.groups()
        assert target == f"../codechat/{file}", f"{file} links to {target}"
        missing = set(names.split(", ")) - defined(page.parent / target)
        assert not missing, f"{file} does not define {missing}"


# --- commands


class Parsed(Exception):
    """A command has read its words and would begin."""


def commands(path: Path) -> list[list[str]]:
    """The words of each `codechat` command in the page's shell blocks, from the command's name on. What follows a lone
    -- are the settings of the loop that is launched, so they are a command of their own."""
    blocks = re.findall(r"^```bash\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").replace("-m codechat.", "codechat ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    found = [words[words.index("codechat") + 1 :] for words in found if "codechat" in words]
    launched = [[words[1], *words[words.index("--") + 1 :]] for words in found if "--" in words]
    return found + launched


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags, values and settings that exclude each other, up to where the command would begin. Files are not looked for."""
    parse = config.parse

    def parse_only(*args: Any, **options: Any) -> None:
        parse(*args, **options)
        raise Parsed

    monkeypatch.setattr(config, "parse", parse_only)
    monkeypatch.setattr(config, "read_json", lambda path: {})  # --config FILE
    for words in commands(page):
        try:
            code = cli.main(words)
        except Parsed:
            continue
        raise AssertionError(f"codechat {shlex.join(words)}: exit code {code}, {capsys.readouterr().err}")
