"""What a shell offers at a tab."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codechat import cli, completion
from codechat.core.registry import COMMANDS
from codechat.runs.run import Run


def test_the_first_word_is_a_command() -> None:
    assert completion.candidates("codechat ") == sorted(COMMANDS)
    assert completion.candidates("codechat eval") == ["evaluate"]


def test_a_word_behind_a_command_is_one_of_its_settings() -> None:
    assert completion.candidates("codechat grpo --group") == ["--group-size"]


def test_a_value_is_one_of_the_choices_of_its_setting() -> None:
    assert completion.candidates("codechat sft --schedule ") == ["constant", "cosine", "wsd"]
    assert completion.candidates("codechat sft --resume t") == ["true"]


def test_several_values_have_the_choices_of_one() -> None:
    assert completion.candidates("codechat evaluate --split te") == ["test", "test_hard"]


def test_a_preset_is_one_of_the_commands_presets() -> None:
    assert completion.candidates("codechat grpo --preset to") == ["toy"]


def test_a_run_is_one_of_those_that_exist(home: Path) -> None:
    Run.create("mine", {}, kind="sft").finish()
    assert "mine" in completion.candidates("codechat sft --init-from mi")


def test_data_is_followed_by_a_kind() -> None:
    assert completion.candidates("codechat data co") == ["code", "corpus"]
    assert completion.candidates("codechat data corpus --max-tok") == ["--max-tokens"]


@pytest.mark.parametrize("line", ["codechat nothing --", 'codechat chat "a', "codechat"])
def test_what_is_not_known_offers_nothing_of_its_own(line: str) -> None:
    assert set(completion.candidates(line)) <= set(COMMANDS)


def test_an_unknown_shell_is_refused_with_those_that_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "required: one of bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_with_the_printed_line(tmp_path: Path) -> None:
    command = tmp_path / "codechat"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m codechat "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(codechat completion bash)"
    complete -p codechat
    COMP_LINE="codechat xr" COMP_POINT=11 codechat completion candidates codechat xr codechat
    """
    shown = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert shown.stdout.splitlines()[-1] == "xray"
    assert "completion candidates" in shown.stdout
