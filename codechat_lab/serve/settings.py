"""Settings of chat, tools and serve. No torch here: `--help` reads these classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from codechat.core.config import REQUIRED, SEEDS, Settings, opt
from codechat.core.errors import ConfigError
from codechat.tasks.settings import TRUST

TOOLS_HELP = (
    "functions to offer: a Python file (see examples/my_tools.py), a json file of schemas, "
    "names of functions"
)
DEFAULT_TOKENS = 256  # longest answer where --max-new-tokens is none


@dataclass(frozen=True, kw_only=True)
class ChatConfig(Settings):
    """A checkpoint, how to sample from it, and what to say to it."""

    chooses: ClassVar[bool] = False  # offers functions of the toolbox that fit the request
    ckpt: str = opt(
        "",
        "run (the checkpoint that evaluation chose, else the latest), run@latest, run@STEP, or path",
        reads="run",
    )
    server: str = opt("", "URL of a server instead, such as http://127.0.0.1:8000 (codechat serve)")
    api_key_file: Path | None = opt(
        None, "file with the key that the server expects; none = no key"
    )
    user: str = opt("", "one request; empty = a conversation in the terminal")
    complete: str = opt("", "a text to continue, without chat turns (for pretrained checkpoints)")
    max_new_tokens: int | None = opt(
        None, f"longest answer; none = {DEFAULT_TOKENS}, or what the block has", least=1
    )
    temperature: float = opt(0.5, "sampling temperature; 0 = always the most likely token", least=0)
    top_k: int | None = opt(50, "sample among the k most likely tokens; none = all", least=1)
    seed: int = opt(0, "seed of the sampling; the same seed gives the same answers", **SEEDS)
    tools: tuple[str, ...] = opt((), TOOLS_HELP)
    trust: bool = opt(False, TRUST)
    run: bool = opt(True, "run the calls; --no-run only shows them")
    raw: bool = opt(
        False, "before each answer, show the prompt as the model sees it, tags included"
    )
    constrain: Literal["auto", "off"] = opt(
        "auto", "auto: calls are held to the functions' schemas; off: free"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user and self.complete:
            raise ConfigError("--user and --complete exclude each other; keep one")
        if self.server and (self.raw or self.complete):
            raise ConfigError(
                "--raw and --complete need a checkpoint in this "
                "process; set --ckpt instead of --server"
            )
        if bool(self.ckpt) == bool(self.server):
            raise ConfigError(
                f"ckpt {self.ckpt!r}, server {self.server!r}; set one: --ckpt RUN, or --server URL"
            )


@dataclass(frozen=True, kw_only=True)
class ToolsConfig(ChatConfig):
    """The same with functions: those given, else some of the toolbox that fit each request."""

    chooses: ClassVar[bool] = True
    temperature: float = 0.0


LOCAL = ("127.0.0.1", "localhost", "::1")  # addresses that no other machine reaches


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """`codechat serve`."""

    ckpt: str = opt(
        REQUIRED,
        "run (the checkpoint that evaluation chose, else the latest), run@latest, run@STEP, path",
        reads="run",
    )
    host: str = opt(
        "127.0.0.1", "address to listen on; any but this machine's own needs --api-key-file"
    )
    port: int = opt(8000, "TCP port; 0 = any that is free", least=0, most=65535)
    name: str = opt("", "what clients call the model; empty = the run's name")
    api_key_file: Path | None = opt(
        None, "file whose first line clients must send as their API key; none = no key"
    )
    max_batch: int = opt(16, "completions sampled together", least=1)
    max_context: int | None = opt(
        None,
        "longest prompt with its answer, tokens; none = what the model knows, or what memory holds",
        least=1,
    )
    max_queue: int = opt(
        64, "completions that may wait; more are rejected with status 429", least=1
    )
    timeout_s: float = opt(
        120.0, "longest time for a request, waiting included, seconds", least=0.001
    )
    tools: tuple[str, ...] = opt(
        (),
        "what the chat page offers and runs: a Python file of functions (see examples/my_tools.py)",
    )
    trust: bool = opt(False, TRUST)
    confirm: bool = opt(
        True, "ask on the page before each call of these functions; --no-confirm runs them at once"
    )
    reload_from: Path | None = opt(
        None, "directory of checkpoints that POST /admin/weights may load; none = disabled"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host not in LOCAL and self.api_key_file is None:
            raise ConfigError(
                f"host {self.host} is open to other machines; set --api-key-file, or keep 127.0.0.1"
            )
