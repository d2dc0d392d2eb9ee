"""Chat with a checkpoint that calls functions: calls are parsed and run, and their results fed back until the model answers in words.

    codechat tools --ckpt nano/rl --user "What is 12 squared?"
    codechat tools --ckpt my-tools --executors examples/my_tools.py --user "What is the weather in Beijing?"
    codechat tools --ckpt nano/rl --tools-file schemas.json --no-run --user "..."    only show the call

Functions come from the toolbox (those that fit the request, or `--tools square to_binary`) or from your Python file (`--executors`), whose type
hints and docstrings become the schema. Such a file runs with your rights, like any script that you start. What goes wrong in a call (an unknown
function, arguments that do not fit, an exception) goes back to the model as {"error": ...}. Calls are held to the schemas by token masks, unless --constrain off.

Left out: several requests at once, asynchronous functions, and a time limit for a function (Ctrl-C stops it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, DataError, MissingFile, nearest
from codechat.inference.chat_command import (
    NEUTRAL,
    ChatSettings,
    Message,
    converse,
    mixes_requests,
    open_model,
    opening,
    show,
)
from codechat.inference.fitting_tools import OFFERED, goes_on, tools_for
from codechat.tasks.toolbox import TOOLS
from codechat.text import chat
from codechat.text.token_view import visible
from codechat.text.tool_functions import executors_of, load_executors

Schema = dict[str, Any]
Function = Callable[..., Any]
LONGEST_RESULT = 1000  # characters of a result that the model may read
KINDS: dict[str, Any] = {  # types of JSON schema
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "array": list,
    "object": dict,
    "null": type(None),
}


@dataclass(frozen=True, kw_only=True)
class ToolsConfig(ChatSettings):
    """`codechat tools`."""

    system: str = opt("", "text before the list of functions in the system message")
    temperature: float = opt(0.0, "sampling temperature; 0 = always the most likely token")
    tools: tuple[str, ...] = opt(
        (),
        f"functions to offer, by name; empty = those of the file given, else {OFFERED} of the toolbox that fit the request",
    )
    tools_file: Path | None = opt(None, "json file with a list of function schemas to offer")
    executors: Path | None = opt(
        None, "Python file whose public functions are offered and run (see examples/my_tools.py)"
    )
    run: bool = opt(True, "run the calls; --no-run only shows them")
    raw: bool = opt(False, "show turns as the model sees them, tags included")
    max_rounds: int = opt(4, "answers per request, calls included")
    constrain: Literal["auto", "off"] = opt(
        "auto",
        "auto: token masks keep calls to the functions offered and to their schemas; off: calls are sampled freely",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rounds < 1:
            raise ConfigError(f"max_rounds {self.max_rounds}; it must be at least 1")
        if self.raw and self.server:
            raise ConfigError(
                "--raw shows a checkpoint's own tokens, which no server sends; leave it out, or set --ckpt"
            )


@dataclass(frozen=True)
class Toolkit:
    """What is offered to the model, and what can be run."""

    schemas: list[Schema]
    functions: Mapping[str, Function]

    @property
    def names(self) -> list[str]:
        return [schema["name"] for schema in self.schemas]

    def can_run(self, call: chat.Call) -> bool:
        """False only for an offered function that has no implementation here."""
        return call.name not in self.names or call.name in self.functions

    def respond(self, call: chat.Call) -> str:
        """Run a call: {"result": value} or {"error": message} as json text."""
        if call.form not in chat.READABLE:
            return _as_json("error", f"this call cannot be read ({call.form})")
        if call.name not in self.names:
            return _as_json("error", f"there is no function {call.name[:60]!r}")
        schema = next(schema for schema in self.schemas if schema["name"] == call.name)
        if problem := _misfit(call.arguments, schema.get("parameters") or {}):
            return _as_json("error", problem)
        try:
            text = _as_json("result", self.functions[call.name](**call.arguments))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            return _as_json("error", f"{type(error).__name__}: {error}"[:LONGEST_RESULT])
        if len(text) > LONGEST_RESULT:
            return _as_json("error", f"the result has {len(text)} characters; at most {LONGEST_RESULT} can be read")
        return text


def _misfit(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """The first argument that is none of its enumeration or of another type than its schema has, in words; empty where all fit. What is missing or too
    many the function says itself."""
    for name, value in arguments.items():
        about = (parameters.get("properties") or {}).get(name)
        if not isinstance(about, Mapping) or value is None and name not in (parameters.get("required") or ()):
            continue  # `None` of an optional parameter; its schema leaves it out (`text.tool_functions`)
        choices, kinds = about.get("enum"), about.get("type")
        if isinstance(choices, list) and value not in choices:
            return f"{name} is {json.dumps(value)[:60]}; required is one of {json.dumps(choices)[:200]}"
        kinds = kinds if isinstance(kinds, list) else [kinds] if kinds in KINDS else []
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"{name} is {json.dumps(value)[:60]}; required is {' or '.join(map(str, kinds))}"
    return ""


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON schema, by which 2.0 is an integer and true no number."""
    if isinstance(value, bool) and kind in KINDS:
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, KINDS.get(kind, object))


def _as_json(key: str, value: Any) -> str:
    text = json.dumps({key: value}, ensure_ascii=False, default=str)
    for tag in chat.TAGS:  # as json may spell it, so that no result can open a turn where tags are plain text
        text = text.replace(tag, f"\\u003c{tag[1:]}")
    return text


def gather(
    cfg: ToolsConfig, request: str = "", functions: Sequence[Function] = (), before: Sequence[str] = ()
) -> Toolkit:
    """The functions given and those of the flags, or else those of the toolbox for the request; before: those of the request before it.

    ConfigError for an unknown name; DataError or MissingFile for a bad file or function."""
    own = (load_executors(cfg.executors) if cfg.executors else {}) | executors_of(functions)
    listed = read_schemas(cfg.tools_file) if cfg.tools_file else {}
    runs = {name: partial(_call_tool, name) for name in TOOLS} | {name: e.function for name, e in own.items()}
    known = {name: tool.schema for name, tool in TOOLS.items()} | {name: e.schema for name, e in own.items()} | listed
    names = cfg.tools or tuple(listed) or tuple(own) or tools_for(request, before)
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown function {name!r}{nearest(name, known)}")
    return Toolkit([known[name] for name in dict.fromkeys(names)], runs)


def _call_tool(name: str, /, **arguments: Any) -> Any:
    return TOOLS[name].call(arguments)


def read_schemas(path: Path) -> dict[str, Schema]:
    """name -> schema from a json file: a list of {name, description, parameters}, or of {"type": "function", "function": {...}}."""
    what = "--tools-file takes a json file with a list of function schemas"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingFile(f"{path} is not a file; {what}") from None
    except ValueError as error:  # bad json and bad utf-8
        raise DataError(f"{path} is not json in UTF-8 ({error}); {what}") from None
    rows = found if isinstance(found, list) else [found]
    return {schema["name"]: schema for schema in (_schema(path, i, row) for i, row in enumerate(rows))}


SCHEMA = '{"name": ..., "description": ..., "parameters": {"type": "object", "properties": {...}, "required": [...]}}'


def _schema(path: Path, index: int, row: Any) -> Schema:
    try:
        schema = row.get("function", row)
        name, parameters = schema["name"], schema.get("parameters", {})
        properties = parameters.get("properties", {})
        valid = isinstance(name, str) and all(isinstance(p, dict) for p in properties.values())
    except (AttributeError, KeyError, TypeError):  # no objects, or no name
        valid = False
    if not valid:
        raise DataError(f"{path} item {index} is not a function schema; required: {SCHEMA}")
    parameters = {"type": "object", "required": [], **parameters, "properties": properties}
    return {"name": name, "description": str(schema.get("description", "")), "parameters": parameters}


def signature(call: chat.Call) -> str:
    """A call for comparison with others."""
    return json.dumps([call.name, call.arguments], sort_keys=True)


class ToolChat:
    """A conversation in which calls are run; turns are printed as they come.

    functions: Python functions to offer and run, as those of the file of --executors: ToolChat(ToolsConfig(ckpt="my-tools"), [my_function])."""

    def __init__(self, cfg: ToolsConfig, functions: Sequence[Function] = ()) -> None:
        self.cfg, self.kit = cfg, gather(cfg, functions=functions)
        self.chooses = not (cfg.tools or cfg.tools_file or cfg.executors or functions)  # functions for each request
        self.model = open_model(cfg)
        # for functions that change with the request; of a server's model nothing is known
        self.alone = self.chooses and not cfg.server and mixes_requests(self.model.loaded.model)
        self.transcript = ""  # what --raw has printed

    def offer(self, request: str) -> None:
        """Offer the functions for a request; says which, where they are chosen."""
        if self.chooses:
            self.kit = gather(self.cfg, request, before=self.kit.names)
            self._note(f"offered: {', '.join(self.kit.names) or 'nothing, no function of the toolbox fits'}")
        if self.cfg.server:
            self.model.tools = self.kit.schemas

    def opening(self) -> list[Message]:
        """The system message: the functions, worded as in training, which a server adds itself; or that of a chat, where none is offered."""
        if not self.kit.schemas:
            return opening(self.cfg.system or NEUTRAL)
        if self.cfg.server:
            return opening(self.cfg.system)
        offer = chat.tools_prompt(self.kit.schemas, self.model.loaded.tools_style)
        return opening(f"{self.cfg.system}\n{offer}" if self.cfg.system else offer)

    def reply(self, messages: list[Message]) -> list[Message]:
        """The conversation with the model's turns and those of the functions that it called.

        Ends with an answer in words. Also with a call that was already answered, with an unreadable call after an answered one, and with the
        second unreadable call: its own error does not help a model that just saw it. A small model for which functions are chosen sees a request that
        does not go on with the one before alone, else it answers the one before again."""
        request = messages[-1]["content"]
        self.offer(request)
        if self.alone and not goes_on(request):
            messages = messages[-1:]
        messages = self.opening() + [message for message in messages if message["role"] != "system"]
        answered: set[str] = set()  # readable calls that have a result or an error
        complained = False
        for _ in range(self.cfg.max_rounds):
            messages = self.model.fit(messages)
            text = self._speak(messages)
            messages = [*messages, {"role": "assistant", "content": text}]
            calls = chat.parse_calls(text)
            if not calls or not self._may_run(calls):
                return messages
            unreadable = any(call.form not in chat.READABLE for call in calls)
            if unreadable and (answered or complained):
                self._note("stopped: the call cannot be read")
                return messages
            if all(signature(call) in answered for call in calls):
                self._note("stopped: this call was already answered")
                return messages
            complained |= unreadable
            for call in calls:
                response = self._run_call(call)
                messages = [*messages, {"role": "function", "content": response}]
                if call.form in chat.READABLE:
                    answered.add(signature(call))
        print(f"[stopped after {self.cfg.max_rounds} answers; --max-rounds allows more]", file=sys.stderr)
        return messages

    def _speak(self, messages: list[Message]) -> str:
        held = self.kit.schemas if self.cfg.constrain == "auto" else ()
        if not self.cfg.raw:
            show(self.model.say(messages, tools=held))
            return self.model.last_content()
        prompt = self.model.prompt_text(messages)
        print(prompt.removeprefix(self.transcript), end="")
        self.transcript = prompt + show(self.model.say(messages, raw=True, tools=held))
        return self.model.last_content()

    def _may_run(self, calls: list[chat.Call]) -> bool:
        if not self.cfg.run:
            self._note("not run: --no-run")
            return False
        missing = [call.name for call in calls if not self.kit.can_run(call)]
        if missing:
            self._note(f"not run: no implementation of {missing[0]}; give one with --executors FILE.py")
        return not missing

    def _run_call(self, call: chat.Call) -> str:
        response = self.kit.respond(call)
        if not self.cfg.raw:
            self._note(f"{call.name or 'call'}: {response}")
        return response

    def _note(self, text: str) -> None:
        print(f"[{visible(text)}]", flush=True)


EPILOG = """examples:
  codechat tools --ckpt nano/rl --user "What is 12 squared?"
  codechat tools --ckpt nano/rl --tools to_binary is_prime --user "Is 97 prime?" --raw
  codechat tools --ckpt my-tools --executors examples/my_tools.py --user "What is the weather in Beijing?"
  codechat tools --server http://127.0.0.1:8000 --user "What is 12 squared?"
  codechat tools --ckpt nano/rl --tools-file schemas.json --no-run --user "..." """


def main(argv: list[str] | None = None) -> None:
    """`codechat tools`."""
    cfg = config.parse(ToolsConfig, sys.argv[1:] if argv is None else argv, prog="codechat tools", epilog=EPILOG)
    session = ToolChat(cfg)
    if cfg.user:
        session.reply([*session.opening(), {"role": "user", "content": cfg.user}])
        return
    if not session.chooses:
        print(f"[functions: {', '.join(session.kit.names)}]")
    converse(session.opening(), session.reply)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
