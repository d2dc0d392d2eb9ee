"""Free chat with a checkpoint: one request, or a conversation in the terminal. The answer appears as it is
sampled.

    codechat chat --ckpt nano/sft --user "write quicksort"
    codechat chat --ckpt nano/sft                                a conversation; Ctrl-D ends it
    codechat chat --ckpt nano/pretrain --complete "def add(a"    no turns: for a checkpoint before SFT

Left out: function calls (tool_talk.py), and any text that training did not see: turns are laid out by
`chat.prompt`, stopped by the closing tag, and nothing is added to them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from codechat import distributed, models  # dist, generate and loading import torch: only when a model is used
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, UserError
from codechat.inference.client import RemoteModel
from codechat.inference.detokenizer import stable_text
from codechat.text import chat
from codechat.text.token_view import visible

Message = dict[str, str]
DEFAULT_TOKENS = 256  # an answer's length where none is asked for
NEW, ENDS = "/new", "Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation"


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A checkpoint, how to sample from it, and what to say to it."""

    ckpt: str = opt("", "run name, run@best, run@STEP, run directory or checkpoint; or give --server")
    server: str = opt("", "URL of a server to talk to instead, such as http://127.0.0.1:8000 (codechat serve)")
    api_key_file: Path | None = opt(None, "file with the key that the server asks for; none = no key")
    user: str = opt("", "one request, answered and done; empty = a conversation, read from the terminal")
    system: str = opt("You are a helpful assistant.", "system message; empty = none")
    max_new_tokens: int | None = opt(None, f"longest answer, tokens; none = {DEFAULT_TOKENS}, or what the block leaves")
    temperature: float = opt(0.8, "sampling temperature; 0 = always the most likely token")
    top_k: int | None = opt(50, "sample among the k most likely tokens; none = all")
    top_p: float | None = opt(None, "sample from the smallest set of tokens that holds this probability")
    seed: int = opt(0, "seed of the sampling; the same seed gives the same answers")

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {self.max_new_tokens}; it must be at least 1")
        models.generate.Truncation(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ChatSettings):
    """`codechat chat`."""

    complete: str = opt("", "a text to continue as it stands, without turns (for pretrained checkpoints)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user and self.complete:
            raise ConfigError("--user and --complete exclude each other; keep one")


class LocalModel:
    """A loaded checkpoint with sampling settings. Each answer has its own draws, so asking twice may
    differ."""

    def __init__(self, cfg: ChatSettings) -> None:
        self.cfg = cfg
        self.loaded = models.loading.load_model(cfg.ckpt, distributed.dist.device())
        self.answers = 0
        self.ids: list[int] = []  # sampled for the last answer
        block = self.block_size
        if cfg.max_new_tokens is not None and cfg.max_new_tokens >= block:
            raise ConfigError(
                f"--max-new-tokens {cfg.max_new_tokens} does not fit the block of {cfg.ckpt}: {block} "
                f"tokens, the request among them; set {block // 2} or less"
            )

    @property
    def block_size(self) -> int:
        return self.loaded.model.cfg.block_size

    def say(self, messages: Sequence[Message], raw: bool = False) -> Iterator[str]:
        """Pieces of the assistant's next turn; raw: with tags. ConfigError where the conversation fills the
        block."""
        tokenizer, tags = self.loaded.tokenizer, self.loaded.tags
        prompt, stops = chat.prompt(messages, tokenizer, tags), chat.stop_sequences(tokenizer, tags)
        if raw:
            return self._pieces(prompt, stops, lambda ids: chat.decode(ids, tokenizer), "")
        end = "\n" + chat.decode(stops[0], tokenizer)
        return self._pieces(prompt, stops, lambda ids: chat.completion_text(ids, tokenizer, tags), end)

    def last_content(self) -> str:
        """The content of the turn that was said last, however it was shown."""
        return chat.completion_text(self.ids, self.loaded.tokenizer, self.loaded.tags)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What the model reads before it answers, tags as text."""
        return chat.decode(chat.prompt(messages, self.loaded.tokenizer, self.loaded.tags), self.loaded.tokenizer)

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        tokenizer = self.loaded.tokenizer
        stop = tokenizer.eot_id
        return self._pieces(
            tokenizer.encode(text),
            [(stop,)],
            lambda ids: chat.decode([i for i in ids if i != stop], tokenizer),
            "",
        )

    def _pieces(
        self,
        prompt: Sequence[int],
        stops: Sequence[Sequence[int]],
        text_of: Callable[[list[int]], str],
        end: str,
    ) -> Iterator[str]:
        cfg, shown, self.ids = self.cfg, "", []
        key, self.answers = self.answers, self.answers + 1
        steps = models.generate.stream(
            self.loaded.model,
            prompt,
            max_new_tokens=self.budget(len(prompt)),
            stop=stops,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            seed=cfg.seed,
            key=key,
        )
        with distributed.dist.autocast(distributed.dist.device()):
            for token, _ in steps:
                self.ids.append(token)
                text = stable_text(text_of(self.ids), end)
                if len(text) > len(shown):
                    yield text[len(shown) :]
                    shown = text
        yield text_of(self.ids)[len(shown) :]

    def budget(self, prompt_tokens: int) -> int:
        """Tokens that the next answer may have. ConfigError where there is no room."""
        room = self.block_size - prompt_tokens
        wanted = self.cfg.max_new_tokens or min(DEFAULT_TOKENS, max(room, 1))
        if room < wanted:
            remedy = f"set --max-new-tokens {room} or less, or shorten the conversation" if room > 0 else "shorten it"
            raise ConfigError(
                f"the conversation has {prompt_tokens} tokens and the answer may have {wanted}; both must "
                f"fit the block of {self.block_size} tokens; {remedy}"
            )
        return wanted

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation without its oldest exchanges, as many as the block cannot hold beside an answer;
        says so on stderr."""
        wanted = self.cfg.max_new_tokens or min(DEFAULT_TOKENS, self.block_size // 4)
        kept = messages
        while self.block_size - len(chat.prompt(kept, self.loaded.tokenizer, self.loaded.tags)) < wanted:
            users = [i for i, m in enumerate(kept) if m["role"] == "user"]
            if len(users) < 2:
                break
            kept = [m for m in kept[: users[0]] if m["role"] == "system"] + kept[users[1] :]
        if len(kept) < len(messages):
            gone = f"the oldest {len(messages) - len(kept)} messages are forgotten"
            print(f"[the block holds {self.block_size} tokens: {gone}]", file=sys.stderr)
        return kept


def open_model(cfg: ChatSettings) -> LocalModel | RemoteModel:
    """The checkpoint or the server that the flags name. ConfigError where they name none or both."""
    if bool(cfg.ckpt) == bool(cfg.server):
        given = "both --ckpt and --server are given" if cfg.ckpt else "ckpt is required"
        raise ConfigError(f"{given}; set --ckpt RUN, or --server URL")
    if cfg.ckpt:
        return LocalModel(cfg)
    settings = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "max_tokens": cfg.max_new_tokens,
    }
    return RemoteModel(cfg.server, settings, seed=cfg.seed, api_key_file=cfg.api_key_file)


def opening(system: str) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; the whole text. A terminal gets no control characters."""
    clean, whole = visible if sys.stdout.isatty() else str, ""
    for piece in pieces:
        print(clean(piece), end="", flush=True)
        whole += piece
    print(flush=True)
    return whole


def converse(first: list[Message], reply: Callable[[list[Message]], list[Message]]) -> None:
    """Read requests until the end of input; `reply` takes the conversation and returns it with its answer. A
    refusal or Ctrl-C within an answer takes back that turn; where nobody sits at the terminal a refusal ends
    the command."""
    person = sys.stdin.isatty()
    if person:
        import_line_editing()
        print(f"[{ENDS}]")
    messages = list(first)
    while (line := _read_line(person)) is not None:
        if line.strip() == NEW:
            messages = list(first)
        elif line.strip():
            try:
                messages = reply([*messages, {"role": "user", "content": line}])
            except UserError as refusal:
                if not person:
                    raise
                print(f"error: {refusal}", file=sys.stderr)
            except KeyboardInterrupt:
                if not person:
                    raise
                print("\n[stopped; this turn is forgotten]")


def _read_line(person: bool) -> str | None:
    try:
        return input("> " if person else "")
    except EOFError:
        return None


def import_line_editing() -> None:
    """Arrow keys and history for input(), where the interpreter was built with them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass


EPILOG = """examples:
  codechat chat --ckpt nano/sft --user "write quicksort"
  codechat chat --ckpt nano/sft --temperature 0
  codechat chat --ckpt nano/pretrain --complete "def quicksort(" --max-new-tokens 100
  codechat chat --server http://127.0.0.1:8000 --user "write quicksort"
  echo "What is a list?" | codechat chat --ckpt runs/nano/sft/checkpoints/step_000400"""


def main(argv: list[str] | None = None) -> None:
    """`codechat chat`."""
    cfg = config.parse(ChatConfig, sys.argv[1:] if argv is None else argv, prog="codechat chat", epilog=EPILOG)
    model = open_model(cfg)
    if cfg.complete:
        print(cfg.complete, end="", flush=True)
        show(model.complete(cfg.complete))
        return

    def reply(messages: list[Message]) -> list[Message]:
        messages = model.fit(messages)
        return [*messages, {"role": "assistant", "content": show(model.say(messages))}]

    if cfg.user:
        reply([*opening(cfg.system), {"role": "user", "content": cfg.user}])
    else:
        converse(opening(cfg.system), reply)


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
