"""`python -m codechat`, and `torchrun -m codechat`: the same as the `codechat` command."""

import sys

from codechat.cli import main

if __name__ == "__main__":
    sys.exit(main())
