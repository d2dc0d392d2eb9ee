"""The HTTP side: OpenAI's API, health, weight updates, and the chat page with what it needs, as
a FastAPI application.

Pages of other sites in the same browser can send requests here too. So a request must name this
host, its body must be declared as json (a browser asks first before another site may send that,
and we never agree). Side effects have a trainer's weight updates, and the functions of a user's
file, which whoever can send requests here can run."""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles

from codechat.core.errors import CheckpointError, RunError, UserError
from codechat.models import loading
from codechat.runs.paths import fingerprint
from codechat.text.tool_calls import Call, escape_surrogates
from codechat.text.tool_functions import Toolkit, Workbench
from codechat_lab.serve import parsing, protocol, request_errors
from codechat_lab.serve.conversations import (
    NEUTRAL,
    drop_oldest,
    goes_on,
    has_seen_conversations,
    mixes_requests,
    room_for_an_answer,
    tools_for,
)
from codechat_lab.serve.engine import Engine, Job, Overloaded
from codechat_lab.serve.parsing import ServedModel
from codechat_lab.serve.request_errors import ApiError
from codechat_lab.serve.responses import CUT_SHORT, ResponseBuilder, response_of
from codechat_lab.tasks.toolbox.catalogue import TOOLS, respond

MOST_BYTES = 1 << 20  # of a request's body
RESPONSE_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
PAGE = Path(__file__).with_name("page.html")
VENDOR = Path(__file__).with_name("vendor")  # Markdown and colours of code, with their licences
POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class OwnFunctions:
    """Functions of a user's file, which the page offers and runs, in one world of the server."""

    kit: Toolkit
    bench: Workbench
    confirm: bool  # the page asks before each call


def build_app(
    engine: Engine,
    served: ServedModel,
    key: str | None,
    hosts: Sequence[str],
    own: OwnFunctions | None = None,
) -> FastAPI:
    """The application. key: what clients must send as a bearer token. hosts: names by which
    they may address it. own: what the page offers instead of the toolbox."""
    app = FastAPI(
        title="CodeChat",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        max_body_size=MOST_BYTES,
    )
    for kind in (UserError, StarletteError, RequestValidationError):
        app.add_exception_handler(kind, error_response)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)

    async def check_key(
        given: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())],
    ) -> None:
        if not hmac.compare_digest(given.credentials.strip().encode(), (key or "").encode()):
            raise ApiError(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )

    guarded = APIRouter(dependencies=[Depends(check_key)] if key else [])
    add_api(guarded, engine, served)
    add_page(guarded, served, own)
    app.include_router(guarded)
    app.mount("/page/vendor", StaticFiles(directory=VENDOR))

    @app.get("/")
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": POLICY.format(nonce),
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(
            PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce), headers=headers
        )

    @app.get("/health")
    async def health() -> Response:
        state = {
            "status": "ok" if engine.alive else "failed",
            "model": served.name,
            "version": engine.version,
            "running": len(engine.rows),
            "waiting": len(engine.waiting),
        }
        return json_response(state, 200 if engine.alive else 503)

    return app


def json_response(content: Any, status: int = 200) -> Response:
    """A body that holds any text: half a character, which UTF-8 cannot encode, is escaped."""
    text = json.dumps(content, separators=(",", ":"))
    return Response(text, status, RESPONSE_HEADERS.get(status), media_type="application/json")


def error_response(request: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    found = _api_error(request, error)
    return json_response(found.body(), found.status)


def _api_error(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case StarletteError():
            return ApiError(error.status_code, f"{request.url.path[:100]}: {error.detail}")
        case RequestValidationError():
            kind = (
                protocol.ChatRequest
                if request.url.path.endswith("/chat/completions")
                else protocol.CompletionRequest
            )
            return request_errors.api_error(error.errors(), error.body, list(kind.model_fields))
        case Overloaded():
            return ApiError(429, str(error), code="overloaded")
        case RunError():
            return ApiError(503, str(error))
    return ApiError(400, str(error))


def add_api(router: APIRouter, engine: Engine, served: ServedModel) -> None:
    """OpenAI's routes, and the weight updates of a trainer."""

    @router.post("/v1/chat/completions")
    async def complete_chat(body: protocol.ChatRequest, request: Request) -> Response:
        check_model(body.model, served)
        sampled = await asyncio.to_thread(parsing.parse_chat, body, served)
        return await Answer(request, body, sampled, engine).response()

    @router.post("/v1/completions")
    async def complete_text(body: protocol.CompletionRequest, request: Request) -> Response:
        check_model(body.model, served)
        sampled = await asyncio.to_thread(parsing.parse_completion, body, served)
        return await Answer(request, body, sampled, engine).response()

    model = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "codechat",
        "max_model_len": served.max_context,
    }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")  # a name may hold a slash
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, served)
        return model

    folder = served.reload_from
    if folder:

        @router.post("/admin/weights")
        def weights(path: Annotated[protocol.Text, Body(embed=True)]) -> dict[str, str]:
            return {"version": update_weights(folder, path, served, engine)}


def check_model(name: str, served: ServedModel) -> None:
    """ApiError where another model is meant."""
    if name != served.name:
        message = f"the model {name[:100]!r} is not served here; ask for {served.name!r}"
        raise ApiError(404, message, "model", "model_not_found")


# ---- one answer


class Answer:
    """The completions of one request on their way. Made in the event loop, which the engine's
    thread wakes."""

    def __init__(
        self, request: Request, body: protocol.Common, sampled: parsing.Sampled, engine: Engine
    ) -> None:
        self.request = request
        self.body = body
        self.progress = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.jobs = engine.submit(
            sampled.requests, on_progress=self.wake, streams=bool(body.stream)
        )
        self.builder: ResponseBuilder = response_of(body, self.jobs, sampled.detokenizer)

    def wake(self) -> None:
        """Called by the engine's thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.progress.set)

    async def response(self) -> Response:
        """Wait for the whole answer, or for the first token of a stream, so that an early error
        has a status of its own."""
        self.request.state.leaving = asyncio.create_task(self.cancel_when_left())
        ended = await self.over()
        while not ended and not (self.body.stream and any(job.ids for job in self.jobs)):
            ended = await self.over()
        check_ends(self.jobs)
        if self.body.stream:
            headers = {"Cache-Control": "no-store"}
            return StreamingResponse(
                self.events(ended), media_type="text/event-stream", headers=headers
            )
        return json_response(self.builder.body())

    async def cancel_when_left(self) -> None:
        """After the client left, or the answer is complete, where one job may have failed
        before the others."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        for job in self.jobs:
            job.cancelled = True

    async def over(self) -> bool:
        """Wait for a change. Whether it was the last one."""
        await self.progress.wait()
        self.progress.clear()  # before looking, so that nothing that comes meanwhile is missed
        return all(job.end for job in self.jobs) or any(job.end in CUT_SHORT for job in self.jobs)

    async def events(self, ended: bool) -> AsyncIterator[str]:
        """Chunks as they come, the usage if requested, [DONE]; an error as the last one."""
        while True:
            chunks = _events(self.builder.new_chunks())
            if chunks:  # one write for what came together
                yield chunks
            if ended:
                break
            ended = await self.over()
        try:
            check_ends(self.jobs)
        except ApiError as error:  # the status line is long gone; clients look for this
            yield _events([error.body()])
            return
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield _events([self.builder.usage_chunk()])
        yield "data: [DONE]\n\n"


def check_ends(jobs: Iterable[Job]) -> None:
    """ApiError where a completion was cut short."""
    for job in jobs:
        if job.end in CUT_SHORT:
            status, why = CUT_SHORT[job.end]
            raise ApiError(status, why.format(timeout_s=job.request.timeout_s))


def _events(values: Iterable[dict[str, Any]]) -> str:
    """Server-sent events."""
    return "".join(f"data: {json.dumps(value, separators=(',', ':'))}\n\n" for value in values)


# ---- other weights


def update_weights(folder: Path, path: str, served: ServedModel, engine: Engine) -> str:
    """Let `engine` sample from the checkpoint at `path` below `folder`, whole or not at all;
    its version.

    It is read without executing it, after its hashes agree, before the running model changes."""
    folder = folder.resolve()
    checkpoint = (folder / path).resolve()
    if not checkpoint.is_relative_to(folder):
        raise ApiError(
            403, f"path {path[:200]!r} leads out of the directory of --reload-from", "path"
        )
    try:
        new = loading.load_model(checkpoint)
        if _shape(new) != _shape(served.loaded):
            raise CheckpointError("shape, tokenizer and tags must be those of the served model")
    except UserError as error:
        raise ApiError(409, str(error), "path") from None
    version = fingerprint(new.meta)
    engine.update_weights(new.model.state_dict(), version)
    return version


def _shape(loaded: loading.LoadedModel) -> tuple[Any, ...]:
    """What requests and the engine's buffers depend on."""
    return loaded.model.cfg, loaded.tokenizer.to_dict(), loaded.tags


# ---- what the page needs beside OpenAI's API


def add_page(router: APIRouter, served: ServedModel, own: OwnFunctions | None) -> None:
    """/page/about, /page/prepare (functions to offer, messages to drop) and /page/call (run a
    function: the user's where one has this name, else of the toolbox)."""
    loaded = served.loaded
    schemas = {name: tool.schema for name, tool in TOOLS.items()}
    if own:
        yours = dict(own.kit.schemas)
        schemas = yours | {name: schema for name, schema in schemas.items() if name not in yours}

    @router.get("/page/about")
    async def about() -> dict[str, Any]:
        return {
            "model": served.name,
            "checkpoint": served.meaning or loaded.path.name,
            "neutral": NEUTRAL,
            "tools": list(schemas.values()),
            "own": own.kit.names if own else [],
            "confirm": own is not None and own.confirm,
            "alone": mixes_requests(loaded.model),
            "parameters": sum(weights.numel() for weights in loaded.model.parameters()),
            "context": loaded.model.cfg.block_size,
            "talks": has_seen_conversations(loaded),
        }

    @router.post("/page/prepare")
    def prepare(
        messages: Annotated[list[protocol.Message], Body(min_length=1)],
        tools: Annotated[list[str] | None, Body()] = None,
        before: Annotated[tuple[str, ...], Body()] = (),
    ) -> dict[str, Any]:
        """For the next answer of a conversation. tools: names to offer; none = those that fit
        the last request, or those offered `before` it."""
        request = next(
            (message.text for message in reversed(messages) if message.role == "user"), ""
        )
        names = tools_for(request, before) if tools is None else tools
        unknown = [name for name in names if name not in schemas]
        if unknown:
            raise ApiError(400, f"there is no function {unknown[0][:64]!r}", "tools")
        offered = [schemas[name] for name in names]
        most = served.max_context

        def too_long(kept: list[protocol.Message]) -> bool:
            return most - len(parsing.prompt_of(kept, offered, loaded)) < room_for_an_answer(
                most, None
            )

        dropped = len(messages) - len(drop_oldest(messages, lambda m: m.role, too_long))
        return {"offered": names, "dropped": dropped, "goes_on": goes_on(request)}

    @router.post("/page/call")
    def call(
        name: Annotated[str, Body()], arguments: Annotated[dict[str, Any], Body()]
    ) -> Response:
        if own and name in own.kit.names:
            result = own.bench.respond(Call(name, arguments, "object"))
        else:
            result = respond(name, arguments)
        result = escape_surrogates(result)
        return Response(result, media_type="application/json")  # goes back to the model
