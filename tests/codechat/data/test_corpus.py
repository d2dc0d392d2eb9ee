"""The corpus: what is written, what is read back, and which window comes next."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from codechat.core.errors import ConfigError, DataError
from codechat.data import corpus, corpus_writer, sources
from codechat.runs.run import Run
from codechat.text import tokenizer

BYTES = tokenizer.load("bytes")


def texts(n: int) -> list[str]:
    return [f"def f{i}(x):\n    return x + {i}\n" * 3 for i in range(n)]


def write(out: Path, documents=None, **options) -> dict:
    return corpus_writer.write_corpus(
        texts(60) if documents is None else documents,
        out,
        BYTES,
        val_share=0.1,
        **options,
    )


def stream(out: Path, split: str) -> np.ndarray:
    return np.concatenate(corpus.open_corpus(out, split)[1])


def split_texts(out: Path, split: str) -> list[str]:
    return BYTES.decode(stream(out, split).tolist()).split("<|endoftext|>")[:-1]


def test_every_document_is_in_exactly_one_split_and_joined_by_end_of_text(tmp_path):
    manifest = write(tmp_path)
    parts = {split: split_texts(tmp_path, split) for split in ("train", "val")}
    assert parts["val"]
    assert sorted(parts["train"] + parts["val"]) == sorted(texts(60))
    assert manifest["train_documents"] == len(parts["train"])
    for split, kept in parts.items():
        assert manifest[f"{split}_bytes"] == sum(map(len, kept))
        assert (
            manifest[f"{split}_tokens"]
            == sum(map(len, kept)) + len(kept)
            == len(stream(tmp_path, split))
        )
    write(
        tmp_path / "b", list(reversed(texts(60)))[:50]
    )  # the split follows the text, not the order or the company
    assert set(split_texts(tmp_path / "b", "val")) <= set(parts["val"])
    manifest = write(tmp_path, [*texts(20), *texts(20), " \n"])
    assert manifest["kept"] == 20
    assert manifest["skipped"] == {"duplicate": 20, "empty": 1}


def test_shards_keep_their_last_part_and_the_same_input_gives_the_same_bytes(tmp_path, monkeypatch):
    one = write(tmp_path / "one")
    many = write(tmp_path / "many", shard_tokens=700)
    sizes = [f["tokens"] for f in many["files"] if f["split"] == "train"]
    assert len(sizes) > 2
    assert set(sizes[:-1]) == {700}
    assert 0 < sizes[-1] < 700
    assert sum(sizes) == one["train_tokens"]
    assert np.array_equal(stream(tmp_path / "one", "train"), stream(tmp_path / "many", "train"))
    monkeypatch.setattr(corpus_writer, "CHUNK_CHARS", 100)
    write(tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["manifest.json", "token_bytes.npy", "train_000000.bin", "val_000000.bin"]
    assert all(
        (tmp_path / "one" / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files
    )


def test_limits_stop_after_the_document_that_reaches_them_and_leave_one_held_out(tmp_path):
    manifest = write(tmp_path / "tokens", max_tokens=500)
    assert 500 <= manifest["train_tokens"] + manifest["val_tokens"] < 500 + 120
    documents = [f"x{i} = {i}\n" * 40 for i in range(600)]
    first = next(
        d for d in documents if sources.fraction(sources.digest(d)) < corpus_writer.VAL_SHARE
    )
    assert documents.index(first) > 0, (
        "the documents of this test must not begin with a held-out one"
    )
    manifest = corpus_writer.write_corpus(documents, tmp_path / "few", BYTES, max_tokens=10)
    assert (manifest["train_tokens"], manifest["val_tokens"]) == (
        len(documents[0]) + 1,
        len(first) + 1,
    )
    write(
        tmp_path / "one", ["".join(f"line {i}\n" for i in range(100))]
    )  # cut at a line near its end
    (held,) = split_texts(tmp_path / "one", "val")
    assert held.startswith("line 9")
    assert held.endswith("line 99\n")


def test_a_new_corpus_replaces_the_old_one_whole_or_not_at_all(tmp_path, monkeypatch):
    write(tmp_path, shard_tokens=500)
    manifest = write(tmp_path, texts(12))
    assert {p.name for p in tmp_path.glob("*.bin")} == {f["name"] for f in manifest["files"]}
    monkeypatch.setattr(corpus_writer, "CHUNK_CHARS", 100)
    monkeypatch.setattr(corpus_writer, "FEW_DOCUMENTS", 5)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def failing():
        yield from texts(30)
        assert list(tmp_path.glob(".new/*.bin"))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write(tmp_path, failing())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_cut_shard_is_known_by_its_size(tmp_path):
    write(tmp_path)
    shard = tmp_path / "train_000000.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-2])
    with pytest.raises(DataError, match=rf"{len(raw) - 2} .*manifest.json.* {len(raw)}"):
        corpus.open_corpus(tmp_path, "train")


def test_windows_are_slices_of_the_stream_with_targets_shifted_by_one(tmp_path):
    write(tmp_path)
    data = stream(tmp_path, "train").tobytes()
    ids, targets = corpus.WindowLoader(tmp_path, "train", 4, 32).next()
    assert ids.shape == targets.shape == (4, 32)
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    for row, last in zip(ids.tolist(), targets[:, -1].tolist(), strict=True):
        assert np.array([*row, last], dtype="<u2").tobytes() in data


def test_a_state_belongs_to_its_seed_and_corpus(tmp_path):
    write(tmp_path)
    state = corpus.WindowLoader(tmp_path, "train", 4, 16, seed=1).state()
    with pytest.raises(DataError, match="--seed 1"):
        corpus.WindowLoader(tmp_path, "train", 4, 16, seed=2).load_state(state)
    corpus_writer.write_corpus([f"{i} other text" for i in range(300)], tmp_path, BYTES)
    with pytest.raises(DataError, match="corpus"):
        corpus.WindowLoader(tmp_path, "train", 4, 16, seed=1).load_state(state)


def test_every_start_is_drawn_about_equally_often(tmp_path):
    corpus_writer.write_corpus(["a" * 40, "b" * 60, "c" * 30], tmp_path, BYTES, shard_tokens=50)
    loader = corpus.WindowLoader(tmp_path, "train", 1000, 8, seed=5)
    starts = sum(max(0, len(s) - 8) for s in loader.shards)
    draws = corpus._mix(5, np.arange(100_000, dtype=np.uint64)) % np.uint64(starts)
    counts = np.bincount(draws.astype(np.int64), minlength=starts)
    expected = 100_000 / starts
    assert np.abs(counts - expected).max() < 6 * expected**0.5


@pytest.mark.parametrize("batch", [1, 3])
def test_val_windows_make_every_token_a_target_once_and_count_its_bytes(tmp_path, batch):
    tok = tokenizer.load("gpt2:4096")
    documents = [t + "# é 漢字\n" for t in texts(60)]
    corpus_writer.write_corpus(documents, tmp_path, tok, val_share=0.2)
    data = stream(tmp_path, "val")
    batches = list(corpus.val_windows(tmp_path, 24, batch=batch))
    seen = torch.cat([t[t != -100] for _, t, _ in batches])
    assert seen.tolist() == data[1:].tolist()
    text = [i for i in seen.tolist() if i != tok.eot_id]
    assert sum(n for *_, n in batches) == sum(len(tok.token_bytes(i)) for i in text)
    limited = list(corpus.val_windows(tmp_path, 24, 2, batch=batch))
    assert sum(len(ids) for ids, *_ in limited) == 2
    assert torch.equal(limited[0][0][0], batches[0][0][0])


def test_bare_shards_are_read_with_the_last_one_held_out(tmp_path):
    for i in range(3):
        np.arange(i * 100, i * 100 + 100, dtype="<u2").tofile(tmp_path / f"shard_{i:04d}.bin")
    manifest = corpus.read_manifest(tmp_path)
    assert manifest["tokenizer"] == "gpt2"
    assert "shard_0002.bin is held out" in manifest["note"]
    assert stream(tmp_path, "train").tolist() == list(range(200))
    assert stream(tmp_path, "val").tolist() == list(range(200, 300))
    assert sum(int((t != -100).sum()) for _, t, _ in corpus.val_windows(tmp_path, 16)) == 99


def test_embedded_python_keeps_programs_and_counts_what_it_leaves_out(tmp_path):
    files = json.loads(Path(__file__).with_name("embedded_files.json").read_text())
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    ledger = sources.Ledger("embedded")
    kept = {d.name: d.text for d in sources.embedded_python(ledger, [("stdlib", tmp_path)])}
    assert kept == {"pkg/a.py": "def a():\n    return 1\n", "pkg/e.py": "def e():\n    return 5\n"}
    assert ledger.skipped == {
        "tests": 2,
        "vendored": 1,
        "this_project": 2,
        "mostly_data": 1,
        "long_lines": 1,
    }
    assert ledger.lost == {"not_utf8": 1}


@pytest.mark.parametrize("out", ["runs/x", "runs/x/corpus"])
def test_no_corpus_is_written_into_a_run(out: str, home: Path) -> None:
    Run.create("x", {}, kind="sft").finish()
    before = sorted(home.rglob("*"))
    with pytest.raises(
        ConfigError, match="within run x; expected no folder of a run; choose another --out"
    ):
        corpus_writer.prepare_corpus(corpus_writer.CorpusConfig(out=str(home / out)))
    assert sorted(home.rglob("*")) == before
