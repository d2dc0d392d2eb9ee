"""A file of Python functions, run: the arguments of a call become what the type hints say, a
result becomes JSON, and what the calls change lasts as long as the world.

Imports the standard library alone: the sandbox runs the source of this file beside that of the
functions."""

import contextlib
import dataclasses
import datetime
import enum
import functools
import inspect
import io
import json
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

REWARD = "reward"  # the function of a file that judges a conversation; it is no tool
LONGEST_RESULT = 1000  # characters of a result that the model may read
TIMES = (datetime.datetime, datetime.date, datetime.time)
NO_TYPE = inspect.Parameter.empty


class Answer(NamedTuple):
    """text: {"result": value} or {"error": message} as JSON. printed: whether the function
    printed something, which is dropped."""

    text: str
    printed: bool


class World:
    """Functions by name, and `reward`, if there is one, that sees the state which they leave."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        reward: Callable[..., Any] | None = None,
    ) -> None:
        self.functions = functions
        self.reward = reward

    @classmethod
    def of(cls, module: types.ModuleType) -> Self:
        """The functions and the reward of a module, with its state."""
        return cls(functions_of(module), getattr(module, REWARD, None))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run a call whose arguments fit the schema."""
        function = self.functions[name]
        return _answer(lambda: function(**typed(function, arguments)))

    def judge(self, messages: list[Any], row: Mapping[str, Any]) -> str:
        """What `reward` gives for a conversation: {"result": number} or {"error": message} as
        JSON."""
        reward = self.reward
        assert reward is not None, "only a file with a reward is asked for one"
        return _answer(lambda: share(reward(messages, row))).text


def share(reward: Any) -> float:
    """A reward as a number. ValueError for one that is not from 0 to 1."""
    if isinstance(reward, str):  # of which float would read "0.5" and "1e400"
        raise ValueError(f"got the text {reward[:60]!r}; expected a number from 0 to 1")
    value = float(reward)
    if not 0 <= value <= 1:
        raise ValueError(f"got {value}; expected a number from 0 to 1")
    return value


def _answer(run: Callable[[], Any]) -> Answer:
    """What a function of the user's gives, which may raise anything."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            text = as_json("result", run())
        if len(text) > LONGEST_RESULT:
            got = f"the result has {len(text)} characters; at most {LONGEST_RESULT} can be read"
            text = as_json("error", got)
    except (Exception, SystemExit) as error:
        text = as_json("error", _said(error)[:LONGEST_RESULT])
    return Answer(text, bool(out.getvalue()))


def _said(error: BaseException) -> str:
    """The kind and the message of an error, whose own text may raise one too."""
    message = traceback.TracebackException.from_exception(error, limit=0)
    return f"{type(error).__name__}: {message}"


def execute(source: str | bytes, name: str, path: str) -> types.ModuleType:
    """A new module of this source. It may raise anything."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and pickle find a class's module by name
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def functions_of(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """A module's dict EXECUTORS, or else each public function that it defines itself, in its
    order; not `reward`."""
    table = getattr(module, "EXECUTORS", None)
    if table is not None:
        return dict(table)
    found = {}
    for name, function in vars(module).items():
        written = inspect.isfunction(function) or isinstance(function, functools._lru_cache_wrapper)
        own = written and function.__module__ == module.__name__
        if own and function.__name__ == name and name[0] != "_" and name != REWARD:
            found[name] = function
    return found


# ---- arguments


def typed(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types of the function's hints."""
    hints = typing.get_type_hints(function) if inspect.isroutine(function) else {}
    return {
        name: value_of(hints.get(name, NO_TYPE), whole(value)) for name, value in arguments.items()
    }


def whole(value: Any) -> Any:
    """A JSON value with whole floats as integers, at any depth: JSON has one kind of number,
    Python has two."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def value_of(hint: Any, value: Any) -> Any:
    """A JSON value as the type of a hint, whose schema it fits."""
    kind = typing.get_origin(hint) or hint
    args = typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        members = [one for one in args if one is not type(None)]
        if value is None or len(members) > 1:
            return value
        return value_of(members[0], value)
    if kind is float and isinstance(value, int):
        return float(value)
    if kind in (list, set, frozenset, tuple):
        kinds = args
        if kind is not tuple or args[1:] == (...,):
            kinds = args[:1] * len(value)
        if args:
            value = [value_of(one, item) for one, item in zip(kinds, value, strict=True)]
        return kind(value)
    if kind is dict and args:
        return {key: value_of(args[1], item) for key, item in value.items()}
    if kind in TIMES:
        return kind.fromisoformat(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "__required_keys__"):
        hints = typing.get_type_hints(kind)
        for name in value:
            if name not in hints:
                raise TypeError(f"{kind.__name__} has no {name!r}; it has {', '.join(hints)}")
        fields = {name: value_of(hints[name], item) for name, item in value.items()}
        return kind(**fields)
    return value


# ---- results


def as_json(key: str, value: Any) -> str:
    """An object of one key. ValueError, TypeError for what JSON cannot hold."""
    return json.dumps({key: value}, ensure_ascii=False, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    """What JSON does not know, as what it knows; else as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, TIMES):
        return value.isoformat()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    text = str(value)
    # such as a generator, whose text is another one each time
    if re.search(" at 0x[0-9a-fA-F]+>", text):
        kind = type(value).__name__
        raise TypeError(f"got a result of type {kind}; return a text, numbers, lists or dicts")
    return text
