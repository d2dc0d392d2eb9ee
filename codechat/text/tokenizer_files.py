"""The tokenizer files of an imported model: tokenizer.json and, beside it, what transformers
reads with it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codechat.core.atomic_files import read_json
from codechat.core.errors import DataError, MissingFile

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
FOR_TOOLS = "tool_use"  # the name of a chat template for requests with tools
ADVICE = "use the files that came with the weights"


def parsed(spec: str, text: str) -> Any:
    """The `tokenizers` package's object of a tokenizer.json. Truncation, padding and dropout of
    merges, which whoever saved it had set, are off: a text has one list of ids, whole. DataError
    for a text that is no tokenizer.json."""
    import tokenizers  # here: only imported models need it

    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception for any fault of the file
        raise DataError(
            f"{spec}: the package tokenizers cannot read tokenizer.json ({error})"
        ) from None
    made.no_truncation()
    made.no_padding()
    if getattr(made.model, "dropout", None):
        made.model.dropout = None
    return made


def twin(made: Any) -> Any:
    """A tokenizer with settings of its own and the same vocabulary, which both read in one place:
    to read tokenizer.json again takes a third of a second and 80 MB for 150,000 tokens."""
    import tokenizers

    other = tokenizers.Tokenizer(made.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(made, name)
        if part is not None:
            setattr(other, name, part)
    added = made.get_added_tokens_decoder()
    other.add_tokens([added[i] for i in sorted(added)])
    return other


def around(made: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer's own post-processor puts before a text and behind it."""
    plain = made.encode("a", add_special_tokens=False).ids
    whole = made.encode("a", add_special_tokens=True).ids
    for at in range(len(whole)):
        end = at + len(plain)
        if whole[at:end] == plain:
            return whole[:at], whole[end:]
    return [], []


def read(place: Path) -> dict[str, Any]:
    """`saved` of an ImportedTokenizer: of a directory with tokenizer.json, or of that file; the
    other files beside it are optional. DataError for files that contradict each other."""
    path = place / "tokenizer.json" if place.is_dir() else place
    if not path.is_file():
        raise MissingFile(
            f"{path} does not exist; give hf:DIR with a tokenizer.json "
            "(transformers' save_pretrained writes one)"
        )
    spec = f"hf:{place.name}"
    config = _optional(path.with_name("tokenizer_config.json"))
    if "added_tokens_decoder" not in config:  # files older than it
        config = config | _optional(path.with_name("special_tokens_map.json"))
    named = {key: _content(config.get(key)) for key in NAMED}
    special = {key: content for key, content in named.items() if content}
    text = _with_all_tokens(spec, path, config, special)
    if "eos_token" not in special:
        model = _optional(path.with_name("config.json")) | _optional(
            path.with_name("generation_config.json")
        )
        eos_id = model.get("eos_token_id")
        if isinstance(eos_id, list):
            eos_id = eos_id[0] if eos_id else None
        added = json.loads(text).get("added_tokens") or []
        special |= {"eos_token": entry["content"] for entry in added if entry["id"] == eos_id}
    return {"spec": spec, "json": text, "special": special, "template": _template(path, config)}


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template; of several, see `joined_template`."""
    jinja = path.with_name("chat_template.jinja")
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
    if isinstance(template, list):
        return joined_template({entry["name"]: entry["template"] for entry in template})
    for_tools = path.parent / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"
    if not template or not for_tools.is_file():
        return template
    text = for_tools.read_text(encoding="utf-8")
    return joined_template({"default": template, FOR_TOOLS: text})


def joined_template(named: Mapping[str, str]) -> str | None:
    """One chat template of several with names: requests with tools take tool_use, others default,
    as in transformers' get_chat_template; but an empty list offers nothing, so it takes default."""
    default = named.get("default")
    for_tools = named.get(FOR_TOOLS)
    if default is None or for_tools is None:
        return default
    return "{% if tools %}" + _inside(for_tools) + "{% else %}" + _inside(default) + "{% endif %}"


def _inside(template: str) -> str:
    """A template as it stands in another one: jinja takes away a line end at its end and blanks
    before a block at its beginning; empty outputs keep the rest apart from our own blocks."""
    text = re.sub(r"\r\n|\r", "\n", template).removesuffix("\n")
    text = re.sub(r"\A[ \t]+(?=\{[%#](?!\+))", "", text)
    return "{{ '' }}" + text + "{{ '' }}"


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """The text of a token, which is written as such or with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _with_all_tokens(
    spec: str, path: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> str:
    """The text of tokenizer.json with the tokens that only the files beside it name, without
    truncation, padding and dropout."""
    text = path.read_text(encoding="utf-8")
    made = parsed(spec, text)
    before = made.get_added_tokens_decoder()
    more: Any = next(filter(None, map(config.get, EXTRA)), [])
    more = more.values() if isinstance(more, dict) else more
    extra = [content for content in map(_content, more) if content]
    table = config.get("added_tokens_decoder")
    if table is None:
        table = _older_table(
            path, {*special.values(), *extra}, {token.content for token in before.values()}
        )
    _add_listed(made, spec, table)
    listed = {token.content for token in made.get_added_tokens_decoder().values()}
    named = [token for token in special.values() if made.token_to_id(token) is not None]
    unlisted = dict.fromkeys(token for token in [*named, *extra] if token not in listed)
    made.add_special_tokens([*unlisted])
    as_saved = json.loads(text)
    dropout = (as_saved.get("model") or {}).get("dropout")
    changed = as_saved.get("truncation") or as_saved.get("padding") or dropout
    if changed or made.get_added_tokens_decoder() != before:
        return str(made.to_str())
    return text


def _add_listed(made: Any, spec: str, table: Any) -> None:
    """Add the tokens of an added_tokens_decoder. DataError where one would have another id than
    there."""
    import tokenizers

    try:
        ids = {about["content"]: int(i) for i, about in table.items()}
        tokens = [
            tokenizers.AddedToken(about["content"], **_flags(about)) for about in table.values()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{spec}: added_tokens_decoder is no table of ids and tokens ({error!r}); {ADVICE}"
        ) from None
    # a new token takes the next free id
    made.add_tokens(sorted(tokens, key=lambda token: ids[token.content]))
    for content, i in ids.items():
        found = made.token_to_id(content)
        if found != i:
            got = (
                f"{spec}: added_tokens_decoder has token {content!r} as {i}, "
                f"with tokenizer.json it becomes {found}"
            )
            raise DataError(f"{got}; {ADVICE}")


def _flags(about: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: about[flag] for flag in FLAGS if flag in about}


def _older_table(path: Path, special: set[str], known: set[str]) -> dict[str, Any]:
    """What added_tokens.json adds, as an added_tokens_decoder; tokenizer.json's own flags win."""
    ids = _optional(path.with_name("added_tokens.json"))
    return {
        i: {"content": token, "special": token in special, "normalized": token not in special}
        for token, i in ids.items()
        if token not in known
    }
