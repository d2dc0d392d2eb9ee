"""Natural requests: 120 fixed prompts as a person types them, for evaluation only (`codechat
natural`).

toolbox     60 requests for trained tools in words that no template has: is the call right?
unfitting   20 requests that none of the offered tools serves: does the answer call nothing?
code        20 requests for functions: does it pass hidden tests? (under any name, where the
request has none) chat        20 greetings and simple questions: shown, not scored"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codechat.data.row_readers import NO_CALL
from codechat.tasks.base import Message, Problem, Score, check_split
from codechat.text import tool_calls, tool_lists
from codechat_lab.data.python_source import parsed, same_name
from codechat_lab.tasks import funcall
from codechat_lab.tasks.coding import rewards
from codechat_lab.tasks.coding.answer_text import extract
from codechat_lab.tasks.coding.task import CodingTask
from codechat_lab.tasks.toolbox.catalogue import TOOLS

REQUESTS = Path(__file__).with_name("natural_requests.jsonl")
KINDS = ("toolbox", "unfitting", "code", "chat")
SHOWN, SHORTCUT = "shown", "shortcut"


def read_requests() -> list[Problem]:
    """The requests in the order of the file. meta: kind, tools (names on offer), trained
    (marked as trained on)."""
    problems = []
    for row in map(json.loads, REQUESTS.read_text(encoding="utf-8").splitlines()):
        gold = (
            row["expected"] | {"names": [row["expected"]["function"]]}
            if row["kind"] == "code"
            else row["expected"]
        )
        meta = {"kind": row["kind"], "tools": row["tools"], "trained": row.get("trained", False)}
        problems.append(Problem(row["id"], row["messages"], gold, "test", meta))
    return problems


class NaturalTask(CodingTask):
    """tiers: those of `funcall`, those of `coding`, shortcut (tests pass by a name that the
    request excludes), shown."""

    name = "natural"
    tiers = (*funcall.TIERS, *rewards.TIERS, SHORTCUT, SHOWN)
    splits = ("test",)
    no_references = "requests for code and chat have no reference solutions"

    def __init__(self) -> None:
        super().__init__(self.name, read_requests())

    def prompt(self, problem: Problem) -> list[Message]:
        schemas = [TOOLS[name].schema for name in problem.meta["tools"]]
        offer = (
            [{"role": "system", "content": tool_lists.tools_prompt(schemas, self.tools_style)}]
            if schemas
            else []
        )
        return [*offer, *problem.messages]

    def problems(
        self, split: str = "test", limit: int | None = None, seed: int = 0
    ) -> list[Problem]:
        """The first `limit` requests of the file."""
        check_split(split, self.splits, "task natural")
        return self.rows[:limit]

    def gold(self, problem: Problem) -> str:
        """The expected call, or the function that the hidden tests call."""
        if problem.meta["kind"] == "toolbox":
            return tool_calls.format_call(problem.gold["name"], problem.gold["arguments"])
        return {"unfitting": NO_CALL, "code": (problem.gold or {}).get("function", "")}.get(
            problem.meta["kind"], ""
        )

    def scores(self, pairs: Sequence[tuple[Problem, str]]) -> Iterator[Score]:
        """Scores in the order of the pairs; programs are judged in parallel."""
        programs = [
            (p, as_requested(text, p.gold)) for p, text in pairs if p.meta["kind"] == "code"
        ]
        judged = zip(super().scores(programs), programs, strict=True)
        for problem, text in pairs:
            if problem.meta["kind"] == "chat":
                yield Score(0.0, SHOWN, {}, False)
            elif problem.meta["kind"] != "code":
                yield funcall.score_call(text, problem.gold)
            else:
                score, (_, code) = next(judged)
                if score.correct and _used(extract(code, problem.gold["names"])) & set(
                    problem.gold.get("without", ())
                ):
                    score = replace(score, reward=0.0, tier=SHORTCUT, correct=False)
                yield score


def as_requested(answer: str, gold: Mapping[str, Any]) -> str:
    """The answer; where the request names no function, its program with the expected name for
    the function that it defines."""
    if gold["named"]:
        return answer
    code = extract(answer)
    function = gold["function"]
    tree = parsed(code)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    alike = [name for name in names if same_name(function) in same_name(name)]
    name = (alike or names or [function])[-1]
    return code if name == function else f"{code}\n\n{function} = {name}"


def _used(code: str) -> set[str]:
    """Names, attributes and modules that a program uses and does not define itself."""
    used = set[str]()
    defined = set[str]()
    for node in ast.walk(parsed(code) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Name | ast.Attribute):
            used.add(node.id if isinstance(node, ast.Name) else node.attr)
    return used - defined
