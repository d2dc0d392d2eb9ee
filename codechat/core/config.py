"""Configurations: a frozen keyword-only dataclass <-> command line <-> json.

    @dataclass(frozen=True, kw_only=True)
    class SFTConfig:
        lr: float = opt(3e-4, "peak learning rate")
        model: GPTConfig = opt(GPTConfig(), "the model")

    cfg = parse(SFTConfig, sys.argv[1:], presets={"nano": {"lr": 1e-3, "model.depth": 4}})

Precedence: defaults < --preset < --config FILE < flags. The help string of a field feeds --help, tables in
notebooks and the README. Keys may be nested ({"model": {"depth": 2}}) or dotted ("model.depth"), with - or _.
An unknown key is an error that names the nearest.

Left out: sub-commands (cli.py), environment variables, YAML, interpolation: a preset is a plain dict.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from codechat.core.errors import ConfigError, MissingFile, UserError, nearest
from codechat.core.fields import ALIASES as ALIASES
from codechat.core.fields import REQUIRED as REQUIRED
from codechat.core.fields import Settings as Settings
from codechat.core.fields import (
    arms,
    checked,
    fields_of,
    find_field,
    leaves_of,
    metadata_of,
    type_name,
)
from codechat.core.fields import default as default
from codechat.core.fields import opt as opt

T = TypeVar("T")


class Row(NamedTuple):
    name: str
    type: str
    default: Any
    help: str


def _flatten(cls: type, mapping: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Nested, dotted and aliased keys -> {dotted name: value}; refuses unknown keys, and a field given twice.

    A nested config given as an instance yields to keys below it.
    """
    whole: dict[str, Any] = {}
    out: dict[str, Any] = {}
    leaves = leaves_of(cls)
    for key, value in mapping.items():
        name = find_field(cls, prefix + key)
        if name is None:
            hint = nearest(prefix + key.replace("-", "_"), leaves)
            raise ConfigError(f"{where}: unknown setting {prefix + key!r}{hint}")
        field = leaves[name]
        if field.nested and dataclasses.is_dataclass(value):
            whole |= _flatten(cls, to_dict(value), where, f"{name}.")
        else:
            below = field.nested and isinstance(value, Mapping)
            new = _flatten(cls, value, where, f"{name}.") if below else {name: value}
            if twice := new.keys() & out.keys():
                raise ConfigError(f"{where}: {min(twice)!r} is given twice (once as {prefix + key!r}); keep one")
            out |= new
    return whole | out


def _build(cls: type[T], flat: Mapping[str, Any], prefix: str = "") -> T:
    """An instance from {dotted name: value}; what is absent keeps its default."""
    kwargs: dict[str, Any] = {}
    for f in fields_of(cls).values():
        name = prefix + f.name
        below = {k: v for k, v in flat.items() if k.startswith(name + ".")}
        if below:
            start = _flatten_defaults(f.default, name + ".") if dataclasses.is_dataclass(f.default) else {}
            kwargs[f.name] = _build(f.nested, start | below, name + ".")
        elif name in flat:
            kwargs[f.name] = checked(f, name, flat[name])
        elif f.default is REQUIRED:
            raise ConfigError(f"{name} is required ({f.meta.get('help', '')}); set --{name.replace('_', '-')}")
    try:
        return cls(**kwargs)
    except UserError:
        raise
    except ValueError as e:  # from __post_init__: the values do not go together
        raise ConfigError(f"{cls.__name__}: {e}") from e


def _flatten_defaults(cfg: Any, prefix: str) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        out |= (
            _flatten_defaults(value, f"{prefix}{f.name}.")
            if dataclasses.is_dataclass(value)
            else {prefix + f.name: value}
        )
    return out


def _merge(flat: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Later wins; setting a whole nested config (or none) drops the keys below it, and a key below drops the
    none."""
    out = dict(flat)
    for key, value in over.items():
        out = {k: v for k, v in out.items() if not k.startswith(key + ".") and not key.startswith(k + ".")}
        out[key] = value
    return out


# ---- public


def from_dict(cls: type[T], d: Mapping[str, Any], where: str | None = None) -> T:
    """An instance from a (nested or dotted) mapping; ConfigError for unknown keys and wrong types."""
    return _build(cls, _merge({}, _flatten(cls, d, where or cls.__name__)))


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


def read_json(path: str | Path) -> dict[str, Any]:
    """A json object from a file; ConfigError says what is wrong with it."""
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
    if not records:
        found.pop("preset", None)
    if preset and table:
        if preset not in table:
            raise ConfigError(f"unknown preset {preset!r}{nearest(preset, table)} (presets: {', '.join(table)})")
        flat = _merge(flat, _flatten(cls, table[preset], f"preset {preset}"))
    elif preset and not records:
        raise ConfigError(f"preset {preset!r} was asked for; {cls.__name__} has no presets")
    flat = _merge(flat, _flatten(cls, found, str(file)))
    if records and preset:
        flat["preset"] = preset
    flat = _merge(flat, _flatten(cls, overrides or {}, "flags" if file or preset else cls.__name__))
    return _build(cls, flat)


def describe(cls: type) -> list[Row]:
    """One row (name, type, default, help) for each field, nested ones dotted; `default` is "required" where
    there is none."""
    return [
        Row(n, type_name(f.type), "required" if f.default is REQUIRED else f.default, f.meta.get("help", ""))
        for n, f in leaves_of(cls).items()
        if not f.nested
    ]


def identity(cfg: Any) -> dict[str, Any]:
    """The fields that decide the result, as plain json: all but those marked identity=False, and those marked
    late=True (added when runs existed) where they have their default. A renamed field keeps its first name (hashed_as)."""
    out = {}
    for f in dataclasses.fields(cfg):
        meta, value = metadata_of(type(cfg))[f.name], getattr(cfg, f.name)
        if meta.get("identity", True) and not (meta.get("late") and value == f.default):
            out[meta.get("hashed_as", f.name)] = identity(value) if dataclasses.is_dataclass(value) else plain(value)
    return out


def config_hash(cfg: Any) -> str:
    """12 hex digits of what decides the result: all fields but those marked identity=False. Takes a plain
    mapping too."""
    what = plain(cfg) if isinstance(cfg, Mapping) else {"class": type(cfg).__name__, **identity(cfg)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in value.items():
        out |= _flat(v, f"{prefix}{k}.") if isinstance(v, Mapping) else {prefix + k: v}
    return out


def differences(a: Any, b: Any) -> dict[str, tuple[Any, Any]]:
    """{dotted setting: (in a, in b)} where two configurations or mappings differ; None where one lacks it."""
    left, right = _flat(plain(a)), _flat(plain(b))
    return {
        k: (left.get(k), right.get(k))
        for k in [*left, *(k for k in right if k not in left)]
        if left.get(k) != right.get(k)
    }


# ---- command line


class _Words:
    """Reads argv word by word into {dotted name: word, words or bool}."""

    def __init__(self, cls: type, argv: Sequence[str], extra: set[str]) -> None:
        self.cls, self.leaves, self.extra = cls, leaves_of(cls), extra
        self.words = list(
            argv[1:] if argv[:1] == ["--"] else argv
        )  # torchrun -m MODULE -- ...: some Pythons pass the -- on
        self.values: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        free = [n for n, f in self.leaves.items() if f.meta.get("positional")]
        while self.words:
            word = self.words.pop(0)
            if word.startswith("--"):
                self.flag(word)
            elif not free:
                raise ConfigError(f"unexpected word {word!r}; settings are written --name value")
            elif self.is_tuple(free[0]):
                self.values.setdefault(free[0], []).append(word)
            else:
                self.put(free.pop(0), word, word)
        return self.values

    def is_tuple(self, name: str) -> bool:
        return name in self.leaves and any(typing.get_origin(a) is tuple for a in arms(self.leaves[name].type))

    def put(self, name: str, value: Any, word: str) -> None:
        if name in self.values:
            raise ConfigError(f"{word}: {name} is given twice; keep one")
        self.values[name] = value

    def flag(self, word: str) -> None:
        key, equals, value = word[2:].partition("=")
        name = key if key in self.extra else find_field(self.cls, key)
        if name is None and key.startswith("no-") and self.is_bool(find_field(self.cls, key[3:])) and not equals:
            return self.put(find_field(self.cls, key[3:]), False, word)
        if name is None:
            flags = [f"--{n.replace('_', '-')}" for n in (*self.leaves, *self.extra)]
            raise ConfigError(f"unknown flag --{key}{nearest('--' + key.replace('_', '-'), flags)}")
        if self.is_bool(name) and not equals:
            value = self.words.pop(0) if self.words[:1] in (["true"], ["false"]) else True
        elif not equals:
            value = self.following(name, word)
        self.put(name, value, word)

    def is_bool(self, name: str | None) -> bool:
        return name in self.leaves and bool in arms(self.leaves[name].type)

    def following(self, name: str, word: str) -> str | list[str]:
        many = self.is_tuple(name)
        taken: list[str] = []
        while self.words and not self.words[0].startswith("--") and (many or not taken):
            taken.append(self.words.pop(0))
        if not taken and not many:
            kind = type_name(self.leaves[name].type) if name in self.leaves else "a name"
            raise ConfigError(f"{word} needs a value ({kind}); for text that begins with -- write {word}=TEXT")
        return taken if many else taken[0]


def _default_text(value: Any) -> str:
    if value is REQUIRED:
        return " (required)"
    shown = (" ".join(map(str, value)) or "empty") if isinstance(value, tuple) else "none" if value is None else value
    return f" (default {shown})"


def format_help(
    cls: type, *, presets: Mapping[str, Any] | None = None, prog: str | None = None, epilog: str | None = None
) -> str:
    """What --help prints: one entry for each field, from its `opt` text."""
    bare = [name.upper() for name, f in leaves_of(cls).items() if f.meta.get("positional")]
    rows = [("--config FILE", "json file, such as the config.json of a run; flags win over it")]
    if presets:
        rows.insert(0, ("--preset NAME", f"start from one of: {', '.join(presets)}"))
    for name, f in leaves_of(cls).items():
        if not f.nested and not (name == "preset" and presets):
            flag = f"--{name.replace('_', '-')} {type_name(f.type)}"
            rows.append((flag, f.meta.get("help", "") + _default_text(f.default)))
    lines = [" ".join([f"usage: {prog or Path(sys.argv[0]).name}", *bare, "[--setting value ...]"])]
    for flag, text in rows:
        first = f"  {flag:<30}  "
        lines.append(textwrap.fill(text, 110, initial_indent=first, subsequent_indent=" " * 34, break_on_hyphens=False))
    return "\n".join(lines) + (f"\n\n{epilog.strip()}" if epilog else "")


def parse(
    cls: type[T],
    argv: Sequence[str],
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    prog: str | None = None,
    epilog: str | None = None,
) -> T:
    """`cls` from words of a command line. --help prints and raises SystemExit(0); everything wrong raises
    ConfigError."""
    if "--help" in argv or "-h" in argv:
        print(format_help(cls, presets=presets, prog=prog, epilog=epilog))
        raise SystemExit(0)
    own = {"config", "preset"} if presets else {"config"}
    values = _Words(cls, argv, own).read()
    preset, file = (values.pop(key, None) if key in own else None for key in ("preset", "config"))
    return resolve(cls, preset, file, values, presets=presets)
