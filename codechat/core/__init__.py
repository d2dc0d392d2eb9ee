"""Configuration, errors, files that are never seen half written, processes and locks, HTTP, provenance, and the registry of what can be run.

Knows nothing of models or training; imports no other room, and no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
        "atomic_files",
        "command",
        "config",
        "errors",
        "fields",
        "http_client",
        "processes",
        "provenance",
        "registry",
    ],
    submod_attrs={
        "config": ["opt", "parse", "resolve", "from_dict", "to_dict"],
        "errors": ["UserError", "ConfigError", "DataError", "MissingFile", "RunError", "CheckpointError"],
    },
)
