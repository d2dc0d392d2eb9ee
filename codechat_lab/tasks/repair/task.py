"""The repair task on generated repositories, its reward, and `codechat data repair`, which
writes experts' repairs (domain "repairs") and problems. SFT never sees the constants of the
training problems.

    none         0      no edit can be read
    tampers      0      an edit touches tests or what decides how they run
    unapplied    0.05   an edit does not fit the files, or changes nothing
    applied      0.15   no failing test passes
    some_fixed   0.15 + 0.35 x the share of failing tests that pass
    regressed    0.5    all of them pass, but another test fails
    resolved     1      all of them pass, and all others still do

Below `resolved` it is multiplied by the share of passing tests that still pass. The modules are
loaded from memory into the sandboxed process, so what they patch, exit from or override stays
there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codechat.tasks.base import Problem, Score
from codechat_lab.sandbox.pool import Program, Verdict
from codechat_lab.tasks.coding.task import JudgedTask
from codechat_lab.tasks.preparation import DrawnTask, GeneratedConfig, prepare_generated
from codechat_lab.tasks.repair import edits, generator

TIERS = ("none", "tampers", "unapplied", "applied", "some_fixed", "regressed", "resolved")
UNAPPLIED, APPLIED, REGRESSED = 0.05, 0.15, 0.5

_LOADER = Path(__file__).with_name("loader.py").read_text(encoding="utf-8")


def program(problem: Problem, files: Mapping[str, str], timeout_s: float) -> Program:
    """The repository with the problem's tests, those that fail first."""
    gold = problem.gold
    sources = {
        path: text
        for path, text in files.items()
        if path.endswith(".py") and not edits.is_protected(path)
    }
    # ascii, not JSON, whose two escapes of one emoji are two half characters in Python
    code = f"{_LOADER}\n\nload({ascii(sources)}, {ascii(dict(gold['imports']))})\n"
    tests = tuple(gold["tests"][name] for name in (*gold["FAIL_TO_PASS"], *gold["PASS_TO_PASS"]))
    return Program(code=code, tests=tests, entry_points=(), timeout_s=timeout_s)


def unscored(tier: str, reason: str) -> Score:
    """The score of an answer that no test has judged."""
    reward = {"unapplied": UNAPPLIED, "applied": APPLIED}.get(tier, 0.0)
    return Score(reward, tier, {"fixed": 0, "kept": 0, "reason": reason}, False)


def of_counts(fixed: int, failing: int, kept: int, passing: int, reason: str = "") -> Score:
    """The score of `fixed` of `failing` tests and `kept` of `passing`."""
    parts = {"fixed": fixed, "failing": failing, "kept": kept, "passing": passing, "reason": reason}
    if fixed == failing and kept == passing:
        return Score(1.0, "resolved", parts, True)
    if fixed == failing:
        tier = "regressed"
    else:
        tier = "some_fixed" if fixed else "applied"
    reward = APPLIED + (REGRESSED - APPLIED) * fixed / failing
    if passing:
        reward *= kept / passing
    return Score(reward, tier, parts, False)


class RepairTask(DrawnTask, JudgedTask):
    """source: None generates problems; a directory has them in repair.SPLIT.jsonl. levels: of
    the problems; a repeated level is sampled more often. timeout_s: wall seconds of each test.

    ConfigError for invalid settings, MissingFile and DataError for unreadable files."""

    name = "repair"
    stream = "repair"
    domain = "repairs"
    tiers = TIERS
    known_levels = generator.LEVELS
    gold_fields = ("files", "imports", "tests", "FAIL_TO_PASS", "PASS_TO_PASS", "fix")
    meta_fields = ("level",)

    def __init__(
        self,
        source: str | Path | None = None,
        levels: Sequence[int] = generator.LEVELS,
        timeout_s: float = 3.0,
    ) -> None:
        self.set_levels(source, levels)
        self.timeout_s = float(timeout_s)

    draw = staticmethod(generator.make)

    def gold(self, problem: Problem) -> str:
        """The expert's search/replace block."""
        fix = problem.gold["fix"]
        return edits.as_block(fix["path"], fix["search"], fix["replace"])

    def answer(self, problem: Problem, text: str) -> tuple[Score, Program | None]:
        """(the score without tests, the repository with its tests if they decide)."""
        files = problem.gold["files"]
        changes = edits.parse(text)
        if not changes:
            return unscored("none", "no edit can be read"), None
        touched = sorted({change.path for change in changes if edits.is_protected(change.path)})
        if touched:
            return unscored(
                "tampers", f"tests are not to be edited: {', '.join(touched)[:200]}"
            ), None
        try:
            after = edits.applied(files, changes)
        except edits.EditError as error:
            return unscored("unapplied", str(error)), None
        if after == files:
            return unscored("unapplied", "nothing changes"), None
        return unscored("applied", ""), program(problem, after, self.timeout_s)

    def scored(self, problem: Problem, answer: Score, verdict: Verdict | None) -> Score:
        if verdict is None:
            return answer
        passed = [r.passed for r in verdict.results]
        failing = len(problem.gold["FAIL_TO_PASS"])
        return of_counts(
            sum(passed[:failing]),
            failing,
            sum(passed[failing:]),
            len(passed) - failing,
            verdict.reason,
        )


@dataclass(frozen=True, kw_only=True)
class RepairConfig(GeneratedConfig):
    """Small repositories with a bug -> repairs.SPLIT.jsonl (conversations), repair.SPLIT.jsonl
    (problems)."""

    make = RepairTask
    out: str = "data/repair"
    levels: tuple[int, ...] = generator.LEVELS


prepare_repair = prepare_generated
