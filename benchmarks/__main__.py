"""`python -m benchmarks KIND`."""

import sys

from benchmarks import main
from codechat.cli import guarded

sys.exit(guarded(main, sys.argv[1:]))
