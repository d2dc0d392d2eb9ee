"""`python -m codechat`, and `torchrun -m codechat`: the same as the `codechat` command."""

from __future__ import annotations

import sys

from codechat.cli import main

if __name__ == "__main__":
    sys.exit(main())
