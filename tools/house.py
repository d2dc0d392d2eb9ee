"""Weighs the packages as a reader pays for them: content, density, and what each loop reaches.

    python tools/house.py                       the table for codechat, codechat_lab and tests
    python tools/house.py --repo ../another     of another checkout

Content is the number of AST expressions: no layout changes it. Density is expressions per code
line: squeezed lines raise it. Reach is what a loop imports, directly or not, function-level
imports too. Nobody counts lines. `tests/test_house.py` has the gates.
"""

import argparse
import ast
import csv
import json
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("codechat", "codechat_lab", "tests")
LOOPS = ("pretrain", "sft", "reinforce", "grpo", "ppo", "expert_iteration", "distill", "preference")
WIDTH = 120  # columns of a line
LONG = 4  # expressions from which on a part of an assigned tuple counts as long
# What prose and names never parse to; nor to a call of a name.
PYTHON = (ast.Lambda, ast.comprehension, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Weight:
    """Counts over files."""

    files: int = 0
    code_lines: int = 0  # without blank lines, comments and docstrings
    comment_lines: int = 0
    expressions: int = 0
    packed_tuples: int = 0  # assignments of two or more long values at once
    walrus: int = 0
    splats: int = 0  # ** of a dictionary that has a name, or that stands there
    wide_lines: int = 0
    skips: int = 0  # formatting switched off

    @property
    def density(self) -> float:
        """Expressions per code line."""
        return self.expressions / max(1, self.code_lines)

    def per_thousand(self, count: int) -> float:
        """Of a thousand code lines."""
        return 1000 * count / max(1, self.code_lines)


def weigh(paths: Iterable[Path]) -> Weight:
    """The weight of Python files."""
    total = Weight()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        total.files += 1
        _count_lines(text, docstring_lines(tree), total)
        for node in ast.walk(tree):
            _count_node(node, total)
    return total


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def _count_lines(text: str, docstrings: set[int], total: Weight) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        total.wide_lines += len(line) > WIDTH
        total.skips += "fmt: skip" in line or "fmt: off" in line
        bare = line.strip()
        if not bare or number in docstrings:
            continue
        if bare.startswith("#"):
            total.comment_lines += 1
        else:
            total.code_lines += 1


def _count_node(node: ast.AST, total: Weight) -> None:
    total.expressions += isinstance(node, ast.expr)
    total.walrus += isinstance(node, ast.NamedExpr)
    if isinstance(node, ast.Call):
        total.splats += sum(keyword.arg is None for keyword in node.keywords)
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ):
        long_parts = [
            part
            for part in node.value.elts
            if sum(isinstance(n, ast.expr) for n in ast.walk(part)) >= LONG
        ]
        total.packed_tuples += len(long_parts) >= 2


def modules(root: Path, package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in (root / package).rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a file imports, in functions too; not those of a type checker alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for name in _imported(tree, set(known))}


def _imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if inner in known or node.module in known:
                yield inner if inner in known else node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    for child in ast.iter_child_nodes(node):
        yield from _imported(child, known)


def reach(root: Path, start: str, package: str = "codechat") -> set[str]:
    """The modules of a package that importing `start` and running it may import."""
    paths = modules(root, package)
    seen = {start}
    waiting = [start]
    while waiting:
        for name in imports(paths[waiting.pop()], paths) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def crossing(root: Path) -> list[str]:
    """Imports from the library to the laboratory, as "module -> module"."""
    lab = modules(root, "codechat_lab")
    library = modules(root, "codechat")
    return [
        f"{name} -> {there}"
        for name, path in sorted(library.items())
        for there in sorted(imports(path, lab))
    ]


def executed(path: Path) -> int:
    """How often a module calls eval or exec."""
    calls = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    )
    return sum(
        isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec") for call in calls
    )


def python_in(path: Path) -> list[str]:
    """The texts of a json, toml, csv or txt file that are Python source: they call, define, import or return."""
    return [text for text in _texts(path) if _is_python(text)]


def _texts(path: Path) -> Iterator[str]:
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        yield from _strings(json.loads(content))
    elif path.suffix == ".toml":
        yield from _strings(tomllib.loads(content))
    elif path.suffix == ".csv":
        for row in csv.reader(content.splitlines()):
            yield from row
    else:
        yield from (content, *content.splitlines())


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _is_python(text: str) -> bool:
    source = re.sub(r"\$(\w+)", r"\1", text).strip()  # also where $names are to be replaced
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in prose
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return any(_is_code(node) for node in ast.walk(tree))


def _is_code(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name | ast.Attribute)
    return isinstance(node, PYTHON) or (isinstance(node, ast.Return) and node.value is not None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo", type=Path, default=ROOT)
    root = parser.parse_args().repo.resolve()
    for package in PACKAGES:
        weight = weigh(sorted((root / package).rglob("*.py")))
        if not weight.files:
            continue
        print(
            f"{package}: {weight.files} files, {weight.expressions:,} expressions, {weight.density:.2f} a code line, "
            f"{100 * weight.comment_lines / weight.code_lines:.1f} comments per 100; per 1,000 code lines "
            f"{weight.per_thousand(weight.packed_tuples):.1f} packed tuples, {weight.per_thousand(weight.walrus):.1f} "
            f"walrus, {weight.per_thousand(weight.splats):.1f} splats; {weight.wide_lines} lines over {WIDTH} columns, "
            f"{weight.skips} format skips"
        )
    for loop in LOOPS:
        print(f"{loop} reaches {len(reach(root, f'codechat.{loop}'))} modules")
    found = crossing(root)
    print(f"imports from codechat to codechat_lab: {len(found)}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
