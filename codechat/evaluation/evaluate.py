"""Is a score real? Checkpoints on a task's own `score`: pass@k with intervals, tiers, the behaviour matrix.

    codechat evaluate --ckpt nano/sft nano/rl@best --data-dir data/nano/sft --split test test_hard --n 8 --ks 1 8
    codechat evaluate --ckpt nano/rl --data-dir data/nano/sft --split select --all-checkpoints --run-name choice
    codechat evaluate --ckpt nano/sft --task bfcl --n 1 --ks 1 --temperature 0 --max-new-tokens 128

Every pass@k is printed with k, n, N and temperature. Draws are keyed by problem id, so a problem's
completions do not depend on which others are asked, and two checkpoints see common random numbers. A
checkpoint is chosen on `select`, by pass@1, then by the largest k; the second command does so and writes the
run's checkpoints/best. `per_problem.jsonl` in the run directory keeps the counts that a paired test needs,
`examples.jsonl` every completion with its score. A task that tells groups apart (bfcl: categories) gets a score for each.

Under torchrun the problems are dealt to the ranks; the result is that of one process.

Before a score is printed the problems are searched for in what the checkpoint's lineage was trained on
(`contamination`); where some are found, pass@1 of the clean and of the exposed ones stands beside the whole.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from codechat import tasks
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError
from codechat.distributed import dist
from codechat.evaluation import contamination, domain_loss
from codechat.evaluation.behaviour_probes import BehaviourMatrix, behaviour_matrix, read_probes
from codechat.evaluation.intervals import bootstrap_interval, estimate_pass_at_k, paired_bootstrap, share_interval
from codechat.evaluation.results import ProblemResult, TaskResult, paired_difference, parts_of, read_per_problem
from codechat.models import generate, loading
from codechat.models.gpt import GPT
from codechat.rl import episodes
from codechat.runs import checkpoint
from codechat.runs.paths import STEP, checkpoint_paths, is_run, name_of
from codechat.runs.run import Run, find_checkpoint, find_run
from codechat.tasks.base import Problem, Score, Task
from codechat.text import chat
from codechat.text.tokenizer import Tokenizer

__all__ = [
    "BehaviourMatrix",
    "EvaluateConfig",
    "ProblemResult",
    "TaskResult",
    "behaviour_matrix",
    "estimate_pass_at_k",
    "evaluate_task",
    "paired_bootstrap",
    "paired_difference",
    "read_per_problem",
    "read_probes",
    "run_evaluation",
]

CHUNK_ROWS = 256  # completions sampled between two ticks of the progress bar
TOO_LONG = generate.Completion([], [], "context")
KEPT_SAMPLES = 40  # completions of an evaluation written to samples.jsonl


# ---------------------------------------------------------------- one task


def evaluate_task(
    model: GPT,
    tokenizer: Tokenizer,
    tags: str,
    task: Task,
    problems: Sequence[Problem],
    *,
    n: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    max_new_tokens: int = 64,
    ks: Sequence[int] = (1,),
    seed: int = 0,
    batch_size: int | None = None,
    progress: str | None = None,
) -> TaskResult:
    """Sample n completions of every problem and score them with the task's own `score`.

    With several ranks a collective: each takes every W-th problem, and all return the whole result. batch_size:
    completions sampled at a time. progress: title of a progress bar, none = no bar. A prompt that leaves no room
    in the model's block counts as failed, and is told. Raises ConfigError where a k exceeds n and DataError without problems.
    Leaves the model in the mode it came in."""
    _check_sampling(n, ks, temperature)
    if not problems:
        raise DataError(
            f"no problems of task {task.name} to evaluate; at least one is required; check the split and the limit"
        )
    mine = list(
        _scored(
            model,
            tokenizer,
            tags,
            task,
            problems[dist.rank() :: dist.world_size()],
            n=n,
            temperature=temperature,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            seed=seed,
            batch_size=batch_size,
            progress=progress if dist.is_main() else None,
        )
    )
    rows = _in_order(dist.all_gather_objects(mine), len(problems), n)
    results = [_problem_result(p, rows[i * n : (i + 1) * n]) for i, p in enumerate(problems)]
    passes = {k: share_interval([estimate_pass_at_k(n, r.c, k) for r in results], seed=seed) for k in ks}
    return TaskResult(
        task=task.name,
        tiers=tuple(task.tiers),
        problems=results,
        n=n,
        temperature=temperature,
        pass_at=passes,
        reward=bootstrap_interval([r.reward_mean for r in results], seed=seed),
        completion_tokens_mean=sum(r["tokens"] for r in rows) / len(rows),
        truncated_frac=sum(r["stop"] != "stop" for r in rows) / len(rows),
        samples=[{k: v for k, v in row.items() if k not in ("parts", "terms")} for row in _spread(rows, KEPT_SAMPLES)],
        examples=rows,
        formatted=tuple(getattr(task, "formatted", ())),
        grouped_by=getattr(task, "grouped_by", ""),
    )


def _in_order(parts: Sequence[Sequence[dict[str, Any]]], n_problems: int, n: int) -> list[dict[str, Any]]:
    """Rows problem-major, from what each rank has of its problems."""
    found = []
    for i in range(n_problems):
        at, part = i // len(parts) * n, parts[i % len(parts)]
        found += part[at : at + n]
    return found


def _check_sampling(n: int, ks: Sequence[int], temperature: float) -> None:
    if not ks or min(ks) < 1 or max(ks) > n:
        raise ConfigError(
            f"pass@k for k={list(ks)} from n={n} samples; n must be at least the largest k; set --n "
            f"{max([*ks, 1])} or more"
        )
    if temperature == 0 and n > 1:
        raise ConfigError(
            f"temperature 0 with n={n}: all samples of a problem are the same; set --n 1 --ks 1 or a "
            "temperature above 0"
        )


def _scored(
    model: GPT,
    tokenizer: Tokenizer,
    tags: str,
    task: Task,
    problems: Sequence[Problem],
    *,
    n: int,
    seed: int,
    batch_size: int | None,
    progress: str | None,
    **sampling: Any,
) -> Iterator[dict[str, Any]]:
    """One row for each completion, problem-major."""
    stops = () if getattr(task, "no_stop", False) else chat.stop_sequences(tokenizer, tags)
    per_chunk = max(1, (batch_size or CHUNK_ROWS) // n)
    bar = tqdm(total=len(problems), desc=progress, unit="problem", disable=progress is None)
    was_training = model.training
    model.eval()
    with bar:
        for at in range(0, len(problems), per_chunk):
            chunk = problems[at : at + per_chunk]
            keys = [p.id for p in chunk]
            if episodes.made_by(task):
                with dist.autocast(model.wte.weight.device):
                    played = episodes.play(
                        model,
                        task,
                        chunk,
                        tokenizer,
                        tags,
                        group_size=n,
                        keys=keys,
                        seed=seed,
                        batch_size=batch_size,
                        **sampling,
                    )
                yield from (
                    _scored_row(task, e.problem, e.text, e.completion, e.score) | {"turns": [t.row() for t in e.turns]}
                    for e in played
                )
                bar.update(len(chunk))
                continue
            prompts = [chat.prompt(task.prompt(p), tokenizer, tags) for p in chunk]
            fits = [len(ids) < model.cfg.block_size for ids in prompts]
            with dist.autocast(model.wte.weight.device):
                made = iter(
                    generate.sample(
                        model,
                        list(compress(prompts, fits)),
                        stop=stops,
                        seed=seed,
                        samples_per_prompt=n,
                        batch_size=batch_size,
                        keys=list(compress(keys, fits)),
                        on_overflow="stop",
                        **sampling,
                    )
                )
            completions = [next(made) if fit else TOO_LONG for fit in fits for _ in range(n)]
            texts = [chat.completion_text(c.ids, tokenizer, tags) for c in completions]
            asked = [p for p in chunk for _ in range(n)]
            for p, text, completion, score in zip(
                asked, texts, completions, tasks.score_all(task, asked, texts), strict=True
            ):
                yield _scored_row(
                    task, p, text, completion, score if completion is not TOO_LONG else _failed(task, score)
                )
            bar.update(len(chunk))
    model.train(was_training)


def _scored_row(
    task: Task, problem: Problem, text: str, completion: generate.Completion, score: Score
) -> dict[str, Any]:
    return dict(
        problem=problem.id,
        reward=score.reward,
        tier=score.tier,
        correct=score.correct,
        request=problem.messages[-1]["content"],
        gold=task.gold(problem),
        completion=text,
        stop=completion.stop,
        tokens=sum(completion.written),
        parts=dict(score.parts),
        terms=dict(score.terms),
    )


def _failed(task: Task, score: Score) -> Score:
    """Of a prompt that the model has no room for: silence may be a right answer, but none was given."""
    return replace(score, reward=0.0, tier=task.tiers[0], correct=False, terms=dict.fromkeys(score.terms, 0.0))


def _problem_result(problem: Problem, rows: Sequence[Mapping[str, Any]]) -> ProblemResult:
    return ProblemResult(
        id=problem.id,
        n=len(rows),
        c=sum(r["correct"] for r in rows),
        reward_mean=sum(r["reward"] for r in rows) / len(rows),
        tiers=Counter(r["tier"] for r in rows),
        rewards=tuple(r["reward"] for r in rows),
        meta=problem.meta,
    )


def _spread(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` rows at equal distances, so that samples come from all over the problems."""
    return [rows[i * len(rows) // count] for i in range(count)] if len(rows) > count else rows


# ---------------------------------------------------------------- the command


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to evaluate, and how many samples to draw."""

    run_name: str = opt("evaluate", "name of the run directory under runs/", identity=False)
    overwrite: bool = opt(False, "delete the run of this name first", identity=False)
    ckpt: tuple[str, ...] = opt(
        config.REQUIRED, "checkpoints: run name, run@best, run@STEP, run directory or checkpoint"
    )
    task: str = opt("funcall", "task, such as funcall, micro, gsm8k, reasoning:levels=[1,2] or mbpp:variant=sanitized")
    data_dir: str | None = opt(
        None, "directory with TASK.SPLIT.jsonl problems and probes, or the task's own files; none = what the task has"
    )
    split: tuple[Literal["select", "test", "test_hard"], ...] = opt(
        ("test",), "splits; a checkpoint is chosen on select and quoted on test"
    )
    all_checkpoints: bool = opt(False, "evaluate every checkpoint of the run on select and write checkpoints/best")
    limit: int | None = opt(None, "problems per split; none = all that the task has")
    n: int = opt(8, "completions per problem")
    ks: tuple[int, ...] = opt((1, 8), "pass@k to estimate; each at most n")
    temperature: float = opt(1.0, "sampling temperature; 0 = greedy, with n = 1")
    top_k: int | None = opt(None, "sample among the k likeliest tokens; none = all")
    max_new_tokens: int = opt(64, "longest completion, tokens")
    contamination: bool = opt(
        True, "search what the checkpoint was trained on for the problems before printing scores", identity=False
    )
    probe_examples: int = opt(32, "behaviour probes per cell, where data_dir holds probes; 0 = none")
    heldout_examples: int = opt(
        0, "held-out conversations of each domain of data_dir to measure the loss of; 0 = none", late=True
    )
    device_batch_size: int | None = opt(None, "completions sampled at a time; none = what memory allows")
    seed: int = opt(0, "seed of problem order, sampling and bootstrap")

    def __post_init__(self) -> None:
        _check_sampling(self.n, self.ks, self.temperature)
        if 1 not in self.ks:
            raise ConfigError(f"ks {list(self.ks)} without 1; pass@1 ranks checkpoints and pairs them; add 1 to --ks")
        if self.heldout_examples and (not self.data_dir or "test_hard" in self.split):
            raise ConfigError(
                "heldout_examples needs a --data-dir with conversations, and split select or test: test_hard has problems only"
            )
        if not self.ckpt or not self.split:
            raise ConfigError("no --ckpt or no --split; at least one of each is required")
        if self.all_checkpoints and (len(self.ckpt) > 1 or self.split != ("select",)):
            raise ConfigError(
                f"--all-checkpoints with {len(self.ckpt)} --ckpt on {', '.join(self.split)}: it chooses a "
                "checkpoint of one run, and "
                "a split that chooses cannot be quoted; set one --ckpt and --split select"
            )


def run_evaluation(cfg: EvaluateConfig) -> Run:
    """Evaluate every checkpoint on every split; one eval.jsonl row each, and per_problem.jsonl. Raises
    UserError before anything is written for bad settings, missing checkpoints or failing gold answers."""
    task = tasks.load(cfg.task, **({"source": cfg.data_dir} if cfg.data_dir else {}))
    problems = {split: task.problems(split, limit=cfg.limit, seed=cfg.seed) for split in cfg.split}
    for found in problems.values():
        tasks.gold_gate(task, found).require()
    paths = _checkpoints(cfg)
    with (
        dist.session(cfg) as world,
        Run.create(cfg.run_name, cfg, kind="evaluate", parent=str(paths[0]), overwrite=cfg.overwrite) as run,
    ):
        rows = [_evaluate_checkpoint(cfg, run, task, problems, path, world) for path in paths]
        summary = _paired_summary(run, cfg) if len(paths) > 1 and world.is_main else {}
        if cfg.all_checkpoints and world.is_main:
            best = choose({p: r["select"] for p, r in zip(paths, rows, strict=True)}, max(cfg.ks))
            checkpoint.set_best(best.parent.parent, int(STEP.fullmatch(best.name)[1]))
            print(f"best on select: {label(best)}; {label(best).partition('@')[0]}@best now means it")
            summary = {"best": label(best)}
        run.finish(summary)
    return run


def _checkpoints(cfg: EvaluateConfig) -> list[Path]:
    """The checkpoint directories to evaluate."""
    if not cfg.all_checkpoints:
        return [find_checkpoint(ref) for ref in cfg.ckpt]
    find_checkpoint(cfg.ckpt[0])  # refuses a run without checkpoints, and says what to do
    return list(checkpoint_paths(find_run(cfg.ckpt[0].partition("@")[0])).values())


def _evaluate_checkpoint(
    cfg: EvaluateConfig,
    run: Run,
    task: Task,
    problems: Mapping[str, Sequence[Problem]],
    path: Path,
    world: dist.World,
) -> dict[str, dict[str, float]]:
    """Metrics of one checkpoint by split; logs and prints them."""
    loaded = loading.load_model(path, device=world.device)
    step, name = int(loaded.meta["step"]), label(path)
    report = None
    if cfg.contamination:
        report = contamination.check([p for items in problems.values() for p in items], loaded.meta.get("lineage", ()))
        if world.is_main:
            print(report)
    found = {}
    for split, items in problems.items():
        result = evaluate_task(
            loaded.model,
            loaded.tokenizer,
            loaded.tags,
            task,
            items,
            n=cfg.n,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            max_new_tokens=cfg.max_new_tokens,
            ks=cfg.ks,
            seed=cfg.seed,
            batch_size=cfg.device_batch_size,
            progress=f"{name} on {split}",
        )
        row = result.row()
        if world.is_main:
            print(
                "\n".join(
                    filter(
                        None, [f"{name} on {cfg.task} {split}: {result}\n  {result.outcomes()}", result.told_by_group()]
                    )
                )
            )
        if report is not None:
            row |= parts_of(result, report.how, seed=cfg.seed)
        if cfg.heldout_examples:
            row |= domain_loss.of_checkpoint(loaded, cfg.data_dir or "", split, cfg.heldout_examples, world.device)
        if probes := _probes(cfg, split):
            matrix = behaviour_matrix(loaded.model, loaded.tokenizer, loaded.tags, probes, seed=cfg.seed)
            row |= matrix.metrics()
            if world.is_main:
                print(matrix)
        run.log_eval(step, dict(row, checkpoint=name, split=split, task=cfg.task))
        run.log_samples(step, [dict(s, checkpoint=name, split=split) for s in result.samples])
        if world.is_main:
            with (run.path / "per_problem.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(dict(checkpoint=name, split=split, **p.row())) + "\n" for p in result.problems
                )
            with (run.path / "examples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps(dict(checkpoint=name, split=split, **e), default=str) + "\n" for e in result.examples
                )
        found[split] = row
    return found


def _probes(cfg: EvaluateConfig, split: str) -> list[dict[str, Any]]:
    if not cfg.probe_examples or not cfg.data_dir or not (Path(cfg.data_dir) / f"probes.{split}.jsonl").exists():
        return []
    return read_probes(cfg.data_dir, split, cfg.probe_examples)


def label(path: Path) -> str:
    """RUN@STEP of a checkpoint, as `--ckpt` takes it (nano/rl@150); its path where it lies outside a run."""
    run, step = path.parent.parent, STEP.fullmatch(path.name)
    return f"{name_of(run.resolve())}@{int(step[1])}" if step and is_run(run) else str(path)


def choose(rows: Mapping[Path, Mapping[str, float]], k: int) -> Path:
    """The checkpoint with the largest pass@1; ties go to the larger pass@k, then to the earlier one."""
    return max(sorted(rows), key=lambda path: (rows[path]["pass@1"], rows[path][f"pass@{k}"]))


def _paired_summary(run: Run, cfg: EvaluateConfig) -> dict[str, Any]:
    """pass@1 of each later checkpoint minus the first's, by split, printed and returned."""
    rows, found = read_per_problem(run), {}
    names = list(dict.fromkeys(r["checkpoint"] for r in rows))
    for split in cfg.split:
        parts = {name: [r for r in rows if r["checkpoint"] == name and r["split"] == split] for name in names}
        for name in names[1:]:
            gap = paired_difference(parts[names[0]], parts[name], seed=cfg.seed)
            print(
                f"{name} minus {names[0]} on {split}: pass@1 {gap.value:+.3f} [{gap.lo:+.3f}, {gap.hi:+.3f}] "
                f"(paired, N={len(parts[name])})"
            )
            found[f"{split}: {name} - {names[0]}"] = dict(value=gap.value, lo=gap.lo, hi=gap.hi, N=len(parts[name]))
    return found


def main(argv: list[str] | None = None) -> None:
    """`codechat evaluate`, `python -m codechat.evaluation.evaluate`."""
    run_evaluation(
        config.parse(EvaluateConfig, sys.argv[1:] if argv is None else argv, prog="codechat evaluate", epilog=__doc__)
    )


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
