"""Configurations: a frozen keyword-only dataclass <-> command line <-> json.

    @dataclass(frozen=True, kw_only=True)
    class SFTConfig:
        lr: float = opt(3e-4, "peak learning rate")
        model: GPTConfig = opt(GPTConfig(), "the model")

    cfg = parse(SFTConfig, sys.argv[1:], presets={"nano": {"lr": 1e-3, "model.depth": 4}})

Precedence: defaults < --preset < --config FILE < flags. The help string of a field feeds --help, tables in
notebooks and the README. Keys may be nested ({"model": {"depth": 2}}) or dotted ("model.depth"), with - or _.
An unknown key is an error that names the nearest valid one.

Types: bool, int, float, str, Path, Literal, tuple, dataclass, Any, and unions of them (`int | None`). A word
"none" is None where the type allows it; an int may be written 1_000 or 1e6; a tuple takes words, each of which
may hold commas.

Left out: sub-commands (`codechat.cli` has them), environment variables, YAML, interpolation (a preset is a plain
dict), and fields that hold a dict or a list.
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

# Spelling of another tool -> our field, or several, of which the first that a class has is meant. A field of the class
# itself comes before an alias.
ALIASES: dict[str, str | tuple[str, ...]] = {
    "num_generations": "group_size", "num_samples": "group_size", "k_samples": "group_size", "group": "group_size",
    "beta": "kl_coef", "kl_beta": "kl_coef", "beta_kl": "kl_coef", "ent_coef": "entropy_coef", "vf_coef": "value_coef",
    "epsilon": "clip_eps_low", "epsilon_low": "clip_eps_low", "epsilon_high": "clip_eps_high",
    "warmup": "warmup_steps", "warmup_iters": "warmup_steps", "learning_rate": "lr", "wd": "weight_decay",
    "grad_accum_steps": "grad_accum", "gradient_accumulation_steps": "grad_accum",
    "batch_size": "device_batch_size", "micro_batch_size": "device_batch_size",
    "per_device_train_batch_size": "device_batch_size",
    "max_iters": "max_steps", "num_steps": "max_steps", "num_iterations": ("inner_epochs", "max_steps"),
    "max_completion_length": "max_new_tokens", "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_grad_norm": "grad_clip", "eval_interval": "eval_every", "eval_steps": "eval_every",
    "eval_examples": "limit",
    "save_interval": "save_every", "save_steps": "save_every", "logging_steps": "log_every",
    "from": "from_stage", "run": "run_name", "name": "run_name",
    "checkpoint": "ckpt", "model_path": "ckpt", "init": "init_from",
    "n_layer": "depth", "n_layers": "depth", "n_heads": "n_head", "n_kv_heads": "n_kv_head",
    "max_seq_len": "block_size", "seq_len": "block_size", "sequence_len": "block_size",
}  # fmt: skip

# ---- declaring fields


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field with its help (name the unit). `default` may be a value, a factory or REQUIRED.

    meta: identity=False keeps the field out of `config_hash`. positional=True takes a bare word of the command line. verbatim=True is for a tuple of
    texts that are kept as they are written: its flag takes the next word also where that begins with --, may be
    repeated, and splits nothing at commas. least=, most= are the bounds of a number, which `Settings` checks.
    """
    return _dataclass_field(default, {"help": help, **meta})


def default(value: Any, **meta: Any) -> Any:
    """Another default for a field of a base class: `lr: float = default(5e-5)`. Its help and other metadata stay;
    meta adds to them or replaces some, such as identity=False."""
    return _dataclass_field(value, {"inherited": True, **meta})


def _dataclass_field(value: Any, metadata: Mapping[str, Any]) -> Any:
    if value is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if callable(value):
        return dataclasses.field(default_factory=value, metadata=metadata)
    return dataclasses.field(default=value, metadata=metadata)


class Settings:
    """Base of settings groups: frozen keyword-only dataclasses that a configuration inherits, several at once.

        @dataclass(frozen=True, kw_only=True)
        class SFTConfig(OptimizerSettings, RunSettings): ...  # --help shows RunSettings first

    A `__post_init__` of a group or configuration checks its own fields and calls `super().__post_init__()`; this
    class ends the chain and checks the bounds given to `opt`, as reading a command line or file does for every class. Groups take no slots=True: Python cannot inherit from two classes with slots.
    """

    def __post_init__(self) -> None:
        _check_bounds(type(self), {name: getattr(self, name) for name in metadata_of(type(self))})
        following = getattr(super(), "__post_init__", None)  # of a base that is not derived from Settings
        if following:
            following()


def flag_of(name: str) -> str:
    """How the command line writes a setting: model.block_size is --model.block-size."""
    return f"--{name.replace('_', '-')}"


def _check_bounds(cls: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """ConfigError for a number outside the least= and most= of its field, or not finite; None is no number."""
    for name, meta in metadata_of(cls).items():
        value, least, most = values.get(name), meta.get("least"), meta.get("most")
        if value is None or least is most is None:
            continue
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if not (low <= value <= high and math.isfinite(value)):
            needed = f"from {least} to {most}" if most is not None else f"at least {least}"
            needed += ", and finite" if most is None and isinstance(value, float) else ""
            raise ConfigError(f"{prefix}{name} is {value}; it must be {needed}; correct {flag_of(prefix + name)}")


# ---- reading fields


class Field(NamedTuple):
    name: str
    type: Any
    nested: type | None  # the dataclass among its types
    meta: Mapping[str, Any]
    default: Any  # REQUIRED, or the value (a new one from a factory)


def _names(cls: type) -> list[str]:
    """Fields as --help lists them: groups from the last base to the first, as dataclasses do, then the class's own."""
    if not dataclasses.is_dataclass(cls):
        return []
    inherited = [name for base in reversed(cls.__bases__) for name in _names(base)]
    return list(dict.fromkeys([*inherited, *(f.name for f in dataclasses.fields(cls))]))


@cache
def metadata_of(cls: type) -> dict[str, Mapping[str, Any]]:
    """{field: metadata given to `opt`}; for a field set by `default`, the metadata given in the nearest base."""
    out = {}
    for name in _names(cls):
        meta: dict[str, Any] = {"inherited": True}
        for base in cls.__mro__:
            declared = base.__dict__.get("__dataclass_fields__", {}).get(name)
            if declared and meta.pop("inherited", False):
                meta = {**declared.metadata, **meta}
        if "inherited" in meta:
            raise TypeError(f"{cls.__name__}.{name}: default() is for a field of a base class; declare it with opt()")
        out[name] = meta
    return out


@cache
def fields_of(cls: type) -> dict[str, Field]:
    hints, own = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for name, meta in metadata_of(cls).items():
        f = own[name]
        nested = next((a for a in arms(hints[name]) if dataclasses.is_dataclass(a)), None)
        value = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        out[name] = Field(name, hints[name], nested, meta, value)
    return out


def leaves_of(cls: type, prefix: str = "", usual: Any = None) -> dict[str, Field]:
    """Every settable key, dotted; the key of a nested config is followed by those below it. usual: an instance whose values are the defaults,
    as those of a nested config are."""
    out = {}
    for f in fields_of(cls).values():
        if usual is not None:
            f = f._replace(default=getattr(usual, f.name))
        out[prefix + f.name] = f
        if f.nested:
            below = f.default if isinstance(f.default, f.nested) else None
            out |= leaves_of(f.nested, f"{prefix}{f.name}.", below)
    return out


def find_field(cls: type, key: str) -> str | None:
    """The dotted name that `key` means in `cls`, or None. - is read as _; aliases are resolved."""
    head, _, rest = key.replace("-", "_").partition(".")
    fields = fields_of(cls)
    if head not in fields:
        aliases = ALIASES.get(head, ())
        candidates = [aliases] if isinstance(aliases, str) else aliases
        head = next((name for name in candidates if name in fields), None)
    if head is None or not rest:
        return head
    below = find_field(fields[head].nested, rest) if fields[head].nested else None
    return None if below is None else f"{head}.{below}"


# ---- values


def arms(tp: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(tp) if typing.get_origin(tp) in (typing.Union, types.UnionType) else (tp,)


def type_name(tp: Any) -> str:
    """As --help writes it: int|none, adamw|muon, tuple[int, ...]."""
    if typing.get_origin(tp) is Literal:
        return "|".join(str(a) for a in typing.get_args(tp))
    if len(arms(tp)) > 1:
        return "|".join(type_name(a) for a in arms(tp))
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
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ValueError
    if all(isinstance(v, str) for v in value):
        value = [part for v in value for part in v.split(",") if part]
    args = typing.get_args(tp)
    kinds = args[:1] * len(value) if len(args) == 2 and args[1] is ... else args
    if len(kinds) != len(value):
        raise ValueError
    return tuple(convert(kind, v) for kind, v in zip(kinds, value))


def convert(tp: Any, value: Any) -> Any:
    """`value` (from json, or a word of the command line) as `tp`; ValueError or OverflowError where it does not fit."""
    if len(arms(tp)) > 1:
        for arm in sorted(arms(tp), key=lambda a: a is not types.NoneType):  # in `str | None` the word none means None
            try:
                return convert(arm, value)
            except (ValueError, OverflowError):
                continue
        raise ValueError
    word = str(value)
    if typing.get_origin(tp) is Literal:
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
        lines = (value,) if isinstance(value, str) else value
        if isinstance(lines, (list, tuple)) and all(isinstance(line, str) for line in lines):
            return tuple(lines)
    try:
        return convert(field.type, value)
    except (ValueError, OverflowError):
        got = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    raise ConfigError(f"{name} got {got!r}; it takes {type_name(field.type)} ({field.meta.get('help', '')})")


# ---- from mappings


def _flatten(cls: type, mapping: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Nested, dotted and aliased keys -> {dotted name: value}; ConfigError for unknown keys, and for a field given twice.

    Keys below a nested config win over an instance of it.
    """
    whole: dict[str, Any] = {}
    out: dict[str, Any] = {}
    leaves = leaves_of(cls)
    for key, value in mapping.items():
        name = find_field(cls, prefix + key)
        if name is None:
            hint = nearest(prefix + key.replace("-", "_"), leaves)
            raise ConfigError(f"{where}: unknown setting {prefix + key!r}{hint}")
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
    kwargs: dict[str, Any] = {}
    for f in fields_of(cls).values():
        name = prefix + f.name
        below = {k: v for k, v in flat.items() if k.startswith(name + ".")}
        if below:
            start = _dotted(to_dict(f.default), name + ".") if dataclasses.is_dataclass(f.default) else {}
            kwargs[f.name] = _build(f.nested, start | below, name + ".")
        elif name in flat:
            kwargs[f.name] = _checked(f, name, flat[name])
        elif f.default is REQUIRED:
            raise ConfigError(f"{name} is required ({f.meta.get('help', '')}); set {flag_of(name)}")
    _check_bounds(cls, kwargs, prefix)
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except ValueError as e:  # from __post_init__: the values do not go together
        raise ConfigError(f"{cls.__name__}: {e}") from e


def _merge(flat: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:  # bad json and bad utf-8
        raise ConfigError(f"{path} is not json ({e})") from e
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a json {type(found).__name__}; a configuration is an object {{...}}")
    return found


def resolve(
    cls: type[T],
    preset: str | None = None,
    file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> T:
    """defaults < preset < file < overrides. A file may name its own preset; a class with a field `preset`
    records the name."""
    table, found, flat = presets or {}, read_json(file) if file else {}, {}
    records = "preset" in fields_of(cls)
    preset = preset or found.get("preset")
    if not isinstance(preset, str | None):
        raise ConfigError(f"{file} has preset {preset!r}; required is the name of one, or none")
    if not records:
        found.pop("preset", None)
    if preset and table:
        if preset not in table:
            raise ConfigError(f"unknown preset {preset!r}{nearest(preset, table)} (presets: {', '.join(table)})")
        flat = _merge(flat, _flatten(cls, table[preset], f"preset {preset}"))
    elif preset and not records:
        raise ConfigError(f"preset {preset!r} was requested; {cls.__name__} has no presets")
    flat = _merge(flat, _flatten(cls, found, str(file)))
    if records and preset:
        flat["preset"] = preset
    flat = _merge(flat, _flatten(cls, overrides or {}, "flags" if file or preset else cls.__name__))
    return _build(cls, flat)


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
    out = {}
    for f in dataclasses.fields(cfg):
        if metadata_of(type(cfg))[f.name].get("identity", True):
            value = getattr(cfg, f.name)
            out[f.name] = identity(value) if dataclasses.is_dataclass(value) else plain(value)
    return out


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
    """{dotted setting: (default, here)}, as plain json, of what a configuration does not have by default; "required" where
    there is no default. `from_dict` makes the configuration from the second values. usual: compare with it instead."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, field in fields_of(type(cfg)).items():
        here, before = getattr(cfg, name), field.default if usual is None else getattr(usual, name)
        if dataclasses.is_dataclass(here) and type(here) is type(before):
            found |= {f"{name}.{below}": pair for below, pair in changed(here, before).items()}
        elif here != before:
            found[name] = ("required" if before is REQUIRED else plain(before), plain(here))
    return found


# ---- command line


class _Words:
    """Reads argv word by word into {dotted name: word, words or bool}."""

    def __init__(self, cls: type, argv: Sequence[str], extra: set[str]) -> None:
        self.cls, self.leaves, self.extra = cls, leaves_of(cls), extra
        # some Pythons pass the -- of `torchrun -m MODULE -- ...` on
        self.words = list(argv[1:] if argv[:1] == ["--"] else argv)
        self.values: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        free = [n for n, f in self.leaves.items() if f.meta.get("positional")]
        while self.words:
            word = self.words.pop(0)
            if word.startswith("--"):
                self.flag(word)
            elif not free:
                raise ConfigError(f"unexpected word {word!r}; settings are written --name value")
            elif self.takes(free[0], tuple):
                self.values.setdefault(free[0], []).append(word)
            else:
                self.put(free.pop(0), word, word)
        return self.values

    def takes(self, name: str | None, kind: type) -> bool:
        return name in self.leaves and kind in [typing.get_origin(a) or a for a in arms(self.leaves[name].type)]

    def verbatim(self, name: str | None) -> bool:
        return name in self.leaves and bool(self.leaves[name].meta.get("verbatim"))

    def put(self, name: str, value: Any, word: str) -> None:
        if self.verbatim(name):
            value = [*self.values.pop(name, ()), *([value] if isinstance(value, str) else value)]
        if name in self.values:
            raise ConfigError(f"{word}: {name} is given twice; keep one")
        self.values[name] = value

    def flag(self, word: str) -> None:
        key, equals, value = word[2:].partition("=")
        name = key if key in self.extra else find_field(self.cls, key)
        if name is None and not equals and key.startswith("no-"):
            name, equals, value = find_field(self.cls, key[3:]), "=", False
            name = name if self.takes(name, bool) else None
        if name is None:
            flags = [flag_of(n) for n in (*self.leaves, *self.extra)]
            raise ConfigError(f"unknown flag --{key}{nearest(flag_of(key), flags)}")
        if not equals and self.takes(name, bool):
            value = self.words.pop(0) if self.words[:1] in (["true"], ["false"]) else True
        elif not equals:
            value = self.following(name, word)
        self.put(name, value, word)

    def following(self, name: str, word: str) -> str | list[str]:
        many, any_first = self.takes(name, tuple), self.verbatim(name)
        taken: list[str] = []
        while self.words and (many or not taken):
            if self.words[0].startswith("--") and (taken or not any_first):
                break
            taken.append(self.words.pop(0))
        if not taken and not many:
            kind = type_name(self.leaves[name].type) if name in self.leaves else "a name"
            raise ConfigError(f"{word} needs a value ({kind}); for text that begins with -- write {word}=TEXT")
        return taken if many else taken[0]


class Row(NamedTuple):
    name: str
    type: str
    default: Any
    help: str


def describe(cls: type) -> list[Row]:
    """One row (name, type, default, help) for each field, nested ones dotted; `default` is "required" where
    there is none."""
    return [
        Row(n, type_name(f.type), "required" if f.default is REQUIRED else f.default, f.meta.get("help", ""))
        for n, f in leaves_of(cls).items()
        if not f.nested
    ]


def _default_text(value: Any) -> str:
    if value is REQUIRED:
        return " (required)"
    shown = (" ".join(map(str, value)) or "empty") if isinstance(value, tuple) else "none" if value is None else value
    return f" (default {shown})"


def format_help(
    cls: type, *, presets: Mapping[str, Any] | None = None, prog: str | None = None, epilog: str | None = None
) -> str:
    """The text of --help: one entry for each field, from its `opt` text, under the group that declares it."""
    bare = [name.upper() for name, f in leaves_of(cls).items() if f.meta.get("positional")]
    rows = [("--config FILE", "json file, such as the config.json of a run; flags win over it")]
    if presets:
        rows.insert(0, ("--preset NAME", f"start from one of: {', '.join(presets)}"))
    lines = [" ".join([f"usage: {prog or Path(sys.argv[0]).name}", *bare, "[--setting value ...]"])]
    lines += [_help_entry(*row) for row in rows]
    leaves = {n: f for n, f in leaves_of(cls).items() if not f.nested and not (n == "preset" and presets)}
    groups = {name: _group_of(cls, name.partition(".")[0]) for name in leaves}
    heading = cls
    for name, f in leaves.items():
        if groups[name] is not heading:
            heading = groups[name]
            lines.append(f"\n{_title(heading)}:")
        flag = f"{flag_of(name)} {type_name(f.type)}"
        lines.append(_help_entry(flag, f.meta.get("help", "") + _default_text(f.default)))
    return "\n".join(lines) + (f"\n\n{epilog.strip()}" if epilog else "")


def _group_of(cls: type, name: str) -> type:
    """The class that declares a field with `opt`: the last of the bases that have it."""
    return [base for base in cls.__mro__ if name in base.__dict__.get("__annotations__", {})][-1]


def _title(group: type) -> str:
    """RolloutSettings: Rollout. GRPOConfig: GRPO."""
    name = group.__name__.removesuffix("Settings").removesuffix("Config")
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", name)


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
    own = {"config", "preset"} if presets else {"config"}
    try:
        values = _Words(cls, argv, own).read()
        preset, file = (values.pop(key, None) if key in own else None for key in ("preset", "config"))
        return resolve(cls, preset, file, values, presets=presets)
    except ConfigError as error:
        raise ConfigError(with_flags(str(error), cls)) from error


def with_flags(message: str, cls: type) -> str:
    """The message with settings as the command line writes them: names with an underscore or a dot, and one at the start, become their flags.
    Quoted names, which may be keys of a file, stay."""
    leaves = leaves_of(cls)
    flags = {name.rpartition(".")[2]: flag_of(name) for name in reversed(leaves)} | {n: flag_of(n) for n in leaves}
    found = re.sub(r"(?<![\w./'\"-])[a-z]\w*[_.]\w+(?![\w/'\"=-])", lambda name: flags.get(name[0], name[0]), message)
    return re.sub(r"^(\w+: )?(\w+)(?= )", lambda start: (start[1] or "") + flags.get(start[2], start[2]), found)
