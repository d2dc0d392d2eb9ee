"""What is wrong with a request, in words: the field, what it holds, what is expected.

pydantic finds the faults. Its words name our classes and a link to its site, so none of them
reach a client."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from codechat.core.errors import UserError, nearest
from codechat_lab.serve.neutral_fields import Unsupported

Place = tuple[str | int, ...]
Fault = Mapping[str, Any]
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "string_unicode": "a text without halves of characters",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list that is not empty",
}
LONGEST = 60  # characters of a value that are shown


class ApiError(UserError):
    """A rejected request. param: the field at fault, such as messages.2.content."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message if param is None or param in message else f"{param}: {message}")
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def api_error(faults: Sequence[Fault], body: Any, fields: list[str]) -> ApiError:
    """The error of status 400 for what pydantic found in a body: the first fault, in the
    alternative that fits best.

    fields: names that the request may have."""
    paths = [_path(fault, body) for fault in faults]
    field = paths[0]
    # of the alternatives of one field, the one whose fault lies deepest was meant
    deepest = max((path for path in paths if path[: len(field)] == field), key=len)
    found = [fault for path, fault in zip(paths, faults) if path == deepest]
    # a value of the right type was meant, whatever else is wrong with it
    meant = [fault for fault in found if not fault["type"].endswith("_type")]
    if any(fault["type"] != "literal_error" for fault in meant):
        found = [fault for fault in meant if fault["type"] != "literal_error"]
    param = ".".join(map(str, deepest)) or None
    message = f"{param or 'the body'}: {_words(found, deepest, fields)}"
    code = "unknown_parameter" if found[0]["type"] == "extra_forbidden" else None
    return ApiError(400, message, param, code)


def _words(found: Sequence[Fault], path: Place, fields: list[str]) -> str:
    fault = found[0]
    context = fault.get("ctx", {})
    match fault["type"]:
        case "missing":
            return "it is missing; give it" if path else "it is empty; expected a JSON object"
        case "json_invalid":
            return f"it is no JSON ({context.get('error')}); expected a JSON object"
        case "extra_forbidden":
            return (
                f"this field is unknown{nearest(str(path[-1]), fields) if len(path) == 1 else ''}"
            )
        case "value_error":  # our own words
            return str(context["error"])
    if isinstance(fault["input"], bytes):  # FastAPI reads JSON under its own Content-Type alone
        return "it is not marked as JSON; send the header Content-Type: application/json"
    value = json.dumps(fault["input"], default=str)
    shown = value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
    expected = [
        EXPECTED.get(fault["type"], "another value").format(**fault.get("ctx", {}))
        for fault in found
    ]
    return f"got {shown}; expected {' or '.join(dict.fromkeys(expected))}"


def _path(fault: Fault, body: Any) -> Place:
    """Where the fault lies in the body: without the names that pydantic gives to alternatives."""
    path: list[str | int] = []
    if fault["type"] == "json_invalid":
        return ()
    for place in fault["loc"][1:]:
        if isinstance(body, Mapping):
            inside = place in body
        else:
            inside = isinstance(body, list) and isinstance(place, int) and place < len(body)
        if inside:
            body = body[place]
            path.append(place)
    error = fault.get("ctx", {}).get("error")
    if fault["type"] == "missing":
        path += fault["loc"][1:][-1:]  # a missing body has no place
    elif isinstance(error, Unsupported):
        path.append(error.field)
    return tuple(path)
