"""Results of an evaluation: counts per problem, pass@k with intervals, paired differences
between checkpoints."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
FEW = 10  # problems; below it the interval covers nearly everything
KEPT_SAMPLES = 40  # completions of an evaluation written to samples.jsonl


class Group(NamedTuple):
    """pass@1 of a group of problems, and how many they are."""

    passes: Interval
    n: int


@dataclass(frozen=True)
class TaskResult:
    """One checkpoint on one split. examples: a row for each completion, n of each problem in turn.

    A task may have `formatted` (tiers in the required format), `grouped_by` (a key of a
    problem's meta), `opposed_by` (a key of it, of whose groups one rewards what another
    punishes, such as calls and silence), `clustered_by` (a key whose values name problems that are
    not independent), and `classified_by` with `classes` (a key of a score's parts and its
    values)."""

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
            some = self.examples[i * self.n : (i + 1) * self.n]
            row: Row = dict(
                id=problem.id,
                n=self.n,
                c=sum(e["correct"] for e in some),
                reward_mean=sum(e["reward"] for e in some) / self.n,
                tiers=Counter(e["tier"] for e in some),
            )
            cluster = problem.meta.get(self.of_task("clustered_by"))
            if cluster:
                row["cluster"] = str(cluster)
            rows.append(row)
        return rows

    @cached_property
    def pass_at(self) -> dict[int, Interval]:
        intervals = {}
        for k in self.ks:
            values = [_passed(row, k) for row in self.counts]
            intervals[k] = mean_over(self.counts, values, self.seed)
        return intervals

    @cached_property
    def reward(self) -> Interval:
        # where settings of a task pay less than 1 for full marks, the range stays 0 to 1: their
        # intervals compare
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

    @cached_property
    def surfaces(self) -> Counter[str]:
        """How calls were written, of an imported model that has its own words for them ("none":
        no call); empty where no completion holds a call."""
        counts = Counter[str]()
        for example in self.examples:
            surface = example.get("surface")
            if surface:
                counts[surface] += 1
        if set(counts) == {"none"}:
            return Counter()
        return counts

    def tier_share(self, tiers: Iterable[str]) -> float:
        """Share of completions on one of these tiers."""
        return sum(self.tiers[t] for t in tiers) / self.total

    @property
    def samples(self) -> list[Row]:
        """At most KEPT_SAMPLES rows at equal distances, so that they come from all over the
        problems."""
        total = len(self.examples)
        kept = min(total, KEPT_SAMPLES)
        return [_without_parts(self.examples[i * total // kept]) for i in range(kept)]

    def settings(self, problems: int | None = None) -> str:
        """n, N and temperature, without which no pass@k is printed."""
        return (
            f"n={self.n}, N={self.N if problems is None else problems}, "
            f"temperature={self.temperature:g}"
        )

    def groups(self, by: str = "") -> dict[str, Group]:
        """The groups by name; empty where the task has none. by: a key of a problem's meta
        instead of the task's."""
        by = by or self.of_task("grouped_by")
        members: dict[str, list[Row]] = {}
        for problem, row in zip(self.problems, self.counts) if by else ():
            members.setdefault(str(problem.meta.get(by, "other")), []).append(row)
        return {name: Group(pass_at_1(rows), len(rows)) for name, rows in sorted(members.items())}

    def opposed(self) -> dict[str, Group]:
        """The groups of a task with `opposed_by`; empty of another one, and where the problems
        are of one group."""
        by = self.of_task("opposed_by")
        groups = self.groups(by) if by else {}
        return groups if len(groups) > 1 else {}

    def class_shares(self) -> dict[str, dict[str, float]]:
        """Group -> class -> share of its completions; one group "" where the task has none.
        Groups whose scores name no class are left out."""
        classes = self.of_task("classes")
        if not classes:
            return {}
        by = self.of_task("grouped_by")
        key = self.of_task("classified_by")
        counts: dict[str, Counter[str]] = {}
        for i, example in enumerate(self.examples):
            problem = self.problems[i // self.n]
            group = str(problem.meta.get(by, "other")) if by else ""
            counts.setdefault(group, Counter())[example["parts"].get(key, "")] += 1
        return {
            name: _shares(counts[name], classes)
            for name in sorted(counts)
            if not counts[name].keys().isdisjoint(classes)
        }

    def row(self) -> dict[str, float]:
        """Metrics under their declared names; an interval is NAME/lo and NAME/hi."""
        row = {f"tier/{tier}": self.tier_share([tier]) for tier in self.task.tiers}
        row |= self.reward.row("reward_mean")
        for k, interval in self.pass_at.items():
            row |= interval.row(f"pass@{k}")
        for name in self.examples[0]["terms"]:
            row[f"reward/{name}"] = sum(e["terms"][name] for e in self.examples) / self.total
        formatted = self.of_task("formatted")
        if formatted:
            row["format_rate"] = self.tier_share(formatted)
        for form, count in self.surfaces.items():
            name = form.replace(" ", "_")
            row[f"surface/{name}"] = count / self.total
        groups = self.groups()
        if groups:
            row["mean_of_groups"] = sum(_values(groups)) / len(groups)
        opposed = self.opposed()
        if opposed:
            row["harmonic_mean"] = harmonic_mean(_values(opposed))
        for name, group in (groups | opposed).items():
            row |= group.passes.row(f"{name}/pass@1")
            row[f"{name}/n"] = group.n
        key = self.of_task("classified_by")
        for name, shares in self.class_shares().items():
            for value, share in shares.items():
                row[f"{name}/{key}_{value}".lstrip("/")] = share
        return row | dict(
            exact_match=sum(p["c"] for p in self.counts) / self.total,
            n_samples=self.n,
            n_problems=self.N,
            temperature=self.temperature,
            completion_tokens_mean=sum(e["tokens"] for e in self.examples) / self.total,
            truncated_frac=self.cut_off / self.total,
        )

    @property
    def cut_off(self) -> int:
        """Completions that ended in the middle of an answer."""
        return sum(e["stop"] in CUT_OFF for e in self.examples)

    def report(self, title: str) -> str:
        """For people: pass@k, tiers, groups. A completion that was cut off also counts under
        its tier."""
        row = self.row()
        accuracy = f"accuracy {row['exact_match']:.3f}"
        if "format_rate" in row:
            accuracy += f", format rate {row['format_rate']:.3f}"
        tiers = ", ".join(f"{tier} {self.tiers[tier]}" for tier in reversed(self.task.tiers))
        cut_off = f"cut off {self.cut_off}"
        not_begun = sum(e["stop"] == "context" and not e["tokens"] for e in self.examples)
        if not_begun:
            cut_off += f", of these {not_begun} not begun (the prompt fills the model's block)"
        lines = [
            f"{title}: {self}",
            f"  {accuracy}; of {self.total} completions: {tiers}; {cut_off}",
        ]
        if self.N < FEW:
            lines.append("  few problems: such an interval says little; add rows to this split")
        if self.surfaces:
            forms = [f"{form} {count}" for form, count in self.surfaces.most_common()]
            lines.append(f"  calls were written: {', '.join(forms)}")
        lines += self._group_lines()
        if "harmonic_mean" in row:
            lines.append(f"  harmonic mean of these: {row['harmonic_mean']:.3f}")
        return "\n".join(lines)

    def _group_lines(self) -> list[str]:
        """A line for each group with its classes, their mean, and a line for each opposed group."""
        lines = []
        by = self.of_task("grouped_by")
        groups = self.groups()
        classes = self.class_shares()
        for name, group in groups.items():
            line = f"  {by} {name}: {self._describe(group)}"
            shares = [f"{c} {share:.2f}" for c, share in classes.get(name, {}).items()]
            if shares:
                line += f"; {', '.join(shares)}"
            lines.append(line)
        if groups:
            mean = sum(_values(groups)) / len(groups)
            lines.append(f"  mean over {len(groups)} of {by}: {mean:.3f}")
        opposed_by = self.of_task("opposed_by").replace("_", " ")
        for name, group in self.opposed().items():
            lines.append(f"  {opposed_by} {name}: {self._describe(group)}")
        return lines

    def _describe(self, group: Group) -> str:
        return f"pass@1 = {group.passes} ({self.settings(group.n)})"

    def __str__(self) -> str:
        passes = ", ".join(f"pass@{k} = {i}" for k, i in self.pass_at.items())
        kind = "cluster" if any("cluster" in p for p in self.counts) else "problem"
        number = len({p.get("cluster", p["id"]) for p in self.counts})
        kind += "s" * (number != 1)
        return f"{passes} ({self.settings()}, 95 % intervals over {number} {kind})"


def harmonic_mean(values: Sequence[float]) -> float:
    """0 where one of the values is 0: no policy earns it by doing only one of two things."""
    return len(values) / sum(1 / value for value in values) if all(values) else 0.0


def _values(groups: Mapping[str, Group]) -> list[float]:
    """pass@1 of each group."""
    return [group.passes.value for group in groups.values()]


def _shares(counts: Counter[str], names: Iterable[str]) -> dict[str, float]:
    return {name: counts[name] / counts.total() for name in names}


def _without_parts(example: Row) -> Row:
    return {name: value for name, value in example.items() if name not in ("parts", "terms")}


def mean_over(
    counts: Sequence[Row],
    values: Sequence[float],
    seed: int = 0,
    largest: float = 1.0,
) -> Interval:
    """The mean of a value of each problem, from 0 to `largest`, with the interval over clusters
    or problems."""
    clusters = _clusters(counts, [p["id"] for p in counts])
    bounds = (0.0, largest)
    if clusters is None:
        return bootstrap_interval(values, seed=seed, bounds=bounds)
    return hierarchical_interval([values], clusters=clusters, seed=seed, bounds=bounds)


def pass_at_1(counts: Sequence[Row], seed: int = 0) -> Interval:
    return mean_over(counts, [p["c"] / p["n"] for p in counts], seed)


def _passed(row: Row, k: int) -> float:
    """pass@k of a problem."""
    return estimate_pass_at_k(row["n"], row["c"], k)


def paired_difference(a: Sequence[Row], b: Sequence[Row], *, k: int = 1, seed: int = 0) -> Interval:
    """pass@k of b minus that of a with the paired interval, from rows of per_problem.jsonl."""
    pairs = _pairs(a, b, k)
    clusters = _clusters([*a, *b], list(pairs))
    if clusters:
        return hierarchical_interval(
            [[pair.gain for pair in pairs.values()]], clusters=clusters, seed=seed
        )
    before, after = zip(*pairs.values(), strict=True)
    return paired_bootstrap(before, after, seed)


def difference_over_seeds(
    seeds: Sequence[tuple[Sequence[Row], Sequence[Row]]], *, k: int = 1
) -> Interval:
    """The same over several seeds, each with its rows (a, b). The seeds' problems may differ in
    part."""
    pairs = [_pairs(a, b, k) for a, b in seeds]
    ids = sorted(set().union(*pairs))
    clusters = _clusters((row for pair in seeds for rows in pair for row in rows), ids)
    return hierarchical_interval([_gains(of_seed, ids) for of_seed in pairs], clusters=clusters)


class _Pair(NamedTuple):
    """pass@k of one problem before and after."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def _gains(pairs: Mapping[str, _Pair], ids: Sequence[str]) -> list[float]:
    """The gain of each problem; nan = not among the pairs."""
    return [pairs[id].gain if id in pairs else math.nan for id in ids]


def _clusters(rows: Iterable[Mapping[str, Any]], ids: Sequence[str]) -> list[str] | None:
    """The cluster of each problem, or its id if it has none; none if no row names a cluster (in
    a table, nan)."""
    named = {
        row["id"]: row["cluster"]
        for row in rows
        if isinstance(row.get("cluster"), str) and row["cluster"]
    }
    return [named.get(id, id) for id in ids] if named else None


def _pairs(a: Sequence[Row], b: Sequence[Row], k: int) -> dict[str, _Pair]:
    """{problem: its pass@k in a and in b}, in the order of b."""
    before = {row["id"]: row for row in a}
    after = {row["id"]: row for row in b}
    if before.keys() != after.keys() or not len(a) == len(b) == len(after):
        raise DataError(
            f"{len(a)} and {len(b)} problems; a paired difference needs the same ids, each once"
        )
    return {id: _Pair(_passed(before[id], k), _passed(row, k)) for id, row in after.items()}


def clean_and_exposed(result: TaskResult, exposed: Collection[str]) -> dict[str, float]:
    """pass@1 of the clean and of the exposed problems, as metrics, and printed if any problem
    is exposed."""
    is_exposed = [problem.id in exposed for problem in result.problems]
    row: dict[str, float] = {"exposed_n": sum(is_exposed)}
    if not row["exposed_n"]:
        return row
    for part, wanted in (("clean", False), ("exposed", True)):
        some = [counts for counts, found in zip(result.counts, is_exposed) if found == wanted]
        if some:
            passes = pass_at_1(some, result.seed)
            row |= passes.row(f"{part}/pass@1")
            print(f"  {part}: pass@1 = {passes} ({result.settings(len(some))})")
    return row


def read_per_problem(run: Run) -> list[Row]:
    """Rows of an evaluation's per_problem.jsonl: checkpoint, split, sampling and those of
    `TaskResult.counts`."""
    path = run.path / "per_problem.jsonl"
    if not path.exists():
        raise MissingFile(f"{path} does not exist; `codechat evaluate` writes it")
    return list(read_rows(path))
