"""Checks by JSON schemas. Formats, such as "email", are not checked.

For formats alone the package jsonschema imports rfc3987_syntax, a second of CPU, wherever another
package, such as JupyterLab, has installed it. So it is imported here as if that were missing."""

import sys
from collections.abc import Mapping
from typing import Any

import referencing.exceptions  # jsonschema's own

UNNEEDED = "rfc3987_syntax"

if UNNEEDED in sys.modules or "jsonschema" in sys.modules:
    import jsonschema
else:
    sys.modules[UNNEEDED] = None  # type: ignore[assignment]  # Python's sign for "not there"
    try:
        import jsonschema
    finally:
        del sys.modules[UNNEEDED]

SchemaError = jsonschema.SchemaError
Unresolvable = referencing.exceptions.Unresolvable  # a reference to nothing


def check(schema: Mapping[str, Any]) -> None:
    """SchemaError for what is no schema."""
    jsonschema.Draft202012Validator.check_schema(schema)


def fits(value: Any, schema: Any, root: Mapping[str, Any] | None = None) -> bool:
    """Whether a value fits a schema, or a part of the schema `root`, to which its references
    point."""
    validator = jsonschema.Draft202012Validator(schema if root is None else root)
    return validator.evolve(schema=schema).is_valid(value)


def error_of(value: Any, schema: Mapping[str, Any]) -> jsonschema.ValidationError | None:
    """Where a value breaks a schema most; none = it fits."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return jsonschema.exceptions.best_match(errors)
