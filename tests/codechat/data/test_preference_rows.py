"""Preferences in files: what the policy answers, and what cannot be one."""

from pathlib import Path
from typing import Any

import pytest
from jsonl import rows_of, write

from codechat.core.errors import DataError, MissingFile
from codechat.rl.rollout import RolloutBatch
from codechat.text import chat, tokenizer
from codechat.training import preferences

BYTES = tokenizer.load("bytes")


def read(folder: Path, rows: list[dict], block: int = 1 << 16) -> RolloutBatch:
    write(folder / "preferences.train.jsonl", rows)
    return preferences.read_preferences(folder, "train", BYTES, "reserved", block)


# rows whose answers are yes and no, with the messages that they answer; and changes after which
# PAIR is no pair
LINES = rows_of(Path(__file__).with_name("preferences.jsonl"))
READ = [line for line in LINES if "row" in line]
CHANGES = [line["change"] for line in LINES if "change" in line]
PAIR = {"prompt": "u1", "chosen": "yes", "rejected": "no"}
SINGLE = {"prompt": "u1", "completion": "yes", "label": True}


@pytest.mark.parametrize("case", READ)
def test_the_prompt_is_everything_before_the_last_answer(
    case: dict[str, Any], tmp_path: Path
) -> None:
    batch = read(tmp_path, [case["row"]])
    assert [problem.messages for problem in batch.problems] == [case["messages"]]
    assert batch.prompts == [chat.prompt(case["messages"], BYTES)]


@pytest.mark.parametrize("case", READ)
def test_the_liked_answer_has_the_reward_1_and_the_other_0(
    case: dict[str, Any], tmp_path: Path
) -> None:
    batch = read(tmp_path, [case["row"]])
    texts = ["yes" if reward else "no" for reward in batch.rewards.flatten()]
    expected = [chat.completion_ids(text, BYTES) for text in texts]
    assert [completion.ids for completion in batch.completions] == expected


def refused(folder: Path, first: dict[str, Any], second: dict[str, Any], words: str) -> None:
    """The second of two rows is named in one line."""
    with pytest.raises(DataError, match=rf"preferences.train.jsonl:2\b{words}.*\Z"):
        read(folder, [first, second], block=64)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_row_that_is_no_pair_is_named_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    refused(tmp_path, PAIR, PAIR | change, "")


def test_pairs_and_labels_are_not_mixed(tmp_path: Path) -> None:
    refused(tmp_path, PAIR, SINGLE, ".*pair")
    refused(tmp_path, SINGLE, PAIR, ".*pair")


def test_a_pair_without_its_other_answer_is_named(tmp_path: Path) -> None:
    refused(tmp_path, PAIR, {"prompt": "u1", "chosen": "yes"}, ".*rejected")


@pytest.mark.parametrize("label", ["good", "true", "1", -1, 2, 1.0, 0.5, [1], {}, None], ids=str)
def test_a_label_that_is_not_true_or_false_is_named(label: object, tmp_path: Path) -> None:
    refused(tmp_path, SINGLE, SINGLE | {"label": label}, ".*label.*true")


def test_a_directory_without_preferences_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="preferences.train.jsonl"):
        preferences.read_preferences(tmp_path / "none", "train", BYTES, "reserved", 64)


SAME = PAIR | {"rejected": "yes"}
LONG = PAIR | {"prompt": "u" * 70}


def test_a_row_that_teaches_nothing_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(read(tmp_path, [SAME, PAIR, LONG, SAME], block=64).problems) == 1
    assert "2 with equal answers, 1 longer than 64 tokens" in capsys.readouterr().err


def test_rows_of_which_none_teaches_anything_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row"):
        read(tmp_path, [SAME, LONG], block=64)


PUBLIC = rows_of(Path(__file__).with_name("public_preferences.jsonl"))


@pytest.mark.parametrize("case", PUBLIC, ids=lambda case: case["form"])
def test_preferences_of_a_public_form_keep_their_calls_and_offer_their_tools(
    case: dict[str, Any], tmp_path: Path
) -> None:
    batch = read(tmp_path, [case["row"]])
    assert batch.problems[0].messages == case["messages"]
    answers = [chat.completion_ids(answer, BYTES) for answer in case["answers"]]
    assert [completion.ids for completion in batch.completions] == answers


def test_a_liked_answer_whose_call_cannot_be_read_is_named(tmp_path: Path) -> None:
    row = PUBLIC[1]["row"]
    turned = row | {
        "chosen_response": row["rejected_response"],
        "rejected_response": row["chosen_response"],
    }
    with pytest.raises(DataError, match="preferences.train.jsonl:1 .*unreadable_call"):
        read(tmp_path, [turned])


def test_context_that_a_prompt_of_messages_does_not_hold_is_named(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "Even?"}],
        "context": "7",
        "chosen": "no",
        "rejected": "yes",
    }
    with pytest.raises(DataError, match="preferences.train.jsonl:1 .*context_beside_messages"):
        read(tmp_path, [row])


def test_the_sample_of_when2call_is_read_whole(shared_rows: Path, tmp_path: Path) -> None:
    rows = rows_of(shared_rows / "When2Call.jsonl")
    assert len(read(tmp_path, rows).problems) == len(rows)


@pytest.mark.parametrize(
    "name, group_size",
    [
        ("dpo_en_demo", 2),
        ("kto_prompt_completion_label", 1),
        ("raschka_instruction_preference", 2),
    ],
)
def test_public_preferences_are_read_whole(
    name: str, group_size: int, shared_data: Path, tmp_path: Path
) -> None:
    rows = rows_of(shared_data / "preference" / f"{name}.jsonl")[:100]
    batch = read(tmp_path, rows)
    assert len(batch.problems) == len(rows)
    assert batch.group_size == group_size
