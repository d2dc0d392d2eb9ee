"""What the chat page needs beside OpenAI's API: the toolbox, which of its functions fit a request, and how much of a conversation fits the model.

    GET  /              the page
    GET  /page/about    the served checkpoint, the toolbox, whether calls are constrained
    POST /page/prepare  for the next answer: functions to offer, messages to drop because the context is full, whether the request needs those before it
    POST /page/call     run a toolbox function

Nothing here has side effects: /page/call knows the toolbox only.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import Field

from codechat.inference.api_errors import ApiError
from codechat.inference.api_requests import ServedModel, prompt_of
from codechat.inference.api_schema import Message, Strict
from codechat.inference.chat_command import NEUTRAL, drop_oldest, mixes_requests, room_for_an_answer
from codechat.inference.fitting_tools import goes_on, tools_for
from codechat.inference.request_body import read
from codechat.tasks.toolbox import TOOLS, respond

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class ToolRequest(Strict):
    """A call of a toolbox function."""

    name: str
    arguments: dict[str, Any]


class PrepareRequest(Strict):
    """The conversation before the next answer. tools: names to offer; none = those that fit the last request, or those offered `before` where it goes on with it."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[str] | None = None
    before: list[str] = []


def add_page(app: FastAPI, served: ServedModel, key_check: Any) -> None:
    """Add the page's routes to the application; key_check: the dependency that asks for the API key."""
    handlers, guarded = PageHandlers(served), APIRouter(dependencies=[Depends(key_check)])
    guarded.get("/page/about")(handlers.about)
    guarded.post("/page/prepare")(handlers.prepare)
    guarded.post("/page/call")(call)
    app.include_router(guarded)
    app.get("/")(page)


class PageHandlers:
    """The page's handlers that need the served model."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served

    async def about(self) -> dict[str, Any]:
        served = self.served
        about = {"model": served.name, "checkpoint": served.meaning or served.loaded.path.name}
        return about | {
            "tools": [tool.schema for tool in TOOLS.values()],
            "constrain": served.constrain,
            "neutral": NEUTRAL,
            "alone": mixes_requests(served.loaded.model),
        }

    async def prepare(self, request: Request) -> dict[str, Any]:
        body = await read(request, PrepareRequest)
        asked = next((message.text for message in reversed(body.messages) if message.role == "user"), "")
        names = body.tools
        if names is None:
            names = await asyncio.to_thread(tools_for, asked, body.before)
        if unknown := [name for name in names if name not in TOOLS]:
            raise ApiError(400, f"the toolbox has no function {unknown[0][:64]!r}", "tools")
        more = await asyncio.to_thread(dropped, body.messages, names, self.served)
        return {"offered": names, "dropped": more, "goes_on": goes_on(asked)}


def dropped(messages: list[Message], names: list[str], served: ServedModel) -> int:
    """How many of the oldest messages, system messages not counted, leave the answer no room."""
    schemas, block = [TOOLS[name].schema for name in names], served.loaded.model.cfg.block_size
    needed = min(room_for_an_answer(block, None), served.max_new_tokens or block)
    kept = drop_oldest(
        messages, lambda m: m.role, lambda kept: block - len(prompt_of(kept, schemas, served.loaded)) < needed
    )
    return len(messages) - len(kept)


async def call(request: Request) -> Response:
    """Run a toolbox function: {"result": ...} or {"error": ...}, the text that goes back to the model."""
    body = await read(request, ToolRequest)
    return Response(await asyncio.to_thread(respond, body.name, body.arguments), media_type="application/json")


async def page() -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    text = await asyncio.to_thread(PAGE.read_text, encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY.format(nonce), "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(text.replace("{{nonce}}", nonce), headers=headers)
