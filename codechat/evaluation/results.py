"""What an evaluation found: counts per problem, pass@k with intervals, and differences between checkpoints on
the same problems.

Left out: how completions are made (`evaluate`) and scored (`tasks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from codechat.core.atomic_files import read_rows
from codechat.core.errors import DataError, MissingFile
from codechat.evaluation.intervals import Interval, estimate_pass_at_k, paired_bootstrap, share_interval
from codechat.runs.run import Run


@dataclass(frozen=True)
class ProblemResult:
    """n completions of one problem, c of them correct; rewards in the task's range; tiers counts rungs. rewards: of each
    completion. meta: the problem's."""

    id: str
    n: int
    c: int
    reward_mean: float
    tiers: Counter[str]
    rewards: tuple[float, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """A line of per_problem.jsonl."""
        return dict(id=self.id, n=self.n, c=self.c, reward_mean=self.reward_mean, tiers=dict(self.tiers))


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one split. pass_at: k -> estimate with its 95 % bootstrap interval over the N
    problems. examples: every completion with its score. formatted: the tiers that are in the layout asked for;
    none where the task asks for no layout. grouped_by: what of a problem's meta the task tells apart, such as "category"."""

    task: str
    tiers: tuple[str, ...]
    problems: list[ProblemResult]
    n: int
    temperature: float
    pass_at: dict[int, Interval]
    reward: Interval
    completion_tokens_mean: float
    truncated_frac: float
    samples: list[dict[str, Any]] = field(repr=False)
    examples: list[dict[str, Any]] = field(default_factory=list, repr=False)
    formatted: tuple[str, ...] = ()
    grouped_by: str = ""

    @property
    def N(self) -> int:  # noqa: N802  (the letter that goes with pass@k)
        return len(self.problems)

    @property
    def tier_counts(self) -> Counter[str]:
        return sum((p.tiers for p in self.problems), Counter[str]())

    @property
    def format_rate(self) -> float:
        return sum(self.tier_counts[t] for t in self.formatted) / (self.n * self.N)

    def outcomes(self) -> str:
        """Accuracy, format rate and counts in one line; a completion that was cut off counts under its outcome too."""
        counts, total = self.tier_counts, self.n * self.N
        layout = f", format rate {self.format_rate:.3f}" if self.formatted else ""
        told = ", ".join(f"{t} {counts[t]}" for t in reversed(self.tiers))
        accuracy, cut = sum(p.c for p in self.problems) / total, round(self.truncated_frac * total)
        long = sum(e["stop"] == "context" and not e["tokens"] for e in self.examples)
        unasked = f", of these {long} not begun (the prompt fills the model's block)" if long else ""
        return f"accuracy {accuracy:.3f}{layout}; of {total} completions: {told}; cut off {cut}{unasked}"

    def groups(self) -> dict[str, tuple[Interval, int]]:
        """Group -> pass@1 and its number of problems, in the order of their names; empty where the task has no groups."""
        found: dict[str, list[float]] = {}
        for p in self.problems if self.grouped_by else ():
            found.setdefault(str(p.meta.get(self.grouped_by, "other")), []).append(p.c / p.n)
        return {name: (share_interval(found[name]), len(found[name])) for name in sorted(found)}

    def told_by_group(self) -> str:
        """A line for each group and the mean over groups, in which each counts the same; "" without groups."""
        groups = self.groups()
        lines = [
            f"  {self.grouped_by} {name}: pass@1 = {passes} (n={self.n}, N={size}, temperature={self.temperature:g})"
            for name, (passes, size) in groups.items()
        ]
        return (
            "\n".join([*lines, f"  mean over {len(groups)} of {self.grouped_by}: {_mean(groups):.3f}"])
            if groups
            else ""
        )

    def row(self) -> dict[str, float]:
        """Metrics under their declared names; an interval is NAME/lo and NAME/hi."""
        counts = self.tier_counts
        found = {f"tier/{t}": counts[t] / (self.n * self.N) for t in self.tiers}
        for name, interval in [("reward_mean", self.reward)] + [(f"pass@{k}", i) for k, i in self.pass_at.items()]:
            found |= {name: interval.value, f"{name}/lo": interval.lo, f"{name}/hi": interval.hi}
        for name in self.examples[0]["terms"] if self.examples else ():
            found[f"reward/{name}"] = sum(e["terms"][name] for e in self.examples) / len(self.examples)
        if self.formatted:
            found["format_rate"] = self.format_rate
        if groups := self.groups():
            found["mean_of_groups"] = _mean(groups)
        for name, (passes, size) in groups.items():
            found |= {
                f"{name}/pass@1": passes.value,
                f"{name}/pass@1/lo": passes.lo,
                f"{name}/pass@1/hi": passes.hi,
                f"{name}/n": size,
            }
        return found | dict(
            exact_match=sum(p.c for p in self.problems) / (self.n * self.N),
            n_samples=self.n,
            n_problems=self.N,
            temperature=self.temperature,
            completion_tokens_mean=self.completion_tokens_mean,
            truncated_frac=self.truncated_frac,
        )

    def __str__(self) -> str:
        passes = ", ".join(f"pass@{k} = {i}" for k, i in self.pass_at.items())
        counts = f"n={self.n}, N={self.N}, temperature={self.temperature:g}"
        return f"{passes} ({counts}, 95 % intervals over problems)"


def _mean(groups: Mapping[str, tuple[Interval, int]]) -> float:
    return sum(passes.value for passes, _ in groups.values()) / len(groups)


def paired_difference(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], *, k: int = 1, seed: int = 0
) -> Interval:
    """pass@k of b minus that of a with the paired bootstrap interval, from rows of per_problem.jsonl. Raises
    DataError for other problems."""
    by_id = {row["id"]: row for row in a}
    if len(by_id) != len(a) or by_id.keys() != {row["id"] for row in b} or len(a) != len(b):
        raise DataError(
            f"{len(a)} and {len(b)} problems that are not the same; a paired difference needs the same ids, each once"
        )
    first, second = (
        [estimate_pass_at_k(r["n"], r["c"], k) for r in rows] for rows in ([by_id[row["id"]] for row in b], b)
    )
    return Interval(*paired_bootstrap(first, second, seed))


def parts_of(result: TaskResult, exposed: Collection[str], *, seed: int = 0) -> dict[str, float]:
    """pass@1 of the clean and of the exposed problems, printed where there are any, under names for a row."""
    found: dict[str, float] = {"exposed_n": sum(p.id in exposed for p in result.problems)}
    for part in ("clean", "exposed") if found["exposed_n"] else ():
        kept = [p for p in result.problems if (p.id in exposed) == (part == "exposed")]
        if kept:
            passes = share_interval([p.c / p.n for p in kept], seed=seed)
            found |= {f"{part}/pass@1": passes.value, f"{part}/pass@1/lo": passes.lo, f"{part}/pass@1/hi": passes.hi}
            print(f"  {part}: pass@1 = {passes} (n={result.n}, N={len(kept)}, temperature={result.temperature:g})")
    return found


def read_per_problem(run: Run) -> list[dict[str, Any]]:
    """Rows of an evaluation's per_problem.jsonl: checkpoint, split, id, n, c, reward_mean, tiers."""
    path = run.path / "per_problem.jsonl"
    if not path.exists():
        raise MissingFile(f"{path} does not exist; `codechat evaluate` writes it")
    return list(read_rows(path))
