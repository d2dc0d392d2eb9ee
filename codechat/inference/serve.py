"""A checkpoint as a server: OpenAI's API for programs, a chat page for people.

    codechat serve --ckpt nano/rl                        http://127.0.0.1:8000, this machine only
    codechat serve --ckpt nano/rl --port 9000 --max-batch 32
    codechat serve --ckpt nano/rl --host 0.0.0.0 --api-key-file key.txt
    codechat serve --ckpt nano/sft --reload-from runs/weights     samples for `codechat grpo --engine http --engine-dir runs/weights`

Requests that come together share batches (`batching`). Only this machine can reach the server unless --host says otherwise, which needs a key.
Needs the extra: pip install 'codechat[serve]'.

With --reload-from a trainer may load other weights (POST /admin/weights): checkpoints below that directory, of the same model.

Left out: TLS (put a proxy before it), several models.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from codechat import distributed, models, runs  # dist and loading import torch: only when the server starts
from codechat.core import config
from codechat.core.config import opt
from codechat.core.errors import ConfigError, MissingFile

if TYPE_CHECKING:
    from codechat.models.loading import LoadedModel

Ready = Callable[[Any, str], None]

NEEDED = "codechat serve needs FastAPI and uvicorn, and {} is not installed; run pip install 'codechat[serve]'"
SWITCH_S = 0.0005  # between switches of threads: with Python's 5 ms the engine would wait for every reader
STOP_S = 3  # that running answers get when the server stops


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """`codechat serve`."""

    ckpt: str = opt(
        config.REQUIRED,
        "run name (the checkpoint that evaluation chose, else the latest), run@latest, run@best, run@STEP, run directory or checkpoint",
    )
    host: str = opt("127.0.0.1", "address to listen on; any but this machine's own needs --api-key-file")
    port: int = opt(8000, "TCP port; 0 = any that is free")
    name: str = opt("", "what clients call the model; empty = the run's name")
    api_key_file: Path | None = opt(None, "file whose first line clients must send as their API key; none = no key")
    max_batch: int = opt(16, "completions that are sampled together")
    max_queue: int = opt(64, "completions that may wait; more are rejected with status 429")
    max_new_tokens: int | None = opt(None, "longest completion, tokens; none = what the block leaves")
    timeout_s: float = opt(120.0, "longest time for a request, waiting included, seconds")
    constrain: Literal["auto", "off"] = opt(
        "auto",
        "auto: token masks keep calls to the schemas where a request asks for it (tool_choice required or a name, strict tools); "
        "off: such requests are rejected",
    )
    reload_from: Path | None = opt(
        None, "directory of checkpoints that POST /admin/weights may load while the server runs; none = no such request"
    )

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}; it must be at least 1")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s {self.timeout_s}; it must be above 0")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port}; it must be 0..65535")
        if not is_loopback(self.host) and self.api_key_file is None:
            raise ConfigError(
                f"host {self.host} can be reached by other machines; set --api-key-file, or keep 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(path: Path | None) -> str | None:
    """The API key of a file. MissingFile where there is none, ConfigError where it is empty or not printable ASCII."""
    if path is None:
        return None
    try:
        key = (path.read_text(encoding="utf-8").splitlines() or [""])[0].strip()
    except (FileNotFoundError, IsADirectoryError):
        raise MissingFile(f"{path} is not a file; --api-key-file takes a file whose first line is the key") from None
    except UnicodeDecodeError:
        key = ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{path} holds no key; its first line must be printable ASCII")
    return key


def extra(name: str) -> ModuleType:
    """A module that the extra `serve` brings. ConfigError says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == "codechat":
            raise
        raise ConfigError(NEEDED.format(error.name or name)) from None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. ConfigError where the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); set another --port or --host"
        ) from None


def hosts_of(cfg: ServeConfig) -> frozenset[str] | None:
    """Names by which clients may address the server: on loopback its own only, so that no web page's name can point here."""
    return frozenset({"127.0.0.1", "localhost", "[::1]", cfg.host}) if is_loopback(cfg.host) else None


def serve(cfg: ServeConfig, *, ready: Ready | None = None) -> None:
    """Load the checkpoint and answer until interrupted. ready: called with the server and its URL before it starts."""
    extra("codechat.inference.app"), extra("uvicorn")  # before anything takes time
    read_key(cfg.api_key_file)
    with listen(cfg.host, cfg.port) as sock:
        path, meaning = runs.paths.chosen_checkpoint(cfg.ckpt)
        if meaning:
            print(f"[{meaning}]", flush=True)
        device = distributed.dist.device()
        distributed.hardware.keep_freed_memory(device)
        answer(cfg, models.loading.load_model(path, device), sock, ready, meaning)


def name_of(loaded: LoadedModel, ckpt: str) -> str:
    """What clients call the model: released/NAME, else the run that the checkpoint says it is of, else `ckpt`. A released run remembers
    another name, that of the run it was made from."""
    found = runs.paths.name_of(loaded.path.parent.parent)
    return found if found.startswith(f"{runs.paths.RELEASED}/") else str(loaded.meta.get("run") or ckpt)


def answer(
    cfg: ServeConfig, loaded: LoadedModel, sock: socket.socket, ready: Ready | None = None, meaning: str = ""
) -> None:
    """Answer on a bound socket until the server is told to stop. meaning: which checkpoint it is, in words, for the page."""
    app, api_requests, batching, server_metrics = (
        extra(f"codechat.inference.{part}") for part in ("app", "api_requests", "batching", "server_metrics")
    )
    uvicorn, metrics = extra("uvicorn"), server_metrics.ServerMetrics()
    name, limits = cfg.name or name_of(loaded, cfg.ckpt), dict(max_rows=cfg.max_batch, max_waiting=cfg.max_queue)
    with batching.Engine(loaded, **limits, observe=metrics.rows.observe) as engine:
        metrics.watch(engine)
        served = api_requests.ServedModel(
            loaded,
            name,
            int(time.time()),
            max_new_tokens=cfg.max_new_tokens,
            timeout_s=cfg.timeout_s,
            most_choices=cfg.max_batch + cfg.max_queue,
            reload_from=cfg.reload_from,
            meaning=meaning,
            constrain=cfg.constrain == "auto",
        )
        built = app.build(engine, served, metrics, key=read_key(cfg.api_key_file), hosts=hosts_of(cfg))
        settings = dict(log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_S)
        server = uvicorn.Server(uvicorn.Config(built, **settings))
        host, port = sock.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        begin = server.startup

        async def startup(*args: Any, **kwargs: Any) -> None:
            """Announce the server once it answers: Ctrl-C before that would end a half-built event loop."""
            await begin(*args, **kwargs)
            print(f"{name} answers at {url} (chat page) and {url}/v1 (OpenAI's API); Ctrl-C stops it", flush=True)

        server.startup = startup
        if ready:
            ready(server, url)
        run_quickly(server, sock)


def run_quickly(server: Any, sock: socket.socket) -> None:
    """Run uvicorn with frequent switches of threads."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        server.run(sockets=[sock])
    finally:
        sys.setswitchinterval(usual)


EPILOG = """examples:
  codechat serve --ckpt nano/rl
  codechat serve --ckpt nano/rl --port 9000 --max-batch 32
  codechat chat --server http://127.0.0.1:8000
  curl http://127.0.0.1:8000/v1/models"""


def main(argv: list[str] | None = None) -> None:
    """`codechat serve`."""
    serve(config.parse(ServeConfig, sys.argv[1:] if argv is None else argv, prog="codechat serve", epilog=EPILOG))


if __name__ == "__main__":
    from codechat.core.command import run_main

    run_main(main)
