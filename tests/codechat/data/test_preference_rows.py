"""Preferences in files: what the policy answers, and what cannot be one."""

from pathlib import Path

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
PAIR = dict(prompt="u1", chosen="yes", rejected="no")


def test_the_prompt_is_everything_before_the_last_answer(tmp_path: Path) -> None:
    for row, messages in (line.values() for line in LINES if "row" in line):
        batch = read(tmp_path, [row])
        assert [p.messages for p in batch.problems] == [messages]
        assert batch.prompts == [chat.prompt(messages, BYTES)]
        texts = [["no", "yes"][int(reward)] for reward in batch.rewards.flatten()]
        assert [c.ids for c in batch.completions] == [
            chat.completion_ids(text, BYTES) for text in texts
        ]


def test_a_row_that_is_no_pair_or_has_no_label_is_named_in_one_line(tmp_path: Path) -> None:
    single = dict(prompt="u1", completion="yes", label=True)
    wrong = [(PAIR, PAIR | line["change"], "") for line in LINES if "change" in line]
    wrong += [
        (PAIR, single, ".*pair"),
        (single, PAIR, ".*pair"),
        (PAIR, dict(prompt="u1", chosen="yes"), ".*rejected"),
    ]
    labels = ("good", "true", "1", -1, 2, 1.0, 0.5, [1], {}, None)
    for first, second, words in [
        *wrong,
        *((single, single | {"label": label}, ".*label.*true") for label in labels),
    ]:
        with pytest.raises(DataError, match=rf"preferences.train.jsonl:2\b{words}.*\Z"):
            read(tmp_path, [first, second], block=64)
    with pytest.raises(MissingFile, match="preferences.train.jsonl"):
        preferences.read_preferences(tmp_path / "none", "train", BYTES, "reserved", 64)


def test_a_row_that_teaches_nothing_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = PAIR | {"rejected": "yes"}
    long = PAIR | {"prompt": "u" * 70}
    assert len(read(tmp_path, [same, PAIR, long, same], block=64).problems) == 1
    assert "2 with equal answers, 1 longer than 64 tokens" in capsys.readouterr().err
    with pytest.raises(DataError, match="no row"):
        read(tmp_path, [same, long], block=64)


PUBLIC = rows_of(Path(__file__).with_name("public_preferences.jsonl"))


@pytest.mark.parametrize("case", PUBLIC, ids=[case["form"] for case in PUBLIC])
def test_preferences_of_a_public_form_keep_their_calls_and_offer_their_tools(
    case: dict, tmp_path: Path
) -> None:
    batch = read(tmp_path, [case["row"]])
    assert batch.problems[0].messages == case["messages"]
    assert [c.ids for c in batch.completions] == [
        chat.completion_ids(answer, BYTES) for answer in case["answers"]
    ]


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


def test_public_preferences_are_read_whole(shared_data: Path, tmp_path: Path) -> None:
    for name, n in (
        ("dpo_en_demo", 2),
        ("kto_prompt_completion_label", 1),
        ("raschka_instruction_preference", 2),
    ):
        rows = rows_of(shared_data / "preference" / f"{name}.jsonl")[:100]
        batch = read(tmp_path, rows)
        assert len(batch.problems) == len(rows)
        assert batch.group_size == n
