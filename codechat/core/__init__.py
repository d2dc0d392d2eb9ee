"""Configuration, errors, files that are never seen half written, processes and locks, HTTP, provenance, and the registry of what can be run.

Knows nothing of models or training; imports no other room, and no torch.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=["atomic_files", "command", "config", "errors", "http_client", "processes", "provenance", "registry"],
    names={
        "config": ["Settings", "default", "from_dict", "opt", "parse", "resolve", "to_dict"],
        "errors": ["UserError", "ConfigError", "DataError", "MissingFile", "RunError", "CheckpointError"],
    },
)
