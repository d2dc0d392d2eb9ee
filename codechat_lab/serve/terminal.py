"""`codechat chat` and `codechat tools`: one request, or a conversation in the terminal; a checkpoint's answers appear
as they are sampled.

    codechat chat  --ckpt nano/sft --user "write quicksort"
    codechat chat  --ckpt nano/sft                                a conversation; Ctrl-D ends it
    codechat chat  --ckpt nano/pretrain --complete "def add(a"    no turns: for a checkpoint before SFT
    codechat tools --ckpt nano/rl --user "What is 12 squared?"
    codechat tools --ckpt my-tools --executors examples/my_tools.py --user "What is the weather in Beijing?"
    codechat tools --server http://127.0.0.1:8000 --user "What is 12 squared?"
    codechat tools --ckpt nano/rl --tools-file schemas.json --no-run --user "..."    only show the call

`tools` offers the functions of the toolbox that fit each request, or yours; `chat` offers none unless you name some.
Token masks constrain calls to their schemas. Calls are run and their results returned until the model answers in words.
A call's error goes back as {"error": ...}. A file of --executors runs with your rights, like any script."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from codechat.core.errors import ConfigError, DataError, UserError, nearest
from codechat.core.http_client import UNCUT, Link
from codechat.distributed import dist
from codechat.models import generate, loading
from codechat.runs import paths
from codechat.text import chat, tool_calls, tool_functions, tool_schemas
from codechat_lab.instruments import token_view
from codechat_lab.serve import call_grammar, engine
from codechat_lab.serve.settings import DEFAULT_TOKENS, ChatConfig
from codechat_lab.tasks.toolbox.catalogue import TOOLS, family

Message = dict[str, str]
Schema = dict[str, Any]
ROUNDS = 4  # answers per request, calls included
UNREADABLE = ""  # in place of the signature of a call
NEUTRAL = "You are a helpful assistant."  # conversations without functions begin like this in training
SMALL = 100_000_000  # parameters. released/mini answered 32 of 55 second requests sensibly, and 50 of them alone

LONGEST_RESULT = 1000  # characters of a result that the model may read
OFFERED = 4  # as many as a training prompt offers at most
NEAR = 0.7  # least share of the best score: others distract a small model more often than they help
ASKING = frozenset("write show give tell make find please program function code".split())  # not what a request is about
GOES_ON = re.compile(r"\s*(and|also|or|now|then|(what|how) about)\b", re.IGNORECASE)  # begins like a follow-up
POINTS_BACK = re.compile(r"\b(it|its|them|again)\b", re.IGNORECASE)
STEM = 5  # letters of a word that count: "squared" finds "square"


# ---- the model


class LocalModel:
    """A loaded checkpoint with sampling settings. Each answer has its own sampling key."""

    def __init__(self, cfg: ChatConfig) -> None:
        self.cfg, self.answers = cfg, 0
        path, meaning = paths.chosen_checkpoint(cfg.ckpt)
        if meaning:
            print(f"[{meaning}]", file=sys.stderr)
        self.loaded = loading.load_model(path, dist.device())
        self.tokenizer = self.loaded.tokenizer
        self.tags = self.loaded.tags
        self.block = self.loaded.model.cfg.block_size
        with dist.autocast(dist.device()):
            self.seen = generate.Conversation(self.loaded.model)
        kinds = {entry.get("kind") for entry in self.loaded.meta.get("lineage", ())}
        if kinds and kinds <= {"pretrain", "chars"} and not cfg.complete:
            advice = "take a checkpoint after SFT, or continue a text with --complete"
            print(f"[{cfg.ckpt} was only pretrained and never saw a conversation: {advice}]", file=sys.stderr)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return chat.prompt(messages, self.tokenizer, self.tags)

    def say(self, messages: Sequence[Message], tools: Sequence[Schema], held: bool) -> str:
        """The assistant's next turn, shown as it grows. held: calls follow the schemas of the tools, which
        `messages` offer."""
        grammar_of = call_grammar.call_grammar
        declines = self.loaded.declines
        grammar = grammar_of(self.tokenizer, self.tags, tools, declines=declines) if held else None
        how = dict(stop=chat.stop_sequences(self.tokenizer, self.tags), grammar=grammar)
        ids = self._write(self.prompt(messages), engine.Detokenizer(self.tokenizer, self.tags), **how)
        return chat.completion_text(ids, self.tokenizer, self.tags)

    def complete(self, text: str) -> None:
        """Show the continuation of a plain text."""
        stop = [(self.tokenizer.eot_id,)]
        self._write(self.tokenizer.encode(text), engine.Detokenizer(self.tokenizer, None), stop=stop)

    def _write(self, prompt: list[int], detokenizer: "engine.Detokenizer", **how: Any) -> list[int]:
        """Sample, and show the text as it grows; the ids."""
        cfg = self.cfg
        shown = ""
        room = self.block - len(prompt)
        how["max_new_tokens"] = cfg.max_new_tokens or min(DEFAULT_TOKENS, max(room, 1))
        how |= dict(temperature=cfg.temperature, top_k=cfg.top_k, seed=cfg.seed, key=self.answers)
        self.answers += 1
        ids: list[int] = []
        with dist.autocast(dist.device()):
            for token in generate.stream(self.loaded.model, prompt, kept=self.seen, **how):
                ids.append(token)
                text = detokenizer.growing(ids)
                if len(text) > len(shown):
                    show(text[len(shown) :])
                    shown = text
        show(detokenizer.text(ids)[len(shown) :], end="\n")
        return ids

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation without the oldest exchanges that leave the answer no room; stderr says how many."""
        needed = room_for_an_answer(self.block, self.cfg.max_new_tokens)
        kept = drop_oldest(messages, lambda m: m["role"], lambda kept: self.block - len(self.prompt(kept)) < needed)
        dropped = len(messages) - len(kept)
        if dropped:
            print(f"[{dropped} messages are forgotten: the block holds {self.block} tokens]", file=sys.stderr)
        return kept


def room_for_an_answer(block_size: int, longest: int | None) -> int:
    """Tokens that a conversation must leave for the next answer."""
    return longest or min(DEFAULT_TOKENS, block_size // 4)


def mixes_requests(model: Any) -> bool:
    """Whether a request that does not go on with the one before is answered better without it, as in small models."""
    return sum(weights.numel() for weights in model.parameters()) < SMALL


def drop_oldest(
    messages: Sequence[Any], role: Callable[[Any], str], too_long: Callable[[list[Any]], bool]
) -> list[Any]:
    """The messages without the oldest exchanges, from a user's turn to the next, while the rest is too long. The
    last one stays."""
    kept = list(messages)
    while too_long(kept) and len(users := [i for i, m in enumerate(kept) if role(m) == "user"]) > 1:
        kept = [m for m in kept[: users[0]] if role(m) == "system"] + kept[users[1] :]
    return kept


class RemoteModel:
    """A server that speaks OpenAI's API, with the methods of `LocalModel`. The seed grows with each answer."""

    loaded: Any = None  # only the server knows it

    def __init__(self, cfg: ChatConfig) -> None:
        self.link = Link(cfg.server, cfg.api_key_file)
        self.seed = cfg.seed
        settings = dict(temperature=cfg.temperature, top_k=cfg.top_k, max_tokens=cfg.max_new_tokens)
        self.settings = {k: v for k, v in settings.items() if v is not None} | {"model": self.link.model()}

    def say(self, messages: Sequence[Message], tools: Sequence[Schema], held: bool) -> str:
        """The assistant's next turn. held: calls follow the schemas of the tools, which the server offers."""
        offered = [{"type": "function", "function": {**schema, "strict": held}} for schema in tools]
        body = {"messages": tool_calls.as_openai(messages)[0]} | ({"tools": offered} if offered else {})
        uncut = {name: value for name, value in UNCUT.items() if name not in self.settings}
        answer = self.link.answer(self.settings | body | {"seed": self.seed}, dispensable=uncut)
        self.seed += 1
        show(content := tool_calls.answer_text(answer.message), end="\n")
        return content

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation as it is: only the server knows its length for the model."""
        return messages


# ---- functions that are offered, and how their calls are run


@dataclass(frozen=True)
class Toolkit:
    """What is offered to the model, and what can be run."""

    schemas: list[Schema]
    functions: Mapping[str, Callable[..., Any]]

    @property
    def names(self) -> list[str]:
        return [schema["name"] for schema in self.schemas]

    def respond(self, call: chat.Call) -> str:
        """Run a call: {"result": value} or {"error": message} as json text."""
        answer = lambda **value: tool_calls.escape_tags(json.dumps(value, ensure_ascii=False, default=str))  # noqa: E731
        if call.form not in chat.READABLE:
            return answer(error=f"this call cannot be read ({call.form})")
        if call.name not in self.names:
            return answer(error=f"there is no function {str(call.name)[:60]!r}")
        problem = misfit(call.arguments or {}, self.schemas[self.names.index(call.name)].get("parameters") or {})
        if problem:
            return answer(error=problem)
        try:
            text = answer(result=self.functions[call.name](**tool_functions.whole(call.arguments)))
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            return answer(error=f"{type(error).__name__}: {error}"[:LONGEST_RESULT])
        long = f"the result has {len(text)} characters; at most {LONGEST_RESULT} can be read"
        return text if len(text) <= LONGEST_RESULT else answer(error=long)


def misfit(arguments: Mapping[str, Any], parameters: Schema) -> str:
    """Where the arguments break their JSON schema, or "". None of an optional parameter counts as left out."""
    import jsonschema

    given = {k: v for k, v in arguments.items() if v is not None or k in (parameters.get("required") or ())}
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(parameters).iter_errors(given))
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
    yours = tool_functions.load_executors(executors, listed) if executors else {}
    yours |= tool_functions.executors_of(functions)
    known = {name: tool.schema for name, tool in TOOLS.items()} | {n: e.schema for n, e in yours.items()} | listed
    names = names or tuple(listed) or tuple(yours) or fitting
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown function {unknown[0]!r}{nearest(unknown[0], known)}")
    runs = {name: partial(lambda call, /, **arguments: call(arguments), tool.call) for name, tool in TOOLS.items()}
    return Toolkit([known[name] for name in dict.fromkeys(names)], runs | {n: e.function for n, e in yours.items()})


def read_schemas(path: Path) -> dict[str, Schema]:
    """name -> schema of a json list of tools in any form of `tool_schemas`. DataError names the file and the tool."""
    import jsonschema

    schemas: dict[str, Schema] = {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in tool_schemas.listed_tools(content):
            tool = tool_schemas.tool_schema(row)
            parameters = {"type": "object", "required": [], "properties": {}, **tool["parameters"]}
            jsonschema.Draft202012Validator.check_schema(parameters)
            description = str(tool["description"])
            schemas[tool["name"]] = {"name": tool["name"], "description": description, "parameters": parameters}
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        needed = '[{"name": ..., "description": ..., "parameters": {"type": "object", "properties": {...}}}]'
        message = error.message if isinstance(error, jsonschema.SchemaError) else str(error)
        raise DataError(f"{path} item {len(schemas)}: {message}; required: {needed}") from None
    return schemas


# ---- functions of the toolbox that fit a request: BM25 over names, descriptions, and the arguments' names and choices.
# Those that could serve the same request (`catalogue.FAMILIES`) are never offered together, as in training.


def tools_for(request: str, before: Sequence[str] = ()) -> list[str]:
    """Names of at most OFFERED functions that fit a request, best first; where no word of it is in any description,
    those offered `before` if it goes on ("and of 13?")."""
    index, names = _index()
    known = sorted(set(_words(request)) & index.vocab_dict.keys())
    scores: Any = index.get_scores(known) if known else []
    chosen: list[str] = []
    for score, name in sorted(zip(scores, names), reverse=True):
        near = score >= NEAR * scores.max() and len(chosen) < OFFERED
        if near and not any(name in family(other) for other in chosen):
            chosen.append(name)
    return chosen or (list(before) if _continues(request) else [])


def goes_on(request: str) -> bool:
    """Whether a request needs the one before it: by how it begins, a word that points back, or no word of its own."""
    return _continues(request) or bool(POINTS_BACK.search(request))


def _continues(request: str) -> bool:
    return bool(GOES_ON.match(request)) or not _words(request)


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


# ---- a conversation


class ToolChat:
    """A conversation in which calls are run; turns are printed as they come.

    functions: Python functions to offer and run: ToolChat(ToolsConfig(ckpt="my-tools"), [my_function])."""

    def __init__(self, cfg: ChatConfig, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.cfg = cfg
        self.given = (cfg.tools, cfg.tools_file, cfg.executors, functions)
        self.kit = gather(*self.given)
        self.chooses = cfg.chooses and not any(self.given)
        self.model: Any = LocalModel(cfg) if cfg.ckpt else RemoteModel(cfg)
        # for functions that change with the request; of a server's model nothing is known
        self.alone = self.chooses and not cfg.server and mixes_requests(self.model.loaded.model)

    def opening(self) -> list[Message]:
        """The system message of training: the functions, which a server adds itself, or that of a chat."""
        if not self.kit.schemas:
            return [{"role": "system", "content": NEUTRAL}]
        if self.cfg.server:
            return []
        return [{"role": "system", "content": chat.tools_prompt(self.kit.schemas, self.model.loaded.tools_style)}]

    def reply(self, messages: list[Message]) -> list[Message]:
        """The conversation with the model's turns and those of the functions that it called.

        Ends with an answer in words, with a call that was already answered, with an unreadable call after an answered
        one, and with the second unreadable call. A small model for which functions are chosen sees a new request alone,
        else it answers the one before again."""
        request = messages[-1]["content"]
        if self.chooses:
            self.kit = gather(*self.given, fitting=tools_for(request, self.kit.names))
            self._note(f"offered: {', '.join(self.kit.names) or 'nothing, no function of the toolbox fits'}")
        if self.alone and not goes_on(request):
            messages = messages[-1:]
        messages = self.opening() + [message for message in messages if message["role"] != "system"]
        answered: set[str] = set()  # calls that have a result or an error
        for _ in range(ROUNDS):
            messages = self.model.fit(messages)
            if self.cfg.raw:
                print(chat.decode(self.model.prompt(messages), self.model.tokenizer), end="")
            text = self.model.say(messages, self.kit.schemas, bool(self.kit.schemas) and self.cfg.constrain == "auto")
            messages = [*messages, {"role": "assistant", "content": text}]
            calls = chat.parse_calls(text) if self.cfg.chooses or self.kit.schemas else []
            if not calls:
                return messages
            if not self.cfg.run:
                self._note("not run: --no-run")
                return messages
            missing = {call.name for call in calls} & set(self.kit.names) - set(self.kit.functions)
            if missing:
                self._note(f"not run: no implementation of {missing.pop()}; give one with --executors FILE.py")
                return messages
            signatures = {
                json.dumps([call.name, call.arguments], sort_keys=True) if call.form in chat.READABLE else UNREADABLE
                for call in calls
            }
            unreadable = UNREADABLE in signatures and answered
            if unreadable or signatures <= answered:
                self._note(f"stopped: {'the call cannot be read' if unreadable else 'this call was already answered'}")
                return messages
            for call in calls:
                messages = [*messages, {"role": "function", "content": (response := self.kit.respond(call))}]
                self._note(f"{call.name or 'call'}: {response}")
            answered |= signatures
        self._note(f"stopped after {ROUNDS} answers")
        return messages

    def _note(self, text: str) -> None:
        print(f"[{token_view.visible(text).encode(errors='replace').decode()}]", flush=True)


# ---- the terminal


def show(text: str, end: str = "") -> None:
    """Print text. A terminal gets no control characters."""
    print(token_view.visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


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
                stopped = "\n[stopped; this turn is forgotten]"
                print(stopped if isinstance(error, KeyboardInterrupt) else f"error: {error}", file=sys.stderr)


def main(cfg: ChatConfig) -> None:
    """`codechat chat` and `codechat tools`."""
    session = ToolChat(cfg)
    if cfg.complete:
        print(cfg.complete, end="", flush=True)
        session.model.complete(cfg.complete)
    elif cfg.user:
        session.reply([{"role": "user", "content": cfg.user}])
    else:
        if session.kit.names:
            print(f"[functions: {', '.join(session.kit.names)}]")
        converse(session.reply)
