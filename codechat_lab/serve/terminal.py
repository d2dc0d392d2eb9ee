"""`codechat chat` and `codechat tools`: one request, or a conversation in the terminal; a
checkpoint's answers appear as they are sampled.

    codechat chat  --ckpt released/mini --user "write quicksort"
    codechat chat  --ckpt released/mini                             a conversation; Ctrl-D ends it
    codechat chat  --ckpt nano/pretrain --complete "def add(a"    no turns: for a checkpoint before SFT
    codechat tools --ckpt released/mini --user "What is 12 squared?"
    codechat tools --ckpt released/mini --tools examples/my_tools.py --user "What is the weather in Beijing?"
    codechat tools --server http://127.0.0.1:8000 --user "What is 12 squared?"
    codechat tools --ckpt released/mini --tools schemas.json --no-run --user "..."    only show the call

`tools` offers the functions of the toolbox that fit each request, or yours; `chat` offers none
unless you name some. Token masks constrain calls to their schemas. Calls are run and their
results returned until the model answers in words. A call's error goes back as {"error": ...}.
Calls of a file's functions run in the sandbox, with --trust in this process and with your rights."""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from codechat.core.errors import UserError
from codechat.core.http_client import UNCUT, Link
from codechat.distributed import hardware, numerics
from codechat.models import generate
from codechat.text import chat, tool_calls, tool_lists
from codechat.text.tool_functions import Tool, read_tools
from codechat_lab.instruments import token_view
from codechat_lab.serve.call_grammar import CallGrammar, Rules, call_grammar
from codechat_lab.serve.conversations import (
    NEUTRAL,
    drop_oldest,
    goes_on,
    has_seen_conversations,
    load_checkpoint,
    mixes_requests,
    room_for_an_answer,
    tools_for,
)
from codechat_lab.serve.detokenizer import Detokenizer
from codechat_lab.serve.settings import DEFAULT_TOKENS, ChatConfig
from codechat_lab.tasks.toolbox.catalogue import TOOLS

Message = dict[str, str]
Schema = dict[str, Any]
ROUNDS = 4  # answers per request, calls included
UNREADABLE = ""  # the signature of every call that cannot be read


# ---- the model


class LocalModel:
    """A loaded checkpoint with sampling settings. Each answer has its own sampling key."""

    def __init__(self, cfg: ChatConfig) -> None:
        self.cfg = cfg
        self.answers = 0
        self.loaded, _ = load_checkpoint(cfg.ckpt, sys.stderr)
        self.tokenizer = self.loaded.tokenizer
        self.tags = self.loaded.tags
        self.block = self.loaded.model.cfg.block_size
        # weights are read while somebody types
        self.reading = ThreadPoolExecutor(1).submit(self._read)
        if not has_seen_conversations(self.loaded) and not cfg.complete:
            advice = "take a checkpoint after SFT, or continue a text with --complete"
            print(
                f"[{cfg.ckpt} was only pretrained and never saw a conversation: {advice}]",
                file=sys.stderr,
            )

    def _read(self) -> generate.Conversation:
        # another thread is outside the autocast of this one
        with numerics.autocast(hardware.device()):
            return generate.Conversation(self.loaded.reader())

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return chat.prompt(messages, self.tokenizer, self.tags)

    def say(self, messages: Sequence[Message], tools: Sequence[Schema], held: bool) -> str:
        """The assistant's next turn, shown as it grows. held: its calls follow the schemas of
        the tools, which the messages offer."""
        grammar = None
        if held:
            rules = Rules(declines=self.loaded.declines)
            grammar = call_grammar(self.tokenizer, self.tags, tools, rules)
        ids = self._write(
            self.prompt(messages),
            Detokenizer(self.tokenizer, self.tags),
            stop=chat.stop_sequences(self.tokenizer, self.tags),
            grammar=grammar,
        )
        return chat.completion_text(ids, self.tokenizer, self.tags, messages)

    def complete(self, text: str) -> None:
        """Show the continuation of a plain text."""
        stop = [(self.tokenizer.eot_id,)]
        self._write(self.tokenizer.encode(text), Detokenizer(self.tokenizer, None), stop=stop)

    def _write(
        self,
        prompt: list[int],
        detokenizer: Detokenizer,
        *,
        stop: Sequence[Sequence[int]],
        grammar: CallGrammar | None = None,
    ) -> list[int]:
        """Sample, and show the text as it grows; the ids."""
        cfg = self.cfg
        room = self.block - len(prompt)
        key = self.answers
        self.answers += 1
        shown = ""
        ids: list[int] = []
        with numerics.autocast(hardware.device()):
            for token in generate.stream(
                self.loaded.model,
                prompt,
                max_new_tokens=cfg.max_new_tokens or min(DEFAULT_TOKENS, max(room, 1)),
                stop=stop,
                seed=cfg.seed,
                key=key,
                grammar=grammar,
                kept=self.reading.result(),
                temperature=cfg.temperature,
                top_k=cfg.top_k,
            ):
                ids.append(token)
                text = detokenizer.growing(ids)
                if len(text) > len(shown):
                    show(text[len(shown) :])
                    shown = text
        show(detokenizer.text(ids)[len(shown) :], end="\n")
        return ids

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation without the oldest exchanges that leave the answer no room; stderr
        says how many."""
        needed = room_for_an_answer(self.block, self.cfg.max_new_tokens)

        def too_long(kept: list[Message]) -> bool:
            return self.block - len(self.prompt(kept)) < needed

        kept = drop_oldest(messages, lambda message: message["role"], too_long)
        dropped = len(messages) - len(kept)
        if dropped:
            print(
                f"[{dropped} messages are forgotten: the block holds {self.block} tokens]",
                file=sys.stderr,
            )
        return kept


class RemoteModel:
    """A server that speaks OpenAI's API. The seed grows with each answer."""

    loaded = None  # only the server knows it

    def __init__(self, cfg: ChatConfig) -> None:
        self.link = Link(cfg.server, cfg.api_key_file)
        self.seed = cfg.seed
        self.settings = {"model": self.link.model(), "temperature": cfg.temperature}
        if cfg.top_k is not None:
            self.settings["top_k"] = cfg.top_k
        if cfg.max_new_tokens is not None:
            self.settings["max_tokens"] = cfg.max_new_tokens

    def say(self, messages: Sequence[Message], tools: Sequence[Schema], held: bool) -> str:
        """The assistant's next turn. held: its calls follow the schemas of the tools, which the
        server offers."""
        body = self.settings | {"messages": tool_calls.as_openai(messages)[0], "seed": self.seed}
        if tools:
            body["tools"] = [
                {"type": "function", "function": {**schema, "strict": held}} for schema in tools
            ]
        uncut = {name: value for name, value in UNCUT.items() if name not in self.settings}
        answer = self.link.answer(body, dispensable=uncut)
        self.seed += 1
        content = tool_calls.answer_text(answer.message)
        show(content, end="\n")
        return content

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation as it is: only the server knows its length for the model."""
        return messages


# ---- functions that are offered


def _call(function: Callable[[dict[str, Any]], Any], /, **arguments: Any) -> Any:
    """A function of the toolbox takes its arguments as one dictionary."""
    return function(arguments)


TOOLBOX = {name: Tool(partial(_call, tool.call), tool.schema) for name, tool in TOOLS.items()}


# ---- a conversation


class ToolChat:
    """A conversation in which calls are run; turns are printed as they come.

    functions: Python functions to offer and run: ToolChat(ToolsConfig(ckpt="my-tools"),
    [my_function])."""

    def __init__(self, cfg: ChatConfig, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self.cfg = cfg
        self.functions = functions
        self.chooses = cfg.chooses and not (cfg.tools or functions)
        self.offer(())
        self.model: LocalModel | RemoteModel = LocalModel(cfg) if cfg.ckpt else RemoteModel(cfg)
        # for functions that change with the request; of a server's model nothing is known
        self.alone = (
            self.chooses
            and self.model.loaded is not None
            and mixes_requests(self.model.loaded.model)
        )

    def offer(self, fitting: Sequence[str]) -> None:
        """Offer the functions of the settings, or else those `fitting`."""
        self.kit = read_tools(
            self.cfg.tools,
            trust=self.cfg.trust,
            known=TOOLBOX,
            functions=self.functions,
            fitting=fitting,
        )
        self.bench = self.kit.open()

    def opening(self) -> list[Message]:
        """The system message of training: the functions, which a server adds itself, or that of
        a chat."""
        if not self.kit.schemas:
            return [{"role": "system", "content": NEUTRAL}]
        if self.model.loaded is None:
            return []
        return [
            {
                "role": "system",
                "content": tool_lists.tools_prompt(
                    list(self.kit.schemas.values()), self.model.loaded.tools_style
                ),
            }
        ]

    def reply(self, messages: list[Message]) -> list[Message]:
        """The conversation with the model's turns and those of the functions that it called.

        Ends with an answer in words, with a call that was already answered, with an unreadable
        call after an answered one, and with the second unreadable call. A small model for which
        functions are chosen sees a new request alone, else it answers the one before again. A new
        conversation begins in a new world of the functions."""
        if len(messages) == 1:
            self.bench = self.kit.open()
        messages = self._opened(messages)
        answered: set[str] = set()  # signatures of the calls that have a result or an error
        for _ in range(ROUNDS):
            messages, calls = self._answer(messages)
            if not calls:
                return messages
            signatures = {_signature(call) for call in calls}
            why_not = self._refusal(calls, signatures, answered)
            if why_not:
                self._note(why_not)
                return messages
            for call in calls:
                response = self.bench.respond(call)
                messages = [*messages, {"role": "function", "content": response}]
                self._note(f"{call.name or 'call'}: {response}")
            answered |= signatures
        self._note(f"stopped after {ROUNDS} answers")
        return messages

    def _opened(self, messages: list[Message]) -> list[Message]:
        """What the model sees of a conversation that ends with a request, for which functions
        may be chosen."""
        request = messages[-1]["content"]
        if self.chooses:
            self.offer(tools_for(request, self.kit.names))
            self._note(
                f"offered: {', '.join(self.kit.names) or 'nothing, no function of the toolbox fits'}"
            )
        if self.alone and not goes_on(request):
            messages = messages[-1:]
        return self.opening() + [message for message in messages if message["role"] != "system"]

    def _answer(self, messages: list[Message]) -> tuple[list[Message], list[tool_calls.Call]]:
        """The conversation with one more turn of the model, and the calls in it."""
        messages = self.model.fit(messages)
        if self.cfg.raw and isinstance(self.model, LocalModel):
            print(chat.decode(self.model.prompt(messages), self.model.tokenizer), end="")
        held = bool(self.kit.schemas) and self.cfg.constrain == "auto"
        text = self.model.say(messages, list(self.kit.schemas.values()), held)
        calls = tool_calls.parse_calls(text) if self.cfg.chooses or self.kit.schemas else []
        return [*messages, {"role": "assistant", "content": text}], calls

    def _refusal(
        self, calls: Sequence[tool_calls.Call], signatures: set[str], answered: set[str]
    ) -> str:
        """Why these calls are not run, or ""."""
        if not self.cfg.run:
            return "not run: --no-run"
        missing = {call.name for call in calls} & self.kit.missing
        if missing:
            return f"not run: no implementation of {missing.pop()}; give one with --tools FILE.py"
        if UNREADABLE in signatures and answered:
            return "stopped: the call cannot be read"
        return "stopped: this call was already answered" if signatures <= answered else ""

    def _note(self, text: str) -> None:
        print(f"[{token_view.visible(text).encode(errors='replace').decode()}]", flush=True)


def _signature(call: tool_calls.Call) -> str:
    """Equal for calls that would have the same result."""
    if call.form not in tool_calls.READABLE:
        return UNREADABLE
    return json.dumps([call.name, call.arguments], sort_keys=True)


# ---- the terminal


def show(text: str, end: str = "") -> None:
    """Print text. A terminal gets no control characters."""
    print(token_view.visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


def converse(reply: Callable[[list[Message]], list[Message]]) -> None:
    """Read requests until the end of input; `reply` takes the conversation and returns it with
    its answer.

    At a terminal, a user error or Ctrl-C within an answer drops that turn; elsewhere it ends
    the command."""
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
                print(
                    stopped if isinstance(error, KeyboardInterrupt) else f"error: {error}",
                    file=sys.stderr,
                )


def main(cfg: ChatConfig) -> None:
    """`codechat chat` and `codechat tools`."""
    session = ToolChat(cfg)
    if cfg.complete:
        assert isinstance(session.model, LocalModel), (
            "ChatConfig allows --complete with --ckpt alone"
        )
        print(cfg.complete, end="", flush=True)
        session.model.complete(cfg.complete)
    elif cfg.user:
        session.reply([{"role": "user", "content": cfg.user}])
    else:
        if session.kit.names:
            print(f"[functions: {', '.join(session.kit.names)}]")
        converse(session.reply)
