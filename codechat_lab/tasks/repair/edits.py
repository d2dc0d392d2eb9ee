"""Edits of a repository in a completion: search/replace blocks or a unified diff, read and applied.

    shop/cart.py                     --- a/shop/cart.py
    <<<<<<< SEARCH                   +++ b/shop/cart.py
        if total > 3:                @@ -4,3 +4,3 @@
    =======                               total = sum(prices)
        if total >= 3:               -    if total > 3:
    >>>>>>> REPLACE                  +    if total >= 3:

Both become changes: whole lines replaced by others, which must match except for white space at
their ends. Where they occur several times, a diff's line number chooses; a block must say more.
A repository is a mapping {path: text}."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

Files = Mapping[str, str]
LONGEST = 200_000  # characters of a completion that are read
_FENCE = re.compile(r"```\w*\Z")
_SEARCH = re.compile(r"<{5,9} SEARCH[ \t]*\Z")
_DIVIDER = re.compile(r"={5,9}[ \t]*\Z")
_PATH = re.compile(r"\S[ \t]*\Z")
_REPLACE = re.compile(r">{5,9} REPLACE")  # more may follow in its line
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
# What decides which tests run and how: not the policy's to change. Python itself runs the last
# two at its start.
_SETTINGS = frozenset(
    """conftest.py pytest.ini .pytest.ini tox.ini setup.cfg pyproject.toml noxfile.py
    sitecustomize.py usercustomize.py""".split()
)


class EditError(ValueError):
    """An edit that does not fit the repository."""


class Change(NamedTuple):
    """Lines `old` of a file become `new`. old None: the file is new. new None: it is deleted.
    line: where a diff says that they begin, from 1."""

    path: str
    old: tuple[str, ...] | None
    new: tuple[str, ...] | None
    line: int = 0


def parse(text: str) -> list[Change]:
    """The changes of a completion, in order; empty where it holds none that can be read."""
    lines = (text[:LONGEST].replace("\r\n", "\n") + "\n").split("\n")
    return list(_blocks(lines)) or list(_hunks(lines))


def _blocks(lines: Sequence[str]) -> Iterator[Change]:
    """Changes of search/replace blocks. Where one has no end, no later one has: the time is
    linear in the text."""
    free = 0  # the first line behind the last block
    for at, line in enumerate(lines):
        path = _path_above(lines, at, free) if at > free and _SEARCH.match(line) else ""
        if not path:
            continue
        middle = _next(lines, _DIVIDER, at + 1)
        end = _next(lines, _REPLACE, middle + 1)
        if end == len(lines):
            return
        # splitlines also ends a line at a form feed
        old = tuple(_text(lines[at + 1 : middle]).splitlines())
        new = tuple(_text(lines[middle + 1 : end]).splitlines())
        path = path.strip().strip("`*#: ").removeprefix("File").strip("`: ")
        yield Change(path, old or None, new)
        free = end + 1


def _path_above(lines: Sequence[str], at: int, free: int) -> str:
    """The line with the path of a block whose SEARCH is at `at`, not before `free`; "" without
    one. A code fence may stand between."""
    fenced = at - 2 >= free and _FENCE.match(lines[at - 1]) and _PATH.search(lines[at - 2])
    line = lines[at - 2 if fenced else at - 1]
    return line if _PATH.search(line) else ""


def _next(lines: Sequence[str], pattern: re.Pattern[str], at: int) -> int:
    """The first line from `at` that matches; len(lines) without one."""
    return next(
        (place for place in range(at, len(lines)) if pattern.match(lines[place])), len(lines)
    )


def _hunks(lines: Sequence[str]) -> Iterator[Change]:
    """Changes of a unified diff. A hunk ends where a line is none of its own, whatever numbers
    its head gives."""
    before = ""
    after = ""
    at = 0
    while at < len(lines):
        head = _HUNK.match(lines[at]) if before or after else None
        if _names_files(lines, at):
            before = _diff_path(lines[at][4:])
            after = _diff_path(lines[at + 1][4:])
            at += 2
        elif head:
            end = next((i for i in range(at + 1, len(lines)) if not _in_hunk(lines, i)), len(lines))
            body = list(lines[at + 1 : end])
            at = end
            while body and not body[-1]:  # an empty line behind a hunk is not part of it
                body.pop()
            old = tuple(row[1:] for row in body if not row.startswith(("+", "\\")))
            new = tuple(row[1:] for row in body if not row.startswith(("-", "\\")))
            number = int(head[1][:9])  # Python reads no number of thousands of digits
            yield Change(
                after or before, old if before and old else None, new if after else None, number
            )
        else:
            at += 1


def _names_files(lines: Sequence[str], at: int) -> bool:
    """Whether a diff of another file begins here."""
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _in_hunk(lines: Sequence[str], at: int) -> bool:
    return not _names_files(lines, at) and (not lines[at] or lines[at][0] in " +-\\")


def _diff_path(text: str) -> str:
    """The path of a --- or +++ line; "" for /dev/null."""
    path = text.partition("\t")[0].strip()
    return "" if path == "/dev/null" else re.sub(r"^[ab]/", "", path)


def applied(files: Files, changes: Sequence[Change]) -> dict[str, str]:
    """The repository after the changes. EditError for one that does not fit."""
    files = dict(files)
    for change in changes:
        path = plain_path(change.path)
        if change.old is None:
            if files.get(path, "").strip():
                raise EditError(f"{path} exists; say which lines to replace")
            files[path] = _text(change.new or ())
        elif path not in files:
            raise EditError(f"there is no {path}")
        elif change.new is None:
            del files[path]
        else:
            files[path] = _replaced(path, files[path], change)
    return files


def _replaced(path: str, text: str, change: Change) -> str:
    """The text of a file after a change; EditError where its lines are not there, or where it
    is open which."""
    lines = text.splitlines()
    old = [line.rstrip() for line in change.old or ()]
    stripped = [line.rstrip() for line in lines]
    places = [i for i in range(len(lines) - len(old) + 1) if stripped[i : i + len(old)] == old]
    if not places:
        raise EditError(f"{path} does not hold these lines")
    if len(places) > 1 and not change.line:
        raise EditError(f"{path} holds these lines {len(places)} times; give more of them")
    at = min(places, key=lambda place: abs(place + 1 - change.line))
    return _text([*lines[:at], *(change.new or ()), *lines[at + len(old) :]])


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def plain_path(path: str) -> str:
    """The path, without "./". EditError for one that leaves the repository."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path or len(path) > 200:
        raise EditError(f"{path[:60]!r} is no path in the repository")
    return str(pure)


def is_setting(path: str) -> bool:
    """Whether the file decides which tests run and how."""
    name = PurePosixPath(path.lower()).name
    return name in _SETTINGS or name.endswith((".pth", ".pyc"))


def is_protected(path: str) -> bool:
    """Whether the file holds tests or decides how they run."""
    *folders, name = PurePosixPath(path.lower()).parts or ("",)
    return (
        name.startswith("test_")
        or name.endswith("_test.py")
        or not {"tests", "test"}.isdisjoint(folders)
        or is_setting(path)
    )


def as_block(path: str, old: str, new: str) -> str:
    """A search/replace block, as `parse` reads it."""
    return f"{path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE"
