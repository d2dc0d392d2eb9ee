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
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat_lab.tasks.toolbox import catalogue, problems

RNG = random.Random(0)


def problem(name: str, arguments: dict, request: str, others: tuple[str, ...] = ()) -> Problem:
    system = tool_lists.tools_prompt([catalogue.TOOLS[t].schema for t in (*others, name)])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
    return Problem("p", messages, {"name": name, "arguments": arguments}, "test")


def call(name: str, **arguments: object) -> str:
    return tool_calls.format_call(name, arguments)


ADD = problem("add", {"a": 12, "b": 7}, "Add 12 and 7.", ("to_morse",))
DIGITS = problem("digit_sum", {"n": 195}, "Digit sum of 195?")
FOLLOWS = ["follows", "ignores", "other"]


def outcomes(case: counterfactuals.Case, *answers: str) -> list[str]:
    return [case.outcome(answer) for answer in answers]


def changed(case: counterfactuals.Case) -> list[int]:
    """Numbers of the messages that the swap changed."""
    assert len(case.before) == len(case.after)
    return [i for i, (a, b) in enumerate(zip(case.before, case.after)) if a != b]


def test_a_prompt_without_the_tool_asks_to_decline() -> None:
    case = counterfactuals.tools_off(ADD, RNG)
    assert changed(case) == [0]
    assert "add(" not in case.after[0]["content"]
    assert case.valid(call("add", a=1))
    assert not case.valid("No.")
    assert outcomes(case, "I cannot.", call("add", a=12, b=7), "```python\n1\n```") == FOLLOWS


def swapped_lines(case: counterfactuals.Case) -> list[tuple[str, str]]:
    """The lines of the list of tools that differ, before and after."""
    before = case.before[0]["content"].splitlines()
    after = case.after[0]["content"].splitlines()
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]


def test_a_swapped_tool_takes_the_place_of_one_and_cannot_serve_its_requests() -> None:
    case = counterfactuals.tool_swapped(ADD, RNG)
    assert changed(case) == [0]
    ((_, line),) = swapped_lines(case)
    assert "add(" not in case.after[0]["content"]
    assert "to_morse(" in case.after[0]["content"]
    assert line.partition("(")[0] not in catalogue.family("add")


def test_an_answer_follows_a_swapped_tool_by_declining() -> None:
    case = counterfactuals.tool_swapped(ADD, RNG)
    ((_, line),) = swapped_lines(case)
    newcomer = line.partition("(")[0]
    assert case.valid(call("add", a=1))
    assert not case.valid(call("to_morse", word="a"))
    declined = "I have no function for that."
    assert outcomes(case, declined, call("add", a=12, b=7), call(newcomer, a=12)) == FOLLOWS


def test_a_renamed_tool_must_be_called_by_its_new_name() -> None:
    case = counterfactuals.tool_renamed(DIGITS)
    assert "sum_digit(n: integer)" in case.after[0]["content"]
    assert "digit_sum(" not in case.after[0]["content"]
    answers = (call(name, n=195) for name in ("sum_digit", "digit_sum", "add"))
    assert outcomes(case, *answers) == FOLLOWS


def test_a_name_of_one_word_gets_a_second() -> None:
    assert "add_it(" in counterfactuals.tool_renamed(ADD).after[0]["content"]


def test_a_program_is_still_written_where_tools_are_offered() -> None:
    request = {"role": "user", "content": "Write f()."}
    probe = {"messages": [request], "asked": "code", "tools_present": False}
    case = counterfactuals.tools_on(probe, 0, RNG)
    assert [m["role"] for m in case.after] == ["system", "user"]
    assert "Functions:" in case.after[0]["content"]
    assert case.valid("def f():\n    pass")
    assert not case.valid("No.")
    assert outcomes(case, "def f(): pass", call("add"), "No.") == FOLLOWS


SUM_OF_41 = problem("digit_sum", {"n": 41}, "Digit sum of 41?")


def test_a_swapped_value_must_be_carried_over_with_its_type() -> None:
    fraction = problem("digit_sum", {"n": 1.5}, "1.5")
    case = counterfactuals.value_swapped(DIGITS, [DIGITS, SUM_OF_41, fraction], RNG)
    assert case.after[-1]["content"] == "Digit sum of 41?"
    assert changed(case) == [1]
    assert case.valid(call("digit_sum", n=195))
    assert not case.valid(call("digit_sum", n=19))
    answers = [call("digit_sum", n=n) for n in (41, 195, "41", 5)]
    found = outcomes(case, *answers, call("add", n=41))
    assert found == [*FOLLOWS, "other", "other"]


@pytest.mark.parametrize(
    ("kept", "donor"),
    [
        pytest.param(
            problem("add", {"a": 1, "b": 1}, "Add 1 and 1."),
            problem("add", {"a": 5, "b": 6}, "Add 5 and 6."),
            id="the value stands twice",
        ),
        pytest.param(
            problem("digit_sum", {"n": 9}, "Digit sum of 195?"),
            SUM_OF_41,
            id="the value is a part of another",
        ),
        pytest.param(DIGITS, DIGITS, id="no other problem has the tool"),
    ],
)
def test_a_value_that_cannot_be_swapped_makes_no_case(kept: Problem, donor: Problem) -> None:
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
    drawn = problems.draw("test", 12, shares={"call": 1})
    write_rows(tmp_path / "funcall.test.jsonl", map(row_of, drawn))
    write_rows(tmp_path / "probes.test.jsonl", problems.probes("test", 10, 0, ["Write `f()`."]))
    words = f"--ckpt tiny --data-dir {tmp_path} --limit 2 --max-new-tokens 4"
    counterfactuals.main(words.split())
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
    # a row of so many ids predicts two of the answer's tokens beside the first
    cut = mask.index(1) + 3
    files = f"--files calls={home / 'rows.jsonl'} --tokenizer gpt2:512 --overwrite"
    for limit, kept in ((10_000, sum(mask)), (cut, 3)):
        supervised_tokens.main([*files.split(), "--limit", str(limit)])
        row = Run.open("supervision").evals().iloc[0]
        assert row["supervised"] == kept
        assert row["supervised_uncut"] == sum(mask)
        assert row["cut"] == (limit < len(mask))
