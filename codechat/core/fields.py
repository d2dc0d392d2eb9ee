"""What a configuration is made of: fields with help, typed values, and the errors that a user sees.

Types: bool, int, float, str, Path, Literal, tuple, dataclass, Any, and unions of them (`int | None`). A word
"none" is None where the type allows it; an int may be written 1_000 or 1e6; a tuple takes words of which each
may hold commas.

Left out: dict and list fields (a frozen configuration holds neither). Import these names from
`codechat.core.config`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat.core.errors import ConfigError

REQUIRED = dataclasses.MISSING

# Spelling met elsewhere -> ours, or several of ours, of which the first that a class has is meant. It applies
# where a class has our field and not the other.
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


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field with its help (name the unit). `default` may be a value, a factory or REQUIRED.

    meta: identity=False keeps the field out of `config_hash`; late=True does so where it has its default, so
    that a setting added today leaves the hashes of older runs alone; group="Optimizer" gives a heading in --help;
    positional=True takes a bare word of the command line; presets={name: dict} lets a nested config be chosen
    by name (`--model d12`); hashed_as="old_name" is for a renamed field: `config_hash` uses the old name, and
    the old name is still read.
    """
    return _dataclass_field(default, {"help": help, **meta})


def default(value: Any, **meta: Any) -> Any:
    """Another default for a field of a base class: `lr: float = default(5e-5)`. Its help and other metadata stay;
    meta adds to them or replaces some, such as late=True."""
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
        class SFTConfig(RunSettings, OptimizerSettings): ...

    A `__post_init__` of a group or configuration checks its own fields and calls `super().__post_init__()`; this
    class ends the chain. Groups take no slots=True: Python cannot inherit from two classes with slots.
    """

    def __post_init__(self) -> None:
        following = getattr(super(), "__post_init__", None)  # of a base that is no Settings
        if following:
            following()


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
    if tp is type(None):
        return "none"
    return tp.__name__ if isinstance(tp, type) and not typing.get_args(tp) else str(tp).replace("typing.", "")


def _number(tp: type, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    if tp is float:
        if math.isnan(float(value)):
            raise ValueError
        return float(value)
    number = float(value) if isinstance(value, float) or "e" in str(value).lower() else int(value)
    if number != int(number):
        raise ValueError
    return int(number)


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


def _convert_plain(tp: Any, value: Any) -> Any:
    if tp is Any:
        return value
    if tp is type(None) and (value is None or str(value).lower() in ("none", "null")):
        return None
    if tp is bool and (isinstance(value, bool) or str(value).lower() in ("true", "false")):
        return str(value).lower() == "true"
    if tp in (int, float):
        return _number(tp, value)
    if tp is str and isinstance(value, (str, Path)):
        return str(value)
    if tp is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise ValueError


def convert(tp: Any, value: Any) -> Any:
    """`value` (from json, or a word of the command line) as `tp`; ValueError where it does not fit."""
    origin = typing.get_origin(tp)
    if len(arms(tp)) > 1:
        # none first: in `str | None` the word none means None
        for arm in sorted(arms(tp), key=lambda a: a is not type(None)):
            try:
                return convert(arm, value)
            except (ValueError, OverflowError):
                continue
        raise ValueError
    if origin is Literal:
        choices = {str(a): a for a in typing.get_args(tp)}
        if str(value) not in choices:
            raise ValueError
        return choices[str(value)]
    if origin is tuple:
        return _items(tp, value)
    if dataclasses.is_dataclass(tp):
        if isinstance(value, tp):
            return value
        raise ValueError
    return _convert_plain(tp, value)


# ---- the fields of a class


class Field(NamedTuple):
    name: str
    type: Any
    nested: type | None
    meta: Mapping[str, Any]
    default: Any  # REQUIRED, or the value (a fresh one from a factory)


def _names(cls: type) -> list[str]:
    """Fields as --help lists them: groups in the order in which a class inherits them, then its own."""
    if not dataclasses.is_dataclass(cls):
        return []
    inherited = [name for base in cls.__bases__ for name in _names(base)]
    return list(dict.fromkeys([*inherited, *(f.name for f in dataclasses.fields(cls))]))


@cache
def metadata_of(cls: type) -> dict[str, Mapping[str, Any]]:
    """{field: what `opt` said of it}; for a field set by `default`, what `opt` said of it in the nearest base."""
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
    hashed = [meta.get("hashed_as", name) for name, meta in out.items()]
    if twice := {name for name in hashed if hashed.count(name) > 1}:
        raise TypeError(f"{cls.__name__}: two fields are hashed as {min(twice)!r}; give one another hashed_as")
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


def leaves_of(cls: type, prefix: str = "") -> dict[str, Field]:
    """Every settable key, dotted; a nested config's own key is followed by those below it."""
    out = {}
    for f in fields_of(cls).values():
        out[prefix + f.name] = f
        if f.nested:
            out |= leaves_of(f.nested, f"{prefix}{f.name}.")
    return out


def _meant_by(cls: type, key: str) -> list[str]:
    """The fields that another spelling may mean: one that had this name once, then those of the table."""
    renamed = [name for name, meta in metadata_of(cls).items() if meta.get("hashed_as") == key]
    aliased = ALIASES.get(key, ())
    return [*renamed, *([aliased] if isinstance(aliased, str) else aliased)]


def find_field(cls: type, key: str) -> str | None:
    """The dotted name that `key` means in `cls` (alias and - resolved), or None."""
    head, _, rest = key.replace("-", "_").partition(".")
    fields = fields_of(cls)
    if head not in fields:
        head = next((name for name in _meant_by(cls, head) if name in fields), None)
    if head is None or (rest and not fields[head].nested):
        return None
    below = find_field(fields[head].nested, rest) if rest else ""
    return None if below is None else f"{head}.{below}" if below else head


def checked(field: Field, name: str, value: Any) -> Any:
    try:
        return convert(field.type, value)
    except (ValueError, OverflowError):
        pass
    got = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    raise ConfigError(f"{name} got {got!r}; it takes {type_name(field.type)} ({field.meta.get('help', '')})")
