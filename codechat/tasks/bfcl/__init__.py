"""The Berkeley Function Calling Leaderboard, single turn: calls are compared with the possible answers. Evaluation
only."""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, ["cases", "rules", "sources", "syntax", "task"], {"task": ["BfclTask"]}
)
