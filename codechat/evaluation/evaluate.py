"""Evaluate checkpoints with the task's own `score`: pass@k with intervals, tiers, the behaviour
matrix.

    codechat evaluate --ckpt released/nano released/mini --task examples/my_task.py:MyTask --n 8 \\
        --ks 1 8
    codechat evaluate --ckpt my-rl --task my_task.py --split select --all-checkpoints \\
        --run-name choice
    codechat evaluate --ckpt released/nano --task examples/my_task.py:MyTask --temperatures 0 0.5 \\
        --forced-call true
    codechat evaluate --ckpt released/nano --task my_task.py --constrain true
    codechat evaluate --ckpt released/nano --task my_choices.py --score loglik       multiple choice (`loglik`)
    codechat evaluate --endpoint http://127.0.0.1:8000 --task my_task.py       a server instead (`endpoint`)

Seeds depend on the problem's id, so two checkpoints are compared with common random numbers.
--all-checkpoints chooses the best pass@1 on the validation split and writes the run's
checkpoints/best. The run directory keeps the counts for a paired test, `per_problem.jsonl`, and
every completion with its score, `examples.jsonl`, as they come: a run that was cut off goes on
with --resume. Ranks of torchrun share the problems. Before
it prints a score, it searches the checkpoint's training data for the problems (the instrument
`contamination`, which the laboratory brings)."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from codechat import tasks
from codechat.core import registry
from codechat.core.atomic_files import (
    json_lines,
    read_json,
    read_rows,
    write_atomic,
    write_json,
)
from codechat.core.errors import ConfigError, EngineLost, RunError
from codechat.data import conversations
from codechat.distributed import dist, hardware
from codechat.evaluation import held_out, loglik, results, scoring
from codechat.evaluation.endpoint import Endpoint
from codechat.evaluation.settings import EXAMPLES, EvaluateConfig
from codechat.models import loading
from codechat.rl import rollout
from codechat.runs import checkpoint, paths
from codechat.runs.paths import checkpoint_paths, find_checkpoint, find_run, reference_of
from codechat.runs.run import Run
from codechat.tasks.base import Problem, hash_problems
from codechat.text import chat

INPUTS = "inputs.json"  # what these were drawn from
LOSS_ROWS = 8  # packed rows of a batch of held-out conversations
# of a row, that the run's summary repeats
VERDICTS = (
    "verdict",
    "remedy",
    "reward_verdict",
    "gate",
)


# ---- the rows of the results


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn for one row of the results, which bears the name. call_given:
    each begins with the call tag. constrain: calls are held to the offered schemas."""

    name: str
    temperature: float
    n: int = 1
    ks: tuple[int, ...] = (1,)
    call_given: bool = False
    constrain: bool = False


def samplings(cfg: EvaluateConfig) -> list[Sampling]:
    """One for each row of the results; checkpoints are chosen by the first."""
    if cfg.score == "loglik":
        return [Sampling(way, temperature=0.0) for way in loglik.WAYS]
    ways: dict[str, Sampling] = {}  # a temperature that is named twice has one row
    for temperature in (cfg.temperature, *cfg.temperatures):
        if temperature:
            way = Sampling(f"T={temperature:g}", temperature, cfg.n, cfg.ks)
        else:
            way = Sampling("greedy", temperature)
        ways[way.name] = way
    free = list(ways.values())
    rows = [*free]
    if cfg.forced_call:
        rows.append(replace(free[0], name=f"{free[0].name}, call given", call_given=True))
    if cfg.constrain:
        rows += [replace(way, name=f"{way.name}, constrained", constrain=True) for way in free]
    return rows


# ---- what is evaluated


@dataclass(frozen=True)
class Subject:
    """A checkpoint, or an endpoint, which only answers: it has no weights, step or lineage."""

    name: str
    collect: scoring.Collect
    checkpoint: loading.LoadedModel | None = None
    step: int = 0
    lineage: Sequence[Mapping[str, Any]] = ()
    tools_style: str = "json"  # of an endpoint: whole schemas, where a task can list them


def load_subject(cfg: EvaluateConfig, source: Path | Endpoint) -> Subject:
    """The checkpoint in a directory, or an endpoint."""
    if isinstance(source, Endpoint):
        return Subject(source.name, source.collect)
    loaded = loading.load_model(source, hardware.device(), cfg.tags)
    return Subject(
        name=reference_of(source),
        collect=loglik.Chooser(loaded) if cfg.score == "loglik" else rollout.collect,
        checkpoint=loaded,
        step=int(loaded.meta["step"]),
        lineage=loaded.meta.get("lineage", ()),
        tools_style=loaded.tools_style,
    )


def _checkpoints(cfg: EvaluateConfig) -> list[Path]:
    """The checkpoints that --ckpt and --all-checkpoints name, each once."""
    paths = list(dict.fromkeys(find_checkpoint(ref) for ref in cfg.ckpt))
    if len(paths) < len(cfg.ckpt):
        print("a checkpoint that --ckpt names twice is evaluated once", file=sys.stderr)
    if cfg.all_checkpoints:
        return list(checkpoint_paths(find_run(cfg.ckpt[0].partition("@")[0])).values())
    return paths


def _load_problems(
    cfg: EvaluateConfig, task: tasks.Task
) -> tuple[dict[str, list[Problem]], dict[str, list[str]]]:
    """The problems by split, and the ids of those that are left out since their own reference
    solution fails. DataError where they may not be left out, or none would remain."""
    problems: dict[str, list[Problem]] = {
        split: scoring.problems_once(task, split, cfg.limit, cfg.seed) for split in cfg.split
    }
    left_out: dict[str, list[str]] = {}
    for split, some in problems.items():
        check = tasks.check_reference_solutions(task, some)
        if not (cfg.skip_failing_references and check.passed):
            check.require()
        if check.failed:
            problems[split] = [problem for problem in some if problem.id not in check.failed]
            left_out[split] = list(check.failed)
            print(
                f"{task.name}: left out, since their reference "
                f"solutions fail: {', '.join(check.failed)}"
            )
    return problems, left_out


# ---- the evaluation

# problem id -> the ways in which it was found in the training data
Exposed = Mapping[str, Sequence[str]]


class SearchReport(Protocol):
    """What the instrument `contamination` returns; printed, it says which sources were searched."""

    @property
    def how(self) -> Exposed: ...


# problems, and a lineage
Search = Callable[[Sequence[Problem], Sequence[Mapping[str, Any]]], SearchReport]
# further metrics of a result, from its run, its checkpoint and split, and the problems that
# were trained on
Judge = Callable[[Run, results.TaskResult, Mapping[str, str], Exposed], dict[str, Any]]


def run_evaluation(
    cfg: EvaluateConfig, kind: str = "evaluate", judge: Judge | None = None, **options: Any
) -> Run:
    """Evaluate every checkpoint on every split: a row of eval.jsonl for each, per_problem.jsonl
    and examples.jsonl.
    options: of the task."""
    task = tasks.load(cfg.task, source=cfg.data_dir, **options)
    if cfg.score == "loglik" and not hasattr(task, "choices"):
        raise ConfigError(
            f"got --score loglik on task {task.name}; expected "
            "a task with choices; set --score sampled"
        )
    search = None
    if cfg.contamination:
        search = registry.instrument("contamination", "set --contamination false")
    constrain = None
    if cfg.constrain:
        constrain = registry.instrument("call_grammar", "leave out --constrain")
    problems, left_out = _load_problems(cfg, task)
    checkpoints = _checkpoints(cfg)
    sources: list[Path | Endpoint] = [*checkpoints]
    if cfg.endpoint:
        sources.append(Endpoint(cfg.endpoint, cfg.model, cfg.api_key_file))
    inputs = _inputs(cfg, task, problems, sources)
    with ExitStack() as opened:
        opened.enter_context(dist.session(cfg))
        cfg = scoring.with_free_name(cfg)
        finished = _finished(cfg, inputs)
        if finished:
            return finished
        if cfg.overwrite:  # the first one is loaded before the former run goes
            for path in checkpoints[1:]:
                checkpoint.check(path)
        run = opened.enter_context(
            Run.create(
                cfg.run_name,
                cfg,
                kind=kind,
                parent=str(checkpoints[0]) if checkpoints else None,
                resume=cfg.resume,
                overwrite=cfg.overwrite,
            )
        )
        kept: Answers = {}
        with dist.together():
            if dist.is_main():
                kept = _answered(run, cfg, inputs)
        answered = dist.gather(kept)[0]
        evaluation = _Evaluation(cfg, run, task, problems, search, constrain, judge, answered)
        try:
            rows = [evaluation.evaluate(load_subject(cfg, source)) for source in sources]
        except (KeyboardInterrupt, EngineLost) as stopped:
            command = f"codechat {kind} --config {run.path}/config.json --resume"
            reason = f"{stopped}; " if str(stopped) else ""
            raise type(stopped)(f"{reason}{command} goes on") from None
        summary = _paired_summary(run, cfg) if len(rows) > 1 and dist.is_main() else {}
        if cfg.all_checkpoints and dist.is_main():
            summary = {"best": _choose_best(checkpoints, rows, max(cfg.ks))}
        summary |= {key: row[key] for row in rows[-1].values() for key in VERDICTS if key in row}
        if left_out:
            summary["left_out"] = left_out
        run.finish(summary)
        if dist.is_main():
            print(f"the results lie in {run.path}")
    return run


class Cell(NamedTuple):
    """What has a set of answers."""

    checkpoint: str
    split: str
    sampling: str


Answers = dict[Cell, dict[str, list[results.Row]]]  # by problem

# part -> name in it -> hash: the task's code, the weights by checkpoint, the problems of each
# split by id
Inputs = dict[str, dict[str, str]]


def _inputs(
    cfg: EvaluateConfig,
    task: tasks.Task,
    problems: Mapping[str, Sequence[Problem]],
    sources: Sequence[Path | Endpoint],
) -> Inputs:
    weights = {}
    for source in sources:
        if isinstance(source, Endpoint):
            weights[source.name] = cfg.endpoint
        else:
            weights[reference_of(source)] = paths.fingerprint(checkpoint.read_meta(source))
    inputs: Inputs = {"code": {cfg.task: tasks.hash_code(task)}, "weights": weights}
    for split, some in problems.items():
        inputs[split] = {problem.id: hash_problems([problem]) for problem in some}
    return inputs


def _written(run: Run) -> Inputs:
    """What the answers of a run were drawn from; nothing in one of an older version."""
    file = run.path / INPUTS
    return read_json(file) if file.exists() else {}


def _finished(cfg: EvaluateConfig, inputs: Inputs) -> Run | None:
    """The run that is to go on, where it is finished: it stays as it is. RunError where it is
    one of other settings or inputs."""
    if not cfg.resume or not paths.exists(cfg.run_name):
        return None
    run = Run.open(cfg.run_name)
    if run.status["status"] != "finished":
        return None
    paths.check_same(cfg.run_name, cfg)
    if _written(run) != inputs:
        raise RunError(
            f"run {run.name} is finished, with other weights, problems or code of the task; "
            "set --overwrite to replace it, or another --run-name"
        )
    _say(f"run {run.name} is finished; the results lie in {run.path}")
    return run


def _answered(run: Run, cfg: EvaluateConfig, inputs: Inputs) -> Answers:
    """The completions that an interrupted run has kept, of each problem that has all of its
    own. Those drawn from other weights, problems or code than `inputs` are dropped. The run's
    other rows go: they follow from these."""
    found = _kept_answers(run, cfg, inputs)
    counts = {sampling.name: sampling.n for sampling in samplings(cfg)}
    whole: Answers = {}
    kept: list[results.Row] = []
    for cell, answers in found.items():
        n = counts[cell.sampling]
        whole[cell] = {id: some for id, some in answers.items() if len(some) == n}
        for some in whole[cell].values():
            kept += [cell._asdict() | row for row in some]
    for name in ("eval.jsonl", "per_problem.jsonl", "samples.jsonl"):
        (run.path / name).unlink(missing_ok=True)
    write_atomic(run.path / EXAMPLES, json_lines(kept))
    write_json(run.path / INPUTS, inputs)
    return whole


def _kept_answers(run: Run, cfg: EvaluateConfig, inputs: Inputs) -> Answers:
    """The rows of examples.jsonl that were drawn from these inputs; how many were not is said
    on stderr."""
    written = _written(run)
    found: Answers = {}
    dropped = 0
    for row in read_rows(run.path / EXAMPLES):
        cell = Cell(*(row.pop(name, "") for name in Cell._fields))
        id = row.get("problem", "")
        origins = (("code", cfg.task), ("weights", cell.checkpoint), (cell.split, id))
        now = [inputs.get(part, {}).get(name) for part, name in origins]
        then = [written.get(part, {}).get(name) for part, name in origins]
        if now == then and None not in now:
            found.setdefault(cell, {}).setdefault(id, []).append(row)
        else:
            dropped += 1
    if dropped:
        what = f"{dropped} completions of other weights, problems or code of the task are dropped"
        print(f"run {run.name}: {what}, and drawn again", file=sys.stderr)
    return found


@dataclass
class _Evaluation:
    """The problems that every subject gets, and the run that keeps the results."""

    cfg: EvaluateConfig
    run: Run
    task: tasks.Task
    problems: Mapping[str, Sequence[Problem]]  # by split
    search: Search | None
    constrain: scoring.Constrain | None
    judge: Judge | None
    answered: Mapping[Cell, Mapping[str, list[results.Row]]]
    searched: dict[str, SearchReport] = field(default_factory=dict)  # by lineage

    def evaluate(self, subject: Subject) -> dict[str, results.Row]:
        """Metrics of the first sampling by split. Logs and prints those of every sampling."""
        # prompts list tools as the model learned to read them
        if hasattr(self.task, "tools_style"):
            self.task.tools_style = subject.tools_style
        exposed = self.find_exposed(subject)
        rows: dict[str, results.Row] = {}
        for split, sampling in itertools.product(self.problems, samplings(self.cfg)):
            cell = Cell(subject.name, split, sampling.name)
            which = cell._asdict()
            result = self.sample(subject, cell, sampling)
            row: results.Row = result.row() | dict(sampling=sampling.name)
            self.record(subject, result, which)
            if split not in rows:  # what does not depend on the sampling is measured once
                if exposed is not None:
                    row |= results.clean_and_exposed(result, exposed)
                if self.judge:
                    row |= self.judge(self.run, result, which, exposed or {})
                if subject.checkpoint and self.cfg.data_dir:
                    row |= self.held_out_losses(subject.checkpoint, self.cfg.data_dir, split)
                    row |= self.probe_behaviour(subject.checkpoint, self.cfg.data_dir, split)
                rows[split] = row
            self.run.log_eval(subject.step, row | which | dict(task=self.cfg.task))
        return rows

    def find_exposed(self, subject: Subject) -> Exposed | None:
        """The problems that were found in what the subject was trained on; None without a
        search."""
        if self.search is None:
            return None
        # checkpoints of one run have learned from the same texts
        known = json.dumps(
            [dict(entry) | {"step": None} for entry in subject.lineage], sort_keys=True
        )
        if known not in self.searched:
            everything = list(itertools.chain.from_iterable(self.problems.values()))
            self.searched[known] = self.search(everything, subject.lineage)
        report = self.searched[known]
        _say(report)
        return report.how

    def sample(self, subject: Subject, cell: Cell, sampling: Sampling) -> results.TaskResult:
        """The subject's completions of a split, with their scores, kept as they come."""
        cfg = self.cfg

        def keep(rows: Sequence[results.Row]) -> None:
            if dist.is_main():
                named = (cell._asdict() | row for row in rows)
                self.run.append(EXAMPLES, named)
                self.run.keep()  # what --overwrite replaces may go

        loaded = subject.checkpoint
        begin = (
            chat.layout(loaded.tokenizer, loaded.tags).call
            if loaded and sampling.call_given
            else ()
        )
        return scoring.evaluate_task(
            loaded.model if loaded else None,
            loaded.tokenizer if loaded else None,
            loaded.tags if loaded else None,
            self.task,
            self.problems[cell.split],
            n=sampling.n,
            temperature=sampling.temperature,
            top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens,
            ks=sampling.ks,
            seed=cfg.seed,
            begin=begin,
            constrain=self.constrain if sampling.constrain else None,
            progress=f"{subject.name} on {cell.split}",
            collect=partial(subject.collect, way=sampling.name)
            if cfg.score == "loglik"
            else subject.collect,
            known=self.answered.get(cell, {}),
            keep=keep,
        )

    def record(self, subject: Subject, result: results.TaskResult, which: dict[str, str]) -> None:
        """Print the result, and keep its counts."""
        way = which["sampling"]
        variant = f", {way}" if "," in way else ""  # of plain ones the report shows the temperature
        _say(result.report(f"{subject.name} on {self.cfg.task} {which['split']}{variant}"))
        if dist.is_main():
            self.run.append("per_problem.jsonl", (which | row for row in result.counts))
        self.run.log_samples(subject.step, [sample | which for sample in result.samples])

    def held_out_losses(
        self, loaded: loading.LoadedModel, data_dir: str, split: str
    ) -> dict[str, float]:
        """The loss on held-out conversations; none unless --heldout-examples asks for it."""
        limit = self.cfg.heldout_examples
        return losses_of_checkpoint(loaded, data_dir, split, limit) if limit else {}

    def probe_behaviour(
        self, loaded: loading.LoadedModel, data_dir: str, split: str
    ) -> dict[str, float]:
        """The behaviour matrix, printed; none where the directory has no probes of this split."""
        probes = held_out.read_probes(data_dir, split, self.cfg.probe_examples)
        if probes is None:
            return {}
        matrix = probes.measure(loaded.model, loaded.tokenizer, loaded.tags, seed=self.cfg.seed)
        _say(matrix)
        return matrix.metrics()


def losses_of_checkpoint(
    loaded: loading.LoadedModel, data_dir: str | Path, split: str, limit: int
) -> dict[str, float]:
    """Both losses of `held_out`, of the first `limit` conversations of each domain."""
    block = loaded.model.cfg.block_size
    domains = conversations.load_domains(
        data_dir, split, loaded.tokenizer, loaded.tags, block, limit=limit
    )
    batches = {
        domain: conversations.held_out(examples, LOSS_ROWS, block)
        for domain, examples in domains.items()
    }
    sizes = {domain: len(examples) for domain, examples in domains.items()}
    return held_out.held_out_losses(loaded.model, batches, sizes)


def _say(text: object) -> None:
    if dist.is_main():
        print(text)


# ---- which checkpoint is better


def _choose_best(paths: Sequence[Path], rows: Sequence[Mapping[str, results.Row]], k: int) -> str:
    """Write the run's checkpoints/best; RUN@STEP of the chosen one."""
    best = choose({path: row["select"] for path, row in zip(paths, rows, strict=True)}, k)
    name = reference_of(best)
    run, _, step = name.rpartition("@")
    checkpoint.set_best(best.parent.parent, int(step))
    print(f"best on select: {name}; {run}@best now means it")
    return name


def choose(rows: Mapping[Path, Mapping[str, float]], k: int) -> Path:
    """The checkpoint with the largest pass@1; ties go to the larger pass@k, then to the earlier
    one."""
    return max(
        sorted(rows), key=lambda path: (rows[path]["pass@1"], rows[path].get(f"pass@{k}", 0))
    )


def _paired_summary(run: Run, cfg: EvaluateConfig) -> dict[str, Any]:
    """pass@1 of each later checkpoint minus the first's, by split and sampling, printed and
    returned."""
    cells: dict[Cell, list[results.Row]] = {}
    for row in results.read_per_problem(run):
        cell = Cell(row["checkpoint"], row["split"], row["sampling"])
        cells.setdefault(cell, []).append(row)
    first, *others = dict.fromkeys(cell.checkpoint for cell in cells)
    ways = [sampling.name for sampling in samplings(cfg)]
    summary = {}
    for split, way, name in itertools.product(cfg.split, ways, others):
        before = cells[Cell(first, split, way)]
        after = cells[Cell(name, split, way)]
        gap = results.paired_difference(before, after, seed=cfg.seed)
        interval = f"{gap.value:+.3f} [{gap.lo:+.3f}, {gap.hi:+.3f}]"
        print(f"{name} minus {first} on {split}: pass@1 {interval} (paired, N={len(after)}, {way})")
        where = split if way == ways[0] else f"{split}, {way}"
        summary[f"{where}: {name} - {first}"] = gap._asdict() | {"N": len(after)}
    return summary
