"""Counterfactual swaps: each changes one thing, counts only answers that were right before, and reads what the answer did after."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from codechat.core.atomic_files import write_atomic
from codechat.core.errors import ConfigError, MissingFile
from codechat.evaluation import counterfactuals
from codechat.models.config import GPTConfig
from codechat.models.gpt import GPT
from codechat.runs import checkpoint
from codechat.runs.run import Run
from codechat.tasks import toolbox
from codechat.tasks.base import Problem
from codechat.text import chat, tokenizer

RNG = random.Random(0)


def problem(name: str, arguments: dict, request: str, others: tuple[str, ...] = ()) -> Problem:
    system = chat.tools_prompt([toolbox.TOOLS[t].schema for t in (*others, name)])
    return Problem(
        "p",
        [{"role": "system", "content": system}, {"role": "user", "content": request}],
        {"name": name, "arguments": arguments},
        "test",
    )


def call(name: str, **arguments: object) -> str:
    return chat.format_call(name, arguments)


ADD = problem("add", {"a": 12, "b": 7}, "Add 12 and 7.", ("to_morse",))
DIGITS = problem("digit_sum", {"n": 195}, "Digit sum of 195?")


def changed(case: counterfactuals.Case) -> list[int]:
    """Numbers of the messages that the swap changed."""
    assert len(case.before) == len(case.after)
    return [i for i, (a, b) in enumerate(zip(case.before, case.after)) if a != b]


def test_without_tools_only_silence_follows() -> None:
    case = counterfactuals.tools_off(ADD, RNG)
    assert changed(case) == [0] and "add(" not in case.after[0]["content"]
    assert case.valid(call("add", a=1)) and not case.valid("No.")
    assert [case.judge(t) for t in ("I cannot.", call("add", a=12, b=7), "```python\n1\n```")] == [
        "follows",
        "ignores",
        "other",
    ]


def test_a_tool_that_gave_its_place_away_must_not_be_called() -> None:
    case = counterfactuals.tool_swapped(ADD, RNG)
    before, after = (m[0]["content"].splitlines() for m in (case.before, case.after))
    assert changed(case) == [0] and len(before) == len(after) and sum(a != b for a, b in zip(before, after)) == 1
    assert "add(" not in case.after[0]["content"] and "to_morse(" in case.after[0]["content"]
    newcomer = next(b for a, b in zip(before, after) if a != b).partition("(")[0]
    assert newcomer not in toolbox.family("add")
    answers = (call("add", a=12, b=7), call(newcomer, a=12), "I have no function for that.")
    assert [case.judge(t) for t in answers] == ["ignores", "other", "follows"]
    assert case.valid(call("add", a=1)) and not case.valid(call("to_morse", word="a"))


def test_a_renamed_tool_is_called_by_its_new_name_or_from_memory() -> None:
    case = counterfactuals.tool_renamed(DIGITS, RNG)
    assert "sum_digit(n: integer)" in case.after[0]["content"] and "digit_sum(" not in case.after[0]["content"]
    assert [case.judge(call(n, n=195)) for n in ("sum_digit", "digit_sum", "add")] == ["follows", "ignores", "other"]
    assert "add_it(" in counterfactuals.tool_renamed(ADD, RNG).after[0]["content"]


def test_a_swapped_value_must_be_carried_over_with_its_type() -> None:
    others = [DIGITS, problem("digit_sum", {"n": 41}, "Digit sum of 41?"), problem("digit_sum", {"n": 1.5}, "1.5")]
    case = counterfactuals.value_swapped(DIGITS, others, RNG)
    assert case.after[-1]["content"] == "Digit sum of 41?" and changed(case) == [1]
    assert case.valid(call("digit_sum", n=195)) and not case.valid(call("digit_sum", n=19))
    found = [case.judge(call("digit_sum", n=n)) for n in (41, 195, "41", 5)] + [case.judge(call("add", n=41))]
    assert found == ["follows", "ignores", "other", "other", "other"]


def test_a_value_that_is_part_of_another_or_stands_twice_is_not_swapped() -> None:
    other = problem("add", {"a": 5, "b": 6}, "Add 5 and 6.")
    assert counterfactuals.value_swapped(problem("add", {"a": 1, "b": 1}, "Add 1 and 1."), [other], RNG) is None
    assert (
        counterfactuals.value_swapped(
            problem("digit_sum", {"n": 9}, "Digit sum of 195?"), [problem("digit_sum", {"n": 41}, "41")], RNG
        )
        is None
    )
    assert counterfactuals.value_swapped(DIGITS, [DIGITS], RNG) is None  # nobody else asks for this tool


def test_tools_beside_a_request_for_code_leave_it_a_request_for_code() -> None:
    probe = {"messages": [{"role": "user", "content": "Write f()."}], "asked": "code", "tools_present": False}
    case = counterfactuals.tools_on(probe, 0, RNG)
    assert [m["role"] for m in case.after] == ["system", "user"] and "Functions:" in case.after[0]["content"]
    assert case.valid("def f():\n    pass") and not case.valid("No.")
    assert [case.judge(t) for t in ("def f(): pass", call("add"), "No.")] == ["follows", "ignores", "other"]


def test_only_cases_that_behaved_before_count_towards_a_flip() -> None:
    case = counterfactuals.tools_off(ADD, RNG)
    rows = counterfactuals.flips(
        [case] * 4, [call("add"), call("add"), "No.", call("add")], ["No.", call("add"), "No.", "No."]
    )
    row = rows[0]
    assert (
        (row["asked"], row["n"]) == (4, 3)
        and row["follows"] == pytest.approx(2 / 3)
        and row["ignores"] == pytest.approx(1 / 3)
    )
    assert row["follows/lo"] < row["follows"] < row["follows/hi"] and row["other"] == 0
    assert rows[1] == dict(swap="tools_on", asked=0, n=0)


@pytest.fixture
def tiny(runs_root: Path) -> Path:
    """A checkpoint of a tiny model, and a data directory with a few problems and probes."""
    tok = tokenizer.load("gpt2:512")
    model = GPT(GPTConfig(depth=1, n_embd=32, n_head=2, block_size=384, vocab_size=tok.n_vocab))
    with Run.create("tiny", {"a": 1}, kind="sft") as run:
        checkpoint.save(run.path, 1, model=model, meta={"tokenizer": tok.to_dict(), "tags": "reserved", "lineage": []})
    folder = runs_root / "data"
    folder.mkdir()
    rows = [
        json.dumps(dict(id=p.id, messages=p.messages, gold=p.gold, split=p.split, meta=p.meta))
        for p in toolbox.problems("test", 12)
    ]
    write_atomic(folder / "funcall.test.jsonl", "\n".join(rows) + "\n")
    probes = [json.dumps(p) for p in toolbox.probes("test", 10, 0, ["Write `f()`."])]
    write_atomic(folder / "probes.test.jsonl", "\n".join(probes) + "\n")
    return folder


def test_the_command_leaves_a_run_with_a_row_per_checkpoint_and_swap(tiny: Path) -> None:
    counterfactuals.main(["--ckpt", "tiny", "--data-dir", str(tiny), "--limit", "2", "--max-new-tokens", "4"])
    run = Run.open("swaps")
    rows = run.evals()
    assert (
        run.status["status"] == "finished"
        and list(rows["swap"]) == list(counterfactuals.SWAPS)
        and set(rows["checkpoint"]) == {"tiny@1"}
    )
    assert (rows["asked"] == 2).all() and (rows["n"] == 0).all()  # new weights call nothing


# ---------------------------------------------------------------- supervised tokens


def test_supervised_tokens_are_counted_as_training_sees_them(runs_root: Path) -> None:
    from codechat.data import supervised_tokens

    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "one two three four"}]
    (runs_root / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    mask = chat.render(messages, tokenizer.load("gpt2:512"), "text").loss_mask
    cut = mask.index(1) + 3  # a row of so many ids predicts two of the answer's tokens beside the first
    for limit, kept in ((10_000, sum(mask)), (cut, 3)):
        supervised_tokens.main(
            [
                "--files",
                f"calls={runs_root / 'rows.jsonl'}",
                "--tokenizer",
                "gpt2:512",
                "--limit",
                str(limit),
                "--overwrite",
            ]
        )
        row = Run.open("supervision").evals().iloc[0]
        assert (row["supervised"], row["supervised_uncut"], row["cut"]) == (kept, sum(mask), limit < len(mask))
    with pytest.raises(MissingFile):
        supervised_tokens.main(["--files", "calls=nowhere.jsonl"])
    with pytest.raises(ConfigError, match="glaive.jsonl"):
        supervised_tokens.SupervisionConfig(files=("glaive.jsonl",))
