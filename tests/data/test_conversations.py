"""Conversations: what is read, what carries loss, what shares a row, and how domains are mixed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from codechat.core.errors import DataError
from codechat.data import conversations
from codechat.data.conversations import Example
from codechat.data.prefetch import Prefetched
from codechat.text import chat, tokenizer

BYTES = tokenizer.load("bytes")


def talk(question: str, answer: str, domain: str = "chat") -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": "x", "messages": messages, "domain": domain, "meta": {}}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(lengths: list[int], domain: str = "chat", supervised: int | None = None) -> list[Example]:
    """Conversation k holds the ids 1000 k, 1000 k + 1, ...; its last `supervised` tokens carry loss (default:
    half)."""
    made = []
    for k, n in enumerate(lengths, 1):
        mask = np.zeros(n, dtype=bool)
        mask[-(supervised or max(1, n // 2)) :] = True
        made.append(Example(np.arange(1000 * k, 1000 * k + n, dtype=np.int32), mask, domain))
    return made


def same(a: conversations.Batch, b: conversations.Batch) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("ids", "targets", "docs", "positions", "domains"))


def ids_by_row(batch: conversations.Batch) -> list[list[int]]:
    """Ids of each packed conversation, in the order of rows."""
    out = []
    for ids, docs in zip(batch.ids, batch.docs, strict=True):
        out += [ids[docs == d].tolist() for d in range(int(docs.max()) + 1)]
    return out


# ------------------------------------------------------------------ reading and encoding


@pytest.mark.parametrize("tags", ["reserved", "text"])
def test_only_the_assistant_body_and_its_closing_tag_become_targets(tags):
    row = talk("2 < 3 | end?", "if a < b | end:\n    pass")
    example = conversations.encode(row, BYTES, tags, 512)
    (batch,) = conversations.held_out([example], 1, 8)
    supervised = batch.targets[0][batch.targets[0] >= 0].tolist()
    assert chat.decode(supervised, BYTES) == "if a < b | end:\n    pass\n<|end|>"
    assert batch.supervised == example.supervised == len(supervised)


def test_reasons_for_leaving_a_row_out():
    encode = lambda row, tags="reserved", block=64: conversations.encode(row, BYTES, tags, block)  # noqa: E731
    assert encode(talk("hi", "x" * 100)) == "too_long"
    assert encode({**talk("hi", "x"), "messages": [{"role": "user", "content": "hi"}]}) == "no_assistant"
    assert encode(talk("hi", "  \n")) == "no_assistant"
    assert encode(talk("<|end|>", "x"), "text") == "tag_in_content"
    fits = encode(talk("hi", "x"))
    n = len(fits.ids)
    assert isinstance(encode(talk("hi", "x"), block=n), Example) and encode(talk("hi", "x"), block=n - 1) == "too_long"


def test_the_original_projects_ids_and_labels_are_read_as_they_are(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}])
    example = conversations.encode(next(conversations.read(path)), BYTES, "text", 16)
    (batch,) = conversations.held_out([example], 1, 3)
    assert batch.ids.tolist() == [[5, 6, 7]] and batch.targets.tolist() == [[-100, 7, 8]]
    with pytest.raises(DataError, match="999"):
        conversations.encode({"input_ids": [5, 999], "labels": [5, 999], "domain": "x"}, BYTES, "text", 16)


def test_the_original_projects_conversations_are_read_with_their_roles_and_domains(tmp_path):
    turns = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "a"},
    ]
    path = write(
        tmp_path / "train.jsonl",
        [{"source": s, "conversations": turns} for s in ("code", "funcall", "negative")],
    )
    rows = list(conversations.read(path))
    assert [row["domain"] for row in rows] == ["code", "calls", "code"]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "function", "assistant"]


BAD_LINES = {
    "": "x.jsonl",
    '{"messages": [{"role": "user", "cont': "x.jsonl:1",
    '{"prompt": "a", "completion": "b"}\n': r"x.jsonl:1 .*\['completion', 'prompt'\].*messages",
    "[1, 2]\n": "x.jsonl:1 .*list",
    '{"messages": "hi"}\n': "x.jsonl:1.*messages.*str",
    '{"messages": [{"role": "user"}]}\n': "x.jsonl:1.*role and content",
    '{"messages": [{"role": "boss", "content": "x"}]}\n': "x.jsonl:1.*'boss'",
    '{"messages": [{"role": ["user"], "content": "x"}]}\n': r"x.jsonl:1.*\['user'\]",
    '{"domain": {"a": 1}, "messages": []}\n': "x.jsonl:1.*domain",
    '{"source": ["code"], "messages": []}\n': "x.jsonl:1.*source",
    '{"source": 7, "messages": []}\n': "x.jsonl:1.*source",
    '{"input_ids": ["a"], "labels": ["a"]}\n': "x.jsonl:1.*input_ids",
    '{"input_ids": [1, 2], "labels": [1]}\n': "x.jsonl:1.*input_ids and labels",
    '{"input_ids": [1, 2], "labels": [2, -100]}\n': "x.jsonl:1.*label",
}


@pytest.mark.parametrize("text", BAD_LINES)
def test_a_bad_file_raises_with_its_name_and_line(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=BAD_LINES[text]):
        list(conversations.read(tmp_path / "x.jsonl"))


def test_load_domains_reads_conversations_and_leaves_problems_and_probes_alone(tmp_path, capsys):
    write(tmp_path / "calls.train.jsonl", [talk("a", "b", "calls")] * 30 + [talk("a", "b" * 200, "calls")])
    write(tmp_path / "code.train.jsonl", [talk("c", "d", "code")] * 3)
    write(tmp_path / "funcall.train.jsonl", [{"id": "p", "messages": [], "gold": None, "split": "train"}])
    write(tmp_path / "probes.train.jsonl", [{"messages": [], "asked": "code", "tools_present": True}])
    data = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64)
    assert {name: len(rows) for name, rows in data.items()} == {"calls": 30, "code": 3}
    assert "calls.train.jsonl: 30 conversations, dropped too_long 1 (block 64)" in capsys.readouterr().err
    limited = conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64, limit=2)
    assert {name: len(rows) for name, rows in limited.items()} == {"calls": 2, "code": 2}


# ------------------------------------------------------------------ packing


def test_a_packed_row_holds_whole_conversations_with_own_positions_and_targets():
    batch = conversations.held_out(numbered([5, 4, 3]), 1, 10)[0]
    # lengths in the row are 4 + 3 + 2 (a last token is only a target), one position is padding
    assert batch.ids.tolist() == [[1000, 1001, 1002, 1003, 2000, 2001, 2002, 3000, 3001, 0]]
    assert batch.targets.tolist() == [[-100, -100, 1003, 1004, -100, 2002, 2003, -100, 3002, -100]]
    assert batch.docs.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 0]]
    assert batch.domains.tolist() == [[0] * 9 + [-1]]


def test_the_mask_is_causal_within_a_conversation_and_padding_sees_itself_only():
    mask = conversations.packed_mask(torch.tensor([[0, 0, 1, 1, -1, -1]])).mask
    assert mask.shape == (1, 1, 6, 6) and mask.dtype == torch.bool
    want = ["x.....", "xx....", "..x...", "..xx..", "....x.", ".....x"]
    assert ["".join(".x"[int(v)] for v in row) for row in mask[0, 0]] == want


def test_packed_attention_equals_each_conversation_alone():
    examples = numbered([7, 5, 6])
    batch = conversations.held_out(examples, 1, 20)[0]
    torch.manual_seed(0)
    table = torch.randn(4000, 8)
    x = table[batch.ids]  # (1, T, D)
    packed = torch.nn.functional.scaled_dot_product_attention(
        x, x, x, attn_mask=conversations.packed_mask(batch.docs).mask[:, 0]
    )
    for k, ids in enumerate(ids_by_row(batch)):
        alone = table[torch.tensor(ids)][None]
        want = torch.nn.functional.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
        torch.testing.assert_close(packed[0][batch.docs[0] == k], want[0])


def test_held_out_holds_every_conversation_once_and_grows_to_the_longest():
    examples = numbered([5, 9, 30, 4, 12, 7])
    batches = conversations.held_out(examples, 2, 16)
    assert {b.ids.shape[1] for b in batches} == {29}
    assert sorted(sum(map(ids_by_row, batches), [])) == sorted(e.ids[:-1].tolist() for e in examples)
    assert sum(b.supervised for b in batches) == sum(e.supervised for e in examples)
    assert sum(map(len, map(ids_by_row, conversations.held_out(examples, 2, 16, limit=2)))) == 2


def test_one_epoch_draws_every_conversation_once():
    rng = np.random.default_rng(0)
    examples = numbered(rng.integers(3, 30, 600).tolist())
    loader = conversations.PackedLoader({"chat": examples}, None, 1, 64)
    seen = []
    while loader.drawn[0] < 600 or len(seen) < 300:
        seen += [ids[0] for ids in ids_by_row(loader.next())]
    first = [1000 * k for k in range(1, 601)]
    assert len(seen) >= 300 and len(set(seen[:300])) == 300 and set(seen) <= set(first)
    assert loader.epochs["chat"] >= 1


def test_rows_are_filled_above_95_percent():
    lengths = np.random.default_rng(1).lognormal(4.4, 0.7, 2000).clip(8, 500).astype(int)
    loader = conversations.PackedLoader({"chat": numbered(lengths.tolist())}, None, 8, 512)
    pads = np.mean([(loader.next().docs < 0).float().mean().item() for _ in range(50)])
    assert pads < 0.05


def test_domains_are_mixed_by_supervised_tokens():
    rng = np.random.default_rng(2)
    examples = {
        "calls": numbered(rng.integers(60, 200, 300).tolist(), "calls", supervised=20),
        "code": numbered(rng.integers(40, 120, 200).tolist(), "code"),
        "chat": numbered(rng.integers(8, 20, 50).tolist(), "chat", supervised=4),
    }
    weights = {"calls": 0.6, "code": 0.3, "chat": 0.1}
    loader = conversations.PackedLoader(examples, weights, 8, 256, seed=1)
    totals = np.zeros(3)
    for _ in range(300):
        batch = loader.next()
        totals += np.bincount(batch.domains[batch.targets >= 0].numpy(), minlength=3)
    shares = dict(zip(loader.domains, totals / totals.sum(), strict=True))
    assert all(abs(shares[name] - weight) < 0.02 for name, weight in weights.items()), shares


def test_a_mix_given_in_rows_is_one_in_rows():
    """Rows of calls and programs as 5.6 to 1 although a program has five times the tokens: what concatenating two files does."""
    examples = {
        "calls": numbered([40] * 300, "calls", supervised=10),
        "programs": numbered([80] * 100, "programs", supervised=50),
        "chat": numbered([9] * 9),
    }
    weights = conversations.token_weights(examples, {"calls": 5.6, "programs": 1.0})
    assert weights["calls"] / weights["programs"] == pytest.approx(5.6 / 5)
    loader = conversations.PackedLoader(examples, weights, 8, 256)
    for _ in range(100):
        loader.next()
    calls, programs = loader.drawn
    assert calls / programs == pytest.approx(5.6, rel=0.05)
    with pytest.raises(DataError, match="'poems'.*--mix"):
        conversations.PackedLoader(examples, conversations.token_weights(examples, {"poems": 1.0}), 8, 256)


def test_without_weights_the_data_keep_their_own_shares_and_a_zero_weight_leaves_a_domain_out():
    examples = {"a": numbered([20] * 30, "a"), "b": numbered([20] * 10, "b")}
    assert conversations.PackedLoader(examples, None, 1, 64).weights == [0.75, 0.25]
    loader = conversations.PackedLoader(examples, {"a": 1.0, "b": 0.0}, 1, 64)
    assert loader.domains == ["a"]


def mixed() -> dict[str, list[Example]]:
    rng = np.random.default_rng(3)
    return {d: numbered(rng.integers(5, 60, n).tolist(), d) for d, n in (("a", 70), ("b", 30))}


def test_state_resumes_bitwise_across_epochs():
    loader = conversations.PackedLoader(mixed(), {"a": 2, "b": 1}, 4, 128, seed=7)
    for _ in range(9):
        loader.next()
    state = json.loads(json.dumps(loader.state()))
    want = [loader.next() for _ in range(20)]
    again = conversations.PackedLoader(mixed(), {"a": 2, "b": 1}, 4, 128, seed=7)
    again.load_state(state)
    assert all(same(batch, again.next()) for batch in want)
    assert again.state() == loader.state()


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = conversations.PackedLoader(mixed(), None, 4, 128, seed=7).state()
    with pytest.raises(DataError, match="'seed': 7.*'seed': 8"):
        conversations.PackedLoader(mixed(), None, 4, 128, seed=8).load_state(state)
    fewer = {name: rows[:-1] for name, rows in mixed().items()}
    with pytest.raises(DataError, match="'a': 70.*'a': 69"):
        conversations.PackedLoader(fewer, None, 4, 128, seed=7).load_state(state)


def test_ranks_and_accumulation_take_turns_in_one_sequence_of_rows():
    make = lambda batch, rank=0, world=1: conversations.PackedLoader(mixed(), None, batch, 96, 5, rank, world)  # noqa: E731
    whole, alone, ranks = make(4), make(1), [make(2, r, 2) for r in range(2)]
    for _ in range(5):
        batch = whole.next()
        assert torch.equal(batch.ids, torch.cat([alone.next().ids for _ in range(4)]))
        assert torch.equal(batch.targets, torch.cat([r.next().targets for r in ranks]))


def test_packing_makes_more_than_300_thousand_tokens_a_second():
    loader = conversations.PackedLoader({"a": numbered([60] * 500), "b": numbered([110] * 500)}, None, 8, 512)
    loader.next()
    began = time.process_time()
    for _ in range(30):
        loader.next()
    assert 30 * 8 * 512 / (time.process_time() - began) > 300_000


def test_load_domains_encodes_only_what_the_mix_wants(tmp_path, capsys):
    for name, text in (("short", "ab"), ("long", "x" * 200)):
        rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}] * 10
        (tmp_path / f"{name}.train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError):
        conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64)
    wanted = {"short": 1.0, "long": 0.0}
    assert set(conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64, wanted=wanted)) == {"short"}
    with pytest.raises(DataError) as unknown:
        conversations.load_domains(tmp_path, "train", BYTES, "reserved", 64, wanted={"shrot": 1.0, "short": 1.0})
    assert all(name in str(unknown.value) for name in ("shrot", "short", "long"))


# ---------------------------------------------------------------- batches ahead


@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_prepared_ahead_are_the_same_and_resume_after_those_handed_out(ahead: int) -> None:
    def loader() -> conversations.PackedLoader:
        return conversations.PackedLoader(mixed(), None, 4, 128, seed=5)

    plain = [batch for source in [loader()] for batch in (source.next() for _ in range(8))]
    source = Prefetched(loader(), torch.device("cpu"), ahead, beside=True)
    first = [source.next() for _ in range(4)]
    state = json.loads(json.dumps(source.state()))
    assert all(map(same, first, plain))
    went_on, resumed = loader(), Prefetched(loader(), torch.device("cpu"), ahead, beside=True)
    resumed.load_state(state)
    went_on.load_state(state)
    for i in range(4, 8):
        a, b, c = source.next(), resumed.next(), went_on.next()
        assert same(a, b) and same(b, c) and same(c, plain[i])
