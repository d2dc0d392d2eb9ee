"""Natural requests: the fixed file keeps its shares, right answers are told from wrong ones, nothing of it is in the training data."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from codechat.core import config, registry
from codechat.evaluation import contamination, natural
from codechat.launch.recipes import RECIPES
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat.tasks.natural import NaturalTask, read_requests
from codechat.tasks.toolbox import catalogue, everyday
from codechat.text import chat

PROBLEMS = read_requests()
BY_ID = {p.id: p for p in PROBLEMS}
TASK = NaturalTask()

# function: a solution, and what makes it wrong: a piece and its replacement
SOLUTIONS = {
    name: (row["solution"], row["wrong"])
    for name, row in json.loads(Path(__file__).with_name("natural_solutions.json").read_text()).items()
}
QUICKSORT, TALLY = (SOLUTIONS[name][0] for name in ("quicksort", "tally_words"))


def of_kind(kind: str) -> list[Problem]:
    return [p for p in PROBLEMS if p.meta["kind"] == kind]


def request(problem: Problem) -> str:
    return problem.messages[-1]["content"]


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


# ---------------------------------------------------------------- the file


def test_the_file_has_its_shares() -> None:
    assert Counter(p.meta["kind"] for p in PROBLEMS) == dict(toolbox=60, unfitting=20, code=20, chat=20)
    assert len(BY_ID) == 120 and len({words(request(p)) for p in PROBLEMS}) == 120
    assert all(request(p).isascii() for p in PROBLEMS)


def test_every_tool_request_offers_the_tool_and_others_that_cannot_serve() -> None:
    for problem in of_kind("toolbox"):
        name, offered = problem.gold["name"], problem.meta["tools"]
        assert name in offered and 3 <= len(offered) <= 6 and len(set(offered)) == len(offered)
        assert not set(offered) & {t.name for t in catalogue.HELD_OUT}
        assert not (catalogue.family(name) - {name}) & set(offered), problem.id
        catalogue.TOOLS[name].call(problem.gold["arguments"])
        system = TASK.prompt(problem)[0]["content"]
        assert system.startswith("Functions:\n") and f"\n{name}(" in system
    assert len({p.gold["name"] for p in of_kind("toolbox")}) == 60


# ---------------------------------------------------------------- scores


def test_only_the_expected_call_is_right() -> None:
    for problem in of_kind("toolbox"):
        check_calls(problem)


def check_calls(problem: Problem) -> None:
    name, arguments = problem.gold["name"], problem.gold["arguments"]
    other = next(tool for tool in problem.meta["tools"] if tool != name)
    key, value = next(reversed(arguments.items()))
    changed = value + 1 if isinstance(value, (int, float)) else value + value
    answers = {
        TASK.gold(problem): "right",
        chat.format_call(name, arguments | {key: changed}): "right tool",
        chat.format_call(other, arguments): "calls another offered tool",
        chat.format_call("no_such_tool", arguments): "calls a name that was not offered",
        chat.CALL_TAG + " {": "unreadable call",
        "I have no function for that.": "no call",
    }
    for answer, said in answers.items():
        score = TASK.score(problem, answer)
        assert score.correct == (said == "right")
        assert natural.verdict(problem, score.tier, answer).startswith(said)


def test_where_no_tool_fits_only_silence_is_right() -> None:
    for problem in of_kind("unfitting"):
        said = {}
        for answer in ("I cannot do that.", chat.format_call(problem.meta["tools"][0], {}), chat.CALL_TAG + " x"):
            score = TASK.score(problem, answer)
            said[natural.verdict(problem, score.tier, answer)] = score.correct
        assert said == {"declined": True, "calls another offered tool": False, "unreadable call": False}


def test_solutions_pass_the_hidden_tests_and_wrong_programs_fail() -> None:
    problems = of_kind("code")
    assert {p.gold["function"] for p in problems} == SOLUTIONS.keys()
    pairs = []
    for problem in problems:
        code, (piece, replacement) = SOLUTIONS[problem.gold["function"]]
        assert piece in code
        pairs += [(problem, code), (problem, code.replace(piece, replacement)), (problem, "I cannot.")]
    tiers = [score.tier for score in TASK.scores(pairs)]
    right, wrong, silent = tiers[::3], tiers[1::3], tiers[2::3]
    assert right == ["all_passed"] * 20 and set(silent) == {"empty"}
    assert "all_passed" not in wrong and not {"unparseable", "empty"} & set(wrong), dict(zip(SOLUTIONS, wrong))


def test_a_request_without_a_name_may_be_answered_under_any() -> None:
    quicksort, named = (p for p in of_kind("code") if p.gold["function"] in ("quicksort", "tally_words"))
    in_place = "def quickSort(a, low, high):\n    a[low : high + 1] = quick(a[low : high + 1])\n"
    quick_sort = (
        f"Here it is:\n```python\n{QUICKSORT.replace('quicksort', 'quick_sort')}\nprint(quick_sort([2, 1]))\n```\nBye."
    )
    answers = [
        QUICKSORT.replace("quicksort", "sort"),
        quick_sort,
        QUICKSORT.replace("quicksort", "quick") + "\n\n" + in_place,
        "def quicksort(xs):\n    return sorted(xs)\n",
        "def quicksort(xs:\n",
    ]
    scores = list(TASK.scores([(quicksort, answer) for answer in answers] + [(named, TALLY.replace("tally", "count"))]))
    assert [s.tier for s in scores] == ["all_passed"] * 3 + ["shortcut", "unparseable", "raises"]
    assert [s.correct for s in scores] == [True] * 3 + [False] * 3


# ---------------------------------------------------------------- not in the training data


NUMBER = r"\d+(?: \d+)?"  # a decimal point is no word
FILLED = {"integer": NUMBER, "number": NUMBER, "array": r"\d+(?: (?:and )?\d+)*", "string": r"\w+(?: \w+){0,3}"}


def pattern(template: str, slots: dict[str, str]) -> re.Pattern[str]:
    """What a template gives with its slots filled, in words."""
    parts = re.split(r"\{(\w*)\}", template)
    return re.compile(" ".join(slots[part] if i % 2 else words(part) for i, part in enumerate(parts) if words(part)))


def alike(problems: list[Problem], patterns: list[re.Pattern[str]]) -> dict[str, str]:
    return {p.id: like.pattern for p in problems for like in patterns if like.fullmatch(words(request(p)))}


def ask(text: str) -> Problem:
    return Problem(text, [{"role": "user", "content": text}], None, "test")


def test_no_tool_request_is_a_template_with_its_slots_filled() -> None:
    patterns = []
    for tool in (*catalogue.TOOLS.values(), *everyday.services()):
        slots = {name: FILLED[slot.schema["type"]] for name, slot in tool.slots.items()}
        slots |= {name: FILLED["string"] for name, slot in tool.slots.items() if "enum" in slot.schema}
        templates = (*tool.asks, *tool.hard_asks, *everyday.wordings().get(tool.name, ()))
        patterns += [pattern(template, slots) for template in templates]
    known = [ask("What is 12.5 times 30?"), ask("How do I greet Ann in French?"), ask("Max of 3, 4 and 5?")]
    assert len(alike(known, patterns)) == 3
    assert alike([p for p in PROBLEMS if p.meta["tools"]], patterns) == {}


def test_wordings_and_functions_are_found_where_they_are_planted() -> None:
    texts = [
        ("Oh, WRITE quicksort!", True),
        ("write\nQuicksort.", True),
        ("def tallyWords (text): pass", False),
        ("yo", False),
    ]
    assert contamination.search(PROBLEMS, texts) == {"code-01": ("prompt",), "code-13": ("function",)}
    assert contamination.search(PROBLEMS, [(request(BY_ID["toolbox-55"]), True)]) == {"toolbox-55": ("prompt",)}


SMALL = {  # sizes of the recipe's data stages
    "data.corpus": dict(max_tokens=300_000),
    "data.sft": dict(max_examples=600),
    "data.calls": dict(max_examples=1500, copies=200, problems=300, eval_examples=10, probes=0, lookups=0),
}


@pytest.mark.slow
def test_the_data_of_nano_hold_no_request_and_no_function(tmp_path: Path) -> None:
    for stage in RECIPES["nano"].stages:
        if stage.kind.startswith("data."):
            entry, out = registry.find(stage.kind), stage.out.format(data=tmp_path)
            cfg = config.from_dict(entry.config_class, {**stage.settings, **SMALL[stage.kind], "out": out})
            entry.load(entry.function)(cfg)
    texts = contamination.Texts(
        [
            dict(run="pretrain", kind="pretrain", data_dir=str(tmp_path / "corpus")),
            dict(run="base", kind="sft", data_dir=str(tmp_path / "base")),
            dict(run="sft", kind="sft", data_dir=str(tmp_path / "sft")),
            dict(run="rl", kind="reinforce", task="funcall", data_dir=str(tmp_path / "sft")),
        ]
    )
    found = contamination.search(PROBLEMS, texts)
    assert len(texts.read) == 4 and not texts.missing
    assert found.keys() <= {p.id for p in PROBLEMS if p.meta["trained"]}


# ---------------------------------------------------------------- the command


def test_the_command_writes_a_row_for_each_answer_and_tables(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """The model was trained on one of the requests."""
    (tmp_path / "data").mkdir()
    messages = [{"role": "user", "content": "Write quicksort!"}, {"role": "assistant", "content": QUICKSORT}]
    (tmp_path / "data" / "code.train.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    lineage = [{"run": "tiny", "kind": "sft", "data_dir": str(tmp_path / "data")}]
    make_run("tiny", "gpt2:512", lineage=lineage, block_size=512)
    natural.main(["--ckpt", "tiny", "--max-new-tokens", "4", "--run-name", "n"])
    run = Run.open("n")
    row = run.evals().iloc[0]
    assert run.status["status"] == "finished" and row["natural/toolbox/n"] == 60
    assert [row[f"natural/code{stratum}/n"] for stratum in ("", "_new", "_trained")] == [20, 19, 1]
    rows = [json.loads(line) for line in (run.path / "natural.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rows] == list(BY_ID) and {r["id"] for r in rows if r["trained"]} == {"code-01"}
    table = (run.path / "natural.md").read_text()
    assert "| code, trained on: passes all hidden tests | 0 of 1" in table
    assert all(f"| {p.id} |" in table for p in PROBLEMS)


def test_metrics_and_tables_follow_the_rows() -> None:
    examples = []
    for problem in PROBLEMS:
        right = SOLUTIONS[problem.gold["function"]][0] if problem.meta["kind"] == "code" else TASK.gold(problem)
        examples.append(dict(completion=right, request=request(problem), gold=TASK.gold(problem), stop="stop"))
    for example, score in zip(examples, TASK.scores([(p, e["completion"]) for p, e in zip(PROBLEMS, examples)])):
        example |= dict(tier=score.tier, correct=score.correct, parts=dict(score.parts))
    rows = natural.answer_rows(PROBLEMS, examples, {"code-01": ("function",)})
    found = natural.metrics(rows)
    shares = {k: v for k, v in found.items() if not k.endswith(("/lo", "/hi", "/n"))}
    bad = {"natural/toolbox/not_offered", "natural/unfitting/not_offered"}
    assert {k for k, v in shares.items() if v == 0} == bad and all(v == 1 for k, v in shares.items() if k not in bad)
    assert (found["natural/code_trained/n"], found["natural/code_new/n"]) == (1, 19)
    assert found["natural/toolbox/right/lo"] > 0.9
    text = natural.markdown({"a": rows}, "greedy")
    assert "60 of 60" in text and "**passes all tests, trained on**" in text
    cells = [line for line in text.splitlines() if line.startswith("| toolbox-31 ")]
    assert len(cells) == 1 and len(re.findall(r"(?<!\\)\|", cells[0])) == 6


def test_the_released_models_answers_are_committed_as_a_table_that_their_rows_give() -> None:
    """reports/natural: every released model answered every request, and the tables are those of the rows beside them."""
    folder = Path(__file__).resolve().parents[2] / "reports" / "natural"
    answers: dict[str, list[dict[str, object]]] = {}
    for line in (folder / "natural.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        answers.setdefault(row["checkpoint"], []).append(row)
    assert {name.partition("@")[0] for name in answers} == {"released/mini", "released/nano"}
    requests = {problem.id: problem.messages[-1]["content"] for problem in read_requests()}
    assert all({row["id"]: row["request"] for row in rows} == requests for rows in answers.values())
    how = (folder / "natural.md").read_text("utf-8").split("\n")[2]
    assert natural.markdown(answers, how) == (folder / "natural.md").read_text("utf-8")
