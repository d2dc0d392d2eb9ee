"""Results of an evaluation: counts per problem, pass@k with intervals, and differences between checkpoints on the same problems."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_rows
from codechat.core.errors import DataError, MissingFile
from codechat.evaluation.intervals import (
    Interval,
    bootstrap_interval,
    estimate_pass_at_k,
    hierarchical_interval,
    paired_bootstrap,
)
from codechat.runs.run import Run


@dataclass(frozen=True)
class ProblemResult:
    """n completions of one problem, c of them correct. cluster: problems of one cluster, such as requests for one tool, are not independent."""

    id: str
    n: int
    c: int
    reward_mean: float
    tiers: Counter[str]
    rewards: tuple[float, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    cluster: str = ""

    def row(self) -> dict[str, Any]:
        """A line of per_problem.jsonl."""
        row = dict(id=self.id, n=self.n, c=self.c, reward_mean=self.reward_mean, tiers=dict(self.tiers))
        return row | ({"cluster": self.cluster} if self.cluster else {})


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one split. examples: every completion with its score. formatted: the tiers of completions in the required format.

    grouped_by: the key of a problem's meta by which scores are grouped, such as "category". classified_by, classes: the key of a score's parts
    whose values are counted, and those values."""

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
    classified_by: str = ""
    classes: tuple[str, ...] = ()

    @property
    def N(self) -> int:  # noqa: N802  (the letter that goes with pass@k)
        return len(self.problems)

    @property
    def total(self) -> int:
        """Completions of all problems."""
        return self.n * self.N

    @property
    def tier_counts(self) -> Counter[str]:
        return sum((p.tiers for p in self.problems), Counter[str]())

    def tier_share(self, tiers: Iterable[str]) -> float:
        """Share of completions on one of these tiers."""
        counts = self.tier_counts
        return sum(counts[t] for t in tiers) / self.total

    @property
    def exact_match(self) -> float:
        return sum(p.c for p in self.problems) / self.total

    @property
    def format_rate(self) -> float:
        return self.tier_share(self.formatted)

    def counts(self, problems: int | None = None) -> str:
        """n, N and temperature, without which no pass@k is printed."""
        return f"n={self.n}, N={self.N if problems is None else problems}, temperature={self.temperature:g}"

    def outcomes(self) -> str:
        """Accuracy, format rate and counts by tier in one line; a completion that was cut off also counts under its tier."""
        counts = self.tier_counts
        layout = f", format rate {self.format_rate:.3f}" if self.formatted else ""
        tiers = ", ".join(f"{t} {counts[t]}" for t in reversed(self.tiers))
        cut = round(self.truncated_frac * self.total)
        long = sum(e["stop"] == "context" and not e["tokens"] for e in self.examples)
        not_begun = f", of these {long} not begun (the prompt fills the model's block)" if long else ""
        return (
            f"accuracy {self.exact_match:.3f}{layout}; of {self.total} completions: {tiers}; cut off {cut}{not_begun}"
        )

    def groups(self) -> dict[str, tuple[Interval, int]]:
        """Group -> pass@1 and its number of problems, by name; empty where the task has no groups. Intervals are over clusters."""
        members: dict[str, list[ProblemResult]] = {}
        for p in self.problems if self.grouped_by else ():
            members.setdefault(str(p.meta.get(self.grouped_by, "other")), []).append(p)
        return {name: (_pass_at_1(members[name]), len(members[name])) for name in sorted(members)}

    def class_shares(self) -> dict[str, dict[str, float]]:
        """Group -> class -> share of its completions; one group "" where the task has none. Empty without classes."""
        if not self.classes:
            return {}
        group_of = {p.id: str(p.meta.get(self.grouped_by, "other")) if self.grouped_by else "" for p in self.problems}
        counts: dict[str, Counter[str]] = {name: Counter() for name in sorted(set(group_of.values()))}
        for e in self.examples:
            counts[group_of[e["problem"]]][e["parts"].get(self.classified_by, "")] += 1
        return {name: {c: some[c] / max(1, some.total()) for c in self.classes} for name, some in counts.items()}

    def group_lines(self) -> list[str]:
        """A line for each group, then the mean in which each group counts the same; none without groups."""
        groups, by, classes = self.groups(), self.grouped_by, self.class_shares()

        def shown(name: str) -> str:
            return "; " + ", ".join(f"{c} {share:.2f}" for c, share in classes[name].items()) if classes else ""

        lines = [
            f"  {by} {name}: pass@1 = {passes} ({self.counts(size)}){shown(name)}"
            for name, (passes, size) in groups.items()
        ]
        return lines + ([f"  mean over {len(groups)} of {by}: {_mean(groups):.3f}"] if groups else [])

    def row(self) -> dict[str, float]:
        """Metrics under their declared names; an interval is NAME/lo and NAME/hi."""
        row = {f"tier/{t}": self.tier_share([t]) for t in self.tiers} | self.reward.row("reward_mean")
        for k, interval in self.pass_at.items():
            row |= interval.row(f"pass@{k}")
        for name in self.examples[0]["terms"] if self.examples else ():
            row[f"reward/{name}"] = sum(e["terms"][name] for e in self.examples) / len(self.examples)
        if self.formatted:
            row["format_rate"] = self.format_rate
        if groups := self.groups():
            row["mean_of_groups"] = _mean(groups)
        for name, (passes, size) in groups.items():
            row |= passes.row(f"{name}/pass@1") | {f"{name}/n": size}
        for name, shares in self.class_shares().items():
            row |= {f"{name}/{self.classified_by}_{c}".lstrip("/"): share for c, share in shares.items()}
        return row | dict(
            exact_match=self.exact_match,
            n_samples=self.n,
            n_problems=self.N,
            temperature=self.temperature,
            completion_tokens_mean=self.completion_tokens_mean,
            truncated_frac=self.truncated_frac,
        )

    def __str__(self) -> str:
        passes = ", ".join(f"pass@{k} = {i}" for k, i in self.pass_at.items())
        drawn = f"{len({p.cluster or p.id for p in self.problems})} " + (
            "clusters" if any(p.cluster for p in self.problems) else "problems"
        )
        return f"{passes} ({self.counts()}, 95 % intervals over {drawn})"


def mean_over(
    problems: Sequence[ProblemResult], values: Sequence[float], seed: int = 0, largest: float = 1.0
) -> Interval:
    """The mean of a value of each problem, from 0 to `largest`; the interval draws clusters where problems have some, else problems."""
    bounds = (0.0, largest)
    if not any(p.cluster for p in problems):
        return bootstrap_interval(values, seed=seed, bounds=bounds)
    return hierarchical_interval([values], clusters=[p.cluster or p.id for p in problems], seed=seed, bounds=bounds)


def _pass_at_1(problems: Sequence[ProblemResult], seed: int = 0) -> Interval:
    return mean_over(problems, [p.c / p.n for p in problems], seed)


def _mean(groups: Mapping[str, tuple[Interval, int]]) -> float:
    return sum(passes.value for passes, _ in groups.values()) / len(groups)


def paired_difference(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], *, k: int = 1, seed: int = 0
) -> Interval:
    """pass@k of b minus that of a with the paired interval over clusters or problems, from rows of per_problem.jsonl."""
    pairs = _pairs(a, b, k)
    before, after = zip(*pairs.values(), strict=True)
    if clusters := _clusters([*a, *b], list(pairs)):
        gains = [y - x for x, y in zip(before, after, strict=True)]
        return hierarchical_interval([gains], clusters=clusters, seed=seed)
    return Interval(*paired_bootstrap(before, after, seed))


def _clusters(rows: Iterable[Mapping[str, Any]], ids: Sequence[str]) -> list[str] | None:
    """The cluster of each of these problems, itself where it has none; None where no row names one (a table has nan there)."""
    named = {row["id"]: row["cluster"] for row in rows if isinstance(row.get("cluster"), str) and row["cluster"]}
    return [named.get(id, id) for id in ids] if named else None


def _pairs(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], k: int) -> dict[str, tuple[float, float]]:
    """{problem: its pass@k in a and in b}, in the order of b."""
    by_id = {row["id"]: row for row in a}
    if len(by_id) != len(a) or by_id.keys() != {row["id"] for row in b} or len(a) != len(b):
        raise DataError(f"{len(a)} and {len(b)} problems; a paired difference needs the same ids, each once")
    passed = lambda row: estimate_pass_at_k(row["n"], row["c"], k)  # noqa: E731
    return {row["id"]: (passed(by_id[row["id"]]), passed(row)) for row in b}


def difference_over_seeds(
    seeds: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]], *, k: int = 1, seed: int = 0
) -> Interval:
    """The same over several seeds, each with its rows (a, b), with `hierarchical_interval`. The seeds' problems may differ in part."""
    gains = [{id: after - before for id, (before, after) in _pairs(a, b, k).items()} for a, b in seeds]
    ids = sorted(set().union(*gains))
    clusters = _clusters((row for pair in seeds for rows in pair for row in rows), ids)
    table = [[gain.get(id, math.nan) for id in ids] for gain in gains]
    return hierarchical_interval(table, clusters=clusters, seed=seed)


def clean_and_exposed(result: TaskResult, exposed: Collection[str], *, seed: int = 0) -> dict[str, float]:
    """pass@1 of the clean and of the exposed problems, as metrics, and printed if any problem is exposed."""
    row: dict[str, float] = {"exposed_n": sum(p.id in exposed for p in result.problems)}
    for part in ("clean", "exposed") if row["exposed_n"] else ():
        if problems := [p for p in result.problems if (p.id in exposed) == (part == "exposed")]:
            passes = _pass_at_1(problems, seed)
            row |= passes.row(f"{part}/pass@1")
            print(f"  {part}: pass@1 = {passes} ({result.counts(len(problems))})")
    return row


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append one line of json per row."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def read_per_problem(run: Run) -> list[dict[str, Any]]:
    """Rows of an evaluation's per_problem.jsonl: checkpoint, split, id, n, c, reward_mean, tiers, and cluster where it has one."""
    path = run.path / "per_problem.jsonl"
    if not path.exists():
        raise MissingFile(f"{path} does not exist; `codechat evaluate` writes it")
    return list(read_rows(path))
