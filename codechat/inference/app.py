"""The HTTP side: OpenAI's API, health, metrics and the chat page, as a FastAPI application.

    /v1/chat/completions  /v1/completions  /v1/models        OpenAI's
    /health  /metrics                                         for monitoring
    /admin/weights                                            for a trainer, only where the server was started with --reload-from
    /  /page/...                                              the chat page (page_api)

Pages of other sites in the same browser can send requests here too. So a request must name this host (no page can point its own name here), its
body must be declared as json (a browser asks first before another site may send that, and we never agree), and nothing here has side effects.

Left out: TLS, users, rate limits per user (a proxy's business).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as RoutingError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from codechat.core.errors import ConfigError, RunError
from codechat.inference.api_errors import ApiError
from codechat.inference.api_requests import ParsedRequest, ServedModel, check_model, parse_chat, parse_completion
from codechat.inference.api_responses import ResponseBuilder, failed
from codechat.inference.api_schema import ChatRequest, CompletionRequest, WeightsRequest
from codechat.inference.batching import Engine, Job, Overloaded
from codechat.inference.page_api import add_page
from codechat.inference.request_body import CLIENT_LEFT, read
from codechat.inference.server_metrics import ServerMetrics
from codechat.inference.weight_update import update_weights


def build(
    engine: Engine,
    served: ServedModel,
    meters: ServerMetrics,
    *,
    key: str | None = None,
    hosts: frozenset[str] | None = None,
) -> FastAPI:
    """The application. key: what clients must send as a bearer token; none = nothing. hosts: names by which clients may address this server;
    none = any."""
    app = FastAPI(title="CodeChat", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(RoutingError, _routing_error)
    handlers = Handlers(engine, served, meters)
    guarded = APIRouter(dependencies=[Depends(_key_check(key))])
    guarded.post("/v1/chat/completions")(handlers.chat)
    guarded.post("/v1/completions")(handlers.complete)
    guarded.get("/v1/models")(handlers.models)
    guarded.get("/v1/models/{name:path}")(handlers.model)
    guarded.get("/metrics")(handlers.metrics)
    if served.reload_from is not None:
        guarded.post("/admin/weights")(handlers.weights)
    app.include_router(guarded)
    add_page(app, served, _key_check(key))
    app.get("/health")(handlers.health)

    app.add_middleware(EdgeMiddleware, meters=meters, hosts=hosts)
    return app


class EdgeMiddleware:
    """Around the application: rejects requests for other hosts, counts answers by status. Plain ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, meters: ServerMetrics, hosts: frozenset[str] | None) -> None:
        self.app, self.meters, self.hosts = app, meters, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.meters.requests.labels(path, str(message["status"])).inc()
            await send(message)

        request, answer = Request(scope), self.app
        name = re.sub(r":[0-9]*$", "", request.headers.get("host", ""))
        if self.hosts is not None and name not in self.hosts:
            answer = _error_response(request, ApiError(403, f"this server does not answer as {name[:100]!r}"))
        await answer(scope, receive, counted)


RESPONSE_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


def _error_response(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=RESPONSE_HEADERS.get(error.status))


def _routing_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RoutingError | HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code)


def _key_check(key: str | None) -> Callable[[Request], Awaitable[None]]:
    async def check_key(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(
            " "
        )  # its case does not matter: RFC 9110, 11.1
        known = key is None or hmac.compare_digest(given.strip(" ").encode(), key.encode())
        if not known or (key is not None and scheme.lower() != "bearer"):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")

    return check_key


class Answer:
    """One request on its way: its jobs in the engine, woken by `progress`, and the task that cancels them when the client leaves."""

    def __init__(
        self, request: Request, parsed: ParsedRequest, handlers: Handlers, *, chat: bool, streams: bool
    ) -> None:
        self.parsed, self.handlers, self.progress = parsed, handlers, asyncio.Event()
        loop = asyncio.get_running_loop()
        self.jobs = handlers.submit(
            parsed, lambda: None if loop.is_closed() else loop.call_soon_threadsafe(self.progress.set), streams
        )
        self.response = ResponseBuilder(parsed, self.jobs, handlers.served, chat=chat)
        self.leaving = asyncio.create_task(_cancel_when_left(request, self.jobs))

    @property
    def over(self) -> bool:
        return all(job.end for job in self.jobs) or any(map(failed, self.jobs))

    @property
    def begun(self) -> bool:
        return self.over or any(job.ids for job in self.jobs)

    async def events(self, usage: bool) -> AsyncIterator[str]:
        """Server-sent events: chunks as they come, the usage if requested, [DONE]; an error as the last one."""
        try:
            yield "".join(map(_event, self.response.first_chunks()))
            while True:
                self.progress.clear()  # before looking, so that nothing that comes meanwhile is missed
                over = self.over
                if chunks := "".join(map(_event, self.response.new_chunks())):  # one write for what came together
                    yield chunks
                if over:
                    break
                await self.progress.wait()
            check(self.jobs)
            if usage:
                yield _event(self.response.usage_chunk())
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status line is long gone; clients look for this
            yield _event(error.body())
        finally:
            self.close()

    def close(self) -> None:
        self.leaving.cancel()
        for job in self.jobs:
            job.cancel()
        self.handlers.meters.count(self.jobs, self.parsed.prompt_tokens)


class Handlers:
    """The handlers, and what they share."""

    def __init__(self, engine: Engine, served: ServedModel, meters: ServerMetrics) -> None:
        self.engine, self.served, self.meters = engine, served, meters

    async def chat(self, request: Request) -> Response:
        body = await read(request, ChatRequest)
        return await self._answer(request, body, await asyncio.to_thread(parse_chat, body, self.served))

    async def complete(self, request: Request) -> Response:
        body = await read(request, CompletionRequest)
        return await self._answer(request, body, await asyncio.to_thread(parse_completion, body, self.served))

    async def _answer(self, request: Request, body: ChatRequest | CompletionRequest, parsed: ParsedRequest) -> Response:
        """Wait for the whole answer, or for the first token of a stream, so that an early error has a status of its own."""
        streams = bool(body.stream)
        answer = Answer(request, parsed, self, chat=isinstance(body, ChatRequest), streams=streams)
        handed_over = False
        try:
            while not (answer.begun if streams else answer.over):
                await answer.progress.wait()
                answer.progress.clear()
            check(answer.jobs)
            if not streams:
                return JSONResponse(answer.response.body(body.return_token_ids))
            events = answer.events(bool(body.stream_options and body.stream_options.include_usage))
            handed_over = True  # the stream closes the answer
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        finally:
            if not handed_over:
                answer.close()

    def submit(self, parsed: ParsedRequest, on_progress: Callable[[], Any], streams: bool) -> list[Job]:
        try:
            return self.engine.submit(parsed.requests, on_progress=on_progress, streams=streams)
        except Overloaded as error:
            raise ApiError(429, str(error), code="overloaded") from None
        except ConfigError as error:
            raise ApiError(400, str(error)) from None
        except RunError as error:
            raise ApiError(503, str(error)) from None

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.served.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        check_model(name, self.served)
        about = {"id": name, "object": "model", "created": self.served.created, "owned_by": "codechat"}
        return about | {"max_model_len": self.served.loaded.model.cfg.block_size}

    async def health(self) -> JSONResponse:
        engine = self.engine
        state = {"status": "ok" if engine.alive else "failed", "model": self.served.name, "running": len(engine.rows)}
        state |= {"waiting": engine.waiting, "version": engine.version}
        return JSONResponse(state, 200 if state["status"] == "ok" else 503)

    async def weights(self, request: Request) -> dict[str, str]:
        body = await read(request, WeightsRequest)
        return {"version": await asyncio.to_thread(update_weights, body.path, self.served, self.engine)}

    async def metrics(self) -> Response:
        return Response(self.meters.text(), media_type="text/plain; version=0.0.4")


async def _cancel_when_left(request: Request, jobs: list[Job]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.cancel()


def check(jobs: list[Job]) -> None:
    """ApiError where a completion was cut short."""
    ends = {job.end for job in jobs}
    if "timeout" in ends:
        limit = jobs[0].request.timeout_s
        message = f"the answer was not finished within {limit:g} s; ask for fewer tokens, or later"
        raise ApiError(504, message, code="timeout")
    if "closed" in ends:
        raise ApiError(503, "the server is stopping")
    if "cancelled" in ends:
        raise ApiError(CLIENT_LEFT, "the client left")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
