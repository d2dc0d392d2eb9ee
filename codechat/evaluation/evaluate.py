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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from codechat import tasks
from codechat.core.atomic_files import append_rows
from codechat.core.config import SEEDS, Settings, opt
from codechat.core.errors import ConfigError, DataError
from codechat.data import conversations
from codechat.distributed import dist
from codechat.evaluation import contamination, loglik, results
from codechat.evaluation.behaviour_probes import behaviour_matrix, read_probes
from codechat.evaluation.endpoint import Endpoint
from codechat.models import generate, gpt, loading
from codechat.rl import episodes, rollout
from codechat.runs import checkpoint
from codechat.runs.paths import STEP, checkpoint_paths, find_checkpoint, find_run, is_run, name_of
from codechat.runs.run import Run
from codechat.tasks.base import Problem, hash_problems
from codechat.text import chat
from codechat.text.call_grammar import CallGrammar, prompt_grammar
from codechat.text.tokenizer import Tokenizer

LOSS_ROWS = 8  # packed rows of a batch of held-out conversations
CHUNK_ROWS = 256  # completions sampled between two ticks of the progress bar


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
    constrain: bool = False,
    progress: str | None = None,
    collect: Callable[..., rollout.RolloutBatch] | None = None,
) -> results.TaskResult:
    """Sample n completions of every problem and score them with the task's own `score`. A collective.

    begin: ids with which every completion begins, such as the call tag. constrain: calls are held to the schemas that
    the prompt offers. A prompt that fills the model's block counts as failed."""
    if constrain and episodes.has_environment(task):
        raise ConfigError(f"task {task.name} has episodes, whose turns are sampled freely; leave out --constrain")
    if not problems:
        raise DataError(f"no problems of task {task.name} to evaluate; check the split and the limit")
    if len({p.id for p in problems}) < len(problems):  # draws depend on the id, and results are kept by it
        repeated, times = Counter(p.id for p in problems).most_common(1)[0]
        raise DataError(f"problem {repeated!r} of task {task.name} is given {times} times; take `problems_once`")
    mine = problems[dist.rank() :: dist.world_size()]
    my_rows, per_chunk = [], max(1, CHUNK_ROWS // n)
    with tqdm(total=len(mine), desc=progress, unit="problem", disable=not (progress and dist.is_main())) as bar:
        for at in range(0, len(mine), per_chunk):
            chunk = mine[at : at + per_chunk]
            held = [prompt_grammar(task.prompt(p), tokenizer, tags) for p in chunk] if constrain else None
            how = dict(group_size=n, temperature=temperature, top_k=top_k, max_new_tokens=max_new_tokens, seed=seed)
            how |= dict(sampler=partial(sample_after, list(begin), held))
            with dist.autocast(model.wte.weight.device) if model else nullcontext():
                batch = (collect or rollout.collect)(
                    model, task, chunk, tokenizer, tags, keys=[p.id for p in chunk], **how
                )
            my_rows += _rows(task, batch)
            bar.update(len(chunk))
    parts = dist.gather(my_rows)
    rows = [row for i in range(len(problems)) for row in parts[i % len(parts)][i // len(parts) * n :][:n]]
    return results.TaskResult(task, problems, rows, n, temperature, ks, seed)


def problems_once(task: tasks.Task, split: str, limit: int | None = None, seed: int = 0) -> list[Problem]:
    """Problems of a split to evaluate on, each once: a line on stderr counts those that are repeated. DataError where different problems share an
    id, since results are kept by it."""
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
    grammars: Sequence[CallGrammar | None] | None,
    model: gpt.GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **how: Any,
) -> list[generate.Completion]:
    """Completions that start with `begin`; one is empty where its prompt leaves no room in the block."""
    how |= dict(max_new_tokens=max(1, max_new_tokens - len(begin)), grammars=grammars, on_overflow="empty")
    sampled, zeros = generate.sample(model, [[*ids, *begin] for ids in prompts], **how), [0.0] * len(begin)
    return [replace(c, ids=begin + c.ids, logprobs=zeros + c.logprobs) if c.ids else c for c in sampled]


def _rows(task: tasks.Task, batch: rollout.RolloutBatch) -> Iterator[dict[str, Any]]:
    """One row for each completion, problem-major."""
    for i, (completion, score) in enumerate(zip(batch.completions, batch.scores, strict=True)):
        problem = batch.problems[i // batch.group_size]
        if completion.stop == "context" and not completion.ids:  # silence may be a correct answer, but there was none
            score = tasks.Score(0.0, task.tiers[0], score.parts, False, dict.fromkeys(score.terms, 0.0))
        row = dict(problem=problem.id, reward=score.reward, tier=score.tier, correct=score.correct)
        row |= dict(request=problem.messages[-1]["content"], gold=task.gold(problem), completion=batch.texts[i])
        row |= dict(
            stop=completion.stop, tokens=sum(completion.written), parts=dict(score.parts), terms=dict(score.terms)
        )
        yield row | ({"turns": [t.row() for t in batch.turns[i]]} if batch.turns else {})


# ---- held-out loss


def held_out_losses(
    model: gpt.GPT, held_out: Mapping[str, Sequence[conversations.Batch]], sizes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Loss on held-out conversations by domain: heldout_loss/DOMAIN, nats per supervised token; with `sizes`, the
    conversations of each domain, also heldout_nats/DOMAIN, nats per conversation, which compares models whose tags have
    other lengths. A collective."""
    import torch

    losses, device = {}, dist.device()
    for domain, batches in held_out.items():
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches[dist.rank() :: dist.world_size()]:
            batch = batch.to(device)
            mask = conversations.packed_mask(batch.docs)
            with torch.no_grad(), dist.autocast(device):
                nats = model.loss(batch.ids, batch.targets, reduction="sum", positions=batch.positions, mask=mask)
            total += torch.tensor([nats.item(), batch.supervised], dtype=torch.float64, device=device)
        nats_sum, tokens = dist.sum_(total).tolist()
        losses[f"heldout_loss/{domain}"] = nats_sum / max(1, int(tokens))
        losses |= {f"heldout_nats/{domain}": nats_sum / sizes[domain]} if sizes else {}
    return losses


def losses_of_checkpoint(loaded: loading.LoadedModel, data_dir: str, split: str, limit: int) -> dict[str, float]:
    """Both losses, of the first `limit` conversations of each domain."""
    block = loaded.model.cfg.block_size
    domains = conversations.load_domains(data_dir, split, loaded.tokenizer, loaded.tags, block, limit=limit)
    batches = {domain: conversations.held_out(examples, LOSS_ROWS, block) for domain, examples in domains.items()}
    return held_out_losses(loaded.model, batches, {domain: len(examples) for domain, examples in domains.items()})


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
        None, "file with the key that the endpoint expects; none = no key", identity=False, reads="path"
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


def samplings(cfg: EvaluateConfig) -> dict[str, dict[str, Any]]:
    """{name: settings for `evaluate_task`} of each row of the results; the first is what checkpoints are chosen by."""
    if cfg.score == "loglik":
        return {way: dict(temperature=0.0, n=1, ks=(1,)) for way in loglik.WAYS}
    ways: dict[str, dict[str, Any]] = {}
    for t in (cfg.temperature, *cfg.temperatures):
        how = dict(n=cfg.n, ks=cfg.ks) if t else dict(n=1, ks=(1,))
        ways[f"T={t:g}" if t else "greedy"] = dict(temperature=t, **how)
    free, first = dict(ways), next(iter(ways))
    if cfg.forced_call:
        ways[f"{first}, call given"] = ways[first]
    if cfg.constrain:
        ways |= {f"{name}, constrained": how | dict(constrain=True) for name, how in free.items()}
    return ways


# further metrics of a result, from its run, its checkpoint and split, and the problems that were trained on
Judge = Callable[[Run, results.TaskResult, Mapping[str, str], Mapping[str, Any]], dict[str, Any]]


def run_evaluation(cfg: EvaluateConfig, kind: str = "evaluate", judge: Judge | None = None, **options: Any) -> Run:
    """Evaluate every checkpoint on every split; one eval.jsonl row each, and per_problem.jsonl. options: of the task."""
    task = tasks.load(cfg.task, source=cfg.data_dir, **options)
    if cfg.score == "loglik" and not hasattr(task, "choices"):
        raise ConfigError(
            f"task {task.name} has no choices; --score loglik takes arc_challenge, arc_easy, hellaswag, mmlu"
        )
    problems = {split: problems_once(task, split, cfg.limit, cfg.seed) for split in cfg.split}
    left_out = {}
    for split, some in problems.items():
        check = tasks.check_reference_solutions(task, some)
        if not (cfg.skip_failing_references and check.passed):
            check.require()
        if check.failed:
            problems[split], left_out[split] = [p for p in some if p.id not in check.failed], list(check.failed)
            print(f"{task.name}: left out, since their reference solutions fail: {', '.join(check.failed)}")
    paths = list(dict.fromkeys(find_checkpoint(ref) for ref in cfg.ckpt))
    if len(paths) < len(cfg.ckpt):
        print("a checkpoint that --ckpt names twice is evaluated once", file=sys.stderr)
    if cfg.all_checkpoints:
        paths = list(checkpoint_paths(find_run(cfg.ckpt[0].partition("@")[0])).values())
    served = [Endpoint(cfg.endpoint, cfg.model, cfg.api_key_file)] if cfg.endpoint else []
    how = dict(kind=kind, parent=str(paths[0]) if paths else None, overwrite=cfg.overwrite)
    with dist.session(cfg):
        if cfg.overwrite:  # the first one is loaded before the former run goes
            for path in paths[1:]:
                checkpoint.check(path)
        with Run.create(cfg.run_name, cfg, **how) as run:
            searched: dict[str, contamination.Report] = {}
            rows = [_evaluate_one(cfg, run, task, problems, one, judge, searched) for one in (*paths, *served)]
            summary = _paired_summary(run, cfg) if len(rows) > 1 and dist.is_main() else {}
            if cfg.all_checkpoints and dist.is_main():
                best = choose({p: r["select"] for p, r in zip(paths, rows, strict=True)}, max(cfg.ks))
                checkpoint.set_best(best.parent.parent, int(STEP.fullmatch(best.name)[1]))
                print(f"best on select: {label(best)}; {label(best).partition('@')[0]}@best now means it")
                summary = {"best": label(best)}
            verdicts = ("verdict", "remedy", "reward_verdict", "gate")
            summary |= {k: row[k] for row in rows[-1].values() for k in verdicts if k in row}
            run.finish(summary | ({"left_out": left_out} if left_out else {}))
    return run


def _evaluate_one(
    cfg: EvaluateConfig,
    run: Run,
    task: tasks.Task,
    problems: Mapping[str, Sequence[tasks.Problem]],
    source: Path | Endpoint,
    judge: Judge | None,
    searched: dict[str, contamination.Report],
) -> dict[str, dict[str, Any]]:
    """Metrics of one checkpoint or endpoint by split; logs and prints them. searched: what each lineage so far was found to hold."""
    loaded: Any = source if isinstance(source, Endpoint) else loading.load_model(source, dist.device(), cfg.tags)
    name, rows, exposed = loaded.name if loaded is source else label(source), {}, {}
    if hasattr(task, "tools_style"):
        task.tools_style = loaded.tools_style
    step, say = int(loaded.meta["step"]), print if dist.is_main() else lambda text: None
    if cfg.contamination:
        lineage, everything = loaded.meta.get("lineage", ()), [p for items in problems.values() for p in items]
        # checkpoints of one run have learned from the same texts
        known = json.dumps([{**entry, "step": None} for entry in lineage], sort_keys=True)
        report = searched.get(known) or contamination.check(everything, lineage)
        searched[known], exposed = report, report.how
        say(report)
    collect = loaded.collect if loaded is source else loglik.Chooser(loaded) if cfg.score == "loglik" else None
    for (split, items), (i, (way, how)) in itertools.product(problems.items(), enumerate(samplings(cfg).items())):
        which = dict(checkpoint=name, split=split, sampling=way)
        how = how | dict(
            top_k=cfg.top_k, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed, progress=f"{name} on {split}"
        )
        how |= dict(begin=chat.layout(loaded.tokenizer, loaded.tags).call if way.endswith("call given") else ())
        how |= dict(collect=partial(collect, way=way) if way in loglik.WAYS else collect)
        result = evaluate_task(loaded.model, loaded.tokenizer, loaded.tags, task, items, **how)
        row = result.row() | dict(sampling=way)
        say(result.report(f"{name} on {cfg.task} {split}{f', {way}' if ',' in way else ''}"))
        if dist.is_main():
            for file, found in (("per_problem", result.counts), ("examples", result.examples)):
                append_rows(run.path / f"{file}.jsonl", (which | row for row in found))
        run.log_samples(step, [dict(s, **which) for s in result.samples])
        if i == 0:
            rows[split] = row
            row |= results.clean_and_exposed(result, exposed) if cfg.contamination else {}
            row |= judge(run, result, which, exposed) if judge else {}
            if cfg.heldout_examples:
                row |= losses_of_checkpoint(loaded, cfg.data_dir, split, cfg.heldout_examples)
            file = Path(cfg.data_dir or "") / f"probes.{split}.jsonl"
            if loaded.model and cfg.probe_examples and cfg.data_dir and file.exists():
                probes = read_probes(cfg.data_dir, split, cfg.probe_examples)
                matrix = behaviour_matrix(loaded.model, loaded.tokenizer, loaded.tags, probes, seed=cfg.seed)
                row |= matrix.metrics()
                say(matrix)
        run.log_eval(step, row | which | dict(task=cfg.task))
        run.keep()
    return rows


def label(path: Path) -> str:
    """RUN@STEP of a checkpoint, as `--ckpt` takes it (nano/rl@150); its path where it lies outside a run."""
    run, step = path.parent.parent, STEP.fullmatch(path.name)
    return f"{name_of(run.resolve())}@{int(step[1])}" if step and is_run(run) else str(path)


def choose(rows: Mapping[Path, Mapping[str, float]], k: int) -> Path:
    """The checkpoint with the largest pass@1; ties go to the larger pass@k, then to the earlier one."""
    return max(sorted(rows), key=lambda path: (rows[path]["pass@1"], rows[path].get(f"pass@{k}", 0)))


def _paired_summary(run: Run, cfg: EvaluateConfig) -> dict[str, Any]:
    """pass@1 of each later checkpoint minus the first's, by split and sampling, printed and returned."""
    parts: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in results.read_per_problem(run):
        parts.setdefault((row["checkpoint"], row["split"], row["sampling"]), []).append(row)
    first, *others = dict.fromkeys(checkpoint for checkpoint, _, _ in parts)
    main, *_ = ways = list(samplings(cfg))
    summary = {}
    for split, way, name in itertools.product(cfg.split, ways, others):
        a, b = parts[first, split, way], parts[name, split, way]
        gap, where = results.paired_difference(a, b, seed=cfg.seed), split if way == main else f"{split}, {way}"
        shown = f"pass@1 {gap.value:+.3f} [{gap.lo:+.3f}, {gap.hi:+.3f}] (paired, N={len(b)}, {way})"
        print(f"{name} minus {first} on {split}: {shown}")
        summary[f"{where}: {name} - {first}"] = gap._asdict() | {"N": len(b)}
    return summary
