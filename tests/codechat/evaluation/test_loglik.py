"""Multiple choice by log-likelihood: closed form, rows of every set, and the numbers of
lm-evaluation-harness."""

import csv
import json
from pathlib import Path
from typing import Any

import jsonl
import pytest
import torch
from random_models import randomise

from codechat import tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import ConfigError, DataError
from codechat.core.registry import COMMANDS
from codechat.evaluation import loglik, results
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.text import tokenizer

ROWS = json.loads(Path(__file__).with_name("choices.json").read_text())
TOK = tokenizer.load("gpt2")
# 50298 tokens and six tags fill the embedding: the harness also counts rows that no token has
SHAPE = GPTConfig(depth=2, n_embd=32, n_head=2, block_size=512, vocab_size=50298)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    for name, files in ROWS.items():
        (tmp_path / name).mkdir()
        for part, rows in files.items():
            jsonl.write(tmp_path / name / f"{part}.jsonl", rows)
    with Run.create("random", {}, kind="pretrain") as run:
        meta = {"tokenizer": TOK.to_dict(), "tags": "reserved", "lineage": []}
        checkpoint.save(run.path, 0, model=randomise(GPT(SHAPE)), meta=meta)
    return tmp_path


def evaluated(task: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    common = [
        "--ckpt",
        "random",
        "--task",
        task,
        "--data-dir",
        str(folder),
        "--score",
        "loglik",
        "--run-name",
        "x",
    ]
    COMMANDS["evaluate"].run([*common, "--overwrite", *words])
    return list(read_rows(Run.open("x").path / "examples.jsonl"))


def test_a_log_likelihood_is_the_sum_over_the_continuation_behind_what_fits_the_block() -> None:
    model = randomise(
        GPT(GPTConfig(depth=2, n_embd=32, n_head=2, block_size=48, vocab_size=TOK.n_vocab))
    )
    asked = [
        ("What is it? ", ["a cat", "two dogs and fish"]),
        ("x", [" y", "z", " w"]),
        ("word " * 80, ["a", "b c d"]),
    ]
    assert loglik.encode_pair(TOK, "What is it? ", "a cat") == (
        TOK.encode("What is it?"),
        TOK.encode(" a cat"),
    )
    for (context, continuations), scored in zip(
        asked, loglik.score_choices(model, TOK, asked), strict=True
    ):
        pairs = [loglik.encode_pair(TOK, context, text) for text in continuations]
        room = 49 - max(len(ids) for _, ids in pairs)
        for (begun, ids), completion in zip(pairs, scored, strict=True):
            kept = begun[-room:]
            logits = model(torch.tensor([kept + ids[:-1]]))[0, len(kept) - 1 :, : model.cfg.n_ids]
            by_hand = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()
            assert sum(completion.logprobs) == pytest.approx(by_hand, abs=1e-4)
            assert completion.stop == ("stop" if len(begun) <= room else "context")


def without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in an order that does not depend on the ids of their problems, without these."""
    ordered = sorted(rows, key=lambda row: (row["sampling"], row["request"]))
    return [dict(row, problem=None) for row in ordered]


def test_the_authors_files_of_mmlu_give_the_hubs_problems_and_scores(sets: Path) -> None:
    for part, short in (("dev", "dev"), ("validation", "val"), ("test", "test")):
        folder = sets / "csv" / short
        folder.mkdir(parents=True)
        with (folder / f"abstract_algebra_{short}.csv").open("w", newline="") as file:
            rows = ROWS["mmlu"][part]
            csv.writer(file).writerows(
                [r["question"], *r["choices"], "ABCD"[r["answer"]]] for r in rows
            )
    hub, own = (evaluated("mmlu:shots=2", sets / name) for name in ("mmlu", "csv"))
    assert without_ids(hub) == without_ids(own)
    assert len(hub) == 6
    assert [r["n"] for r in results.read_per_problem(Run.open("x"))] == [1] * 6
    task = tasks.load("mmlu", source=str(sets / "csv"))
    (problem,) = task.problems("select")
    assert problem.messages[0]["content"] == "3 + 1?\n\nA. 1\nB. 2\nC. 3\nD. 4"
    assert task.score(problem, "The answer is D.").correct
    assert not task.score(problem, "The answer is C.").correct
    with pytest.raises(DataError, match="mmlu:shots=2"):
        task.choices(problem)
    jsonl.write(sets / "mmlu" / "test.jsonl", [ROWS["mmlu"]["test"][0] | {"answer": 4}])
    with pytest.raises(DataError, match="row 1"):
        tasks.load("mmlu", source=str(sets / "mmlu")).problems("test")
    with pytest.raises(ConfigError, match="choices"):
        evaluated("gsm8k", sets)


HARNESS = {
    "mmlu": "mmlu_abstract_algebra",
    "arc_challenge": "arc_challenge",
    "hellaswag": "hellaswag",
}


@pytest.mark.slow
def test_the_numbers_are_those_of_lm_evaluation_harness(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(sets / "cache"))
    COMMANDS["export"].run(["--ckpt", "random", "--out", str(sets / "hf"), "--dtype", "float32"])
    model = HFLM(str(sets / "hf"), device="cpu", dtype="float32", max_length=512)
    manager = TaskManager()
    for name, theirs in HARNESS.items():
        files = {part: str(sets / name / f"{part}.jsonl") for part in ROWS[name]}
        data = dict(
            dataset_path="json",
            dataset_name=None,
            dataset_kwargs={"data_files": files},
            task=name,
        )
        data |= dict.fromkeys(f"{part}_split" for part in {"training", "validation"} - {*files})
        data |= dict(
            include=str(manager._entry(theirs).yaml_path), num_fewshot=2 if name == "mmlu" else 0
        )
        (sets / f"{name}.yaml").write_text(json.dumps(data))
        found = lm_eval.simple_evaluate(
            model, tasks=[str(sets / f"{name}.yaml")], task_manager=manager
        )
        docs = {
            key: doc
            for doc in found["samples"][name]
            for key in (doc["doc_id"], doc["doc"].get("id"))
        }
        for row in evaluated(name + ":shots=2" * (name == "mmlu"), sets / name):
            last = row["problem"].rpartition("-")[2]
            doc = docs[int(last) if last.isdigit() else last]
            metric = row["sampling"].rpartition(" ")[2]
            theirs_ll = [response[0][0] for response in doc["resps"]]
            assert row["parts"]["loglikelihoods"] == pytest.approx(theirs_ll, abs=1e-4)
            assert row["correct"] == bool(doc.get(metric, row["correct"]))  # MMLU has no acc_norm
