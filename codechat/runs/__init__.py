"""Run directories: paths and states, metrics that may be logged, checkpoints whole and sharded, `codechat runs`.

Not for plotting or judging runs: that is `reports` and `evaluation`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=["checkpoint", "command", "metrics", "paths", "run", "sharded_checkpoint", "tracker"],
    names={"run": ["Run"]},
)
