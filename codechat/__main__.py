"""`python -m codechat`, and `torchrun -m codechat`: the same as the `codechat` command."""

import sys

from codechat.cli import main

sys.exit(main())
