"""Function calling: one request, the tools on offer, one call. The staircase grades the call; data preparation is in
`toolbox.prepare`."""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    ["sources", "staircase", "task"],
    {"task": ["FuncallTask"], "staircase": ["STAIRCASES", "Staircase", "score_call"]},
)
