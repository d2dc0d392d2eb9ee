"""The HTTP side: OpenAI's API, health, weight updates and the chat page, as a FastAPI application.

Pages of other sites in the same browser can send requests here too. So a request must name this host, its body must be
declared as json (a browser asks first before another site may send that, and we never agree), and nothing here has side
effects but a trainer's weight updates.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteError
from starlette.middleware.trustedhost import TrustedHostMiddleware

from codechat.core.errors import CheckpointError, RunError, UserError
from codechat.inference import protocol
from codechat.inference.detokenizer import Detokenizer
from codechat.inference.engine import Engine, Job, Overloaded
from codechat.inference.page import add_page
from codechat.inference.protocol import ApiError, ChatRequest, CompletionRequest, ServedModel
from codechat.inference.responses import ResponseBuilder, cut_short
from codechat.models import loading
from codechat.runs.checkpoint import fingerprint

MOST_BYTES = 1 << 20  # of a request's body
RESPONSE_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
CUT_SHORT = {
    "timeout": (504, "the answer was not finished within {timeout_s:g} s; ask for fewer tokens"),
    "closed": (503, "the server is stopping"),
    "cancelled": (499, "the client left"),
}


class AsciiJson(JSONResponse):
    """A body that holds any text: half a character, which UTF-8 cannot encode, is escaped."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def build_app(engine: Engine, served: ServedModel, key: str | None, hosts: Sequence[str]) -> FastAPI:
    """The application. key: what clients must send as a bearer token. hosts: names by which they may address it."""
    app = FastAPI(title="CodeChat", docs_url=None, redoc_url=None, openapi_url=None, max_body_size=MOST_BYTES)
    app.add_exception_handler(UserError, lambda request, error: error_response(error))
    app.add_exception_handler(
        StarletteError,
        lambda request, error: error_response(ApiError(error.status_code, f"{request.url.path[:100]}: {error.detail}")),
    )
    app.add_exception_handler(
        RequestValidationError, lambda request, error: error_response(protocol.validation_error(error.errors()[0]))
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    guarded = APIRouter(dependencies=[Depends(_key_check(key))] if key else [])
    add_api(guarded, engine, served)
    add_page(app, guarded, served)
    app.include_router(guarded)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"status": "ok" if engine.alive else "failed", "model": served.name, "running": len(engine.rows)}
        state |= {"waiting": engine.waiting, "version": engine.version}
        return JSONResponse(state, 200 if engine.alive else 503)

    return app


def error_response(error: UserError) -> AsciiJson:
    if not isinstance(error, ApiError):
        code = "overloaded" if isinstance(error, Overloaded) else None
        error = ApiError(429 if code else 503 if isinstance(error, RunError) else 400, str(error), code=code)
    return AsciiJson(error.body(), error.status, headers=RESPONSE_HEADERS.get(error.status))


def _key_check(key: str) -> Callable[..., Awaitable[None]]:
    async def check_key(given: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> None:
        if not hmac.compare_digest(given.credentials.strip().encode(), key.encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    return check_key


class WeightsRequest(protocol.Strict):
    """Weights to load: a checkpoint, as its path below the directory of --reload-from."""

    path: protocol.Text


def add_api(router: APIRouter, engine: Engine, served: ServedModel) -> None:
    """OpenAI's routes, and the weight updates of a trainer."""

    @router.post("/v1/chat/completions")
    async def complete_chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(request, body, protocol.parse_chat, engine, served)

    @router.post("/v1/completions")
    async def complete_text(body: CompletionRequest, request: Request) -> Response:
        return await _answer(request, body, protocol.parse_completion, engine, served)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        served.check_name(name)
        about = {"id": name, "object": "model", "created": served.created, "owned_by": "codechat"}
        return about | {"max_model_len": served.loaded.model.cfg.block_size}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(served.name)]}

    if served.reload_from is not None:

        @router.post("/admin/weights")
        def weights(body: WeightsRequest) -> dict[str, str]:
            return {"version": update_weights(body.path, served, engine)}


# ---- one answer


async def _answer(
    request: Request,
    body: protocol.Common,
    parse: Callable[..., tuple[list[Any], Detokenizer]],
    engine: Engine,
    served: ServedModel,
) -> Response:
    """Wait for the whole answer, or for the first token of a stream, so that an early error has a status of its own."""
    served.check_name(body.model)
    requests, detokenizer = await asyncio.to_thread(parse, body, served)
    progress, loop = asyncio.Event(), asyncio.get_running_loop()
    wake = lambda: loop.is_closed() or loop.call_soon_threadsafe(progress.set)  # noqa: E731
    jobs = engine.submit(requests, on_progress=wake, streams=bool(body.stream))
    response = ResponseBuilder(body, jobs, detokenizer)
    request.state.leaving = asyncio.create_task(_cancel_when_left(request, jobs))

    def over() -> bool:
        return all(job.end for job in jobs) or any(map(cut_short, jobs))

    async def events() -> AsyncIterator[str]:
        """Chunks as they come, the usage if requested, [DONE]; an error as the last one."""
        yield _events(response.first_chunks())
        last = False
        while not last:
            progress.clear()  # before looking, so that nothing that comes meanwhile is missed
            last = over()
            if chunks := _events(response.new_chunks()):  # one write for what came together
                yield chunks
            if not last:
                await progress.wait()
        try:
            check_ends(jobs)
        except ApiError as error:  # the status line is long gone; clients look for this
            yield _events([error.body()])
            return
        if body.stream_options and body.stream_options.include_usage:
            yield _events([response.usage_chunk()])
        yield "data: [DONE]\n\n"

    while not (over() or (body.stream and any(job.ids for job in jobs))):
        await progress.wait()
        progress.clear()
    check_ends(jobs)
    if body.stream:
        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    return AsciiJson(response.body())


async def _cancel_when_left(request: Request, jobs: list[Job]) -> None:
    """After the client left, or the answer is complete, where one job may have failed before the others."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.cancel()


def check_ends(jobs: list[Job]) -> None:
    """ApiError where a completion was cut short."""
    for job in filter(cut_short, jobs):
        status, why = CUT_SHORT[job.end]
        raise ApiError(status, why.format(timeout_s=job.request.timeout_s))


def _events(values: Iterable[dict[str, Any]]) -> str:
    """Server-sent events."""
    return "".join(f"data: {json.dumps(value, separators=(',', ':'))}\n\n" for value in values)


# ---- other weights


def update_weights(path: str, served: ServedModel, engine: Engine) -> str:
    """Let `engine` sample from the checkpoint at `path` below `served.reload_from`, whole or not at all; its version.

    It is read without executing it, after its hashes agree, before the running model changes."""
    folder, current = served.reload_from.resolve(), served.loaded
    checkpoint = (folder / path).resolve()
    if not checkpoint.is_relative_to(folder):
        raise ApiError(403, f"path {path[:200]!r} leads out of the directory of --reload-from", "path")
    try:
        state, meta = loading.read_weights(checkpoint)
        shape, tok, tags = loading.describe(checkpoint, meta)
        if (shape, tok.to_dict(), tags) != (current.model.cfg, current.tokenizer.to_dict(), current.tags):
            raise CheckpointError("shape, tokenizer and tags must be those of the served model")
    except UserError as error:
        raise ApiError(409, str(error), "path") from None
    version = meta.get("version") or fingerprint(meta)
    engine.update_weights(state, version)
    return version
