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
from codechat.tasks.base import SPLITS, Problem, Score
from codechat_lab.tasks.reasoning import rewards
from codechat_lab.tasks.reasoning import task as stories
from codechat_lab.tasks.reasoning.rewards import MAXIMUM, grade
from codechat_lab.tasks.reasoning.task import TEMPLATES

GOOD = "<reasoning>\n6 + 3 = 9\n9 - 2 = 7\n</reasoning>\n<answer>\n7\n</answer>"
ANSWERS = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
TERMS = ("correctness", "integer", "strict_format", "soft_format", "tags")


def xml(text: str, gold: str | None = "7", kind: str = "number") -> Score:
    return grade("xml", text, gold, kind)


@pytest.mark.parametrize(("text", "terms", "tier"), ANSWERS["xml"])
def test_xml_terms_by_hand(text: str, terms: list[float], tier: str) -> None:
    score = xml(text)
    assert score.terms == pytest.approx(dict(zip(TERMS, terms)))
    assert score.reward == pytest.approx(sum(terms))
    assert score.tier == tier
    assert 0 <= score.reward <= MAXIMUM["xml"] == 4.0


WRONG = GOOD.replace("\n7\n", "\n8\n")


@pytest.mark.parametrize(
    "tail", [" and so on", "x" * 50, "x" * 130, "word " * 500, "x" * 100_000], ids=len
)
def test_a_tail_has_a_cost_that_leaves_a_right_answer_above_a_wrong_one(tail: str) -> None:
    right = xml(GOOD + tail)
    assert all(term >= 0 for term in right.terms.values())
    assert right.terms["tags"] >= 0.25
    assert right.terms["strict_format"] == 0
    assert xml(WRONG).reward < right.reward < xml(GOOD).reward


@pytest.mark.parametrize("gold", [None, "", " ", "\\boxed{}"])
@pytest.mark.parametrize("name", MAXIMUM)
@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "",
        "<answer></answer>",
        "<answer>\n\n</answer>",
        "\\boxed{}",
        "x </think> <answer></answer>",
        "The answer is 7.",
        "####",
    ],
)
def test_an_unreadable_gold_answer_gives_no_reward(text: str, name: str, gold: str | None) -> None:
    score = grade(name, text, gold, "number")
    assert not score.correct
    assert score.tier in ("neither", "format_only")
    assert score.reward <= MAXIMUM[name] - 1


@pytest.mark.parametrize(("name", "text", "reward", "tier"), ANSWERS["graded"])
def test_the_other_graders_by_hand(name: str, text: str, reward: float, tier: str) -> None:
    score = grade(name, text, "7", "number")
    assert (score.reward, score.tier) == (reward, tier)


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ("correctness", "correctness_reward_func"),
        ("integer", "int_reward_func"),
        ("strict_format", "strict_format_reward_func"),
        ("soft_format", "soft_format_reward_func"),
        ("tags", "xmlcount_reward_func"),
    ],
)
def test_the_functions_for_trl_are_the_terms_of_the_grader(term: str, name: str) -> None:
    """TRL's signature: lists of conversations and of gold answers."""
    texts = [GOOD, WRONG, "7", GOOD + " tail"]
    function = getattr(rewards, name)
    found = function(
        prompts=[[]] * 4,
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        answer=["7"] * 4,
        question=["?"] * 4,
    )
    assert found == [xml(text).terms[term] for text in texts]
    assert function.__name__ == name


@pytest.mark.parametrize(("text", "gold", "expected"), ANSWERS["r1_zero"])
def test_the_r1_zero_function_is_the_grader(text: str, gold: Any, expected: list[float]) -> None:
    assert list(rewards.r1_zero_reward_fn(text, gold).values()) == expected


def test_the_question_only_function_reads_a_box() -> None:
    assert rewards.question_only_reward_fn("so \\boxed{7}", "7", fast=False)["reward"] == 1


@pytest.mark.parametrize("function", [rewards.r1_zero_reward_fn, rewards.question_only_reward_fn])
def test_the_functions_of_stanford_keep_their_signature(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == ["response", "ground_truth", "fast"]


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    """A template as CS336 writes them."""
    file = tmp_path / "form.prompt"
    file.write_text(
        "# Instruction\nBe {kind}.\n\n# Query:\n```{instruction}```\n\n# Answer:\n```\n{response}"
    )
    return file


def test_a_template_may_be_a_file(template_file: Path) -> None:
    filed = tasks.load(f"mmlu:template={template_file}")
    text = filed.template.messages("{a}?", "letter")[0]["content"]
    assert text.endswith("# Query:\n```{a}?```\n\n# Answer:\n```\n")
    assert filed.stop_texts == ("# Query:",)
    assert filed.reward == "plain"


def check_template(template: str) -> None:
    task = tasks.load("reasoning", template=template)
    problems = task.problems("train", 40)
    for problem in problems:
        assert problem.messages[-1]["content"] in task.prompt(problem)[-1]["content"]
    tasks.check_reference_solutions(task, problems).require()


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_holds_the_question_and_its_reference_solution_passes(template: str) -> None:
    check_template(template)


def test_the_template_of_a_file_holds_the_question(template_file: Path) -> None:
    check_template(str(template_file))
    task = tasks.load("reasoning", template=str(template_file))
    assert task.max_reward == 1.0
    assert [m["role"] for m in task.prompt(task.problems("train", 40)[0])] == ["user"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_have_their_rewards_and_roles(template: str) -> None:
    task = tasks.load("reasoning", template=template)
    assert task.max_reward == (4.0 if template == "xml" else 1.0)
    roles = [message["role"] for message in task.prompt(task.problems("train", 40)[0])]
    assert roles == (["system", "user"] if template in ("xml", "zero_shot") else ["user"])


def test_templates_end_as_their_papers_have_them() -> None:
    r1 = TEMPLATES["r1_zero"].messages("2 + 2?", "number")[0]["content"]
    alpaca = TEMPLATES["alpaca"].messages("2 + 2?", "number")[0]["content"]
    assert r1.endswith("\nAssistant: <think>")
    assert "### Response:\n" in alpaca


def test_a_template_may_be_graded_by_another_rule() -> None:
    assert tasks.load("reasoning:template=alpaca,reward=xml").max_reward == 4.0


def test_unknown_templates_and_rewards_are_user_errors(tmp_path: Path) -> None:
    file = tmp_path / "form.prompt"
    file.write_text("no place")
    for option in ("template=haiku", "reward=haiku", f"template={file}"):
        with pytest.raises((ConfigError, DataError)):
            tasks.load(f"reasoning:{option}").problems("train", 1)


@pytest.mark.parametrize("level", stories.LEVELS)
def test_worked_solutions_are_correct_and_use_the_question(level: int) -> None:
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


def questions(split: str, seed: int, worked: bool = False) -> set[str]:
    problems = tasks.load("reasoning").generate(split, 300, seed, worked)
    return {problem.messages[0]["content"] for problem in problems}


@pytest.fixture(scope="module")
def parts() -> dict[str, set[str]]:
    """300 questions of every split and of the worked examples."""
    return {split: questions(split, 1) for split in SPLITS} | {
        "worked": questions("train", 1, True)
    }


def test_parts_share_no_question(parts: dict[str, set[str]]) -> None:
    assert all(len(texts) == 300 for texts in parts.values())
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))


def test_levels_take_turns() -> None:
    levels = Counter(p.meta["level"] for p in tasks.load("reasoning").generate("test", 300, 0))
    assert levels == dict.fromkeys(stories.LEVELS, 75)


def test_a_seed_moves_no_question_to_another_part(parts: dict[str, set[str]]) -> None:
    other = questions("train", 2, worked=True)
    assert not other & (parts["train"] | parts["select"] | parts["test"])


def test_problems_say_their_split() -> None:
    task = tasks.load("reasoning")
    assert {p.split for split in SPLITS for p in task.problems(split, 5)} == set(SPLITS)


def test_test_hard_has_wordings_of_its_own(parts: dict[str, set[str]]) -> None:
    words = re.compile(r"\d+|\b(?:" + "|".join(stories.PEOPLE + stories.THINGS) + r")\b")
    wordings = {part: {words.sub("#", text) for text in texts} for part, texts in parts.items()}
    assert not wordings["test_hard"] & set.union(*(wordings[part] for part in stories.STORY_PARTS))


def gsm8k_row(i: int) -> dict[str, str]:
    steps = f"It is {i} + 1 = <<{i}+1={i + 1}>>{i + 1}."
    return {"question": f"What is {i} + 1?", "answer": f"{steps}\n#### {i + 1:,}"}


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    rows = [gsm8k_row(i) for i in range(990, 1090)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows[:20])
    return tmp_path


def by_question(source: Path, split: str) -> dict[str, Problem]:
    problems = tasks.load("gsm8k", source=str(source)).problems(split)
    return {problem.messages[0]["content"]: problem for problem in problems}


def test_select_is_a_part_of_gsm8ks_train(gsm8k: Path) -> None:
    train = by_question(gsm8k, "train")
    select = by_question(gsm8k, "select")
    assert len(train) + len(select) == 100
    assert len(by_question(gsm8k, "test")) == 20
    assert select
    assert not train.keys() & select.keys()


def test_the_gold_answer_of_gsm8k_is_after_the_hashes(gsm8k: Path) -> None:
    test = by_question(gsm8k, "test")
    problem = test["What is 1005 + 1?"]
    task = tasks.load("gsm8k", source=str(gsm8k))
    assert problem.gold == {"answer": "1006", "steps": "It is 1005 + 1 = 1006."}
    assert task.score(problem, "<answer>1,006 apples</answer>").correct
    tasks.check_reference_solutions(task, list(test.values())).require()


def test_gsm8k_may_have_bare_gold_answers(gsm8k: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "1,002"},
        {"messages": [{"role": "user", "content": "2?"}], "ground_truth": 2},
    ]
    write(gsm8k / "test.jsonl", rows)
    found = {question: p.gold["answer"] for question, p in by_question(gsm8k, "test").items()}
    assert found == {"1 + 1?": "1002", "2?": "2"}


@pytest.mark.parametrize("answer", ["no mark", "####", "#### many", ""])
def test_an_unreadable_answer_is_a_user_error_that_names_the_row(answer: str, gsm8k: Path) -> None:
    fine = {"question": "fine", "answer": "#### 1"}
    write(gsm8k / "test.jsonl", [fine, {"question": "q", "answer": answer}])
    with pytest.raises(DataError, match="gsm8k, test.jsonl, row 2"):
        tasks.load("gsm8k", source=str(gsm8k)).problems("test")


def test_unreadable_sources_are_user_errors(gsm8k: Path, tmp_path: Path) -> None:
    write(gsm8k / "test.jsonl", [{"prompt": "?", "answer": "#### 1"}])
    for error, name, source, split in (
        (DataError, "gsm8k", gsm8k, "test"),
        (MissingFile, "gsm8k", tmp_path / "none", "test"),
        (ConfigError, "gsm8k", "embedded", "test"),
        (ConfigError, "mmlu", tmp_path, "train"),
    ):
        with pytest.raises(error):
            tasks.load(name, source=str(source)).problems(split)


@pytest.mark.parametrize(
    ("name", "split", "n"), [("gsm8k", "test", 1319), ("mmlu", "select", 1531)]
)
def test_reference_solutions_of_the_real_sets_pass(
    name: str, split: str, n: int, shared_data: Path
) -> None:
    task = tasks.load(name, source=str(shared_data / name))
    assert tasks.check_reference_solutions(task, task.problems(split)).require().n == n


def test_gsm8k_becomes_conversations_without_its_test_file(
    home: Path, gsm8k: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(home)
    words = f"data reasoning --source {gsm8k} --out made --tokenizer bytes"
    assert cli.main(words.split()) == 0
    made = home / "made"
    names = {"worked.train", "worked.select", "gsm8k.train", "gsm8k.select", "gsm8k.test"}
    assert {path.name.removesuffix(".jsonl") for path in made.glob("*.jsonl")} == names
    answers = [row["messages"][-1]["content"] for row in read_rows(made / "worked.train.jsonl")]
    assert all("<<" not in answer for answer in answers)
    assert len(tasks.load("gsm8k", source="made").problems("test")) == 20


def test_gsm8k_under_another_name_with_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"query": f"What is {i} and 1?", "response": f"It is {i + 1}.\n#### {i + 1}"}
        for i in range(80)
    ]

    def hub_rows(name: str) -> Any:
        return iter(rows if name == "owner/rounds" else [])

    monkeypatch.setattr("codechat.data.sources.hub_rows", hub_rows)
    columns = "question=query,answer=response"
    words = f"reasoning --source owner/rounds --columns {columns} --tokenizer bytes"
    command.main([*words.split(), "--out", str(tmp_path)])
    train = list(read_rows(tmp_path / "gsm8k.train.jsonl"))
    select = list(read_rows(tmp_path / "gsm8k.select.jsonl"))
    assert len(train) + len(select) == 80
    assert len(train) > 60
    assert not (tmp_path / "gsm8k.test.jsonl").exists()
    questions = {problem["messages"][-1]["content"] for problem in train + select}
    assert questions == {row["query"] for row in rows}


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
