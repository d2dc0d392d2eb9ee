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


def write(out: Path, documents=None, shard_tokens=1 << 24, max_tokens=None) -> dict:
    """The manifest of a corpus of some documents, a tenth of them held out."""
    return corpus_writer.write_corpus(
        texts(60) if documents is None else documents,
        out,
        BYTES,
        val_share=0.1,
        shard_tokens=shard_tokens,
        max_tokens=max_tokens,
    )


def stream(out: Path, split: str) -> np.ndarray:
    return np.concatenate(corpus.open_corpus(out, split)[1])


def split_texts(out: Path, split: str) -> list[str]:
    return BYTES.decode(stream(out, split).tolist()).split("<|endoftext|>")[:-1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_in_exactly_one_split(tmp_path):
    manifest = write(tmp_path)
    train = split_texts(tmp_path, "train")
    val = split_texts(tmp_path, "val")
    assert val
    assert sorted(train + val) == sorted(texts(60))
    assert manifest["train_documents"] == len(train)


@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_are_joined_by_end_of_text(split, tmp_path):
    manifest = write(tmp_path)
    documents = split_texts(tmp_path, split)
    size = sum(map(len, documents))
    assert manifest[f"{split}_bytes"] == size
    assert manifest[f"{split}_tokens"] == size + len(documents)
    assert len(stream(tmp_path, split)) == size + len(documents)


def test_the_split_of_a_document_follows_its_text_not_the_order_or_the_company(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", texts(60)[::-1][:50])
    assert set(split_texts(tmp_path / "b", "val")) <= set(split_texts(tmp_path / "a", "val"))


def test_duplicates_and_empty_documents_are_skipped_and_counted(tmp_path):
    manifest = write(tmp_path, [*texts(20), *texts(20), " \n"])
    assert manifest["kept"] == 20
    assert manifest["skipped"] == {"duplicate": 20, "empty": 1}


def test_shards_keep_their_last_part(tmp_path):
    one = write(tmp_path / "one")
    many = write(tmp_path / "many", shard_tokens=700)
    sizes = [file["tokens"] for file in many["files"] if file["split"] == "train"]
    assert len(sizes) > 2
    assert set(sizes[:-1]) == {700}
    assert 0 < sizes[-1] < 700
    assert sum(sizes) == one["train_tokens"]
    assert np.array_equal(stream(tmp_path / "one", "train"), stream(tmp_path / "many", "train"))


def test_the_same_input_gives_the_same_bytes_whatever_the_size_of_chunks(tmp_path, monkeypatch):
    write(tmp_path / "one")
    monkeypatch.setattr(corpus_writer, "CHUNK_CHARS", 100)
    write(tmp_path / "again")
    files = contents(tmp_path / "one")
    assert sorted(files) == [
        "manifest.json",
        "token_bytes.npy",
        "train_000000.bin",
        "val_000000.bin",
    ]
    assert files == contents(tmp_path / "again")


def test_a_limit_stops_after_the_document_that_reaches_it(tmp_path):
    manifest = write(tmp_path, max_tokens=500)
    assert 500 <= manifest["train_tokens"] + manifest["val_tokens"] < 500 + 120


def is_held_out(document: str) -> bool:
    return sources.fraction(sources.digest(document)) < corpus_writer.VAL_SHARE


def test_a_limit_leaves_one_document_held_out(tmp_path):
    documents = [f"x{i} = {i}\n" * 40 for i in range(600)]
    first = next(filter(is_held_out, documents))
    # the documents of this test must not begin with a held-out one
    assert documents.index(first) > 0
    manifest = corpus_writer.write_corpus(documents, tmp_path, BYTES, max_tokens=10)
    assert manifest["train_tokens"] == len(documents[0]) + 1
    assert manifest["val_tokens"] == len(first) + 1


def test_a_single_document_is_cut_at_a_line_near_its_end(tmp_path):
    write(tmp_path, ["".join(f"line {i}\n" for i in range(100))])
    (held,) = split_texts(tmp_path, "val")
    assert held.startswith("line 9")
    assert held.endswith("line 99\n")


def test_a_new_corpus_replaces_the_shards_of_the_old_one(tmp_path):
    write(tmp_path, shard_tokens=500)
    manifest = write(tmp_path, texts(12))
    shards = {path.name for path in tmp_path.glob("*.bin")}
    assert shards == {file["name"] for file in manifest["files"]}


def test_a_corpus_that_fails_leaves_the_old_one_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, texts(12))
    monkeypatch.setattr(corpus_writer, "CHUNK_CHARS", 100)
    monkeypatch.setattr(corpus_writer, "FEW_DOCUMENTS", 5)
    before = contents(tmp_path)

    def failing():
        yield from texts(30)
        assert list(tmp_path.glob(".new/*.bin"))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        write(tmp_path, failing())
    assert contents(tmp_path) == before


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
    ids, targets = corpus.WindowLoader(tmp_path, 4, 32).next()
    assert ids.shape == targets.shape == (4, 32)
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    for row, last in zip(ids.tolist(), targets[:, -1].tolist(), strict=True):
        assert np.array([*row, last], dtype="<u2").tobytes() in data


def test_a_state_belongs_to_its_seed(tmp_path):
    write(tmp_path)
    state = corpus.WindowLoader(tmp_path, 4, 16, seed=1).state()
    with pytest.raises(DataError, match="--seed 1"):
        corpus.WindowLoader(tmp_path, 4, 16, seed=2).load_state(state)


def test_a_state_belongs_to_its_corpus(tmp_path):
    write(tmp_path)
    state = corpus.WindowLoader(tmp_path, 4, 16, seed=1).state()
    corpus_writer.write_corpus([f"{i} other text" for i in range(300)], tmp_path, BYTES)
    with pytest.raises(DataError, match="corpus"):
        corpus.WindowLoader(tmp_path, 4, 16, seed=1).load_state(state)


def test_every_start_is_drawn_about_equally_often(tmp_path):
    corpus_writer.write_corpus(["a" * 40, "b" * 60, "c" * 30], tmp_path, BYTES, shard_tokens=50)
    loader = corpus.WindowLoader(tmp_path, 1000, 8, seed=5)
    starts = sum(max(0, len(shard) - 8) for shard in loader.shards)
    n = 100_000
    draws = corpus._mix(5, np.arange(n, dtype=np.uint64)) % np.uint64(starts)
    counts = np.bincount(draws.astype(np.int64), minlength=starts)
    expected = n / starts
    assert np.abs(counts - expected).max() < 6 * expected**0.5


@pytest.fixture
def chinese(tmp_path):
    """A corpus whose characters have one to three bytes, and its tokenizer."""
    tok = tokenizer.load("gpt2:4096")
    documents = [text + "# é 漢字\n" for text in texts(60)]
    corpus_writer.write_corpus(documents, tmp_path, tok, val_share=0.2)
    return tmp_path, tok


def targets_of(windows) -> list[int]:
    return [i for _, targets, _ in windows for i in targets[targets != -100].tolist()]


@pytest.mark.parametrize("batch", [1, 3])
def test_val_windows_make_every_token_a_target_once(chinese, batch):
    out, _ = chinese
    windows = corpus.val_windows(out, 24, batch=batch)
    assert targets_of(windows) == stream(out, "val")[1:].tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_val_windows_count_the_bytes_of_their_targets(chinese, batch):
    out, tok = chinese
    windows = list(corpus.val_windows(out, 24, batch=batch))
    text = [i for i in targets_of(windows) if i != tok.eot_id]
    assert sum(n for *_, n in windows) == sum(len(tok.token_bytes(i)) for i in text)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_limit_of_val_windows_keeps_the_first(chinese, batch):
    out, _ = chinese
    whole = next(iter(corpus.val_windows(out, 24, batch=batch)))
    limited = list(corpus.val_windows(out, 24, 2, batch=batch))
    assert sum(len(ids) for ids, *_ in limited) == 2
    assert torch.equal(limited[0][0][0], whole[0][0])


@pytest.fixture
def bare(tmp_path):
    """Three shards of 100 tokens without a manifest."""
    for i in range(3):
        tokens = np.arange(i * 100, i * 100 + 100, dtype="<u2")
        tokens.tofile(tmp_path / f"shard_{i:04d}.bin")
    return tmp_path


def test_bare_shards_are_read_with_the_last_one_held_out(bare):
    assert stream(bare, "train").tolist() == list(range(200))
    assert stream(bare, "val").tolist() == list(range(200, 300))
    assert len(targets_of(corpus.val_windows(bare, 16))) == 99


def test_the_manifest_of_bare_shards_says_what_was_assumed(bare):
    manifest = corpus.read_manifest(bare)
    assert manifest["tokenizer"] == "gpt2"
    assert "shard_0002.bin is held out" in manifest["note"]


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
