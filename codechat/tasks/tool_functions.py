"""The former place of `codechat.text.tool_functions`."""

from codechat.text.tool_functions import Executor, load_executors, schema_of, type_schema

__all__ = ["Executor", "load_executors", "schema_of", "type_schema"]
