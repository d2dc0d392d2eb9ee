"""Chat with a checkpoint: one request, or a conversation in the terminal. The answer appears as it is sampled.

    codechat chat --ckpt nano/sft --user "write quicksort"
    codechat chat --ckpt nano/sft                                a conversation; Ctrl-D ends it
    codechat chat --ckpt nano/pretrain --complete "def add(a"    no turns: for a checkpoint before SFT

Left out: function calls (tools_command), and any text that training did not see: `chat.prompt` lays out the turns, the closing tag stops them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from codechat import distributed, models, runs  # dist, generate and loading import torch: only when a model is used
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, UserError
from codechat.inference.client import RemoteModel
from codechat.inference.detokenizer import Detokenizer
from codechat.text import chat
from codechat.text.call_grammar import CallGrammar, call_grammar
from codechat.text.token_view import visible

Message = dict[str, str]
DEFAULT_TOKENS = 256  # longest answer where --max-new-tokens is none
NEUTRAL = "You are a helpful assistant."  # conversations without functions begin like this in training
SMALL = 100_000_000  # parameters. released/mini answered 32 of 55 second requests sensibly, and 50 of them alone (LOG, 2026-11-24)


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A checkpoint, how to sample from it, and what to say to it."""

    ckpt: str = opt(
        "",
        "run name (the checkpoint that evaluation chose, else the latest), run@latest, run@best, run@STEP, run directory or checkpoint; "
        "or give --server",
    )
    server: str = opt("", "URL of a server instead, such as http://127.0.0.1:8000 (codechat serve)")
    api_key_file: Path | None = opt(None, "file with the key that the server expects; none = no key")
    user: str = opt("", "one request, answered and done; empty = a conversation, read from the terminal")
    system: str = opt(NEUTRAL, "system message; empty = none")
    max_new_tokens: int | None = opt(None, f"longest answer, tokens; none = {DEFAULT_TOKENS}, or what the block leaves")
    temperature: float = opt(0.5, "sampling temperature; 0 = always the most likely token")
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
    """A loaded checkpoint with sampling settings. Each answer has its own sampling key, so the same request may get another answer."""

    def __init__(self, cfg: ChatSettings) -> None:
        self.cfg = cfg
        path, meaning = runs.paths.chosen_checkpoint(cfg.ckpt)
        if meaning:
            print(f"[{meaning}]", file=sys.stderr)
        self.loaded = models.loading.load_model(path, distributed.dist.device())
        self.answers = 0
        self.ids: list[int] = []  # sampled for the last answer
        block = self.block_size
        if cfg.max_new_tokens is not None and cfg.max_new_tokens >= block:
            raise ConfigError(
                f"--max-new-tokens {cfg.max_new_tokens} does not fit the block of {cfg.ckpt}, which holds {block} tokens "
                f"with the request; set {block // 2} or less"
            )

    @property
    def block_size(self) -> int:
        return self.loaded.model.cfg.block_size

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return chat.prompt(messages, self.loaded.tokenizer, self.loaded.tags)

    @property
    def only_pretrained(self) -> bool:
        """Whether no stage that led to this checkpoint showed it a conversation."""
        kinds = {entry.get("kind") for entry in self.loaded.meta.get("lineage", ())}
        return bool(kinds) and kinds <= {"pretrain", "chars"}

    def say(
        self, messages: Sequence[Message], raw: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[str]:
        """Pieces of the assistant's next turn; raw: with tags. tools: schemas that its calls are held to; none = calls are free. ConfigError
        where the conversation fills the block."""
        tokenizer, tags = self.loaded.tokenizer, self.loaded.tags
        reader = Detokenizer(tokenizer, tags, raw=raw)
        grammar = call_grammar(tokenizer, tags, tools, declines=self.loaded.declines) if tools else None
        return self._pieces(self.prompt(messages), chat.stop_sequences(tokenizer, tags), reader, grammar)

    def complete(self, text: str) -> Iterator[str]:
        """Pieces of the continuation of a plain text."""
        tokenizer = self.loaded.tokenizer
        return self._pieces(tokenizer.encode(text), [(tokenizer.eot_id,)], Detokenizer(tokenizer, None))

    def last_content(self) -> str:
        """The content of the last turn, however it was shown."""
        return chat.completion_text(self.ids, self.loaded.tokenizer, self.loaded.tags)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What the model reads before it answers, tags as text."""
        return chat.decode(self.prompt(messages), self.loaded.tokenizer)

    def _pieces(
        self,
        prompt: Sequence[int],
        stop: Sequence[Sequence[int]],
        reader: Detokenizer,
        grammar: CallGrammar | None = None,
    ) -> Iterator[str]:
        cfg, shown, self.ids = self.cfg, "", []
        key, self.answers = self.answers, self.answers + 1
        how = dict(
            temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, seed=cfg.seed, key=key, grammar=grammar
        )
        budget = self.budget(len(prompt))
        with distributed.dist.autocast(distributed.dist.device()):
            for token, _ in models.generate.stream(self.loaded.model, prompt, max_new_tokens=budget, stop=stop, **how):
                self.ids.append(token)
                text = reader.growing(self.ids)
                if len(text) > len(shown):
                    yield text[len(shown) :]
                    shown = text
        yield reader.text(self.ids)[len(shown) :]

    def budget(self, prompt_tokens: int) -> int:
        """Tokens that the next answer may have. ConfigError where there is no room."""
        room = self.block_size - prompt_tokens
        needed = self.cfg.max_new_tokens or min(DEFAULT_TOKENS, max(room, 1))
        if room < needed:
            remedy = f"set --max-new-tokens {room} or less, or shorten the conversation" if room > 0 else "shorten it"
            raise ConfigError(
                f"the conversation has {prompt_tokens} tokens and the answer may have {needed}; both must "
                f"fit the block of {self.block_size} tokens; {remedy}"
            )
        return needed

    def fit(self, messages: list[Message]) -> list[Message]:
        """The conversation without the oldest exchanges that leave the answer no room; stderr says how many."""
        needed = room_for_an_answer(self.block_size, self.cfg.max_new_tokens)
        kept = drop_oldest(
            messages, lambda m: m["role"], lambda kept: self.block_size - len(self.prompt(kept)) < needed
        )
        if dropped := len(messages) - len(kept):
            print(
                f"[the block holds {self.block_size} tokens: the oldest {dropped} messages are forgotten]",
                file=sys.stderr,
            )
        return kept


def room_for_an_answer(block_size: int, longest: int | None) -> int:
    """Tokens that a conversation must leave for the next answer."""
    return longest or min(DEFAULT_TOKENS, block_size // 4)


M = TypeVar("M")


def mixes_requests(model: Any) -> bool:
    """Whether a request that does not go on with the one before is answered better without it: so it is in small models."""
    return sum(weights.numel() for weights in model.parameters()) < SMALL


def drop_oldest(messages: Sequence[M], role: Callable[[M], str], too_long: Callable[[list[M]], bool]) -> list[M]:
    """The messages without the oldest exchanges, each from a user's turn to the next, while the rest is too long. The last one stays."""
    kept = list(messages)
    while too_long(kept):
        users = [i for i, m in enumerate(kept) if role(m) == "user"]
        if len(users) < 2:
            break
        kept = [m for m in kept[: users[0]] if role(m) == "system"] + kept[users[1] :]
    return kept


def open_model(cfg: ChatSettings) -> LocalModel | RemoteModel:
    """The checkpoint or the server of the flags. ConfigError where they name none or both."""
    if bool(cfg.ckpt) == bool(cfg.server):
        given = "both --ckpt and --server are given" if cfg.ckpt else "ckpt is required"
        raise ConfigError(f"{given}; set --ckpt RUN, or --server URL")
    if cfg.ckpt:
        return LocalModel(cfg)
    how = dict(temperature=cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p, max_tokens=cfg.max_new_tokens)
    return RemoteModel(cfg.server, how, seed=cfg.seed, api_key_file=cfg.api_key_file)


# ---- the terminal


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
    """Read requests until the end of input; `reply` takes the conversation and returns it with its answer.

    At a terminal, a user error or Ctrl-C within an answer drops that turn; elsewhere it ends the command."""
    person = sys.stdin.isatty()
    if person:
        _load_line_editing()
        print("[Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation]")
    messages = list(first)
    while (line := _read_line(person)) is not None:
        if line.strip() == "/new":
            messages = list(first)
        elif line.strip():
            try:
                messages = reply([*messages, {"role": "user", "content": line}])
            except (UserError, KeyboardInterrupt) as error:
                if not person:
                    raise
                stopped = isinstance(error, KeyboardInterrupt)
                print("\n[stopped; this turn is forgotten]" if stopped else f"error: {error}", file=sys.stderr)


def _read_line(person: bool) -> str | None:
    try:
        return input("> " if person else "")
    except EOFError:
        return None


def _load_line_editing() -> None:
    """Arrow keys and history for input(), where the interpreter has them."""
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
    if isinstance(model, LocalModel) and model.only_pretrained:
        print(
            f"[{cfg.ckpt} was only pretrained and never saw a conversation: do not expect answers; "
            "take a checkpoint after SFT, or continue a text with --complete]",
            file=sys.stderr,
        )

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
