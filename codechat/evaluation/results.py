"""Results of an evaluation: counts per problem, pass@k with intervals, differences between checkpoints on the same problems."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from codechat.tasks.base import Problem, Task

Row = dict[str, Any]
CUT_OFF = ("length", "context")
KEPT_SAMPLES = 40  # completions of an evaluation written to samples.jsonl


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one split. examples: a row for each completion, n of each problem in turn.

    A task may have `formatted` (tiers in the required format), `grouped_by` (a key of a problem's meta), `clustered_by`
    (one whose values name what is not independent), and `classified_by` with `classes` (a key of a score's parts and
    its values)."""

    task: Task
    problems: Sequence[Problem]
    examples: list[Row]
    n: int
    temperature: float
    ks: Sequence[int]
    seed: int = 0

    def of_task(self, name: str) -> Any:
        return getattr(self.task, name, "")

    @cached_property
    def counts(self) -> list[Row]:
        """The rows of per_problem.jsonl: n completions, c of them correct."""
        rows = []
        for i, problem in enumerate(self.problems):
            some = self.examples[i * self.n :][: self.n]
            cluster = problem.meta.get(self.of_task("clustered_by"))
            row: Row = dict(id=problem.id, n=self.n, c=sum(e["correct"] for e in some))
            row |= dict(reward_mean=sum(e["reward"] for e in some) / self.n, tiers=Counter(e["tier"] for e in some))
            rows.append(row | ({"cluster": str(cluster)} if cluster else {}))
        return rows

    @cached_property
    def pass_at(self) -> dict[int, Interval]:
        passed = {k: [estimate_pass_at_k(p["n"], p["c"], k) for p in self.counts] for k in self.ks}
        return {k: mean_over(self.counts, values, self.seed) for k, values in passed.items()}

    @cached_property
    def reward(self) -> Interval:
        # where settings of a task pay less than 1 for full marks, the range stays 0 to 1: their intervals compare
        largest = max(1.0, self.task.max_reward)
        return mean_over(self.counts, [p["reward_mean"] for p in self.counts], self.seed, largest)

    @property
    def N(self) -> int:  # noqa: N802  (the letter that goes with pass@k)
        return len(self.problems)

    @property
    def total(self) -> int:
        """Completions of all problems."""
        return self.n * self.N

    @cached_property
    def tiers(self) -> Counter[str]:
        return Counter(e["tier"] for e in self.examples)

    def tier_share(self, tiers: Iterable[str]) -> float:
        """Share of completions on one of these tiers."""
        return sum(self.tiers[t] for t in tiers) / self.total

    @property
    def samples(self) -> list[Row]:
        """At most KEPT_SAMPLES rows at equal distances, so that they come from all over the problems."""
        rows, total = self.examples, len(self.examples)
        rows = [rows[i * total // KEPT_SAMPLES] for i in range(KEPT_SAMPLES)] if total > KEPT_SAMPLES else rows
        return [{k: v for k, v in row.items() if k not in ("parts", "terms")} for row in rows]

    def settings(self, problems: int | None = None) -> str:
        """n, N and temperature, without which no pass@k is printed."""
        return f"n={self.n}, N={self.N if problems is None else problems}, temperature={self.temperature:g}"

    def groups(self, by: str = "") -> dict[str, tuple[Interval, int]]:
        """Group -> pass@1 and its number of problems, by name; empty where the task has no groups."""
        members: dict[str, list[Row]] = {}
        for p, row in zip(self.problems, self.counts) if (by := by or self.of_task("grouped_by")) else ():
            members.setdefault(str(p.meta.get(by, "other")), []).append(row)
        return {name: (pass_at_1(members[name]), len(members[name])) for name in sorted(members)}

    def class_shares(self) -> dict[str, dict[str, float]]:
        """Group -> class -> share of its completions; one group "" where the task has none. Empty without classes."""
        by, key, classes = map(self.of_task, ("grouped_by", "classified_by", "classes"))
        counts: dict[str, Counter[str]] = {}
        for i, e in enumerate(self.examples if classes else ()):
            group = str(self.problems[i // self.n].meta.get(by, "other")) if by else ""
            counts.setdefault(group, Counter())[e["parts"].get(key, "")] += 1
        return {name: {c: counts[name][c] / counts[name].total() for c in classes} for name in sorted(counts)}

    def row(self) -> dict[str, float]:
        """Metrics under their declared names; an interval is NAME/lo and NAME/hi."""
        row = {f"tier/{t}": self.tier_share([t]) for t in self.task.tiers} | self.reward.row("reward_mean")
        for k, interval in self.pass_at.items():
            row |= interval.row(f"pass@{k}")
        for name in self.examples[0]["terms"]:
            row[f"reward/{name}"] = sum(e["terms"][name] for e in self.examples) / self.total
        if formatted := self.of_task("formatted"):
            row["format_rate"] = self.tier_share(formatted)
        if groups := self.groups():
            row["mean_of_groups"] = sum(passes.value for passes, _ in groups.values()) / len(groups)
        for name, (passes, size) in groups.items():
            row |= passes.row(f"{name}/pass@1") | {f"{name}/n": size}
        for name, shares in self.class_shares().items():
            row |= {f"{name}/{self.of_task('classified_by')}_{c}".lstrip("/"): share for c, share in shares.items()}
        return row | dict(
            exact_match=sum(p["c"] for p in self.counts) / self.total,
            n_samples=self.n,
            n_problems=self.N,
            temperature=self.temperature,
            completion_tokens_mean=sum(e["tokens"] for e in self.examples) / self.total,
            truncated_frac=sum(e["stop"] in CUT_OFF for e in self.examples) / self.total,
        )

    def report(self, title: str) -> str:
        """For people: pass@k, tiers, groups. A completion that was cut off also counts under its tier."""
        row, classes, by = self.row(), self.class_shares(), self.of_task("grouped_by")
        layout = f", format rate {row['format_rate']:.3f}" if "format_rate" in row else ""
        tiers = ", ".join(f"{t} {self.tiers[t]}" for t in reversed(self.task.tiers))
        long = sum(e["stop"] == "context" and not e["tokens"] for e in self.examples)
        cut = f"cut off {sum(e['stop'] in CUT_OFF for e in self.examples)}"
        cut += f", of these {long} not begun (the prompt fills the model's block)" if long else ""
        head = f"  accuracy {row['exact_match']:.3f}{layout}; of {self.total} completions"
        lines = [f"{title}: {self}", f"{head}: {tiers}; {cut}"]
        for name, (passes, size) in (groups := self.groups()).items():
            shown = "; " + ", ".join(f"{c} {share:.2f}" for c, share in classes[name].items()) if classes else ""
            lines.append(f"  {by} {name}: pass@1 = {passes} ({self.settings(size)}){shown}")
        mean = [f"  mean over {len(groups)} of {by}: {row['mean_of_groups']:.3f}"] if groups else []
        return "\n".join(lines + mean)

    def __str__(self) -> str:
        passes = ", ".join(f"pass@{k} = {i}" for k, i in self.pass_at.items())
        kind = "clusters" if any("cluster" in p for p in self.counts) else "problems"
        number = len({p.get("cluster", p["id"]) for p in self.counts})
        return f"{passes} ({self.settings()}, 95 % intervals over {number} {kind})"


def mean_over(counts: Sequence[Row], values: Sequence[float], seed: int = 0, largest: float = 1.0) -> Interval:
    """The mean of a value of each problem, from 0 to `largest`, with the interval over clusters or problems."""
    clusters, bounds = _clusters(counts, [p["id"] for p in counts]), (0.0, largest)
    if clusters is None:
        return bootstrap_interval(values, seed=seed, bounds=bounds)
    return hierarchical_interval([values], clusters=clusters, seed=seed, bounds=bounds)


def pass_at_1(counts: Sequence[Row], seed: int = 0) -> Interval:
    return mean_over(counts, [p["c"] / p["n"] for p in counts], seed)


def paired_difference(a: Sequence[Row], b: Sequence[Row], *, k: int = 1, seed: int = 0) -> Interval:
    """pass@k of b minus that of a with the paired interval, from rows of per_problem.jsonl."""
    pairs = _pairs(a, b, k)
    before, after = zip(*pairs.values(), strict=True)
    if clusters := _clusters([*a, *b], list(pairs)):
        gains = [y - x for x, y in zip(before, after, strict=True)]
        return hierarchical_interval([gains], clusters=clusters, seed=seed)
    return paired_bootstrap(before, after, seed)


def difference_over_seeds(
    seeds: Sequence[tuple[Sequence[Row], Sequence[Row]]], *, k: int = 1, seed: int = 0
) -> Interval:
    """The same over several seeds, each with its rows (a, b). The seeds' problems may differ in part."""
    gains = [{id: after - before for id, (before, after) in _pairs(a, b, k).items()} for a, b in seeds]
    ids = sorted(set().union(*gains))
    clusters = _clusters((row for pair in seeds for rows in pair for row in rows), ids)
    table = [[gain.get(id, math.nan) for id in ids] for gain in gains]
    return hierarchical_interval(table, clusters=clusters, seed=seed)


def _clusters(rows: Iterable[Mapping[str, Any]], ids: Sequence[str]) -> list[str] | None:
    """The cluster of each problem, itself where it has none; None where no row names one (a table has nan there)."""
    named = {row["id"]: row["cluster"] for row in rows if isinstance(row.get("cluster"), str) and row["cluster"]}
    return [named.get(id, id) for id in ids] if named else None


def _pairs(a: Sequence[Row], b: Sequence[Row], k: int) -> dict[str, tuple[float, float]]:
    """{problem: its pass@k in a and in b}, in the order of b."""
    by_id = {row["id"]: row for row in a}
    if len(by_id) != len(a) or by_id.keys() != {row["id"] for row in b} or len(a) != len(b):
        raise DataError(f"{len(a)} and {len(b)} problems; a paired difference needs the same ids, each once")
    passed = lambda row: estimate_pass_at_k(row["n"], row["c"], k)  # noqa: E731
    return {row["id"]: (passed(by_id[row["id"]]), passed(row)) for row in b}


def clean_and_exposed(result: TaskResult, exposed: Collection[str]) -> dict[str, float]:
    """pass@1 of the clean and of the exposed problems, as metrics, and printed if any problem is exposed."""
    row: dict[str, float] = {"exposed_n": sum(p.id in exposed for p in result.problems)}
    for part in ("clean", "exposed") if row["exposed_n"] else ():
        if some := [p for p in result.counts if (p["id"] in exposed) == (part == "exposed")]:
            passes = pass_at_1(some, result.seed)
            row |= passes.row(f"{part}/pass@1")
            print(f"  {part}: pass@1 = {passes} ({result.settings(len(some))})")
    return row


def read_per_problem(run: Run) -> list[Row]:
    """Rows of an evaluation's per_problem.jsonl: checkpoint, split, sampling and those of `TaskResult.counts`."""
    path = run.path / "per_problem.jsonl"
    if not path.exists():
        raise MissingFile(f"{path} does not exist; `codechat evaluate` writes it")
    return list(read_rows(path))
