"""Evaluate checkpoints with the task's own `score`: pass@k with intervals, tiers, the behaviour matrix.

    codechat evaluate --ckpt nano/sft nano/rl@best --data-dir data/nano/sft --split test test_hard --n 8 --ks 1 8
    codechat evaluate --ckpt nano/rl --data-dir data/nano/sft --split select --all-checkpoints --run-name choice
    codechat evaluate --ckpt nano/sft nano/rl@best --data-dir data/nano/sft --temperatures 0 0.5 --forced-call true
    codechat evaluate --ckpt nano/rl --data-dir data/nano/sft --constrain true
    codechat evaluate --ckpt smollm2 --task arc_easy --score loglik            multiple choice (`loglik`)
    codechat evaluate --endpoint http://127.0.0.1:8000 --task funcall          a server instead (`endpoint`)

Seeds depend on the problem's id, so two checkpoints are compared with common random numbers. --all-checkpoints chooses
the best pass@1 on the validation split and writes the run's checkpoints/best. The run directory keeps the counts for a
paired test, `per_problem.jsonl`, and every completion with its score, `examples.jsonl`. Ranks of torchrun share the
problems. Before it prints a score, it searches the checkpoint's training data for the problems (`contamination`)."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from codechat import tasks
from codechat.core.atomic_files import append_rows
from codechat.core.config import SEEDS, Settings, opt
from codechat.core.errors import ConfigError, DataError
from codechat.data import conversations
from codechat.distributed import dist
from codechat.evaluation import contamination, held_out, loglik, results
from codechat.evaluation.behaviour_probes import behaviour_matrix, read_probes
from codechat.evaluation.endpoint import Endpoint
from codechat.models import generate, gpt, loading
from codechat.rl import episodes, rollout
from codechat.runs import checkpoint
from codechat.runs.paths import STEP, checkpoint_paths, find_checkpoint, find_run, is_run, name_of
from codechat.runs.run import Run
from codechat.tasks.base import Problem, hash_problems
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

LOSS_ROWS = 8  # packed rows of a batch of held-out conversations
CHUNK_ROWS = 256  # completions sampled between two ticks of the progress bar
VERDICTS = ("verdict", "remedy", "reward_verdict", "gate")  # of a row, that the run's summary repeats
CONSTRAINTS = "codechat.constraints"  # entry points: a `Constrain` each

if TYPE_CHECKING:  # the help of the command loads no torch
    Collect = Callable[..., rollout.RolloutBatch]  # takes what `rollout.collect` takes
    # the grammar of the completions of a prompt (messages, tokenizer, tags), none = they are free
    Constrain = Callable[[Sequence[Mapping[str, str]], Tokenizer, str], generate.Grammar | None]


# ---- one task


def evaluate_task(
    model: gpt.GPT | None,
    tokenizer: Tokenizer | None,
    tags: str | None,
    task: tasks.Task,
    problems: Sequence[tasks.Problem],
    *,
    n: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    max_new_tokens: int = 64,
    ks: Sequence[int] = (1,),
    seed: int = 0,
    begin: Sequence[int] = (),
    constrain: Constrain | None = None,
    progress: str | None = None,
    collect: Collect | None = None,
) -> results.TaskResult:
    """Sample n completions of every problem and score them with the task's own `score`. A collective.

    begin: ids with which every completion begins, such as the call tag. constrain: makes the grammar that a prompt's
    completions follow. A prompt that fills the model's block counts as failed. model, tokenizer and tags are none for a
    `collect` that needs none of them; the default is `rollout.collect`."""
    draw: Collect = collect or rollout.collect
    if constrain and episodes.has_environment(task):
        raise ConfigError(f"task {task.name} has episodes, whose turns are sampled freely; leave out --constrain")
    if not problems:
        raise DataError(f"no problems of task {task.name} to evaluate; check the split and the limit")
    if len({p.id for p in problems}) < len(problems):  # draws depend on the id, and results are kept by it
        repeated, times = Counter(p.id for p in problems).most_common(1)[0]
        raise DataError(f"problem {repeated!r} of task {task.name} is given {times} times; take `problems_once`")
    mine = problems[dist.rank() :: dist.world_size()]
    per_chunk = max(1, CHUNK_ROWS // n)
    my_rows: list[results.Row] = []
    with tqdm(
        total=len(mine),
        desc=progress,
        unit="problem",
        disable=not (progress and dist.is_main()),
    ) as bar:
        for at in range(0, len(mine), per_chunk):
            chunk = mine[at : at + per_chunk]
            grammars = None
            if constrain:
                assert tokenizer is not None and tags is not None, "only a checkpoint's completions can be constrained"
                grammars = [constrain(task.prompt(p), tokenizer, tags) for p in chunk]
            with dist.autocast(model.wte.weight.device) if model else nullcontext():
                batch = draw(
                    model,
                    task,
                    chunk,
                    tokenizer,
                    tags,
                    keys=[p.id for p in chunk],
                    group_size=n,
                    temperature=temperature,
                    top_k=top_k,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    sampler=partial(sample_after, list(begin), grammars),
                )
            my_rows += [_example(task, batch, i) for i in range(len(batch.completions))]
            bar.update(len(chunk))
    rows = _in_order(dist.gather(my_rows), len(problems), n)
    return results.TaskResult(task, problems, rows, n, temperature, ks, seed)


def _in_order(parts: Sequence[Sequence[results.Row]], n_problems: int, n: int) -> list[results.Row]:
    """The n rows of each problem, in the order of the problems; rank r had the problems r, r + R, r + 2R, ..."""
    rows: list[results.Row] = []
    for i in range(n_problems):
        number, rank = divmod(i, len(parts))
        rows += parts[rank][number * n : (number + 1) * n]
    return rows


def installed_constraint() -> Constrain:
    """What an installed package, such as the laboratory, holds tool calls to. ConfigError where there is none."""
    for point in entry_points(group=CONSTRAINTS):
        return point.load()
    raise ConfigError(f"got --constrain true, and no package declares {CONSTRAINTS}; run pip install -e . again")


def problems_once(task: tasks.Task, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
    """Problems of a split to evaluate on, each once; a line on stderr counts repeated ones. DataError where different
    problems share an id, since results are kept by it."""
    found: dict[str, Problem] = {}
    repeated = Counter[str]()
    for problem in task.problems(split, limit=limit, seed=seed):
        if problem.id in found and hash_problems([found[problem.id]]) != hash_problems([problem]):
            got = f"task {task.name}, split {split}: two different problems have the id {problem.id!r}"
            raise DataError(f"{got}; results are kept by the id; give each problem its own")
        repeated[problem.id] += problem.id in found
        found[problem.id] = problem
    if repeated.total() and dist.is_main():
        such = next(id for id, times in repeated.items() if times)
        count = f"{repeated.total()} problems are repeated, such as {such!r}"
        print(f"task {task.name}, split {split}: {count}; each counts once", file=sys.stderr)
    return list(found.values())


def sample_after(
    begin: list[int],
    grammars: Sequence[generate.Grammar | None] | None,
    model: gpt.GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **settings: Any,
) -> list[generate.Completion]:
    """Completions that start with `begin`, empty for a prompt that leaves no room in the block. settings: of
    `generate.sample`."""
    settings["on_overflow"] = "empty"  # such a prompt is counted as failed instead of ending the evaluation
    sampled = generate.sample(
        model,
        [[*ids, *begin] for ids in prompts],
        max_new_tokens=max(1, max_new_tokens - len(begin)),
        grammars=grammars,
        **settings,
    )
    given = [0.0] * len(begin)  # log-probabilities of ids that were not sampled
    return [replace(c, ids=begin + c.ids, logprobs=given + c.logprobs) if c.ids else c for c in sampled]


def _example(task: tasks.Task, batch: rollout.RolloutBatch, i: int) -> results.Row:
    """The row of examples.jsonl of completion i."""
    problem = batch.problems[i // batch.group_size]
    completion = batch.completions[i]
    score = batch.scores[i]
    if completion.stop == "context" and not completion.ids:  # silence may be a correct answer, but there was none
        score = tasks.Score(0.0, task.tiers[0], score.parts, False, dict.fromkeys(score.terms, 0.0))
    row = dict(
        problem=problem.id,
        reward=score.reward,
        tier=score.tier,
        correct=score.correct,
        request=problem.messages[-1]["content"],
        gold=task.gold(problem),
        completion=batch.texts[i],
        stop=completion.stop,
        tokens=sum(completion.written),
        parts=dict(score.parts),
        terms=dict(score.terms),
    )
    if batch.turns:
        row["turns"] = [turn.row() for turn in batch.turns[i]]
    return row


# ---- held-out loss


def losses_of_checkpoint(
    loaded: loading.LoadedModel,
    data_dir: str,
    split: str,
    limit: int,
) -> dict[str, float]:
    """Both losses, of the first `limit` conversations of each domain."""
    block = loaded.model.cfg.block_size
    domains = conversations.load_domains(data_dir, split, loaded.tokenizer, loaded.tags, block, limit=limit)
    batches = {domain: conversations.held_out(examples, LOSS_ROWS, block) for domain, examples in domains.items()}
    return held_out.held_out_losses(
        loaded.model, batches, {domain: len(examples) for domain, examples in domains.items()}
    )


# ---- settings that the commands share which sample completions of a checkpoint


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """The run to write, and how completions are sampled."""

    run_name: str = opt("evaluate", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "replace the run of this name: it is deleted once this one has begun", identity=False)
    temperature: float = opt(1.0, "sampling temperature; 0 = greedy, one completion", least=0)
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all", least=1)
    max_new_tokens: int = opt(64, "longest completion, tokens", least=1)
    seed: int = opt(0, "seed of problem order, sampling and bootstrap", **SEEDS)


@dataclass(frozen=True, kw_only=True)
class TaskSettings(SamplingSettings):
    """The task."""

    task: str = opt(
        "funcall", "task, such as funcall, micro, reasoning:levels=[1,2], FILE.py:CLASS, or of a package", reads="path"
    )
    data_dir: str | None = opt(
        None, "directory with TASK.SPLIT.jsonl problems and probes; none = the task's own problems", reads="path"
    )
    tags: Literal["raw"] | None = opt(None, "raw = prompts as plain text, for base models; none = as it was trained")

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", tasks.name_of(self.task))  # an object or a class of a notebook, by its name
        super().__post_init__()


# ---- the command


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TaskSettings):
    """What to evaluate, and how many samples to draw."""

    ckpt: tuple[str, ...] = opt(
        (), "checkpoints: run name, run@best, run@STEP, run directory or checkpoint", reads="run"
    )
    endpoint: str = opt("", "URL of an OpenAI-compatible server, evaluated after the checkpoints, if any")
    model: str = opt("", "the endpoint's name of the model; empty = the first that it lists")
    api_key_file: Path | None = opt(
        None,
        "file with the key that the endpoint expects; none = no key",
        identity=False,
        reads="path",
    )
    contamination: bool = opt(True, "search what the checkpoint was trained on for the problems first", identity=False)
    split: tuple[Literal["train", "select", "test", "test_hard"], ...] = opt(
        ("test",), "splits; validation = select: choose checkpoints on it, report on test"
    )
    limit: int | None = opt(None, "problems per split; none = all", least=0)
    skip_failing_references: bool = opt(False, "leave out problems whose own reference solution fails, by name")
    all_checkpoints: bool = opt(False, "evaluate every checkpoint of the run on select and write checkpoints/best")
    score: Literal["sampled", "loglik"] = opt(
        "sampled", "sampled completions, or the likeliest choice (mmlu, arc_easy, ...)"
    )
    n: int = opt(8, "completions per problem")
    ks: tuple[int, ...] = opt((1, 8), "pass@k to estimate; each at most n")
    temperatures: tuple[float, ...] = opt((), "more temperatures, each with its own row; 0 = greedy, one completion")
    forced_call: bool = opt(False, "add a row with the call tag given: is a gain more than calling more often?")
    constrain: bool = opt(False, "add a row with calls constrained to the schemas of the offered functions")
    probe_examples: int = opt(32, "behaviour probes per cell, if data_dir holds probes; 0 = none", least=0)
    heldout_examples: int = opt(0, "held-out conversations per domain of data_dir for the loss; 0 = none", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.ckpt or self.endpoint) or not self.split:
            raise ConfigError("no --ckpt or --endpoint, or no --split; at least one of each is required")
        if 1 not in self.ks or not 1 <= min(self.ks) <= max(self.ks) <= self.n:  # pass@1 ranks checkpoints
            raise ConfigError(f"ks {list(self.ks)}, n {self.n}; each k must be from 1 to n, and one of them 1")
        if self.temperature == 0 and self.n > 1:
            raise ConfigError(f"temperature 0 with n={self.n}: all samples are the same; set --n 1 --ks 1")
        if self.score == "loglik" and (self.temperatures or self.forced_call or self.constrain):
            raise ConfigError("--score loglik samples nothing; leave out --temperatures, --forced-call and --constrain")
        if self.endpoint and (self.score != "sampled" or self.forced_call or self.constrain or self.heldout_examples):
            raise ConfigError("--endpoint excludes --score loglik, --forced-call, --constrain and --heldout-examples")
        if self.heldout_examples and (not self.data_dir or "test_hard" in self.split):
            raise ConfigError("heldout_examples needs a --data-dir with conversations, and split select or test")
        if self.all_checkpoints and (len(self.ckpt) != 1 or self.endpoint or self.split != ("select",)):
            raise ConfigError("--all-checkpoints chooses a checkpoint of one run; set one --ckpt and --split select")


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn for one row of the results, which bears the name. call_given: each begins with the
    call tag. constrain: calls are held to the offered schemas."""

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
    given = [replace(free[0], name=f"{free[0].name}, call given", call_given=True)] if cfg.forced_call else []
    held = [replace(way, name=f"{way.name}, constrained", constrain=True) for way in free if cfg.constrain]
    return free + given + held


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a checkpoint, or an endpoint, of which nothing but answers can be had."""

    name: str
    collect: Collect
    checkpoint: loading.LoadedModel | None = None
    step: int = 0
    lineage: Sequence[Mapping[str, Any]] = ()
    tools_style: str = "json"  # of an endpoint: whole schemas, where a task can list them


def load_subject(cfg: EvaluateConfig, source: Path | Endpoint) -> Subject:
    """The checkpoint in a directory, or an endpoint."""
    if isinstance(source, Endpoint):
        return Subject(source.name, source.collect)
    loaded = loading.load_model(source, dist.device(), cfg.tags)
    collect = loglik.Chooser(loaded) if cfg.score == "loglik" else rollout.collect
    return Subject(
        label(source),
        collect,
        checkpoint=loaded,
        step=int(loaded.meta["step"]),
        lineage=loaded.meta.get("lineage", ()),
        tools_style=loaded.tools_style,
    )


# further metrics of a result, from its run, its checkpoint and split, and the problems that were trained on
Judge = Callable[[Run, results.TaskResult, Mapping[str, str], Mapping[str, Any]], dict[str, Any]]


def run_evaluation(cfg: EvaluateConfig, kind: str = "evaluate", judge: Judge | None = None, **options: Any) -> Run:
    """Evaluate every checkpoint on every split: a row of eval.jsonl for each, per_problem.jsonl and examples.jsonl.
    options: of the task."""
    task = tasks.load(cfg.task, source=cfg.data_dir, **options)
    if cfg.score == "loglik" and not hasattr(task, "choices"):
        raise ConfigError(
            f"task {task.name} has no choices; --score loglik takes arc_challenge, arc_easy, hellaswag, mmlu"
        )
    problems: dict[str, list[Problem]] = {split: problems_once(task, split, cfg.limit, cfg.seed) for split in cfg.split}
    left_out = _leave_out_failing_references(cfg, task, problems)
    paths = list(dict.fromkeys(find_checkpoint(ref) for ref in cfg.ckpt))
    if len(paths) < len(cfg.ckpt):
        print("a checkpoint that --ckpt names twice is evaluated once", file=sys.stderr)
    if cfg.all_checkpoints:
        paths = list(checkpoint_paths(find_run(cfg.ckpt[0].partition("@")[0])).values())
    sources: list[Path | Endpoint] = [*paths]
    if cfg.endpoint:
        sources.append(Endpoint(cfg.endpoint, cfg.model, cfg.api_key_file))
    parent = str(paths[0]) if paths else None
    with ExitStack() as opened:
        opened.enter_context(dist.session(cfg))
        if cfg.overwrite:  # the first one is loaded before the former run goes
            for path in paths[1:]:
                checkpoint.check(path)
        run = opened.enter_context(Run.create(cfg.run_name, cfg, kind=kind, parent=parent, overwrite=cfg.overwrite))
        evaluation = _Evaluation(cfg, run, task, problems, judge)
        rows = [evaluation.evaluate(load_subject(cfg, source)) for source in sources]
        summary = _paired_summary(run, cfg) if len(rows) > 1 and dist.is_main() else {}
        if cfg.all_checkpoints and dist.is_main():
            best = choose({path: row["select"] for path, row in zip(paths, rows, strict=True)}, max(cfg.ks))
            checkpoint.set_best(best.parent.parent, _step_of(best))
            print(f"best on select: {label(best)}; {label(best).partition('@')[0]}@best now means it")
            summary = {"best": label(best)}
        summary |= {key: row[key] for row in rows[-1].values() for key in VERDICTS if key in row}
        if left_out:
            summary["left_out"] = left_out
        run.finish(summary)
    return run


def _leave_out_failing_references(
    cfg: EvaluateConfig, task: tasks.Task, problems: dict[str, list[Problem]]
) -> dict[str, list[str]]:
    """Takes problems whose reference solution fails out of `problems`; their ids by split. DataError where they may
    not be left out, or none would remain."""
    left_out = {}
    for split, some in problems.items():
        check = tasks.check_reference_solutions(task, some)
        if not (cfg.skip_failing_references and check.passed):
            check.require()
        if check.failed:
            problems[split] = [p for p in some if p.id not in check.failed]
            left_out[split] = list(check.failed)
            print(f"{task.name}: left out, since their reference solutions fail: {', '.join(check.failed)}")
    return left_out


@dataclass
class _Evaluation:
    """The problems that every subject gets, and the run that keeps the results."""

    cfg: EvaluateConfig
    run: Run
    task: tasks.Task
    problems: Mapping[str, Sequence[Problem]]  # by split
    judge: Judge | None
    searched: dict[str, contamination.Report] = field(default_factory=dict)  # by lineage

    def evaluate(self, subject: Subject) -> dict[str, results.Row]:
        """Metrics of the first sampling by split. Logs and prints those of every sampling."""
        if hasattr(self.task, "tools_style"):  # prompts list tools as the model learned to read them
            self.task.tools_style = subject.tools_style
        exposed = self.find_exposed(subject) if self.cfg.contamination else {}
        rows: dict[str, results.Row] = {}
        for split, sampling in itertools.product(self.problems, samplings(self.cfg)):
            which = dict(checkpoint=subject.name, split=split, sampling=sampling.name)
            result = self.sample(subject, split, sampling)
            row = result.row() | dict(sampling=sampling.name)
            self.record(subject, result, which)
            if split not in rows:
                row |= self.further_metrics(subject, result, which, exposed)
                rows[split] = row
            self.run.log_eval(subject.step, row | which | dict(task=self.cfg.task))
            self.run.keep()  # a row is there: what --overwrite replaces may go
        return rows

    def find_exposed(self, subject: Subject) -> Mapping[str, tuple[str, ...]]:
        """{problem: the ways in which it was found in what the subject was trained on}."""
        # checkpoints of one run have learned from the same texts
        known = json.dumps([{**entry, "step": None} for entry in subject.lineage], sort_keys=True)
        if known not in self.searched:
            everything = [p for items in self.problems.values() for p in items]
            self.searched[known] = contamination.check(everything, subject.lineage)
        _say(self.searched[known])
        return self.searched[known].how

    def sample(self, subject: Subject, split: str, sampling: Sampling) -> results.TaskResult:
        cfg = self.cfg
        loaded = subject.checkpoint
        begin = chat.layout(loaded.tokenizer, loaded.tags).call if loaded and sampling.call_given else ()
        return evaluate_task(
            loaded.model if loaded else None,
            loaded.tokenizer if loaded else None,
            loaded.tags if loaded else None,
            self.task,
            self.problems[split],
            n=sampling.n,
            temperature=sampling.temperature,
            top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens,
            ks=sampling.ks,
            seed=cfg.seed,
            begin=begin,
            constrain=installed_constraint() if sampling.constrain else None,
            progress=f"{subject.name} on {split}",
            collect=partial(subject.collect, way=sampling.name) if cfg.score == "loglik" else subject.collect,
        )

    def record(self, subject: Subject, result: results.TaskResult, which: dict[str, str]) -> None:
        """Print the result, and keep its counts and completions."""
        way = which["sampling"]
        variant = f", {way}" if "," in way else ""  # of plain ones the report shows the temperature
        _say(result.report(f"{subject.name} on {self.cfg.task} {which['split']}{variant}"))
        if dist.is_main():
            append_rows(self.run.path / "per_problem.jsonl", (which | row for row in result.counts))
            append_rows(self.run.path / "examples.jsonl", (which | row for row in result.examples))
        self.run.log_samples(subject.step, [sample | which for sample in result.samples])

    def further_metrics(
        self,
        subject: Subject,
        result: results.TaskResult,
        which: dict[str, str],
        exposed: Mapping[str, tuple[str, ...]],
    ) -> results.Row:
        """What is measured once for a checkpoint and split: exposed problems, verdicts, held-out loss, probes."""
        cfg = self.cfg
        split = which["split"]
        loaded = subject.checkpoint
        row: results.Row = {}
        if cfg.contamination:
            row |= results.clean_and_exposed(result, exposed)
        if self.judge:
            row |= self.judge(self.run, result, which, exposed)
        if not loaded or not cfg.data_dir:
            return row
        if cfg.heldout_examples:
            row |= losses_of_checkpoint(loaded, cfg.data_dir, split, cfg.heldout_examples)
        if cfg.probe_examples and (Path(cfg.data_dir) / f"probes.{split}.jsonl").exists():
            probes = read_probes(cfg.data_dir, split, cfg.probe_examples)
            matrix = behaviour_matrix(loaded.model, loaded.tokenizer, loaded.tags, probes, seed=cfg.seed)
            row |= matrix.metrics()
            _say(matrix)
        return row


def _say(text: object) -> None:
    if dist.is_main():
        print(text)


def label(path: Path) -> str:
    """RUN@STEP of a checkpoint, as `--ckpt` takes it (nano/rl@150); its path where it lies outside a run."""
    run = path.parent.parent
    if not STEP.fullmatch(path.name) or not is_run(run):
        return str(path)
    return f"{name_of(run.resolve())}@{_step_of(path)}"


def _step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    match = STEP.fullmatch(path.name)
    assert match, f"{path} is no directory of a step"
    return int(match[1])


def choose(rows: Mapping[Path, Mapping[str, float]], k: int) -> Path:
    """The checkpoint with the largest pass@1; ties go to the larger pass@k, then to the earlier one."""
    return max(sorted(rows), key=lambda path: (rows[path]["pass@1"], rows[path].get(f"pass@{k}", 0)))


def _paired_summary(run: Run, cfg: EvaluateConfig) -> dict[str, Any]:
    """pass@1 of each later checkpoint minus the first's, by split and sampling, printed and returned."""
    parts: dict[tuple[str, str, str], list[results.Row]] = {}
    for row in results.read_per_problem(run):
        parts.setdefault((row["checkpoint"], row["split"], row["sampling"]), []).append(row)
    first, *others = dict.fromkeys(checkpoint for checkpoint, _, _ in parts)
    ways = [sampling.name for sampling in samplings(cfg)]
    summary = {}
    for split, way, name in itertools.product(cfg.split, ways, others):
        rows = parts[name, split, way]
        gap = results.paired_difference(parts[first, split, way], rows, seed=cfg.seed)
        interval = f"{gap.value:+.3f} [{gap.lo:+.3f}, {gap.hi:+.3f}]"
        print(f"{name} minus {first} on {split}: pass@1 {interval} (paired, N={len(rows)}, {way})")
        where = split if way == ways[0] else f"{split}, {way}"
        summary[f"{where}: {name} - {first}"] = gap._asdict() | {"N": len(rows)}
    return summary
