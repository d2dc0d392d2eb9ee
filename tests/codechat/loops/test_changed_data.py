"""--resume with other data than the run began with: one line that names what has changed,
before anything is written."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import contracts
import jsonl
import pytest
import torch
from contracts import TINY, small, train
from raising import raising

from codechat.core import registry
from codechat.core.errors import DataError, RunError
from codechat.data import corpus_writer
from codechat.data.sources import hash_rows
from codechat.models.gpt import GPT
from codechat.runs import checkpoint, paths, run
from codechat.text import tokenizer

TASK = """
from codechat.tasks import RowsTask

def share_of_a(completion, problem):
    return completion.count("a") / max(8, len(completion))

class Letters(RowsTask):
    rows = [{"prompt": f"p{i}", "gold": "aaaaaaaa", "split": ("train", "select")[i % 2]} for i in range(20)]
    rewards = {share_of_a: 1.0}
"""
BYTES = tokenizer.load("bytes")
RL = ("reinforce", "grpo", "ppo", "expert_iteration", "distill")


def write_task(home: Path) -> str:
    (home / "letters.py").write_text(TASK)
    return f"{home / 'letters.py'}:Letters"


def write_letters(home: Path) -> str:
    rows = [
        {"prompt": f"q{i}", "gold": "aaaaaaaa", "split": ("train", "select")[i % 2]}
        for i in range(20)
    ]
    return str(jsonl.write(home / "letters.jsonl", rows))


def write_weights(name: str, seed: int) -> str:
    meta = dict(tokenizer=tokenizer.load("bytes").to_dict(), tags="reserved", lineage=[])
    # --overwrite would not replace the base of adapters
    shutil.rmtree(paths.runs_dir() / name, ignore_errors=True)
    with run.Run.create(name, {}, kind="sft") as made:
        checkpoint.save(made.path, 0, model=GPT(TINY, seed=seed), meta=meta)
    return name


def write_probes(home: Path) -> None:
    probe = dict(
        asked="code", tools_present=False, messages=[{"role": "user", "content": "code 1"}]
    )
    jsonl.write(home / "dialogues" / "probes.select.jsonl", [probe])


def replaced(path: Path, old: str, new: str) -> Callable[[], None]:
    """An edit that leaves the number of rows as it is."""

    def edit() -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return edit


def other_shard(path: Path) -> Callable[[], None]:
    """Another shard of the same size, as a copy of a second corpus over the first one leaves it."""

    def edit() -> None:
        path.write_bytes(b"\1\0" * (path.stat().st_size // 2))

    return edit


def swapped(path: Path) -> Callable[[], None]:
    def edit() -> None:
        first, second, *others = path.read_text().splitlines()
        assert first != second
        path.write_text("\n".join([second, first, *others]) + "\n")

    return edit


def case(name: str, home: Path) -> tuple[Any, Callable[[], Any], str]:
    """(settings, what changes the data, what the error names)."""
    loop, _, what = name.partition(": ")
    pairs = home / "pairs"
    talks = home / "dialogues"
    if loop == "sft" and what == "probes":
        cfg = small("sft", home, probe_examples=1)
        write_probes(home)
        return (
            cfg,
            replaced(talks / "probes.select.jsonl", "code 1", "code 2"),
            "dialogues/probes.select.jsonl",
        )
    if loop == "sft" and what == "task":
        cfg = small(
            "sft",
            home,
            eval_task=write_task(home),
            eval_task_data=write_letters(home),
            eval_new_tokens=2,
        )
        return cfg, replaced(home / "letters.jsonl", "q3", "z3"), "letters.jsonl (select)"
    if loop == "sft" and what == "LoRA":
        cfg = small("sft", home, init_from=write_weights("base", 1), model=PARENTS, lora_rank=2)
        return cfg, lambda: write_weights("base", 2), "checkpoint base"
    if loop == "sft":
        cfg = small("sft", home)
        edits = {
            "answer": (
                replaced(talks / "calls.train.jsonl", '"content": "3', '"content": "4'),
                "domain calls",
            ),
            "order": (swapped(talks / "code.train.jsonl"), "domain code"),
            "held out": (
                replaced(talks / "code.select.jsonl", '"content": "3', '"content": "4'),
                "(select)",
            ),
            "file gone": ((talks / "code.select.jsonl").unlink, "domain code"),
        }
        return cfg, *edits[what]
    if loop == "preference" and what == "rollouts":
        cfg = small(
            loop,
            home,
            data_dir=None,
            task=write_task(home),
            task_data=write_letters(home),
            sample_groups=8,
        )
        return cfg, replaced(home / "letters.jsonl", "q2", "z2"), "letters.jsonl (train)"
    if loop == "preference" and what == "reference":
        cfg = small(loop, home, init_from=write_weights("base", 1), model=PARENTS)
        return cfg, lambda: write_weights("base", 2), "checkpoint base"
    if loop == "preference":
        cfg = small(loop, home)
        split = "select" if what == "held out" else "train"
        return (
            cfg,
            replaced(pairs / f"preferences.{split}.jsonl", "yesyes", "yesyep"),
            f"preferences.{split}.jsonl",
        )
    if loop == "pretrain" and what in ("mixed shards", "bare shards"):
        cfg = small(loop, home)
        if what == "bare shards":
            (home / "corpus" / "manifest.json").unlink()
        return cfg, other_shard(home / "corpus" / "train_000000.bin"), "corpus"
    if loop == "pretrain":

        def other_corpus() -> None:
            shutil.rmtree(home / "corpus")
            corpus_writer.write_corpus(
                [f"def g{i}(y):\n    return y - {i}\n" * 8 for i in range(120)],
                home / "corpus",
                BYTES,
            )

        return small(loop, home), other_corpus, "corpus"
    if loop == "chars":
        return small(loop, home), replaced(home / "verse", "cat", "act"), "verse"
    if what == "reference":
        cfg = small(loop, home, kl_coef=0.1, init_from=write_weights("base", 1), model=PARENTS)
        return cfg, lambda: write_weights("base", 2), "checkpoint base"
    if what == "teacher":
        cfg = small(loop, home, teacher=write_weights("wise", 1))
        return cfg, lambda: write_weights("wise", 2), "checkpoint wise"
    if what == "generated":
        return (
            small(loop, home, task=write_task(home)),
            replaced(home / "letters.py", "p{i}", "o{i}"),
            "Letters (train)",
        )
    cfg = small(loop, home, task=write_task(home), data_dir=write_letters(home))
    old, split = ("q3", "select") if what == "held out" else ("q2", "train")
    return cfg, replaced(home / "letters.jsonl", old, "z"), f"letters.jsonl ({split})"


SFT = tuple(
    f"sft: {what}"
    for what in ("answer", "order", "held out", "file gone", "probes", "task", "LoRA")
)
PREFERENCE = tuple(f"preference: {what}" for what in ("train", "held out", "rollouts", "reference"))
TASKS = tuple(f"{loop}: {what}" for loop in RL for what in ("train", "held out", "generated"))
OTHERS = (
    "pretrain: corpus",
    "pretrain: mixed shards",
    "pretrain: bare shards",
    "grpo: reference",
    "ppo: reference",
    "distill: teacher",
    "chars: text",
)


@pytest.mark.parametrize("name", [*SFT, *PREFERENCE, *TASKS, *OTHERS])
def test_other_data_are_refused_by_name_and_nothing_is_written(name: str, home: Path) -> None:
    cfg, change, named = case(name, home)
    with contracts.failing_in("apply_gradients", step=3):
        train(cfg)
    folder = paths.runs_dir() / cfg.run_name
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    change()
    with raising(DataError, cfg.run_name, "began with other data", named, "--run-name"):
        train(replace(cfg, resume=True))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_setting_that_follows_from_the_data_and_the_data_are_named_together(home: Path) -> None:
    """Another alphabet makes another vocabulary, and a longer conversation a longer row."""
    cfg = small("chars", home)
    with contracts.failing_in("apply_gradients", step=3):
        train(cfg)
    replaced(home / "verse", "cat", "cow")()
    with raising(RunError, "model.vocab_size", "verse", "has changed"):
        train(replace(cfg, resume=True))


def test_a_parent_that_nothing_reads_again_may_change(home: Path) -> None:
    """The weights of the run are in its checkpoint; without a reference model and adapters
    nobody asks where they came from."""
    cfg = small("sft", home, init_from=write_weights("base", 1), model=PARENTS)
    with contracts.failing_in("apply_gradients", step=3):
        train(cfg)
    write_weights("base", 2)
    assert train(replace(cfg, resume=True)).status["status"] == "finished"


def test_rows_that_are_not_used_may_change(home: Path) -> None:
    """Held-out rows beyond --eval-examples, and domains without a share."""
    cfg = small("sft", home, eval_examples=2, mix=("calls=1",))
    with contracts.failing_in("apply_gradients", step=3):
        train(cfg)
    talks = home / "dialogues"
    replaced(talks / "code.train.jsonl", '"content": "3', '"content": "4')()
    replaced(talks / "code.select.jsonl", '"content": "5', '"content": "4')()
    assert train(replace(cfg, resume=True)).status["status"] == "finished"


def test_what_json_cannot_hold_has_the_same_hash_in_every_process() -> None:
    class Thing:
        pass

    def rows() -> list[Any]:
        return [
            {"gold": Thing(), "f": lambda: 0, "s": {"b", "a", "c"}, ("a", 1): 2},
            {"s": {"b", "a"}, "p": Path("x")},
        ]

    assert hash_rows(rows()) == hash_rows(rows())
    assert hash_rows([{"s": {"a", "b"}}]) != hash_rows([{"s": {"a", "c"}}])
    assert hash_rows([["ab"], ["c"]]) != hash_rows([["a"], ["bc"]])
    assert hash_rows([1, 2]) != hash_rows([2, 1])
    assert hash_rows([torch.zeros(2).numpy().tobytes()]) != hash_rows(
        [torch.ones(2).numpy().tobytes()]
    )


# with --init-from the architecture is the parent's
PARENTS = registry.LOOPS["sft"].config_class().model
