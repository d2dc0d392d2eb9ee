"""What a loop says at its end."""

from pathlib import Path
from typing import Any

import pytest

from codechat import cli
from codechat.runs.closing import closing_lines, next_command, reached, stopped_lines
from codechat.runs.run import Run


def run_with(
    evaluations: list[dict[str, Any]],
    steps: list[dict[str, Any]] = [],
    kind: str = "sft",
    **settings: Any,
) -> Run:
    with Run.create("mine", settings, kind=kind) as run:
        for step, values in enumerate(steps):
            run.log(step, values)
        for step, values in enumerate(evaluations):
            run.log_eval(step, values)
    return run


def test_held_out_losses_are_those_of_each_domain(home: Path) -> None:
    run = run_with(
        [
            {"heldout_loss/calls": 7.25, "heldout_loss/chat": 8.1},
            {"heldout_loss/calls": 1.71, "heldout_loss/chat": 4.5},
        ]
    )
    assert reached(run) == "held-out loss calls 7.25 before, 1.71 now, chat 8.1 before, 4.5 now"


def test_right_answers_are_told_rather_than_rewards(home: Path) -> None:
    run = run_with([{"reward_mean": 0.4, "pass@1": 0.25}, {"reward_mean": 0.6, "pass@1": 0.5}])
    assert reached(run) == "right answers 0.25 before, 0.5 now"


def test_an_interval_is_told_with_its_value(home: Path) -> None:
    evaluation = {"pass@1": 0.5, "pass@1/lo": 0.4, "pass@1/hi": 0.625}
    assert reached(run_with([evaluation])) == "right answers 0.5 [0.4, 0.625]"


def test_right_answers_come_with_their_number_of_problems(home: Path) -> None:
    run = run_with([{"pass@1": 0.0, "n_problems": 1}, {"pass@1": 1.0, "n_problems": 1}])
    assert reached(run) == "right answers 0 before, 1 now (problems: 1)"


def test_a_loop_that_was_interrupted_ends_with_the_command_that_continues_it(home: Path) -> None:
    run = run_with([])
    run.stop("interrupted at step 2; continue with --resume")
    why, how = stopped_lines(run, "sft").splitlines()
    assert why == "mine: interrupted at step 2; continue with --resume"
    assert how == f"  next: codechat sft --config {run.path}/config.json --resume"


def test_a_loop_that_learned_nothing_ends_with_its_reason_alone(home: Path) -> None:
    run = run_with([])
    run.stop("DEAD for 5 steps in a row")
    assert stopped_lines(run, "grpo") == "mine: DEAD for 5 steps in a row"


def test_splits_are_not_compared_with_each_other(home: Path) -> None:
    run = run_with([{"split": "select", "pass@1": 0.25}, {"split": "test", "pass@1": 0.75}])
    assert reached(run) == "right answers 0.25"


def test_without_evaluations_the_reward_of_training_is_told(home: Path) -> None:
    run = run_with([], steps=[{"reward_mean": 0.1}, {"reward_mean": 0.3}])
    assert reached(run) == "reward in training 0.1 at the first step, 0.3 at the last"


def test_after_rl_the_next_command_compares_with_the_start(home: Path) -> None:
    run = run_with([], kind="grpo", task="toy", init_from="base")
    assert next_command(run, {}) == "codechat evaluate --ckpt base mine --task toy"


def test_after_pretraining_comes_sft(home: Path) -> None:
    run = run_with([], kind="pretrain")
    assert next_command(run, {}) == "codechat sft --init-from mine --data-dir DIR"


def test_a_library_alone_does_not_offer_a_chat(home: Path) -> None:
    run = run_with([])
    assert next_command(run, {"chat": 1}) == "codechat chat --ckpt mine"
    assert next_command(run, {}) == "codechat evaluate --ckpt mine --task TASK"


def test_a_run_that_learned_calls_alone_is_offered_functions(home: Path) -> None:
    commands = {"chat": 1, "tools": 1}
    calls = run_with([{"heldout_loss/calls": 0.5}])
    assert next_command(calls, commands) == "codechat tools --ckpt mine --tools FILE.py"


def test_a_run_that_learned_code_too_is_offered_a_chat(home: Path) -> None:
    run = run_with([{"heldout_loss/calls": 0.5, "heldout_loss/code": 0.5}])
    assert next_command(run, {"chat": 1, "tools": 1}) == "codechat chat --ckpt mine"


def test_the_lines_say_where_the_run_lies(home: Path) -> None:
    run = run_with([])
    assert str(run.path) in closing_lines(run, {})
    assert "nothing was evaluated" in closing_lines(run, {})


def test_a_loop_ends_with_these_lines(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "grpo --preset toy --max-steps 1 --eval-every 0 --run-name toy-grpo"
    assert cli.main(words.split()) == 0
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last[0].startswith("toy-grpo: finished after 1 steps; ")
    assert last[2] == "  next: codechat evaluate --ckpt toy-grpo --task toy"
