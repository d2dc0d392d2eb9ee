"""AppWorld (arXiv:2407.18901): episodes on its own server over HTTP. `prepare` turns successful episodes into SFT
data."""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["prepare", "task"],
    {"task": ["AppWorldEnvironment", "AppWorldServer", "AppWorldTask"]},
)
