"""Our tokenizers and conversations as Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json.

The ids equal those of `tokenizer.encode`, `chat.render` and `chat.prompt`. `chat` tokenises tags, line ends and contents
apart, but a template yields one text. So the normaliser puts the mark `CUT` where `chat` begins a new piece, and the
pre-tokeniser splits there and drops the mark. Reserved tags are added special tokens with the ids of their rows.

The template raises where one text is ambiguous: content that spells a turn tag or, outside assistant turns,
<functioncall>. In text mode <|end|> is several tokens: `generate` needs stop_strings=["<|end|>"] and its tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError
from codechat.text import chat
from codechat.text.chat import END_TAG, TAG_OF
from codechat.text.tokenizer import (
    END_OF_TEXT,
    BpeTokenizer,
    ImportedTokenizer,
    TableTokenizer,
    Tokenizer,
    byte_letters,
)
from codechat.text.tool_calls import CALL_TAG, TAGS

CUT = "\ufdd0\ufdd1"  # two Unicode noncharacters, which occur in no text


def chat_template(tags: str = "text") -> str:
    """The jinja template of `chat`'s layout: one for both tag modes; of raw text without tags."""
    text = Path(__file__).with_name(f"{'raw' if tags == chat.RAW else 'chat'}_template.jinja").read_text()
    heads, turns = {**TAG_OF, "tool": TAG_OF["function"]}, [t for t in TAGS if t != CALL_TAG]
    text = text.replace("HEADS", json.dumps(heads)).replace("ROLES", ", ".join(TAG_OF))
    return text.replace("TURN_TAGS", json.dumps(turns)).replace("CALL_TAG", CALL_TAG).replace("END_TAG", END_TAG)


def end_ids(tokenizer: Tokenizer, tags: str) -> list[int]:
    """Single ids that end a completion: <|end|> where it is one, then the end of text."""
    (stop,) = chat.stop_sequences(tokenizer, tags)
    return [*(stop if len(stop) == 1 else ()), *([] if tuple(stop) == (tokenizer.eot_id,) else [tokenizer.eot_id])]


def files(tokenizer: Tokenizer, tags: str, *, block_size: int, rows: int) -> dict[str, str]:
    """{file name: text}. rows: of the embedding; rows that no id of the tokenizer has are never generated."""
    imported, reserved = isinstance(tokenizer, ImportedTokenizer), tags == "reserved"
    if imported and reserved:  # its ids keep their meaning only with its own template, or with tags as text
        raise ConfigError(f"tags reserved with the imported {tokenizer.spec}; required are tags template or text")
    special = dict(bos_token=END_OF_TEXT, eos_token=END_TAG if reserved else END_OF_TEXT, pad_token=END_OF_TEXT)
    config = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=block_size, add_bos_token=False)
    config |= {"clean_up_tokenization_spaces": False} | (tokenizer.saved["special"] if imported else special)
    eot, named = tokenizer.eot_id, tokenizer.n_vocab + (len(TAGS) if reserved else 0)
    generation = {"bos_token_id": eot, "eos_token_id": end_ids(tokenizer, tags), "pad_token_id": eot}
    if named < rows:
        generation["suppress_tokens"] = list(range(named, rows))
    theirs = tags == chat.TEMPLATE
    return {
        "tokenizer.json": tokenizer.saved["json"] if imported else _text(tokenizer_json(tokenizer, tags)),
        "chat_template.jinja": (getattr(tokenizer, "template", None) or "") if theirs else chat_template(tags),
        "tokenizer_config.json": _text(config),
        "generation_config.json": _text(generation),
    }


def tokenizer_json(tokenizer: Tokenizer, tags: str) -> dict[str, Any]:
    """The `tokenizers` package's own file."""
    if not isinstance(tokenizer, (BpeTokenizer, TableTokenizer)):
        raise ConfigError(f"tokenizer {tokenizer.spec} has no tokenizer.json; gpt2, gpt2:N, python:N, chars, bytes do")
    bpe = isinstance(tokenizer, BpeTokenizer)
    letters, merges = not bpe and tokenizer.alphabet is not None, tokenizer.merges if bpe else []
    alphabet = sorted(byte_letters()) if bpe else tokenizer.alphabet or byte_letters()
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    special = [(tokenizer.eot_id, END_OF_TEXT), *(enumerate(TAGS, tokenizer.n_vocab) if tags == "reserved" else ())]
    # normalized: matched after the normaliser ran, which looks for tags beside line ends
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": True}
    marks = [{"type": "Replace", "pattern": {"String": text}, "content": by} for text, by in _cuts(tags)]
    cut = {"type": "Split", "pattern": {"String": CUT}, "behavior": "Removed", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": bpe}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": content, **flags} for i, content in special],
        "normalizer": {"type": "Sequence", "normalizers": marks},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut] if letters else [cut, byte_level]},
        "decoder": {"type": "Fuse"} if letters else byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def _cuts(tags: str) -> list[tuple[str, str]]:
    """(text, the same text with marks where `chat` cuts); reserved tags are cut out anyway. Raw text has no tags."""
    if tags == chat.RAW:
        return []
    if tags == "reserved":
        return [*((f"{tag}\n", f"{tag}\n{CUT}") for tag in TAG_OF.values()), (f"\n{END_TAG}", f"{CUT}\n{END_TAG}")]
    heads = [(f"{tag}\n", f"{CUT}{tag}{CUT}\n{CUT}") for tag in TAG_OF.values()]
    return [*heads, (f"\n{END_TAG}", f"{CUT}\n{CUT}{END_TAG}{CUT}"), (CALL_TAG, f"{CUT}{CALL_TAG}{CUT}")]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
