"""The answers behind a board: checkpoints and endpoints on the function calling leaderboard, a row
for each answer.

Rows are appended as they come, so the same command goes on where it was stopped, and a later one
adds models, wordings and seeds to them."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codechat.core.atomic_files import append_rows, read_json, write_json
from codechat.core.errors import ConfigError
from codechat.core.processes import alone
from codechat.distributed import dist
from codechat.evaluation import scoring
from codechat.evaluation.endpoint import Endpoint
from codechat.evaluation.evaluate import Subject, load_subject
from codechat.evaluation.settings import EvaluateConfig
from codechat.runs.paths import find_checkpoint, fingerprint, reference_of
from codechat.tasks.base import Problem, hash_problems, shuffled
from codechat_lab.instruments.board_settings import BoardConfig, read_answers
from codechat_lab.tasks.bfcl.task import BfclTask

Row = dict[str, Any]
ROWS = "rows.jsonl"


class Cell(NamedTuple):
    """What has a set of answers."""

    model: str
    wording: str
    seed: int


def measure(cfg: BoardConfig, folder: Path) -> None:
    """Append the answers that are missing to ROWS of the folder. ConfigError where its rows were
    made with other settings, and for categories that silence alone solves."""
    evaluation = EvaluateConfig(
        ckpt=cfg.ckpt,
        endpoint=cfg.endpoint,
        model=cfg.model,
        api_key_file=cfg.api_key_file,
        tags=cfg.tags,
        task="bfcl",
        n=1,
        ks=(1,),
        temperature=cfg.temperature,
        max_new_tokens=cfg.max_new_tokens,
    )
    task = BfclTask(cfg.source, cfg.categories)
    problems = chosen(task, cfg.problems)
    if not any(problem.meta["right_is"] == "call" for problem in problems):
        raise ConfigError(
            f"got --categories {cfg.categories}, where no call is right: a silent model would have "
            "all of them; add a category where a call is right"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / ".lock"), dist.session(evaluation):
        check_settings(cfg, folder, hash_problems(task.rows))
        answered = answered_in(folder / ROWS)
        sources: list[Path | Endpoint] = [find_checkpoint(ref) for ref in cfg.ckpt]
        if cfg.endpoint:
            sources.append(Endpoint(cfg.endpoint, cfg.model, cfg.api_key_file))
        for source in sources:
            name = name_of(source, cfg)
            if isinstance(source, Path):
                check_weights(folder, name, fingerprint(read_json(source / "meta.json")))
            missing: dict[Cell, list[Problem]] = {}
            for wording, seed in itertools.product(cfg.wordings, cfg.seeds):
                cell = Cell(name, wording, seed)
                known = answered.get(cell, ())
                some = [one for one in problems if one.id not in known]
                if some:
                    missing[cell] = some
            if missing:
                subject = load_subject(evaluation, source)
                for cell, some in missing.items():
                    answer(cfg, task, subject, cell, some, folder / ROWS)


def name_of(source: Path | Endpoint, cfg: BoardConfig) -> str:
    if isinstance(source, Endpoint):
        return source.name
    name = reference_of(source)
    return f"{name} ({cfg.tags})" if cfg.tags else name


def chosen(task: BfclTask, most: int | None) -> list[Problem]:
    """At most so many problems of each category, the same ones for every model."""
    by_category: dict[str, list[Problem]] = {}
    for problem in task.rows:
        by_category.setdefault(problem.meta["category"], []).append(problem)
    return [one for some in by_category.values() for one in shuffled(some, most, seed=0)]


def check_settings(cfg: BoardConfig, folder: Path, problems: str) -> None:
    """Keep what all rows of a folder share, or compare with it."""
    settings = {
        "temperature": cfg.temperature,
        "max_new_tokens": cfg.max_new_tokens,
        "categories": cfg.categories,
        "problems": problems,
    }
    path = folder / "settings.json"
    if not path.exists():
        write_json(path, settings)
    kept = read_json(path)
    for name, value in settings.items():
        if kept.get(name) != value:
            raise ConfigError(
                f"{folder} holds answers with {name} {kept.get(name)}, not {value}; "
                "set the same, or another --out"
            )


def check_weights(folder: Path, name: str, weights: str) -> None:
    """Keep which weights a name stands for. ConfigError where the folder has answers of others,
    such as those of a run that was replaced."""
    path = folder / "weights.json"
    kept = read_json(path) if path.exists() else {}
    if kept.setdefault(name, weights) != weights:
        raise ConfigError(
            f"{folder} holds answers of {name} with the weights {kept[name]}, not {weights}; "
            "set another --out"
        )
    write_json(path, kept)


def answered_in(path: Path) -> dict[Cell, set[str]]:
    """The problems that each cell has answered."""
    found: dict[Cell, set[str]] = {}
    for row in read_answers(path):
        found.setdefault(Cell(row["model"], row["wording"], row["seed"]), set()).add(row["id"])
    return found


def answer(
    cfg: BoardConfig,
    task: BfclTask,
    subject: Subject,
    cell: Cell,
    problems: Sequence[Problem],
    path: Path,
) -> None:
    """Append the cell's answers to these problems as they come."""
    task.tools_style = subject.tools_style
    task.wording = cell.wording
    loaded = subject.checkpoint
    asked = {problem.id: problem for problem in problems}

    def keep(examples: Sequence[Row]) -> None:
        some = [asked[example["problem"]] for example in examples]
        append_rows(path, rows_of(cell, some, examples))

    scoring.evaluate_task(
        loaded.model if loaded else None,
        loaded.tokenizer if loaded else None,
        loaded.tags if loaded else None,
        task,
        problems,
        n=1,
        temperature=cfg.temperature,
        max_new_tokens=cfg.max_new_tokens,
        seed=cell.seed,
        progress=f"{cell.model}, {cell.wording}",
        collect=subject.collect,
        keep=keep,
    )


def rows_of(cell: Cell, problems: Sequence[Problem], examples: Sequence[Row]) -> Iterator[Row]:
    for problem, example in zip(problems, examples, strict=True):
        yield {
            **cell._asdict(),
            "id": problem.id,
            "category": problem.meta["category"],
            "right_is": problem.meta["right_is"],
            "correct": example["correct"],
            "tier": example["tier"],
            "completion": example["completion"],
        }
