"""Preferences in files: what the policy answers, and what cannot be one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codechat.core.errors import DataError
from codechat.rl import preference_data
from codechat.rl.rollout import RolloutBatch
from codechat.text import chat, tokenizer

BYTES = tokenizer.load("bytes")


def read(folder: Path, rows: list[dict]) -> RolloutBatch:
    (folder / "preferences.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return preference_data.read_preferences(folder, "train", BYTES, "reserved", 1 << 16)


S, U1, A1, U2 = (
    {"role": role, "content": text}
    for role, text in (("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"))
)
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
G = {"from": "human", "value": "u1"}
# What is answered, and the rows that say so; the answers are YES and NO.
ANSWERED = [
    ([U1, A1, U2], dict(prompt=[U1], chosen=[A1, U2, YES], rejected=[A1, U2, NO])),
    ([U1, A1, U2], dict(prompt="u1", chosen=[A1, U2, YES], rejected=[U1, A1, U2, NO])),
    ([U1, A1, U2], dict(prompt=[U1, A1], chosen=[U2, YES], rejected=[U2, NO])),
    ([U1, A1, U2], dict(prompt=[U1, A1, U2], chosen="yes", rejected=[NO])),
    ([U1, A1, U2], dict(chosen=[U1, A1, U2, YES], rejected=[U1, A1, U2, NO])),
    ([S, U1], dict(prompt="u1", chosen=[S, U1, YES], rejected=[S, U1, NO])),
    ([S, U1], dict(prompt=[S, U1], chosen=[U1, YES], rejected="no")),
    ([S, U1], dict(prompt=[U1], system="s", chosen="yes", rejected="no")),
    ([U1], dict(prompt=None, conversations=[G], chosen={"from": "gpt", "value": "yes"}, rejected={"from": "gpt", "value": "no"})),
    ([U1], dict(instruction="u1", input="", output="yes", chosen="yes", rejected="no")),
    ([U1, A1, U2], dict(prompt=[U1], completion=[A1, U2, YES], label=True)),
    ([U1, A1, U2], dict(messages=[U1, A1, U2, YES], label=1)),
    ([U1], dict(prompt="u1", completion="no", label=0)),
    ([U1], dict(prompt="u1", completion=[NO], label=False)),
]  # fmt: skip


def test_the_prompt_is_everything_before_the_last_answer(tmp_path: Path) -> None:
    for messages, row in ANSWERED:
        batch = read(tmp_path, [row])
        assert [p.messages for p in batch.problems] == [messages]
        assert batch.prompts == [chat.prompt(messages, BYTES)]
        texts = [["no", "yes"][int(reward)] for reward in batch.rewards.flatten()]
        assert [c.ids for c in batch.completions] == [chat.completion_ids(text, BYTES) for text in texts]


PAIR = dict(prompt="u1", chosen="yes", rejected="no")
NO_PAIRS = [
    dict(chosen=[S, U1, YES], rejected=[U1, NO]),
    dict(chosen=[S, U1, YES]),
    dict(prompt=[S, U1], chosen=[S | {"content": "t"}, U1, YES]),
    dict(prompt=[U1], chosen=[A1, U2, YES], rejected=[A1, U2 | {"content": "u3"}, NO]),
    dict(prompt=[U1], chosen=[A1, U2, YES], rejected=[NO]),
    dict(chosen=[U2, YES], rejected=[U2, NO]),
    dict(prompt=[U1, A1], chosen=[YES], rejected=[NO]),
    dict(prompt=[U1, A1]),
    dict(prompt=[U1], chosen=[A1, YES], rejected=[A1, NO]),
    dict(prompt=[]),
    dict(prompt=None),
    dict(chosen=["yes"], rejected=["no"]),
    dict(chosen=[], rejected=[]),
    dict(chosen=[U1], rejected=[U1]),
    dict(prompt=[{"role": "boss", "content": "u"}]),
    dict(prompt=[{"content": "u"}]),
    dict(chosen=[{"role": "assistant", "content": None}]),
    dict(chosen=7),
    dict(chosen=None),
    dict(system=["s"]),
]


def test_a_row_that_is_no_pair_or_has_no_label_is_named_in_one_line(tmp_path: Path) -> None:
    single = dict(prompt="u1", completion="yes", label=True)
    wrong = [(PAIR, PAIR | change, "") for change in NO_PAIRS]
    labels = ("good", "true", "1", -1, 2, 1.0, 0.5, [1], {}, None)
    for first, second, words in [*wrong, *((single, single | {"label": label}, ".*label.*true") for label in labels)]:
        with pytest.raises(DataError, match=rf"preferences.train.jsonl:2\b{words}.*\Z"):
            read(tmp_path, [first, second])


def test_public_preferences_are_read_whole(shared_data: Path, tmp_path: Path) -> None:
    for name, n in (("dpo_en_demo", 2), ("kto_prompt_completion_label", 1), ("raschka_instruction_preference", 2)):
        lines = (shared_data / "preference" / f"{name}.jsonl").read_text().splitlines()[:100]
        batch = read(tmp_path, list(map(json.loads, lines)))
        assert len(batch.problems) == len(lines) and batch.group_size == n
