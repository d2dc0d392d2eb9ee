"""Python functions as tools: a file of functions, the schemas that offer them to a model, and the
world in which their calls run.

    def count_words(text: str, unique: bool = False) -> int:
        '''Number of words in a text.

        unique: count each word once
        '''

The first line of the docstring is the description, lines `name: text` describe parameters, type
hints give types, and a default makes a parameter optional. A function `reward(messages, row)` is
no tool: it judges a conversation (`tasks.tools`).

The file itself is read with the user's rights, like any script. The calls of a model run in the
sandbox, or in this process where the user trusts them (`trust`)."""

import dataclasses
import datetime
import enum
import inspect
import io
import json
import re
import signal
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from codechat.core import registry
from codechat.core.errors import ConfigError, DataError, MissingFile, nearest
from codechat.text import tool_schemas
from codechat.text.tool_calls import READABLE, Call, escape_tags
from codechat.text.tool_worlds import (
    REWARD,
    TIMES,
    Answer,
    World,
    as_json,
    execute,
    functions_of,
)

Schema = dict[str, Any]
TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
}
CALL_S = 5.0  # seconds that a call may take


class Tool(NamedTuple):
    """A function that runs calls."""

    function: Callable[..., Any]
    schema: Schema  # {"name", "description", "parameters"}


class Runner(Protocol):
    """A world, in this process or in another one."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Run a call whose arguments fit the schema."""

    def judge(self, messages: list[Any], row: Mapping[str, Any]) -> str:
        """What the file's reward says: {"result": number} or {"error": message} as JSON."""


# ---- what is offered, and where its calls run


@dataclass(frozen=True)
class Toolkit:
    """What is offered to a model. here: functions of this process, such as those of a notebook.
    file: whose functions run in a world for each conversation. judged: whether it has a reward."""

    schemas: Mapping[str, Schema]  # by name
    here: World = field(default_factory=lambda: World({}))
    file: "ToolFile | None" = None

    @property
    def names(self) -> list[str]:
        return list(self.schemas)

    @property
    def missing(self) -> set[str]:
        """Names of what is offered and cannot be run."""
        own = self.file.tools if self.file else ()
        return {
            name for name in self.schemas if name not in own and name not in self.here.functions
        }

    def open(self) -> "Workbench":
        """The functions for one conversation."""
        return Workbench(self, self.file.new_world() if self.file else self.here)


class ToolFile:
    """A Python file of functions: those that are offered, and new worlds of it."""

    def __init__(self, path: Path, trust: bool, listed: Mapping[str, Schema]) -> None:
        module = run_file(path, "tools", "--tools takes a Python file (see examples/my_tools.py)")
        self.path = path
        self.source = path.read_bytes()
        self.tools = _tools_of(module, path, listed)
        self.judged = _has_reward(module, path)
        self.new_world: Callable[[], Runner] = self._world_here
        if not trust:
            remedy = "set --trust: the calls then run in this process"
            sandboxed = registry.instrument("sandboxed_functions", remedy)
            self.new_world = sandboxed(self.source, str(path), CALL_S)

    def _world_here(self) -> Runner:
        with redirect_stdout(io.StringIO()):  # it was printed when the file was read
            return TimedWorld.of(_executed(self.source, "tools", self.path))


def _has_reward(module: types.ModuleType, path: Path) -> bool:
    """Whether a file judges conversations. DataError for a reward that none could call."""
    reward = getattr(module, REWARD, None)
    if reward is None:
        return False
    needed = f"expected a plain function {REWARD}(messages, row)"
    try:
        inspect.signature(reward).bind([], {})
    # TypeError also for what is no function; ValueError for a builtin such as max
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {REWARD}: {error}; {needed}; correct it") from None
    if not _is_plain(reward):
        raise DataError(f"{path}: {REWARD} is async or yields; {needed}; write def and return")
    return True


def _is_plain(function: Callable[..., Any]) -> bool:
    """Whether a call of a function gives its result."""
    kinds = (
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
        inspect.isgeneratorfunction,
    )
    return not any(kind(function) for kind in kinds)


class OutOfTime(BaseException):
    """A call took too long. `except Exception` in its function does not catch it."""


class TimedWorld(World):
    """A world in this process. In the main thread a call, and the reward, is stopped after
    CALL_S seconds."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        try:
            with _limit(CALL_S):
                return super().call(name, arguments)
        except OutOfTime:
            return Answer(_late(name), False)

    def judge(self, messages: list[Any], row: Mapping[str, Any]) -> str:
        try:
            with _limit(CALL_S):
                return super().judge(messages, row)
        except OutOfTime:
            return _late(REWARD)


def _late(name: str) -> str:
    return as_json("error", f"TimeoutError: {name} ran {CALL_S:g} seconds")


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """OutOfTime in the main thread after so many seconds; other threads have no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*signal_and_frame: Any) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    others = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, handler)


class Workbench:
    """The functions of a toolkit during one conversation."""

    def __init__(self, kit: Toolkit, world: Runner) -> None:
        self.kit = kit
        self.world = world

    def respond(self, call: Call) -> str:
        """Run a call: {"result": value} or {"error": message} as JSON that spells no tag."""
        return escape_tags(self._respond(call))

    def _respond(self, call: Call) -> str:
        if call.form not in READABLE:
            return as_json("error", f"this call cannot be read ({call.form})")
        name = (call.name or "").strip()
        if name not in self.kit.schemas:
            return as_json("error", f"there is no function {name[:60]!r}")
        parameters = self.kit.schemas[name].get("parameters") or {}
        arguments = given(call.arguments or {}, parameters)
        problem = misfit(arguments, parameters)
        if problem:
            return as_json("error", problem)
        file = self.kit.file
        runner = self.world if file and name in file.tools else self.kit.here
        answer = runner.call(name, arguments)
        if answer.printed:
            _say_once(
                f"{name} prints; what it prints is dropped, so return what the model is to read"
            )
        return answer.text


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)


def read_tools(
    words: Sequence[str],
    *,
    trust: bool = False,
    known: Mapping[str, Tool] = {},
    functions: Iterable[Callable[..., Any]] = (),
    fitting: Sequence[str] = (),
) -> Toolkit:
    """What --tools says: a Python file of functions (NAME.py), a JSON file of schemas
    (NAME.json), and names of functions. Without names, all that the files and `functions` have,
    or else those `fitting`. known: functions that have a name without a file.

    The schemas of a JSON file replace those of hints. ConfigError for an unknown name;
    MissingFile; DataError names file and line."""
    files: list[str] = []
    names: list[str] = []
    listed: dict[str, Schema] = {}
    for word in words:
        if word.endswith(".py"):
            files.append(word)
        elif word.endswith(".json"):
            listed |= read_schemas(Path(word))
        else:
            names.append(word)
    if len(files) > 1:
        raise ConfigError(f"--tools has the Python files {files}; expected one; join them")
    file = ToolFile(Path(files[0]), trust, listed) if files else None
    in_file = file.tools if file else {}
    here = tools_of(functions)
    yours = [*in_file, *here]
    tools = {**known, **here}
    schemas = {name: tool.schema for name, tool in tools.items()} | in_file | listed
    names = names or list(listed) or yours or list(fitting)
    for name in names:
        if name not in schemas:
            raise ConfigError(f"unknown function {name!r}{nearest(name, schemas)}")
    runs = {name: tool.function for name, tool in tools.items()}
    return Toolkit({name: schemas[name] for name in names}, World(runs), file)


def _tools_of(
    module: types.ModuleType, path: Path, listed: Mapping[str, Schema]
) -> dict[str, Schema]:
    """{name: schema} of a file's functions. listed: schemas by name; their functions need no
    hints, and others are left out. DataError names file and line."""
    listed_functions = getattr(module, "EXECUTORS", {})
    if not isinstance(listed_functions, Mapping):
        raise DataError(
            f"{path}: EXECUTORS is {str(listed_functions)[:60]}; expected a dict of functions by name"
        )
    table = functions_of(module)
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
        return {name: listed[name] for name in table if name in listed}
    return {name: schema_of(function, name) for name, function in table.items()}


def tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """{name: Tool} of functions, such as those of a notebook, in their order."""
    return {f.__name__: Tool(f, schema_of(f, f.__name__)) for f in functions}


def run_file(path: Path, kind: str, needed: str) -> types.ModuleType:
    """The module of a user's Python file, registered as KIND_NAME. MissingFile, which ends in
    `needed`; DataError with file and line."""
    if not path.is_file():
        raise MissingFile(f"{path} is not a file; {needed}")
    sys.path.append(str(path.resolve().parent))  # the file may import its neighbours
    return _executed(path.read_bytes(), kind, path)


def _executed(source: bytes, kind: str, path: Path) -> types.ModuleType:
    """The module of a file's source, registered as KIND_NAME. DataError with file and line."""
    try:
        return execute(source, f"{kind}_{path.stem}", str(path))
    except (Exception, SystemExit) as error:  # the file is the user's and may raise anything
        line = _line_of(error, path)
        raise DataError(
            f"{path} line {line}: {type(error).__name__}: {error}; correct the file"
        ) from error


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


# ---- schemas


def read_schemas(path: Path) -> dict[str, Schema]:
    """name -> schema of a json list of tools in any form of `tool_schemas`. DataError names the
    file and the tool."""
    from codechat.text import json_schemas  # a tenth of a second, which a chat does not need

    schemas: dict[str, Schema] = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in tool_schemas.listed_tools(content):
            tool = tool_schemas.tool_schema(row)
            name = tool["name"]
            parameters = {"type": "object", "required": [], "properties": {}, **tool["parameters"]}
            json_schemas.check(parameters)
            schemas[name] = {
                "name": name,
                "description": str(tool["description"]),
                "parameters": parameters,
            }
    except (OSError, ValueError, json_schemas.SchemaError) as error:
        expected = (
            '[{"name": ..., "description": ..., "parameters": '
            '{"type": "object", "properties": {...}}}]'
        )
        message = error.message if isinstance(error, json_schemas.SchemaError) else str(error)
        raise DataError(f"{path} item {len(schemas)}: {message}; expected {expected}") from None
    return schemas


def given(arguments: Mapping[str, Any], parameters: Schema) -> dict[str, Any]:
    """The arguments without None of an optional parameter that takes none: it counts as left
    out, so that the function has its default."""
    from codechat.text import json_schemas

    properties = parameters.get("properties") or {}
    optional = properties.keys() - set(parameters.get("required") or ())
    kept = {}
    for name, value in arguments.items():
        left_out = value is None and name in optional
        if not left_out or json_schemas.fits(None, properties[name], parameters):
            kept[name] = value
    return kept


def misfit(arguments: Mapping[str, Any], parameters: Schema) -> str:
    """Where the arguments break their JSON schema, or "". None of an optional parameter counts
    as left out."""
    from codechat.text import json_schemas

    error = json_schemas.error_of(given(arguments, parameters), parameters)
    if error is None:
        return ""
    return f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}"[:300]


def schema_of(function: Callable[..., Any], name: str) -> Schema:
    """{"name", "description", "parameters"} from type hints and docstring. Equal to what the
    packages mcp, openai-agents and pydantic-ai make of the function, without their titles;
    arguments are described as in the latter two. DataError for a parameter without a known type."""
    written = inspect.unwrap(function)
    code = getattr(written, "__code__", None)  # a class or a partial has none
    where = f"{code.co_filename} line {code.co_firstlineno}: {name}" if code else name
    if not _is_plain(written):
        raise DataError(f"{where}: it is async or yields; write a plain def, and return the result")
    hints = _hints(function, where)
    parameters = inspect.signature(function).parameters
    doc = _read_doc(inspect.getdoc(function) or "", parameters)
    classes = _Classes()
    properties: dict[str, Schema] = {}
    for p in parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise DataError(
                f"{where}: parameter {p.name} has no name to call it by; write named parameters"
            )
        if p.name not in hints:
            remedy = (
                f"write {p.name}: str, int, list[...] ..., or give schemas in a .json of --tools; "
                f"if {name} is no tool, call it _{name}"
            )
            raise DataError(f"{where}: parameter {p.name} has no type hint; {remedy}")
        hint = hints[p.name]
        about = f"{where}: parameter {p.name}"
        properties[p.name] = classes.schema(hint.type, about) | _default(p.default)
        for note in hint.notes:
            if not isinstance(note, str):
                raise DataError(
                    f"{about} is annotated with {str(note)[:60]}, which is "
                    "not read; write a text, or give schemas in a .json of --tools"
                )
        said = doc.arguments.get(p.name) or "\n".join(hint.notes)
        if said:
            properties[p.name]["description"] = said
    required = [p.name for p in parameters.values() if p.default is p.empty]
    shape = {"type": "object", "properties": properties, "required": required}
    if classes.schemas:
        shape["$defs"] = classes.schemas
    return dict(name=name, description=doc.description, parameters=shape)


class _Hint(NamedTuple):
    """The type hint of a parameter; notes: what Annotated adds to it."""

    type: Any
    notes: Sequence[Any]


def _hints(function: Callable[..., Any], where: str) -> dict[str, _Hint]:
    """The type hints by parameter. DataError for hints in quotes that cannot be read."""
    try:
        hints = typing.get_type_hints(function)
        noted = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise DataError(f"{where}: unknown type in its hints ({error}); import it") from None
    except Exception as error:  # hints in quotes are the user's code and may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{where}: its hints cannot be read ({reason}); correct them") from None
    return {name: _Hint(hints[name], getattr(noted[name], "__metadata__", ())) for name in hints}


class Doc(NamedTuple):
    """A docstring: the text before its sections, and that of each argument."""

    description: str
    arguments: dict[str, str]


# Google's headings, a field of reST, the line below NumPy's headings.
_SECTION = re.compile(
    r"(?:Args|Arguments|Parameters|Params|Returns|Return|Yields|Raises|Examples?|Notes?):?"
    r"|:\w+.*:.*|-{3,}"
)
_NUMPY = re.compile(r"^\s*(?:Other )?Parameters\s*\n\s*-{3,}\s*$", re.MULTILINE)


def _read_doc(text: str, names: Iterable[str]) -> Doc:
    """Lines `name: text` or `name (type): text`, as in Google's style, reST's `:param name:
    text`, or NumPy's `name : type` before its text; deeper lines go on."""
    lines = text.splitlines()
    headings = (i for i, line in enumerate(lines) if _SECTION.fullmatch(line.strip()))
    first = next(headings, len(lines))  # where the description ends
    underlined = _NUMPY.search(text)
    arguments: dict[str, str] = {}
    for name in names:
        begins = re.compile(
            rf"(\s*)(?::(?:param|arg)\b[^:]*?)?\b{re.escape(name)}(?: *\([^)]*\))?: +(\S.*)"
        )
        if underlined:
            begins = re.compile(rf"(\s*){re.escape(name)}(?: *:.*)?()")
        for i, line in enumerate(lines):
            found = begins.fullmatch(line)
            if not found or (underlined and i < first):
                continue
            said = [found[2].strip()] if found[2] else []
            said += _deeper(lines[i + 1 :], found[1])
            arguments[name] = "\n".join(said)
            first = min(first, i)
            break
    return Doc("\n".join(lines[:first]).strip(), arguments)


def _deeper(lines: Iterable[str], blanks: str) -> list[str]:
    """The first lines that begin with more than `blanks`, up to another or an empty one."""
    deeper = []
    for line in lines:
        if not line.startswith(blanks + " ") or not line.strip():
            break
        deeper.append(line.strip())
    return deeper


def _default(value: Any) -> Schema:
    """{"default": value}; empty for none, and for what JSON does not hold."""
    kinds = (str, int, float, list, dict, tuple, set, frozenset, enum.Enum, *TIMES, type(None))
    if value is inspect.Parameter.empty or not isinstance(value, kinds):
        return {}
    try:
        return {"default": json.loads(as_json("is", value))["is"]}
    except (TypeError, ValueError):
        return {}


class _Classes:
    """JSON schemas of type hints, those of classes by name."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self.found: dict[str, type] = {}

    def schema(self, hint: Any, where: str) -> Schema:
        """DataError for a type without a schema."""
        args = typing.get_args(hint)
        kind = typing.get_origin(hint) or hint
        if kind is Any:
            return {}
        if kind is type(None):
            return {"type": "null"}
        if kind in (typing.Union, types.UnionType):
            several = len(args) > 2 or type(None) not in args
            if several and any(map(_is_converted, args)):
                raise DataError(
                    f"{where} has type {hint}; the function would get what JSON has, not "
                    "an object of one of these types; write one type, or one and None"
                )
            return {"anyOf": [self.schema(one, where) for one in args]}
        if kind is Literal:
            return _values(args, where)
        if kind is tuple and args and args[-1] is not ...:
            items = [self.schema(one, where) for one in args]
            n = len(items)
            return {"type": "array", "prefixItems": items, "minItems": n, "maxItems": n}
        if kind in (list, set, frozenset, tuple):
            out: Schema = {"type": "array", "items": {}}
            if args:
                out["items"] = self.schema(args[0], where)
            if kind in (set, frozenset):
                out["uniqueItems"] = True
            return out
        if kind is dict:
            inner: Schema = {}
            if args and args[0] not in (str, Any):
                raise DataError(
                    f"{where} has type {hint}; keys in JSON are texts; write dict[str, ...]"
                )
            if args:
                inner = self.schema(args[1], where)
            return {"type": "object", "additionalProperties": inner or True}
        if kind in TYPES:
            return {"type": TYPES[kind]}
        if kind in FORMATS:
            return {"type": "string", "format": FORMATS[kind]}
        if _is_class(kind):
            return self.reference(kind, where)
        raise DataError(
            f"{where} has type {hint}; use str, int, float, bool, list, set, tuple, dict, Literal, "
            "a date or time, an Enum, a dataclass, a TypedDict, or several of them with |"
        )

    def reference(self, kind: type, where: str) -> Schema:
        name = kind.__name__
        if self.found.setdefault(name, kind) is not kind:
            raise DataError(f"{where}: two classes are called {name}; rename one of them")
        if name not in self.schemas:
            self.schemas[name] = {}  # it may refer to itself
            self.schemas[name] = self.object(kind, f"{where}, {name}")
        return {"$ref": f"#/$defs/{name}"}

    def object(self, kind: type, where: str) -> Schema:
        """The schema of an Enum, a dataclass or a TypedDict."""
        if issubclass(kind, enum.Enum):
            return _values([one.value for one in kind], where)
        hints = typing.get_type_hints(kind)
        properties = {name: self.schema(hint, where) for name, hint in hints.items()}
        required = sorted(getattr(kind, "__required_keys__", ()), key=list(hints).index)
        if dataclasses.is_dataclass(kind):
            fields = [f for f in dataclasses.fields(kind) if f.init]
            missing = dataclasses.MISSING
            properties = {f.name: properties[f.name] for f in fields}
            for f in fields:
                if f.default is not missing:
                    properties[f.name] |= _default(f.default)
                elif f.default_factory is missing:
                    required.append(f.name)
        out: Schema = {"type": "object", "properties": properties, "required": required}
        doc = inspect.getdoc(kind) or ""
        if kind.__doc__ and not doc.startswith((f"{kind.__name__}(", "dict(")):  # written by hand
            out["description"] = doc
        return out


FORMATS = {datetime.datetime: "date-time", datetime.date: "date", datetime.time: "time"}


def _is_class(kind: Any) -> bool:
    known = dataclasses.is_dataclass(kind) or hasattr(kind, "__required_keys__")  # a TypedDict
    return isinstance(kind, type) and (known or issubclass(kind, enum.Enum))


def _is_converted(hint: Any) -> bool:
    """Whether a function gets something else for this type than what JSON has."""
    kind = typing.get_origin(hint) or hint
    if kind is Literal:
        return False
    if kind in FORMATS or kind in (set, frozenset, tuple):
        return True
    if _is_class(kind):
        return not hasattr(kind, "__required_keys__")  # a TypedDict is a dict
    return any(map(_is_converted, typing.get_args(hint)))


def _values(values: Sequence[Any], where: str) -> Schema:
    """The schema of a choice among values. DataError for what JSON does not hold."""
    expected = "expected text, numbers, true or false; correct them"
    if not values:
        raise DataError(f"{where} has no choice; {expected}")
    for value in values:
        if value is not None and type(value) not in TYPES:
            raise DataError(f"{where} has the choice {str(value)[:60]}; {expected}")
    kinds = {TYPES.get(type(value)) for value in values}
    out: Schema = {"enum": list(values)}
    if len(values) == 1:
        out = {"const": values[0]}
    if len(kinds) == 1 and None not in kinds:
        out["type"] = kinds.pop()
    return out
