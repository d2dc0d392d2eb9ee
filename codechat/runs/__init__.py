"""Run directories: where they lie, what they hold, the metrics that may be logged, checkpoints whole and sharded, `codechat runs`.

Not for drawing or judging runs: that is `reports` and `evaluation`.
"""

from codechat.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    modules=[
        "background",
        "checkpoint",
        "checkpoint_files",
        "command",
        "metrics",
        "paths",
        "planned",
        "run",
        "sharded_checkpoint",
    ],
    names={"run": ["Run"]},
)
