"""Sample completions of a task's problems and score them with the task's own `score`.

Draws depend on a problem's id and not on the problems beside it, so two checkpoints are
compared with common random numbers, and the ranks of torchrun can share the problems."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from codechat.core.errors import ConfigError, DataError
from codechat.distributed import dist, numerics
from codechat.evaluation.results import Row, TaskResult
from codechat.evaluation.settings import SamplingSettings
from codechat.models import draws, generate, gpt
from codechat.rl import episodes, rollout
from codechat.runs import paths
from codechat.tasks.base import Problem, Score, Task, hash_problems
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

S = TypeVar("S", bound=SamplingSettings)

CHUNK_ROWS = 256  # completions sampled between two ticks of the progress bar
ASKED_ROWS = 64  # the same of a server, whose answers may have a price: an interruption loses these

if TYPE_CHECKING:  # the help of the command loads no torch
    Collect = Callable[..., rollout.RolloutBatch]  # takes what `rollout.collect` takes
    # the grammar of the completions of a prompt (messages, tokenizer, tags); None = they are free
    Constrain = Callable[[Sequence[Mapping[str, str]], Tokenizer, str], draws.Grammar | None]


def with_free_name(cfg: S) -> S:
    """The settings of a measurement, whose default run name gets a number where it is in use: a
    repetition replaces nothing. A chosen name stays, and that of a run that goes on. A collective."""
    goes_on = cfg.overwrite or getattr(cfg, "resume", False)
    if goes_on or cfg.run_name != type(cfg).run_name:
        return cfg
    return replace(cfg, run_name=dist.gather(paths.free_name(cfg.run_name))[0])


def evaluate_task(
    model: gpt.GPT | None,
    tokenizer: Tokenizer | None,
    tags: str | None,
    task: Task,
    problems: Sequence[Problem],
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
    known: Mapping[str, Sequence[Row]] = {},
    keep: Callable[[Sequence[Row]], None] | None = None,
) -> TaskResult:
    """Sample n completions of every problem and score them with the task's own `score`. A
    collective.

    begin: ids with which every completion begins, such as the call tag. constrain: makes the
    grammar that a prompt's completions follow. A prompt that fills the model's block counts as
    failed. model, tokenizer and tags are None for a `collect` that needs none of them; the
    default is `rollout.collect`. known: the n rows of each problem that an earlier call has
    sampled. keep: takes new rows as they come, on every rank."""
    if constrain and episodes.has_environment(task):
        raise ConfigError(
            f"task {task.name} has episodes, whose turns are sampled freely; leave out --constrain"
        )
    _check_problems(task, problems)
    draw: Collect = collect or rollout.collect

    def rows_of(some: Sequence[Problem]) -> list[Row]:
        grammars = None
        if constrain:
            assert tokenizer and tags, "only a checkpoint's completions can be constrained"
            grammars = [constrain(task.prompt(problem), tokenizer, tags) for problem in some]
        with numerics.autocast(model.wte.weight.device) if model else nullcontext():
            batch = draw(
                model,
                task,
                some,
                tokenizer,
                tags,
                keys=[problem.id for problem in some],
                group_size=n,
                temperature=temperature,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                seed=seed,
                sampler=partial(_sample_after, list(begin), grammars, _turn_end(tokenizer, tags)),
            )
        return _rows(batch, task, tokenizer, tags)

    with (
        generate.weights_stay(model) if model else nullcontext(),
        tqdm(
            total=len(problems),
            initial=sum(problem.id in known for problem in problems),
            desc=progress,
            unit="problem",
            disable=not (progress and dist.is_main()),
        ) as bar,
    ):
        done = dict(known)
        missing = [problem for problem in problems if problem.id not in known]
        if model:
            missing = _alike_together(task, missing)
        for chunk in _chunks(missing, n, CHUNK_ROWS if model else ASKED_ROWS):
            found = _shared_out(chunk, n, rows_of)
            for i, problem in enumerate(chunk):
                done[problem.id] = found[i * n : (i + 1) * n]
            if keep:
                keep(found)
            bar.update(len(chunk))
    rows = [row for problem in problems for row in done[problem.id]]
    return TaskResult(task, problems, rows, n, temperature, ks, seed)


def _turn_end(tokenizer: Tokenizer | None, tags: str | None) -> Sequence[int]:
    """The ids at the end of a turn; none where the caller knows no tokens."""
    if tokenizer is None or tags is None:
        return ()
    return chat.layout(tokenizer, tags).stop


def _alike_together(task: Task, problems: Sequence[Problem]) -> list[Problem]:
    """The problems in the order of their prompts: those that begin alike, such as requests to the
    same tools, are sampled together. Episodes stay as they are."""
    if episodes.has_environment(task):
        return list(problems)

    def texts(problem: Problem) -> list[str]:
        return [message["content"] for message in task.prompt(problem)]

    return sorted(problems, key=texts)


def _chunks(problems: Sequence[Problem], n: int, rows: int) -> Iterator[Sequence[Problem]]:
    """Some problems at a time: with n completions each, so many rows for every rank."""
    size = max(1, rows // n) * dist.world_size()
    for at in range(0, len(problems), size):
        yield problems[at : at + size]


def _shared_out(
    chunk: Sequence[Problem], n: int, rows_of: Callable[[Sequence[Problem]], list[Row]]
) -> list[Row]:
    """The n rows of each problem, in order; the ranks share the problems. A collective."""
    mine = chunk[dist.rank() :: dist.world_size()]
    parts = dist.gather(rows_of(mine) if mine else [])
    rows: list[Row] = []
    for i in range(len(chunk)):
        number, rank = divmod(i, len(parts))  # rank r had the problems r, r + R, r + 2R, ...
        rows += parts[rank][number * n : (number + 1) * n]
    return rows


def _rows(
    batch: rollout.RolloutBatch, task: Task, tokenizer: Tokenizer | None, tags: str | None
) -> list[Row]:
    """The rows of examples.jsonl of all completions; with how a call is written, where an imported
    model has its own words for them."""
    rows = [_example(task, batch, i) for i in range(len(batch.completions))]
    if tokenizer is not None and tags is not None and not batch.turns:
        for row, completion in zip(rows, batch.completions):
            row["surface"] = chat.form_of_calls(completion.ids, tokenizer, tags)
    return rows


def problems_once(task: Task, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
    """Problems of a split to evaluate on, each once; a line on stderr counts repeated ones.
    DataError where different problems share an id, since results are kept by it."""
    found: dict[str, Problem] = {}
    repeated = Counter[str]()
    for problem in task.problems(split, limit=limit, seed=seed):
        if problem.id not in found:
            found[problem.id] = problem
            continue
        if hash_problems([found[problem.id]]) != hash_problems([problem]):
            got = (
                f"task {task.name}, split {split}: two different "
                f"problems have the id {problem.id!r}"
            )
            raise DataError(f"{got}; results are kept by the id; give each problem its own")
        repeated[problem.id] += 1
    if repeated and dist.is_main():
        such = next(id for id in found if id in repeated)
        count = f"{repeated.total()} problems are repeated, such as {such!r}"
        print(f"task {task.name}, split {split}: {count}; each counts once", file=sys.stderr)
    return list(found.values())


def _check_problems(task: Task, problems: Sequence[Problem]) -> None:
    """DataError for no problems, and for two of one id: draws depend on the id, and results are
    kept by it."""
    if not problems:
        raise DataError(
            f"no problems of task {task.name} to evaluate; check the split and the limit"
        )
    id, times = Counter(problem.id for problem in problems).most_common(1)[0]
    if times > 1:
        raise DataError(
            f"problem {id!r} of task {task.name} is given {times} times; take `problems_once`"
        )


def _sample_after(
    begin: list[int],
    grammars: Sequence[draws.Grammar | None] | None,
    ends: Sequence[int],
    model: gpt.GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **sampling: Any,
) -> list[generate.Completion]:
    """Completions that start with `begin`, empty for a prompt that leaves no room in the block.
    ends: of a turn. sampling: further settings of `generate.sample`."""
    sampling["on_overflow"] = (
        "empty"  # such a prompt is counted as failed instead of ending the evaluation
    )
    prompts = [[*ids, *begin] for ids in prompts]
    if sampling.get("samples_per_prompt", 1) == 1 and "prefix_tokens" not in sampling:
        sampling["prefix_tokens"] = generate.first_turns(model, prompts, ends)
    sampled = generate.sample(
        model,
        prompts,
        max_new_tokens=max(1, max_new_tokens - len(begin)),
        grammars=grammars,
        **sampling,
    )
    given = [0.0] * len(begin)  # log-probabilities of ids that were not sampled
    return [
        replace(c, ids=begin + c.ids, logprobs=given + c.logprobs) if c.ids else c for c in sampled
    ]


def _example(task: Task, batch: rollout.RolloutBatch, i: int) -> Row:
    """The row of examples.jsonl of completion i."""
    problem = batch.problems[i // batch.group_size]
    completion = batch.completions[i]
    score = batch.scores[i]
    # silence may be a correct answer, but there was none
    if completion.stop == "context" and not completion.ids:
        score = Score(0.0, task.tiers[0], score.parts, False, dict.fromkeys(score.terms, 0.0))
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
