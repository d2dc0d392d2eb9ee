"""Words of settings that advantages and losses take. No torch here: the help of commands reads
them."""

from typing import Literal

Baseline = Literal["none", "mean", "leave_one_out", "zscore"]
KLKind = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence", "token", "constant"]
