"""What is wrong with a request, in words: the field, what it holds, what is required.

pydantic finds the faults. Its words name our classes and a link to its site, so none of them reach a client."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from codechat.core.errors import nearest
from codechat_lab.serve.protocol import ApiError

REQUIRED = {
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


def api_error(faults: Sequence[Mapping[str, Any]], body: Any, fields: list[str]) -> ApiError:
    """fields: names that the request may have. The error of status 400 for what pydantic found in a body: the first
    fault, in the alternative that fits best."""
    paths = [_path(fault, body) for fault in faults]
    # of the alternatives of one field, the one whose fault lies deepest was meant
    near = [i for i, path in enumerate(paths) if path[: len(paths[0])] == paths[0]]
    deepest = paths[max(near, key=lambda i: len(paths[i]))]
    found = [faults[i] for i in near if paths[i] == deepest]
    # a value of the right type was meant, whatever else is wrong with it
    meant = [fault for fault in found if not fault["type"].endswith("_type")]
    if any(fault["type"] != "literal_error" for fault in meant):
        found = [fault for fault in meant if fault["type"] != "literal_error"]
    param = ".".join(map(str, deepest)) or None
    unknown = found[0]["type"] == "extra_forbidden"
    message = f"{param or 'the body'}: {_words(found, deepest, fields)}"
    return ApiError(400, message, param, "unknown_parameter" if unknown else None)


def _words(found: Sequence[Mapping[str, Any]], path: tuple[str | int, ...], fields: list[str]) -> str:
    kind = found[0]["type"]
    context = found[0].get("ctx", {})
    if kind == "missing":
        return "it is missing; give it" if path else "it is empty; required is a JSON object"
    if kind == "json_invalid":
        return f"it is no JSON ({context.get('error')}); required is a JSON object"
    if kind == "extra_forbidden":
        return f"this field is unknown{nearest(str(path[-1]), fields) if len(path) == 1 else ''}"
    if kind == "value_error":  # our own words
        return str(context["error"])
    required = [REQUIRED.get(fault["type"], "another value").format(**fault.get("ctx", {})) for fault in found]
    return f"got {shown(found[0]['input'])}; required is {' or '.join(dict.fromkeys(required))}"


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _path(fault: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """Where the fault lies in the body: without the names that pydantic gives to alternatives."""
    if fault["type"] == "json_invalid":
        return ()
    places = fault["loc"][1:]
    path = []
    for number, place in enumerate(places):
        inside = isinstance(body, Mapping) and place in body
        if isinstance(body, list) and isinstance(place, int) and place < len(body):
            inside = True
        if inside:
            body = body[place]
            path.append(place)
        elif fault["type"] == "missing" and number == len(places) - 1:
            path.append(place)
    return tuple(path)
