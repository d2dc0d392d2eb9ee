"""Python functions as tools: the function runs a call, its schema offers the tool to a model.

    def count_words(text: str, unique: bool = False) -> int:
        '''Number of words in a text.

        unique: count each word once
        '''

The first line of the docstring is the description, lines `name: text` describe parameters, type
hints give types, and a default makes a parameter optional. Known types: str, int, float, bool,
list[...], dict, Literal[...] and any of them | None. A file of functions runs in this process
with the user's rights."""

import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from codechat.core.errors import DataError, MissingFile

Schema = dict[str, Any]
TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}


class Executor(NamedTuple):
    """A function that runs calls."""

    function: Callable[..., Any]
    schema: Schema  # {"name", "description", "parameters"}


def load_executors(path: Path, listed: Mapping[str, Schema] | None = None) -> dict[str, Executor]:
    """{name: Executor} of a file's dict EXECUTORS, or else of each public function that it
    defines, in its order. DataError names file and line.

    listed: schemas by name; their functions need no hints, and others are left out."""
    module = run_file(
        path, "executors", "--executors takes a Python file (see examples/my_tools.py)"
    )
    table = getattr(module, "EXECUTORS", _public_functions(module))
    if not table:
        raise DataError(
            f"{path} defines no public function; define one "
            "with type hints (see examples/my_tools.py)"
        )
    for name, function in table.items():
        if not callable(function):
            raise DataError(
                f"{path}: EXECUTORS has {function!r} under {name!r}; expected a function"
            )
    if listed:
        return {name: Executor(table[name], listed[name]) for name in table if name in listed}
    return {name: Executor(function, schema_of(function, name)) for name, function in table.items()}


def _public_functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that a module itself defines, not those that it imports or renames."""
    own = {
        n: f
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    }
    return {
        name: function
        for name, function in own.items()
        if function.__name__ == name and name[0] != "_"
    }


def executors_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Executor]:
    """{name: Executor} of functions, such as those of a notebook, in their order."""
    return {f.__name__: Executor(f, schema_of(f, f.__name__)) for f in functions}


def run_file(path: Path, kind: str, needed: str) -> types.ModuleType:
    """The module of a user's Python file, registered as KIND_NAME. MissingFile, which ends in
    `needed`; DataError with file and line."""
    if not path.is_file():
        raise MissingFile(f"{path} is not a file; {needed}")
    module = types.ModuleType(f"{kind}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle find a class's module by name
    sys.path.append(str(path.resolve().parent))  # the file may import its neighbours
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:  # the file is the user's and may raise anything
        line = _line_of(error, path)
        raise DataError(
            f"{path} line {line}: {type(error).__name__}: {error}; correct the file"
        ) from error
    return module


def _line_of(error: BaseException, path: Path) -> int | None:
    """The line of a file that raised an error; 1 where none is known."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return lines[-1] if lines else 1


def schema_of(function: Callable[..., Any], name: str) -> Schema:
    """{"name", "description", "parameters"} from type hints and docstring. DataError for a
    parameter without a known type."""
    doc = inspect.getdoc(function) or ""
    code = getattr(function, "__code__", None)  # a class or a partial has none
    where = f"{code.co_filename} line {code.co_firstlineno}: {name}" if code else name
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise DataError(f"{where}: unknown type in its hints ({error}); import it") from None
    properties: dict[str, Schema] = {}
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise DataError(
                f"{where}: parameter {p.name} has no name to call it by; write named parameters"
            )
        if p.name not in hints:
            remedy = (
                f"write {p.name}: str, int, list[...] ..., or give its schema with --tools-file"
            )
            raise DataError(f"{where}: parameter {p.name} has no type hint; {remedy}")
        properties[p.name] = type_schema(hints[p.name], f"{where}: parameter {p.name}")
        line = re.search(rf"^[ \t]*{re.escape(p.name)}: +(\S.*)$", doc, re.MULTILINE)
        if line:
            properties[p.name]["description"] = line[1].strip()
    required = [p.name for p in parameters if p.default is p.empty]
    return dict(
        name=name,
        description=doc.partition("\n")[0],
        parameters=dict(type="object", properties=properties, required=required),
    )


def type_schema(hint: Any, where: str) -> Schema:
    """JSON schema of a type hint. DataError for a type without one."""
    args = typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        some = [one for one in args if one is not type(None)]
        if len(some) == 1:
            return type_schema(some[0], where)
    elif kind is Literal:
        kinds = {TYPES.get(type(value)) for value in args}
        if len(kinds) == 1 and None not in kinds:
            return {"type": kinds.pop(), "enum": list(args)}
    elif kind is list:
        return {"type": "array", "items": type_schema(args[0], where) if args else {}}
    elif kind is dict and args:
        return {"type": "object", "additionalProperties": type_schema(args[1], where)}
    elif kind in TYPES:
        return {"type": TYPES[kind]}
    raise DataError(
        f"{where} has type {hint}; use str, int, float, bool, list[...], dict or Literal[...]"
    )


def whole(value: Any) -> Any:
    """A JSON value with whole floats as integers, at any depth: JSON has one kind of number,
    Python has two."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
