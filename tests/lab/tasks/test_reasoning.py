"""Graders against scores by hand and against tricks, word problems, readers, and the commands
from data to evaluation."""

import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonl import write
from raising import raising

from codechat import cli, tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import command
from codechat.tasks.base import SPLITS, Score
from codechat_lab.tasks.reasoning import rewards
from codechat_lab.tasks.reasoning import task as stories
from codechat_lab.tasks.reasoning.rewards import MAXIMUM, grade
from codechat_lab.tasks.reasoning.task import TEMPLATES

GOOD = "<reasoning>\n6 + 3 = 9\n9 - 2 = 7\n</reasoning>\n<answer>\n7\n</answer>"
ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
TERMS = ("correctness", "integer", "strict_format", "soft_format", "tags")


def xml(text: str, gold: str | None = "7", kind: str = "number") -> Score:
    return grade("xml", text, gold, kind)


def test_xml_terms_by_hand() -> None:
    for text, terms, tier in ANSWERS["xml"]:
        score = xml(text)
        assert score.terms == pytest.approx(dict(zip(TERMS, terms))), text
        assert score.reward == pytest.approx(sum(terms)) and score.tier == tier, text
        assert 0 <= score.reward <= MAXIMUM["xml"] == 4.0


def test_a_tail_has_a_cost_and_an_unreadable_gold_answer_gives_no_reward() -> None:
    for tail in (" and so on", "x" * 50, "x" * 130, "word " * 500, "x" * 100_000):
        right = xml(GOOD + tail)
        wrong = xml(GOOD.replace("\n7\n", "\n8\n"))
        assert all(term >= 0 for term in right.terms.values())
        assert right.terms["tags"] >= 0.25
        assert wrong.reward < right.reward < xml(GOOD).reward
        assert right.terms["strict_format"] == 0
    texts = (
        GOOD,
        "",
        "<answer></answer>",
        "<answer>\n\n</answer>",
        "\\boxed{}",
        "x </think> <answer></answer>",
        "The answer is 7.",
        "####",
    )
    for name in MAXIMUM:
        for gold in (None, "", " ", "\\boxed{}"):
            scores = [grade(name, text, gold, "number") for text in texts]
            assert not any(s.correct for s in scores)
            assert {s.tier for s in scores} <= {"neither", "format_only"}
            assert max(s.reward for s in scores) <= MAXIMUM[name] - 1


def test_the_other_graders_by_hand() -> None:
    for name, text, reward, tier in ANSWERS["graded"]:
        score = grade(name, text, "7", "number")
        assert (score.reward, score.tier) == (reward, tier), text


def test_the_named_functions_are_the_graders() -> None:
    """TRL's signature: lists of conversations and of gold answers; Stanford's: a text and one
    or several answers."""
    texts = [GOOD, GOOD.replace("\n7\n", "\n8\n"), "7", GOOD + " tail"]
    given = {
        "prompts": [[]] * 4,
        "completions": [[{"role": "assistant", "content": t}] for t in texts],
    }
    names = ("correctness", "int", "strict_format", "soft_format", "xmlcount")
    for term, name in zip(TERMS, (f"{name}_reward_func" for name in names)):
        function = getattr(rewards, name)
        assert function(**given, answer=["7"] * 4, question=["?"] * 4) == [
            xml(t).terms[term] for t in texts
        ]
        assert function.__name__ == name
    for text, gold, expected in ANSWERS["r1_zero"]:
        assert list(rewards.r1_zero_reward_fn(text, gold).values()) == expected
    assert rewards.question_only_reward_fn("so \\boxed{7}", "7", fast=False)["reward"] == 1
    for function in (rewards.r1_zero_reward_fn, rewards.question_only_reward_fn):
        assert list(inspect.signature(function).parameters) == ["response", "ground_truth", "fast"]


def test_every_template_holds_the_question_and_its_reference_solution_passes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "form.prompt"  # as CS336 writes them
    file.write_text(
        "# Instruction\nBe {kind}.\n\n# Query:\n```{instruction}```\n\n# Answer:\n```\n{response}"
    )
    filed = tasks.load(f"mmlu:template={file}")
    assert filed.template.messages("{a}?", "letter")[0]["content"].endswith(
        "# Query:\n```{a}?```\n\n# Answer:\n```\n"
    )
    assert filed.stop_texts == ("# Query:",)
    assert filed.reward == "plain"
    for template in (*TEMPLATES, str(file)):
        task = tasks.load("reasoning", template=template)
        problems = task.problems("train", 40)
        assert all(p.messages[-1]["content"] in task.prompt(p)[-1]["content"] for p in problems)
        tasks.check_reference_solutions(task, problems).require()
        assert task.max_reward == (4.0 if template == "xml" else 1.0)
        roles = [m["role"] for m in task.prompt(problems[0])]
        assert roles == (["system", "user"] if template in ("xml", "zero_shot") else ["user"])
    r1, alpaca = (
        TEMPLATES[name].messages("2 + 2?", "number")[0]["content"] for name in ("r1_zero", "alpaca")
    )
    assert r1.endswith("\nAssistant: <think>")
    assert "### Response:\n" in alpaca
    assert (
        tasks.load("reasoning:template=alpaca,reward=xml").max_reward == 4.0
    )  # graded by another rule
    file.write_text("no place")
    for words in (
        "reasoning:template=haiku",
        "reasoning:reward=haiku",
        f"reasoning:template={file}",
    ):
        with pytest.raises((ConfigError, DataError)):
            tasks.load(words).problems("train", 1)


def test_worked_solutions_are_correct_and_use_the_question() -> None:
    for level in stories.LEVELS:
        for problem in tasks.load("reasoning", levels=[level]).generate("train", 200, 0):
            lines = problem.gold["steps"].split("\n")
            assert len(lines) == max(1, level - 1)
            given = set(map(int, re.findall(r"\d+", problem.messages[0]["content"])))
            for line in lines:
                x, sign, y, _, result = line.split()
                assert eval(f"{x} {sign} {y}") == int(result) > 0
                assert {int(x), int(y)} <= given
                given.add(int(result))
            assert result == problem.gold["answer"]


def test_parts_share_no_question_and_levels_take_turns() -> None:
    task = tasks.load("reasoning")
    texts_of = lambda *how: {p.messages[0]["content"] for p in task.generate(*how)}  # noqa: E731
    parts = {split: texts_of(split, 300, 1) for split in SPLITS} | {
        "worked": texts_of("train", 300, 1, True)
    }
    assert all(len(texts) == 300 for texts in parts.values())
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
    assert Counter(p.meta["level"] for p in task.generate("test", 300, 0)) == dict.fromkeys(
        stories.LEVELS, 75
    )
    other = texts_of("train", 300, 2, True)  # a seed moves no question to another part
    assert not other & (parts["train"] | parts["select"] | parts["test"])
    assert {p.split for s in SPLITS for p in task.problems(s, 5)} == set(SPLITS)
    words = re.compile(r"\d+|\b(?:" + "|".join(stories.PEOPLE + stories.THINGS) + r")\b")
    wordings = {part: {words.sub("#", text) for text in texts} for part, texts in parts.items()}
    assert not wordings["test_hard"] & set.union(*(wordings[part] for part in stories.STORY_PARTS))


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"What is {i} + 1?",
            "answer": f"It is {i} + 1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}",
        }
        for i in range(990, 1090)
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:20])
    return tmp_path


def test_gsm8k_gold_is_after_the_hashes_and_select_is_part_of_train(gsm8k: Path) -> None:
    task = tasks.load("gsm8k", source=str(gsm8k))
    train, select, test = (
        {p.messages[0]["content"]: p for p in task.problems(split)} for split in task.splits
    )
    assert len(train) + len(select) == 100
    assert len(test) == 20
    assert select
    assert not train.keys() & select.keys()
    problem = test["What is 1005 + 1?"]
    assert problem.gold == {"answer": "1006", "steps": "It is 1005 + 1 = 1006."}
    assert task.score(problem, "<answer>1,006 apples</answer>").correct
    tasks.check_reference_solutions(task, list(test.values())).require()
    bare = [
        dict(messages=[dict(role="user", content=q)], ground_truth=n)
        for q, n in (("1 + 1?", "1,002"), ("2?", 2))
    ]
    write(gsm8k / "test.jsonl", bare)
    numbers = tasks.load("gsm8k", source=str(gsm8k)).problems("test")
    assert {(p.messages[0]["content"], p.gold["answer"]) for p in numbers} == {
        ("1 + 1?", "1002"),
        ("2?", "2"),
    }


def test_unreadable_sources_are_user_errors_that_name_the_row(gsm8k: Path, tmp_path: Path) -> None:
    for answer in ("no mark", "####", "#### many", ""):
        write(
            gsm8k / "test.jsonl",
            [{"question": "fine", "answer": "#### 1"}, {"question": "q", "answer": answer}],
        )
        with pytest.raises(DataError, match="gsm8k, test.jsonl, row 2"):
            tasks.load("gsm8k", source=str(gsm8k)).problems("test")
    write(gsm8k / "test.jsonl", [{"prompt": "?", "answer": "#### 1"}])
    for error, name, source, split in (
        (DataError, "gsm8k", gsm8k, "test"),
        (MissingFile, "gsm8k", tmp_path / "none", "test"),
        (ConfigError, "gsm8k", "embedded", "test"),
        (ConfigError, "mmlu", tmp_path, "train"),
    ):
        with pytest.raises(error):
            tasks.load(name, source=str(source)).problems(split)


def test_reference_solutions_of_the_real_sets_pass(shared_data: Path) -> None:
    for name, split, n in (("gsm8k", "test", 1319), ("mmlu", "select", 1531)):
        task = tasks.load(name, source=str(shared_data / name))
        assert tasks.check_reference_solutions(task, task.problems(split)).require().n == n


def test_gsm8k_becomes_conversations_without_its_test_file(
    home: Path, gsm8k: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(home)
    assert (
        cli.main(
            ["data", "reasoning", "--source", str(gsm8k), "--out", "made", "--tokenizer", "bytes"]
        )
        == 0
    )
    names = {"worked.train", "worked.select", "gsm8k.train", "gsm8k.select", "gsm8k.test"}
    assert {p.name.removesuffix(".jsonl") for p in (home / "made").glob("*.jsonl")} == names
    assert all(
        "<<" not in row["messages"][-1]["content"]
        for row in read_rows(home / "made" / "worked.train.jsonl")
    )
    assert len(tasks.load("gsm8k", source="made").problems("test")) == 20


def test_gsm8k_under_another_name_with_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"query": f"What is {i} and 1?", "response": f"It is {i + 1}.\n#### {i + 1}"}
        for i in range(80)
    ]
    monkeypatch.setattr(
        "codechat.data.sources.hub_rows", lambda name: iter(rows if name == "owner/rounds" else [])
    )
    flags = [
        "--source",
        "owner/rounds",
        "--columns",
        "question=query,answer=response",
        "--tokenizer",
        "bytes",
    ]
    command.main(["reasoning", *flags, "--out", str(tmp_path)])
    train, select = (list(read_rows(tmp_path / f"gsm8k.{s}.jsonl")) for s in ("train", "select"))
    assert len(train) + len(select) == 80
    assert len(train) > 60
    assert not (tmp_path / "gsm8k.test.jsonl").exists()
    assert {p["messages"][-1]["content"] for p in train + select} == {r["query"] for r in rows}


@pytest.mark.parametrize(
    "name", ["mbpp", "humaneval", "gsm8k", "mmlu", "arc_easy", "hellaswag", "funcall", "bfcl"]
)
def test_a_folder_without_rows_is_named_and_so_is_the_folder_below_that_has_some(
    name: str, tmp_path: Path
) -> None:
    with raising(DataError, "no rows", str(tmp_path), "check the path"):
        tasks.load(name, source=str(tmp_path)).problems("test")
    (tmp_path / "main").mkdir()
    (tmp_path / "main/test.jsonl").write_text("{}\n")
    with raising(DataError, "no rows", str(tmp_path), f"{tmp_path}/main has some"):
        tasks.load(name, source=str(tmp_path)).problems("test")


def test_a_folder_with_an_empty_file_does_not_name_itself_as_having_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("[]")
    with raising(DataError, "no rows of mbpp", "check the path"):
        tasks.load("mbpp", source=str(tmp_path)).problems("test")


def test_a_folder_without_a_tasks_own_file_names_the_folder_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "micro").mkdir()
    (tmp_path / "micro/micro.test.jsonl").write_text("{}\n")
    with raising(MissingFile, "micro.test.jsonl does not exist", f"{tmp_path}/micro has some"):
        tasks.load("micro", source=str(tmp_path)).problems("test")


def test_no_problem_to_check_is_no_failed_check() -> None:
    with raising(DataError, "no problem to check", "--data-dir"):
        tasks.check_reference_solutions(tasks.load("funcall"), []).require()
