"""Episodes with tools: view a file, edit it, run the tests. The reward depends on the files only.

An edit that touches tests is refused. A message without a call ends the episode. Tests run in the sandbox after each edit;
the rewards of the turns add up to the last verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codechat.tasks.apps.tools import as_text
from codechat.tasks.base import Message, Problem, Score
from codechat.tasks.coding.task import pool_of
from codechat.tasks.repair import edits, scoring
from codechat.tasks.repair.edits import Change, EditError
from codechat.tasks.repair.generator import HIDDEN, TOOLS
from codechat.text import chat

MAX_CALLS = 8  # of one message


class Refused(Exception):
    """A call that is not carried out, and why."""


class RepairEnvironment:
    """One episode at a time. isolation: see `Pool`."""

    def __init__(self, timeout_s: float = 3.0, isolation: str = "auto") -> None:
        self.timeout_s, self.isolation, self.closed = timeout_s, isolation, True

    def reset(self, problem: Problem, seed: int = 0) -> list[Message]:
        """Start an episode. The seed has no effect."""
        self.problem, self.files, self.closed = problem, dict(problem.gold["files"]), False
        self.verdict, self.changes = scoring.unscored("none", "no edit was made"), list[dict[str, str]]()
        return problem.messages

    def step(self, message: Message) -> tuple[list[Message], float, bool]:
        """Carry out the calls of an answer. After the episode's end nothing happens."""
        if self.closed:
            return [], 0.0, True
        before, calls = self.verdict.reward, chat.parse_calls(message["content"])[:MAX_CALLS]
        self.closed = not calls
        told = [{"role": "function", "content": self._respond(call)} for call in calls]
        return told, self.verdict.reward - before, self.closed

    def state_diff(self) -> list[dict[str, str]]:
        return self.changes

    def score(self) -> Score:
        return self.verdict

    def _respond(self, call: chat.Call) -> str:
        if call.form not in chat.READABLE or call.name is None or call.arguments is None:
            return as_text("error", f"this call cannot be read ({call.form})")
        try:
            return as_text("result", self._carry_out(call.name.strip(), call.arguments))
        except (Refused, EditError) as error:
            return as_text("error", str(error))

    def _carry_out(self, name: str, arguments: Mapping[str, Any]) -> str:
        if name not in TOOLS:
            raise Refused(f"there is no function {name[:60]!r}")
        needed = TOOLS[name]["parameters"]["required"]
        if set(arguments) != set(needed) or not all(type(value) is str for value in arguments.values()):
            raise Refused(f"{name} takes {', '.join(needed) or 'nothing'}, as strings")
        return {"view": self._view, "edit": self._edit, "run_tests": self._report}[name](**arguments)

    def _view(self, path: str) -> str:
        plain = edits.plain_path(path)
        if plain not in self.files:
            raise Refused(f"there is no {plain}")
        return self.files[plain]

    def _edit(self, path: str, search: str, replace: str) -> str:
        plain = edits.plain_path(path)
        if edits.is_protected(plain):
            raise Refused("tests are not to be edited")
        old, new = tuple(search.splitlines()), tuple(replace.splitlines())
        self.files = edits.applied(self.files, [Change(plain, old or None, new)])
        self.changes = [*self.changes, {"path": plain, "search": search, "replace": replace}]
        self._judge()
        return "edited"

    def _report(self) -> str:
        gold = self.problem.gold
        names = [*gold["FAIL_TO_PASS"], *gold["PASS_TO_PASS"]]
        found = pool_of(self.isolation).run(scoring.program(self.problem, self.files, self.timeout_s))
        seen = {name: r for name, r in zip(names, found.results) if not name.startswith(HIDDEN)}
        failed = [f"{name}: {r.reason}" for name, r in seen.items() if not r.passed]
        return "\n".join([f"{len(failed)} failed, {len(seen) - len(failed)} passed", *failed])

    def _judge(self) -> None:
        if self.files == self.problem.gold["files"]:
            self.verdict = scoring.unscored("unapplied", "nothing changes")
            return
        job = scoring.program(self.problem, self.files, self.timeout_s)
        self.verdict = scoring.of_verdict(self.problem, pool_of(self.isolation).run(job))
