"""Serve a checkpoint: OpenAI's API for programs, a chat page for people. Extra: pip install
'codechat[serve]'.

    codechat serve --ckpt released/mini --port 9000 --max-batch 32
    codechat serve --ckpt released/mini --host 0.0.0.0 --api-key-file key.txt
    codechat serve --ckpt released/mini --tools examples/my_tools.py    functions of your own
    codechat serve --ckpt released/nano --reload-from runs/weights    samples for codechat grpo --engine http
    codechat chat --server http://127.0.0.1:8000

Only this machine can reach the server, unless you set --host, which needs a key. It has no TLS:
put a proxy in front."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from codechat.core.errors import ConfigError
from codechat.core.http_client import read_key
from codechat.distributed import hardware, numerics
from codechat.models import loading
from codechat.models.fast.reader import cache_dtype
from codechat.runs import paths
from codechat.text.tool_functions import read_tools
from codechat_lab.serve.conversations import load_checkpoint
from codechat_lab.serve.settings import LOCAL, ServeConfig

if TYPE_CHECKING:
    import uvicorn

    from codechat.models.config import GPTConfig
    from codechat_lab.serve.app import OwnFunctions
    from codechat_lab.serve.slots import Room

# between switches of threads: with Python's 5 ms the engine would wait for every reader
SWITCH_S = 0.0005
STOP_S = 3  # that running answers get when the server stops
# that an idle connection stays open: longer than a client keeps one, or it would meet a closed one
KEEP_S = 30


def check_address(host: str, port: int) -> None:
    """ConfigError where nothing can listen there, before a model is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        remedy = "choose another --port, or --port 0 for any that is free"
        if error.errno != errno.EADDRINUSE:
            remedy = "choose another --host or --port"
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"cannot listen on {host} port {port}: {why}; {remedy}") from None


def serve(
    cfg: ServeConfig,
    *,
    loaded: loading.LoadedModel | None = None,
    ready: Callable[[uvicorn.Server, str], None] | None = None,
) -> None:
    """Answer until interrupted. loaded: instead of the checkpoint; ready: called with the
    server and its URL."""
    try:
        import uvicorn

        from codechat_lab.serve.app import build_app
        from codechat_lab.serve.parsing import ServedModel
    except ImportError as error:
        raise ConfigError(
            f"codechat serve needs {error.name}; run pip install 'codechat[serve]'"
        ) from None
    from codechat_lab.serve.engine import Engine  # imports torch, which --help does not need

    check_address(cfg.host, cfg.port)
    key = read_key(cfg.api_key_file) if cfg.api_key_file else None
    own = _own_functions(cfg)
    meaning = ""
    if loaded is None:
        loaded, meaning = load_checkpoint(cfg.ckpt, sys.stdout)
    room = _room(cfg, loaded.model.cfg)
    served = ServedModel(
        loaded=loaded,
        name=cfg.name or _name_of(loaded, cfg),
        created=int(time.time()),
        max_context=room.max_context,
        timeout_s=cfg.timeout_s,
        reload_from=cfg.reload_from,
        meaning=meaning,
    )
    # on loopback the server has its own names only, so that no web page's name can point here
    hosts = [f"[{host}]" if ":" in host else host for host in LOCAL] if cfg.host in LOCAL else ["*"]
    sys.setswitchinterval(SWITCH_S)
    with Engine(loaded, max_waiting=cfg.max_queue, room=room) as engine:
        config = uvicorn.Config(
            build_app(engine, served, key, hosts, own),
            cfg.host,
            cfg.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=STOP_S,
            timeout_keep_alive=KEEP_S,
        )
        _announcing(config, served.name, ready).run()


def _own_functions(cfg: ServeConfig) -> OwnFunctions | None:
    """The functions of --tools, opened."""
    from codechat_lab.serve import terminal
    from codechat_lab.serve.app import OwnFunctions

    if not cfg.tools:
        return None
    kit = read_tools(cfg.tools, trust=cfg.trust, known=terminal.TOOLBOX)
    own = OwnFunctions(kit, kit.open(), cfg.confirm)
    print(f"[functions: {', '.join(kit.names)}]", flush=True)
    return own


def _name_of(loaded: loading.LoadedModel, cfg: ServeConfig) -> str:
    """What clients call the model: its run, or what was typed."""
    run = paths.name_of(loaded.path.parent.parent)
    if run.startswith(f"{paths.RELEASED}/"):
        return run
    return str(loaded.meta.get("run") or cfg.ckpt)


def _room(cfg: ServeConfig, shape: GPTConfig) -> Room:
    """How many rows of how many tokens fit beside the weights, said before any is allocated."""
    from codechat_lab.serve.slots import free_memory, room_in

    device = hardware.device()
    compute = numerics.compute_dtype(device)
    room, about_room = room_in(
        free_memory(device, shape, compute),
        shape,
        cache_dtype(shape, device, compute),
        max_context=cfg.max_context,
        max_rows=cfg.max_batch,
    )
    print(f"[{about_room}]", file=sys.stderr, flush=True)
    return room


def _announcing(
    config: uvicorn.Config,
    name: str,
    ready: Callable[[uvicorn.Server, str], None] | None,
) -> uvicorn.Server:
    """A server that says its address once it listens."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, *args: Any, **kwargs: Any) -> None:
            await super().startup(*args, **kwargs)
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            # not before: Ctrl-C would end a half-built event loop
            print(
                f"{name} answers at {url} (chat page) and {url}/v1 (OpenAI's API); Ctrl-C stops it",
                flush=True,
            )
            if ready:
                ready(self, url)

    return Server(config)
