"""What goes wrong in a request, as OpenAI's API says it: a status, and {"error": {message, type, param, code}}.

Left out: an error for what nobody expected. That is a defect: its traceback goes to stderr and the client gets a plain 500.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from codechat.core.errors import UserError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "server_error",
    504: "timeout_error",
}
# pydantic's places also name the arm of a union, such as str, Choice or literal['none', ...]; those are no fields
FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_][a-z0-9_]*")


class ApiError(UserError):
    """A request that is not answered. param: the field that is at fault, such as messages[2].content."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        named = param is None or param in message
        super().__init__(message if named else f"{param}: {message}")
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": str(self),
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def error_of(error: ValidationError) -> ApiError:
    """The first thing that pydantic found, with the field's name as a client writes it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    unknown = first["type"] == "extra_forbidden"
    loc = first["loc"]
    steps = [
        step
        for i, step in enumerate(loc)
        if isinstance(step, int) or FIELD.fullmatch(step) or (unknown and i == len(loc) - 1)
    ]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".") or None
    message = "is not known here; leave it out" if unknown else first["msg"]
    return ApiError(400, f"{param or 'the body'}: {message}", param, "unknown_parameter" if unknown else None)
