"""The body of an HTTP request as one of the schema's models, within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from codechat.inference.api_errors import ApiError, error_of

MOST_BYTES = 1 << 20  # of a request's body
BODY_S = 20.0  # for a body to arrive
CLIENT_LEFT = 499  # as in nginx; no client reads it

B = TypeVar("B", bound=BaseModel)


async def read(request: Request, kind: type[B]) -> B:
    """The body as one of the schema's models. ApiError where it is too large, too slow, no json, or has a wrong field."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be sent as Content-Type: application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MOST_BYTES:
                    raise ApiError(413, f"the body is larger than {MOST_BYTES} bytes")
        return kind.model_validate_json(bytes(data))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_LEFT, "the client left") from None
    except ValidationError as error:
        raise error_of(error) from None
