"""Run directories: paths and states, metrics that may be logged, checkpoints whole and sharded,
`codechat runs`.

Not for plotting or judging runs: that is `reports` and `evaluation`.
"""
