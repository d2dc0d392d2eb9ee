"""Counterfactual swaps: each changes one thing, counts only answers that were right before, and
reads what the answer did after."""

import random
from collections.abc import Callable
from pathlib import Path

import counterfactuals
import pytest
from contracts import write_rows

from codechat.runs.run import Run
from codechat.tasks.base import Problem, row_of
from codechat.text import chat, tokenizer
from codechat_lab.tasks.toolbox import catalogue, problems

RNG = random.Random(0)


def problem(name: str, arguments: dict, request: str, others: tuple[str, ...] = ()) -> Problem:
    system = chat.tools_prompt([catalogue.TOOLS[t].schema for t in (*others, name)])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
    return Problem("p", messages, {"name": name, "arguments": arguments}, "test")


def call(name: str, **arguments: object) -> str:
    return chat.format_call(name, arguments)


ADD = problem("add", {"a": 12, "b": 7}, "Add 12 and 7.", ("to_morse",))
DIGITS = problem("digit_sum", {"n": 195}, "Digit sum of 195?")
FOLLOWS = ["follows", "ignores", "other"]


def changed(case: counterfactuals.Case) -> list[int]:
    """Numbers of the messages that the swap changed."""
    assert len(case.before) == len(case.after)
    return [i for i, (a, b) in enumerate(zip(case.before, case.after)) if a != b]


def test_swaps_of_the_tools() -> None:
    case = counterfactuals.tools_off(ADD, RNG)
    assert changed(case) == [0]
    assert "add(" not in case.after[0]["content"]
    assert case.valid(call("add", a=1))
    assert not case.valid("No.")
    assert [
        case.outcome(t) for t in ("I cannot.", call("add", a=12, b=7), "```python\n1\n```")
    ] == FOLLOWS

    case = counterfactuals.tool_swapped(ADD, RNG)
    before, after = (m[0]["content"].splitlines() for m in (case.before, case.after))
    assert changed(case) == [0]
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after)) == 1
    assert "add(" not in case.after[0]["content"]
    assert "to_morse(" in case.after[0]["content"]
    newcomer = next(b for a, b in zip(before, after) if a != b).partition("(")[0]
    assert newcomer not in catalogue.family("add")
    answers = ("I have no function for that.", call("add", a=12, b=7), call(newcomer, a=12))
    assert [case.outcome(t) for t in answers] == FOLLOWS
    assert case.valid(call("add", a=1))
    assert not case.valid(call("to_morse", word="a"))

    case = counterfactuals.tool_renamed(DIGITS)
    assert "sum_digit(n: integer)" in case.after[0]["content"]
    assert "digit_sum(" not in case.after[0]["content"]
    assert [case.outcome(call(n, n=195)) for n in ("sum_digit", "digit_sum", "add")] == FOLLOWS
    assert "add_it(" in counterfactuals.tool_renamed(ADD).after[0]["content"]

    probe = {
        "messages": [{"role": "user", "content": "Write f()."}],
        "asked": "code",
        "tools_present": False,
    }
    case = counterfactuals.tools_on(probe, 0, RNG)
    assert [m["role"] for m in case.after] == ["system", "user"]
    assert "Functions:" in case.after[0]["content"]
    assert case.valid("def f():\n    pass")
    assert not case.valid("No.")
    assert [case.outcome(t) for t in ("def f(): pass", call("add"), "No.")] == FOLLOWS


def test_a_swapped_value_must_be_carried_over_with_its_type() -> None:
    others = [
        DIGITS,
        problem("digit_sum", {"n": 41}, "Digit sum of 41?"),
        problem("digit_sum", {"n": 1.5}, "1.5"),
    ]
    case = counterfactuals.value_swapped(DIGITS, others, RNG)
    assert case.after[-1]["content"] == "Digit sum of 41?"
    assert changed(case) == [1]
    assert case.valid(call("digit_sum", n=195))
    assert not case.valid(call("digit_sum", n=19))
    found = [case.outcome(call("digit_sum", n=n)) for n in (41, 195, "41", 5)] + [
        case.outcome(call("add", n=41))
    ]
    assert found == [*FOLLOWS, "other", "other"]
    for kept, donor in (  # it stands twice, is part of another, or nobody else asks for this tool
        (
            problem("add", {"a": 1, "b": 1}, "Add 1 and 1."),
            problem("add", {"a": 5, "b": 6}, "Add 5 and 6."),
        ),
        (problem("digit_sum", {"n": 9}, "Digit sum of 195?"), others[1]),
        (DIGITS, DIGITS),
    ):
        assert counterfactuals.value_swapped(kept, [donor], RNG) is None


def test_only_cases_that_behaved_before_count_towards_a_flip() -> None:
    case = counterfactuals.tools_off(ADD, RNG)
    before = [call("add"), call("add"), "No.", call("add")]
    after = ["No.", call("add"), "No.", "No."]
    row, other = counterfactuals.flips([case] * 4, before, after)[:2]
    assert (row["asked"], row["n"], row["other"]) == (4, 3, 0)
    assert (row["follows"], row["ignores"]) == pytest.approx((2 / 3, 1 / 3))
    assert row["follows/lo"] < row["follows"] < row["follows/hi"]
    assert other == dict(swap="tools_on", asked=0, n=0)


def test_the_command_leaves_a_row_per_checkpoint_and_swap(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    make_run("tiny", "gpt2:512", block_size=384)
    write_rows(
        tmp_path / "funcall.test.jsonl", map(row_of, problems.draw("test", 12, shares={"call": 1}))
    )
    write_rows(tmp_path / "probes.test.jsonl", problems.probes("test", 10, 0, ["Write `f()`."]))
    counterfactuals.main(
        ["--ckpt", "tiny", "--data-dir", str(tmp_path), "--limit", "2", "--max-new-tokens", "4"]
    )
    run = Run.open("swaps")
    rows = run.evals()
    assert run.status["status"] == "finished"
    assert list(rows["swap"]) == list(counterfactuals.SWAPS)
    assert set(rows["checkpoint"]) == {"tiny@1"}
    # new weights call nothing
    assert list(rows["asked"]) == [2] * 5
    assert not rows["n"].any()


def test_supervised_tokens_are_counted_as_training_sees_them(home: Path) -> None:
    import supervised_tokens

    messages = [
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": "one two three four"},
    ]
    write_rows(home / "rows.jsonl", [{"messages": messages}])
    mask = chat.render(messages, tokenizer.load("gpt2:512"), "text").loss_mask
    cut = (
        mask.index(1) + 3
    )  # a row of so many ids predicts two of the answer's tokens beside the first
    for limit, kept in ((10_000, sum(mask)), (cut, 3)):
        words = (
            f"--files calls={home / 'rows.jsonl'} --tokenizer gpt2:512 --limit {limit} --overwrite"
        )
        supervised_tokens.main(words.split())
        row = Run.open("supervision").evals().iloc[0]
        assert (row["supervised"], row["supervised_uncut"], row["cut"]) == (
            kept,
            sum(mask),
            limit < len(mask),
        )
