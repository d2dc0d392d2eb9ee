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
    examples = []
    for k, length in enumerate(lengths, 1):
        ids = np.arange(1000 * k, 1000 * k + length, dtype=np.int32)
        loss_mask = np.arange(length) >= length - (supervised or max(1, length // 2))
        examples.append(Example(ids, loss_mask, domain))
    return examples


def random_lengths(seed: int, low: int, high: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, n).tolist()


def ids_by_row(batch: conversations.Batch) -> list[list[int]]:
    """Ids of each packed conversation, in the order of rows."""
    found = []
    for ids, docs in zip(batch.ids, batch.docs, strict=True):
        for number in range(int(docs.max()) + 1):
            found.append(ids[docs == number].tolist())
    return found


def encoded(row, tags="reserved", block=64):
    return conversations.encode(row, BYTES, tags, block)


def load(folder, block=64, limit=None, wanted=None):
    """Conversations by domain, as SFT loads them."""
    return conversations.load_domains(
        folder, "train", BYTES, "reserved", block, limit=limit, wanted=wanted
    )


def sizes(domains):
    return {name: len(rows) for name, rows in domains.items()}


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


def test_the_original_projects_labels_become_targets(tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    (read,) = conversations.read(write(tmp_path / "train.jsonl", [row]))
    example = conversations.encode(read, BYTES, "text", 16)
    (batch,) = conversations.held_out([example], 1, 3)
    assert batch.ids.tolist() == [[5, 6, 7]]
    assert batch.targets.tolist() == [[-100, 7, 8]]


def test_an_id_outside_the_vocabulary_is_named():
    row = {"input_ids": [5, 999], "labels": [5, 999], "domain": "x"}
    with pytest.raises(DataError, match="999"):
        conversations.encode(row, BYTES, "text", 16)


def test_the_original_projects_sources_and_roles_get_our_names(tmp_path):
    turns = [{"role": role, "content": role} for role in ("user", "tool", "assistant")]
    rows = [{"source": s, "conversations": turns} for s in ("code", "funcall", "negative")]
    read = list(conversations.read(write(tmp_path / "train.jsonl", rows)))
    assert [row["domain"] for row in read] == ["code", "calls", "code"]
    assert [m["role"] for m in read[0]["messages"]] == ["user", "function", "assistant"]


def test_a_bad_line_is_named_with_its_file(tmp_path):
    for line in Path(__file__).with_name("bad_lines.txt").read_text().splitlines():
        path = write(tmp_path / "x.jsonl", [talk("a", "b")])
        path.write_text(path.read_text() + line)
        with pytest.raises(DataError, match=r"\A\S*x.jsonl:2\b.*\Z"):
            list(conversations.read(path))


@pytest.fixture(params=[64, 5])  # 5: in processes, where there are several cores
def folder(request, tmp_path, monkeypatch):
    """Thirty short conversations with calls and one too long, three with code, a problem and a
    probe."""
    monkeypatch.setattr(conversations, "CHUNK", request.param)
    calls = [talk("a", "b", "calls")] * 30
    write(tmp_path / "calls.train.jsonl", [*calls, talk("a", "b" * 200, "calls")])
    write(tmp_path / "code.train.jsonl", [talk("c", "d", "code")] * 3)
    problem = {"id": "p", "messages": [], "gold": None, "split": "train"}
    write(tmp_path / "funcall.train.jsonl", [problem])
    probe = {"messages": [], "asked": "code", "tools_present": True}
    write(tmp_path / "probes.train.jsonl", [probe])
    return tmp_path


def test_load_domains_reads_conversations_and_no_problems(folder, capsys):
    assert sizes(load(folder)) == {"calls": 30, "code": 3}
    dropped = "calls.train.jsonl: 30 conversations, dropped too_long 1 (block 64)"
    assert dropped in capsys.readouterr().err


def test_load_domains_reads_no_more_of_a_domain_than_the_limit(folder):
    assert sizes(load(folder, limit=2)) == {"calls": 2, "code": 2}


def test_a_domain_without_a_usable_conversation_raises_where_the_mix_has_it(folder):
    write(folder / "long.train.jsonl", [talk("q", "x" * 200, "long")] * 10)
    with pytest.raises(DataError, match="too_long"):
        load(folder)
    assert sizes(load(folder, wanted={"code": 1.0, "long": 0.0})) == {"code": 3}


def test_rows_in_the_place_of_prepared_data_come_with_the_command_that_prepares_them(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(DataError, match="codechat data calls --source .*rows.jsonl --out"):
        conversations.domain_files(tmp_path / "rows.jsonl", "train")


def test_files_of_the_split_that_are_not_read_are_named(folder, capsys):
    for name in ("more.train.jsonl.gz", "more.train.parquet", "train.json", "more.select.jsonl.gz"):
        (folder / name).write_bytes(b"")
    load(folder)
    said = "not read: more.train.jsonl.gz, more.train.parquet, train.json\n"
    assert said in capsys.readouterr().err


def test_an_unknown_domain_is_named_with_those_that_there_are(folder):
    with pytest.raises(DataError, match="(?=.*cdoe)(?=.*calls)(?=.*code)"):
        load(folder, wanted={"cdoe": 1.0, "code": 1.0})


def test_preferences_in_the_folder_are_no_conversations(tmp_path):
    write(tmp_path / "chat.train.jsonl", [{"prompt": "Two?", "completion": "2"}])
    preference = {"prompt": "Two?", "completion": "3", "label": False}
    write(tmp_path / "preferences.train.jsonl", [preference])
    assert sizes(load(tmp_path, block=4096)) == {"chat": 1}
    (tmp_path / "chat.train.jsonl").unlink()
    with pytest.raises(MissingFile, match="no conversations"):
        load(tmp_path, block=4096)


@pytest.mark.parametrize("column", ["label", "kto_tag"])
@pytest.mark.parametrize("label", [False, 0, 0.0, -1, "False", "false", "0"])
def test_an_answer_with_the_label_false_is_named_wherever_it_lies(tmp_path, label, column):
    row = talk("Two?", "3")
    write(tmp_path / "chat.train.jsonl", [row | {column: True}, row | {column: label}])
    with pytest.raises(DataError, match="chat.train.jsonl:2 .*label"):
        load(tmp_path, block=4096)


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
    wanted = [[mark == "x" for mark in row] for row in expected]
    assert mask[0, 0].bool().tolist() == wanted


def test_held_out_holds_every_conversation_once_and_grows_to_the_longest():
    examples = numbered([5, 9, 30, 4, 12, 7])
    batches = conversations.held_out(examples, 2, 16)
    assert {batch.ids.shape[1] for batch in batches} == {29}
    held = [ids for batch in batches for ids in ids_by_row(batch)]
    assert sorted(held) == sorted(example.ids[:-1].tolist() for example in examples)


def test_held_out_batches_count_their_supervised_tokens():
    examples = numbered([5, 9, 30, 4, 12, 7])
    batches = conversations.held_out(examples, 2, 16)
    assert sum(b.supervised for b in batches) == sum(e.supervised for e in examples)


def test_one_epoch_draws_every_conversation_once():
    loader = PackedLoader({"chat": numbered(random_lengths(0, 3, 30, 600))}, None, 1, 64)
    seen = []
    while loader.drawn[0] < 600 or len(seen) < 300:
        seen += [ids[0] for ids in ids_by_row(loader.next())]
    assert len(set(seen[:300])) == 300
    assert set(seen) <= {1000 * k for k in range(1, 601)}
    assert loader.epochs["chat"] >= 1


def test_rows_are_filled_above_95_percent():
    lengths = np.random.default_rng(1).lognormal(4.4, 0.7, 2000).clip(8, 500).astype(int)
    loader = PackedLoader({"chat": numbered(lengths.tolist())}, None, 8, 512)
    batches = [loader.next() for _ in range(50)]
    padding = [(batch.docs < 0).float().mean().item() for batch in batches]
    assert np.mean(padding) < 0.05


def test_domains_are_mixed_by_supervised_tokens():
    examples = {
        "calls": numbered(random_lengths(2, 60, 200, 300), "calls", supervised=20),
        "code": numbered(random_lengths(3, 40, 120, 200), "code"),
        "chat": numbered(random_lengths(4, 8, 20, 50), "chat", supervised=4),
    }
    weights = {"calls": 0.6, "code": 0.3, "chat": 0.1}
    loader = PackedLoader(examples, weights, 8, 256, seed=1)
    totals = np.zeros(3)
    for _ in range(300):
        batch = loader.next()
        totals += np.bincount(batch.domains[batch.targets >= 0].numpy(), minlength=3)
    shares = dict(zip(loader.domains, totals / totals.sum(), strict=True))
    for name, weight in weights.items():
        assert abs(shares[name] - weight) < 0.02, shares


@pytest.fixture
def long_programs():
    """Programs with five times the supervised tokens of calls."""
    return {
        "calls": numbered([40] * 300, "calls", supervised=10),
        "programs": numbered([80] * 100, "programs", supervised=50),
        "chat": numbered([9] * 9),
    }


def test_a_mix_given_in_rows_is_one_in_rows(long_programs):
    """Rows of calls and programs as 5.6 to 1: what concatenating does."""
    weights = conversations.token_weights(long_programs, {"calls": 5.6, "programs": 1.0})
    assert weights["calls"] / weights["programs"] == pytest.approx(5.6 / 5)
    loader = PackedLoader(long_programs, weights, 8, 256)
    for _ in range(100):
        loader.next()
    assert loader.drawn[0] / loader.drawn[1] == pytest.approx(5.6, rel=0.05)


def test_a_mix_with_an_unknown_domain_is_refused(long_programs):
    with pytest.raises(DataError, match="'poems'.*--mix"):
        conversations.token_weights(long_programs, {"poems": 1.0})


def test_without_a_mix_domains_keep_their_own_shares():
    examples = {"a": numbered([20] * 30, "a"), "b": numbered([20] * 10, "b")}
    assert PackedLoader(examples, None, 1, 64).weights == [0.75, 0.25]


def test_a_domain_of_weight_0_is_left_out():
    examples = {"a": numbered([20] * 30, "a"), "b": numbered([20] * 10, "b")}
    assert PackedLoader(examples, {"a": 1.0, "b": 0.0}, 1, 64).domains == ["a"]


def same_batches(a, b):
    return all(map(torch.equal, a, b))


@pytest.fixture
def mixed():
    return {
        "a": numbered(random_lengths(70, 5, 60, 70), "a"),
        "b": numbered(random_lengths(30, 5, 60, 30), "b"),
    }


def loader_of(mixed):
    return PackedLoader(mixed, {"a": 2, "b": 1}, 4, 128, seed=7)


@pytest.mark.parametrize("beside", [False, True])
def test_state_resumes_bitwise_across_epochs(beside, mixed):
    """Also with the thread of a GPU, which has prepared batches that were not learned from."""
    plain = loader_of(mixed)
    loader = Prefetched(loader_of(mixed), torch.device("cpu"), 2, beside)
    again = Prefetched(loader_of(mixed), torch.device("cpu"), 2, beside)
    for _ in range(9):
        assert same_batches(loader.next(), plain.next())
    again.load_state(json.loads(json.dumps(loader.state())))
    for _ in range(20):
        batch = loader.next()
        assert same_batches(batch, again.next())
        assert same_batches(batch, plain.next())
    assert again.state() == loader.state()


@pytest.mark.parametrize("beside", [False, True])
def test_a_state_of_other_data_or_another_seed_is_refused(beside, mixed):
    loader = Prefetched(loader_of(mixed), torch.device("cpu"), 2, beside)
    loader.next()
    state = loader.state()
    fewer = {name: rows[:-1] for name, rows in mixed.items()}
    for other in (
        PackedLoader(mixed, None, 4, 128, seed=8),
        PackedLoader(fewer, None, 4, 128, seed=7),
    ):
        with pytest.raises(DataError, match="--seed"):
            other.load_state(state)
