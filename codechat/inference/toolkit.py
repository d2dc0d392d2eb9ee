"""The functions that a model is offered in `codechat tools` and on the page, and how their calls are run.

Without functions of the user, those of the toolbox that fit a request: BM25 over names, descriptions, and the
arguments' names and choices. Functions that could serve the same request (`catalogue.FAMILIES`) are never offered
together, as in training."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, MissingFile, nearest
from codechat.tasks.toolbox.catalogue import TOOLS, family
from codechat.text import chat, tool_calls, tool_functions

Schema = dict[str, Any]
LONGEST_RESULT = 1000  # characters of a result that the model may read
OFFERED = 4  # as many as a training prompt offers at most
NEAR = 0.7  # least share of the best score: others distract a small model more often than they help
ASKING = frozenset("write show give tell make find please program function code".split())  # not what a request is about
GOES_ON = re.compile(r"\s*(and|also|or|now|then|(what|how) about)\b", re.IGNORECASE)  # begins like a follow-up
POINTS_BACK = re.compile(r"\b(it|its|them|again)\b", re.IGNORECASE)
STEM = 5  # letters of a word that count: "squared" finds "square"


@dataclass(frozen=True)
class Toolkit:
    """What is offered to the model, and what can be run."""

    schemas: list[Schema]
    functions: Mapping[str, Callable[..., Any]]

    @property
    def names(self) -> list[str]:
        return [schema["name"] for schema in self.schemas]

    def can_run(self, call: chat.Call) -> bool:
        """False only for an offered function that has no implementation here."""
        return call.name not in self.names or call.name in self.functions

    def respond(self, call: chat.Call) -> str:
        """Run a call: {"result": value} or {"error": message} as json text."""
        answer = lambda **value: tool_calls.escape_tags(json.dumps(value, ensure_ascii=False, default=str))  # noqa: E731
        if call.form not in chat.READABLE:
            return answer(error=f"this call cannot be read ({call.form})")
        if call.name not in self.names:
            return answer(error=f"there is no function {call.name[:60]!r}")
        parameters = self.schemas[self.names.index(call.name)].get("parameters") or {}
        if problem := misfit(call.arguments, parameters):
            return answer(error=problem)
        try:
            text = answer(result=self.functions[call.name](**tool_functions.whole(call.arguments)))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            return answer(error=f"{type(error).__name__}: {error}"[:LONGEST_RESULT])
        if len(text) > LONGEST_RESULT:
            return answer(error=f"the result has {len(text)} characters; at most {LONGEST_RESULT} can be read")
        return text


def misfit(arguments: Mapping[str, Any], parameters: Schema) -> str:
    """Where the arguments break their JSON schema, or "". None of an optional parameter counts as left out."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    given = {k: v for k, v in arguments.items() if v is not None or k in (parameters.get("required") or ())}
    error = best_match(Draft202012Validator(parameters).iter_errors(given))
    return f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}"[:300] if error else ""


def gather(
    names: Sequence[str] = (),
    tools_file: Path | None = None,
    executors: Path | None = None,
    functions: Iterable[Callable[..., Any]] = (),
    fitting: Sequence[str] = (),
) -> Toolkit:
    """Those named, or else all of the files and functions given, or else those `fitting`."""
    listed = read_schemas(tools_file) if tools_file else {}
    yours = (tool_functions.load_executors(executors, listed) if executors else {}) | tool_functions.executors_of(
        functions
    )
    runs = {name: _with_names(tool.call) for name, tool in TOOLS.items()} | {
        name: e.function for name, e in yours.items()
    }
    known = {name: tool.schema for name, tool in TOOLS.items()} | {n: e.schema for n, e in yours.items()} | listed
    names = names or tuple(listed) or tuple(yours) or fitting
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"unknown function {unknown[0]!r}{nearest(unknown[0], known)}")
    return Toolkit([known[name] for name in dict.fromkeys(names)], runs)


def _with_names(call: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function of a dict of arguments as one of named arguments."""
    return lambda **arguments: call(arguments)


def read_schemas(path: Path) -> dict[str, Schema]:
    """name -> schema of a json list of {name, description, parameters} or {"type": "function", "function": {...}}."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    schemas = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content if isinstance(content, list) else [content]:
            row = row.get("function", row)
            parameters = {"type": "object", "required": [], "properties": {}, **row.get("parameters", {})}
            Draft202012Validator.check_schema(parameters)
            about = dict(name=row["name"], description=str(row.get("description", "")), parameters=parameters)
            schemas[row["name"]] = about
    except OSError:
        raise MissingFile(f"{path} is not a file; --tools-file takes a json file with function schemas") from None
    except (ValueError, AttributeError, KeyError, TypeError, SchemaError) as error:
        needed = '[{"name": ..., "description": ..., "parameters": {"type": "object", "properties": {...}}}]'
        raise DataError(f"{path} item {len(schemas)}: {type(error).__name__}: {error}; required: {needed}") from None
    return schemas


# ---- the toolbox


def tools_for(request: str, before: Sequence[str] = ()) -> list[str]:
    """Names to offer for a request: those that fit it, else those offered `before` where it goes on ("and of 13?")."""
    return fitting_tools(request) or (list(before) if _continues(request) else [])


def goes_on(request: str) -> bool:
    """Whether a request needs the one before it: by how it begins, a word that points back, or no word of its own."""
    return _continues(request) or bool(POINTS_BACK.search(request))


def _continues(request: str) -> bool:
    return bool(GOES_ON.match(request)) or not _words(request)


def fitting_tools(request: str) -> list[str]:
    """Names of at most OFFERED functions, best first; none where no word of the request is in any description."""
    index, names = _index()
    known = sorted(set(_words(request)) & index.vocab_dict.keys())
    scores, chosen = index.get_scores(known) if known else [], []
    for score, name in sorted(zip(scores, names), reverse=True):
        near = score >= NEAR * scores.max() and len(chosen) < OFFERED
        if near and not any(name in family(other) for other in chosen):
            chosen.append(name)
    return chosen


@lru_cache(maxsize=1)
def _index() -> tuple[Any, list[str]]:
    import bm25s  # here: only a request needs it

    texts = []
    for tool in TOOLS.values():
        properties = tool.schema["parameters"]["properties"].items()
        arguments = " ".join(f"{name} {' '.join(map(str, about.get('enum', ())))}" for name, about in properties)
        # the name counts twice: its words are chosen to be told apart
        texts.append(f"{tool.name} {tool.name} {tool.schema['description']} {arguments}".replace("_", " "))
    index = bm25s.BM25()
    index.index([_words(text) for text in texts], show_progress=False)
    return index, list(TOOLS)


def _words(text: str) -> list[str]:
    from bm25s.stopwords import STOPWORDS_EN

    return [word[:STEM] for word in re.findall(r"[a-z]+", text.lower()) if word not in ASKING.union(STOPWORDS_EN)]
