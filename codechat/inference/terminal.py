"""`codechat chat` and `codechat tools`: one request, or a conversation in the terminal; answers appear as they are
sampled.

    codechat chat  --ckpt nano/sft --user "write quicksort"
    codechat chat  --ckpt nano/sft                                a conversation; Ctrl-D ends it
    codechat chat  --ckpt nano/pretrain --complete "def add(a"    no turns: for a checkpoint before SFT
    codechat tools --ckpt nano/rl --user "What is 12 squared?"
    codechat tools --ckpt my-tools --executors examples/my_tools.py --user "What is the weather in Beijing?"
    codechat tools --server http://127.0.0.1:8000 --user "What is 12 squared?"
    codechat tools --ckpt nano/rl --tools-file schemas.json --no-run --user "..."    only show the call

`tools` offers the functions of the toolbox that fit each request, or yours; `chat` offers none unless you name some.
Calls are held to their schemas by token masks, run, and their results fed back until the model answers in words. What
goes wrong in a call goes back to the model as {"error": ...}. A file of --executors runs with your rights, like any
script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from codechat.core import config
from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError, DataError, MissingFile, UserError, nearest
from codechat.distributed import dist
from codechat.inference.client import RemoteModel
from codechat.inference.detokenizer import Detokenizer
from codechat.inference.fitting_tools import goes_on, tools_for
from codechat.models import generate, loading
from codechat.runs import paths
from codechat.tasks.toolbox.catalogue import TOOLS
from codechat.text import chat
from codechat.text.call_grammar import call_grammar
from codechat.text.token_view import visible
from codechat.text.tool_calls import escape_tags
from codechat.text.tool_functions import call as run_function
from codechat.text.tool_functions import executors_of, load_executors

Message = dict[str, str]
Schema = dict[str, Any]
M = TypeVar("M")
DEFAULT_TOKENS = 256  # longest answer where --max-new-tokens is none
LONGEST_RESULT = 1000  # characters of a result that the model may read
NEUTRAL = "You are a helpful assistant."  # conversations without functions begin like this in training
SMALL = 100_000_000  # parameters. released/mini answered 32 of 55 second requests sensibly, and 50 of them alone


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Settings):
    """A checkpoint, how to sample from it, and what to say to it."""

    chooses: ClassVar[bool] = False  # offers functions of the toolbox that fit the request
    ckpt: str = opt(
        "",
        "run name (the checkpoint that evaluation chose, else the latest), run@latest, run@best, run@STEP, run "
        "directory or checkpoint; or give --server",
    )
    server: str = opt("", "URL of a server instead, such as http://127.0.0.1:8000 (codechat serve)")
    api_key_file: Path | None = opt(None, "file with the key that the server expects; none = no key")
    user: str = opt("", "one request, answered and done; empty = a conversation, read from the terminal")
    complete: str = opt("", "a text to continue as it stands, without turns (for pretrained checkpoints)")
    max_new_tokens: int | None = opt(
        None, f"longest answer, tokens; none = {DEFAULT_TOKENS}, or what the block leaves", least=1
    )
    temperature: float = opt(0.5, "sampling temperature; 0 = always the most likely token", least=0)
    top_k: int | None = opt(50, "sample among the k most likely tokens; none = all", least=1)
    seed: int = opt(0, "seed of the sampling; the same seed gives the same answers")
    tools: tuple[str, ...] = opt((), "functions to offer, by name")
    tools_file: Path | None = opt(None, "json file with a list of function schemas to offer")
    executors: Path | None = opt(
        None, "Python file whose public functions are offered and run (see examples/my_tools.py)"
    )
    run: bool = opt(True, "run the calls; --no-run only shows them")
    raw: bool = opt(False, "show turns as the model sees them, tags included")
    max_rounds: int = opt(4, "answers per request, calls included", least=1)
    constrain: Literal["auto", "off"] = opt(
        "auto", "auto: token masks keep calls to the functions offered and their schemas; off: calls are sampled freely"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user and self.complete:
            raise ConfigError("--user and --complete exclude each other; keep one")
        if self.raw and self.server:
            raise ConfigError("--raw shows a checkpoint's own tokens, which no server sends; set --ckpt")


@dataclass(frozen=True, kw_only=True)
class ToolsConfig(ChatConfig):
    """The same with functions: those given, else some of the toolbox that fit each request."""

    chooses: ClassVar[bool] = True
    temperature: float = 0.0


# ---- the model


class LocalModel:
    """A loaded checkpoint with sampling settings. Each answer has its own sampling key."""

    def __init__(self, cfg: ChatConfig) -> None:
        self.cfg, self.answers = cfg, 0
        self.content = ""  # of the last turn, however it was shown
        path, meaning = paths.chosen_checkpoint(cfg.ckpt)
        if meaning:
            print(f"[{meaning}]", file=sys.stderr)
        self.loaded = loading.load_model(path, dist.device())
        self.tokenizer, self.tags = self.loaded.tokenizer, self.loaded.tags
        self.block = self.loaded.model.cfg.block_size
        if (cfg.max_new_tokens or 0) >= self.block:
            raise ConfigError(f"max_new_tokens {cfg.max_new_tokens}; the block of {cfg.ckpt} holds {self.block} tokens")
        kinds = {entry.get("kind") for entry in self.loaded.meta.get("lineage", ())}
        self.only_pretrained = bool(kinds) and kinds <= {"pretrain", "chars"}  # it never saw a conversation

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return chat.prompt(messages, self.tokenizer, self.tags)

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = (), raw: bool = False) -> Iterator[str]:
        """Pieces of the assistant's next turn. tools: schemas that its calls are held to; raw: with tags."""
        grammar = call_grammar(self.tokenizer, self.tags, tools, declines=self.loaded.declines) if tools else None
        ids: list[int] = []
        how = dict(stop=chat.stop_sequences(self.tokenizer, self.tags), grammar=grammar)
        yield from self._pieces(ids, self.prompt(messages), Detokenizer(self.tokenizer, self.tags, raw=raw), **how)
        self.content = chat.completion_text(ids, self.tokenizer, self.tags)

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        stop = [(self.tokenizer.eot_id,)]
        return self._pieces([], self.tokenizer.encode(text), Detokenizer(self.tokenizer, None), stop=stop)

    def _pieces(self, ids: list[int], prompt: list[int], detokenizer: Detokenizer, **how: Any) -> Iterator[str]:
        """Pieces of a text whose tokens are appended to `ids`. ConfigError where the block has no room for it."""
        cfg, shown, room = self.cfg, "", self.block - len(prompt)
        how |= dict(temperature=cfg.temperature, top_k=cfg.top_k, seed=cfg.seed, key=self.answers)
        how |= dict(max_new_tokens=cfg.max_new_tokens or min(DEFAULT_TOKENS, max(room, 1)))
        self.answers += 1
        if room < how["max_new_tokens"]:
            problem = f"the conversation has {len(prompt)} tokens and the answer may have {how['max_new_tokens']}"
            remedy = f"set --max-new-tokens {room} or less" if room > 0 else "shorten the conversation"
            raise ConfigError(f"{problem}; both must fit the block of {self.block}; {remedy}")
        with dist.autocast(dist.device()):
            for token, _ in generate.stream(self.loaded.model, prompt, **how):
                ids.append(token)
                text = detokenizer.growing(ids)
                if len(text) > len(shown):
                    yield text[len(shown) :]
                    shown = text
        yield detokenizer.text(ids)[len(shown) :]

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation without the oldest exchanges that leave the answer no room; stderr says how many."""
        needed = room_for_an_answer(self.block, self.cfg.max_new_tokens)
        kept = drop_oldest(messages, lambda m: m["role"], lambda kept: self.block - len(self.prompt(kept)) < needed)
        if dropped := len(messages) - len(kept):
            forgotten = f"the oldest {dropped} messages are forgotten"
            print(f"[the block holds {self.block} tokens: {forgotten}]", file=sys.stderr)
        return kept


def room_for_an_answer(block_size: int, longest: int | None) -> int:
    """Tokens that a conversation must leave for the next answer."""
    return longest or min(DEFAULT_TOKENS, block_size // 4)


def mixes_requests(model: Any) -> bool:
    """Whether a request that does not go on with the one before is answered better without it: so it is in small
    models."""
    return sum(weights.numel() for weights in model.parameters()) < SMALL


def drop_oldest(messages: Sequence[M], role: Callable[[M], str], too_long: Callable[[list[M]], bool]) -> list[M]:
    """The messages without the oldest exchanges, from a user's turn to the next, while the rest is too long. The last
    one stays."""
    kept = list(messages)
    while too_long(kept):
        users = [i for i, m in enumerate(kept) if role(m) == "user"]
        if len(users) < 2:
            break
        kept = [m for m in kept[: users[0]] if role(m) == "system"] + kept[users[1] :]
    return kept


def open_model(cfg: ChatConfig) -> LocalModel | RemoteModel:
    """The checkpoint or the server of the flags. ConfigError where they name none or both."""
    if bool(cfg.ckpt) == bool(cfg.server):
        given = "both --ckpt and --server are given" if cfg.ckpt else "ckpt is required"
        raise ConfigError(f"{given}; set --ckpt RUN, or --server URL")
    if cfg.ckpt:
        return LocalModel(cfg)
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, max_tokens=cfg.max_new_tokens)
    return RemoteModel(cfg.server, how, seed=cfg.seed, api_key_file=cfg.api_key_file)


# ---- functions


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
        if call.form not in chat.READABLE:
            return _as_json("error", f"this call cannot be read ({call.form})")
        if call.name not in self.names:
            return _as_json("error", f"there is no function {call.name[:60]!r}")
        schema = self.schemas[self.names.index(call.name)]
        if problem := misfit(call.arguments, schema.get("parameters") or {}):
            return _as_json("error", problem)
        try:
            text = _as_json(
                "result", run_function(self.functions[call.name], call.arguments, schema.get("parameters") or {})
            )
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            return _as_json("error", f"{type(error).__name__}: {error}"[:LONGEST_RESULT])
        if len(text) > LONGEST_RESULT:
            return _as_json("error", f"the result has {len(text)} characters; at most {LONGEST_RESULT} can be read")
        return text


def misfit(arguments: Mapping[str, Any], parameters: Schema) -> str:
    """Where the arguments break their JSON schema, in words, else "". None of an optional parameter counts as left
    out."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    given = {k: v for k, v in arguments.items() if v is not None or k in (parameters.get("required") or ())}
    error = best_match(Draft202012Validator(parameters).iter_errors(given))
    return f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message}"[:300] if error else ""


def _as_json(key: str, value: Any) -> str:
    return escape_tags(json.dumps({key: value}, ensure_ascii=False, default=str))


def gather(
    cfg: ChatConfig, request: str = "", functions: Sequence[Callable[..., Any]] = (), before: Sequence[str] = ()
) -> Toolkit:
    """The functions given and those of the flags, or else those of the toolbox for the request; before: the last
    offer."""
    listed = read_schemas(cfg.tools_file) if cfg.tools_file else {}
    yours = (load_executors(cfg.executors, listed) if cfg.executors else {}) | executors_of(functions)
    runs = {name: partial(_call_tool, name) for name in TOOLS} | {name: e.function for name, e in yours.items()}
    known = {name: tool.schema for name, tool in TOOLS.items()} | {n: e.schema for n, e in yours.items()} | listed
    names = cfg.tools or tuple(listed) or tuple(yours) or (tools_for(request, before) if cfg.chooses else ())
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown function {name!r}{nearest(name, known)}")
    return Toolkit([known[name] for name in dict.fromkeys(names)], runs)


def _call_tool(name: str, /, **arguments: Any) -> Any:
    return TOOLS[name].call(arguments)


def read_schemas(path: Path) -> dict[str, Schema]:
    """name -> schema of a json file: a list of {name, description, parameters}, or of {"type": "function", "function":
    {...}}."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise MissingFile(f"{path} is not a file; --tools-file takes a json file with function schemas") from None
    except ValueError as error:
        raise DataError(f"{path} is not json in UTF-8 ({error})") from None
    schemas = {}
    for index, row in enumerate(content if isinstance(content, list) else [content]):
        try:
            row = row.get("function", row)
            parameters = {"type": "object", "required": [], "properties": {}, **row.get("parameters", {})}
            Draft202012Validator.check_schema(parameters)
            about = dict(name=row["name"], description=str(row.get("description", "")), parameters=parameters)
        except (AttributeError, KeyError, TypeError, SchemaError):
            needed = '{"name": ..., "description": ..., "parameters": {"type": "object", "properties": {...}}}'
            raise DataError(f"{path} item {index} is not a function schema; required: {needed}") from None
        schemas[about["name"]] = about
    return schemas


# ---- a conversation


class ToolChat:
    """A conversation in which calls are run; turns are printed as they come.

    functions: Python functions to offer and run: ToolChat(ToolsConfig(ckpt="my-tools"), [my_function])."""

    def __init__(self, cfg: ChatConfig, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.cfg, self.kit = cfg, gather(cfg, functions=functions)
        self.chooses = cfg.chooses and not (cfg.tools or cfg.tools_file or cfg.executors or functions)
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
        """The system message of training: the functions, which a server adds itself, or that of a chat."""
        if not self.kit.schemas:
            return [{"role": "system", "content": NEUTRAL}]
        if self.cfg.server:
            return []
        style = self.model.loaded.tools_style
        return [{"role": "system", "content": chat.tools_prompt(self.kit.schemas, style)}]

    def reply(self, messages: list[Message]) -> list[Message]:
        """The conversation with the model's turns and those of the functions that it called.

        Ends with an answer in words, with a call that was already answered, with an unreadable call after an answered
        one, and with the second unreadable call. A small model for which functions are chosen sees a new request alone,
        else it answers the one before again."""
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
            calls = chat.parse_calls(text) if self.cfg.chooses or self.kit.schemas else []
            if not calls or not self._may_run(calls):
                return messages
            unreadable = any(call.form not in chat.READABLE for call in calls)
            repeated = all(signature(call) in answered for call in calls)
            if repeated or (unreadable and (answered or complained)):
                self._note("stopped: " + ("this call was already answered" if repeated else "the call cannot be read"))
                return messages
            complained |= unreadable
            messages = [*messages, *({"role": "function", "content": self._run_call(call)} for call in calls)]
            answered |= {signature(call) for call in calls if call.form in chat.READABLE}
        print(f"[stopped after {self.cfg.max_rounds} answers; --max-rounds allows more]", file=sys.stderr)
        return messages

    def _speak(self, messages: list[Message]) -> str:
        held = self.kit.schemas if self.cfg.constrain == "auto" else ()
        if not self.cfg.raw:
            show(self.model.say(messages, held))
            return self.model.content
        prompt = chat.decode(self.model.prompt(messages), self.model.tokenizer)  # tags as text
        print(prompt.removeprefix(self.transcript), end="")
        self.transcript = prompt + show(self.model.say(messages, held, raw=True))
        return self.model.content

    def _may_run(self, calls: list[chat.Call]) -> bool:
        missing = [call.name for call in calls if not self.kit.can_run(call)]
        if not self.cfg.run:
            self._note("not run: --no-run")
        elif missing:
            self._note(f"not run: no implementation of {missing[0]}; give one with --executors FILE.py")
        return self.cfg.run and not missing

    def _run_call(self, call: chat.Call) -> str:
        response = self.kit.respond(call)
        if not self.cfg.raw:
            self._note(f"{call.name or 'call'}: {response}")
        return response

    def _note(self, text: str) -> None:
        print(f"[{visible(text).encode(errors='replace').decode()}]", flush=True)


def signature(call: chat.Call) -> str:
    """A call for comparison with others."""
    return json.dumps([call.name, call.arguments], sort_keys=True)


# ---- the terminal


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; the whole text. A terminal gets no control characters."""
    clean, whole = visible if sys.stdout.isatty() else str, ""
    for piece in pieces:
        print(clean(piece), end="", flush=True)
        whole += piece
    print(flush=True)
    return whole


def converse(reply: Callable[[list[Message]], list[Message]]) -> None:
    """Read requests until the end of input; `reply` takes the conversation and returns it with its answer.

    At a terminal, a user error or Ctrl-C within an answer drops that turn; elsewhere it ends the command."""
    person = sys.stdin.isatty()
    if person:
        with suppress(ImportError):  # arrow keys and history for input()
            import readline  # noqa: F401
        print("[Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation]")
    messages: list[Message] = []
    while True:
        try:
            line = input("> " if person else "")
        except EOFError:
            return
        if line.strip() == "/new":
            messages = []
        elif line.strip():
            try:
                messages = reply([*messages, {"role": "user", "content": line}])
            except (UserError, KeyboardInterrupt) as error:
                if not person:
                    raise
                stopped = isinstance(error, KeyboardInterrupt)
                print("\n[stopped; this turn is forgotten]" if stopped else f"error: {error}", file=sys.stderr)


def main(argv: list[str] | None = None, kind: type[ChatConfig] = ChatConfig) -> None:
    """`codechat chat`."""
    name = "tools" if kind.chooses else "chat"
    cfg = config.parse(kind, sys.argv[1:] if argv is None else argv, prog=f"codechat {name}", epilog=__doc__)
    session = ToolChat(cfg)
    if cfg.complete:
        print(cfg.complete, end="", flush=True)
        show(session.model.complete(cfg.complete))
        return
    if cfg.ckpt and session.model.only_pretrained:
        advice = "take a checkpoint after SFT, or continue a text with --complete"
        print(f"[{cfg.ckpt} was only pretrained and never saw a conversation: {advice}]", file=sys.stderr)
    if cfg.user:
        session.reply([{"role": "user", "content": cfg.user}])
        return
    if session.kit.names and not session.chooses:
        print(f"[functions: {', '.join(session.kit.names)}]")
    converse(session.reply)


def main_tools(argv: list[str] | None = None) -> None:
    """`codechat tools`."""
    main(argv, ToolsConfig)
