"""A checkpoint as a server: OpenAI's API for programs, a chat page for people. Extra: pip install 'codechat[serve]'.

    codechat serve --ckpt nano/rl --port 9000 --max-batch 32
    codechat serve --ckpt nano/rl --host 0.0.0.0 --api-key-file key.txt
    codechat serve --ckpt nano/sft --reload-from runs/weights    samples for codechat grpo --engine http
    codechat chat --server http://127.0.0.1:8000

Only this machine can reach the server unless --host says otherwise, which needs a key. It has no TLS: put a proxy
before it.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from codechat.core import config
from codechat.core.command import parse_and_run
from codechat.core.config import Settings, opt
from codechat.core.errors import ConfigError, MissingFile
from codechat.distributed import dist
from codechat.models import loading
from codechat.runs import paths

SWITCH_S = 0.0005  # between switches of threads: with Python's 5 ms the engine would wait for every reader
STOP_S = 3  # that running answers get when the server stops


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Settings):
    """`codechat serve`."""

    ckpt: str = opt(
        config.REQUIRED,
        "run name (the checkpoint that evaluation chose, else the latest), run@latest, run@best, run@STEP, run "
        "directory or checkpoint",
    )
    host: str = opt("127.0.0.1", "address to listen on; any but this machine's own needs --api-key-file")
    port: int = opt(8000, "TCP port; 0 = any that is free", least=0, most=65535)
    name: str = opt("", "what clients call the model; empty = the run's name")
    api_key_file: Path | None = opt(None, "file whose first line clients must send as their API key; none = no key")
    max_batch: int = opt(16, "completions that are sampled together", least=1)
    max_queue: int = opt(64, "completions that may wait; more are rejected with status 429", least=1)
    timeout_s: float = opt(120.0, "longest time for a request, waiting included, seconds", least=0.001)
    reload_from: Path | None = opt(
        None, "directory of checkpoints that POST /admin/weights may load while the server runs; none = no such request"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_loopback(self.host) and self.api_key_file is None:
            raise ConfigError(f"host {self.host} is open to other machines; set --api-key-file, or keep 127.0.0.1")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(path: Path | None) -> str | None:
    """The API key of a file: its first line."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        raise MissingFile(f"{path} is no text file; --api-key-file takes a file whose first line is the key") from None
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path} holds no key; its first line must be printable ASCII")
    return key


def listen(host: str, port: int) -> socket.socket:
    """A bound socket."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error}); set another --port or --host") from None


def name_of(loaded: loading.LoadedModel, ckpt: str) -> str:
    """What clients call the model: released/NAME, else the run that the checkpoint says it is of, else `ckpt`."""
    name = paths.name_of(loaded.path.parent.parent)
    return name if name.startswith(f"{paths.RELEASED}/") else str(loaded.meta.get("run") or ckpt)


def serve(cfg: ServeConfig, *, ready: Callable[[Any, str], None] | None = None) -> None:
    """Load the checkpoint and answer until interrupted. ready: called with the server and its URL before it starts."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"codechat serve needs {error.name}; run pip install 'codechat[serve]'") from None
    read_key(cfg.api_key_file)
    with listen(cfg.host, cfg.port) as sock:
        path, meaning = paths.chosen_checkpoint(cfg.ckpt)
        if meaning:
            print(f"[{meaning}]", flush=True)
        device = dist.device()
        dist.keep_freed_memory(device)
        answer(cfg, loading.load_model(path, device), sock, ready, meaning)


def answer(
    cfg: ServeConfig,
    loaded: loading.LoadedModel,
    sock: socket.socket,
    ready: Callable[[Any, str], None] | None = None,
    meaning: str = "",
) -> None:
    """Answer on a bound socket until the server is told to stop. meaning: which checkpoint it is, for the page."""
    import uvicorn

    from codechat.inference.app import build_app
    from codechat.inference.engine import Engine
    from codechat.inference.protocol import ServedModel

    class Server(uvicorn.Server):
        async def startup(self, *args: Any, **kwargs: Any) -> None:
            await super().startup(*args, **kwargs)
            # not before: Ctrl-C would end a half-built event loop
            print(f"{name} answers at {url} (chat page) and {url}/v1 (OpenAI's API); Ctrl-C stops it", flush=True)

    name, most = cfg.name or name_of(loaded, cfg.ckpt), cfg.max_batch + cfg.max_queue
    served = ServedModel(loaded, name, int(time.time()), cfg.timeout_s, most, cfg.reload_from, meaning)
    host, port = sock.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    # on loopback the server has its own names only, so that no web page's name can point here
    hosts = {"127.0.0.1", "localhost", "[::1]", cfg.host} if is_loopback(cfg.host) else {"*"}
    usual = sys.getswitchinterval()
    with Engine(loaded, max_rows=cfg.max_batch, max_waiting=cfg.max_queue) as engine:
        app = build_app(engine, served, read_key(cfg.api_key_file), hosts)
        settings = dict(log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S)
        server = Server(uvicorn.Config(app, **settings))
        if ready:
            ready(server, url)
        sys.setswitchinterval(SWITCH_S)
        try:
            server.run(sockets=[sock])
        finally:
            sys.setswitchinterval(usual)


main = partial(parse_and_run, ServeConfig, serve, "serve", __doc__)
