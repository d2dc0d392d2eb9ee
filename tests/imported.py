"""Tokenizers of imported models, made on the spot: ours and transformers' with the same ids and
chat template."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from codechat.text import tokenizer
from codechat.text.tokenizer import ImportedTokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
TURNS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|observation|>",
]
TURNS += ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "[gMASK]", "<sop>"]
# as in Phi 3, they take in the blanks behind them
TAKING = [
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]


def talk(*contents: str, roles: str = "ua") -> list[dict[str, str]]:
    names = dict(s="system", u="user", a="assistant", f="function")
    roles = roles * (len(contents) // len(roles))
    return [{"role": names[role], "content": content} for role, content in zip(roles, contents)]


@lru_cache
def tokenizer_json(kind: str) -> str:
    """ "bytes" as GPT-2's and Qwen's, else SentencePiece's: a blank before a text and each
    piece between special tokens ("prepend", Llama 2), or only before the text ("first")."""
    corpus = [Path(__file__).with_name("contracts.py").read_text(encoding="utf-8")]
    if kind == "bytes":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        special = SPECIAL
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        special = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
        alphabet = []
        corpus = corpus[0].replace("\t", "").split("\n")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    about = json.loads(made.to_str())
    if kind != "bytes":
        about["added_tokens"] = about["added_tokens"][: len(SPECIAL)]
        blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        ways = [{"type": "Prepend", "prepend": "▁"}, blank]
        about["normalizer"] = (
            {"type": "Sequence", "normalizers": ways} if kind == "prepend" else None
        )
        about["pre_tokenizer"] = (
            None if kind == "prepend" else about["pre_tokenizer"] | {"split": False}
        )
        steps = [
            blank | {"pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        about["decoder"] = {
            "type": "Sequence",
            "decoders": [*steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        }
    made = tokenizers.Tokenizer.from_str(json.dumps(about))
    made.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in TURNS])
    return made.to_str()


def both(
    kind: str, template: str, special: Sequence[str] = (), **names: str
) -> tuple[ImportedTokenizer, Any]:
    """Our tokenizer and transformers'. special: further special tokens, which take in the
    blanks behind them."""
    made = tokenizers.Tokenizer.from_str(tokenizer_json(kind))
    made.add_special_tokens(
        [tokenizers.AddedToken(token, rstrip=True, normalized=False) for token in special]
    )
    names = dict(bos_token="<s>", eos_token="</s>") | names
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    theirs.chat_template = template
    ours = dict(spec="hf:theirs", json=made.to_str(), special=names, template=template)
    return tokenizer.from_dict(ours), theirs
