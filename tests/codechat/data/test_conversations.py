"""Conversations: what is read, what carries loss, what shares a row, and how domains are mixed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonl import write

from codechat.core.errors import DataError, MissingFile
from codechat.data import conversations
from codechat.data.conversations import Example, PackedLoader
from codechat.text import chat, tokenizer
from codechat.training.session import Prefetched

BYTES = tokenizer.load("bytes")


def talk(question: str, answer: str, domain: str = "chat") -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": "x", "messages": messages, "domain": domain, "meta": {}}


def numbered(
    lengths: list[int], domain: str = "chat", supervised: int | None = None
) -> list[Example]:
    """Conversation k holds the ids 1000 k, 1000 k + 1, ...; its last `supervised` tokens
    (default: half) carry loss."""
    ids = [np.arange(1000 * k, 1000 * k + n, dtype=np.int32) for k, n in enumerate(lengths, 1)]
    masks = [np.arange(n) >= n - (supervised or max(1, n // 2)) for n in lengths]
    return [Example(some, mask, domain) for some, mask in zip(ids, masks)]


def random_lengths(seed: int, low: int, high: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, n).tolist()


def ids_by_row(batch: conversations.Batch) -> list[list[int]]:
    """Ids of each packed conversation, in the order of rows."""
    rows = zip(batch.ids, batch.docs, strict=True)
    return [ids[docs == d].tolist() for ids, docs in rows for d in range(int(docs.max()) + 1)]


def encoded(row, tags="reserved", block=64):
    return conversations.encode(row, BYTES, tags, block)


@pytest.mark.parametrize("tags", ["reserved", "text"])
def test_only_the_assistants_body_and_its_closing_tag_carry_loss(tags):
    example = encoded(talk("2 < 3 | end?", "if a < b | end:\n    pass"), tags, block=512)
    (batch,) = conversations.held_out([example], 1, 8)
    supervised = batch.targets[0][batch.targets[0] >= 0].tolist()
    assert chat.decode(supervised, BYTES) == "if a < b | end:\n    pass\n<|end|>"
    assert batch.supervised == example.supervised == len(supervised)


@pytest.mark.parametrize(
    "row, tags, reason",
    [
        (talk("hi", "x" * 100), "reserved", "too_long"),
        (
            talk("hi", "x") | {"messages": [{"role": "user", "content": "hi"}]},
            "reserved",
            "no_assistant",
        ),
        (talk("hi", "  \n"), "reserved", "no_assistant"),
        (talk("<|end|>", "x"), "text", "tag_in_content"),
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(row, tags, reason):
    assert encoded(row, tags) == reason


def test_a_conversation_may_fill_the_block():
    n = len(encoded(talk("hi", "x")).ids)
    assert isinstance(encoded(talk("hi", "x"), block=n), Example)
    assert encoded(talk("hi", "x"), block=n - 1) == "too_long"


def test_the_original_projects_files_are_read(tmp_path):
    path = write(
        tmp_path / "train.jsonl", [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}]
    )
    (batch,) = conversations.held_out(
        [conversations.encode(*conversations.read(path), BYTES, "text", 16)], 1, 3
    )
    assert batch.ids.tolist() == [[5, 6, 7]]
    assert batch.targets.tolist() == [[-100, 7, 8]]
    with pytest.raises(DataError, match="999"):
        conversations.encode(
            {"input_ids": [5, 999], "labels": [5, 999], "domain": "x"},
            BYTES,
            "text",
            16,
        )
    turns = [{"role": role, "content": role} for role in ("user", "tool", "assistant")]
    rows = [{"source": s, "conversations": turns} for s in ("code", "funcall", "negative")]
    rows = list(conversations.read(write(path, rows)))
    assert [row["domain"] for row in rows] == ["code", "calls", "code"]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "function", "assistant"]


def test_a_bad_line_is_named_with_its_file(tmp_path):
    for line in Path(__file__).with_name("bad_lines.txt").read_text().splitlines():
        path = write(tmp_path / "x.jsonl", [talk("a", "b")])
        path.write_text(path.read_text() + line)
        with pytest.raises(DataError, match=r"\A\S*x.jsonl:2\b.*\Z"):
            list(conversations.read(path))


@pytest.mark.parametrize("chunk", [64, 5])  # 5: in processes, where there are several cores
def test_load_domains_reads_the_conversations_that_the_mix_has_and_no_problems(
    tmp_path,
    capsys,
    monkeypatch,
    chunk,
):
    monkeypatch.setattr(conversations, "CHUNK", chunk)
    write(
        tmp_path / "calls.train.jsonl",
        [talk("a", "b", "calls")] * 30 + [talk("a", "b" * 200, "calls")],
    )
    write(tmp_path / "code.train.jsonl", [talk("c", "d", "code")] * 3)
    write(
        tmp_path / "funcall.train.jsonl",
        [{"id": "p", "messages": [], "gold": None, "split": "train"}],
    )
    write(
        tmp_path / "probes.train.jsonl", [{"messages": [], "asked": "code", "tools_present": True}]
    )

    def counts(**how) -> dict[str, int]:
        domains = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64, **how)
        return {name: len(rows) for name, rows in domains.items()}

    assert counts() == {"calls": 30, "code": 3}
    assert (
        "calls.train.jsonl: 30 conversations, dropped too_long 1 (block 64)"
        in capsys.readouterr().err
    )
    assert counts(limit=2) == {"calls": 2, "code": 2}
    write(tmp_path / "long.train.jsonl", [talk("q", "x" * 200, "long")] * 10)
    with pytest.raises(DataError, match="too_long"):
        counts()
    assert counts(wanted={"code": 1.0, "long": 0.0}) == {"code": 3}
    with pytest.raises(DataError, match="(?=.*cdoe)(?=.*calls)(?=.*code)"):
        counts(wanted={"cdoe": 1.0, "code": 1.0})


def test_preferences_in_the_folder_are_no_conversations(tmp_path):
    write(tmp_path / "chat.train.jsonl", [{"prompt": "Two?", "completion": "2"}])
    write(
        tmp_path / "preferences.train.jsonl",
        [{"prompt": "Two?", "completion": "3", "label": False}],
    )
    domains = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)
    assert {name: len(rows) for name, rows in domains.items()} == {"chat": 1}
    (tmp_path / "chat.train.jsonl").unlink()
    with pytest.raises(MissingFile, match="no conversations"):
        conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)


@pytest.mark.parametrize("column", ["label", "kto_tag"])
@pytest.mark.parametrize("label", [False, 0, 0.0, -1, "False", "false", "0"])
def test_an_answer_with_the_label_false_is_named_wherever_it_lies(tmp_path, label, column):
    row = {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "3"}]}
    write(tmp_path / "chat.train.jsonl", [row | {column: True}, row | {column: label}])
    with pytest.raises(DataError, match="chat.train.jsonl:2 .*label"):
        conversations.load_domains(tmp_path, "train", BYTES, "reserved", 4096)


def test_a_packed_row_holds_whole_conversations_with_own_positions_and_targets():
    batch = conversations.held_out(numbered([5, 4, 3]), 1, 10)[0]
    # lengths in the row are 4 + 3 + 2 (a last token is only a target), one position is padding
    assert batch.ids.tolist() == [[1000, 1001, 1002, 1003, 2000, 2001, 2002, 3000, 3001, 0]]
    assert batch.targets.tolist() == [[-100, -100, 1003, 1004, -100, 2002, 2003, -100, 3002, -100]]
    assert batch.docs.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 0]]
    assert batch.domains.tolist() == [[0] * 9 + [-1]]


def test_the_mask_is_causal_within_a_conversation_and_padding_sees_itself():
    mask = conversations.packed_mask(torch.tensor([[0, 0, 1, 1, -1, -1]])).mask
    expected = ["x.....", "xx....", "..x...", "..xx..", "....x.", ".....x"]
    assert ["".join(".x"[int(v)] for v in row) for row in mask[0, 0]] == expected


def test_held_out_holds_every_conversation_once_and_grows_to_the_longest():
    examples = numbered([5, 9, 30, 4, 12, 7])
    batches = conversations.held_out(examples, 2, 16)
    assert {b.ids.shape[1] for b in batches} == {29}
    assert sorted(sum(map(ids_by_row, batches), [])) == sorted(
        e.ids[:-1].tolist() for e in examples
    )
    assert sum(b.supervised for b in batches) == sum(e.supervised for e in examples)


def test_one_epoch_draws_every_conversation_once_into_rows_filled_above_95_percent():
    loader = PackedLoader({"chat": numbered(random_lengths(0, 3, 30, 600))}, None, 1, 64)
    seen = []
    while loader.drawn[0] < 600 or len(seen) < 300:
        seen += [ids[0] for ids in ids_by_row(loader.next())]
    assert len(set(seen[:300])) == 300
    assert set(seen) <= {1000 * k for k in range(1, 601)}
    assert loader.epochs["chat"] >= 1
    lengths = np.random.default_rng(1).lognormal(4.4, 0.7, 2000).clip(8, 500).astype(int)
    loader = PackedLoader({"chat": numbered(lengths.tolist())}, None, 8, 512)
    assert np.mean([(loader.next().docs < 0).float().mean().item() for _ in range(50)]) < 0.05


def test_domains_are_mixed_by_supervised_tokens():
    examples = {
        "calls": numbered(random_lengths(2, 60, 200, 300), "calls", supervised=20),
        "code": numbered(random_lengths(3, 40, 120, 200), "code"),
        "chat": numbered(random_lengths(4, 8, 20, 50), "chat", supervised=4),
    }
    weights = {"calls": 0.6, "code": 0.3, "chat": 0.1}
    loader = PackedLoader(examples, weights, 8, 256, seed=1)
    totals = np.zeros(3)
    for batch in (loader.next() for _ in range(300)):
        totals += np.bincount(batch.domains[batch.targets >= 0].numpy(), minlength=3)
    shares = dict(zip(loader.domains, totals / totals.sum(), strict=True))
    assert all(abs(shares[name] - weight) < 0.02 for name, weight in weights.items()), shares


def test_a_mix_given_in_rows_is_one_in_rows():
    """Rows of calls and programs as 5.6 to 1 although a program has five times the tokens: what
    concatenating does."""
    examples = {
        "calls": numbered([40] * 300, "calls", supervised=10),
        "programs": numbered([80] * 100, "programs", supervised=50),
        "chat": numbered([9] * 9),
    }
    weights = conversations.token_weights(examples, {"calls": 5.6, "programs": 1.0})
    assert weights["calls"] / weights["programs"] == pytest.approx(5.6 / 5)
    loader = PackedLoader(examples, weights, 8, 256)
    for _ in range(100):
        loader.next()
    assert loader.drawn[0] / loader.drawn[1] == pytest.approx(5.6, rel=0.05)
    with pytest.raises(DataError, match="'poems'.*--mix"):
        conversations.token_weights(examples, {"poems": 1.0})
    without = {"a": numbered([20] * 30, "a"), "b": numbered([20] * 10, "b")}
    assert PackedLoader(without, None, 1, 64).weights == [0.75, 0.25]  # the data's own shares
    assert PackedLoader(without, {"a": 1.0, "b": 0.0}, 1, 64).domains == ["a"]


def same_batches(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("beside", [False, True])
def test_state_resumes_bitwise_across_epochs(beside):
    """Also with the thread of a GPU, which has prepared batches that were not learned from."""
    mixed = {d: numbered(random_lengths(n, 5, 60, n), d) for d, n in (("a", 70), ("b", 30))}
    plain, *both = (PackedLoader(mixed, {"a": 2, "b": 1}, 4, 128, seed=7) for _ in range(3))
    loader, again = (Prefetched(each, torch.device("cpu"), 2, beside) for each in both)
    assert all(same_batches(loader.next(), plain.next()) for _ in range(9))
    again.load_state(json.loads(json.dumps(loader.state())))
    for a, b, c in ((loader.next(), again.next(), plain.next()) for _ in range(20)):
        assert same_batches(a, b)
        assert same_batches(b, c)
    assert again.state() == loader.state()
    fewer = {name: rows[:-1] for name, rows in mixed.items()}
    for other in (
        PackedLoader(mixed, None, 4, 128, seed=8),
        PackedLoader(fewer, None, 4, 128, seed=7),
    ):
        with pytest.raises(DataError, match="--seed"):
            other.load_state(loader.state())
