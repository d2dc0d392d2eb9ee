"""The tokenizer of a GGUF file, read as a tokenizer.json and written. Tokenizers are byte-level
("gpt2"); SentencePiece ones ("llama") are not read."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from codechat.core.errors import ConfigError
from codechat.text import tokenizer_files

SPECIAL = dict(bos_token="bos", eos_token="eos", pad_token="padding", unk_token="unknown")
# kinds of tokens
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """What `tokenizer.ggml.pre` stands for, in llama.cpp's llama-vocab.cpp: regular
    expressions, each of which splits the pieces of the one before; names, of which the first is
    written; whether the vocabulary's tokens come before its merges, and the bos token before a
    text where `add_bos_token` is absent. nfc: of the models' own tokenizer, which llama.cpp
    leaves out."""

    patterns: tuple[str, ...]
    names: tuple[str, ...]
    ignore_merges: bool = False
    begins: bool = False
    nfc: bool = False


SPLITS = (
    Split(
        (GPT2,),
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "gigachat",
            "exaone4",
            "a.x-4.0",
            "mellum",
        ),
    ),
    Split(
        (r"\p{N}", GPT2),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    Split((QWEN2,), ("qwen2",), nfc=True),
    Split(
        (QWEN2,),
        ("stablelm2", "deepseek-r1-qwen", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"),
    ),
    Split(
        (LLAMA3,),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        ignore_merges=True,
        begins=True,
    ),
    Split((LLAMA3,), ("smaug-bpe", "dbrx")),
    Split((TEKKEN,), ("tekken",), ignore_merges=True, begins=True),
    Split((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), ("default",)),
)
SPLIT_OF = {name: split for split in SPLITS for name in split.names}


def _splitter(split: Split) -> Any:
    parts = tokenizers.pre_tokenizers
    pieces = [parts.Split(tokenizers.Regex(pattern), "isolated") for pattern in split.patterns]
    return parts.Sequence([*pieces, parts.ByteLevel(add_prefix_space=False, use_regex=False)])


def read(path: Path, pre: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`saved` of an ImportedTokenizer: a tokenizer.json made of the vocabulary, special tokens
    and the template."""
    parts = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens = parts["tokens"]
    if len(set(tokens)) < len(tokens):
        [(twice, _)] = Counter(tokens).most_common(1)
        raise ConfigError(
            f"{path} has the token {twice!r} twice; required are "
            "tokens that differ; choose another file"
        )
    split = SPLIT_OF[pre]
    made = _byte_level(split, tokens, parts)
    ids = {key: parts.get(f"{theirs}_token_id") for key, theirs in SPECIAL.items()}
    special = {key: tokens[i] for key, i in ids.items() if i is not None}
    begins = ["bos_token"] if parts.get("add_bos_token", split.begins) else []
    ends = ["eos_token"] if parts.get("add_eos_token") else []
    around = begins + ends
    for key in around:
        if key not in special:
            raise ConfigError(
                f"{path} puts a {key} around every text and has none; required is "
                f"tokenizer.ggml.{SPECIAL[key]}_token_id; choose another file"
            )
    if around:
        first = [special[key] for key in begins]
        last = [special[key] for key in ends]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(special[key], ids[key]) for key in around],
        )
    for_tools = fields.get(f"tokenizer.chat_template.{tokenizer_files.FOR_TOOLS}")
    template = fields.get("tokenizer.chat_template")
    if template and for_tools:
        named = {"default": template, tokenizer_files.FOR_TOOLS: for_tools}
        template = tokenizer_files.joined_template(named)
    return dict(spec=f"hf:{path.stem}", json=made.to_str(), special=special, template=template)


def _byte_level(split: Split, tokens: Sequence[str], parts: Mapping[str, Any]) -> Any:
    """The `tokenizers` package's object of a vocabulary, with its merges and added tokens."""
    kinds = parts.get("token_type") or [NORMAL] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in parts["merges"]]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, ignore_merges=split.ignore_merges)
    )
    made.pre_tokenizer = _splitter(split)
    made.decoder = tokenizers.decoders.ByteLevel()
    if split.nfc:
        made.normalizer = tokenizers.normalizers.NFC()
    made.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return made


def add(writer: Any, saved: Mapping[str, Any], rows: int) -> None:
    """Tokens, their kinds, merges, the tokens around a text, and the name of the way texts are
    split. llama.cpp wants as many tokens as the embedding has rows."""
    file = json.loads(saved["json"])
    made = tokenizer_files.parsed(saved["spec"], saved["json"])
    model = file["model"]
    added = file["added_tokens"]
    ids = model["vocab"] | {t["content"]: t["id"] for t in added}
    named = {i: token for token, i in ids.items()}
    kinds = dict.fromkeys(model["vocab"], NORMAL)
    kinds |= {t["content"]: CONTROL if t["special"] else USER_DEFINED for t in added}
    tokens = [named.get(i, f"[PAD{i}]") for i in range(rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(saved["spec"], file, made))
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, UNUSED) for token in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in model["merges"]])
    special = {
        name: ids[token]
        for name, token in saved["special"].items()
        if name in SPECIAL and token in ids
    }
    first, last = tokenizer_files.around(made)
    writer.add_add_bos_token(bool(first))
    writer.add_add_eos_token(bool(last))
    for name, found in (("bos_token", first), ("eos_token", last)):
        if not found:
            continue
        special.setdefault(name, found[0])
        if found != [special[name]]:
            raise ConfigError(
                f"{saved['spec']} puts tokens {found} around a "
                f"text; a GGUF file holds the {name} alone"
            )
    for name, i in special.items():
        writer.add_uint32(f"tokenizer.ggml.{SPECIAL[name]}_token_id", i)


def _split_name(spec: str, file: Mapping[str, Any], made: Any) -> str:
    """The name under which a reader finds these ids again, by trying the known ones.
    ConfigError where there is none."""
    probe = (
        "it's  WE'LL don'T aBcD\u00c9e 12345 x=1.0/2 "
        "<=>$+\n\n\t caf\u00e9/\n \u6f22\u5b57 e\u0301 \r\n"
    )
    model = file["model"]
    normalizer = file.get("normalizer") or {}
    steps = [
        step["type"] for step in normalizer.get("normalizers", [normalizer] if normalizer else [])
    ]
    pieces = made.pre_tokenizer and made.pre_tokenizer.pre_tokenize_str(probe)
    odd = [
        t["content"] for t in file["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]
    ]
    if odd:
        got = f"{spec} has the token {odd[0]!r}, which takes in blanks beside it"
        raise ConfigError(f"{got}; no GGUF file says so; export it with --format huggingface")
    for split in SPLITS:
        same_merges = bool(model.get("ignore_merges")) == split.ignore_merges
        same_text = steps == (["NFC"] if split.nfc else [])
        if (
            model["type"] == "BPE"
            and same_merges
            and same_text
            and _splitter(split).pre_tokenize_str(probe) == pieces
        ):
            return split.names[0]
    got = f"{spec} splits text (normalizer {steps or 'none'}) in no way that GGUF has a name for"
    known = ", ".join(split.names[0] for split in SPLITS)
    raise ConfigError(f"{got}; known: {known}; export it with --format huggingface")
