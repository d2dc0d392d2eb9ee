"""Configurations: a frozen keyword-only dataclass <-> command line <-> json.

    @dataclass(frozen=True, kw_only=True)
    class SFTConfig:
        lr: float = opt(3e-4, "peak learning rate")
        model: GPTConfig = opt(GPTConfig(), "the model")

    cfg = parse(SFTConfig, sys.argv[1:], presets={"nano": {"lr": 1e-3, "model.depth": 4}})

Precedence: defaults < --preset < --config FILE < flags. Keys may be nested or dotted, with - or _. Types: bool, int, float, str, Path,
Literal, tuple, dataclass, Any, and unions of them. The word none is None where the type allows it; an int may be written 1_000 or 1e6.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from codechat.core.errors import ConfigError, MissingFile, UserError, nearest

T = TypeVar("T")
REQUIRED = dataclasses.MISSING

# Spelling of another tool -> our fields, of which the first that a class has is meant.
ALIASES = {
    name: fields.split() for name, fields in json.loads(Path(__file__).with_name("aliases.json").read_text()).items()
}


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field with its help (name the unit). `default` may be a value, a factory or REQUIRED.

    meta: least=, most= are the bounds of a number; identity=False keeps the field out of `config_hash`; positional=True takes a bare word of
    the command line; verbatim=True is for texts whose flag takes the next word as it is, and may be repeated.
    """
    return _dataclass_field(default, {"help": help, **meta})


def default(value: Any, **meta: Any) -> Any:
    """Another default for a field of a base class: `lr: float = default(5e-5)`. Its help and bounds stay."""
    return _dataclass_field(value, {"inherited": True, **meta})


def _dataclass_field(value: Any, metadata: Mapping[str, Any]) -> Any:
    if value is REQUIRED:
        return dataclasses.field(metadata=metadata)
    how = {"default_factory" if callable(value) else "default": value}
    return dataclasses.field(metadata=metadata, **how)


class Settings:
    """Base of settings groups, which a configuration inherits, several at once. A `__post_init__` of a group checks its own fields and calls
    `super().__post_init__()`; this class ends the chain and checks bounds."""

    def __post_init__(self) -> None:
        _check_bounds(type(self), {name: getattr(self, name) for name in fields_of(type(self))})
        following = getattr(super(), "__post_init__", None)
        if following:
            following()


def flag_of(name: str) -> str:
    """How the command line writes a setting: model.block_size is --model.block-size."""
    return f"--{name.replace('_', '-')}"


def _check_bounds(cls: type, values: Mapping[str, Any], prefix: str = "") -> None:
    for name, field in fields_of(cls).items():
        value, least, most = values.get(name), field.meta.get("least"), field.meta.get("most")
        if value is None or least is most is None:
            continue
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if not (low <= value <= high and math.isfinite(value)):
            needed = f"from {least} to {most}" if most is not None else f"at least {least} and finite"
            raise ConfigError(f"{prefix}{name} is {value}; it must be {needed}; correct {flag_of(prefix + name)}")


# ---- fields


class Field(NamedTuple):
    type: Any
    nested: type | None  # the dataclass among its types
    meta: Mapping[str, Any]
    default: Any  # REQUIRED, or the value
    group: type  # the class that declares it with `opt`


def _names(cls: type) -> list[str]:
    """Fields as --help lists them: groups from the last base to the first, then the class's own."""
    if not dataclasses.is_dataclass(cls):
        return []
    inherited = [name for base in reversed(cls.__bases__) for name in _names(base)]
    return list(dict.fromkeys([*inherited, *(f.name for f in dataclasses.fields(cls))]))


@cache
def fields_of(cls: type) -> dict[str, Field]:
    hints, dataclass_fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for name in _names(cls):
        f, meta = dataclass_fields[name], {"inherited": True}
        groups = [base for base in cls.__mro__ if name in base.__dict__.get("__dataclass_fields__", {})]
        for group in groups:
            if meta.pop("inherited", False):
                meta = {**group.__dict__["__dataclass_fields__"][name].metadata, **meta}
        if "inherited" in meta:
            raise TypeError(f"{cls.__name__}.{name}: default() is for a field of a base class; declare it with opt()")
        nested = next((a for a in arms(hints[name]) if dataclasses.is_dataclass(a)), None)
        value = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        declaring = [base for base in cls.__mro__ if name in base.__dict__.get("__annotations__", {})]
        out[name] = Field(hints[name], nested, meta, value, declaring[-1])
    return out


def leaves_of(cls: type, prefix: str = "", usual: Any = None) -> dict[str, Field]:
    """{dotted key: field}; a nested config is followed by the keys below it. usual: an instance whose values are the defaults."""
    out = {}
    for name, f in fields_of(cls).items():
        f = f if usual is None else f._replace(default=getattr(usual, name))
        out[prefix + name] = f
        if f.nested:
            out |= leaves_of(f.nested, f"{prefix}{name}.", f.default if isinstance(f.default, f.nested) else None)
    return out


def find_field(cls: type, key: str) -> str | None:
    """The dotted name that `key` means in `cls`, or None. - is read as _; aliases are resolved."""
    head, _, rest = key.replace("-", "_").partition(".")
    fields = fields_of(cls)
    if head not in fields:
        head = next((name for name in ALIASES.get(head, ()) if name in fields), "")
    if not head or not rest:
        return head or None
    below = find_field(fields[head].nested, rest) if fields[head].nested else None
    return below and f"{head}.{below}"


# ---- values


def arms(tp: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(tp) if typing.get_origin(tp) in (typing.Union, types.UnionType) else (tp,)


def type_name(tp: Any) -> str:
    """As --help writes it: int|none, adamw|muon, tuple[int, ...]."""
    if typing.get_origin(tp) is Literal:
        return "|".join(map(str, typing.get_args(tp)))
    if len(arms(tp)) > 1:
        return "|".join(map(type_name, arms(tp)))
    if tp is types.NoneType:
        return "none"
    return tp.__name__ if isinstance(tp, type) and not typing.get_args(tp) else str(tp).replace("typing.", "")


def _number(tp: type, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    exact = tp is int and not isinstance(value, float) and "e" not in str(value).lower()
    number = int(value) if exact else float(value)
    if math.isnan(number) or (tp is int and number != int(number)):
        raise ValueError
    return tp(number)


def _items(tp: Any, value: Any) -> tuple[Any, ...]:
    """A tuple from a list, or from words of which each may hold commas."""
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)):
        raise ValueError
    if all(isinstance(v, str) for v in value):
        value = [part for v in value for part in v.split(",") if part]
    args = typing.get_args(tp)
    kinds = args[:1] * len(value) if args[1:] == (...,) else args
    return tuple(convert(kind, v) for kind, v in zip(kinds, value, strict=True))


def convert(tp: Any, value: Any) -> Any:
    """`value` (from json, or a word of the command line) as `tp`; ValueError or OverflowError where it does not fit."""
    word = str(value)
    if len(arms(tp)) > 1:
        for arm in sorted(arms(tp), key=lambda a: a is not types.NoneType):  # in `str | None` the word none means None
            try:
                return convert(arm, value)
            except (ValueError, OverflowError):
                continue
    elif typing.get_origin(tp) is Literal:
        for choice in typing.get_args(tp):
            if str(choice) == word:
                return choice
    elif typing.get_origin(tp) is tuple:
        return _items(tp, value)
    elif tp in (int, float):
        return _number(tp, value)
    elif tp is Any or (dataclasses.is_dataclass(tp) and isinstance(value, tp)):
        return value
    elif tp is types.NoneType and word.lower() in ("none", "null"):
        return None
    elif tp is bool and word.lower() in ("true", "false") and isinstance(value, (bool, str)):
        return word.lower() == "true"
    elif tp in (str, Path) and isinstance(value, (str, Path)):
        return tp(value)
    raise ValueError


def _checked(field: Field, name: str, value: Any) -> Any:
    if field.meta.get("verbatim"):
        return (value,) if isinstance(value, str) else tuple(map(str, value))
    try:
        return convert(field.type, value)
    except (ValueError, OverflowError):
        got = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    raise ConfigError(f"{name} got {got!r}; it takes {type_name(field.type)} ({field.meta.get('help', '')})")


# ---- from mappings


def _flatten(cls: type, mapping: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Nested, dotted and aliased keys -> {dotted name: value}. Keys below a nested config win over an instance of it."""
    whole: dict[str, Any] = {}
    out: dict[str, Any] = {}
    leaves = leaves_of(cls)
    for key, value in mapping.items():
        name = find_field(cls, prefix + key)
        if name is None:
            raise ConfigError(
                f"{where}: unknown setting {prefix + key!r}{nearest(prefix + key.replace('-', '_'), leaves)}"
            )
        nested = leaves[name].nested
        if nested and dataclasses.is_dataclass(value):
            whole |= _flatten(cls, to_dict(value), where, f"{name}.")
            continue
        new = _flatten(cls, value, where, f"{name}.") if nested and isinstance(value, Mapping) else {name: value}
        if twice := new.keys() & out.keys():
            raise ConfigError(f"{where}: {min(twice)!r} is given twice (once as {prefix + key!r}); keep one")
        out |= new
    return whole | out


def _build(cls: type[T], flat: Mapping[str, Any], prefix: str = "") -> T:
    """An instance from {dotted name: value}; absent fields keep their defaults."""
    values: dict[str, Any] = {}
    for key, f in fields_of(cls).items():
        name = prefix + key
        below = {k: v for k, v in flat.items() if k.startswith(name + ".")}
        if below:
            start = _dotted(to_dict(f.default), name + ".") if dataclasses.is_dataclass(f.default) else {}
            values[key] = _build(f.nested, start | below, name + ".")
        elif name in flat:
            values[key] = _checked(f, name, flat[name])
        elif f.default is REQUIRED:
            raise ConfigError(f"{name} is required ({f.meta.get('help', '')}); set {flag_of(name)}")
    _check_bounds(cls, values, prefix)
    try:
        return cls(**values)
    except UserError:
        raise
    except ValueError as e:  # from __post_init__: the values do not go together
        raise ConfigError(f"{cls.__name__}: {e}") from e


def _merge(flat: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Later wins: a nested config given whole (or none) replaces the keys below it, and a key below replaces a none."""
    out = dict(flat)
    for key, value in over.items():
        out = {k: v for k, v in out.items() if not k.startswith(key + ".") and not key.startswith(k + ".")}
        out[key] = value
    return out


def from_dict(cls: type[T], d: Mapping[str, Any], where: str | None = None) -> T:
    """An instance from a (nested or dotted) mapping; ConfigError for unknown keys and wrong types."""
    return _build(cls, _merge({}, _flatten(cls, d, where or cls.__name__)))


def read_json(path: str | Path) -> dict[str, Any]:
    """A json object from a file; MissingFile or ConfigError where there is none."""
    path = Path(path)
    if not path.is_file():
        raise MissingFile(f"{path} is not a file; --config takes a json file such as runs/NAME/config.json")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:  # bad json and bad utf-8
        raise ConfigError(f"{path} is not json ({e})") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a json {type(value).__name__}; a configuration is an object {{...}}")
    return value


def resolve(
    cls: type[T],
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """defaults < preset < file < overrides. A file may name its own preset; a class with a field `preset` records the name."""
    table, values, flat = presets or {}, read_json(file) if file else {}, {}
    records = "preset" in fields_of(cls)
    preset = preset or (values.get("preset") if records else values.pop("preset", None))
    if preset and (table or not records):
        if not isinstance(preset, str) or preset not in table:
            raise ConfigError(
                f"unknown preset {preset!r}{nearest(str(preset), table)} (presets: {', '.join(table) or 'none'})"
            )
        flat = _flatten(cls, table[preset], f"preset {preset}")
    flat = _merge(flat, _flatten(cls, values, str(file)))
    if records and preset:
        flat["preset"] = preset
    return _build(cls, _merge(flat, _flatten(cls, overrides or {}, "flags" if file or preset else cls.__name__)))


# ---- to mappings


def plain(value: Any) -> Any:
    """Configurations, mappings, tuples and paths as plain json."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def to_dict(cfg: Any) -> dict[str, Any]:
    """Plain json: nested dicts, lists for tuples. `from_dict(type(cfg), to_dict(cfg)) == cfg`."""
    return {f.name: plain(getattr(cfg, f.name)) for f in dataclasses.fields(cfg)}


def identity(cfg: Any) -> dict[str, Any]:
    """The fields that decide the result, as plain json: all but those marked identity=False."""
    values = {n: getattr(cfg, n) for n, f in fields_of(type(cfg)).items() if f.meta.get("identity", True)}
    return {n: identity(v) if dataclasses.is_dataclass(v) else plain(v) for n, v in values.items()}


def config_hash(cfg: Any) -> str:
    """12 hex digits of `identity` and the class name; of a mapping, of all its values."""
    what = plain(cfg) if isinstance(cfg, Mapping) else {"class": type(cfg).__name__, **identity(cfg)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _dotted(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in value.items():
        out |= _dotted(v, f"{prefix}{k}.") if isinstance(v, Mapping) else {prefix + k: v}
    return out


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted setting: (in a, in b)} where two configurations or mappings differ; None where one lacks it."""
    left, right = _dotted(plain(a)), _dotted(plain(b))
    both = {k: (left.get(k), right.get(k)) for k in left | right}
    return {k: (x, y) for k, (x, y) in both.items() if x != y}


def changed(cfg: Any, usual: Any = None) -> dict[str, tuple[Any, Any]]:
    """{dotted setting: (default, here)}, as plain json, of what differs from the defaults, or from `usual`; "required" where there is none."""
    out: dict[str, tuple[Any, Any]] = {}
    for name, field in fields_of(type(cfg)).items():
        here, before = getattr(cfg, name), field.default if usual is None else getattr(usual, name)
        if dataclasses.is_dataclass(here) and type(here) is type(before):
            out |= {f"{name}.{below}": pair for below, pair in changed(here, before).items()}
        elif here != before:
            out[name] = ("required" if before is REQUIRED else plain(before), plain(here))
    return out


# ---- command line


def _read_words(cls: type, argv: Sequence[str], extra: set[str]) -> dict[str, Any]:
    """argv as {dotted name: word, words or bool}. extra: flags that are no settings."""
    words = list(argv[1:] if argv[:1] == ["--"] else argv)  # some Pythons pass on the -- of `torchrun -m MODULE -- ...`
    leaves, values = leaves_of(cls), {}
    free = [name for name, f in leaves.items() if f.meta.get("positional")]

    def takes(name: str, kind: type) -> bool:
        return name in leaves and kind in [typing.get_origin(arm) or arm for arm in arms(leaves[name].type)]

    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if not free:
                raise ConfigError(f"unexpected word {word!r}; settings are written --name value")
            name = free[0] if takes(free[0], tuple) else free.pop(0)
            values[name] = [*values.get(name, ()), word] if takes(name, tuple) else word
            continue
        key, equals, value = word[2:].partition("=")
        name = key if key in extra else find_field(cls, key)
        if name is None and not equals and key.startswith("no-"):
            name, equals, value = find_field(cls, key[3:]), "=", False
        if name is None or (value is False and not takes(name, bool)):
            raise ConfigError(f"unknown flag --{key}{nearest(flag_of(key), [flag_of(n) for n in (*leaves, *extra)])}")
        many, verbatim = takes(name, tuple), name in leaves and leaves[name].meta.get("verbatim")
        if not equals and takes(name, bool):
            value = words.pop(0) if words[:1] in (["true"], ["false"]) else True
        elif not equals:
            taken = [words.pop(0)] if words and (verbatim or not words[0].startswith("--")) else []
            while many and words and not words[0].startswith("--"):
                taken.append(words.pop(0))
            if not taken and not many:
                kind = type_name(leaves[name].type) if name in leaves else "a name"
                raise ConfigError(f"{word} needs a value ({kind}); for text that begins with -- write {word}=TEXT")
            value = taken if many else taken[0]
        if verbatim:
            value = [*values.pop(name, ()), *([value] if isinstance(value, str) else value)]
        if name in values:
            raise ConfigError(f"{word}: {name} is given twice; keep one")
        values[name] = value
    return values


def format_help(
    cls: type, *, presets: Mapping[str, Any] | None = None, prog: str | None = None, epilog: str | None = None
) -> str:
    """The text of --help: one entry for each field, under the group that declares it."""
    leaves = leaves_of(cls)
    bare = [name.upper() for name, f in leaves.items() if f.meta.get("positional")]
    lines = [" ".join([f"usage: {prog or Path(sys.argv[0]).name}", *bare, "[--setting value ...]"])]
    if presets:
        lines.append(_help_entry("--preset NAME", f"start from one of: {', '.join(presets)}"))
    lines.append(_help_entry("--config FILE", "json file, such as the config.json of a run; flags win over it"))
    heading = cls
    for name, f in leaves.items():
        if f.nested or (name == "preset" and presets):
            continue
        group = leaves[name.partition(".")[0]].group
        if group is not heading:
            heading = group
            title = group.__name__.removesuffix("Settings").removesuffix("Config")
            lines.append(f"\n{re.sub(r'(?<=[a-z])(?=[A-Z][a-z])', ' ', title)}:")
        shown = (
            " ".join(map(str, f.default)) or "empty"
            if isinstance(f.default, tuple)
            else str(f.default).replace("None", "none")
        )
        usual = " (required)" if f.default is REQUIRED else f" (default {shown})"
        lines.append(_help_entry(f"{flag_of(name)} {type_name(f.type)}", f.meta.get("help", "") + usual))
    return "\n".join(lines) + (f"\n\n{epilog.strip()}" if epilog else "")


def _help_entry(flag: str, text: str) -> str:
    first = f"  {flag:<30}  "
    return textwrap.fill(text, 110, initial_indent=first, subsequent_indent=" " * 34, break_on_hyphens=False)


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    prog: str | None = None,
    epilog: str | None = None,
) -> T:
    """`cls` from the words of a command line. --help prints and raises SystemExit(0); every error is a ConfigError."""
    if "--help" in argv or "-h" in argv:
        print(format_help(cls, presets=presets, prog=prog, epilog=epilog))
        raise SystemExit(0)
    extra = {"config", "preset"} if presets else {"config"}
    try:
        values = _read_words(cls, argv, extra)
        preset, file = (values.pop(key, None) if key in extra else None for key in ("preset", "config"))
        return resolve(cls, preset, file, values, presets=presets)
    except ConfigError as error:
        raise ConfigError(_name_flags(str(error), cls)) from error


def _name_flags(message: str, cls: type) -> str:
    """The message with settings as the command line writes them. Quoted names, which may be keys of a file, stay."""
    leaves = leaves_of(cls)
    flags = {name.rpartition(".")[2]: flag_of(name) for name in reversed(leaves)} | {n: flag_of(n) for n in leaves}
    named = re.sub(r"(?<![\w./'\"-])[a-z]\w*[_.]\w+(?![\w/'\"=-])", lambda name: flags.get(name[0], name[0]), message)
    return re.sub(r"^(\w+: )?(\w+)(?= )", lambda start: (start[1] or "") + flags.get(start[2], start[2]), named)
