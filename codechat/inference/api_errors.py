"""Errors of a request, as OpenAI's API writes them: a status, and {"error": {message, type, param, code}}.

Left out: unexpected exceptions. They are defects: the traceback goes to stderr and the client gets a plain 500.
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
# pydantic's locations also name members of a union, such as str, Choice or literal['none', ...]; those are no fields
FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_][a-z0-9_]*")


class ApiError(UserError):
    """A request that is rejected. param: the field at fault, such as messages[2].content."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        named = param is None or param in message
        super().__init__(message if named else f"{param}: {message}")
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def error_of(error: ValidationError) -> ApiError:
    """The first error of pydantic, with the field's name as a client writes it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    unknown, loc = first["type"] == "extra_forbidden", first["loc"]
    named = (
        s for i, s in enumerate(loc) if isinstance(s, int) or FIELD.fullmatch(s) or (unknown and i == len(loc) - 1)
    )
    param = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in named).removeprefix(".") or None
    message = "is not known here; leave it out" if unknown else first["msg"]
    return ApiError(400, f"{param or 'the body'}: {message}", param, "unknown_parameter" if unknown else None)
