"""Tokenizers of imported models: a tokenizer.json read by the `tokenizers` package, with the model's own special tokens
and chat template.

The checkpoint's meta.json holds the whole file, so a run needs no directory beside it. `encode` treats text as ordinary
text: special tokens in it are spelled in pieces, so no document forges a turn. Added tokens that are not special
(<think>) are single ids. `encode_behind` is for text from a chat template. SentencePiece's tokenizers write a blank
before a text (Llama 2): `encode_inside` and `decode_inside` are for texts within another, such as answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from codechat.core.config import read_json
from codechat.core.errors import DataError, MissingFile
from codechat.text.tokenizer import Tokenizer, byte_letters, replace_surrogates

ORDINARY = ("\n", "a", "0", ".")  # before a text inside another, if they stay tokens of their own
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class ImportedTokenizer(Tokenizer):
    """`saved` is what `to_dict` returns: spec, json (the text of tokenizer.json), special ({"eos_token": text, ...}),
    and template or None."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.saved, self.spec = saved, saved["spec"]
        self._plain, self._special = self._make(), self._make()
        self._plain.encode_special_tokens = True
        self._ids: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        self.n_vocab = max(self._ids.values()) + 1
        self._added: dict[int, Any] = self._plain.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in self._added.items() if token.special}
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(saved["json"]).get("decoder"))
        eos = saved["special"].get("eos_token")
        if eos not in self._ids:
            raise DataError(f"{self.spec}: eos_token {eos!r} is no token; set it in tokenizer_config.json")
        self.eot_id = self._ids[eos]

    def _make(self) -> Any:
        import tokenizers  # here: only imported models need it

        try:
            return tokenizers.Tokenizer.from_str(self.saved["json"])
        except Exception as error:  # the package raises nothing more precise
            version = tokenizers.__version__
            raise DataError(f"{self.spec}: tokenizers {version} cannot read tokenizer.json ({error})") from None

    @property
    def template(self) -> str | None:
        """The model's jinja chat template."""
        return self.saved.get("template")

    @cached_property
    def beginning(self) -> tuple[int, ...]:  # type: ignore[override]
        """The ids that the tokenizer's own post-processor puts before a text (Llama's begin-of-text; none in Qwen).
        `chat` puts them before raw text."""
        plain, whole = (self._special.encode("a", add_special_tokens=specials).ids for specials in (False, True))
        return tuple(whole[: next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)])

    def encode(self, text: str) -> list[int]:
        return self._plain.encode(replace_surrogates(text), add_special_tokens=False).ids

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch = self._plain.encode_batch(list(map(replace_surrogates, texts)), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in batch]

    def encode_inside(self, text: str) -> list[int]:
        """`encode` for text within another: without the blank that some tokenizers write before a text."""
        starts = ORDINARY if self._leads else ()
        return next(ids for start in (*starts, "") if (ids := self._behind(self._plain, start, text)))[0]

    def encode_behind(self, before: str, text: str, *, loses: bool = False) -> tuple[list[int], list[int]]:
        """Ids of `text` as it is tokenised behind `before`, and the character where each begins; apart from it where a
        token would hold parts of both. Special tokens are themselves. loses: blanks may go where `before` ends with a
        special token that takes them in."""
        if together := self._behind(self._special, before, text, loses):
            return together
        begins = self._behind(self._special, before, "x") == self._behind(self._special, "", "x")
        starts = () if begins or not self._leads else ORDINARY
        return next(ids for start in (*starts, "") if (ids := self._behind(self._special, start, text)))

    def _behind(
        self, tokenizer: Any, before: str, text: str, loses: bool = False
    ) -> tuple[list[int], list[int]] | None:
        """None where the ids of `before` are others in the whole, or one of them reaches into the text."""
        text = replace_surrogates(text)
        head, whole = (tokenizer.encode(some, add_special_tokens=False) for some in (before, before + text))
        n, size = len(head.ids), len(before)
        if whole.ids[:n] != head.ids or not loses and any(end > size for _, end in whole.offsets[:n]):
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
        if text is None:  # a gap in the vocabulary
            return b""
        if self._byte_level:
            return bytes(map(byte_letters().index, text))
        if match := _BYTE.fullmatch(text):
            return bytes.fromhex(match[1])
        return text.replace("\u2581", " ").encode()

    def to_dict(self) -> dict[str, Any]:
        return self.saved


def read(place: Path) -> dict[str, Any]:
    """`saved` of a directory with tokenizer.json, or of that file; the other files beside it are optional."""
    path = place / "tokenizer.json" if place.is_dir() else place
    if not path.is_file():
        raise MissingFile(f"no {path}; give hf:DIR with a tokenizer.json (transformers' save_pretrained writes one)")
    config, text = _object(path.parent / "tokenizer_config.json"), path.read_text(encoding="utf-8")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: t.get("content") if isinstance(t := config.get(name), dict) else t for name in names}
    if special["eos_token"] is None:
        ids = _object(path.parent / "config.json") | _object(path.parent / "generation_config.json")
        first = (*e, None)[0] if isinstance(e := ids.get("eos_token_id"), list) else e
        added = json.loads(text).get("added_tokens") or []
        special["eos_token"] = next((entry["content"] for entry in added if entry["id"] == first), None)
    jinja = path.parent / "chat_template.jinja"
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    special = {name: token for name, token in special.items() if token}
    return {"spec": f"hf:{place.name}", "json": text, "special": special, "template": template}


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
