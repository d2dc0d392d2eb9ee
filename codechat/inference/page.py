"""What the chat page needs beside OpenAI's API.

GET / is the page; /page/about, /page/prepare (functions to offer, messages to drop) and /page/call (run a toolbox
function) serve it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import HTMLResponse
from pydantic import Field

from codechat.inference.protocol import ApiError, Message, ServedModel, Strict, prompt_of
from codechat.inference.terminal import NEUTRAL, drop_oldest, mixes_requests, room_for_an_answer
from codechat.inference.toolkit import goes_on, tools_for
from codechat.tasks.toolbox.catalogue import TOOLS, respond
from codechat.text.tool_calls import escape_surrogates

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class ToolRequest(Strict):
    """A call of a toolbox function."""

    name: str
    arguments: dict[str, Any]


class PrepareRequest(Strict):
    """The conversation before the next answer. tools: names to offer; none = those that fit the last request, or those
    offered `before` it."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[str] | None = None
    before: list[str] = []


def add_page(app: FastAPI, guarded: APIRouter, served: ServedModel) -> None:
    """Add the page's routes; guarded: those that ask for the API key."""
    loaded = served.loaded

    @app.get("/")
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        headers = {"Content-Security-Policy": POLICY.format(nonce), "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce), headers=headers)

    @guarded.get("/page/about")
    async def about() -> dict[str, Any]:
        names = {"model": served.name, "checkpoint": served.meaning or loaded.path.name, "neutral": NEUTRAL}
        return names | {"tools": [tool.schema for tool in TOOLS.values()], "alone": mixes_requests(loaded.model)}

    @guarded.post("/page/prepare")
    def prepare(body: PrepareRequest) -> dict[str, Any]:
        request = next((message.text for message in reversed(body.messages) if message.role == "user"), "")
        names = tools_for(request, body.before) if body.tools is None else body.tools
        if unknown := [name for name in names if name not in TOOLS]:
            raise ApiError(400, f"the toolbox has no function {unknown[0][:64]!r}", "tools")
        schemas, block = [TOOLS[name].schema for name in names], loaded.model.cfg.block_size

        def too_long(kept: list[Message]) -> bool:
            return block - len(prompt_of(kept, schemas, loaded)) < room_for_an_answer(block, None)

        dropped = len(body.messages) - len(drop_oldest(body.messages, lambda m: m.role, too_long))
        return {"offered": names, "dropped": dropped, "goes_on": goes_on(request)}

    @guarded.post("/page/call")
    def call(body: ToolRequest) -> Response:
        result = escape_surrogates(respond(body.name, body.arguments))
        return Response(result, media_type="application/json")  # goes back to the model
