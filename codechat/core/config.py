"""Configurations: a frozen keyword-only dataclass <-> command line <-> json.

    @dataclass(frozen=True, kw_only=True)
    class SFTConfig:
        lr: float = opt(3e-4, "peak learning rate")
        model: GPTConfig = opt(GPTConfig(), "the model")

    cfg = parse(SFTConfig, sys.argv[1:], presets={"nano": {"lr": 1e-3, "model.depth": 4}})

Precedence: defaults < --preset < --config FILE < flags. Keys may be nested or dotted, with - or
_. Types: bool, int, float, str, Path, Literal, tuple, Any, unions of them, and dataclasses. The
words none and null are None where the type allows it and no choice has this name, in code too,
so settings mean the same from whatever they are read; an int may be written 1_000 or 1e6. A
word of the command line is split at its commas where a tuple is expected. tyro converts words
only, not json and presets, and its errors are a box and an exit, where recipes and notebooks
need one line as an exception."""

import contextlib
import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from codechat.core.atomic_files import read_json
from codechat.core.errors import ConfigError, UserError, check_choice, nearest

T = TypeVar("T")
Presets = Mapping[str, Mapping[str, Any]]
# A flag of which many settings follow, by (number, build) -> configuration: what is given wins
# over the settings in build(settings). The first paragraph of the docstring is the help.
Dials = Mapping[str, Callable[[int, Callable[[Mapping[str, Any]], Any]], Any]]
REQUIRED = dataclasses.MISSING
# bounds of a seed: what every generator takes, no two alike
SEEDS: dict[str, int] = {
    "least": 0,
    "most": 2**32 - 1,
}
NONE = ("none", "null")  # words for None
# Spelling of another tool -> our fields, of which the first that a class has is meant.
ALIASES = json.loads(Path(__file__).with_name("aliases.json").read_text(encoding="utf-8"))
# Spelling of another tool -> what to write here, where no field takes its value.
ELSEWHERE = json.loads(Path(__file__).with_name("elsewhere.json").read_text(encoding="utf-8"))


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field with its help (name the unit). `default` may be a value, a factory or
    REQUIRED. A class that inherits the field gives it another default by a plain `lr: float =
    5e-5`; help and bounds stay.

    meta: least=, most= are the bounds of a number; identity=False keeps the field out of
    `config_hash`; positional=True takes a bare word of the command line; reads="run" or "path"
    says that the value names runs or files that are read, which no --overwrite may delete."""
    metadata = {"help": help, **meta}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if callable(default):
        return dataclasses.field(metadata=metadata, default_factory=default)
    return dataclasses.field(metadata=metadata, default=default)


class Settings:
    """Base of settings groups, which a configuration inherits, several at once. The
    `__post_init__` of each group ends here: a word for None becomes None, as it does on a command
    line, and numbers are within their bounds."""

    def __post_init__(self) -> None:
        for name, field in fields_of(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, str) and means_none(field.type, value):
                object.__setattr__(self, name, None)
        _check_bounds(type(self), vars(self))

    @classmethod
    def as_spelled(cls, given: Mapping[str, Any], spelled: Set[str]) -> Mapping[str, Any]:
        """What is given by our dotted fields, where `spelled` has the words that were written
        for it: another tool's word may mean another value here, or more settings than one.
        ConfigError where it means what this project does not have."""
        return given


def flag_of(name: str) -> str:
    """How the command line writes a setting: model.block_size is --model.block-size."""
    return f"--{name.replace('_', '-')}"


# ---- fields


class Field(NamedTuple):
    """A setting of a configuration."""

    type: Any
    nested: type | None  # the dataclass among its types
    meta: Mapping[str, Any]
    default: Any  # REQUIRED, or the value
    group: type  # the class that declares it first

    def takes(self, kind: type) -> bool:
        """Whether `kind` (bool, tuple) is among its types."""
        return any((typing.get_origin(arm) or arm) is kind for arm in arms(self.type))


_fields: dict[type, dict[str, Field]] = {}  # what `fields_of` found


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a configuration by name, in the order of its class."""
    if cls not in _fields:
        _fields[cls] = _read_fields(cls)
    return _fields[cls]


def _read_fields(cls: type) -> dict[str, Field]:
    hints = typing.get_type_hints(cls)
    out = {}
    for f in dataclasses.fields(cls):
        classes = [
            base
            for base in reversed(cls.__mro__)
            if f.name in base.__dict__.get("__annotations__", {})
        ]
        meta: dict[str, Any] = {}
        for base in classes:  # help and bounds stay where a subclass only gives another default
            meta |= base.__dict__["__dataclass_fields__"][f.name].metadata
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        nested = next(
            (
                arm
                for arm in arms(hints[f.name])
                if isinstance(arm, type) and dataclasses.is_dataclass(arm)
            ),
            None,
        )
        out[f.name] = Field(hints[f.name], nested, meta, default, classes[0])
    return out


def leaves_of(cls: type, prefix: str = "", usual: Any = None) -> dict[str, Field]:
    """{dotted key: field}; a nested config is followed by the keys below it. usual: an instance
    whose values are the defaults."""
    out = {}
    for name, field in fields_of(cls).items():
        default = getattr(usual, name, field.default)
        out[prefix + name] = field._replace(default=default)
        if field.nested:
            out |= leaves_of(field.nested, f"{prefix}{name}.", default)
    return out


def find_field(cls: type, key: str) -> str | None:
    """The dotted name that `key` means in `cls`, or None. - is read as _; aliases are resolved."""
    head, _, rest = key.replace("-", "_").partition(".")
    fields = fields_of(cls)
    head = next((name for name in (head, *ALIASES.get(head, "").split()) if name in fields), "")
    if not head or not rest:
        return head or None
    nested = fields[head].nested
    below = find_field(nested, rest) if nested else None
    return f"{head}.{below}" if below else None


# ---- values


def arms(tp: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone; None first, since in `str | None` the word
    none means None."""
    if typing.get_origin(tp) not in (typing.Union, types.UnionType):
        return (tp,)
    return tuple(sorted(typing.get_args(tp), key=lambda arm: arm is not types.NoneType))


def none_words(tp: Any) -> tuple[str, ...]:
    """The words that mean None for a type: of `Literal["none", "mean"] | None` only null, since
    none is a choice there."""
    if types.NoneType not in arms(tp):
        return ()
    choices = [
        str(choice)
        for arm in arms(tp)
        if typing.get_origin(arm) is Literal
        for choice in typing.get_args(arm)
    ]
    return tuple(word for word in NONE if word not in choices)


def means_none(tp: Any, word: str) -> bool:
    return word.lower() in none_words(tp)


def type_name(tp: Any) -> str:
    """As --help writes it: none|int, adamw|muon, int ..., float float."""
    members = arms(tp)
    if typing.get_origin(tp) is tuple:
        inner = typing.get_args(tp)
        if inner[-1] is Ellipsis:
            return f"{type_name(inner[0])} ..."
        return " ".join(map(type_name, inner))
    if len(members) > 1 and "none" not in (none_words(tp) or NONE):
        return "|".join(["null", *(type_name(arm) for arm in members if arm is not types.NoneType)])
    if len(members) > 1:
        return "|".join(map(type_name, members))
    if typing.get_origin(tp) is Literal:
        return "|".join(map(type_name, typing.get_args(tp)))
    if tp is types.NoneType:
        return "none"
    return (
        tp.__name__
        if isinstance(tp, type) and not typing.get_args(tp)
        else str(tp).replace("typing.", "")
    )


def convert(tp: Any, value: Any) -> Any:
    """`value` (from json, or a word of the command line) as `tp`; ValueError or OverflowError
    where it does not fit."""
    if len(arms(tp)) > 1:
        return _to_union(tp, value)
    converter = CONVERTERS.get(typing.get_origin(tp) or tp)
    if converter is None:
        raise ValueError
    return converter(tp, value)


def _to_union(tp: Any, value: Any) -> Any:
    if value is None or (isinstance(value, str) and means_none(tp, value)):
        return None
    for arm in arms(tp):
        if arm is not types.NoneType:
            with contextlib.suppress(ValueError, OverflowError):
                return convert(arm, value)
    raise ValueError


def _to_literal(tp: Any, value: Any) -> Any:
    choices = {str(choice): choice for choice in typing.get_args(tp)}
    word = str(value)
    if isinstance(value, str) and word.lower() in NONE and word.lower() in choices:
        return word.lower()  # in any case of letters, as where the word means None
    if word not in choices:
        raise ValueError
    return choices[word]


def _to_tuple(tp: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError
    values = split_words([value]) if isinstance(value, str) else value
    kinds = typing.get_args(tp)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(values)
    return tuple(convert(kind, one) for kind, one in zip(kinds, values, strict=True))


def _to_int(tp: Any, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    if isinstance(value, float) or "e" in str(value).lower():  # 1e6 is an int too, 1.5 is none
        number = float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    return int(value)


def _to_float(tp: Any, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, str))
        or math.isnan(float(value))
    ):
        raise ValueError
    return float(value)


def _to_text(tp: Any, value: Any) -> str | Path:
    if not isinstance(value, (str, Path)):
        raise ValueError
    return tp(value)


def _to_none(tp: Any, value: Any) -> None:
    if value is not None and str(value).lower() not in NONE:
        raise ValueError


def _to_bool(tp: Any, value: Any) -> bool:
    if not isinstance(value, (bool, str)) or str(value).lower() not in ("true", "false"):
        raise ValueError
    return str(value).lower() == "true"


def _unchanged(tp: Any, value: Any) -> Any:
    return value


# kind of a type -> how a value becomes one; each raises ValueError where it does not fit
CONVERTERS: dict[Any, Callable[[Any, Any], Any]] = {
    Literal: _to_literal,
    tuple: _to_tuple,
    int: _to_int,
    float: _to_float,
    str: _to_text,
    Path: _to_text,
    bool: _to_bool,
    types.NoneType: _to_none,
    Any: _unchanged,
}


def split_words(words: Iterable[str]) -> list[str]:
    """Words of a command line for a tuple, of which each may hold several with commas between."""
    return [part for word in words for part in word.split(",") if part]


def _check_bounds(cls: type, values: Mapping[str, Any], prefix: str = "") -> None:
    for name, field in fields_of(cls).items():
        value = values.get(name)
        least = field.meta.get("least", -math.inf)
        most = field.meta.get("most", math.inf)
        if value is None or not {"least", "most"} & field.meta.keys():
            continue
        finite = math.isfinite(value)
        if finite and least <= value <= most:
            continue
        bounds = [] if finite else ["finite"]
        if math.isfinite(least):
            bounds.append(f"at least {least}")
        if math.isfinite(most):
            bounds.append(f"at most {most}")
        flag = flag_of(prefix + name)
        spelled = "" if name in flag else f" ({name})"
        raise ConfigError(f"{flag}{spelled} is {value}; it must be {' and '.join(bounds)}")


# ---- from mappings


def _flat(cls: type, mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{dotted field: value} from nested, dotted and aliased keys; of two keys with one meaning
    the later wins."""
    out = {}
    for key, value in _dotted(plain(mapping)).items():
        name = find_field(cls, key)
        if name is None:
            raise ConfigError(
                f"{where}: unknown setting {key!r}{_meant(key.replace('-', '_'), leaves_of(cls))}"
            )
        out[name] = value
    return out


def _as_spelled(
    cls: type, given: dict[str, Any], mappings: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """`Settings.as_spelled` of settings that were read from these mappings. Of several words
    for one setting the last one is meant, as its value is."""
    words: dict[str, str] = {}
    for mapping in mappings:
        for key in mapping:
            words[find_field(cls, key) or key] = key.replace("-", "_")
    return cls.as_spelled(given, set(words.values())) if issubclass(cls, Settings) else given


def _meant(key: str, names: Collection[str]) -> str:
    """The end of an error message about an unknown key: what to write in its place."""
    bare = key.removeprefix("--").replace("-", "_")
    if bare in ELSEWHERE:
        return f"; {ELSEWHERE[bare]}"
    fields = {name.removeprefix("--").replace("-", "_") for name in names}
    words = [word for word, meant in ALIASES.items() if fields & set(meant.split())]
    # a word of another library with a slip, such as learnin_rate
    slip = difflib.get_close_matches(bare, words, n=1, cutoff=0.9)
    return f"; did you mean {slip[0]!r}?" if slip else nearest(key, names)


def _build(cls: type[T], given: Mapping[str, Any], usual: Any = None, prefix: str = "") -> T:
    """An instance from values by dotted field; absent fields are those of the instance `usual`,
    or have their defaults."""
    values: dict[str, Any] = {}
    for name, field in fields_of(cls).items():
        default = getattr(usual, name, field.default)
        flag = flag_of(prefix + name)
        below = {
            key.removeprefix(f"{name}."): v
            for key, v in given.items()
            if key.startswith(f"{name}.")
        }
        if below and field.nested:
            # what is not given below stays as the default has it, which may be another than the
            # class's
            values[name] = _build(field.nested, below, default, f"{prefix}{name}.")
        elif name in given:
            values[name] = _converted(field, flag, given[name])
        elif default is REQUIRED:
            raise ConfigError(f"{prefix}{name} is required ({field.meta['help']}); set {flag}")
    _check_bounds(cls, values, prefix)
    try:
        return dataclasses.replace(usual, **values) if usual else cls(**values)
    except UserError:
        raise
    except ValueError as error:  # from __post_init__: the values do not go together
        raise ConfigError(f"{cls.__name__}: {error}") from error


def _converted(field: Field, flag: str, value: Any) -> Any:
    """`value` as the field's type; ConfigError where it does not fit."""
    try:
        return convert(field.type, value)
    except (ValueError, OverflowError):
        got = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        raise ConfigError(
            f"{flag} got {got!r}; required: {type_name(field.type)} ({field.meta['help']})"
        ) from None


def from_dict(cls: type[T], d: Mapping[str, Any], where: str | None = None) -> T:
    """An instance from a (nested or dotted) mapping; ConfigError for unknown keys and wrong
    types."""
    return _build(cls, _as_spelled(cls, _flat(cls, d, where or cls.__name__), [d]))


def resolve(
    cls: type[T],
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    presets: Presets = {},
    spelled: Iterable[str] = (),
) -> T:
    """defaults < preset < file < overrides. spelled: what a command line wrote for the
    overrides."""
    if preset:
        check_choice("preset", preset, presets)
    sources: dict[str, Mapping[str, Any]] = {}
    if preset:
        sources[f"preset {preset}"] = presets[preset]
    if file:
        sources[str(file)] = _read_file(Path(file))
    sources[cls.__name__] = overrides or {}
    given: dict[str, Any] = {}
    for where, mapping in sources.items():
        given |= _flat(cls, mapping, where)
    return _build(cls, _as_spelled(cls, given, [*sources.values(), dict.fromkeys(spelled)]))


def _read_file(path: Path) -> dict[str, Any]:
    """The settings of a json or yaml file. Every scalar of yaml is read as a word of the command
    line: yaml itself takes 1e-4 for a text and `no` for false. ConfigError for what is no
    mapping."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; --config takes a json or yaml file")
    if path.suffix not in (".yaml", ".yml"):
        return read_json(path)
    import yaml  # 20 ms, which most commands do not need

    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} cannot be read ({reason}); required: yaml, NAME: VALUE"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path} holds a yaml {type(value).__name__}; required: NAME: VALUE lines"
        )
    return value


# ---- to mappings


def plain(value: Any) -> Any:
    """Configurations, mappings, tuples and paths as plain json. `from_dict(type(cfg),
    plain(cfg)) == cfg`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        # a folder of that name is not None
        return f"./{value}" if str(value).lower() in NONE else str(value)
    return value


def identity(cfg: Any) -> dict[str, Any]:
    """The fields that decide the result, as plain json: all but those marked identity=False."""
    found = {}
    for name, field in fields_of(type(cfg)).items():
        if field.meta.get("identity", True):
            value = getattr(cfg, name)
            found[name] = identity(value) if dataclasses.is_dataclass(value) else plain(value)
    return found


def read_by(cfg: Any, kind: Literal["run", "path"]) -> list[tuple[str, str]]:
    """(flag, text) of each run, or file or folder, that a configuration reads: the values of
    fields with reads=`kind`."""
    found = []
    for name, field in fields_of(type(cfg)).items():
        value = getattr(cfg, name)
        if field.meta.get("reads") == kind and value:
            values = value if isinstance(value, tuple) else (value,)
            found += [(flag_of(name), str(one)) for one in values]
    return found


def config_hash(cfg: Any) -> str:
    """12 hex digits of `identity` and the class name; of a mapping, of all its values."""
    what = (
        plain(cfg) if isinstance(cfg, Mapping) else {"class": type(cfg).__name__, **identity(cfg)}
    )
    # 48 bits: enough to tell runs apart, and short enough for a table
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, below in value.items():
        if isinstance(below, Mapping):
            out |= _dotted(below, f"{prefix}{key}.")
        else:
            out[prefix + key] = below
    return out


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted setting: (in a, in b)} where two configurations or mappings differ; None where
    one lacks it."""
    left = _dotted(plain(a))
    right = _dotted(plain(b))
    both = {key: (left.get(key), right.get(key)) for key in left | right}
    return {key: (ours, theirs) for key, (ours, theirs) in both.items() if ours != theirs}


def changed(cfg: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted setting: (default, here)}, as plain json, of what differs from the defaults;
    "required" where there is none."""
    usual = {
        n: "required" if f.default is REQUIRED else f.default
        for n, f in fields_of(type(cfg)).items()
    }
    return differences(usual, cfg)


# ---- command line


def _read_words(cls: type, argv: Sequence[str], extra: set[str]) -> dict[str, Any]:
    """argv as {key: word, words or bool}. extra: flags that are no settings."""
    # some Pythons pass on the -- of `torchrun -m MODULE -- ...`
    words = list(argv[1:] if argv[:1] == ["--"] else argv)
    leaves = leaves_of(cls)
    free = [name for name, field in leaves.items() if field.meta.get("positional")]
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        given: str | bool | None = word
        if word.startswith("--"):
            name, given = _read_flag(cls, word, extra)
        elif free:
            name = free[0]
            if not leaves[name].takes(tuple):  # which takes all further words
                del free[0]
        else:
            meant = f"--ckpt {word}" if "ckpt" in leaves else "--name value"
            raise ConfigError(f"unexpected word {word!r}; settings are written {meant}")
        field = leaves.get(name)
        if field and field.takes(tuple):
            several = [given] if isinstance(given, str) else _take_following(words)
            if len(several) == 1 and means_none(field.type, several[0]):
                values[name] = None
            else:
                values[name] = [*(values.get(name) or ()), *split_words(several)]
        elif name in values:
            raise ConfigError(f"{flag_of(name)} is given twice (once as {word}); keep one")
        else:
            values[name] = _take_value(word, field, words) if given is None else given
    return values


def _take_value(flag: str, field: Field | None, words: list[str]) -> str | bool:
    """Remove the word that is the value of a flag, and return it; true for a switch that no
    value follows."""
    if field and field.takes(bool):
        return words.pop(0) if words and _is_bool(field, words[0]) else True
    if not words or words[0].startswith("--"):
        raise ConfigError(f"{flag} needs a value; for text that begins with -- write {flag}=TEXT")
    return words.pop(0)


def _read_flag(cls: type, word: str, extra: set[str]) -> tuple[str, str | bool | None]:
    """The setting that --NAME, --NAME=TEXT or --no-NAME means, and what the word itself gives
    it."""
    key, equals, text = word.removeprefix("--").partition("=")
    name = key if key in extra else find_field(cls, key)
    if name is not None:
        return name, text if equals else None
    leaves = leaves_of(cls)
    negated = find_field(cls, re.sub("^no[-_]", "", key))
    if equals or negated is None or not leaves[negated].takes(bool):
        raise ConfigError(
            f"unknown flag --{key}{_meant(flag_of(key), [*map(flag_of, leaves), *map(flag_of, extra)])}"
        )
    return negated, False


def _take_following(words: list[str]) -> list[str]:
    """Remove the words up to the next flag, and return them."""
    following = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    del words[: len(following)]
    return following


def _is_bool(field: Field, word: str) -> bool:
    return word in ("true", "false") or means_none(field.type, word)


def format_help(
    cls: type,
    presets: Presets = {},
    prog: str = "",
    epilog: str = "",
    dials: Dials = {},
) -> str:
    """The text of --help: what the command does, with examples; one entry for each field, under
    the group that declares it, or the name of the field that it is nested in; the rest of `epilog`,
    a docstring."""
    leaves = leaves_of(cls)
    entries = [("--preset NAME", f"start from one of: {', '.join(presets)}")] if presets else []
    for name, dial in dials.items():
        doc = getattr(dial, "func", dial).__doc__  # of a partial, what it calls
        about = " ".join(str(doc).partition("\n\n")[0].split())
        entries.append((f"{flag_of(name)} N", about))
    entries.append(
        ("--config FILE", "json or yaml file, such as the config.json of a run; flags win over it")
    )
    heading = _title(cls)
    # nested ones last: those of a new model would stand before data, steps and rates
    for name in sorted(leaves, key=lambda name: "." in name):
        field = leaves[name]
        parent, dot, _ = name.partition(".")
        title = parent.capitalize() if dot else _title(field.group)
        if title != heading:
            heading = title
            entries.append((f"\n{title}:", ""))
        if not field.nested:
            entries.append(
                (
                    f"{flag_of(name)} {type_name(field.type)}",
                    f"{field.meta['help']} ({_usual(field)})",
                )
            )
    bare = [
        name.upper() if field.default is REQUIRED else f"[{name.upper()}]"
        for name, field in leaves.items()
        if field.meta.get("positional")
    ]
    usage = " ".join(["usage:", prog, *bare, "[--setting value ...]"])
    about, more = _parted(epilog)
    settings = "\n".join(_help_entry(flag, text) for flag, text in entries)
    return "\n\n".join(part for part in (usage, about, settings, more) if part)


def _title(group: type) -> str:
    """RLSessionSettings -> RL Session."""
    name = group.__name__.removesuffix("Settings").removesuffix("Config")
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", name)


def _parted(docstring: str) -> tuple[str, str]:
    """The first paragraph with the examples below it, and the rest."""
    first, *others = docstring.strip().split("\n\n")
    examples = list(itertools.takewhile(lambda part: part.startswith("    "), others))
    return "\n\n".join([first, *examples]), "\n\n".join(others[len(examples) :])


def _usual(field: Field) -> str:
    if field.default is REQUIRED:
        return "required"
    if isinstance(field.default, tuple):
        return f"default {' '.join(map(str, field.default)) or 'empty'}"
    shown = "empty" if field.default == "" else field.default
    return f"default {'none' if shown is None else shown}"


def _help_entry(flag: str, text: str) -> str:
    """One setting, its text in a column of its own; a heading where there is no text."""
    if not text:
        return flag
    indent = " " * 34
    return textwrap.fill(
        text,
        110,
        initial_indent=f"  {flag:<30}  ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    presets: Presets = {},
    dials: Dials = {},
    prog: str = "",
    epilog: str = "",
) -> T:
    """`cls` from the words of a command line. --help prints and raises SystemExit(0); every
    error is a ConfigError."""
    if "--help" in argv or "-h" in argv:
        print(format_help(cls, presets, prog, epilog, dials))
        raise SystemExit(0)
    values = _read_words(cls, argv, {"config", *dials, *(["preset"] if presets else [])})
    preset = values.pop("preset", None) if presets else None
    file = values.pop("config", None)
    for name in dials.keys() & values.keys():
        number = values.pop(name)
        flag = f"{flag_of(name)} {number}"
        if preset or not re.fullmatch("[1-9][0-9]{0,2}", number):
            got = f"{flag} --preset {preset}" if preset else flag
            raise ConfigError(f"{got}; required: a number from 1 to 999, and no --preset beside it")

        def build(chosen: Mapping[str, Any]) -> T:
            return resolve(cls, flag, file, values, presets={flag: chosen})

        return dials[name](int(number), build)
    spelled = [word.removeprefix("--").partition("=")[0] for word in argv if word.startswith("--")]
    return resolve(cls, preset, file, values, presets=presets, spelled=spelled)
