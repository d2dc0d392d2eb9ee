"""Graders against scores by hand and against tricks, word problems, readers, and the commands from data to evaluation."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from codechat import cli, tasks
from codechat.core.atomic_files import read_rows
from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.data import command
from codechat.evaluation.intervals import wilson_interval
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks.base import SPLITS, Score
from codechat.tasks.reasoning import rewards, stories, templates
from codechat.tasks.reasoning.rewards import GRADERS
from codechat.text import tokenizer

GOOD = "<reasoning>\n6 + 3 = 9\n9 - 2 = 7\n</reasoning>\n<answer>\n7\n</answer>"


def xml(text: str, gold: str | None = "7", kind: str = "number") -> Score:
    return rewards.grade_xml(text, gold, kind)


# ---------------------------------------------------------------- gradings


@pytest.mark.parametrize(
    "text, correctness, integer, strict, soft, tags, outcome",
    [
        (GOOD, 2.0, 0.5, 0.5, 0.5, 0.5, "format_and_answer"),
        (GOOD + "\n", 2.0, 0.5, 0.5, 0.5, 0.5, "format_and_answer"),
        (GOOD.replace("\n7\n", "\n8\n"), 0, 0.5, 0.5, 0.5, 0.5, "format_only"),
        (GOOD.replace("\n7\n", "\n7.0\n"), 2.0, 0, 0.5, 0.5, 0.5, "format_and_answer"),
        (GOOD.replace("\n7\n", "\nseven\n"), 0, 0, 0.5, 0.5, 0.5, "format_only"),
        ("<reasoning>6 + 1</reasoning> <answer>7</answer>", 2.0, 0.5, 0, 0.5, 0, "format_and_answer"),
        ("so\n" + GOOD, 2.0, 0.5, 0, 0, 0.5, "answer_only"),
        ("<answer>7</answer>", 2.0, 0.5, 0, 0, 0, "answer_only"),
        (
            "<reasoning>\n6 + 1 = 7\n</reasoning>\n<answer>\n7",
            0,
            0,
            0,
            0,
            0.375,
            "neither",
        ),  # cut off before its closing tag
        ("<reasoning>\n6 + 1 = 7\n", 0, 0, 0, 0, 0.125, "neither"),
        ("7", 0, 0, 0, 0, 0, "neither"),
        ("", 0, 0, 0, 0, 0, "neither"),
        (GOOD + GOOD, 2.0, 0.5, 0, 0.5, 0, "format_and_answer"),  # no tag is there exactly once
        ("<reasoning>\n<reasoning>\n1\n</reasoning>\n<answer>\n7\n</answer>", 2.0, 0.5, 0, 0, 0.375, "answer_only"),
    ],
)
def test_xml_terms_by_hand(
    text: str, correctness: float, integer: float, strict: float, soft: float, tags: float, outcome: str
) -> None:
    found = xml(text)
    assert found.terms == pytest.approx(
        dict(correctness=correctness, integer=integer, strict_format=strict, soft_format=soft, tags=tags)
    )
    assert found.reward == pytest.approx(correctness + integer + strict + soft + tags) and found.tier == outcome
    assert 0 <= found.reward <= rewards.MAXIMUM["xml"] == 4.0


def test_the_strict_pattern_takes_reasoning_of_many_lines_and_nothing_behind() -> None:
    assert (
        xml(GOOD).terms["strict_format"]
        == xml(GOOD.replace("6 + 3", "\n\n".join("abcdef"))).terms["strict_format"]
        == 0.5
    )
    assert (
        xml(GOOD + " and so on").terms["strict_format"]
        == xml(GOOD.replace("</reasoning>\n", "</reasoning> ")).terms["strict_format"]
        == 0
    )


@pytest.mark.parametrize("tail", [" and so on", "x" * 50, "x" * 130, "word " * 500, "x" * 100_000])
def test_a_tail_has_a_cost_and_a_correct_answer_still_beats_a_wrong_one(tail: str) -> None:
    right, wrong = xml(GOOD + tail), xml(GOOD.replace("\n7\n", "\n8\n"))
    assert all(term >= 0 for term in right.terms.values())
    assert wrong.reward < right.reward < xml(GOOD).reward and right.terms["tags"] >= 0.25


@pytest.mark.parametrize("gold", [None, "", " ", "\\boxed{}"])
@pytest.mark.parametrize("grading", GRADERS)
def test_an_unreadable_gold_answer_gives_no_reward(grading: str, gold: str | None) -> None:
    for text in (
        GOOD,
        "",
        "<answer></answer>",
        "<answer>\n\n</answer>",
        "\\boxed{}",
        "x </think> <answer></answer>",
        "The answer is 7.",
        "####",
    ):
        found = GRADERS[grading](text, gold, "number")
        assert not found.correct and found.tier in ("neither", "format_only")
        assert found.reward <= rewards.MAXIMUM[grading] - 1


@pytest.mark.parametrize(
    "grading, text, reward, outcome",
    [
        ("r1_zero", "6 + 1 = 7 </think> <answer> 7 </answer>", 1, "format_and_answer"),
        ("r1_zero", "<think>6 + 1 = 7</think>\n<answer>\\boxed{7}</answer> and so on", 1, "format_and_answer"),
        ("r1_zero", "6 + 1 </think> <answer> 8 </answer>", 0, "format_only"),
        ("r1_zero", "6 + 1 = 7 <answer> 7 </answer>", 0, "neither"),
        ("r1_zero", "6 + 1 </think> <answer> 7", 0, "neither"),
        ("r1_zero", "</think> <answer> 8 </answer> <answer> 7 </answer>", 0, "format_only"),
        ("question_only", "6 + 1, so \\boxed{7}", 1, "format_and_answer"),
        ("question_only", "#### 7", 1, "format_and_answer"),
        ("question_only", "The answer is 8.", 0, "format_only"),
        ("question_only", "7", 0, "neither"),
        ("plain", "6 + 1 makes 7 apples.", 1, "format_and_answer"),
        ("plain", "7 is not 8", 0, "format_only"),
        ("plain", "seven", 0, "neither"),
    ],
)
def test_the_other_graders_by_hand(grading: str, text: str, reward: float, outcome: str) -> None:
    found = GRADERS[grading](text, "7", "number")
    assert (found.reward, found.tier) == (reward, outcome)


def test_letters_are_graded_as_letters() -> None:
    assert xml(GOOD.replace("\n7\n", "\nB\n"), "B", "letter").reward == 4.0
    assert (
        rewards.grade_plain("The answer is (b).", "B", "letter").correct
        and not rewards.grade_plain("The answer is A.", "B", "letter").correct
    )
    assert not rewards.grade_plain("B or not B", "", "letter").correct


def test_the_named_functions_are_the_graders() -> None:
    """TRL's signature: lists of conversations and of gold answers; Stanford's: a text and one or several answers."""
    texts = [GOOD, GOOD.replace("\n7\n", "\n8\n"), "7", GOOD + " tail"]
    given = {"prompts": [[]] * 4, "completions": [[{"role": "assistant", "content": t}] for t in texts]}
    for name, function in rewards.XML_REWARDS.items():
        assert function(**given, answer=["7"] * 4, question=["?"] * 4) == [xml(t).terms[name] for t in texts]
    for text, gold, expected in (
        ("3 + 4 </think> <answer> 7 </answer>", 7, (1, 1, 1)),
        ("</think> <answer> 0.5 </answer>", ["3", "\\frac{1}{2}"], (1, 1, 1)),
        ("</think> <answer> 8 </answer>", "7", (1, 0, 0)),
        ("</think> <answer> 7", "7", (0, 0, 0)),
    ):
        assert tuple(rewards.r1_zero_reward_fn(text, gold).values()) == expected
    assert rewards.question_only_reward_fn("so \\boxed{7}", "7", fast=False)["reward"] == 1


# ---------------------------------------------------------------- templates and tasks


@pytest.mark.parametrize("template", templates.GRADING)
def test_every_template_holds_the_question_and_its_reference_solution_passes(template: str) -> None:
    task = tasks.load("reasoning", template=template)
    problems = task.problems("train", 40)
    assert all(p.messages[-1]["content"] in task.prompt(p)[-1]["content"] for p in problems)
    tasks.check_reference_solutions(task, problems).require()
    assert task.max_reward == (4.0 if template == "xml" else 1.0)
    roles = [m["role"] for m in task.prompt(problems[0])]
    assert roles == (["system", "user"] if template in ("xml", "zero_shot") else ["user"])


def test_the_prompts_of_the_papers() -> None:
    task = tasks.load("reasoning", template="r1_zero")
    assert task.prompt(task.problems("test", 1)[0])[0]["content"].endswith("\nAssistant: <think>")
    assert (
        "### Response:\n"
        in tasks.load("reasoning", template="alpaca").prompt(task.problems("test", 1)[0])[0]["content"]
    )


def test_a_template_may_be_graded_by_another_rule() -> None:
    assert tasks.load("reasoning:template=alpaca,reward=xml").max_reward == 4.0
    for words in ("reasoning:template=haiku", "reasoning:reward=haiku", "reasoning:levels=[7]", "reasoning:levels=[]"):
        with pytest.raises(ConfigError):
            tasks.load(words).problems("train", 1)
    with pytest.raises(ConfigError, match="split 'dev'"):
        tasks.load("reasoning").problems("dev", 1)


# ---------------------------------------------------------------- word problems


@pytest.mark.parametrize("level", stories.LEVELS)
def test_worked_solutions_are_correct_and_use_the_question(level: int) -> None:
    for question in stories.questions("train", 200, levels=(level,)):
        lines = question.steps.split("\n")
        assert len(lines) == max(1, level - 1)
        given = set(map(int, re.findall(r"\d+", question.text)))
        for line in lines:
            x, sign, y, _, result = line.split()
            assert eval(f"{x} {sign} {y}") == int(result) > 0
            assert {int(x), int(y)} <= given
            given.add(int(result))
        assert int(result) == question.answer


def test_parts_share_no_question_and_levels_take_turns() -> None:
    parts = {part: {q.text for q in stories.questions(part, 300, seed=1)} for part in (*stories.PARTS, "test_hard")}
    assert all(len(texts) == 300 for texts in parts.values())
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
    assert Counter(q.level for q in stories.questions("test", 300)) == dict.fromkeys(stories.LEVELS, 75)
    other = {q.text for q in stories.questions("worked", 300, seed=2)}
    assert not other & (parts["train"] | parts["select"] | parts["test"]), (
        "another seed may not move a question to another part"
    )


def test_wordings_of_test_hard_occur_nowhere_else() -> None:
    skeleton = {
        part: {
            re.sub(r"\d+|\b(?:" + "|".join(stories.PEOPLE + stories.THINGS) + r")\b", "#", q.text)
            for q in stories.questions(part, 600)
        }
        for part in ("worked", "train", "test", "test_hard")
    }
    assert skeleton["test"] <= skeleton["worked"] | skeleton["train"]
    assert not skeleton["test_hard"] & (skeleton["worked"] | skeleton["train"] | skeleton["test"])


def test_the_same_seed_draws_the_same_problems() -> None:
    task = tasks.load("reasoning")
    assert (
        task.problems("train", 30, seed=3) == task.problems("train", 30, seed=3) != task.problems("train", 30, seed=4)
    )
    assert {p.split for s in SPLITS for p in task.problems(s, 5)} == set(SPLITS)


# ---------------------------------------------------------------- GSM8K and MMLU


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"It is {i} + 1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}"}
        for i in range(990, 1090)
    ]
    jsonl(tmp_path / "train.jsonl", rows)
    jsonl(tmp_path / "test.jsonl", rows[:20])
    return tmp_path


def test_gsm8k_gold_is_after_the_hashes_and_select_is_part_of_train(gsm8k: Path) -> None:
    task = tasks.load("gsm8k", source=str(gsm8k))
    found = {split: task.problems(split) for split in task.splits}
    assert len(found["train"]) + len(found["select"]) == 100 and len(found["test"]) == 20 and found["select"]
    assert not {p.messages[0]["content"] for p in found["train"]} & {p.messages[0]["content"] for p in found["select"]}
    by_question = {p.messages[0]["content"]: p for p in found["test"]}
    assert by_question["What is 1005 + 1?"].gold == {"answer": "1006", "steps": "It is 1005 + 1 = 1006."}
    assert task.score(by_question["What is 1005 + 1?"], "<answer>1,006 apples</answer>").correct
    for template in templates.GRADING:
        tasks.check_reference_solutions(
            tasks.load("gsm8k", source=str(gsm8k), template=template), found["test"]
        ).require()


@pytest.mark.parametrize("answer", ["no mark", "####", "#### many", ""])
def test_the_error_of_an_unreadable_gold_answer_names_the_row(gsm8k: Path, answer: str) -> None:
    jsonl(gsm8k / "test.jsonl", [{"question": "fine", "answer": "#### 1"}, {"question": "q", "answer": answer}])
    with pytest.raises(DataError, match="gsm8k, test, row 2"):
        tasks.load("gsm8k", source=str(gsm8k)).problems("test")


def test_unreadable_sources_are_user_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingFile, match="none"):
        tasks.load("gsm8k", source=str(tmp_path / "none")).problems("test")
    with pytest.raises(ConfigError, match="gsm8k"):
        tasks.load("gsm8k", source="embedded").problems("test")
    with pytest.raises(ConfigError, match="split 'train'"):
        tasks.load("mmlu", source=str(tmp_path)).problems("train")
    with pytest.raises(MissingFile, match="reasoning.train.jsonl"):
        tasks.load("reasoning", source=str(tmp_path)).problems("train")
    jsonl(tmp_path / "test.jsonl", [{"prompt": "?", "answer": "#### 1"}])
    with pytest.raises(DataError, match="question"):
        tasks.load("gsm8k", source=str(tmp_path)).problems("test")
    jsonl(tmp_path / "reasoning.train.jsonl", [{"id": "a", "messages": [], "gold": {"answer": ""}, "split": "train"}])
    with pytest.raises(DataError, match="problem 'a'"):
        tasks.load("reasoning", source=str(tmp_path)).problems("train")


def test_mmlu_asks_with_four_choices_and_is_for_evaluation_only(tmp_path: Path) -> None:
    row = {"question": "2 + 2?", "subject": "sums", "choices": ["3", "4", "5", "6"], "answer": 1}
    jsonl(tmp_path / "validation.jsonl", [row])
    jsonl(tmp_path / "dev.jsonl", [row] * 5)
    task = tasks.load("mmlu", source=str(tmp_path))
    (problem,) = task.problems("select")
    assert problem.messages[0]["content"] == "2 + 2?\n\nA. 3\nB. 4\nC. 5\nD. 6" and task.problems("test") == []
    assert task.score(problem, "The answer is B.").correct and not task.score(problem, "The answer is C.").correct
    tasks.check_reference_solutions(task, [problem]).require()
    jsonl(tmp_path / "validation.jsonl", [row | {"answer": 4}])
    with pytest.raises(DataError, match="row 1"):
        tasks.load("mmlu", source=str(tmp_path)).problems("select")


def test_reference_solutions_of_the_real_sets_pass(shared_data: Path) -> None:
    for name, split, n in (("gsm8k", "test", 1319), ("mmlu", "select", 1531)):
        task = tasks.load(name, source=str(shared_data / name))
        problems = task.problems(split)
        assert len(problems) == n
        tasks.check_reference_solutions(task, problems).require()


# ---------------------------------------------------------------- the commands


@pytest.fixture
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


def new_model() -> None:
    """A run "new" with a small model of the bytes vocabulary."""
    tok = tokenizer.load("bytes")
    model = GPT(GPTConfig(depth=1, n_embd=32, n_head=2, block_size=400, vocab_size=tok.n_vocab))
    with Run.create("new", {}, kind="sft") as made:
        checkpoint.save(made.path, 0, model=model, meta={"tokenizer": tok.to_dict(), "tags": "reserved"})


def test_written_solutions_and_problems_are_disjoint(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data",
        "reasoning",
        "--out",
        "made",
        "--tokenizer",
        "bytes",
        "--max-examples",
        "60",
        "--problems",
        "40",
        "--eval-examples",
        "20",
    ]
    assert cli.main([*words, "--template", "r1_zero"]) == 0
    assert {p.name for p in (home / "made").glob("*.jsonl")} == {
        f"worked.{s}.jsonl" for s in ("train", "select", "test")
    } | {f"reasoning.{s}.jsonl" for s in SPLITS}
    worked = list(read_rows(home / "made" / "worked.train.jsonl"))
    task = tasks.load("reasoning:template=r1_zero", source=str(home / "made"))
    problems = task.problems("train")
    assert (len(worked), len(problems)) == (60, 40)
    asked = {row["messages"][0]["content"] for row in worked}
    assert not asked & {task.prompt(p)[0]["content"] for p in problems}
    assert all(re.fullmatch(r"[^<]+ </think> <answer> \d+ </answer>", row["messages"][-1]["content"]) for row in worked)
    tasks.check_reference_solutions(task, problems).require()
    assert cli.main([*words, "--levels", "9"]) == 2 and "levels [9]" in capsys.readouterr().err


def test_gsm8k_becomes_conversations_without_its_test_file(home: Path, gsm8k: Path) -> None:
    assert cli.main(["data", "reasoning", "--source", str(gsm8k), "--out", "made", "--tokenizer", "bytes"]) == 0
    names = {p.name for p in (home / "made").glob("*.jsonl")}
    assert names == {
        "worked.train.jsonl",
        "worked.select.jsonl",
        "gsm8k.train.jsonl",
        "gsm8k.select.jsonl",
        "gsm8k.test.jsonl",
    }
    assert all("<<" not in row["messages"][-1]["content"] for row in read_rows(home / "made" / "worked.train.jsonl"))
    assert len(tasks.load("gsm8k", source="made").problems("test")) == 20


def test_an_evaluation_keeps_every_example_and_counts_truncations(
    home: Path, gsm8k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_model()
    assert (
        cli.main(
            [
                "evaluate",
                "--ckpt",
                "new",
                "--task",
                "gsm8k",
                "--data-dir",
                str(gsm8k),
                "--n",
                "2",
                "--ks",
                "1",
                "--limit",
                "6",
                "--max-new-tokens",
                "5",
            ]
        )
        == 0
    )
    found = Run.open("evaluate")
    examples = list(read_rows(found.path / "examples.jsonl"))
    assert (
        len(examples) == 12
        and {"problem", "completion", "reward", "terms", "parts", "tier", "correct", "stop", "gold", "split"}
        <= examples[0].keys()
    )
    row = found.evals().iloc[0]
    assert row["format_rate"] == row["exact_match"] == 0 and row["tier/neither"] == 1
    assert sum(e["stop"] != "stop" for e in examples) == round(12 * row["truncated_frac"]) > 0
    assert [row[f"reward/{term}"] for term in ("correctness", "integer", "strict_format", "soft_format", "tags")] == [
        0
    ] * 5
    assert re.search(
        r"accuracy 0.000, format rate 0.000; of 12 completions: format_and_answer 0, .* neither 12; cut off \d+",
        capsys.readouterr().out,
    )


def metrics_of(texts: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The evaluation of a model that answers one problem with each of these texts; every gold answer is 7."""
    from codechat.evaluation import evaluate
    from codechat.models import generate
    from codechat.models.generate import Completion

    tok, task, answers = tokenizer.load("bytes"), tasks.load(name), iter(texts)
    monkeypatch.setattr(
        generate, "sample", lambda model, prompts, **more: [Completion([], [], "stop") for _ in prompts]
    )
    monkeypatch.setattr("codechat.text.chat.completion_text", lambda *_: next(answers))
    model = GPT(GPTConfig(depth=1, n_embd=32, n_head=2, block_size=400, vocab_size=tok.n_vocab))
    problems = [p for p in task.problems("test", 200) if p.gold["answer"] == "7"][: len(texts)]
    return evaluate.evaluate_task(model, tok, "reserved", task, problems, n=1).row()


def test_terms_are_logged_separately_and_add_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = metrics_of([GOOD, GOOD.replace("7", "8"), "7", GOOD + " tail"], "reasoning", monkeypatch)
    assert row["reward_mean"] == pytest.approx(sum(v for k, v in row.items() if k.startswith("reward/")))
    assert (row["exact_match"], row["format_rate"], row["tier/neither"], row["reward/correctness"]) == (
        0.5,
        0.75,
        0.25,
        1.0,
    )


@pytest.mark.parametrize("name, most", [("reasoning", 4), ("reasoning:template=question_only", 1)])
def test_equal_rewards_have_an_interval_within_the_range_of_their_grader(
    name: str, most: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = wilson_interval(0, 4).hi  # of all problems, at most so many have another reward
    for text, reward in (("nothing", 0), (GOOD if most == 4 else "The answer is 7.", most)):
        row = metrics_of([text] * 4, name, monkeypatch)
        found = [row["reward_mean"], row["reward_mean/lo"], row["reward_mean/hi"]]
        assert found == [reward, reward - share * reward, reward + share * (most - reward)]


def test_gsm8k_under_another_name_with_other_columns(tmp_path, monkeypatch):
    """A set of the hub by its name: training rows only, one in sixteen for validation."""
    rows = [{"query": f"What is {i} and 1?", "response": f"It is {i + 1}.\n#### {i + 1}"} for i in range(80)]
    monkeypatch.setattr("codechat.data.sources.hub_rows", lambda name: iter(rows if name == "owner/rounds" else []))
    out = tmp_path / "out"
    flags = ["--source", "owner/rounds", "--columns", "question=query,answer=response", "--tokenizer", "bytes"]
    command.main(["reasoning", *flags, "--out", str(out)])
    parts = {
        s: [json.loads(line) for line in (out / f"gsm8k.{s}.jsonl").read_text().splitlines()]
        for s in ("train", "select")
    }
    assert sum(map(len, parts.values())) == 80 and len(parts["train"]) > 60
    assert not (out / "gsm8k.test.jsonl").exists()
    assert {p["messages"][-1]["content"] for part in parts.values() for p in part} == {r["query"] for r in rows}
