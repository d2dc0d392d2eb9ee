"""Tokenizer files as others save them: the ids are those of transformers, whatever stands in
which file."""

import json
from pathlib import Path
from typing import Any

import pytest

from codechat.core.errors import DataError
from codechat.text import tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="imported models need it")
LONG = "def add(a, b):\n    return a + b\n" * 20
TEXTS = ["", "a", "<|tool|>x<|tool|>", "<think> 1 </think>", "<|im_end|>", LONG]


def made() -> Any:
    """A byte-level BPE of 280 ids with two special tokens."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=special,
        initial_alphabet=letters,
        show_progress=False,
    )
    bpe.train_from_iterator([LONG, "<think> <|tool|>"] * 9, trainer)
    return bpe


def saved(folder: Path, bpe: Any, config: dict[str, Any], **files: dict[str, Any]) -> str:
    """The tokenizer as a directory; its spec."""
    (folder / "tokenizer.json").write_text(bpe.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    for name, about in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    return f"hf:{folder}"


def truncated() -> Any:
    bpe = made()
    bpe.enable_truncation(16)
    return bpe


def padded() -> Any:
    bpe = made()
    bpe.enable_padding(length=64)
    return bpe


def both() -> Any:
    bpe = truncated()
    bpe.enable_padding(length=24, direction="left", pad_id=3)
    return bpe


def with_dropout() -> Any:
    bpe = made()
    bpe.model.dropout = 0.5
    return bpe


@pytest.mark.parametrize(
    "how", [truncated, padded, both, with_dropout], ids=lambda how: how.__name__
)
def test_truncation_padding_and_dropout_of_whoever_saved_it_are_off(
    tmp_path: Path, how: Any
) -> None:
    tok = tokenizer.load(saved(tmp_path, how(), {}))
    plain = made()
    for text in TEXTS:
        assert tok.encode(text) == tok.encode_inside(text) == plain_ids(plain, text)
        assert tok.encode_arrays([text])[0].tolist() == tok.encode(text)
        assert tok.decode(tok.encode(text)) == text
    assert tok.beginning == ()
    assert len(tok.encode_behind("a", LONG)[0]) >= len(plain_ids(plain, LONG)) - 1
    about = json.loads(tok.to_dict()["json"])  # also in an export
    assert not (about["truncation"] or about["padding"] or about["model"]["dropout"])


def plain_ids(bpe: Any, text: str) -> list[int]:
    """Of ordinary text."""
    bpe.encode_special_tokens = True
    return bpe.encode(text, add_special_tokens=False).ids


FULL = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
TOOL = {**FULL, "content": "<|tool|>", "special": True}
THINK = {**FULL, "content": "<think>", "special": False}


@pytest.mark.parametrize(
    "config, files",
    [
        ({"added_tokens_decoder": {"280": TOOL, "281": THINK}}, {}),
        ({"added_tokens_decoder": {"281": THINK, "280": TOOL}}, {}),
        ({"added_tokens_decoder": {"280": TOOL | {"rstrip": True}}}, {}),
        (
            {
                "added_tokens_decoder": {
                    "1": {**FULL, "content": "<|im_end|>", "special": True, "lstrip": True}
                }
            },
            {},
        ),
        (
            {
                "additional_special_tokens": [
                    "<|tool|>",
                    {**TOOL, "__type": "AddedToken", "content": "<think>"},
                ]
            },
            {},
        ),
        ({"extra_special_tokens": {"tool_token": "<|tool|>"}}, {}),
        ({}, {"added_tokens": {"<think>": 281, "<|tool|>": 280}}),
        (
            {},
            {
                "added_tokens": {"<|tool|>": 280},
                "special_tokens_map": {
                    "extra_special_tokens": ["<|tool|>"],
                    "eos_token": "<|im_end|>",
                },
            },
        ),
    ],
    ids=str,
)
def test_tokens_that_stand_only_beside_tokenizer_json_are_whole(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", reason="parity is measured against it")
    tok = tokenizer.load(saved(tmp_path, made(), config, **files))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "a <|tool|>  <think>b <|im_end|> c"]:
        assert tok.encode_behind("", text)[0] == theirs(text)["input_ids"], text
    added = {token.content: i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert (dict(tok.special_tokens), tok.n_vocab) == (added, len(theirs))
    for token, i in added.items():
        assert tok.token_bytes(i).decode() == token
        assert i not in tok.encode(token), "ordinary text spells no special token"


def test_a_special_token_that_the_vocabulary_has_without_saying_so_is_whole(tmp_path: Path) -> None:
    bpe = made()
    config = {"added_tokens_decoder": {"279": {**FULL, "content": "<|end|>", "special": True}}}
    about = json.loads(bpe.to_str())
    about["model"]["vocab"].pop(next(t for t, i in about["model"]["vocab"].items() if i == 279))
    about["model"]["merges"].pop()
    about["model"]["vocab"]["<|end|>"] = 279
    bpe = tokenizers.Tokenizer.from_str(json.dumps(about))
    for place, given in (("table", config), ("named", {"eos_token": "<|end|>"})):
        (tmp_path / place).mkdir()
        tok = tokenizer.load(saved(tmp_path / place, bpe, given))
        assert tok.special_tokens["<|end|>"] == 279
        assert tok.encode_behind("", "a<|end|>")[0] == [*tok.encode("a"), 279]


@pytest.mark.parametrize(
    "table, named",
    [
        ({"400": TOOL}, "'<|tool|>' as 400, .* becomes 280"),
        (
            {"7": {**FULL, "content": "<|im_end|>", "special": True}},
            "'<|im_end|>' as 7, .* becomes 1",
        ),
        ({"x": TOOL}, "added_tokens_decoder is no table"),
        ({"280": "<|tool|>"}, "added_tokens_decoder is no table"),
        ({"280": {"special": True}}, "added_tokens_decoder is no table"),
        ([TOOL], "added_tokens_decoder is no table"),
    ],
    ids=str,
)
def test_a_table_of_tokens_that_contradicts_the_vocabulary_is_refused(
    tmp_path: Path, table: Any, named: str
) -> None:
    with pytest.raises(DataError, match=named) as caught:
        tokenizer.load(saved(tmp_path, made(), {"added_tokens_decoder": table}))
    assert "\n" not in str(caught.value)


def test_files_that_need_no_change_are_kept_byte_for_byte(tmp_path: Path) -> None:
    bpe = made()
    tok = tokenizer.load(saved(tmp_path, bpe, {"added_tokens_decoder": {}}))
    assert tok.to_dict()["json"] == bpe.to_str()
