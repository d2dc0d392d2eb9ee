"""The tokenizer's files of an export: tokenizer.json, its chat template and configurations, for
transformers, vLLM and llama.cpp."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError
from codechat.text import chat, tokenizer, tool_calls, tool_lists
from codechat.text.chat import END_TAG, TAG_OF
from codechat.text.tokenizer import END_OF_TEXT, ImportedTokenizer, Tokenizer
from codechat.text.tool_calls import CALL_TAG, TAGS
from codechat.text.tool_lists import WITH_TOOLS

CUT = "\ufdd0\ufdd1"  # two Unicode noncharacters, which occur in no text
SPLIT_AT_CUTS = dict(type="Split", pattern=dict(String=CUT), behavior="Removed", invert=False)
# turns OpenAI's messages and tools into messages that are text, as `codechat serve` does
MESSAGES = "messages.jinja"
_MESSAGES = re.compile(
    r"\{#- messages as text, by CodeChat #\}.*?\{#- end of messages as text #\}\n", re.DOTALL
)


def chat_template(
    tags: str,
    tools_style: str = "compact",
    theirs: str | None = None,
    beginning: str = "",
) -> str:
    """The jinja template of what `codechat serve` renders: conversations with tools, calls and
    results. theirs: the template of an imported model, for tags template. beginning: what
    stands before raw text. It raises for what it cannot render so."""
    if tags == chat.NATIVE:
        return without_messages(theirs or "")  # it lists tools and writes calls itself
    written = {
        "TOOLS_STYLE": tools_style,
        "DECLINED_WORDS": tool_calls.DECLINED,
        "DECLINE_CALL": tool_calls.DECLINE,
        "NOTHING_NAME": tool_lists.NOTHING,
        "NOTHING_FITS": tool_lists.NOTHING_FITS,
        "WITH_TOOLS": WITH_TOOLS,
        "ALL_TAGS": json.dumps(TAGS),
        "CALL_TAG": CALL_TAG,
    }
    text = _filled(MESSAGES, written)
    if tags == chat.RAW and beginning:
        text += f"{{{{- {json.dumps(beginning)} -}}}}"
    return text + (own_template(tags) if theirs is None else without_messages(theirs))


def without_messages(template: str) -> str:
    """A chat template without what `chat_template` puts before it."""
    return _MESSAGES.sub("", template)


def own_template(tags: str) -> str:
    """The jinja template of `chat`'s layout for messages of text: one for both tag modes; of
    raw text without tags."""
    if tags == chat.RAW:
        return _filled("raw_template.jinja", {})
    written = {
        "HEADS": json.dumps(TAG_OF | {"tool": TAG_OF["function"]}),
        "ROLES": ", ".join(TAG_OF),
        "TURN_TAGS": json.dumps([tag for tag in TAGS if tag != CALL_TAG]),
        "CALL_TAG": CALL_TAG,
        "END_TAG": END_TAG,
    }
    return _filled("chat_template.jinja", written)


def _filled(file: str, written: Mapping[str, str]) -> str:
    """The text of a template of ours with its words in capitals replaced."""
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    for name, value in written.items():
        text = text.replace(name, value)
    return text


def end_ids(tok: Tokenizer, tags: str) -> list[int]:
    """Single ids that end a completion: <|end|> where it is one, then the end of text."""
    (stop,) = chat.stop_sequences(tok, tags)
    ends = stop if len(stop) == 1 else ()
    return list(dict.fromkeys((*ends, tok.eot_id)))


def tokenizer_files(
    tok: Tokenizer,
    tags: str,
    *,
    block_size: int,
    rows: int,
    tools_style: str = "compact",
) -> dict[str, str]:
    """{file name: text} of tokenizer and conversations. rows: of the embedding; rows without an
    id are never generated.

    The ids equal those of `tok.encode`, `chat.render` and `chat.prompt`, which tokenise tags,
    line ends and contents apart, while a template yields one text. So the normaliser puts the
    mark `CUT` where `chat` begins a new piece, and the pre-tokeniser splits there and drops the
    mark; not in raw text of several turns, where nothing marks the places, so a token may hold
    the end of one turn and the beginning of the next. The template raises where one text is
    ambiguous: content that spells a turn tag or, outside assistant turns, <functioncall>. In text
    mode <|end|> is several tokens: `generate` needs stop_strings=["<|end|>"] and its tokenizer."""
    reserved = tags == "reserved"
    template = None
    special = dict(
        bos_token=END_OF_TEXT,
        eos_token=END_TAG if reserved else END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    if isinstance(tok, ImportedTokenizer):
        if reserved:  # its ids keep their meaning only with its own template, or with tags as text
            raise ConfigError(
                f"tags reserved with the imported {tok.spec}; required are tags template or text"
            )
        file = _with_cuts(tok.saved["json"], tags)
        special = tok.saved["special"]
        template = tok.template
    else:
        file = json_text(tokenizer_json(tok, tags))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=block_size,
        add_bos_token=False,
        clean_up_tokenization_spaces=False,
    )
    generation = dict(
        bos_token_id=tok.eot_id, eos_token_id=end_ids(tok, tags), pad_token_id=tok.eot_id
    )
    unnamed = list(range(tok.n_vocab + (len(TAGS) if reserved else 0), rows))
    if unnamed:
        generation["suppress_tokens"] = unnamed
    theirs = (template or "") if tags in chat.TEMPLATES else None
    beginning = tok.decode(tok.beginning) if tok.beginning else ""
    return {
        "tokenizer.json": file,
        "chat_template.jinja": chat_template(tags, tools_style, theirs, beginning),
        "tokenizer_config.json": json_text(config | special),
        "generation_config.json": json_text(generation),
    }


def tokenizer_json(tok: Tokenizer, tags: str) -> dict[str, Any]:
    """The `tokenizers` package's own file."""
    merges: list[str] = []
    by_bytes = True
    if isinstance(tok, tokenizer.BpeTokenizer):
        merges = tok.merges
        letters = sorted(tokenizer.byte_letters())
    elif isinstance(tok, tokenizer.TableTokenizer):
        by_bytes = tok.alphabet is None
        letters = list(tok.alphabet or tokenizer.byte_letters())
    else:
        raise ConfigError(
            f"tokenizer {tok.spec} has no tokenizer.json; gpt2, gpt2:N, python:N, chars, bytes do"
        )
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    tag_ids = enumerate(TAGS, tok.n_vocab) if tags == "reserved" else ()
    # normalized: matched after the normaliser ran, which looks for tags beside line ends
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=True, special=True)
    byte_level = dict(
        type="ByteLevel",
        add_prefix_space=False,
        trim_offsets=False,
        use_regex=isinstance(tok, tokenizer.BpeTokenizer),
    )
    splits = [SPLIT_AT_CUTS, byte_level] if by_bytes else [SPLIT_AT_CUTS]
    return dict(
        version="1.0",
        added_tokens=[
            dict(id=i, content=text) | flags for i, text in ((tok.eot_id, END_OF_TEXT), *tag_ids)
        ],
        normalizer=dict(type="Sequence", normalizers=_marks(tags)),
        pre_tokenizer=dict(type="Sequence", pretokenizers=splits),
        decoder=byte_level if by_bytes else dict(type="Fuse"),
        model=dict(type="BPE", vocab={token: i for i, token in enumerate(tokens)}, merges=merges),
    )


def _with_cuts(text: str, tags: str) -> str:
    """An imported tokenizer.json that splits where `chat` does. Without it a token may hold the
    end of a content and the line end behind it, as Qwen's `.\\n` does. Where a blank stands
    before each piece it stays as it is."""
    about = json.loads(text)
    if tags != "text" or '"add_prefix_space": true' in json.dumps(about["pre_tokenizer"]):
        return text
    normalizers = [step for step in (*_marks(tags), about["normalizer"]) if step]
    splits = [step for step in (SPLIT_AT_CUTS, about["pre_tokenizer"]) if step]
    about["normalizer"] = dict(type="Sequence", normalizers=normalizers)
    about["pre_tokenizer"] = dict(type="Sequence", pretokenizers=splits)
    return json_text(about)


def _marks(tags: str) -> list[dict[str, Any]]:
    """The normaliser's steps that put marks where `chat` cuts. Raw text has no tags."""
    if tags == chat.RAW:
        return []
    cuts: dict[str, str] = {}
    if tags == "reserved":  # the tags are cut out anyway
        cuts |= {f"{tag}\n": f"{tag}\n{CUT}" for tag in TAG_OF.values()}
        cuts[f"\n{END_TAG}"] = f"{CUT}\n{END_TAG}"
    else:
        cuts |= {f"{tag}\n": f"{CUT}{tag}{CUT}\n{CUT}" for tag in TAG_OF.values()}
        cuts[f"\n{END_TAG}"] = f"{CUT}\n{CUT}{END_TAG}{CUT}"
        cuts[CALL_TAG] = f"{CUT}{CALL_TAG}{CUT}"
    return [
        dict(type="Replace", pattern=dict(String=text), content=marked)
        for text, marked in cuts.items()
    ]


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"
