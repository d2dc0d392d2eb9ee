"""Gather the pages of the web site in build/pages: documents, executed notebooks and reports,
interactive pages, the API.

    python tools/site_pages.py && mkdocs build --strict --config-file build/mkdocs.yml        or: make site

Folders keep their places beside each other, so links between documents are the same as in the
repository.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
COPIED = (
    "docs",
    "notebooks",
    "reports",
    "examples",
    "cpp",
    "README.zh.md",
    "data/README.md",
    "GLOSSARY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
FILES = {
    ".md",
    ".ipynb",
    ".jsonl",
    ".toml",
    ".png",
    ".html",
    ".json",
    ".py",
    ".css",
    ".js",
    ".cpp",
    ".h",
}
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
    for name in COPIED:
        places = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
        for path in places:
            # the reports are executed
            template = path.parent.name == "notebooks" and path.name.startswith("9")
            if (
                path.is_file()
                and not template
                and path.suffix in FILES
                and "data" not in path.relative_to(ROOT).parts[1:-1]
            ):
                copy(path)
    for suffix in ("py", "toml", "jsonl"):  # documents link to sources
        for path in (ROOT / "codechat").rglob(f"*.{suffix}"):
            copy(path)
    shutil.copy(ROOT / "README.md", BUILD / "pages" / "index.md")
    api = "".join(
        f"# {title}\n\n" + "".join(f"::: {name}\n\n" for name in names)
        for title, names in API.items()
    )
    (BUILD / "pages" / "docs" / "api.md").write_text("---\ntitle: API\n---\n\n" + api)
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
            ]
        },
    ]
    (BUILD / "mkdocs.yml").write_text(json.dumps({"INHERIT": str(ROOT / "mkdocs.yml"), "nav": nav}))


def pages(pattern: str) -> list[str]:
    return sorted(
        path.relative_to(BUILD / "pages").as_posix() for path in (BUILD / "pages").glob(pattern)
    )


def copy(path: Path) -> None:
    target = BUILD / "pages" / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".ipynb":
        notebook = nbformat.read(path, 4)
        hide_code(notebook)
        nbformat.write(notebook, target)
    elif path.suffix == ".md":
        target.write_text(
            re.sub(
                r"\]\((\.\./)*README\.md",
                lambda m: m[0].replace("README", "index"),
                path.read_text(),
            )
        )
    else:
        shutil.copy(path, target)


def hide_code(notebook: nbformat.NotebookNode) -> None:
    """Cells marked as hidden show their outputs alone, as in a report's own HTML."""
    for cell in notebook.cells:
        if {"hide-cell", "hide-input", "parameters"} & set(cell.metadata.get("tags", ())):
            cell.source = ""
    notebook.cells = [cell for cell in notebook.cells if cell.source or cell.get("outputs")]


if __name__ == "__main__":
    gather()
