"""`codechat data solved`: right answers to a task's problems as conversations: those of a checkpoint
(rejection sampling), or the task's reference solutions.

    codechat passk --ckpt base --task mbpp --data-dir hub --split train --run-name rates
    codechat data solved --rates rates --out data/mine
    codechat data solved --rates rates --answers reference --domain references --out data/mine

A model that also learns from its own right answers keeps what it can do while an SFT teaches it
something else: they cost it no change of style. With more samples a problem this is the first
step of STaR (arXiv:2203.14465). SFT on reference solutions is the cheapest control of RL on the
same problems. No user types a problem as it is written: with --everyday each own answer is also
asked for in everyday words, without tests. A larger model may answer too, for a smaller one to
learn from: the manifest, and the card of an export, name the teacher and its licence."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat import tasks
from codechat.core.atomic_files import read_json, read_rows
from codechat.core.config import REQUIRED, opt
from codechat.core.errors import ConfigError, DataError
from codechat.data.sources import Ledger, digest
from codechat.data.splits import split_of, spread
from codechat.evaluation.results import CUT_OFF
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat_lab.tasks.preparation import PreparedConfig, Row, prepare

# of a problem that begins with "Write a function to ..."
WANTED = re.compile(r"Write a (?:python )?function to (.+?)\.?\s*(?:\n|$)", re.IGNORECASE)
SIGNATURE = re.compile(r"^def ((\w+)\([^()\n]*\))", re.MULTILINE)
# which an everyday request does not have
OF_TESTS = re.compile(r"\b(?:assert\w*|tests?)\b", re.IGNORECASE)
EVERYDAY = (
    "{signature} to {wanted}",
    "{wanted}, call it {name}",
    "I need {signature}, it should {wanted}",
    "pls write me {signature}: {wanted}",
    "could you write a python function {name} to {wanted}?",
    "how do I {wanted} in python? name it {name}",
    "{wanted} in python, as {signature}. Thanks!",
    "need a function {signature} to {wanted}",
    "Can you {wanted}? As {signature} please.",
    "python function to {wanted}, {signature}",
)


@dataclass(frozen=True, kw_only=True)
class SolvedConfig(PreparedConfig):
    """Right answers -> DOMAIN.SPLIT.jsonl."""

    rates: str = opt(REQUIRED, "run of passk or evaluate, on split train", reads="run")
    answers: Literal["own", "reference"] = opt(
        "own", "the checkpoint's right answers, or the reference solutions of the problems it tried"
    )
    per_problem: int = opt(2, "most own answers of a problem", least=1)
    everyday: bool = opt(
        False, "each own answer that speaks of no test once more, asked for in everyday words"
    )
    domain: str = opt("solved", "domain of these conversations")


def prepare_solved(cfg: SolvedConfig) -> Row:
    """Write conversations. Returns the manifest of the directory. ConfigError for an evaluation
    of another split: its problems are for judging."""
    run = Run.open(cfg.rates)
    run.require_finished()
    tried = run.config
    if list(tried.get("split", ())) != ["train"]:
        raise ConfigError(
            f"run {run.name} tried split {tried.get('split')}; expected train alone, since the "
            "answers are trained on; run passk with --split train"
        )
    task: Any = tasks.load(tried["task"], source=tried["data_dir"])
    teacher = _teacher(tried)
    task.tools_style = teacher.tools_style
    problems = task.problems("train", limit=tried["limit"], seed=tried["seed"])
    by_id = {problem.id: problem for problem in problems}

    no_references = getattr(task, "no_references", "")
    if cfg.answers == "reference" and no_references:
        raise ConfigError(f"--answers reference: task {task.name} has none: {no_references}")

    def collect(ledgers: list[Ledger]) -> dict[str, list[Row]]:
        if cfg.answers == "own":
            ledger = Ledger(f"right answers of {run.name}")
            rows = list(_right(cfg, run, task, by_id, ledger))
        else:
            ledger = Ledger(f"reference solutions of what {run.name} tried")
            rows = list(_references(cfg, run, task, by_id, ledger))
        ledgers.append(ledger)
        parts = spread(rows, _problem_of)
        return {f"{cfg.domain}.{split}": part for split, part in parts.items()}

    def measure(files: dict[str, list[Row]]) -> Row:
        """The manifest's entry about who wrote the answers of each domain."""
        file = Path(cfg.out) / "manifest.json"
        known = read_json(file).get("teachers", {}) if file.is_file() else {}
        known.pop(cfg.domain, None)
        if cfg.answers == "own":
            known[cfg.domain] = {
                "model": teacher.model,
                "licence": teacher.licence,
                "temperature": tried.get("temperature"),
            }
        lists = any(row["meta"]["tools_present"] for rows in files.values() for row in rows)
        return {"teachers": known, "tools_style": task.tools_style if lists else None}

    return prepare(cfg, collect, measure)


class Teacher(NamedTuple):
    """Who answered. licence: of its base, where that is known; tools_style: how its prompts listed
    tools."""

    model: str
    licence: str = "unknown"
    tools_style: str = "json"


def _teacher(tried: Row) -> Teacher:
    """Of a run's settings."""
    # here, since the command's help reads this module
    from codechat.formats import export_card
    from codechat.models import loading
    from codechat.runs import checkpoint

    if tried.get("endpoint") or not tried.get("ckpt"):
        return Teacher(model=tried.get("model") or "unknown")
    names = [tried["ckpt"]] if isinstance(tried["ckpt"], str) else tried["ckpt"]
    meta = checkpoint.read_meta(names[0])
    tags = {"tags": tried["tags"]} if tried.get("tags") else {}
    return Teacher(
        model=", ".join(names),
        licence=export_card.base_of(meta.get("lineage", ())).licence or "unknown",
        tools_style=loading.tools_style(meta | tags),
    )


def _problem_of(row: Row) -> str:
    return str(row["meta"]["problem"])


def _right(
    cfg: SolvedConfig, run: Run, task: Any, by_id: dict[str, Problem], ledger: Ledger
) -> Iterator[Row]:
    """A conversation for each right answer that is kept."""
    seen: set[str] = set()
    kept = Counter[str]()
    for example in _examples(run, by_id):
        id = example["problem"]
        name = digest(f"{id}\0{example['completion']}")
        problem = _known(by_id, id, run)
        if not example["correct"]:
            ledger.skip("wrong")
        elif example["stop"] in CUT_OFF or "turns" in example:
            ledger.skip("several turns" if "turns" in example else "cut off")
        elif name in seen or kept[id] == cfg.per_problem:
            ledger.skip("duplicate" if name in seen else "enough of this problem")
        else:
            seen.add(name)
            kept[id] += 1
            ledger.kept += 1
            plain = _conversation(cfg, task, problem, example["completion"], name)
            yield plain
            asked = _everyday(plain) if cfg.everyday else None
            if asked is not None:
                ledger.kept += 1
                yield asked


def _references(
    cfg: SolvedConfig, run: Run, task: Any, by_id: dict[str, Problem], ledger: Ledger
) -> Iterator[Row]:
    """A conversation for each problem that was tried: a problem whose reference solution fails was
    left out there."""
    tried = dict.fromkeys(row["problem"] for row in _examples(run, by_id))
    for id in tried:
        problem = _known(by_id, id, run)
        solution = task.gold(problem)
        ledger.kept += 1
        yield _conversation(cfg, task, problem, solution, digest(f"{id}\0{solution}"))


def _examples(run: Run, by_id: dict[str, Problem]) -> list[Row]:
    """The answers in the order of the problems, which a seed has shuffled: an evaluation keeps them
    in the order of their prompts, and the first rows of a split are those that are judged by."""
    place = {id: number for number, id in enumerate(by_id)}
    rows = read_rows(run.path / "examples.jsonl")
    return sorted(rows, key=lambda row: place.get(row["problem"], 0))


def _known(by_id: dict[str, Problem], id: str, run: Run) -> Problem:
    if id not in by_id:
        raise DataError(f"problem {id} of run {run.name} is gone; run passk again")
    return by_id[id]


def _conversation(
    cfg: SolvedConfig, task: Any, problem: Problem, completion: str, name: str
) -> Row:
    answer = {"role": "assistant", "content": completion}
    meta = {
        "tools_present": bool(problem.meta.get("tools_present")),
        "asked": cfg.domain,
        "split": split_of(digest(problem.id)),
        "problem": problem.id,
    }
    return {
        "id": f"{cfg.domain}-{name[:16]}",
        "messages": [*task.prompt(problem), answer],
        "domain": cfg.domain,
        "meta": meta,
    }


def _everyday(row: Row) -> Row | None:
    """The conversation with its request in everyday words; none where the problem or the answer has
    another form, or speaks of tests."""
    *_, user, answer = row["messages"]
    wanted = WANTED.match(user["content"])
    signature = SIGNATURE.search(answer["content"])
    if not wanted or not signature or OF_TESTS.search(answer["content"]):
        return None
    form = EVERYDAY[int(row["id"][-8:], 16) % len(EVERYDAY)]
    request = form.format(wanted=wanted[1], signature=signature[1], name=signature[2])
    asked = {"role": "user", "content": request}
    return row | {"id": f"{row['id']}-everyday", "messages": [asked, answer]}
