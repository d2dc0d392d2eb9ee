"""Tasks that generate their problems: what is written is read back, splits share nothing, and what is wrong is a user error."""

import json
from pathlib import Path

import pytest

from codechat import tasks
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import command, conversations
from codechat.tasks.base import SPLITS
from codechat.text import tokenizer

DOMAINS = {"apps": "episodes", "micro": "solutions", "reasoning": "worked", "repair": "repairs"}
TASKS = pytest.mark.parametrize("name", DOMAINS)


@TASKS
def test_worked_examples_and_problems_on_disk(name: str, tmp_path: Path) -> None:
    sizes = "--tokenizer bytes --max-examples 12 --problems 8 --eval-examples 6 --levels 1 2"
    words, domain = [name, "--out", str(tmp_path), *sizes.split()], DOMAINS[name]
    command.main(words)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    splits = [s for s in SPLITS if f"{name}.{s}.jsonl" in first]
    written = {f"{domain}.{s}.jsonl" for s in SPLITS[:3]} | {f"{name}.{s}.jsonl" for s in splits}
    assert set(first) == {"manifest.json", *written} and splits[:3] == list(SPLITS[:3])
    domains = conversations.load_domains(tmp_path, "train", tokenizer.load("bytes"), "reserved", 8192)
    assert list(domains) == [domain] and len(domains[domain]) == 12, "problems are not read as conversations"
    task = tasks.load(name, source=str(tmp_path), levels=[1, 2])
    problems = {split: task.problems(split) for split in splits}
    assert {split: len(some) for split, some in problems.items()} == {s: 8 if s == "train" else 6 for s in splits}
    assert {p.meta["level"] for p in problems["train"]} == {1, 2}
    assert {p.id for p in problems["train"]} == {p.id for p in tasks.load(f"{name}:levels=[1,2]").problems("train", 8)}
    tasks.check_reference_solutions(task, [p for some in problems.values() for p in some]).require()
    prompts = {json.dumps(p.messages)[1:-1] for some in problems.values() for p in some}
    taught = (tmp_path / f"{domain}.train.jsonl").read_text()
    assert not any(prompt in json.dumps(json.loads(line)) for line in taught.splitlines() for prompt in prompts)
    command.main(words)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


@TASKS
def test_splits_share_no_problem_and_the_seed_decides(name: str) -> None:
    task = tasks.load(name)
    ids = {split: {p.id for p in task.problems(split, 40)} for split in SPLITS}
    assert {len(some) for some in ids.values()} == {40} and len(set().union(*ids.values())) == 40 * len(ids)
    assert task.problems("train", 5, seed=1) == task.problems("train", 5, seed=1) != task.problems("train", 5, seed=2)


@TASKS
def test_bad_settings_and_files_are_user_errors(name: str, tmp_path: Path) -> None:
    for words, split in ((f"{name}:levels=[9]", "train"), (f"{name}:levels=[]", "train"), (name, "dev")):
        with pytest.raises(ConfigError):
            tasks.load(words).problems(split, 1)
    with pytest.raises(ConfigError):
        command.main([name, "--out", str(tmp_path / "out"), "--levels", "9"])
    with pytest.raises(MissingFile):
        tasks.load(name, source=str(tmp_path)).problems("train")
    row = {"id": "x", "messages": [], "gold": {}, "split": "train", "meta": {}}
    (tmp_path / f"{name}.train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{name}.train.jsonl:1.*codechat data {name}"):
        tasks.load(name, source=str(tmp_path)).problems("train")
