"""A leak that was planted is found, whatever it looks like; templates and chance are not taken
for one."""

import json
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from contracts import write_rows

from codechat import tasks
from codechat.core.registry import COMMANDS
from codechat.data import command
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks.base import Problem
from codechat.text import tokenizer
from codechat_lab.instruments import contamination
from codechat_lab.tasks import micro

CODE = """def longest_run(values, limit):
    # the longest stretch above the limit
    best = run = 0
    for value in values:
        run = run + 1 if value > limit else 0
        best = max(best, run)
    return best
"""
REQUEST = (
    "Write a function that finds the length of the longest "
    "run of values above a given limit in a list."
)
PROBLEM = Problem(
    "leaked",
    [{"role": "system", "content": "Answer in Python."}, {"role": "user", "content": REQUEST}],
    {"code": CODE, "tests": ["assert longest_run([1], 0) == 1"], "names": ["longest_run"]},
    "test",
)
NOISE = (
    "def other(values):\n    total = 0\n    for value in "
    "values:\n        total += value\n    return total\n"
)
NOISE += "many words about nothing at all. " * 50 + "\n"


def found(text: str, problem: Problem = PROBLEM, whole: bool = False) -> tuple[str, ...]:
    return contamination.search([problem], [(text, whole)]).get("leaked", ())


def renamed(code: str, **names: str) -> str:
    return reduce(lambda text, pair: text.replace(*pair), names.items(), code)


def searched(
    problems: list[Problem],
    kind: str,
    data_dir: Path | str | None,
    task: str | None = None,
    task_data: str | None = None,
    seed: int | None = None,
) -> contamination.Report:
    """The report on a lineage of one run."""
    place = None if data_dir is None else str(data_dir)
    entry = {"run": "r", "kind": kind, "data_dir": place}
    if task is not None:
        entry |= {"task": task, "task_data": task_data, "seed": seed}
    return contamination.check(problems, [entry])


REWRITTEN = (
    'def f(xs: list, n: int) -> int:\n    """Say it."""\n    b = r = 0\n\n    for x in xs:  # each\n'
    "        r = r + 1 if x > n else 0\n        b = max(b, r)\n    return b"
)
IN_A_CLASS = "class A:\n" + "".join(
    "    " + line for line in CODE.replace("run", "r").splitlines(True)
)


@pytest.mark.parametrize(
    ("text", "way"),
    [
        (NOISE + REQUEST + NOISE, "prompt"),
        (NOISE + REQUEST.upper().replace(" ", "\n  ") + NOISE, "prompt"),
        (NOISE + CODE + NOISE, "solution"),
        (NOISE + renamed(CODE, best="b", run="r", value="v", limit="cut") + NOISE, "program"),
        (IN_A_CLASS, "program"),
        (REWRITTEN, "program"),
    ],
)
def test_a_planted_leak_is_found(text: str, way: str) -> None:
    assert way in found(text)


@pytest.mark.parametrize(
    "text",
    [
        NOISE,
        " ".join(REQUEST.split()[:12]),  # a gram's length less one word
        " ".join(REQUEST.split()[:14]),  # two of the eight grams of the request
        " ".join(sorted(REQUEST.split())),
        renamed(CODE, max="min", best="b", run="r", value="v"),
        renamed(CODE.replace("> limit", ">= limit"), best="b", run="r", value="v"),
        "",
        "def broken(:\n    return",
    ],
)
def test_what_is_only_alike_is_no_leak(text: str) -> None:
    assert found(text) == ()


def test_short_requests_count_as_whole_messages_only() -> None:
    short = Problem("leaked", [{"role": "user", "content": "What is 12 squared?"}], None, "test")
    assert found("what is 12   squared", short, whole=True) == ("prompt",)
    assert found("I ask: what is 12 squared?", short, whole=True) == ()
    assert found("what is 12 squared", short) == ()


def test_small_programs_never_count() -> None:
    gold = {"code": "def f(x):\n    return x + 1\n", "tests": ["assert f(1) == 2"], "names": ["f"]}
    assert found(gold["code"], Problem("leaked", PROBLEM.messages, gold, "test")) == ()


@pytest.mark.slow
def test_problems_of_micro_are_not_exposed_by_its_own_solutions_but_a_leak_is() -> None:
    """The families share every template; what is trained on has other parameters."""
    problems = micro.problems("test", 120)
    taught = [
        (m["content"], True) for row in micro.dialogues("train", 600) for m in row["messages"]
    ]
    assert not contamination.search(problems, taught)
    leaked = contamination.search(problems, [*taught, (problems[5].messages[0]["content"], True)])
    assert list(leaked) == [problems[5].id]


@pytest.fixture
def trained(make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose lineage is a corpus and conversations, both with room for a leak."""
    monkeypatch.setattr("codechat_lab.instruments.contamination.ROOT", tmp_path)
    (tmp_path / "source").mkdir()
    for i in range(40):
        text = f"# {i}\n{NOISE if i else CODE.replace('run', 'stretch')}\n".replace("many", f"{i}")
        (tmp_path / "source" / f"module_{i}.py").write_text(text)
    command.main(
        f"corpus --source {tmp_path}/source --out {tmp_path}/corpus --tokenizer bytes --val-share 0".split()
    )
    messages = [{"role": "user", "content": "lower"}, {"role": "assistant", "content": "abc"}]
    write_rows(
        tmp_path / "talk" / "chat.train.jsonl",
        [dict(id="a", messages=messages, domain="chat", meta={})],
    )
    stages = (("p", "pretrain", "corpus"), ("s", "sft", "talk"), ("gone", "sft", "nowhere"))
    return make_run(
        "leaky",
        lineage=[{"run": run, "kind": kind, "data_dir": place} for run, kind, place in stages],
    )


def test_a_lineage_is_searched_through_its_manifests(trained: Run) -> None:
    report = contamination.check([PROBLEM], checkpoint.load("leaky").meta["lineage"])
    assert report.how == {"leaked": ("program",)}
    assert [read.partition(":")[0] for read in report.read] == ["p (pretrain)", "s (sft)"]
    assert report.elsewhere == ["nowhere"]
    assert not report.missing


def test_a_corpus_that_was_prepared_anew_since_is_missing(trained: Run, tmp_path: Path) -> None:
    own = json.loads((tmp_path / "corpus" / "manifest.json").read_text())["hash"]
    for recorded, same in (({}, True), ({"data": own}, True), ({"data": "0" * 64}, False)):
        entry = {"run": "r", "kind": "pretrain", "data_dir": "corpus"} | recorded
        report = contamination.check([PROBLEM], [entry])
        assert (bool(report.read), bool(report.missing)) == (same, not same)


def test_sampled_problems_are_those_of_the_runs_seed() -> None:
    seen = tasks.load("funcall").problems("train", seed=7)[:40]
    same = searched(seen, "reinforce", None, task="funcall", seed=7)
    other = searched(seen, "reinforce", None, task="funcall", seed=0)
    assert len(same.how) == 40
    assert len(other.how) < 40


def test_problems_of_pairs_that_were_sampled_are_those_of_the_runs_place(tmp_path: Path) -> None:
    row = {
        "id": "a",
        "messages": [{"role": "user", "content": REQUEST}],
        "gold": {"name": "f", "arguments": {}},
        "split": "train",
    }
    write_rows(tmp_path / "funcall.train.jsonl", [row])
    report = searched(
        [PROBLEM], "preference", None, task="funcall", task_data=str(tmp_path), seed=0
    )
    assert report.how == {"leaked": ("prompt",)}


@pytest.mark.parametrize(
    ("row", "ways"),
    [
        ({"prompt": REQUEST, "chosen": "a", "rejected": "b"}, {"prompt"}),
        ({"prompt": "Write it.", "chosen": CODE, "rejected": "b"}, {"solution"}),
        (
            {
                "prompt": "Write it.",
                "chosen": "a",
                "rejected": renamed(CODE, best="b", run="r"),
            },
            {"program"},
        ),
        ({"prompt": "Write it.", "completion": CODE, "label": False}, {"solution"}),
        (
            {
                "prompt": [{"role": "user", "content": REQUEST}],
                "chosen": [{"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": CODE}],
            },
            {"prompt", "solution"},
        ),
    ],
)
def test_prompts_and_both_completions_of_preferences_are_searched(
    row: dict[str, object], ways: set[str], tmp_path: Path
) -> None:
    other = {"prompt": f"{NOISE} or what?", "chosen": "c", "rejected": "d"}
    write_rows(tmp_path / "preferences.train.jsonl", [other, row])
    report = searched([PROBLEM], "preference", tmp_path, task="toy", seed=0)
    assert ways <= set(report.how["leaked"])
    assert not report.missing
    # the task of such a run only evaluates: its problems are not what was trained on
    lower = Problem("lower", [{"role": "user", "content": "lower"}], "lower", "test")
    assert not searched([lower], "preference", tmp_path, task="toy", seed=0).how


USER = {"role": "user", "content": REQUEST}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"name": "f", "arguments": {}}
LAYOUTS = {
    "a call without content": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALL}]},
        ],
        "tools": [TOOL],
    },
    "a call without the key": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}]
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": REQUEST}]},
            {"role": "gpt", "content": "a"},
        ]
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": REQUEST}, {"from": "gpt", "value": "a"}]
    },
    "ChatML": {
        "text": f"<|im_start|>user\n{REQUEST}<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    },
    "glaive": {
        "system": "SYSTEM: Be brief.",
        "chat": f"USER: {REQUEST}\n\n\nASSISTANT: a <|endoftext|>",
    },
    "a tool set": {"question": [USER], "functions": [TOOL], "ground_truth": [CALL]},
    "xLAM": {"query": REQUEST, "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
    "instruction": {"instruction": REQUEST, "input": 7, "output": "a"},
    "question": {"question": REQUEST, "answer": "a"},
    "prompt": {"prompt": REQUEST, "completion": "a"},
    "prompt of messages": {"prompt": [USER], "completion": [{"role": "assistant", "content": "a"}]},
    "JSON text": {"messages": json.dumps([USER, {"role": "assistant", "content": "a"}])},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_every_layout_that_sft_accepts_are_searched(layout: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.train.jsonl", [LAYOUTS[layout]])
    report = searched([PROBLEM], "sft", tmp_path)
    assert report.how == {"leaked": ("prompt",)}
    assert not report.missing


IN_JSON = {"code": {"text": CODE}}


@pytest.mark.parametrize("place", ["an argument", "a result", "a preferred answer"])
def test_a_program_within_the_json_of_a_call_or_its_result_is_found(
    place: str, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "Run it."}
    call = {"name": "run", "arguments": IN_JSON if place != "a result" else {}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    result = {"role": "tool", "content": json.dumps(IN_JSON if place == "a result" else {})}
    if place == "a preferred answer":
        row = {"prompt": [asked], "chosen": [called], "rejected": "No."}
        write_rows(tmp_path / "preferences.train.jsonl", [row])
    else:
        row = {"messages": [asked, called, result, {"role": "assistant", "content": "Done."}]}
        write_rows(tmp_path / "mine.train.jsonl", [row])
    kind = "preference" if place == "a preferred answer" else "sft"
    report = searched([PROBLEM], kind, tmp_path)
    assert report.how == {"leaked": ("program", "solution")}
    assert not report.missing


def test_a_row_that_sft_refuses_is_named_and_not_a_traceback(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "mine.train.jsonl",
        [{"messages": [USER, {"role": "assistant", "content": None}]}],
    )
    report = searched([PROBLEM], "sft", tmp_path)
    assert not report.read
    assert "mine.train.jsonl:1" in report.missing[0]


def test_preferences_of_an_sft_folder_were_not_trained_on(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "preferences.train.jsonl", [dict(prompt=REQUEST, completion="a", label=False)]
    )
    write_rows(tmp_path / "mine.train.jsonl", [LAYOUTS["question"] | {"question": "Else?"}])
    assert not searched([PROBLEM], "sft", tmp_path).how


def test_conversations_of_token_ids_are_reported_as_not_searched(tmp_path: Path) -> None:
    ids = tokenizer.load("bytes").encode(REQUEST)
    write_rows(tmp_path / "ids.train.jsonl", [dict(input_ids=ids, labels=ids)])
    alone = searched([PROBLEM], "sft", tmp_path)
    messages = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": "a"}]
    write_rows(tmp_path / "talk.train.jsonl", [dict(messages=messages)])
    # what is text is searched nevertheless
    beside = searched([PROBLEM], "sft", tmp_path)
    assert not alone.how
    assert beside.how == {"leaked": ("prompt",)}
    for report in (alone, beside):
        assert not report.read
        assert len(report.missing) == 1
        assert "ids.train.jsonl" in report.missing[0]


def test_a_report_of_nothing_searched_counts_no_problems() -> None:
    report = contamination.Report(3, missing=["a (sft): no text was found"])
    said = "contamination: unknown; not searched: a (sft): no text was found"
    assert str(report) == said


def test_directories_that_are_elsewhere_are_told_together() -> None:
    report = contamination.Report(3, elsewhere=["data/a", "data/b"])
    said = "contamination: unknown; not searched: data/a, data/b (not on this machine)"
    assert str(report) == said


SCORED = "--task toy --n 2 --ks 1 --max-new-tokens 8 --limit 4 --ckpt leaky --run-name scores"


def test_evaluate_prints_clean_and_exposed_parts(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    COMMANDS["evaluate"].run(SCORED.split())
    out = capsys.readouterr().out
    for part in ("1 of 4", "prompt 1", "clean: pass@1 = ", "N=3", "exposed: pass@1 = ", "N=1"):
        assert part in out
    assert out.index("contamination:") < out.index("pass@1")
    row = Run.open("scores").evals().iloc[0]
    assert row["exposed_n"] == 1
    assert row["clean/pass@1"] == 0


def test_evaluate_may_leave_contamination_out(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    COMMANDS["evaluate"].run([*SCORED.split(), "--no-contamination"])
    assert "contamination" not in capsys.readouterr().out


def test_the_time_of_a_search_is_linear_in_what_is_found() -> None:
    def seconds(n: int) -> float:
        """CPU time in which n functions are found in n texts; the best of three."""
        problems = [Problem(f"{i}", [], {"function": f"f{i}"}, "test") for i in range(n)]
        texts = [(f"def f{i}():", True) for i in range(n)]
        times = []
        for _ in range(3):
            began = time.process_time()
            assert len(contamination.search(problems, texts)) == n
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(4000) < 24 * seconds(500)  # 8 where it is linear, 64 where it is quadratic
